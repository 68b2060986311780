"""The benchmark harness and the documents made from its results. Nothing here is a gate on time."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from mjolnir import cli
from mjolnir.bench import command, measure, report, timing
from mjolnir.bench.case import Case
from mjolnir.bench.command import Options, done, in_order, write
from mjolnir.bench.gates import fastest_peer, gates
from mjolnir.bench.ours import Knobs, Mjolnir
from mjolnir.bench.peers import NAMES, Prepared
from mjolnir.bench.pool import KVPool
from mjolnir.bench.results import METHOD, Failure, Report, Row, geometric_mean
from mjolnir.bench.shapes import HARD, REUSE_BYTES, Shape, parse_lengths
from mjolnir.bench.suites import SUITES, select, shard, suite, variants_for_suite
from mjolnir.formats import get_format
from mjolnir.reference import decode_attention_oracle
from mjolnir.variant import Variant

CHECKOUT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")

# Shapes and formulas


@pytest.mark.parametrize(
    ("shape", "floor", "target"),  # as published for this chip, rounded
    [
        (Shape(32, 8, "1x1K"), "0.5", "4.5"),
        (Shape(32, 8, "1x8K"), "3.6", "7.8"),
        (Shape(32, 8, "1x128K"), "58.4", "64.7"),
        (Shape(32, 8, "64x8K"), "233", "247"),
        (Shape(32, 8, "256x1K"), "117", "125"),
        (Shape(8, 1, "1x32K"), "1.8", "5.9"),
        (Shape(32, 8, "32mixed"), "100", "108"),
        (Shape(32, 8, "16x8K", q_len=4), "58.4", "64.7"),
    ],
)
def test_floor_and_target_are_the_published_ones(shape, floor, target):
    digits = len(floor.partition(".")[2])
    assert f"{shape.floor_us:.{digits}f}" == floor
    assert f"{shape.target_us:.{digits}f}" == target


@pytest.mark.parametrize(
    ("shape", "kv_bytes", "cache_bytes"),
    [
        (Shape(9, 3, "1x8K", head_dim=64), 3 << 20, 3 << 20),
        (Shape(32, 8, "1x8K", kv_format="bf16"), 32 << 20, 32 << 20),
        (Shape(16, 4, "16x8K", head_dim=256), 256 << 20, 256 << 20),
        (Shape(8, 1, "2x65", page_size=64), 2 * 65 * 256, 4 * 64 * 256),  # a page for one token
    ],
)
def test_bytes(shape, kv_bytes, cache_bytes):
    assert (shape.kv_bytes, shape.cache_bytes) == (kv_bytes, cache_bytes)


def test_lengths():
    assert parse_lengths("2x1K+3x7") == (1024, 1024, 7, 7, 7)
    mixed = parse_lengths("32mixed")
    assert mixed[:3] + mixed[-2:] == (965, 328, 7426, 6890, 1307)
    assert (len(mixed), sum(mixed), min(mixed), max(mixed)) == (32, 224530, 162, 56513)
    with pytest.raises(ValueError, match="batch must be terms such as '16x8K'"):
        parse_lengths("16*8K")


@given(batch=st.integers(1, 512), length=st.integers(1, 200_000), heads=st.sampled_from([1, 2, 3, 8]))
def test_rotation_leaves_nothing_of_a_cache_in_l2(batch, length, heads):
    shape = Shape(8 * heads, heads, f"{batch}x{length}")
    calls = timing.rotations(shape.slots, shape.target_us) * shape.slots
    order = [call % shape.slots for call in range(min(calls, 3 * shape.slots))] + [0]
    uses = [i for i, slot in enumerate(order) if slot == 0]
    others = (uses[1] - uses[0] - 1) * shape.kv_bytes
    assert others > 240_000_000 or (shape.slots == 1 and shape.kv_bytes >= 960_000_000)
    assert others <= 240_000_000 + shape.kv_bytes, "no more memory than it takes"


def test_a_graph_is_whole_rotations_of_about_two_ms():
    assert timing.rotations(slots=10, call_us=20.0) == 10
    assert timing.rotations(slots=500, call_us=20.0) == 1
    assert timing.rotations(slots=1, call_us=4000.0) == 1


# Suites


@pytest.mark.parametrize("name", SUITES)
def test_suite_names_are_unique_and_the_pool_fits(name):
    shapes = suite(name)
    assert len({shape.name for shape in shapes}) == len(shapes)
    KVPool.check_size(shapes)
    assert all(shape.q_len * shape.heads_q // shape.heads_kv <= 64 for shape in shapes)


def test_suites_hold_what_they_must():
    core, full = suite("core"), suite("full")
    assert set(suite("quick")) < set(core) < set(full)
    assert len(suite("quick")) == 8
    peers_table = [Shape(32, 8, batch) for batch in "1x1K 1x8K 1x128K 16x8K 64x8K 256x1K 32mixed".split()]
    peers_table += [Shape(8, 1, "1x32K"), Shape(32, 8, "16x8K", q_len=4)]
    assert {*peers_table, Shape(32, 8, "16x32K"), Shape(64, 8, "128x2K")} <= set(core)
    heads = {(shape.head_dim, shape.heads_q, shape.heads_kv) for shape in core}
    assert {(64, 9, 3), (64, 32, 8), (256, 16, 4), (256, 8, 1)} <= heads
    assert {(16, "NHD"), (16, "HND"), (128, "NHD"), (128, "HND")} <= {(s.page_size, s.layout) for s in core}

    grid = [
        Shape(hq, hk, f"{b}x{n}K", layout=layout)
        for hq, hk, layouts in ((32, 8, 2), (64, 8, 1), (32, 4, 1), (16, 2, 1), (8, 1, 1))
        for b in (1, 4, 16, 64, 256)
        for n in (1, 8, 32, 128)
        for layout in ("NHD", "HND")[:layouts]
    ]
    assert {shape for shape in grid if 2e6 < shape.kv_bytes <= 20e9} <= set(full)
    assert {shape.heads_q // shape.heads_kv for shape in full} >= {5, 6, 7, 12, 16}
    assert {shape.q_len for shape in full} == {1, 2, 4, 8}
    assert sum(shape.kv_format == "bf16" for shape in full) >= 8
    assert {Shape(32, 8, "32mixed"), Shape(8, 1, "32mixed"), Shape(32, 8, "1x128K+63x1K")} <= set(full)


def test_unknown_suites_and_patterns_are_refused():
    with pytest.raises(ValueError, match="suite must be one of quick, core, full, lowbit, got 'all'"):
        suite("all")
    names = [shape.name for shape in select(suite("core"), ["16x8K*hnd-fp8", "-hard"])]
    assert names == [
        "32/8-16x8K-d128-p64-hnd-fp8-q1",
        "32/8-16x8K-d128-p64-hnd-fp8-q4",
        "32/8-64x8K-d128-p64-nhd-fp8-q1-hard",
    ]
    with pytest.raises(ValueError, match="'d512' is in none of 8 names"):
        select(suite("quick"), ["d512"])


def test_hard_data_replaces_the_suite_s_where_it_is_defined():
    shapes = Options(suite="core", data=HARD).shapes()
    assert {(shape.data, shape.kv_format) for shape in shapes} == {(HARD, "fp8")}
    assert len(set(shapes)) == len(shapes) == sum(s.kv_format == "fp8" and s.data != HARD for s in suite("core"))


def test_shards_hold_every_shape_once():
    shapes = suite("core")
    parts = [shard(shapes, f"{i}/3") for i in (1, 2, 3)]
    assert sorted(shape.name for part in parts for shape in part) == sorted(shape.name for shape in shapes)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1 and shard(shapes, "1/1") == shapes
    for wrong in ("0/3", "4/3", "1", "a/b", "-1/2"):
        with pytest.raises(ValueError, match="shard must be i/n with i from 1 to n"):
            shard(shapes, wrong)


def test_variants_of_a_suite():
    core = variants_for_suite("core")
    assert len(set(core)) == len(core)
    assert {(v.kv_format, v.head_size, v.rows) for v in core} == {
        ("fp8", 128, 8), ("fp8", 128, 16), ("fp8", 64, 8), ("fp8", 256, 8), ("bf16", 128, 8),
        *((low, *rest) for low in ("e2m3", "nvfp4") for rest in ((128, 8), (128, 16), (64, 16), (256, 8))),
    }  # fmt: skip
    assert all(v.split and v.pdl and v.q_dtype == v.out_dtype == "bf16" for v in core)
    assert {32, 64} < {v.rows for v in variants_for_suite("full")}
    quick = variants_for_suite("quick", "sm_100a", Knobs(max_splits=1, kv_stages=8, ctas_per_sm=1, pdl=False))
    assert Variant("sm_100a", "fp8", "bf16", "bf16", 128, 8, False, False, False, 8, 1) in quick


# Data


SMALL = [
    Shape(4, 2, "1x200+1x3+1x64", head_dim=64, page_size=16),
    Shape(4, 2, "1x200+1x3+1x64", head_dim=64, page_size=16, layout="HND", q_len=3),
    Shape(8, 1, "2x70", head_dim=128, page_size=32, kv_format="bf16"),
    Shape(4, 2, "1x100", head_dim=64, page_size=64, data=HARD),
    Shape(4, 2, "1x200+1x3", head_dim=64, page_size=16, fixed_split=64),
]


@pytest.fixture
def two_caches(monkeypatch):
    """A CPU test has no room for 240 MB of caches."""
    monkeypatch.setattr(Shape, "slots", property(lambda shape: 2))


def test_pool_bytes_are_finite_and_distributed_as_said(two_caches):
    normal = Shape(8, 8, "1x4K", page_size=16)
    hard = dataclasses.replace(normal, data=HARD)
    pool = KVPool([normal, hard], CPU)
    values = torch.stack(pool.caches(normal)).float()
    assert values.isfinite().all()
    assert abs(values.mean()) < 0.01 and abs(values.std() - 1) < 0.01
    counts = torch.stack(pool.caches(hard)).view(torch.uint8).flatten().bincount(minlength=256)
    assert counts[[0x7F, 0xFF]].tolist() == [0, 0]
    finite = counts[counts > 0]
    assert len(finite) == 254 and finite.min() > 0.9 * finite.max()
    with pytest.raises(ValueError, match="defined for fp8 caches, got 'bf16'"):
        wrong = dataclasses.replace(hard, kv_format="bf16")
        KVPool([wrong], CPU).caches(wrong)


def test_pool_fills_every_byte_in_chunks_of_any_size(two_caches, monkeypatch):
    monkeypatch.setattr("mjolnir.bench.pool.CHUNK", 1000)
    shape = Shape(4, 2, "1x64", head_dim=64, kv_format="bf16")
    values = torch.stack(KVPool([shape], CPU).caches(shape)).float()
    assert (values == 0).float().mean() < 0.01 and abs(values.std() - 1) < 0.05


def test_a_pool_too_large_is_refused():
    with pytest.raises(ValueError, match="need 68.7 GB of KV caches, at most 40"):
        KVPool([Shape(32, 8, "256x128K")], CPU)


def test_caches_are_disjoint_and_pages_a_permutation(two_caches):
    shape = SMALL[0]
    case = Case(shape, KVPool(SMALL[:1], CPU))
    spans = sorted((t.data_ptr(), t.numel()) for caches in case.caches for t in caches)
    assert all(start + size <= later for (start, size), (later, _) in zip(spans, spans[1:], strict=False))
    pages = [case.block_table[i, : -(-n // 16)].tolist() for i, n in enumerate(shape.lens)]
    assert sorted(sum(pages, [])) == list(range(shape.num_pages)) != sum(pages, [])
    assert case.seq_lens.tolist() == [200, 3, 64] and case.checked == [0, 1]


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_error_is_that_of_the_oracle_over_the_paged_cache(shape, two_caches):
    case = Case(shape, KVPool([shape], CPU))
    k_cache, v_cache = case.caches[1]
    exact, _ = decode_attention_oracle(
        case.query, k_cache, v_cache, case.one, case.one, case.block_table, case.seq_lens,
        q_len=shape.q_len, softmax_scale=case.softmax_scale, kv_format=shape.kv_format,
    )  # fmt: skip
    assert case.rel_err(exact, 1) < 1e-12
    assert case.rel_err(exact * 1.001, 1) == pytest.approx(1e-3)
    assert case.rel_err(exact, 0) > 0.1, "another cache's output"
    last_token = exact.clone()
    last_token[(case.checked[-1] + 1) * shape.q_len - 1] *= 2
    assert case.rel_err(last_token, 1) > 0.1


# Timing, with a CUDA that is not there


class FakeCuda:
    """Graphs that record calls, events that read a clock, a clock that every call moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock_ms, self.recording = 0.0, None
        fake = self

        class Graph:
            def __init__(self):
                self.work = []

            def replay(self):
                for function in self.work:
                    function()

        class Capture:
            def __init__(self, graph):
                self.graph = graph

            def __enter__(self):
                fake.recording = self.graph.work

            def __exit__(self, *_):
                fake.recording = None

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = fake.clock_ms

            def elapsed_time(self, end):
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", Capture)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)

    def launch(self, function, ms: float) -> None:
        def work():
            function()
            self.clock_ms += ms

        (self.recording.append if self.recording is not None else lambda work: work())(work)


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda(monkeypatch)


