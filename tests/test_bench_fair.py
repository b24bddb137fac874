"""What makes a figure of ``ktft bench`` fair: its defaults, turns, routings that change, equal work and equal results
on both sides, and a report that says how it came about."""

from __future__ import annotations

import hashlib
import inspect
import io
import itertools
import json
import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ktft import cli, ops
from ktft.bench import decode, experts, layer, machine, stock, train, train_side
from ktft.bench.report import Report
from tests.test_doctor import cpu_flags
from tests.tiny_models import tiny_checkpoint

SHAPE = layer.Shape(hidden=128, intermediate=64, experts=8, topk=2, format="bf16", lora_rank=4)


@pytest.fixture(scope="module")
def probe() -> machine.Probe:
    return machine.Probe(matmul_side=64, read_bytes=2**20)


def records(module: Any, settings: Any, probe: machine.Probe) -> list[dict[str, Any]]:
    output = io.StringIO()
    module.run(settings, Report(True, output), probe)
    return [json.loads(line) for line in output.getvalue().splitlines()]


# --- defaults


def test_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Spelled out, of the command line and of the settings: figures under one name are figures of one thing."""
    asked: list[Any] = []
    for module in (experts, train, decode):
        monkeypatch.setattr(module, "run", lambda settings, report: asked.append(settings))
    for arguments in (["experts"], ["train"], ["decode", "m"]):
        assert cli.main(["bench", *arguments]) == 0
    shape = layer.Shape(hidden=2048, intermediate=768, experts=128, topk=8, format="bf16", lora_rank=8)
    alike: dict[str, Any] = {"isa": "auto", "threads": None, "vs": None}
    assert asked == [
        experts.Settings(
            shape, (1, 4, 16, 128, 512, 2048), routing="uniform", repeat=None, directory=None, overheads=False, **alike
        ),
        train.Settings(
            config=None, layers=None, hidden=2048, intermediate=768, experts=128, topk=8, vocab=32000, tokens=1024,
            lora="experts", lora_rank=8, steps=3, rounds=3, directory=None, **alike,
        ),
        decode.Settings("m", adapter=None, prompt=512, new=128, repeat=5, device=None, **alike),
    ]  # fmt: skip
    assert asked[1] == train.Settings() and asked[2] == decode.Settings("m")
    assert asked[0] == experts.Settings(shape, (1, 4, 16, 128, 512, 2048))
    assert {tokens: asked[0].rounds(tokens) for tokens in (1, 16, 17, 2048)} == {1: 21, 16: 21, 17: 7, 2048: 7}
    assert train._write_config(asked[1], tmp_path)["layers"] == 4
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 4
    defaults = {name: value.default for name, value in inspect.signature(machine.Probe).parameters.items()}
    assert defaults == {"matmul_side": 2048, "read_bytes": 512 * 2**20}


# --- experts


def test_every_side_meets_another_routing_in_every_round(monkeypatch: pytest.MonkeyPatch, probe: machine.Probe) -> None:
    """Else what is in a cache from the round before flatters it. Both sides meet the same ones in the same rounds."""
    met: dict[str, list[torch.Tensor]] = {}
    ours, theirs = ops.moe_experts, stock.StockExperts.__call__

    def note(side: str, index: torch.Tensor) -> None:
        kind = "fwd_bwd" if torch.is_grad_enabled() else "fwd"
        met.setdefault(f"{side} {kind}", []).append(index)

    def spy_ours(hidden: torch.Tensor, index: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        note("ktft", index)
        return ours(hidden, index, *rest, **named)

    def spy_theirs(self: stock.StockExperts, hidden: torch.Tensor, index: torch.Tensor, weights: Any) -> torch.Tensor:
        note(self._config._experts_implementation, index)
        return theirs(self, hidden, index, weights)

    monkeypatch.setattr(ops, "moe_experts", spy_ours)
    monkeypatch.setattr(stock.StockExperts, "__call__", spy_theirs)
    rounds = 4
    records(experts, experts.Settings(SHAPE, tokens=(5,), vs="hf", repeat=rounds), probe)
    sides = {name: indices[-(experts.WARM_UP + rounds) :] for name, indices in met.items()}
    assert set(sides) == {f"{side} {kind}" for side in ("ktft", "eager", "grouped_mm") for kind in ("fwd", "fwd_bwd")}
    for name, indices in sides.items():
        assert len(indices) == experts.WARM_UP + rounds
        for one, other in itertools.combinations(indices, 2):
            assert not torch.equal(one, other), name
        for index, same in zip(indices, sides[f"ktft {name.split()[1]}"], strict=True):
            assert torch.equal(index, same), name
    for forward, both in zip(sides["ktft fwd"], sides["ktft fwd_bwd"], strict=True):
        assert not torch.equal(forward, both), "of a round, the second pass of a side must not find the first one's"


def test_the_stock_side_is_frozen_and_has_no_lora(tmp_path: Path) -> None:
    layer.write_layer(tmp_path, SHAPE)
    module = stock.StockExperts(tmp_path, SHAPE)._module
    assert {name: value.requires_grad for name, value in module.named_parameters()} == {
        "gate_up_proj": False,
        "down_proj": False,
    }


def test_fastest_and_slowest_lie_beside_the_median(monkeypatch: pytest.MonkeyPatch, probe: machine.Probe) -> None:
    seconds = {"fwd": [3.0, 1.0, 2.0], "fwd_bwd": [6.0, 4.0, 9.0]}
    seconds |= {f"{name} {kind}": [8.0, 7.0, 9.0] for name in ("eager", "grouped_mm") for kind in ("fwd", "fwd_bwd")}
    seconds |= {f"uniform_{kind}": [5.0, 4.0, 6.0] for kind in ("fwd", "fwd_bwd")}

    def alternate(sides: Any, rounds: int, samples: machine.Samples) -> dict[str, list[float]]:
        samples.take()
        return {name: seconds[name] for name in sides}

    monkeypatch.setattr(experts, "alternate", alternate)
    settings = experts.Settings(SHAPE, tokens=(4,), vs="hf", routing="zipf", repeat=3)
    (line,) = (line for line in records(experts, settings, probe) if line["record"] == "experts")
    for name, middle, low, high in (
        ("fwd", 2, 1, 3), ("fwd_bwd", 6, 4, 9), ("hf_fwd", 8, 7, 9), ("hf_fwd_bwd", 8, 7, 9), ("uniform_fwd", 5, 4, 6),
    ):  # fmt: skip
        found = [line[f"{name}_ms{suffix}"] for suffix in ("", "_min", "_max")]
        assert found == [middle * 1e3, low * 1e3, high * 1e3], name
    assert (line["rounds"], line["warm_up_rounds"]) == (3, 2)


# --- train


def test_the_machine_of_training_is_what_its_processes_use(
    monkeypatch: pytest.MonkeyPatch, probe: machine.Probe
) -> None:
    jobs: list[train_side.Job] = []

    def process(job: train_side.Job) -> dict[str, Any]:
        jobs.append(job)
        assert (ops.cpu_report()["chosen"], ops.num_threads()) == ("scalar", 3)
        figures = dict.fromkeys(("experts_share", "rest_share", "optimizer_share"), 1 / 3)
        figures |= {"step_s": 1.0, "tok_s": 6.0, "peak_rss_gb": 2.0, "peak_anon_gb": 0.5, "first_loss": 5.0}
        return figures | {"last_loss": 4.0, "trainable_parameters": 7, "step_s_all": [1.0]}

    monkeypatch.setattr(train, "_process", process)
    before = ops.cpu_report()["chosen"], ops.num_threads()
    first, line, _end = records(train, train.Settings(isa="scalar", threads=3, rounds=2), probe)
    assert (first["isa"], first["threads"], first["torch_threads"]) == ("scalar", 3, 3)
    assert {(job.isa, job.threads) for job in jobs} == {("scalar", 3)}
    assert line["rounds"] == 2 and len(line["step_s_all"]) == 2
    assert before == (ops.cpu_report()["chosen"], ops.num_threads())


def test_train_attention_only(monkeypatch: pytest.MonkeyPatch, probe: machine.Probe) -> None:
    """Both sides train attention's factors and nothing of the experts."""
    sizes: dict[str, Any] = {"hidden": 128, "intermediate": 64, "experts": 8, "topk": 2, "layers": 1, "vocab": 256}
    work: dict[str, Any] = {"tokens": 24, "steps": 1, "rounds": 1, "lora": "attention", "lora_rank": 2, "vs": "hf"}
    lines = [line for line in records(train, train.Settings(**sizes, **work), probe) if line["record"] == "train"]
    assert [line["side"] for line in lines] == ["ktft", "hf"]
    attention = 2 * (128 + 2 * 128) + 2 * 2 * (128 + 128) + 2 * (2 * 128 + 128)
    for line in lines:
        assert line["trainable_parameters"] == attention and line["lora"] == "attention"
        assert (line["dtype"], line["seed_weights"], line["seed_batch"]) == ("bfloat16", 0, 1)
        assert (line["rounds"], line["warm_up_steps"], len(line["step_s_all"][0])) == (1, 1, 2)
    assert lines[0]["config_sha256"] == lines[1]["config_sha256"] and len(lines[0]["config_sha256"]) == 64


