// The products of table.h, for one vector unit `Vec` and one word type `Mode::Dot`. Included by unit.inl inside an anonymous
// namespace.
//
// Every accumulator lane belongs to one element of C, in products of rows also to one phase of a part of the reduction, and
// is fed in the order of the words; phases and parts are added to C in order. Tile sizes and layouts of B therefore never
// change a result.

// Words of plain fp32; available at every level.
struct Fp32Dot {
  static constexpr int kGroup = 1;
  static Vec::F dot(Vec::F acc, Vec::W a, Vec::W b) { return Vec::fma(Vec::floats(a), Vec::floats(b), acc); }
};

template <class Mode>
inline int64_t words_of(const Operands& x) {
  return (x.length + Mode::Dot::kGroup - 1) / Mode::Dot::kGroup;
}

// Words of a panel that all rows take before the next ones: 32 KiB of it stay in L1.
constexpr int64_t kTurnWords = 128;

constexpr int64_t kAheadStep = 8;  // groups of four words between two steps of read-ahead

// How many stored rows of a panel's source are on their way into L2 before they are decoded. Not the whole source: rows that
// lie a power of two apart share few sets of L2 (2048 tokens of Qwen3-30B's shape, two threads, Zen 5, forward and backward
// with 32, 64 and 160 rows: 422, 427 and 438 ms).
constexpr int64_t kLeadRows = 32;

// What a product does on the side: reads some cache lines ahead at each step, and decodes words of the next panel. Steps are
// short: a burst of requests would wait for the few that can be under way, or be dropped.
template <class Mode, int kStep = kAheadStep>
class Aside {
 public:
  // `groups`: of words, in all full tiles together.
  Aside(const Ahead& ahead, int64_t groups)
      : source_(ahead.next),
        panel_(ahead.next_panel),
        words_(source_.data ? source_.length / Mode::Dot::kGroup : 0),
        groups_(groups) {
    const auto add = [&](const PanelSource& source, int64_t begin, int64_t end) {
      if (source.data && begin < end)
        *end_++ = {source.data + begin * source.stride, source.stride, end - begin, source.columns * size_of(source.format)};
    };
    add(ahead.next, kLeadRows, ahead.next.length);
    add(ahead.then, 0, ahead.then.length < kLeadRows ? ahead.then.length : kLeadRows);
    for (const Ahead::Area& area : ahead.areas)
      if (area.rows > 0 && area.data) *end_++ = area;
    int64_t lines = 0;
    for (const Ahead::Area* area = areas_; area < end_; ++area) lines += area->rows * ((area->bytes + 63) / 64 + 1);
    const int64_t steps = groups / kStep + 1;
    per_step_ = (lines + steps - 1) / steps;
    if (area_ < end_) enter_row(area_->data);
  }
  // Beside a group of words.
  void group(int64_t number) {
    if (number % kStep == 0) read();
    if constexpr (Mode::Dot::kGroup == 2) {
      for (credit_ += words_; credit_ >= groups_ && word_ < words_; credit_ -= groups_)
        decode_word<Mode>(source_, word_++, panel_);
    }
  }
  void finish() {
    while (word_ < words_) decode_word<Mode>(source_, word_++, panel_);
  }

 private:
  const PanelSource source_;
  char* const panel_;
  const int64_t words_, groups_;
  int64_t word_ = 0, credit_ = 0;
  Ahead::Area areas_[Ahead::kAreas + 2];
  Ahead::Area *area_ = areas_, *end_ = areas_;
  const char *row_ = nullptr, *line_ = nullptr;
  int64_t per_step_, done_ = 0;

  void read() {
    for (int64_t i = 0; i < per_step_ && area_ < end_; ++i) {
      __builtin_prefetch(line_, 0, 2);
      line_ += 64;
      if (line_ < row_ + area_->bytes) continue;
      if (++done_ < area_->rows) {
        enter_row(row_ + area_->stride);
      } else {
        done_ = 0;
        if (++area_ < end_) enter_row(area_->data);
      }
    }
  }
  void enter_row(const char* row) {
    row_ = row;
    line_ = row - (uintptr_t(row) & 63);
  }
};

