"""bf16 and fp16: the IEEE cast, so values past the largest become Inf and Inf stays Inf."""

from __future__ import annotations

import torch

from mjolnir.formats.base import KvFormat


class HalfFormat(KvFormat):
    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.storage_dtype)

    def _unpack(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.float()


def _half(name: str, dtype: torch.dtype) -> HalfFormat:
    return HalfFormat(
        name=name, bits=16, storage_dtype=dtype, accepted_dtypes=(dtype,), max_value=torch.finfo(dtype).max
    )


BF16 = _half("bf16", torch.bfloat16)
FP16 = _half("fp16", torch.float16)
