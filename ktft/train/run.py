"""``run(recipe)``: base model, data and adapter in; adapter, log, plot and summary out.

In order: check the output directory, build the base if the recipe says how, load the tokenizer and the data (cheap, so
mistakes show early), load the model, add LoRA, score, train, score, save. What lies in ``output_dir`` afterwards:

    adapter_config.json, adapter_model.safetensors   the adapter, for any PEFT tool
    tokenizer files                                  as used
    recipe.yaml, log.jsonl, summary.json, loss.png   what was asked for, and what happened
    checkpoint-<step>/                               to resume from

The loss is the mean over answer tokens and nothing else. The auxiliary balance loss of a base whose config has
``output_router_logits: true`` is switched off, with a notice: the router is frozen, so there is no balance to train.
"""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
import time
import warnings
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from peft import LoraConfig
from transformers import TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging as transformers_logging

from ktft.adapters import KtftPeftModel, get_peft_model
from ktft.config import Recipe
from ktft.data import Chat, ChatDataset, collate, encode_chats, read_chats, split_held_out
from ktft.model import load_model
from ktft.tokenizer import read_tokenizer
from ktft.train.callbacks import Progress, SaveOnInterrupt, read_log
from ktft.train.output import (
    LOG,
    PLOT,
    RECIPE,
    SUMMARY,
    check_unfinished,
    clear_output,
    open_output,
    total_steps,
)
from ktft.train.report import Summary, peak_rss_gb, plot_loss
from ktft.train.score import Score, exact_match
from ktft.train.trainer import AdapterTrainer


def run(recipe: Recipe) -> Summary:
    """Train, and print what is going on to standard output and the progress bar to standard error.

    Returns:
        The summary, which is printed and saved as well. After Ctrl-C it says so, and the newest checkpoint has the
        state.

    Raises:
        ValueError: what is wrong with the recipe, the machine, the data, the output directory or the checkpoint to
        resume from.
        RuntimeError: the ``prepare`` program failed, or training diverged.
    """
    began = time.perf_counter()
    output = Path(recipe.output_dir)
    check_machine(recipe)
    checkpoint = open_output(recipe)
    for notice in recipe.notices:
        _say(f"note: {notice}")
    prepare_base(recipe)
    base = (
        os.path.abspath(recipe.model_name_or_path)
        if os.path.exists(recipe.model_name_or_path)
        else recipe.model_name_or_path
    )

    tokenizer = load_tokenizer(recipe, base)
    train_chats = read_chats(recipe.dataset, recipe.dataset_dir, recipe.max_samples)
    held_out: list[Chat] = []
    if recipe.eval_dataset:
        held_out = read_chats(recipe.eval_dataset, recipe.dataset_dir, recipe.max_samples)
    elif recipe.val_size:
        train_chats, held_out = split_held_out(train_chats, recipe.val_size, recipe.seed)
    train_set, report = encode_chats(tokenizer, train_chats, recipe.cutoff_len)
    _say(f"training data: {report}")
    if checkpoint is not None:
        check_unfinished(checkpoint, total_steps(recipe, len(train_set)))
    eval_set = None
    if held_out:
        eval_set, report = encode_chats(tokenizer, held_out, recipe.cutoff_len)
        _say(f"held-out data: {report}")

    transformers_logging.disable_progress_bar()
    set_seed(recipe.seed)
    model = build_model(recipe, base)
    trainable, everything = model.get_nb_trainable_parameters()
    _say(f"{base}: {trainable:,} of {everything:,} parameters are trained")

    scored = held_out[: recipe.exact_match_samples]
    before = after = None
    if scored:
        with model.disable_adapter():
            before = _score("before training", model, tokenizer, scored, recipe)

    progress = Progress(output / LOG)
    with SaveOnInterrupt() as interrupt:
        trainer = make_trainer(recipe, model, tokenizer, train_set, eval_set, [progress, interrupt])
        if trainer.token_loss.reason:
            _say(f"note: logits are computed for every token at once, as in transformers: {trainer.token_loss.reason}")
        if recipe.overwrite_output_dir:
            clear_output(output)
        (output / RECIPE).write_text(recipe.to_yaml(), encoding="utf-8")
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
        except UnpicklingError:
            # Torch's message explains how to run what is in the file.
            raise ValueError(
                f"{checkpoint} is refused: optimizer.pt, scheduler.pt or rng_state.pth is damaged, or holds more than "
                "tensors and numbers, which a checkpoint of ktft's never does; nothing of it was executed"
            ) from None
        finally:
            progress.close()
        interrupted = trainer.state.global_step < trainer.state.max_steps
        model.save_pretrained(output)
        tokenizer.save_pretrained(output)
        if eval_set is not None and not interrupted and not _evaluated(output, trainer.state.global_step):
            trainer.evaluate()
    if scored and not interrupted:
        after = _score("after training", model, tokenizer, scored, recipe)

    entries = read_log(output / LOG)
    if recipe.plot_loss:
        plot_loss(entries, output / PLOT)
    losses = [entry["loss"] for entry in entries if "loss" in entry]
    eval_losses = [entry["eval_loss"] for entry in entries if "eval_loss" in entry]
    summary = Summary(
        output_dir=recipe.output_dir,
        base_model=base,
        interrupted=interrupted,
        steps=trainer.state.global_step,
        first_step=progress.first_step,
        epochs=trainer.state.epoch or 0.0,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        eval_loss=eval_losses[-1] if eval_losses else None,
        tokens=progress.tokens,
        tokens_per_second=progress.tokens / max(progress.seconds, 1e-9),
        train_seconds=progress.seconds,
        total_seconds=time.perf_counter() - began,
        trainable_parameters=trainable,
        all_parameters=everything,
        peak_rss_gb=peak_rss_gb(),
        exact_match_before=before,
        exact_match_after=after,
    )
    summary.write(output / SUMMARY)
    _say(str(summary))
    return summary


