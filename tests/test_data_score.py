"""What training teaches as the end of a turn is what scoring and chatting stop at; whose tokenizer they take."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import GenerationConfig

import ktft
from ktft.adapters import get_peft_model
from ktft.chat import Sampling, Session, load_tokenizer
from ktft.config import make_recipe
from ktft.data import Chat, end_of_turn_ids, read_chats, stop_ids
from ktft.train import exact_match
from tests import tiny_chat
from tests.tiny_chat import chat, tiny_chat_model, tiny_tokenizer, write_chats


@pytest.fixture(scope="module")
def llama_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its config, generation config and tokenizer end with <|im_end|>, its chat template with <|eot|>."""
    return tiny_chat_model(tmp_path_factory.mktemp("llama"), tiny_chat.LLAMA)


class Script:
    """Makes a model say given tokens, one per forward pass, and counts the passes."""

    def __init__(self, model: Any, tokens: list[int]) -> None:
        self.tokens, self.passes = tokens, 0
        self.hook = model.get_output_embeddings().register_forward_hook(self.speak)

    def speak(self, module: Any, args: Any, logits: torch.Tensor) -> torch.Tensor:
        said = torch.zeros_like(logits)
        said[..., self.tokens[self.passes]] = 1.0
        self.passes += 1
        return said


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (tiny_chat.CHATML, ["<|im_end|>"]),
        (tiny_chat.LLAMA, ["<|eot|>"]),
        (tiny_chat.THINKING, ["<|im_end|>"]),
        (tiny_chat.INST, ["</s>"]),
        (tiny_chat.FINAL, ["<|eot|>", "<|return|>"]),
        (tiny_chat.ENDLESS, []),
        (None, []),
    ],
)
def test_the_ends_of_a_turn(template: str | None, expected: list[str]):
    tokenizer = tiny_tokenizer(template)
    assert tokenizer.convert_ids_to_tokens(end_of_turn_ids(tokenizer)) == expected
    configured = tokenizer.convert_tokens_to_ids(["</s>", "<|user|>"])
    for config in (GenerationConfig(eos_token_id=configured), GenerationConfig(eos_token_id=configured[1])):
        eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        assert set(stop_ids(tokenizer, config)) == {tokenizer.eos_token_id, *eos, *end_of_turn_ids(tokenizer)}
    tokenizer.eos_token = None
    assert stop_ids(tokenizer, GenerationConfig()) == end_of_turn_ids(tokenizer)


@pytest.mark.parametrize("end", ["<|eot|>", "<|im_end|>", "</s>"])
def test_answers_stop_at_the_end_of_the_turn(llama_base: Path, end: str):
    """The template's, the tokenizer's, or the generation config's."""
    model, tokenizer = ktft.load_model(llama_base, device="cpu"), tiny_tokenizer(tiny_chat.LLAMA)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("</s>")
    tokens = tokenizer.convert_tokens_to_ids(["Q", "3", end, "n", "o", "t"])
    script = Script(model, tokens)
    score = exact_match(model, tokenizer, [Chat(chat("Which quay?", "Q3"), "")], max_new_tokens=6)
    assert (score.right, score.answers, script.passes) == (1, ("Q3",), 3)
    script.passes = 0
    assert Session(model, tokenizer, Sampling(max_new_tokens=6)).answer(chat("Which quay?")) == "Q3"
    assert script.passes == 3


def test_scoring_needs_no_padding_token(llama_base: Path):
    model, tokenizer = ktft.load_model(llama_base, device="cpu"), tiny_tokenizer(tiny_chat.LLAMA)
    chats = [Chat(chat(prompt, "x"), "") for prompt in ("a", "a much longer question", "tea?")]
    expected = exact_match(model, tokenizer, chats, max_new_tokens=6)
    tokenizer.pad_token = None
    model.generation_config.pad_token_id = None
    assert exact_match(model, tokenizer, chats, max_new_tokens=6) == expected


