"""On a GPU: what only a device shows of formats below 8 bits: graph replays with NaN in every dead byte, repeats, block
scales written just before the launch, tunings of the ring. Values and shapes: test_lowbit_runner.py."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from helpers import PagedCache, Problem, make_query
from running import LOW_BIT, MIXED, assert_oracle, launch, make_outputs, make_problem, make_runner, run

from mjolnir.formats import get_format
from mjolnir.verify.compare import compare

pytestmark = pytest.mark.gpu

PAGE, SEQS = 64, 8
CASES = [*((name, None) for name in LOW_BIT), *MIXED]


@pytest.mark.parametrize(("kv_format", "v_format"), CASES)
def test_a_graph_replays_later_plans_of_poisoned_caches(kv_format: str, v_format: str | None) -> None:
    """Lengths shrink and grow between replays, and what is dead then holds NaN block scales and any codes: the bits of
    an eager run on a cache that never held them, and the oracle's values."""
    problem = make_problem(
        [1000] * SEQS, "cuda", kv_format=kv_format, v_format=v_format, page_size=PAGE, pool="separate_hnd",
        scales=("sequence", "head"),
    )  # fmt: skip
    runner = make_runner(problem)
    cache = problem.cache
    tensors = [t for t in (cache.k_cache, cache.v_cache, cache.k_blocks, cache.v_blocks) if t is not None]
    clean = [t.clone() for t in tensors]
    (out, lse), (eager_out, eager_lse) = make_outputs(problem, runner), make_outputs(problem, runner)
    plan = runner.plan([1000] * SEQS, SEQS, 1, cache.block_table, cache.seq_lens)
    launch(runner, plan, problem, out, lse)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        launch(runner, plan, problem, out, lse)
    rng = random.Random(0)
    slots = torch.arange(PAGE, device="cuda")
    for replay in range(40):
        lens = [rng.choice([0, 1, 63, 64, 65, rng.randint(0, 1000)]) for _ in range(SEQS)]
        cache.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        plan = runner.plan(lens, SEQS, 1, cache.block_table, cache.seq_lens)
        for t, source in zip(tensors, clean, strict=True):
            t.view(torch.uint8).copy_(source.view(torch.uint8))
        launch(runner, plan, problem, eager_out, eager_lse)
        for seq, length in enumerate(lens):
            for column in range(-(-1000 // PAGE)):
                dead = slots + column * PAGE >= length
                page = int(cache.block_table[seq, column])
                for t in tensors:
                    t[page].view(torch.uint8)[dead] = 0xFF
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, eager_out) and torch.equal(lse, eager_lse), f"replay {replay}: {lens}"
        if replay % 10 == 0:
            assert_oracle(problem, out, lse)


@pytest.mark.parametrize("kv_format", LOW_BIT)
def test_the_same_call_twice_is_bitwise_equal(kv_format: str) -> None:
    problem = make_problem([30_000, 1, 700, 64], "cuda", kv_format=kv_format, page_size=16)
    runner = make_runner(problem)
    first = run(runner, problem)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run(runner, problem), first, strict=True))
    assert_oracle(problem, *first)


@pytest.mark.parametrize("kv_format", LOW_BIT)
def test_long_sequences_wrap_the_ring_many_times(kv_format: str) -> None:
    """A stage's block scales and codes are of the same tile in every round, for thousands of tiles."""
    for page_size in (16, 128):
        problem = make_problem([70_001], "cuda", heads=4, kv_heads=1, kv_format=kv_format, page_size=page_size)
        assert_oracle(problem, *run(make_runner(problem), problem))


@pytest.mark.parametrize("tuning", [{"ctas_per_sm": 3}, {"ctas_per_sm": 1}, {"l2_prefetch": 4}], ids=str)
@pytest.mark.parametrize("kv_format", LOW_BIT)
def test_tunings(kv_format: str, tuning: dict[str, int]) -> None:
    problem = make_problem([5000, 0, 129, 64], "cuda", kv_format=kv_format)
    assert_oracle(problem, *run(make_runner(problem, **tuning), problem))  # type: ignore[arg-type]


MIXED_LENGTHS = [965, 7426, 3623, 201, 40_000, 1809, 22_252, 515, 6414, 47_294, 162, 56_513, 27_104, 20_812, 4819]
"""Like the long ones, work for many rows a CTA: more tiles than DYNAMIC_ABOVE for each half of an SM."""


