"""The reference backend: the runner's semantics in vectorised PyTorch, on any device.

It is what the runner uses without a GPU. It reads the lengths on the host, so it cannot be captured in a CUDA graph.
Sequences of like length are batched and long ones cut into pieces, so that memory stays bounded.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from mjolnir.checks import scale_view
from mjolnir.formats import KvFormat, get_formats

BUDGET = 1 << 24
"""Elements of K, and as many of V, decoded at a time (64 MB each in fp32); never less than one page."""


class _Partial(NamedTuple):
    """Softmax over some of the keys; m and l (…, 1) and o (…, head_size) in fp64.

    m and l stay apart: their log-sum-exp would lose l once |m| is large (−1e30 + ln 2 is −1e30).
    """

    m: torch.Tensor  # largest score, −inf without keys
    l: torch.Tensor  # noqa: E741  Σ exp(score − m)
    o: torch.Tensor  # Σ exp(score − m) · v / l, 0 without keys


@torch.no_grad()
def decode(
    query: torch.Tensor,
    out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    num_seqs: int,
    q_len: int,
    softmax_scale: float,
    causal: bool,
    kv_format: str,
    v_format: str | None = None,
    k_block_scale: torch.Tensor | None = None,
    v_block_scale: torch.Tensor | None = None,
    q_mul: torch.Tensor | None = None,
    o_mul: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    one_by_one: bool = False,
) -> None:
    """Write O, and LSE if asked for, of the first num_seqs · q_len tokens; later rows are left as they are.

    The semantics are those of ``mjolnir.reference.decode_attention_oracle``. Differences in the arguments: query and
    out may also be (tokens, num_heads · head_size); out and lse are written in place, whatever their strides and
    float dtype; every tensor may have more rows than num_seqs asks for. With one_by_one no sequence shares a product
    with another, so that its result does not depend on them.

    Raises:
        ValueError: a live block-table entry names no page, a sequence has more pages than the block table, or a
            descale has another shape than the oracle's.
        TypeError: a descale is not fp32.
    """
    if num_seqs == 0:
        return
    num_pages, page_size, num_kv_heads, row_width = k_cache.shape
    k_fmt, v_fmt = get_formats(kv_format, v_format)
    head_size = k_fmt.head_size_of(row_width)
    q, q_exponent = _normalised(_by_head(query, num_seqs, q_len, num_kv_heads, head_size), q_mul)
    out_rows = _by_head(out, num_seqs, q_len, num_kv_heads, head_size)
    k_descale = softmax_scale * scale_view("k_scale", k_scale, num_seqs, num_kv_heads).double()
    v_descale = scale_view("v_scale", v_scale, num_seqs, num_kv_heads).double()
    o_factor = v_descale[:, None, :, None, None]  # as (num_seqs, q_len, num_kv_heads, group, head_size)
    if o_mul is not None:
        o_factor = o_factor * o_mul.double().unflatten(0, q.shape[2:4])

    seq_lens = seq_lens[:num_seqs]
    page_ids = _live_page_ids(block_table[:num_seqs], seq_lens, page_size, num_pages)
    budget = max(1, BUDGET // (page_size * num_kv_heads * head_size))  # pages at a time
    waiting = torch.argsort(seq_lens, descending=True)
    while len(waiting):
        pages = -(-int(seq_lens[waiting[0]]) // page_size)
        seqs, waiting = waiting.tensor_split([1 if one_by_one else max(1, budget // max(1, pages))])
        score_factor = torch.ldexp(k_descale[seqs][:, None, :, None, None], q_exponent[seqs])
        done = _nothing(q[seqs])
        for first in range(0, pages, budget):
            ids = page_ids[seqs, first : min(first + budget, pages)]
            keys = torch.arange(first * page_size, first * page_size + ids.shape[1] * page_size, device=ids.device)
            live = keys < seq_lens[seqs, None]
            visible = _visible(keys, seq_lens[seqs], q_len, causal)
            k = _rows(k_cache, k_block_scale, ids, live, k_fmt)
            v = _rows(v_cache, v_block_scale, ids, live, v_fmt)
            done = _merge(done, _attend(q[seqs], score_factor, k, v, visible))
        out_rows[seqs] = (done.o * o_factor[seqs]).to(out.dtype)
        if lse is not None:
            lse_rows = lse[: num_seqs * q_len].unflatten(0, (num_seqs, q_len))
            lse_rows[seqs] = (done.m + done.l.log()).flatten(2).to(lse.dtype)


def _by_head(t: torch.Tensor, num_seqs: int, q_len: int, num_kv_heads: int, head_size: int) -> torch.Tensor:
    """Query or out as a (num_seqs, q_len, num_kv_heads, group, head_size) view."""
    num_heads = t.shape[1] if t.dim() == 3 else t.shape[1] // head_size
    rows = t[: num_seqs * q_len]
    if t.dim() == 2:
        rows = rows.unflatten(1, (num_heads, head_size))
    return rows.unflatten(1, (num_kv_heads, num_heads // num_kv_heads)).unflatten(0, (num_seqs, q_len))


def _normalised(q: torch.Tensor, q_mul: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """q · q_mul as fp32 rows times 2^exponent: |q| < 2^-8, so that up to 256 products with the largest bf16 K sum to
    a finite fp32 score, whatever the query's own range."""
    q = q.double()
    if q_mul is not None:
        q = q * q_mul.double().unflatten(0, q.shape[2:4])
    # An fp64 exponent: older torch takes 2^exponent of an integer in fp32, where that of q · q_mul overflows.
    exponent = torch.frexp(q.abs().amax(-1, keepdim=True)).exponent.double() + 8
    return torch.ldexp(q, -exponent).float(), exponent


