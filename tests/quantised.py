"""Tiny quantised checkpoints, as their publishers write them, and the same dequantised for stock transformers.

    written = write("qwen3_moe", "int4-g32", tmp_path)
    written.directory        # quantised: config.json with quantization_config, model.safetensors
    written.plain            # the same weights, decoded by ktft.formats to fp32, without quantization_config

Every linear layer is quantised but the router and the head, experts and the others alike.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ktft import formats
from ktft.formats import Encoding, Role
from ktft.formats.fp4 import e2m1_codes
from ktft.formats.fp8 import LARGEST
from ktft.weights import WITH_ZERO_POINTS
from tests.tiny_models import tiny_checkpoint

Tensors = dict[Role, torch.Tensor]
Config = dict[str, Any]

# Blocks of 128 divide every matrix of the first, and hardly any of the second; groups of 32 divide both.
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "whole": {
        "qwen3_moe": {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64},
        "deepseek_v3": {
            "hidden_size": 256,
            "intermediate_size": 384,
            "moe_intermediate_size": 128,
            "q_lora_rank": 128,
            "kv_lora_rank": 128,
            "qk_rope_head_dim": 128,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
        },
    },
    "edges": {
        "qwen3_moe": {"hidden_size": 160, "moe_intermediate_size": 96, "head_dim": 32},
        "deepseek_v3": {
            "hidden_size": 160,
            "intermediate_size": 224,
            "moe_intermediate_size": 96,
            "q_lora_rank": 96,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 32,
        },
    },
}

PLAIN = ["lm_head", "model.embed_tokens", r"re:.*(mlp|block_sparse_moe)\.gate$"]
LINEAR = re.compile(r".*(?<!embed_tokens)(?<!lm_head)(?<!mlp\.gate)(?<!block_sparse_moe\.gate)\.weight")


def compressed(layout: str, **weights: Any) -> Config:
    """The ``quantization_config`` of compressed-tensors."""
    group = {"targets": ["Linear"], "format": layout, "weights": {"symmetric": True, "dynamic": False} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": PLAIN,
    }


def modelopt(algorithm: str) -> Config:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "*.mlp.gate"]}


def encode(weight: torch.Tensor, encoding: Encoding) -> Tensors:
    """What ktft writes, and the nearest codes under plain scales of what it does not write."""
    if encoding.format in WITH_ZERO_POINTS:
        return _encode_with_zero_points(weight, encoding)
    if encoding.format == "nvfp4":
        return _encode_nvfp4(weight, encoding)
    if encoding.format == "fp8" and encoding.block == (0, 0):
        scale = (weight.float().abs().amax() / LARGEST).reshape(1)
        return {"codes": (weight.float() / scale).to(torch.float8_e4m3fn), "scales": scale}
    if encoding.format == "fp8" and encoding.block == (1, 32):
        exponents = torch.frexp(weight.float().unflatten(1, (-1, 32)).abs().amax(2)).exponent - 8
        codes = torch.ldexp(weight.float(), -exponents.repeat_interleave(32, 1)).to(torch.float8_e4m3fn)
        return {"codes": codes, "scales": (exponents + 127).to(torch.uint8)}
    return formats.encode(weight, encoding)


def _encode_nvfp4(weight: torch.Tensor, encoding: Encoding) -> Tensors:
    groups = weight.float().unflatten(1, (-1, 16))
    divisor = LARGEST * 6 / weight.float().abs().amax().reshape(1)
    scales = (groups.abs().amax(2) / 6 * divisor).to(torch.float8_e4m3fn)
    codes = e2m1_codes((groups / (scales.float() / divisor).clamp(min=1e-20)[..., None]).flatten(1))
    out: Tensors = {"codes": codes[:, ::2] | codes[:, 1::2] << 4, "scales": scales}
    if encoding == formats.nvfp4_modelopt():
        out["global_scale"] = (1 / divisor).reshape(())
    else:
        out["global_divisor"] = divisor
    return out


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight rows an AWQ word has from its lowest bits up."""


def _packed(values: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """[n, 8 m] of 0 to 15 -> int32 [n, m]."""
    words = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int32)
    for i, place in enumerate(order):
        words |= values[:, place::8].int() << 4 * i
    return words


def _encode_with_zero_points(weight: torch.Tensor, encoding: Encoding) -> Tensors:
    """The nearest codes between a group's least and largest weight, packed as GPTQ's and AWQ's writers do."""
    group = encoding.group or weight.shape[1]
    groups = weight.float().unflatten(1, (-1, group))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15).flatten(1)
    out: Tensors = {"scales": scales.t().contiguous()}
    if encoding.format == "awq":
        return out | {"codes": _packed(codes.t(), AWQ_ORDER), "zero_points": _packed(zeros.t(), AWQ_ORDER)}
    out["codes"] = _packed(codes, range(8)).t().contiguous()
    out["group_index"] = torch.arange(weight.shape[1], dtype=torch.int32) // group
    less_one = int(encoding.tensors[2].role == "zero_points_less_one")
    out[encoding.tensors[2].role] = _packed((zeros.t() - less_one) % 16, range(8))
    return out


