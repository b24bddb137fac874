"""Memory of large tensors that are made and dropped in every training step.

What the op keeps for backward and the gradients of LoRA factors are tens of megabytes a layer. From the usual allocator
they come as fresh pages each time, which the operating system clears before they are overwritten; here the pages are
used again.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
import threading
from collections.abc import Sequence

import torch

_LEAST = 1 << 20
"""Bytes from which a tensor is worth it; smaller ones come from torch."""


def _references(objects: Sequence[object]) -> list[int]:
    return [sys.getrefcount(item) for item in objects]


# A block that only its list refers to; how many temporary references are counted depends on the version of Python.
_UNUSED = _references([object()])[0]


class Buffers:
    """Blocks of memory, each used by one tensor at a time.

    A block is free again when the tensors that view it are gone. All blocks together hold at most what was in use
    at one time, and a quarter more: where no free block fits, a new one replaces as many bytes of free ones.
    """

    def __init__(self) -> None:
        self._blocks: list[mmap.mmap] = []
        self._lock = threading.Lock()
        self._process = os.getpid()

    def empty(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised CPU tensor; from 1 MiB on its storage cannot be resized. OSError if there is no memory."""
        size = math.prod(shape) * dtype.itemsize
        if size < _LEAST:
            return torch.empty(shape, dtype=dtype)
        if self._process != os.getpid():  # a child, forked perhaps while another thread held the lock
            self._lock, self._process = threading.Lock(), os.getpid()
        with self._lock:
            return torch.frombuffer(self._take(size), dtype=dtype, count=math.prod(shape)).view(shape)

    def _take(self, size: int) -> mmap.mmap:
        counts = zip(self._blocks, _references(self._blocks), strict=True)
        free = [block for block, count in counts if count == _UNUSED]
        fitting = [block for block in free if size <= len(block) <= size + size // 4]
        if fitting:
            return min(fitting, key=len)
        replaced = 0
        for block in free:
            if replaced >= size:
                break
            self._blocks.remove(block)
            replaced += len(block)
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # advice: a kernel without huge pages refuses it, and nothing is lost
            block.madvise(mmap.MADV_HUGEPAGE)
        self._blocks.append(block)
        return block


def release_freed() -> None:
    """Give memory that was freed, but kept by the C library, back to the system, so that it does not hide what is
    allocated next."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:  # another C library than glibc
        return
