"""``load_model``: a stock Hugging Face model whose routed experts are mapped from the checkpoint.

Everything but the experts is built, read, renamed, tied and placed by transformers' own ``from_pretrained``; each
experts module is a :class:`~ktft.experts.CpuExperts` pointing into the files. Of a quantised checkpoint the experts
stay as they are, and everything else is decoded to the model's dtype as it is loaded (``decoding.py``), so that the
model is a plain one but for its experts.
"""

from __future__ import annotations

import copy
import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from ktft import decoding, families, gguf_families
from ktft.checkpoint import (
    INDEX_FILE,
    SINGLE_FILE,
    Checkpoint,
    CheckpointError,
    ExpertTensor,
    read_config,
    refuse_methods,
    weight_files,
)
from ktft.experts import CpuExperts
from ktft.gguf_checkpoint import GgufCheckpoint
from ktft.gguf_file import find_gguf, read_gguf
from ktft.weights import ExpertWeights


def load_model(
    path_or_hub_id: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    recompute: bool = False,
    trust_remote_code: bool = False,
    check_weights: bool = False,
) -> PreTrainedModel:
    """Load a Mixture-of-Experts causal language model for training or inference, its routed experts on the CPU.

    Args:
        path_or_hub_id: a directory with ``config.json`` and safetensors files, a GGUF file or a directory with one,
            or a Hugging Face hub id. Of what lies beside a GGUF file, ``config.json``, ``generation_config.json`` and
            the tokenizer's files are used, in place of its metadata.
        device: where everything but the routed experts goes; default the CPU, whatever torch's default device is.
        dtype: of everything but the routed experts, which stay as published; default what the checkpoint says, and of
            a quantised one that says nothing, bfloat16.
        revision: branch, tag or commit of a hub id.
        recompute: backward computes the experts' gate and up again instead of keeping 2·S·I values per layer.
        trust_remote_code: allow the checkpoint to bring its own Python code.
        check_weights: first read all of the experts and everything quantised, and refuse NaN codes and scales that are
            not finite. Names, dtypes and shapes are checked in any case.

    Returns:
        The stock model class, in eval mode.

    Raises:
        UnsupportedModelError: ktft cannot compute this family's experts exactly; raised before weights are read.
        CheckpointError: a file or tensor is missing, damaged or misshapen, or changed while it was read; the checkpoint
            is quantised in a way that ktft does not read, or its config and its tensors contradict each other; or the
            directory tells transformers to read other files than the experts' (``transformers_weights``, an adapter).
        ValueError: the path or hub id leads nowhere.
    """
    # transformers would load onto torch's default device; the probe and the experts are on the CPU in any case.
    with torch.device("cpu"):
        path = _resolve(path_or_hub_id, revision, trust_remote_code)
        hub_id = None if os.path.exists(path_or_hub_id) else os.fspath(path_or_hub_id)
        target = torch.device(device or "cpu")
        opened = _open_gguf(path, trust_remote_code) if path.is_file() else _open(path, hub_id, trust_remote_code)
        model = _load(opened, target, dtype, recompute, trust_remote_code, check_weights)
    model.config._name_or_path = model.name_or_path = os.fspath(path_or_hub_id)
    if hub_id is not None:
        model.config._commit_hash = path.name  # a snapshot's folder is called by its commit; adapters record it
    return model


@dataclass(frozen=True)
class _Opened:
    """A checkpoint, and what transformers makes of its config.

    Attributes:
        stock: the stock model on meta.
        modules: its experts modules, by path.
        experts: their tensors.
        origins: what every other parameter is made of; see :func:`ktft.decoding.state_dict`.
    """

    checkpoint: Checkpoint
    config: PreTrainedConfig
    stock: PreTrainedModel
    modules: dict[str, families.ExpertsModule]
    experts: dict[str, list[ExpertTensor]]
    origins: Mapping[str, decoding.Origin | None]


def _open(directory: Path, hub_id: str | None, trust_remote_code: bool) -> _Opened:
    """A directory of safetensors files."""
    outline = read_outline(directory, trust_remote_code=trust_remote_code)
    if hub_id is not None:  # only now: nobody wants to wait for the weights of a model that is then refused
        _download_weights(hub_id, directory)
    checkpoint = Checkpoint(directory, outline.config_file)
    experts = families.expert_tensors(outline.stock, outline.modules, checkpoint.parameters)
    inside = {tensor.key for found in experts.values() for tensor in found}
    others = {name: None for name in checkpoint.parameters if name not in inside}
    return _Opened(checkpoint, outline.config, outline.stock, outline.modules, experts, others)


def _open_gguf(path: Path, trust_remote_code: bool) -> _Opened:
    """A GGUF file, of several parts the first."""
    model = read_gguf(path)
    config = gguf_families.read_config(model, trust_remote_code=trust_remote_code)
    _forget_quantization(config)
    stock = families.stock_model(config, trust_remote_code=trust_remote_code)
    modules = families.experts_modules(stock)
    experts, others = gguf_families.origins(model, stock, modules)
    return _Opened(GgufCheckpoint(model), config, stock, modules, experts, others)


