"""Expanding pages of one format into pages of another, in Triton; the grid is that of write_kernel.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mjolnir.expand import Layout, Side
from mjolnir.formats.in_triton.rows import load_rows, store_rows
from mjolnir.formats.in_triton.scales import head_scale, quotient
from mjolnir.kernels.triton_launch import cache_arguments, native, tile_of


@triton.jit
def _expand_side(
    cache, page_stride, row_stride, head_stride, blocks, block_page, block_row, block_head,
    scale, scale_head, scale_channel,
    out, out_page_stride, out_row, out_head, out_scale, out_scale_head, out_scale_channel,
    pages, out_pages, num_rows, num_pages, num_out_pages,
    FORMAT: tl.constexpr, PER_CHANNEL: tl.constexpr, OUT_FORMAT: tl.constexpr, OUT_PER_CHANNEL: tl.constexpr,
    KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(0) % KV_HEADS).to(tl.int64)  # 64-bit, so that no stride times an index overflows
    row = tl.program_id(0) // KV_HEADS * ROWS + tl.arange(0, ROWS)
    in_page = row % PAGE_SIZE
    page = tl.load(pages + row // PAGE_SIZE, mask=row < num_rows, other=-1).to(tl.int64)
    out_page = tl.load(out_pages + row // PAGE_SIZE, mask=row < num_rows, other=-1).to(tl.int64)
    live = (page >= 0) & (page < num_pages) & (out_page >= 0) & (out_page < num_out_pages)
    page = tl.where(live, page, 0)
    source = cache + head * head_stride + page * page_stride + in_page.to(tl.int64) * row_stride
    block_source = blocks + head * block_head + page * block_page + in_page.to(tl.int64) * block_row
    values = load_rows(source, block_source, live, FORMAT, ROWS, D, NATIVE)
    factor = head_scale(scale + head * scale_head, scale_channel, PER_CHANNEL, D)
    divisor = head_scale(out_scale + head * out_scale_head, out_scale_channel, OUT_PER_CHANNEL, D)
    if OUT_FORMAT == "fp8" and (FORMAT == "fp8" or FORMAT == "e2m3") and not PER_CHANNEL and not OUT_PER_CHANNEL:
        # Under one descale these values are fp8 values, which two roundings to fp32 leave next to.
        if (factor == divisor) & (tl.abs(factor) > 2.0**-60) & (tl.abs(factor) < 2.0**60):
            y = values
        else:
            y = quotient(values * factor, divisor, OUT_FORMAT, OUT_PER_CHANNEL, NATIVE)
    else:
        y = quotient(values * factor, divisor, OUT_FORMAT, OUT_PER_CHANNEL, NATIVE)
    out_page = tl.where(live, out_page, 0)
    target = out + head * out_head + out_page * out_page_stride + in_page.to(tl.int64) * out_row
    store_rows(target, target, live, y, OUT_FORMAT, ROWS, D, NATIVE)  # no output format has block scales


# Not specialised: another number of pages must not compile another kernel while a CUDA graph is being captured.
@triton.jit(
    do_not_specialize=["num_rows", "num_pages", "num_out_pages"],
    do_not_specialize_on_alignment=["pages", "out_pages"],
)
def expand_pages_kernel(
    k_cache, k_page, k_row, k_head, k_blocks, k_block_page, k_block_row, k_block_head,
    k_scale, k_scale_head, k_scale_channel,
    k_out, k_out_page, k_out_row, k_out_head, k_out_scale, k_out_scale_head, k_out_scale_channel,
    v_cache, v_page, v_row, v_head, v_blocks, v_block_page, v_block_row, v_block_head,
    v_scale, v_scale_head, v_scale_channel,
    v_out, v_out_page, v_out_row, v_out_head, v_out_scale, v_out_scale_head, v_out_scale_channel,
    pages, out_pages, num_rows, num_pages, num_out_pages,
    K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr, OUT_FORMAT: tl.constexpr,
    K_PER_CHANNEL: tl.constexpr, V_PER_CHANNEL: tl.constexpr,
    K_OUT_PER_CHANNEL: tl.constexpr, V_OUT_PER_CHANNEL: tl.constexpr,
    KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    if tl.program_id(2) == 0:
        _expand_side(
            k_cache, k_page, k_row, k_head, k_blocks, k_block_page, k_block_row, k_block_head,
            k_scale, k_scale_head, k_scale_channel,
            k_out, k_out_page, k_out_row, k_out_head, k_out_scale, k_out_scale_head, k_out_scale_channel,
            pages, out_pages, num_rows, num_pages, num_out_pages,
            K_FORMAT, K_PER_CHANNEL, OUT_FORMAT, K_OUT_PER_CHANNEL, KV_HEADS, D, PAGE_SIZE, ROWS, NATIVE,
        )  # fmt: skip
    else:
        _expand_side(
            v_cache, v_page, v_row, v_head, v_blocks, v_block_page, v_block_row, v_block_head,
            v_scale, v_scale_head, v_scale_channel,
            v_out, v_out_page, v_out_row, v_out_head, v_out_scale, v_out_scale_head, v_out_scale_channel,
            pages, out_pages, num_rows, num_pages, num_out_pages,
            V_FORMAT, V_PER_CHANNEL, OUT_FORMAT, V_OUT_PER_CHANNEL, KV_HEADS, D, PAGE_SIZE, ROWS, NATIVE,
        )  # fmt: skip


def launch_expand(layout: Layout, k: Side, v: Side, pages: torch.Tensor, out_pages: torch.Tensor) -> None:
    """Queue the expansion that ``mjolnir.expand`` has checked, on the current device and stream."""
    k_pages, v_pages, k_out, v_out = layout.k_pages, layout.v_pages, layout.k_out, layout.v_out
    rows = len(pages) * k_pages.page_size
    tile = tile_of(rows, k_pages.head_size)
    arguments = []
    for source, target, side in ((k_pages, k_out, k), (v_pages, v_out, v)):
        out = cache_arguments(target, side.out)
        arguments += [*cache_arguments(source, side.cache), *out[:4], *out[8:]]  # all but block scales
    expand_pages_kernel[(k_pages.num_kv_heads * triton.cdiv(rows, tile.rows), 1, 2)](
        *arguments,
        pages,
        out_pages,
        rows,
        k_pages.num_pages,
        k_out.num_pages,
        K_FORMAT=k_pages.fmt.name,
        V_FORMAT=v_pages.fmt.name,
        OUT_FORMAT=k_out.fmt.name,
        K_PER_CHANNEL=k_pages.scale_strides[1] != 0,
        V_PER_CHANNEL=v_pages.scale_strides[1] != 0,
        K_OUT_PER_CHANNEL=k_out.scale_strides[1] != 0,
        V_OUT_PER_CHANNEL=v_out.scale_strides[1] != 0,
        KV_HEADS=k_pages.num_kv_heads,
        D=k_pages.head_size,
        PAGE_SIZE=k_pages.page_size,
        ROWS=tile.rows,
        NATIVE=native(k.cache.codes.device),
        num_warps=tile.warps,
    )
