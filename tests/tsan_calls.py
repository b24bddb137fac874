"""Calls of the op from several Python threads, on three kernel threads each: run by scripts/sanitize.sh under TSan."""

from __future__ import annotations

import threading

import torch

from ktft import ops
from tests.test_kernels import CASES, LEVELS, run, weights_of


def call(name: str) -> None:
    inputs = CASES[name].build(torch.bfloat16)
    weights = weights_of(inputs)
    first = run(inputs, weights)
    for _ in range(5):
        again = run(inputs, weights)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True) if isinstance(a, torch.Tensor))


def main() -> None:
    for isa in LEVELS:
        with ops.override(isa=isa, threads=3):
            threads = [threading.Thread(target=call, args=(n,)) for n in ("many rows", "two adapters", "plain")]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        print(isa, "done", flush=True)


if __name__ == "__main__":
    main()
