"""The torch op ``ktft::moe_experts``: schema, CPU and CUDA entries, fake, autograd. The only importer of the extension.

What backward needs is an *output* of the forward op (torch.library's rule), so that selective checkpointing can keep
it and torch.compile can see it. The op is pure: no state between calls, any number of forwards before any number of
backwards, from several threads. Modules call :func:`moe_experts`; the raw op is ``torch.ops.ktft.moe_experts``.

Environment, read once at import: ``KTFT_ISA`` (a level of :func:`cpu_report`; a level above the machine is an error;
``amx-soft`` is for tests, see :data:`TEST_LEVELS`) and ``KTFT_THREADS`` (default: ``torch.get_num_threads()`` at each
call).
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from ktft import _C
from ktft.activation import GATE_FUNCTIONS
from ktft.buffers import Buffers
from ktft.weights import (
    BLOCKS,
    CODED,
    LORA_NAMES,
    PLAIN,
    SCALE_FORMATS,
    ExpertMatrices,
    ExpertWeights,
    Scales,
    ZeroPoints,
    lookup,
    lora_shapes,
)

MAX_RANK = 256
MAX_ADAPTERS: int = _C.MAX_ADAPTERS
_COMPUTE = {torch.bfloat16: 0, torch.float32: 1}
_FORMATS = (
    "bf16", "fp32", "fp16", "fp8", "int8", "int4", "mxfp4", "nvfp4", "int8_plain", "gptq", "awq",
    "bf16/2", "fp32/2", "fp16/2",
    "q8_0", "q4_0", "q4_1", "q4_k", "q6_k", "gguf_mxfp4",
)  # fmt: skip
"""In the order of csrc/kernels/table.h; with /2 where a column step of 2 makes it another one."""
_LORA_FORMATS = {torch.bfloat16: 0, torch.float32: 1}
_buffers = Buffers()


# --- ISA level and threads


TEST_LEVELS = ("amx-soft",)
"""Twins of levels in plain C++, which run on every machine and slowly. Never chosen and never listed; ``KTFT_ISA`` and
:func:`override` take them, so that tests can run a level's code where its instructions are missing."""


def isa_levels(features: dict[str, bool] | None = None, *, ask_for_tiles: bool = True) -> dict[str, str]:
    """Every ISA level, lowest first, with the CPU features it lacks ('' if it may run on this machine, or on
    ``features``).

    Args:
        features: of a machine; None takes this one's.
        ask_for_tiles: on this machine, have Linux give the process tile registers if only that is missing for amx.
            Without asking, amx counts as unavailable.
    """
    levels = _C.isa_levels(_C.cpu_features(ask_for_tiles) if features is None else features)
    return {name: missing for name, missing in levels if name not in TEST_LEVELS}


def choose_isa(requested: str | None, features: dict[str, bool] | None = None) -> tuple[str, str]:
    """The level to run and why: the best one available, or ``requested`` (a level's name, or None / "auto").

    Raises:
        ValueError: the requested level is unknown, or above the machine.
    """
    if requested in TEST_LEVELS:
        return requested, "asked for by KTFT_ISA; for tests only"
    levels = isa_levels(features, ask_for_tiles=requested in (None, "", "auto", "amx"))
    available = [name for name, missing in levels.items() if not missing]
    if requested in (None, "", "auto"):
        above = [f"{name} lacks {missing}" for name, missing in levels.items() if missing]
        return available[-1], "the best level this CPU offers" + (f" ({'; '.join(above)})" if above else "")
    assert requested is not None
    if requested not in levels:
        near = difflib.get_close_matches(requested, levels, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"KTFT_ISA={requested!r} is not a level; valid: auto, {', '.join(levels)}{hint}")
    if levels[requested]:
        raise ValueError(
            f"KTFT_ISA={requested} cannot run on this CPU, which lacks {levels[requested]}. "
            f"Available: {', '.join(available)}; unset KTFT_ISA to take {available[-1]}."
        )
    return requested, "asked for by KTFT_ISA"


def _threads_from_environment() -> int | None:
    text = os.environ.get("KTFT_THREADS")
    if not text:
        return None
    if not text.isdigit() or not 1 <= int(text) <= 4096:
        raise ValueError(f"KTFT_THREADS={text!r} must be a whole number from 1 to 4096")
    return int(text)


