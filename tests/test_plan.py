"""The balanced plan, walked row by row as the kernel walks it, and the merge of splits in any order of arrival.

The oracle knows nothing of how the plan is made: it goes through every row's items, one after the other, and notes
which tokens the row reads and where it leaves its results.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mjolnir.plan import (
    ALIGN_SLACK,
    DYNAMIC_ABOVE,
    MIN_SHARE,
    PIECE_COST,
    PLAN_COLUMNS,
    PLAN_TILE,
    ROWS_PER_CTA,
    SHARES,
    PlanShape,
    build_plan,
)

INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one row does for one item: tokens [begin, end) of a sequence for one KV head."""

    row: int
    seq: int
    head: int
    begin: int
    end: int  # of the live sequence where the row goes to its end
    to_the_end: bool
    slot: int | None  # where the partial result goes; None: the piece is the whole item
    first_row: int  # the rows of the item's first and last split, as this row believes
    last_row: int

    @property
    def item(self) -> tuple[int, int]:
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
            slot = 2 * row if not begins else 2 * row + 1 if stops else None
            end = min(end_tile * PLAN_TILE, lens[seq]) if stops else lens[seq]
            pieces.append(
                Piece(
                    row, seq, head, tile * PLAN_TILE, end, not stops, slot,
                    row if begins else first_row, last_row if stops else row,
                )
            )  # fmt: skip
            if stops:
                break
            seq, head = (seq, head + 1) if head + 1 < heads else (seq + 1, 0)
            tile = 0
    return pieces


def by_item(pieces: Sequence[Piece]) -> dict[tuple[int, int], list[Piece]]:
    items = collections.defaultdict(list)
    for piece in pieces:
        items[piece.item].append(piece)
    return items


