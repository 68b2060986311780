"""Neighbours that are read together, tokens or heads: a runner with a promise about its caches' layout
against the fp64 oracle, on the reference backend and, on a GPU machine, on the compiled kernel."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers import SCALE_KINDS, Problem, make_scale
from running import (
    EDGES,
    PANELS,
    assert_decodes,
    assert_oracle,
    launch,
    make_outputs,
    make_problem,
    make_runner,
    run,
    variant_of,
)

FEW = (65, 0, 1, 130)
SKEWED = (9000, 700, 130, 5, 1, 1, 64, 0, 300)
POOLS = {"NHD": ("separate", "layer_packed", "B2NHD", "2BNHD"), "HND": ("separate_hnd", "B2HND", "2BHND")}
LAYOUTS = [(kv_layout, pool) for kv_layout, pools in POOLS.items() for pool in pools]
KINDS = [
    ("fp8", 64, "NHD", "separate"),
    ("fp8", 64, "HND", "separate_hnd"),
    ("fp8", 128, "NHD", "separate"),
    ("nvfp4", 128, "HND", "separate_hnd"),
    ("e2m3", 128, "HND", "separate_hnd"),  # rows of 256 bytes, and a crowd
    ("e2m3", 64, "HND", "separate_hnd"),
    ("nvfp4", 64, "HND", "separate_hnd"),
    *((*kind, "NHD", "separate") for kind in PANELS if kind not in (("fp8", 128), ("bf16", 64))),
]
"""KV format, head size, promise, and a pool that keeps it."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def odd_problem(device: str, kind: tuple[str, int, str, str], lengths: Any = EDGES, **options: Any) -> Problem:
    """9 query heads on 3: the last one has no neighbour."""
    kv_format, head_size, _, pool = kind
    return make_problem(
        lengths, device, heads=9, kv_heads=3, head_size=head_size, kv_format=kv_format, pool=pool, **options
    )


def test_what_is_joined() -> None:
    def joined(head_size: int = 64, heads: int = 2, kv_layout: str | None = None, **options: Any) -> str:
        pool = "separate_hnd" if kv_layout == "HND" else "separate"
        problem = make_problem(FEW, heads=8, kv_heads=heads, head_size=head_size, pool=pool, **options)
        return variant_of(make_runner(problem, kv_layout=kv_layout), problem, {}).joined

    assert joined() == ""
    assert joined(kv_layout="HND") == "tokens" and joined(kv_layout="NHD") == "heads"
    assert joined(kv_layout="NHD", q_len=8) == "heads" and joined(kv_layout="NHD", q_len=16) == ""  # 64 rows, 128
    assert joined(heads=1, kv_layout="NHD") == "" and joined(heads=1, kv_layout="HND") == "tokens"
    assert joined(128, kv_layout="HND") == "" and joined(128, kv_layout="NHD") == "panels"
    assert joined(128, kv_layout="NHD", q_len=2) == "panels" and joined(128, kv_layout="NHD", q_len=3) == ""  # 12 rows
    assert joined(256, kv_layout="NHD") == joined(128, kv_layout="NHD", kv_format="bf16") == ""  # rows of 256 bytes
    assert joined(128, kv_layout="HND", kv_format="nvfp4") == "tokens"
    assert joined(128, kv_layout="NHD", kv_format="nvfp4") == "panels"
    assert joined(128, kv_layout="NHD", kv_format="fp8", v_format="nvfp4") == "panels"
    assert joined(64, kv_layout="HND", kv_format="fp8", v_format="nvfp4") == ""


