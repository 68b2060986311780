"""Layouts: every element of every view against index arithmetic on the flat storage."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mjolnir.layouts import KVLayout, detect_kv_layout, split_kv_cache

# Sizes that differ from each other and from 2, so that a shape is one layout only.
PAGES, PAGE, HEADS, HEAD_SIZE = 5, 16, 3, 8


def shape_of(layout: KVLayout, pages: int, page: int, heads: int, head_size: int, *, spelled: bool) -> tuple[int, ...]:
    """A table kept apart from the code's: ``spelled`` writes the 2 of "2D" as a dimension."""
    last = (2, head_size) if spelled else (2 * head_size,)
    return {
        KVLayout.BHN2D: (pages, heads, page, *last),
        KVLayout.BNH2D: (pages, page, heads, *last),
        KVLayout.B2NHD: (pages, 2, page, heads, head_size),
        KVLayout.B2HND: (pages, 2, heads, page, head_size),
        KVLayout.TWO_BNHD: (2, pages, page, heads, head_size),
        KVLayout.TWO_BHND: (2, pages, heads, page, head_size),
    }[layout]


def flat_index(layout: KVLayout, pages: int, page: int, heads: int, head_size: int, kv: int) -> torch.Tensor:
    """Where element (b, n, h, d) of K (kv 0) or V (kv 1) lies in a contiguous cache, as (pages, page, heads, d)."""
    b, n, h, d = torch.meshgrid(*(torch.arange(size) for size in (pages, page, heads, head_size)), indexing="ij")
    return {
        KVLayout.BHN2D: ((b * heads + h) * page + n) * 2 * head_size + kv * head_size + d,
        KVLayout.BNH2D: ((b * page + n) * heads + h) * 2 * head_size + kv * head_size + d,
        KVLayout.B2NHD: (((b * 2 + kv) * page + n) * heads + h) * head_size + d,
        KVLayout.B2HND: (((b * 2 + kv) * heads + h) * page + n) * head_size + d,
        KVLayout.TWO_BNHD: (((kv * pages + b) * page + n) * heads + h) * head_size + d,
        KVLayout.TWO_BHND: (((kv * pages + b) * heads + h) * page + n) * head_size + d,
    }[layout]


@given(
    layout=st.sampled_from(KVLayout),
    spelled=st.booleans(),
    pages=st.integers(0, 5),
    page=st.integers(1, 20),
    heads=st.integers(1, 6),
    head_size=st.sampled_from([1, 2, 8]),
)
def test_views_are_where_arithmetic_says_and_cost_nothing(
    layout: KVLayout, spelled: bool, pages: int, page: int, heads: int, head_size: int
) -> None:
    shape = shape_of(layout, pages, page, heads, head_size, spelled=spelled)
    cache = torch.arange(math.prod(shape)).reshape(shape)
    for kv, view in enumerate(split_kv_cache(cache, layout, head_size)):
        assert view.shape == (pages, page, heads, head_size)
        assert torch.equal(view, flat_index(layout, pages, page, heads, head_size, kv))
        assert view.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
    assert detect_kv_layout(shape, heads, page, head_size, override=layout) is layout


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("layout", KVLayout)
def test_detects_every_layout(layout: KVLayout, spelled: bool) -> None:
    shape = shape_of(layout, PAGES, PAGE, HEADS, HEAD_SIZE, spelled=spelled)
    assert detect_kv_layout(shape, HEADS, PAGE, HEAD_SIZE) is layout
    assert detect_kv_layout(torch.Size(shape), HEADS, PAGE, HEAD_SIZE, override=layout.value) is layout


# The documented order: K and V in one row, then 5 dimensions, then one row with its 2 written out; a form that swaps
# two equal sizes loses to the one listed first.
@pytest.mark.parametrize(
    ("shape", "heads", "page", "winner", "losers"),
    [
        ((5, 16, 16, 2 * HEAD_SIZE), 16, 16, "BHN2D", ["BNH2D"]),
        ((5, 2, 16, 16, HEAD_SIZE), 16, 16, "B2NHD", ["B2HND"]),
        ((2, 5, 16, 16, HEAD_SIZE), 16, 16, "2BNHD", ["2BHND"]),
        ((2, 2, 16, 3, HEAD_SIZE), 3, 16, "B2NHD", ["2BNHD"]),
        ((2, 2, 3, 16, HEAD_SIZE), 3, 16, "B2HND", ["2BHND"]),
        ((2, 2, 16, 16, HEAD_SIZE), 16, 16, "B2NHD", ["B2HND", "2BNHD", "2BHND"]),
        ((5, 2, 16, 2, HEAD_SIZE), 2, 16, "B2NHD", ["BHN2D"]),
        ((5, 2, 3, 2, HEAD_SIZE), 3, 2, "B2HND", ["BNH2D"]),
        ((2, 2, 2, 2, HEAD_SIZE), 2, 2, "B2NHD", ["B2HND", "2BNHD", "2BHND", "BHN2D", "BNH2D"]),
        ((2, 16, 3, 2, HEAD_SIZE), 3, 16, "BNH2D", []),  # 2 pages, but no other layout has 16 there
        ((1, 2, 1, 1, HEAD_SIZE), 1, 1, "B2NHD", ["B2HND"]),
    ],
)
def test_ambiguous_shapes(shape: tuple[int, ...], heads: int, page: int, winner: str, losers: list[str]) -> None:
    assert detect_kv_layout(shape, heads, page, HEAD_SIZE) is KVLayout(winner)
    for layout in KVLayout:
        if layout.value in [winner, *losers]:
            assert detect_kv_layout(shape, heads, page, HEAD_SIZE, override=layout) is layout
        else:
            with pytest.raises(ValueError, match=layout.value):
                detect_kv_layout(shape, heads, page, HEAD_SIZE, override=layout)


