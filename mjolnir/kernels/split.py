"""The end of a piece that may be one of many splits of an item.

Partial results lie in slots, two for each row of the plan. The order of a sum never depends on who is done first. Who
merges follows from the plan's mode.

WAIT, PAIRED: every row, or pair, is one split and has no other piece, and all run at once. Its slot is the first of its
first row. All of an item's rows merge: each a part of the result, of all splits, which it waits for. That takes one way
through L2. Rows that wait for each other must all have begun, else two kernels that each have half of the GPU would
wait for ever. The producer looks; where it could not see it, which only other work on the GPU can bring about, a row
notes in its partial result that it does not wait, and the item's last row merges its part too: that row waits for lower
ones only, whose CTAs a GPU starts first.

ARRIVE: rows count themselves at the end of a piece, and whichever is last merges, at the price of a fence and an
atomic. Split i of an item that row b begins is the first piece of row b + i, and lies in its first slot; split 0 is the
last piece of row b, and lies in its second. Many splits are merged in two steps: by teams of neighbours, then the
teams' results. A team leaves its result in a slot that nobody else uses: the second of a row that lies wholly inside
the item.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from mjolnir.kernels import ptx
from mjolnir.kernels.epilogue import Epilogue
from mjolnir.kernels.geometry import WARP, log2
from mjolnir.kernels.partials import Partials, add_parts, empty_sum
from mjolnir.kernels.softmax import NEG_INF
from mjolnir.kernels.work import Mailbox

LOADS_IN_FLIGHT = 8
"""Splits that a thread reads at once in ARRIVE. 16 save round trips to L2, but 1 x 1K took 0.7 us more with them."""

LOG2_TEAM = ((16, 4), (64, 3), (256, 4), (1 << 30, 5))
"""(up to so many splits, log2 of a team's members): more than 16 splits are merged in two steps, by teams of neighbours
first. The two steps take about as many round trips."""

TOGETHER_IN_FLIGHT = 2
"""Splits that a thread reads at once where all rows merge, and sums of other threads that it adds at once."""

MOST_PARTS = 32
"""Of a result that all rows merge: a bit of a word each."""


class Teams(NamedTuple):
    """How the splits of an item are merged, as one row of it sees that. Rows are of the plan."""

    begin_row: Int32
    team_size: Int32
    teams: Int32
    leader: Int32  # first row of the own team
    members: Int32  # of the own team
    alone: Int32  # 1: the last team has one member, which leaves its result where a split's lies


class Level(NamedTuple):
    """Slots that are summed: first, second, second + stride, …; that of part ``lone`` is the one before."""

    parts: Int32
    first: Int32
    second: Int32
    stride: Int32
    lone: Int32


class Parts(NamedTuple):
    """How an item's result is divided among its rows. A unit is four elements of a q row."""

    units: Int32
    log2_size: Int32
    count: Int32
    begin_row: Int32
    splits: Int32


class SplitMerge(Epilogue):
    @cute.jit
    def conclude(self, row, begin_row, final_row, waits):
        """Merge the warps, and the splits that rows begin_row … final_row hold if there are several. Returns 1 if the
        last warp does that alone, while the others go on; else 0."""
        alone = Int32(1 if self.geo.own_q else 0)
        if cutlass.const_expr(self.variant.split):
            if begin_row == final_row:
                self.write()
            else:
                if waits == 1:
                    self.merge_together(row, begin_row, final_row)
                else:
                    self.merge_in_teams(row, begin_row, final_row)
                alone = Int32(0)
        else:
            self.write()
        return alone

    @property
    def partials(self) -> Partials:
        return Partials(self.geo, self.args)

    # All rows merge

    @cute.jit
    def merge_together(self, row, begin_row, final_row):
        """The rows of a pair make one split."""
        splits = (final_row - begin_row + self.halves) >> self.paired
        split = (row - begin_row) >> self.paired
        if splits == 1:
            self.sync()
            self.finish_rows(self.first_row, self.row_step)
        else:
            units = self.live_rows * (self.geo.head_size // 4)
            # Units and parts, rounded to powers of two: up and down.
            log2_size = ptx.floor_log2(units - 1) + 1 - ptx.floor_log2(cutlass.min(splits, MOST_PARTS))
            log2_size = cutlass.max(log2_size, Int32(0))
            parts = Parts(units, log2_size, (units + (1 << log2_size) - 1) >> log2_size, begin_row, splits)
            part = splits - 1 - split
            has_part = part < parts.count
            waits = part == 0 or (has_part and self.all_have_begun() == 1)
            if self.is_first:
                ptx.sts_b32(self.first_half + self.flag, Int32(0))
            self.sync()
            note = Int32(0) if waits or not has_part else Int32(1) << part - 1
            self.store_rows(2 * (begin_row + split * self.halves), ptx.int_as_float(note))
            if waits:
                going = Int32(1)
                while going == 1:
                    self.merge_part(part, parts)
                    going = Int32(0)
                    if split == splits - 1:
                        # Parts of rows that do not wait, bit k is part k + 1: the sign bit stays clear.
                        left = ptx.lds_b32(self.first_half + self.flag) >> part
                        while going == 0 and left != 0:
                            going = left & 1
                            left = left >> 1
                            part += 1

    def all_have_begun(self) -> Any:
        """Whether all of the plan's rows have: each half has one, and then hears that from its producer."""
        mailbox, smem, turn = Mailbox(self.geo), self.first_half + self.smem, Int32(1)
        mailbox.wait(smem, turn)
        return mailbox.mode(smem, turn)

    @cute.jit
    def store_rows(self, slot, note):
        for r in cutlass.range(self.first_row, self.live_rows, self.row_step, unroll=1):
            row = self.row_at(r)
            state = empty_sum()
            self.add_warps(state, row, ptx.lds_f32(self.mult + row * 4))
            self.partials.store(slot, row, self.element, state, note)

    @cute.jit
    def merge_part(self, part, parts):
        """Threads stand on (some splits, unit); those of a unit then add up their sums."""
        most = 1 << (self.geo.consumer_warps * WARP).bit_length() - 1
        log2_row = log2(self.geo.head_size // 4)
        log2_width = cutlass.min(parts.log2_size, Int32(log2(most)))
        width = Int32(1) << log2_width
        share, shares = self.thread >> log2_width, self.threads >> log2_width
        for first in cutlass.range(0, 1 << parts.log2_size, width, unroll=1):
            place = self.thread & (width - 1)
            unit = (part << parts.log2_size) + first + place
            live = unit < parts.units
            unit = unit if live else Int32(0)
            row, element = self.row_at(unit >> log2_row), (unit & (1 << log2_row) - 1) * 4
            spot = self.spot(row, self.column(element))
            mult = ptx.lds_f32(self.mult + row * 4)
            state = empty_sum()
            self.add_splits(state, live and share < shares, share, shares, row, element, mult, parts)
            step = width
            while step < WARP:
                self.add_lane(state, step, mult)
                step = step * 2
            log2_sums = cutlass.max(log2_width, Int32(log2(WARP)))
            sums = self.threads >> log2_sums
            at = self.first_half + self.exchange + place * 32
            self.sync()
            if self.thread & ((1 << log2_sums) - 1) < width:
                mine = at + ((self.thread >> log2_sums) << log2_width) * 32
                ptx.sts_f32x2(mine, state[0], state[1])
                ptx.sts_f32x4(mine + 16, [state[2 + e] for e in range(4)])
            self.sync()
            if live and share == 0:
                state = empty_sum()
                for i in cutlass.range(0, sums, TOGETHER_IN_FLIGHT, unroll=1):
                    ms, ls, values = [], [], []
                    for j in cutlass.range_constexpr(TOGETHER_IN_FLIGHT):
                        that = at + (cutlass.min(i + j, sums - 1) << log2_width) * 32
                        m, l = ptx.lds_f32x2(that)
                        ms.append(m if i + j < sums else Float32(NEG_INF))
                        ls.append(l)
                        values.append(ptx.lds_f32x4(that + 16))
                    add_parts(state, ms, ls, values, mult)
                self.finish_row(spot, state, mult)

    @cute.jit
    def add_lane(self, state, step, mult):
        """Add the sum of the lane ``step`` away."""
        m, l, *o = [cute.arch.shuffle_sync_bfly(state[i], step) for i in range(6)]
        add_parts(state, [m], [l], [o], mult)

    @cute.jit
    def add_splits(self, state, live, share, shares, row, element, mult, parts):
        """Every ``shares``-th split, of one unit."""
        last = parts.splits - 1
        passed_on = Int32(0)
        for first in cutlass.range(0, parts.splits, shares * TOGETHER_IN_FLIGHT, unroll=1):
            splits = [first + share + j * shares for j in range(TOGETHER_IN_FLIGHT)]
            slots = [2 * (parts.begin_row + i * self.halves) for i in splits]
            valid = [live and i <= last for i in splits]
            notes = self.partials.add(state, slots, valid, row, element, mult, False)
            for note in notes:
                passed_on = passed_on | ptx.float_as_int(note)
        if passed_on != 0:
            ptx.or_shared(self.first_half + self.flag, passed_on)

    # The last to arrive merges

    @cute.jit
    def merge_in_teams(self, row, begin_row, final_row):
        splits, split = final_row - begin_row + 1, row - begin_row
        log2_team = Int32(0)
        for i in cutlass.range_constexpr(len(LOG2_TEAM)):
            up_to, log2_size = LOG2_TEAM[-1 - i]
            log2_team = Int32(log2_size) if splits <= up_to else log2_team
        team_size = Int32(1) << log2_team
        teams = (splits + team_size - 1) >> log2_team
        team = split >> log2_team
        leader = begin_row + team * team_size
        members = cutlass.min(splits - team * team_size, team_size)
        team_slot = 2 * (leader + 1) + 1 if team == 0 else 2 * leader + 1
        team_slot = team_slot if teams > 1 else Int32(-1)
        alone = Int32(1) if splits - (teams - 1) * team_size == 1 else Int32(0)
        shared = Teams(begin_row, team_size, teams, leader, members, alone)

        # A pass leaves this row's warps (level -1), adds up the members of the team (0), or the teams (1). One body for
        # all passes.
        level = Int32(-1)
        target = 2 * begin_row + 1 if split == 0 else 2 * row
        going = Int32(1)
        while going == 1:
            self.merge(level, target, shared)
            going = Int32(0)
            if target >= 0:
                in_team = level < 0 and members > 1
                counter = leader * 2 if in_team else begin_row * 2 + 1
                going = self.arrive(self.args.counters + Int64(counter) * 4, members if in_team else teams)
                level = Int32(0) if in_team else Int32(1)
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
    def merge(self, level, target, teams):
        """One pass: the result goes to slot ``target``, or is O where that is negative."""
        column = self.column(self.element)
        self.sync()
        for r in cutlass.range(self.first_row, self.live_rows, self.row_step, unroll=1):
            row = self.row_at(r)
            mult = ptx.lds_f32(self.mult + row * 4)
            state = empty_sum()
            if level < 0:
                self.add_warps(state, row, mult)
            else:
                slots = self.slots(level, teams)
                for first in cutlass.range(0, slots.parts, LOADS_IN_FLIGHT, unroll=1):
                    parts = [first + j for j in range(LOADS_IN_FLIGHT)]
                    places = [slot_of(slots, i) for i in parts]
                    self.partials.add(state, places, [i < slots.parts for i in parts], row, self.element, mult, True)
            if target < 0:
                self.finish_row(self.spot(row, column), state, mult)
            else:
                self.partials.store(target, row, self.element, state, Float32(0.0))
        self.sync()

    @cute.jit
    def slots(self, level, teams):
        in_team = level == 0
        parts = teams.members if in_team else teams.teams
        first = (
            (2 * teams.leader + 1 if teams.leader == teams.begin_row else 2 * teams.leader)
            if in_team
            else 2 * (teams.begin_row + 1) + 1
        )
        stride = Int32(2) if in_team else 2 * teams.team_size
        second = 2 * teams.leader + stride if in_team else 2 * teams.begin_row + stride + 1
        lone = teams.teams - 1 if level == 1 and teams.alone == 1 else Int32(-1)
        return Level(parts, first, second, stride, lone)


@cute.jit
def slot_of(slots, i):
    """The slot of part i of a level."""
    slot = slots.first if i == 0 else slots.second + (i - 1) * slots.stride
    return slot - 1 if i == slots.lone else slot
