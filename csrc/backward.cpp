#include <string.h>

#include <algorithm>

#include "layer.h"

namespace ktft {

namespace {

// Per wave, with dY the incoming gradient rows (unscaled by the routing weight w):
//
//   dh = dY Wd + s ((dY Bd) Ad)        d w = <dh, h> + <dY, bd>        dh *= w
//   d gate, d up, h  from the saved pre-activations
//   dX = d gate Wg + d up Wu + s ((d gate Bg) Ag + (d up Bu) Au)           summed over a token's experts, ascending
//   dAg = (s d gate Bg)ᵀ drop0(x)      dBg = d gateᵀ (s drop0(x) Agᵀ)      up likewise
//   dAd = (w s dY Bd)ᵀ drop1(h)        dBd = dYᵀ (w s drop1(h) Adᵀ)
class Backward : Layer {
 public:
  Backward(const LayerCall& call, const Gradients& gradients) : Layer(call), gradients_(gradients) {}

  void run(const char* grad_out, const char* saved) {
    recompute_ = saved == nullptr;
    int64_t rank_bytes = 0;
    for (const Adapter& adapter : call_.adapters) rank_bytes += (8 * adapter.rank + 6 * words(adapter.rank)) * 4;
    const int64_t saved_stride = 2 * call_.intermediate * size_of(call_.compute);
    for (int n = 0; n < adapters(); ++n) wants_lora_ = wants_lora_ || wants_factors(n);
    needs_x_ = recompute_ || wants_lora_;
    x_arranged_row_ = arranged_row(call_.hidden, recompute_ && (!call_.gate.transposed || !call_.up.transposed));
    dy_arranged_row_ = arranged_row(call_.hidden, call_.down.transposed);
    d_gate_arranged_row_ = arranged_row(call_.intermediate, call_.gate.transposed);
    d_up_arranged_row_ = arranged_row(call_.intermediate, call_.up.transposed);
    cut_waves((needs_x_ ? 2 : 1) * hidden_stride_ + 3 * inter_stride_ + x_arranged_row_ + dy_arranged_row_ +
              d_gate_arranged_row_ + d_up_arranged_row_ + (recompute_ ? saved_stride : 0) + rank_bytes);
    allocate();
    reserve();
    allocate();

    float* sum = call_.compute == kFp32 ? reinterpret_cast<float*>(gradients_.x) : sum_;
    if (gradients_.x) {
      parallel((call_.tokens + kChunk - 1) / kChunk, [&](int64_t task, Worker&) {
        const int64_t first = task * kChunk, count = std::min<int64_t>(kChunk, call_.tokens - first);
        memset(sum + first * call_.hidden, 0, size_t(count * call_.hidden) * sizeof(float));
      });
    }
    clear_factors();
    if (gradients_.top_k_weights) memset(gradients_.top_k_weights, 0, size_t(call_.tokens * call_.top_k) * sizeof(float));

    for (const Wave& wave : waves_) {
      if (needs_x_) inputs(wave, x_, x_arranged_, u_gate_, u_up_);
      if (recompute_) gate_up(wave, {x_, hidden_stride_, x_arranged_}, u_gate_, u_up_, saved_copy_, h_, nullptr);
      const char* wave_saved = recompute_ ? saved_copy_ : saved + wave.begin * saved_stride;
      output_gradients(wave, grad_out);
      activations_backward(wave, wave_saved, saved_stride);
      middle(wave);
      if (gradients_.x) input_gradient(wave, sum);
      if (wants_lora_) factor_gradients(wave);
    }
    if (gradients_.x && call_.compute != kFp32) {
      parallel((call_.tokens + kChunk - 1) / kChunk, [&](int64_t task, Worker&) {
        const int64_t first = task * kChunk * call_.hidden;
        const int64_t count = std::min<int64_t>(kChunk * call_.hidden, call_.tokens * call_.hidden - first);
        kernels_.store_rounded(sum + first, count, gradients_.x + first * size_of(call_.compute));
      });
    }
  }

