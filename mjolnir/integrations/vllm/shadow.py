"""Decode results against the fp64 oracle, while serving: a check for doubt, not for speed.

A checked layer copies the pages of two sequences to the host and computes them from the definition.
"""

from __future__ import annotations

import itertools

import torch

from mjolnir.calibration.scales import LayerScales
from mjolnir.integrations.vllm.counters import COUNTERS
from mjolnir.integrations.vllm.log import logger
from mjolnir.integrations.vllm.own_cache import Views
from mjolnir.reference import decode_attention_oracle
from mjolnir.runner import StepPlan
from mjolnir.verify.compare import compare

SEQS_PER_CHECK = 2
CHECKED, DIFFERS = "shadow check", "shadow check failed"

_turn = itertools.count()


def check(
    plan: StepPlan,
    query: torch.Tensor,
    out: torch.Tensor,
    views: Views,
    scales: LayerScales,
    softmax_scale: float,
    layer_name: str,
) -> None:
    """Compare what ``DecodeRunner.run`` has just done for two of its sequences, which move on from check to check.

    Takes that call's arguments and its result, out of shape (tokens, h_q, d). Counts the check; where a bound of
    ``mjolnir verify`` is exceeded, counts that and logs an error.
    """
    first = next(_turn) * SEQS_PER_CHECK
    fmt = plan.runner.kv_format
    for seq in sorted({(first + i) % plan.num_seqs for i in range(min(SEQS_PER_CHECK, plan.num_seqs))}):
        length = int(plan.seq_lens[seq])
        pages = plan.block_table[seq, : -(-length // plan.runner.page_size)].long()
        rows = slice(seq * plan.q_len, (seq + 1) * plan.q_len)
        expected, lse = decode_attention_oracle(
            query[rows].cpu(),
            views.k[pages].view(fmt.storage_dtype).cpu(),
            views.v[pages].view(fmt.storage_dtype).cpu(),
            _of_sequence(scales.k_scale, seq).cpu(),
            _of_sequence(scales.v_scale, seq).cpu(),
            torch.arange(len(pages)).view(1, -1),
            torch.tensor([length]),
            q_len=plan.q_len,
            softmax_scale=softmax_scale,
            causal=plan.causal,
            kv_format=fmt.name,
            k_block_scale=None if views.k_blocks is None else views.k_blocks[pages].cpu(),
            v_block_scale=None if views.v_blocks is None else views.v_blocks[pages].cpu(),
            q_mul=None if scales.q_mul is None else scales.q_mul.cpu(),
            o_mul=None if scales.o_mul is None else scales.o_mul.cpu(),
        )
        faults = compare(out[rows].cpu(), lse, expected, lse).faults(out.dtype)
        COUNTERS.record(CHECKED)
        if faults:
            COUNTERS.record(DIFFERS)
            logger.error("mjolnir: %s, sequence %d of %d tokens: %s", layer_name, seq, length, "; ".join(faults))


def _of_sequence(scale: torch.Tensor, seq: int) -> torch.Tensor:
    return scale[seq : seq + 1] if scale.dim() == 2 and scale.numel() > 1 else scale
