"""The runner against the fp64 oracle: what breaks decode attention in the field, on the reference backend and, on a GPU
machine, on the compiled kernel. Tolerances: mjolnir/verify/compare.py."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from helpers import POOLS, SCALE_KINDS, Problem, make_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running import EDGES, assert_decodes, assert_oracle, decode, make_outputs, make_problem, make_runner, run

from mjolnir.verify.compare import PROBE_TOLERANCE

BF16, FP16 = torch.bfloat16, torch.float16
FEW = (65, 0, 1, 130)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def on_gpu(device: str) -> bool:
    return device == "cuda"


# Shapes and views


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 32])
def test_groups(device: str, group: int) -> None:
    """Every group, at every length around the edges of pages and tiles."""
    assert_decodes(make_problem(EDGES, device, heads=2 * group))


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (8, 1), (1, 1), (32, 8)])
def test_head_counts(device: str, heads: int, kv_heads: int) -> None:
    """9 query heads on 3; one KV head, whose size-1 dimension has an arbitrary stride."""
    problem = make_problem(EDGES, device, heads=heads, kv_heads=kv_heads)
    assert kv_heads > 1 or problem.cache.k_cache.stride(2) == 12345
    assert_decodes(problem)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_head_and_page_sizes(device: str, head_size: int, page_size: int) -> None:
    lengths = (*EDGES, page_size - 1, page_size, page_size + 1, 4 * page_size + 3)
    assert_decodes(make_problem(lengths, device, heads=4, head_size=head_size, page_size=page_size))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize(
    ("q_len", "group", "head_size"),
    [(2, 4, 128), (3, 5, 128), (4, 4, 64), (4, 8, 128), (5, 1, 64), (7, 9, 128), (8, 8, 64), (16, 1, 256), (16, 4, 128)]
    + [(2, 32, 256), (4, 4, 256), (8, 4, 256), (6, 1, 128)],
)
def test_q_len(device: str, q_len: int, group: int, head_size: int, causal: bool) -> None:
    """Every row class with several query tokens; lengths below q_len leave rows without a key: O = 0, LSE = -inf."""
    lengths = (*range(q_len + 2), 63, 64, 65, 127, 129, 300)
    problem = make_problem(
        lengths, device, heads=group, kv_heads=1, head_size=head_size, q_len=q_len, causal=causal, page_size=16
    )
    out, lse = decode(problem)
    assert_oracle(problem, out, lse)
    keyless = sum(max(0, q_len - length) if causal else q_len * (length == 0) for length in lengths)
    assert int((lse == -math.inf).all(-1).sum()) == int((out == 0).all(-1).all(-1).sum()) == keyless


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(("kv_format", "page_size", "q_len"), [("fp8", 16, 1), ("fp8", 64, 4), ("bf16", 32, 1)])
def test_pools(device: str, pool: str, kv_format: str, page_size: int, q_len: int) -> None:
    """K and V in two tensors, in one of any layout, in one row, in one layer of a pool whose page stride is far larger
    than a page."""
    problem = make_problem(EDGES, device, kv_format=kv_format, pool=pool, page_size=page_size, q_len=q_len)
    assert_decodes(problem)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_fp8_as_raw_bytes(device: str, kv_heads: int) -> None:
    problem = make_problem(FEW, device, kv_heads=kv_heads)
    expected = decode(problem)
    problem.cache = problem.cache.as_bytes()
    assert problem.cache.k_cache.dtype == torch.uint8
    assert_same(decode(problem), expected)


FORMATS = [
    ("fp8", BF16, BF16, 128, 1),
    ("fp8", BF16, BF16, 128, 4),
    ("fp8", BF16, BF16, 128, 8),
    ("fp8", BF16, BF16, 128, 16),
    ("fp8", BF16, BF16, 64, 1),
    ("fp8", BF16, BF16, 256, 1),
    ("fp8", FP16, FP16, 128, 1),
    ("bf16", BF16, BF16, 128, 1),
    ("bf16", BF16, FP16, 64, 1),
    ("bf16", BF16, FP16, 128, 8),
    ("bf16", BF16, FP16, 256, 4),
    ("bf16", FP16, FP16, 128, 1),
    ("fp16", FP16, FP16, 64, 4),
    ("fp16", FP16, FP16, 128, 1),
    ("fp16", FP16, FP16, 128, 16),
    ("fp16", FP16, FP16, 256, 1),
]


@pytest.mark.parametrize(("kv_format", "q_dtype", "out_dtype", "head_size", "q_len"), FORMATS)
def test_formats_and_dtypes(
    device: str, kv_format: str, q_dtype: torch.dtype, out_dtype: torch.dtype, head_size: int, q_len: int
) -> None:
    problem = make_problem(
        EDGES, device, kv_format=kv_format, q_dtype=q_dtype, head_size=head_size, q_len=q_len, page_size=32
    )
    assert_decodes(problem, out_dtype)


@pytest.mark.parametrize("out_form", ["dense", "flat", "packed", "packed_flat", "odd"])
@pytest.mark.parametrize("q_form", ["dense", "flat", "packed", "packed_flat", "odd"])
def test_rows_as_slices_of_larger_buffers(device: str, q_form: str, out_form: str) -> None:
    """Q as a slice of packed QKV and O as a slice of a larger buffer, whose other elements stay as they are."""
    problem = make_problem(FEW, device, q_form=q_form, q_len=2)
    out = make_rows(len(problem.query), 8, 128, dtype=FP16, form=out_form, device=device)
    _, lse = run(make_runner(problem), problem, out)
    assert_oracle(problem, out, lse)
    whole = out.as_strided((out.untyped_storage().nbytes() // 2,), (1,), 0)
    assert int((~whole.isnan()).sum()) == out.numel()


@pytest.mark.parametrize("offset", [1, 2, 4, 8], ids=lambda n: f"{2 * n}_bytes")
@pytest.mark.parametrize("which", ["query", "out"])
def test_query_and_out_at_any_alignment(device: str, which: str, offset: int) -> None:
    """Bases of 16-byte alignment and no more are read in place; others are packed."""
    problem = make_problem(FEW, device, q_len=2)
    shape = problem.query.shape
    buffer = torch.full((offset + problem.query.numel(),), math.nan, dtype=BF16, device=device)
    out = None
    if which == "query":
        problem.query = buffer[offset:].view(shape).copy_(problem.query)
    else:
        out = buffer.view(FP16)[offset:].view(shape)
    out, lse = run(make_runner(problem), problem, out)
    assert_oracle(problem, out, lse)
    assert buffer[:offset].isnan().all()


def test_odd_strides_of_size_one(device: str) -> None:
    """At batch 1, with one head and one KV head, the strides of those dimensions mean nothing."""
    problem = make_problem([100], device, heads=1, kv_heads=1)
    problem.query = problem.query.as_strided(problem.query.shape, (7, 3, 1))
    runner = make_runner(problem)
    out, lse = make_outputs(problem, runner)
    run(runner, problem, out.as_strided(out.shape, (5, 3, 1)), lse.as_strided(lse.shape, (77, 9)))
    assert_oracle(problem, out, lse)


def test_a_pool_of_one_page_with_an_odd_page_stride(device: str) -> None:
    problem = make_problem([50], device, heads=4, kv_heads=1)
    cache, page = problem.cache, int(problem.cache.block_table[0, 0])

    def only_page(t: torch.Tensor) -> torch.Tensor:
        return t.as_strided((1, 64, 1, 128), (999, 128, 5, 1), t[page].storage_offset())

    table = torch.where(cache.block_table == page, 0, cache.block_table)
    problem.cache = dataclasses.replace(
        cache, k_cache=only_page(cache.k_cache), v_cache=only_page(cache.v_cache), block_table=table
    )
    assert_decodes(problem)


def test_bases_aligned_to_16_bytes_and_no_more(device: str) -> None:
    """K and V at 16 bytes past a coarser alignment; a block table, lengths and LSE inside larger tensors."""
    problem = make_problem(EDGES, device)
    cache = problem.cache

    def shifted(t: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(16 + t.numel(), dtype=torch.uint8, device=device)
        return buffer[16:].view(t.dtype).view(t.shape).copy_(t)

    rows, columns = cache.block_table.shape
    wide = torch.full((rows, columns + 3), -1, dtype=torch.int32, device=device)
    wide[:, 2:-1] = cache.block_table
    lens = torch.cat([cache.seq_lens[:1], cache.seq_lens, cache.seq_lens])[1 : 1 + rows]
    problem.cache = dataclasses.replace(
        cache, k_cache=shifted(cache.k_cache), v_cache=shifted(cache.v_cache), block_table=wide[:, 2:-1], seq_lens=lens
    )
    lse = torch.full((rows + 1, 11), math.nan, device=device)[1:, 1:9]
    out, _ = run(make_runner(problem), problem, lse=lse)
    assert_oracle(problem, out, lse)


def test_batch_of_1024(device: str) -> None:
    problem = make_problem([1 + 37 * i % 150 for i in range(1024)], device, heads=4, kv_heads=1, page_size=16)
    assert_decodes(problem)


def test_one_long_sequence_beside_many_of_one_token(device: str) -> None:
    """On a GPU 500K tokens beside 1023 of 1."""
    lengths = [500_000] + [1] * 1023 if on_gpu(device) else [20_000] + [1] * 127
    assert_decodes(make_problem(lengths, device, heads=4, kv_heads=1))


def test_an_empty_batch(device: str) -> None:
    """num_seqs = 0, and a batch of nothing but empty sequences."""
    problem = make_problem([], device, padding=2)
    out, lse = decode(problem)
    assert out.isnan().all() and lse.isnan().all()
    out, lse = decode(make_problem([0, 0, 0], device))
    assert (out == 0).all() and (lse == -math.inf).all()


# Cache contents


@pytest.mark.parametrize(("kv_format", "pool"), [("fp8", "separate"), ("fp8", "BHN2D"), ("bf16", "B2NHD")])
def test_dead_bytes_have_no_say(device: str, kv_format: str, pool: str) -> None:
    """Rows past a sequence's end, pages no table names, entries past the last page: NaN, zeros or anything gives the
    same bits."""
    problem = make_problem(EDGES, device, kv_format=kv_format, pool=pool, q_len=2, page_size=32)
    runner = make_runner(problem)
    first = run(runner, problem)
    assert_oracle(problem, *first)
    cache = problem.cache
    dead = torch.ones(cache.k_cache.shape[:2], dtype=torch.bool, device=device)
    dead[cache.live_pages, cache.live_slots] = False
    entry = torch.arange(cache.block_table.shape[1], device=device)
    past = entry >= (cache.seq_lens[:, None] + 31) // 32
    for byte, page in ((0, 0), (0x7F, -1), (0xFF, 2**31 - 1), (0x7E, -(2**31))):
        for t in (cache.k_cache, cache.v_cache):
            t.view(torch.uint8)[dead] = byte
        cache.block_table.masked_fill_(past, page)
        assert_same(run(runner, problem), first)


def test_padding_rows_are_untouched(device: str) -> None:
    """Rows of query, block table and lengths past num_seqs, as a captured graph has them."""
    problem = make_problem(FEW, device, padding=3, q_len=2)
    problem.query[-3:] = math.nan
    cache = problem.cache
    runner = make_runner(problem)
    out, lse = run(runner, problem)
    assert out[-3:].isnan().all() and lse[-3:].isnan().all()
    assert_oracle(problem, out, lse)
    # Rows may be there and be longer than anything in the pool: num_seqs decides.
    longer = dataclasses.replace(
        cache,
        block_table=torch.cat([cache.block_table, torch.full_like(cache.block_table, -1)]),
        seq_lens=torch.cat([cache.seq_lens, torch.full_like(cache.seq_lens, 2**31 - 1)]),
    )
    outputs = make_outputs(problem, runner)
    plan = runner.plan(FEW, len(FEW), 2, longer.block_table, longer.seq_lens)
    runner.run(
        plan, problem.query, outputs[0], cache.k_cache, cache.v_cache, problem.k_scale, problem.v_scale,
        problem.softmax_scale, lse=outputs[1],
    )  # fmt: skip
    assert_same(outputs, (out, lse))


def scored(q: list[float], keys: torch.Tensor, device: str, *, heads: int = 2) -> Problem:
    """One sequence whose scores are q · keys[t]: q and keys (tokens, len(q)) fill the first elements, the rest is 0."""
    problem = make_problem([len(keys)], device, heads=heads, kv_heads=1)
    problem.query.zero_()
    problem.query[..., : len(q)] = torch.tensor(q, dtype=BF16, device=device)
    k = torch.zeros(len(keys), 1, 128, device=device)
    k[:, 0, : len(q)] = keys.to(device)
    problem.cache.set_k(k)
    problem.softmax_scale = 1.0
    return problem


@pytest.mark.parametrize("score", [-1e30, -6e4, 0.0, 6e4, 1e30])
def test_equal_scores_give_the_mean(device: str, score: float) -> None:
    """All scores equal, down to -1e30: no finite stand-in for -inf may win."""
    problem = scored([abs(score)], torch.full((131, 1), math.copysign(1.0, score)), device)
    problem.cache.set_v(torch.randint(-8, 9, (131, 1, 128)).float().to(device))
    out, lse = decode(problem)
    assert_oracle(problem, out, lse, PROBE_TOLERANCE)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_large_scores_a_little_apart(device: str, sign: float) -> None:
    """Scores near ±6e4 that differ by 0 … 7 weigh as ones near 0 that differ so."""
    keys = torch.stack([torch.full((200,), sign), torch.arange(200) % 8], dim=1)
    assert_decodes(scored([59904.0, 1.0], keys, device))  # both exact in bf16


@pytest.mark.parametrize(("top", "rest"), [(1.0, -1.0), (-1.0, -2.0), (448.0, 416.0)])
@pytest.mark.parametrize("at", [0, 17, 63, 64, 130])
def test_one_score_far_above_the_rest_takes_all(device: str, top: float, rest: float, at: int) -> None:
    keys = torch.full((131, 1), rest)
    keys[at] = top
    problem = scored([1e30], keys, device)
    expected, _ = problem.oracle()
    out, lse = decode(problem)
    assert_oracle(problem, out, lse)
    assert torch.equal(out, expected.to(FP16))


def test_queries_at_the_edge_of_bf16(device: str) -> None:
    """Elements up to 3.39e38, where one product with K overflows fp32."""
    problem = make_problem(EDGES, device)
    problem.query.copy_((problem.query.float().clamp(-1, 1) * torch.finfo(BF16).max).to(BF16))
    assert problem.query.abs().max() == torch.finfo(BF16).max
    tokens = sum(EDGES)
    k = torch.randn(tokens, 2, 128, generator=torch.Generator().manual_seed(8)) / 8
    problem.cache.set_k(k.to(device))
    problem.softmax_scale = 2.0**-126
    assert_decodes(problem)


def test_queries_of_zero_and_near_it(device: str) -> None:
    problem = make_problem(EDGES, device)
    problem.query[::2] = 0
    problem.query[1::2] *= 1e-30
    assert_decodes(problem)


@pytest.mark.parametrize("kind", SCALE_KINDS)
@pytest.mark.parametrize("q_len", [1, 3])
def test_descales_of_every_shape(device: str, kind: str, q_len: int) -> None:
    """1 element, per KV head, per sequence and KV head, with gaps between them or shared by stride 0."""
    other = SCALE_KINDS[SCALE_KINDS.index(kind) - 1]
    assert_decodes(make_problem(EDGES, device, q_len=q_len, kv_heads=2, scales=(kind, other)))


@pytest.mark.parametrize("scale", [0.0, 1e-40, 1e-30, 1e30, -1.5])
@pytest.mark.parametrize("which", ["k_scale", "v_scale"])
def test_extreme_descales(device: str, which: str, scale: float) -> None:
    """0, denormal, huge and negative; where K's is huge, Q is small enough for scores of order 1."""
    problem = make_problem(EDGES, device)
    setattr(problem, which, torch.tensor([1.0, scale], device=device))
    if which == "k_scale" and scale > 1:
        problem.query *= 1e-30
    assert_decodes(problem, BF16)


