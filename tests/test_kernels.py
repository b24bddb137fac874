"""The kernels against float64 torch, at every ISA level of this machine and both compute dtypes."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from ktft import ops, reference
from ktft.activation import SWIGLU, Activation, clamped_swiglu
from ktft.weights import ExpertWeights
from tests.layer_truth import Case, Inputs, layer_truth
from tests.noise import excess

LEVELS = [*ops.cpu_report()["levels"], *ops.TEST_LEVELS]
DTYPES = [torch.float32, torch.bfloat16]

CLAMPED = clamped_swiglu(1.702, 0.8)
"""gpt-oss's activation with a limit that one number in five of gate and two in five of up lie beyond."""

CASES = {
    "plain": Case(4, 2, 32, 48, 8, 17),
    "odd sizes": Case(3, 2, 37, 21, 3, 5, seed=1),
    "one token": Case(8, 2, 70, 130, 16, 1, seed=2),
    "two tokens, rank 1": Case(3, 1, 64, 40, 1, 2, seed=3),
    "many rows": Case(2, 2, 50, 66, 3, 300, seed=4),
    "one expert": Case(1, 1, 16, 16, 8, 17, seed=5),
    "large rank": Case(2, 1, 20, 24, 70, 17, seed=6),
    "sentinel ids": Case(4, 3, 24, 40, 8, 17, sentinels=True, seed=7),
    "two adapters": Case(4, 2, 33, 48, 8, 17, adapters=2, seed=8),
    "adapter per token": Case(4, 2, 40, 48, 3, 17, adapters=3, per_token=True, seed=9),
    "dropout": Case(4, 2, 40, 31, 8, 17, dropout=0.3, seed=10),
    "dropout, adapters": Case(3, 2, 34, 48, 3, 17, adapters=2, dropout=0.5, per_token=True, seed=11),
    "no adapter": Case(4, 2, 48, 40, 8, 17, adapters=0, seed=12),
    "wide": Case(2, 1, 300, 520, 16, 5, seed=13),
    "ranks that differ": Case(3, 2, 37, 40, 0, 17, adapters=3, ranks=(3, 65, 1), dropout=0.2, seed=14),
    "largest rank": Case(2, 1, 21, 24, 256, 5, seed=15),
    "rank 255 per token": Case(2, 1, 40, 23, 0, 17, adapters=2, ranks=(255, 8), per_token=True, seed=16),
    "an expert twice": Case(3, 3, 24, 40, 8, 150, duplicates=True, seed=17),
    "twice, dropout": Case(2, 2, 33, 40, 8, 150, duplicates=True, dropout=0.4, seed=18),
    "several parts, few rows": Case(2, 1, 2085, 1043, 8, 9, seed=19),
    "several parts, many rows": Case(2, 1, 1101, 70, 3, 60, seed=20),
    "gpt-oss": Case(4, 2, 40, 48, 8, 17, activation=CLAMPED, biased=True, seed=21),
    "gpt-oss, adapter per token": Case(
        4,
        3,
        37,
        21,
        3,
        70,
        adapters=3,
        per_token=True,
        sentinels=True,
        dropout=0.3,
        activation=CLAMPED,
        biased=True,
        seed=22,
    ),
    "gpt-oss, several parts": Case(2, 1, 1101, 130, 3, 20, activation=CLAMPED, biased=True, seed=23),
    "biases": Case(2, 2, 66, 70, 0, 200, adapters=0, biased=True, seed=24),
}


