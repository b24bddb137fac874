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
constexpr int64_t kNtStep = 16 * Vec::kLanes, kNnStep = 32;  // words of a reduction between two steps of read-ahead

// Walks the areas of a ReadAhead, some cache lines at each step of a product. Steps are short: a burst of requests would wait for
// the few that can be under way.
class AheadCursor {
 public:
  AheadCursor(const ReadAhead& ahead, int64_t steps) : area_(ahead.areas), end_(ahead.areas + ReadAhead::kAreas) {
    int64_t lines = 0;
    for (const ReadAhead::Area* area = area_; area < end_; ++area) lines += area->rows * (area->bytes / 64 + 1);
    per_step_ = (lines + steps - 1) / steps;
    enter();
  }
  void step() {
    for (int64_t i = 0; i < per_step_ && area_ < end_; ++i) {
      __builtin_prefetch(row_ + byte_, 0, 2);
      byte_ += 64;
      if (byte_ < area_->bytes + 63) continue;  // rows begin anywhere in a line
      byte_ = 0;
      row_ += area_->stride;
      if (++done_ < area_->rows) continue;
      ++area_;
      enter();
    }
  }

 private:
  const ReadAhead::Area *area_, *end_;
  const char* row_ = nullptr;
  int64_t per_step_, byte_ = 0, done_ = 0;

  void enter() {
    while (area_ < end_ && area_->rows == 0) ++area_;
    if (area_ < end_) row_ = area_->data;
    done_ = 0;
  }
};

template <class Dot, int kRows>
inline void nt_tile(const Segment* segments, int count, int row, int col, int cols, float* c, bool accumulate,
                    AheadCursor& cursor) {
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
    for (int i = 0; i < kRows; ++i) a[i] = segment.a + ptrdiff_t(row + i) * segment.a_stride;
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
      if (k % kNtStep == 0) cursor.step();
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

template <class Dot>
void gemm_nt(const Segment* segments, int count, int rows, int cols, float* c, bool accumulate, const ReadAhead& ahead) {
  int row = 0;
  AheadCursor cursor(ahead, int64_t(rows / Vec::kRowTile + 1) * ((cols + kColTile - 1) / kColTile) *
                                (segments[0].words / kNtStep + 1));
  const auto sweep = [&](auto tile, int step) {
    for (; row + step <= rows; row += step) {
      for (int col = 0; col < cols; col += kColTile)
        tile(segments, count, row, col, cols - col < kColTile ? cols - col : kColTile, c, accumulate, cursor);
    }
  };
  sweep(nt_tile<Dot, Vec::kRowTile>, Vec::kRowTile);
  if constexpr (Vec::kRowTile > 4) sweep(nt_tile<Dot, 4>, 4);
  if constexpr (Vec::kRowTile > 2) sweep(nt_tile<Dot, 2>, 2);
  sweep(nt_tile<Dot, 1>, 1);
}

template <class Dot, int kRows>
inline void nn_tile(const Segment* segments, int count, int row, int col, int cols, float* c, bool accumulate,
                    AheadCursor& cursor) {
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
    for (int i = 0; i < kRows; ++i) a[i] = segment.a + ptrdiff_t(row + i) * segment.a_stride;
    const char* panel = segment.b + 4 * ptrdiff_t(col);
    for (int64_t k = 0; k < segment.words; ++k, panel += 4 * kBlock) {
      if (k % kNnStep == 0) cursor.step();
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
void gemm_nn(const Segment* segments, int count, int rows, int cols, float* c, bool accumulate, const ReadAhead& ahead) {
  constexpr int kCols = Vec::kPanelVecs * Vec::kLanes;
  static_assert(kBlock % kCols == 0, "a panel is a whole number of tiles");
  int row = 0;
  int64_t words = 0;
  for (int s = 0; s < count; ++s) words += segments[s].words;
  AheadCursor cursor(ahead, int64_t(rows / Vec::kPanelRows + 1) * (kBlock / kCols) * (words / kNnStep + 1));
  const auto sweep = [&](auto tile, int step) {
    for (; row + step <= rows; row += step) {
      for (int col = 0; col < cols; col += kCols) tile(segments, count, row, col, cols - col, c, accumulate, cursor);
    }
  };
  sweep(nn_tile<Dot, Vec::kPanelRows>, Vec::kPanelRows);
  if constexpr (Vec::kPanelRows > 4) sweep(nn_tile<Dot, 4>, 4);
  if constexpr (Vec::kPanelRows > 2) sweep(nn_tile<Dot, 2>, 2);
  sweep(nn_tile<Dot, 1>, 1);
}
