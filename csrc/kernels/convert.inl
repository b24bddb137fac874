// Stored elements -> words, and words -> floats. Included by unit.inl inside an anonymous namespace.

inline Vec::F load_elements(Format format, const char* p) { return format == kBf16 ? Vec::load_bf16(p) : Vec::load(p); }
inline Vec::F load_elements_n(Format format, const char* p, int n) {
  return format == kBf16 ? Vec::load_bf16_n(p, n) : Vec::load_n(p, n);
}
inline void store_elements(Format format, char* p, Vec::F x) {
  if (format == kBf16) Vec::store_bf16(p, x);
  else Vec::store(p, x);
}
inline void store_elements_n(Format format, char* p, Vec::F x, int n) {
  if (format == kBf16) Vec::store_bf16_n(p, x, n);
  else Vec::store_n(p, x, n);
}
constexpr int size_of(Format format) { return format == kBf16 ? 2 : 4; }

// Apply f(column, lanes) over `cols` columns, a vector at a time; lanes < kLanes in the last step only.
template <class Function>
inline void for_columns(int64_t cols, Function f) {
  int64_t col = 0;
  for (; col + Vec::kLanes <= cols; col += Vec::kLanes) f(col, Vec::kLanes);
  if (col < cols) f(col, int(cols - col));
}

inline Vec::F load_cols(Format format, const char* p, int lanes) {
  return lanes == Vec::kLanes ? load_elements(format, p) : load_elements_n(format, p, lanes);
}
inline void store_cols(Format format, char* p, Vec::F x, int lanes) {
  if (lanes == Vec::kLanes) store_elements(format, p, x);
  else store_elements_n(format, p, x, lanes);
}

// In bf16 mode every operand of a product is a bf16 value, whatever its stored format and wherever words are fp32.
template <class Mode>
inline Vec::F to_compute(Vec::F x) {
  if constexpr (Mode::kCompute == kBf16 && Mode::kWord == kFp32) return Vec::round_bf16(x);
  else return x;
}

template <class Mode>
inline void pad_word(char* row_words, int64_t cols) {
  if (Mode::Dot::kGroup == 2 && (cols & 1)) __builtin_memset(row_words + 2 * cols, 0, 2);
}

#include "decode.inl"

template <class Mode>
void decode_rows(const Stored& source, int64_t rows, int64_t cols, char* words, ptrdiff_t word_stride) {
  const Format format = source.format;
  if (!is_direct(format)) return decode_codes<Mode>(source, rows, cols, words, word_stride);
  const char* stored = source.data;
  for (int64_t row = 0; row < rows; ++row, stored += source.stride, words += word_stride) {
    if (Mode::kWord == kBf16 && format == kBf16) __builtin_memcpy(words, stored, size_t(2 * cols));
    else
      for_columns(cols, [&](int64_t col, int lanes) {
        store_cols(Mode::kWord, words + col * size_of(Mode::kWord),
                   to_compute<Mode>(load_cols(format, stored + col * size_of(format), lanes)), lanes);
      });
    pad_word<Mode>(words, cols);
  }
}

// Stored elements that are words where they lie.
template <class Mode>
constexpr bool words_as_stored(Format format) {
  return format == Mode::kWord && Mode::kWord == Mode::kCompute;
}

// One vector of words of columns, from one row of stored elements or two (without a partner the second counts as zero).
template <class Mode>
inline Vec::W column_words(Format format, const char* p, ptrdiff_t stride, bool partner, int lanes) {
  if constexpr (Mode::Dot::kGroup == 2) return Mode::Dot::pair(format == kBf16, p, partner ? p + stride : nullptr, lanes);
  else return Vec::words(to_compute<Mode>(load_cols(format, p, lanes)));
}

// Phases of a phased panel: one for each four lanes of a vector in the product of rows.
constexpr int kPhases = Vec::kLanes / 4;

