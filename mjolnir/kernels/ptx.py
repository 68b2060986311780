"""The PTX instructions the kernels are made of, one function each.

Addresses are plain integers: Int64 for global memory, Int32 for shared memory. ``f16x2``/``bf16x2`` and packed
bytes travel as Int32. Names follow the PTX ISA.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

_MLIR_TYPE = {"r": T.i32, "l": T.i64, "f": T.f32}
_DSL_TYPE: dict[str, Any] = {"r": Int32, "l": Int64, "f": Float32}


def asm(
    results: str, code: str, args: Sequence[Any] = (), kinds: Iterable[str] = "", side_effects: bool = False
) -> Any:
    """Inline PTX with ``results`` and ``args`` typed by one letter each: r (b32), l (b64), f (f32); an argument of a
    result's register by that result's number."""
    types = [_MLIR_TYPE[k]() for k in results]
    constraints = ",".join([f"={k}" for k in results] + list(kinds))
    if len(types) == 1:
        result_type = types[0]
    else:
        result_type = llvm.StructType.get_literal(types) if types else None
    value = llvm.inline_asm(
        result_type,
        [a.ir_value() for a in args],
        code,
        constraints,
        has_side_effects=side_effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if not types:
        return None
    if len(types) == 1:
        return _DSL_TYPE[results](value)
    return tuple(
        _DSL_TYPE[k](llvm.extractvalue(t, value, [i])) for i, (k, t) in enumerate(zip(results, types, strict=True))
    )


def thread_index() -> Any:
    """%tid.x, read where it stands in the code: what follows from it is not kept in registers across a loop before."""
    return asm("r", "mov.u32 $0, %tid.x;", side_effects=True)


def clock() -> Any:
    """Clocks of this SM, modulo 2^32."""
    return asm("r", "mov.u32 $0, %clock;", side_effects=True)


def barrier_sync(barrier: Any, threads: Any) -> None:
    asm("", "barrier.sync $0, $1;", [barrier, threads], "rr", True)


def barrier_or(barrier: Any, threads: Any, flag: Any) -> Any:
    """``barrier_sync``; 1 if any thread's flag is not 0, else 0."""
    code = (
        "{ .reg .pred own, any; setp.ne.b32 own, $3, 0; barrier.red.or.pred any, $1, $2, own; selp.b32 $0, 1, 0, any; }"
    )
    return asm("r", code, [barrier, threads, flag], "rrr", True)


def raise_registers(count: int) -> None:
    """All warps of a warpgroup: have ``count`` registers a thread, once others have given them up."""
    asm("", f"setmaxnreg.inc.sync.aligned.u32 {count};", side_effects=True)


def lower_registers(count: int) -> None:
    asm("", f"setmaxnreg.dec.sync.aligned.u32 {count};", side_effects=True)


# Shared memory


def lds_u8(addr: Any) -> Any:
    return asm("r", "ld.shared.u8 $0, [$1];", [addr], "r", True)


def lds_u16(addr: Any) -> Any:
    return asm("r", "{ .reg .b16 x; ld.shared.u16 x, [$1]; cvt.u32.u16 $0, x; }", [addr], "r", True)


def lds64(addr: Any) -> Any:
    return asm("rr", "ld.shared.v2.b32 {$0,$1}, [$2];", [addr], "r", True)


def lds128(addr: Any) -> Any:
    return asm("rrrr", "ld.shared.v4.b32 {$0,$1,$2,$3}, [$4];", [addr], "r", True)


def lds_f32(addr: Any) -> Any:
    return asm("f", "ld.shared.f32 $0, [$1];", [addr], "r", True)


def lds_f32x4(addr: Any) -> Any:
    return asm("ffff", "ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", [addr], "r", True)


def lds_f32x2(addr: Any) -> Any:
    return asm("ff", "ld.shared.v2.f32 {$0,$1}, [$2];", [addr], "r", True)


def lds_b32(addr: Any) -> Any:
    return asm("r", "ld.shared.b32 $0, [$1];", [addr], "r", True)


