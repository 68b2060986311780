"""A plan read as the kernel reads it: row by row, item by item. Nothing here knows how a plan is made."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from mjolnir.plan import PLAN_TILE

Item = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one row does for one item: tokens [begin, end) of a sequence for one KV head."""

    row: int
    seq: int
    head: int
    begin: int
    end: int  # of the live sequence where the row goes to its end
    to_the_end: bool
    first_row: int  # the rows of the item's first and last split, as this row believes
    last_row: int

    @property
    def item(self) -> Item:
        return self.seq, self.head


def walk(plan: np.ndarray, lens: Sequence[int], heads: int) -> list[Piece]:
    """Every piece of every row, over sequences of these live lengths."""
    pieces = []
    (used, *_), *rows = plan.tolist()
    for row, columns in enumerate(rows[:used]):
        first_seq, first_head, first_tile, end_seq, end_head, end_tile, first_row, last_row = columns
        seq, head, tile = first_seq, first_head, first_tile
        while (seq, head) < (end_seq, end_head) or ((seq, head) == (end_seq, end_head) and tile < end_tile):
            stops = (seq, head) == (end_seq, end_head)
            begins = tile == 0
            end = min(end_tile * PLAN_TILE, lens[seq]) if stops else lens[seq]
            pieces.append(
                Piece(
                    row, seq, head, tile * PLAN_TILE, end, not stops,
                    row if begins else first_row, last_row if stops else row,
                )
            )  # fmt: skip
            if stops:
                break
            seq, head = (seq, head + 1) if head + 1 < heads else (seq + 1, 0)
            tile = 0
    return pieces


def by_item(pieces: Sequence[Piece]) -> dict[Item, list[Piece]]:
    items = collections.defaultdict(list)
    for piece in pieces:
        items[piece.item].append(piece)
    return items
