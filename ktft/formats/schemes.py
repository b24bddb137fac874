"""What a checkpoint's config says of how its matrices are stored: which encodings each module may have.

Read are ``quantization_config`` of ``config.json`` (``quant_method`` fp8, mxfp4, compressed-tensors, gptq, awq,
modelopt) and modelopt's ``hf_quant_config.json``. Activations are never quantised here, so what configs say of them
does not matter. What the tensors say is ``detection.py``'s.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ktft.formats.encoding import Encoding
from ktft.formats.fp4 import mxfp4, mxfp4_blocks, nvfp4_compressed, nvfp4_modelopt
from ktft.formats.fp8 import fp8_block, fp8_channel, fp8_tensor, mxfp8
from ktft.formats.gptq_awq import awq, gptq
from ktft.formats.integers import int8, int8_tensor, int_packed
from ktft.mapping import CheckpointError

Config = Mapping[str, Any]


class Patterns:
    """Modules by name, as the various configs list them.

    A name stands for the module itself, for everything inside it, and for every module whose name ends in it after a
    dot ("lm_head", "mlp.gate"); ``*`` stands for any characters; what follows ``re:`` is a regular expression that the
    beginning of a name has to match.
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        wild: list[str] = []
        names: set[str] = set()
        for pattern in patterns:
            if pattern.startswith("re:"):
                try:
                    re.compile(pattern[3:])
                except re.error as error:
                    raise CheckpointError(
                        f"the config's pattern {pattern!r} is no regular expression: {error}"
                    ) from None
                wild.append(f"(?:{pattern[3:]})")
            elif "*" in pattern:
                parts = ".*".join(re.escape(part) for part in pattern.split("*"))
                wild.append(rf"(?:{parts})(?:\.|$)")
            else:
                names.add(pattern)
        self.names = frozenset(names)
        self._wild = re.compile("|".join(wild)) if wild else None

    def __contains__(self, module: str) -> bool:
        dots = [index for index, character in enumerate(module) if character == "."]
        return (
            module in self.names
            or any(module[:dot] in self.names or module[dot + 1 :] in self.names for dot in dots)
            or (self._wild is not None and self._wild.match(module) is not None)
        )


@dataclass(frozen=True)
class Rule:
    """Encodings that some modules may have.

    Attributes:
        what: what the config says, for errors.
        encodings: the candidates.
        modules: which modules; None is all.
    """

    what: str
    encodings: tuple[Encoding, ...]
    modules: Patterns | None = None


@dataclass(frozen=True)
class Scheme:
    """What a config says of the whole checkpoint.

    Attributes:
        source: where it says so, for errors.
        rules: the first that covers a module holds for it.
        plain: modules that are not quantised.
    """

    source: str
    rules: tuple[Rule, ...]
    plain: Patterns

    def rule(self, module: str) -> Rule | None:
        return next((rule for rule in self.rules if rule.modules is None or module in rule.modules), None)


def quantization_config(config: Config) -> Config | None:
    """The ``quantization_config`` of a ``config.json``; models with several parts may have it with the text model's."""
    found = config.get("quantization_config")
    if found is None and isinstance(text := config.get("text_config"), Mapping):
        found = text.get("quantization_config")
    if found is not None and not isinstance(found, Mapping):
        raise CheckpointError(f"quantization_config: expected an object, found {found!r}")
    return found


def read_scheme(config: Config | None, hf_quant_config: Config | None = None) -> Scheme | None:
    """The scheme of a checkpoint; None if nothing is quantised.

    Args:
        config: ``quantization_config``, if there is one.
        hf_quant_config: the contents of modelopt's ``hf_quant_config.json``, if there is one.

    Raises:
        CheckpointError: the method is unknown, a setting of it is not supported, or the two contradict each other.
    """
    separate = None if hf_quant_config is None else hf_quant_config.get("quantization")
    if config is None:
        if not separate or not separate.get("quant_algo"):
            return None
        return _modelopt(separate, "hf_quant_config.json")
    if separate and separate.get("quant_algo") and config.get("quant_algo"):
        ours, theirs = config["quant_algo"], separate["quant_algo"]
        if ours != theirs:
            raise CheckpointError(
                f"quantization_config of config.json says quant_algo {ours!r}, hf_quant_config.json says {theirs!r}; "
                "expected the same"
            )
    method = config.get("quant_method")
    if method is None and (config.get("producer") or {}).get("name") == "modelopt":
        method = "modelopt"
    if method not in _METHODS:
        raise CheckpointError(
            f"quantization_config: quant_method {method!r} is not supported; supported are {', '.join(_METHODS)}"
        )
    if method == "modelopt" and not config.get("quant_algo") and separate:
        config = {**separate, **config, "quant_algo": separate.get("quant_algo")}
    return _METHODS[method](config, f"quantization_config (quant_method {method!r})")


