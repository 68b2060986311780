"""The oracle: decode attention in fp64 over the exact values of the cache's bytes, written from the definition.

    S_n = softmax_scale · (q · q_mul) · k_n        for the keys n that the token sees
    O = o_mul · Σ_n softmax(S)_n · v_n             LSE = ln Σ_n exp(S_n)

One loop per index of the definition; nothing here is fast or meant to be. It shares no code with the backends.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mjolnir.formats import get_formats


def decode_attention_oracle(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    q_len: int,
    softmax_scale: float,
    causal: bool = True,
    kv_format: str = "fp8",
    v_format: str | None = None,
    k_block_scale: torch.Tensor | None = None,
    v_block_scale: torch.Tensor | None = None,
    q_mul: torch.Tensor | None = None,
    o_mul: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE of every query token. Token i of sequence s is row s · q_len + i.

    Token i of a sequence of length L sees keys 0 … L − q_len + i, or all L with ``causal=False``. A token that sees no
    key has O = 0 and LSE = −inf. Query head h reads KV head h // (num_heads / num_kv_heads). Neither block-table
    entries past a sequence's last page nor rows past its length are read.

    Args:
        query: (num_seqs · q_len, num_heads, head_size), any float dtype.
        k_cache, v_cache: (pages, page_size, num_kv_heads, row width of the format) codes, any strides.
        k_scale, v_scale: descales of 1 element, (num_kv_heads,) or (num_seqs, num_kv_heads).
        block_table: (num_seqs, max_pages) page ids.
        seq_lens: (num_seqs,) keys of each sequence.
        kv_format, v_format: names in ``mjolnir.formats``, of K and of V; None: V has K's.
        k_block_scale, v_block_scale: (pages, page_size, num_kv_heads, head_size / 16) e4m3, for nvfp4.
        q_mul, o_mul: (num_heads, head_size) factors on the query before, on O after.

    Returns:
        out: fp64 (num_seqs · q_len, num_heads, head_size).
        lse: fp64 (num_seqs · q_len, num_heads), natural log.

    Raises:
        ValueError: a live block-table entry names no page, or a sequence has more pages than the block table.
    """
    tokens, num_heads, head_size = query.shape
    num_pages, page_size, num_kv_heads, _ = k_cache.shape
    k_fmt, v_fmt = get_formats(kv_format, v_format)
    q = query.double() if q_mul is None else query.double() * q_mul.double()
    out = torch.zeros(tokens, num_heads, head_size, dtype=torch.float64, device=query.device)
    lse = torch.full((tokens, num_heads), -math.inf, dtype=torch.float64, device=query.device)

    for seq in range(tokens // q_len):
        length = int(seq_lens[seq])
        pages = block_table[seq, : -(-length // page_size)].tolist()
        if len(pages) * page_size < length:
            raise ValueError(f"seq_lens[{seq}] = {length} needs more pages than block_table has: {len(pages)}")
        if bad := [page for page in pages if not 0 <= page < num_pages]:
            raise ValueError(f"block_table[{seq}] names page {bad[0]}, expected 0 … {num_pages - 1}")
        if not pages:
            continue
        for kv_head in range(num_kv_heads):
            k_codes, k_blocks = (_rows(t, pages, kv_head, length) for t in (k_cache, k_block_scale))
            v_codes, v_blocks = (_rows(t, pages, kv_head, length) for t in (v_cache, v_block_scale))
            keys = k_fmt.decode(k_codes, k_blocks).double() * _scale_of(k_scale, seq, kv_head)
            values = v_fmt.decode(v_codes, v_blocks).double() * _scale_of(v_scale, seq, kv_head)
            for i in range(q_len):
                seen = length - q_len + i + 1 if causal else length
                if seen <= 0:
                    continue
                for head in range(num_heads):
                    if head // (num_heads // num_kv_heads) != kv_head:
                        continue
                    row = seq * q_len + i
                    scores = softmax_scale * (keys[:seen] @ q[row, head])
                    out[row, head] = torch.softmax(scores, dim=0) @ values[:seen]
                    lse[row, head] = torch.logsumexp(scores, dim=0)
    return (out if o_mul is None else out * o_mul.double()), lse


def _rows(cache: Any, pages: list[int], kv_head: int, length: int) -> Any:
    """The rows of a sequence's tokens, of one head; None where there is no such tensor."""
    return None if cache is None else torch.cat([cache[page, :, kv_head] for page in pages])[:length]


def _scale_of(scale: torch.Tensor, seq: int, kv_head: int) -> float:
    """The descale of one sequence's KV head."""
    if scale.numel() == 1:
        return scale.item()
    return scale[kv_head].item() if scale.dim() == 1 else scale[seq, kv_head].item()
