// Products of few rows with stored codes, which are decoded to words in registers: for units that have runs, after unit.inl.
//
// The words, their order and the tiles are those of gemm.inl's products of rows and of columns, and so are the bits. Taken are
// codes that have runs (decode.inl), where words are pairs of bf16, a scale holds for whole halves of runs, and nothing is cut
// off inside a run; everything else is made words in memory first, see Layer::add_in_place.

namespace {

constexpr int kHalf = kRun / 2, kHalves = Vec::kLanes;  // columns of half a run; halves whose scales are found at a time
constexpr int kScaleColumns = kHalf * kHalves;

// Every tile of rows decodes the codes again, which pays up to so many rows of A: in products of rows with codes of four bits
// and of eight, and in products of columns with eight; with four always (fp8, int8 and mxfp4 at 1, 4, 8, 9, 13 and 16 rows, H
// 2048, I 768, two threads, Zen 5, 2026-12-01: with 16 rows, rows of mxfp4 took 16 instead of 11 ms, columns 13 instead of 28).
constexpr int kMostRows = 4, kMostRowsOfBytes = 2, kMostColumnsOfBytes = 12;

// Which of the groups that a row's columns [col, col + kScaleColumns) lie in each half of a run has: counted from the first.
struct HalfGroups {
  int64_t first;
  int count;
  alignas(64) int32_t of[kHalves];

  HalfGroups(int64_t col, int64_t columns, int64_t group) : first(col / group) {
    for (int half = 0; half < kHalves; ++half) of[half] = int32_t((col + half * kHalf) / group - first);
    count = int((col + columns - 1) / group - first) + 1;
  }
};

// Scales of the halves of runs in those columns of a stored row that `groups` was made for.
inline void half_scales(const Stored& source, int64_t row, const HalfGroups& groups, float* out) {
  const Scales& scales = source.scales;
  const char* const at = scales.data + (source.row + row + scales.first_row) / scales.rows * scales.stride;
  with_scale_format(scales.format, [&](auto format) {
    const Vec::F of_groups = scales_of<format.value>(scales, at, groups.first, groups.count);
    Vec::store(out, Vec::permute(of_groups, Vec::load_words(groups.of)));
  });
}

// Rows of a product of rows: up to kRows of A, four columns in each of kGroups accumulators. As rows_tile in gemm.inl.
template <class Codes, bool one_scale, int kRows, int kGroups>
inline void coded_rows_tile(const Stored& b, const Operands& x, int row, int col, int cols, float* c, const Ahead::Area& next) {
  constexpr int kCols = 4 * kGroups;
  const int64_t words = x.length / 2;
  const char *a = x.a + row * x.a_stride, *codes[kCols];
  int64_t stored[kCols];
#pragma GCC unroll 8
  for (int j = 0; j < kCols; ++j) {  // columns past the edge repeat the last one and are not stored
    stored[j] = col + (j < cols ? j : cols - 1);
    codes[j] = b.data + (b.row + stored[j]) * b.stride;
  }
  for (int64_t part = 0; part < words; part += kPartWords) {
    const int64_t end = words - part < kPartWords ? words : part + kPartWords;
    alignas(64) float scale[kCols][2 * kPartWords / kHalf];
    for (int64_t at = 2 * part; at < 2 * end; at += kScaleColumns) {
      const int64_t left = 2 * end - at;
      const HalfGroups groups(b.col + at, left < kScaleColumns ? left : kScaleColumns, b.scales.columns);
      for (int j = 0; j < kCols; ++j) half_scales(b, stored[j], groups, scale[j] + (at - 2 * part) / kHalf);
    }
    Vec::F acc[kRows][kGroups];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; ++g) acc[i][g] = Vec::zero();
    for (int64_t k = part; k < end; k += Vec::kLanes) {
      const int64_t half = 2 * (k - part) / kHalf, byte = Codes::bytes(b.col + 2 * k);
      if (row == 0 && next.rows >= kCols && byte % 64 < Codes::bytes(kRun)) {
#pragma GCC unroll 8
        for (int j = 0; j < kCols; ++j) __builtin_prefetch(next.data + j * next.stride + Codes::bytes(2 * k), 0, kReadOnce);
      }
      Vec::W quads[kGroups][4];
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; ++g) {
        Vec::W rows[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j)
          rows[j] = Codes::template run<one_scale>(codes[4 * g + j], b.col + 2 * k, scale[4 * g + j] + half);
        Vec::transpose_quads(rows, quads[g]);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const Vec::W y = Vec::load_words(a + i * x.a_stride + 4 * k);
        const Vec::W spread[4] = {Vec::template spread<0>(y), Vec::template spread<1>(y), Vec::template spread<2>(y),
                                  Vec::template spread<3>(y)};
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j)
#pragma GCC unroll 2
          for (int g = 0; g < kGroups; ++g) acc[i][g] = Bf16Dot::dot(acc[i][g], spread[j], quads[g][j]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; ++g) add_some_quads(acc[i][g], c + ptrdiff_t(row + i) * kBlock + col + 4 * g, cols - 4 * g);
  }
}

