"""FlashInfer's XQA: bf16 Q, which its fp8 kernel rounds to fp8; both layouts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mjolnir.bench.case import Case
from mjolnir.bench.peers import Prepared
from mjolnir.bench.peers.modules import Modules
from mjolnir.bench.shapes import Shape
from mjolnir.formats import get_format

WORKSPACE_BYTES, SEMAPHORES = 256 << 20, 2 << 20
PAGE_SIZES = (16, 32, 64, 128)


@dataclasses.dataclass(frozen=True)
class Xqa:
    modules: Modules
    name: str = "xqa"

    def refuses(self, shape: Shape) -> str | None:
        return None if shape.page_size in PAGE_SIZES else f"pages of {', '.join(map(str, PAGE_SIZES))} tokens only"

    def module(self, shape: Shape) -> Any:
        from flashinfer.jit.xqa import gen_xqa_module

        kv_dtype = get_format(shape.kv_format).storage_dtype
        group = shape.heads_q // shape.heads_kv
        return gen_xqa_module(
            torch.bfloat16, kv_dtype, shape.page_size, shape.head_dim, group, False, torch.bfloat16, shape.q_len
        )

    def prepare(self, case: Case) -> Prepared:
        from flashinfer.xqa import xqa

        shape, batch = case.shape, len(case.shape.lens)
        self.modules.wait(self.module(shape))
        # New for each case: they must be zero, which a launch that failed may not have left them.
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=case.device)
        semaphores = torch.zeros(SEMAPHORES, dtype=torch.int32, device=case.device).view(torch.uint32)
        seq_lens = case.seq_lens.view(torch.uint32).unsqueeze(1)
        drafts: dict[str, Any] = {}
        query = case.query.view(batch, 1, shape.heads_q, shape.head_dim) if shape.q_len == 1 else None
        if query is None:
            from flashinfer.decode import _make_xqa_mtp_causal_mask

            query = case.query.view(batch, 1, shape.q_len, shape.heads_q, shape.head_dim)
            drafts = dict(q_seq_len=shape.q_len, mask=_make_xqa_mtp_causal_mask(batch, shape.q_len, case.device))
        caches = [case.in_memory_order(slot) for slot in range(shape.slots)]
        outs = [torch.empty_like(query) for _ in caches]

        def call(slot: int) -> torch.Tensor:
            k_cache, v_cache = caches[slot]
            # It multiplies by 1 / sqrt(head_dim) itself, which is the case's softmax_scale.
            xqa(
                query,
                k_cache,
                v_cache,
                case.block_table,
                seq_lens,
                outs[slot],
                workspace,
                semaphores,
                shape.heads_kv,
                shape.page_size,
                kv_layout=shape.layout,
                **drafts,
            )
            return outs[slot]

        return Prepared(call)
