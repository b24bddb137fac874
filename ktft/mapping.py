"""Files mapped read-only, one mapping per file and process, and the guards that go with it.

Files are identified by device, inode, size and modification time: one that changes while it is being loaded, or while
a model is still mapped onto it, is an error at the next look. A mapping of a file that somebody truncates kills the
process, so whoever writes files uses :func:`replacing` (a temporary name, then a rename) or :func:`refuse_if_mapped`.

This module knows nothing of what is in the files (``checkpoint.py`` does), and reads nothing.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names file, tensor, what was expected and what was found."""


@dataclass(frozen=True)
class FileIdentity:
    """What tells one version of a file from another."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class FileMapping:
    """A whole file, mapped read-only and shared; unmapped when the last reference goes.

    Attributes:
        residency_known: mincore tells which pages are in memory. Linux says so only to the file's owner and to who may
            write it; to everybody else every page looks resident.
    """

    def __init__(self, path: Path, identity: FileIdentity) -> None:
        self.path, self.identity = path, identity
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = FileIdentity.of(os.fstat(descriptor))
            if found != identity:
                raise CheckpointError(f"{path} changed while it was being loaded: expected {identity}, found {found}")
            self._map = mmap.mmap(descriptor, identity.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        # numpy gives the address of a read-only buffer, and its export keeps the mapping from being closed by hand.
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(self._bytes.ctypes.data)
        status = os.stat(path)
        self.residency_known = status.st_uid == os.geteuid() or os.access(path, os.W_OK)
        if FileIdentity.of(status) != identity:
            raise CheckpointError(f"{path} changed while it was being mapped; load it again when nothing writes to it")

    def read(self, begin: int, size: int) -> bytes:
        """``size`` bytes from ``begin``, copied."""
        return self._bytes[begin : begin + size].tobytes()

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the mapped file was written onto, which changes what is mapped.

        One stat. A file that was deleted or replaced by another (a rename) is no error here: what is mapped is still
        the old one, as it was.
        """
        try:
            found = FileIdentity.of(os.stat(self.path))
        except OSError:
            return
        same_file = (found.device, found.inode) == (self.identity.device, self.identity.inode)
        if same_file and found != self.identity:
            raise CheckpointError(
                f"{self.path} was written onto while a model of this process is mapped onto it: it was "
                f"{self.identity}, it is {found}. The model no longer has the weights it was loaded with; restore the "
                "file and load the model again."
            )


_lock = threading.Lock()
_mappings: weakref.WeakValueDictionary[str, FileMapping] = weakref.WeakValueDictionary()


def map_file(path: Path, identity: FileIdentity) -> FileMapping:
    """The process's one mapping of a file."""
    real = os.path.realpath(path)
    with _lock:
        mapping = _mappings.get(real)
        if mapping is None:
            mapping = _mappings[real] = FileMapping(Path(real), identity)
    check_mapped(path, identity)
    return mapping


def check_mapped(path: Path, identity: FileIdentity) -> None:
    """Raise if a model of this process is mapped onto another version of the file."""
    with _lock:
        mapping = _mappings.get(os.path.realpath(path))
    if mapping is not None and mapping.identity != identity:
        raise CheckpointError(
            f"{path} changed while a model of this process is mapped onto it: it was {mapping.identity}, it is "
            f"{identity}. Delete that model (or start a new process), then load again."
        )


def is_mapped_source(path: str | os.PathLike[str]) -> bool:
    """Whether a model of this process is mapped onto this file, by whatever name it is called here."""
    try:
        status = os.stat(path)
    except OSError:
        return False
    key = (status.st_dev, status.st_ino)
    return any((m.identity.device, m.identity.inode) == key for m in list(_mappings.values()))


def refuse_if_mapped(path: str | os.PathLike[str]) -> None:
    """Raise ValueError if writing to ``path`` would write onto a checkpoint file that is in use.

    For code that writes files: changing a mapped file changes a running model, and truncating it kills the process.
    """
    if is_mapped_source(path):
        raise ValueError(
            f"writing onto {os.fspath(path)} is refused: the experts of a loaded model are mapped from this file. "
            "Write to another directory."
        )


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write a file so that nobody ever sees half of it.

    Yields a temporary path beside ``path``, which is renamed onto it at the end. If the block raises, ``path`` is left
    as it was. Refuses a mapped checkpoint file.
    """
    refuse_if_mapped(path)
    target = Path(path)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


__all__ = [
    "CheckpointError",
    "FileIdentity",
    "FileMapping",
    "check_mapped",
    "is_mapped_source",
    "map_file",
    "refuse_if_mapped",
    "replacing",
]
