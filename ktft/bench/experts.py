"""``ktft bench experts``: one experts layer, forward and forward+backward, on weights in a file mapping.

With several formats there is a layer of the same sizes in each, with weights of its own, and a record for each.

For each token count, in one process: routings rotate, all sides take turns within a round (their order turns round
with it), and the machine's rates are sampled between rounds, so that what is measured and what it is measured against
share whatever else the machine does. Figures are medians after a warm-up of ``warm_up_rounds``; beside every median
``…_ms`` lie ``…_ms_min`` and ``…_ms_max``, the fastest and the slowest of the rounds.

Fields of an ``experts`` record, with S = tokens * topk routes and 1 ms = 1e-3 s, 1 GB = 1e9, 1 MB = 1e6 bytes:

    rows_per_expert             S / experts_touched; experts_touched is the mean over the routings, rows_max the most
                                rows any expert got
    fwd_ms                      the experts without LoRA, nothing kept for a backward
    fwd_gflops                  6 S H I / fwd_ms
    fwd_peak_fraction           fwd_gflops / peak_bf16_gflops, or / peak_fp32_gflops where the level or the format
                                multiplies fp32 (peak_dtype says which)
    fwd_weight_gbs              experts_touched * bytes of an expert as stored (codes and scales) / fwd_ms
    fwd_bandwidth_fraction      fwd_weight_gbs / read_gbs
    fwd_bwd_ms                  forward and backward with LoRA of lora_rank, gradients for hidden states, routing
                                weights and the LoRA factors
    fwd_bwd_gflops              2 * 6 S H I / fwd_bwd_ms: the base products, once forward and once for the gradient of
                                the hidden states; LoRA is work, but not counted as useful
    fwd_bwd_weight_gbs          2 * experts_touched * bytes of an expert / fwd_bwd_ms: the average of the two passes
    fwd_bwd_bandwidth_fraction  fwd_bwd_weight_gbs / read_gbs
    hf_fwd_ms, hf_fwd_bwd_ms    stock transformers, the faster of eager and grouped_mm, frozen experts, no LoRA;
                                hf_fwd_ratio and hf_fwd_bwd_ratio are medians of ratios taken round by round
    uniform_fwd_ms,             with --routing zipf: the same with uniform routings in the same rounds, as many rows on
    uniform_fwd_bwd_ms          uniform_experts_touched experts; uniform_fwd_ratio and uniform_fwd_bwd_ratio are medians
                                of uniform time / skewed time taken round by round: the speed that skew leaves
    vs_bf16_fwd,                with bf16 among the formats: bf16's time / this one's, the median of ratios taken round
    vs_bf16_fwd_bwd             by round
    rss_added_mb                highest resident memory of one forward+backward above that of a process that has made
                                one call on a tiny expert, and has inputs and LoRA factors but no page of the weights
    anon_added_mb               the anonymous part of it; scratch is kept between calls, so it is that of the largest
                                token count so far
    required_mb                 what no implementation can do without: output, gradients, kept gate and up
    scratch_mb                  anon_added_mb - required_mb; memory and hf_ fields are those of the first format only
    peak_bf16_gflops, peak_fp32_gflops, read_gbs   sampled between this record's rounds
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ktft import ops
from ktft.bench.layer import Routing, Shape, map_layer, mapping_of, rotation_for, routings, touch, write_layer
from ktft.bench.machine import Probe, Samples, describe, load_average
from ktft.bench.memory import Watch, forget_mapped, release_freed, resident
from ktft.bench.report import Record, Report
from ktft.bench.settings import check_isa, tidy, torch_threads
from ktft.weights import ExpertWeights, lora_shapes

SHORT = 16
"""Token counts up to this one take milliseconds and get more rounds."""

FP32_LEVELS = ("scalar", "avx2")
"""ISA levels that multiply in fp32 whatever the weights' format: their peak is the fp32 one."""

WARM_UP = 2
"""Rounds that are not timed, before those that are."""

