"""Small training runs for the tests: recipes, data, samples, one optimizer step."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import TrainerCallback

from ktft.config import Recipe, make_recipe
from ktft.data import IGNORE, ChatDataset, EncodedChat
from ktft.train.callbacks import Progress
from ktft.train.run import build_model, make_trainer
from tests.tiny_chat import chat, tiny_tokenizer, write_chats

WORDS = "salt tar rye rope tea coal lime wool".split()


def tiny_data(directory: Path) -> Path:
    """Eleven short chats."""
    chats = [chat(f"log {n} {word}", f"{word} " * (1 + n % 4)) for n, word in enumerate(WORDS + WORDS[:3])]
    return write_chats(directory / "chats.jsonl", chats)


def recipe(base: Path, data: Path, output: Path, **keys) -> Recipe:
    return make_recipe(
        {
            "model_name_or_path": str(base),
            "dataset": str(data),
            "output_dir": str(output),
            "bf16": False,
            "device": "cpu",
            "lora_rank": 3,
            "lora_target": "q_proj,v_proj,experts",
            "learning_rate": 1e-2,
            "per_device_train_batch_size": 2,
            "max_steps": 2,
            "logging_steps": 1,
            **keys,
        }
    )


def in_loss(number: int, of: int) -> EncodedChat:
    """A sample of ``of`` tokens whose last ``number`` carry loss."""
    ids = torch.randint(20, 200, (of,), generator=torch.Generator().manual_seed(of)).tolist()
    return EncodedChat(ids, [IGNORE] * (of - number) + ids[of - number :])


class Gradients(TrainerCallback):
    """Keeps the gradients the first optimizer step would use, and their norm."""

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if not self.values:
            self.values = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    @property
    def norm(self) -> float:
        return float(sum(value.double().pow(2).sum() for value in self.values.values()) ** 0.5)


def one_step(base: Path, data: Path, output: Path, samples: list[EncodedChat], **keys) -> tuple[Gradients, Progress]:
    settings = recipe(base, data, output, max_steps=1, save_strategy="no", **keys)
    torch.manual_seed(0)
    model = build_model(settings, str(base))
    with torch.no_grad():  # B = 0 would leave A without gradient
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    gradients = Gradients()
    output.mkdir(parents=True)
    progress = Progress(output / "log.jsonl")
    make_trainer(settings, model, tiny_tokenizer(), ChatDataset(samples), None, [progress, gradients]).train()
    return gradients, progress
