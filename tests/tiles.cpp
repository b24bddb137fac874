// The twin of the AMX instructions under test, outside Python: tests/test_tiles.py compiles this with the kernels' objects.
//
//   tiles dot M N K        C [M][N] floats, A [M][K] words, B [K][N] words on stdin; C += A B on stdout
//   tiles misuse NAME      does what a CPU would answer with a fault
//   tiles products         every product of the amx unit against the amx_soft unit, bit for bit; prints "native" or "emulated"
//
// Where the CPU has no AMX, its instructions end in SIGILL, and a handler decodes them (opcodes and operands as in Intel's
// manual) and has the twin execute them: this checks the instructions that the amx unit consists of, not the CPU.
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "cpu.h"
#include "kernels/tiles_soft.h"

using namespace ktft;

namespace {

[[noreturn]] void fail(const char* what) {
  fprintf(stderr, "tiles: %s\n", what);
  _exit(2);
}

TileConfig config_of(int m, int n, int k) {
  TileConfig config;
  config.rows[0] = config.rows[1] = uint8_t(m);
  config.rows[2] = uint8_t(k);
  config.row_bytes[0] = config.row_bytes[2] = uint16_t(4 * n);
  config.row_bytes[1] = uint16_t(4 * k);
  return config;  // C 0, A 1, B 2
}

int dot(int m, int n, int k) {
  std::vector<char> c(size_t(4 * m * n)), a(size_t(4 * m * k)), b(size_t(4 * k * n));
  for (std::vector<char>* matrix : {&c, &a, &b})
    if (fread(matrix->data(), 1, matrix->size(), stdin) != matrix->size()) fail("stdin is too short");
  Tiles::configure(config_of(m, n, k));
  Tiles::load<0>(c.data(), 4 * n);
  Tiles::load<1>(a.data(), 4 * k);
  Tiles::load<2>(b.data(), 4 * n);
  Tiles::dot<0, 1, 2>();
  Tiles::store<0>(c.data(), 4 * n);
  Tiles::release();
  fwrite(c.data(), 1, c.size(), stdout);
  return 0;
}

int misuse(const std::string& name) {
  const auto configured = [](auto change) {
    TileConfig config = config_of(4, 5, 6);
    change(config);
    Tiles::configure(config);
    Tiles::dot<0, 1, 2>();
  };
  const std::map<std::string, void (*)(TileConfig&)> changes{
      {"nothing", [](TileConfig&) {}},
      {"palette", [](TileConfig& c) { c.palette = 2; }},
      {"start row", [](TileConfig& c) { c.start_row = 1; }},
      {"reserved bytes", [](TileConfig& c) { c.reserved[3] = 1; }},
      {"rows", [](TileConfig& c) { c.rows[5] = 17, c.row_bytes[5] = 64; }},
      {"bytes", [](TileConfig& c) { c.rows[5] = 16, c.row_bytes[5] = 65; }},
      {"rows without bytes", [](TileConfig& c) { c.rows[5] = 16; }},
      {"a ninth tile", [](TileConfig& c) { c.rows[8] = 1, c.row_bytes[8] = 4; }},
      {"rows of C and A", [](TileConfig& c) { c.rows[1] = 3; }},
      {"columns of C and B", [](TileConfig& c) { c.row_bytes[2] = 24; }},
      {"words of A and B", [](TileConfig& c) { c.row_bytes[1] = 20; }},
      {"half words", [](TileConfig& c) { c.row_bytes[0] = c.row_bytes[2] = 18; }},
      {"no shape", [](TileConfig& c) { c.rows[2] = 0, c.row_bytes[2] = 0; }},
  };
  char memory[1024] = {};
  if (name == "unconfigured") Tiles::zero<0>();
  else if (name == "released") Tiles::configure(config_of(4, 5, 6)), Tiles::release(), Tiles::load<0>(memory, 64);
  else if (changes.count(name)) configured(changes.at(name));
  else fail("unknown misuse");
  return 0;
}

// --- the instructions by way of SIGILL

long long& register_of(ucontext_t* context, int number) {
  static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return context->uc_mcontext.gregs[order[number]];
}

int executed[4];  // configurations, loads, stores, dots

void execute(int, siginfo_t*, void* raw) {
  ucontext_t* const context = static_cast<ucontext_t*>(raw);
  const unsigned char* code = reinterpret_cast<const unsigned char*>(context->uc_mcontext.gregs[REG_RIP]);
  // VEX.128, map 0F38, W0
  if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x84) != 0) fail("not an AMX instruction");
  const int r = code[1] & 0x80 ? 0 : 8, x = code[1] & 0x40 ? 0 : 8, b = code[1] & 0x20 ? 0 : 8;
  const int vvvv = ~(code[2] >> 3) & 15, prefix = code[2] & 3, opcode = code[3], modrm = code[4];  // prefix: none, 66, F3, F2
  const int mode = modrm >> 6, reg = (modrm >> 3 & 7) | r, rm = modrm & 7;
  code += 5;
  long long base = 0, stride = 0;
  if (mode != 3) {
    if (rm == 4) {
      const int sib = *code++, index = (sib >> 3 & 7) | x, base_register = sib & 7;
      stride = index == 4 ? 0 : register_of(context, index) << (sib >> 6);
      if (base_register == 5 && mode == 0) {
        int32_t displacement;
        memcpy(&displacement, code, 4);
        base = displacement;
        code += 4;
      } else {
        base = register_of(context, base_register | b);
      }
    } else if (rm == 5 && mode == 0) {
      fail("relative to RIP: not expected here");
    } else {
      base = register_of(context, rm | b);
    }
    if (mode == 1) base += static_cast<signed char>(*code++);
    if (mode == 2) {
      int32_t displacement;
      memcpy(&displacement, code, 4);
      base += displacement;
      code += 4;
    }
  }
  const bool no_vvvv = vvvv == 0;
  if (opcode == 0x49 && prefix == 0 && mode != 3 && reg == 0 && no_vvvv) {  // LDTILECFG
    TileConfig config;
    memcpy(static_cast<void*>(&config), reinterpret_cast<const void*>(base + stride), sizeof config);
    Tiles::configure(config);
    ++executed[0];
  } else if (opcode == 0x49 && prefix == 0 && modrm == 0xc0 && no_vvvv) {  // TILERELEASE
    Tiles::release();
  } else if (opcode == 0x49 && prefix == 3 && mode == 3 && rm == 0 && no_vvvv) {  // TILEZERO
    Tiles::zero(reg);
  } else if (opcode == 0x4b && prefix == 3 && mode != 3 && rm == 4 && no_vvvv) {  // TILELOADD
    Tiles::load(reg, reinterpret_cast<const void*>(base), stride);
    ++executed[1];
  } else if (opcode == 0x4b && prefix == 2 && mode != 3 && rm == 4 && no_vvvv) {  // TILESTORED
    Tiles::store(reg, reinterpret_cast<void*>(base), stride);
    ++executed[2];
  } else if (opcode == 0x5c && prefix == 2 && mode == 3) {  // TDPBF16PS: C in reg, A in r/m, B in vvvv
    Tiles::dot(reg, rm | b, vvvv);
    ++executed[3];
  } else {
    fail("an AMX instruction that is not expected here");
  }
  context->uc_mcontext.gregs[REG_RIP] = reinterpret_cast<long long>(code);
}

