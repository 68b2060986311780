"""Split-KV decode attention over a paged cache, as one persistent kernel.

One producer warp streams tiles of K and V into a shared-memory ring by TMA; consumer warps take whole stages and
keep their own running maximum m, sum l and O. The operands of the two products are swapped (S^T = K Q^T,
O^T = V^T P^T), so that the few q rows of a decode step are the N = 8 of an mma.sync, not its M = 64:

    producer:   for each piece of this CTA, for each tile: wait for a free stage, load its pages
    consumers:  for each piece: read Q; for each tile of this warp: S, mask, online softmax, O;
                then merge the warps, and write O, or this CTA's part of it (split.py)

The pieces come from the plan (mjolnir.plan). Per lane, g = lane / 4 and t = lane % 4, as in the PTX fragments.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as cuda
from cutlass import Float32, Int32, Int64

from mjolnir.formats import get_format
from mjolnir.kernels import ptx
from mjolnir.kernels.geometry import WARP, Geometry
from mjolnir.kernels.split import ResultWriter
from mjolnir.kernels.unpack import UNPACK
from mjolnir.plan import PLAN_TILE
from mjolnir.variant import Variant

LOG2_E = 1.4426950408889634
FLT_MAX, FLT_MIN = 3.4028234663852886e38, 1.1754943508222875e-38

P_BIAS = 8.0
"""P is 2^P_BIAS at the running maximum: f16 then holds weights down to 2^-32 of the largest."""

RESCALE_ABOVE = 7.0
"""O is rescaled only when a score (base 2) exceeds the running maximum by more: P stays below 2^15 < 65504."""

Q_EXPONENT = 4
"""Q rows are brought by an exact power of two to an amax in [2^4, 2^5), inside the range of f16."""

CONSUMER_BARRIER = 1


class DecodeKernel:
    def __init__(self, variant: Variant):
        self.variant = variant
        self.geo = Geometry.of(variant)
        self.unpack = UNPACK[variant.kv_format]
        self.bf16_mma = self.unpack.mma_dtype == "bf16"

    @cute.jit
    def __call__(
        self,
        # Device addresses; 0 for an absent lse, q_mul or o_mul.
        q: Int64,
        k: Int64,
        v: Int64,
        out: Int64,
        lse: Int64,
        block_table: Int64,
        seq_lens: Int64,
        plan: Int64,
        counters: Int64,
        partials: Int64,
        k_scale: Int64,
        v_scale: Int64,
        q_mul: Int64,
        o_mul: Int64,
        # Strides in elements; K and V strides in units of 16 bytes.
        q_token_stride: Int64,
        q_head_stride: Int64,
        out_token_stride: Int64,
        out_head_stride: Int64,
        lse_token_stride: Int64,
        k_token_stride: Int64,
        k_head_stride: Int64,
        k_page_stride: Int64,
        v_token_stride: Int64,
        v_head_stride: Int64,
        v_page_stride: Int64,
        block_table_stride: Int64,
        k_scale_seq_stride: Int64,
        k_scale_head_stride: Int64,
        v_scale_seq_stride: Int64,
        v_scale_head_stride: Int64,
        num_pages: Int32,
        max_len: Int32,
        log2_page: Int32,
        num_kv_heads: Int32,
        group: Int32,
        q_len: Int32,
        causal: Int32,
        l2_prefetch: Int32,
        l2_policy: Int64,
        softmax_scale: Float32,
        grid: Int32,
        stream: cuda_driver.CUstream,
    ):
        geo = self.geo
        page = Int32(1) << log2_page
        box_rows = cutlass.min(page, Int32(geo.tile))
        # A page that holds a whole tile gives all its panels in one box; smaller ones land panel by panel.
        box_panels = Int32(geo.panels) if page >= geo.tile else Int32(1)
        maps = []
        for base, token, head, page_stride in (
            (k, k_token_stride, k_head_stride, k_page_stride),
            (v, v_token_stride, v_head_stride, v_page_stride),
        ):
            maps.append(
                cuda.create_tensor_map_tiled(
                    global_address=base,
                    dtype=cutlass.Uint8,
                    global_dims=[geo.panel_bytes, page, geo.panels, num_kv_heads, num_pages],
                    global_strides=[token, Int64(geo.panel_bytes // 16), head, page_stride],
                    box_dims=[geo.panel_bytes, box_rows, box_panels, 1, 1],
                    swizzle=cuda.TensorMapSwizzle.s128b if geo.panel_bytes == 128 else cuda.TensorMapSwizzle.s64b,
                    l2_promotion=cuda.TensorMapL2Promotion.l2_256b,
                )
            )
        self.kernel(
            maps[0],
            maps[1],
            q,
            out,
            lse,
            block_table,
            seq_lens,
            plan,
            counters,
            partials,
            k_scale,
            v_scale,
            q_mul,
            o_mul,
            q_token_stride,
            q_head_stride,
            out_token_stride,
            out_head_stride,
            lse_token_stride,
            block_table_stride,
            k_scale_seq_stride,
            k_scale_head_stride,
            v_scale_seq_stride,
            v_scale_head_stride,
            max_len,
            log2_page,
            num_kv_heads,
            group,
            q_len,
            causal,
            l2_prefetch,
            l2_policy,
            softmax_scale,
        ).launch(
            grid=(grid, 1, 1),
            block=(geo.threads, 1, 1),
            min_blocks_per_mp=geo.ctas_per_sm,
            preferred_smem_carveout=100,
            use_pdl=self.variant.pdl,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tma_k: cutlass.GridConstant[cuda.TensorMap],
        tma_v: cutlass.GridConstant[cuda.TensorMap],
        q: Int64,
        out: Int64,
        lse: Int64,
        block_table: Int64,
        seq_lens: Int64,
        plan: Int64,
        counters: Int64,
        partials: Int64,
        k_scale: Int64,
        v_scale: Int64,
        q_mul: Int64,
        o_mul: Int64,
        q_token_stride: Int64,
        q_head_stride: Int64,
        out_token_stride: Int64,
        out_head_stride: Int64,
        lse_token_stride: Int64,
        block_table_stride: Int64,
        k_scale_seq_stride: Int64,
        k_scale_head_stride: Int64,
        v_scale_seq_stride: Int64,
        v_scale_head_stride: Int64,
        max_len: Int32,
        log2_page: Int32,
        num_kv_heads: Int32,
        group: Int32,
        q_len: Int32,
        causal: Int32,
        l2_prefetch: Int32,
        l2_policy: Int64,
        softmax_scale: Float32,
    ):
        geo = self.geo
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tid // WARP)
        lane = tid % WARP
        smem = Int32(
            cutlass.Array(
                cutlass.Uint8, geo.smem_bytes, space=cutlass.AddressSpace.smem, alignment=1024
            )
            .data_ptr()
            .toint()
        )
        full = smem + geo.mbar_offset
        empty = full + geo.stages * 8
        desc_k, desc_v = Int64(tma_k.get_ptr().toint()), Int64(tma_v.get_ptr().toint())
        if tid == 0:
            for s in cutlass.range_constexpr(geo.stages):
                ptx.mbarrier_init(full + 8 * s, Int32(1))
                ptx.mbarrier_init(empty + 8 * s, Int32(geo.row_groups))
            ptx.fence_mbarrier_init()
            ptx.prefetch_tensormap(desc_k)
            ptx.prefetch_tensormap(desc_v)
        cute.arch.sync_threads()
        if cutlass.const_expr(self.variant.pdl):
            # Nothing may be read before this: the kernel before may still be writing lengths, scales, Q or the cache.
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        # This CTA's work: from (first_seq, first_head, first_tile) up to (end_seq, end_head, end_tile).
        first_seq, first_head, first_tile, end_seq = ptx.ldg128(plan + Int64(cta) * 32)
        end_head, end_tile, first_cta, last_cta = ptx.ldg128(plan + Int64(cta) * 32 + 16)
        first_item = first_seq * num_kv_heads + first_head
        cut_end = Int32(1) if end_tile > 0 else Int32(0)
        pieces = end_seq * num_kv_heads + end_head - first_item + cut_end
        stage = Int32(0)  # stages filled or consumed so far, over all pieces

        if warp == geo.consumer_warps:
            # Producer. Lane j loads box j: K or V, a panel, a page.
            page_mask = (Int32(1) << log2_page) - 1
            log2_rows = cutlass.min(log2_page, Int32(geo.tile.bit_length() - 1))
            panel_boxes = Int32(1) if page_mask + 1 >= geo.tile else Int32(geo.panels)
            is_v = lane & 1
            panel = (lane >> 1) % panel_boxes
            box = (lane >> 1) // panel_boxes
            desc = desc_v if is_v == 1 else desc_k
            dst_offset = (
                is_v * geo.kv_tile_bytes
                + panel * (geo.tile * geo.panel_bytes)
                + (box << log2_rows) * geo.panel_bytes
            )
            page_bytes = (Int32(1) << log2_rows) * (2 * geo.panels * geo.panel_bytes)
            for p in cutlass.range(pieces, unroll=1):
                item = first_item + p
                seq = item // num_kv_heads
                head = item - seq * num_kv_heads
                begin, end = self.piece_tokens(
                    p, pieces, first_tile, end_tile, seq_lens, seq, max_len
                )
                tiles = (cutlass.max(end - begin, Int32(0)) + (geo.tile - 1)) // geo.tile
                pages = block_table + Int64(seq) * block_table_stride * 4
                token = begin + (box << log2_rows)
                page = Int32(0)
                if token < end:
                    page = ptx.ldg_b32(pages + Int64(token >> log2_page) * 4)
                left = end - begin
                for _ in cutlass.range(tiles, unroll=1):
                    # The page of the next tile is read while this one waits for its stage.
                    next_page = Int32(0)
                    if token + geo.tile < end:
                        next_page = ptx.ldg_b32(pages + Int64((token + geo.tile) >> log2_page) * 4)
                    slot = stage % geo.stages
                    ptx.mbarrier_wait(empty + 8 * slot, ((stage // geo.stages) & 1) ^ 1)
                    boxes = (cutlass.min(left, Int32(geo.tile)) + (Int32(1) << log2_rows) - 1) >> log2_rows
                    if lane == 0:
                        ptx.mbarrier_arrive_expect_tx(full + 8 * slot, boxes * page_bytes)
                    cute.arch.sync_warp()
                    if box < boxes:
                        ptx.tma_load_5d(
                            smem + slot * geo.stage_bytes + dst_offset,
                            desc,
                            (Int32(0), token & page_mask, panel, head, page),
                            full + 8 * slot,
                            l2_policy,
                        )
                    if l2_prefetch > 0:
                        ahead = token + l2_prefetch * geo.tile
                        if ahead < end and box << log2_rows < geo.tile:
                            far_page = ptx.ldg_b32(pages + Int64(ahead >> log2_page) * 4)
                            ptx.tma_prefetch_5d(
                                desc, (Int32(0), ahead & page_mask, panel, head, far_page), l2_policy
                            )
                    page = next_page
                    token += geo.tile
                    left -= geo.tile
                    stage += 1
        else:
            g = lane // 4
            t = lane % 4
            row_group = warp % geo.row_groups
            kv_group = warp // geo.row_groups
            row0 = row_group * geo.rows_per_warp
            live_rows = q_len * group
            # B fragments of Q stay in this warp's part of the exchange buffer until the piece's O goes there.
            q_frags = smem + geo.exchange_offset + (kv_group * geo.rows + row0) * (geo.exchange_stride * 4) + lane * 16
            columns = 2 * geo.row_tiles
            acc = cute.make_rmem_tensor((geo.row_tiles * (geo.head_size // 16) * 4,), Float32)
            m = cute.make_rmem_tensor((columns,), Float32)
            l = cute.make_rmem_tensor((columns,), Float32)
            for p in cutlass.range(pieces, unroll=1):
                item = first_item + p
                seq = item // num_kv_heads
                head = item - seq * num_kv_heads
                begin, end = self.piece_tokens(
                    p, pieces, first_tile, end_tile, seq_lens, seq, max_len
                )
                seq_len = cutlass.min(ptx.ldg_b32(seq_lens + Int64(seq) * 4), max_len)
                tiles = (cutlass.max(end - begin, Int32(0)) + (geo.tile - 1)) // geo.tile
                k_factor = softmax_scale * ptx.ldg_f32(
                    k_scale + (Int64(seq) * k_scale_seq_stride + Int64(head) * k_scale_head_stride) * 4
                )
                sign = Float32(-1.0) if k_factor < 0.0 else Float32(1.0)

                # Q row g of each n8 tile as B fragments in shared memory; mult turns S into base-2 scores.
                row_scales = []
                for n in cutlass.range_constexpr(geo.row_tiles):
                    row = row0 + n * 8 + g
                    live = row < live_rows
                    safe_row = row if live else Int32(0)
                    q_head = head * group + safe_row % group
                    q_token = Int64(seq * q_len + safe_row // group)
                    values = self.load_q_row(q + (q_token * q_token_stride + Int64(q_head) * q_head_stride) * 2, t)
                    if q_mul != 0:
                        self.scale_q_row(values, q_mul + Int64(q_head * geo.head_size) * 4, t)
                    row_scales.append(
                        self.store_q_row(q_frags + n * geo.q_frag_bytes, values, sign if live else Float32(0.0))
                    )
                cute.arch.sync_warp()
                mult = []
                limit = []
                for n in cutlass.range_constexpr(geo.row_tiles):
                    for e in cutlass.range_constexpr(2):
                        unscale = cute.arch.shuffle_sync(row_scales[n], (2 * t + e) * 4)
                        scale = unscale * (k_factor * sign) * LOG2_E
                        mult.append(cutlass.max(cutlass.min(scale, Float32(FLT_MAX)), Float32(FLT_MIN)))
                        token_index = (row0 + n * 8 + 2 * t + e) // group
                        hidden = (q_len - 1 - token_index) * causal
                        limit.append(seq_len - hidden)
                unmasked_below = seq_len - (q_len - 1) * causal

                acc.fill(0.0)
                m.fill(float("-inf"))
                l.fill(0.0)
                # Stages are taken in turn by the kv groups, across pieces.
                mine = (kv_group - stage) % geo.kv_groups
                mine = mine + geo.kv_groups if mine < 0 else mine
                turns = (cutlass.max(tiles - mine, Int32(0)) + (geo.kv_groups - 1)) // geo.kv_groups
                for turn in cutlass.range(turns, unroll=1):
                    tile = mine + turn * geo.kv_groups
                    slot = (stage + tile) % geo.stages
                    token0 = begin + tile * geo.tile
                    k_tile = smem + slot * geo.stage_bytes
                    v_tile = k_tile + geo.kv_tile_bytes
                    ptx.mbarrier_wait(full + 8 * slot, ((stage + tile) // geo.stages) & 1)
                    scores = self.scores(k_tile, q_frags, g, t)
                    if token0 + geo.tile > unmasked_below:
                        # Dead rows may hold anything: 0 * NaN must not reach O, so V is zeroed from the end on.
                        for r in cutlass.range(cutlass.min(end - token0, Int32(geo.tile)), geo.tile, unroll=1):
                            for panel in cutlass.range_constexpr(geo.panels):
                                row_addr = v_tile + (panel * geo.tile + r) * geo.panel_bytes
                                if lane * 4 < geo.panel_bytes:
                                    ptx.sts_b32(row_addr + lane * 4, Int32(0))
                        ptx.fence_proxy_async_shared()
                        cute.arch.sync_warp()
                        for n in cutlass.range_constexpr(geo.row_tiles):
                            for i in cutlass.range_constexpr(geo.tile // 8):
                                token = token0 + i * 8 + g
                                for e in cutlass.range_constexpr(2):
                                    s = scores[n][2 * i + e]
                                    scores[n][2 * i + e] = s if token < limit[2 * n + e] else Float32(float("-inf"))

                    # Online softmax, rescaling lazily.
                    tops = []
                    grew = cutlass.Boolean(False)
                    for c in cutlass.range_constexpr(columns):
                        top = scores[c // 2][c % 2]
                        for i in cutlass.range_constexpr(1, geo.tile // 8):
                            top = cute.arch.fmax(top, scores[c // 2][2 * i + c % 2])
                        tops.append(top)
                        grew = grew | ((top - m[c]) * mult[c] > RESCALE_ABOVE)
                    if cute.arch.vote_any_sync(grew):
                        for c in cutlass.range_constexpr(columns):
                            top = cute.arch.fmax(tops[c], m[c])
                            for step in cutlass.range_constexpr(3):
                                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 4 << step))
                            old = m[c]
                            shrink = ptx.ex2((old - top) * mult[c]) if old != float("-inf") else Float32(0.0)
                            m[c] = top
                            l[c] = l[c] * shrink
                            for i in cutlass.range_constexpr(geo.head_size // 16):
                                for h in cutlass.range_constexpr(2):
                                    index = ((c // 2) * (geo.head_size // 16) + i) * 4 + 2 * h + c % 2
                                    acc[index] = acc[index] * shrink
                    for c in cutlass.range_constexpr(columns):
                        # All keys so far masked: m is -inf, and so is every score.
                        top = m[c] if m[c] != float("-inf") else Float32(0.0)
                        total = l[c]
                        for i in cutlass.range_constexpr(geo.tile // 8):
                            s = scores[c // 2][2 * i + c % 2]
                            weight = ptx.ex2((s - top) * mult[c] + P_BIAS)
                            scores[c // 2][2 * i + c % 2] = weight
                            total = total + weight
                        l[c] = total

                    self.accumulate(v_tile, scores, acc, g, t)
                    cute.arch.sync_warp()
                    if lane == 0:
                        ptx.mbarrier_arrive(empty + 8 * slot)
                stage += tiles

                writer = ResultWriter(self, smem, warp, lane, live_rows, group)
                writer.stage_partial(acc, m, l, mult, kv_group, row0, g, t)
                v_factor = ptx.ldg_f32(
                    v_scale + (Int64(seq) * v_scale_seq_stride + Int64(head) * v_scale_head_stride) * 4
                )
                token_row = Int64(seq * q_len)
                q_head0 = head * group
                out_base = out + (token_row * out_token_stride + Int64(q_head0) * out_head_stride) * 2
                lse_base = lse
                if lse != 0:
                    lse_base = lse + (token_row * lse_token_stride + Int64(q_head0)) * 4
                o_mul_base = o_mul
                if o_mul != 0:
                    o_mul_base = o_mul + Int64(q_head0 * geo.head_size) * 4
                # A piece that begins or ends inside its item is one of several splits, one per CTA from
                # ``begin_cta`` to ``final_cta``.
                begin_cta = cta
                final_cta = cta
                if cutlass.const_expr(self.variant.split):
                    if p == 0 and first_tile > 0:
                        begin_cta = first_cta
                    if p == pieces - 1 and end_tile > 0:
                        final_cta = last_cta
                writer.write(
                    begin_cta,
                    final_cta,
                    cta,
                    partials,
                    counters,
                    out_base,
                    out_token_stride,
                    out_head_stride,
                    lse_base,
                    lse_token_stride,
                    o_mul_base,
                    v_factor,
                )

    @cute.jit
    def piece_tokens(self, p, pieces, first_tile, end_tile, seq_lens, seq, max_len):
        """Tokens [begin, end) of piece p, by the live length: the last piece of a sequence runs to its end,
        however long it is by now, so a stale plan costs balance, never correctness."""
        begin = first_tile * PLAN_TILE if p == 0 else Int32(0)
        end = cutlass.min(ptx.ldg_b32(seq_lens + Int64(seq) * 4), max_len)
        if p == pieces - 1 and end_tile > 0:
            end = cutlass.min(end, end_tile * PLAN_TILE)
        return begin, end

    # Q

    def lane_runs(self, t: Any):
        """Lane t's elements of a Q row, in the order of its K bytes: per panel, a quarter of the panel."""
        run = self.geo.panel_elems // 4
        return [(panel * run, panel * self.geo.panel_elems + t * run) for panel in range(self.geo.panels)], run

    def load_q_row(self, addr: Any, t: Any):
        """This lane's quarter of a Q row as fp32 (d / 4 registers)."""
        unpack = ptx.unpack_bf16x2 if self.variant.q_dtype == "bf16" else ptx.unpack_f16x2
        values = cute.make_rmem_tensor((self.geo.head_size // 4,), Float32)
        runs, run = self.lane_runs(t)
        for at, element in runs:
            for i in range(0, run, 8):
                for j, word in enumerate(ptx.ldg128(addr + Int64(element + i) * 2)):
                    values[at + i + 2 * j], values[at + i + 2 * j + 1] = unpack(word)
        return values

    def scale_q_row(self, values: Any, addr: Any, t: Any) -> None:
        runs, run = self.lane_runs(t)
        for at, element in runs:
            for i in range(0, run, 4):
                for j, factor in enumerate(ptx.ldg_f32x4(addr + Int64(element + i) * 4)):
                    values[at + i + j] = values[at + i + j] * factor

    def store_q_row(self, addr: Any, values: Any, sign: Any):
        """Store the B fragments of one Q row times ``sign`` (0 for a padding row) after an exact power-of-two
        scaling; returns the factor that undoes it."""
        amax = Float32(0.0)
        for i in range(self.geo.head_size // 4):
            amax = cute.arch.fmax(amax, cute.math.absf(values[i]))
        for step in range(2):
            amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, 1 << step))
        # 2^(Q_EXPONENT - exponent(amax)) and its inverse, from the bits; both stay normal numbers.
        biased = (ptx.float_as_int(amax) >> 23) & 0xFF
        biased = cutlass.max(cutlass.min(biased, Int32(254)), Int32(Q_EXPONENT + 1))
        scale = ptx.int_as_float((254 + Q_EXPONENT - biased) << 23) * sign
        unscale = ptx.int_as_float((biased - Q_EXPONENT) << 23)
        scaled = [values[i] * scale for i in range(self.geo.head_size // 4)]
        pack = ptx.pack_bf16x2 if self.bf16_mma else ptx.pack_f16x2
        for term in range(self.geo.q_terms):
            words = [pack(scaled[i], scaled[i + 1]) for i in range(0, len(scaled), 2)]
            for i in range(0, len(words), 4):
                ptx.sts128(addr + term * self.geo.q_term_bytes + i * (4 * WARP), words[i : i + 4])
            if term + 1 < self.geo.q_terms:
                rounded = [x for w in words for x in ptx.unpack_bf16x2(w)]
                scaled = [x - r for x, r in zip(scaled, rounded, strict=True)]
        return unscale

    # S and O of one tile

    def scores(self, k_tile: Any, q_frags: Any, g: Any, t: Any):
        """S^T = K Q^T for one tile, unscaled: per n8 tile, [2 i + e] = S[token 8 i + g][q row 2 t + e]."""
        geo = self.geo
        chunks = geo.panel_bytes // 64  # 16-byte chunks a lane reads of one row and panel
        swizzle = g if geo.panel_bytes == 128 else (g >> 1) & 3
        s = [[[Float32(0.0)] * 4 for _ in range(geo.tile // 16)] for _ in range(geo.row_tiles)]
        word = 0
        for panel in range(geo.panels):
            for j in range(chunks):
                q = [self.load_q_frags(q_frags, n, word) for n in range(geo.row_tiles)]
                row = k_tile + (panel * geo.tile + g) * geo.panel_bytes + ((chunks * t + j) ^ swizzle) * 16
                for block in range(geo.tile // 16):
                    addr = row + block * 16 * geo.panel_bytes
                    upper = self.unpack.k_pairs(ptx.lds128(addr))
                    lower = self.unpack.k_pairs(ptx.lds128(addr + 8 * geo.panel_bytes))
                    for k_step, ((a0, a2), (a1, a3)) in enumerate(zip(upper, lower, strict=True)):
                        for n in range(geo.row_tiles):
                            for b in q[n][k_step]:
                                s[n][block] = ptx.mma_m16n8k16(
                                    (a0, a1, a2, a3), b, s[n][block], self.unpack.mma_dtype
                                )
                word += 2 * len(upper)
        return [[x for block in s[n] for x in block] for n in range(geo.row_tiles)]

    def load_q_frags(self, q_frags: Any, n: int, word: int):
        """Per k-step of one 16-byte chunk of K, the B fragments of n8 tile n: one per term of Q."""
        steps = 32 // get_format(self.variant.kv_format).bits
        terms = []
        for term in range(self.geo.q_terms):
            addr = q_frags + n * self.geo.q_frag_bytes + term * self.geo.q_term_bytes + word * (4 * WARP)
            words = [w for i in range(0, 2 * steps, 4) for w in ptx.lds128(addr + i * (4 * WARP))]
            terms.append([(words[2 * k], words[2 * k + 1]) for k in range(steps)])
        return list(zip(*terms, strict=True))

    def accumulate(self, v_tile: Any, weights: Any, acc: Any, g: Any, t: Any) -> None:
        """O^T += V^T P^T for one tile. acc[(n * d/16 + i) * 4 + 2 h + e] is O[q row 2 t + e] of n8 tile n at the
        element 2 i + h of lane g's (see ``element_of``)."""
        geo = self.geo
        m_tiles = geo.head_size // 16
        per_panel = m_tiles // geo.panels
        chunk = geo.panel_bytes // 8  # bytes a lane reads of one row and panel
        load = ptx.lds128 if chunk == 16 else ptx.lds64
        offsets = []
        for odd in range(2):
            row = 2 * t + odd
            if chunk == 16:
                offsets.append(row * 128 + ((g ^ row) << 4))
            else:
                offsets.append(row * 64 + (((g >> 1) ^ t) << 4) + ((g & 1) << 3))
        for block in range(geo.tile // 16):
            p_frags = [self.p_frags(weights[n][4 * block : 4 * block + 4]) for n in range(geo.row_tiles)]
            for panel in range(geo.panels):
                base = v_tile + (panel * geo.tile + block * 16) * geo.panel_bytes
                rows = [load(base + o + h * 8 * geo.panel_bytes) for h in range(2) for o in offsets]
                i = panel * per_panel
                for even, odd, even8, odd8 in zip(*rows, strict=True):
                    upper = self.unpack.v_pairs(even, odd)
                    lower = self.unpack.v_pairs(even8, odd8)
                    for (a0, a1), (a2, a3) in zip(upper, lower, strict=True):
                        for n in range(geo.row_tiles):
                            at = (n * m_tiles + i) * 4
                            c = [acc[at + e] for e in range(4)]
                            for b in p_frags[n]:
                                c = ptx.mma_m16n8k16((a0, a1, a2, a3), b, c, self.unpack.mma_dtype)
                            for e in range(4):
                                acc[at + e] = c[e]
                        i += 1

    def p_frags(self, p: Any):
        """B fragments of P^T for 16 tokens: one in f16, or two in bf16 whose sum keeps 16 bits of P."""
        if not self.bf16_mma:
            return [tuple(ptx.movmatrix(ptx.pack_f16x2(p[i], p[i + 1])) for i in (0, 2))]
        high = [ptx.pack_bf16x2(p[i], p[i + 1]) for i in (0, 2)]
        rounded = [x for w in high for x in ptx.unpack_bf16x2(w)]
        low = [ptx.pack_bf16x2(p[i] - rounded[i], p[i + 1] - rounded[i + 1]) for i in (0, 2)]
        return [tuple(ptx.movmatrix(w) for w in high), tuple(ptx.movmatrix(w) for w in low)]