SAMPLES = 7
"""Samples of the machine's rates per token count."""


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        shape: the layer.
        tokens: token counts, one record each.
        routing: "uniform" or "zipf".
        isa: a level, or "auto".
        threads: of the kernels and of torch; None leaves both as they are.
        vs: None, or "hf" to measure stock transformers too.
        repeat: rounds; None takes 21 for up to 16 tokens and 7 above.
        directory: where the weights' file goes for the time being; None takes the system's temporary directory.
        overheads: measure also what ``ktft.bench.overheads`` says, one more record.
        beside: further formats; a layer in each takes turns with the first.
    """

    shape: Shape
    tokens: tuple[int, ...]
    routing: str = "uniform"
    isa: str = "auto"
    threads: int | None = None
    vs: str | None = None
    repeat: int | None = None
    directory: str | None = None
    overheads: bool = False
    beside: tuple[str, ...] = ()

    @property
    def shapes(self) -> list[Shape]:
        """The layer in every format."""
        return [self.shape, *(replace(self.shape, format=name) for name in self.beside)]

    def rounds(self, tokens: int) -> int:
        return self.repeat or (21 if tokens <= SHORT else 7)


@dataclass(frozen=True)
class Case:
    """One token count's inputs: hidden states and output gradient [T, H], the routings, and where these are skewed
    uniform ones to compare with."""

    hidden: torch.Tensor
    grad: torch.Tensor
    routings: list[Routing]
    uniform: list[Routing]

    @property
    def tokens(self) -> int:
        return self.hidden.shape[0]

    def routing(self, turn: int) -> Routing:
        return self.routings[turn % len(self.routings)]


@dataclass(frozen=True)
class Layer:
    """A layer in one format: its experts, and the inputs of every token count."""

    shape: Shape
    weights: ExpertWeights
    cases: list[Case]


def run(settings: Settings, report: Report, probe: Probe | None = None) -> None:
    """Measure and print: a ``machine`` record, an ``experts`` record per token count and format, where asked for an
    ``overheads`` record (of the first format), an ``end`` record.

    Args:
        settings: see there.
        report: where records go.
        probe: measures the machine; default a new one.

    Raises:
        ValueError: settings that cannot be, or stock transformers and ktft disagree.
        OSError: the weights cannot be written.
    """
    shapes = settings.shapes
    for shape in shapes:
        shape.check()
    if len({shape.format for shape in shapes}) < len(shapes):
        raise ValueError(f"--format names a format twice: {', '.join(shape.format for shape in shapes)}")
    check_isa(settings.isa)
    with ExitStack() as stack:
        stack.enter_context(torch_threads(settings.threads))
        isa = None if settings.isa == "auto" else settings.isa
        stack.enter_context(ops.override(isa=isa, threads=settings.threads))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ktft-bench-", dir=settings.directory)))
        probe = probe or Probe()
        samples = Samples(probe)
        for _ in range(3):
            samples.take()
        report.emit(describe(samples))
        layers = [_layer(settings, shape, directory / shape.format) for shape in shapes]
        first = layers[0]
        lora = _lora(first.shape)
        memory = _memory(first.weights, first.cases, lora, first.shape)
        for layer in layers:
            touch(mapping_of(layer.weights))
        stock = None
        if settings.vs == "hf":
            from ktft.bench.stock import StockExperts

            stock = StockExperts(directory / first.shape.format, first.shape)
        for number, added in enumerate(memory):
            for record in _measure(settings, layers, number, lora, stock, probe, added):
                report.emit(record)
        if settings.overheads:
            from ktft.bench import overheads

            report.emit(overheads.measure(first.weights, first.shape, lora, settings.routing))
        report.emit({"record": "end", "load_average": load_average()})


def _layer(settings: Settings, shape: Shape, directory: Path) -> Layer:
    directory.mkdir()
    write_layer(directory, shape)
    return Layer(shape, map_layer(directory, shape), _cases(settings, shape))


def _cases(settings: Settings, shape: Shape) -> list[Case]:
    generator = torch.Generator().manual_seed(1)
    cases = []
    for tokens in settings.tokens:
        hidden, grad = (torch.randn(tokens, shape.hidden, generator=generator).to(shape.compute) for _ in range(2))
        chosen = routings(shape, tokens, settings.routing, rotation_for(tokens))
        skewed = settings.routing != "uniform"
        uniform = routings(shape, tokens, "uniform", rotation_for(tokens)) if skewed else []
        cases.append(Case(hidden, grad, chosen, uniform))
    return cases


def _lora(shape: Shape) -> list[torch.Tensor]:
    """The six factors of an adapter that changes the output, or none."""
    if shape.lora_rank == 0:
        return []
    generator = torch.Generator().manual_seed(2)
    shapes = lora_shapes(shape.experts, shape.hidden, shape.intermediate, shape.lora_rank)
    return [(torch.randn(*size, generator=generator) * 0.02).requires_grad_() for size in shapes]


def _forward(case: Case, turn: int, weights: ExpertWeights) -> torch.Tensor:
    routing = case.routing(turn)
    with torch.no_grad():
        return ops.moe_experts(case.hidden, routing.index, routing.weights, weights)


def _forward_backward(case: Case, turn: int, weights: ExpertWeights, lora: Sequence[torch.Tensor]) -> None:
    routing = case.routing(turn)
    hidden, route_weights = case.hidden.detach().requires_grad_(), routing.weights.detach().requires_grad_()
    out = ops.moe_experts(hidden, routing.index, route_weights, weights, lora=lora, scaling=[2.0] if lora else [])
    out.backward(case.grad)
    for factor in lora:
        factor.grad = None


def _memory(
    weights: ExpertWeights, cases: Sequence[Case], lora: Sequence[torch.Tensor], shape: Shape
) -> list[dict[str, float]]:
    """The memory fields of every case, from runs of their own before anything else has run."""
    mapping = mapping_of(weights)
    _first_call(shape)
    release_freed()
    anon_before = resident().anon
    out = []
    for case in cases:
        forget_mapped(mapping.address, mapping.identity.size)
        before = resident()
        with Watch() as watch:
            _forward_backward(case, 0, weights, lora)
        routes, size = case.tokens * shape.topk, shape.compute.itemsize
        required = (
            2 * case.hidden.nbytes  # output, gradient of the hidden states
            + 2 * routes * shape.intermediate * size  # gate and up
            + routes * (4 + size)  # gradient of the routing weights in fp32, and in their own dtype
            + sum(factor.nbytes for factor in lora)  # gradients
        )
        anon = watch.anon_peak - anon_before
        out.append(
            {
                "rss_added_mb": (watch.rss_peak - (before.rss - before.anon) - anon_before) / 1e6,
                "anon_added_mb": anon / 1e6,
                "required_mb": required / 1e6,
                "scratch_mb": (anon - required) / 1e6,
            }
        )
    return out


def _first_call(shape: Shape) -> None:
    """One call on a single tiny expert: torch loads tens of MB of its own when an op is first differentiated."""
    small = Shape(16, 16, 1, 1, shape.format, 0)
    matrix = torch.zeros(1, 16, 16, dtype=shape.compute)
    case = Case(matrix[0], matrix[0], routings(small, 16, "uniform", 1), [])
    _forward_backward(case, 0, ExpertWeights.from_tensors(matrix, matrix, matrix), [])


def _measure(
    settings: Settings,
    layers: Sequence[Layer],
    number: int,
    lora: Sequence[torch.Tensor],
    stock: Any,
    probe: Probe,
    added: Mapping[str, float],
) -> list[Record]:
    """The records of one token count, the ``number``-th. ``stock`` and ``added`` are of the first format."""
    first = layers[0]
    half = len(first.cases[number].routings) // 2  # of a round, the two passes of a side meet different experts
    # The first format's sides are called by what they do; those beside it say whose they are.
    suffixes = ["", *(f" of {layer.shape.format}" for layer in layers[1:])]
    sides: dict[str, Callable[[int], object]] = {}
    for layer, suffix in zip(layers, suffixes, strict=True):
        sides |= {f"{kind}{suffix}": side for kind, side in _sides(layer, number, lora, half).items()}
    hf_note: dict[str, str] = {}
    if stock is not None:
        stock_sides, hf_note = _stock_sides(first.cases[number], stock, first.weights, half)
        sides |= stock_sides
    samples = Samples(probe)
    times = alternate(sides, settings.rounds(first.cases[number].tokens), samples)
    rates = samples.medians()
    of_format = {
        layer.shape.format: {kind: times[f"{kind}{suffix}"] for kind in _sides(layer, number, lora, half)}
        for layer, suffix in zip(layers, suffixes, strict=True)
    }
    out = []
    for layer in layers:
        more: dict[str, Any] = dict(added) if layer is first else {}
        if layer is first and stock is not None:
            more |= hf_figures(times) | hf_note
        own, base = of_format[layer.shape.format], of_format.get("bf16")
        if base is not None and own is not base:
            for kind in ("fwd", "fwd_bwd"):
                ratios = [plain / coded for plain, coded in zip(base[kind], own[kind], strict=True)]
                more[f"vs_bf16_{kind}"] = statistics.median(ratios)
        out.append(_record(settings, layer, number, own, rates, more))
    return out


def _sides(layer: Layer, number: int, lora: Sequence[torch.Tensor], half: int) -> dict[str, Callable[[int], object]]:
    """What is timed of a layer in one format, by kind."""
    case, weights = layer.cases[number], layer.weights
    sides: dict[str, Callable[[int], object]] = {
        "fwd": lambda turn: _forward(case, turn, weights),
        "fwd_bwd": lambda turn: _forward_backward(case, turn + half, weights, lora),
    }
    if case.uniform:
        even = replace(case, routings=case.uniform)
        sides["uniform_fwd"] = lambda turn: _forward(even, turn, weights)
        sides["uniform_fwd_bwd"] = lambda turn: _forward_backward(even, turn + half, weights, lora)
    return sides


def _record(
    settings: Settings,
    layer: Layer,
    number: int,
    times: Mapping[str, Sequence[float]],
    rates: Mapping[str, float],
    more: Mapping[str, Any],
) -> Record:
    """One line: a token count and a format."""
    shape, case = layer.shape, layer.cases[number]
    dtype = "fp32" if shape.compute == torch.float32 or ops.cpu_report()["chosen"] in FP32_LEVELS else "bf16"
    peak = rates[f"peak_{dtype}_gflops"]
    counts = [routing.rows() for routing in case.routings]
    touched = statistics.mean(len(rows) for rows in counts)
    fwd, both = (statistics.median(times[name]) for name in ("fwd", "fwd_bwd"))
    flop, size = shape.flop(case.tokens), touched * shape.expert_bytes
    figures: dict[str, Any] = {
        "tokens": case.tokens,
        "routes": case.tokens * shape.topk,
        "experts_touched": touched,
        "rows_per_expert": case.tokens * shape.topk / touched,
        "rows_max": max(int(rows.max()) for rows in counts),
        **_spread("fwd", times["fwd"]),
        "fwd_gflops": flop / fwd / 1e9,
        "fwd_peak_fraction": flop / fwd / 1e9 / peak,
        "fwd_weight_gbs": size / fwd / 1e9,
        "fwd_bandwidth_fraction": size / fwd / 1e9 / rates["read_gbs"],
        **_spread("fwd_bwd", times["fwd_bwd"]),
        "fwd_bwd_gflops": 2 * flop / both / 1e9,
        "fwd_bwd_peak_fraction": 2 * flop / both / 1e9 / peak,
        "fwd_bwd_weight_gbs": 2 * size / both / 1e9,
        "fwd_bwd_bandwidth_fraction": 2 * size / both / 1e9 / rates["read_gbs"],
        "lora_rank": shape.lora_rank,
        "peak_dtype": dtype,
        **rates,
        **more,
        **(_uniform_figures(times, case) if case.uniform else {}),
        "rounds": settings.rounds(case.tokens),
        "warm_up_rounds": WARM_UP,
    }
    about = {
        "hidden": shape.hidden,
        "intermediate": shape.intermediate,
        "experts": shape.experts,
        "topk": shape.topk,
        "format": shape.format,
        "routing": settings.routing,
    }
    return {"record": "experts", **{name: tidy(value) for name, value in figures.items()}, **about}


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """``{name}_ms``, the median, and ``_min`` and ``_max`` of it."""
    figures = {"": statistics.median(seconds), "_min": min(seconds), "_max": max(seconds)}
    return {f"{name}_ms{suffix}": 1e3 * value for suffix, value in figures.items()}


def _uniform_figures(times: Mapping[str, Sequence[float]], case: Case) -> dict[str, float]:
    """The ``uniform_`` fields."""
    out = {"uniform_experts_touched": statistics.mean(len(routing.rows()) for routing in case.uniform)}
    for kind in ("fwd", "fwd_bwd"):
        ratios = [even / skewed for even, skewed in zip(times[f"uniform_{kind}"], times[kind], strict=True)]
        out |= {
            **_spread(f"uniform_{kind}", times[f"uniform_{kind}"]),
            f"uniform_{kind}_ratio": statistics.median(ratios),
        }
    return out


def _stock_sides(
    case: Case, stock: Any, weights: ExpertWeights, half: int
) -> tuple[dict[str, Callable[[int], object]], dict[str, str]]:
    """Stock transformers' sides that can compute this case, and ``hf_skipped`` if one cannot.

    Raises:
        ValueError: neither can, or one of them computes something else than ktft does.
    """
    from ktft.bench.stock import IMPLEMENTATIONS

    def forward(turn: int, implementation: str) -> torch.Tensor:
        routing = case.routing(turn)
        stock.use(implementation)
        with torch.no_grad():
            out: torch.Tensor = stock(case.hidden, routing.index, routing.weights)
        return out

    def forward_backward(turn: int, implementation: str) -> None:
        routing = case.routing(turn + half)
        stock.use(implementation)
        hidden, route_weights = case.hidden.detach().requires_grad_(), routing.weights.detach().requires_grad_()
        stock(hidden, routing.index, route_weights).backward(case.grad)

    sides: dict[str, Callable[[int], object]] = {}
    skipped = []
    ours = _forward(case, 0, weights).float()
    for name in IMPLEMENTATIONS:
        if reason := stock.runs(name, case.hidden, case.routing(0)):
            skipped.append(f"{name}: {reason}")
            continue
        difference = float((forward(0, name).float() - ours).abs().max() / ours.abs().max())
        if difference > 0.05:  # bf16 rounds each of the three products and the sum; swapped experts differ by 1
            raise ValueError(
                f"transformers' {name} and ktft differ by {difference:.2g} of the largest output at {case.tokens} "
                "tokens; expected at most 0.05. Figures of different results are not compared"
            )
        sides[f"{name} fwd"] = lambda turn, name=name: forward(turn, name)  # type: ignore[misc]
        sides[f"{name} fwd_bwd"] = lambda turn, name=name: forward_backward(turn, name)  # type: ignore[misc]
    if not sides:
        raise ValueError(f"stock transformers cannot compute this layer: {'; '.join(skipped)}")
    return sides, {"hf_skipped": "; ".join(skipped)} if skipped else {}


def hf_figures(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The ``hf_`` fields, of the implementation with the shorter median.

    Args:
        times: seconds per round of "fwd", "fwd_bwd" (ours) and "{implementation} fwd", "{implementation} fwd_bwd".
    """
    out: dict[str, Any] = {}
    for kind in ("fwd", "fwd_bwd"):
        theirs = [name for name in times if name.endswith(f" {kind}")]
        best = min(theirs, key=lambda name: statistics.median(times[name]))
        ratios = [stock / ours for stock, ours in zip(times[best], times[kind], strict=True)]
        out |= {
            **_spread(f"hf_{kind}", times[best]),
            f"hf_{kind}_implementation": best.removesuffix(f" {kind}"),
            f"hf_{kind}_ratio": statistics.median(ratios),
            f"hf_{kind}_ratio_min": min(ratios),
            f"hf_{kind}_ratio_max": max(ratios),
        }
    return out


def alternate(
    sides: Mapping[str, Callable[[int], object]], rounds: int, samples: Samples | None = None
) -> dict[str, list[float]]:
    """Seconds of every side in every round; all sides take turns, first in one order, then in the other.

    Args:
        sides: name -> function of the round's number, counted on through the warm-up.
        rounds: timed rounds; :data:`WARM_UP` untimed ones come first.
        samples: takes :data:`SAMPLES` samples between rounds, at least one.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    every = max(1, rounds // SAMPLES)
    for turn in range(WARM_UP + rounds):
        timed = turn >= WARM_UP
        if samples is not None and timed and (turn - WARM_UP) % every == 0:
            samples.take()
        for name in sides if turn % 2 else reversed(list(sides)):
            start = time.perf_counter()
            sides[name](turn)
            if timed:
                times[name].append(time.perf_counter() - start)
    return times


__all__ = ["Case", "Settings", "alternate", "hf_figures", "run"]
