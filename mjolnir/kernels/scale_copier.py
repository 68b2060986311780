"""The warp that copies block scales, the few bytes that go with each row of codes, into the ring beside them.

A row's 4 to 16 bytes are too few for the TMA, whose boxes are 16 bytes wide at least, and to address them would take
the producer longer than memory takes for the codes. So a warp of its own does: it follows the rows of the plan as the
consumers do, and fills stages as the producer does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from mjolnir.kernels import ptx
from mjolnir.kernels.args import BlockScales
from mjolnir.kernels.geometry import WARP, Geometry
from mjolnir.kernels.heads import kv_head_of
from mjolnir.kernels.lanes import position_of
from mjolnir.kernels.work import Mailbox, first_stage, item_of, num_tiles, span_of
from mjolnir.variant import Variant

STAGE_BITS = 5
"""Of a stage's number: there are 32 at most."""


class Pages(NamedTuple):
    """Of the one or two tokens of a tile whose scales a lane copies."""

    first: Int32
    second: Int32


class ScaleCopier:
    """Code of that warp. Lane j copies the scales of tokens j and j + 32 of a tile."""

    def __init__(self, variant: Variant, geo: Geometry):
        self.variant, self.geo = variant, geo
        self.mailbox = Mailbox(geo)

    @cute.jit
    def run(self, args, smem, lane):
        geo = self.geo
        stage, free, turn = Int32(0), Int32(0), Int32(0)  # as the producer counts
        late, late_stages = Int32(0), Int32(0)  # tiles on their way; their stages, STAGE_BITS each, the newest lowest
        self.mailbox.wait(smem, turn)
        work = self.mailbox.read(smem, turn)
        while work.pieces >= 0:
            for p in cutlass.range(work.pieces, unroll=1):
                seq, head = item_of(args, work, p)
                pages = args.block_table + Int64(seq) * args.block_table_stride * 4
                begin, end = span_of(work, p, cutlass.min(ptx.ldg_b32(args.seq_lens + Int64(seq) * 4), args.max_len))
                stage = first_stage(geo, stage)
                page = self.pages_of(args, pages, begin + lane, end)
                for tile in cutlass.range(num_tiles(geo, begin, end), unroll=1):
                    first = begin + tile * geo.tile + lane
                    # The next tile's pages are read while this tile waits for its stage.
                    next_page = self.pages_of(args, pages, first + geo.tile, end)
                    empty, parity = smem + geo.empty_offset + 8 * stage, ((free >> stage) & 1) ^ 1
                    while late > 0 and not is_done(empty, parity):
                        # The consumers may need what is late to free this stage.
                        self.deliver(smem, late, late_stages)
                        late -= 1
                    ptx.mbarrier_wait(empty, parity)
                    free = free ^ (Int32(1) << stage)
                    self.copy(args, smem, stage, lane, first, end, head, page)
                    late, late_stages = late + 1, (late_stages << STAGE_BITS) | stage
                    if late == geo.late_stages:
                        self.deliver(smem, late, late_stages)
                        late -= 1
                    page = next_page
                    stage = stage + 1 if stage + 1 < geo.stages else Int32(0)
            while late > 0:
                self.deliver(smem, late, late_stages)
                late -= 1
            self.mailbox.free(smem, lane, turn)
            turn += 1
            self.mailbox.wait(smem, turn)
            work = self.mailbox.read(smem, turn)

    @cute.jit
    def pages_of(self, args, pages, token, end):
        """The pages of tokens ``token`` and 32 more, −1 from ``end`` on."""
        found = []
        for i in cutlass.range_constexpr(2):
            page = Int32(-1)
            if cutlass.const_expr(i * WARP < self.geo.tile):
                if token + i * WARP < end:
                    page = ptx.ldg_b32(pages + Int64((token + i * WARP) >> args.log2_page) * 4)
            found.append(page)
        return Pages(*found)

    @cute.jit
    def copy(self, args, smem, stage, lane, first, end, head, pages):
        """Start the copies of a tile; of a page that does not exist come zeros, as of its codes."""
        geo = self.geo
        scales = smem + geo.scales_offset + stage * geo.scale_stage_bytes
        page_mask = (Int32(1) << args.log2_page) - 1
        for i in cutlass.range_constexpr(max(1, geo.tile // WARP)):
            at = position_of(geo.joined, lane + i * WARP)
            page = pages[i]
            if lane + i * WARP < cutlass.min(end - first + lane, Int32(geo.tile)):
                exists = Int32(1) if (page >= 0) & (page < args.num_pages) else Int32(0)
                token = Int64((first + i * WARP) & page_mask)
                for side in cutlass.range_constexpr(geo.sides):
                    kv_head, size = head, exists
                    if cutlass.const_expr(geo.sides == 2):
                        kv_head = kv_head_of(head, side)
                        size = exists if kv_head < args.real_kv_heads else Int32(0)
                    place, row = (Int64(page), token, Int64(kv_head)), side * geo.tile + at
                    if cutlass.const_expr(geo.k.scale_bytes > 0):
                        width = geo.k.scale_bytes
                        ptx.cp_async(scales + row * width, address_of(args.k_blocks, *place), width, size * width)
                    if cutlass.const_expr(geo.v.scale_bytes > 0):
                        width = geo.v.scale_bytes
                        target = scales + geo.v_in_scales + row * width
                        ptx.cp_async(target, address_of(args.v_blocks, *place), width, size * width)
        ptx.cp_async_commit()

    @cute.jit
    def deliver(self, smem, late, late_stages):
        """Wait for the oldest of the ``late`` tiles, and arrive at its stage. Every lane waits for its own copies: an
        ordinary arrival's release orders them before the consumers' reads."""
        for newer in cutlass.range_constexpr(self.geo.late_stages):
            if late == newer + 1:
                ptx.cp_async_wait(newer)
        stage = (late_stages >> ((late - 1) * STAGE_BITS)) & ((1 << STAGE_BITS) - 1)
        ptx.mbarrier_arrive(smem + self.geo.full_offset + 8 * stage)


def is_done(mbarrier: Any, parity: Any) -> Any:
    """Whether the phase of this parity has completed, the same in all lanes."""
    return cute.arch.vote_any_sync(ptx.mbarrier_done(mbarrier, parity) != 0)


def address_of(blocks: BlockScales, page: Any, token: Any, head: Any) -> Any:
    """Of a row's block scales."""
    return blocks.base + page * blocks.page_stride + token * blocks.token_stride + head * blocks.head_stride
