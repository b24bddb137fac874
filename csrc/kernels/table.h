// The contract between the expert layer (layer, forward, backward), which knows no ISA, and the kernels, which know no experts.
//
// A *word* is 32 bits of a row along the reduction: one fp32, or two neighbouring bf16 (`group` elements). Activations A live
// in rows of words. Weights B are read in one of four layouts:
//
//   rows      C[m, n] += sum_k A[m, k] * B[n, k]   rows of words, contiguous along the reduction
//   phased    the same product                     those rows transposed into a panel
//   columns   C[m, n] += sum_k A[m, k] * B[k, n]   stored elements as they are
//   panel     the same product                     those elements as a panel
//
// A panel is [words][64]: a word k of column n holds elements group * k .. of column n. For few rows of A, reading B where it
// lies is fastest; for many, a panel in L2 that all of them share. A phased panel holds the words in the order in which the
// lanes of the rows product add them up, so that both layouts of a product give the same bits. A level may read rows where they
// lie however many rows A has, and want A the other way round for that, see Arranged.
//
// A reduction is cut into parts of 512 words, so that a panel and what goes with it stay in L2.
// Determinism: products of columns go on with C as one chain of additions; those of rows are chains, one for each four lanes of
// a vector in each part, whose sums are added to C in order (tiles: see tiles.inl). That depends on the reduction's length
// alone, never on the number of rows or columns, the tile, the layout, or the thread.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>

namespace ktft {

constexpr int kBlock = 64;       // columns of a panel and of a C tile
constexpr int kPartWords = 512;  // of a reduction: a panel of 128 KiB
constexpr int kChunk = 192;      // rows of a C tile: 48 KiB, which leaves L2 to the operands

// Of stored elements. The first two are also those of words; for the others a decoder makes words, see decode.inl. In an
// every-second format as many elements of something else lie between a row's elements. From kQ8_0 on, rows are blocks that
// hold their own scales.
enum Format : int {
  kBf16,
  kFp32,
  kFp16,
  kFp8,
  kInt8,
  kInt4,
  kMxfp4,
  kNvfp4,
  kInt8Plain,
  kGptq,
  kAwq,
  kEverySecondBf16,
  kEverySecondFp32,
  kEverySecondFp16,
  kQ8_0,
  kQ4_0,
  kQ4_1,
  kQ4_K,
  kQ6_K,
  kGgufMxfp4
};
constexpr int kFormats = 20;
// The smallest part of stored rows that is whole bytes. Where it is of several rows, a stride leads to the next so many.
struct Packing {
  int bytes, columns, rows = 1;
};
__attribute__((always_inline)) constexpr Packing packing_of(Format format) {
  constexpr Packing packings[kFormats] = {{2, 1},   {4, 1},   {2, 1},    {1, 1},     {1, 1},     {1, 2},  {1, 2},
                                          {1, 2},   {1, 1},   {4, 1, 8}, {4, 8},     {4, 1},     {8, 1},  {4, 1},
                                          {34, 32}, {18, 32}, {20, 32},  {144, 256}, {210, 256}, {17, 32}};
  return packings[format];
}
// Bytes that columns of a row take; inside a block of several parts about so.
__attribute__((always_inline)) constexpr int64_t bytes_of(Format format, int64_t columns) {
  const Packing packing = packing_of(format);
  return columns * packing.bytes / packing.columns;
}
constexpr bool is_direct(Format format) { return format <= kFp32; }

enum ScaleFormat : int { kScaleFp32, kScaleBf16, kScaleFp16, kScaleE8m0, kScaleE4m3 };

// Scales of a stored matrix: element (i, j) has the one at row (i + first_row) / rows and column j / columns, times `factor`,
// or divided by it.
struct Scales {
  const char* data = nullptr;
  ptrdiff_t stride = 0;  // bytes between rows of scales
  ScaleFormat format = kScaleFp32;
  int64_t rows = 1, columns = 1, first_row = 0;
  float factor = 1.0f;
  bool divides = false;
};

// Codes that mean zero, of four bits, as the format packs its own along a row: element (i, j) has that of row i / rows of the
// scales, and of column j; if `less_one`, it is what is stored plus 1, modulo 16.
struct ZeroPoints {
  const char* data = nullptr;
  ptrdiff_t stride = 0;  // bytes
  bool less_one = false;
};

// Elements of a stored matrix, from row `row` and column `col` on; direct ones begin at `data` itself.
struct Stored {
  const char* data = nullptr;  // null: nothing
  ptrdiff_t stride = 0;        // bytes between stored rows
  Format format = kBf16;
  Scales scales = {};
  ZeroPoints zeros = {};
  int64_t row = 0, col = 0;

