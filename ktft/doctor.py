"""``ktft doctor``: what this machine offers, and what ktft makes of it. Looks only; changes and downloads nothing."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ktft import ops
from ktft.config import cache_dir

PACKAGES = (
    "ktft",
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "datasets",
    "safetensors",
    "huggingface_hub",
    "trl",
    "numpy",
)

AMX_FEATURES = {
    "amx_tile": "this CPU has no AMX",
    "amx_bf16": "this CPU's AMX does not multiply bf16",
    "os_amx": "the operating system, or a hypervisor below it, does not save tile registers (XCR0 bits 17 and 18); "
    "Linux does from 5.16 on",
    "amx_palette": "the tile registers are not eight of 16 rows of 64 bytes (CPUID leaf 1Dh), as the kernels want them",
    "amx_permission": "Linux refused tile registers to this process (arch_prctl ARCH_REQ_XCOMP_PERM), as it does where "
    "a thread's signal stack has no room for them; a container's seccomp filter can forbid asking",
}
"""What it means that one of them is missing."""


def report() -> dict[str, Any]:
    """Everything doctor knows, JSON-ready: ``cpu``, ``kernels``, ``memory_gb``, ``numa_nodes``, ``torch``, ``cuda``,
    ``versions``, …"""
    kernels = ops.cpu_report()
    return {
        "cpu": {
            "model": _cpu_model(),
            "machine": platform.machine(),
            "logical_cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)),
            "features": {name: bool(present) for name, present in kernels["features"].items()},
        },
        "kernels": {key: value for key, value in kernels.items() if key != "features"},
        "memory_gb": _memory(),
        "numa_nodes": _numa_nodes(),
        "torch": {
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "cuda_build": torch.version.cuda,
        },
        "cuda": _cuda(),
        "cache": str(cache_dir()),
        "platform": platform.platform(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
    }


def as_json() -> str:
    return json.dumps(report(), indent=2, default=str)


def as_text() -> str:
    """The report for a reader."""
    found = report()
    cpu, kernels, memory = found["cpu"], found["kernels"], found["memory_gb"]
    present = [name for name, yes in cpu["features"].items() if yes]
    absent = [name for name, yes in cpu["features"].items() if not yes]
    sections = {
        "CPU": {
            "model": f"{cpu['model']} ({cpu['machine']})",
            "cores": f"{cpu['usable_cores']} usable of {cpu['logical_cores']}",
            "has": ", ".join(present) or "none of the features ktft looks for",
            "has not": ", ".join(absent) or "-",
            "NUMA nodes": _nodes_text(found["numa_nodes"]),
        },
        "Kernels": {
            "chosen": f"{kernels['chosen']} ({kernels['reason']})",
            "available": ", ".join(kernels["levels"]),
            "amx": _amx_text(kernels["missing"]),
            "threads": str(kernels["threads"]),
            "build": ", ".join(f"{key} {value}" for key, value in kernels["build"].items()),
        },
        "Memory": {
            "RAM": f"{memory['total']:.1f} GB, {memory['available']:.1f} GB available" if memory else "unknown",
            "cache": found["cache"],
        },
        "Torch": {
            "threads": str(found["torch"]["threads"]),
            "CPU level": found["torch"]["cpu_capability"],
            "CUDA": _cuda_text(found),
        },
        "Versions": {name: number or "not installed" for name, number in found["versions"].items()},
    }
    lines = []
    for title, rows in sections.items():
        lines += [title, *(f"  {name:<16}{value}" for name, value in rows.items())]
    return "\n".join([*lines, found["platform"]])


def _amx_text(missing: dict[str, str]) -> str:
    if "amx" not in missing:
        return "available"
    named = [f"{name} ({AMX_FEATURES[name]})" if name in AMX_FEATURES else name for name in missing["amx"].split()]
    return f"not available: no {', no '.join(named)}"


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _memory() -> dict[str, float]:
    """Total and available RAM in 1e9 bytes; empty where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    kilobytes = {line.partition(":")[0]: int(line.split()[1]) for line in lines}
    return {"total": kilobytes["MemTotal"] * 1024 / 1e9, "available": kilobytes["MemAvailable"] * 1024 / 1e9}


def _numa_nodes() -> dict[str, str]:
    """Node -> its CPUs, e.g. ``{"0": "0-15"}``; empty where the system does not say."""
    nodes = Path("/sys/devices/system/node").glob("node[0-9]*")
    return {
        path.name.removeprefix("node"): (path / "cpulist").read_text(encoding="utf-8").strip()
        for path in sorted(nodes, key=lambda path: int(path.name.removeprefix("node")))
    }


def _nodes_text(nodes: dict[str, str]) -> str:
    listed = "; ".join(f"{node}: CPUs {cpus}" for node, cpus in nodes.items())
    return f"{len(nodes)} ({listed})" if nodes else "unknown"


def _cuda() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {"name": device.name, "memory_gb": device.total_memory / 1e9, "capability": f"{device.major}.{device.minor}"}
        for device in devices
    ]


def _cuda_text(found: dict[str, Any]) -> str:
    if found["torch"]["cuda_build"] is None:
        return "none: this torch is built for the CPU"
    if not found["cuda"]:
        return f"torch is built for CUDA {found['torch']['cuda_build']}, but sees no GPU"
    return "; ".join(
        f"{gpu['name']}, {gpu['memory_gb']:.0f} GB, capability {gpu['capability']}" for gpu in found["cuda"]
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


__all__ = ["as_json", "as_text", "report"]
