#include "table.h"

#include "vec_scalar.h"

#include "tiles_soft.h"

#include "unit.inl"

#include "tiles.inl"

namespace ktft {
extern const Kernels kAmxSoftKernels = make_kernels<ModeOf<kBf16, Bf16Dot>, TileProducts<ModeOf<kBf16, Bf16Dot>>>();
}
