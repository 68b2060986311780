"""A Problem through a DecodeRunner, for the tests that run on the reference backend and on the kernel alike.

On a GPU machine without the CuTe DSL the kernels come compiled: ``PYTHONPATH=. python tests/running.py FOLDER`` makes a
folder of those that the tests and ``mjolnir verify`` ask for. ``make_runner`` refuses, on every machine, to make a
runner that asks for another.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from helpers import Problem, make_paged_cache, make_query, make_scale

from mjolnir import DecodeRunner, catalogue
from mjolnir.backends.cute import kernel_variant
from mjolnir.signature import DTYPE_NAMES
from mjolnir.tuning import Tuning
from mjolnir.variant import ROW_CLASSES, Variant
from mjolnir.verify.compare import ROW_TOLERANCE, compare

ARCH = "sm_90a"
EDGES = (129, 0, 1, 15, 16, 17, 63, 64, 65, 127, 1000)
"""Tokens per sequence, around the edges of pages and tiles."""

_FP8 = [(128, rows) for rows in ROW_CLASSES] + [(64, rows) for rows in ROW_CLASSES] + [(256, r) for r in ROW_CLASSES]

LOW_BIT = ("e2m3", "nvfp4")
MIXED = (("fp8", "nvfp4"), ("e2m3", "fp8"), ("nvfp4", "e2m3"), ("bf16", "fp8"))

JOINED = ("tokens", "heads")
PANELS = tuple(kind for kind, joined in catalogue.JOINED.items() if "panels" in joined and kind[0] != "fp16")
MANY_SEQS = 256
"""Sequences for which a runner joins heads, however few KV heads there are."""

GPU_VARIANTS = (
    *(Variant(ARCH, "fp8", "bf16", "fp16", d, rows) for d, rows in _FP8),
    *(Variant(ARCH, "fp8", "bf16", "bf16", 128, rows) for rows in ROW_CLASSES),
    Variant(ARCH, "fp8", "bf16", "bf16", 64, 8),
    Variant(ARCH, "fp8", "bf16", "bf16", 256, 8),
    Variant(ARCH, "fp8", "fp16", "fp16", 128, 8),
    Variant(ARCH, "bf16", "bf16", "bf16", 128, 8),
    *(Variant(ARCH, "bf16", "bf16", "fp16", d, rows) for d, rows in ((64, 8), (128, 8), (128, 32), (256, 16))),
    Variant(ARCH, "bf16", "bf16", "fp16", 128, 8, q_split=True),
    Variant(ARCH, "bf16", "fp16", "fp16", 128, 8, q_split=True),
    *(Variant(ARCH, "fp16", "fp16", "fp16", d, rows) for d, rows in ((64, 16), (128, 8), (128, 64), (256, 8))),
    Variant(ARCH, "fp8", "bf16", "fp16", 128, 8, split=False),
    Variant(ARCH, "fp8", "bf16", "fp16", 64, 8, split=False),
    Variant(ARCH, "fp8", "bf16", "fp16", 128, 8, pdl=False),
    Variant(ARCH, "fp8", "bf16", "fp16", 128, 8, ctas_per_sm=1),
    Variant(ARCH, "fp8", "bf16", "fp16", 128, 8, stages=8),
    *(Variant(ARCH, fmt, "bf16", "fp16", 128, 8, l2_prefetch=True) for fmt in ("fp8", *LOW_BIT)),
    *(Variant(ARCH, fmt, "bf16", "fp16", d, rows) for fmt in LOW_BIT for d in (64, 128, 256) for rows in ROW_CLASSES),
    *(Variant(ARCH, fmt, "bf16", "bf16", 128, rows) for fmt in LOW_BIT for rows in (8, 16)),
    *(Variant(ARCH, fmt, "fp16", "fp16", 128, 8) for fmt in LOW_BIT),
    *(Variant(ARCH, fmt, "bf16", "fp16", 128, 8, split=False) for fmt in LOW_BIT),
    *(Variant(ARCH, k, "bf16", "fp16", d, 8, v_format=v) for k, v in MIXED for d in (64, 128)),
    *(Variant(ARCH, "fp8_e5m2", "bf16", "fp16", d, 8) for d in (64, 128)),
    *(Variant(ARCH, fmt, "bf16", "fp16", 128, 8, ctas_per_sm=ctas) for fmt in LOW_BIT for ctas in (1, 3)),
    *(Variant(ARCH, "fp8", "bf16", "fp16", 64, rows, joined=joined) for joined in JOINED for rows in ROW_CLASSES),
    *(Variant(ARCH, "fp8", "bf16", "bf16", 64, 8, joined=joined) for joined in JOINED),
    *(Variant(ARCH, "fp8", "bf16", "fp16", 64, 8, split=False, joined=joined) for joined in JOINED),
    *(Variant(ARCH, "nvfp4", "bf16", "fp16", 128, rows, joined="tokens") for rows in ROW_CLASSES),
    *(Variant(ARCH, fmt, "bf16", "fp16", d, 16, joined="panels") for fmt, d in PANELS),
    Variant(ARCH, "fp8", "bf16", "bf16", 128, 16, joined="panels"),
    Variant(ARCH, "fp8", "bf16", "fp16", 128, 16, split=False, joined="panels"),
    Variant(ARCH, "fp8", "bf16", "fp16", 128, 16, v_format="nvfp4", joined="panels"),
    *(
        Variant(ARCH, "e2m3", q, out, 128, 8, crowd=True)
        for q, out in (("bf16", "bf16"), ("bf16", "fp16"), ("fp16", "fp16"))
    ),
    *(Variant(ARCH, "e2m3", "bf16", "fp16", 128, 16, split, crowd=True, joined="panels") for split in (True, False)),
    Variant(ARCH, "e2m3", "bf16", "fp16", 128, 8, split=False, crowd=True),
)


def make_problem(
    lengths: Sequence[int],
    device: torch.device | str = "cpu",
    *,
    heads: int = 8,
    kv_heads: int = 2,
    head_size: int = 128,
    page_size: int = 64,
    q_len: int = 1,
    q_dtype: torch.dtype = torch.bfloat16,
    q_form: str = "dense",
    padding: int = 0,
    kv_format: str = "fp8",
    v_format: str | None = None,
    pool: str = "separate",
    scales: tuple[str, str] | None = None,
    causal: bool = True,
    seed: int = 0,
) -> Problem:
    """A random problem on ``device``; descales of 1 where ``scales`` names no kinds of K's and V's."""
    cache = make_paged_cache(
        lengths,
        num_kv_heads=kv_heads,
        head_size=head_size,
        page_size=page_size,
        kv_format=kv_format,
        v_format=v_format,
        pool=pool,
        device=device,
        seed=seed,
    )
    k_scale, v_scale = (
        torch.ones(1, device=device)
        if scales is None
        else make_scale(scales[which], len(lengths), kv_heads, device=device, seed=seed + which)
        for which in range(2)
    )
    tokens = len(lengths) * q_len + padding
    query = make_query(tokens, heads, head_size, dtype=q_dtype, form=q_form, device=device, seed=seed)
    return Problem(cache, query, q_len, k_scale, v_scale, head_size**-0.5, causal)


def variant_of(runner: DecodeRunner, problem: Problem, tuning: dict[str, Any]) -> Variant:
    """The kernel that the problem takes on an sm_90a GPU, whatever backend the runner has here."""
    two_terms = problem.query.dtype == torch.float16 or problem.q_mul is not None
    q_dtype = DTYPE_NAMES[problem.query.dtype]
    return kernel_variant(runner._shape, ARCH, Tuning(**tuning), problem.q_len, q_dtype, two_terms)


def make_runner(
    problem: Problem,
    out_dtype: torch.dtype = torch.float16,
    max_num_seqs: int | None = None,
    q_mode: str = "bf16",
    kv_layout: str | None = None,
    **tuning: Any,
) -> DecodeRunner:
    """The runner of a problem's shape. fp16 output by default: its rounding hides least."""
    _, page_size, num_kv_heads, _ = problem.cache.k_cache.shape
    head_size = problem.head_size
    runner = DecodeRunner(
        num_heads=problem.query[0].numel() // head_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        page_size=page_size,
        out_dtype=out_dtype,
        max_num_seqs=max_num_seqs or (MANY_SEQS if kv_layout else max(1, problem.num_seqs)),
        max_q_len=problem.q_len,
        q_mode=q_mode,
        kv_format=problem.cache.fmt.name,
        v_format=problem.cache.v_fmt.name if problem.cache.v_fmt else None,
        kv_layout=kv_layout,
        device=problem.query.device,
        **tuning,
    )
    variant = variant_of(runner, problem, tuning)
    assert variant in GPU_VARIANTS, f"{variant.name} is not among the kernels that GPU machines get compiled"
    return runner


