"""The tokenizer of a model: of a directory, a GGUF file, or a hub id."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ktft.gguf_file import find_gguf, read_gguf
from ktft.mapping import CheckpointError

_SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model")


def read_tokenizer(model: str, *, trust_remote_code: bool = False) -> Any:
    """What ``AutoTokenizer`` gives; of a GGUF file, the tokenizer that lies beside it, or else that of its metadata.

    Args:
        model: as in :func:`ktft.load_model`.
        trust_remote_code: allow the model to bring its own Python code.

    Raises:
        CheckpointError: a GGUF file has no tokenizer, or none that transformers can build.
        OSError, ValueError: transformers finds none.
    """
    file = find_gguf(Path(model)) if os.path.exists(model) else None
    if file is None:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    if any((file.parent / name).is_file() for name in _FILES):
        return AutoTokenizer.from_pretrained(file.parent, trust_remote_code=trust_remote_code)
    # By its vocabulary's kind, which metadata says; AutoTokenizer asks which architecture it is, and knows few.
    try:
        # Without a word about them transformers adds tokens to the vocabulary, <s> and </s>.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name, **dict.fromkeys(_SPECIAL))
    except (KeyError, ValueError, NotImplementedError) as error:
        raise CheckpointError(
            f"{file}: no tokenizer can be made of its metadata ({type(error).__name__}: {error}); put the "
            f"tokenizer.json and tokenizer_config.json of the model's safetensors checkpoint into {file.parent}"
        ) from None
    metadata = read_gguf(file).metadata
    for name, key in _SPECIAL.items():  # transformers before 5.24 leaves them unset
        if key in metadata:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(metadata[key]))
    return tokenizer


__all__ = ["read_tokenizer"]
