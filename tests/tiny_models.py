"""Tiny random checkpoints of the model families ktft is tested with, written by stock transformers in bf16.

Every family has I != H/2 (except where asked for), H and I that are no multiples of 16, distinct random experts whose
outputs are of the order of the residual stream, so that a wrong expert, a swapped gate and up, or a lost routing
weight shows in the logits.

    config = tiny_config("mixtral")                      # a stock config, fields overridable by keyword
    directory = tiny_checkpoint("mixtral", tmp_path)     # writes config.json and model.safetensors, returns the path

This module imports torch and transformers only, never ktft: its checkpoints serve processes that must not know ktft.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

FAMILIES = ("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "deepseek_v3", "gpt_oss")
"""Those that every test of families runs with; :func:`tiny_config` knows more."""
FUSED = ("gpt_oss",)
"""Families whose files hold the experts of a layer in one tensor."""

VOCABULARY = 96

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}

_DENSE_FIRST = {
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
}
"""A dense layer first, then experts and shared ones."""

_DEEPSEEK = {
    **_DENSE_FIRST,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
"""And latent attention."""

_FAMILY: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "mixtral": (MixtralConfig, {"intermediate_size": 28, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            "intermediate_size": 72,
            "moe_intermediate_size": 28,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "head_dim": 12,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_moe": (
        Qwen2MoeConfig,
        {
            "intermediate_size": 72,
            "moe_intermediate_size": 28,
            "shared_expert_intermediate_size": 36,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
        },
    ),
    "olmoe": (
        OlmoeConfig,
        {"intermediate_size": 24, "num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": False},
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        {
            **_DEEPSEEK,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.8,
            "norm_topk_prob": True,
            "q_lora_rank": 20,
        },
    ),
    # limits that tiny activations reach, and rope of a short context
    "gpt_oss": (
        GptOssConfig,
        {
            "intermediate_size": 28,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "head_dim": 12,
            "sliding_window": 6,
            "swiglu_limit": 1.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
    ),
    "deepseek_v2": (
        DeepseekV2Config,
        {
            **_DEEPSEEK,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": False,
            "q_lora_rank": None,
        },
    ),
    "glm4_moe": (
        Glm4MoeConfig,
        {
            **_DENSE_FIRST,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.8,
            "norm_topk_prob": True,
            "head_dim": 12,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
}


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """The family's tiny config; ``overrides`` are config fields."""
    config_class, fields = _FAMILY[family]
    return config_class(**{**_COMMON, **fields, **overrides})


def tiny_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """The stock model with deterministic random weights, in eval mode; torch's global random state stays as it was."""
    config = tiny_config(family, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.normal_(1.0, 0.1)
                elif name.endswith(("bias", "sinks")):
                    parameter.normal_(0.0, 0.1)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0.0, 0.2)
    model = model.to(dtype).eval()
    for module in model.modules():  # published checkpoints keep this one in fp32
        if "e_score_correction_bias" in dict(module.named_buffers(recurse=False)):
            module.e_score_correction_bias = module.e_score_correction_bias.float()
    return model


def tiny_checkpoint(
    family: str,
    directory: str | os.PathLike[str],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: str | int = "5GB",
    **overrides: Any,
) -> Path:
    """Write a tiny checkpoint with the stock ``save_pretrained`` and return its directory.

    Args:
        family: one of :data:`FAMILIES`, or another that :func:`tiny_config` knows.
        directory: created if missing.
        seed: same seed and fields, same bytes.
        dtype: of the tensors on disk.
        max_shard_size: as in ``save_pretrained``; e.g. 20_000 gives several shards and an index.
        overrides: config fields, e.g. ``num_hidden_layers=3``.
    """
    path = Path(directory)
    tiny_model(family, seed=seed, dtype=dtype, **overrides).save_pretrained(path, max_shard_size=max_shard_size)
    return path


def tiny_input(batch: int = 2, length: int = 11, *, seed: int = 7) -> torch.Tensor:
    """Token ids int64 [batch, length] without special tokens."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_same_function(model: PreTrainedModel, stock: PreTrainedModel) -> None:
    """Logits to 1e-5, and the gradient of the embeddings to 1e-4, in fp32."""
    outputs = []
    for one in (stock, model):
        one.requires_grad_(False)
        embeddings = one.get_input_embeddings()(tiny_input()).detach().requires_grad_()
        logits = one(inputs_embeds=embeddings).logits
        direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
        outputs.append((logits.detach(), torch.autograd.grad((logits * direction).sum(), embeddings)[0]))
    (expected, expected_gradient), (found, gradient) = outputs
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (gradient - expected_gradient).abs().max() <= 1e-4 * expected_gradient.abs().max()
