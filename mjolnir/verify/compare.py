"""How far O and LSE are from the oracle's, and how far they may be.

O is rounded once, to the output's dtype. So each element may be off by half a unit in the last place; what is left
beyond that was wrong before the rounding, and a row of O (one token and head) may have ROW_TOLERANCE of its norm of
it. A bound per row, because the norm over a whole batch hides one wrong row; past the rounding, because bf16's own
error, 1.5e-3 of a row, is as large as what a key too many does to a row over 100K keys.
"""

from __future__ import annotations

import dataclasses
import math

import torch

ROW_TOLERANCE = 3e-4
"""Of a row's norm, before the output is rounded. P is rounded to f16: that alone costs about 1.7e-4."""

TOTAL_TOLERANCE = {torch.bfloat16: 2e-3, torch.float16: 5e-4}
"""Of the norm of all of O, rounding included: 1.5e-3 (bf16) or 1.9e-4 (fp16) for it, and ROW_TOLERANCE."""

LSE_TOLERANCE = 1e-5
"""Of max(1, |LSE|): fp32 scores and sums."""

PROBE_TOLERANCE = 1e-6
"""As ROW_TOLERANCE, where every P is a power of two and every sum exact: what is left is fp32's 1 / l."""

FP32_TINY = 2.0**-126
"""Smallest normal fp32 number: arithmetic may flush what is smaller."""


@dataclasses.dataclass(frozen=True)
class Deviation:
    """Of one result from the oracle's. NaN or Inf in another place than the oracle's is an infinite deviation."""

    row: float  # the worst row, beyond the rounding of the output, relative to the row's norm
    worst: tuple[int, int]  # its token and head
    total: float  # all of O, rounding included, relative to the norm
    lse: float  # the worst, relative to max(1, |LSE|)

    def faults(self, dtype: torch.dtype, row_tolerance: float = ROW_TOLERANCE) -> list[str]:
        """What is out of bounds, in words."""
        token, head = self.worst
        return [
            f"{what} is off by {error:.2e}, at most {limit:.0e} allowed"
            for what, error, limit in (
                (f"O of token {token}, head {head}", self.row, row_tolerance),
                ("O as a whole", self.total, TOTAL_TOLERANCE[dtype]),
                ("LSE", self.lse, LSE_TOLERANCE),
            )
            if not error <= limit
        ]


def compare(out: torch.Tensor, lse: torch.Tensor, expected_out: torch.Tensor, expected_lse: torch.Tensor) -> Deviation:
    """The deviation of out (tokens, heads, head_size) and lse (tokens, heads) from the oracle's fp64 ones.

    Raises:
        ValueError: the shapes differ.
    """
    for name, got, want in (("out", out, expected_out), ("lse", lse, expected_lse)):
        if got.shape != want.shape:
            raise ValueError(f"{name} must have the oracle's shape {tuple(want.shape)}, got {tuple(got.shape)}")
    if not out.numel():
        return Deviation(0.0, (0, 0), 0.0, 0.0)
    rows = row_errors(out, expected_out)
    token, head = divmod(int(rows.argmax()), rows.shape[1])
    finite = expected_out.to(out.dtype).isfinite()
    difference = torch.where(finite, out.double() - expected_out, 0)
    total = _ratio(difference.norm(), torch.where(finite, expected_out, 0).norm())
    return Deviation(float(rows.max()), (token, head), float(total), float(lse_errors(lse, expected_lse).max()))


def row_errors(out: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Per (token, head): the norm of what the output's rounding does not explain, relative to the row's norm."""
    finite = expected.to(out.dtype).isfinite()
    difference = torch.where(finite, (out.double() - expected).abs(), 0)
    excess = (difference - _half_ulp(out)).clamp(min=0)
    error = _ratio(excess.norm(dim=-1), torch.where(finite, expected, 0).norm(dim=-1))
    return error.masked_fill(_misplaced(out, expected).any(-1), math.inf)


def lse_errors(lse: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Per (token, head): the difference relative to max(1, |LSE|); where the oracle has −inf, 0 for −inf."""
    finite = expected.to(lse.dtype).isfinite()
    error = torch.where(finite, (lse.double() - expected).abs() / expected.abs().clamp(min=1), 0)
    return error.masked_fill(_misplaced(lse, expected), math.inf)


def _misplaced(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Where one is NaN, Inf or −Inf and the other is not. What overflows the dtype is Inf in both."""
    want = expected.to(got.dtype)
    return (got.isnan() != want.isnan()) | (got.isposinf() != want.isposinf()) | (got.isneginf() != want.isneginf())


def _half_ulp(x: torch.Tensor) -> torch.Tensor:
    """Half the distance between neighbours of x in its dtype, in fp64."""
    info = torch.finfo(x.dtype)
    _, exponent = torch.frexp(torch.where(x.isfinite(), x, 0).double())
    half = torch.exp2(exponent.double()) * (info.eps / 4)
    return half.clamp(min=max(info.smallest_normal * info.eps / 2, FP32_TINY))


def _ratio(error: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    return torch.where(error == 0, 0, error / norm)
