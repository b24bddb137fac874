"""Hidden states on CUDA, experts on the CPU. Skipped without CUDA; run by scripts/gpu_check.sh."""

from __future__ import annotations

import pytest
import torch

import ktft
from ktft import ops
from tests.test_kernels import CASES, weights_of
from tests.tiny_models import tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "many rows", "two adapters", "dropout"])
def test_the_op_gives_the_cpu_bits(name: str, dtype: torch.dtype) -> None:
    inputs = CASES[name].build(dtype)
    weights = weights_of(inputs)
    results = []
    for device in ("cpu", "cuda"):
        x, route_weights = (t.to(device).requires_grad_() for t in (inputs.x.clone(), inputs.route_weights.clone()))
        lora = [t.clone().requires_grad_() for t in inputs.lora]
        out = ops.moe_experts(
            x,
            inputs.index.to(device),
            route_weights,
            weights,
            lora=lora,
            scaling=inputs.scaling,
            dropout_p=inputs.case.dropout,
            dropout_seed=inputs.dropout_seed,
        )
        gradients = torch.autograd.grad(out, [x, route_weights, *lora], inputs.grad.to(device))
        assert out.device.type == gradients[0].device.type == device
        assert all(g.device.type == "cpu" for g in gradients[2:])
        results.append([t.cpu() for t in (out, *gradients)])
    for on_cpu, on_cuda in zip(*results, strict=True):
        assert torch.equal(on_cpu, on_cuda)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_training_step_with_the_model_on_cuda(family: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    from peft import LoraConfig

    tiny_checkpoint(family, tmp_path)
    losses = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = ktft.load_model(tmp_path, device=device, dtype=torch.float32)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "experts"], init_lora_weights="gaussian")
        model = ktft.get_peft_model(model, config)
        ids = torch.arange(20, device=device)[None] % model.config.vocab_size
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        assert trained and all(p.grad is not None for p in trained.values())
        assert {p.device.type for n, p in trained.items() if ".experts." in n} == {"cpu"}
        assert {p.device.type for n, p in trained.items() if "self_attn" in n} == {device}
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) < 1e-4 * abs(losses[0])