def check_machine(recipe: Recipe) -> None:
    """
    Raises:
        ValueError: this is one of several processes, or the recipe wants a GPU where torch sees none.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ValueError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but this version trains in one process; several processes come "
            "with a later version. Start ktft train without torchrun or accelerate launch"
        )
    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda, but torch sees no CUDA GPU (ktft doctor shows what it sees); use device: cpu")


def prepare_base(recipe: Recipe) -> None:
    """Run the recipe's ``prepare`` program if the base model is missing.

    Raises:
        ValueError: there is no such program. RuntimeError: it failed, or did not make it.
    """
    if recipe.prepare is None or os.path.exists(recipe.model_name_or_path):
        return
    script, *arguments = shlex.split(recipe.prepare)
    if not os.path.isfile(script):
        raise ValueError(f"prepare: {script} does not exist (paths are relative to the working directory)")
    command = [script, *arguments, "--output", recipe.model_name_or_path]
    _say(f"{recipe.model_name_or_path} is missing; building it: python {shlex.join(command)}")
    # A process of its own: what it needs in memory is gone before training starts.
    status = subprocess.run([sys.executable, *command]).returncode
    if status or not os.path.exists(recipe.model_name_or_path):
        raise RuntimeError(
            f"prepare: {script} ended with status {status} and did not build {recipe.model_name_or_path}"
        )


def load_tokenizer(recipe: Recipe, base: str) -> Any:
    """The base's tokenizer, with the recipe's chat template if that names a ``.jinja`` file.

    Raises:
        ValueError: there is no chat template, or no end-of-sequence token to pad with.
    """
    tokenizer = read_tokenizer(base, trust_remote_code=recipe.trust_remote_code)
    if recipe.template is not None and recipe.template.endswith(".jinja"):
        tokenizer.chat_template = Path(recipe.template).read_text(encoding="utf-8")
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer of {base} has no chat template; give one with template: FILE.jinja")
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {base} has neither a pad nor an end-of-sequence token")
        # Any id will do: padding is masked out of attention and loss by position, never by id.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def build_model(recipe: Recipe, base: str) -> KtftPeftModel:
    """The base with a fresh adapter, in training mode."""
    device = recipe.device if recipe.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(
        base,
        device=device,
        dtype=torch.bfloat16 if recipe.bf16 else torch.float32,
        trust_remote_code=recipe.trust_remote_code,
        check_weights=recipe.check_weights,
    )
    if model.config.to_dict().get("output_router_logits"):
        # Each micro-batch would add its own balance loss, unscaled, so accumulation would change the loss.
        model.config.output_router_logits = False
        _say("note: output_router_logits of the base's config is switched off: the router is frozen")
    targets: str | list[str] = "all-linear" if recipe.lora_target == ("all",) else list(recipe.lora_target)
    config = LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha or 2 * recipe.lora_rank,
        lora_dropout=recipe.lora_dropout,
        target_modules=targets,
        use_rslora=recipe.use_rslora,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        # PEFT reads a transformers property that is deprecated there; nothing the user could change.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        peft_model = get_peft_model(model, config)
    peft_model.train()
    return peft_model


def make_trainer(
    recipe: Recipe,
    model: KtftPeftModel,
    tokenizer: Any,
    train_set: ChatDataset,
    eval_set: ChatDataset | None,
    callbacks: list[Any],
) -> AdapterTrainer:
    """The Trainer that does what the recipe says."""
    checkpointing: dict[str, Any] = {}
    if not recipe.disable_gradient_checkpointing:
        # The names of transformers 5.17; 5.24 calls them activation_checkpointing and takes both.
        checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    strategy = recipe.eval_strategy or ("steps" if recipe.eval_steps else "no")
    arguments = TrainingArguments(
        output_dir=recipe.output_dir,
        per_device_train_batch_size=recipe.per_device_train_batch_size,
        per_device_eval_batch_size=recipe.per_device_eval_batch_size,
        gradient_accumulation_steps=recipe.gradient_accumulation_steps,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type=recipe.lr_scheduler_type,
        warmup_steps=recipe.warmup_ratio or recipe.warmup_steps,  # below 1 it is a ratio
        num_train_epochs=recipe.num_train_epochs,
        max_steps=recipe.max_steps,
        optim="adamw_torch",
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        adam_beta1=recipe.adam_beta1,
        adam_beta2=recipe.adam_beta2,
        adam_epsilon=recipe.adam_epsilon,
        seed=recipe.seed,
        bf16=False,  # see trainer.py
        use_cpu=model.device.type == "cpu",
        **checkpointing,
        dataloader_num_workers=recipe.dataloader_num_workers,
        dataloader_pin_memory=model.device.type != "cpu",
        remove_unused_columns=False,
        label_names=["labels"],
        logging_steps=recipe.logging_steps,
        logging_first_step=recipe.logging_first_step,
        logging_nan_inf_filter=False,  # it would log a loss of 0 for one that is not finite
        save_strategy=recipe.save_strategy,
        save_steps=recipe.save_steps,
        save_total_limit=recipe.save_total_limit,
        save_only_model=recipe.save_only_model,
        eval_strategy=strategy,
        eval_steps=recipe.eval_steps,
        include_num_input_tokens_seen="non_padding",
        report_to="none",
        disable_tqdm=True,  # the bar is callbacks.Progress
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # or the Trainer would wrap the model in DataParallel and copy it to every GPU it sees
    trainer = AdapterTrainer(
        recipe=recipe,
        model=model,
        args=arguments,
        data_collator=functools.partial(collate, pad_token_id=tokenizer.pad_token_id),
        train_dataset=train_set,
        eval_dataset=eval_set,
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _say(line: str) -> None:
    print(line, flush=True)


def _score(when: str, model: Any, tokenizer: Any, chats: list[Chat], recipe: Recipe) -> Score:
    score = exact_match(model, tokenizer, chats, max_new_tokens=recipe.max_new_tokens)
    _say(f"exact answers {when}: {score}")
    return score


def _evaluated(output: Path, step: int) -> bool:
    return any("eval_loss" in entry and entry["step"] == step for entry in read_log(output / LOG))


__all__ = ["build_model", "check_machine", "load_tokenizer", "make_trainer", "prepare_base", "run"]
