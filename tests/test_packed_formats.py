"""e2m3 and nvfp4 against ml_dtypes: every code, every rounding, and where the bits go."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mjolnir.formats import get_format
from mjolnir.layouts import split_nvfp4_cache

DTYPE = {"e2m3": ml_dtypes.float6_e2m3fn, "nvfp4": ml_dtypes.float4_e2m1fn}
LIMIT = {"e2m3": 7.5, "nvfp4": 6.0}
ONE = torch.ones(1)


def unit_blocks(rows: torch.Tensor, name: str) -> torch.Tensor | None:
    """Block scales of 1."""
    fmt = get_format(name)
    return torch.ones(*rows.shape[:-1], rows.shape[-1] // 16).to(torch.float8_e4m3fn) if fmt.block else None


def encode(name: str, values: np.ndarray) -> np.ndarray:
    """The code of each value, taken out of the packed bytes one by one. Scales of 1."""
    padded = np.pad(values.astype(np.float32), (0, -len(values) % 16))
    rows = torch.from_numpy(padded)[None]
    packed = get_format(name).encode(rows, ONE, unit_blocks(rows, name))
    return np.array(unpacked(name, packed[0].tolist())[: len(values)])


def unpacked(name: str, row: list[int]) -> list[int]:
    """Codes of a row of bytes: a row is one little-endian number, and a code is its next 6 or 4 bits."""
    bits = get_format(name).bits
    number = int.from_bytes(bytes(row), "little")
    return [number >> bits * i & (2**bits - 1) for i in range(len(row) * 8 // bits)]


def packed(name: str, codes: list[int]) -> list[int]:
    bits = get_format(name).bits
    number = sum(code << bits * i for i, code in enumerate(codes))
    return list(number.to_bytes(len(codes) * bits // 8, "little"))


def all_values(name: str) -> np.ndarray:
    codes = np.arange(2 ** get_format(name).bits, dtype=np.uint8)
    return codes.view(DTYPE[name]).astype(np.float32)


def expected_codes(name: str, x: np.ndarray) -> np.ndarray:
    """ml_dtypes's rounding of the saturated values; NaN is the largest value."""
    saturated = np.clip(np.where(np.isnan(x), LIMIT[name], x), -LIMIT[name], LIMIT[name])
    return saturated.astype(DTYPE[name]).view(np.uint8)


@pytest.mark.parametrize("name", DTYPE)
def test_every_code_decodes_exactly_at_every_place(name: str) -> None:
    fmt, values = get_format(name), all_values(name)
    assert fmt.max_value == values.max() == LIMIT[name]
    for shift in range(fmt.pack):
        codes = np.roll(np.arange(2**fmt.bits), shift).tolist()
        row = torch.tensor([packed(name, codes)], dtype=torch.uint8)
        got = fmt.decode(row, unit_blocks(torch.ones(1, len(codes)), name))
        np.testing.assert_array_equal(got[0].numpy(), values[codes])
        np.testing.assert_array_equal(np.signbit(got[0].numpy()), np.signbit(values[codes]))


def test_e2m3_group_is_24_little_endian_bits() -> None:
    c0, c1, c2, c3 = 0b100001, 0b011110, 0b111000, 0b000101
    group = c0 | c1 << 6 | c2 << 12 | c3 << 18
    row = torch.tensor([[group & 0xFF, group >> 8 & 0xFF, group >> 16]], dtype=torch.uint8)
    values = [-0.125, 7.0, -4.0, 0.625]
    assert get_format("e2m3").decode(row)[0].tolist() == values
    assert get_format("e2m3").encode(torch.tensor([values]), ONE).tolist() == row.tolist()


def test_nvfp4_byte_has_the_even_element_in_its_low_nibble() -> None:
    row = torch.tensor([[0x7A, *[0] * 7]], dtype=torch.uint8)
    assert get_format("nvfp4").decode(row, torch.tensor([[0x38]], dtype=torch.uint8))[0, :3].tolist() == [-1, 6, 0]


@pytest.mark.parametrize("name", DTYPE)
def test_every_halfway_point_rounds_as_ml_dtypes_rounds(name: str) -> None:
    values = np.unique(all_values(name).astype(np.float64))
    halfway = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    above, below = (np.nextafter(halfway, np.float32(side)) for side in (np.inf, -np.inf))
    x = np.concatenate([values.astype(np.float32), halfway, above, below, -values.astype(np.float32)])
    np.testing.assert_array_equal(encode(name, x), expected_codes(name, x))


