"""Addresses, strides and scales of one matrix of every expert, from where its tensors lie in mapped files.

This is where a format's description (``ktft.formats.Encoding``) becomes what the kernels take (``ktft.weights``).
Nothing is read but the numbers that NVFP4 has once per matrix, and the order of GPTQ's columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ktft.formats import DTYPE_BITS, TORCH_DTYPES, Encoding, Matrix, Role, check_order, tensor_bytes
from ktft.mapping import CheckpointError, FileMapping
from ktft.weights import BLOCKS, CODED, PLAIN, WITH_ZERO_POINTS, ExpertMatrices, Scales, ZeroPoints


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file; ``begin`` is its first byte counted from the start of the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def size(self) -> int:
        """Bytes; 0 for a dtype that this version has not heard of."""
        return tensor_bytes(self.dtype, self.shape) or 0

    def part(self, index: int) -> Tensor:
        """What the tensor has at ``index`` of its first dimension, in whole bytes."""
        shape = self.shape[1:]
        return replace(self, shape=shape, begin=self.begin + index * (tensor_bytes(self.dtype, shape) or 0))


@dataclass(frozen=True)
class ExpertSource:
    """A parameter: one expert's matrix, or those of E experts one after another, with the tensors it consists of.

    Attributes:
        base: what stands before the tensors' suffixes.
        encoding: how it is stored; plain included.
        shape: [rows, cols] or [E, rows, cols], of the weights.
        tensors: those that are there.
    """

    base: str
    encoding: Encoding
    shape: tuple[int, ...]
    tensors: dict[Role, Tensor]

    @property
    def as_what(self) -> str:
        """For errors: where the shape of the weights is not that of the codes."""
        return f" as {self.encoding}" if self.encoding.format not in PLAIN else ""

    def parts(self) -> list[ExpertSource]:
        """One for each expert; itself if it is of one."""
        if len(self.shape) == 2:
            return [self]
        return [
            replace(self, shape=self.shape[1:], tensors={role: tensor.part(e) for role, tensor in self.tensors.items()})
            for e in range(self.shape[0])
        ]


@dataclass(frozen=True)
class Place:
    """Which rows of a stored matrix are meant: ``first``, ``first + step``, …; columns where it is the transpose.
    ``step`` is 1 or 2."""

    first: int = 0
    step: int = 1
    transposed: bool = False


def fused_rows(intermediate: int, interleaved: bool) -> tuple[slice, slice]:
    """Which rows of 2I belong to gate, and which to up; see :class:`~ktft.experts.ExpertNames`."""
    if interleaved:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, intermediate, 1), slice(intermediate, None, 1)


_SCALE_FORMATS = {"F32": "fp32", "BF16": "bf16", "F16": "fp16", "F8_E8M0": "e8m0", "U8": "e8m0", "F8_E4M3": "e4m3"}


def describe(
    sources: Sequence[ExpertSource], mappings: Mapping[Path, FileMapping], experts: int, place: Place
) -> ExpertMatrices:
    """One matrix of every expert.

    Args:
        sources: one parameter for each expert, all stored alike, or one [E, rows, cols].
        mappings: of the files that they lie in.
        experts: E.
        place: which part of the stored matrices it is.

    Raises:
        CheckpointError: the format, or this part of a matrix in it, is not one that the kernels take, or its columns
            are not in order; names the tensor.
    """
    source = sources[0]
    codes = source.tensors["codes"]
    name = source.encoding.format
    if name == "int8" and codes.dtype == "I8":
        name = "int8_plain"
    if name not in {*PLAIN, *CODED, *BLOCKS}:
        raise CheckpointError(
            f"{codes.file}: expert tensor {codes.name!r} is stored as {name}, which ktft does not compute with; "
            f"expected {', '.join([*PLAIN, *sorted(CODED), *BLOCKS])}. Use another published version of this model."
        )
    if name in WITH_ZERO_POINTS:
        if place != Place():
            raise _refused(codes, source, "in one tensor", "rows")
        return _describe_with_zero_points(sources, mappings)
    rows, cols = source.shape[-2:]
    row_bytes = codes.size // math.prod(source.shape[:-1])
    begin, stride = place.first * row_bytes, place.step * row_bytes
    if place.transposed:
        bits = place.first * row_bytes * 8 // cols
        if (place.step != 1 and name not in PLAIN) or bits % 8:
            raise _refused(codes, source, "interleaved" if place.step != 1 else "beginning inside a byte", "columns")
        begin, stride = bits // 8, row_bytes
    for one in sources:
        _check_alignment(one.tensors["codes"], name)
    return ExpertMatrices(
        _addresses(sources, "codes", mappings, experts, rows * row_bytes) + begin,
        stride,
        name,
        place.transposed,
        _scales(sources, mappings, experts, place) if "scales" in source.tensors else None,
        column_step=place.step if place.transposed else 1,
    )


def _describe_with_zero_points(sources: Sequence[ExpertSource], mappings: Mapping[Path, FileMapping]) -> ExpertMatrices:
    """One matrix of every expert, whose tensors hold the transpose, [cols, rows]. Columns are checked to be in order:
    in order of activation, every weight would be another's."""
    source = sources[0]
    codes, scales = source.tensors["codes"], source.tensors["scales"]
    if len(source.shape) != 2:
        raise CheckpointError(
            f"{codes.file}: expert tensor {codes.name!r} ({source.encoding}, {list(source.shape)}) holds those of "
            f"{source.shape[0]} experts, which ktft reads in this format from a tensor for each expert only; use "
            "another published version of this model"
        )
    for one in sources:
        _check_column_order(one, mappings)
    role: Role = "zero_points" if "zero_points" in source.tensors else "zero_points_less_one"
    zeros = source.tensors[role]

    def found(role: Role) -> np.ndarray:
        return _addresses(sources, role, mappings, len(sources), 0)

    def stride(tensor: Tensor) -> int:
        return tensor.size // tensor.shape[0]

    group = source.encoding.group or source.shape[1]
    return ExpertMatrices(
        found("codes"),
        stride(codes),
        source.encoding.format,
        transposed=True,
        scales=Scales(found("scales"), stride(scales), _SCALE_FORMATS[scales.dtype], rows=group, columns=1),
        zero_points=ZeroPoints(found(role), stride(zeros), role == "zero_points_less_one"),
    )


