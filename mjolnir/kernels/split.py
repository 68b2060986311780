"""Merge the splits of an item: whichever of its rows arrives last reads all partial results, in the order of the
splits, so the result does not depend on who that is.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from mjolnir.kernels import ptx
from mjolnir.kernels.epilogue import Epilogue
from mjolnir.kernels.softmax import NEG_INF, weight_of

LOADS_IN_FLIGHT = 16
"""Splits that a thread reads at once: a round trip to L2 takes as long for 16 as for one, about 0.4 us."""

ONE_STEP_SPLITS = 32
"""More splits are merged in two steps, by teams of neighbours, at the price of one more arrival (0.7 us)."""

TEAM, BIG_TEAM, BIG_TEAM_ABOVE = 16, 32, 256


class SplitMerge(Epilogue):
    """Split i of an item begun by row b lies in slot 2 b + 1 if i = 0 (the last piece of b), else in slot 2 (b + i)
    (the first piece of b + i)."""

    @cute.jit
    def arrive_and_merge(self, row, begin_row, final_row):
        """To be called once the row's own partial result is stored of the item."""
        splits = final_row - begin_row + 1
        team_size = Int32(TEAM) if splits <= BIG_TEAM_ABOVE else Int32(BIG_TEAM)
        team_size = splits if splits <= ONE_STEP_SPLITS else team_size
        teams = (splits + team_size - 1) // team_size
        team = (row - begin_row) // team_size
        leader = begin_row + team * team_size
        members = cutlass.min(splits - team * team_size, team_size)
        # Two counters per row: of the team it leads, and of the item it begins.
        last = self.arrive(self.args.counters + Int64(leader) * 8, members)
        if last == 1:
            self.merge(leader, 2 * leader + 1 if team == 0 else 2 * leader, Int32(1), members, teams > 1)
            if teams > 1:
                last = self.arrive(self.args.counters + Int64(begin_row) * 8 + 4, teams)
                if last == 1:
                    self.merge(begin_row, 2 * begin_row + 1, team_size, teams, teams < 0)

    @cute.jit
    def arrive(self, counter, expected):
        """1 in every thread of the CTA that arrives last of ``expected``, else 0. The counter resets itself."""
        self.sync()
        if self.warp == 0:
            if self.lane == 0:
                # acq_rel, and barriers on both sides, order the whole CTA's accesses.
                old = ptx.atomic_inc(counter, expected - 1, "acq_rel")
                ptx.sts_b32(self.flag, Int32(1) if old == expected - 1 else Int32(0))
        self.sync()
        return ptx.lds_b32(self.flag)

    @cute.jit
    def merge(self, leader, first_slot, stride, count, again):
        """Merge the partial results of rows leader, leader + stride, ...: into O, or, to be merged ``again``, into
        the first one's slot. Stats and O are read together: one round trip for LOADS_IN_FLIGHT splits."""
        v_factor = self.v_factor()
        for row in cutlass.range(self.first_row, self.live_rows, self.row_step, unroll=1):
            state = cute.make_rmem_tensor((7,), Float32)  # m, l, mult, O
            state.fill(0.0)
            state[0] = Float32(NEG_INF)
            for first in cutlass.range(0, count, LOADS_IN_FLIGHT, unroll=1):
                ms, ls, values = [], [], []
                mult = state[2]
                for j in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                    # Past the end the last split is read again, and weighs nothing.
                    split = cutlass.min(first + j, count - 1)
                    slot = first_slot if split == 0 else 2 * (leader + split * stride)
                    m, l, mult = ptx.ldg_cg_f32x3(self.stats_address(slot, row))
                    ms.append(m if first + j < count else Float32(NEG_INF))
                    ls.append(l)
                    values.append(ptx.ldg_cg_f32x4(self.values_address(slot, row)))
                top = state[0]
                for j in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                    top = cute.arch.fmax(top, ms[j])
                kept = weight_of(state[0], top, mult) if state[0] != NEG_INF else Float32(0.0)
                for i in cutlass.range_constexpr(1, 7):
                    state[i] = state[i] * kept
                for j in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                    weight = weight_of(ms[j], top, mult) if ms[j] != NEG_INF else Float32(0.0)
                    state[1] = state[1] + ls[j] * weight
                    for e in cutlass.range_constexpr(4):
                        state[3 + e] = state[3 + e] + values[j][e] * weight
                state[0] = top
                state[2] = mult
            m, l, mult, *o = [state[i] for i in range(7)]
            if again:
                self.store_partial(first_slot, row, o, m, l, mult)
            else:
                self.finish_row(row, o, m, l, mult, v_factor)

    @property
    def flag(self) -> Any:
        return self.mult + self.geo.rows * 4
