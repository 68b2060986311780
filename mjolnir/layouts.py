"""How K and V lie in one cache tensor, and zero-copy views of them in the one logical form the rest uses.

A layout's name is the cache tensor's dimensions in order: B pages, N tokens of a page, H KV heads, D head size,
2 for K then V. Of a packed format the head size is the width of a row in elements of the tensor
(``KvFormat.row_width``): 96 bytes for 128 elements of e2m3. In the two names that end in "2D", K and V lie side by side
in one row of 2 · head_size elements.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch

from mjolnir.checks import check_positive_int, check_tensor
from mjolnir.formats.nvfp4 import NVFP4


class KVLayout(enum.Enum):
    """The known layouts. Where a shape fits several, the first in this order wins (see ``detect_kv_layout``)."""

    BHN2D = "BHN2D"
    BNH2D = "BNH2D"
    B2NHD = "B2NHD"
    B2HND = "B2HND"
    TWO_BNHD = "2BNHD"
    TWO_BHND = "2BHND"

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ValueError(f"layout must be one of {', '.join(layout.value for layout in cls)}, got {value!r}")

    @property
    def rows_hold_both(self) -> bool:
        """K and V lie side by side in one row."""
        return self.value.endswith("2D")


def detect_kv_layout(
    shape: Sequence[int],
    num_kv_heads: int,
    page_size: int,
    head_size: int,
    override: KVLayout | str | None = None,
) -> KVLayout:
    """The layout of a cache tensor of this shape.

    ========  ==========================================
    layout    shape
    ========  ==========================================
    BHN2D     (pages, num_kv_heads, page_size, 2 · head_size)
    BNH2D     (pages, page_size, num_kv_heads, 2 · head_size)
    B2NHD     (pages, 2, page_size, num_kv_heads, head_size)
    B2HND     (pages, 2, num_kv_heads, page_size, head_size)
    2BNHD     (2, pages, page_size, num_kv_heads, head_size)
    2BHND     (2, pages, num_kv_heads, page_size, head_size)
    BHN2D     (pages, num_kv_heads, page_size, 2, head_size)
    BNH2D     (pages, page_size, num_kv_heads, 2, head_size)
    ========  ==========================================

    A shape that fits several lines is the first of them. That can happen when num_kv_heads equals page_size (H and N
    swap), when there are 2 pages (B and 2 swap), and when num_kv_heads or page_size is 2; the caller who knows better
    passes ``override``, which wins if the shape fits it.

    Raises:
        ValueError: no known layout has this shape, the shape does not fit ``override`` or it names no layout, or a size
            is not positive.
        TypeError: shape is no sequence, or a size no integer.
    """
    try:
        sizes = tuple(shape)
    except TypeError:
        raise TypeError(f"shape must be a sequence of integers, got {shape!r} ({type(shape).__name__})") from None
    sizes = tuple(check_positive_int(f"shape[{dim}]", size, minimum=0) for dim, size in enumerate(sizes))
    known = _known_shapes(
        check_positive_int("num_kv_heads", num_kv_heads),
        check_positive_int("page_size", page_size),
        check_positive_int("head_size", head_size),
    )
    wanted = None if override is None else KVLayout(override)
    for layout, expected in known:
        fits = len(sizes) == len(expected)
        fits = fits and all(want in (None, have) for want, have in zip(expected, sizes, strict=True))
        if fits and wanted in (None, layout):
            return layout
    table = "; ".join(
        f"{layout.value} ({', '.join('pages' if size is None else str(size) for size in expected)})"
        for layout, expected in known
        if wanted in (None, layout)
    )
    raise ValueError(
        f"shape {sizes} is no {'known KV layout' if wanted is None else wanted.value} of num_kv_heads={num_kv_heads}, "
        f"page_size={page_size}, head_size={head_size}; expected {table}"
    )


def split_kv_cache(cache: torch.Tensor, layout: KVLayout | str, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one cache tensor as (pages, page_size, num_kv_heads, head_size) views of its memory.

    Args:
        cache: any dtype and strides, as long as each row of head_size elements is contiguous.
        layout: from ``detect_kv_layout``, or a name.
        head_size: elements per row of K.

    Raises:
        ValueError: an unknown layout; the tensor's rank or its sizes of 2 and head_size do not fit it; rows not
            contiguous.
        TypeError: cache is no tensor, or head_size no integer.
    """
    layout = KVLayout(layout)
    check_tensor("cache", cache)
    check_positive_int("head_size", head_size)
    dims = layout.value
    shape, strides = tuple(cache.shape), cache.stride()
    if layout.rows_hold_both and cache.dim() == 4 and shape[-1] == 2 * head_size:
        dims = dims.replace("2D", "D")
        k, v = cache[..., :head_size], cache[..., head_size:]
    elif cache.dim() == 5 and shape[dims.index("2")] == 2 and shape[-1] == head_size:
        k, v = cache.unbind(dims.index("2"))
        dims = dims.replace("2", "")
    else:
        forms = [dims] + [f"{dims[:3]}D with a last dimension of 2 * head_size"] * layout.rows_hold_both
        raise ValueError(
            f"cache of shape {shape} does not fit layout {layout.value} with head_size={head_size}: "
            f"expected dimensions {' or '.join(forms)}"
        )
    if head_size > 1 and strides[-1] != 1:
        raise ValueError(f"cache must have stride 1 in its last dimension, got strides {strides}")
    order = [dims.index(dim) for dim in "BNHD"]
    return k.permute(order), v.permute(order)


