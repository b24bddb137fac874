"""CpuExperts as a module: what movers, state dicts, copies and picklers do to it, and what it passes to the op."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ktft import reference
from ktft.experts import CpuExperts, ExpertNames
from ktft.weights import ExpertWeights, lora_shapes

NAMES = ExpertNames("model.layers.0.mlp.experts", "model.layers.0.mlp.experts")


def experts(dtype: torch.dtype = torch.bfloat16) -> CpuExperts:
    generator = torch.Generator().manual_seed(0)
    gate, up, down = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((4, 6, 10), (4, 6, 10), (4, 10, 6))
    )
    module = CpuExperts()
    module.attach(ExpertWeights.from_tensors(gate, up, down), NAMES)
    return module


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    index = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(5)])
    return torch.randn(5, 10, generator=generator), index, torch.rand(5, 2, generator=generator)


def test_forward_is_the_reference() -> None:
    module = experts()
    assert module.weights is not None
    x, index, weights = inputs()
    stacked = [torch.stack([module.weights.matrix(n, e) for e in range(4)]).float() for n in ("gate", "up", "down")]
    expected = reference.moe_experts(x.double(), index, weights.double(), *(m.double() for m in stacked))
    # fp32 products over at most 10 terms, two in a row: far below 1e-5 of the largest value
    assert (module(x, index, weights) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (module.num_experts, module.hidden_size, module.intermediate_size) == (4, 10, 6)


def test_without_weights_it_says_so() -> None:
    module = CpuExperts(object(), 3, key="a stock constructor's arguments")
    with pytest.raises(RuntimeError, match=r"ktft\.load_model"):
        module(*inputs())


def test_nothing_moves_or_casts_it() -> None:
    module = experts()
    x, index, weights = inputs()
    before = module(x, index, weights)
    holder = nn.Sequential(module, nn.Linear(2, 2))
    for move in (
        lambda: holder.half(),
        lambda: holder.bfloat16(),
        lambda: holder.double(),
        lambda: holder.to("meta"),
        lambda: holder.to_empty(device="cpu"),
        lambda: holder.to(torch.float16),
        lambda: module.to(torch.float16),
    ):
        move()
        assert module.weight.device.type == "cpu"
        assert module.weight.dtype == torch.float32
        assert module.weight.numel() == 0
        assert torch.equal(module(x, index, weights), before)
    assert not list(module.parameters())
    assert not list(module.buffers())


def test_built_inside_a_meta_context_it_is_on_the_cpu() -> None:
    with torch.device("meta"):
        module = CpuExperts()
    assert module.weight.device.type == "cpu"


@pytest.mark.parametrize("strict", [True, False])
def test_state_under_its_prefix_is_refused(strict: bool) -> None:
    holder = nn.ModuleDict({"experts": experts(), "gate": nn.Linear(2, 2)})
    state = holder.state_dict()
    assert sorted(state) == ["gate.bias", "gate.weight"]
    holder.load_state_dict(state, strict=strict)
    for key in ("experts.gate_up_proj", "experts.3.gate_proj.lora_A.weight", "experts.weight"):
        with pytest.raises(RuntimeError, match=f"'experts', whose weights are mapped.*{key}"):
            holder.load_state_dict({**state, key: torch.zeros(1)}, strict=strict)


def test_deepcopy_shares_and_pickle_raises() -> None:
    module = experts()
    twin = copy.deepcopy(module)
    assert twin is not module
    assert twin.weights is module.weights
    assert torch.equal(twin(*inputs()), module(*inputs()))
    for save in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(TypeError, match="cannot be pickled"):
            save(module)


@pytest.mark.parametrize(
    ("recompute", "grad", "who", "save"),
    [
        (False, True, "hidden", True),
        (False, True, "weights", True),
        (False, True, "lora", True),
        (False, True, "nobody", False),
        (False, False, "hidden", False),
        (True, True, "hidden", False),
    ],
)
def test_what_backward_needs_is_kept_only_when_it_is_needed(recompute: bool, grad: bool, who: str, save: bool) -> None:
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.ktft.moe_experts.default:
                kept.append(out[1].numel())
            return out

    kept: list[int] = []
    module = experts()
    module.recompute = recompute
    x, index, weights = inputs()
    lora = [torch.randn(shape) for shape in lora_shapes(4, 10, 6, 2)]
    x.requires_grad_(who == "hidden")
    weights.requires_grad_(who == "weights")
    lora[3].requires_grad_(who == "lora")
    with torch.set_grad_enabled(grad), Watch():
        module.run(x, index, weights, lora, [1.0])
    assert kept == [2 * 10 * 6 if save else 0]  # gate and up of 5 · 2 routes
