// Fills one row of the kernel table for the unit that included it: define Vec (and Bf16Dot where the unit has it) first.

namespace {

using namespace ktft;

#include "convert.inl"
#include "elementwise.inl"
#include "gemm.inl"

template <Format compute, class DotType>
struct ModeOf {
  using Dot = DotType;
  static constexpr Format kCompute = compute;                        // dtype of products and saved values
  static constexpr Format kWord = Dot::kGroup == 2 ? kBf16 : kFp32;  // dtype of elements inside words
};

template <class Mode>
constexpr Kernels make_kernels() {
  return Kernels{
      Mode::Dot::kGroup,
      Mode::kWord,
      multiply_rows<Mode>,
      multiply_panel<Mode, true>,
      multiply_columns<Mode>,
      multiply_panel<Mode, false>,
      decode_rows<Mode>,
      decode_panel<Mode>,
      decodes_aside<Mode>,
      swiglu_forward<Mode>,
      swiglu_backward<Mode>,
      scatter_add,
      store_rounded<Mode>,
      store_low_rank<Mode>,
      outer,
      dropout,
      load_rows<Mode>,
  };
}

}  // namespace
