"""What llama.cpp makes of a model family, taken back: its config from metadata, and its parameters from tensors.

One row of :data:`FAMILIES` for each architecture. A row is held to llama.cpp's converter by what it does to names,
shapes and values; an architecture without one is refused, because what its converter does beside renaming is not known
here. Which GGUF name a parameter has is the ``gguf`` package's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ktft.checkpoint import CheckpointError, ExpertTensor, Part
from ktft.decoding import Origin
from ktft.families import UnsupportedModelError
from ktft.gguf_file import GgufModel, count_of


@dataclass(frozen=True)
class Family:
    """One ``general.architecture``.

    Attributes:
        model_types: what transformers calls it; the first is taken where metadata alone must do.
        fields: metadata -> config field, beside :data:`_FIELDS`. Empty: metadata does not hold the config.
        fixed: config fields that llama.cpp knows from the architecture.
        rotary_pairs: rows of q and k lie so that the two halves of a rotary pair are neighbours.
    """

    model_types: tuple[str, ...]
    fields: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    rotary_pairs: bool = False


FAMILIES: dict[str, Family] = {
    "qwen3moe": Family(
        ("qwen3_moe",),
        {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"},
        {"norm_topk_prob": True},
    ),
    "qwen2moe": Family(
        ("qwen2_moe",),
        {
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        {"norm_topk_prob": False},
    ),
    "olmoe": Family(("olmoe",), {"expert_count": "num_experts"}, {"norm_topk_prob": False}),
    "llama": Family(("mixtral",), {"expert_count": "num_local_experts"}, rotary_pairs=True),
    "deepseek2": Family(("deepseek_v3", "deepseek_v2")),
    "glm4moe": Family(("glm4_moe",)),
}

_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_used_count": "num_experts_per_tok",
}
"""Metadata -> config field, of every architecture."""

_OPTIONAL = {"attention.key_length": "head_dim"}

_FRACTIONS = {"rms_norm_eps"}
"""Config fields that are no whole numbers."""

_SAME_AS = {
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "vocab_size": "vocab_size",
}
"""Metadata that transformers has no field for -> the one that it must agree with."""

_ROPE = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}

_TOKENS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}


def family_of(model: GgufModel) -> Family:
    """The row of a file.

    Raises:
        UnsupportedModelError: there is none, or its architecture has no experts here.
    """
    name = model.architecture
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"{model.path} is of the architecture {name!r}; of GGUF files ktft reads {', '.join(FAMILIES)}. "
            "Use the safetensors checkpoint of this model."
        )
    if f"{name}.expert_count" not in model.metadata:
        raise UnsupportedModelError(
            f"{model.path} ({name}) has no experts: it is not a Mixture-of-Experts model. Load it with transformers."
        )
    return FAMILIES[name]


def read_config(model: GgufModel, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The ``config.json`` that lies beside a file, or else what its metadata say.

    Raises:
        UnsupportedModelError: files of this architecture are not read.
        CheckpointError: the config beside it is of another model, or metadata do not do.
    """
    expected, directory = family_of(model).model_types, model.path.parent
    if not (directory / "config.json").is_file():
        return _config_from_metadata(model)
    config: PreTrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    if config.model_type not in expected:
        raise CheckpointError(
            f"{model.path} is of the architecture {model.architecture!r}, but config.json beside it says model_type "
            f"{config.model_type!r}; expected {' or '.join(expected)}. Put the model's own config.json there."
        )
    return config


