"""``expand_pages``: pages of a low-bit cache as fp8 or 16-bit pages, for prefill kernels that cannot read them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mjolnir.checks import check_choice, check_tensor, layout_key, remember
from mjolnir.formats import get_format, get_formats
from mjolnir.page_views import MANY_ROWS, Cache, Pages, as_bits, broadcastable
from mjolnir.write import has_triton

OUT_FORMATS = ("bf16", "fp16", "fp8")


@dataclasses.dataclass(frozen=True)
class Side:
    """K's or V's cache and what it is expanded into."""

    cache: Cache
    out: Cache


@dataclasses.dataclass(frozen=True)
class Layout:
    """An expansion, checked: all but addresses and the number of pages."""

    k_pages: Pages
    v_pages: Pages
    k_out: Pages
    v_out: Pages


_checked: dict[tuple[Any, ...], Layout] = {}
_ones: dict[torch.device, torch.Tensor] = {}


def expand_pages(
    pages: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    *,
    kv_format: str,
    v_format: str | None = None,
    out_format: str = "bf16",
    k_out_scale: torch.Tensor | None = None,
    v_out_scale: torch.Tensor | None = None,
    out_pages: torch.Tensor | None = None,
    k_block_scale: torch.Tensor | None = None,
    v_block_scale: torch.Tensor | None = None,
) -> None:
    """Write the named pages of a cache into pages of ``out_format``, on the current stream.

    What is stored is ``encode(decode(codes) · descale, out_scale)``: the codes' exact values (block scales included)
    times the descale in fp32, rounded once more to the output format as ``write_kv`` does. 16-bit outputs need no
    descale of their own. fp8 outputs do: of e2m3 pages the descale of the cache itself keeps every value exactly; of
    nvfp4 pages 6 times that keeps the largest of them, 6 · 448, from saturating.

    Args:
        pages: (n,) int32 or int64 page ids on the device; a negative one is skipped. A page past the last is skipped
            on a GPU; PyTorch raises.
        k_cache, v_cache, k_scale, v_scale, k_block_scale, v_block_scale: as ``write_kv`` takes them, and any stride
            may be 0.
        k_out, v_out: (pages, page_size, h_k, d) views of bf16, fp16 or fp8, of the cache's page size, strides as those
            of a cache that ``write_kv`` writes.
        kv_format, v_format: of the cache; None: V has K's.
        out_format: "bf16", "fp16" or "fp8".
        k_out_scale, v_out_scale: descales of the output, as k_scale; None: 1, for 16-bit outputs only.
        out_pages: (n,) output pages, of the dtype of ``pages``; None: 0 … n − 1.

    Raises:
        ValueError, TypeError: an argument out of its range, named.
        RuntimeError: this layout was never expanded before and a CUDA graph is being captured.
    """
    check_choice("out_format", out_format, OUT_FORMATS)
    check_tensor("k_cache", k_cache, ndim=4)
    device = k_cache.device
    for name, scale in (("k_out_scale", k_out_scale), ("v_out_scale", v_out_scale)):
        if scale is None and out_format == "fp8":
            raise ValueError(f"{name} must be given for out_format='fp8': the descale that readers will use")
    one = _ones.get(device)
    if one is None:
        one = _ones[device] = torch.ones(1, device=device)
    sides = (
        Side(Cache(k_cache, k_scale, k_block_scale), Cache(k_out, one if k_out_scale is None else k_out_scale, None)),
        Side(Cache(v_cache, v_scale, v_block_scale), Cache(v_out, one if v_out_scale is None else v_out_scale, None)),
    )
    page_ids = {"dtype": (torch.int32, torch.int64), "ndim": 1, "device": device, "contiguous_rows": True}
    check_tensor("pages", pages, **page_ids)  # type: ignore[arg-type]
    if out_pages is None:
        out_pages = torch.arange(len(pages), dtype=pages.dtype, device=device)
    check_tensor("out_pages", out_pages, **page_ids | {"dtype": pages.dtype, "shape": pages.shape})  # type: ignore[arg-type]
    many = len(pages) * k_cache.shape[1] > MANY_ROWS
    k_format, v_format = (fmt.name for fmt in get_formats(kv_format, v_format))
    tensors = [tensor for side in sides for part in (side.cache, side.out) for tensor in part]
    asked = (k_format, v_format, out_format, pages.dtype, many, layout_key(tensors))
    layout = _checked.get(asked)
    first = layout is None
    if layout is None:
        layout = check_layout(sides, k_format, v_format, out_format)
    if not len(pages):
        return
    if device.type == "cuda" and has_triton():
        if first and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"expand_pages has not run with this layout (and more, or at most, {MANY_ROWS} tokens) and a CUDA "
                "graph is being captured: call it once before the capture"
            )
        from mjolnir.kernels.expand_kernel import launch_expand

        with torch.cuda.device(device):
            launch_expand(layout, *sides, pages, out_pages)
    else:
        expand_in_torch(layout, *sides, pages, out_pages)
    if first:
        remember(_checked, asked, layout)


def check_layout(sides: tuple[Side, Side], k_format: str, v_format: str, out_format: str) -> Layout:
    """Check everything that does not depend on how many pages there are.

    Raises:
        ValueError, TypeError: as ``expand_pages``.
    """
    device, out_fmt = sides[0].cache.codes.device, get_format(out_format)
    num_kv_heads = sides[0].cache.codes.shape[2]
    check_tensor("k_out", sides[0].out.codes, ndim=4)
    head_size = sides[0].out.codes.shape[3]
    if head_size < 1 or head_size & (head_size - 1):
        raise ValueError(f"k_out must have rows of a power of two elements, got {head_size}")
    sources, targets = [], []
    for name, side, fmt in (("k", sides[0], get_format(k_format)), ("v", sides[1], get_format(v_format, "v_format"))):
        sources.append(Pages.check(name, side.cache, fmt, num_kv_heads, head_size, device))
        targets.append(
            Pages.check(name, side.out, out_fmt, num_kv_heads, head_size, device, suffix="_out", written=True)
        )
    for name, pages, expected in (
        ("v_cache", sources[1], sources[0]),
        ("v_out", targets[1], targets[0]),
    ):
        if (pages.num_pages, pages.page_size) != (expected.num_pages, expected.page_size):
            raise ValueError(
                f"{name} must have as many pages as K's, {expected.num_pages} of {expected.page_size} tokens, got "
                f"{pages.num_pages} of {pages.page_size}"
            )
    if targets[0].page_size != sources[0].page_size:
        raise ValueError(f"k_out must have pages of {sources[0].page_size} tokens, got {targets[0].page_size}")
    return Layout(sources[0], sources[1], targets[0], targets[1])


@torch.no_grad()
def expand_in_torch(layout: Layout, k: Side, v: Side, pages: torch.Tensor, out_pages: torch.Tensor) -> None:
    """The fallback, through the codecs. Reads the page ids, so it cannot be captured.

    Raises:
        ValueError: a page past the last.
    """
    live = ((pages >= 0) & (out_pages >= 0)).nonzero().flatten()
    at, to = pages[live].long(), out_pages[live].long()
    for name, ids, count in (("pages", at, layout.k_pages.num_pages), ("out_pages", to, layout.k_out.num_pages)):
        if len(ids) and int(ids.max()) >= count:
            raise ValueError(f"{name} names page {int(ids.max())}, expected at most {count - 1}")
    for source, target, side in ((layout.k_pages, layout.k_out, k), (layout.v_pages, layout.v_out, v)):
        blocks = None if side.cache.block_scale is None else as_bits(side.cache.block_scale)[at]
        codes = as_bits(side.cache.codes)[at].view(side.cache.codes.dtype)
        values = source.fmt.decode(codes, blocks) * broadcastable(side.cache.scale)
        encoded = target.fmt.encode(values, broadcastable(side.out.scale))
        as_bits(side.out.codes)[to] = as_bits(encoded)
