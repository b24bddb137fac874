"""Recipes: types, ranges, conflicts, what is refused by name, overrides, paths."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ktft.config import KEYS, Recipe, RecipeError, cache_dir, load_recipe, make_recipe

MINIMAL = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o"}


def recipe(**keys) -> Recipe:
    return make_recipe({**MINIMAL, **keys})


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text("model_name_or_path: m\ndataset: d\noutput_dir: o\n" + text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"learning_rat": 1}, "unknown recipe key 'learning_rat'; did you mean 'learning_rate'"),
        ({"lora_targets": "q_proj"}, "did you mean 'lora_target'"),
        ({"zzzzqqqq": 1}, "unknown recipe key 'zzzzqqqq'; the keys are: adam_beta1"),
        ({"flash_atn": "auto"}, "unknown recipe key 'flash_atn'; the keys are: "),
        ({"optimizer": "sgd"}, "unknown recipe key 'optimizer'; the keys are: "),
        ({"flash_attn": "fa2"}, "flash_attn: 'fa2' is not offered; it may be auto, or be left out"),
        ({"optim": "adamw_8bit"}, "optim: 'adamw_8bit' is not offered; it may be adamw_torch"),
        ({"do_eval": 1}, "do_eval: 1 is not offered; it may be true"),
        ({"prepare": "a 'b"}, "prepare: .* is not a command line: No closing quotation"),
        ({"dataset": "$KTFT_NO_SUCH_VARIABLE/x.jsonl"}, "environment variable KTFT_NO_SUCH_VARIABLE in .* is not set"),
        ({"lr_scheduler_type": "constant", "warmup_ratio": 0.1}, "lr_scheduler_type: constant and warmup_ratio: 0.1"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 3}, "and warmup_steps: 3 conflict: .*constant_with_warmup"),
        ({"notices": []}, "unknown recipe key 'notices'"),
        ({"lora_rank": "eight"}, "lora_rank: 'eight' is not valid; expected a whole number"),
        ({"lora_rank": 8.5}, "lora_rank: 8.5 is not valid; expected a whole number"),
        ({"lora_rank": True}, "lora_rank: True is not valid; expected a whole number"),
        ({"lora_rank": 0}, "lora_rank: 0 is out of range; it must be more than 0"),
        ({"lora_rank": 257}, "lora_rank: 257 is out of range; it must lie between 1 and 256"),
        ({"learning_rate": "fast"}, "learning_rate: 'fast' is not valid; expected a number"),
        ({"learning_rate": "nan"}, "learning_rate: 'nan' is not valid"),
        ({"learning_rate": 0}, "learning_rate: 0.0 is out of range"),
        ({"bf16": "yes please"}, "bf16: 'yes please' is not valid; expected true or false"),
        ({"bf16": 1}, "bf16: 1 is not valid; expected true or false"),
        ({"lora_dropout": 1.0}, "lora_dropout: 1.0 is out of range; it must be at least 0 and below 1"),
        ({"weight_decay": -0.1}, "weight_decay: -0.1 is out of range; it must be 0 or more"),
        ({"max_steps": 0}, "max_steps: 0 is out of range"),
        ({"lr_scheduler_type": "cosin"}, "lr_scheduler_type: 'cosin' is not valid; expected one of linear, cosine"),
        ({"dataset": 3}, "dataset: 3 is not valid; expected a list of names"),
        ({"model_name_or_path": None}, "model_name_or_path: None is not valid; expected text"),
        ({"stage": "dpo"}, "stage: dpo is not offered: ktft trains stage: sft"),
        ({"stage": "sftt"}, "stage: 'sftt' is not valid; expected one of sft"),
        ({"finetuning_type": "full"}, "finetuning_type: full is not offered: .* use finetuning_type: lora"),
        ({"deepspeed": "z3.json"}, "deepspeed: 'z3.json' is not offered"),
        ({"pure_bf16": True}, "pure_bf16: True is not offered: adapters are fp32"),
        ({"packing": True}, "packing: True is not offered"),
        ({"do_train": False}, "do_train: false is not offered"),
        ({"val_size": 0.1, "eval_dataset": "e"}, r"eval_dataset: .*'e'.* and val_size: 0.1 conflict"),
        ({"warmup_ratio": 0.1, "warmup_steps": 5}, "warmup_ratio: 0.1 and warmup_steps: 5 conflict"),
        ({"overwrite_output_dir": True, "resume_from_checkpoint": True}, "overwrite_output_dir: True and resume_from"),
        ({"eval_steps": 5}, "eval_steps: 5 needs held-out data"),
        ({"exact_match_samples": 5}, "exact_match_samples: 5 needs held-out data"),
        ({"eval_strategy": "epoch"}, "eval_strategy: epoch needs held-out data"),
        ({"eval_strategy": "epoch", "eval_steps": 3, "val_size": 2}, "eval_strategy: epoch and eval_steps: 3 conflict"),
        ({"val_size": 1.5}, "val_size: 1.5 must be a whole number"),
        ({"lora_target": "all,experts"}, "lora_target: 'all,experts' must be module names, or all alone"),
        ({"output_dir": "$KTFT_NO_SUCH_VARIABLE/x"}, "environment variable KTFT_NO_SUCH_VARIABLE in .* is not set"),
    ],
)
def test_errors_name_key_value_and_what_is_valid(keys, complaint):
    with pytest.raises(RecipeError, match=complaint):
        recipe(**keys)


@pytest.mark.parametrize("key", MINIMAL)
def test_needed_keys(key):
    with pytest.raises(RecipeError, match=f"the recipe needs {key}"):
        make_recipe({k: v for k, v in MINIMAL.items() if k != key})


def test_values_are_converted():
    r = recipe(
        learning_rate="1e-4",
        num_train_epochs=2,
        lora_target="q_proj, experts",
        dataset=["a", "b"],
        eval_strategy=False,
        resume_from_checkpoint=None,
        packing=False,
    )
    assert (r.learning_rate, r.num_train_epochs, r.eval_strategy) == (1e-4, 2.0, "no")
    assert r.lora_target == ("q_proj", "experts") and r.dataset == ("a", "b")
    assert recipe(resume_from_checkpoint=True).resume_from_checkpoint is True
    assert recipe(resume_from_checkpoint="x/checkpoint-3").resume_from_checkpoint == "x/checkpoint-3"
    with pytest.raises(dataclasses.FrozenInstanceError):
        r.seed = 1  # type: ignore[misc]


def test_overrides(tmp_path: Path):
    path = write(tmp_path, "learning_rate: 1e-3\nmax_steps: 7\n")
    r = load_recipe(
        path, ["max_steps=20", "learning_rate=5e-4", "lora_target=q_proj,experts", "output_dir=a=b", "bf16=false"]
    )
    assert (r.max_steps, r.learning_rate, r.lora_target, r.output_dir) == (20, 5e-4, ("q_proj", "experts"), "a=b")
    assert r.bf16 is False
    for override, complaint in (
        ("max_step=20", "did you mean 'max_steps'"),
        ("max_steps", "must have the form key=value"),
        ("max_steps=[", "override 'max_steps=\\[' is not valid YAML"),
        ("max_steps=", "max_steps: None is not valid"),
    ):
        with pytest.raises(RecipeError, match=complaint):
            load_recipe(path, [override])


def test_unreadable_recipes(tmp_path: Path):
    with pytest.raises(RecipeError, match=r"cannot read recipe .*none\.yaml: No such file"):
        load_recipe(tmp_path / "none.yaml")
    for text, complaint in (
        ("a: [", "not valid YAML"),
        ("- a", "must be a YAML mapping"),
        ("1: 2", "must be a YAML mapping"),
        ("", "must be a YAML mapping"),
        ("seed: 1\nbf16: true\nseed: 2\n", "key 'seed' is given twice, the second time in line 3"),
    ):
        path = tmp_path / "bad.yaml"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(RecipeError, match=complaint):
            load_recipe(path)
    path.write_bytes(b"output_dir: caf\xe9\n")
    with pytest.raises(RecipeError, match=r"bad\.yaml is not UTF-8: .* at byte 15"):
        load_recipe(path)


def test_paths_expand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RUN", "seven")
    monkeypatch.delenv("KTFT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache/ktft"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    r = recipe(model_name_or_path="$KTFT_CACHE/base", output_dir="~/out/${RUN}")
    assert r.model_name_or_path == str(tmp_path / "xdg/ktft/base")
    assert r.output_dir == str(tmp_path / "out/seven")
    monkeypatch.setenv("KTFT_CACHE", "/elsewhere")
    assert recipe(model_name_or_path="${KTFT_CACHE}/base").model_name_or_path == "/elsewhere/base"
    r = recipe(dataset="~/a.jsonl,harbour", eval_dataset=["$RUN/b.jsonl"], prepare="~/make.py $RUN --name 'two words'")
    assert r.dataset == (str(tmp_path / "a.jsonl"), "harbour") and r.eval_dataset == ("seven/b.jsonl",)
    assert r.prepare == f"{tmp_path}/make.py seven --name 'two words'"


def test_keys_without_effect_are_reported():
    r = recipe(template="qwen3", preprocessing_num_workers=16, overwrite_cache=True)
    assert len(r.notices) == 3
    assert any("template: qwen3" in notice and "chat template" in notice for notice in r.notices)
    assert recipe(template="mine.jinja").notices == ()
    assert recipe(cpu_infer=32).notices == (
        "cpu_infer: no effect here, the number of threads is that of torch, or the environment variable KTFT_THREADS",
    )


def test_the_written_recipe_reads_back(tmp_path: Path):
    r = recipe(lora_target="q_proj,experts", learning_rate=3e-4, val_size=4, eval_steps=2, seed=7)
    path = tmp_path / "again.yaml"
    path.write_text(r.to_yaml(), encoding="utf-8")
    assert load_recipe(path) == r


def test_a_llama_factory_lora_recipe_runs_as_it_is(tmp_path: Path):
    """The keys of LLaMA-Factory's own LoRA example, as its users write them."""
    path = write(
        tmp_path,
        "trust_remote_code: true\nstage: sft\ndo_train: true\nfinetuning_type: lora\nlora_rank: 8\nlora_target: all\n"
        "template: llama3\ncutoff_len: 2048\nmax_samples: 1000\npreprocessing_num_workers: 16\n"
        "dataloader_num_workers: 4\n"
        "logging_steps: 10\nsave_steps: 500\nplot_loss: true\noverwrite_output_dir: true\nsave_only_model: false\n"
        "report_to: none\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nlearning_rate: 1.0e-4\n"
        "num_train_epochs: 3.0\nlr_scheduler_type: cosine\nwarmup_ratio: 0.1\nbf16: true\nddp_timeout: 180000000\n"
        "resume_from_checkpoint: null\nval_size: 0.1\nper_device_eval_batch_size: 1\neval_strategy: steps\n"
        "eval_steps: 500\nflash_attn: auto\noptim: adamw_torch\ndo_eval: true\nlogging_first_step: true\n"
        "include_num_input_tokens_seen: true\n",
    )
    assert load_recipe(path).lora_target == ("all",)


def test_every_key_has_a_type_the_converter_knows():
    for name, field in KEYS.items():
        if field.default is not dataclasses.MISSING and name not in MINIMAL:
            value = list(field.default) if isinstance(field.default, tuple) else field.default
            assert getattr(recipe(**({} if value in ([], "") else {name: value})), name) == field.default
