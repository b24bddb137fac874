"""What a LoraConfig may say to ktft, and the config that is written for stock PEFT.

Two forms of one adapter's config:

* the **training form**, what the user gave: ``target_modules`` names Linear modules and ``experts``, ranks and alphas
  are those of each projection, dropout as trained;
* the **stock form**, what ``adapter_config.json`` holds: transformers 5 has the experts as fused parameters, so gate
  and up together are one parameter of rank 2r, and modules whose names PEFT would take for old per-expert names are
  named as parameters.

Nothing here reads or writes files.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils.other import get_pattern_key
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers import PreTrainedModel

from ktft.adapters.values import AdapterError, check_values
from ktft.experts import CpuExperts
from ktft.lora import ExpertLora
from ktft.ops import MAX_RANK

ALL_LINEAR = "all-linear"

TRAINING_FIELDS = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "init_lora_weights",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
)
"""Fields that restore the training form; the rest is the same in both forms."""

_FREE = {
    *TRAINING_FIELDS,
    *(
        "task_type",
        "inference_mode",
        "base_model_name_or_path",
        "revision",
        "peft_type",
        "peft_version",
        "auto_mapping",
    ),
}
"""Fields of LoraConfig that may differ from their default."""

GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""transformers 5's names of the fused expert parameters."""


def parameter_name(experts: CpuExperts, parameter: str) -> str:
    """Where the stock model has one fused parameter of these experts, e.g. ``model.layers.0.mlp.experts.down_proj``."""
    return f"{module_path(experts)}.{parameter}"


def module_path(experts: CpuExperts) -> str:
    """The path of these experts in the model."""
    if experts.names is None:
        raise AdapterError("an experts module has no weights attached; load the model with ktft.load_model")
    return experts.names.module


# --- what can be adapted ----------------------------------------------------------------------------------------------


def module_name(name: str) -> str:
    """A path without what torch.compile puts into it."""
    return ".".join(part for part in name.split(".") if part != COMPILED)


COMPILED = "_orig_mod"
"""How torch.compile calls the module it wraps."""


