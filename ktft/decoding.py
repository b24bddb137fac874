"""Everything of a quantised checkpoint that is not a routed expert, decoded while transformers loads it.

:func:`state_dict` gives transformers' ``from_pretrained`` what it makes for itself of a checkpoint that is not
quantised: one object for each parameter, which becomes a tensor when it is indexed with ``...``. So its loader does all
that it does otherwise (names, casts, devices, ties, the report of what is missing), and no package of a quantiser is
needed. One matrix is decoded at a time: beside the result, its codes are in memory, and a few rows in fp32. Where a
file's tensors are not the model's parameters, an :class:`Origin` says how these are made of those.

:func:`check_values` looks at every stored value before that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
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


@dataclass(frozen=True)
class Origin:
    """What a parameter of the model is made of.

    Attributes:
        sources: parameters of the checkpoint.
        shape: of the result.
        arrange: makes the result of them, in the order of ``sources``; None of one that lies as it should.
    """

    sources: tuple[str, ...]
    shape: tuple[int, ...]
    arrange: Callable[..., torch.Tensor] | None = None


class ArrangedSlice:
    """A parameter that is put together when it is indexed, of what each of the origin's sources is read by.

    Attributes:
        failure: why a part could not be read.
    """

    def __init__(self, origin: Origin, parts: list[Any]) -> None:
        self._origin, self._parts = origin, parts
        self.failure: CheckpointError | None = None

    def get_shape(self) -> list[int]:
        return list(self._origin.shape)

    def get_dtype(self) -> str:
        """The safetensors name of what indexing gives."""
        dtype: str = self._parts[0].get_dtype()
        return dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        """
        Raises:
            CheckpointError: a part could not be read or decoded.
        """
        try:
            parts = [part[...] for part in self._parts]
        except CheckpointError as error:
            self.failure = error
            raise
        whole = parts[0] if self._origin.arrange is None else self._origin.arrange(*parts)
        out: torch.Tensor = whole.reshape(self._origin.shape)[index]
        return out


def failure(values: Iterable[Any]) -> CheckpointError | None:
    """Why one of the values that :func:`state_dict` gave could not be read, if so."""
    slices = (value for value in values if isinstance(value, (ArrangedSlice, CodedSlice)))
    return next((value.failure for value in slices if value.failure is not None), None)


def _read(checkpoint: Checkpoint, source: ExpertSource) -> dict[formats.Role, torch.Tensor]:
    return {role: checkpoint.read(tensor) for role, tensor in source.tensors.items()}


def state_dict(
    checkpoint: Checkpoint,
    origins: Mapping[str, Origin | None],
    dtype: torch.dtype,
    keep_in_fp32: Iterable[str] = (),
) -> dict[str, Any]:
    """Parameter -> what ``from_pretrained`` takes as its value: a safetensors slice, or something like it.

    Args:
        checkpoint: the files.
        origins: parameter of the model -> what it is made of; None: the checkpoint's parameter of the same name.
        dtype: of the model.
        keep_in_fp32: parts of names that the model has in fp32 nevertheless. The loader casts what it is given, and
            weights are rounded once, so these are decoded to fp32.
    """
    exact = tuple(keep_in_fp32)
    compute = dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32

    def values(source: str, parameter: str) -> Any:
        if source not in checkpoint.coded:
            return checkpoint.values(source)
        to = torch.float32 if any(part in parameter for part in exact) else compute
        return CodedSlice(checkpoint, checkpoint.source(source), to)

    return {
        parameter: values(parameter, parameter)
        if origin is None
        else ArrangedSlice(origin, [values(source, parameter) for source in origin.sources])
        for parameter, origin in origins.items()
    }


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


__all__ = ["ArrangedSlice", "CodedSlice", "Origin", "check_values", "failure", "state_dict"]
