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


# A machine with AMX as CPUID describes it: (leaf, subleaf) -> EAX, EBX, ECX, EDX. Palette 1 has 8 tiles of 1024 bytes,
# 16 rows of 64; XCR0 saves SSE, AVX, opmasks, both parts of ZMM, and the tiles' configuration (bit 17) and data (18).
Leaves = dict[tuple[int, int], tuple[int, int, int, int]]
LEAVES: Leaves = {
    (1, 0): (0, 0, 1 << 12 | 1 << 27 | 1 << 29, 0),
    (7, 0): (1, 1 << 5 | 1 << 16 | 1 << 17 | 1 << 30 | 1 << 31, 0, 1 << 22 | 1 << 24),
    (7, 1): (1 << 5, 0, 0, 0),
    (0x1D, 0): (1, 0, 0, 0),
    (0x1D, 1): (1024 << 16 | 8192, 8 << 16 | 64, 16, 0),
}
XCR0 = 0xE7 | 3 << 17
REGISTERS = {"os_ymm", "os_zmm", "os_amx", "amx_permission"}


def without(leaf: tuple[int, int], register: int, bit: int) -> Leaves:
    values = list(LEAVES[leaf])
    assert values[register] >> bit & 1
    values[register] ^= 1 << bit
    return {**LEAVES, leaf: (values[0], values[1], values[2], values[3])}


def palette(total: int = 8192, tile: int = 1024, row: int = 64, tiles: int = 8, rows: int = 16) -> Leaves:
    return {**LEAVES, (0x1D, 1): (tile << 16 | total, tiles << 16 | row, rows, 0)}


@pytest.mark.parametrize(
    ("leaves", "xcr0", "absent"),
    [
        (LEAVES, XCR0, set()),
        ({}, XCR0, set(AMX)),
        (without((1, 0), 2, 27), XCR0, REGISTERS),  # no XSAVE: XCR0 is not there to be read
        (LEAVES, 0xE7, {"os_amx", "amx_permission"}),
        (LEAVES, 0xE7 | 1 << 17, {"os_amx", "amx_permission"}),  # the configuration is saved, the tiles are not
        (LEAVES, 0xE7 | 1 << 18, {"os_amx", "amx_permission"}),
        *((LEAVES, XCR0 & ~(1 << bit), {"os_ymm", "os_zmm"}) for bit in (1, 2)),
        *((LEAVES, XCR0 & ~(1 << bit), {"os_zmm"}) for bit in (5, 6, 7)),
        ({**LEAVES, (0x1D, 0): (0, 0, 0, 0)}, XCR0, {"amx_palette", "amx_permission"}),  # palettes end before 1
        *(
            (wrong, XCR0, {"amx_palette", "amx_permission"})
            for wrong in (palette(total=4096), palette(tile=512), palette(row=32), palette(tiles=4), palette(rows=8))
        ),
        ({leaf: LEAVES[leaf] for leaf in LEAVES if leaf[0] != 0x1D}, XCR0, {"amx_palette", "amx_permission"}),
        (without((7, 0), 3, 24), XCR0, {"amx_tile", "amx_palette", "amx_permission"}),
        (without((7, 0), 3, 22), XCR0, {"amx_bf16", "amx_permission"}),
        # leaf 7 ends at subleaf 0, whatever a CPU answers for the next
        ({**LEAVES, (7, 0): (0, *LEAVES[7, 0][1:])}, XCR0, {"avx512_bf16"}),
        (without((7, 1), 0, 5), XCR0, {"avx512_bf16"}),
        (without((1, 0), 2, 12), XCR0, {"fma"}),
        (without((1, 0), 2, 29), XCR0, {"f16c"}),
        *(
            (without((7, 0), 1, bit), XCR0, {name})
            for bit, name in ((5, "avx2"), (16, "avx512f"), (17, "avx512dq"), (30, "avx512bw"), (31, "avx512vl"))
        ),
    ],
)
def test_features_follow_from_the_cpus_answers(leaves: Leaves, xcr0: int, absent: set[str]) -> None:
    """On made-up machines. Permission is asked for only where nothing else stands against tiles."""
    asked: list[bool] = []
    found = ops._C.features_of(leaves, xcr0, lambda: not asked.append(True))
    assert {name for name, present in found.items() if not present} == absent and set(found) == set(AMX)
    assert len(asked) == (not absent & set(AMX_NAMES))


def test_a_refused_permission_is_amx_permission_alone() -> None:
    found = ops._C.features_of(LEAVES, XCR0, lambda: False)
    assert found == {**AMX, "amx_permission": False}


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


def strays(path: Path, above: str) -> list[str]:
    """The instructions of an object that match."""
    code, pattern = disassembled(path), re.compile(above)
    assert "ret" in code
    return [line.strip() for line in code.splitlines() if "\t" in line and pattern.search(line)]


def disassembled(path: Path) -> str:
    command = ["objdump", "-d", "--no-show-raw-insn", path]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("level", ABOVE)
def test_no_higher_instructions_in_lower_objects(kernel_objects: dict[str, Path], level: str) -> None:
    found = strays(kernel_objects[level], ABOVE[level])
    assert not found, found[:5]


def test_no_vectors_in_what_runs_before_the_choice(other_objects: dict[str, Path]) -> None:
    """What is no kernel runs on every machine: plain x86-64, whatever flags the builder has set."""
    for name, path in other_objects.items():
        found = strays(path, ABOVE["scalar"])
        assert not found, (name, found[:5])


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
