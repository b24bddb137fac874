// Tokens grouped by expert.
#pragma once
#include <stdint.h>

#include <vector>

namespace ktft {

// Routes (t, j) with a valid expert, stably sorted by group: within a group by token, then slot. A group is an expert or, where
// each token has an adapter of its own, an expert and an adapter: group = expert * (adapters + 1) + adapter + 1. So no product
// ever mixes rows of two adapters. All vectors but the last are indexed by sorted position.
struct Routes {
  std::vector<int64_t> route;   // t * k + j
  std::vector<int32_t> token;   // t
  std::vector<float> weight;    // top_k_weights[t, j]
  std::vector<int64_t> offset;  // [groups + 1]: group g owns positions offset[g] .. offset[g + 1)
};

// top_k_index, top_k_weights: [tokens, top_k]; adapter_ids: [tokens] in [-1, adapters), or null: one group per expert.
// Ids >= experts are left out. Throws std::invalid_argument on an
// id below or an adapter outside its range, or if the ids change while they are read.
Routes group_routes(const int64_t* top_k_index, const float* top_k_weights, int64_t tokens, int64_t top_k, int64_t experts,
                    const int64_t* adapter_ids, int64_t adapters);

}  // namespace ktft
