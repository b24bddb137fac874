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
  static constexpr int kRowTile = 8;  // product of rows: 8 x 2 accumulators + 8 weights + 4 spread activations of 32 registers
  static constexpr int kRowGroups = 2;
  static constexpr int kPanelRows = 6;  // product of panels: 6 x 4 accumulators + 4 B + 1 A
  static constexpr int kPanelVecs = 4;
  static constexpr int kOuterRanks = 8;  // outer product: 8 x 2 accumulators
  using F = __m512;
  using W = __m512i;

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

  // Codes of coded formats, zero-extended; lanes past n hold anything that may be decoded.
  static W bytes(const char* p, int n) { return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask(n), p)); }
  // Two in a byte, the low one first. Bits above the lowest four are anything.
  static W nibbles(const char* p, int n) {
    const W pairs = _mm512_cvtepu8_epi64(_mm_maskz_loadu_epi8(mask((n + 1) / 2), p));
    return _mm512_or_si512(pairs, _mm512_slli_epi64(pairs, 28));
  }
  static W signed_bytes(const char* p, int n) { return _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask(n), p)); }
  static W shifted(W x, int right) { return _mm512_srl_epi32(x, _mm_cvtsi32_si128(right)); }
  // The same of two words of eight columns, in AWQ's order; `col` is a multiple of eight, and so is n.
  static W awq(const char* row, int64_t col, int n) {
    const __m128i words = _mm_maskz_loadu_epi32(__mmask8((1 << n / 8) - 1), row + col / 2);
    const W each = _mm512_permutexvar_epi32(_mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(1), 1),
                                            _mm512_castsi128_si512(words));
    const W shifts = _mm512_broadcast_i64x4(_mm256_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28));
    return _mm512_srlv_epi32(each, shifts);
  }
  static F lookup16(const float* table, W index) { return _mm512_permutexvar_ps(index, _mm512_load_ps(table)); }
  static F to_float(W x) { return _mm512_cvtepi32_ps(x); }
  static F load_fp16_n(const char* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask(n), p)); }
  // One number in all lanes.
  static F half(const char* p) {
    int16_t bits;
    __builtin_memcpy(&bits, p, 2);
    return _mm512_cvtph_ps(_mm256_set1_epi16(bits));
  }
  static F e8m0(W code) {  // 2^(code - 127): 0 is subnormal, 255 NaN
    W bits = _mm512_slli_epi32(code, 23);
    bits = _mm512_mask_mov_epi32(bits, _mm512_testn_epi32_mask(code, code), _mm512_set1_epi32(0x00400000));
    return floats(
        _mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(code, _mm512_set1_epi32(255)), _mm512_set1_epi32(0x7fc00000)));
  }
  static F e4m3(W code) {
    const W magnitude = _mm512_and_si512(code, _mm512_set1_epi32(0x7f));
    const W normal = _mm512_add_epi32(_mm512_slli_epi32(magnitude, 20), _mm512_set1_epi32(120 << 23));
    const F small = _mm512_mul_ps(_mm512_cvtepi32_ps(magnitude), set1(0x1p-9f));
    W bits = words(_mm512_mask_mov_ps(floats(normal), _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(8)), small));
    bits =
        _mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f)), _mm512_set1_epi32(0x7fc00000));
    const W sign = _mm512_slli_epi32(_mm512_and_si512(code, _mm512_set1_epi32(0x80)), 24);
    return floats(_mm512_or_si512(bits, sign));
  }

  // 32 columns to bf16 at a time, see decode.inl.
  static constexpr bool kHasRuns = true;
  static W run(F low, F high) { return (W)_mm512_cvtne2ps_pbh(high, low); }
  static void store_run(char* out, F low, F high) { store_words(out, run(low, high)); }
  static F permute(F x, W lanes) { return _mm512_permutexvar_ps(lanes, x); }
  // A table of the products for each half: 16 codes are fewer than 32 columns.
  static W lookup_run(const char* codes, const float* table, float low, float high) {
    const F values = _mm512_load_ps(table);
    const W products = (W)_mm512_cvtne2ps_pbh(mul(values, set1(high)), mul(values, set1(low)));
    const W bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const W pairs = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
    const W half = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    const W index = _mm512_ternarylogic_epi32(pairs, _mm512_set1_epi16(15), half, 0xea);  // pairs & 15 | half
    return _mm512_permutexvar_epi16(index, products);
  }
  // One for both; then it does not matter which half of the products is looked up.
  static W lookup_run(const char* codes, const float* table, float scale) {
    const F values = mul(_mm512_load_ps(table), set1(scale));
    const W bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    return _mm512_permutexvar_epi16(_mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12)), run(values, values));
  }
  // 32 codes of four bits as 16-bit lanes: of 16 bytes first the low halves, then the high ones; or each half of 32 bytes.
  static W halves_apart(const char* p) {
    const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const W both = _mm512_inserti64x4(_mm512_castsi256_si512(bytes), _mm256_srli_epi16(bytes, 4), 1);
    return _mm512_and_si512(both, _mm512_set1_epi16(15));
  }
  static void halves_of_each(const char* p, W halves[2]) {
    const W bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    halves[0] = _mm512_and_si512(bytes, _mm512_set1_epi16(15));
    halves[1] = _mm512_srli_epi16(bytes, 4);
  }
  // What such codes stand for, once for all of them.
  static void lookup_wide_run(char* out, W codes, F values) {
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(codes, _mm512_castsi256_si512(to_bf16(values))));
  }
  // 64 codes, less 32, times a factor for each 16: four bits in one half of 64 bytes, two of each of 32 bytes, then the next
  // two.
  static void six_bits_run(char* out, const char* low, const char* high, int half, const float* factors) {
    const W lower = _mm512_srl_epi16(_mm512_loadu_si512(low), _mm_cvtsi32_si128(4 * half));
    const W twice = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(high)));
    const W counts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(2), 1);
    const W upper = _mm512_srlv_epi16(twice, _mm512_add_epi16(counts, _mm512_set1_epi16(short(4 * half))));
    const W codes = _mm512_sub_epi8(_mm512_or_si512(_mm512_and_si512(lower, _mm512_set1_epi8(15)),
                                                    _mm512_slli_epi16(_mm512_and_si512(upper, _mm512_set1_epi8(3)), 4)),
                                    _mm512_set1_epi8(32));
    const auto part = [&](__m128i bytes, int i) { return mul(to_float(_mm512_cvtepi8_epi32(bytes)), set1(factors[i])); };
    store_run(out, part(_mm512_castsi512_si128(codes), 0), part(_mm512_extracti32x4_epi32(codes, 1), 1));
    store_run(out + 64, part(_mm512_extracti32x4_epi32(codes, 2), 2), part(_mm512_extracti32x4_epi32(codes, 3), 3));
  }
  // The eight scales and eight offsets of a block of Q4_K, see decode_blocks.inl.
  static void six_bit_numbers(const char* block, float* numbers) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block));  // two fp16 numbers, three words
    const __m128i lower = _mm_and_si128(_mm_srlv_epi32(_mm_shuffle_epi32(packed, 0xed), _mm_setr_epi32(0, 0, 0, 4)),
                                        _mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f));
    const __m128i upper =
        _mm_and_si128(_mm_srli_epi32(_mm_shuffle_epi32(packed, 0x84), 2), _mm_setr_epi32(0, 0x30303030, 0, 0x30303030));
    const W codes = _mm512_cvtepu8_epi32(_mm_or_si128(lower, upper));
    const W second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(1), 1);
    const F halves = _mm512_permutexvar_ps(second, _mm512_cvtph_ps(_mm256_castsi128_si256(packed)));
    const W sign = _mm512_slli_epi32(second, 31);
    store(numbers, mul(to_float(codes), floats(_mm512_xor_si512(words(halves), sign))));
  }
  static W e4m3_run(const char* codes, float low, float high) {
    const W code = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    const W magnitude = _mm512_and_si512(code, _mm512_set1_epi16(0x7f));
    W bits = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
    // 0 .. 7 times 2^-9
    const W small = _mm512_set4_epi64(0x3c603c403c203c00, 0x3bc03b803b000000, 0x3c603c403c203c00, 0x3bc03b803b000000);
    bits = _mm512_mask_permutexvar_epi16(bits, _mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(8)), magnitude, small);
    bits = _mm512_mask_mov_epi16(bits, _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f)), _mm512_set1_epi16(0x7fc0));
    bits = _mm512_or_si512(bits, _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(0x80)), 8));
    return run(mul(widen(_mm512_castsi512_si256(bits)), set1(low)), mul(widen(_mm512_extracti64x4_epi64(bits, 1)), set1(high)));
  }

  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F clamp(F x, float low, float high) {  // NaN passes: min and max return their second operand then
    return _mm512_min_ps(set1(high), _mm512_max_ps(set1(low), x));
  }
  static F within(F x, F of, float low, float high) {  // x, or 0 where `of` lies outside; its NaN does not
    const __mmask16 inside = _mm512_cmp_ps_mask(of, set1(low), _CMP_NLT_UQ) & _mm512_cmp_ps_mask(of, set1(high), _CMP_NGT_UQ);
    return _mm512_maskz_mov_ps(inside, x);
  }
  static F nearest(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F pow2(F n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
  }
  static float sum(F x) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 quad = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    const __m128 pairs = _mm_add_ps(quad, _mm_movehl_ps(quad, quad));
    return _mm_cvtss_f32(_mm_add_ss(pairs, _mm_movehdup_ps(pairs)));
  }

  static F floats(W x) { return _mm512_castsi512_ps(x); }
  static W words(F x) { return _mm512_castps_si512(x); }
  static W load_words(const void* p) { return _mm512_loadu_si512(p); }
  static W load_words_n(const void* p, int n) { return _mm512_maskz_loadu_epi32(mask(n), p); }
  static void store_words(void* p, W x) { _mm512_storeu_si512(p, x); }
  static W broadcast(const void* p) {
    int32_t word;
    __builtin_memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
  }
  template <int j>
  static W spread(W x) {
    return _mm512_shuffle_epi32(x, _MM_PERM_ENUM(j * 0x55));
  }
  static void transpose_quads(const W in[4], W out[4]) {
    const W a = _mm512_unpacklo_epi32(in[0], in[1]), b = _mm512_unpackhi_epi32(in[0], in[1]);
    const W c = _mm512_unpacklo_epi32(in[2], in[3]), d = _mm512_unpackhi_epi32(in[2], in[3]);
    out[0] = _mm512_unpacklo_epi64(a, c);
    out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d);
    out[3] = _mm512_unpackhi_epi64(b, d);
  }
  static void transpose(const char* rows, ptrdiff_t stride, W out[16]) {
    // Rows i and i + 8 share a register, a half of each: half the loads that quarters take, and one more shuffle.
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const auto load = [&](int row) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows + row * stride + 32 * half));
      };
      W in[8], quads[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) in[i] = _mm512_inserti64x4(_mm512_castsi256_si512(load(i)), load(i + 8), 1);
      transpose_quads(in, quads);          // [j]: words j, j + 4 of rows 0 .. 3, then of rows 8 .. 11
      transpose_quads(in + 4, quads + 4);  // of rows 4 .. 7, 12 .. 15
      const W low = _mm512_set_epi64(13, 12, 5, 4, 9, 8, 1, 0), high = _mm512_set_epi64(15, 14, 7, 6, 11, 10, 3, 2);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        out[8 * half + j] = _mm512_permutex2var_epi64(quads[j], low, quads[4 + j]);
        out[8 * half + 4 + j] = _mm512_permutex2var_epi64(quads[j], high, quads[4 + j]);
      }
    }
  }
  static void add_quads(F acc, float* out) {
    __m128 sum = _mm_add_ps(_mm_loadu_ps(out), _mm512_castps512_ps128(acc));
    sum = _mm_add_ps(sum, _mm512_extractf32x4_ps(acc, 1));
    sum = _mm_add_ps(sum, _mm512_extractf32x4_ps(acc, 2));
    _mm_storeu_ps(out, _mm_add_ps(sum, _mm512_extractf32x4_ps(acc, 3)));
  }
};