def planned_tiles(lens: Sequence[int], margin: int) -> list[int]:
    """Tiles of each sequence; an empty one takes a tile's time too."""
    return [max(1, (length + margin + PLAN_TILE - 1) // PLAN_TILE) for length in lens]


def loads(plan: np.ndarray, lens: Sequence[int], heads: int, margin: int) -> list[int]:
    """Units of each row: tiles planned, and PIECE_COST for each piece."""
    units = [0] * (len(plan) - 1)
    tiles = planned_tiles(lens, margin)
    for piece in walk(plan, [n * PLAN_TILE for n in tiles], heads):
        units[piece.row] += (piece.end - piece.begin) // PLAN_TILE + PIECE_COST
    return units


def total_units(lens: Sequence[int], heads: int, margin: int) -> int:
    return sum((n + PIECE_COST) * heads for n in planned_tiles(lens, margin))


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
    return lens, PlanShape(rows, heads, draw(max_splits)), draw(st.sampled_from([0, 1, 63, 64, 1000]))


def make_plan(lens: Sequence[int], shape: PlanShape, margin: int = 0) -> np.ndarray:
    """The plan, whose header and size are looked at in passing: rows past those in use hold no work."""
    plan = build_plan(lens, shape, margin)
    assert plan.shape == (1 + ROWS_PER_CTA * shape.num_ctas, PLAN_COLUMNS) and plan.dtype == np.int32
    used, ticket, *unused = plan[0].tolist()
    assert 0 <= used <= len(plan) - 1 and ticket == 0 and not any(unused)
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


@given(cases())
@example(([8192] * 16, PlanShape(264, 8), 0))
@example(([500_000] + [1] * 1023, PlanShape(264, 8), 0))
@settings(max_examples=150)
def test_rows_exceed_their_share_by_no_more_than_a_piece(case):
    lens, shape, margin = case
    units = loads(make_plan(lens, shape, margin), lens, shape.num_kv_heads, margin)
    equal = total_units(lens, shape.num_kv_heads, margin) / shape.num_ctas
    if equal <= DYNAMIC_ABOVE - 1:
        assert max(units) <= max(equal + 1, MIN_SHARE) + ALIGN_SLACK + PIECE_COST
        assert not any(units[shape.num_ctas :])
    elif equal >= DYNAMIC_ABOVE:
        parts = [part for rows, part in SHARES for _ in range(rows * shape.num_ctas)]
        assert all(n <= part * equal + 1 + PIECE_COST for n, part in zip(units, parts, strict=True))


@given(cases())
@example(([8192] * 16, PlanShape(264, 8), 0))
@settings(max_examples=100)
def test_ctas_of_one_speed_end_within_a_small_row_of_each_other(case):
    lens, shape, margin = case
    units = loads(make_plan(lens, shape, margin), lens, shape.num_kv_heads, margin)
    equal = max(total_units(lens, shape.num_kv_heads, margin) / shape.num_ctas, MIN_SHARE)
    busy_until = [0] * shape.num_ctas
    for n in units:  # whoever is done takes the next row
        heapq.heapreplace(busy_until, busy_until[0] + n)
    smallest = SHARES[-1][1] * equal
    assert max(busy_until) <= equal + max(smallest, ALIGN_SLACK) + (1 + PIECE_COST) * ROWS_PER_CTA


@given(cases(st.just(1)))
@settings(max_examples=100)
def test_without_splits_no_row_gets_more_than_a_share_and_one_item(case):
    lens, shape, margin = case
    plan = make_plan(lens, shape, margin)
    assert not plan[1:, [2, 5, 6, 7]].any()
    assert all(piece.slot is None for piece in walk(plan, lens, shape.num_kv_heads))
    longest = max(planned_tiles(lens, margin), default=0) + PIECE_COST
    share = max(total_units(lens, shape.num_kv_heads, margin) / shape.num_ctas + 1, MIN_SHARE)
    assert max(loads(plan, lens, shape.num_kv_heads, margin)) <= share + longest


@given(cases(st.integers(2, 40)))
@example(([1_000_000], PlanShape(400, 1, 2), 0))
@settings(max_examples=150)
def test_no_item_has_more_splits_than_max_splits(case):
    lens, shape, margin = case
    items = by_item(walk(make_plan(lens, shape, margin), lens, shape.num_kv_heads))
    assert max((len(pieces) for pieces in items.values()), default=0) <= shape.max_splits


@given(cases(ANY_SPLITS))
@example(([1_000_000], PlanShape(400, 1), 0))
@settings(max_examples=150)
def test_splits_know_their_rows_and_have_slots_of_their_own(case):
    lens, shape, margin = case
    pieces = walk(make_plan(lens, shape, margin), lens, shape.num_kv_heads)
    slots = [piece.slot for piece in pieces if piece.slot is not None]
    assert len(set(slots)) == len(slots)
    for splits in by_item(pieces).values():
        if len(splits) == 1:
            assert splits[0].slot is None
            continue
        first, last = splits[0].row, splits[-1].row
        for i, piece in enumerate(splits):
            assert (piece.first_row, piece.last_row) == (first, last)
            assert piece.slot == (2 * first + 1 if i == 0 else 2 * (first + i))


def test_extreme_sizes_fit_int32():
    lens = np.full(1024, 2**20, dtype=np.int32)
    shape = PlanShape(num_ctas=264, num_kv_heads=64)
    plan = make_plan(lens, shape, margin=4096)
    assert plan.min() >= 0
    items = by_item(walk(plan, lens.tolist(), shape.num_kv_heads))
    assert len(items) == 1024 * 64
    assert all(splits[0].begin == 0 and splits[-1].to_the_end for splits in items.values())


def test_the_longest_lengths_there_are_fit_int32():
    lens = np.full(3, INT32_MAX, dtype=np.int32)  # a sum, or a margin, would not
    plan = make_plan(lens, PlanShape(400, 2), margin=1000)
    items = by_item(walk(plan, lens.tolist(), 2))
    assert len(items) == 6 and all(len(splits) >= 400 // 6 for splits in items.values())
    assert plan.min() >= 0 and plan[1:, [2, 5]].max() <= (INT32_MAX + 1000) // PLAN_TILE


@pytest.mark.parametrize(
    "as_input", [list, tuple, np.array, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)]
)
def test_lengths_come_in_any_form(as_input):
    lens = [5, 0, 20_000]
    expected = make_plan(lens, PlanShape(16, 2), 3)
    np.testing.assert_array_equal(make_plan(as_input(lens), PlanShape(16, 2), 3), expected)


def test_a_plan_worked_out_by_hand():
    # Two items of 10 tiles and one of 1: 11 + 11 + 2 units in four shares of 6, so cuts at 6, 12 and 18. That at 12
    # falls on the second item's piece cost, which is before its first tile.
    plan = build_plan([640, 640, 1], PlanShape(num_ctas=4, num_kv_heads=1))
    assert plan[0, 0] == 4
    assert plan[1:5, :6].tolist() == [
        [0, 0, 0, 0, 0, 5],
        [0, 0, 5, 1, 0, 0],
        [1, 0, 0, 1, 0, 6],
        [1, 0, 6, 3, 0, 0],
    ]
    seams = [(piece.seq, piece.slot, piece.first_row, piece.last_row) for piece in walk(plan, [640, 640, 1], 1)]
    assert seams == [(0, 1, 0, 1), (0, 2, 0, 1), (1, 5, 2, 3), (1, 6, 2, 3), (2, None, 3, 3)]


# The merge of splits: kernels/split.py in NumPy, for one element of O; rows arrive in any order.

ONE_STEP_SPLITS, TEAM, BIG_TEAM, BIG_TEAM_ABOVE = 40, 16, 32, 256  # as in the kernel, which imports the DSL


@dataclasses.dataclass
class Device:
    """What rows share: partial results (m, l, o) by slot, two counters a row, and the results."""

    partials: dict[int, tuple[float, float, float]]
    counters: np.ndarray
    results: dict[tuple[int, int], float] = dataclasses.field(default_factory=dict)

    def arrive(self, counter: int, expected: int) -> bool:
        """atom.inc with the wrap at expected − 1."""
        old = int(self.counters[counter])
        self.counters[counter] = 0 if old >= expected - 1 else old + 1
        return old == expected - 1

    def merge(self, slots: Sequence[int]) -> tuple[float, float, float]:
        """Each partial is consumed: a second reader would find it gone."""
        parts = [self.partials.pop(slot) for slot in slots]
        top = max(m for m, _, _ in parts)
        weights = [2.0 ** (m - top) if m > -np.inf else 0.0 for m, _, _ in parts]
        l, o = (sum(w * part[i] for w, part in zip(weights, parts, strict=True)) for i in (1, 2))
        return top, l, o

    def arrive_and_merge(self, item: tuple[int, int], row: int, begin: int, final: int) -> None:
        splits = final - begin + 1
        team_size = splits if splits <= ONE_STEP_SPLITS else TEAM if splits <= BIG_TEAM_ABOVE else BIG_TEAM
        teams = -(-splits // team_size)
        team = (row - begin) // team_size
        leader = begin + team * team_size
        members = min(splits - team * team_size, team_size)
        own = 2 * leader + 1 if team == 0 else 2 * leader
        # A team of one has its result already, and must not count: its row may lead a team of the next item too.
        if members > 1:
            if not self.arrive(2 * leader, members):
                return
            merged = self.merge([own, *(2 * (leader + i) for i in range(1, members))])
            self.partials[own] = merged
        if teams > 1 and not self.arrive(2 * begin + 1, teams):
            return
        merged = self.merge([2 * begin + 1, *(2 * (begin + i * team_size) for i in range(1, teams))])
        assert item not in self.results, "merged twice"
        _, l, o = merged
        self.results[item] = o / l if l > 0 else 0.0


@given(
    st.lists(st.sampled_from([0, 10, 5_000, 60_000, 130_000, 400_000]), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 400),
    st.randoms(use_true_random=False),
)
@settings(max_examples=150)
def test_merge_takes_each_partial_once_in_any_order_of_arrival(lens, heads, rows, rng):
    plan = make_plan(lens, PlanShape(rows, heads))
    check_merge(plan, lens, heads, rng)


@pytest.mark.parametrize("splits", [2, 40, 41, 48, 49, 64, 65, 81, 256, 257, 289])
def test_merge_of_neighbours_that_share_a_row(splits):
    """Items of just so many splits: the row at a seam may lead the last team of one and the first of the next."""
    row_tiles, items = 4, 5
    tiles = splits * row_tiles - row_tiles // 2  # every other seam falls into the middle of a row
    plan = [[-(-items * tiles // row_tiles)] + [0] * 7]
    for begin in range(0, items * tiles, row_tiles):
        (first, first_tile), (end, end_tile) = (
            divmod(min(at, items * tiles), tiles) for at in (begin, begin + row_tiles)
        )
        first_row, last_row = first * tiles // row_tiles, ((end + 1) * tiles - 1) // row_tiles
        plan.append([first, 0, first_tile, end, 0, end_tile, first_row, last_row])
    lens = [tiles * PLAN_TILE] * items
    assert {len(pieces) for pieces in by_item(walk(np.array(plan), lens, 1)).values()} == {splits}
    for seed in range(20):
        check_merge(np.array(plan), lens, 1, random.Random(seed))


def check_merge(plan: np.ndarray, lens: Sequence[int], heads: int, rng: random.Random) -> None:
    pieces = walk(plan, lens, heads)
    values = np.random.default_rng(rng.getrandbits(32))
    device = Device(partials={}, counters=np.zeros(2 * len(plan), dtype=np.int64))
    ends = collections.defaultdict(list)  # each row's calls, in its order
    expected = {}
    for item, splits in by_item(pieces).items():
        if splits[0].slot is None:
            continue
        # One value per split, some without any key, weighed by 2^m · l.
        parts = []
        for piece in splits:
            has_keys = values.random() < 0.8
            part = (values.uniform(-30, 30), values.uniform(1, 100), values.normal())
            parts.append(part if has_keys else (-np.inf, 0.0, 0.0))
            ends[piece.row].append((piece, parts[-1]))
        scale = np.exp2([m for m, _, _ in parts])
        total = float(np.dot(scale, [l for _, l, _ in parts]))
        expected[item] = float(np.dot(scale, [o for _, _, o in parts])) / total if total > 0 else 0.0
    # Any interleaving that keeps each row's own order: its first item, then its last.
    order = [row for row, calls in ends.items() for _ in calls]
    rng.shuffle(order)
    for row in order:
        piece, part = ends[row].pop(0)
        device.partials[piece.slot] = part  # no earlier: whoever merges before it arrives does not find it
        device.arrive_and_merge(piece.item, row, piece.first_row, piece.last_row)
    assert device.results.keys() == expected.keys(), "an item was never finished"
    for item, value in expected.items():
        assert device.results[item] == pytest.approx(value, rel=1e-9, abs=1e-12)
    assert not device.partials, "a partial result was left out"
    assert not device.counters.any(), "a counter did not return to zero"


def test_merge_constants_are_the_kernel_s():
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
    from mjolnir.kernels import split

    ours = (ONE_STEP_SPLITS, TEAM, BIG_TEAM, BIG_TEAM_ABOVE)
    assert (split.ONE_STEP_SPLITS, split.TEAM, split.BIG_TEAM, split.BIG_TEAM_ABOVE) == ours
