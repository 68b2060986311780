"""Two KV heads that are joined, as one row or side by side, where each q row has a head of its own: what becomes of Q,
and what is written of O and LSE. The kernel's own text, in NumPy."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mjolnir.compiler.build import dsl_missing_reason

if dsl_missing_reason():
    pytest.skip(dsl_missing_reason() or "", allow_module_level=True)

from test_tile import lay_out, random_rows
from warp import LANE, G, T, Warp, jit_method

from mjolnir.formats import get_format
from mjolnir.kernels import consumer, epilogue, heads, ptx
from mjolnir.kernels.choice import geometry_of
from mjolnir.kernels.consumer import LOG2_E, Consumer
from mjolnir.kernels.epilogue import LN_2, Epilogue
from mjolnir.kernels.geometry import Geometry
from mjolnir.kernels.softmax import P_BIAS
from mjolnir.kernels.tile import TileMath
from mjolnir.variant import Variant, rows_class

SEQ, SEQS = 1, 3
Shape = tuple[str, int, int, int, int]
SHAPES: list[Shape] = [  # what is joined, head size, query heads, KV heads, q_len
    *(("heads", 64, *sizes) for sizes in ((8, 2, 1), (9, 3, 1), (9, 3, 2), (5, 5, 3), (16, 2, 1), (24, 3, 2))),
    *(("panels", 128, *sizes) for sizes in ((8, 2, 1), (9, 3, 1), (9, 3, 2), (5, 5, 3), (16, 2, 1), (8, 2, 2))),
]


def make(joined: str, d: int, num_heads: int, kv_heads: int, q_len: int) -> tuple[Geometry, Variant, SimpleNamespace]:
    """The kernel of a shape, and its arguments but for addresses."""
    group = num_heads // kv_heads * (2 if joined == "heads" else 1)
    rows = 16 if joined == "panels" else rows_class(q_len * group)
    variant = Variant("sm_90a", "fp8", "bf16", "fp16", d, rows, joined=joined)
    args = SimpleNamespace(
        q_len=q_len, group=group, num_kv_heads=-(-kv_heads // 2), real_kv_heads=kv_heads, softmax_scale=0.25,
        q_token_stride=num_heads * d + 16, q_head_stride=d, out_token_stride=num_heads * d, out_head_stride=d,
        lse_token_stride=num_heads, k_scale_seq_stride=kv_heads, k_scale_head_stride=1, v_scale_seq_stride=kv_heads,
        v_scale_head_stride=1,
    )  # fmt: skip
    return geometry_of(variant), variant, args


def own_head(joined: str, args: SimpleNamespace, pair: int, row: int) -> tuple[int, int, int] | None:
    """(token of the sequence, query head, KV head) of a q row; None of a dead one."""
    if joined == "panels":
        kv_head, row = 2 * pair + row // 8, row % 8
        token, head = row // args.group, kv_head * args.group + row % args.group
    else:
        token, head = divmod(row, args.group)
        head += pair * args.group
        kv_head = head // (args.group // 2)
    return None if token >= args.q_len or kv_head >= args.real_kv_heads else (token, head, kv_head)


def test_the_geometry_is_that_of_twice_the_head_size() -> None:
    joined, variant, _ = make("heads", 64, 8, 2, 1)
    double = geometry_of(Variant("sm_90a", "fp8", "bf16", "fp16", 128, variant.rows))
    assert joined.k == double.k and joined.smem_bytes == double.smem_bytes and joined.partial_floats == 8 * 128 * 2


def test_side_by_side_a_stage_holds_two_tiles() -> None:
    """Of 64 tokens each, like that of a head alone, in half as many stages."""
    panels, _, _ = make("panels", 128, 8, 2, 1)
    alone = geometry_of(Variant("sm_90a", "fp8", "bf16", "fp16", 128, 8))
    assert (panels.tile, panels.stage_bytes, panels.v_in_stage) == (64, 2 * alone.stage_bytes, 2 * 64 * 128)
    assert (panels.stages, panels.kv_groups, panels.row_groups, panels.rows_per_warp) == (2, 2, 2, 8)
    assert (panels.k, panels.v, panels.head_size) == (alone.k, alone.v, 128)


@pytest.mark.parametrize("factors", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores_are_of_a_rows_own_head(monkeypatch: pytest.MonkeyPatch, shape: Shape, factors: bool) -> None:
    """Exactly: nothing of the other head shows in them. Those of dead rows are 0."""
    joined, D, num_heads, kv_heads, _ = shape  # noqa: N806
    geo, variant, args = make(*shape)
    gen = torch.Generator().manual_seed(num_heads)
    warp = Warp(geo.smem_bytes)
    warp.install(monkeypatch)
    monkeypatch.setattr(heads, "Int32", np.int64)
    monkeypatch.setattr(consumer, "Int64", np.int64)
    query = torch.randint(-8, 9, (SEQS * args.q_len, num_heads, D), generator=gen).float()
    k_scale = 2.0 ** torch.randint(-3, 4, (SEQS, kv_heads), generator=gen) * (1 - 2 * (torch.arange(kv_heads) % 2))
    q_mul = 2.0 ** torch.randint(-1, 2, (num_heads, D), generator=gen)
    rows = torch.full((SEQS * args.q_len, args.q_token_stride), math.nan)
    rows[:, : num_heads * D] = query.flatten(1)
    parts = [rows.bfloat16().view(torch.uint8), k_scale.view(torch.uint8), q_mul.float().view(torch.uint8)]
    args.q, args.k_scale, args.q_mul = (sum(part.numel() for part in parts[:i]) for i in range(3))
    assert args.k_scale % 16 == 0
    pad = -k_scale.numel() * 4 % 16
    args.q_mul = args.q_mul + pad if factors else 0
    parts.insert(2, torch.zeros(pad, dtype=torch.uint8))
    warp.gmem = torch.cat([part.flatten() for part in parts]).numpy()
    if factors:
        query = query * q_mul

    stand_in = SimpleNamespace(geo=geo, variant=variant, math=TileMath(variant, geo))
    for name in ("own_quarter", "q_address", "place", "q_frags"):
        setattr(stand_in, name, getattr(Consumer, name).__get__(stand_in))
    stand_in.to_mult = jit_method(Consumer, "to_mult").__get__(stand_in)
    stand_in.score_factor = lambda *a: Consumer.score_factor(stand_in, *a)  # type: ignore[arg-type]
    read_q = jit_method(Consumer, "read_q")
    fmt = get_format("fp8")
    for pair, row_group in itertools.product(range(args.num_kv_heads), range(geo.row_groups)):
        codes = np.zeros((geo.tile, 2 * D), np.uint8)
        keys = np.zeros((geo.tile, 2, D))
        for half in range(min(2, kv_heads - 2 * pair)):
            codes[:, half * D : (half + 1) * D], _, keys[:, half] = random_rows(fmt, geo.tile, D, gen)
        k_tile = row_group * geo.tile * D if joined == "panels" else 0
        for side in range(geo.sides):
            lay_out(warp.smem, side * geo.tile * D, geo.k, codes[:, side * D :] if joined == "panels" else codes)
        row0, frags = row_group * geo.rows_per_warp, geo.q_offset + row_group * geo.q_warp_bytes + LANE * 16
        mult = read_q(stand_in, args, 0, row_group, LANE, SEQ, pair, 0)
        scores = stand_in.math.scores(k_tile, geo.scales_offset, frags, G, T)
        for n, e, lane in itertools.product(range(geo.row_tiles), range(2), range(32)):
            row = row0 + n * 8 + 2 * T[lane] + e
            own = own_head(joined, args, pair, row)
            for i in range(geo.warp_tile // 8):
                s = scores[n][2 * i + e][lane]
                if own is None:
                    assert s == 0
                    continue
                token, head, kv_head = own
                dot = query[SEQ * args.q_len + token, head].double().numpy() @ keys[8 * i + G[lane], kv_head % 2]
                wanted = dot * 0.25 * k_scale[SEQ, kv_head].item()
                assert s * mult[2 * n + e][lane] == pytest.approx(wanted * LOG2_E, rel=1e-12)


@pytest.mark.parametrize("paired", [0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_element_is_written_once(monkeypatch: pytest.MonkeyPatch, shape: Shape, paired: int) -> None:
    """By the threads of one CTA, or of both halves: O of a row's own head, with that head's V descale and factors, and
    its LSE."""
    joined, D, num_heads, kv_heads, _ = shape  # noqa: N806
    geo, variant, args = make(*shape)
    if paired > geo.halves - 1:
        pytest.skip("halves are of CTAs with one row group")
    values = np.random.default_rng(0)
    o = values.normal(size=(geo.rows, geo.head_size))
    l, m = values.uniform(1, 9, (2, geo.rows))  # noqa: E741
    v_scale, o_mul = values.uniform(1, 2, (SEQS, kv_heads)), values.uniform(1, 2, (num_heads, D))
    args.out, args.lse, args.v_scale, args.o_mul = 0, 1 << 40, 1 << 41, 1 << 42
    stored: dict[int, float] = {}

    def store(address: int, *given: float) -> None:
        for i, value in enumerate(given):
            assert address + i not in stored, "written twice"
            stored[address + i] = value

    for name, stand_in in {
        "ldg_f32": lambda at: v_scale.flat[(at - args.v_scale) // 4],
        "ldg_f32x4": lambda at: o_mul.flat[(at - args.o_mul) // 4 :][:4],
        "pack_f16x2": lambda a, b: (a, b),
        "stg_b64": lambda at, low, high: store(at // 2, *low, *high),
        "stg_f32": lambda at, x: store(args.lse + (at - args.lse) // 4, x),
        "rcp": lambda x: 1 / x,
        "lg2": math.log2,
        "thread_index": lambda: thread,
    }.items():
        monkeypatch.setattr(ptx, name, stand_in)
    monkeypatch.setattr(heads, "Int32", int)
    monkeypatch.setattr(epilogue, "Int32", int)
    monkeypatch.setattr(epilogue, "Int64", int)
    monkeypatch.setattr(epilogue, "cutlass", SimpleNamespace(min=min, const_expr=bool, Boolean=bool))
    spot, finish_row, write_row = (jit_method(Epilogue, name) for name in ("spot", "finish_row", "write_row"))
    consumers = geo.consumer_warps * 32
    threads = [half * geo.threads + i for half in range(1 + paired) for i in range(consumers)]
    for pair, thread in itertools.product(range(args.num_kv_heads), threads):  # noqa: B007, read by thread_index
        epi: Any = Epilogue(variant, geo, args, 0, SEQ, pair, paired)  # type: ignore[arg-type]
        epi.write_row = lambda *a, epi=epi: write_row(epi, *a)
        column = epi.column(epi.element)
        for i in range(epi.first_row, epi.live_rows, epi.row_step):
            row = epi.row_at(i)
            part = [m[row], l[row], *o[row, epi.element : epi.element + 4]]
            finish_row(epi, spot(epi, row, column), part, 0.5)

    expected: dict[int, float] = {}
    for pair, row in itertools.product(range(args.num_kv_heads), range(geo.rows)):
        if (own := own_head(joined, args, pair, row)) is not None:
            token, head, kv_head = own
            at = (SEQ * args.q_len + token) * num_heads + head
            expected[args.lse + at] = (m[row] * 0.5 + math.log2(l[row]) - P_BIAS) * LN_2
            half = o[row, kv_head % 2 * (geo.head_size - D) :][:D] / l[row] * v_scale[SEQ, kv_head] * o_mul[head]
            expected |= {at * D + i: x for i, x in enumerate(half)}
    assert len(expected) == args.q_len * num_heads * (D + 1)
    assert stored == pytest.approx(expected, rel=1e-12)
