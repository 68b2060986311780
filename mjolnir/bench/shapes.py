"""One benchmark shape, what its floor and target are, and how many caches its calls rotate over."""

from __future__ import annotations

import dataclasses
import functools
import math
import random

from mjolnir.formats import get_format

ROOFLINE_TB_S = 4.60
"""HBM read bandwidth of an H200, the best measured by any kernel: a sum over 4 GiB by 65,536 small CTAs."""

TARGET_SLOPE = 1.04
TARGET_OFFSET_US = 4.0

REUSE_BYTES = 240_000_000
"""More KV bytes than this are read between two uses of one cache: four times the 60 MB L2 of an H200."""

SELF_EVICTING_BYTES = 4 * REUSE_BYTES
"""A cache of this size pushes its own beginning out of L2 before it is read again: it needs no rotation."""

LAYOUTS = ("NHD", "HND")
"""Order of the dimensions within a page: token-major (page, head, d) or head-major (head, page, d)."""

NORMAL, HARD = "normal", "hard"
DATA = (NORMAL, HARD)
"""K and V: normal values in the KV format, or bytes over all finite e4m3 codes, which spread the scores so widely
that the running maximum keeps growing. Q is normal in both."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A decode step of one layer. ``batch`` says the lengths: "16x8K", "1x128K+63x1K", or "32mixed"; ``fixed_split``
    asks for batch-invariant results, by splits of so many tokens, 0 for none."""

    heads_q: int
    heads_kv: int
    batch: str
    head_dim: int = 128
    page_size: int = 64
    layout: str = "NHD"
    kv_format: str = "fp8"
    q_len: int = 1
    data: str = NORMAL
    fixed_split: int = 0

    @property
    def name(self) -> str:
        """Unique per shape; ``--shape`` patterns match it."""
        return (
            f"{self.heads_q}/{self.heads_kv}-{self.batch}-d{self.head_dim}-p{self.page_size}-{self.layout.lower()}"
            f"-{self.kv_format}-q{self.q_len}"
            + "-hard" * (self.data == HARD)
            + (f"-split{self.fixed_split}" if self.fixed_split else "")
        )

    @property
    def low_bit(self) -> bool:
        """No peer reads such a cache."""
        return get_format(self.kv_format).bits < 8

    @property
    def lens(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return parse_lengths(self.batch)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token, block scales included."""
        fmt = get_format(self.kv_format)
        return 2 * self.heads_kv * (fmt.row_bytes(self.head_dim) + fmt.scale_width(self.head_dim))

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that a call has to read: live tokens only."""
        return sum(self.lens) * self.token_bytes

    @property
    def num_pages(self) -> int:
        return sum(-(-length // self.page_size) for length in self.lens)

    @property
    def cache_bytes(self) -> int:
        """Bytes of one cache, with the unused rows of last pages."""
        return self.num_pages * self.page_size * self.token_bytes

    @property
    def floor_us(self) -> float:
        return floor_us(self.kv_bytes)

    @property
    def target_us(self) -> float:
        return target_us(self.kv_bytes)

    @property
    def slots(self) -> int:
        """Different caches that calls rotate over, so that each call finds L2 cold."""
        return 1 if self.kv_bytes >= SELF_EVICTING_BYTES else 2 + REUSE_BYTES // self.kv_bytes


def floor_us(kv_bytes: int) -> float:
    """Time to read the bytes at the roofline, in µs."""
    return kv_bytes / (ROOFLINE_TB_S * 1e6)


def target_us(kv_bytes: int) -> float:
    return TARGET_SLOPE * floor_us(kv_bytes) + TARGET_OFFSET_US


@functools.cache
def parse_lengths(batch: str) -> tuple[int, ...]:
    """The lengths that ``Shape.batch`` says.

    Raises:
        ValueError: not "<count>x<length>[K]" terms joined by "+", nor "<count>mixed".
    """
    if batch.endswith("mixed"):
        return mixed_lengths(int(batch.removesuffix("mixed")))
    lens: list[int] = []
    for term in batch.split("+"):
        count, _, length = term.partition("x")
        number = length.removesuffix("K")
        if not (count.isdecimal() and number.isdecimal()):
            raise ValueError(f"batch must be terms such as '16x8K' joined by '+', or '32mixed', got {batch!r}")
        lens += int(count) * [int(number) * (1024 if length.endswith("K") else 1)]
    return tuple(lens)


def mixed_lengths(count: int, shortest: int = 128, longest: int = 64 * 1024) -> tuple[int, ...]:
    """Log-uniform lengths, always the same."""
    generator = random.Random(7)
    low, high = math.log(shortest), math.log(longest)
    return tuple(round(math.exp(generator.uniform(low, high))) for _ in range(count))
