"""The layout of one run's tensors, checked once: shapes, dtypes and strides, everything but addresses."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mjolnir.checks import check_tensor, scale_view
from mjolnir.formats import KvFormat, get_formats
from mjolnir.page_views import check_block_scale
from mjolnir.variant import MAX_ROWS, PANEL_ROWS

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

TMA_ALIGN = 16
"""Bytes: the TMA's alignment of addresses and strides."""

MAX_BLOCK_STRIDE = 2**31 - 1
"""Of block scales: 32 bits in the kernel, where a wider product is three instructions instead of one."""

TMA_MAX_STRIDE = 1 << 40

KV_LAYOUTS = {"NHD": "head", "HND": "token"}
"""Promises about the strides within a page, and whose neighbours lie a row apart."""

NARROW_BYTES = 64
"""Rows of so many bytes can be joined. The TMA takes about one row per 4 clocks and SM, so that 64 bytes a row hardly
keep up with the memory: 64 x 8K took 152 us head-major and 214 us token-major, and its floor is 117."""

PANEL_BYTES = 128
"""Rows of up to so many bytes are read together with the neighbouring head's, which lie beside them in NHD pages.
Memory delivers 256 bytes in a row sooner than twice 128, and of 96 or 64 much that another CTA asks for again."""

PANEL_ITEMS = 256
"""Items, a sequence's KV head each, from which heads are read side by side: with fewer, all of them are needed to
divide. 16 x 8K on 8 heads took 63.4 us alone and 64.9 so, 64 x 8K 248 and 242."""

NARROW_ITEMS = 128
"""The same for panels of six and four bits, which lose more alone: e2m3, 16 x 32K took 295 us, and head-major 207. From
so many on e2m3 has six consumer warps, too: 16 x 8K took 53.7 us with four and 51.3 with six; 1 x 8K is slower. And for
odd numbers of heads as one row: 9/3, 1 x 32K took 8.0 us alone and 8.9 so. Even numbers are joined however few: d 64,
1 x 8K took 6.9 us alone and 7.4 so, but 1 x 128K 49 and 36."""


