"""What this machine can do at most, and what it is.

:class:`Probe` measures three rates with torch, on as many threads as torch is set to use:

    matmul   GFLOP/s of [2048, 2048] x [2048, 2048], bf16 or fp32 (2 * 2048³ operations)
    read     GB/s of reading 512 MB of ordinary memory once (1e9 bytes a second)

A machine shared with others changes from second to second, so a figure is judged by rates sampled beside it: keep one
probe, ask it again between repetitions, take medians. :func:`describe` collects the facts a reader needs to place the
numbers; it looks only.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ktft import doctor

MATMUL_SIDE = 2048
READ_BYTES = 512 * 2**20  # sixteen times the largest last-level cache that two cores of the test machines share


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
        # does not depend on how torch splits a reduction. Measured on two cores, GB/s: 38.6, 38.9, 39.2; torch.amax,
        # torch.dot, torch.mv and numpy's reductions in threads reached 19 to 32.
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

    ``commit`` is that of the source tree, with ``+`` if tracked files differ from it, or None for an installed package.
    """
    found = doctor.report()
    kernels, cpu, memory = found["kernels"], found["cpu"], found["memory_gb"]
    return {
        "record": "machine",
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu["model"],
        "cores": cpu["usable_cores"],
        "logical_cores": cpu["logical_cores"],
        "threads": kernels["threads"],
        "torch_threads": torch.get_num_threads(),
        "isa": kernels["chosen"],
        "torch_cpu_level": found["torch"]["cpu_capability"],
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "not set"),
        **{name: round(value, 1) for name, value in samples.medians().items()},
        "memory_gb": round(memory["total"], 1) if memory else None,
        "numa_nodes": len(found["numa_nodes"]) or None,
        "gpus": [gpu["name"] for gpu in found["cuda"]],
        "governor": _first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "huge_pages": _first_line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load_average": load_average(),
        "platform": found["platform"],
        "libc": " ".join(platform.libc_ver()),
        "compiler": kernels["build"]["compiler"],
        "commit": _commit(),
        "versions": {k: v for k, v in found["versions"].items() if k in ("ktft", "torch", "transformers", "peft")},
    }


def load_average() -> list[float]:
    """Of the last 1, 5 and 15 minutes, to see whether the machine was ours."""
    return [round(value, 2) for value in os.getloadavg()]


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


__all__ = ["MATMUL_SIDE", "READ_BYTES", "Probe", "Samples", "best_seconds", "describe", "load_average"]