_LEVELS = tuple(name for name, _missing in _C.isa_levels({}))
_isa, _isa_reason = choose_isa(os.environ.get("KTFT_ISA"))
_threads: int | None = _threads_from_environment()


def num_threads() -> int:
    """Threads the kernels use: ``KTFT_THREADS`` if set, else ``torch.get_num_threads()``."""
    return torch.get_num_threads() if _threads is None else _threads


@contextlib.contextmanager
def override(*, isa: str | None = None, threads: int | None = None) -> Iterator[None]:
    """Run the kernels at another ISA level or thread count (process-wide) within the block. For tests and
    benchmarks."""
    global _isa, _threads
    before = _isa, _threads
    try:
        if isa is not None:
            _isa = choose_isa(isa)[0]
        if threads is not None:
            _threads = threads
        yield
    finally:
        _isa, _threads = before


def cpu_report() -> dict[str, Any]:
    """What the kernels see: ``features``, ``levels`` (available), ``missing`` (per level), ``chosen``, ``reason``,
    ``threads``, ``build``."""
    levels = isa_levels()
    return {
        "features": _C.cpu_features(True),
        "levels": [name for name, missing in levels.items() if not missing],
        "missing": {name: missing for name, missing in levels.items() if missing},
        "chosen": _isa,
        "reason": _isa_reason,
        "threads": num_threads(),
        "build": {"compiler": f"g++ {_C.COMPILER}", "flags": _C.BUILD_FLAGS, "extension": _C.__file__},
    }


# --- schema and checks

_library = torch.library.Library("ktft", "DEF")
_ARGUMENTS = (
    "Tensor hidden, Tensor top_k_index, Tensor top_k_weights, int weights, Tensor[] lora, float[] scaling, "
    "Tensor? adapter_ids, float dropout_p, int dropout_seed"
)
_library.define(f"moe_experts({_ARGUMENTS}, bool save) -> (Tensor, Tensor)")
_library.define(
    f"moe_experts_backward(Tensor grad, Tensor saved, {_ARGUMENTS}, "
    "bool need_hidden, bool need_weights, bool[] need_lora) -> (Tensor, Tensor, Tensor[])"
)


class _Call(NamedTuple):
    """``_ARGUMENTS``: what forward and backward share, in the schema's order."""

    hidden: torch.Tensor
    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor
    weights: int
    lora: list[torch.Tensor]
    scaling: list[float]
    adapter_ids: torch.Tensor | None
    dropout_p: float
    dropout_seed: int

    def saved_shape(self, experts: ExpertWeights, save: bool) -> tuple[int, ...]:
        """Gate and up pre-activations [S, 2, I] in the compute dtype, or nothing."""
        return (self.top_k_index.numel(), 2, experts.intermediate_size) if save else (0,)


_Forward = Callable[[_Call, bool], tuple[torch.Tensor, torch.Tensor]]
"""(call, save) -> (out [T, H], saved)"""
_Gradients = tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]
"""Of hidden, top_k_weights and each LoRA tensor; empty tensors for those that are not needed."""
_Backward = Callable[[torch.Tensor, torch.Tensor, _Call, bool, bool, list[bool]], _Gradients]
"""(grad [T, H], saved, call, need_hidden, need_weights, need_lora: one per adapter) -> gradients"""


def _forward_entry(forward: _Forward) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """``forward`` as torch calls it: with the schema's arguments in a row."""
    return lambda *arguments: forward(_Call(*arguments[:-1]), arguments[-1])


def _backward_entry(backward: _Backward) -> Callable[..., _Gradients]:
    shared = len(_Call._fields)
    return lambda grad, saved, *rest: backward(grad, saved, _Call(*rest[:shared]), *rest[shared:])