def test_descales_that_differ_by_60_orders_of_magnitude_within_a_batch(device: str) -> None:
    problem = make_problem([70] * 6, device)
    scales = torch.tensor([1e30, -1e-30, 0.0, 1.0, 1e-40, -7.0], device=device)
    problem.v_scale = scales[:, None].expand(6, 2)
    problem.k_scale = torch.tensor([[0.0, 1.0], [2.0, -1.0], [1e-40, 1.0], [1.0, 0.0], [0.1, 3.0], [-0.5, 1.0]])
    problem.k_scale = problem.k_scale.to(device)
    assert_decodes(problem, BF16)


def test_a_channel_of_zeros(device: str) -> None:
    problem = make_problem(EDGES, device)
    tokens = sum(EDGES)
    gen = torch.Generator().manual_seed(3)
    for setter in (problem.cache.set_k, problem.cache.set_v):
        values = torch.randn(tokens, 2, 128, generator=gen)
        values[..., 5] = 0
        values[:, 1, 64:] = 0
        setter(values.to(device))
    out, lse = decode(problem)
    assert_oracle(problem, out, lse)
    assert (out[..., 5] == 0).all() and (out[:, 4:, 64:] == 0).all()


@pytest.mark.parametrize("max_splits", [None, 1])
def test_same_sign_v_does_not_drift(device: str, max_splits: int | None) -> None:
    """On a GPU over 128K tokens."""
    tokens = 131_072 if on_gpu(device) else 8_192
    problem = make_problem([tokens, 5], device, heads=2, kv_heads=1)
    problem.cache.set_v((torch.rand(tokens + 5, 1, 128, generator=torch.Generator().manual_seed(1)) + 1).to(device))
    assert_decodes(problem, max_splits=max_splits)


