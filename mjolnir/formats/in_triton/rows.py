"""Rows of a cache, loaded and stored in each format, and the rows that a writer takes."""

from __future__ import annotations

import triton
import triton.language as tl

from mjolnir.formats.in_triton.codes import (
    bf16_code,
    e2m1_bytes,
    e2m1_count,
    e4m3_value,
    e4m3_values,
    fp8_word,
    fp16_code,
    halves,
    joined,
    joined_4,
    quarters,
)
from mjolnir.formats.in_triton.scales import block_scale_code, over_block_scale

TO_E4M3 = tl.constexpr(2.0**-6)  # e2m3 and e2m1 values times this are e4m3 values with the same bits


@triton.jit
def load_sixteens(source, mask, ROWS: tl.constexpr, D: tl.constexpr):
    """x [ROWS, D] at pointers ``source`` [ROWS] with sixteen neighbours in a thread, whose codes are 16 bytes of fp8,
    three words of e2m3 or a block of nvfp4. A load of 16 bytes takes eight, so: two loads."""
    i = tl.arange(0, D // 16)[:, None] * 16 + tl.arange(0, 8)[None, :]
    at = source[:, None, None] + i[None, :, :]
    keep = mask[:, None, None]
    low, high = tl.load(at, mask=keep, other=0), tl.load(at + 8, mask=keep, other=0)
    return tl.reshape(tl.permute(tl.join(low, high), (0, 1, 3, 2)), (ROWS, D))


@triton.jit
def addressed_once(row, mask, ROWS: tl.constexpr):
    """Pointers to int32 and their mask, as they are: a sum along an axis of one. The compiler takes a sum to another
    layout through shared memory, and would work out pointers there again, from the slots on: some 20 instructions for
    each of a thread's rows."""
    address = tl.reshape(tl.where(mask, row.to(tl.int64), 0), (1, ROWS))
    address = tl.reshape(tl.cumsum(address, axis=0), (ROWS,))
    return address.to(tl.pointer_type(tl.int32)), address != 0


@triton.jit
def e2m3_word(D: tl.constexpr):
    """[1, D / 4]: the words of a row, three of sixteen elements, each fourth place empty. A thread packs three words,
    but neighbouring threads store neighbouring words: stored three apart they would reach every 32-byte sector three
    times, in part."""
    i = tl.arange(0, D // 4)[None, :]
    return 3 * (i // 4) + i % 4


@triton.jit
def e2m3_is_word(D: tl.constexpr):
    return tl.arange(0, D // 4)[None, :] % 4 < 3


@triton.jit
def store_rows(
    row, block_row, mask, y, FORMAT: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, NATIVE: tl.constexpr
):
    """Store values y [ROWS, D], divided by their descale already.

    ``row`` [ROWS] points to int32: a row's first word; ``block_row`` to its first block scale (uint8) in a format that
    has them. ``mask`` [ROWS] says which rows are stored.
    """
    keep = mask[:, None]
    if FORMAT == "fp8" or FORMAT == "fp8_e5m2":
        x0, x1, x2, x3 = quarters(y, ROWS, D)
        word = fp8_word(x0, x1, x2, x3, FORMAT == "fp8_e5m2", NATIVE)
        tl.store(row[:, None] + tl.arange(0, D // 4)[None, :], word, mask=keep)
    elif FORMAT == "e2m3":
        if not NATIVE:
            y = tl.where(y == y, y, 7.5)
        y = tl.maximum(tl.minimum(y, 7.5), -7.5) * TO_E4M3  # min first: a GPU's makes NaN 7.5
        x0, x1, x2, x3 = quarters(y, ROWS, D)
        word = fp8_word(x0, x1, x2, x3, False, NATIVE)  # four bytes s00eemmm
        word = (word & 0x1F1F1F1F) | ((word >> 2) & 0x20202020)
        word = (word & 0x003F003F) | ((word >> 2) & 0x0FC00FC0)
        group = (word & 0xFFF) | ((word >> 4) & 0xFFF000)
        g0, g1, g2, g3 = quarters(group, ROWS, D // 4)
        w1, w2 = ((g1 >> 8) & 0xFFFF) | (g2 << 16), ((g2 >> 16) & 0xFF) | (g3 << 8)
        words = joined_4(g0 | (g1 << 24), w1, w2, w2, ROWS, D // 4)
        row, mask = addressed_once(row, mask, ROWS)
        tl.store(row[:, None] + e2m3_word(D), words, mask=mask[:, None] & e2m3_is_word(D))
    elif FORMAT == "nvfp4":
        scale = block_scale_code(y, ROWS, D, NATIVE)
        tl.store(block_row[:, None] + tl.arange(0, D // 16)[None, :], scale.to(tl.uint8), mask=keep)
        c0, c1 = halves(e2m1_count(over_block_scale(y, scale, ROWS, D, NATIVE), NATIVE), ROWS, D)
        y0, y1 = halves(y, ROWS, D)
        even, odd = e2m1_bytes(c0, y0, ROWS, D // 2, NATIVE), e2m1_bytes(c1, y1, ROWS, D // 2, NATIVE)
        tl.store(row[:, None] + tl.arange(0, D // 8)[None, :], even | (odd << 4), mask=keep)
    else:
        tl.static_assert(FORMAT == "bf16" or FORMAT == "fp16")
        c0, c1 = halves(bf16_code(y) if FORMAT == "bf16" else fp16_code(y), ROWS, D)
        tl.store(row[:, None] + tl.arange(0, D // 2)[None, :], c0 | (c1 << 16), mask=keep)


@triton.jit
def load_rows(row, block_row, mask, FORMAT: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, NATIVE: tl.constexpr):
    """The exact values [ROWS, D] of rows, times their block scales, before the descale; arguments as ``store_rows``."""
    keep = mask[:, None]
    if FORMAT == "fp8":
        word = tl.load(row[:, None] + tl.arange(0, D // 4)[None, :], mask=keep, other=0)
        x0, x1, x2, x3 = e4m3_values(word, NATIVE)
        y = joined_4(x0, x1, x2, x3, ROWS, D)
    elif FORMAT == "fp8_e5m2":
        word = tl.load(row[:, None] + tl.arange(0, D // 4)[None, :], mask=keep, other=0)
        # e5m2 is the upper byte of fp16.
        x0 = ((word << 8) & 0xFF00).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        x1 = (word & 0xFF00).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        x2 = ((word >> 8) & 0xFF00).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        x3 = ((word >> 16) & 0xFF00).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        y = joined_4(x0, x1, x2, x3, ROWS, D)
    elif FORMAT == "e2m3":
        words = tl.load(row[:, None] + e2m3_word(D), mask=keep & e2m3_is_word(D), other=0)
        w0, w1, w2, _ = quarters(words, ROWS, D // 4)
        g1 = ((w0 >> 24) & 0xFF) | (w1 << 8)
        g2 = ((w1 >> 16) & 0xFFFF) | (w2 << 16)
        group = joined_4(w0, g1, g2, w2 >> 8, ROWS, D // 4)  # of which the low 24 bits count
        word = (group & 0xFFF) | ((group & 0xFFF000) << 4)
        word = (word & 0x003F003F) | ((word & 0x0FC00FC0) << 2)
        word = (word & 0x1F1F1F1F) | ((word & 0x20202020) << 2)
        x0, x1, x2, x3 = e4m3_values(word, NATIVE)
        y = joined_4(x0, x1, x2, x3, ROWS, D) * 64.0
    elif FORMAT == "nvfp4":
        word = tl.load(row[:, None] + tl.arange(0, D // 8)[None, :], mask=keep, other=0)
        even = ((word & 0x07070707) << 2) | ((word & 0x08080808) << 4)  # four bytes s00eem00
        odd = ((word >> 2) & 0x1C1C1C1C) | (word & -0x7F7F7F80)  # 0x80808080
        x0, x2, x4, x6 = e4m3_values(even, NATIVE)
        x1, x3, x5, x7 = e4m3_values(odd, NATIVE)
        even = joined_4(x0, x2, x4, x6, ROWS, D // 2)
        y = joined(even, joined_4(x1, x3, x5, x7, ROWS, D // 2), ROWS, D) * 64.0
        code = tl.load(block_row[:, None] + tl.arange(0, D // 16)[None, :], mask=keep, other=0).to(tl.int32)
        y = tl.reshape(tl.reshape(y, (ROWS, D // 16, 16)) * e4m3_value(code)[:, :, None], (ROWS, D))
    else:
        tl.static_assert(FORMAT == "bf16" or FORMAT == "fp16")
        word = tl.load(row[:, None] + tl.arange(0, D // 2)[None, :], mask=keep, other=0)
        if FORMAT == "bf16":
            x0 = (word << 16).to(tl.float32, bitcast=True)
            x1 = (word & -65536).to(tl.float32, bitcast=True)
        else:
            x0 = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            x1 = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        y = joined(x0, x1, ROWS, D)
    return y
