"""Where an op goes wrong without a word: missing derivatives, numbers that must not spread, foreign settings."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

from ktft import ops
from ktft.mapping import FileIdentity, map_file
from ktft.weights import ExpertMatrices, ExpertWeights
from tests.layer_truth import Case
from tests.test_kernels import CASES, DTYPES, LEVELS, run, weights_of
from tests.test_ops import assert_same_bits


def leaves_and_out(name: str = "plain") -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    inputs = CASES[name].build(torch.float32)
    leaves = [t.clone().requires_grad_() for t in (inputs.x, inputs.route_weights, *inputs.lora)]
    out = ops.moe_experts(
        leaves[0], inputs.index, leaves[1], weights_of(inputs), lora=leaves[2:], scaling=inputs.scaling
    )
    return leaves, out, inputs.grad


# --- autograd


def test_second_derivatives_raise() -> None:
    leaves, out, grad = leaves_and_out()
    (first,) = torch.autograd.grad(out, leaves[0], grad, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        first.square().sum().backward()


def test_forward_mode_raises() -> None:
    inputs = CASES["plain"].build(torch.float32)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(inputs.x, torch.ones_like(inputs.x))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            ops.moe_experts(dual, inputs.index, inputs.route_weights, weights_of(inputs))


def test_backward_twice_gives_the_same_bits() -> None:
    leaves, out, grad = leaves_and_out()
    first = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    assert_same_bits(torch.autograd.grad(out, leaves, grad), first)


@pytest.mark.parametrize("changed", range(8))
def test_an_input_changed_before_backward_is_an_error(changed: int) -> None:
    leaves, out, grad = leaves_and_out()
    with torch.no_grad():
        leaves[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, leaves, grad)


def test_a_frozen_adapter_beside_a_trained_one() -> None:
    """Gradients for the one, none for the other, which may be a bf16 copy; the trained one's are as if both trained."""
    inputs = CASES["two adapters"].build(torch.bfloat16)
    weights = weights_of(inputs)
    expected = run(inputs, weights)
    trained = [t.clone().requires_grad_() for t in inputs.lora[6:]]
    lora = [*(t.bfloat16() for t in inputs.lora[:6]), *trained]
    out = ops.moe_experts(inputs.x, inputs.index, inputs.route_weights, weights, lora=lora, scaling=inputs.scaling)
    gradients = torch.autograd.grad(out, trained, inputs.grad)
    assert_same_bits((out.detach(), *gradients), (expected[0], *expected[9:]))


def test_nothing_is_kept_where_no_gradient_is_needed() -> None:
    inputs = CASES["plain"].build(torch.float32)
    x = inputs.x.clone().requires_grad_()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            out = ops.moe_experts(x, inputs.index, inputs.route_weights, weights_of(inputs))
        assert not out.requires_grad


@pytest.mark.parametrize("wrong", ["grad", "saved", "dtype"])
def test_the_backward_op_checks_its_operands(wrong: str) -> None:
    inputs = CASES["plain"].build(torch.float32)
    weights = weights_of(inputs)
    forward = (inputs.x, inputs.index, inputs.route_weights, weights.id, inputs.lora, inputs.scaling, None, 0.0, 0)
    _, saved = torch.ops.ktft.moe_experts(*forward, True)
    grad = inputs.grad[:3] if wrong == "grad" else inputs.grad
    saved = {"grad": saved, "saved": saved[:3], "dtype": saved.bfloat16()}[wrong]
    with pytest.raises(ValueError, match="backward needs a gradient"):
        torch.ops.ktft.moe_experts_backward(grad, saved, *forward, True, True, [True])


def test_saved_rows_of_invalid_ids_are_zero() -> None:
    inputs = CASES["sentinel ids"].build(torch.float32)
    weights = weights_of(inputs)
    for _ in range(3):  # fresh memory may happen to be zero
        _, saved = torch.ops.ktft.moe_experts(
            inputs.x, inputs.index, inputs.route_weights, weights.id, [], [], None, 0.0, 0, True
        )
        invalid = int((inputs.index >= inputs.case.experts).sum())
        assert invalid and (saved[-invalid:] == 0).all() and (saved[:-invalid] != 0).any()
        saved.fill_(float("nan"))
        del saved


