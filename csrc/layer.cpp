#include "layer.h"

#include <string.h>

#include <algorithm>

#include "prefetch.h"

namespace ktft {

namespace {

// Scratch for one wave's rows, per thread. Larger waves mean fewer barriers, smaller ones stay in L3 from phase to phase.
// Forward and backward at 2048 tokens of Qwen3-30B's shape, two threads, Zen 5, 2, 4, 8, 12 and 24 MiB: 512, 491, 499, 505 and
// 502 ms.
constexpr int64_t kWaveBytesPerThread = 4 << 20;
constexpr int64_t kMinWaveRows = 256;

// Stored rows that are decoded at a time where few rows of activations meet them: 32 KiB of them, 2048 elements long in bf16,
// stay in L1.
constexpr int kDecodedRows = 8;

}  // namespace

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
    Piece piece{g / per_expert, 0, 0, 0, adapters(), 0, true};
    if (call_.adapter_ids) {  // group 0 of an expert: no adapter; group n + 1: adapter n
      piece.last_adapter = int(g % per_expert);
      piece.first_adapter = std::max(piece.last_adapter - 1, 0);
    }
    if (wave.end - wave.begin + end - begin > budget) close(begin);  // only groups larger than a wave are split
    while (begin < end) {
      piece.begin = begin;
      piece.first = begin == routes_.offset[size_t(g)];
      piece.end = std::min(end, begin + budget);
      const int64_t rows = piece.end - piece.begin, chunks = (rows + kChunk - 1) / kChunk;
      piece.chunk = (rows + chunks - 1) / chunks;
      wave.pieces.push_back(piece);
      for (int64_t row = piece.begin; row < piece.end; row += piece.chunk) {
        Piece chunk = piece;
        chunk.begin = row;
        chunk.end = std::min(row + piece.chunk, piece.end);
        wave.chunks.push_back(chunk);
      }
      begin = wave.end = piece.end;
      if (begin < end) close(begin);
    }
  }
  close(total);
}

