"""Adapter directories: every tensor accounted for, nothing silent, nothing half written, stock loads refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from ktft.adapters import AdapterError, KtftPeftModel, get_peft_model, load_adapter
from ktft.adapters.layout import unpack_fused
from ktft.model import load_model
from tests.tiny_adapter import EXPERT, FIELDS, LINEAR, edit_config, edit_tensors, logits, refused
from tests.tiny_models import tiny_checkpoint


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}


# --- loading ----------------------------------------------------------------------------------------------------------


def rename(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(EXPERT), rf"{EXPERT}'? is missing"),
        (lambda t: t.pop(LINEAR), rf"{LINEAR}'? is missing"),
        (lambda t: [t.pop(key) for key in list(t) if "layers.1.mlp" in key], "targets 'model.layers.1.mlp.experts'"),
        (
            lambda t: [t.pop(key) for key in list(t) if "layers.1.self" in key],
            "targets 'model.layers.1.self_attn.q_proj'",
        ),
        (rename(EXPERT, EXPERT.replace("up_proj", "pu_proj")), "pu_proj.lora_B.weight' has no place"),
        (rename(EXPERT, EXPERT.replace("experts.4", "experts.6")), r"experts\.6\.up_proj.lora_B.weight' has no place"),
        (rename(EXPERT, EXPERT.replace("lora_B", "lora_C")), "lora_C.weight' has no place"),
        (rename(EXPERT, EXPERT.removeprefix("base_model.model.")), "up_proj.lora_B.weight' has no place"),
        (rename(LINEAR, LINEAR.replace("q_proj", "qkv_proj")), "no module 'model.layers.0.self_attn.qkv_proj'"),
        (lambda t: t.update({LINEAR.replace("layers.0", "layers.7"): t[LINEAR].clone()}), "no module 'model.layers.7"),
        (
            lambda t: t.update({"base_model.model.model.layers.0.mlp.gate.lora_A.weight": t[LINEAR].clone()}),
            "TopKRouter",
        ),
        (lambda t: t.update({"base_model.model.lm_head.weight": t[LINEAR].clone()}), "lm_head.weight' has no place"),
        (
            lambda t: t.update({EXPERT: t[EXPERT].T.contiguous()}),
            r"up_proj.lora_B.weight' is F32 \[3, 28\]; expected \[28, 3\]",
        ),
        (
            lambda t: t.update({LINEAR: t[LINEAR][:2].clone()}),
            "rank 3, the tensors in adapter_model.safetensors say 2|expected",
        ),
        (lambda t: t.update({EXPERT: t[EXPERT].to(torch.int8)}), "up_proj.lora_B.weight' is I8"),
        (lambda t: t[EXPERT].fill_(float("nan")), "up_proj.lora_B.weight' holds NaN"),
        (lambda t: t[LINEAR].fill_(float("inf")), "q_proj.lora_A.weight' holds NaN or infinity"),
    ],
)
def test_a_damaged_file_is_refused_by_tensor(
    adapter: Path, moe_base: PreTrainedModel, change: Any, message: str
) -> None:
    edit_tensors(adapter, change)
    before = logits(moe_base)
    with pytest.raises(AdapterError, match=message):
        load_adapter(moe_base, adapter)
    assert torch.equal(logits(moe_base), before)
    model = get_peft_model(moe_base, LoraConfig(**FIELDS))
    with pytest.raises(AdapterError, match=message):
        model.load_adapter(adapter, "second")
    values = parameters(model)
    with pytest.raises(AdapterError, match=message):
        model.load_adapter(adapter, "default", is_trainable=True)
    assert list(model.peft_config) == ["default"]
    assert all(torch.equal(values[name], value) for name, value in parameters(model).items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_alpha": 7}, "scaling"),
        ({"r": 4}, "rank 4, the tensors in adapter_model.safetensors say 3"),
        ({"alpha_pattern": {}}, "scaling"),
        ({"rank_pattern": {}}, "gate_up_proj' rank 3, the tensors in adapter_model.safetensors say 6"),
        ({"use_rslora": True}, "scaling"),
        ({"target_modules": ["q_proj", "v_proj"]}, "targets 'model.layers.0.self_attn.v_proj'"),
        ({"target_modules": []}, "does not target 'model.layers.0.self_attn.q_proj'"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "gate_up_proj"),
        ({"target_parameters": None}, "experts"),
        ({"target_parameters": None, "target_modules": None}, "names neither"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"lora_B_layout": "grouped_by_expert"}, "grouped_by_expert"),
    ],
)
def test_a_config_that_does_not_fit_the_tensors_is_refused(
    adapter: Path, moe_base: PreTrainedModel, changes: dict[str, Any], message: str
) -> None:
    refused(adapter, moe_base, changes, message)


def test_files_that_are_missing_or_broken(adapter: Path, moe_base: PreTrainedModel) -> None:
    weights, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    whole = weights.read_bytes()
    for damaged in (whole[:-100], whole[: len(whole) // 2], whole[:7], b"", whole + b"more"):
        weights.write_bytes(damaged)
        with pytest.raises(AdapterError, match=r"adapter_model\.safetensors"):
            load_adapter(moe_base, adapter)
    weights.rename(adapter / "adapter_model.bin")
    with pytest.raises(AdapterError, match="pickled"):
        load_adapter(moe_base, adapter)
    config.write_text("{")
    with pytest.raises(AdapterError, match="JSON"):
        load_adapter(moe_base, adapter)
    config.unlink()
    with pytest.raises(AdapterError, match=r"no adapter_config\.json"):
        load_adapter(moe_base, adapter)
    with pytest.raises(AdapterError, match="neither an adapter directory nor"):
        load_adapter(moe_base, adapter / "nowhere")


def test_a_newer_format_is_refused(adapter: Path, moe_base: PreTrainedModel) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file(load_file(file), file, metadata={"ktft": json.dumps({"format": 2, "training": {}})})
    with pytest.raises(AdapterError, match="format 2"):
        load_adapter(moe_base, adapter)


def test_without_metadata_the_values_are_the_same(
    good_adapter: Path, adapter: Path, moe_base: PreTrainedModel, moe_directory: Path
) -> None:
    edit_tensors(adapter, lambda tensors: None, metadata=False)
    model, other = (
        load_adapter(moe_base, adapter),
        load_adapter(load_model(moe_directory, dtype=torch.float32), good_adapter),
    )
    assert torch.equal(logits(model), logits(other))


def test_half_precision_files_are_read_exactly(good_adapter: Path, adapter: Path, moe_base: PreTrainedModel) -> None:
    edit_tensors(adapter, lambda t: t.update({key: value.bfloat16() for key, value in t.items()}))
    values = parameters(load_adapter(moe_base, adapter))
    assert {value.dtype for value in values.values()} == {torch.float32}
    stored = load_file(adapter / "adapter_model.safetensors")
    stack = values["base_model.model.model.layers.1.mlp.experts.lora_B.default.up"]
    assert torch.equal(stack[4], stored[EXPERT].float())


def test_per_expert_adapters_of_transformers_4(
    good_adapter: Path, adapter: Path, moe_base: PreTrainedModel, moe_directory: Path
) -> None:
    """Every expert a module: the same tensors, and a config that names modules."""
    edit_tensors(adapter, lambda tensors: None, metadata=False)
    edit_config(
        adapter,
        target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"],
        target_parameters=None,
        rank_pattern={},
        alpha_pattern={},
        lora_dropout=0.1,
        peft_version="0.13.0",
    )
    model, other = (
        load_adapter(moe_base, adapter),
        load_adapter(load_model(moe_directory, dtype=torch.float32), good_adapter),
    )
    assert torch.equal(logits(model), logits(other))
    assert model.peft_config["default"].lora_dropout == 0.1


def test_loading_keeps_the_parameters(good_adapter: Path, moe_base: PreTrainedModel) -> None:
    model = get_peft_model(moe_base, LoraConfig(**FIELDS))
    before = dict(model.named_parameters())
    result = model.load_adapter(good_adapter, "default", is_trainable=True)
    assert result.missing_keys == [] and result.unexpected_keys == []
    after = dict(model.named_parameters())
    assert list(before) == list(after) and all(before[name] is after[name] for name in before)
    assert model.training and all(p.requires_grad for n, p in after.items() if "lora_" in n)
    assert all(p.any() for n, p in after.items() if "lora_B" in n)


def test_loading_into_an_adapter_of_another_shape_is_refused(good_adapter: Path, moe_base: PreTrainedModel) -> None:
    model = get_peft_model(moe_base, LoraConfig(**{**FIELDS, "lora_alpha": 5}))
    with pytest.raises(AdapterError, match="scaling 2 by"):
        model.load_adapter(good_adapter, "default")
    model.add_adapter("wider", LoraConfig(**{**FIELDS, "target_modules": ["q_proj", "o_proj", "experts"]}))
    with pytest.raises(AdapterError, match="o_proj"):
        model.load_adapter(good_adapter, "wider")
    model.add_adapter(
        "ranks", LoraConfig(**{**FIELDS, "rank_pattern": {"experts": 2}, "alpha_pattern": {"experts": 4}})
    )
    with pytest.raises(AdapterError, match="has rank 2"):
        model.load_adapter(good_adapter, "ranks")


def test_further_adapters_come_inactive(good_adapter: Path, moe_base: PreTrainedModel) -> None:
    model = get_peft_model(moe_base, LoraConfig(**FIELDS))
    before = logits(model)
    assert load_adapter(model, good_adapter, "second") is model
    assert not model.training
    assert torch.equal(logits(model), before)
    model.set_adapter("second")
    assert not torch.equal(logits(model), before)


# --- fused tensors ----------------------------------------------------------------------------------------------------


def test_fused_layout_by_hand() -> None:
    """unsloth-zoo 1269: in = out = 1, two experts, rank 2; 21 and 4300 would be the wrong order of B's columns."""
    a, b = unpack_fused(torch.tensor([[1.0], [10.0], [100.0], [1000.0]]), torch.tensor([[1.0, 2.0, 3.0, 4.0]]), 2)
    assert a.shape == (2, 2, 1) and b.shape == (2, 1, 2)
    assert (b @ a).flatten().tolist() == [31.0, 4200.0]


