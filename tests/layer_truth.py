"""One experts layer in float64 with error bars: forward, d hidden, d routing weights and the LoRA gradients, written
out by hand.

The values are checked against torch's autograd of ktft.reference in test_kernels.py; the error bars follow
tests/noise.py with the roundings that ktft's kernels make (csrc/moe.h).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ktft.activation import SWIGLU, Activation
from ktft.reference import dropout_mask
from ktft.weights import lora_shapes
from tests.noise import UNIT, Noisy, exact


@dataclass
class Case:
    """Inputs of one call; weights are bf16 values."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    rank: int
    tokens: int
    adapters: int = 1
    dropout: float = 0.0
    per_token: bool = False
    sentinels: bool = False
    ranks: tuple[int, ...] = ()  # where the adapters differ
    duplicates: bool = False  # a token may name an expert twice
    activation: Activation = SWIGLU
    biased: bool = False
    seed: int = 0

    def build(self, dtype: torch.dtype) -> Inputs:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int, fan_in: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) / fan_in**0.5

        e, k, h, i, t = self.experts, self.top_k, self.hidden, self.intermediate, self.tokens
        ids = e + 1 if self.sentinels else e
        index = [
            torch.randint(ids, (k,), generator=generator)
            if self.duplicates
            else torch.randperm(ids, generator=generator)[:k]
            for _ in range(t)
        ]
        ranks = self.ranks or (self.rank,) * self.adapters
        return Inputs(
            case=self,
            x=torch.randn(t, h, generator=generator).to(dtype),
            grad=torch.randn(t, h, generator=generator).to(dtype),
            index=torch.stack(index) if t else torch.zeros(0, k, dtype=torch.int64),
            route_weights=torch.rand(t, k, generator=generator) + 0.1,
            gate=normal(e, i, h, fan_in=h).bfloat16(),
            up=normal(e, i, h, fan_in=h).bfloat16(),
            down=normal(e, h, i, fan_in=i).bfloat16(),
            lora=[normal(*s, fan_in=s[2]) for rank in ranks for s in lora_shapes(e, h, i, rank)],
            scaling=[0.5 + n for n in range(self.adapters)],
            adapter_ids=torch.randint(-1, self.adapters, (t,), generator=generator) if self.per_token else None,
            dropout_seed=0x123456789ABCDEF + self.seed,
            biases=[torch.randn(e, n, generator=generator) for n in (i, i, h)] if self.biased else None,
        )


@dataclass
class Inputs:
    case: Case
    x: torch.Tensor
    grad: torch.Tensor
    index: torch.Tensor
    route_weights: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    lora: list[torch.Tensor]
    scaling: list[float]
    adapter_ids: torch.Tensor | None
    dropout_seed: int
    biases: list[torch.Tensor] | None


@dataclass
class Truth:
    out: Noisy
    d_x: Noisy
    d_route_weights: Noisy
    d_lora: list[Noisy]


