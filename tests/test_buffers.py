"""Memory that is used again: who holds it, how much there is."""

from __future__ import annotations

import gc
import mmap
import os

import pytest
import torch

from ktft.buffers import Buffers

N = 1 << 20


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_a_block_is_used_again_when_nothing_views_it() -> None:
    buffers = Buffers()
    first = buffers.empty((N, 1), torch.float32)
    at = address(first)
    view = first[: N // 2].t()
    del first
    gc.collect()
    second = buffers.empty((N,), torch.float32)
    assert address(second) != at, "a view still holds the block"
    view.fill_(1.0)
    second.fill_(2.0)
    assert view.unique().tolist() == [1.0] and second.unique().tolist() == [2.0]
    del view
    assert address(buffers.empty((N,), torch.float32)) == at


def test_held_by_autograd_only() -> None:
    """As saved for backward: no Python name refers to the tensor."""
    buffers = Buffers()
    x = torch.ones(N, requires_grad=True)
    factor = buffers.empty((N,), torch.float32).fill_(3.0)
    out = (x * factor).sum()
    at = address(factor)
    del factor
    other = buffers.empty((N,), torch.float32).fill_(5.0)
    assert address(other) != at
    out.backward()
    assert x.grad is not None and x.grad.unique().tolist() == [3.0]
    del out
    assert address(buffers.empty((N,), torch.float32)) == at


def test_blocks_are_replaced_not_piled_up() -> None:
    buffers = Buffers()
    for size in range(N, 8 * N, N // 2):
        tensor = buffers.empty((size,), torch.int8)
        assert tensor.numel() == size
        del tensor
        assert sum(map(len, buffers._blocks)) <= 2 * size
    kept = [buffers.empty((N,), torch.float32) for _ in range(3)]
    assert len({address(t) for t in kept}) == 3
    assert sum(map(len, buffers._blocks)) <= 3 * 4 * N + 8 * N


def test_small_tensors_are_ordinary() -> None:
    buffers = Buffers()
    assert buffers.empty((0, 3), torch.bfloat16).shape == (0, 3)
    assert buffers.empty((2, 3), torch.float32).shape == (2, 3)
    assert not buffers._blocks


def test_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel built without them refuses the advice, as it refuses one it does not know."""
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)
    with mmap.mmap(-1, 1 << 20) as block, pytest.raises(OSError, match="Invalid argument"):
        block.madvise(mmap.MADV_HUGEPAGE)
    assert Buffers().empty((N,), torch.float32).fill_(1.0).sum() == N


def test_a_child_forked_while_another_thread_allocates() -> None:
    buffers = Buffers()
    with buffers._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if buffers.empty((N,), torch.float32).numel() == N else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
