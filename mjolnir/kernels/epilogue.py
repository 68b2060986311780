"""The end of a piece: merge the consumer warps of the CTA, normalise O, and write it.

The consumer threads stand on (row, four neighbouring elements).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from mjolnir.kernels import ptx
from mjolnir.kernels.args import DecodeArgs
from mjolnir.kernels.geometry import WARP, Geometry, log2
from mjolnir.kernels.heads import half_of, is_live, kv_head_of, token_and_head
from mjolnir.kernels.lanes import exchange_place
from mjolnir.kernels.partials import add_parts, empty_sum
from mjolnir.kernels.softmax import NEG_INF, P_BIAS, SoftmaxState
from mjolnir.kernels.unpack import UNPACK
from mjolnir.variant import Variant

LN_2 = 0.6931471805599453
CONSUMER_BARRIERS = 1
"""Two, of the halves' consumers, then one of both."""


class Column(NamedTuple):
    """Four neighbouring elements of a row of O."""

    element: Any  # the first, of a row of the product
    half: Any  # whose they are, of two heads whose rows are one
    place: Any  # the first, of its head's row
    v_factors: list[Any]  # V's descale, of each side


class Spot(NamedTuple):
    """Where a row's four elements go, and V's descale."""

    mine: Any  # whether they are of the row's own head, where two heads share rows
    token: Any
    head: Any
    place: Any
    v_factor: Any


