"""vLLM's Triton kernel, set up as its Triton backend does: fp8 Q over fp8 KV, bf16 Q over bf16 KV."""

from __future__ import annotations

import dataclasses

import torch

from mjolnir.bench.case import Case
from mjolnir.bench.peers import Prepared
from mjolnir.bench.shapes import Shape

SEGMENTS = 16
"""Splits of a sequence."""

MIN_PROGRAMS = 128
"""It splits sequences where sequences × KV heads are no more than these."""


@dataclasses.dataclass(frozen=True)
class VllmTriton:
    name: str = "vllm-triton"

    def refuses(self, shape: Shape) -> str | None:
        return None

    def prepare(self, case: Case) -> Prepared:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
        from vllm.v1.kv_cache_interface import KVQuantMode

        shape, device, batch = case.shape, case.device, len(case.shape.lens)
        fp8 = shape.kv_format == "fp8"
        mode = KVQuantMode.FP8_PER_TENSOR if fp8 else KVQuantMode.NONE
        query = case.query.to(torch.float8_e4m3fn) if fp8 else case.query  # rounding is not timed
        query_starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * shape.q_len
        threshold = MIN_PROGRAMS // shape.heads_kv
        rows = threshold * shape.q_len
        segments = torch.empty(rows, shape.heads_q, SEGMENTS, shape.head_dim, device=device)
        maxima = torch.empty(rows, shape.heads_q, SEGMENTS, device=device)
        sums = torch.empty_like(maxima)
        descale = case.one.expand(batch, shape.heads_kv)
        outs = [torch.empty_like(case.query) for _ in case.caches]

        def call(slot: int) -> torch.Tensor:
            k_cache, v_cache = case.caches[slot]
            unified_attention(
                q=query,
                k=k_cache,
                v=v_cache,
                out=outs[slot],
                cu_seqlens_q=query_starts,
                max_seqlen_q=shape.q_len,
                seqused_k=case.seq_lens,
                max_seqlen_k=max(shape.lens),
                softmax_scale=case.softmax_scale,
                causal=True,
                window_size=(-1, -1),
                block_table=case.block_table,
                softcap=0.0,
                q_descale=case.one if fp8 else None,
                k_descale=descale,
                v_descale=descale,
                seq_threshold_3D=threshold,
                num_par_softmax_segments=SEGMENTS,
                softmax_segm_output=segments,
                softmax_segm_max=maxima,
                softmax_segm_expsum=sums,
                kv_quant_mode=mode,
            )
            return outs[slot]

        return Prepared(call)
