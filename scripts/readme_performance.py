"""Writes the README's performance section from what ``ktft bench --json`` printed.

    ktft bench experts --vs hf --json > experts.jsonl
    ktft bench train --vs hf --json > train.jsonl
    python scripts/readme_performance.py experts.jsonl train.jsonl [--readme README.md] [--check]

The section is what lies between ``<!-- performance -->`` and ``<!-- /performance -->``; the rest of the file stays as
it is. It names machine, versions, commit and dates, taken from the ``machine`` record each file begins with. Files of
different machines, threads or library versions are refused: one table says one thing. ``--check`` writes nothing and
exits with status 1 if the section is another than the files give. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- performance -->", "<!-- /performance -->"
SAME = ("cpu", "cores", "threads", "torch_threads", "omp_wait_policy", "versions")
"""Fields of a ``machine`` record in which all files must agree."""

Record = dict[str, Any]


def read(path: Path) -> list[Record]:
    """The records of one file, each with the file's ``machine`` record under ``machine``.

    Raises:
        ValueError: a line is no JSON object, there is no machine record first, or the run did not come to its end.
    """
    records: list[Record] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: expected a JSON object ({error})") from None
        if not isinstance(record, dict) or "record" not in record:
            raise ValueError(f"{path}, line {number}: expected a record of ktft bench --json, found {line[:60]!r}")
        records.append(record)
    if not records or records[0]["record"] != "machine" or records[-1]["record"] != "end":
        found = [record["record"] for record in records]
        raise ValueError(f"{path}: expected records from machine to end, found {found}; was the run cut short?")
    return [{**record, "machine": records[0]} for record in records]


def render(records: Sequence[Record]) -> str:
    """The section's text.

    Raises:
        ValueError: the files are of different machines, or hold nothing to show.
    """
    machines = [record for record in records if record["record"] == "machine"]
    for name in SAME:
        values = {json.dumps(machine[name], sort_keys=True) for machine in machines}
        if len(values) > 1:
            raise ValueError(f"the files differ in {name}: {' and '.join(sorted(values))}; measure them alike")
    parts = [_about(machines, records)]
    parts += _training([r for r in records if r["record"] == "train"])
    parts += _experts([r for r in records if r["record"] == "experts"])
    parts += _decode([r for r in records if r["record"] == "decode"])
    if len(parts) == 1:
        raise ValueError("the files hold no experts, train or decode records")
    return "\n\n".join(parts)


def replace(text: str, section: str) -> str:
    """``text`` with a new section between the two comments.

    Raises:
        ValueError: they are not there once, in this order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"expected {BEGIN} and after it {END} once each in the README")
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{section}\n{END}{rest.split(END)[1]}"


# --- parts of the section


def _span(values: Iterable[float]) -> str:
    ordered = sorted(values)
    low, high = f"{ordered[0]:.0f}", f"{ordered[-1]:.0f}"
    return low if low == high else f"{low}–{high}"


def _about(machines: Sequence[Record], records: Sequence[Record]) -> str:
    first = machines[0]
    rated = [record for record in records if "read_gbs" in record]
    versions = ", ".join(f"{name} {number}" for name, number in first["versions"].items() if number)
    dates = sorted({machine["date"] for machine in machines})
    levels = sorted({machine["isa"] for machine in machines})
    commits = sorted({machine["commit"] for machine in machines if machine["commit"]})
    cores = f"{first['cores']} cores of {_article(first['cpu'])}"
    return _paragraph(
        f"{cores}, {first['threads']} threads, kernels {', '.join(levels)}, "
        f"`OMP_WAIT_POLICY` {first['omp_wait_policy']}. In the same runs torch reached "
        f"{_span(r['peak_bf16_gflops'] for r in rated)} GFLOP/s in bf16 and "
        f"{_span(r['peak_fp32_gflops'] for r in rated)} in fp32 (2048³ products) and read "
        f"{_span(r['read_gbs'] for r in rated)} GB/s. {versions}; measured {' to '.join(_ends(dates))}"
        + (f", commit {', '.join(commits)}" if commits else "")
        + f".{_repetitions(records)}"
    )


def _repetitions(records: Sequence[Record]) -> str:
    """How figures came from repetitions; nothing is said of what was measured once."""
    timed = [record for record in records if record["record"] in ("experts", "train")]
    decoded = [record for record in records if record["record"] == "decode"]
    once = [record for record in timed if record["rounds"] < 2]
    parts = []
    if len(once) < len(timed):
        but = {"experts": " (experts: one round)", "train": " (training steps: one process a side)"}
        parts.append("Medians" + "".join(sorted({but[record["record"]] for record in once})))
    if decoded and all(record["repetitions"] > 1 for record in decoded):
        parts.append("decode: means ± standard deviations" if parts else "Means ± standard deviations")
    return f" {', '.join(parts)}; the sides take turns." if parts else ""


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 130, break_long_words=False, break_on_hyphens=False)


def _article(cpu: str) -> str:
    return f"{'an' if cpu[:1] in 'AEIOU' else 'a'} {cpu}"


