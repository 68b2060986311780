"""``write_kv``: a step's K and V quantised into the pages of a cache.

On a GPU with Triton that is one launch; elsewhere PyTorch writes the same bytes through ``formats``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
from typing import Any

import torch

from mjolnir.checks import check_tensor, layout_key, remember
from mjolnir.formats import get_format, get_formats
from mjolnir.page_views import MANY_ROWS, Cache, Pages, as_bits, broadcastable

logger = logging.getLogger(__name__)

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclasses.dataclass(frozen=True)
class Side:
    """K's or V's part of a write: new rows and the pages they go to."""

    rows: torch.Tensor
    cache: Cache


@dataclasses.dataclass(frozen=True)
class Layout:
    """A write, checked: all but addresses and the number of tokens. Row strides (token, head) are in elements."""

    k_pages: Pages
    v_pages: Pages
    key_strides: tuple[int, int]
    value_strides: tuple[int, int]


_checked: dict[tuple[Any, ...], Layout] = {}


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    *,
    kv_format: str = "fp8",
    v_format: str | None = None,
    k_block_scale: torch.Tensor | None = None,
    v_block_scale: torch.Tensor | None = None,
) -> None:
    """Quantise K and V of a step's tokens and scatter them into pages, on the current stream.

    What is stored is what ``encode`` (and ``block_scales``) of the format give for x and its descale, code for code:
    x / descale in fp32, rounded to nearest, ties to even. Below 16 bits what is past the format's largest value
    saturates, ±Inf too; 16-bit formats are the IEEE cast. A NaN is stored as one NaN code (0x7f in fp8, 0x7fc0 in
    bf16, 0x7e00 in fp16) whatever its sign, and as the largest value in e2m3 and nvfp4, which have no NaN. A descale
    of 0 divides by 1.

    Args:
        key, value: (≥ tokens, h_k, d) or (≥ tokens, h_k · d), bf16, fp16 or fp32, rows of d contiguous, any strides
            between them (slices of a packed QKV are fine). d is a power of two, of an nvfp4 cache 16 or more.
        k_cache, v_cache: (pages, page_size, h_k, row_width) views of the format's dtype, rows contiguous, any strides
            that are multiples of 4 bytes, but 0. ``split_kv_cache`` makes them.
        slot_mapping: (tokens,) int32 or int64 on the device: page · page_size + row. A token with a negative slot is
            not written. Two tokens of one slot leave a mix of their bytes. A slot past the last page is not written
            on a GPU; PyTorch raises.
        k_scale, v_scale: fp32 descales, finite: 1 element, (h_k,), or (h_k, d) per channel, which a runner takes back
            through ``q_mul`` and ``o_mul``.
        kv_format, v_format: names in ``mjolnir.formats``, of K and of V; None: V has K's.
        k_block_scale, v_block_scale: (pages, page_size, h_k, d / 16) e4m3 or uint8 views, written too, of a format
            that has block scales (nvfp4): in the pages' own rows or in a tensor of their own, any strides but 0.

    Raises:
        ValueError, TypeError: an argument out of its range, named.
        RuntimeError: this layout was never written before and a CUDA graph is being captured.
    """
    sides = (
        Side(key, Cache(k_cache, k_scale, k_block_scale)),
        Side(value, Cache(v_cache, v_scale, v_block_scale)),
    )
    tokens = len(slot_mapping) if isinstance(slot_mapping, torch.Tensor) and slot_mapping.dim() else 0
    k_format, v_format = (fmt.name for fmt in get_formats(kv_format, v_format))
    tensors = (key, value, *sides[0].cache, *sides[1].cache)
    asked = (k_format, v_format, tokens > MANY_ROWS, layout_key(tensors, any_rows=2))
    layout = _checked.get(asked)
    first = layout is None
    if layout is None:
        layout = check_layout(sides, k_format, v_format)
    check_tensor("slot_mapping", slot_mapping, dtype=(torch.int32, torch.int64), ndim=1, device=key.device,
                 contiguous_rows=True)  # fmt: skip
    for name, rows in (("key", key), ("value", value)):
        if rows.shape[0] < tokens:
            raise ValueError(f"{name} must have at least a row per slot, {tokens}, got {rows.shape[0]}")
    if tokens:
        if key.is_cuda and has_triton():
            if first and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "write_kv has not run with this layout (and more, or at most, "
                    f"{MANY_ROWS} tokens) and a CUDA graph is being captured: call it once before the capture"
                )
            from mjolnir.kernels.write_kernel import launch_write

            with torch.cuda.device(key.device):
                launch_write(layout, *sides, slot_mapping)
        else:
            write_in_torch(layout, *sides, slot_mapping)
    if first and tokens:
        remember(_checked, asked, layout)


def check_layout(sides: tuple[Side, Side], k_format: str, v_format: str) -> Layout:
    """Check everything that does not depend on how many tokens there are.

    Raises:
        ValueError, TypeError: as ``write_kv``.
    """
    key, k_codes = sides[0].rows, sides[0].cache.codes
    check_tensor("key", key, dtype=INPUT_DTYPES, ndim=(2, 3))
    check_tensor("k_cache", k_codes, ndim=4)
    num_kv_heads = max(1, k_codes.shape[2])
    head_size = key.shape[2] if key.dim() == 3 else key.shape[1] // num_kv_heads
    if head_size < 1 or head_size & (head_size - 1):
        raise ValueError(
            f"key must have a power of two elements per KV head, got shape {tuple(key.shape)} for {num_kv_heads} heads"
        )
    pages, strides = [], []
    for name, side, fmt in (
        ("key", sides[0], get_format(k_format)),
        ("value", sides[1], get_format(v_format, "v_format")),
    ):
        rows = side.rows
        check_tensor(name, rows, dtype=key.dtype, ndim=(2, 3), device=key.device, contiguous_rows=True)
        if tuple(rows.shape[1:]) not in ((num_kv_heads, head_size), (num_kv_heads * head_size,)):
            raise ValueError(
                f"{name} must have shape (tokens, {num_kv_heads}, {head_size}) or (tokens, "
                f"{num_kv_heads * head_size}), got {tuple(rows.shape)}"
            )
        pages.append(Pages.check(name[0], side.cache, fmt, num_kv_heads, head_size, key.device, written=True))
        strides.append((rows.stride(0), rows.stride(1) if rows.dim() == 3 else head_size))
    k_pages, v_pages = pages
    if (k_pages.num_pages, k_pages.page_size) != (v_pages.num_pages, v_pages.page_size):
        raise ValueError(
            f"v_cache must have the pages of k_cache, {k_pages.num_pages} of {k_pages.page_size} tokens, got "
            f"{v_pages.num_pages} of {v_pages.page_size}"
        )
    return Layout(k_pages, v_pages, strides[0], strides[1])


@torch.no_grad()
def write_in_torch(layout: Layout, key: Side, value: Side, slot_mapping: torch.Tensor) -> None:
    """The fallback: the codec itself, and an indexed assignment. Reads the slots, so it cannot be captured.

    Raises:
        ValueError: a slot past the last page.
    """
    live = (slot_mapping >= 0).nonzero().flatten()
    slots = slot_mapping[live].long()
    if len(slots) and int(slots.max()) >= layout.k_pages.num_slots:
        raise ValueError(
            f"slot_mapping names slot {int(slots.max())}, but {layout.k_pages.num_pages} pages of "
            f"{layout.k_pages.page_size} tokens have {layout.k_pages.num_slots}"
        )
    for pages, side in ((layout.k_pages, key), (layout.v_pages, value)):
        at = slots // pages.page_size, slots % pages.page_size
        rows = side.rows if side.rows.dim() == 3 else side.rows.unflatten(1, (pages.num_kv_heads, pages.head_size))
        scale, fmt = broadcastable(side.cache.scale), pages.fmt
        blocks = fmt.block_scales(rows[live], scale)
        as_bits(side.cache.codes)[at] = as_bits(fmt.encode(rows[live], scale, blocks))
        if side.cache.block_scale is not None and blocks is not None:
            as_bits(side.cache.block_scale)[at] = as_bits(blocks)


@functools.cache
def has_triton() -> bool:
    """Whether GPU tensors have a kernel here; says once what becomes of them without one."""
    if importlib.util.find_spec("triton") is not None:
        return True
    logger.warning("Triton is not installed: caches are written and expanded by PyTorch, which is slower")
    return False
