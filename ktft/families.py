"""What the installed transformers says about a model's experts, and whether ktft computes the same function.

There is no table of families. transformers marks every experts class that follows its experts contract with layout
attributes, and describes how published tensors become the model's parameters; from these come the experts modules,
their sizes, their names on disk, and which tensor is which expert's. A family is accepted when the stock class's own
eager forward, run at a tiny size on inputs of several magnitudes, equals :func:`ktft.reference.moe_experts` with one of
the activations that the class's attributes speak of, and so does its gate alone; otherwise it is refused before any
weight is read.

This is the one module that touches transformers' internals (written for >= 5.17, < 6); each touch says what it relies
on.
"""

from __future__ import annotations

import copy
import math
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ktft import reference
from ktft.activation import SWIGLU, Activation, clamped_swiglu
from ktft.checkpoint import CheckpointError, ExpertTensor, Part
from ktft.experts import CpuExperts, ExpertNames


class UnsupportedModelError(ValueError):
    """A model whose experts ktft cannot compute exactly, or that has none."""


@dataclass(frozen=True)
class ExpertsModule:
    """One experts module of the stock model: its class, sizes E, H, I, names, and function."""

    stock: type[nn.Module]
    num_experts: int
    hidden_size: int
    intermediate_size: int
    names: ExpertNames
    biased: bool
    activation: Activation


_LAYOUT = {"is_transposed", "is_concatenated", "has_bias", "has_gate"}
"""Attributes that transformers' ``use_experts_implementation`` sets on every instance of a class it decorates."""

_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
"""Names of the fused parameters in every experts class that follows the contract (with a gate)."""

_PARTS: dict[str, Part] = {
    _GATE_UP: "gate_up",
    _DOWN: "down",
    f"{_GATE_UP}_bias": "gate_up_bias",
    f"{_DOWN}_bias": "down_bias",
}
"""Those and, where the class says that it has them, their biases."""

_ALPHA, _LIMIT = ("alpha", "swiglu_alpha"), ("limit", "swiglu_limit")
"""What experts classes call the numbers of gpt-oss's activation."""


class _Difference(Exception):
    """Why the function of a stock experts module is not ktft's."""


_patch_lock = threading.Lock()
"""Held while the experts classes are replaced, and while a model is built that must not see that."""


