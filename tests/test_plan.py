"""The balanced plan, walked row by row as the kernel walks it: what rows cover, how long they are, what they know."""

from __future__ import annotations

import collections
import dataclasses
import fractions
import heapq
import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plan_walk import by_item, walk

from mjolnir.plan import (
    ALIGN_SLACK,
    ARRIVE,
    DYNAMIC_ABOVE,
    MIN_TILES,
    PAIR_TILES,
    PAIRED,
    PAIRED_TILES,
    PIECE_COSTS,
    PLAN_COLUMNS,
    PLAN_TILE,
    ROWS_PER_CTA,
    SHARES,
    SHORT_TILES,
    SINGLE_TILES,
    SKEWED,
    WAIT,
    WHOLE_SLACK,
    PlanShape,
    build_plan,
    fixed_rows,
)

INT32_MAX = 2**31 - 1


def planned_tiles(lens: Sequence[int], margin: int) -> list[int]:
    """Tiles of each sequence; an empty one takes a tile's time too."""
    return [max(1, (int(length) + margin + PLAN_TILE - 1) // PLAN_TILE) for length in lens]


def loads(plan: np.ndarray, lens: Sequence[int], shape: PlanShape, margin: int) -> list[int]:
    """Units of each row: tiles planned, and the cost of each piece."""
    units = [0] * (len(plan) - 1)
    tiles = planned_tiles(lens, margin)
    for piece in walk(plan, [n * PLAN_TILE for n in tiles], shape.num_kv_heads):
        units[piece.row] += max(0, piece.end - piece.begin) // PLAN_TILE + shape.piece_cost
    return units


def total_units(lens: Sequence[int], shape: PlanShape, margin: int) -> int:
    return sum((n + shape.piece_cost) * shape.num_kv_heads for n in planned_tiles(lens, margin))


SHORT = st.integers(0, 4 * PLAN_TILE)
LENGTH = st.one_of(
    SHORT, st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129]), st.integers(0, 20_000), st.integers(100_000, 1_000_000)
)
LENGTHS = st.one_of(
    st.lists(LENGTH, max_size=40),
    st.lists(SHORT, min_size=200, max_size=1024),
    st.builds(lambda n, length: [length] * n, st.integers(1, 256), LENGTH),  # a batch of equals
    st.builds(lambda n, length: [length] + [1] * n, st.integers(0, 1023), LENGTH),  # one long beside many short
)

UNCAPPED = st.none()
ANY_SPLITS = st.sampled_from([None, 1, 2, 3, 7, 64])