// Calls tile(Count<n>, first row) for tiles of kMost rows; the last two share what is left: a tile of one or two rows would
// wait for its own sums.
template <int kRows>
struct Count {
  static constexpr int value = kRows;
};
template <int kRows, class Tile>
inline void tile_of(int rows, int row, Tile tile) {
  if constexpr (kRows > 0) {
    if (rows == kRows) tile(Count<kRows>(), row);
    else tile_of<kRows - 1>(rows, row, tile);
  }
}
template <int kMost, class Tile>
inline void for_rows(int rows, Tile tile) {
  for (int row = 0, left = rows; left > 0;) {
    const int next = left >= 2 * kMost || left == kMost ? kMost : left > kMost ? (left + 1) / 2 : left;
    tile_of<kMost>(next, row, tile);
    row += next;
    left -= next;
  }
}

// --- rows: both operands contiguous along the reduction

// Few rows are bound by memory. So many lines ahead in each of a tile's streams keep more requests under way than a core's
// window does (one row of 2048 bf16, two threads, Zen 5: 4, 8 and 16 lines are equal within noise, 32 are slower).
constexpr int kLinesAhead = 8;
// They go past L2 and L3 (locality 0), which then keep what the rest of a model wants again, torch's and Python's code
// too: forward of one and of four tokens of Qwen3-30B's shape takes 4 % less, while for columns the same
// makes backward of 64 tokens 8 % slower (two threads, Zen 5, 2026-12-01).
constexpr int kReadOnce = 0;

// To the first `cols` of four columns, if there are any.
inline void add_some_quads(Vec::F acc, float* out, int cols) {
  if (cols >= 4) {
    Vec::add_quads(acc, out);
  } else if (cols > 0) {
    float sums[4] = {0, 0, 0, 0};
    __builtin_memcpy(sums, out, size_t(cols) * 4);
    Vec::add_quads(acc, sums);
    __builtin_memcpy(out, sums, size_t(cols) * 4);
  }
}

// Four lanes of an accumulator hold four columns, and lanes 4 q .. 4 q + 3 add up words 4 q .. 4 q + 3 of every kLanes words.
template <class Mode, int kRows, int kGroups>
inline void rows_tile(const Operands& x, int row, int col, int cols, float* c, const Ahead::Area& next) {
  constexpr int kCols = 4 * kGroups;
  const int64_t words = words_of<Mode>(x);
  const char *a = x.a + row * x.a_stride, *b[kCols];
#pragma GCC unroll 8
  for (int j = 0; j < kCols; ++j)  // columns past the edge repeat the last one and are not stored
    b[j] = x.b + ptrdiff_t(col + (j < cols ? j : cols - 1)) * x.b_stride;
  for (int64_t part = 0; part < words; part += kPartWords) {
    const int64_t end = words - part < kPartWords ? words : part + kPartWords;
    const int64_t full = part + (end - part) / Vec::kLanes * Vec::kLanes;
    Vec::F acc[kRows][kGroups];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; ++g) acc[i][g] = Vec::zero();
    const auto step = [&](int64_t k, auto load) __attribute__((always_inline)) {
      Vec::W quads[kGroups][4];
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; ++g) {
        const Vec::W rows[4] = {load(b[4 * g] + 4 * k), load(b[4 * g + 1] + 4 * k), load(b[4 * g + 2] + 4 * k),
                                load(b[4 * g + 3] + 4 * k)};
        Vec::transpose_quads(rows, quads[g]);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const Vec::W y = load(a + i * x.a_stride + 4 * k);
        const Vec::W spread[4] = {Vec::template spread<0>(y), Vec::template spread<1>(y), Vec::template spread<2>(y),
                                  Vec::template spread<3>(y)};
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j)
#pragma GCC unroll 2
          for (int g = 0; g < kGroups; ++g) acc[i][g] = Mode::Dot::dot(acc[i][g], spread[j], quads[g][j]);
      }
    };
    for (int64_t k = part; k < full; k += Vec::kLanes) {
      if (row == 0) {
        const int64_t ahead = 4 * k + 64 * kLinesAhead;
        if (ahead < 4 * words) {
#pragma GCC unroll 8
          for (int j = 0; j < kCols; ++j) __builtin_prefetch(b[j] + ahead, 0, kReadOnce);
        } else if (next.rows >= kCols) {
#pragma GCC unroll 8
          for (int j = 0; j < kCols; ++j) __builtin_prefetch(next.data + j * next.stride + ahead - 4 * words, 0, kReadOnce);
        }
      }
      step(k, [](const char* p) { return Vec::load_words(p); });
    }
    if (full < end) {
      const int tail = int(end - full);
      step(full, [tail](const char* p) { return Vec::load_words_n(p, tail); });
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; ++g) {
        add_some_quads(acc[i][g], c + ptrdiff_t(row + i) * kBlock + col + 4 * g, cols - 4 * g);
      }
    }
  }
}

