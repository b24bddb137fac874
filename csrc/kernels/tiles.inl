// The products of table.h on tiles of 16 rows of 64 bytes, for words of bf16 pairs. Written once for `Tiles`: the instructions
// (tiles_amx.h) or their twin in plain C++ (tiles_soft.h). Include it after unit.inl.
//
//   C [m][n] += A [m][words] * B [words][n]
//
// rows: stored rows are A as they lie, the activations, arranged, are B, and C comes out transposed. columns and panel: the
// activations are A as they lie, a panel is B.
//
// An element of C adds up, in each part, its groups of 16 words in order, and in a sum of its own the words that fill no group;
// both are added to C. Inside a group the instruction keeps the order. All products are made of this one, so layouts, numbers
// of rows and columns, and blocks of tiles never change a result.

namespace {

// Tiles 0 and 1 as [m][k] words, 2 and 3 as [k][n], 4 to 7 as [m][n], for as long as it lives.
class TileShape {
 public:
  TileShape() = default;
  ~TileShape() {
    if (m_ > 0) Tiles::release();
  }
  TileShape(const TileShape&) = delete;
  TileShape& operator=(const TileShape&) = delete;
  void set(int m, int n, int k) {
    if (m == m_ && n == n_ && k == k_) return;
    m_ = m;
    n_ = n;
    k_ = k;
    TileConfig config;
    for (int tile = 0; tile < kTiles; ++tile) {
      config.rows[tile] = uint8_t(tile == 2 || tile == 3 ? k : m);
      config.row_bytes[tile] = uint16_t(4 * (tile < 2 ? k : n));
    }
    Tiles::configure(config);
  }

