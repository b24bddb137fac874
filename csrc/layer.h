// What forward.cpp and backward.cpp share: the routes of a call cut into waves, scratch, and products of activations with one
// expert's matrices.
#pragma once
#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <thread>

#include "moe.h"
#include "pool.h"
#include "route.h"

namespace ktft {

inline int64_t size_of(Format format) { return bytes_of(format, 1); }
inline int64_t blocks(int64_t columns) { return (columns + kBlock - 1) / kBlock; }
inline int block_columns(int64_t columns, int64_t block, int64_t count = 1) {
  return int(std::min(count * kBlock, columns - block * kBlock));
}

// The rows of words of a wave, one per sorted position.
struct Rows {
  const char* words = nullptr;
  int64_t stride = 0;              // bytes
  const char* arranged = nullptr;  // the same words as the level's product of rows wants them, chunk after chunk; or null
};

struct Piece {  // rows of one expert and one set of adapters: sorted positions [begin, end)
  int64_t expert, begin, end;
  int first_adapter, last_adapter;  // adapters [first, last) apply to these rows
  int64_t chunk;                    // rows of a C tile: equal shares of the piece
  bool first;                       // of its group of routes: no wave before had rows of the same expert and adapters

  int adapters() const { return last_adapter - first_adapter; }
};

struct Step {  // one block of output columns of one piece, or some adjacent ones
  const Piece* piece = nullptr;
  int64_t block = 0;
  int64_t count = 1;
};

struct Wave {
  int64_t begin, end;         // sorted positions
  std::vector<Piece> pieces;  // one per group of routes with rows in the wave, by ascending expert
  std::vector<Piece> chunks;  // the same cut to at most kChunk rows
};

// Low-rank rows of one adapter and projection: round(scale * a product), once as floats and once as words.
struct LowRank {
  float* values = nullptr;  // [wave rows, rank]
  char* words = nullptr;    // [wave rows, word_stride]
};

constexpr int64_t kMaxBlocksPerTask = kWideColumns / kBlock;

enum Projection { kGate = 0, kUp = 1, kDown = 2 };
enum Direction { kForward, kBackward };  // y = x Wᵀ, or dx = dy W

// Up to 64 output columns of one matrix, as stored; columns of few rows' products may be several blocks.
struct Block : Stored {
  bool is_rows = false;  // columns are stored rows, contiguous along the reduction; else elements of every stored row
  int64_t length = 0;    // of the reduction
  int columns = 0;
};

class Layer {
 public:
  explicit Layer(const LayerCall& call);

 protected:
  struct Worker {       // scratch of one thread
    float* c[2];        // C tiles [kChunk][kBlock]; for few rows also several, one after the other
    char* panels[2];    // in turn: one is multiplied while the other is decoded
    int turn;           // the one that the next product takes
    PanelSource ready;  // what it holds already
    char* lora_panel;
    char* rows;         // a block as rows of words
    char* masked;       // [kChunk] rows of words: activations after dropout
    float* masked_row;  // one such row as floats
    float* outer;       // [largest rank][kBlock]
  };

  struct Term {  // of a product: rows x block
    Rows rows;
    Block block;
  };
  // The base matrices' blocks of a step, in the order of its products: part by part of all of them, or one after the other.
  struct Base {
    Block blocks[2];
    int count = 0;  // 0: no step
    bool by_part = false;
    bool few = false;  // the step reads weights where they lie
  };
  struct Chunk {    // of a piece
    int64_t first;  // row in the wave
    int rows;
    bool few;  // of the piece: read the weights where they lie
  };

  const LayerCall& call_;
  const Kernels& kernels_;
  Pool& pool_;
  std::lock_guard<std::mutex> lock_;
  Routes routes_;
  std::vector<Wave> waves_;
  int64_t wave_rows_ = 0;                 // rows of the largest wave
  int64_t hidden_stride_, inter_stride_;  // bytes from row to row of a wave's rows of H, I elements
  bool dropout_;
  std::vector<Worker> workers_;

  int64_t words(int64_t elements) const { return (elements + kernels_.group - 1) / kernels_.group; }
  int adapters() const { return int(call_.adapters.size()); }

  // Scratch: sizes are added up by take() before allocate(), the same calls hand out memory after it.
  void begin_allocation() { arena_used_ = 0; }
  template <class T>
  T* take(int64_t count) {
    const int64_t bytes = (count * int64_t(sizeof(T)) + 63) & ~int64_t(63);
    char* at = arena_ ? arena_ + arena_used_ : nullptr;
    arena_used_ += bytes;
    return reinterpret_cast<T*>(at);
  }
  void reserve() { arena_ = pool_.arena.reserve(size_t(arena_used_)); }
  void take_workers();
  LowRank take_low_rank(int64_t rank);

