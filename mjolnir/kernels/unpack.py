"""From the bytes of a cache to the A fragments of mma.m16n8k16, per KV format.

K: lane (g, t) holds a run of one token's row and needs, per k-step of 16 elements, four of them as two 16-bit pairs.
V: it holds the same run of two tokens' rows and needs the two tokens' values of one element as a pair, for two
neighbouring elements (the rows g and g + 8 of the m16 tile). The order of elements inside an MMA is free as long as Q
and O follow it: ``k_order`` says which elements of a unit K's k-steps take, V's tiles come in order.

The budget is the pipe that PRMT, LOP3, SHF and F2FP share, about 60 lane operations per clock and SM, while the memory
delivers 17.6 fp8, 23.5 e2m3 or 31.3 nvfp4 elements. Operations of that pipe per element, K and V: fp8 0.5 and 0.75,
e2m3 1.375 and 1.5, nvfp4 1.125 and 1.25. Shifts to the left and sums are multiplications, which have their own pipe.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from mjolnir.kernels import ptx

Pair = tuple[Any, Any]


class Unpack(abc.ABC):
    mma_dtype: str = "f16"  # or "bf16"
    unscale: float = 1.0  # a power of two: elements are what the MMA sees times this
    k_order: tuple[int, ...] = (0, 1, 2, 3)
    v_words: int = 1  # words of a V row that v_pairs takes at once, at most

    @classmethod
    @abc.abstractmethod
    def k_pairs(cls, words: Sequence[Any], scales: Sequence[Any]) -> list[Pair]:
        """Per k-step, the pairs of elements k_order[4 i], k_order[4 i + 1] and k_order[4 i + 2], k_order[4 i + 3].
        ``scales``: per 16 elements a block scale, twice in an f16x2; empty without block scales."""

    @classmethod
    @abc.abstractmethod
    def v_pairs(cls, even: Sequence[Any], odd: Sequence[Any], g: Any, scale: Any) -> list[Pair]:
        """Per m16 tile: the pair of tokens at element 2 i, and at element 2 i + 1. ``scale``: the two tokens' block
        scales as f16x2, or None."""


class UnpackE4M3(Unpack):
    """e4m3 to f16 is exact: one conversion for two elements (bf16 would take four)."""

    @staticmethod
    def convert(word: Any) -> Pair:
        return ptx.e4m3x4_to_f16x2x2(word)

    @classmethod
    def k_pairs(cls, words: Sequence[Any], scales: Sequence[Any]) -> list[Pair]:
        return [cls.convert(w) for w in words]

    @classmethod
    def v_pairs(cls, even: Sequence[Any], odd: Sequence[Any], g: Any, scale: Any) -> list[Pair]:
        low = ptx.prmt(even[0], odd[0], 0x5140)  # bytes: even 0, odd 0, even 1, odd 1
        high = ptx.prmt(even[0], odd[0], 0x7362)
        return [cls.convert(low), cls.convert(high)]


class UnpackE5M2(UnpackE4M3):
    @staticmethod
    def convert(word: Any) -> Pair:
        return ptx.e5m2x4_to_f16x2x2(word)


class UnpackF16(Unpack):
    @classmethod
    def k_pairs(cls, words: Sequence[Any], scales: Sequence[Any]) -> list[Pair]:
        return list(zip(words[0::2], words[1::2], strict=True))

    @classmethod
    def v_pairs(cls, even: Sequence[Any], odd: Sequence[Any], g: Any, scale: Any) -> list[Pair]:
        return [(ptx.prmt(even[0], odd[0], 0x5410), ptx.prmt(even[0], odd[0], 0x7632))]


class UnpackBF16(UnpackF16):
    mma_dtype = "bf16"


class UnpackE2M3(Unpack):
    """A code s·ee·mmm placed as s·000ee·mmm0000000 is the f16 number code × 2^-14, subnormals included.

    16 bits that start at a byte hold two whole codes: the first two of a group if they start with it, the last two if
    they start at its second byte. PRMT brings two such windows together, of two groups of K or of two tokens of V, and
    then two masks and two multiplications place the codes of both halves at once.
    """

    unscale = 2.0**14
    k_order = (0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15)
    v_words = 3

    @classmethod
    def k_pairs(cls, words: Sequence[Any], scales: Sequence[Any]) -> list[Pair]:
        steps = []
        for i in range(0, len(words), 3):
            w0, w1, w2 = words[i : i + 3]
            # Bytes 0 and 3, 1 and 4, 6 and 9, 7 and 10 of twelve are where windows of the same kind start.
            steps += [
                cls._first_codes(ptx.prmt(w0, w1, 0x4310)),
                cls._last_codes(ptx.prmt(w0, w1, 0x5421)),
                cls._first_codes(ptx.prmt(w1, w2, 0x6532)),
                cls._last_codes(ptx.prmt(w1, w2, 0x7643)),
            ]
        return steps

    @classmethod
    def v_pairs(cls, even: Sequence[Any], odd: Sequence[Any], g: Any, scale: Any) -> list[Pair]:
        tiles = []
        for (e, o, first), (e2, o2, second) in zip(*cls._windows(even, odd, g), strict=True):
            tiles += [cls._first_codes(ptx.prmt(e, o, first)), cls._last_codes(ptx.prmt(e2, o2, second))]
        return tiles

    @staticmethod
    def _windows(even: Sequence[Any], odd: Sequence[Any], g: Any) -> list[list[tuple[Any, Any, int]]]:
        """Per kind of window and group: the words of both tokens, and the selector of the window's bytes in them."""
        at = [0x5410, 0x6521, 0x7632]  # windows that start at byte 0, 1 and 2
        if len(even) == 3:
            e0, e1, e2 = even
            o0, o1, o2 = odd
            # Bytes 3 … 6 and 7 … 10, whose windows lie across words.
            e3, o3 = (ptx.funnel_right(a, b, 24) for a, b in ((e0, e1), (o0, o1)))
            e7, o7 = (ptx.funnel_right(a, b, 24) for a, b in ((e1, e2), (o1, o2)))
            return [
                [(e0, o0, at[0]), (e3, o3, at[0]), (e1, o1, at[2]), (e2, o2, at[1])],
                [(e0, o0, at[1]), (e1, o1, at[0]), (e7, o7, at[0]), (e2, o2, at[2])],
            ]
        # Six bytes, from byte 0 or, for odd lanes, 2 of two words on: to one word per group.
        selectors = [0x3210 + (g & 1) * 0x2222, 0x5543 + (g & 1) * 0x2222]
        (e0, e3), (o0, o3) = ([ptx.prmt(w0, w1, s) for s in selectors] for w0, w1 in (even, odd))
        return [[(e0, o0, at[0]), (e3, o3, at[0])], [(e0, o0, at[1]), (e3, o3, at[1])]]

    @staticmethod
    def _first_codes(window: Any) -> Pair:
        """The codes at bits 0 and 6 of both halves."""
        return _place(window, 0x001F, 7, 0x0020, 10), _place(window, 0x07C0, 1, 0x0800, 4)

    @staticmethod
    def _last_codes(window: Any) -> Pair:
        """The codes at bits 4 and 10 of both halves."""
        return _place(window, 0x01F0, 3, 0x0200, 6), _place(window, 0x7C00, -3, 0x8000, 0)