@dataclasses.dataclass
class OnFakeCuda:
    """A peer whose calls the fake graph can record; ``break_output`` is applied to what it wrote."""

    cuda: FakeCuda
    ours: Mjolnir
    ms: float = 0.02
    name: str = "mjolnir"
    break_output: object = None

    def refuses(self, shape):
        return None if shape.q_len == 1 or self.name == "mjolnir" else "one token only"

    def prepare(self, case):
        prepared = self.ours.prepare(case)
        outputs = [prepared.call(slot) for slot in range(case.shape.slots)]

        def call(slot):
            def work():
                prepared.call(slot)
                if self.break_output:
                    self.break_output(outputs[slot])

            self.cuda.launch(work, self.ms)
            return outputs[slot]

        return Prepared(call, prepared.plan)


@pytest.fixture
def few_calls(cuda, two_caches, monkeypatch):
    """The reference backend takes milliseconds a call."""
    for name, value in dict(GRAPH_US=1, WARM_MS=0.0, MEASURED_MS=0.0, MIN_REPLAYS=3, HOST_CALLS=5, HOST_MS=0.0).items():
        monkeypatch.setattr(timing, name, value)
    return cuda


def reference(cuda, **options):
    return OnFakeCuda(cuda, Mjolnir(require_kernels=False), **options)


