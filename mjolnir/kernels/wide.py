"""Consumers of 32 and 64 q rows on Hopper: S and O by wgmma.

The operands stay swapped, S^T = K Q^T and O^T = V^T P^T: K and V are A, unpacked in registers as for mma.sync, and
Q and P are B, in shared memory. The four warps of a warpgroup share a tile of 64 tokens. Of S^T warp w has tokens
16 w … 16 w + 15, of O^T elements 32 w … 32 w + 31, and both of all q rows: one warp unpacks a byte of K or V, where
with mma.sync every row group unpacks all of them.

A row's running maximum m is the warpgroup's, since its P goes into one product. It changes rarely (see softmax.py), so
it lies in shared memory, beside mult, and a barrier that also votes says whether any warp needs it to grow.

    for each tile of this warpgroup:  K to registers; wait for O of the tile before; S = K Q^T, asynchronously
                                      V to registers, meanwhile; wait for S
                                      mask; vote, rescale O if m grows; P to shared memory; barrier
                                      O += V^T P^T, asynchronously
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from mjolnir.kernels import ptx, wgmma
from mjolnir.kernels.consumer import FLT_MAX, Consumer
from mjolnir.kernels.epilogue import CONSUMER_BARRIERS
from mjolnir.kernels.geometry import WARP, WARPGROUP
from mjolnir.kernels.heads import half_of, is_live, kv_head_of, token_and_head
from mjolnir.kernels.lanes import k_loads
from mjolnir.kernels.softmax import NEG_INF, P_BIAS, RESCALE_ABOVE, weight_of
from mjolnir.kernels.work import num_tiles

GROUP_BARRIERS = CONSUMER_BARRIERS + 3
"""One per warpgroup, after the epilogue's."""

GROUP_THREADS = WARPGROUP * WARP

LOWEST = -FLT_MAX
"""m before the first key. Of 8-bit formats no S comes near it, since Q is scaled into range; and what is less, -inf of
a masked key, weighs nothing relative to it."""


class Rows(NamedTuple):
    """Shared memory of what the warps know of each q row, as this warp sees it."""

    stats: Any  # (m, mult) of its warpgroup
    limits: Any  # the highest S that m need not grow for, of its warpgroup
    word: Any  # one word of its own
    group_word: Any  # that of the first warp of its warpgroup; the others' follow
    seen: Any  # the keys that the row sees


class WideState(NamedTuple):
    acc: Any  # O^T: per m64 tile, per n8 tile, (element, row) of (0, 0), (0, 1), (1, 0), (1, 1)
    l: Any  # of the lane's columns, over the tokens of its lane