def test_torch_compile_without_graph_breaks() -> None:
    inputs = CASES["plain"].build(torch.float32)
    weights = weights_of(inputs)

    def block(x: torch.Tensor, route_weights: torch.Tensor, lora: list[torch.Tensor]) -> torch.Tensor:
        return ops.moe_experts(x * 1.0, inputs.index, route_weights, weights, lora=lora, scaling=inputs.scaling)

    results = []
    for function in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in (inputs.x, inputs.route_weights, *inputs.lora)]
        out = function(leaves[0], leaves[1], leaves[2:])
        results.append((out.detach(), *torch.autograd.grad(out, leaves, inputs.grad)))
    assert_same_bits(*results)


# --- numbers that must not spread, or must not be hidden


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_row_stays_alone_and_visible(isa: str, dtype: torch.dtype, value: float) -> None:
    inputs = CASES["plain"].build(dtype)
    weights = weights_of(inputs)
    with ops.override(isa=isa):
        clean = run(inputs, weights)[0]
        inputs.x[3, 5] = value
        out = run(inputs, weights)[0]
    assert not torch.isfinite(out[3]).any()
    others = torch.arange(len(out)) != 3
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("isa", LEVELS)
def test_a_broken_adapter_reaches_its_own_tokens_only(isa: str, dropout: float) -> None:
    case = Case(4, 2, 40, 48, 3, 17, adapters=3, per_token=True, dropout=dropout, seed=9)
    inputs = case.build(torch.bfloat16)
    assert inputs.adapter_ids is not None
    weights = weights_of(inputs)
    with ops.override(isa=isa):
        clean = run(inputs, weights)
        for tensor in inputs.lora[6:12]:  # adapter 1
            tensor.fill_(float("nan"))
        broken = run(inputs, weights)
    mine = inputs.adapter_ids == 1
    assert mine.any() and not mine.all()
    for what in (0, 1, 2):  # out, d hidden, d routing weights
        assert not torch.isfinite(broken[what][mine]).all()
        assert torch.equal(broken[what][~mine], clean[what][~mine])
    for n in (*range(3, 9), *range(15, 21)):  # gradients of adapters 0 and 2
        assert torch.equal(broken[n], clean[n])


def test_cost_and_bits_do_not_depend_on_adapters_nobody_uses() -> None:
    inputs = CASES["two adapters"].build(torch.bfloat16)
    weights = weights_of(inputs)
    inputs.adapter_ids = torch.zeros(17, dtype=torch.int64)
    out = run(inputs, weights)[0]
    alone = ops.moe_experts(
        inputs.x, inputs.index, inputs.route_weights, weights, lora=inputs.lora[:6], scaling=inputs.scaling[:1]
    )
    assert torch.equal(out, alone)


# --- foreign threads


def in_an_executor(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as executor:
        executor.submit(work).result(60)


def in_a_pthread(work: Callable[[], None]) -> None:
    """A thread that Python learns of when the callback begins."""
    libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
    start = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: work())
    assert libc.pthread_create(ctypes.byref(thread), None, start, None) == 0
    assert libc.pthread_join(thread, None) == 0


@pytest.mark.parametrize("start", [in_an_executor, in_a_pthread])
def test_forward_and_backward_in_another_thread(start: Callable[[Callable[[], None]], None]) -> None:
    inputs = CASES["many rows"].build(torch.bfloat16)
    weights = weights_of(inputs)
    expected, results, threads = run(inputs, weights), [], []

    def work() -> None:
        threads.append(threading.get_native_id())
        results.append(run(inputs, weights))

    start(work)
    assert threads and threading.get_native_id() not in threads
    assert_same_bits(results[0], expected)


