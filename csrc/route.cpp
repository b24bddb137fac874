#include "route.h"

#include <stdexcept>
#include <string>

namespace ktft {

Routes group_routes(const int64_t* top_k_index, const float* top_k_weights, int64_t tokens, int64_t top_k, int64_t experts) {
  const int64_t all = tokens * top_k;
  Routes routes;
  routes.offset.assign(size_t(experts) + 1, 0);
  for (int64_t i = 0; i < all; ++i) {
    const int64_t expert = top_k_index[i];
    if (expert < 0) {
      throw std::invalid_argument("top_k_index[" + std::to_string(i / top_k) + ", " + std::to_string(i % top_k) + "] is " +
                                  std::to_string(expert) + "; expert ids must not be negative");
    }
    if (expert < experts) ++routes.offset[size_t(expert) + 1];
  }
  for (int64_t e = 0; e < experts; ++e) routes.offset[size_t(e) + 1] += routes.offset[size_t(e)];

  const size_t valid = size_t(routes.offset.back());
  routes.route.resize(valid);
  routes.token.resize(valid);
  routes.weight.resize(valid);
  std::vector<int64_t> next(routes.offset.begin(), routes.offset.end() - 1);
  for (int64_t i = 0; i < all; ++i) {
    const int64_t expert = top_k_index[i];
    if (expert >= experts) continue;
    const size_t at = size_t(next[size_t(expert)]++);
    routes.route[at] = i;
    routes.token[at] = int32_t(i / top_k);
    routes.weight[at] = top_k_weights[i];
  }
  return routes;
}

}  // namespace ktft