def lds_words(addr: Any, width: int) -> tuple[Any, ...]:
    """``width`` bytes, 4, 8 or 16, as words."""
    return (lds_b32(addr),) if width == 4 else lds64(addr) if width == 8 else lds128(addr)


def sts_f32(addr: Any, x: Any) -> None:
    asm("", "st.shared.f32 [$0], $1;", [addr, x], "rf", True)


def sts_f32x2(addr: Any, x: Any, y: Any) -> None:
    asm("", "st.shared.v2.f32 [$0], {$1,$2};", [addr, x, y], "rff", True)


def sts_f32x4(addr: Any, x: Sequence[Any]) -> None:
    asm("", "st.shared.v4.f32 [$0], {$1,$2,$3,$4};", [addr, *x], "rffff", True)


def sts128(addr: Any, words: Sequence[Any]) -> None:
    asm("", "st.shared.v4.b32 [$0], {$1,$2,$3,$4};", [addr, *words], "rrrrr", True)


def sts_b32(addr: Any, x: Any) -> None:
    asm("", "st.shared.b32 [$0], $1;", [addr, x], "rr", True)


# Global memory


def ldg128(addr: Any) -> Any:
    return asm("rrrr", "ld.global.v4.b32 {$0,$1,$2,$3}, [$4];", [addr], "l", True)


def ldg_b32(addr: Any) -> Any:
    return asm("r", "ld.global.b32 $0, [$1];", [addr], "l", True)


def ldg_f32(addr: Any) -> Any:
    return asm("f", "ld.global.f32 $0, [$1];", [addr], "l", True)


def ldg_f32x4(addr: Any) -> Any:
    return asm("ffff", "ld.global.v4.f32 {$0,$1,$2,$3}, [$4];", [addr], "l", True)


def stg_f32(addr: Any, x: Any) -> None:
    asm("", "st.global.f32 [$0], $1;", [addr, x], "lf", True)


def stg_b64(addr: Any, lo: Any, hi: Any) -> None:
    asm("", "st.global.v2.b32 [$0], {$1,$2};", [addr, lo, hi], "lrr", True)


def ld_relaxed_b32(addr: Any) -> Any:
    return asm("r", "ld.relaxed.gpu.global.b32 $0, [$1];", [addr], "l", True)


def ld_relaxed_b32x4(addr: Any) -> Any:
    """From L2, without a place in the first-level cache."""
    return asm("rrrr", "ld.relaxed.gpu.global.v4.b32 {$0,$1,$2,$3}, [$4];", [addr], "l", True)


def ld_relaxed_f32x4_if(wanted: Any, addr: Any) -> Any:
    """16 bytes as one access, from L2: all of one store or none of it. Zeros, and no access, if they are not wanted."""
    code = (
        "{ .reg .pred p; .reg .b128 x; .reg .b64 lo, hi; setp.ne.b32 p, $5, 0; mov.b64 lo, 0; mov.b128 x, {lo, lo};"
        " @p ld.relaxed.gpu.global.b128 x, [$4]; mov.b128 {lo, hi}, x; mov.b64 {$0, $1}, lo; mov.b64 {$2, $3}, hi; }"
    )
    return asm("ffff", code, [addr, Int32(wanted)], "lr", True)


def st_relaxed_f32x4(addr: Any, x: Sequence[Any]) -> None:
    code = (
        "{ .reg .b128 x; .reg .b64 lo, hi; mov.b64 lo, {$1, $2}; mov.b64 hi, {$3, $4}; mov.b128 x, {lo, hi};"
        " st.relaxed.gpu.global.b128 [$0], x; }"
    )
    asm("", code, [addr, *x], "lffff", True)


def atomic_inc(addr: Any, last: Any, order: str) -> Any:
    """The old value; the counter wraps to 0 after ``last``, so it resets itself. ``order``: "relaxed" or "acq_rel"."""
    return asm("r", f"atom.{order}.gpu.global.inc.u32 $0, [$1], $2;", [addr, last], "lr", True)


