"""FlashInfer's FA2 kernel: the decode wrapper with tensor cores, bf16 Q over fp8 or bf16 KV, in both layouts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from mjolnir.bench.case import Case
from mjolnir.bench.peers import Prepared
from mjolnir.bench.peers.modules import Modules
from mjolnir.bench.shapes import Shape
from mjolnir.formats import get_format

WORKSPACE_BYTES = 512 << 20


@dataclasses.dataclass(frozen=True)
class FlashInferFa2:
    modules: Modules
    name: str = "fa2"

    def refuses(self, shape: Shape) -> str | None:
        return None

    def module(self, shape: Shape) -> Any:
        from flashinfer.jit.attention.modules import _gen_batch_prefill_primary_module

        kv_dtype, bf16 = get_format(shape.kv_format).storage_dtype, torch.bfloat16
        d = shape.head_dim
        # No positional encoding, window, soft cap, fp16 reduction of QK, or scales per token.
        return _gen_batch_prefill_primary_module(
            "fa2", bf16, kv_dtype, bf16, torch.int32, d, d, 0, False, False, False, False
        )

    def prepare(self, case: Case) -> Prepared:
        import flashinfer

        shape = case.shape
        self.modules.wait(self.module(shape))
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(case.device), shape.layout, use_tensor_cores=True, backend="fa2"
        )
        pages_of = torch.tensor([-(-length // shape.page_size) for length in shape.lens])
        indptr = torch.cat([torch.zeros(1, dtype=torch.int64), pages_of.cumsum(0)]).int()
        indices = torch.cat([case.block_table[seq, :pages] for seq, pages in enumerate(pages_of.tolist())])
        last_page_len = torch.tensor([(length - 1) % shape.page_size + 1 for length in shape.lens]).int()

        wrapper.plan(
            indptr,
            indices,
            last_page_len,
            shape.heads_q,
            shape.heads_kv,
            shape.head_dim,
            shape.page_size,
            pos_encoding_mode="NONE",
            q_data_type=torch.bfloat16,
            kv_data_type=get_format(shape.kv_format).storage_dtype,
            o_data_type=torch.bfloat16,
            sm_scale=case.softmax_scale,
            q_len_per_req=shape.q_len,
        )
        caches = [case.in_memory_order(slot) for slot in range(shape.slots)]
        outs = [torch.empty_like(case.query) for _ in caches]

        def call(slot: int) -> torch.Tensor:
            wrapper.run(case.query, caches[slot], out=outs[slot])
            return outs[slot]

        return Prepared(call)


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
