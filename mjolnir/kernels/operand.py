"""How K or V lies in a stage of the ring."""

from __future__ import annotations

import dataclasses

from mjolnir.formats import KvFormat


@dataclasses.dataclass(frozen=True)
class Operand:
    """K or V of one tile. A panel is the part of a row that one shared-memory row holds (at most 128 bytes,
    which is what the TMA's swizzles are made for); panels lie one after the other, each with all tokens of the tile."""

    bits: int
    panel_bytes: int
    panels: int
    scale_bytes: int  # block scales of a row; 0: none

    @classmethod
    def of(cls, fmt: KvFormat, head_size: int) -> Operand:
        row_bytes = fmt.row_bytes(head_size)
        panels = -(-row_bytes // 128)
        return cls(fmt.bits, row_bytes // panels, panels, fmt.scale_width(head_size))

    @property
    def row_bytes(self) -> int:
        return self.panels * self.panel_bytes

    @property
    def panel_elems(self) -> int:
        return self.panel_bytes * 8 // self.bits

    @property
    def swizzle(self) -> int:
        """Bytes of the TMA's swizzle; 0: rows lie as they are (96, 48 and 32 bytes: see lanes.py)."""
        return self.panel_bytes if self.panel_bytes in (64, 128) else 0

    @property
    def k_unit(self) -> int:
        """Bytes of a K row that a lane unpacks at once. Six-bit codes come in 12 bytes at a time: a lane's quarter of
        a row is that or twice that."""
        quarter = self.panel_bytes // 4
        return quarter if self.bits == 6 else min(16, quarter)
