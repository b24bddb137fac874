"""README.md: its commands are the ones that work, its Python runs, its recipes and files exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tiny_chat import chat, tiny_tokenizer, write_chats
from tests.tiny_models import tiny_checkpoint

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def block(marker: str) -> list[str]:
    """The command lines after <!-- marker -->."""
    found = re.search(rf"<!-- {marker} -->\n```bash\n(.*?)```", README, re.S)
    assert found, f"README.md has no block after <!-- {marker} -->"
    return found.group(1).strip().splitlines()


def test_ci_runs_the_test_command_of_the_readme() -> None:
    commands = block("tests")
    assert commands[-1] == "python -m pytest"
    extracted = subprocess.run(
        ["sed", "-n", "/<!-- tests -->/,/^```$/p", ROOT / "README.md"], capture_output=True, text=True, check=True
    ).stdout
    assert [line for line in extracted.splitlines() if not line.startswith(("```", "<!--"))] == commands
    assert "<!-- tests -->" in (ROOT / ".ci" / "run").read_text()


def test_the_quickstart_command_names_a_recipe_that_parses() -> None:
    from ktft.config import load_recipe

    train = block("quickstart")[-1].split()
    assert train[:2] == ["ktft", "train"]
    recipe = load_recipe(ROOT / train[2], train[3:])
    chat = re.search(r"ktft chat (\S+) --adapter (\S+)", README)
    assert chat, "the README shows how to talk to the result"
    assert chat.group(2) == recipe.output_dir
    assert recipe.model_name_or_path.endswith(chat.group(1).rsplit("/", 1)[-1])


def test_commands_of_the_readme_exist() -> None:
    for command in set(re.findall(r"ktft (train|chat|generate|doctor|version|[a-z]+) (?:RECIPE|MODEL)", README)):
        help_text = subprocess.run(
            [sys.executable, "-m", "ktft.cli", command, "--help"], capture_output=True, text=True
        )
        assert help_text.returncode == 0, command


def test_files_named_in_the_readme_exist() -> None:
    for name in re.findall(r"`((?:docs|recipes|scripts|examples|tests)/[\w./-]+|[A-Z]+\.md)`", README):
        assert (ROOT / name).exists(), name


def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All python blocks in order, in one namespace, on a tiny model of the family the README names."""
    tokenizer = tiny_tokenizer()
    checkpoint = tiny_checkpoint("qwen3_moe", tmp_path / "base", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(checkpoint)
    monkeypatch.chdir(tmp_path)
    write_chats(Path("chats.jsonl"), [chat(f"{n} plus one?", str(n + 1)) for n in range(8)])
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) == 4
    namespace: dict[str, object] = {}
    for text in blocks:
        code = text.replace("Qwen/Qwen3-30B-A3B", str(checkpoint)).replace('device="cuda"', 'device="cpu"')
        code = code.replace('SFTConfig("checkpoints-trl"', 'SFTConfig("checkpoints-trl", use_cpu=True')
        exec(compile(code, "README.md", "exec"), namespace)
    # torch's grouped matmul wants rows of 16 bytes, which the tiny model does not have
    namespace["stock"].get_base_model().set_experts_implementation("eager")  # type: ignore[attr-defined]
    ids = torch.arange(12)[None]
    with torch.no_grad():
        ours, theirs = (namespace[name](input_ids=ids).logits.float() for name in ("tuned", "stock"))  # type: ignore[operator]
    # bf16 models: a logit is a sum of hidden-size products of bf16 values
    assert (ours - theirs).abs().max() <= 0.05 * theirs.abs().max()
