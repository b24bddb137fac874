"""One chat -> token ids and labels: loss on the assistant's text and its end-of-turn, on nothing else.

The ids are exactly ``tokenizer.apply_chat_template(whole chat)``. Labels come from the template itself, whatever it
is, by rendering variations of the chat and comparing text:

- A turn begins where the prompt ends that the model would be given for it: the chat before it rendered with
  ``add_generation_prompt``. That prompt must be a prefix of the whole chat's text. (A system prompt the template adds,
  or an empty thinking block it puts behind the prompt, needs no special case.)
- A turn's text ends where the whole chat and the chat with this turn's content replaced by a marker have their common
  end.
- Its end-of-turn is the first special token after that, with nothing but white space between; white space after the
  end-of-turn belongs to the template.

A template for which this cannot be established is a :class:`TemplateError` (e.g. one that writes no end-of-turn token:
a model trained on it would never stop). Text is cut into tokens once, as a whole; a boundary inside a token puts the
token on the assistant's side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

IGNORE = -100
"""The label of a token without loss, torch's ``ignore_index``."""

_MARKER = "\ue0f1\ue0f2\ue0f3"
"""Content no chat has: private-use characters."""


class TemplateError(ValueError):
    """The tokenizer's chat template does not allow the assistant's turns to be told apart."""


@dataclass(frozen=True)
class EncodedChat:
    """Token ids [T] of a chat, and labels [T]: the id itself where there is loss, else :data:`IGNORE`."""

    input_ids: list[int]
    labels: list[int]


def encode_chat(tokenizer: Any, messages: Sequence[dict[str, str]]) -> EncodedChat:
    """Ids and labels of a whole chat; every assistant turn is labelled.

    Raises:
        TemplateError: see the module's contract.
    """
    special = _special_tokens(tokenizer)
    text = _render(tokenizer, messages)
    ids = _tokenize(tokenizer, text)
    labels = [IGNORE] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = _start_of_turn(tokenizer, messages, index, text)
        end = _end_of_turn(tokenizer, messages, index, text, special)
        if end < start:
            raise TemplateError(f"the chat template writes message {index + 1} before its prompt")
        first = _common_prefix(ids, _tokenize(tokenizer, text[:start]))
        until = _tokenize(tokenizer, text[:end])
        if ids[: len(until)] != until:
            raise TemplateError(f"the tokenizer joins the end of message {index + 1} with what follows it")
        labels[first : len(until)] = ids[first : len(until)]
    return EncodedChat(ids, labels)


def _start_of_turn(tokenizer: Any, messages: Sequence[dict[str, str]], index: int, text: str) -> int:
    prompt = _render(tokenizer, messages[:index], add_generation_prompt=True)
    if not text.startswith(prompt):
        raise TemplateError(
            f"the chat template's prompt for message {index + 1} is not how the whole chat begins: "
            f"{prompt[-60:]!r} against {text[max(0, len(prompt) - 60) : len(prompt)]!r}"
        )
    return len(prompt)


def _end_of_turn(
    tokenizer: Any, messages: Sequence[dict[str, str]], index: int, text: str, special: Sequence[str]
) -> int:
    """Where, in ``text``, the end-of-turn token of message ``index`` ends."""
    upto = list(messages[: index + 1])
    alone = _render(tokenizer, upto)
    if _end_of_special(alone, _end_of_content(tokenizer, upto, index, alone), special) is None:
        raise TemplateError(
            "the chat template writes no special token at the end of the assistant's turn, "
            "so a trained model would not stop"
        )
    end = _end_of_special(text, _end_of_content(tokenizer, messages, index, text), special)
    if end is None:
        raise TemplateError(f"the chat template writes no end-of-turn token after message {index + 1}")
    return end


def _end_of_content(tokenizer: Any, messages: Sequence[dict[str, str]], index: int, text: str) -> int:
    changed = [*messages[:index], {**messages[index], "content": _MARKER}, *messages[index + 1 :]]
    other = _render(tokenizer, changed)
    if other.count(_MARKER) != 1:
        raise TemplateError(f"the chat template writes message {index + 1} {other.count(_MARKER)} times, not once")
    rest = other[other.index(_MARKER) + len(_MARKER) :]
    if not text.endswith(rest):
        raise TemplateError(f"what the chat template writes after message {index + 1} depends on that message")
    return len(text) - len(rest)


def _end_of_special(text: str, start: int, special: Sequence[str]) -> int | None:
    """End of the special token that follows ``start`` behind white space only, or None."""
    while start < len(text) and text[start].isspace():
        start += 1
    ends = [start + len(token) for token in special if text.startswith(token, start)]
    return max(ends, default=None)


def _special_tokens(tokenizer: Any) -> list[str]:
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return sorted({*added, *tokenizer.all_special_tokens} - {""})


def _render(tokenizer: Any, messages: Sequence[dict[str, str]], add_generation_prompt: bool = False) -> str:
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt)
    assert isinstance(text, str)
    return text


def _tokenize(tokenizer: Any, text: str) -> list[int]:
    """As apply_chat_template does it: the template has written the special tokens already."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _common_prefix(first: list[int], second: list[int]) -> int:
    for position, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return position
    return min(len(first), len(second))


__all__ = ["IGNORE", "EncodedChat", "TemplateError", "encode_chat"]