def _not_converted(config: Config) -> Patterns:
    keys = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
    return Patterns(pattern for key in keys for pattern in config.get(key) or ())


def _refuse(source: str, key: str, found: object, expected: str) -> CheckpointError:
    return CheckpointError(f"{source}: {key} is {found!r}; expected {expected}")


# --- methods ----------------------------------------------------------------------------------------------------------


def _fp8(config: Config, source: str) -> Scheme:
    block = config.get("weight_block_size")
    fmt = config.get("fmt", "e4m3")
    if "e4m3" not in fmt:
        raise _refuse(source, "fmt", fmt, "e4m3")
    encodings: tuple[Encoding, ...]
    if block is None:
        encodings = (fp8_tensor(scale=".weight_scale_inv"), fp8_tensor(), fp8_channel())
        what = "fp8 without weight_block_size"
    elif isinstance(block, list | tuple) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block):
        size = (block[0], block[1])
        encodings = (
            fp8_block(size),
            fp8_block(size, "", "_scale_inv"),
            fp8_block(size, scale=".scale"),
            fp8_block(size, scale=".weight_scale"),
            # DeepSeek-V4's experts (expert_dtype fp4), which int8 codes tell from fp8.
            mxfp4(".weight", ".scale"),
            mxfp4(".weight", ".weight_scale_inv"),
            mxfp4("", "_scale_inv"),
        )
        what = f"fp8 with weight_block_size {list(block)}"
    else:
        raise _refuse(source, "weight_block_size", block, "two positive sizes")
    rule = Rule(what, encodings)
    if config.get("quantized_layers"):
        # modelopt on top of a checkpoint that was fp8 already: its own list is of modules left as they were, which is
        # fp8.
        plain = Patterns(config.get("modules_to_not_convert") or ())
        return Scheme(source, (*_modelopt_layers(config, source), rule), plain)
    return Scheme(source, (rule,), _not_converted(config))


def _mxfp4(config: Config, source: str) -> Scheme:
    return Scheme(source, (Rule("mxfp4", (mxfp4_blocks(),)),), _not_converted(config))


def _gptq(config: Config, source: str) -> Scheme:
    bits, group = config.get("bits"), config.get("group_size", 128)
    version = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    if bits != 4:
        raise _refuse(source, "bits", bits, "4")
    if version not in ("gptq", "gptq_v2"):
        raise _refuse(source, "checkpoint_format", version, "gptq or gptq_v2")
    special = list(config.get("dynamic") or ())  # "-:" before a pattern of modules left alone, "+:" of others' settings
    if any(not pattern.startswith("-:") for pattern in special):
        raise _refuse(source, "dynamic", special, "patterns of modules that are not quantised (-:) only")
    encoding = gptq(_group(source, group), 2 if version == "gptq_v2" else 1)
    if config.get("desc_act") and encoding.group:
        # Columns may be in any order: then the index has to be there, and its values are checked when it is read.
        tensors = tuple(replace(tensor, optional=False) for tensor in encoding.tensors)
        encoding = replace(encoding, tensors=tensors)
    plain = [*(config.get("modules_to_not_convert") or ()), *(f"re:{pattern[2:]}" for pattern in special)]
    return Scheme(source, (Rule(f"{version} with group_size {group}", (encoding,)),), Patterns(plain))


def _awq(config: Config, source: str) -> Scheme:
    bits, group = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size", 128))
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if bits != 4:
        raise _refuse(source, "bits", bits, "4")
    if version != "gemm":
        raise _refuse(source, "version", version, "gemm")
    if config.get("zero_point") is False:
        raise _refuse(source, "zero_point", False, "true")
    rule = Rule(f"awq with group_size {group}", (awq(_group(source, group)),))
    return Scheme(source, (rule,), _not_converted(config))


def _group(source: str, size: object) -> int:
    if size == -1:
        return 0
    if not isinstance(size, int) or size < 1:
        raise _refuse(source, "group_size", size, "a positive number, or -1 for a scale per row")
    return size


def _modelopt(config: Config, source: str) -> Scheme:
    algorithm = config.get("quant_algo")
    if algorithm == "MIXED_PRECISION":
        rules = _modelopt_layers(config, source)
    else:
        rules = [_modelopt_rule(source, config)]
    return Scheme(source, tuple(rules), _not_converted(config))


def _modelopt_layers(config: Config, source: str) -> list[Rule]:
    layers = config.get("quantized_layers")
    if not layers:
        raise _refuse(source, "quantized_layers", layers, "a list of modules, as quant_algo is MIXED_PRECISION")
    by_settings: dict[tuple[tuple[str, Any], ...], list[str]] = {}
    for module, settings in layers.items():
        by_settings.setdefault(tuple(sorted(settings.items())), []).append(module)
    return [replace(_modelopt_rule(source, dict(key)), modules=Patterns(names)) for key, names in by_settings.items()]


