"""The oracle on problems whose answer is known, and the reference backend against the oracle."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from helpers import POOLS, ROW_FORMS, SCALE_KINDS, Problem, make_paged_cache, make_query, make_rows, make_scale
from hypothesis import given, settings
from hypothesis import strategies as st

from mjolnir.backends import torch_ref

LENGTHS = (0, 1, 2, 7, 15, 16, 17, 63, 64, 65, 127, 129, 257)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ONE = torch.ones(1)


def simple(lengths: list[int], *, heads: int = 2, kv_heads: int = 1, head_size: int = 64, **cache: Any) -> Problem:
    paged = make_paged_cache(lengths, num_kv_heads=kv_heads, head_size=head_size, page_size=16, **cache)
    return Problem(paged, make_query(len(lengths), heads, head_size, seed=1))


def assert_matches_oracle(problem: Problem, *, tolerance: float = 2e-5) -> None:
    """Within ``tolerance`` of each value, and O of its largest value: fp32 sums cancel."""
    expected, expected_lse = problem.oracle()
    out, lse = problem.run()
    out = out.reshape(expected.shape).double()
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    torch.testing.assert_close(lse.double(), expected_lse, rtol=tolerance, atol=tolerance)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    lengths = draw(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=4))
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 8), (2, 4), (3, 3), (2, 5), (1, 12), (4, 2), (2, 6), (1, 7)]))
    head_size = draw(st.sampled_from([64, 128]))
    q_len = draw(st.integers(1, 8))
    seed = draw(st.integers(0, 2**16))
    cache = make_paged_cache(
        lengths,
        num_kv_heads=kv_heads,
        head_size=head_size,
        page_size=draw(st.sampled_from([16, 32, 64, 128, 256])),
        kv_format=draw(st.sampled_from(["fp8", "bf16", "fp16"])),
        pool=draw(st.sampled_from(POOLS)),
        seed=seed,
    )
    if cache.fmt.name == "fp8" and draw(st.booleans()):
        cache = cache.as_bytes()
    heads = kv_heads * group
    factors = torch.randn(2, heads, head_size, generator=torch.Generator().manual_seed(seed))
    padding = draw(st.integers(0, 2))
    return Problem(
        cache=cache,
        query=make_query(
            len(lengths) * q_len + padding,
            heads,
            head_size,
            dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
            form=draw(st.sampled_from(ROW_FORMS)),
            seed=seed,
        ),
        q_len=q_len,
        k_scale=make_scale(draw(st.sampled_from(SCALE_KINDS)), len(lengths), kv_heads, seed=seed),
        v_scale=make_scale(draw(st.sampled_from(SCALE_KINDS)), len(lengths), kv_heads, seed=seed + 1),
        softmax_scale=draw(st.sampled_from([head_size**-0.5, 0.01, 0.1])),
        causal=draw(st.booleans()),
        q_mul=factors[0] if draw(st.booleans()) else None,
        o_mul=factors[1] if draw(st.booleans()) else None,
    )


@settings(max_examples=200)
@given(
    problem=problems(),
    form=st.sampled_from(ROW_FORMS),
    out_dtype=st.sampled_from(["bf16", "fp16", "fp32"]),
    budget=st.sampled_from([1, 10_000, 1 << 24]),
)
def test_backend_matches_oracle(problem: Problem, form: str, out_dtype: str, budget: int) -> None:
    tokens = problem.num_seqs * problem.q_len
    head_size = problem.cache.k_cache.shape[-1]
    num_heads = problem.query[0].numel() // head_size
    dtype = DTYPES[out_dtype]
    rows = make_rows(len(problem.query), num_heads, head_size, dtype=dtype, form=form)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_ref, "BUDGET", budget)
        out, lse = problem.run(rows)
    expected, expected_lse = problem.oracle()

    out = out.reshape(len(problem.query), num_heads, head_size)
    # Half a unit in the last place of the output, on top of what fp32 costs.
    rtol = 2e-5 + torch.finfo(dtype).eps / 2
    torch.testing.assert_close(out[:tokens].double(), expected, rtol=rtol, atol=2e-5)
    torch.testing.assert_close(lse[:tokens].double(), expected_lse, rtol=2e-5, atol=2e-5)
    assert out[tokens:].isnan().all() and lse[tokens:].isnan().all()  # padding tokens are untouched
    whole = rows.as_strided((rows.untyped_storage().nbytes() // dtype.itemsize,), (1,), 0)
    written = int((~whole.isnan()).sum())
    assert written == tokens * num_heads * head_size  # and so is what O is a slice of


@settings(max_examples=15)
@given(seed=st.integers(0, 2**16), causal=st.booleans())
def test_oracle_is_torch_attention_on_contiguous_tensors(seed: int, causal: bool) -> None:
    """The oracle's own check: PyTorch's attention in fp64 over K and V that never saw a page."""
    lengths, q_len, heads, kv_heads, head_size = [5, 33, 16], 3, 6, 2, 64
    cache = make_paged_cache(lengths, num_kv_heads=kv_heads, head_size=head_size, page_size=16, kv_format="bf16")
    total, gen = sum(lengths), torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, total, kv_heads, head_size, generator=gen).bfloat16()
    cache.set_k(k)
    cache.set_v(v)
    query = make_query(len(lengths) * q_len, heads, head_size, seed=seed)
    k_scale, v_scale = torch.tensor([0.5, 2.0]), torch.tensor([[3.0, 1.0], [0.25, 7.0], [1.0, 9.0]])
    out, lse = Problem(cache, query, q_len, k_scale, v_scale, 0.2, causal).oracle()
    for seq, length in enumerate(lengths):
        start = sum(lengths[:seq])
        rows = slice(seq * q_len, (seq + 1) * q_len)
        keys = (k[start : start + length].double() * k_scale.double()[:, None]).transpose(0, 1)
        values = (v[start : start + length].double() * v_scale[seq].double()[:, None]).transpose(0, 1)
        q = query[rows].double().transpose(0, 1)
        mask = torch.ones(q_len, length, dtype=torch.bool).tril(length - q_len) if causal else None
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[None], keys[None], values[None], attn_mask=mask, scale=0.2, enable_gqa=True
        )
        torch.testing.assert_close(out[rows], expected[0].transpose(0, 1), rtol=1e-12, atol=1e-12)
        scores = 0.2 * q @ keys.repeat_interleave(heads // kv_heads, 0).transpose(1, 2)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        torch.testing.assert_close(lse[rows], scores.logsumexp(-1).T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pool", POOLS)
def test_v_of_one_gives_exactly_one(pool: str) -> None:
    problem = simple([1, 15, 17, 129], heads=6, kv_heads=2, pool=pool)
    problem.cache.set_v(1.0)
    assert (problem.oracle()[0] - 1).abs().max() < 1e-14
    assert (problem.run(make_rows(4, 6, 64, dtype=torch.bfloat16))[0] == 1).all()


def test_q_of_zero_gives_the_mean_of_v() -> None:
    lengths = [1, 16, 65]
    problem = simple(lengths)
    v = torch.randint(-8, 9, (sum(lengths), 1, 64)).float()  # exact in fp8 and in any order of summing
    problem.cache.set_v(v)
    problem.query.zero_()
    expected = torch.stack([rows.double().mean(0).expand(2, -1) for rows in v.split(lengths)])
    for out, lse in (problem.oracle(), problem.run()):
        torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(lse[:, 0].double(), torch.tensor(lengths).double().log())


@pytest.mark.parametrize("hot", [0, 15, 16, 40, 63, 64])
def test_one_hot_v_is_the_weight_of_its_token(hot: int) -> None:
    problem = simple([65])
    problem.query.zero_()
    v = torch.zeros(65, 1, 64)
    v[hot, 0, hot % 64] = 1
    problem.cache.set_v(v)
    for out, _ in (problem.oracle(), problem.run()):
        assert out[0, 0].nonzero().tolist() == [[hot % 64]]
        assert out[0, 0, hot % 64].item() == pytest.approx(1 / 65, rel=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_each_token_sees_the_keys_up_to_its_own(causal: bool) -> None:
    q_len, lengths = 4, [0, 1, 3, 4, 33]
    cache = make_paged_cache(lengths, num_kv_heads=1, head_size=64, page_size=16)
    problem = Problem(cache, torch.zeros(len(lengths) * q_len, 1, 64), q_len, causal=causal)
    seen = [max(0, length - q_len + i + 1) if causal else length for length in lengths for i in range(q_len)]
    cache.set_v(1.0)
    for out, lse in (problem.oracle(), problem.run()):
        torch.testing.assert_close(lse[:, 0].double(), torch.tensor(seen).double().log())  # ln 0 is −inf
        assert out[:, 0, 0].round(decimals=6).tolist() == [float(count > 0) for count in seen]


def one_dim(query: float, keys: list[float], *, kv_format: str = "bf16") -> Problem:
    """Scores query · key exactly; token j's V is one-hot at j."""
    problem = simple([len(keys)], heads=1, kv_format=kv_format)
    problem.cache.set_k(torch.nn.functional.pad(torch.tensor(keys)[:, None, None], (0, 63)))
    problem.cache.set_v(torch.eye(64)[: len(keys), None])
    problem.query = torch.nn.functional.pad(torch.tensor([[[query]]]), (0, 63)).bfloat16()
    problem.softmax_scale = 1.0
    return problem


