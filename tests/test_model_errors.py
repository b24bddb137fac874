"""load_model on damaged or changed checkpoints: an error that names the tensor, and a process left as it was."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe import modeling_qwen3_moe

from ktft import families
from ktft.checkpoint import CheckpointError
from ktft.experts import CpuExperts, check_sources
from ktft.mapping import is_mapped_source
from ktft.model import _check_complete, load_model
from tests.tiny_models import tiny_checkpoint, tiny_config, tiny_input

STOCK = modeling_qwen3_moe.Qwen3MoeExperts
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny_checkpoint("qwen3_moe", tmp_path / "model")


def edit(directory: Path, change: Callable[[Tensors], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def assert_nothing_is_left_patched() -> None:
    assert "_keys_to_ignore_on_load_unexpected" not in vars(Qwen3MoeForCausalLM)
    assert modeling_qwen3_moe.Qwen3MoeExperts is STOCK
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("transformers"):
            assert CpuExperts not in list(vars(module).values()), module


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop(EXPERT),
            r"model\.layers\.1\.mlp\.experts: expected 6 tensors for up.*missing: up of experts \[2\]",
        ),
        (
            lambda t: t.update({EXPERT.replace(".2.", ".6."): t[EXPERT].clone()}),
            r"experts\.6\.up_proj\.weight' belongs to expert 6; expected experts 0 to 5",
        ),
        (
            lambda t: t.update({EXPERT: t[EXPERT].T.contiguous()}),
            r"experts\.2\.up_proj\.weight': expected shape \[28, 40\] by the config, found \[40, 28\]",
        ),
        (
            lambda t: t.update({EXPERT: t[EXPERT].to(torch.float8_e4m3fn)}),
            r"no quantization_config, but these are tensors of a quantised matrix: .*2\.up_proj\.weight' \(F8_E4M3",
        ),
        (
            lambda t: t.update({EXPERT: t[EXPERT].half()}),
            r"experts\.2\.up_proj\.weight': expected dtype BF16 like .*found F16",
        ),
        (lambda t: t.update({EXPERT: t[EXPERT].float()}), r"expected dtype BF16 like .*found F32"),
        (
            lambda t: t.update({EXPERT.replace("weight", "weight_scale_inv"): torch.ones(1)}),
            r"no quantization_config, but these are tensors of a quantised matrix: .*2\.up_proj\.weight_scale_inv'",
        ),
        (
            lambda t: t.pop("model.layers.0.self_attn.q_proj.weight"),
            r"missing tensors \['model\.layers\.0\.self_attn\.q_proj\.weight'\]",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.extra.weight": torch.ones(2)}),
            r"no use for \['model\.layers\.0\.self_attn\.extra\.weight'\]",
        ),
        (
            lambda t: t.update({EXPERT.replace("layers.1", "layers.2"): t[EXPERT].clone()}),
            r"no use for \['model\.layers\.2\.mlp\.experts\.gate_up_proj'\]",
        ),
    ],
)
def test_wrong_tensors_are_named(checkpoint: Path, change: Callable[[Tensors], object], message: str) -> None:
    edit(checkpoint, change)
    with pytest.raises(CheckpointError, match=message):
        load_model(checkpoint)
    assert_nothing_is_left_patched()


def test_a_misshapen_tensor_outside_the_experts_is_an_error(checkpoint: Path) -> None:
    edit(checkpoint, lambda t: t.update({"model.norm.weight": torch.ones(41)}))
    with pytest.raises((RuntimeError, CheckpointError), match=r"mismatch|misshapen"):
        load_model(checkpoint)
    assert_nothing_is_left_patched()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = tiny_checkpoint("qwen2_moe", tmp_path, max_shard_size=20_000)
    (directory / "model-00003-of-00009.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names model-00003-of-00009\.safetensors, which does not exist"):
        load_model(directory)


def test_a_truncated_file_is_named(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated: tensor"):
        load_model(checkpoint)


def test_a_failed_load_leaves_no_mapping(checkpoint: Path) -> None:
    edit(checkpoint, lambda t: t.pop("model.norm.weight"))
    with pytest.raises(CheckpointError):
        load_model(checkpoint)
    gc.collect()
    assert not is_mapped_source(checkpoint / "model.safetensors")


def test_classes_are_restored_when_construction_raises(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:

        def fail(self: CpuExperts, *args: object, **kwargs: object) -> None:
            assert modeling_qwen3_moe.Qwen3MoeExperts is CpuExperts
            raise RuntimeError("construction failed")

        patch.setattr(CpuExperts, "__init__", fail)
        with pytest.raises(RuntimeError, match="construction failed"):
            load_model(checkpoint)
        assert_nothing_is_left_patched()
    stock = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert type(stock.model.layers[0].mlp.experts) is STOCK
    logits = load_model(checkpoint, dtype=torch.float32)(tiny_input()).logits
    assert (logits - stock(tiny_input()).logits).abs().max() <= 1e-5 * logits.abs().max()
    assert_nothing_is_left_patched()


def test_another_thread_does_not_see_replaced_classes() -> None:
    """It waits until the load is over; were it not to, it would have time to build a model of CpuExperts."""
    config = tiny_config("qwen3_moe")
    modules = families.experts_modules(families.stock_model(config))
    with ThreadPoolExecutor(1) as pool:
        with families.experts_replaced(Qwen3MoeForCausalLM, modules):
            other = pool.submit(families.stock_model, config)
            wait([other], timeout=0.3)
        assert list(families.experts_modules(other.result())) == list(modules)
    assert_nothing_is_left_patched()


def test_patterns_of_the_class_are_put_back(tmp_path: Path) -> None:
    """DeepSeek-V3's class has ignore patterns of its own."""
    directory = tiny_checkpoint("deepseek_v3", tmp_path)
    model_class = type(load_model(directory))
    assert model_class._keys_to_ignore_on_load_unexpected == [r"model\.layers\.61.*"]


