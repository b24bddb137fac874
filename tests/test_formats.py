"""Decoders against vectors worked out by hand: bit and nibble order, corner codes, edges of blocks and groups."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from ktft import formats
from ktft.formats import Encoding, Role
from ktft.mapping import CheckpointError

Tensors = dict[Role, torch.Tensor]


def decoded(encoding: Encoding, tensors: Tensors) -> list[list[float]]:
    return formats.dequantize(encoding, tensors, torch.float32).tolist()


def fp32(number: float) -> float:
    """The number rounded to fp32."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


# --- plain ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("BF16", torch.bfloat16), ("F16", torch.float16), ("F32", None)])
def test_plain_weights_are_exact_in_fp32(dtype: str, torch_dtype: torch.dtype | None) -> None:
    weight = torch.randn(5, 7).to(torch_dtype or torch.float32)
    assert torch.equal(formats.dequantize(formats.plain(dtype), {"codes": weight}, torch.float32), weight.float())


def test_rounding_to_the_compute_dtype_is_to_nearest_even_and_once() -> None:
    # bf16 keeps 8 bits of significand: 1 + 1/128 is a number, 1 + 1/256 a tie, 1 + 3/256 a tie the other way.
    weight = torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(1 + 2**-8)]])
    out = formats.dequantize(formats.plain("F32"), {"codes": weight}, torch.bfloat16)
    assert out.tolist() == [[1.0, 1 + 2**-6, 1 + 2**-7, -1.0]]


# --- fp8 --------------------------------------------------------------------------------------------------------------

E4M3 = {
    0x00: 0.0,
    0x01: 2**-9,  # the smallest subnormal
    0x07: 7 * 2**-9,  # the largest
    0x08: 2**-6,  # the smallest normal number
    0x38: 1.0,
    0x3C: 1.5,
    0x45: 3.25,
    0x7E: 448.0,
    0x81: -(2**-9),
    0xB8: -1.0,
    0xFE: -448.0,
}


def test_e4m3_corner_codes() -> None:
    codes = torch.tensor([list(E4M3)], dtype=torch.uint8).view(torch.float8_e4m3fn)
    tensors: Tensors = {"codes": codes, "scales": torch.tensor([0.5])}
    assert decoded(formats.fp8_tensor(), tensors) == [[value * 0.5 for value in E4M3.values()]]
    zero = torch.tensor([[0x80]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    (value,) = decoded(formats.fp8_tensor(), {"codes": zero, "scales": torch.tensor(1.0)})[0]
    assert value == 0 and math.copysign(1, value) == -1


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_codes_decode_to_nan_and_are_found(code: int) -> None:
    codes = torch.full((3, 200), 0x38, dtype=torch.uint8)
    codes[1, 130] = code
    tensors: Tensors = {"codes": codes.view(torch.float8_e4m3fn), "scales": torch.ones(1, 2)}
    out = formats.dequantize(formats.fp8_block(), tensors, torch.bfloat16)
    assert out.isnan().nonzero().tolist() == [[1, 130]]
    with pytest.raises(CheckpointError, match=r"'x\.weight': the weight at row 1, column 130 decodes to nan"):
        formats.check_values(formats.fp8_block(), tensors, "x")
    tensors["codes"] = torch.ones(3, 200).to(torch.float8_e4m3fn)
    formats.check_values(formats.fp8_block(), tensors, "x")
    tensors["scales"][0, 1] = math.inf
    with pytest.raises(CheckpointError, match="row 0, column 128 decodes to inf"):
        formats.check_values(formats.fp8_block(), tensors, "x")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "cols"), [(128, 256), (130, 300), (257, 129), (3, 5), (1, 128)])
