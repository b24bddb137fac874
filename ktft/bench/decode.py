"""``ktft bench decode``: tokens a second of reading a prompt and of writing an answer, one sequence at a time.

    prefill   ``prompt`` random tokens in one forward into an empty cache, logits of the last one (pp512 by default)
    decode    ``new`` tokens one by one, greedy, after a prompt of one token (tg128 by default)

Decoding is transformers' ``generate``, as in ``ktft chat``, for every side: ktft, ktft with the adapter, and with
``--vs hf`` the stock model (in PEFT if there is an adapter) with the faster of its implementations. Sides take turns
within a repetition; figures are means and standard deviations over the repetitions after a warm-up. All sides are in
this process, so with ``--vs hf`` the weights are in memory twice. Before anything is timed the logits after the prompt
must be those of the stock model, with the adapter and without (:func:`check_logits`): figures of different computations
are not compared.

Fields of a ``decode`` record: ``side``, ``adapter``, ``prefill_tok_s``, ``decode_tok_s`` and their ``_sd``;
``bytes_per_token`` (weights a decoded token must read: k experts a layer and all else but the input embedding),
``decode_bandwidth_fraction`` (bytes_per_token * decode_tok_s / read_gbs: the weights' share of what memory delivers),
``tokens_as_ktft`` (how many of the decoded tokens, from the first, are those of ktft with the same adapter setting),
``logits_difference`` (of a stock side, as :func:`check_logits` measures it); ``prefill_s_all``, ``decode_s_all``
(seconds of every repetition), ``warm_up_repetitions``; ``sampling``, ``ignore_eos``, ``seed_prompt``; ``adapter_path``,
``adapter_rank``, ``adapter_targets`` where the adapter is on; ``config_sha256`` of the model's ``config.json``;
``peak_rss_gb``, and with a GPU ``peak_vram_gb`` (1e9 bytes; of this process since its start, with all its sides).
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
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import ktft
from ktft import ops
from ktft.bench.machine import Probe, Samples, config_sha256, describe, load_average
from ktft.bench.memory import resident
from ktft.bench.report import Report
from ktft.bench.settings import check_isa, tidy, torch_threads
from ktft.chat import Sampling
from ktft.experts import CpuExperts
from ktft.gguf_file import find_gguf
from ktft.weights import stored_bytes

IMPLEMENTATIONS = ("grouped_mm", "eager")
PROMPT_SEED = 0
WARM_UP = 2
"""Prefills and decodes of every implementation in :func:`_warm_up`; the first decode is of two tokens."""

LOGITS_TOLERANCE = {torch.float32: 1e-3}
HALF_TOLERANCE = 0.1
"""How far logits may lie from the stock model's, as :func:`check_logits` measures it: in fp32, and in 16 bits.

A rounding to bf16 is off by 2**-9 of the value, root mean square; some 8 of a layer on either side add up like a random
walk, to 2**-9 * sqrt(16 * 94) = 0.076 over the 94 layers of the deepest model in view (Qwen3-235B). A router's choice
that turns on them comes on top. Unrelated logits are 1.4 apart."""


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
        generator = torch.Generator().manual_seed(PROMPT_SEED)
        prompt = torch.randint(0, vocabulary, (1, settings.prompt), generator=generator)
        prompt = prompt.to(sides[0].model.device)
        texts = [_warm_up(side, prompt, settings.new) for side in sides]
        differences = check_logits(sides, prompt)
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
        about = {
            "warm_up_repetitions": WARM_UP,
            "sampling": "greedy",
            "ignore_eos": True,
            "seed_prompt": PROMPT_SEED,
            "config_sha256": config_sha256(os.path.expanduser(settings.model)),
            "peak_rss_gb": tidy(resident().peak / 1e9),
        }
        if torch.cuda.is_available():
            about["peak_vram_gb"] = tidy(torch.cuda.max_memory_allocated() / 1e9)
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
                    **({"logits_difference": tidy(differences[index])} if index in differences else {}),
                    **(_adapter(side.model, settings) if side.adapter else {}),
                    **about,
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
        out[f"{name}_s_all"] = [tidy(value) for value in seconds]
    out["bytes_per_token"] = bytes_a_token
    out["decode_bandwidth_fraction"] = tidy(bytes_a_token * out["decode_tok_s"] / 1e9 / read_gbs)
    return out


def check_logits(sides: Sequence[Side], prompt: torch.Tensor) -> dict[int, float]:
    """Compare every stock side's logits after ``prompt`` with ktft's at the same adapter setting.

    The measure is the difference's root mean square over that of the stock logits about their mean; of a side's
    implementations, the greater.

    Args:
        sides: ktft's and the stock model's.
        prompt: [1, T].

    Returns:
        Index of each stock side -> its difference.

    Raises:
        ValueError: one is above the tolerance for its dtype, see :data:`HALF_TOLERANCE`.
    """
    ours = {side.adapter: _logits(side, prompt) for side in sides if side.name == "ktft"}
    found: dict[int, float] = {}
    for index, side in enumerate(sides):
        if side.name == "ktft":
            continue
        tolerance = LOGITS_TOLERANCE.get(side.model.dtype, HALF_TOLERANCE)
        for name in dict.fromkeys(side.implementations):
            side.use(name)
            theirs = _logits(side, prompt)
            difference = float((ours[side.adapter] - theirs).norm() / (theirs - theirs.mean()).norm())
            if not difference <= tolerance:
                state = "with the adapter" if side.adapter else "without an adapter"
                raise ValueError(
                    f"after a prompt of {prompt.shape[1]} tokens, {state}, the logits of ktft and of transformers' "
                    f"{name} differ by {difference:.2g} of their spread; expected at most {tolerance:g} in "
                    f"{side.model.dtype}. Figures of different results are not compared"
                )
            found[index] = max(difference, found.get(index, 0.0))
    return found


def _logits(side: Side, prompt: torch.Tensor) -> torch.Tensor:
    """After ``prompt``, [V] in fp32."""
    with side.within():
        logits: torch.Tensor = side.model(input_ids=prompt, logits_to_keep=1).logits[0, -1]
    return logits.float()


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
            experts += sum(stored_bytes(m.format, module.hidden_size * module.intermediate_size) for m in stored)
    base = _base(model)
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    rest = sum(int(value.nbytes) for name, value in base.named_parameters() if "lora_" not in name)
    unread = 0 if tied else int(embedding.weight.nbytes)
    return rest - unread + experts * int(base.config.num_experts_per_tok)


def _adapter(model: Any, settings: Settings) -> dict[str, Any]:
    """What a record says of the adapter, from its config as loaded."""
    config = model.peft_config[model.active_adapter]
    targets = [config.target_modules or [], config.target_parameters or []]
    return {
        "adapter_path": settings.adapter,
        "adapter_rank": config.r,
        "adapter_targets": [name for part in targets for name in ([part] if isinstance(part, str) else sorted(part))],
    }


def _base(model: Any) -> Any:
    """The model under its adapters."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _load(settings: Settings) -> list[Side]:
    path = os.path.expanduser(settings.model)
    if settings.vs == "hf" and os.path.exists(path) and find_gguf(Path(path)) is not None:
        raise ValueError(
            f"--vs hf needs a directory of safetensors files, which transformers loads too; {path} is GGUF"
        )
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


__all__ = ["Settings", "Side", "bytes_per_token", "check_logits", "decode", "figures", "prefill", "run"]
