#include "table.h"

#include "vec_avx2.h"

#include "unit.inl"

namespace ktft {
extern const Kernels kAvx2Kernels[2] = {make_kernels<ModeOf<kBf16, Fp32Dot>>(), make_kernels<ModeOf<kFp32, Fp32Dot>>()};
}
