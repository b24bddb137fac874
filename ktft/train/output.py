"""The output directory of a run: what may be written there, what is removed, and which checkpoint a run resumes from.

A checkpoint is complete when everything resuming needs is in it. ``trainer_state.json`` is written last and removed
first, so a save that was killed is not complete. Each checkpoint also holds the recipe it was written under; resuming
compares that with the recipe at hand, because optimizer moments, random state and data order belong to it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from ktft.config import KEYS, Recipe, load_recipe

LOG, PLOT, SUMMARY, RECIPE = "log.jsonl", "loss.png", "summary.json", "recipe.yaml"
STATE = "trainer_state.json"
RESUME_FILES = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "adapter_model.safetensors", RECIPE)
"""What a complete checkpoint holds besides the trainer's state."""

FREE_ON_RESUME = frozenset(
    # how far: the schedule of the learning rate is then that of the new length
    "max_steps num_train_epochs "
    # what is evaluated, logged, kept and where
    "eval_dataset per_device_eval_batch_size eval_steps eval_strategy exact_match_samples max_new_tokens "
    "output_dir overwrite_output_dir resume_from_checkpoint logging_steps logging_first_step plot_loss report_to "
    "save_steps save_strategy save_total_limit save_only_model "
    # where and with what means the same numbers are computed
    "device prepare trust_remote_code check_weights dataloader_num_workers disable_gradient_checkpointing "
    # without effect
    "preprocessing_num_workers overwrite_cache ddp_timeout".split()
)
"""Recipe keys that may differ from those of the checkpoint a run resumes from; all others must be the same."""


def open_output(recipe: Recipe) -> str | None:
    """Check ``output_dir`` against what the recipe wants with it, and create it; nothing is removed yet.

    Returns:
        The checkpoint to resume from, if any.

    Raises:
        ValueError: the directory cannot be written, is the base model's, or has content and the recipe neither
        overwrites nor resumes from it; or there is nothing to resume from, or the recipe differs from the checkpoint's.
    """
    output, base = Path(recipe.output_dir), Path(os.path.realpath(recipe.model_name_or_path))
    if os.path.realpath(output) == str(base.parent if base.is_file() else base):
        raise ValueError(f"output_dir {output} is the base model's directory; give another one")
    if output.exists() and not output.is_dir():
        raise ValueError(f"output_dir {output} is a file")
    checkpoint = _checkpoint_to_resume(recipe, output)
    inside = checkpoint is not None and os.path.realpath(checkpoint.parent) == os.path.realpath(output)
    if not inside and not recipe.overwrite_output_dir and output.is_dir() and any(output.iterdir()):
        raise ValueError(
            f"output_dir {output} is not empty; give another one, overwrite_output_dir=true, "
            "or resume_from_checkpoint=true"
        )
    if checkpoint is not None:
        _same_recipe(recipe, checkpoint)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output_dir {output} cannot be created: {error.strerror}") from None
    if not os.access(output, os.W_OK | os.X_OK):
        raise ValueError(f"output_dir {output} cannot be written to")
    return None if checkpoint is None else str(checkpoint)


def clear_output(output: Path) -> None:
    """Remove an earlier run's checkpoints and results; whatever else lies there stays."""
    for path in checkpoints(output):
        if not path.is_symlink() and any((path / name).is_file() for name in (STATE, "adapter_config.json", RECIPE)):
            shutil.rmtree(path)
    for name in ("adapter_config.json", "adapter_model.safetensors", LOG, PLOT, SUMMARY, RECIPE):
        (output / name).unlink(missing_ok=True)


def total_steps(recipe: Recipe, samples: int) -> int:
    """Optimizer steps of the whole run over ``samples`` training samples, counted as the Trainer does."""
    if recipe.max_steps > 0:
        return recipe.max_steps
    batches = math.ceil(samples / recipe.per_device_train_batch_size)
    return math.ceil(recipe.num_train_epochs * math.ceil(batches / recipe.gradient_accumulation_steps))


def check_unfinished(checkpoint: str, steps: int) -> None:
    """
    Raises:
        ValueError: there is nothing left to train after ``checkpoint`` in a run of ``steps`` steps.
    """
    done = _state(Path(checkpoint))["global_step"]
    if done >= steps:
        raise ValueError(
            f"nothing to resume: {checkpoint} is at step {done} and the recipe asks for {steps}; raise max_steps or "
            "num_train_epochs to train on, or use that checkpoint, which holds the adapter"
        )


def checkpoints(output: Path) -> list[Path]:
    """The directories named as the Trainer's checkpoints, by step."""
    found = [
        (int(path.name.removeprefix("checkpoint-")), path)
        for path in output.glob("checkpoint-*")
        if path.is_dir() and path.name.removeprefix("checkpoint-").isdecimal()
    ]
    return [path for _, path in sorted(found)]


def newest_complete(output: Path) -> Path | None:
    """The checkpoint that ``resume_from_checkpoint: true`` takes."""
    complete = [path for path in checkpoints(output) if is_complete(path)]
    return complete[-1] if complete else None


def is_complete(checkpoint: Path) -> bool:
    """Whether everything resuming needs is there."""
    return _state(checkpoint) is not None and all((checkpoint / name).is_file() for name in RESUME_FILES)


def begin_checkpoint(directory: Path, recipe: Recipe) -> None:
    """Make ``directory`` an incomplete checkpoint of ``recipe``'s, whatever an earlier run left in it."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in (STATE, "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (directory / name).unlink(missing_ok=True)
    (directory / RECIPE).write_text(recipe.to_yaml(), encoding="utf-8")


def _checkpoint_to_resume(recipe: Recipe, output: Path) -> Path | None:
    if not recipe.resume_from_checkpoint:
        return None
    if recipe.resume_from_checkpoint is True:
        newest = newest_complete(output)
        if newest is None:
            raise ValueError(f"resume_from_checkpoint: true, but {output} holds no complete checkpoint")
        return newest
    checkpoint = Path(recipe.resume_from_checkpoint)
    if not is_complete(checkpoint):
        raise ValueError(
            f"resume_from_checkpoint: {checkpoint} is not a complete checkpoint "
            f"(it needs {STATE}, {', '.join(RESUME_FILES)})"
        )
    step = _state(checkpoint)["global_step"]
    later = [path.name for path in checkpoints(output) if int(path.name.removeprefix("checkpoint-")) > step]
    if later:
        raise ValueError(
            f"resume_from_checkpoint: {checkpoint} is at step {step}, but {output} also holds {', '.join(later)} of a "
            "run that went further; move them away, or resume into another output_dir"
        )
    return checkpoint


def _same_recipe(recipe: Recipe, checkpoint: Path) -> None:
    then = load_recipe(checkpoint / RECIPE)
    changed = [
        f"{key} was {getattr(then, key)!r} and is {getattr(recipe, key)!r}"
        for key in KEYS
        if key not in FREE_ON_RESUME and getattr(then, key) != getattr(recipe, key)
    ]
    if changed:
        raise ValueError(
            f"the recipe differs from the one {checkpoint} was trained with: {'; '.join(changed)}; set the old values "
            "to go on with that run, or start a new one"
        )


def _state(checkpoint: Path) -> Any:
    """The trainer's state, None if it is missing or cut short."""
    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) and isinstance(state.get("global_step"), int) else None


__all__ = [
    "FREE_ON_RESUME",
    "LOG",
    "PLOT",
    "RECIPE",
    "SUMMARY",
    "begin_checkpoint",
    "check_unfinished",
    "checkpoints",
    "clear_output",
    "is_complete",
    "newest_complete",
    "open_output",
    "total_steps",
]
