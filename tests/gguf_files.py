"""Tiny GGUF files, by the ``gguf`` package's own writer and quantisers, and the same weights in stock transformers.

    written = write("qwen3_moe", tmp_path, "Q8_0")
    written.path      # m.gguf
    written.stock     # a stock model whose weights are what the package decodes from the file, in fp32

Names, metadata and what becomes of values are written down here as llama.cpp's converter has them, and not asked of
ktft. Routers and vectors are stored in fp32, as the converter does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.tiny_models import tiny_model

ARCHITECTURES = {
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
    "olmoe": "olmoe",
    "mixtral": "llama",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe": "glm4moe",
}
CONFIG_BESIDE = ("deepseek_v2", "deepseek_v3", "glm4_moe")
"""Those of which ktft does not read the metadata."""

SMALL: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 32, "initializer_range": 0.1}
"""Sizes of a Qwen3-MoE that blocks of 32 divide."""
LARGE: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64, "initializer_range": 0.06}
"""Sizes that blocks of 256 divide."""

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{
        f"mlp.{name}.{part}_proj": f"ffn_{part}_shexp"
        for name in ("shared_expert", "shared_experts")
        for part in ("gate", "up", "down")
    },
}

_FP16 = {"Q4_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,), "Q5_K": (0, 2), "IQ4_XS": (0,)}
"""Types that the package does not quantise to -> where their blocks have fp16 numbers."""


@dataclass(frozen=True)
class Written:
    path: Path
    stock: PreTrainedModel
    types: dict[str, str]


Edit = Callable[[GGUFWriter], object]


def encode(weight: torch.Tensor, kind: str) -> tuple[np.ndarray, torch.Tensor]:
    """What is written of a weight, and what the package decodes it to. Of types that it does not quantise to, random
    blocks of moderate values take the weight's place."""
    number = GGMLQuantizationType[kind]
    if kind in _FP16:
        columns, size = gguf.GGML_QUANT_SIZES[number]
        generator = np.random.default_rng(weight.numel())
        blocks = generator.integers(0, 256, (weight.numel() // columns, size), dtype=np.uint8)
        for byte in _FP16[kind]:
            blocks[:, byte : byte + 2] = np.array([2e-4], dtype=np.float16).view(np.uint8)
        data = blocks.reshape(*weight.shape[:-1], -1)
    else:
        data = quants.quantize(weight.contiguous().numpy(), number)
    return data, torch.from_numpy(quants.dequantize(data, number).copy()).reshape(weight.shape)


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k as llama.cpp's rotation wants them: row i + d/2 of a head beside row i."""
    rows = torch.arange(len(weight)).view(heads, 2, -1)
    return weight[torch.stack((rows[:, 0], rows[:, 1]), dim=2).flatten()]


def write(
    family: str,
    directory: Path,
    kind: str = "F32",
    *,
    name: str = "m.gguf",
    types: dict[str, str] | None = None,
    fused: bool = False,
    parts: int = 0,
    tokenizer: PreTrainedTokenizerFast | None = None,
    edit: Edit = lambda writer: None,
    **overrides: Any,
) -> Written:
    """
    Args:
        family: a key of :data:`ARCHITECTURES`; of :data:`CONFIG_BESIDE`, config.json is written beside the file.
        directory: where to.
        kind: GGUF type of the matrices.
        name: of the file.
        types: pattern of a GGUF name -> type of those matrices.
        fused: gate and up of the experts in one tensor, and DeepSeek's key and value.
        parts: tensors in each of several files; 0: one file.
        tokenizer: goes into the metadata.
        edit: called with the writer before it writes.
        overrides: config fields.
    """
    directory.mkdir(parents=True, exist_ok=True)
    stock = tiny_model(family, **overrides)
    stock.set_experts_implementation("eager")
    writer = GGUFWriter(directory / name, ARCHITECTURES[family], split_max_tensors=parts)
    _metadata(writer, family, stock.config)
    if tokenizer is not None:
        _vocabulary(writer, tokenizer)
    found: dict[str, str] = {}

    def add(gguf_name: str, weight: torch.Tensor) -> torch.Tensor:
        """Write it; what it decodes to."""
        chosen = next((k for pattern, k in (types or {}).items() if re.search(pattern, gguf_name)), kind)
        if weight.dim() == 1 or "ffn_gate_inp" in gguf_name:
            chosen = "F32"
        data, decoded = encode(weight, chosen)
        writer.add_tensor(gguf_name, data, raw_dtype=GGMLQuantizationType[chosen])
        found[gguf_name] = chosen
        return decoded

    for parameter, value in stock.state_dict().items():
        if not (parameter == "lm_head.weight" and stock.config.tie_word_embeddings):
            with torch.no_grad():
                value.copy_(_add(stock.config, parameter, value.clone(), add, fused))
    edit(writer)
    if family in CONFIG_BESIDE:
        stock.config.save_pretrained(directory)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path = next(iter(sorted(directory.glob(f"{Path(name).stem}-00001-of-*.gguf"))), directory / name)
    return Written(path, stock, found)


def _add(
    config: Any, parameter: str, value: torch.Tensor, add: Callable[[str, torch.Tensor], torch.Tensor], fused: bool
) -> torch.Tensor:
    """Write a parameter in the converter's form; what the file makes of it."""
    layer = re.match(r"model\.layers\.(\d+)\.", parameter)
    prefix = "" if layer is None else f"blk.{layer[1]}."
    rest = parameter if layer is None else parameter[layer.end() :]
    if rest == "mlp.experts.down_proj":
        return add(f"{prefix}ffn_down_exps.weight", value)
    if rest == "mlp.experts.gate_up_proj":
        if fused:
            return add(f"{prefix}ffn_gate_up_exps.weight", value)
        gate, up = value.chunk(2, dim=1)
        return torch.cat([add(f"{prefix}ffn_{n}_exps.weight", w) for n, w in (("gate", gate), ("up", up))], dim=1)
    if rest == "mlp.gate.e_score_correction_bias":
        return add(f"{prefix}exp_probs_b.bias", value)
    if rest == "self_attn.kv_b_proj.weight" and fused:
        return add(f"{prefix}attn_kv_b.weight", value)
    if rest == "self_attn.kv_b_proj.weight":
        heads, rank = config.num_attention_heads, config.kv_lora_rank
        key, head_value = value.view(heads, -1, rank).split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        key = add(f"{prefix}attn_k_b.weight", key.transpose(1, 2)).transpose(1, 2)
        head_value = add(f"{prefix}attn_v_b.weight", head_value)
        return torch.cat([key, head_value], dim=1).reshape(value.shape)
    name, suffix = rest.rsplit(".", 1)
    if config.model_type == "glm4_moe" and name == "post_attention_layernorm":
        return add(f"{prefix}post_attention_norm.weight", value)
    if config.model_type == "mixtral" and name in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        decoded = add(f"{prefix}{_NAMES[name]}.{suffix}", permuted(value, heads))
        return decoded[permuted(torch.arange(len(value)), heads).argsort()]
    return add(f"{prefix}{_NAMES[name]}.{suffix}", value)


def _metadata(writer: GGUFWriter, family: str, config: Any) -> None:
    writer.add_name("a tiny model")
    writer.add_file_type(0)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    fields = vars(config)
    writer.add_expert_count(fields.get("num_experts") or fields.get("num_local_experts") or config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if family == "qwen3_moe":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if family == "mixtral":
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
        writer.add_vocab_size(config.vocab_size)
    if family in ("qwen2_moe", "qwen3_moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)


def _vocabulary(writer: GGUFWriter, tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = set(tokenizer.get_added_vocab())
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_chat_template(tokenizer.chat_template)