def test_fp8_blocks_are_cut_off_at_the_edges(rows: int, cols: int, dtype: torch.dtype) -> None:
    scales = (torch.arange(-(-rows // 128) * -(-cols // 128)).view(-(-rows // 128), -1) + 1).to(dtype) / 4
    tensors: Tensors = {"codes": torch.full((rows, cols), 1.5).to(torch.float8_e4m3fn), "scales": scales}
    out = formats.dequantize(formats.fp8_block(), tensors, torch.float32)
    for row in {0, min(127, rows - 1), rows - 1}:
        for col in {0, min(127, cols - 1), min(128, cols - 1), cols - 1}:
            assert out[row, col] == 1.5 * float(scales[row // 128, col // 128]), (row, col)


def test_fp8_block_size_is_the_encodings() -> None:
    tensors: Tensors = {"codes": torch.ones(5, 7).to(torch.float8_e4m3fn), "scales": torch.tensor([[2.0, 3], [4, 5]])}
    out = decoded(formats.fp8_block((4, 6)), tensors)
    assert out == [[2.0] * 6 + [3.0]] * 4 + [[4.0] * 6 + [5.0]]


def test_fp8_with_power_of_two_scales() -> None:
    """e8m0, as DeepSeek's ue8m0: 127 is 1, 0 the subnormal 2⁻¹²⁷, 255 NaN; as a dtype of its own or as bytes."""
    exponents = torch.tensor([[127, 130, 0, 255]], dtype=torch.uint8)
    codes = torch.full((1, 4), 448.0).to(torch.float8_e4m3fn)
    for scales in (exponents, exponents.view(torch.float8_e8m0fnu)):
        out = decoded(formats.fp8_block((1, 1)), {"codes": codes, "scales": scales})[0]
        assert out[:3] == [448.0, 448.0 * 8, 448.0 * 2**-127] and math.isnan(out[3])


def test_fp8_per_row_and_modelopts_dimensions() -> None:
    codes = torch.tensor([[1.0, 2], [3, 4]]).to(torch.float8_e4m3fn)
    for shape in ((2, 1), (2,)):
        scales = torch.tensor([0.5, 10]).view(shape)
        assert decoded(formats.fp8_channel(), {"codes": codes, "scales": scales}) == [[0.5, 1.0], [30.0, 40.0]]
    scales = torch.tensor([1.0, 2, 3, 4]).view(2, 1, 2, 1)
    assert decoded(formats.fp8_block((1, 1)), {"codes": codes, "scales": scales}) == [[1.0, 4.0], [9.0, 16.0]]


def test_mxfp8_has_a_scale_for_32_columns() -> None:
    scales = torch.tensor([[127, 128]], dtype=torch.uint8)
    tensors: Tensors = {"codes": torch.ones(1, 64).to(torch.float8_e4m3fn), "scales": scales}
    assert decoded(formats.mxfp8(), tensors) == [[1.0] * 32 + [2.0] * 32]


# --- fp4 --------------------------------------------------------------------------------------------------------------

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
BYTES = [2 * i | (2 * i + 1) << 4 for i in range(8)]
"""The 16 codes in order, the first of each pair in the low half of its byte."""


@pytest.mark.parametrize("encoding", [formats.mxfp4_blocks(), formats.mxfp4(), formats.mxfp4(".weight", ".scale")])
def test_mxfp4(encoding: Encoding) -> None:
    packed = torch.tensor(BYTES * 2 + BYTES[::-1] * 2, dtype=torch.uint8)
    packed = packed.view(1, 2, 16) if encoding == formats.mxfp4_blocks() else packed.view(1, 32)
    scales = torch.tensor([[127, 120]], dtype=torch.uint8)
    backwards = [value for i in range(7, -1, -1) for value in E2M1[2 * i : 2 * i + 2]]
    out = decoded(encoding, {"codes": packed, "scales": scales})
    assert out == [E2M1 * 2 + [value / 128 for value in backwards * 2]]
    assert [math.copysign(1, value) for value in out[0][:16]] == [1.0] * 8 + [-1.0] * 8  # −0 stays −0


def test_mxfp4_corner_exponents() -> None:
    packed = torch.full((1, 64), 0x71, dtype=torch.uint8)  # 0.5 and 6
    exponents = torch.tensor([[0, 1, 254, 255]], dtype=torch.uint8)
    out = decoded(formats.mxfp4(), {"codes": packed, "scales": exponents})[0]
    assert out[0:2] == [2**-128, 6 * 2**-127] and out[32:34] == [2**-127, 6 * 2**-126]
    assert out[64:66] == [2.0**126, math.inf] and math.isnan(out[96])


def test_nvfp4_scales_are_multiplied_by_modelopt_and_divided_by_compressed_tensors() -> None:
    packed = torch.tensor([[0x21] * 8 + [0xF7] * 8], dtype=torch.uint8)  # 0.5, 1 and 6, −6
    scales = torch.tensor([[0x38, 0x3E]], dtype=torch.uint8).view(torch.float8_e4m3fn)  # 1 and 1.75
    divisor = fp32(1.7)
    factor = fp32(1 / divisor)
    of_second = fp32(1.75 * factor)  # rounded before the codes are multiplied
    expected = [0.5 * factor, factor] * 8 + [fp32(6 * of_second), fp32(-6 * of_second)] * 8
    tensors: Tensors = {"codes": packed, "scales": scales, "global_scale": torch.tensor(factor)}
    assert decoded(formats.nvfp4_modelopt(), tensors) == [expected]
    assert fp32(fp32(6 * 1.75) * factor) != expected[16]  # so that another order would be seen
    of_first, of_second = fp32(1 / divisor), fp32(1.75 / divisor)
    expected = [0.5 * of_first, of_first] * 8 + [fp32(6 * of_second), fp32(-6 * of_second)] * 8
    tensors = {"codes": packed, "scales": scales, "global_divisor": torch.tensor([divisor])}
    assert decoded(formats.nvfp4_compressed(), tensors) == [expected]
    assert fp32(fp32(6 * 1.75) / divisor) != expected[16] and of_second != fp32(1.75 * factor)


# --- integers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [8, 16, 0])
def test_int4_is_offset_binary_with_the_first_column_in_the_lowest_bits(group: int) -> None:
    words = torch.tensor([[0x76543210, 0xFEDCBA98 - (1 << 32)]], dtype=torch.int32)
    scales = torch.tensor([[0.5, 2.0]]) if group == 8 else torch.tensor([[0.5]])
    tensors: Tensors = {"codes": words, "scales": scales.bfloat16(), "shape": torch.tensor([1, 16])}
    second = 2.0 if group == 8 else 0.5
    expected = [0.5 * code for code in range(-8, 0)] + [second * code for code in range(8)]
    assert decoded(formats.int_packed(4, group), tensors) == [expected]


def test_int4_in_groups_of_32_and_more_rows_than_are_decoded_at_a_time() -> None:
    rows, cols = 700, 4096
    codes = torch.arange(rows * cols).view(rows, cols) * 7919 % 16
    words = (codes.view(rows, -1, 8) << torch.arange(0, 32, 4)).sum(2)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    scales = torch.rand(rows, cols // 32).half()
    tensors: Tensors = {"codes": words, "scales": scales, "shape": torch.tensor([rows, cols])}
    expected = (codes - 8).float() * scales.float().repeat_interleave(32, 1)
    encoding = formats.int_packed(4, 32)
    assert torch.equal(formats.dequantize(encoding, tensors, torch.float32), expected)
    assert torch.equal(formats.dequantize(encoding, tensors, torch.bfloat16), expected.bfloat16())


def test_int8_plain_and_packed() -> None:
    codes = torch.tensor([[-128, -1, 0, 127], [1, 2, 3, 4]], dtype=torch.int8)
    scales = torch.tensor([[0.25], [3.0]])
    expected = [[-32.0, -0.25, 0.0, 31.75], [3.0, 6.0, 9.0, 12.0]]
    assert decoded(formats.int8(), {"codes": codes, "scales": scales}) == expected
    # code + 128, the first column in the lowest byte: 0x00, 0x7F, 0x80, 0xFF
    words = torch.tensor([[0xFF807F00 - (1 << 32)], [0x84838281 - (1 << 32)]], dtype=torch.int32)
    tensors: Tensors = {"codes": words, "scales": scales, "shape": torch.tensor([2, 4])}
    assert decoded(formats.int_packed(8, 0), tensors) == expected
    assert decoded(formats.int8_tensor(), {"codes": codes, "scales": torch.tensor(2.0)})[1] == [2.0, 4.0, 6.0, 8.0]
    grouped: Tensors = {"codes": codes, "scales": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    assert decoded(formats.int8(2), grouped) == [[-128.0, -1.0, 0.0, 254.0], [3.0, 6.0, 12.0, 16.0]]


# --- refusals ---------------------------------------------------------------------------------------------------------


def codes8(*shape: int) -> torch.Tensor:
    return torch.ones(*shape).to(torch.float8_e4m3fn)


WORDS = torch.zeros(4, 8, dtype=torch.int32)


@pytest.mark.parametrize(
    ("encoding", "tensors", "message"),
    [
        (formats.fp8_block(), {"codes": codes8(4, 8)}, r"'x\.weight_scale_inv' is missing: 'x\.weight' is stored as"),
        (
            formats.fp8_block(),
            {"codes": codes8(4, 200), "scales": torch.ones(2, 1)},
            r"'x\.weight_scale_inv': expected shape \[1, 2\] or \[1, 1, 2, 1\].*found \[2, 1\]",
        ),
        (
            formats.fp8_block(),
            {"codes": torch.ones(4, 8), "scales": torch.ones(1, 1)},
            r"'x\.weight': expected dtype F8_E4M3 as part of fp8.*found F32",
        ),
        (
            formats.fp8_channel(),
            {"codes": codes8(4, 8), "scales": torch.ones(4, 1, dtype=torch.float64)},
            r"'x\.weight_scale': expected dtype F32 or BF16 .* found torch.float64",
        ),
        (formats.fp8_tensor(), {"codes": codes8(4), "scales": torch.ones(1)}, r"'x\.weight': expected shape .* \[4\]"),
        (
            formats.fp8_tensor(),
            {"codes": codes8(2, 4, 8), "scales": torch.ones(2, 1)},
            r"'x\.weight' holds 2 experts; expected one matrix",
        ),
        (
            formats.mxfp8(),
            {"codes": codes8(4, 40), "scales": torch.zeros(4, 2, dtype=torch.uint8)},
            r"the 40 columns of the matrix are no multiple of 32",
        ),
        (
            formats.int_packed(4, 24),
            {"codes": WORDS, "scales": torch.ones(4, 3), "shape": torch.tensor([4, 64])},
            r"the 64 columns of the matrix are no multiple of 24",
        ),
        (
            formats.int_packed(4, 32),
            {"codes": WORDS, "scales": torch.ones(4, 2), "shape": torch.tensor([4, 60])},
            r"'x\.weight_shape' says \[4, 60\], but 'x\.weight_packed' holds \[4, 64\]",
        ),
        (
            formats.mxfp4_blocks(),
            {"codes": torch.zeros(4, 2, 8, dtype=torch.uint8), "scales": torch.zeros(4, 2, dtype=torch.uint8)},
            r"'x_blocks': expected shape \[rows, cols/32, 16\].*found \[4, 2, 8\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(encoding: Encoding, tensors: Tensors, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        formats.dequantize(encoding, tensors, torch.bfloat16, "x")


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"to bfloat16, float16 or float32, not to torch\.float64"):
        formats.dequantize(formats.plain("F32"), {"codes": torch.ones(1, 1)}, torch.float64)
