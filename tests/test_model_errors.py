"""load_model on damaged or changed checkpoints: an error that names the tensor, and a process left as it was."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe import modeling_qwen3_moe

from ktft import families
from ktft.checkpoint import CheckpointError
from ktft.experts import CpuExperts
from ktft.mapping import is_mapped_source
from ktft.model import load_model
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
            r"experts\.2\.up_proj\.weight': expected dtype BF16 or F32, found F8_E4M3",
        ),
        (lambda t: t.update({EXPERT: t[EXPERT].half()}), r"expected dtype BF16 or F32, found F16"),
        (lambda t: t.update({EXPERT: t[EXPERT].float()}), r"expected dtype BF16 like .*found F32"),
        (
            lambda t: t.update({EXPERT.replace("weight", "weight_scale_inv"): torch.ones(1)}),
            r"experts\.2\.up_proj\.weight_scale_inv' lies under the experts",
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
        (None, {"revision": "main"}, "has no meaning for the local directory"),
    ],
)
def test_paths_that_lead_nowhere(checkpoint: Path, path: str | None, kwargs: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(checkpoint if path is None else path, **kwargs)  # type: ignore[arg-type]


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        load_model(tmp_path)
