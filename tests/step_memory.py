"""Anonymous memory that one forward and backward add, in a process of its own: run by test_memory.py.

    python -m tests.step_memory SETTINGS

SETTINGS is a :class:`Step` as JSON. Prints a JSON list with, for each token count, the bytes added at the peak, and the
part of them without which there is no step: output, gradients, kept gate and up.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import torch

from ktft import ops
from ktft.bench.memory import Watch, release_freed, resident
from ktft.weights import ExpertWeights, lora_shapes


@dataclass(frozen=True)
class Step:
    """One layer and how it is called; rank 0: no LoRA. ``per_token``: adapter_ids that use every adapter, and none."""

    tokens: tuple[int, ...]
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    rank: int
    dropout: float
    save: bool
    dtype: str
    threads: int
    isa: str
    adapters: int = 1
    per_token: bool = False
    transposed: bool = False

    @property
    def compute(self) -> torch.dtype:
        return torch.float32 if self.dtype == "fp32" else torch.bfloat16


def measure(step: Step) -> list[dict[str, int]]:
    shapes = lora_shapes(step.experts, step.hidden, step.intermediate, step.rank) if step.rank else []
    shapes = shapes * step.adapters
    lora = [torch.full(size, 0.01, requires_grad=True) for size in shapes]
    up = torch.full((step.experts, step.intermediate, step.hidden), 0.01, dtype=torch.bfloat16)
    down = up.transpose(1, 2).contiguous()
    matrices = (down, down, up) if step.transposed else (up, up, down)
    weights = ExpertWeights.from_tensors(*matrices, transposed=step.transposed)

    def inputs(tokens: int) -> tuple[torch.Tensor, ...]:
        x = torch.full((tokens, step.hidden), 0.5, dtype=step.compute, requires_grad=True)
        index = torch.arange(tokens * step.top_k).view(tokens, step.top_k) % step.experts
        route_weights = torch.full((tokens, step.top_k), 0.1, requires_grad=True)
        return x, index, route_weights, torch.full_like(x, 0.5, requires_grad=False)

    def forward_backward(x: torch.Tensor, index: torch.Tensor, route_weights: torch.Tensor, grad: torch.Tensor) -> None:
        ids = torch.arange(x.shape[0]) % (step.adapters + 1) - 1 if step.per_token else None
        out = ops.moe_experts(
            x, index, route_weights, weights, lora=lora, scaling=[2.0] * (len(lora) // 6), adapter_ids=ids,
            dropout_p=step.dropout, dropout_seed=1, save=step.save,
        )  # fmt: skip
        torch.autograd.grad(out, [x, route_weights, *lora], grad)

    cases = [inputs(tokens) for tokens in step.tokens]
    out = []
    with ops.override(isa=step.isa, threads=step.threads):
        forward_backward(*inputs(1))  # torch loads tens of MB when an op is first differentiated
        release_freed()
        before = resident().anon
        for case in cases:
            with Watch() as watch:
                forward_backward(*case)
            x, _, route_weights, _ = case
            kept = 2 * route_weights.numel() * step.intermediate * x.element_size() if step.save else 0
            gradients = sum(t.nbytes for t in (x, route_weights, *lora))
            out.append({"added": watch.anon_peak - before, "required": x.nbytes + kept + gradients})
            release_freed()
    return out


if __name__ == "__main__":
    print(json.dumps(measure(Step(**json.loads(sys.argv[1])))))
