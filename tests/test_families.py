"""Which models are accepted, how their tensors are called, and what is refused before a weight is read."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.core_model_loading import GroupWeightRename
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe import modeling_qwen3_moe

from ktft import families
from ktft.activation import clamped_swiglu
from ktft.checkpoint import Checkpoint, CheckpointError, ExpertTensor
from ktft.experts import CpuExperts
from ktft.model import load_model
from tests.tiny_models import tiny_checkpoint, tiny_config, tiny_input

version = tuple(int(part) for part in transformers.__version__.split(".")[:2])

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
}
GROUPED: dict[str, Any] = {
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "head_dim": 12,
}
LOCAL: dict[str, Any] = {"intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("family", "fields", "disk"),
    [
        ("glm4_moe", GROUPED, "model.layers.1.mlp.experts gate_proj up_proj down_proj"),
        ("granitemoe", LOCAL, "model.layers.0.block_sparse_moe.experts gate_proj up_proj down_proj"),
        ("minimax_m2", {**LOCAL, "head_dim": 12}, "model.layers.0.block_sparse_moe.experts w1 w3 w2"),
        (
            "lfm2_moe",
            {
                "intermediate_size": 56,
                "moe_intermediate_size": 24,
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "num_dense_layers": 1,
                "layer_types": ["full_attention", "full_attention"],
            },
            "model.layers.1.feed_forward.experts w1 w3 w2",
        ),
        pytest.param(
            "aria_text",  # its class holds, and its files store, [E, in, out]
            {"intermediate_size": 24, "moe_num_experts": 5, "moe_topk": 2, "moe_num_shared_experts": 1},
            "model.layers.0.mlp.experts gate_proj up_proj down_proj",
            marks=pytest.mark.skipif(version < (5, 24), reason="follows the experts interface only since then"),
        ),
    ],
)
def test_families_nobody_wrote_a_line_for(tmp_path: Path, family: str, fields: dict[str, Any], disk: str) -> None:
    """Their names come from transformers' conversion mapping, their layout from the files."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **{**SMALL, **fields})
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = load_model(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected, found = stock(tiny_input()).logits, ours(tiny_input()).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    names = next(module.names for module in ours.modules() if isinstance(module, CpuExperts))
    assert names is not None
    assert f"{names.disk} {names.gate} {names.up} {names.down}" == disk


def test_a_transpose_in_the_conversion_is_followed(tmp_path: Path) -> None:
    """Qwen3-VL-MoE publishes [E, H, 2I] and [E, I, H], and its module holds the others; its experts lie deeper."""
    text = {**tiny_config("qwen3_moe").to_dict(), "model_type": "qwen3_vl_moe_text"}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 40}
    config = Qwen3VLMoeConfig(text_config=text, vision_config={**vision, "deepstack_visual_indexes": [0]})
    stock = Qwen3VLMoeForConditionalGeneration(config).to(torch.bfloat16)
    modules = families.experts_modules(stock)
    published = {
        f"{name}.{parameter}": stock.get_parameter(f"{name}.{parameter}").detach().transpose(1, 2).contiguous()
        for name in modules
        for parameter in ("gate_up_proj", "down_proj")
    }
    save_file(published, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    tensors = families.expert_tensors(stock, modules, checkpoint.tensors)
    assert list(modules) == [f"model.language_model.layers.{layer}.mlp.experts" for layer in range(2)]
    for name, module in modules.items():
        weights = checkpoint.expert_weights(
            name,
            tensors[name],
            num_experts=module.num_experts,
            hidden_size=module.hidden_size,
            intermediate_size=module.intermediate_size,
        )
        assert weights.gate.transposed
        gate_up, down = stock.get_parameter(f"{name}.gate_up_proj"), stock.get_parameter(f"{name}.down_proj")
        for e in range(module.num_experts):
            assert torch.equal(torch.cat([weights.matrix("gate", e), weights.matrix("up", e)]), gate_up[e])
            assert torch.equal(weights.matrix("down", e), down[e])


# --- refusals ---------------------------------------------------------------------------------------------------------


def without_weights(config: Any, directory: Path) -> Path:
    """A directory that holds a config only: whatever is raised, it was before any weight was read."""
    config.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("limit", [7.0, 1e6])
def test_numbers_of_an_activation_are_the_modules_attributes(limit: float) -> None:
    """Also a limit that the probe's inputs do not reach, where no other activation can be told from it."""
    model = families.stock_model(tiny_config("gpt_oss"))
    for module in model.modules():
        if isinstance(module, GptOssExperts):
            vars(module).update(alpha=1.6, limit=limit)
    for module in families.experts_modules(model).values():
        assert module.activation == clamped_swiglu(1.6, limit)
        assert module.biased
        assert module.names.interleaved
        assert module.names.transposed


def test_a_class_that_is_not_gpt_oss_but_computes_the_same() -> None:
    """MiniMax-M3: other names of the numbers, gate and up one after the other, no biases."""
    models = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    text = AutoConfig.for_model("minimax_m3_vl").text_config
    with torch.device("meta"):
        (experts,) = [
            found(text) for name, found in vars(models).items() if name.endswith("Experts") and name.startswith("Mini")
        ]
    assert families._activation(experts) == clamped_swiglu(text.swiglu_alpha, text.swiglu_limit)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("alpha", 1.7),
        ("alpha", None),
        ("alpha", 2),
        ("alpha", float("inf")),
        ("limit", 7.5),
        ("limit", -7.0),
        ("limit", float("nan")),
    ],
)
def test_numbers_that_are_not_those_of_the_function_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any
) -> None:
    """The class computes with 1.702 and 7 whatever its attributes say."""
    model = families.stock_model(tiny_config("gpt_oss"))
    original = GptOssExperts._apply_gate

    def right(self: nn.Module, gate_up: torch.Tensor) -> torch.Tensor:
        copied = copy.copy(self)
        vars(copied).update(alpha=1.702, limit=7.0)
        out: torch.Tensor = original(copied, gate_up)
        return out

    monkeypatch.setattr(GptOssExperts, "_apply_gate", right)
    stock = [module for module in model.modules() if isinstance(module, GptOssExperts)]
    for module in stock:
        vars(module).update(alpha=1.702, limit=7.0)
    families.experts_modules(model)
    vars(stock[1])[name] = wrong
    with pytest.raises(families.UnsupportedModelError, match=r"'gpt_oss'.*GptOssExperts computes another function"):
        families.experts_modules(model)