def same_layout(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function of as many tensors that says whether they have the dtypes, devices, shapes and strides of these: one
    call of what torch.compile guards its inputs with, 0.8 µs for eight, whose ``layout_key`` takes 5.

    It says yes of nothing else, but may say no of these: in another autograd mode, if one of them is there twice, and
    always where PyTorch has no such guards, or of none.
    """
    guards: Any = getattr(torch._C, "_dynamo", None)
    if not tensors or len(set(map(id, tensors))) < len(tensors):
        return _never
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    try:
        check: Callable[..., bool] = guards.guards.TensorGuards(
            *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        ).check
    except (AttributeError, TypeError):  # private, so it may change; a test notices
        return _never
    return check


def _never(*tensors: torch.Tensor) -> bool:
    return False


def needs_q_split(query_dtype: torch.dtype, has_q_mul: bool) -> bool:
    """Whether Q is no bf16 value, so that the MMA of a bf16 cache takes it as a sum of two."""
    return query_dtype == torch.float16 or has_q_mul


@dataclasses.dataclass(frozen=True)
class RunnerShape:
    """What a runner fixes for every run."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    page_size: int
    out_dtype: torch.dtype
    kv_format: str  # of K, and of V unless v_format says another
    v_format: str | None = None
    kv_layout: str | None = None  # one of KV_LAYOUTS
    max_num_seqs: int = 1

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def joined(self, q_len: int) -> str:
        """What the kernel of a q_len joins, see ``Variant.joined``."""
        formats = get_formats(self.kv_format, self.v_format)
        row_bytes, rows = [fmt.row_bytes(self.head_size) for fmt in formats], q_len * self.group
        narrow = all(size == NARROW_BYTES for size in row_bytes)
        if self.kv_layout == "HND" and narrow:
            return "tokens"
        if self.kv_layout != "NHD" or self.num_kv_heads == 1:
            return ""
        if narrow and not any(fmt.block for fmt in formats):
            joined, fits = "heads", 2 * rows <= MAX_ROWS
        else:
            # 16 rows of a head take its warps longer than memory does: 96/8, 64 x 8K took 260 us alone and 283 so.
            joined, fits = "panels", rows <= PANEL_ROWS and all(size <= PANEL_BYTES for size in row_bytes)
        if joined == "heads":
            many = self.num_kv_heads % 2 == 0 or self.has_many_items
        else:
            many = self.has_many_items if any(fmt.bits < 8 for fmt in formats) else self.items >= PANEL_ITEMS
        return joined if fits and many else ""

    @property
    def items(self) -> int:
        """A sequence's KV head each, in the largest step."""
        return self.max_num_seqs * self.num_kv_heads

    @property
    def has_many_items(self) -> bool:
        return self.items >= NARROW_ITEMS


@dataclasses.dataclass(frozen=True)
class Signature:
    """Strides are in elements, those of K and V in units of 16 bytes, as the kernel takes them. Nothing here depends
    on the step; ``check_step`` does."""

    q_dtype: str
    q_strides: tuple[int, int]  # token, head
    pack_query: bool  # the query's rows cannot be read in place
    out_strides: tuple[int, int]
    pack_out: bool
    lse_stride: int
    k_strides: tuple[int, int, int]  # token, head, page
    v_strides: tuple[int, int, int]
    k_block_strides: tuple[int, int, int]  # token, head, page in bytes; 0 without block scales
    v_block_strides: tuple[int, int, int]
    k_scale_strides: tuple[int, int]  # sequence, head
    v_scale_strides: tuple[int, int]
    num_pages: int
    page_size: int
    needs_q_split: bool
    token_rows: tuple[tuple[str, int], ...]  # tensors with a row per token, and their rows
    seq_rows: tuple[tuple[str, int], ...]  # descales with a row per sequence, and their rows
    max_tokens: int  # the fewest of token_rows
    max_seqs: int  # the fewest of seq_rows

    @classmethod
    def check(
        cls,
        shape: RunnerShape,
        device: torch.device,
        query: torch.Tensor,
        out: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        q_mul: torch.Tensor | None,
        o_mul: torch.Tensor | None,
        lse: torch.Tensor | None,
        k_block_scale: torch.Tensor | None = None,
        v_block_scale: torch.Tensor | None = None,
    ) -> Signature:
        """Check every argument of ``DecodeRunner.run``.

        Raises:
            TypeError, ValueError: naming the argument, its value and what was expected.
        """
        check_tensor("query", query, dtype=tuple(DTYPE_NAMES), device=device)
        check_tensor("out", out, dtype=shape.out_dtype, device=device, written=True)
        q_strides, pack_query = _row_strides("query", query, shape, align=8)
        out_strides, pack_out = _row_strides("out", out, shape, align=4)
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            check_tensor(name, scale, device=device)
        k_format, v_format = get_formats(shape.kv_format, shape.v_format)
        k_strides = _cache_strides("k_cache", k_cache, k_format, shape, device)
        v_strides = _cache_strides("v_cache", v_cache, v_format, shape, device)
        if k_cache.shape[0] != v_cache.shape[0]:
            raise ValueError(f"v_cache must have as many pages as k_cache ({k_cache.shape[0]}), got {v_cache.shape[0]}")
        pages = k_cache.shape[0]
        k_block_strides = _block_strides("k_block_scale", k_block_scale, k_format, shape, pages, device)
        v_block_strides = _block_strides("v_block_scale", v_block_scale, v_format, shape, pages, device)
        for name, factor in (("q_mul", q_mul), ("o_mul", o_mul)):
            if factor is not None:
                check_tensor(name, factor, dtype=torch.float32, shape=(shape.num_heads, shape.head_size), device=device)
                if not factor.is_contiguous() or factor.data_ptr() % 16:
                    raise ValueError(
                        f"{name} must be contiguous and aligned to 16 bytes, got strides {factor.stride()} at "
                        f"{factor.data_ptr():#x}"
                    )
        if lse is not None:
            check_tensor("lse", lse, dtype=torch.float32, shape=(None, shape.num_heads), device=device,
                         contiguous_rows=True, written=True)  # fmt: skip
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        token_rows = {"query": query.shape[0], "out": out.shape[0]} | ({"lse": lse.shape[0]} if lse is not None else {})
        seq_rows = {name: scale.shape[0] for name, scale in scales.items() if scale.dim() == 2 and scale.numel() > 1}
        return cls(
            q_dtype=DTYPE_NAMES[query.dtype],
            q_strides=q_strides,
            pack_query=pack_query,
            out_strides=out_strides,
            pack_out=pack_out,
            lse_stride=lse.stride(0) if lse is not None else 0,
            k_strides=k_strides,
            v_strides=v_strides,
            k_block_strides=k_block_strides,
            v_block_strides=v_block_strides,
            k_scale_strides=_scale_strides("k_scale", k_scale, shape.num_kv_heads),
            v_scale_strides=_scale_strides("v_scale", v_scale, shape.num_kv_heads),
            num_pages=k_cache.shape[0],
            page_size=shape.page_size,
            needs_q_split=needs_q_split(query.dtype, q_mul is not None),
            token_rows=tuple(token_rows.items()),
            seq_rows=tuple(seq_rows.items()),
            max_tokens=min(token_rows.values()),
            max_seqs=min(seq_rows.values(), default=sys.maxsize),
        )

    def check_step(self, num_seqs: int, q_len: int) -> None:
        """Check that the tensors have the rows that a step asks for.

        Raises:
            ValueError: naming the one that does not.
        """
        if num_seqs * q_len <= self.max_tokens and num_seqs <= self.max_seqs:
            return
        for name, rows in self.token_rows:
            if rows < num_seqs * q_len:
                raise ValueError(f"{name} must have at least num_seqs * q_len = {num_seqs * q_len} rows, got {rows}")
        for name, rows in self.seq_rows:
            if rows < num_seqs:
                raise ValueError(f"{name} must have at least num_seqs = {num_seqs} rows, got {rows}")


def _row_strides(name: str, t: torch.Tensor, shape: RunnerShape, align: int) -> tuple[tuple[int, int], bool]:
    """(token stride, head stride) of query or out, and whether its rows must be packed because they do not start at
    multiples of ``align`` elements or are not contiguous."""
    heads, d = shape.num_heads, shape.head_size
    if tuple(t.shape[1:]) not in ((heads, d), (heads * d,)):
        raise ValueError(
            f"{name} must have shape (tokens, {heads}, {d}) or (tokens, {heads * d}), got {tuple(t.shape)}"
        )
    token = t.stride(0) if t.shape[0] > 1 else heads * d
    head = (t.stride(1) if heads > 1 else d) if t.dim() == 3 else d
    contiguous = t.stride(-1) == 1
    if not contiguous or token % align or head % align or t.data_ptr() % (align * t.element_size()):
        return (heads * d, d), True
    return (token, head), False


def _cache_strides(
    name: str, t: torch.Tensor, fmt: KvFormat, shape: RunnerShape, device: torch.device
) -> tuple[int, int, int]:
    """(token, head, page) strides in units of 16 bytes; a dimension of size 1 may carry any stride."""
    expected = (None, shape.page_size, shape.num_kv_heads, fmt.row_width(shape.head_size))
    check_tensor(name, t, dtype=fmt.accepted_dtypes, shape=expected, device=device, contiguous_rows=True)
    if t.shape[0] < 1:
        raise ValueError(f"{name} must have at least one page, got shape {tuple(t.shape)}")
    if t.data_ptr() % TMA_ALIGN:
        raise ValueError(f"{name} must start at a multiple of {TMA_ALIGN} bytes, got {t.data_ptr():#x}")
    units = []
    for label, dim in (("token", 1), ("head", 2), ("page", 0)):
        size = t.stride(dim) * t.element_size() if t.shape[dim] > 1 else fmt.row_bytes(shape.head_size)
        if size % TMA_ALIGN or not 0 < size < TMA_MAX_STRIDE:
            raise ValueError(
                f"{name}: the {label} stride must be a positive multiple of {TMA_ALIGN} bytes below 2^40, got {size} "
                f"(strides {t.stride()}, {t.element_size()} bytes an element)"
            )
        units.append(size // TMA_ALIGN)
        row_bytes = fmt.row_bytes(shape.head_size)
        if label == KV_LAYOUTS.get(shape.kv_layout or "") and size != row_bytes:
            raise ValueError(
                f"{name}: kv_layout = {shape.kv_layout!r} promises a {label} stride of {row_bytes} bytes, got {size} "
                f"(strides {t.stride()}, {t.element_size()} bytes an element)"
            )
    return units[0], units[1], units[2]


def _block_strides(
    name: str, t: torch.Tensor | None, fmt: KvFormat, shape: RunnerShape, pages: int, device: torch.device
) -> tuple[int, int, int]:
    """(token, head, page) strides of block scales in bytes. The kernel copies the 4 to 16 bytes of a row at once."""
    rows = (pages, shape.page_size, shape.num_kv_heads)
    t = check_block_scale(name, t, fmt, rows, shape.head_size, device)
    if t is None:
        return 0, 0, 0
    width = t.shape[3]
    strides = tuple(t.stride(dim) if t.shape[dim] > 1 else width for dim in (1, 2, 0))
    if t.data_ptr() % width or any(stride % width for stride in strides):
        raise ValueError(
            f"{name}: rows of {width} bytes must start at multiples of {width} bytes, got strides {t.stride()} at "
            f"{t.data_ptr():#x}"
        )
    if max(strides) > MAX_BLOCK_STRIDE:
        raise ValueError(f"{name}: strides must be at most {MAX_BLOCK_STRIDE} bytes, got {t.stride()}")
    return strides[0], strides[1], strides[2]


def _scale_strides(name: str, scale: torch.Tensor, num_kv_heads: int) -> tuple[int, int]:
    """(sequence, head) strides of a descale; 0 where its values are shared."""
    view = scale_view(name, scale, 0, num_kv_heads)
    return view.stride(0), view.stride(1)
