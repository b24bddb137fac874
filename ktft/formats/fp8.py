"""Codes in the 8-bit float e4m3 [rows, cols], with scales per block, per row or for the whole matrix.

Decoded value, in fp32: code · scale, one multiplication. e4m3 has no infinities; 0x7F and 0xFF are NaN, ±448 the
largest, 2⁻⁹ the smallest magnitude. Scales are fp32, bf16 or fp16, or e8m0 (2^(e − 127), also stored as uint8), all
exact in fp32. Whether scales are called "inverse" (DeepSeek's ``weight_scale_inv``) makes no difference: they multiply.
Blocks are counted from the first row and column, and cut off at the last.

Where gate and up lie in one fused tensor, blocks are counted from gate's first row; up begins inside a block unless I
is a multiple of the block's rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ktft.formats.arithmetic import largest_of_blocks, scale_columns, scale_values, spread_blocks
from ktft.formats.encoding import MATRIX, ONE, ROWS, Dimension, Encoding, Role, Shape, StoredTensor

_SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
LARGEST = 448.0


def _fp8(block: tuple[int, int], weight: str, scale: str, shapes: tuple[Shape, ...], edges: bool = False) -> Encoding:
    codes = StoredTensor("codes", weight, ("F8_E4M3",), (MATRIX,))
    return Encoding("fp8", block, (codes, StoredTensor("scales", scale, _SCALES, shapes)), edges)


def fp8_block(
    block: tuple[int, int] = (128, 128), weight: str = ".weight", scale: str = ".weight_scale_inv"
) -> Encoding:
    """One scale for each block, [⌈rows / block rows⌉, ⌈cols / block columns⌉].

    Suffixes as DeepSeek writes them. Others: ``("", "_scale_inv")`` for transformers' fused experts, ``.scale``
    (DeepSeek-V4), ``.weight_scale`` (compressed-tensors). modelopt keeps dimensions of 1 between.
    """
    down, across = (Dimension("rows", block[0]), Dimension("cols", block[1]))
    return _fp8(block, weight, scale, ((down, across), (down, ONE, across, ONE)), edges=True)


def fp8_channel(scale: str = ".weight_scale") -> Encoding:
    """One scale for each row, [rows, 1] (compressed-tensors) or [rows] (modelopt)."""
    return _fp8((1, 0), ".weight", scale, ((ROWS, ONE), (ROWS,)))


def fp8_tensor(weight: str = ".weight", scale: str = ".weight_scale") -> Encoding:
    """One scale: a scalar (modelopt), [1] (compressed-tensors), or [1, 1]."""
    return _fp8((0, 0), weight, scale, ((ONE,), (), (ONE, ONE)))


def mxfp8(weight: str = ".weight", scale: str = ".weight_scale") -> Encoding:
    """One e8m0 scale for 32 columns of a row, as modelopt and compressed-tensors write MXFP8."""
    codes = StoredTensor("codes", weight, ("F8_E4M3",), (MATRIX,))
    scales = StoredTensor("scales", scale, ("U8", "F8_E8M0"), ((ROWS, Dimension("cols", 32)),))
    return Encoding("fp8", (1, 32), (codes, scales))


def decode(encoding: Encoding, tensors: Mapping[Role, torch.Tensor], begin: int, end: int) -> torch.Tensor:
    """Rows ``begin`` to ``end`` in fp32."""
    values = tensors["codes"][begin:end].float()
    rows, cols = encoding.block
    scales = scale_values(tensors["scales"])
    if encoding.block == (0, 0):
        return values.mul_(scales.reshape(()))
    across = scales.numel() // scales.shape[0]  # [rows], [rows, 1] and modelopt's four dimensions are all one matrix
    of_row = torch.arange(begin, end) // rows
    return scale_columns(values, scales.view(-1, across).index_select(0, of_row), cols or values.shape[1])


def encode(weight: torch.Tensor, encoding: Encoding) -> dict[Role, torch.Tensor]:
    """Scale = largest magnitude of a block / 448 in fp32 (1 where all are 0), code = weight / scale, nearest even.

    Args:
        weight: fp32 [rows, cols], whole blocks of rows but for the last, finite.
        encoding: blocks or rows with fp32 scales.
    """
    largest = largest_of_blocks(weight, encoding.block)
    # A subnormal quotient times 448 would miss the largest magnitude by far, and its reciprocal is infinite.
    scales = torch.where(largest > 0, largest / LARGEST, torch.ones(())).clamp_(min=torch.finfo(torch.float32).tiny)
    codes = (weight / spread_blocks(scales, encoding.block, *weight.shape)).clamp_(-LARGEST, LARGEST)
    return {"codes": codes.to(torch.float8_e4m3fn), "scales": scales}


__all__ = ["decode", "encode", "fp8_block", "fp8_channel", "fp8_tensor", "mxfp8"]
