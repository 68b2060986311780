"""The merge of splits in any order of arrival.

What runs is the text of kernels/split.py itself, on the host: it uses nothing of the CuTe DSL that plain Python does
not have, but names. Threads take turns at random, one access to shared state each, and every word of the workspace is
watched.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plan_walk import Item, Piece, by_item, walk

from mjolnir.compiler.build import dsl_missing_reason

if dsl_missing_reason():
    pytest.skip(dsl_missing_reason() or "", allow_module_level=True)

from mjolnir.kernels import epilogue, geometry, partials, split, work
from mjolnir.kernels.split import LOADS_IN_FLIGHT, LOG2_TEAM, MOST_PARTS, TOGETHER_IN_FLIGHT
from mjolnir.plan import ARRIVE, PAIRED, PLAN_TILE, WAIT, PlanShape, build_plan, fixed_rows

MULT = 0.5  # of every row: base-2 score per unit of raw S
HEAD_SIZE, ROWS, LIVE_ROWS = 8, 4, 3  # a thread has four elements: two threads on a row
WARP, WARPS = 2, 2
HALF_THREADS = WARP * WARPS
SHARED = (
    *("self.merge", "self.write", "self.store_rows", "self.partials.", "self.add_", "self.arrive", "self.sync"),
    *("self.all_have_begun", "self.finish_rows", "self.of_any_lane"),
    *("ptx.ld_relaxed", "ptx.st_relaxed", "ptx.atomic"),
)

Steps = Iterator[None]
"""What a thread does, pausing before each access to what threads share."""


class Registers(list):
    def fill(self, value: float) -> None:
        self[:] = [value] * len(self)


class Unset:
    """The value of an empty word. No arithmetic takes it."""


UNSET = Unset()


class Pauses(ast.NodeTransformer):
    """Turns calls of what reaches shared state into ``yield from`` of a stand-in."""

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        return ast.YieldFrom(node) if ast.unparse(node.func).startswith(SHARED) else node


def kernel_text(module: Any, *names: str, **stand_ins: Any) -> Any:
    """Functions and methods of a kernel's module as plain Python."""
    source = ast.parse(inspect.getsource(module))
    found = {node.name: node for node in ast.walk(source) if isinstance(node, ast.FunctionDef)}
    for name in names:
        found[name].decorator_list = []
    text = Pauses().visit(ast.Module([found[name] for name in names], type_ignores=[]))
    namespace: dict[str, Any] = {
        **{name: getattr(split, name) for name in dir(split) if name.isupper()},
        "UNSET": geometry.UNSET,
        "log2": geometry.log2,
        "WARP": WARP,
        "Any": Any,
        "Int32": int,
        "Int64": int,
        "Float32": float,
        "NEG_INF": -math.inf,
        "ARRIVE": ARRIVE,
        "WAIT": WAIT,
        "PAIRED": PAIRED,
        "weight_of": lambda m, top, mult: 2.0 ** ((m - top) * mult),
        "cutlass": SimpleNamespace(
            Boolean=bool,
            const_expr=bool,
            min=min,
            max=max,
            range=lambda *args, unroll: range(*args),
            range_constexpr=range,
        ),
        "cute": SimpleNamespace(
            make_rmem_tensor=lambda shape, _: Registers([None] * shape[0]), arch=SimpleNamespace(fmax=max)
        ),
        **stand_ins,
    }
    exec(compile(ast.fix_missing_locations(text), module.__file__, "exec"), namespace)
    return SimpleNamespace(**{name: namespace[name] for name in names})


@dataclasses.dataclass
class Part:
    """What a row of the plan has of an item."""

    m: list[float]
    l: list[float]
    o: list[list[float]]

    @classmethod
    def random(cls, values: np.random.Generator) -> Part:
        """Some without any key, and sums that differ by many powers of two."""
        if values.random() < 0.2:
            return cls([-math.inf] * LIVE_ROWS, [0.0] * LIVE_ROWS, [[0.0] * HEAD_SIZE] * LIVE_ROWS)
        size = LIVE_ROWS, HEAD_SIZE
        return cls(
            values.uniform(-60, 60, LIVE_ROWS).tolist(),
            values.uniform(1, 100, LIVE_ROWS).tolist(),
            values.normal(size=size).tolist(),
        )


Result = dict[tuple[int, int], tuple[float, ...]]
"""(m, l, O) by row and first element."""


