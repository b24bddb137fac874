"""Values with the standard deviation of their rounding error: where the tests' tolerances come from.

Each operation of the experts layer is restated on pairs (value in float64, sigma), with the roundings the kernels make:

- rounding to a format with unit roundoff u adds a uniform error of at most u |v|: sigma u |v| / sqrt(3);
- a sum of K products in fp32 adds K roundings of partial sums no larger than sum |a b|: sigma sqrt(K / 3) 2^-24 sum
  |a b|
  (the random-walk bound of Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019);
- independent errors add in quadrature; errors that stem from one source (the gate and up branches of d hidden) add
  linearly.

A result passes if every element lies within SIGMAS of the float64 value. Nothing here is fitted to what the kernels
return.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SIGMAS = 8.0
FP32_UNIT = 2.0**-24
UNIT = {torch.bfloat16: 2.0**-8, torch.float32: FP32_UNIT}


@dataclass
class Noisy:
    value: torch.Tensor  # float64
    sigma: torch.Tensor

    def rounded(self, unit: float) -> Noisy:
        return Noisy(self.value, (self.sigma**2 + (unit * self.value) ** 2 / 3).sqrt())

    def __mul__(self, other: Noisy) -> Noisy:
        sigma = (
            (self.sigma * other.value) ** 2 + (self.value * other.sigma) ** 2 + (self.sigma * other.sigma) ** 2
        ).sqrt()
        return Noisy(self.value * other.value, sigma).rounded(2 * FP32_UNIT)

    def __matmul__(self, other: Noisy) -> Noisy:
        a, b, length = self, other, self.value.shape[-1]
        sigma2 = a.sigma**2 @ b.value**2 + a.value**2 @ b.sigma**2 + a.sigma**2 @ b.sigma**2
        walk = (length / 3) ** 0.5 * FP32_UNIT * (a.value.abs() @ b.value.abs())
        return Noisy(a.value @ b.value, (sigma2 + walk**2).sqrt())

    def plus(self, other: Noisy) -> Noisy:
        return Noisy(self.value + other.value, (self.sigma**2 + other.sigma**2).sqrt()).rounded(FP32_UNIT)

    def plus_correlated(self, other: Noisy) -> Noisy:
        return Noisy(self.value + other.value, self.sigma + other.sigma).rounded(FP32_UNIT)

    def expanded(self, like: Noisy) -> Noisy:
        return Noisy(self.value.expand_as(like.value), self.sigma.expand_as(like.value))

    @property
    def t(self) -> Noisy:
        return Noisy(self.value.transpose(-1, -2), self.sigma.transpose(-1, -2))

    def scaled(self, factor: torch.Tensor | float) -> Noisy:
        factor = torch.as_tensor(factor, dtype=torch.float64)
        return Noisy(self.value * factor, self.sigma * factor.abs())

    def silu(self, alpha: float = 1.0) -> Noisy:
        """x sigmoid(alpha x)."""
        s = torch.sigmoid(alpha * self.value)
        slope = s * (1 + alpha * self.value * (1 - s))
        # |silu''| <= 1/2, alpha times that here; the kernels' exponential is good to a few units, and alpha and its
        # product with x are rounded, an error of 2 |alpha x| units in the exponent
        sigma = (slope * self.sigma).abs() + alpha * self.sigma**2 / 4
        if alpha != 1.0:
            sigma = sigma + (self.value * s * (1 - s) * alpha * self.value).abs() * 2 * FP32_UNIT
        return Noisy(self.value * s, sigma).rounded(8 * FP32_UNIT)

    def silu_slope(self, alpha: float = 1.0) -> Noisy:
        s = torch.sigmoid(alpha * self.value)
        slope = s * (1 + alpha * self.value * (1 - s))
        return Noisy(slope, alpha * self.sigma / 2 + (8 if alpha == 1.0 else 16) * FP32_UNIT)

    def clamped(self, low: float, high: float) -> Noisy:
        return Noisy(self.value.clamp(low, high), self.sigma)

    def inside(self, of: Noisy, low: float, high: float) -> Noisy:
        """Self, or 0 where ``of`` lies outside of [low, high]; either where its error decides which."""
        near = (torch.minimum((of.value - low).abs(), (of.value - high).abs()) <= SIGMAS * of.sigma).double()
        mask = ((of.value >= low) & (of.value <= high)).double()
        return Noisy(self.value * mask, self.sigma + near * self.value.abs())


def exact(tensor: torch.Tensor) -> Noisy:
    value = tensor.detach().to(torch.float64)
    return Noisy(value, torch.zeros_like(value))


def excess(actual: torch.Tensor, expected: Noisy) -> float:
    """Largest error in units of the tolerance: at most 1 passes. The floor is the smallest normal float."""
    error = (actual.to(torch.float64) - expected.value).abs()
    if not torch.isfinite(actual).all():
        return float("inf")
    return float((error / (SIGMAS * expected.sigma + 1e-37)).max()) if error.numel() else 0.0
