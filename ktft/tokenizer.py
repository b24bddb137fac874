"""The tokenizer of a model: of a directory, a GGUF file, or a hub id."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ktft.gguf_file import find_gguf, read_gguf
from ktft.mapping import CheckpointError

_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model")

_VOCABULARY = ("gpt2", "qwen2")
"""``tokenizer.ggml.model`` and ``.pre`` of what transformers makes the right tokenizer of.

Of the vocabularies and texts that llama.cpp tests its tokenizers with, transformers 5.17 and 5.24 both give this one's
ids in every case, and those of most others not: they split text elsewhere, or lose a leading space, without a word."""

_SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def read_tokenizer(model: str, *, trust_remote_code: bool = False) -> Any:
    """What ``AutoTokenizer`` gives; of a GGUF file, the tokenizer that lies beside it, or else that of its metadata.

    Args:
        model: as in :func:`ktft.load_model`.
        trust_remote_code: allow the model to bring its own Python code.

    Raises:
        CheckpointError: a GGUF file has no tokenizer, or one of which transformers makes another.
        OSError, ValueError: transformers finds none.
    """
    file = find_gguf(Path(model)) if os.path.exists(model) else None
    if file is None:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    if any((file.parent / name).is_file() for name in _FILES):
        return AutoTokenizer.from_pretrained(file.parent, trust_remote_code=trust_remote_code)
    metadata = read_gguf(file).metadata
    found = tuple(metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if found != _VOCABULARY:
        kind = "no tokenizer" if found[0] is None else f"the tokenizer {found[0]}/{found[1]}"
        raise CheckpointError(
            f"{file}: its metadata hold {kind}; ktft reads {'/'.join(_VOCABULARY)} (Qwen's) only. Put tokenizer.json "
            f"and tokenizer_config.json of the model's safetensors checkpoint into {file.parent}"
        )
    # Without a word about them transformers 5.17 adds tokens to the vocabulary, <s> and </s>.
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(
        file.parent, gguf_file=file.name, **dict.fromkeys(_SPECIAL)
    )
    for name, key in _SPECIAL.items():
        if key in metadata:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(metadata[key]))
    return tokenizer


__all__ = ["read_tokenizer"]
