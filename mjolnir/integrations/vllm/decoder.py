"""What one metadata builder keeps of Mjolnir: a runner per shape of layer, and the plan of each step."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mjolnir.backends import REFERENCE
from mjolnir.integrations.vllm import own_cache
from mjolnir.integrations.vllm.eligibility import OWN_NAMES, LayerShape
from mjolnir.integrations.vllm.steps import DecodePart, ragged_rows
from mjolnir.runner import DecodeRunner, StepPlan


@dataclasses.dataclass
class Step:
    """What the builder hands to the layers, on the fallback's metadata.

    Attributes:
        plans: by shape of layer.
        part: the requests that decode.
        one: fp32, the descale of 16-bit caches; made before any capture, so that no graph has to fill it.
        gather, scatter: of ``ragged_rows``, on the device; None where all requests have one q_len.
        rest: the fallback's metadata of the requests that follow; None where none do.
        is_shadowed: the layers compare their results with the oracle's.
    """

    plans: dict[LayerShape, StepPlan]
    part: DecodePart
    one: torch.Tensor
    gather: torch.Tensor | None = None
    scatter: torch.Tensor | None = None
    rest: Any = None
    is_shadowed: bool = False


class GroupDecoder:
    """Runners and plans of one builder; the plans' fixed buffers are what a captured graph reads.

    Args:
        shapes: of the layers that decode here.
        page_size: tokens per page.
        max_num_seqs: most requests of a step.
        max_q_len: most query tokens of a request that decodes; what the kernel takes caps it.
        margin: tokens by which sequences may grow between a plan and its last run, as in fused draft steps.
        device: where the cache lies. On "cpu" the reference backend runs.
    """

    def __init__(
        self,
        shapes: list[LayerShape],
        *,
        page_size: int,
        max_num_seqs: int,
        max_q_len: int,
        margin: int,
        device: torch.device,
    ) -> None:
        self.max_num_seqs, self.margin, self.device = max_num_seqs, margin, device
        self.one = torch.ones(1, dtype=torch.float32, device=device)
        self.max_q_len = min(max_q_len, *(shape.max_q_len for shape in shapes))
        self.runners = {
            shape: DecodeRunner(
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_size=shape.head_size,
                page_size=page_size,
                out_dtype=shape.dtype,
                max_num_seqs=max_num_seqs,
                max_q_len=self.max_q_len,
                kv_format=shape.kv_format,
                kv_layout=own_cache.KV_LAYOUT if shape.kv_format in OWN_NAMES else None,  # vLLM's own rows hold K and V
                device=device,
            )
            for shape in shapes
        }
        for runner in self.runners.values():
            if runner.backend == REFERENCE and device.type != "cpu":
                raise RuntimeError(runner.backend_reason)
            # Before the first step: nothing may compile while a graph is captured.
            runner.precompile()

    def plan(self, part: DecodePart, block_table: torch.Tensor, seq_lens: torch.Tensor) -> Step:
        """Plan a step from its lengths on the device: one launch per shape, and for a ragged step one copy."""
        step = Step(self._plans(part, block_table, seq_lens), part, self.one)
        if part.query_lens is not None:
            step.gather, step.scatter = (self._to_device(rows) for rows in ragged_rows(part.query_lens, part.q_len))
        return step

    def replan(self, step: Step) -> Step:
        """The same step, from the lengths as they are now; a graph may capture it."""
        old = next(iter(step.plans.values()))
        return dataclasses.replace(step, plans=self._plans(step.part, old.block_table, old.seq_lens))

    def _plans(self, part: DecodePart, block_table: torch.Tensor, seq_lens: torch.Tensor) -> dict[LayerShape, StepPlan]:
        return {
            shape: runner.plan(None, part.num_seqs, part.q_len, block_table, seq_lens, margin=self.margin)
            for shape, runner in self.runners.items()
        }

    def _to_device(self, rows: Any) -> torch.Tensor:
        host = torch.from_numpy(rows)
        return host if self.device.type == "cpu" else host.pin_memory().to(self.device, non_blocking=True)
