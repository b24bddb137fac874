"""How one matrix W [rows, cols] (y = x Wᵀ) is stored: which tensors it consists of, and what each of them means.

An :class:`Encoding` is a description only. The kernels (and ``table.py`` for everything that is not a routed expert)
decode by its ``format``; the names in a file are a base name plus each tensor's ``suffix``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from ktft.mapping import CheckpointError

Role = Literal[
    "codes",
    "scales",
    "global_scale",
    "global_divisor",
    "zero_points",
    "zero_points_less_one",
    "group_index",
    "shape",
]
"""What a tensor is to the matrix. Where two writers mean different things by one place, the role says which:

- ``global_scale``: one number that every group's scale is multiplied by; ``global_divisor``: divided by.
- ``zero_points``: the code that means 0; ``zero_points_less_one``: the code that means 0, less 1 (modulo 16).
- ``group_index``: int32 [cols], the group of every column; only ``column // group`` is accepted.
- ``shape``: the integers rows and cols.
"""


class Header(Protocol):
    """What a file's header says of a tensor."""

    @property
    def dtype(self) -> str:
        """Its safetensors name."""

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Dimension:
    """One dimension of a stored tensor: ⌈axis / per⌉ · times, or ``times`` alone where ``axis`` is empty."""

    axis: Literal["rows", "cols", ""]
    per: int = 1
    times: int = 1

    def size(self, rows: int, cols: int) -> int:
        whole = {"rows": rows, "cols": cols, "": 1}[self.axis]
        return -(-whole // self.per) * self.times

    def __str__(self) -> str:
        text = self.axis + (f"/{self.per}" if self.per > 1 else "")
        return str(self.times) if not text else text + (f"·{self.times}" if self.times > 1 else "")


ROWS, COLS = Dimension("rows"), Dimension("cols")
ONE = Dimension("")

Shape = tuple[Dimension, ...]
MATRIX: Shape = (ROWS, COLS)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of an encoded matrix.

    Attributes:
        role: what it means.
        suffix: what its name has after the matrix's base name, separator included (".weight_scale", "_blocks").
        dtypes: the safetensors dtypes it may have; ktft writes the first.
        shapes: the shapes it may have; ktft writes the first.
        optional: whether it may be absent.
    """

    role: Role
    suffix: str
    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    optional: bool = False


@dataclass(frozen=True)
class Encoding:
    """How one matrix is stored.

    Attributes:
        format: the decoder's name, a key of ``ktft.formats.FORMATS``.
        block: rows and columns that share one scale (GGUF: that lie in one block, with its scales); 0 means all of
            them. (0, 0) for formats without scales.
        tensors: the tensors it consists of; the first holds the codes.
        edges: blocks may be cut off at the last row and column; otherwise ``block`` divides the matrix.
    """

    format: str
    block: tuple[int, int]
    tensors: tuple[StoredTensor, ...]
    edges: bool = False

    @property
    def codes(self) -> StoredTensor:
        return self.tensors[0]

    @property
    def group(self) -> int:
        """Columns that share one scale; 0 means all of them."""
        return self.block[1]

    def names(self, base: str) -> dict[Role, str]:
        """Role -> tensor name of every tensor, optional ones included."""
        return {tensor.role: base + tensor.suffix for tensor in self.tensors}

    def __str__(self) -> str:
        rows, cols = self.block
        if len(self.tensors) == 1:
            return self.format
        shared = f"{rows or 'all'}x{cols or 'all'}" if rows != 1 else f"groups of {cols}" if cols else "per row"
        return f"{self.format} ({shared}; {', '.join(tensor.suffix for tensor in self.tensors)})"


@dataclass(frozen=True)
class Matrix:
    """The sizes of a stored matrix; ``experts`` is E where its tensors hold those of E experts, one after another."""

    rows: int
    cols: int
    experts: int | None = None


def matrix_of(encoding: Encoding, headers: Mapping[Role, Header], names: Mapping[Role, str]) -> Matrix:
    """The sizes that the codes' shape says, after checking every tensor's dtype and shape against them.

    Args:
        encoding: how the matrix is stored.
        headers: of the tensors that are there.
        names: what to call each tensor in errors.

    Raises:
        CheckpointError: a tensor is missing, or has another dtype or shape; names it.
    """
    for tensor in encoding.tensors:
        header = headers.get(tensor.role)
        if header is None:
            if tensor.optional:
                continue
            raise CheckpointError(
                f"tensor {names[tensor.role]!r} is missing: {names['codes']!r} is stored as {encoding}; "
                "the checkpoint is incomplete"
            )
        if header.dtype not in tensor.dtypes:
            raise CheckpointError(
                f"tensor {names[tensor.role]!r}: expected dtype {' or '.join(tensor.dtypes)} as part of {encoding}, "
                f"found {header.dtype}"
            )
    matrix = _sizes(encoding, headers["codes"].shape, names["codes"])
    rows, cols = matrix.rows, matrix.cols
    lead = () if matrix.experts is None else (matrix.experts,)
    for tensor in encoding.tensors:
        header = headers.get(tensor.role)
        expected = [(*lead, *(dimension.size(rows, cols) for dimension in shape)) for shape in tensor.shapes]
        if header is not None and header.shape not in expected:
            patterns = " or ".join(f"[{', '.join(map(str, shape))}]" for shape in tensor.shapes)
            raise CheckpointError(
                f"tensor {names[tensor.role]!r}: expected shape {' or '.join(str(list(s)) for s in expected)} "
                f"({patterns} of the [{rows}, {cols}] matrix whose codes are {names['codes']!r}, "
                f"{encoding}), found {list(header.shape)}"
            )
    for size, block, what in ((rows, encoding.block[0], "rows"), (cols, encoding.block[1], "columns")):
        if block and size % block and not encoding.edges:
            raise CheckpointError(
                f"tensor {names['codes']!r}: the {size} {what} of the matrix are no multiple of {block}, the {what} "
                f"that share a scale in {encoding}; only a checkpoint whose groups divide the matrix can be read"
            )
    return matrix


def _sizes(encoding: Encoding, found: tuple[int, ...], name: str) -> Matrix:
    """Rows and columns from the shape of the codes, which may have a dimension of experts before its own."""
    shape = encoding.codes.shapes[0]
    own = found[len(found) - len(shape) :]
    sizes = {"rows": 1, "cols": 1, "": 1}
    if len(found) in (len(shape), len(shape) + 1) and all(found):
        for dimension, size in zip(shape, own, strict=True):
            sizes[dimension.axis] = size // dimension.times * dimension.per if dimension.axis else 1
        if all(dim.size(sizes["rows"], sizes["cols"]) == size for dim, size in zip(shape, own, strict=True)):
            return Matrix(sizes["rows"], sizes["cols"], found[0] if len(found) > len(shape) else None)
    raise CheckpointError(
        f"tensor {name!r}: expected shape [{', '.join(map(str, shape))}], or that after a dimension of experts, "
        f"as the codes of {encoding}; found {list(found)}"
    )


__all__ = [
    "COLS",
    "MATRIX",
    "ONE",
    "ROWS",
    "Dimension",
    "Encoding",
    "Header",
    "Matrix",
    "Role",
    "Shape",
    "StoredTensor",
    "matrix_of",
]