 private:
  const Gradients& gradients_;
  bool recompute_ = false, wants_lora_ = false, needs_x_ = false;
  float *sum_, *partial_;
  char *x_, *dy_, *saved_copy_, *h_, *d_gate_, *d_up_;
  char *x_arranged_, *dy_arranged_, *d_gate_arranged_, *d_up_arranged_;
  int64_t x_arranged_row_, dy_arranged_row_, d_gate_arranged_row_, d_up_arranged_row_;
  // u = s drop(input) Aᵀ as in forward; v = s dY Bd, and s d gate Bg, s d up Bu.
  std::vector<LowRank> u_gate_, u_up_, u_down_, v_down_, v_gate_, v_up_;
  std::vector<float*> weighted_u_, weighted_v_;  // w u_down, w v_down

  bool wants_factors(int adapter) const {
    return !gradients_.factors.empty() && gradients_.factors[size_t(adapter) * 6] != nullptr;
  }

  // Gradients of experts without rows; those of others are stored by their first piece.
  void clear_factors() {
    const int64_t per_expert = call_.adapter_ids ? adapters() + 1 : 1;
    const auto each = [&](auto f) {
      for (int n = 0; n < adapters(); ++n)
        for (int factor = 0; wants_factors(n) && factor < 6; ++factor)
          f(n, gradients_.factors[size_t(n * 6 + factor)],
            size_t(factor_rows(n, factor) * factor_cols(n, factor)) * sizeof(float));
    };
    parallel(call_.experts, [&](int64_t expert, Worker&) {
      each([&](int n, float* grad, size_t bytes) {
        const size_t group = size_t(expert * per_expert + (call_.adapter_ids ? n + 1 : 0));
        if (routes_.offset[group] == routes_.offset[group + 1])
          memset(reinterpret_cast<char*>(grad) + size_t(expert) * bytes, 0, bytes);
      });
    });
  }

  void allocate() {
    begin_allocation();
    take_workers();
    sum_ = take<float>(gradients_.x && call_.compute != kFp32 ? call_.tokens * call_.hidden : 0);
    x_ = take<char>(needs_x_ ? wave_rows_ * hidden_stride_ : 0);
    dy_ = take<char>(wave_rows_ * hidden_stride_);
    saved_copy_ = take<char>(recompute_ ? wave_rows_ * 2 * call_.intermediate * size_of(call_.compute) : 0);
    h_ = take<char>(wave_rows_ * inter_stride_);
    d_gate_ = take<char>(wave_rows_ * inter_stride_);
    d_up_ = take<char>(wave_rows_ * inter_stride_);
    x_arranged_ = take_arranged(x_arranged_row_);
    dy_arranged_ = take_arranged(dy_arranged_row_);
    d_gate_arranged_ = take_arranged(d_gate_arranged_row_);
    d_up_arranged_ = take_arranged(d_up_arranged_row_);
    partial_ = take<float>(wave_rows_ * blocks(call_.intermediate));
    for (std::vector<LowRank>* lows : {&u_gate_, &u_up_, &u_down_, &v_down_, &v_gate_, &v_up_}) {
      lows->clear();
      for (const Adapter& adapter : call_.adapters) lows->push_back(take_low_rank(adapter.rank));
    }
    for (std::vector<float*>* lists : {&weighted_u_, &weighted_v_}) {
      lists->clear();
      for (const Adapter& adapter : call_.adapters) lists->push_back(take<float>(wave_rows_ * adapter.rank));
    }
  }

  void output_gradients(const Wave& wave, const char* grad_out) {
    parallel(int64_t(wave.chunks.size()), [&](int64_t task, Worker& worker) {
      const Piece& chunk = wave.chunks[size_t(task)];
      gather(wave, chunk, grad_out, dy_);
      arrange(dy_, hidden_stride_, chunk.begin - wave.begin, int(chunk.end - chunk.begin), 0, call_.hidden, call_.hidden,
              dy_arranged_);
      for (int n = chunk.first_adapter; n < chunk.last_adapter; ++n)
        low_rank(worker, wave, chunk, {dy_, hidden_stride_}, kBackward, n, 5, -1, v_down_[size_t(n)]);
    });
  }

