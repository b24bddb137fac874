"""One chat -> token ids and labels: loss on the assistant's text and its end-of-turn, on nothing else.

The ids are exactly ``tokenizer.apply_chat_template(whole chat)``. Labels come from the template itself, whatever it
is, by rendering variations of the chat and comparing text:

- A turn begins where the prompt ends that the model would be given for it: the chat before it rendered with
  ``add_generation_prompt``. That prompt must be a prefix of the whole chat's text. (A system prompt the template adds,
  or an empty thinking block it puts behind the prompt, needs no special case.)
- A turn's text ends where the whole chat and the chat with this turn's content replaced by a marker have their common
  end.
- Its end-of-turn is the first special token after that, with nothing but white space between; white space after the
  end-of-turn belongs to the template. The token must also end this turn when nothing follows it, or end a user's turn:
  otherwise it may be the header of the next turn.

A template for which this cannot be established is a :class:`TemplateError` (e.g. one that writes no end-of-turn token:
a model trained on it would never stop). Text is cut into tokens once, as a whole; a boundary inside a token puts the
token on the assistant's side.

Every turn of the assistant costs a few renderings and two tokenizations of the chat, so the cost of a chat grows with
the square of its turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

IGNORE = -100
"""The label of a token without loss, torch's ``ignore_index``."""

_MARKER = "\ue0f1\ue0f2\ue0f3"
"""Content no chat has: private-use characters."""


class TemplateError(ValueError):
    """The tokenizer's chat template refuses a chat, or does not allow the assistant's turns to be told apart."""


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
        end, _ = _end_of_turn(tokenizer, messages, index, text, special)
        if end < start:
            raise TemplateError(f"the chat template writes message {index + 1} before its prompt")
        first = _common_prefix(ids, _tokenize(tokenizer, text[:start]))
        until = _tokenize(tokenizer, text[:end])
        if ids[: len(until)] != until:
            raise TemplateError(f"the tokenizer joins the end of message {index + 1} with what follows it")
        labels[first : len(until)] = ids[first : len(until)]
    return EncodedChat(ids, labels)


def end_of_turn_ids(tokenizer: Any) -> list[int]:
    """Ids of the tokens that end the assistant's turn in the tokenizer's chat template: what training on it teaches.

    Usually one; two where the last turn of a chat ends differently from the others; none without a template, or if the
    template does not tell (:func:`encode_chat` would refuse it as well).
    """
    if tokenizer.chat_template is None:
        return []
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    special = _special_tokens(tokenizer)
    found: list[str] = []
    for messages in (chat, [*chat, chat[0]]):
        try:
            text = _render(tokenizer, messages)
            found.append(_end_of_turn(tokenizer, messages, 1, text, special)[1])
        except (TemplateError, jinja2.TemplateError):
            continue
    return sorted({tokenizer.convert_tokens_to_ids(token) for token in found})


def stop_ids(tokenizer: Any, generation_config: Any) -> list[int]:
    """What generation stops at, for ``generate(eos_token_id=…)``: the tokenizer's end of sequence, those of the model's
    generation config, and the template's :func:`end_of_turn_ids`. Without any of them the list is empty."""
    configured = generation_config.eos_token_id
    ids = [tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])]
    return list(dict.fromkeys([token for token in ids if token is not None] + end_of_turn_ids(tokenizer)))


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
) -> tuple[int, str]:
    """Where, in ``text``, the end-of-turn token of message ``index`` ends, and that token."""
    upto = list(messages[: index + 1])
    alone = _render(tokenizer, upto)
    last = _special_at(alone, _end_of_content(tokenizer, upto, index, alone), special)
    if last is None:
        raise TemplateError(
            "the chat template writes no special token at the end of the assistant's turn, "
            "so a trained model would not stop"
        )
    found = _special_at(text, _end_of_content(tokenizer, messages, index, text), special)
    if found is None:
        raise TemplateError(f"the chat template writes no end-of-turn token after message {index + 1}")
    if found[1] not in (last[1], _end_of_users_turn(tokenizer, messages, index, special)):
        raise TemplateError(
            f"the chat template writes {found[1]!r} after message {index + 1}, but {last[1]!r} if the chat ends there: "
            "it may begin the next turn, so a trained model would not stop"
        )
    return found


def _end_of_users_turn(
    tokenizer: Any, messages: Sequence[dict[str, str]], index: int, special: Sequence[str]
) -> str | None:
    """The special token that ends the last turn of a user before message ``index``, or None: it follows the content,
    whether or not the assistant's prompt comes next."""
    users = [i for i, message in enumerate(messages[:index]) if message["role"] == "user"]
    if not users:
        return None
    before = [*messages[: users[-1]], {"role": "user", "content": _MARKER}]
    tokens = []
    for prompt in (False, True):
        text = _render(tokenizer, before, add_generation_prompt=prompt)
        if text.count(_MARKER) != 1:
            return None
        tokens.append(_special_at(text, text.index(_MARKER) + len(_MARKER), special))
    first, second = tokens
    return first[1] if first is not None and first == second else None


def _end_of_content(tokenizer: Any, messages: Sequence[dict[str, str]], index: int, text: str) -> int:
    changed = [*messages[:index], {**messages[index], "content": _MARKER}, *messages[index + 1 :]]
    other = _render(tokenizer, changed)
    if other.count(_MARKER) != 1:
        raise TemplateError(f"the chat template writes message {index + 1} {other.count(_MARKER)} times, not once")
    rest = other[other.index(_MARKER) + len(_MARKER) :]
    if not text.endswith(rest):
        raise TemplateError(f"what the chat template writes after message {index + 1} depends on that message")
    return len(text) - len(rest)


def _special_at(text: str, start: int, special: Sequence[str]) -> tuple[int, str] | None:
    """(where it ends, itself) of the special token that follows ``start`` behind white space only, or None."""
    while start < len(text) and text[start].isspace():
        start += 1
    found = [token for token in special if text.startswith(token, start)]
    return max(((start + len(token), token) for token in found), default=None)


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


__all__ = ["IGNORE", "EncodedChat", "TemplateError", "encode_chat", "end_of_turn_ids", "stop_ids"]
