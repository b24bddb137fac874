"""``ktft bench experts --overheads``: what experts cost besides their kernels, and beside torch's own threads.

Fields of the ``overheads`` record, which comes after the ``experts`` records and is about the same layer:

    idle_core_percent           CPU time of the whole process in :data:`IDLE_SECONDS` from the end of a call on, in
                                percent of one core; torch has done nothing for a second before that call, so its
                                threads are asleep unless ``OMP_WAIT_POLICY`` is ACTIVE
    entries_forward,            entries into the extension during one forward and one backward of a layer
    entries_backward
    call_us                     the experts module called with 1 token, without LoRA and gradients; 1e-6 s
    call_overhead_us            the part of it outside the extension: Python, torch's dispatch, checks, the output
    overhead_share_1_token      call_overhead_us / call_us, the median over the calls
    lora_call_us, …             the same with LoRA of lora_rank
    fwd_bwd_call_us, …          forward and backward with that LoRA and all gradients; autograd is outside, too
    alternate                   per token count: attention (four projections [H, H] and scaled dot products in torch,
                                causal, forward) and the experts' forward, milliseconds a call. ``attention_ms`` and
                                ``experts_ms`` where each runs in a row, ``attention_alternating_ms`` and
                                ``experts_alternating_ms`` where they take turns; ``alternating_ratio`` is the sum of
                                the latter over the sum of the former. Threads that wait for the other's work by
                                spinning make it more than 1.

All are medians; blocks of the three kinds take turns in an order that turns round. Experts change with the routings and
attention's weights from call to call, so that neither finds its own in a cache only because it runs in a row.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F

from ktft.bench.layer import PREFIX, ROTATION, Shape, routings
from ktft.bench.report import Record
from ktft.bench.settings import tidy
from ktft.experts import CpuExperts, ExpertNames
from ktft.weights import ExpertWeights

IDLE_SECONDS = 2.0
CALLS = 105
"""Calls with one token, of each kind."""

ALTERNATE = {1: 20, 512: 4}
"""Token counts at which attention and experts take turns, and the calls of a block that count."""

ROUNDS = 7
ATTENTION_BYTES = 128 * 2**20
"""At least as many bytes of attention weights are used in turn: several last-level caches."""


class EntryClock:
    """Seconds inside the extension's entries, forward and backward, within a ``with`` block. Process-wide."""

    _NAMES = ("forward", "backward")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.entries = dict.fromkeys(self._NAMES, 0)
        self._extension = sys.modules["ktft._C"]  # ktft.ops, which calls it, is its only importer
        self._originals = {name: getattr(self._extension, name) for name in self._NAMES}

    def _timed(self, name: str) -> Callable[..., None]:
        original = self._originals[name]

        def entry(*arguments: Any) -> None:
            start = time.perf_counter()
            original(*arguments)
            self.seconds += time.perf_counter() - start
            self.entries[name] += 1

        return entry

    def __enter__(self) -> EntryClock:
        for name in self._NAMES:
            setattr(self._extension, name, self._timed(name))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, original in self._originals.items():
            setattr(self._extension, name, original)


def measure(weights: ExpertWeights, shape: Shape, lora: Sequence[torch.Tensor], routing: str) -> Record:
    """The ``overheads`` record.

    Args:
        weights: the layer's experts.
        shape: their sizes.
        lora: six factors that require gradients, or none; then the figures with LoRA are of a call without.
        routing: "uniform" or "zipf".
    """
    experts = CpuExperts()
    experts.attach(weights, ExpertNames(PREFIX, PREFIX))
    alternating = [_alternate(experts, shape, routing, tokens, calls) for tokens, calls in ALTERNATE.items()]
    calls = _calls(experts, shape, lora, routing)
    idle = _idle_core_percent(experts, shape, routing)
    figures = {"idle_core_percent": idle, **calls}
    return {
        "record": "overheads",
        **{name: tidy(value) for name, value in figures.items()},
        "lora_rank": shape.lora_rank,
        "alternate": [{name: tidy(value) for name, value in found.items()} for found in alternating],
    }


def _idle_core_percent(experts: CpuExperts, shape: Shape, routing: str) -> float:
    work = routings(shape, 16, routing, 1)[0]
    hidden = torch.randn(16, shape.hidden).to(shape.compute)
    time.sleep(1)
    with torch.no_grad():
        experts(hidden, work.index, work.weights)
    cpu, wall = time.process_time(), time.perf_counter()
    time.sleep(IDLE_SECONDS)
    return 100 * (time.process_time() - cpu) / (time.perf_counter() - wall)


