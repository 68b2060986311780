"""e2m3 (OCP MX E2M3): s·ee·mmm in six bits, bias 1, no Inf, no NaN, values 0, 1/8 … 7.5.

Four codes c0 … c3 of neighbouring elements are one little-endian 24-bit group c0 | c1 << 6 | c2 << 12 | c3 << 18: three
bytes, and a row of d elements is 3d/4 bytes.
"""

from __future__ import annotations

import torch

from mjolnir.formats.base import KvFormat

TO_E4M3 = 2.0**-6
"""An e2m3 value times this is the e4m3 value of the byte s·00ee·mmm, subnormals included: e4m3's exponent has a bias of
7, e2m3's of 1, and both have three bits of mantissa."""

CODES = 4
GROUP_BYTES = 3

_VALUES = torch.cat([torch.arange(32, dtype=torch.uint8), torch.arange(128, 160, dtype=torch.uint8)]).view(
    torch.float8_e4m3fn
).float() / TO_E4M3  # fmt: skip


class E2M3Format(KvFormat):
    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        x = x.nan_to_num(nan=self.max_value).clamp(-self.max_value, self.max_value)
        byte = (x * TO_E4M3).to(torch.float8_e4m3fn).view(torch.uint8).int()
        code = (byte >> 2 & 0x20 | byte & 0x1F).unflatten(-1, (-1, CODES))
        shift = torch.arange(CODES, device=x.device) * 6
        group = (code << shift).sum(-1, dtype=torch.int32)
        return torch.stack([group >> 8 * i & 0xFF for i in range(GROUP_BYTES)], -1).flatten(-2).to(torch.uint8)

    def _unpack(self, codes: torch.Tensor) -> torch.Tensor:
        low, middle, high = codes.int().unflatten(-1, (-1, GROUP_BYTES)).unbind(-1)
        group = low | middle << 8 | high << 16
        code = torch.stack([group >> 6 * i & 0x3F for i in range(CODES)], -1).flatten(-2)
        return _VALUES.to(codes.device)[code]


E2M3 = E2M3Format(
    name="e2m3",
    bits=6,
    storage_dtype=torch.uint8,
    accepted_dtypes=(torch.uint8,),
    max_value=7.5,
    pack=CODES,
)
