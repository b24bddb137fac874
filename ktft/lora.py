"""Expert LoRA as a PEFT layer: the module that takes the place of a :class:`~ktft.experts.CpuExperts` when an adapter
targets it.

One adapter on one experts layer is six stacked fp32 tensors on the CPU, whatever device and dtype the rest of the
model has:

    lora_A[adapter]   gate [E, r, H]   up [E, r, H]   down [E, r, I]
    lora_B[adapter]   gate [E, I, r]   up [E, I, r]   down [E, H, r]

The keys follow PEFT's own layers, so that ``set_adapter``, ``disable_adapter``, ``delete_adapter``, ``adapter_names``
and the parameter counts work through PEFT's bookkeeping. The arithmetic is the op's (``ktft.ops``); files are
``ktft.adapters``' concern.
Merging is not done here: the base weights are mapped read-only.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import nn

from ktft.experts import CpuExperts
from ktft.ops import MAX_RANK
from ktft.weights import lora_shapes


def expert_parameter_count(num_experts: int, hidden: int, intermediate: int, rank: int) -> int:
    """Trainable numbers of one adapter on one experts layer: 3 E r (H + I)."""
    return sum(math.prod(shape) for shape in lora_shapes(num_experts, hidden, intermediate, rank))


class ExpertFactors(nn.Module):
    """One side (A or B) of an expert adapter: three stacked fp32 parameters that stay on the CPU, never moved and
    never cast.

    Args:
        gate, up, down: shapes of the stacks, each [E, rows, cols].
    """

    def __init__(self, gate: Sequence[int], up: Sequence[int], down: Sequence[int]) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(*gate, dtype=torch.float32, device="cpu"))
        self.up = nn.Parameter(torch.empty(*up, dtype=torch.float32, device="cpu"))
        self.down = nn.Parameter(torch.empty(*down, dtype=torch.float32, device="cpu"))

    def stacks(self) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
        """gate, up, down."""
        return self.gate, self.up, self.down

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ExpertFactors:
        # .to(), .half(), .cuda() of the model, and PEFT's own device logic, all arrive here.
        return self


class ExpertLora(nn.Module, LoraLayer):
    """LoRA on every routed expert of one layer; ``forward`` has the signature of transformers' experts modules.

    Created by PEFT through ``LoraConfig._register_custom_module({CpuExperts: ExpertLora})``.

    Args:
        base_layer: the experts this layer wraps.
        adapter_name: the first adapter.
        config: its config; see ``ktft.adapters.config.check_config`` for what is refused.
        r: rank, 1 to 256.
        lora_alpha: numerator of the scaling: alpha / r, or alpha / sqrt(r) with ``use_rslora``.

    Raises:
        ValueError: rank out of range, or an initialisation that needs the base weights.
    """

    # What PEFT's base classes define, for the type checker.
    base_layer: CpuExperts
    r: dict[str, int]
    lora_alpha: dict[str, float]
    scaling: dict[str, float]
    use_rslora: dict[str, bool]
    use_dora: dict[str, bool]
    lora_bias: dict[str, bool]
    lora_dropout: nn.ModuleDict
    lora_A: nn.ModuleDict
    lora_B: nn.ModuleDict
    active_adapters: list[str]
    disable_adapters: bool
    set_adapter: Callable[..., None]

    def __init__(
        self, base_layer: CpuExperts, adapter_name: str, config: LoraConfig, r: int, lora_alpha: float, **kwargs: Any
    ) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer, **kwargs)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

    def _get_in_out_features(self, module: CpuExperts) -> tuple[int, int]:  # type: ignore[override]
        return module.hidden_size, module.hidden_size

    def update_layer(  # type: ignore[override]
        self, adapter_name: str, r: int, lora_alpha: float, config: LoraConfig, **kwargs: Any
    ) -> None:
        """Add an adapter to this layer. PEFT calls it for every adapter after the first.

        A is drawn as for ``nn.Linear`` (kaiming uniform with a = sqrt 5, for each expert by itself) and B is zero;
        "gaussian" draws A from N(0, 1/r²); False draws B too, so that the adapter changes the output at once.
        """
        if not 1 <= r <= MAX_RANK:
            raise ValueError(f"adapter {adapter_name!r}: expert LoRA rank {r}; ktft serves ranks 1 to {MAX_RANK}")
        base = self.base_layer
        gate_a, gate_b, up_a, up_b, down_a, down_b = lora_shapes(
            base.num_experts, base.hidden_size, base.intermediate_size, r
        )
        a, b = ExpertFactors(gate_a, up_a, down_a), ExpertFactors(gate_b, up_b, down_b)
        _initialise(a, b, r, config.init_lora_weights)
        self.r[adapter_name] = r
        self.lora_alpha[adapter_name] = lora_alpha
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        self.use_rslora[adapter_name] = config.use_rslora
        self.use_dora[adapter_name] = False
        self.lora_bias[adapter_name] = False
        self.lora_dropout[adapter_name] = nn.Dropout(config.lora_dropout)
        self.lora_A[adapter_name] = a
        self.lora_B[adapter_name] = b
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def factors(self, adapter_name: str) -> tuple[nn.Parameter, ...]:
        """The adapter's six parameters in the order of :data:`ktft.weights.LORA_NAMES`."""
        a, b = self.lora_A[adapter_name], self.lora_B[adapter_name]
        assert isinstance(a, ExpertFactors) and isinstance(b, ExpertFactors)
        return tuple(side for pair in zip(a.stacks(), b.stacks(), strict=True) for side in pair)

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        *,
        adapter_names: Sequence[str] | None = None,
    ) -> torch.Tensor:
        """[T, H] -> [T, H].

        Args:
            hidden_states: [T, H].
            top_k_index: int64 [T, k].
            top_k_weights: [T, k].
            adapter_names: one adapter for each sample ("__base__": none); T must be samples x length, sample after
                sample. PEFT's ``model(..., adapter_names=[...])`` and ``generate`` pass it.
        """
        adapter_ids = None
        if self.disable_adapters:
            if adapter_names is not None:
                raise ValueError("adapter_names given while the adapters are disabled; leave disable_adapter() first")
            names = []
        elif adapter_names is None:
            names = [name for name in self.active_adapters if name in self.lora_A]
        else:
            names = [name for name in self.lora_A if name in adapter_names]
            adapter_ids = _token_adapters(adapter_names, names, hidden_states.shape[0])
        if not names:
            base: torch.Tensor = self.base_layer(hidden_states, top_k_index, top_k_weights)
            return base
        dropout_p = self._dropout(names)
        # Drawn from the CPU generator once a forward: activation checkpointing restores that generator, so recompute
        # draws it again.
        seed = int(torch.randint(0, 2**62, ()).item()) if dropout_p > 0 else 0
        return self.base_layer.run(
            hidden_states,
            top_k_index,
            top_k_weights,
            lora=[factor for name in names for factor in self.factors(name)],
            scaling=[float(self.scaling[name]) for name in names],
            adapter_ids=adapter_ids,
            dropout_p=dropout_p,
            dropout_seed=seed,
        )

    def _dropout(self, names: Sequence[str]) -> float:
        rates = set()
        for name in names:
            dropout = self.lora_dropout[name]
            assert isinstance(dropout, nn.Dropout)
            if dropout.training:
                rates.add(dropout.p)
        if len(rates) > 1:
            raise ValueError(
                f"active adapters {list(names)} have dropout rates {sorted(rates)}; expert LoRA trains several "
                "adapters at once with one rate only: give them the same lora_dropout, or activate one at a time"
            )
        return rates.pop() if rates else 0.0

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Refuse every key that is none of an adapter's six tensors, also with ``strict=False``, so that nothing is
        dropped silently. ``base_layer`` refuses its own."""
        under = (key.removeprefix(prefix) for key in state_dict if key.startswith(prefix))
        refused = sorted(key for key in under if not key.startswith("base_layer.") and not _FACTOR.fullmatch(key))
        if refused:
            error_msgs.append(
                f"{len(refused)} tensors under {prefix.rstrip('.')!r} are no stacked factors of an expert adapter; the "
                f"first is {refused[0]!r}. An adapter is loaded with ktft.load_adapter, other weights by loading "
                "another checkpoint with ktft.load_model."
            )

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise NotImplementedError(MERGE_REFUSED)

    def unmerge(self) -> None:
        warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)

    def __repr__(self) -> str:
        return "lora." + super().__repr__()


_FACTOR = re.compile(r"lora_[AB]\..+\.(gate|up|down)")

MERGE_REFUSED = (
    "the routed experts are mapped read-only from the checkpoint, so an adapter on them cannot be merged into this "
    "model. Keep it as an adapter; to merge, load the saved adapter with stock PEFT onto the stock transformers "
    "model and merge there."
)


def _initialise(a: ExpertFactors, b: ExpertFactors, rank: int, init: bool | str) -> None:
    for stack in a.stacks():
        if init == "gaussian":
            nn.init.normal_(stack, std=1 / rank)
        elif isinstance(init, bool):
            _kaiming_(stack)
        else:
            raise ValueError(
                f"init_lora_weights={init!r} needs the base weights of the experts, which are mapped; use True or "
                "'gaussian'"
            )
    for stack in b.stacks():
        if init is False:
            _kaiming_(stack)
        else:
            nn.init.zeros_(stack)


def _kaiming_(stack: torch.Tensor) -> None:
    # nn.Linear's kaiming uniform with a = sqrt(5) for each [out, in] matrix of the stack is uniform in ±1/sqrt(in).
    bound = 1 / math.sqrt(stack.shape[-1])
    nn.init.uniform_(stack, -bound, bound)


def _token_adapters(adapter_names: Sequence[str], names: Sequence[str], tokens: int) -> torch.Tensor:
    """Adapter names of samples to int64 [tokens]: index into ``names``, -1 where a sample has no adapter here."""
    samples = len(adapter_names)
    if samples == 0 or tokens % samples:
        raise ValueError(f"adapter_names has {samples} entries, which do not divide the {tokens} tokens of this batch")
    index = {name: position for position, name in enumerate(names)}
    return torch.tensor([index.get(name, -1) for name in adapter_names]).repeat_interleave(tokens // samples)


__all__ = ["MERGE_REFUSED", "ExpertFactors", "ExpertLora", "expert_parameter_count"]
