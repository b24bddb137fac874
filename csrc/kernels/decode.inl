// Stored codes and scales -> elements of words: one decoder per format. Included by convert.inl.
//
// A weight is code * scale in fp32, rounded once to the compute dtype; ktft/formats says the same in torch, and tests hold
// both to the same bits. A format is one struct here and one row of the table in decode_codes, or in with_scaled_codes; how its
// scales lie is data (table.h).
//
// load(row, col, lanes) are the values of codes from column `col` of a stored row. Of formats with scales also bytes(columns),
// and, at units that have runs, run<one_scale>(row, col, scale): kRun columns as words, with a scale for each half or for both.

constexpr int64_t kRun = 32;  // columns that some units decode to bf16 at a time; each half may have a scale of its own

template <class Codes>
struct RunOfHalves {
  static int64_t bytes(int64_t columns) { return columns; }
  template <bool one_scale, class Unit = Vec>
  static Vec::W run(const char* row, int64_t col, const float* scale) {
    const auto half = [&](int64_t at, float factor) { return Vec::mul(Codes::load(row, at, kRun / 2), Vec::set1(factor)); };
    return Unit::run(half(col, scale[0]), half(col + kRun / 2, scale[one_scale ? 0 : 1]));
  }
};
struct Fp16Codes {
  static Vec::F load(const char* row, int64_t col, int lanes) { return Vec::load_fp16_n(row + 2 * col, lanes); }
};
// Codes of `size` bytes with as many bytes between them, which the last one does not have.
template <class Codes, int size>
struct EverySecond {
  static Vec::F load(const char* row, int64_t col, int lanes) {
    alignas(64) char codes[Vec::kLanes * size];
    for (int i = 0; i < lanes; ++i) __builtin_memcpy(codes + i * size, row + 2 * size * (col + i), size);
    return Codes::load(codes, 0, lanes);
  }
};
struct Bf16Codes {
  static Vec::F load(const char* row, int64_t col, int lanes) { return Vec::load_bf16_n(row + 2 * col, lanes); }
};
struct Fp32Codes {
  static Vec::F load(const char* row, int64_t col, int lanes) { return Vec::load_n(row + 4 * col, lanes); }
};
struct Fp8Codes {
  static Vec::F load(const char* row, int64_t col, int lanes) { return Vec::e4m3(Vec::bytes(row + col, lanes)); }
  static int64_t bytes(int64_t columns) { return columns; }
  template <bool one_scale, class Unit = Vec>
  static Vec::W run(const char* row, int64_t col, const float* scale) {
    return Unit::e4m3_run(row + col, scale[0], scale[one_scale ? 0 : 1]);
  }
};
struct Int8Codes : RunOfHalves<Int8Codes> {
  static Vec::F load(const char* row, int64_t col, int lanes) {
    return Vec::sub(Vec::to_float(Vec::bytes(row + col, lanes)), Vec::set1(128.0f));
  }
};
struct Int8PlainCodes : RunOfHalves<Int8PlainCodes> {
  static Vec::F load(const char* row, int64_t col, int lanes) { return Vec::to_float(Vec::signed_bytes(row + col, lanes)); }
};
alignas(64) constexpr float kInt4Values[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
alignas(64) constexpr float kE2m1Values[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
template <const float* table>
struct TableCodes {
  static Vec::F load(const char* row, int64_t col, int lanes) {
    return Vec::lookup16(table, Vec::nibbles(row + col / 2, lanes));
  }
  static int64_t bytes(int64_t columns) { return columns / 2; }
  template <bool one_scale, class Unit = Vec>
  static Vec::W run(const char* row, int64_t col, const float* scale) {
    if constexpr (one_scale) return Unit::lookup_run(row + col / 2, table, scale[0]);
    else return Unit::lookup_run(row + col / 2, table, scale[0], scale[1]);
  }
};

// Columns [begin, end) of a row, which share a scale.
template <class Mode, class Codes>
inline void decode_some(const char* codes, int64_t first, int64_t begin, int64_t end, float scale, char* words) {
  const Vec::F factor = Vec::set1(scale);
  char* const out = words + begin * size_of(Mode::kWord);
  for_columns(end - begin, [&](int64_t at, int lanes) {
    const Vec::F value = Vec::mul(Codes::load(codes, first + begin + at, lanes), factor);
    store_cols(Mode::kWord, out + at * size_of(Mode::kWord), to_compute<Mode>(value), lanes);
  });
}

template <ScaleFormat format>
inline Vec::F load_scales(const char* row, int64_t first, int lanes) {
  if constexpr (format == kScaleFp32) return Vec::load_n(row + 4 * first, lanes);
  if constexpr (format == kScaleBf16) return Vec::load_bf16_n(row + 2 * first, lanes);
  if constexpr (format == kScaleFp16) return Vec::load_fp16_n(row + 2 * first, lanes);
  if constexpr (format == kScaleE8m0) return Vec::e8m0(Vec::bytes(row + first, lanes));
  if constexpr (format == kScaleE4m3) return Vec::e4m3(Vec::bytes(row + first, lanes));
}

// Of groups from `first` on of a row of scales.
template <ScaleFormat format>
inline Vec::F scales_of(const Scales& scales, const char* row, int64_t first, int lanes) {
  const Vec::F value = load_scales<format>(row, first, lanes), factor = Vec::set1(scales.factor);
  return scales.divides ? Vec::div(value, factor) : Vec::mul(value, factor);
}

template <ScaleFormat kFormat>
struct ScaleTag {
  static constexpr ScaleFormat value = kFormat;
};
template <class Function>
inline void with_scale_format(ScaleFormat format, Function f) {
  switch (format) {
    case kScaleFp32:
      return f(ScaleTag<kScaleFp32>());
    case kScaleBf16:
      return f(ScaleTag<kScaleBf16>());
    case kScaleFp16:
      return f(ScaleTag<kScaleFp16>());
    case kScaleE8m0:
      return f(ScaleTag<kScaleE8m0>());
    case kScaleE4m3:
      return f(ScaleTag<kScaleE4m3>());
  }
}

// Formats with scales beside the codes, and nothing else; false: another one.
template <class Function>
inline bool with_scaled_codes(Format format, Function f) {
  switch (format) {
    case kFp8:
      f(Fp8Codes());
      return true;
    case kInt8:
      f(Int8Codes());
      return true;
    case kInt8Plain:
      f(Int8PlainCodes());
      return true;
    case kInt4:
      f(TableCodes<kInt4Values>());
      return true;
    case kMxfp4:
    case kNvfp4:
      f(TableCodes<kE2m1Values>());
      return true;
    default:
      return false;
  }
}

constexpr int64_t kCodesAhead = 16;  // stored rows that are read ahead

template <class Mode, class Codes, ScaleFormat format>
inline void decode_scaled(const Stored& source, int64_t rows, int64_t cols, char* words, ptrdiff_t word_stride) {
  constexpr int kSome = 64;  // scales at a time
  const Scales& scales = source.scales;
  const int64_t first_group = source.col / scales.columns, first_end = (first_group + 1) * scales.columns - source.col;
  const char* codes = source.data + source.row * source.stride;
  const int64_t first_byte = bytes_of(source.format, source.col), bytes = bytes_of(source.format, cols);
  for (int64_t row = 0; row < rows; ++row, codes += source.stride, words += word_stride) {
    const char* const scale_row = scales.data + (source.row + row + scales.first_row) / scales.rows * scales.stride;
    for (int64_t byte = 0; byte < bytes; byte += 64)
      __builtin_prefetch(codes + kCodesAhead * source.stride + first_byte + byte);
    alignas(64) float scale[kSome];
    int64_t begin = 0, end = first_end;
    for (int64_t group = first_group; begin < cols; group += kSome) {
      const int64_t left = 1 + (cols - 1 < end ? 0 : (cols - end + scales.columns - 1) / scales.columns);
      const int some = left < kSome ? int(left) : kSome;
      for_columns(some, [&](int64_t at, int lanes) {
        Vec::store(scale + at, scales_of<format>(scales, scale_row, group + at, lanes));
      });
      int at = 0;
      if constexpr (Mode::kWord == kBf16 && Vec::kHasRuns) {
        if (source.col % kRun == 0 && 2 * scales.columns == kRun) {
          for (; at + 2 <= some && begin + kRun <= cols; at += 2, begin += kRun, end += kRun)
            Vec::store_words(words + 2 * begin, Codes::template run<false>(codes, source.col + begin, scale + at));
        }
      }
      for (; at < some; ++at, begin = end, end += scales.columns) {
        const int64_t stop = end < cols ? end : cols;
        if constexpr (Mode::kWord == kBf16 && Vec::kHasRuns) {
          if ((source.col + begin) % kRun == 0)
            for (; begin + kRun <= stop; begin += kRun)
              Vec::store_words(words + 2 * begin, Codes::template run<true>(codes, source.col + begin, scale + at));
        }
        if (begin < stop) decode_some<Mode, Codes>(codes, source.col, begin, stop, scale[at], words);
      }
    }
    pad_word<Mode>(words, cols);
  }
}

template <class Mode, class Codes>
inline void decode_unscaled(const Stored& source, int64_t rows, int64_t cols, char* words, ptrdiff_t word_stride) {
  for (int64_t row = 0; row < rows; ++row, words += word_stride) {
    decode_some<Mode, Codes>(source.data + (source.row + row) * source.stride, source.col, 0, cols, 1.0f, words);
    pad_word<Mode>(words, cols);
  }
}

#include "decode_blocks.inl"
#include "decode_zeros.inl"

// Rows of codes -> rows of words, padded with zeros to a whole word.
template <class Mode>
inline void decode_codes(const Stored& source, int64_t rows, int64_t cols, char* words, ptrdiff_t word_stride) {
  const auto scaled = [&](auto codes) {
    with_scale_format(source.scales.format, [&](auto format) {
      decode_scaled<Mode, decltype(codes), format.value>(source, rows, cols, words, word_stride);
    });
  };
  if (with_scaled_codes(source.format, scaled)) return;
  switch (source.format) {
    case kFp16:
      return decode_unscaled<Mode, Fp16Codes>(source, rows, cols, words, word_stride);
    case kEverySecondBf16:
      return decode_unscaled<Mode, EverySecond<Bf16Codes, 2>>(source, rows, cols, words, word_stride);
    case kEverySecondFp32:
      return decode_unscaled<Mode, EverySecond<Fp32Codes, 4>>(source, rows, cols, words, word_stride);
    case kEverySecondFp16:
      return decode_unscaled<Mode, EverySecond<Fp16Codes, 2>>(source, rows, cols, words, word_stride);
    case kGptq:
      return decode_with_zeros<Mode, GptqCodes>(source, rows, cols, words, word_stride);
    case kAwq:
      return decode_with_zeros<Mode, AwqCodes>(source, rows, cols, words, word_stride);
    case kQ8_0:
      return decode_blocks<Mode, Q8_0>(source, rows, cols, words, word_stride);
    case kQ4_0:
      return decode_blocks<Mode, Q4_0>(source, rows, cols, words, word_stride);
    case kQ4_1:
      return decode_blocks<Mode, Q4_1>(source, rows, cols, words, word_stride);
    case kQ4_K:
      return decode_blocks<Mode, Q4_K>(source, rows, cols, words, word_stride);
    case kQ6_K:
      return decode_blocks<Mode, Q6_K>(source, rows, cols, words, word_stride);
    case kGgufMxfp4:
      return decode_blocks<Mode, GgufMxfp4>(source, rows, cols, words, word_stride);
    default:
      break;  // direct
  }
}
