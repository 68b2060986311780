"""How K or V lies in a stage of the ring."""

from __future__ import annotations

import dataclasses

from mjolnir.formats import KvFormat


@dataclasses.dataclass(frozen=True)
class Operand:
    """K or V of one tile. A panel is the part of a row that one shared-memory row holds (at most 128 bytes,
    which is what the TMA's swizzles are made for); panels lie one after the other, each with all tokens of the tile.

    Of two heads that are read together, narrower rows lie beside each other, as in memory (``paired``): the TMA takes
    a line of 128 bytes per 4 clocks and SM, so that asking for each line once is what keeps up with the memory."""

    bits: int
    panel_bytes: int
    panels: int
    scale_bytes: int  # block scales of a row; 0: none
    paired: bool = False

    @classmethod
    def of(cls, fmt: KvFormat, head_size: int, sides: int = 1) -> Operand:
        row_bytes = fmt.row_bytes(head_size)
        panels = -(-row_bytes // 128)
        paired = sides == 2 and row_bytes < 128
        return cls(fmt.bits, row_bytes // panels, panels, fmt.scale_width(head_size), paired)

    @property
    def row_bytes(self) -> int:
        return self.panels * self.panel_bytes

    @property
    def stride(self) -> int:
        """Bytes from a token's row in shared memory to the next one's."""
        return self.panel_bytes * (2 if self.paired else 1)

    @property
    def panel_elems(self) -> int:
        return self.panel_bytes * 8 // self.bits

    @property
    def swizzle(self) -> int:
        """Bytes of the TMA's swizzle; 0: rows lie as they are (other sizes: see lanes.py)."""
        return self.stride if self.stride in (64, 128) else 0

    @property
    def flat_rows(self) -> int:
        """Of 256 bytes, that 16 tokens' rows make where they lie one after the other; 0 where a swizzle or a second
        panel needs rows as they are."""
        return 0 if self.swizzle or self.panels > 1 else self.row_bytes * 16 // 256

    @property
    def k_unit(self) -> int:
        """Bytes of a K row that a lane unpacks at once. Six-bit codes come in 12 bytes at a time: a lane's quarter of
        a row is that or twice that."""
        quarter = self.panel_bytes // 4
        return quarter if self.bits == 6 else min(16, quarter)
