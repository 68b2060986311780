"""On a GPU: the Triton kernels of write_kv, expand_pages and q_mode="fp8", compiled, against PyTorch; their captures,
streams and far addresses."""

from __future__ import annotations

import itertools

import pytest
import query_cases
import torch
import writers_cases as cases
from running import assert_oracle, launch, make_outputs, make_problem, make_runner
from test_cuda_arithmetic import beside_boundaries
from writers_cases import Pool

import mjolnir
from mjolnir.bench import writes
from mjolnir.formats import FORMATS, get_format
from mjolnir.page_views import MANY_ROWS, as_bits
from mjolnir.query_fp8 import quantise_query
from mjolnir.write import Side, check_layout, write_in_torch

pytestmark = pytest.mark.gpu

SCALES = (1.0, 0.0, 0.3712, 1e-38, 1e30, 2.0**-70, 1.5e-40, -0.75)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_rounding(name: str, dtype: torch.dtype) -> None:
    for scale in SCALES:
        cases.check_rounding(name, dtype, scale, "cuda")


def test_every_pair_of_formats_in_every_kind_of_pool() -> None:
    cases.check_layouts("cuda", (1, 37, 300, 3000))


def test_every_expansion() -> None:
    cases.check_expansion("cuda")


def test_quantised_queries() -> None:
    query_cases.check_query("cuda")


@pytest.mark.parametrize("seed", range(30))  # dtype, q_mul, descales and size go through 2, 3, 3 and 5 of them
def test_quantised_queries_of_many_sequences(seed: int) -> None:
    """So many descales that one an ulp off shows, the definition's own on a GPU included."""
    query_cases.check_query_case(1, 4, 128, seed, "cuda", num_seqs=256)


def test_block_scales_are_those_of_the_cpu() -> None:
    """The codec on a GPU, of every amax that is on a rounding boundary or beside it."""
    x, fmt = beside_boundaries(), get_format("nvfp4")
    made, want = fmt.block_scales(x.cuda(), torch.ones(1).cuda()), fmt.block_scales(x, torch.ones(1))
    assert made is not None and want is not None
    assert torch.equal(as_bits(made).cpu(), as_bits(want))


def pool_of(name: str, seed: int = 0, num_pages: int = 40) -> Pool:
    fmt = get_format(name)
    return Pool.make("hnd", [fmt, fmt], 128, [torch.ones(3).cuda()] * 2, num_pages=num_pages, device="cuda", seed=seed)


@pytest.mark.parametrize("name", ["fp8", "e2m3", "nvfp4"])
def test_a_captured_write_follows_its_tensors(name: str) -> None:
    """New values and slots in the same tensors, −1 for the tokens that a replay has fewer of."""
    made, wanted = pool_of(name), pool_of(name)
    x = torch.randn(2, 8, 3, 128, device="cuda").bfloat16()
    slots = torch.full((8,), -1, device="cuda")
    cases.kernel_write(x[0], x[1], made, slots, name, name)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        cases.kernel_write(x[0], x[1], made, slots, name, name)
    for live in (8, 3, 0, 5):
        x.normal_()
        slots.fill_(-1)
        slots[:live] = torch.randperm(640, device="cuda")[:live]
        graph.replay()
        cases.torch_write(x[0], x[1], wanted, slots, name, name)
        cases.assert_same_bytes(made, wanted, (name, live))


