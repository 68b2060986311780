"""The layout of one run's tensors, checked once: shapes, dtypes and strides, everything but addresses."""

from __future__ import annotations

import dataclasses

import torch

from mjolnir.checks import check_tensor, scale_view
from mjolnir.formats import get_format

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

TMA_ALIGN = 16
"""Bytes: the TMA's alignment of addresses and strides."""

TMA_MAX_STRIDE = 1 << 40


@dataclasses.dataclass(frozen=True)
class RunnerShape:
    """What a runner fixes for every run."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    page_size: int
    out_dtype: torch.dtype
    kv_format: str


@dataclasses.dataclass(frozen=True)
class Signature:
    """Strides are in elements, those of K and V in units of 16 bytes, as the kernel takes them."""

    q_dtype: str
    q_strides: tuple[int, int]  # token, head
    pack_query: bool  # the query's rows cannot be read in place
    out_strides: tuple[int, int]
    pack_out: bool
    lse_stride: int
    k_strides: tuple[int, int, int]  # token, head, page
    v_strides: tuple[int, int, int]
    k_scale_strides: tuple[int, int]  # sequence, head
    v_scale_strides: tuple[int, int]
    num_pages: int
    page_size: int
    needs_q_split: bool

    @classmethod
    def check(
        cls,
        shape: RunnerShape,
        device: torch.device,
        tokens: int,
        num_seqs: int,
        query: torch.Tensor,
        out: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        q_mul: torch.Tensor | None,
        o_mul: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> Signature:
        """Check every argument of ``DecodeRunner.run``.

        Raises:
            TypeError, ValueError: naming the argument, its value and what was expected.
        """
        check_tensor("query", query, dtype=tuple(DTYPE_NAMES), device=device)
        check_tensor("out", out, dtype=shape.out_dtype, device=device)
        q_strides, pack_query = _row_strides("query", query, shape, tokens, align=8)
        out_strides, pack_out = _row_strides("out", out, shape, tokens, align=4)
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            check_tensor(name, scale, device=device)
        k_strides = _cache_strides("k_cache", k_cache, shape, device)
        v_strides = _cache_strides("v_cache", v_cache, shape, device)
        if k_cache.shape[0] != v_cache.shape[0]:
            raise ValueError(f"v_cache must have as many pages as k_cache ({k_cache.shape[0]}), got {v_cache.shape[0]}")
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
                         contiguous_rows=True)  # fmt: skip
            if lse.shape[0] < tokens:
                raise ValueError(f"lse must have at least num_seqs * q_len = {tokens} rows, got {lse.shape[0]}")
        return cls(
            q_dtype=DTYPE_NAMES[query.dtype],
            q_strides=q_strides,
            pack_query=pack_query,
            out_strides=out_strides,
            pack_out=pack_out,
            lse_stride=lse.stride(0) if lse is not None else 0,
            k_strides=k_strides,
            v_strides=v_strides,
            k_scale_strides=_strides2(scale_view("k_scale", k_scale, num_seqs, shape.num_kv_heads)),
            v_scale_strides=_strides2(scale_view("v_scale", v_scale, num_seqs, shape.num_kv_heads)),
            num_pages=k_cache.shape[0],
            page_size=shape.page_size,
            needs_q_split=query.dtype == torch.float16 or q_mul is not None,
        )


def _row_strides(
    name: str, t: torch.Tensor, shape: RunnerShape, tokens: int, align: int
) -> tuple[tuple[int, int], bool]:
    """(token stride, head stride) of query or out, and whether its rows must be packed because they do not start at
    multiples of ``align`` elements or are not contiguous."""
    heads, d = shape.num_heads, shape.head_size
    if tuple(t.shape[1:]) not in ((heads, d), (heads * d,)):
        raise ValueError(
            f"{name} must have shape (tokens, {heads}, {d}) or (tokens, {heads * d}), got {tuple(t.shape)}"
        )
    if t.shape[0] < tokens:
        raise ValueError(f"{name} must have at least num_seqs * q_len = {tokens} tokens, got {t.shape[0]}")
    token = t.stride(0) if t.shape[0] > 1 else heads * d
    head = (t.stride(1) if heads > 1 else d) if t.dim() == 3 else d
    contiguous = t.stride(-1) == 1
    if not contiguous or token % align or head % align or t.data_ptr() % (align * t.element_size()):
        return (heads * d, d), True
    return (token, head), False


def _cache_strides(name: str, t: torch.Tensor, shape: RunnerShape, device: torch.device) -> tuple[int, int, int]:
    """(token, head, page) strides in units of 16 bytes; a dimension of size 1 may carry any stride."""
    fmt = get_format(shape.kv_format)
    expected = (None, shape.page_size, shape.num_kv_heads, shape.head_size)
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
    return units[0], units[1], units[2]


def _strides2(t: torch.Tensor) -> tuple[int, int]:
    return t.stride(0), t.stride(1)
