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

import torch
from transformers import AutoTokenizer, TextStreamer
from transformers.utils import logging as transformers_logging

from ktft.adapters import KtftPeftModel, load_adapter
from ktft.model import load_model

Message = dict[str, str]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. ``temperature`` 0 takes the likeliest; ``seed`` None draws a new one."""

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
        return chosen


def sampling(arguments: argparse.Namespace) -> Sampling:
    """From the command line's options."""
    return Sampling(arguments.max_new_tokens, arguments.temperature, arguments.top_p, arguments.seed)


def opening(system: str | None) -> list[Message]:
    """The messages a conversation starts with."""
    return [] if system is None else [{"role": "system", "content": system}]


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
    def load(cls, model: str, adapter: str | None, device: str | None, settings: Sampling) -> Session:
        """Load base, tokenizer and adapter; ``device`` None takes CUDA if there is a GPU.

        Raises:
            ValueError and its kin: what cannot be found or does not fit.
        """
        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()
        model = os.path.expanduser(model)
        base: Any = load_model(model, device=device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if adapter is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                base = load_adapter(base, os.path.expanduser(adapter))
        return cls(base.eval(), AutoTokenizer.from_pretrained(model), settings)

    def answer(self, messages: list[Message]) -> str:
        """Stream the assistant's answer to ``output`` and return it.

        Raises:
            ValueError: the tokenizer has no chat template.
        """
        if self.tokenizer.chat_template is None:
            raise ValueError("the tokenizer has no chat template; use ktft generate --raw")
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self._generate(text, add_special_tokens=False)

    def continue_text(self, text: str) -> str:
        """Stream the continuation of plain text to ``output`` and return it."""
        return self._generate(text, add_special_tokens=True)

    def _generate(self, text: str, add_special_tokens: bool) -> str:
        batch = self.tokenizer(text, add_special_tokens=add_special_tokens, return_tensors="pt").to(self.model.device)
        streamer = _Streamer(self.tokenizer, self.output)
        off = self.has_adapter and not self.adapter_on
        with torch.inference_mode(), self.model.disable_adapter() if off else contextlib.nullcontext():
            try:
                self.model.generate(
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    pad_token_id=self.tokenizer.pad_token_id
                    if self.tokenizer.pad_token_id is not None
                    else self.tokenizer.eos_token_id,
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


__all__ = ["Sampling", "Session", "loop", "opening", "sampling"]
