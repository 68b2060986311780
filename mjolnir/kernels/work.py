"""What a CTA works on: rows of the plan, their pieces, and the mailbox in which the producer hands a row over."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from mjolnir.kernels import ptx
from mjolnir.kernels.geometry import Geometry
from mjolnir.plan import PAIRED, PLAN_COLUMNS, PLAN_TILE, WAIT


class Work(NamedTuple):
    """One row of the plan, as items numbered seq * num_kv_heads + head."""

    row: Int32
    first_item: Int32
    pieces: Int32
    first_tile: Int32
    end_tile: Int32
    first_row: Int32
    last_row: Int32


def row_address(args: Any, row: Any) -> Any:
    return args.plan + (Int64(row) + 1) * (PLAN_COLUMNS * 4)


@cute.jit
def load_row(args, row):
    """A row of the plan."""
    at = row_address(args, row)
    first_seq, first_head, first_tile, end_seq = ptx.ldg128(at)
    end_head, end_tile, first_row, last_row = ptx.ldg128(at + 16)
    first_item = first_seq * args.num_kv_heads + first_head
    pieces = end_seq * args.num_kv_heads + end_head - first_item + (Int32(1) if end_tile > 0 else Int32(0))
    return Work(row, first_item, pieces, first_tile, end_tile, first_row, last_row)


@cute.jit
def two_by_two(mode, num_rows, grid):
    """Whether the halves of CTA c begin with rows 2 c and 2 c + 1, else with c and c + grid, so that few rows go to as
    many SMs. Pairs must share a CTA; and where rows wait for lower ones, those must lie in no later CTA, which may not
    have a place yet: two kernels, each with half of its CTAs on the GPU, would wait for ever."""
    return mode == PAIRED or (mode == WAIT and num_rows > grid)


@cute.jit
def item_of(args, work, p):
    """(seq, head) of piece p."""
    item = work.first_item + p
    seq = item // args.num_kv_heads
    return seq, item - seq * args.num_kv_heads


@cute.jit
def span_of(work, p, seq_len):
    """Tokens [begin, end) of piece p by the live length. The last piece of a sequence runs to its end, however long it
    is by now, so a stale plan costs balance, never correctness."""
    begin = work.first_tile * PLAN_TILE if p == 0 else Int32(0)
    end = cutlass.min(seq_len, work.end_tile * PLAN_TILE) if p == work.pieces - 1 and work.end_tile > 0 else seq_len
    return begin, end


@cute.jit
def rows_of_item(work, p):
    """The first and the last row of the plan that have a part of piece p's item."""
    first = work.first_row if p == 0 and work.first_tile > 0 else work.row
    last = work.last_row if p == work.pieces - 1 and work.end_tile > 0 else work.row
    return first, last


def page_of(args: Any, table: Any, token: Any, last: Any) -> Any:
    """The page of a token, or past ``last`` that one's: a load on no condition, because one on a condition takes the
    loop's invariants that it depends on out of registers. ``table``: address of the sequence's block table."""
    return ptx.ldg_b32(ptx.mad_wide(cutlass.min(token, last) >> args.log2_page, Int32(4), table))


def num_tiles(geo: Geometry, begin: Any, end: Any) -> Any:
    """Kernel tiles of a piece; none where the live length ends before it."""
    return (cutlass.max(end - begin, Int32(0)) + (geo.tile - 1)) // geo.tile


def first_stage(geo: Geometry, stage: Any) -> Any:
    """The stage of the ring that a piece starts with: a multiple of kv_groups, so that the warp of a tile is fixed."""
    return (stage + geo.kv_groups - 1) // geo.kv_groups * geo.kv_groups % geo.stages


class Mailbox:
    """Two rows in shared memory: the one the consumers work on and the one after it. ``turn`` counts rows."""

    def __init__(self, geo: Geometry):
        self.geo = geo

    @cute.jit
    def put(self, smem, lane, turn, work, mode):
        """The producer warp: hand over a row once its place is free."""
        box = turn & 1
        ptx.mbarrier_wait(smem + self.geo.mail_free_offset + 8 * box, ((turn >> 1) & 1) ^ 1)
        if lane == 0:
            mail = smem + self.geo.mail_offset + box * 32
            ptx.sts128(mail, (work.row, work.first_item, work.pieces, work.first_tile))
            ptx.sts128(mail + 16, (work.end_tile, work.first_row, work.last_row, mode))
            ptx.mbarrier_arrive(smem + self.geo.mail_full_offset + 8 * box)

    def wait(self, smem: Any, turn: Any) -> None:
        """Another warp than the producer: until the row is there."""
        ptx.mbarrier_wait(smem + self.geo.mail_full_offset + 8 * (turn & 1), (turn >> 1) & 1)

    def read(self, smem: Any, turn: Any) -> Work:
        """The row that is there; read again rather than kept in registers across a tile loop."""
        mail = smem + self.geo.mail_offset + (turn & 1) * 32
        row, first_item, pieces, first_tile = ptx.lds128(mail)
        end_tile, first_row, last_row, _ = ptx.lds128(mail + 16)
        return Work(row, first_item, pieces, first_tile, end_tile, first_row, last_row)

    def mode(self, smem: Any, turn: Any) -> Any:
        """How the plan's splits are merged: ARRIVE, WAIT or PAIRED."""
        return ptx.lds_b32(smem + self.geo.mail_offset + (turn & 1) * 32 + 28)

    @cute.jit
    def free(self, smem, lane, turn):
        """A warp that read it: the row is done with."""
        cute.arch.sync_warp()
        if lane == 0:
            ptx.mbarrier_arrive(smem + self.geo.mail_free_offset + 8 * (turn & 1))
