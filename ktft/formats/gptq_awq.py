"""4-bit codes with a zero point for each group of columns: GPTQ and AWQ.

Both store the transpose, [cols, rows], eight codes to an int32 word, and fp16 (bf16, fp32) scales [groups, rows].
Decoded value, in fp32: (code − zero) · scale; the difference is a small integer, so there is one rounding.

- GPTQ: ``qweight`` [cols / 8, rows], the first of eight columns in the lowest bits; ``qzeros`` [groups, rows / 8], the
  first of eight rows in the lowest bits. The zero point is what is stored, plus 1 modulo 16 in the first version of the
  format, whatever the config calls ``sym``; ``checkpoint_format: gptq_v2`` stores it as it is.
- AWQ (version "gemm"): ``qweight`` [cols, rows / 8] and ``qzeros`` [groups, rows / 8]; from the lowest bits up, a word
  holds rows 0, 2, 4, 6, 1, 3, 5, 7 of its eight.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ktft.formats.encoding import COLS, ONE, ROWS, Dimension, Encoding, Role, StoredTensor

_SCALES = ("F16", "BF16", "F32")
_SHIFTS = torch.arange(0, 32, 4, dtype=torch.int32)
_AWQ_SHIFTS = _SHIFTS[[0, 4, 1, 5, 2, 6, 3, 7]]  # of rows 0 to 7
_EIGHT_ROWS = Dimension("rows", 8)


def gptq(group: int, version: int = 1) -> Encoding:
    """GPTQ with ``group`` columns to a scale, 0 for all of them; version 2 is ``gptq_v2``."""
    groups = Dimension("cols", group) if group else ONE
    zeros: Role = "zero_points_less_one" if version == 1 else "zero_points"
    tensors = (
        StoredTensor("codes", ".qweight", ("I32",), ((Dimension("cols", 8), ROWS),)),
        StoredTensor("scales", ".scales", _SCALES, ((groups, ROWS),)),
        StoredTensor(zeros, ".qzeros", ("I32",), ((groups, _EIGHT_ROWS),)),
        StoredTensor("group_index", ".g_idx", ("I32", "I64"), ((COLS,),), optional=True),
    )
    return Encoding("gptq", (1, group), tensors)


def awq(group: int) -> Encoding:
    """AWQ with ``group`` columns to a scale, 0 for all of them."""
    groups = Dimension("cols", group) if group else ONE
    tensors = (
        StoredTensor("codes", ".qweight", ("I32",), ((COLS, _EIGHT_ROWS),)),
        StoredTensor("scales", ".scales", _SCALES, ((groups, ROWS),)),
        StoredTensor("zero_points", ".qzeros", ("I32",), ((groups, _EIGHT_ROWS),)),
    )
    return Encoding("awq", (1, group), tensors)


def decode(encoding: Encoding, tensors: Mapping[Role, torch.Tensor], begin: int, end: int) -> torch.Tensor:
    """Rows ``begin`` to ``end`` in fp32; ``begin`` is a multiple of 8."""
    words = slice(begin // 8, -(-end // 8))
    if encoding.format == "gptq":
        # [cols / 8, rows] -> [rows, cols]
        codes = ((tensors["codes"][:, begin:end].t()[..., None] >> _SHIFTS) & 15).flatten(1).float()
        shifts = _SHIFTS
    else:
        shifts = _AWQ_SHIFTS
        codes = _rows_of(tensors["codes"][:, words], shifts, end - begin)
    if "zero_points" in tensors:
        zeros = _rows_of(tensors["zero_points"][:, words], shifts, end - begin)
    else:
        zeros = _rows_of(tensors["zero_points_less_one"][:, words], shifts, end - begin).add_(1).remainder_(16)
    scales = tensors["scales"][:, begin:end].t().float()
    codes.view(len(codes), scales.shape[1], -1).sub_(zeros[..., None]).mul_(scales[..., None])
    return codes


def _rows_of(words: torch.Tensor, shifts: torch.Tensor, rows: int) -> torch.Tensor:
    """int32 [n, rows / 8], eight rows to a word -> fp32 [rows, n]."""
    return ((words.t()[:, None, :] >> shifts[:, None]) & 15).flatten(0, 1)[:rows].float()


__all__ = ["awq", "decode", "gptq"]
