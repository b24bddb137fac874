"""Choosing an ISA level, idle threads, and objects without stray instructions."""

from __future__ import annotations

import os
import re
import resource
import shutil
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
    assert python(report, KTFT_ISA="scalar", KTFT_THREADS="3").stdout.split() == ["scalar", "3"]
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


# Registers and mnemonics that must not occur in objects of a lower level.
ABOVE = {
    "scalar": re.compile(r"%[yz]mm|\bv[a-z]+(ps|pd|ss|sd)\b|%k[0-7]\b"),
    "avx2": re.compile(r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])\b|%k[0-7]\b"),
}


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    for tool in ("cmake", "objdump", "nm"):
        assert shutil.which(tool), f"{tool} is needed to compile and disassemble the kernels"
    build = tmp_path_factory.mktemp("kernels")
    configure = ["cmake", "-S", ROOT / "csrc", "-B", build, "-DKTFT_KERNELS_ONLY=ON", "-DCMAKE_BUILD_TYPE=Release"]
    subprocess.run(configure, check=True, capture_output=True, timeout=120)
    subprocess.run(["cmake", "--build", build, "-j2"], check=True, capture_output=True, timeout=300)
    found = {path.name.split(".")[0]: path for path in build.rglob("*.cpp.o")}
    assert set(found) == set(ops.isa_levels())
    return found


@pytest.mark.parametrize("level", ABOVE)
def test_no_higher_instructions_in_lower_objects(objects: dict[str, Path], level: str) -> None:
    code = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", objects[level]], check=True, capture_output=True, text=True
    )
    assert "ret" in code.stdout
    strays = [line.strip() for line in code.stdout.splitlines() if "\t" in line and ABOVE[level].search(line)]
    assert not strays, strays[:5]


def test_the_top_object_uses_its_instructions(objects: dict[str, Path]) -> None:
    code = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", objects["avx512bf16"]], check=True, capture_output=True, text=True
    )
    assert "vdpbf16ps" in code.stdout and ABOVE["avx2"].search(code.stdout) and ABOVE["scalar"].search(code.stdout)


@pytest.mark.parametrize("level", ops.isa_levels())
def test_objects_export_their_table_and_nothing_weak(objects: dict[str, Path], level: str) -> None:
    """A weak symbol compiled with a level's flags could be the copy the linker keeps for everybody."""
    symbols = subprocess.run(["nm", "--defined-only", "-C", objects[level]], check=True, capture_output=True, text=True)
    kinds = [line.split(maxsplit=2)[1:] for line in symbols.stdout.splitlines()]
    assert not [k for k in kinds if k[0] in "WVuwv"]
    assert len([k for k in kinds if k[0].isupper()]) == 1