def _config_from_metadata(model: GgufModel) -> PreTrainedConfig:
    """The config of a file that has none beside it; refuses one that it cannot make in full."""
    family, prefix = family_of(model), f"{model.architecture}."
    beside = f"put the config.json of the model's safetensors checkpoint into {model.path.parent}"
    if not family.fields:
        raise CheckpointError(f"{model.path}: the metadata of {model.architecture} files is not read; {beside}")
    metadata = {key.removeprefix(prefix): value for key, value in model.metadata.items() if key.startswith(prefix)}
    required = {**_FIELDS, **family.fields}
    if missing := [prefix + key for key in required if key not in metadata]:
        raise CheckpointError(f"{model.path} has no {', '.join(missing)} among its metadata; {beside}")
    taken = {**required, **_OPTIONAL}
    values = {name: metadata.pop(key) for key, name in taken.items() if key in metadata}
    values |= family.fixed
    for key, name in taken.items():
        kinds = (int, float) if name in _FRACTIONS else (int,)
        if name in values and (type(values[name]) not in kinds or not values[name] > 0):
            raise CheckpointError(f"{model.path}: {prefix}{key}: expected a positive number, found {values[name]!r}")
    values["vocab_size"] = _tensor(model, "token_embd.weight").shape[0]
    values["tie_word_embeddings"] = "output.weight" not in model.tensors
    values["rope_parameters"] = _rope(metadata)
    values["dtype"] = _dtype(model)
    values |= {name: model.metadata.get(key) for name, key in _TOKENS.items()}
    agreeing = {"head_dim": values["hidden_size"] // values["num_attention_heads"], **values}
    for key, name in _SAME_AS.items():
        if key in metadata and (found := metadata.pop(key)) != agreeing[name]:
            raise CheckpointError(f"{model.path}: {prefix}{key} is {found}, expected {agreeing[name]}; {beside}")
    if metadata:
        raise CheckpointError(
            f"{model.path}: it is not known here what {', '.join(prefix + key for key in metadata)} mean; {beside}"
        )
    config: PreTrainedConfig = AutoConfig.for_model(family.model_types[0], **values)
    return config


def _rope(metadata: dict[str, Any]) -> dict[str, Any]:
    """``rope_parameters``; takes what it is made of out of ``metadata``."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": metadata.pop("rope.freq_base", 10000.0)}
    if metadata.get("rope.scaling.type", "none") in ("linear", "yarn"):
        rope["rope_type"] = metadata.pop("rope.scaling.type")
        rope |= {name: metadata.pop(key) for key, name in _ROPE.items() if key in metadata}
        metadata.pop("rope.scaling.finetuned", None)  # whether it was trained so; llama.cpp only prints it
    elif metadata.get("rope.scaling.type") == "none":
        del metadata["rope.scaling.type"]
    return rope


def _dtype(model: GgufModel) -> torch.dtype:
    """What the weights are; of a quantised file bf16."""
    types = {tensor.type for tensor in model.tensors.values()}
    return torch.float32 if types == {"F32"} else torch.float16 if types == {"F16", "F32"} else torch.bfloat16


def _tensor(model: GgufModel, name: str) -> Any:
    if name not in model.tensors:
        raise CheckpointError(f"{model.path} has no tensor {name!r}; the file is incomplete")
    return model.tensors[name]


# --- tensors ----------------------------------------------------------------------------------------------------------


def origins(
    model: GgufModel, stock: PreTrainedModel, modules: Iterable[str]
) -> tuple[dict[str, list[ExpertTensor]], dict[str, Origin]]:
    """Which tensors hold the experts of each module, and what every other parameter is made of.

    Args:
        model: the file.
        stock: the stock model on meta.
        modules: paths of its experts modules.

    Raises:
        CheckpointError: a tensor is missing, misshapen, or of no use; names it.
    """
    layers = int(stock.config.get_text_config().num_hidden_layers)
    architecture = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == model.architecture)
    names = get_tensor_name_map(architecture, layers)

    def gguf_name(parameter: str) -> str:
        # llama.cpp's converter has a dot in this one's name.
        asked = parameter.replace("e_score_correction_bias", "e_score_correction.bias")
        found: str | None = names.get_name(asked, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise CheckpointError(f"{model.path}: the gguf package has no name for the parameter {parameter!r}")
        return found

    experts = {module: _experts(model, gguf_name(f"{module}.gate_proj.weight"), module) for module in modules}
    inside = tuple(f"{module}." for module in experts)
    tied = set(stock.all_tied_weights_keys) if stock.config.get_text_config().tie_word_embeddings else set()
    out: dict[str, Origin] = {}
    for parameter, value in stock.state_dict().items():
        if parameter.startswith(inside):
            continue
        name = gguf_name(parameter)
        if parameter in tied and name not in model.tensors:
            continue
        out[parameter] = _origin(model, stock.config.get_text_config(), name, tuple(value.shape))
    used = {name for origin in out.values() for name in origin.sources}
    used |= {tensor.key for found in experts.values() for tensor in found}
    # Layers beyond the model's are those of multi-token prediction, which transformers has no modules for.
    predicting = layers + count_of(model.path, model.metadata, f"{model.architecture}.nextn_predict_layers", 0)
    beyond = tuple(f"blk.{layer}." for layer in range(layers, predicting))
    left = [name for name in model.tensors if name not in used and not name.startswith(beyond)]
    if left:
        raise CheckpointError(
            f"{model.path} does not fit {type(stock).__name__}: tensors the model has no use for {left[:5]}"
        )
    return experts, out


def _experts(model: GgufModel, gate: str, module: str) -> list[ExpertTensor]:
    """The tensors of one layer's experts, each of all of them: gate and up in one, gate rows first, or two."""
    prefix = gate.removesuffix("ffn_gate_exps.weight")
    parts: dict[str, Part] = {"gate_up_exps": "gate_up", "gate_exps": "gate", "up_exps": "up", "down_exps": "down"}
    found = {f"{prefix}ffn_{name}.weight": part for name, part in parts.items()}
    if not any(name in model.tensors for name in found):
        raise CheckpointError(
            f"{model.path}: {module}: expected {', '.join(list(found)[1:])}, found none of them. Files that llama.cpp "
            "wrote before April 2024 hold a tensor for each expert; use one written since."
        )
    return [ExpertTensor(name, part, None) for name, part in found.items() if name in model.tensors]


def _origin(model: GgufModel, config: PreTrainedConfig, name: str, shape: tuple[int, ...]) -> Origin:
    """What a parameter of ``shape`` is made of, where the GGUF name is ``name``."""
    sources: tuple[str, ...] = (name,)
    arrange: Callable[..., torch.Tensor] | None = None
    key, value = (name.replace("attn_kv_b", part) for part in ("attn_k_b", "attn_v_b"))
    if name not in model.tensors and "attn_kv_b" in name and key in model.tensors:
        sources, arrange = (key, value), _join_key_value
        heads, rank = config.num_attention_heads, shape[1]
        key_dim = _tensor(model, key).shape[-1]
        expected: list[tuple[int, ...]] = [(heads, rank, key_dim), (heads, shape[0] // heads - key_dim, rank)]
    else:
        if family_of(model).rotary_pairs and any(part in name for part in (".attn_q.", ".attn_k.")):
            arrange = _part_rotary_pairs(
                config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
            )
        expected = [shape]
    for source, size in zip(sources, expected, strict=True):
        found = _tensor(model, source).shape
        # llama.cpp's converter leaves sizes of 1 out of some matrices.
        if [n for n in found if n != 1] != [n for n in size if n != 1]:
            raise CheckpointError(
                f"{model.tensors[source].file}: tensor {source!r}: expected shape {list(size)} by the config, found "
                f"{list(found)}"
            )
    return Origin(sources, shape, arrange)


def _part_rotary_pairs(heads: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def arrange(weight: torch.Tensor) -> torch.Tensor:
        pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
        return pairs.transpose(1, 2).reshape(weight.shape)

    return arrange


def _join_key_value(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[heads, rank, key], [heads, value, rank] -> [heads · (key + value), rank]."""
    return torch.cat((key.transpose(1, 2), value), dim=1).reshape(-1, value.shape[-1])


__all__ = ["FAMILIES", "Family", "family_of", "origins", "read_config"]