class WideConsumer(Consumer):
    """Code of one consumer warp, one of the four of its kv group."""

    def rows(self, smem: Any, warp: Any) -> Rows:
        geo = self.geo
        kv_group = warp // WARPGROUP
        words = smem + geo.wide_words_offset
        return Rows(
            stats=smem + geo.wide_stats_offset + kv_group * (geo.rows * 8),
            limits=smem + geo.wide_limits_offset + kv_group * (geo.rows * 4),
            word=words + warp * (geo.rows * 4),
            group_word=words + kv_group * (WARPGROUP * geo.rows * 4),
            seen=smem + geo.wide_seen_offset,
        )

    def sync_group(self, warp: Any) -> None:
        ptx.barrier_sync(GROUP_BARRIERS + warp // WARPGROUP, Int32(GROUP_THREADS))

    @cute.jit
    def read_q(self, args, smem, warp, lane, seq, head, seq_len):
        """Eight rows of Q to shared memory, as B; and what is to be known of each."""
        geo = self.geo
        g, t = lane // 4, lane % 4
        if warp < geo.rows // 8:
            row = warp * 8 + g
            live = is_live(geo, args, head, row)
            source = row if live else Int32(0)
            own = self.own_quarter(t)
            staging = smem + geo.exchange_offset + warp * geo.exchange_warp_bytes
            values = self.math.load_q_rows(self.q_address(args, seq, head, source), staging, own, lane)
            if args.q_mul != 0:
                _, q_head = token_and_head(geo, args, head, source)
                self.math.scale_q_row(values, args.q_mul + Int64(q_head * self.variant.head_size) * 4, own)
            kv_head = head
            mine = live
            if cutlass.const_expr(geo.joined == "heads"):
                half = half_of(geo, args, source)
                kv_head = kv_head_of(head, half)
                mine = live & (t >> 1 == half)
            factor = self.score_factor(args, seq, kv_head)
            sign = Float32(-1.0) if factor < 0.0 else Float32(1.0)
            terms, unscale = self.math.pack_q_row(values, sign if mine else Float32(0.0))
            self.store_q_row(smem + geo.wide_q_offset, row, terms[0], t)
            if t == 0:
                mult = self.to_mult(unscale * (factor * sign))
                for kv_group in cutlass.range_constexpr(geo.kv_groups):
                    rows = self.rows(smem, kv_group * WARPGROUP)
                    ptx.sts_f32x2(rows.stats + row * 8, Float32(LOWEST), mult)
                    ptx.sts_f32(rows.limits + row * 4, Float32(LOWEST))
                ptx.sts_f32(smem + geo.mult_offset + row * 4, mult)
                q_token = row // args.group
                ptx.sts_b32(self.rows(smem, warp).seen + row * 4, seq_len - (args.q_len - 1 - q_token) * args.causal)
            ptx.fence_proxy_async_shared()
        ptx.barrier_sync(Int32(CONSUMER_BARRIERS), Int32(geo.consumer_warps * WARP))
        return None

    @cute.jit
    def attend(self, args, smem, warp, lane, seq_len, begin, end, mult, stage, filled):
        geo = self.geo
        columns = geo.rows // 8
        kv_group, w = warp // WARPGROUP, warp % WARPGROUP
        g, t = lane // 4, lane % 4
        rows = self.rows(smem, warp)
        state = WideState(
            cute.make_rmem_tensor((2 * 4 * columns,), Float32), cute.make_rmem_tensor((2 * columns,), Float32)
        )
        state.acc.fill(0.0)
        state.l.fill(0.0)
        p_tile = smem + geo.wide_p_offset + kv_group * geo.wide_p_bytes
        mine = stage + kv_group
        for tile in cutlass.range(kv_group, num_tiles(geo, begin, end), geo.kv_groups, unroll=1):
            token0 = begin + tile * geo.tile
            k_tile = smem + mine * geo.stage_bytes
            ptx.mbarrier_wait(smem + geo.full_offset + 8 * mine, (filled >> mine) & 1)
            filled = filled ^ (Int32(1) << mine)
            k = self.k_frags(k_tile + w * (wgmma.K_STEP * geo.k.row_bytes), g, t)
            self.settle(state.acc)  # of the tile before, whose V is in the registers that this tile's will take
            scores = [Float32(0.0)] * (4 * columns)
            k = wgmma.fence(k)
            q = wgmma.descriptor(smem + geo.wide_q_offset)
            for step in cutlass.range_constexpr(len(k)):
                scores = wgmma.mma(k[step], q + self.q_step(step), scores, accumulate=step > 0)
            wgmma.commit()
            v = self.v_frags(k_tile + geo.v_in_stage, w, end - token0, g, t)
            scores = wgmma.wait(scores)
            self.release(smem + geo.empty_offset + 8 * mine, lane)
            scores = self.mask(args, rows, scores, token0 + w * wgmma.K_STEP + g, token0, seq_len, t)
            if ptx.barrier_or(GROUP_BARRIERS + kv_group, Int32(GROUP_THREADS), self.exceeds(rows, scores, t)) == 1:
                self.make_room(rows, state, scores, warp, g, t)
            self.weigh(rows, state, scores, p_tile, w, lane)
            ptx.fence_proxy_async_shared()
            self.sync_group(warp)
            v = wgmma.fence(v)
            p = wgmma.descriptor(p_tile)
            for i in cutlass.range_constexpr(len(v)):
                step, first = i // 2, i % 2 * 4 * columns
                acc = [state.acc[first + j] for j in range(4 * columns)]
                acc = wgmma.mma(v[i], p + (step * wgmma.K_STEP_BYTES >> 4), acc)
                for j in cutlass.range_constexpr(4 * columns):
                    state.acc[first + j] = acc[j]
            wgmma.commit()
            mine = mine + geo.kv_groups if mine + geo.kv_groups < geo.stages else kv_group
        self.settle(state.acc)
        return state, filled

    def settle(self, acc: Any) -> None:
        """Wait for O."""
        for i, x in enumerate(wgmma.wait([acc[i] for i in range(self.geo.rows)])):
            acc[i] = x

    def store_q_row(self, q: Any, row: Any, words: Any, t: Any) -> None:
        """Lane t's quarter of a row of Q as B: two elements a word, in the order in which k_frags has K's."""
        panel_bytes = self.geo.rows * wgmma.ROW_BYTES
        for i, word in enumerate(words):
            ptx.sts_b32(q + i // 8 * panel_bytes + wgmma.swizzled(row, i % 8 * 16 + t * 4), word)

    def store_p(self, p_tile: Any, n: Any, packed: Any, w: Any, lane: Any) -> None:
        """P of n8 tiles n and n + 1 as B: of each, tokens 0 … 7 and then 8 … 15 of the warp's 16."""
        row = 8 * n + lane // 16 * 8 + lane % 8
        wgmma.store_transposed(p_tile + wgmma.swizzled(row, w * 32 + lane // 8 % 2 * 16), packed)

    def q_step(self, step: int) -> int:
        """Of Q's descriptor, from its first product's 16 elements of the head to those of this one."""
        panel, byte = divmod(step * wgmma.K_STEP_BYTES, wgmma.ROW_BYTES)
        return (panel * self.geo.rows * wgmma.ROW_BYTES + byte) >> 4

    def k_frags(self, k_rows: Any, g: Any, t: Any) -> list[Any]:
        """Of a warp's 16 tokens, the A fragments of S^T: per 16 elements of the head."""
        frags = []
        for loads in k_loads(self.geo.k, g, t):
            rows = [k_rows + (half * 8 + g) * self.geo.k.row_bytes for half in range(2)]
            words = [[w for at, width in loads for w in ptx.lds_words(row + at, width)] for row in rows]
            upper, lower = (self.math.k_unpack.k_pairs(half, []) for half in words)
            frags += [(a0, a1, a2, a3) for (a0, a2), (a1, a3) in zip(upper, lower, strict=True)]
        return frags

    @cute.jit
    def v_frags(self, v_tile, w, live, g, t):
        """Of a warp's 32 elements, four a lane, the A fragments of O^T: per 16 tokens, of the one m64 tile and of the
        other. Tokens from ``live`` on count as 0: they may hold anything, and 0 * NaN must not reach O."""
        tokens = [8 * block + 2 * t + odd for block in range(self.geo.tile // 8) for odd in range(2)]
        words = cute.make_rmem_tensor((len(tokens),), Int32)
        for i in cutlass.range_constexpr(len(tokens)):
            words[i] = ptx.lds_b32(v_tile + wgmma.swizzled(tokens[i], w * 32 + g * 4))
        if live < self.geo.tile:
            for i in cutlass.range_constexpr(len(tokens)):
                words[i] = words[i] if tokens[i] < live else Int32(0)
        frags = []
        for i in cutlass.range_constexpr(0, len(tokens), 4):
            first, second = [self.math.v_unpack.v_pairs([words[at]], [words[at + 1]], g, None) for at in (i, i + 2)]
            frags += [(*first[j], *second[j]) for j in range(2)]
        return frags

    @cute.jit
    def mask(self, args, rows, scores, token, token0, seq_len, t):
        """Scores of this lane's tokens, ``token`` and the eighth after it, without the keys that a row does not see."""
        masked = cute.make_rmem_tensor((len(scores),), Float32)
        for i in cutlass.range_constexpr(len(scores)):
            masked[i] = scores[i]
        if token0 + self.geo.tile > seq_len - (args.q_len - 1) * args.causal:
            for n in cutlass.range_constexpr(len(scores) // 4):
                seen = ptx.lds64(rows.seen + (8 * n + 2 * t) * 4)
                for i in cutlass.range_constexpr(4):
                    s = masked[4 * n + i]
                    masked[4 * n + i] = s if token + i // 2 * 8 < seen[i % 2] else Float32(NEG_INF)
        return masked

    @cute.jit
    def exceeds(self, rows, scores, t):
        """1 if a weight relative to the present m would be too large for f16."""
        grew = cutlass.Boolean(False)
        for n in cutlass.range_constexpr(self.geo.rows // 8):
            limits = ptx.lds_f32x2(rows.limits + (8 * n + 2 * t) * 4)
            for e in cutlass.range_constexpr(2):
                grew = grew | (cute.arch.fmax(scores[4 * n + e], scores[4 * n + 2 + e]) > limits[e])
        return Int32(grew)

    @cute.jit
    def weigh(self, rows, state, scores, p_tile, w, lane):
        """Scores to weights: into l, and as P to shared memory, where a q row's tokens lie side by side."""
        t = lane % 4
        columns = self.geo.rows // 8
        stats = [ptx.lds_f32x4(rows.stats + (8 * n + 2 * t) * 8) for n in range(2)]
        packed = []
        for n in cutlass.range_constexpr(columns):
            if cutlass.const_expr(n % 2 == 0 and n + 2 < columns):
                # Before the store that they could not be moved across.
                stats += [ptx.lds_f32x4(rows.stats + (8 * (n + ahead) + 2 * t) * 8) for ahead in (2, 3)]
            weights = [
                ptx.ex2((scores[4 * n + i] - stats[n][i % 2 * 2]) * stats[n][i % 2 * 2 + 1] + P_BIAS) for i in range(4)
            ]
            for e in cutlass.range_constexpr(2):
                state.l[2 * n + e] = state.l[2 * n + e] + (weights[e] + weights[2 + e])
            packed += [ptx.pack_f16x2(weights[0], weights[1]), ptx.pack_f16x2(weights[2], weights[3])]
            if cutlass.const_expr(n % 2 == 1):
                self.store_p(p_tile, n - 1, packed[-4:], w, lane)

    @cute.jit
    def make_room(self, rows, state, scores, warp, g, t):
        """Raise the group's m to the highest scores of all its warps, and shrink O and l to it."""
        columns = self.geo.rows // 8
        tops = cute.make_rmem_tensor((2 * columns,), Float32)
        for c in cutlass.range_constexpr(2 * columns):
            at = c // 2 * 4 + c % 2
            top = cute.arch.fmax(scores[at], scores[at + 2])
            for step in cutlass.range_constexpr(3):
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 4 << step))
            tops[c] = top
        if g == 0:
            for n in cutlass.range_constexpr(columns):
                ptx.sts_f32x2(rows.word + (8 * n + 2 * t) * 4, tops[2 * n], tops[2 * n + 1])
        self.sync_group(warp)
        for n in cutlass.range_constexpr(columns):
            stats = ptx.lds_f32x4(rows.stats + (8 * n + 2 * t) * 8)
            others = [
                ptx.lds_f32x2(rows.group_word + (other * self.geo.rows + 8 * n + 2 * t) * 4)
                for other in range(WARPGROUP)
            ]
            for e in cutlass.range_constexpr(2):
                m, mult = stats[2 * e], stats[2 * e + 1]
                top = m
                for other in cutlass.range_constexpr(WARPGROUP):
                    top = cute.arch.fmax(top, others[other][e])
                shrink = weight_of(m, top, mult)
                tops[2 * n + e] = top
                state.l[2 * n + e] = state.l[2 * n + e] * shrink
                for j in cutlass.range_constexpr(2):
                    for h in cutlass.range_constexpr(2):
                        at = (j * columns + n) * 4 + 2 * h + e
                        state.acc[at] = state.acc[at] * shrink
        self.sync_group(warp)
        if g == 0 and warp % WARPGROUP == 0:
            for c in cutlass.range_constexpr(2 * columns):
                row = c // 2 * 8 + 2 * t + c % 2
                ptx.sts_f32(rows.stats + row * 8, tops[c])
                mult = ptx.lds_f32(rows.stats + row * 8 + 4)
                ptx.sts_f32(rows.limits + row * 4, self.limit_of(tops[c], mult))
        self.sync_group(warp)

    @cute.jit
    def limit_of(self, m, mult):
        """The highest S whose weight relative to m fits in f16. Of base-2 scores of 10^8 the next number after m may be
        too far away already: none but m then."""
        limit = m + RESCALE_ABOVE * ptx.rcp(mult)
        return m if (limit - m) * mult > RESCALE_ABOVE + 0.5 else limit

    @cute.jit
    def share(self, result, state, mult, smem, warp):
        """Hand O, m and l of this warp's elements or tokens to the epilogue, where a warpgroup counts as one warp."""
        geo = self.geo
        columns = geo.rows // 8
        kv_group, w = warp // WARPGROUP, warp % WARPGROUP
        lane = result.lane
        g, t = lane // 4, lane % 4
        rows = self.rows(smem, warp)
        for n in cutlass.range_constexpr(columns):
            for e in cutlass.range_constexpr(2):
                row = 8 * n + 2 * t + e
                total = state.l[2 * n + e]
                for step in cutlass.range_constexpr(3):
                    total = total + cute.arch.shuffle_sync_bfly(total, 4 << step)
                if g == 0:
                    ptx.sts_f32(rows.word + row * 4, total)
                at = ((kv_group * geo.rows + row) * geo.exchange_stride + w * 32 + g * 4) * 4
                elements = [state.acc[(j * columns + n) * 4 + 2 * h + e] for j in range(2) for h in range(2)]
                ptx.sts_f32x4(result.exchange + at, elements)
        self.sync_group(warp)
        row = w * WARP + lane
        if row < geo.rows:
            total = Float32(0.0)
            for other in cutlass.range_constexpr(WARPGROUP):
                total = total + ptx.lds_f32(rows.group_word + (other * geo.rows + row) * 4)
            m, _ = ptx.lds_f32x2(rows.stats + row * 8)
            m = Float32(NEG_INF) if total == 0.0 else m
            ptx.sts_f32x2(result.ml + (kv_group * geo.rows + row) * 8, m, total)
