"""Encoded chats as a torch data set, with truncation and honest counts; the padding collator.

Samples are cut at ``cutoff_len`` tokens from the end. One that keeps no label is dropped; what was cut and dropped is
counted in the :class:`DatasetReport`, for the caller to show. Batches are padded on the right to their longest sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from ktft.data.files import Chat, DataError
from ktft.data.masks import IGNORE, EncodedChat, TemplateError, encode_chat


@dataclass(frozen=True)
class DatasetReport:
    """What became of the chats: all counts, tokens after truncation."""

    samples: int
    truncated: int
    dropped: int
    tokens: int
    label_tokens: int

    def __str__(self) -> str:
        text = f"{self.samples} samples, {self.tokens} tokens, {self.label_tokens} of them with loss"
        if self.truncated:
            text += f"; {self.truncated} truncated"
        if self.dropped:
            text += f"; {self.dropped} dropped: truncated to nothing to learn"
        return text


class ChatDataset(Dataset[dict[str, list[int]]]):
    """Samples as the collator wants them: ``input_ids`` and ``labels``, lists of the same length."""

    def __init__(self, samples: Sequence[EncodedChat]) -> None:
        self.samples = list(samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        sample = self.samples[index]
        return {"input_ids": sample.input_ids, "labels": sample.labels}


def encode_chats(tokenizer: Any, chats: Sequence[Chat], cutoff_len: int) -> tuple[ChatDataset, DatasetReport]:
    """Encode, truncate, drop what has no label left.

    Raises:
        DataError: a chat the template cannot render or mask (naming its file and line), or nothing is left at all.
    """
    kept: list[EncodedChat] = []
    truncated = dropped = 0
    for chat in chats:
        try:
            whole = encode_chat(tokenizer, chat.messages)
        except TemplateError as error:
            raise DataError(f"{chat.where}: {error}") from None
        except Exception as error:  # a template raises what it likes, e.g. on roles out of turn
            raise DataError(f"{chat.where}: the chat template refuses this chat: {error}") from error
        sample = EncodedChat(whole.input_ids[:cutoff_len], whole.labels[:cutoff_len])
        truncated += len(sample.input_ids) < len(whole.input_ids)
        # The label at position 0 is nobody's target: predictions are of the next token.
        if all(label == IGNORE for label in sample.labels[1:]):
            dropped += 1
            continue
        kept.append(sample)
    if not kept:
        raise DataError(f"none of the {len(chats)} chats has anything to learn within cutoff_len {cutoff_len}")
    report = DatasetReport(
        samples=len(kept),
        truncated=truncated - dropped,
        dropped=dropped,
        tokens=sum(len(sample.input_ids) for sample in kept),
        label_tokens=sum(label != IGNORE for sample in kept for label in sample.labels[1:]),
    )
    return ChatDataset(kept), report


def split_held_out(chats: Sequence[Chat], val_size: float, seed: int) -> tuple[list[Chat], list[Chat]]:
    """(training, held-out) part; ``val_size`` is a count, or below 1 a fraction. The same seed, the same split.

    Raises:
        DataError: one of the parts would be empty.
    """
    count = round(val_size * len(chats)) if val_size < 1 else int(val_size)
    if not 0 < count < len(chats):
        raise DataError(f"val_size {val_size:g} of {len(chats)} chats leaves one part empty")
    order = torch.randperm(len(chats), generator=torch.Generator().manual_seed(seed)).tolist()
    held_out = set(order[:count])
    return [c for i, c in enumerate(chats) if i not in held_out], [c for i, c in enumerate(chats) if i in held_out]


def collate(samples: Sequence[dict[str, list[int]]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Right-padded int64 [B, T]: ``input_ids``, ``attention_mask`` (1 on tokens) and ``labels`` (IGNORE on padding)."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def padded(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
        return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows], dtype=torch.int64)

    ids = [sample["input_ids"] for sample in samples]
    return {
        "input_ids": padded(ids, pad_token_id),
        "attention_mask": padded([[1] * len(row) for row in ids], 0),
        "labels": padded([sample["labels"] for sample in samples], IGNORE),
    }


__all__ = ["ChatDataset", "DatasetReport", "collate", "encode_chats", "split_held_out"]
