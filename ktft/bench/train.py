"""``ktft bench train``: whole training steps on random weights, and with ``--vs hf`` the same in transformers + PEFT.

Each side runs in a process of its own (``train_side``); the processes take turns, and this one samples the machine's
rates between them. Every side does the same steps on the same weights and the same batch; losses of the first step must
agree, so that figures of different computations are not compared.

Fields of a ``train`` record: ``side`` (ktft, hf), ``tok_s``, ``step_s`` (median over steps, then over rounds),
``experts_share``, ``rest_share``, ``optimizer_share`` (of a step; they add up to 1), ``peak_rss_gb`` (mapped pages
counted) and ``peak_anon_gb`` (1e9 bytes; both of the whole process, loading included), ``first_loss``; ``rounds``
(processes of each side; figures of one are no comparison in turns), ``step_s_all`` (per process, the untimed first step
included), ``warm_up_steps``, ``dtype``, ``seed_weights``, ``seed_batch``, and ``config_sha256`` of the ``config.json``.
The ``train_ratio`` record has ``speed`` (ours / theirs in tok_s, median over rounds), ``rss`` (ours / theirs, peak) and
``anon_of_rss`` (our anonymous peak / their peak).
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktft import ops
from ktft.bench.machine import Probe, Samples, config_sha256, describe, load_average
from ktft.bench.report import Report
from ktft.bench.settings import check_isa, tidy, torch_threads
from ktft.bench.train_side import BATCH_SEED, DTYPE, WARM_UP, WEIGHTS_SEED, Job
from ktft.ops import MAX_RANK

HF_IMPLEMENTATIONS = ("grouped_mm", "eager")
LOSS_TOLERANCE = 0.01
"""First losses are means over all tokens of bf16 logits; swapped or lost experts change them by more than that,
rounding by 0.0001 where it was tried."""


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        config: a ``config.json`` to take the model from; None takes Qwen3-MoE with the sizes below.
        layers: number of layers; None takes the config's own, or 4.
        hidden, intermediate, experts, topk, vocab: sizes without ``config``.
        tokens: length of the batch's one sequence.
        lora: "attention", or "experts" for both.
        lora_rank: r.
        steps: timed steps of a process.
        rounds: processes of each side.
        vs: None, or "hf" for the other side.
        isa: a level, or "auto".
        threads: of the kernels and of torch; None leaves both as they are.
        directory: where the checkpoint goes for the time being; None takes the system's temporary directory.
    """

    config: str | None = None
    layers: int | None = None
    hidden: int = 2048
    intermediate: int = 768
    experts: int = 128
    topk: int = 8
    vocab: int = 32000
    tokens: int = 1024
    lora: str = "experts"
    lora_rank: int = 8
    steps: int = 3
    rounds: int = 3
    vs: str | None = None
    isa: str = "auto"
    threads: int | None = None
    directory: str | None = None


def run(settings: Settings, report: Report, probe: Probe | None = None) -> None:
    """Measure and print: a ``machine`` record, ``train`` records, with ``vs`` a ``train_ratio`` record, an ``end``.

    Raises:
        ValueError: settings that cannot be, or the two sides' losses differ.
        RuntimeError: a side failed; the message is its last line.
    """
    check_isa(settings.isa)
    if not 1 <= settings.lora_rank <= MAX_RANK:
        raise ValueError(f"--lora-rank {settings.lora_rank}: training takes ranks 1 to {MAX_RANK}")
    if settings.config is None and settings.topk > settings.experts:
        raise ValueError(f"--topk {settings.topk} is more than --experts {settings.experts}")
    with ExitStack() as stack:
        stack.enter_context(torch_threads(settings.threads))
        # Here as in the processes, so that the machine's record says what they do.
        isa = None if settings.isa == "auto" else settings.isa
        stack.enter_context(ops.override(isa=isa, threads=settings.threads))
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="ktft-bench-", dir=settings.directory))
        job = Job(
            side="write",
            directory=directory,
            tokens=settings.tokens,
            lora=settings.lora,
            lora_rank=settings.lora_rank,
            steps=settings.steps,
            threads=settings.threads,
            isa=settings.isa,
        )
        model = _write_config(settings, Path(directory))
        model["config_sha256"] = config_sha256(directory)
        samples = Samples(probe or Probe())
        samples.take()
        report.emit(describe(samples))
        report.note("writing random weights …")
        _process(job)
        jobs = {"ktft": replace(job, side="ktft")}
        if settings.vs == "hf":
            jobs |= {f"hf {name}": replace(job, side="hf", implementation=name) for name in HF_IMPLEMENTATIONS}
        results = _rounds(jobs, settings.rounds, samples, report)
        for name in _sides(results):
            report.emit(_record(name, jobs[name], results[name], model))
        if settings.vs == "hf":
            report.emit(compare(results))
        rates = {name: tidy(value) for name, value in samples.medians().items()}
        report.emit({"record": "end", **rates, "load_average": load_average()})