@pytest.mark.parametrize(
    ("kv_format", "head_size", "kv_heads", "items"),
    [("fp8", 64, 3, 129), ("fp8", 128, 2, 256), ("e2m3", 128, 2, 128), ("nvfp4", 64, 2, 128)],
)
def test_heads_are_joined_where_they_are_many(kv_format: str, head_size: int, kv_heads: int, items: int) -> None:
    problem = make_problem(
        FEW, heads=4 * kv_heads, kv_heads=kv_heads, head_size=head_size, kv_format=kv_format, pool="separate"
    )
    for seqs, expected in ((items // kv_heads, True), (items // kv_heads - 1, False)):
        runner = make_runner(problem, kv_layout="NHD", max_num_seqs=seqs)
        assert bool(variant_of(runner, problem, {}).joined) is expected


def test_even_numbers_of_narrow_rows_are_always_joined() -> None:
    problem = make_problem(FEW[:1], heads=8, kv_heads=2, head_size=64, pool="separate")
    assert variant_of(make_runner(problem, kv_layout="NHD", max_num_seqs=1), problem, {}).joined == "heads"


@pytest.mark.parametrize(("kv_layout", "pool"), LAYOUTS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "q_len"),
    [(8, 2, 1), (9, 3, 1), (9, 3, 2), (5, 5, 3), (16, 2, 1), (24, 3, 2), (16, 2, 4), (6, 1, 4), (8, 2, 16)],
)
def test_heads_and_pools(device: str, heads: int, kv_heads: int, q_len: int, kv_layout: str, pool: str) -> None:
    """Every row class, even and odd numbers of heads; 16 query tokens are too many to join heads."""
    problem = make_problem(
        (*range(q_len + 1), 63, 64, 65, 130), device, heads=heads, kv_heads=kv_heads, head_size=64, q_len=q_len,
        page_size=16, pool=pool, scales=("sequence", "head"),
    )  # fmt: skip
    assert_decodes(problem, kv_layout=kv_layout)


@pytest.mark.parametrize(
    ("pool", "kinds"),
    [(pool, ("fp8", None)) for pool in POOLS["NHD"]] + [("separate", ("fp8", "nvfp4")), ("separate", ("bf16", None))],
)
@pytest.mark.parametrize(("heads", "kv_heads", "q_len"), [(8, 2, 1), (9, 3, 2), (5, 5, 3), (16, 2, 1), (4, 4, 8)])
def test_panels_of_heads_and_pools(
    device: str, heads: int, kv_heads: int, q_len: int, pool: str, kinds: tuple[str, str | None]
) -> None:
    """Up to 8 rows of a head, of even and odd numbers of heads."""
    head_size = 64 if kinds[0] == "bf16" else 128
    problem = make_problem(
        (*range(q_len + 1), 63, 64, 65, 130), device, heads=heads, kv_heads=kv_heads, head_size=head_size, q_len=q_len,
        page_size=16, pool=pool, scales=("sequence", "head"), kv_format=kinds[0], v_format=kinds[1],
    )  # fmt: skip
    assert_decodes(problem, kv_layout="NHD")


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_page_sizes(device: str, kind: tuple[str, int, str, str], page_size: int) -> None:
    lengths = (*EDGES, page_size - 1, page_size, page_size + 1, 4 * page_size + 3)
    assert_decodes(odd_problem(device, kind, lengths, page_size=page_size), kv_layout=kind[2])


@pytest.mark.parametrize("scales", SCALE_KINDS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_descales(device: str, kind: tuple[str, int, str, str], scales: str) -> None:
    """Each of two heads has its own."""
    assert_decodes(odd_problem(device, kind, scales=(scales, scales), page_size=16), kv_layout=kind[2])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_descales_of_either_sign_and_none(device: str, kind: tuple[str, int, str, str]) -> None:
    problem = odd_problem(device, kind)
    problem.k_scale = torch.tensor([-0.5, 0.0, 2.0], device=device)
    problem.v_scale = torch.tensor([1.0, -3.0, 0.25], device=device)
    assert_decodes(problem, kv_layout=kind[2])


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_factors_on_q_and_o(device: str, kind: tuple[str, int, str, str], q_len: int) -> None:
    """Q's are of three significant bits: the kernel keeps the product in one f16 number."""
    problem = odd_problem(device, kind, q_len=q_len, scales=("head", "sequence"))
    gen = torch.Generator().manual_seed(1)
    shape = 9, kind[1]
    problem.q_mul = (torch.randint(4, 8, shape, generator=gen) / 4.0).to(device)
    problem.o_mul = torch.randn(shape, generator=gen).to(device)
    assert_decodes(problem, kv_layout=kind[2])


@pytest.mark.parametrize("tuning", [{}, {"max_splits": 1}, {"fixed_split": 256, "max_step_tokens": 11_000}], ids=str)
@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_splits(device: str, kind: tuple[str, int, str, str], tuning: dict[str, int]) -> None:
    problem = odd_problem(device, kind, SKEWED, scales=("sequence", "head"))
    assert_decodes(problem, kv_layout=kind[2], **tuning)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_fp8_queries(device: str, kind: tuple[str, int, str, str]) -> None:
    """Their descales are of a sequence and KV head, multiplied by K's."""
    problem = odd_problem(device, kind, FEW, scales=("head", "head"))
    quantised = make_runner(problem, q_mode="fp8", kv_layout=kind[2])
    plain = make_runner(problem, q_mode="fp8")
    for ours, theirs in zip(run(quantised, problem), run(plain, problem), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_graph_replays_later_plans_of_poisoned_caches(kind: tuple[str, int, str, str]) -> None:
    """Lengths shrink and grow between replays, and what is dead then holds NaN: the bits of an eager run on a cache
    that never held it, and the oracle's values."""
    seqs, page_size = 8, 64
    problem = odd_problem("cuda", kind, [1000] * seqs, page_size=page_size, scales=("sequence", "head"))
    runner = make_runner(problem, kv_layout=kind[2])
    cache = problem.cache
    tensors = [t for t in (cache.k_cache, cache.v_cache, cache.k_blocks, cache.v_blocks) if t is not None]
    clean = [t.clone() for t in tensors]
    (out, lse), (eager_out, eager_lse) = make_outputs(problem, runner), make_outputs(problem, runner)
    plan = runner.plan([1000] * seqs, seqs, 1, cache.block_table, cache.seq_lens)
    launch(runner, plan, problem, out, lse)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        launch(runner, plan, problem, out, lse)
    rng = random.Random(0)
    slots = torch.arange(page_size, device="cuda")
    for replay in range(20):
        lens = [rng.choice([0, 1, 63, 64, 65, rng.randint(0, 1000)]) for _ in range(seqs)]
        cache.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        plan = runner.plan(lens, seqs, 1, cache.block_table, cache.seq_lens)
        for t, source in zip(tensors, clean, strict=True):
            t.view(torch.uint8).copy_(source.view(torch.uint8))
        launch(runner, plan, problem, eager_out, eager_lse)
        for seq, length in enumerate(lens):
            for column in range(-(-1000 // page_size)):
                dead = slots + column * page_size >= length
                page = int(cache.block_table[seq, column])
                for t in tensors:
                    t[page].view(torch.uint8)[dead] = 0xFF
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, eager_out) and torch.equal(lse, eager_lse), f"replay {replay}: {lens}"
        if replay % 5 == 0:
            assert_oracle(problem, out, lse)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_long_sequences_and_repeats(kind: tuple[str, int, str, str]) -> None:
    """Thousands of tiles, of rows that many CTAs share; the same bits every time."""
    problem = odd_problem("cuda", kind, [70_001, 1, 30_000], page_size=16)
    runner = make_runner(problem, kv_layout=kind[2])
    first = run(runner, problem)
    assert_oracle(problem, *first)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run(runner, problem), first, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [-1, 2**31 - 1, 10_000])
@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_a_page_that_is_none_reads_as_zeros(kind: tuple[str, int, str, str], wrong: int) -> None:
    problem = odd_problem("cuda", kind, [200])
    cache = problem.cache
    spare = next(page for page in range(len(cache.k_cache)) if page not in cache.block_table[0, :4].tolist())
    for t in (cache.k_cache, cache.v_cache):
        t[spare].view(torch.uint8).zero_()
    named = cache.block_table.clone()
    named[0, 1] = spare
    cache.block_table[0, 1] = wrong
    out, lse = run(make_runner(problem, kv_layout=kind[2]), problem)
    cache.block_table.copy_(named)
    assert_oracle(problem, out, lse)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]], ids=str)
def test_a_head_at_the_end_of_memory_has_no_neighbour(kind: tuple[str, int, str, str]) -> None:
    """The last rows of an allocation, of an odd number of heads: nothing past them is read into a result, though every
    byte there is NaN."""
    problem = odd_problem("cuda", kind, [64])
    cache = problem.cache
    pages = cache.block_table[0, :1].long()
    for name in ("k_cache", "v_cache"):
        t = getattr(cache, name)
        buffer = torch.full((t[0].numel() + 64,), 0xFF, dtype=torch.uint8, device="cuda")
        alone = buffer[: t[0].numel()].view(t.dtype).view(1, *t.shape[1:])
        alone.view(torch.uint8).copy_(t.view(torch.uint8)[pages])
        setattr(cache, name, alone)
    cache.block_table[0, 0] = 0
    problem.k_scale = make_scale("sequence", 1, 3, device="cuda")
    assert_oracle(problem, *run(make_runner(problem, kv_layout="NHD"), problem))
