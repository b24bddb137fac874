"""What the three benchmarks share: checks of options, threads for a while, numbers short enough to read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ktft import ops


def check_isa(name: str) -> None:
    """Raise ValueError if ``--isa name`` is no level, or one this machine cannot run."""
    levels = ops.isa_levels()
    available = ", ".join(level for level, missing in levels.items() if not missing)
    if name != "auto" and name not in levels:
        raise ValueError(f"--isa {name} is not a level; valid: auto, {', '.join(levels)}")
    if name != "auto" and levels[name]:
        raise ValueError(f"--isa {name} cannot run on this CPU, which lacks {levels[name]}; available: {available}")


@contextlib.contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Let torch use ``threads`` threads within the block; None leaves them as they are."""
    before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(before)


def tidy(value: Any) -> Any:
    """A float to six significant digits; anything else as it is."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


__all__ = ["check_isa", "tidy", "torch_threads"]
