"""Whether the values of a LoraConfig, or of an ``adapter_config.json``, are of the kind they must be.

PEFT checks none of this, and fails somewhere inside, or takes a misspelt key for one it need not know. What the values
mean is ``config.py``'s.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping

from peft import LoraConfig


class AdapterError(ValueError):
    """An adapter that cannot be used as asked; the message names the key or tensor and what would be right."""


_OTHER_TOOLS = {"lora_B_layout", "unsloth_fused_expert_lora"}
"""Keys that are no fields of LoraConfig; the reader looks at the first itself, the second says nothing about a file."""

_NAMES = ("target_modules", "exclude_modules", "target_parameters", "layers_pattern")
_TEXTS = ("base_model_name_or_path", "revision", "peft_version", "task_type")


def check_keys(values: Mapping[str, object]) -> None:
    """Refuse a config file with a key that LoraConfig does not have, or without ``r`` or ``lora_alpha``.

    Other versions of PEFT write fields that this one does not have; empty or false they ask for nothing and are
    ignored.

    Raises:
        AdapterError: names the key, and the one that may be meant.
    """
    known = {field.name for field in dataclasses.fields(LoraConfig)} | _OTHER_TOOLS
    for key, value in values.items():
        if key not in known and value:
            near = difflib.get_close_matches(key, known, 1)
            meant = f"; is {near[0]!r} meant?" if near else ""
            raise AdapterError(f"{key!r} ({value!r:.80}) is no key of a LoRA config that ktft knows{meant}")
    for key in ("r", "lora_alpha"):
        if key not in values:
            raise AdapterError(f"{key!r} is missing; rank and alpha must be written down, they cannot be guessed")


def check_values(values: Mapping[str, object]) -> None:
    """Refuse values of the wrong type and patterns that are no regular expressions.

    Args:
        values: field name -> value; fields that are not there are not checked.

    Raises:
        AdapterError: names the field.
    """
    for name, value in values.items():
        expected = _expected(name, value)
        if expected is not None:
            raise AdapterError(f"{name} is {value!r:.200}; expected {expected}")


def _expected(name: str, value: object) -> str | None:
    """What a field should have been; None if it is."""
    if name == "r":
        return (
            None if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else "a whole number from 1"
        )
    if name in ("lora_alpha", "lora_dropout"):
        return None if _number(value) else "a number"
    if name in ("use_rslora", "inference_mode"):
        return None if isinstance(value, bool) else "true or false"
    if name in _TEXTS:
        return None if value is None or isinstance(value, str) else "text or nothing"
    if name == "layers_to_transform":
        items = value if isinstance(value, list | tuple | set) else [value]
        return None if value is None or all(_whole(item) for item in items) else "layer numbers"
    if name in ("rank_pattern", "alpha_pattern"):
        kind, good = ("whole numbers", _whole) if name == "rank_pattern" else ("numbers", _number)
        if value is not None and not (isinstance(value, dict) and all(good(item) for item in value.values())):
            return f"regular expressions with {kind}"
        return _irregular(value or ())
    if name in _NAMES:
        if value is None:
            return None
        if isinstance(value, str) and name != "target_parameters":
            return _irregular([value])
        if not isinstance(value, list | tuple | set) or not all(isinstance(item, str) for item in value):
            return "a list of names"
        return _irregular(value) if name == "layers_pattern" else None
    return None


def _irregular(patterns: object) -> str | None:
    assert isinstance(patterns, list | tuple | set | dict)
    for pattern in patterns:
        try:
            re.compile(rf"(.*\.)?({pattern})$")
        except re.error as error:
            return f"regular expressions; {pattern!r} is none ({error})"
    return None


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


__all__ = ["AdapterError", "check_keys", "check_values"]
