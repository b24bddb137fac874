"""The choice of kernels on CPUs that this machine is not: the package under qemu's user-mode emulation.

qemu answers CPUID and XGETBV as the named CPU would and stops at an instruction that it does not have, in torch, numpy
or here. The results of forward and backward are judged outside, on this CPU: against float64 torch, and against the
same level run natively, which must give the same bits. Debian's package is qemu-user; without it these tests are
skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ktft import ops
from tests.emulated_calls import INPUTS, NAMES, key
from tests.layer_truth import layer_truth
from tests.noise import excess
from tests.test_kernels import CASES, DTYPES, run, weights_of
from tests.test_ops import assert_same_bits

ROOT = Path(__file__).parent.parent
EMULATOR = shutil.which("qemu-x86_64")
pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(
        EMULATOR is None, reason="qemu-x86_64 is not on the path; apt-get install qemu-user, then pytest -m emulated"
    ),
]

CPUS = {"Haswell": ("avx2", "AVX2"), "Nehalem": ("scalar", "DEFAULT")}
"""qemu's name -> the level ktft must choose, and torch's own, which shows that torch sees the same CPU."""

_PROBES = {"Nehalem": "c5fc57c0c3", "Haswell": "62f17c4857c0c3"}
"""Machine code that the CPU lacks: vxorps of ymm0, of zmm0; and a return."""


def emulate(cpu: str, *arguments: str, timeout: int = 500, **environment: str) -> subprocess.CompletedProcess[str]:
    """This Python with ``arguments`` on ``cpu``."""
    assert EMULATOR is not None
    if cpu == "Nehalem":  # numpy's OpenBLAS stops on an instruction that it lacks, unless it is told what it runs on
        environment["OPENBLAS_CORETYPE"] = "Nehalem"
    return subprocess.run(
        [EMULATOR, "-cpu", cpu, sys.executable, *arguments],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture(scope="module", params=CPUS)
def emulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The CPU, and what tests/emulated_calls.py found there, on two threads of the kernels."""
    output = tmp_path_factory.mktemp("emulated") / "calls.pt"
    ran = emulate(request.param, "-m", "tests.emulated_calls", str(output), KTFT_ISA="auto", KTFT_THREADS="2")
    assert ran.returncode == 0, ran.stderr[-2000:]
    return request.param, torch.load(output, weights_only=True)


@pytest.mark.parametrize("cpu", CPUS)
def test_the_emulator_stops_at_what_the_cpu_lacks(cpu: str) -> None:
    """Else the tests below would prove nothing. The same code runs here, if this CPU has the instruction."""
    code = (
        "import ctypes, mmap, sys\n"
        "memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)\n"
        "memory.write(bytes.fromhex(sys.argv[1]))\n"
        "address = ctypes.addressof(ctypes.c_char.from_buffer(memory))\n"
        "ctypes.CFUNCTYPE(None)(address)()\n"
        "print('ran')"
    )
    stopped = emulate(cpu, "-c", code, _PROBES[cpu], timeout=100)
    assert "Illegal instruction" in stopped.stderr and not stopped.stdout
    features = ops.cpu_report()["features"]
    if features["os_ymm"] if cpu == "Nehalem" else features["avx512f"] and features["os_zmm"]:
        native = subprocess.run([sys.executable, "-c", code, _PROBES[cpu]], capture_output=True, text=True, timeout=100)
        assert native.stdout == "ran\n", native.stderr


def test_the_level_is_the_cpus(emulated: tuple[str, dict[str, Any]]) -> None:
    cpu, found = emulated
    level, torch_level = CPUS[cpu]
    report = json.loads(found["doctor"])
    kernels = report["kernels"]
    levels = list(ops.isa_levels())
    assert kernels["chosen"] == level and kernels["reason"].startswith("the best level this CPU offers")
    assert kernels["levels"] == levels[: levels.index(level) + 1] and set(kernels["missing"]) == set(found["refused"])
    assert report["torch"]["cpu_capability"] == torch_level
    assert report["cpu"]["features"]["avx2"] == (level == "avx2") and not report["cpu"]["features"]["avx512f"]
    for name, message in found["refused"].items():
        assert f"KTFT_ISA={name} cannot run on this CPU, which lacks {kernels['missing'][name]}" in message


def test_a_feature_short_of_a_level_is_the_level_below() -> None:
    """AVX2 and FMA, for which torch chooses its AVX2 kernels, but not F16C."""
    code = "import torch; from ktft import ops; r = ops.cpu_report(); print(r['chosen'], r['missing']['avx2'])"
    ran = emulate("Haswell,-f16c", "-c", code, KTFT_ISA="auto")
    assert ran.stdout.split() == ["scalar", "f16c"], ran.stderr[-2000:]


def test_forward_and_backward(emulated: tuple[str, dict[str, Any]]) -> None:
    cpu, found = emulated
    level = CPUS[cpu][0]
    native = level in ops.cpu_report()["levels"]
    worst: dict[tuple[str, str], float] = {}
    names = {key(name, dtype, turned): (name, turned) for name in NAMES for dtype in DTYPES for turned in (False, True)}
    assert set(found["calls"]) == set(names)
    for call, tensors in found["calls"].items():
        name, transposed = names[call]
        fields = {field: tensors[field] for field in (*INPUTS, "lora", "adapter_ids")}
        inputs = replace(CASES[name].build(tensors["x"].dtype), **fields)
        truth = layer_truth(inputs)
        bounds = [truth.out, truth.d_x, truth.d_route_weights, *truth.d_lora]
        for n, (actual, bound) in enumerate(zip(tensors["results"], bounds, strict=True)):
            worst[call, f"result {n}"] = excess(actual, bound)
        if native:
            with ops.override(isa=level, threads=2):
                assert_same_bits(tensors["results"], run(inputs, weights_of(inputs, transposed=transposed)))
    bad = {call: value for call, value in worst.items() if value > 1}
    assert not bad, f"outside the error bars (in units of the tolerance) on an emulated {cpu}: {bad}"