@pytest.mark.parametrize("budget", [1, 1 << 24])
@pytest.mark.parametrize("score", [-5e4, -1e30, -(2.0**120), 1e30, 0.0, 3e4])
def test_equal_scores_weigh_the_same_whatever_their_size(
    score: float, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_ref, "BUDGET", budget)
    problem = one_dim(score, [1.0] * 20)  # a piece of 16 and one of 4 with the small budget
    for out, lse in (problem.oracle(), problem.run()):
        torch.testing.assert_close(out[0, 0, :20].double(), torch.full((20,), 0.05).double(), rtol=1e-6, atol=0)
        rounded = problem.query[0, 0, 0].double()
        torch.testing.assert_close(lse[0, 0].double(), rounded + math.log(20), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("top", [-1e30, 1e30, 3.3e38])
def test_one_score_far_above_the_rest_takes_all(top: float) -> None:
    others = -2.0 if top < 0 else -1.0  # of |top|
    keys = [others] * 40
    keys[17] = math.copysign(1.0, top)
    problem = one_dim(abs(top), keys)
    for out, lse in (problem.oracle(), problem.run()):
        assert out[0, 0].tolist() == torch.eye(64)[17].tolist()
        assert lse[0, 0].item() == pytest.approx(problem.query[0, 0, 0].item() * keys[17], rel=1e-6)


def test_scores_past_the_range_of_fp32() -> None:
    problem = one_dim(3e38, [448.0, 416.0, -448.0], kv_format="fp8")
    problem.k_scale = torch.tensor([1e30])
    for out, _ in (problem.oracle(), problem.run()):
        assert out[0, 0].tolist() == torch.eye(64)[0].tolist()


def test_q_mul_reaches_past_the_range_of_bf16() -> None:
    problem = one_dim(1e38, [1.0, 2.0, 3.0])
    problem.q_mul = torch.full((1, 64), 1e-38)
    assert_matches_oracle(problem, tolerance=1e-6)
    problem.q_mul = torch.full((1, 64), 1e38)
    assert problem.run()[0][0, 0].tolist() == torch.eye(64)[2].tolist()


@pytest.mark.parametrize("scale", [0.0, 1e-40, 1e30, -1.0])
@pytest.mark.parametrize("which", ["k_scale", "v_scale"])
def test_extreme_scales(which: str, scale: float) -> None:
    problem = simple([0, 17, 65])
    if which == "k_scale" and scale > 1:
        problem.query.mul_(1e-30)
    setattr(problem, which, torch.tensor([scale]))
    assert_matches_oracle(problem)


def test_same_sign_v_does_not_drift_over_a_long_sequence() -> None:
    problem = simple([20_000], heads=1)
    problem.cache.set_v(torch.rand(20_000, 1, 64) + 1)
    assert_matches_oracle(problem)


def test_rows_and_tables_may_be_longer_than_the_batch() -> None:
    problem = simple([5, 40])
    expected, _ = problem.oracle()
    cache = problem.cache
    problem.cache = dataclasses.replace(
        cache,
        block_table=torch.cat([cache.block_table, torch.full_like(cache.block_table, -1)]),
        seq_lens=torch.tensor([5, 40, 2**31 - 1, -7], dtype=torch.int32),
    )
    problem.k_scale = torch.tensor([[1.0], [1.0], [torch.nan], [torch.nan]])
    tensors, options = problem.arguments()
    out = torch.empty(2, 2, 64)
    torch_ref.decode(problem.query, out, *tensors, num_seqs=2, **options)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)


