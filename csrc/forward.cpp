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
    cut_waves(inter_stride_ + rank_bytes);
    allocate();
    reserve();
    allocate();

    const int64_t saved_stride = 2 * call_.intermediate * size_of(call_.compute);
    const int64_t valid = routes_.offset.back(), all = call_.tokens * call_.top_k;
    if (saved) memset(saved + valid * saved_stride, 0, size_t((all - valid) * saved_stride));

    advise_huge_pages(out, size_t(call_.tokens * call_.hidden * size_of(call_.compute)));
    if (saved) advise_huge_pages(saved, size_t(all * saved_stride));
    float* sum = call_.compute == kFp32 ? reinterpret_cast<float*>(out) : sum_;
    parallel((call_.tokens + kChunk - 1) / kChunk, [&](int64_t task, Worker&) {
      const int64_t first = task * kChunk, count = std::min<int64_t>(kChunk, call_.tokens - first);
      memset(sum + first * call_.hidden, 0, size_t(count * call_.hidden) * sizeof(float));
    });
    const Rows x = tensor_rows(call_.x, x_copy_);
    for (const Wave& wave : waves_) {
      low_rank_inputs(wave, x, gate_, up_);
      gate_up(wave, x, gate_, up_, saved ? saved + wave.begin * saved_stride : nullptr, h_);
      const Rows h{h_, inter_stride_, nullptr};
      if (adapters() > 0) {
        parallel(int64_t(wave.chunks.size()), [&](int64_t task, Worker& worker) {
          const Piece& chunk = wave.chunks[size_t(task)];
          for (int n = chunk.first_adapter; n < chunk.last_adapter; ++n)
            low_rank(worker, wave, chunk, h, false, kForward, n, 4, 1, down_[size_t(n)]);
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
  char *x_copy_, *h_;
  std::vector<LowRank> gate_, up_, down_;

  void allocate() {
    begin_allocation();
    take_workers();
    sum_ = take<float>(call_.compute == kFp32 ? 0 : call_.tokens * call_.hidden);
    x_copy_ = take<char>(is_words(call_.hidden) ? 0 : call_.tokens * hidden_stride_);
    h_ = take<char>(wave_rows_ * inter_stride_);
    for (std::vector<LowRank>* lows : {&gate_, &up_, &down_}) {
      lows->clear();
      for (const Adapter& adapter : call_.adapters) lows->push_back(take_low_rank(adapter.rank));
    }
  }

  // One task owns a block of output columns and walks the experts in order: the sum over a token's experts has a fixed order
  // and needs neither atomics nor a buffer per route.
  void down(const Wave& wave, Rows h, float* sum) {
    parallel(blocks(call_.hidden), [&](int64_t block, Worker& worker) {
      const int columns = block_columns(call_.hidden, block);
      for (size_t i = 0; i < wave.pieces.size(); ++i) {
        const Piece& piece = wave.pieces[i];
        worker.used = 0;
        Term terms[kMaxAdapters + 1];
        terms[0] = {h, 0, base_operand(worker, kForward, kDown, piece.expert, block)};
        if (i + 1 < wave.pieces.size()) read_ahead(terms[0].operand, kForward, kDown, wave.pieces[i + 1].expert, block);
        for (int n = piece.first_adapter; n < piece.last_adapter; ++n)
          terms[1 + n - piece.first_adapter] = {low_rank_rows(down_[size_t(n)], n), 0,
                                                lora_operand(worker, kForward, n, 5, piece.expert, block)};
        for (int64_t row = piece.begin; row < piece.end; row += kChunk) {
          const int count = int(std::min<int64_t>(kChunk, piece.end - row));
          for (int t = 0; t <= piece.adapters(); ++t) terms[t].first = row - wave.begin;
          multiply(terms, piece.adapters() + 1, count, columns, worker.c[0]);
          kernels_.scatter_add(worker.c[0], &routes_.weight[size_t(row)], count, columns, sum + block * kBlock, call_.hidden,
                               &routes_.token[size_t(row)]);
        }
      }
    });
  }
};

}  // namespace

void forward(const LayerCall& call, char* out, char* saved) { Forward(call).run(out, saved); }

}  // namespace ktft
