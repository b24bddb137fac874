"""On-disk formats: what a safetensors dtype is called, how wide it is, and which of them hold expert weights.

Adding a format that the kernels decode is a row in :data:`EXPERT_FORMATS` here, a row in ``ktft.weights.FORMATS`` and
a decoder in the kernels. This module knows names and sizes only; it opens no files.
"""

from __future__ import annotations

EXPERT_FORMATS: dict[str, str] = {"BF16": "bf16", "F32": "fp32"}
"""Safetensors dtypes that routed experts may have -> format name in ``ktft.weights.FORMATS``."""

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}
"""Bits of one element of every dtype the safetensors format names."""


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes a tensor takes in a file; None for a dtype this version has not heard of."""
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        return None
    for size in shape:
        bits *= size
    return (bits + 7) // 8


__all__ = ["DTYPE_BITS", "EXPERT_FORMATS", "tensor_bytes"]
