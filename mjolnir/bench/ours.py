"""Mjolnir behind the protocol of peers.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mjolnir.backends import CUTE
from mjolnir.backends.cute import kernel_variant
from mjolnir.bench.case import Case
from mjolnir.bench.peers import Prepared
from mjolnir.bench.shapes import Shape
from mjolnir.runner import DecodeRunner
from mjolnir.signature import RunnerShape
from mjolnir.tuning import Tuning
from mjolnir.variant import Variant


@dataclasses.dataclass(frozen=True)
class Knobs:
    """Arguments of ``DecodeRunner`` that ``mjolnir bench`` passes on."""

    ctas_per_sm: int | None = None
    max_splits: int | None = None
    kv_stages: int | None = None
    pdl: bool = True
    l2_prefetch: int = 0
    q_mode: str = "bf16"

    def as_arguments(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def tuning(self) -> Tuning:
        """What of them decides the kernel: Q's mode does not."""
        arguments = self.as_arguments()
        del arguments["q_mode"]
        return Tuning(**arguments)


@dataclasses.dataclass(frozen=True)
class Mjolnir:
    """``require_kernels`` False also times the reference backend, which only tests want."""

    knobs: Knobs = dataclasses.field(default_factory=Knobs)
    require_kernels: bool = True
    name: str = "mjolnir"

    def refuses(self, shape: Shape) -> str | None:
        return None

    def prepare(self, case: Case) -> Prepared:
        shape = case.shape
        runner = DecodeRunner(
            num_heads=shape.heads_q,
            num_kv_heads=shape.heads_kv,
            head_size=shape.head_dim,
            page_size=shape.page_size,
            out_dtype=torch.bfloat16,
            max_num_seqs=len(shape.lens),
            max_q_len=shape.q_len,
            kv_format=shape.kv_format,
            kv_layout=shape.layout,
            device=case.device,
            fixed_split=shape.fixed_split or None,
            max_step_tokens=sum(shape.lens) if shape.fixed_split else None,
            **self.knobs.as_arguments(),
        )
        if self.require_kernels and runner.backend != CUTE:
            raise RuntimeError(f"only compiled kernels are worth timing, got {runner.backend}: {runner.backend_reason}")
        runner.ensure_compiled(shape.q_len)
        lens = list(shape.lens)
        outs = [torch.empty_like(case.query) for _ in case.caches]

        def make_plan() -> Any:
            return runner.plan(lens, len(lens), shape.q_len, case.block_table, case.seq_lens)

        plan = make_plan()

        def call(slot: int) -> torch.Tensor:
            k_cache, v_cache = case.caches[slot]
            out = outs[slot]
            k_blocks, v_blocks = (None, None) if case.block_scales is None else case.block_scales[slot]
            runner.run(
                plan, case.query, out, k_cache, v_cache, case.one, case.one, case.softmax_scale,
                k_block_scale=k_blocks, v_block_scale=v_blocks,
            )  # fmt: skip
            return out

        return Prepared(call, make_plan)


def variant_of(shape: Shape, arch: str, knobs: Knobs) -> Variant:
    """The kernel that ``Mjolnir`` runs for a shape, found without a GPU."""
    runner = RunnerShape(
        shape.heads_q, shape.heads_kv, shape.head_dim, shape.page_size, torch.bfloat16, shape.kv_format,
        kv_layout=shape.layout, max_num_seqs=len(shape.lens),
    )  # fmt: skip
    return kernel_variant(runner, arch, knobs.tuning(), shape.q_len, "bf16")