def base_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module of the model under its path without adapters, the wrapped one where an adapter wraps it."""
    inside = None
    for name, module in model.named_modules():
        if inside is not None and name.startswith(inside):
            continue
        inside = None
        if isinstance(module, BaseTunerLayer):
            inside = name + "."
            yield module_name(name), module.get_base_layer()
        elif module_name(name):
            yield module_name(name), module


def adapter_layers(model: nn.Module, adapter_name: str) -> dict[str, LoraLayer]:
    """The layers that carry this adapter, by path."""
    return {
        module_name(name): module
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and adapter_name in module.lora_A
    }


def check_config(config: LoraConfig, *, may_name_parameters: bool = False) -> None:
    """Refuse what expert LoRA or its files cannot hold.

    Args:
        config: in the training form, or, with ``may_name_parameters``, in the stock form.

    Raises:
        AdapterError: names the field.
    """
    if not isinstance(config, LoraConfig) or config.peft_type != "LORA":
        raise AdapterError(f"ktft trains LoRA adapters; got {type(config).__name__}. Use peft.LoraConfig.")
    check_values({field.name: getattr(config, field.name) for field in dataclasses.fields(config)})
    if config.task_type not in (None, "CAUSAL_LM"):
        raise AdapterError(f"task_type is {config.task_type!r}; ktft adapts causal language models: 'CAUSAL_LM'")
    if config.init_lora_weights not in (True, False, "gaussian"):
        raise AdapterError(
            f"init_lora_weights={config.init_lora_weights!r} is not supported: it reads or changes base weights, and "
            "those of the experts are mapped. Use True or 'gaussian'."
        )
    defaults = LoraConfig()
    for field in dataclasses.fields(config):
        value, default = getattr(config, field.name), getattr(defaults, field.name)
        if field.name == "target_parameters" and may_name_parameters:
            continue
        if field.name not in _FREE and value != default and (value or default):
            raise AdapterError(
                f"LoraConfig.{field.name}={value!r} is not supported on a model with mapped experts; "
                f"leave it at {default!r}.{_ADVICE.get(field.name, '')}"
            )
    if not 0 <= config.lora_dropout < 1:
        raise AdapterError(f"lora_dropout={config.lora_dropout!r}; expected a number in [0, 1)")


_ADVICE = {
    "modules_to_save": " Train a Linear module with LoRA instead by naming it in target_modules, e.g. 'lm_head'.",
    "target_parameters": " Routed experts are named 'experts' in target_modules.",
}


def resolve_targets(config: LoraConfig, model: PreTrainedModel) -> None:
    """Check ``target_modules`` against the model, in place: ``all-linear`` becomes the list of what it means.

    "all-linear" is every Linear except the output embeddings, **and** the routed experts. Transformers' routers are
    not Linear modules and are left alone.

    Raises:
        AdapterError: a target matches nothing, or something that cannot be adapted, or only looks as if it named the
            experts.
    """
    modules = dict(base_modules(model))
    targets = config.target_modules
    if not targets:
        raise AdapterError(
            "target_modules is empty; name what to adapt, e.g. ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'experts'] "
            "or 'all-linear'"
        )
    if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
        head = model.get_output_embeddings()
        head = head.get_base_layer() if isinstance(head, BaseTunerLayer) else head
        targets = config.target_modules = {
            name
            for name, module in modules.items()
            if isinstance(module, CpuExperts) or (type(module) is nn.Linear and module is not head)
        }
    for name, module in modules.items():
        if check_target_module_exists(config, name) and not (
            isinstance(module, CpuExperts) or type(module) is nn.Linear
        ):
            raise AdapterError(
                f"target_modules {targets!r} names {name!r}, a {type(module).__name__}; Linear modules and routed "
                "experts can be adapted"
            )
        if isinstance(module, CpuExperts) and not check_target_module_exists(config, name):
            assert module.names is not None
            for projection in (module.names.gate, module.names.up, module.names.down, GATE_UP):
                if any(
                    check_target_module_exists(config, alias)
                    for alias in (
                        f"{name}.{projection}",
                        f"{name}.0.{projection}",
                        f"{module.names.disk}.0.{projection}",
                    )
                ):
                    raise AdapterError(
                        f"target {projection!r} names the routed experts of {name!r} too, but they are one module "
                        f"here: add 'experts' to adapt them, or write a longer name, e.g. 'mlp.{projection}' or "
                        f"'shared_experts.{projection}', to leave them out"
                    )
    _check_patterns(config, [name for name in modules if check_target_module_exists(config, name)])
    for name, module in modules.items():
        rank, _ = stock_rank_alpha(config, name)
        if isinstance(module, CpuExperts) and check_target_module_exists(config, name) and not 1 <= rank <= MAX_RANK:
            raise AdapterError(f"{name!r} would get rank {rank}; routed experts can have ranks 1 to {MAX_RANK}")
    if not isinstance(targets, str):
        unmatched = sorted(t for t in targets if not any(n == t or n.endswith(f".{t}") for n in modules))
        if unmatched:
            leaves = sorted({n.rpartition(".")[2] for n, m in modules.items() if isinstance(m, nn.Linear | CpuExperts)})
            raise AdapterError(f"target_modules {unmatched} match no module of this model; it has {leaves}")


def _check_patterns(config: LoraConfig, targets: Sequence[str]) -> None:
    """A pattern that PEFT would ignore with a warning is an error."""
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, field) or {}:
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in targets):
                leaves = sorted({name.rpartition(".")[2] for name in targets})
                raise AdapterError(f"{field} {pattern!r} matches no adapted module; adapted are {leaves}")


# --- the stock form ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """What the stock config names, a module or a parameter, with the rank and alpha it shall get there."""

    path: str
    parameter: bool
    rank: int
    alpha: float


def stock_config(config: LoraConfig, model: PreTrainedModel, adapter_name: str) -> LoraConfig:
    """The config under which stock PEFT and transformers 5 apply this adapter's per-expert tensors to the stock model.

    The global ``r`` and ``lora_alpha`` are those of the experts, because tools that know per-expert tensors only read
    those.

    Raises:
        AdapterError: an adapter layer is scaled (``scale_layer``) away from its alpha.
    """
    targets: list[Target] = []
    experts: Target | None = None
    aliased: dict[str, bool] = {}
    for path, layer in adapter_layers(model, adapter_name).items():
        rank, alpha = layer.r[adapter_name], layer.lora_alpha[adapter_name]
        expected = alpha / (math.sqrt(rank) if config.use_rslora else rank)
        if not math.isclose(layer.scaling[adapter_name], expected, rel_tol=1e-9):
            raise AdapterError(
                f"{path}: adapter {adapter_name!r} is scaled by {layer.scaling[adapter_name]}, but its alpha {alpha} "
                f"and rank {rank} say {expected}; a file cannot hold that. Call unscale_layer() before saving."
            )
        if isinstance(layer, ExpertLora):
            # A and B of gate and up become block diagonal: rank 2r, and alpha such that the scaling stays what it was.
            doubled = alpha * math.sqrt(2) if config.use_rslora else alpha * 2
            experts = Target(parameter_name(layer.base_layer, DOWN), True, rank, alpha)
            targets += [Target(parameter_name(layer.base_layer, GATE_UP), True, 2 * rank, doubled), experts]
        else:
            suffix = _suffix(path)
            if suffix not in aliased:
                aliased[suffix] = _is_aliased(suffix, model)
            targets.append(
                Target(f"{path}.weight", True, rank, alpha) if aliased[suffix] else Target(path, False, rank, alpha)
            )
    first = experts or targets[0]
    universe = [name for name, _ in base_modules(model)]
    parameters = [f"{name}.weight" for name, module in base_modules(model) if isinstance(module, nn.Linear)]
    for _, module in base_modules(model):
        if isinstance(module, CpuExperts):
            parameters += [parameter_name(module, GATE_UP), parameter_name(module, DOWN)]
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    names: dict[bool, list[str]] = {False: [], True: []}
    for parameter, everything in ((False, universe), (True, parameters)):
        for name, group in _shorten([t for t in targets if t.parameter is parameter], everything):
            names[parameter].append(name)
            for pattern, target in _patterns(name, group):
                if target.rank != first.rank:
                    rank_pattern[pattern] = target.rank
                if target.alpha != first.alpha:
                    alpha_pattern[pattern] = target.alpha
    return LoraConfig(
        r=first.rank,
        lora_alpha=first.alpha,  # type: ignore[arg-type]
        target_modules=sorted(names[False]),
        target_parameters=sorted(names[True]) or None,
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        lora_dropout=0.0,  # stock PEFT refuses any other for parameters
        use_rslora=config.use_rslora,
        task_type="CAUSAL_LM",
        base_model_name_or_path=config.base_model_name_or_path,
        revision=config.revision,
        inference_mode=True,
    )


def _is_aliased(path: str, model: PreTrainedModel) -> bool:
    """Whether PEFT takes this module's name for an old name of routed experts; asked of PEFT itself."""
    trial = LoraConfig(target_modules=[path])
    try:
        convert_peft_config_for_transformers(trial, model=model, conversions=None)
    except ValueError:  # it wants gate and up together: it has recognised one of them
        return True
    return path not in (trial.target_modules or ())


