"""FlashAttention 3: fp8 Q over fp8 KV, bf16 Q over bf16 KV; the split counts are planned once per step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from mjolnir.bench.case import Case
from mjolnir.bench.peers import Prepared
from mjolnir.bench.shapes import Shape
from mjolnir.formats import get_format


@dataclasses.dataclass(frozen=True)
class FlashAttention3:
    """``library``: its PyTorch operators."""

    library: Path
    name: str = "fa3"

    def refuses(self, shape: Shape) -> str | None:
        if shape.head_dim == 64 and shape.kv_format == "fp8":
            return "ends the process at head size 64 in fp8 (CUTLASS error in flash_fwd_combine, Error Internal)"
        return None

    def prepare(self, case: Case) -> Prepared:
        torch.ops.load_library(str(self.library))  # once: PyTorch keeps a list
        ops = torch.ops.flash_attn_3
        shape, batch = case.shape, len(case.shape.lens)
        fp8 = shape.kv_format == "fp8"
        dtype = get_format(shape.kv_format).storage_dtype
        # Rounding Q is not timed; its error is in the peer's.
        query = case.query.to(dtype).view(batch, shape.q_len, shape.heads_q, shape.head_dim)
        descale = torch.ones(batch, shape.heads_kv, device=case.device) if fp8 else None
        causal = shape.q_len > 1
        metadata = ops.get_scheduler_metadata(
            batch,
            shape.q_len,
            case.block_table.shape[1] * shape.page_size,
            shape.heads_q,
            shape.heads_kv,
            shape.head_dim,
            shape.head_dim,
            dtype,
            case.seq_lens,
            page_size=shape.page_size,
            is_causal=causal,
        )

        def call(slot: int) -> torch.Tensor:
            k_cache, v_cache = case.caches[slot]
            return ops.fwd(
                query,
                k_cache,
                v_cache,
                seqused_k=case.seq_lens,
                page_table=case.block_table,
                q_descale=descale,
                k_descale=descale,
                v_descale=descale,
                softmax_scale=case.softmax_scale,
                is_causal=causal,
                scheduler_metadata=metadata,
                num_splits=0,
            )[0]

        return Prepared(call)
