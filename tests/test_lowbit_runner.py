"""Formats below 8 bits, and K and V in two formats, through the runner against the fp64 oracle over the same codes: on
the reference backend and, on a GPU machine, on the compiled kernel."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from helpers import POOLS, SCALE_KINDS, Problem, make_scale
from running import EDGES, LOW_BIT, MIXED, assert_decodes, assert_oracle, decode, make_problem, make_runner, run

from mjolnir.formats import get_format
from mjolnir.layouts import split_nvfp4_cache
from mjolnir.verify.compare import PROBE_TOLERANCE

BF16, FP16 = torch.bfloat16, torch.float16
FEW = (65, 0, 1, 130)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("kv_format", LOW_BIT)
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_head_and_page_sizes(device: str, head_size: int, page_size: int, kv_format: str) -> None:
    lengths = (*EDGES, page_size - 1, page_size, page_size + 1, 4 * page_size + 3)
    assert_decodes(
        make_problem(lengths, device, heads=4, head_size=head_size, page_size=page_size, kv_format=kv_format)
    )


@pytest.mark.parametrize("kv_format", LOW_BIT)
@pytest.mark.parametrize(
    ("q_len", "group", "head_size"),
    [(1, 1, 128), (1, 5, 128), (1, 16, 128), (1, 32, 128), (4, 8, 128), (16, 4, 128), (2, 6, 64), (4, 16, 64)]
    + [(4, 4, 256), (16, 4, 256)],
)
def test_rows(device: str, q_len: int, group: int, head_size: int, kv_format: str) -> None:
    """Every row class; lengths below q_len leave rows without a key."""
    lengths = (*range(q_len + 2), 63, 64, 65, 127, 129, 300)
    problem = make_problem(
        lengths, device, heads=group, kv_heads=1, head_size=head_size, q_len=q_len, page_size=16, kv_format=kv_format
    )
    out, lse = decode(problem)
    assert_oracle(problem, out, lse)
    assert int((lse == -math.inf).all(-1).sum()) == sum(max(0, q_len - length) for length in lengths)


@pytest.mark.parametrize("kv_format", LOW_BIT)
@pytest.mark.parametrize("pool", POOLS)
def test_pools(device: str, pool: str, kv_format: str) -> None:
    assert_decodes(make_problem(EDGES, device, kv_format=kv_format, pool=pool, page_size=16))


@pytest.mark.parametrize(("kv_format", "v_format"), [*MIXED, ("fp8_e5m2", None)])
@pytest.mark.parametrize(("head_size", "page_size"), [(128, 64), (64, 16)])
def test_formats_of_k_and_v(device: str, kv_format: str, v_format: str | None, head_size: int, page_size: int) -> None:
    problem = make_problem(
        EDGES, device, kv_format=kv_format, v_format=v_format, head_size=head_size, page_size=page_size,
        pool="separate_hnd", scales=("head", "sequence"),
    )  # fmt: skip
    assert_decodes(problem)


@pytest.mark.parametrize("kv_format", LOW_BIT)
@pytest.mark.parametrize("kind", SCALE_KINDS)
def test_descales(device: str, kind: str, kv_format: str) -> None:
    assert_decodes(make_problem(FEW, device, kv_format=kv_format, scales=(kind, kind)))


@pytest.mark.parametrize("kv_format", LOW_BIT)
@pytest.mark.parametrize("value", [0.0, 1e-40, 1e30, -0.5])
def test_extreme_descales_of_k(device: str, value: float, kv_format: str) -> None:
    problem = make_problem(FEW, device, kv_format=kv_format)
    problem.k_scale = torch.full((1,), value, device=device)
    if value == 1e30:
        problem.query.mul_(1e-30)
    assert_decodes(problem)


@pytest.mark.parametrize("kv_format", LOW_BIT)
def test_channel_scales_as_factors_of_q_and_o(device: str, kv_format: str) -> None:
    """Per (KV head, channel): the cache holds x / scale, q_mul and o_mul are the scales of a query head's KV head."""
    problem = make_problem(EDGES, device, kv_format=kv_format)
    scales = torch.randint(4, 8, (2, 2, 128), generator=torch.Generator().manual_seed(0)) / 4.0  # exact in f16
    q_mul, o_mul = (scale.repeat_interleave(4, dim=0).to(device) for scale in scales)
    problem.q_mul, problem.o_mul = q_mul, o_mul
    assert_decodes(problem)


