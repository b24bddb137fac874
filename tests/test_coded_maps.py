"""Each linear map of coded experts by itself, as the op computes it: forward x ↦ W x, backward dy ↦ Wᵀ dy.

The map of one matrix is got out of the whole layer by what the other two are, and by what backward is told that forward
saved (silu(0) = 0 with slope 1/2, and silu(64) = 64 with slope 1, exactly in fp32):

- gate, up: forward saves g = Wg x and u = Wu x. Backward with a down projection that picks channels, so that dh = dy,
  and (g, u) = (0, 2) gives d gate = dy, d up = 0; (64, 0) gives d gate = 0, d up = 64 dy.
- down: gate gives 64 and up picks channels, so that h = 64 x; backward with (64, 0) and that up gives 64 Wdᵀ dy.

Powers of two are exact, so nothing but the map itself rounds, and its result once to the compute dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ktft import ops
from ktft.weights import ExpertWeights
from tests.coded import ENCODINGS, coded_experts, odd_size
from tests.noise import SIGMAS, UNIT, exact
from tests.test_coded import LEVELS

FEW = 16  # rows of an expert that meet its weights where they lie (csrc/kernels/table.h: kFewRows)


def repeated(description: Any, count: int) -> Any:
    """Of ``count`` experts that are all the only one described."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(description):
        value = getattr(description, field.name)
        if isinstance(value, np.ndarray):
            changes[field.name] = np.repeat(value, count)
        elif dataclasses.is_dataclass(value):
            changes[field.name] = repeated(value, count)
    return dataclasses.replace(description, **changes)


class LinearMap:
    """One matrix W [rows, cols] of the only expert of ``weights``, whose rows of activations come ``at_once``."""

    def __init__(self, weights: ExpertWeights, name: str, dtype: torch.dtype, at_once: int) -> None:
        self.weights, self.name, self.dtype, self.at_once = weights, name, dtype, at_once
        self.rows, self.cols = weights.intermediate_size, weights.hidden_size
        if name == "down":
            self.rows, self.cols = self.cols, self.rows

    def _call(self, hidden: torch.Tensor) -> tuple[ExpertWeights, tuple[Any, ...]]:
        """The layer around the matrix, and the op's arguments up to dropout; a route a token, in their order."""
        h, i, tokens = self.weights.hidden_size, self.weights.intermediate_size, len(hidden)
        experts = -(-tokens // self.at_once)
        gate = torch.zeros(1, i, h, dtype=self.dtype)
        gate[:, :, h - 1] = 64
        picks = torch.eye(i, h, dtype=self.dtype)[None]
        others = ExpertWeights.from_tensors(gate, picks, picks.transpose(1, 2).contiguous())
        matrices = {"gate": others.gate, "up": others.up, "down": others.down}
        matrices[self.name] = getattr(self.weights, self.name)
        layer = ExpertWeights(
            **{name: repeated(matrix, experts) for name, matrix in matrices.items()},
            hidden_size=h,
            intermediate_size=i,
            owner=(others, self.weights),
        )
        index = torch.arange(tokens)[:, None] // self.at_once
        return layer, (hidden, index, torch.ones(tokens, 1), layer.id, [], [], None, 0.0, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, cols] -> W x [T, rows] in the compute dtype."""
        if self.name == "down":
            hidden = torch.zeros(len(x), self.rows, dtype=self.dtype)
            hidden[:, : self.cols] = x
            hidden[:, -1] = 1
            _layer, call = self._call(hidden)
            return torch.ops.ktft.moe_experts(*call, False)[0] / 64
        _layer, call = self._call(x)
        saved = torch.ops.ktft.moe_experts(*call, True)[1]
        return saved[:, 0 if self.name == "gate" else 1]

    def backward(self, dy: torch.Tensor) -> torch.Tensor:
        """dy [T, rows] -> Wᵀ dy [T, cols] in the compute dtype."""
        h, i = self.weights.hidden_size, self.weights.intermediate_size
        grad = torch.zeros(len(dy), h, dtype=self.dtype)
        grad[:, : self.rows] = dy
        saved = torch.zeros(len(dy), 2, i, dtype=self.dtype)
        gate, up = (0, 2) if self.name == "gate" else (64, 0)
        saved[:, 0], saved[:, 1] = gate, up
        _layer, call = self._call(torch.zeros(len(dy), h, dtype=self.dtype))
        d_hidden = torch.ops.ktft.moe_experts_backward(grad, saved, *call, True, False, [])[0]
        return d_hidden if self.name == "gate" else d_hidden[:, : self.cols] / 64


def each_map(check: Callable[[LinearMap, torch.Tensor], None], name: str, isa: str, dtype: torch.dtype) -> None:
    """check(map, W as the reference decodes it) of gate, up and down, for few rows of an expert and for many."""
    intermediate = odd_size(name, 70)
    coded, plain = coded_experts(name, 1, odd_size(name, 2 * intermediate + 1), intermediate, dtype)
    assert coded.hidden_size > coded.intermediate_size
    with ops.override(isa=isa, threads=2):
        for at_once in (FEW, 10_000):
            for which in ("gate", "up", "down"):
                check(LinearMap(coded, which, dtype, at_once), plain.matrix(which, 0))


CASES = pytest.mark.parametrize("name", ENCODINGS)
ISAS = pytest.mark.parametrize("isa", LEVELS)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


@DTYPES
@ISAS
@CASES
def test_both_directions_have_the_same_matrix(name: str, isa: str, dtype: torch.dtype) -> None:
    """Unit vectors read it out, a column or a row each, and nothing rounds: it is the reference's, to the last bit."""

    def check(linear: LinearMap, expected: torch.Tensor) -> None:
        columns = linear.forward(torch.eye(linear.cols, dtype=dtype))
        rows = linear.backward(torch.eye(linear.rows, dtype=dtype))
        assert expected.shape == (linear.rows, linear.cols) and expected.count_nonzero() > 0.8 * expected.numel()
        assert torch.equal(columns.t(), expected), (linear.name, linear.at_once)
        assert torch.equal(rows, expected), (linear.name, linear.at_once)

    each_map(check, name, isa, dtype)


@DTYPES
@ISAS
@CASES
def test_backward_is_the_adjoint_of_forward(name: str, isa: str, dtype: torch.dtype) -> None:
    """<dy, W x> = <Wᵀ dy, x>, summed in float64, to the rounding of the two products."""

    def check(linear: LinearMap, matrix: torch.Tensor) -> None:
        generator = torch.Generator().manual_seed(1)
        x, dy = (torch.randn(40, size, generator=generator).to(dtype) for size in (linear.cols, linear.rows))
        y, dx = linear.forward(x).double(), linear.backward(dy).double()
        w, unit = exact(matrix), UNIT[dtype]
        y_sigma = (exact(x) @ w.t).rounded(unit).sigma
        dx_sigma = (exact(dy) @ w).rounded(unit).sigma
        difference = (dy * y).sum(1) - (dx * x).sum(1)
        sigma = ((dy * y_sigma).pow(2).sum(1) + (x * dx_sigma).pow(2).sum(1)).sqrt()
        assert (dy * y).sum(1).abs().median() > 3 * SIGMAS * sigma.median()
        assert (difference.abs() <= SIGMAS * sigma).all(), (linear.name, linear.at_once)

    each_map(check, name, isa, dtype)
