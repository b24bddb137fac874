"""Experts with random codes and scales in every coded format, described in memory as files have them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from ktft import formats
from ktft.formats import Encoding
from ktft.weights import BLOCKS, WITH_ZERO_POINTS, ExpertMatrices, ExpertWeights, Scales, ZeroPoints

SCALE_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "e8m0",
    torch.float8_e4m3fn: "e4m3",
}

# name -> (encoding, dtype of the scales)
ENCODINGS: dict[str, tuple[Encoding, torch.dtype]] = {
    "fp16": (formats.plain("F16"), torch.float32),
    "fp8-block": (formats.fp8_block(), torch.float32),
    "fp8-block-bf16": (formats.fp8_block((32, 48)), torch.bfloat16),
    "fp8-channel": (formats.fp8_channel(), torch.float16),
    "fp8-tensor": (formats.fp8_tensor(), torch.float32),
    "mxfp8": (formats.mxfp8(), torch.uint8),
    "int8-channel": (formats.int_packed(8, 0), torch.bfloat16),
    "int8-plain": (formats.int8(), torch.bfloat16),
    "int8-plain-32": (formats.int8(32), torch.float32),
    "int8-32": (formats.int_packed(8, 32), torch.float32),
    "int4-32": (formats.int_packed(4, 32), torch.bfloat16),
    "int4-128": (formats.int_packed(4, 128), torch.float16),
    "mxfp4": (formats.mxfp4(), torch.uint8),
    "nvfp4-multiplied": (formats.nvfp4_modelopt(), torch.float8_e4m3fn),
    "nvfp4-divided": (formats.nvfp4_compressed(), torch.float8_e4m3fn),
    "gptq-32": (formats.gptq(32), torch.float16),
    "gptq-v2-channel": (formats.gptq(0, 2), torch.bfloat16),
    "awq-32": (formats.awq(32), torch.float16),
    "awq-channel": (formats.awq(0), torch.float32),
    **{f"gguf-{kind.lower()}": (formats.gguf(kind), torch.float16) for kind in formats.GGUF_BLOCKS},
}

_HALVES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}
"""Where the blocks of a GGUF type have fp16 numbers."""


def gguf_rows(kind: str, rows: int, cols: int, generator: torch.Generator) -> torch.Tensor:
    """Random blocks of a GGUF type, uint8 [rows, bytes of a row], with scales that are finite and moderate."""
    _, columns, size = formats.GGUF_BLOCKS[kind]
    blocks = torch.randint(0, 256, (rows, cols // columns, size), generator=generator, dtype=torch.uint8)
    for byte in _HALVES[kind]:  # magnitudes below 2
        blocks[..., byte + 1] &= 0xBF
    if kind == "MXFP4":
        blocks[..., 0] = blocks[..., 0] % 9 + 118
    return blocks.flatten(1)


def _tensors(encoding: Encoding, scale: torch.dtype, rows: int, cols: int, generator: torch.Generator):
    """Random tensors of one matrix, by role."""
    kind = next((kind for kind, entry in formats.GGUF_BLOCKS.items() if entry[0] == encoding.format), None)
    if kind is not None:
        return {"codes": gguf_rows(kind, rows, cols, generator)}
    out = {}
    for tensor in encoding.tensors:
        shape = [dimension.size(rows, cols) for dimension in tensor.shapes[0]]
        if tensor.role == "group_index":
            continue
        bytes_ = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        if tensor.role == "shape":
            out["shape"] = torch.tensor([rows, cols])
        elif tensor.role == "codes" and encoding.format == "fp16":
            out["codes"] = torch.randn(shape, generator=generator).half()
        elif tensor.role == "codes" and encoding.format == "fp8":
            out["codes"] = torch.where(bytes_ & 0x7F == 0x7F, 0, bytes_).view(torch.float8_e4m3fn)
        elif tensor.dtypes[0] == "I32":
            out[tensor.role] = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
        elif tensor.role == "codes":
            out["codes"] = bytes_.view(torch.int8) if tensor.dtypes == ("I8",) else bytes_
        elif tensor.role in ("global_scale", "global_divisor"):
            out[tensor.role] = torch.rand(shape, generator=generator) + 0.3
        elif scale == torch.uint8:
            out["scales"] = torch.randint(118, 127, shape, generator=generator, dtype=torch.uint8)
        else:
            out["scales"] = (0.01 + 0.05 * torch.rand(shape, generator=generator)).to(scale)
    return out


def _matrices(encoding: Encoding, scale: torch.dtype, found: list[dict[str, torch.Tensor]], rows: int, cols: int):
    codes = [tensors["codes"] for tensors in found]
    addresses = np.array([t.data_ptr() for t in codes], dtype=np.int64)
    stride = codes[0].stride(0) * codes[0].element_size()
    if encoding.format == "fp16" or encoding.format in BLOCKS:
        return ExpertMatrices(addresses, stride, encoding.format)
    scales = [tensors["scales"] for tensors in found]
    factor = next((role for role in ("global_scale", "global_divisor") if role in found[0]), None)
    factors = None
    if factor is not None:
        factors = np.array([float(tensors[factor].reshape(())) for tensors in found], dtype=np.float32)
    block_rows, block_cols = encoding.block
    zeros = None
    if encoding.format in WITH_ZERO_POINTS:  # the transpose: columns share scales, rows do not
        block_rows, block_cols, rows = block_cols, 1, cols
        role = encoding.tensors[2].role
        found_zeros = [tensors[role] for tensors in found]
        zeros = ZeroPoints(
            np.array([t.data_ptr() for t in found_zeros], dtype=np.int64),
            found_zeros[0].shape[1] * 4,
            role == "zero_points_less_one",
        )
    row_bytes = scales[0].numel() // scales[0].shape[0] * scales[0].element_size() if scales[0].dim() else 0
    return ExpertMatrices(
        addresses,
        stride,
        "int8_plain" if codes[0].dtype == torch.int8 else encoding.format,
        zeros is not None,
        zero_points=zeros,
        scales=Scales(
            np.array([t.data_ptr() for t in scales], dtype=np.int64),
            row_bytes if block_rows else 0,
            SCALE_NAMES[scale],
            block_rows or rows,
            block_cols or cols,
            factors=factors,
            divides=factor == "global_divisor",
        ),
    )


def odd_size(name: str, about: int) -> int:
    """A size near ``about`` that as few powers of two divide as the format allows for rows and columns alike."""
    encoding = ENCODINGS[name][0]
    tensors = encoding.tensors[:1] if encoding.edges else encoding.tensors
    units = [dimension.per for tensor in tensors for dimension in tensor.shapes[0]]
    unit = math.lcm(*units, *(1 if encoding.edges else size or 1 for size in encoding.block))
    return unit * (about // unit | 1)


def coded_experts(
    name: str,
    experts: int,
    hidden: int,
    intermediate: int,
    dtype: torch.dtype,
    seed: int = 0,
    placed: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
):
    """The experts, and the same decoded by the reference: (coded, plain), whose bits must agree in every product.

    ``placed`` says where each stored tensor lies: it returns a copy of it.
    """
    encoding, scale = ENCODINGS[name]
    generator = torch.Generator().manual_seed(seed)
    described, decoded, held = [], [], []
    for rows, cols in ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate)):
        found = [
            {role: placed(tensor) for role, tensor in _tensors(encoding, scale, rows, cols, generator).items()}
            for _ in range(experts)
        ]
        described.append(_matrices(encoding, scale, found, rows, cols))
        decoded.append(torch.stack([formats.dequantize(encoding, tensors, dtype) for tensors in found]))
        held.append(found)
    coded = ExpertWeights(*described, hidden_size=hidden, intermediate_size=intermediate, owner=held)
    if coded.gate.transposed:  # the order of additions is another then
        decoded = [matrices.transpose(1, 2).contiguous() for matrices in decoded]
    return coded, ExpertWeights.from_tensors(*decoded, transposed=coded.gate.transposed)
