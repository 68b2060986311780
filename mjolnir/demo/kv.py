"""The demo's KV cache: pages of one sequence, handed out in random order, written in a low-precision format."""

from __future__ import annotations

import torch
from torch import Tensor

from mjolnir.checks import check_positive_int
from mjolnir.formats import get_format
from mjolnir.layouts import KVLayout, split_kv_cache

HEADROOM = 2.0
"""fp8 descales leave room for values this many times the prompt's largest. It costs no precision there, since steps are
relative, only one power of two of the smallest values. In narrower formats it would, and they get none."""

LAYOUT = KVLayout.B2HND


class PagedKVCache:
    """K and V of all layers of one sequence.

    The descales are fixed by the first ``write`` of each layer (the prompt): per KV head, its largest magnitude (in
    fp8 times HEADROOM) lands on the format's largest value; later values beyond that saturate, but in nvfp4, whose
    block scales follow. In 16-bit formats descales are 1.

    Args:
        max_tokens: what the pages hold; ``extend`` past it raises.
        kv_format: a name in ``mjolnir.formats``.
        seed: of the order in which pages are handed out.

    Attributes:
        length: tokens in the cache, on the host.
        seq_lens: int32 (1,), the same on the device.
        block_table: int32 (1, max_pages): page of each page_size tokens, -1 where none is handed out yet.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        page_size: int,
        max_tokens: int,
        kv_format: str,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        self.format = get_format(kv_format)
        self.page_size = check_positive_int("page_size", page_size)
        self.max_tokens = check_positive_int("max_tokens", max_tokens)
        widths = self.format.row_width(head_size), self.format.scale_width(head_size)
        self.bytes_per_token = 2 * num_layers * num_kv_heads * (self.format.row_bytes(head_size) + widths[1])
        max_pages = -(-max_tokens // page_size)
        shape = (num_layers, max_pages, 2, num_kv_heads, page_size)
        self._pages = torch.zeros(*shape, widths[0], dtype=self.format.storage_dtype, device=device)
        self._views = [split_kv_cache(layer, LAYOUT, widths[0]) for layer in self._pages]
        self._block_scales: list[tuple[Tensor, Tensor]] | list[tuple[None, None]] = [(None, None)] * num_layers
        if self.format.block:
            scales = torch.zeros(*shape, widths[1], dtype=torch.float8_e4m3fn, device=device)
            self._block_scales = [split_kv_cache(layer, LAYOUT, widths[1]) for layer in scales]
        self._scales = torch.ones(num_layers, 2, num_kv_heads, dtype=torch.float32, device=device)
        self._scaled = [self.format.bits == 16] * num_layers
        self._free = torch.randperm(max_pages, generator=torch.Generator().manual_seed(seed)).tolist()
        self._slots = torch.empty(0, dtype=torch.int64, device=device)  # page · page_size + row of the newest tokens
        self.length = 0
        self.seq_lens = torch.zeros(1, dtype=torch.int32, device=device)
        self.block_table = torch.full((1, max_pages), -1, dtype=torch.int32, device=device)

    def extend(self, tokens: int) -> None:
        """Make room for that many new tokens, which every layer then writes.

        Raises:
            ValueError: the sequence would exceed ``max_tokens``.
        """
        end = self.length + check_positive_int("tokens", tokens)
        if end > self.max_tokens:
            raise ValueError(f"tokens must be at most {self.max_tokens - self.length}, the room left, got {tokens}")
        positions = torch.arange(self.length, end, device=self.seq_lens.device)
        for page in range(-(-self.length // self.page_size), -(-end // self.page_size)):
            self.block_table[0, page] = self._free.pop()
        self._slots = self.block_table[0, positions // self.page_size] * self.page_size + positions % self.page_size
        self.length = end
        self.seq_lens.fill_(end)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Quantise key and value (tokens, h_k, d) of the tokens of the last ``extend`` into their pages."""
        if not self._scaled[layer]:
            largest = torch.stack([x.abs().amax(dim=(0, 2)) for x in (key, value)]).float()
            headroom = HEADROOM if self.format.bits == 8 else 1.0
            self._scales[layer] = largest * (headroom / self.format.max_value)
            self._scaled[layer] = True
        pages, rows = self._slots // self.page_size, self._slots % self.page_size
        for x, cache, block_scale, scale in zip(
            (key, value), self._views[layer], self._block_scales[layer], self._scales[layer], strict=True
        ):
            blocks = self.format.block_scales(x, scale[:, None])
            cache[pages, rows] = self.format.encode(x, scale[:, None], blocks)
            if block_scale is not None and blocks is not None:
                block_scale.view(torch.uint8)[pages, rows] = blocks.view(torch.uint8)

    def layer(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """K and V as (pages, page_size, h_k, row width) views, and their descales (h_k,): what ``DecodeRunner.run``
        takes."""
        k_cache, v_cache = self._views[layer]
        k_scale, v_scale = self._scales[layer]
        return k_cache, v_cache, k_scale, v_scale

    def block_scales(self, layer: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """The block scales of K and V of a layer; None where the format has none."""
        return self._block_scales[layer]