  // The same from `rows` and `cols` further on. Always inlined: a copy of its own would be a weak symbol with a level's flags.
  __attribute__((always_inline)) Stored from(int64_t rows, int64_t cols) const {
    Stored further = *this;
    if (is_direct(format)) {
      further.data += rows * stride + bytes_of(format, cols);
    } else {
      further.row += rows;
      further.col += cols;
    }
    return further;
  }
  __attribute__((always_inline)) const char* codes() const {
    return data + row / packing_of(format).rows * stride + bytes_of(format, col);
  }
};

// The words of rows the other way round: rows in groups of 16, the last group of what is left; a group of n rows as [words][n].
// Group g begins after the words of 16 * g rows.
struct Arranged {
  const char* data = nullptr;
  int64_t words = 0;  // of a row
  int64_t first = 0;  // word at which the reduction begins
};

struct Operands {
  const char* a;       // activations: row i at a + i * a_stride
  ptrdiff_t a_stride;  // bytes
  const char* b;
  ptrdiff_t b_stride;  // bytes between rows; unused by panels
  int64_t length;      // elements of the reduction; panels: at most one part
  Format format;       // of the elements, a direct one; columns only
  Arranged arranged;   // the activations, if the caller keeps them so; rows only
};

// Stored elements that a product of panels wants: one part of up to kBlock columns.
struct PanelSource : Stored {
  bool is_rows = false;  // columns are stored rows, for a phased panel; else elements of every stored row
  int64_t length = 0;    // elements of the reduction
  int columns = 0;

  bool operator==(const PanelSource& other) const {
    return data == other.data && row == other.row && col == other.col && stride == other.stride && format == other.format &&
           is_rows == other.is_rows && length == other.length && columns == other.columns;
  }
};

// What a product does on the side, bit by bit between its tiles, so that neither memory nor decoding is waited for.
struct Ahead {
  struct Area {
    const char* data = nullptr;
    ptrdiff_t stride = 0;
    int64_t rows = 0, bytes = 0;  // bytes of each row
  };
  static constexpr int kAreas = 6;

  PanelSource next = {};  // decoded into next_panel; only beside products of many rows, and if decodes_aside(next)
  char* next_panel = nullptr;
  PanelSource then = {};    // what will be `next` in the next product: its beginning is brought into L2
  Area areas[kAreas] = {};  // other memory, brought into L2
};

// h = (clamp(up, -up_limit, up_limit) + up_shift) * f(min(gate, gate_max)). A limit's derivative is 1 on it, 0 beyond it.
enum GateFunction : int { kSilu };  // f(x) = x sigmoid(alpha x)
constexpr int kGateFunctions = 1;
struct Activation {
  GateFunction function = kSilu;
  float alpha = 1.0f;
  float gate_max = INFINITY, up_limit = INFINITY, up_shift = 0.0f;

  // Always inlined, like Stored's members.
  __attribute__((always_inline)) bool limits() const {
    return gate_max != INFINITY || up_limit != INFINITY || up_shift != 0.0f;
  }
};

struct Dropout {  // see ktft/reference.py: dropout_mask
  uint64_t seed;
  uint32_t stream;     // adapter * 2 + site
  uint32_t threshold;  // dropped where hash < threshold
  float keep_scale;    // 1 / (1 - p)
};

// Rows of A up to which B is read where it lies.
constexpr int kFewRows = 16;
// Columns of a product of columns; each 64 of them go to a C tile of their own, [kFewRows][kBlock] floats after the one before.
constexpr int kWideColumns = 256;

// One ISA level and compute dtype. C tiles are float [rows <= kChunk][kBlock]; `cols` <= kBlock.
struct Kernels {
  int group;           // elements per word: 2 where bf16 pairs are multiplied directly, else 1
  Format word_format;  // format of the elements inside words: bf16 if group is 2, else fp32

