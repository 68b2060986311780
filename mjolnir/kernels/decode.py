"""Split-KV decode attention over a paged cache, as one persistent kernel.

One producer warp streams tiles of K and V into a shared-memory ring by TMA; consumer warps take whole stages and
keep their own running maximum m, sum l and O. The operands of the two products are swapped (S^T = K Q^T,
O^T = V^T P^T), so that the few q rows of a decode step are the N = 8 of an mma.sync, not its M = 64:

    producer:   take a row of the plan; for each of its pieces, for each tile: wait for a free stage, load its pages
    consumers:  for each piece: read Q; for each tile of this warp: S, mask, online softmax, O;
                then merge the warps and write O, or the row's part of it;
                at the row's end merge the splits of the items that it completes

The pieces come from the plan (mjolnir.plan). Per lane, g = lane / 4 and t = lane % 4, as in the PTX fragments.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as cuda
from cutlass import Float32, Int32, Int64

from mjolnir.kernels import ptx
from mjolnir.kernels.args import DecodeArgs
from mjolnir.kernels.epilogue import Epilogue
from mjolnir.kernels.geometry import WARP, Geometry
from mjolnir.kernels.softmax import NEG_INF, OnlineSoftmax
from mjolnir.kernels.split import SplitMerge
from mjolnir.kernels.tile import TileMath
from mjolnir.plan import PLAN_COLUMNS, PLAN_TILE
from mjolnir.variant import Variant

LOG2_E = 1.4426950408889634
FLT_MAX, FLT_MIN = 3.4028234663852886e38, 1.1754943508222875e-38


class Work(NamedTuple):
    """One row of the plan, as items numbered seq * num_kv_heads + head."""

    row: Int32
    first_item: Int32
    pieces: Int32
    first_tile: Int32
    end_tile: Int32
    first_row: Int32
    last_row: Int32


class DecodeKernel:
    def __init__(self, variant: Variant):
        self.variant = variant
        self.geo = Geometry.of(variant)
        self.math = TileMath(variant, self.geo)
        self.softmax = OnlineSoftmax(self.geo)

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
        block_table_stride: Int64,
        max_len: Int32,
        softmax_scale: Float32,
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
        k_scale_seq_stride: Int64,
        k_scale_head_stride: Int64,
        v_scale_seq_stride: Int64,
        v_scale_head_stride: Int64,
        num_pages: Int32,
        log2_page: Int32,
        num_kv_heads: Int32,
        group: Int32,
        q_len: Int32,
        causal: Int32,
        l2_prefetch: Int32,
        l2_policy: Int64,
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
        args = DecodeArgs(
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
        )
        self.kernel(maps[0], maps[1], args).launch(
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
        args: DecodeArgs,
    ):
        geo = self.geo
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tid // WARP)
        lane = tid % WARP
        storage = cutlass.Array(cutlass.Uint8, geo.smem_bytes, space=cutlass.AddressSpace.smem, alignment=1024)
        smem = Int32(storage.data_ptr().toint())
        desc_k, desc_v = Int64(tma_k.get_ptr().toint()), Int64(tma_v.get_ptr().toint())
        if tid == 0:
            for s in cutlass.range_constexpr(geo.stages):
                ptx.mbarrier_init(smem + geo.full_offset + 8 * s, Int32(1))
                ptx.mbarrier_init(smem + geo.empty_offset + 8 * s, Int32(geo.row_groups))
            for box in cutlass.range_constexpr(2):
                ptx.mbarrier_init(smem + geo.mail_full_offset + 8 * box, Int32(1))
                ptx.mbarrier_init(smem + geo.mail_free_offset + 8 * box, Int32(geo.consumer_warps))
            ptx.fence_mbarrier_init()
            ptx.prefetch_tensormap(desc_k)
            ptx.prefetch_tensormap(desc_v)
        cute.arch.sync_threads()
        if cutlass.const_expr(self.variant.pdl):
            if warp == geo.consumer_warps:
                self.touch(args, cta, lane)
            # Nothing may be read before this: the kernel before may still be writing lengths, scales, Q or the cache.
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        if warp == geo.consumer_warps:
            self.produce(args, cta, smem, lane, desc_k, desc_v)
        else:
            self.consume(args, smem, warp, lane)

    @cute.jit
    def touch(self, args, cta, lane):
        """Ask for the lines and address translations of what the kernel reads first, without looking at them: they
        are on their way while the kernel before ends."""
        address = args.plan
        if lane == 1:
            address = args.plan + (Int64(cta) + 1) * (PLAN_COLUMNS * 4)
        if lane == 2:
            address = args.seq_lens
        if lane == 3:
            address = args.block_table
        if lane == 4:
            address = args.k_scale
        if lane == 5:
            address = args.v_scale
        if lane == 6:
            address = args.counters + Int64(cta) * 8
        if lane == 7:
            address = args.partials + Int64(cta) * (self.geo.partial_floats * 8)
        if lane == 8:
            address = args.q
        if lane < 9 and address != 0:
            ptx.prefetch_l2(address)

    @cute.jit
    def produce(self, args, cta, smem, lane, desc_k, desc_v):
        """The producer warp: takes rows of the plan, hands each to the consumers, and loads its tiles. Lane j loads
        box j of a tile, which is K or V, one panel or all, of one page."""
        geo = self.geo
        log2_rows = cutlass.min(args.log2_page, Int32(geo.tile.bit_length() - 1))
        box_rows = Int32(1) << log2_rows
        page_mask = (Int32(1) << args.log2_page) - 1
        panel_boxes = Int32(1) if box_rows == geo.tile else Int32(geo.panels)
        is_v = lane & 1
        panel = (lane >> 1) % panel_boxes
        box_row = ((lane >> 1) // panel_boxes) << log2_rows  # in the tile; lanes past the tile stay idle
        desc = desc_v if is_v == 1 else desc_k
        box = smem + is_v * geo.kv_tile_bytes + (panel * geo.tile + box_row) * geo.panel_bytes
        token_bytes = 2 * geo.panels * geo.panel_bytes
        num_rows = ptx.ldg_b32(args.plan)
        num_ctas = cute.arch.grid_dim()[0]
        stage = Int32(0)  # of the ring; a piece starts at a multiple of kv_groups, so that the warp of a tile is fixed
        free = Int32(0)  # bit s: parity of the phase in which stage s is free next, less 1
        turn = Int32(0)  # rows handed over
        row = cta
        while row < num_rows:
            work = self.load_row(args, row)
            self.hand_over(smem, lane, turn, work)
            turn += 1
            for p in cutlass.range(work.pieces, unroll=1):
                seq, head, begin, end = self.piece(args, work, p)
                pages = args.block_table + Int64(seq) * args.block_table_stride * 4
                left = end - begin
                token = begin + box_row
                # Read beside the length, not after it; an entry past the sequence's end is not used.
                column = cutlass.min(token, args.max_len - 1) >> args.log2_page
                page = ptx.ldg_b32(pages + Int64(column) * 4)
                stage = (stage + geo.kv_groups - 1) // geo.kv_groups * geo.kv_groups % geo.stages
                for _ in cutlass.range(self.tiles(begin, end), unroll=1):
                    # The next tile's page is read while this tile waits for its stage.
                    next_page = Int32(0)
                    if box_row < cutlass.min(left - geo.tile, Int32(geo.tile)):
                        next_page = ptx.ldg_b32(pages + Int64((token + geo.tile) >> args.log2_page) * 4)
                    ptx.mbarrier_wait(smem + geo.empty_offset + 8 * stage, ((free >> stage) & 1) ^ 1)
                    free = free ^ (Int32(1) << stage)
                    rows = cutlass.min(left, Int32(geo.tile))
                    full = smem + geo.full_offset + 8 * stage
                    if lane == 0:
                        ptx.mbarrier_arrive_expect_tx(full, ((rows + box_rows - 1) & ~(box_rows - 1)) * token_bytes)
                    cute.arch.sync_warp()
                    if box_row < rows:
                        coords = (Int32(0), token & page_mask, panel, head, page)
                        ptx.tma_load_5d(box + stage * geo.stage_bytes, desc, coords, full, args.l2_policy)
                    if args.l2_prefetch > 0:
                        if box_row < cutlass.min(left - args.l2_prefetch * geo.tile, Int32(geo.tile)):
                            ahead = token + args.l2_prefetch * geo.tile
                            far_page = ptx.ldg_b32(pages + Int64(ahead >> args.log2_page) * 4)
                            coords = (Int32(0), ahead & page_mask, panel, head, far_page)
                            ptx.tma_prefetch_5d(desc, coords, args.l2_policy)
                    page = next_page
                    token += geo.tile
                    left -= geo.tile
                    stage = stage + 1 if stage + 1 < geo.stages else Int32(0)
            # The ring holds a few tiles more: time enough to fetch the next row. All CTAs together draw num_rows
            # tickets, the last of each one too high, so the counter ends where it began.
            row = num_rows
            if num_rows > num_ctas:
                ticket = Int32(0)
                if lane == 0:
                    ticket = ptx.atomic_inc(args.plan + 4, num_rows - 1, "relaxed")
                row = num_ctas + cute.arch.shuffle_sync(ticket, 0)
        self.hand_over(smem, lane, turn, Work(row, row, Int32(-1), row, row, row, row))

    @cute.jit
    def load_row(self, args, row):
        """A row of the plan."""
        at = args.plan + (Int64(row) + 1) * (PLAN_COLUMNS * 4)
        first_seq, first_head, first_tile, end_seq = ptx.ldg128(at)
        end_head, end_tile, first_row, last_row = ptx.ldg128(at + 16)
        first_item = first_seq * args.num_kv_heads + first_head
        pieces = end_seq * args.num_kv_heads + end_head - first_item + (Int32(1) if end_tile > 0 else Int32(0))
        return Work(row, first_item, pieces, first_tile, end_tile, first_row, last_row)

    @cute.jit
    def hand_over(self, smem, lane, turn, work):
        """Put a row into the mailbox, which holds two: the one the consumers work on and the one after it."""
        box = turn & 1
        ptx.mbarrier_wait(smem + self.geo.mail_free_offset + 8 * box, ((turn >> 1) & 1) ^ 1)
        if lane == 0:
            mail = smem + self.geo.mail_offset + box * 32
            ptx.sts128(mail, (work.row, work.first_item, work.pieces, work.first_tile))
            ptx.sts128(mail + 16, (work.end_tile, work.first_row, work.last_row, Int32(0)))
            ptx.mbarrier_arrive(smem + self.geo.mail_full_offset + 8 * box)

    def read_mail(self, smem, turn):
        """The row handed over at this turn; read again rather than kept in registers across a tile loop."""
        mail = smem + self.geo.mail_offset + (turn & 1) * 32
        row, first_item, pieces, first_tile = ptx.lds128(mail)
        end_tile, first_row, last_row, _ = ptx.lds128(mail + 16)
        return Work(row, first_item, pieces, first_tile, end_tile, first_row, last_row)

    @cute.jit
    def consume(self, args, smem, warp, lane):
        """A consumer warp: every kv_groups-th tile of each piece, for its rows of Q."""
        geo = self.geo
        g, t = lane // 4, lane % 4
        kv_group, row_group = warp // geo.row_groups, warp % geo.row_groups
        row0 = row_group * geo.rows_per_warp
        # B fragments of Q stay in this warp's part of the exchange buffer until the piece's O goes there.
        q_frags = smem + geo.exchange_offset + (kv_group * geo.rows + row0) * (geo.exchange_stride * 4) + lane * 16
        stage = Int32(0)  # as the producer counts
        filled = Int32(0)  # bit s: parity of the phase in which stage s is full next
        turn = Int32(0)
        ptx.mbarrier_wait(smem + geo.mail_full_offset, Int32(0))
        pieces = self.read_mail(smem, turn).pieces
        while pieces >= 0:
            for p in cutlass.range(pieces, unroll=1):
                seq, head, begin, end = self.piece(args, self.read_mail(smem, turn), p)
                tiles = self.tiles(begin, end)
                seq_len = cutlass.min(ptx.ldg_b32(args.seq_lens + Int64(seq) * 4), args.max_len)
                mult = self.read_q(args, q_frags, seq, head, row0, g, t)
                state = self.softmax.start()
                stage = (stage + geo.kv_groups - 1) // geo.kv_groups * geo.kv_groups % geo.stages
                mine = stage + kv_group
                for tile in cutlass.range(kv_group, tiles, geo.kv_groups, unroll=1):
                    token0 = begin + tile * geo.tile
                    k_tile = smem + mine * geo.stage_bytes
                    v_tile = k_tile + geo.kv_tile_bytes
                    ptx.mbarrier_wait(smem + geo.full_offset + 8 * mine, (filled >> mine) & 1)
                    filled = filled ^ (Int32(1) << mine)
                    scores = self.math.scores(k_tile, q_frags, g, t)
                    if token0 + geo.tile > seq_len - (args.q_len - 1) * args.causal:
                        self.clear_rows(v_tile, end - token0, lane)
                        for c in cutlass.range_constexpr(2 * geo.row_tiles):
                            q_token = (row0 + (c // 2) * 8 + 2 * t + c % 2) // args.group
                            seen = seq_len - (args.q_len - 1 - q_token) * args.causal - token0 - g
                            for i in cutlass.range_constexpr(geo.tile // 8):
                                s = scores[c // 2][2 * i + c % 2]
                                scores[c // 2][2 * i + c % 2] = s if 8 * i < seen else Float32(NEG_INF)
                    self.softmax.update(state, scores, mult)
                    self.math.accumulate(v_tile, scores, state.acc, g, t)
                    cute.arch.sync_warp()
                    if lane == 0:
                        ptx.mbarrier_arrive(smem + geo.empty_offset + 8 * mine)
                    mine = mine + geo.kv_groups if mine + geo.kv_groups < geo.stages else kv_group
                stage = (stage + tiles) % geo.stages
                epilogue = Epilogue(self.variant, geo, args, smem, warp, lane, seq, head)
                epilogue.share(state, mult, kv_group, row0)
                partial_slot = Int32(-1)
                if cutlass.const_expr(self.variant.split):
                    work = self.read_mail(smem, turn)
                    if p == work.pieces - 1 and work.end_tile > 0:
                        partial_slot = 2 * work.row + 1
                    if p == 0 and work.first_tile > 0:
                        partial_slot = 2 * work.row
                epilogue.write(partial_slot)
            if cutlass.const_expr(self.variant.split):
                self.merge_splits(args, self.read_mail(smem, turn), smem, warp, lane)
            cute.arch.sync_warp()
            if lane == 0:
                ptx.mbarrier_arrive(smem + geo.mail_free_offset + 8 * (turn & 1))
            turn += 1
            ptx.mbarrier_wait(smem + geo.mail_full_offset + 8 * (turn & 1), (turn >> 1) & 1)
            pieces = self.read_mail(smem, turn).pieces

    @cute.jit
    def merge_splits(self, args, work, smem, warp, lane):
        """For the row's first item, if others began it, then its last, if others go on with it (or the one that is
        both): merge the splits if this row is the last of them to be done."""
        for which in cutlass.range(2, unroll=1):
            cut_begin = work.first_tile > 0 and (which == 0 or work.pieces == 1)
            cut_end = work.end_tile > 0 and (which == 1 or work.pieces == 1)
            if (cut_begin or cut_end) and not (which == 1 and work.pieces == 1):
                item = work.first_item + which * (work.pieces - 1)
                seq = item // args.num_kv_heads
                head = item - seq * args.num_kv_heads
                merge = SplitMerge(self.variant, self.geo, args, smem, warp, lane, seq, head)
                merge.arrive_and_merge(
                    work.row,
                    work.first_row if cut_begin else work.row,
                    work.last_row if cut_end else work.row,
                )

    def tiles(self, begin, end):
        """Kernel tiles of a piece; none where the live length ends before it."""
        return (cutlass.max(end - begin, Int32(0)) + (self.geo.tile - 1)) // self.geo.tile

    @cute.jit
    def piece(self, args, work, p):
        """(seq, head, begin, end) of piece p: tokens [begin, end) by the live length. The last piece of a sequence
        runs to its end, however long it is by now, so a stale plan costs balance, never correctness."""
        item = work.first_item + p
        seq = item // args.num_kv_heads
        begin = work.first_tile * PLAN_TILE if p == 0 else Int32(0)
        end = cutlass.min(ptx.ldg_b32(args.seq_lens + Int64(seq) * 4), args.max_len)
        if p == work.pieces - 1 and work.end_tile > 0:
            end = cutlass.min(end, work.end_tile * PLAN_TILE)
        return seq, item - seq * args.num_kv_heads, begin, end

    @cute.jit
    def read_q(self, args, q_frags, seq, head, row0, g, t):
        """Q of the warp's rows to B fragments in shared memory; returns mult of this lane's columns."""
        geo = self.geo
        live_rows = args.q_len * args.group
        k_scale_at = Int64(seq) * args.k_scale_seq_stride + Int64(head) * args.k_scale_head_stride
        factor = args.softmax_scale * ptx.ldg_f32(args.k_scale + k_scale_at * 4)
        sign = Float32(-1.0) if factor < 0.0 else Float32(1.0)
        unscale = []
        for n in cutlass.range_constexpr(geo.row_tiles):
            row = row0 + n * 8 + g
            live = row < live_rows
            row = row if live else Int32(0)
            token = seq * args.q_len + row // args.group
            q_head = head * args.group + row % args.group
            at = Int64(token) * args.q_token_stride + Int64(q_head) * args.q_head_stride
            values = self.math.load_q_row(args.q + at * 2, t)
            if args.q_mul != 0:
                self.math.scale_q_row(values, args.q_mul + Int64(q_head * geo.head_size) * 4, t)
            frags = q_frags + n * geo.q_frag_bytes
            unscale.append(self.math.store_q_row(frags, values, sign if live else Float32(0.0)))
        cute.arch.sync_warp()
        mult = []
        for c in cutlass.range_constexpr(2 * geo.row_tiles):
            row_unscale = cute.arch.shuffle_sync(unscale[c // 2], (2 * t + c % 2) * 4)
            scale = row_unscale * (factor * sign) * LOG2_E
            mult.append(cutlass.max(cutlass.min(scale, Float32(FLT_MAX)), Float32(FLT_MIN)))
        return mult

    @cute.jit
    def clear_rows(self, v_tile, first, lane):
        """Zero the rows of V from ``first`` on: dead rows may hold anything, and 0 * NaN must not reach O."""
        geo = self.geo
        for row in cutlass.range(cutlass.min(first, Int32(geo.tile)), geo.tile, unroll=1):
            for panel in cutlass.range_constexpr(geo.panels):
                if lane * 4 < geo.panel_bytes:
                    ptx.sts_b32(v_tile + (panel * geo.tile + row) * geo.panel_bytes + lane * 4, Int32(0))
        ptx.fence_proxy_async_shared()
        cute.arch.sync_warp()