def fused(path: Path, h: int, i: int, legacy: bool, only_gate_up: bool = False, **config: Any) -> Path:
    """A fused adapter file of one family member with 2 layers, 6 experts and rank 2."""
    e, r = 6, 2
    parts = [("gate_up_proj", ".base_layer", h, 2 * i), ("down_proj", "", i, h)]
    if only_gate_up:
        parts = [("gate_up_proj", "", h, 2 * i)]
    tensors = {}
    for layer in range(2):
        for _, inner, inputs, outputs in parts:
            if legacy:
                inputs, outputs = outputs, inputs
            key = f"base_model.model.model.layers.{layer}.mlp.experts{inner}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(r * e, inputs)
            tensors[f"{key}.lora_B.weight"] = torch.randn(outputs, r * e)
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    names = [f"mlp.experts.{name}" for name, *_ in parts]
    LoraConfig(r=r, target_modules=[], target_parameters=names).save_pretrained(path)
    edit_config(path, **config)
    return path


def test_the_layout_of_old_peft_is_refused(moe_base: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="in and out exchanged"):
        load_adapter(moe_base, fused(tmp_path / "shape", 40, 28, legacy=True, peft_version=None))
    with pytest.raises(AdapterError, match=r"PEFT 0\.18\.1 wrote it"):
        load_adapter(moe_base, fused(tmp_path / "version", 40, 28, legacy=True, peft_version="0.18.1"))
    load_adapter(moe_base, fused(tmp_path / "new", 40, 28, legacy=False, peft_version=None))


