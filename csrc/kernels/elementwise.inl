// Activation forward and backward, biases, scatter, LoRA's small operands and gradients, dropout. Included by unit.inl.

// e^x for x in [-87, 88] (clamped): x = n ln 2 + r, |r| <= ln 2 / 2, Taylor series to r^7 (remainder < r^8 / 8! = 5.2e-9
// relative).
inline Vec::F exponential(Vec::F x) {
  x = Vec::clamp(x, -87.0f, 88.0f);
  const Vec::F n = Vec::nearest(Vec::mul(x, Vec::set1(1.44269504f)));
  Vec::F r = Vec::fma(n, Vec::set1(-0.693359375f), x);  // ln 2 in two parts, the first exact in few bits
  r = Vec::fma(n, Vec::set1(2.12194440e-4f), r);
  Vec::F p = Vec::set1(1.0f / 5040);
  p = Vec::fma(p, r, Vec::set1(1.0f / 720));
  p = Vec::fma(p, r, Vec::set1(1.0f / 120));
  p = Vec::fma(p, r, Vec::set1(1.0f / 24));
  p = Vec::fma(p, r, Vec::set1(1.0f / 6));
  p = Vec::fma(p, r, Vec::set1(0.5f));
  p = Vec::fma(p, r, Vec::set1(1.0f));
  p = Vec::fma(p, r, Vec::set1(1.0f));
  return Vec::mul(p, Vec::pow2(n));
}

inline Vec::F sigmoid(Vec::F x) {
  const Vec::F one = Vec::set1(1.0f);
  return Vec::div(one, Vec::add(one, exponential(Vec::sub(Vec::zero(), x))));
}

inline const char* bytes(const float* p) { return reinterpret_cast<const char*>(p); }
inline char* bytes(float* p) { return reinterpret_cast<char*>(p); }

template <class Mode>
inline Vec::F round_compute(Vec::F x) {
  if constexpr (Mode::kCompute == kBf16) return Vec::round_bf16(x);
  else return x;
}

// Functions of the gate and their derivatives: a struct each, and a case in with_function.
struct ValueAndSlope {
  Vec::F value, slope;
};
struct SiluOfAlpha {
  static ValueAndSlope at(Vec::F x, const Activation& activation) {
    const Vec::F one = Vec::set1(1.0f), scaled = Vec::mul(x, Vec::set1(activation.alpha)), s = sigmoid(scaled);
    return {Vec::mul(x, s), Vec::mul(s, Vec::fma(scaled, Vec::sub(one, s), one))};
  }
};

// f(a function of the gate, whether there are limits)
template <class F>
inline void with_function(const Activation& activation, F f) {
  const auto chosen = [&](auto function) {
    if (activation.limits()) f(function, std::true_type());
    else f(function, std::false_type());
  };
  switch (activation.function) {
    case kSilu:
      return chosen(SiluOfAlpha());
  }
}

// The gate's function and the other factor, each with its derivative.
struct Factors {
  ValueAndSlope gate, up;
};
template <class Function, bool limits>
inline Factors factors_of(const Activation& activation, Vec::F gate, Vec::F up) {
  if constexpr (!limits) return {Function::at(gate, activation), {up, Vec::set1(1.0f)}};
  const float low = -INFINITY, high = activation.gate_max, limit = activation.up_limit;
  ValueAndSlope of_gate = Function::at(Vec::clamp(gate, low, high), activation);
  of_gate.slope = Vec::within(of_gate.slope, gate, low, high);
  const Vec::F other = Vec::add(Vec::clamp(up, -limit, limit), Vec::set1(activation.up_shift));
  return {of_gate, {other, Vec::within(Vec::set1(1.0f), up, -limit, limit)}};
}

template <class Mode>
void activation_forward(const Activation& activation, const float* gate, const float* up, int rows, int cols, char* saved_gate,
                        char* saved_up, ptrdiff_t saved_stride, char* h, ptrdiff_t h_stride) {
  with_function(activation, [&](auto function, auto limits) {
    for (int row = 0; row < rows; ++row, gate += kBlock, up += kBlock, h += h_stride) {
      for_columns(cols, [&](int64_t col, int lanes) {
        const Vec::F g = round_compute<Mode>(load_cols(kFp32, bytes(gate + col), lanes));
        const Vec::F u = round_compute<Mode>(load_cols(kFp32, bytes(up + col), lanes));
        if (saved_gate) {
          const ptrdiff_t at = row * saved_stride + col * size_of(Mode::kCompute);
          store_cols(Mode::kCompute, saved_gate + at, g, lanes);
          store_cols(Mode::kCompute, saved_up + at, u, lanes);
        }
        const Factors x = factors_of<decltype(function), limits.value>(activation, g, u);
        const Vec::F value = Vec::mul(x.gate.value, x.up.value);
        store_cols(Mode::kWord, h + col * size_of(Mode::kWord), round_compute<Mode>(value), lanes);
      });
      pad_word<Mode>(h, cols);
    }
  });
}