def split_nvfp4_cache(cache: torch.Tensor, head_size: int, planar: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and block scales of K, or of V, where one tensor holds both, as views of its memory.

    Args:
        cache: (pages, page_size, num_kv_heads, w) uint8, w = head_size / 2 + head_size / 16.
        planar: False: each row is its codes, then its block scales; w may be larger (rows padded to a multiple of 16
            bytes, as the kernel wants them). True: a page is one contiguous region in which all rows' codes come before
            all rows' scales, each in the order of the tensor's own dimensions; so vLLM keeps nvfp4 caches
            (csrc/nvfp4_kv_cache_kernels.cu). The scales of V must be in linear order, not in the 4 × 4 swizzle of its
            Blackwell kernels.

    Returns:
        codes (pages, page_size, num_kv_heads, head_size / 2) uint8 and block scales (pages, page_size, num_kv_heads,
        head_size / 16) float8_e4m3fn: ``k_cache`` and ``k_block_scale``, or V's, of ``DecodeRunner.run``.

    Raises:
        TypeError: cache is not uint8.
        ValueError: its shape or strides do not fit.
    """
    check_tensor("cache", cache, dtype=torch.uint8, ndim=4, contiguous_rows=True)
    if check_positive_int("head_size", head_size) % NVFP4.block:
        raise ValueError(f"head_size must be a multiple of {NVFP4.block}, got {head_size}")
    codes, scales = NVFP4.row_bytes(head_size), NVFP4.scale_width(head_size)
    _, tokens, heads, width = cache.shape
    if width < codes + scales or (planar and width > codes + scales):
        more = "" if planar else " or more"
        raise ValueError(f"cache must have rows of {codes + scales} bytes{more}, got shape {tuple(cache.shape)}")
    if not planar:
        return cache[..., :codes], cache[..., codes : codes + scales].view(torch.float8_e4m3fn)
    page, token, head, _ = cache.stride()
    orders = {"NHD": (heads * width, width), "HND": (width, tokens * width)}
    fits = [
        strides
        for strides in orders.values()
        if token in (strides[0], *[token] * (tokens == 1)) and head in (strides[1], *[head] * (heads == 1))
    ]
    if not fits:
        raise ValueError(f"the pages of a planar cache must be contiguous, NHD or HND, got strides {cache.stride()}")
    rows = tuple(stride // width for stride in fits[0])
    start = cache.storage_offset()

    def view(row_bytes: int, offset: int) -> torch.Tensor:
        strides = (page, rows[0] * row_bytes, rows[1] * row_bytes, 1)
        return cache.as_strided((*cache.shape[:3], row_bytes), strides, start + offset)

    return view(codes, 0), view(scales, tokens * heads * codes).view(torch.float8_e4m3fn)


def _known_shapes(heads: int, page: int, head_size: int) -> list[tuple[KVLayout, tuple[int | None, ...]]]:
    """Every form of every layout, in order of precedence; None is the number of pages.

    Rows that hold both come once more at the end, with the 2 written out: engines with few heads are far likelier to
    mean B2NHD by (pages, 2, 16, 2, 128).
    """
    size = {"B": None, "N": page, "H": heads, "D": head_size, "2": 2}
    spelled = [(layout, tuple(size[dim] for dim in layout.value)) for layout in KVLayout]
    joined = [(layout, (*shape[:-2], 2 * head_size)) for layout, shape in spelled if layout.rows_hold_both]
    return [
        *joined,
        *((layout, shape) for layout, shape in spelled if not layout.rows_hold_both),
        *((layout, shape) for layout, shape in spelled if layout.rows_hold_both),
    ]
