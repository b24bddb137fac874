// Rows that are sequences of blocks with scales of their own, as GGUF has them -> elements of words. Included by decode.inl.
//
// A format is a struct with the columns and bytes of a block. codes(block, column, lanes) are the values of its codes; a Head,
// made from a block, says what they are multiplied by, scale(column), and, if kHasOffset, what is added then, offset(column):
// the same for 16 columns at least. run(out, block, column, head) decodes kRunColumns to bf16, at the units that have runs.
// Rows begin at a multiple of 16 columns, and matrices are whole blocks wide (ktft/weights.py).

template <class Block>
inline Vec::F scaled(Vec::F codes, const typename Block::Head& head, int column) {
  const Vec::F product = Vec::mul(codes, head.scale(column));
  if constexpr (Block::kHasOffset) return Vec::add(product, head.offset(column));
  else return product;
}

// A block that begins with the fp16 number that all its codes are multiplied by.
struct OneHalf {
  const Vec::F number;
  explicit OneHalf(const char* block) : number(Vec::half(block)) {}
  Vec::F scale(int) const { return number; }
};

struct Q8_0 {
  static constexpr int kColumns = 32, kBytes = 34, kRunColumns = kRun;
  static constexpr bool kHasOffset = false;
  using Head = OneHalf;
  static Vec::F codes(const char* block, int column, int lanes) {
    return Vec::to_float(Vec::signed_bytes(block + 2 + column, lanes));
  }
  template <class Unit = Vec>
  static void run(char* out, const char* block, int column, const Head& head) {
    const auto half = [&](int at) { return scaled<Q8_0>(codes(block, at, kRun / 2), head, at); };
    Unit::store_run(out, half(column), half(column + kRun / 2));
  }
};