template <class Mode>
void multiply_rows(const Operands& x, int rows, int cols, float* c, const Ahead& ahead) {
  constexpr int kCols = 4 * Vec::kRowGroups;
  for_rows<Vec::kRowTile>(rows, [&](auto step, int row) {
    const auto sweep = [&](int col, int end, auto groups) {
      constexpr int kTile = 4 * groups.value;
      for (; col < end; col += kTile) {
        const Ahead::Area& next = ahead.areas[0];
        const bool last = col + kTile >= cols;  // what the thread wants after this tile: the next one, or the caller's
        rows_tile<Mode, step.value, groups.value>(
            x, row, col, cols - col, c, last ? next : Ahead::Area{x.b + (col + kTile) * x.b_stride, x.b_stride, kTile, 0});
      }
    };
    const int wide = (cols + 3) / kCols * kCols;  // columns past the edge cost as much as others
    sweep(0, wide < cols ? wide : cols, Count<Vec::kRowGroups>());
    sweep(wide, cols, Count<1>());
  });
}

// --- panels

template <class Mode, int kRows, int kVecs>
inline void panel_tile(const Operands& x, const Phase& phase, int row, int col, int cols, float* c, Aside<Mode>& aside) {
  Vec::F acc[kRows][kVecs];
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j)
      acc[i][j] = phase.continues ? Vec::load(c + ptrdiff_t(row + i) * kBlock + col + j * Vec::kLanes) : Vec::zero();

  const char *a[kRows], *panel = x.b + 4 * (phase.first * kBlock + col);
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) a[i] = x.a + (row + i) * x.a_stride + phase.offset;
  ptrdiff_t at = 0;
  const auto word = [&](int k) __attribute__((always_inline)) {
    Vec::W b[kVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) b[j] = Vec::load_words(panel + 4 * (k * kBlock + j * Vec::kLanes));
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      const Vec::W y = Vec::broadcast(a[i] + at + 4 * k);
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) acc[i][j] = Mode::Dot::dot(acc[i][j], y, b[j]);
    }
  };
  for (int64_t group = 0; group < phase.groups; ++group, at += phase.step, panel += 16 * kBlock) {
    word(0);
    word(1);
    word(2);
    word(3);
    aside.group(group);
  }
  for (int k = 0; k < phase.rest; ++k) word(k);
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
    float* out = c + ptrdiff_t(row + i) * kBlock + col;
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) {  // the tile may hang over `cols`: C is kBlock wide, so the store stays inside the row
      if (j * Vec::kLanes >= cols) break;
      Vec::store(out + j * Vec::kLanes, phase.continues ? acc[i][j] : Vec::add(Vec::load(out + j * Vec::kLanes), acc[i][j]));
    }
  }
}

