#include "table.h"

#include "vec_avx512.h"

#include "unit.inl"

#include "coded.inl"

namespace ktft {
extern const Kernels kAvx512Bf16Kernels[2] = {make_kernels<ModeOf<kBf16, Bf16Dot>, CodedProducts<ModeOf<kBf16, Bf16Dot>>>(),
                                              make_kernels<ModeOf<kFp32, Fp32Dot>>()};
}
