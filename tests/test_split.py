"""The merge of splits in any order of arrival.

What runs is the text of kernels/split.py itself, on the host: the two methods use nothing of the CuTe DSL that plain
Python does not have, but names. Rows are interleaved at random, and every slot and counter is watched.
"""

from __future__ import annotations

import ast
import collections
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_walk import Item, Piece, by_item, walk

import mjolnir
from mjolnir.kernels import geometry
from mjolnir.kernels.geometry import BIG_TEAM, BIG_TEAM_ABOVE, LOADS_IN_FLIGHT, ONE_STEP_SPLITS, TEAM
from mjolnir.plan import PLAN_TILE, PlanShape, build_plan, fixed_rows

MULT = 0.5  # of every row: base-2 score per unit of raw S


class Loads:
    """Every ``ptx.ldg_*``: what its address gives."""

    def __getattr__(self, name: str) -> Any:
        assert name.startswith("ldg_")
        return lambda address: address()


def split_source(*names: str) -> list[Any]:
    """Methods of SplitMerge as functions of plain Python, in which ``ptx.ldg_*`` take the addresses of a Device."""
    source = Path(mjolnir.__file__).parent / "kernels" / "split.py"
    methods = {node.name: node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.FunctionDef)}
    for name in names:
        methods[name].decorator_list = []
    module = ast.Module([methods[name] for name in names], type_ignores=[])
    namespace: dict[str, Any] = {
        **{name: getattr(geometry, name) for name in dir(geometry) if name.isupper()},
        "Int32": int,
        "Int64": int,
        "Float32": float,
        "NEG_INF": -math.inf,
        "weight_of": lambda m, top, mult: 2.0 ** ((m - top) * mult),
        "cutlass": SimpleNamespace(min=min, max=max, range=lambda *args, unroll: range(*args), range_constexpr=range),
        "cute": SimpleNamespace(make_rmem_tensor=lambda shape, _: np.zeros(shape), arch=SimpleNamespace(fmax=max)),
        "ptx": Loads(),
    }
    exec(compile(module, str(source), "exec"), namespace)
    return [namespace[name] for name in names]


Part = tuple[float, float, list[float]]
"""(m, l, O) of a split, or of an item."""

arrive_and_merge, merge = split_source("arrive_and_merge", "merge")


class Device:
    """What rows share: partial results (m, l, mult, O) by slot, two counters a row, and the results."""

    def __init__(self, num_rows: int):
        self.partials: dict[int, tuple[Item, float, float, float, list[float]]] = {}
        self.counters = [0] * (2 * num_rows)
        self.results: dict[Item, Part] = {}

    def store(self, slot: int, item: Item, m: float, l: float, mult: float, o: Sequence[float]) -> None:
        assert 0 <= slot < len(self.counters), "two slots a row"
        assert slot not in self.partials, "a live partial result is overwritten"
        self.partials[slot] = (item, m, l, mult, list(o))


class Merge:
    """Stands for ``SplitMerge`` of one item, with one q row and one thread."""

    args = SimpleNamespace(counters=0)  # counters are 4 bytes each, from address 0
    first_row, live_rows, row_step = 0, 1, 1

    def __init__(self, device: Device, item: Item):
        self.device, self.item = device, item
        self.read: set[int] = set()

    def arrive(self, address: int, expected: int) -> int:
        """atom.inc, with the wrap at expected − 1."""
        counter, rest = divmod(address, 4)
        assert rest == 0
        old = self.device.counters[counter]
        self.device.counters[counter] = 0 if old >= expected - 1 else old + 1
        return int(old == expected - 1)

    def merge(self, count: int, *slots: int) -> None:
        self.read = set()
        merge(self, count, *slots)
        assert len(self.read) == count

    def v_factor(self) -> float:
        return 1.0

    def partial(self, slot: int) -> tuple[Any, ...]:
        self.read.add(slot)
        assert slot in self.device.partials, "not there yet, or consumed before"
        item, *values = self.device.partials[slot]
        assert item == self.item, "another item's partial result"
        return tuple(values)

    def stats_address(self, slot: int, row: int) -> Any:
        return lambda: self.partial(slot)[:3]

    def values_address(self, slot: int, row: int) -> Any:
        return lambda: self.partial(slot)[3]

    def consume(self) -> None:
        for slot in self.read:
            del self.device.partials[slot]

    def store_partial(self, slot: int, row: int, o: Sequence[float], m: float, l: float, mult: float) -> None:
        self.device.store(slot, self.item, m, l, mult, o)  # the inputs still lie in theirs
        self.consume()

    def finish_row(self, row: int, o: Sequence[float], m: float, l: float, mult: float, v_factor: float) -> None:
        assert self.item not in self.device.results, "finished twice"
        self.device.results[self.item] = (m, l, list(o))
        self.consume()


def row_events(device: Device, calls: Sequence[tuple[Piece, Part]]) -> Iterator[None]:
    """A row from its first store on: its partial results, then the merge of its first item, then of its last."""
    for piece, (m, l, o) in calls:
        device.store(piece.slot, piece.item, m, l, MULT, o)
        yield
    for piece, _ in calls:
        arrive_and_merge(Merge(device, piece.item), piece.row, piece.first_row, piece.last_row)
        yield


def make_part(values: np.random.Generator) -> Part:
    """Some without any key, and sums that differ by many powers of two."""
    if values.random() < 0.2:
        return -math.inf, 0.0, [0.0] * 4
    return values.uniform(-60, 60), values.uniform(1, 100), list(values.normal(size=4))


