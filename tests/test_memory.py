"""Memory of a step: scratch follows the formula of docs/design.md, which knows threads and [T, H], but no [T·k, I].

Measured in processes of their own, as the system counts it (anonymous pages at the peak).
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ktft import ops
from tests.processes import run_module
from tests.step_memory import Step

ROOT = Path(__file__).parent.parent
MIB = 2**20
# Routes [S, I] in bf16 are 32 MiB at the larger count, [S, H] 16 MiB.
STEP = Step(
    tokens=(1024, 8192), experts=8, top_k=8, hidden=128, intermediate=256, rank=8, dropout=0.0, save=True, dtype="bf16",
    threads=2, isa=ops.cpu_report()["chosen"],
)  # fmt: skip
SLACK = 5 * MIB
"""Huge pages round up what is touched, by up to 2 MiB each for the scratch and what torch allocates."""


def scratch_bytes(step: Step, tokens: int) -> float:
    """The formula in docs/design.md, "Memory", in its words."""
    bf16 = step.dtype == "bf16"
    element, group = (2, 2 if step.isa not in ("scalar", "avx2") else 1) if bf16 else (4, 1)

    def words(elements: int) -> int:
        return math.ceil(elements / group)

    def row(elements: int) -> int:
        return 64 * (math.ceil(words(elements) / 16) | 1)

    h, i, r = step.hidden, step.intermediate, step.rank
    wide = words(max(h, i, r))
    worker = 480 * 1024 + 256 * (wide + r)
    if step.dropout and r:
        worker += (768 + 4 * group) * wide
    recompute = 0 if step.save else 2 * i * element
    # the level amx: x and h in forward, x where it is recomputed; for transposed files dY, d gate and d up instead
    forward_copies = backward_copies = 0
    if step.isa.startswith("amx") and bf16:
        forward_copies = 0 if step.transposed else 4 * (words(h) + words(i))
        recomputed = 0 if step.save else 4 * words(h)
        backward_copies = 4 * (words(h) + 2 * words(i)) if step.transposed else recomputed
    low_rank = step.adapters * r, step.adapters * words(r)
    forward = row(h) + row(i) + 12 * (low_rank[0] + low_rank[1]) + forward_copies
    backward = (2 if r or not step.save else 1) * row(h) + 3 * row(i) + recompute + backward_copies
    backward += 8 * (4 * low_rank[0] + 3 * low_rank[1])
    rows = [min(tokens * step.top_k, max(256, 4 * MIB * step.threads // b)) for b in (forward, backward)]
    wave = max(rows[0] * forward, rows[1] * (backward + 4 * math.ceil(i / 64)))
    return step.threads * worker + wave + (4 * tokens * h if bf16 else 0) + 16 * tokens * step.top_k


@pytest.mark.parametrize(
    "step",
    [
        STEP,
        replace(STEP, save=False, threads=1),
        replace(STEP, rank=0, threads=4),
        replace(STEP, dtype="fp32", dropout=0.1),
        replace(STEP, isa="avx2" if "avx2" in ops.cpu_report()["levels"] else "scalar"),
        replace(STEP, adapters=3, per_token=True),
        replace(STEP, transposed=True),
        replace(STEP, tokens=(512, 2048), isa="amx-soft"),
        replace(STEP, tokens=(512, 2048), isa="amx-soft", transposed=True, save=False),
    ],
    ids=[
        "bf16",
        "recomputed, 1 thread",
        "no LoRA, 4 threads",
        "fp32, dropout",
        "words of one bf16",
        "adapter of each token",
        "transposed",
        "amx",
        "amx, transposed, recomputed",
    ],
)
def test_scratch_is_as_documented(step: Step) -> None:
    printed = run_module("tests.step_memory", json.dumps(asdict(step)))
    measured = json.loads(printed)
    assert len(measured) == len(step.tokens)
    for tokens, found in zip(step.tokens, measured, strict=True):
        added, required, scratch = found["added"], found["required"], scratch_bytes(step, tokens)
        figures = f"{tokens} tokens: {added / MIB:.1f} MiB added, {required / MIB:.1f} to keep or return"
        print(f"{figures}; scratch by the formula {scratch / MIB:.1f}")
        assert added > 0.9 * required, "the measurement does not see what must be there"
        assert added <= required + scratch + SLACK, (
            f"{figures}; expected at most {scratch / MIB:.1f} of scratch and {SLACK / MIB:.0f} for huge pages"
        )
