"""The tensors of one shape, and the error of an output against the oracle."""

from __future__ import annotations

import math

import torch
from torch.nn.utils.rnn import pad_sequence

from mjolnir.bench.pool import KVPool
from mjolnir.bench.shapes import Shape
from mjolnir.formats import get_format
from mjolnir.layouts import KVLayout, split_kv_cache
from mjolnir.page_views import as_bits
from mjolnir.reference import decode_attention_oracle


class Case:
    """Every slot has its own K and V; page permutation, lengths and query are the same for all.

    Attributes:
        caches: per slot, K and V as (pages, page_size, heads_kv, row width) views in the shape's page layout.
        block_scales: per slot, those of K and of V, if the format has them.
        block_table: int32 (num_seqs, max_pages), a random permutation of all pages, 0 past a sequence's last.
        seq_lens: int32 (num_seqs,).
        query: bf16 (num_seqs · q_len, heads_q, head_dim), normal.
        one: fp32 (1,), the descale of K and of V.
        checked: sequences that ``rel_err`` looks at, at most two: the shortest and the longest.
    """

    def __init__(self, shape: Shape, pool: KVPool) -> None:
        self.shape, self.device = shape, pool.device
        layout = {"NHD": KVLayout.TWO_BNHD, "HND": KVLayout.TWO_BHND}[shape.layout]
        fmt = get_format(shape.kv_format)
        self.caches = [split_kv_cache(cache, layout, fmt.row_width(shape.head_dim)) for cache in pool.caches(shape)]
        self.block_scales: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        if (scales := pool.block_scales(shape)) is not None:
            self.block_scales = [split_kv_cache(s, layout, fmt.scale_width(shape.head_dim)) for s in scales]
        pages_of = [-(-length // shape.page_size) for length in shape.lens]
        pages = torch.randperm(shape.num_pages, generator=torch.Generator().manual_seed(3)).int()
        self.block_table = pad_sequence(list(pages.split(pages_of)), batch_first=True).to(self.device)
        self.seq_lens = torch.tensor(shape.lens, dtype=torch.int32, device=self.device)
        values = torch.randn(
            len(shape.lens) * shape.q_len,
            shape.heads_q,
            shape.head_dim,
            device=self.device,
            generator=torch.Generator(device=self.device).manual_seed(5),
        )
        self.query = values.bfloat16()
        self.one = torch.ones(1, device=self.device)
        self.softmax_scale = 1 / math.sqrt(shape.head_dim)
        by_length = sorted(range(len(shape.lens)), key=shape.lens.__getitem__)
        self.checked = sorted({by_length[0], by_length[-1]})
        self._expected: dict[tuple[int, int], torch.Tensor] = {}  # by (slot, sequence), for all peers

    def in_memory_order(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a slot with a page's dimensions as they lie: contiguous, (pages, page_size, heads_kv, head_dim)
        or, for HND, (pages, heads_kv, page_size, head_dim)."""
        k_cache, v_cache = self.caches[slot]
        return (k_cache, v_cache) if self.shape.layout == "NHD" else (k_cache.transpose(1, 2), v_cache.transpose(1, 2))

    def rel_err(self, out: torch.Tensor, slot: int) -> float:
        """The largest over the checked sequences of ‖O − oracle‖₂ / ‖oracle‖₂, for the output of one slot."""
        q_len = self.shape.q_len
        out = out.reshape(self.query.shape)
        worst = 0.0
        for seq in self.checked:
            rows = slice(seq * q_len, (seq + 1) * q_len)
            if (slot, seq) not in self._expected:
                self._expected[slot, seq] = self._oracle(seq, rows, slot)
            expected = self._expected[slot, seq]
            worst = max(worst, ((out[rows].double() - expected).norm() / expected.norm()).item())
        return worst

    def _oracle(self, seq: int, rows: slice, slot: int) -> torch.Tensor:
        """fp64 O of one sequence: its pages are gathered into a single large one first, since the oracle walks pages
        one by one."""
        length = self.shape.lens[seq]
        pages = self.block_table[seq, : -(-length // self.shape.page_size)].long()

        def gathered(t: torch.Tensor) -> torch.Tensor:
            return as_bits(t)[pages].flatten(0, 1).unsqueeze(0).view(t.dtype)

        k_cache, v_cache = map(gathered, self.caches[slot])
        k_blocks, v_blocks = (None, None) if self.block_scales is None else map(gathered, self.block_scales[slot])
        expected, _ = decode_attention_oracle(
            self.query[rows],
            k_cache,
            v_cache,
            self.one,
            self.one,
            torch.zeros(1, 1, dtype=torch.int32),
            torch.tensor([length]),
            q_len=self.shape.q_len,
            softmax_scale=self.softmax_scale,
            kv_format=self.shape.kv_format,
            k_block_scale=k_blocks,
            v_block_scale=v_blocks,
        )
        return expected
