"""nvfp4 caches, which on Hopper no backend of vLLM's has: their pages, their write, and 16-bit copies for prefill.

A page is contiguous, K's codes first, then V's, then the block scales of either, each head-major: all parts start at
multiples of 16 bytes, which the kernel needs and rows of codes and scales together would not give.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from mjolnir.expand import expand_pages
from mjolnir.formats.nvfp4 import NVFP4
from mjolnir.integrations.vllm.eligibility import LayerShape
from mjolnir.signature import DTYPE_NAMES
from mjolnir.write import write_kv

KV_LAYOUT = "HND"
"""Of what ``split`` makes."""


class Views(NamedTuple):
    """K and V of a cache as a runner takes them; block scales are None where the format has none."""

    k: torch.Tensor
    v: torch.Tensor
    k_blocks: torch.Tensor | None = None
    v_blocks: torch.Tensor | None = None


def row_bytes(head_size: int) -> int:
    """Bytes of a token's K and V of one head, block scales included."""
    return 2 * (NVFP4.row_bytes(head_size) + NVFP4.scale_width(head_size))


def split(kv_cache: torch.Tensor, head_size: int) -> Views:
    """Views of vLLM's cache tensor (pages, h_k, page_size, row_bytes), of which only whole pages mean anything.

    Raises:
        ValueError: another shape, or pages that are not contiguous.
    """
    pages, heads, tokens, width = kv_cache.shape
    _, head, token, byte = kv_cache.stride()
    orders = ((tokens * width, width), (width, heads * width))
    contiguous = any(
        (head == by_head or heads == 1) and (token == by_token or tokens == 1) for by_head, by_token in orders
    )
    if width != row_bytes(head_size) or byte != 1 or not contiguous:
        raise ValueError(
            f"an nvfp4 cache must have contiguous pages and rows of {row_bytes(head_size)} bytes, got shape "
            f"{tuple(kv_cache.shape)} with strides {kv_cache.stride()}"
        )
    codes, scales = NVFP4.row_bytes(head_size), NVFP4.scale_width(head_size)
    at = kv_cache.storage_offset()
    parts = []
    for row in (codes, codes, scales, scales):
        strides = (kv_cache.stride(0), row, tokens * row, 1)
        parts.append(kv_cache.as_strided((pages, tokens, heads, row), strides, at))
        at += heads * tokens * row
    k, v, k_blocks, v_blocks = parts
    return Views(k, v, k_blocks.view(torch.float8_e4m3fn), v_blocks.view(torch.float8_e4m3fn))


def write(views: Views, layer: Any, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """The cache write of a step."""
    write_kv(
        key, value, views.k, views.v, slot_mapping, layer._k_scale, layer._v_scale,
        kv_format="nvfp4", k_block_scale=views.k_blocks, v_block_scale=views.v_blocks,
    )  # fmt: skip


def expand(views: Views, layer: Any, shape: LayerShape, metadata: Any) -> tuple[torch.Tensor, Any]:
    """A cache of the model's dtype with the pages of a step's requests, and the step's metadata for it.

    It is as large as requests × the longest one, 4 · h_k · d bytes a token, for as long as one layer attends. Waits for
    nothing: pages that a request does not have are skipped on the device.
    """
    page_size = views.k.shape[1]
    columns = -(-metadata.max_seq_len // page_size)
    table = metadata.block_table[:, :columns]
    starts = torch.arange(table.shape[1], device=table.device) * page_size
    pages = torch.where(starts < metadata.seq_lens[: len(table), None], table, -1).flatten()
    cache = torch.empty(
        len(pages), shape.num_kv_heads, page_size, 2 * shape.head_size, dtype=shape.dtype, device=table.device
    )
    k_out, v_out = cache.transpose(1, 2).split(shape.head_size, dim=-1)
    expand_pages(
        pages, views.k, views.v, k_out, v_out, layer._k_scale, layer._v_scale, kv_format="nvfp4",
        out_format=DTYPE_NAMES[shape.dtype], k_block_scale=views.k_blocks, v_block_scale=views.v_blocks,
    )  # fmt: skip
    changed = copy.copy(metadata)
    changed.block_table = torch.arange(len(pages), dtype=torch.int32, device=table.device).view(table.shape)
    if hasattr(changed, "scheduler_metadata"):
        changed.scheduler_metadata = None  # made for fp8, which vLLM takes every quantised cache for
    return cache, changed


def unscaled(layer: Any, device: torch.device) -> Any:
    """What a fallback asks of a layer, for ``expand``'s copies, which hold values and not codes."""
    one = torch.ones((), dtype=torch.float32, device=device)
    scales = {f"_{which}_scale": one for which in "qkv"} | {f"_{which}_scale_float": 1.0 for which in "qkv"}
    return SimpleNamespace(layer_name=layer.layer_name, **scales)
