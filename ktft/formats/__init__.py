"""Stored formats: how matrices lie in a checkpoint, and what they decode to.

- ``dtypes``: safetensors dtypes; ``encoding``: the description of one stored matrix.
- ``floats``, ``fp8``, ``fp4``, ``integers``, ``gptq_awq``, ``gguf_blocks``: one family each, its layouts and its
  arithmetic.
- ``table``: the one table of formats, and decoding, encoding and checking by it.
- ``bounds``: how far an encoded weight may be from what was encoded.
- ``written``: the formats that ``ktft convert`` writes.
- ``schemes``, ``detection``: what configs say; which encoding each matrix of a checkpoint has.

A format is added with its decoder in one of the family modules, a row in ``table.FORMATS``, and what its configs say in
``schemes``. To have routed experts in it, the kernels need their decoder too. Nothing here opens a file.
"""

from __future__ import annotations

from ktft.formats.bounds import half_steps
from ktft.formats.detection import Detection, StoredMatrix, detect
from ktft.formats.dtypes import DTYPE_BITS, DTYPE_NAMES, TORCH_DTYPES, tensor_bytes
from ktft.formats.encoding import Dimension, Encoding, Header, Matrix, Role, StoredTensor, matrix_of
from ktft.formats.floats import PLAIN_DTYPES, plain
from ktft.formats.fp4 import mxfp4, mxfp4_blocks, nvfp4_compressed, nvfp4_modelopt
from ktft.formats.fp8 import fp8_block, fp8_channel, fp8_tensor, mxfp8
from ktft.formats.gguf_blocks import GGUF_BLOCKS, OTHER_BLOCKS, gguf
from ktft.formats.gptq_awq import awq, gptq
from ktft.formats.integers import int8, int8_tensor, int_packed
from ktft.formats.schemes import quantization_config, read_scheme
from ktft.formats.table import (
    FORMATS,
    check_order,
    check_values,
    dequantize,
    encode,
    encoded_headers,
    matrix_of_tensors,
    relative_error,
)
from ktft.formats.written import WRITTEN, written_config

__all__ = [
    "DTYPE_BITS",
    "DTYPE_NAMES",
    "FORMATS",
    "GGUF_BLOCKS",
    "OTHER_BLOCKS",
    "PLAIN_DTYPES",
    "TORCH_DTYPES",
    "WRITTEN",
    "Detection",
    "Dimension",
    "Encoding",
    "Header",
    "Matrix",
    "Role",
    "StoredMatrix",
    "StoredTensor",
    "awq",
    "check_order",
    "check_values",
    "dequantize",
    "detect",
    "encode",
    "encoded_headers",
    "fp8_block",
    "fp8_channel",
    "fp8_tensor",
    "gguf",
    "gptq",
    "half_steps",
    "int8",
    "int8_tensor",
    "int_packed",
    "matrix_of",
    "matrix_of_tensors",
    "mxfp4",
    "mxfp4_blocks",
    "mxfp8",
    "nvfp4_compressed",
    "nvfp4_modelopt",
    "plain",
    "quantization_config",
    "read_scheme",
    "relative_error",
    "tensor_bytes",
    "written_config",
]
