"""Writes recipes.md beside itself: every recipe key with its type, default and meaning, taken from ktft/config.py.

    python docs/make_recipes.py

Meanings are the docstrings of ``ktft.config.Recipe``'s fields, sections the comments between them. A test compares the
page with what this program makes of the code.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ktft import config
from ktft.train.output import FREE_ON_RESUME

HEAD = """\
# Recipe keys

Made by `python docs/make_recipes.py` from `ktft/config.py`; change it there.

A recipe is a YAML file; `ktft train RECIPE key=value …` overrides its keys, with values in YAML too. Keys carry
LLaMA-Factory's names and meanings, so that its LoRA recipes run here. An unknown key, a value of the wrong type or out
of range and a conflict between keys are errors that name what would be valid. Lists may be written `a,b`. Paths are
relative to the working directory; `~` and environment variables in them are expanded, and `$KTFT_CACHE` is where ktft
keeps models it built, `~/.cache/ktft` unless set.
"""
NEEDED = ("model_name_or_path", "dataset", "output_dir")


def fields() -> list[tuple[str, dict[str, str]]]:
    """(section, key -> docstring) in the order of the source.

    Raises:
        ValueError: a key has no docstring.
    """
    source = inspect.getsource(config.Recipe)
    (recipe,) = ast.parse(source).body
    assert isinstance(recipe, ast.ClassDef)
    comments = {n: line[6:] for n, line in enumerate(source.splitlines(), 1) if re.match(" {4}# ", line)}
    sections: list[tuple[str, dict[str, str]]] = []
    for node, after in zip(recipe.body, recipe.body[1:], strict=False):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        key = node.target.id
        if key not in config.KEYS:
            continue
        if not isinstance(after, ast.Expr) or not isinstance(after.value, ast.Constant):
            raise ValueError(f"ktft.config.Recipe.{key} has no docstring")
        section = [text for line, text in comments.items() if line < node.lineno][-1]
        if not sections or sections[-1][0] != section:
            sections.append((section, {}))
        sections[-1][1][key] = " ".join(str(after.value.value).split())
    return sections


def type_of(key: str) -> str:
    """The key's type in words, with its range."""
    wanted = typing.get_type_hints(config.Recipe)[key]
    union = typing.get_origin(wanted) not in (typing.Literal, tuple, None)
    words = [config._describe(option) for option in (typing.get_args(wanted) if union else (wanted,))]
    words = [word if "," in word else word.removeprefix("one of ") for word in words]
    ranges = [text for keys, *_, text in config._RANGES if key in keys.split()]
    return " or ".join(word for word in words if word != "null") + "".join(f", {text}" for text in ranges)


def plain(value: Any) -> str:
    """A value as a recipe would have it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def default_of(key: str) -> str:
    default = config.KEYS[key].default
    if key in NEEDED:
        return "needed"
    return "" if default in (None, ()) else f"`{plain(default)}`"


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("``", "`").replace("|", "\\|") for cell in cells) + " |"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join([row(*head), "|---" * len(head) + "|", *(row(*cells) for cells in rows)]) + "\n"


def page() -> str:
    parts = [HEAD]
    for section, keys in fields():
        rows = ((f"`{key}`", type_of(key), default_of(key), text) for key, text in keys.items())
        parts += [f"## {section[0].upper()}{section[1:]}\n", table(("key", "type", "default", "meaning"), rows)]
    free = [key for key in config.KEYS if key in FREE_ON_RESUME]
    parts += [
        "## Resuming\n",
        "With `resume_from_checkpoint` all keys must be those of the run that wrote the checkpoint, except:\n",
        textwrap.fill(", ".join(f"`{key}`" for key in free), 118) + "\n",
        "## LLaMA-Factory's keys and values that are not offered\n",
        "Accepted only with the value that says what ktft does anyway:\n",
        table(
            ("key", "value"),
            (
                (f"`{key}`", " or ".join(f"`{plain(value)}`" for value in values))
                for key, values in config.ALREADY_SO.items()
            ),
        ),
        "Accepted and without effect, which the run says:\n",
        table(("key", "why"), ((f"`{key}`", why) for key, why in config.NO_EFFECT_KEYS.items())),
        "Refused, unless the value is empty or false:\n",
        table(
            ("key", "why, or what to do instead"),
            (
                *((f"`{key}`", why) for key, why in config.NOT_OFFERED_KEYS.items()),
                *((f"`{key}: {value}`", why) for (key, value), why in config.NOT_OFFERED.items()),
            ),
        ),
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    Path(__file__).with_name("recipes.md").write_text(page(), encoding="utf-8")
