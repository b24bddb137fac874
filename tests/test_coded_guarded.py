"""Kernels read no byte behind the codes and scales of coded experts, at sizes with every kind of edge."""

from __future__ import annotations

from tests.processes import run_module


def test_nothing_behind_codes_and_scales_is_read() -> None:
    """In a process of its own: a read past the end is a segmentation fault."""
    printed = run_module("tests.guarded_calls")
    assert printed.strip().splitlines()[-1:] == ["done"]