def unaligned(tensor: torch.Tensor, byte_offset: int) -> torch.Tensor:
    """A copy whose data begins byte_offset bytes after a 64-byte boundary, as a tensor in a safetensors file may."""
    size = tensor.element_size()
    buffer = torch.empty(tensor.numel() + 128 // size, dtype=tensor.dtype)
    start = (-buffer.data_ptr() % 64 + byte_offset) // size
    view = buffer[start : start + tensor.numel()].view(tensor.shape)
    assert view.data_ptr() % 64 == byte_offset
    return view.copy_(tensor)


def weights_of(
    inputs: Inputs, *, transposed: bool = False, byte_offset: int = 0, dtype: torch.dtype = torch.bfloat16
) -> ExpertWeights:
    tensors = [inputs.gate, inputs.up, inputs.down]
    if transposed:
        tensors = [t.transpose(1, 2).contiguous() for t in tensors]
    return described(inputs, [unaligned(t.to(dtype), byte_offset) for t in tensors], transposed=transposed)


def described(inputs: Inputs, tensors: list[torch.Tensor], *, transposed: bool = False) -> ExpertWeights:
    return ExpertWeights.from_tensors(
        *tensors, transposed=transposed, activation=inputs.case.activation, biases=inputs.biases
    )


def in_turn(inputs: Inputs, dtype: torch.dtype) -> ExpertWeights:
    """As gpt-oss's plain files have them: the transposes, columns of gate and up in turn. The last column of up ends a
    page."""
    gate_up = guarded(torch.stack([inputs.gate, inputs.up], 2).flatten(1, 2).transpose(1, 2).to(dtype))
    down = guarded(inputs.down.transpose(1, 2).to(dtype))
    return described(inputs, [gate_up[..., ::2], gate_up[..., 1::2], down], transposed=True)


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose last byte is the last before a page that cannot be read, like the last tensor of a mapped file."""
    size = tensor.numel() * tensor.element_size()
    length = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, length + mmap.PAGESIZE)
    view = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=length - size).view(tensor.shape)
    view.copy_(tensor)
    libc = ctypes.CDLL(None, use_errno=True)
    page = ctypes.c_void_p(view.data_ptr() + size)
    assert libc.mprotect(page, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return view


def mixed_weights(inputs: Inputs) -> ExpertWeights:
    """Gate, up and down in different formats and layouts, with a row stride longer than the row."""
    padded = torch.cat([inputs.up, torch.full_like(inputs.up[:, :, :3], float("nan"))], dim=2)[
        :, :, : inputs.up.shape[2]
    ]
    plain = ExpertWeights.from_tensors(inputs.gate.float(), inputs.gate.float(), inputs.down.float())
    strided = ExpertWeights.from_tensors(padded, padded, inputs.down)
    turned = ExpertWeights.from_tensors(
        *(t.transpose(1, 2).contiguous() for t in (inputs.gate, inputs.up, inputs.down)), transposed=True
    )
    return ExpertWeights(
        plain.gate,
        strided.up,
        turned.down,
        hidden_size=inputs.case.hidden,
        intermediate_size=inputs.case.intermediate,
        owner=(plain, strided, turned),
        residency_known=False,
        activation=inputs.case.activation,
        biases=inputs.biases,
    )


def weights_in(layout: str, inputs: Inputs) -> ExpertWeights:
    if layout == "mixed":
        return mixed_weights(inputs)
    if layout.startswith("guard page"):
        tensors = [inputs.gate, inputs.up, inputs.down]
        transposed = layout.endswith("transposed")
        if transposed:
            tensors = [t.transpose(1, 2).contiguous() for t in tensors]
        return described(inputs, [guarded(t) for t in tensors], transposed=transposed)
    if layout.startswith("in turn"):
        return in_turn(inputs, torch.float32 if layout.endswith("fp32") else torch.bfloat16)
    if layout.startswith("offset"):
        return weights_of(inputs, byte_offset=int(layout.split()[1]))
    return weights_of(
        inputs, transposed=layout == "transposed", dtype=torch.float32 if layout == "fp32 file" else torch.bfloat16
    )


LAYOUTS = [
    "rows", "transposed", "offset 8", "offset 2", "fp32 file", "mixed", "guard page", "guard page, transposed",
    "in turn", "in turn, fp32",
]  # fmt: skip


def run(inputs: Inputs, weights: ExpertWeights, *, save: bool = True) -> tuple[torch.Tensor, ...]:
    """out, d hidden, d routing weights, d LoRA ..."""
    x = inputs.x.clone().requires_grad_()
    route_weights = inputs.route_weights.clone().requires_grad_()
    lora = [t.clone().requires_grad_() for t in inputs.lora]
    out = ops.moe_experts(
        x, inputs.index, route_weights, weights, lora=lora, scaling=inputs.scaling, adapter_ids=inputs.adapter_ids,
        dropout_p=inputs.case.dropout, dropout_seed=inputs.dropout_seed, save=save,
    )  # fmt: skip
    return out.detach(), *torch.autograd.grad(out, [x, route_weights, *lora], inputs.grad)


@pytest.mark.parametrize("name", CASES)
def test_truth_is_the_reference(name: str) -> None:
    """The hand-written gradients that carry the error bars equal torch's autograd of the reference in float64."""
    inputs = CASES[name].build(torch.float32)
    truth = layer_truth(inputs)
    leaves = [t.double().requires_grad_() for t in (inputs.x, inputs.route_weights, *inputs.lora)]
    out = reference.moe_experts(
        leaves[0], inputs.index, leaves[1], inputs.gate, inputs.up, inputs.down, leaves[2:], inputs.scaling,
        inputs.adapter_ids, inputs.case.dropout, inputs.dropout_seed, inputs.case.activation, inputs.biases,
    )  # fmt: skip
    expected = torch.autograd.grad(out, leaves, inputs.grad.double(), allow_unused=True)
    torch.testing.assert_close(truth.out.value, out.detach(), rtol=1e-10, atol=1e-10)
    for value, gradient in zip([truth.d_x, truth.d_route_weights, *truth.d_lora], expected, strict=True):
        torch.testing.assert_close(
            value.value, torch.zeros_like(value.value) if gradient is None else gradient, rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("isa", LEVELS)
def test_against_float64(isa: str, dtype: torch.dtype, layout: str) -> None:
    worst = {}
    for name, case in CASES.items():
        inputs = case.build(dtype)
        truth = layer_truth(inputs)
        with ops.override(isa=isa, threads=2):
            results = run(inputs, weights_in(layout, inputs))
        expected = [truth.out, truth.d_x, truth.d_route_weights, *truth.d_lora]
        names = ["out", "d hidden", "d routing weights", *(f"d lora {n}" for n in range(len(truth.d_lora)))]
        for what, actual, bound in zip(names, results, expected, strict=True):
            worst[name, what] = excess(actual, bound)
    bad = {key: value for key, value in worst.items() if value > 1}
    assert not bad, f"outside {isa}'s error bars (in units of the tolerance): {bad}"


@pytest.mark.parametrize("isa", LEVELS)
def test_bounds_are_not_vacuous(isa: str) -> None:
    """The same comparison fails when one weight, one LoRA factor or the scaling is a little wrong."""
    for dtype, change in ((torch.float32, 1.001), (torch.bfloat16, 1.5)):
        inputs = CASES["plain"].build(dtype)
        truth = layer_truth(inputs)
        for spoiled in ("scaling", "gate", "lora"):
            wrong = CASES["plain"].build(dtype)
            if spoiled == "scaling":
                wrong.scaling = [s * change for s in wrong.scaling]
            elif spoiled == "gate":
                wrong.gate[1, 5] *= change if dtype == torch.bfloat16 else 1.01
            else:
                wrong.lora[5][2] *= change
            with ops.override(isa=isa):
                out = run(wrong, weights_of(wrong))[0]
            assert excess(out, truth.out) > 1, (spoiled, dtype)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("activation", [SWIGLU, clamped_swiglu(1.75, 7.0)], ids=["swiglu", "clamped"])
def test_extreme_activations(isa: str, dtype: torch.dtype, activation: Activation) -> None:
    """The right limits and a finite slope at the ends of the range: gate values of +-1e4, +-88, -0.0; and at a limit,
    where torch's clamp lets the gradient through, and beside it, where it does not. (1.75 is exact in fp32.)"""
    values = torch.tensor([1e4, -1e4, 88.0, -88.0, 0.0, -0.0, 30.0, -30.0, 7.0, -7.0, 7.0625, -7.0625, 6.9375])
    size = len(values)
    eye = torch.eye(size).bfloat16()[None]
    weights = ExpertWeights.from_tensors(eye, eye, eye, activation=activation)
    x = values[None].to(dtype).requires_grad_()
    with ops.override(isa=isa):
        out = ops.moe_experts(x, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), weights)
        (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    exact = x.detach().double().requires_grad_()
    gate, up = exact.clamp(max=activation.gate_max), exact.clamp(-activation.up_limit, activation.up_limit)
    expected = gate * torch.sigmoid(activation.alpha * gate) * (up + activation.up_shift)
    (slope,) = torch.autograd.grad(expected, exact, torch.ones_like(expected))
    # rounding alpha · x is an error of |alpha x| units in the exponent, where |x| > 12 the sigmoid is 1 or nothing
    tolerance = {torch.float32: 1e-6 if activation == SWIGLU else 3e-6, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(out.double(), expected.detach(), rtol=tolerance, atol=1e-30)
    # near the flat end the slope is a difference of equals: its error is relative to x sigma(x), not to the result
    torch.testing.assert_close(gradient.double(), slope, rtol=2 * tolerance, atol=1e-10)