  void cut_waves(int64_t bytes_per_row);
  // Bytes from row to row: rows a power of two apart would share few sets of L1 (products read 6 of them at once).
  int64_t row_stride(int64_t elements) const { return ((words(elements) * 4 + 63) / 64 | 1) * 64; }
  // Bytes of an arranged row, for rows that meet the stored rows of a matrix; 0 where the level arranges none.
  int64_t arranged_row(int64_t elements, bool meets_rows) const {
    return meets_rows && kernels_.arrange_rows ? words(elements) * 4 : 0;
  }
  // Scratch for a wave's arranged rows, null if there are none.
  char* take_arranged(int64_t row) {
    char* const rows = take<char>(wave_rows_ * row);
    return row > 0 ? rows : nullptr;
  }
  // Columns [first, first + columns) of `count` rows of a wave from row `inside`, which is where a chunk begins; nothing if
  // `arranged` is null.
  void arrange(const char* rows, int64_t stride, int64_t inside, int count, int64_t first, int64_t columns, int64_t elements,
               char* arranged) const;
  // The chunk's rows of a tensor [T, H] in the compute dtype, as words.
  void gather(const Wave& wave, const Piece& chunk, const char* tensor, char* rows) const;

  template <class Function>
  void parallel(int64_t tasks, Function f) {
    pool_.run(call_.threads, tasks, [&](int64_t task, int worker) { f(task, workers_[size_t(worker)]); });
  }

  static bool few(const Piece& piece) { return piece.end - piece.begin <= kFewRows; }

  // A task may own up to kMaxBlocksPerTask adjacent blocks, fewer where threads would be without work. It takes them one by
  // one, or, if `wide`, all at once for a piece of few rows: longer runs of the same stored rows.
  int64_t blocks_per_task(int64_t all_blocks) const {
    return std::max<int64_t>(1, std::min(kMaxBlocksPerTask, all_blocks / (4 * call_.threads)));
  }
  static Step step_at(const Piece& piece, int64_t block, int64_t end, bool wide) {
    return {&piece, block, wide && few(piece) ? std::min(kMaxBlocksPerTask, end - block) : 1};
  }
  // Tasks of `per_task` adjacent blocks of a piece, handed out piece by piece: run(number of the piece, number of the task in
  // it, worker, walk), where walk(f) calls f(step, the thread's probable next step) for the task's steps.
  template <class Run>
  void parallel_pieces(const Wave& wave, int64_t count, int64_t per_task, bool wide, Run run) {
    const int64_t per_piece = (count + per_task - 1) / per_task, tasks = per_piece * int64_t(wave.pieces.size());
    const auto end_of = [&](int64_t task) { return std::min(count, (task % per_piece + 1) * per_task); };
    const auto first = [&](int64_t task) {
      if (task >= tasks) return Step{};
      return step_at(wave.pieces[size_t(task / per_piece)], task % per_piece * per_task, end_of(task), wide);
    };
    parallel(tasks, [&](int64_t task, Worker& worker) {
      run(task / per_piece, task % per_piece, worker, [&](auto f) {
        const int64_t end = end_of(task);
        Step step = first(task);
        for (bool last = false; !last;) {
          const int64_t block = step.block + step.count;
          last = block >= end;
          const Step next = last ? first(task + call_.threads) : step_at(*step.piece, block, end, wide);
          f(step, next);
          step = next;
        }
      });
    });
  }
  // f(step, next step, worker) for all blocks of the wave's pieces, independent of each other.
  template <class Function>
  void parallel_steps(const Wave& wave, int64_t columns, bool wide, Function f) {
    const int64_t count = blocks(columns);
    wide = wide && std::all_of(wave.pieces.begin(), wave.pieces.end(), few);
    const int64_t per_task = wide ? std::min(count, blocks_per_task(count * int64_t(wave.pieces.size()))) : 1;
    parallel_pieces(wave, count, per_task, wide, [&](int64_t, int64_t, Worker& worker, auto walk) {
      walk([&](Step step, Step next) { f(step, next, worker); });
    });
  }
  // The same for sums over a token's experts, which have a fixed order and need neither atomics on data nor a buffer per route:
  // f calls its last argument before it first adds to the sum, to wait until the piece before has been added to the same
  // blocks. Products need not wait.
  template <class Function>
  void parallel_ordered(const Wave& wave, int64_t columns, bool wide, Function f) {
    const int64_t count = blocks(columns), per_task = blocks_per_task(count);
    std::vector<std::atomic<int64_t>> added(static_cast<size_t>((count + per_task - 1) / per_task));  // pieces
    std::atomic<bool> failed{false};
    parallel_pieces(wave, count, per_task, wide, [&](int64_t piece, int64_t task, Worker& worker, auto walk) {
      std::atomic<int64_t>& mine = added[size_t(task)];
      const auto wait = [&] {
        for (int spins = 0; mine.load(std::memory_order_acquire) != piece && !failed.load(); ++spins) {
          if (spins < 1000) __builtin_ia32_pause();
          else std::this_thread::yield();
        }
      };
      try {
        walk([&](Step step, Step next) { f(step, next, worker, wait); });
      } catch (...) {
        failed.store(true);
        throw;
      }
      mine.store(piece + 1, std::memory_order_release);
    });
  }

