// Stored codes and scales -> elements of words: one decoder per format. Included by convert.inl.
//
// A weight is code * scale in fp32, rounded once to the compute dtype; ktft/formats says the same in torch, and tests hold
// both to the same bits. A format is one struct here, with the value of its codes, and a row of the table in decode_row; how
// its scales lie is data (table.h).

// The value of a format's codes, from column `col` of a stored row: load(row, col, lanes).
struct Fp16Codes {
  static Vec::F load(const char* row, int64_t col, int lanes) { return Vec::load_fp16_n(row + 2 * col, lanes); }
};
struct Fp8Codes {
  static Vec::F load(const char* row, int64_t col, int lanes) { return Vec::e4m3(Vec::bytes(row + col, lanes)); }
};
struct Int8Codes {
  static Vec::F load(const char* row, int64_t col, int lanes) {
    return Vec::sub(Vec::to_float(Vec::bytes(row + col, lanes)), Vec::set1(128.0f));
  }
};
struct Int4Codes {
  static Vec::F load(const char* row, int64_t col, int lanes) {
    alignas(64) static constexpr float kValues[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    return Vec::lookup16(kValues, Vec::nibbles(row + col / 2, lanes));
  }
};
struct Fp4Codes {  // e2m1
  static Vec::F load(const char* row, int64_t col, int lanes) {
    alignas(64) static constexpr float kValues[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    return Vec::lookup16(kValues, Vec::nibbles(row + col / 2, lanes));
  }
};

inline float scale_at(const Scales& scales, const char* row, int64_t column) {
  float value;
  uint32_t bits;
  switch (scales.format) {
    case kScaleFp32:
      __builtin_memcpy(&bits, row + 4 * column, 4);
      break;
    case kScaleBf16: {
      uint16_t half;
      __builtin_memcpy(&half, row + 2 * column, 2);
      bits = uint32_t(half) << 16;
      break;
    }
    case kScaleE8m0: {  // 2^(e - 127); 0 is subnormal in fp32, 255 is NaN
      const uint32_t e = uint8_t(row[column]);
      bits = e == 255 ? 0x7fc00000u : e == 0 ? 0x00400000u : e << 23;
      break;
    }
    default: {
      alignas(64) float lanes[Vec::kLanes];
      Vec::store(lanes,
                 scales.format == kScaleFp16 ? Vec::load_fp16_n(row + 2 * column, 1) : Vec::e4m3(Vec::bytes(row + column, 1)));
      __builtin_memcpy(&bits, lanes, 4);
    }
  }
  __builtin_memcpy(&value, &bits, 4);
  return scales.divides ? value / scales.factor : value * scales.factor;
}

template <class Mode, class Codes>
inline void decode_row_of(const Stored& source, int64_t row, int64_t cols, char* words) {
  const Scales& scales = source.scales;
  const char* const codes = source.data + (source.row + row) * source.stride;
  const auto run = [&](int64_t begin, int64_t end, Vec::F scale) {
    for_columns(end - begin, [&](int64_t at, int lanes) {
      const int64_t col = begin + at;
      const Vec::F value = Vec::mul(Codes::load(codes, source.col + col, lanes), scale);
      store_cols(Mode::kWord, words + col * size_of(Mode::kWord), to_compute<Mode>(value), lanes);
    });
  };
  if (!scales.data) return run(0, cols, Vec::set1(1.0f));
  const char* const scale_row = scales.data + (source.row + row + scales.first_row) / scales.rows * scales.stride;
  int64_t group = source.col / scales.columns, end = (group + 1) * scales.columns - source.col;
  for (int64_t begin = 0; begin < cols; begin = end, end += scales.columns, ++group)
    run(begin, end < cols ? end : cols, Vec::set1(scale_at(scales, scale_row, group)));
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
      return decode_row_of<Mode, Int4Codes>(source, row, cols, words);
    case kMxfp4:
    case kNvfp4:
      return decode_row_of<Mode, Fp4Codes>(source, row, cols, words);
  }
}
