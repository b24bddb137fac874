// What forward.cpp and backward.cpp share: the routes of a call cut into waves, scratch, and products of activations with one
// expert's matrices.
#pragma once
#include <memory>
#include <mutex>

#include "moe.h"
#include "pool.h"
#include "route.h"

namespace ktft {

inline int64_t size_of(Format format) { return format == kBf16 ? 2 : 4; }
inline int64_t blocks(int64_t columns) { return (columns + kBlock - 1) / kBlock; }
inline int block_columns(int64_t columns, int64_t block) { return int(std::min<int64_t>(kBlock, columns - block * kBlock)); }

// Rows of words.
struct Rows {
  const char* words = nullptr;
  int64_t stride = 0;              // bytes
  const int32_t* index = nullptr;  // or null: consecutive
};

struct Piece {  // rows of one expert and one set of adapters: sorted positions [begin, end)
  int64_t expert, begin, end;
  int first_adapter, last_adapter;  // adapters [first, last) apply to these rows

  int adapters() const { return last_adapter - first_adapter; }
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

enum Projection { kGate = 0, kUp = 1, kDown = 2 };
enum Direction { kForward, kBackward };  // y = x Wᵀ, or dx = dy W

// A block of up to 64 output columns of one matrix, ready for a product.
struct Operand {
  const char* data = nullptr;
  int64_t stride = 0;  // nt only
  int64_t words = 0;   // length of the reduction
  bool nt = false;
  bool direct = false;          // data is the weights' own memory
  const char* ahead = nullptr;  // see Segment
  int64_t ahead_bytes = 0;
};

class Layer {
 public:
  explicit Layer(const LayerCall& call);

 protected:
  struct Worker {    // scratch of one thread
    float* c[2];     // C tiles [kChunk][kBlock]
    char* operands;  // bump-allocated blocks
    int64_t used;
    char* masked;       // [kChunk] rows of words: activations after dropout
    float* masked_row;  // one such row as floats
    float* outer;       // [256][kBlock]
  };

  struct Term {
    Rows rows;
    int64_t first;  // row of `rows` (or of its index) that goes with row 0 of C
    Operand operand;
  };

  const LayerCall& call_;
  const Kernels& kernels_;
  Pool& pool_;
  std::lock_guard<std::mutex> lock_;
  Routes routes_;
  std::vector<Wave> waves_;
  int64_t wave_rows_ = 0;                 // rows of the largest wave
  int64_t hidden_stride_, inter_stride_;  // bytes of a row of words of H, I elements
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
  // Rows of words of a tensor [T, H] in the compute dtype: the tensor itself where that is the same, else converted into
  // `copy`.
  bool is_words(int64_t elements) const;
  Rows tensor_rows(const char* tensor, char* copy);

  template <class Function>
  void parallel(int64_t tasks, Function f) {
    pool_.run(call_.threads, tasks, [&](int64_t task, int worker) {
      workers_[size_t(worker)].used = 0;
      f(task, workers_[size_t(worker)]);
    });
  }

  const Matrices& matrices(Projection p) const { return p == kGate ? call_.gate : p == kUp ? call_.up : call_.down; }
  Operand prepare(Worker& worker, Direction direction, const char* matrix, int64_t row_stride, Format format, bool transposed,
                  int64_t reduction, int64_t column, int columns) const;
  Operand base_operand(Worker& worker, Direction direction, Projection p, int64_t expert, int64_t block) const;
  // factor: 0 .. 5 as in Adapter::factors.
  Operand lora_operand(Worker& worker, Direction direction, int adapter, int factor, int64_t expert, int64_t block) const;
  // Let a direct operand read ahead the block that this thread will probably want next: `block` of `expert`.
  void read_ahead(Operand& operand, Direction direction, Projection p, int64_t expert, int64_t block) const;
  int64_t factor_rows(int adapter, int factor) const;
  int64_t factor_cols(int adapter, int factor) const;
  const char* factor_address(int adapter, int factor, int64_t expert) const;
  void multiply(const Term* terms, int count, int rows, int columns, float* c) const;

  Dropout dropout_for(int adapter, int site) const;
  // low.values = low.words = round(scale * rows x factor). The rows are those of `chunk`.
  void low_rank(Worker& worker, const Wave& wave, const Piece& chunk, Rows rows, bool rows_by_token, Direction direction,
                int adapter, int factor, int dropout_site, const LowRank& low) const;

  // Phases that backward runs again when nothing was saved.
  void low_rank_inputs(const Wave& wave, Rows x, const std::vector<LowRank>& gate, const std::vector<LowRank>& up);
  void gate_up(const Wave& wave, Rows x, const std::vector<LowRank>& gate, const std::vector<LowRank>& up, char* saved,
               char* h);
  Rows low_rank_rows(const LowRank& low, int adapter) const;

 private:
  char* arena_ = nullptr;
  int64_t arena_used_ = 0;
};

}  // namespace ktft
