"""The output directory: what is refused, what is removed and when, which checkpoint is resumed, under which recipe."""

from __future__ import annotations

import itertools
import json
import os
import pickletools
import shutil
import signal
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from transformers import TrainerCallback

from ktft.config import KEYS, Recipe
from ktft.data import ChatDataset
from ktft.train import run
from ktft.train.callbacks import Progress, read_log
from ktft.train.output import FREE_ON_RESUME, RESUME_FILES, clear_output, is_complete, open_output, total_steps
from ktft.train.run import build_model, make_trainer
from ktft.train.trainer import AdapterTrainer
from tests.tiny_chat import chat, tiny_tokenizer, write_chats
from tests.tiny_train import in_loss, recipe


@pytest.fixture(scope="module")
def trained(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a run of four steps with checkpoints at 2 and 4; do not write to it."""
    output = tmp_path_factory.mktemp("trained") / "out"
    run(recipe(base, data, output, max_steps=4, save_steps=2))
    return output


def fake_checkpoint(directory: Path, settings: Recipe, step: int, without: str = "") -> Path:
    directory.mkdir(parents=True)
    for name in RESUME_FILES:
        if name != without:
            (directory / name).write_text(settings.to_yaml() if name == "recipe.yaml" else "x")
    (directory / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return directory


def test_output_directory_is_not_overwritten_unasked(base: Path, data: Path, tmp_path: Path):
    output = tmp_path / "out"
    settings = recipe(base, data, output)
    assert open_output(settings) is None and output.is_dir()
    assert open_output(settings) is None
    (output / "mine.txt").write_text("x")
    with pytest.raises(ValueError, match="is not empty; give another one, overwrite_output_dir=true"):
        open_output(settings)
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        open_output(recipe(base, data, output, resume_from_checkpoint=True))
    with pytest.raises(ValueError, match="is a file"):
        open_output(recipe(base, data, output / "mine.txt"))
    with pytest.raises(ValueError, match="resume_from_checkpoint: nowhere is not a complete checkpoint"):
        open_output(recipe(base, data, output, resume_from_checkpoint="nowhere"))
    # A checkpoint from elsewhere does not make the directory ours.
    other = fake_checkpoint(tmp_path / "other/checkpoint-3", settings, 3)
    with pytest.raises(ValueError, match="is not empty"):
        open_output(recipe(base, data, output, resume_from_checkpoint=str(other)))
    assert open_output(recipe(base, data, tmp_path / "new", resume_from_checkpoint=str(other))) == str(other)


def test_an_output_directory_that_cannot_be_is_refused_at_the_start(base: Path, data: Path, tmp_path: Path):
    (tmp_path / "link").symlink_to(base)
    for directory in (base, tmp_path / "link", base.parent / "x" / ".." / base.name):
        with pytest.raises(ValueError, match="is the base model's directory"):
            open_output(recipe(base, data, directory, overwrite_output_dir=True))
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="cannot be created: Not a directory"):
        open_output(recipe(base, data, tmp_path / "file/out"))


def test_only_complete_checkpoints_are_resumed(base: Path, data: Path, tmp_path: Path):
    output = tmp_path / "out"
    settings = recipe(base, data, output)
    resume = recipe(base, data, output, resume_from_checkpoint=True)
    three = fake_checkpoint(output / "checkpoint-3", settings, 3)
    assert open_output(resume) == str(three)
    for step, missing in enumerate(RESUME_FILES, 20):
        fake_checkpoint(output / f"checkpoint-{step}", settings, step, without=missing)
    assert open_output(resume) == str(three)
    twelve = fake_checkpoint(output / "checkpoint-12", settings, 12)
    assert open_output(resume) == str(twelve)
    (twelve / "trainer_state.json").write_text('{"global_st')  # a save that was killed
    assert open_output(resume) == str(three)


def test_an_earlier_checkpoint_is_not_resumed_beside_later_ones(base: Path, data: Path, tmp_path: Path):
    output = tmp_path / "out"
    settings = recipe(base, data, output)
    three, twelve = (fake_checkpoint(output / f"checkpoint-{n}", settings, n) for n in (3, 12))
    with pytest.raises(ValueError, match=r"is at step 3, but .* also holds checkpoint-12 of a run that went further"):
        open_output(recipe(base, data, output, resume_from_checkpoint=str(three)))
    assert open_output(recipe(base, data, output, resume_from_checkpoint=str(twelve))) == str(twelve)


def test_a_save_that_is_killed_over_an_older_checkpoint_is_incomplete(
    base: Path, data: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    output = tmp_path / "out"
    shutil.copytree(trained, output)
    assert is_complete(output / "checkpoint-2")
    settings = recipe(base, data, output, max_steps=4, save_steps=2)
    model = build_model(settings, str(base))
    trainer = make_trainer(settings, model, tiny_tokenizer(), ChatDataset([in_loss(3, 9)]), None, [])

    def killed(self, output_dir):
        raise KeyboardInterrupt

    monkeypatch.setattr(AdapterTrainer, "_save_optimizer_and_scheduler", killed)
    trainer.state.global_step = 2
    with pytest.raises(KeyboardInterrupt):
        trainer._save_checkpoint(model, None)
    assert not is_complete(output / "checkpoint-2")
    # Nor may an older run's optimizer pass for that of a checkpoint without one.
    assert not (output / "checkpoint-2/optimizer.pt").exists()


def test_a_changed_recipe_is_not_resumed(base: Path, data: Path, trained: Path, tmp_path: Path):
    output = tmp_path / "out"
    shutil.copytree(trained, output)
    free = {"max_steps": 9, "save_steps": 3, "logging_steps": 5, "plot_loss": True, "save_total_limit": 2}
    resumed = open_output(recipe(base, data, output, resume_from_checkpoint=True, **free))
    assert resumed == str(output / "checkpoint-4")
    for changes in (
        {"learning_rate": 0.5},
        {"lora_rank": 4},
        {"lora_target": "experts"},
        {"seed": 1},
        {"bf16": True},
        {"gradient_accumulation_steps": 2, "warmup_steps": 3},
        {"weight_decay": 0.1},
    ):
        with pytest.raises(ValueError, match=r"the recipe differs from the one .*checkpoint-4") as caught:
            run(recipe(base, data, output, resume_from_checkpoint=True, **free, **changes))
        for key, value in changes.items():
            old = getattr(recipe(base, data, output), key)
            new = getattr(recipe(base, data, output, **changes), key)
            assert f"{key} was {old!r} and is {new!r}" in str(caught.value), value
    assert yaml.safe_load((output / "recipe.yaml").read_text())["save_steps"] == 2  # nothing written


def test_the_keys_that_may_change_exist():
    assert set(KEYS) > FREE_ON_RESUME
    assert not FREE_ON_RESUME & {"learning_rate", "dataset", "seed", "lora_rank", "model_name_or_path", "val_size"}


@pytest.mark.parametrize("length", [{"max_steps": 4}, {"max_steps": -1, "num_train_epochs": 0.6}])
def test_a_finished_run_is_not_resumed(base: Path, data: Path, trained: Path, tmp_path: Path, length):
    """Eleven samples in batches of two: 0.6 epochs are four steps."""
    output = tmp_path / "out"
    shutil.copytree(trained, output)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"nothing to resume: .*checkpoint-4 is at step 4 and the recipe asks for 4"):
        run(recipe(base, data, output, resume_from_checkpoint=True, **length))
    assert before == {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}


class Steps(TrainerCallback):
    """Learns how many steps the Trainer means to make, and ends training before the first."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.total = state.max_steps
        raise StopIteration


def test_steps_are_counted_as_the_trainer_does(base: Path, data: Path, tmp_path: Path):
    model = build_model(recipe(base, data, tmp_path / "x"), str(base))
    for samples, epochs, accumulate in itertools.product((1, 7, 11), (0.3, 1.0, 2.5), (1, 3)):
        keys = {"max_steps": -1, "num_train_epochs": epochs, "gradient_accumulation_steps": accumulate}
        settings = recipe(base, data, tmp_path / "x", **keys)
        steps = Steps()
        trainer = make_trainer(settings, model, tiny_tokenizer(), ChatDataset([in_loss(1, 3)] * samples), None, [steps])
        with pytest.raises(StopIteration):
            trainer.train()
        assert total_steps(settings, samples) == steps.total, (samples, epochs, accumulate)


def test_overwriting_removes_our_own_files_only_and_only_when_training_starts(
    base: Path, data: Path, trained: Path, tmp_path: Path
):
    output = tmp_path / "out"
    shutil.copytree(trained, output)
    for name in ("checkpoint-7/thesis.tex", "checkpoint-best/x", "notes/x", "mine.txt"):
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).write_text("x")
    (output / "checkpoint-9").mkdir()
    (output / "checkpoint-9/recipe.yaml").write_text("")  # a save that was killed at once
    (output / "loss.png").write_text("x")
    before = {path for path in output.rglob("*")}
    with pytest.raises(ValueError, match=r"none\.jsonl"):
        run(recipe(base, tmp_path / "none.jsonl", output, overwrite_output_dir=True))
    assert before == {path for path in output.rglob("*")}
    clear_output(output)
    left = {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()}
    assert {"checkpoint-7/thesis.tex", "checkpoint-best/x", "notes/x", "mine.txt"} <= left
    assert not {path.name for path in output.iterdir()} & {
        "checkpoint-2",
        "checkpoint-4",
        "checkpoint-9",
        *("adapter_model.safetensors", "adapter_config.json", "log.jsonl", "loss.png", "summary.json", "recipe.yaml"),
    }