@pytest.mark.parametrize("spread", [1.0, 10.0])
@pytest.mark.parametrize("kv_format", ["fp8", "bf16"])
def test_keys_of_every_magnitude(device: str, kv_format: str, spread: float) -> None:
    """K drawn over all finite e4m3 codes: the running maximum keeps growing. ``spread`` is about the scores'."""
    lengths = (3000, 129, 64, 17, 700)
    problem = make_problem(lengths, device, kv_format=kv_format, page_size=32)
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn).float()
    index = torch.randint(len(finite), (sum(lengths), 2, 128), generator=torch.Generator().manual_seed(5))
    problem.cache.set_k(finite[index].to(device))
    problem.k_scale = torch.full((1,), spread / 110, device=device)  # 110: root mean square of the codes
    assert_decodes(problem)


def test_scores_that_grow_with_every_token(device: str) -> None:
    """Each key outweighs all before it, then each less: the maximum moves with every tile, or never again."""
    up = torch.arange(448.0, device="cpu")[:, None] / 2
    for keys in (up, up.flip(0)):
        assert_decodes(scored([1.0], keys, device))


# Factors


@pytest.mark.parametrize("q_len", [1, 4])
def test_factors_on_q_and_o(device: str, q_len: int) -> None:
    """q_mul of three significant bits: bf16 Q times it is exact in f16. o_mul of any value."""
    problem = make_problem(EDGES, device, q_len=q_len)
    gen = torch.Generator().manual_seed(2)
    problem.q_mul = (torch.randint(4, 8, (8, 128), generator=gen) / 4.0).to(device)
    problem.q_mul[3] *= -2
    problem.q_mul[4] *= 2.0**-20
    problem.o_mul = torch.randn(8, 128, generator=gen).to(device)
    problem.o_mul[1] = 0
    assert_decodes(problem)
    for only in ("q_mul", "o_mul"):
        assert_decodes(dataclasses.replace(problem, **{only: None}))