@pytest.mark.parametrize("name", DTYPE)
def test_edges(name: str) -> None:
    """Inf saturates with its sign; NaN of either sign is the largest value."""
    edges = [0.0, LIMIT[name], LIMIT[name] + 0.1, 3e38, math.inf, 1e-45, 1e-38, 0.06249, 0.0625, 0.0626]
    x = np.array([sign * edge for edge in edges for sign in (1, -1)] + [math.nan, -math.nan], np.float32)
    got = encode(name, x)
    np.testing.assert_array_equal(got, expected_codes(name, x))
    largest = 2 ** (get_format(name).bits - 1) - 1
    assert got[8] == got[-1] == got[-2] == largest and got[9] == 2 * largest + 1


@pytest.mark.parametrize("name", DTYPE)
@given(x=st.lists(st.floats(width=32), min_size=1, max_size=64), scale=st.floats(2**-10, 2**10, width=32))
@settings(max_examples=200)
def test_any_float_with_a_scale(name: str, x: list[float], scale: float) -> None:
    values = np.array(x + [0.0] * (-len(x) % 16), np.float32)
    rows = torch.from_numpy(values)[None]
    got = get_format(name).encode(rows, torch.tensor(scale), unit_blocks(rows, name))
    with np.errstate(over="ignore"):
        divided = values / np.float32(scale)
    np.testing.assert_array_equal(unpacked(name, got[0].tolist()), expected_codes(name, divided))


@pytest.mark.parametrize("name", DTYPE)
def test_a_scale_of_zero_stores_nothing_that_decodes_to_nan(name: str) -> None:
    fmt = get_format(name)
    x = torch.tensor([[0.0, -1.0, 5.0, math.inf] * 4])
    blocks = fmt.block_scales(x, torch.zeros(1))
    assert (fmt.decode(fmt.encode(x, torch.zeros(1), blocks), blocks) * 0 == 0).all()


def blocks_of(x: np.ndarray) -> np.ndarray:
    return get_format("nvfp4").block_scales(torch.from_numpy(x.astype(np.float32)), ONE).float().numpy()


def test_block_scale_is_a_sixth_of_the_largest_rounded_to_e4m3() -> None:
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(50, 64)) * 10.0 ** rng.uniform(-4, 3, size=(50, 1))).astype(np.float32)
    amax = np.abs(x.reshape(50, 4, 16)).max(-1)
    expected = np.minimum(amax / np.float32(6), 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(blocks_of(x), expected)


def test_block_scale_of_what_is_no_number() -> None:
    row = np.zeros((5, 16))
    row[0, 3], row[0, 4] = math.nan, -3.0  # NaN does not count
    row[1, 3] = math.nan
    row[2, 3] = -math.inf
    row[3] = 1e-5  # less than half the smallest block scale
    row[4, 3] = 1e5
    assert blocks_of(row)[:, 0].tolist() == [0.5, 0, 448, 0, 448]
    fmt, x = get_format("nvfp4"), torch.from_numpy(row).float()
    blocks = fmt.block_scales(x, ONE)
    decoded = fmt.decode(fmt.encode(x, ONE, blocks), blocks)
    assert decoded[:, 3].tolist() == [3, 0, -2688, 0, 2688]
    assert decoded[0, 4] == -3 and decoded[0, 0] == 0


def test_block_scale_of_each_row_applies_to_its_sixteen_elements() -> None:
    """Every e4m3 block scale times every e2m1 value, which fp32 holds exactly."""
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    codes = torch.tensor(packed("nvfp4", list(range(16))), dtype=torch.uint8).expand(256, 8)
    factor = scales.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    expected = factor * all_values("nvfp4")
    np.testing.assert_array_equal(get_format("nvfp4").decode(codes, scales).numpy(), expected)


def test_scales_divide_before_the_block_scale_is_found() -> None:
    x = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0], [0.5, 0.25]])[..., None]
    fmt = get_format("nvfp4")
    blocks = fmt.block_scales(x, scale)
    assert blocks is not None and blocks.shape == (3, 2, 2) and blocks.dtype == torch.float8_e4m3fn
    same = fmt.block_scales(x / scale, ONE)
    assert same is not None and (blocks.float() == same.float()).all()
    assert (fmt.encode(x, scale, blocks) == fmt.encode(x / scale, ONE, blocks)).all()


def test_sizes() -> None:
    sizes = [
        (get_format(name).row_bytes(d), get_format(name).row_width(d), get_format(name).scale_width(d))
        for name, d in itertools.product(("e2m3", "nvfp4", "bf16"), (64, 128))
    ]
    assert sizes == [(48, 48, 0), (96, 96, 0), (32, 32, 4), (64, 64, 8), (128, 64, 0), (256, 128, 0)]
    assert [get_format(n).head_size_of(w) for n, w in (("e2m3", 96), ("nvfp4", 64), ("fp8", 128), ("bf16", 128))] == [
        128
    ] * 4


