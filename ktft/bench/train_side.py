"""One side of ``ktft bench train`` in a process of its own, so that its peak memory is its own.

    python -m ktft.bench.train_side '{"side": "ktft", "directory": …}'

The argument is a :class:`Job` as JSON; the last line of standard output is the result as JSON. ``side`` "write" makes
the checkpoint, "ktft" trains it with ktft, "hf" the same model (same class, same seed, same batch) with stock
transformers and PEFT, made in place: reading the checkpoint as well would count its file against it.

A step is forward, backward, AdamW, zero_grad on one batch [1, tokens]. Figures are medians over the steps after the
first. Shares come from one further step with hooks around the experts modules, forward and backward; what neither they
nor the optimizer take is ``rest``.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ktft.bench.memory import Watch
from ktft.bench.settings import tidy

LEARNING_RATE = 1e-4
DTYPE = torch.bfloat16
WEIGHTS_SEED, BATCH_SEED = 0, 1
WARM_UP = 1
"""Steps that are not timed, before those that are."""


@dataclass(frozen=True)
class Job:
    """What one process does.

    Attributes:
        side: "write", "ktft" or "hf".
        directory: of the checkpoint; ``config.json`` lies there before anything else.
        tokens: length of the batch's one sequence.
        lora: "attention", or "experts" for both.
        lora_rank: r; alpha is twice that.
        steps: timed steps; :data:`WARM_UP` more come first.
        implementation: how stock transformers computes experts.
        threads: of torch and the kernels; None leaves them as they are.
        isa: level of the kernels, "auto" for the best.
    """

    side: str
    directory: str
    tokens: int = 1024
    lora: str = "experts"
    lora_rank: int = 8
    steps: int = 3
    implementation: str = "grouped_mm"
    threads: int | None = None
    isa: str = "auto"

    def argument(self) -> str:
        """For the command line of the process."""
        return json.dumps(asdict(self))


def attention_targets(model: nn.Module) -> list[str]:
    """Last names of the linear layers of the attention, e.g. q_proj, k_proj, v_proj, o_proj.

    Raises:
        ValueError: there are none under a module called ``self_attn``.
    """
    found = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "self_attn" in name.split(".")
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no linear layers under self_attn; its attention is not known here"
        )
    return sorted(found)


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost module called ``experts`` of every layer that has one, adapters included.

    Raises:
        ValueError: there are none.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if name.endswith(".experts") and ".experts." not in name and not isinstance(module, nn.ModuleList)
    }
    if not found:
        raise ValueError(f"{type(model).__name__} has no module called experts; expected a Mixture-of-Experts model")
    return found


class Shares:
    """Seconds that forward and backward spend in some modules. Hooks; remove them with :meth:`close`."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.seconds = 0.0
        self._start = 0.0
        self._handles = []
        for module in modules.values():
            self._handles += [
                module.register_forward_pre_hook(self._begin),
                module.register_forward_hook(self._end),
                module.register_full_backward_pre_hook(self._begin),
                module.register_full_backward_hook(self._end),
            ]

    def _begin(self, *_arguments: Any) -> None:
        self._start = time.perf_counter()

    def _end(self, *_arguments: Any) -> None:
        self.seconds += time.perf_counter() - self._start

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def write(job: Job) -> None:
    """Random weights for the config that lies in the directory."""
    _stock_model(job, "eager").save_pretrained(job.directory)


def _stock_model(job: Job, implementation: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(WEIGHTS_SEED)
    config = AutoConfig.from_pretrained(job.directory)
    return AutoModelForCausalLM.from_config(config, dtype=DTYPE, experts_implementation=implementation)


def _model(job: Job) -> Any:
    """The model with its adapter, in training mode."""
    from peft import LoraConfig, get_peft_model

    fields: dict[str, Any] = {"r": job.lora_rank, "lora_alpha": 2 * job.lora_rank, "task_type": "CAUSAL_LM"}
    if job.side == "ktft":
        import ktft

        base: Any = ktft.load_model(job.directory, dtype=DTYPE)
        targets = attention_targets(base) + (["experts"] if job.lora == "experts" else [])
        model: Any = ktft.get_peft_model(base, LoraConfig(target_modules=targets, **fields))
    else:
        base = _stock_model(job, job.implementation)
        if job.lora == "experts":
            fields["target_parameters"] = sorted(
                {
                    f"{'.'.join(name.split('.')[-2:])}.{parameter}"
                    for name, module in experts_modules(base).items()
                    for parameter, value in module.named_parameters(recurse=False)
                    if value.dim() == 3
                }
            )
        model = get_peft_model(base, LoraConfig(target_modules=attention_targets(base), **fields))
    return model.train()


def _loss(job: Job, model: Any) -> Callable[..., torch.Tensor]:
    """The loss as each side's users get it: ktft's Trainer's, or the stock model's."""
    if job.side == "ktft":
        from ktft.train.loss import TokenLoss

        return TokenLoss(model)

    def stock(**batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        return loss

    return stock


def train(job: Job) -> dict[str, Any]:
    """The steps of one side, as a result."""
    with Watch(interval=0.01, reset=False) as watch:
        model = _model(job)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=LEARNING_RATE)
        vocabulary = int(model.get_input_embeddings().num_embeddings)
        ids = torch.randint(0, vocabulary, (1, job.tokens), generator=torch.Generator().manual_seed(BATCH_SEED))
        optimizer_seconds = 0.0
        loss_of = _loss(job, model)

        def step() -> float:
            nonlocal optimizer_seconds
            loss = loss_of(input_ids=ids, labels=ids)
            loss.backward()
            start = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            optimizer_seconds = time.perf_counter() - start
            return float(loss.detach())

        losses, times = [], []
        for _ in range(WARM_UP + job.steps):
            start = time.perf_counter()
            losses.append(step())
            times.append(time.perf_counter() - start)
    shares = Shares(experts_modules(model))
    start = time.perf_counter()
    step()
    whole = time.perf_counter() - start
    shares.close()
    seconds = statistics.median(times[WARM_UP:])
    experts, optimizer_share = shares.seconds / whole, optimizer_seconds / whole
    figures = {
        "step_s": seconds,
        "tok_s": job.tokens / seconds,
        "step_s_all": [tidy(value) for value in times],
        "experts_share": experts,
        "rest_share": 1 - experts - optimizer_share,
        "optimizer_share": optimizer_share,
        "peak_rss_gb": watch.rss_peak / 1e9,
        "peak_anon_gb": watch.anon_peak / 1e9,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "trainable_parameters": sum(parameter.numel() for parameter in trainable),
    }
    return {name: tidy(value) for name, value in figures.items()}


def main() -> None:
    """Do the job in the first argument."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    job = Job(**json.loads(sys.argv[1]))
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    if job.side == "write":
        write(job)
    elif job.side == "ktft":
        from ktft import ops

        with ops.override(isa=None if job.isa == "auto" else job.isa, threads=job.threads):
            print(json.dumps(train(job)))
    else:
        print(json.dumps(train(job)))


if __name__ == "__main__":
    main()
