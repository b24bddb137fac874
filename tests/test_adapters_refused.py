"""What an adapter's files, its config and its base may not be: each is refused by name, and changes nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ktft.adapters import AdapterError, KtftPeftModel, get_peft_model, load_adapter
from ktft.adapters.disk import AdapterTensors
from ktft.adapters.model import KtftLoraModel
from ktft.lora import ExpertLora
from ktft.model import load_model
from tests.test_adapters_stock import BEYOND
from tests.tiny_adapter import EXPERT, FIELDS, LINEAR, edit_config, edit_tensors, logits, refused
from tests.tiny_models import tiny_checkpoint

GATE = "base_model.model.model.layers.0.mlp.experts.0.gate_proj.lora_A.weight"


def edit_metadata(adapter: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = adapter / "adapter_model.safetensors"
    with safe_open(file, framework="pt") as opened:
        value = json.loads(opened.metadata()["ktft"])
    change(value)
    save_file(load_file(file), file, metadata={"format": "pt", "ktft": json.dumps(value)})


# --- adapter_config.json ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_alhpa": 16}, "'lora_alhpa' .*is 'lora_alpha' meant"),
        ({"use_rslroa": True}, "'use_rslroa' .*is 'use_rslora' meant"),
        ({"rank_patern": {"q_proj": 3}}, "is 'rank_pattern' meant"),
        ({"something_else": 1}, "'something_else' .*no key"),
        ({"remove": "r"}, "'r' is missing"),
        ({"remove": "lora_alpha"}, "'lora_alpha' is missing"),
        ({"r": 3.0}, r"r is 3\.0; expected a whole number"),
        ({"r": True}, "r is True"),
        ({"r": "3"}, "r is '3'"),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": None}, "lora_alpha is None; expected a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"lora_dropout": "0"}, "lora_dropout is '0'"),
        ({"use_rslora": "false"}, "use_rslora is 'false'"),
        ({"target_modules": [["q_proj"]]}, "target_modules is"),
        ({"target_modules": 7}, "target_modules is 7"),
        ({"target_modules": "(q_proj"}, "target_modules is .*regular expressions"),
        ({"target_parameters": "mlp.experts.down_proj"}, "target_parameters is .*list of names"),
        ({"rank_pattern": {"(": 3}}, r"rank_pattern is .*regular expressions; '\(' is none"),
        ({"rank_pattern": {"q_proj": 3.0}}, "rank_pattern is .*whole numbers"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern is"),
        ({"layers_to_transform": ["1"]}, "layers_to_transform is"),
        ({"layers_pattern": ["("]}, "layers_pattern is"),
        ({"eva_config": {"rho": -1}, "init_lora_weights": "eva"}, "adapter_config.json: .*eva|rho"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*eva_config.*")
def test_a_config_value_that_cannot_be_meant(
    adapter: Path, moe_base: PreTrainedModel, changes: dict[str, Any], message: str
) -> None:
    refused(adapter, moe_base, changes, message)


@pytest.mark.parametrize(
    "changes", [{"merge_weights": False, "enable_lora": None, "of_next_year": {}}, {"unsloth_fused_expert_lora": True}]
)
def test_keys_of_other_versions_that_ask_for_nothing(
    adapter: Path, moe_base: PreTrainedModel, changes: dict[str, Any]
) -> None:
    edit_config(adapter, **changes)
    load_adapter(moe_base, adapter)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 2.0}, r"r is 2\.0"),
        ({"rank_pattern": {"(": 3}}, "rank_pattern"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"target_modules": "*experts"}, "target_modules"),
    ],
)
def test_a_config_in_python_is_checked_in_the_same_way(
    moe_base: PreTrainedModel, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(AdapterError, match=message):
        get_peft_model(moe_base, LoraConfig(**{**FIELDS, **fields}))


# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({EXPERT: torch.tensor(1.0)}), r"F32 \[\]; expected"),
        (lambda t: t.update({GATE: torch.tensor(1.0)}), r"gate_proj.lora_A.weight' is F32 \[\]; expected"),
        (lambda t: t.update({GATE: torch.ones(0, 40)}), "rank 0|expected"),
        (lambda t: t.update({LINEAR: torch.tensor(1.0)}), r"F32 \[\]; expected"),
        (lambda t: t.update({EXPERT.replace("experts.4", "experts.04"): t.pop(EXPERT)}), r"experts\.04\.up.* no place"),
        (lambda t: t.update({EXPERT.replace("experts.4", "experts.٤"): t.pop(EXPERT)}), r"experts\.٤\.up.* no place"),
        (lambda t: t.clear(), "targets 'model.layers"),
    ],
)
def test_tensors_that_are_not_what_their_names_say(
    adapter: Path, moe_base: PreTrainedModel, change: Any, message: str
) -> None:
    edit_tensors(adapter, change)
    with pytest.raises(AdapterError, match=message):
        load_adapter(moe_base, adapter)


def test_an_empty_adapter(adapter: Path, moe_base: PreTrainedModel) -> None:
    edit_tensors(adapter, lambda tensors: tensors.clear())
    edit_config(adapter, target_modules=["c_attn"], target_parameters=None)
    with pytest.raises(AdapterError, match="holds no tensor"):
        load_adapter(moe_base, adapter)


def test_ranks_are_told_as_they_are(adapter: Path, moe_base: PreTrainedModel) -> None:
    edit_config(adapter, rank_pattern={})
    with pytest.raises(AdapterError, match=r"rank 3, .* say 6 \(gate and up with 3 rows of A each\)"):
        load_adapter(moe_base, adapter)


@pytest.mark.parametrize("alphas", [{r".*\.gate_up_proj": 0}, {r".*\.gate_up_proj": 0, r".*\.down_proj": 5}])
def test_alpha_zero_of_gate_and_up_alone(adapter: Path, moe_base: PreTrainedModel, alphas: dict[str, int]) -> None:
    edit_config(adapter, alpha_pattern=alphas)
    with pytest.raises(AdapterError, match="alpha 0 for gate and up"):
        load_adapter(moe_base, adapter)


@pytest.mark.parametrize("change", [{"r": "3"}, {"target_modules": [["experts"]]}, {"alpha_pattern": {"(": 1}}])
def test_damaged_metadata(adapter: Path, moe_base: PreTrainedModel, change: dict[str, Any]) -> None:
    edit_metadata(adapter, lambda value: value["training"].update(change))
    with pytest.raises(AdapterError, match=r"metadata 'ktft' is damaged"):
        load_adapter(moe_base, adapter)


def test_ktfts_own_fused_tensors_are_block_diagonal(tmp_path: Path) -> None:
    """A family whose experts are written fused: gate's columns of B must be zero in up's rows."""
    AutoModelForCausalLM.from_config(BEYOND["granitemoe"]).save_pretrained(tmp_path / "base")
    model = get_peft_model(load_model(tmp_path / "base"), LoraConfig(**FIELDS, init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    key = "base_model.model.model.layers.1.block_sparse_moe.experts.base_layer.lora_B.weight"
    edit_tensors(tmp_path / "adapter", lambda t: t[key][-1, 0].add_(1))
    with pytest.raises(AdapterError, match=f"{key}' is not block diagonal"):
        load_adapter(load_model(tmp_path / "base"), tmp_path / "adapter")
    edit_tensors(tmp_path / "adapter", lambda t: t[key][-1, 0].sub_(1))
    edit_config(tmp_path / "adapter", rank_pattern={}, r=6)
    with pytest.raises(AdapterError, match=r"lora_A.weight' is F32 \[12, 28\]; expected \[24, 28\]"):
        load_adapter(load_model(tmp_path / "base"), tmp_path / "adapter")


# --- another base -----------------------------------------------------------------------------------------------------


def test_an_adapter_of_another_model_type(moe_directory: Path, tmp_path: Path) -> None:
    """Attention only: every tensor would fit."""
    model = get_peft_model(load_model(moe_directory), LoraConfig(**{**FIELDS, "target_modules": ["o_proj"]}))
    model.save_pretrained(tmp_path / "adapter")
    other = load_model(tiny_checkpoint("olmoe", tmp_path / "olmoe", num_attention_heads=4, head_dim=12))
    with pytest.raises(AdapterError, match=r"model type 'qwen3_moe'; this is .*model type 'olmoe'"):
        load_adapter(other, tmp_path / "adapter")


def test_a_base_may_move(
    good_adapter: Path, moe_directory: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    shutil.copytree(moe_directory, tmp_path / "elsewhere")
    load_adapter(load_model(tmp_path / "elsewhere"), good_adapter)
    assert not [w for w in recwarn if "was trained on" in str(w.message)]


def test_another_name_is_worth_a_warning_where_nothing_else_tells(adapter: Path, moe_base: PreTrainedModel) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file(load_file(file), file)
    edit_config(adapter, base_model_name_or_path="somebody/else")
    with pytest.warns(UserWarning, match="trained on 'somebody/else'"):
        load_adapter(moe_base, adapter)


def test_a_slip_in_a_path_does_not_ask_the_hub(
    moe_base: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hub(*args: Any, **kwargs: Any) -> str:
        raise FileNotFoundError("no network\nand so on")

    monkeypatch.setattr("ktft.adapters.model.hf_hub_download", hub)
    (tmp_path / "outputs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AdapterError, match="the hub is not asked"):
        load_adapter(moe_base, "outputs/typo")
    with pytest.raises(AdapterError, match=r"no directory here, and cannot be had from the hub: no network$"):
        load_adapter(moe_base, "somebody/adapter")


# --- a base that is not what it was -----------------------------------------------------------------------------------


def test_trained_parameters_outside_the_adapters(moe_base: PreTrainedModel, tmp_path: Path) -> None:
    model = get_peft_model(moe_base, LoraConfig(**FIELDS))
    router = moe_base.get_parameter("model.layers.0.mlp.gate.weight").requires_grad_(True)
    with pytest.raises(AdapterError, match=r"first is 'model\.layers\.0\.mlp\.gate\.weight'"):
        model.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
    router.requires_grad_(False)
    model.save_pretrained(tmp_path / "adapter")


@pytest.mark.parametrize("merge", ["merge_and_unload", "merge_adapter"])
def test_an_adapter_on_a_merged_base(good_adapter: Path, moe_base: PreTrainedModel, tmp_path: Path, merge: str) -> None:
    model = get_peft_model(moe_base, LoraConfig(**{**FIELDS, "target_modules": ["q_proj"]}, init_lora_weights=False))
    if merge == "merge_and_unload":
        model.merge_and_unload()
    else:
        model.merge_adapter()
        model.unload()
    with pytest.raises(AdapterError, match="has been merged into this model"):
        get_peft_model(moe_base, LoraConfig(**FIELDS))
    stacked = load_adapter(moe_base, good_adapter)  # for inference that is right
    with pytest.raises(AdapterError, match="has been merged into this model"):
        stacked.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_an_unloaded_base_is_as_good_as_new(moe_base: PreTrainedModel, tmp_path: Path) -> None:
    get_peft_model(moe_base, LoraConfig(**FIELDS)).unload()
    get_peft_model(moe_base, LoraConfig(**FIELDS)).save_pretrained(tmp_path)


def test_a_relative_base_and_another_working_directory(
    moe_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(moe_directory.parent)
    first, second, resized = (load_model(moe_directory.name) for _ in range(3))
    model = get_peft_model(first, LoraConfig(**FIELDS))
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("out")
    get_peft_model(second, LoraConfig(**FIELDS)).save_pretrained("late")
    for name in ("out", "late"):
        config = json.loads(Path(name, "adapter_config.json").read_text())
        assert os.path.realpath(config["base_model_name_or_path"]) == os.path.realpath(moe_directory)
        assert os.path.isabs(config["base_model_name_or_path"])
    resized.resize_token_embeddings(128)
    with pytest.raises(AdapterError, match=r"128 rows.*vocab_size 96"):
        get_peft_model(resized, LoraConfig(**FIELDS))
    first.resize_token_embeddings(128)
    with pytest.raises(AdapterError, match=r"128 rows.*vocab_size 96"):
        model.save_pretrained("out")


def test_the_commit_of_a_base_from_the_hub(moe_base: PreTrainedModel, tmp_path: Path) -> None:
    moe_base.name_or_path, moe_base.config._commit_hash = "somebody/model", "0123abc"
    for module in moe_base.modules():
        if type(module).__name__ == "CpuExperts":  # files in the hub's cache have no config.json beside them
            module.weights.owner = None
    get_peft_model(moe_base, LoraConfig(**FIELDS)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("somebody/model", "0123abc")


def test_compiled_modules(moe_base: PreTrainedModel, moe_directory: Path, tmp_path: Path) -> None:
    model = get_peft_model(moe_base, LoraConfig(**FIELDS, init_lora_weights=False))
    model.save_pretrained(tmp_path / "plain")
    layer = moe_base.model.layers[0]
    layer.self_attn = torch.compile(layer.self_attn, backend="eager")
    moe_base.model.layers[1] = torch.compile(moe_base.model.layers[1], backend="eager")
    model.save_pretrained(tmp_path / "compiled", state_dict=model.state_dict())
    compiled, plain = ((tmp_path / name) for name in ("compiled", "plain"))
    assert (compiled / "adapter_config.json").read_bytes() == (plain / "adapter_config.json").read_bytes()
    found, expected = (load_file(path / "adapter_model.safetensors") for path in (compiled, plain))
    assert list(found) == list(expected) and all(torch.equal(found[key], expected[key]) for key in expected)
    model.load_adapter(tmp_path / "plain", "default")
    with pytest.raises(AdapterError, match=r"torch\.compile"):
        model.add_adapter("second", LoraConfig(**FIELDS))


# --- loading that stops half-way --------------------------------------------------------------------------------------


def lora_parameters(model: nn.Module, adapter: str) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if f".{adapter}." in name]


def test_a_load_that_stops_half_way_leaves_no_adapter(
    good_adapter: Path, moe_base: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = logits(moe_base)

    def stop(*args: Any) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(AdapterTensors, "copy_linear", stop)
        with pytest.raises(OSError, match="disk is gone"):
            load_adapter(moe_base, good_adapter)
        assert not any(isinstance(module, BaseTunerLayer) for module in moe_base.modules())
        assert torch.equal(logits(moe_base), before)
        model = get_peft_model(moe_base, LoraConfig(**FIELDS))
        with pytest.raises(OSError, match="disk is gone"):
            load_adapter(model, good_adapter, "second")
    assert list(model.peft_config) == ["default"] and not lora_parameters(model, "second")
    load_adapter(model, good_adapter, "second")


def test_an_injection_that_stops_half_way_is_undone(moe_base: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    before = logits(moe_base)
    update, calls = ExpertLora.update_layer, []

    def stop_at_the_second(self: ExpertLora, *args: Any, **kwargs: Any) -> None:
        calls.append(self)
        if len(calls) % 2 == 0:
            raise MemoryError
        update(self, *args, **kwargs)

    monkeypatch.setattr(ExpertLora, "update_layer", stop_at_the_second)
    with pytest.raises(MemoryError):
        get_peft_model(moe_base, LoraConfig(**FIELDS))
    assert len(calls) == 2 and not any(isinstance(module, BaseTunerLayer) for module in moe_base.modules())
    assert torch.equal(logits(moe_base), before)
    monkeypatch.undo()
    model = get_peft_model(moe_base, LoraConfig(**FIELDS))
    calls.clear()
    monkeypatch.setattr(ExpertLora, "update_layer", stop_at_the_second)
    given = LoraConfig(**FIELDS, rank_pattern={"experts": 2})
    with pytest.raises(MemoryError):
        model.add_adapter("second", given)
    # what PEFT was not to see is back in the caller's config
    assert given.target_modules == {"q_proj", "experts"} and given.rank_pattern == {"experts": 2}


def test_an_injection_that_never_starts_gives_the_config_back(
    moe_base: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: Any) -> None:
        raise MemoryError

    model = get_peft_model(moe_base, LoraConfig(**FIELDS))
    monkeypatch.setattr(KtftLoraModel, "_prepare_adapter_config", stop)
    given = LoraConfig(**FIELDS)
    with pytest.raises(MemoryError):
        model.add_adapter("second", given)
    assert given.target_modules == {"q_proj", "experts"} and given.target_parameters is None


# --- what may be trained ----------------------------------------------------------------------------------------------


def trained(model: KtftPeftModel, adapter: str) -> set[bool]:
    return {p.requires_grad for p in lora_parameters(model, adapter)}


def test_what_loading_makes_trainable(good_adapter: Path, moe_base: PreTrainedModel) -> None:
    model = load_adapter(moe_base, good_adapter)
    assert model.peft_config["default"].inference_mode and trained(model, "default") == {False}
    load_adapter(model, good_adapter, "second", is_trainable=True)
    assert not model.peft_config["second"].inference_mode and trained(model, "second") == {True}
    load_adapter(model, good_adapter, "third")
    assert model.peft_config["third"].inference_mode and trained(model, "third") == {False}
    # once more, onto the frozen one, to be trained on
    load_adapter(model, good_adapter, "default", is_trainable=True)
    assert not model.peft_config["default"].inference_mode and trained(model, "default") == {True}
    assert trained(model, "third") == {False}


@pytest.mark.parametrize(
    "key", ["gate_up_proj", "lora_A.default.weight", "lora_B.weight", "0.gate_proj.lora_A.weight", "down_proj"]
)
def test_a_state_dict_drops_nothing_under_the_experts(moe_base: PreTrainedModel, key: str) -> None:
    model = get_peft_model(moe_base, LoraConfig(**FIELDS))
    state = {**model.state_dict(), f"base_model.model.model.layers.1.mlp.experts.{key}": torch.ones(1)}
    with pytest.raises(RuntimeError, match=rf"experts.*no stacked factors.*'{key}'"):
        model.load_state_dict(state, strict=False)
    model.load_state_dict(model.state_dict())


def test_saving_after_the_base_was_written_onto_warns(moe_directory: Path, tmp_path: Path) -> None:
    """The values trained are kept, but not without a word: the model no longer has the weights it was loaded with."""
    copy_of_base = tmp_path / "base"
    shutil.copytree(moe_directory, copy_of_base)
    model = get_peft_model(load_model(copy_of_base), LoraConfig(**FIELDS))
    (weights,) = copy_of_base.glob("*.safetensors")
    weights.touch()
    with pytest.warns(UserWarning, match="was written onto"):
        model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
