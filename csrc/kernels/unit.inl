// Fills one row of the kernel table for the unit that included it: define Vec (and Bf16Dot where the unit has it) first.

#include <type_traits>

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

// The products on vectors; coded.inl and tiles.inl have others.
template <class Mode>
struct VectorProducts {
  static constexpr Kernels::Product *kRows = multiply_rows<Mode>, *kPhased = multiply_panel<Mode, true>,
                                    *kColumns = multiply_columns<Mode>, *kPanel = multiply_panel<Mode, false>;
  static constexpr decltype(Kernels::multiply_coded) kMultiplyCoded = nullptr;
  static constexpr decltype(Kernels::arrange_rows) kArrangeRows = nullptr;
};

template <class Mode, class Products = VectorProducts<Mode>>
constexpr Kernels make_kernels() {
  return Kernels{
      Mode::Dot::kGroup,
      Mode::kWord,
      Products::kRows,
      Products::kPhased,
      Products::kColumns,
      Products::kPanel,
      Products::kMultiplyCoded,
      decode_rows<Mode>,
      decode_panel<Mode>,
      decodes_aside<Mode>,
      Products::kArrangeRows,
      activation_forward<Mode>,
      activation_backward<Mode>,
      add_bias,
      dot<Mode>,
      scatter_add,
      store_rounded<Mode>,
      store_low_rank<Mode>,
      outer,
      dropout,
      load_rows<Mode>,
  };
}

}  // namespace
