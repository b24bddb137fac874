"""``ktft convert --verify A B``: whether B holds what A does.

Every parameter of B is compared with A's of the same meaning, wherever it lies in the files and however it is stored:

- plain in both, in one dtype: byte for byte;
- coded in A and plain in B: B's are A's, decoded;
- coded in B: no weight differs by more than half a step of B's format (``ktft.formats.half_steps``).

So are the config, but for what it says of quantisation, and all other files but weights. Nothing is taken from what
``ktft convert`` may have noted while it wrote.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from ktft import formats
from ktft.convert.source import ExpertMatrix, Source, chunks, open_source, other_files
from ktft.expert_layout import ExpertSource, Tensor
from ktft.weights import PLAIN


@dataclass(frozen=True)
class Difference:
    """How far a coded matrix is from what it was made of.

    Attributes:
        relative: ‖B − A‖ / ‖A‖.
        allowed: the same, if every weight were off by half a step.
        steps: the largest |b − a| as a fraction of what half a step allows there.
    """

    relative: float
    allowed: float
    steps: float


@dataclass
class Verification:
    """What was found.

    Attributes:
        equal: parameters that are the same numbers.
        coded: parameter -> difference, of those that are coded in B and not equal.
        problems: what is missing, or not equal though it should be.
    """

    equal: int = 0
    coded: dict[str, Difference] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def beyond(self) -> dict[str, Difference]:
        """Matrices with weights that are off by more than half a step."""
        return {name: found for name, found in self.coded.items() if not found.steps <= 1}

    def text(self) -> str:
        """For people."""
        lines = [f"{self.equal} parameters equal, {len(self.coded) - len(self.beyond)} within half a step"]
        if self.coded and not self.beyond:
            worst = max(self.coded, key=lambda name: self.coded[name].relative)
            found = self.coded[worst]
            lines.append(
                f"largest relative error {found.relative:.4g} (at most {found.allowed:.4g} is allowed): {worst}"
            )
        return "\n".join(lines)

    def raise_if_wrong(self) -> None:
        """
        Raises:
            ValueError: something is missing or differs by more than it may; names the worst.
        """
        if self.problems:
            more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            raise ValueError(f"verification failed: {self.problems[0]}{more}")
        beyond = self.beyond
        if beyond:
            worst = max(beyond, key=lambda name: (beyond[name].steps, name))
            found = beyond[worst]
            raise ValueError(
                f"verification failed: {len(beyond)} of {len(self.coded)} coded matrices differ by more than half a "
                f"step of their format; the worst is {worst}, with a weight off by {found.steps:.3g} times that and a "
                f"relative error of {found.relative:.4g}"
            )


def verify(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Verification:
    """Compare two directories; see the module.

    Prints a line for each matrix that is coded in B, and shows a progress bar on a terminal. One matrix of each is in
    memory at a time.

    Raises:
        CheckpointError, UnsupportedModelError, ValueError: one of them is no checkpoint that ktft loads.
    """
    first, second = open_source(Path(a)), open_source(Path(b))
    out = Verification()
    _compare_files(first, second, out)
    missing = [name for name in first.others if name not in second.others]
    added = [name for name in second.others if name not in first.others]
    out.problems += [f"{name!r} of {first.directory} is missing in {second.directory}" for name in missing]
    out.problems += [f"{name!r} of {second.directory} is not in {first.directory}" for name in added]
    if first.experts.keys() != second.experts.keys():
        out.problems.append(f"{first.directory} and {second.directory} do not have the same experts")
    pairs: list[tuple[str, ExpertMatrix | str, ExpertMatrix | str]] = [
        (".".join(map(str, key)), first.experts[key], matrix)
        for key, matrix in second.experts.items()
        if key in first.experts
    ]
    pairs += [(name, name, name) for name in second.others if name in first.others]
    readers = _Reader(first), _Reader(second)
    for name in sorted(second.checkpoint.detection.ignored):
        theirs = first.checkpoint.tensors.get(name)
        if theirs is None or not _same_bytes(theirs, second.checkpoint.tensors[name]):
            out.problems.append(f"tensor {name!r} of {second.directory} is no part of a parameter, and not A's")
    with tqdm(total=len(pairs), desc="Comparing", unit="matrix", disable=None) as progress:
        for name, left, right in pairs:
            found = _compare(name, readers[0], left, readers[1], right, out)
            if found is not None:
                out.coded[name] = found
                progress.write(
                    f"{name}  relative error {found.relative:.4g} (at most {found.allowed:.4g}), largest difference "
                    f"{found.steps:.3f} of half a step"
                )
            progress.update()
    return out


def _compare_files(first: Source, second: Source, out: Verification) -> None:
    configs = [{**source.outline.config_file} for source in (first, second)]
    for config in configs:
        config.pop("quantization_config", None)
        if isinstance(text := config.get("text_config"), dict):
            config["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
    if configs[0] != configs[1]:
        keys = {key for key in {**configs[0], **configs[1]} if configs[0].get(key) != configs[1].get(key)}
        out.problems.append(f"{second.directory / 'config.json'} differs in {json.dumps(sorted(keys))}")
    files = [other_files(source.directory)[0] for source in (first, second)]
    for name in sorted({*files[0], *files[1]}):
        if not all(name in found for found in files):
            out.problems.append(f"{name} is not in both directories")
        elif (first.directory / name).read_bytes() != (second.directory / name).read_bytes():
            out.problems.append(f"{second.directory / name} is not a copy of {first.directory / name}")


class _Reader:
    """A side's values. The last stored matrix is kept: fused ones are asked for twice."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._last: tuple[ExpertSource, torch.Tensor] | None = None

    def stored(self, what: ExpertMatrix | str) -> ExpertSource | None:
        """How it is stored; None if it is of a dtype that is copied only."""
        if isinstance(what, ExpertMatrix):
            return what.source
        checkpoint = self.source.checkpoint
        plain = what not in checkpoint.coded and checkpoint.tensors[what].dtype not in formats.PLAIN_DTYPES
        return None if plain else checkpoint.source(what)

    def values(self, what: ExpertMatrix | str, stored: ExpertSource) -> torch.Tensor:
        """A matrix [rows, cols] or whatever a parameter is, in its own dtype, or in fp32 if it is coded."""
        if self._last is None or self._last[0] != stored:
            self._last = None  # before the next one is read
            self._last = stored, self.source.decoded(stored)
        values = self._last[1]
        return what.of(values) if isinstance(what, ExpertMatrix) else values


