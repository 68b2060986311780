"""The end of a piece: merge the warps of the CTA, write O, or publish a partial result and merge the splits.

A partial result is (O, m, l) per q row, O and l relative to 2^(m * mult): m is a maximum of unscaled scores and
mult the row's factor to base-2 scores, so that no scale, however large, makes m overflow. A split item is
merged by whichever of its CTAs arrives last, in the order of the splits: the result does not depend on who that is.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from mjolnir.kernels import ptx
from mjolnir.kernels.geometry import MERGE_FAN_IN, WARP

LN_2 = 0.6931471805599453
P_BIAS = 8.0
CONSUMER_BARRIER = 1
NEG_INF = float("-inf")


class ResultWriter:
    """What one consumer thread does with a piece's result. Threads stand on (row, four neighbouring elements)."""

    def __init__(self, kernel: Any, smem: Any, warp: Any, lane: Any, live_rows: Any, group: Any):
        self.geo = geo = kernel.geo
        self.split = kernel.variant.split
        self.pack = ptx.pack_bf16x2 if kernel.variant.out_dtype == "bf16" else ptx.pack_f16x2
        self.exchange = smem + geo.exchange_offset
        self.ml = smem + geo.ml_offset
        self.mult = smem + geo.mult_offset
        self.flag = smem + geo.flag_offset
        self.warp, self.lane = warp, lane
        self.live_rows, self.group = live_rows, group
        self.threads = geo.consumer_warps * WARP
        thread = warp * WARP + lane
        self.element = thread % (geo.head_size // 4) * 4
        self.first_row = thread // (geo.head_size // 4)
        self.row_step = self.threads // (geo.head_size // 4)

    def sync(self) -> None:
        cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=self.threads)

    def stage_partial(self, acc: Any, m: Any, l: Any, mult: Any, kv_group: Any, row0: Any, g: Any, t: Any) -> None:
        """Each warp's O, m and l into the exchange buffer."""
        geo = self.geo
        m_tiles = geo.head_size // 16
        for n in range(geo.row_tiles):
            for e in range(2):
                c = 2 * n + e
                total = l[c]
                for step in range(3):
                    total = total + cute.arch.shuffle_sync_bfly(total, 4 << step)
                row = row0 + n * 8 + 2 * t + e
                slot = kv_group * geo.rows + row
                for i in range(m_tiles):
                    at = (n * m_tiles + i) * 4 + e
                    word = slot * geo.exchange_stride + i * 18 + 2 * g
                    ptx.sts_f32x2(self.exchange + word * 4, acc[at], acc[at + 2])
                # Every g holds the same values: eight lanes write one word.
                ptx.sts_f32x2(self.ml + slot * 8, m[c], total)
                ptx.sts_f32(self.mult + row * 4, mult[c])

    def exchange_word(self, element: Any) -> Any:
        """Where ``stage_partial`` put this element: it is element 2 i + h of lane g."""
        geo = self.geo
        run = geo.panel_elems // 8
        panel = element // geo.panel_elems
        inside = element % geo.panel_elems
        return (panel * (run // 2) + inside % run // 2) * 18 + inside // run * 2

    @cute.jit
    def write(
        self,
        begin_cta,
        final_cta,
        cta,
        partials,
        counters,
        out,
        out_token_stride,
        out_head_stride,
        lse,
        lse_token_stride,
        o_mul,
        v_factor,
    ):
        geo = self.geo
        self.sync()
        word = self.exchange_word(self.element)
        splits = final_cta - begin_cta + 1
        own_slot = 2 * cta + 1 if cta == begin_cta else 2 * cta
        own = partials + Int64(own_slot) * (geo.partial_floats * 4)
        for row in cutlass.range(self.first_row, self.live_rows, self.row_step, unroll=1):
            mult = ptx.lds_f32(self.mult + row * 4)
            ms, ls = [], []
            for group in cutlass.range_constexpr(geo.kv_groups):
                m, l = ptx.lds_f32x2(self.ml + (group * geo.rows + row) * 8)
                ms.append(m)
                ls.append(l)
            top = ms[0]
            for group in cutlass.range_constexpr(1, geo.kv_groups):
                top = cute.arch.fmax(top, ms[group])
            total = Float32(0.0)
            o = [Float32(0.0)] * 4
            for group in cutlass.range_constexpr(geo.kv_groups):
                weight = ptx.ex2((ms[group] - top) * mult) if ms[group] != NEG_INF else Float32(0.0)
                total = total + ls[group] * weight
                addr = self.exchange + ((group * geo.rows + row) * geo.exchange_stride + word) * 4
                pair = (*ptx.lds_f32x2(addr), *ptx.lds_f32x2(addr + 18 * 4))
                o = [a + x * weight for a, x in zip(o, pair, strict=True)]
            if splits == 1:
                self.finish_row(row, o, top, total, mult, out, out_token_stride, out_head_stride, lse,
                                lse_token_stride, o_mul, v_factor)
            elif cutlass.const_expr(self.split):
                self.store_partial(own, row, o, top, total)
        self.sync()
        if cutlass.const_expr(self.split):
            if splits > 1:
                self.merge_splits(begin_cta, splits, cta, partials, counters, out, out_token_stride,
                                  out_head_stride, lse, lse_token_stride, o_mul, v_factor)

    def store_partial(self, slot: Any, row: Any, o: Any, m: Any, l: Any) -> None:
        geo = self.geo
        ptx.stg_f32x4(slot + Int64(row * geo.head_size + self.element) * 4, o)
        ptx.stg_f32x2(slot + Int64(geo.rows * geo.head_size + row * 2) * 4, m, l)

    @cute.jit
    def finish_row(self, row, o, m, l, mult, out, out_token_stride, out_head_stride, lse, lse_token_stride, o_mul,
                   v_factor):
        """Normalise, apply v_scale and o_mul, round once, write."""
        token = row // self.group
        head = row - token * self.group
        inverse = 1.0 / l if l > 0.0 else Float32(0.0)
        factors = [Float32(1.0)] * 4
        if o_mul != 0:
            factors = list(ptx.ldg_f32x4(o_mul + Int64(head * self.geo.head_size + self.element) * 4))
        o = [x * inverse * v_factor * f for x, f in zip(o, factors, strict=True)]
        addr = out + (Int64(token) * out_token_stride + Int64(head) * out_head_stride + Int64(self.element)) * 2
        ptx.stg_b64(addr, self.pack(o[0], o[1]), self.pack(o[2], o[3]))
        if lse != 0:
            if self.element == 0:
                value = (m * mult + (ptx.lg2(l) - P_BIAS)) * LN_2 if l > 0.0 else Float32(NEG_INF)
                ptx.stg_f32(lse + (Int64(token) * lse_token_stride + Int64(head)) * 4, value)

    @cute.jit
    def arrive(self, counter, expected):
        """1 in every thread of the CTA that arrives last of ``expected``, else 0. The counter resets itself."""
        ptx.fence_gpu()
        self.sync()
        if self.warp == 0:
            if self.lane == 0:
                old = ptx.atomic_inc(counter, expected - 1)
                ptx.sts_b32(self.flag, Int32(1) if old == expected - 1 else Int32(0))
        self.sync()
        ptx.fence_gpu()
        return ptx.lds_b32(self.flag)

    @cute.jit
    def merge_splits(self, begin_cta, splits, cta, partials, counters, out, out_token_stride, out_head_stride, lse,
                     lse_token_stride, o_mul, v_factor):
        """Up to MERGE_FAN_IN splits in one step; more in two, by teams of MERGE_FAN_IN neighbours."""
        team = (cta - begin_cta) // MERGE_FAN_IN
        teams = (splits + (MERGE_FAN_IN - 1)) // MERGE_FAN_IN
        leader = begin_cta + team * MERGE_FAN_IN
        members = cutlass.min(splits - team * MERGE_FAN_IN, Int32(MERGE_FAN_IN))
        # Two counters per CTA: of the team it leads, and of the item it begins.
        last = self.arrive(counters + Int64(leader) * 8, members)
        if last == 1:
            first_slot = 2 * leader + 1 if team == 0 else 2 * leader
            self.merge(leader, first_slot, Int32(1), members, teams > 1, partials, out, out_token_stride,
                       out_head_stride, lse, lse_token_stride, o_mul, v_factor)
            if teams > 1:
                last = self.arrive(counters + Int64(begin_cta) * 8 + 4, teams)
                if last == 1:
                    self.merge(begin_cta, 2 * begin_cta + 1, Int32(MERGE_FAN_IN), teams, teams < 0, partials, out,
                               out_token_stride, out_head_stride, lse, lse_token_stride, o_mul, v_factor)

    @cute.jit
    def merge(self, leader, first_slot, cta_step, count, again, partials, out, out_token_stride, out_head_stride, lse,
              lse_token_stride, o_mul, v_factor):
        """Merge the partial results of ``count`` <= 32 CTAs leader, leader + cta_step, ...: into O, or, to be
        merged ``again``, into the first one's slot."""
        geo = self.geo
        ml_at = geo.rows * geo.head_size * 4
        slot_bytes = geo.partial_floats * 4
        weights = self.exchange
        # One warp per row, one lane per split: its weight, and the row's m and l.
        for row in cutlass.range(self.warp, self.live_rows, geo.consumer_warps, unroll=1):
            m, l = Float32(NEG_INF), Float32(0.0)
            slot = first_slot if self.lane == 0 else 2 * (leader + self.lane * cta_step)
            if self.lane < count:
                m, l = ptx.ldg_cg_f32x2(partials + Int64(slot) * slot_bytes + (ml_at + row * 8))
            top = m
            for step in cutlass.range_constexpr(5):
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 1 << step))
            weight = ptx.ex2((m - top) * ptx.lds_f32(self.mult + row * 4)) if m != NEG_INF else Float32(0.0)
            total = l * weight
            for step in cutlass.range_constexpr(5):
                total = total + cute.arch.shuffle_sync_bfly(total, 1 << step)
            ptx.sts_f32(weights + (row * MERGE_FAN_IN + self.lane) * 4, weight)
            if self.lane == 0:
                ptx.sts_f32x2(self.ml + row * 8, top, total)
        self.sync()
        for row in cutlass.range(self.first_row, self.live_rows, self.row_step, unroll=1):
            offset = Int64(row * geo.head_size + self.element) * 4
            o = cute.make_rmem_tensor((4,), Float32)
            for e, x in enumerate(ptx.ldg_cg_f32x4(partials + Int64(first_slot) * slot_bytes + offset)):
                o[e] = x * ptx.lds_f32(weights + row * (MERGE_FAN_IN * 4))
            for i in cutlass.range(1, count, unroll=8):
                addr = partials + Int64(2 * (leader + i * cta_step)) * slot_bytes + offset
                weight = ptx.lds_f32(weights + (row * MERGE_FAN_IN + i) * 4)
                for e, x in enumerate(ptx.ldg_cg_f32x4(addr)):
                    o[e] = o[e] + x * weight
            m, l = ptx.lds_f32x2(self.ml + row * 8)
            values = [o[e] for e in range(4)]
            if again:
                self.store_partial(partials + Int64(first_slot) * slot_bytes, row, values, m, l)
            else:
                mult = ptx.lds_f32(self.mult + row * 4)
                self.finish_row(row, values, m, l, mult, out, out_token_stride, out_head_stride, lse,
                                lse_token_stride, o_mul, v_factor)
        self.sync()
