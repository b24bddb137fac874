#include "prefetch.h"

#include <sys/mman.h>
#include <unistd.h>

namespace ktft {

namespace {

constexpr int64_t kRowsToReadAhead = 8;

const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));

bool is_resident(uintptr_t address) {
  unsigned char resident = 1;
  return mincore(reinterpret_cast<void*>(address), page, &resident) != 0 || (resident & 1);
}

}  // namespace

void prefetch_experts(const LayerCall& call, const Routes& routes) {
  const Matrices* const projections[3] = {&call.gate, &call.up, &call.down};
  const size_t per_expert = (routes.offset.size() - 1) / size_t(call.experts);
  for (int64_t e = 0; e < call.experts; ++e) {
    const int64_t rows = routes.offset[size_t(e + 1) * per_expert] - routes.offset[size_t(e) * per_expert];
    if (rows == 0 || (!call.residency_known && rows < kRowsToReadAhead)) continue;
    for (const Matrices* m : projections) {
      const bool hidden_rows = (m == &call.down) != m->transposed;
      const uintptr_t begin = uintptr_t(m->addresses[e]) & ~(page - 1);
      const int64_t lines = (hidden_rows ? call.hidden : call.intermediate) / packing_of(m->format).rows;
      const uintptr_t end = uintptr_t(m->addresses[e] + lines * m->row_stride);
      if (!call.residency_known || !is_resident(begin) || !is_resident((end - 1) & ~(page - 1)))
        madvise(reinterpret_cast<void*>(begin), end - begin, MADV_WILLNEED);
    }
  }
}

}  // namespace ktft
