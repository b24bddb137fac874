"""What several decoders and encoders share: codes to numbers, and scales applied to blocks of columns, all in fp32."""

from __future__ import annotations

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the 4-bit float e2m1 by its lower three bits; the fourth is the sign."""


def byte_table(values: list[float]) -> torch.Tensor:
    """fp32 [256, 2]: the numbers that a byte's low and high half stand for, given those of the 16 codes."""
    codes = torch.arange(256)
    numbers = torch.tensor(values, dtype=torch.float32)
    return torch.stack((numbers[codes & 15], numbers[codes >> 4]), dim=1)


def from_bytes(packed: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """uint8 [n, m] and a :func:`byte_table` -> fp32 [n, 2m], the low half of each byte first."""
    return table.index_select(0, packed.reshape(-1).int()).view(packed.shape[0], -1)


def to_bytes(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 2m] of 0 to 15 -> uint8 [n, m], the first of each pair in the low half."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def e8m0(exponents: torch.Tensor) -> torch.Tensor:
    """uint8 -> fp32 2^(e − 127), exactly: 0 is the subnormal 2⁻¹²⁷, 255 is NaN."""
    return exponents.view(torch.float8_e8m0fnu).float()


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """Scales as stored (fp32, bf16, fp16, e4m3, e8m0; uint8 is e8m0) -> fp32, exactly."""
    return e8m0(scales) if scales.dtype == torch.uint8 else scales.float()


def scale_columns(values: torch.Tensor, scales: torch.Tensor, width: int) -> torch.Tensor:
    """Multiply fp32 values [n, cols] in place by scales [n, ⌈cols / width⌉], one for each ``width`` columns."""
    whole = values.shape[1] // width
    if whole:
        values[:, : whole * width].unflatten(1, (whole, width)).mul_(scales[:, :whole, None])
    if values.shape[1] > whole * width:
        values[:, whole * width :].mul_(scales[:, whole:])
    return values


def largest_of_blocks(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude of each block [down, across] of [rows, cols] (0: all); the last ones may be cut off."""
    rows, cols = weight.shape
    down, across = block[0] or rows, block[1] or cols
    padded = torch.nn.functional.pad(weight.abs(), (0, -cols % across, 0, -rows % down))
    return padded.view(-1, down, padded.shape[1] // across, across).amax((1, 3))


def spread_blocks(values: torch.Tensor, block: tuple[int, int], rows: int, cols: int) -> torch.Tensor:
    """[rows, cols]: each element's value, of one value for each block as :func:`largest_of_blocks` gives them."""
    spread = values.repeat_interleave(block[0] or rows, 0)[:rows]
    return spread.repeat_interleave(block[1] or cols, 1)[:, :cols]


__all__ = [
    "E2M1",
    "byte_table",
    "e8m0",
    "from_bytes",
    "largest_of_blocks",
    "scale_columns",
    "scale_values",
    "spread_blocks",
    "to_bytes",
]
