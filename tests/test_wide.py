"""The operands of the wide kernels' products, in NumPy, one warp at a time: S and O of a tile, and bank conflicts."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from mjolnir.compiler.build import dsl_missing_reason
from mjolnir.formats import get_format

if dsl_missing_reason():
    pytest.skip(dsl_missing_reason() or "", allow_module_level=True)

from test_tile import lay_out, phases, random_rows
from warp import LANE, G, T, Warp, Wgmma, jit_method, packed

from mjolnir.kernels import wgmma
from mjolnir.kernels.choice import WIDE, geometry_of
from mjolnir.kernels.geometry import WARPGROUP
from mjolnir.kernels.wgmma import K_STEP
from mjolnir.kernels.wide import WideConsumer
from mjolnir.variant import Variant

FORMATS = [("fp8", "fp8"), ("fp8_e5m2", "fp8_e5m2"), ("fp8", "fp8_e5m2")]


def consumer_of(k_name: str, v_name: str, rows: int) -> WideConsumer:
    v_format = "" if v_name == k_name else v_name
    variant = Variant("sm_90a", k_name, "bf16", "bf16", 128, rows, v_format=v_format)
    geo = geometry_of(variant)
    assert geo.wide and geo.stages == WIDE[rows].stages
    return WideConsumer(variant, geo)


@pytest.mark.parametrize("rows", WIDE)
@pytest.mark.parametrize(("k_name", "v_name"), FORMATS)
@pytest.mark.parametrize("live", [64, 41, 0])
def test_scores_and_output(monkeypatch: pytest.MonkeyPatch, k_name: str, v_name: str, rows: int, live: int) -> None:
    consumer = consumer_of(k_name, v_name, rows)
    geo, math = consumer.geo, consumer.math
    gen = torch.Generator().manual_seed(rows + live)
    k_codes, _, k = random_rows(get_format(k_name), geo.tile, 128, gen)
    v_codes, _, v = random_rows(get_format(v_name), geo.tile, 128, gen)
    v_codes[live:] = 0x7F  # NaN in both formats
    warp = Warp(geo.smem_bytes)
    lay_out(warp.smem, 0, geo.k, k_codes)
    lay_out(warp.smem, geo.v_in_stage, geo.v, v_codes)
    warp.install(monkeypatch)
    Wgmma(warp).install(monkeypatch)

    query = torch.randint(-8, 9, (rows, 128), generator=gen).double().numpy()  # exact in f16
    runs, run = math.lane_runs(T)
    unscale = np.zeros(rows)
    for n in range(rows // 8):
        values = [query[8 * n + G, element + i] for _, element in runs for i in range(run)]
        (words,), factor = math.pack_q_row(values, 1.0)
        consumer.store_q_row(geo.wide_q_offset, 8 * n + G, words, T)
        unscale[8 * n + G] = factor
    q = wgmma.descriptor(geo.wide_q_offset)
    expected = k @ query.T
    columns = [8 * n + 2 * T + e for n in range(rows // 8) for _, e in itertools.product(range(2), range(2))]
    for w in range(WARPGROUP):
        scores: list[Any] = [np.zeros(32)] * (rows // 2)
        for step, frag in enumerate(consumer.k_frags(w * K_STEP * geo.k.row_bytes, G, T)):
            scores = wgmma.mma(frag, q + consumer.q_step(step), scores, step > 0)
        for i, column in enumerate(columns):
            token = w * K_STEP + G + i % 4 // 2 * 8
            np.testing.assert_array_equal(scores[i] * unscale[column], expected[token, column])

    weights = torch.randint(0, 17, (geo.tile, rows), generator=gen).double().numpy()
    weights[live:] = 0
    p_tile = geo.wide_p_offset + geo.wide_p_bytes
    for w, n in itertools.product(range(WARPGROUP), range(0, rows // 8, 2)):
        held = [
            packed(*(weights[w * K_STEP + half * 8 + G, 8 * (n + m) + 2 * T + e] for e in range(2)), np.float16)
            for m in range(2)
            for half in range(2)
        ]
        consumer.store_p(p_tile, n, held, w, LANE)
    p = wgmma.descriptor(p_tile)
    v_frags = jit_method(WideConsumer, "v_frags")
    output = weights[:live].T @ v[:live]
    for w in range(WARPGROUP):
        acc: list[Any] = [[np.zeros(32)] * (rows // 2) for _ in range(2)]
        for i, frag in enumerate(v_frags(consumer, geo.v_in_stage, w, live, G, T)):
            acc[i % 2] = wgmma.mma(frag, p + (i // 2 * wgmma.K_STEP_BYTES >> 4), acc[i % 2])
        for j, (i, column) in itertools.product(range(2), enumerate(columns)):
            element = w * 32 + 4 * G + 2 * j + i % 4 // 2
            np.testing.assert_array_equal(acc[j][i], output[column, element])


def test_no_bank_conflicts() -> None:
    """Of V's words, of Q's and P's rows, and of O on its way to the epilogue."""
    for w, token in itertools.product(range(WARPGROUP), range(2)):
        assert phases(wgmma.swizzled(2 * T + token, w * 32 + G * 4), 4) == (1, 1)
        row, chunk = LANE // 16 * 8 + LANE % 8, LANE // 8 % 2
        assert phases(wgmma.swizzled(row, w * 32 + chunk * 16), 16) == (4, 4)
    for byte in range(0, 128, 16):
        assert phases(wgmma.swizzled(G, byte + T * 4), 4) == (1, 1)
    for rows in WIDE:
        stride = consumer_of("fp8", "fp8", rows).geo.exchange_stride
        assert phases((2 * T * stride + G * 4) * 4, 16) == (4, 4)