@pytest.mark.parametrize(("call_us", "batch"), [(10.0, 50), (400.0, 12), (2500.0, 2), (1e5, 1)])
def test_host_times_are_of_batches_that_the_device_is_waited_for(monkeypatch, call_us, batch):
    """Fifty calls over all slots, at most 5 ms queued; a call's time is its own, not that of waiting."""
    log, clock = [], [0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: (log.append("wait"), clock.append(clock[-1] + 10**9)))
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: clock[-1])

    def call(slot):
        log.append(slot)
        clock.append(clock[-1] + 7000)
        return torch.zeros(1)

    assert timing.host_call_us(call, 3, call_us) == 7.0
    assert [entry for entry in log if entry != "wait"] == [i % 3 for i in range(50)]
    batches = "".join("|" if entry == "wait" else "." for entry in log).strip("|").split("|")
    assert [len(each) for each in batches] == [min(batch, 50 - start) for start in range(0, 50, batch)]
    assert log[0] == log[-1] == "wait"


def test_replays_rotate_and_are_timed_per_call(cuda):
    used = []

    def call(slot):
        cuda.launch(lambda: used.append(slot), ms=0.1 if slot else 0.4)
        return torch.zeros(1)

    captured = timing.capture(call, slots=3, count=2)
    assert used == [0, 1, 2], "one eager rotation"
    assert captured.calls == 6 and len(captured.outputs) == 3
    times = timing.replay_times(captured)
    assert used == [0, 1, 2] * (len(used) // 3)
    assert times == pytest.approx([200.0] * len(times))  # (0.4 + 0.1 + 0.1) / 3 ms
    assert len(times) == int(timing.MEASURED_MS / 1.2)
    warm = len(used) // 6 - len(times)
    assert warm * 1.2 >= timing.WARM_MS


def test_spread():
    spread = timing.Spread.of([float(i) for i in range(101)])
    assert (spread.p10, spread.median, spread.p90) == (10, 50, 90)


def test_a_run_measures_checks_and_reports(few_calls):
    cuda, seen = few_calls, []
    peer = reference(cuda, ms=0.03, name="slower")
    outcome = measure.run(SMALL, CPU, ours=reference(cuda), peers=[peer], repeat=2, progress=seen.append)
    assert not outcome.failures and not outcome.skipped
    assert seen == outcome.rows and [row.name for row in seen] == [shape.name for shape in SMALL]
    row = outcome.rows[1]
    assert row.us == row.us_p10 == row.us_p90 == 20
    assert row.ratio == pytest.approx(20 / row.target_us, rel=1e-3)
    assert row.tb_s == pytest.approx(row.kv_bytes / 20e-6 / 1e12, abs=1e-4)
    assert (row.lens, row.q_len, row.layout, row.rel_err_seqs) == ([200, 3, 64], 3, "HND", [0, 1])
    assert (row.caches, row.replays) == (2, 2 * timing.MIN_REPLAYS)
    assert 0 < row.rel_err < 5e-3 and row.host_us > 0 and row.plan_us > 0
    assert (row.peers, row.peer_notes) == ({"slower": None}, {"slower": "one token only"})
    assert outcome.rows[-1].fixed_split == 64 and outcome.rows[-1].peer_notes == {"slower": measure.NO_FIXED_SPLIT}
    first = outcome.rows[0]
    assert (first.peers, first.peer_notes) == ({"slower": 30}, {})
    assert 0 < first.peer_rel_err["slower"] < 5e-3

    full = Report({"device": "fake"}, {}, 4.6, outcome.rows, [Failure("x", "mjolnir", "E: y")], ["z"], 1.0)
    text = full.to_json()
    assert Report.from_json(text) == full
    assert sum(line.startswith('  {"name"') for line in text.splitlines()) == len(SMALL), "one row a line"
    console = Console(width=200)
    with console.capture() as capture:
        console.print(report.render(full))
    printed = capture.get()
    assert "geometric mean" in printed and "FAILED x (mjolnir): E: y" in printed and "no time left: z" in printed
    assert "slower" in printed and "30.0" in printed and "fp8 hard" in printed


@pytest.mark.parametrize(
    ("break_output", "message"),
    [
        (lambda out: out.fill_(math.nan), "over cache 0 of 2 is not finite"),
        (lambda out: out[-1].fill_(math.inf), "over cache 0 of 2 is not finite"),
        (lambda out: out.mul_(1.01), r"relative error \d.\d+e-02, expected at most 5e-03"),
    ],
)
def test_a_wrong_output_has_no_time(few_calls, break_output, message):
    ours = reference(few_calls, break_output=break_output)
    outcome = measure.run(SMALL[:1], CPU, ours=ours, peers=[reference(few_calls, name="peer")])
    assert not outcome.rows
    assert re.search(message, outcome.failures[0].error)


def test_a_peer_that_fails_costs_only_its_own_time(few_calls):
    peer = reference(few_calls, name="peer", break_output=lambda out: out.fill_(math.nan))
    rough = reference(few_calls, name="rough", break_output=lambda out: out.mul_(1.25))
    outcome = measure.run(SMALL[:1], CPU, ours=reference(few_calls), peers=[peer, rough])
    row = outcome.rows[0]
    assert row.peers == {"peer": None, "rough": 20} and not outcome.failures
    assert "over cache 0 of 2 is not finite" in row.peer_notes["peer"]
    assert row.peer_rel_err == {"rough": pytest.approx(0.25, abs=0.01)}
    table = report.render(Report({}, {}, 4.6, outcome.rows, [], [], 1.0))
    console = Console(width=250)
    with console.capture() as capture:
        console.print(table)
    assert "20.0!" in capture.get() and "peer, 1 rows without a time: ArithmeticError" in capture.get()


def test_a_run_is_saved_as_it_goes_and_says_which_peer_it_ended_with(few_calls, monkeypatch):
    """What the file would hold, had the process ended while a peer ran."""
    saved = []
    peers = [reference(few_calls, name=name) for name in ("first", "second")]
    lost = iter([True] * 2 + [False] * 9)  # before the shape and after the first peer: alive
    monkeypatch.setattr(measure, "_alive", lambda device: next(lost))
    outcome = measure.run(
        SMALL[:3], CPU, ours=reference(few_calls), peers=peers, save=lambda o: saved.append(list(o.rows))
    )
    assert [[row.peers for row in rows] for rows in saved[:2]] == [
        [{"first": None, "second": None}], [{"first": 20, "second": None}],
    ]  # fmt: skip
    assert saved[1][0].peer_notes == {"second": measure.PENDING}
    assert [(failure.peer, failure.error) for failure in outcome.failures] == [("second", "the device was lost")]
    assert outcome.skipped == [shape.name for shape in SMALL[1:3]]


def test_no_shape_is_started_once_the_budget_is_spent(few_calls):
    outcome = measure.run(SMALL, CPU, ours=reference(few_calls), budget_s=-1)
    assert outcome.skipped == [shape.name for shape in SMALL] and not outcome.rows


def test_the_reference_backend_is_not_benchmarked(two_caches):
    outcome = measure.run(SMALL[:1], CPU, ours=Mjolnir())
    assert "only compiled kernels are worth timing, got reference" in outcome.failures[0].error


# Rows


def example(**changes) -> Row:
    fields = dict(
        name="32/8-2x64-d128-p64-nhd-fp8-q1", heads_q=32, heads_kv=8, head_dim=128, page_size=64, layout="NHD",
        kv_format="fp8", q_len=1, data="normal", fixed_split=0, batch="2x64", lens=[64, 64], us=5.0,
        us_p10=4.9, us_p90=5.2, kv_bytes=262144, floor_us=0.057, target_us=4.059, ratio=1.2318, tb_s=0.0524,
        rel_err=1.7e-3, rel_err_seqs=[0, 1], host_us=9.5, plan_us=40.0, caches=917, calls=917, replays=20,
        peers={"fa3": 11.8}, peer_rel_err={"fa3": 0.02}, peer_notes={},
    )  # fmt: skip
    return Row(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"us": "5"}, "us must be"),
        ({"us": math.nan}, "us must be finite"),
        ({"rel_err": math.inf}, "rel_err must be finite"),
        ({"lens": [64, 64.5]}, "lens must be"),
        ({"lens": "2x64"}, "lens must be"),
        ({"q_len": True}, "q_len must be"),
        ({"peers": {"fa3": "11.8"}}, "peers must be"),
        ({"peers": {"fa3": None}}, "peer_notes must say why there is no time, and only then: fa3"),
        ({"peer_notes": {"fa3": "no reason"}}, "peer_notes must say why there is no time, and only then: fa3"),
        ({"us_p10": 5.1}, "must ascend"),
        ({"ratio": 1.0}, "ratio must be us / target_us"),
    ],
)
def test_rows_are_checked(changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        example(**changes)


def test_reports_are_checked():
    text = Report({"commit": "c"}, {}, 4.6, [example()], [], [], 2.0).to_json()
    assert json.loads(text)["method"] == METHOD and json.loads(text)["commit"] == "c"
    without = json.loads(text)
    del without["rows"][0]["rel_err"]
    with pytest.raises(TypeError, match="rel_err"):
        Report.from_json(json.dumps(without))


def test_the_method_says_what_the_harness_does():
    assert f"{REUSE_BYTES // 10**6} MB" in METHOD
    shape = Shape(8, 1, "1x1K")
    assert shape.target_us == pytest.approx(1.04 * shape.floor_us + 4) and "1.04 * floor_us + 4" in METHOD


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=20))
def test_geometric_mean(values):
    assert geometric_mean(values) == pytest.approx(math.prod(values) ** (1 / len(values)))


