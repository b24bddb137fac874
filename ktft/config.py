"""The recipe: what ``ktft train`` reads. YAML and ``key=value`` overrides in, one frozen :class:`Recipe` out.

Keys carry LLaMA-Factory's names and meanings, so that its LoRA recipes run here; the few keys of ktft's own are marked
below. A key that is unknown, of the wrong type, out of range, in conflict with another, or asks for something ktft
does not offer is a :class:`RecipeError` that names the key, the value and what would be valid. Nothing is guessed and
nothing is dropped: keys that are accepted but change nothing here come back as :attr:`Recipe.notices`, for the caller
to show.

Paths are relative to the working directory, as in LLaMA-Factory; ``~`` and environment variables are expanded in them,
and ``$KTFT_CACHE`` has the default ``$XDG_CACHE_HOME/ktft`` (``~/.cache/ktft``).

This module reads no model and no data, and imports no torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import shlex
import types
import typing
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml


class RecipeError(ValueError):
    """A recipe or an override that cannot be used, in one readable line."""


@dataclass(frozen=True)
class Recipe:
    """Everything one training run needs. Field names are the recipe's keys."""

    # model
    model_name_or_path: str
    """Directory, GGUF file or hub id of the base model."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    check_weights: bool = False
    """ktft's own. First read all of the base's experts, and refuse NaN codes and scales that are not finite."""
    bf16: bool = True
    """Compute in bf16 (False: in fp32). Adapters are fp32 either way."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """ktft's own. Where everything but the routed experts runs; auto takes CUDA when there is a GPU."""
    prepare: str | None = None
    """ktft's own. A Python program and its arguments that builds ``model_name_or_path`` when that is missing;
    it is run with ``--output <model_name_or_path>`` added."""

    # method
    stage: Literal["sft"] = "sft"
    """Supervised fine-tuning."""
    do_train: bool = True
    """False is refused: ``ktft train`` trains."""
    finetuning_type: Literal["lora"] = "lora"
    """LoRA adapters on a frozen base."""
    lora_rank: int = 8
    """Of every adapted module and of each routed expert's three matrices; at most 256."""
    lora_alpha: int | None = None
    """The scaling factor is alpha / rank. Default: twice the rank."""
    lora_dropout: float = 0.0
    """On the adapters' inputs, in training only."""
    lora_target: tuple[str, ...] = ("all",)
    """Module names, ``experts`` for every routed expert, or ``all``: every linear layer but the output layer, and the
    experts."""
    use_rslora: bool = False
    """Rank-stabilised LoRA: the scaling factor is alpha / √rank."""

    # data
    dataset: tuple[str, ...] = ()
    """Names in ``dataset_dir/dataset_info.json``, or .json/.jsonl files of chat messages; several are joined."""
    eval_dataset: tuple[str, ...] = ()
    """Held-out data, named likewise."""
    dataset_dir: str = "data"
    """Where ``dataset_info.json`` lies."""
    template: str | None = None
    """A ``.jinja`` file to use as chat template. Other names are LLaMA-Factory's own templates, which ktft does not
    have: the tokenizer's chat template is used, and a notice says so."""
    cutoff_len: int = 2048
    """Tokens of a sample. What is longer is cut at the end, and a sample that keeps nothing to learn is dropped; the
    run says how many."""
    max_samples: int | None = None
    """Take at most this many of each data set, from its beginning, held-out ones too."""
    val_size: float = 0.0
    """Held out of the training data: a count, or below 1 a fraction."""

    # training
    per_device_train_batch_size: int = 8
    """Samples in one forward and backward."""
    per_device_eval_batch_size: int = 8
    """The same for the held-out loss."""
    gradient_accumulation_steps: int = 1
    """Batches per optimizer step. The loss is the mean over all their answer tokens."""
    learning_rate: float = 5e-5
    """The highest, reached after warm-up."""
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    """linear and cosine fall to 0 at the last step."""
    warmup_ratio: float = 0.0
    """Part of the steps in which the learning rate rises from 0. Or give ``warmup_steps``."""
    warmup_steps: int = 0
    """The same as a number of steps."""
    num_train_epochs: float = 3.0
    """Passes over the training data; a fraction is allowed."""
    max_steps: int = -1
    """Optimizer steps; -1: by ``num_train_epochs``."""
    weight_decay: float = 0.0
    """Of AdamW."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm, taken over all adapters together. 0: no clipping."""
    adam_beta1: float = 0.9
    """Of AdamW."""
    adam_beta2: float = 0.999
    """Of AdamW."""
    adam_epsilon: float = 1e-8
    """Of AdamW."""
    seed: int = 42
    """Of the adapters' first values, the order of the data, dropout and the split of ``val_size``."""
    dataloader_num_workers: int = 0
    """Processes that put batches together; 0: the training process does it."""
    disable_gradient_checkpointing: bool = True
    """False: recompute activations in backward, which trades time for memory. (LLaMA-Factory's default is False.)"""

    # evaluation and output
    output_dir: str = ""
    """Where the adapter, the log, the summary and the checkpoints go; created if missing, refused if it has content and
    neither of the next two keys is set."""
    overwrite_output_dir: bool = False
    """Remove an earlier run's checkpoints and results from ``output_dir`` when training begins; other files stay."""
    resume_from_checkpoint: bool | str | None = None
    """True: the newest checkpoint in ``output_dir``; or a checkpoint's path. Keys that shape the training itself must
    be as they were; ``ktft.train.output.FREE_ON_RESUME`` lists those that may differ."""
    logging_steps: int = 10
    """Optimizer steps between two entries of ``log.jsonl``."""
    logging_first_step: bool = False
    """Log the first step as well."""
    save_steps: int = 500
    """Optimizer steps between two checkpoints."""
    save_strategy: Literal["steps", "epoch", "no"] = "steps"
    """When a checkpoint is written. The adapter itself is always saved at the end."""
    save_total_limit: int | None = None
    """Keep at most this many checkpoints, the newest."""
    save_only_model: bool = False
    """Checkpoints hold the adapter only and cannot be resumed from; the one that Ctrl-C writes is whole."""
    eval_steps: int | None = None
    """Optimizer steps between two computations of the held-out loss."""
    eval_strategy: Literal["steps", "epoch", "no"] | None = None
    """Default: ``steps`` when ``eval_steps`` is set, else once at the end."""
    plot_loss: bool = False
    """Draw ``loss.png``."""
    report_to: Literal["none"] = "none"
    """No tracking service is offered."""
    exact_match_samples: int = 0
    """ktft's own. Before and after training, answer this many held-out chats greedily and count the answers that are
    exactly right."""
    max_new_tokens: int = 128
    """Length limit of those answers."""

    # accepted so that LLaMA-Factory's recipes run
    preprocessing_num_workers: int | None = None
    """No effect: the data set is prepared in one process."""
    overwrite_cache: bool = False
    """No effect: prepared data is not cached."""
    ddp_timeout: int | None = None
    """No effect: a run is one process."""

    notices: tuple[str, ...] = field(default=(), metadata={"key": False})
    """Not a key: what the user should be told about keys that were accepted but change nothing."""

    def to_yaml(self) -> str:
        """The effective recipe; :func:`load_recipe` reads it back."""
        keys = {name: getattr(self, name) for name in KEYS}
        return yaml.safe_dump(
            {key: list(value) if isinstance(value, tuple) else value for key, value in keys.items()}, sort_keys=False
        )