def test_an_ambiguous_layout_is_decided_by_the_version_or_refused(tmp_path: Path) -> None:
    directory = tiny_checkpoint("qwen3_moe", tmp_path / "base", moe_intermediate_size=20)
    base = load_model(directory)
    load_adapter(base, fused(tmp_path / "shape", 40, 20, legacy=False, peft_version=None)).unload()  # down tells
    unknown = fused(tmp_path / "unknown", 40, 20, legacy=False, only_gate_up=True, peft_version=None)
    with pytest.raises(AdapterError, match="neither peft_version"):
        load_adapter(base, unknown)
    with pytest.raises(AdapterError, match=r"PEFT 0\.19\.0 wrote it"):
        load_adapter(base, fused(tmp_path / "old", 40, 20, legacy=True, peft_version="0.19.0"))
    load_adapter(base, fused(tmp_path / "new", 40, 20, legacy=False, peft_version="0.19.1"))


def test_fused_files_are_accounted_for_too(moe_base: PreTrainedModel, tmp_path: Path) -> None:
    key = "base_model.model.model.layers.1.mlp.experts.base_layer.lora_B.weight"
    for number, (change, message) in enumerate(
        [
            (lambda t: t.pop(key), f"{key}' of 'gate_up_proj' is missing"),
            (lambda t: t.pop(key.replace("base_layer.", "")), "experts.lora_B.weight' of 'down_proj' is missing"),
            (
                lambda t: [t.pop(key.replace("base_layer.", "").replace("lora_B", f"lora_{side}")) for side in "AB"],
                "experts.lora_A.weight' of 'down_proj' is missing",
            ),
            (
                lambda t: [t.pop(key.replace("lora_B", f"lora_{side}")) for side in "AB"],
                "base_layer.lora_A.weight' of 'gate_up_proj' is missing",
            ),
            (lambda t: t.update({key: t[key][:, :6].contiguous()}), r"expected \[56, 12\]"),
            (
                rename(key, key.replace("layers.1", "layers.2")),
                "layers.2.mlp.experts.base_layer.lora_B.weight' has no place",
            ),
        ]
    ):
        path = fused(tmp_path / str(number), 40, 28, legacy=False)
        edit_tensors(path, change)
        with pytest.raises(AdapterError, match=message):
            load_adapter(moe_base, path)


