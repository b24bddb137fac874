"""Symmetric integers as compressed-tensors writes them: int4 and int8, one scale for a group of columns or a row.

Decoded value, in fp32: code · scale, one multiplication; scales are bf16, fp16 or fp32.

- packed (``weight_packed`` int32 [rows, cols · bits / 32]): code + 2^(bits − 1) in ``bits`` bits, the first column in
  the lowest. ``weight_shape`` repeats rows and cols; a matrix padded to whole words is refused.
- plain int8 (``weight`` int8 [rows, cols]).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ktft.formats.arithmetic import byte_table, from_bytes, scale_columns, to_bytes
from ktft.formats.encoding import MATRIX, ONE, ROWS, Dimension, Encoding, Role, StoredTensor

_NIBBLES = byte_table([float(code - 8) for code in range(16)])
_SCALES = ("BF16", "F16", "F32")


def int_packed(bits: int, group: int) -> Encoding:
    """pack-quantized: int4 or int8 in groups of ``group`` columns; 0 is one scale for a row."""
    tensors = (
        StoredTensor("codes", ".weight_packed", ("I32",), ((ROWS, Dimension("cols", 32 // bits)),)),
        _scales(group),
        StoredTensor("shape", ".weight_shape", ("I64", "I32"), ((Dimension("", times=2),),)),
    )
    return Encoding(f"int{bits}", (1, group), tensors)


def int8(group: int = 0) -> Encoding:
    """int-quantized: int8 with one scale for ``group`` columns; 0 is one scale for a row."""
    return Encoding("int8", (1, group), (StoredTensor("codes", ".weight", ("I8",), (MATRIX,)), _scales(group)))


def int8_tensor() -> Encoding:
    """int-quantized: int8 with one scale."""
    scales = StoredTensor("scales", ".weight_scale", _SCALES, ((ONE,), (), (ONE, ONE)))
    return Encoding("int8", (0, 0), (StoredTensor("codes", ".weight", ("I8",), (MATRIX,)), scales))


def _scales(group: int) -> StoredTensor:
    shapes = ((ROWS, Dimension("cols", group)),) if group else ((ROWS, ONE), (ROWS,))
    return StoredTensor("scales", ".weight_scale", _SCALES, shapes)


def decode(encoding: Encoding, tensors: Mapping[Role, torch.Tensor], begin: int, end: int) -> torch.Tensor:
    """Rows ``begin`` to ``end`` in fp32."""
    codes, scales = tensors["codes"][begin:end], tensors["scales"].float()
    if codes.dtype == torch.int8:
        values = codes.float()
    elif encoding.format == "int4":
        values = from_bytes(codes.contiguous().view(torch.uint8), _NIBBLES)
    else:
        values = codes.contiguous().view(torch.uint8).float().sub_(128)
    if encoding.block == (0, 0):
        return values.mul_(scales.reshape(()))
    return scale_columns(values, scales.view(scales.shape[0], -1)[begin:end], encoding.group or values.shape[1])


def encode(weight: torch.Tensor, encoding: Encoding) -> dict[Role, torch.Tensor]:
    """Scale = largest magnitude / 7.5 (int4) or 127.5 (int8), rounded to bf16; code = weight / scale, nearest even.

    Half a step above the largest code is what compressed-tensors' observer takes: the range is −8 to 7, and the largest
    weight is off by half a step at most, like any other. All-zero groups get scale 1.

    Args:
        weight: fp32 [rows, cols], finite; the group divides cols.
        encoding: int4 packed, or int8.
    """
    rows, cols = weight.shape
    half = 8 if encoding.format == "int4" else 128
    groups = weight.reshape(rows, -1, encoding.group or cols)
    largest = groups.abs().amax(2)
    scales = torch.where(largest > 0, largest / (half - 0.5), torch.ones(())).to(torch.bfloat16)
    scales.clamp_(min=torch.finfo(torch.bfloat16).tiny)
    codes = (groups / scales.float()[..., None]).round_().clamp_(-half, half - 1).view(rows, cols)
    out: dict[Role, torch.Tensor] = {"codes": codes.to(torch.int8), "scales": scales}
    if encoding.codes.dtypes == ("I32",):
        unsigned = (codes + half).to(torch.uint8)
        out["codes"] = (to_bytes(unsigned) if half == 8 else unsigned).view(torch.int32)
    return out


__all__ = ["decode", "encode", "int8", "int8_tensor", "int_packed"]
