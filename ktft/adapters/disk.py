"""Adapter files: which tensor is which, and how bytes get to and from the trained stacks.

Written is one layout only, per-expert PEFT tensors under the family's own names:

    base_model.model.{disk}.{e}.{gate|up|down}.lora_A.weight [r, in]      ….lora_B.weight [out, r]
    base_model.model.{module}.lora_A.weight [r, in]                        ….lora_B.weight [out, r]      Linear modules

Read are those, and PEFT's fused form (0.19.1 and later), where the inner wrapper is gate and up together:

    base_model.model.{experts}.base_layer.lora_A.weight [r E, H]           ….base_layer.lora_B.weight [2I, r E]
    base_model.model.{experts}.lora_A.weight [r E, I]                      ….lora_B.weight [H, r E]

Rows of a fused A have the expert as the slow axis (row e r + i), columns of a fused B as the fast one (column i E + e).
Every tensor in a file is accounted for before anything is read; what is missing, extra, misshapen or not finite is an error by name.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from packaging.version import InvalidVersion, Version
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from ktft.adapters.config import (
    DOWN,
    GATE_UP,
    TRAINING_FIELDS,
    AdapterError,
    base_modules,
    check_config,
    module_path,
    names_parameter,
    parameter_name,
    stock_rank_alpha,
)
from ktft.checkpoint import Tensor, read_header
from ktft.experts import CpuExperts
from ktft.mapping import CheckpointError, is_mapped_source, replacing
from ktft.weights import LORA_NAMES, lora_shapes

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
PREFIX = "base_model.model."
METADATA_KEY = "ktft"
"""Under this key the file's metadata holds the training form of the config, as JSON with a format number."""
METADATA_FORMAT = 1
FLOATS = {"F32", "F16", "BF16"}
FIRST_PEFT_WITH_TODAYS_LAYOUT = Version("0.19.1")


@dataclass
class StoredExperts:
    """One layer's expert LoRA in a file: ``keys`` maps (slot of LORA_NAMES, expert, or None for a fused tensor) to a tensor name."""

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
        return {path: (s.rank, s.scaling) for path, s in {**self.experts, **self.linears}.items()}


# --- writing ----------------------------------------------------------------------------------------------------------


def refuse_model_directory(directory: Path, base: str | None) -> None:
    """Raise AdapterError if ``directory`` is where a model lies: the base, or whatever a loaded model is mapped from."""
    same = base is not None and os.path.isdir(base) and os.path.realpath(base) == os.path.realpath(directory)
    if same or (directory.is_dir() and any(is_mapped_source(file) for file in directory.iterdir())):
        raise AdapterError(
            f"saving the adapter into {directory} is refused: the base model lies there, and its files are in use. "
            "Choose another directory."
        )


def write_adapter(
    directory: Path, tensors: Mapping[str, torch.Tensor], config: LoraConfig, training: Mapping[str, Any]
) -> None:
    """Write the two files; a process killed at any moment leaves files that load as what they were or are refused.

    Raises:
        AdapterError: a tensor is not finite.
    """
    for key, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise AdapterError(
                f"tensor {key!r} holds NaN or infinity; this adapter is not saved. The training has diverged."
            )
    values = {key: sorted(v) if isinstance(v, set) else v for key, v in config.to_dict().items()}
    metadata = {"format": "pt", METADATA_KEY: json.dumps({"format": METADATA_FORMAT, "training": dict(training)})}
    directory.mkdir(parents=True, exist_ok=True)
    with replacing(directory / WEIGHTS_FILE) as weights, replacing(directory / CONFIG_FILE) as written:
        save_file(dict(tensors), weights, metadata=metadata)
        written.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- reading ----------------------------------------------------------------------------------------------------------