def test_factors_on_q_are_rounded_with_it(device: str) -> None:
    """A general q_mul: an fp8 cache takes Q · q_mul in f16, which moves scores by about 2^-12 of their terms."""
    problem = make_problem(EDGES, device)
    problem.q_mul = (torch.rand(8, 128, generator=torch.Generator().manual_seed(4)) + 0.5).to(device)
    expected, expected_lse = problem.oracle()
    out, lse = decode(problem)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-3)
    assert ((out.double() - expected).norm(dim=-1) <= 2e-3 * expected.norm(dim=-1)).all()


def test_factors_over_a_bf16_cache(device: str) -> None:
    """Q · q_mul is a sum of two bf16 terms there, so that any factor keeps the tolerance."""
    problem = make_problem(EDGES, device, kv_format="bf16")
    gen = torch.Generator().manual_seed(6)
    problem.q_mul = (torch.rand(8, 128, generator=gen) + 0.5).to(device)
    problem.o_mul = torch.randn(8, 128, generator=gen).to(device)
    out, lse = decode(problem)
    expected, expected_lse = problem.oracle()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-4)  # 2^-17 of the scores' terms
    assert_oracle(problem, out, expected_lse.float())


# Exact probes


@pytest.mark.parametrize("pool", ["separate", "BHN2D", "2BNHD"])
@pytest.mark.parametrize(("head_size", "q_len"), [(64, 1), (128, 4), (256, 1)])
def test_v_of_one_gives_exactly_one(device: str, pool: str, head_size: int, q_len: int) -> None:
    problem = make_problem(EDGES, device, pool=pool, head_size=head_size, q_len=q_len, page_size=16)
    problem.cache.set_v(1.0)
    out, lse = decode(problem, BF16)
    assert set(out.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(out[..., 0] == 0, lse == -math.inf)


@pytest.mark.parametrize(("kv_format", "q_dtype"), [("fp8", BF16), ("bf16", BF16), ("fp16", FP16)])
@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_q_of_zero_gives_the_mean_of_v(device: str, kv_format: str, q_dtype: torch.dtype, page_size: int) -> None:
    problem = make_problem(EDGES, device, kv_format=kv_format, q_dtype=q_dtype, page_size=page_size)
    gen = torch.Generator().manual_seed(7)
    v = torch.randint(-8, 9, (sum(EDGES), 2, 128), generator=gen).float()  # exact, and so are their sums
    problem.cache.set_v(v.to(device))
    problem.query.zero_()
    out, lse = decode(problem)
    assert_oracle(problem, out, lse, PROBE_TOLERANCE)
    for seq, rows in enumerate(v.split(EDGES)):
        if len(rows):
            mean = rows.double().mean(0).repeat_interleave(4, 0)
            torch.testing.assert_close(out[seq].double().cpu(), mean, rtol=2.0**-11, atol=1e-6)
            assert lse[seq].tolist() == pytest.approx([math.log(len(rows))] * 8, rel=1e-6)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page_size", [16, 32, 128])
def test_one_hot_v_shows_which_tokens_were_seen(device: str, page_size: int, causal: bool) -> None:
    """With Q = 0 and V of token t the unit vector t, O times the number of keys is 1 at every key seen and 0 elsewhere:
    one wrong page, row or mask shows as a wrong element."""
    length, q_len = 128, 8
    problem = make_problem([length, 40, 3], device, page_size=page_size, q_len=q_len, causal=causal)
    tokens = torch.cat([torch.arange(n) for n in (length, 40, 3)])
    problem.cache.set_v(torch.nn.functional.one_hot(tokens, 128).float()[:, None].to(device))
    problem.query.zero_()
    out, _ = decode(problem)
    for seq, n in enumerate((length, 40, 3)):
        for i in range(q_len):
            seen = max(0, n - q_len + i + 1) if causal else n
            expected = torch.zeros(128, dtype=FP16)
            expected[:seen] = 1 / max(seen, 1)
            for head in range(8):
                assert torch.equal(out[seq * q_len + i, head].cpu(), expected), (seq, i, head)


# Plans and launch choices

CHOICES: list[dict[str, Any]] = [
    {"max_splits": 1},
    {"max_splits": 2},
    {"max_splits": 3},
    {"sm_count": 1},
    {"sm_count": 3},
    {"sm_count": 3, "max_splits": 2},
    {"sm_count": 3, "max_splits": 1},
    {"sm_count": 600},
    {"ctas_per_sm": 1},
    {"kv_stages": 8},
    {"l2_prefetch": 4},
    {"pdl": False},
    {"kv_evict_first": False},
    {"fixed_split": 64, "max_step_tokens": 7000},
    {"fixed_split": 1024, "max_step_tokens": 7000, "sm_count": 3},
]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: ",".join(f"{k}={v}" for k, v in c.items()))
def test_launch_choices_do_not_change_values(device: str, choice: dict[str, Any]) -> None:
    """Few splits, none, many pieces per CTA, more CTAs than work, ring and cache policies; each call twice gives the
    same bits."""
    problem = make_problem((5000, *EDGES), device, page_size=16)
    runner = make_runner(problem, **choice)
    first = run(runner, problem)
    assert_oracle(problem, *first)
    assert_same(run(runner, problem), first)


