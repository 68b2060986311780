"""Joined heads: two neighbouring KV heads as one of twice the size, whose rows the TMA reads in one.

The kernel is that of the larger head size: num_kv_heads is the number of pairs, group that of both heads together. A q
row is of one of the two, its half; elsewhere its Q is 0, so that S is its own head's, and its O is not written. Of an
odd number of heads the last has no neighbour: the TMA fills in zeros, and the rows of that half are dead.
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from mjolnir.kernels.args import DecodeArgs


def half_of(args: DecodeArgs, row: Any) -> Any:
    """Which of the two heads a q row is of, 0 or 1."""
    return Int32(row % args.group >= args.group // 2)


def kv_head_of(head: Any, half: Any) -> Any:
    """As caches and descales count; num_kv_heads of them or more where there is none."""
    return 2 * head + half