def _place(window: Any, magnitude: int, by: int, sign: int, sign_by: int) -> Any:
    """Of both halves: the bits under ``magnitude`` moved by ``by`` to the left, and those under ``sign``."""
    both = 0x10001
    if by < 0:
        moved = ptx.and_b32(ptx.shift_right(window, -by), (magnitude >> -by) * both)
        return ptx.and_or(window, sign * both, moved)  # the sign is where it belongs
    moved = ptx.mul(ptx.and_b32(window, magnitude * both), 1 << by)
    return ptx.mad(ptx.and_b32(window, sign * both), 1 << sign_by, moved)


class UnpackNvFp4(Unpack):
    """A code s·ee·m placed as s·00ee·m00 is the e4m3 number code × 2^-6, subnormals included; times its block scale it
    is exact in f16."""

    unscale = 2.0**6
    k_order = (0, 2, 4, 6, 1, 3, 5, 7)

    @classmethod
    def k_pairs(cls, words: Sequence[Any], scales: Sequence[Any]) -> list[Pair]:
        steps = []
        for i, word in enumerate(words):
            for codes in (cls._low_nibbles(word), cls._high_nibbles(word)):
                a, b = ptx.e4m3x4_to_f16x2x2(codes)
                steps.append((ptx.mul_f16x2(a, scales[i // 2]), ptx.mul_f16x2(b, scales[i // 2])))
        return steps

    @classmethod
    def v_pairs(cls, even: Sequence[Any], odd: Sequence[Any], g: Any, scale: Any) -> list[Pair]:
        tiles: list[Pair] = []
        for selector in (0x5140, 0x7362):
            both = ptx.prmt(even[0], odd[0], selector)
            low, high = (ptx.e4m3x4_to_f16x2x2(f(both)) for f in (cls._low_nibbles, cls._high_nibbles))
            tiles += [(ptx.mul_f16x2(a, scale), ptx.mul_f16x2(b, scale)) for a, b in zip(low, high, strict=True)]
        return tiles

    @staticmethod
    def _low_nibbles(word: Any) -> Any:
        sign = ptx.and_b32(word, 0x08080808)
        return ptx.mad(sign, 16, ptx.mul(ptx.and_b32(word, 0x07070707), 4))

    @staticmethod
    def _high_nibbles(word: Any) -> Any:
        return ptx.and_or(word, 0x80808080, ptx.and_b32(ptx.shift_right(word, 2), 0x1C1C1C1C))


UNPACK: dict[str, type[Unpack]] = {
    "fp8": UnpackE4M3,
    "fp8_e5m2": UnpackE5M2,
    "e2m3": UnpackE2M3,
    "nvfp4": UnpackNvFp4,
    "fp16": UnpackF16,
    "bf16": UnpackBF16,
}