@pytest.mark.parametrize("max_splits", [None, 1, 3])
@pytest.mark.parametrize("sm_count", [3, None])
def test_a_stale_plan_costs_balance_only(device: str, sm_count: int | None, max_splits: int | None) -> None:
    """Live lengths longer than planned (within the margin and far past it), shorter, and down to nothing."""
    problem = make_problem([700, 1, 64, 0, 65, 3000, 129], device, q_len=2, page_size=16, head_size=64)
    runner = make_runner(problem, sm_count=sm_count, max_splits=max_splits)
    live = problem.cache.seq_lens.tolist()
    plans: list[tuple[list[int], int]] = [
        ([max(0, n - 5) for n in live], 8),
        ([0] * 7, 0),
        ([1] * 7, 16),
        ([5000] * 7, 0),
        (live[::-1], 0),
        ([n + 64 for n in live], 100),
    ]
    for host_lens, margin in plans:
        assert_oracle(problem, *run(runner, problem, host_lens=host_lens, margin=margin))


def test_lengths_that_grow_under_one_plan(device: str) -> None:
    """One plan with a margin, used while the device lengths grow token by token past it."""
    problem = make_problem([130, 64, 1], device, page_size=16)
    runner = make_runner(problem)
    cache, full = problem.cache, problem.cache.seq_lens.clone()
    cache.seq_lens.copy_(torch.tensor([1, 0, 0]))
    plan = runner.plan([1, 0, 0], 3, 1, cache.block_table, cache.seq_lens, margin=16)
    for step in (0, 1, 15, 16, 17, 63, 64, 65, 129):
        cache.seq_lens.copy_(torch.minimum(full, full.new_tensor([1, 0, 0]) + step))
        out, lse = make_outputs(problem, runner)
        runner.run(
            plan, problem.query, out, cache.k_cache, cache.v_cache, problem.k_scale, problem.v_scale,
            problem.softmax_scale, lse=lse,
        )  # fmt: skip
        assert_oracle(problem, out, lse)