@st.composite
def cases(draw: st.DrawFn, max_splits: st.SearchStrategy[int | None] = UNCAPPED) -> tuple[list[int], PlanShape, int]:
    """(lengths, shape, margin), of at most some ten thousand items: the oracle walks them one by one."""
    lens = draw(LENGTHS)
    heads = draw(st.integers(1, max(1, min(64, 8192 // max(1, len(lens))))))
    rows = draw(st.integers(1, 400))
    cost = draw(st.sampled_from(sorted(set(PIECE_COSTS.values()))))
    shape = PlanShape(rows, heads, draw(max_splits), pairs=draw(st.booleans()), piece_cost=cost)
    return lens, shape, draw(st.sampled_from([0, 1, 63, 64, 1000]))


def make_plan(lens: Sequence[int], shape: PlanShape, margin: int = 0) -> np.ndarray:
    """The plan, whose header and size are looked at in passing: rows past those in use hold no work."""
    plan = build_plan(lens, shape, margin)
    assert plan.shape == (1 + ROWS_PER_CTA * shape.num_ctas, PLAN_COLUMNS) and plan.dtype == np.int32
    used, ticket, mode, *unused = plan[0].tolist()
    assert 0 <= used <= len(plan) - 1 and ticket == 0 and not any(unused)
    aligned = aligned_rows(lens, shape, margin)
    assert mode == (ARRIVE if aligned is None else (WAIT, PAIRED)[aligned[1] - 1])
    assert (plan[1 + used :, 0:3] == plan[1 + used :, 3:6]).all()
    return plan


@given(cases(ANY_SPLITS), st.randoms(use_true_random=False))
@example(([], PlanShape(132, 8), 0), random.Random(0))
@example(([0], PlanShape(264, 1), 0), random.Random(0))
@example(([0] * 1024, PlanShape(264, 8), 0), random.Random(0))
@example(([500_000] + [1] * 1023, PlanShape(264, 8), 0), random.Random(0))
@settings(max_examples=150)
def test_every_token_of_every_item_is_covered_once_whatever_the_live_lengths(case, rng):
    lens, shape, margin = case
    plan = make_plan(lens, shape, margin)
    stale = [max(0, length + rng.choice([-length, -70, -1, 1, 64, 5000])) for length in lens]
    for live in (lens, [length + margin for length in lens], stale):
        items = by_item(walk(plan, live, shape.num_kv_heads))
        assert items.keys() == {(seq, head) for seq in range(len(lens)) for head in range(shape.num_kv_heads)}
        for (seq, _), pieces in items.items():
            # Only the last one goes to the end: rows that follow each other read tokens that follow each other.
            assert [piece.to_the_end for piece in pieces] == [False] * (len(pieces) - 1) + [True]
            assert pieces[0].begin == 0
            for piece, following in zip(pieces, pieces[1:], strict=False):
                assert following.row == piece.row + 1
                assert piece.begin < following.begin
                assert piece.end == min(following.begin, live[seq])
            assert pieces[-1].end == live[seq]


def equal_share(lens: Sequence[int], shape: PlanShape, margin: int) -> int:
    return -(-total_units(lens, shape, margin) // shape.num_ctas)


def shrinking(lens: Sequence[int], shape: PlanShape, margin: int) -> bool:
    """Whether rows get smaller towards the end of a line that is cut anywhere."""
    tiles = planned_tiles(lens, margin)
    skewed = bool(tiles) and max(tiles) >= SKEWED * sum(tiles) / len(tiles)
    return skewed and equal_share(lens, shape, margin) >= DYNAMIC_ABOVE


def whole_items(lens: Sequence[int], shape: PlanShape, margin: int) -> bool:
    """Whether items are of one length and, dealt out whole, leave no CTA much more than an equal share."""
    tiles, items = planned_tiles(lens, margin), len(lens) * shape.num_kv_heads
    if len(set(tiles)) != 1 or shape.max_splits not in (None, 1) or aligned_rows(lens, shape, margin) is not None:
        return False
    share = fractions.Fraction(items * tiles[0], shape.num_ctas)
    return any(0 <= n * tiles[0] - share <= WHOLE_SLACK for n in range(1, items + 1))


def aligned_rows(lens: Sequence[int], shape: PlanShape, margin: int) -> tuple[int, int] | None:
    """(tiles per row, rows per split) where all items can take whole rows, and every CTA has one at most."""
    items = [n for n in planned_tiles(lens, margin) for _ in range(shape.num_kv_heads)]
    if shape.max_splits is not None or not items:
        return None
    longest, count = max(items), collections.Counter(items)
    if sum(items) > (DYNAMIC_ABOVE - 1) * shape.num_ctas and longest >= SKEWED * sum(items) / len(items):
        return None
    few = SINGLE_TILES // SHORT_TILES[-1]  # rows of a short item
    pair = PAIR_TILES[0] if longest in range(1, PAIRED_TILES + 1) else PAIR_TILES[1]
    least = {1: next((n for n in SHORT_TILES if few * n >= longest), SHORT_TILES[-1]), 2: pair}
    latency_decides = longest <= SINGLE_TILES and sum(items) <= least[1] * shape.num_ctas
    for rows in [1, 2] if latency_decides else [2, 1]:
        if rows == 2 and not shape.pairs:
            continue
        fewest = max(math.ceil(sum(items) / shape.num_ctas), least[rows])
        for share in itertools.islice(itertools.count(fewest), 1 + ALIGN_SLACK):
            if sum(len(range(0, n, rows * share)) * rows * of for n, of in count.items()) <= shape.num_ctas:
                return share, rows
    return None


LONG_STEPS = (
    ([8192] * 48, PlanShape(264, 8), 0),
    ([2_000_000], PlanShape(264, 1), 0),
    ([1_900_000] + [1] * 1023, PlanShape(264, 8), 63),
    ([100_000] + [8192] * 40, PlanShape(264, 8), 0),
)


@given(cases())
@example(LONG_STEPS[0])
@example(LONG_STEPS[1])
@example(LONG_STEPS[2])
@example(LONG_STEPS[3])
@example(([8192] * 16, PlanShape(264, 8), 0))
@settings(max_examples=200)
def test_rows_exceed_their_share_by_no_more_than_a_piece_s_cost(case):
    lens, shape, margin = case
    plan = make_plan(lens, shape, margin)
    units = loads(plan, lens, shape, margin)
    equal = equal_share(lens, shape, margin)
    aligned = aligned_rows(lens, shape, margin)
    if aligned is not None:  # a piece a row
        rows = [piece.row for piece in walk(plan, lens, shape.num_kv_heads)]
        assert rows == list(range(plan[0, 0])) and len(rows) <= shape.num_ctas
        assert max(units) <= aligned[0] + shape.piece_cost
    elif whole_items(lens, shape, margin):
        assert plan[0, 0] <= shape.num_ctas and not plan[1:, [2, 5]].any()
        tiles = planned_tiles(lens, margin)[0]
        pieces = -(-len(lens) * shape.num_kv_heads // shape.num_ctas)
        assert max(units) == pieces * (tiles + shape.piece_cost)
        assert pieces * tiles <= len(lens) * shape.num_kv_heads * tiles / shape.num_ctas + WHOLE_SLACK
    elif not shrinking(lens, shape, margin):
        assert plan[0, 0] <= shape.num_ctas
        assert max(units) <= max(equal, MIN_TILES + shape.piece_cost) + shape.piece_cost
    else:
        tenth = total_units(lens, shape, margin) / (10 * shape.num_ctas)
        shares = [tenths * tenth for rows, tenths in SHARES for _ in range(rows * shape.num_ctas)]
        assert all(n < share + 1 + shape.piece_cost for n, share in zip(units, shares, strict=True))


@pytest.mark.parametrize(
    ("tiles", "heads", "mode", "rows", "most_tiles"),
    [
        # Too little work for 264 CTAs, and no item of more than 32 tiles: at most 8 rows each, of 2 or 4 tiles.
        ([1] * 64, 4, WAIT, 256, 1),
        ([16] * 2, 8, WAIT, 2 * 8 * 8, 2),
        ([17] * 2, 8, WAIT, 2 * 8 * 5, 4),
        ([32] * 2, 8, WAIT, 2 * 8 * 8, 4),
        ([32, 1], 1, WAIT, 9, 4),
        # Longer ones: pairs of 2 tiles a row, or more where those are too many.
        ([33] * 2, 8, PAIRED, 2 * 8 * 2 * 6, 3),
        ([64], 8, PAIRED, 8 * 2 * 16, 2),
        ([65], 8, PAIRED, 8 * 2 * 11, 3),
        ([33, 1], 1, PAIRED, 2 * 9 + 2, 2),
        ([128], 1, PAIRED, 2 * 32, 2),
        # Above 128 tiles pairs of 4.
        ([129], 1, PAIRED, 2 * 17, 4),
        ([1056], 1, PAIRED, 264, 4),
        ([1057], 1, PAIRED, 2 * 106, 5),
        # An equal share is 4.8, 15.5 and 31.0 tiles: all items take whole pairs.
        ([32] * 40, 1, PAIRED, 40 * 2 * 3, 6),
        ([128] * 4, 8, PAIRED, 4 * 8 * 2 * 4, 16),
        ([128] * 8, 8, PAIRED, 8 * 8 * 2 * 2, 32),
        # Where a pair would be too much for an item, one row.
        ([80] * 33, 8, WAIT, 264, 80),
        # An equal share is 74.2 tiles, and no row up to 3 longer holds all of an item's 80: cuts fall anywhere.
        ([80] * 245, 1, ARRIVE, 261, 77),
        # More items than CTAs: two in a row.
        ([1] * 300, 1, ARRIVE, 150, 1),
    ],
)
def test_rows_of_short_steps(tiles, heads, mode, rows, most_tiles):
    lens = [n * PLAN_TILE for n in tiles]
    plan = make_plan(lens, PlanShape(264, heads))
    assert plan[0].tolist() == [rows, 0, mode, 0, 0, 0, 0, 0]
    assert max(piece.end - piece.begin for piece in walk(plan, lens, heads)) == most_tiles * PLAN_TILE


@pytest.mark.parametrize(
    ("tiles", "heads", "rows", "most_tiles"),
    [([32], 8, 8 * 8, 4), ([33], 8, 8 * 9, 4), ([128], 1, 32, 4), ([128] * 4, 8, 4 * 8 * 8, 16)],
)
def test_rows_of_short_steps_where_ctas_are_no_halves(tiles, heads, rows, most_tiles):
    lens = [n * PLAN_TILE for n in tiles]
    plan = make_plan(lens, PlanShape(264, heads, pairs=False))
    assert plan[0].tolist() == [rows, 0, WAIT, 0, 0, 0, 0, 0]
    assert max(piece.end - piece.begin for piece in walk(plan, lens, heads)) == most_tiles * PLAN_TILE


WAITING = st.one_of(
    st.lists(st.integers(0, 5000), min_size=1, max_size=12),
    st.builds(lambda n, length: [length] * n, st.integers(1, 16), st.integers(1, 30_000)),
)


@given(WAITING, st.integers(1, 4), st.sampled_from([8, 132, 264]), st.sampled_from([0, 100]))
@example([8192] * 4, 4, 264, 0)
@settings(max_examples=150)
def test_where_rows_wait_or_are_pairs_all_run_at_once(lens, heads, num_ctas, margin):
    """A row has one piece, so it waits at its very end; a pair is a split, so it has one item."""
    plan = make_plan(lens, PlanShape(num_ctas, heads), margin)
    used, _, mode = plan[0, :3].tolist()
    if mode == ARRIVE:
        return
    assert used <= num_ctas
    pieces = walk(plan, lens, heads)
    assert [piece.row for piece in pieces] == list(range(used))
    assert all(piece.first_row <= piece.row <= piece.last_row for piece in pieces)
    if mode == PAIRED:
        assert used % 2 == 0
        for one, other in zip(pieces[::2], pieces[1::2], strict=True):
            assert (one.item, one.first_row, one.last_row) == (other.item, other.first_row, other.last_row)
            assert one.first_row % 2 == 0 and one.last_row % 2 == 1


@given(cases(), st.lists(st.integers(14, 18), min_size=1, max_size=18))
@example(LONG_STEPS[2], [18, 16, 16, 14])
@example(LONG_STEPS[3], [14, 16, 18])
@settings(max_examples=150)
def test_ctas_of_unequal_speed_end_within_a_small_row_of_the_ideal(case, gpc_sizes):
    """An SM's bandwidth goes down with the number of SMs that share it."""
    lens, shape, margin = case
    if aligned_rows(lens, shape, margin) or not shrinking(lens, shape, margin):
        return  # a row each
    units = loads(make_plan(lens, shape, margin), lens, shape, margin)
    speeds = [1 / gpc_sizes[cta % len(gpc_sizes)] for cta in range(shape.num_ctas)]
    busy_until = [(0.0, speed) for speed in speeds]
    for n in units:  # whoever is done takes the next row
        now, speed = busy_until[0]
        heapq.heapreplace(busy_until, (now + n / speed, speed))
    smallest = SHARES[-1][1] / 10 * equal_share(lens, shape, margin) + 1 + shape.piece_cost
    assert max(busy_until)[0] <= sum(units) / sum(speeds) + smallest / min(speeds)


@given(cases(st.just(1)))
@settings(max_examples=100)
def test_without_splits_no_row_gets_more_than_a_share_and_one_item(case):
    lens, shape, margin = case
    plan = make_plan(lens, shape, margin)
    assert not plan[1:, [2, 5, 6, 7]].any()
    assert all(piece.first_row == piece.last_row for piece in walk(plan, lens, shape.num_kv_heads))
    longest = max(planned_tiles(lens, margin), default=0) + shape.piece_cost
    share = max(total_units(lens, shape, margin) / shape.num_ctas + 1, MIN_TILES + shape.piece_cost)
    assert max(loads(plan, lens, shape, margin)) <= share + longest


@given(cases(st.integers(2, 40)))
@example(([1_000_000], PlanShape(400, 1, 2), 0))
@settings(max_examples=150)
def test_no_item_has_more_splits_than_max_splits(case):
    lens, shape, margin = case
    plan = make_plan(lens, shape, margin)
    items = by_item(walk(plan, lens, shape.num_kv_heads))
    assert max((len(pieces) for pieces in items.values()), default=0) <= shape.max_splits
    # Rows are no longer for it than they must: the first holds a tile of an item, max_splits - 1 more its others.
    others = max(planned_tiles(lens, margin), default=1) - 1
    share = max(equal_share(lens, shape, margin), MIN_TILES + shape.piece_cost, -(-others // (shape.max_splits - 1)))
    assert max(loads(plan, lens, shape, margin)) <= share + shape.piece_cost


@given(cases(ANY_SPLITS))
@example(([1_000_000], PlanShape(400, 1), 0))
@settings(max_examples=150)
def test_splits_know_the_rows_of_their_item(case):
    lens, shape, margin = case
    pieces = walk(make_plan(lens, shape, margin), lens, shape.num_kv_heads)
    for splits in by_item(pieces).values():
        rows = [piece.row for piece in splits]
        assert rows == list(range(rows[0], rows[-1] + 1))
        assert all((piece.first_row, piece.last_row) == (rows[0], rows[-1]) for piece in splits)


# Fixed splits


@st.composite
def fixed_cases(draw: st.DrawFn) -> tuple[list[int], PlanShape, int]:
    """(lengths, shape, margin) whose rows suffice, sometimes exactly."""
    lens = draw(LENGTHS)
    heads = draw(st.integers(1, max(1, min(8, 4096 // max(1, len(lens))))))
    margin = draw(st.sampled_from([0, 1, 63, 64, 1000]))
    tiles = draw(st.sampled_from([1, 2, 5, 32])) if max(lens, default=0) < 10_000 else draw(st.sampled_from([32, 64]))
    tokens = sum(lens) + margin * len(lens) + draw(st.sampled_from([0, 0, 1, 10_000]))
    rows = fixed_rows(len(lens) + draw(st.integers(0, 2)), tokens, tiles * PLAN_TILE, heads)
    return lens, PlanShape(draw(st.integers(1, 300)), heads, fixed_tiles=tiles, fixed_rows=rows), margin


def splits_of(lens: Sequence[int], shape: PlanShape, margin: int = 0) -> dict:
    """Per item, the tokens of its splits; its rows follow each other, and each is that split alone."""
    plan = build_plan(lens, shape, margin)
    pieces = walk(plan, lens, shape.num_kv_heads)
    assert len({piece.row for piece in pieces}) == len(pieces) == plan[0, 0]
    assert plan[0, 2] == ARRIVE  # there may be more rows than CTAs
    items = by_item(pieces)
    for splits in items.values():
        rows = [piece.row for piece in splits]
        assert rows == list(range(rows[0], rows[0] + len(rows)))
        if len(splits) > 1:
            assert all((piece.first_row, piece.last_row) == (rows[0], rows[-1]) for piece in splits)
    return {item: [(piece.begin, piece.end, piece.to_the_end) for piece in splits] for item, splits in items.items()}


@given(fixed_cases(), st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_fixed_splits_of_a_sequence_follow_from_it_alone(case, rng):
    lens, shape, margin = case
    together = splits_of(lens, shape, margin)
    assert together.keys() == {(seq, head) for seq in range(len(lens)) for head in range(shape.num_kv_heads)}
    split = shape.fixed_tiles * PLAN_TILE
    for (seq, _), splits in together.items():
        count = max(1, math.ceil((lens[seq] + margin) / split))
        ends = [min((i + 1) * split, lens[seq]) for i in range(count - 1)] + [lens[seq]]
        assert splits == [(i * split, end, i == count - 1) for i, end in enumerate(ends)]
    order = list(range(len(lens)))
    rng.shuffle(order)
    shuffled = splits_of([lens[seq] for seq in order], shape, margin)
    assert all(shuffled[place, head] == together[seq, head] for place, seq in enumerate(order)
               for head in range(shape.num_kv_heads))  # fmt: skip
    if lens:
        seq = rng.randrange(len(lens))
        alone = splits_of([lens[seq]], PlanShape(7, shape.num_kv_heads, fixed_tiles=shape.fixed_tiles,
                          fixed_rows=fixed_rows(1, lens[seq] + margin, split, shape.num_kv_heads)), margin)  # fmt: skip
        assert alone[0, 0] == together[seq, 0]


@given(fixed_cases(), st.integers(0, 40))
@settings(max_examples=60)
def test_what_fixed_rows_do_not_hold_is_still_covered_once(case, rows):
    lens, shape, margin = case
    shape = dataclasses.replace(shape, num_ctas=1 + rows // 4, fixed_rows=rows)
    plan = build_plan(lens, shape, margin)
    assert len(plan) - 1 == shape.num_rows >= plan[0, 0]
    items = by_item(walk(plan, lens, shape.num_kv_heads))
    assert items.keys() == {(seq, head) for seq in range(len(lens)) for head in range(shape.num_kv_heads)}
    for (seq, _), splits in items.items():
        assert splits[0].begin == 0 and splits[-1].end == lens[seq] and splits[-1].to_the_end
        for piece, following in zip(splits, splits[1:], strict=False):
            assert following.row == piece.row + 1 and piece.end == min(following.begin, lens[seq])
        assert all((s.first_row, s.last_row) == (splits[0].row, splits[-1].row) for s in splits if len(splits) > 1)


def test_extreme_sizes_fit_int32():
    lens = np.full(1024, 2**20, dtype=np.int32)
    shape = PlanShape(num_ctas=264, num_kv_heads=64)
    plan = make_plan(lens, shape, margin=4096)
    assert plan.min() >= 0
    items = by_item(walk(plan, lens.tolist(), shape.num_kv_heads))
    assert len(items) == 1024 * 64
    assert all(splits[0].begin == 0 and splits[-1].to_the_end for splits in items.values())


def test_lengths_past_int32_are_planned_as_the_longest_there_are():
    """The kernel takes tiles to tokens in int32; sequences on the device are no longer than that."""
    shape = PlanShape(400, 2)
    plan = make_plan(np.full(3, INT32_MAX, dtype=np.int32), shape, margin=1000)  # a sum in int32 would overflow
    items = by_item(walk(plan, [INT32_MAX] * 3, 2))
    assert len(items) == 6 and all(len(splits) >= 400 // 6 for splits in items.values())
    assert plan.min() >= 0 and plan[1:, [2, 5]].max() * PLAN_TILE <= INT32_MAX
    np.testing.assert_array_equal(plan, make_plan([2**40] * 3, shape))
    np.testing.assert_array_equal(plan, make_plan([5, 6, 7], shape, margin=2**40))


def test_more_fixed_splits_than_int32_counts() -> None:
    """The last row takes what the others leave over."""
    shape = PlanShape(8, 64, fixed_tiles=1, fixed_rows=1000)
    plan = build_plan([INT32_MAX] * 3, shape)
    assert plan[0, 0] == plan.max() == 1000 and plan.min() == 0
    assert (plan[1:, 7] == 999).all() and (plan[1:, 6] == 0).all()
    assert plan[1:-1, 2].tolist() == list(range(999)) and plan[1000].tolist() == [0, 0, 999, 3, 0, 0, 0, 999]


@pytest.mark.parametrize(
    "as_input", [list, tuple, np.array, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)]
)
def test_lengths_come_in_any_form(as_input):
    lens = [5, 0, 20_000]
    expected = make_plan(lens, PlanShape(16, 2), 3)
    np.testing.assert_array_equal(make_plan(as_input(lens), PlanShape(16, 2), 3), expected)


def test_a_plan_worked_out_by_hand():
    # Items of 11, 10 and 1 tiles: 13 + 12 + 3 units in four shares of 7, so cuts at 7, 14 and 21. That at 14 falls
    # into the second item's piece cost, which is before its first tile.
    lens = [704, 640, 1]
    plan = build_plan(lens, PlanShape(num_ctas=4, num_kv_heads=1))
    assert plan[0, 0] == 4
    assert plan[1:5, :6].tolist() == [
        [0, 0, 0, 0, 0, 5],
        [0, 0, 5, 1, 0, 0],
        [1, 0, 0, 1, 0, 6],
        [1, 0, 6, 3, 0, 0],
    ]
    seams = [(piece.seq, piece.first_row, piece.last_row) for piece in walk(plan, lens, 1)]
    assert seams == [(0, 0, 1), (0, 0, 1), (1, 2, 3), (1, 2, 3), (2, 3, 3)]


def test_a_plan_of_pairs_worked_out_by_hand():
    # 37 tiles on 12 CTAs: an equal share is 4 tiles, as many as a row of a pair has at least. 34 tiles take 5 pairs of
    # 8, and 3 tiles one. The last row of each begins past its item's end: it has a part in the merge, and no token.
    lens = [34 * PLAN_TILE, 3 * PLAN_TILE - 1]
    plan = build_plan(lens, PlanShape(num_ctas=12, num_kv_heads=1))
    assert plan[0].tolist() == [12, 0, PAIRED, 0, 0, 0, 0, 0]
    assert plan[1:13, :6].tolist() == [
        *([0, 0, 4 * i, 0, 0, 4 * i + 4] for i in range(9)),
        [0, 0, 36, 1, 0, 0],
        [1, 0, 0, 1, 0, 4],
        [1, 0, 4, 2, 0, 0],
    ]
    seams = [(piece.seq, piece.first_row, piece.last_row) for piece in walk(plan, lens, 1)]
    assert seams == [(0, 0, 9)] * 10 + [(1, 10, 11)] * 2
