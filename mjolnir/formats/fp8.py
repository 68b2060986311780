"""fp8 e4m3 (OCP E4M3FN): s·eeee·mmm, bias 7, no Inf, one NaN per sign (0x7f, 0xff), largest value 448."""

from __future__ import annotations

import torch

from mjolnir.formats.base import KvFormat

_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


class Fp8Format(KvFormat):
    def _round(self, x: torch.Tensor) -> torch.Tensor:
        # Saturate by hand: the cast alone turns what rounds past 448 into NaN in older releases of torch.
        return x.clamp(-self.max_value, self.max_value).to(self.storage_dtype)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        self._check_codes(codes)
        if codes.is_cpu:  # looking the code up takes a sixth of the cast's time there
            index = codes.view(torch.uint8).int().flatten()
            return _VALUES.index_select(0, index).view(codes.shape)
        return codes.view(self.storage_dtype).float()


FP8 = Fp8Format(
    name="fp8",
    bits=8,
    storage_dtype=torch.float8_e4m3fn,
    accepted_dtypes=(torch.float8_e4m3fn, torch.uint8),  # serving engines keep fp8 caches as raw bytes
    max_value=448.0,
)