KEYS = {f.name: f for f in dataclasses.fields(Recipe) if f.metadata.get("key", True)}
"""Every key of a recipe -> its dataclass field."""

_TYPES = typing.get_type_hints(Recipe)

NOT_OFFERED = {
    ("stage", value): "ktft trains stage: sft in this version" for value in ("pt", "rm", "ppo", "dpo", "kto", "grpo")
} | {
    (
        "finetuning_type",
        "full",
    ): "the routed experts are mapped from the checkpoint and frozen; use finetuning_type: lora",
    (
        "finetuning_type",
        "freeze",
    ): "the routed experts are mapped from the checkpoint and frozen; use finetuning_type: lora",
    ("finetuning_type", "oft"): "ktft trains LoRA adapters; use finetuning_type: lora",
}
"""(key, value) of LLaMA-Factory that ktft knows but does not do -> what to do instead."""

NOT_OFFERED_KEYS = {
    "deepspeed": "the experts need no sharding: they stay in RAM, shared by all ranks of a machine",
    "fsdp": "the experts need no sharding: they stay in RAM, shared by all ranks of a machine",
    "quantization_bit": "ktft computes with the weights as published",
    "adapter_name_or_path": "training starts from a new adapter; to go on with a run use resume_from_checkpoint",
    "use_dora": "only plain LoRA and rsLoRA",
    "packing": "samples are padded, not packed, in this version",
    "neat_packing": "samples are padded, not packed, in this version",
    "streaming": "the data set is read whole",
    "fp16": "compute in bf16 (bf16: true) or fp32 (bf16: false)",
    "pure_bf16": "adapters are fp32: bf16 ones stop learning when updates fall below their rounding; use bf16: true",
    "push_to_hub": "upload output_dir yourself; it is an ordinary PEFT adapter",
    "train_on_prompt": "the loss covers the assistant's turns only",
    "mask_history": "the loss covers all of the assistant's turns",
    "use_kt": "ktft always computes experts on the CPU; remove KTransformers' keys",
    "kt_optimize_rule": "ktft always computes experts on the CPU; remove KTransformers' keys",
}
"""Keys that are known elsewhere and refused here -> why, or what to do instead. A falsy value is accepted."""

