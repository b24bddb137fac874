"""A checkpoint directory as ``ktft convert`` sees it: one matrix for each expert and projection, wherever it lies in
the files, and every other parameter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ktft import families
from ktft.checkpoint import INDEX_FILE, MODELOPT_FILE, Checkpoint, CheckpointError, ExpertTensor, weight_files
from ktft.decoding import CodedSlice
from ktft.expert_layout import ExpertSource, Tensor
from ktft.formats import TORCH_DTYPES
from ktft.gguf_file import find_gguf
from ktft.model import Outline, map_experts, read_outline
from ktft.weights import PLAIN

CHUNK = 8 << 20
"""Bytes of a tensor that are in memory at a time where its values do not matter."""

Projection = Literal["gate", "up", "down"]

_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ot")


@dataclass(frozen=True)
class ExpertMatrix:
    """One projection of one expert: gate or up [I, H], or down [H, I].

    Attributes:
        module: path of the experts module.
        expert, projection: which one.
        source: the stored matrix that it lies in, of this expert alone.
        first, rows: the rows that it has of the stored matrix, or of its transpose.
        transposed: the file holds the transpose.
    """

    module: str
    expert: int
    projection: Projection
    source: ExpertSource
    first: int
    rows: int
    transposed: bool

    def of(self, stored: torch.Tensor) -> torch.Tensor:
        """The matrix, of the stored one's values."""
        return (stored.t() if self.transposed else stored)[self.first : self.first + self.rows]


Key = tuple[str, int, Projection]


@dataclass(frozen=True)
class Source:
    """A checkpoint.

    Attributes:
        directory: where it lies.
        outline: config, stock model, experts modules.
        checkpoint: its tensors.
        experts: (module, expert, projection) -> matrix, of every expert.
        others: every parameter that is no expert's.
    """

    directory: Path
    outline: Outline
    checkpoint: Checkpoint
    experts: dict[Key, ExpertMatrix]
    others: list[str]

    def decoded(self, source: ExpertSource, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A parameter's values, in ``dtype``; default its own if it is plain, and fp32 if it is coded."""
        return CodedSlice(self.checkpoint, source, dtype or PLAIN.get(source.encoding.format, torch.float32))[...]


def open_source(directory: Path) -> Source:
    """Read the headers of a checkpoint, and check them as loading would.

    Raises:
        UnsupportedModelError: ktft cannot compute this family's experts.
        CheckpointError: the directory does not hold a complete checkpoint, or experts that cannot be converted.
        ValueError: it is no directory, or one of a GGUF model.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; expected one with config.json and safetensors files")
    if find_gguf(directory) is not None:
        raise ValueError(f"{directory} holds a GGUF model; expected a directory with config.json and safetensors files")
    outline = read_outline(directory)
    checkpoint = Checkpoint(directory, outline.config_file)
    for tensor in checkpoint.tensors.values():
        if tensor.dtype not in TORCH_DTYPES and not tensor.size and all(tensor.shape):
            raise CheckpointError(f"{tensor.file}: tensor {tensor.name!r} has dtype {tensor.dtype}, which is not known")
    for name, stock in outline.modules.items():
        if stock.biased or stock.names.interleaved:
            raise CheckpointError(
                f"{directory}: the experts of {name} have biases, or gate's and up's rows in turn, and ktft convert "
                f"writes matrices of single experts without; {outline.config.model_type} cannot be converted. It can "
                "be loaded and trained as it is"
            )
    tensors = families.expert_tensors(outline.stock, outline.modules, checkpoint.parameters)
    mapped = map_experts(checkpoint, outline.modules, tensors)
    experts: dict[Key, ExpertMatrix] = {}
    for module, found in tensors.items():
        for part in found:
            # What is decoded of a single matrix is [rows, cols] even where its tensors hold the transpose (GPTQ, AWQ).
            transposed = part.expert is None and mapped[module].gate.transposed
            for matrix in _matrices(checkpoint, module, part, outline.modules[module].intermediate_size, transposed):
                experts[matrix.module, matrix.expert, matrix.projection] = matrix
    keys = {tensor.key for found in tensors.values() for tensor in found}
    others = [name for name in checkpoint.parameters if name not in keys]
    return Source(directory, outline, checkpoint, experts, others)


def _matrices(
    checkpoint: Checkpoint, module: str, tensor: ExpertTensor, intermediate: int, transposed: bool
) -> Iterator[ExpertMatrix]:
    source = checkpoint.source(tensor.key)
    first = 0 if tensor.expert is None else tensor.expert
    for expert, part in enumerate(source.parts(), first):
        rows = part.shape[1] if transposed else part.shape[0]
        if tensor.part == "gate_up":
            yield ExpertMatrix(module, expert, "gate", part, 0, intermediate, transposed)
            yield ExpertMatrix(module, expert, "up", part, intermediate, intermediate, transposed)
        elif tensor.part in ("gate", "up", "down"):
            yield ExpertMatrix(module, expert, tensor.part, part, 0, rows, transposed)


def chunks(tensor: Tensor) -> Iterator[np.ndarray]:
    """The bytes of a tensor, :data:`CHUNK` at a time.

    Raises:
        CheckpointError: the file cannot be read, or is shorter than it was.
    """
    try:
        with tensor.file.open("rb", buffering=0) as file:
            file.seek(tensor.begin)
            for begin in range(0, tensor.size, CHUNK):
                size = min(CHUNK, tensor.size - begin)
                data = np.fromfile(file, dtype=np.uint8, count=size)
                if len(data) != size:
                    raise CheckpointError(f"{tensor.file} was truncated while it was being read")
                yield data
    except OSError as error:
        raise CheckpointError(f"cannot read {tensor.file}: {error.strerror}") from None


def other_files(directory: Path) -> tuple[list[str], list[str]]:
    """Files beside the weights, the index and the config: those that belong to the model, and other weights.

    Both relative to the directory, sorted. Hidden files, and what is in hidden directories, are neither.
    """
    own = {*weight_files(directory), INDEX_FILE, MODELOPT_FILE, "config.json"}
    files: list[str] = []
    weights: list[str] = []
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            relative = os.path.relpath(os.path.join(folder, name), directory)
            if name.startswith(".") or relative in own:
                continue
            is_weights = name.endswith(_OTHER_WEIGHTS) or name.endswith(".index.json")
            (weights if is_weights else files).append(relative)
    return sorted(files), sorted(weights)


__all__ = ["CHUNK", "ExpertMatrix", "Key", "Projection", "Source", "chunks", "open_source", "other_files"]
