"""GGUF's blocks, GPTQ and AWQ: vectors worked out by hand, and the ``gguf`` package's own decoders."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from ktft import formats
from ktft.formats import Role
from ktft.mapping import CheckpointError

Tensors = dict[Role, torch.Tensor]


def half(number: float) -> list[int]:
    """The two bytes of an fp16 number."""
    return list(torch.tensor([number], dtype=torch.float16).view(torch.uint8))


def decode_block(kind: str, block: list[Any]) -> list[float]:
    rows = torch.tensor([[int(byte) for byte in block]], dtype=torch.uint8)
    return [float(value) for value in formats.dequantize(formats.gguf(kind), {"codes": rows}, torch.float32)[0]]


BYTES = [i | (15 - i) << 4 for i in range(16)]
"""Low halves 0 to 15, high halves 15 to 0."""


def test_q8_0() -> None:
    codes = [0, 1, 127, 128, 255] + [2] * 27
    assert decode_block("Q8_0", half(0.5) + codes) == [0.0, 0.5, 63.5, -64.0, -0.5] + [1.0] * 27


def test_q4_0_halves_of_a_byte_are_16_columns_apart() -> None:
    expected = [0.25 * (code - 8) for code in [*range(16), *range(15, -1, -1)]]
    assert decode_block("Q4_0", half(0.25) + BYTES) == expected


def test_q4_1_has_a_minimum_that_is_added() -> None:
    expected = [0.25 * code + 3 for code in [*range(16), *range(15, -1, -1)]]
    assert decode_block("Q4_1", half(0.25) + half(3) + BYTES) == expected


def test_q4_k() -> None:
    """Eight 6-bit scales and minima in 12 bytes; of 64 columns the first 32 in the low halves of 32 bytes."""
    scales, minima = [1, 2, 3, 63, 17, 33, 62, 50], [0, 5, 63, 1, 18, 40, 61, 32]
    packed = [scales[i] | (scales[i + 4] >> 4) << 6 for i in range(4)]
    packed += [minima[i] | (minima[i + 4] >> 4) << 6 for i in range(4)]
    packed += [scales[i + 4] & 15 | (minima[i + 4] & 15) << 4 for i in range(4)]
    codes = [(7 * i + i // 32) % 16 for i in range(256)]
    quants = [codes[64 * q + i] | codes[64 * q + 32 + i] << 4 for q in range(4) for i in range(32)]
    expected = [0.5 * scales[i // 32] * codes[i] - 0.25 * minima[i // 32] for i in range(256)]
    assert decode_block("Q4_K", half(0.5) + half(0.25) + packed + quants) == expected


def test_q6_k() -> None:
    codes = [(11 * i + i // 16) % 64 for i in range(256)]
    scales = [-128, 127, 1, -1, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
    low, high = [], []
    for first in (0, 128):
        low += [codes[first + i] & 15 | (codes[first + 64 + i] & 15) << 4 for i in range(64)]
        high += [sum((codes[first + i + 32 * k] >> 4) << 2 * k for k in range(4)) for i in range(32)]
    block = low + high + [scale & 255 for scale in scales] + half(0.5)
    assert decode_block("Q6_K", block) == [0.5 * scales[i // 16] * (codes[i] - 32) for i in range(256)]


def test_gguf_mxfp4_has_its_own_order_of_nibbles() -> None:
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    assert decode_block("MXFP4", [129, *BYTES]) == [4 * value for value in numbers + numbers[::-1]]
    assert decode_block("MXFP4", [0, *BYTES])[:3] == [0.0, 2**-128, 2**-127]
    assert math.isnan(decode_block("MXFP4", [255, *BYTES])[1])


def test_rows_have_several_blocks() -> None:
    rows = torch.tensor([half(1) + [1] * 32 + half(2) + [1] * 32, half(3) + [1] * 32 + half(4) + [1] * 32])
    out = formats.dequantize(formats.gguf("Q8_0"), {"codes": rows.to(torch.uint8)}, torch.bfloat16)
    assert out.shape == (2, 64) and out[:, ::32].tolist() == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize("kind", list(formats.GGUF_BLOCKS))
def test_every_block_type_equals_the_gguf_package(kind: str) -> None:
    """Bit for bit, on random bytes with sane scales; but ggml has no −0 in MXFP4."""
    gguf = pytest.importorskip("gguf")
    _, columns, size = formats.GGUF_BLOCKS[kind]
    rows = np.random.default_rng(0).integers(0, 256, (64, 5, size), dtype=np.uint8)
    scales = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208], "MXFP4": []}
    for byte in scales[kind]:  # fp16 numbers with exponents below that of infinity
        rows[..., byte + 1] &= 0xBF
    if kind == "MXFP4":
        rows[..., 0] = np.minimum(rows[..., 0], 250)
    rows = rows.reshape(64, -1)
    expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    out = formats.dequantize(formats.gguf(kind), {"codes": torch.from_numpy(rows)}, torch.float32)
    assert out.shape == (64, 5 * columns) and torch.equal(out, torch.from_numpy(expected))  # 0 equals −0 here
    rounded = formats.dequantize(formats.gguf(kind), {"codes": torch.from_numpy(rows)}, torch.bfloat16)
    assert torch.equal(rounded, torch.from_numpy(expected).bfloat16())


@pytest.mark.parametrize("kind", formats.OTHER_BLOCKS)
def test_other_block_types_are_the_gguf_packages(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    number = gguf.GGMLQuantizationType[kind]
    _, columns, size = formats.OTHER_BLOCKS[kind]
    assert (columns, size) == gguf.GGML_QUANT_SIZES[number]
    rows = np.random.default_rng(0).integers(0, 64, (6, 3 * size), dtype=np.uint8)
    out = formats.dequantize(formats.gguf(kind), {"codes": torch.from_numpy(rows)}, torch.float32)
    assert out.shape == (6, 3 * columns)
    assert torch.equal(out, torch.from_numpy(gguf.quants.dequantize(rows, number)))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "MXFP4"])
def test_what_the_gguf_package_writes_is_close_to_what_it_was(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    weight = np.random.default_rng(1).standard_normal((16, 256), dtype=np.float32)
    rows = torch.from_numpy(gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind]))
    out = formats.dequantize(formats.gguf(kind), {"codes": rows}, torch.float32)
    # Half a step of 8 bits in 127 of the largest of 32, of 4 bits in 8; e2m1 keeps two bits of each number.
    assert formats.relative_error(torch.from_numpy(weight), out) < (0.01 if kind == "Q8_0" else 0.13)


def test_a_row_that_ends_inside_a_block_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'x\.weight': expected shape \[rows, cols/32·34\].*found \[2, 60\]"):
        formats.dequantize(formats.gguf("Q8_0"), {"codes": torch.zeros(2, 60, dtype=torch.uint8)}, torch.float32, "x")


# --- GPTQ and AWQ -----------------------------------------------------------------------------------------------------


def words(nibbles: list[int]) -> int:
    """An int32 with the first of eight nibbles in its lowest bits."""
    value = sum(nibble << 4 * i for i, nibble in enumerate(nibbles))
    return value - (1 << 32) if value >= 1 << 31 else value


CODES = [[(5 * row + 3 * col + col // 8) % 16 for col in range(16)] for row in range(8)]
ZEROS = [[8, 1, 15, 0, 7, 3, 2, 9], [4, 5, 6, 7, 8, 9, 10, 11]]
"""By group of 8 columns, then row."""
SCALES = torch.tensor([[0.5, 1, 2, 3, 4, 5, 6, 7], [0.25, 8, 9, 10, 11, 12, 13, 14]]).half()
EXPECTED = [
    [(CODES[row][col] - ZEROS[col // 8][row]) * float(SCALES[col // 8, row]) for col in range(16)] for row in range(8)
]


def gptq_tensors(version: int) -> Tensors:
    codes = [[words([CODES[row][8 * word + i] for i in range(8)]) for row in range(8)] for word in range(2)]
    # The first version stores one less: 0 becomes 15.
    zeros = [[words([(zero - (version == 1)) % 16 for zero in group])] for group in ZEROS]
    role: Role = "zero_points_less_one" if version == 1 else "zero_points"
    return {
        "codes": torch.tensor(codes, dtype=torch.int32),
        "scales": SCALES,
        role: torch.tensor(zeros, dtype=torch.int32),
        "group_index": torch.arange(16, dtype=torch.int32) // 8,
    }


@pytest.mark.parametrize("version", [1, 2])
def test_gptq_stores_zero_points_less_one_in_its_first_version(version: int) -> None:
    tensors = gptq_tensors(version)
    assert formats.dequantize(formats.gptq(8, version), tensors, torch.float32).tolist() == EXPECTED
    del tensors["group_index"]  # older files have none
    assert formats.dequantize(formats.gptq(8, version), tensors, torch.float32).tolist() == EXPECTED


def test_gptq_act_order_is_refused() -> None:
    tensors = gptq_tensors(1)
    tensors["group_index"][3] = 1
    message = r"'x\.g_idx': column 3 is in group 1, expected 0: .*act-order.*not supported"
    for call in (
        lambda: formats.dequantize(formats.gptq(8), tensors, torch.float32, "x"),
        lambda: formats.check_values(formats.gptq(8), tensors, "x"),
    ):
        with pytest.raises(CheckpointError, match=message):
            call()


def test_gptq_with_one_group() -> None:
    tensors = gptq_tensors(2)
    tensors = {**tensors, "scales": SCALES[:1], "zero_points": tensors["zero_points"][:1]}
    tensors["group_index"] = torch.zeros(16, dtype=torch.int32)
    out = formats.dequantize(formats.gptq(0, 2), tensors, torch.float32)
    assert out.tolist() == [[(CODES[r][c] - ZEROS[0][r]) * float(SCALES[0, r]) for c in range(16)] for r in range(8)]


def test_awq_has_rows_0_2_4_6_1_3_5_7_from_the_lowest_bits() -> None:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors: Tensors = {
        "codes": torch.tensor([[words([CODES[row][col] for row in order])] for col in range(16)], dtype=torch.int32),
        "scales": SCALES,
        "zero_points": torch.tensor([[words([group[row] for row in order])] for group in ZEROS], dtype=torch.int32),
    }
    assert formats.dequantize(formats.awq(8), tensors, torch.float32).tolist() == EXPECTED


@pytest.mark.parametrize("encoding", [formats.gptq(128), formats.awq(128)])
def test_more_rows_than_are_decoded_at_a_time(encoding: formats.Encoding) -> None:
    """Codes that say their row and column, so that a chunk in the wrong place shows."""
    rows, cols = 264, 8192
    of_row = torch.arange(rows)[:, None] * 3 + torch.arange(rows)[:, None] // 16
    codes = (of_row + torch.arange(cols)) % 16
    shifts = torch.arange(0, 32, 4)
    if encoding.format == "gptq":
        packed = (codes.view(rows, -1, 8) << shifts).sum(2).t()
    else:
        packed = (codes.t().reshape(cols, -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]] << shifts).sum(2)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()
    zero = (torch.arange(rows // 8) // 5 % 7).int()  # of eight rows, and so of every nibble
    zeros = (zero * 0x11111111).expand(cols // 128, -1).contiguous()
    scales = (torch.arange(rows) + 1.0).expand(cols // 128, -1).half()
    tensors: Tensors = {"codes": packed.contiguous(), "scales": scales, encoding.tensors[2].role: zeros}
    out = formats.dequantize(encoding, tensors, torch.float32)
    numbers = codes - zero.repeat_interleave(8)[:, None] - {"gptq": 1, "awq": 0}[encoding.format]
    assert torch.equal(out, numbers * scales[:1].t().float())