ALREADY_SO: dict[str, tuple[Any, ...]] = {
    "do_eval": (True,),
    "do_predict": (False,),
    "predict_with_generate": (False,),
    "flash_attn": ("auto",),
    "optim": ("adamw_torch",),
    "include_num_input_tokens_seen": (True, False, "no", "non_padding"),
    "ignore_pad_token_for_loss": (True,),
    "disable_shuffling": (False,),
    "group_by_length": (False,),
    "load_best_model_at_end": (False,),
    "save_safetensors": (True,),
    "low_cpu_mem_usage": (True,),
    "use_unsloth": (False,),
    "ddp_find_unused_parameters": (False,),
}
"""Keys of LLaMA-Factory that are no keys here -> the values that say what ktft does anyway."""

NO_EFFECT_KEYS = {"cpu_infer": "the number of threads is that of torch, or the environment variable KTFT_THREADS"}
"""Keys of others that are accepted with any value -> what the notice says."""

_PATHS = ("model_name_or_path", "dataset_dir", "output_dir", "resume_from_checkpoint", "template")

_NO_EFFECT = {
    "preprocessing_num_workers": "the data set is prepared in one process",
    "overwrite_cache": "prepared data is not cached",
    "ddp_timeout": "this run is one process",
}

_RANGES: tuple[tuple[str, float, bool, float, str], ...] = (
    (
        "lora_rank cutoff_len per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps "
        "learning_rate num_train_epochs logging_steps save_steps eval_steps lora_alpha max_samples save_total_limit "
        "adam_epsilon max_new_tokens",
        *(0, False, math.inf, "more than 0"),
    ),
    (
        "val_size warmup_steps weight_decay max_grad_norm seed dataloader_num_workers exact_match_samples",
        *(0, True, math.inf, "0 or more"),
    ),
    ("lora_dropout warmup_ratio adam_beta1 adam_beta2", 0, True, 1, "at least 0 and below 1"),
)
"""(keys, low end, whether it is allowed, high end, which is not, the range in words)."""


