"""How far an encoded weight may be from what was encoded: half a step of its format."""

from __future__ import annotations

import torch

from ktft.formats.arithmetic import largest_of_blocks, spread_blocks
from ktft.formats.encoding import Encoding
from ktft.formats.fp4 import mxfp4_exponents
from ktft.formats.fp8 import LARGEST

_BF16 = 2.0**-8
"""Relative rounding error of a bf16 scale."""
_FP32 = 1 + 2.0**-18
"""What a few roundings in fp32 add, relatively: to the scale, to the quotient, to the product."""


def half_steps(weight: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """The largest |decoded − weight| of every element, if the codes are the nearest and the scales those of the rule.

    Scales follow from the weights, and not from what a file holds, so that neither wrong codes nor wrong scales pass.

    - int4, int8: half of scale = largest / 7 (127), the coarser of the two common divisors, rounded to bf16. Weights
      that are the largest but for that rounding have no code above 7 (127), which it moves by as much as itself.
    - fp8: 3 bits of mantissa, so half a step is at most |weight| / 16; 2⁻¹⁰ scale below the smallest power of two.
    - mxfp4: steps of 0.5 below 2, 1 below 4, 2 above, times 2^exponent.

    Args:
        weight: fp32 [rows, cols], finite.
        encoding: of a format that ktft writes, with scales per block, group or row.

    Returns:
        fp32 [rows, cols].

    Raises:
        ValueError: a format that ktft does not write, whose scales follow no rule that is known here.
    """
    name, block = encoding.format, encoding.block
    largest = largest_of_blocks(weight, block)
    if name in ("int4", "int8"):
        code = 7 if name == "int4" else 127
        largest = spread_blocks(largest, block, *weight.shape)
        top = (weight.abs() > largest * (1 - 2 * _BF16)) * _BF16
        out = largest * (0.5 / code * (1 + _BF16) + top) * _FP32
    elif name == "fp8":
        least = spread_blocks(largest * (2.0**-10 / LARGEST), block, *weight.shape)
        out = torch.maximum(weight.abs() * 2.0**-4, least) * _FP32
    elif name == "mxfp4":
        exponents = spread_blocks(mxfp4_exponents(largest), block, *weight.shape)
        size = torch.ldexp(weight.abs(), -exponents)
        steps = torch.where(size < 2, 0.25, torch.where(size < 4, 0.5, 1.0))
        out = torch.ldexp(steps, exponents)
    else:
        raise ValueError(f"no bound is known for {encoding}, which ktft does not write")
    # Below that scales are not made smaller.
    return out.clamp_(min=torch.finfo(torch.float32).tiny)


__all__ = ["half_steps"]
