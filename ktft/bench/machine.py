"""What this machine can do at most, and what it is.

:class:`Probe` measures three rates with torch, on as many threads as torch is set to use:

    matmul   GFLOP/s of [2048, 2048] x [2048, 2048], bf16 or fp32 (2 * 2048³ operations)
    read     GB/s of reading 512 MB of ordinary memory once (1e9 bytes a second)

A machine shared with others changes from second to second, so a figure is judged by rates sampled beside it: keep one
probe, ask it again between repetitions, take medians. :func:`describe` collects the facts a reader needs to place the
numbers, and names in ``not_measured`` those it does not know; it looks only.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from ktft import doctor

MATMUL_SIDE = 2048
READ_BYTES = 512 * 2**20  # sixteen times the largest last-level cache that two cores of the test machines share

NOT_MEASURED = (
    "RAM channels and speed",
    "clock frequencies and turbo",
    "SMT siblings that other processes use",
    "NUMA policy",
    "PCIe link and GPU clock",
    "container limits",
)
"""What a fair report would hold and a ``machine`` record does not: no cheap source is the same everywhere."""

_SETTINGS = re.compile("(OMP|GOMP|KMP|MKL|OPENBLAS|KTFT)_")
_CPUS = Path("/sys/devices/system/cpu")


def best_seconds(function: Callable[[], object], repeat: int) -> float:
    """The shortest of ``repeat`` runs."""
    shortest = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


class Probe:
    """Keeps the operands of the measurements, 512 MB and a few matrices, so that a sample takes well under a second.

    Args:
        matmul_side: n of the n x n matrices.
        read_bytes: size of what is read, a multiple of 8.
    """

    def __init__(self, *, matmul_side: int = MATMUL_SIDE, read_bytes: int = READ_BYTES) -> None:
        self._side = matmul_side
        self._operands = {
            dtype: (torch.randn(matmul_side, matmul_side).to(dtype), torch.randn(matmul_side, matmul_side).to(dtype))
            for dtype in (torch.bfloat16, torch.float32)
        }
        self._memory = torch.ones(read_bytes // 4)
        self._readers = self._read_methods()
        for dtype in self._operands:  # the first product of a dtype builds its kernel
            self.matmul(dtype, repeat=1)
        self.read()

    def matmul(self, dtype: torch.dtype, repeat: int = 3) -> float:
        """GFLOP/s of one matrix product in ``dtype`` (bfloat16 or float32), the best of ``repeat``."""
        a, b = self._operands[dtype]
        return 2 * self._side**3 / best_seconds(lambda: torch.nn.functional.linear(a, b), repeat) / 1e9

    def read(self) -> float:
        """GB/s of reading, the best of several ways to do it."""
        return self._memory.nbytes / min(best_seconds(function, 1) for function in self._readers) / 1e9

    def _read_methods(self) -> list[Callable[[], object]]:
        # A sum in torch's own threads is bound by memory for either type on the machines tried; a thread for each piece
        # does not depend on how torch splits a reduction. Measured on two cores of a Zen 5 EPYC, 2026-11-30, GB/s:
        # 38.6, 38.9, 39.2; torch.amax, torch.dot, torch.mv and numpy's reductions in threads reached 19 to 32.
        memory, words = self._memory, self._memory.view(torch.int64)
        threads = torch.get_num_threads()
        pieces = memory.chunk(threads)
        pool = ThreadPoolExecutor(threads)
        return [memory.sum, words.sum, lambda: list(pool.map(torch.sum, pieces))]


class Samples:
    """Rates sampled next to what they judge; the figures are medians.

    Args:
        probe: takes the samples.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._rates: dict[str, list[float]] = {"peak_bf16_gflops": [], "peak_fp32_gflops": [], "read_gbs": []}

    def take(self) -> None:
        """One sample of each rate."""
        self._rates["peak_bf16_gflops"].append(self._probe.matmul(torch.bfloat16))
        self._rates["peak_fp32_gflops"].append(self._probe.matmul(torch.float32, repeat=2))
        self._rates["read_gbs"].append(self._probe.read())

    def medians(self) -> dict[str, float]:
        """``peak_bf16_gflops``, ``peak_fp32_gflops`` (1e9 operations a second), ``read_gbs`` (1e9 bytes a second)."""
        return {name: statistics.median(values) for name, values in self._rates.items()}


