// Eight fp32 lanes, AVX2 + FMA. bf16 is widened by a shift, so bf16 mode multiplies exact bf16 values in fp32.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace {

struct Vec {
  static constexpr int kLanes = 8;
  static constexpr int kRowTile = 4;  // product of rows: 4 accumulators + 4 weights + 4 spread activations + 2
  static constexpr int kRowGroups = 1;
  static constexpr int kPanelRows = 6;  // product of panels: 6 x 2 accumulators + 2 B + 1 A of 16 registers
  static constexpr int kPanelVecs = 2;
  static constexpr int kOuterRanks = 4;  // outer product: 4 x 2 accumulators
  using F = __m256;
  using W = __m256i;

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

  // Codes of coded formats, zero-extended; lanes past n hold anything that may be decoded.
  static W bytes(const char* p, int n) {
    uint64_t eight = 0;
    memcpy(&eight, p, size_t(n));
    return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(eight)));
  }
  // Two in a byte, the low one first. Bits above the lowest four are anything.
  static W nibbles(const char* p, int n) {
    uint32_t four = 0;
    memcpy(&four, p, size_t(n + 1) / 2);
    const W pairs = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(int32_t(four)));
    return _mm256_or_si256(pairs, _mm256_slli_epi64(pairs, 28));
  }
  static W signed_bytes(const char* p, int n) {
    uint64_t eight = 0;
    memcpy(&eight, p, size_t(n));
    return _mm256_cvtepi8_epi32(_mm_cvtsi64_si128(int64_t(eight)));
  }
  static W shifted(W x, int right) { return _mm256_srl_epi32(x, _mm_cvtsi32_si128(right)); }
  // The same of a word of eight columns, in AWQ's order; `col` is a multiple of eight.
  static W awq(const char* row, int64_t col, int) {
    const W shifts = _mm256_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28);
    return _mm256_srlv_epi32(broadcast(row + col / 2), shifts);
  }
  static F lookup16(const float* table, W index) {
    const F low = _mm256_permutevar8x32_ps(_mm256_load_ps(table), index);
    const F high = _mm256_permutevar8x32_ps(_mm256_load_ps(table + 8), index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
  }
  static F to_float(W x) { return _mm256_cvtepi32_ps(x); }
  static F load_fp16_n(const char* p, int n) {
    alignas(16) uint16_t halves[8] = {0};
    memcpy(halves, p, size_t(n) * 2);
    return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(halves)));
  }
  // One number in all lanes.
  static F half(const char* p) {
    int16_t bits;
    memcpy(&bits, p, 2);
    return _mm256_cvtph_ps(_mm_set1_epi16(bits));
  }
  static F e8m0(W code) {  // 2^(code - 127): 0 is subnormal, 255 NaN
    W bits = _mm256_slli_epi32(code, 23);
    bits = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x00400000), _mm256_cmpeq_epi32(code, _mm256_setzero_si256()));
    return floats(_mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7fc00000), _mm256_cmpeq_epi32(code, _mm256_set1_epi32(255))));
  }
  static F e4m3(W code) {
    const W magnitude = _mm256_and_si256(code, _mm256_set1_epi32(0x7f));
    const W normal = _mm256_add_epi32(_mm256_slli_epi32(magnitude, 20), _mm256_set1_epi32(120 << 23));
    const F small = _mm256_mul_ps(_mm256_cvtepi32_ps(magnitude), set1(0x1p-9f));
    const W is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude);
    const W is_nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f));
    W bits = _mm256_blendv_epi8(normal, words(small), is_small);
    bits = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7fc00000), is_nan);
    const W sign = _mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(0x80)), 24);
    return floats(_mm256_or_si256(bits, sign));
  }
  static constexpr bool kHasRuns = false;

  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F clamp(F x, float low, float high) {  // NaN passes: min and max return their second operand then
    return _mm256_min_ps(set1(high), _mm256_max_ps(set1(low), x));
  }
  static F within(F x, F of, float low, float high) {  // x, or 0 where `of` lies outside; its NaN does not
    const F inside = _mm256_and_ps(_mm256_cmp_ps(of, set1(low), _CMP_NLT_UQ), _mm256_cmp_ps(of, set1(high), _CMP_NGT_UQ));
    return _mm256_and_ps(inside, x);
  }
  static F nearest(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F pow2(F n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
  }
  static float sum(F x) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 pairs = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(pairs, _mm_movehdup_ps(pairs)));
  }

  static F floats(W x) { return _mm256_castsi256_ps(x); }
  static W words(F x) { return _mm256_castps_si256(x); }
  static W load_words(const void* p) { return _mm256_loadu_si256(static_cast<const W*>(p)); }
  static W load_words_n(const void* p, int n) { return words(load_n(p, n)); }
  static void store_words(void* p, W x) { _mm256_storeu_si256(static_cast<W*>(p), x); }
  static W broadcast(const void* p) { return words(_mm256_broadcast_ss(static_cast<const float*>(p))); }
  template <int j>
  static W spread(W x) {
    return _mm256_shuffle_epi32(x, j * 0x55);
  }
  static void transpose_quads(const W in[4], W out[4]) {
    const W a = _mm256_unpacklo_epi32(in[0], in[1]), b = _mm256_unpackhi_epi32(in[0], in[1]);
    const W c = _mm256_unpacklo_epi32(in[2], in[3]), d = _mm256_unpackhi_epi32(in[2], in[3]);
    out[0] = _mm256_unpacklo_epi64(a, c);
    out[1] = _mm256_unpackhi_epi64(a, c);
    out[2] = _mm256_unpacklo_epi64(b, d);
    out[3] = _mm256_unpackhi_epi64(b, d);
  }
  static void transpose(const char* rows, ptrdiff_t stride, W out[8]) {
    for (int q = 0; q < 2; ++q) {
      W in[4];
      for (int i = 0; i < 4; ++i) {
        const auto quad = [&](int row) {
          return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + row * stride + 16 * q));
        };
        in[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(quad(i)), quad(i + 4), 1);
      }
      transpose_quads(in, out + 4 * q);
    }
  }
  static void add_quads(F acc, float* out) {
    const __m128 low = _mm_add_ps(_mm_loadu_ps(out), _mm256_castps256_ps128(acc));
    _mm_storeu_ps(out, _mm_add_ps(low, _mm256_extractf128_ps(acc, 1)));
  }
};

}  // namespace