def run_rows(calls: dict[int, list[tuple[Piece, Part]]], num_rows: int, rng: random.Random) -> dict[Item, Part]:
    """The results of one launch, in any interleaving that keeps each row's own order, few or all rows at once."""
    device = Device(num_rows)
    waiting = [row_events(device, calls[row]) for row in sorted(calls, reverse=True)]
    if rng.random() < 0.5:
        rng.shuffle(waiting)
    at_once = rng.choice([2, 30, num_rows])
    running: list[Iterator[None]] = []
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(waiting.pop())
        i = rng.randrange(len(running))
        if next(running[i], "done") == "done":
            running.pop(i)
    assert not any(device.counters), "a counter is not back at zero"
    assert not device.partials, "a partial result was left out"
    return device.results


def check_merge(plan: np.ndarray, lens: Sequence[int], heads: int, rng: random.Random) -> None:
    values = np.random.default_rng(rng.getrandbits(32))
    calls = collections.defaultdict(list)  # of each row, in its order
    expected = {}
    for item, splits in by_item(walk(plan, lens, heads)).items():
        if splits[0].slot is None:
            continue
        parts = [make_part(values) for _ in splits]
        for piece, part in zip(splits, parts, strict=True):
            calls[piece.row].append((piece, part))
        scale = np.exp2([m * MULT for m, _, _ in parts])
        expected[item] = scale @ [[l, *o] for _, l, o in parts]

    results = run_rows(calls, len(plan) - 1, rng)
    assert results.keys() == expected.keys(), "an item was never finished"
    for item, sums in expected.items():
        m, l, o = results[item]
        scale = 2.0 ** (m * MULT)
        np.testing.assert_allclose([x * scale for x in (l, *o)], sums, rtol=1e-9, atol=1e-9 * abs(sums).max())
    assert run_rows(calls, len(plan) - 1, rng) == results, "the order of arrival changes the result"


def cut_evenly(tiles: Sequence[int], share: int) -> np.ndarray:
    """A plan of rows of ``share`` tiles, wherever items of so many tiles begin and end."""
    start = np.concatenate(([0], np.cumsum(tiles))).tolist()
    plan = [[-(-start[-1] // share)] + [0] * 7]
    for begin in range(0, start[-1], share):
        end = min(begin + share, start[-1])
        first, last = (int(np.searchsorted(start, at, side="right")) - 1 for at in (begin, end))
        last_row = (start[last + 1] - 1) // share if last < len(tiles) else 0
        plan.append([first, 0, begin - start[first], last, 0, end - start[last], start[first] // share, last_row])
    return np.array(plan)


EDGES = sorted(
    {2, LOADS_IN_FLIGHT, LOADS_IN_FLIGHT + 1}
    | {n + d for n in (ONE_STEP_SPLITS, 3 * TEAM, 4 * TEAM) for d in (-1, 0, 1, 2)}
    | {n + d for n in (BIG_TEAM_ABOVE, BIG_TEAM_ABOVE + BIG_TEAM) for d in (-1, 0, 1, 2)}
)


@pytest.mark.parametrize("splits", EDGES)
def test_items_of_just_so_many_splits_that_share_rows(splits):
    """A row at a seam may be the last team of one item, alone, and lead the first of the next."""
    share = 4
    tiles = [splits * share - share // 2] * 5  # every other seam falls into the middle of a row
    plan, lens = cut_evenly(tiles, share), [n * PLAN_TILE for n in tiles]
    assert {len(pieces) for pieces in by_item(walk(plan, lens, 1)).values()} == {splits}
    for seed in range(6):
        check_merge(plan, lens, 1, random.Random(seed))


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, *EDGES]), st.integers(1, 3)), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_items_of_any_sizes_that_share_rows(items, rng):
    share = 3
    tiles = [splits * share + more for splits, more in items]
    check_merge(cut_evenly(tiles, share), [n * PLAN_TILE for n in tiles], 1, rng)


@given(
    st.lists(st.sampled_from([0, 10, 5_000, 60_000, 130_000, 400_000]), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 400),
    st.sampled_from([None, 2, 40]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_items_of_a_plan(lens, heads, num_ctas, max_splits, rng):
    check_merge(build_plan(lens, PlanShape(num_ctas, heads, max_splits)), lens, heads, rng)


@given(
    st.lists(st.sampled_from([0, 10, 129, 5_000, 60_000, 130_000, 400_000]), min_size=1, max_size=5),
    st.sampled_from([2, 16, 64]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=30, deadline=None)
def test_with_fixed_splits_an_item_s_sums_follow_from_it_alone(lens, tiles, rng):
    """Equal partial results give equal bits, alone and in a batch: order and grouping come from the item's splits."""

    def merged(seqs: Sequence[int], num_ctas: int) -> list[Part | None]:
        step = [lens[seq] for seq in seqs]
        rows = fixed_rows(len(step), sum(step), tiles * PLAN_TILE, 1)
        plan = build_plan(step, PlanShape(num_ctas, 1, fixed_tiles=tiles, fixed_rows=rows))
        calls = collections.defaultdict(list)
        for (place, _), splits in by_item(walk(plan, step, 1)).items():
            values = np.random.default_rng(seqs[place])
            for piece in splits if len(splits) > 1 else ():
                calls[piece.row].append((piece, make_part(values)))
        results = run_rows(calls, len(plan) - 1, rng) if calls else {}
        return [results.get((place, 0)) for place in range(len(seqs))]

    together = merged(range(len(lens)), rng.randint(1, 50))
    assert [merged([seq], rng.randint(1, 50))[0] for seq in range(len(lens))] == together
    backwards = merged(range(len(lens))[::-1], 3)
    assert backwards[::-1] == together
