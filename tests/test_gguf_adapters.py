"""Adapters on a model from a GGUF file: their gradients, files and base, training and talking on the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from peft import LoraConfig
from safetensors.torch import load_file

import ktft
from ktft import cli
from ktft.adapters import AdapterError
from ktft.mapping import CheckpointError
from ktft.tokenizer import read_tokenizer
from ktft.train import run
from tests.gguf_files import SMALL, Written, write
from tests.tiny_adapter import EXPERT, FIELDS, logits
from tests.tiny_chat import CHATML, chat, tiny_tokenizer
from tests.tiny_models import tiny_input
from tests.tiny_train import recipe

TOKENIZER = tiny_tokenizer()
SIZES = {
    **SMALL,
    "vocab_size": len(TOKENIZER),
    **{name: getattr(TOKENIZER, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Not to be changed."""
    return write("qwen3_moe", tmp_path_factory.mktemp("gguf"), "Q8_0", tokenizer=TOKENIZER, **SIZES)


def with_adapter(base: Path) -> ktft.KtftPeftModel:
    """It with a random adapter, in fp32."""
    model = ktft.get_peft_model(ktft.load_model(base, dtype=torch.float32), LoraConfig(**FIELDS))
    with torch.no_grad():
        for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.1)
    return model


def test_gradients_are_those_on_the_decoded_weights(written: Written, tmp_path: Path) -> None:
    written.stock.save_pretrained(tmp_path)
    results = []
    for base in (written.path, tmp_path):
        model = with_adapter(base)
        loss = model(input_ids=tiny_input(), labels=tiny_input()).loss
        loss.backward()
        results.append((loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (loss, gradients), (expected_loss, expected) = results
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert gradients.keys() == expected.keys()
    assert any("experts" in name for name in gradients)
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).abs().max() <= 1e-4 * expected[name].abs().max(), name


def test_files_name_the_base_and_the_familys_tensors(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(written.path.parent)
    model = with_adapter(Path("m.gguf"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AdapterError, match="the base model lies there"):
        model.save_pretrained(written.path.parent)
    model.save_pretrained(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(written.path)
    assert EXPERT in load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    again = ktft.load_adapter(ktft.load_model(written.path, dtype=torch.float32), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model))
    # The published model takes it as well: names do not depend on where the base came from.
    written.stock.save_pretrained(tmp_path / "published")
    published = ktft.load_adapter(ktft.load_model(tmp_path / "published"), tmp_path / "adapter")
    assert (logits(published) - logits(model)).abs().max() <= 1e-5 * logits(model).abs().max()


def test_resized_embeddings_are_refused(written: Written) -> None:
    model = ktft.load_model(written.path)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    with pytest.raises(AdapterError, match=rf"m\.gguf says vocab_size {len(TOKENIZER)}: resized embeddings"):
        ktft.get_peft_model(model, LoraConfig(**FIELDS))


def test_the_tokenizer_of_the_metadata(written: Written) -> None:
    tokenizer = read_tokenizer(str(written.path))
    text = "The ship landed.<|im_end|>\nSalt é \U0001f600"
    assert tokenizer(text).input_ids == TOKENIZER(text).input_ids
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.chat_template == CHATML
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token) == ("<|im_end|>", "<bos>", "<pad>")
    assert "<s>" not in tokenizer.get_vocab()


def test_a_tokenizer_beside_the_file_comes_first(written: Written, tmp_path: Path) -> None:
    os.link(written.path, tmp_path / "m.gguf")
    tokenizer = tiny_tokenizer("{{ messages[0].content }}")
    tokenizer.save_pretrained(tmp_path)
    assert read_tokenizer(str(tmp_path)).chat_template == tokenizer.chat_template


def test_tokenizers_that_transformers_makes_others_of(tmp_path: Path) -> None:
    def kind(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("deepseek-v3")

    for edit, said in ((kind, "the tokenizer gpt2/deepseek-v3"), (lambda writer: None, "no tokenizer")):
        path = write("qwen3_moe", tmp_path, edit=edit).path
        with pytest.raises(CheckpointError, match=rf"m\.gguf: its metadata hold {said}; .* Put tokenizer\.json"):
            read_tokenizer(str(path))


def test_training_and_talking(
    written: Written, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="is the base model's directory"):
        run(recipe(written.path, data, written.path.parent))
    monkeypatch.chdir(written.path.parent)
    with_prepare = {"max_steps": 3, "prepare": "no-such-script.py"}  # which is for a base that is missing
    summary = run(recipe(Path(written.path.name), data, tmp_path / "out", **with_prepare))
    assert summary.base_model == str(written.path)
    assert summary.steps == 3
    capsys.readouterr()
    adapter = ktft.load_adapter(ktft.load_model(written.path), tmp_path / "out")
    assert any(bool(p.any()) for n, p in adapter.named_parameters() if "experts" in n and "lora_B" in n)
    arguments = ["--prompt", "Which quay?", "--max-new-tokens", "6", "--device", "cpu"]
    assert cli.main(["generate", str(written.path), "--adapter", str(tmp_path / "out"), *arguments]) == 0
    assert capsys.readouterr().out.strip()
    assert cli.main(["bench", "decode", str(written.path), "--vs", "hf"]) == 1
    assert "--vs hf needs a directory of safetensors files" in capsys.readouterr().err
    assert cli.main(["generate", str(written.path.parent), *arguments]) == 0
    answer = capsys.readouterr().out
    ids = TOKENIZER.apply_chat_template(chat("Which quay?"), add_generation_prompt=True, return_dict=True)["input_ids"]
    with torch.no_grad():
        first = int(ktft.load_model(written.path)(torch.tensor([ids])).logits[0, -1].argmax())
    assert answer.startswith(TOKENIZER.decode([first], skip_special_tokens=True))
