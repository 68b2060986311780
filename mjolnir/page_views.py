"""What the writers and the expander check of K's or V's pages, block scales and descales."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mjolnir.checks import check_tensor
from mjolnir.formats import KvFormat

WORD = 4
"""Bytes: kernels read and write caches a 32-bit word at a time."""

MANY_ROWS = 256
"""More rows of a head than this are moved in larger tiles, by a kernel of their own."""

BLOCK_SCALE_DTYPES = (torch.float8_e4m3fn, torch.uint8)


class Cache(NamedTuple):
    """K's or V's tensors, as the caller gave them."""

    codes: torch.Tensor
    scale: torch.Tensor
    block_scale: torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class Pages:
    """The layout of a ``Cache``: everything but addresses. Strides of dimensions of size 1 are 0.

    Attributes:
        word_strides: page, token, head; in 32-bit words.
        block_strides: likewise of the block scales, in bytes; 0 without them.
        scale_strides: head, channel; 0 where a descale is shared.
    """

    fmt: KvFormat
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_size: int
    word_strides: tuple[int, int, int]
    block_strides: tuple[int, int, int]
    scale_strides: tuple[int, int]

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    @classmethod
    def check(
        cls,
        side: str,
        cache: Cache,
        fmt: KvFormat,
        num_kv_heads: int,
        head_size: int,
        device: torch.device,
        suffix: str = "",
        written: bool = False,
    ) -> Pages:
        """Check the tensors called ``<side>_cache``, ``<side>_scale`` and ``<side>_block_scale``, or, with a suffix
        "_out", ``<side>_out`` and ``<side>_out_scale``; ``written``: codes and block scales are.

        Raises:
            TypeError, ValueError: naming the argument, its value and what was expected.
        """
        name, codes = f"{side}{suffix or '_cache'}", cache.codes
        unit = max(fmt.pack, fmt.block)
        if head_size % unit:
            raise ValueError(f"{name}: rows of a {fmt.name} cache have a multiple of {unit} elements, got {head_size}")
        check_tensor(name, codes, dtype=fmt.accepted_dtypes, ndim=4, device=device, contiguous_rows=True,
                     written=written)  # fmt: skip
        check_tensor(name, codes, shape=(None, None, num_kv_heads, fmt.row_width(head_size)))
        if not codes.shape[0] or not codes.shape[1]:
            raise ValueError(f"{name} must have at least one page of one token, got shape {tuple(codes.shape)}")
        strides = _strides(codes)
        if codes.data_ptr() % WORD or any(stride % WORD for stride in strides) or fmt.row_bytes(head_size) % WORD:
            raise ValueError(
                f"{name}: pages, tokens and heads must start at multiples of {WORD} bytes, got strides of {strides} "
                f"bytes, rows of {fmt.row_bytes(head_size)} bytes, at {codes.data_ptr():#x}"
            )
        page, token, head = (stride // WORD for stride in strides)
        blocks = check_block_scale(
            f"{side}_block_scale", cache.block_scale, fmt, codes.shape[:3], head_size, device, written
        )
        return cls(
            fmt=fmt,
            num_pages=codes.shape[0],
            page_size=codes.shape[1],
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            word_strides=(page, token, head),
            block_strides=(0, 0, 0) if blocks is None else _strides(blocks),
            scale_strides=scale_strides(f"{side}{suffix}_scale", cache.scale, num_kv_heads, head_size, device),
        )


def check_block_scale(
    name: str,
    block_scale: torch.Tensor | None,
    fmt: KvFormat,
    rows: Sequence[int],
    head_size: int,
    device: torch.device,
    written: bool = False,
) -> torch.Tensor | None:
    """The block scales of pages with ``rows`` (pages, page_size, num_kv_heads); None where the format has none.

    Raises:
        TypeError, ValueError: naming the argument, its value and what was expected.
    """
    width = fmt.scale_width(head_size)
    if not width:
        if block_scale is not None:
            raise ValueError(f"{name} must be None: a {fmt.name} cache has no block scales")
        return None
    if block_scale is None:
        raise ValueError(f"{name} must be given: a {fmt.name} cache has {width} block scales per row of {head_size}")
    return check_tensor(name, block_scale, dtype=BLOCK_SCALE_DTYPES, shape=(*rows, width), device=device,
                        contiguous_rows=True, written=written)  # fmt: skip


def scale_strides(
    name: str, scale: torch.Tensor, num_kv_heads: int, head_size: int, device: torch.device
) -> tuple[int, int]:
    """(head, channel) strides of descales of 1 element, (num_kv_heads,) or (num_kv_heads, head_size); 0 where shared.

    Raises:
        TypeError: not a tensor, or not fp32.
        ValueError: another shape or device.
    """
    check_tensor(name, scale, dtype=torch.float32, device=device)
    if scale.numel() == 1:
        return 0, 0
    if scale.shape == (num_kv_heads,):
        return scale.stride(0), 0
    if scale.shape == (num_kv_heads, head_size):
        return scale.stride(0), scale.stride(1)
    raise ValueError(
        f"{name} must have 1 element, shape ({num_kv_heads},) or shape ({num_kv_heads}, {head_size}), got shape "
        f"{tuple(scale.shape)}"
    )


def broadcastable(scale: torch.Tensor) -> torch.Tensor:
    """A descale that ``scale_strides`` accepts, as a view that broadcasts to (tokens, num_kv_heads, head_size)."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    return scale[:, None] if scale.dim() == 1 else scale


def as_bits(codes: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, which every PyTorch operation takes."""
    return codes.view(torch.uint8 if codes.element_size() == 1 else torch.int16)


def _strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(page, token, head) strides in bytes."""
    size = tensor.element_size()
    page, token, head = (tensor.stride(dim) * size if tensor.shape[dim] > 1 else 0 for dim in range(3))
    return page, token, head