  // c[0] of a product of base terms and, behind them, per_adapter LoRA terms for each of the piece's adapters. With dropout the
  // mask belongs to the output of an adapter's terms, so these go through a tile of their own.
  void multiply_masked(Worker& worker, Step step, const Term* terms, const Base& base, const Base& after, int per_adapter,
                       int site, int64_t row, const Chunk& call, std::initializer_list<Ahead::Area> areas = {}) {
    const Piece& piece = *step.piece;
    multiply(worker, terms, base.count + (dropout_ ? 0 : per_adapter * piece.adapters()), base,
             row + piece.chunk < piece.end ? base : after, call, worker.c[0], areas);
    if (!dropout_) return;
    for (int i = 0; i < piece.adapters(); ++i) {
      const Term* const lora = terms + base.count + i * per_adapter;
      clear(call, lora[0].block.columns, worker.c[1]);
      for (int n = 0; n < per_adapter; ++n) add_lora(worker, lora[n], call, worker.c[1]);
      for (int64_t n = 0; n < step.count; ++n) {
        float *const to = worker.c[0] + n * kFewRows * kBlock, *const from = worker.c[1] + n * kFewRows * kBlock;
        kernels_.dropout(dropout_for(piece.first_adapter + i, site), &routes_.route[size_t(row)], (step.block + n) * kBlock,
                         call.rows, kBlock, from, kBlock);
        for (int64_t at = 0; at < call.rows * kBlock; ++at) to[at] += from[at];
      }
    }
  }

  void activations_backward(const Wave& wave, const char* saved, int64_t saved_stride) {
    const int64_t column_blocks = blocks(call_.intermediate), element = size_of(call_.compute);
    parallel_steps(wave, call_.intermediate, !call_.down.transposed, [&](Step step, Step next, Worker& worker) {
      const Piece& piece = *step.piece;
      const Base base = this->base(kBackward, {kDown}, step), after = this->base(kBackward, {kDown}, next);
      Term terms[kMaxAdapters + 1] = {{{dy_, hidden_stride_, dy_arranged_}, base.blocks[0]}};
      for (int n = piece.first_adapter; n < piece.last_adapter; ++n)
        terms[1 + n - piece.first_adapter] = {low_rank_rows(v_down_[size_t(n)], n),
                                              lora_block(kBackward, n, 4, piece.expert, step.block, step.count)};
      for (int64_t row = piece.begin; row < piece.end; row += piece.chunk) {
        const Chunk call = chunk(wave, piece, row);
        const int64_t inside = call.first, bytes = block_columns(call_.intermediate, step.block, step.count) * element;
        const char* saved_gate = saved + inside * saved_stride + step.block * kBlock * element;
        const int64_t word = size_of(kernels_.word_format), word_bytes = bytes / element * word;
        const int64_t at = inside * inter_stride_ + step.block * kBlock * word;
        multiply_masked(worker, step, terms, base, after, 1, 1, row, call,
                        {{saved_gate, saved_stride, call.rows, bytes},
                         {saved_gate + call_.intermediate * element, saved_stride, call.rows, bytes},
                         {d_gate_ + at, inter_stride_, call.rows, word_bytes},
                         {d_up_ + at, inter_stride_, call.rows, word_bytes},
                         {h_ + at, inter_stride_, call.rows, word_bytes}});
        for (int64_t n = 0; n < step.count; ++n) {
          const int64_t block = step.block + n, words_at = at + n * kBlock * word;
          const char* const gate = saved_gate + n * kBlock * element;
          const int columns = block_columns(call_.intermediate, block);
          kernels_.activation_backward(call_.activation, worker.c[0] + n * kFewRows * kBlock, &routes_.weight[size_t(row)],
                                       call.rows, columns, gate, gate + call_.intermediate * element, saved_stride,
                                       d_gate_ + words_at, d_up_ + words_at, h_ + words_at, inter_stride_,
                                       partial_ + inside * column_blocks + block, column_blocks);
          for (const auto& [rows, arranged] : {std::pair{d_gate_, d_gate_arranged_}, std::pair{d_up_, d_up_arranged_}})
            arrange(rows, inter_stride_, inside, call.rows, block * kBlock, columns, call_.intermediate, arranged);
        }
      }
    });
  }