 private:
  int m_ = 0, n_ = 0, k_ = 0;
};

// Tile (i, k) begins at data + i * tile_step + k * group_step.
struct TileRows {
  const char* data;
  ptrdiff_t tile_step, group_step;
  ptrdiff_t stride;  // between a tile's rows
};

// `count` tiles of `size` from `first`: f gets the full tiles, then the one of what is left.
struct Span {
  int64_t first;
  int size, count;
};
template <class Function>
inline void for_spans(int64_t total, Function f) {
  const int64_t full = total / kTile;
  if (full > 0) f(Span{0, kTile, int(full)});
  if (total % kTile > 0) f(Span{full * kTile, int(total % kTile), 1});
}

// f(Count<0>()), f(Count<1>()), ...
template <int kCount, class Function>
inline void unrolled(Function f) {
  if constexpr (kCount > 0) {
    unrolled<kCount - 1>(f);
    f(Count<kCount - 1>());
  }
}

// Where tiles of C are added to, and how much of them counts: m rows and n columns, or, transposed, columns and rows.
struct TileSums {
  float* c;  // rows kBlock apart
  int m, n;
};

inline void add_tile(const float* sums, const TileSums& to, float* c) {
  for (int row = 0; row < to.m; ++row, c += kBlock, sums += kTile)
    for_columns(to.n, [&](int64_t col, int lanes) {
      const Vec::F sum = load_cols(kFp32, bytes(sums + col), lanes);
      store_cols(kFp32, bytes(c + col), Vec::add(load_cols(kFp32, bytes(c + col), lanes), sum), lanes);
    });
}

inline void add_transposed(const float* sums, const TileSums& to, float* c) {
  if (to.m < kTile) {
    for (int row = 0; row < to.n; ++row)
      for (int col = 0; col < to.m; ++col) c[row * kBlock + col] += sums[col * kTile + row];
    return;
  }
  for (int row = 0; row < to.n; row += Vec::kLanes)
    for (int col = 0; col < kTile; col += Vec::kLanes) {
      Vec::W turned[Vec::kLanes];
      Vec::transpose(bytes(sums + col * kTile + row), 4 * kTile, turned);
      for (int i = 0; i < Vec::kLanes && row + i < to.n; ++i) {
        float* const out = c + (row + i) * kBlock + col;
        Vec::store(out, Vec::add(Vec::load(out), Vec::floats(turned[i])));
      }
    }
}

// A group of tiles takes as long as several of a vector unit's: something is read ahead beside each.
template <class Mode>
using TileAside = Aside<Mode, 1>;

// kA x kB tiles of C over `groups` groups of words, from tile (i, j) on.
template <bool kTransposed, int kA, int kB, class Side>
inline void tile_block(TileRows a, int i, TileRows b, int j, int groups, Side& aside, const TileSums& to) {
  static_assert(kA * kB <= 4 && (kA == 1 || kB <= 2), "four tiles of C, two of A, two of B that wait for all of A");
  a.data += i * a.tile_step;
  b.data += j * b.tile_step;
  unrolled<kA * kB>([](auto c) { Tiles::zero<4 + c.value>(); });
  for (int group = 0; group < groups; ++group, a.data += a.group_step, b.data += b.group_step) {
    aside.group(group);
    unrolled<kA>([&](auto row) {
      Tiles::load<row.value % 2>(a.data + row.value * a.tile_step, a.stride);
      unrolled<kB>([&](auto col) {
        if constexpr (row.value == 0) Tiles::load<2 + col.value % 2>(b.data + col.value * b.tile_step, b.stride);
        Tiles::dot<4 + row.value * kB + col.value, row.value % 2, 2 + col.value % 2>();
      });
    });
  }
  unrolled<kA * kB>([&](auto c) {
    alignas(64) float sums[kTile * kTile] = {};
    Tiles::store<4 + c.value>(sums, 4 * kTile);
    const ptrdiff_t row = kTile * (i + c.value / kB), col = kTile * (j + c.value % kB);
    if (kTransposed) add_transposed(sums, to, to.c + col * kBlock + row);
    else add_tile(sums, to, to.c + row * kBlock + col);
  });
}

// The same for any number of tiles of A and B.
template <bool kTransposed, class Side>
inline void tile_grid(const TileRows& a, int a_tiles, const TileRows& b, int b_tiles, int groups, Side& aside,
                      const TileSums& to) {
  if (b_tiles == 1) {
    for_rows<4>(a_tiles, [&](auto count, int i) { tile_block<kTransposed, count.value, 1>(a, i, b, 0, groups, aside, to); });
  } else if (a_tiles == 1) {
    for_rows<4>(b_tiles, [&](auto count, int j) { tile_block<kTransposed, 1, count.value>(a, 0, b, j, groups, aside, to); });
  } else {
    for_rows<2>(a_tiles, [&](auto rows, int i) {
      for_rows<2>(b_tiles,
                  [&](auto cols, int j) { tile_block<kTransposed, rows.value, cols.value>(a, i, b, j, groups, aside, to); });
    });
  }
}

// Groups of words that the blocks of tiles in a product go through, or so: four multiplications each.
inline int64_t aside_groups(int64_t rows, int64_t cols, int64_t words) {
  const auto tiles = [](int64_t n) { return (n + kTile - 1) / kTile; };
  return (tiles(rows) * tiles(cols) * tiles(words) + 3) / 4;
}

inline void arrange_rows(const char* source, ptrdiff_t stride, int rows, int64_t first, int64_t count, int64_t words,
                         char* arranged) {
  static_assert(kTile % Vec::kLanes == 0, "a group of rows is the columns of a tile");
  for (int row = 0; row < rows; row += kTile, source += kTile * stride, arranged += 4 * kTile * words) {
    const int n = rows - row < kTile ? rows - row : kTile;
    char* const out = arranged + 4 * first * n;
    int64_t k = 0;
    for (; n == kTile && k + Vec::kLanes <= count; k += Vec::kLanes)
      for (int i = 0; i < kTile; i += Vec::kLanes) {
        Vec::W turned[Vec::kLanes];
        Vec::transpose(source + i * stride + 4 * k, stride, turned);
        for (int j = 0; j < Vec::kLanes; ++j) Vec::store_words(out + 4 * ((k + j) * kTile + i), turned[j]);
      }
    for (; k < count; ++k)
      for (int i = 0; i < n; ++i) __builtin_memcpy(out + 4 * (k * n + i), source + i * stride + 4 * k, 4);
  }
}

template <class Mode>
void multiply_rows_as_tiles(const Operands& x, int rows, int cols, float* c, const Ahead& ahead) {
  constexpr int kRows = 2 * kTile;  // two tiles of B against all the columns
  const int64_t words = words_of<Mode>(x);
  alignas(64) char own[kRows * kPartWords * 4];
  TileShape shape;
  for (int64_t part = 0; part < words; part += kPartWords) {
    const int64_t left = words - part, count = left < kPartWords ? left : kPartWords;
    const int64_t after = left - count < kPartWords ? left - count : kPartWords;
    Ahead next;  // of a whole reduction in one call
    next.areas[0] = {x.b + 4 * (part + count), x.b_stride, cols, 4 * after};
    TileAside<Mode> aside(left > count ? next : ahead, aside_groups(rows, cols, count));
    for (int row = 0; row < rows; row += kRows) {
      const int some = rows - row < kRows ? rows - row : kRows;
      Arranged arranged;
      if (x.arranged.data) {
        arranged = {x.arranged.data + 4 * row * x.arranged.words, x.arranged.words, x.arranged.first + part};
      } else {
        arrange_rows(x.a + row * x.a_stride + 4 * part, x.a_stride, some, 0, count, count, own);
        arranged = {own, count, 0};
      }
      for_spans(some, [&](Span n) {
        const ptrdiff_t word = 4 * n.size;
        const char* const group = arranged.data + 4 * n.first * arranged.words + word * arranged.first;
        for_spans(cols, [&](Span m) {
          const char* const stored = x.b + m.first * x.b_stride + 4 * part;
          for_spans(count, [&](Span k) {
            shape.set(m.size, n.size, k.size);
            tile_grid<true>({stored + 4 * k.first, kTile * x.b_stride, 4 * kTile, x.b_stride}, m.count,
                            {group + word * k.first, 4 * kTile * arranged.words, word * kTile, word}, n.count, k.count, aside,
                            {c + (row + n.first) * kBlock + m.first, m.size, n.size});
          });
        });
      });
    }
    aside.finish();
  }
}

// c += rows of words, `words` long, times a panel.
template <class Side>
inline void panel_as_tiles(const char* a, ptrdiff_t a_stride, int64_t words, const char* panel, int rows, int cols, float* c,
                           TileShape& shape, Side& aside) {
  for_spans(rows, [&](Span m) {
    for_spans(cols, [&](Span n) {
      for_spans(words, [&](Span k) {
        shape.set(m.size, n.size, k.size);
        tile_grid<false>({a + m.first * a_stride + 4 * k.first, kTile * a_stride, 4 * kTile, a_stride}, m.count,
                         {panel + 4 * (k.first * kBlock + n.first), 4 * kTile, 4 * kTile * kBlock, 4 * kBlock}, n.count,
                         k.count, aside, {c + m.first * kBlock + n.first, m.size, n.size});
      });
    });
  });
}

template <class Mode>
void multiply_panel_as_tiles(const Operands& x, int rows, int cols, float* c, const Ahead& ahead) {
  const int64_t words = words_of<Mode>(x);
  TileShape shape;
  TileAside<Mode> aside(ahead, aside_groups(rows, cols, words));
  panel_as_tiles(x.a, x.a_stride, words, x.b, rows, cols, c, shape, aside);
  aside.finish();
}

// Tiles want pairs of rows interleaved, however few rows A has.
template <class Mode>
void multiply_columns_as_tiles(const Operands& x, int rows, int cols, float* c, const Ahead& ahead) {
  constexpr int kGroup = Mode::Dot::kGroup;
  alignas(64) char panel[kPartWords * kBlock * 4];
  TileShape shape;
  for (int col = 0; col < cols; col += kBlock, c += kFewRows * kBlock) {
    const int some = cols - col < kBlock ? cols - col : kBlock;
    for (int64_t begin = 0; begin < x.length; begin += kGroup * kPartWords) {
      const int64_t length = x.length - begin < kGroup * kPartWords ? x.length - begin : kGroup * kPartWords;
      const int64_t words = (length + kGroup - 1) / kGroup;
      const bool last = col + kBlock >= cols && begin + length == x.length;
      TileAside<Mode> aside(last ? ahead : Ahead{}, aside_groups(rows, some, words));
      const char* const stored = x.b + begin * x.b_stride + col * size_of(x.format);
      decode_panel<Mode>({{stored, x.b_stride, x.format}, false, length, some}, panel);
      panel_as_tiles(x.a + begin / kGroup * 4, x.a_stride, words, panel, rows, some, c, shape, aside);
    }
  }
}

template <class Mode>
struct TileProducts {
  static constexpr Kernels::Product *kRows = multiply_rows_as_tiles<Mode>, *kPhased = nullptr,
                                    *kColumns = multiply_columns_as_tiles<Mode>, *kPanel = multiply_panel_as_tiles<Mode>;
  static constexpr decltype(Kernels::multiply_coded) kMultiplyCoded = nullptr;
  static constexpr auto kArrangeRows = arrange_rows;
};

}  // namespace
