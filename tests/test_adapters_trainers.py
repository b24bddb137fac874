"""The stock Trainer and TRL's SFTTrainer save, checkpoint, resume and load the best adapter through KtftPeftModel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments

from ktft.adapters import KtftPeftModel, get_peft_model, load_adapter
from ktft.model import load_model
from tests.tiny_models import VOCABULARY, tiny_checkpoint, tiny_input


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen2_moe", tmp_path_factory.mktemp("trainers") / "base")


def new_model(directory: Path) -> KtftPeftModel:
    torch.manual_seed(0)
    config = LoraConfig(
        r=2, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "up_proj", "experts"], task_type="CAUSAL_LM"
    )
    return get_peft_model(load_model(directory, dtype=torch.float32), config)


def records(count: int = 12) -> Dataset:
    rows = [tiny_input(1, 8, seed=seed)[0].tolist() for seed in range(count)]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def arguments(output: Path, **fields: Any) -> dict[str, Any]:
    return {
        "output_dir": str(output),
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 5e-2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        **fields,
    }


def trained(model: KtftPeftModel) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class Stop(TrainerCallback):
    """A run that ends early, as when it is killed after a checkpoint."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 2


@pytest.mark.parametrize("checkpointing", [False, True])
def test_resume_is_bit_for_bit(directory: Path, tmp_path: Path, checkpointing: bool) -> None:
    fields = {"gradient_checkpointing": checkpointing, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    straight = Trainer(
        new_model(directory), TrainingArguments(**arguments(tmp_path / "a", **fields)), train_dataset=records()
    )
    straight.train()
    first = Trainer(
        new_model(directory),
        TrainingArguments(**arguments(tmp_path / "b", **fields)),
        train_dataset=records(),
        callbacks=[Stop()],
    )
    first.train()
    files = {file.name for file in (tmp_path / "b" / "checkpoint-2").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "optimizer.pt"} <= files
    assert not files & {"model.safetensors", "pytorch_model.bin", "adapter_model.bin"}
    model = new_model(directory)
    parameters = list(model.parameters())
    second = Trainer(model, TrainingArguments(**arguments(tmp_path / "b", **fields)), train_dataset=records())
    second.train(resume_from_checkpoint=True)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert_same(trained(model), trained(straight.model))
    for ours, theirs in zip(
        second.optimizer.state_dict()["state"].values(), straight.optimizer.state_dict()["state"].values(), strict=True
    ):
        assert all(torch.equal(ours[key], theirs[key]) for key in ("exp_avg", "exp_avg_sq", "step"))
    last = load_adapter(load_model(directory, dtype=torch.float32), tmp_path / "b" / "checkpoint-4", is_trainable=True)
    assert_same(trained(last), trained(model))


def test_best_model_and_save_model(directory: Path, tmp_path: Path) -> None:
    model = new_model(directory)
    trainer = Trainer(
        model,
        TrainingArguments(
            **arguments(
                tmp_path,
                eval_strategy="steps",
                eval_steps=2,
                load_best_model_at_end=True,
                metric_for_best_model="eval_loss",
                greater_is_better=True,  # so that the best is not the last
            )
        ),
        train_dataset=records(),
        eval_dataset=records(4),
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    trainer.save_model(str(tmp_path / "final"))
    final = load_file(tmp_path / "final" / "adapter_model.safetensors")
    assert_same(final, load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors"))
    last = load_file(tmp_path / "checkpoint-4" / "adapter_model.safetensors")
    assert any(not torch.equal(final[name], last[name]) for name in final)


def test_sft_trainer(directory: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w3")), pad_token="w0", eos_token="w2"
    )
    data = records().remove_columns("labels")
    results = []
    for output, resume in (("a", False), ("b", False), ("b", True)):
        config = trl.SFTConfig(**arguments(tmp_path / output, max_length=16))
        callbacks = [Stop()] if output == "b" and not resume else []
        trainer = trl.SFTTrainer(
            new_model(directory), config, train_dataset=data, processing_class=tokenizer, callbacks=callbacks
        )
        trainer.train(resume_from_checkpoint=resume)
        results.append(trained(trainer.model))
    assert_same(results[2], results[0])
    saved = load_adapter(load_model(directory, dtype=torch.float32), tmp_path / "b" / "checkpoint-4", is_trainable=True)
    assert_same(trained(saved), results[0])


def test_sft_trainer_does_not_leave_experts_out(directory: Path, tmp_path: Path) -> None:
    """TRL makes its own PEFT model from ``peft_config``, with stock PEFT, which cannot adapt mapped experts."""
    trl = pytest.importorskip("trl")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")), pad_token="a", eos_token="a"
    )
    with pytest.raises(ValueError, match="CpuExperts"):
        trl.SFTTrainer(
            load_model(directory, dtype=torch.float32),
            trl.SFTConfig(**arguments(tmp_path)),
            train_dataset=records().remove_columns("labels"),
            processing_class=tokenizer,
            peft_config=LoraConfig(target_modules=["q_proj", "experts"], task_type="CAUSAL_LM"),
        )
