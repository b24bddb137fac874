"""What ``ktft convert`` will write: every code the nearest, scales by the rule, errors as large as they have to be."""

from __future__ import annotations

import pytest
import torch

from ktft import formats
from ktft.formats import Encoding
from ktft.formats.fp4 import e2m1_codes

WRITTEN = [*formats.WRITTEN.values(), formats.int8(), formats.mxfp4_blocks(), formats.fp8_channel()]


def matrix(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows + cols)) * 0.02


@pytest.mark.parametrize("encoding", WRITTEN, ids=str)
def test_shapes_and_dtypes_are_the_encodings_first(encoding: Encoding) -> None:
    rows, cols = 700, 4096  # more rows than are encoded at a time
    tensors = formats.encode(matrix(rows, cols).bfloat16(), encoding)
    assert list(tensors) == [tensor.role for tensor in encoding.tensors]
    assert formats.matrix_of_tensors(encoding, tensors) == formats.Matrix(rows, cols)
    for tensor in encoding.tensors:
        assert formats.DTYPE_NAMES[tensors[tensor.role].dtype] == tensor.dtypes[0]
        assert tensors[tensor.role].shape == tuple(size.size(rows, cols) for size in tensor.shapes[0])
        assert tensors[tensor.role].is_contiguous()
    formats.check_values(encoding, tensors)


@pytest.mark.parametrize("encoding", WRITTEN, ids=str)
def test_rows_do_not_depend_on_how_many_there_are(encoding: Encoding) -> None:
    weight = matrix(700, 4096) * torch.logspace(-2, 2, 700)[:, None]  # 256 rows are encoded and decoded at a time
    tensors = formats.encode(weight, encoding)
    out = formats.dequantize(encoding, tensors, torch.bfloat16)
    for begin, end in ((128, 384), (640, 700)):
        part = formats.encode(weight[begin:end], encoding)
        assert torch.equal(formats.dequantize(encoding, part, torch.bfloat16), out[begin:end])


@pytest.mark.parametrize("encoding", WRITTEN, ids=str)
def test_every_code_is_the_nearest(encoding: Encoding) -> None:
    """Of the 256 or 16 numbers that a code can stand for with the scale that was chosen, none is nearer."""
    weight = matrix(8, 256)
    weight[0] *= 1e-3  # a row of its own size, and in every group a largest weight
    tensors = formats.encode(weight, encoding)
    out = formats.dequantize(encoding, tensors, torch.float32)
    # What each element's scale is, from the codes of ones.
    every = {
        "fp8": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float(),
        "int8": torch.arange(-128, 128).float(),
        "int4": torch.arange(-8, 8).float(),
        "mxfp4": torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6]),
    }[encoding.format]
    every = every[every.isfinite()]
    scales = tensors["scales"]
    scales = (torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()).view(len(scales), -1)
    scale = scales.repeat_interleave(encoding.group or 256, 1)
    scale = scale.repeat_interleave(encoding.block[0], 0)[:8]
    best = (every * scale[..., None] - weight[..., None]).abs().amin(2)
    torch.testing.assert_close((out - weight).abs(), best, rtol=1e-6, atol=1e-9)


def test_scales() -> None:
    weight = torch.zeros(130, 256)
    weight[0, 5], weight[129, 200] = -89.6, 7.0
    fp8 = formats.encode(weight, formats.fp8_block())
    assert fp8["scales"].tolist() == [[float(torch.tensor(89.6) / 448), 1.0], [1.0, 7 / 448]]
    assert fp8["codes"][0, 5].float() == -448
    int4 = formats.encode(weight, formats.int_packed(4, 32))
    assert int4["scales"][129].tolist() == [1.0] * 6 + [float(torch.tensor(7 / 7.5).bfloat16()), 1.0]
    assert formats.dequantize(formats.int_packed(4, 32), int4, torch.float32)[129, 200] == 7 * float(
        int4["scales"][129, 6]
    )
    int8 = formats.encode(weight, formats.int8())
    assert int8["scales"][129, 0] == torch.tensor(7 / 127.5).bfloat16() and int8["codes"][129, 200] == 127


@pytest.mark.parametrize(
    ("largest", "exponent"),
    [(6.0, 127), (4.0, 127), (6.99, 127), (7.0, 128), (8.0, 128), (3.49, 126), (3.5, 127), (1e-44, 0), (3e38, 252)],
)
def test_mxfp4_exponents_round_up_from_seven_eighths_of_the_next_power(largest: float, exponent: int) -> None:
    weight = torch.zeros(1, 32)
    weight[0, 3] = -largest
    tensors = formats.encode(weight, formats.mxfp4())
    assert tensors["scales"].item() == exponent
    out = formats.dequantize(formats.mxfp4(), tensors, torch.float32)
    assert float(out.abs().sum()) == pytest.approx(largest, rel=0.26)  # 5 becomes 4 or 6, at worst