  const Matrices& matrices(Projection p) const { return p == kGate ? call_.gate : p == kUp ? call_.up : call_.down; }
  Block base_block(Direction direction, Projection p, Step step) const;
  // factor: 0 .. 5 as in Adapter::factors.
  Block lora_block(Direction direction, int adapter, int factor, int64_t expert, int64_t block, int64_t count = 1) const;
  Chunk chunk(const Wave& wave, const Piece& piece, int64_t row) const;
  Base base(Direction direction, std::initializer_list<Projection> projections, Step step, bool by_part = false) const;

  int64_t part_length() const { return kPartWords * kernels_.group; }
  int64_t parts(const Block& block) const { return (block.length + part_length() - 1) / part_length(); }
  PanelSource source(const Block& block, int64_t part) const;
  int64_t products(const Base& base) const { return base.count * (base.few ? 1 : parts(base.blocks[0])); }
  int64_t factor_rows(int adapter, int factor) const;
  int64_t factor_cols(int adapter, int factor) const;
  const char* factor_address(int adapter, int factor, int64_t expert) const;
  // What goes on beside the product of `base` at `index`: its next panels, or those of `after`, the step after it.
  Ahead ahead_of(const Base& base, int64_t index, const Base& after) const;
  // Whether the level reads such a block where it lies however many rows it meets.
  bool reads_in_place(const Block& block) const { return block.is_rows && !kernels_.multiply_phased; }
  // c += the term's product over elements [begin, begin + length), weights read where they lie.
  void add_in_place(Worker& worker, const Term& term, const Chunk& chunk, int64_t begin, int64_t length, float* c,
                    const Ahead& ahead) const;
  // c += one part of the term's product, from a panel.
  void add_panel(const Term& term, const Chunk& chunk, int64_t part, const char* panel, float* c, const Ahead& ahead) const;
  // c += one product of a base: few rows the whole of it in place, others one part, in place or from a panel. The panel may
  // have been decoded beside the product before; ahead.next is decoded beside this one.
  void add_base(Worker& worker, const Term& term, const Chunk& chunk, int64_t part, float* c, Ahead ahead) const;
  void add_lora(Worker& worker, const Term& term, const Chunk& chunk, float* c) const;
  // c = the sum of the terms: those of `base`, then LoRA's. `areas` are read ahead beside the last product of `base`.
  void multiply(Worker& worker, const Term* terms, int count, const Base& base, const Base& after, const Chunk& chunk, float* c,
                std::initializer_list<Ahead::Area> areas = {}) const;
  void clear(const Chunk& chunk, int columns, float* c) const;
  // Of one expert, from column `first` on; null if the projection has none.
  const float* bias(Projection p, int64_t expert, int64_t first = 0) const {
    const float* const biases = call_.biases[p];
    return biases ? biases + expert * (p == kDown ? call_.hidden : call_.intermediate) + first : nullptr;
  }

  Dropout dropout_for(int adapter, int site) const;
  // low.values = low.words = round(scale * rows x factor). The rows are those of `chunk`.
  void low_rank(Worker& worker, const Wave& wave, const Piece& chunk, Rows rows, Direction direction, int adapter, int factor,
                int dropout_site, const LowRank& low) const;

  // Phases that backward runs again.
  void inputs(const Wave& wave, char* x, char* arranged, const std::vector<LowRank>& gate, const std::vector<LowRank>& up);
  void gate_up(const Wave& wave, Rows x, const std::vector<LowRank>& gate, const std::vector<LowRank>& up, char* saved, char* h,
               char* h_arranged);
  Rows low_rank_rows(const LowRank& low, int adapter) const;

 private:
  char* arena_ = nullptr;
  int64_t arena_used_ = 0;
};

}  // namespace ktft