class Epilogue:
    """One consumer thread's view of the results of item (seq, head)."""

    def __init__(
        self,
        variant: Variant,
        geo: Geometry,
        args: DecodeArgs,
        smem: Any,
        seq: Any,
        head: Any,
        paired: Any,
    ):
        self.variant, self.geo, self.args = variant, geo, args
        self.seq, self.head = seq, head
        self.smem, self.exchange = smem, smem + geo.exchange_offset
        self.ml = smem + geo.ml_offset
        self.mult = smem + geo.mult_offset
        self.flag = smem + geo.flag_offset
        self.counter, self.exchange_free = smem + geo.counter_offset, smem + geo.exchange_free_offset
        self.own_rows = args.q_len * args.group  # of a head, or of two that are one
        self.live_rows = geo.sides * self.own_rows
        self.v_unscale = UNPACK[variant.v_format or variant.kv_format].unscale
        threads = geo.half_warps * WARP
        half = Int32(ptx.thread_index() >= threads) if geo.halves == 2 else Int32(0)
        thread = ptx.thread_index() - half * threads
        self.is_first, self.lane = thread == 0, thread & WARP - 1
        # The halves of a pair are one: twice the threads, and all of their warps to merge.
        self.paired, self.halves = paired, 1 + paired
        self.threads = geo.consumer_warps * WARP * self.halves
        self.barrier = CONSUMER_BARRIERS + half * (1 - paired) + 2 * paired
        self.first_half = -half * paired * geo.half_bytes
        self.thread = thread + half * paired * (geo.consumer_warps * WARP)
        self.element = (self.thread & geo.head_size // 4 - 1) * 4
        self.first_row = self.thread >> log2(geo.head_size // 4)
        self.row_step = geo.consumer_warps * WARP // (geo.head_size // 4) * self.halves

    def row_at(self, i: Any) -> Any:
        """The i-th of the live rows: those of a second side begin at its row group's first."""
        if self.geo.sides == 1:
            return i
        return i + Int32(i >= self.own_rows) * (self.geo.rows_per_warp - self.own_rows)

    def column(self, element: Any) -> Column:
        geo, args = self.geo, self.args
        half, place, kv_heads = Int32(0), element, [self.head]
        if geo.joined == "heads":
            half, place = element >> log2(self.variant.head_size), element & self.variant.head_size - 1
            kv_heads = [kv_head_of(self.head, half)]
        elif geo.joined == "panels":
            kv_heads = [kv_head_of(self.head, side) for side in range(2)]
        if geo.joined_heads:
            kv_heads = [cutlass.min(h, args.real_kv_heads - 1) for h in kv_heads]
        at = [Int64(self.seq) * args.v_scale_seq_stride + Int64(h) * args.v_scale_head_stride for h in kv_heads]
        return Column(element, half, place, [ptx.ldg_f32(args.v_scale + i * 4) for i in at])

    def sync(self) -> None:
        ptx.barrier_sync(self.barrier, self.threads)

    def share(self, state: SoftmaxState, mult: Any, group: Any, row0: Any) -> None:
        """This warp's O, m and l into the exchange buffer."""
        geo = self.geo
        g, t = self.lane >> 2, self.lane & 3
        for c in range(2 * geo.row_tiles):
            n, e = c // 2, c % 2
            total = state.l[c]
            for step in range(3):
                total = total + cute.arch.shuffle_sync_bfly(total, 4 << step)
            row = row0 + n * 8 + 2 * t + e
            slot = group * geo.rows + row
            for i in range(geo.m_tiles):
                at = (n * geo.m_tiles + i) * 4 + e
                word = slot * geo.exchange_stride + exchange_place(geo.v, i, g)
                ptx.sts_f32x2(self.exchange + word * 4, state.acc[at], state.acc[at + 2])
            # Every g holds the same values: eight lanes write one word.
            ptx.sts_f32x2(self.ml + slot * 8, state.m[c], total)
            ptx.sts_f32(self.mult + row * 4, mult[c])

    def exchange_bytes(self) -> tuple[Any, Any]:
        """Where ``share`` put this thread's elements in a row, two and two."""
        geo = self.geo
        if geo.wide:
            return self.element * 4, self.element * 4 + 8
        run = geo.v.panel_elems // 8
        panel, inside = self.element >> log2(geo.v.panel_elems), self.element & geo.v.panel_elems - 1
        tile, lane = panel * (run // 2) + ((inside & run - 1) >> 1), inside >> log2(run)
        first = exchange_place(geo.v, tile, lane) * 4
        return first, first ^ 64  # of m16 tiles 2 i and 2 i + 1

    @cute.jit
    def write(self):
        """Merge the warps and write O. With room for the next piece's Q the warp that comes here last does that, and
        the others go on at once: a barrier keeps each until the last tile of all is done (a tenth of the time of
        256 x 1K)."""
        if cutlass.const_expr(self.geo.own_q):
            cute.arch.sync_warp()
            come = Int32(0)
            if self.lane == 0:
                come = ptx.atomic_inc_shared(self.counter, Int32(self.geo.consumer_warps - 1))
            if cute.arch.shuffle_sync(come, 0) == self.geo.consumer_warps - 1:
                # A row takes d / 4 threads: half a warp, or a whole one.
                self.finish_rows(self.lane // (self.geo.head_size // 4), Int32(WARP // (self.geo.head_size // 4)))
                cute.arch.sync_warp()
                if self.lane == 0:
                    ptx.mbarrier_arrive(self.exchange_free)
        else:
            self.sync()
            self.finish_rows(self.first_row, self.row_step)
            self.sync()

    @cute.jit
    def finish_rows(self, first, step):
        column = self.column(self.element)
        for i in cutlass.range(first, self.live_rows, step, unroll=1):
            row = self.row_at(i)
            mult = ptx.lds_f32(self.mult + row * 4)
            state = empty_sum()
            self.add_warps(state, row, mult)
            self.finish_row(self.spot(row, column), state, mult)

    @cute.jit
    def add_warps(self, state, row, mult):
        """Add what the warps shared of a row."""
        geo = self.geo
        first, second = self.exchange_bytes()
        for half in cutlass.range(self.halves, unroll=1):
            base = self.first_half + half * geo.half_bytes
            ms, ls, values = [], [], []
            for group in cutlass.range_constexpr(geo.groups):
                m, l = ptx.lds_f32x2(base + self.ml + (group * geo.rows + row) * 8)
                row_words = base + self.exchange + (group * geo.rows + row) * geo.exchange_stride * 4
                ms.append(m)
                ls.append(l)
                values.append((*ptx.lds_f32x2(row_words + first), *ptx.lds_f32x2(row_words + second)))
            add_parts(state, ms, ls, values, mult)

    @cute.jit
    def spot(self, row, column):
        """Where a row's elements go: known before the elements, which are waited for."""
        geo, args = self.geo, self.args
        token, head = token_and_head(geo, args, self.head, row)
        token = self.seq * args.q_len + token
        mine, v_factor = cutlass.Boolean(True), column.v_factors[0]
        if cutlass.const_expr(geo.joined_heads):
            half = half_of(geo, args, row)
            mine = is_live(geo, args, self.head, row)
            if cutlass.const_expr(geo.joined == "heads"):
                mine = mine & (half == column.half)
            else:
                v_factor = column.v_factors[1] if half == 1 else v_factor
        return Spot(mine, token, head, column.place, v_factor)

    @cute.jit
    def finish_row(self, spot, state, mult):
        """Write a row's elements, if they are of its head."""
        if cutlass.const_expr(self.geo.joined_heads):
            if spot.mine:
                self.write_row(spot, state, mult)
        else:
            self.write_row(spot, state, mult)

    @cute.jit
    def write_row(self, spot, state, mult):
        """Normalise, apply v_scale and o_mul, round once, write."""
        args = self.args
        m, l, *o = [state[i] for i in range(6)]
        # l is 0 where no key is seen; NaN must stay NaN.
        inverse = Float32(0.0) if l == 0.0 else ptx.rcp(l)
        if cutlass.const_expr(self.v_unscale != 1.0):
            inverse = inverse * self.v_unscale
        factors = [Float32(1.0)] * 4
        if args.o_mul != 0:
            factors = list(ptx.ldg_f32x4(args.o_mul + Int64(spot.head * self.variant.head_size + spot.place) * 4))
        o = [x * inverse * spot.v_factor * f for x, f in zip(o, factors, strict=True)]
        pack = ptx.pack_bf16x2 if self.variant.out_dtype == "bf16" else ptx.pack_f16x2
        at = Int64(spot.token) * args.out_token_stride + Int64(spot.head) * args.out_head_stride + Int64(spot.place)
        ptx.stg_b64(args.out + at * 2, pack(o[0], o[1]), pack(o[2], o[3]))
        if args.lse != 0:
            if spot.place == 0:
                value = Float32(NEG_INF) if l == 0.0 else (m * mult + (ptx.lg2(l) - P_BIAS)) * LN_2
                ptx.stg_f32(args.lse + (Int64(spot.token) * args.lse_token_stride + Int64(spot.head)) * 4, value)
