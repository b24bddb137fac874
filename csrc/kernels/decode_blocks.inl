// Rows that are sequences of blocks with scales of their own, as GGUF has them -> elements of words. Included by decode.inl.
//
// A format is a struct with the columns and bytes of a block: codes(block, column, lanes) are the values of its codes,
// scale(block, column) what each is multiplied by, offset(block, column), if kHasOffset, what is added then: that of 16 columns
// at least. run(out, block, column) decodes kRun columns to bf16, at the units that have runs. Rows begin at a multiple of 16
// columns, and matrices are whole blocks wide (ktft/weights.py).

template <class Block>
inline Vec::F scaled(Vec::F codes, const char* block, int column) {
  const Vec::F product = Vec::mul(codes, Block::scale(block, column));
  if constexpr (Block::kHasOffset) return Vec::add(product, Block::offset(block, column));
  else return product;
}

struct Q8_0 {
  static constexpr int kColumns = 32, kBytes = 34;
  static constexpr bool kHasOffset = false;
  static Vec::F codes(const char* block, int column, int lanes) {
    return Vec::to_float(Vec::signed_bytes(block + 2 + column, lanes));
  }
  static Vec::F scale(const char* block, int) { return Vec::half(block); }
  template <class Unit = Vec>
  static void run(char* out, const char* block, int column) {
    const auto half = [&](int at) { return scaled<Q8_0>(codes(block, at, kRun / 2), block, at); };
    Unit::store_run(out, half(column), half(column + kRun / 2));
  }
};

// 16 bytes of codes after a head; their low halves are the first 16 columns.
template <int head, const float* table>
struct Nibbles {
  static constexpr int kColumns = 32, kBytes = head + 16;
  static constexpr bool kHasOffset = false;
  static Vec::F codes(const char* block, int column, int lanes) {
    return Vec::lookup16(table, Vec::field(Vec::bytes(block + head + column % 16, lanes), column / 16 * 4, 15));
  }
};
// The same with the values of all codes worked out first: they are fewer than columns.
template <class Block, const float* table>
inline Vec::F scaled_table(const char* block, int column) {
  return scaled<Block>(Vec::load(table), block, column);
}
struct Q4_0 : Nibbles<2, kInt4Values> {
  static Vec::F scale(const char* block, int) { return Vec::half(block); }
  template <class Unit = Vec>
  static void run(char* out, const char* block, int) {
    Unit::lookup_wide_run(out, Unit::halves_apart(block + 2), scaled_table<Q4_0, kInt4Values>(block, 0));
  }
};
alignas(64) constexpr float kNibbleValues[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
struct Q4_1 : Nibbles<4, kNibbleValues> {
  static constexpr bool kHasOffset = true;
  static Vec::F scale(const char* block, int) { return Vec::half(block); }
  static Vec::F offset(const char* block, int) { return Vec::half(block + 2); }
  template <class Unit = Vec>
  static void run(char* out, const char* block, int) {
    Unit::lookup_wide_run(out, Unit::halves_apart(block + 4), scaled_table<Q4_1, kNibbleValues>(block, 0));
  }
};
struct GgufMxfp4 : Nibbles<1, kE2m1Values> {
  static Vec::F scale(const char* block, int) {
    const uint32_t exponent = uint8_t(*block);
    return Vec::e8m0(Vec::broadcast(&exponent));
  }
  template <class Unit = Vec>
  static void run(char* out, const char* block, int) {
    Unit::lookup_wide_run(out, Unit::halves_apart(block + 1), scaled_table<GgufMxfp4, kE2m1Values>(block, 0));
  }
};

struct Q4_K {
  static constexpr int kColumns = 256, kBytes = 144, kCodes = 16;
  static constexpr bool kHasOffset = true;
  // Of 64 columns the first 32 are the low halves of 32 bytes.
  static const char* bytes(const char* block, int column) { return block + kCodes + column / 64 * 32 + column % 32; }
  static int shift(int column) { return column / 32 % 2 * 4; }
  static Vec::F codes(const char* block, int column, int lanes) {
    return Vec::to_float(Vec::field(Vec::bytes(bytes(block, column), lanes), shift(column), 15));
  }
  // Six bits for 32 columns: the first four numbers are the lower six of bytes `at` and on. The others have their lower four
  // bits in a half of bytes 8 and on, and the upper two in the upper two of the bytes of the first four.
  static float six_bits(const char* block, int column, int at, int half) {
    const uint8_t* const packed = reinterpret_cast<const uint8_t*>(block) + 4;
    const int group = column / 32, of_four = packed[at + group % 4];
    return float(group < 4 ? of_four & 63 : (packed[8 + group % 4] >> half & 15) | of_four >> 6 << 4);
  }
  static Vec::F scale(const char* block, int column) {
    return Vec::mul(Vec::half(block), Vec::set1(six_bits(block, column, 0, 0)));
  }
  static Vec::F offset(const char* block, int column) {
    return Vec::mul(Vec::half(block + 2), Vec::set1(-six_bits(block, column, 4, 4)));
  }
  template <class Unit = Vec>
  static void run(char* out, const char* block, int column) {
    Unit::lookup_wide_run(out, Unit::half_of_each(bytes(block, column), shift(column)),
                          scaled_table<Q4_K, kNibbleValues>(block, column));
  }
};

struct Q6_K {
  static constexpr int kColumns = 256, kBytes = 210, kHigh = 128, kScales = 192, kScale = 208;
  static constexpr bool kHasOffset = false;
  // Of 128 columns: 64 bytes of which byte i has the lower four bits of columns i and i + 64, and 32 of which byte i has the
  // upper two of columns i, i + 32, i + 64 and i + 96.
  static const char* low(const char* block, int column) { return block + column / 128 * 64 + column % 64; }
  static int low_shift(int column) { return column / 64 % 2 * 4; }
  static const char* high(const char* block, int column) { return block + kHigh + column / 128 * 32 + column % 32; }
  static int high_shift(int column) { return column / 32 % 4 * 2; }
  static Vec::F codes(const char* block, int column, int lanes) {
    const Vec::F lower = Vec::to_float(Vec::field(Vec::bytes(low(block, column), lanes), low_shift(column), 15));
    const Vec::F upper = Vec::to_float(Vec::field(Vec::bytes(high(block, column), lanes), high_shift(column), 3));
    return Vec::sub(Vec::add(lower, Vec::mul(upper, Vec::set1(16))), Vec::set1(32));
  }
  static Vec::F scale(const char* block, int column) {
    return Vec::mul(Vec::half(block + kScale), Vec::set1(float(int8_t(block[kScales + column / 16]))));
  }
  template <class Unit = Vec>
  static void run(char* out, const char* block, int column) {
    Unit::six_bits_run(out, low(block, column), low_shift(column), high(block, column), high_shift(column),
                       scale(block, column), scale(block, column + kRun / 2));
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
      const int column = int((source.col + at) % Block::kColumns);
      char* const out = words + at * size_of(Mode::kWord);
      if constexpr (Mode::kWord == kBf16 && Vec::kHasRuns) {
        if (column % kRun == 0 && at + kRun <= cols) {
          Block::run(out, block, column);
          at += kRun;
          continue;
        }
      }
      for_columns(kSome, [&](int64_t col, int lanes) {
        const Vec::F value = scaled<Block>(Block::codes(block, column + int(col), lanes), block, column + int(col));
        store_cols(Mode::kWord, out + col * size_of(Mode::kWord), to_compute<Mode>(value), lanes);
      });
      at += kSome;
    }
  }
}
