// One layer of routed experts with a gated activation and LoRA, forward and backward, on raw pointers. Knows no ISA, no torch,
// no Python.
//
//   gate = x Wgᵀ + s (drop0(x) Agᵀ) Bgᵀ + bg     up likewise     h = the activation of gate and up (table.h)
//   y    = h Wdᵀ + s (drop1(h) Adᵀ) Bdᵀ + bd     out[t] = sum over the token's routes, by ascending expert, of weight * y
//
// Biases are added in fp32 after all products; what is rounded, and kept for backward, holds them.
//
// Routes are grouped by expert and processed in waves of rows, so that scratch depends on the number of threads and on T * H,
// never on T * k * I. Within a wave each phase is a list of tasks: chunks of rows, or blocks of 64
// output columns of one expert. They are independent, but for sums over a token's experts, which are added in their order.
#pragma once
#include <stdint.h>

#include <vector>

#include "cpu.h"

namespace ktft {

// One matrix per expert: y = x Wᵀ with W [rows, cols] stored row-major, or Wᵀ [cols, rows] stored row-major if transposed.
struct Matrices {
  const int64_t* addresses;  // [E]
  int64_t row_stride;        // bytes between stored rows, or between groups of them, see Packing
  Format format;
  bool transposed;
  const int64_t* scale_addresses;  // [E], null for formats without
  Scales scales;                   // of every expert, but for the address and the factor
  const float* factors;            // [E] or null
  const int64_t* zero_addresses;   // [E], null for formats without
  ZeroPoints zeros;                // of every expert, but for the address

  Stored of(int64_t expert) const {
    Stored stored{reinterpret_cast<const char*>(addresses[expert]), row_stride, format, scales, zeros};
    if (scale_addresses) stored.scales.data = reinterpret_cast<const char*>(scale_addresses[expert]);
    if (zero_addresses) stored.zeros.data = reinterpret_cast<const char*>(zero_addresses[expert]);
    if (factors) stored.scales.factor = factors[expert];
    return stored;
  }
};

constexpr int kMaxAdapters = 64;

struct Adapter {
  // gate_a [E,r,H], gate_b [E,I,r], up_a, up_b, down_a [E,r,I], down_b [E,H,r], contiguous
  const char* factors[6];
  Format format;
  int64_t rank;
  float scaling;
};

struct LayerCall {
  int64_t tokens, top_k, experts, hidden, intermediate;
  const char* x;               // [T, H] in the compute dtype
  const int64_t* top_k_index;  // [T, k]
  const float* top_k_weights;  // [T, k]
  Matrices gate, up, down;
  const float* biases[3];  // of gate [E, I], up [E, I] and down [E, H]; null: none
  Activation activation;
  std::vector<Adapter> adapters;
  const int64_t* adapter_ids;  // [T] or null: all adapters on all tokens
  double dropout_p;
  uint64_t dropout_seed;
  Format compute;
  Isa isa;
  int threads;
  bool residency_known;  // whether mincore can be believed about the weights, see prefetch.h
};

// out [T, H] in the compute dtype. saved [T * k, 2, I] in the compute dtype or null: gate and up pre-activations of the routes
// sorted by expert; rows of invalid ids are zeroed.
void forward(const LayerCall& call, char* out, char* saved);

struct Gradients {              // null members are not computed
  char* x;                      // [T, H] in the compute dtype
  float* top_k_weights;         // [T, k]
  std::vector<float*> factors;  // 6 per adapter, shaped like the factors; null: not computed
};

// grad_out [T, H] in the compute dtype; saved as forward wrote it, or null to recompute.
void backward(const LayerCall& call, const char* grad_out, const char* saved, const Gradients& gradients);

}  // namespace ktft