def _check(call: _Call) -> ExpertWeights:
    """The weights of a call whose shapes and dtypes fit them; the kernels take these on trust.

    Raises:
        ValueError: naming the argument, what it is and what was expected.
    """
    experts = lookup(call.weights)
    hidden, index, route_weights, ids = call.hidden, call.top_k_index, call.top_k_weights, call.adapter_ids
    h = experts.hidden_size
    if hidden.dim() != 2 or hidden.shape[1] != h or hidden.dtype not in _COMPUTE:
        raise ValueError(f"hidden must be [T, {h}] in bfloat16 or float32, got {tuple(hidden.shape)} {hidden.dtype}")
    tokens = hidden.shape[0]
    if index.dim() != 2 or index.shape[0] != tokens or index.dtype != torch.int64:
        raise ValueError(f"top_k_index must be int64 [{tokens}, k], got {index.dtype} {tuple(index.shape)}")
    if route_weights.shape != index.shape or not route_weights.is_floating_point():
        raise ValueError(
            f"top_k_weights must be floating-point {tuple(index.shape)}, "
            f"got {route_weights.dtype} {tuple(route_weights.shape)}"
        )
    adapters = len(call.scaling)
    if len(call.lora) != 6 * adapters:
        raise ValueError(f"{adapters} scaling factors need {6 * adapters} LoRA tensors, got {len(call.lora)}")
    if adapters > MAX_ADAPTERS:
        raise ValueError(f"{adapters} adapters in one call; at most {MAX_ADAPTERS}")
    for n in range(adapters):
        _check_adapter(n, call.lora[6 * n : 6 * n + 6], experts)
    if ids is not None and (ids.shape != (tokens,) or ids.dtype != torch.int64):
        raise ValueError(f"adapter_ids must be int64 [{tokens}], got {ids.dtype} {tuple(ids.shape)}")
    if not 0.0 <= call.dropout_p < 1.0:
        raise ValueError(f"dropout_p must lie in [0, 1), got {call.dropout_p}")
    return experts


def _check_adapter(n: int, tensors: list[torch.Tensor], experts: ExpertWeights) -> None:
    first = tensors[0]
    rank = first.shape[1] if first.dim() == 3 else 0
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"adapter {n}: gate_a must be [E, r, H] with 1 <= r <= {MAX_RANK}, got {tuple(first.shape)}")
    shapes = lora_shapes(experts.num_experts, experts.hidden_size, experts.intermediate_size, rank)
    for name, tensor, shape in zip(LORA_NAMES, tensors, shapes, strict=True):
        if tuple(tensor.shape) != shape or tensor.dtype != first.dtype or tensor.dtype not in _LORA_FORMATS:
            raise ValueError(
                f"adapter {n}: {name} must be {shape} in float32 (or bfloat16, without gradients), all six alike, "
                f"got {tuple(tensor.shape)} {tensor.dtype}"
            )
        if tensor.device.type not in ("cpu", "meta"):
            raise ValueError(
                f"adapter {n}: {name} lies on {tensor.device}; expert LoRA lives on the CPU with the experts"
            )


# --- CPU


def _layer_call(call: _Call, experts: ExpertWeights) -> tuple[_C.LayerCall, list[torch.Tensor]]:
    """The extension's view of a checked call, and the tensors whose addresses it holds."""
    x = call.hidden.contiguous()
    index = call.top_k_index.contiguous()
    route_weights = call.top_k_weights.to(torch.float32).contiguous()
    factors = [t.contiguous() for t in call.lora]
    held = [x, index, route_weights, *factors]
    ids = 0
    if call.adapter_ids is not None:
        adapter_ids = call.adapter_ids.contiguous()
        if adapter_ids.numel():
            low, high = int(adapter_ids.min()), int(adapter_ids.max())
            if low < -1 or high >= len(call.scaling):
                raise ValueError(f"adapter_ids must lie in [-1, {len(call.scaling) - 1}], got {low} .. {high}")
        held.append(adapter_ids)
        ids = adapter_ids.data_ptr()
    adapters = []
    for n, scaling in enumerate(call.scaling):
        six = factors[6 * n : 6 * n + 6]
        adapters.append(([t.data_ptr() for t in six], _LORA_FORMATS[six[0].dtype], six[0].shape[1], scaling))
    a = experts.activation
    layer_call = _C.LayerCall(
        tokens=x.shape[0],
        top_k=index.shape[1],
        experts=experts.num_experts,
        hidden=experts.hidden_size,
        intermediate=experts.intermediate_size,
        x=x.data_ptr(),
        top_k_index=index.data_ptr(),
        top_k_weights=route_weights.data_ptr(),
        matrices=_matrices(experts),
        biases=[0, 0, 0] if experts.biases is None else [bias.data_ptr() for bias in experts.biases],
        activation=(GATE_FUNCTIONS.index(a.function), a.alpha, a.gate_max, a.up_limit, a.up_shift),
        adapters=adapters,
        adapter_ids=ids,
        dropout_p=call.dropout_p,
        dropout_seed=call.dropout_seed & 0xFFFFFFFFFFFFFFFF,
        compute=_COMPUTE[x.dtype],
        isa=_LEVELS.index(_isa),
        threads=num_threads(),
        residency_known=experts.residency_known,
    )
    return layer_call, held