# Bounds of a release


def gate_rows():
    slow = dict(us=5.3, us_p10=5.2, us_p90=5.4, ratio=5.3 / 4.059)
    return [
        example(name="a", us=4.059, us_p10=4.0, us_p90=4.1, ratio=1.0, peers={"x": 8.118, "y": 16.0},
                peer_rel_err={"x": 0.02, "y": 0.02}),
        example(name="b", **slow, peers={"x": 5.0, "y": None}, peer_rel_err={"x": 0.02}, peer_notes={"y": "why"}),
        example(name="c", peers={}, peer_rel_err={}),
        example(name="d", us=50.0, us_p90=50.0, ratio=50 / 4.059, data="hard"),
        example(name="e", us=50.0, us_p90=50.0, ratio=50 / 4.059, fixed_split=2048),
    ]  # fmt: skip


def test_gates_are_over_rows_of_normal_data_and_name_what_missed():
    mean, worst, slower, lead = gates(gate_rows())
    ratios = 1.0, 5.3 / 4.059, 5.0 / 4.059
    assert (mean.rows, mean.passed) == (3, False)
    assert mean.value == pytest.approx(math.prod(ratios) ** (1 / 3), abs=1e-3)
    assert (worst.value, worst.missed, worst.passed) == (pytest.approx(ratios[1], abs=1e-3), ["b", "c"], False)
    assert (slower.rows, slower.missed, slower.value) == (2, ["b"], 1.06)
    assert (lead.rows, lead.passed, lead.missed) == (2, True, [])
    assert lead.value == pytest.approx(math.sqrt(2 * 5.0 / 5.3), abs=1e-3)
    assert fastest_peer(gate_rows()[0]) == ("x", 8.118) and fastest_peer(gate_rows()[2]) is None
    assert all(gate.passed for gate in gates(gate_rows()[:1]))
    assert [gate.passed for gate in gates(gate_rows()[2:])] == [False, False, None, None]
    lines = report.summary(gate_rows())
    assert lines[1].startswith("MISSED us / target, worst row over 3 rows: 1.306 (limit 1.15), 2 rows: b, c")
    stored = json.loads(Report({}, {}, 4.6, gate_rows(), [], [], 1.0).to_json())["gates"]
    assert [gate["value"] for gate in stored] == [mean.value, worst.value, slower.value, lead.value]


