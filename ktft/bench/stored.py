"""The formats that ``ktft bench experts`` writes layers in: random codes, and scales that make weights of about 0.02.

Speed does not depend on which codes they are, so nothing is encoded. Layouts and configs are those of published
checkpoints, which the loader reads like any other's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ktft import formats
from ktft.formats import Encoding, Role


@dataclass(frozen=True)
class Stored:
    """A format on disk: of each matrix, and what ``config.json`` says of it (None: nothing)."""

    encoding: Encoding
    quantization_config: dict[str, Any] | None = None


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "float", **weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


FORMATS: dict[str, Stored] = {
    **{name: Stored(formats.plain(dtype)) for dtype, name in formats.PLAIN_DTYPES.items()},
    **{name: Stored(encoding, formats.written_config(name, [])) for name, encoding in formats.WRITTEN.items()},
    "fp8-channel": Stored(formats.fp8_channel(), _compressed("float-quantized", num_bits=8, strategy="channel")),
    "mxfp8": Stored(formats.mxfp8(), _compressed("mxfp8-quantized", num_bits=8, group_size=32)),
    "nvfp4": Stored(formats.nvfp4_compressed(), _compressed("nvfp4-pack-quantized", num_bits=4, group_size=16)),
}
"""Name -> format, of everything that ``--format`` takes."""

_WEIGHT = 0.02
_CODES = {"fp8": 100.1, "int8": 73.9, "int4": 4.64, "mxfp4": 2.93, "nvfp4": 2.93}
"""Root of the mean square of all codes' numbers."""


def random_values(encoding: Encoding, role: Role, dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """The bytes of one tensor of a matrix, uint8.

    Plain weights are normal. Codes are any but NaN; scales differ, by up to half of their mean, where they are floats.

    Args:
        encoding: how the matrix is stored.
        role: which tensor of it.
        dtype: its safetensors dtype.
        shape: its shape.
        seed: of the draw.
    """
    random = np.random.default_rng(seed)
    count, torch_dtype = int(np.prod(shape)), formats.TORCH_DTYPES[dtype]
    if role == "codes" and dtype in formats.PLAIN_DTYPES:
        generator = torch.Generator().manual_seed(seed)
        return _bytes(torch.empty(count, dtype=torch_dtype).normal_(0, _WEIGHT, generator=generator))
    if role == "codes":
        codes = random.integers(0, 256, count * torch_dtype.itemsize, dtype=np.uint8)
        if dtype == "F8_E4M3":
            codes[codes & 0x7F == 0x7F] = 0
        return codes
    if role == "shape":
        raise ValueError("the sizes of a matrix are not random")
    scale = _WEIGHT / _CODES[encoding.format]
    if role == "global_divisor":
        return _bytes(torch.full((count,), 1 / scale, dtype=torch_dtype))
    if role == "scales" and dtype == "U8":
        return random.integers(-1, 2, count, dtype=np.int8).view(np.uint8) + np.uint8(127 + round(np.log2(scale)))
    mean = 1.0 if encoding.format == "nvfp4" else scale
    return _bytes(torch.from_numpy(mean * random.uniform(0.5, 1.5, count)).to(torch_dtype))


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    out: np.ndarray = tensor.view(torch.uint8).numpy()
    return out


__all__ = ["FORMATS", "Stored", "random_values"]