def long_problem(lengths: list[int]) -> Problem:
    """nvfp4 caches of random bytes, made on the device, in token-major pages of 8 heads; block scales 0.2 to 0.5."""
    gen = torch.Generator(device="cuda").manual_seed(11)
    pages_of = [-(-length // PAGE) for length in lengths]
    pages = torch.randperm(sum(pages_of), generator=gen, device="cuda").int()

    def codes(low: int, high: int, width: int) -> torch.Tensor:
        shape = (len(pages), PAGE, 8, width)
        return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda", generator=gen)

    none = torch.zeros(0, dtype=torch.int64)
    cache = PagedCache(
        fmt=get_format("nvfp4"),
        k_cache=codes(0, 256, 64),
        v_cache=codes(0, 256, 64),
        block_table=torch.nn.utils.rnn.pad_sequence(list(pages.split(pages_of)), batch_first=True),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        live_pages=none,
        live_slots=none,
        k_blocks=codes(0x25, 0x31, 8).view(torch.float8_e4m3fn),
        v_blocks=codes(0x25, 0x31, 8).view(torch.float8_e4m3fn),
    )
    one = torch.ones(1, device="cuda")
    return Problem(cache, make_query(len(lengths), 32, 128, device="cuda"), 1, one, one, 128**-0.5)


def head_major(problem: Problem) -> Problem:
    """The same problem over copies of its caches in head-major pages."""

    def copied(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t.view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2).view(t.dtype)

    names = ("k_cache", "v_cache", "k_blocks", "v_blocks")
    copies: dict[str, Any] = {name: copied(getattr(problem.cache, name)) for name in names}
    return dataclasses.replace(problem, cache=dataclasses.replace(problem.cache, **copies))


@pytest.mark.parametrize("lengths", [[32_768] * 8, MIXED_LENGTHS, [32_768] * 2, [8192] * 16], ids=lambda x: str(len(x)))
def test_every_row_of_long_batches_every_time(lengths: list[int]) -> None:
    """Launches close behind each other, over token-major pages: every result is the bits of one over head-major pages,
    and that one the reference's. Block scales come a few bytes a token, far apart, at any time."""
    problem = long_problem(lengths)
    other = head_major(problem)
    runner = make_runner(problem)
    expected, lse = run(runner, other)
    reference, reference_lse = problem.run()
    faults = compare(expected, lse, reference.double(), reference_lse.double()).faults(expected.dtype)
    assert not faults, "; ".join(faults)
    cache = problem.cache
    plan = runner.plan(lengths, len(lengths), 1, cache.block_table, cache.seq_lens)
    outputs = [make_outputs(problem, runner) for _ in range(20)]
    for made in outputs:
        launch(runner, plan, problem, *made)
    torch.cuda.synchronize()
    for i, (out, out_lse) in enumerate(outputs):
        wrong = ((out != expected).any(-1) | (out_lse != lse)).nonzero().tolist()
        assert not wrong, f"launch {i}: {len(wrong)} rows differ, (sequence, head) {wrong[:8]}"


def test_block_scales_written_by_the_kernel_before() -> None:
    """Programmatic dependent launch starts early, but reads no block scale before the kernel before has ended."""
    problem = make_problem([3000, 200], "cuda", kv_format="nvfp4")
    cache = problem.cache
    assert cache.k_blocks is not None and cache.v_blocks is not None
    runner = make_runner(problem)
    expected = run(runner, problem)
    kept = [t.clone() for t in (cache.k_blocks, cache.v_blocks)]
    plan = runner.plan([3000, 200], 2, 1, cache.block_table, cache.seq_lens)
    out, lse = make_outputs(problem, runner)
    for _ in range(20):
        for t, source in zip((cache.k_blocks, cache.v_blocks), kept, strict=True):
            t.view(torch.uint8).fill_(0x7F)
            t.view(torch.uint8).copy_(source.view(torch.uint8))
        launch(runner, plan, problem, out, lse)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_pools_past_2_to_the_31_bytes() -> None:
    """Block-scale strides times page ids are 64-bit."""
    pages = 2**31 // (PAGE * 2 * 8) + 8
    problem = make_problem([200, 130], "cuda", kv_format="nvfp4", page_size=PAGE)
    cache = problem.cache
    few = len(cache.k_cache)
    big = {
        name: torch.zeros(pages, *t.shape[1:], dtype=torch.uint8, device="cuda")
        for name, t in (("k_blocks", cache.k_blocks), ("v_blocks", cache.v_blocks))
        if t is not None
    }
    codes = torch.zeros(pages, PAGE, 2, 64, dtype=torch.uint8, device="cuda")  # K's and V's both: 16 GiB
    codes[-few:] = cache.k_cache
    for name, t in big.items():
        t[-few:] = getattr(cache, name).view(torch.uint8)
    block_table = torch.where(cache.block_table >= 0, cache.block_table + (pages - few), -1)
    block_table.clamp_(max=pages - 1)
    problem.cache = dataclasses.replace(cache, k_cache=codes, v_cache=codes, block_table=block_table, **big)
    assert_oracle(problem, *run(make_runner(problem), problem))


@pytest.mark.parametrize("wrong", [-1, 2**31 - 1, 10_000])
@pytest.mark.parametrize("kv_format", LOW_BIT)
def test_a_page_that_is_none_reads_as_zeros(kv_format: str, wrong: int) -> None:
    """Inside a sequence, by a caller's error: of block scales too nothing outside the cache is read."""
    problem = make_problem([200], "cuda", kv_format=kv_format)
    cache = problem.cache
    spare = next(page for page in range(len(cache.k_cache)) if page not in cache.block_table[0, :4].tolist())
    for t in (cache.k_cache, cache.v_cache, cache.k_blocks, cache.v_blocks):
        if t is not None:
            t[spare].view(torch.uint8).zero_()
    named = cache.block_table.clone()
    cache.block_table[0, 1] = wrong
    named[0, 1] = spare
    out, lse = run(make_runner(problem), problem)
    problem.cache = dataclasses.replace(cache, block_table=named)
    assert_oracle(problem, out, lse)
