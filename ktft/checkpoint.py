"""From a directory of safetensors files to addresses of expert weights, without reading them.

:class:`Checkpoint` parses the headers of ``model.safetensors`` or of every shard that
``model.safetensors.index.json`` names, checks them strictly, finds out how each matrix is stored (``ktft.formats``),
and turns expert tensors into :class:`~ktft.weights.ExpertWeights` over read-only, shared file mappings:

    per expert    {prefix}.{e}.gate_proj.weight [I, H], up likewise, down [H, I]
    stacked       gate and up [E, I, H], down [E, H, I]
    fused         gate_up [E, 2I, H] (gate rows first, or gate and up rows in turn) and down [E, H, I]
    transposed    gate_up [E, H, 2I] and down [E, I, H]; told from the shapes in the files
    biases        gate_up [E, 2I], in the order of its rows, and down [E, H]; copied to fp32

A *parameter* is what a weight is called where nothing is quantised: a matrix whose codes are ``x.weight_packed``, with
``x.weight_scale`` beside them, is the parameter ``x.weight``; a plain tensor is a parameter by its own name.

Mapping itself is ``mapping.py``'s, addresses of parts of tensors are ``expert_layout.py``'s. This module knows nothing
of model families: which parameter is which expert's is told to it (``families.py``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import numpy as np
import torch
from safetensors import safe_open

from ktft.activation import SWIGLU, Activation
from ktft.expert_layout import ExpertSource, Place, Tensor, describe, fused_rows
from ktft.formats import (
    DTYPE_BITS,
    PLAIN_DTYPES,
    TORCH_DTYPES,
    Detection,
    StoredMatrix,
    detect,
    plain,
    quantization_config,
    read_scheme,
    tensor_bytes,
)
from ktft.mapping import CheckpointError, FileIdentity, FileMapping, check_mapped, map_file
from ktft.weights import PLAIN, ExpertMatrices, ExpertWeights

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MODELOPT_FILE = "hf_quant_config.json"
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library itself


Part = Literal["gate", "up", "down", "gate_up", "gate_up_bias", "down_bias"]


@dataclass(frozen=True)
class ExpertTensor:
    """Which part of a layer's experts a parameter holds: of one expert, or of all of them (``expert`` None)."""

    key: str
    part: Part
    expert: int | None


# --- headers ----------------------------------------------------------------------------------------------------------


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} appears twice")
    return out


