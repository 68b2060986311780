"""fp8: e4m3 (OCP E4M3FN: bias 7, no Inf, one NaN per sign, largest value 448) and e5m2 (OCP E5M2: bias 15, Inf and NaN
as in IEEE, largest finite value 57344)."""

from __future__ import annotations

import functools

import torch

from mjolnir.formats.base import KvFormat


@functools.cache
def _values(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


class Fp8Format(KvFormat):
    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        # Saturate by hand: the cast alone turns what rounds past the largest value into NaN or Inf.
        return x.clamp(-self.max_value, self.max_value).to(self.storage_dtype)

    def _unpack(self, codes: torch.Tensor) -> torch.Tensor:
        if codes.is_cpu:  # looking the code up takes a sixth of the cast's time there
            index = codes.view(torch.uint8).int().flatten()
            return _values(self.storage_dtype).index_select(0, index).view(codes.shape)
        return codes.view(self.storage_dtype).float()


def _fp8(name: str, dtype: torch.dtype) -> Fp8Format:
    # Serving engines keep fp8 caches as raw bytes.
    return Fp8Format(name=name, bits=8, storage_dtype=dtype, accepted_dtypes=(dtype, torch.uint8),
                     max_value=torch.finfo(dtype).max)  # fmt: skip


FP8 = _fp8("fp8", torch.float8_e4m3fn)
FP8_E5M2 = _fp8("fp8_e5m2", torch.float8_e5m2)
