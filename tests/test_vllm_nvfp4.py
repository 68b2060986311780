"""nvfp4 caches in the vLLM backend: pages, write, decode, and prefill over 16-bit copies, against the codec itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_standins as standins
from vllm_standins import attend, make_builder, make_common, make_layer, make_query

from mjolnir.formats import get_format
from mjolnir.integrations.vllm import nvfp4
from mjolnir.integrations.vllm.counters import COUNTERS
from mjolnir.verify.compare import ROW_TOLERANCE, row_errors

BF16_COPY_ERROR = 4e-3
"""Of a row: the copies of K and V are rounded to bf16, 2^-9 of each element, and the scores follow K."""


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    standins.install(monkeypatch)
    monkeypatch.delitem(sys.modules, "mjolnir.integrations.vllm.backend", raising=False)
    monkeypatch.delenv("MJOLNIR_VLLM_FALLBACK", raising=False)
    monkeypatch.delenv("MJOLNIR_VLLM_SHADOW", raising=False)
    COUNTERS.reset()
    from mjolnir.integrations.vllm.backend import MjolnirBackend

    yield MjolnirBackend
    sys.modules.pop("mjolnir.integrations.vllm.backend", None)


@pytest.mark.parametrize("heads, tokens, head_size", [(2, 16, 64), (1, 32, 128), (3, 16, 256)])
@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_a_page_holds_its_parts_side_by_side(heads: int, tokens: int, head_size: int, order: str) -> None:
    """Every byte of a page belongs to exactly one part, and codes start at multiples of 16 bytes."""
    width, pages = nvfp4.row_bytes(head_size), 3
    raw = torch.arange(pages * heads * tokens * width, dtype=torch.int32)
    shape = (pages, heads, tokens, width) if order == "HND" else (pages, tokens, heads, width)
    cache = raw.to(torch.uint8).view(shape)
    views = nvfp4.split(cache if order == "HND" else cache.transpose(1, 2), head_size)
    at = [part.storage_offset() for part in views]
    seen: list[int] = []
    for part in views:
        assert part.shape[:3] == (pages, tokens, heads)
        for head in range(heads):
            for token in range(tokens):
                row = part[1, token, head]
                seen += range(row.storage_offset(), row.storage_offset() + row.numel())
    size = heads * tokens * width
    assert sorted(seen) == list(range(size, 2 * size))
    assert all(offset % 16 == 0 for offset in at[:2])
    assert all(stride * part.element_size() % 16 == 0 for part in views[:2] for stride in part.stride()[:3])


def test_pages_that_are_not_whole_are_refused() -> None:
    cache = torch.zeros(2, 2, 5, 16, nvfp4.row_bytes(64), dtype=torch.uint8)[:, :, 0]  # another layer's rows between
    with pytest.raises(ValueError, match="an nvfp4 cache must have contiguous pages and rows of 72 bytes"):
        nvfp4.split(cache, 64)


def dense(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What the codec keeps of rows (tokens, h_k, d)."""
    fmt = get_format("nvfp4")
    blocks = fmt.block_scales(x, scale)
    return (fmt.decode(fmt.encode(x, scale, blocks), blocks) * scale).double()


