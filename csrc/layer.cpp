#include "layer.h"

#include <string.h>

#include <algorithm>
#include <utility>

#include "prefetch.h"

namespace ktft {

namespace {

// Scratch for one wave's rows, per thread. Larger waves mean fewer barriers; at 24 MiB a wave of Qwen3-30B's shape holds
// thousands of rows per thread, so barriers and uneven last tasks cost well under a percent.
constexpr int64_t kWaveBytesPerThread = 4 << 20;
constexpr int64_t kMinWaveRows = 256;

}  // namespace

static_assert(kMaxSegments == 2 * kMaxAdapters + 2, "a product has room for every adapter");

Layer::Layer(const LayerCall& call)
    : call_(call),
      kernels_(kernels_for(call.isa, call.compute)),
      pool_(Pool::instance()),
      lock_(pool_.call_mutex),
      routes_(group_routes(call.top_k_index, call.top_k_weights, call.tokens, call.top_k, call.experts, call.adapter_ids,
                           int64_t(call.adapters.size()))),
      hidden_stride_(row_stride(call.hidden)),
      inter_stride_(row_stride(call.intermediate)),
      dropout_(call.dropout_p > 0 && !call.adapters.empty()) {
  prefetch_experts(call_, routes_);
}

void Layer::cut_waves(int64_t bytes_per_row) {
  const int64_t budget = std::max(kMinWaveRows, kWaveBytesPerThread * call_.threads / std::max<int64_t>(bytes_per_row, 1));
  const int64_t total = routes_.offset.back();
  Wave wave{0, 0, {}, {}};
  const auto close = [&](int64_t at) {
    if (wave.end > wave.begin) {
      wave_rows_ = std::max(wave_rows_, wave.end - wave.begin);
      waves_.push_back(std::move(wave));
    }
    wave = Wave{at, at, {}, {}};
  };
  const int64_t groups = int64_t(routes_.offset.size()) - 1, per_expert = groups / call_.experts;
  for (int64_t g = 0; g < groups; ++g) {
    int64_t begin = routes_.offset[size_t(g)];
    const int64_t end = routes_.offset[size_t(g) + 1];
    Piece piece{g / per_expert, 0, 0, 0, adapters()};
    if (call_.adapter_ids) {  // group 0 of an expert: no adapter; group n + 1: adapter n
      piece.last_adapter = int(g % per_expert);
      piece.first_adapter = std::max(piece.last_adapter - 1, 0);
    }
    while (begin < end) {
      piece.begin = begin;
      piece.end = begin + std::min(end - begin, wave.begin + budget - begin);
      wave.pieces.push_back(piece);
      for (int64_t row = piece.begin; row < piece.end; row += kChunk) {
        Piece chunk = piece;
        chunk.begin = row;
        chunk.end = std::min(row + kChunk, piece.end);
        wave.chunks.push_back(chunk);
      }
      begin = wave.end = piece.end;
      if (wave.end - wave.begin >= budget) close(begin);
    }
  }
  close(total);
}

void Layer::take_workers() {
  const int64_t widest = words(std::max(call_.hidden, call_.intermediate));
  int64_t rank = 0, rank_words = 0;
  for (const Adapter& adapter : call_.adapters) {
    rank = std::max(rank, adapter.rank);
    rank_words += words(adapter.rank);
  }
  workers_.resize(size_t(call_.threads));
  for (Worker& worker : workers_) {
    worker.c[0] = take<float>(kChunk * kBlock);
    worker.c[1] = take<float>(kChunk * kBlock);
    worker.operands = take<char>((2 * widest + 2 * rank_words) * kBlock * 4);
    worker.rows = take<char>(widest * kBlock * 4);
    worker.masked = take<char>(dropout_ ? kChunk * widest * 4 : 0);
    worker.masked_row = take<float>(dropout_ ? widest * kernels_.group : 0);
    worker.outer = take<float>(rank * kBlock);
  }
}

LowRank Layer::take_low_rank(int64_t rank) {
  LowRank low;
  low.values = take<float>(wave_rows_ * rank);
  low.words = take<char>(wave_rows_ * words(rank) * 4);
  return low;
}

void Layer::gather(const Wave& wave, const Piece& chunk, const char* tensor, char* rows) const {
  const int64_t row_bytes = call_.hidden * size_of(call_.compute);
  for (int64_t row = chunk.begin; row < chunk.end; ++row) {
    kernels_.decode_rows(call_.compute, tensor + routes_.token[size_t(row)] * row_bytes, row_bytes, 1, call_.hidden,
                         rows + (row - wave.begin) * hidden_stride_, hidden_stride_);
  }
}

Operand Layer::prepare(Worker& worker, bool few, Direction direction, const char* matrix, int64_t row_stride, Format format,
                       bool transposed, int64_t reduction, int64_t column, int columns) const {
  Operand operand;
  operand.length = reduction;
  operand.format = format;
  char* const block = worker.operands + worker.used;
  const int64_t bytes = words(reduction) * 4;
  if ((direction == kForward) == transposed) {
    const char* const source = matrix + column * size_of(format);
    if (few) {
      operand = {Operand::kColumns, source, row_stride, reduction, format};
    } else {
      operand = {Operand::kPanel, block, 0, reduction, format};
      kernels_.decode_panel(format, source, row_stride, reduction, columns, block);
      worker.used += bytes * kBlock;
    }
    return operand;
  }
  operand = {Operand::kRows, matrix + column * row_stride, row_stride, reduction, format};
  if (format != kernels_.word_format || format != call_.compute || reduction % kernels_.group != 0) {
    char* const rows = few ? block : worker.rows;
    kernels_.decode_rows(format, operand.data, row_stride, columns, reduction, rows, bytes);
    operand.data = rows;
    operand.stride = bytes;
    if (few) worker.used += bytes * kBlock;
  }
  if (!few) {
    kernels_.decode_phased(operand.data, operand.stride, words(reduction), columns, block);
    operand.layout = Operand::kPhased;
    operand.data = block;
    worker.used += bytes * kBlock;
  }
  return operand;
}

Operand Layer::base_operand(Worker& worker, Direction direction, Projection p, const Piece& piece, int64_t block) const {
  const Matrices& m = matrices(p);
  const bool input_is_hidden = (p == kDown) == (direction == kBackward);
  const int64_t reduction = input_is_hidden ? call_.hidden : call_.intermediate;
  const int64_t columns = input_is_hidden ? call_.intermediate : call_.hidden;
  return prepare(worker, few(piece), direction, reinterpret_cast<const char*>(m.addresses[piece.expert]), m.row_stride, m.format,
                 m.transposed, reduction, block * kBlock, block_columns(columns, block));
}

ReadAhead::Area Layer::base_area(Direction direction, Projection p, Step step) const {
  if (!step.piece) return {};
  const Matrices& m = matrices(p);
  const bool input_is_hidden = (p == kDown) == (direction == kBackward);
  const int64_t reduction = input_is_hidden ? call_.hidden : call_.intermediate;
  const int64_t columns = block_columns(input_is_hidden ? call_.intermediate : call_.hidden, step.block);
  const char* const matrix = reinterpret_cast<const char*>(m.addresses[step.piece->expert]);
  const int64_t element = size_of(m.format);
  if ((direction == kForward) != m.transposed)
    return {matrix + step.block * kBlock * m.row_stride, m.row_stride, columns, reduction * element};
  return {matrix + step.block * kBlock * element, m.row_stride, reduction, columns * element};
}

int64_t Layer::factor_rows(int adapter, int factor) const {
  if (factor % 2 == 0) return call_.adapters[size_t(adapter)].rank;
  return factor / 2 == kDown ? call_.hidden : call_.intermediate;
}

int64_t Layer::factor_cols(int adapter, int factor) const {
  if (factor % 2 == 1) return call_.adapters[size_t(adapter)].rank;
  return factor / 2 == kDown ? call_.intermediate : call_.hidden;
}

const char* Layer::factor_address(int adapter, int factor, int64_t expert) const {
  const Adapter& a = call_.adapters[size_t(adapter)];
  return a.factors[factor] + expert * factor_rows(adapter, factor) * factor_cols(adapter, factor) * size_of(a.format);
}

Operand Layer::lora_operand(Worker& worker, bool few, Direction direction, int adapter, int factor, int64_t expert,
                            int64_t block) const {
  const Adapter& a = call_.adapters[size_t(adapter)];
  const int64_t rows = factor_rows(adapter, factor), cols = factor_cols(adapter, factor);
  const int64_t reduction = direction == kForward ? cols : rows, columns = direction == kForward ? rows : cols;
  return prepare(worker, few, direction, factor_address(adapter, factor, expert), cols * size_of(a.format), a.format, false,
                 reduction, block * kBlock, block_columns(columns, block));
}

void Layer::multiply(const Term* terms, int count, int64_t first, int rows, int columns, float* c,
                     const ReadAhead& ahead) const {
  Segment segments[kMaxSegments];
  memset(c, 0, size_t(rows) * kBlock * sizeof(float));
  for (const auto& [layout, product] : {std::pair(Operand::kRows, kernels_.multiply_rows),
                                        std::pair(Operand::kPhased, kernels_.multiply_phased),
                                        std::pair(Operand::kColumns, kernels_.multiply_columns),
                                        std::pair(Operand::kPanel, kernels_.multiply_panel)}) {
    int used = 0;
    for (int i = 0; i < count; ++i) {
      const Term& t = terms[i];
      if (t.operand.layout != layout) continue;
      segments[used++] = {t.rows.words + first * t.rows.stride, t.rows.stride, t.operand.data, t.operand.stride, t.operand.length,
                          t.operand.format};
    }
    if (used > 0) product(segments, used, rows, columns, c, terms[0].operand.layout == layout ? ahead : ReadAhead{});
  }
}

Dropout Layer::dropout_for(int adapter, int site) const {
  return {call_.dropout_seed, uint32_t(adapter * 2 + site), uint32_t(call_.dropout_p * 4294967296.0),
          float(1.0 / (1.0 - call_.dropout_p))};
}

Rows Layer::low_rank_rows(const LowRank& low, int adapter) const {
  return {low.words, words(call_.adapters[size_t(adapter)].rank) * 4};
}

void Layer::low_rank(Worker& worker, const Wave& wave, const Piece& chunk, Rows rows, Direction direction, int adapter,
                     int factor, int dropout_site, const LowRank& low) const {
  const Adapter& a = call_.adapters[size_t(adapter)];
  const int count = int(chunk.end - chunk.begin);
  const int64_t inside = chunk.begin - wave.begin;
  Term term{rows, {}};
  int64_t first = inside;
  if (dropout_ && dropout_site >= 0) {  // round(mask * row), a row at a time
    const int64_t elements = factor_cols(adapter, factor), stride = words(elements) * 4;
    const Dropout mask = dropout_for(adapter, dropout_site);
    for (int i = 0; i < count; ++i) {
      kernels_.load_rows(rows.words + (inside + i) * rows.stride, 0, 0, 1, int(elements), worker.masked_row, elements);
      kernels_.dropout(mask, &routes_.route[size_t(chunk.begin + i)], 0, 1, int(elements), worker.masked_row, elements);
      kernels_.decode_rows(kFp32, reinterpret_cast<const char*>(worker.masked_row), 0, 1, elements, worker.masked + i * stride,
                           stride);
    }
    term.rows = {worker.masked, stride};
    first = 0;
  }
  const int64_t word_stride = words(a.rank) * 4, element = size_of(kernels_.word_format);
  for (int64_t block = 0; block < blocks(a.rank); ++block) {
    worker.used = 0;
    const int columns = block_columns(a.rank, block);
    // Rows where they can be: a panel of few columns would be wasted.
    term.operand = lora_operand(worker, direction == kForward, direction, adapter, factor, chunk.expert, block);
    multiply(&term, 1, first, count, columns, worker.c[0]);
    kernels_.store_low_rank(worker.c[0], a.scaling, count, columns, low.values + inside * a.rank + block * kBlock, a.rank,
                            low.words + inside * word_stride + block * kBlock * element, word_stride);
  }
}

void Layer::inputs(const Wave& wave, char* x, const std::vector<LowRank>& gate, const std::vector<LowRank>& up) {
  parallel(int64_t(wave.chunks.size()), [&](int64_t task, Worker& worker) {
    const Piece& chunk = wave.chunks[size_t(task)];
    gather(wave, chunk, call_.x, x);
    for (int n = chunk.first_adapter; n < chunk.last_adapter; ++n) {
      low_rank(worker, wave, chunk, {x, hidden_stride_}, kForward, n, 0, 0, gate[size_t(n)]);
      low_rank(worker, wave, chunk, {x, hidden_stride_}, kForward, n, 2, 0, up[size_t(n)]);
    }
  });
}

void Layer::gate_up(const Wave& wave, Rows x, const std::vector<LowRank>& gate, const std::vector<LowRank>& up, char* saved,
                    char* h) {
  const int64_t saved_element = size_of(call_.compute), saved_stride = 2 * call_.intermediate * saved_element;
  parallel_steps(wave, call_.intermediate, [&](Step step, Step next, Worker& worker) {
    const Piece& piece = *step.piece;
    const int64_t block = step.block;
    const int columns = block_columns(call_.intermediate, block);
    Term terms[2][kMaxAdapters + 1];
    for (const Projection p : {kGate, kUp}) {
      terms[p][0] = {x, base_operand(worker, kForward, p, piece, block)};
      for (int n = piece.first_adapter; n < piece.last_adapter; ++n)
        terms[p][1 + n - piece.first_adapter] = {low_rank_rows((p == kGate ? gate : up)[size_t(n)], n),
                                                 lora_operand(worker, few(piece), kForward, n, 2 * p + 1, piece.expert, block)};
    }
    // Just in time, for L2 holds little more than two blocks: up during gate, and during up the gate of the next step.
    const ReadAhead ahead[2] = {{{base_area(kForward, kUp, step), {}}}, {{base_area(kForward, kGate, next), {}}}};
    for (int64_t row = piece.begin; row < piece.end; row += kChunk) {
      const int count = int(std::min<int64_t>(kChunk, piece.end - row));
      const int64_t inside = row - wave.begin;
      for (const Projection p : {kGate, kUp})
        multiply(terms[p], piece.adapters() + 1, inside, count, columns, worker.c[p], ahead[p]);
      char* saved_gate = saved ? saved + inside * saved_stride + block * kBlock * saved_element : nullptr;
      kernels_.swiglu_forward(worker.c[kGate], worker.c[kUp], count, columns, saved_gate,
                              saved ? saved_gate + call_.intermediate * saved_element : nullptr, saved_stride,
                              h + inside * inter_stride_ + block * kBlock * size_of(kernels_.word_format), inter_stride_);
    }
  });
}

}  // namespace ktft