def stock_model(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The stock model on the meta device: structure and shapes, no memory.

    Raises:
        UnsupportedModelError: transformers has no causal language model for this config.
    """
    try:
        with _patch_lock, torch.device("meta"):
            # from_config writes into the config it is given.
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), trust_remote_code=trust_remote_code
            )
    except ValueError as error:
        raise UnsupportedModelError(
            f"transformers builds no causal language model from a {config.model_type!r} config: {error}"
        ) from None
    return model


def experts_modules(model: PreTrainedModel) -> dict[str, ExpertsModule]:
    """The experts modules of a stock model, by module path, each checked to compute what ktft computes.

    Raises:
        UnsupportedModelError: there are none, or one computes something else; names family, class and reason.
    """
    family = model.config.model_type
    found = {name: module for name, module in model.named_modules() if vars(module).keys() >= _LAYOUT}
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} (model_type {family!r}) has no experts module that follows transformers' experts "
            "interface: it is not a Mixture-of-Experts model, or its experts are of a kind this version cannot run. "
            "Load it with transformers itself."
        )
    out = {}
    for name, module in found.items():
        stock, layout = type(module), vars(module)
        try:
            activation = _activation(module)  # of every instance: a config may set limits layer by layer
        except _Difference as difference:
            raise UnsupportedModelError(
                f"model family {family!r} is not supported: its experts class {stock.__name__} {difference}. "
                "ktft computes down(silu(gate(x)) * up(x)), or with gpt-oss's activation where the class has its alpha "
                "and limit as attributes, with or without biases, and would give wrong results."
            ) from None
        num_experts, a, b = module.get_parameter(_GATE_UP).shape
        transposed, interleaved = layout["is_transposed"], not layout["is_concatenated"]
        rows, hidden = (b, a) if transposed else (a, b)
        names = replace(_published_names(model, name), interleaved=interleaved, transposed=transposed)
        out[name] = ExpertsModule(stock, num_experts, hidden, rows // 2, names, layout["has_bias"], activation)
    return out


def _activation(module: nn.Module) -> Activation:
    """The activation with which a stock experts module (on meta) computes what ktft does.

    Raises:
        _Difference: there is none.
    """
    layout = vars(module)
    if not layout["has_gate"]:
        raise _Difference("has no gate projection")
    state = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    expected = {name for name, part in _PARTS.items() if layout["has_bias"] or not part.endswith("_bias")}
    if state != expected:
        raise _Difference(f"has the parameters {sorted(state)}, expected {' and '.join(sorted(expected))} only")
    errors = []
    for activation in _candidates(module):
        try:
            errors.append(_probe(module, activation))
        except Exception as failure:  # whatever a class does that the contract does not say, it is not ktft's function
            raise _Difference(
                f"cannot be called as transformers' experts interface says ({type(failure).__name__}: {failure})"
            ) from None
        # Some classes compute inside in fp32; rounding is then about 1e-6, while any other function differs by far
        # more.
        if errors[-1] <= 1e-5:
            return activation
    raise _Difference(
        f"computes another function (activation, clamping or combination): relative difference {min(errors):.2g}"
    )


def _candidates(module: nn.Module) -> list[Activation]:
    """The activations that a module's attributes speak of. Those with limits come first: the probe would not see one
    that lies beyond its inputs."""
    state = vars(module)
    alpha, limit = (next((state[name] for name in names if name in state), None) for names in (_ALPHA, _LIMIT))
    if isinstance(alpha, float | int) and isinstance(limit, float | int) and math.isfinite(alpha) and limit > 0:
        return [clamped_swiglu(alpha, limit), SWIGLU]
    return [SWIGLU]


def _probe(module: nn.Module, activation: Activation) -> float:
    """Largest difference between the stock module and the reference, relative to the largest output.

    Compared are the eager forward, and ``_apply_gate``, which transformers' other implementations of the experts
    (grouped_mm is its default) call where the eager forward may have code of its own. The module's Python state is kept
    as it is; its parameters are replaced by tiny random ones in float64.
    """
    experts, hidden, intermediate, tokens, top_k = 3, 6, 5, 16, 2
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    gate, up, down = (
        random(experts, intermediate, hidden),
        random(experts, intermediate, hidden),
        random(experts, hidden, intermediate),
    )
    tiny: Any = copy.copy(module)
    state = vars(tiny)
    biases = None
    if state["has_bias"]:
        biases = random(experts, intermediate), random(experts, intermediate), random(experts, hidden)

    def fused(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Gate and up [E, I, …], their rows arranged as the class has them."""
        return torch.cat([gate, up], dim=1) if state["is_concatenated"] else torch.stack([gate, up], 2).flatten(1, 2)

    stored = {_GATE_UP: fused(gate, up), _DOWN: down}
    if state["is_transposed"]:
        stored = {name: tensor.transpose(1, 2).contiguous() for name, tensor in stored.items()}
    if biases is not None:
        stored |= {f"{_GATE_UP}_bias": fused(biases[0], biases[1]), f"{_DOWN}_bias": biases[2]}
    state["_parameters"] = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in stored.items()}
    state["config"] = copy.deepcopy(state["config"])
    state["config"]._experts_implementation = "eager"
    sizes = {
        "num_experts": experts,
        "hidden_dim": hidden,
        "hidden_size": hidden,
        "intermediate_dim": intermediate,
        "intermediate_size": intermediate,
    }
    state.update({name: size for name, size in sizes.items() if name in state})
    worst = 0.0
    for scale in (0.01, 1.0, 100.0, 1e4):
        x = scale * random(tokens, hidden)
        index = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
        weights = random(tokens, top_k).abs()
        halves = scale * random(tokens, intermediate), scale * random(tokens, intermediate)
        with torch.no_grad():
            expected_out = reference.moe_experts(
                x, index, weights, gate, up, down, activation=activation, biases=biases
            )
            pairs = [
                (tiny(x.clone(), index, weights), expected_out),
                (tiny._apply_gate(fused(*halves)), reference.activate(activation, *halves)),
            ]
        for found, expected in pairs:
            if found.shape != expected.shape:
                return float("inf")
            worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
            if not worst < float("inf"):
                return float("inf")
    return worst


# --- names ------------------------------------------------------------------------------------------------------------


def _published_names(model: PreTrainedModel, module: str) -> ExpertNames:
    """What the family's published checkpoints call this module's experts.

    transformers' conversion mapping, read backwards, turns ``{module}.gate_up_proj`` into per-expert names with ``*``
    for the expert. A family that publishes fused tensors has no such names; then the module's path and gate_proj,
    up_proj, down_proj serve.
    """
    # PrefixChange and legacy renames describe old files, not how the family names its tensors today.
    transforms = [
        transform
        for transform in get_model_conversion_mapping(model, add_legacy=False)[::-1]
        if not isinstance(transform, PrefixChange)
    ]
    renamings = [t.reverse_transform() for t in transforms if isinstance(t, WeightRenaming)]
    found: list[str] = []
    for parameter in (_GATE_UP, _DOWN):
        for converter in transforms:
            if not isinstance(converter, WeightConverter) or not any(
                target.endswith(parameter) for target in converter.target_patterns
            ):
                continue
            backwards = converter.reverse_transform()
            first, matched = backwards.rename_source_key(f"{module}.{parameter}")
            if matched is None:
                continue
            for pattern in backwards.target_patterns:
                name = first.replace(backwards.target_patterns[0], pattern)
                for renaming in renamings:
                    name, _ = renaming.rename_source_key(name)
                found.append(name)
            break
    if len(found) != 3 or not all(name.count(".*.") == 1 for name in found):
        return ExpertNames(module, module)
    prefixes, matrices = zip(*(name.removesuffix(".weight").split(".*.") for name in found), strict=True)
    if len(set(prefixes)) != 1:
        raise UnsupportedModelError(f"{module}: gate, up and down lie under different prefixes on disk: {found}")
    return ExpertNames(module, prefixes[0], *matrices)