@pytest.mark.parametrize(
    "query_lens, seq_lens, path",
    [
        ([1, 1], [40, 7], "decode"),
        ([3, 2], [40, 7], "ragged"),
        ([1, 3, 20], [33, 16, 30], "split"),
        ([20], [50], "fallback: no request with at most 3 query tokens leads the step"),
    ],
)
def test_steps_over_an_nvfp4_cache(backend, query_lens, seq_lens, path) -> None:
    layer = make_layer("l", backend, kv_cache_dtype="nvfp4")
    assert not layer.impl.supports_quant_query_input
    common = make_common(query_lens, seq_lens)
    heads, d = layer.impl.num_kv_heads, layer.head_size
    gen = torch.Generator().manual_seed(3)
    kept = []
    for request, length in enumerate(seq_lens):
        k, v = (torch.randn(length, heads, d, generator=gen).bfloat16() for _ in range(2))
        positions = torch.arange(length)
        slots = common.block_table_tensor[request, positions // 16].long() * 16 + positions % 16
        layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, slots)
        kept.append((dense(k, layer._k_scale), dense(v, layer._v_scale)))
    metadata = make_builder([layer], drafts=2).build(0, common)
    assert COUNTERS.snapshot() == {path: 1}
    query = make_query(layer, sum(query_lens))
    out = attend(layer, metadata, query)

    want, first, group = torch.zeros_like(query, dtype=torch.float64), 0, layer.impl.num_heads // heads
    for length, q_len, (k, v) in zip(seq_lens, query_lens, kept, strict=True):
        for i in range(q_len):
            for head in range(layer.impl.num_heads):
                seen = length - q_len + i + 1
                scores = layer.impl.scale * (k[:seen, head // group] @ query[first + i, head].double())
                want[first + i, head] = torch.softmax(scores, 0) @ v[:seen, head // group]
        first += q_len
    errors = row_errors(out, want).amax(1)
    here = {"split": 4}.get(path, 0 if path.startswith("fallback") else sum(query_lens))
    assert (errors[:here] <= ROW_TOLERANCE).all() and (errors[here:] <= BF16_COPY_ERROR).all()


def test_layers_that_only_a_fallback_could_do_are_refused(backend) -> None:
    with pytest.raises(
        ValueError, match="only Mjolnir reads nvfp4 caches here, and not for this layer: sliding window of 8"
    ):
        make_layer("l", backend, kv_cache_dtype="nvfp4", sliding_window=8)
    layer = make_layer("l", backend, kv_cache_dtype="nvfp4", num_heads=32, num_kv_heads=1)
    with pytest.raises(ValueError, match="it cannot decode every layer: 4 query tokens per request"):
        make_builder([layer], drafts=3)


def test_the_backend_allocates_what_it_splits(backend, monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend.supports_kv_cache_dtype("nvfp4") and backend.supports_kv_cache_dtype("fp8")
    assert backend.get_kv_cache_shape(7, 16, 2, 128, cache_dtype_str="nvfp4") == (7, 2, 16, 144)


def test_every_nth_step_is_shadowed(backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MJOLNIR_VLLM_SHADOW", "1")
    layer = make_layer("l", backend, kv_cache_dtype="nvfp4")
    key = torch.randn(48, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    layer.impl.do_kv_cache_update(layer, key, key, layer.kv_cache, torch.arange(16, 64))
    attend(layer, make_builder([layer]).build(0, make_common([1], [40])), make_query(layer, 1))
    assert COUNTERS.snapshot() == {"decode": 1, "shadow check": 1}


def test_copies_hold_no_more_than_the_longest_request() -> None:
    """SimpleNamespace stands for the fallback's metadata; only live pages are copied."""
    cache = torch.zeros(10, 1, 16, nvfp4.row_bytes(64), dtype=torch.uint8)
    layer = SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0))
    table = torch.tensor([[3, 4, 2**30], [5, -1, -1]], dtype=torch.int32)
    metadata = SimpleNamespace(
        max_seq_len=20, block_table=table, seq_lens=torch.tensor([20, 3], dtype=torch.int32), scheduler_metadata="fp8"
    )
    shape = nvfp4.LayerShape(2, 1, 64, "nvfp4", torch.bfloat16)
    copied, changed = nvfp4.expand(nvfp4.split(cache, 64), layer, shape, metadata)
    assert copied.shape == (4, 1, 16, 128) and copied.dtype == torch.bfloat16
    assert changed.block_table.tolist() == [[0, 1], [2, 3]] and changed.scheduler_metadata is None
    assert metadata.block_table is table and metadata.scheduler_metadata == "fp8"
