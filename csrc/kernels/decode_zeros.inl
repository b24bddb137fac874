// Codes of four bits with a scale and a zero point for each column of some stored rows: (code - zero) * scale in fp32, rounded
// once; GPTQ and AWQ, which store the transpose, so that their rows are inputs. Included by decode.inl.
//
// A format is a struct with its codes, codes(line, row, column, lanes), and its zero points, zeros(row, column, lanes), as
// words whose lowest four bits they are.

alignas(64) constexpr float kNextValues[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0};

struct GptqCodes {  // eight rows to a word; of zero points eight columns
  static constexpr Packing kPacking = packing_of(kGptq);
  static Vec::W codes(const char* line, int64_t row, int64_t col, int lanes) {
    const char* const words = line + 4 * col;
    return Vec::shifted(lanes == Vec::kLanes ? Vec::load_words(words) : Vec::load_words_n(words, lanes), int(row % 8) * 4);
  }
  static Vec::W zeros(const char* row, int64_t col, int lanes) { return Vec::nibbles(row + col / 2, lanes); }
};
struct AwqCodes {
  static constexpr Packing kPacking = packing_of(kAwq);
  static Vec::W codes(const char* line, int64_t, int64_t col, int lanes) { return Vec::awq(line, col, lanes); }
  static Vec::W zeros(const char* row, int64_t col, int lanes) { return Vec::awq(row, col, lanes); }
};

// Rows [begin, end) of `cols` columns from `first` on, which share scales and zero points: some columns of all rows, then the
// next, so that those stay in registers.
template <class Mode, class Codes>
inline void decode_group(const Stored& source, int64_t begin, int64_t end, int64_t first, int cols, const float* scale,
                         const float* zero, char* words, ptrdiff_t word_stride) {
  constexpr Packing kPacking = Codes::kPacking;
  const auto line = [&](int64_t row) { return source.data + (source.row + row) / kPacking.rows * source.stride; };
  const int64_t col = source.col + first, first_byte = col * kPacking.bytes / kPacking.columns;
  const int64_t lines = (end - begin + kPacking.rows - 1) / kPacking.rows;
  for (int64_t i = 0; i < lines; ++i)
    for (int byte = 0; byte < cols * kPacking.bytes / kPacking.columns; byte += 64)
      __builtin_prefetch(line(begin + kCodesAhead) + i * source.stride + first_byte + byte);
  for_columns(cols, [&](int64_t at, int lanes) {
    const Vec::F factor = Vec::load(scale + at), zero_point = Vec::load(zero + at);
    char* const out = words + (first + at) * size_of(Mode::kWord);
    for (int64_t row = begin; row < end; ++row) {
      const Vec::F code = Vec::lookup16(kNibbleValues, Codes::codes(line(row), source.row + row, col + at, lanes));
      const Vec::F value = Vec::mul(Vec::sub(code, zero_point), factor);
      store_cols(Mode::kWord, out + row * word_stride, to_compute<Mode>(value), lanes);
    }
  });
}

template <class Mode, class Codes, ScaleFormat format>
inline void decode_zeroed(const Stored& source, int64_t rows, int64_t cols, char* words, ptrdiff_t word_stride) {
  constexpr int kSome = 64;  // columns at a time
  const Scales& scales = source.scales;
  alignas(64) float scale[kSome], zero[kSome];
  for (int64_t begin = 0; begin < rows;) {
    const int64_t group = (source.row + begin) / scales.rows, group_end = (group + 1) * scales.rows - source.row;
    const int64_t end = group_end < rows ? group_end : rows;
    for (int64_t first = 0; first < cols; first += kSome) {
      const int some = int(cols - first < kSome ? cols - first : kSome);
      for_columns(some, [&](int64_t at, int lanes) {
        const int64_t col = source.col + first + at;
        Vec::store(scale + at, load_scales<format>(scales.data + group * scales.stride, col, lanes));
        const Vec::W code = Codes::zeros(source.zeros.data + group * source.zeros.stride, col, lanes);
        Vec::store(zero + at, Vec::lookup16(source.zeros.less_one ? kNextValues : kNibbleValues, code));
      });
      decode_group<Mode, Codes>(source, begin, end, first, some, scale, zero, words, word_stride);
    }
    begin = end;
  }
  for (int64_t row = 0; row < rows; ++row) pad_word<Mode>(words + row * word_stride, cols);
}

template <class Mode, class Codes>
inline void decode_with_zeros(const Stored& source, int64_t rows, int64_t cols, char* words, ptrdiff_t word_stride) {
  switch (source.scales.format) {
    case kScaleBf16:
      return decode_zeroed<Mode, Codes, kScaleBf16>(source, rows, cols, words, word_stride);
    case kScaleFp16:
      return decode_zeroed<Mode, Codes, kScaleFp16>(source, rows, cols, words, word_stride);
    default:  // no others, see ktft/weights.py
      return decode_zeroed<Mode, Codes, kScaleFp32>(source, rows, cols, words, word_stride);
  }
}
