"""Coded weights in the kernels: the bits of the plain kernels on the matrices that the reference decodes."""

from __future__ import annotations

import pytest
import torch

from ktft import formats, ops
from ktft.formats import Encoding
from ktft.weights import BLOCKS, CODED, PLAIN, ExpertWeights, lora_shapes
from tests.coded import ENCODINGS, coded_experts


def step(weights, dtype, tokens, *, seed=1, save=True, adapters=1):
    """Output and all gradients of one layer."""
    generator = torch.Generator().manual_seed(seed)
    e, h, i, k = weights.num_experts, weights.hidden_size, weights.intermediate_size, 2
    x = (torch.randn(tokens, h, generator=generator) / 4).to(dtype).requires_grad_()
    index = torch.stack([torch.randperm(e, generator=generator)[:k] for _ in range(tokens)])
    route_weights = torch.rand(tokens, k, generator=generator).requires_grad_()
    lora = [
        (torch.randn(shape, generator=generator) / shape[2] ** 0.5).requires_grad_()
        for _ in range(adapters)
        for shape in lora_shapes(e, h, i, 3)
    ]
    out = ops.moe_experts(x, index, route_weights, weights, lora=lora, scaling=[2.0] * adapters, save=save)
    grad = torch.randn(out.shape, generator=generator).to(dtype)
    return (out.detach(), *torch.autograd.grad(out, [x, route_weights, *lora], grad))


LEVELS = [*ops.cpu_report()["levels"], *ops.TEST_LEVELS]

# Sizes with whole blocks, and with edges of blocks, panels, parts and vectors.
SIZES = [(256, 128), (352, 96), (1184, 160)]
BLOCKS_OF_256 = [(1280, 256)]


def sizes_for(encoding: Encoding) -> list[tuple[int, int]]:
    """Those that its groups divide."""
    group = 1 if encoding.edges else encoding.group or 1
    return [sizes for sizes in SIZES if all(size % group == 0 for size in sizes)] or BLOCKS_OF_256


@pytest.mark.parametrize(
    ("isa", "dtype"),
    [
        pytest.param(isa, dtype, id=f"{isa}-{name}")
        for isa in LEVELS
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
        if dtype == torch.bfloat16 or "amx" not in isa  # has no kernels of its own for fp32
    ],
)
@pytest.mark.parametrize("name", ENCODINGS)
def test_the_bits_of_decoded_matrices(name, isa, dtype):
    for hidden, intermediate in sizes_for(ENCODINGS[name][0]):
        coded, plain = coded_experts(name, 3, hidden, intermediate, dtype)
        with ops.override(isa=isa, threads=2):
            for tokens in (3, 60):
                for ours, truth in zip(step(coded, dtype, tokens), step(plain, dtype, tokens), strict=True):
                    assert truth.abs().max() > 0
                    assert torch.equal(ours, truth), (hidden, intermediate, tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("isa", LEVELS)
def test_the_bits_of_every_second_column(isa, dtype):
    """Plain gpt-oss: gate and up share rows of the transpose, element by element."""
    for stored in (torch.bfloat16, torch.float16, torch.float32):
        for hidden, intermediate in SIZES:
            generator = torch.Generator().manual_seed(2)
            gate_up, down = (
                (torch.randn(3, *shape, generator=generator) / 8).to(stored)
                for shape in ((hidden, 2 * intermediate), (intermediate, hidden))
            )
            halves = gate_up[..., ::2], gate_up[..., 1::2]
            apart = ExpertWeights.from_tensors(*(half.contiguous() for half in halves), down, transposed=True)
            in_turn = ExpertWeights.from_tensors(*halves, down, transposed=True)
            assert (in_turn.gate.column_step, apart.gate.column_step) == (2, 1)
            with ops.override(isa=isa, threads=2):
                for tokens in (3, 60):
                    pairs = zip(step(in_turn, dtype, tokens), step(apart, dtype, tokens), strict=True)
                    assert all(torch.equal(ours, truth) for ours, truth in pairs), (stored, hidden, tokens)


def test_every_format_is_held_to_the_reference():
    """What files are read in, what the kernels take, and what is compared here."""
    stored = {*PLAIN, *CODED, *BLOCKS}
    not_for_experts = {name for name, _, _ in formats.OTHER_BLOCKS.values()}
    assert stored == {*formats.FORMATS, "int8_plain"} - not_for_experts
    assert not_for_experts < formats.FORMATS.keys()
    compared = {coded_experts(name, 1, 256, 256, torch.float32)[0].gate.format for name in ENCODINGS}
    assert compared == stored - {"bf16", "fp32"}
