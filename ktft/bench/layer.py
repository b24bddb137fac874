"""The work of ``ktft bench experts``: one layer's experts in a real file, inputs, and routings that change.

The file is a safetensors checkpoint with one tensor for each matrix, as most families publish theirs, written expert by
expert and flushed to the disk before anything is timed. It is read back through ``ktft.checkpoint``, like any model's.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ktft.checkpoint import SINGLE_FILE, Checkpoint, ExpertTensor, Part
from ktft.formats import PLAIN_DTYPES
from ktft.mapping import FileMapping
from ktft.ops import MAX_RANK
from ktft.weights import PLAIN, ExpertWeights

PREFIX = "model.layers.0.mlp.experts"
ROTATION = 16
"""Routings taken in turn, so that a cache as large as one token's experts flatters nobody."""

_PARTS: tuple[tuple[Part, str], ...] = (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj"))


@dataclass(frozen=True)
class Shape:
    """One layer: H, I, E, k, the format of its weights on disk, and the rank of its LoRA (0: none)."""

    hidden: int
    intermediate: int
    experts: int
    topk: int
    format: str
    lora_rank: int

    def check(self) -> None:
        """Raise ValueError for what cannot be, naming the option."""
        if self.topk > self.experts:
            raise ValueError(f"--topk {self.topk} is more than --experts {self.experts}; a token takes an expert once")
        if self.lora_rank > MAX_RANK:
            raise ValueError(f"--lora-rank {self.lora_rank}: the kernels serve ranks up to {MAX_RANK}, and 0 for none")
        if self.format not in PLAIN:
            raise ValueError(f"--format {self.format} is not a format of expert weights; valid: {', '.join(PLAIN)}")

    @property
    def compute(self) -> torch.dtype:
        """dtype of the hidden states: fp32 for fp32 weights, else bf16."""
        return torch.float32 if self.format == "fp32" else torch.bfloat16

    @property
    def expert_bytes(self) -> int:
        """One expert's three matrices as stored."""
        return 3 * self.hidden * self.intermediate * PLAIN[self.format].itemsize

    def flop(self, tokens: int) -> int:
        """Operations of the base products of one pass: 2 for each multiply-add, three matrices, k experts a token."""
        return tokens * self.topk * 6 * self.hidden * self.intermediate


def write_layer(directory: Path, shape: Shape, seed: int = 0) -> None:
    """Write random experts, normal with deviation 0.02, to ``directory/model.safetensors``."""
    names = {code: name for name, code in PLAIN_DTYPES.items()}
    dtype = PLAIN[shape.format]
    header: dict[str, object] = {}
    size = shape.expert_bytes // 3
    position = 0
    for expert in range(shape.experts):
        for part, name in _PARTS:
            rows = [shape.hidden, shape.intermediate] if part == "down" else [shape.intermediate, shape.hidden]
            header[f"{PREFIX}.{expert}.{name}.weight"] = {
                "dtype": names[shape.format],
                "shape": rows,
                "data_offsets": [position, position + size],
            }
            position += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = torch.Generator().manual_seed(seed)
    with (directory / SINGLE_FILE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(3 * shape.experts):
            matrix = torch.empty(size // dtype.itemsize, dtype=dtype).normal_(0, 0.02, generator=generator)
            file.write(matrix.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())  # else the disk is still busy with it while we measure


def map_layer(directory: Path, shape: Shape) -> ExpertWeights:
    """The experts of :func:`write_layer`, mapped."""
    tensors = [
        ExpertTensor(f"{PREFIX}.{expert}.{name}.weight", part, expert)
        for expert in range(shape.experts)
        for part, name in _PARTS
    ]
    return Checkpoint(directory).expert_weights(
        PREFIX,
        tensors,
        num_experts=shape.experts,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
    )


def mapping_of(weights: ExpertWeights) -> FileMapping:
    """The one file the weights lie in."""
    assert isinstance(weights.owner, tuple)
    (mapping,) = weights.owner
    assert isinstance(mapping, FileMapping)
    return mapping


def touch(mapping: FileMapping) -> None:
    """Read a byte of every page, so that no timed call is the first to ask for one."""
    pages = (ctypes.c_uint8 * mapping.identity.size).from_address(mapping.address)
    int(np.ctypeslib.as_array(pages)[:: os.sysconf("SC_PAGE_SIZE")].sum(dtype=np.int64))


@dataclass(frozen=True)
class Routing:
    """Experts and weights of every token: int64 [T, k] and [T, k] in the compute dtype, rows summing to 1."""

    index: torch.Tensor
    weights: torch.Tensor

    def rows(self) -> torch.Tensor:
        """Rows of each expert that has any."""
        counts = self.index.flatten().bincount()
        return counts[counts > 0]


def routings(shape: Shape, tokens: int, kind: str, count: int = ROTATION, seed: int = 0) -> list[Routing]:
    """``count`` different routings of ``tokens`` tokens, the same for the same arguments.

    Args:
        shape: E and k.
        tokens: T.
        kind: "uniform": every expert as likely as another. "zipf": the n-th most popular expert 1/n as likely as the
            first; which experts are popular changes from one routing to the next.
        count: how many.
        seed: of the draw.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in ("uniform", "zipf"):
        raise ValueError(f"--routing {kind} is unknown; valid: uniform, zipf")
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        scores = torch.randn(tokens, shape.experts, generator=generator)
        if kind == "zipf":
            # The k greatest of log p + Gumbel noise are k draws from p without replacement.
            uniform = torch.rand(tokens, shape.experts, generator=generator).clamp(1e-12, 1 - 1e-7)
            ranks = torch.randperm(shape.experts, generator=generator) + 1
            chosen = (-ranks.log() - (-uniform.log()).log()).topk(shape.topk).indices
        else:
            chosen = scores.topk(shape.topk).indices
        weights = scores.gather(1, chosen).softmax(-1)
        out.append(Routing(chosen.contiguous(), weights.to(shape.compute)))
    return out


def rotation_for(tokens: int) -> int:
    """How many routings a token count gets; above a thousand tokens every routing touches everything anyway."""
    return ROTATION if tokens < 1024 else math.ceil(ROTATION / 4)


__all__ = [
    "PREFIX", "ROTATION", "Routing", "Shape", "map_layer", "mapping_of", "rotation_for", "routings", "touch",
    "write_layer",
]  # fmt: skip
