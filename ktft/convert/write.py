"""``ktft convert SRC DST``: writes what ``plan.py`` decides, one file after another.

    DST.partial/          the result so far, finished files only, and .ktft-convert.json, which says of what
    DST                   the result: that directory, renamed when nothing is missing in it

A file is written under a temporary name, flushed to the disk and renamed, and then entered there
(:class:`Partial`). So a run that was killed loses the file that it was at, and the same command goes on from there; a
directory of another source or other options is refused. The bytes of the result depend on the source and the options
only. One matrix is in memory at a time, or :data:`~ktft.convert.source.CHUNK` bytes of what is copied.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from tqdm import tqdm

from ktft import families, formats
from ktft.bench.memory import resident
from ktft.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, CheckpointError, file_header
from ktft.convert.plan import Copy, Decode, Encode, Headers, Plan, Shard, Step, make_plan
from ktft.convert.source import Source, chunks, open_source, other_files
from ktft.mapping import replacing
from ktft.model import map_experts

MANIFEST = ".ktft-convert.json"


@dataclass(frozen=True)
class Finished:
    """A file of the result that is complete.

    Attributes:
        size, mtime_ns: to know it again.
        read: bytes of the source that it was made of.
        errors: base name -> relative error of every matrix that was encoded.
    """

    size: int
    mtime_ns: int
    read: int
    errors: dict[str, float]


@dataclass
class Summary:
    """What a conversion did.

    Attributes:
        errors: base name -> relative error of every matrix, those of an earlier run of the same conversion included.
        copied, decoded: tensors that stayed as they were; that were quantised and are plain now.
        left_out: tensors and files of the source that the result lacks.
        seconds: of this run.
        peak_rss: highest resident memory of the process, in bytes.
        read, written: bytes of weights, by this run.
        kept: bytes that an earlier run had written.
        temporary: bytes on the disk, at most, that are no part of the result.
    """

    errors: dict[str, float] = field(default_factory=dict)
    copied: int = 0
    decoded: int = 0
    left_out: list[str] = field(default_factory=list)
    seconds: float = 0.0
    peak_rss: int = 0
    read: int = 0
    written: int = 0
    kept: int = 0
    temporary: int = 0

    def text(self, format_name: str) -> str:
        """For people."""
        worst = max(self.errors, key=lambda name: self.errors[name])
        low, high = min(self.errors.values()), self.errors[worst]
        lines = [
            f"{len(self.errors)} expert matrices as {format_name}, relative error {low:.3g} to {high:.3g} "
            f"(largest: {worst})",
            f"{self.copied} tensors as they were"
            + (f", {self.decoded} decoded, since one config describes one way of quantising" if self.decoded else ""),
            *([f"left out: {', '.join(self.left_out)}"] if self.left_out else []),
            f"{self.seconds:.1f} s, peak memory {_size(self.peak_rss)}, read {_size(self.read)}, wrote "
            f"{_size(self.written)}{f' and kept {_size(self.kept)} of an earlier run' if self.kept else ''}, "
            f"temporary disk {_size(self.temporary)}",
        ]
        return "\n".join(lines)


def _size(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


# --- the directory ----------------------------------------------------------------------------------------------------


class Partial:
    """``DST.partial``, of which this process alone writes.

    Args:
        target: DST.
        task: what is converted, and into what; an earlier run's has to be the same.

    Attributes:
        directory: DST.partial.
        finished: name -> file, of those that are there.

    Raises:
        ValueError: another process is at it, or it is something else's.
    """

    def __init__(self, target: Path, task: dict[str, Any]) -> None:
        self.directory = target.with_name(f"{target.name}.partial")
        self._task = task
        self.finished: dict[str, Finished] = {}
        manifest = self.directory / MANIFEST
        if self.directory.exists() and not manifest.is_file() and any(self.directory.iterdir()):
            raise ValueError(
                f"{self.directory} is in the way: it is no unfinished conversion. Move it, or choose another DST"
            )
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ValueError(f"another ktft convert is writing {self.directory}; let it end") from None
        try:
            if manifest.is_file():
                self._take_up(manifest)
            self._remove_leftovers()
            with _room(manifest):
                self._write_manifest()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let others write."""
        os.close(self._lock)

    def _take_up(self, manifest: Path) -> None:
        """Check what an earlier run left."""
        try:
            found = json.loads(manifest.read_text(encoding="utf-8"))
            task, finished = found["task"], {name: Finished(**entry) for name, entry in found["finished"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{manifest} is not what ktft convert writes; remove {self.directory}") from None
        for key, value in self._task.items():
            if task.get(key) != value:
                what = f"{key} was {task.get(key)}, now it is {value}"
                if isinstance(value, dict):
                    before = task.get(key) or {}
                    changed = [name for name in {**before, **value} if before.get(name) != value.get(name)]
                    what = f"{key}: {sorted(changed)[0]} changed"
                raise ValueError(
                    f"{self.directory} holds the beginning of another conversion ({what}). Give its source and options "
                    "to go on with it, or remove it to begin anew"
                )
        for name, entry in finished.items():
            path = self.directory / name
            status = path.stat() if path.is_file() else None
            if status is not None and (status.st_size, status.st_mtime_ns) == (entry.size, entry.mtime_ns):
                self.finished[name] = entry

    def _remove_leftovers(self) -> None:
        """What a killed run had begun is as large on disk as if it were finished."""
        for path in self.directory.rglob("*"):
            if path.is_file() and path.relative_to(self.directory).as_posix() not in {*self.finished, MANIFEST}:
                path.unlink()

    def _write_manifest(self) -> None:
        entries = {name: asdict(entry) for name, entry in self.finished.items()}
        with replacing(self.directory / MANIFEST) as temporary:
            temporary.write_text(json.dumps({"task": self._task, "finished": entries}), encoding="utf-8")

    @property
    def manifest_bytes(self) -> int:
        return (self.directory / MANIFEST).stat().st_size

    def add(self, name: str, read: int, errors: dict[str, float]) -> Finished:
        """Enter a file that is complete."""
        status = (self.directory / name).stat()
        self.finished[name] = Finished(status.st_size, status.st_mtime_ns, read, errors)
        self._write_manifest()
        return self.finished[name]

    def rename(self, target: Path) -> None:
        """Make it the result."""
        _refuse_existing(target)
        os.fsync(self._lock)
        os.rename(self.directory, target)
        (target / MANIFEST).unlink()  # after: a run that is killed in between has done its work, too


def _refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise ValueError(f"{target} exists; remove it, or choose another DST")


# --- files ------------------------------------------------------------------------------------------------------------


@contextmanager
def _room(what: Path) -> Iterator[None]:
    """Says what to do where the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            error.errno,
            f"no space left for {what}; finished files stay in {what.parent}. Make room and give the same command "
            "again, which goes on from there",
        ) from None


def write_shard(path: Path, shard: Shard, source: Source, progress: Any) -> dict[str, float]:
    """One file of the result.

    Args:
        path: where to.
        shard: what it holds.
        source: what it is made of.
        progress: a tqdm bar of source bytes.

    Returns:
        Base name -> relative error of what was encoded.

    Raises:
        OSError: it cannot be written; says what to do where the disk is full.
        CheckpointError: the source changed, or has weights that are not finite.
    """
    with safe_open(source.directory / shard.name, framework="pt") as opened:
        metadata = opened.metadata() or {"format": "pt"}
    head, begins, size = file_header(shard.headers, metadata)
    errors: dict[str, float] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with _room(path), replacing(path) as temporary, temporary.open("r+b", buffering=0) as out:
        os.posix_fallocate(out.fileno(), 0, size)  # a full disk shows here, and not after hours
        _write(out.fileno(), 0, np.frombuffer(head, dtype=np.uint8))
        for step in shard.steps:
            for name, offset, data in _produced(step, source, errors):
                _write(out.fileno(), begins[name] + offset, data)
            progress.update(sum(tensor.size for tensor in step.reads))
            if isinstance(step, Encode):
                for base in step.matrices:
                    progress.write(f"{base}  relative error {errors[base]:.4g}")
        source.checkpoint.verify_unchanged()
    return errors


def _write(descriptor: int, offset: int, data: np.ndarray) -> None:
    """All of ``data``: the system may take less at a time."""
    view = memoryview(data.data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def _produced(step: Step, source: Source, errors: dict[str, float]) -> Iterator[tuple[str, int, np.ndarray]]:
    """Tensor name, offset in it, and bytes, of everything that a step makes; ``errors`` is filled."""
    if isinstance(step, Copy):
        offset = 0
        for data in chunks(step.tensor):
            yield step.tensor.name, offset, data
            offset += len(data)
    elif isinstance(step, Decode):
        yield step.name, 0, _bytes(source.decoded(step.source, step.dtype))
    else:
        stored = source.decoded(step.source)
        for base, matrix in step.matrices.items():
            weight = matrix.of(stored)
            try:
                encoded = formats.encode(weight, step.encoding)
            except ValueError as error:
                codes = step.source.tensors["codes"]
                raise CheckpointError(f"{codes.file}: tensor {codes.name!r}, for {base}: {error}") from None
            decoded = formats.dequantize(step.encoding, encoded, torch.float32)
            errors[base] = formats.relative_error(weight, decoded)
            for role, tensor in encoded.items():
                yield step.encoding.names(base)[role], 0, _bytes(tensor)


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    out: np.ndarray = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return out


# --- the whole --------------------------------------------------------------------------------------------------------


def convert(
    source: str | os.PathLike[str], target: str | os.PathLike[str], format_name: str, layers: list[int] | None = None
) -> Summary:
    """Write a checkpoint whose routed experts are stored in another format; see the module.

    Prints a line for each matrix that is encoded, and shows a progress bar on a terminal.

    Args:
        source: SRC, a directory.
        target: DST, which must not exist.
        format_name: one of ``ktft.formats.WRITTEN``.
        layers: numbers of the layers whose experts are converted; None is all.

    Raises:
        ValueError: DST exists or lies in SRC, DST.partial is another conversion's, or what ``plan.py`` refuses.
        CheckpointError: SRC is no complete checkpoint, changed meanwhile, or holds weights that are not finite.
        OSError: it cannot be written.
    """
    start = time.monotonic()
    source, target = Path(source), Path(os.path.abspath(target))
    _refuse_existing(target)
    real = Path(os.path.realpath(target))
    if Path(os.path.realpath(source)) in (real, *real.parents):
        raise ValueError(f"DST {target} lies in SRC {source}; choose a directory outside")
    plan = make_plan(open_source(source), format_name, layers)
    files, other_weights = other_files(source)
    partial = Partial(target, _task(plan, files))
    try:
        summary = _write_shards(plan, partial)
        with _room(partial.directory / "config.json"):
            _write_rest(plan, partial.directory, files)
        _check_result(plan, partial.directory)
        summary.temporary = partial.manifest_bytes
        partial.rename(target)
    finally:
        partial.close()
    summary.copied = sum(isinstance(step, Copy) for step in plan.steps)
    summary.decoded = sum(isinstance(step, Decode) for step in plan.steps)
    summary.left_out = [*plan.left_out, *other_weights]
    summary.seconds, summary.peak_rss = time.monotonic() - start, resident().peak
    return summary


def _task(plan: Plan, files: list[str]) -> dict[str, Any]:
    """What has to be the same for two runs to be of one conversion."""
    directory = plan.source.directory
    names = {*files, "config.json", *(shard.name for shard in plan.shards)}
    names |= {tensor.file.relative_to(directory).as_posix() for step in plan.steps for tensor in step.reads}
    status = {name: (directory / name).stat() for name in sorted(names)}
    return {
        "format": plan.format,
        "modules": plan.modules,
        "source": {name: [found.st_size, found.st_mtime_ns] for name, found in status.items()},
    }


def _write_shards(plan: Plan, partial: Partial) -> Summary:
    summary = Summary()
    total = sum(shard.read_bytes for shard in plan.shards)
    with tqdm(total=total, desc="Converting", unit="B", unit_scale=True, disable=None) as progress:
        for shard in plan.shards:
            done = partial.finished.get(shard.name)
            if done is not None:
                progress.update(done.read)
                summary.kept += done.size
            else:
                errors = write_shard(partial.directory / shard.name, shard, plan.source, progress)
                with _room(partial.directory / MANIFEST):
                    done = partial.add(shard.name, shard.read_bytes, errors)
                summary.read += done.read
                summary.written += done.size
            summary.errors |= done.errors
    return summary


def _write_rest(plan: Plan, directory: Path, files: list[str]) -> None:
    """Config, index and whatever else is no weights."""
    source = plan.source.directory
    for name in files:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        with replacing(directory / name) as temporary:
            shutil.copyfile(source / name, temporary)
    texts = {"config.json": plan.config}
    if [shard.name for shard in plan.shards] != [SINGLE_FILE]:
        weight_map: dict[str, str] = {}
        size = 0
        for shard in plan.shards:
            headers: Headers = shard.headers
            weight_map |= dict.fromkeys(headers, shard.name)
            size += sum(formats.tensor_bytes(*header) or 0 for header in headers.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        texts[INDEX_FILE] = index
    for name, value in texts.items():
        with replacing(directory / name) as temporary:
            temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_result(plan: Plan, directory: Path) -> None:
    """The headers of what was written, as a reader takes them: with the config, and against the model."""
    found = Checkpoint(directory, plan.config)
    expected = {name for step in plan.steps for name in step.headers}
    if set(found.tensors) != expected or found.detection.ignored:
        raise RuntimeError(
            f"{directory}: expected {len(expected)} tensors, found {len(found.tensors)}; a bug of ktft's"
        )
    outline = plan.source.outline
    map_experts(found, outline.modules, families.expert_tensors(outline.stock, outline.modules, found.parameters))


__all__ = ["MANIFEST", "Finished", "Partial", "Summary", "convert", "write_shard"]
