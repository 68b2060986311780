"""The codecs once more, in Triton: fp32 tiles to the packed words of a cache and back, code for code what ``encode``,
``block_scales`` and ``decode`` of the format give.

Everything happens in 32-bit words. A tile [rows, D] is split into the elements that share a word, so that packing and
unpacking stay inside a thread.

NATIVE takes the conversion instructions of sm_89 and later, by inline PTX. Without it rounding is integer arithmetic,
which Triton's interpreter and older GPUs run. Both give the same codes. A NaN becomes one code, whatever its sign.
"""

from __future__ import annotations

import triton
import triton.language as tl

NAN_CODES = {"fp8": 0x7F, "fp8_e5m2": 0x7F, "bf16": 0x7FC0, "fp16": 0x7E00}
"""The one code that a NaN of either sign and any payload becomes; formats without NaN take +max_value."""

BF16_NAN, FP16_NAN = tl.constexpr(NAN_CODES["bf16"]), tl.constexpr(NAN_CODES["fp16"])
TO_E4M3 = tl.constexpr(2.0**-6)  # e2m3 and e2m1 values times this are e4m3 values with the same bits


# Dividing


@triton.jit
def head_scale(scale, channel_stride, PER_CHANNEL: tl.constexpr, D: tl.constexpr):
    """A head's descale: a scalar, or [1, D] if PER_CHANNEL."""
    if PER_CHANNEL:
        loaded = tl.load(scale + tl.arange(0, D) * channel_stride)[None, :]
    else:
        loaded = tl.load(scale)
    return loaded


@triton.jit
def quotient(
    x, scale, FORMAT: tl.constexpr, PER_CHANNEL: tl.constexpr, NATIVE: tl.constexpr, NARROW: tl.constexpr = False
):
    """x [ROWS, D] / scale rounded to nearest, and x itself where the scale is 0, as ``KvFormat.encode`` defines it;
    ``scale`` is a scalar, or [1, D] if PER_CHANNEL. NARROW: x is a bf16 or an fp16 number.

    Triton's own division is off by an ulp, which is another code now and then, and div.rn is 14 instructions. So: the
    reciprocal, once, and of x two instructions if it is NARROW, seven otherwise. Extreme scales are brought near 1 by a
    power of two, and negative ones negated; what that loses lies far below the smallest code, except in bf16, whose
    range is fp32's own.
    """
    divisor = tl.where(scale == 0, 1.0, scale)
    if NATIVE and FORMAT != "bf16":
        size = tl.abs(divisor)
        near = tl.where(size < 2.0**-60, 2.0**64, tl.where(size > 2.0**60, 2.0**-64, 1.0))
        near = tl.where(divisor < 0, -near, near)
        divisor *= near
        if PER_CHANNEL:
            x *= near
        elif near != 1.0:
            x *= near
        y = short_quotient(x, divisor) if NARROW else full_quotient(x, divisor)
    elif PER_CHANNEL:
        y = tl.div_rn(x, divisor)
    elif divisor == 1.0:  # what 16-bit caches have
        y = x
    else:
        y = tl.div_rn(x, divisor)
    return y


@triton.jit
def short_quotient(x, divisor):
    """x / divisor (> 0) for an x of at most 11 significant bits: on the side of every number of at most 7 bits, or
    equal to it, as the IEEE quotient is. All boundaries between codes, a boundary times a block scale, and 6 times one
    between block scales, are such numbers; tests/test_write.py goes through all of them.

    The reciprocal is a sum of two numbers of the same sign, neither of them 0, so that Inf, NaN and the sign of 0 stay.
    """
    reciprocal = tl.div_rn(1.0, divisor)
    bits = reciprocal.to(tl.int32, bitcast=True)
    bits = tl.where(tl.fma(-divisor, reciprocal, 1.0) < 0, bits - 1, bits)
    high = bits.to(tl.float32, bitcast=True)  # rounded towards 0
    low = tl.fma(-divisor, high, 1.0) * reciprocal  # the fma is exact
    low = tl.where(low == 0, high * 2.0**-40, low)
    return tl.fma(x, high, x * low)