def atomic_inc_shared(addr: Any, last: Any) -> Any:
    """``atomic_inc`` among the threads of a CTA, acq_rel."""
    return asm("r", "atom.acq_rel.cta.shared.inc.u32 $0, [$1], $2;", [addr, last], "rr", True)


def increment(addr: Any, last: Any) -> None:
    """``atomic_inc``, relaxed, whose old value nobody needs."""
    asm("", "red.relaxed.gpu.global.inc.u32 [$0], $1;", [addr, last], "lr", True)


def or_shared(addr: Any, bits: Any) -> None:
    asm("", "red.relaxed.cta.shared.or.b32 [$0], $1;", [addr, bits], "rr", True)


def prefetch_l1(addr: Any) -> None:
    asm("", "prefetch.global.L1 [$0];", [addr], "l", True)


def prefetch_l2(addr: Any) -> None:
    asm("", "prefetch.global.L2 [$0];", [addr], "l", True)


# Asynchronous copies of 4, 8 or 16 bytes by a thread


def cp_async(dst: Any, src: Any, size: int, src_size: Any) -> None:
    """Copy ``src_size`` bytes, and zeros up to ``size``; with 0 of them ``src`` is not read."""
    asm("", f"cp.async.ca.shared.global.L2::64B [$0], [$1], {size}, $2;", [dst, src, src_size], "rlr", True)


def cp_async_arrive(mbarrier: Any) -> None:
    """Arrive once all copies that this thread has started have landed, without waiting for them."""
    asm("", "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", [mbarrier], "r", True)


# mbarrier and TMA


def mbarrier_init(addr: Any, count: Any) -> None:
    asm("", "mbarrier.init.shared::cta.b64 [$0], $1;", [addr, count], "rr", True)


def mbarrier_arrive(addr: Any) -> None:
    asm("", "mbarrier.arrive.shared::cta.b64 _, [$0];", [addr], "r", True)


def mbarrier_arrive_expect_tx(addr: Any, num_bytes: Any) -> None:
    asm("", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", [addr, num_bytes], "rr", True)


def mbarrier_wait(addr: Any, parity: Any) -> None:
    """Spin until the phase of this parity has completed."""
    code = (
        "{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;"
        " @done bra DONE; bra WAIT; DONE: }"
    )
    asm("", code, [addr, parity], "rr", True)


def fence_mbarrier_init() -> None:
    asm("", "fence.mbarrier_init.release.cluster;", side_effects=True)


def fence_proxy_async_shared() -> None:
    """Order this thread's ordinary shared-memory writes before the TMA's later ones and before what wgmma reads."""
    asm("", "fence.proxy.async.shared::cta;", side_effects=True)


def prefetch_tensormap(desc: Any) -> None:
    asm("", "prefetch.tensormap [$0];", [desc], "l", True)


def tma_load_5d(dst: Any, desc: Any, coords: Sequence[Any], mbar: Any, policy: Any) -> None:
    asm(
        "",
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [$0], [$1, {$2,$3,$4,$5,$6}], [$7], $8;",
        [dst, desc, *coords, mbar, policy],
        "rlrrrrrrl",
        True,
    )


def tma_prefetch_5d(desc: Any, coords: Sequence[Any], policy: Any) -> None:
    asm(
        "",
        "cp.async.bulk.prefetch.tensor.5d.L2.global.tile.L2::cache_hint [$0, {$1,$2,$3,$4,$5}], $6;",
        [desc, *coords, policy],
        "lrrrrrl",
        True,
    )


# Arithmetic


def prmt(a: Any, b: Any, selector: Any) -> Any:
    if isinstance(selector, int):
        return asm("r", f"prmt.b32 $0, $1, $2, {selector:#x};", [a, b], "rr")
    return asm("r", "prmt.b32 $0, $1, $2, $3;", [a, b, selector], "rrr")


def funnel_right(low: Any, high: Any, bits: int) -> Any:
    """The low word of (high, low) >> bits."""
    return asm("r", f"shf.r.wrap.b32 $0, $1, $2, {bits};", [low, high], "rr")


def and_b32(a: Any, mask: int) -> Any:
    return asm("r", f"and.b32 $0, $1, {mask:#x};", [a], "r")


def and_or(a: Any, mask: int, b: Any) -> Any:
    """(a & mask) | b."""
    return asm("r", f"lop3.b32 $0, $1, {mask:#x}, $2, 0xea;", [a, b], "rr")


def shift_right(a: Any, bits: int) -> Any:
    return asm("r", f"shr.u32 $0, $1, {bits};", [a], "r")


def mul(a: Any, factor: int) -> Any:
    return asm("r", f"mul.lo.u32 $0, $1, {factor};", [a], "r")


def mad(a: Any, factor: int, b: Any) -> Any:
    return asm("r", f"mad.lo.u32 $0, $1, {factor}, $2;", [a, b], "rr")


def mad_wide(a: Any, b: Any, c: Any) -> Any:
    """a b + c of 32, 32 and 64 bits, signed: an address, which the compiler does not take apart."""
    return asm("l", "mad.wide.s32 $0, $1, $2, $3;", [a, b, c], "rrl")


def mul_f16x2(a: Any, b: Any) -> Any:
    return asm("r", "mul.rn.f16x2 $0, $1, $2;", [a, b], "rr")


def e4m3x2_to_f16x2(word: Any) -> Any:
    """The low two e4m3 bytes of a word to f16x2, exactly."""
    return asm("r", "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.rn.f16x2.e4m3x2 $0, lo; }", [word], "r")


def e4m3x4_to_f16x2x2(word: Any) -> Any:
    """Four e4m3 bytes to two f16x2, exactly: bytes 0, 1 and bytes 2, 3."""
    code = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.rn.f16x2.e4m3x2 $0, lo; cvt.rn.f16x2.e4m3x2 $1, hi; }"
    return asm("rr", code, [word], "r")


