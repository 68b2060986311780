"""Merge the splits of an item: whichever of its rows is done last reads all partial results, in the order of the
splits, so the result does not depend on who that is.

Split i of an item that row b of the plan begins is the first piece of row b + i, and lies in slot 2 (b + i); split 0
is the last piece of row b, and lies in slot 2 b + 1. Many splits are merged in two steps: by teams of neighbours, then
the teams' results. A team leaves its result in a slot that nobody else uses: the second one of a row that lies wholly
inside the item.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from mjolnir.kernels import ptx
from mjolnir.kernels.epilogue import Epilogue
from mjolnir.kernels.geometry import BIG_TEAM, BIG_TEAM_ABOVE, LOADS_IN_FLIGHT, ONE_STEP_SPLITS, TEAM
from mjolnir.kernels.softmax import NEG_INF, weight_of


class SplitMerge(Epilogue):
    @cute.jit
    def arrive_and_merge(self, row, begin_row, final_row):
        """To be called once the row's own partial result of the item is stored."""
        splits = final_row - begin_row + 1
        team_size = Int32(TEAM) if splits <= BIG_TEAM_ABOVE else Int32(BIG_TEAM)
        team_size = splits if splits <= ONE_STEP_SPLITS else team_size
        teams = (splits + team_size - 1) // team_size
        team = (row - begin_row) // team_size
        leader = begin_row + team * team_size
        alone = splits - (teams - 1) * team_size == 1  # the last team has one member, and nothing to merge

        # First step, with the counter of the team's leader; then, for its last member, the second step with the
        # item's. One body for both: code that runs once a launch is code to fetch.
        counter = self.args.counters + Int64(leader) * 8
        count = cutlass.min(splits - team * team_size, team_size)
        first_slot = 2 * leader + 1 if team == 0 else 2 * leader
        second_slot = 2 * (leader + 1)
        stride = Int32(2)
        last_slot = 2 * (leader + count - 1)
        result_slot = 2 * (leader + 1) + 1 if team == 0 else 2 * leader + 1
        result_slot = result_slot if teams > 1 else Int32(-1)
        going = Int32(1)
        while going == 1:
            going = Int32(0)
            last = Int32(1)
            if count > 1:
                last = self.arrive(counter, count)
            if last == 1:
                if count > 1:
                    self.merge(count, first_slot, second_slot, stride, last_slot, result_slot)
                if result_slot >= 0:
                    going = Int32(1)
                    counter = self.args.counters + Int64(begin_row) * 8 + 4
                    count = teams
                    first_slot = 2 * (begin_row + 1) + 1
                    second_slot = 2 * (begin_row + team_size) + 1
                    stride = 2 * team_size
                    last_leader = begin_row + (teams - 1) * team_size
                    last_slot = 2 * last_leader if alone else 2 * last_leader + 1
                    result_slot = Int32(-1)

    @cute.jit
    def arrive(self, counter, expected):
        """1 in every thread of the CTA that arrives last of ``expected``, else 0. The counter resets itself."""
        self.sync()
        if self.warp == 0:
            if self.lane == 0:
                # acq_rel, and barriers on both sides, order all accesses of the CTA, and the first-level cache forgets
                # what it held: plain loads see what the other CTAs stored, and are faster than ld.cg.
                old = ptx.atomic_inc(counter, expected - 1, "acq_rel")
                ptx.sts_b32(self.flag, Int32(1) if old == expected - 1 else Int32(0))
        self.sync()
        return ptx.lds_b32(self.flag)

    @cute.jit
    def merge(self, count, first_slot, second_slot, stride, last_slot, result_slot):
        """Merge ``count`` partial results, in slots first, second, second + stride, … and last, into O, or, where
        result_slot >= 0, into that slot. Stats and O of LOADS_IN_FLIGHT splits are read in one round trip."""
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
                    slot = second_slot + (first + j - 1) * stride
                    slot = first_slot if first + j == 0 else slot
                    slot = last_slot if first + j >= count - 1 else slot
                    m, l, mult = ptx.ldg_f32x3(self.stats_address(slot, row))
                    ms.append(m if first + j < count else Float32(NEG_INF))
                    ls.append(l)
                    values.append(ptx.ldg_f32x4(self.values_address(slot, row)))
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
            if result_slot >= 0:
                self.store_partial(result_slot, row, o, m, l, mult)
            else:
                self.finish_row(row, o, m, l, mult, v_factor)
