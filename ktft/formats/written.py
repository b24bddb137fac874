"""The formats that ``ktft convert`` writes, and the ``quantization_config`` that tells other tools what they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ktft.formats.encoding import Encoding
from ktft.formats.fp4 import mxfp4
from ktft.formats.fp8 import fp8_block
from ktft.formats.integers import int_packed

WRITTEN: dict[str, Encoding] = {
    "fp8-block": fp8_block(),
    # Packed, because compressed-tensors' plain int8 (int-quantized) is for models whose activations are int8 as well.
    "int8": int_packed(8, 0),
    "int4-g32": int_packed(4, 32),
    "int4-g128": int_packed(4, 128),
    "mxfp4": mxfp4(),
}
"""Name -> encoding. fp8 is laid out as DeepSeek does, everything else as compressed-tensors does."""


def written_config(name: str, plain: Sequence[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint converted to a format of :data:`WRITTEN`.

    Args:
        name: the format.
        plain: modules that were left as they are, by their full names.
    """
    encoding = WRITTEN[name]
    if encoding.format == "fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(encoding.block),
            "modules_to_not_convert": list(plain),
        }
    is_float = encoding.format == "mxfp4"
    layout = "mxfp4-pack-quantized" if is_float else "pack-quantized"
    weights = {
        "num_bits": 8 if encoding.format == "int8" else 4,
        "type": "float" if is_float else "int",
        "symmetric": True,
        "strategy": "group" if encoding.group else "channel",
        "group_size": encoding.group or None,
        "dynamic": False,
        **({"scale_dtype": "torch.uint8"} if is_float else {}),
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "format": layout, "weights": weights}},
        "ignore": list(plain),
    }


__all__ = ["WRITTEN", "written_config"]
