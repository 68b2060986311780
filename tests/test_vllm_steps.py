"""Which requests of a step decode, and how ragged ones become uniform."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjolnir.integrations.vllm.steps import DecodePart, decode_part, ragged_rows

LENS = st.lists(st.integers(1, 5), min_size=1, max_size=20)


def part_of(query_lens: list[int], max_q_len: int, num_tokens: int | None = None) -> DecodePart | str:
    tokens = sum(query_lens) if num_tokens is None else num_tokens
    return decode_part(np.array(query_lens, dtype=np.int64), tokens, max_q_len)


@pytest.mark.parametrize(
    "query_lens, max_q_len, num_tokens, want",
    [
        ([1, 1, 1], 1, 3, (3, 1, 3, None, True)),
        ([1, 1, 1], 4, 3, (3, 1, 3, None, True)),
        ([4, 4], 4, 8, (2, 4, 8, None, True)),
        ([1, 1, 0, 0], 1, 4, (4, 1, 4, None, True)),  # padding, with token rows
        ([1, 1, 0, 0], 1, 3, (3, 1, 3, None, True)),
        ([1, 1, 0, 0], 1, 2, (2, 1, 2, None, True)),  # and without
        ([2, 2, 0], 2, 6, (3, 2, 6, None, True)),
        ([4, 1, 4], 4, 9, (3, 4, 9, [4, 1, 4], True)),
        ([4, 1, 0], 4, 8, (2, 4, 5, [4, 1], True)),
        ([1, 1, 700], 1, 702, (2, 1, 2, None, False)),
        ([2, 1, 9, 1], 2, 13, (2, 2, 3, [2, 1], False)),
    ],
)
def test_decode_parts(query_lens, max_q_len, num_tokens, want) -> None:
    part = part_of(query_lens, max_q_len, num_tokens)
    assert isinstance(part, DecodePart)
    lens = None if part.query_lens is None else part.query_lens.tolist()
    assert (part.num_seqs, part.q_len, part.num_tokens, lens, part.is_whole) == want


@pytest.mark.parametrize("query_lens", [[], [0, 0], [2, 1], [300]])
def test_steps_without_a_decode_part(query_lens) -> None:
    reason = part_of(query_lens, 1)
    assert reason == ("no request with at most 1 query tokens leads the step" if any(query_lens) else "no tokens")


@given(decodes=LENS, rest=st.lists(st.integers(6, 99), max_size=3), padding=st.integers(0, 4))
def test_a_part_never_exceeds_the_steps_rows(decodes, rest, padding) -> None:
    query_lens = decodes + rest + [0] * padding
    part = part_of(query_lens, 5)
    assert isinstance(part, DecodePart)
    assert part.is_whole == (not rest)
    assert len(decodes) == part.num_seqs and sum(decodes) == part.num_tokens <= sum(query_lens)
    assert part.q_len == max(decodes) and (part.query_lens is None) == (len(set(decodes)) == 1)


@given(query_lens=LENS, spare=st.integers(0, 3))
def test_ragged_rows_end_with_their_sequence(query_lens, spare) -> None:
    """By the definition: the last row of sequence s is its last token, the one before its last but one, …"""
    q_len = max(query_lens) + spare
    gather, scatter = ragged_rows(np.array(query_lens), q_len)
    ends = np.cumsum(query_lens)
    for seq, (length, end) in enumerate(zip(query_lens, ends, strict=True)):
        for back in range(q_len):
            row = seq * q_len + q_len - 1 - back
            token = end - 1 - back
            if back < length:
                assert gather[row] == token and scatter[token] == row
            else:
                assert gather[row] == end - length  # spare: any token of its own
    assert len(scatter) == sum(query_lens)
