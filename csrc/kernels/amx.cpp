#include "table.h"

#include "vec_avx512.h"

#include "tiles_amx.h"

#include "unit.inl"

#include "tiles.inl"

namespace ktft {
extern const Kernels kAmxKernels = make_kernels<ModeOf<kBf16, Bf16Dot>, TileProducts<ModeOf<kBf16, Bf16Dot>>>();
}