def _ends(dates: list[str]) -> list[str]:
    return dates if len(dates) < 2 else [dates[0], dates[-1]]


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _number(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _layer(record: Record) -> str:
    skew = "" if record["routing"] == "uniform" else f", {record['routing']} routing"
    return (
        f"hidden {record['hidden']}, intermediate {record['intermediate']}, {record['experts']} experts, "
        f"top {record['topk']}, {record['format']}{skew}"
    )


def _model(record: Record) -> str:
    layers = f"{record['layers']}-layer {record['model']}"
    if "hidden" not in record:
        return layers
    return (
        f"{layers}, hidden {record['hidden']}, intermediate {record['intermediate']}, {record['experts']} experts, "
        f"top {record['topk']}"
    )


def _training(records: Sequence[Record]) -> list[str]:
    """Steps of both sides in one table."""
    if not records:
        return []
    rows = []
    for ours in (record for record in records if record["side"] == "ktft"):
        theirs = next(
            (r for r in records if r["side"] == "hf" and r["machine"] is ours["machine"] and r["lora"] == ours["lora"]),
            None,
        )
        what = "attention and experts" if ours["lora"] == "experts" else "attention"
        title = f"{_model(ours)}; {ours['tokens']} tokens, LoRA r = {ours['lora_rank']} on {what}"

        def row(name: str, field: str, unit: str, ours: Record = ours, theirs: Record | None = theirs) -> list[str]:
            if theirs is None:
                return [name, f"{_number(ours[field])} {unit}", "", ""]
            ratio = f"{ours[field] / theirs[field]:.2f}"
            return [name, f"{_number(ours[field])} {unit}", f"{_number(theirs[field])} {unit}", ratio]

        rows += [
            row(title, "tok_s", "tokens/s"),
            row("peak resident memory, mapped pages counted", "peak_rss_gb", "GB"),
            row("peak anonymous memory", "peak_anon_gb", "GB"),
        ]
    return [_table(["training step", "ktft", "transformers + PEFT", "ratio"], rows)]


def _experts(records: Sequence[Record]) -> list[str]:
    """One table for each layer and level."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((_layer(record), record["machine"]["isa"]), []).append(record)
    out = []
    for (layer, isa), group in groups.items():
        compared = any("hf_fwd_ms" in record for record in group)
        heading = [
            "tokens",
            "rows per expert",
            "forward",
            "of peak",
            "of read",
            "forward + backward",
            "of peak",
            "LoRA",
        ]
        if compared:
            heading += ["transformers forward", "ratio", "forward + backward", "ratio"]
        rows = []
        for record in group:
            row = [
                str(record["tokens"]),
                _number(record["rows_per_expert"]),
                f"{_number(record['fwd_ms'])} ms",
                _percent(record["fwd_peak_fraction"]),
                _percent(record["fwd_bandwidth_fraction"]),
                f"{_number(record['fwd_bwd_ms'])} ms",
                _percent(record["fwd_bwd_peak_fraction"]),
                f"r = {record['lora_rank']}" if record["lora_rank"] else "none",
            ]
            if compared and "hf_fwd_ms" in record:
                for kind in ("fwd", "fwd_bwd"):
                    row += [f"{_number(record[f'hf_{kind}_ms'])} ms", f"{record[f'hf_{kind}_ratio']:.2f}"]
            elif compared:
                row += [""] * 4
            rows.append(row)
        note = (
            f"One experts layer on weights in a file mapping ({layer}; {isa}). Peak is torch's "
            f"{group[0]['peak_dtype']} matmul; forward + backward counts the base products only."
        )
        if compared:
            note += " transformers: the better of eager and grouped_mm, frozen experts, no LoRA."
        out.append(f"{_paragraph(note)}\n\n{_table(heading, rows)}")
    return out


def _decode(records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    rows = [
        [
            f"`{Path(record['model']).name}`",
            ("ktft" if record["side"] == "ktft" else "transformers") + (", adapter" if record["adapter"] else ""),
            f"{_number(record['prefill_tok_s'])} ± {_number(record['prefill_tok_s_sd'])} (pp{record['prompt_tokens']})",
            f"{_number(record['decode_tok_s'])} ± {_number(record['decode_tok_s_sd'])} (tg{record['new_tokens']})",
        ]
        for record in records
    ]
    return [_table(["model", "side", "prefill, tokens/s", "decode, tokens/s"], rows)]


def main(argv: list[str] | None = None) -> int:
    """Write the section, or check it; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+", help="what ktft bench --json printed")
    parser.add_argument("--readme", metavar="FILE", type=Path, default=Path("README.md"), help="default %(default)s")
    parser.add_argument("--check", action="store_true", help="only say whether the section is up to date")
    arguments = parser.parse_args(argv)
    try:
        section = render([record for file in arguments.files for record in read(file)])
        old = arguments.readme.read_text(encoding="utf-8")
        new = replace(old, re.sub(r"[ \t]+$", "", section, flags=re.MULTILINE))
    except (OSError, ValueError, KeyError) as error:
        missing = f"a record lacks {error}" if isinstance(error, KeyError) else str(error)
        print(f"readme_performance: error: {missing}", file=sys.stderr)
        return 1
    if arguments.check:
        print("up to date" if new == old else f"{arguments.readme}: the performance section is out of date")
        return int(new != old)
    arguments.readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
