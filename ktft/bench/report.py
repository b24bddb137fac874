"""How a benchmark's records reach the reader: one JSON object a line, or a table.

A record is a flat dict with the key ``record`` (``machine``, ``experts``, ``train``, ``decode``, …). JSON holds every
field; a table the columns of :data:`COLUMNS`, and records that have none as lines of ``name: value``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

Record = Mapping[str, Any]


def _number(digits: int) -> Callable[[Any], str]:
    return lambda value: f"{value:.{digits}f}"


def _percent(value: Any) -> str:
    return f"{100 * value:.0f} %"


_TEXT: Callable[[Any], str] = str

COLUMNS: dict[str, tuple[tuple[str, str, Callable[[Any], str]], ...]] = {
    "experts": (
        ("tokens", "tokens", _TEXT),
        ("format", "format", _TEXT),
        ("rows_per_expert", "rows/exp", _number(1)),
        ("fwd_ms", "fwd ms", _number(2)),
        ("fwd_gflops", "GFLOP/s", _number(0)),
        ("fwd_peak_fraction", "of peak", _percent),
        ("fwd_weight_gbs", "GB/s", _number(1)),
        ("fwd_bandwidth_fraction", "of read", _percent),
        ("fwd_bwd_ms", "f+b ms", _number(2)),
        ("fwd_bwd_gflops", "GFLOP/s", _number(0)),
        ("fwd_bwd_peak_fraction", "of peak", _percent),
        ("fwd_bwd_bandwidth_fraction", "of read", _percent),
        ("lora_rank", "rank", _TEXT),
        ("vs_bf16_fwd", "vs bf16", _number(2)),
        ("vs_bf16_fwd_bwd", "f+b", _number(2)),
        ("hf_fwd_ms", "hf fwd ms", _number(2)),
        ("hf_fwd_bwd_ms", "hf f+b ms", _number(2)),
        ("rss_added_mb", "rss MB", _number(0)),
        ("anon_added_mb", "anon MB", _number(0)),
    ),
    "train": (
        ("side", "side", _TEXT),
        ("implementation", "experts by", _TEXT),
        ("lora", "lora", _TEXT),
        ("step_s", "step s", _number(2)),
        ("tok_s", "tok/s", _number(1)),
        ("experts_share", "experts", _percent),
        ("rest_share", "rest", _percent),
        ("optimizer_share", "optimizer", _percent),
        ("peak_rss_gb", "rss GB", _number(2)),
        ("peak_anon_gb", "anon GB", _number(2)),
        ("first_loss", "first loss", _number(4)),
    ),
    "decode": (
        ("side", "side", _TEXT),
        ("adapter", "adapter", _TEXT),
        ("implementation", "experts by", _TEXT),
        ("prompt_tokens", "pp", _TEXT),
        ("prefill_tok_s", "tok/s", _number(1)),
        ("prefill_tok_s_sd", "± sd", _number(1)),
        ("new_tokens", "tg", _TEXT),
        ("decode_tok_s", "tok/s", _number(2)),
        ("decode_tok_s_sd", "± sd", _number(2)),
        ("decode_bandwidth_fraction", "of read", _percent),
    ),
}
"""Per kind of record: field, heading, how its value is shown."""

_WIDTH = 12


class Report:
    """Prints records as they come.

    Args:
        as_json: one JSON object a line; else tables.
        output: where to; default standard output.
    """

    def __init__(self, as_json: bool, output: TextIO | None = None) -> None:
        self._json, self._output = as_json, output or sys.stdout
        self._table: str | None = None

    def emit(self, record: Record) -> None:
        """Print one record."""
        if self._json:
            print(json.dumps(record), file=self._output, flush=True)
            return
        kind = str(record["record"])
        columns = COLUMNS.get(kind)
        if columns is None:
            self._table = None
            print(f"{kind}:", file=self._output)
            for name, value in record.items():
                if name != "record":
                    print(f"  {name}: {_plain(value)}", file=self._output, flush=True)
            return
        if self._table != kind:
            print("".join(f"{heading:>{_WIDTH}}" for _, heading, _ in columns), file=self._output)
            self._table = kind
        cells = (_cell(record.get(field), show) for field, _, show in columns)
        print("".join(f"{cell:>{_WIDTH}}" for cell in cells), file=self._output, flush=True)

    def note(self, text: str) -> None:
        """Say what is going on, on standard error: it is no part of the result."""
        print(text, file=sys.stderr, flush=True)


def _cell(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


__all__ = ["COLUMNS", "Record", "Report"]
