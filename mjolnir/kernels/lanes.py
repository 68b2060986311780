"""Which bytes of shared memory a lane reads of a tile: plain arithmetic, on traced values in the kernel and on integers
in the test that counts bank conflicts.

Fragments follow PTX's mma.m16n8k16; g = lane / 4, t = lane % 4. A lane's elements are whole runs of a row: of K row g a
quarter of each panel, of V's rows an eighth.
"""

from __future__ import annotations

from typing import Any

from mjolnir.kernels.operand import Operand

Load = tuple[Any, int]
"""Offset in bytes, and width: 4, 8 or 16 bytes."""


def token_of(v: Operand, row: Any) -> Any:
    """The token, of a block of 8, that row ``row`` of S holds. Rows of 128 bytes of one head keep the order; others
    change it, so that the rows that lanes read at once, four of V and up to eight of K, lie in different banks."""
    if v.paired and v.stride == 128:
        return row ^ ((row & 1) << 2)
    if v.paired and v.stride == 64:
        return ((row >> 1) & 1) | ((row >> 2) << 1) | (((row ^ (row >> 2)) & 1) << 2)
    return row if v.stride == 128 else row ^ (((row >> 1) ^ (row >> 2)) & 1)


def position_of(joined: str, token: Any) -> Any:
    """Where a token of a tile lies, in rows; and, the other way round, which token lies there.

    Two joined tokens of 64 bytes are swizzled as one row of 128. That moves their chunks as it would in rows of 64, by
    bits 7 and 8 of an address its bits 4 and 5, and also bit 6, which tells the two apart, by bit 9: in every second
    eight tokens neighbours change places."""
    return token ^ ((token >> 3) & 1) if joined == "tokens" else token


def k_loads(k: Operand, token: Any, t: Any, side: Any = 0) -> list[list[Load]]:
    """Lane t's loads from the row of ``token`` (of a block of 8), as offsets in the row; one list per unit of
    ``Unpack.k_pairs``. ``side``: of two heads whose rows are one, which."""
    run = k.panel_bytes // 4
    width = next(size for size in (16, 8, 4) if run % size == 0)
    count = run // width
    first = side * k.panel_bytes + t * run if k.paired else t * run
    loads = [(_swizzled(k, token, first + j * width), width) for j in range(count)]
    per_unit = k.k_unit // width
    return [loads[i : i + per_unit] for i in range(0, count, per_unit)]


def v_loads(v: Operand, token: Any, g: Any, side: Any = 0) -> list[Load]:
    """Lane g's loads from the row of ``token``, as offsets in the row."""
    run = v.panel_bytes // 8
    first = side * v.panel_bytes + g * run if v.paired else g * run
    if run in (16, 8, 4):
        return [(_swizzled(v, token, first), run)]
    # 12 or 6 bytes: the words that hold them.
    return [((first >> 2 << 2) + 4 * j, 4) for j in range(-(-run // 4))]


def _swizzled(operand: Operand, token: Any, byte: Any) -> Any:
    """Where the byte that is meant to be at ``byte`` of a token's row lies: chunks of 16 bytes change places."""
    if not operand.swizzle:
        return byte
    return byte ^ ((token if operand.swizzle == 128 else (token >> 1) & 3) << 4)


def exchange_place(v: Operand, tile: Any, g: Any) -> Any:
    """Where in a row of the exchange buffer, in words, lane g's two elements of m16 tile ``tile`` of O^T lie: 16 words
    a tile, swizzled so that threads that stand on neighbouring elements, four each, read from different banks."""
    return (tile * 16 + 2 * g) ^ ((tile >> 1) * (1024 // v.panel_elems) & 31)


def q_place(row: Any, chunk: Any, run: int) -> Any:
    """Where in its row a chunk of 8 elements of Q lies in shared memory, in chunks: lanes that read their quarters, of
    ``run`` elements, read from different banks."""
    return chunk ^ ((chunk >> 3) & 3) ^ ((row & 1) * (run // 16))
