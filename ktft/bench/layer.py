"""The work of ``ktft bench experts``: one layer's experts in a real file, inputs, and routings that change.

The file is a safetensors checkpoint with tensors for each matrix of each expert, as most families publish theirs, in
one of the formats of ``stored.py``, and flushed to the disk before anything is timed. It is read back through
``ktft.checkpoint``, like any model's.
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

from ktft.bench.stored import FORMATS, random_values
from ktft.checkpoint import SINGLE_FILE, Checkpoint, ExpertTensor, Part, file_header, read_config
from ktft.formats import Role, encoded_headers, tensor_bytes
from ktft.mapping import FileMapping
from ktft.ops import MAX_RANK
from ktft.weights import ExpertWeights

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
        if self.format not in FORMATS:
            raise ValueError(f"--format {self.format} is not a format of expert weights; valid: {', '.join(FORMATS)}")
        try:
            _ = self.expert_bytes
        except ValueError as error:
            raise ValueError(f"--format {self.format}: {error}") from None

    @property
    def compute(self) -> torch.dtype:
        """dtype of the hidden states: fp32 for fp32 weights, else bf16."""
        return torch.float32 if self.format == "fp32" else torch.bfloat16

    @property
    def expert_bytes(self) -> int:
        """One expert's three matrices as stored: codes and scales, which is what the kernels read."""
        return sum(
            tensor_bytes(*header) or 0
            for part, _ in _PARTS
            for role, header in self.headers(part).items()
            if role in ("codes", "scales")
        )

    def size(self, part: Part) -> tuple[int, int]:
        """Rows and columns of a matrix."""
        return (self.hidden, self.intermediate) if part == "down" else (self.intermediate, self.hidden)

    def headers(self, part: Part) -> dict[Role, tuple[str, tuple[int, ...]]]:
        """Role -> safetensors dtype and shape of the tensors of one expert's matrix.

        Raises:
            ValueError: the format's groups do not divide it.
        """
        return encoded_headers(FORMATS[self.format].encoding, *self.size(part))

    def flop(self, tokens: int) -> int:
        """Operations of the base products of one pass: 2 for each multiply-add, three matrices, k experts a token."""
        return tokens * self.topk * 6 * self.hidden * self.intermediate


def write_layer(directory: Path, shape: Shape, seed: int = 0) -> None:
    """Write random experts to ``directory``: ``model.safetensors``, and ``config.json``, as far as loading needs it."""
    stored = FORMATS[shape.format]
    config = {} if stored.quantization_config is None else {"quantization_config": stored.quantization_config}
    (directory / "config.json").write_text(json.dumps(config))
    headers: dict[str, tuple[str, tuple[int, ...]]] = {}
    matrices: dict[str, tuple[Role, tuple[int, int]]] = {}
    for expert in range(shape.experts):
        for part, name in _PARTS:
            names = stored.encoding.names(f"{PREFIX}.{expert}.{name}")
            for role, header in shape.headers(part).items():
                headers[names[role]] = header
                matrices[names[role]] = role, shape.size(part)
    head, begins, _ = file_header(headers)
    with (directory / SINGLE_FILE).open("wb") as file:
        file.write(head)
        for number, name in enumerate(begins):
            role, size = matrices[name]
            if role == "shape":
                values = np.array(size, dtype=np.int64).view(np.uint8)
            else:
                values = random_values(stored.encoding, role, *headers[name], seed * len(headers) + number)
            file.write(values.data)
        file.flush()
        os.fsync(file.fileno())  # else the disk is still busy with it while we measure


def open_layer(directory: Path) -> Checkpoint:
    """The file of :func:`write_layer`."""
    return Checkpoint(directory, read_config(directory))


def map_layer(directory: Path, shape: Shape) -> ExpertWeights:
    """The experts of :func:`write_layer`, mapped."""
    tensors = [
        ExpertTensor(f"{PREFIX}.{expert}.{name}.weight", part, expert)
        for expert in range(shape.experts)
        for part, name in _PARTS
    ]
    return open_layer(directory).expert_weights(
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
    "PREFIX", "ROTATION", "Routing", "Shape", "map_layer", "mapping_of", "open_layer", "rotation_for", "routings",
    "touch", "write_layer",
]  # fmt: skip