_described: weakref.WeakKeyDictionary[ExpertWeights, list[tuple[Any, ...]]] = weakref.WeakKeyDictionary()


def _matrices(experts: ExpertWeights) -> list[tuple[Any, ...]]:
    """The extension's view of gate, up and down; made once, since a call on one token takes only milliseconds."""
    found = _described.get(experts)
    if found is None:
        found = _described[experts] = [
            (
                m.addresses.ctypes.data,
                m.row_stride,
                _format(m),
                m.transposed,
                *_scales(m.scales),
                *_zeros(m.zero_points),
            )
            for m in (experts.gate, experts.up, experts.down)
        ]
    return found


def _format(matrices: ExpertMatrices) -> int:
    return _FORMATS.index(matrices.format if matrices.column_step == 1 else f"{matrices.format}/2")


def _scales(scales: Scales | None) -> tuple[int, int, int, int, int, int, int, bool]:
    if scales is None:
        return 0, 0, 0, 1, 1, 0, 0, False
    factors = 0 if scales.factors is None else scales.factors.ctypes.data
    format_code = SCALE_FORMATS.index(scales.format)
    return (
        scales.addresses.ctypes.data,
        scales.row_stride,
        format_code,
        scales.rows,
        scales.columns,
        scales.first_row,
        factors,
        scales.divides,
    )


def _zeros(zeros: ZeroPoints | None) -> tuple[int, int, bool]:
    return (0, 0, False) if zeros is None else (zeros.addresses.ctypes.data, zeros.row_stride, zeros.less_one)


def _forward_cpu(call: _Call, save: bool) -> tuple[torch.Tensor, torch.Tensor]:
    experts = _check(call)
    layer_call, _held = _layer_call(call, experts)
    out = torch.empty_like(call.hidden, memory_format=torch.contiguous_format)
    saved = _buffers.empty(call.saved_shape(experts, save), call.hidden.dtype)
    _C.forward(layer_call, out.data_ptr(), saved.data_ptr() if save else 0)
    return out, saved


