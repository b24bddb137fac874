"""The loss in chunks is the stock model's, in value and gradient, and stock where it could not be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GraniteMoeConfig

from ktft.data import IGNORE, ChatDataset
from ktft.train import loss as loss_module
from ktft.train import run
from ktft.train.callbacks import Progress
from ktft.train.loss import TokenLoss
from ktft.train.run import build_model, make_trainer
from tests.tiny_chat import tiny_tokenizer
from tests.tiny_models import FAMILIES, VOCABULARY, tiny_input, tiny_model
from tests.tiny_train import in_loss, one_step, recipe


def adapted(model, targets=("q_proj", "o_proj", "q_b_proj")):
    torch.manual_seed(3)
    present = [t for t in targets if any(name.endswith(t) for name, _ in model.named_modules())]
    tuned = get_peft_model(model, LoraConfig(r=3, target_modules=present, init_lora_weights=False))
    return tuned.train()


def batch():
    ids = tiny_input(3, 13)
    labels = ids.clone()
    labels[0, :9] = IGNORE
    labels[1, ::2] = IGNORE
    labels[2, :] = IGNORE  # a row without loss
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    labels[0, -3:] = IGNORE
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("items", [None, 11, torch.tensor(7)], ids=["mean", "count", "tensor"])
@pytest.mark.parametrize("family", FAMILIES)
def test_value_and_gradients_are_the_stock_ones(family, items, monkeypatch):
    """fp32: differences are those of the order of additions. Three rows at a time, so that chunks have an edge."""
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 3 * 4 * VOCABULARY)
    model = adapted(tiny_model(family))
    token_loss = TokenLoss(model)
    assert token_loss.reason == ""
    assert model.training, "looking at the model leaves its mode alone"
    kwargs = {} if items is None else {"num_items_in_batch": items}
    expected = model(**batch(), **kwargs).loss
    found = token_loss(**batch(), **kwargs)
    assert found.dtype == torch.float32 and found.shape == ()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    truth = gradients(model, expected)
    ours = gradients(model, 2 * found)
    assert truth.keys() == ours.keys() and truth
    for name, value in truth.items():
        torch.testing.assert_close(ours[name], 2 * value, rtol=1e-4, atol=1e-5 * float(value.abs().max()))


def test_bf16_is_as_close_to_exact_as_the_stock_loss():
    model = adapted(tiny_model("qwen3_moe"))
    rounded = adapted(tiny_model("qwen3_moe", dtype=torch.bfloat16))
    rounded.config._experts_implementation = "eager"  # grouped_mm wants rows of a multiple of 16 bytes
    with torch.no_grad():
        exact = float(model(**batch()).loss)
        stock = abs(float(rounded(**batch()).loss) - exact)
        ours = abs(float(TokenLoss(rounded)(**batch())) - exact)
    assert ours <= stock + 1e-5 * exact, "the same products and the same sums in fp32"


def test_logits_of_few_tokens_at_a_time(monkeypatch):
    """The output layer sees tokens with loss only, never more than a chunk of them."""
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * 4 * VOCABULARY)
    model = adapted(tiny_model("mixtral"))
    token_loss = TokenLoss(model)
    seen = []
    stock = torch.nn.functional.linear

    def linear(x, weight, bias=None):
        if weight.shape[0] == VOCABULARY:
            seen.append(tuple(x.shape[:-1]))
        return stock(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    token_loss(**batch())
    carried = int((batch()["labels"][:, 1:] != IGNORE).sum())
    assert carried % 4 != 0 and seen == [(4,)] * (carried // 4) + [(carried % 4,)]


def test_without_gradient():
    model = adapted(tiny_model("mixtral")).eval()
    with torch.no_grad():
        found = TokenLoss(model)(**batch())
        assert float(found) == pytest.approx(float(model(**batch()).loss), rel=1e-6)
    assert not found.requires_grad


def scaled_logits():
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 40, "intermediate_size": 28, "num_hidden_layers": 1}
    experts = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = GraniteMoeConfig(**sizes, **experts, initializer_range=0.15, logits_scaling=8.0)
    return adapted(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (scaled_logits, "logits are not its output layer's"),
        (lambda: tiny_model("mixtral"), "output layer is trained"),
        (lambda: adapted(tiny_model("mixtral"), ("q_proj", "lm_head")), "output layer is a Linear"),
        (lambda: adapted(tiny_model("mixtral", output_router_logits=True)), "a loss of its own"),
    ],
    ids=["scaled", "trained", "lora", "balance"],
)
def test_the_stock_loss_where_it_is_another(build, reason):
    model = build()
    token_loss = TokenLoss(model)
    assert reason in token_loss.reason
    torch.testing.assert_close(token_loss(**batch()), model(**batch()).loss)


# --- in the Trainer


@pytest.mark.parametrize("evaluation", [False, True], ids=["training", "evaluation"])
def test_the_trainer_computes_logits_of_tokens_with_loss_only(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluation: bool
):
    seen: list[int] = []
    stock = loss_module._LinearCrossEntropy.forward

    def spy(ctx, hidden, *rest):
        seen.append(len(hidden))
        return stock(ctx, hidden, *rest)

    samples = [in_loss(1, 12), in_loss(7, 15)]
    monkeypatch.setattr(loss_module._LinearCrossEntropy, "forward", staticmethod(spy))
    if not evaluation:
        one_step(base, data, tmp_path / "out", samples, per_device_train_batch_size=2)
    else:
        settings = recipe(base, data, tmp_path / "out", per_device_eval_batch_size=2)
        model = build_model(settings, str(base))
        held_out = ChatDataset(samples)
        (tmp_path / "out").mkdir()
        progress = Progress(tmp_path / "out" / "log.jsonl")
        make_trainer(settings, model, tiny_tokenizer(), held_out, held_out, [progress]).evaluate()
    assert seen == [3, 8], "four tokens to look at the model, then those that carry loss of a batch of 30"


def test_a_run_says_when_logits_are_computed_at_once(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setattr(TokenLoss, "_find_reason", lambda self: "a reason to test")
    run(recipe(base, data, tmp_path / "out", max_steps=1))
    assert "note: logits are computed for every token at once, as in transformers: a reason to test" in (
        capsys.readouterr().out
    )
