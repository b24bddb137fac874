"""The one table of formats, and what goes through it: decoding to a dtype, encoding, checking stored values.

The decoded value of every weight is the fp32 number that the format's module defines, rounded to nearest even to the
compute dtype, once. The kernels are held to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ktft.formats import floats, fp4, fp8, gguf_blocks, gptq_awq, integers
from ktft.formats.dtypes import DTYPE_NAMES, TORCH_DTYPES
from ktft.formats.encoding import Encoding, Matrix, Role, matrix_of
from ktft.mapping import CheckpointError

_CHUNK = 1 << 20  # elements decoded at a time: 4 MiB in fp32 stay in the cache until they are rounded


@dataclass(frozen=True)
class Codec:
    """Decodes rows to fp32, as ``decode(encoding, tensors, begin, end)``, and, if ktft writes the format, encodes.

    ``encode(weight, encoding)`` gets some rows in fp32, whole blocks of them, finite, and gives the codes and scales.
    """

    decode: Callable[[Encoding, Mapping[Role, torch.Tensor], int, int], torch.Tensor]
    encode: Callable[[torch.Tensor, Encoding], dict[Role, torch.Tensor]] | None = None


FORMATS: dict[str, Codec] = {
    "bf16": Codec(floats.decode),
    "fp16": Codec(floats.decode),
    "fp32": Codec(floats.decode),
    "fp8": Codec(fp8.decode, fp8.encode),
    "mxfp4": Codec(fp4.decode, fp4.encode),
    "nvfp4": Codec(fp4.decode),
    "int4": Codec(integers.decode, integers.encode),
    "int8": Codec(integers.decode, integers.encode),
    "gptq": Codec(gptq_awq.decode),
    "awq": Codec(gptq_awq.decode),
    **{
        name: Codec(gguf_blocks.decode)
        for name, _, _ in (*gguf_blocks.GGUF_BLOCKS.values(), *gguf_blocks.OTHER_BLOCKS.values())
    },
}
"""Every stored format, by the name that an :class:`~ktft.formats.Encoding` has it under."""


@dataclass(frozen=True)
class _TensorHeader:
    dtype: str
    shape: tuple[int, ...]


def matrix_of_tensors(encoding: Encoding, tensors: Mapping[Role, torch.Tensor], base: str = "") -> Matrix:
    """Sizes of the matrix that tensors in memory hold, after checking their dtypes and shapes.

    Raises:
        CheckpointError: one is missing, or has another dtype or shape.
    """
    headers = {
        role: _TensorHeader(DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
        for role, tensor in tensors.items()
    }
    return matrix_of(encoding, headers, encoding.names(base))


def dequantize(
    encoding: Encoding, tensors: Mapping[Role, torch.Tensor], dtype: torch.dtype, base: str = ""
) -> torch.Tensor:
    """The matrix [rows, cols] in ``dtype``: bf16, fp16 or fp32.

    Rows are decoded a few at a time, so beside the result there is little in memory. CPU tensors.

    Args:
        encoding: how the matrix is stored.
        tensors: of one matrix; of E experts' tensors [E, ...] pass one expert's.
        dtype: what to round to.
        base: the matrix's base name, for errors.

    Raises:
        CheckpointError: a tensor is missing, or has another dtype or shape, or columns are stored out of order.
        ValueError: another dtype is asked for.
    """
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"weights can be decoded to bfloat16, float16 or float32, not to {dtype}")
    matrix = matrix_of_tensors(encoding, tensors, base)
    if matrix.experts is not None:
        raise CheckpointError(
            f"tensor {encoding.names(base)['codes']!r} holds {matrix.experts} experts; expected one matrix"
        )
    check_order(encoding, tensors, matrix, base)
    out = torch.empty(matrix.rows, matrix.cols, dtype=dtype)
    # Whole blocks of rows, and eights of rows, which AWQ packs together.
    step = max(_CHUNK // matrix.cols // 128, 1) * 128
    codec = FORMATS[encoding.format]
    for begin in range(0, matrix.rows, step):
        end = min(begin + step, matrix.rows)
        out[begin:end] = codec.decode(encoding, tensors, begin, end)
    return out


def encode(weight: torch.Tensor, encoding: Encoding) -> dict[Role, torch.Tensor]:
    """The tensors that store ``weight`` [rows, cols], by role; ``encoding.names(base)`` names them.

    Every code is the nearest one; how scales are chosen is said where each format's encoder is. Rows are encoded a few
    at a time.

    Raises:
        ValueError: a weight is not finite, the groups do not divide the matrix, or ktft does not write this format.
    """
    encoder = FORMATS[encoding.format].encode
    if encoder is None or encoding.block == (0, 0):
        raise ValueError(
            f"ktft does not write {encoding}; it writes {', '.join(n for n, c in FORMATS.items() if c.encode)} with "
            "scales per block, group or row"
        )
    if weight.dim() != 2 or not weight.numel():
        raise ValueError(f"expected a matrix [rows, cols], got a tensor {list(weight.shape)}")
    rows, cols = weight.shape
    tensors = {
        role: torch.empty(shape, dtype=TORCH_DTYPES[dtype])
        for role, (dtype, shape) in encoded_headers(encoding, rows, cols).items()
    }
    if "shape" in tensors:
        tensors["shape"] = torch.tensor([rows, cols])
    step = max(_CHUNK // cols // encoding.block[0], 1) * encoding.block[0]
    done: dict[Role, int] = {}
    for part in weight.detach().split(step):
        values = part.float().contiguous()
        if not bool(torch.isfinite(values).all()):
            raise ValueError("the matrix has weights that are not finite, which no format with scales can hold")
        for role, rows_of_part in encoder(values, encoding).items():
            whole, begin = tensors[role], done.get(role, 0)
            if rows_of_part.dtype != whole.dtype:
                raise ValueError(
                    f"ktft writes {encoding.names('')[role]} as {DTYPE_NAMES[rows_of_part.dtype]}; {encoding} has "
                    f"{DTYPE_NAMES[whole.dtype]}"
                )
            done[role] = begin + len(rows_of_part)
            whole[begin : done[role]] = rows_of_part
    return tensors


def encoded_headers(encoding: Encoding, rows: int, cols: int) -> dict[Role, tuple[str, tuple[int, ...]]]:
    """Role -> safetensors dtype and shape of what :func:`encode` makes of a matrix [rows, cols].

    Raises:
        ValueError: the groups do not divide the matrix.
    """
    # Packed formats fill whole bytes and words; the codes' shape says how many columns that takes.
    unit = max([encoding.group or 1, *(dimension.per for dimension in encoding.codes.shapes[0])])
    if cols % unit and not encoding.edges:
        raise ValueError(f"{encoding} needs columns in multiples of {unit}; the matrix has {cols}")
    return {
        tensor.role: (tensor.dtypes[0], tuple(dimension.size(rows, cols) for dimension in tensor.shapes[0]))
        for tensor in encoding.tensors
    }


def relative_error(weight: torch.Tensor, decoded: torch.Tensor) -> float:
    """‖decoded − weight‖ / ‖weight‖ (Frobenius, summed in float64); 0 for a matrix of zeros that decodes to zeros."""
    difference, size = (
        float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in (decoded.float() - weight, weight)
    )
    return difference / size if size else float("inf") if difference else 0.0


def check_values(encoding: Encoding, tensors: Mapping[Role, torch.Tensor], base: str = "") -> None:
    """Refuse stored values that no writer means: NaN codes, scales that are not finite, columns out of order.

    Decodes everything once, so that it finds whatever makes a weight NaN or infinite.

    Raises:
        CheckpointError: names the tensor, the first such row and column, and what is there.
    """
    matrix = matrix_of_tensors(encoding, tensors, base)
    check_order(encoding, tensors, matrix, base)
    step = max(_CHUNK // matrix.cols // 128, 1) * 128
    for begin in range(0, matrix.rows, step):
        values = FORMATS[encoding.format].decode(encoding, tensors, begin, min(begin + step, matrix.rows))
        broken = ~torch.isfinite(values)
        if bool(broken.any()):
            row, col = (int(index) for index in broken.nonzero()[0])
            raise CheckpointError(
                f"tensor {encoding.names(base)['codes']!r}: the weight at row {begin + row}, column {col} decodes to "
                f"{float(values[row, col])}, from a NaN code or a scale that is not finite ({encoding}); "
                "the file is damaged, or was not written for this format"
            )


def check_order(encoding: Encoding, tensors: Mapping[Role, torch.Tensor], matrix: Matrix, base: str) -> None:
    """Columns in order, and the shape that the file claims, as far as ``tensors`` has what says so.

    Raises:
        CheckpointError: names the tensor, what it says and what was expected.
    """
    names = encoding.names(base)
    if "shape" in tensors and tensors["shape"].tolist() != [matrix.rows, matrix.cols]:
        raise CheckpointError(
            f"tensor {names['shape']!r} says {tensors['shape'].tolist()}, but {names['codes']!r} holds "
            f"{[matrix.rows, matrix.cols]}; matrices padded to whole words are not supported"
        )
    if "group_index" in tensors:
        in_order = torch.arange(matrix.cols) // (encoding.group or matrix.cols)
        wrong = (tensors["group_index"] != in_order).nonzero()
        if len(wrong):
            column = int(wrong[0])
            raise CheckpointError(
                f"tensor {names['group_index']!r}: column {column} is in group "
                f"{int(tensors['group_index'][column])}, expected {int(in_order[column])}: columns are quantised in "
                "order of activation (act-order, desc_act), which is not supported; use a checkpoint quantised without"
            )


__all__ = [
    "FORMATS",
    "Codec",
    "check_order",
    "check_values",
    "dequantize",
    "encode",
    "encoded_headers",
    "matrix_of_tensors",
    "relative_error",
]
