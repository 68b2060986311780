"""The arithmetic of one warp: Q rows to B fragments, S = K Q^T and O += V^T P^T of one tile.

Fragments follow PTX's mma.m16n8k16; g = lane / 4, t = lane % 4. No operand is shuffled or transposed on its way from
shared memory: the order of elements inside an MMA is free, so lane t takes whole 16-byte chunks of a K row, lane g
whole chunks of V rows, and Q and O follow the same order.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from mjolnir.kernels import ptx
from mjolnir.kernels.geometry import WARP, Geometry
from mjolnir.kernels.lanes import k_loads, position_of, q_place, token_of, v_loads
from mjolnir.kernels.unpack import UNPACK
from mjolnir.variant import Variant

Q_EXPONENT = 4
"""Q rows are brought by an exact power of two to an amax in [2^4, 2^5), inside the range of f16."""


class TileMath:
    """Emits the code of one warp; nothing here depends on where the tile or the row comes from."""

    def __init__(self, variant: Variant, geo: Geometry):
        self.variant, self.geo = variant, geo
        self.k_unpack = UNPACK[variant.kv_format]
        self.v_unpack = UNPACK[variant.v_format or variant.kv_format]

    def lane_runs(self, t: Any):
        """Lane t's elements of a Q row, in the order of its K bytes: per panel, a quarter of the panel."""
        k = self.geo.k
        run = k.panel_elems // 4
        return [(panel * run, panel * k.panel_elems + t * run) for panel in range(k.panels)], run

    def load_q_rows(self, addr: Any, staging: Any, t: Any, lane: Any):
        """Eight rows of Q, row g at its lanes' ``addr``: this lane's quarter of its row as fp32 (d / 4 registers).

        By way of shared memory, 8 × d × 2 bytes of the warp's own at ``staging``: straight from global memory a load
        touches 16 lines, for which all warps of an SM queue. 16-bit formats do that, whose kernels of d = 256 would
        spill otherwise."""
        chunks, staged = self.variant.head_size // 8, self.geo.k.bits < 16
        runs, run = self.lane_runs(t)
        if staged:
            loads = []
            for first in range(0, 8 * chunks, WARP):
                row, chunk = (first + lane) // chunks, (first + lane) % chunks
                loads.append((row, chunk, ptx.ldg128(cute.arch.shuffle_sync(addr, row * 4) + Int64(chunk * 16))))
            for row, chunk, words in loads:
                ptx.sts128(staging + (row * chunks + q_place(row, chunk, run)) * 16, words)
            cute.arch.sync_warp()
        unpack = ptx.unpack_bf16x2 if self.variant.q_dtype == "bf16" else ptx.unpack_f16x2
        values = cute.make_rmem_tensor((self.geo.head_size // 4,), Float32)
        row = lane // 4
        for at, element in runs:
            for i in range(0, run, 8):
                if staged:
                    place = row * chunks + q_place(row, element // 8 + i // 8, run)
                    words = ptx.lds128(staging + place * 16)
                else:
                    words = ptx.ldg128(addr + Int64(element + i) * 2)
                for j, word in enumerate(words):
                    values[at + i + 2 * j], values[at + i + 2 * j + 1] = unpack(word)
        if staged:
            cute.arch.sync_warp()
        return values

    def scale_q_row(self, values: Any, addr: Any, t: Any) -> None:
        runs, run = self.lane_runs(t)
        for at, element in runs:
            for i in range(0, run, 4):
                for j, factor in enumerate(ptx.ldg_f32x4(addr + Int64(element + i) * 4)):
                    values[at + i + j] = values[at + i + j] * factor

    def pack_q_row(self, values: Any, sign: Any):
        """One Q row times ``sign`` (0 for a padding row), in the MMA's dtype after an exact power-of-two scaling: the
        lane's words in the order of its K bytes, per term of Q, and the factor that undoes the scaling."""
        amax = Float32(0.0)
        len_values = self.geo.head_size // 4
        for i in range(len_values):
            amax = cute.arch.fmax(amax, cute.math.absf(values[i]))
        for step in range(2):
            amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, 1 << step))
        # 2^(Q_EXPONENT - exponent(amax)) and its inverse, from the bits; both stay normal numbers.
        biased = (ptx.float_as_int(amax) >> 23) & 0xFF
        biased = cutlass.max(cutlass.min(biased, Int32(254)), Int32(Q_EXPONENT + 1))
        scale = ptx.int_as_float((254 + Q_EXPONENT - biased) << 23) * sign
        unscale = ptx.int_as_float((biased - Q_EXPONENT) << 23)
        order = self.k_unpack.k_order
        scaled = [values[i // len(order) * len(order) + order[i % len(order)]] * scale for i in range(len_values)]
        pack = ptx.pack_bf16x2 if self.k_unpack.mma_dtype == "bf16" else ptx.pack_f16x2
        terms = []
        for term in range(self.geo.q_terms):
            words = [pack(scaled[i], scaled[i + 1]) for i in range(0, len(scaled), 2)]
            terms.append(words)
            if term + 1 < self.geo.q_terms:
                rounded = [x for w in words for x in ptx.unpack_bf16x2(w)]
                scaled = [x - r for x, r in zip(scaled, rounded, strict=True)]
        return terms, unscale

    def store_q_row(self, addr: Any, values: Any, sign: Any):
        """Store the B fragments of one Q row times ``sign``; returns the factor that undoes its scaling."""
        terms, unscale = self.pack_q_row(values, sign)
        for term, words in enumerate(terms):
            for i in range(0, len(words), 4):
                ptx.sts128(addr + term * self.geo.q_term_bytes + i * (4 * WARP), words[i : i + 4])
        return unscale

    def token_of(self, row: Any) -> Any:
        """Where, of each 8 of a tile, the token of row ``row`` of S lies."""
        return token_of(self.geo.v, row)

    def tokens_of(self, row: Any) -> list[Any]:
        """That token: of the first 8, and of every second 8 from there on; of the others."""
        return [position_of(self.geo.joined, self.token_of(row) + first) - first for first in (0, 8)]

    def scores(self, k_tile: Any, k_scales: Any, q_frags: Any, g: Any, t: Any, side: Any = 0):
        """S^T = K Q^T for one tile, unscaled: per n8 tile, [2 i + e] = S[8 i + tokens_of(g)[i % 2]][q row 2 t + e]."""
        geo, k = self.geo, self.geo.k
        token = self.token_of(g)
        s = [[[Float32(0.0)] * 4 for _ in range(geo.warp_tile // 16)] for _ in range(geo.row_tiles)]
        steps_per_unit = k.k_unit * 8 // k.bits // 4
        word = 0
        for panel in range(k.panels):
            for unit, loads in enumerate(k_loads(k, token, t, side)):
                q = [self.load_q_frags(q_frags, n, word, steps_per_unit) for n in range(geo.row_tiles)]
                rows = [(k_tile + (panel * geo.tile + token) * k.stride + offset, width) for offset, width in loads]
                for block in range(geo.warp_tile // 16):
                    halves = []
                    for half in range(2):
                        first = block * 16 + half * 8
                        words = [w for row, width in rows for w in ptx.lds_words(row + first * k.stride, width)]
                        scales = self.k_scales(k_scales + (first + token) * k.scale_bytes, unit, t)
                        halves.append(self.k_unpack.k_pairs(words, scales))
                    for k_step, ((a0, a2), (a1, a3)) in enumerate(zip(*halves, strict=True)):
                        for n in range(geo.row_tiles):
                            for b in q[n][k_step]:
                                s[n][block] = ptx.mma_m16n8k16(
                                    (a0, a1, a2, a3), b, s[n][block], self.k_unpack.mma_dtype
                                )
                word += 2 * steps_per_unit
        return [[x for block in s[n] for x in block] for n in range(geo.row_tiles)]

    def k_scales(self, row_scales: Any, unit: int, t: Any) -> list[Any]:
        """The block scales of lane t's elements of a unit, each twice in an f16x2."""
        per_lane = self.geo.k.scale_bytes // 4
        if not per_lane:
            return []
        if per_lane == 1:
            byte = ptx.lds_u8(row_scales + t)
            return [ptx.e4m3x2_to_f16x2(ptx.prmt(byte, byte, 0))]
        pair = ptx.lds_u16(row_scales + t * per_lane + unit * 2)
        return list(ptx.e4m3x4_to_f16x2x2(ptx.prmt(pair, pair, 0x1100)))

    def load_q_frags(self, q_frags: Any, n: int, word: int, steps: int):
        """Per k-step of one unit of K, the B fragments of n8 tile n: one per term of Q."""
        terms = []
        for term in range(self.geo.q_terms):
            addr = q_frags + n * self.geo.q_frag_bytes + term * self.geo.q_term_bytes + word * (4 * WARP)
            words = [w for i in range(0, 2 * steps, 4) for w in ptx.lds128(addr + i * (4 * WARP))]
            terms.append([(words[2 * k], words[2 * k + 1]) for k in range(steps)])
        return list(zip(*terms, strict=True))

    def accumulate(self, v_tile: Any, v_scales: Any, weights: Any, acc: Any, g: Any, t: Any, side: Any = 0) -> None:
        """O^T += V^T P^T for one tile. acc[(n * d/16 + i) * 4 + 2 h + e] is O[q row 2 t + e] of n8 tile n at the
        element 2 i + h of lane g's d / 8 elements, per panel its run of the row."""
        geo, v = self.geo, self.geo.v
        per_panel = geo.m_tiles // v.panels
        tokens = [self.token_of(2 * t + odd) for odd in range(2)]
        loads = [
            [(token * v.stride + offset, width) for offset, width in v_loads(v, token, g, side)] for token in tokens
        ]
        for block in range(geo.warp_tile // 16):
            p_frags = [self.p_frags(weights[n][4 * block : 4 * block + 4]) for n in range(geo.row_tiles)]
            scales = [self.v_scales(v_scales, tokens, block * 16 + h * 8, g) for h in range(2)]
            for panel in range(v.panels):
                base = v_tile + (panel * geo.tile + block * 16) * v.stride
                rows = [
                    [w for o, width in row for w in ptx.lds_words(base + o + h * 8 * v.stride, width)]
                    for h in range(2)
                    for row in loads
                ]
                i = panel * per_panel
                for first in range(0, len(rows[0]), self.v_unpack.v_words):
                    even, odd, even8, odd8 = (row[first : first + self.v_unpack.v_words] for row in rows)
                    block_of = first * 32 // v.bits // 16  # block scale of the lane's run
                    upper, lower = (
                        self.v_unpack.v_pairs(e, o, g, pair[block_of] if pair else None)
                        for e, o, pair in ((even, odd, scales[0]), (even8, odd8, scales[1]))
                    )
                    for (a0, a1), (a2, a3) in zip(upper, lower, strict=True):
                        for n in range(geo.row_tiles):
                            at = (n * geo.m_tiles + i) * 4
                            c = [acc[at + e] for e in range(4)]
                            for b in p_frags[n]:
                                c = ptx.mma_m16n8k16((a0, a1, a2, a3), b, c, self.v_unpack.mma_dtype)
                            for e in range(4):
                                acc[at + e] = c[e]
                        i += 1

    def v_scales(self, v_scales: Any, tokens: list[Any], first: int, g: Any) -> list[Any]:
        """Of two tokens: the block scales of lane g's run, each an f16x2 of both tokens."""
        width = self.geo.v.scale_bytes
        if not width:
            return []
        # 16, 8 or 4 bytes for 8 lanes: two scales each, one each, or one for two.
        load = ptx.lds_u16 if width == 16 else ptx.lds_u8
        even, odd = (load(v_scales + (first + token) * width + (g * width >> 3)) for token in tokens)
        if width == 16:
            return list(ptx.e4m3x4_to_f16x2x2(ptx.prmt(even, odd, 0x5140)))
        return [ptx.e4m3x2_to_f16x2(ptx.mad(odd, 256, even))]

    def p_frags(self, p: Any):
        """B fragments of P^T for 16 tokens: one in f16, or two in bf16 whose sum keeps 16 bits of P."""
        if self.v_unpack.mma_dtype != "bf16":
            return [tuple(ptx.movmatrix(ptx.pack_f16x2(p[i], p[i + 1])) for i in (0, 2))]
        high = [ptx.pack_bf16x2(p[i], p[i + 1]) for i in (0, 2)]
        rounded = [x for w in high for x in ptx.unpack_bf16x2(w)]
        low = [ptx.pack_bf16x2(p[i] - rounded[i], p[i + 1] - rounded[i + 1]) for i in (0, 2)]
        return [tuple(ptx.movmatrix(w) for w in high), tuple(ptx.movmatrix(w) for w in low)]