def test_overwriting_starts_afresh(base: Path, data: Path, trained: Path, tmp_path: Path):
    output = tmp_path / "out"
    shutil.copytree(trained, output)
    run(recipe(base, data, output, overwrite_output_dir=True, max_steps=1, save_strategy="no"))
    assert [entry["step"] for entry in read_log(output / "log.jsonl")] == [1]
    assert not list(output.glob("checkpoint-*")) and (output / "adapter_model.safetensors").is_file()


class Bomb:
    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self):
        return (Path.touch, (self.witness,))


@pytest.mark.parametrize("name", ["rng_state.pth", "optimizer.pt", "scheduler.pt"])
def test_a_pickle_in_a_checkpoint_is_not_executed(base: Path, data: Path, trained: Path, tmp_path: Path, name: str):
    output, witness = tmp_path / "out", tmp_path / "executed"
    shutil.copytree(trained, output)
    torch.save(Bomb(witness), output / "checkpoint-4" / name)
    with pytest.raises(ValueError, match=r"checkpoint-4 is refused: .* nothing of it was executed"):
        run(recipe(base, data, output, resume_from_checkpoint=True, max_steps=6))
    assert not witness.exists()
    # The bomb is a real one: whoever unpickles it calls Path.touch on the witness.
    with zipfile.ZipFile(output / "checkpoint-4" / name) as archive:
        (payload,) = (archive.read(member) for member in archive.namelist() if member.endswith("data.pkl"))
    steps = [(step.name, argument) for step, argument, _ in pickletools.genops(payload)]
    texts = [argument for _, argument in steps if isinstance(argument, str)]
    assert "touch" in texts and witness.name in texts and "REDUCE" in [step for step, _ in steps]


