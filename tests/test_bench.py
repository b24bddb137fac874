"""``ktft bench``: every record has its fields, figures follow from them as defined, wrong arguments are one line."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

import ktft
from ktft import cli, ops
from ktft.adapters import get_peft_model
from ktft.bench import decode, experts, layer, machine, memory, stock, stored, train, train_side
from ktft.bench.report import COLUMNS, Report
from ktft.weights import PLAIN
from tests.tiny_models import tiny_checkpoint, tiny_model

SHAPE = layer.Shape(hidden=128, intermediate=64, experts=8, topk=2, format="bf16", lora_rank=4)


@pytest.fixture(scope="module")
def probe() -> machine.Probe:
    return machine.Probe(matmul_side=64, read_bytes=2**20)


@pytest.fixture(autouse=True)
def small_probes(monkeypatch: pytest.MonkeyPatch, probe: machine.Probe) -> None:
    """Benchmarks started through the command line measure the machine in no time, too."""
    for module in (experts, train, decode):
        monkeypatch.setattr(module, "Probe", lambda: probe)


def records(settings: experts.Settings, probe: machine.Probe) -> list[dict[str, Any]]:
    output = io.StringIO()
    experts.run(settings, Report(True, output), probe)
    return [json.loads(line) for line in output.getvalue().splitlines()]


def of(lines: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["record"] == kind]


def command(*arguments: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert cli.main(["bench", *arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture(scope="module")
def measured(probe: machine.Probe) -> list[dict[str, Any]]:
    return records(experts.Settings(SHAPE, tokens=(1, 16), vs="hf", repeat=3), probe)


# --- experts


def test_the_machine_comes_first(measured: list[dict[str, Any]]) -> None:
    (found,) = of(measured, "machine")
    assert measured[0] is found and measured[-1]["record"] == "end"
    assert found["peak_bf16_gflops"] > 0 and found["peak_fp32_gflops"] > 0 and found["read_gbs"] > 0
    assert found["isa"] == ops.cpu_report()["chosen"] and found["threads"] == ops.num_threads()
    assert found["omp_wait_policy"] == os.environ["OMP_WAIT_POLICY"] and found["cpu"]
    assert found["versions"]["torch"] == torch.__version__ and len(found["load_average"]) == 3


def test_figures_follow_from_their_definitions(measured: list[dict[str, Any]]) -> None:
    lines = of(measured, "experts")
    assert [line["tokens"] for line in lines] == [1, 16]
    for line in lines:
        routes, per_route = line["tokens"] * 2, 6 * 128 * 64
        size = line["experts_touched"] * 3 * 128 * 64 * 2
        peak = line[f"peak_{line['peak_dtype']}_gflops"]
        expected = {
            "rows_per_expert": routes / line["experts_touched"],
            "fwd_gflops": routes * per_route / line["fwd_ms"] / 1e6,
            "fwd_peak_fraction": routes * per_route / line["fwd_ms"] / 1e6 / peak,
            "fwd_weight_gbs": size / line["fwd_ms"] / 1e6,
            "fwd_bandwidth_fraction": size / line["fwd_ms"] / 1e6 / line["read_gbs"],
            "fwd_bwd_gflops": 2 * routes * per_route / line["fwd_bwd_ms"] / 1e6,
            "fwd_bwd_peak_fraction": 2 * routes * per_route / line["fwd_bwd_ms"] / 1e6 / peak,
            "fwd_bwd_weight_gbs": 2 * size / line["fwd_bwd_ms"] / 1e6,
            "fwd_bwd_bandwidth_fraction": 2 * size / line["fwd_bwd_ms"] / 1e6 / line["read_gbs"],
            "scratch_mb": line["anon_added_mb"] - line["required_mb"],
        }
        for name, value in expected.items():
            # both sides have numbers of six significant digits
            assert math.isclose(line[name], value, rel_tol=2e-5, abs_tol=2e-5 * line["anon_added_mb"]), name
        assert line["lora_rank"] == 4 and 1 <= line["rows_max"] <= line["tokens"]
        assert 2 <= line["experts_touched"] <= 8
        lora = sum(math.prod(size) for size in ((8, 4, 128), (8, 64, 4)) * 2 + ((8, 4, 64), (8, 128, 4))) * 4
        required = 2 * line["tokens"] * 128 * 2 + 2 * routes * 64 * 2 + routes * 6 + lora
        assert math.isclose(line["required_mb"], required / 1e6, rel_tol=1e-5)
        assert line["rss_added_mb"] >= line["anon_added_mb"] - 0.2
        assert line["hf_fwd_ms"] > 0 and line["hf_fwd_bwd_ms"] > 0
        assert {line["hf_fwd_implementation"], line["hf_fwd_bwd_implementation"]} <= {"eager", "grouped_mm"}


def test_the_better_implementation_is_the_comparison() -> None:
    times = {
        "fwd": [0.001, 0.001, 0.002],
        "fwd_bwd": [0.002, 0.002, 0.002],
        "eager fwd": [0.003, 0.002, 0.009],
        "eager fwd_bwd": [0.030, 0.001, 0.030],
        "grouped_mm fwd": [0.004, 0.004, 0.001],
        "grouped_mm fwd_bwd": [0.020, 0.020, 0.020],
    }
    found = experts.hf_figures(times)
    assert (found["hf_fwd_ms"], found["hf_fwd_implementation"]) == (3.0, "eager")
    assert (found["hf_fwd_bwd_ms"], found["hf_fwd_bwd_implementation"]) == (20.0, "grouped_mm")
    assert math.isclose(found["hf_fwd_ratio"], 3.0) and math.isclose(found["hf_fwd_bwd_ratio"], 10.0)
    assert math.isclose(found["hf_fwd_ratio_max"], 4.5)


def test_an_implementation_that_cannot_run_is_skipped_and_named(probe: machine.Probe) -> None:
    """torch's grouped matmul wants rows of 16 bytes."""
    shape = dataclasses.replace(SHAPE, hidden=36, intermediate=20)
    (line,) = of(records(experts.Settings(shape, tokens=(4,), vs="hf", repeat=1), probe), "experts")
    assert line["hf_fwd_implementation"] == line["hf_fwd_bwd_implementation"] == "eager"
    assert line["hf_skipped"].startswith("grouped_mm: ")


