"""Partial results of splits, in a workspace that stays the runner's from launch to launch.

A slot holds one, in units of 32 bytes: per q row, four neighbouring elements of O, then m and l of the row (see
softmax.py) and a word for the way of merging (split.py). A thread writes or reads a unit by itself. An empty unit's
words are UNSET, which no arithmetic makes, so a unit tells whether it is there; whoever has read it empties it.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from mjolnir.kernels import ptx
from mjolnir.kernels.args import DecodeArgs
from mjolnir.kernels.geometry import UNSET, Geometry
from mjolnir.kernels.softmax import NEG_INF, weight_of


def empty_sum() -> Any:
    """(m, l, O) of a row and four elements, in registers: the sum of no parts."""
    state = cute.make_rmem_tensor((6,), Float32)
    state.fill(0.0)
    state[0] = Float32(NEG_INF)
    return state


@cute.jit
def add_parts(state, ms, ls, values, mult):
    """Add partial sums (m, l, O) to ``state``; those of m = -inf weigh nothing."""
    top = state[0]
    for j in cutlass.range_constexpr(len(ms)):
        top = cute.arch.fmax(top, ms[j])
    kept = weight_of(state[0], top, mult) if state[0] != NEG_INF else Float32(0.0)
    for i in cutlass.range_constexpr(1, 6):
        state[i] = state[i] * kept
    for j in cutlass.range_constexpr(len(ms)):
        weight = weight_of(ms[j], top, mult) if ms[j] != NEG_INF else Float32(0.0)
        state[1] = state[1] + ls[j] * weight
        for e in cutlass.range_constexpr(4):
            state[2 + e] = state[2 + e] + values[j][e] * weight
    state[0] = top


class Partials:
    """Slots of one launch."""

    def __init__(self, geo: Geometry, args: DecodeArgs):
        self.geo, self.args = geo, args

    def address(self, slot: Any, row: Any, element: Any) -> Any:
        word = Int64(slot) * self.geo.partial_floats + Int64((row * self.geo.head_size + element) * 2)
        return self.args.partials + word * 4

    def store(self, slot: Any, row: Any, element: Any, state: Any, note: Any) -> None:
        at = self.address(slot, row, element)
        ptx.st_relaxed_f32x4(at, [state[2 + e] for e in range(4)])
        ptx.st_relaxed_f32x4(at + 16, [state[0], state[1], note, note])

    @cute.jit
    def add(self, state, slots, valid, row, element, mult, there):
        """Add the units of these slots, those that are valid, read in one round trip, and empty them. Returns their
        notes. If they need not be ``there`` yet, this waits until all of the warp's are: lanes that went on one by one
        would each take the time of a warp."""
        parts = [cute.make_rmem_tensor((7,), Float32) for _ in slots]
        missing = cutlass.Boolean(True)
        while missing:
            missing = cutlass.Boolean(False)
            for j in cutlass.range_constexpr(len(slots)):
                at = self.address(slots[j], row, element)
                m, l, note, _ = ptx.ld_relaxed_f32x4_if(valid[j], at + 16)
                o = ptx.ld_relaxed_f32x4_if(valid[j], at)
                for i, x in enumerate((m, l, *o, note)):
                    parts[j][i] = x
                if cutlass.const_expr(not there):
                    missing = missing | (ptx.float_as_int(m) == UNSET) | (ptx.float_as_int(o[0]) == UNSET)
            if cutlass.const_expr(not there):
                missing = self.of_any_lane(missing)
        ms = [parts[j][0] if valid[j] else Float32(NEG_INF) for j in range(len(slots))]
        add_parts(state, ms, [part[1] for part in parts], [[part[2 + e] for e in range(4)] for part in parts], mult)
        nothing = [ptx.int_as_float(Int32(UNSET))] * 4
        for j in cutlass.range_constexpr(len(slots)):
            if valid[j]:
                at = self.address(slots[j], row, element)
                ptx.st_relaxed_f32x4(at, nothing)
                ptx.st_relaxed_f32x4(at + 16, nothing)
        return [part[6] for part in parts]

    def of_any_lane(self, flag: Any) -> Any:
        return cute.arch.vote_any_sync(flag)
