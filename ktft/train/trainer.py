"""The Hugging Face ``Trainer`` with a few differences, each of them about saying or keeping the right thing.

- Evaluation loss is the mean over held-out *tokens*. The stock loop averages the means of batches, which weighs a
  token of a short answer more than one of a long answer.
- Checkpoints hold the adapter, the tokenizer, the recipe and the trainer's state, but no pickled
  ``training_args.bin``; one that is being rewritten counts as incomplete until it is whole again.
- A loss or gradient that is not finite ends the run before it reaches the weights, a log or a checkpoint.
- Logits are computed for tokens that carry loss only, some at a time; see ``loss.py``.
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

import math
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerControl

from ktft.config import Recipe
from ktft.data import IGNORE
from ktft.train.loss import TokenLoss
from ktft.train.output import begin_checkpoint, newest_complete


class AdapterTrainer(Trainer):
    """See the module. Takes a ``KtftPeftModel``; the arguments but ``recipe`` are Trainer's.

    Args:
        recipe: written into every checkpoint.

    Raises:
        ValueError: the model's forward takes no ``num_items_in_batch``.
    """

    def __init__(self, *args: Any, recipe: Recipe, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recipe = recipe
        if not self.model_accepts_loss_kwargs:
            raise ValueError(
                f"{type(self.model).__name__} takes no num_items_in_batch, so its loss would be a mean of means "
                "under gradient accumulation; this model cannot be trained here"
            )
        self.token_loss = TokenLoss(self.model)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The stock method's loss; a model that something was wrapped around is called as the stock method calls it."""
        if return_outputs or self.token_loss.reason or model is not self.model:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return self.token_loss(**inputs, num_items_in_batch=num_items_in_batch)

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Forward and backward of a micro-batch, as the stock method does.

        Raises:
            RuntimeError: the loss, or the gradient of the whole step, is not finite.
        """
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self._check_finite("loss", float(loss), self.state.global_step + 1)
        if self.accelerator.sync_gradients:
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            self._check_finite("gradient norm", float(norm), self.state.global_step + 1)
        return loss

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
                total += float(self.token_loss(**batch, num_items_in_batch=labels)) * labels
                count += labels
        self.model.train(was_training)
        self._check_finite("held-out loss", total / count, self.state.global_step)
        metrics = {f"{metric_key_prefix}_loss": total / count}
        self.log(metrics)
        self.control: TrainerControl = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        directory = output_dir or self.args.output_dir
        begin_checkpoint(Path(directory), self.recipe)
        self.model.save_pretrained(directory, state_dict=state_dict)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(directory)

    def _check_finite(self, what: str, value: float, step: int) -> None:
        if math.isfinite(value):
            return
        newest = newest_complete(Path(self.args.output_dir))
        kept = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint yet"
        raise RuntimeError(
            f"training diverged: the {what} at step {step} is {value}; {kept}. Try a lower learning_rate, more warm-up "
            "or a smaller max_grad_norm"
        )


__all__ = ["AdapterTrainer"]