def expert_tensors(
    model: PreTrainedModel, modules: Iterable[str], keys: Iterable[str]
) -> dict[str, list[ExpertTensor]]:
    """Which tensors of a checkpoint hold the experts of each module.

    Args:
        model: the stock model on meta.
        modules: paths of its experts modules.
        keys: names of all tensors in the files.

    Raises:
        CheckpointError: a tensor under a module is not one that transformers' conversion makes into its experts.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict()
    out: dict[str, list[ExpertTensor]] = {name: [] for name in modules}
    # Some renamings (GroupWeightRename) depend on the order of keys; this is the loader's own order.
    for key in sorted(keys, key=dot_natural_key):
        renamed, _ = rename_source_key(key, renamings, [])
        target, pattern = rename_source_key(renamed, [], converters, model.base_model_prefix, state)
        if target not in state and key in state:
            target, pattern = key, None
        module, _, parameter = target.rpartition(".")
        if module in out and parameter in _PARTS and target in state:
            converter = None if pattern is None else by_pattern[pattern]
            found = _expert_tensor(key, renamed, parameter, converter, pattern)
            if found is not None:
                out[module].append(found)
                continue
        owner = _owner(target, out)
        if owner is not None:
            raise CheckpointError(
                f"tensor {key!r} lies under the experts {owner!r}, but {type(model).__name__} has no use for it: "
                f"expected {_GATE_UP} and {_DOWN}, fused or per expert"
            )
    return out


def _owner(target: str, modules: dict[str, list[ExpertTensor]]) -> str | None:
    """The experts module that a name lies under, if any."""
    parts = target.split(".")
    return next((name for n in range(1, len(parts)) if (name := ".".join(parts[:n])) in modules), None)


def _expert_tensor(
    key: str, renamed: str, parameter: str, converter: WeightConverter | None, pattern: str | None
) -> ExpertTensor | None:
    """What the tensor ``key`` is, by the operations of the converter that takes it in; None if they are unknown.

    ``renamed`` is the key after the renamings, which is what ``pattern`` matched.
    """
    operations = [] if converter is None else [type(operation) for operation in converter.operations]
    if converter is None or pattern is None or operations == [Transpose]:
        return ExpertTensor(key, _PARTS[parameter], None)
    number = re.search(pattern.replace("*.", r"(\d+)\."), renamed)
    # MergeModulelist stacks experts in the order of their numbers; Concatenate puts its first source, gate, first.
    if operations != ([MergeModulelist, Concatenate] if parameter == _GATE_UP else [MergeModulelist]) or number is None:
        return None
    part: Part = "down"
    if parameter == _GATE_UP:
        part = "gate" if converter.source_patterns.index(pattern) == 0 else "up"
    return ExpertTensor(key, part, int(number.group(1)))


# --- loading ----------------------------------------------------------------------------------------------------------


@contextmanager
def experts_replaced(model_class: type[PreTrainedModel], modules: dict[str, ExpertsModule]) -> Iterator[None]:
    """Within the block, transformers' ``from_pretrained`` builds :class:`CpuExperts` wherever the model has experts.

    The name of each stock experts class is bound to CpuExperts in transformers' modules, as its own ``apply_patches``
    does; that one is not used because it leaves the classes patched when construction raises, and because it looks into
    every lazy module, which up to 5.17 fails where an optional package (torchvision) is missing.
    The experts' tensors, which the loader then finds unexpected, are declared as such, so that it neither reads nor
    reports them; also without the base model's prefix, which a checkpoint of the base model lacks. All this is global
    to the process while the block runs, so blocks exclude each other.
    """
    stock = {module.stock.__name__: module.stock for module in modules.values()}
    base = f"{model_class.base_model_prefix}."
    with _patch_lock:
        bindings = [
            (python_module, name, original)
            for python_module in list(sys.modules.values())
            if isinstance(python_module, ModuleType) and python_module.__name__.startswith("transformers")
            for name, original in stock.items()
            if vars(python_module).get(name) is original
        ]
        own_ignored = "_keys_to_ignore_on_load_unexpected" in vars(model_class)
        ignored = model_class._keys_to_ignore_on_load_unexpected
        try:
            for python_module, name, _ in bindings:
                setattr(python_module, name, CpuExperts)
            model_class._keys_to_ignore_on_load_unexpected = [
                *(ignored or ()),
                *(f"^({re.escape(base)})?{re.escape(name.removeprefix(base))}\\." for name in modules),
            ]
            yield
        finally:
            for python_module, name, original in bindings:
                setattr(python_module, name, original)
            if own_ignored:
                model_class._keys_to_ignore_on_load_unexpected = ignored
            else:
                del model_class._keys_to_ignore_on_load_unexpected


__all__ = [
    "ExpertsModule",
    "UnsupportedModelError",
    "expert_tensors",
    "experts_modules",
    "experts_replaced",
    "stock_model",
]