@pytest.mark.parametrize("change", ["bias of down", "gate before up", "no bias"])
def test_a_layout_that_is_not_what_it_says_is_refused(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    model = families.stock_model(tiny_config("gpt_oss"))
    experts = model.get_submodule("model.layers.0.mlp.experts")
    if change == "no bias":
        vars(experts).update(has_bias=False)
        message = r"has the parameters \['down_proj', 'down_proj_bias', .*expected down_proj and gate_up_proj only"
    elif change == "gate before up":
        vars(experts).update(is_concatenated=True)
        message = "computes another function"
    else:
        original = GptOssExperts.forward
        monkeypatch.setattr(GptOssExperts, "forward", lambda self, x, i, w: original(self, x, i, w) + 1e-3)
        message = "computes another function"
    with pytest.raises(families.UnsupportedModelError, match=message):
        families.experts_modules(model)


def test_a_clamped_gate_is_refused_by_running_it(tmp_path: Path) -> None:
    config = AutoConfig.for_model("deepseek_v4", num_hidden_layers=2)
    with pytest.raises(families.UnsupportedModelError, match="DeepseekV4Experts computes another function"):
        load_model(without_weights(config, tmp_path))


@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_pytorch_tanh", "sigmoid"])
def test_another_activation_is_refused(tmp_path: Path, activation: str) -> None:
    config = tiny_config("qwen3_moe", hidden_act=activation)
    with pytest.raises(families.UnsupportedModelError, match=r"'qwen3_moe'.*Qwen3MoeExperts computes another function"):
        load_model(without_weights(config, tmp_path))


@pytest.mark.parametrize("change", ["clamp", "swap", "unweighted", "drop", "scale"])
def test_the_probe_sees_what_the_layout_does_not_say(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    stock_class = modeling_qwen3_moe.Qwen3MoeExperts
    original = stock_class.forward

    def forward(self: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if change == "clamp":
            hidden = hidden.clamp(-500, 500)
        if change == "unweighted":
            weights = torch.ones_like(weights)
        if change == "drop":
            index = torch.where(index == 2, self.num_experts, index)
        if change == "swap":
            index = index.flip(-1)
        out: torch.Tensor = original(self, hidden, index, weights)
        return out * 1.001 if change == "scale" else out

    model = families.stock_model(tiny_config("qwen3_moe"))
    assert len(families.experts_modules(model)) == 2
    monkeypatch.setattr(stock_class, "forward", forward)
    # transformers 5.17 knows no id that means "no expert": there "drop" raises instead
    with pytest.raises(families.UnsupportedModelError, match=r"computes another function|cannot be called"):
        families.experts_modules(model)


@pytest.mark.parametrize("limit", [7.0, 1e4])
def test_a_gate_of_its_own_is_refused_though_the_eager_forward_does_not_call_it(
    monkeypatch: pytest.MonkeyPatch, limit: float
) -> None:
    """transformers' default implementation (grouped_mm) calls it, so the stock model computes with it."""
    stock_class = modeling_qwen3_moe.Qwen3MoeExperts
    original = stock_class._apply_gate
    model = families.stock_model(tiny_config("qwen3_moe"))
    monkeypatch.setattr(stock_class, "_apply_gate", lambda self, gate_up: original(self, gate_up.clamp(max=limit)))
    with pytest.raises(families.UnsupportedModelError, match="computes another function"):
        families.experts_modules(model)


def test_a_class_that_breaks_the_contract_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.stock_model(tiny_config("qwen3_moe"))
    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeExperts, "forward", lambda self, hidden: hidden)
    with pytest.raises(families.UnsupportedModelError, match=r"cannot be called as .* interface says \(TypeError"):
        families.experts_modules(model)


def test_dense_models_and_other_models(tmp_path: Path) -> None:
    llama = LlamaConfig(**SMALL, intermediate_size=24)
    with pytest.raises(families.UnsupportedModelError, match=r"'llama'.* is not a Mixture-of-Experts model"):
        load_model(without_weights(llama, tmp_path / "llama"))
    dense = tiny_config("deepseek_v3", first_k_dense_replace=3)
    with pytest.raises(families.UnsupportedModelError, match="is not a Mixture-of-Experts model"):
        load_model(without_weights(dense, tmp_path / "dense"))
    encoder = AutoConfig.for_model("vit")
    with pytest.raises(families.UnsupportedModelError, match="no causal language model from a 'vit' config"):
        load_model(without_weights(encoder, tmp_path / "vit"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes"}, r"quant_method 'bitsandbytes' is not supported; supported are fp8, mxfp4"),
        ({"quant_method": "gptq", "bits": 3}, r"bits is 3; expected 4"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"fmt is 'e5m2'; expected e4m3"),
    ],
)
def test_methods_that_are_not_read_are_refused_before_there_are_weights(
    tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    config = tiny_config("deepseek_v3", quantization_config=settings)
    with pytest.raises(CheckpointError, match=message):
        load_model(without_weights(config, tmp_path))


# --- tensors under the experts ----------------------------------------------------------------------------------------


def test_which_tensor_is_which_expert() -> None:
    model = families.stock_model(tiny_config("mixtral"))
    modules = families.experts_modules(model)
    assert [(m.num_experts, m.hidden_size, m.intermediate_size) for m in modules.values()] == [(5, 40, 28)] * 2
    prefix = "model.layers.1.block_sparse_moe.experts"
    keys = ["model.norm.weight", f"{prefix}.3.w3.weight", f"{prefix}.12.w1.weight", f"{prefix}.0.w2.weight"]
    found = families.expert_tensors(model, modules, keys)
    assert found["model.layers.0.mlp.experts"] == []
    assert sorted(found["model.layers.1.mlp.experts"], key=lambda tensor: tensor.key) == [
        ExpertTensor(keys[3], "down", 0),
        ExpertTensor(keys[2], "gate", 12),
        ExpertTensor(keys[1], "up", 3),
    ]


def test_keys_are_renamed_in_the_order_of_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """GroupWeightRename renames only after it has seen its first pattern, so the order of the keys in a file (here: the
    first pattern last) must not matter."""
    model = families.stock_model(tiny_config("qwen3_moe"))
    stock = families.get_model_conversion_mapping(model)
    group = GroupWeightRename([r"\.a_proj\.", r"\.b_proj\."], [".gate_proj.", ".up_proj."])
    monkeypatch.setattr(families, "get_model_conversion_mapping", lambda *args, **kwargs: [group, *stock])
    keys = [f"model.layers.0.mlp.experts.{e}.{name}_proj.weight" for e in (1, 0) for name in "ba"]
    modules = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    found = families.expert_tensors(model, modules, keys)["model.layers.0.mlp.experts"]
    assert sorted((tensor.expert, tensor.part) for tensor in found) == [(0, "gate"), (0, "up"), (1, "gate"), (1, "up")]


@pytest.mark.parametrize(
    "suffix", ["3.gate_proj.bias", "3.gate_proj.weight_scale_inv", "x.gate_proj.weight", "bias", "down_proj_bias"]
)
def test_a_tensor_under_the_experts_that_nobody_wants_is_named(suffix: str) -> None:
    model = families.stock_model(tiny_config("qwen3_moe"))
    key = f"model.layers.1.mlp.experts.{suffix}"
    with pytest.raises(CheckpointError, match=f"'{key}' lies under the experts"):
        families.expert_tensors(model, families.experts_modules(model), [key])


def test_a_tiny_checkpoint_is_the_same_every_time(tmp_path: Path) -> None:
    first, second = (tiny_checkpoint("mixtral", tmp_path / name) / "model.safetensors" for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