class Nested(torch.autograd.Function):
    """The identity around ``function``, whose backward runs a backward of its own, ``depth`` levels deep."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor], depth: int
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.function, ctx.depth = function, depth
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = Nested.apply(x, ctx.function, ctx.depth - 1) if ctx.depth else ctx.function(x)
        out.backward(grad)
        return x.grad, None, None


def test_backward_in_a_thread_of_autograds_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd runs backwards within backwards in the caller up to a depth of 60, deeper ones in a C++ thread of its
    own, which is where a GPU's backward runs as well."""
    inputs = CASES["many rows"].build(torch.bfloat16)
    weights = weights_of(inputs)
    expected = run(inputs, weights)
    threads, kernel = [], ops._C.backward
    monkeypatch.setattr(ops._C, "backward", lambda *a: (threads.append(threading.get_native_id()), kernel(*a))[1])
    lora = [t.clone().requires_grad_() for t in inputs.lora]

    def layer(x: torch.Tensor) -> torch.Tensor:
        return ops.moe_experts(x, inputs.index, inputs.route_weights, weights, lora=lora, scaling=inputs.scaling)

    x = inputs.x.clone().requires_grad_()
    Nested.apply(x, layer, 70).backward(inputs.grad)
    assert x.grad is not None and len(threads) == 1
    if threads[0] == threading.get_native_id():
        pytest.skip("this torch ran the nested backward in the calling thread")
    assert_same_bits((x.grad, *(t.grad for t in lora)), (expected[1], *expected[3:]))


def test_python_goes_on_during_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = CASES["many rows"].build(torch.float32)
    weights = weights_of(inputs)
    x, index, route_weights = (t.repeat(100, 1) for t in (inputs.x, inputs.index, inputs.route_weights))
    kernel, span = ops._C.forward, []

    def timed(*arguments: Any) -> None:
        span.append(time.perf_counter())
        kernel(*arguments)
        span.append(time.perf_counter())

    monkeypatch.setattr(ops._C, "forward", timed)
    with ops.override(isa="scalar", threads=1), ThreadPoolExecutor(1) as executor:
        call = executor.submit(ops.moe_experts, x, index, route_weights, weights)
        moments = []
        while not call.done():
            moments.append(time.perf_counter())
            time.sleep(1e-4)
    call.result()
    begin, end = span
    third = (end - begin) / 3
    assert [moment for moment in moments if begin + third < moment < end - third]


# --- foreign settings


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="the CPU cannot flush denormals")
@pytest.mark.parametrize("isa", LEVELS)
def test_the_callers_floating_point_mode_changes_nothing(isa: str) -> None:
    """Workers keep the mode they were born with; a caller's flush-to-zero must not decide who rounds how."""
    inputs = CASES["many rows"].build(torch.float32)
    inputs.grad *= 1e-39  # every gradient becomes denormal
    weights = weights_of(inputs)
    with ops.override(isa=isa, threads=3):
        expected = run(inputs, weights)
        torch.set_flush_denormal(True)
        try:
            flushed = [run(inputs, weights) for _ in range(5)]
        finally:
            torch.set_flush_denormal(False)
    assert (expected[1] != 0).any() and (expected[1].abs() < 1e-37).all(), "the case is about denormal numbers"
    for results in flushed:
        assert_same_bits(results, expected)


@pytest.mark.parametrize("name", ["an expert twice", "twice, dropout"])
@pytest.mark.parametrize("isa", LEVELS)
def test_duplicate_ids_on_any_number_of_threads(isa: str, name: str) -> None:
    inputs = CASES[name].build(torch.bfloat16)
    weights = weights_of(inputs)
    results = []
    for threads in (1, 3):
        with ops.override(isa=isa, threads=threads):
            results.append(run(inputs, weights))
    assert_same_bits(*results)


@pytest.mark.parametrize("residency_known", [True, False])
def test_experts_that_are_not_in_memory(tmp_path: Path, residency_known: bool) -> None:
    """The same bits from a file whose pages were dropped, read ahead or not."""
    inputs = CASES["many rows"].build(torch.bfloat16)
    expected = run(inputs, weights_of(inputs))
    path = tmp_path / "experts"
    tensors = (inputs.gate, inputs.up, inputs.down)
    path.write_bytes(b"".join(t.view(torch.int16).numpy().tobytes() for t in tensors))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mapping = map_file(path, FileIdentity.of(path.stat()))
    matrices, offset = [], 0
    for tensor in tensors:
        experts, _, columns = tensor.shape
        size = tensor[0].numel() * 2
        addresses = mapping.address + offset + np.arange(experts, dtype=np.int64) * size
        matrices.append(ExpertMatrices(addresses, columns * 2, "bf16"))
        offset += experts * size
    case = inputs.case
    weights = ExpertWeights(
        *matrices,
        hidden_size=case.hidden,
        intermediate_size=case.intermediate,
        owner=mapping,
        residency_known=residency_known,
    )
    assert_same_bits(run(inputs, weights), expected)
