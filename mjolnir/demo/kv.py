"""The demo's KV cache: pages of one sequence, handed out in random order, written in a low-precision format."""

from __future__ import annotations

import torch
from torch import Tensor

from mjolnir.calibration.scales import KvScales, LayerScales
from mjolnir.checks import check_positive_int
from mjolnir.formats import KvFormat, get_formats
from mjolnir.runner import DecodeRunner, StepPlan
from mjolnir.write import write_kv

HEADROOM = 2.0
"""fp8 descales leave room for values this many times the prompt's largest. It costs no precision there, since steps are
relative, only one power of two of the smallest values. In narrower formats it would, and they get none."""


KV_LAYOUT = "HND"
"""Of a page, as ``DecodeRunner`` calls it."""


class PagedKVCache:
    """K and V of all layers of one sequence.

    Without ``scales``, descales are fixed by the first ``write`` of each layer (the prompt): per KV head, its largest
    magnitude (in fp8 times HEADROOM) lands on the format's largest value; later values beyond that saturate, but in
    nvfp4, whose block scales follow. In 16-bit formats descales are 1.

    Args:
        max_tokens: what the pages hold; ``extend`` past it raises.
        kv_format, v_format: names in ``mjolnir.formats``, of K and of V; None: V has K's.
        scales: calibrated ones, of these formats.
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
        v_format: str | None = None,
        scales: KvScales | None = None,
        seed: int = 0,
    ) -> None:
        self.formats = get_formats(kv_format, v_format)
        self.page_size = check_positive_int("page_size", page_size)
        self.max_tokens = check_positive_int("max_tokens", max_tokens)
        max_pages = -(-max_tokens // page_size)
        self.bytes_per_token = (
            num_layers
            * num_kv_heads
            * sum(fmt.row_bytes(head_size) + fmt.scale_width(head_size) for fmt in self.formats)
        )
        pages = (num_layers, max_pages, num_kv_heads, page_size)

        def rows(width: int, dtype: torch.dtype) -> Tensor:
            """(layers, pages, page_size, h_k, width), a page's rows of one head together."""
            return torch.zeros(*pages, width, dtype=dtype, device=device).transpose(2, 3)

        self._codes = [rows(fmt.row_width(head_size), fmt.storage_dtype) for fmt in self.formats]
        self._block_scales = [
            rows(fmt.scale_width(head_size), torch.float8_e4m3fn) if fmt.block else None for fmt in self.formats
        ]
        one = torch.ones(1, device=device)
        self._scales: list[LayerScales | None] = [None] * num_layers
        if scales is not None:
            self._scales = [scales.layer(layer) for layer in range(num_layers)]
        elif all(fmt.bits == 16 for fmt in self.formats):
            self._scales = [LayerScales.alike(one, one)] * num_layers
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
        own = self._scales[layer]
        if own is None:
            k_scale, v_scale = (
                x.abs().amax(dim=(0, 2)).float() * (_headroom(fmt) / fmt.max_value)
                if fmt.bits < 16
                else torch.ones(1, device=x.device)
                for x, fmt in zip((key, value), self.formats, strict=True)
            )
            own = self._scales[layer] = LayerScales.alike(k_scale, v_scale)
        (k_codes, v_codes), (k_blocks, v_blocks) = self._side_by_side(layer)
        k_fmt, v_fmt = self.formats
        write_kv(
            key, value, k_codes, v_codes, self._slots, own.k_write, own.v_write, kv_format=k_fmt.name,
            v_format=v_fmt.name, k_block_scale=k_blocks, v_block_scale=v_blocks,
        )  # fmt: skip

    def attend(
        self, runner: DecodeRunner, plan: StepPlan, layer: int, query: Tensor, out: Tensor, softmax_scale: float
    ) -> None:
        """``runner.run`` of one layer over this cache, with its scales."""
        own = self.scales(layer)
        (k_codes, v_codes), (k_blocks, v_blocks) = self._side_by_side(layer)
        runner.run(
            plan, query, out, k_codes, v_codes, own.k_scale, own.v_scale, softmax_scale, own.q_mul, own.o_mul,
            k_block_scale=k_blocks, v_block_scale=v_blocks,
        )  # fmt: skip

    def scales(self, layer: int) -> LayerScales:
        """The scales of a layer.

        Raises:
            ValueError: it was never written, so that it has none.
        """
        own = self._scales[layer]
        if own is None:
            raise ValueError(f"layer {layer} has no scales yet: the first write fixes them")
        return own

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V as (pages, page_size, h_k, row width) views: what ``DecodeRunner.run`` takes."""
        return self._side_by_side(layer)[0]

    def _side_by_side(self, layer: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor | None, Tensor | None]]:
        """Codes of K and V, and their block scales."""
        k_blocks, v_blocks = (None if blocks is None else blocks[layer] for blocks in self._block_scales)
        return (self._codes[0][layer], self._codes[1][layer]), (k_blocks, v_blocks)


def _headroom(fmt: KvFormat) -> float:
    return HEADROOM if fmt.bits == 8 else 1.0