def make_outputs(problem: Problem, runner: DecodeRunner) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE for every row of the query, full of NaN."""
    shape = (len(problem.query), runner.num_heads, runner.head_size)
    out = torch.full(shape, torch.nan, dtype=runner.out_dtype, device=problem.query.device)
    return out, torch.full(shape[:2], torch.nan, device=out.device)


def run(
    runner: DecodeRunner,
    problem: Problem,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    *,
    host_lens: Any = None,
    margin: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plan, for ``host_lens`` if given, and run; returns O and LSE, padding rows included."""
    made = make_outputs(problem, runner)
    out, lse = made[0] if out is None else out, made[1] if lse is None else lse
    cache = problem.cache
    lens = cache.seq_lens.tolist() if host_lens is None else host_lens
    plan = runner.plan(
        lens, problem.num_seqs, problem.q_len, cache.block_table, cache.seq_lens, margin, causal=problem.causal
    )
    launch(runner, plan, problem, out, lse)
    return out, lse


def launch(runner: DecodeRunner, plan: Any, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """One run of a plan that is there already."""
    cache = problem.cache
    runner.run(
        plan, problem.query, out, cache.k_cache, cache.v_cache, problem.k_scale, problem.v_scale,
        problem.softmax_scale, problem.q_mul, problem.o_mul, lse, cache.k_blocks, cache.v_blocks,
    )  # fmt: skip


def decode(
    problem: Problem, out_dtype: torch.dtype = torch.float16, **tuning: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE of a problem by a runner made for it."""
    return run(make_runner(problem, out_dtype, **tuning), problem)


def assert_oracle(problem: Problem, out: torch.Tensor, lse: torch.Tensor, row_tolerance: float = ROW_TOLERANCE) -> None:
    """O and LSE of the problem's tokens are the oracle's, within the tolerances of ``mjolnir.verify.compare``."""
    expected, expected_lse = problem.oracle()
    tokens = len(expected)
    out = out[:tokens].reshape(expected.shape)
    faults = compare(out, lse[:tokens], expected, expected_lse).faults(out.dtype, row_tolerance)
    assert not faults, "; ".join(faults)


def assert_decodes(
    problem: Problem, out_dtype: torch.dtype = torch.float16, row_tolerance: float = ROW_TOLERANCE, **tuning: Any
) -> None:
    """A runner made for the problem gives the oracle's O and LSE."""
    assert_oracle(problem, *decode(problem, out_dtype, **tuning), row_tolerance)


def _compile(folder: Path) -> int:
    from mjolnir.compiler import compile_to_folder

    results = compile_to_folder(GPU_VARIANTS, folder)
    for result in results:
        print(f"{result.variant.name}: {result.error or 'ok'}")
    return sum(not result.ok for result in results)


if __name__ == "__main__":
    sys.exit(_compile(Path(sys.argv[1])) if len(sys.argv) == 2 else f"usage: python {sys.argv[0]} FOLDER")