def test_a_repetition_penalty_does_not_change_the_likeliest_token(llama_base: Path):
    model, tokenizer = ktft.load_model(llama_base, device="cpu"), tiny_tokenizer(tiny_chat.LLAMA)
    chats = [Chat(chat("Which quay?", "Q3"), "")]
    plain = exact_match(model, tokenizer, chats, max_new_tokens=12).answers[0]
    model.generation_config.repetition_penalty = 50.0
    model.generation_config.no_repeat_ngram_size = 1
    inputs = tokenizer.apply_chat_template(
        chats[0].messages[:1], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    penalised = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(penalised, skip_special_tokens=True).strip() != plain
    assert exact_match(model, tokenizer, chats, max_new_tokens=12).answers[0] == plain
    assert Session(model, tokenizer, Sampling(max_new_tokens=12)).answer(chats[0].messages[:1]).strip() == plain


def test_a_run_scores_the_base_before_and_the_adapter_after(
    llama_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also when the adapter already changes answers before the first step."""
    module = importlib.import_module("ktft.train.run")
    build = module.build_model

    def tuned(*arguments: Any) -> Any:
        model = build(*arguments)
        torch.manual_seed(5)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.5)
        return model

    monkeypatch.setattr(module, "build_model", tuned)
    data = write_chats(tmp_path / "data.jsonl", [chat("Which quay?", "Q3"), chat("Which ship?", "The Tern.")])
    output = tmp_path / "out"
    recipe = make_recipe(
        {
            "model_name_or_path": str(llama_base),
            "dataset": str(data),
            "eval_dataset": str(data),
            "output_dir": str(output),
            "device": "cpu",
            "lora_target": "q_proj,experts",
            "learning_rate": 1e-3,
            "max_steps": 1,
            "exact_match_samples": 2,
            "max_new_tokens": 12,
        }
    )
    summary = module.run(recipe)
    chats, tokenizer = read_chats([str(data)], "."), load_tokenizer(str(llama_base), str(output))
    model = ktft.load_model(llama_base, dtype=torch.bfloat16 if recipe.bf16 else torch.float32)
    assert summary.exact_match_before == exact_match(model, tokenizer, chats, max_new_tokens=12)
    adapted = ktft.load_adapter(model, output)
    assert summary.exact_match_after == exact_match(adapted, tokenizer, chats, max_new_tokens=12)
    assert summary.exact_match_before.answers != summary.exact_match_after.answers


def test_a_failed_score_leaves_the_model_as_it_was(llama_base: Path, monkeypatch: pytest.MonkeyPatch):
    model, tokenizer = ktft.load_model(llama_base, device="cpu").train(), tiny_tokenizer(tiny_chat.LLAMA)

    def fail(**kwargs: Any) -> None:
        assert not model.training
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "generate", fail)
    with pytest.raises(KeyboardInterrupt):
        exact_match(model, tokenizer, [Chat(chat("a", "b"), "")])
    assert model.training and not model.get_output_embeddings()._forward_pre_hooks


@pytest.fixture(scope="module")
def retrained(llama_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter trained with another template than its base's."""
    torch.manual_seed(0)
    model = get_peft_model(ktft.load_model(llama_base), LoraConfig(r=2, target_modules=["q_proj"]))
    path = tmp_path_factory.mktemp("retrained")
    model.save_pretrained(path)
    tiny_tokenizer(tiny_chat.CHATML).save_pretrained(path)
    return path


def test_the_adapters_tokenizer_is_used(
    llama_base: Path, retrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert load_tokenizer(str(llama_base), str(retrained)).chat_template == tiny_chat.CHATML
    assert "the chat template saved with the adapter is used" in capsys.readouterr().err
    session = Session.load(str(llama_base), str(retrained), "cpu", Sampling())
    assert session.tokenizer.chat_template == tiny_chat.CHATML
    capsys.readouterr()
    assert load_tokenizer(str(llama_base), None).chat_template == tiny_chat.LLAMA
    assert load_tokenizer(str(llama_base), str(tmp_path)).chat_template == tiny_chat.LLAMA  # no tokenizer there
    tiny_tokenizer(tiny_chat.LLAMA).save_pretrained(tmp_path)
    assert load_tokenizer(str(llama_base), str(tmp_path)).chat_template == tiny_chat.LLAMA
    assert capsys.readouterr().err == ""


def test_the_scoring_example_asks_with_the_adapters_tokenizer(
    llama_base: Path, retrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    spec = importlib.util.spec_from_file_location("score", Path(__file__).parents[1] / "examples/score.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    chats = [Chat(chat("Which quay?", "Q3"), "")]
    answers = {
        template: exact_match(ktft.load_model(llama_base), tiny_tokenizer(template), chats, max_new_tokens=8).answers[0]
        for template in (tiny_chat.CHATML, tiny_chat.LLAMA)
    }
    assert answers[tiny_chat.CHATML] != answers[tiny_chat.LLAMA]
    data = write_chats(tmp_path / "held.jsonl", [chats[0].messages])
    arguments = [str(llama_base), str(data), "--max-new-tokens", "8", "--show"]
    example.main(arguments)
    assert capsys.readouterr().out == f"base: 0 of 1 (0 %)\n  Which quay?\n    {answers[tiny_chat.LLAMA]}\n"
    example.main([*arguments, "--adapter", str(retrained)])
    # B is zero: the adapter answers as the base does, both asked in the adapter's template.
    shown = f"0 of 1 (0 %)\n  Which quay?\n    {answers[tiny_chat.CHATML]}\n"
    assert capsys.readouterr().out == f"base: {shown}adapter: {shown}"