// 64 columns of a product of columns, words [begin, end) of the reduction, as columns_tile in gemm.inl. `scale`: of the halves
// of runs, one row for each stored row of these words.
template <class Codes, bool one_scale, int kRows>
inline void coded_columns_tile(const Stored& b, const Operands& x, int64_t begin, int64_t end, int row, int col,
                               const float (*scale)[kHalves], float* sums) {
  constexpr int kVecs = kBlock / Vec::kLanes;
  const char* const a = x.a + row * x.a_stride;
  const char* codes = b.data + (b.row + 2 * begin) * b.stride;
  const int64_t column = b.col + col;
  const int half = col % kScaleColumns / kHalf;
  Vec::F acc[kRows][kVecs];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) acc[i][j] = Vec::load(sums + i * kWideColumns + j * Vec::kLanes);
  for (int64_t k = begin; k < end; ++k, codes += 2 * b.stride, scale += 2) {
    if (row == 0) {
      for (int i = 0; i < 2; ++i) __builtin_prefetch(codes + (kRowsAhead + i) * b.stride + Codes::bytes(column), 0, 3);
    }
    const bool partner = 2 * k + 2 <= x.length;
    Vec::W words[kVecs];
#pragma GCC unroll 2
    for (int run = 0; run < 2; ++run) {
      const auto of = [&](int i) {
        return Codes::template run<one_scale>(codes + i * b.stride, column + run * kRun, scale[i] + half + 2 * run);
      };
      Bf16Dot::pairs(of(0), partner ? of(1) : Vec::words(Vec::zero()), words + 2 * run);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Vec::W y = Vec::broadcast(a + i * x.a_stride + 4 * k);
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) acc[i][j] = Bf16Dot::dot(acc[i][j], y, words[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) Vec::store(sums + i * kWideColumns + j * Vec::kLanes, acc[i][j]);
}

template <class Codes, bool one_scale>
void multiply_coded_rows(const Stored& b, const Operands& x, int rows, int cols, float* c, const Ahead& ahead) {
  constexpr int kCols = 4 * Vec::kRowGroups;
  for_rows<kMostRows>(rows, [&](auto step, int row) {
    for (int col = 0; col < cols; col += kCols) {
      const bool last = col + kCols >= cols;
      const Ahead::Area further{b.data + (b.row + col + kCols) * b.stride + Codes::bytes(b.col), b.stride, kCols, 0};
      coded_rows_tile<Codes, one_scale, step.value, Vec::kRowGroups>(b, x, row, col, cols - col, c,
                                                                     last ? ahead.areas[0] : further);
    }
  });
}

template <class Codes, bool one_scale>
void multiply_coded_columns(const Stored& b, const Operands& x, int rows, int cols, float* c) {
  static_assert(kWideColumns == kScaleColumns, "one row of scales for a stored row");
  const int64_t words = (x.length + 1) / 2;
  const HalfGroups groups(b.col, cols, b.scales.columns);
  alignas(64) float sums[kFewRows * kWideColumns], scale[2 * kTurn][kHalves];
  move_wide_sums(c, rows, cols, sums, false);
  for (int64_t begin = 0; begin < words; begin += kTurn) {
    const int64_t end = words - begin < kTurn ? words : begin + kTurn;
    const int64_t stored = 2 * end < x.length ? 2 * end : x.length;
    for (int64_t i = 2 * begin; i < stored; ++i) half_scales(b, i, groups, scale[i - 2 * begin]);
    for (int col = 0; col < cols; col += kBlock)
      for_rows<Vec::kPanelRows>(rows, [&](auto step, int row) {
        coded_columns_tile<Codes, one_scale, step.value>(b, x, begin, end, row, col, scale, sums + row * kWideColumns + col);
      });
  }
  move_wide_sums(c, rows, cols, sums, true);
}

// C += A B as multiply_rows or multiply_columns would, had b been made words; false: nothing done, it has to be.
bool multiply_coded(const Stored& b, bool is_rows, const Operands& x, int rows, int cols, float* c, const Ahead& ahead) {
  const bool is_bytes = bytes_of(b.format, 1) > 0;
  const int most = is_rows ? (is_bytes ? kMostRowsOfBytes : kMostRows) : (is_bytes ? kMostColumnsOfBytes : kFewRows);
  if (rows > most) return false;
  const int64_t group = b.scales.columns, along = is_rows ? x.length : cols;
  // A row that lies inside one group has one scale, whatever the group's size.
  const bool one_group = b.col / group == (b.col + along - 1) / group;
  if (b.col % kRun != 0 || along % (is_rows ? kRun : kBlock) != 0 || !(group % kHalf == 0 || one_group)) return false;
  const auto multiply = [&](auto codes, auto one_scale) {
    using Codes = decltype(codes);
    if (is_rows) multiply_coded_rows<Codes, one_scale.value>(b, x, rows, cols, c, ahead);
    else multiply_coded_columns<Codes, one_scale.value>(b, x, rows, cols, c);
  };
  return with_scaled_codes(b.format, [&](auto codes) {
    if (group % kRun == 0 || one_group) multiply(codes, Count<1>());
    else multiply(codes, Count<0>());
  });
}

template <class Mode>
struct CodedProducts : VectorProducts<Mode> {
  static_assert(Mode::kWord == kBf16, "runs are words of pairs");
  static constexpr decltype(Kernels::multiply_coded) kMultiplyCoded = multiply_coded;
};

}  // namespace