@pytest.mark.parametrize("kv_format", LOW_BIT)
@pytest.mark.parametrize("q_dtype", [BF16, FP16])
def test_query_dtypes(device: str, q_dtype: torch.dtype, kv_format: str) -> None:
    assert_decodes(make_problem(FEW, device, kv_format=kv_format, q_dtype=q_dtype), q_dtype)


@pytest.mark.parametrize("kv_format", LOW_BIT)
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_one_hot_v_shows_every_token_and_element(device: str, head_size: int, kv_format: str) -> None:
    """Q = 0, so each P is the same power of two, and V one-hot: O counts tokens per element, exactly."""
    problem = make_problem((131, 77), device, kv_format=kv_format, head_size=head_size, page_size=16)
    problem.query.zero_()
    tokens = torch.arange(131 + 77)
    problem.cache.set_v(torch.nn.functional.one_hot(tokens * 7 % head_size, head_size).float()[:, None].to(device))
    out, lse = decode(problem)
    assert_oracle(problem, out, lse, PROBE_TOLERANCE)


@pytest.mark.parametrize("kv_format", LOW_BIT)
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_every_code_at_every_place_of_a_row(device: str, head_size: int, kv_format: str) -> None:
    """One key: O is its V exactly, whatever its codes; K's show in the LSE."""
    fmt = get_format(kv_format)
    problem = make_problem([1] * 2**fmt.bits, device, heads=2, kv_heads=1, head_size=head_size, kv_format=kv_format)
    cache = problem.cache
    gen = torch.Generator().manual_seed(0)
    for codes in (cache.k_cache, cache.v_cache):
        codes.copy_(torch.randint(256, codes.shape, dtype=torch.uint8, generator=gen).to(device))
    if cache.k_blocks is not None and cache.v_blocks is not None:
        for blocks in (cache.k_blocks, cache.v_blocks):  # every finite one, subnormals and negative ones included
            codes = torch.randint(127, blocks.shape, dtype=torch.uint8, generator=gen)
            sign = torch.randint(2, blocks.shape, dtype=torch.uint8, generator=gen) * 128
            blocks.view(torch.uint8).copy_((codes + sign).to(device))
    out, lse = decode(problem)
    assert_oracle(problem, out, lse, PROBE_TOLERANCE)


@pytest.mark.parametrize("planar", [False, True], ids=["rows", "planar"])
def test_nvfp4_codes_and_block_scales_in_one_tensor(device: str, planar: bool) -> None:
    """Rows padded to 80 bytes that end in their block scales; a page of codes before its scales, as in vLLM."""
    problem = make_problem(EDGES, device, kv_format="nvfp4", page_size=16, pool="separate_hnd")
    cache, pages = problem.cache, len(problem.cache.k_cache)
    expected = decode(problem)
    both = torch.full((2, pages, 2, 16, 72 if planar else 80), 0xFF, dtype=torch.uint8, device=device)
    (k, k_blocks), (v, v_blocks) = (split_nvfp4_cache(side.transpose(1, 2), 128, planar) for side in both)
    copies = ((k, cache.k_cache), (v, cache.v_cache), (k_blocks, cache.k_blocks), (v_blocks, cache.v_blocks))
    for to, source in copies:
        assert source is not None
        to.view(torch.uint8).copy_(source.view(torch.uint8))
    problem.cache = dataclasses.replace(cache, k_cache=k, v_cache=v, k_blocks=k_blocks, v_blocks=v_blocks)
    out, lse = decode(problem)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_block_scales_as_raw_bytes(device: str) -> None:
    problem = make_problem(FEW, device, kv_format="nvfp4")
    expected = decode(problem)
    cache = problem.cache
    assert cache.k_blocks is not None and cache.v_blocks is not None
    problem.cache = dataclasses.replace(
        cache, k_blocks=cache.k_blocks.view(torch.uint8), v_blocks=cache.v_blocks.view(torch.uint8)
    )
    assert all(torch.equal(a, b) for a, b in zip(decode(problem), expected, strict=True))