  // What needs whole rows of d gate, d up and h: routing-weight gradients, and the low-rank rows of the remaining products.
  void middle(const Wave& wave) {
    const int64_t column_blocks = blocks(call_.intermediate);
    const Rows d_gate{d_gate_, inter_stride_}, d_up{d_up_, inter_stride_}, h{h_, inter_stride_};
    parallel(int64_t(wave.chunks.size()), [&](int64_t task, Worker& worker) {
      const Piece& chunk = wave.chunks[size_t(task)];
      if (gradients_.top_k_weights) {
        for (int64_t row = chunk.begin; row < chunk.end; ++row) {
          const float* partial = partial_ + (row - wave.begin) * column_blocks;
          float dot = 0.0f;
          for (int64_t block = 0; block < column_blocks; ++block) dot += partial[block];
          if (const float* const b = bias(kDown, chunk.expert))
            dot += kernels_.dot(dy_ + (row - wave.begin) * hidden_stride_, b, call_.hidden);
          gradients_.top_k_weights[routes_.route[size_t(row)]] = dot;
        }
      }
      for (int n = chunk.first_adapter; n < chunk.last_adapter; ++n) {
        low_rank(worker, wave, chunk, d_gate, kBackward, n, 1, -1, v_gate_[size_t(n)]);
        low_rank(worker, wave, chunk, d_up, kBackward, n, 3, -1, v_up_[size_t(n)]);
        if (!wants_factors(n)) continue;
        low_rank(worker, wave, chunk, h, kForward, n, 4, 1, u_down_[size_t(n)]);
        const int64_t rank = call_.adapters[size_t(n)].rank;
        for (int64_t row = chunk.begin; row < chunk.end; ++row) {
          const int64_t first = (row - wave.begin) * rank;
          for (int64_t i = first; i < first + rank; ++i) {
            weighted_u_[size_t(n)][i] = routes_.weight[size_t(row)] * u_down_[size_t(n)].values[i];
            weighted_v_[size_t(n)][i] = routes_.weight[size_t(row)] * v_down_[size_t(n)].values[i];
          }
        }
      }
    });
  }

  void input_gradient(const Wave& wave, float* sum) {
    const Rows d_gate{d_gate_, inter_stride_, d_gate_arranged_}, d_up{d_up_, inter_stride_, d_up_arranged_};
    const bool wide = !call_.gate.transposed && !call_.up.transposed;
    parallel_ordered(wave, call_.hidden, wide, [&](Step step, Step next, Worker& worker, auto wait) {
      const Piece& piece = *step.piece;
      const Base base = this->base(kBackward, {kGate, kUp}, step), after = this->base(kBackward, {kGate, kUp}, next);
      Term terms[2 * kMaxAdapters + 2];
      for (const Projection p : {kGate, kUp}) {
        terms[p] = {p == kGate ? d_gate : d_up, base.blocks[p]};
        for (int n = piece.first_adapter; n < piece.last_adapter; ++n)
          terms[2 + 2 * (n - piece.first_adapter) + p] = {
              low_rank_rows((p == kGate ? v_gate_ : v_up_)[size_t(n)], n),
              lora_block(kBackward, n, 2 * p, piece.expert, step.block, step.count)};
      }
      for (int64_t row = piece.begin; row < piece.end; row += piece.chunk) {
        const Chunk call = chunk(wave, piece, row);
        multiply_masked(worker, step, terms, base, after, 2, 0, row, call);
        wait();
        for (int64_t n = 0; n < step.count; ++n) {
          const int64_t block = step.block + n;
          kernels_.scatter_add(worker.c[0] + n * kFewRows * kBlock, nullptr, call.rows, block_columns(call_.hidden, block),
                               sum + block * kBlock, call_.hidden, &routes_.token[size_t(row)]);
        }
      }
    });
  }

