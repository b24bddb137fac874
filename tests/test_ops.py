"""The op's contract: purity, determinism, autograd, checkpointing, errors."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ktft import ops
from ktft import weights as expert_weights
from ktft.weights import ExpertWeights, lora_shapes
from tests.layer_truth import Case
from tests.test_kernels import CASES, CLAMPED, DTYPES, LEVELS, run, weights_of


def resident_anonymous_kb() -> int:
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:"))


def assert_same_bits(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


# --- the contract


def test_the_schema_is_final() -> None:
    shared = (
        "Tensor hidden, Tensor top_k_index, Tensor top_k_weights, int weights, Tensor[] lora, float[] scaling, "
        "Tensor? adapter_ids, float dropout_p, int dropout_seed"
    )
    assert str(torch.ops.ktft.moe_experts.default._schema) == (
        f"ktft::moe_experts({shared}, bool save) -> (Tensor, Tensor)"
    )
    assert str(torch.ops.ktft.moe_experts_backward.default._schema) == (
        f"ktft::moe_experts_backward(Tensor grad, Tensor saved, {shared}, bool need_hidden, bool need_weights, "
        "bool[] need_lora) -> (Tensor, Tensor, Tensor[])"
    )
    names = [argument.name for argument in torch.ops.ktft.moe_experts.default._schema.arguments]
    assert names == [*ops._Call._fields, "save"]


# --- determinism


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("isa", LEVELS)
def test_same_bits_on_any_number_of_threads(isa: str, dtype: torch.dtype, transposed: bool) -> None:
    for name in ("many rows", "dropout, adapters", "odd sizes", "wide", "gpt-oss, adapter per token"):
        inputs = CASES[name].build(dtype)
        weights = weights_of(inputs, transposed=transposed)
        results = []
        for threads in (1, 2, 3):
            with ops.override(isa=isa, threads=threads):
                results.append(run(inputs, weights))
        assert_same_bits(results[1], results[0])
        assert_same_bits(results[2], results[0])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("gpt_oss", [False, True], ids=["swiglu", "gpt-oss"])
def test_a_row_alone_and_among_300(isa: str, dtype: torch.dtype, transposed: bool, gpt_oss: bool) -> None:
    case = CASES["many rows"]
    inputs = (replace(case, activation=CLAMPED, biased=True) if gpt_oss else case).build(dtype)
    weights = weights_of(inputs, transposed=transposed)
    with ops.override(isa=isa):
        out, d_x, d_route, *_ = run(inputs, weights)
        for row in (0, 7, 150, 299):
            alone = copy.copy(inputs)
            for field in ("x", "grad", "index", "route_weights"):
                setattr(alone, field, getattr(inputs, field)[row : row + 1])
            out_1, d_x_1, d_route_1, *_ = run(alone, weights)
            assert (
                torch.equal(out_1[0], out[row])
                and torch.equal(d_x_1[0], d_x[row])
                and torch.equal(d_route_1[0], d_route[row])
            )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("isa", LEVELS)
def test_the_number_of_rows_does_not_change_bits(isa: str, dtype: torch.dtype, transposed: bool) -> None:
    """Up to 16 rows of an expert the weights are read where they lie, beyond that through panels; 192 rows are one
    tile, 193 two. The reductions (1101 and 330) are several parts long and end in the middle of a vector."""
    inputs = Case(1, 1, 1101, 330, 5, 400, seed=30).build(dtype)
    weights = weights_of(inputs, transposed=transposed)
    with ops.override(isa=isa):
        out, d_x, d_route, *_ = run(inputs, weights)
        for rows in (1, 2, 3, 5, 7, 15, 16, 17, 191, 192, 193):
            fewer = copy.copy(inputs)
            for field in ("x", "grad", "index", "route_weights"):
                setattr(fewer, field, getattr(inputs, field)[:rows])
            out_n, d_x_n, d_route_n, *_ = run(fewer, weights)
            assert torch.equal(out_n, out[:rows]), rows
            assert torch.equal(d_x_n, d_x[:rows]) and torch.equal(d_route_n, d_route[:rows]), rows


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("isa", LEVELS)
def test_retain_and_recompute_give_the_same_bits(isa: str, dtype: torch.dtype) -> None:
    for name in CASES:
        inputs = CASES[name].build(dtype)
        weights = weights_of(inputs)
        with ops.override(isa=isa):
            assert_same_bits(run(inputs, weights, save=False), run(inputs, weights, save=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_what_is_kept_for_backward(dtype: torch.dtype) -> None:
    """Gate and up of every route, or nothing; nothing either where no gradient is wanted."""
    inputs = CASES["plain"].build(dtype)
    weights = weights_of(inputs)
    case, x = inputs.case, inputs.x.clone().requires_grad_()
    for save, shape in ((True, (case.tokens * case.top_k, 2, case.intermediate)), (False, (0,))):
        out = ops.moe_experts(x, inputs.index, inputs.route_weights, weights, save=save)
        saved = out.grad_fn.saved_tensors[0]  # type: ignore[union-attr]
        assert saved.shape == shape and saved.dtype == dtype and (saved.numel() == 0) != save
    for save in (True, False):
        arguments = (inputs.x, inputs.index, inputs.route_weights, weights.id, [], [], None, 0.0, 0, save)
        _, saved = torch.ops.ktft.moe_experts(*arguments)
        assert (saved.numel() == 0) != save


@pytest.mark.parametrize("isa", LEVELS)
def test_waves_do_not_change_bits(isa: str) -> None:
    """A call that needs several waves (more rows than scratch holds at one thread) equals the same call in fewer,
    larger waves."""
    generator = torch.Generator().manual_seed(0)
    e, h, i, r, t, k = 4, 32, 2048, 4, 4000, 2
    gate, up = (torch.randn(e, i, h, generator=generator).bfloat16() / h**0.5 for _ in range(2))
    weights = ExpertWeights.from_tensors(gate, up, torch.randn(e, h, i, generator=generator).bfloat16() / i**0.5)
    lora = [torch.randn(s, generator=generator) / s[2] ** 0.5 for s in lora_shapes(e, h, i, r)]
    x = torch.randn(t, h, generator=generator).bfloat16()
    index = torch.stack([torch.randperm(e, generator=generator)[:k] for _ in range(t)])
    results = []
    for threads in (1, 16):  # the wave's budget is per thread: many waves at one thread, one to four at sixteen
        x_leaf, leaves = x.clone().requires_grad_(), [f.clone().requires_grad_() for f in lora]
        with ops.override(isa=isa, threads=threads):
            out = ops.moe_experts(x_leaf, index, torch.full((t, k), 0.5), weights, lora=leaves, scaling=[2.0])
            results.append((out.detach(), *torch.autograd.grad(out, [x_leaf, *leaves], torch.ones_like(out))))
    assert_same_bits(results[0], results[1])


# --- purity


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_several_forwards_before_backwards_in_any_order(order: tuple[int, ...]) -> None:
    inputs = [CASES[name].build(torch.float32) for name in ("plain", "two adapters", "many rows")]
    weights = [weights_of(i) for i in inputs]
    expected = [run(i, w) for i, w in zip(inputs, weights, strict=True)]
    leaves, outs = [], []
    for i, w in zip(inputs, weights, strict=True):
        tensors = [t.clone().requires_grad_() for t in (i.x, i.route_weights, *i.lora)]
        leaves.append(tensors)
        outs.append(ops.moe_experts(tensors[0], i.index, tensors[1], w, lora=tensors[2:], scaling=i.scaling))
    for n in order:
        gradients = torch.autograd.grad(outs[n], leaves[n], inputs[n].grad)
        assert_same_bits((outs[n].detach(), *gradients), expected[n])


def test_two_python_threads_at_once() -> None:
    inputs = [CASES[name].build(torch.bfloat16) for name in ("many rows", "two adapters")]
    weights = [weights_of(i) for i in inputs]
    expected = [run(i, w) for i, w in zip(inputs, weights, strict=True)]
    failures: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for _ in range(20):
                assert_same_bits(run(inputs[n], weights[n]), expected[n])
        except BaseException as error:  # handed to the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in (0, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_inputs_are_not_changed() -> None:
    inputs = CASES["dropout, adapters"].build(torch.bfloat16)
    before = copy.deepcopy(inputs)
    run(inputs, weights_of(inputs))
    for name in ("x", "grad", "index", "route_weights", "gate", "up", "down"):
        assert torch.equal(getattr(inputs, name), getattr(before, name)), name


def test_a_hundred_forwards_without_backward_leave_memory_flat() -> None:
    inputs = CASES["many rows"].build(torch.bfloat16)
    weights = weights_of(inputs)
    x = inputs.x.repeat(10, 1).requires_grad_()
    call = partial(
        ops.moe_experts, x, inputs.index.repeat(10, 1), inputs.route_weights.repeat(10, 1), weights,
        lora=inputs.lora, scaling=inputs.scaling,
    )  # fmt: skip
    for _ in range(3):
        call()
    gc.collect()
    before = resident_anonymous_kb()
    for _ in range(100):
        call()
    gc.collect()
    # What one call keeps for backward. A hundred leaks would be a hundred times that; the rest of the process may grow
    # by a little meanwhile in a long test run.
    saved_kb = 3000 * 2 * 2 * 66 * 2 // 1024
    assert resident_anonymous_kb() - before < 25 * saved_kb


def test_bf16_lora_copies_serve_but_do_not_train() -> None:
    inputs = CASES["plain"].build(torch.bfloat16)
    weights = weights_of(inputs)
    half = [t.bfloat16() for t in inputs.lora]
    arguments = (inputs.x, inputs.index, inputs.route_weights, weights)
    out = ops.moe_experts(*arguments, lora=half, scaling=inputs.scaling)
    # products use the bf16 rounding of fp32 factors anyway
    assert torch.equal(out, ops.moe_experts(*arguments, lora=inputs.lora, scaling=inputs.scaling))
    half[0].requires_grad_()
    with pytest.raises(ValueError, match="float32"):
        ops.moe_experts(*arguments, lora=half, scaling=inputs.scaling).sum().backward()


# --- experts and tokens at the edges


def edge_case(
    index: list[list[int]], *, biased: bool = False
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor | None]]:
    generator = torch.Generator().manual_seed(0)
    e, h, i = 4, 16, 24
    matrices = [torch.randn(s, generator=generator).bfloat16() for s in ((e, i, h), (e, i, h), (e, h, i))]
    biases = [torch.ones(e, n) for n in (i, i, h)] if biased else None
    weights = ExpertWeights.from_tensors(*matrices, biases=biases)
    ids = torch.tensor(index, dtype=torch.int64).reshape(len(index), -1 if index else 2)
    leaves = [torch.randn(len(index), h, generator=generator), torch.rand(ids.shape, generator=generator)]
    leaves += [torch.randn(s, generator=generator) for s in lora_shapes(e, h, i, 3)]
    leaves = [t.requires_grad_() for t in leaves]
    out = ops.moe_experts(leaves[0], ids, leaves[1], weights, lora=leaves[2:], scaling=[1.0])
    out.sum().backward()
    return out, leaves, [t.grad for t in leaves]


def test_experts_without_tokens_get_exact_zero_gradients() -> None:
    _, _, gradients = edge_case([[0, 1], [1, 0], [0, 1]])
    for gradient in gradients[2:]:
        assert gradient is not None
        assert (gradient[2:] == 0).all() and (gradient[:2] != 0).any()


@pytest.mark.parametrize("per_token", [False, True], ids=["adapters add up", "adapter per token"])
def test_gradients_in_memory_that_is_used_again(per_token: bool) -> None:
    """Factors of 1 MiB and more: what the last step left there must not show, what is still held must not change."""
    inputs = Case(64, 1, 512, 16, 8, 40, adapters=2, per_token=per_token, seed=21).build(torch.bfloat16)
    inputs.index[:] = torch.arange(40)[:, None] % 3 * 5  # experts 0, 5 and 10
    weights = weights_of(inputs)
    kept = run(inputs, weights)
    copies = [t.clone() for t in kept]
    again = run(inputs, weights)
    assert_same_bits(kept, copies)
    large = [t for t in again if t.nbytes >= 2**20]
    blocks = {torch.frombuffer(block, dtype=torch.int8).data_ptr() for block in ops._buffers._blocks}
    assert len(large) == 6 and all(t.data_ptr() in blocks for t in large)
    for tensor in large:
        tensor.fill_(float("nan"))
    del tensor, large, again
    assert_same_bits(run(inputs, weights), copies)
    assert len(ops._buffers._blocks) == len(blocks), "the third step took the second one's memory"


def test_all_tokens_to_one_expert() -> None:
    _, _, gradients = edge_case([[2], [2], [2], [2], [2]])
    for gradient in gradients[2:]:
        assert gradient is not None and (gradient[[0, 1, 3]] == 0).all() and (gradient[2] != 0).any()


@pytest.mark.parametrize("biased", [False, True])
def test_ids_beyond_the_experts_add_nothing(biased: bool) -> None:
    out, _, gradients = edge_case([[0, 1], [4, 9], [1, 4]], biased=biased)
    assert (out[1] == 0).all()
    d_hidden, d_route = gradients[0], gradients[1]
    assert d_hidden is not None and d_route is not None
    assert (d_hidden[1] == 0).all() and (d_route[1] == 0).all() and d_route[2, 1] == 0 and d_route[2, 0] != 0


@pytest.mark.parametrize("biased", [False, True])
def test_no_tokens(biased: bool) -> None:
    out, _, gradients = edge_case([], biased=biased)
    assert out.shape == (0, 16)
    for gradient in gradients:
        assert gradient is not None and (gradient == 0).all()


# --- autograd


def test_opcheck() -> None:
    for dtype in DTYPES:
        for name in ("plain", "adapter per token", "no adapter"):
            inputs = CASES[name].build(dtype)
            weights = weights_of(inputs)
            for save in (True, False):
                arguments = (
                    inputs.x.clone().requires_grad_(), inputs.index, inputs.route_weights.clone().requires_grad_(),
                    weights.id, [t.clone().requires_grad_() for t in inputs.lora], inputs.scaling,
                    inputs.adapter_ids, 0.0, 0, save,
                )  # fmt: skip
                torch.library.opcheck(torch.ops.ktft.moe_experts.default, arguments)


@pytest.mark.parametrize("name", ["plain", "dropout"])
def test_checkpointing_gives_the_same_bits(name: str) -> None:
    inputs = CASES[name].build(torch.bfloat16)
    weights = weights_of(inputs)
    expected = run(inputs, weights)
    leaves = [t.clone().requires_grad_() for t in (inputs.x, inputs.route_weights, *inputs.lora)]

    def block(x: torch.Tensor, route_weights: torch.Tensor, *lora: torch.Tensor) -> torch.Tensor:
        return ops.moe_experts(
            x, inputs.index, route_weights, weights, lora=lora, scaling=inputs.scaling,
            dropout_p=inputs.case.dropout, dropout_seed=inputs.dropout_seed,
        )  # fmt: skip

    out = checkpoint(block, *leaves, use_reentrant=False)
    assert_same_bits((out.detach(), *torch.autograd.grad(out, leaves, inputs.grad)), expected)


def test_selective_checkpointing_keeps_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = CASES["plain"].build(torch.bfloat16)
    weights = weights_of(inputs)
    expected = run(inputs, weights)
    calls = []
    kernel = ops._C.forward
    monkeypatch.setattr(ops._C, "forward", lambda *a: (calls.append(1), kernel(*a))[1])
    leaves = [t.clone().requires_grad_() for t in (inputs.x, inputs.route_weights, *inputs.lora)]

    def policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        keep = op == torch.ops.ktft.moe_experts.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def block(x: torch.Tensor, route_weights: torch.Tensor, *lora: torch.Tensor) -> torch.Tensor:
        return ops.moe_experts(x * 1.0, inputs.index, route_weights, weights, lora=lora, scaling=inputs.scaling)

    out = checkpoint(
        block, *leaves, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy)
    )
    gradients = torch.autograd.grad(out, leaves, inputs.grad)
    assert len(calls) == 1, "the recomputation must take the op's outputs from the cache"
    assert_same_bits((out.detach(), *gradients), expected)


def test_backward_after_the_weights_were_deleted() -> None:
    inputs = CASES["plain"].build(torch.float32)
    weights = weights_of(inputs)
    expected = run(inputs, weights)
    x = inputs.x.clone().requires_grad_()
    out = ops.moe_experts(x, inputs.index, inputs.route_weights, weights, lora=inputs.lora, scaling=inputs.scaling)
    handle = weights.id
    del weights
    gc.collect()
    (gradient,) = torch.autograd.grad(out, x, inputs.grad)
    assert torch.equal(gradient, expected[1])
    del out
    gc.collect()
    with pytest.raises(RuntimeError, match=rf"expert weights {handle} do not exist"):
        torch.ops.ktft.moe_experts(inputs.x, inputs.index, inputs.route_weights, handle, [], [], None, 0.0, 0, False)


def test_weights_are_shared_by_deepcopy_and_refuse_pickle() -> None:
    weights = weights_of(CASES["plain"].build(torch.float32))
    assert copy.deepcopy({"a": weights})["a"] is weights
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(weights)
    assert expert_weights.lookup(weights.id) is weights


# --- dtypes


def test_autocast_sets_the_compute_dtype_and_keeps_the_output_dtype() -> None:
    inputs = CASES["plain"].build(torch.float32)
    weights = weights_of(inputs)
    x = inputs.x.clone().requires_grad_()
    arguments = (inputs.index, inputs.route_weights, weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ops.moe_experts(x, *arguments)
    assert out.dtype == torch.float32
    assert torch.equal(out, ops.moe_experts(inputs.x.bfloat16(), *arguments).float())
    assert not torch.equal(out, ops.moe_experts(inputs.x, *arguments))
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert gradient.dtype == torch.float32


def test_fp16_hidden_states_are_computed_in_fp32() -> None:
    inputs = CASES["plain"].build(torch.float32)
    weights = weights_of(inputs)
    out = ops.moe_experts(inputs.x.half(), inputs.index, inputs.route_weights, weights)
    assert torch.equal(
        out, ops.moe_experts(inputs.x.half().float(), inputs.index, inputs.route_weights, weights).half()
    )


def test_non_contiguous_inputs() -> None:
    inputs = CASES["plain"].build(torch.float32)
    weights = weights_of(inputs)
    expected = ops.moe_experts(inputs.x, inputs.index, inputs.route_weights, weights)
    strided = [t.repeat_interleave(2, 1)[:, ::2] for t in (inputs.x, inputs.index, inputs.route_weights)]
    assert not strided[0].is_contiguous()
    assert torch.equal(ops.moe_experts(*strided, weights), expected)


# --- errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(17, 31)}, r"hidden must be \[T, 32\].*\(17, 31\)"),
        ({"hidden": torch.zeros(17, 32, dtype=torch.float64)}, "bfloat16, float16 or float32"),
        ({"top_k_index": torch.zeros(17, 2)}, "whole numbers"),
        ({"top_k_index": torch.full((17, 2), -1)}, r"top_k_index\[0, 0\] is -1"),
        ({"top_k_index": torch.zeros(16, 2, dtype=torch.int64)}, r"top_k_index must be int64 \[17, k\]"),
        ({"top_k_weights": torch.zeros(17, 3)}, "top_k_weights must be"),
        ({"scaling": [1.0, 2.0]}, "need 12 LoRA tensors, got 6"),
        ({"adapter_ids": torch.full((17,), 1)}, r"adapter_ids must lie in \[-1, 0\]"),
        ({"adapter_ids": torch.zeros(5, dtype=torch.int64)}, r"adapter_ids must be int64 \[17\]"),
        ({"dropout_p": 1.0}, r"dropout_p must lie in \[0, 1\)"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], message: str) -> None:
    inputs = CASES["plain"].build(torch.float32)
    arguments: dict[str, object] = {
        "hidden": inputs.x, "top_k_index": inputs.index, "top_k_weights": inputs.route_weights,
        "weights": weights_of(inputs), "lora": inputs.lora, "scaling": inputs.scaling,
    }  # fmt: skip
    arguments.update(change)
    with pytest.raises(ValueError, match=message):
        ops.moe_experts(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [-2, 1])
def test_adapter_ids_that_change_after_they_were_checked(wrong: int) -> None:
    """They index memory, so the kernels look again where they use them."""
    inputs = CASES["plain"].build(torch.float32)
    weights, ids = weights_of(inputs), torch.zeros(len(inputs.x), dtype=torch.int64)
    call = ops._Call(
        inputs.x, inputs.index, inputs.route_weights, weights.id, list(inputs.lora), [1.0], ids, 0.0, 0
    )  # fmt: skip
    checked, _held = ops._layer_call(call, weights)
    ids[3] = wrong
    with pytest.raises(ValueError, match=rf"adapter_ids\[3\] is {wrong}; expected -1 to 0"):
        ops._C.forward(checked, torch.empty_like(inputs.x).data_ptr(), 0)


def test_lora_tensors_of_the_wrong_shape_are_named() -> None:
    inputs = CASES["plain"].build(torch.float32)
    lora = list(inputs.lora)
    lora[5] = lora[5].transpose(1, 2).contiguous()
    with pytest.raises(ValueError, match=r"adapter 0: down_b must be \(4, 32, 8\)"):
        ops.moe_experts(inputs.x, inputs.index, inputs.route_weights, weights_of(inputs), lora=lora, scaling=[1.0])
