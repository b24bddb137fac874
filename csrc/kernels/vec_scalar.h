// One lane in plain C++: the twin that every vector unit is checked against.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace {

struct Vec {
  static constexpr int kLanes = 1;
  static constexpr int kRowTile = 2;    // nt: rows per tile
  static constexpr int kPanelRows = 2;  // nn: rows per tile
  static constexpr int kPanelVecs = 4;  // nn: vectors per tile
  static constexpr int kOuterRanks = 4;  // ranks x 2 vectors per tile of outer products
  using F = float;

  static F zero() { return 0.0f; }
  static F set1(float x) { return x; }
  static F load(const void* p) {
    F x;
    memcpy(&x, p, 4);
    return x;
  }
  static F load_n(const void* p, int) { return load(p); }
  static void store(void* p, F x) { memcpy(p, &x, 4); }
  static void store_n(void* p, F x, int) { store(p, x); }
  static F load_bf16(const void* p) {
    uint16_t half;
    memcpy(&half, p, 2);
    uint32_t bits = uint32_t(half) << 16;
    F x;
    memcpy(&x, &bits, 4);
    return x;
  }
  static F load_bf16_n(const void* p, int) { return load_bf16(p); }
  // Round to nearest even; a NaN stays a (quiet) NaN.
  static uint16_t to_bf16(F x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
  }
  static void store_bf16(void* p, F x) {
    uint16_t half = to_bf16(x);
    memcpy(p, &half, 2);
  }
  static void store_bf16_n(void* p, F x, int) { store_bf16(p, x); }
  static F round_bf16(F x) {
    uint16_t half = to_bf16(x);
    return load_bf16(&half);
  }

  static F fma(F a, F b, F c) { return a * b + c; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F clamp(F x, float low, float high) { return x < low ? low : (x > high ? high : x); }  // NaN passes
  static F nearest(F x) { return rintf(x); }
  static F pow2(F n) {  // 2^n for integral n in [-126, 127]
    uint32_t bits = uint32_t(int32_t(n) + 127) << 23;
    F x;
    memcpy(&x, &bits, 4);
    return x;
  }
  static float sum(F x) { return x; }
  static void sum4(const F acc[4], float out[4]) {
    for (int i = 0; i < 4; ++i) out[i] = acc[i];
  }
};

}  // namespace
