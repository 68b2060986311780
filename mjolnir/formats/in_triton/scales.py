"""Descales and nvfp4's block scales, and quotients by them that round to the codes the IEEE quotient rounds to."""

from __future__ import annotations

import triton
import triton.language as tl

from mjolnir.formats.in_triton.codes import e4m3_code, e4m3_values

TO_E4M3X1 = tl.constexpr(
    "{ .reg .b16 code; .reg .f32 zero; mov.f32 zero, 0f00000000; cvt.rn.satfinite.e4m3x2.f32 code, zero, $1; "
    "cvt.u32.u16 $0, code; }"
)


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
