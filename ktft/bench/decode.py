"""``ktft bench decode``: tokens a second of reading a prompt and of writing an answer, one sequence at a time.

    prefill   ``prompt`` random tokens in one forward into an empty cache, logits of the last one (pp512 by default)
    decode    ``new`` tokens one by one, greedy, after a prompt of one token (tg128 by default)

Decoding is transformers' ``generate``, as in ``ktft chat``, for every side: ktft, ktft with the adapter, and with
``--vs hf`` the stock model (in PEFT if there is an adapter) with the faster of its implementations. Sides take turns
within a repetition; figures are means and standard deviations over the repetitions after a warm-up. All sides are in
this process, so with ``--vs hf`` the weights are in memory twice.

Fields of a ``decode`` record: ``side``, ``adapter``, ``prefill_tok_s``, ``decode_tok_s`` and their ``_sd``;
``bytes_per_token`` (weights a decoded token must read: k experts a layer and all else but the input embedding),
``decode_bandwidth_fraction`` (bytes_per_token * decode_tok_s / read_gbs: the weights' share of what memory delivers),
``tokens_as_ktft`` (how many of the decoded tokens, from the first, are those of ktft with the same adapter setting).
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import ktft
from ktft import ops
from ktft.bench.machine import Probe, Samples, describe, load_average
from ktft.bench.report import Report
from ktft.bench.settings import check_isa, tidy, torch_threads
from ktft.chat import Sampling
from ktft.experts import CpuExperts
from ktft.weights import CODED, PLAIN

IMPLEMENTATIONS = ("grouped_mm", "eager")


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        model: directory or hub id.
        adapter: a directory, or None.
        vs: None, or "hf" for the stock side.
        prompt, new: tokens read at once, tokens written.
        repeat: timed repetitions.
        device: where everything but the experts runs; None takes CUDA if there is a GPU.
        isa: a level, or "auto".
        threads: of the kernels and of torch; None leaves both as they are.
    """

    model: str
    adapter: str | None = None
    vs: str | None = None
    prompt: int = 512
    new: int = 128
    repeat: int = 5
    device: str | None = None
    isa: str = "auto"
    threads: int | None = None


@dataclass
class Side:
    """One model with its adapter on or off; ``implementations`` are chosen by the warm-up for prefill and decode."""

    name: str
    model: Any
    adapter: bool
    implementations: tuple[str, str] = ("ktft", "ktft")

    def within(self) -> contextlib.AbstractContextManager[Any]:
        """Switches the adapter off within the block, where there is one and this side has none."""
        off = isinstance(self.model, PeftModel) and not self.adapter
        context: contextlib.AbstractContextManager[Any] = (
            self.model.disable_adapter() if off else contextlib.nullcontext()
        )
        return context

    def use(self, implementation: str) -> None:
        """Choose how stock transformers computes experts; ktft has one way."""
        if self.name == "hf":
            base = _base(self.model)
            base.set_experts_implementation(implementation)


def run(settings: Settings, report: Report, probe: Probe | None = None) -> None:
    """Measure and print: a ``machine`` record, a ``decode`` record per side, an ``end`` record.

    Raises:
        ValueError and its kin: what cannot be loaded or does not fit.
    """
    check_isa(settings.isa)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with ExitStack() as stack:
        stack.enter_context(torch_threads(settings.threads))
        isa = None if settings.isa == "auto" else settings.isa
        stack.enter_context(ops.override(isa=isa, threads=settings.threads))
        stack.enter_context(torch.inference_mode())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", FutureWarning)  # of transformers and PEFT, about themselves
        samples = Samples(probe or Probe())
        samples.take()
        report.emit(describe(samples))
        sides = _load(settings)
        vocabulary = int(sides[0].model.get_input_embeddings().num_embeddings)
        prompt = torch.randint(0, vocabulary, (1, settings.prompt), generator=torch.Generator().manual_seed(0))
        prompt = prompt.to(sides[0].model.device)
        texts = [_warm_up(side, prompt, settings.new) for side in sides]
        times: list[tuple[list[float], list[float]]] = [([], []) for _ in sides]
        for turn in range(settings.repeat):
            samples.take()
            order = range(len(sides)) if turn % 2 == 0 else reversed(range(len(sides)))
            for index in order:
                side, (reads, writes) = sides[index], times[index]
                with side.within():
                    side.use(side.implementations[0])
                    reads.append(_seconds(lambda side=side: prefill(side.model, prompt)))  # type: ignore[misc]
                    side.use(side.implementations[1])
                    writes.append(_seconds(lambda side=side: decode(side.model, prompt[:, :1], settings.new)))  # type: ignore[misc]
        rates = {name: tidy(value) for name, value in samples.medians().items()}
        size = bytes_per_token(sides[0].model)
        for index, side in enumerate(sides):
            ours = next(text for other, text in zip(sides, texts, strict=True) if other.adapter == side.adapter)
            report.emit(
                {
                    "record": "decode",
                    "model": settings.model,
                    "side": side.name,
                    "adapter": side.adapter,
                    "device": str(side.model.device),
                    "dtype": str(side.model.dtype).removeprefix("torch."),
                    "implementation": "/".join(dict.fromkeys(side.implementations)),
                    **figures(times[index], settings, size, rates["read_gbs"]),
                    "tokens_as_ktft": _common(texts[index], ours),
                    **rates,
                }
            )
        report.emit({"record": "end", "load_average": load_average()})


