"""Writing K and V into the pages of a cache, in Triton.

A program moves a tile of tokens of one KV head, so that its descales, and their reciprocals, are worked out once. The
heads of the same tokens, neighbours in memory, are neighbours in the grid, on its first axis: the others take no more
than 65,535 programs. K and V go in one launch: the last index of the grid picks the side.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from mjolnir.formats.in_triton.codes import widened
from mjolnir.formats.in_triton.rows import load_sixteens, store_rows
from mjolnir.formats.in_triton.scales import head_scale, quotient
from mjolnir.kernels.triton_launch import cache_arguments, native, tile_of
from mjolnir.write import Layout, Side


@triton.jit
def _write_side(
    x, x_token, x_head, cache, page_stride, row_stride, head_stride, blocks, block_page, block_row, block_head,
    scale, scale_head, scale_channel, slots, num_tokens, num_slots,
    FORMAT: tl.constexpr, PER_CHANNEL: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(0) % KV_HEADS).to(tl.int64)  # 64-bit, so that no stride times an index overflows
    token = tl.program_id(0) // KV_HEADS * ROWS + tl.arange(0, ROWS)
    there = token < num_tokens
    slot = tl.load(slots + token, mask=there, other=-1).to(tl.int64)
    live = (slot >= 0) & (slot < num_slots)
    source = x + head * x_head + token.to(tl.int64) * x_token
    # Masked by the number of tokens alone: rows and slots are loaded at the same time.
    if D < 16 or FORMAT == "bf16" or FORMAT == "fp16":
        values = widened(tl.load(source[:, None] + tl.arange(0, D)[None, :], mask=there[:, None], other=0))
    else:
        values = widened(load_sixteens(source, there, ROWS, D))
    divisor = head_scale(scale + head * scale_head, scale_channel, PER_CHANNEL, D)
    y = quotient(values, divisor, FORMAT, PER_CHANNEL, NATIVE, x.dtype.element_ty != tl.float32)
    slot = tl.where(live, slot, 0)
    page, in_page = slot // PAGE_SIZE, slot % PAGE_SIZE
    target = cache + head * head_stride + page * page_stride + in_page * row_stride
    block_target = blocks + head * block_head + page * block_page + in_page * block_row
    store_rows(target, block_target, live, y, FORMAT, ROWS, D, NATIVE)


# Not specialised: another number of tokens must not compile another kernel while a CUDA graph is being captured.
@triton.jit(do_not_specialize=["num_tokens", "num_slots"], do_not_specialize_on_alignment=["slots"])
def write_kv_kernel(
    key, key_token, key_head, k_cache, k_page, k_row, k_head, k_blocks, k_block_page, k_block_row, k_block_head,
    k_scale, k_scale_head, k_scale_channel,
    value, value_token, value_head, v_cache, v_page, v_row, v_head, v_blocks, v_block_page, v_block_row, v_block_head,
    v_scale, v_scale_head, v_scale_channel,
    slots, num_tokens, num_slots,
    K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr, K_PER_CHANNEL: tl.constexpr, V_PER_CHANNEL: tl.constexpr,
    KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    if tl.program_id(2) == 0:
        _write_side(
            key, key_token, key_head, k_cache, k_page, k_row, k_head, k_blocks, k_block_page, k_block_row,
            k_block_head, k_scale, k_scale_head, k_scale_channel, slots, num_tokens, num_slots,
            K_FORMAT, K_PER_CHANNEL, KV_HEADS, D, PAGE_SIZE, ROWS, NATIVE,
        )  # fmt: skip
    else:
        _write_side(
            value, value_token, value_head, v_cache, v_page, v_row, v_head, v_blocks, v_block_page, v_block_row,
            v_block_head, v_scale, v_scale_head, v_scale_channel, slots, num_tokens, num_slots,
            V_FORMAT, V_PER_CHANNEL, KV_HEADS, D, PAGE_SIZE, ROWS, NATIVE,
        )  # fmt: skip


def launch_write(layout: Layout, key: Side, value: Side, slots: torch.Tensor) -> None:
    """Queue the write that ``mjolnir.write`` has checked, on the current device and stream."""
    k_pages, v_pages = layout.k_pages, layout.v_pages
    tile = tile_of(len(slots), k_pages.head_size)
    sides: list[Any] = []
    for pages, strides, side in ((k_pages, layout.key_strides, key), (v_pages, layout.value_strides, value)):
        sides += [side.rows, *strides, *cache_arguments(pages, side.cache)]
    write_kv_kernel[(k_pages.num_kv_heads * triton.cdiv(len(slots), tile.rows), 1, 2)](
        *sides,
        slots,
        len(slots),
        k_pages.num_slots,
        K_FORMAT=k_pages.fmt.name,
        V_FORMAT=v_pages.fmt.name,
        K_PER_CHANNEL=k_pages.scale_strides[1] != 0,
        V_PER_CHANNEL=v_pages.scale_strides[1] != 0,
        KV_HEADS=k_pages.num_kv_heads,
        D=k_pages.head_size,
        PAGE_SIZE=k_pages.page_size,
        ROWS=tile.rows,
        NATIVE=native(key.rows.device),
        num_warps=tile.warps,
    )