def test_e2m1_rounds_ties_to_even_codes_and_near_ties_to_the_nearest() -> None:
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for code, number in enumerate(numbers):
        assert e2m1_codes(torch.tensor([number, -number])).tolist() == [code, code | 8]
    for lower in range(7):
        tie = torch.tensor((numbers[lower] + numbers[lower + 1]) / 2)
        below, above = torch.nextafter(tie, torch.tensor(0.0)), torch.nextafter(tie, torch.tensor(9.0))
        even = lower + lower % 2
        assert e2m1_codes(torch.stack((below, tie, above, -tie))).tolist() == [lower, even, lower + 1, even | 8]
    assert e2m1_codes(torch.tensor([7.0, 1e30, -1e30])).tolist() == [7, 7, 15]


@pytest.mark.parametrize("encoding", WRITTEN, ids=str)
def test_relative_errors_are_those_of_rounding(encoding: Encoding) -> None:
    """Errors spread evenly over a step are 1/√12 of it: of a scale for integers, of a number's own step for floats.

    Clipping adds a few percent: the largest weight of an int4 group lies half a step above the largest code, that of an
    MXFP4 group up to one scale above 6.
    """
    weight = matrix(512, 2048)
    tensors = formats.encode(weight, encoding)
    out = formats.dequantize(encoding, tensors, torch.float32)
    if encoding.format in ("int4", "int8"):
        steps = tensors["scales"].float().repeat_interleave(encoding.group or 2048, 1)
    else:
        bits, least = {"fp8": (4, 2**-9), "mxfp4": (2, 0.5)}[encoding.format]
        scales = tensors["scales"]
        scales = torch.exp2(scales.float() - 127) if encoding.format == "mxfp4" else scales
        scale = scales.repeat_interleave(encoding.group or 2048, 1).repeat_interleave(encoding.block[0], 0)
        steps = torch.exp2(torch.frexp(weight / scale).exponent - bits).clamp(min=least) * scale
    expected = float((steps.square().mean() / 12).sqrt() / weight.square().mean().sqrt())
    assert expected * 0.97 < formats.relative_error(weight, out) < expected * 1.2, expected


def test_relative_error_of_nothing() -> None:
    assert formats.relative_error(torch.zeros(2, 2), torch.zeros(2, 2)) == 0
    assert formats.relative_error(torch.zeros(2, 2), torch.ones(2, 2)) == float("inf")
    assert formats.relative_error(torch.full((2, 2), 4.0), torch.full((2, 2), 3.0)) == 0.25


def test_what_was_decoded_is_encoded_the_same() -> None:
    """A second conversion of fp8 blocks and MXFP4 changes nothing: the largest codes come out the largest again."""
    for encoding in (formats.fp8_block(), formats.mxfp4()):
        weight = matrix(256, 256)
        once = formats.dequantize(encoding, formats.encode(weight, encoding), torch.float32)
        twice = formats.dequantize(encoding, formats.encode(once, encoding), torch.float32)
        torch.testing.assert_close(twice, once, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("encoding", "weight", "message"),
    [
        (
            formats.int_packed(4, 128),
            torch.ones(4, 192),
            r"int4 \(groups of 128; .*multiples of 128; .* has 192",
        ),
        (formats.int_packed(8, 0), torch.ones(4, 6), "columns in multiples of 4; the matrix has 6"),
        (formats.mxfp4(), torch.ones(4, 48), "columns in multiples of 32; the matrix has 48"),
        (formats.fp8_block(), torch.tensor([[1.0, float("nan")]]), "not finite"),
        (formats.fp8_block(), torch.ones(4), r"expected a matrix \[rows, cols\], got a tensor \[4\]"),
        (formats.fp8_tensor(), torch.ones(4, 4), r"does not write fp8 \(allxall.*it writes fp8, mxfp4, int4, int8"),
        (formats.nvfp4_modelopt(), torch.ones(4, 16), "does not write nvfp4"),
        (formats.gguf("Q8_0"), torch.ones(4, 32), "does not write q8_0"),
        (formats.mxfp8(), torch.ones(4, 32), r"writes \.weight_scale as F32; fp8 .* has U8"),
    ],
    ids=str,
)
def test_what_cannot_be_written_is_refused(encoding: Encoding, weight: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        formats.encode(weight, encoding)
