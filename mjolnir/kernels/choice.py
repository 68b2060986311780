"""Which geometry a variant gets: how deep its ring is, how many warps it has, and whether they work four together or
six a half."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from mjolnir.formats import get_formats
from mjolnir.kernels.geometry import WARP, WARPGROUP, Geometry
from mjolnir.kernels.operand import Operand
from mjolnir.variant import Variant

RING_BYTES = (64 * 1024, 32 * 1024, 16 * 1024)
"""K and V bytes in flight per CTA; the largest that fits. Two CTAs of 64 KB were 5-10 % faster than one of 192 KB on
an H200, and a ring of four stages, one per consumer warp, faster than one of eight."""

RING_STAGES = 4


class Wide(NamedTuple):
    """What a wide kernel has of an SM, which is all its own."""

    kv_groups: int  # warpgroups, which take turns at stages
    stages: int
    registers: tuple[int, int]  # of a consumer's thread and of one of the producer's warpgroup: all begin with the mean


WIDE = {32: Wide(2, 10, (232, 40)), 64: Wide(2, 6, (232, 40))}
"""By q rows. 64 rows take two thirds of a thread's registers for O, S and the operands alone."""

SMEM_BYTES = {"sm_120a": 99 * 1024}
"""Shared memory per SM where it is not OTHER_SMEM_BYTES; 1 KB of it goes to each CTA's launch."""

OTHER_SMEM_BYTES = 227 * 1024


def takes_wgmma(variant: Variant) -> bool:
    """Whether the kernel is a wide one: Hopper, 32 or 64 q rows of 128 elements, 8-bit formats, nothing tuned by hand.

    With mma.sync each row group unpacks all of K and V for itself, and 64 rows take the tensor pipe's whole rate."""
    return (
        variant.arch == "sm_90a"
        and variant.rows >= 32
        and variant.head_size == {"": 128, "heads": 64}.get(variant.joined)
        and all(fmt.bits == 8 for fmt in get_formats(variant.kv_format, variant.v_format or None))
        and not variant.q_split
        and not variant.stages
        and variant.ctas_per_sm <= 1
    )


CROWD_STAGES, CROWD_KV_GROUPS, CROWD_REGISTERS = 6, 3, (152, 56)
"""Six consumer warps a half, two on a stage: three warps a scheduler instead of two keep the pipes busier where the
arithmetic of a tile takes longer than memory does. They have the registers of a fourth, the feeding warps'. e2m3, 64 x
8K head-major took 201 us without, and its floor is 175; nvfp4, whose rows are shorter still, gained nothing."""


def takes_crowd(variant: Variant) -> bool:
    """Whether there is such a kernel: for Hopper, whose warps can trade registers."""
    return (
        variant.arch == "sm_90a"
        and (variant.joined, variant.rows) in (("", 8), ("panels", 16))
        and variant.head_size == 128
        and all(fmt.name == "e2m3" for fmt in get_formats(variant.kv_format, variant.v_format or None))
        and not variant.stages
        and not variant.ctas_per_sm
    )


def geometry_of(variant: Variant) -> Geometry:
    """
    Raises:
        ValueError: there is no such kernel, with the reason.
    """
    available = SMEM_BYTES.get(variant.arch, OTHER_SMEM_BYTES)
    if takes_wgmma(variant):
        return _wide(variant, WIDE[variant.rows])
    if variant.crowd:
        return _crowd(variant)
    for ring_bytes in RING_BYTES:
        geometry = _with_ring(variant, ring_bytes)
        fit = available // (geometry.smem_bytes + 1024)
        if fit >= (variant.ctas_per_sm or 1):
            # Two CTAs of six warps leave a thread 168 registers; so does one of nine.
            two = geometry.threads <= 6 * WARP
            ctas = variant.ctas_per_sm or min(fit, 1 + two)
            roomy = dataclasses.replace(geometry, ctas_per_sm=ctas, own_q=True)
            # One warp would take too long over more than 8 rows of a head; e2m3 rows of 256 would spill.
            small = geometry.rows == 8 * geometry.sides and geometry.head_size <= 128
            own_q = small and available // (roomy.smem_bytes + 1024) >= ctas
            return dataclasses.replace(roomy, own_q=own_q)
    raise ValueError(
        f"{variant.name}: needs {geometry.smem_bytes} bytes of shared memory a CTA, of {available} on an SM"
    )


