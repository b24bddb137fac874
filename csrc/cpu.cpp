#include "cpu.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <stdexcept>

namespace ktft {

namespace {

// Of palette 1 (CPUID leaf 1Dh): 8 tiles of 1024 bytes, 16 rows of 64 bytes.
bool has_usual_palette() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(0x1d, 0, &a, &b, &c, &d) || a < 1) return false;  // a: the highest palette
  if (!__get_cpuid_count(0x1d, 1, &a, &b, &c, &d)) return false;
  const unsigned total_bytes = a & 0xffff, tile_bytes = a >> 16, row_bytes = b & 0xffff, tiles = b >> 16, rows = c & 0xffff;
  return total_bytes == 8192 && tile_bytes == 1024 && row_bytes == 64 && tiles == 8 && rows == 16;
}

// Holds for all threads of the process, and for children until they exec. Asking again changes nothing.
bool ask_for_tile_registers() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

CpuFeatures detect_cpu(bool ask_for_tiles) {
  CpuFeatures f;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return f;
  f.fma = c >> 12 & 1;
  f.f16c = c >> 29 & 1;
  if (c >> 27 & 1) {  // OSXSAVE: XGETBV exists
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    f.os_ymm = (low & 0x6) == 0x6;    // SSE and AVX state
    f.os_zmm = (low & 0xe6) == 0xe6;  // and opmask, upper ZMM, ZMM16-31
    f.os_amx = (low >> 17 & 3) == 3;  // tile configuration and data
  }
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
    const unsigned subleaves = a;
    f.avx2 = b >> 5 & 1;
    f.avx512f = b >> 16 & 1;
    f.avx512dq = b >> 17 & 1;
    f.avx512bw = b >> 30 & 1;
    f.avx512vl = b >> 31 & 1;
    f.amx_bf16 = d >> 22 & 1;
    f.amx_tile = d >> 24 & 1;
    if (subleaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) f.avx512_bf16 = a >> 5 & 1;
  }
  f.amx_palette = f.amx_tile && has_usual_palette();
  if (ask_for_tiles && f.amx_tile && f.amx_bf16 && f.os_amx && f.amx_palette) f.amx_permission = ask_for_tile_registers();
  return f;
}

const char* isa_name(Isa isa) {
  static const char* const names[kIsaCount] = {"scalar", "avx2", "avx512bf16", "amx", "amx-soft"};
  return names[int(isa)];
}

std::string missing_for(Isa isa, const CpuFeatures& f) {
  std::string missing;
  const auto need = [&](bool has, const char* name) {
    if (!has) missing += missing.empty() ? name : std::string(" ") + name;
  };
  if (isa == Isa::amx_soft) return missing;
  if (isa >= Isa::avx2) {
    need(f.avx2, "avx2");
    need(f.fma, "fma");
    need(f.f16c, "f16c");
    need(f.os_ymm, "os_ymm");
  }
  if (isa >= Isa::avx512bf16) {
    need(f.avx512f, "avx512f");
    need(f.avx512bw, "avx512bw");
    need(f.avx512dq, "avx512dq");
    need(f.avx512vl, "avx512vl");
    need(f.avx512_bf16, "avx512_bf16");
    need(f.os_zmm, "os_zmm");
  }
  if (isa >= Isa::amx) {
    need(f.amx_tile, "amx_tile");
    need(f.amx_bf16, "amx_bf16");
    need(f.os_amx || !f.amx_tile, "os_amx");
    need(f.amx_palette || !f.amx_tile, "amx_palette");
    if (missing.empty()) need(f.amx_permission, "amx_permission");
  }
  return missing;
}

const Kernels& kernels_for(Isa isa, Format compute) {
  static const Kernels* const tables[kIsaCount][2] = {{&kScalarKernels[0], &kScalarKernels[1]},
                                                      {&kAvx2Kernels[0], &kAvx2Kernels[1]},
                                                      {&kAvx512Bf16Kernels[0], &kAvx512Bf16Kernels[1]},
                                                      {&kAmxKernels, &kAvx512Bf16Kernels[1]},
                                                      {&kAmxSoftKernels, &kScalarKernels[1]}};
  if (int(isa) < 0 || int(isa) >= kIsaCount) throw std::invalid_argument("unknown ISA level");
  static const CpuFeatures without_tiles = detect_cpu(false);
  const auto with_tiles = [] {
    static const CpuFeatures features = detect_cpu(true);
    return features;
  };
  const std::string missing = missing_for(isa, isa == Isa::amx ? with_tiles() : without_tiles);
  if (!missing.empty()) throw std::invalid_argument(std::string("ISA level ") + isa_name(isa) + " needs " + missing);
  return *tables[int(isa)][compute == kFp32];
}

}  // namespace ktft