# --- saving -----------------------------------------------------------------------------------------------------------


def test_a_directory_holds_two_plain_files(good_adapter: Path, moe_directory: Path) -> None:
    assert sorted(file.name for file in good_adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((good_adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(moe_directory)
    assert config["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert config["rank_pattern"] == {r".*\.gate_up_proj": 6} and config["alpha_pattern"] == {r".*\.gate_up_proj": 12}
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (3, 6, 0.0)
    tensors = load_file(good_adapter / "adapter_model.safetensors")
    assert len(tensors) == 2 * (2 + 6 * 6) and {t.dtype for t in tensors.values()} == {torch.float32}
    assert tensors[EXPERT].shape == (28, 3)


def test_mixtral_keeps_its_published_names(tmp_path: Path) -> None:
    model = get_peft_model(load_model(tiny_checkpoint("mixtral", tmp_path / "base")), LoraConfig(**FIELDS))
    model.save_pretrained(tmp_path / "adapter")
    keys = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert keys["base_model.model.model.layers.1.block_sparse_moe.experts.4.w3.lora_A.weight"].shape == (3, 40)
    assert keys["base_model.model.model.layers.1.block_sparse_moe.experts.4.w2.lora_A.weight"].shape == (3, 28)


def test_every_adapter_is_saved_in_its_place(moe_base: PreTrainedModel, moe_directory: Path, tmp_path: Path) -> None:
    model = get_peft_model(moe_base, LoraConfig(**FIELDS, init_lora_weights=False))
    model.add_adapter("second", LoraConfig(r=2, target_modules=["experts"], init_lora_weights=False))
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "one", selected_adapters=["second"])
    assert sorted(file.name for file in (tmp_path / "one").iterdir()) == ["second"]
    for name, path in (("default", tmp_path), ("second", tmp_path / "second")):
        model.set_adapter(name)
        other = load_adapter(load_model(moe_directory, dtype=torch.float32), path)
        assert torch.equal(logits(other), logits(model))
    with pytest.raises(AdapterError, match="nobody"):
        model.save_pretrained(tmp_path, selected_adapters=["nobody"])


def test_other_processes_write_nothing(moe_base: PreTrainedModel, tmp_path: Path) -> None:
    get_peft_model(moe_base, LoraConfig(**FIELDS)).save_pretrained(tmp_path / "x", is_main_process=False)
    assert not (tmp_path / "x").exists()


def test_values_can_come_from_a_state_dict(moe_base: PreTrainedModel, tmp_path: Path) -> None:
    model = get_peft_model(moe_base, LoraConfig(**FIELDS, init_lora_weights=False))
    state = {name: value * 2 for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=state)
    stack = dict(model.named_parameters())["base_model.model.model.layers.1.mlp.experts.lora_B.default.up"]
    assert torch.equal(load_file(tmp_path / "adapter_model.safetensors")[EXPERT], stack[4] * 2)
    state.pop("base_model.model.model.layers.1.mlp.experts.lora_B.default.up")
    with pytest.raises(AdapterError, match=r"lora_B\.default\.up"):
        model.save_pretrained(tmp_path, state_dict=state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"safe_serialization": False}, "pickle"),
        ({"save_embedding_layers": True}, "save_embedding_layers"),
        ({"path_initial_model_for_weight_conversion": "x"}, "path_initial_model_for_weight_conversion"),
        ({"misspelt": 1}, "misspelt"),
    ],
)
def test_arguments_that_cannot_be_served(
    moe_base: PreTrainedModel, tmp_path: Path, arguments: Any, message: str
) -> None:
    with pytest.raises(AdapterError, match=message):
        get_peft_model(moe_base, LoraConfig(**FIELDS)).save_pretrained(tmp_path, **arguments)


