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
    """The token, of a block of 8, that row ``row`` of S holds. Panels of 128 bytes keep the order; narrower ones swap
    some neighbours, so that the rows of V that four lanes read at once lie in different banks."""
    return row if v.panel_bytes == 128 else row ^ (((row >> 1) ^ (row >> 2)) & 1)


def position_of(joined: str, token: Any) -> Any:
    """Where a token of a tile lies, in rows; and, the other way round, which token lies there.

    Two joined tokens of 64 bytes are swizzled as one row of 128. That moves their chunks as it would in rows of 64, by
    bits 7 and 8 of an address its bits 4 and 5, and also bit 6, which tells the two apart, by bit 9: in every second
    eight tokens neighbours change places."""
    return token ^ ((token >> 3) & 1) if joined == "tokens" else token


def k_loads(k: Operand, token: Any, t: Any) -> list[list[Load]]:
    """Lane t's loads from the panel row of ``token`` (of a block of 8), as offsets in the row; one list per unit of
    ``Unpack.k_pairs``."""
    run = k.panel_bytes // 4
    width = next(size for size in (16, 8, 4) if run % size == 0)
    count = run // width
    if k.swizzle:
        swizzle = token if k.swizzle == 128 else (token >> 1) & 3
        loads = [(((count * t + j) ^ swizzle) * 16, width) for j in range(count)]
    else:
        loads = [(t * run + j * width, width) for j in range(count)]
    per_unit = k.k_unit // width
    return [loads[i : i + per_unit] for i in range(0, count, per_unit)]


def v_loads(v: Operand, token: Any, g: Any) -> list[Load]:
    """Lane g's loads from the panel row of ``token``, as offsets in the row."""
    if v.swizzle == 128:
        return [((g ^ token) << 4, 16)]
    if v.swizzle == 64:
        return [((((g >> 1) ^ ((token >> 1) & 3)) << 4) + ((g & 1) << 3), 8)]
    run = v.panel_bytes // 8  # 12, 6 or 4 bytes: the words that hold them
    first = g * run if run % 4 == 0 else (g * run >> 2) << 2
    return [(first + 4 * j, 4) for j in range(-(-run // 4))]


def exchange_place(v: Operand, tile: Any, g: Any) -> Any:
    """Where in a row of the exchange buffer, in words, lane g's two elements of m16 tile ``tile`` of O^T lie: 16 words
    a tile, swizzled so that threads that stand on neighbouring elements, four each, read from different banks."""
    return (tile * 16 + 2 * g) ^ ((tile >> 1) * (1024 // v.panel_elems) & 31)


def q_place(row: Any, chunk: Any, run: int) -> Any:
    """Where in its row a chunk of 8 elements of Q lies in shared memory, in chunks: lanes that read their quarters, of
    ``run`` elements, read from different banks."""
    return chunk ^ ((chunk >> 3) & 3) ^ ((row & 1) * (run // 16))
