"""A byte-level tokenizer with a few hundred tokens, chat templates in the manner of well-known ones, tiny models to go
with them.

No template here is a vendor's text; each keeps the trait that makes masking hard: a system prompt the template adds
(chatml), a begin-of-text token and trimming (llama), thinking blocks that only the last turn keeps (thinking), roles
without special tokens (inst), an end-of-turn that differs in the last turn (final), no end-of-turn at all (endless).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.tiny_models import tiny_checkpoint

SPECIAL = (
    "<pad> <bos> <|im_start|> <|im_end|> <|head|> <|/head|> <|eot|> </s> <|return|> <|user|> <|assistant|>".split()
)

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "<bos>{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.last %}<think>\n{{ m.content.split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in m.content else '' }}\n</think>\n\n{% endif %}{{ text }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "<bos>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% else %}{{ raise_exception('no system prompt, please') }}"
    "{% endif %}{% endfor %}"
)
FINAL = (
    "{% for m in messages %}<|head|>{{ m.role }}<|/head|>{{ m.content }}"
    "{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>{% endif %}"
)
ENDLESS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

TEXT = "The harbour log says: the ship landed forty crates of salt at the quay on Tuesday. You are brief. Assistant"


def tiny_tokenizer(template: str = CHATML, **kwargs: Any) -> PreTrainedTokenizerFast:
    """All bytes, a few merges, :data:`SPECIAL`; ``<|im_end|>`` ends a sequence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template,
        **{"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<|im_end|>", **kwargs},
    )


def tiny_chat_model(directory: Path, template: str = CHATML, family: str = "mixtral", **overrides: Any) -> Path:
    """A tiny checkpoint with the tokenizer beside it."""
    tokenizer = tiny_tokenizer(template)
    path = tiny_checkpoint(
        family,
        directory,
        **{
            "vocab_size": len(tokenizer),
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            **overrides,
        },
    )
    tokenizer.save_pretrained(path)
    return path


def chat(*turns: str, system: str | None = None) -> list[dict[str, str]]:
    """user, assistant, user, … messages, with a system prompt in front if given."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return messages + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


def write_chats(path: Path, chats: list[list[dict[str, str]]]) -> Path:
    """A .jsonl file in messages form."""
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats), encoding="utf-8")
    return path