// The words of one phase: `groups` groups of four and `rest` more, from word `first` of the panel; in A the groups lie `step`
// bytes apart from byte `offset`.
struct Phase {
  int64_t first, groups;
  int rest;
  ptrdiff_t offset, step;
  bool continues = false;  // C's chain; else a chain of its own
};

inline Phase phase_of(int64_t words, int phase) {
  constexpr int64_t group = 4 * kPhases;
  const int64_t full = words / group, tail = words % group;
  const int64_t before = tail < 4 * phase ? tail : 4 * phase, rest = tail - before < 4 ? tail - before : 4;
  return {4 * full * phase + before, full, int(rest), 16 * phase, 4 * ptrdiff_t(group)};
}

// Short runs of rows that lie far apart: no hardware prefetcher follows. Asking 32 rows ahead reads 24 instead of 8 GB/s on one
// thread (Zen 5, 2048 x 768 and 768 x 2048 bf16 from memory; 8, 16 and 64 rows: 19, 21 and 12 to 22).
constexpr int kRowsAhead = 32;

// One word of all columns.
template <class Mode>
inline void decode_word(const PanelSource& source, int64_t word, char* panel) {
  constexpr int kGroup = Mode::Dot::kGroup;
  const int cols = source.columns;
  char* const out = panel + word * 4 * kBlock;
  const bool partner = (word + 1) * kGroup <= source.length;
  const char* const row = source.data + word * kGroup * source.stride;
  if constexpr (kGroup == 2) {
    if (source.format == kBf16 && cols == kBlock && partner) {
      for (int half = 0; half < 2; ++half)
        Mode::Dot::interleave(out + 128 * half, row + 64 * half, row + source.stride + 64 * half);
      return;
    }
  }
  if (cols < kBlock) __builtin_memset(out, 0, 4 * kBlock);
  for_columns(cols, [&](int64_t col, int lanes) {
    Vec::store_words(out + 4 * col,
                     column_words<Mode>(source.format, row + col * size_of(source.format), source.stride, partner, lanes));
  });
}

// Columns that are stored rows, transposed kLanes of them and kRunWords words at a time; edges and elements that are not words
// yet by way of a buffer.
template <class Mode>
inline void decode_phased(const PanelSource& source, char* panel) {
  constexpr int kGroup = Mode::Dot::kGroup, kRunWords = 4 * Vec::kLanes;
  const int64_t words = (source.length + kGroup - 1) / kGroup;
  int64_t first[kPhases];
  for (int phase = 0; phase < kPhases; ++phase) first[phase] = phase_of(words, phase).first;
  alignas(64) char buffer[Vec::kLanes * kRunWords * 4];
  for (int col = 0; col < kBlock; col += Vec::kLanes) {
    const int columns = source.columns - col < Vec::kLanes ? source.columns - col : Vec::kLanes;
    for (int64_t begin = 0; begin < words; begin += kRunWords) {
      const int64_t count = words - begin < kRunWords ? words - begin : kRunWords;
      const int64_t left = source.length - begin * kGroup, elements = left < count * kGroup ? left : count * kGroup;
      const Stored stored = source.from(col, begin * kGroup);
      const char* rows = stored.data;
      ptrdiff_t stride = source.stride;
      const bool is_whole = columns == Vec::kLanes && count % Vec::kLanes == 0 && elements == count * kGroup;
      if (!is_whole || !words_as_stored<Mode>(source.format)) {
        __builtin_memset(buffer, 0, sizeof(buffer));
        if (columns > 0) decode_rows<Mode>(stored, columns, elements, buffer, kRunWords * 4);
        rows = buffer;
        stride = kRunWords * 4;
      }
      for (int64_t at = 0; at < count; at += Vec::kLanes) {
        Vec::W transposed[Vec::kLanes];
        Vec::transpose(rows + 4 * at, stride, transposed);
        const int64_t group = (begin + at) / Vec::kLanes;
        if (count - at >= Vec::kLanes) {
#pragma GCC unroll 4
          for (int phase = 0; phase < kPhases; ++phase) {
            char* out = panel + 4 * ((first[phase] + 4 * group) * kBlock + col);
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) Vec::store_words(out + 4 * k * kBlock, transposed[4 * phase + k]);
          }
        } else {
          for (int64_t k = 0; k < count - at; ++k)
            Vec::store_words(panel + 4 * ((first[k / 4] + 4 * group + k % 4) * kBlock + col), transposed[k]);
        }
      }
    }
  }
}

