"""On a GPU: captured graphs replayed with other lengths, block tables and plans; what cannot be captured; PDL."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from helpers import PagedCache, Problem
from running import assert_oracle, launch, make_outputs, make_problem, make_runner, run

import mjolnir.backends.cute
from mjolnir import env
from mjolnir.compiler import KernelCache

pytestmark = pytest.mark.gpu

SEQS, PAGE, POOL_PAGES, MAX_PAGES = 16, 16, 512, 128
UNTOUCHED = 7.0


def capture(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of ``call``; every kernel in it is compiled already."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call()
    return graph


def shared_pool(q_len: int = 1, num_seqs: int = SEQS, seed: int = 0) -> Problem:
    """A pool without a dead byte, whose pages any block table may name; lengths and block table are to be drawn."""
    filled = make_problem([POOL_PAGES * PAGE], "cuda", page_size=PAGE, seed=seed)
    problem = make_problem([1] * num_seqs, "cuda", q_len=q_len, page_size=PAGE, seed=seed)
    problem.cache = PagedCache(
        fmt=filled.cache.fmt,
        k_cache=filled.cache.k_cache,
        v_cache=filled.cache.v_cache,
        block_table=torch.full((num_seqs, MAX_PAGES), -1, dtype=torch.int32, device="cuda"),
        seq_lens=torch.zeros(num_seqs, dtype=torch.int32, device="cuda"),
        live_pages=filled.cache.live_pages,
        live_slots=filled.cache.live_slots,
    )
    return problem


def draw_step(problem: Problem, rng: random.Random) -> tuple[list[int], int]:
    """New lengths and pages, in place; returns the lengths and how many sequences live. Entries past a sequence's last
    page are -1, and the rows of the others are dead: lengths of 0 or of anything."""
    live = rng.randint(1, SEQS)
    longest = rng.choice([20, 200, 600, MAX_PAGES * PAGE])
    lens = [rng.choice([0, 1, PAGE, rng.randint(0, longest)]) for _ in range(live)]
    lens += [rng.choice([0, 5])] * (SEQS - live)
    live_pages = problem.cache.live_pages[::PAGE]  # a permutation of the pages
    pages = live_pages[torch.randint(len(live_pages), (SEQS, MAX_PAGES), device="cuda")].int()
    problem.cache.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
    past = torch.arange(MAX_PAGES, device="cuda") * PAGE >= problem.cache.seq_lens[:, None]
    problem.cache.block_table.copy_(pages.masked_fill_(past, -1))
    return lens, live


def first_seqs(problem: Problem, count: int) -> Problem:
    """The problem of the first sequences only."""
    cache = problem.cache
    fewer = PagedCache(
        cache.fmt, cache.k_cache, cache.v_cache, cache.block_table[:count], cache.seq_lens[:count],
        cache.live_pages, cache.live_slots,
    )  # fmt: skip
    return Problem(fewer, problem.query, problem.q_len, problem.k_scale, problem.v_scale, problem.softmax_scale)


@pytest.mark.parametrize(("q_len", "replays", "sm_count"), [(1, 2000, None), (1, 500, 5), (4, 500, None)])
def test_a_graph_replays_any_later_plan(q_len: int, replays: int, sm_count: int | None) -> None:
    """Thousands of replays with other lengths, block tables and numbers of live sequences, each after a new plan: the
    same bits as eager, every hundredth against the oracle; rows of dead sequences stay untouched."""
    problem = shared_pool(q_len)
    runner = make_runner(problem, sm_count=sm_count)
    (out, lse), (eager_out, eager_lse) = make_outputs(problem, runner), make_outputs(problem, runner)
    rng = random.Random(q_len)
    lens, _ = draw_step(problem, rng)
    plan = runner.plan(lens, SEQS, q_len, problem.cache.block_table, problem.cache.seq_lens)
    launch(runner, plan, problem, out, lse)
    graph = capture(lambda: launch(runner, plan, problem, out, lse))
    for replay in range(replays):
        lens, live = draw_step(problem, rng)
        now = runner.plan(
            lens, live, q_len, problem.cache.block_table, problem.cache.seq_lens, margin=rng.choice([0, 0, 100])
        )
        problem.query.normal_()
        for t in (out, lse, eager_out, eager_lse):
            t.fill_(UNTOUCHED)
        graph.replay()
        launch(runner, now, problem, eager_out, eager_lse)
        assert torch.equal(out, eager_out) and torch.equal(lse, eager_lse), f"replay {replay}: {lens[:live]}"
        assert (out[live * q_len :] == UNTOUCHED).all()
        if replay % 100 == 0:
            assert_oracle(first_seqs(problem, live), out, lse)


def test_a_graph_replays_growing_lengths_without_a_new_plan() -> None:
    """Decode steps under one plan with a margin: each replay adds a token; the lengths outgrow the margin too."""
    problem = shared_pool()
    runner = make_runner(problem)
    out, lse = make_outputs(problem, runner)
    cache = problem.cache
    live_pages = cache.live_pages[::PAGE]
    cache.block_table.copy_(live_pages.repeat(SEQS * MAX_PAGES // len(live_pages)).view(SEQS, MAX_PAGES))
    lens = [3 + 61 * i for i in range(SEQS)]
    cache.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
    plan = runner.plan(lens, SEQS, 1, cache.block_table, cache.seq_lens, margin=100)

    def step() -> None:
        launch(runner, plan, problem, out, lse)
        cache.seq_lens.add_(1)

    step()
    graph = capture(step)
    for replay in range(300):
        problem.query.normal_()
        graph.replay()
        if replay % 50 == 0:
            cache.seq_lens.sub_(1)
            assert_oracle(problem, out, lse)
            cache.seq_lens.add_(1)


def test_a_graph_of_many_layers_shares_one_plan() -> None:
    """Twelve layers, each with its own query and descales, between them kernels that make those: as eager."""
    problem = shared_pool()
    runner = make_runner(problem)
    lens, _ = draw_step(problem, random.Random(1))
    layers = 12
    queries = torch.randn(layers, *problem.query.shape, device="cuda").bfloat16()
    outs = [make_outputs(problem, runner) for _ in range(layers)]
    plan = runner.plan(lens, SEQS, 1, problem.cache.block_table, problem.cache.seq_lens)

    def forward() -> None:
        for layer, (out, lse) in enumerate(outs):
            problem.query.copy_(queries[layer])
            problem.k_scale.fill_(1 + layer / 4)
            problem.v_scale.fill_(2 - layer / 8)
            launch(runner, plan, problem, out, lse)

    forward()
    eager = [(out.clone(), lse.clone()) for out, lse in outs]
    graph = capture(forward)
    for out, lse in outs:
        out.zero_(), lse.zero_()
    graph.replay()
    for layer, (got, want) in enumerate(zip(outs, eager, strict=True)):
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]), layer
        problem.query.copy_(queries[layer])
        problem.k_scale.fill_(1 + layer / 4)
        problem.v_scale.fill_(2 - layer / 8)
        assert_oracle(problem, *want)


@pytest.mark.parametrize("captured", [False, True])
def test_pdl_waits_for_the_kernel_before(captured: bool) -> None:
    """A chain in which each run's O is the next one's Q, and lengths and descales change in between: a kernel that
    reads any of them before the one before has finished gives other bits than the chain with a wait at every link."""
    links = 40
    problem = make_problem([4000, 700, 64, 1, 130], "cuda", page_size=PAGE, q_dtype=torch.float16)
    problem.softmax_scale = 8.0  # peaked weights: O follows Q closely
    runner = make_runner(problem)
    cache = problem.cache
    lens = [(cache.seq_lens - link % 3).clamp(min=0) for link in range(links)]
    first = problem.query.clone()
    outs = [torch.empty_like(first) for _ in range(links)]
    plan = runner.plan(cache.seq_lens.tolist(), 5, 1, cache.block_table, cache.seq_lens)

    def chain(after_each: Callable[[], None]) -> None:
        problem.query = first
        cache.seq_lens.copy_(lens[0])
        problem.v_scale.fill_(1)
        for link, out in enumerate(outs):
            if link % 2:
                cache.seq_lens.copy_(lens[link])
                problem.v_scale.fill_(1 + link / 100)
            launch(runner, plan, problem, out, None)
            problem.query = out
            after_each()

    chain(torch.cuda.synchronize)
    want = [out.clone() for out in outs]
    for out in outs:
        out.fill_(torch.nan)
    if captured:
        capture(lambda: chain(lambda: None)).replay()
    else:
        torch.cuda._sleep(20_000_000)  # the host runs ahead, so that every launch finds the one before unfinished
        chain(lambda: None)
    for link, (out, expected) in enumerate(zip(outs, want, strict=True)):
        assert torch.equal(out, expected), link


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has loaded no kernel yet."""
    cache = KernelCache(env.kernel_cache_folder())
    monkeypatch.setattr(mjolnir.backends.cute, "kernel_cache", lambda: cache)
    monkeypatch.setattr("mjolnir.compiler.kernel_cache", lambda: cache)