def test_a_diverged_adapter_is_not_saved(good_adapter: Path, adapter: Path, moe_base: PreTrainedModel) -> None:
    model = load_adapter(moe_base, good_adapter)
    with torch.no_grad():
        model.get_parameter("base_model.model.model.layers.1.mlp.experts.lora_B.default.up")[4, 0, 0] = float("nan")
    with pytest.raises(AdapterError, match=EXPERT):
        model.save_pretrained(adapter)
    assert (adapter / "adapter_model.safetensors").read_bytes() == (
        good_adapter / "adapter_model.safetensors"
    ).read_bytes()


def test_the_base_directory_is_not_written_into(moe_directory: Path, moe_base: PreTrainedModel, tmp_path: Path) -> None:
    model = get_peft_model(moe_base, LoraConfig(**FIELDS))
    before = {file.name for file in moe_directory.iterdir()}
    (tmp_path / "link").symlink_to(moe_directory)
    for path in (moe_directory, tmp_path / "link"):
        with pytest.raises(AdapterError, match="base model lies there"):
            model.save_pretrained(path)
    model.get_base_model().name_or_path = ""  # the mapped files tell, too
    with pytest.raises(AdapterError, match="base model lies there"):
        model.save_pretrained(moe_directory)
    assert {file.name for file in moe_directory.iterdir()} == before


def test_a_scaled_adapter_is_not_saved(moe_base: PreTrainedModel, tmp_path: Path) -> None:
    model = get_peft_model(moe_base, LoraConfig(**FIELDS))
    layer = model.get_submodule("base_model.model.model.layers.0.mlp.experts")
    layer.scale_layer(0.5)
    with pytest.raises(AdapterError, match="unscale_layer"):
        model.save_pretrained(tmp_path)
    layer.unscale_layer()
    model.save_pretrained(tmp_path)