def test_a_file_changed_under_a_model_is_an_error_at_the_next_load(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    model = load_model(checkpoint)
    again = load_model(checkpoint)
    del again
    os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointError, match="changed while a model of this process is mapped onto it"):
        load_model(checkpoint)
    assert model(tiny_input()).logits.isfinite().all()
    del model
    gc.collect()
    load_model(checkpoint)


def test_a_file_written_onto_under_a_model_is_seen_by_check_sources(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    model = load_model(checkpoint)
    check_sources(model)
    check_sources(torch.nn.Linear(2, 2))
    with path.open("r+b") as file:  # the running model sees the byte at once
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(path, ns=(1, 1))  # however coarse the clock of the file system is
    with pytest.raises(CheckpointError, match=r"model\.safetensors was written onto while a model"):
        check_sources(model)


@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_a_source_that_was_replaced_or_deleted_is_still_what_the_model_runs_on(checkpoint: Path, how: str) -> None:
    path = checkpoint / "model.safetensors"
    model = load_model(checkpoint)
    expected = model(tiny_input()).logits
    if how == "replaced":
        other = tiny_checkpoint("qwen3_moe", checkpoint / "other", seed=1) / "model.safetensors"
        os.replace(other, path)
    else:
        path.unlink()
    check_sources(model)
    assert torch.equal(model(tiny_input()).logits, expected)


@pytest.mark.parametrize("layers", [0, 1])
def test_every_file_of_every_layer_is_checked(tmp_path: Path, layers: int) -> None:
    directory = tiny_checkpoint("qwen2_moe", tmp_path, max_shard_size=20_000)
    model = load_model(directory)
    experts = model.get_submodule(f"model.layers.{layers}.mlp.experts")
    assert isinstance(experts, CpuExperts)
    assert experts.weights is not None
    assert isinstance(experts.weights.owner, tuple)
    last = experts.weights.owner[-1]
    os.utime(last.path, ns=(1, 1))
    with pytest.raises(CheckpointError, match=f"{last.path.name} was written onto"):
        check_sources(model)


def test_a_file_that_changes_during_the_load_is_an_error(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = AutoModelForCausalLM.from_pretrained

    def slow(*args: object, **kwargs: object) -> object:
        os.utime(checkpoint / "model.safetensors", ns=(1, 1))
        return stock(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", slow)
    with pytest.raises(CheckpointError, match="changed while it was being loaded"):
        load_model(checkpoint)


@pytest.mark.parametrize(
    ("path", "kwargs", "message"),
    [
        ("./nowhere", {}, "is not a directory"),
        ("/no/where", {}, "is not a directory"),
        ("a/b/c", {}, "is not a directory"),
        (None, {"revision": "main"}, "has no meaning for the local path"),
    ],
)
def test_paths_that_lead_nowhere(checkpoint: Path, path: str | None, kwargs: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(checkpoint if path is None else path, **kwargs)  # type: ignore[arg-type]


# --- what would make transformers read something else -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["other.safetensors", "other.safetensors.index.json"])
def test_other_weights_named_by_the_config_are_refused(checkpoint: Path, name: str) -> None:
    """transformers would read them, and the experts would come from model.safetensors."""
    tiny_checkpoint("qwen3_moe", checkpoint / "b", seed=1)
    os.replace(checkpoint / "b" / "model.safetensors", checkpoint / "other.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "transformers_weights": name}))
    with pytest.raises(CheckpointError, match=rf"config\.json names '{name}' as transformers_weights"):
        load_model(checkpoint)


def test_shards_of_a_distributed_checkpoint_are_refused(checkpoint: Path) -> None:
    shutil.copy(checkpoint / "model.safetensors", checkpoint / "shard-00000-model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"shard-00000-model-00001-of-00001\.safetensors"):
        load_model(checkpoint)


def test_an_adapter_beside_the_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """transformers would apply it unasked, without its experts."""
    stock = AutoModelForCausalLM.from_pretrained(checkpoint)
    adapted = peft.get_peft_model(stock, peft.LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"holds an adapter.*load its base with"):
        load_model(tmp_path / "adapter")
    shutil.copytree(tmp_path / "adapter", checkpoint, dirs_exist_ok=True)
    with pytest.raises(CheckpointError, match=r"holds an adapter.*move adapter_config\.json"):
        load_model(checkpoint)


def test_whatever_the_loader_reports_is_an_error(checkpoint: Path) -> None:
    model = load_model(checkpoint)
    report: dict[str, Any] = {
        "missing_keys": set(),
        "unexpected_keys": set(),
        "mismatched_keys": set(),
        "error_msgs": [],
    }
    _check_complete(model, report, checkpoint)
    for field, what in (
        ("missing_keys", "missing tensors"),
        ("unexpected_keys", "no use for"),
        ("mismatched_keys", "misshapen tensors"),
        ("error_msgs", "errors"),
    ):
        with pytest.raises(CheckpointError, match=rf"does not fit Qwen3MoeForCausalLM: .*{what} \['seven'\]"):
            _check_complete(model, {**report, field: ["seven"]}, checkpoint)
    model.model.norm.weight = torch.nn.Parameter(torch.ones(40, device="meta"))
    with pytest.raises(RuntimeError, match=r"no value was loaded for \['model\.norm\.weight'\]"):
        _check_complete(model, report, checkpoint)
    model.model.norm.weight = torch.nn.Parameter(torch.ones(40))
    model.register_buffer("table", torch.ones(2, device="meta"))
    with pytest.raises(RuntimeError, match=r"no value was loaded for \['table'\]"):
        _check_complete(model, report, checkpoint)


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        load_model(tmp_path)
