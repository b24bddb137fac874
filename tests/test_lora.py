"""Expert LoRA as a PEFT layer: bookkeeping, arithmetic against float64, what is refused."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ktft import reference
from ktft.adapters import AdapterError, KtftPeftModel, get_peft_model
from ktft.experts import CpuExperts, ExpertNames
from ktft.lora import ExpertLora, expert_parameter_count
from ktft.model import load_model
from ktft.weights import LORA_NAMES, ExpertWeights
from tests.tiny_models import tiny_checkpoint, tiny_input

E, H, I = 4, 12, 10  # noqa: E741


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("lora")
    return {family: tiny_checkpoint(family, root / family) for family in ("qwen3_moe", "qwen2_moe", "deepseek_v3")}


@pytest.fixture
def base(directories: dict[str, Path]) -> PreTrainedModel:
    return load_model(directories["qwen3_moe"], dtype=torch.float32)


def config(**fields: Any) -> LoraConfig:
    return LoraConfig(
        **{"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "experts"], "task_type": "CAUSAL_LM", **fields}
    )


def logits(model: nn.Module, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tiny_input(), **kwargs).logits


def expert_layers(model: nn.Module) -> Iterator[ExpertLora]:
    return (module for module in model.modules() if isinstance(module, ExpertLora))


def lone_experts(seed: int = 0) -> tuple[CpuExperts, list[torch.Tensor]]:
    """A bare experts module, and its gate, up, down."""
    generator = torch.Generator().manual_seed(seed)
    stacks = [
        torch.randn(shape, generator=generator) / math.sqrt(shape[2]) for shape in ((E, I, H), (E, I, H), (E, H, I))
    ]
    experts = CpuExperts()
    experts.attach(ExpertWeights.from_tensors(*stacks), ExpertNames("experts", "experts"))
    return experts, stacks


def lone_layer(**fields: Any) -> tuple[ExpertLora, list[torch.Tensor]]:
    experts, stacks = lone_experts()
    settings = config(init_lora_weights=False, **fields)
    return ExpertLora(experts, "default", settings, settings.r, settings.lora_alpha), stacks


def routed(tokens: int = 9, k: int = 2, experts: int = E) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    index = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(tokens)])
    return torch.randn(tokens, H, generator=generator), index, torch.rand(tokens, k, generator=generator)


# --- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_rslora", [False, True])
def test_several_active_adapters_add_up_as_in_float64(use_rslora: bool) -> None:
    layer, stacks = lone_layer(use_rslora=use_rslora)
    layer.update_layer("second", 2, lora_alpha=5, config=config(init_lora_weights=False))
    layer.set_adapter(["default", "second"])
    hidden, index, weights = routed()
    found = layer(hidden, index, weights)
    scaling = [6 / (math.sqrt(3) if use_rslora else 3), 5 / 2]
    lora = [factor.double() for name in ("default", "second") for factor in layer.factors(name)]
    expected = reference.moe_experts(
        hidden.double(), index, weights.double(), *(stack.double() for stack in stacks), lora, scaling
    )
    # fp32 sums of at most H terms; the longest path has five of them.
    assert (found - expected).abs().max() <= 5 * H * torch.finfo(torch.float32).eps * expected.abs().max()
    layer.set_adapter("second")
    alone = reference.moe_experts(
        hidden.double(), index, weights.double(), *(stack.double() for stack in stacks), lora[6:], scaling[1:]
    )
    assert (layer(hidden, index, weights) - alone).abs().max() <= 5 * H * torch.finfo(
        torch.float32
    ).eps * alone.abs().max()


@pytest.mark.parametrize("slot", LORA_NAMES)
def test_every_tensor_reaches_the_output(slot: str) -> None:
    layer, _ = lone_layer()
    hidden, index, weights = routed()
    before = layer(hidden, index, weights)
    with torch.no_grad():
        layer.factors("default")[LORA_NAMES.index(slot)].add_(0.1)
    assert not torch.allclose(layer(hidden, index, weights), before, atol=1e-4)


def test_factors_come_in_the_order_of_the_op() -> None:
    layer, _ = lone_layer()
    shapes = dict(zip(LORA_NAMES, (tuple(f.shape) for f in layer.factors("default")), strict=True))
    assert shapes == {
        "gate_a": (E, 3, H),
        "gate_b": (E, I, 3),
        "up_a": (E, 3, H),
        "up_b": (E, I, 3),
        "down_a": (E, 3, I),
        "down_b": (E, H, 3),
    }
    assert layer.factors("default")[2] is layer.lora_A["default"].up


def test_fresh_adapter_is_the_base(base: PreTrainedModel) -> None:
    before = logits(base)
    model = get_peft_model(base, config())
    assert torch.equal(logits(model), before)


def test_initialisation_is_that_of_a_linear() -> None:
    experts, _ = lone_experts()
    layer = ExpertLora(experts, "default", config(r=64), 64, 1)
    for slot, factor in zip(LORA_NAMES, layer.factors("default"), strict=True):
        if slot.endswith("_b"):
            assert not factor.any()
        else:
            bound = 1 / math.sqrt(factor.shape[2])  # kaiming uniform with a = sqrt 5, fan-in of one expert's matrix
            assert bound * 0.98 < factor.abs().max() <= bound
    layer.update_layer("gaussian", 64, lora_alpha=1, config=config(init_lora_weights="gaussian"))
    # the standard deviation of n normal numbers is off by 1/sqrt(2n) of itself; five of those
    a = layer.lora_A["gaussian"].gate
    assert abs(a.std() * 64 - 1) < 5 / math.sqrt(2 * a.numel())


def test_gradients_of_first_and_second_step(base: PreTrainedModel) -> None:
    model = get_peft_model(base, config())
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}

    def step() -> set[str]:
        optimizer.zero_grad()
        model(tiny_input(), labels=tiny_input()).loss.backward()
        optimizer.step()
        changed = {name for name, p in model.named_parameters() if name in before and not torch.equal(p, before[name])}
        return {name.rpartition("layers.")[2] for name in changed}

    first = step()
    assert {name for name in first if "lora_B" in name} == first and len(first) == 2 * (1 + 3)
    for layer in expert_layers(model):  # 22 tokens of three routes meet every one of six experts
        for slot, factor in zip(LORA_NAMES, layer.factors("default"), strict=True):
            if slot.endswith("_b"):
                assert all(factor[expert].any() for expert in range(layer.base_layer.num_experts)), slot
    second = step()
    assert len({name for name in second if "lora_A" in name}) == 2 * (1 + 3)


def test_experts_without_tokens_have_zero_gradients() -> None:
    layer, _ = lone_layer()
    hidden, index, weights = routed(experts=2)
    layer(hidden, index, weights).square().sum().backward()
    for slot, factor in zip(LORA_NAMES, layer.factors("default"), strict=True):
        assert factor.grad is not None
        assert not factor.grad[2:].any(), slot
        assert all(factor.grad[expert].any() for expert in (0, 1)), slot


def test_optimizer_steps_and_swapped_data_are_seen() -> None:
    layer, _ = lone_layer()
    hidden, index, weights = routed()
    before = layer(hidden, index, weights)
    layer.lora_B["default"].down.data = torch.zeros_like(layer.lora_B["default"].down)
    swapped = layer(hidden, index, weights)
    assert not torch.equal(before, swapped)
    layer.load_state_dict({**layer.state_dict(), "lora_B.default.down": torch.ones(E, H, 3)})
    assert not torch.equal(layer(hidden, index, weights), swapped)


# --- dropout ----------------------------------------------------------------------------------------------------------


def test_dropout_only_in_training_and_from_torchs_generator() -> None:
    layer, _ = lone_layer(lora_dropout=0.5)
    inputs = routed()
    layer.eval()
    assert torch.equal(layer(*inputs), layer(*inputs))
    layer.train()
    torch.manual_seed(1)
    one, two = layer(*inputs), layer(*inputs)
    assert not torch.equal(one, two)
    torch.manual_seed(1)
    assert torch.equal(layer(*inputs), one)


def test_checkpointing_sees_the_same_dropout() -> None:
    layer, _ = lone_layer(lora_dropout=0.5)
    hidden, index, weights = routed()

    def gradients(through: Any) -> list[torch.Tensor]:
        x = hidden.clone().requires_grad_()
        layer.zero_grad()
        torch.manual_seed(1)
        (through(x) + through(2 * x)).square().sum().backward()
        return [x.grad, *(factor.grad.clone() for factor in layer.factors("default"))]

    plain = gradients(lambda x: layer(x, index, weights))
    again = gradients(lambda x: checkpoint(layer, x, index, weights, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_different_dropout_rates_at_once_are_refused() -> None:
    layer, _ = lone_layer(lora_dropout=0.5)
    layer.update_layer("second", 2, lora_alpha=5, config=config(lora_dropout=0.25))
    layer.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match=r"0\.25, 0\.5"):
        layer(*routed())
    layer.eval()
    layer(*routed())


# --- PEFT's bookkeeping -----------------------------------------------------------------------------------------------


def test_disable_adapter_is_the_base_bit_for_bit(base: PreTrainedModel) -> None:
    before = logits(base)
    model = get_peft_model(base, config(init_lora_weights=False))
    adapted = logits(model)
    assert not torch.allclose(adapted, before)
    with model.disable_adapter():
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), adapted)
    with pytest.raises(KeyError), model.disable_adapter():
        raise KeyError
    assert torch.equal(logits(model), adapted)
    assert all(p.requires_grad for n, p in model.named_parameters() if "lora_" in n)


def test_two_adapters_in_a_model(base: PreTrainedModel) -> None:
    model = get_peft_model(base, config(init_lora_weights=False))
    first = logits(model)
    model.add_adapter("second", config(r=2, target_modules=["experts"], init_lora_weights=False))
    assert torch.equal(logits(model), first)
    assert not any(p.requires_grad for n, p in model.named_parameters() if ".second." in n)
    model.set_adapter("second")
    second = logits(model)
    assert not torch.equal(second, first)
    assert {n.split(".")[-2] for n, p in model.named_parameters() if p.requires_grad} == {"second"}
    model.base_model.set_adapter(["default", "second"])
    both = logits(model)
    # One adapter that is the sum of the two by construction: [A; A'] and [s B, s' B'] with scaling 1.
    model.add_adapter("sum", config(r=5, lora_alpha=5, init_lora_weights=False))
    with torch.no_grad():
        for layer in (module for module in model.modules() if isinstance(module, LoraLayer)):
            for side, dim in ((layer.lora_A, -2), (layer.lora_B, -1)):
                names = [name for name in ("default", "second") if name in side]
                for (_, target), *parts in zip(*(side[n].named_parameters() for n in ("sum", *names)), strict=True):
                    scaled = [
                        part if dim == -2 else part * layer.scaling[n]
                        for n, (_, part) in zip(names, parts, strict=True)
                    ]
                    missing = list(target.shape)
                    missing[dim] -= sum(part.shape[dim] for part in scaled)
                    target.copy_(torch.cat([*scaled, torch.zeros(missing)], dim=dim))
    model.set_adapter("sum")
    summed = logits(model)
    assert (summed - both).abs().max() <= 1e-5 * both.abs().max()  # DESIGN's bound of fp32 mode
    assert all((summed - alone).abs().max() > 0.01 * both.abs().max() for alone in (first, second))
    model.set_adapter("default")
    assert torch.equal(logits(model), first)
    model.delete_adapter("second")
    model.delete_adapter("sum")
    assert all(list(layer.lora_A) == ["default"] for layer in expert_layers(model))
    assert torch.equal(logits(model), first)


def test_adapter_names_choose_one_for_each_sample(base: PreTrainedModel) -> None:
    model = get_peft_model(base, config(init_lora_weights=False))
    model.add_adapter("second", config(r=2, target_modules=["experts"], init_lora_weights=False))
    model.eval()
    mixed = logits(model, adapter_names=["second", "__base__"])
    with model.disable_adapter():
        assert torch.allclose(mixed[1], logits(model)[1], rtol=0, atol=1e-5)
    model.set_adapter("second")
    assert torch.allclose(mixed[0], logits(model)[0], rtol=0, atol=1e-5)
    model.set_adapter("default")
    mixed = logits(model, adapter_names=["default", "second"])
    assert torch.allclose(mixed[0], logits(model)[0], rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="nobody"):
        logits(model, adapter_names=["default", "nobody"])


def test_adapter_names_must_fit_the_tokens() -> None:
    layer, _ = lone_layer()
    with pytest.raises(ValueError, match="3 entries"):
        layer(*routed(tokens=10), adapter_names=["default"] * 3)


def test_nothing_moves_or_casts_the_factors(base: PreTrainedModel) -> None:
    model = get_peft_model(base, config())
    parameters = [factor for layer in expert_layers(model) for factor in layer.factors("default")]
    for change in (lambda: model.half(), lambda: model.bfloat16(), lambda: model.to("meta"), lambda: model.double()):
        change()
        now = [factor for layer in expert_layers(model) for factor in layer.factors("default")]
        assert all(
            a is b and a.dtype is torch.float32 and a.device.type == "cpu" for a, b in zip(parameters, now, strict=True)
        )


def test_bf16_model_trains_fp32_factors(directories: dict[str, Path]) -> None:
    model = get_peft_model(load_model(directories["qwen3_moe"], dtype=torch.bfloat16), config())
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    model(tiny_input(), labels=tiny_input()).loss.backward()
    assert {p.grad.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


def test_parameter_counts(base: PreTrainedModel) -> None:
    model = get_peft_model(base, config())
    c = base.config
    q_proj = 3 * (c.hidden_size + c.num_attention_heads * c.head_dim)
    experts = c.num_experts * 3 * 3 * (c.hidden_size + c.moe_intermediate_size)
    trainable, everything = model.get_nb_trainable_parameters()
    assert trainable == c.num_hidden_layers * (q_proj + experts)
    mapped = c.num_hidden_layers * 3 * c.num_experts * c.hidden_size * c.moe_intermediate_size
    assert everything == mapped + sum(p.numel() for p in model.parameters())
    # ktransformers 2146: 40 layers, 256 experts, H 2048, I 512, r 8
    assert 40 * expert_parameter_count(256, 2048, 512, 8) == 629_145_600


def test_rank_and_alpha_pattern_for_experts(base: PreTrainedModel) -> None:
    model = get_peft_model(base, config(rank_pattern={"experts": 5}, alpha_pattern={"experts": 1}))
    for layer in expert_layers(model):
        assert layer.r["default"] == 5 and layer.scaling["default"] == 1 / 5
    assert model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj").r["default"] == 3


@pytest.mark.parametrize("rank", [0, 257])
def test_rank_out_of_range(base: PreTrainedModel, rank: int) -> None:
    before = logits(base)
    with pytest.raises(AdapterError, match="1 to 256"):
        get_peft_model(base, config(rank_pattern={"experts": rank}))
    assert torch.equal(logits(base), before)  # and the model is as it was
    model = get_peft_model(base, config())
    with pytest.raises(AdapterError, match="1 to 256"):
        model.add_adapter("second", config(rank_pattern={"experts": rank}))
    assert all(list(layer.lora_A) == ["default"] for layer in expert_layers(model))


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_matches_nothing(base: PreTrainedModel, field: str) -> None:
    with pytest.raises(AdapterError, match=f"{field} 'expert' matches no adapted module"):
        get_peft_model(base, config(**{field: {"expert": 4}}))


def test_deepcopy_shares_the_experts_and_nothing_else(base: PreTrainedModel) -> None:
    model = get_peft_model(base, config(init_lora_weights=False))
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), logits(model))
    for ours, theirs in zip(expert_layers(model), expert_layers(twin), strict=True):
        assert ours.base_layer.weights is theirs.base_layer.weights
        assert all(a is not b for a, b in zip(ours.factors("default"), theirs.factors("default"), strict=True))
    before = logits(model)
    with torch.no_grad():
        for layer in expert_layers(twin):
            layer.lora_B["default"].gate.zero_()
    assert torch.equal(logits(model), before) and not torch.equal(logits(twin), before)
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(model)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_merging_is_refused_and_changes_nothing(base: PreTrainedModel) -> None:
    model = get_peft_model(base, config(init_lora_weights=False))
    before = logits(model)
    for merge in (model.merge_and_unload, model.merge_adapter, next(expert_layers(model)).merge):
        with pytest.raises(NotImplementedError, match="mapped read-only"):
            merge()
    with pytest.raises(NotImplementedError, match="add_weighted_adapter"):
        model.add_weighted_adapter(["default"], [1.0], "sum")
    assert torch.equal(logits(model), before)
    with model.disable_adapter():
        plain = logits(model)
    assert model.unload() is base
    assert torch.equal(logits(base), plain)
    assert not any(isinstance(module, ExpertLora) for module in base.modules())
    assert torch.equal(logits(get_peft_model(base, config())), plain)


def test_attention_adapters_merge(base: PreTrainedModel) -> None:
    model = get_peft_model(base, config(target_modules=["q_proj"], init_lora_weights=False))
    adapted = logits(model)
    assert torch.allclose(logits(model.merge_and_unload()), adapted, rtol=0, atol=1e-4 * adapted.abs().max())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("lora_bias", True),
        ("bias", "all"),
        ("fan_in_fan_out", True),
        ("modules_to_save", ["experts"]),
        ("modules_to_save", ["lm_head"]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "orthogonal"),
        ("init_lora_weights", "eva"),
        ("trainable_token_indices", [3]),
        ("layer_replication", [(0, 2)]),
        ("use_qalora", True),
        ("ensure_weight_tying", True),
        ("lora_dropout", 1.5),
        ("task_type", "SEQ_CLS"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*eva_config.*")
def test_unsupported_fields_are_refused_by_name(base: PreTrainedModel, field: str, value: object) -> None:
    before = logits(base)
    with pytest.raises(AdapterError, match=field):
        get_peft_model(base, config(**{field: value}))
    model = get_peft_model(base, config())
    with pytest.raises(AdapterError, match=field):
        model.add_adapter("second", config(**{field: value}))
    assert list(model.peft_config) == ["default"]
    assert torch.equal(logits(model), before)


def test_other_methods_are_refused(base: PreTrainedModel) -> None:
    with pytest.raises(AdapterError, match="IA3Config"):
        get_peft_model(base, peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_proj", "qproj"], "'qproj'.*match no module"),
        (["q_proj", "w1"], "'w1'.*match no module"),
        (["q_proj", "gate_proj", "up_proj", "down_proj"], "add 'experts'"),
        (r".*(q_proj|up_proj)", "add 'experts'"),
        (["q_proj", "experts.down_proj"], "add 'experts'"),
        (["q_proj", "gate_up_proj"], "add 'experts'"),
        (["mlp"], "Qwen3MoeSparseMoeBlock"),
        (["embed_tokens"], "Embedding"),
        (["gate"], "Qwen3MoeTopKRouter"),
        ([], "target_modules is empty"),
        (None, "target_modules is empty"),
    ],
)
def test_targets_that_would_leave_experts_out_are_refused(base: PreTrainedModel, targets: Any, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        get_peft_model(base, config(target_modules=targets))


def adapted(model: KtftPeftModel, layer: int) -> set[str]:
    inner = f"base_model.model.model.layers.{layer}."
    return {
        name.partition(".lora_A")[0]
        for name in (n.removeprefix(inner) for n, _ in model.named_parameters() if n.startswith(inner))
        if ".lora_A" in name
    }


def test_shared_experts_and_dense_layers_are_ordinary_targets(directories: dict[str, Path]) -> None:
    def load() -> PreTrainedModel:
        return load_model(directories["deepseek_v3"], dtype=torch.float32)

    dense = {f"mlp.{p}_proj" for p in ("gate", "up", "down")}
    shared = {f"mlp.shared_experts.{p}_proj" for p in ("gate", "up", "down")}
    everything = get_peft_model(load(), config(target_modules=["gate_proj", "up_proj", "down_proj", "experts"]))
    assert adapted(everything, 0) == dense
    assert adapted(everything, 1) == {"mlp.experts", *shared}
    only_shared = get_peft_model(load(), config(target_modules=["shared_experts.down_proj"]))
    assert adapted(only_shared, 0) == set() and adapted(only_shared, 1) == {"mlp.shared_experts.down_proj"}
    excluded = get_peft_model(load(), config(target_modules=["up_proj", "experts"], exclude_modules=r".*layers\.2.*"))
    assert adapted(excluded, 1) == {"mlp.experts", "mlp.shared_experts.up_proj"} and adapted(excluded, 2) == set()
    pattern = get_peft_model(load(), config(target_modules=r".*layers\.2\.mlp\.experts|.*layers\.1\.self_attn\.o_proj"))
    assert adapted(pattern, 1) == {"self_attn.o_proj"} and adapted(pattern, 2) == {"mlp.experts"}


def test_all_linear_includes_the_experts(directories: dict[str, Path]) -> None:
    model = get_peft_model(
        load_model(directories["qwen2_moe"], dtype=torch.float32), config(target_modules="all-linear")
    )
    attention = {f"self_attn.{p}_proj" for p in "qkvo"}
    shared = {f"mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")} | {"mlp.shared_expert_gate"}
    assert adapted(model, 1) == {"mlp.experts", *attention, *shared}
    assert not any("lm_head" in n for n, p in model.named_parameters() if p.requires_grad)


def test_the_users_config_is_not_changed(base: PreTrainedModel) -> None:
    given = config(target_modules="all-linear")
    get_peft_model(base, given)
    assert given.target_modules == "all-linear" and given.base_model_name_or_path is None


def test_models_that_cannot_be_wrapped(base: PreTrainedModel, directories: dict[str, Path]) -> None:
    model = get_peft_model(base, config())
    with pytest.raises(AdapterError, match="add_adapter"):
        get_peft_model(model, config())
    with pytest.raises(AdapterError, match="adapters already"):
        get_peft_model(base, config())
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(directories["qwen3_moe"])
    with pytest.raises(AdapterError, match="no mapped experts"):
        get_peft_model(stock, config())
    with pytest.raises(AdapterError, match="low_cpu_mem_usage"):
        model.add_adapter("second", config(), low_cpu_mem_usage=True)
    assert list(model.peft_config) == ["default"]
