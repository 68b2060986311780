"""One setting of the KV cache whose cost in quality is measured."""

from __future__ import annotations

import dataclasses

from mjolnir.calibration.scales import GRANULARITIES
from mjolnir.checks import check_choice
from mjolnir.formats import get_format

Q_MODES = ("bf16", "fp8")


@dataclasses.dataclass(frozen=True)
class Setting:
    """Formats of K and V, what shares a descale, and what Q is.

    Raises:
        ValueError: an unknown name.
    """

    k_format: str
    v_format: str
    granularity: str = "head"
    q_mode: str = "bf16"

    def __post_init__(self) -> None:
        get_format(self.k_format, "k_format")
        get_format(self.v_format, "v_format")
        check_choice("granularity", self.granularity, GRANULARITIES)
        check_choice("q_mode", self.q_mode, Q_MODES)

    @property
    def name(self) -> str:
        """As tables show it: "e2m3, per channel", "fp8 K, nvfp4 V", "fp8, fp8 Q"."""
        formats = self.k_format if self.k_format == self.v_format else f"{self.k_format} K, {self.v_format} V"
        scaled = any(get_format(name).bits < 16 for name in (self.k_format, self.v_format))
        shared = f", per {self.granularity}" if scaled and self.granularity != "head" else ""
        return formats + shared + (", fp8 Q" if self.q_mode == "fp8" else "")

    def bytes_per_token(self, num_layers: int, num_kv_heads: int, head_size: int) -> int:
        """Of K and V in all layers, block scales included."""
        formats = (get_format(self.k_format), get_format(self.v_format))
        rows = sum(fmt.row_bytes(head_size) + fmt.scale_width(head_size) for fmt in formats)
        return num_layers * num_kv_heads * rows


BF16 = Setting("bf16", "bf16")
"""What the others are compared with."""

STUDY = (
    BF16,
    Setting("fp8", "fp8"),
    Setting("fp8", "fp8", q_mode="fp8"),
    Setting("fp8_e5m2", "fp8_e5m2"),
    Setting("fp8", "e2m3"),
    Setting("e2m3", "e2m3", "tensor"),
    Setting("e2m3", "e2m3"),
    Setting("e2m3", "e2m3", "channel"),
    Setting("fp8", "nvfp4"),
    Setting("nvfp4", "fp8"),
    Setting("e2m3", "nvfp4", "channel"),
    Setting("nvfp4", "nvfp4"),
    Setting("nvfp4", "nvfp4", "channel"),
)
"""The committed study's."""