@pytest.mark.parametrize("kind", ["list", "tuple", "numpy", "tensor"])
def test_host_lengths_of_any_kind(device: str, kind: str) -> None:
    problem = make_problem(FEW, device)
    lens = {
        "list": list(FEW),
        "tuple": FEW,
        "numpy": torch.tensor(FEW).numpy(),
        "tensor": torch.tensor([*FEW, -5], dtype=torch.int32),  # past num_seqs: not looked at
    }[kind]
    assert_oracle(problem, *run(make_runner(problem), problem, host_lens=lens))


def test_one_runner_over_steps_of_changing_shape(device: str) -> None:
    """More and fewer sequences, other q_lens and layouts, back and forth, through the same buffers."""
    first = make_problem(EDGES, device, q_len=4)
    runner = make_runner(first, max_num_seqs=16)
    problems = [
        first,
        make_problem([700], device, q_len=1, seed=1),
        make_problem([3] * 16, device, q_len=2, pool="BHN2D", seed=2),
        make_problem([2000, 1], device, q_len=4, seed=3, causal=False),
        make_problem(EDGES, device, q_len=1, q_form="packed", seed=4),
    ]
    for problem in [*problems, *problems[::-1]]:
        assert_oracle(problem, *run(runner, problem))


def test_lse_is_optional(device: str) -> None:
    problem = make_problem(FEW, device)
    runner = make_runner(problem)
    expected, _ = run(runner, problem)
    out, _ = make_outputs(problem, runner)
    cache = problem.cache
    plan = runner.plan(FEW, len(FEW), 1, cache.block_table, cache.seq_lens)
    runner.run(
        plan, problem.query, out, cache.k_cache, cache.v_cache, problem.k_scale, problem.v_scale, problem.softmax_scale
    )
    assert torch.equal(out, expected)


