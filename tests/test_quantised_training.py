"""Fine-tuning on quantised checkpoints, attention and experts, through ``ktft.train.run``.

The truth of every step's loss is stock transformers + stock PEFT on the dequantised weights. Its LoRA on the fused
gate_up_proj has twice the rank and block-diagonal B, whose zeros are held at zero, so that it is the same function of
the same numbers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.utils import load_peft_weights, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed

from ktft.config import Recipe
from ktft.data import IGNORE, collate, encode_chats, read_chats
from ktft.train import run
from ktft.train.callbacks import read_log
from ktft.train.run import build_model
from tests.quantised import SIZES, Written, quantise
from tests.test_quickstart import dense_model
from tests.tiny_chat import tiny_tokenizer
from tests.tiny_models import tiny_checkpoint
from tests.tiny_train import recipe

STEPS, LEARNING_RATE, SAMPLES = 20, 3e-3, 5
CASES = [
    ("deepseek_v3", "fp8-block"),
    ("qwen3_moe", "int4-g32"),
    ("qwen3_moe", "nvfp4-compressed"),
    ("qwen3_moe", "mxfp4"),
    ("upcycled", "fp8-channel"),
]
ATTENTION = {"deepseek_v3": "q_b_proj,o_proj"}


def settings(base: Path, family: str, data: Path, output: Path, **keys: Any) -> Recipe:
    """The same samples in every batch, so that their order does not matter, and steps that are AdamW's alone."""
    return recipe(
        base, data, output,
        lora_target=f"{ATTENTION.get(family, 'q_proj,v_proj')},experts", per_device_train_batch_size=SAMPLES,
        max_steps=STEPS, learning_rate=LEARNING_RATE, lr_scheduler_type="constant", max_grad_norm=1e9,
        max_samples=SAMPLES, disable_gradient_checkpointing=True, **keys,
    )  # fmt: skip


def losses_of(keys: Recipe) -> list[float]:
    """Of every step of a run."""
    run(keys)
    return [entry["loss"] for entry in read_log(Path(keys.output_dir) / "log.jsonl")]


def batch_of(data: Path) -> dict[str, torch.Tensor]:
    samples, _ = encode_chats(tiny_tokenizer(), read_chats([str(data)], ".", SAMPLES), 2048)
    return collate(list(samples), tiny_tokenizer().pad_token_id)


def token_losses(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of every token that carries loss."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    learned = labels != IGNORE
    return torch.nn.functional.cross_entropy(logits[learned], labels[learned], reduction="none")


def stock(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager")


def stock_training(base: Path, start: Path, trained: Path, batch: dict[str, torch.Tensor]) -> list[float]:
    """Losses of the same steps from the adapter in ``start``; what is zero in ``trained`` stays as it is."""
    model = PeftModel.from_pretrained(stock(base), start, is_trainable=True)
    set_peft_model_state_dict(model, load_peft_weights(trained, device="cpu"))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masks = [(parameter != 0).float() for parameter in parameters]
    set_peft_model_state_dict(model, load_peft_weights(start, device="cpu"))
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0)
    model.train()
    losses = []
    for _ in range(STEPS):
        loss = token_losses(model, batch).mean()
        loss.backward()
        for parameter, mask in zip(parameters, masks, strict=True):
            parameter.grad *= mask
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, upcycle: ModuleType) -> Callable[[str], Path]:
    """family -> its bf16 checkpoint, written when first asked for; not to be changed."""
    root = tmp_path_factory.mktemp("original")

    @cache
    def of(family: str) -> Path:
        tokenizer = tiny_tokenizer()
        if family == "upcycled":
            dense = dense_model(hidden_size=64, intermediate_size=96).to(torch.bfloat16)
            upcycle.save(upcycle.upcycle(dense), tokenizer, root / family)
        else:
            tiny_checkpoint(
                family, root / family, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id, initializer_range=0.06, **SIZES["edges"][family],
                num_hidden_layers=2,
            )  # fmt: skip
            tokenizer.save_pretrained(root / family)
        return root / family

    return of


@pytest.fixture(scope="module")
def original_losses(original: Callable[[str], Path], data: Path) -> Callable[[str], list[float]]:
    """family -> losses of the recipe on the bf16 checkpoint."""

    @cache
    def of(family: str) -> list[float]:
        return losses_of(settings(original(family), family, data, original(family).parent / f"{family}-trained"))

    return of


@pytest.mark.parametrize(("family", "name"), CASES)
def test_steps_are_those_of_the_dequantised_model_in_stock_peft(
    original: Callable[[str], Path],
    original_losses: Callable[[str], list[float]],
    data: Path,
    tmp_path: Path,
    family: str,
    name: str,
) -> None:
    """And training arrives where it does on the bf16 original, but for what the format did to the tokens' losses
    before: the mean of their absolute changes, between the two stock models without an adapter."""
    written = quantise(Path(shutil.copytree(original(family), tmp_path / "plain")), name)
    keys = settings(written.directory, family, data, tmp_path / "trained")
    set_seed(keys.seed)
    build_model(keys, str(written.directory)).save_pretrained(tmp_path / "start")
    losses = losses_of(keys)

    batch = batch_of(data)
    truth = stock_training(written.plain, tmp_path / "start", tmp_path / "trained", batch)
    with torch.no_grad():
        change = token_losses(stock(written.plain), batch) - token_losses(stock(original(family)), batch)
    margin = float(change.abs().mean())
    assert losses == pytest.approx(truth, rel=1e-5)
    assert losses[-1] < 0.7 * losses[0] and losses[0] - losses[-1] > 3 * margin
    assert abs(losses[-1] - original_losses(family)[-1]) < margin


def test_bf16_steps_are_those_of_a_bf16_checkpoint_of_the_decoded_weights(
    original: Callable[[str], Path], data: Path, tmp_path: Path
) -> None:
    """Bit for bit: a weight is rounded once, and is the same number in every kernel."""
    written = quantise(Path(shutil.copytree(original("qwen3_moe"), tmp_path / "plain")), "nvfp4-compressed")
    plain = Written(written.plain, written.plain, {}, written.encoding)
    plain.edit(lambda tensors: tensors.update({key: tensor.bfloat16() for key, tensor in tensors.items()}))
    coded_losses, plain_losses = (
        losses_of(settings(base, "qwen3_moe", data, base.parent / f"{base.name}-trained", bf16=True))
        for base in (written.directory, written.plain)
    )
    assert coded_losses == plain_losses and coded_losses[-1] < 0.7 * coded_losses[0]
