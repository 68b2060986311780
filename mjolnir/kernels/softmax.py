"""Online softmax of one warp, in base 2, on unscaled scores.

The running maximum m is a maximum of raw S, not of scaled scores: a weight is 2^((s - m) * mult + P_BIAS), where
mult is the row's factor to base-2 scores. So no scale makes m overflow, and all of a row's weights are relative to
one m whatever their size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from mjolnir.kernels import ptx
from mjolnir.kernels.geometry import Geometry

NEG_INF = float("-inf")

P_BIAS = 8.0
"""P is 2^P_BIAS at the running maximum: f16 then holds weights down to 2^-32 of the largest."""

RESCALE_ABOVE = 7.0
"""O is rescaled only when a score (base 2) exceeds the running maximum by more: P stays below 2^15 < 65504."""


def weight_of(m: Any, top: Any, mult: Any) -> Any:
    """2^((m - top) * mult): the factor of a partial sum relative to m once it is relative to top >= m. The caller
    turns m = -inf into 0."""
    return ptx.ex2((m - top) * mult)


class SoftmaxState(NamedTuple):
    """O, and m and l of the columns (q rows 2 t and 2 t + 1 of each n8 tile) that one lane holds, in registers."""

    acc: Any
    m: Any
    l: Any


class OnlineSoftmax:
    def __init__(self, geo: Geometry):
        self.geo = geo
        self.columns = 2 * geo.row_tiles

    def start(self) -> SoftmaxState:
        state = SoftmaxState(
            acc=cute.make_rmem_tensor((self.columns * self.geo.m_tiles * 2,), Float32),
            m=cute.make_rmem_tensor((self.columns,), Float32),
            l=cute.make_rmem_tensor((self.columns,), Float32),
        )
        state.acc.fill(0.0)
        state.m.fill(NEG_INF)
        state.l.fill(0.0)
        return state

    @cute.jit
    def update(self, state, scores, mult):
        """Turn a tile's scores into weights in place, after making room for a grown maximum. Lazily: most tiles
        cost no shuffle and no pass over O."""
        tops = []
        grew = cutlass.Boolean(False)
        for c in cutlass.range_constexpr(self.columns):
            top = scores[c // 2][c % 2]
            for i in cutlass.range_constexpr(1, self.geo.warp_tile // 8):
                top = cute.arch.fmax(top, scores[c // 2][2 * i + c % 2])
            tops.append(top)
            grew = grew | ((top - state.m[c]) * mult[c] > RESCALE_ABOVE)
        if cute.arch.vote_any_sync(grew):
            for c in cutlass.range_constexpr(self.columns):
                top = cute.arch.fmax(tops[c], state.m[c])
                for step in cutlass.range_constexpr(3):
                    top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 4 << step))
                shrink = weight_of(state.m[c], top, mult[c]) if state.m[c] != NEG_INF else Float32(0.0)
                state.m[c] = top
                state.l[c] = state.l[c] * shrink
                for i in cutlass.range_constexpr(2 * self.geo.m_tiles):
                    index = (c // 2) * self.geo.m_tiles * 4 + 2 * i + c % 2
                    state.acc[index] = state.acc[index] * shrink
        for c in cutlass.range_constexpr(self.columns):
            # Where all keys so far are masked m is -inf, and so is every score.
            m = state.m[c] if state.m[c] != NEG_INF else Float32(0.0)
            total = state.l[c]
            for i in cutlass.range_constexpr(self.geo.warp_tile // 8):
                weight = ptx.ex2((scores[c // 2][2 * i + c % 2] - m) * mult[c] + P_BIAS)
                scores[c // 2][2 * i + c % 2] = weight
                total = total + weight
            state.l[c] = total
