"""What launches of the Triton kernels have in common."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mjolnir.page_views import MANY_ROWS, Cache, Pages

NATIVE_CAPABILITY = (8, 9)
"""From here on the conversions between e4m3, e5m2, f16 and f32 are instructions."""


class Tile(NamedTuple):
    rows: int
    warps: int


def tile_of(rows: int, head_size: int) -> Tile:
    """What a program moves, given how many rows there are of each head: 16 elements a thread, a 16-byte store of 8-bit
    codes, in one warp, or twice that in four."""
    if rows > MANY_ROWS:
        return Tile(max(1, 4096 // head_size), 4)
    return Tile(max(1, 512 // head_size), 1)


@functools.cache
def native(device: torch.device) -> bool:
    """Whether kernels take the conversion instructions of the device; never under the interpreter."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device) >= NATIVE_CAPABILITY


def cache_arguments(pages: Pages, cache: Cache) -> list[Any]:
    """Codes as a pointer to int32, block scales as one to uint8 (any pointer where there are none: no kernel follows
    it), descales, each with its strides."""
    blocks = cache.scale if cache.block_scale is None else cache.block_scale
    return [
        *(triton.reinterpret(cache.codes, tl.int32), *pages.word_strides),
        *(triton.reinterpret(blocks, tl.uint8), *pages.block_strides),
        *(cache.scale, *pages.scale_strides),
    ]
