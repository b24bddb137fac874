// Tokens grouped by expert.
#pragma once
#include <stdint.h>

#include <vector>

namespace ktft {

// Routes (t, j) with a valid expert, stably sorted by expert: within an expert by token, then slot. All vectors but the last are
// indexed by sorted position.
struct Routes {
  std::vector<int64_t> route;   // t * k + j
  std::vector<int32_t> token;   // t
  std::vector<float> weight;    // top_k_weights[t, j]
  std::vector<int64_t> offset;  // [E + 1]: expert e owns positions offset[e] .. offset[e + 1)
};

// top_k_index, top_k_weights: [tokens, top_k]. Ids >= experts are left out. Throws std::invalid_argument on a negative id.
Routes group_routes(const int64_t* top_k_index, const float* top_k_weights, int64_t tokens, int64_t top_k, int64_t experts);

}  // namespace ktft