def _backward_cpu(
    grad: torch.Tensor, saved: torch.Tensor, call: _Call, need_hidden: bool, need_weights: bool, need_lora: list[bool]
) -> _Gradients:
    experts, hidden = _check(call), call.hidden
    expected = call.saved_shape(experts, saved.dim() == 3)
    if grad.shape != hidden.shape or tuple(saved.shape) != expected or saved.dtype != hidden.dtype:
        raise ValueError(
            f"backward needs a gradient of shape {tuple(hidden.shape)} and saved {expected} {hidden.dtype}, "
            f"got {tuple(grad.shape)} and {tuple(saved.shape)} {saved.dtype}"
        )
    need_factors = [need_lora[n // 6] for n in range(len(call.lora))]
    if any(t.dtype != torch.float32 for t, need in zip(call.lora, need_factors, strict=True) if need):
        raise ValueError("gradients of LoRA tensors need them in float32; bfloat16 copies are for serving")
    layer_call, _held = _layer_call(call, experts)
    grad, saved = grad.to(hidden.dtype).contiguous(), saved.contiguous()
    d_hidden = torch.empty(hidden.shape if need_hidden else (0,), dtype=hidden.dtype)
    d_weights = torch.empty(call.top_k_weights.shape if need_weights else (0,), dtype=torch.float32)
    d_lora = [
        _buffers.empty(t.shape if need else (0,), torch.float32)
        for t, need in zip(call.lora, need_factors, strict=True)
    ]
    _C.backward(
        layer_call,
        grad.data_ptr(),
        saved.data_ptr() if saved.numel() else 0,
        d_hidden.data_ptr() if need_hidden else 0,
        d_weights.data_ptr() if need_weights else 0,
        [t.data_ptr() if need else 0 for t, need in zip(d_lora, need_factors, strict=True)],
    )
    return d_hidden, d_weights.to(call.top_k_weights.dtype), d_lora


_library.impl("moe_experts", _forward_entry(_forward_cpu), "CPU")
_library.impl("moe_experts_backward", _backward_entry(_backward_cpu), "CPU")


# --- CUDA: through pinned host memory


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _on_host(arguments: Sequence[Any], device: torch.device) -> list[Any]:
    """The same arguments with every CUDA tensor copied to pinned memory; waits for the copies."""
    host = [_to_host(a) if isinstance(a, torch.Tensor) else a for a in arguments]
    torch.cuda.current_stream(device).synchronize()
    return host


def _forward_cuda(call: _Call, save: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states on the accelerator; experts, and what backward needs of them, on the host."""
    device = call.hidden.device
    out, saved = _forward_cpu(_Call(*_on_host(call, device)), save)
    return out.pin_memory().to(device, non_blocking=True), saved


def _backward_cuda(grad: torch.Tensor, saved: torch.Tensor, call: _Call, *needs: Any) -> _Gradients:
    device = grad.device
    grad, saved, *shared = _on_host((grad, saved, *call), device)
    d_hidden, d_weights, d_lora = _backward_cpu(grad, saved, _Call(*shared), *needs)
    return d_hidden.to(device), d_weights.to(device), d_lora


_library.impl("moe_experts", _forward_entry(_forward_cuda), "CUDA")
_library.impl("moe_experts_backward", _backward_entry(_backward_cuda), "CUDA")


# --- fake and autograd


def _forward_fake(call: _Call, save: bool) -> tuple[torch.Tensor, torch.Tensor]:
    saved = torch.empty(call.saved_shape(_check(call), save), dtype=call.hidden.dtype, device="cpu")
    return torch.empty_like(call.hidden, memory_format=torch.contiguous_format), saved


def _backward_fake(
    grad: torch.Tensor, saved: torch.Tensor, call: _Call, need_hidden: bool, need_weights: bool, need_lora: list[bool]
) -> _Gradients:
    d_hidden = call.hidden.new_empty(call.hidden.shape if need_hidden else (0,))
    d_weights = call.top_k_weights.new_empty(call.top_k_weights.shape if need_weights else (0,))
    d_lora = [
        torch.empty(t.shape if need_lora[n // 6] else (0,), dtype=torch.float32, device=t.device)
        for n, t in enumerate(call.lora)
    ]
    return d_hidden, d_weights, d_lora


torch.library.register_fake("ktft::moe_experts", _forward_entry(_forward_fake), lib=_library)
torch.library.register_fake("ktft::moe_experts_backward", _backward_entry(_backward_fake), lib=_library)


class _Experts(torch.autograd.Function):
    """The op's autograd formula.

    ``torch.library.register_autograd`` does the same, at the cost of a walk over the nested arguments in both
    directions: 0.25 of 4.5 ms a token, forward and backward, at Qwen3-30B's shape (two Zen 5 cores, 2026-12-01).
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, save: bool, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor,
        weights: int, scaling: list[float], adapter_ids: torch.Tensor | None, dropout_p: float, dropout_seed: int,
        *lora: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        call = _Call(
            hidden, top_k_index, top_k_weights, weights, list(lora), scaling, adapter_ids, dropout_p, dropout_seed
        )
        out, saved = _below_autograd(torch.ops.ktft.moe_experts.default, *call, save)
        ctx.save_for_backward(saved, hidden, top_k_index, top_k_weights, adapter_ids, *lora)
        ctx.mark_non_differentiable(saved)
        ctx.set_materialize_grads(False)  # else torch fills a zero gradient as large as what was saved
        ctx.weights = lookup(weights)  # a strong reference: backward works after the model is gone
        ctx.scaling, ctx.dropout_p, ctx.dropout_seed = scaling, dropout_p, dropout_seed
        return out, saved

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor | None, _grad_saved: None) -> tuple[Any, ...]:  # type: ignore[override]
        saved, hidden, top_k_index, top_k_weights, adapter_ids, *lora = ctx.saved_tensors
        if grad_out is None:
            return (None,) * len(ctx.needs_input_grad)
        _, need_hidden, _, need_weights, _, _, _, _, _, *need_factors = ctx.needs_input_grad
        call = _Call(
            hidden, top_k_index, top_k_weights, ctx.weights.id, lora, ctx.scaling, adapter_ids,
            ctx.dropout_p, ctx.dropout_seed,
        )  # fmt: skip
        need_lora = [any(need_factors[6 * n : 6 * n + 6]) for n in range(len(call.scaling))]
        op = torch.ops.ktft.moe_experts_backward.default
        # With create_graph the result has to know that it has no derivative.
        run = op if torch.is_grad_enabled() else functools.partial(_below_autograd, op)
        d_hidden, d_weights, d_lora = run(grad_out, saved, *call, need_hidden, need_weights, need_lora)
        d_factors = (g if need else None for g, need in zip(d_lora, need_factors, strict=True))
        return (
            None, d_hidden if need_hidden else None, None, d_weights if need_weights else None,
            None, None, None, None, None, *d_factors,
        )  # fmt: skip


def _below_autograd(op: Any, *arguments: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


def _forward_autograd(call: _Call, save: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if torch.is_grad_enabled() and any(t.requires_grad for t in (call.hidden, call.top_k_weights, *call.lora)):
        return _Experts.apply(save, *call[:4], *call[5:], *call.lora)  # type: ignore[no-any-return, no-untyped-call]
    return _below_autograd(torch.ops.ktft.moe_experts.default, *call, save)  # type: ignore[no-any-return]


def _double_backward(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(
        "ktft::moe_experts can be differentiated once; its gradient has no derivative (create_graph=True, gradient "
        "penalties and Hessians need a model in stock transformers)"
    )


_library.impl("moe_experts", _forward_entry(_forward_autograd), "Autograd")
torch.library.register_autograd("ktft::moe_experts_backward", _double_backward, lib=_library)


# --- what modules call


def moe_experts(
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    weights: ExpertWeights,
    *,
    lora: Sequence[torch.Tensor] = (),
    scaling: Sequence[float] = (),
    adapter_ids: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    save: bool = True,
) -> torch.Tensor:
    """Routed experts of one layer with their LoRA adapters: [T, H] -> [T, H] in hidden's dtype, on hidden's device.

    Differentiable in hidden, top_k_weights and lora. The compute dtype is autocast's if autocast is enabled, else
    hidden's: bf16 (bf16 products, fp32 accumulation) or fp32. fp16 hidden states are computed in fp32, which holds
    every fp16 value.

    Args:
        hidden: [T, H].
        top_k_index: int64 [T, k]; ids >= E add nothing and get zero gradient, negative ids raise.
        top_k_weights: [T, k], any floating-point dtype; used in fp32.
        weights: the layer's experts.
        lora: six CPU tensors per adapter in the order of ``ktft.weights.LORA_NAMES``; fp32, or bf16 without gradients.
        scaling: one factor per adapter (alpha / r, or alpha / sqrt(r) for rsLoRA).
        adapter_ids: int64 [T], the adapter of each token (-1: none); None applies all adapters, summed.
        dropout_p, dropout_seed: dropout on the inputs of the A factors; the mask depends on (seed, adapter, route,
        channel) alone.
        save: keep gate and up pre-activations for backward (2 I values per route); False recomputes them, with the
        same bits.

    Raises:
        ValueError: shapes, dtypes or ids that do not fit, naming them.
    """
    dtype = hidden.dtype
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"hidden must be in bfloat16, float16 or float32, got {dtype}")
    if top_k_index.is_floating_point() or top_k_index.dtype == torch.bool:
        raise ValueError(f"top_k_index must hold whole numbers, got {top_k_index.dtype}")
    if any(forward_ad.unpack_dual(t).tangent is not None for t in (hidden, top_k_weights, *lora)):
        raise NotImplementedError("ktft::moe_experts has no forward-mode derivative (torch.func.jvp, forward_ad)")
    compute = dtype
    if hidden.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(hidden.device.type):
        compute = torch.get_autocast_dtype(hidden.device.type)
    if compute == torch.float16:
        compute = torch.float32
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (hidden, top_k_weights, *lora))
    out: torch.Tensor
    out, _saved = torch.ops.ktft.moe_experts(
        hidden.to(compute),
        top_k_index.to(torch.int64),
        top_k_weights,
        weights.id,
        list(lora),
        list(scaling),
        adapter_ids,
        dropout_p,
        dropout_seed,
        save and needs_grad,
    )
    return out.to(dtype)


assert {*PLAIN, *CODED, *BLOCKS, *(f"{name}/2" for name in PLAIN)} == set(_FORMATS)
