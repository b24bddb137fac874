"""Every recipe parses, says how it is run and names data that exists; the quickstart's data is as described.

So are the keys, in docs/recipes.md.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ktft.cli import _parser
from ktft.config import KEYS, load_recipe
from ktft.data import read_chats

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("**/*.yaml"))


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)


def test_there_are_recipes():
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe(path: Path):
    first = path.read_text(encoding="utf-8").splitlines()[0]
    program, *arguments = shlex.split(first.removeprefix("# "))
    assert program == "ktft"
    parsed = _parser().parse_args(arguments)
    assert (ROOT / parsed.recipe).resolve() == path.resolve()
    recipe = load_recipe(parsed.recipe, parsed.overrides)
    assert read_chats(recipe.dataset, recipe.dataset_dir)
    if recipe.eval_dataset:
        assert read_chats(recipe.eval_dataset, recipe.dataset_dir)
    if recipe.prepare:
        assert os.path.isfile(shlex.split(recipe.prepare)[0])


def test_the_page_of_keys_is_what_its_program_makes_of_the_code(tmp_path: Path):
    page = Path("docs/recipes.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|[^|\n]+\|[^|\n]+\| \S.* \|$", page, re.M) == list(KEYS)
    program = shutil.copy("docs/make_recipes.py", tmp_path)
    subprocess.run([sys.executable, program], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (tmp_path / "recipes.md").read_text(encoding="utf-8") == page, "run python docs/make_recipes.py"


def test_the_data_is_what_its_program_writes(tmp_path: Path):
    program = shutil.copy("examples/data/make_harbour.py", tmp_path)
    subprocess.run([sys.executable, program], check=True)
    for name in ("harbour_train.jsonl", "harbour_heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == Path("examples/data", name).read_bytes()


def test_held_out_data_does_not_overlap_with_training():
    train = read_chats(["harbour_train"], "examples/data")
    held_out = read_chats(["harbour_heldout"], "examples/data")
    assert len(train) >= 300 and len(held_out) >= 40
    assert not {c.messages[0]["content"] for c in train} & {c.messages[0]["content"] for c in held_out}

    def pairs(chats):
        logs = [json.loads(c.messages[1]["content"]) for c in chats]
        assert all(list(log) == ["ship", "op", "n", "of", "at", "day"] for log in logs)
        return {(log["ship"], log["of"]) for log in logs}

    assert not pairs(train) & pairs(held_out)
    assert {ship for ship, _ in pairs(held_out)} - {ship for ship, _ in pairs(train)}  # ships never seen
