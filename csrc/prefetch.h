// Bringing routed experts into the page cache before they are needed.
#pragma once
#include "moe.h"
#include "route.h"

namespace ktft {

// Ask the kernel to read ahead the matrices of every expert with routes whose first or last page is not resident. Returns at
// once; costs two short system calls per matrix of an expert that is resident already. Where mincore does not tell (files of
// another user, see ktft/mapping.py) experts with at least kRowsToReadAhead rows are asked for without looking, which costs 44
// us per 3 MiB matrix that is resident (measured 2026-11-30): too much for a single row, little beside the products of eight.
// Without it a cold expert is read by page faults, 128 KiB at a time and one after the other, which is what a checkpoint larger
// than RAM would live on. Measured (32 cold experts of 2048 x 768, virtual disk, page cache dropped, 2026-11-30): 237 ms for
// the layer, without it 333 to 723 ms.
void prefetch_experts(const LayerCall& call, const Routes& routes);

}  // namespace ktft
