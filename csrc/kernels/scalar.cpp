#include "table.h"

#include "vec_scalar.h"

#include "unit.inl"

namespace ktft {
extern const Kernels kScalarKernels[2] = {make_kernels<ModeOf<kBf16, Fp32Dot>>(), make_kernels<ModeOf<kFp32, Fp32Dot>>()};
}
