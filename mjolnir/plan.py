"""The balanced plan of one decode step: which CTA computes which tiles of which sequence and KV head.

The work of a step is laid out on one line, items (sequence, KV head) one after the other, each as long as its tiles
of PLAN_TILE tokens plus PIECE_COST for what a piece costs beside its tiles. The line is cut into equal shares, one
per CTA: a CTA may run several pieces, an item may span several CTAs, and the number of pieces is at most
CTAs + items. Everything a CTA needs fits eight integers, and everything about it follows from its own position on
the line, so a kernel can build the same plan with one thread per CTA.

A plan row, int32:

    0 first_seq    3 end_seq     6 first_cta: CTA that begins this CTA's first item
    1 first_head   4 end_head    7 last_cta:  CTA that ends this CTA's last item
    2 first_tile   5 end_tile

The CTA's work starts at (first_seq, first_head, first_tile) and stops before (end_seq, end_head, end_tile); the last
piece of an item runs to the live end of its sequence, whatever was planned.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

PLAN_TILE = 64
"""Tokens per tile of the plan."""

PLAN_COLUMNS = 8

PIECE_COST = 1
"""What a piece costs beside its tiles (Q, the merge of the warps, the output), in tiles."""

MIN_SHARE = 5
"""Smallest share of a CTA, piece cost included: four tiles keep a CTA's four consumer warps
busy; below that a further split costs more than it saves."""

IntArray = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class PlanShape:
    """What a runner fixes once: the plan's size does not depend on the step."""

    num_ctas: int
    num_kv_heads: int
    max_splits: int | None = None  # None: as many as balance asks for


def build_plan(seq_lens: npt.ArrayLike, shape: PlanShape, margin: int = 0) -> IntArray:
    """The plan of one step, on the host.

    Args:
        seq_lens: (num_seqs,) integers, tokens per sequence; 0 is allowed.
        shape: the fixed sizes.
        margin: plan every sequence this many tokens longer.

    Returns:
        (num_ctas, PLAN_COLUMNS) int32.

    With ``share`` = max(ceil(total / num_ctas), MIN_SHARE), no CTA gets more than share + PIECE_COST units (tiles
    plus PIECE_COST per piece) as long as splits are not capped.
    """
    lens = np.asarray(seq_lens, dtype=np.int64)
    tiles = np.maximum(-(-(lens + margin) // PLAN_TILE), 1)
    length = tiles + PIECE_COST
    heads = shape.num_kv_heads
    seq_start = np.concatenate(([0], np.cumsum(length * heads)))
    total = int(seq_start[-1])
    share = max(-(-total // shape.num_ctas), MIN_SHARE)
    if shape.max_splits is not None and shape.max_splits > 1 and len(lens):
        # n tiles touch at most (n - 2) // share + 2 shares.
        share = max(share, (int(tiles.max()) - 2) // (shape.max_splits - 1) + 1)

    cta = np.arange(shape.num_ctas + 1, dtype=np.int64)
    position = np.minimum(cta * share, total)
    seq = np.searchsorted(seq_start, position, side="right") - 1
    inside = np.minimum(seq, max(len(lens) - 1, 0))
    item_length = length[inside] if len(lens) else np.ones_like(position)
    offset = position - seq_start[seq]
    head = offset // item_length
    offset -= head * item_length
    if shape.max_splits == 1:
        return _whole_items(seq, head, offset, item_length, heads)
    tile = np.maximum(offset - PIECE_COST, 0)

    # Tile k of an item lies at item_start + PIECE_COST + k, and belongs to the share it lies in.
    item_start = position - offset
    first_cta = (item_start + PIECE_COST) // share
    last_cta = (item_start + item_length - 1) // share
    plan = np.stack((seq[:-1], head[:-1], tile[:-1], seq[1:], head[1:], tile[1:], first_cta[:-1], last_cta[1:]), axis=1)
    return plan.astype(np.int32)


def _whole_items(
    seq: npt.NDArray[np.int64],
    head: npt.NDArray[np.int64],
    offset: npt.NDArray[np.int64],
    item_length: npt.NDArray[np.int64],
    heads: int,
) -> IntArray:
    """Cuts moved to the nearest boundary between items: no split at all."""
    item = seq * heads + head + (2 * offset >= item_length) * (offset > 0)
    seq, head = item // heads, item % heads
    zero = np.zeros_like(seq[:-1])
    return np.stack((seq[:-1], head[:-1], zero, seq[1:], head[1:], zero, zero, zero), axis=1).astype(np.int32)