def _json_object(text: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_object_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} must be a JSON object, found {type(value).__name__}")
    return value


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def read_header(path: Path) -> tuple[dict[str, Tensor], FileIdentity]:
    """The tensors of one safetensors file, every number in its header checked against the file's size.

    Raises:
        CheckpointError: the file is missing, truncated, or its header is not what the format says.
    """
    try:
        with path.open("rb") as file:
            identity = FileIdentity.of(os.fstat(file.fileno()))
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(identity.size - 8, _MAX_HEADER):
                raise CheckpointError(
                    f"{path} is not a safetensors file, or truncated: its header claims {length} bytes, "
                    f"the file has {identity.size} (a header may have {_MAX_HEADER})"
                )
            header = _json_object(file.read(length), f"the header of {path}")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    header.pop("__metadata__", None)
    start = 8 + length
    tensors: dict[str, Tensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():

        def fail(expected: str, name: str = name, entry: object = entry) -> NoReturn:
            raise CheckpointError(f"{path}: tensor {name!r}: expected {expected}, found {entry!r}")

        if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
            fail("an object with dtype, shape and data_offsets")
        shape, offsets = entry.get("shape"), entry.get("data_offsets")
        if not isinstance(shape, list) or not all(_is_size(size) for size in shape):
            fail("a shape of non-negative integers")
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
            fail("data_offsets [begin, end]")
        begin, end = offsets
        needed = tensor_bytes(entry["dtype"], tuple(shape))
        if begin > end or (needed is not None and end - begin != needed):
            fail(f"data_offsets spanning the {needed} bytes that its dtype and shape take")
        if start + end > identity.size:
            raise CheckpointError(
                f"{path} is truncated: tensor {name!r} ends at byte {start + end}, the file has {identity.size}"
            )
        tensors[name] = Tensor(name, path, entry["dtype"], tuple(shape), start + begin)
        spans.append((begin, end, name))
    position, previous = 0, "the header"
    for begin, end, name in sorted(spans):
        if begin != position:
            raise CheckpointError(
                f"{path}: tensor {name!r} begins at data byte {begin}, expected {position}, where {previous} ends"
            )
        position, previous = end, repr(name)
    if start + position != identity.size:
        raise CheckpointError(
            f"{path}: the tensors end at byte {start + position}, but the file has {identity.size} bytes"
        )
    return tensors, identity


def file_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int], int]:
    """How a safetensors file begins, as its library writes it: wide dtypes first, then by name, so that every tensor
    begins at a multiple of its element.

    Args:
        tensors: name -> safetensors dtype and shape.
        metadata: its ``__metadata__``.

    Returns:
        The file's first bytes, name -> where each tensor begins, in that order, and the size of the file.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-DTYPE_BITS[item[1][0]], item[0]))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    begins: dict[str, int] = {}
    position = 0
    for name, (dtype, shape) in ordered:
        begins[name] = position
        position += tensor_bytes(dtype, shape) or 0
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begins[name], position]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    begins = {name: start + begin for name, begin in begins.items()}
    return len(text).to_bytes(8, "little") + text, begins, start + position


def read_config(directory: Path) -> dict[str, Any]:
    """The contents of ``config.json`` as they are, whatever transformers makes of them.

    Raises:
        CheckpointError: it is not there, or not valid.
    """
    path = directory / "config.json"
    try:
        return _json_object(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None


def refuse_methods(directory: Path, config: Mapping[str, Any]) -> None:
    """Refuse what no tensor can make good, before there are any: a method that is not read.

    Args:
        directory: where ``config.json`` lies.
        config: its contents.

    Raises:
        CheckpointError: names the method.
    """
    try:
        read_scheme(*_quantization(directory, config))
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from None


def _quantization(directory: Path, config: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, Any]:
    """``quantization_config``, and modelopt's file of its own, where they are there."""
    path = directory / MODELOPT_FILE
    separate = _json_object(path.read_bytes(), str(path)) if path.is_file() else None
    return quantization_config(config), separate


# --- which files ------------------------------------------------------------------------------------------------------


def weight_files(directory: Path) -> list[str]:
    """Names of the files that hold the weights, whether they are there yet or not: those of the index, or the one file.

    Raises:
        CheckpointError: the index is not a valid one.
    """
    path = directory / INDEX_FILE
    return sorted(set(_weight_map(path).values())) if path.is_file() else [SINGLE_FILE]