def figures(
    times: tuple[Sequence[float], Sequence[float]], settings: Settings, bytes_a_token: int, read_gbs: float
) -> dict[str, Any]:
    """The numbers of a ``decode`` record, from the seconds of every prefill and of every decode."""
    out: dict[str, Any] = {"prompt_tokens": settings.prompt, "new_tokens": settings.new, "repetitions": len(times[0])}
    for name, count, seconds in (("prefill", settings.prompt, times[0]), ("decode", settings.new, times[1])):
        rates = [count / value for value in seconds]
        out[f"{name}_tok_s"] = tidy(statistics.mean(rates))
        out[f"{name}_tok_s_sd"] = tidy(statistics.stdev(rates) if len(rates) > 1 else 0.0)
    out["bytes_per_token"] = bytes_a_token
    out["decode_bandwidth_fraction"] = tidy(bytes_a_token * out["decode_tok_s"] / 1e9 / read_gbs)
    return out


def prefill(model: Any, prompt: torch.Tensor) -> int:
    """Read ``prompt`` [1, T] into a new cache; the likeliest next token."""
    return int(model(input_ids=prompt, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())


def decode(model: Any, first: torch.Tensor, count: int) -> list[int]:
    """``count`` greedy tokens after ``first`` [1, 1]; none of them ends the answer."""
    chosen = Sampling(max_new_tokens=count).arguments() | {"min_new_tokens": count}
    out = model.generate(
        input_ids=first, attention_mask=torch.ones_like(first), pad_token_id=0, use_cache=True, **chosen
    )
    tokens: list[int] = out[0, 1:].tolist()
    return tokens


def bytes_per_token(model: Any) -> int:
    """Bytes of weights that decoding one token reads, experts as stored; adapters and scales are not counted."""
    experts = 0
    for module in model.modules():
        if isinstance(module, CpuExperts) and module.weights is not None:
            stored = (module.weights.gate, module.weights.up, module.weights.down)
            bits = sum(8 * PLAIN[m.format].itemsize if m.format in PLAIN else CODED[m.format] for m in stored)
            experts += module.hidden_size * module.intermediate_size * bits // 8
    base = _base(model)
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    rest = sum(int(value.nbytes) for name, value in base.named_parameters() if "lora_" not in name)
    unread = 0 if tied else int(embedding.weight.nbytes)
    return rest - unread + experts * int(base.config.num_experts_per_tok)


def _base(model: Any) -> Any:
    """The model under its adapters."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _load(settings: Settings) -> list[Side]:
    path = os.path.expanduser(settings.model)
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    base: Any = ktft.load_model(path, device=device)
    dtype = base.dtype
    adapter = None if settings.adapter is None else os.path.expanduser(settings.adapter)
    states = [False] if adapter is None else [False, True]
    ours = base if adapter is None else ktft.load_adapter(base, adapter)
    sides = [Side("ktft", ours.eval(), state) for state in states]
    if settings.vs == "hf":
        stock: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
        if adapter is not None:
            stock = PeftModel.from_pretrained(stock, adapter)
        sides += [Side("hf", stock.eval(), state) for state in states]
    return sides


def _warm_up(side: Side, prompt: torch.Tensor, count: int) -> list[int]:
    """Run everything once, choose the faster implementations, return the decoded tokens.

    Raises:
        ValueError: no implementation of stock transformers can run this model.
    """
    runs: list[tuple[float, float, str, list[int]]] = []
    problems = []
    for name in IMPLEMENTATIONS if side.name == "hf" else ("ktft",):
        side.use(name)
        try:
            with side.within():
                prefill(side.model, prompt)
                decode(side.model, prompt[:, :1], 2)
                text: list[int] = []
                reading = _seconds(lambda: prefill(side.model, prompt))
                writing = _seconds(lambda text=text: text.extend(decode(side.model, prompt[:, :1], count)))  # type: ignore[misc]
        except (RuntimeError, NotImplementedError) as error:
            if side.name == "ktft":
                raise
            problems.append(f"{name}: {' '.join(str(error).split())}")
            continue
        runs.append((reading, writing, name, text))
    if not runs:
        raise ValueError(f"stock transformers cannot run this model: {'; '.join(problems)}")
    side.implementations = (min(runs)[2], min(runs, key=lambda run: run[1])[2])
    return min(runs, key=lambda run: run[1])[3]


def _common(tokens: Sequence[int], others: Sequence[int]) -> int:
    count = 0
    for token, other in zip(tokens, others, strict=True):
        if token != other:
            break
        count += 1
    return count


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


__all__ = ["Settings", "Side", "bytes_per_token", "decode", "figures", "prefill", "run"]
