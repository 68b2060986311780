"""On a GPU: streams, threads, devices, and workspaces and staging buffers that others have used."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import Problem
from running import assert_oracle, decode, make_outputs, make_problem, make_runner, run

from mjolnir import DecodeRunner
from mjolnir.kernels.geometry import UNSET
from mjolnir.plan import ARRIVE, DYNAMIC_ABOVE, PAIRED, PLAN_COLUMNS, PLAN_TILE, WAIT
from mjolnir.verify.compare import compare

pytestmark = pytest.mark.gpu

LENS = (5000, 700, 64, 1, 130, 0, 2000)


def assert_same(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def two_problems() -> tuple[Problem, Problem]:
    return make_problem(LENS, "cuda", page_size=16), make_problem(LENS[::-1], "cuda", head_size=64, seed=1)


def test_compiled_kernels_run_here() -> None:
    """Else every GPU test would pass on the reference backend."""
    assert make_runner(make_problem(LENS, "cuda")).backend == "cute"


def test_two_runners_on_two_streams() -> None:
    problems = two_problems()
    runners = [make_runner(problem) for problem in problems]
    want = [run(runner, problem) for runner, problem in zip(runners, problems, strict=True)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results = []
    for _ in range(100):
        for stream, runner, problem in zip(streams, runners, problems, strict=True):
            with torch.cuda.stream(stream):
                results.append(run(runner, problem, host_lens=LENS if problem is problems[0] else LENS[::-1]))
    torch.cuda.synchronize()
    for i, result in enumerate(results):
        assert_same(result, want[i % 2])
    for problem, result in zip(problems, want, strict=True):
        assert_oracle(problem, *result)


def test_two_threads() -> None:
    """Each with its stream; they make their runners, load their kernels and launch at the same time."""
    problems, start = two_problems(), threading.Barrier(2)

    def work(which: int) -> list[tuple[torch.Tensor, ...]]:
        lens = list(LENS if which == 0 else LENS[::-1])
        with torch.cuda.stream(torch.cuda.Stream()):
            start.wait(timeout=60)
            runner = make_runner(problems[which])
            results = [run(runner, problems[which], host_lens=lens) for _ in range(100)]
            torch.cuda.current_stream().synchronize()
        return results

    torch.cuda.synchronize()
    with ThreadPoolExecutor(2) as pool:
        everything = list(pool.map(work, range(2)))
    for problem, results in zip(problems, everything, strict=True):
        assert_oracle(problem, *results[0])
        for result in results:
            assert_same(result, results[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_runner_on_another_device_than_the_current_one() -> None:
    problem = make_problem(LENS, "cuda:1")
    assert torch.cuda.current_device() == 0
    assert_oracle(problem, *decode(problem))
    assert_oracle(make_problem(LENS, "cuda:0"), *decode(make_problem(LENS, "cuda:0")))


def spoil(runner: DecodeRunner, counters: int) -> None:
    """What a stray write may leave: a plan and counters of anything. Partial results are another matter: they are empty
    between launches, and only a launch that broke the CUDA context leaves them otherwise."""
    for buffer in runner._cute._plan_buffers.values():
        buffer.device.fill_(counters)


@pytest.mark.parametrize("counters", [1, 7, -1])
def test_a_plan_heals_a_spoilt_workspace(counters: int) -> None:
    problem = make_problem(LENS, "cuda", page_size=16, q_len=2)
    runner = make_runner(problem)
    want = run(runner, problem)
    assert_oracle(problem, *want)
    spoil(runner, counters)
    assert_same(run(runner, problem), want)


def workspace_of(runner: DecodeRunner, q_len: int) -> tuple[int, torch.Tensor]:
    """(mode of the plan that is there, ticket and counters)."""
    buffer = runner._cute._plan_buffers[q_len]
    rows_end = (1 + buffer.shape.num_rows) * PLAN_COLUMNS
    return int(buffer.device[2]), torch.cat((buffer.device[1:2], buffer.device[rows_end:]))


@pytest.mark.parametrize(("q_len", "head_size"), [(1, 128), (1, 256), (1, 64), (4, 128)])
def test_every_slot_is_empty_again_after_a_run(q_len: int, head_size: int) -> None:
    """Whatever the way of merging, and from one to the next: a waiting row takes what it finds for a result. The plans
    are for other lengths than the live ones, which decide how splits are merged."""
    problem = make_problem(LENS, "cuda", page_size=16, q_len=q_len, head_size=head_size)
    runner = make_runner(problem)
    plans = {
        WAIT: [min(n, 32 * PLAN_TILE) for n in LENS],
        PAIRED: LENS,
        ARRIVE: [DYNAMIC_ABOVE * PLAN_TILE * 132, *LENS[1:]],
    }
    want = {}
    for mode in (WAIT, PAIRED, ARRIVE, PAIRED, ARRIVE, WAIT, WAIT):
        result = run(runner, problem, host_lens=list(plans[mode]))
        torch.cuda.synchronize()
        made, counters = workspace_of(runner, q_len)
        assert made == mode
        assert not counters.any()
        for partials in runner._cute._partials.values():
            assert partials.dtype == torch.int32 and (partials == UNSET).all()
        assert_oracle(problem, *result)
        assert_same(result, want.setdefault(mode, result))


def test_kernels_whose_rows_wait_share_the_gpu() -> None:
    """On streams of two priorities, so that one takes SMs from the other before all of its CTAs have begun: those that
    have must not wait for those that have not. More rows than SMs: CTAs have two each."""
    problem = make_problem([1000] * 16, "cuda", page_size=16)
    runners = [make_runner(problem) for _ in range(2)]
    want = run(runners[0], problem)
    assert_oracle(problem, *want)
    assert workspace_of(runners[0], 1)[0] == WAIT
    streams = [torch.cuda.Stream(priority=priority) for priority in (0, -1)]
    other, matrix = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda")
    torch.cuda.synchronize()
    results = []
    for _ in range(300):
        with torch.cuda.stream(other):
            matrix @ matrix
        for runner, stream in zip(runners, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(run(runner, problem, host_lens=[1000] * 16))
    torch.cuda.synchronize()
    for result in results:
        assert_same(result, want)


def test_each_run_sees_the_plan_queued_before_it() -> None:
    """Plans queued behind a slow kernel: an earlier plan's pinned buffer must not be used again before its copy has
    run. Another plan splits elsewhere, and so rounds otherwise."""
    problem = make_problem(LENS, "cuda", page_size=16)
    runner = make_runner(problem)
    host_lens = [[max(1, (n * (i % 13 + 1)) // 7) for n in LENS] for i in range(64)]
    want = []
    for lens in host_lens:
        want.append(run(runner, problem, host_lens=lens))
        torch.cuda.synchronize()
    assert len({tuple(lse.flatten().tolist()) for _, lse in want}) > 1  # so a wrong plan shows
    outputs = [make_outputs(problem, runner) for _ in host_lens]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # about 100 ms, in which the host queues everything
    for lens, (out, lse) in zip(host_lens, outputs, strict=True):
        run(runner, problem, out, lse, host_lens=lens)
    for got, expected in zip(outputs, want, strict=True):
        assert_same(got, expected)
    assert_oracle(problem, *outputs[-1])


def test_the_same_call_gives_the_same_bits() -> None:
    """A hundred times, among them with other work on the GPU that shifts which CTA is done first."""
    problem = make_problem((20_000, *LENS), "cuda", page_size=16)
    runner = make_runner(problem)
    want = run(runner, problem)
    other, matrix = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    results = []
    for i in range(100):
        if i % 2:
            with torch.cuda.stream(other):
                matrix @ matrix
        results.append(run(runner, problem))
    torch.cuda.synchronize()
    for result in results:
        assert_same(result, want)


@pytest.mark.parametrize("tokens", [10_000, 21_000, 90_000, 131_072, 140_000])
def test_one_sequence_over_every_cta(tokens: int) -> None:
    """One KV head: from a few splits to more than 256, merged in one step or two, and in every way: as pairs, as splits
    that arrive at counters, and, where a CTA has no halves, as splits that wait."""
    problem = make_problem([tokens], "cuda", heads=4, kv_heads=1)
    expected = problem.oracle()
    for mode, tuning in ((PAIRED, {}), (ARRIVE, {"max_splits": 400}), (WAIT, {"ctas_per_sm": 1})):
        runner = make_runner(problem, **tuning)
        want = run(runner, problem)
        assert workspace_of(runner, 1)[0] == mode
        faults = compare(*want, *expected).faults(torch.float16)
        assert not faults, (tuning, faults)
        assert_same(run(runner, problem), want)


def test_rows_that_end_one_long_item_and_begin_the_next() -> None:
    """Long items next to each other, the first cut into 24 to 34 splits: at 25 and 33 the merge in two steps leaves a
    team of one, whose row leads a team of the next item too, and both count arrivals. On few SMs, so that few tokens
    do; with a bound of splits that none meets, since rows would be aligned to these items otherwise."""
    problem = make_problem([168_000, 170_000], "cuda", heads=4, kv_heads=1, head_size=64)
    expected = problem.oracle()
    for sm_count in range(24, 35):
        runner = make_runner(problem, sm_count=sm_count, max_splits=64)
        want = run(runner, problem)
        assert workspace_of(runner, 1)[0] == ARRIVE
        faults = compare(*want, *expected).faults(torch.float16)
        assert not faults, (sm_count, faults)
        for _ in range(5):  # who arrives first is a matter of luck
            assert_same(run(runner, problem), want)


@pytest.mark.parametrize("neighbours", [0, 3, 40])
def test_without_splits_a_sequence_alone_and_in_a_batch_has_the_same_bits(neighbours: int) -> None:
    problem = make_problem([1500, 77], "cuda", page_size=16)

    def decode_batch(seqs: list[int]) -> tuple[torch.Tensor, ...]:
        cache = problem.cache
        cache = dataclasses.replace(cache, block_table=cache.block_table[seqs], seq_lens=cache.seq_lens[seqs])
        return decode(dataclasses.replace(problem, cache=cache, query=problem.query[seqs]), max_splits=1)

    alone = [decode_batch([0]), decode_batch([1])]
    batch = [1, *[0, 1] * neighbours, 0]
    out, lse = decode_batch(batch)
    for row, seq in enumerate(batch):
        assert_same((out[row : row + 1], lse[row : row + 1]), alone[seq])


@pytest.mark.parametrize("name", ["query", "k_cache", "k_scale", "q_mul", "lse"])
def test_a_tensor_on_the_host_is_refused_after_one_on_the_device(name: str) -> None:
    """Checks are remembered per layout: a host tensor of a layout seen before must not pass as a device address."""
    problem = make_problem((65, 1), "cuda")
    problem.q_mul = torch.ones(8, 128, device="cuda")
    runner = make_runner(problem)
    out, lse = run(runner, problem)
    host = dataclasses.replace(problem)
    if name == "k_cache":
        host.cache = dataclasses.replace(problem.cache, k_cache=problem.cache.k_cache.cpu())
    elif name != "lse":
        setattr(host, name, getattr(problem, name).cpu())
    with pytest.raises(ValueError, match=f"{name} must be on cuda:0, got cpu"):
        run(runner, host, out, lse.cpu() if name == "lse" else lse)
    assert_oracle(problem, *run(runner, problem))
