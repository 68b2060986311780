"""The warp that copies block scales, the few bytes that go with each row of codes, into the ring beside them.

A row's 4 to 16 bytes are too few for the TMA, whose boxes are 16 bytes wide at least, and to address them would take
the producer longer than memory takes for the codes. So a warp of its own does: it follows the rows of the plan as the
consumers do, and fills stages as the producer does.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from mjolnir.kernels import ptx
from mjolnir.kernels.geometry import WARP, Geometry
from mjolnir.kernels.heads import kv_head_of
from mjolnir.kernels.lanes import position_of
from mjolnir.kernels.work import Mailbox, first_stage, item_of, num_tiles, page_of, span_of
from mjolnir.variant import Variant


class ScaleCopier:
    """Code of that warp. Lane j copies the scales of tokens j and j + 32 of a tile."""

    def __init__(self, variant: Variant, geo: Geometry):
        self.variant, self.geo = variant, geo
        self.mailbox = Mailbox(geo)

    @cute.jit
    def run(self, args, smem, lane):
        geo = self.geo
        stage, free, turn = Int32(0), Int32(0), Int32(0)  # as the producer counts
        self.mailbox.wait(smem, turn)
        work = self.mailbox.read(smem, turn)
        while work.pieces >= 0:
            for p in cutlass.range(work.pieces, unroll=1):
                seq, head = item_of(args, work, p)
                table = args.block_table + Int64(seq) * args.block_table_stride * 4
                begin, end = span_of(work, p, cutlass.min(ptx.ldg_b32(args.seq_lens + Int64(seq) * 4), args.max_len))
                stage = first_stage(geo, stage)
                token, last = begin + lane, cutlass.max(end - 1, Int32(0))
                pages = self.pages_of(args, table, token, last)
                for _ in cutlass.range(num_tiles(geo, begin, end), unroll=1):
                    # The next tile's pages are read while this tile waits for its stage.
                    next_pages = self.pages_of(args, table, token + geo.tile, last)
                    ptx.mbarrier_wait(smem + geo.empty_offset + 8 * stage, ((free >> stage) & 1) ^ 1)
                    free = free ^ (Int32(1) << stage)
                    if cutlass.const_expr(geo.tile >= WARP):
                        self.copy(args, smem, stage, lane, token, end, head, pages)
                    else:
                        if lane < geo.tile:
                            self.copy(args, smem, stage, lane, token, end, head, pages)
                    ptx.cp_async_arrive(smem + geo.full_offset + 8 * stage)
                    pages = next_pages
                    token += geo.tile
                    stage = stage + 1 if stage + 1 < geo.stages else Int32(0)
            self.mailbox.free(smem, lane, turn)
            turn += 1
            self.mailbox.wait(smem, turn)
            work = self.mailbox.read(smem, turn)

    def pages_of(self, args: Any, table: Any, token: Any, last: Any) -> list[Any]:
        """The pages of ``token`` and, where a tile is that long, of the token 32 further on."""
        return [page_of(args, table, token + i * WARP, last) for i in range(max(1, self.geo.tile // WARP))]

    def copy(self, args: Any, smem: Any, stage: Any, lane: Any, first: Any, end: Any, head: Any, pages: Any) -> None:
        """Start a lane's copies; of what does not exist come zeros, as of its codes."""
        geo = self.geo
        scales = smem + geo.scales_offset + stage * geo.scale_stage_bytes
        page_mask = (Int32(1) << args.log2_page) - 1
        for i, page in enumerate(pages):
            at = position_of(geo.joined, lane + i * WARP)
            token = first + i * WARP
            exists = (Uint32(page) < Uint32(args.num_pages)) & (token < end)
            for side in range(geo.sides):
                kv_head, found = head, exists
                if geo.sides == 2:
                    kv_head = kv_head_of(head, side)
                    found = exists & (kv_head < args.real_kv_heads)
                row = side * geo.tile + at
                for blocks, width, offset in (
                    (args.k_blocks, geo.k.scale_bytes, 0),
                    (args.v_blocks, geo.v.scale_bytes, geo.v_in_scales),
                ):
                    if width > 0:
                        of_head = blocks.base + Int64(kv_head) * Int64(blocks.head_stride)
                        of_page = ptx.mad_wide(page, blocks.page_stride, of_head)
                        source = ptx.mad_wide(token & page_mask, blocks.token_stride, of_page)
                        ptx.cp_async(scales + offset + row * width, source, width, Int32(found) * width)