@triton.jit
def full_quotient(x, divisor):
    """x / divisor (> 0): the product with the rounded reciprocal, and two corrections by the exact remainder
    (Markstein; Muller et al., Handbook of Floating-Point Arithmetic, 2nd ed., section 4.7). Where those make NaN of
    Inf, the product does: that saturates, or is Inf in fp16."""
    reciprocal = tl.div_rn(1.0, divisor)
    first = x * reciprocal
    y = corrected(corrected(first, x, divisor, reciprocal), x, divisor, reciprocal)
    return tl.where(y == y, y, first)


@triton.jit
def corrected(q, x, divisor, reciprocal):
    """A quotient q of x / divisor after a correction by its remainder, which the first fma gives exactly, negated: of a
    q of -0, q - divisor * q would be +0 and make it +0."""
    return tl.fma(tl.fma(q, divisor, -x), -reciprocal, q)


@triton.jit
def widened(x):
    """bf16, fp16 or fp32 as fp32; bf16 by its bits, since the interpreter's cast loses subnormals."""
    if x.dtype == tl.bfloat16:
        y = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


# Elements that share a word


@triton.jit
def halves(x, ROWS: tl.constexpr, N: tl.constexpr):
    """x [ROWS, N] as its elements 2i and its elements 2i + 1, each [ROWS, N / 2]."""
    return tl.split(tl.reshape(x, (ROWS, N // 2, 2)))


@triton.jit
def quarters(x, ROWS: tl.constexpr, N: tl.constexpr):
    """x [ROWS, N] as its elements 4i, 4i + 1, 4i + 2 and 4i + 3."""
    even, odd = halves(x, ROWS, N)
    x0, x2 = halves(even, ROWS, N // 2)
    x1, x3 = halves(odd, ROWS, N // 2)
    return x0, x1, x2, x3


@triton.jit
def joined(a, b, ROWS: tl.constexpr, N: tl.constexpr):
    """The inverse of ``halves``: [ROWS, N] from two [ROWS, N / 2]."""
    return tl.reshape(tl.join(a, b), (ROWS, N))


@triton.jit
def joined_4(x0, x1, x2, x3, ROWS: tl.constexpr, N: tl.constexpr):
    """The inverse of ``quarters``."""
    return joined(joined(x0, x2, ROWS, N // 2), joined(x1, x3, ROWS, N // 2), ROWS, N)


# Rounding


@triton.jit
def round_code(y, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX_VALUE: tl.constexpr):
    """Magnitude code, as int32, of |y| in a float format of that many bits of mantissa, to nearest, ties to even,
    saturating.

    A normal result is a rounding of fp32's own bits, of which the exponent then changes its bias. A subnormal one
    counts units of the smallest code: adding 2^23 of them makes fp32 round.
    """
    magnitude = tl.minimum(tl.abs(y), MAX_VALUE)
    bits = magnitude.to(tl.int32, bitcast=True)
    SHIFT: tl.constexpr = 23 - MANTISSA
    UNITS_EXPONENT: tl.constexpr = 23 + 1 - BIAS - MANTISSA
    normal = ((bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    small = (magnitude + 2.0**UNITS_EXPONENT).to(tl.int32, bitcast=True) - ((127 + UNITS_EXPONENT) << 23)
    return tl.where(magnitude < 2.0 ** (1 - BIAS), small, normal)


@triton.jit
def sign_at(y, BIT: tl.constexpr):
    """The sign of y as bit BIT of an int32."""
    return ((y.to(tl.int32, bitcast=True) >> 31) & 1) << BIT


@triton.jit
def e4m3_code(y):
    return tl.where(y != y, 0x7F, round_code(y, 3, 7, 448.0) | sign_at(y, 7))


@triton.jit
def e5m2_code(y):
    return tl.where(y != y, 0x7F, round_code(y, 2, 15, 57344.0) | sign_at(y, 7))


@triton.jit
def e4m3_value(code):
    """fp32 values of e4m3 codes in int32, of which only the low 8 bits count."""
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    # Not -value, which is 0 - value on a GPU and so +0 for 0.
    return (value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_count(quotients, NATIVE: tl.constexpr):
    """e2m1 magnitudes of quotients, NaN as 6, as int32 of which the low 3 bits count.

    Steps are 0.5 up to 2, 1 up to 4, 2 up to 6. Adding 2^23 of the steps makes fp32 round to whole ones; their count,
    and 2 for each larger step, is the code. 6 more steps make the exponent that comes down with it a multiple of 8.
    """
    size = tl.abs(quotients)
    if not NATIVE:
        size = tl.where(size == size, size, 6.0)
    size = tl.minimum(size, 6.0)  # a GPU's takes the other operand for NaN
    power = (tl.maximum(size, 1.0).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    total = tl.fma(power, 2.0**22 + 3, size).to(tl.int32, bitcast=True)
    return total + (total >> 22)


@triton.jit
def e2m1_bytes(counts, y, ROWS: tl.constexpr, N: tl.constexpr, NATIVE: tl.constexpr):
    """e2m1 codes, four to a word [ROWS, N / 4], from ``e2m1_count`` [ROWS, N] and, for the sign, what was counted. A
    NaN that a GPU's arithmetic made is positive."""
    if not NATIVE:
        y = tl.where(y == y, y, 0.0)
    c0, c1, c2, c3 = quarters(counts, ROWS, N)
    y0, y1, y2, y3 = quarters(y.to(tl.int32, bitcast=True), ROWS, N)
    magnitudes = byte_word(c0, c1, c2, c3, 0, NATIVE)
    signs = byte_word(y0, y1, y2, y3, 3, NATIVE)
    return (magnitudes & 0x07070707) | ((signs >> 4) & 0x08080808)


@triton.jit
def bf16_code(y):
    """The IEEE cast."""
    magnitude = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    code = ((magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16) | sign_at(y, 15)
    return tl.where(y != y, BF16_NAN, code)


@triton.jit
def fp16_code(y):
    """The IEEE cast."""
    return tl.where(y != y, FP16_NAN, y.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)


# Four 8-bit codes and their word

_CONVERT = (
    "{{ .reg .b16 lo, hi; cvt.rn.satfinite.{0}.f32 lo, $2, $1; cvt.rn.satfinite.{0}.f32 hi, $4, $3; "
    "mov.b32 $0, {{lo, hi}}; }}"
)
TO_E4M3X1 = tl.constexpr(
    "{ .reg .b16 code; .reg .f32 zero; mov.f32 zero, 0f00000000; cvt.rn.satfinite.e4m3x2.f32 code, zero, $1; "
    "cvt.u32.u16 $0, code; }"
)
TO_E4M3X4, TO_E5M2X4 = tl.constexpr(_CONVERT.format("e4m3x2")), tl.constexpr(_CONVERT.format("e5m2x2"))


_PERMUTE = (
    "{{ .reg .b32 low, high; prmt.b32 low, $1, $2, {0}; prmt.b32 high, $3, $4, {0}; prmt.b32 $0, low, high, 0x5410; }}"
)
LOW_BYTES, TOP_BYTES = tl.constexpr(_PERMUTE.format("0x0040")), tl.constexpr(_PERMUTE.format("0x0073"))


@triton.jit
def byte_word(x0, x1, x2, x3, BYTE: tl.constexpr, NATIVE: tl.constexpr):
    """Byte 0 or 3 of four int32 in one word."""
    tl.static_assert(BYTE == 0 or BYTE == 3)
    if NATIVE:
        word = tl.inline_asm_elementwise(
            TOP_BYTES if BYTE else LOW_BYTES, "=r,r,r,r,r", [x0, x1, x2, x3], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        SHIFT: tl.constexpr = 8 * BYTE
        word = ((x0 >> SHIFT) & 0xFF) | (((x1 >> SHIFT) & 0xFF) << 8)
        word = word | (((x2 >> SHIFT) & 0xFF) << 16) | (((x3 >> SHIFT) & 0xFF) << 24)
    return word


@triton.jit
def fp8_word(x0, x1, x2, x3, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """The codes of four values in one word, the first in its low byte."""
    if NATIVE:
        word = tl.inline_asm_elementwise(
            TO_E5M2X4 if E5M2 else TO_E4M3X4, "=r,f,f,f,f", [x0, x1, x2, x3], dtype=tl.int32, is_pure=True, pack=1
        )
    elif E5M2:
        word = e5m2_code(x0) | (e5m2_code(x1) << 8) | (e5m2_code(x2) << 16) | (e5m2_code(x3) << 24)
    else:
        word = e4m3_code(x0) | (e4m3_code(x1) << 8) | (e4m3_code(x2) << 16) | (e4m3_code(x3) << 24)
    return word


@triton.jit
def e4m3_values(word, NATIVE: tl.constexpr):
    """The four values of a word."""
    if NATIVE:
        x0, x1, x2, x3 = tl.inline_asm_elementwise(
            """{ .reg .b16 lo, hi, a, b; .reg .b32 p, q;
            mov.b32 {lo, hi}, $4;
            cvt.rn.f16x2.e4m3x2 p, lo; cvt.rn.f16x2.e4m3x2 q, hi;
            mov.b32 {a, b}, p; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;
            mov.b32 {a, b}, q; cvt.f32.f16 $2, a; cvt.f32.f16 $3, b; }""",
            "=f,=f,=f,=f,r",
            [word],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        x0, x1, x2, x3 = e4m3_value(word), e4m3_value(word >> 8), e4m3_value(word >> 16), e4m3_value(word >> 24)
    return x0, x1, x2, x3


# Rows


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
def block_scale_code(y, ROWS: tl.constexpr, D: tl.constexpr, NATIVE: tl.constexpr):
    """``NvFp4Format.block_scales`` of y [ROWS, D]: e4m3(amax / 6) of every 16 elements, NaN not counted (a GPU's max
    leaves it out), as int32 [ROWS, D / 16]."""
    magnitude = tl.abs(y)
    if not NATIVE:
        magnitude = tl.where(y == y, magnitude, 0.0)
    amax = tl.max(tl.reshape(magnitude, (ROWS, D // 16, 16)), axis=2)
    amax = tl.where(amax == amax, amax, 0.0)  # a block of NaN alone
    if NATIVE:
        amax = tl.minimum(amax, 65536.0)  # far beyond what saturates, and no Inf to correct
        sixth: tl.constexpr = 1 / 6
        sixths = corrected(corrected(amax * sixth, amax, 6.0, sixth), amax, 6.0, sixth)
        code = tl.inline_asm_elementwise(TO_E4M3X1, "=r,f", [sixths], dtype=tl.int32, is_pure=True, pack=1)
    else:
        code = e4m3_code(tl.div_rn(amax, 6.0))
    return code


@triton.jit
def over_block_scale(y, code, ROWS: tl.constexpr, D: tl.constexpr, NATIVE: tl.constexpr):
    """y over its block scales, on the right side of every e2m1 rounding boundary.

    One correction of the quotient is enough here: a boundary times a block scale is exact in fp32, and the fp32 numbers
    beside it are further from it than the rounding of the quotient reaches. Of what overflows it makes NaN, which
    ``e2m1_count`` takes for the largest value too.
    """
    scale, _, _, _ = e4m3_values(code, NATIVE)
    divisor = tl.where(scale == 0, 1.0, scale)
    blocks = tl.reshape(y, (ROWS, D // 16, 16))
    divisor = divisor[:, :, None]
    if NATIVE:
        reciprocal = tl.inline_asm_elementwise(  # to an ulp
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [divisor], dtype=tl.float32, is_pure=True, pack=1
        )
        blocks = corrected(blocks * reciprocal, blocks, divisor, reciprocal)
    else:
        blocks = tl.div_rn(blocks, divisor)
    return tl.reshape(blocks, (ROWS, D))


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
