"""``ktft doctor`` against the sources it reports: /proc, the scheduler, package metadata, the kernels' own choice."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from ktft import doctor, ops
from tests.test_cpu import AMX

ROOT = Path(__file__).parents[1]


def cpu_flags() -> set[str]:
    """Flags of the first CPU in /proc/cpuinfo: what CPUID says, less what this kernel does not support."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return set(value.split())
    return set()


def meminfo(key: str) -> float:
    """A line of /proc/meminfo in GB (1e9 bytes)."""
    (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024 / 1e9


def run_doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ktft.cli", "doctor", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.skipif(not cpu_flags(), reason="/proc/cpuinfo has no flags here: not x86")
def test_cpu_features() -> None:
    features, flags = doctor.report()["cpu"]["features"], cpu_flags()
    registers = {name: features.pop(name) for name in ("os_ymm", "os_zmm", "os_amx", "amx_palette", "amx_permission")}
    assert {"avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"} <= set(features)
    assert features == {name: name in flags for name in features}
    # Linux hides a vector extension whose registers it does not save.
    assert registers["os_ymm"] or "avx" not in flags
    assert registers["os_zmm"] or "avx512f" not in flags
    assert registers["os_amx"] or "amx_tile" not in flags
    assert registers["amx_palette"] == ("amx_tile" in flags)
    if not registers["os_amx"] or not registers["amx_palette"]:
        assert not registers["amx_permission"]


def test_cores() -> None:
    allowed = os.sched_getaffinity(0)
    assert doctor.report()["cpu"]["usable_cores"] == len(allowed)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        cpu = doctor.report()["cpu"]
        assert f"1 usable of {os.cpu_count()}" in doctor.as_text()
    finally:
        os.sched_setaffinity(0, allowed)
    assert (cpu["usable_cores"], cpu["logical_cores"]) == (1, os.cpu_count())


def test_memory() -> None:
    before = meminfo("MemAvailable")
    memory = doctor.report()["memory_gb"]
    around = sorted((before, meminfo("MemAvailable")))
    assert memory["total"] == meminfo("MemTotal")
    # other processes may take or free some meanwhile
    assert around[0] - 1 < memory["available"] < around[1] + 1
    assert f"{memory['total']:.1f} GB, " in doctor.as_text()


def test_numa_nodes() -> None:
    nodes = doctor.report()["numa_nodes"]
    if not nodes:
        pytest.skip("this system names no NUMA nodes")
    cpus: list[int] = []
    for text in nodes.values():
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            cpus += range(int(first), int(last or first) + 1)
    assert len(cpus) == len(set(cpus)) and os.sched_getaffinity(0) <= set(cpus)


def test_versions() -> None:
    versions = doctor.report()["versions"]
    assert versions.pop("python") == platform.python_version()
    assert {"ktft", "torch", "transformers", "peft"} <= set(versions)
    text = doctor.as_text()
    for name, found in versions.items():
        try:
            expected = version(name)
        except PackageNotFoundError:
            expected = None
        assert found == expected, name
        assert any(line.split() == [name, *(expected or "not installed").split()] for line in text.splitlines()), name


def test_torch_and_kernels() -> None:
    report, kernels = doctor.report(), ops.cpu_report()
    assert report["kernels"] == {key: value for key, value in kernels.items() if key != "features"}
    assert report["torch"]["threads"] == torch.get_num_threads()
    assert report["torch"]["cuda_build"] == torch.version.cuda
    assert len(report["cuda"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    with ops.override(threads=3):
        assert doctor.report()["kernels"]["threads"] == 3


@pytest.mark.parametrize("name", doctor.AMX_FEATURES)
def test_what_amx_lacks_is_explained(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops._C, "cpu_features", lambda ask_for_tiles: {**AMX, name: False})
    rows = [line.split(maxsplit=1) for line in doctor.as_text().splitlines()]
    (amx,) = (row[1] for row in rows if row[0] == "amx")
    assert amx == f"not available: no {name} ({doctor.AMX_FEATURES[name]})"
    monkeypatch.setattr(ops._C, "cpu_features", lambda ask_for_tiles: AMX)
    assert "amx             available" in doctor.as_text()


@pytest.mark.parametrize("isa", ["auto", *ops.cpu_report()["levels"], *ops.TEST_LEVELS])
def test_a_forced_level_is_shown_with_its_reason(isa: str) -> None:
    found = run_doctor(KTFT_ISA=isa, KTFT_THREADS="3")
    level = ops.cpu_report()["levels"][-1] if isa == "auto" else isa
    reason = "the best level this CPU offers" if isa == "auto" else "asked for by KTFT_ISA"
    rows = [line.split(maxsplit=1) for line in found.stdout.splitlines()]
    (chosen,) = (row[1] for row in rows if row[0] == "chosen")
    assert found.returncode == 0 and chosen.startswith(f"{level} ({reason}")
    assert ["threads", "3"] in rows


def test_json_holds_the_report() -> None:
    found = json.loads(run_doctor("--json", KTFT_ISA="scalar").stdout)
    kernels = found["kernels"]
    assert (kernels["chosen"], kernels["reason"]) == ("scalar", "asked for by KTFT_ISA")
    assert found.keys() == doctor.report().keys() and kernels["levels"] == ops.cpu_report()["levels"]
    assert Path(kernels["build"]["extension"]).is_file()
