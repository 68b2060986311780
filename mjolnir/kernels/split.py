"""Merge the splits of an item: whichever of its CTAs arrives last reads all partial results, in the order of the
splits, so the result does not depend on who that is.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from mjolnir.kernels import ptx
from mjolnir.kernels.epilogue import Epilogue
from mjolnir.kernels.geometry import MERGE_FAN_IN, MERGE_TEAM, WARP
from mjolnir.kernels.softmax import NEG_INF, weight_of

LOADS_IN_FLIGHT = 8


class SplitMerge(Epilogue):
    """Split i of an item begun by CTA b lies in slot 2 b + 1 if i = 0 (the last piece of b), else in slot 2 (b + i)
    (the first piece of b + i)."""

    @cute.jit
    def arrive_and_merge(self, cta, begin_cta, final_cta):
        """Up to MERGE_FAN_IN splits in one step; more in two, by teams of MERGE_TEAM neighbours. The partial results
        of this CTA have been written before."""
        splits = final_cta - begin_cta + 1
        team_size = splits if splits <= MERGE_FAN_IN else Int32(MERGE_TEAM)
        teams = (splits + team_size - 1) // team_size
        team = (cta - begin_cta) // team_size
        leader = begin_cta + team * team_size
        members = cutlass.min(splits - team * team_size, team_size)
        # Two counters per CTA: of the team it leads, and of the item it begins.
        counters = self.args.counters
        last = self.arrive(counters + Int64(leader) * 8, members)
        if last == 1:
            self.merge(leader, 2 * leader + 1 if team == 0 else 2 * leader, Int32(1), members, teams > 1)
            if teams > 1:
                last = self.arrive(counters + Int64(begin_cta) * 8 + 4, teams)
                if last == 1:
                    self.merge(begin_cta, 2 * begin_cta + 1, team_size, teams, teams < 0)

    @cute.jit
    def arrive(self, counter, expected):
        """1 in every thread of the CTA that arrives last of ``expected``, else 0. The counter resets itself."""
        self.sync()
        if self.warp == 0:
            if self.lane == 0:
                # acq_rel, and barriers on both sides, order the whole CTA's accesses.
                old = ptx.atomic_inc(counter, expected - 1)
                ptx.sts_b32(self.flag(), Int32(1) if old == expected - 1 else Int32(0))
        self.sync()
        return ptx.lds_b32(self.flag())

    def flag(self):
        return self.mult + self.geo.rows * 4

    @cute.jit
    def merge(self, leader, first_slot, cta_step, count, again):
        """Merge the partial results of CTAs leader, leader + cta_step, ...: into O, or, to be merged ``again``, into
        the first one's slot."""
        geo = self.geo
        weights = self.exchange
        # One warp per row, MERGE_FAN_IN / 32 splits per lane: their weights, and the row's m, l and mult.
        for row in cutlass.range(self.warp, self.live_rows, geo.consumer_warps, unroll=1):
            ms, ls = [], []
            mult = Float32(0.0)
            for part in cutlass.range_constexpr(MERGE_FAN_IN // WARP):
                split = self.lane + part * WARP
                slot = first_slot if split == 0 else 2 * (leader + split * cta_step)
                m, l = Float32(NEG_INF), Float32(0.0)
                if split < count:
                    m, l, mult, _ = ptx.ldg_cg_f32x4(self.stats_address(slot, row))
                ms.append(m)
                ls.append(l)
            mult = cute.arch.shuffle_sync(mult, 0)
            top = ms[0]
            for part in cutlass.range_constexpr(1, MERGE_FAN_IN // WARP):
                top = cute.arch.fmax(top, ms[part])
            for step in cutlass.range_constexpr(5):
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 1 << step))
            total = Float32(0.0)
            for part in cutlass.range_constexpr(MERGE_FAN_IN // WARP):
                weight = weight_of(ms[part], top, mult) if ms[part] != NEG_INF else Float32(0.0)
                total = total + ls[part] * weight
                ptx.sts_f32(weights + (row * MERGE_FAN_IN + part * WARP + self.lane) * 4, weight)
            for step in cutlass.range_constexpr(5):
                total = total + cute.arch.shuffle_sync_bfly(total, 1 << step)
            if self.lane == 0:
                ptx.sts_f32x2(self.ml + row * 8, top, total)
                ptx.sts_f32(self.mult + row * 4, mult)
        self.sync()
        for row in cutlass.range(self.first_row, self.live_rows, self.row_step, unroll=1):
            o = cute.make_rmem_tensor((4,), Float32)
            o.fill(0.0)
            row_offset = Int64(row * geo.head_size + self.element) * 4
            for chunk in cutlass.range(0, count, LOADS_IN_FLIGHT, unroll=1):
                loads = []
                for j in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                    # Past the end the last split is read again, with a weight of 0.
                    split = cutlass.min(chunk + j, count - 1)
                    slot = first_slot if split == 0 else 2 * (leader + split * cta_step)
                    loads.append(ptx.ldg_cg_f32x4(self.partial_address(slot) + row_offset))
                for j in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                    weight = ptx.lds_f32(weights + (row * MERGE_FAN_IN + chunk + j) * 4)
                    weight = weight if chunk + j < count else Float32(0.0)
                    for e in cutlass.range_constexpr(4):
                        o[e] = o[e] + loads[j][e] * weight
            m, l = ptx.lds_f32x2(self.ml + row * 8)
            mult = ptx.lds_f32(self.mult + row * 4)
            values = [o[e] for e in range(4)]
            if again:
                self.store_partial(first_slot, row, values, m, l, mult)
            else:
                self.finish_row(row, values, m, l, mult)
        self.sync()