  // Null at a level that reads rows where they lie however many rows A has: multiply_phased. At others: arrange_rows.
  using Product = void(const Operands& operands, int rows, int cols, float* c, const Ahead& ahead);
  Product *multiply_rows, *multiply_phased, *multiply_columns, *multiply_panel;

  // Few rows of A with stored codes, decoded in registers: what multiply_rows, or multiply_columns, would do with them as
  // words, bit for bit. False: not done, this product is not one of those. Null at levels without.
  bool (*multiply_coded)(const Stored& b, bool is_rows, const Operands& x, int rows, int cols, float* c, const Ahead& ahead);

  // Rows of stored elements -> rows of words, zero-padded to a whole word.
  void (*decode_rows)(const Stored& source, int64_t rows, int64_t cols, char* words, ptrdiff_t word_stride);
  // A panel [ceil(length / group)][kBlock] of words, zero-padded.
  void (*decode_panel)(const PanelSource& source, char* panel);
  // Whether that can be done beside another product, in the slots that it leaves free.
  bool (*decodes_aside)(const PanelSource& source);

  // Rows of `count` words -> words [first, first + count) of arranged rows of `words` words.
  void (*arrange_rows)(const char* source, ptrdiff_t stride, int rows, int64_t first, int64_t count, int64_t words,
                       char* arranged);

  // h of gate and up rounded to the compute dtype first (and saved so, unless null). h goes to rows of words.
  void (*activation_forward)(const Activation& activation, const float* gate, const float* up, int rows, int cols,
                             char* saved_gate, char* saved_up, ptrdiff_t saved_stride, char* h, ptrdiff_t h_stride);
  // From dh (unscaled by the routing weight), the saved gate and up, and the routing weights: words of d gate, d up, h, and
  // partial[i * partial_stride] = sum over the block's columns of dh * h.
  void (*activation_backward)(const Activation& activation, const float* dh, const float* route_weight, int rows, int cols,
                              const char* saved_gate, const char* saved_up, ptrdiff_t saved_stride, char* d_gate, char* d_up,
                              char* h, ptrdiff_t word_stride, float* partial, ptrdiff_t partial_stride);
  // c[i][0 .. cols) += bias.
  void (*add_bias)(const float* bias, int rows, int cols, float* c);
  // The sum of a row of words, `cols` elements, times as many floats.
  float (*dot)(const char* words, const float* vector, int64_t cols);
  // out[out_rows[i]][0 .. cols) += factor[i] * c[i]; factor null means 1. out_stride in floats.
  void (*scatter_add)(const float* c, const float* factor, int rows, int cols, float* out, ptrdiff_t out_stride,
                      const int32_t* out_rows);
  // fp32 -> the compute dtype, `count` elements.
  void (*store_rounded)(const float* source, int64_t count, char* out);
  // small[i][0 .. cols) = round(scale * c[i]), as floats and as words (beginning at a whole word).
  void (*store_low_rank)(const float* c, float scale, int rows, int cols, float* small, ptrdiff_t small_stride, char* words,
                         ptrdiff_t word_stride);
  // c[j][0 .. cols) += sum_i p[i * p_stride + j] * q[i], j < rank: gradients of LoRA factors, rows i in order.
  void (*outer)(const float* p, ptrdiff_t p_stride, int rank, Format q_format, const char* q, ptrdiff_t q_stride, int rows,
                int cols, float* c);
  // c[i][0 .. cols) *= mask of (routes[i], col0 + column).
  void (*dropout)(const Dropout& dropout, const int64_t* routes, int64_t col0, int rows, int cols, float* c,
                  ptrdiff_t c_stride);
  // Rows of words -> fp32, cols elements from element col0.
  void (*load_rows)(const char* words, ptrdiff_t stride, int64_t col0, int rows, int cols, float* out, ptrdiff_t out_stride);
};

// [compute dtype: 0 bf16, 1 fp32]
extern const Kernels kScalarKernels[2];
extern const Kernels kAvx2Kernels[2];
extern const Kernels kAvx512Bf16Kernels[2];
// bf16 alone; fp32 has no tiles
extern const Kernels kAmxKernels;
extern const Kernels kAmxSoftKernels;

}  // namespace ktft
