// Sixteen fp32 lanes, and sixteen words of bf16 pairs with vdpbf16ps (AVX-512 F/BW/DQ/VL + BF16).
//
// vdpbf16ps accumulates, per lane, the odd then the even product of a pair with fused multiply-adds in fp32; denormal inputs
// count as zero. Latency 6, one per cycle (Zen 4): a tile needs at least 6 accumulators.
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace {

struct Vec {
  static constexpr int kLanes = 16;
  static constexpr int kRowTile = 6;    // 6 x 4 accumulators + 4 B + 1 A of 32 registers
  static constexpr int kPanelRows = 6;  // 6 x 4 accumulators + 4 B + 1 A
  static constexpr int kPanelVecs = 4;
  static constexpr int kOuterRanks = 8;  // ranks x 2 vectors per tile of outer products
  using F = __m512;

  static __mmask16 mask(int n) { return __mmask16((1u << n) - 1); }
  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F load(const void* p) { return _mm512_loadu_ps(p); }
  static F load_n(const void* p, int n) { return _mm512_maskz_loadu_ps(mask(n), p); }
  static void store(void* p, F x) { _mm512_storeu_ps(p, x); }
  static void store_n(void* p, F x, int n) { _mm512_mask_storeu_ps(p, mask(n), x); }
  static F widen(__m256i halves) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16)); }
  static F load_bf16(const void* p) { return widen(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
  static F load_bf16_n(const void* p, int n) { return widen(_mm256_maskz_loadu_epi16(mask(n), p)); }
  static __m256i to_bf16(F x) { return (__m256i)_mm512_cvtneps_pbh(x); }
  static F round_bf16(F x) { return widen(to_bf16(x)); }
  static void store_bf16(void* p, F x) { _mm256_storeu_si256(static_cast<__m256i*>(p), to_bf16(x)); }
  static void store_bf16_n(void* p, F x, int n) { _mm256_mask_storeu_epi16(p, mask(n), to_bf16(x)); }

  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F clamp(F x, float low, float high) {  // NaN passes: min and max return their second operand then
    return _mm512_min_ps(set1(high), _mm512_max_ps(set1(low), x));
  }
  static F nearest(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F pow2(F n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
  }
  // One tree for every horizontal sum: within each quarter elements 0+2, 1+3, then both; then the quarters 0+2, 1+3, then both.
  static __m128 sum4(const F acc[4]) {
    const F ab = _mm512_add_ps(_mm512_unpacklo_ps(acc[0], acc[1]), _mm512_unpackhi_ps(acc[0], acc[1]));
    const F cd = _mm512_add_ps(_mm512_unpacklo_ps(acc[2], acc[3]), _mm512_unpackhi_ps(acc[2], acc[3]));
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const F abcd = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  }
  static void sum4(const F acc[4], float out[4]) { _mm_storeu_ps(out, sum4(acc)); }
  static float sum(F x) {
    const F acc[4] = {x, x, x, x};
    float out[4];
    sum4(acc, out);
    return out[0];
  }
};

// Words of bf16 pairs.
struct Bf16Dot {
  static constexpr int kGroup = 2;
  using X = __m512i;
  static X load(const void* p) { return _mm512_loadu_si512(p); }
  static X load_n(const void* p, int n) { return _mm512_maskz_loadu_epi32(Vec::mask(n), p); }
  static X broadcast(const void* p) {
    int32_t word;
    __builtin_memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
  }
  static Vec::F dot(Vec::F acc, X a, X b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
  static __m256i load_rounded(bool is_bf16, const char* p, int n) {
    return is_bf16 ? _mm256_maskz_loadu_epi16(Vec::mask(n), p) : Vec::to_bf16(Vec::load_n(p, n));
  }
  // Two vectors of words of a panel from two rows of 32 bf16.
  static void interleave(char* out, const char* even, const char* odd) {
    const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
    const __m512i low = _mm512_set_epi64(0x002f000f002e000e, 0x002d000d002c000c, 0x002b000b002a000a, 0x0029000900280008,
                                         0x0027000700260006, 0x0025000500240004, 0x0023000300220002, 0x0021000100200000);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(a, low, b));
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    _mm512_storeu_si512(out + 64, _mm512_permutex2var_epi16(a, high, b));
  }
  // n words of a panel: n columns of two neighbouring rows interleaved (null: the last row has no partner).
  static void store_pairs(char* out, bool is_bf16, const char* even, const char* odd, int n) {
    X words = _mm512_cvtepu16_epi32(load_rounded(is_bf16, even, n));
    if (odd) words = _mm512_or_si512(words, _mm512_slli_epi32(_mm512_cvtepu16_epi32(load_rounded(is_bf16, odd, n)), 16));
    _mm512_mask_storeu_epi32(out, Vec::mask(n), words);
  }
};

}  // namespace
