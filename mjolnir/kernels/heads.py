"""Joined KV heads: two neighbours that one piece reads together, and whose q rows it has.

num_kv_heads counts pairs. Of an odd number of heads the last has no neighbour: the TMA fills in zeros, and the rows of
that half are dead.

- "heads": two rows of 64 bytes are one of 128. The kernel is that of twice the head size, with both heads as one group;
  outside a q row's own half its Q is 0, so that S is its own head's, and its O is not written.
- "panels": a stage holds a tile of both heads, one after the other, and each row group takes its own. The q rows of a
  head begin at its row group's first one.
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from mjolnir.kernels.args import DecodeArgs
from mjolnir.kernels.geometry import Geometry


def half_of(geo: Geometry, args: DecodeArgs, row: Any) -> Any:
    """Which of the two heads a q row is of, 0 or 1."""
    if geo.joined == "panels":
        return Int32(row >= geo.rows_per_warp)
    return Int32(row % args.group >= args.group // 2)


def kv_head_of(head: Any, half: Any) -> Any:
    """As caches and descales count; num_kv_heads of them or more where there is none."""
    return 2 * head + half


def token_and_head(geo: Geometry, args: DecodeArgs, head: Any, row: Any) -> tuple[Any, Any]:
    """(query token of the sequence, query head) of a q row of item (seq, head)."""
    if geo.joined == "panels":
        half = half_of(geo, args, row)
        row, head = row - half * geo.rows_per_warp, kv_head_of(head, half)
    return row // args.group, head * args.group + row % args.group


def is_live(geo: Geometry, args: DecodeArgs, head: Any, row: Any) -> Any:
    """Whether a q row is of a token and of a head that there are."""
    if not geo.joined_heads:
        return row < args.q_len * args.group
    half = half_of(geo, args, row)
    own = row - half * geo.rows_per_warp if geo.joined == "panels" else row
    return (own < args.q_len * args.group) & (kv_head_of(head, half) < args.real_kv_heads)