// Some rows are decoded, then made into words.
template <class Mode>
inline void decode_coded_panel(const PanelSource& source, char* panel) {
  constexpr int kGroup = Mode::Dot::kGroup, kRows = 16, kBytes = kBlock * size_of(Mode::kWord);
  alignas(64) char rows[kRows * kBytes];
  if (source.columns < kBlock) __builtin_memset(rows, 0, sizeof(rows));
  for (int64_t begin = 0; begin < source.length; begin += kRows) {
    const int64_t some = source.length - begin < kRows ? source.length - begin : kRows;
    decode_codes<Mode>(source.from(begin, 0), some, source.columns, rows, kBytes);
    if (some % kGroup) __builtin_memset(rows + some * kBytes, 0, kBytes);
    for (int64_t row = 0; row < some; row += kGroup, panel += 4 * kBlock) {
      if constexpr (kGroup == 2) {
        for (int half = 0; half < 2; ++half)
          Mode::Dot::interleave(panel + 128 * half, rows + row * kBytes + 64 * half, rows + (row + 1) * kBytes + 64 * half);
      } else {
        __builtin_memcpy(panel, rows + row * kBytes, kBytes);
      }
    }
  }
}

template <class Mode>
void decode_panel(const PanelSource& source, char* panel) {
  if (source.is_rows) return decode_phased<Mode>(source, panel);
  if (!is_direct(source.format)) return decode_coded_panel<Mode>(source, panel);
  const int64_t words = (source.length + Mode::Dot::kGroup - 1) / Mode::Dot::kGroup;
  for (int64_t word = 0; word < words; ++word) {
    for (int i = 0; i < Mode::Dot::kGroup; ++i) {
      const char* const ahead = source.data + (word * Mode::Dot::kGroup + kRowsAhead + i) * source.stride;
      for (int byte = 0; byte < source.columns * size_of(source.format); byte += 64) __builtin_prefetch(ahead + byte, 0, 3);
    }
    decode_word<Mode>(source, word, panel);
  }
}

// Pairs of bf16 of all columns: a word takes few instructions and fewer registers than the tile of a product leaves free
// between its words. (Transposed rows were tried there and between tiles too: forward got slower, 72 instead of 64 ms at
// 512 tokens of Qwen3-30B's shape, two threads, Zen 5.)
template <class Mode>
bool decodes_aside(const PanelSource& source) {
  return Mode::Dot::kGroup == 2 && !source.is_rows && source.format == kBf16 && source.columns == kBlock &&
         source.length % 2 == 0;
}

template <class Mode>
void load_rows(const char* words, ptrdiff_t stride, int64_t col0, int rows, int cols, float* out, ptrdiff_t out_stride) {
  for (int row = 0; row < rows; ++row) {
    const char* source = words + ptrdiff_t(row) * stride + col0 * size_of(Mode::kWord);
    for_columns(cols, [&](int64_t col, int lanes) {
      store_cols(kFp32, reinterpret_cast<char*>(out + row * out_stride + col),
                 load_cols(Mode::kWord, source + col * size_of(Mode::kWord), lanes), lanes);
    });
  }
}

template <class Mode>
void store_rounded(const float* source, int64_t count, char* out) {
  for_columns(count, [&](int64_t i, int lanes) {
    store_cols(Mode::kCompute, out + i * size_of(Mode::kCompute),
               load_cols(kFp32, reinterpret_cast<const char*>(source + i), lanes), lanes);
  });
}