def _load(
    opened: _Opened,
    target: torch.device,
    dtype: str | torch.dtype | None,
    recompute: bool,
    trust_remote_code: bool,
    check_weights: bool,
) -> PreTrainedModel:
    checkpoint, modules = opened.checkpoint, opened.modules
    weights = map_experts(checkpoint, modules, opened.experts)
    if check_weights:
        decoding.check_values(checkpoint, [tensor.key for found in opened.experts.values() for tensor in found])
    options: dict[str, Any] = {
        # Without a map transformers places on the CPU, and the Trainer remains free to move the model.
        "device_map": None if target.type == "cpu" else {"": target},
        "trust_remote_code": trust_remote_code,
        "output_loading_info": True,
    }
    loaded: Any
    with families.experts_replaced(type(opened.stock), modules):
        if checkpoint.coded or any(opened.origins.values()):  # else it lies as transformers reads it
            loaded = _load_values(opened, dtype, options)
        else:
            loaded = AutoModelForCausalLM.from_pretrained(
                checkpoint.directory, config=opened.config, dtype=dtype or "auto", use_safetensors=True, **options
            )
    model: PreTrainedModel
    model, info = loaded
    checkpoint.verify_unchanged()
    for name, module in modules.items():
        experts = model.get_submodule(name)
        if not isinstance(experts, CpuExperts):
            raise RuntimeError(f"{name} is a {type(experts).__name__}; expected transformers to build CpuExperts there")
        experts.attach(weights[name], module.names, recompute=recompute)
    _check_complete(model, info, checkpoint.directory)
    _refuse_saving(model)
    return model


@dataclass(frozen=True)
class Outline:
    """What a checkpoint directory is, before any of its weights are looked at.

    Attributes:
        config_file: the contents of ``config.json``.
        config: what transformers makes of it; it knows nothing of quantisation.
        stock: the stock model on meta.
        modules: its experts modules, by path.
    """

    config_file: dict[str, Any]
    config: PreTrainedConfig
    stock: PreTrainedModel
    modules: dict[str, families.ExpertsModule]


def read_outline(directory: Path, *, trust_remote_code: bool = False) -> Outline:
    """Config, stock model and experts modules of a directory, which may lack its weights yet.

    Raises:
        UnsupportedModelError: ktft cannot compute this family's experts exactly.
        CheckpointError: it is quantised in a way that ktft does not read, or tells transformers to read other files.
    """
    _refuse_adapter(directory)
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    _refuse_other_weights(directory, config)
    config_file = read_config(directory)
    refuse_methods(directory, config_file)
    _forget_quantization(config)
    stock = families.stock_model(config, trust_remote_code=trust_remote_code)
    return Outline(config_file, config, stock, families.experts_modules(stock))


def map_experts(
    checkpoint: Checkpoint, modules: Mapping[str, families.ExpertsModule], tensors: Mapping[str, list[ExpertTensor]]
) -> dict[str, ExpertWeights]:
    """The experts of every module, mapped.

    Raises:
        CheckpointError: see :meth:`Checkpoint.expert_weights`.
    """
    return {
        name: checkpoint.expert_weights(
            name,
            tensors[name],
            num_experts=module.num_experts,
            hidden_size=module.hidden_size,
            intermediate_size=module.intermediate_size,
            interleaved=module.names.interleaved,
            biased=module.biased,
            activation=module.activation,
        )
        for name, module in modules.items()
    }


def _forget_quantization(config: PreTrainedConfig) -> None:
    """Let transformers know nothing of it: it would ask for the quantiser's package or a GPU, and build its modules."""
    for part in (config, vars(config).get("text_config")):
        if isinstance(part, PreTrainedConfig) and "quantization_config" in vars(part):
            del part.quantization_config


def _load_values(opened: _Opened, dtype: str | torch.dtype | None, options: dict[str, Any]) -> Any:
    """What ``from_pretrained`` gives, of a checkpoint whose tensors are decoded or arranged while it loads them."""
    stock, directory = opened.stock, opened.checkpoint.directory
    chosen = dtype if dtype not in (None, "auto") else opened.config.dtype or torch.bfloat16
    chosen = getattr(torch, chosen) if isinstance(chosen, str) else chosen
    exact = {*(stock._keep_in_fp32_modules or ()), *(stock._keep_in_fp32_modules_strict or ())}
    values = decoding.state_dict(opened.checkpoint, opened.origins, chosen, exact)
    try:
        # With values of our own it takes no directory, and so reads no generation config.
        loaded: Any = type(stock).from_pretrained(
            None, config=copy.deepcopy(stock.config), state_dict=values, dtype=chosen, **options
        )
    except Exception:
        # transformers reports an error while it converts a tensor in words of its own.
        failure = decoding.failure(values.values())
        if failure is not None:
            raise failure from None
        raise
    try:
        loaded[0].generation_config = GenerationConfig.from_pretrained(
            directory if directory.is_dir() else directory.parent
        )
    except OSError:
        loaded[0].generation_config = GenerationConfig.from_model_config(loaded[0].config)
    return loaded


