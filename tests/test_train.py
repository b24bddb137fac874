"""Training: loss normalisation, what is trained and what stays, resuming, Ctrl-C, divergence, scoring."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ktft.config import Recipe, make_recipe
from ktft.data import IGNORE, Chat, ChatDataset, EncodedChat, collate, read_chats
from ktft.lora import ExpertLora
from ktft.train import exact_match, run
from ktft.train.callbacks import Progress, read_log
from ktft.train.report import plot_loss
from ktft.train.run import build_model, load_tokenizer, make_trainer, prepare_base
from ktft.weights import LORA_NAMES
from tests.tiny_chat import chat, tiny_tokenizer, write_chats
from tests.tiny_train import in_loss, one_step, recipe

ROOT = Path(__file__).parents[1]


def test_accumulated_micro_batches_equal_one_batch(base: Path, data: Path, tmp_path: Path):
    """Micro-batches with 1 and 7 labelled tokens: gradients and loss of one batch of 8 tokens, not a mean of means."""
    samples = [in_loss(1, 12), in_loss(7, 15)]
    clip_off = {"max_grad_norm": 1e9}
    one, _ = one_step(base, data, tmp_path / "one", samples, per_device_train_batch_size=2, **clip_off)
    two, _ = one_step(
        base,
        data,
        tmp_path / "two",
        samples,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        **clip_off,
    )
    assert one.values.keys() == two.values.keys() and len(one.values) > 12
    for name, expected in one.values.items():
        torch.testing.assert_close(two.values[name], expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))
    losses = [read_log(tmp_path / name / "log.jsonl")[0]["loss"] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    # … and the mean over tokens, computed here.
    settings = recipe(base, data, tmp_path / "x")
    torch.manual_seed(0)
    model = build_model(settings, str(base)).eval()
    total = 0.0
    for sample in samples:
        with torch.no_grad(), model.disable_adapter():
            logits = model(input_ids=torch.tensor([sample.input_ids])).logits[0].double()
        picked = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(sample.input_ids[1:])[:, None])[:, 0]
        total -= float(picked[torch.tensor(sample.labels[1:]) != IGNORE].sum())
    model_loss = exact_loss(base, data, tmp_path, samples)
    assert model_loss == pytest.approx(total / 8, rel=1e-5)


def exact_loss(base: Path, data: Path, tmp_path: Path, samples: list[EncodedChat]) -> float:
    """The Trainer's held-out loss of an untrained adapter (B = 0: the base's) over batches of unequal label counts."""
    settings = recipe(base, data, tmp_path / "eval", per_device_eval_batch_size=1)
    model = build_model(settings, str(base))
    progress = Progress(tmp_path / "eval.jsonl")
    trainer = make_trainer(settings, model, tiny_tokenizer(), ChatDataset(samples), ChatDataset(samples), [progress])
    assert model.training
    loss = trainer.evaluate()["eval_loss"]
    assert model.training
    return loss


def test_clipping_covers_attention_and_experts_together(base: Path, data: Path, tmp_path: Path):
    samples = [in_loss(5, 12), in_loss(7, 15)]
    free, _ = one_step(base, data, tmp_path / "free", samples, max_grad_norm=1e9)
    assert free.norm > 0.01
    clipped, _ = one_step(base, data, tmp_path / "clipped", samples, max_grad_norm=0.01)
    assert clipped.norm == pytest.approx(0.01, rel=1e-3)
    scale = clipped.norm / free.norm
    assert {"experts" in name for name in free.values} == {True, False}
    for name, value in free.values.items():
        torch.testing.assert_close(clipped.values[name], value * scale, rtol=1e-3, atol=1e-9)
    assert read_log(tmp_path / "clipped" / "log.jsonl")[0]["grad_norm"] == pytest.approx(free.norm, rel=1e-4)


@pytest.mark.parametrize("bf16", [True, False])
def test_what_is_trained_and_what_stays(base: Path, data: Path, tmp_path: Path, bf16: bool):
    before = hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()
    settings = recipe(base, data, tmp_path / "out", bf16=bf16, max_steps=3, per_device_train_batch_size=4)
    torch.manual_seed(0)
    model = build_model(settings, str(base))
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    output = tmp_path / "out"
    output.mkdir()
    tokenizer = load_tokenizer(settings, str(base))
    from ktft.data import encode_chats

    samples, _ = encode_chats(tokenizer, read_chats([str(data)], "."), 64)
    make_trainer(settings, model, tokenizer, samples, None, [Progress(output / "log.jsonl")]).train()
    assert hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest() == before
    layers = [module for module in model.modules() if isinstance(module, ExpertLora)]
    assert len(layers) == 2
    for name, parameter in model.named_parameters():
        trained = "lora_" in name
        assert parameter.requires_grad == trained
        assert torch.equal(parameter, start[name]) != trained, name
        assert parameter.dtype == (torch.float32 if trained or not bf16 else torch.bfloat16)
        assert parameter.device.type == "cpu"
    for layer in layers:
        for name, factor in zip(LORA_NAMES, layer.factors("default"), strict=True):
            assert factor.dtype == torch.float32
            if name.endswith("_b"):  # zero at the start; every routed expert has moved
                assert factor.detach().abs().amax(dim=(1, 2)).min() > 0


def test_the_target_all_is_every_linear_layer_and_the_experts(base: Path, data: Path, tmp_path: Path):
    model = build_model(recipe(base, data, tmp_path, lora_target="all"), str(base))
    adapted = {name.split(".lora_A")[0].split(".")[-1] for name, _ in model.named_parameters() if ".lora_A" in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "experts"}  # not the router, not the output layer


def test_three_steps_interrupted_and_resumed_equal_six(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Ctrl-C after step 3, then a new process: adapter, moments, schedule and log are those of six steps, bit for bit.

    With dropout, accumulation and more than one epoch, so that random state and data order matter.
    """
    keys = {
        "max_steps": 6,
        "gradient_accumulation_steps": 2,
        "lora_dropout": 0.3,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.3,
        "bf16": True,
        "save_steps": 6,
    }
    whole = run(recipe(base, data, tmp_path / "whole", **keys))
    assert (whole.steps, whole.interrupted) == (6, False)

    settings = recipe(base, data, tmp_path / "parts", **keys)
    on_step_end = Progress.on_step_end

    def interrupt(self, args, state, control, **kwargs):
        on_step_end(self, args, state, control, **kwargs)
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "on_step_end", interrupt)
        part = run(settings)
    assert signal.getsignal(signal.SIGINT) is handler
    assert (part.steps, part.interrupted) == (3, True)
    assert (tmp_path / "parts/checkpoint-3/optimizer.pt").is_file()

    (tmp_path / "recipe.yaml").write_text(settings.to_yaml(), encoding="utf-8")
    resumed = subprocess.run(
        [sys.executable, "-m", "ktft.cli", "train", str(tmp_path / "recipe.yaml"), "resume_from_checkpoint=true"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "6 (from 3)" in resumed.stdout

    for name in ("", "checkpoint-6"):
        one, two = (load_file(tmp_path / side / name / "adapter_model.safetensors") for side in ("whole", "parts"))
        assert one.keys() == two.keys() and any("experts.4" in key for key in one)
        assert all(torch.equal(one[key], two[key]) for key in one)
    optimizers = [
        torch.load(tmp_path / side / "checkpoint-6/optimizer.pt", weights_only=True) for side in ("whole", "parts")
    ]
    moments = [state["state"] for state in optimizers]
    assert moments[0].keys() == moments[1].keys() and len(moments[0]) == 2 * (4 + 6)
    for index, values in moments[0].items():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(values[key], moments[1][index][key])
    assert optimizers[0]["param_groups"] == optimizers[1]["param_groups"]
    assert torch.load(tmp_path / "whole/checkpoint-6/scheduler.pt", weights_only=True) == torch.load(
        tmp_path / "parts/checkpoint-6/scheduler.pt", weights_only=True
    )

    def told(side: str) -> list[tuple[float, ...]]:
        return [
            (e["step"], e["loss"], e["learning_rate"], e["grad_norm"]) for e in read_log(tmp_path / side / "log.jsonl")
        ]

    assert told("whole") == told("parts") and len(told("whole")) == 6


def test_the_balance_loss_of_a_frozen_router_is_switched_off(
    base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    """A base with ``output_router_logits``: loss and gradients are those without, however the batch is cut up."""
    balanced = tmp_path / "balanced"
    shutil.copytree(base, balanced)
    config = json.loads((balanced / "config.json").read_text())
    config |= {"output_router_logits": True, "router_aux_loss_coef": 1.0}
    (balanced / "config.json").write_text(json.dumps(config))
    samples = [in_loss(1, 12), in_loss(7, 15)]
    plain, _ = one_step(base, data, tmp_path / "plain", samples)
    assert "output_router_logits" not in capsys.readouterr().out
    whole, _ = one_step(balanced, data, tmp_path / "whole", samples)
    assert "note: output_router_logits of the base's config is switched off" in capsys.readouterr().out
    assert all(torch.equal(value, whole.values[name]) for name, value in plain.values.items())
    one_step(balanced, data, tmp_path / "cut", samples, per_device_train_batch_size=1, gradient_accumulation_steps=2)
    losses = [read_log(tmp_path / name / "log.jsonl")[0]["loss"] for name in ("plain", "whole", "cut")]
    assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-5)


def test_divergence_ends_the_run_before_anything_is_saved(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = recipe(base, data, tmp_path / "out", max_steps=5, save_steps=1, logging_steps=1)
    on_step_end = Progress.on_step_end

    def spoil(self, args, state, control, model=None, **kwargs):
        on_step_end(self, args, state, control, **kwargs)
        if state.global_step == 2:  # after the update, before checkpoint 2 is written
            self.spoilt = model
        if state.global_step == 3:
            raise AssertionError("the step was made")

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == 2:
            with torch.no_grad():
                for name, parameter in self.spoilt.named_parameters():
                    if "experts" in name and "lora_B" in name:
                        parameter.fill_(math.inf)

    monkeypatch.setattr(Progress, "on_step_end", spoil)
    monkeypatch.setattr(Progress, "on_save", on_save)
    with pytest.raises(RuntimeError, match=r"training diverged: the loss at step 3 is nan; .*checkpoint-2\. Try"):
        run(settings)
    assert [entry["step"] for entry in read_log(tmp_path / "out/log.jsonl")] == [1, 2]
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    assert not (tmp_path / "out/adapter_model.safetensors").exists()


def test_a_gradient_that_is_not_finite_does_not_reach_the_weights(base: Path, data: Path, tmp_path: Path):
    settings = recipe(base, data, tmp_path / "out", gradient_accumulation_steps=2, per_device_train_batch_size=1)
    model = build_model(settings, str(base))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    spoilt = next(parameter for name, parameter in model.named_parameters() if "lora_B" in name)
    spoilt.register_hook(lambda gradient: gradient * math.inf)
    samples = ChatDataset([in_loss(1, 12), in_loss(7, 15)])
    trainer = make_trainer(settings, model, tiny_tokenizer(), samples, None, [])
    with pytest.raises(RuntimeError, match=r"the gradient norm at step 1 is (inf|nan); there is no checkpoint yet"):
        trainer.train()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_gradient_checkpointing_gives_the_same_bits(base: Path, data: Path, tmp_path: Path):
    samples = [in_loss(5, 12), in_loss(7, 15)]
    kept, _ = one_step(base, data, tmp_path / "kept", samples, lora_dropout=0.2)
    again, _ = one_step(base, data, tmp_path / "again", samples, lora_dropout=0.2, disable_gradient_checkpointing=False)
    assert all(torch.equal(value, again.values[name]) for name, value in kept.values.items())


def test_a_second_interrupt_stops_at_once():
    from ktft.train.callbacks import SaveOnInterrupt

    with pytest.raises(KeyboardInterrupt), SaveOnInterrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.interrupted
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_run_leaves_adapter_log_plot_and_summary(
    base: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture
):
    held_out = write_chats(tmp_path / "held.jsonl", [chat("log 1 salt", "salt"), chat("log 2 tar", "tar tar")])
    settings = recipe(
        base,
        data,
        tmp_path / "out",
        eval_dataset=str(held_out),
        eval_steps=2,
        max_steps=3,
        exact_match_samples=1,
        max_new_tokens=4,
        plot_loss=True,
        cutoff_len=48,
        template="qwen3",
    )
    summary = run(settings)
    out, err = capfd.readouterr()
    assert "note: template: qwen3: not used" in out
    assert "training data: 11 samples" in out and "held-out data: 2 samples" in out
    assert "held-out loss" in err and "tokens/s" in err
    assert (tmp_path / "out/loss.png").read_bytes().startswith(b"\x89PNG")
    log = read_log(tmp_path / "out/log.jsonl")
    assert [entry["step"] for entry in log if "loss" in entry] == [1, 2, 3]
    assert [entry["step"] for entry in log if "eval_loss" in entry] == [2, 3]
    assert all(entry["tokens_per_second"] > 0 and entry["learning_rate"] > 0 for entry in log if "loss" in entry)
    assert summary.eval_loss == log[-1]["eval_loss"] and summary.last_loss == log[-2]["loss"]
    assert summary.exact_match_before is not None and summary.exact_match_before.total == 1
    saved = json.loads((tmp_path / "out/summary.json").read_text())
    assert saved["tokens"] == summary.tokens > 0
    adapter = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(base)
    # The adapter holds no pickle anywhere, and a checkpoint only the trainer's state.
    assert not list((tmp_path / "out").glob("**/*.bin"))
    assert run(make_recipe({**settings_keys(settings), "overwrite_output_dir": True})).steps == 3
    assert not (tmp_path / "out/log.partial").exists()


def settings_keys(settings: Recipe) -> dict[str, object]:
    import yaml

    return yaml.safe_load(settings.to_yaml())


def test_prepare_runs_when_the_base_is_missing(base: Path, data: Path, tmp_path: Path):
    program = tmp_path / "make.py"
    program.write_text(
        "import sys, shutil; assert sys.argv[2] == '--output'; shutil.copytree(sys.argv[1], sys.argv[3])"
    )
    target = tmp_path / "cache/base"
    target.parent.mkdir()
    settings = recipe(target, data, tmp_path / "out", prepare=f"{program} '{base}'")
    prepare_base(settings)
    assert (target / "config.json").is_file()
    program.write_text("raise SystemExit('not again')")
    prepare_base(settings)
    shutil.rmtree(target)
    with pytest.raises(RuntimeError, match=r"make\.py ended with status 1 and did not build"):
        prepare_base(settings)
    with pytest.raises(ValueError, match=r"prepare: nothing\.py does not exist"):
        prepare_base(recipe(target, data, tmp_path / "out", prepare="nothing.py"))


def test_exact_match_is_generation_of_each_chat_alone(base: Path):
    """Left padding and batching change nothing; the score counts exactly the answers that agree."""
    tokenizer = tiny_tokenizer()
    model = build_model(recipe(base, base, base), str(base))
    prompts = ["a", "a much longer question about the harbour", "tea?"]
    alone = [
        exact_match(model, tokenizer, [Chat(chat(prompt, "x"), "")], max_new_tokens=6).answers[0] for prompt in prompts
    ]
    references = [alone[0], alone[1] + "!", f" {alone[2]}\n"]
    chats = [Chat(chat(prompt, answer), "") for prompt, answer in zip(prompts, references, strict=True)]
    for batch_size in (1, 2, 3):
        score = exact_match(model, tokenizer, chats, max_new_tokens=6, batch_size=batch_size)
        assert (score.right, score.total, list(score.answers)) == (2, 3, alone)
    assert model.training and str(score) == "2 of 3 (67 %)"


def test_plot_without_entries_draws_nothing(tmp_path: Path):
    plot_loss([], tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_collated_padding_does_not_change_the_loss(base: Path, data: Path, tmp_path: Path):
    model = build_model(recipe(base, data, tmp_path), str(base)).eval()
    samples = [in_loss(5, 12), in_loss(7, 15)]
    rows = [{"input_ids": sample.input_ids, "labels": sample.labels} for sample in samples]
    with torch.no_grad():
        padded = model(**collate(rows, 0), num_items_in_batch=12).loss
        alone = sum(model(**collate([row], 0), num_items_in_batch=12).loss for row in rows)
    torch.testing.assert_close(padded, alone, rtol=1e-5, atol=0)
