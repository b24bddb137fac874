"""Tests' modules in processes of their own, for what is measured of a process, or may end one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run_module(module: str, *arguments: str) -> str:
    """What ``python -m module`` prints, which has to end well."""
    ran = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    last = ran.stdout.strip().splitlines()[-1:]
    assert ran.returncode == 0, f"{module} ended in {last} with {ran.returncode}: {ran.stderr[-2000:]}"
    return ran.stdout
