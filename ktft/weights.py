"""Where a layer's routed experts lie in memory: addresses, strides and formats, never copies.

An :class:`ExpertWeights` describes three matrices per expert, gate and up [I, H] and down [H, I], as base addresses
into memory that somebody else owns (a file mapping, or tensors in tests); with them the activation, and biases, which
are copied to fp32: 2 I + H numbers an expert. It is registered under an integer handle,
because a torch op's schema carries integers, not Python objects. Handles are never reused; the registry holds the
weights weakly, so whoever uses a handle (the module, the autograd context) keeps the object alive.

This module reads no files (see ``checkpoint.py``) and runs no kernels (see ``ops.py``).
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from ktft.activation import SWIGLU, Activation
from ktft.formats.gguf_blocks import GGUF_BLOCKS

PLAIN: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
"""Formats whose stored elements are the weights: name -> dtype of one element."""

CODED: dict[str, int] = {"fp8": 8, "int8": 8, "int8_plain": 8, "int4": 4, "mxfp4": 4, "nvfp4": 4, "gptq": 4, "awq": 4}
"""Formats with scales beside the codes: name -> bits of one code. What they mean is said in ``ktft.formats``; they are
decoded in ``csrc/kernels``. int8 is packed, with an offset of 128; ``int8_plain`` has none."""

WITH_ZERO_POINTS: tuple[str, ...] = ("gptq", "awq")
"""Those of them with a zero point beside each scale. They store the transpose, with a scale for each stored column and
some stored rows."""

BLOCKS: dict[str, tuple[int, int]] = {name: (columns, size) for name, columns, size in GGUF_BLOCKS.values()}
"""Formats whose rows are blocks with scales of their own: name -> columns and bytes of a block."""


def stored_bytes(format: str, elements: int) -> int:
    """Bytes that whole rows of so many elements take, without scales that lie beside them."""
    if format in BLOCKS:
        columns, size = BLOCKS[format]
        return elements // columns * size
    return elements * (8 * PLAIN[format].itemsize if format in PLAIN else CODED[format]) // 8


SCALE_FORMATS: tuple[str, ...] = ("fp32", "bf16", "fp16", "e8m0", "e4m3")
"""What scales are stored as."""


@dataclass(frozen=True)
class Scales:
    """Scales of one coded matrix of every expert.

    Element [i, j] as stored has the scale at row ``(i + first_row) // rows`` and column ``j // columns``.

    Attributes:
        addresses: int64 [E], of each expert's first scale.
        row_stride: bytes from one row of scales to the next; 0 where all rows share one.
        format: one of :data:`SCALE_FORMATS`.
        rows, columns: stored rows and columns that share a scale; at least 1.
        first_row: where the matrix begins inside a block of rows, for half of a fused tensor.
        factors: float32 [E] that every scale is multiplied by (``divides``: divided by), rounded to fp32; or None.
        divides: see ``factors``.
    """

    addresses: np.ndarray
    row_stride: int
    format: str
    rows: int
    columns: int
    first_row: int = 0
    factors: np.ndarray | None = None
    divides: bool = False

    def __post_init__(self) -> None:
        if self.format not in SCALE_FORMATS:
            raise ValueError(f"scales in format {self.format!r}; expected one of {', '.join(SCALE_FORMATS)}")
        if self.rows < 1 or self.columns < 1 or self.first_row < 0:
            raise ValueError(f"scales of {self.rows} rows and {self.columns} columns from row {self.first_row}")
        _check_addresses(self.addresses)


@dataclass(frozen=True)
class ZeroPoints:
    """Zero points of one matrix of every expert: four bits for each scale, packed along a row like the format's codes.

    Attributes:
        addresses: int64 [E], of each expert's first word.
        row_stride: bytes from one row of zero points, which goes with a row of scales, to the next.
        less_one: what is stored is the zero point less 1, modulo 16.
    """

    addresses: np.ndarray
    row_stride: int
    less_one: bool

    def __post_init__(self) -> None:
        _check_addresses(self.addresses)


@dataclass(frozen=True)
class ExpertMatrices:
    """One matrix of every expert, e.g. all gate projections.

    Attributes:
        addresses: int64 [E], the address of element [0, 0] of each expert's matrix as used in y = x Wᵀ, W [rows, cols].
        row_stride: bytes from one row *as stored* to the next; of gptq, whose words hold eight rows, to the next eight.
        format: a key of :data:`PLAIN`, :data:`CODED` or :data:`BLOCKS`.
        transposed: the file stores Wᵀ, i.e. [cols, rows]; element [i, j] of W is then at ``address + j * row_stride
        + i * column_step * itemsize``.
        scales: of a coded matrix; blocks have theirs inside, and are never transposed.
        zero_points: of one of :data:`WITH_ZERO_POINTS`.
        column_step: elements from one stored column to the next: 1, or, in a format of :data:`PLAIN`, 2, where two
            matrices' columns are stored in turn.
    """

    addresses: np.ndarray
    row_stride: int
    format: str
    transposed: bool = False
    scales: Scales | None = None
    zero_points: ZeroPoints | None = None
    column_step: int = 1

    def __post_init__(self) -> None:
        if self.column_step not in ((1, 2) if self.format in PLAIN else (1,)):
            raise ValueError(
                f"expert weights in format {self.format!r} with a column step of {self.column_step}; expected 1, or 2 "
                f"in {', '.join(PLAIN)}"
            )
        if self.format not in {*PLAIN, *CODED, *BLOCKS}:
            raise ValueError(
                f"expert weights in format {self.format!r}; this version decodes "
                f"{', '.join(sorted({*PLAIN, *CODED, *BLOCKS}))}"
            )
        if (self.scales is None) == (self.format in CODED):
            raise ValueError(
                f"expert weights in format {self.format!r} {'need' if self.scales is None else 'have no'} scales"
            )
        if self.format in BLOCKS and self.transposed:
            raise ValueError(f"expert weights in format {self.format!r} cannot be the transpose: blocks lie along rows")
        zeroed = self.format in WITH_ZERO_POINTS
        if (self.zero_points is not None) != zeroed:
            raise ValueError(f"expert weights in format {self.format!r} {'need' if zeroed else 'have no'} zero points")
        if zeroed and self.scales is not None:
            scales, plain = self.scales, ("fp32", "bf16", "fp16")
            if not self.transposed or scales.columns != 1 or scales.first_row or scales.factors is not None:
                raise ValueError(
                    f"expert weights in format {self.format!r} must be the transpose, with a scale for each column as "
                    "stored, from the first row on and without factors"
                )
            if scales.format not in plain:
                raise ValueError(
                    f"scales in format {scales.format!r} beside {self.format!r}; expected one of {', '.join(plain)}"
                )
        _check_addresses(self.addresses)


def _check_addresses(addresses: np.ndarray) -> None:
    if addresses.dtype != np.int64 or addresses.ndim != 1 or not addresses.flags.c_contiguous:
        raise ValueError(f"addresses must be a contiguous int64 vector, got {addresses.dtype} {addresses.shape}")


def _check_size(name: str, format: str, rows: int, columns: int) -> None:
    """Of a matrix [rows, columns], that it is whole blocks, or whole words."""
    size, what, unit = {
        "gptq": (columns, "columns", 8),
        "awq": (rows, "rows", 8),
    }.get(format, (columns, "columns", BLOCKS.get(format, (1, 0))[0]))
    if size % unit:
        raise ValueError(f"{name} has {size} {what} in format {format!r}; expected a multiple of {unit}")


_lock = threading.Lock()
_ids = itertools.count(1)
_registry: weakref.WeakValueDictionary[int, ExpertWeights] = weakref.WeakValueDictionary()


class ExpertWeights:
    """The routed experts of one layer, registered under :attr:`id`.

    Args:
        gate, up: matrices [I, H] of every expert.
        down: matrices [H, I] of every expert.
        hidden_size: H.
        intermediate_size: I.
        owner: whatever keeps the memory alive (a mapping, tensors); held for as long as this object lives.
        residency_known: see ``ktft.mapping.FileMapping``; False changes when the kernels read ahead.
        activation: what becomes of gate and up.
        biases: contiguous fp32 tensors on the CPU that are added to gate [E, I], up [E, I] and down [E, H]; None for
            none.

    ``copy.deepcopy`` shares the object (frozen weights are never duplicated); pickling raises.
    """

    def __init__(
        self,
        gate: ExpertMatrices,
        up: ExpertMatrices,
        down: ExpertMatrices,
        *,
        hidden_size: int,
        intermediate_size: int,
        owner: object,
        residency_known: bool = True,
        activation: Activation = SWIGLU,
        biases: Sequence[torch.Tensor] | None = None,
    ) -> None:
        counts = {len(gate.addresses), len(up.addresses), len(down.addresses)}
        if len(counts) != 1 or 0 in counts:
            raise ValueError(f"gate, up and down must cover the same experts, at least one; got {sorted(counts)}")
        if hidden_size < 1 or intermediate_size < 1:
            raise ValueError(f"hidden_size {hidden_size} and intermediate_size {intermediate_size} must be positive")
        shapes = ((intermediate_size, hidden_size), (intermediate_size, hidden_size), (hidden_size, intermediate_size))
        for name, matrices, shape in zip(("gate", "up", "down"), (gate, up, down), shapes, strict=True):
            _check_size(name, matrices.format, *shape)
        self.gate, self.up, self.down = gate, up, down
        self.num_experts = len(gate.addresses)
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.owner, self.residency_known = owner, residency_known
        self.activation, self.biases = activation, biases
        if biases is not None:
            e, h, i = self.num_experts, hidden_size, intermediate_size
            for bias, shape in zip(biases, ((e, i), (e, i), (e, h)), strict=True):
                fits = tuple(bias.shape) == shape and bias.dtype == torch.float32 and bias.device.type == "cpu"
                if not fits or not bias.is_contiguous():
                    raise ValueError(
                        f"a bias must be contiguous float32 {shape} on the CPU, got {bias.dtype} {tuple(bias.shape)} "
                        f"stride {bias.stride()} on {bias.device}"
                    )
        with _lock:
            self.id = next(_ids)
            _registry[self.id] = self

    @classmethod
    def from_tensors(
        cls,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        *,
        transposed: bool = False,
        activation: Activation = SWIGLU,
        biases: Sequence[torch.Tensor] | None = None,
    ) -> ExpertWeights:
        """Describe in-memory tensors: gate, up [E, I, H] and down [E, H, I] (``transposed``: [E, H, I] and [E, I, H]).

        The tensors are shared, not copied; they may be strided views as long as the last dimension has a stride of 1
        or 2.
        """
        names = {dtype: name for name, dtype in PLAIN.items()}

        def describe(tensor: torch.Tensor) -> ExpertMatrices:
            if (
                tensor.dim() != 3
                or tensor.stride(2) not in (1, 2)
                or tensor.device.type != "cpu"
                or tensor.dtype not in names
            ):
                raise ValueError(
                    f"expected a CPU tensor [E, rows, cols] in {sorted(PLAIN)} with rows of stride 1 or 2, "
                    f"got {tensor.dtype} {tuple(tensor.shape)} stride {tensor.stride()} on {tensor.device}"
                )
            size = tensor.element_size()
            addresses = tensor.data_ptr() + np.arange(tensor.shape[0], dtype=np.int64) * (tensor.stride(0) * size)
            name, step = names[tensor.dtype], tensor.stride(2)
            return ExpertMatrices(addresses, tensor.stride(1) * size, name, transposed, column_step=step)

        inter, hidden = (gate.shape[2], gate.shape[1]) if transposed else (gate.shape[1], gate.shape[2])
        expected_down = (inter, hidden) if transposed else (hidden, inter)
        if up.shape != gate.shape or down.shape[1:] != expected_down:
            raise ValueError(f"shapes disagree: gate {gate.shape}, up {up.shape}, down {down.shape}")
        return cls(
            describe(gate),
            describe(up),
            describe(down),
            hidden_size=hidden,
            intermediate_size=inter,
            owner=(gate, up, down),
            activation=activation,
            biases=biases,
        )

    def matrix(self, name: str, expert: int) -> torch.Tensor:
        """A copy of one stored matrix in its stored dtype: ``gate``/``up`` [I, H] or ``down`` [H, I], never transposed.

        For tests, merging and inspection; the kernels never go through it.

        Raises:
            ValueError: the matrices are coded, so that what is stored is no dtype's values.
        """
        matrices: ExpertMatrices = {"gate": self.gate, "up": self.up, "down": self.down}[name]
        if matrices.format not in PLAIN:
            raise ValueError(f"{name} is stored as {matrices.format}; expected one of {', '.join(PLAIN)} to copy it")
        rows, cols = (self.intermediate_size, self.hidden_size)
        if name == "down":
            rows, cols = cols, rows
        stored_rows, stored_cols = (cols, rows) if matrices.transposed else (rows, cols)
        dtype = PLAIN[matrices.format]
        out = torch.empty(stored_rows, (stored_cols - 1) * matrices.column_step + 1, dtype=dtype)
        row_bytes = out.shape[1] * dtype.itemsize
        for row in range(stored_rows):
            source = int(matrices.addresses[expert]) + row * matrices.row_stride
            ctypes.memmove(out.data_ptr() + row * row_bytes, source, row_bytes)
        out = out[:, :: matrices.column_step]
        return (out.t() if matrices.transposed else out).contiguous()

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertWeights:
        return self

    def __copy__(self) -> ExpertWeights:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "mapped expert weights cannot be pickled: they are addresses in this process. "
            "Save the adapter (model.save_pretrained) and load the base again with ktft.load_model."
        )

    def __repr__(self) -> str:
        return (
            f"ExpertWeights(id={self.id}, experts={self.num_experts}, hidden={self.hidden_size}, "
            f"intermediate={self.intermediate_size}, format={self.gate.format})"
        )


def lookup(handle: int) -> ExpertWeights:
    """The weights registered under ``handle``.

    Raises:
        RuntimeError: the weights were freed, or never existed.
    """
    with _lock:
        weights = _registry.get(handle)
    if weights is None:
        raise RuntimeError(
            f"expert weights {handle} do not exist (any more): the model that owned them was deleted. "
            "Load it again with ktft.load_model."
        )
    return weights


LORA_NAMES = ("gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")
"""Order of one adapter's six tensors wherever they are passed as a list."""


def lora_shapes(num_experts: int, hidden: int, intermediate: int, rank: int) -> Sequence[tuple[int, int, int]]:
    """Shapes of one adapter's tensors in the order of :data:`LORA_NAMES`: A [E, r, in], B [E, out, r]."""
    e, h, i, r = num_experts, hidden, intermediate, rank
    return ((e, r, h), (e, i, r), (e, r, h), (e, i, r), (e, r, i), (e, h, r))


__all__ = [
    "BLOCKS",
    "CODED",
    "LORA_NAMES",
    "PLAIN",
    "SCALE_FORMATS",
    "WITH_ZERO_POINTS",
    "ExpertMatrices",
    "ExpertWeights",
    "Scales",
    "ZeroPoints",
    "lookup",
    "lora_shapes",
    "stored_bytes",
]
