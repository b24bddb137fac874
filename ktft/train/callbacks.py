"""What the user sees and keeps of a running training: progress bar, JSON log, and Ctrl-C that loses nothing."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class Progress(TrainerCallback):
    """A bar with loss, tokens/s, learning rate and the time left; one JSON object per log entry in ``log``.

    Tokens are counted without padding, seconds from the first micro-batch of a step to the optimizer's update, so
    evaluations and checkpoints do not count as training time.

    Args:
        log: the ``.jsonl`` file. Entries after the step training starts at (of a run that went further before it was
            resumed) are removed first.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self.tokens = 0
        self.seconds = 0.0
        self.first_step = 0
        self._seen = self._window_tokens = 0
        self._window_seconds = self._began = 0.0
        self._bar: Any = None

    def close(self) -> None:
        """End the bar's line, whatever ended training."""
        if self._bar is not None:
            self._bar.close()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.first_step = state.global_step
        self._seen = state.num_input_tokens_seen
        _drop_after(self.log, state.global_step)
        self._bar = tqdm(
            total=state.max_steps,
            initial=state.global_step,
            desc="training",
            unit="step",
            dynamic_ncols=True,
            mininterval=0.1 if sys.stderr.isatty() else 10.0,
            bar_format="{desc} {percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} steps"
            " [{elapsed}, {remaining} left{postfix}]",
        )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        seconds, tokens = time.perf_counter() - self._began, state.num_input_tokens_seen - self._seen
        self._seen = state.num_input_tokens_seen
        self.seconds += seconds
        self.tokens += tokens
        self._window_seconds += seconds
        self._window_tokens += tokens
        self._bar.update()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        entry: dict[str, float] = {"step": state.global_step, **(logs or {})}
        if "loss" in entry:
            speed = self._window_tokens / max(self._window_seconds, 1e-9)
            entry["tokens_per_second"] = round(speed, 1)
            self._window_tokens, self._window_seconds = 0, 0.0
            self._bar.set_postfix_str(
                f"loss {entry['loss']:.4f}, {speed:.0f} tokens/s, lr {entry['learning_rate']:.2e}", refresh=False
            )
        elif "eval_loss" in entry:
            self.say(f"step {state.global_step}: held-out loss {entry['eval_loss']:.4f}")
        else:
            return  # the Trainer's closing totals; the summary has them
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry, allow_nan=False) + "\n")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()

    def say(self, line: str) -> None:
        """A line above the bar."""
        tqdm.write(line, file=sys.stderr)


class SaveOnInterrupt(TrainerCallback):
    """Ctrl-C ends training after the step that is running, with a checkpoint to resume from, even if the recipe saves
    adapters only. A second Ctrl-C stops at once. After the last step there is nothing to interrupt, and the run ends
    as it would have.

    A context manager: the signal is ours inside it only. Needs the main thread, as signals do.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self.done = False
        self._previous: Any = None

    def __enter__(self) -> SaveOnInterrupt:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        doing = (
            "training is done; finishing up"
            if self.done
            else "interrupted: finishing this step and saving a checkpoint"
        )
        tqdm.write(f"{doing} (Ctrl-C again to stop at once)", file=sys.stderr)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        self.done = state.global_step >= state.max_steps
        if self.interrupted:
            args.save_only_model = False
            control.should_save = control.should_training_stop = True
        return control


def read_log(path: Path) -> list[dict[str, float]]:
    """The entries of a log file, none if there is no file. A last line that was cut short is left out.

    Raises:
        ValueError: another line is not JSON.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines()
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
    return entries


def _drop_after(path: Path, step: int) -> None:
    kept = [entry for entry in read_log(path) if entry["step"] <= step and step > 0]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")
    os.replace(partial, path)


__all__ = ["Progress", "SaveOnInterrupt", "read_log"]
