"""What a variant fixes before run time: tile, ring, warps and shared memory of the decode kernel."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from mjolnir.formats import get_formats
from mjolnir.kernels.operand import Operand
from mjolnir.variant import Variant

WARP = 32

RING_BYTES = (64 * 1024, 32 * 1024, 16 * 1024)
"""K and V bytes in flight per CTA; the largest that fits. Two CTAs of 64 KB were 5-10 % faster than one of 192 KB on
an H200, and a ring of four stages, one per consumer warp, faster than one of eight."""

RING_STAGES = 4

WARPGROUP = 4
"""Warps that issue one wgmma together."""


class Wide(NamedTuple):
    """What a wide kernel has of an SM, which is all its own."""

    kv_groups: int  # warpgroups, which take turns at stages
    stages: int
    registers: int  # of a consumer thread, and of the producer's warpgroup: all begin with the mean
    producer_registers: int


WIDE = {32: Wide(2, 10, 232, 40), 64: Wide(2, 6, 232, 40)}
"""By q rows. 64 rows take two thirds of a thread's registers for O, S and the operands alone."""

SMEM_BYTES = {"sm_120a": 99 * 1024}
"""Shared memory per SM where it is not OTHER_SMEM_BYTES; 1 KB of it goes to each CTA's launch."""

OTHER_SMEM_BYTES = 227 * 1024

UNSET = -1
"""The bits of a word of the workspace that holds nothing: a NaN, but not the one that arithmetic makes, 0x7fffffff."""


