"""Matrices stored as they are: bf16, fp16, fp32 [rows, cols].

Decoded value: exact in fp32; rounded to nearest even, once, where the compute dtype is narrower.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ktft.formats.encoding import MATRIX, Encoding, Role, StoredTensor

PLAIN_DTYPES: dict[str, str] = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
"""Safetensors dtype -> format."""


def plain(dtype: str, suffix: str = ".weight") -> Encoding:
    """A matrix of a safetensors dtype of :data:`PLAIN_DTYPES`; fused experts have no suffix."""
    return Encoding(PLAIN_DTYPES[dtype], (0, 0), (StoredTensor("codes", suffix, (dtype,), (MATRIX,)),))


def decode(encoding: Encoding, tensors: Mapping[Role, torch.Tensor], begin: int, end: int) -> torch.Tensor:
    """Rows ``begin`` to ``end`` in fp32."""
    return tensors["codes"][begin:end].float()


__all__ = ["PLAIN_DTYPES", "decode", "plain"]