def read_adapter(directory: Path, model: nn.Module) -> StoredAdapter:
    """Read the config and the header of an adapter and account for every tensor.

    Raises:
        AdapterError: names the file, key or tensor.
    """
    config, peft_version = _read_config(directory)
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        found = sorted(file.name for file in directory.iterdir())
        raise AdapterError(f"{directory} has no {WEIGHTS_FILE} (found {found}); pickled adapters (.bin) are not read")
    try:
        tensors, _ = read_header(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (CheckpointError, SafetensorError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from None
    stored = StoredAdapter(directory, config, tensors, {}, {}, _training(metadata, path), peft_version)
    modules = dict(base_modules(model))
    _assign(stored, modules)
    for experts in stored.experts.values():
        _check_experts(experts, stored)
    for name, linear in stored.linears.items():
        _check_linear(name, linear, stored)
    _check_coverage(stored, modules)
    return stored


def _read_config(directory: Path) -> tuple[LoraConfig, str | None]:
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise AdapterError(f"{directory} has no {CONFIG_FILE}, so it is no PEFT adapter")
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise AdapterError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise AdapterError(f"{path}: expected a JSON object, found {type(values).__name__}")
    if values.get("peft_type") != "LORA":
        raise AdapterError(f"{path}: peft_type is {values.get('peft_type')!r}; ktft loads 'LORA' adapters")
    if values.get("lora_B_layout", "rank_major") != "rank_major":
        raise AdapterError(
            f"{path}: lora_B_layout {values['lora_B_layout']!r} orders the columns of fused expert tensors unlike PEFT; "
            "export the adapter again with lora_B_layout 'rank_major'"
        )
    if not values.get("target_modules") and not values.get("target_parameters"):
        raise AdapterError(
            f"{path} names neither target_modules nor target_parameters: what the adapter is for is unknown"
        )
    config = LoraConfig.from_pretrained(str(directory))
    assert isinstance(config, LoraConfig)
    try:
        check_config(config, may_name_parameters=True)
    except AdapterError as error:
        raise AdapterError(f"{path}: {error}") from None
    return config, values.get("peft_version")


def _training(metadata: Mapping[str, str], path: Path) -> dict[str, Any] | None:
    if METADATA_KEY not in metadata:
        return None
    try:
        value = json.loads(metadata[METADATA_KEY])
        number, training = value["format"], value["training"]
    except (ValueError, TypeError, KeyError) as error:
        raise AdapterError(f"{path}: the metadata {METADATA_KEY!r} is damaged: {error!r}") from None
    if number != METADATA_FORMAT or not isinstance(training, dict) or set(training) - set(TRAINING_FIELDS):
        raise AdapterError(
            f"{path} was written in adapter format {number!r} with {training!r:.200}; "
            f"this version reads format {METADATA_FORMAT} with the fields {sorted(TRAINING_FIELDS)}. Upgrade ktft."
        )
    return training


_KEY = re.compile(r"base_model\.model\.(?P<path>.+?)(?P<inner>\.base_layer)?\.lora_(?P<side>[AB])\.weight")
_EXPERT = re.compile(r"(?P<prefix>.+)\.(?P<expert>\d+)\.(?P<projection>[^.]+)")


def _assign(stored: StoredAdapter, modules: Mapping[str, nn.Module]) -> None:
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
            _place(stored.linears.setdefault(path, StoredLinear(modules[path])).keys, side, key, stored)  # type: ignore[arg-type]
            continue
        raise AdapterError(_unknown(key, path, stored, modules))


def _place(keys: dict[Any, str], place: Any, key: str, stored: StoredAdapter) -> None:
    if place in keys:
        raise AdapterError(
            f"{stored.directory / WEIGHTS_FILE}: tensors {keys[place]!r} and {key!r} are the same one twice"
        )
    keys[place] = key


def _place_fused(stored: StoredAdapter, module: CpuExperts, inner: bool, side: str, key: str) -> None:
    both = f"{PREFIX}{module_path(module)}.base_layer.lora_A.weight" in stored.tensors
    # The wrapper of the only parameter that is targeted has no inner one; which it is, the config alone knows.
    gate_up = inner or (not both and names_parameter(stored.config, parameter_name(module, GATE_UP)))
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


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_experts(entry: StoredExperts, stored: StoredAdapter) -> None:
    if entry.fused:
        _check_fused(entry, stored)
    else:
        _check_per_expert(entry, stored)


def _check_per_expert(entry: StoredExperts, stored: StoredAdapter) -> None:
    experts, names = entry.experts, entry.experts.names
    assert names is not None
    for slot in LORA_NAMES:
        projection = {"gate": names.gate, "up": names.up, "down": names.down}[slot[:-2]]
        for expert in range(experts.num_experts):
            if (slot, expert) not in entry.keys:
                key = f"{PREFIX}{names.disk}.{expert}.{projection}.lora_{slot[-1].upper()}.weight"
                raise AdapterError(f"{stored.directory / WEIGHTS_FILE}: tensor {key!r} is missing")
    entry.rank = entry.down_rank = stored.tensors[entry.keys["gate_a", 0]].shape[0]
    shapes = lora_shapes(experts.num_experts, experts.hidden_size, experts.intermediate_size, entry.rank)
    expected = dict(zip(LORA_NAMES, shapes, strict=True))
    for (slot, _), key in entry.keys.items():
        _check_tensor(stored, key, expected[slot][1:])
    config = stored.config
    gate_up, down = parameter_name(experts, GATE_UP), parameter_name(experts, DOWN)
    if names_parameter(config, gate_up) and names_parameter(config, down):
        entry.scaling = _scaling(stored, gate_up, 2 * entry.rank)
        entry.down_scaling = _scaling(stored, down, entry.rank)
        return
    # Written for transformers 4, where every expert had modules of its own.
    scalings: dict[str, set[float]] = {}
    for expert in range(experts.num_experts):
        for projection in (names.gate, names.up, names.down):
            module = f"{names.disk}.{expert}.{projection}"
            if not check_target_module_exists(config, module):
                raise AdapterError(
                    f"{stored.directory / CONFIG_FILE} targets neither {gate_up!r} nor {module!r}, but the file holds its tensors"
                )
            scalings.setdefault(projection, set()).add(_scaling(stored, module, entry.rank))
    if any(len(values) > 1 for values in scalings.values()) or scalings[names.gate] != scalings[names.up]:
        raise AdapterError(
            f"{stored.directory / CONFIG_FILE}: alpha_pattern scales the experts of {module_path(experts)!r} differently; "
            "ktft keeps one scaling for a layer"
        )
    entry.scaling, entry.down_scaling = scalings[names.gate].pop(), scalings[names.down].pop()


def _check_fused(entry: StoredExperts, stored: StoredAdapter) -> None:
    experts = entry.experts
    e, h, i = experts.num_experts, experts.hidden_size, experts.intermediate_size
    if any(expert is not None for _, expert in entry.keys):
        raise AdapterError(
            f"{stored.directory / WEIGHTS_FILE} holds {module_path(experts)!r} both fused and per expert"
        )
    _refuse_legacy(entry, stored)
    for part, parameter, inputs, outputs in (("gate", GATE_UP, h, 2 * i), ("down", DOWN, i, h)):
        sides = [side for side in "ab" if (f"{part}_{side}", None) in entry.keys]
        if not sides:
            continue  # not adapted: its factors are zero
        if len(sides) == 1:
            key = entry.keys[f"{part}_{sides[0]}", None]
            other = key.replace("lora_A", "lora_B") if sides == ["a"] else key.replace("lora_B", "lora_A")
            raise AdapterError(f"{stored.directory / WEIGHTS_FILE}: tensor {other!r} is missing")
        rank, _ = stock_rank_alpha(stored.config, parameter_name(experts, parameter))
        _check_tensor(stored, entry.keys[f"{part}_a", None], (rank * e, inputs))
        _check_tensor(stored, entry.keys[f"{part}_b", None], (outputs, rank * e))
        scaling = _scaling(stored, parameter_name(experts, parameter), rank)
        if part == "gate":
            entry.rank, entry.scaling = rank, scaling
        else:
            entry.down_rank, entry.down_scaling = rank, scaling
    if entry.rank == 0:
        entry.scaling = entry.down_scaling
    entry.rank = max(entry.rank, entry.down_rank)


def _refuse_legacy(entry: StoredExperts, stored: StoredAdapter) -> None:
    """PEFT before 0.19.1 wrote fused experts with in and out exchanged. The version in the config tells, or else the shapes."""
    h, i = entry.experts.hidden_size, entry.experts.intermediate_size
    # slot of A -> columns today, columns then
    columns = {"gate_a": (h, 2 * i), "down_a": (i, h)}
    held = {slot: stored.tensors[entry.keys[slot, None]].shape for slot in columns if (slot, None) in entry.keys}
    telling = {slot: shape for slot, shape in held.items() if columns[slot][0] != columns[slot][1]}
    if stored.peft_version is not None:
        try:
            legacy = Version(stored.peft_version.partition("@")[0]) < FIRST_PEFT_WITH_TODAYS_LAYOUT
        except InvalidVersion as error:
            raise AdapterError(f"{stored.directory / CONFIG_FILE}: peft_version: {error}") from None
        why = f"PEFT {stored.peft_version} wrote it"
    elif telling or not held:
        legacy = any(shape[1:] == (columns[slot][1],) for slot, shape in telling.items())
        why = f"tensors have the shapes {[list(shape) for shape in telling.values()]}"
    else:
        raise AdapterError(
            f"{stored.directory}: neither peft_version in {CONFIG_FILE} nor the shapes tell which layout the fused expert "
            f"tensors have; PEFT before {FIRST_PEFT_WITH_TODAYS_LAYOUT} exchanged in and out. If a newer PEFT wrote them, add "
            f"its version as 'peft_version' to {CONFIG_FILE}."
        )
    if legacy:
        raise AdapterError(
            f"{stored.directory} holds fused expert tensors with in and out exchanged, the layout of PEFT before "
            f"{FIRST_PEFT_WITH_TODAYS_LAYOUT} ({why}). Save it again with a newer PEFT."
        )


def _check_linear(name: str, linear: StoredLinear, stored: StoredAdapter) -> None:
    for side in "AB":
        if side not in linear.keys:
            raise AdapterError(
                f"{stored.directory / WEIGHTS_FILE}: tensor {f'{PREFIX}{name}.lora_{side}.weight'!r} is missing"
            )
    parameter = f"{name}.weight"
    target = parameter if names_parameter(stored.config, parameter) else name
    linear.rank = stored.tensors[linear.keys["A"]].shape[0] if stored.tensors[linear.keys["A"]].shape else 0
    _check_tensor(stored, linear.keys["A"], (linear.rank, linear.module.in_features))
    _check_tensor(stored, linear.keys["B"], (linear.module.out_features, linear.rank))
    linear.scaling = _scaling(stored, target, linear.rank)


def _check_tensor(stored: StoredAdapter, key: str, shape: tuple[int, ...]) -> None:
    tensor = stored.tensors[key]
    if tensor.shape != shape or tensor.dtype not in FLOATS:
        raise AdapterError(
            f"{stored.directory / WEIGHTS_FILE}: tensor {key!r} is {tensor.dtype} {list(tensor.shape)}; "
            f"expected {list(shape)} in one of {sorted(FLOATS)}"
        )


def _scaling(stored: StoredAdapter, name: str, rank: int) -> float:
    configured, alpha = stock_rank_alpha(stored.config, name)
    if configured != rank:
        raise AdapterError(
            f"{stored.directory}: {CONFIG_FILE} gives {name!r} rank {configured}, the tensors in {WEIGHTS_FILE} say {rank}; "
            "the two files do not belong together"
        )
    return alpha / (math.sqrt(rank) if stored.config.use_rslora else rank)


def _check_coverage(stored: StoredAdapter, modules: Mapping[str, nn.Module]) -> None:
    """What the config targets and what the file holds must be the same."""
    config = stored.config
    for name, module in modules.items():
        if isinstance(module, CpuExperts):
            held, targeted = name in stored.experts, _targets_experts(config, module)
        elif isinstance(module, nn.Linear):
            held = name in stored.linears
            targeted = names_parameter(config, f"{name}.weight") or bool(check_target_module_exists(config, name))
        else:
            continue
        if held != targeted:
            raise AdapterError(
                f"{stored.directory}: {CONFIG_FILE} {'targets' if targeted else 'does not target'} {name!r}, but "
                f"{WEIGHTS_FILE} holds {'its' if held else 'no'} tensors"
            )


def _targets_experts(config: LoraConfig, experts: CpuExperts) -> bool:
    names = experts.names
    assert names is not None
    return any(names_parameter(config, parameter_name(experts, parameter)) for parameter in (GATE_UP, DOWN)) or any(
        bool(check_target_module_exists(config, f"{names.disk}.0.{projection}"))
        for projection in (names.gate, names.up, names.down)
    )


# --- values -----------------------------------------------------------------------------------------------------------


def unpack_fused(a: torch.Tensor, b: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """PEFT's fused factors to stacks: A [r E, in] -> [E, r, in], B [out, r E] -> [E, out, r]. The delta of expert e is B[e] @ A[e]."""
    rank = a.shape[0] // num_experts
    return a.reshape(num_experts, rank, -1), b.reshape(b.shape[0], rank, num_experts).permute(2, 0, 1)


class AdapterTensors:
    """The tensors of a checked adapter, read one by one.

    Raises:
        AdapterError: a tensor is not finite.
    """

    def __init__(self, stored: StoredAdapter) -> None:
        self._stored = stored
        self._path = stored.directory / WEIGHTS_FILE

    def check_finite(self) -> None:
        """Read every tensor once; nothing is kept."""
        with safe_open(self._path, framework="pt") as file:
            for key in self._stored.tensors:
                if not torch.isfinite(file.get_tensor(key)).all():
                    raise AdapterError(f"{self._path}: tensor {key!r} holds NaN or infinity")

    @torch.no_grad()
    def copy_experts(self, entry: StoredExperts, factors: Mapping[str, torch.Tensor]) -> None:
        """Fill the six stacks (by slot) of one layer, in place."""
        experts = entry.experts
        # One scaling serves the layer; where the file scales down otherwise, its B carries the ratio.
        ratio = 1.0 if entry.down_scaling == entry.scaling else entry.down_scaling / entry.scaling
        with safe_open(self._path, framework="pt") as file:
            if not entry.fused:
                for (slot, expert), key in entry.keys.items():
                    tensor = file.get_tensor(key)
                    factors[slot][expert].copy_(tensor * ratio if slot == "down_b" and ratio != 1 else tensor)
                return
            for stack in factors.values():
                stack.zero_()  # a smaller rank, or a projection that is not adapted, is padded with zeros
            for part in ("gate", "up", "down"):
                if (f"{part}_a", None) not in entry.keys:
                    continue
                a, b = (file.get_tensor(entry.keys[f"{part}_{side}", None]) for side in "ab")
                a, b = unpack_fused(a, b, experts.num_experts)
                rank, i = a.shape[1], experts.intermediate_size
                if part != "down":
                    b = b[:, :i] if part == "gate" else b[:, i:]
                elif ratio != 1:
                    b = b * ratio
                factors[f"{part}_a"][:, :rank].copy_(a)
                factors[f"{part}_b"][:, :, :rank].copy_(b)

    @torch.no_grad()
    def copy_linear(self, linear: StoredLinear, a: torch.Tensor, b: torch.Tensor) -> None:
        """Fill A [r, in] and B [out, r] of one Linear, in place."""
        with safe_open(self._path, framework="pt") as file:
            a.copy_(file.get_tensor(linear.keys["A"]))
            b.copy_(file.get_tensor(linear.keys["B"]))


__all__ = [
    "CONFIG_FILE",
    "PREFIX",
    "WEIGHTS_FILE",
    "AdapterTensors",
    "StoredAdapter",
    "StoredExperts",
    "StoredLinear",
    "read_adapter",
    "refuse_model_directory",
    "unpack_fused",
    "write_adapter",
]