  // grad[expert] [rows, cols] += values' x rows of words, one block of 64 columns (A) or 64 rows (B) of the factor.
  void factor_block(Worker& worker, const Wave& wave, const Piece& piece, int adapter, int factor, int64_t block,
                    const float* values, Rows rows, int dropout_site) {
    const int64_t rank = call_.adapters[size_t(adapter)].rank;
    const int64_t width = factor % 2 == 0 ? factor_cols(adapter, factor) : factor_rows(adapter, factor);
    const int columns = block_columns(width, block);
    float* grad = gradients_.factors[size_t(adapter * 6 + factor)] + piece.expert * rank * width;
    // A is [rank, width], B is [width, rank]
    const bool is_a = factor % 2 == 0;
    grad += block * kBlock * (is_a ? 1 : rank);
    if (piece.first) memset(worker.outer, 0, size_t(rank) * kBlock * sizeof(float));
    for (int64_t j = 0; !piece.first && j < rank; ++j) {
      float* const row = worker.outer + j * kBlock;
      if (is_a) memcpy(row, grad + j * width, size_t(columns) * sizeof(float));
      else
        for (int col = 0; col < columns; ++col) row[col] = grad[col * rank + j];
    }
    for (int64_t row = piece.begin; row < piece.end; row += piece.chunk) {
      const int count = int(std::min(piece.chunk, piece.end - row));
      const int64_t inside = row - wave.begin;
      const char* source = rows.words + inside * rows.stride;
      if (dropout_ && dropout_site >= 0) {
        kernels_.load_rows(source, rows.stride, block * kBlock, count, columns, worker.c[1], kBlock);
        kernels_.dropout(dropout_for(adapter, dropout_site), &routes_.route[size_t(row)], block * kBlock, count, columns,
                         worker.c[1], kBlock);
        kernels_.outer(values + inside * rank, rank, int(rank), kFp32, reinterpret_cast<const char*>(worker.c[1]), kBlock * 4,
                       count, columns, worker.outer);
      } else {
        kernels_.outer(values + inside * rank, rank, int(rank), kernels_.word_format,
                       source + block * kBlock * size_of(kernels_.word_format), rows.stride, count, columns, worker.outer);
      }
    }
    for (int64_t j = 0; j < rank; ++j) {
      const float* const row = worker.outer + j * kBlock;
      if (is_a) memcpy(grad + j * width, row, size_t(columns) * sizeof(float));
      else
        for (int col = 0; col < columns; ++col) grad[col * rank + j] = row[col];
    }
  }

  void factor_gradients(const Wave& wave) {
    const int64_t hidden_blocks = blocks(call_.hidden), inter_blocks = blocks(call_.intermediate);
    constexpr int64_t kPerTask = 4;  // adjacent blocks: while one is read, the next comes into L1
    const int64_t hidden_tasks = (hidden_blocks + kPerTask - 1) / kPerTask,
                  inter_tasks = (inter_blocks + kPerTask - 1) / kPerTask;
    const int64_t per_expert = hidden_tasks + inter_tasks;
    const Rows x{x_, hidden_stride_}, dy{dy_, hidden_stride_};
    const Rows d_gate{d_gate_, inter_stride_}, d_up{d_up_, inter_stride_}, h{h_, inter_stride_};
    parallel(int64_t(wave.pieces.size()) * per_expert, [&](int64_t task, Worker& worker) {
      const Piece& piece = wave.pieces[size_t(task / per_expert)];
      const int64_t part = task % per_expert;
      const bool is_hidden = part < hidden_tasks;
      const int64_t first = (is_hidden ? part : part - hidden_tasks) * kPerTask;
      const int64_t end = std::min(first + kPerTask, is_hidden ? hidden_blocks : inter_blocks);
      for (int n = piece.first_adapter; n < piece.last_adapter; ++n) {
        if (!wants_factors(n)) continue;
        const size_t a = size_t(n);
        for (int64_t block = first; block < end; ++block) {
          if (is_hidden) {
            factor_block(worker, wave, piece, n, 0, block, v_gate_[a].values, x, 0);
            factor_block(worker, wave, piece, n, 2, block, v_up_[a].values, x, 0);
            factor_block(worker, wave, piece, n, 5, block, weighted_u_[a], dy, -1);
          } else {
            factor_block(worker, wave, piece, n, 1, block, u_gate_[a].values, d_gate, -1);
            factor_block(worker, wave, piece, n, 3, block, u_up_[a].values, d_up, -1);
            factor_block(worker, wave, piece, n, 4, block, weighted_v_[a], h, 1);
          }
        }
      }
    });
  }
};

}  // namespace

void backward(const LayerCall& call, const char* grad_out, const char* saved, const Gradients& gradients) {
  Backward(call, gradients).run(grad_out, saved);
}

}  // namespace ktft
