"""The experts op in plain torch: the truth that tests compare the kernels with.

It computes in the dtype of ``hidden`` throughout (float64 for truth), loops over experts, and gets its gradients
from torch's own autograd. It shares no code with the kernels, except that the dropout mask is defined here in
integers and has to be met by them bit for bit.

    u_g = drop_0(x) A_gᵀ          gate = x W_gᵀ + s u_g B_gᵀ + b_g         (up likewise)
    h = the activation of gate and up, silu(gate) * up unless it says another
    y = h W_dᵀ + s (drop_1(h) A_dᵀ) B_dᵀ + b_d
    out[t] = sum over the token's routes j of top_k_weights[t, j] * y
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from ktft.activation import SWIGLU, Activation

_MASK = 0xFFFFFFFF


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A 32-bit integer hash on int64 tensors (two rounds of xor-shift and odd multiplication)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _MASK
    x = (x ^ (x >> 15)) * 0x846CA68B & _MASK
    return x ^ (x >> 16)


def dropout_mask(
    seed: int, adapter: int, site: int, routes: torch.Tensor, channels: int, p: float, dtype: torch.dtype
) -> torch.Tensor:
    """The scaled dropout mask [len(routes), channels]: 0 or 1/(1-p), a function of its arguments alone.

    Args:
        seed: any int64; both halves enter.
        adapter: index of the adapter in the op's list.
        site: 0 for the input of gate and up (they share it), 1 for the input of down.
        routes: int64 route numbers t * k + j.
        channels: H for site 0, I for site 1.
        p: probability of dropping, in [0, 1).
    """
    low, high = seed & _MASK, (seed >> 32) & _MASK
    base = torch.tensor((low ^ (adapter * 2 + site) * 0x9E3779B1) & _MASK, dtype=torch.int64)
    row = _mix(_mix(base) ^ (routes & _MASK))
    row = _mix(row ^ high)
    channel = torch.arange(channels, dtype=torch.int64) * 0x9E3779B1 & _MASK
    bits = _mix(row[:, None] ^ channel[None, :])
    keep = bits >= int(p * 4294967296.0)
    return keep.to(dtype) / (1.0 - p)


_GATE_FUNCTIONS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "silu": lambda x, alpha: x * torch.sigmoid(alpha * x),
}


def activate(activation: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """h of gate and up, which have the same shape."""
    limit = activation.up_limit
    value = _GATE_FUNCTIONS[activation.function](gate.clamp(max=activation.gate_max), activation.alpha)
    return (up.clamp(-limit, limit) + activation.up_shift) * value


def moe_experts(
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    lora: Sequence[torch.Tensor] = (),
    scaling: Sequence[float] = (),
    adapter_ids: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    activation: Activation = SWIGLU,
    biases: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Routed experts with LoRA: [T, H] -> [T, H], in hidden's dtype.

    Args:
        hidden: [T, H].
        top_k_index: int64 [T, k]; ids >= E add nothing.
        top_k_weights: [T, k].
        gate, up: [E, I, H]. down: [E, H, I].
        lora: six tensors per adapter in the order gate_a [E,r,H], gate_b [E,I,r], up_a, up_b, down_a [E,r,I],
            down_b [E,H,r].
        scaling: one factor per adapter.
        adapter_ids: int64 [T] picks one adapter for each token (-1: none); None applies all adapters, summed.
        dropout_p, dropout_seed: see :func:`dropout_mask`; p = 0 in eval.
        activation: see :func:`activate`.
        biases: of gate [E, I], up [E, I] and down [E, H].
    """
    dtype = hidden.dtype
    top_k = top_k_index.shape[1]
    adapters = [lora[6 * a : 6 * a + 6] for a in range(len(scaling))]
    out = torch.zeros_like(hidden)

    def delta(
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        adapter: int,
        site: int,
        token: torch.Tensor,
        route: torch.Tensor,
    ) -> torch.Tensor:
        if dropout_p > 0:
            x = x * dropout_mask(dropout_seed, adapter, site, route, x.shape[1], dropout_p, dtype)
        term = scaling[adapter] * F.linear(F.linear(x, a.to(dtype)), b.to(dtype))
        if adapter_ids is not None:
            term = torch.where((adapter_ids[token] == adapter)[:, None], term, torch.zeros_like(term))
        return term

    for e in range(gate.shape[0]):
        token, slot = torch.where(top_k_index == e)
        if len(token) == 0:
            continue
        route = token * top_k + slot
        x = hidden[token]
        g, u = F.linear(x, gate[e].to(dtype)), F.linear(x, up[e].to(dtype))
        for n, (ga, gb, ua, ub, _, _) in enumerate(adapters):
            g = g + delta(x, ga[e], gb[e], n, 0, token, route)
            u = u + delta(x, ua[e], ub[e], n, 0, token, route)
        if biases is not None:
            g, u = g + biases[0][e].to(dtype), u + biases[1][e].to(dtype)
        h = activate(activation, g, u)
        y = F.linear(h, down[e].to(dtype))
        for n, (_, _, _, _, da, db) in enumerate(adapters):
            y = y + delta(h, da[e], db[e], n, 1, token, route)
        if biases is not None:
            y = y + biases[2][e].to(dtype)
        out = out.index_add(0, token, top_k_weights[token, slot, None].to(dtype) * y)
    return out
