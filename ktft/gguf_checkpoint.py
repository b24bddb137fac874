"""A GGUF file as a checkpoint, which answers what ``checkpoint.py`` does of a directory of safetensors files.

Parameters are called by their GGUF names. A layer's experts are mapped as they lie: ``ffn_gate_exps`` and
``ffn_up_exps`` [E, I, H], or ``ffn_gate_up_exps`` [E, 2I, H], and ``ffn_down_exps`` [E, H, I]. What the model's other
parameters are made of, and its config, is said in ``gguf_families.py``.
"""

from __future__ import annotations

from typing import Any

import torch

from ktft.checkpoint import Checkpoint
from ktft.expert_layout import Tensor
from ktft.formats import GGUF_BLOCKS, OTHER_BLOCKS, PLAIN_DTYPES, Detection, Encoding, StoredMatrix, gguf, matrix_of
from ktft.gguf_file import GgufModel, GgufTensor
from ktft.mapping import CheckpointError


class GgufCheckpoint(Checkpoint):
    """The tensors of a GGUF model, by name."""

    def __init__(self, model: GgufModel) -> None:
        """
        Raises:
            CheckpointError: a tensor is of a type that nothing here decodes; names it.
        """
        self.directory = model.path
        self._identities = model.identities
        self.tensors = {name: _stored(tensor) for name, tensor in model.tensors.items()}
        # Types say all there is to say: nothing is detected.
        blocks = {name: tensor for name, tensor in model.tensors.items() if tensor.type not in PLAIN_DTYPES}
        matrices = {name: self._matrix(name, gguf(tensor.type, "")) for name, tensor in blocks.items()}
        self.detection = Detection(matrices, ignored=frozenset())

    def _matrix(self, name: str, encoding: Encoding) -> StoredMatrix:
        matrix = matrix_of(encoding, {"codes": self.tensors[name]}, {"codes": name})
        return StoredMatrix(name, encoding, matrix, {"codes": name})

    def values(self, parameter: str) -> Any:
        """What transformers reads a parameter that is stored plainly by."""
        return PlainSlice(self, self.tensors[parameter])


def _stored(tensor: GgufTensor) -> Tensor:
    """As what it lies in the file: rows of elements, or of bytes."""
    if tensor.type in PLAIN_DTYPES:
        return Tensor(tensor.name, tensor.file, tensor.type, tensor.shape, tensor.begin)
    blocks = {**GGUF_BLOCKS, **OTHER_BLOCKS}
    if tensor.type not in blocks:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} is stored as {tensor.type}; expected one of "
            f"{', '.join([*PLAIN_DTYPES, *blocks])}. Use another file of this model."
        )
    _, columns, size = blocks[tensor.type]
    return Tensor(
        tensor.name, tensor.file, "U8", (*tensor.shape[:-1], tensor.shape[-1] // columns * size), tensor.begin
    )


class PlainSlice:
    """A tensor that is read when it is indexed, as a safetensors slice is."""

    def __init__(self, checkpoint: Checkpoint, tensor: Tensor) -> None:
        self._checkpoint, self._tensor = checkpoint, tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Its safetensors name."""
        return self._tensor.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        """
        Raises:
            CheckpointError: the file cannot be read.
        """
        return self._checkpoint.read(self._tensor)[index]


__all__ = ["GgufCheckpoint", "PlainSlice"]
