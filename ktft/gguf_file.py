"""The headers of GGUF files: metadata, and where each tensor lies. No tensor is read.

:func:`find_gguf` says which file a path means, :func:`read_gguf` reads a model of one file or of several. The ``gguf``
package has a reader too, which makes several Python objects of every token of the vocabulary: on the 151,936 tokens and
151,387 merges of Qwen3 it takes 5.6 s and 480 MiB (Zen 5, 2026-12-01). What types there are, and how large their
blocks, is asked of the package.

Layout (version 2 and 3, little-endian): magic "GGUF", uint32 version, uint64 tensors, uint64 pairs; the pairs, each a
string (uint64 length, bytes), a uint32 type and a value; for each tensor a string, a uint32 number of dimensions,
uint64 sizes, the innermost first, a uint32 type and the uint64 offset of its data from where all data begins, the next
multiple of ``general.alignment``.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ktft.mapping import CheckpointError, FileIdentity, check_mapped

_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a value -> its struct code; 8 is a string, 9 an array."""

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class GgufTensor:
    """One tensor. ``shape`` is of its weights, outermost first; ``begin`` its first byte counted from the start of the
    file; ``type`` what the ``gguf`` package calls how it is stored, "Q4_K"."""

    name: str
    file: Path
    type: str
    shape: tuple[int, ...]
    begin: int
    size: int


@dataclass(frozen=True)
class GgufModel:
    """A model of one file, or of several.

    Attributes:
        path: the file; of several the first.
        metadata: the first file's. Numbers, strings, lists of numbers; of a list of strings, their number.
        tensors: of all files.
        identities: every file.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    identities: dict[Path, FileIdentity]

    @property
    def architecture(self) -> str:
        """``general.architecture``.

        Raises:
            CheckpointError: there is none.
        """
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str):
            raise CheckpointError(f"{self.path} has no general.architecture among its metadata; it is not of a model")
        return value


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only model of a directory without safetensors files.

    Returns:
        The file, of several parts the first; None if it is none, or a directory without GGUF files, or with
        safetensors files too, which are used then.

    Raises:
        CheckpointError: the directory holds several models, or a part of one is missing; lists them.
    """
    if path.is_file():
        return _first_part(path) if path.suffix == ".gguf" else None
    files = sorted(path.glob("*.gguf"))
    if not files or any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
        return None
    models = sorted({_first_name(file) for file in files})
    if len(models) > 1:
        raise CheckpointError(
            f"{path} holds several GGUF models: {', '.join(models)}. Give the path of one of these files."
        )
    return _first_part(files[0])


def _first_name(file: Path) -> str:
    part = _PART.fullmatch(file.name)
    return file.name if part is None else f"{part['stem']}-00001-of-{part['count']}.gguf"


def _first_part(file: Path) -> Path:
    """The first of the files that a model is split into.

    Raises:
        CheckpointError: one of them is missing.
    """
    first = file.with_name(_first_name(file))
    missing = [part.name for part in _parts(first) if not part.is_file()]
    if missing:
        raise CheckpointError(f"{file} is one part of a model, of which {', '.join(missing[:5])} is missing beside it")
    return first


