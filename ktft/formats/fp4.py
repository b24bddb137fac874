"""Codes in the 4-bit float e2m1, two to a byte, the low half first: MXFP4 and NVFP4.

Bit 3 of a code is the sign, bits 0 to 2 choose 0, 0.5, 1, 1.5, 2, 3, 4 or 6.

- MXFP4, decoded in fp32: code · 2^(e − 127), one e8m0 exponent for 32 columns. Exact unless it leaves fp32's range;
  exponent 255 is NaN. gpt-oss stores blocks [rows, cols / 32, 16], compressed-tensors [rows, cols / 2], DeepSeek-V4 the
  same as int8: the same bytes.
- NVFP4, decoded in fp32: code · (scale · global) where modelopt wrote it (``weight_scale_2``), code · (scale / global)
  where compressed-tensors did (``weight_global_scale``): one e4m3 scale for 16 columns; the parenthesis is rounded to
  fp32 first, then the product.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ktft.formats.arithmetic import E2M1, byte_table, from_bytes, scale_columns, scale_values, to_bytes
from ktft.formats.encoding import ONE, ROWS, Dimension, Encoding, Role, StoredTensor

_NUMBERS = byte_table([*E2M1, *(-value for value in E2M1)])
_PAIRS = ((ROWS, Dimension("cols", 2)),)


def mxfp4_blocks() -> Encoding:
    """gpt-oss: ``_blocks`` [E, rows, cols / 32, 16] and ``_scales`` [E, rows, cols / 32], both uint8."""
    across = Dimension("cols", 32)
    codes = StoredTensor("codes", "_blocks", ("U8",), ((ROWS, across, Dimension("", times=16)),))
    return Encoding("mxfp4", (1, 32), (codes, StoredTensor("scales", "_scales", ("U8", "F8_E8M0"), ((ROWS, across),))))


def mxfp4(weight: str = ".weight_packed", scale: str = ".weight_scale") -> Encoding:
    """Two dimensions; suffixes as compressed-tensors writes them. DeepSeek-V4: ``(".weight", ".scale")``."""
    codes = StoredTensor("codes", weight, ("U8", "I8"), _PAIRS)
    scales = StoredTensor("scales", scale, ("U8", "F8_E8M0"), ((ROWS, Dimension("cols", 32)),))
    return Encoding("mxfp4", (1, 32), (codes, scales))


def nvfp4_modelopt() -> Encoding:
    """``weight`` uint8, ``weight_scale`` e4m3 [rows, cols / 16], ``weight_scale_2`` fp32: multiplied."""
    return _nvfp4(".weight", StoredTensor("global_scale", ".weight_scale_2", ("F32",), ((), (ONE,))))


def nvfp4_compressed() -> Encoding:
    """``weight_packed`` uint8, ``weight_scale`` e4m3, ``weight_global_scale`` fp32 [1]: divided by."""
    return _nvfp4(".weight_packed", StoredTensor("global_divisor", ".weight_global_scale", ("F32",), ((ONE,), ())))


def _nvfp4(weight: str, whole: StoredTensor) -> Encoding:
    codes = StoredTensor("codes", weight, ("U8",), _PAIRS)
    scales = StoredTensor("scales", ".weight_scale", ("F8_E4M3",), ((ROWS, Dimension("cols", 16)),))
    return Encoding("nvfp4", (1, 16), (codes, scales, whole))


def decode(encoding: Encoding, tensors: Mapping[Role, torch.Tensor], begin: int, end: int) -> torch.Tensor:
    """Rows ``begin`` to ``end`` in fp32."""
    packed = tensors["codes"][begin:end]
    values = from_bytes(packed.reshape(len(packed), -1).view(torch.uint8), _NUMBERS)
    scales = scale_values(tensors["scales"][begin:end])
    if "global_scale" in tensors:
        scales = scales * tensors["global_scale"].reshape(())
    if "global_divisor" in tensors:
        scales = scales / tensors["global_divisor"].reshape(())
    return scale_columns(values, scales, encoding.group)


def encode(weight: torch.Tensor, encoding: Encoding) -> dict[Role, torch.Tensor]:
    """MXFP4: exponent ⌊log2 largest⌋ − 2 of each group, or 1 more where largest is 1.75 or more of its power of two;
    codes nearest even, 6 at most.

    So does compressed-tensors. The OCP rule never goes 1 up, and makes 6 of all that is between 6 and 8: on normal
    weights its error is 1.6 % larger. Here nothing is off by more than half a step.

    Args:
        weight: fp32 [rows, cols], finite; 32 divides cols.
        encoding: MXFP4 in any layout.
    """
    rows, cols = weight.shape
    groups = weight.reshape(rows, cols // 32, 32)
    exponents = mxfp4_exponents(groups.abs().amax(2))
    codes = e2m1_codes(torch.ldexp(groups, -exponents[..., None]).view(rows, cols))
    shape = encoding.codes.shapes[0]
    packed = to_bytes(codes).view([dimension.size(rows, cols) for dimension in shape])
    return {"codes": packed, "scales": (exponents + 127).to(torch.uint8)}


def mxfp4_exponents(largest: torch.Tensor) -> torch.Tensor:
    """fp32 magnitudes -> int32 exponents of their groups' scales, by the rule of :func:`encode`."""
    # largest = m · 2^e with m in [0.5, 1), so ⌊log2 largest⌋ is e − 1; of 0, e is 0, and any exponent will do.
    mantissa, exponent = torch.frexp(largest)
    return (exponent - 3 + (mantissa >= 0.875)).clamp_(-127, 125)  # 4 · 2^126 is no fp32 number


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """fp32 -> uint8 codes of the nearest e2m1, ties to the even code, magnitudes above 5 to 6.

    Codes lie 0.5 apart below 2, 1 below 4, 2 above: the code of v is the least of 2v, v + 2 and v / 2 + 4, rounded.
    2 and 4 are even, so they can be added after rounding to nearest even, and nothing else rounds.
    """
    size = values.abs()
    codes = (size * 2).round_()
    torch.minimum(codes, size.round().add_(2), out=codes)
    torch.minimum(codes, size.mul_(0.5).round_().add_(4), out=codes)
    return codes.clamp_(max=7).to(torch.uint8) | torch.signbit(values).to(torch.uint8) << 3


__all__ = [
    "decode", "e2m1_codes", "encode", "mxfp4", "mxfp4_blocks", "mxfp4_exponents", "nvfp4_compressed", "nvfp4_modelopt",
]  # fmt: skip