def _with_ring(variant: Variant, ring_bytes: int) -> Geometry:
    heads_per_item = 2 if variant.joined in ("heads", "panels") else 1
    sides = 2 if variant.joined == "panels" else 1
    d, rows = variant.head_size * heads_per_item // sides, variant.rows
    k, v = (Operand.of(fmt, d, sides) for fmt in get_formats(variant.kv_format, variant.v_format or None))
    token_bytes = sides * (k.row_bytes + v.row_bytes)
    # 16 rows share the unpacking of a tile, which is what formats of 8 bits and less cost; the accumulator then
    # takes rows_per_warp * d / 32 registers a lane, 64 at d = 128.
    rows_per_warp = 16 if rows >= 16 * sides and d <= 128 and max(k.bits, v.bits) <= 8 else 8
    row_groups = rows // rows_per_warp
    # S takes rows_per_warp * tile / 32 registers a lane: too many, for 64 tokens, beside O at 16 rows or d = 256.
    # More stages than RING_STAGES are smaller ones.
    fitting = 1 << (ring_bytes // max(RING_STAGES // sides, variant.stages) // token_bytes).bit_length() - 1
    tile = min(64 if rows_per_warp == 8 and d <= 128 else 32, max(16, fitting))
    stages = variant.stages or ring_bytes // (token_bytes * tile)
    # Two warps on a stage take half as long for it, which short rows wait for: 28/4, 1 x 8K took 7.5 us, and 7.2 so. Of
    # nvfp4, whose warps are the bottleneck, 64 x 8K took 8 % longer.
    token_groups = 2 if tile == 64 and row_groups == 1 and k.bits == v.bits == 8 else 1
    kv_groups = min(max(4, row_groups) // row_groups // token_groups, stages)
    if not variant.stages:
        stages -= stages % kv_groups
    pair = 2 if variant.joined == "tokens" else 1
    if sides == 2 and (k.panels, v.panels, row_groups) != (1, 1, 2):
        raise ValueError(
            f"{variant.name}: heads side by side are two row groups of rows of one panel, got {row_groups} row "
            f"groups, {k.panels} panels of K and {v.panels} of V"
        )
    if variant.joined in ("tokens", "heads") and (k.row_bytes * pair, v.row_bytes * pair) != (128, 128):
        raise ValueError(
            f"{variant.name}: joined {variant.joined} must make rows of 128 bytes, got {k.row_bytes * pair} of K "
            f"and {v.row_bytes * pair} of V"
        )
    if variant.joined == "heads" and k.scale_bytes + v.scale_bytes:
        raise ValueError(f"{variant.name}: heads with block scales cannot be joined")
    k_bytes = sides * tile * k.row_bytes
    starts = ((tile * token_bytes, pair * max(k.swizzle, v.swizzle)), (k_bytes, pair * v.swizzle))
    if any(at % max(1, 8 * swizzle) for at, swizzle in starts):
        # A swizzle repeats every 8 rows of its width, counted from address 0.
        raise ValueError(f"{variant.name}: tiles of {tile} tokens do not start where a swizzled tile may")
    if stages % kv_groups:
        # A warp owns its stages in every round; otherwise one a round ahead would wait on a stale parity.
        raise ValueError(f"stages = {stages}: expected a multiple of the {kv_groups} kv groups")
    if stages > 32:
        raise ValueError(f"stages = {stages}: expected at most 32, one bit of a register each")
    if kv_groups * token_groups * row_groups * WARP % (d // 4):
        # The epilogue's threads stand four elements apart, on whole rows.
        raise ValueError(
            f"stages = {stages}: a head size of {d} takes a multiple of {d // 4 // WARP} consumer warps, "
            f"got {kv_groups * row_groups}"
        )
    return Geometry(
        heads_per_item=heads_per_item,
        head_size=d,
        rows=rows,
        k=k,
        v=v,
        tile=tile,
        stages=stages,
        rows_per_warp=rows_per_warp,
        row_groups=row_groups,
        kv_groups=kv_groups,
        token_groups=token_groups,
        ctas_per_sm=1,
        q_terms=2 if variant.q_split else 1,
        joined=variant.joined,
    )


def _crowd(variant: Variant) -> Geometry:
    if not takes_crowd(variant):
        raise ValueError(f"{variant.name}: six consumer warps are for eight rows of a head of 128 e2m3 elements")
    sides = 2 if variant.joined == "panels" else 1
    k, v = (Operand.of(fmt, 128, sides) for fmt in get_formats(variant.kv_format, variant.v_format or None))
    return Geometry(
        heads_per_item=sides,
        head_size=128,
        rows=variant.rows,
        k=k,
        v=v,
        tile=64 // sides,
        stages=CROWD_STAGES,
        rows_per_warp=8,
        row_groups=sides,
        kv_groups=CROWD_KV_GROUPS,
        token_groups=2 // sides,
        ctas_per_sm=2,
        q_terms=1,
        joined=variant.joined,
        own_q=True,
        crowd=True,
        registers=CROWD_REGISTERS,
    )


def _wide(variant: Variant, wide: Wide) -> Geometry:
    d, tile = 128, WARPGROUP * 16  # a warp has 16 rows of an operand
    k, v = (Operand.of(fmt, d) for fmt in get_formats(variant.kv_format, variant.v_format or None))
    return Geometry(
        heads_per_item=d // variant.head_size,
        head_size=d,
        rows=variant.rows,
        k=k,
        v=v,
        tile=tile,
        stages=wide.stages,
        rows_per_warp=variant.rows // WARPGROUP,
        row_groups=WARPGROUP,
        kv_groups=wide.kv_groups,
        ctas_per_sm=1,
        q_terms=1,
        joined=variant.joined,
        wide=True,
        registers=wide.registers,
    )
