// Python's view of the kernels: addresses and sizes in, GIL released, exceptions translated. Tensors are checked in
// ktft/ops.py.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu.h"
#include "moe.h"

namespace py = pybind11;
using namespace ktft;

namespace {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// addresses, row_stride, format, transposed; of the scales: addresses, stride, format, rows, columns, first row, factors,
// divides; of the zero points: addresses, stride, whether they are less one
using PyMatrices = std::tuple<uintptr_t, int64_t, int, bool, uintptr_t, int64_t, int, int64_t, int64_t, int64_t, uintptr_t,
                              bool, uintptr_t, int64_t, bool>;

// function, alpha, the gate's largest value, up's limit, up's shift
using PyActivation = std::tuple<int, float, float, float, float>;

struct PyCall : LayerCall {
  PyCall(int64_t tokens_, int64_t top_k_, int64_t experts_, int64_t hidden_, int64_t intermediate_, uintptr_t x_,
         uintptr_t top_k_index_, uintptr_t top_k_weights_, const std::vector<PyMatrices>& matrices,
         const std::vector<uintptr_t>& biases_, const PyActivation& activation_,
         const std::vector<std::tuple<std::vector<uintptr_t>, int, int64_t, float>>& adapters_, uintptr_t adapter_ids_,
         double dropout_p_, uint64_t dropout_seed_, int compute_, int isa_, int threads_, bool residency_known_) {
    tokens = tokens_;
    top_k = top_k_;
    experts = experts_;
    hidden = hidden_;
    intermediate = intermediate_;
    x = pointer<const char>(x_);
    top_k_index = pointer<const int64_t>(top_k_index_);
    top_k_weights = pointer<const float>(top_k_weights_);
    if (matrices.size() != 3 || biases_.size() != 3) throw std::invalid_argument("expected gate, up and down");
    for (size_t i = 0; i < 3; ++i) biases[i] = pointer<const float>(biases_[i]);
    const auto& [function, alpha, gate_max, up_limit, up_shift] = activation_;
    if (function < 0 || function >= kGateFunctions) throw std::invalid_argument("an activation that the kernels do not have");
    activation = {GateFunction(function), alpha, gate_max, up_limit, up_shift};
    Matrices* const targets[3] = {&gate, &up, &down};
    for (size_t i = 0; i < 3; ++i) {
      const auto& [addresses, row_stride, format, transposed, scale_addresses, scale_stride, scale_format, scale_rows,
                   scale_columns, first_row, factors, divides, zero_addresses, zero_stride, zeros_less_one] = matrices[i];
      if (format < 0 || format >= kFormats || scale_rows < 1 || scale_columns < 1)
        throw std::invalid_argument("a format that the kernels do not have");
      const Scales scales{nullptr, scale_stride, ScaleFormat(scale_format), scale_rows, scale_columns, first_row,
                          1.0f,    divides};
      *targets[i] = {pointer<const int64_t>(addresses),
                     row_stride,
                     Format(format),
                     transposed,
                     pointer<const int64_t>(scale_addresses),
                     scales,
                     pointer<const float>(factors),
                     pointer<const int64_t>(zero_addresses),
                     {nullptr, zero_stride, zeros_less_one}};
    }
    for (const auto& [factors, format, rank, scaling] : adapters_) {
      if (factors.size() != 6) throw std::invalid_argument("an adapter has six factors");
      Adapter adapter{};
      for (size_t i = 0; i < 6; ++i) adapter.factors[i] = pointer<const char>(factors[i]);
      adapter.format = Format(format);
      adapter.rank = rank;
      adapter.scaling = scaling;
      adapters.push_back(adapter);
    }
    adapter_ids = pointer<const int64_t>(adapter_ids_);
    dropout_p = dropout_p_;
    dropout_seed = dropout_seed_;
    compute = Format(compute_);
    isa = Isa(isa_);
    threads = threads_;
    residency_known = residency_known_;
    if (threads < 1 || threads > 4096) throw std::invalid_argument("threads must lie in 1 .. 4096");
  }
};

CpuFeatures features_from(const py::dict& flags) {
  CpuFeatures f;
  const auto get = [&](const char* name) { return flags.contains(name) && flags[name].cast<bool>(); };
  f.avx2 = get("avx2");
  f.fma = get("fma");
  f.f16c = get("f16c");
  f.avx512f = get("avx512f");
  f.avx512bw = get("avx512bw");
  f.avx512dq = get("avx512dq");
  f.avx512vl = get("avx512vl");
  f.avx512_bf16 = get("avx512_bf16");
  f.os_ymm = get("os_ymm");
  f.os_zmm = get("os_zmm");
  f.amx_tile = get("amx_tile");
  f.amx_bf16 = get("amx_bf16");
  f.os_amx = get("os_amx");
  f.amx_palette = get("amx_palette");
  f.amx_permission = get("amx_permission");
  return f;
}

py::dict features_dict(const CpuFeatures& f) {
  py::dict d;
  d["avx2"] = f.avx2;
  d["fma"] = f.fma;
  d["f16c"] = f.f16c;
  d["avx512f"] = f.avx512f;
  d["avx512bw"] = f.avx512bw;
  d["avx512dq"] = f.avx512dq;
  d["avx512vl"] = f.avx512vl;
  d["avx512_bf16"] = f.avx512_bf16;
  d["os_ymm"] = f.os_ymm;
  d["os_zmm"] = f.os_zmm;
  d["amx_tile"] = f.amx_tile;
  d["amx_bf16"] = f.amx_bf16;
  d["os_amx"] = f.os_amx;
  d["amx_palette"] = f.amx_palette;
  d["amx_permission"] = f.amx_permission;
  return d;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Kernels of ktft. Use ktft.ops; this module takes raw addresses.";

  py::class_<PyCall>(m, "LayerCall")
      .def(py::init<int64_t, int64_t, int64_t, int64_t, int64_t, uintptr_t, uintptr_t, uintptr_t,
                    const std::vector<PyMatrices>&, const std::vector<uintptr_t>&, const PyActivation&,
                    const std::vector<std::tuple<std::vector<uintptr_t>, int, int64_t, float>>&, uintptr_t, double, uint64_t,
                    int, int, int, bool>(),
           py::arg("tokens"), py::arg("top_k"), py::arg("experts"), py::arg("hidden"), py::arg("intermediate"), py::arg("x"),
           py::arg("top_k_index"), py::arg("top_k_weights"), py::arg("matrices"), py::arg("biases"), py::arg("activation"),
           py::arg("adapters"), py::arg("adapter_ids"), py::arg("dropout_p"), py::arg("dropout_seed"), py::arg("compute"),
           py::arg("isa"), py::arg("threads"), py::arg("residency_known"));

  m.def(
      "forward",
      [](const PyCall& call, uintptr_t out, uintptr_t saved) { forward(call, pointer<char>(out), pointer<char>(saved)); },
      py::arg("call"), py::arg("out"), py::arg("saved"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "backward",
      [](const PyCall& call, uintptr_t grad_out, uintptr_t saved, uintptr_t d_x, uintptr_t d_top_k_weights,
         const std::vector<uintptr_t>& d_factors) {
        Gradients gradients{pointer<char>(d_x), pointer<float>(d_top_k_weights), {}};
        for (const uintptr_t address : d_factors) gradients.factors.push_back(pointer<float>(address));
        backward(call, pointer<const char>(grad_out), pointer<const char>(saved), gradients);
      },
      py::arg("call"), py::arg("grad_out"), py::arg("saved"), py::arg("d_x"), py::arg("d_top_k_weights"), py::arg("d_factors"),
      py::call_guard<py::gil_scoped_release>());

  m.def(
      "cpu_features", [](bool ask_for_tiles) { return features_dict(detect_cpu(ask_for_tiles)); }, py::arg("ask_for_tiles"),
      "CPU features that matter here, as this process may use them; tile registers only if it asks.");
  m.def(
      "features_of",
      [](const CpuLeaves& leaves, uint64_t xcr0, const std::function<bool()>& ask_for_tiles) {
        return features_dict(features_of(leaves, xcr0, ask_for_tiles));
      },
      py::arg("leaves"), py::arg("xcr0"), py::arg("ask_for_tiles"),
      "The same of a made-up machine, from its CPUID leaves ({(leaf, subleaf): (eax, ebx, ecx, edx)}), XCR0 and permission.");
  m.def(
      "isa_levels",
      [](const py::dict& features) {
        const CpuFeatures f = features_from(features);
        std::vector<std::pair<std::string, std::string>> levels;
        for (int i = 0; i < kIsaCount; ++i) levels.emplace_back(isa_name(Isa(i)), missing_for(Isa(i), f));
        return levels;
      },
      py::arg("features"), "Every level, lowest first, with the features it lacks here (empty: it may run).");
  m.attr("MAX_ADAPTERS") = kMaxAdapters;
  m.attr("COMPILER") = __VERSION__;
  m.attr("BUILD_FLAGS") = KTFT_BUILD_FLAGS;
}