@given(shape=st.lists(st.sampled_from([1, 2, 3, 8, 16]), max_size=6))
def test_what_is_detected_splits(shape: list[int]) -> None:
    try:
        layout = detect_kv_layout(shape, HEADS, PAGE, HEAD_SIZE)
    except ValueError:
        spellings = [(layout, spelled) for layout in KVLayout for spelled in (False, True)]
        assert not any(
            tuple(shape) == shape_of(layout, pages, PAGE, HEADS, HEAD_SIZE, spelled=spelled)
            for layout, spelled in spellings
            for pages in shape
        )
    else:
        k, v = split_kv_cache(torch.zeros(shape), layout, HEAD_SIZE)
        assert k.shape[1:] == v.shape[1:] == (PAGE, HEADS, HEAD_SIZE)


def test_unknown_shape_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"\(5, 16, 4, 8\)") as error:
        detect_kv_layout((5, 16, 4, 8), HEADS, PAGE, HEAD_SIZE)
    assert "BHN2D (pages, 3, 16, 16); BNH2D (pages, 16, 3, 16); B2NHD (pages, 2, 16, 3, 8)" in str(error.value)
    assert "2BHND (2, pages, 3, 16, 8); BHN2D (pages, 3, 16, 2, 8)" in str(error.value)
    with pytest.raises(ValueError, match="NHD"):
        detect_kv_layout((5, 2, 16, 3, 8), HEADS, PAGE, HEAD_SIZE, override="NHD")


def test_strides_are_kept_and_sizes_of_one_may_carry_any() -> None:
    # One layer of a pool of 4, and one KV head with a stride that points nowhere.
    packed = torch.arange(PAGES * 4 * 2 * PAGE * HEAD_SIZE).reshape(PAGES, 4, 2, PAGE, 1, HEAD_SIZE)
    layer = packed[:, 1]
    wild = layer.as_strided(layer.shape, (*layer.stride()[:3], 10**9, 1), layer.storage_offset())
    assert detect_kv_layout(wild.shape, 1, PAGE, HEAD_SIZE) is KVLayout.B2NHD
    k, v = split_kv_cache(wild, KVLayout.B2NHD, HEAD_SIZE)
    assert torch.equal(k, packed[:, 1, 0]) and torch.equal(v, packed[:, 1, 1])
    assert k.stride(0) == 4 * 2 * PAGE * HEAD_SIZE


@pytest.mark.parametrize(
    ("shape", "layout"),
    [((5, 3, 16, 15), "BHN2D"), ((5, 16, 3, 3, 8), "BNH2D"), ((5, 3, 16, 3, 8), "B2NHD"), ((5, 2, 16, 3, 4), "2BNHD")],
)
def test_split_rejects_what_does_not_fit(shape: tuple[int, ...], layout: str) -> None:
    with pytest.raises(ValueError, match=layout):
        split_kv_cache(torch.zeros(shape), layout, HEAD_SIZE)


def test_unknown_layouts_and_what_is_no_tensor_are_refused() -> None:
    with pytest.raises(ValueError, match="layout must be one of BHN2D, .*2BHND, got 'NHD'"):
        split_kv_cache(torch.zeros(5, 2, 16, 3, HEAD_SIZE), "NHD", HEAD_SIZE)
    with pytest.raises(ValueError, match="layout must be one of .* got 'NHD'"):
        detect_kv_layout((5, 2, 16, 3, HEAD_SIZE), 3, 16, HEAD_SIZE, override="NHD")
    with pytest.raises(TypeError, match=r"shape must be a sequence of integers, got None \(NoneType\)"):
        detect_kv_layout(None, 3, 16, HEAD_SIZE)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cache must be a dense tensor, got one of layout torch.sparse_coo"):
        split_kv_cache(torch.zeros(5, 2, 16, 3, HEAD_SIZE).to_sparse(), KVLayout.B2NHD, HEAD_SIZE)
    with pytest.raises(TypeError, match="cache must be a torch.Tensor, got NoneType"):
        split_kv_cache(None, KVLayout.B2NHD, HEAD_SIZE)  # type: ignore[arg-type]


def test_split_rejects_rows_that_are_not_contiguous() -> None:
    cache = torch.zeros(5, 2, 16, 3, 2 * HEAD_SIZE)[..., ::2]
    with pytest.raises(ValueError, match="stride 1"):
        split_kv_cache(cache, KVLayout.B2NHD, HEAD_SIZE)
