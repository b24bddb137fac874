"""Checks of an adapter file against its config and a model, before any value is read.

Every adapted layer must be whole, every tensor of the expected shape and a float, ranks and scalings must agree with
the config, and what the config targets must be what the file holds. Ranks and scalings found are filled into the
:class:`~ktft.adapters.layout.StoredAdapter`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from packaging.version import InvalidVersion, Version
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn

from ktft.adapters.config import (
    DOWN,
    GATE_UP,
    AdapterError,
    module_path,
    names_parameter,
    parameter_name,
    stock_rank_alpha,
)
from ktft.adapters.layout import CONFIG_FILE, PREFIX, WEIGHTS_FILE, StoredAdapter, StoredExperts, StoredLinear
from ktft.experts import CpuExperts
from ktft.weights import LORA_NAMES, lora_shapes

FLOATS = {"F32", "F16", "BF16"}
FIRST_PEFT_WITH_TODAYS_LAYOUT = Version("0.19.1")
PEFT_THAT_EXCHANGED_TRANSPOSED = Version("0.19.0")


def check(stored: StoredAdapter, modules: Mapping[str, nn.Module]) -> None:
    """All of them; ``modules`` are the model's, by path without adapters.

    Raises:
        AdapterError: names the file and the tensor or key.
    """
    for experts in stored.experts.values():
        _check_experts(experts, stored)
    for name, linear in stored.linears.items():
        _check_linear(name, linear, stored)
    _check_coverage(stored, modules)
    if not stored.tensors:
        raise AdapterError(f"{stored.directory / WEIGHTS_FILE} holds no tensor")


def _check_experts(entry: StoredExperts, stored: StoredAdapter) -> None:
    if entry.fused:
        _check_fused(entry, stored)
    else:
        _check_per_expert(entry, stored)
    if entry.scaling == 0 != entry.down_scaling:
        raise AdapterError(
            f"{stored.directory / CONFIG_FILE} gives {module_path(entry.experts)!r} alpha 0 for gate and up, another "
            "for down; ktft keeps one scaling for a layer. Leave gate_up_proj out of the adapter instead"
        )


def _check_per_expert(entry: StoredExperts, stored: StoredAdapter) -> None:
    experts, names = entry.experts, entry.experts.names
    assert names is not None
    for slot in LORA_NAMES:
        projection = {"gate": names.gate, "up": names.up, "down": names.down}[slot[:-2]]
        for expert in range(experts.num_experts):
            if (slot, expert) not in entry.keys:
                key = f"{PREFIX}{names.disk}.{expert}.{projection}.lora_{slot[-1].upper()}.weight"
                raise AdapterError(f"{stored.directory / WEIGHTS_FILE}: tensor {key!r} is missing")
    entry.rank = entry.down_rank = _rank(stored, entry.keys["gate_a", 0])
    shapes = lora_shapes(experts.num_experts, experts.hidden_size, experts.intermediate_size, entry.rank)
    expected = dict(zip(LORA_NAMES, shapes, strict=True))
    for (slot, _), key in entry.keys.items():
        _check_tensor(stored, key, expected[slot][1:])
    config = stored.config
    gate_up, down = parameter_name(experts, GATE_UP), parameter_name(experts, DOWN)
    if names_parameter(config, gate_up) and names_parameter(config, down):
        entry.scaling = _scaling(stored, gate_up, 2 * entry.rank, f"gate and up with {entry.rank} rows of A each")
        entry.down_scaling = _scaling(stored, down, entry.rank)
        return
    # Written for transformers 4, where every expert had modules of its own.
    scalings: dict[str, set[float]] = {}
    for expert in range(experts.num_experts):
        for projection in (names.gate, names.up, names.down):
            module = f"{names.disk}.{expert}.{projection}"
            if not check_target_module_exists(config, module):
                raise AdapterError(
                    f"{stored.directory / CONFIG_FILE} targets neither {gate_up!r} nor {module!r}, but the file holds "
                    "its tensors"
                )
            scalings.setdefault(projection, set()).add(_scaling(stored, module, entry.rank))
    if any(len(values) > 1 for values in scalings.values()) or scalings[names.gate] != scalings[names.up]:
        raise AdapterError(
            f"{stored.directory / CONFIG_FILE}: alpha_pattern scales the experts of {module_path(experts)!r} "
            "differently; ktft keeps one scaling for a layer"
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
        name = parameter_name(experts, parameter)
        targeted = names_parameter(stored.config, name)
        inner = ".base_layer" if parameter == GATE_UP and any(slot.startswith("down") for slot, _ in entry.keys) else ""
        for side in "ab":
            if targeted and (f"{part}_{side}", None) not in entry.keys:
                key = f"{PREFIX}{module_path(experts)}{inner}.lora_{side.upper()}.weight"
                raise AdapterError(f"{stored.directory / WEIGHTS_FILE}: tensor {key!r} of {parameter!r} is missing")
        if not targeted and (f"{part}_a", None) in entry.keys:
            raise AdapterError(
                f"{stored.directory / CONFIG_FILE} does not target {name!r}, but {WEIGHTS_FILE} holds "
                f"{entry.keys[f'{part}_a', None]!r}"
            )
        if not targeted:
            continue  # its factors are zero
        rank, _ = stock_rank_alpha(stored.config, name)
        _check_tensor(stored, entry.keys[f"{part}_a", None], (rank * e, inputs))
        _check_tensor(stored, entry.keys[f"{part}_b", None], (outputs, rank * e))
        scaling = _scaling(stored, name, rank)
        if part == "gate":
            entry.rank, entry.scaling = rank, scaling
        else:
            entry.down_rank, entry.down_scaling = rank, scaling
    if stored.training is not None:
        # ktft's own fused file: gate and up are the two halves of one block-diagonal pair.
        if not entry.rank or entry.rank != 2 * entry.down_rank:
            raise AdapterError(
                f"{stored.directory / WEIGHTS_FILE} says that ktft wrote it, but {module_path(experts)!r} has ranks "
                f"{entry.rank} (gate and up together) and {entry.down_rank} (down); expected twice the second"
            )
        # alpha stands for both halves: 2 alpha / 2r, and with rsLoRA sqrt 2 alpha / sqrt 2r, are those of each
        entry.block_diagonal, entry.rank = True, entry.down_rank
        return
    if entry.rank == 0:
        entry.scaling = entry.down_scaling
    if entry.down_rank == 0:
        entry.down_scaling = entry.scaling
    entry.rank = max(entry.rank, entry.down_rank)


def _refuse_legacy(entry: StoredExperts, stored: StoredAdapter) -> None:
    """PEFT before 0.19.1 wrote fused experts with in and out exchanged; of parameters [E, in, out] only 0.19.0 did. The
    version tells, or else the shapes."""
    names = entry.experts.names
    assert names is not None
    exchanged = f"PEFT before {FIRST_PEFT_WITH_TODAYS_LAYOUT}"
    if names.transposed:
        exchanged = f"PEFT {PEFT_THAT_EXCHANGED_TRANSPOSED}"
    h, i = entry.experts.hidden_size, entry.experts.intermediate_size
    # slot of A -> columns today, columns then
    columns = {"gate_a": (h, 2 * i), "down_a": (i, h)}
    held = {slot: stored.tensors[entry.keys[slot, None]].shape for slot in columns if (slot, None) in entry.keys}
    telling = {slot: shape for slot, shape in held.items() if columns[slot][0] != columns[slot][1]}
    if stored.peft_version is not None:
        try:
            version = Version(stored.peft_version.partition("@")[0])
        except InvalidVersion as error:
            raise AdapterError(f"{stored.directory / CONFIG_FILE}: peft_version: {error}") from None
        if names.transposed:
            legacy = version == PEFT_THAT_EXCHANGED_TRANSPOSED
        else:
            legacy = version < FIRST_PEFT_WITH_TODAYS_LAYOUT
        why = f"PEFT {stored.peft_version} wrote it"
    elif telling or not held:
        legacy = any(shape[1:] == (columns[slot][1],) for slot, shape in telling.items())
        why = f"tensors have the shapes {[list(shape) for shape in telling.values()]}"
    else:
        raise AdapterError(
            f"{stored.directory}: neither peft_version in {CONFIG_FILE} nor the shapes tell which layout the fused "
            f"expert tensors have; {exchanged} exchanged in and out. If another PEFT wrote them, add its version as "
            f"'peft_version' to {CONFIG_FILE}."
        )
    if legacy:
        raise AdapterError(
            f"{stored.directory} holds fused expert tensors with in and out exchanged, the layout of {exchanged} "
            f"({why}). Save it again with a newer PEFT."
        )


def _check_linear(name: str, linear: StoredLinear, stored: StoredAdapter) -> None:
    for side in "AB":
        if side not in linear.keys:
            raise AdapterError(
                f"{stored.directory / WEIGHTS_FILE}: tensor {f'{PREFIX}{name}.lora_{side}.weight'!r} is missing"
            )
    parameter = f"{name}.weight"
    target = parameter if names_parameter(stored.config, parameter) else name
    linear.rank = _rank(stored, linear.keys["A"])
    _check_tensor(stored, linear.keys["A"], (linear.rank, linear.module.in_features))
    _check_tensor(stored, linear.keys["B"], (linear.module.out_features, linear.rank))
    linear.scaling = _scaling(stored, target, linear.rank)


def _rank(stored: StoredAdapter, key: str) -> int:
    """What a tensor A [r, in] says, itself not checked yet."""
    tensor = stored.tensors[key]
    if len(tensor.shape) != 2:
        raise AdapterError(
            f"{stored.directory / WEIGHTS_FILE}: tensor {key!r} is {tensor.dtype} {list(tensor.shape)}; expected "
            "[rank, inputs]"
        )
    return tensor.shape[0]


def _check_tensor(stored: StoredAdapter, key: str, shape: tuple[int, ...]) -> None:
    tensor = stored.tensors[key]
    if tensor.shape != shape or tensor.dtype not in FLOATS:
        raise AdapterError(
            f"{stored.directory / WEIGHTS_FILE}: tensor {key!r} is {tensor.dtype} {list(tensor.shape)}; "
            f"expected {list(shape)} in one of {sorted(FLOATS)}"
        )


def _scaling(stored: StoredAdapter, name: str, rank: int, why: str = "") -> float:
    configured, alpha = stock_rank_alpha(stored.config, name)
    if rank < 1:
        raise AdapterError(f"{stored.directory}: the tensors of {name!r} in {WEIGHTS_FILE} have rank {rank}")
    if configured != rank:
        raise AdapterError(
            f"{stored.directory}: {CONFIG_FILE} gives {name!r} rank {configured}, the tensors in {WEIGHTS_FILE} say "
            f"{rank}{f' ({why})' if why else ''}; the two files do not belong together"
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


__all__ = ["check"]
