"""Every training key of a recipe reaches the setting it names; schedule, token count, held-out loss, machine."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from ktft.config import KEYS
from ktft.data import IGNORE, ChatDataset
from ktft.train import run
from ktft.train.callbacks import Progress, read_log
from ktft.train.run import build_model, check_machine, make_trainer
from tests.tiny_chat import tiny_tokenizer
from tests.tiny_train import in_loss, one_step, recipe

TRAINING = {
    "per_device_train_batch_size": 3,
    "per_device_eval_batch_size": 5,
    "gradient_accumulation_steps": 7,
    "learning_rate": 0.123,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 11,
    "num_train_epochs": 1.75,
    "max_steps": 13,
    "weight_decay": 0.017,
    "max_grad_norm": 0.19,
    "adam_beta1": 0.81,
    "adam_beta2": 0.83,
    "adam_epsilon": 3e-7,
    "seed": 97,
    "dataloader_num_workers": 2,
    "logging_steps": 17,
    "logging_first_step": True,
    "save_steps": 19,
    "save_total_limit": 23,
    "save_only_model": True,
    "eval_steps": 29,
}
"""Recipe keys whose TrainingArguments field has the same name and meaning, none of them at its default."""


def test_every_training_key_reaches_the_trainer(base: Path, data: Path, tmp_path: Path):
    settings = recipe(base, data, tmp_path / "out", val_size=2, **TRAINING)
    model = build_model(settings, str(base))
    samples = ChatDataset([in_loss(1, 12)])

    def arguments(**keys):
        changed = recipe(base, data, tmp_path / "out", **{**TRAINING, "val_size": 2, **keys})
        return make_trainer(changed, model, tiny_tokenizer(), samples, samples, []).args

    found = arguments()
    for key, value in TRAINING.items():
        assert value != KEYS[key].default and getattr(found, key) == value, key
    assert found.output_dir == str(tmp_path / "out")
    assert (found.save_strategy, found.eval_strategy, found.optim) == ("steps", "steps", "adamw_torch")
    assert not found.gradient_checkpointing and not found.bf16 and not found.logging_nan_inf_filter
    assert found.include_num_input_tokens_seen == "non_padding" and found.report_to == []
    assert arguments(warmup_steps=0, warmup_ratio=0.37).warmup_steps == 0.37
    for strategy in ("no", "epoch", "steps"):
        assert arguments(save_strategy=strategy).save_strategy == strategy
        steps = 2 if strategy == "steps" else None
        assert arguments(eval_strategy=strategy, eval_steps=steps).eval_strategy == strategy
    assert arguments(eval_steps=None).eval_strategy == "no"
    assert arguments(disable_gradient_checkpointing=False).gradient_checkpointing
    for kind in ("linear", "cosine", "constant", "constant_with_warmup"):
        warmup = {"warmup_steps": 0} if kind == "constant" else {}
        assert arguments(lr_scheduler_type=kind, **warmup).lr_scheduler_type == kind


def test_every_lora_key_reaches_the_adapter(base: Path, data: Path, tmp_path: Path):
    keys = {"lora_rank": 5, "lora_alpha": 9, "lora_dropout": 0.21, "use_rslora": True, "lora_target": "k_proj,experts"}
    config = build_model(recipe(base, data, tmp_path, **keys), str(base)).peft_config["default"]
    found = (config.r, config.lora_alpha, config.lora_dropout, config.use_rslora, set(config.target_modules))
    assert found == (5, 9, 0.21, True, {"k_proj", "experts"})
    assert config.task_type == "CAUSAL_LM"
    config = build_model(recipe(base, data, tmp_path, lora_rank=5), str(base)).peft_config["default"]
    assert (config.lora_alpha, config.lora_dropout, config.use_rslora) == (10, 0.0, False)


def test_cosine_with_warmup_step_by_step(base: Path, data: Path, tmp_path: Path):
    """Ten steps, three of them warm-up: the rate used at step i, counted from 0."""
    run(
        recipe(
            base,
            data,
            tmp_path / "out",
            **{"max_steps": 10, "lr_scheduler_type": "cosine", "warmup_ratio": 0.3, "learning_rate": 3e-3},
            save_strategy="no",
        )
    )
    rates = [entry["learning_rate"] for entry in read_log(tmp_path / "out/log.jsonl")]
    factors = [0, 1 / 3, 2 / 3, *(0.5 * (1 + math.cos(math.pi * i / 7)) for i in range(7))]
    assert rates == pytest.approx([3e-3 * factor for factor in factors], rel=1e-12)


def test_padding_is_not_counted_as_tokens(base: Path, data: Path, tmp_path: Path):
    samples = [in_loss(1, 12), in_loss(7, 31)]
    _, progress = one_step(base, data, tmp_path / "out", samples, per_device_train_batch_size=2)
    assert progress.tokens == 12 + 31


def test_the_held_out_loss_is_that_of_the_adapter_without_dropout(base: Path, data: Path, tmp_path: Path):
    settings = recipe(base, data, tmp_path / "out", lora_dropout=0.5, per_device_eval_batch_size=2)
    torch.manual_seed(0)
    model = build_model(settings, str(base))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5)
    samples = [in_loss(1, 12), in_loss(7, 15), in_loss(3, 20)]
    progress = Progress(tmp_path / "log.jsonl")
    trainer = make_trainer(settings, model, tiny_tokenizer(), ChatDataset(samples), ChatDataset(samples), [progress])
    loss = trainer.evaluate()["eval_loss"]
    assert model.training and trainer.evaluate()["eval_loss"] == loss

    def mean() -> float:
        total = 0.0
        for sample in samples:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([sample.input_ids])).logits[0].double()
            picked = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(sample.input_ids[1:])[:, None])[:, 0]
            total -= float(picked[torch.tensor(sample.labels[1:]) != IGNORE].sum())
        return total / 11

    model.eval()
    assert loss == pytest.approx(mean(), rel=1e-5)
    with model.disable_adapter():
        assert abs(mean() - loss) > 1e-2 * loss  # the adapter matters
    model.train()
    assert abs(mean() - loss) > 1e-3 * loss  # and so would dropout


def test_machines_that_do_not_fit_are_refused(base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = recipe(base, data, tmp_path / "out")
    check_machine(settings)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device: cuda, but torch sees no CUDA GPU"):
        run(recipe(base, data, tmp_path / "out", device="cuda"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 2, .* several processes come with a later version"):
        run(settings)
    monkeypatch.setenv("WORLD_SIZE", "1")
    check_machine(settings)
    assert not (tmp_path / "out").exists()