def test_a_log_cut_short_does_not_stop_a_resumed_run(base: Path, data: Path, trained: Path, tmp_path: Path):
    output = tmp_path / "out"
    shutil.copytree(trained, output)
    with open(output / "log.jsonl", "ab") as file:
        file.write(b'{"step": 5, "loss": 1.\xc3')
    summary = run(recipe(base, data, output, resume_from_checkpoint=True, max_steps=6))
    assert (summary.first_step, summary.steps) == (4, 6)
    assert [entry["step"] for entry in read_log(output / "log.jsonl")] == [1, 2, 3, 4, 5, 6]
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"log\.jsonl, line 2 is not JSON"):
        read_log(tmp_path / "log.jsonl")


def interrupt_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_step_end = Progress.on_step_end

    def interrupt(self, args, state, control, **kwargs):
        on_step_end(self, args, state, control, **kwargs)
        if state.global_step == step:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Progress, "on_step_end", interrupt)


def test_an_interrupted_run_can_be_resumed_even_if_it_saves_adapters_only(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    output = tmp_path / "out"
    keys = {"max_steps": 4, "save_only_model": True, "save_steps": 1}
    with monkeypatch.context() as patch:
        interrupt_after(2, patch)
        assert run(recipe(base, data, output, **keys)).interrupted
    assert [is_complete(output / f"checkpoint-{step}") for step in (1, 2)] == [False, True]
    summary = run(recipe(base, data, output, resume_from_checkpoint=True, **keys))
    assert (summary.first_step, summary.steps, summary.interrupted) == (2, 4, False)


def test_an_interrupt_during_the_last_step_interrupts_nothing(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    interrupt_after(2, monkeypatch)
    summary = run(recipe(base, data, tmp_path / "out", save_strategy="no"))
    assert (summary.interrupted, summary.steps) == (False, 2)
    # What it says then is true as well.
    assert "finishing this step and saving a checkpoint" in capfd.readouterr().err
    assert is_complete(tmp_path / "out/checkpoint-2")


def test_an_interrupt_after_the_last_step_interrupts_nothing(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    held_out = write_chats(tmp_path / "held.jsonl", [chat("log 1 salt", "salt")])
    evaluate = AdapterTrainer.evaluate

    def interrupted(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        return evaluate(self, *args, **kwargs)

    monkeypatch.setattr(AdapterTrainer, "evaluate", interrupted)
    summary = run(recipe(base, data, tmp_path / "out", eval_dataset=str(held_out), save_strategy="no"))
    assert (summary.interrupted, summary.steps) == (False, 2) and summary.eval_loss is not None
    assert "training is done; finishing up" in capfd.readouterr().err
