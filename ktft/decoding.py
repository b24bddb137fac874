"""Everything of a quantised checkpoint that is not a routed expert, decoded while transformers loads it.

:func:`state_dict` gives transformers' ``from_pretrained`` what it makes for itself of a checkpoint that is not
quantised: one object for each parameter, which becomes a tensor when it is indexed with ``...``. So its loader does all
that it does otherwise (names, casts, devices, ties, the report of what is missing), and no package of a quantiser is
needed. One matrix is decoded at a time: beside the result, its codes are in memory, and a few rows in fp32.

:func:`check_values` looks at every stored value before that.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from typing import Any

import torch
from safetensors import safe_open
from tqdm import tqdm

from ktft import formats
from ktft.buffers import release_freed
from ktft.checkpoint import Checkpoint
from ktft.expert_layout import ExpertSource
from ktft.mapping import CheckpointError

_decoding = threading.Lock()  # transformers loads in several threads; see the module on memory


class CodedSlice:
    """A matrix that is decoded when it is indexed, as a safetensors slice is read when it is indexed.

    Indexing gives [rows, cols], or [E, rows, cols] of a fused parameter, on the CPU.

    Attributes:
        dtype: what to decode to: bf16, fp16 or fp32.
        failure: why it could not be decoded.
    """

    def __init__(self, checkpoint: Checkpoint, source: ExpertSource, dtype: torch.dtype) -> None:
        self._checkpoint, self._source, self.dtype = checkpoint, source, dtype
        self.failure: CheckpointError | None = None

    def get_shape(self) -> list[int]:
        return list(self._source.shape)

    def get_dtype(self) -> str:
        """The safetensors name of what indexing gives."""
        return formats.DTYPE_NAMES[self.dtype]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Decode; ``index`` is applied to the result.

        Raises:
            CheckpointError: see :func:`ktft.formats.dequantize`; names the tensor.
        """
        with _decoding:
            if len(self._source.shape) == 2:
                out = self._decode(self._source)
            else:
                out = torch.empty(self._source.shape, dtype=self.dtype)
                for matrix, part in zip(out, self._source.parts(), strict=True):
                    matrix.copy_(self._decode(part))
            # What decoding used lies between the results in the C library's heap, which keeps it: measured on 120 MiB
            # of results, 240 MiB without this and 135 to 145 with it.
            release_freed()
            return out[index]

    def _decode(self, source: ExpertSource) -> torch.Tensor:
        try:
            return formats.dequantize(source.encoding, _read(self._checkpoint, source), self.dtype, source.base)
        except CheckpointError as error:
            self.failure = error
            raise


def _read(checkpoint: Checkpoint, source: ExpertSource) -> dict[formats.Role, torch.Tensor]:
    return {role: checkpoint.read(tensor) for role, tensor in source.tensors.items()}


def state_dict(
    checkpoint: Checkpoint, without: Collection[str], dtype: torch.dtype, keep_in_fp32: Iterable[str] = ()
) -> dict[str, Any]:
    """Parameter -> what ``from_pretrained`` takes as its value: a safetensors slice, or a :class:`CodedSlice`.

    Args:
        checkpoint: the files.
        without: parameters to leave out: those of the experts.
        dtype: of the model.
        keep_in_fp32: parts of names that the model has in fp32 nevertheless. The loader casts what it is given, and
            weights are rounded once, so these are decoded to fp32.
    """
    exact = tuple(keep_in_fp32)
    compute = dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32
    files: dict[Any, Any] = {}
    out: dict[str, Any] = {}
    for name in checkpoint.parameters:
        if name in without:
            continue
        if name in checkpoint.coded:
            to = torch.float32 if any(part in name for part in exact) else compute
            out[name] = CodedSlice(checkpoint, checkpoint.source(name), to)
        else:
            file = checkpoint.tensors[name].file
            if file not in files:
                files[file] = safe_open(file, framework="pt", device="cpu")
            out[name] = files[file].get_slice(name)
    return out


def check_values(checkpoint: Checkpoint, experts: Collection[str]) -> None:
    """Refuse NaN codes, scales that are not finite, and columns out of order, in the experts and whatever is coded.

    Reads and decodes every such matrix; shows a progress bar on a terminal.

    Args:
        checkpoint: the files.
        experts: parameters of the experts, which are checked even if they are plain.

    Raises:
        CheckpointError: names the tensor, and where in it.
    """
    sources = [checkpoint.source(name) for name in dict.fromkeys([*experts, *checkpoint.coded])]
    total = sum(tensor.size for source in sources for tensor in source.tensors.values())
    with tqdm(total=total, desc="Checking weights", unit="B", unit_scale=True, disable=None) as progress:
        for source in sources:
            for part in source.parts():
                formats.check_values(part.encoding, _read(checkpoint, part), part.base)
                progress.update(sum(tensor.size for tensor in part.tensors.values()))


__all__ = ["CodedSlice", "check_values", "state_dict"]
