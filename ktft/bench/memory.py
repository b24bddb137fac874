"""Resident memory of this process: now, and at its highest within a block. Linux only (``/proc/self``).

Mapped file pages count as resident once the process has touched them; anonymous memory is what nobody else shares and
nothing but swap can take back.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ktft.buffers import release_freed

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Resident:
    """Resident memory in bytes: all of it, its anonymous part, and the highest total so far."""

    rss: int
    anon: int
    peak: int


def resident() -> Resident:
    """What the kernel says now.

    Raises:
        OSError: there is no ``/proc/self/status``.
    """
    sizes = {}
    for line in _STATUS.read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(":")
        if name in ("VmRSS", "RssAnon", "VmHWM"):
            sizes[name] = int(rest.split()[0]) * 1024
    return Resident(sizes["VmRSS"], sizes["RssAnon"], sizes["VmHWM"])


def forget_mapped(address: int, size: int) -> None:
    """Drop a file mapping's pages from this process (not from the page cache), as if it had just been mapped.

    Args:
        address: start of the mapping, a page's.
        size: its length in bytes.

    Raises:
        OSError: the system refuses.
    """
    dont_need = 4
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), dont_need):
        raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED) on the weights' mapping")


class Watch:
    """Highest resident memory within a ``with`` block, from the kernel's own high-water mark where it may be reset,
    and from samples every ``interval`` seconds.

    The anonymous peak is the greater of what was sampled and what the total's peak leaves when the file pages that are
    resident at the end are taken off; the latter is right where file pages only come in. Sampling takes a thread that
    wakes once an interval.

    Args:
        interval: seconds between samples.
        reset: start the kernel's high-water mark anew; False measures the process since its start.
    """

    def __init__(self, interval: float = 0.001, *, reset: bool = True) -> None:
        self._interval, self._reset = interval, reset
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._highest = resident()
        self._mark_is_ours = not reset
        self.rss_peak = self.anon_peak = 0

    def __enter__(self) -> Watch:
        if self._reset:
            try:
                _RESET.write_text("5", encoding="ascii")
                self._mark_is_ours = True
            except OSError:  # not allowed in every container: the samples remain
                pass
        self._highest = resident()
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(self._interval):
            self._look()

    def _look(self) -> Resident:
        now, before = resident(), self._highest
        self._highest = Resident(max(now.rss, before.rss), max(now.anon, before.anon), now.peak)
        return now

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        now = self._look()
        self.rss_peak, self.anon_peak = self._highest.rss, self._highest.anon
        if self._mark_is_ours:
            self.rss_peak = max(self.rss_peak, now.peak)
            self.anon_peak = max(self.anon_peak, now.peak - (now.rss - now.anon))


__all__ = ["Resident", "Watch", "forget_mapped", "release_freed", "resident"]
