"""K and V bytes on the device: filled once, every shape takes its caches from the start. Block scales, where a format
has them, lie in a pool of their own."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from mjolnir.bench.shapes import HARD, Shape
from mjolnir.formats import get_format

MAX_POOL_BYTES = 40_000_000_000

CHUNK = 1 << 26
"""Elements filled at a time: 256 MB of fp32 random numbers."""

UNIT = 64
"""Elements of the shortest row: every format packs a multiple of it in whole bytes."""


class KVPool:
    """Flat uint8 tensors per (KV format, data), of codes and of block scales, as large as the largest of the shapes
    needs."""

    def __init__(self, shapes: Iterable[Shape], device: torch.device, seed: int = 1) -> None:
        self.device = device
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._sizes = self.check_size(shapes)
        self._bytes: dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]] = {}

    @staticmethod
    def check_size(shapes: Iterable[Shape]) -> dict[tuple[str, str], int]:
        """Bytes per (KV format, data).

        Raises:
            ValueError: more than MAX_POOL_BYTES in all.
        """
        sizes: dict[tuple[str, str], int] = {}
        for shape in shapes:
            key = shape.kv_format, shape.data
            sizes[key] = max(sizes.get(key, 0), shape.slots * shape.cache_bytes)
        if (total := sum(sizes.values())) > MAX_POOL_BYTES:
            raise ValueError(f"the shapes need {total / 1e9:.1f} GB of KV caches, at most {MAX_POOL_BYTES / 1e9:.0f}")
        return sizes

    def caches(self, shape: Shape) -> list[torch.Tensor]:
        """One tensor per slot, in the format's storage dtype: (2, pages, page_size, heads_kv, row width), or with the
        two middle dimensions swapped for layout HND."""
        fmt = get_format(shape.kv_format)
        codes, _ = self._filled(shape.kv_format, shape.data)
        return _slots(codes.view(fmt.storage_dtype), shape, fmt.row_width(shape.head_dim))

    def block_scales(self, shape: Shape) -> list[torch.Tensor] | None:
        """Likewise the block scales, float8_e4m3fn (2, pages, page_size, heads_kv, head_dim / 16); None where the
        format has none."""
        fmt = get_format(shape.kv_format)
        if not fmt.block:
            return None
        _, scales = self._filled(shape.kv_format, shape.data)
        return _slots(scales.view(torch.float8_e4m3fn), shape, fmt.scale_width(shape.head_dim))

    def _filled(self, kv_format: str, data: str) -> tuple[torch.Tensor, torch.Tensor]:
        key = kv_format, data
        if key not in self._bytes:
            fmt = get_format(kv_format)
            if data == HARD and kv_format != "fp8":
                raise ValueError(f"data {HARD!r} is defined for fp8 caches, got {kv_format!r}")
            numel = self._sizes[key] // (fmt.row_bytes(UNIT) + fmt.scale_width(UNIT)) * UNIT
            codes, scales = (
                torch.empty(size, dtype=torch.uint8, device=self.device)
                for size in (fmt.row_bytes(numel), fmt.scale_width(numel))
            )
            one = torch.ones((), device=self.device)
            for start in range(0, numel, CHUNK // UNIT * UNIT):
                count = min(CHUNK // UNIT * UNIT, numel - start)
                target = codes[fmt.row_bytes(start) :][: fmt.row_bytes(count)]
                if data == HARD:
                    target.copy_(self._finite_e4m3(count))
                    continue
                values = torch.randn(count, device=self.device, generator=self._generator)
                blocks = fmt.block_scales(values, one)
                target.copy_(fmt.encode(values, one, blocks).view(torch.uint8))
                if blocks is not None:
                    scales[fmt.scale_width(start) :][: len(blocks)].copy_(blocks.view(torch.uint8))
            self._bytes[key] = codes, scales
        return self._bytes[key]

    def _finite_e4m3(self, count: int) -> torch.Tensor:
        """Bytes drawn evenly over the 254 codes that are not NaN (0x7f, 0xff)."""
        codes = torch.randint(0, 254, (count,), dtype=torch.uint8, device=self.device, generator=self._generator)
        return codes + (codes >= 0x7F)


def _slots(pool: torch.Tensor, shape: Shape, width: int) -> list[torch.Tensor]:
    """The first ``shape.slots`` caches of a flat pool, rows of ``width`` elements."""
    inner = (shape.page_size, shape.heads_kv) if shape.layout == "NHD" else (shape.heads_kv, shape.page_size)
    sizes = (shape.slots, 2, shape.num_pages, *inner, width)
    return list(pool[: math.prod(sizes)].view(sizes))
