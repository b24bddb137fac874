"""Calls of the op from several Python threads, on three kernel threads each: run by scripts/sanitize.sh under TSan.

The three calls of a group run at once: both compute dtypes, files as published and transposed, several adapters,
biases, dropout, backward that recomputes, and a call of several waves (the budget of three threads is 12 MiB).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from ktft import ops
from tests.layer_truth import Case
from tests.test_kernels import CASES, LEVELS, run, weights_of

# A row of x and h takes at least 3.6 KB of a wave: in forward 3441 of the 3600 rows fit into one, in backward a third.
WAVES = Case(2, 2, 16, 1700, 4, 1800, seed=40)


@dataclass(frozen=True)
class Call:
    """A case, how it is run, and how often it is run again."""

    case: Case
    dtype: torch.dtype = torch.bfloat16
    transposed: bool = False
    save: bool = True
    again: int = 5


GROUPS = (
    (Call(CASES["many rows"]), Call(CASES["two adapters"]), Call(CASES["plain"])),
    (
        Call(CASES["many rows"], torch.float32),
        Call(CASES["dropout, adapters"], transposed=True),
        Call(CASES["dropout"], save=False),
    ),
    (
        Call(WAVES, again=1),
        Call(CASES["adapter per token"], torch.float32, save=False),
        Call(CASES["many rows"], transposed=True),
    ),
    (
        Call(CASES["gpt-oss, adapter per token"]),
        Call(CASES["biases"], torch.float32, transposed=True),
        Call(CASES["gpt-oss, several parts"], save=False),
    ),
)


def check(call: Call) -> None:
    """Raises AssertionError if a call gives other bits than it gave at first."""
    inputs = call.case.build(call.dtype)
    weights = weights_of(inputs, transposed=call.transposed)
    first = run(inputs, weights, save=call.save)
    for _ in range(call.again):
        again = run(inputs, weights, save=call.save)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True)), call


def at_once(calls: tuple[Call, ...]) -> None:
    """Each in a thread of its own; the first failure is raised here."""
    failures: list[BaseException] = []

    def guarded(call: Call) -> None:
        try:
            check(call)
        except BaseException as error:  # handed to the main thread
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def main() -> None:
    for isa in LEVELS:
        with ops.override(isa=isa, threads=3):
            for calls in GROUPS:
                at_once(calls)
        print(isa, "done", flush=True)


if __name__ == "__main__":
    main()
