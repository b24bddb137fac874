"""Which tensor of an adapter file is which: per expert or fused, of what layer, matrix and side.

Per expert, under the family's own names, and Linear modules:

    base_model.model.{disk}.{e}.{gate|up|down}.lora_A.weight [r, in]      ….lora_B.weight [out, r]
    base_model.model.{module}.lora_A.weight [r, in]                        ….lora_B.weight [out, r]

PEFT's fused form (0.19.1 and later), where the inner wrapper is gate and up together:

    base_model.model.{experts}.base_layer.lora_A.weight [r E, H]           ….base_layer.lora_B.weight [2I, r E]
    base_model.model.{experts}.lora_A.weight [r E, I]                      ….lora_B.weight [H, r E]

Rows of a fused A have the expert as the slow axis (row e r + i), columns of a fused B as the fast one (column i E + e).
Names only: shapes, ranks and completeness are ``checks.py``'s, values ``disk.py``'s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import nn

from ktft.adapters.config import DOWN, GATE_UP, AdapterError, module_path, names_parameter, parameter_name
from ktft.checkpoint import Tensor
from ktft.experts import CpuExperts

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
PREFIX = "base_model.model."


@dataclass
class StoredExperts:
    """One layer's expert LoRA in a file.

    Attributes:
        keys: (slot of LORA_NAMES, expert, or None for a fused tensor) -> tensor name.
    """

    experts: CpuExperts
    keys: dict[tuple[str, int | None], str] = field(default_factory=dict)
    rank: int = 0
    scaling: float = 1.0
    down_rank: int = 0
    down_scaling: float = 1.0

    @property
    def fused(self) -> bool:
        return any(expert is None for _, expert in self.keys)


@dataclass
class StoredLinear:
    """LoRA of one Linear module in a file."""

    module: nn.Linear
    keys: dict[str, str] = field(default_factory=dict)  # "A", "B" -> tensor name
    rank: int = 0
    scaling: float = 1.0


@dataclass
class StoredAdapter:
    """An adapter directory, checked against a model; no tensor has been read yet.

    Attributes:
        experts, linears: what it adapts, by module path in the model.
        training: the training form of the config, if ktft wrote the file.
        peft_version: as the config says; LoraConfig would fill in the installed one.
    """

    directory: Path
    config: LoraConfig
    tensors: dict[str, Tensor]
    experts: dict[str, StoredExperts]
    linears: dict[str, StoredLinear]
    training: dict[str, Any] | None
    peft_version: str | None

    def layers(self) -> dict[str, tuple[int, float]]:
        """Module path -> (rank, scaling) that a layer must have to hold this adapter."""
        entries: dict[str, StoredExperts | StoredLinear] = {**self.experts, **self.linears}
        return {path: (entry.rank, entry.scaling) for path, entry in entries.items()}


_KEY = re.compile(r"base_model\.model\.(?P<path>.+?)(?P<inner>\.base_layer)?\.lora_(?P<side>[AB])\.weight")
_EXPERT = re.compile(r"(?P<prefix>.+)\.(?P<expert>\d+)\.(?P<projection>[^.]+)")


def assign(stored: StoredAdapter, modules: Mapping[str, nn.Module]) -> None:
    """Give every tensor its place, or raise."""
    by_path = {name: m for name, m in modules.items() if isinstance(m, CpuExperts)}
    by_prefix: dict[str, CpuExperts] = {}
    for experts in by_path.values():
        assert experts.names is not None
        by_prefix[experts.names.disk] = by_prefix[experts.names.module] = experts
    for key in stored.tensors:
        match = _KEY.fullmatch(key)
        path = match["path"] if match else ""
        inner = bool(match and match["inner"])
        side = match["side"] if match else ""
        expert = _EXPERT.fullmatch(path)
        if expert is not None and expert["prefix"] in by_prefix and not inner:
            module = by_prefix[expert["prefix"]]
            assert module.names is not None
            projections = {module.names.gate: "gate", module.names.up: "up", module.names.down: "down"}
            if expert["projection"] in projections and int(expert["expert"]) < module.num_experts:
                place = (f"{projections[expert['projection']]}_{side.lower()}", int(expert["expert"]))
                _place(stored.experts.setdefault(module_path(module), StoredExperts(module)).keys, place, key, stored)
                continue
        elif path in by_path:
            _place_fused(stored, by_path[path], inner, side, key)
            continue
        elif not inner and isinstance(modules.get(path), nn.Linear):
            linear = modules[path]
            assert isinstance(linear, nn.Linear)
            _place(stored.linears.setdefault(path, StoredLinear(linear)).keys, side, key, stored)
            continue
        raise AdapterError(_unknown(key, path, stored, modules))


def _place(keys: dict[Any, str], place: Any, key: str, stored: StoredAdapter) -> None:
    if place in keys:
        raise AdapterError(
            f"{stored.directory / WEIGHTS_FILE}: tensors {keys[place]!r} and {key!r} are the same one twice"
        )
    keys[place] = key


def _place_fused(stored: StoredAdapter, module: CpuExperts, inner: bool, side: str, key: str) -> None:
    # gate_up is wrapped first, so it is the inner one; but a parameter targeted alone has the outer name.
    down = names_parameter(stored.config, parameter_name(module, DOWN))
    gate_up = inner or (not down and names_parameter(stored.config, parameter_name(module, GATE_UP)))
    entry = stored.experts.setdefault(module_path(module), StoredExperts(module))
    for part in ("gate", "up") if gate_up else ("down",):
        _place(entry.keys, (f"{part}_{side.lower()}", None), key, stored)


def _unknown(key: str, path: str, stored: StoredAdapter, modules: Mapping[str, nn.Module]) -> str:
    if path in modules:
        what = f"it adapts {path!r}, a {type(modules[path]).__name__}, which ktft does not adapt"
    elif path:
        what = f"the model has no module {path!r} and no such expert"
    else:
        what = "it is no LoRA tensor of a module"
    return f"{stored.directory / WEIGHTS_FILE}: tensor {key!r} has no place in this model: {what}"


def unpack_fused(a: torch.Tensor, b: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """PEFT's fused factors to stacks: A [r E, in] -> [E, r, in], B [out, r E] -> [E, out, r].

    The delta of expert e is B[e] @ A[e].
    """
    rank = a.shape[0] // num_experts
    return a.reshape(num_experts, rank, -1), b.reshape(b.shape[0], rank, num_experts).permute(2, 0, 1)


__all__ = [
    "CONFIG_FILE",
    "PREFIX",
    "WEIGHTS_FILE",
    "StoredAdapter",
    "StoredExperts",
    "StoredLinear",
    "assign",
    "unpack_fused",
]
