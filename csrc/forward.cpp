#include <string.h>

#include <algorithm>

#include "layer.h"

namespace ktft {

namespace {

class Forward : Layer {
 public:
  explicit Forward(const LayerCall& call) : Layer(call) {}

  void run(char* out, char* saved) {
    int64_t rank_bytes = 0;
    for (const Adapter& adapter : call_.adapters) rank_bytes += 3 * (adapter.rank + words(adapter.rank)) * 4;
    x_arranged_row_ = arranged_row(call_.hidden, !call_.gate.transposed || !call_.up.transposed);
    h_arranged_row_ = arranged_row(call_.intermediate, !call_.down.transposed);
    cut_waves(hidden_stride_ + inter_stride_ + x_arranged_row_ + h_arranged_row_ + rank_bytes);
    allocate();
    reserve();
    allocate();

    const int64_t saved_stride = 2 * call_.intermediate * size_of(call_.compute);
    const int64_t valid = routes_.offset.back(), all = call_.tokens * call_.top_k;
    if (saved) memset(saved + valid * saved_stride, 0, size_t((all - valid) * saved_stride));

    advise_huge_pages(out, size_t(call_.tokens * call_.hidden * size_of(call_.compute)));
    float* sum = call_.compute == kFp32 ? reinterpret_cast<float*>(out) : sum_;
    parallel((call_.tokens + kChunk - 1) / kChunk, [&](int64_t task, Worker&) {
      const int64_t first = task * kChunk, count = std::min<int64_t>(kChunk, call_.tokens - first);
      memset(sum + first * call_.hidden, 0, size_t(count * call_.hidden) * sizeof(float));
    });
    for (const Wave& wave : waves_) {
      inputs(wave, x_, x_arranged_, gate_, up_);
      gate_up(wave, {x_, hidden_stride_, x_arranged_}, gate_, up_, saved ? saved + wave.begin * saved_stride : nullptr, h_,
              h_arranged_);
      const Rows h{h_, inter_stride_, h_arranged_};
      if (adapters() > 0) {
        parallel(int64_t(wave.chunks.size()), [&](int64_t task, Worker& worker) {
          const Piece& chunk = wave.chunks[size_t(task)];
          for (int n = chunk.first_adapter; n < chunk.last_adapter; ++n)
            low_rank(worker, wave, chunk, h, kForward, n, 4, 1, down_[size_t(n)]);
        });
      }
      down(wave, h, sum);
    }
    if (call_.compute != kFp32) {
      parallel((call_.tokens + kChunk - 1) / kChunk, [&](int64_t task, Worker&) {
        const int64_t first = task * kChunk * call_.hidden;
        const int64_t count = std::min<int64_t>(kChunk * call_.hidden, call_.tokens * call_.hidden - first);
        kernels_.store_rounded(sum + first, count, out + first * size_of(call_.compute));
      });
    }
  }

 private:
  float* sum_;
  char *x_, *x_arranged_, *h_, *h_arranged_;
  int64_t x_arranged_row_, h_arranged_row_;
  std::vector<LowRank> gate_, up_, down_;

  void allocate() {
    begin_allocation();
    take_workers();
    sum_ = take<float>(call_.compute == kFp32 ? 0 : call_.tokens * call_.hidden);
    x_ = take<char>(wave_rows_ * hidden_stride_);
    x_arranged_ = take_arranged(x_arranged_row_);
    h_ = take<char>(wave_rows_ * inter_stride_);
    h_arranged_ = take_arranged(h_arranged_row_);
    for (std::vector<LowRank>* lows : {&gate_, &up_, &down_}) {
      lows->clear();
      for (const Adapter& adapter : call_.adapters) lows->push_back(take_low_rank(adapter.rank));
    }
  }

  void down(const Wave& wave, Rows h, float* sum) {
    parallel_ordered(wave, call_.hidden, false, [&](Step step, Step next, Worker& worker, auto wait) {
      const Piece& piece = *step.piece;
      const int columns = block_columns(call_.hidden, step.block);
      const Base base = this->base(kForward, {kDown}, step), after = this->base(kForward, {kDown}, next);
      Term terms[kMaxAdapters + 1] = {{h, base.blocks[0]}};
      for (int n = piece.first_adapter; n < piece.last_adapter; ++n)
        terms[1 + n - piece.first_adapter] = {low_rank_rows(down_[size_t(n)], n),
                                              lora_block(kForward, n, 5, piece.expert, step.block)};
      for (int64_t row = piece.begin; row < piece.end; row += piece.chunk) {
        const Chunk call = chunk(wave, piece, row);
        const int count = call.rows;
        multiply(worker, terms, piece.adapters() + 1, base, row + piece.chunk < piece.end ? base : after, call, worker.c[0]);
        if (const float* const b = bias(kDown, piece.expert, step.block * kBlock))
          kernels_.add_bias(b, count, columns, worker.c[0]);
        wait();
        kernels_.scatter_add(worker.c[0], &routes_.weight[size_t(row)], count, columns, sum + step.block * kBlock, call_.hidden,
                             &routes_.token[size_t(row)]);
      }
    });
  }
};

}  // namespace

void forward(const LayerCall& call, char* out, char* saved) { Forward(call).run(out, saved); }

}  // namespace ktft
