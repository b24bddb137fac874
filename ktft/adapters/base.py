"""What an adapter has to do with the model it is for: how the base is named, and that it is still what it was.

An adapter file holds LoRA tensors only. Whatever else differs from the published base (a resized vocabulary, merged
weights, a trained router) would be lost, so it is refused before an adapter is made or saved. Nothing here reads or
writes adapter files.
"""

from __future__ import annotations

import os
from pathlib import Path

from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from ktft.adapters.config import AdapterError, module_name
from ktft.experts import CpuExperts
from ktft.gguf_families import read_config
from ktft.gguf_file import find_gguf, read_gguf
from ktft.mapping import FileMapping

_MERGED = "ktft_merged"


def base_path(model: PreTrainedModel) -> Path | None:
    """The absolute path of the directory or GGUF file the model was loaded from; None if it came from the hub or is not
    known.

    The name that the model was loaded by may be relative, and the working directory another one since; then the mapped
    files tell.
    """
    if not model.name_or_path:
        return None
    if os.path.exists(model.name_or_path):
        return Path(os.path.abspath(model.name_or_path))
    for module in model.modules():
        owner = module.weights.owner if isinstance(module, CpuExperts) and module.weights is not None else None
        for mapping in owner if isinstance(owner, tuple) else ():
            if isinstance(mapping, FileMapping) and mapping.path.suffix == ".gguf":
                return find_gguf(mapping.path)
            if isinstance(mapping, FileMapping) and (mapping.path.parent / "config.json").is_file():
                return mapping.path.parent
    return None


def base_name(model: PreTrainedModel) -> str | None:
    """What to write as ``base_model_name_or_path``: an absolute path, or the hub id."""
    path = base_path(model)
    return str(path) if path is not None else model.name_or_path or None


def base_revision(model: PreTrainedModel) -> str | None:
    """The commit of a model from the hub, if its config says so."""
    revision = vars(model.config).get("_commit_hash")
    return revision if isinstance(revision, str) and base_path(model) is None else None


def published_vocabulary(model: PreTrainedModel) -> int | None:
    """``vocab_size`` by the base's own config; None where that cannot be had without the network."""
    base, path = base_name(model), base_path(model)
    if base is None:
        return None
    file = None if path is None else find_gguf(path)
    if file is not None:
        return int(read_config(read_gguf(file)).get_text_config().vocab_size)
    try:
        config = type(model.config).from_pretrained(
            base, local_files_only=True, revision=base_revision(model) or "main"
        )
    except OSError:
        return None
    return int(config.get_text_config().vocab_size)


def refuse_resized(model: PreTrainedModel, vocabulary: int | None) -> None:
    """Raise AdapterError if the embeddings do not have ``vocabulary`` rows: an adapter file holds no embeddings."""
    rows = model.get_input_embeddings().weight.shape[0]
    if vocabulary is not None and rows != vocabulary:
        raise AdapterError(
            f"the embeddings have {rows} rows, the checkpoint {base_name(model)} says vocab_size {vocabulary}: resized "
            "embeddings are not part of an adapter. Save a base model with the new vocabulary first, then load that "
            "with ktft.load_model."
        )


def mark_merged(model: nn.Module) -> None:
    """Note that an adapter has been merged into this model's weights."""
    vars(model)[_MERGED] = True


def refuse_merged(model: nn.Module) -> None:
    """Raise AdapterError if the weights are no longer those of the base that the adapter would name."""
    if _MERGED in vars(model):
        raise AdapterError(
            "an adapter has been merged into this model, so one trained on it would not fit the base it names. Load "
            "the base again with ktft.load_model, and keep the first adapter unmerged beside the new one"
        )


def refuse_trained_base(model: nn.Module) -> None:
    """Raise AdapterError if parameters outside the adapters are set to be trained: an adapter file cannot hold them."""
    lora = {
        id(parameter)
        for layer in model.modules()
        if isinstance(layer, LoraLayer)
        for side in (layer.lora_A, layer.lora_B)
        for parameter in side.parameters()
    }
    trained = [module_name(name) for name, p in model.named_parameters() if p.requires_grad and id(p) not in lora]
    if trained:
        raise AdapterError(
            f"{len(trained)} parameters outside the adapters require gradients, the first is {trained[0]!r}. An "
            "adapter file holds LoRA tensors only, so what they have learned would be lost. Adapt the module with LoRA "
            "instead (target_modules), or call requires_grad_(False) on them if they were not meant to be trained"
        )


__all__ = [
    "base_name",
    "base_path",
    "base_revision",
    "mark_merged",
    "published_vocabulary",
    "refuse_merged",
    "refuse_resized",
    "refuse_trained_base",
]
