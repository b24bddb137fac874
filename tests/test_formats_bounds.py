"""Half a step: what ktft writes stays within it, and no wrong code or scale does."""

from __future__ import annotations

import pytest
import torch

from ktft import formats
from ktft.formats import Encoding

ENCODINGS = [*formats.WRITTEN.values(), formats.fp8_channel(), formats.int8(), formats.int_packed(8, 32)]


def weights(kind: str) -> torch.Tensor:
    """Four kinds of 256 x 256: normal; many sizes; numbers that lie between two codes; rows of the largest one."""
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(256, 256, generator=generator)
    return {
        "normal": normal * 0.02,
        "sizes": normal * torch.logspace(-30, 30, 256)[:, None] * torch.logspace(-3, 3, 256),
        "halves": torch.randint(-31, 32, (256, 256), generator=generator) / 4 + 0.125,
        "largest": torch.full((256, 256), 1.0).copysign(normal) * torch.linspace(1, 2, 256)[:, None],
    }[kind]


def steps(weight: torch.Tensor, encoding: Encoding, tensors: dict[formats.Role, torch.Tensor]) -> torch.Tensor:
    difference = (formats.dequantize(encoding, tensors, torch.float32) - weight).abs()
    return difference / formats.half_steps(weight, encoding)


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@pytest.mark.parametrize("kind", ["normal", "sizes", "halves", "largest"])
def test_nothing_is_off_by_more(encoding: Encoding, kind: str) -> None:
    weight = weights(kind)
    found = steps(weight, encoding, formats.encode(weight, encoding))
    assert found.max() <= 1
    if kind == "normal":
        assert found.max() > 0.9  # the bound is no wider than it has to be


@pytest.mark.parametrize("encoding", formats.WRITTEN.values(), ids=str)
def test_wrong_codes_and_scales_are_off_by_more(encoding: Encoding) -> None:
    weight = weights("normal")
    for row in (0, 255):
        for change in (1, 2):
            tensors = formats.encode(weight, encoding)
            wrong = tensors["codes"].view(torch.uint8)[row]
            # The lowest code of every byte, up or down by one or two: one step at least from all but ties.
            wrong.copy_(torch.where(wrong & 7 < 4, wrong + change, wrong - change))
            assert (steps(weight, encoding, tensors)[row] > 1).any()
    for factor in (0.5, 2):
        tensors = formats.encode(weight, encoding)
        scales = tensors["scales"]
        tensors["scales"] = scales + (1 if factor == 2 else -1) if scales.dtype == torch.uint8 else scales * factor
        assert (steps(weight, encoding, tensors) > 1).any()


def test_by_hand() -> None:
    weight = torch.zeros(1, 32)
    weight[0, :6] = torch.tensor([6.0, -1.9, 2.5, 3.9, 0.1, 5.0])
    assert formats.half_steps(weight, formats.mxfp4())[0, :6].tolist() == [1, 0.25, 0.5, 0.5, 0.25, 1]
    assert formats.half_steps(2 * weight, formats.mxfp4())[0, :2].tolist() == [2, 0.5]
    weight[0, 0] = 7.0  # takes the next exponent
    assert formats.half_steps(weight, formats.mxfp4())[0, :3].tolist() == [1, 0.5, 0.5]
    int4 = formats.half_steps(weight, formats.int_packed(4, 32))[0]
    torch.testing.assert_close(int4[1:], torch.full((31,), 0.5 + 0.5 / 256), rtol=1e-5, atol=0)
    torch.testing.assert_close(float(int4[0]), 0.5 + 7.5 / 256, rtol=1e-5, atol=0)
    fp8 = formats.half_steps(weight, formats.fp8_block())[0]
    torch.testing.assert_close(fp8[:3], torch.tensor([7 / 16, 1.9 / 16, 2.5 / 16]), rtol=1e-5, atol=0)
    torch.testing.assert_close(float(fp8[10]), 7 / 448 / 1024, rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match="no bound is known for nvfp4"):
        formats.half_steps(torch.ones(2, 16), formats.nvfp4_modelopt())
