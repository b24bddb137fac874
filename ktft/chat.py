"""Talking to a model in the terminal: one answer, or a conversation, streamed while it is generated.

A :class:`Session` is a loaded model with its tokenizer and sampling settings; ``generate`` is transformers' own, with
its cache. The adapter can be switched off and on between answers.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any, TextIO

import jinja2
import torch
from transformers import AutoTokenizer, TextStreamer
from transformers.utils import logging as transformers_logging

from ktft.adapters import KtftPeftModel, load_adapter
from ktft.data import TemplateError, stop_ids
from ktft.model import load_model
from ktft.tokenizer import read_tokenizer

Message = dict[str, str]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. ``temperature`` 0 takes the likeliest, whatever penalties the model's generation config
    has; ``seed`` None draws a new one."""

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def arguments(self) -> dict[str, Any]:
        """For ``generate``."""
        chosen: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "num_beams": 1,
            "do_sample": self.temperature > 0,
        }
        if self.temperature > 0:
            chosen |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
        else:
            chosen |= {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
        return chosen


def sampling(arguments: argparse.Namespace) -> Sampling:
    """From the command line's options."""
    return Sampling(arguments.max_new_tokens, arguments.temperature, arguments.top_p, arguments.seed)


def opening(system: str | None) -> list[Message]:
    """The messages a conversation starts with."""
    return [] if system is None else [{"role": "system", "content": system}]


def load_tokenizer(model: str, adapter: str | None) -> Any:
    """The tokenizer saved beside the adapter, which is the one it was trained with, if there is one; else the base's.

    Where the two differ in vocabulary or chat template, that is said on standard error.
    """
    if adapter is None or not os.path.isfile(os.path.join(adapter, "tokenizer_config.json")):
        return read_tokenizer(model)
    tokenizer: Any = AutoTokenizer.from_pretrained(adapter)
    try:
        base: Any = read_tokenizer(model)
    except (OSError, ValueError):
        return tokenizer  # the base has none to compare with
    if different := [
        what
        for what, same in (
            ("vocabulary", tokenizer.get_vocab() == base.get_vocab()),
            ("chat template", tokenizer.chat_template == base.chat_template),
        )
        if not same
    ]:
        verb = "is" if len(different) == 1 else "are"
        print(
            f"note: the {' and '.join(different)} saved with the adapter {verb} used, not the base's", file=sys.stderr
        )
    return tokenizer


@dataclass
class Session:
    """A model ready to answer. ``adapter_on`` may be changed between answers; it matters only if there is an
    adapter."""

    model: Any
    tokenizer: Any
    sampling: Sampling = field(default_factory=Sampling)
    adapter_on: bool = True
    output: TextIO = field(default_factory=lambda: sys.stdout)

    def __post_init__(self) -> None:
        # Once per session, so that the answers of a seeded conversation differ from each other and repeat with it.
        if self.sampling.seed is not None:
            torch.manual_seed(self.sampling.seed)

    @property
    def has_adapter(self) -> bool:
        return isinstance(self.model, KtftPeftModel)

    @classmethod
    def load(
        cls,
        model: str,
        adapter: str | None,
        device: str | None,
        settings: Sampling,
        check_weights: bool = False,
    ) -> Session:
        """Load base, adapter and tokenizer (see :func:`load_tokenizer`); ``device`` None takes CUDA if there is a GPU.
        ``check_weights`` as in :func:`ktft.load_model`.

        Raises:
            ValueError and its kin: what cannot be found or does not fit.
        """
        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()
        model = os.path.expanduser(model)
        adapter = None if adapter is None else os.path.expanduser(adapter)
        chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
        base: Any = load_model(model, device=chosen, check_weights=check_weights)
        if adapter is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                base = load_adapter(base, adapter)
        return cls(base.eval(), load_tokenizer(model, adapter), settings)

    def answer(self, messages: list[Message]) -> str:
        """Stream the assistant's answer to ``output`` and return it.

        Raises:
            TemplateError: the chat template refuses the messages.
            ValueError: the tokenizer has no chat template.
        """
        if self.tokenizer.chat_template is None:
            raise ValueError("the tokenizer has no chat template; use ktft generate --raw")
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refuses this conversation: {error}") from error
        return self._generate(text, add_special_tokens=False)

    def continue_text(self, text: str) -> str:
        """Stream the continuation of plain text to ``output`` and return it.

        Raises:
            ValueError: the text has no tokens, and the tokenizer adds none.
        """
        return self._generate(text, add_special_tokens=True)

    def _generate(self, text: str, add_special_tokens: bool) -> str:
        batch = self.tokenizer(text, add_special_tokens=add_special_tokens, return_tensors="pt").to(self.model.device)
        if batch["input_ids"].shape[1] == 0:
            raise ValueError("the prompt is empty: there is no token to continue")
        stop = stop_ids(self.tokenizer, self.model.generation_config)
        pad = next((token for token in (self.tokenizer.pad_token_id, *stop) if token is not None), None)
        streamer = _Streamer(self.tokenizer, self.output)
        off = self.has_adapter and not self.adapter_on
        with torch.inference_mode(), self.model.disable_adapter() if off else contextlib.nullcontext():
            try:
                self.model.generate(
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    eos_token_id=stop or None,
                    pad_token_id=pad,
                    streamer=streamer,
                    use_cache=True,
                    **self.sampling.arguments(),
                )
            except KeyboardInterrupt:
                streamer.end()
                raise
        return streamer.text


class _Streamer(TextStreamer):
    """Writes finished words to a stream and keeps them in ``text``."""

    def __init__(self, tokenizer: Any, output: TextIO) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.output = output
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        self.output.write(text + ("\n" if stream_end else ""))
        self.output.flush()


def loop(session: Session, *, system: str | None = None) -> int:
    """Read lines and answer them until ``/quit`` or the end of input; returns the exit status.

    Prompts are shown only on a terminal, so that scripted input gives clean output.
    """
    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401  (line editing for input())

        print("/adapter on|off, /reset, /quit")
    messages = opening(system)
    while True:
        try:
            line = input("> " if terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            return 0
        if not line:
            continue
        if line.startswith("/"):
            if line == "/quit":
                return 0
            if line == "/reset":
                messages = opening(system)
                print("(new conversation)")
            else:
                print(_switch(session, line))
            continue
        messages.append({"role": "user", "content": line})
        try:
            messages.append({"role": "assistant", "content": session.answer(messages)})
        except KeyboardInterrupt:
            messages.pop()
            print("(stopped; this exchange is forgotten)")
        except TemplateError as error:
            messages.pop()
            print(f"({error}; this message is forgotten)")


def _switch(session: Session, line: str) -> str:
    """Carry out ``/adapter on|off``; what to say about it, or about a command that does not exist."""
    command, *rest = line.split()
    if command != "/adapter" or rest not in ([], ["on"], ["off"]):
        return f"({line}: not a command; /adapter on|off, /reset, /quit)"
    if not session.has_adapter:
        return "(there is no adapter; start with --adapter DIR)"
    if rest:
        session.adapter_on = rest == ["on"]
    return f"(adapter {'on' if session.adapter_on else 'off'})"


__all__ = ["Sampling", "Session", "load_tokenizer", "loop", "opening", "sampling"]
