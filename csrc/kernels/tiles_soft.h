// The twin of tiles_amx.h in plain C++, for machines without AMX and for tests: what Intel's pseudocode says, bit for bit, and
// an abort with a message where the instructions would fault.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tile_config.h"

namespace {

struct TileFile {  // of a thread
  bool configured = false;
  TileConfig config;
  char rows[kTiles][kTile][4 * kTile] = {};
};
thread_local TileFile tile_file;

class Tiles {
 public:
  static void configure(const TileConfig& config) {
    check(config.palette == 1, "configure: the palette is not 1");
    check(config.start_row == 0, "configure: the start row is not 0");
    for (const uint8_t byte : config.reserved) check(byte == 0, "configure: reserved bytes are not 0");
    for (int t = 0; t < 16; ++t) {
      check(config.rows[t] <= kTile && config.row_bytes[t] <= 4 * kTile,
            "configure: a tile is larger than 16 rows of 64 bytes");
      check((config.rows[t] == 0) == (config.row_bytes[t] == 0),
            "configure: a tile has rows without bytes, or bytes without rows");
      check(t < kTiles || config.rows[t] == 0, "configure: there are eight tiles");
    }
    tile_file.configured = true;
    tile_file.config = config;
    memset(tile_file.rows, 0, sizeof tile_file.rows);
  }
  static void release() { tile_file = {}; }

  static void zero(int target) {
    check_usable(target);
    memset(tile_file.rows[target], 0, sizeof tile_file.rows[target]);
  }
  static void load(int target, const void* rows, ptrdiff_t stride) {
    zero(target);
    for (int row = 0; row < tile_file.config.rows[target]; ++row)
      memcpy(tile_file.rows[target][row], static_cast<const char*>(rows) + row * stride, tile_file.config.row_bytes[target]);
  }
  static void store(int source, void* rows, ptrdiff_t stride) {
    check_usable(source);
    for (int row = 0; row < tile_file.config.rows[source]; ++row)
      memcpy(static_cast<char*>(rows) + row * stride, tile_file.rows[source][row], tile_file.config.row_bytes[source]);
  }
  static void dot(int c, int a, int b) {
    check_usable(c);
    check_usable(a);
    check_usable(b);
    check(c != a && c != b && a != b, "dot: C, A and B are not three tiles");
    const TileConfig& shape = tile_file.config;
    check(shape.row_bytes[c] % 4 == 0, "dot: the rows of C are no whole words");
    check(shape.rows[c] == shape.rows[a], "dot: C and A have different numbers of rows");
    check(shape.row_bytes[c] == shape.row_bytes[b], "dot: C and B have rows of different lengths");
    check(shape.row_bytes[a] == 4 * shape.rows[b], "dot: the words in a row of A are not the rows of B");
    dot(shape.rows[c], shape.row_bytes[c] / 4, shape.rows[b], tile_file.rows[a], tile_file.rows[b], tile_file.rows[c]);
  }

  template <int kTarget>
  static void zero() {
    zero(kTarget);
  }
  template <int kTarget>
  static void load(const void* rows, ptrdiff_t stride) {
    load(kTarget, rows, stride);
  }
  template <int kSource>
  static void store(void* rows, ptrdiff_t stride) {
    store(kSource, rows, stride);
  }
  template <int kC, int kA, int kB>
  static void dot() {
    dot(kC, kA, kB);
  }

 private:
  static void check(bool holds, const char* what) {
    if (holds) return;
    fprintf(stderr, "AMX twin: %s; the instruction would fault\n", what);
    abort();
  }
  static void check_usable(int tile) {
    check(tile_file.configured, "tiles are used before they are configured");
    check(tile_file.config.rows[tile] > 0, "a tile without a shape is used");
  }

  struct Pair {
    float even[kTile], odd[kTile];
  };

  // Denormals count as zero. `plain` turns false unless sums of products of such numbers can be computed by multiplying and
  // adding: elements of 2^-56 and more have products that are exact in fp32 and, like their sums, multiples of 2^-126.
  static float widen(uint32_t half, bool& plain) {
    const uint32_t exponent = half >> 7 & 0xff;
    if (exponent == 0) half &= 0x8000;
    else if (exponent < 127 - 56 || exponent > 127 + 62) plain = false;
    const uint32_t bits = half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
  }
  static bool unpack(const char row[4 * kTile], int words, Pair& pair) {
    bool plain = true;
    for (int i = 0; i < words; ++i) {
      uint32_t word;
      memcpy(&word, row + 4 * i, 4);
      pair.even[i] = widen(word & 0xffff, plain);
      pair.odd[i] = widen(word >> 16, plain);
    }
    return plain;
  }
  static float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

  // For each element of C two chains of fused multiply-adds from zero, one over the even and one over the odd elements; their
  // sum is added to C. Round to nearest; denormals are zero, going in and coming out.
  static void dot(int m, int n, int k, const char a[][4 * kTile], const char b[][4 * kTile], char c[][4 * kTile]) {
    Pair columns[kTile], row;
    bool plain = true;
    for (int word = 0; word < k; ++word) plain = unpack(b[word], n, columns[word]) && plain;
    for (int i = 0; i < m; ++i) {
      const bool fast = unpack(a[i], k, row) && plain;
      Pair sums = {};
      for (int word = 0; word < k; ++word) {
        const float even = row.even[word], odd = row.odd[word];
        const Pair& column = columns[word];
        if (fast) {
          for (int j = 0; j < n; ++j) sums.even[j] += even * column.even[j];
          for (int j = 0; j < n; ++j) sums.odd[j] += odd * column.odd[j];
        } else {
          for (int j = 0; j < n; ++j) sums.even[j] = flushed(fmaf(even, column.even[j], sums.even[j]));
          for (int j = 0; j < n; ++j) sums.odd[j] = flushed(fmaf(odd, column.odd[j], sums.odd[j]));
        }
      }
      float out[kTile];
      memcpy(out, c[i], sizeof out);
      for (int j = 0; j < n; ++j) out[j] = flushed(flushed(out[j]) + flushed(sums.even[j] + sums.odd[j]));
      memcpy(c[i], out, sizeof out);
    }
  }
};

}  // namespace