template <class Mode>
void activation_backward(const Activation& activation, const float* dh, const float* route_weight, int rows, int cols,
                         const char* saved_gate, const char* saved_up, ptrdiff_t saved_stride, char* d_gate, char* d_up,
                         char* h, ptrdiff_t word_stride, float* partial, ptrdiff_t partial_stride) {
  with_function(activation, [&](auto function, auto limits) {
    for (int row = 0; row < rows; ++row, dh += kBlock) {
      const Vec::F weight = Vec::set1(route_weight[row]);
      Vec::F sum = Vec::zero();
      char* d_gate_row = d_gate + row * word_stride;
      char* d_up_row = d_up + row * word_stride;
      char* h_row = h + row * word_stride;
      for_columns(cols, [&](int64_t col, int lanes) {
        const ptrdiff_t at = row * saved_stride + col * size_of(Mode::kCompute);
        const Vec::F g = load_cols(Mode::kCompute, saved_gate + at, lanes);
        const Vec::F u = load_cols(Mode::kCompute, saved_up + at, lanes);
        Vec::F d = load_cols(kFp32, bytes(dh + col), lanes);
        const Factors x = factors_of<decltype(function), limits.value>(activation, g, u);
        const Vec::F value = round_compute<Mode>(Vec::mul(x.gate.value, x.up.value));
        sum = Vec::fma(d, value, sum);
        d = Vec::mul(d, weight);
        const Vec::F to_gate = Vec::mul(Vec::mul(d, x.up.value), x.gate.slope);
        Vec::F to_up = Vec::mul(d, x.gate.value);
        if constexpr (limits.value) to_up = Vec::mul(to_up, x.up.slope);
        const ptrdiff_t out = col * size_of(Mode::kWord);
        store_cols(Mode::kWord, d_gate_row + out, round_compute<Mode>(to_gate), lanes);
        store_cols(Mode::kWord, d_up_row + out, round_compute<Mode>(to_up), lanes);
        store_cols(Mode::kWord, h_row + out, value, lanes);
      });
      pad_word<Mode>(d_gate_row, cols);
      pad_word<Mode>(d_up_row, cols);
      pad_word<Mode>(h_row, cols);
      partial[row * partial_stride] = Vec::sum(sum);
    }
  });
}

inline void add_bias(const float* bias, int rows, int cols, float* c) {
  for (int row = 0; row < rows; ++row, c += kBlock)
    for_columns(cols, [&](int64_t col, int lanes) {
      const Vec::F sum = Vec::add(load_cols(kFp32, bytes(c + col), lanes), load_cols(kFp32, bytes(bias + col), lanes));
      store_cols(kFp32, bytes(c + col), sum, lanes);
    });
}

template <class Mode>
float dot(const char* words, const float* vector, int64_t cols) {
  Vec::F sum = Vec::zero();
  for_columns(cols, [&](int64_t col, int lanes) {
    sum = Vec::fma(load_cols(Mode::kWord, words + col * size_of(Mode::kWord), lanes),
                   load_cols(kFp32, bytes(vector + col), lanes), sum);
  });
  return Vec::sum(sum);
}

constexpr int kScatterAhead = 4;  // rows whose targets are on their way into L1

inline void scatter_add(const float* c, const float* factor, int rows, int cols, float* out, ptrdiff_t out_stride,
                        const int32_t* out_rows) {
  for (int row = 0; row < rows; ++row, c += kBlock) {
    float* target = out + ptrdiff_t(out_rows[row]) * out_stride;
    if (row + kScatterAhead < rows) {
      const float* ahead = out + ptrdiff_t(out_rows[row + kScatterAhead]) * out_stride;
      for (int col = 0; col < cols; col += 16) __builtin_prefetch(ahead + col, 1, 3);
    }
    const Vec::F weight = Vec::set1(factor ? factor[row] : 1.0f);
    for_columns(cols, [&](int64_t col, int lanes) {
      const Vec::F sum =
          Vec::fma(weight, load_cols(kFp32, bytes(c + col), lanes), load_cols(kFp32, bytes(target + col), lanes));
      store_cols(kFp32, bytes(target + col), sum, lanes);
    });
  }
}

