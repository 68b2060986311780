"""The producer warp: takes rows of the plan, hands them to the consumers, and streams their K and V into the ring."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from mjolnir.kernels import ptx
from mjolnir.kernels.geometry import Geometry
from mjolnir.kernels.work import (
    Mailbox,
    Work,
    first_stage,
    item_of,
    load_row,
    num_tiles,
    page_of,
    row_address,
    rows_of_item,
    span_of,
    two_by_two,
)
from mjolnir.plan import ARRIVE, PLAN_COLUMNS, PLAN_TILE
from mjolnir.variant import Variant

FIRST_TILES_APART = 800
"""Clocks, 0.45 us. The tiles that first fill the ring would otherwise arrive together, at the end of what all CTAs ask
for at once, and then all warps work while memory rests: 64/4, 1 x 8K took 8.6 us instead of 8.0. Memory takes as long
for a tile of 8 KB for every CTA, so long calls lose nothing."""

MOST_LOOKS = 32
"""At whether all rows of an item have begun, 0.6 us each; after that the row does not wait for the others."""


class BoxPart(NamedTuple):
    """What of a page the boxes of a lane hold, all in K or all in V."""

    panel: Int32
    stride: Int32
    paired: Int32  # 1: rows of two heads beside each other
    token_rows: Int32


class Producer:
    """Code of the producer warp."""

    def __init__(self, variant: Variant, geo: Geometry):
        self.variant, self.geo = variant, geo
        self.mailbox = Mailbox(geo)

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
        if cutlass.const_expr(self.variant.split):
            if lane == 7:
                address = args.partials + Int64(cta) * (self.geo.partial_floats * 8)
        if lane == 8:
            address = args.q
        if lane < 9 and address != 0:
            ptx.prefetch_l2(address)

    @cute.jit
    def run(self, args, cta, half, smem, lane, desc_k, desc_v):
        """Lane j loads box j of a tile, which is K or V, one panel or all, of one page."""
        geo = self.geo
        log2_rows = cutlass.min(args.log2_page, Int32(geo.tile.bit_length() - 1))
        box_rows = Int32(1) << log2_rows
        page_mask = (Int32(1) << args.log2_page) - 1
        is_v = lane & 1
        panels = Int32(geo.panels(geo.k))
        if cutlass.const_expr(geo.panels(geo.v) != geo.panels(geo.k)):
            panels = Int32(geo.panels(geo.v)) if is_v == 1 else panels
        panel_boxes = Int32(1) if box_rows == geo.tile else panels
        panel = (lane >> 1) % panel_boxes
        box_row = ((lane >> 1) // panel_boxes) << log2_rows  # in the tile; lanes past the tile stay idle
        desc = desc_v if is_v == 1 else desc_k
        stride = Int32(geo.k.stride)
        if cutlass.const_expr(geo.v.stride != geo.k.stride):
            stride = Int32(geo.v.stride) if is_v == 1 else stride
        box = smem + is_v * geo.v_in_stage + (panel * geo.tile + box_row) * stride
        paired, token_rows = Int32(geo.k.paired), args.k_token_rows
        if is_v == 1:
            paired, token_rows = Int32(geo.v.paired), args.v_token_rows
        part = BoxPart(panel, stride, paired, token_rows)
        grid = cute.arch.grid_dim()[0]
        alone, pair = cta + half * grid, cta * geo.halves + half
        guess_item, guess_tile, guess_len, guess_page = Int32(-1), Int32(0), Int32(0), Int32(0)
        if cutlass.const_expr(self.variant.pdl):
            # The plan of the layer before is most likely this one's: guess the first row from it, so that the row, the
            # length and the page that it names are read together, and not one after the other (0.5 us).
            guess_rows, _, guess_mode, _ = ptx.ld_relaxed_b32x4(args.plan)
            guess_seq, guess_head, guess_tile, _ = ptx.ld_relaxed_b32x4(row_address(args, alone))
            pair_seq, pair_head, pair_tile, _ = ptx.ld_relaxed_b32x4(row_address(args, pair))
            if two_by_two(guess_mode, guess_rows, grid):
                guess_seq, guess_head, guess_tile = pair_seq, pair_head, pair_tile
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
            if guess_seq < args.seq_rows:
                guess_item = guess_seq * args.num_kv_heads + guess_head
                guess_len = ptx.ldg_b32(args.seq_lens + Int64(guess_seq) * 4)
                guess_page = self.first_page(args, guess_seq, guess_tile * PLAN_TILE + box_row)
        num_rows, _, mode, _ = ptx.ldg128(args.plan)
        work = load_row(args, alone)
        if cutlass.const_expr(geo.halves == 2):
            pair_work = load_row(args, pair)
            if two_by_two(mode, num_rows, grid):
                work = pair_work
        num_ctas = grid * geo.halves
        stage = Int32(0)  # of the ring
        free = Int32(0)  # bit s: parity of the phase in which stage s is free next, less 1
        turn = Int32(0)  # rows handed over
        unfilled, issued_at = Int32(geo.stages), ptx.clock() - FIRST_TILES_APART
        row = work.row
        counter = Int64(0)
        while row < num_rows:
            self.mailbox.put(smem, lane, turn, work, mode)
            turn += 1
            if mode != ARRIVE:
                # Of an item's rows: it is at zero again once all have begun.
                begin_row, final_row = rows_of_item(work, 0)
                counter = args.counters + Int64(begin_row) * 8
                if lane == 0 and begin_row < final_row:
                    ptx.increment(counter, final_row - begin_row)
            for p in cutlass.range(work.pieces, unroll=1):
                seq, head = item_of(args, work, p)
                pages = args.block_table + Int64(seq) * args.block_table_stride * 4
                seq_len, page = guess_len, guess_page
                if guess_item != work.first_item + p or (p == 0 and guess_tile != work.first_tile):
                    seq_len = ptx.ldg_b32(args.seq_lens + Int64(seq) * 4)
                    page = self.first_page(args, seq, (work.first_tile * PLAN_TILE if p == 0 else Int32(0)) + box_row)
                guess_item = Int32(-1)
                begin, end = span_of(work, p, cutlass.min(seq_len, args.max_len))
                left = end - begin
                token = begin + box_row
                stage = first_stage(geo, stage)
                for _ in cutlass.range(num_tiles(geo, begin, end), unroll=1):
                    # The next tile's page is read while this tile waits for its stage.
                    next_page = page_of(args, pages, token + geo.tile, end - 1)
                    empty, parity = smem + geo.empty_offset + 8 * stage, ((free >> stage) & 1) ^ 1
                    ptx.mbarrier_wait(empty, parity)
                    free = free ^ (Int32(1) << stage)
                    if unfilled > 0:
                        # Unsigned: after a long wait, in which the clock has wrapped, the tile goes at once.
                        while Uint32(ptx.clock() - issued_at) < Uint32(FIRST_TILES_APART):
                            pass
                        issued_at = ptx.clock()
                        unfilled -= 1
                    rows = cutlass.min(left, Int32(geo.tile))
                    full = smem + geo.full_offset + 8 * stage
                    if lane == 0:
                        ptx.mbarrier_arrive_expect_tx(full, ((rows + box_rows - 1) & ~(box_rows - 1)) * geo.token_bytes)
                    cute.arch.sync_warp()
                    if box_row < rows:
                        coords = self.coords(token & page_mask, head, page, part)
                        ptx.tma_load_5d(box + stage * geo.stage_bytes, desc, coords, full, args.l2_policy)
                    if cutlass.const_expr(self.variant.l2_prefetch):
                        if box_row < cutlass.min(left - args.l2_prefetch * geo.tile, Int32(geo.tile)):
                            ahead = token + args.l2_prefetch * geo.tile
                            far_page = ptx.ldg_b32(pages + Int64(ahead >> args.log2_page) * 4)
                            coords = self.coords(ahead & page_mask, head, far_page, part)
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
                if row < num_rows:
                    work = load_row(args, row)
        begun = Int32(0)
        if counter != 0:
            for _ in cutlass.range(MOST_LOOKS, unroll=1):
                if begun == 0:
                    begun = Int32(ptx.ld_relaxed_b32(counter) == 0)
            begun = cute.arch.shuffle_sync(begun, 0)
        self.mailbox.put(smem, lane, turn, Work(row, row, Int32(-1), row, row, row, row), begun)

    def coords(self, token: Any, head: Any, page: Any, part: BoxPart) -> tuple[Any, ...]:
        """Where a box begins that starts with a token of a page, by the tensor maps of decode.py."""
        geo = self.geo
        if geo.joined == "heads":
            return head * geo.k.panel_bytes, token, Int32(0), Int32(0), page
        if geo.joined == "panels":
            byte, panel = part.paired * head * part.stride, (1 - part.paired) * (2 * head + part.panel)
            return byte, token, panel, Int32(0), page
        row = token
        if geo.joined == "tokens":
            row = token >> 1
        elif geo.k.flat_rows + geo.v.flat_rows > 0:
            row = (token >> 4) * part.token_rows
        return Int32(0), row, part.panel, head, page

    @cute.jit
    def first_page(self, args, seq, token):
        """The page of a token that may lie past the sequence's end, and is not used then: so it is read beside the
        length, not after it."""
        column = cutlass.min(token, args.max_len - 1) >> args.log2_page
        return ptx.ldg_b32(args.block_table + (Int64(seq) * args.block_table_stride + Int64(column)) * 4)
