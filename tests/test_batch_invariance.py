"""fixed_split: a sequence's result is bitwise the same alone, in any batch and at any position."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch
from helpers import PagedCache, Problem
from running import assert_oracle, launch, make_outputs, make_problem, make_runner, run

from mjolnir import DecodeRunner
from mjolnir.backends.cute import plan_shape
from mjolnir.plan import PLAN_TILE, build_plan
from mjolnir.tuning import Tuning

LENS = (3000, 1, 0, 64, 65, 5000, 255, 256, 257, 1024, 9000, 12, 2049)
TOKENS = 2 * sum(LENS)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def chosen(problem: Problem, seqs: Sequence[int]) -> Problem:
    """The problem of some of its sequences, in this order; one may come twice."""
    cache, index = problem.cache, torch.tensor(seqs, dtype=torch.int64, device=problem.query.device)
    query = problem.query.unflatten(0, (-1, problem.q_len))[index].flatten(0, 1)
    part = PagedCache(
        cache.fmt, cache.k_cache, cache.v_cache, cache.block_table[index], cache.seq_lens[index],
        cache.live_pages, cache.live_slots,
    )  # fmt: skip
    return dataclasses.replace(problem, cache=part, query=query)


def runner_of(problem: Problem, fixed_split: int, max_num_seqs: int = 2 * len(LENS)) -> DecodeRunner:
    return make_runner(problem, max_num_seqs=max_num_seqs, fixed_split=fixed_split, max_step_tokens=TOKENS)


def by_sequence(problem: Problem, result: tuple[torch.Tensor, torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """(O, LSE) bits of each sequence."""
    out, lse = result
    bits = out.view(torch.int16), lse.view(torch.int32)
    return list(zip(*(t.unflatten(0, (-1, problem.q_len)).unbind() for t in bits), strict=True))


def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("fixed_split", [64, 256, 4096])
@pytest.mark.parametrize(("q_len", "kv_format"), [(1, "fp8"), (4, "fp8"), (1, "bf16")])
def test_alone_in_batches_and_at_positions(device: str, q_len: int, kv_format: str, fixed_split: int) -> None:
    problem = make_problem(LENS, device, page_size=16, q_len=q_len, kv_format=kv_format)
    runner = runner_of(problem, fixed_split)
    result = run(runner, problem)
    assert_oracle(problem, *result)
    together = by_sequence(problem, result)
    rng = random.Random(fixed_split)
    batches = [[seq] for seq in range(len(LENS))]
    batches += [rng.sample(range(len(LENS)), rng.randint(2, len(LENS))) for _ in range(4)]
    batches += [rng.choices(range(len(LENS)), k=7), list(range(len(LENS)))[::-1]]
    for batch in batches:
        part = chosen(problem, batch)
        for seq, bits in zip(batch, by_sequence(part, run(runner, part)), strict=True):
            assert same(bits, together[seq]), (seq, batch)


def test_runners_of_other_sizes_agree(device: str) -> None:
    """What a runner is made for does not show: neither batch nor tokens."""
    problem = make_problem(LENS, device, page_size=16)
    together = by_sequence(problem, run(runner_of(problem, 256), problem))
    part = chosen(problem, [10])
    small = make_runner(part, max_num_seqs=1, fixed_split=256, max_step_tokens=LENS[10])
    assert same(by_sequence(part, run(small, part))[0], together[10])


@pytest.mark.gpu
def test_plans_made_on_the_device_give_the_same_bits() -> None:
    """In a captured graph too, whose lengths change; and past max_step_tokens results are right still."""
    problem = make_problem(LENS, "cuda", page_size=16)
    runner = runner_of(problem, 256)
    expected = run(runner, problem)
    cache = problem.cache
    out, lse = make_outputs(problem, runner)
    runner.precompile(torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        launch(runner, runner.plan(None, len(LENS), 1, cache.block_table, cache.seq_lens), problem, out, lse)
    full = cache.seq_lens.clone()
    for lens in (full, full.clamp(max=300), full):
        cache.seq_lens.copy_(lens)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_oracle(problem, out, lse)
        assert not torch.equal(lens, full) or same((out, lse), expected)
    small = make_runner(problem, fixed_split=64, max_step_tokens=64, sm_count=1)
    out, lse = make_outputs(problem, small)
    launch(small, small.plan(None, len(LENS), 1, cache.block_table, cache.seq_lens), problem, out, lse)
    assert_oracle(problem, out, lse)


def test_more_tokens_than_there_are_rows_for_are_refused() -> None:
    problem = make_problem([100, 28], "cpu", page_size=16)
    runner = make_runner(problem, fixed_split=64, max_step_tokens=130)
    cache = problem.cache
    runner.plan([100, 28], 2, 1, cache.block_table, cache.seq_lens, margin=1)
    with pytest.raises(ValueError, match="at most max_step_tokens = 130 tokens in all, margins included, got 132"):
        runner.plan([100, 28], 2, 1, cache.block_table, cache.seq_lens, margin=2)


def test_rows_suffice_for_every_step_that_is_not_refused() -> None:
    """The worst is a token past a multiple of fixed_split in each sequence."""
    shape = plan_shape(Tuning(fixed_split=128, max_step_tokens=5 * 129), 1, 3, max_num_seqs=5, pairs=True, bits=8)
    assert (shape.fixed_tiles, shape.num_rows) == (128 // PLAN_TILE, 3 * 10)
    assert build_plan([129] * 5, shape)[0, 0] == 30
    assert plan_shape(Tuning(max_splits=2), 7, 3, 5, pairs=False, bits=4).num_rows == 21
