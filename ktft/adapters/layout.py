"""Which tensor of an adapter file is which: per expert or fused, of what layer, matrix and side.

Per expert, under the family's own names, and Linear modules:

    base_model.model.{disk}.{e}.{gate|up|down}.lora_A.weight [r, in]      ….lora_B.weight [out, r]
    base_model.model.{module}.lora_A.weight [r, in]                        ….lora_B.weight [out, r]

PEFT's fused form (0.19.1 and later), where the inner wrapper is gate and up together:

    base_model.model.{experts}.base_layer.lora_A.weight [r E, H]           ….base_layer.lora_B.weight [2I, r E]
    base_model.model.{experts}.lora_A.weight [r E, I]                      ….lora_B.weight [H, r E]

Rows of the inner B are those of the stock parameter: gate's before up's, or in turn (gpt-oss). Rows of a fused A have
the expert as the slow axis (row e r + i), columns of a fused B as the fast one (column i E + e).

ktft writes per expert, which every tool reads, where stock PEFT turns those names into its own; for other model types
stock PEFT would drop them with a warning, and the fused form is written, with gate and up as one block-diagonal pair of
rank 2r (:func:`pack_fused`). :func:`peft_converts_experts` asks PEFT which it is.

Names and arrangement only: shapes, ranks and completeness are ``checks.py``'s, values ``disk.py``'s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
from torch import nn
from transformers import PreTrainedModel

from ktft.adapters.config import (
    DOWN,
    GATE_UP,
    AdapterError,
    base_modules,
    module_path,
    names_parameter,
    parameter_name,
)
from ktft.checkpoint import Tensor
from ktft.expert_layout import fused_rows
from ktft.experts import CpuExperts
from ktft.weights import LORA_NAMES

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
PREFIX = "base_model.model."


@dataclass
class StoredExperts:
    """One layer's expert LoRA in a file.

    Attributes:
        keys: (slot of LORA_NAMES, expert, or None for a fused tensor) -> tensor name.
        block_diagonal: fused by :func:`pack_fused`: the halves of gate_up are gate and up, of rank ``rank`` each.
    """

    experts: CpuExperts
    keys: dict[tuple[str, int | None], str] = field(default_factory=dict)
    rank: int = 0
    scaling: float = 1.0
    down_rank: int = 0
    down_scaling: float = 1.0
    block_diagonal: bool = False

    @property
    def ratio(self) -> float:
        """What B of down carries, because one scaling serves the layer."""
        return 1.0 if self.down_scaling == self.scaling else self.down_scaling / self.scaling

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
_EXPERT = re.compile(r"(?P<prefix>.+)\.(?P<expert>0|[1-9][0-9]*)\.(?P<projection>[^.]+)")


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


def pack_fused(
    gate_up: Sequence[torch.Tensor], down: Sequence[torch.Tensor], interleaved: bool
) -> dict[str, torch.Tensor]:
    """Stacks to PEFT's fused factors, by what follows the experts' path in a tensor's name.

    Args:
        gate_up: gate A [E, r, H], gate B [E, I, r], up A, up B. A becomes [gate; up] and B block diagonal, rank 2r.
        down: down A [E, r, I], down B [E, H, r].
        interleaved: see :class:`~ktft.experts.ExpertNames`.
    """
    gate_a, gate_b, up_a, up_b = gate_up
    num_experts, inter, rank = gate_b.shape
    b = gate_b.new_zeros(num_experts, 2 * inter, 2 * rank)
    of_gate, of_up = fused_rows(inter, interleaved)
    b[:, of_gate, :rank], b[:, of_up, rank:] = gate_b, up_b
    pairs = {".base_layer": (torch.cat([gate_a, up_a], dim=1), b), "": (down[0], down[1])}
    out = {}
    for inner, (a, b) in pairs.items():
        out[f"{inner}.lora_A.weight"] = a.flatten(0, 1).contiguous()
        out[f"{inner}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1).contiguous()
    return out


def per_expert(experts: CpuExperts, stacks: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stacks by slot of LORA_NAMES to per-expert tensors (views) by their names on disk."""
    names = experts.names
    assert names is not None
    projections = {"gate": names.gate, "up": names.up, "down": names.down}
    return {
        f"{PREFIX}{names.disk}.{expert}.{projections[slot[:-2]]}.lora_{slot[-1].upper()}.weight": tensor
        for slot, stack in stacks.items()
        for expert, tensor in enumerate(stack)
    }


def fused(experts: CpuExperts, stacks: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stacks by slot of LORA_NAMES to PEFT's fused tensors by their names on disk."""
    values = [stacks[slot] for slot in LORA_NAMES]
    assert experts.names is not None
    packed = pack_fused(values[:4], values[4:], experts.names.interleaved)
    return {f"{PREFIX}{module_path(experts)}{name}": tensor for name, tensor in packed.items()}


def peft_converts_experts(model: PreTrainedModel) -> bool:
    """Whether stock PEFT turns per-expert tensors of this model type into the fused ones that mean the same.

    Asked of PEFT itself, with an adapter of two experts, one number to a tensor. PEFT goes by model type, and leaves
    names that it has no rule for as they are, so that they match nothing.
    """
    given: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for _, module in base_modules(model):
        if isinstance(module, CpuExperts):
            stacks = {slot: torch.tensor([[[2.0 + n]], [[20.0 + n]]]) for n, slot in enumerate(LORA_NAMES)}
            given |= per_expert(module, stacks)
            expected |= fused(module, stacks)
    try:
        found = convert_peft_adapter_state_dict_for_transformers(model, LoraConfig(r=1, target_modules=[]), given)
    except (KeyError, ValueError, RuntimeError):  # a stock load would fail in the same way
        return False
    return set(found) == set(expected) and all(torch.equal(found[key], expected[key]) for key in expected)


__all__ = [
    "CONFIG_FILE",
    "PREFIX",
    "WEIGHTS_FILE",
    "StoredAdapter",
    "StoredExperts",
    "StoredLinear",
    "assign",
    "fused",
    "pack_fused",
    "peft_converts_experts",
    "per_expert",
    "unpack_fused",
]