def test_different_results_are_not_compared(probe: machine.Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = experts._forward
    monkeypatch.setattr(experts, "_forward", lambda *arguments: 1.2 * forward(*arguments))
    with pytest.raises(ValueError, match="are not compared"):
        records(experts.Settings(SHAPE, tokens=(4,), vs="hf", repeat=1), probe)


# bytes of a matrix [rows, cols], by hand
BYTES: dict[str, Callable[[int, int], int]] = {
    "bf16": lambda rows, cols: 2 * rows * cols,
    "fp16": lambda rows, cols: 2 * rows * cols,
    "fp32": lambda rows, cols: 4 * rows * cols,
    "fp8-block": lambda rows, cols: rows * cols + 4 * math.ceil(rows / 128) * math.ceil(cols / 128),
    "fp8-channel": lambda rows, cols: rows * cols + 4 * rows,
    "mxfp8": lambda rows, cols: rows * cols * 33 // 32,
    "int8": lambda rows, cols: rows * cols + 2 * rows,
    "int4-g32": lambda rows, cols: rows * cols // 2 + 2 * rows * cols // 32,
    "int4-g128": lambda rows, cols: rows * cols // 2 + 2 * rows * cols // 128,
    "mxfp4": lambda rows, cols: rows * cols // 2 + rows * cols // 32,
    "nvfp4": lambda rows, cols: rows * cols // 2 + rows * cols // 16,
}


def test_every_format_and_level(probe: machine.Probe) -> None:
    """All formats in one run, each with its own line."""
    assert BYTES.keys() == stored.FORMATS.keys()
    shape = dataclasses.replace(SHAPE, hidden=256, intermediate=128, lora_rank=0)
    beside = tuple(name for name in BYTES if name != "bf16")
    for isa in ops.cpu_report()["levels"]:
        settings = experts.Settings(shape, tokens=(4,), isa=isa, threads=1, repeat=1, beside=beside)
        found = records(settings, probe)
        assert found[0]["isa"] == isa and found[0]["threads"] == found[0]["torch_threads"] == 1
        lines = of(found, "experts")
        assert [line["format"] for line in lines] == ["bf16", *beside]
        for line in lines:
            name = line["format"]
            assert line["peak_dtype"] == ("fp32" if name == "fp32" or isa in ("scalar", "avx2") else "bf16")
            assert "hf_fwd_ms" not in line and line["lora_rank"] == 0
            size = 2 * BYTES[name](128, 256) + BYTES[name](256, 128)
            assert math.isclose(
                line["fwd_weight_gbs"], line["experts_touched"] * size / line["fwd_ms"] / 1e6, rel_tol=2e-5
            ), name
            assert ("rss_added_mb" in line) == ("vs_bf16_fwd" not in line) == (name == "bf16")
    assert ops.num_threads() == torch.get_num_threads()


@pytest.mark.parametrize("name", [name for name in stored.FORMATS if name not in PLAIN])
def test_coded_layers_are_files_that_load(tmp_path: Path, name: str) -> None:
    """Through detection, mapping and kernels; stock transformers decodes the same; weights of a sane size."""
    shape = dataclasses.replace(SHAPE, hidden=256, intermediate=128, experts=4, format=name)
    layer.write_layer(tmp_path, shape)
    weights = layer.map_layer(tmp_path, shape)
    assert weights.gate.format == stored.FORMATS[name].encoding.format
    module = stock.StockExperts(tmp_path, shape)
    module.use("eager")
    for part in (module._module.gate_up_proj, module._module.down_proj):
        assert 0.01 < part.float().std() < 0.04
        assert not torch.equal(part[0], part[1])
    (routing,) = layer.routings(shape, 5, "uniform", 1)
    hidden = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        ours = ops.moe_experts(hidden, routing.index, routing.weights, weights).float()
        theirs = module(hidden, routing.index, routing.weights).float()
    assert (ours - theirs).abs().max() < 0.05 * theirs.abs().max()  # three products and a sum in bf16


def test_formats_take_turns_with_bf16(probe: machine.Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that every call moves by a time of its format and round; ratios are taken round by round."""
    now, order = 0.0, []
    seconds = {"bf16": [4.0, 6.0, 40.0], "fp8": [2.0, 2.0, 5.0], "int4": [1.0, 2.0, 8.0]}

    def call(case: experts.Case, turn: int, weights: Any, *_: Any, factor: int = 1) -> None:
        nonlocal now
        order.append(weights.gate.format)
        # turns of fwd_bwd are half of the routings further on
        at = (turn - experts.WARM_UP) % (len(case.routings) // 2)
        now += factor * (seconds[weights.gate.format][at] if at < 3 else 1.0)

    monkeypatch.setattr(experts, "_memory", lambda weights, cases, *_: [{} for _ in cases])
    monkeypatch.setattr(experts, "_forward", call)
    monkeypatch.setattr(experts, "_forward_backward", lambda *arguments: call(*arguments, factor=3))
    monkeypatch.setattr(experts.time, "perf_counter", lambda: now)
    monkeypatch.setattr(experts.Samples, "take", lambda self: None)
    monkeypatch.setattr(experts.Samples, "medians", lambda self: dict.fromkeys(machine.Samples(probe)._rates, 1.0))
    monkeypatch.setattr(experts, "describe", lambda samples: {"record": "machine"})
    for formats in (("int4-g32", "bf16", "fp8-block"), ("int4-g32", "fp8-block")):
        order.clear()
        shape = dataclasses.replace(SHAPE, format=formats[0])
        lines = of(records(experts.Settings(shape, (4,), repeat=3, beside=formats[1:]), probe), "experts")
        assert [line["format"] for line in lines] == list(formats)
        rounds = [order[begin : begin + 2 * len(formats)] for begin in range(0, len(order), 2 * len(formats))]
        assert len(rounds) == experts.WARM_UP + 3
        assert all(sorted(set(one)) == sorted({name.split("-")[0] for name in formats}) for one in rounds)
        found = {line["format"]: line for line in lines}
        assert found["int4-g32"]["fwd_ms"] == 2e3 and found["int4-g32"]["fwd_bwd_ms"] == 6e3
        for line in lines:
            ratio = {"int4-g32": 4.0, "fp8-block": 3.0}.get(line["format"]) if "bf16" in formats else None
            assert line.get("vs_bf16_fwd") == line.get("vs_bf16_fwd_bwd") == ratio


def test_options_reach_the_benchmark(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = "--hidden 64 --intermediate 32 --experts 4 --topk 3 --tokens 2,3 --lora-rank 2 --repeat 1".split()
    lines = command("experts", *sizes, "--routing", "zipf", "--directory", str(tmp_path), capsys=capsys)
    for line, tokens in zip(of(lines, "experts"), (2, 3), strict=True):
        expected = {"hidden": 64, "intermediate": 32, "experts": 4, "topk": 3, "tokens": tokens, "lora_rank": 2}
        assert expected.items() <= line.items() and line["routing"] == "zipf" and line["rounds"] == 1
        assert line["uniform_fwd_ms"] > 0 and line["uniform_fwd_bwd_ratio"] > 0
    assert not list(tmp_path.iterdir())


def test_skewed_routing_is_compared_with_uniform_in_the_same_rounds(
    monkeypatch: pytest.MonkeyPatch, probe: machine.Probe
) -> None:
    """By a clock that a forward moves by the rows of its busiest expert, and a forward+backward by thrice that."""
    shape = dataclasses.replace(SHAPE, experts=64, topk=4)
    now = 0.0

    def forward(case: experts.Case, turn: int, *_: Any, factor: int = 1) -> None:
        nonlocal now
        now += factor * float(case.routing(turn).rows().max())

    monkeypatch.setattr(experts, "_forward", forward)
    monkeypatch.setattr(experts, "_forward_backward", lambda *arguments: forward(*arguments, factor=3))
    monkeypatch.setattr(experts.time, "perf_counter", lambda: now)
    settings = experts.Settings(shape, (300,), routing="zipf", repeat=1)
    (case,) = experts._cases(settings, shape)
    monkeypatch.setattr(experts.Samples, "take", lambda self: None)
    monkeypatch.setattr(experts.Samples, "medians", lambda self: dict.fromkeys(machine.Samples(probe)._rates, 1.0))
    alone = experts.Layer(shape, None, [case])  # type: ignore[arg-type]
    (line,) = experts._measure(settings, [alone], 0, [], None, probe, {})
    turn, half = 2, len(case.routings) // 2  # two rounds of warm-up
    for kind, at, factor in (("fwd", turn, 1), ("fwd_bwd", turn + half, 3)):
        skewed, even = (int(routing[at].rows().max()) for routing in (case.routings, case.uniform))
        assert skewed > 3 * even
        assert math.isclose(line[f"uniform_{kind}_ms"], factor * even * 1e3)
        assert math.isclose(line[f"{kind}_ms"], factor * skewed * 1e3)
        assert math.isclose(line[f"uniform_{kind}_ratio"], even / skewed, rel_tol=1e-5)
    assert line["uniform_experts_touched"] == 64 and line["rows_max"] > 100
    (plain,) = experts._cases(dataclasses.replace(settings, routing="uniform"), shape)
    assert not plain.uniform


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--hidden 64 --intermediate 32 --experts 4 --topk 2 --tokens 5 --repeat 1".split()
    assert cli.main(["bench", "experts", *sizes]) == 0
    out = capsys.readouterr().out
    assert "peak_bf16_gflops: " in out and "omp_wait_policy: " in out
    heading, row = (line for line in out.splitlines() if line.startswith("   ") and ":" not in line)
    assert len(heading) == len(row) == 12 * len(COLUMNS["experts"])
    assert row.split()[0] == "5" and row.split()[-4:-2] == ["-", "-"]


# --- what is measured


def test_the_weights_are_a_mapped_checkpoint(tmp_path: Path) -> None:
    layer.write_layer(tmp_path, SHAPE)
    weights = layer.map_layer(tmp_path, SHAPE)
    stored = load_file(tmp_path / "model.safetensors")
    for part, name in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")):
        assert torch.equal(weights.matrix(part, 5), stored[f"{layer.PREFIX}.5.{name}.weight"])
    values = torch.cat([tensor.flatten().float() for tensor in stored.values()])
    assert abs(float(values.std()) - 0.02) < 0.001
    assert len({tensor[0, 0].item() for tensor in stored.values()}) > 12  # bf16 values, but not one matrix again
    mapping = layer.mapping_of(weights)
    assert mapping.path.name == "model.safetensors"
    layer.touch(mapping)


def test_routing_is_skewed_or_not_and_repeats() -> None:
    shape = dataclasses.replace(SHAPE, experts=64, topk=4)
    for kind in ("uniform", "zipf"):
        first, again = (layer.routings(shape, 500, kind, 3) for _ in range(2))
        assert all(
            torch.equal(a.index, b.index) and torch.equal(a.weights, b.weights)
            for a, b in zip(first, again, strict=True)
        )
        assert not torch.equal(first[0].index, first[1].index)
        for routing in first:
            assert all(len(set(row)) == 4 for row in routing.index.tolist())
            assert routing.index.min() >= 0 and routing.index.max() < 64
            assert torch.allclose(routing.weights.float().sum(-1), torch.ones(500), atol=0.02)  # bf16 weights
        counts = first[0].index.flatten().bincount(minlength=64).sort(descending=True).values
        mean = 500 * 4 / 64
        if kind == "uniform":
            assert counts[0] < 2 * mean  # six deviations of a binomial are 1.1 times the mean
        else:
            # With p ~ 1/n over 64 experts and four draws, the first is in nearly two thirds of all rows.
            assert counts[0] > 6 * mean and counts[32:].sum() < 0.35 * counts.sum()
    popular = [int(routing.index.flatten().bincount(minlength=64).argmax()) for routing in first]
    assert len(set(popular)) > 1  # which expert is popular changes
    with pytest.raises(ValueError, match="valid: uniform, zipf"):
        layer.routings(shape, 5, "even")


def test_sides_take_turns() -> None:
    order: list[tuple[str, int]] = []
    sides = {name: (lambda turn, name=name: order.append((name, turn))) for name in "ab"}
    times = experts.alternate(sides, 4)
    assert [name for name, _ in order] == list("baabbaabbaab")
    assert [turn for _, turn in order] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert {name: len(values) for name, values in times.items()} == {"a": 4, "b": 4}


def test_the_machine_is_sampled_between_rounds(probe: machine.Probe) -> None:
    order: list[str] = []

    class Counting(machine.Samples):
        def take(self) -> None:
            order.append("sample")

    experts.alternate({"a": lambda turn: order.append("a")}, 21, Counting(probe))
    assert order[:2] == ["a", "a"] and order[2] == "sample" and order.count("sample") == 7
    assert "".join("s" if item == "sample" else "a" for item in order[2:]) == "saaa" * 7


def test_rates_are_medians(probe: machine.Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = machine.Samples(probe)
    for rate in (1.0, 50.0, 3.0):
        monkeypatch.setattr(probe, "matmul", lambda dtype, repeat=3, rate=rate: rate * (1 + dtype.itemsize))
        monkeypatch.setattr(probe, "read", lambda rate=rate: rate)
        samples.take()
    assert samples.medians() == {"peak_bf16_gflops": 9.0, "peak_fp32_gflops": 15.0, "read_gbs": 3.0}


def test_memory_is_seen_and_mapped_pages_are_told_apart(tmp_path: Path) -> None:
    size = 32 * 2**20
    with memory.Watch() as watch:
        before = memory.resident()
        torch.ones(size // 4)
    assert 0.9 * size < watch.anon_peak - before.anon < 1.3 * size
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    content = np.frombuffer(mapped, dtype=np.uint8)
    with memory.Watch() as watch:
        before = memory.resident()
        int(content[::4096].sum())
    assert watch.rss_peak - before.rss > 0.9 * size and watch.anon_peak - before.anon < 0.3 * size
    held = memory.resident().rss
    memory.forget_mapped(int(content.ctypes.data), size)
    assert held - memory.resident().rss > 0.9 * size
    with pytest.raises(OSError, match="MADV_DONTNEED"):
        memory.forget_mapped(int(content.ctypes.data) + 1, size)


# --- train


def test_train(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--hidden 128 --intermediate 64 --experts 8 --topk 2 --layers 1 --vocab 256".split()
    work = "--tokens 24 --steps 1 --rounds 1 --lora-rank 2 --lora experts --vs hf --isa scalar --threads 1".split()
    lines = command("train", *sizes, *work, capsys=capsys)
    assert [line["record"] for line in lines] == ["machine", "train", "train", "train_ratio", "end"]
    assert [lines[0][name] for name in ("isa", "threads", "torch_threads")] == ["scalar", 1, 1]
    ours, theirs = of(lines, "train")
    assert (ours["side"], theirs["side"]) == ("ktft", "hf")
    for line in (ours, theirs):
        assert {"layers": 1, "hidden": 128, "experts": 8, "vocab": 256, "tokens": 24, "lora_rank": 2}.items() <= (
            line.items()
        )
        assert math.isclose(line["tok_s"], 24 / line["step_s"], rel_tol=1e-4)
        shares = [line[f"{name}_share"] for name in ("experts", "rest", "optimizer")]
        assert math.isclose(sum(shares), 1, abs_tol=1e-4) and min(shares) > 0
        assert 0 < line["peak_anon_gb"] < line["peak_rss_gb"]
        assert abs(line["first_loss"] - math.log(256)) < 1  # random weights know nothing
    assert theirs["implementation"] in ("eager", "grouped_mm")
    # Attention alone has the same factors on both sides; of an expert's gate and up, stock PEFT shares one A.
    attention = 2 * (128 + 2 * 128) + 2 * 2 * (128 + 128) + 2 * (2 * 128 + 128)
    assert ours["trainable_parameters"] == attention + 3 * 8 * 2 * (128 + 64)
    assert theirs["trainable_parameters"] == attention + 8 * 2 * (128 + 2 * 64 + 64 + 128)
    ratio = of(lines, "train_ratio")[0]
    assert math.isclose(ratio["speed"], ours["tok_s"] / theirs["tok_s"], rel_tol=1e-4)
    assert math.isclose(ratio["anon_of_rss"], ours["peak_anon_gb"] / theirs["peak_rss_gb"], rel_tol=1e-4)


def test_train_takes_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_checkpoint("mixtral", tmp_path) / "config.json"
    lines = command(
        "train", "--config", str(config), *"--layers 1 --tokens 9 --steps 1 --rounds 1".split(), capsys=capsys
    )
    (line,) = of(lines, "train")
    assert line["model"] == "mixtral" and line["layers"] == 1 and line["lora"] == "experts"


def test_the_faster_stock_implementation_goes_on(monkeypatch: pytest.MonkeyPatch, probe: machine.Probe) -> None:
    seconds = {"ktft": 1.0, "grouped_mm": 4.0, "eager": 2.0}
    ran: list[str] = []

    def process(job: train_side.Job) -> dict[str, Any]:
        if job.side == "write":
            return {}
        name = "ktft" if job.side == "ktft" else job.implementation
        ran.append(name)
        figures = dict.fromkeys(("experts_share", "rest_share", "optimizer_share"), 1 / 3)
        figures |= {"step_s": seconds[name], "tok_s": 6 / seconds[name], "peak_rss_gb": 2.0, "peak_anon_gb": 0.5}
        return figures | {"first_loss": 5.0, "last_loss": 4.0, "trainable_parameters": 7, "step_s_all": [1.0]}

    monkeypatch.setattr(train, "_process", process)
    output = io.StringIO()
    train.run(train.Settings(tokens=6, rounds=2, vs="hf"), Report(True, output), probe)
    lines = [json.loads(line) for line in output.getvalue().splitlines()]
    assert ran == ["ktft", "grouped_mm", "eager", "eager", "ktft"]
    assert of(lines, "train")[1]["implementation"] == "eager"
    expected = {"speed": 2.0, "rss": 1.0, "anon_of_rss": 0.25}
    assert expected.items() <= of(lines, "train_ratio")[0].items()
    result = process(train_side.Job("ktft", ""))
    with pytest.raises(ValueError, match=r"loss is 5\.0 here and 5\.5 in transformers"):
        train.compare({"ktft": [result], "hf eager": [result | {"first_loss": 5.5}]})


def test_shares_time_forward_and_backward_of_the_experts_only() -> None:
    model = tiny_model("qwen3_moe")
    found = train_side.experts_modules(model)
    assert list(found) == [f"model.layers.{n}.mlp.experts" for n in range(2)]
    assert train_side.attention_targets(model) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    shares = train_side.Shares(found)
    embeddings = model.get_input_embeddings()(torch.arange(5)[None]).detach().requires_grad_()
    loss = model(inputs_embeds=embeddings).logits.sum()
    forward = shares.seconds
    loss.backward()
    assert 0 < forward < shares.seconds
    shares.close()
    whole = shares.seconds
    model(inputs_embeds=embeddings).logits.sum().backward()
    assert shares.seconds == whole
    with pytest.raises(ValueError, match="no module called experts"):
        train_side.experts_modules(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no linear layers under self_attn"):
        train_side.attention_targets(torch.nn.Linear(2, 2))


# --- decode


def test_decode(bench_base: Path, bench_adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = "--prompt 12 --new 6 --repeat 2 --vs hf --device cpu".split()
    lines = of(command("decode", str(bench_base), "--adapter", str(bench_adapter), *counts, capsys=capsys), "decode")
    assert [(line["side"], line["adapter"]) for line in lines] == [
        ("ktft", False), ("ktft", True), ("hf", False), ("hf", True),
    ]  # fmt: skip
    for line in lines:
        assert (line["prompt_tokens"], line["new_tokens"], line["repetitions"]) == (12, 6, 2)
        assert line["prefill_tok_s"] > 0 and line["decode_tok_s"] > 0 and line["decode_tok_s_sd"] >= 0
        fraction = line["bytes_per_token"] * line["decode_tok_s"] / 1e9 / line["read_gbs"]
        assert math.isclose(line["decode_bandwidth_fraction"], fraction, rel_tol=1e-4)
    assert [line["tokens_as_ktft"] for line in lines[:2]] == [6, 6]
    assert lines[2]["tokens_as_ktft"] >= 1 and lines[2]["implementation"] != "ktft"


def test_decode_figures() -> None:
    settings = decode.Settings("m", prompt=100, new=10)
    found = decode.figures(([1.0, 0.5], [2.0, 2.0]), settings, bytes_a_token=10**9, read_gbs=20.0)
    assert (found["prefill_tok_s"], found["prefill_tok_s_sd"]) == (150.0, 70.7107)
    assert (found["decode_tok_s"], found["decode_tok_s_sd"]) == (5.0, 0.0)
    assert found["decode_bandwidth_fraction"] == 0.25


def test_bytes_per_token(tmp_path: Path) -> None:
    for family, tied in (("mixtral", False), ("qwen3_moe", True)):
        directory = tiny_checkpoint(family, tmp_path / family)
        stored = load_file(directory / "model.safetensors")
        experts_bytes = sum(tensor.nbytes for name, tensor in stored.items() if ".experts." in name)
        model = ktft.load_model(directory)
        config = model.config
        count = config.num_local_experts if family == "mixtral" else config.num_experts
        unread = 0 if tied else stored["model.embed_tokens.weight"].nbytes
        rest = sum(tensor.nbytes for tensor in stored.values()) - experts_bytes - unread
        expected = rest + experts_bytes * config.num_experts_per_tok // count
        assert decode.bytes_per_token(model) == expected
        lora = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "experts"], task_type="CAUSAL_LM"))
        assert decode.bytes_per_token(lora) == expected


# --- the command line


def test_wrong_arguments_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "list.json").write_text("[]", encoding="utf-8")
    for arguments, complaint in (
        ("experts --topk 9 --experts 8", "--topk 9 is more than --experts 8"),
        ("experts --lora-rank 999", "--lora-rank 999: the kernels serve ranks up to 256"),
        ("experts --format q4", "--format q4 is not a format of expert weights; valid: bf16"),
        ("experts --format bf16,q4", "--format q4 is not a format of expert weights; valid: bf16"),
        ("experts --format mxfp4,bf16,mxfp4", "--format names a format twice: mxfp4, bf16, mxfp4"),
        ("experts --format int4-g128 --intermediate 64", "--format int4-g128: int4 (groups of 128;"),
        ("experts --isa neon", "--isa neon is not a level; valid: auto, scalar"),
        (f"experts --directory {tmp_path}/none", "none"),
        ("train --topk 9 --experts 8", "--topk 9 is more than --experts 8"),
        ("train --lora-rank 0", "--lora-rank 0: training takes ranks 1 to 256"),
        (f"train --config {tmp_path}/none", "is not a file; expected a model's config.json"),
        (f"train --config {tmp_path}/list.json", "expected a model's config.json with model_type"),
        (f"decode {tmp_path}/none", "none is not a directory"),
    ):
        assert cli.main(["bench", *arguments.split()]) == 1, arguments
        error = capsys.readouterr().err
        assert error.startswith("ktft: error: ") and error.count("\n") == 1 and complaint in error, error
    for arguments, complaint in (
        ("experts --tokens 4,x", "'4,x' must be whole numbers of 1 or more, separated by commas"),
        ("experts --tokens 0", "'0' must be whole numbers"),
        ("experts --routing even", "invalid choice: 'even'"),
        ("experts --vs kt", "invalid choice: 'kt'"),
        ("experts --hidden 0", "0 must be 1 or more"),
        ("experts --lora-rank -1", "-1 must be 0 or more"),
        ("train --lora all", "invalid choice: 'all'"),
        ("decode", "MODEL"),
        ("", "WHAT"),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["bench", *arguments.split()])
        assert stopped.value.code == 2 and complaint in capsys.readouterr().err, arguments


def test_a_level_above_the_machine_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ops, "isa_levels", lambda features=None: {"scalar": "", "best": "wings"})
    assert cli.main(["bench", "experts", "--isa", "best"]) == 1
    assert "--isa best cannot run on this CPU, which lacks wings; available: scalar" in capsys.readouterr().err


def test_a_side_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"the process for ktft failed: .*(none|config)"):
        train._process(train_side.Job("ktft", "/none"))


def test_every_option_is_explained() -> None:
    (commands,) = (action for action in cli._parser()._actions if action.dest == "command")
    assert isinstance(commands.choices, dict)
    (kinds,) = (action for action in commands.choices["bench"]._actions if action.dest == "bench")
    assert isinstance(kinds.choices, dict) and set(kinds.choices) == {"experts", "train", "decode"}
    for kind in kinds.choices.values():
        assert kind.description and all(action.help for action in kind._actions)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from ktft import cli\n"
        "try: cli.main(['bench', 'experts', '--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert ran.returncode == 0, ran.stderr
