"""wgmma: matrix products that the four warps of a warpgroup issue together, with A in registers and B in shared memory.

They are asynchronous: ``fence`` before the first of a batch, ``commit`` after the last, and what they read and write,
registers of A too, is the caller's again once ``wait`` has returned. Names and layouts follow the PTX ISA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Int32, Int64

from mjolnir.kernels.ptx import asm

ROW_BYTES = 128
"""Of B: 64 elements of 16 bits, in 128-byte-swizzled groups of eight rows."""

K_STEP = 16
"""Depth of one product."""

K_STEP_BYTES = 2 * K_STEP
"""Of a row of B."""

_SWIZZLED_BY_128 = 1 << 62
_EIGHT_ROWS = (8 * ROW_BYTES >> 4) << 32


def descriptor(addr: Any) -> Any:
    """Of B, whose rows of ROW_BYTES, a column of the product each, begin at ``addr``, a multiple of 1024."""
    return Int64((addr >> 4) & Int32(0x3FFF)) | Int64(_SWIZZLED_BY_128 | _EIGHT_ROWS)


def swizzled(row: Any, byte: Any) -> Any:
    """Where in B a row's byte lies, as a distance from its first row."""
    return row * ROW_BYTES + (byte ^ ((row & 7) << 4))


def mma(a: Sequence[Any], b: Any, c: Sequence[Any], accumulate: bool = True) -> list[Any]:
    """Issue D = A B (+ C): A 64 × 16 in f16, B 16 × n, C and D 64 × n in fp32, n = 2 len(c). Warp w of the group holds
    rows 16 w … 16 w + 15 of A and D as in mma.m16n8k16, n8 tile after n8 tile."""
    count = len(c)
    results = ",".join(f"${i}" for i in range(count))
    words = ",".join(f"${2 * count + i}" for i in range(4))
    code = (
        f"{{ .reg .pred add; setp.ne.b32 add, {int(accumulate)}, 0; wgmma.mma_async.sync.aligned.m64n{2 * count}k16"
        f".f32.f16.f16 {{{results}}}, {{{words}}}, ${2 * count + 4}, add, 1, 1, 0; }}"
    )
    return list(asm("f" * count, code, [*c, *a, b], [*map(str, range(count)), *"rrrr", "l"], True))


def fence(frags: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Order registers and earlier products before the next ones, whose A fragments these are: those made later would
    make the assembler serialize the batch."""
    words = [word for frag in frags for word in frag]
    code = "wgmma.fence.sync.aligned;"
    words = list(asm("r" * len(words), code, words, map(str, range(len(words))), True))
    return [words[i : i + 4] for i in range(0, len(words), 4)]


def commit() -> None:
    asm("", "wgmma.commit_group.sync.aligned;", side_effects=True)


def wait(values: Sequence[Any]) -> list[Any]:
    """Wait for all committed products, which leave these values. (With a batch left pending the assembler serializes
    them all: it cannot tell whose registers are free.)"""
    return list(asm("f" * len(values), "wgmma.wait_group.sync.aligned 0;", values, map(str, range(len(values))), True))


def store_transposed(addr: Any, words: Sequence[Any]) -> None:
    """Four 8 × 8 matrices of 16-bit elements, held as results of mma are, to shared memory as their transposes: lane
    8 i + r gives the address of row r of the i-th."""
    asm(
        "",
        "stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [$0], {$1,$2,$3,$4};",
        [addr, *words],
        "rrrrr",
        True,
    )