# Everything together


@st.composite
def settings_of(draw: st.DrawFn) -> dict[str, Any]:
    group = draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 16, 32]))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return {
        "lengths": draw(st.lists(st.sampled_from((*EDGES, 2, 257, 511)), min_size=1, max_size=5)),
        "heads": group * kv_heads,
        "kv_heads": kv_heads,
        "head_size": draw(st.sampled_from([64, 128, 256])),
        "page_size": draw(st.sampled_from([16, 32, 64, 128, 256])),
        "q_len": draw(st.integers(1, min(16, 64 // group))),
        "q_form": draw(st.sampled_from(["dense", "flat", "packed", "odd"])),
        "padding": draw(st.integers(0, 2)),
        "pool": draw(st.sampled_from(POOLS)),
        "scales": draw(st.tuples(st.sampled_from(SCALE_KINDS), st.sampled_from(SCALE_KINDS))),
        "causal": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**16)),
    }


def check_any(device: str, problem_settings: dict[str, Any], sm_count: int | None, margin: int) -> None:
    problem = make_problem(device=device, **problem_settings)
    runner = make_runner(problem, sm_count=sm_count)
    out, lse = run(runner, problem, margin=margin)
    assert_oracle(problem, out, lse)
    tokens = problem.num_seqs * problem.q_len
    assert out[tokens:].isnan().all() and lse[tokens:].isnan().all()


ANY = given(settings_of(), st.sampled_from([None, 1, 5]), st.sampled_from([0, 1, 200]))
SLOW_START = {"suppress_health_check": [HealthCheck.too_slow]}


@settings(max_examples=50, **SLOW_START)
@ANY
def test_any_shape_on_cpu(problem_settings: dict[str, Any], sm_count: int | None, margin: int) -> None:
    check_any("cpu", problem_settings, sm_count, margin)


@pytest.mark.gpu
@settings(max_examples=150, derandomize=True, **SLOW_START)
@ANY
def test_any_shape_on_a_gpu(problem_settings: dict[str, Any], sm_count: int | None, margin: int) -> None:
    check_any("cuda", problem_settings, sm_count, margin)


def assert_same(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Bitwise equal O and LSE."""
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