def _calls(experts: CpuExperts, shape: Shape, lora: Sequence[torch.Tensor], routing: str) -> dict[str, float]:
    work = routings(shape, 1, routing, ROTATION)
    hidden = torch.randn(1, shape.hidden).to(shape.compute)
    scaling = [2.0] if lora else []

    def plain(turn: int) -> None:
        with torch.no_grad():
            experts(hidden, work[turn].index, work[turn].weights)

    def with_lora(turn: int) -> None:
        with torch.no_grad():
            experts.run(hidden, work[turn].index, work[turn].weights, lora, scaling)

    def with_gradients(turn: int) -> tuple[torch.Tensor, ...]:
        leaf, route_weights = hidden.detach().requires_grad_(), work[turn].weights.detach().requires_grad_()
        out = experts.run(leaf, work[turn].index, route_weights, lora, scaling)
        return torch.autograd.grad(out, [leaf, route_weights, *lora], torch.ones_like(out))

    found: dict[str, float] = {}
    for prefix, call in (("", plain), ("lora_", with_lora), ("fwd_bwd_", with_gradients)):
        whole, outside = [], []
        for turn in range(CALLS):
            with EntryClock() as clock:
                start = time.perf_counter()
                kept = call(turn % ROTATION)
                seconds = time.perf_counter() - start
            del kept  # freed outside of the measurement
            if turn >= ROTATION:
                whole.append(seconds)
                outside.append(seconds - clock.seconds)
        if call is with_gradients:
            found |= {f"entries_{name}": count for name, count in clock.entries.items()}
        found |= {
            f"{prefix}call_us": statistics.median(whole) * 1e6,
            f"{prefix}call_overhead_us": statistics.median(outside) * 1e6,
            f"{prefix}overhead_share_1_token": statistics.median(
                part / seconds for part, seconds in zip(outside, whole, strict=True)
            ),
        }
    return found


def _alternate(experts: CpuExperts, shape: Shape, kind: str, tokens: int, calls: int) -> dict[str, float]:
    work = routings(shape, tokens, kind, ROTATION)
    hidden = torch.randn(tokens, shape.hidden).to(shape.compute)
    heads = max(n for n in range(1, max(1, shape.hidden // 64) + 1) if shape.hidden % n == 0)
    one_set = [torch.randn(shape.hidden, shape.hidden).div(shape.hidden**0.5).to(shape.compute) for _ in range(4)]
    sets = math.ceil(ATTENTION_BYTES / sum(matrix.nbytes for matrix in one_set))
    projections = [[matrix.clone() for matrix in one_set] for _ in range(sets)]
    turns = {"attention": 0, "experts": 0}

    def attention() -> None:
        turns["attention"] += 1
        *inputs, output = projections[turns["attention"] % sets]
        q, k, v = (F.linear(hidden, matrix).view(tokens, heads, -1).transpose(0, 1) for matrix in inputs)
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        F.linear(mixed.transpose(0, 1).reshape(tokens, -1), output)

    def one_layer() -> None:
        turns["experts"] += 1
        routing = work[turns["experts"] % ROTATION]
        experts(hidden, routing.index, routing.weights)

    blocks: list[dict[str, Callable[[], None]]] = [
        {"attention_ms": attention},
        {"experts_ms": one_layer},
        {"attention_alternating_ms": attention, "experts_alternating_ms": one_layer},
    ]
    times: dict[str, list[float]] = {name: [] for block in blocks for name in block}
    with torch.no_grad():
        for turn in range(ROUNDS + 1):  # the first is the warm-up
            for block in blocks if turn % 2 else reversed(blocks):
                for call in range(calls + 1):  # the first still follows the block before
                    for name, function in block.items():
                        start = time.perf_counter()
                        function()
                        if turn and call:
                            times[name].append(time.perf_counter() - start)
    found = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    alone = found["attention_ms"] + found["experts_ms"]
    together = found["attention_alternating_ms"] + found["experts_alternating_ms"]
    return {"tokens": tokens, **found, "alternating_ratio": together / alone}


__all__ = ["ALTERNATE", "CALLS", "IDLE_SECONDS", "EntryClock", "measure"]