class Device:
    """What rows share: the words of partial results, counters, results. Addresses are in bytes."""

    def __init__(self, num_rows: int, mode: int, in_use: int, rng: random.Random):
        self.mode, self.in_use, self.rng = mode, in_use, rng
        self.begun = 0  # rows
        self.words: dict[int, Any] = {}
        self.num_words = 2 * num_rows * ROWS * HEAD_SIZE * 2
        self.counters = [0] * (2 * num_rows)
        self.results: dict[Item, Result] = {}
        self.fruitless = 0  # loads since anything changed

    def changed(self) -> None:
        self.fruitless = 0

    def load(self, address: int, count: int) -> list[Any]:
        first = self.word(address, count)
        found = [self.words.get(first + i, UNSET) for i in range(count)]
        assert self.mode != ARRIVE or UNSET not in found, "whoever arrived last reads what is not there"
        self.fruitless += 1
        assert self.fruitless < 100_000, "waits for ever"
        return found

    def store(self, address: int, values: Sequence[Any]) -> None:
        first = self.word(address, len(values))
        for word, value in enumerate(values, first):
            if value is UNSET:
                assert self.words.pop(word, UNSET) is not UNSET, "emptied twice"
            else:
                assert word not in self.words, "a live partial result is overwritten"
                self.words[word] = value
        self.changed()

    def word(self, address: int, count: int) -> int:
        assert address % (4 * count) == 0, "misaligned"
        assert 0 <= address // 4 <= self.num_words - count, "two slots a row"
        return address // 4

    def count(self, address: int, last: int) -> int:
        """atom.inc, which wraps at ``last``."""
        counter, rest = divmod(address, 4)
        assert rest == 0
        old = self.counters[counter]
        self.counters[counter] = 0 if old >= last else old + 1
        self.changed()
        return old


class Half:
    """The consumers that work on a row; where rows make a pair, those on both. Each in shared memory."""

    def __init__(self, device: Device, threads: int):
        self.device, self.threads = device, threads
        self.parts: dict[int, Part] = {}  # by half
        self.memory: dict[int, Any] = {}
        self.arrived: dict[int, int] = {}
        self.rounds: dict[int, int] = {}
        self.lanes: dict[int, Any] = {}  # what threads show to those of their warp
        self.all_have_begun: int | None = None

    def sync(self, who: int = -1) -> Steps:
        """Of all threads, or of a warp."""
        mine = self.rounds.setdefault(who, 0)
        self.arrived[who] = self.arrived.get(who, 0) + 1
        if self.arrived[who] == (self.threads if who < 0 else WARP):
            self.arrived[who], self.rounds[who] = 0, mine + 1
            self.device.changed()
        while self.rounds[who] == mine:
            yield

    def swap(self, thread: int, value: Any) -> Any:
        """The values of all lanes of a warp."""
        warp = thread // WARP
        self.lanes[thread] = value
        yield from self.sync(warp)
        values = [self.lanes[warp * WARP + lane] for lane in range(WARP)]
        yield from self.sync(warp)
        return values


@dataclasses.dataclass(frozen=True)
class Shared:
    """An address in a half's shared memory."""

    half: Half
    at: int

    def __add__(self, distance: int) -> Shared:
        return Shared(self.half, self.at + distance)

    __radd__ = __add__

    def load(self, count: int) -> list[Any]:
        return [self.half.memory[self.at + 4 * i] for i in range(count)]

    def store(self, *values: Any) -> None:
        self.half.memory |= {self.at + 4 * i: value for i, value in enumerate(values)}


FLAG, SUMS_AT = 0, 64


DEVICE: Device  # of the launch that runs


def access(method: Callable[..., Any]) -> Callable[..., Any]:
    def paused(*args: Any) -> Any:
        yield
        return method(DEVICE, *args)

    return paused


