#include "cpu.h"

#include <cpuid.h>

#include <stdexcept>

namespace ktft {

CpuFeatures detect_cpu() {
  CpuFeatures f;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return f;
  f.fma = c >> 12 & 1;
  f.f16c = c >> 29 & 1;
  if (c >> 27 & 1) {  // OSXSAVE: XGETBV exists
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    f.os_ymm = (low & 0x6) == 0x6;    // SSE and AVX state
    f.os_zmm = (low & 0xe6) == 0xe6;  // and opmask, upper ZMM, ZMM16-31
  }
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
    const unsigned subleaves = a;
    f.avx2 = b >> 5 & 1;
    f.avx512f = b >> 16 & 1;
    f.avx512dq = b >> 17 & 1;
    f.avx512bw = b >> 30 & 1;
    f.avx512vl = b >> 31 & 1;
    if (subleaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) f.avx512_bf16 = a >> 5 & 1;
  }
  return f;
}

const char* isa_name(Isa isa) {
  static const char* const names[kIsaCount] = {"scalar", "avx2", "avx512bf16"};
  return names[int(isa)];
}

std::string missing_for(Isa isa, const CpuFeatures& f) {
  std::string missing;
  const auto need = [&](bool has, const char* name) {
    if (!has) missing += missing.empty() ? name : std::string(" ") + name;
  };
  if (isa >= Isa::avx2) {
    need(f.avx2, "avx2");
    need(f.fma, "fma");
    need(f.f16c, "f16c");
    need(f.os_ymm, "os_ymm");
  }
  if (isa >= Isa::avx512bf16) {
    need(f.avx512f, "avx512f");
    need(f.avx512bw, "avx512bw");
    need(f.avx512dq, "avx512dq");
    need(f.avx512vl, "avx512vl");
    need(f.avx512_bf16, "avx512_bf16");
    need(f.os_zmm, "os_zmm");
  }
  return missing;
}

Isa best_isa(const CpuFeatures& features) {
  for (int level = kIsaCount - 1; level > 0; --level)
    if (missing_for(Isa(level), features).empty()) return Isa(level);
  return Isa::scalar;
}

const Kernels& kernels_for(Isa isa, Format compute) {
  static const CpuFeatures features = detect_cpu();
  static const Kernels* const tables[kIsaCount] = {kScalarKernels, kAvx2Kernels, kAvx512Bf16Kernels};
  if (int(isa) < 0 || int(isa) >= kIsaCount) throw std::invalid_argument("unknown ISA level");
  const std::string missing = missing_for(isa, features);
  if (!missing.empty()) throw std::invalid_argument(std::string("ISA level ") + isa_name(isa) + " needs " + missing);
  return tables[int(isa)][compute == kFp32];
}

}  // namespace ktft