@pytest.mark.parametrize("side", ["ktft", "hf"])
@pytest.mark.parametrize("lora", ["attention", "experts"])
def test_what_trains(side: str, lora: str, tmp_path: Path) -> None:
    """LoRA factors in fp32 and nothing of the base, in the dtype that the record names."""
    directory = tiny_checkpoint("qwen3_moe", tmp_path)
    model = train_side._model(train_side.Job(side, str(directory), lora=lora, lora_rank=2))
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert names and all("lora_" in name for name in names)
    assert any(".experts." in name for name in names) == (lora == "experts")
    assert model.dtype == train_side.DTYPE == torch.bfloat16


# --- decode


def test_sides_of_decode_take_turns(monkeypatch: pytest.MonkeyPatch, probe: machine.Probe) -> None:
    """First in one order, then in the other; within a turn a side reads, then writes."""
    order: list[str] = []

    def model(name: str) -> Any:
        embeddings = SimpleNamespace(num_embeddings=5)
        return SimpleNamespace(name=name, device="cpu", dtype=torch.bfloat16, get_input_embeddings=lambda: embeddings)

    sides = [decode.Side("ktft", model(name), False) for name in "AB"]
    monkeypatch.setattr(decode, "_load", lambda settings: sides)
    monkeypatch.setattr(decode, "_warm_up", lambda side, prompt, count: [1] * count)
    monkeypatch.setattr(decode, "check_logits", lambda sides, prompt: {})
    monkeypatch.setattr(decode, "bytes_per_token", lambda model: 1)
    monkeypatch.setattr(decode, "prefill", lambda model, prompt: order.append(model.name))
    monkeypatch.setattr(decode, "decode", lambda model, first, count: order.append(model.name.lower()))
    lines = records(decode, decode.Settings("m", prompt=3, new=2, repeat=4), probe)
    assert "".join(order) == "AaBbBbAa" * 2
    assert [line["repetitions"] for line in lines[1:-1]] == [4, 4]