def gptq(group: int, **more: Any) -> Config:
    return {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": False} | more


# name -> (encoding, quantization_config, the sizes that its groups divide)
WRITERS: dict[str, tuple[Encoding, Config, tuple[str, ...]]] = {
    "fp8-block": (
        formats.fp8_block(),
        formats.written_config("fp8-block", ["lm_head", "model.embed_tokens", "mlp.gate"]),
        ("whole", "edges"),
    ),
    "fp8-channel": (
        formats.fp8_channel(),
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        ("edges",),
    ),
    "fp8-tensor": (formats.fp8_tensor(), modelopt("FP8"), ("edges",)),
    "mxfp8": (formats.mxfp8(), modelopt("MXFP8"), ("edges",)),
    "int8": (formats.int_packed(8, 0), formats.written_config("int8", PLAIN), ("edges",)),
    "int8-plain": (
        formats.int8(),
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        ("edges",),
    ),
    "int4-g32": (formats.int_packed(4, 32), formats.written_config("int4-g32", PLAIN), ("whole", "edges")),
    "int4-g128": (formats.int_packed(4, 128), formats.written_config("int4-g128", PLAIN), ("whole",)),
    "mxfp4": (formats.mxfp4(), formats.written_config("mxfp4", PLAIN), ("whole", "edges")),
    "nvfp4-modelopt": (formats.nvfp4_modelopt(), modelopt("NVFP4"), ("edges",)),
    "nvfp4-compressed": (
        formats.nvfp4_compressed(),
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        ("edges",),
    ),
    "gptq-g32": (formats.gptq(32), gptq(32, checkpoint_format="gptq"), ("edges",)),
    "gptq-v2-channel": (formats.gptq(0, 2), gptq(-1, checkpoint_format="gptq_v2"), ("edges",)),
    "awq-g32": (
        formats.awq(32),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        ("edges",),
    ),
}
CASES = [(name, size) for name, (_, _, sizes) in WRITERS.items() for size in sizes]


@dataclass
class Written:
    """Attributes:
    directory, plain: see the module.
    matrices: base name -> tensors by role, of every quantised matrix.
    encoding: of all of them.
    """

    directory: Path
    plain: Path
    matrices: dict[str, Tensors]
    encoding: Encoding

    def decoded(self, base: str, dtype: torch.dtype) -> torch.Tensor:
        return formats.dequantize(self.encoding, self.matrices[base], dtype)

    def edit(self, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        """Rewrite the tensors."""
        path = self.directory / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    def edit_config(self, change: Callable[[Config], object]) -> None:
        path = self.directory / "config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))


Writer = Callable[[torch.Tensor], Tensors]


def write(
    family: str,
    name: str,
    directory: Path,
    size: str = "edges",
    *,
    writer: Writer | None = None,
    activations: bool = False,
    **overrides: Any,
) -> Written:
    """A quantised checkpoint in ``directory / "coded"`` and the dequantised one in ``directory / "plain"``.

    Args:
        family: qwen3_moe or deepseek_v3.
        name: a key of :data:`WRITERS`.
        directory: where to.
        size: a key of :data:`SIZES`.
        writer: gives a matrix's tensors; default what ktft itself writes.
        activations: add scales of activations and caches, which ktft has no use for.
        overrides: config fields.
    """
    plain = tiny_checkpoint(
        family, directory / "plain", **{"initializer_range": 0.06, **SIZES[size][family], **overrides}
    )
    return quantise(plain, name, writer=writer, activations=activations)


def quantise(plain: Path, name: str, *, writer: Writer | None = None, activations: bool = False) -> Written:
    """The checkpoint ``plain``, quantised, in a directory ``coded`` beside it; ``plain`` is left dequantised.

    Args:
        plain: with a config.json, a model.safetensors, and what else is to be copied.
        name, writer, activations: as for :func:`write`.
    """
    encoding, config, _ = WRITERS[name]
    coded = Path(shutil.copytree(plain, plain.parent / "coded"))
    tensors = load_file(plain / "model.safetensors")
    quantised: dict[str, torch.Tensor] = {}
    matrices: dict[str, Tensors] = {}
    for key, tensor in list(tensors.items()):
        if tensor.dim() != 2 or not LINEAR.fullmatch(key):
            quantised[key] = tensor
            continue
        base = key.removesuffix(".weight")
        matrices[base] = writer(tensor) if writer is not None else encode(tensor, encoding)
        for role, stored in matrices[base].items():
            quantised[encoding.names(base)[role]] = stored
        tensors[key] = formats.dequantize(encoding, matrices[base], torch.float32)
        if activations:
            quantised[f"{base}.input_scale"] = torch.ones(())
            if base.endswith("o_proj"):
                quantised[base.replace("o_proj", "k_proj.k_scale")] = torch.ones(())
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(quantised, coded / "model.safetensors", metadata={"format": "pt"})
    written = Written(coded, plain, matrices, encoding)
    written.edit_config(lambda c: c.update(quantization_config=config))
    return written
