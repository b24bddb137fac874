// Eight fp32 lanes, AVX2 + FMA. bf16 is widened by a shift, so bf16 mode multiplies exact bf16 values in fp32.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace {

struct Vec {
  static constexpr int kLanes = 8;
  static constexpr int kRowTile = 3;    // 3 x 4 accumulators + 3 A + 1 B of 16 registers
  static constexpr int kPanelRows = 6;  // 6 x 2 accumulators + 2 B + 1 A
  static constexpr int kPanelVecs = 2;
  static constexpr int kOuterRanks = 4;  // ranks x 2 vectors per tile of outer products
  using F = __m256;

  static __m256i mask(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }
  static F zero() { return _mm256_setzero_ps(); }
  static F set1(float x) { return _mm256_set1_ps(x); }
  static F load(const void* p) { return _mm256_loadu_ps(static_cast<const float*>(p)); }
  static F load_n(const void* p, int n) { return _mm256_maskload_ps(static_cast<const float*>(p), mask(n)); }
  static void store(void* p, F x) { _mm256_storeu_ps(static_cast<float*>(p), x); }
  static void store_n(void* p, F x, int n) { _mm256_maskstore_ps(static_cast<float*>(p), mask(n), x); }
  static F widen(__m128i halves) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16)); }
  static F load_bf16(const void* p) { return widen(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
  static F load_bf16_n(const void* p, int n) {
    alignas(16) uint16_t halves[8] = {0};
    memcpy(halves, p, size_t(n) * 2);
    return load_bf16(halves);
  }
  static __m256i rounded_bits(F x) {  // RNE to bf16, left in the upper half of each lane; NaN stays a quiet NaN
    __m256i bits = _mm256_castps_si256(x);
    __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), lsb);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), nan);
    return _mm256_and_si256(rounded, _mm256_set1_epi32(int(0xffff0000u)));
  }
  static F round_bf16(F x) { return _mm256_castsi256_ps(rounded_bits(x)); }
  static void store_bf16(void* p, F x) {
    __m256i halves = _mm256_srli_epi32(rounded_bits(x), 16);
    __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    _mm_storeu_si128(static_cast<__m128i*>(p), packed);
  }
  static void store_bf16_n(void* p, F x, int n) {
    alignas(16) uint16_t halves[8];
    store_bf16(halves, x);
    memcpy(p, halves, size_t(n) * 2);
  }

  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F clamp(F x, float low, float high) {  // NaN passes: min and max return their second operand then
    return _mm256_min_ps(set1(high), _mm256_max_ps(set1(low), x));
  }
  static F nearest(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F pow2(F n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
  }
  // One tree for every horizontal sum: halves, then neighbours twice.
  static void sum4(const F acc[4], float out[4]) {
    __m128 half[4];
    for (int i = 0; i < 4; ++i) half[i] = _mm_add_ps(_mm256_castps256_ps128(acc[i]), _mm256_extractf128_ps(acc[i], 1));
    _mm_storeu_ps(out, _mm_hadd_ps(_mm_hadd_ps(half[0], half[1]), _mm_hadd_ps(half[2], half[3])));
  }
  static float sum(F x) {
    const F acc[4] = {x, x, x, x};
    float out[4];
    sum4(acc, out);
    return out[0];
  }
};

}  // namespace
