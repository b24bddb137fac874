// AMX tile registers. They belong to a thread, hold nothing until configured, and configuring clears them.
//
// Assembly instead of intrinsics: GCC's are macros that take a literal tile number, no template parameter, and do not tell the
// compiler that loading a tile or a configuration reads memory.
#pragma once
#include <stddef.h>

#include "tile_config.h"

namespace {

struct Tiles {
  static void configure(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory"); }
  static void release() { __asm__ volatile("tilerelease"); }
  template <int kTarget>
  static void zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTarget));
  }
  // Rows begin `stride` bytes apart, anywhere.
  template <int kTarget>
  static void load(const void* rows, ptrdiff_t stride) {
    __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTarget), "r"(rows), "r"(stride) : "memory");
  }
  template <int kSource>
  static void store(void* rows, ptrdiff_t stride) {
    __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kSource), "r"(rows), "r"(stride) : "memory");
  }
  // C[m][n] += sum over words k of A[m][k] * B[k][n], words being pairs of bf16
  template <int kC, int kA, int kB>
  static void dot() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
};

}  // namespace
