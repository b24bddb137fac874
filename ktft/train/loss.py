"""The language-model loss without the logits of a whole batch.

Stock models compute logits [tokens, vocabulary] at every position, a copy in fp32, and as much again for their
gradient: gigabytes for a vocabulary of 150,000, written and read several times. Here only positions that carry loss
meet the output layer, some of them at a time, and the gradient of the hidden states is made on the spot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ktft.data import IGNORE

CHUNK_BYTES = 16 << 20
"""Of fp32 logits at a time. Few enough that the memory is used again instead of mapped anew."""


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of cross entropies of hidden [N, H] · weightᵀ [H, V] (+ bias [V]) with targets [N], over ``items``; fp32.

    Products are in hidden's dtype, softmax and sums in fp32, as the stock loss has it. Differentiable in hidden only.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        items: float,
    ) -> torch.Tensor:
        rows = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
        wants = ctx.needs_input_grad[0]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad = torch.empty_like(hidden) if wants else None
        for begin in range(0, hidden.shape[0], rows):
            chunk, target = hidden[begin : begin + rows], targets[begin : begin + rows, None]
            logits = functional.linear(chunk, weight, bias).float()
            norm = torch.logsumexp(logits, dim=1, keepdim=True)
            total += (norm - logits.gather(1, target)).sum()
            if grad is not None:  # of a logit: (softmax - one at the target) / items
                logits.sub_(norm).exp_()
                logits.scatter_add_(1, target, torch.full_like(target, -1, dtype=torch.float32))
                torch.mm(logits.div_(items).to(hidden.dtype), weight, out=grad[begin : begin + rows])
        ctx.save_for_backward(grad)
        return total / items

    @staticmethod
    def backward(ctx: Any, *grad_loss: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * grad_loss[0].to(grad.dtype), None, None, None, None


class TokenLoss:
    """``loss = TokenLoss(model)(**batch)``: what ``model(**batch).loss`` is, up to rounding.

    Args:
        model: a causal language model, or a PEFT model of one.

    Attributes:
        reason: why the stock loss is used after all, '' if it is not: the output layer is trained, or the model's
            logits are not just the output layer of its hidden states (they are scaled, capped, or come with another
            loss). The latter is tried with a few tokens.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        base: Callable[[], Any] = getattr(model, "get_base_model", lambda: model)
        self._causal = base()
        self._head = self._causal.get_output_embeddings()
        self.reason = self._find_reason()

    def _find_reason(self) -> str:
        if type(self._head) is not nn.Linear:
            return f"the output layer is a {type(self._head).__name__}"
        if any(parameter.requires_grad for parameter in self._head.parameters()):
            return "the output layer is trained"
        if getattr(self._causal.config, "output_router_logits", False):
            return "the model adds a loss of its own (output_router_logits)"
        ids = torch.arange(4, device=self._head.weight.device).remainder(self._head.out_features)[None]
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        with torch.no_grad():
            stock = self._model(input_ids=ids, labels=ids)
            hidden = self._hidden(input_ids=ids)
            logits, loss = self._head(hidden), self._loss(hidden, ids, None)
        for module, mode in modes.items():
            module.training = mode
        scale = float(stock.logits.abs().max())
        if not float((stock.logits - logits).abs().max()) <= 1e-2 * scale:
            return "the model's logits are not its output layer's values"
        if not abs(float(stock.loss) - float(loss)) <= 1e-2 * abs(float(stock.loss)):
            return "the model's loss is not the mean over tokens"
        return ""

    def _hidden(self, **inputs: Any) -> torch.Tensor:
        hidden: torch.Tensor = self._causal.base_model(**inputs, use_cache=False).last_hidden_state
        return hidden

    def _loss(self, hidden: torch.Tensor, labels: torch.Tensor, items: torch.Tensor | float | None) -> torch.Tensor:
        hidden, targets = hidden[:, :-1], labels[:, 1:].to(hidden.device)  # tokens < n predict n
        carries = targets != IGNORE
        count = float(carries.sum() if items is None else items)
        loss: torch.Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden[carries], self._head.weight, self._head.bias, targets[carries], count
        )
        return loss

    def __call__(
        self, *, labels: torch.Tensor, num_items_in_batch: torch.Tensor | float | None = None, **inputs: Any
    ) -> torch.Tensor:
        """Mean cross entropy over the positions whose label is not ignored; fp32 scalar.

        Args:
            labels: [batch, length], :data:`ktft.data.IGNORE` where a token carries no loss.
            num_items_in_batch: what the sum is divided by instead, for accumulated batches.
            inputs: of the model, e.g. input_ids and attention_mask [batch, length].
        """
        if self.reason:
            loss: torch.Tensor = self._model(labels=labels, num_items_in_batch=num_items_in_batch, **inputs).loss
            return loss
        return self._loss(self._hidden(**inputs), labels, num_items_in_batch)


__all__ = ["TokenLoss"]