def _live_page_ids(block_table: torch.Tensor, seq_lens: torch.Tensor, page_size: int, num_pages: int) -> torch.Tensor:
    """The block table as int64 with every entry past a sequence's last page replaced by 0, checked."""
    max_pages = block_table.shape[1]
    longest = int(seq_lens.max())
    if longest > max_pages * page_size:
        raise ValueError(f"seq_lens has {longest}, but block_table holds {max_pages} pages of {page_size} tokens")
    first_token = torch.arange(max_pages, device=block_table.device) * page_size
    ids = torch.where(first_token < seq_lens[:, None], block_table, 0).long()
    if longest > 0:
        lowest, highest = (int(bound) for bound in ids.aminmax())
        if lowest < 0 or highest >= num_pages:
            bad = lowest if lowest < 0 else highest
            raise ValueError(f"block_table names page {bad} inside a sequence, expected 0 … {num_pages - 1}")
    return ids


def _visible(keys: torch.Tensor, seq_lens: torch.Tensor, q_len: int, causal: bool) -> torch.Tensor:
    """(num_seqs, q_len, keys) bool: which keys a token sees."""
    seen = seq_lens[:, None].expand(-1, q_len)
    if causal:
        seen = seen - torch.arange(q_len - 1, -1, -1, device=seq_lens.device)
    return keys < seen[:, :, None]


def _rows(
    cache: torch.Tensor, block_scale: torch.Tensor | None, ids: torch.Tensor, live: torch.Tensor, fmt: KvFormat
) -> torch.Tensor:
    """Rows of the pages in fp32 (num_seqs, keys, num_kv_heads, head_size); 0 in dead ones, whose bytes may be NaN."""
    rows = fmt.decode(cache[ids], None if block_scale is None else block_scale[ids]).flatten(1, 2)
    return rows.masked_fill_(~live[:, :, None, None], 0)


def _nothing(q: torch.Tensor) -> _Partial:
    o = torch.zeros_like(q, dtype=torch.float64)
    return _Partial(torch.full_like(o[..., :1], -math.inf), o[..., :1], o)


def _attend(
    q: torch.Tensor, score_factor: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor
) -> _Partial:
    """q (n, q_len, num_kv_heads, group, head_size) over the keys that ``visible`` (n, q_len, keys) lets it see."""
    scores = torch.einsum("nqhgd,nthd->nqhgt", q, k).double() * score_factor
    scores = scores.masked_fill(~visible[:, :, None, None, :], -math.inf)
    m = scores.amax(-1, keepdim=True)
    weights = (scores - _finite(m)).exp_()
    total = weights.sum(-1, keepdim=True)
    # Normalised before P · V: a mean of V cannot overflow where a sum could.
    weights /= torch.where(total == 0, 1, total)
    return _Partial(m, total, torch.einsum("nqhgt,nthd->nqhgd", weights.float(), v).double())


def _merge(a: _Partial, b: _Partial) -> _Partial:
    m = torch.maximum(a.m, b.m)
    weight_a, weight_b = ((part.m - _finite(m)).exp() * part.l for part in (a, b))
    total = weight_a + weight_b
    o = (weight_a * a.o + weight_b * b.o) / torch.where(total == 0, 1, total)
    return _Partial(m, total, o)


def _finite(m: torch.Tensor) -> torch.Tensor:
    """0 for a maximum over no keys, so that −inf − m is −inf and not NaN."""
    return torch.where(m == -math.inf, 0, m)
