"""The experts of one layer as stock transformers computes them, on the same weights: what ``--vs hf`` compares with.

Two of its implementations run on a CPU, ``eager`` and ``grouped_mm``; whichever is faster is the comparison. The
weights are copied into ordinary memory, decoded if they are coded, as ``from_pretrained`` does, and frozen.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from ktft.bench.layer import PREFIX, Routing, Shape, open_layer
from ktft.decoding import CodedSlice

IMPLEMENTATIONS = ("eager", "grouped_mm")


class StockExperts:
    """A stock experts module with the weights of :func:`ktft.bench.layer.write_layer`.

    Args:
        directory: where that file lies.
        shape: what it holds.
    """

    def __init__(self, directory: Path, shape: Shape) -> None:
        self._config = Qwen3MoeConfig(
            hidden_size=shape.hidden,
            moe_intermediate_size=shape.intermediate,
            num_experts=shape.experts,
            num_experts_per_tok=shape.topk,
        )
        with torch.device("meta"):
            self._module = Qwen3MoeExperts(self._config)
        gate_up = torch.empty(shape.experts, 2 * shape.intermediate, shape.hidden, dtype=shape.compute)
        down = torch.empty(shape.experts, shape.hidden, shape.intermediate, dtype=shape.compute)
        checkpoint = open_layer(directory)

        def matrix(expert: int, name: str) -> torch.Tensor:
            return CodedSlice(checkpoint, checkpoint.source(f"{PREFIX}.{expert}.{name}.weight"), shape.compute)[...]

        for expert in range(shape.experts):
            gate_up[expert, : shape.intermediate] = matrix(expert, "gate_proj")
            gate_up[expert, shape.intermediate :] = matrix(expert, "up_proj")
            down[expert] = matrix(expert, "down_proj")
        self._module.gate_up_proj = torch.nn.Parameter(gate_up, requires_grad=False)
        self._module.down_proj = torch.nn.Parameter(down, requires_grad=False)

    def use(self, implementation: str) -> None:
        """Choose how the next calls compute, one of :data:`IMPLEMENTATIONS`."""
        self._config._experts_implementation = implementation

    def __call__(
        self, hidden: torch.Tensor, routing_index: torch.Tensor, routing_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        out: torch.Tensor = self._module(hidden, routing_index, routing_weights)
        return out

    def runs(self, implementation: str, hidden: torch.Tensor, routing: Routing) -> str:
        """Why an implementation cannot compute this, '' if it can. grouped_mm wants rows of a multiple of 16 bytes."""
        self.use(implementation)
        try:
            leaf = hidden.detach().requires_grad_()
            self(leaf, routing.index, routing.weights).sum().backward()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return " ".join(str(error).split())
        return ""


__all__ = ["IMPLEMENTATIONS", "StockExperts"]
