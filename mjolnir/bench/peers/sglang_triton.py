"""SGLang's Triton kernel, with its default of at most 8 splits: bf16 Q, one query token."""

from __future__ import annotations

import dataclasses

import torch

from mjolnir.bench.case import Case
from mjolnir.bench.peers import Prepared
from mjolnir.bench.shapes import Shape

MAX_SPLITS = 8
H200_SMS = 132


@dataclasses.dataclass(frozen=True)
class SglangTriton:
    name: str = "sglang-triton"

    def refuses(self, shape: Shape) -> str | None:
        if shape.q_len > 1:
            return "one query token per sequence only"
        if shape.layout != "NHD":
            return "tokens of all heads must lie together (NHD)"
        return None

    def prepare(self, case: Case) -> Prepared:
        import triton
        from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
        from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

        shape, device, batch = case.shape, case.device, len(case.shape.lens)
        starts = torch.cat([case.seq_lens.new_zeros(1), case.seq_lens.cumsum(0)]).int()
        tokens = torch.arange(shape.page_size, device=device)
        slots = [
            (case.block_table[seq, : -(-length // shape.page_size), None].long() * shape.page_size + tokens).flatten()
            for seq, length in enumerate(shape.lens)
        ]
        indices = torch.cat([ids[:length] for ids, length in zip(slots, shape.lens, strict=True)])
        splits = torch.empty(batch, dtype=torch.int32, device=device)
        sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else H200_SMS

        get_num_kv_splits_triton[(1,)](
            splits,
            case.seq_lens,
            batch,
            1,
            shape.heads_q,
            shape.heads_kv,
            MAX_SPLITS,
            sms,
            MAX_NUM_SEQ=max(256, triton.next_power_of_2(batch)),
        )
        partials = torch.empty(batch, shape.heads_q, MAX_SPLITS, shape.head_dim, device=device)
        lse = torch.empty(batch, shape.heads_q, MAX_SPLITS, device=device)
        caches = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in case.caches]
        outs = [torch.empty_like(case.query) for _ in caches]

        def call(slot: int) -> torch.Tensor:
            k_cache, v_cache = caches[slot]
            decode_attention_fwd(
                case.query,
                k_cache,
                v_cache,
                outs[slot],
                starts,
                indices,
                partials,
                lse,
                splits,
                MAX_SPLITS,
                case.softmax_scale,
                1.0,
                1.0,
            )
            return outs[slot]

        return Prepared(call)