def _resolve(path_or_hub_id: str | os.PathLike[str], revision: str | None, trust_remote_code: bool) -> Path:
    """A local directory or GGUF file, from a path or through the hub's cache; of a hub id all but the weights."""
    name = os.fspath(path_or_hub_id)
    if os.path.isdir(name) or (os.path.isfile(name) and name.endswith(".gguf")):
        if revision is not None:
            raise ValueError(f"revision={revision!r} has no meaning for the local path {name}; leave it out")
        return find_gguf(Path(name)) or Path(name)
    if os.path.exists(name) or os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1:
        raise ValueError(
            f"{name} is not a directory; expected a directory with config.json and safetensors files, or a .gguf file"
        )
    small = ["*.json", "*.model", "*.txt", "*.jinja", *(["*.py"] if trust_remote_code else [])]
    # In the hub's patterns * matches / too.
    directory = _from_hub(name, revision, allow=small, ignore=["*/*"])
    _refuse_adapter(directory)
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"{name} has no config.json. Of a repository of GGUF files download the one you mean (hf download {name} "
            "FILE), and give its path."
        )
    return directory


def _download_weights(hub_id: str, directory: Path) -> None:
    """The files that hold the weights, and no others: a repository may hold the same weights several times."""
    files = weight_files(directory)
    if not all((directory / file).is_file() for file in files):  # asking the hub again may fail where it is not reached
        # The folder is called by the commit: both downloads are of one, though the branch may move meanwhile.
        _from_hub(hub_id, directory.name, allow=[glob.escape(file) for file in files])


def _from_hub(hub_id: str, revision: str | None, *, allow: list[str], ignore: list[str] | None = None) -> Path:
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=allow, ignore_patterns=ignore))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, HFValidationError, OSError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"cannot load {hub_id!r}: no such directory, not in the Hugging Face cache, and not to be had from the hub "
            f"({first_line})"
        ) from None


def _refuse_adapter(directory: Path) -> None:
    """transformers applies an adapter that lies beside a model without being asked, and then without its experts."""
    if (directory / "adapter_config.json").exists():
        raise CheckpointError(
            f"{directory} holds an adapter (adapter_config.json). If it is an adapter only, load its base with "
            "ktft.load_model(base) and then ktft.load_adapter(model, directory). If it lies beside a model, move "
            "adapter_config.json and adapter_model.safetensors to a directory of their own first, because transformers "
            "would apply them unasked."
        )


def _refuse_other_weights(directory: Path, config: PreTrainedConfig) -> None:
    """Whatever makes transformers read other files than ``checkpoint.py`` maps, so that two checkpoints would mix."""
    named = config.to_dict().get("transformers_weights")
    if named is not None:
        raise CheckpointError(
            f"{directory / 'config.json'} names {named!r} as transformers_weights; ktft reads {SINGLE_FILE} or "
            f"{INDEX_FILE} only. Put the wanted weights under that name and remove the key from config.json."
        )
    shards = sorted(path.name for path in directory.glob("shard-?????-model-?????-of-?????.safetensors"))
    if shards:
        raise CheckpointError(
            f"{directory} holds files of torch's distributed checkpoints ({shards[0]}), which transformers would read "
            f"in place of {SINGLE_FILE}. Move them elsewhere, or load the directory of the consolidated checkpoint."
        )


def _check_complete(model: PreTrainedModel, info: dict[str, Any], directory: Path) -> None:
    """Every parameter of the model came from the files, and every tensor of the files went somewhere."""
    problems = [
        f"{what} {sorted(str(key) for key in info[field])[:5]}"
        for what, field in (
            ("missing tensors", "missing_keys"),
            ("tensors the model has no use for", "unexpected_keys"),
            ("misshapen tensors", "mismatched_keys"),
            ("errors", "error_msgs"),
        )
        if info[field]
    ]
    if problems:
        raise CheckpointError(f"{directory} does not fit {type(model).__name__}: {'; '.join(problems)}")
    on_meta = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if on_meta:
        raise RuntimeError(f"{type(model).__name__}: no value was loaded for {on_meta[:5]}")


def _refuse_saving(model: PreTrainedModel) -> None:
    """Make every save_pretrained raise: of the model, and of the models inside it, which lack the experts just as well.

    On the instances, not in subclasses: the classes stay the stock ones, and a deep copy keeps the refusal.
    ``should_save_on_this_rank`` is asked by PreTrainedModel.save_pretrained before it writes a file, and by no other
    code than that which saves; so ``type(model).save_pretrained(model, directory)`` is refused as well.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            vars(module).update(save_pretrained=_refuse_to_save, should_save_on_this_rank=_refuse_to_save)


def _refuse_to_save(*args: object, **kwargs: object) -> NoReturn:
    raise RuntimeError(
        "save_pretrained of this model is refused: its routed experts are mapped from the checkpoint's own files and "
        "are not part of the model's state, so the result would lack them. To save an adapter call save_pretrained of "
        "the PeftModel (ktft.get_peft_model); to copy the base model, copy its directory; "
        "model.config.save_pretrained works."
    )


__all__ = ["Outline", "load_model", "map_experts", "read_outline"]
