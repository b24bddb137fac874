#include "cpu.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <stdexcept>

namespace ktft {

namespace {

constexpr CpuLeaf kBasic{1, 0}, kExtended{7, 0}, kExtended1{7, 1}, kTiles{0x1d, 0}, kPalette1{0x1d, 1};
enum Register { kEax, kEbx, kEcx, kEdx };
constexpr unsigned kOsXsave = 27;  // of leaf 1, ECX: XGETBV exists and XCR0 says what is saved

unsigned bit(uint64_t value, unsigned n) { return value >> n & 1; }

CpuRegisters registers(const CpuLeaves& leaves, CpuLeaf leaf) {
  const auto found = leaves.find(leaf);
  return found == leaves.end() ? CpuRegisters{} : found->second;
}

// Of palette 1: 8 tiles of 1024 bytes, 16 rows of 64 bytes.
bool has_usual_palette(const CpuLeaves& leaves) {
  if (registers(leaves, kTiles)[kEax] < 1) return false;  // the highest palette
  const auto [a, b, c, d] = registers(leaves, kPalette1);
  const unsigned total_bytes = a & 0xffff, tile_bytes = a >> 16, row_bytes = b & 0xffff, tiles = b >> 16, rows = c & 0xffff;
  return total_bytes == 8192 && tile_bytes == 1024 && row_bytes == 64 && tiles == 8 && rows == 16;
}

// What CPUID answers; leaves above the highest are left out.
CpuLeaves read_leaves() {
  CpuLeaves leaves;
  for (const CpuLeaf& leaf : {kBasic, kExtended, kExtended1, kTiles, kPalette1}) {
    CpuRegisters r;
    if (__get_cpuid_count(leaf.first, leaf.second, &r[kEax], &r[kEbx], &r[kEcx], &r[kEdx])) leaves[leaf] = r;
  }
  return leaves;
}

uint64_t read_xcr0(const CpuLeaves& leaves) {
  if (!bit(registers(leaves, kBasic)[kEcx], kOsXsave)) return 0;
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

// Holds for all threads of the process, and for children until they exec. Asking again changes nothing.
bool ask_for_tile_registers() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

CpuFeatures features_of(const CpuLeaves& leaves, uint64_t xcr0, const std::function<bool()>& ask_for_tiles) {
  CpuFeatures f;
  const CpuRegisters basic = registers(leaves, kBasic), extended = registers(leaves, kExtended);
  f.fma = bit(basic[kEcx], 12);
  f.f16c = bit(basic[kEcx], 29);
  if (bit(basic[kEcx], kOsXsave)) {
    f.os_ymm = (xcr0 & 0x6) == 0x6;    // SSE and AVX state
    f.os_zmm = (xcr0 & 0xe6) == 0xe6;  // and opmask, upper ZMM, ZMM16-31
    f.os_amx = (xcr0 >> 17 & 3) == 3;  // tile configuration and data
  }
  f.avx2 = bit(extended[kEbx], 5);
  f.avx512f = bit(extended[kEbx], 16);
  f.avx512dq = bit(extended[kEbx], 17);
  f.avx512bw = bit(extended[kEbx], 30);
  f.avx512vl = bit(extended[kEbx], 31);
  f.amx_bf16 = bit(extended[kEdx], 22);
  f.amx_tile = bit(extended[kEdx], 24);
  if (extended[kEax] >= 1) f.avx512_bf16 = bit(registers(leaves, kExtended1)[kEax], 5);  // EAX: the last subleaf
  f.amx_palette = f.amx_tile && has_usual_palette(leaves);
  if (f.amx_tile && f.amx_bf16 && f.os_amx && f.amx_palette) f.amx_permission = ask_for_tiles();
  return f;
}

CpuFeatures detect_cpu(bool ask_for_tiles) {
  const CpuLeaves leaves = read_leaves();
  return features_of(leaves, read_xcr0(leaves), [=] { return ask_for_tiles && ask_for_tile_registers(); });
}

const char* isa_name(Isa isa) {
  static const char* const names[kIsaCount] = {"scalar", "avx2", "avx512bf16", "amx", "amx-soft"};
  return names[int(isa)];
}

std::string missing_for(Isa isa, const CpuFeatures& f) {
  std::string missing;
  const auto need = [&](bool has, const char* name) {
    if (!has) missing += missing.empty() ? name : std::string(" ") + name;
  };
  if (isa == Isa::amx_soft) return missing;
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
  if (isa >= Isa::amx) {
    need(f.amx_tile, "amx_tile");
    need(f.amx_bf16, "amx_bf16");
    need(f.os_amx || !f.amx_tile, "os_amx");
    need(f.amx_palette || !f.amx_tile, "amx_palette");
    if (missing.empty()) need(f.amx_permission, "amx_permission");
  }
  return missing;
}

const Kernels& kernels_for(Isa isa, Format compute) {
  static const Kernels* const tables[kIsaCount][2] = {{&kScalarKernels[0], &kScalarKernels[1]},
                                                      {&kAvx2Kernels[0], &kAvx2Kernels[1]},
                                                      {&kAvx512Bf16Kernels[0], &kAvx512Bf16Kernels[1]},
                                                      {&kAmxKernels, &kAvx512Bf16Kernels[1]},
                                                      {&kAmxSoftKernels, &kScalarKernels[1]}};
  if (int(isa) < 0 || int(isa) >= kIsaCount) throw std::invalid_argument("unknown ISA level");
  static const CpuFeatures without_tiles = detect_cpu(false);
  const auto with_tiles = [] {
    static const CpuFeatures features = detect_cpu(true);
    return features;
  };
  const std::string missing = missing_for(isa, isa == Isa::amx ? with_tiles() : without_tiles);
  if (!missing.empty()) throw std::invalid_argument(std::string("ISA level ") + isa_name(isa) + " needs " + missing);
  return *tables[int(isa)][compute == kFp32];
}

}  // namespace ktft
