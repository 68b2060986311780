"""Values to codes and back, and the 32-bit words that codes share."""

from __future__ import annotations

import triton
import triton.language as tl

NAN_CODES = {"fp8": 0x7F, "fp8_e5m2": 0x7F, "bf16": 0x7FC0, "fp16": 0x7E00}
"""The one code that a NaN of either sign and any payload becomes; formats without NaN take +max_value."""

BF16_NAN, FP16_NAN = tl.constexpr(NAN_CODES["bf16"]), tl.constexpr(NAN_CODES["fp16"])


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


# Values and codes


@triton.jit
def widened(x):
    """bf16, fp16 or fp32 as fp32; bf16 by its bits, since the interpreter's cast loses subnormals."""
    if x.dtype == tl.bfloat16:
        y = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


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
