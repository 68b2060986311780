"""From the bytes of a cache to the A fragments of mma.m16n8k16, per KV format.

K: lane (g, t) holds 16 bytes of one token's row and needs, per k-step of 16 elements, four neighbouring elements
as two 16-bit pairs. V: it holds the same bytes of two tokens' rows and needs the two tokens' values of one
element as a pair, for two neighbouring elements (the rows g and g + 8 of the m16 tile).
The order of elements inside an MMA is free as long as Q and O follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mjolnir.kernels import ptx


class Unpack(Protocol):
    mma_dtype: str  # "f16" or "bf16"

    @staticmethod
    def k_pairs(words: Sequence[Any]) -> list[tuple[Any, Any]]:
        """(elements 0, 1), (elements 2, 3) per k-step."""

    @staticmethod
    def v_pairs(even: Any, odd: Any) -> list[tuple[Any, Any]]:
        """Per m16 tile: the pair of tokens at element 2i, and at element 2i + 1."""


class UnpackE4M3:
    """e4m3 to f16 is exact: one conversion for two elements (bf16 would take four)."""

    mma_dtype = "f16"

    @staticmethod
    def k_pairs(words: Sequence[Any]) -> list[tuple[Any, Any]]:
        return [ptx.e4m3x4_to_f16x2x2(w) for w in words]

    @staticmethod
    def v_pairs(even: Any, odd: Any) -> list[tuple[Any, Any]]:
        low = ptx.prmt(even, odd, 0x5140)  # bytes: even 0, odd 0, even 1, odd 1
        high = ptx.prmt(even, odd, 0x7362)
        return [ptx.e4m3x4_to_f16x2x2(low), ptx.e4m3x4_to_f16x2x2(high)]


class UnpackF16:
    mma_dtype = "f16"

    @staticmethod
    def k_pairs(words: Sequence[Any]) -> list[tuple[Any, Any]]:
        return list(zip(words[0::2], words[1::2], strict=True))

    @staticmethod
    def v_pairs(even: Any, odd: Any) -> list[tuple[Any, Any]]:
        return [(ptx.prmt(even, odd, 0x5410), ptx.prmt(even, odd, 0x7632))]


class UnpackBF16(UnpackF16):
    mma_dtype = "bf16"


UNPACK: dict[str, type[Unpack]] = {"fp8": UnpackE4M3, "fp16": UnpackF16, "bf16": UnpackBF16}
