"""K and V bytes on the device: filled once, every shape takes its caches from the start."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mjolnir.bench.shapes import HARD, Shape
from mjolnir.formats import get_format

MAX_POOL_BYTES = 40_000_000_000

CHUNK = 1 << 26
"""Elements filled at a time: 256 MB of fp32 random numbers."""


class KVPool:
    """One flat uint8 tensor per (KV format, data), as large as the largest of the shapes needs."""

    def __init__(self, shapes: Iterable[Shape], device: torch.device, seed: int = 1) -> None:
        self.device = device
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._sizes = self.check_size(shapes)
        self._bytes: dict[tuple[str, str], torch.Tensor] = {}

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
        """One tensor per slot, in the format's storage dtype: (2, pages, page_size, heads_kv, head_dim), or with the
        two middle dimensions swapped for layout HND."""
        inner = (shape.page_size, shape.heads_kv) if shape.layout == "NHD" else (shape.heads_kv, shape.page_size)
        size, dtype = shape.cache_bytes, get_format(shape.kv_format).storage_dtype
        pool = self._filled(shape.kv_format, shape.data)
        flat = [pool[slot * size : (slot + 1) * size] for slot in range(shape.slots)]
        return [cache.view(dtype).view(2, shape.num_pages, *inner, shape.head_dim) for cache in flat]

    def _filled(self, kv_format: str, data: str) -> torch.Tensor:
        key = kv_format, data
        if key not in self._bytes:
            fmt = get_format(kv_format)
            if data == HARD and kv_format != "fp8":
                raise ValueError(f"data {HARD!r} is defined for fp8 caches, got {kv_format!r}")
            pool = torch.empty(self._sizes[key], dtype=torch.uint8, device=self.device)
            codes = pool.view(fmt.storage_dtype)
            one = torch.ones((), device=self.device)
            for start in range(0, codes.numel(), CHUNK):
                chunk = codes[start : start + CHUNK]
                if data == HARD:
                    chunk.view(torch.uint8).copy_(self._finite_e4m3(chunk.numel()))
                else:
                    values = torch.randn(chunk.numel(), device=self.device, generator=self._generator)
                    chunk.copy_(fmt.encode(values, one))
            self._bytes[key] = pool
        return self._bytes[key]

    def _finite_e4m3(self, count: int) -> torch.Tensor:
        """Bytes drawn evenly over the 254 codes that are not NaN (0x7f, 0xff)."""
        codes = torch.randint(0, 254, (count,), dtype=torch.uint8, device=self.device, generator=self._generator)
        return codes + (codes >= 0x7F)