# Going on with an earlier run


def test_rows_that_are_done_are_kept_in_the_suite_s_order(tmp_path):
    top = {"source": "s", "device": "H200"}
    names = [shape.name for shape in suite("quick")]
    rows = [example(name=name) for name in names]
    options = Options("quick", peers=("fa3",))
    earlier = Report(top, options.as_json(), 4.6, rows[:2], [], names[2:], 2.0)
    write(tmp_path / "r.json", earlier)
    write(tmp_path / "r.json", earlier)
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    loaded = Report.load(tmp_path / "r.json")
    assert done(loaded, top, options) == rows[:2]
    assert done(loaded, top, Options("quick", peers=("fa3", "xqa"))) == [], "measured without that peer"
    assert in_order("quick", [example(name="other"), *reversed(rows)]) == [*rows, example(name="other")]
    for what, others in (("source", ({"source": "t", "device": "H200"}, options)),
                         ("device", ({"source": "s", "device": "H100"}, options)),
                         ("knobs", (top, Options("quick", knobs=Knobs(pdl=False))))):  # fmt: skip
        with pytest.raises(ValueError, match=f"skip_done must go on with a report of {what}"):
            done(loaded, *others)


@pytest.fixture
def fake_run(monkeypatch):
    """``measure.run`` of the first shape only, as if the budget had been spent; what it was given."""
    seen = []

    def run(shapes, device, *, save, **options):
        seen.append(([shape.name for shape in shapes], options))
        outcome = measure.Outcome()
        if shapes:
            names = [peer.name for peer in options["peers"]]
            outcome.rows.append(example(name=shapes[0].name, peers=dict.fromkeys(names, 1.0),
                                        peer_rel_err=dict.fromkeys(names, 0.0)))  # fmt: skip
            save(outcome)
            outcome.skipped = [shape.name for shape in shapes[1:]]
        return outcome

    monkeypatch.setattr(measure, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(command, "header", lambda device: {"source": "s", "device": str(device)})

    def load(folder, shapes, names):
        return [types.SimpleNamespace(name=name) for name in names]

    monkeypatch.setattr(command.peers, "load", load)
    return seen


def test_a_run_that_was_cut_goes_on(fake_run, tmp_path):
    path, options = tmp_path / "decode.json", Options("quick", peers=("fa3",))
    names = [shape.name for shape in options.shapes()]
    for count in range(1, 4):
        report = command.run_bench(options, peers_folder=tmp_path, json_path=path, skip_done=True)
        saved = Report.load(path)
        assert [row.name for row in saved.rows] == [row.name for row in report.rows] == names[:count]
        assert report.skipped == names[count:] and report.seconds >= saved.seconds >= 0
        assert fake_run[-1][0] == names[count - 1 :]
    command.run_bench(dataclasses.replace(options, shard="2/2"), peers_folder=tmp_path, json_path=path, skip_done=True)
    assert fake_run[-1][0] == names[3::2], "the second of the first three is in that shard, and done"
    command.run_bench(options, peers_folder=tmp_path, json_path=path)
    assert fake_run[-1][0] == names and len(Report.load(path).rows) == 1, "from the beginning"


def test_a_run_with_peers_needs_their_folder(fake_run, tmp_path):
    with pytest.raises(ValueError, match="--peer needs --peers DIR, the folder that has fa3"):
        command.run_bench(Options("quick", peers=("fa3",)))
    with pytest.raises(ValueError, match="--skip-done needs --json FILE"):
        command.run_bench(Options("quick"), skip_done=True)
    assert not fake_run


# Command line


def invoke(*args: str):
    return CliRunner().invoke(cli.app, list(args))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_bench_refuses_without_a_gpu(tmp_path):
    result = invoke("bench", "--suite", "quick", "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "error: bench needs a CUDA device, and torch.cuda.is_available() is False: see `mjolnir doctor`"
    ]
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--suite", "huge"), "suite must be one of quick, core, full, lowbit, got 'huge'"),
        (("--data", "easy"), "data must be one of 'normal', 'hard', got 'easy'"),
        (("--shape", "d512"), "'d512' is in none of"),
        (("--peer", "fa3"), "--peer needs --peers DIR, the folder that has fa3"),
        (("--skip-done",), "--skip-done needs --json FILE, the file whose rows it keeps"),
        (("--json", "/"), "--json must name a file, got the folder /"),
        (("--kv-stages", "0"), "'--kv-stages'"),
    ],
)
def test_bench_refuses(args, message):
    result = invoke("bench", *args)
    assert result.exit_code == 2 and message in result.stderr