void Layer::take_workers() {
  int64_t rank = 0;
  for (const Adapter& adapter : call_.adapters) rank = std::max(rank, adapter.rank);
  const int64_t widest = words(std::max({call_.hidden, call_.intermediate, rank}));
  workers_.resize(size_t(call_.threads));
  for (Worker& worker : workers_) {
    worker.c[0] = take<float>(kChunk * kBlock);
    worker.c[1] = take<float>(kChunk * kBlock);
    for (char*& panel : worker.panels) panel = take<char>(kPartWords * kBlock * 4);
    worker.lora_panel = take<char>(kPartWords * kBlock * 4);
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
  const auto source = [&](int64_t row) { return tensor + routes_.token[size_t(row)] * row_bytes; };
  for (int64_t row = chunk.begin; row < chunk.end; ++row) {
    if (row + 1 < chunk.end)
      for (int64_t byte = 0; byte < row_bytes; byte += 64) __builtin_prefetch(source(row + 1) + byte);
    kernels_.decode_rows({source(row), row_bytes, call_.compute}, 1, call_.hidden, rows + (row - wave.begin) * hidden_stride_,
                         hidden_stride_);
  }
}

void Layer::arrange(const char* rows, int64_t stride, int64_t inside, int count, int64_t first, int64_t columns,
                    int64_t elements, char* arranged) const {
  if (!arranged) return;
  kernels_.arrange_rows(rows + inside * stride + words(first) * 4, stride, count, words(first), words(columns), words(elements),
                        arranged + inside * words(elements) * 4);
}

Block Layer::base_block(Direction direction, Projection p, Step step) const {
  const Matrices& m = matrices(p);
  const bool input_is_hidden = (p == kDown) == (direction == kBackward);
  Block block;
  block.stride = m.row_stride;
  block.format = m.format;
  block.is_rows = (direction == kForward) != m.transposed;
  block.length = input_is_hidden ? call_.hidden : call_.intermediate;
  if (!step.piece) return block;
  block.columns = block_columns(input_is_hidden ? call_.intermediate : call_.hidden, step.block, step.count);
  const int64_t first = step.block * kBlock;
  static_cast<Stored&>(block) = m.of(step.piece->expert).from(block.is_rows ? first : 0, block.is_rows ? 0 : first);
  return block;
}

Block Layer::lora_block(Direction direction, int adapter, int factor, int64_t expert, int64_t block, int64_t count) const {
  const Adapter& a = call_.adapters[size_t(adapter)];
  const int64_t rows = factor_rows(adapter, factor), cols = factor_cols(adapter, factor);
  const bool is_rows = direction == kForward;
  const int64_t stride = cols * size_of(a.format);
  return {{factor_address(adapter, factor, expert) + block * kBlock * (is_rows ? stride : size_of(a.format)), stride, a.format},
          is_rows,
          is_rows ? cols : rows,
          block_columns(is_rows ? rows : cols, block, count)};
}

Layer::Chunk Layer::chunk(const Wave& wave, const Piece& piece, int64_t row) const {
  return {row - wave.begin, int(std::min(piece.chunk, piece.end - row)), few(piece)};
}

Layer::Base Layer::base(Direction direction, std::initializer_list<Projection> projections, Step step, bool by_part) const {
  Base base;
  base.by_part = by_part;
  if (!step.piece) return base;
  base.few = few(*step.piece);
  for (const Projection p : projections) base.blocks[base.count++] = base_block(direction, p, step);
  return base;
}

PanelSource Layer::source(const Block& block, int64_t part) const {
  const int64_t begin = part * part_length();
  return {block.from(block.is_rows ? 0 : begin, block.is_rows ? begin : 0), block.is_rows,
          std::min(part_length(), block.length - begin), block.columns};
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

Ahead Layer::ahead_of(const Base& base, int64_t index, const Base& after) const {
  Ahead ahead;
  const auto read_ahead = [](const PanelSource& part) -> Ahead::Area {
    const int64_t bytes = bytes_of(part.format, part.is_rows ? part.length : part.columns);
    const int64_t rows = part.is_rows ? part.columns : part.length, of_line = packing_of(part.format).rows;
    return {part.codes(), part.stride, (rows + of_line - 1) / of_line, bytes};
  };
  const auto read = [&](const Block& block) { ahead.areas[0] = read_ahead(source(block, 0)); };
  if (base.few) {
    if (index + 1 < base.count) read(base.blocks[index + 1]);
    else if (after.count > 0) read(after.blocks[0]);
    return ahead;
  }
  const auto panel_of = [&](const Base& of, int64_t i) {  // the blocks of a base are equally long
    const int64_t all = parts(of.blocks[0]);
    return of.by_part ? source(of.blocks[i % of.count], i / of.count) : source(of.blocks[i / all], i % all);
  };
  const int64_t here = products(base);
  const auto panel = [&](int64_t i) {
    if (i < here) return panel_of(base, i);
    return after.few || i - here >= products(after) ? PanelSource{} : panel_of(after, i - here);
  };
  if (index + 1 == here && after.few) read(after.blocks[0]);
  const PanelSource next = panel(index + 1), then = panel(index + 2);
  if (next.data && kernels_.decodes_aside(next)) {
    ahead.next = next;
    if (then.data && kernels_.decodes_aside(then)) ahead.then = then;
  } else if (next.data) {
    ahead.areas[0] = read_ahead(next);
  }
  return ahead;
}

void Layer::add_in_place(Worker& worker, const Term& term, const Chunk& chunk, int64_t begin, int64_t length, float* c,
                         const Ahead& ahead) const {
  const Block& block = term.block;
  const auto activations = [&](int64_t first) {
    return term.rows.words + chunk.first * term.rows.stride + first / kernels_.group * 4;
  };
  Operands x{activations(begin), term.rows.stride, nullptr, block.stride, length, block.format, {}};
  if (term.rows.arranged)
    x.arranged = {term.rows.arranged + chunk.first * words(block.length) * 4, words(block.length), begin / kernels_.group};
  const bool is_words =
      block.format == kernels_.word_format && block.format == call_.compute && block.length % kernels_.group == 0;
  if (chunk.few && !is_direct(block.format) && kernels_.multiply_coded &&
      kernels_.multiply_coded(block.from(block.is_rows ? 0 : begin, block.is_rows ? begin : 0), block.is_rows, x, chunk.rows,
                              block.columns, c, ahead))
    return;
  if (block.is_rows && !is_words) {  // made words first, some at a time
    x.b = worker.rows;
    x.b_stride = words(length) * 4;
    const int step = chunk.few ? kDecodedRows : kBlock;
    for (int col = 0; col < block.columns; col += step) {
      const int columns = std::min(step, block.columns - col);
      kernels_.decode_rows(block.from(col, begin), columns, length, worker.rows, x.b_stride);
      kernels_.multiply_rows(x, chunk.rows, columns, c + col, col + columns < block.columns ? Ahead{} : ahead);
    }
  } else if (!is_direct(block.format)) {  // columns, by way of panels; the chains are the same
    x.b = worker.lora_panel;
    for (int col = 0; col < block.columns; col += kBlock, c += kFewRows * kBlock) {
      const int columns = std::min(kBlock, block.columns - col);
      for (int64_t at = begin; at < begin + length; at += part_length()) {
        x.a = activations(at);
        x.length = std::min(part_length(), begin + length - at);
        kernels_.decode_panel({block.from(at, col), false, x.length, columns}, worker.lora_panel);
        kernels_.multiply_panel(x, chunk.rows, columns, c, {});
      }
    }
  } else {
    x.b = block.from(block.is_rows ? 0 : begin, block.is_rows ? begin : 0).data;
    (block.is_rows ? kernels_.multiply_rows : kernels_.multiply_columns)(x, chunk.rows, block.columns, c, ahead);
  }
}

void Layer::add_panel(const Term& term, const Chunk& chunk, int64_t part, const char* panel, float* c,
                      const Ahead& ahead) const {
  const int64_t begin = part * part_length();
  const Operands x{term.rows.words + chunk.first * term.rows.stride + begin / kernels_.group * 4,
                   term.rows.stride,
                   panel,
                   0,
                   std::min(part_length(), term.block.length - begin),
                   term.block.format,
                   {}};
  (term.block.is_rows ? kernels_.multiply_phased : kernels_.multiply_panel)(x, chunk.rows, term.block.columns, c, ahead);
}

void Layer::add_base(Worker& worker, const Term& term, const Chunk& chunk, int64_t part, float* c, Ahead ahead) const {
  if (chunk.few) return add_in_place(worker, term, chunk, 0, term.block.length, c, ahead);
  const bool from_panel = !reads_in_place(term.block);
  const PanelSource wanted = source(term.block, part);
  char* const panel = worker.panels[worker.turn];
  if (from_panel) {
    if (!(worker.ready == wanted)) kernels_.decode_panel(wanted, panel);
    worker.turn ^= 1;
  }
  worker.ready = ahead.next;
  ahead.next_panel = worker.panels[worker.turn];
  if (from_panel) add_panel(term, chunk, part, panel, c, ahead);
  else add_in_place(worker, term, chunk, part * part_length(), wanted.length, c, ahead);
}

void Layer::add_lora(Worker& worker, const Term& term, const Chunk& chunk, float* c) const {
  if (chunk.few || reads_in_place(term.block)) return add_in_place(worker, term, chunk, 0, term.block.length, c, {});
  for (int64_t part = 0; part < parts(term.block); ++part) {
    kernels_.decode_panel(source(term.block, part), worker.lora_panel);
    add_panel(term, chunk, part, worker.lora_panel, c, {});
  }
}

void Layer::clear(const Chunk& chunk, int columns, float* c) const {
  for (int64_t block = 0; block < blocks(columns); ++block)
    memset(c + block * kFewRows * kBlock, 0, size_t(chunk.rows) * kBlock * sizeof(float));
}

void Layer::multiply(Worker& worker, const Term* terms, int count, const Base& base, const Base& after, const Chunk& chunk,
                     float* c, std::initializer_list<Ahead::Area> areas) const {
  clear(chunk, terms[0].block.columns, c);
  const int64_t last = products(base);
  for (int64_t i = 0; i < last; ++i) {
    Ahead ahead = ahead_of(base, i, after);
    if (i + 1 == last) std::copy(areas.begin(), areas.end(), ahead.areas + 1);
    add_base(worker, terms[i / (last / base.count)], chunk, i % (last / base.count), c, ahead);
  }
  for (int i = base.count; i < count; ++i) add_lora(worker, terms[i], chunk, c);
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
  // Rows where they can be read as such: a panel of few columns would be wasted.
  Chunk call{inside, count, direction == kForward};
  if (dropout_ && dropout_site >= 0) {  // round(mask * row), a row at a time
    const int64_t elements = factor_cols(adapter, factor), stride = words(elements) * 4;
    const Dropout mask = dropout_for(adapter, dropout_site);
    for (int i = 0; i < count; ++i) {
      kernels_.load_rows(rows.words + (inside + i) * rows.stride, 0, 0, 1, int(elements), worker.masked_row, elements);
      kernels_.dropout(mask, &routes_.route[size_t(chunk.begin + i)], 0, 1, int(elements), worker.masked_row, elements);
      kernels_.decode_rows({reinterpret_cast<const char*>(worker.masked_row), 0, kFp32}, 1, elements,
                           worker.masked + i * stride, stride);
    }
    rows = {worker.masked, stride};
    call.first = 0;
  }
  const int64_t word_stride = words(a.rank) * 4, element = size_of(kernels_.word_format);
  for (int64_t block = 0; block < blocks(a.rank); ++block) {
    const int columns = block_columns(a.rank, block);
    clear(call, columns, worker.c[0]);
    add_lora(worker, {rows, lora_block(direction, adapter, factor, chunk.expert, block)}, call, worker.c[0]);
    kernels_.store_low_rank(worker.c[0], a.scaling, count, columns, low.values + inside * a.rank + block * kBlock, a.rank,
                            low.words + inside * word_stride + block * kBlock * element, word_stride);
  }
}

void Layer::inputs(const Wave& wave, char* x, char* arranged, const std::vector<LowRank>& gate,
                   const std::vector<LowRank>& up) {
  parallel(int64_t(wave.chunks.size()), [&](int64_t task, Worker& worker) {
    const Piece& chunk = wave.chunks[size_t(task)];
    gather(wave, chunk, call_.x, x);
    const int64_t inside = chunk.begin - wave.begin;
    arrange(x, hidden_stride_, inside, int(chunk.end - chunk.begin), 0, call_.hidden, call_.hidden, arranged);
    const Rows rows{x, hidden_stride_, arranged};
    for (int n = chunk.first_adapter; n < chunk.last_adapter; ++n) {
      low_rank(worker, wave, chunk, rows, kForward, n, 0, 0, gate[size_t(n)]);
      low_rank(worker, wave, chunk, rows, kForward, n, 2, 0, up[size_t(n)]);
    }
  });
}

void Layer::gate_up(const Wave& wave, Rows x, const std::vector<LowRank>& gate, const std::vector<LowRank>& up, char* saved,
                    char* h, char* h_arranged) {
  const int64_t saved_element = size_of(call_.compute), saved_stride = 2 * call_.intermediate * saved_element;
  parallel_steps(wave, call_.intermediate, false, [&](Step step, Step next, Worker& worker) {
    const Piece& piece = *step.piece;
    const int64_t block = step.block;
    const int columns = block_columns(call_.intermediate, block);
    const Base base = this->base(kForward, {kGate, kUp}, step, true), after = this->base(kForward, {kGate, kUp}, next, true);
    for (int64_t row = piece.begin; row < piece.end; row += piece.chunk) {
      const Chunk call = chunk(wave, piece, row);
      const int count = call.rows;
      const int64_t inside = call.first;
      char* const saved_gate = saved ? saved + inside * saved_stride + block * kBlock * saved_element : nullptr;
      char* const saved_up = saved ? saved_gate + call_.intermediate * saved_element : nullptr;
      char* const h_rows = h + inside * inter_stride_ + block * kBlock * size_of(kernels_.word_format);
      for (const Projection p : {kGate, kUp}) clear(call, columns, worker.c[p]);
      // A part of gate, the same part of up: they share the rows in L2.
      const int64_t last = products(base);
      for (int64_t i = 0; i < last; ++i) {
        Ahead ahead = ahead_of(base, i, row + piece.chunk < piece.end ? base : after);
        if (i + 1 == last) {
          ahead.areas[1] = {h_rows, inter_stride_, count, columns * size_of(kernels_.word_format)};
          ahead.areas[2] = {saved_gate, saved_stride, saved ? count : 0, columns * saved_element};
          ahead.areas[3] = {saved_up, saved_stride, saved ? count : 0, columns * saved_element};
        }
        add_base(worker, {x, base.blocks[i % 2]}, call, i / 2, worker.c[i % 2], ahead);
      }
      for (const Projection p : {kGate, kUp})
        for (int n = piece.first_adapter; n < piece.last_adapter; ++n)
          add_lora(
              worker,
              {low_rank_rows((p == kGate ? gate : up)[size_t(n)], n), lora_block(kForward, n, 2 * p + 1, piece.expert, block)},
              call, worker.c[p]);
      for (const Projection p : {kGate, kUp})
        if (const float* const b = bias(p, piece.expert, block * kBlock)) kernels_.add_bias(b, count, columns, worker.c[p]);
      kernels_.activation_forward(call_.activation, worker.c[kGate], worker.c[kUp], count, columns, saved_gate, saved_up,
                                  saved_stride, h_rows, inter_stride_);
      arrange(h, inter_stride_, inside, count, block * kBlock, columns, call_.intermediate, h_arranged);
    }
  });
}

}  // namespace ktft