def _suffix(path: str) -> str:
    """What follows the layer number: ``model.layers.3.self_attn.q_proj`` -> ``self_attn.q_proj``."""
    parts = path.split(".")
    numbers = [position for position, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[-1] + 1 :]) if numbers else path


def _shorten(targets: Sequence[Target], universe: Iterable[str]) -> Iterator[tuple[str, list[Target]]]:
    """Name the targets by suffix where the suffix means exactly them, by full path elsewhere."""
    groups: dict[str, list[Target]] = {}
    for target in targets:
        groups.setdefault(_suffix(target.path), []).append(target)
    everything = list(universe)
    for suffix, group in groups.items():
        meant = {path for path in everything if path == suffix or path.endswith(f".{suffix}")}
        if meant == {target.path for target in group}:
            yield suffix, group
        else:
            yield from ((target.path, [target]) for target in group)


def _patterns(name: str, group: Sequence[Target]) -> list[tuple[str, Target]]:
    """Regular expressions, as PEFT matches them, that give each target its own rank and alpha."""
    if len({(target.rank, target.alpha) for target in group}) > 1:
        return [(re.escape(target.path), target) for target in group]
    if name.endswith(f".{GATE_UP}") and len(group) > 1:
        return [(rf".*\.{GATE_UP}", group[0])]
    return [(re.escape(name), group[0])]


def stock_rank_alpha(config: LoraConfig, name: str) -> tuple[int, float]:
    """The rank and alpha that a stock config gives a module or parameter; PEFT's own matching."""
    ranks, alphas = config.rank_pattern or {}, config.alpha_pattern or {}
    rank = ranks.get(get_pattern_key(ranks.keys(), name), config.r)
    return rank, alphas.get(get_pattern_key(alphas.keys(), name), config.lora_alpha)


def names_parameter(config: LoraConfig, name: str) -> bool:
    """Whether ``target_parameters`` names this parameter; PEFT's own matching."""
    return any(name == target or name.endswith(f".{target}") for target in config.target_parameters or ())


def training_fields(config: LoraConfig) -> dict[str, Any]:
    """The training form as JSON values."""
    values = {name: getattr(config, name) for name in TRAINING_FIELDS}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}


__all__ = [
    "ALL_LINEAR",
    "COMPILED",
    "DOWN",
    "GATE_UP",
    "TRAINING_FIELDS",
    "AdapterError",
    "Target",
    "adapter_layers",
    "base_modules",
    "check_config",
    "module_name",
    "module_path",
    "names_parameter",
    "parameter_name",
    "resolve_targets",
    "stock_config",
    "stock_rank_alpha",
    "training_fields",
]
