"""load_model on damaged quantised checkpoints: an error that names the tensor, before or while it loads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ktft import cli
from ktft.checkpoint import CheckpointError
from ktft.model import load_model
from tests.quantised import Written, write
from tests.test_model_errors import assert_nothing_is_left_patched
from tests.tiny_chat import tiny_tokenizer
from tests.tiny_train import tiny_data

EXPERT = "model.layers.1.mlp.experts.2.up_proj"
OTHER = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], object]


def quantised(name: str, directory: Path, change: Change = lambda t: None) -> Written:
    written = write("qwen3_moe", name, directory)
    written.edit(change)
    return written


def refused(written: Written, message: str, **options: Any) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_model(written.directory, **options)
    assert_nothing_is_left_patched()


def scaled(tensors: Tensors, name: str, factor: float) -> None:
    tensors[name] = tensors[name] * factor


def set_bytes(tensors: Tensors, name: str, row: int, column: int, value: int) -> None:
    tensors[name].view(torch.uint8)[row, column] = value


@pytest.mark.parametrize("base", [EXPERT, OTHER])
@pytest.mark.parametrize(
    ("name", "suffix", "change", "message"),
    [
        ("fp8-block", "weight_scale_inv", None, r"is missing: .*fp8 \(128x128"),
        ("fp8-block", "weight_scale_inv", lambda t: t[:, :1].clone(), r"expected shape \[[12], 2\]"),
        ("fp8-block", "weight_scale_inv", lambda t: t.double(), "expected dtype F32 or BF16"),
        ("int4-g32", "weight_scale", None, r"is missing: .*int4 \(groups of 32"),
        ("int4-g32", "weight_scale", lambda t: t[:, :-1].clone(), r"expected shape \[\d+, 5\]"),
        ("int4-g32", "weight_shape", None, "is missing"),
        ("int4-g32", "weight_packed", None, r"which has '.*weight_packed'"),
        ("int4-g32", "weight_packed", lambda t: t.long(), "weight_packed' of dtype I32"),
        ("gptq-g32", "qzeros", None, r"is missing: .*gptq \(groups of 32"),
        ("gptq-g32", "qzeros", lambda t: t[:-1].clone(), r"expected shape \[5, \d+\]"),
        ("gptq-g32", "g_idx", lambda t: t[:-1].clone(), r"expected shape \[160\]"),
        ("awq-g32", "qzeros", None, r"is missing: .*awq \(groups of 32"),
        ("awq-g32", "qzeros", lambda t: t[:, :-1].clone(), r"expected shape \[5, \d+\]"),
        ("awq-g32", "scales", lambda t: t.double(), "expected dtype F16 or BF16 or F32"),
        ("mxfp4", "weight_scale", lambda t: t.T.contiguous(), r"expected shape \[\d+, 5\]"),
        ("nvfp4-compressed", "weight_global_scale", None, "is missing"),
        ("nvfp4-modelopt", "weight_scale_2", None, "is missing"),
        ("nvfp4-modelopt", "weight_scale_2", lambda t: t.repeat(2), r"expected shape \[\] or \[1\]"),
    ],
)
def test_missing_and_misshapen_tensors_are_named(
    tmp_path: Path,
    base: str,
    name: str,
    suffix: str,
    change: Callable[[torch.Tensor], torch.Tensor] | None,
    message: str,
) -> None:
    key = f"{base}.{suffix}"

    def damage(tensors: Tensors) -> None:
        old = tensors.pop(key)
        if change is not None:
            tensors[key] = change(old)

    refused(quantised(name, tmp_path, damage), f"{key.replace('.', '[.]')}.*{message}|{message}.*{base}")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fp8-block", lambda q: q.update(weight_block_size=[64, 128]), r"weight_scale_inv': expected shape"),
        ("fp8-block", lambda q: q.update(modules_to_not_convert=["q_proj"]), r"not converted: '.*q_proj"),
        ("fp8-block", lambda q: q.update(quant_method="mxfp4"), r"says mxfp4, which has '.*_blocks'"),
        ("fp8-block", lambda q: q.update(quant_method="quanto"), "quant_method 'quanto' is not supported"),
        ("fp8-block", lambda q: q.clear(), "quant_method None is not supported"),
        (
            "int4-g32",
            lambda q: q["config_groups"]["group_0"]["weights"].update(group_size=64),
            r"no multiple of 64|expected shape",
        ),
        ("int4-g32", lambda q: q["config_groups"]["group_0"]["weights"].update(symmetric=False), "zero points"),
        (
            "int4-g32",
            lambda q: q["config_groups"]["group_0"]["weights"].update(num_bits=8),
            r"weight_shape|weight_scale",
        ),
        ("nvfp4-modelopt", lambda q: q.update(quant_algo="FP8"), r"F8_E4M3; found '.*weight'"),
    ],
)
def test_a_config_that_contradicts_the_tensors(
    tmp_path: Path, name: str, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    written = quantised(name, tmp_path)
    written.edit_config(lambda config: change(config["quantization_config"]))
    refused(written, message)


def test_a_config_without_quantization(tmp_path: Path) -> None:
    written = quantised("fp8-block", tmp_path)
    written.edit_config(lambda config: config.pop("quantization_config"))
    refused(written, r"no quantization_config, but these are tensors of a quantised matrix: 'model\.layers\.0")


def test_two_configs_that_contradict_each_other(tmp_path: Path) -> None:
    written = quantised("nvfp4-modelopt", tmp_path)
    other = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (written.directory / "hf_quant_config.json").write_text(json.dumps(other))
    refused(written, "quant_algo 'NVFP4', hf_quant_config.json says 'FP8'")


def test_modelopt_with_a_file_of_its_own_only(tmp_path: Path) -> None:
    written = quantised("nvfp4-modelopt", tmp_path)
    written.edit_config(lambda config: config.pop("quantization_config"))
    other = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (written.directory / "hf_quant_config.json").write_text(json.dumps(other))
    assert load_model(written.directory).model.layers[0].mlp.experts.weights.gate.format == "nvfp4"


@pytest.mark.parametrize(
    ("name", "base", "change", "message"),
    [
        (
            "fp8-block",
            EXPERT,
            lambda t: set_bytes(t, f"{EXPERT}.weight", 90, 7, 0x7F),
            "row 90, column 7 decodes to nan",
        ),
        ("fp8-block", OTHER, lambda t: set_bytes(t, f"{OTHER}.weight", 3, 9, 0xFF), "row 3, column 9 decodes to nan"),
        (
            "fp8-block",
            EXPERT,
            lambda t: scaled(t, f"{EXPERT}.weight_scale_inv", float("inf")),
            "decodes to (-?inf|nan)",
        ),
        (
            "mxfp4",
            EXPERT,
            lambda t: set_bytes(t, f"{EXPERT}.weight_scale", 5, 1, 255),
            "row 5, column 32 decodes to nan",
        ),
        (
            "int4-g32",
            OTHER,
            lambda t: scaled(t, f"{OTHER}.weight_scale", float("nan")),
            "row 0, column 0 decodes to nan",
        ),
        ("int4-g32", EXPERT, lambda t: t[f"{EXPERT}.weight_shape"].fill_(7), r"weight_shape' says \[7, 7\]"),
    ],
)
def test_values_are_checked_when_asked_for(tmp_path: Path, name: str, base: str, change: Change, message: str) -> None:
    refused(quantised(name, tmp_path, change), f"{base}.*{message}", check_weights=True)


def test_plain_experts_are_checked_when_asked_for(tmp_path: Path) -> None:
    written = quantised("fp8-block", tmp_path)
    load_model(written.plain, check_weights=True)
    plain = Written(written.plain, written.plain, {}, written.encoding)
    plain.edit(lambda t: t[f"{EXPERT}.weight"][4, 5].fill_(float("inf")))
    refused(plain, f"{EXPERT}.weight.*row 4, column 5 decodes to inf", check_weights=True)
    load_model(written.plain)


@pytest.mark.parametrize("base", [EXPERT, OTHER])
def test_columns_in_order_of_activation_are_refused_in_any_case(tmp_path: Path, base: str) -> None:
    """Experts' are never decoded while a model loads; trained on, every weight would be another's."""
    written = quantised("gptq-g32", tmp_path, lambda t: t[f"{base}.g_idx"].copy_(t[f"{base}.g_idx"].roll(1)))
    refused(written, rf"'{base}\.g_idx': column 0 is in group 4, expected 0: .*\(act-order, desc_act\)")


def test_columns_that_may_be_in_any_order_need_their_index(tmp_path: Path) -> None:
    written = quantised("gptq-g32", tmp_path)
    written.edit_config(lambda config: config["quantization_config"].update(desc_act=True))
    load_model(written.directory)
    written.edit(lambda t: t.pop(f"{EXPERT}.g_idx"))
    refused(written, rf"'{EXPERT}\.g_idx' is missing")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_global_divisors_are_read_in_any_case(tmp_path: Path, value: float) -> None:
    written = quantised("nvfp4-compressed", tmp_path, lambda t: t[f"{EXPERT}.weight_global_scale"].fill_(value))
    refused(written, rf"{EXPERT}\.weight_global_scale' is {value}; expected a finite number")


def test_an_error_while_transformers_loads_is_ours(tmp_path: Path) -> None:
    """Decoding happens in its threads, and it has words of its own for what fails there."""
    written = quantised("int4-g32", tmp_path, lambda t: t[f"{OTHER}.weight_shape"].fill_(7))
    refused(written, rf"{OTHER}\.weight_shape' says \[7, 7\]")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({f"{EXPERT}.weight_zero_point": torch.ones(1)}), r"up_proj\.weight_zero_point.*asymmetric"),
        (lambda t: t.update({f"{OTHER}.weight_g_idx": torch.ones(1)}), r"q_proj\.weight_g_idx': .*act-order"),
        (lambda t: t.update({f"{OTHER}.extra": torch.ones(2)}), rf"no use for \['{OTHER}\.extra'\]"),
        (lambda t: t.update({f"{EXPERT}.bias": torch.ones(2)}), rf"'{EXPERT}\.bias' lies under the experts"),
        (lambda t: t.update({f"{OTHER}.scales": torch.ones(2)}), r"q_proj\.scales' has no place"),
        (lambda t: t.pop("model.norm.weight"), r"missing tensors \['model\.norm\.weight'\]"),
        (
            lambda t: [t.pop(key) for key in list(t) if key.startswith(OTHER)],
            rf"missing tensors \['{OTHER}\.weight'\]",
        ),
        (
            lambda t: [t.pop(key) for key in list(t) if key.startswith(EXPERT)],
            r"layers\.1\.mlp\.experts: expected 6 tensors for up, found 5; missing: up of experts \[2\]",
        ),
        (
            lambda t: t.update(
                {key.replace("q_proj", "r_proj"): t[key].clone() for key in list(t) if key.startswith(OTHER)}
            ),
            r"no use for \['model\.layers\.0\.self_attn\.r_proj\.weight'\]",
        ),
    ],
)
def test_every_tensor_is_accounted_for(tmp_path: Path, change: Change, message: str) -> None:
    refused(quantised("int4-g32", tmp_path, change), message)


def test_experts_of_another_size_than_the_config_says(tmp_path: Path) -> None:
    written = quantised("int4-g32", tmp_path)
    written.edit_config(lambda config: config.update(moe_intermediate_size=64))
    refused(written, r"gate_proj\.weight_packed': expected shape \[64, 160\] by the config, found \[96, 160\] as int4")


# --- through ktft train -----------------------------------------------------------------------------------------------


def cut_groups(tensors: Tensors, columns: int) -> None:
    """Scales of compressed-tensors as many as groups of ``columns`` begin in a row."""
    for key in [key for key in tensors if key.endswith("weight_scale")]:
        groups = -(-tensors[key].shape[1] * 32 // columns)
        tensors[key] = tensors[key][:, :groups].clone()


def group_size(config: dict[str, Any], columns: int) -> None:
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = columns


@pytest.mark.parametrize(
    ("name", "change", "change_config", "message"),
    [
        (
            "fp8-block",
            lambda t: t.pop(f"{EXPERT}.weight_scale_inv"),
            None,
            rf"tensor '{EXPERT}\.weight_scale_inv' is missing",
        ),
        (
            "mxfp4",
            lambda t: t.update({f"{EXPERT}.weight_scale": t[f"{EXPERT}.weight_scale"].T.contiguous()}),
            None,
            rf"tensor '{EXPERT}\.weight_scale': expected shape \[96, 5\] .*found \[5, 96\]",
        ),
        (
            "int4-g32",
            lambda t: cut_groups(t, 64),
            lambda c: group_size(c, 64),
            r"tensor 'model\.layers\.0\..*weight_packed': the 96 columns of the matrix are no multiple of 64",
        ),
        (
            "int4-g32",
            None,
            lambda c: c["quantization_config"].update(quant_method="quanto"),
            "quant_method 'quanto' is not supported",
        ),
        (
            "fp8-block",
            lambda t: set_bytes(t, f"{EXPERT}.weight", 90, 7, 0x7F),
            None,
            rf"tensor '{EXPERT}\.weight': the weight at row 90, column 7 decodes to nan",
        ),
        (
            "int4-g32",
            lambda t: t[f"{EXPERT}.weight_shape"].fill_(7),
            None,
            rf"tensor '{EXPERT}\.weight_shape' says \[7, 7\]",
        ),
    ],
)
def test_train_ends_with_one_line_and_writes_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    change: Change | None,
    change_config: Callable[[dict[str, Any]], object] | None,
    message: str,
) -> None:
    written = quantised(name, tmp_path, change or (lambda t: None))
    if change_config is not None:
        written.edit_config(change_config)
    tiny_tokenizer().save_pretrained(written.directory)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model_name_or_path: {written.directory}\nstage: sft\nfinetuning_type: lora\nlora_target: all\n"
        f"dataset: {tiny_data(tmp_path)}\noutput_dir: {tmp_path / 'out'}\nmax_steps: 1\ndevice: cpu\n"
    )
    files = lambda: {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}  # noqa: E731
    before = files()
    assert cli.main(["train", str(recipe), "--check-weights"]) == 1
    assert files() == before
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.match(f"ktft: error: .*{message}", error), error
    assert_nothing_is_left_patched()
