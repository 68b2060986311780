"""Formats of whole bytes against ml_dtypes, an implementation of the same formats by other people."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mjolnir.formats import get_format

NUMPY_DTYPE = {
    "fp8": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
}
FORMATS = tuple(NUMPY_DTYPE)
BYTES = ("fp8", "fp8_e5m2")
ONE = torch.ones(1)


def all_codes(name: str) -> np.ndarray:
    unsigned = np.uint8 if name in BYTES else np.uint16
    return np.arange(2 ** get_format(name).bits, dtype=np.uint32).astype(unsigned)


def as_storage(name: str, codes: np.ndarray) -> torch.Tensor:
    signed = codes if name in BYTES else codes.view(np.int16)
    return torch.from_numpy(signed.copy()).view(get_format(name).storage_dtype)


def expected_codes(name: str, x: np.ndarray) -> np.ndarray:
    """ml_dtypes's rounding; fp8 saturates, which ml_dtypes does not."""
    limit = get_format(name).max_value
    saturated = np.clip(x, -limit, limit) if name in BYTES else x
    with np.errstate(over="ignore"):
        return saturated.astype(NUMPY_DTYPE[name]).view(all_codes(name).dtype)


def assert_encodes_like_ml_dtypes(name: str, x: np.ndarray) -> None:
    got = get_format(name).encode(torch.from_numpy(x), ONE)
    assert got.dtype == get_format(name).storage_dtype
    signed = np.uint8 if name in BYTES else np.int16
    codes = got.view(torch.uint8 if name in BYTES else torch.int16).numpy().view(signed).view(all_codes(name).dtype)
    nan = np.isnan(x)
    assert torch.isnan(got.float()).numpy()[nan].all()  # any NaN code will do
    np.testing.assert_array_equal(codes[~nan], expected_codes(name, x)[~nan])


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_decodes_exactly(name: str) -> None:
    codes = all_codes(name)
    expected = codes.view(NUMPY_DTYPE[name]).astype(np.float32)
    np.testing.assert_array_equal(get_format(name).decode(as_storage(name, codes)).numpy(), expected)
    if name in BYTES:
        np.testing.assert_array_equal(get_format(name).decode(torch.from_numpy(codes)).numpy(), expected)
    assert np.nanmax(np.where(np.isinf(expected), 0, expected)) == get_format(name).max_value


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_and_every_halfway_point_encodes_as_ml_dtypes_rounds(name: str) -> None:
    with np.errstate(invalid="ignore"):  # bf16's signalling NaNs
        values = all_codes(name).view(NUMPY_DTYPE[name]).astype(np.float64)
    values = np.unique(values[np.isfinite(values)])  # one zero
    halfway = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    assert (halfway.astype(np.float64) == (values[1:] + values[:-1]) / 2).all()  # fp32 holds them all
    above, below = (np.nextafter(halfway, np.float32(side)) for side in (np.inf, -np.inf))
    assert_encodes_like_ml_dtypes(name, np.concatenate([values.astype(np.float32), halfway, above, below]))


@pytest.mark.parametrize("name", FORMATS)
def test_edges(name: str) -> None:
    limit = get_format(name).max_value
    step = limit - float(np.nextafter(NUMPY_DTYPE[name](limit), NUMPY_DTYPE[name](0)))
    tiny = float(np.finfo(np.float32).tiny)
    edges = [0.0, limit, limit + 0.49 * step, limit + 0.51 * step, 3e38, math.inf, math.nan, tiny, 1e-45, 2e-3, 5e-8]
    assert_encodes_like_ml_dtypes(name, np.array([sign * edge for edge in edges for sign in (1, -1)], np.float32))


def test_fp8_saturates_and_the_others_overflow() -> None:
    x = torch.tensor([464.0, 1e30, math.inf, -math.inf])
    assert get_format("fp8").encode(x, ONE).float().tolist() == [448, 448, 448, -448]
    assert get_format("fp8_e5m2").encode(x, ONE).float().tolist() == [448, 57344, 57344, -57344]
    assert get_format("fp16").encode(x, ONE).float().tolist() == [464, math.inf, math.inf, -math.inf]
    assert get_format("bf16").encode(x, ONE).float()[2:].tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize("name", FORMATS)
@given(x=st.lists(st.floats(width=32), min_size=1), scale=st.floats(2**-10, 2**10, width=32))
def test_any_float_with_a_scale(name: str, x: list[float], scale: float) -> None:
    values = np.array(x, np.float32)
    got = get_format(name).encode(torch.from_numpy(values), torch.tensor(scale))
    with np.errstate(over="ignore"):
        assert_encodes_like_ml_dtypes(name, values / np.float32(scale))
        expected = expected_codes(name, values / np.float32(scale)).view(NUMPY_DTYPE[name]).astype(np.float32)
    np.testing.assert_array_equal(got.float().numpy(), expected)


def test_scale_broadcasts_per_head_and_per_sequence() -> None:
    x = torch.full((3, 2, 4), 8.0)
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]])
    got = get_format("fp8").encode(x, scale[:, :, None]).float()
    assert got[..., 0].tolist() == [[8, 4], [2, 1], [0.5, 0.25]]


def test_half_inputs_are_divided_in_fp32() -> None:
    x = torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    got = get_format("fp8").encode(x, torch.tensor(3.0)).float()
    assert got.tolist() == [np.float32(ml_dtypes.float8_e4m3fn(1 / 3)), 1]


@pytest.mark.parametrize("name", FORMATS)
def test_scales_of_zero_and_denormal_store_nothing_that_decodes_to_nan(name: str) -> None:
    fmt = get_format(name)
    zero = fmt.decode(fmt.encode(torch.tensor([0.0, -1.0, 5.0]), torch.zeros(1))) * 0
    assert (zero == 0).all()
    denormal = torch.tensor(1e-44)
    assert fmt.decode(fmt.encode(torch.tensor([0.0, 1e-44]), denormal)).tolist() == [0, 1]


def test_row_bytes() -> None:
    assert [get_format(name).row_bytes(128) for name in ("fp8", "bf16", "fp16")] == [128, 256, 256]


def test_errors_name_what_is_known() -> None:
    with pytest.raises(ValueError, match=r"fp8, fp8_e5m2, e2m3, nvfp4, bf16, fp16.*'int8'"):
        get_format("int8")
    with pytest.raises(TypeError, match="uint8"):
        get_format("bf16").decode(torch.zeros(1, dtype=torch.uint8))
    with pytest.raises(TypeError, match="int64"):
        get_format("fp8").encode(torch.zeros(1, dtype=torch.int64), ONE)
    with pytest.raises(ValueError, match=r"scale of shape \(2,\)"):
        get_format("fp8").encode(torch.zeros(1), torch.ones(2))