def test_a_layout_that_never_ran_is_refused_in_a_capture() -> None:
    made = pool_of("fp8", num_pages=41)
    x, slots = torch.randn(2, 8, 3, 128, device="cuda").bfloat16(), torch.arange(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.mul_(1)
        with pytest.raises(RuntimeError, match="call it once before the capture"):
            cases.kernel_write(x[0], x[1], made, slots, "fp8", "fp8")
    torch.cuda.synchronize()


def test_slots_past_the_end_write_nothing() -> None:
    made, before = pool_of("fp8"), pool_of("fp8")
    x = torch.randn(2, 4, 3, 128, device="cuda").bfloat16()
    cases.kernel_write(x[0], x[1], made, torch.tensor([640, 2**31 - 1, 2**40, -(2**40)], device="cuda"), "fp8", "fp8")
    cases.assert_same_bytes(made, before, "past the end")


@pytest.mark.parametrize("tokens", [5, MANY_ROWS + 5])
def test_pools_past_2_to_the_32_bytes(tokens: int) -> None:
    """Pages at both ends of a pool of 4.5 GiB, K and V far apart."""
    num_pages = (9 << 29) // (2 * 16 * 2 * 128)
    pool = torch.empty(2, num_pages, 16, 2, 128, dtype=torch.uint8, device="cuda")
    k_cache, v_cache = mjolnir.split_kv_cache(pool, "2BNHD", 128)
    x = torch.randn(2, tokens, 2, 128, device="cuda").bfloat16()
    slots = torch.arange(tokens, device="cuda")
    slots[::2] = num_pages * 16 - 1 - slots[::2]
    one = torch.ones(1, device="cuda")
    mjolnir.write_kv(x[0], x[1], k_cache, v_cache, slots, one, one)
    for cache, rows in ((k_cache, x[0]), (v_cache, x[1])):
        got = cache[slots // 16, slots % 16]
        assert torch.equal(got, as_bits(get_format("fp8").encode(rows, one)))


def test_another_stream() -> None:
    made, wanted = pool_of("e2m3"), pool_of("e2m3")
    x, slots = torch.randn(2, 300, 3, 128, device="cuda").bfloat16(), torch.randperm(640, device="cuda")[:300]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        cases.kernel_write(x[0], x[1], made, slots, "e2m3", "e2m3")
    stream.synchronize()
    sides = Side(x[0], wanted.k), Side(x[1], wanted.v)
    write_in_torch(check_layout(sides, "e2m3", "e2m3"), *sides, slots)
    cases.assert_same_bytes(made, wanted, "stream")


@pytest.mark.parametrize(
    ("q_len", "with_q_mul", "q_form"), [(1, True, "dense"), (1, False, "packed_flat"), (4, True, "odd")]
)
def test_fp8_queries_are_attention_with_the_quantised_query(q_len: int, with_q_mul: bool, q_form: str) -> None:
    problem = make_problem(
        [700, 0, 65, 3000], "cuda", q_len=q_len, scales=("sequence", "head"), q_form=q_form, kv_heads=2, heads=8
    )
    problem.q_mul = torch.rand(8, 128, device="cuda") + 0.5 if with_q_mul else None
    runner = make_runner(problem, q_mode="fp8")
    out, lse = make_outputs(problem, runner)
    cache = problem.cache
    plan = runner.plan([700, 0, 65, 3000], 4, q_len, cache.block_table, cache.seq_lens)
    launch(runner, plan, problem, out, lse)
    values, descale = quantise_query(problem.query.reshape(-1, 8, 128), problem.q_mul, 4, q_len, 2)
    factor = descale.repeat_interleave(4, 1).repeat_interleave(q_len, 0)[..., None]
    problem.query, problem.q_mul = values.double() * factor, None
    assert_oracle(problem, out, lse)


def test_fp8_queries_in_a_graph_with_more_sequences_than_it_was_captured_with() -> None:
    problem = make_problem([700, 5, 64, 3000], "cuda", page_size=16)
    runner = make_runner(problem, q_mode="fp8")
    out, lse = make_outputs(problem, runner)
    cache = problem.cache
    runner.precompile(torch.bfloat16)
    plan = runner.plan([700], 1, 1, cache.block_table, cache.seq_lens)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        launch(runner, plan, problem, out, lse)
    runner.plan([700, 5, 64, 3000], 4, 1, cache.block_table, cache.seq_lens)
    for seed in range(3):
        problem.query.copy_(torch.randn(problem.query.shape, generator=torch.Generator().manual_seed(seed)))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        values, descale = quantise_query(problem.query, None, 4, 1, 2)
        replayed = make_problem([700, 5, 64, 3000], "cuda", page_size=16)
        replayed.query = values.double() * descale.repeat_interleave(4, 1)[..., None]
        assert_oracle(replayed, out, lse)


def test_what_the_benchmark_times_is_checked() -> None:
    """Every case of ``mjolnir bench-writes`` runs once and leaves PyTorch's bytes."""
    device = torch.device("cuda", torch.cuda.current_device())
    made = [writes.writes(formats, tokens, device) for formats, tokens in itertools.product(writes.WRITES, (1, 300))]
    made += [writes.expansions(names, pages, device) for names, pages in itertools.product(writes.EXPANSIONS, (1, 8))]
    made += [writes.queries(seqs, device) for seqs in (1, 64, 256)]
    for calls in made:
        calls.call(0)
        torch.cuda.synchronize()
        calls.check()
