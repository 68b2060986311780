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

from mjolnir.formats import get_format
from mjolnir.kernels import ptx
from mjolnir.kernels.geometry import WARP, Geometry
from mjolnir.kernels.unpack import UNPACK
from mjolnir.variant import Variant

Q_EXPONENT = 4
"""Q rows are brought by an exact power of two to an amax in [2^4, 2^5), inside the range of f16."""


class TileMath:
    """Emits the code of one warp; nothing here depends on where the tile or the row comes from."""

    def __init__(self, variant: Variant, geo: Geometry):
        self.variant, self.geo = variant, geo
        self.unpack = UNPACK[variant.kv_format]
        self.bf16_mma = self.unpack.mma_dtype == "bf16"

    def lane_runs(self, t: Any):
        """Lane t's elements of a Q row, in the order of its K bytes: per panel, a quarter of the panel."""
        run = self.geo.panel_elems // 4
        return [(panel * run, panel * self.geo.panel_elems + t * run) for panel in range(self.geo.panels)], run

    def load_q_row(self, addr: Any, t: Any):
        """This lane's quarter of a Q row as fp32 (d / 4 registers)."""
        unpack = ptx.unpack_bf16x2 if self.variant.q_dtype == "bf16" else ptx.unpack_f16x2
        values = cute.make_rmem_tensor((self.geo.head_size // 4,), Float32)
        runs, run = self.lane_runs(t)
        for at, element in runs:
            for i in range(0, run, 8):
                for j, word in enumerate(ptx.ldg128(addr + Int64(element + i) * 2)):
                    values[at + i + 2 * j], values[at + i + 2 * j + 1] = unpack(word)
        return values

    def scale_q_row(self, values: Any, addr: Any, t: Any) -> None:
        runs, run = self.lane_runs(t)
        for at, element in runs:
            for i in range(0, run, 4):
                for j, factor in enumerate(ptx.ldg_f32x4(addr + Int64(element + i) * 4)):
                    values[at + i + j] = values[at + i + j] * factor

    def store_q_row(self, addr: Any, values: Any, sign: Any):
        """Store the B fragments of one Q row times ``sign`` (0 for a padding row) after an exact power-of-two
        scaling; returns the factor that undoes it."""
        amax = Float32(0.0)
        for i in range(self.geo.head_size // 4):
            amax = cute.arch.fmax(amax, cute.math.absf(values[i]))
        for step in range(2):
            amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, 1 << step))
        # 2^(Q_EXPONENT - exponent(amax)) and its inverse, from the bits; both stay normal numbers.
        biased = (ptx.float_as_int(amax) >> 23) & 0xFF
        biased = cutlass.max(cutlass.min(biased, Int32(254)), Int32(Q_EXPONENT + 1))
        scale = ptx.int_as_float((254 + Q_EXPONENT - biased) << 23) * sign
        unscale = ptx.int_as_float((biased - Q_EXPONENT) << 23)
        scaled = [values[i] * scale for i in range(self.geo.head_size // 4)]
        pack = ptx.pack_bf16x2 if self.bf16_mma else ptx.pack_f16x2
        for term in range(self.geo.q_terms):
            words = [pack(scaled[i], scaled[i + 1]) for i in range(0, len(scaled), 2)]
            for i in range(0, len(words), 4):
                ptx.sts128(addr + term * self.geo.q_term_bytes + i * (4 * WARP), words[i : i + 4])
            if term + 1 < self.geo.q_terms:
                rounded = [x for w in words for x in ptx.unpack_bf16x2(w)]
                scaled = [x - r for x, r in zip(scaled, rounded, strict=True)]
        return unscale

    def scores(self, k_tile: Any, q_frags: Any, g: Any, t: Any):
        """S^T = K Q^T for one tile, unscaled: per n8 tile, [2 i + e] = S[token 8 i + g][q row 2 t + e]."""
        geo = self.geo
        chunks = geo.panel_bytes // 64  # 16-byte chunks a lane reads of one row and panel
        swizzle = g if geo.panel_bytes == 128 else (g >> 1) & 3
        s = [[[Float32(0.0)] * 4 for _ in range(geo.tile // 16)] for _ in range(geo.row_tiles)]
        word = 0
        for panel in range(geo.panels):
            for j in range(chunks):
                q = [self.load_q_frags(q_frags, n, word) for n in range(geo.row_tiles)]
                row = k_tile + (panel * geo.tile + g) * geo.panel_bytes + ((chunks * t + j) ^ swizzle) * 16
                for block in range(geo.tile // 16):
                    addr = row + block * 16 * geo.panel_bytes
                    upper = self.unpack.k_pairs(ptx.lds128(addr))
                    lower = self.unpack.k_pairs(ptx.lds128(addr + 8 * geo.panel_bytes))
                    for k_step, ((a0, a2), (a1, a3)) in enumerate(zip(upper, lower, strict=True)):
                        for n in range(geo.row_tiles):
                            for b in q[n][k_step]:
                                s[n][block] = ptx.mma_m16n8k16((a0, a1, a2, a3), b, s[n][block], self.unpack.mma_dtype)
                word += 2 * len(upper)
        return [[x for block in s[n] for x in block] for n in range(geo.row_tiles)]

    def load_q_frags(self, q_frags: Any, n: int, word: int):
        """Per k-step of one 16-byte chunk of K, the B fragments of n8 tile n: one per term of Q."""
        steps = 32 // get_format(self.variant.kv_format).bits
        terms = []
        for term in range(self.geo.q_terms):
            addr = q_frags + n * self.geo.q_frag_bytes + term * self.geo.q_term_bytes + word * (4 * WARP)
            words = [w for i in range(0, 2 * steps, 4) for w in ptx.lds128(addr + i * (4 * WARP))]
            terms.append([(words[2 * k], words[2 * k + 1]) for k in range(steps)])
        return list(zip(*terms, strict=True))

    def accumulate(self, v_tile: Any, weights: Any, acc: Any, g: Any, t: Any) -> None:
        """O^T += V^T P^T for one tile. acc[(n * d/16 + i) * 4 + 2 h + e] is O[q row 2 t + e] of n8 tile n at the
        element 2 i + h of lane g's d / 8 elements, per panel its chunk of the row."""
        geo = self.geo
        per_panel = geo.m_tiles // geo.panels
        chunk = geo.panel_bytes // 8  # bytes a lane reads of one row and panel
        load = ptx.lds128 if chunk == 16 else ptx.lds64
        offsets = []
        for odd in range(2):
            row = 2 * t + odd
            if chunk == 16:
                offsets.append(row * 128 + ((g ^ row) << 4))
            else:
                offsets.append(row * 64 + (((g >> 1) ^ t) << 4) + ((g & 1) << 3))
        for block in range(geo.tile // 16):
            p_frags = [self.p_frags(weights[n][4 * block : 4 * block + 4]) for n in range(geo.row_tiles)]
            for panel in range(geo.panels):
                base = v_tile + (panel * geo.tile + block * 16) * geo.panel_bytes
                rows = [load(base + o + h * 8 * geo.panel_bytes) for h in range(2) for o in offsets]
                i = panel * per_panel
                for even, odd, even8, odd8 in zip(*rows, strict=True):
                    upper = self.unpack.v_pairs(even, odd)
                    lower = self.unpack.v_pairs(even8, odd8)
                    for (a0, a1), (a2, a3) in zip(upper, lower, strict=True):
                        for n in range(geo.row_tiles):
                            at = (n * geo.m_tiles + i) * 4
                            c = [acc[at + e] for e in range(4)]
                            for b in p_frags[n]:
                                c = ptx.mma_m16n8k16((a0, a1, a2, a3), b, c, self.unpack.mma_dtype)
                            for e in range(4):
                                acc[at + e] = c[e]
                        i += 1

    def p_frags(self, p: Any):
        """B fragments of P^T for 16 tokens: one in f16, or two in bf16 whose sum keeps 16 bits of P."""
        if not self.bf16_mma:
            return [tuple(ptx.movmatrix(ptx.pack_f16x2(p[i], p[i + 1])) for i in (0, 2))]
        high = [ptx.pack_bf16x2(p[i], p[i + 1]) for i in (0, 2)]
        rounded = [x for w in high for x in ptx.unpack_bf16x2(w)]
        low = [ptx.pack_bf16x2(p[i] - rounded[i], p[i + 1] - rounded[i + 1]) for i in (0, 2)]
        return [tuple(ptx.movmatrix(w) for w in high), tuple(ptx.movmatrix(w) for w in low)]