def test_no_rows_and_no_tokens() -> None:
    for name, width in (("e2m3", 48), ("nvfp4", 32)):
        fmt = get_format(name)
        x = torch.zeros(0, 3, 64)
        blocks = fmt.block_scales(x, ONE)
        codes = fmt.encode(x, ONE, blocks)
        assert codes.shape == (0, 3, width) and fmt.decode(codes, blocks).shape == x.shape


def test_errors() -> None:
    e2m3, nvfp4 = get_format("e2m3"), get_format("nvfp4")
    with pytest.raises(ValueError, match="multiple of 4 elements, got 6"):
        e2m3.encode(torch.zeros(1, 6), ONE)
    with pytest.raises(ValueError, match="multiple of 16 elements, got 24"):
        nvfp4.block_scales(torch.zeros(1, 24), ONE)
    with pytest.raises(ValueError, match="nvfp4 cache needs block scales"):
        nvfp4.encode(torch.zeros(1, 16), ONE)
    with pytest.raises(ValueError, match="e2m3 cache has no block scales"):
        e2m3.decode(torch.zeros(1, 3, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="1 scales per row of 16 elements, got 2"):
        nvfp4.decode(torch.zeros(1, 8, dtype=torch.uint8), torch.zeros(1, 2, dtype=torch.uint8))
    with pytest.raises(TypeError, match="uint8"):
        e2m3.decode(torch.zeros(1, 3, dtype=torch.int8))


# One tensor that holds codes and block scales


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("planar", [False, True], ids=["rows", "planar"])
def test_split_nvfp4_cache(planar: bool, order: str) -> None:
    pages, tokens, heads, d = 3, 16, 2, 64
    shape = (pages, tokens, heads) if order == "NHD" else (pages, heads, tokens)
    memory = torch.arange(pages * tokens * heads * 36, dtype=torch.int32).to(torch.uint8)
    cache = memory.view(*shape, 36)
    logical = cache if order == "NHD" else cache.transpose(1, 2)
    codes, scales = split_nvfp4_cache(logical, d, planar)
    assert codes.shape == (pages, tokens, heads, 32) and scales.shape == (pages, tokens, heads, 4)
    assert codes.dtype == torch.uint8 and scales.dtype == torch.float8_e4m3fn
    assert codes.data_ptr() == cache.data_ptr()  # no copy
    page_bytes = tokens * heads * 36
    for page, token, head in itertools.product(range(pages), range(tokens), range(heads)):
        row = token * heads + head if order == "NHD" else head * tokens + token
        at = page * page_bytes + (row * 32 if planar else row * 36)
        scale_at = page * page_bytes + (tokens * heads * 32 + row * 4 if planar else row * 36 + 32)
        assert (codes[page, token, head] == memory[at : at + 32]).all()
        assert (scales[page, token, head].view(torch.uint8) == memory[scale_at : scale_at + 4]).all()


def test_split_nvfp4_cache_of_padded_rows_and_of_one_side_of_a_page() -> None:
    codes, scales = split_nvfp4_cache(torch.zeros(2, 16, 3, 80, dtype=torch.uint8), 128)
    assert codes.stride() == scales.stride() == (16 * 3 * 80, 3 * 80, 80, 1)
    sides = torch.zeros(2, 2, 16, 3, 72, dtype=torch.uint8)  # K and V of a page one after the other
    codes, scales = split_nvfp4_cache(sides[:, 1], 128, planar=True)
    assert codes.stride() == (2 * 16 * 3 * 72, 3 * 64, 64, 1) and scales.stride() == (2 * 16 * 3 * 72, 3 * 8, 8, 1)
    assert scales.storage_offset() == 16 * 3 * 72 + 16 * 3 * 64


def test_split_nvfp4_cache_errors() -> None:
    with pytest.raises(ValueError, match="rows of 72 bytes or more"):
        split_nvfp4_cache(torch.zeros(1, 16, 1, 64, dtype=torch.uint8), 128)
    with pytest.raises(ValueError, match=r"rows of 72 bytes, got"):
        split_nvfp4_cache(torch.zeros(1, 16, 1, 80, dtype=torch.uint8), 128, planar=True)
    with pytest.raises(ValueError, match="contiguous, NHD or HND"):
        split_nvfp4_cache(torch.zeros(1, 32, 2, 72, dtype=torch.uint8)[:, ::2], 128, planar=True)
    with pytest.raises(TypeError, match="uint8"):
        split_nvfp4_cache(torch.zeros(1, 16, 1, 72), 128)
    with pytest.raises(ValueError, match="multiple of 16"):
        split_nvfp4_cache(torch.zeros(1, 16, 1, 72, dtype=torch.uint8), 100)
