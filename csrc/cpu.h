// Which CPU features this process may use, and which kernels follow from them.
#pragma once
#include <string>

#include "kernels/table.h"

namespace ktft {

enum class Isa : int { scalar = 0, avx2 = 1, avx512bf16 = 2 };
constexpr int kIsaCount = 3;

// CPUID feature bits, and what the operating system saves (XCR0). Plain data, so that tests can make up a machine.
struct CpuFeatures {
  bool avx2 = false, fma = false, f16c = false;
  bool avx512f = false, avx512bw = false, avx512dq = false, avx512vl = false, avx512_bf16 = false;
  bool os_ymm = false, os_zmm = false;
};

CpuFeatures detect_cpu();
const char* isa_name(Isa isa);
// Empty if `isa` may run with these features, else what is missing, e.g. "avx512_bf16".
std::string missing_for(Isa isa, const CpuFeatures& features);
Isa best_isa(const CpuFeatures& features);
// The kernels of a level this machine can run. Throws std::invalid_argument otherwise.
const Kernels& kernels_for(Isa isa, Format compute);

}  // namespace ktft
