"""The Hugging Face ``Trainer`` with three differences, each of them about saying or keeping the right thing.

- Evaluation loss is the mean over held-out *tokens*. The stock loop averages the means of batches, which weighs a
  token of a short answer more than one of a long answer.
- Checkpoints hold the adapter, the tokenizer and the trainer's state, but no pickled ``training_args.bin``.
- A model whose loss cannot be normalised over all tokens of an accumulated batch is refused, not trained on means of
  means.

Everything else is stock: the token-mean loss under gradient accumulation (``num_items_in_batch``), AdamW, schedules,
clipping of the norm over all adapters, checkpoints and resuming. ``optimizer.pt``, ``scheduler.pt`` and
``rng_state.pth`` of a checkpoint are read by transformers with ``weights_only=True``.

There is no autocast (``bf16=False`` in the arguments, whatever the recipe's ``bf16``): the model already computes in
the dtype it was loaded in, and PEFT's LoRA layers cast around their own fp32 products; autocast would round those to
bf16.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import Trainer, TrainerControl

from ktft.data import IGNORE


class AdapterTrainer(Trainer):
    """See the module. Takes a ``KtftPeftModel``; the arguments are Trainer's.

    Raises:
        ValueError: the model's forward takes no ``num_items_in_batch``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.model_accepts_loss_kwargs:
            raise ValueError(
                f"{type(self.model).__name__} takes no num_items_in_batch, so its loss would be a mean of means "
                "under gradient accumulation; this model cannot be trained here"
            )

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Token-mean loss of the held-out data; logged, and handed to the callbacks, as the stock method does."""
        was_training = self.model.training
        self.model.eval()
        total, count = 0.0, 0
        with torch.no_grad():
            for batch in self.get_eval_dataloader(eval_dataset):
                batch = self._prepare_inputs(batch)
                labels = int((batch["labels"][..., 1:] != IGNORE).sum())
                total += float(self.model(**batch, num_items_in_batch=labels).loss) * labels
                count += labels
        self.model.train(was_training)
        metrics = {f"{metric_key_prefix}_loss": total / count}
        self.log(metrics)
        self.control: TrainerControl = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        directory = output_dir or self.args.output_dir
        os.makedirs(directory, exist_ok=True)
        self.model.save_pretrained(directory, state_dict=state_dict)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(directory)


__all__ = ["AdapterTrainer"]