@pytest.mark.usefixtures("nothing_loaded")
def test_capture_without_the_kernel_is_an_error() -> None:
    problem = make_problem([100], "cuda")
    runner = make_runner(problem)
    out, lse = make_outputs(problem, runner)
    plan = runner.plan([100], 1, 1, problem.cache.block_table, problem.cache.seq_lens)
    assert not runner.is_compiled(1, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out.zero_()
        with pytest.raises(RuntimeError, match=r"not compiled .* captured: call precompile\(\) or ensure_compiled"):
            launch(runner, plan, problem, out, lse)


@pytest.mark.usefixtures("nothing_loaded")
def test_the_first_run_may_be_captured() -> None:
    """precompile() is all that a capture needs."""
    problem = make_problem([100], "cuda")
    runner = make_runner(problem)
    out, lse = make_outputs(problem, runner)
    plan = runner.plan([100], 1, 1, problem.cache.block_table, problem.cache.seq_lens)
    runner.precompile(torch.bfloat16)
    assert runner.is_compiled(1, torch.bfloat16)
    capture(lambda: launch(runner, plan, problem, out, lse)).replay()
    assert_oracle(problem, out, lse)


def test_capture_of_a_host_plan_is_an_error() -> None:
    problem = make_problem([100], "cuda")
    runner = make_runner(problem)
    before = run(runner, problem)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        before[0].mul_(1)
        with pytest.raises(RuntimeError, match="host lengths cannot be captured"):
            runner.plan([100], 1, 1, problem.cache.block_table, problem.cache.seq_lens)
    assert_oracle(problem, *run(runner, problem))


def test_a_packed_query_and_output_are_captured_too() -> None:
    """Rows that the kernel cannot take in place are copied inside the graph, from and to where they lie."""
    problem = make_problem([300, 20, 1], "cuda")
    buffer = torch.zeros(1 + problem.query.numel(), dtype=torch.bfloat16, device="cuda")
    problem.query = buffer[1:].view(problem.query.shape).copy_(problem.query)
    runner = make_runner(problem)
    out = torch.zeros(1 + problem.query.numel(), dtype=torch.float16, device="cuda")[1:].view(problem.query.shape)
    lse = make_outputs(problem, runner)[1]
    plan = runner.plan([300, 20, 1], 3, 1, problem.cache.block_table, problem.cache.seq_lens)
    launch(runner, plan, problem, out, lse)
    graph = capture(lambda: launch(runner, plan, problem, out, lse))
    for _ in range(3):
        problem.query.normal_()
        graph.replay()
        assert_oracle(problem, out, lse)
