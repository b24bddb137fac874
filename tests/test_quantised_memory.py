"""Loading a quantised checkpoint or a GGUF file streams: at the peak there is one tensor more than the result, and no
expert."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.load_memory import write_large, write_large_gguf
from tests.processes import run_module

MIB = 2**20
SLACK = 24 * MIB
"""A few rows in fp32 while they are decoded (4 MiB a tensor), stacks and arenas of transformers' loader threads."""


@pytest.mark.parametrize("writer", [write_large, write_large_gguf])
def test_loading_holds_one_tensor_beside_the_result(writer: Callable[[Path], object], tmp_path: Path) -> None:
    writer(tmp_path)
    printed = run_module("tests.load_memory", str(tmp_path))
    found = json.loads(printed.splitlines()[-1])
    figures = ", ".join(f"{name} {value / MIB:.1f} MiB" for name, value in found.items())
    print(figures)
    assert found["result"] > 100 * MIB
    assert found["added"] > 0.9 * found["result"], f"the measurement does not see what must be there: {figures}"
    assert found["added"] <= found["result"] + found["largest"] + SLACK, figures
    assert found["files"] < 16 * MIB, f"codes were read through the mapping: {figures}"
