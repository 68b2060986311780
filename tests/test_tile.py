"""The arithmetic of one warp, run in NumPy on tiles as the TMA lays them: S and O of every format, and the bank
conflicts of its loads."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from mjolnir.compiler.build import dsl_missing_reason
from mjolnir.formats import FORMATS, KvFormat, get_format

if dsl_missing_reason():
    pytest.skip(dsl_missing_reason() or "", allow_module_level=True)

from warp import LANE, G, T, Warp

from mjolnir.kernels import ptx
from mjolnir.kernels.choice import geometry_of
from mjolnir.kernels.epilogue import Epilogue
from mjolnir.kernels.lanes import exchange_place, k_loads, position_of, token_of, v_loads
from mjolnir.kernels.operand import Operand
from mjolnir.kernels.tile import TileMath
from mjolnir.variant import HEAD_SIZES, Variant

JOINED = [("fp8", "fp8", 64), ("fp8", "fp8_e5m2", 64), ("nvfp4", "nvfp4", 128)]
"""Formats and head sizes with rows of 64 bytes, which the TMA can read two at a time."""

SIDE_BY_SIDE = [
    *((name, name, head_size) for name in ("e2m3", "nvfp4") for head_size in (64, 128)),
    ("fp8", "nvfp4", 128),
    ("e2m3", "fp8", 128),
]
"""Formats and head sizes of which rows of two heads lie beside each other."""

PAIRS = [*((name, name) for name in FORMATS), ("fp8", "nvfp4"), ("e2m3", "fp8"), ("nvfp4", "e2m3"), ("bf16", "e2m3")]


def random_rows(fmt: KvFormat, tokens: int, head_size: int, gen: torch.Generator) -> tuple[Any, Any, Any]:
    """Any codes that are finite: raw bytes (tokens, row bytes), block scales (tokens, n) or None, values."""
    blocks = None
    if fmt.pack == 1:
        codes = fmt.encode(torch.randn(tokens, head_size, generator=gen), torch.ones(1))
    else:
        codes = torch.randint(256, (tokens, fmt.row_width(head_size)), dtype=torch.uint8, generator=gen)
    if fmt.block:
        blocks = torch.randint(127, (tokens, head_size // 16), dtype=torch.uint8, generator=gen)
        blocks += 128 * torch.randint(2, blocks.shape, dtype=torch.uint8, generator=gen)
    values = fmt.decode(codes, blocks).double().numpy()
    return codes.view(torch.uint8).numpy(), None if blocks is None else blocks.numpy(), values


def lay_out(smem: Any, base: int, op: Operand, rows: Any, joined: str = "") -> None:
    """A tile as the TMA writes it: panel by panel, 16-byte chunks moved by the swizzle of their address. ``rows``: of
    two heads if they are paired, one after the other."""
    tokens = len(rows)
    swizzle = 128 if joined else op.swizzle
    for panel, token, byte in itertools.product(range(op.panels), range(tokens), range(op.stride)):
        at = base + (panel * tokens + token) * op.stride + byte
        if swizzle == 128:
            at ^= (at >> 7 & 7) << 4
        elif swizzle == 64:
            at ^= (at >> 7 & 3) << 4
        smem[at] = rows[token, panel * op.stride + byte]


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize(
    ("k_name", "v_name", "head_size", "joined"),
    [*((*pair, head_size, "") for pair in PAIRS for head_size in HEAD_SIZES), *((*j, "tokens") for j in JOINED),
     *((*j, f"panels{side}") for j in SIDE_BY_SIDE for side in range(2)),
     *(("e2m3", "e2m3", 128, f"crowd{part}") for part in range(2)),
     *(("fp8", "fp8", head_size, "half1") for head_size in (64, 128))],
)  # fmt: skip
def test_scores_and_output(
    monkeypatch: pytest.MonkeyPatch, k_name: str, v_name: str, head_size: int, joined: str, rows: int
) -> None:
    v_format = "" if v_name == k_name else v_name
    side = int(joined[-1]) if joined.startswith("panels") else 0
    part = int(joined[-1]) if joined.startswith(("crowd", "half")) else 0  # of the stage's tokens
    joined = joined.rstrip("01")
    if (joined, rows) in (("panels", 8), ("crowd", 16), ("half", 16)):
        pytest.skip("two heads have 16 rows, warps that halve a stage 8")
    crowd, joined = joined == "crowd", "" if joined in ("crowd", "half") else joined
    variant = Variant("sm_90a", k_name, "bf16", "bf16", head_size, rows, v_format=v_format, crowd=crowd, joined=joined)
    geo = geometry_of(variant)
    assert part < geo.token_groups
    first = part * geo.warp_tile
    gen = torch.Generator().manual_seed(head_size + rows)
    k_codes, k_blocks, k = random_rows(get_format(k_name), geo.tile, head_size, gen)
    v_codes, v_blocks, v = random_rows(get_format(v_name), geo.tile, head_size, gen)
    warp = Warp(geo.smem_bytes)
    k_tile, v_tile = 0, geo.tile * geo.k.row_bytes * geo.sides
    for at, op, codes in ((k_tile, geo.k, k_codes), (v_tile, geo.v, v_codes)):
        if op.paired:
            other = torch.randint(256, codes.shape, dtype=torch.uint8, generator=gen).numpy()
            codes = np.concatenate([other, codes] if side else [codes, other], axis=1)
        lay_out(warp.smem, at, op, codes, joined if joined == "tokens" else "")
    k_scales = geo.scales_offset
    v_scales = k_scales + geo.tile * geo.k.scale_bytes
    for at, blocks in ((k_scales, k_blocks), (v_scales, v_blocks)):
        if blocks is not None:
            for token, scales in enumerate(blocks):
                start = at + position_of(joined, token) * len(scales)
                warp.smem[start : start + len(scales)] = scales

    warp.install(monkeypatch)
    math = TileMath(variant, geo)
    q_rows = geo.rows_per_warp
    query = torch.randint(-8, 9, (q_rows, head_size), generator=gen).double().numpy()  # exact in f16 and in bf16
    runs, run = math.lane_runs(T)
    frags = geo.exchange_offset + LANE * 16
    unscale = []
    for n in range(geo.row_tiles):
        values: list[Any] = [None] * (head_size // 4)
        for at, element in runs:
            for i in range(run):
                values[at + i] = query[n * 8 + G, element + i]
        unscale.append(math.store_q_row(frags + n * geo.q_frag_bytes, values, 1.0))

    scores = math.scores(k_tile + first * geo.k.stride, k_scales, frags, G, T, side)
    expected = k @ query.T
    tokens = [first + 8 * i + math.tokens_of(G)[i % 2] for i in range(geo.warp_tile // 8)]
    assert sorted(np.concatenate(tokens).tolist()) == sorted([*range(first, first + geo.warp_tile)] * 4)
    for n, i, e in itertools.product(range(geo.row_tiles), range(geo.warp_tile // 8), range(2)):
        factor = unscale[n][(2 * T + e) * 4] * math.k_unpack.unscale
        np.testing.assert_array_equal(scores[n][2 * i + e] * factor, expected[tokens[i], n * 8 + 2 * T + e])

    weights = torch.randint(0, 17, (geo.tile, q_rows), generator=gen).double().numpy()
    held = [
        [weights[tokens[i], n * 8 + 2 * T + e] for i in range(geo.warp_tile // 8) for e in range(2)]
        for n in range(geo.row_tiles)
    ]
    acc = [np.zeros(32) for _ in range(geo.row_tiles * geo.m_tiles * 4)]
    math.accumulate(v_tile + first * geo.v.stride, v_scales, held, acc, G, T, side)
    mine = slice(first, first + geo.warp_tile)
    output = weights[mine].T @ v[mine]
    run = geo.v.panel_elems // 8
    for n, i, h, e in itertools.product(range(geo.row_tiles), range(geo.m_tiles), range(2), range(2)):
        panel, inside = divmod(2 * i + h, run)
        element = panel * geo.v.panel_elems + G * run + inside
        got = acc[(n * geo.m_tiles + i) * 4 + 2 * h + e] * math.v_unpack.unscale
        np.testing.assert_array_equal(got, output[n * 8 + 2 * T + e, element])


def phases(addresses: Any, width: int) -> tuple[int, int]:
    """Cycles of a warp's load, and the fewest there can be: lanes go 32, 16 or 8 at a time for 4, 8 or 16 bytes, and a
    bank gives one word a cycle."""
    lanes = 128 // width
    cycles = 0
    for first in range(0, 32, lanes):
        words = {(a + b) // 4 for a in addresses[first : first + lanes].tolist() for b in range(0, width, 4)}
        cycles += max(sum(word % 32 == bank for word in words) for bank in range(32))
    return cycles, 32 // lanes


@pytest.mark.parametrize(
    ("k_name", "v_name", "head_size", "sides"),
    [*((*pair, head_size, 1) for pair in PAIRS for head_size in HEAD_SIZES), *((*pair, 2) for pair in SIDE_BY_SIDE)],
)
def test_loads_have_no_bank_conflicts(k_name: str, v_name: str, head_size: int, sides: int) -> None:
    k, v = (Operand.of(get_format(name), head_size, sides) for name in (k_name, v_name))
    for side in range(sides):
        token = token_of(v, G)
        for unit in k_loads(k, token, T, side):
            for offset, width in unit:
                # Two rows of 96 bytes are 192, of 48 are 96: two tokens in four start in the same bank.
                most = 2 if k.paired and k.stride in (96, 192) else 1
                cycles, fewest = phases(token * k.stride + offset, width)
                assert fewest == 32 * width // 128
                assert cycles <= most * fewest
        # Six bytes of a 48-byte row are read as two words, of which lanes share some and collide on others.
        most = 2 if v.panel_bytes == 48 or v.stride == 192 else 1
        for odd in range(2):
            token = token_of(v, 2 * T + odd)
            for offset, width in v_loads(v, token, G, side):
                cycles, fewest = phases(token * v.stride + offset, width)
                assert cycles <= most * fewest


@pytest.mark.parametrize(("k_name", "v_name", "head_size"), JOINED)
def test_joined_tokens_lie_where_those_of_64_byte_rows_do(k_name: str, v_name: str, head_size: int) -> None:
    """So the loads are the same, and have no bank conflicts: two tokens a row, swizzled by 128 bytes, fill a tile as
    one a row, swizzled by 64, does in the order of ``position_of``."""
    for name in (k_name, v_name):
        op = Operand.of(get_format(name), head_size)
        assert op.panels == 1 and op.panel_bytes == 64
        rows = np.random.default_rng(0).integers(256, size=(64, 64), dtype=np.uint8)
        smem, other = np.zeros((2, rows.size), np.uint8)
        lay_out(smem, 0, op, rows, "tokens")
        lay_out(other, 0, op, rows[[position_of("tokens", token) for token in range(64)]])
        np.testing.assert_array_equal(smem, other)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("sides", [1, 2])
def test_rows_of_s_are_a_permutation_of_each_eight_tokens(name: str, head_size: int, sides: int) -> None:
    v = Operand.of(get_format(name), head_size, sides)
    assert sorted(token_of(v, row) for row in range(8)) == list(range(8))


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("name", sorted({name for pair in PAIRS for name in pair}))
def test_the_exchange_buffer_holds_each_element_once_and_few_conflicts(name: str, head_size: int) -> None:
    """O as ``accumulate`` leaves it, read by threads that stand on four neighbouring elements each."""
    geo = geometry_of(Variant("sm_90a", name, "bf16", "bf16", head_size, 8))
    v = geo.v
    run, per_panel = v.panel_elems // 8, geo.m_tiles // v.panels
    places = np.full(head_size, -1)
    for tile in range(geo.m_tiles):
        place = exchange_place(v, tile, G)
        panel, i = divmod(tile, per_panel)
        for h in range(2):
            places[panel * v.panel_elems + G * run + 2 * i + h] = place + h
        assert phases((2 * T * geo.exchange_stride + place) * 4, 8) == (2, 2)
    assert sorted(places) == list(range(head_size))

    epilogue = SimpleNamespace(geo=geo, element=np.arange(0, head_size, 4))
    first, second = Epilogue.exchange_bytes(epilogue)  # type: ignore[arg-type]
    np.testing.assert_array_equal(np.stack([first, first + 4, second, second + 4], -1).reshape(-1), places * 4)
    for at in (first, second):
        lanes = np.resize(at, 32) + np.arange(32) // len(at) * (geo.exchange_stride * 4)
        cycles, fewest = phases(lanes, 8)
        assert cycles <= (2 if v.panel_elems == 64 else 1) * fewest


@pytest.mark.parametrize("joined", ["", "heads"])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("name", ["fp8", "bf16", "e2m3", "nvfp4"])
def test_rows_of_q_reach_their_lanes(monkeypatch: pytest.MonkeyPatch, name: str, head_size: int, joined: str) -> None:
    if joined and (name, head_size) != ("fp8", 64):
        pytest.skip("no such kernel")
    variant = Variant("sm_90a", name, "bf16", "bf16", head_size, 8, joined=joined)
    geo = geometry_of(variant)
    warp = Warp(8 * head_size * 2)
    warp.install(monkeypatch)
    math = TileMath(variant, geo)
    rows = np.random.default_rng(0).normal(size=(8, head_size)).astype(ml_dtypes.bfloat16)
    stride = 2 * head_size + 48  # any multiple of 16 bytes
    warp.gmem = np.zeros(8 * stride, np.uint8)
    for row in range(8):
        warp.gmem[row * stride : row * stride + 2 * head_size] = rows[row].view(np.uint8)
    t = T & 1 if joined else T
    reads: list[tuple[int, int]] = []
    lds128 = warp.lds128
    monkeypatch.setattr(ptx, "lds128", lambda addr: reads.append(phases(addr, 16)) or lds128(addr))
    values = math.load_q_rows(G * stride, 0, t, LANE)
    assert set(reads) == (set() if name == "bf16" else {(4, 4)})
    runs, run = math.lane_runs(t)
    for at, element in runs:
        for i in range(run):
            np.testing.assert_array_equal(values[at + i], rows[G, element + i].astype(np.float64))