def _parts(first: Path) -> list[Path]:
    part = _PART.fullmatch(first.name)
    if part is None:
        return [first]
    count = int(part["count"])
    return [first.with_name(f"{part['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]


def read_gguf(path: Path) -> GgufModel:
    """The headers of a model's files, every number in them checked against the files' sizes.

    Args:
        path: the only file, or the first part.

    Raises:
        CheckpointError: a file is damaged, truncated, big-endian, of an unknown version, or not of this model; or it
            changed under a model that is still mapped onto it.
    """
    files = _parts(path)
    tensors: dict[str, GgufTensor] = {}
    identities: dict[Path, FileIdentity] = {}
    metadata: dict[str, Any] = {}
    for number, file in enumerate(files):
        found, its_tensors, identity = _read_header(file)
        count = count_of(file, found, "split.count", 1) or 1  # 0 of parts that were joined again
        own = count_of(file, found, "split.no", 0)
        if count != len(files) or own != number:
            raise CheckpointError(
                f"{file} says that it is part {own + 1} of {count}; by its name it is "
                f"{number + 1} of {len(files)}. Parts are called NAME-00001-of-{count:05d}.gguf; restore their names."
            )
        for name, tensor in its_tensors.items():
            if name in tensors:
                raise CheckpointError(f"tensor {name!r} is in two files: {tensors[name].file} and {file}")
            tensors[name] = tensor
        identities[file] = identity
        metadata = metadata or found
    expected = count_of(path, metadata, "split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise CheckpointError(f"{path}: expected {expected} tensors in all parts, found {len(tensors)}")
    return GgufModel(path, metadata, tensors, identities)


def count_of(path: Path, metadata: dict[str, Any], key: str, default: int) -> int:
    """A number of things among the metadata.

    Raises:
        CheckpointError: it is something else.
    """
    value = metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise CheckpointError(f"{path}: {key}: expected a whole number, found {value!r}")
    return value


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor], FileIdentity]:
    try:
        with path.open("rb") as file:
            identity = FileIdentity.of(os.fstat(file.fileno()))
            check_mapped(path, identity)
            reader = _Reader(path, file, identity.size)
            tensor_count, pair_count = reader.opening()
            metadata: dict[str, Any] = {}
            for _ in range(pair_count):
                key = reader.string()
                if key in metadata:
                    raise CheckpointError(f"{path}: metadata {key!r} is there twice")
                metadata[key] = reader.value(reader.number("I"))
            entries = [reader.tensor() for _ in range(tensor_count)]
            alignment = metadata.get("general.alignment", 32)
            if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
                raise CheckpointError(f"{path}: general.alignment: expected a power of two, found {alignment!r}")
            start = -(-file.tell() // alignment) * alignment
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    tensors: dict[str, GgufTensor] = {}
    for name, shape, number, offset in entries:
        if name in tensors:
            raise CheckpointError(f"{path}: tensor {name!r} is there twice")
        tensors[name] = _tensor(path, name, shape, number, start + offset)
        if offset % alignment:
            raise CheckpointError(f"{path}: tensor {name!r} begins at data byte {offset}, no multiple of {alignment}")
    _check_extents(path, tensors.values(), identity.size)
    return metadata, tensors, identity


def _tensor(path: Path, name: str, shape: tuple[int, ...], number: int, begin: int) -> GgufTensor:
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise CheckpointError(
            f"{path}: tensor {name!r} is stored as type number {number}, which the installed gguf package does not "
            "know; upgrade it (pip install -U gguf), or use another file of this model"
        ) from None
    columns, size = GGML_QUANT_SIZES[kind]
    if not shape or shape[-1] % columns:
        raise CheckpointError(
            f"{path}: tensor {name!r} {list(shape)} is stored as {kind.name}; expected rows of a multiple of {columns}"
        )
    return GgufTensor(name, path, kind.name, shape, begin, math.prod(shape) // columns * size)


def _check_extents(path: Path, tensors: Iterable[GgufTensor], size: int) -> None:
    """Every tensor lies in the file, and none in another."""
    end, previous = 0, None
    for tensor in sorted(tensors, key=lambda tensor: tensor.begin):
        if tensor.begin < end:
            raise CheckpointError(f"{path}: tensor {tensor.name!r} begins where {previous!r} has not ended")
        end, previous = tensor.begin + tensor.size, tensor.name
        if end > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {tensor.name!r} ends at byte {end}, the file has {size}; download it "
                "again"
            )


class _Reader:
    """Values from where the file is at; past its end there are none."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._size = path, file, size

    def opening(self) -> tuple[int, int]:
        """Tensors and pairs that follow."""
        magic = self._file.read(4)
        if magic != b"GGUF":
            raise CheckpointError(f"{self._path} is not a GGUF file: it begins with {magic!r}, expected b'GGUF'")
        version = self.number("I")
        if version and not version & 0xFFFF:
            raise CheckpointError(
                f"{self._path} is big-endian; expected little-endian. Convert it with gguf-convert-endian of the gguf "
                "package"
            )
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self._path} is of GGUF version {version}; expected {' or '.join(map(str, _VERSIONS))}. Use a file "
                "written by a current llama.cpp."
            )
        # The least that each takes: an empty name, no sizes, a type and an offset; an empty name, a type and a byte.
        return self._count(self.number("Q"), 24, "tensors"), self._count(self.number("Q"), 13, "metadata pairs")

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        data = self._bytes(self.number("Q"))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: a string of its header is not UTF-8: {error}") from None

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.string()
        if kind in _NUMBERS:
            value = self.number(_NUMBERS[kind])
            # The shortest decimal number that is this fp32: 1e-06, not 9.999999974752427e-07.
            return float(str(np.float32(value))) if _NUMBERS[kind] == "f" else value
        if kind != 9:
            raise CheckpointError(f"{self._path}: metadata of type {kind}; the file is damaged, or of a later version")
        kind, count = self.number("I"), self.number("Q")
        if kind == 8:
            for _ in range(self._count(count, 8, "strings")):
                self._skip(self.number("Q"))
            return count
        if kind not in _NUMBERS:
            raise CheckpointError(f"{self._path}: metadata is a list of type {kind}, expected numbers or strings")
        code = _NUMBERS[kind]
        data = self._bytes(self._count(count, struct.calcsize(code), "numbers") * struct.calcsize(code))
        return list(struct.unpack(f"<{count}{code}", data))

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset."""
        name, dimensions = self.string(), self.number("I")
        if dimensions > 4:
            raise CheckpointError(f"{self._path}: tensor {name!r} has {dimensions} dimensions; GGUF has four at most")
        sizes = [self.number("Q") for _ in range(dimensions)]
        if not all(0 < size < 2**48 for size in sizes):
            raise CheckpointError(f"{self._path}: tensor {name!r} has the sizes {sizes}; the file is damaged")
        return name, tuple(reversed(sizes)), self.number("I"), self.number("Q")

    def _count(self, count: int, least: int, what: str) -> int:
        if count * least > self._size:
            raise CheckpointError(
                f"{self._path} is damaged: it claims {count} {what}, more than its {self._size} bytes can hold"
            )
        return count

    def _bytes(self, size: int) -> bytes:
        data = self._file.read(size) if size <= self._size else b""
        if len(data) != size:
            raise CheckpointError(
                f"{self._path} is truncated: its header goes on after its {self._size} bytes; download it again"
            )
        return data

    def _skip(self, size: int) -> None:
        if size > self._size:
            self._bytes(size)
        self._file.seek(size, os.SEEK_CUR)


__all__ = ["GgufModel", "GgufTensor", "count_of", "find_gguf", "read_gguf"]