template <class Mode, bool phased>
void multiply_panel(const Operands& x, int rows, int cols, float* c, const Ahead& ahead) {
  constexpr int kVecs = Vec::kPanelVecs, kCols = kVecs * Vec::kLanes;
  static_assert(kBlock % kCols == 0, "a panel is a whole number of tiles");
  const int64_t words = words_of<Mode>(x);
  Aside<Mode> aside(ahead, (rows / Vec::kPanelRows) * (kBlock / kCols) * (words / 4) + 1);
  const auto sweep = [&](const Phase& phase) {
    const auto tile = [&](auto step, int row, auto vecs) {
      for (int col = 0; col < cols; col += vecs.value * Vec::kLanes)
        panel_tile<Mode, step.value, vecs.value>(x, phase, row, col, cols - col, c, aside);
    };
    if (cols <= Vec::kLanes) {  // LoRA ranks: narrow tiles, more rows
      for_rows<2 * Vec::kPanelRows>(rows, [&](auto step, int row) { tile(step, row, Count<1>()); });
    } else {
      for_rows<Vec::kPanelRows>(rows, [&](auto step, int row) { tile(step, row, Count<kVecs>()); });
    }
  };
  if constexpr (phased) {
    for (int i = 0; i < kPhases; ++i) {
      const Phase phase = phase_of(words, i);
      if (phase.groups > 0 || phase.rest > 0) sweep(phase);
    }
  } else {
    for (int64_t first = 0; first < words; first += kTurnWords) {
      const int64_t count = words - first < kTurnWords ? words - first : kTurnWords;
      sweep({first, count / 4, int(count % 4), 4 * first, 16, true});
    }
  }
  aside.finish();
}

// --- columns: stored elements, two rows made into words in registers

// Words of a reduction that a tile takes before the next columns have their turn at the same rows: runs of all the columns are
// read from memory, and sums wait in L1.
constexpr int64_t kTurn = 16;

// sums [kRows][kWideColumns] += words [begin, end) of the reduction
template <class Mode, int kRows>
inline void columns_tile(const Operands& x, int64_t begin, int64_t end, int row, int col, int cols, float* sums) {
  constexpr int kVecs = Vec::kPanelVecs, kGroup = Mode::Dot::kGroup;
  const int size = size_of(x.format);
  const char *a = x.a + row * x.a_stride, *b = x.b + begin * kGroup * x.b_stride + col * size;
  Vec::F acc[kRows][kVecs];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) acc[i][j] = Vec::load(sums + i * kWideColumns + j * Vec::kLanes);
  for (int64_t k = begin; k < end; ++k, b += kGroup * x.b_stride) {
    if (row == 0) {
      for (int i = 0; i < kGroup; ++i) {
        const char* const ahead = b + (kRowsAhead + i) * x.b_stride;
        for (int byte = 0; byte < kVecs * Vec::kLanes * size; byte += 64) __builtin_prefetch(ahead + byte, 0, 3);
      }
    }
    Vec::W words[kVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) {
      const int lanes = cols - j * Vec::kLanes;
      words[j] = lanes <= 0 ? Vec::words(Vec::zero())
                            : column_words<Mode>(x.format, b + j * Vec::kLanes * size, x.b_stride, (k + 1) * kGroup <= x.length,
                                                 lanes < Vec::kLanes ? lanes : Vec::kLanes);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Vec::W y = Vec::broadcast(a + i * x.a_stride + 4 * k);
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) acc[i][j] = Mode::Dot::dot(acc[i][j], y, words[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) Vec::store(sums + i * kWideColumns + j * Vec::kLanes, acc[i][j]);
}

// C tiles of a wide product of columns -> sums [kFewRows][kWideColumns], or back.
inline void move_wide_sums(float* c, int rows, int cols, float* sums, bool back) {
  for (int row = 0; row < rows; ++row)
    for (int col = 0; col < cols; col += Vec::kLanes) {
      float *const tile = c + (col / kBlock * kFewRows + row) * kBlock + col % kBlock, *const sum =
                                                                                           sums + row * kWideColumns + col;
      Vec::store(back ? tile : sum, Vec::load(back ? sum : tile));
    }
}

template <class Mode>
void multiply_columns(const Operands& x, int rows, int cols, float* c, const Ahead&) {
  constexpr int kCols = Vec::kPanelVecs * Vec::kLanes;
  const int64_t words = words_of<Mode>(x);
  alignas(64) float sums[kFewRows * kWideColumns];
  move_wide_sums(c, rows, cols, sums, false);
  for (int64_t begin = 0; begin < words; begin += kTurn) {
    const int64_t end = words - begin < kTurn ? words : begin + kTurn;
    for (int col = 0; col < cols; col += kCols)
      for_rows<Vec::kPanelRows>(rows, [&](auto step, int row) {
        columns_tile<Mode, step.value>(x, begin, end, row, col, cols - col, sums + row * kWideColumns + col);
      });
  }
  move_wide_sums(c, rows, cols, sums, true);
}