KILLED = """
import os, signal, sys
import torch
from peft import LoraConfig
from ktft.adapters import get_peft_model, load_adapter
from ktft.model import load_model
if sys.argv[4] == "same":
    model = load_adapter(load_model(sys.argv[1]), sys.argv[2])
else:
    config = LoraConfig(r=3, lora_alpha=float(sys.argv[4]), target_modules=["q_proj", "experts"], task_type="CAUSAL_LM")
    model = get_peft_model(load_model(sys.argv[1]), config)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        parameter.add_(1.0) if "lora_" in name else None
calls = 0
replace = os.replace
def killed(source, target):
    global calls
    calls += 1
    if calls > int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = killed
model.save_pretrained(sys.argv[2])
"""


def killed_save(moe_directory: Path, adapter: Path, replaced: int, alpha: str) -> None:
    """Save onto ``adapter`` in a process that dies after so many files have been put in their place."""
    command = [sys.executable, "-c", KILLED, str(moe_directory), str(adapter), str(replaced), alpha]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("replaced", [0, 1])
def test_a_killed_save_leaves_the_previous_adapter(
    good_adapter: Path, adapter: Path, moe_base: PreTrainedModel, moe_directory: Path, replaced: int
) -> None:
    """Killed before the first file is in its place, and between the two."""
    killed_save(moe_directory, adapter, replaced, "same")
    model, other = (
        load_adapter(moe_base, adapter),
        load_adapter(load_model(moe_directory, dtype=torch.float32), good_adapter),
    )
    assert torch.equal(logits(model), logits(other))


def test_a_save_killed_between_different_files_is_refused(
    adapter: Path, moe_base: PreTrainedModel, moe_directory: Path
) -> None:
    """The new config over the old tensors: the same shapes, another scaling."""
    killed_save(moe_directory, adapter, 1, "12")
    with pytest.raises(AdapterError, match="scaling"):
        load_adapter(moe_base, adapter)


def test_resized_embeddings_are_refused(moe_base: PreTrainedModel, moe_directory: Path, tmp_path: Path) -> None:
    model = get_peft_model(moe_base, LoraConfig(**FIELDS))
    model.get_base_model().resize_token_embeddings(128)
    with pytest.raises(AdapterError, match=r"128 rows.*vocab_size 96"):
        model.save_pretrained(tmp_path)
    resized = load_model(moe_directory)
    resized.resize_token_embeddings(128)
    with pytest.raises(AdapterError, match=r"128 rows.*vocab_size 96"):
        get_peft_model(resized, LoraConfig(**FIELDS))


# --- stock PEFT on a ktft model ---------------------------------------------------------------------------------------


def test_stock_peft_does_not_load_onto_a_ktft_model(good_adapter: Path, moe_base: PreTrainedModel) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match=r"ktft\.load_adapter"):
            PeftModel.from_pretrained(moe_base, good_adapter)


def test_stock_peft_does_not_load_fused_tensors_either(moe_base: PreTrainedModel, tmp_path: Path) -> None:
    path = fused(tmp_path / "fused", 40, 28, legacy=False)
    edit_config(path, target_modules=["q_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match=r"ktft\.load_adapter"):
            PeftModel.from_pretrained(moe_base, path)


def test_stock_peft_does_not_make_expert_adapters_on_a_ktft_model(moe_base: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="CpuExperts"):
        peft.get_peft_model(moe_base, LoraConfig(**FIELDS))


def test_stock_state_dict_functions_do_not_load_experts(good_adapter: Path, moe_base: PreTrainedModel) -> None:
    model = get_peft_model(moe_base, LoraConfig(**FIELDS))
    assert isinstance(model, KtftPeftModel)
    with pytest.raises(RuntimeError, match=r"ktft\.load_adapter"):
        peft.set_peft_model_state_dict(model, load_file(good_adapter / "adapter_model.safetensors"))


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["gate_proj", "up_proj", "down_proj"]},
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ],
)
def test_stock_peft_does_not_leave_experts_out_silently(moe_base: PreTrainedModel, fields: dict[str, object]) -> None:
    with pytest.raises(RuntimeError, match=r"ktft\.get_peft_model"):
        peft.get_peft_model(moe_base, LoraConfig(task_type="CAUSAL_LM", **fields))
