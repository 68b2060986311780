"""A consumer warp: S, softmax and O of its share of every piece's tiles, then its part in the results."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from mjolnir.kernels import ptx
from mjolnir.kernels.args import DecodeArgs
from mjolnir.kernels.geometry import WARP, Geometry
from mjolnir.kernels.heads import half_of, is_live, kv_head_of, token_and_head
from mjolnir.kernels.lanes import position_of
from mjolnir.kernels.softmax import NEG_INF, OnlineSoftmax
from mjolnir.kernels.split import SplitMerge
from mjolnir.kernels.tile import TileMath
from mjolnir.kernels.work import Mailbox, first_stage, item_of, num_tiles, rows_of_item, span_of
from mjolnir.plan import ARRIVE, PAIRED
from mjolnir.variant import Variant

LOG2_E = 1.4426950408889634
FLT_MAX, FLT_MIN = 3.4028234663852886e38, 1.1754943508222875e-38


class Consumer:
    """Code of one consumer warp; the warps of a CTA form a grid (see Geometry)."""

    def __init__(self, variant: Variant, geo: Geometry):
        self.variant, self.geo = variant, geo
        self.math = TileMath(variant, geo)
        self.softmax = OnlineSoftmax(geo)
        self.mailbox = Mailbox(geo)

    @cute.jit
    def run(self, args, smem, warp, lane):
        """Of each piece every kv_groups-th tile, then what this warp does of the results."""
        geo = self.geo
        stage = Int32(0)  # as the producer counts
        filled = Int32(0)  # bit s: parity of the phase in which stage s is full next
        turn = Int32(0)
        written = Int32(0)  # pieces that the last warp wrote
        self.mailbox.wait(smem, turn)
        pieces = self.mailbox.read(smem, turn).pieces
        while pieces >= 0:
            p = Int32(0)  # counted against the mailbox: a register less across the tile loop
            while p < self.mailbox.read(smem, turn).pieces:
                seq, head = item_of(args, self.mailbox.read(smem, turn), p)
                seq_len = cutlass.min(ptx.ldg_b32(args.seq_lens + Int64(seq) * 4), args.max_len)
                begin, end = span_of(self.mailbox.read(smem, turn), p, seq_len)
                tiles = num_tiles(geo, begin, end)
                stage = first_stage(geo, stage)
                mult = self.read_q(args, smem, warp, lane, seq, head, seq_len)
                if cutlass.const_expr(geo.own_q):
                    self.prefetch_q(args, self.mailbox.read(smem, turn), p + 1, warp, lane)
                state, filled = self.attend(args, smem, warp, lane, seq_len, begin, end, mult, stage, filled)
                stage = (stage + tiles) % geo.stages
                work = self.mailbox.read(smem, turn)
                mode = self.mailbox.mode(smem, turn)
                paired = Int32(mode == PAIRED) if cutlass.const_expr(geo.halves == 2) else Int32(0)
                result = SplitMerge(self.variant, geo, args, smem, seq, head, paired)
                if cutlass.const_expr(geo.own_q):
                    ptx.mbarrier_wait(result.exchange_free, (written & 1) ^ 1)
                self.share(result, state, mult, smem, warp)
                alone = result.conclude(work.row, *rows_of_item(work, p), Int32(mode != ARRIVE))
                if cutlass.const_expr(geo.own_q):
                    written += alone
                p += 1
            self.mailbox.free(smem, lane, turn)
            turn += 1
            self.mailbox.wait(smem, turn)
            pieces = self.mailbox.read(smem, turn).pieces

    def place(self, warp: Any) -> tuple[Any, Any]:
        """(group, first q row) of a warp."""
        return warp // self.geo.row_groups, warp % self.geo.row_groups * self.geo.rows_per_warp

    def share(self, result: SplitMerge, state: Any, mult: Any, smem: Any, warp: Any) -> None:
        result.share(state, mult, *self.place(warp))

    @cute.jit
    def attend(self, args, smem, warp, lane, seq_len, begin, end, mult, stage, filled):
        """S, softmax and O of this warp's tiles of [begin, end) and rows of Q."""
        geo = self.geo
        g, t = lane // 4, lane % 4
        tokens = self.math.tokens_of(g)
        group, row0 = self.place(warp)
        kv_group, first = group // geo.token_groups, group % geo.token_groups * geo.warp_tile
        side = warp % geo.row_groups if geo.sides == 2 else 0
        own0 = 0 if geo.sides == 2 else row0  # the first row, as the own head counts
        q_frags = self.q_frags(smem, warp, lane)
        tiles = num_tiles(geo, begin, end)
        state = self.softmax.start()
        mine = stage + kv_group
        held = Int32(0)  # the barrier of a stage that was read but is not released yet, see release
        for tile in cutlass.range(kv_group, tiles, geo.kv_groups, unroll=1):
            if cutlass.const_expr(geo.scale_stage_bytes > 0):
                if held != 0:
                    self.release(held, lane)
            token0 = begin + tile * geo.tile + first
            k_tile = smem + mine * geo.stage_bytes + side * geo.side_bytes(geo.k) + first * geo.k.stride
            v_tile = (
                smem + mine * geo.stage_bytes + geo.v_in_stage + side * geo.side_bytes(geo.v) + first * geo.v.stride
            )
            scales = smem + geo.scales_offset + mine * geo.scale_stage_bytes
            k_scales = scales + (side * geo.tile + first) * geo.k.scale_bytes
            v_scales = scales + geo.v_in_scales + (side * geo.tile + first) * geo.v.scale_bytes
            ptx.mbarrier_wait(smem + geo.full_offset + 8 * mine, (filled >> mine) & 1)
            filled = filled ^ (Int32(1) << mine)
            scores = self.math.scores(k_tile, k_scales, q_frags, g, t, side)
            if token0 + geo.warp_tile > seq_len - (args.q_len - 1) * args.causal:
                self.clear_rows(v_tile, v_scales, end - token0, lane)
                for c in cutlass.range_constexpr(2 * geo.row_tiles):
                    q_token = (own0 + (c // 2) * 8 + 2 * t + c % 2) // args.group
                    limit = seq_len - (args.q_len - 1 - q_token) * args.causal - token0
                    seen = [limit - token for token in tokens]
                    for i in cutlass.range_constexpr(geo.warp_tile // 8):
                        s = scores[c // 2][2 * i + c % 2]
                        scores[c // 2][2 * i + c % 2] = s if 8 * i < seen[i % 2] else Float32(NEG_INF)
            self.softmax.update(state, scores, mult)
            self.math.accumulate(v_tile, v_scales, scores, state.acc, g, t, side)
            held = smem + geo.empty_offset + 8 * mine
            if cutlass.const_expr(geo.scale_stage_bytes == 0):
                self.release(held, lane)
            mine = mine + geo.kv_groups if mine + geo.kv_groups < geo.stages else kv_group
        if cutlass.const_expr(geo.scale_stage_bytes > 0):
            if held != 0:
                self.release(held, lane)
        return state, filled

    @cute.jit
    def release(self, stage_empty, lane):
        """Give a stage back to the producer.

        The compiler lets the arrival follow the last loads from the stage without waiting for what they load, and
        between the copies of block scales, of which one may keep the load unit busy for long, the next tile's V came
        first: in every launch over token-major pages. So with block scales a stage is released after the tile's loop
        body: its arithmetic has been issued by then, and so has all that it loads."""
        cute.arch.sync_warp()
        if lane == 0:
            ptx.mbarrier_arrive(stage_empty)

    @cute.jit
    def prefetch_q(self, args, work, p, warp, lane):
        """Q of piece p, if there is one, into L1 a piece before it is read: under load that takes L2 a microsecond."""
        g, t = lane // 4, lane % 4
        _, row0 = self.place(warp)
        if p < work.pieces:
            seq, head = item_of(args, work, p)
            for n in cutlass.range_constexpr(self.geo.row_tiles):
                row = row0 + n * 8 + g
                if is_live(self.geo, args, head, row):
                    address = self.q_address(args, seq, head, row)
                    for _, element in self.math.lane_runs(self.own_quarter(t))[0]:
                        ptx.prefetch_l1(address + Int64(element) * 2)

    def own_quarter(self, t: Any) -> Any:
        """Of a row of Q, the part that lane t reads: a quarter, or half of the one that is joined to another."""
        return t & 1 if self.geo.joined == "heads" else t

    def q_address(self, args: Any, seq: Any, head: Any, row: Any) -> Any:
        token, q_head = token_and_head(self.geo, args, head, row)
        token = seq * args.q_len + token
        return args.q + (Int64(token) * args.q_token_stride + Int64(q_head) * args.q_head_stride) * 2

    def q_frags(self, smem: Any, warp: Any, lane: Any) -> Any:
        return smem + self.geo.q_offset + warp * self.geo.q_warp_bytes + lane * 16

    @cute.jit
    def read_q(self, args, smem, warp, lane, seq, head, seq_len):
        """Q of the warp's rows to B fragments in shared memory; returns mult of this lane's columns."""
        geo = self.geo
        g, t = lane // 4, lane % 4
        _, row0 = self.place(warp)
        q_frags = self.q_frags(smem, warp, lane)
        own = self.own_quarter(t)
        factor = Float32(1.0)
        if cutlass.const_expr(geo.joined != "heads"):
            kv_head = head
            if cutlass.const_expr(geo.joined == "panels"):
                kv_head = cutlass.min(kv_head_of(head, half_of(geo, args, row0)), args.real_kv_heads - 1)
            factor = self.score_factor(args, seq, kv_head)
        sign = Float32(-1.0) if factor < 0.0 else Float32(1.0)
        unscale = []
        for n in cutlass.range_constexpr(geo.row_tiles):
            row = row0 + n * 8 + g
            live = is_live(geo, args, head, row)
            row = row if live else Int32(0)
            frags = q_frags + n * geo.q_frag_bytes
            staging = frags - lane * 16
            values = self.math.load_q_rows(self.q_address(args, seq, head, row), staging, own, lane)
            if args.q_mul != 0:
                _, q_head = token_and_head(geo, args, head, row)
                self.math.scale_q_row(values, args.q_mul + Int64(q_head * self.variant.head_size) * 4, own)
            if cutlass.const_expr(geo.joined == "heads"):
                half = half_of(geo, args, row)
                factor = self.score_factor(args, seq, kv_head_of(head, half))
                sign = Float32(-1.0) if factor < 0.0 else Float32(1.0)
                live = live & (t >> 1 == half)
                row_unscale = self.math.store_q_row(frags, values, sign if live else Float32(0.0))
                unscale.append(row_unscale * (factor * sign))
            else:
                unscale.append(self.math.store_q_row(frags, values, sign if live else Float32(0.0)))
        cute.arch.sync_warp()
        mult = []
        for c in cutlass.range_constexpr(2 * geo.row_tiles):
            scale = cute.arch.shuffle_sync(unscale[c // 2], (2 * t + c % 2) * 4)
            if cutlass.const_expr(geo.joined != "heads"):
                scale = scale * (factor * sign)
            mult.append(self.to_mult(scale))
        return mult

    def to_mult(self, scale: Any) -> Any:
        """A row's factor from raw S to base-2 scores."""
        scale = scale * (LOG2_E * self.math.k_unpack.unscale)
        return cutlass.max(cutlass.min(scale, Float32(FLT_MAX)), Float32(FLT_MIN))

    def score_factor(self, args: DecodeArgs, seq: Any, kv_head: Any) -> Any:
        """Softmax scale and K descale."""
        at = Int64(seq) * args.k_scale_seq_stride + Int64(kv_head) * args.k_scale_head_stride
        return args.softmax_scale * ptx.ldg_f32(args.k_scale + at * 4)

    @cute.jit
    def clear_rows(self, v_tile, v_scales, first, lane):
        """Zero the rows of V from ``first`` on: dead rows may hold anything, and 0 * NaN must not reach O."""
        geo = self.geo
        first = cutlass.max(cutlass.min(first, Int32(geo.warp_tile)), Int32(0))
        for token in cutlass.range(first, geo.warp_tile, unroll=1):
            row = position_of(geo.joined, token)
            for panel in cutlass.range_constexpr(geo.v.panels):
                for byte in cutlass.range_constexpr(0, geo.v.stride, 4 * WARP):
                    if lane * 4 < geo.v.stride - byte:
                        ptx.sts_b32(v_tile + (panel * geo.tile + row) * geo.v.stride + byte + lane * 4, Int32(0))
            if cutlass.const_expr(geo.v.scale_bytes > 0):
                if lane * 4 < geo.v.scale_bytes:
                    ptx.sts_b32(v_scales + row * geo.v.scale_bytes + lane * 4, Int32(0))
        ptx.fence_proxy_async_shared()
        cute.arch.sync_warp()