PTX = SimpleNamespace(
    ld_relaxed_f32x4_if=access(lambda device, wanted, address: device.load(address, 4) if wanted else [0.0] * 4),
    st_relaxed_f32x4=access(lambda device, address, values: device.store(address, values)),
    atomic_inc=access(lambda device, address, last, _: device.count(address, last)),
    int_as_float=lambda bits: UNSET if bits == geometry.UNSET else bits,
    float_as_int=lambda value: geometry.UNSET if value is UNSET else value if isinstance(value, int) else 0,
    lds_f32=lambda address: MULT,
    lds_f32x2=lambda address: address.load(2),
    lds_f32x4=lambda address: address.load(4),
    lds_b32=lambda address: (address.load(1)[0] + 2**31) % 2**32 - 2**31,
    sts_b32=lambda address, value: address.store(value),
    sts_f32x2=lambda address, x, y: address.store(x, y),
    sts_f32x4=lambda address, values: address.store(*values),
    floor_log2=lambda x: x.bit_length() - 1,
    or_shared=lambda address, bits: address.store(address.load(1)[0] | bits),
)

SUMS = kernel_text(partials, "empty_sum", "add_parts")
WORKSPACE = kernel_text(partials, "address", "store", "add", ptx=PTX, **vars(SUMS))
WHOLE = kernel_text(epilogue, "write", "finish_rows", ptx=PTX, **vars(SUMS))
TEXT = kernel_text(
    split, "conclude", "merge_together", "store_rows", "merge_part", "add_splits", "merge_in_teams", "arrive", "merge",
    "slots", "slot_of", ptx=PTX, Teams=split.Teams, Level=split.Level, Parts=split.Parts, **vars(SUMS),
)  # fmt: skip
PLACES = kernel_text(work, "two_by_two")


class Partials:
    """Stands for ``Partials``, as a thread has it."""

    args = SimpleNamespace(partials=0)
    geo = SimpleNamespace(head_size=HEAD_SIZE, partial_floats=ROWS * HEAD_SIZE * 2)
    address, store, add = WORKSPACE.address, WORKSPACE.store, WORKSPACE.add

    def __init__(self, half: Half, thread: int):
        self.half, self.thread = half, thread

    def of_any_lane(self, flag: bool) -> Any:
        return any((yield from self.half.swap(self.thread, flag)))


class Merge:
    """Stands for ``SplitMerge``: a thread of ``half``, for a piece."""

    args = SimpleNamespace(counters=0)
    variant = SimpleNamespace(split=True)
    geo = SimpleNamespace(own_q=False, head_size=HEAD_SIZE, consumer_warps=WARPS)
    live_rows, mult, first_half = LIVE_ROWS, 0, 0
    conclude, write, finish_rows = TEXT.conclude, WHOLE.write, WHOLE.finish_rows
    merge_together, store_rows, merge_part = TEXT.merge_together, TEXT.store_rows, TEXT.merge_part
    add_splits = TEXT.add_splits
    merge_in_teams, merge, arrive, slots = TEXT.merge_in_teams, TEXT.merge, TEXT.arrive, TEXT.slots

    def __init__(self, half: Half, item: Item, thread: int, paired: int):
        self.half, self.flag, self.exchange = half, Shared(half, FLAG), Shared(half, SUMS_AT)
        self.item, self.thread, self.partials = item, thread, Partials(half, thread)
        self.paired, self.halves = paired, 1 + paired
        self.threads = HALF_THREADS * self.halves
        self.is_first = thread % HALF_THREADS == 0
        per_row = HEAD_SIZE // 4
        self.element = thread % per_row * 4
        self.first_row, self.row_step = thread // per_row, self.threads // per_row

    def sync(self) -> Steps:
        return self.half.sync()

    def all_have_begun(self) -> Any:
        """What one CTA has seen: at most what is so."""
        yield
        if self.half.all_have_begun is None:
            self.half.all_have_begun = int(DEVICE.begun == DEVICE.in_use and DEVICE.rng.random() < 0.7)
        return self.half.all_have_begun

    def add_lane(self, state: Registers, step: int, mult: float) -> Steps:
        lanes = yield from self.half.swap(self.thread, list(state))
        m, l, *o = lanes[self.thread % WARP ^ step]
        SUMS.add_parts(state, [m], [l], [o], mult)

    def column(self, element: int) -> int:
        return element

    def row_at(self, i: int) -> int:
        return i

    def add_warps(self, state: Registers, row: int, mult: float) -> Steps:
        yield
        assert len(self.half.parts) == self.halves, "not all have shared theirs yet"
        for _, part in sorted(self.half.parts.items()):
            values = part.o[row][self.element : self.element + 4]
            SUMS.add_parts(state, [part.m[row]], [part.l[row]], [values], mult)

    def spot(self, row: int, column: int) -> tuple[int, int]:
        return row, column

    def finish_row(self, spot: tuple[int, int], state: Registers, mult: float) -> None:
        result = DEVICE.results.setdefault(self.item, {})
        assert spot not in result, "finished twice"
        result[spot] = tuple(state)


