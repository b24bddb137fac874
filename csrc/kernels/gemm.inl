// The two products of table.h, for one vector unit `Vec` and one word type `Dot`. Included by unit.inl inside an anonymous
// namespace.
//
// Every accumulator belongs to one element of C (nt: a vector of partial sums; nn: one lane) and is fed in the order of the
// segments' words. Tile sizes therefore never change a result.

// Words of plain fp32; available at every level.
struct Fp32Dot {
  static constexpr int kGroup = 1;
  using X = Vec::F;
  static X load(const void* p) { return Vec::load(p); }
  static X load_n(const void* p, int n) { return Vec::load_n(p, n); }
  static X broadcast(const void* p) {
    float word;
    __builtin_memcpy(&word, p, 4);
    return Vec::set1(word);
  }
  static Vec::F dot(Vec::F acc, X a, X b) { return Vec::fma(a, b, acc); }
};

constexpr int kColTile = 4;  // nt: weight rows per tile, the width of Vec::sum4

inline const char* activation_row(const Segment& s, int row) {
  return s.a + (s.a_rows ? ptrdiff_t(s.a_rows[row]) : ptrdiff_t(row)) * s.a_stride;
}

template <class Dot, int kRows>
inline void nt_tile(const Segment* segments, int count, int row, int col, int cols, float* c, bool accumulate) {
  Vec::F acc[kRows][kColTile];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kColTile; ++j) acc[i][j] = Vec::zero();

  for (int s = 0; s < count; ++s) {
    const Segment& segment = segments[s];
    const char* a[kRows];
    const char* b[kColTile];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) a[i] = activation_row(segment, row + i);
