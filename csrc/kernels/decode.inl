// Stored codes and scales -> elements of words: one decoder per format. Included by convert.inl.
//
// A weight is code * scale in fp32, rounded once to the compute dtype; ktft/formats says the same in torch, and tests hold
// both to the same bits. A format is one struct here, with the value of its codes, and a row of the table in decode_row; how
// its scales lie is data (table.h).

// The value of a format's codes, from column `col` of a stored row: load(row, col, lanes).
constexpr int64_t kRun = 32;  // columns that some units decode to bf16 at a time; each half may have a scale of its own

template <class Codes>
struct RunOfHalves {
  template <class Unit = Vec>
  static void run(char* out, const char* row, int64_t col, float low, float high) {
    const auto half = [&](int64_t at, float scale) { return Vec::mul(Codes::load(row, at, kRun / 2), Vec::set1(scale)); };
    Unit::store_run(out, half(col, low), half(col + kRun / 2, high));
  }
};
struct Fp16Codes : RunOfHalves<Fp16Codes> {
  static Vec::F load(const char* row, int64_t col, int lanes) { return Vec::load_fp16_n(row + 2 * col, lanes); }
};
struct Fp8Codes {
  static Vec::F load(const char* row, int64_t col, int lanes) { return Vec::e4m3(Vec::bytes(row + col, lanes)); }
  template <class Unit = Vec>
  static void run(char* out, const char* row, int64_t col, float low, float high) {
    Unit::e4m3_run(out, row + col, low, high);
  }
};
struct Int8Codes : RunOfHalves<Int8Codes> {
  static Vec::F load(const char* row, int64_t col, int lanes) {
    return Vec::sub(Vec::to_float(Vec::bytes(row + col, lanes)), Vec::set1(128.0f));
  }
};
alignas(64) constexpr float kInt4Values[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
alignas(64) constexpr float kE2m1Values[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
template <const float* table>
struct TableCodes {
  static Vec::F load(const char* row, int64_t col, int lanes) {
    return Vec::lookup16(table, Vec::nibbles(row + col / 2, lanes));
  }
  template <class Unit = Vec>
  static void run(char* out, const char* row, int64_t col, float low, float high) {
    Unit::lookup_run(out, row + col / 2, table, low, high);
  }
};

inline float bits_to_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

template <ScaleFormat format>
inline float scale_at(const char* row, int64_t column) {
  if constexpr (format == kScaleFp32) {
    uint32_t bits;
    __builtin_memcpy(&bits, row + 4 * column, 4);
    return bits_to_float(bits);
  } else if constexpr (format == kScaleBf16) {
    uint16_t half;
    __builtin_memcpy(&half, row + 2 * column, 2);
    return bits_to_float(uint32_t(half) << 16);
  } else if constexpr (format == kScaleE8m0) {  // 2^(e - 127); 0 is subnormal in fp32, 255 is NaN
    const uint32_t e = uint8_t(row[column]);
    return bits_to_float(e == 255 ? 0x7fc00000u : e == 0 ? 0x00400000u : e << 23);
  } else if constexpr (format == kScaleFp16) {
    return Vec::first(Vec::load_fp16_n(row + 2 * column, 1));
  } else {
    return Vec::first(Vec::e4m3(Vec::bytes(row + column, 1)));
  }
}

// Columns [begin, end) of a row, which share a scale.
template <class Mode, class Codes>
inline void decode_run(const char* codes, int64_t first, int64_t begin, int64_t end, float scale, char* words) {
  const Vec::F factor = Vec::set1(scale);
  const auto value = [&](int64_t col, int lanes) {
    return to_compute<Mode>(Vec::mul(Codes::load(codes, first + col, lanes), factor));
  };
  char* const out = words + begin * size_of(Mode::kWord);
  int64_t at = 0;
  const int64_t cols = end - begin;
  for (; at + Vec::kLanes <= cols; at += Vec::kLanes)
    store_elements(Mode::kWord, out + at * size_of(Mode::kWord), value(begin + at, Vec::kLanes));
  if (at < cols)
    store_elements_n(Mode::kWord, out + at * size_of(Mode::kWord), value(begin + at, int(cols - at)), int(cols - at));
}

template <class Mode, class Codes, ScaleFormat format>
inline void decode_scaled(const Stored& source, int64_t row, int64_t cols, char* words) {
  const Scales& scales = source.scales;
  const char* const codes = source.data + (source.row + row) * source.stride;
  const char* const scale_row = scales.data + (source.row + row + scales.first_row) / scales.rows * scales.stride;
  const auto scale = [&](int64_t group) {
    const float value = scale_at<format>(scale_row, group);
    return scales.divides ? value / scales.factor : value * scales.factor;
  };
  int64_t group = source.col / scales.columns, begin = 0, end = (group + 1) * scales.columns - source.col;
  if constexpr (Mode::kWord == kBf16 && Vec::kHasRuns) {
    const int64_t whole = source.col % kRun == 0 ? cols / kRun * kRun : 0;
    const auto run = [&](float low, float high) {
      Codes::run(words + 2 * begin, codes, source.col + begin, low, high);
      begin += kRun;
    };
    if (scales.columns % kRun == 0) {
      for (; begin < whole; ++group, end += scales.columns) {
        const float factor = scale(group);
        for (const int64_t stop = end < whole ? end : whole; begin < stop;) run(factor, factor);
      }
    } else if (2 * scales.columns == kRun) {
      for (; begin < whole; group += 2) run(scale(group), scale(group + 1));
    }
    group = (source.col + begin) / scales.columns;
    end = (group + 1) * scales.columns - source.col;
  }
  for (; begin < cols; begin = end, end += scales.columns, ++group)
    decode_run<Mode, Codes>(codes, source.col, begin, end < cols ? end : cols, scale(group), words);
}

template <class Mode, class Codes>
inline void decode_row_of(const Stored& source, int64_t row, int64_t cols, char* words) {
  if (!source.scales.data) {
    const char* const codes = source.data + (source.row + row) * source.stride;
    return decode_run<Mode, Codes>(codes, source.col, 0, cols, 1.0f, words);
  }
  switch (source.scales.format) {
    case kScaleFp32:
      return decode_scaled<Mode, Codes, kScaleFp32>(source, row, cols, words);
    case kScaleBf16:
      return decode_scaled<Mode, Codes, kScaleBf16>(source, row, cols, words);
    case kScaleFp16:
      return decode_scaled<Mode, Codes, kScaleFp16>(source, row, cols, words);
    case kScaleE8m0:
      return decode_scaled<Mode, Codes, kScaleE8m0>(source, row, cols, words);
    case kScaleE4m3:
      return decode_scaled<Mode, Codes, kScaleE4m3>(source, row, cols, words);
  }
}

template <class Mode>
inline void decode_row(const Stored& source, int64_t row, int64_t cols, char* words) {
  switch (source.format) {
    case kBf16:
    case kFp32:
      break;  // direct
    case kFp16:
      return decode_row_of<Mode, Fp16Codes>(source, row, cols, words);
    case kFp8:
      return decode_row_of<Mode, Fp8Codes>(source, row, cols, words);
    case kInt8:
      return decode_row_of<Mode, Int8Codes>(source, row, cols, words);
    case kInt4:
      return decode_row_of<Mode, TableCodes<kInt4Values>>(source, row, cols, words);
    case kMxfp4:
    case kNvfp4:
      return decode_row_of<Mode, TableCodes<kE2m1Values>>(source, row, cols, words);
  }
}