@pytest.mark.parametrize("kv_format", ["e2m3", "nvfp4"])
def test_dead_places_never_reach_a_result(device: str, kv_format: str) -> None:
    """Whatever is not live may hold any byte, block scales NaN: nothing changes but the dead bytes."""
    problem = make_problem((1, 65, 0, 127), device, kv_format=kv_format, page_size=128, scales=("head", "head"))
    expected = decode(problem)
    cache = problem.cache
    live = torch.zeros(cache.k_cache.shape[:2], dtype=torch.bool)
    live[cache.live_pages.cpu(), cache.live_slots.cpu()] = True
    for t in (cache.k_cache, cache.v_cache, cache.k_blocks, cache.v_blocks):
        if t is not None:
            t.view(torch.uint8)[~live.to(device)] = 0xFF
    assert all(torch.equal(a, b) for a, b in zip(decode(problem), expected, strict=True))
    assert_oracle(problem, *expected)


@pytest.mark.parametrize("kv_format", LOW_BIT)
def test_several_splits_and_none(device: str, kv_format: str) -> None:
    problem = make_problem((3000, 5, 0, 700), device, kv_format=kv_format, scales=("sequence", "head"))
    for max_splits in (1, None):
        assert_decodes(problem, max_splits=max_splits)


# Arguments


def with_blocks(problem: Problem, **changes: object) -> None:
    problem.cache = dataclasses.replace(problem.cache, **changes)  # type: ignore[arg-type]
    run(make_runner(problem), problem)


def test_block_scales_are_checked() -> None:
    problem = make_problem(FEW, kv_format="nvfp4")
    cache = problem.cache
    blocks = cache.k_blocks
    assert blocks is not None
    pages = len(blocks)
    with pytest.raises(ValueError, match="k_block_scale must be given: a nvfp4 cache has 8 block scales per row"):
        with_blocks(problem, k_blocks=None)
    with pytest.raises(ValueError, match="v_block_scale must have shape"):
        with_blocks(dataclasses.replace(problem, cache=cache), v_blocks=blocks[..., :4])
    with pytest.raises(TypeError, match=r"k_block_scale must have dtype torch.float8_e4m3fn or torch.uint8"):
        with_blocks(dataclasses.replace(problem, cache=cache), k_blocks=blocks.float())
    wide = torch.zeros(pages, 64, 2, 12, dtype=torch.uint8)
    with pytest.raises(ValueError, match="k_block_scale: rows of 8 bytes must start at multiples of 8 bytes"):
        with_blocks(dataclasses.replace(problem, cache=cache), k_blocks=wide[..., :8])
    fp8 = make_problem(FEW)
    with pytest.raises(ValueError, match="k_block_scale must be None: a fp8 cache has no block scales"):
        with_blocks(fp8, k_blocks=blocks)


def test_strides_of_block_scales_fit_in_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(FEW, kv_format="nvfp4")
    assert problem.cache.k_blocks is not None
    page = problem.cache.k_blocks.stride(0)
    monkeypatch.setattr("mjolnir.signature.MAX_BLOCK_STRIDE", page)
    run(make_runner(problem), problem)
    monkeypatch.setattr("mjolnir.signature.MAX_BLOCK_STRIDE", page - 1)
    with pytest.raises(ValueError, match=f"k_block_scale: strides must be at most {page - 1} bytes, got "):
        run(make_runner(problem), problem)


def test_rows_of_another_width_are_refused() -> None:
    problem = make_problem(FEW, kv_format="e2m3")
    with pytest.raises(ValueError, match=r"v_cache must have shape \(any, 64, 2, 96\)"):
        with_blocks(problem, v_cache=torch.zeros(len(problem.cache.k_cache), 64, 2, 128, dtype=torch.uint8))


def test_scale_kinds_reach_the_oracle() -> None:
    """A descale is applied once, to the decoded values: twice the descale is twice the values."""
    problem = make_problem(FEW, kv_format="e2m3")
    problem.v_scale = make_scale("head", 4, 2)
    once = problem.oracle()[0]
    problem.v_scale = problem.v_scale * 2
    assert torch.equal(problem.oracle()[0], 2 * once)