#pragma GCC unroll 4
    for (int j = 0; j < kColTile; ++j)  // columns past the edge repeat the last one and are not stored
      b[j] = segment.b + ptrdiff_t(col + (j < cols ? j : cols - 1)) * segment.b_stride;
    const int64_t full = segment.words / Vec::kLanes * Vec::kLanes;
    // Few rows are bound by memory, and hardware prefetchers start anew where the next rows begin on other pages. Two lines of
    // each are enough to start them: 6 % for one row of 2048 bf16 (31 GB/s on one thread); 0, 6, 16 or all lines are slower.
    if constexpr (kRows <= 2) {
      for (int line = 0; line < 2; ++line)
        for (int j = 0; j < kColTile; ++j) __builtin_prefetch(b[j] + kColTile * segment.b_stride + 64 * line);
    }
    for (int64_t k = 0; k < full; k += Vec::kLanes) {
      typename Dot::X bv[kColTile];
#pragma GCC unroll 4
      for (int j = 0; j < kColTile; ++j) bv[j] = Dot::load(b[j] + 4 * k);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const typename Dot::X av = Dot::load(a[i] + 4 * k);
#pragma GCC unroll 4
        for (int j = 0; j < kColTile; ++j) acc[i][j] = Dot::dot(acc[i][j], av, bv[j]);
      }
    }
    const int tail = int(segment.words - full);
    if (tail) {
      typename Dot::X bv[kColTile];
#pragma GCC unroll 4
      for (int j = 0; j < kColTile; ++j) bv[j] = Dot::load_n(b[j] + 4 * full, tail);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const typename Dot::X av = Dot::load_n(a[i] + 4 * full, tail);
#pragma GCC unroll 4
        for (int j = 0; j < kColTile; ++j) acc[i][j] = Dot::dot(acc[i][j], av, bv[j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    float* out = c + ptrdiff_t(row + i) * kBlock + col;
    if (cols == kColTile && !accumulate) {
      Vec::sum4(acc[i], out);
    } else {
      float sums[kColTile];
      Vec::sum4(acc[i], sums);
      for (int j = 0; j < cols; ++j) out[j] = accumulate ? out[j] + sums[j] : sums[j];
    }
  }
}

// Activation rows of one tile, copied side by side. In the tensor they lie a power of two apart as a rule (4096 bytes for 2048
// bf16), which puts a tile's rows and the weights' rows into the same sets of L1. Measured on 128 rows of 2048 x 64 columns,
// one thread, Zen 5: 432 instead of 401 GFLOP/s of 502.
constexpr int kPackedBytes = 4096;

template <class Dot>
void gemm_nt(const Segment* segments, int count, int rows, int cols, float* c, bool accumulate) {
  int row = 0;
  const int64_t tiles = int64_t(rows / Vec::kRowTile + 1) * ((cols + kColTile - 1) / kColTile);
  const int64_t step = (segments[0].ahead_bytes / tiles + 63) / 64 * 64;
  int64_t ahead = 0;
  const auto columns = [&](auto tile, const Segment* operands) {
    for (int col = 0; col < cols; col += kColTile) {
      for (const int64_t end = ahead + step; ahead < end && ahead < segments[0].ahead_bytes; ahead += 64)
        __builtin_prefetch(segments[0].ahead + ahead, 0, 2);
      tile(operands, count, row, col, cols - col < kColTile ? cols - col : kColTile, c, accumulate);
    }
  };
  const ptrdiff_t bytes = 4 * segments[0].words, stride = bytes + 64;
  if (bytes <= kPackedBytes && cols >= kBlock / 2 && rows >= Vec::kRowTile) {
    alignas(64) char packed[Vec::kRowTile * (kPackedBytes + 64)];
    Segment operands[kMaxSegments];
    for (int s = 0; s < count; ++s) operands[s] = segments[s];
    operands[0].a_stride = stride;
    operands[0].a_rows = nullptr;
    for (; row + Vec::kRowTile <= rows; row += Vec::kRowTile) {
      for (int i = 0; i < Vec::kRowTile; ++i)
        __builtin_memcpy(packed + i * stride, activation_row(segments[0], row + i), size_t(bytes));
      operands[0].a = packed - row * stride;
      columns(nt_tile<Dot, Vec::kRowTile>, operands);
    }
  }
  const auto sweep = [&](auto tile, int step) {
    for (; row + step <= rows; row += step) columns(tile, segments);
  };
  sweep(nt_tile<Dot, Vec::kRowTile>, Vec::kRowTile);
  if constexpr (Vec::kRowTile > 4) sweep(nt_tile<Dot, 4>, 4);
  if constexpr (Vec::kRowTile > 2) sweep(nt_tile<Dot, 2>, 2);
  sweep(nt_tile<Dot, 1>, 1);
}

template <class Dot, int kRows>
inline void nn_tile(const Segment* segments, int count, int row, int col, int cols, float* c, bool accumulate) {
  constexpr int kVecs = Vec::kPanelVecs;
  Vec::F acc[kRows][kVecs];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) acc[i][j] = Vec::zero();

  for (int s = 0; s < count; ++s) {
    const Segment& segment = segments[s];
    const char* a[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) a[i] = activation_row(segment, row + i);
    const char* panel = segment.b + 4 * ptrdiff_t(col);
    for (int64_t k = 0; k < segment.words; ++k, panel += 4 * kBlock) {
      typename Dot::X bv[kVecs];
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) bv[j] = Dot::load(panel + 4 * j * Vec::kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const typename Dot::X av = Dot::broadcast(a[i] + 4 * k);
#pragma GCC unroll 4
        for (int j = 0; j < kVecs; ++j) acc[i][j] = Dot::dot(acc[i][j], av, bv[j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    float* out = c + ptrdiff_t(row + i) * kBlock + col;
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) {  // the tile may hang over `cols`: C is kBlock wide, so the store stays inside the row
      if (j * Vec::kLanes >= cols) break;
      Vec::F value = acc[i][j];
      if (accumulate) value = Vec::add(Vec::load(out + j * Vec::kLanes), value);
      Vec::store(out + j * Vec::kLanes, value);
    }
  }
}

template <class Dot>
void gemm_nn(const Segment* segments, int count, int rows, int cols, float* c, bool accumulate) {
  constexpr int kCols = Vec::kPanelVecs * Vec::kLanes;
  static_assert(kBlock % kCols == 0, "a panel is a whole number of tiles");
  int row = 0;
  const auto sweep = [&](auto tile, int step) {
    for (; row + step <= rows; row += step)
      for (int col = 0; col < cols; col += kCols) tile(segments, count, row, col, cols - col, c, accumulate);
  };
  sweep(nn_tile<Dot, Vec::kPanelRows>, Vec::kPanelRows);
  if constexpr (Vec::kPanelRows > 4) sweep(nn_tile<Dot, 4>, 4);
  if constexpr (Vec::kPanelRows > 2) sweep(nn_tile<Dot, 2>, 2);
  sweep(nn_tile<Dot, 1>, 1);
}
