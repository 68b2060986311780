"""What is fixed before run time: tile, ring, warps and shared memory of the decode kernel. choice.py has the sizes that
a variant gets."""

from __future__ import annotations

import dataclasses

from mjolnir.kernels.operand import Operand

WARP = 32

WARPGROUP = 4
"""Warps that issue one wgmma together."""


UNSET = -1
"""The bits of a word of the workspace that holds nothing: a NaN, but not the one that arithmetic makes, 0x7fffffff."""


def log2(power_of_two: int) -> int:
    return power_of_two.bit_length() - 1


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
    wide: bool = False  # a kv group is a warpgroup, whose four warps work on all q rows together: see wide.py
    registers: tuple[int, int] = (0, 0)  # of a consumer's thread and of a feeding warp's, where they differ

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
    def mail_readers(self) -> int:
        """Warps of a half to which the producer hands rows over."""
        return self.consumer_warps + (1 if self.scale_stage_bytes else 0)

    @property
    def halves(self) -> int:
        """Where two CTAs fit on an SM they are one of twice the size: each half has its own producer, ring and
        consumers, and works alone or, in a paired plan, with the other."""
        return 2 if self.ctas_per_sm == 2 and (self.groups >= 4 or self.crowd) else 1

    @property
    def half_warps(self) -> int:
        """From the first consumer warp of a half to that of the other. Warps that trade registers do so four at a time:
        of a crowd the consumers of both halves come first."""
        return self.consumer_warps if self.crowd else self.threads // WARP

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