// 16 bytes of codes after a head, the first 16 columns in their low halves. In runs the values of all codes are worked out
// first: they are fewer than columns.
template <class Block, int head_bytes, const float* table>
struct Nibbles {
  static constexpr int kColumns = 32, kBytes = head_bytes + 16, kRunColumns = kRun;
  static constexpr bool kHasOffset = false;
  static Vec::F codes(const char* block, int column, int lanes) {
    return Vec::lookup16(table, Vec::shifted(Vec::bytes(block + head_bytes + column % 16, lanes), column / 16 * 4));
  }
  template <class Unit = Vec, class Head>
  static void run(char* out, const char* block, int column, const Head& head) {
    Unit::lookup_wide_run(out, Unit::halves_apart(block + head_bytes), scaled<Block>(Vec::load(table), head, column));
  }
};
struct Q4_0 : Nibbles<Q4_0, 2, kInt4Values> {
  using Head = OneHalf;
};
alignas(64) constexpr float kNibbleValues[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
struct Q4_1 : Nibbles<Q4_1, 4, kNibbleValues> {
  static constexpr bool kHasOffset = true;
  struct Head : OneHalf {
    const Vec::F minimum;
    explicit Head(const char* block) : OneHalf(block), minimum(Vec::half(block + 2)) {}
    Vec::F offset(int) const { return minimum; }
  };
};
struct GgufMxfp4 : Nibbles<GgufMxfp4, 1, kE2m1Values> {
  struct Head {
    const uint32_t exponent;
    explicit Head(const char* block) : exponent(uint8_t(*block)) {}
    Vec::F scale(int) const { return Vec::e8m0(Vec::broadcast(&exponent)); }
  };
};

struct Q4_K {
  static constexpr int kColumns = 256, kBytes = 144, kPacked = 4, kCodes = 16, kRunColumns = 64;
  static constexpr bool kHasOffset = true;
  struct Head {
    alignas(64) float numbers[16];  // eight scales, eight offsets
    // Six bits each: of the first four scales (minima) in the lower six of each byte of the first (second) word; of the others
    // the lower four in a half of each byte of the third word, the upper two in the upper two of those of the first four.
    template <class Unit = Vec>
    explicit Head(const char* block) {
      if constexpr (Unit::kHasRuns) {
        Unit::six_bit_numbers(block, numbers);
      } else {
        const uint8_t* const packed = reinterpret_cast<const uint8_t*>(block) + kPacked;
        const Vec::F factors[2] = {Vec::half(block), Vec::mul(Vec::half(block + 2), Vec::set1(-1.0f))};
        for (int i = 0; i < 16; ++i) {
          const int of_four = packed[i / 8 * 4 + i % 4], half = packed[8 + i % 4] >> i / 8 * 4 & 15;
          numbers[i] = float(i % 8 < 4 ? of_four & 63 : half | of_four >> 6 << 4);
        }
        for (int i = 0; i < 16; i += Vec::kLanes) Vec::store(numbers + i, Vec::mul(Vec::load(numbers + i), factors[i / 8]));
      }
    }
    Vec::F scale(int column) const { return Vec::set1(numbers[column / 32]); }
    Vec::F offset(int column) const { return Vec::set1(numbers[8 + column / 32]); }
  };
  // Of 64 columns the first 32 are the low halves of 32 bytes.
  static Vec::F codes(const char* block, int column, int lanes) {
    const char* const bytes = block + kCodes + column / 64 * 32 + column % 32;
    return Vec::lookup16(kNibbleValues, Vec::shifted(Vec::bytes(bytes, lanes), column / 32 % 2 * 4));
  }
  template <class Unit = Vec>
  static void run(char* out, const char* block, int column, const Head& head) {
    Vec::W halves[2];
    Unit::halves_of_each(block + kCodes + column / 2, halves);
    for (int i = 0; i < 2; ++i)
      Unit::lookup_wide_run(out + 64 * i, halves[i], scaled<Q4_K>(Vec::load(kNibbleValues), head, column + 32 * i));
  }
};

// Two bits and two that are not meant; less the offset of a code.
alignas(64) constexpr float kUpperValues[16] = {-32, -16, 0, 16, -32, -16, 0, 16, -32, -16, 0, 16, -32, -16, 0, 16};
struct Q6_K {
  static constexpr int kColumns = 256, kBytes = 210, kHigh = 128, kScales = 192, kScale = 208, kRunColumns = 64;
  static constexpr bool kHasOffset = false;
  struct Head {
    alignas(64) float numbers[16];
    explicit Head(const char* block) {
      const Vec::F factor = Vec::half(block + kScale);
      for_columns(16, [&](int64_t at, int lanes) {
        Vec::store(numbers + at, Vec::mul(Vec::to_float(Vec::signed_bytes(block + kScales + at, lanes)), factor));
      });
    }
    Vec::F scale(int column) const { return Vec::set1(numbers[column / 16]); }
  };
  // Of 128 columns: 64 bytes of which byte i has the lower four bits of columns i and i + 64, and 32 of which byte i has the
  // upper two of columns i, i + 32, i + 64 and i + 96.
  static Vec::F codes(const char* block, int column, int lanes) {
    const char *const low = block + column / 128 * 64 + column % 64, *const high =
                                                                         block + kHigh + column / 128 * 32 + column % 32;
    const Vec::F lower = Vec::lookup16(kNibbleValues, Vec::shifted(Vec::bytes(low, lanes), column / 64 % 2 * 4));
    const Vec::F upper = Vec::lookup16(kUpperValues, Vec::shifted(Vec::bytes(high, lanes), column / 32 % 4 * 2));
    return Vec::add(lower, upper);
  }
  template <class Unit = Vec>
  static void run(char* out, const char* block, int column, const Head& head) {
    Unit::six_bits_run(out, block + column / 128 * 64, block + kHigh + column / 128 * 32, column / 64 % 2,
                       head.numbers + column / 16);
  }
};

template <class Mode, class Block>
inline void decode_blocks(const Stored& source, int64_t rows, int64_t cols, char* words, ptrdiff_t word_stride) {
  constexpr int kSome = kRun / 2;
  const char* stored = source.data + source.row * source.stride;
  const int64_t first_byte = bytes_of(source.format, source.col), bytes = bytes_of(source.format, cols);
  for (int64_t row = 0; row < rows; ++row, stored += source.stride, words += word_stride) {
    for (int64_t byte = 0; byte < bytes; byte += 64)
      __builtin_prefetch(stored + kCodesAhead * source.stride + first_byte + byte);
    for (int64_t at = 0; at < cols;) {
      const char* const block = stored + (source.col + at) / Block::kColumns * Block::kBytes;
      const typename Block::Head head(block);
      int column = int((source.col + at) % Block::kColumns);
      const int64_t end = at + Block::kColumns - column < cols ? at + Block::kColumns - column : cols;
      while (at < end) {
        char* const out = words + at * size_of(Mode::kWord);
        if constexpr (Mode::kWord == kBf16 && Vec::kHasRuns) {
          if (column % Block::kRunColumns == 0 && at + Block::kRunColumns <= end) {
            Block::run(out, block, column, head);
            at += Block::kRunColumns;
            column += Block::kRunColumns;
            continue;
          }
        }
        for_columns(kSome, [&](int64_t col, int lanes) {
          const Vec::F value = scaled<Block>(Block::codes(block, column + int(col), lanes), head, column + int(col));
          store_cols(Mode::kWord, out + col * size_of(Mode::kWord), to_compute<Mode>(value), lanes);
        });
        at += kSome;
        column += kSome;
      }
    }
  }
}
