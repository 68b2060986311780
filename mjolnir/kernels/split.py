"""The end of a piece that may be one of many splits of an item.

A partial result is, per q row, O, m and l (see softmax.py). Split i of an item that row b of the plan begins is the
first piece of row b + i, and lies in slot 2 (b + i); split 0 is the last piece of row b, and lies in slot 2 b + 1. In a
paired plan the same holds of every second row. Many splits are merged in two steps: by teams of neighbours, then the
teams' results. A team leaves its result in a slot that nobody else uses: the second one of a row that lies wholly
inside the item.

Who merges? In plans of mode WAIT and PAIRED all rows run at once, and the last row of a team or item waits: it keeps
its own result, and reads the others' slots until they are filled. An empty slot holds UNSET, which no arithmetic makes;
whoever has read a slot empties it. That takes one way through L2. A row waits only for lower ones, whose CTAs a GPU
starts first, so it never waits for one that cannot begin. In mode ARRIVE rows count themselves at the end of a piece,
at the price of a fence and an atomic, and whichever is the last merges. The order of a sum depends on neither.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from mjolnir.kernels import ptx
from mjolnir.kernels.epilogue import Epilogue, add_parts, empty_sum
from mjolnir.kernels.partials import LOADS_IN_FLIGHT, LOG2_TEAM, UNSET
from mjolnir.kernels.softmax import NEG_INF


class Teams(NamedTuple):
    """How the splits of an item are merged, as one row of it sees that. Rows are of the plan."""

    begin_row: Int32
    team_size: Int32
    teams: Int32
    leader: Int32  # first row of the own team
    members: Int32  # of the own team
    waits: Int32
    alone: Int32  # 1: the last team has one member, which leaves its result where a split's lies


class Level(NamedTuple):
    """Slots that are summed: first, second, second + stride, …; that of part ``lone`` is the one before."""

    parts: Int32
    first: Int32
    second: Int32
    stride: Int32
    lone: Int32


class SplitMerge(Epilogue):
    @cute.jit
    def conclude(self, row, begin_row, final_row, waits):
        """Merge the warps, and the splits if there are several. Returns 1 if the last warp does that alone, while the
        others go on; else 0."""
        alone = Int32(1 if self.geo.own_q else 0)
        if cutlass.const_expr(self.variant.split):
            if begin_row == final_row:
                self.write()
            else:
                self.merge_splits(row, begin_row, final_row, waits)
                alone = Int32(0)
        else:
            self.write()
        return alone

    @cute.jit
    def merge_splits(self, row, begin_row, final_row, waits):
        """Merge the warps; then, of the splits that rows begin_row … final_row hold, what is for this row to merge. The
        rows of a pair make one split."""
        step = self.halves
        splits = (final_row - begin_row + step) >> self.paired
        split = (row - begin_row) >> self.paired
        log2_team = Int32(0)
        for i in cutlass.range_constexpr(len(LOG2_TEAM)):
            up_to, log2_size = LOG2_TEAM[-1 - i]
            log2_team = Int32(log2_size) if splits <= up_to else log2_team
        team_size = Int32(1) << log2_team
        teams = (splits + team_size - 1) >> log2_team
        team = split >> log2_team
        leader = begin_row + team * team_size * step
        members = cutlass.min(splits - team * team_size, team_size)
        team_slot = 2 * (leader + step) + 1 if team == 0 else 2 * leader + 1
        team_slot = team_slot if teams > 1 else Int32(-1)
        alone = Int32(1) if splits - (teams - 1) * team_size == 1 else Int32(0)
        shared = Teams(begin_row, team_size, teams, leader, members, waits, alone)

        # A pass adds up this row's warps (``own``) and the slots of levels first_level … end_level - 1: 0 is the
        # members of the team, 1 the teams. One body for all passes: code that runs once a launch is code to fetch.
        own, first_level, end_level = Int32(1), Int32(0), Int32(0)
        target = 2 * begin_row + 1 if split == 0 else 2 * (begin_row + split * step)
        target = target if splits > 1 else Int32(-1)
        if waits == 1 and split == team * team_size + members - 1:
            end_level = Int32(2) if split == splits - 1 and teams > 1 else Int32(1)
            target = Int32(-1) if split == splits - 1 else team_slot
        going = Int32(1)
        while going == 1:
            self.merge(own, first_level, end_level, target, shared)
            going = Int32(0)
            if target >= 0 and waits == 0:
                in_team = own == 1 and members > 1
                counter = leader * 2 if in_team else begin_row * 2 + 1
                going = self.arrive(self.args.counters + Int64(counter) * 4, members if in_team else teams)
                own = Int32(0)
                first_level = Int32(0) if in_team else Int32(1)
                end_level = first_level + 1
                target = team_slot if in_team else Int32(-1)

    @cute.jit
    def arrive(self, counter, expected):
        """1 in every thread of the CTA that arrives last of ``expected``, else 0. The counter resets itself."""
        self.sync()
        if self.is_first:
            # acq_rel, and barriers on both sides, order all accesses of the CTA.
            old = ptx.atomic_inc(counter, expected - 1, "acq_rel")
            ptx.sts_b32(self.flag, Int32(1) if old == expected - 1 else Int32(0))
        self.sync()
        return ptx.lds_b32(self.flag)

    @cute.jit
    def merge(self, own, first_level, end_level, target, teams):
        """One pass: the result goes to slot ``target``, or is O where that is negative."""
        v_factors = self.v_factors()
        self.sync()
        for r in cutlass.range(self.first_row, self.live_rows, self.row_step, unroll=1):
            row = self.row_at(r)
            mult = ptx.lds_f32(self.mult + row * 4)
            state = empty_sum()
            if own == 1:
                self.add_warps(state, row, mult)
            for level in cutlass.range(first_level, end_level, unroll=1):
                slots = self.slots(level, teams)
                for first in cutlass.range(0, slots.parts, LOADS_IN_FLIGHT, unroll=1):
                    self.add_slots(state, slots, first, row, mult)
            if target < 0:
                self.finish_row(row, state, mult, v_factors)
            else:
                ptx.st_relaxed_f32x4(self.values_address(target, row), [state[2 + e] for e in range(4)])
                # Once: a second warp's (d = 256) might come after the reader has emptied the slot.
                if self.element == 0:
                    ptx.st_relaxed_f32x2(self.stats_address(target, row), state[0], state[1])
        self.sync()
        # A row's m and l were read by all of its threads, which are past that now.
        unset = ptx.int_as_float(Int32(UNSET))
        for level in cutlass.range(first_level, end_level, unroll=1):
            slots = self.slots(level, teams)
            for i in cutlass.range(self.element // 4, slots.parts, self.geo.head_size // 4, unroll=1):
                for r in cutlass.range(self.first_row, self.live_rows, self.row_step, unroll=1):
                    ptx.st_relaxed_f32x2(self.stats_address(slot_of(slots, i), self.row_at(r)), unset, unset)

    @cute.jit
    def slots(self, level, teams):
        """The slots of a level; without this row's own where it waits for the others, and then is the last."""
        in_team = level == 0
        parts = (teams.members if in_team else teams.teams) - teams.waits
        first = (
            (2 * teams.leader + 1 if teams.leader == teams.begin_row else 2 * teams.leader)
            if in_team
            else 2 * (teams.begin_row + self.halves) + 1
        )
        stride = 2 * self.halves if in_team else 2 * self.halves * teams.team_size
        second = 2 * teams.leader + stride if in_team else 2 * teams.begin_row + stride + 1
        lone = teams.teams - 1 if level == 1 and teams.waits == 0 and teams.alone == 1 else Int32(-1)
        return Level(parts, first, second, stride, lone)

    @cute.jit
    def add_slots(self, state, slots, first, row, mult):
        """Add LOADS_IN_FLIGHT slots of a level, read in one round trip, as often as it takes until all are there; then
        empty them. Past the end the last slot is read again, and weighs nothing."""
        parts = cute.make_rmem_tensor((6 * LOADS_IN_FLIGHT,), Float32)
        missing = Int32(1)
        while missing == 1:
            missing = Int32(0)
            for j in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                slot = slot_of(slots, first + j)
                m, l = ptx.ld_relaxed_f32x2(self.stats_address(slot, row))
                o = ptx.ld_relaxed_f32x4(self.values_address(slot, row))
                parts[6 * j], parts[6 * j + 1] = m, l
                for e in cutlass.range_constexpr(4):
                    parts[6 * j + 2 + e] = o[e]
                unset = ptx.float_as_int(m) == UNSET or ptx.float_as_int(o[0]) == UNSET
                missing = Int32(1) if unset else missing
        ms, ls, values = [], [], []
        for j in cutlass.range_constexpr(LOADS_IN_FLIGHT):
            ms.append(parts[6 * j] if first + j < slots.parts else Float32(NEG_INF))
            ls.append(parts[6 * j + 1])
            values.append([parts[6 * j + 2 + e] for e in range(4)])
        add_parts(state, ms, ls, values, mult)
        nothing = [ptx.int_as_float(Int32(UNSET))] * 4
        for j in cutlass.range_constexpr(LOADS_IN_FLIGHT):
            if first + j < slots.parts:
                ptx.st_relaxed_f32x4(self.values_address(slot_of(slots, first + j), row), nothing)

    def values_address(self, slot: Any, row: Any) -> Any:
        """This thread's elements of O, of a row of a partial result."""
        word = Int64(slot) * self.geo.partial_floats + Int64(row * self.geo.head_size + self.element)
        return self.args.partials + word * 4

    def stats_address(self, slot: Any, row: Any) -> Any:
        """(m, l) of a row of a partial result: as a distance that no slot changes, which saves registers."""
        words = self.geo.rows * self.geo.head_size + row * (2 - self.geo.head_size) - self.element
        return self.values_address(slot, row) + Int64(words * 4)


@cute.jit
def slot_of(slots, i):
    """The slot of part i of a level; past the end the last one again."""
    i = cutlass.min(i, slots.parts - 1)
    slot = slots.first if i == 0 else slots.second + (i - 1) * slots.stride
    return slot - 1 if i == slots.lone else slot
