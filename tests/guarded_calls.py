"""Coded experts whose every tensor ends where memory does, forward and backward: run by test_coded_guarded.py.

    python -m tests.guarded_calls

A page that cannot be read follows each matrix's codes and each matrix's scales, as one may follow the last tensor of a
mapped file: a read past the end kills the process. Before each case its name is printed, so that the last line names
the one that did; afterwards the bits of the plain kernels are checked, at sizes that divide as little as the format
allows.
"""

from __future__ import annotations

import torch

from ktft import ops
from tests.coded import ENCODINGS, coded_experts, odd_size
from tests.test_coded import LEVELS, step
from tests.test_kernels import guarded

SIZES = ((37, 80), (1100, 21))
"""About what hidden and intermediate size: less and more than a panel; more than a part of a reduction."""


def placed(tensor: torch.Tensor) -> torch.Tensor:
    """A guarded copy, if it is one that kernels read."""
    return guarded(tensor) if tensor.dim() else tensor


def main() -> None:
    for name in ENCODINGS:
        for hidden, intermediate in {tuple(odd_size(name, about) for about in sizes) for sizes in SIZES}:
            for dtype in (torch.bfloat16, torch.float32):
                coded, plain = coded_experts(name, 2, hidden, intermediate, dtype, placed=placed)
                for isa in LEVELS:
                    for tokens in (5, 40):
                        print(f"{name} {hidden}x{intermediate} {dtype} {isa} {tokens} tokens", flush=True)
                        with ops.override(isa=isa, threads=2):
                            results = zip(step(coded, dtype, tokens), step(plain, dtype, tokens), strict=True)
                        assert all(torch.equal(ours, truth) and truth.abs().max() > 0 for ours, truth in results)
    print("done")


if __name__ == "__main__":
    main()
