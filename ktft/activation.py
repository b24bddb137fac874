"""What the experts compute of gate and up: data that travels from a stock module's attributes to the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

GATE_FUNCTIONS: tuple[str, ...] = ("silu",)
"""Functions of the gate, in the order of csrc/kernels/table.h. ``silu`` is x · sigmoid(alpha · x)."""


@dataclass(frozen=True)
class Activation:
    """h = (clamp(up, -up_limit, up_limit) + up_shift) · f(min(gate, gate_max)).

    Derivatives are those of torch's clamp: a limit lets gradients through on it and none beyond it. A NaN lies beyond
    no limit here, so that it stays visible in the gradients; torch's clamp gives it the gradient 0.

    Attributes:
        function: f, one of :data:`GATE_FUNCTIONS`.
        alpha: see there.
        gate_max, up_limit: positive; infinite where there is none.
        up_shift: added to up.

    Raises:
        ValueError: the kernels have no such function, or a number is none that the description allows.
    """

    function: str = "silu"
    alpha: float = 1.0
    gate_max: float = math.inf
    up_limit: float = math.inf
    up_shift: float = 0.0

    def __post_init__(self) -> None:
        if self.function not in GATE_FUNCTIONS:
            raise ValueError(f"a gate of {self.function!r}; expected one of {', '.join(GATE_FUNCTIONS)}")
        if not (math.isfinite(self.alpha) and math.isfinite(self.up_shift)):
            raise ValueError(f"alpha {self.alpha} and up_shift {self.up_shift} must be finite")
        if not (self.gate_max > 0 and self.up_limit > 0):
            raise ValueError(f"gate_max {self.gate_max} and up_limit {self.up_limit} must be positive")


SWIGLU = Activation()
"""silu(gate) · up."""


def clamped_swiglu(alpha: float, limit: float) -> Activation:
    """gpt-oss's: gate up to ``limit``, up within ± ``limit``, (up + 1) · gate · sigmoid(alpha · gate)."""
    return Activation("silu", alpha, limit, limit, 1.0)


__all__ = ["GATE_FUNCTIONS", "SWIGLU", "Activation", "clamped_swiglu"]
