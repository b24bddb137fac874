"""GGUF's block types, as llama.cpp and the ``gguf`` package store them: uint8 [rows, bytes of a row].

A row is a sequence of blocks; a block holds its own scales. Decoded values, in fp32, d and m being the block's fp16
numbers (exact in fp32), every product but Q6_K's second exact, so that fused multiply-adds change nothing:

- Q8_0, 32 columns: fp16 d, int8 q. d · q.
- Q4_0, 32 columns: fp16 d, 16 bytes. d · (q − 8).
- Q4_1, 32 columns: fp16 d, fp16 m, 16 bytes. (d · q) + m: the sum is rounded.
- Q4_K, 256 columns: fp16 d, fp16 m, 12 bytes of eight 6-bit scales s and minima t, 128 bytes; 32 columns share s and t.
  ((d · s) · q) − (m · t): the difference is rounded.
- Q6_K, 256 columns: 128 bytes of low and 64 of high bits, 16 int8 scales s, fp16 d; 16 columns share s.
  (d · s) · (q − 32): the second product is rounded.
- MXFP4, 32 columns: e8m0 exponent e, 16 bytes of e2m1. code · 2^(e − 127), as in ``fp4.py``: 255 is NaN, and code 8 is
  −0. ggml writes this as an integer twice the code times 2^(e − 128): the same numbers, but for +0 and exponent 255.

Other types, of which there are many, are decoded by the ``gguf`` package.

Within a block of 32 (Q4_K: within each 64 columns) a byte's low half belongs to the first half of the columns and its
high half to the second: byte i holds columns i and i + 16 (Q4_K: i and i + 32).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ktft.formats.arithmetic import E2M1, e8m0, scale_columns
from ktft.formats.encoding import ROWS, Dimension, Encoding, Role, StoredTensor

GGUF_BLOCKS: dict[str, tuple[str, int, int]] = {
    "Q8_0": ("q8_0", 32, 34),
    "Q4_0": ("q4_0", 32, 18),
    "Q4_1": ("q4_1", 32, 20),
    "Q4_K": ("q4_k", 256, 144),
    "Q6_K": ("q6_k", 256, 210),
    "MXFP4": ("gguf_mxfp4", 32, 17),
}
"""GGUF type -> format, columns of a block, bytes of a block. F32, F16 and BF16 are plain formats."""

OTHER_BLOCKS: dict[str, tuple[str, int, int]] = {
    "Q5_0": ("q5_0", 32, 22),
    "Q5_1": ("q5_1", 32, 24),
    "Q2_K": ("q2_k", 256, 84),
    "Q3_K": ("q3_k", 256, 110),
    "Q5_K": ("q5_k", 256, 176),
    "IQ1_S": ("iq1_s", 256, 50),
    "IQ1_M": ("iq1_m", 256, 56),
    "IQ2_XXS": ("iq2_xxs", 256, 66),
    "IQ2_XS": ("iq2_xs", 256, 74),
    "IQ2_S": ("iq2_s", 256, 82),
    "IQ3_XXS": ("iq3_xxs", 256, 98),
    "IQ3_S": ("iq3_s", 256, 110),
    "IQ4_NL": ("iq4_nl", 32, 18),
    "IQ4_XS": ("iq4_xs", 256, 136),
}
"""The same of types that experts are not computed in: what is not an expert may have them."""

_NUMBERS = torch.tensor([*E2M1, *(-value for value in E2M1)])


def gguf(kind: str, suffix: str = ".weight") -> Encoding:
    """The encoding of a GGUF type of :data:`GGUF_BLOCKS` or :data:`OTHER_BLOCKS`. Scales lie inside the blocks: there
    is one tensor."""
    name, columns, size = {**GGUF_BLOCKS, **OTHER_BLOCKS}[kind]
    shape = (ROWS, Dimension("cols", columns, size))
    return Encoding(name, (1, columns), (StoredTensor("codes", suffix, ("U8",), (shape,)),))


def decode(encoding: Encoding, tensors: Mapping[Role, torch.Tensor], begin: int, end: int) -> torch.Tensor:
    """Rows ``begin`` to ``end`` in fp32."""
    rows = tensors["codes"][begin:end]
    other = next((kind for kind, (name, _, _) in OTHER_BLOCKS.items() if name == encoding.format), None)
    if other is not None:
        return _by_package(other, rows)
    name, _, size = next(entry for entry in GGUF_BLOCKS.values() if entry[0] == encoding.format)
    return _DECODERS[name](rows.reshape(-1, size)).view(len(rows), -1)


def _by_package(kind: str, rows: torch.Tensor) -> torch.Tensor:
    from gguf import GGMLQuantizationType, quants  # takes as long to import as everything else here

    with np.errstate(all="ignore"):  # a scale that is not finite is found by those who look for it
        return torch.from_numpy(quants.dequantize(rows.numpy(), GGMLQuantizationType[kind]))


def _half(blocks: torch.Tensor, byte: int) -> torch.Tensor:
    """fp32 [n, 1]: the fp16 number at a byte of each block."""
    return blocks[:, byte : byte + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor, half: int) -> torch.Tensor:
    """uint8 [n, m] -> uint8 [n, 2m]: of every ``half`` bytes first the low halves, then the high ones."""
    parts = packed.reshape(len(packed), -1, half)
    return torch.stack((parts & 15, parts >> 4), dim=2).view(len(packed), -1)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 2:], 16).float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 4:], 16).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    # Bytes a, b, c of four each: the lower six bits of a and b are scales and minima 0 to 3; 4 to 7 have their lower
    # four bits in the halves of c, and their upper two in the upper two of a and b.
    a, b, c = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((a & 63, (c & 15) | (a >> 6) << 4), dim=1)
    minima = torch.cat((b & 63, (c >> 4) | (b >> 6) << 4), dim=1)
    values = scale_columns(_nibbles(blocks[:, 16:], 32).float(), scales.float() * _half(blocks, 0), 32)
    values.view(-1, 8, 32).sub_((minima.float() * _half(blocks, 2))[..., None])
    return values


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    # Each half of 128 columns has 64 bytes of low bits, of which byte i holds columns i and i + 64, and 32 bytes of
    # high bits, of which byte i holds two bits of each of the columns i, i + 32, i + 64 and i + 96.
    low = _nibbles(blocks[:, :128], 64)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    values = (low | (high.view(-1, 256) & 3) << 4).float().sub_(32)
    scales = blocks[:, 192:208].view(torch.int8).float() * _half(blocks, 208)
    return scale_columns(values, scales, 16)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 1:], 16)
    values = _NUMBERS.index_select(0, codes.view(-1).int()).view(-1, 32)
    return values.mul_(e8m0(blocks[:, :1].contiguous()))


_DECODERS = {
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q4_k": _q4_k,
    "q6_k": _q6_k,
    "gguf_mxfp4": _mxfp4,
}

__all__ = ["GGUF_BLOCKS", "OTHER_BLOCKS", "decode", "gguf"]