def _modelopt_rule(source: str, settings: Config) -> Rule:
    algorithm = settings.get("quant_algo")
    encodings = _MODELOPT.get(str(algorithm))
    if encodings is None:
        raise _refuse(source, "quant_algo", algorithm, ", ".join([*_MODELOPT, "MIXED_PRECISION"]))
    size = settings.get("group_size")
    if size is not None and encodings[0].group and size != encodings[0].group:
        raise _refuse(source, f"group_size of {algorithm}", size, str(encodings[0].group))
    return Rule(f"quant_algo {algorithm}", encodings)


_MODELOPT: dict[str, tuple[Encoding, ...]] = {
    "FP8": (fp8_tensor(),),
    "FP8_PER_CHANNEL_PER_TOKEN": (fp8_channel(),),
    "FP8_PB_WO": (fp8_block(scale=".weight_scale"), fp8_block()),
    "FP8_BLOCK_SCALES": (fp8_block(), fp8_block(scale=".weight_scale")),
    "MXFP8": (mxfp8(), mxfp8(scale=".weight_scale_inv")),
    "NVFP4": (nvfp4_modelopt(),),
    "W4A16_NVFP4": (nvfp4_modelopt(),),
}


def _compressed(config: Config, source: str) -> Scheme:
    by_name, by_class = [], []
    for name, group in (config.get("config_groups") or {}).items():
        if group.get("weights") is None:
            continue
        rule = _compressed_rule(f"{source}: config_groups.{name}", group, config.get("format"))
        # What has neither a dot nor re: before it is a class, of which names of tensors tell nothing.
        targets = group.get("targets") or ()
        names = [target for target in targets if target.startswith("re:") or "." in target]
        if names:
            by_name.append(replace(rule, modules=Patterns(names)))
        if len(names) < len(targets) or not targets:
            by_class.append(rule)
    if not by_name and not by_class:
        raise _refuse(source, "config_groups", config.get("config_groups"), "groups that quantise weights")
    return Scheme(source, (*by_name, *by_class), _not_converted(config))


def _compressed_rule(source: str, group: Config, default: str | None) -> Rule:
    weights: Config = group["weights"]
    layout = group.get("format") or default
    bits, kind, size = weights.get("num_bits", 8), weights.get("type", "int"), weights.get("group_size")
    strategy = weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if weights.get("symmetric", True) is not True:
        raise _refuse(source, "symmetric", weights["symmetric"], "true: zero points are not supported here")
    if weights.get("actorder") in ("group", "dynamic", True):
        raise _refuse(source, "actorder", weights["actorder"], "null or weight: act-order is not supported")
    what = f"{layout} of {bits} bits ({kind}, strategy {strategy}, group_size {size})"
    width = 0 if strategy == "channel" else _group(source, size) if strategy in ("group", "tensor_group") else None
    block = weights.get("block_structure")
    packed, plain = layout in ("pack-quantized", None), layout in ("int-quantized", "naive-quantized", None)
    floating = layout in ("float-quantized", "naive-quantized", None)
    candidates: dict[Encoding, bool] = {}
    if kind == "int" and bits in (4, 8) and width is not None:
        candidates = {int_packed(bits, width): packed, int8(width): plain and bits == 8}
    elif kind == "int" and bits == 8 and strategy == "tensor":
        candidates = {int8_tensor(): plain}
    elif kind == "float" and bits == 8:
        candidates = {
            mxfp8(): layout == "mxfp8-quantized" and width == 32,
            fp8_tensor(): floating and strategy == "tensor",
            fp8_channel(): floating and strategy == "channel",
        }
        if strategy == "block" and isinstance(block, list | tuple) and len(block) == 2:
            candidates[fp8_block((block[0], block[1]), scale=".weight_scale")] = floating
    elif kind == "float" and bits == 4:
        candidates = {
            nvfp4_compressed(): layout in ("nvfp4-pack-quantized", None) and width == 16,
            mxfp4(): layout in ("mxfp4-pack-quantized", None) and width == 32,
        }
    encodings = tuple(encoding for encoding, fits in candidates.items() if fits)
    if not encodings:
        raise CheckpointError(
            f"{source}: {what} is not supported; supported are pack-quantized int of 4 or 8 bits, int-quantized of 8, "
            "float-quantized of 8 (tensor, channel, block), mxfp8-quantized, nvfp4-pack-quantized, mxfp4-pack-quantized"
        )
    return Rule(what, encodings)


_METHODS: dict[str, Callable[[Config, str], Scheme]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "modelopt": _modelopt,
}

__all__ = ["Patterns", "Rule", "Scheme", "quantization_config", "read_scheme"]
