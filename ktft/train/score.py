"""Exact-match scoring: answer held-out chats greedily and count the answers that equal the reference, character for
character."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ktft.data import Chat, stop_ids


@dataclass(frozen=True)
class Score:
    """``right`` of ``total`` answers are exact; ``answers`` are the model's, in order."""

    right: int
    total: int
    answers: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.right} of {self.total} ({100 * self.right / self.total:.0f} %)"


def exact_match(
    model: Any, tokenizer: Any, chats: Sequence[Chat], *, max_new_tokens: int = 128, batch_size: int = 20
) -> Score:
    """Score the last assistant turn of each chat; what comes before it is the prompt.

    White space around an answer is ignored, nothing else is. An answer ends where training taught it to
    (:func:`ktft.data.stop_ids`), and each of its tokens is the likeliest: a repetition penalty in the model's
    generation config is not applied.

    Args:
        model: anything with transformers' ``generate``.
        chats: each has an assistant turn.
        max_new_tokens: where an answer is cut off.
        batch_size: prompts per ``generate`` call, padded on the left.
    """
    prompts, references = [], []
    for chat in chats:
        last = max(i for i, message in enumerate(chat.messages) if message["role"] == "assistant")
        prompts.append(tokenizer.apply_chat_template(chat.messages[:last], tokenize=False, add_generation_prompt=True))
        references.append(chat.messages[last]["content"].strip())
    stop = stop_ids(tokenizer, model.generation_config)
    # Any id will do where the tokenizer has none: attention does not see padding, and special tokens are not decoded.
    pad = next((token for token in (tokenizer.pad_token_id, *stop) if token is not None), 0)
    answers: list[str] = []
    was_training = model.training
    model.eval()
    # The last position of every prompt is a strided view, which torch's linear (frozen weight, no gradient) multiplies
    # as a batch, with a copy of the vocabulary matrix per prompt: 1.1 GB for 20 prompts of SmolLM2. Contiguous rows are
    # one product.
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda module, args: (args[0].contiguous(),))
    try:
        for begin in range(0, len(prompts), batch_size):
            rows = tokenizer(prompts[begin : begin + batch_size], add_special_tokens=False)["input_ids"]
            longest = max(len(row) for row in rows)
            padding = [longest - len(row) for row in rows]
            inputs = torch.tensor([[pad] * n + row for n, row in zip(padding, rows, strict=True)])
            mask = torch.tensor([[0] * n + [1] * len(row) for n, row in zip(padding, rows, strict=True)])
            with torch.inference_mode():
                ids = model.generate(
                    input_ids=inputs.to(model.device),
                    attention_mask=mask.to(model.device),
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    num_beams=1,
                    repetition_penalty=1.0,
                    no_repeat_ngram_size=0,
                    eos_token_id=stop or None,
                    pad_token_id=pad,
                    use_cache=True,
                )
            texts = tokenizer.batch_decode(ids[:, longest:], skip_special_tokens=True)
            answers += [text.strip() for text in texts]
    finally:
        hook.remove()
        model.train(was_training)
    right = sum(answer == reference for answer, reference in zip(answers, references, strict=True))
    return Score(right, len(chats), tuple(answers))


__all__ = ["Score", "exact_match"]
