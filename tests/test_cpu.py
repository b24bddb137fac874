"""Choosing an ISA level, idle threads, and objects without stray instructions."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ktft import ops
from tests.test_kernels import CASES, run, weights_of

ROOT = Path(__file__).parent.parent
AVX2 = {"avx2": True, "fma": True, "f16c": True, "os_ymm": True}
AVX512 = {**AVX2, "avx512f": True, "avx512bw": True, "avx512dq": True, "avx512vl": True, "os_zmm": True}
AMX_NAMES = ("amx_tile", "amx_bf16", "os_amx", "amx_palette", "amx_permission")
AMX = {**AVX512, "avx512_bf16": True, **dict.fromkeys(AMX_NAMES, True)}


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({}, "scalar"),
        (AVX2, "avx2"),
        ({**AVX2, "os_ymm": False}, "scalar"),  # the CPU has it, the operating system does not save the registers
        (AVX512, "avx2"),  # AVX-512 without BF16
        ({**AVX512, "avx512_bf16": True}, "avx512bf16"),
        ({**AVX512, "avx512_bf16": True, "os_zmm": False}, "avx2"),
        ({**AVX512, "avx512_bf16": True, "avx512vl": False}, "avx2"),
        (AMX, "amx"),
        *(({**AMX, name: False}, "avx512bf16") for name in AMX_NAMES),
        ({**AMX, "avx512_bf16": False}, "avx2"),  # tiles alone are not enough: the level's other kernels are AVX-512's
    ],
)
def test_level_never_exceeds_the_features(features: dict[str, bool], expected: str) -> None:
    assert ops.choose_isa(None, features)[0] == expected
    assert ops.choose_isa("scalar", features)[0] == "scalar"


@pytest.mark.parametrize(
    ("level", "features", "below"),
    [("avx2", AVX2, "scalar"), ("avx512bf16", {**AVX512, "avx512_bf16": True}, "avx2")],
)
def test_a_level_needs_every_one_of_its_features(level: str, features: dict[str, bool], below: str) -> None:
    assert ops.choose_isa(None, features)[0] == level
    for name in features:
        chosen, reason = ops.choose_isa(None, {**features, name: False})
        assert chosen == ("scalar" if name in AVX2 else below), name
        assert f"{level} lacks {name}" in reason
        with pytest.raises(ValueError, match=f"{level} cannot run on this CPU, which lacks {name}"):
            ops.choose_isa(level, {**features, name: False})


def test_a_level_above_the_machine_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"avx512bf16 cannot run on this CPU, which lacks avx512_bf16"):
        ops.choose_isa("avx512bf16", AVX512)
    with pytest.raises(ValueError, match=r"did you mean 'avx2'"):
        ops.choose_isa("avx-2")


@pytest.mark.parametrize(
    ("absent", "named"),
    [
        (["amx_permission"], "amx_permission"),
        (["amx_palette", "amx_permission"], "amx_palette"),  # nobody asks for permission then
        (["os_amx", "amx_permission"], "os_amx"),
        (["amx_bf16", "amx_permission"], "amx_bf16"),
        (AMX_NAMES, "amx_tile amx_bf16"),  # without tiles there is nothing to save and no palette
        (["os_zmm", "amx_permission"], "os_zmm"),
    ],
)
def test_what_amx_lacks_is_named(absent: list[str], named: str) -> None:
    features = {**AMX, **dict.fromkeys(absent, False)}
    with pytest.raises(ValueError, match=rf"KTFT_ISA=amx cannot run on this CPU, which lacks {named}\. "):
        ops.choose_isa("amx", features)
    assert re.search(rf"amx lacks {named}[;)]", ops.choose_isa("auto", features)[1])


def test_tile_registers_are_asked_for_only_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def features(ask_for_tiles: bool) -> dict[str, bool]:
        asked.append(ask_for_tiles)
        return {**AMX, "amx_permission": ask_for_tiles}

    monkeypatch.setattr(ops._C, "cpu_features", features)
    for level in ("scalar", "avx2", "avx512bf16", "amx-soft"):
        assert ops.choose_isa(level)[0] == level
    assert not any(asked)
    for level in (None, "auto", "amx"):
        asked.clear()
        assert ops.choose_isa(level)[0] == "amx" and asked == [True]


def test_the_twin_is_for_tests_only() -> None:
    """It runs everywhere, and is neither chosen nor offered."""
    assert ops.TEST_LEVELS == ("amx-soft",)
    for features in ({}, AMX):
        assert ops.choose_isa("amx-soft", features) == ("amx-soft", "asked for by KTFT_ISA; for tests only")
        assert ops.choose_isa("auto", features)[0] != "amx-soft"
    report = ops.cpu_report()
    assert "amx-soft" not in report["levels"] and "amx-soft" not in report["missing"]
    with pytest.raises(ValueError, match=r"valid: auto, scalar, avx2, avx512bf16, amx$"):
        ops.choose_isa("neon")


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_environment_chooses_level_and_threads() -> None:
    report = "from ktft import ops; r = ops.cpu_report(); print(r['chosen'], r['threads'])"
    for level in ("scalar", "amx-soft"):
        assert python(report, KTFT_ISA=level, KTFT_THREADS="3").stdout.split() == [level, "3"]
    bad = python(report, KTFT_ISA="avx1024")
    assert bad.returncode != 0 and "KTFT_ISA='avx1024' is not a level; valid: auto, scalar" in bad.stderr
    bad = python(report, KTFT_THREADS="many")
    assert bad.returncode != 0 and "KTFT_THREADS='many'" in bad.stderr


def test_idle_threads_use_no_cpu() -> None:
    inputs = CASES["many rows"].build(torch.bfloat16)
    with ops.override(threads=3):
        run(inputs, weights_of(inputs))
    time.sleep(1.0)
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(2.0)
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < 0.02, "less than 1 % of a core"


def test_calls_work_in_a_forked_child() -> None:
    inputs = CASES["many rows"].build(torch.bfloat16)
    weights = weights_of(inputs)
    expected = run(inputs, weights)[0]
    child = os.fork()
    if child == 0:
        same = torch.equal(
            ops.moe_experts(
                inputs.x, inputs.index, inputs.route_weights, weights, lora=inputs.lora, scaling=inputs.scaling
            ),
            expected,
        )
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# Registers and mnemonics that must not occur in objects of a lower level. The tests' twin of amx runs everywhere.
VECTORS = r"%[yz]mm|\bv[a-z]+(ps|pd|ss|sd)\b|%k[0-7]\b"
TILES = r"%tmm|\bt(dp|ile)|\b(ld|st)tilecfg"
ABOVE = {
    "scalar": f"{VECTORS}|{TILES}",
    "avx2": rf"%zmm|%[xy]mm(1[6-9]|2\d|3[01])\b|%k[0-7]\b|{TILES}",
    "avx512bf16": TILES,
    "amx-soft": f"{VECTORS}|{TILES}",
}


def disassembled(path: Path) -> str:
    command = ["objdump", "-d", "--no-show-raw-insn", path]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("level", ABOVE)
def test_no_higher_instructions_in_lower_objects(kernel_objects: dict[str, Path], level: str) -> None:
    code, above = disassembled(kernel_objects[level]), re.compile(ABOVE[level])
    assert "ret" in code
    strays = [line.strip() for line in code.splitlines() if "\t" in line and above.search(line)]
    assert not strays, strays[:5]


def test_the_top_objects_use_their_instructions(kernel_objects: dict[str, Path]) -> None:
    code = disassembled(kernel_objects["avx512bf16"])
    assert "vdpbf16ps" in code and re.search(ABOVE["avx2"], code) and re.search(ABOVE["scalar"], code)
    code = disassembled(kernel_objects["amx"])
    found = set(re.findall(r"\b(?:(?:ld|st)tilecfg|t(?:ile|dp)\w+)", code))
    assert found == {"ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored", "tdpbf16ps"}


@pytest.mark.parametrize("level", [*ops.isa_levels(), *ops.TEST_LEVELS])
def test_objects_export_their_table_and_nothing_weak(kernel_objects: dict[str, Path], level: str) -> None:
    """A weak symbol compiled with a level's flags could be the copy the linker keeps for everybody."""
    command = ["nm", "--defined-only", "-C", kernel_objects[level]]
    symbols = subprocess.run(command, check=True, capture_output=True, text=True)
    kinds = [line.split(maxsplit=2)[1:] for line in symbols.stdout.splitlines()]
    assert not [k for k in kinds if k[0] in "WVuwv"]
    assert len([k for k in kinds if k[0].isupper()]) == 1