def e5m2x4_to_f16x2x2(word: Any) -> Any:
    code = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.rn.f16x2.e5m2x2 $0, lo; cvt.rn.f16x2.e5m2x2 $1, hi; }"
    return asm("rr", code, [word], "r")


def pack_f16x2(lo: Any, hi: Any) -> Any:
    return asm("r", "cvt.rn.f16x2.f32 $0, $2, $1;", [lo, hi], "ff")


def pack_bf16x2(lo: Any, hi: Any) -> Any:
    return asm("r", "cvt.rn.bf16x2.f32 $0, $2, $1;", [lo, hi], "ff")


def unpack_bf16x2(word: Any) -> Any:
    return asm("ff", "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }", [word], "r")


def unpack_f16x2(word: Any) -> Any:
    code = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.f32.f16 $0, lo; cvt.f32.f16 $1, hi; }"
    return asm("ff", code, [word], "r")


def ex2(x: Any) -> Any:
    return asm("f", "ex2.approx.ftz.f32 $0, $1;", [x], "f")


def rcp(x: Any) -> Any:
    return asm("f", "rcp.approx.ftz.f32 $0, $1;", [x], "f")


def lg2(x: Any) -> Any:
    return asm("f", "lg2.approx.f32 $0, $1;", [x], "f")


def floor_log2(x: Any) -> Any:
    """Of a positive integer."""
    return asm("r", "bfind.u32 $0, $1;", [x], "r")


def float_as_int(x: Any) -> Any:
    return asm("r", "mov.b32 $0, $1;", [x], "f")


def int_as_float(x: Any) -> Any:
    return asm("f", "mov.b32 $0, $1;", [x], "r")


def movmatrix(a: Any) -> Any:
    """Transpose an 8 × 8 matrix of 16-bit elements held two a lane by the warp."""
    return asm("r", "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", [a], "r", True)


def mma_m16n8k16(a: Sequence[Any], b: Sequence[Any], c: Sequence[Any], dtype: str) -> list[Any]:
    """D = A B + C on one warp; dtype "f16" or "bf16", fp32 accumulate."""
    code = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32"
        " {$0,$1,$2,$3},{$4,$5,$6,$7},{$8,$9},{$10,$11,$12,$13};"
    )
    return list(asm("ffff", code, [*a, *b, *c], "rrrrrrffff", True))
