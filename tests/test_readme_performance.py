"""scripts/readme_performance.py: a section from sample files, placed between its comments, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
README = "# Title\n\n<!-- performance -->\nold\n<!-- /performance -->\n\nThe end.\n"

MACHINE: dict[str, Any] = {
    "record": "machine", "date": "2026-01-02", "cpu": "EPYC", "cores": 2, "threads": 2, "torch_threads": 2,
    "isa": "avx512bf16", "omp_wait_policy": "PASSIVE", "peak_bf16_gflops": 400.2, "peak_fp32_gflops": 200.0,
    "read_gbs": 30.0, "commit": "abc", "versions": {"ktft": None, "torch": "2.9.0"},
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "record": "experts", "hidden": 2048, "intermediate": 768, "experts": 128, "topk": 8, "format": "bf16",
    "routing": "uniform", "tokens": 16, "rows_per_expert": 1.5625, "fwd_ms": 12.345, "fwd_peak_fraction": 0.126,
    "fwd_bandwidth_fraction": 0.751, "fwd_bwd_ms": 1234.5, "fwd_bwd_peak_fraction": 0.2, "lora_rank": 8,
    "peak_dtype": "bf16", "peak_bf16_gflops": 433.0, "peak_fp32_gflops": 210.0, "read_gbs": 28.0,
    "hf_fwd_ms": 24.69, "hf_fwd_ratio": 2.0, "hf_fwd_bwd_ms": 2469.0, "hf_fwd_bwd_ratio": 1.999, "rounds": 7,
}  # fmt: skip
TRAIN: dict[str, Any] = {
    "record": "train", "side": "ktft", "model": "qwen3_moe", "layers": 4, "hidden": 2048, "intermediate": 768,
    "experts": 128, "topk": 8, "tokens": 1024, "lora": "experts", "lora_rank": 8, "tok_s": 313.2, "peak_rss_gb": 5.21,
    "peak_anon_gb": 1.5, "rounds": 3,
}  # fmt: skip
DECODE: dict[str, Any] = {
    "record": "decode", "model": "/models/tiny", "side": "hf", "adapter": True, "prompt_tokens": 512, "new_tokens": 128,
    "prefill_tok_s": 260.4, "prefill_tok_s_sd": 5.0, "decode_tok_s": 34.06, "decode_tok_s_sd": 0.512,
    "repetitions": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_performance", ROOT / "scripts" / "readme_performance.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(path: Path, *records: dict[str, Any], **machine: Any) -> Path:
    lines = [MACHINE | machine, *records, {"record": "end"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_the_section_holds_machine_date_and_figures(script: ModuleType, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(README, encoding="utf-8")
    theirs = TRAIN | {"side": "hf", "tok_s": 78.3, "peak_rss_gb": 13.1, "peak_anon_gb": 12.6}
    files = [
        write(tmp_path / "a", EXPERTS, EXPERTS | {"tokens": 1, "lora_rank": 0}),
        write(tmp_path / "b", TRAIN, theirs, {"record": "train_ratio", "speed": 4.0}, date="2026-01-03"),
        write(tmp_path / "c", DECODE),
    ]
    arguments = [*map(str, files), "--readme", str(readme)]
    assert script.main([*arguments, "--check"]) == 1
    assert readme.read_text(encoding="utf-8") == README
    assert script.main(arguments) == 0 and script.main([*arguments, "--check"]) == 0
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("# Title\n\n<!-- performance -->\n2 cores of an EPYC, 2 threads, kernels avx512bf16")
    assert text.endswith("\n<!-- /performance -->\n\nThe end.\n") and "old" not in text
    flat = " ".join(text.split())
    assert "400–433 GFLOP/s in bf16 and 200–210 in fp32 (2048³ products) and read 28–30 GB/s" in flat
    how = "Medians, decode: means ± standard deviations; the sides take turns."
    assert f"torch 2.9.0; measured 2026-01-02 to 2026-01-03, commit abc. {how}" in flat
    for row in (
        "| 4-layer qwen3_moe, hidden 2048, intermediate 768, 128 experts, top 8; 1024 tokens, LoRA r = 8 on attention "
        "and experts | 313 tokens/s | 78.3 tokens/s | 4.00 |",
        "| peak resident memory, mapped pages counted | 5.21 GB | 13.1 GB | 0.40 |",
        "| peak anonymous memory | 1.5 GB | 12.6 GB | 0.12 |",
        "| 16 | 1.56 | 12.3 ms | 13 % | 75 % | 1234 ms | 20 % | r = 8 | 24.7 ms | 2.00 | 2469 ms | 2.00 |",
        "| `tiny` | transformers, adapter | 260 ± 5 (pp512) | 34.1 ± 0.512 (tg128) |",
    ):
        assert row in text
    assert text.count("| tokens | rows per expert |") == 1
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= 130


def test_only_what_was_repeated_is_said_to_be(script: ModuleType) -> None:
    once, single = TRAIN | {"rounds": 1}, DECODE | {"repetitions": 1}
    for records, expected in (
        ([EXPERTS, TRAIN], " Medians; the sides take turns."),
        ([EXPERTS, once], " Medians (training steps: one process a side); the sides take turns."),
        ([EXPERTS | {"rounds": 1}, TRAIN], " Medians (experts: one round); the sides take turns."),
        ([once], ""),
        ([once, DECODE], " Means ± standard deviations; the sides take turns."),
        ([single], ""),
        ([TRAIN, single], " Medians; the sides take turns."),
    ):
        assert script._repetitions(records) == expected


def test_sides_that_were_not_measured_stay_empty(script: ModuleType, tmp_path: Path) -> None:
    plain = {name: value for name, value in EXPERTS.items() if not name.startswith("hf_")}
    skewed = plain | {"routing": "zipf"}
    records = script.read(write(tmp_path / "a", plain, skewed)) + script.read(write(tmp_path / "b", TRAIN))
    text = script.render(records)
    assert "tokens/s |  |  |" in text and "transformers forward" not in text
    assert text.count("| tokens | rows per expert |") == 2 and "zipf routing; avx512bf16" in " ".join(text.split())


def test_what_does_not_belong_together_is_refused(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write(tmp_path / "good", EXPERTS)
    other = write(tmp_path / "other", EXPERTS, threads=4)
    empty = write(tmp_path / "empty")
    torn = tmp_path / "torn"
    torn.write_text(json.dumps(MACHINE) + "\n" + json.dumps(EXPERTS) + "\n", encoding="utf-8")
    prose = tmp_path / "prose"
    prose.write_text("machine:\n", encoding="utf-8")
    lacking = write(tmp_path / "lacking", {name: value for name, value in EXPERTS.items() if name != "fwd_ms"})
    readme = tmp_path / "README.md"
    readme.write_text(README, encoding="utf-8")
    unmarked = tmp_path / "unmarked"
    unmarked.write_text("# Title\n", encoding="utf-8")
    for files, target, complaint in (
        ([good, other], readme, "the files differ in threads: 2 and 4"),
        ([empty], readme, "no experts, train or decode records"),
        ([torn], readme, "was the run cut short?"),
        ([prose], readme, "line 1: expected a JSON object"),
        ([lacking], readme, "a record lacks 'fwd_ms'"),
        ([good], unmarked, "expected <!-- performance --> and after it"),
        ([tmp_path / "none"], readme, "none"),
    ):
        before = target.read_text(encoding="utf-8")
        assert script.main([*map(str, files), "--readme", str(target)]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and complaint in error
        assert target.read_text(encoding="utf-8") == before


def test_the_readme_has_a_place_for_it(script: ModuleType) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "the section" in script.replace(text, "the section")