def _rounds(jobs: dict[str, Job], rounds: int, samples: Samples, report: Report) -> dict[str, list[dict[str, Any]]]:
    """Results per side. After the first round only the faster of the stock implementations goes on."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
    names = list(jobs)
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            samples.take()
            report.note(f"round {turn + 1} of {rounds}: {name} …")
            result = _process(jobs[name])
            # Now, not only in the records at the end: the next side may take many minutes.
            report.note(f"  {name}: {result['tok_s']:.1f} tokens/s, peak {result['peak_rss_gb']:.2f} GB resident")
            results[name].append(result)
        names = _sides(results)
    return results


def _sides(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """``ktft`` and the stock implementation with the shorter steps in the first round."""
    stock = [name for name in results if name != "ktft"]
    return ["ktft", *sorted(stock, key=lambda name: float(results[name][0]["step_s"]))[:1]]


def _record(name: str, job: Job, results: Sequence[dict[str, Any]], model: dict[str, Any]) -> dict[str, Any]:
    shares = ("experts_share", "rest_share", "optimizer_share")
    seconds = statistics.median(result["step_s"] for result in results)
    return {
        "record": "train",
        "side": job.side,
        "implementation": "ktft" if job.side == "ktft" else job.implementation,
        "lora": job.lora,
        "lora_rank": job.lora_rank,
        "tokens": job.tokens,
        "step_s": tidy(seconds),
        "tok_s": tidy(job.tokens / seconds),
        **{share: tidy(statistics.mean(result[share] for result in results)) for share in shares},
        "peak_rss_gb": max(result["peak_rss_gb"] for result in results),
        "peak_anon_gb": max(result["peak_anon_gb"] for result in results),
        "first_loss": results[0]["first_loss"],
        "last_loss": results[0]["last_loss"],
        "trainable_parameters": results[0]["trainable_parameters"],
        "rounds": len(results),
        "step_s_all": [result["step_s_all"] for result in results],
        "warm_up_steps": WARM_UP,
        "dtype": str(DTYPE).removeprefix("torch."),
        "seed_weights": WEIGHTS_SEED,
        "seed_batch": BATCH_SEED,
        **model,
    }


def compare(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The ``train_ratio`` record.

    Args:
        results: per side, one result per round; see :func:`ktft.bench.train_side.train`.

    Raises:
        ValueError: the first losses differ.
    """
    _, name = _sides(results)
    ours, theirs = results["ktft"], results[name]
    for result in theirs:
        if abs(result["first_loss"] - ours[0]["first_loss"]) > LOSS_TOLERANCE:
            raise ValueError(
                f"the first step's loss is {ours[0]['first_loss']} here and {result['first_loss']} in transformers; "
                f"expected a difference of at most {LOSS_TOLERANCE}. Figures of different results are not compared"
            )
    pairs = list(zip(ours, theirs, strict=True))
    figures = {
        "speed": statistics.median(a["tok_s"] / b["tok_s"] for a, b in pairs),
        "rss": statistics.median(a["peak_rss_gb"] / b["peak_rss_gb"] for a, b in pairs),
        "anon_of_rss": statistics.median(a["peak_anon_gb"] / b["peak_rss_gb"] for a, b in pairs),
    }
    return {"record": "train_ratio", **{key: tidy(value) for key, value in figures.items()}}


def _write_config(settings: Settings, directory: Path) -> dict[str, Any]:
    """Write ``config.json``, return what a record says of it.

    Raises:
        ValueError: the given file is none, or has no layers to count.
    """
    target = directory / "config.json"
    if settings.config is not None:
        source = Path(settings.config).expanduser()
        if not source.is_file():
            raise ValueError(f"--config {settings.config} is not a file; expected a model's config.json")
        shutil.copyfile(source, target)
        try:
            fields = json.loads(target.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"--config {settings.config} is not valid JSON: {error}") from None
        if not isinstance(fields, dict) or "num_hidden_layers" not in fields or "model_type" not in fields:
            raise ValueError(
                f"--config {settings.config}: expected a model's config.json with model_type and num_hidden_layers"
            )
        if settings.layers is not None:
            fields["num_hidden_layers"] = settings.layers
            fields.pop("layer_types", None)  # one entry per layer; transformers makes them anew
            target.write_text(json.dumps(fields), encoding="utf-8")
        return {"model": fields["model_type"], "layers": fields["num_hidden_layers"], "config": str(source)}
    from transformers import Qwen3MoeConfig

    # Qwen3-30B-A3B's proportions: a head for every 64 of the hidden size, eight of them sharing keys and values.
    heads = max(1, settings.hidden // 64)
    config = Qwen3MoeConfig(
        vocab_size=settings.vocab,
        hidden_size=settings.hidden,
        moe_intermediate_size=settings.intermediate,
        num_experts=settings.experts,
        num_experts_per_tok=settings.topk,
        num_hidden_layers=settings.layers or 4,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 8),
        head_dim=128,
        norm_topk_prob=True,
    )
    # transformers fills in the architecture only when a model is saved.
    target.write_text(json.dumps({**config.to_diff_dict(), "architectures": ["Qwen3MoeForCausalLM"]}), encoding="utf-8")
    return {
        "model": config.model_type,
        "layers": settings.layers or 4,
        "hidden": settings.hidden,
        "intermediate": settings.intermediate,
        "experts": settings.experts,
        "topk": settings.topk,
        "vocab": settings.vocab,
    }


def _process(job: Job) -> dict[str, Any]:
    """Run a job in a process of its own and return its result.

    Raises:
        RuntimeError: it failed; with the last line it wrote to standard error.
    """
    ran = subprocess.run(
        [sys.executable, "-m", "ktft.bench.train_side", job.argument()], capture_output=True, text=True, check=False
    )
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"])[-1]
        raise RuntimeError(f"the process for {job.side} failed: {last}")
    if job.side == "write":
        return {}
    result: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return result


__all__ = ["Settings", "compare", "run"]
