"""Which requests of a step decode: those that lead it with at most max_q_len query tokens each. Knows no vLLM."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class DecodePart:
    """The leading requests that decode.

    Attributes:
        num_seqs: how many. Trailing requests without tokens, the padding of a CUDA graph, are among them as far as
            there are token rows for them, unless the part is ragged.
        q_len: query tokens of each, or of the longest.
        num_tokens: query tokens of all, which lead the step's tokens.
        query_lens: (num_seqs,) where they differ; None where all have q_len.
        is_whole: nothing follows but padding.
    """

    num_seqs: int
    q_len: int
    num_tokens: int
    query_lens: Int64Array | None
    is_whole: bool


def decode_part(query_lens: Int64Array, num_tokens: int, max_q_len: int) -> DecodePart | str:
    """The decode part of a step, or the reason why it has none.

    Args:
        query_lens: (num_reqs,) query tokens per request.
        num_tokens: token rows of the step, padding included.
        max_q_len: most query tokens of a request that decodes.
    """
    if not len(query_lens) or query_lens[0] < 1:
        return "no tokens"
    if query_lens[0] > max_q_len:
        return f"no request with at most {max_q_len} query tokens leads the step"
    decodes = (query_lens >= 1) & (query_lens <= max_q_len)
    count = len(query_lens) if decodes.all() else int(np.argmin(decodes))
    lens = query_lens[:count]
    is_whole = not query_lens[count:].any()
    q_len = int(lens.max())
    if (lens == q_len).all():
        if is_whole:
            count = min(len(query_lens), num_tokens // q_len)
        return DecodePart(count, q_len, count * q_len, None, is_whole)
    return DecodePart(count, q_len, int(lens.sum()), lens.astype(np.int64), is_whole)


def ragged_rows(query_lens: Int64Array, q_len: int) -> tuple[Int64Array, Int64Array]:
    """Rows that turn ragged queries into uniform ones of q_len tokens, aligned to the end of their sequence.

    Token i of q_len sees keys 0 … L − q_len + i of a sequence of length L. So the last of q_len rows is the sequence's
    newest token whatever its own query length, and rows before its first are spare: they repeat that first token.

    Returns:
        gather: (num_seqs · q_len,) the token that each uniform row takes.
        scatter: (tokens,) the uniform row of each token.
    """
    first = np.cumsum(query_lens) - query_lens
    place = np.arange(q_len) - (q_len - query_lens[:, None])  # negative: spare
    gather = first[:, None] + np.maximum(place, 0)
    return gather.reshape(-1), np.flatnonzero(place.reshape(-1) >= 0)