// Words of bf16 pairs.
struct Bf16Dot {
  static constexpr int kGroup = 2;
  static Vec::F dot(Vec::F acc, Vec::W a, Vec::W b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
  // 16 columns of two rows (odd null: the last row has no partner) as words.
  static Vec::W pair(bool is_bf16, const char* even, const char* odd, int n) {
    const auto halves = [&](const char* p) {
      return _mm512_cvtepu16_epi32(is_bf16 ? _mm256_maskz_loadu_epi16(Vec::mask(n), p) : Vec::to_bf16(Vec::load_n(p, n)));
    };
    const Vec::W words = halves(even);
    return odd ? _mm512_or_si512(words, _mm512_slli_epi32(halves(odd), 16)) : words;
  }
  // 32 columns of two rows of bf16 as two vectors of words.
  static void pairs(Vec::W a, Vec::W b, Vec::W out[2]) {
    const __m512i low = _mm512_set_epi64(0x002f000f002e000e, 0x002d000d002c000c, 0x002b000b002a000a, 0x0029000900280008,
                                         0x0027000700260006, 0x0025000500240004, 0x0023000300220002, 0x0021000100200000);
    out[0] = _mm512_permutex2var_epi16(a, low, b);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    out[1] = _mm512_permutex2var_epi16(a, high, b);
  }
  static void interleave(char* out, const char* even, const char* odd) {
    Vec::W words[2];
    pairs(Vec::load_words(even), Vec::load_words(odd), words);
    Vec::store_words(out, words[0]);
    Vec::store_words(out + 64, words[1]);
  }
};

}  // namespace