def test_bench_passes_its_options(monkeypatch, tmp_path):
    seen = {}

    def fake(options, progress, **files):
        seen["options"], seen["files"] = options, files
        progress(example())
        return Report({"device": "fake"}, options.as_json(), 4.6, [example()], seen["failures"], [], 1.0)

    monkeypatch.setattr("mjolnir.bench.command.run_bench", fake)
    path = tmp_path / "new" / "decode.json"
    args = ("bench --suite quick --shape 1x8K --shape q4 --data normal --budget-s 30 --repeat 3 --ctas-per-sm 1 "
            f"--kv-stages 8 --l2-prefetch 2 --max-splits 4 --no-pdl --json {path}").split()  # fmt: skip
    seen["failures"] = []
    assert invoke(*args).exit_code == 0
    knobs = Knobs(ctas_per_sm=1, max_splits=4, kv_stages=8, pdl=False, l2_prefetch=2)
    assert seen["options"] == Options("quick", ("1x8K", "q4"), "normal", 3, 30.0, knobs)
    loaded = Report.load(path)
    assert loaded.rows == [example()] and loaded.options["knobs"]["kv_stages"] == 8
    assert seen["files"] == dict(peers_folder=None, json_path=path, skip_done=False)
    assert invoke(*args, "--gate").exit_code == 3, "a ratio of 1.23"
    assert invoke(*args, "--peers", str(tmp_path), "--skip-done", "--shard", "2/3").exit_code == 0
    assert seen["options"].peers == NAMES and seen["options"].shard == "2/3"
    assert seen["files"] == dict(peers_folder=tmp_path, json_path=path, skip_done=True)
    assert invoke(*args, "--peers", str(tmp_path), "--peer", "fa3").exit_code == 0
    assert seen["options"].peers == ("fa3",)
    seen["failures"] = [Failure("x", "mjolnir", "E: y")]
    assert invoke(*args).exit_code == 1