def _read_index(directory: Path) -> dict[str, str]:
    """Tensor name -> file name; empty if there is one file only. The same precedence as transformers."""
    if (directory / SINGLE_FILE).is_file():
        return {}
    path = directory / INDEX_FILE
    if not path.is_file():
        found = sorted(p.name for p in directory.glob("*") if p.suffix in {".safetensors", ".bin", ".gguf"})
        raise CheckpointError(
            f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}; weight files found: "
            f"{found or 'none'}. Only safetensors checkpoints can be mapped."
        )
    return _weight_map(path)


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = _json_object(path.read_bytes(), str(path)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: expected 'weight_map' to map tensor names to files, found {weight_map!r}")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or os.path.isabs(file) or ".." in Path(file).parts:
            raise CheckpointError(f"{path}: tensor {name!r}: expected a file inside the directory, found {file!r}")
    return weight_map


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Checkpoint:
    """The tensors of a checkpoint directory, by name. Nothing but headers is read.

    Attributes:
        directory: where the files lie.
        tensors: every tensor of every file.
    """

    def __init__(self, directory: str | os.PathLike[str], config: Mapping[str, Any] | None = None) -> None:
        """Read and check the headers.

        Args:
            directory: where the files lie.
            config: the contents of ``config.json``, which say how matrices are stored; without, they are plain.

        Raises:
            CheckpointError: there are no safetensors files, the index and the files disagree, a file is damaged, or
                it changed under a model that is still mapped onto it.
        """
        self.directory = Path(directory)
        self._config = config
        self.tensors: dict[str, Tensor] = {}
        self._identities: dict[Path, FileIdentity] = {}
        self._open: dict[Path, Any] = {}
        index = _read_index(self.directory)
        for file in [self.directory / name for name in sorted(set(index.values()))] or [self.directory / SINGLE_FILE]:
            if not file.is_file():
                raise CheckpointError(f"{self.directory / INDEX_FILE} names {file.name}, which does not exist")
            check_mapped(file, FileIdentity.of(os.stat(file)))  # first: whatever the header says now, this is the cause
            tensors, identity = read_header(file)
            for name, tensor in tensors.items():
                if name in self.tensors:
                    raise CheckpointError(f"tensor {name!r} is in two files: {self.tensors[name].file} and {file}")
                self.tensors[name] = tensor
            self._identities[file] = identity
        for name, file_name in index.items():
            found = self.tensors.get(name)
            if found is None or found.file != self.directory / file_name:
                where = "in no file" if found is None else f"in {found.file.name}"
                raise CheckpointError(
                    f"{self.directory / INDEX_FILE} says tensor {name!r} is in {file_name}; it is {where}"
                )

    def verify_unchanged(self) -> None:
        """Raise CheckpointError if a file is no longer the one whose header was read."""
        for path, identity in self._identities.items():
            try:
                found = FileIdentity.of(os.stat(path))
            except OSError as error:
                raise CheckpointError(f"{path} vanished while it was being loaded: {error.strerror}") from None
            if found != identity:
                raise CheckpointError(f"{path} changed while it was being loaded: it was {identity}, it is {found}")

    @cached_property
    def detection(self) -> Detection:
        """How every matrix is stored.

        Raises:
            CheckpointError: config, names, dtypes and shapes contradict each other, or the method is not supported.
        """
        config, separate = (None, None) if self._config is None else _quantization(self.directory, self._config)
        try:
            return detect(config, self.tensors, separate)
        except CheckpointError as error:
            raise CheckpointError(f"{self.directory}: {error}") from None

    @cached_property
    def coded(self) -> dict[str, StoredMatrix]:
        """Parameter -> matrix, of those that are not stored plainly."""
        stored = self.detection.matrices.values()
        return {matrix.parameter: matrix for matrix in stored if matrix.encoding.format not in PLAIN}

    @cached_property
    def parameters(self) -> dict[str, None]:
        """Every parameter, in the order of the files. Tensors that are part of another parameter, or of use for
        quantised activations only, are none."""
        names = {name: matrix.parameter for matrix in self.coded.values() for name in matrix.names.values()}
        return {names.get(name, name): None for name in self.tensors if name not in self.detection.ignored}

    def source(self, parameter: str) -> ExpertSource:
        """A parameter with the tensors that it consists of.

        Raises:
            CheckpointError: it is neither coded nor of a plain floating-point dtype.
        """
        matrix = self.coded.get(parameter)
        if matrix is not None:
            lead = () if matrix.matrix.experts is None else (matrix.matrix.experts,)
            shape = (*lead, matrix.matrix.rows, matrix.matrix.cols)
            tensors = {role: self.tensors[name] for role, name in matrix.names.items()}
            return ExpertSource(matrix.base, matrix.encoding, shape, tensors)
        tensor = self.tensors[parameter]
        if tensor.dtype not in PLAIN_DTYPES:
            raise CheckpointError(
                f"{tensor.file}: expert tensor {tensor.name!r}: expected dtype {' or '.join(PLAIN_DTYPES)}, "
                f"found {tensor.dtype}, and nothing that says how to decode it"
            )
        return ExpertSource(tensor.name, plain(tensor.dtype, ""), tensor.shape, {"codes": tensor})

    def read(self, tensor: Tensor) -> torch.Tensor:
        """A tensor's values, copied into memory of their own.

        Raises:
            CheckpointError: the file cannot be read.
        """
        try:
            data = np.fromfile(tensor.file, dtype=np.uint8, count=tensor.size, offset=tensor.begin)
        except OSError as error:
            raise CheckpointError(f"cannot read {tensor.file}: {error.strerror}") from None
        if len(data) != tensor.size:
            raise CheckpointError(f"{tensor.file} was truncated while it was being loaded")
        return torch.from_numpy(data).view(TORCH_DTYPES[tensor.dtype]).reshape(tensor.shape)

    def values(self, parameter: str) -> Any:
        """What transformers reads a parameter that is stored plainly by: a safetensors slice."""
        file = self.tensors[parameter].file
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt", device="cpu")
        return self._open[file].get_slice(parameter)

    def map(self, file: Path) -> FileMapping:
        """One of the files, mapped."""
        return map_file(file, self._identities[file])

    def expert_weights(
        self,
        prefix: str,
        tensors: Sequence[ExpertTensor],
        *,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        interleaved: bool = False,
        biased: bool = False,
        activation: Activation = SWIGLU,
    ) -> ExpertWeights:
        """Addresses of one layer's experts.

        Args:
            prefix: what to call the layer in errors, e.g. ``model.layers.0.mlp.experts``.
            tensors: every parameter of that layer's experts.
            num_experts, hidden_size, intermediate_size: E, H, I of the model.
            interleaved: fused gate and up rows take turns (gate first), instead of all of gate before all of up.
            biased: the experts have biases, in fused tensors.
            activation: goes with the weights.

        Raises:
            CheckpointError: a tensor is missing, misshapen, there twice, or in a format that is not supported.
        """
        e, h, i = num_experts, hidden_size, intermediate_size
        parts: dict[Part, dict[int | None, ExpertSource]] = {part: {} for part in get_args(Part)}
        for item in tensors:
            source = self.source(item.key)
            codes = source.tensors["codes"]
            if item.expert is not None and item.expert >= e:
                raise CheckpointError(
                    f"{codes.file}: tensor {codes.name!r} belongs to expert {item.expert}; "
                    f"expected experts 0 to {e - 1} by the config, num_experts = {e}"
                )
            if item.expert in parts[item.part]:
                other = parts[item.part][item.expert].tensors["codes"]
                raise CheckpointError(
                    f"{codes.file}: tensor {codes.name!r} is {item.part} of {prefix}, expert {item.expert}, and so "
                    f"is {other.name!r} in {other.file}; expected one of them"
                )
            parts[item.part][item.expert] = source
        fused = None in parts["gate_up"]
        expected: dict[Part, list[int | None]] = {"gate": [], "up": [], "down": [None], "gate_up": [None]}
        if not fused:
            every: list[int | None] = [None] if None in {**parts["gate"], **parts["up"]} else list(range(e))
            expected = {"gate": every, "up": every, "down": every, "gate_up": []}
        bias_parts: tuple[Part, Part] = ("gate_up_bias", "down_bias")
        expected |= {part: [None] if biased else [] for part in bias_parts}
        self._check_complete(prefix, parts, expected)
        used = [tensor for part in parts.values() for source in part.values() for tensor in source.tensors.values()]
        mappings = {file: self.map(file) for file in sorted({tensor.file for tensor in used})}

        def matrices(part: Part, rows: int, columns: int) -> ExpertMatrices:
            """Of per-expert parameters [rows, columns], or of one [E, rows, columns]."""
            found = [parts[part][expert] for expert in expected[part]]
            for expert, source in zip(expected[part], found, strict=True):
                _check_shape(source, (rows, columns) if expert is not None else (e, rows, columns))
                _check_like(source, found[0])
            return describe(found, mappings, e, Place())

        of_gate, of_up = fused_rows(i, interleaved)
        if not fused:
            gate, up, down = matrices("gate", i, h), matrices("up", i, h), matrices("down", h, i)
        else:
            gate_up, down_all = parts["gate_up"][None], parts["down"][None]
            transposed = _is_transposed(gate_up, down_all, e, h, i)
            gate, up = (
                describe([gate_up], mappings, e, Place(rows.start, rows.step, transposed)) for rows in (of_gate, of_up)
            )
            down = describe([down_all], mappings, e, Place(transposed=transposed))
        biases = None
        if biased:
            for part, columns in zip(bias_parts, (2 * i, h), strict=True):
                _check_shape(parts[part][None], (e, columns))
            fused_bias, down_bias = (self.read(parts[part][None].tensors["codes"]).float() for part in bias_parts)
            biases = (fused_bias[:, of_gate].contiguous(), fused_bias[:, of_up].contiguous(), down_bias)
        return ExpertWeights(
            gate,
            up,
            down,
            hidden_size=h,
            intermediate_size=i,
            owner=tuple(mappings.values()),
            residency_known=all(mapping.residency_known for mapping in mappings.values()),
            activation=activation,
            biases=biases,
        )

    def _check_complete(
        self, prefix: str, parts: dict[Part, dict[int | None, ExpertSource]], expected: dict[Part, list[int | None]]
    ) -> None:
        for part, experts in expected.items():
            missing = [expert for expert in experts if expert not in parts[part]]
            extra = [source.tensors["codes"] for expert, source in parts[part].items() if expert not in experts]
            if missing:
                whose = "all experts" if missing[0] is None else f"experts {missing[:8]}"
                raise CheckpointError(
                    f"{self.directory}: {prefix}: expected {len(experts)} tensors for {part}, "
                    f"found {len(parts[part])}; missing: {part} of {whose}"
                )
            if extra:
                raise CheckpointError(
                    f"{extra[0].file}: tensor {extra[0].name!r}: {prefix} has both per-expert and fused tensors; "
                    "expected one kind"
                )


def _check_shape(source: ExpertSource, expected: tuple[int, ...]) -> None:
    if source.shape != expected:
        codes = source.tensors["codes"]
        raise CheckpointError(
            f"{codes.file}: tensor {codes.name!r}: expected shape {list(expected)} by the config, "
            f"found {list(source.shape)}{source.as_what}"
        )


def _check_like(source: ExpertSource, first: ExpertSource) -> None:
    for role, tensor in source.tensors.items():
        other = first.tensors.get(role)
        if other is None or tensor.dtype != other.dtype:
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name!r}: expected dtype "
                f"{'none' if other is None else other.dtype} like {(other or first.tensors['codes']).name!r}, "
                f"found {tensor.dtype}"
            )
    if source.encoding != first.encoding:
        codes = source.tensors["codes"]
        raise CheckpointError(
            f"{codes.file}: tensor {codes.name!r}: expected {first.encoding} like {first.tensors['codes'].name!r}, "
            f"found {source.encoding}"
        )


def _is_transposed(gate_up: ExpertSource, down: ExpertSource, e: int, h: int, i: int) -> bool:
    """Orientation of a fused pair, from its shapes: [E, 2I, H] and [E, H, I], or both transposed.

    One matrix may look the same both ways (2I = H, or I = H), but never both; so together they always tell.
    """
    as_is = [((e, 2 * i, h), (e, h, i)), ((e, h, 2 * i), (e, i, h))]
    for transposed, shapes in enumerate(as_is):
        if (gate_up.shape, down.shape) == shapes:
            return bool(transposed)
    first, second = gate_up.tensors["codes"], down.tensors["codes"]
    raise CheckpointError(
        f"{first.file}: tensors {first.name!r} and {second.name!r}: expected shapes "
        + " or ".join(f"{list(a)} and {list(b)}" for a, b in as_is)
        + f" by the config, found {list(gate_up.shape)} and {list(down.shape)}{gate_up.as_what}"
    )


__all__ = [
    "INDEX_FILE",
    "SINGLE_FILE",
    "Checkpoint",
    "CheckpointError",
    "ExpertTensor",
    "Tensor",
    "file_header",
    "read_config",
    "read_header",
    "refuse_methods",
    "weight_files",
]
