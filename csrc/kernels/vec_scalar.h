// Four lanes in plain C++: the twin that every vector unit is checked against.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace {

struct Vec {
  static constexpr int kLanes = 4;
  static constexpr int kRowTile = 2;     // product of rows: rows per tile
  static constexpr int kRowGroups = 1;   //                  groups of 4 weight rows per tile
  static constexpr int kPanelRows = 2;   // product of panels: rows per tile
  static constexpr int kPanelVecs = 2;   //                    vectors per tile
  static constexpr int kOuterRanks = 4;  // outer product: ranks x 2 vectors per tile
  struct F {
    float lane[4];
  };
  struct W {
    uint32_t lane[4];
  };

  template <class Function>
  static F each(Function f) {
    return {{f(0), f(1), f(2), f(3)}};
  }
  static F floats(W x) {
    F y;
    memcpy(&y, &x, sizeof y);
    return y;
  }
  static W words(F x) {
    W y;
    memcpy(&y, &x, sizeof y);
    return y;
  }

  static F zero() { return {{0, 0, 0, 0}}; }
  static F set1(float x) { return {{x, x, x, x}}; }
  static F load(const void* p) {
    F x;
    memcpy(&x, p, sizeof x);
    return x;
  }
  static F load_n(const void* p, int n) {
    F x = zero();
    memcpy(&x, p, size_t(n) * 4);
    return x;
  }
  static void store(void* p, F x) { memcpy(p, &x, sizeof x); }
  static void store_n(void* p, F x, int n) { memcpy(p, &x, size_t(n) * 4); }
  static float widen(uint16_t half) {
    const uint32_t bits = uint32_t(half) << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
  }
  static F load_bf16(const void* p) { return load_bf16_n(p, 4); }
  static F load_bf16_n(const void* p, int n) {
    uint16_t halves[4] = {0, 0, 0, 0};
    memcpy(halves, p, size_t(n) * 2);
    return each([&](int i) { return widen(halves[i]); });
  }
  // Round to nearest even; a NaN stays a (quiet) NaN.
  static uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
  }
  static void store_bf16(void* p, F x) { store_bf16_n(p, x, 4); }
  static void store_bf16_n(void* p, F x, int n) {
    uint16_t halves[4];
    for (int i = 0; i < 4; ++i) halves[i] = to_bf16(x.lane[i]);
    memcpy(p, halves, size_t(n) * 2);
  }
  static F round_bf16(F x) {
    return each([&](int i) { return widen(to_bf16(x.lane[i])); });
  }

  // Codes of coded formats, zero-extended.
  static W bytes(const char* p, int n) {
    W x = {{0, 0, 0, 0}};
    for (int i = 0; i < n; ++i) x.lane[i] = uint8_t(p[i]);
    return x;
  }
  // Two in a byte, the low one first.
  static W nibbles(const char* p, int n) {
    W x = {{0, 0, 0, 0}};
    for (int i = 0; i < n; ++i) x.lane[i] = uint8_t(p[i / 2]) >> 4 * (i % 2) & 15;
    return x;
  }
  static W signed_bytes(const char* p, int n) {
    W x = bytes(p, n);
    for (uint32_t& lane : x.lane) lane = uint32_t(int32_t(int8_t(lane)));
    return x;
  }
  static W shifted(W x, int right) {
    for (uint32_t& lane : x.lane) lane >>= right;
    return x;
  }
  // From column `col` of a row of words of eight columns, in AWQ's order. Bits above the lowest four are anything.
  static W awq(const char* row, int64_t col, int n) {
    W x = {{0, 0, 0, 0}};
    for (int i = 0; i < n; ++i) {
      const int column = int((col + i) % 8);
      uint32_t word;
      memcpy(&word, row + (col + i) / 8 * 4, 4);
      x.lane[i] = word >> (column / 2 + column % 2 * 4) * 4;
    }
    return x;
  }
  static F lookup16(const float* table, W index) {
    return each([&](int i) { return table[index.lane[i] & 15]; });
  }
  static F to_float(W x) {
    return each([&](int i) { return float(int32_t(x.lane[i])); });
  }
  static F load_fp16_n(const char* p, int n) {
    uint16_t halves[4] = {0, 0, 0, 0};
    memcpy(halves, p, size_t(n) * 2);
    return each([&](int i) {
      const int exponent = halves[i] >> 10 & 31, mantissa = halves[i] & 1023;
      const float sign = halves[i] & 0x8000 ? -1.0f : 1.0f;
      if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
      return sign * ldexpf(float(exponent ? mantissa + 1024 : mantissa), (exponent ? exponent : 1) - 25);
    });
  }
  // One number in all lanes.
  static F half(const char* p) { return set1(load_fp16_n(p, 1).lane[0]); }
  static F e8m0(W code) {  // 2^(code - 127); 255 is NaN
    return each([&](int i) { return code.lane[i] == 255 ? NAN : ldexpf(1.0f, int(code.lane[i]) - 127); });
  }
  static F e4m3(W code) {
    return each([&](int i) {
      const int exponent = int(code.lane[i]) >> 3 & 15, mantissa = int(code.lane[i]) & 7;
      const float sign = code.lane[i] & 0x80 ? -1.0f : 1.0f;
      if (exponent == 15 && mantissa == 7) return NAN;
      return sign * ldexpf(float(exponent ? mantissa + 8 : mantissa), (exponent ? exponent : 1) - 10);
    });
  }
  static constexpr bool kHasRuns = false;

  static F fma(F a, F b, F c) {
    return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
  }
  static F add(F a, F b) {
    return each([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static F sub(F a, F b) {
    return each([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  static F mul(F a, F b) {
    return each([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  static F div(F a, F b) {
    return each([&](int i) { return a.lane[i] / b.lane[i]; });
  }
  static F clamp(F x, float low, float high) {  // NaN passes
    return each([&](int i) { return x.lane[i] < low ? low : (x.lane[i] > high ? high : x.lane[i]); });
  }
  static F within(F x, F of, float low, float high) {  // x, or 0 where `of` lies outside; its NaN does not
    return each([&](int i) { return of.lane[i] < low || of.lane[i] > high ? 0.0f : x.lane[i]; });
  }
  static F nearest(F x) {
    return each([&](int i) { return rintf(x.lane[i]); });
  }
  static F pow2(F n) {  // 2^n for integral n in [-126, 127]
    W bits;
    for (int i = 0; i < 4; ++i) bits.lane[i] = uint32_t(int32_t(n.lane[i]) + 127) << 23;
    return floats(bits);
  }
  static float sum(F x) { return (x.lane[0] + x.lane[1]) + (x.lane[2] + x.lane[3]); }

  static W load_words(const void* p) { return words(load(p)); }
  static W load_words_n(const void* p, int n) { return words(load_n(p, n)); }
  static void store_words(void* p, W x) { memcpy(p, &x, sizeof x); }
  static W broadcast(const void* p) {
    uint32_t word;
    memcpy(&word, p, 4);
    return {{word, word, word, word}};
  }
  template <int j>
  static W spread(W x) {
    return {{x.lane[j], x.lane[j], x.lane[j], x.lane[j]}};
  }
  static void transpose_quads(const W in[4], W out[4]) {
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < 4; ++j) out[i].lane[j] = in[j].lane[i];
  }
  static void transpose(const char* rows, ptrdiff_t stride, W out[4]) {
    W in[4];
    for (int i = 0; i < 4; ++i) in[i] = load_words(rows + i * stride);
    transpose_quads(in, out);
  }
  static void add_quads(F acc, float* out) {
    for (int i = 0; i < 4; ++i) out[i] += acc.lane[i];
  }
};

// Words of bf16 pairs, for the unit that multiplies them as tiles.
struct Bf16Dot {
  static constexpr int kGroup = 2;
  // Four columns of two rows (odd null: the last row has no partner) as words.
  static Vec::W pair(bool is_bf16, const char* even, const char* odd, int n) {
    const auto half = [&](const char* p, int i) -> uint32_t {
      if (p == nullptr || i >= n) return 0;
      if (!is_bf16) return Vec::to_bf16(Vec::load_n(p + 4 * i, 1).lane[0]);
      uint16_t bits;
      memcpy(&bits, p + 2 * i, 2);
      return bits;
    };
    Vec::W words;
    for (int i = 0; i < 4; ++i) words.lane[i] = half(even, i) | half(odd, i) << 16;
    return words;
  }
  // 32 columns of two rows of bf16 as words.
  static void interleave(char* out, const char* even, const char* odd) {
    for (int i = 0; i < 32; i += 4) Vec::store_words(out + 4 * i, pair(true, even + 2 * i, odd + 2 * i, 4));
  }
};

}  // namespace