def test_bench_and_compile_list_a_suite():
    result = invoke("bench", "--suite", "core", "--list")
    assert result.output.split() == [shape.name for shape in suite("core")]
    result = invoke("compile", "--suite", "core", "--list")
    assert result.output.split() == [variant.name for variant in variants_for_suite("core")]


@pytest.mark.gpu
def test_a_shape_on_the_gpu():
    shapes = select(suite("quick"), ["32/8-1x8K"])
    outcome = measure.run(shapes, torch.device("cuda", torch.cuda.current_device()), ours=Mjolnir())
    assert not outcome.failures
    assert outcome.rows[0].tb_s < 5, "faster than the memory: the caches were warm"


# Documents


@pytest.fixture(scope="module")
def update_docs():
    spec = importlib.util.spec_from_file_location("update_docs", CHECKOUT / "scripts" / "update_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_documents_are_made_from_the_committed_results():
    done = subprocess.run(
        [sys.executable, "scripts/update_docs.py", "--check"], cwd=CHECKOUT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def checkout(tmp_path, update_docs):
    results = tmp_path / update_docs.RESULTS
    results.mkdir(parents=True)
    rows = [
        example(batch="16x8K"),
        example(name="hnd", layout="HND"),
        example(
            name="mixed",
            batch="32mixed",
            lens=list(parse_lengths("32mixed")),
            peers={"fa3": None, "xqa": 7.2},
            peer_rel_err={"xqa": 0.03},
            peer_notes={"fa3": "why"},
        ),
        example(name="hard", data="hard", ratio=2.464, us=10.0, us_p90=10.0),
        example(name="hnd-split2048", fixed_split=2048, ratio=2.464, us=10.0, us_p90=10.0),
    ]
    header = {"commit": "0123456789abcdef", "device": "H200", "driver": "580", "date": "2026-01-02T03:04:05+00:00"}
    (results / "decode.json").write_text(Report(header, {}, 4.6, rows, [], [], 2.0).to_json(), encoding="utf-8")
    (tmp_path / "README.md").write_text(
        "# Title\n<!-- table: decode -->\nold\n<!-- /table -->\n"
        "worst <!-- num: decode.worst -->9<!-- /num --> of <!-- num: decode.rows --><!-- /num -->\n"
        "<!-- table: verify --><!-- /table -->\n<!-- table: gates --><!-- /table -->\n"
        "<!-- table: bandwidth --><!-- /table -->\n",
        encoding="utf-8",
    )
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "all.md").write_text("<!-- table: decode-all --><!-- /table -->", encoding="utf-8")
    return tmp_path


def every_split(update_docs, checkout):
    return update_docs.update("<!-- table: fixed-splits --><!-- /table -->", checkout / update_docs.RESULTS)


def test_update_docs(update_docs, checkout, capsys):
    root = ["--root", str(checkout)]
    assert update_docs.main(["--check", *root]) == 1
    assert "README.md is stale" in capsys.readouterr().err
    assert update_docs.main(root) == 0
    readme = (checkout / "README.md").read_text(encoding="utf-8")
    assert "| 32/8 | 16 × 8K | 0.1 | 4.1 | 5.0 | 1.23 | 0.05 | 11.8 | – |" in readme
    assert "| 32/8 | 32 × 162 … 56,513 | 0.1 | 4.1 | 5.0 | 1.23 | 0.05 | – | 7.2 |" in readme
    assert "| us / target, worst row | 3 | 1.232 | ≤ 1.15, **missed** by 3 |" in readme
    assert "| fastest peer / us, geometric mean | 3 | 2.002 | ≥ 1.35 |" in readme
    assert "H200, driver 580, commit 012345678, 2026-01-02" in readme
    assert "old" not in readme and readme.count("| 32/8 |") == 2, "NHD and normal data only"
    assert "<!-- table: bandwidth -->\n\nnot measured yet\n\n<!-- /table -->" in readme
    assert "worst <!-- num: decode.worst -->1.23<!-- /num --> of <!-- num: decode.rows -->5<!-- /num -->" in readme
    assert "<!-- table: verify -->\n\nnot measured yet\n\n<!-- /table -->" in readme
    assert "| 32/8 | 2 × 64 | 2048 | 5.0 | 10.0 | +100 % |" in every_split(update_docs, checkout)
    every = (checkout / "docs" / "all.md").read_text(encoding="utf-8")
    assert "| 64 NHD | fp8, hard |" in every and "| 7.2 xqa | 1.7e-03 |" in every
    assert update_docs.main(["--check", *root]) == 0, "the same again"
    assert update_docs.main(root) == 0 and (checkout / "README.md").read_text(encoding="utf-8") == readme


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, CHECKOUT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_plot_s_points_are_bandwidths():
    plot = load_script("plot_bandwidth")
    series = plot.points(gate_rows())
    assert list(series) == ["x", "y", "mjolnir"]
    assert series["x"] == [(262144, pytest.approx(262144 / 8.118e6)), (262144, pytest.approx(262144 / 5e6))]
    assert len(series["y"]) == 1 and len(series["mjolnir"]) == 3, "normal data only"
    assert plot.bound([4.6e6, 4.6e9], plot.floor_us) == pytest.approx([4.6, 4.6])
    assert plot.bound([4.6e6, 4.6e9], plot.target_us) == pytest.approx([4.6 / 5.04, 4600 / 1044])


def test_the_plot_is_made_from_the_file_and_a_stale_one_is_told(update_docs, checkout, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    results, plot = checkout / update_docs.RESULTS, load_script("plot_bandwidth")
    files = [str(results / name) for name in ("decode.json", "bandwidth.svg")]
    assert plot.main(files) == 0
    picture = (results / "bandwidth.svg").read_text(encoding="utf-8")
    assert plot.main(files) == 0 and (results / "bandwidth.svg").read_text(encoding="utf-8") == picture
    assert "xqa" in picture or "<use" in picture, "text may be drawn as paths"
    root = ["--root", str(checkout)]
    assert update_docs.main(root) == 0
    link = "![Achieved bandwidth against KV bytes of a call](benchmarks/results/h200/bandwidth.svg)"
    assert link in (checkout / "README.md").read_text(encoding="utf-8")
    (results / "decode.json").write_text((results / "decode.json").read_text(encoding="utf-8") + " ", encoding="utf-8")
    assert update_docs.main(root) == 1
    assert "bandwidth.svg is not of this decode.json: run scripts/plot_bandwidth.py" in capsys.readouterr().err
    assert plot.main([str(checkout / "none.json"), files[1]]) == 1


def test_update_docs_summarises_verify(update_docs, checkout):
    from mjolnir.verify import main as verify

    rows = [
        verify.Row("a", "cute", 1.2e-4, 1.6e-3, 2e-6, {"ones": True, "mean": True}, []),
        verify.Row("b", "cute", 5e-4, 1.7e-3, math.inf, {"ones": True, "mean": False}, ["O is off"]),
    ]
    record = verify._record(rows, CPU, "cute")
    (checkout / update_docs.RESULTS / "verify.json").write_text(json.dumps(record), encoding="utf-8")
    text = update_docs.update("<!-- table: verify --><!-- /table -->", checkout / update_docs.RESULTS)
    assert "| cases passed | 1 of 2 | all |" in text
    assert "| O, worst row, beyond the output's rounding | 5.0e-04 | 3e-04 |" in text
    assert "| LSE, relative to max(1, LSE) | not finite | 1e-05 |" in text
    assert "| exact probes passed | 3 of 4 | all |" in text


@pytest.mark.parametrize(
    "text",
    [
        "<!-- table: decode -->",
        "<!-- /table -->",
        "<!-- table: nonsense --><!-- /table -->",
        "<!-- table: decode --><!-- num: decode.rows --><!-- /num --><!-- /table -->",
        "<!-- num: decode.rows --><!-- /table -->",
    ],
)
def test_update_docs_refuses_markers_it_cannot_follow(update_docs, checkout, text):
    (checkout / "README.md").write_text(text, encoding="utf-8")
    assert update_docs.main(["--root", str(checkout)]) == 1
    assert (checkout / "README.md").read_text(encoding="utf-8") == text


@pytest.mark.parametrize(("kv_format", "row"), [("e2m3", 96), ("nvfp4", 64 + 8)])
def test_low_bit_shapes_count_their_own_bytes_and_block_scales(two_caches, kv_format, row):
    shape = Shape(4, 2, "1x64+1x70", page_size=16, kv_format=kv_format, layout="HND")
    assert shape.kv_bytes == 2 * 2 * row * (64 + 70)
    assert shape.floor_us == pytest.approx(shape.kv_bytes / 4.6e6)
    case = Case(shape, KVPool([shape], CPU))
    tensors = [t for pair in (*case.caches, *(case.block_scales or ())) for t in pair]
    assert sum(t.numel() for t in tensors) == shape.slots * shape.cache_bytes
    fmt = get_format(kv_format)
    blocks = None if case.block_scales is None else case.block_scales[1][0]
    values = fmt.decode(case.caches[1][0], blocks)
    assert values.std() == pytest.approx(1, abs=0.05) and abs(values.mean()) < 0.05
    assert case.rel_err(Mjolnir(require_kernels=False).prepare(case).call(1), 1) < 2e-3