def test_an_empty_batch_and_an_empty_pool() -> None:
    problem = simple([0, 0])
    cache = problem.cache
    problem.cache = dataclasses.replace(cache, k_cache=cache.k_cache[:0], v_cache=cache.v_cache[:0])
    for out, lse in (problem.oracle(), problem.run()):
        assert (out == 0).all() and (lse == -math.inf).all()
    tensors, options = problem.arguments()
    torch_ref.decode(problem.query, out, *tensors, num_seqs=0, **options)


@pytest.mark.parametrize("page", [-1, 2**31 - 1])
def test_a_live_entry_that_names_no_page_is_an_error(page: int) -> None:
    problem = simple([40])
    problem.cache.block_table[0, 1] = page
    for call in (problem.oracle, problem.run):
        with pytest.raises(ValueError, match=f"block_table.* names page {page}"):
            call()


def test_a_sequence_past_its_block_table_is_an_error() -> None:
    problem = simple([40])
    problem.cache.seq_lens.fill_(1000)
    for call in (problem.oracle, problem.run):
        with pytest.raises(ValueError, match="1000"):
            call()


def test_scales_of_another_shape_or_dtype_are_errors() -> None:
    problem = simple([4, 4], heads=4, kv_heads=2)
    problem.k_scale = torch.ones(3)
    with pytest.raises(ValueError, match=r"k_scale .*\(2,\).*got shape \(3,\)"):
        problem.run()
    problem.k_scale, problem.v_scale = ONE, ONE.double()
    with pytest.raises(TypeError, match="v_scale must have dtype torch.float32"):
        problem.run()