def describe(samples: Samples) -> dict[str, Any]:
    """The ``machine`` record: the three rates, and machine, versions, threads and load as they are now.

    ``cores`` are the logical ones that this process may use, listed in ``affinity`` and sharing ``physical_cores`` and
    ``sockets``; ``environment`` holds the variables that set threads, BLAS or the kernels. ``commit`` is that of the
    source tree, with ``+`` if tracked files differ from it, or None for an installed package. What the system does not
    say is None.
    """
    found = doctor.report()
    kernels, cpu, memory = found["kernels"], found["cpu"], found["memory_gb"]
    affinity = sorted(os.sched_getaffinity(0))
    return {
        "record": "machine",
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu["model"],
        "cores": cpu["usable_cores"],
        "logical_cores": cpu["logical_cores"],
        "affinity": _ranges(affinity),
        **_topology(affinity),
        "hypervisor": _hypervisor(),
        "threads": kernels["threads"],
        "torch_threads": torch.get_num_threads(),
        "isa": kernels["chosen"],
        "torch_cpu_level": found["torch"]["cpu_capability"],
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "not set"),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "not set"),
        "environment": {name: value for name, value in sorted(os.environ.items()) if _SETTINGS.match(name)},
        "blas": _blas(torch.__config__.show()),
        **{name: round(value, 1) for name, value in samples.medians().items()},
        "memory_gb": round(memory["total"], 1) if memory else None,
        "numa_nodes": len(found["numa_nodes"]) or None,
        "gpus": [gpu["name"] for gpu in found["cuda"]],
        "gpu_driver": _first_line("/sys/module/nvidia/version"),
        "governor": _first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "huge_pages": _first_line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load_average": load_average(),
        "platform": found["platform"],
        "libc": " ".join(platform.libc_ver()),
        "compiler": kernels["build"]["compiler"],
        "build_flags": kernels["build"]["flags"],
        "commit": _commit(),
        "versions": {k: v for k, v in found["versions"].items() if k in ("ktft", "torch", "transformers", "peft")},
        "not_measured": list(NOT_MEASURED),
    }


def load_average() -> list[float]:
    """Of the last 1, 5 and 15 minutes, to see whether the machine was ours."""
    return [round(value, 2) for value in os.getloadavg()]


def config_sha256(model: str | Path) -> str | None:
    """SHA-256 of a model's ``config.json``, in a directory or, of a hub id, in the cache; None where there is none."""
    file = Path(model) / "config.json"
    if not file.is_file():
        try:
            cached = try_to_load_from_cache(str(model), "config.json")
        except ValueError:  # no name of a repository
            return None
        if not isinstance(cached, str):
            return None
        file = Path(cached)
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as Linux lists CPUs, e.g. ``0-3,8``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def _topology(cpus: Sequence[int], root: Path = _CPUS) -> dict[str, int | None]:
    """``physical_cores`` and ``sockets`` that these logical cores belong to."""
    sockets, cores = set(), set()
    for cpu in cpus:
        socket, core = (
            _first_line(f"{root}/cpu{cpu}/topology/{name}") for name in ("physical_package_id", "core_cpus_list")
        )
        if socket is None or core is None:
            return {"physical_cores": None, "sockets": None}
        sockets.add(socket)
        cores.add(core)
    return {"physical_cores": len(cores), "sockets": len(sockets)}


def _hypervisor() -> bool | None:
    """Whether CPUID says that this is a virtual machine."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return None
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return "hypervisor" in flags[1].split() if flags else None


def _blas(config: str) -> str:
    """What torch multiplies with, from ``torch.__config__.show()``: its BLAS and the versions of Intel's libraries."""
    named = re.search(r"BLAS_INFO=(\w+)", config)
    versions = re.findall(r"^  - (Intel\(R\) .*? (?:Version )?v?[\d.]+)", config, re.MULTILINE)
    return "; ".join([named[1] if named else "unknown", *versions])


def _first_line(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").partition("\n")[0].strip()
    except OSError:
        return None


def _commit() -> str | None:
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    commit, changes = (
        subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, check=False).stdout.strip()
        for command in (["rev-parse", "--short=10", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    )
    return commit + ("+" if changes else "") if commit else None


__all__ = [
    "MATMUL_SIDE", "NOT_MEASURED", "READ_BYTES", "Probe", "Samples", "best_seconds", "config_sha256", "describe",
    "load_average",
]  # fmt: skip
