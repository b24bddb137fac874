"""``ktft bench experts --overheads``: its record, and its figures by a clock of the tests' own."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ktft import cli
from ktft.bench import experts, machine, overheads
from ktft.bench.layer import Shape

SHAPE = Shape(hidden=128, intermediate=64, experts=20, topk=2, format="bf16", lora_rank=4)
EXTENSION = sys.modules["ktft._C"]


class Clock:
    """Stands in for the module ``time``: it moves when it is told to, and when somebody sleeps."""

    def __init__(self) -> None:
        self.now = self.cpu = 0.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.cpu

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.cpu += seconds / 4


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(overheads, "time", clock)
    return clock


class Module:
    """An experts module that takes 20 seconds outside of the extension, and 80 inside."""

    def __init__(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = clock
        monkeypatch.setattr(EXTENSION, "forward", lambda *_: clock.__dict__.update(now=clock.now + 80))

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, route_weights: torch.Tensor) -> torch.Tensor:
        return self.run(hidden, index, route_weights)

    def run(
        self, hidden: torch.Tensor, index: torch.Tensor, route_weights: torch.Tensor, lora: Any = (), scaling: Any = ()
    ) -> torch.Tensor:
        self.clock.now += 20
        EXTENSION.forward()  # type: ignore[attr-defined]
        return hidden + route_weights.sum() + sum(factor.sum() for factor in lora)


def test_the_record(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    probe = machine.Probe(matmul_side=64, read_bytes=2**20)
    monkeypatch.setattr(experts, "Probe", lambda: probe)
    monkeypatch.setattr(overheads, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(overheads, "ATTENTION_BYTES", 2**20)
    before = EXTENSION.forward, EXTENSION.backward  # type: ignore[attr-defined]
    sizes = "--hidden 128 --intermediate 64 --experts 20 --topk 2 --tokens 2 --repeat 1".split()
    for options, kinds in ([], ["experts"]), (["--overheads"], ["experts", "overheads"]):
        assert cli.main(["bench", "experts", *sizes, *options, "--json"]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["record"] for line in lines] == ["machine", *kinds, "end"]
    found = lines[2]
    assert found["idle_core_percent"] >= 0 and found["lora_rank"] == 8
    assert (found["entries_forward"], found["entries_backward"]) == (1, 1), "one call per layer and direction"
    for kind in ("", "lora_", "fwd_bwd_"):
        assert 0 < found[f"{kind}call_overhead_us"] < found[f"{kind}call_us"]
        assert 0 < found[f"{kind}overhead_share_1_token"] < 1
    assert [item["tokens"] for item in found["alternate"]] == [1, 512]
    for item in found["alternate"]:
        alone, together = (
            sum(item[f"{who}_{how}ms"] for who in ("attention", "experts")) for how in ("", "alternating_")
        )
        assert alone > 0 and item["alternating_ratio"] == pytest.approx(together / alone, rel=1e-4)
    assert before == (EXTENSION.forward, EXTENSION.backward), "the extension is as it was"  # type: ignore[attr-defined]
    assert cli.main(["bench", "experts", *sizes, "--overheads"]) == 0
    text = capsys.readouterr().out
    assert "overhead_share_1_token: 0." in text and "alternate: tokens 1, attention_ms " in text


def test_the_part_outside_of_the_extension(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = [torch.zeros(3, requires_grad=True)]
    found = overheads._calls(Module(clock, monkeypatch), SHAPE, lora, "uniform")  # type: ignore[arg-type]
    for kind in ("", "lora_", "fwd_bwd_"):
        assert found[f"{kind}call_us"] == pytest.approx(100e6)
        assert found[f"{kind}call_overhead_us"] == pytest.approx(20e6)
        assert found[f"{kind}overhead_share_1_token"] == pytest.approx(0.2)
    assert (found["entries_forward"], found["entries_backward"]) == (1, 0)


def test_idle_counts_from_the_end_of_a_call(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert overheads._idle_core_percent(Module(clock, monkeypatch), SHAPE, "zipf") == 25  # type: ignore[arg-type]


def test_a_call_after_the_other_kind_is_an_alternating_one(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts take 3 s after experts, 5 s after attention; attention 4 s after itself, 8 s after experts."""
    last = SimpleNamespace(kind="")

    def experts_call(*_: torch.Tensor) -> None:
        clock.now += 5 if last.kind == "attention" else 3
        last.kind = "experts"

    linear = F.linear

    def attention_part(*operands: torch.Tensor) -> torch.Tensor:
        clock.now += 5 if last.kind == "experts" else 1
        last.kind = "attention"
        return linear(*operands)

    monkeypatch.setattr(F, "linear", attention_part)
    monkeypatch.setattr(overheads, "ROUNDS", 1)
    monkeypatch.setattr(overheads, "ATTENTION_BYTES", 2**20)
    found = overheads._alternate(experts_call, SHAPE, "uniform", 3, 1)  # type: ignore[arg-type]
    assert found == {
        "tokens": 3, "attention_ms": 4e3, "experts_ms": 3e3, "attention_alternating_ms": 8e3,
        "experts_alternating_ms": 5e3, "alternating_ratio": 13 / 7,
    }  # fmt: skip
