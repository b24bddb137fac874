#include "route.h"

#include <limits>
#include <stdexcept>
#include <string>

namespace ktft {

Routes group_routes(const int64_t* top_k_index, const float* top_k_weights, int64_t tokens, int64_t top_k, int64_t experts,
                    const int64_t* adapter_ids, int64_t adapters) {
  if (tokens > std::numeric_limits<int32_t>::max()) throw std::invalid_argument("more than 2^31 - 1 tokens in one call");
  const int64_t all = tokens * top_k, per_expert = adapter_ids ? adapters + 1 : 1, groups = experts * per_expert;
  const auto group_of = [&](int64_t expert, int64_t route) {
    const int64_t adapter = adapter_ids ? adapter_ids[route / top_k] : -1;
    if (adapter < -1 || adapter >= adapters) {
      throw std::invalid_argument("adapter_ids[" + std::to_string(route / top_k) + "] is " + std::to_string(adapter) +
                                  "; expected -1 to " + std::to_string(adapters - 1));
    }
    return size_t(expert * per_expert + adapter + 1);
  };
  Routes routes;
  routes.offset.assign(size_t(groups) + 1, 0);
  for (int64_t i = 0; i < all; ++i) {
    const int64_t expert = top_k_index[i];
    if (expert < 0) {
      throw std::invalid_argument("top_k_index[" + std::to_string(i / top_k) + ", " + std::to_string(i % top_k) + "] is " +
                                  std::to_string(expert) + "; expert ids must not be negative");
    }
    if (expert < experts) ++routes.offset[group_of(expert, i) + 1];
  }
  for (size_t g = 0; g < size_t(groups); ++g) routes.offset[g + 1] += routes.offset[g];

  const size_t valid = size_t(routes.offset.back());
  routes.route.resize(valid);
  routes.token.resize(valid);
  routes.weight.resize(valid);
  std::vector<int64_t> next(routes.offset.begin(), routes.offset.end() - 1);
  for (int64_t i = 0; i < all; ++i) {
    const int64_t expert = top_k_index[i];
    if (expert >= experts) continue;
    const size_t group = expert < 0 ? 0 : group_of(expert, i);
    if (expert < 0 || next[group] >= routes.offset[group + 1])
      throw std::invalid_argument("top_k_index or adapter_ids changed while they were read");
    const size_t at = size_t(next[group]++);
    routes.route[at] = i;
    routes.token[at] = int32_t(i / top_k);
    routes.weight[at] = top_k_weights[i];
  }
  return routes;
}

}  // namespace ktft
