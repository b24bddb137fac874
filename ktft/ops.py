"""The torch op ``ktft::moe_experts``: schema, CPU and CUDA entries, fake, autograd. The only importer of the extension.

The schema is final (see docs/design.md). What backward needs is an *output* of the forward op, so that selective checkpointing and
torch.compile can see and keep it; the op itself is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ktft import reference, weights as expert_weights
from ktft.weights import ExpertWeights

_library = torch.library.Library("ktft", "DEF")
_library.define(
    "moe_experts(Tensor hidden, Tensor top_k_index, Tensor top_k_weights, int weights, Tensor[] lora, float[] scaling,"
    " Tensor? adapter_ids, float dropout_p, int dropout_seed, bool save) -> (Tensor, Tensor)"
)


def moe_experts(
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    weights: ExpertWeights,
    *,
    lora: Sequence[torch.Tensor] = (),
    scaling: Sequence[float] = (),
    adapter_ids: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    save: bool = True,
) -> torch.Tensor:
    """Temporary: plain torch."""
    e = range(weights.num_experts)
    gate, up, down = (torch.stack([weights.matrix(n, i) for i in e]).to(hidden.dtype) for n in ("gate", "up", "down"))
    return reference.moe_experts(hidden, top_k_index, top_k_weights, gate, up, down, lora, scaling, adapter_ids, dropout_p, dropout_seed)
