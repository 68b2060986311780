"""The balanced plan of one decode step: cut the step's work into rows that the CTAs of the kernel take one by one.

The work lies on one line, items (sequence, KV head) one after the other, each as long as its tiles of PLAN_TILE tokens
plus what a piece costs beside its tiles (PlanShape.piece_cost); or, where rows are aligned to items (aligned_share), as
long as its tiles alone, rounded up to whole rows. The line is cut into rows; a row may hold several pieces, an item may
span several rows, and no length has a say in how many rows there are. CTA c starts with row c; whoever is done takes
the next row that nobody has. There are as many rows as CTAs, or over equal lengths a few less that end where items do;
but where lengths differ much, a CTA's time is hard to tell beforehand, and rows get smaller towards the end of the line
(cut_line).

Fixed splits (PlanShape.fixed_tiles) are aligned rows of one length in every step, each a split of one item: where an
item is cut, and so the order of every sum, follows from the item alone. There the work decides how many rows there are.

Everything about a row follows from its position on the line, so a kernel can build the same plan in one launch
(kernels/plan_kernel.py). A plan is int32: a header (number of rows in use, a ticket counter that starts at 0, how
splits are merged), then per row

    0 first_seq    3 end_seq     6 first_row: row in which this row's first item begins
    1 first_head   4 end_head    7 last_row:  row in which this row's last item ends
    2 first_tile   5 end_tile

Work starts at (first_seq, first_head, first_tile) and stops before (end_seq, end_head, end_tile); the last piece of
an item runs to the live end of its sequence, whatever was planned. In a PAIRED plan rows 2 i and 2 i + 1 belong to one
item: the two halves of a CTA take them, and merge them in shared memory, as one split.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import numpy as np
import numpy.typing as npt

PLAN_TILE = 64
"""Tokens per tile of the plan."""

PLAN_COLUMNS = 8
"""int32 words of the header, and of a row."""

PIECE_COSTS = {16: 2, 8: 2, 6: 4, 4: 6}
"""What a piece costs beside its tiles, in tiles, by the bits of K and V: 2-3 us (Q, the merge of the warps, the
output), of which the ring hides some; a tile takes a CTA about 1 us once all of them stream. Of six and four bits a
tile takes less, and a CTA waits for its warps, so that nothing hides what they do beside tiles: 32 mixed lengths of
nvfp4 took 91 us with 2, 84 with 4, 83 with 6 and 88 with 14, of e2m3 100, 98, 99, 102."""

MIN_TILES = 4
"""Of the smallest row, beside a piece's cost: they keep a CTA's four consumer warps busy."""

ARRIVE, WAIT, PAIRED = range(3)
"""How splits are merged: by whoever is done last; or, where each CTA has one row of one piece, by all rows together,
which wait for each other; or likewise with two rows as one split."""

SINGLE_TILES, SHORT_TILES = 32, (2, 4)
"""Where the work is too little for all CTAs, latency decides. An item of up to SINGLE_TILES is cut into 8 rows at most,
each of SHORT_TILES and on an SM of its own: 16 tiles in 8 rows took 5.1 us, in 16 rows 5.7."""

PAIRED_TILES, PAIR_TILES = 128, (2, 4)
"""A longer one is cut into pairs of rows, which are one split: 512 tiles took 8.8 us so, and 11.0 in single rows. Rows
have two tiles up to PAIRED_TILES, else four, one for each warp. With two, 128 tiles of d = 256 took 7.8 us instead of
9.5, and of d = 128 6.4 instead of 6.5; 512 tiles took 8.0 instead of 7.7."""

SHARES = ((1, 8), (2, 1))
"""(rows per CTA, each this many tenths of a CTA's equal share), in the order of the line."""

ROWS_PER_CTA = sum(rows for rows, _ in SHARES)

DYNAMIC_ABOVE, SKEWED = 96, 4
"""Rows get smaller towards the end from this equal share in tiles on, where the longest sequence has this many times
the mean. Over equal lengths equal rows are 2 to 6 % faster, over 32 lengths between 128 and 64K smaller ones by 2 to
3 %. Below that share every CTA gets one row at most: a small one costs more, about 3 us, than evening out the ends
gains."""

ALIGN_SLACK = 3
"""Elsewhere rows that hold one piece each may be this much longer than equal ones: a row that ends one item and begins
another merges twice, and by arrival. With 32 q rows 1 x 128K took 100 us so, and 75 us in rows 3 % longer; 32/4,
4 x 128K took 139 and 131."""

WHOLE_SLACK = 4
"""Rows over equal lengths end where items end if their tiles are then at most so many more than an equal share: cut
anywhere, nearly every row has a piece more, and a merge to see to. With rows 8 tiles longer than a share nvfp4, 64 x 8K
head-major took 169 us, cut anywhere 161."""

INT32_MAX = 2**31 - 1

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class PlanShape:
    """What a runner fixes once: the plan's size does not depend on the step."""

    num_ctas: int
    num_kv_heads: int
    max_splits: int | None = None  # None: as many as balance asks for
    pairs: bool = True  # CTAs are halves of larger ones, two by two
    fixed_tiles: int = 0  # tiles per split where cuts follow from an item alone; 0: cuts follow from balance
    fixed_rows: int = 0  # rows kept for that; more work than they hold goes to the last one
    piece_cost: int = PIECE_COSTS[8]

    @property
    def num_rows(self) -> int:
        return max(self.num_ctas * ROWS_PER_CTA, self.fixed_rows)


@dataclasses.dataclass(frozen=True)
class Segment:
    """Rows of one size: row first_row + i begins at position start + i * share. The first segment begins at 0."""

    start: int
    first_row: int
    share: int


def build_plan(seq_lens: npt.ArrayLike, shape: PlanShape, margin: int = 0) -> Int32Array:
    """The plan of one step, on the host.

    Args:
        seq_lens: (num_seqs,) integers, tokens per sequence; 0 is allowed.
        shape: the fixed sizes.
        margin: plan every sequence this many tokens longer.

    Returns:
        (1 + shape.num_rows, PLAN_COLUMNS) int32: header and rows. A row's tiles plus piece_cost per piece exceed the
        share of its segment by at most piece_cost, unless max_splits = 1.
    """
    # Lengths on the device are int32, and so is a kernel's way from tiles to tokens.
    lens = np.minimum(np.asarray(seq_lens, dtype=np.int64) + min(margin, INT32_MAX), INT32_MAX)
    columns = np.zeros((PLAN_COLUMNS, 1 + shape.num_rows), dtype=np.int32)
    if not len(lens):
        return columns.T
    tiles = np.maximum((lens + (PLAN_TILE - 1)) // PLAN_TILE, 1)
    work, longest = int(tiles.sum()), int(tiles.max())
    even, skewed = longest * len(tiles) == work, longest * len(tiles) >= SKEWED * work
    aligned, rows = (shape.fixed_tiles, 1) if shape.fixed_tiles else aligned_share(tiles, work, longest, skewed, shape)
    split = aligned * rows
    cost = 0 if aligned else shape.piece_cost  # a row of one piece pays it beside its share, like every other row
    length = (tiles + (split - 1)) // split * split if aligned else tiles + cost
    seq_length = length * shape.num_kv_heads
    seq_end = seq_length.cumsum()
    total = int(seq_end[-1])
    segments = [Segment(0, 0, aligned)] if aligned else cut_line(total, longest, even, skewed, shape)
    in_use = min(_row_of(segments, total - 1) + 1, shape.num_rows)  # the last row takes what fixed splits leave over

    position = _row_starts(segments, in_use)
    seq = seq_end.searchsorted(position, side="right")
    item_length = length[seq]
    head, offset = np.divmod(position - (seq_end - seq_length)[seq], item_length)
    begin, end, first_row, last_row = columns[:3, 1:], columns[3:6, 1:], columns[6, 1:], columns[7, 1:]
    begin[0, in_use:] = len(tiles)  # rows that are not in use lie at the end of the line
    if shape.max_splits == 1:
        # Cuts move to the nearest boundary between items.
        item = seq * shape.num_kv_heads + head + ((2 * offset >= item_length) & (offset > 0))
        begin[0, :in_use], begin[1, :in_use] = np.divmod(item, shape.num_kv_heads)
    else:
        begin[0, :in_use], begin[1, :in_use], begin[2, :in_use] = seq, head, np.maximum(offset - cost, 0)
        # Tile k of an item lies at item_start + cost + k, and belongs to the row it lies in.
        item_start = position - offset
        first_row[:in_use] = _row_of(segments, item_start + cost)
        # Fixed splits may be more than there are rows, even more than int32 counts.
        most = shape.num_rows - 1 if shape.fixed_tiles else INT32_MAX
        first_row[in_use:] = min(_row_of(segments, total + cost), most)
        last_row[: in_use - 1] = np.minimum(_row_of(segments, item_start + (item_length - 1)), most)[1:]
        last_row[in_use - 1 :] = min(_row_of(segments, total), most)
    end[:, :-1] = begin[:, 1:]
    end[0, -1] = len(tiles)
    columns[0, 0] = in_use
    columns[2, 0] = PAIRED if rows == 2 else WAIT if aligned and not shape.fixed_tiles else ARRIVE
    return columns.T


def fixed_rows(num_seqs: int, tokens: int, fixed_split: int, num_kv_heads: int) -> int:
    """Rows that hold every step of at most ``num_seqs`` sequences with ``tokens`` tokens in all, where a split has
    ``fixed_split`` tokens: a sequence of n takes n / fixed_split, rounded up, and one if it is empty."""
    return num_kv_heads * (num_seqs + tokens // fixed_split)


def aligned_share(tiles: Int64Array, work: int, longest: int, skewed: bool, shape: PlanShape) -> tuple[int, int]:
    """(tiles per row, rows per split) where every row can hold one piece and all rows run at once; (0, 1) where other
    rows serve better: ones that shrink, or where it would be more than ALIGN_SLACK longer than an equal share.
    ``tiles``: per sequence; ``work`` and ``longest``: their sum and maximum; ``skewed``: see SKEWED."""
    equal = -(-work * shape.num_kv_heads // shape.num_ctas)
    if shape.max_splits is not None or (skewed and equal >= DYNAMIC_ABOVE):
        return 0, 1
    single, pair = SHORT_TILES[2 * longest > SINGLE_TILES], PAIR_TILES[longest > PAIRED_TILES]
    singles_first = longest <= SINGLE_TILES and equal <= single
    for rows, short in ((1, single), (2, pair)) if singles_first else ((2, pair), (1, single)):
        at_once = shape.num_ctas // (rows * shape.num_kv_heads)  # splits, of each head
        if len(tiles) > at_once or (rows == 2 and not shape.pairs):
            continue
        smallest = max(equal, short)
        for share in range(smallest, smallest + ALIGN_SLACK + 1):
            if int((-(-tiles // (rows * share))).sum()) <= at_once:
                return share, rows
    return 0, 1


def cut_line(total: int, longest: int, even: bool, skewed: bool, shape: PlanShape) -> list[Segment]:
    """The segments that cover a line of ``total``; ``longest``: most tiles of a sequence, ``even``: all have as many,
    ``skewed``: see SKEWED."""
    equal, smallest = -(-total // shape.num_ctas), MIN_TILES + shape.piece_cost
    if shape.max_splits not in (None, 1):
        # n tiles touch at most (n - 2) // share + 2 rows of one size.
        return [Segment(0, 0, max(equal, smallest, (longest - 2) // (shape.max_splits - 1) + 1))]
    if equal < DYNAMIC_ABOVE or not skewed:
        item = longest + shape.piece_cost
        items = total // item
        most = -(-items // shape.num_ctas)  # whole ones that a CTA takes
        ends_with_items = even and (most * shape.num_ctas - items) * longest <= WHOLE_SLACK * shape.num_ctas
        return [Segment(0, 0, most * item if ends_with_items else max(equal, smallest))]
    segments, start, first_row = [], 0, 0
    for rows, tenths in SHARES:
        share = -(-total * tenths // (10 * shape.num_ctas))
        segments.append(Segment(start, first_row, share))
        start += rows * shape.num_ctas * share
        first_row += rows * shape.num_ctas
    return segments


def _row_starts(segments: list[Segment], count: int) -> Int64Array:
    """Where rows 0 … count - 1 begin; the last segment goes on for ever."""
    row = np.arange(count)
    start = row * segments[0].share
    for segment in segments[1:]:
        start[segment.first_row :] = segment.start + (row[segment.first_row :] - segment.first_row) * segment.share
    return start


_Position = TypeVar("_Position", int, Int64Array)


def _row_of(segments: list[Segment], position: _Position) -> _Position:
    """The row that a position lies in."""
    row = position // segments[0].share
    for segment in segments[1:]:
        here = segment.first_row + (position - segment.start) // segment.share
        row += (here - row) * (position >= segment.start)
    return row
