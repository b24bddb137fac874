"""``CpuExperts``: the module that takes the place of a Hugging Face experts module.

It keeps transformers' experts contract, (hidden [T, H], top_k_index [T, k], top_k_weights [T, k]) -> hidden [T, H],
and owns no weights: it points at an :class:`~ktft.weights.ExpertWeights`, which lies in file mappings. So nothing here
is a parameter, nothing is in a state dict, and ``.to()``, ``.half()``, ``.cuda()`` and whatever else goes through
``_apply`` leave it alone.

Routing, shared experts and everything around stay in the stock model. Loading is ``model.py``'s, expert LoRA
``lora.py``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from ktft import ops
from ktft.mapping import FileMapping
from ktft.weights import ExpertWeights


@dataclass(frozen=True)
class ExpertNames:
    """How one layer's experts are called, and how the stock model's fused parameters hold them.

    Attributes:
        module: path of the experts module in the model, e.g. ``model.layers.0.mlp.experts``.
        disk: prefix in the family's own published per-expert naming, e.g. ``model.layers.0.block_sparse_moe.experts``.
        gate, up, down: the matrices in that naming, e.g. ``w1``, ``w3``, ``w2``.
        interleaved: outputs of gate and up take turns in the fused parameter (gate first), instead of all of gate
            before all of up.
        transposed: the fused parameters are [E, in, out].

    A checkpoint's tensor is ``{disk}.{expert}.{gate}.weight``, an adapter's
    ``base_model.model.{disk}.{expert}.{gate}.lora_A.weight``.
    """

    module: str
    disk: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    interleaved: bool = False
    transposed: bool = False


class CpuExperts(nn.Module):
    """Routed experts computed on the CPU from mapped weights.

    It is built empty, with the constructor signature of a stock experts class (the arguments are not used: every size
    comes from the weights), and filled by :meth:`attach`. ``copy.deepcopy`` shares the weights; pickling raises.

    Attributes:
        weights: where the experts lie; None until :meth:`attach`.
        names: how they are called; None until :meth:`attach`.
        num_experts, hidden_size, intermediate_size: E, H, I; 0 until :meth:`attach`.
        recompute: False keeps gate and up pre-activations for backward (2·S·I values in the compute dtype), True
            keeps nothing and computes them again.
        weight: an empty CPU tensor that never moves; code that asks a layer where its weight is (PEFT) gets the right
            answer.
    """

    def __init__(self, config: object = None, *args: object, **kwargs: object) -> None:
        super().__init__()
        self.weights: ExpertWeights | None = None
        self.names: ExpertNames | None = None
        self.num_experts = self.hidden_size = self.intermediate_size = 0
        self.recompute = False
        # A plain attribute: as a buffer, transformers would place it on the accelerator and DDP would broadcast it.
        self.weight = torch.empty(0, dtype=torch.float32, device="cpu")
        self._is_hf_initialized = True  # transformers: there is nothing here to initialise after loading

    def attach(self, weights: ExpertWeights, names: ExpertNames, *, recompute: bool = False) -> None:
        """Point the module at its weights. The module keeps them alive."""
        self.weights, self.names, self.recompute = weights, names, recompute
        self.num_experts = weights.num_experts
        self.hidden_size, self.intermediate_size = weights.hidden_size, weights.intermediate_size

    @property
    def parameter_count(self) -> int:
        """Numbers in the weights and biases."""
        biases = () if self.weights is None else self.weights.biases or ()
        matrices = 3 * self.num_experts * self.hidden_size * self.intermediate_size
        return matrices + sum(bias.numel() for bias in biases)

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """The experts without LoRA: [T, H] -> [T, H] in hidden's dtype and on hidden's device."""
        return self.run(hidden, top_k_index, top_k_weights)

    def run(
        self,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        lora: Sequence[torch.Tensor] = (),
        scaling: Sequence[float] = (),
        adapter_ids: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        dropout_seed: int = 0,
    ) -> torch.Tensor:
        """The experts with any number of adapters; see :func:`ktft.ops.moe_experts` for the operands.

        Raises:
            RuntimeError: no weights are attached.
        """
        if self.weights is None:
            raise RuntimeError(
                "this experts module has no weights: it was not built by ktft.load_model, or loading stopped half-way. "
                "Load the model with ktft.load_model(directory)."
            )
        return ops.moe_experts(
            hidden,
            top_k_index,
            top_k_weights,
            self.weights,
            lora=lora,
            scaling=scaling,
            adapter_ids=adapter_ids,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
            save=not self.recompute,
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> CpuExperts:
        """Nothing here moves or changes its dtype."""
        return self

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
        """Refuse every key under this module, also with ``strict=False``, so that nothing is dropped silently."""
        refused = sorted(key for key in state_dict if key.startswith(prefix))
        if refused:
            error_msgs.append(
                f"{len(refused)} tensors lie under {prefix.rstrip('.')!r}, whose weights are mapped from the "
                f"checkpoint and cannot be loaded from a state dict; the first is {refused[0]!r}. An adapter is loaded "
                "with ktft.load_adapter, other weights by loading another checkpoint with ktft.load_model."
            )

    @property
    def parametrizations(self) -> NoReturn:
        """Stock PEFT asks a module for this when it looks for parameters to adapt; finding none it would go on without
        the experts and without an error.

        It is the one thing PEFT asks this module in particular, so there is no narrower place to raise. The price:
        ``torch.nn.utils.parametrize.is_parametrized(experts)`` and ``inspect.getmembers(experts)`` raise as well.
        """
        raise RuntimeError(
            "routed experts are mapped and have no parameters that stock PEFT could adapt; use ktft.get_peft_model "
            "with 'experts' in target_modules, or ktft.load_adapter"
        )

    def extra_repr(self) -> str:
        if self.weights is None:
            return "no weights attached"
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, format={self.weights.gate.format}"
        )


def check_sources(model: nn.Module) -> None:
    """Raise CheckpointError if a file that the model's experts are mapped from was written onto since it was loaded.

    One stat for each file. For code that is about to use or keep results of the model, e.g. to save an adapter.
    """
    owners = [module.weights.owner for module in model.modules() if isinstance(module, CpuExperts) and module.weights]
    mappings = [item for owner in owners if isinstance(owner, tuple) for item in owner]
    for mapping in {id(item): item for item in mappings if isinstance(item, FileMapping)}.values():
        mapping.check_unchanged()


__all__ = ["CpuExperts", "ExpertNames", "check_sources"]