def _compare(
    name: str, left: _Reader, a: ExpertMatrix | str, right: _Reader, b: ExpertMatrix | str, out: Verification
) -> Difference | None:
    """Counts or complains, or gives the difference of a coded matrix."""
    stored = left.stored(a), right.stored(b)
    if isinstance(a, str) and isinstance(b, str) and all(s is None or s.encoding.format in PLAIN for s in stored):
        tensors = left.source.checkpoint.tensors[a], right.source.checkpoint.tensors[b]
        _count(_same_bytes(*tensors), name, out)
        return None
    assert stored[0] is not None and stored[1] is not None
    ours, theirs = left.values(a, stored[0]), right.values(b, stored[1])
    if ours.shape != theirs.shape:
        out.problems.append(f"{name} is {list(ours.shape)} in A and {list(theirs.shape)} in B")
        return None
    if stored[1].encoding.format in PLAIN:
        same_dtype = ours.dtype == theirs.dtype or stored[0].encoding.format not in PLAIN
        _count(same_dtype and torch.equal(_bits(ours.to(theirs.dtype)), _bits(theirs)), name, out)
        return None
    ours = ours.float()
    if torch.equal(ours, theirs):
        out.equal += 1
        return None
    difference, allowed = (theirs - ours).abs(), formats.half_steps(ours, stored[1].encoding)
    size = float(torch.linalg.vector_norm(ours, dtype=torch.float64))
    most = float(torch.linalg.vector_norm(allowed, dtype=torch.float64))
    steps = float((difference / allowed).nan_to_num(nan=float("inf")).amax())
    return Difference(formats.relative_error(ours, theirs), most / size if size else 0.0, steps)


def _count(equal: bool, name: str, out: Verification) -> None:
    if equal:
        out.equal += 1
    else:
        out.problems.append(f"{name} should be the same numbers in both, and is not")


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return all(bool((x == y).all()) for x, y in zip(chunks(a), chunks(b), strict=True))


__all__ = ["Difference", "Verification", "verify"]
