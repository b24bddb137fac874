#include "prefetch.h"

#include <sys/mman.h>
#include <unistd.h>

namespace ktft {

void prefetch_experts(const LayerCall& call, const Routes& routes) {
  static const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  const Matrices* const projections[3] = {&call.gate, &call.up, &call.down};
  for (int64_t e = 0; e < call.experts; ++e) {
    if (routes.offset[size_t(e)] == routes.offset[size_t(e) + 1]) continue;
    for (const Matrices* m : projections) {
      const bool hidden_rows = (m == &call.down) != m->transposed;
      const uintptr_t begin = uintptr_t(m->addresses[e]) & ~(page - 1);
      const uintptr_t end = uintptr_t(m->addresses[e] + (hidden_rows ? call.hidden : call.intermediate) * m->row_stride);
      unsigned char resident = 1;
      if (mincore(reinterpret_cast<void*>(begin), page, &resident) == 0 && !(resident & 1))
        madvise(reinterpret_cast<void*>(begin), end - begin, MADV_WILLNEED);
    }
  }
}

}  // namespace ktft
