"""What an ``ExpertMatrices`` describes, read byte by byte from the addresses.

It follows the docstrings of ``ktft.weights`` and nothing else, so it holds the loader to what it promises the kernels.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from ktft.weights import PLAIN, WITH_ZERO_POINTS, ExpertMatrices, ExpertWeights

_BITS = {"fp8": 8, "int8": 8, "int8_plain": 8, "int4": 4, "mxfp4": 4, "nvfp4": 4, "bf16": 16, "fp16": 16, "fp32": 32}
_SCALES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e8m0": torch.float8_e8m0fnu,
    "e4m3": torch.float8_e4m3fn,
}
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _bytes(address: int, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(ctypes.string_at(address, size)), dtype=torch.uint8)


def _eights(address: int, stride: int, rows: int, cols: int) -> torch.Tensor:
    """Rows of 32-bit words -> int64 [rows, cols, 8] of four bits, the lowest first."""
    words = torch.stack([_bytes(address + i * stride, 4 * cols) for i in range(rows)]).view(torch.int32)
    return words[..., None].long() >> torch.arange(0, 32, 4) & 15


def _with_zero_points(matrices: ExpertMatrices, expert: int, rows: int, cols: int) -> torch.Tensor:
    """[rows, cols] as stored, in fp32."""
    scales, zeros = matrices.scales, matrices.zero_points
    assert scales is not None
    assert zeros is not None
    order = [0, 2, 4, 6, 1, 3, 5, 7] if matrices.format == "awq" else list(range(8))  # of a word's columns
    codes, zero_points = torch.empty(rows, cols), torch.empty(-(-rows // scales.rows), cols)
    found = _eights(int(zeros.addresses[expert]), zeros.row_stride, len(zero_points), cols // 8)
    for i, place in enumerate(order):
        zero_points[:, place::8] = ((found[..., i] + zeros.less_one) % 16).float()
    if matrices.format == "awq":
        found = _eights(int(matrices.addresses[expert]), matrices.row_stride, rows, cols // 8)
        for i, place in enumerate(order):
            codes[:, place::8] = found[..., i].float()
    else:
        found = _eights(int(matrices.addresses[expert]), matrices.row_stride, rows // 8, cols)
        codes = found.transpose(1, 2).flatten(0, 1).float()
    kind, first = _SCALES[scales.format], int(scales.addresses[expert])
    factors = torch.stack(
        [
            _bytes(first + i * scales.row_stride, cols * kind.itemsize).view(kind).float()
            for i in range(len(zero_points))
        ]
    )
    group = torch.arange(rows) // scales.rows
    return (codes - zero_points[group]) * factors[group]


def decoded(weights: ExpertWeights, name: str, expert: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``gate`` or ``up`` [I, H], or ``down`` [H, I], of one expert."""
    matrices: ExpertMatrices = {"gate": weights.gate, "up": weights.up, "down": weights.down}[name]
    rows, cols = weights.intermediate_size, weights.hidden_size
    if name == "down":
        rows, cols = cols, rows
    if matrices.transposed:
        rows, cols = cols, rows
    if matrices.format in WITH_ZERO_POINTS:
        return _with_zero_points(matrices, expert, rows, cols).to(dtype).t().contiguous()
    between = (cols - 1) * matrices.column_step + 1
    address, size = int(matrices.addresses[expert]), between * _BITS[matrices.format] // 8
    codes = torch.stack([_bytes(address + i * matrices.row_stride, size) for i in range(rows)])
    if matrices.format in PLAIN:
        values = codes.view(PLAIN[matrices.format])[:, :: matrices.column_step].float()
    elif matrices.format == "fp8":
        values = codes.view(torch.float8_e4m3fn).float()
    elif matrices.format == "int8_plain":
        values = codes.view(torch.int8).float()
    elif matrices.format == "int8":
        values = codes.float() - 128
    else:
        nibbles = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1).long()
        values = nibbles.float() - 8 if matrices.format == "int4" else _E2M1[nibbles]
    scales = matrices.scales
    if scales is not None:
        kind = _SCALES[scales.format]
        across = -(-cols // scales.columns)
        first = int(scales.addresses[expert])
        indices = [(i + scales.first_row) // scales.rows for i in range(rows)]
        table = torch.stack(
            [_bytes(first + i * scales.row_stride, across * kind.itemsize).view(kind).float() for i in indices]
        )
        if scales.factors is not None:
            assert scales.factors.dtype == np.float32
            assert len(scales.factors) == weights.num_experts
            factor = torch.tensor(scales.factors[expert])
            table = table / factor if scales.divides else table * factor
        values = values * table.repeat_interleave(scales.columns, 1)[:, :cols]
    out = values.to(dtype)
    return out.t().contiguous() if matrices.transposed else out


__all__ = ["decoded"]