def log2(power_of_two: int) -> int:
    return power_of_two.bit_length() - 1


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


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Static sizes. Warps form a grid of ``kv_groups`` (which take turns at stages) × ``token_groups`` (which divide a
    stage's tokens) × ``row_groups`` (which divide the q rows; in a wide kernel they divide tokens and elements instead,
    and ``rows_per_warp`` only gives the exchange buffer its size)."""

    heads_per_item: int  # KV heads: 2 where they are joined
    head_size: int  # of a q row's product: of both heads where they are one row
    rows: int
    k: Operand
    v: Operand
    tile: int  # tokens per stage
    stages: int
    rows_per_warp: int
    row_groups: int
    kv_groups: int
    ctas_per_sm: int  # halves of a CTA count as CTAs, see ``halves``
    q_terms: int  # Q is a sum of this many terms in the MMA's dtype
    joined: str  # what makes rows of 128 bytes, see Variant
    own_q: bool = False  # Q lies beside the exchange buffer, not in it
    token_groups: int = 1
    crowd: bool = False
    wide: Wide | None = None  # a kv group is a warpgroup, whose four warps work on all q rows together: see wide.py

    @classmethod
    def of(cls, variant: Variant) -> Geometry:
        available = SMEM_BYTES.get(variant.arch, OTHER_SMEM_BYTES)
        if takes_wgmma(variant):
            return cls._wide(variant, WIDE[variant.rows])
        if variant.crowd:
            return cls._crowd(variant)
        for ring_bytes in RING_BYTES:
            geometry = cls._with_ring(variant, ring_bytes)
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

    @classmethod
    def _with_ring(cls, variant: Variant, ring_bytes: int) -> Geometry:
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
        kv_groups = min(max(4, row_groups) // row_groups, stages)
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
        if kv_groups * row_groups * WARP % (d // 4):
            # The epilogue's threads stand four elements apart, on whole rows.
            raise ValueError(
                f"stages = {stages}: a head size of {d} takes a multiple of {d // 4 // WARP} consumer warps, "
                f"got {kv_groups * row_groups}"
            )
        return cls(
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
            ctas_per_sm=1,
            q_terms=2 if variant.q_split else 1,
            joined=variant.joined,
        )

    @classmethod
    def _crowd(cls, variant: Variant) -> Geometry:
        if not takes_crowd(variant):
            raise ValueError(f"{variant.name}: six consumer warps are for eight rows of a head of 128 e2m3 elements")
        sides = 2 if variant.joined == "panels" else 1
        k, v = (Operand.of(fmt, 128, sides) for fmt in get_formats(variant.kv_format, variant.v_format or None))
        return cls(
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
        )

    @classmethod
    def _wide(cls, variant: Variant, wide: Wide) -> Geometry:
        d, tile = 128, WARPGROUP * 16  # a warp has 16 rows of an operand
        k, v = (Operand.of(fmt, d) for fmt in get_formats(variant.kv_format, variant.v_format or None))
        return cls(
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
            wide=wide,
        )

    @property
    def consumer_warps(self) -> int:
        return self.groups * self.row_groups

    @property
    def groups(self) -> int:
        """Of warps, each with an O of its own."""
        return self.kv_groups * self.token_groups

    @property
    def warp_tile(self) -> int:
        """Tokens of a stage that a warp takes."""
        return self.tile // self.token_groups

    @property
    def threads(self) -> int:
        """Of a half."""
        return (self.consumer_warps + self.feeding_warps) * WARP

    @property
    def feeding_warps(self) -> int:
        """Of a half: the producer and, for block scales, the warp that copies them. A wide kernel's producer has a
        warpgroup to itself, whose other warps only leave their registers to the consumers; so have the producers of
        the two halves of a crowd."""
        return WARPGROUP if self.wide else 2 if self.scale_stage_bytes or self.crowd else 1

    @property
    def registers(self) -> tuple[int, int]:
        """Of a consumer thread and of one of the producer's warpgroup, where they differ; else zeros."""
        if self.crowd:
            return CROWD_REGISTERS
        return (self.wide.registers, self.wide.producer_registers) if self.wide else (0, 0)

    @property
    def mail_readers(self) -> int:
        """Warps of a half to which the producer hands rows over."""
        return self.consumer_warps + (1 if self.scale_stage_bytes else 0)

    @property
    def halves(self) -> int:
        """Where two CTAs fit on an SM they are one of twice the size: each half has its own producer, ring and
        consumers, and works alone or, in a paired plan, with the other."""
        return 2 if self.ctas_per_sm == 2 and (self.kv_groups >= 4 or self.crowd) else 1

    @property
    def half_bytes(self) -> int:
        """Shared memory of a half."""
        return -(-self.smem_bytes // 1024) * 1024

    @property
    def sides(self) -> int:
        """KV heads whose tiles a stage holds, each for a row group of its own."""
        return 2 if self.joined == "panels" else 1

    def panels(self, operand: Operand) -> int:
        """Of a tile of K or of V: boxes for each page that is smaller than a tile."""
        return operand.panels if operand.paired else self.sides * operand.panels

    def side_bytes(self, operand: Operand) -> int:
        """From one head's tile of K or of V to the other's."""
        return 0 if operand.paired else self.tile * operand.row_bytes

    @property
    def joined_heads(self) -> bool:
        return self.heads_per_item == 2

    @property
    def row_tiles(self) -> int:
        """n8 tiles of q rows per warp."""
        return self.rows_per_warp // 8

    @property
    def m_tiles(self) -> int:
        """m16 tiles of O^T: 16 elements of the head each."""
        return self.head_size // 16

    @property
    def token_bytes(self) -> int:
        """Codes of K and V of one token, of all heads that a stage holds."""
        return self.sides * (self.k.row_bytes + self.v.row_bytes)

    @property
    def stage_bytes(self) -> int:
        """K's tile, then V's; where there are two sides, K's of both and then V's of both."""
        return self.tile * self.token_bytes

    @property
    def v_in_stage(self) -> int:
        return self.tile * self.sides * self.k.row_bytes

    @property
    def scale_stage_bytes(self) -> int:
        """Block scales of one stage, in the order of the codes."""
        return self.tile * self.sides * (self.k.scale_bytes + self.v.scale_bytes)

    @property
    def v_in_scales(self) -> int:
        return self.tile * self.sides * self.k.scale_bytes

    @property
    def q_term_bytes(self) -> int:
        """B fragments of one n8 tile of Q, as a warp keeps them: 16 bits an element."""
        return 8 * self.head_size * 2

    @property
    def q_frag_bytes(self) -> int:
        return self.q_terms * self.q_term_bytes

    @property
    def exchange_stride(self) -> int:
        """fp32 words per row of the exchange buffer: an odd multiple of 4, so that the two-word writes of a half warp
        (see ``exchange_place``), and the four-word writes of a wide kernel, are in different banks."""
        return self.head_size + 4

    @property
    def full_arrivals(self) -> int:
        """At the barrier of a full stage: the lane that issues the boxes and, for block scales, all that copy them."""
        return 1 + (WARP if self.scale_stage_bytes else 0)

    # Shared memory, in bytes from its 1024-aligned base: ring, block scales of the ring or operands of wgmma, exchange,
    # Q, (m, l), row scales, flag, counter, mbarriers, mailbox.

    @property
    def scales_offset(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def exchange_offset(self) -> int:
        if self.wide:
            return self.wide_seen_offset + self.rows * 4
        return self.scales_offset + self.stages * self.scale_stage_bytes

    @property
    def wide_q_offset(self) -> int:
        """Q of a wide kernel: panels of 64 f16 elements, swizzled as wgmma reads them."""
        return self.scales_offset

    @property
    def wide_p_offset(self) -> int:
        """P of each warpgroup: a row of 64 f16 tokens per q row, swizzled likewise."""
        return self.wide_q_offset + self.rows * self.head_size * 2

    @property
    def wide_p_bytes(self) -> int:
        return self.rows * self.tile * 2

    # What the warps of a wide kernel know of each q row, see ``Rows`` in wide.py.

    @property
    def wide_stats_offset(self) -> int:
        """(m, mult), of each warpgroup."""
        return self.wide_p_offset + self.kv_groups * self.wide_p_bytes

    @property
    def wide_limits_offset(self) -> int:
        return self.wide_stats_offset + self.kv_groups * self.rows * 8

    @property
    def wide_words_offset(self) -> int:
        """A word of each warp."""
        return self.wide_limits_offset + self.kv_groups * self.rows * 4

    @property
    def wide_seen_offset(self) -> int:
        """The keys that the row sees."""
        return self.wide_words_offset + self.consumer_warps * self.rows * 4

    @property
    def exchange_warp_bytes(self) -> int:
        """A warp's part of the exchange buffer."""
        return self.rows_per_warp * self.exchange_stride * 4

    @property
    def q_offset(self) -> int:
        return self.exchange_offset + self.consumer_warps * self.exchange_warp_bytes * self.own_q

    @property
    def q_warp_bytes(self) -> int:
        """From one warp's Q to the next one's. Without memory of its own Q stays in the warp's part of the exchange
        buffer, until the piece's O goes there."""
        return self.row_tiles * self.q_frag_bytes if self.own_q else self.exchange_warp_bytes

    @property
    def ml_offset(self) -> int:
        return self.q_offset + self.consumer_warps * self.q_warp_bytes

    @property
    def mult_offset(self) -> int:
        return self.ml_offset + self.groups * self.rows * 8

    @property
    def flag_offset(self) -> int:
        return self.mult_offset + self.rows * 4

    @property
    def counter_offset(self) -> int:
        return self.flag_offset + 4

    @property
    def full_offset(self) -> int:
        return self.flag_offset + 8

    @property
    def empty_offset(self) -> int:
        return self.full_offset + self.stages * 8

    @property
    def mail_full_offset(self) -> int:
        return self.empty_offset + self.stages * 8

    @property
    def mail_free_offset(self) -> int:
        return self.mail_full_offset + 16

    @property
    def exchange_free_offset(self) -> int:
        return self.mail_free_offset + 16

    @property
    def mail_offset(self) -> int:
        """Two rows of the plan, 32 bytes each, on their way from the producer to the consumers."""
        return (self.exchange_free_offset + 8 + 15) // 16 * 16

    @property
    def smem_bytes(self) -> int:
        return self.mail_offset + 64

    @property
    def partial_floats(self) -> int:
        """fp32 words of one split's partial result in the workspace: beside O as many again, see partials.py."""
        return self.rows * self.head_size * 2
