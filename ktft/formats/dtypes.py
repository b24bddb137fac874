"""What a safetensors dtype is called, how wide it is, and which torch dtype it is."""

from __future__ import annotations

import torch

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

TORCH_DTYPES: dict[str, torch.dtype] = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
}
"""Dtypes that the tensors of an encoded matrix may have."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes a tensor takes in a file; None for a dtype this version has not heard of."""
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        return None
    for size in shape:
        bits *= size
    return (bits + 7) // 8


__all__ = ["DTYPE_BITS", "DTYPE_NAMES", "TORCH_DTYPES", "tensor_bytes"]
