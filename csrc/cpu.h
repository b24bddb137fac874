// Which CPU features this process may use, and which kernels follow from them.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "kernels/table.h"

namespace ktft {

// Lowest first. amx_soft is no level of its own but amx with a twin of the tile instructions, for tests.
enum class Isa : int { scalar = 0, avx2 = 1, avx512bf16 = 2, amx = 3, amx_soft = 4 };
constexpr int kIsaCount = 5;

// CPUID feature bits, and what the operating system saves (XCR0) and permits. Plain data, so that tests can make up a machine.
struct CpuFeatures {
  bool avx2 = false, fma = false, f16c = false;
  bool avx512f = false, avx512bw = false, avx512dq = false, avx512vl = false, avx512_bf16 = false;
  bool os_ymm = false, os_zmm = false;
  bool amx_tile = false, amx_bf16 = false;
  bool os_amx = false;          // tile registers are saved
  bool amx_palette = false;     // palette 1 is eight tiles of 16 rows of 64 bytes
  bool amx_permission = false;  // Linux lets this process use tile registers
};

using CpuLeaf = std::pair<uint32_t, uint32_t>;      // CPUID's EAX and ECX
using CpuRegisters = std::array<uint32_t, 4>;       // its answer: EAX, EBX, ECX, EDX
using CpuLeaves = std::map<CpuLeaf, CpuRegisters>;  // leaves that are not there answer zeros

// What follows from CPUID's leaves, XCR0 (ignored where CPUID does not say that there is one) and the answer to the request for
// tile registers, which is made only where nothing else stands against them. Reads nothing of this machine.
CpuFeatures features_of(const CpuLeaves& leaves, uint64_t xcr0, const std::function<bool()>& ask_for_tiles);

// Those of this machine. Linux gives tile registers to processes that ask. That enlarges signal frames, so who has no use for
// them should not ask; without ask_for_tiles, or on a machine without AMX, amx_permission stays false.
CpuFeatures detect_cpu(bool ask_for_tiles);
const char* isa_name(Isa isa);
// Empty if `isa` may run with these features, else what is missing, e.g. "avx512_bf16". What can only be known, or asked for,
// where something else is there is not listed beside it.
std::string missing_for(Isa isa, const CpuFeatures& features);
// The kernels of a level this machine can run. Throws std::invalid_argument otherwise.
const Kernels& kernels_for(Isa isa, Format compute);

}  // namespace ktft