def _check_column_order(source: ExpertSource, mappings: Mapping[Path, FileMapping]) -> None:
    tensor = source.tensors.get("group_index")
    if tensor is None:
        return
    data = bytearray(mappings[tensor.file].read(tensor.begin, tensor.size))
    index = torch.frombuffer(data, dtype=TORCH_DTYPES[tensor.dtype])
    try:
        check_order(source.encoding, {"group_index": index}, Matrix(*source.shape), source.base)
    except CheckpointError as error:
        raise CheckpointError(f"{tensor.file}: {error}") from None


def _scales(
    sources: Sequence[ExpertSource], mappings: Mapping[Path, FileMapping], experts: int, place: Place
) -> Scales:
    source = sources[0]
    tensor = source.tensors["scales"]
    rows, cols = source.shape[-2:]
    block_rows, block_cols = source.encoding.block
    width = DTYPE_BITS[tensor.dtype] // 8
    row_bytes = -(-cols // (block_cols or cols)) * width
    of_expert = -(-rows // (block_rows or rows)) * row_bytes
    begin, first_row, stride = 0, 0, row_bytes if block_rows else 0
    shared_rows, shared_cols = block_rows or rows, block_cols or cols
    if place.transposed:
        if block_cols and place.first % block_cols:
            raise _refused(tensor, source, "beginning inside a block", "columns")
        begin = place.first // block_cols * width if block_cols else 0
    elif place.step == 1 and block_rows:
        begin, first_row = place.first // block_rows * row_bytes, place.first % block_rows
    elif block_rows == 1:
        begin, stride = place.first * row_bytes, place.step * row_bytes
    elif block_rows:
        if block_rows % place.step:
            raise _refused(tensor, source, "interleaved", "rows")
        shared_rows = block_rows // place.step
    factors = _factors(sources, mappings, experts)
    return Scales(
        _addresses(sources, "scales", mappings, experts, of_expert) + begin,
        stride,
        _SCALE_FORMATS[tensor.dtype],
        shared_rows,
        shared_cols,
        first_row,
        factors,
        "global_divisor" in source.tensors,
    )


def _addresses(
    sources: Sequence[ExpertSource], role: Role, mappings: Mapping[Path, FileMapping], experts: int, of_expert: int
) -> np.ndarray:
    """int64 [E]: where each expert's tensor begins; ``of_expert`` bytes apart if it is one tensor."""
    found = [source.tensors[role] for source in sources]
    begins = np.array([mappings[tensor.file].address + tensor.begin for tensor in found], dtype=np.int64)
    return begins if len(sources) > 1 or experts == 1 else begins + np.arange(experts, dtype=np.int64) * of_expert


def _factors(sources: Sequence[ExpertSource], mappings: Mapping[Path, FileMapping], experts: int) -> np.ndarray | None:
    """float32 [E]: the numbers that are there once per matrix, read from the files."""
    roles: tuple[Role, ...] = ("global_scale", "global_divisor")
    for role in roles:
        if role not in sources[0].tensors:
            continue
        tensors = [source.tensors[role] for source in sources]
        values = [np.frombuffer(mappings[t.file].read(t.begin, t.size), dtype="<f4") for t in tensors]
        factors = np.concatenate(values).astype(np.float32)
        for e in range(experts):
            if not np.isfinite(factors[e]) or (role == "global_divisor" and factors[e] == 0):
                tensor = tensors[e if len(tensors) > 1 else 0]
                raise CheckpointError(
                    f"{tensor.file}: tensor {tensor.name!r} is {factors[e]}{'' if len(tensors) > 1 else f' at {e}'}; "
                    "expected a finite number that is not 0; the file is damaged"
                )
        return factors
    return None


def _check_alignment(codes: Tensor, name: str) -> None:
    """Plain weights are read as what they are; codes and scales byte by byte, from wherever they begin."""
    size = PLAIN[name].itemsize if name in PLAIN else 1
    if codes.begin % size:
        raise CheckpointError(
            f"{codes.file}: expert tensor {codes.name!r} begins at byte {codes.begin}; expected a multiple of {size}. "
            "Write the file again with a current safetensors library."
        )


def _refused(tensor: Tensor, source: ExpertSource, how: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{tensor.file}: expert tensor {tensor.name!r} ({source.encoding}, {list(source.shape)}) holds gate and up "
        f"{how} along its {what}, which ktft cannot read in this format; use another published version of this model"
    )


__all__ = ["ExpertSource", "Place", "Tensor", "describe", "fused_rows"]
