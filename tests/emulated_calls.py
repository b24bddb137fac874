"""What ktft chooses and computes on the CPU that this process sees: run by test_emulated.py under qemu.

    python -m tests.emulated_calls OUTPUT

The output, for ``torch.load``: ``doctor`` (its report as JSON), ``refused`` (level above the CPU -> what asking for it
says), ``calls`` (name -> the tensors that went into a forward and backward, and those that came out of it).
"""

from __future__ import annotations

import sys

import torch

from ktft import doctor, ops
from tests.test_kernels import CASES, DTYPES, run, weights_of

NAMES = ["plain", "odd sizes", "many rows", "dropout, adapters", "several parts, few rows", "several parts, many rows"]
INPUTS = ("x", "grad", "index", "route_weights", "gate", "up", "down")


def key(name: str, dtype: torch.dtype, transposed: bool) -> str:
    return f"{name}, {dtype}{', transposed' if transposed else ''}"


def main(output: str) -> None:
    calls = {}
    for name in NAMES:
        for dtype in DTYPES:
            for transposed in (False, True):
                inputs = CASES[name].build(dtype)
                results = run(inputs, weights_of(inputs, transposed=transposed))
                tensors = {field: getattr(inputs, field) for field in INPUTS}
                calls[key(name, dtype, transposed)] = {
                    **tensors, "lora": inputs.lora, "adapter_ids": inputs.adapter_ids, "results": list(results),
                }  # fmt: skip
    refused = {}
    for level, missing in ops.isa_levels().items():
        if missing:
            try:
                ops.choose_isa(level)
            except ValueError as error:
                refused[level] = str(error)
    torch.save({"doctor": doctor.as_json(), "refused": refused, "calls": calls}, output)


if __name__ == "__main__":
    main(sys.argv[1])
