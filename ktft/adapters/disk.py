"""Adapter files: written so that nothing is ever half there, read so that nothing is ever left over.

Written are per-expert or fused tensors (``layout.py`` says when) in ``adapter_model.safetensors``, whose metadata also
holds the training form of the config, and the stock form in ``adapter_config.json``.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ktft.adapters.checks import check
from ktft.adapters.config import TRAINING_FIELDS, AdapterError, base_modules, check_config
from ktft.adapters.layout import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    StoredAdapter,
    StoredExperts,
    StoredLinear,
    assign,
    unpack_fused,
)
from ktft.adapters.values import check_keys, check_values
from ktft.checkpoint import read_header
from ktft.expert_layout import fused_rows
from ktft.mapping import CheckpointError, is_mapped_source, replacing

METADATA_KEY = "ktft"
"""Under this key the file's metadata holds the training form of the config, as JSON with a format number."""
METADATA_FORMAT = 1


# --- writing ----------------------------------------------------------------------------------------------------------


def refuse_model_directory(directory: Path, base: str | None) -> None:
    """Raise AdapterError if a model lies in ``directory``: the base, or whatever a loaded model is mapped from."""
    same = base is not None and os.path.isdir(base) and os.path.realpath(base) == os.path.realpath(directory)
    if same or (directory.is_dir() and any(is_mapped_source(file) for file in directory.iterdir())):
        raise AdapterError(
            f"saving the adapter into {directory} is refused: the base model lies there, and its files are in use. "
            "Choose another directory."
        )


def write_adapter(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    config: LoraConfig,
    training: Mapping[str, Any],
    model_type: str,
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
    ours = {"format": METADATA_FORMAT, "model_type": model_type, "training": dict(training)}
    metadata = {"format": "pt", METADATA_KEY: json.dumps(ours)}
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


def read_adapter(directory: Path, model: PreTrainedModel) -> StoredAdapter:
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
    training, model_type = _metadata(metadata, path)
    _check_base(directory, config, model_type, model)
    stored = StoredAdapter(directory, config, tensors, {}, {}, training, peft_version)
    modules = dict(base_modules(model))
    assign(stored, modules)
    check(stored, modules)
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
            f"{path}: lora_B_layout {values['lora_B_layout']!r} orders the columns of fused expert tensors unlike "
            "PEFT; export the adapter again with lora_B_layout 'rank_major'"
        )
    if not values.get("target_modules") and not values.get("target_parameters"):
        raise AdapterError(
            f"{path} names neither target_modules nor target_parameters: what the adapter is for is unknown"
        )
    try:
        check_keys(values)
        check_values(values)
        config = LoraConfig.from_pretrained(str(directory))
        assert isinstance(config, LoraConfig)
        check_config(config, may_name_parameters=True)
    except (TypeError, ValueError) as error:  # AdapterError, or PEFT's own about a field
        raise AdapterError(f"{path}: {error}") from None
    return config, values.get("peft_version")


def _check_base(directory: Path, config: LoraConfig, model_type: str | None, model: PreTrainedModel) -> None:
    """Refuse an adapter of another model type. A path may have moved, so another name alone is a warning at most."""
    if model_type is not None:
        if model_type != model.config.model_type:
            raise AdapterError(
                f"{directory} was trained on {config.base_model_name_or_path!r}, model type {model_type!r}; this is "
                f"{model.name_or_path!r}, model type {model.config.model_type!r}"
            )
        return
    theirs, ours = config.base_model_name_or_path, model.name_or_path
    if theirs and ours and Path(theirs).name != Path(ours).name:
        warnings.warn(
            f"{directory} says that it was trained on {theirs!r}; it is put on {ours!r}. Make sure that they are the "
            "same model.",
            stacklevel=2,
        )