def cache_dir() -> Path:
    """Where ktft keeps models it built: ``$KTFT_CACHE``, else ``$XDG_CACHE_HOME/ktft``, else ``~/.cache/ktft``."""
    if own := os.environ.get("KTFT_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ktft"


def expand_path(value: str) -> str:
    """``value`` with ``~`` and environment variables replaced.

    Raises:
        RecipeError: a variable is not set.
    """

    def replace(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name == "KTFT_CACHE":
            return str(cache_dir())
        if name not in os.environ:
            raise RecipeError(f"environment variable {name} in {value!r} is not set")
        return os.environ[name]

    return os.path.expanduser(re.sub(r"\$(?:(\w+)|\{(\w+)\})", replace, value))


def load_recipe(path: str | os.PathLike[str], overrides: list[str] | None = None) -> Recipe:
    """Read a recipe file and apply ``key=value`` overrides, whose values are YAML too.

    Raises:
        RecipeError: see the module's contract.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"cannot read recipe {os.fspath(path)}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"recipe {os.fspath(path)} is not UTF-8: {error.reason} at byte {error.start}") from None
    values = _yaml(text, f"recipe {os.fspath(path)}")
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise RecipeError(f"recipe {os.fspath(path)} must be a YAML mapping of keys to values")
    for override in overrides or []:
        key, equals, value = override.partition("=")
        if not equals:
            raise RecipeError(f"override {override!r} must have the form key=value")
        values[key.strip()] = _yaml(value, f"override {override!r}")
    return make_recipe(values)


def make_recipe(values: dict[str, Any]) -> Recipe:
    """A checked :class:`Recipe` from plain values.

    Raises:
        RecipeError: see the module's contract.
    """
    checked: dict[str, Any] = {}
    notices = []
    for key, value in values.items():
        if key in NOT_OFFERED_KEYS:
            if value:
                raise RecipeError(f"{key}: {value!r} is not offered: {NOT_OFFERED_KEYS[key]}")
            continue
        if key in ALREADY_SO:
            # 1 is no True here.
            if not any(type(value) is type(valid) and value == valid for valid in ALREADY_SO[key]):
                valid_text = " or ".join(yaml.safe_dump(valid).split()[0] for valid in ALREADY_SO[key])
                raise RecipeError(f"{key}: {value!r} is not offered; it may be {valid_text}, or be left out")
            continue
        if key in NO_EFFECT_KEYS:
            notices.append(f"{key}: no effect here, {NO_EFFECT_KEYS[key]}")
            continue
        if key not in KEYS:
            # A name that is only somewhat alike would mislead.
            near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.75)
            hint = f"; did you mean {near[0]!r}?" if near else f"; the keys are: {', '.join(sorted(KEYS))}"
            raise RecipeError(f"unknown recipe key {key!r}{hint}")
        if isinstance(value, str) and (key, value) in NOT_OFFERED:
            raise RecipeError(f"{key}: {value} is not offered: {NOT_OFFERED[key, value]}")
        checked[key] = _convert(key, value, _TYPES[key])
    for key in ("model_name_or_path", "dataset", "output_dir"):
        if not checked.get(key):
            raise RecipeError(f"the recipe needs {key}")
    for key in _PATHS:
        if isinstance(checked.get(key), str):
            checked[key] = expand_path(checked[key])
    for key in ("dataset", "eval_dataset"):
        checked[key] = tuple(expand_path(name) for name in checked.get(key, ()))
    if checked.get("prepare"):
        checked["prepare"] = shlex.join(expand_path(part) for part in _words("prepare", checked["prepare"]))
    recipe = Recipe(**checked)
    _check(recipe)
    notices += [f"{key}: no effect here, {why}" for key, why in _NO_EFFECT.items() if getattr(recipe, key)]
    if recipe.template is not None and not recipe.template.endswith(".jinja"):
        notices.append(f"template: {recipe.template}: not used, the tokenizer's own chat template is")
    return dataclasses.replace(recipe, notices=tuple(notices))


def _words(key: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise RecipeError(f"{key}: {text!r} is not a command line: {error}") from None


class _Loader(yaml.SafeLoader):
    """YAML as PyYAML reads it, but a key given twice is an error; PyYAML takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.value in seen:
                line = key_node.start_mark.line + 1
                raise yaml.YAMLError(f"key {key_node.value!r} is given twice, the second time in line {line}")
            seen.add(key_node.value if isinstance(key_node, yaml.ScalarNode) else id(key_node))
        return super().construct_mapping(node, deep)


def _yaml(text: str, what: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{what} is not valid YAML: {' '.join(str(error).split())}") from None


def _convert(key: str, value: Any, wanted: Any) -> Any:
    """``value`` as the type of field ``key``, or a RecipeError."""
    # `Literal[…] | None` is a typing.Union, `int | None` a types.UnionType.
    is_union = typing.get_origin(wanted) in (types.UnionType, typing.Union)
    options = typing.get_args(wanted) if is_union else (wanted,)
    for option in options:
        origin = typing.get_origin(option)
        if option is type(None):
            if value is None:
                return None
        elif origin is Literal:
            # YAML reads a bare `no` as False.
            word = "no" if value is False and "no" in typing.get_args(option) else value
            if isinstance(word, str) and word in typing.get_args(option):
                return word
        elif origin is tuple:
            parts = value.split(",") if isinstance(value, str) else value
            if isinstance(parts, list) and all(isinstance(part, str) for part in parts):
                return tuple(part.strip() for part in parts if part.strip())
        elif option is bool or option is str:
            if isinstance(value, option):
                return value
        elif option is int:
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        elif option is float:
            # PyYAML reads 1e-4, which has no dot, as text.
            if isinstance(value, int | float | str) and not isinstance(value, bool):
                try:
                    number = float(value)
                except ValueError:
                    continue
                if math.isfinite(number):
                    return number
        else:
            raise AssertionError(f"field {key} has type {option}, which _convert does not know")
    raise RecipeError(f"{key}: {value!r} is not valid; expected {' or '.join(_describe(option) for option in options)}")


def _describe(option: Any) -> str:
    origin = typing.get_origin(option)
    if origin is Literal:
        return "one of " + ", ".join(typing.get_args(option))
    if origin is tuple:
        return "a list of names"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}[option]


def _check(recipe: Recipe) -> None:
    """Ranges and conflicts."""
    for names, low, low_allowed, high, range_text in _RANGES:
        for key in names.split():
            number = getattr(recipe, key)
            if number is not None and not (low < number < high or (low_allowed and number == low)):
                raise RecipeError(f"{key}: {number!r} is out of range; it must be {range_text}")
    if recipe.lora_rank > 256:
        raise RecipeError(f"lora_rank: {recipe.lora_rank} is out of range; it must lie between 1 and 256")
    if recipe.max_steps != -1 and recipe.max_steps < 1:
        raise RecipeError(
            f"max_steps: {recipe.max_steps} is out of range; it must be 1 or more, or -1 for num_train_epochs"
        )
    if recipe.val_size > 1 and recipe.val_size != int(recipe.val_size):
        raise RecipeError(f"val_size: {recipe.val_size} must be a whole number of samples, or a fraction below 1")
    if not recipe.do_train:
        raise RecipeError("do_train: false is not offered: ktft train trains")

    def conflict(first: str, second: str, why: str) -> RecipeError:
        return RecipeError(f"{first}: {getattr(recipe, first)} and {second}: {getattr(recipe, second)} conflict: {why}")

    if recipe.eval_dataset and recipe.val_size:
        raise conflict("eval_dataset", "val_size", "name a held-out set or split one off, not both")
    if recipe.warmup_ratio and recipe.warmup_steps:
        raise conflict("warmup_ratio", "warmup_steps", "give one of them")
    for key in ("warmup_ratio", "warmup_steps"):
        if getattr(recipe, key) and recipe.lr_scheduler_type == "constant":
            raise conflict("lr_scheduler_type", key, "that schedule has no warm-up; use constant_with_warmup")
    if recipe.overwrite_output_dir and recipe.resume_from_checkpoint:
        raise conflict("overwrite_output_dir", "resume_from_checkpoint", "start afresh or go on, not both")
    has_eval = bool(recipe.eval_dataset or recipe.val_size)
    for key in ("eval_steps", "exact_match_samples"):
        if getattr(recipe, key) and not has_eval:
            raise RecipeError(f"{key}: {getattr(recipe, key)} needs held-out data; give eval_dataset or val_size")
    if recipe.eval_strategy in ("steps", "epoch") and not has_eval:
        raise RecipeError(f"eval_strategy: {recipe.eval_strategy} needs held-out data; give eval_dataset or val_size")
    if recipe.eval_strategy in ("epoch", "no") and recipe.eval_steps:
        raise conflict("eval_strategy", "eval_steps", "eval_steps is for eval_strategy: steps")
    if recipe.lora_target == () or ("all" in recipe.lora_target and len(recipe.lora_target) > 1):
        raise RecipeError(f"lora_target: {','.join(recipe.lora_target)!r} must be module names, or all alone")


__all__ = ["KEYS", "Recipe", "RecipeError", "cache_dir", "expand_path", "load_recipe", "make_recipe"]