// --- products

constexpr int64_t kLength = 2 * kPartWords * 2 + 77;  // more than two parts, the last with an odd number of elements
constexpr int64_t kRowBytes = 2 * kLength + 6;

int products() {
  const bool native = detect_cpu(true).amx_permission;
  if (!native) {
    struct sigaction action{};
    action.sa_sigaction = execute;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGILL, &action, nullptr);
  }
  std::mt19937 random(1);
  const auto fill = [&](std::vector<char>& matrix) {  // bf16 of both signs from 2^-10 to 2^5
    for (size_t i = 0; i + 1 < matrix.size(); i += 2) {
      const uint16_t half = uint16_t((random() & 0x807f) | (117 + random() % 16) << 7);
      memcpy(&matrix[i], &half, 2);
    }
  };
  std::vector<char> a(size_t(kChunk * kRowBytes)), rows(size_t(kBlock * kRowBytes)),
      columns(size_t(kLength * 2 * kWideColumns));
  for (std::vector<char>* matrix : {&a, &rows, &columns}) fill(*matrix);
  for (int i = 0; i < kChunk; ++i) memset(&a[size_t(i * kRowBytes + 2 * kLength)], 0, 2);  // an odd last element has no partner
  for (int i = 0; i < kBlock; ++i) memset(&rows[size_t(i * kRowBytes + 2 * kLength)], 0, 2);

  const Kernels* const kernels[2] = {&kAmxKernels, &kAmxSoftKernels};
  for (const int64_t length : {kLength, int64_t(2 * kPartWords), int64_t(64), int64_t(32), int64_t(10), int64_t(1)}) {
    const int64_t words = (length + 1) / 2;
    std::vector<char> own_a = a, own_rows = rows;
    for (std::vector<char>* matrix : {&own_a, &own_rows})  // the end of a shorter odd length
      for (size_t i = 0; i + size_t(kRowBytes) <= matrix->size(); i += size_t(kRowBytes))
        memset(&(*matrix)[i + size_t(2 * length)], 0, 2);
    for (const int count : {1, 3, 16, 17, 33, 50, 192}) {
      for (const int cols : {1, 8, 16, 40, 64}) {
        std::vector<float> c[2];
        for (int unit = 0; unit < 2; ++unit) {
          const Kernels& k = *kernels[unit];
          const int64_t part = words < kPartWords ? words : kPartWords;
          std::vector<char> arranged(size_t(count * words * 4)), panel(size_t(part * kBlock * 4));
          k.arrange_rows(own_a.data(), kRowBytes, count, 0, words, words, arranged.data());
          const PanelSource source{
              {columns.data(), 2 * kWideColumns, kBf16}, false, length < 2 * part ? length : 2 * part, cols};
          k.decode_panel(source, panel.data());
          std::vector<char> beside(panel.size());
          Ahead ahead;  // the same panel, decoded beside products
          if (k.decodes_aside(source)) ahead.next = source;
          ahead.next_panel = beside.data();
          const auto check_panel = [&] {
            if (ahead.next.data && beside != panel) fail("a panel decoded beside a product differs");
            std::fill(beside.begin(), beside.end(), char(0));
          };
          const size_t tile = size_t(kChunk * kBlock);
          std::vector<float>& out = c[unit];
          out.assign(4 * tile + size_t(4 * kFewRows * kBlock), 0.25f);
          Operands x{own_a.data(), kRowBytes, own_rows.data(), kRowBytes, length, kBf16, {}};
          k.multiply_rows(x, count, cols, out.data(), {});
          x.arranged = {arranged.data(), words, 0};
          k.multiply_rows(x, count, cols, out.data() + tile, ahead);
          check_panel();
          if (words > 5) {  // from the middle of arranged rows
            x.arranged.first = 5;
            x.a += 4 * 5;
            x.length -= 2 * 5;
            k.multiply_rows(x, count, cols, out.data() + 2 * tile, {});
          }
          x = {own_a.data(), kRowBytes, panel.data(), 0, length < 2 * part ? length : 2 * part, kBf16, {}};
          k.multiply_panel(x, count, cols, out.data() + 3 * tile, ahead);
          check_panel();
          x = {own_a.data(), kRowBytes, columns.data(), 2 * kWideColumns, length, kBf16, {}};
          if (count <= kFewRows)
            k.multiply_columns(x, count, cols == kBlock ? kWideColumns - 7 : cols, out.data() + 4 * tile, {});
          if (memcmp(out.data(), out.data() + tile, 4 * tile) != 0)
            fail("the layer's arranged rows and the kernel's own differ");
        }
        if (memcmp(c[0].data(), c[1].data(), 4 * c[0].size()) != 0) {
          fprintf(stderr, "length %d, %d rows, %d columns: amx and amx_soft differ\n", int(length), count, cols);
          return 1;
        }
      }
    }
  }
  if (!native && (!executed[0] || !executed[1] || !executed[2] || !executed[3])) fail("no AMX instruction was executed");
  puts(native ? "native" : "emulated");
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string what = count > 1 ? arguments[1] : "";
  if (what == "dot" && count == 5) return dot(atoi(arguments[2]), atoi(arguments[3]), atoi(arguments[4]));
  if (what == "misuse" && count == 3) return misuse(arguments[2]);
  if (what == "products") return products();
  fail("usage: tiles dot M N K | misuse NAME | products");
}