template <class Mode>
void store_low_rank(const float* c, float scale, int rows, int cols, float* small, ptrdiff_t small_stride, char* words,
                    ptrdiff_t word_stride) {
  for (int row = 0; row < rows; ++row, c += kBlock, small += small_stride, words += word_stride) {
    for_columns(cols, [&](int64_t col, int lanes) {
      const Vec::F value = round_compute<Mode>(Vec::mul(Vec::set1(scale), load_cols(kFp32, bytes(c + col), lanes)));
      store_cols(kFp32, bytes(small + col), value, lanes);
      store_cols(Mode::kWord, words + col * size_of(Mode::kWord), value, lanes);
    });
    pad_word<Mode>(words, cols);
  }
}

// kRanks x kVecs vectors of columns, over all rows in order.
template <Format format, int kRanks, int kVecs>
inline void outer_tile(const float* p, ptrdiff_t p_stride, const char* q, ptrdiff_t q_stride, int rows, int lanes, float* c) {
  Vec::F acc[kRanks][kVecs];
#pragma GCC unroll 8
  for (int j = 0; j < kRanks; ++j)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) acc[j][v] = load_cols(kFp32, bytes(c + j * kBlock + v * Vec::kLanes), lanes);
  for (int row = 0; row < rows; ++row, p += p_stride, q += q_stride) {
    Vec::F value[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) value[v] = load_cols(format, q + v * Vec::kLanes * size_of(format), lanes);
    __builtin_prefetch(q + kVecs * Vec::kLanes * size_of(format));  // the next tile's: rows lie too far apart for the hardware
#pragma GCC unroll 8
    for (int j = 0; j < kRanks; ++j) {
      const Vec::F factor = Vec::set1(p[j]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) acc[j][v] = Vec::fma(factor, value[v], acc[j][v]);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < kRanks; ++j)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) store_cols(kFp32, bytes(c + j * kBlock + v * Vec::kLanes), acc[j][v], lanes);
}

template <Format format, int kVecs>
inline void outer_columns(const float* p, ptrdiff_t p_stride, int rank, const char* q, ptrdiff_t q_stride, int rows, int lanes,
                          float* c) {
  int j = 0;
  for (; j + Vec::kOuterRanks <= rank; j += Vec::kOuterRanks)
    outer_tile<format, Vec::kOuterRanks, kVecs>(p + j, p_stride, q, q_stride, rows, lanes, c + j * kBlock);
  for (; j < rank; ++j) outer_tile<format, 1, kVecs>(p + j, p_stride, q, q_stride, rows, lanes, c + j * kBlock);
}

template <Format format>
inline void outer_rows(const float* p, ptrdiff_t p_stride, int rank, const char* q, ptrdiff_t q_stride, int rows, int cols,
                       float* c) {
  int col = 0;
  for (; col + 2 * Vec::kLanes <= cols; col += 2 * Vec::kLanes)
    outer_columns<format, 2>(p, p_stride, rank, q + col * size_of(format), q_stride, rows, Vec::kLanes, c + col);
  for (; col < cols; col += Vec::kLanes)
    outer_columns<format, 1>(p, p_stride, rank, q + col * size_of(format), q_stride, rows,
                             cols - col < Vec::kLanes ? cols - col : Vec::kLanes, c + col);
}

inline void outer(const float* p, ptrdiff_t p_stride, int rank, Format q_format, const char* q, ptrdiff_t q_stride, int rows,
                  int cols, float* c) {
  if (q_format == kBf16) outer_rows<kBf16>(p, p_stride, rank, q, q_stride, rows, cols, c);
  else outer_rows<kFp32>(p, p_stride, rank, q, q_stride, rows, cols, c);
}

// The hash of ktft/reference.py, in the same 32-bit integers.
inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

inline void dropout(const Dropout& d, const int64_t* routes, int64_t col0, int rows, int cols, float* c, ptrdiff_t c_stride) {
  const uint32_t base = mix(uint32_t(d.seed) ^ d.stream * 0x9E3779B1u);
  for (int row = 0; row < rows; ++row, c += c_stride) {
    const uint32_t row_hash = mix(mix(base ^ uint32_t(routes[row])) ^ uint32_t(d.seed >> 32));
    for (int col = 0; col < cols; ++col) {
      const uint32_t bits = mix(row_hash ^ (uint32_t(col0 + col) * 0x9E3779B1u));
      c[col] = bits >= d.threshold ? c[col] * d.keep_scale : 0.0f;
    }
  }
}