def layer_truth(inputs: Inputs) -> Truth:
    case, unit = inputs.case, UNIT[inputs.x.dtype]
    a = case.activation
    gate_range, up_range = (-torch.inf, a.gate_max), (-a.up_limit, a.up_limit)
    half = unit != UNIT[torch.float32]
    lora = [exact(t).rounded(unit) if half else exact(t) for t in inputs.lora]
    zero = lambda *shape: Noisy(torch.zeros(*shape, dtype=torch.float64), torch.zeros(*shape, dtype=torch.float64))  # noqa: E731
    out, d_x = zero(*inputs.x.shape), zero(*inputs.x.shape)
    d_weights = zero(*inputs.index.shape)
    d_lora = [zero(*t.shape) for t in inputs.lora]

    def scatter(total: Noisy, rows: torch.Tensor, part: Noisy) -> None:
        total.value.index_add_(0, rows, part.value)
        # a token that names the expert twice gets the same errors twice
        same = torch.zeros_like(total.sigma).index_add(0, rows, part.sigma)
        total.sigma.copy_((total.sigma**2 + same**2).sqrt())

    for e in range(case.experts):
        token, slot = torch.where(inputs.index == e)
        if len(token) == 0:
            continue
        route = token * case.top_k + slot
        x, dy = exact(inputs.x[token]), exact(inputs.grad[token])
        w = inputs.route_weights[token, slot].double()[:, None]
        wg, wu, wd = exact(inputs.gate[e]), exact(inputs.up[e]), exact(inputs.down[e])

        def mask(adapter: int, site: int, channels: int, route: torch.Tensor = route) -> torch.Tensor:
            if case.dropout == 0:
                return torch.ones(len(route), channels, dtype=torch.float64)
            return dropout_mask(inputs.dropout_seed, adapter, site, route, channels, case.dropout, torch.float64)

        def low(
            product: Noisy, adapter: int, token: torch.Tensor = token
        ) -> Noisy:  # round(scale * product), 0 for other adapters
            keep = 1.0 if inputs.adapter_ids is None else (inputs.adapter_ids[token] == adapter).double()[:, None]
            return product.scaled(inputs.scaling[adapter]).rounded(unit).scaled(keep)

        def factor(adapter: int, which: int, e: int = e) -> Noisy:
            f = lora[6 * adapter + which]
            return Noisy(f.value[e], f.sigma[e])

        def masked(rows: Noisy, m: torch.Tensor) -> Noisy:
            return rows.scaled(m).rounded(unit if case.dropout else 0.0)

        adapters = range(case.adapters)
        x_in = [masked(x, mask(n, 0, case.hidden)) for n in adapters]
        u_gate = [low(x_in[n] @ factor(n, 0).t, n) for n in adapters]
        u_up = [low(x_in[n] @ factor(n, 2).t, n) for n in adapters]
        g, u = x @ wg.t, x @ wu.t
        for n in adapters:
            g, u = g.plus(u_gate[n] @ factor(n, 1).t), u.plus(u_up[n] @ factor(n, 3).t)
        if inputs.biases is not None:
            g, u = (x.plus(exact(b[e]).expanded(x)) for x, b in zip((g, u), inputs.biases[:2], strict=True))
        g, u = g.rounded(unit), u.rounded(unit)
        inner, factor_of_up = g.clamped(*gate_range), u.clamped(*up_range)
        if a.up_shift:
            factor_of_up = factor_of_up.plus(exact(torch.tensor(a.up_shift)).expanded(u))
        h = (inner.silu(a.alpha) * factor_of_up).rounded(unit)
        h_in = [masked(h, mask(n, 1, case.intermediate)) for n in adapters]
        u_down = [low(h_in[n] @ factor(n, 4).t, n) for n in adapters]
        y = h @ wd.t
        for n in adapters:
            y = y.plus_correlated(u_down[n] @ factor(n, 5).t)  # both from the rounded h
        if inputs.biases is not None:
            y = y.plus(exact(inputs.biases[2][e]).expanded(y))
        scatter(out, token, y.scaled(w))

        v_down = [low(dy @ factor(n, 5), n) for n in adapters]
        dh = dy @ wd
        for n in adapters:
            dh = dh.plus((v_down[n] @ factor(n, 4)).scaled(mask(n, 1, case.intermediate)))
        ones = exact(torch.ones(case.intermediate, 1))
        dot = (dh * h) @ ones
        if inputs.biases is not None:
            dot = dot.plus(dy @ exact(inputs.biases[2][e][:, None]))
        d_weights.value[token, slot], d_weights.sigma[token, slot] = dot.value[:, 0], dot.sigma[:, 0]
        dh = dh.scaled(w)
        d_gate = (dh * factor_of_up * inner.silu_slope(a.alpha)).inside(g, *gate_range).rounded(unit)
        d_up = (dh * inner.silu(a.alpha)).inside(u, *up_range).rounded(unit)
        v_gate = [low(d_gate @ factor(n, 1), n) for n in adapters]
        v_up = [low(d_up @ factor(n, 3), n) for n in adapters]
        dx = (d_gate @ wg).plus_correlated(d_up @ wu)
        for n in adapters:
            m = mask(n, 0, case.hidden)
            dx = dx.plus_correlated((v_gate[n] @ factor(n, 0)).scaled(m))
            dx = dx.plus_correlated((v_up[n] @ factor(n, 2)).scaled(m))
        scatter(d_x, token, dx)

        for n in adapters:
            gradients = (
                v_gate[n].t @ x_in[n], d_gate.t @ u_gate[n], v_up[n].t @ x_in[n], d_up.t @ u_up[n],
                v_down[n].scaled(w).t @ h_in[n], dy.scaled(w).t @ u_down[n],
            )  # fmt: skip
            for which, gradient in enumerate(gradients):
                d_lora[6 * n + which].value[e], d_lora[6 * n + which].sigma[e] = gradient.value, gradient.sigma
    return Truth(out.rounded(unit), d_x.rounded(unit), d_weights, d_lora)