def test_a_decode_record_says_how_it_came_about(bench_base: Path, bench_adapter: Path, probe: machine.Probe) -> None:
    settings = decode.Settings(str(bench_base), str(bench_adapter), prompt=12, new=3, repeat=2, device="cpu", vs="hf")
    lines = [line for line in records(decode, settings, probe) if line["record"] == "decode"]
    digest = hashlib.sha256((bench_base / "config.json").read_bytes()).hexdigest()
    for line in lines:
        assert (line["sampling"], line["ignore_eos"], line["seed_prompt"]) == ("greedy", True, 0)
        assert line["warm_up_repetitions"] == 2 and line["config_sha256"] == digest and line["peak_rss_gb"] > 0
        assert len(line["prefill_s_all"]) == len(line["decode_s_all"]) == 2
        assert ("logits_difference" in line) == (line["side"] == "hf")
        if line["adapter"]:
            assert (line["adapter_path"], line["adapter_rank"]) == (str(bench_adapter), 8)
            assert any("q_proj" in name for name in line["adapter_targets"])
            assert any("experts" in name for name in line["adapter_targets"])
        else:
            assert "adapter_path" not in line
    assert all(0 <= line["logits_difference"] <= decode.HALF_TOLERANCE for line in lines[2:])


@pytest.mark.parametrize("spoiled", ["base", "adapter"])
def test_logits_that_differ_are_not_compared(
    spoiled: str, bench_base: Path, bench_adapter: Path, probe: machine.Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = decode._load

    def spoil(settings: decode.Settings) -> list[decode.Side]:
        sides = load(settings)
        part = "down_proj" if spoiled == "base" else "lora_B"
        for name, parameter in sides[-1].model.named_parameters():
            if part in name and ("lora_" in name) == (spoiled == "adapter"):
                parameter.data.zero_()
        return sides

    monkeypatch.setattr(decode, "_load", spoil)
    settings = decode.Settings(str(bench_base), str(bench_adapter), prompt=12, new=2, repeat=1, device="cpu", vs="hf")
    state = "without an adapter" if spoiled == "base" else "with the adapter"
    with pytest.raises(ValueError, match=rf"12 tokens, {state}, the logits of ktft and of .* are not compared"):
        records(decode, settings, probe)


def test_the_logits_tolerance_follows_the_dtype(bench_base: Path) -> None:
    """In fp32 a difference that rounding to bf16 would explain is too much; no number is never near enough."""
    model = AutoModelForCausalLM.from_pretrained(bench_base, dtype=torch.float32).eval()
    prompt = torch.arange(7)[None]
    shift = 0.0

    @contextmanager
    def none() -> Any:
        yield

    def side(name: str) -> decode.Side:
        found = decode.Side(name, model, False, ("eager", "eager"))
        found.within = none  # type: ignore[method-assign]
        return found

    logits = decode._logits

    def shifted(side: decode.Side, prompt: torch.Tensor) -> torch.Tensor:
        values = logits(side, prompt)
        return values if side.name == "hf" else values + shift * (values - values.mean())

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(decode, "_logits", shifted)
        assert decode.check_logits([side("ktft"), side("hf")], prompt)[1] < 1e-5
        for shift in (0.01, float("nan")):  # noqa: B007 - shifted() sees it
            with pytest.raises(ValueError, match=r"expected at most 0\.001 in torch\.float32"):
                decode.check_logits([side("ktft"), side("hf")], prompt)
        model.bfloat16()
        shift = 0.01
        assert 0.009 < decode.check_logits([side("ktft"), side("hf")], prompt)[1] < 0.011
        shift = 0.2
        with pytest.raises(ValueError, match=r"expected at most 0\.1 in torch\.bfloat16"):
            decode.check_logits([side("ktft"), side("hf")], prompt)


# --- the machine


def test_what_a_fair_report_holds(probe: machine.Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("KMP_BLOCKTIME", "0")
    monkeypatch.setenv("COMPONENT_TOKEN", "no business of a report")
    samples = machine.Samples(probe)
    samples.take()
    found = machine.describe(samples)
    assert found["omp_num_threads"] == "7" and found["environment"]["KMP_BLOCKTIME"] == "0"
    assert "COMPONENT_TOKEN" not in found["environment"]
    assert found["build_flags"] == ops.cpu_report()["build"]["flags"] and "-march=x86-64" in found["build_flags"]
    allowed = os.sched_getaffinity(0)
    listed = [part.split("-") for part in found["affinity"].split(",")]
    assert {n for part in listed for n in range(int(part[0]), int(part[-1]) + 1)} == allowed
    assert found["cores"] == len(allowed)
    if found["sockets"] is not None:
        assert 1 <= found["sockets"] <= found["physical_cores"] <= len(allowed)
    flags = cpu_flags()
    assert found["hypervisor"] == ("hypervisor" in flags if flags else None)
    assert found["blas"].split(";")[0] in torch.__config__.show() and found["not_measured"]


def test_cores_and_sockets(tmp_path: Path) -> None:
    """Two sockets of two cores with two threads each, of which five logical cores are ours."""
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu // 2 % 2}\n")
        (topology / "core_cpus_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert machine._topology([0, 1, 2, 4, 5], tmp_path) == {"physical_cores": 3, "sockets": 2}
    assert machine._topology([0, 4], tmp_path) == {"physical_cores": 1, "sockets": 1}
    assert machine._topology([0, 9], tmp_path) == {"physical_cores": None, "sockets": None}
    assert [machine._ranges(numbers) for numbers in ([3], [0, 1, 2, 8], [0, 2, 3])] == ["3", "0-2,8", "0,2-3"]


def test_blas_is_named() -> None:
    text = (
        "PyTorch built with:\n  - GCC 13.3\n"
        "  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 20240605 for Intel(R) 64 architecture\n"
        "  - Intel(R) MKL-DNN v3.12.0 (Git Hash 80afa71)\n  - Build settings: BLAS_INFO=mkl, BUILD_TYPE=Release\n"
    )
    expected = "mkl; Intel(R) oneAPI Math Kernel Library Version 2024.2; Intel(R) MKL-DNN v3.12.0"
    assert machine._blas(text) == expected and machine._blas("nothing") == "unknown"


def test_the_config_is_named_by_its_digest(tmp_path: Path) -> None:
    assert machine.config_sha256(tmp_path) is None and machine.config_sha256("nobody/nothing") is None
    assert machine.config_sha256("a/b/c") is None
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert machine.config_sha256(tmp_path) == hashlib.sha256(b"{}").hexdigest()