def _metadata(metadata: Mapping[str, str], path: Path) -> tuple[dict[str, Any] | None, str | None]:
    """The training form and the base's model type, if ktft wrote the file."""
    if METADATA_KEY not in metadata:
        return None, None
    try:
        value = json.loads(metadata[METADATA_KEY])
        number, training, model_type = value["format"], value["training"], value.get("model_type")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise AdapterError(f"{path}: the metadata {METADATA_KEY!r} is damaged: {error!r}") from None
    if number != METADATA_FORMAT or not isinstance(training, dict) or set(training) - set(TRAINING_FIELDS):
        raise AdapterError(
            f"{path} was written in adapter format {number!r} with {training!r:.200}; "
            f"this version reads format {METADATA_FORMAT} with the fields {sorted(TRAINING_FIELDS)}. Upgrade ktft."
        )
    try:
        check_values(training)
    except AdapterError as error:
        raise AdapterError(f"{path}: the metadata {METADATA_KEY!r} is damaged: {error}") from None
    return training, model_type


# --- values ---------------------------------------------------------------------------------------------------------


class AdapterTensors:
    """The values of a checked adapter, read tensor by tensor; a context manager, which holds the file open.

    Raises:
        AdapterError: on entry, a tensor is not finite.
    """

    def __init__(self, stored: StoredAdapter) -> None:
        self._path = path = stored.directory / WEIGHTS_FILE
        self._stack = ExitStack()
        self._file: Any = self._stack.enter_context(safe_open(path, framework="pt"))
        for key in stored.tensors:
            if not torch.isfinite(self._file.get_tensor(key)).all():
                self._stack.close()
                raise AdapterError(f"{path}: tensor {key!r} holds NaN or infinity")

    def __enter__(self) -> AdapterTensors:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @torch.no_grad()
    def copy_experts(self, entry: StoredExperts, factors: Mapping[str, torch.Tensor]) -> None:
        """Fill the six stacks (by slot of LORA_NAMES) of one layer, in place."""
        experts = entry.experts
        if not entry.fused:
            for (slot, expert), key in entry.keys.items():
                factors[slot][expert].copy_(self._file.get_tensor(key))
            factors["down_b"].mul_(entry.ratio)  # in fp32, whatever the file has
            return
        for stack in factors.values():
            stack.zero_()  # a smaller rank, or a projection that is not adapted, is padded with zeros
        assert experts.names is not None
        rows = dict(zip(("gate", "up"), fused_rows(experts.intermediate_size, experts.names.interleaved), strict=True))
        for part in ("gate", "up", "down"):
            if (f"{part}_a", None) not in entry.keys:
                continue
            a, b = (self._file.get_tensor(entry.keys[f"{part}_{side}", None]) for side in "ab")
            a, b = unpack_fused(a, b, experts.num_experts)
            rank = a.shape[1]
            if part != "down":
                b = b[:, rows[part]]
                if entry.block_diagonal:
                    rank //= 2
                    half, other = (
                        (slice(rank), slice(rank, None)) if part == "gate" else (slice(rank, None), slice(rank))
                    )
                    if b[:, :, other].any():
                        raise AdapterError(
                            f"{self._path}: tensor {entry.keys[f'{part}_b', None]!r} is not block diagonal, but the "
                            "metadata say that ktft wrote it; another tool has changed it and kept the metadata"
                        )
                    a, b = a[:, half], b[:, :, half]
            factors[f"{part}_a"][:, :rank].copy_(a)
            factors[f"{part}_b"][:, :, :rank].copy_(b)
        factors["down_b"].mul_(entry.ratio)

    @torch.no_grad()
    def copy_linear(self, linear: StoredLinear, a: torch.Tensor, b: torch.Tensor) -> None:
        """Fill A [r, in] and B [out, r] of one Linear, in place."""
        a.copy_(self._file.get_tensor(linear.keys["A"]))
        b.copy_(self._file.get_tensor(linear.keys["B"]))


__all__ = ["AdapterTensors", "read_adapter", "refuse_model_directory", "write_adapter"]
