"""``mjolnir.plan.build_plan`` on the device, in Triton: one launch, from lengths that never leave the GPU.

Every program reads all lengths (a few KB) and writes ROWS_PER_PROGRAM rows, each found from its position on the line
alone; nothing is shared between programs. The result equals the host builder's, element for element.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from mjolnir import plan

ROWS_PER_PROGRAM, STARTS_PER_PROGRAM = 8, 8 * 1024
"""A row compares its position with the starts of all sequences: 8 × 1024 of them take 64 registers a thread. With more
sequences a program makes fewer rows."""

INT32_MAX = tl.constexpr(plan.INT32_MAX)
FAR = tl.constexpr(2**62)
TILE, MIN_TILES = tl.constexpr(plan.PLAN_TILE), tl.constexpr(plan.MIN_TILES)
COLUMNS = tl.constexpr(plan.PLAN_COLUMNS)
DYNAMIC_ABOVE, SKEWED = tl.constexpr(plan.DYNAMIC_ABOVE), tl.constexpr(plan.SKEWED)
ALIGN_SLACK, WHOLE_SLACK = tl.constexpr(plan.ALIGN_SLACK), tl.constexpr(plan.WHOLE_SLACK)
SINGLE_TILES, PAIRED_TILES = tl.constexpr(plan.SINGLE_TILES), tl.constexpr(plan.PAIRED_TILES)
SHORT_0, SHORT_1 = (tl.constexpr(tiles) for tiles in plan.SHORT_TILES)
PAIR_0, PAIR_1 = (tl.constexpr(tiles) for tiles in plan.PAIR_TILES)
ARRIVE, WAIT, PAIRED = tl.constexpr(plan.ARRIVE), tl.constexpr(plan.WAIT), tl.constexpr(plan.PAIRED)
(_rows_0, _tenths_0), (_rows_1, _tenths_1) = plan.SHARES
ROWS_0, TENTHS_0, TENTHS_1 = tl.constexpr(_rows_0), tl.constexpr(_tenths_0), tl.constexpr(_tenths_1)


@triton.jit
def _row_start(row, share_0, share_1, start_1, row_1):
    """Where a row begins; the second segment, of other shares, begins with row_1 at start_1."""
    return tl.where(row >= row_1, start_1 + (row - row_1) * share_1, row * share_0)


@triton.jit
def _row_of(position, share_0, share_1, start_1, row_1):
    return tl.where(position >= start_1, row_1 + (position - start_1) // share_1, position // share_0)


@triton.jit
def _cut(position, total, index, live, starts, length, num_seqs, cost, HEADS: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """(seq, head, tile) of positions on the line, and where their items begin and how long they are."""
    begun = (starts[None, :] <= position[:, None]) & live[None, :]
    seq = tl.sum(begun.to(tl.int64), 1) - 1
    at_end = position >= total
    here = index[None, :] == seq[:, None]
    item_length = tl.where(at_end, 1, tl.sum(tl.where(here, length[None, :], 0), 1))
    offset = tl.where(at_end, 0, position - tl.sum(tl.where(here, starts[None, :], 0), 1))
    seq = tl.where(at_end, num_seqs, seq)
    head = offset // item_length
    offset -= head * item_length
    if MAX_SPLITS == 1:
        item = seq * HEADS + head + ((2 * offset >= item_length) & (offset > 0)).to(tl.int64)
        seq = item // HEADS
        head = item % HEADS
        tile = tl.zeros_like(offset)
    else:
        tile = tl.maximum(offset - cost, 0)
    return seq, head, tile, position - offset, item_length


@triton.jit
def _aligned(tiles, equal, short, ROWS: tl.constexpr, HEADS: tl.constexpr, NUM_CTAS: tl.constexpr):
    """The smallest share whose rows all run at once, or 0."""
    aligned = tl.zeros_like(equal)
    for slack in tl.static_range(ALIGN_SLACK + 1):
        share = tl.maximum(equal, short) + slack
        fits = tl.sum((tiles + ROWS * share - 1) // (ROWS * share), 0) * ROWS * HEADS <= NUM_CTAS
        aligned = tl.where(fits & (aligned == 0), share, aligned)
    return aligned


# Not specialised: another num_seqs or address must not compile another kernel while a CUDA graph is being captured.
@triton.jit(do_not_specialize=["num_seqs", "margin"], do_not_specialize_on_alignment=["seq_lens"])
def _build_plan(
    seq_lens,
    plan_rows,
    counters,
    num_seqs,
    margin,
    NUM_CTAS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,  # 0: no cap
    FIXED_TILES: tl.constexpr,  # 0: cuts follow from balance
    COST: tl.constexpr,  # of a piece
    BLOCK_SEQS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    index = tl.arange(0, BLOCK_SEQS)
    live = index < num_seqs
    lens = tl.maximum(tl.load(seq_lens + index, mask=live, other=0).to(tl.int64), 0)
    tiles = tl.maximum((tl.minimum(lens + margin, INT32_MAX) + (TILE - 1)) // TILE, 1)
    tiles = tl.where(live, tiles, 0)
    longest = tl.max(tiles, 0)
    skewed = longest * num_seqs >= SKEWED * tl.sum(tiles, 0)

    # aligned_share
    aligned = tl.zeros_like(longest)
    paired = tl.zeros_like(longest)
    if FIXED_TILES > 0:
        aligned += FIXED_TILES
    elif MAX_SPLITS == 0:
        equal = (tl.sum(tiles, 0) * HEADS + (NUM_CTAS - 1)) // NUM_CTAS
        short = tl.where(2 * longest > SINGLE_TILES, SHORT_1, SHORT_0)
        single = _aligned(tiles, equal, short, 1, HEADS, NUM_CTAS)
        aligned = single
        if PAIRS:
            pair = tl.where(longest > PAIRED_TILES, PAIR_1, PAIR_0)
            pairs = _aligned(tiles, equal, pair, 2, HEADS, NUM_CTAS)
            single_first = (longest <= SINGLE_TILES) & (equal <= short) & (single > 0)
            paired = ((pairs > 0) & (single_first == 0)).to(tl.int64)
            aligned = tl.where(paired > 0, pairs, single)
        shrinking = skewed & (equal >= DYNAMIC_ABOVE)
        aligned = tl.where((shrinking == 0) & (num_seqs > 0), aligned, 0)
        paired = tl.where(aligned > 0, paired, 0)
    step = tl.maximum(aligned * (1 + paired), 1)
    length = tl.where(aligned > 0, (tiles + step - 1) // step * step, tiles + COST)
    length = tl.where(live, length, 0)
    cost = tl.where(aligned > 0, 0, COST)

    # cut_line
    starts = tl.cumsum(length * HEADS, 0) - length * HEADS
    total = tl.sum(length * HEADS, 0)
    equal = (total + (NUM_CTAS - 1)) // NUM_CTAS
    share_0 = tl.where(aligned > 0, aligned, tl.maximum(equal, MIN_TILES + COST))
    share_1 = tl.zeros_like(share_0) + 1
    start_1 = tl.zeros_like(share_0) + FAR
    row_1 = tl.zeros_like(share_0) + FAR
    if MAX_SPLITS > 1:
        share_0 = tl.maximum(share_0, (longest - 2) // (MAX_SPLITS - 1) + 1)
    else:
        item = tl.maximum(longest, 1) + COST
        items = total // item
        most = (items + (NUM_CTAS - 1)) // NUM_CTAS
        even = (aligned == 0) & (num_seqs > 0) & (longest * num_seqs == tl.sum(tiles, 0))
        ends_with_items = even & ((most * NUM_CTAS - items) * longest <= WHOLE_SLACK * NUM_CTAS)
        share_0 = tl.where(ends_with_items, most * item, share_0)
        guided = (aligned == 0) & (equal >= DYNAMIC_ABOVE) & skewed
        share_0 = tl.where(guided, (total * TENTHS_0 + (10 * NUM_CTAS - 1)) // (10 * NUM_CTAS), share_0)
        share_1 = tl.where(guided, (total * TENTHS_1 + (10 * NUM_CTAS - 1)) // (10 * NUM_CTAS), share_1)
        row_1 = tl.where(guided, ROWS_0 * NUM_CTAS, row_1)
        start_1 = tl.where(guided, share_0 * (ROWS_0 * NUM_CTAS), start_1)

    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)
    begin = tl.minimum(_row_start(row, share_0, share_1, start_1, row_1), total)
    end = tl.minimum(_row_start(row + 1, share_0, share_1, start_1, row_1), total)
    end = tl.where(row == NUM_ROWS - 1, total, end)
    seq_b, head_b, tile_b, item_b, _ = _cut(
        begin, total, index, live, starts, length, num_seqs, cost, HEADS, MAX_SPLITS
    )
    seq_e, head_e, tile_e, item_e, length_e = _cut(
        end, total, index, live, starts, length, num_seqs, cost, HEADS, MAX_SPLITS
    )
    first_row = tl.zeros_like(row)
    last_row = tl.zeros_like(row)
    if MAX_SPLITS != 1:
        first_row = _row_of(item_b + cost, share_0, share_1, start_1, row_1)
        last_row = _row_of(item_e + length_e - 1, share_0, share_1, start_1, row_1)
    if FIXED_TILES > 0:
        last_row = tl.minimum(last_row, NUM_ROWS - 1)

    mask = row < NUM_ROWS
    at = plan_rows + (row + 1) * COLUMNS
    tl.store(at + 0, seq_b.to(tl.int32), mask=mask)
    tl.store(at + 1, head_b.to(tl.int32), mask=mask)
    tl.store(at + 2, tile_b.to(tl.int32), mask=mask)
    tl.store(at + 3, seq_e.to(tl.int32), mask=mask)
    tl.store(at + 4, head_e.to(tl.int32), mask=mask)
    tl.store(at + 5, tile_e.to(tl.int32), mask=mask)
    tl.store(at + 6, first_row.to(tl.int32), mask=mask)
    tl.store(at + 7, last_row.to(tl.int32), mask=mask)
    tl.store(counters + 2 * row, tl.zeros_like(row).to(tl.int32), mask=mask)
    tl.store(counters + 2 * row + 1, tl.zeros_like(row).to(tl.int32), mask=mask)
    if tl.program_id(0) == 0:
        rows_in_use = tl.where(total > 0, _row_of(total - 1, share_0, share_1, start_1, row_1) + 1, 0)
        rows_in_use = tl.minimum(rows_in_use, NUM_ROWS)
        column = tl.arange(0, COLUMNS)
        # Fixed splits may be more than CTAs; and however many they are, the order of an item's sum is one.
        mode = tl.where(paired > 0, PAIRED, tl.where((aligned > 0) & (FIXED_TILES == 0), WAIT, ARRIVE))
        header = tl.where(column == 0, rows_in_use, tl.where(column == 2, mode, 0))
        tl.store(plan_rows + column, header.to(tl.int32))


def build_plan_on_device(
    seq_lens: torch.Tensor, num_seqs: int, margin: int, shape: plan.PlanShape, out: torch.Tensor, max_num_seqs: int
) -> Callable[[torch.Tensor, int, int], None] | None:
    """Queue the launch that writes a plan.

    Args:
        seq_lens: (≥ num_seqs,) int32 on the device; below 0 counts as 0.
        num_seqs, margin: as ``build_plan``'s.
        shape: the fixed sizes.
        out: flat int32 on the device: header and rows, then two counters per row, which become 0.
        max_num_seqs: largest num_seqs; one kernel is compiled for it.

    Returns:
        What queues the next one to the same ``out``, given (seq_lens, num_seqs, margin): Triton binds and specialises
        no arguments then, nor compares its globals, 45 µs of the 48 that its part of a launch took. None under the
        interpreter.
    """
    rows_end = (1 + shape.num_rows) * plan.PLAN_COLUMNS
    block_seqs = triton.next_power_of_2(max(max_num_seqs, 16))
    block_rows = max(1, min(ROWS_PER_PROGRAM, STARTS_PER_PROGRAM // block_seqs))
    grid = (triton.cdiv(shape.num_rows, block_rows), 1, 1)
    constants = {
        "NUM_CTAS": shape.num_ctas,
        "NUM_ROWS": shape.num_rows,
        "HEADS": shape.num_kv_heads,
        "PAIRS": shape.pairs,
        "MAX_SPLITS": shape.max_splits or 0,
        "FIXED_TILES": shape.fixed_tiles,
        "COST": shape.piece_cost,
        "BLOCK_SEQS": block_seqs,
        "BLOCK_ROWS": block_rows,
    }
    largest = INT32_MAX.value  # a margin that needs int64 would compile another kernel
    compiled = _build_plan[grid](seq_lens, out, out[rows_end:], num_seqs, min(margin, largest), **constants)
    if compiled is None:
        return None
    launch, constant_values = compiled[grid], tuple(constants.values())

    def again(seq_lens: torch.Tensor, num_seqs: int, margin: int) -> None:
        rows = out.data_ptr()
        launch(seq_lens.data_ptr(), rows, rows + 4 * rows_end, num_seqs, min(margin, largest), *constant_values)

    return again
