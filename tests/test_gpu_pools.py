"""On a GPU: KV pools whose offsets pass 2^31 elements and 2^32 bytes. Most of the pool is never written or read."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import PagedCache, Problem, make_query
from running import assert_decodes

from mjolnir.formats import get_format
from mjolnir.layouts import KVLayout, split_kv_cache

pytestmark = pytest.mark.gpu

PAGE, KV_HEADS, D = 16, 2, 128
LENS = (1000, 65, 16, 1, 300)


def far_problem(k_cache: torch.Tensor, v_cache: torch.Tensor, kv_format: str, q_len: int = 1) -> Problem:
    """Sequences whose pages lie at both ends and in the middle of the pool."""
    num_pages = k_cache.shape[0]
    counts = [-(-length // PAGE) for length in LENS]
    gen = torch.Generator().manual_seed(0)
    span = num_pages // 3
    near = 1 + torch.arange(sum(counts))
    pages = (near + torch.tensor([0, span, num_pages - span])[torch.arange(sum(counts)) % 3]).flip(0)
    pages[0], pages[1] = num_pages - 1, 0
    assert int(near[-1]) < span - 1 and len(pages.unique()) == len(pages)
    table = torch.full((len(LENS), max(counts) + 1), -1, dtype=torch.int32)
    live_pages, live_slots = [], []
    for row, own, length in zip(table, pages.split(counts), LENS, strict=True):
        row[: len(own)] = own
        token = torch.arange(length)
        live_pages.append(own[token // PAGE])
        live_slots.append(token % PAGE)
    cache = PagedCache(
        fmt=get_format(kv_format),
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=table.cuda(),
        seq_lens=torch.tensor(LENS, dtype=torch.int32, device="cuda"),
        live_pages=torch.cat(live_pages).cuda(),
        live_slots=torch.cat(live_slots).cuda(),
    )
    for setter in (cache.set_k, cache.set_v):
        setter(torch.randn(sum(LENS), KV_HEADS, D, generator=gen).cuda())
    query = make_query(len(LENS) * q_len, 8, D, device="cuda")
    one = torch.ones(1, device="cuda")
    return Problem(cache, query, q_len, one, one, D**-0.5)


def pool_of(gib: float, dims: str, kv_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one uninitialised tensor in the given layout, of at least ``gib`` GiB."""
    fmt = get_format(kv_format)
    num_pages = math.ceil(gib * 2**30 / (2 * PAGE * KV_HEADS * fmt.row_bytes(D)))
    sizes = {"B": num_pages, "N": PAGE, "H": KV_HEADS, "D": D, "2": 2}
    pool = torch.empty([sizes[dim] for dim in dims], dtype=fmt.storage_dtype, device="cuda")
    return split_kv_cache(pool, KVLayout(dims), D)


@pytest.mark.parametrize(
    ("kv_format", "dims", "gib"), [("fp8", "B2NHD", 4.5), ("fp8", "2BHND", 9.0), ("bf16", "BHN2D", 9.0)]
)
def test_pools_past_2_to_the_32_bytes(kv_format: str, dims: str, gib: float) -> None:
    """Past 2^32 bytes, page id × stride past 2^31 elements; in 2BHND also within K alone."""
    k_cache, v_cache = pool_of(gib, dims, kv_format)
    last = (k_cache.shape[0] - 1) * k_cache.stride(0)
    assert last > 2**31 and last * k_cache.element_size() + v_cache.storage_offset() > 2**32
    assert_decodes(far_problem(k_cache, v_cache, kv_format))


def test_a_page_stride_far_larger_than_a_page() -> None:
    """A pool packed by layers: few pages, each 12 MiB after the one before."""
    stride, num_pages = 12 * 2**20, 400
    pool = torch.empty(stride * num_pages, dtype=torch.uint8, device="cuda")
    page_bytes = PAGE * KV_HEADS * D
    shape, strides = (num_pages, PAGE, KV_HEADS, D), (stride, KV_HEADS * D, D, 1)
    k_cache = pool.as_strided(shape, strides, 5 * page_bytes)
    v_cache = pool.as_strided(shape, strides, 6 * page_bytes)
    assert (num_pages - 1) * stride > 2**32
    assert_decodes(far_problem(k_cache, v_cache, "fp8", q_len=4))