Call = tuple[Piece, Part]


def thread_steps(half: Half, rows: Sequence[Sequence[Call]], thread: int, mode: int) -> Steps:
    """A consumer thread's way through the pieces of its row."""
    paired = int(mode == PAIRED)
    for piece, part in rows[thread // HALF_THREADS]:
        yield
        if thread % HALF_THREADS == 0:  # its warp's result
            half.parts[thread] = part
            half.device.changed()
        merge = Merge(half, piece.item, thread, paired)
        yield from merge.conclude(piece.row, piece.first_row, piece.last_row, int(mode != ARRIVE))
        if thread % HALF_THREADS == 0 and mode == ARRIVE:  # the next piece's Q lies where the result did
            del half.parts[thread]


def ctas_of(rows: dict[int, list[Call]], num_rows: int, mode: int, grid: int) -> list[list[list[list[Call]]]]:
    """Per CTA, its halves; per half, the rows that it has, two of a pair. ``grid`` CTAs have two halves each, unless
    rows are taken one by one."""
    if mode == ARRIVE:
        return [[[rows[row]]] for row in sorted(rows)]
    if PLACES.two_by_two(mode, num_rows, grid):
        places = [(2 * cta, 2 * cta + 1) for cta in range(grid)]
    else:
        places = [(cta, cta + grid) for cta in range(grid)]
    assert sorted(row for place in places for row in place)[:num_rows] == list(range(num_rows))
    held = [[rows[row] for row in place if row < num_rows] for place in places]
    return [([halves] if mode == PAIRED else [[row] for row in halves]) for halves in held if halves]


def run_rows(rows: dict[int, list[Call]], plan: np.ndarray, rng: random.Random) -> dict[Item, Result]:
    """The results of one launch, in any interleaving that keeps each thread's own order, few or all CTAs at once. Those
    that wait begin in the order of their numbers, as a GPU hands them out, and as soon as there is a place."""
    global DEVICE
    mode = int(plan[0, 2])
    num_rows = len(plan) - 1
    used = int(plan[0, 0])
    DEVICE = Device(num_rows, mode, used, rng)
    ctas = ctas_of(rows, used, mode, rng.randint(-(-used // 2), max(1, used)))[::-1]
    if mode == ARRIVE and rng.random() < 0.5:
        rng.shuffle(ctas)
    at_once = rng.choice([1, 2, 30, num_rows])
    running: list[tuple[list[int], Steps]] = []
    resident = 0
    while ctas or running:
        while ctas and resident < at_once:
            resident += 1
            halves = ctas.pop()
            DEVICE.begun += sum(map(len, halves))
            live = [HALF_THREADS * sum(map(len, halves))]
            for pair in halves:
                half = Half(DEVICE, HALF_THREADS * len(pair))
                running += [(live, thread_steps(half, pair, thread, mode)) for thread in range(half.threads)]
            DEVICE.changed()
        i = rng.randrange(len(running))
        live, steps = running[i]
        for _ in range(rng.choice((1, 1, 4, 40))):
            if next(steps, "done") == "done":
                running[i] = running[-1]
                running.pop()
                DEVICE.changed()
                live[0] -= 1
                resident -= live[0] == 0
                break
    assert not any(DEVICE.counters), "a counter is not back at zero"
    assert not DEVICE.words, "a slot is left full"
    return DEVICE.results


def expected_result(parts: Sequence[Part]) -> tuple[np.ndarray, np.ndarray]:
    """l (rows,) and O (rows, head_size), relative to m = 0."""
    scale = np.exp2(np.array([part.m for part in parts]) * MULT)
    l, o = np.array([part.l for part in parts]), np.array([part.o for part in parts])
    return (scale * l).sum(0), np.einsum("sr,sre->re", scale, o)


def calls_of(pieces: Sequence[Piece], values: np.random.Generator) -> dict[int, list[Call]]:
    rows: dict[int, list[Call]] = {}
    for piece in pieces:
        rows.setdefault(piece.row, []).append((piece, Part.random(values)))
    return rows


def check_merge(plan: np.ndarray, lens: Sequence[int], heads: int, rng: random.Random, launches: int = 2) -> None:
    values = np.random.default_rng(rng.getrandbits(32))
    rows = calls_of(walk(plan, lens, heads), values)
    parts: dict[Item, list[Part]] = {}
    for row in sorted(rows):
        for piece, part in rows[row]:
            parts.setdefault(piece.item, []).append(part)
    results = run_rows(rows, plan, rng)
    assert results.keys() == parts.keys(), "an item was never finished"
    for item, result in results.items():
        assert result.keys() == {(row, e) for row in range(LIVE_ROWS) for e in range(0, HEAD_SIZE, 4)}
        l_sum, o_sum = expected_result(parts[item])
        for (row, element), (m, l, *o) in result.items():
            scale = 2.0 ** (m * MULT)
            sums = [l_sum[row], *o_sum[row, element : element + 4]]
            atol = 1e-9 * max(map(abs, sums))
            np.testing.assert_allclose([x * scale for x in (l, *o)], sums, rtol=1e-9, atol=atol)
    for _ in range(launches - 1):
        assert run_rows(rows, plan, rng) == results, "the order of arrival changes the result"


def cut_evenly(tiles: Sequence[int], share: int) -> np.ndarray:
    """A plan of rows of ``share`` tiles, wherever items of so many tiles begin and end."""
    start = np.concatenate(([0], np.cumsum(tiles))).tolist()
    plan = [[-(-start[-1] // share), 0, ARRIVE, *[0] * 5]]
    for begin in range(0, start[-1], share):
        end = min(begin + share, start[-1])
        first, last = (int(np.searchsorted(start, at, side="right")) - 1 for at in (begin, end))
        last_row = (start[last + 1] - 1) // share if last < len(tiles) else 0
        plan.append([first, 0, begin - start[first], last, 0, end - start[last], start[first] // share, last_row])
    return np.array(plan)


def cut_by_item(rows: Sequence[int], mode: int) -> np.ndarray:
    """A plan of rows of a tile and a piece each: so many of each item."""
    plan = [[sum(rows), 0, mode, *[0] * 5]]
    for item, count in enumerate(rows):
        first = len(plan) - 1
        for i in range(count):
            end = [item, 0, i + 1] if i + 1 < count else [item + 1, 0, 0]
            plan.append([item, 0, i, *end, first, first + count - 1])
    return np.array(plan)


TEAMS = [(above, 1 << log2) for (above, _), (_, log2) in pairwise(LOG2_TEAM)]
"""(more splits than this, members of a team)."""

SEEDS = st.integers(0, 2**32 - 1)

EDGES = sorted(
    {
        1,
        2,
        3,
        4,
        MOST_PARTS,
        MOST_PARTS + 1,
        TOGETHER_IN_FLIGHT + 1,
        LOADS_IN_FLIGHT,
        LOADS_IN_FLIGHT + 1,
        LOADS_IN_FLIGHT + 2,
    }
    | {at + d for above, size in TEAMS for at in (above, (above // size + 1) * size) for d in (-1, 0, 1, 2)}
)


@pytest.mark.parametrize("splits", [n for n in EDGES if n > 1])
def test_items_of_just_so_many_splits_that_share_rows(splits):
    """A row at a seam may be the last team of one item, alone, and lead the first of the next."""
    share = 4
    tiles = [splits * share - share // 2] * 3  # every other seam falls into the middle of a row
    plan, lens = cut_evenly(tiles, share), [n * PLAN_TILE for n in tiles]
    assert {len(pieces) for pieces in by_item(walk(plan, lens, 1)).values()} == {splits}
    for seed in range(3):
        check_merge(plan, lens, 1, random.Random(seed), launches=2 if splits < 100 else 1)


@pytest.mark.parametrize("mode", [ARRIVE, WAIT, PAIRED])
@pytest.mark.parametrize("splits", EDGES)
def test_items_of_just_so_many_splits_with_rows_of_their_own(splits, mode):
    plan = cut_by_item([splits * (1 + (mode == PAIRED))] * 3, mode)
    lens = [len(plan) * PLAN_TILE] * 3
    for seed in range(3):
        check_merge(plan, lens, 1, random.Random(seed), launches=2 if splits < 100 else 1)


@pytest.mark.parametrize("mode", [WAIT, PAIRED])
def test_as_many_parts_as_there_may_be_are_passed_on(mode, monkeypatch):
    monkeypatch.setitem(globals(), "ROWS", 32)
    monkeypatch.setitem(globals(), "LIVE_ROWS", 32)
    monkeypatch.setattr(Merge, "live_rows", 32)
    monkeypatch.setattr(Partials.geo, "partial_floats", 32 * HEAD_SIZE * 2)
    monkeypatch.setattr(Merge, "all_have_begun", lambda self: iter_return(0))
    plan = cut_by_item([33 * (1 + (mode == PAIRED))], mode)
    assert 32 * HEAD_SIZE // 4 >= 2 * MOST_PARTS
    check_merge(plan, [len(plan) * PLAN_TILE], 1, random.Random(0), launches=1)


def iter_return(value):
    yield
    return value


@given(
    st.lists(st.tuples(st.sampled_from([0, *EDGES]), st.integers(1, 3)), min_size=1, max_size=6),
    SEEDS,
)
@settings(max_examples=30, deadline=None)
def test_items_of_any_sizes_that_share_rows(items, seed):
    share = 3
    tiles = [splits * share + more for splits, more in items]
    check_merge(cut_evenly(tiles, share), [n * PLAN_TILE for n in tiles], 1, random.Random(seed))


@given(
    st.lists(st.integers(1, 40) | st.sampled_from(EDGES), min_size=1, max_size=6),
    st.sampled_from([ARRIVE, WAIT, PAIRED]),
    SEEDS,
)
@example([40, 3], WAIT, 1)
@settings(max_examples=60, deadline=None)
def test_items_of_any_sizes_with_rows_of_their_own(items, mode, seed):
    rows = [splits * (1 + (mode == PAIRED)) for splits in items]
    check_merge(cut_by_item(rows, mode), [sum(rows) * PLAN_TILE] * len(rows), 1, random.Random(seed))


@given(
    st.lists(st.sampled_from([0, 10, 1000, 2000, 5_000, 60_000, 130_000, 400_000]), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 400),
    st.sampled_from([None, None, 2, 40]),
    st.booleans(),
    SEEDS,
)
@settings(max_examples=60, deadline=None)
def test_items_of_a_plan(lens, heads, num_ctas, max_splits, pairs, seed):
    check_merge(build_plan(lens, PlanShape(num_ctas, heads, max_splits, pairs)), lens, heads, random.Random(seed))


@pytest.mark.parametrize(
    ("lens", "mode"), [([1000, 70, 0], WAIT), ([64 * 32, 1], WAIT), ([64 * 33, 1], PAIRED), ([60_000], PAIRED)]
)
def test_a_plan_holds_when_lengths_have_changed(lens, mode):
    """Pieces without a token have a part in the merge like any other."""
    plan = build_plan(lens, PlanShape(264, 2))
    assert plan[0, 2] == mode
    for seed, live in enumerate((lens, [0] * len(lens), [n + 5000 for n in lens], lens[::-1])):
        check_merge(plan, live, 2, random.Random(seed))


@given(
    st.lists(st.sampled_from([0, 10, 129, 5_000, 60_000, 130_000, 400_000]), min_size=1, max_size=5),
    st.sampled_from([16, 64]),
    SEEDS,
)
@settings(max_examples=20, deadline=None)
def test_with_fixed_splits_an_item_s_sums_follow_from_it_alone(lens, tiles, seed):
    """Equal partial results give equal bits, alone and in a batch: order and grouping come from the item's splits."""
    rng = random.Random(seed)

    def merged(seqs: Sequence[int], num_ctas: int) -> list[Result]:
        step = [lens[seq] for seq in seqs]
        rows = fixed_rows(len(step), sum(step), tiles * PLAN_TILE, 1)
        plan = build_plan(step, PlanShape(num_ctas, 1, fixed_tiles=tiles, fixed_rows=rows))
        assert plan[0, 2] == ARRIVE
        calls: dict[int, list[Call]] = {}
        for (place, _), splits in by_item(walk(plan, step, 1)).items():
            calls |= calls_of(splits, np.random.default_rng(seqs[place]))
        results = run_rows(calls, plan, rng)
        return [results[place, 0] for place in range(len(seqs))]

    together = merged(range(len(lens)), rng.randint(1, 50))
    assert [merged([seq], rng.randint(1, 50))[0] for seq in range(len(lens))] == together
    backwards = merged(range(len(lens))[::-1], 3)
    assert backwards[::-1] == together
