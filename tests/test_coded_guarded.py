"""Kernels read no byte behind the codes and scales of coded experts, at sizes with every kind of edge."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_nothing_behind_codes_and_scales_is_read() -> None:
    """In a process of its own: a read past the end is a segmentation fault."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.guarded_calls"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    last = ran.stdout.strip().splitlines()[-1:]
    assert (ran.returncode, last) == (0, ["done"]), f"it ended in {last} with {ran.returncode}: {ran.stderr[-2000:]}"
