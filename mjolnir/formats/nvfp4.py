"""nvfp4: e2m1 codes (OCP MX E2M1: s·ee·m, bias 1, no Inf, no NaN, values 0, 0.5, 1, 1.5, 2, 3, 4, 6), and one e4m3
block scale per 16 neighbouring elements of the head dimension.

A byte holds two codes, that of element 2i in its low nibble; a row of d elements is d/2 bytes, and has d/16 block
scales of one byte, in the same page or in a tensor of their own.
"""

from __future__ import annotations

import torch

from mjolnir.formats.base import KvFormat, over
from mjolnir.formats.fp8 import FP8

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 16

_VALUES = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])


class NvFp4Format(KvFormat):
    def block_scales(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """e4m3(amax / 6) of each block of x / scale: NaN elements do not count, and what is past 448 saturates."""
        blocks = self._divide(x, scale).unflatten(-1, (-1, BLOCK)).abs()
        amax = blocks.nan_to_num(nan=0.0, posinf=torch.inf).amax(-1)
        return FP8.encode(over(amax, self.max_value), torch.ones((), device=x.device))

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        magnitude = x.abs().nan_to_num(nan=self.max_value).clamp(max=self.max_value)
        # Steps of a half up to 2, of one up to 4, of two up to 6; torch.round takes ties to even, and so to even codes.
        code = torch.where(
            magnitude < 2,
            (magnitude * 2).round(),
            torch.where(magnitude < 4, magnitude.round() + 2, (magnitude / 2).round() + 4),
        ).int()
        code = code | (torch.signbit(x) & ~x.isnan()).int() << 3
        low, high = code.unflatten(-1, (-1, 2)).unbind(-1)
        return (low | high << 4).to(torch.uint8)

    def _unpack(self, codes: torch.Tensor) -> torch.Tensor:
        codes = codes.int()
        return _VALUES.to(codes.device)[torch.stack([codes & 0xF, codes >> 4], -1).flatten(-2)]


NVFP4 = NvFp4Format(
    name="nvfp4",
    bits=4,
    storage_dtype=torch.uint8,
    accepted_dtypes=(torch.uint8,),
    max_value=6.0,
    pack=BLOCK,
    block=BLOCK,
)
