"""What a GPU computes of the quantised query, emulated on the CPU: PyTorch's CUDA division, and the arithmetic of the
compiled kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from test_write import longdouble_fma
from torch.utils._python_dispatch import TorchDispatchMode

from mjolnir.accuracy.attend import round_trip_query
from mjolnir.formats import get_format
from mjolnir.query_fp8 import quantise_query

SEQS, KV_HEADS, HEADS, HEAD_SIZE = 64, 8, 32, 128


class CudaDivision(TorchDispatchMode):
    """A tensor over a Python number is its product with the number's reciprocal, both in fp32, as in PyTorch's CUDA
    kernel (ATen/native/cuda/BinaryDivTrueKernel.cu); over a tensor it is the IEEE quotient there too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.div.Tensor and isinstance(args[1], (int, float)):
            return args[0] * float(np.float32(1) / np.float32(args[1]))
        return func(*args, **(kwargs or {}))


def queries(dtype: torch.dtype, with_q_mul: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As ``mjolnir bench-writes`` makes them."""
    gen = torch.Generator().manual_seed(0)
    query = torch.randn(SEQS, HEADS, HEAD_SIZE, generator=gen).to(dtype)
    return query, torch.rand(HEADS, HEAD_SIZE, generator=gen) + 0.5 if with_q_mul else None


def beside_boundaries() -> torch.Tensor:
    """Blocks of 16 whose amax lies on 6 times a point halfway between e4m3 codes, or beside it."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    at = (6 * (codes[1:] + codes[:-1]) / 2).numpy()
    amax = np.concatenate([np.nextafter(at, np.float32(0)), at, np.nextafter(at, np.float32(np.inf))])
    return torch.from_numpy(amax)[:, None].repeat(1, 16)


def bits(made: tuple[torch.Tensor, ...]) -> list[np.ndarray]:
    return [t.view(torch.uint8).numpy() for t in made]


def same_with_cuda_division(make: Callable[[], tuple[torch.Tensor, ...]]) -> bool:
    want = bits(make())
    with CudaDivision():
        made = make()
    return all(map(np.array_equal, bits(made), want))


def test_a_descale_divided_by_a_number_would_be_another_one_on_a_gpu() -> None:
    """The emulation can tell; in every batch of bench-writes, even of one sequence, a descale was off."""
    amax = queries(torch.bfloat16, False)[0].float().unflatten(1, (KV_HEADS, -1)).abs().amax((2, 3))
    want = amax / 448
    with CudaDivision():
        made = amax / 448
        by_tensor = amax / torch.tensor(448.0)
    assert 0.3 < (made != want).float().mean() < 0.8
    assert torch.equal(by_tensor, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_q_mul", [False, True])
def test_the_definitions_are_the_same_on_a_gpu(dtype: torch.dtype, with_q_mul: bool) -> None:
    query, q_mul = queries(dtype, with_q_mul)
    assert same_with_cuda_division(lambda: quantise_query(query, q_mul, SEQS, 1, KV_HEADS))
    assert same_with_cuda_division(lambda: (round_trip_query(query, KV_HEADS),))


def test_block_scales_are_the_same_on_a_gpu() -> None:
    def scales() -> tuple[torch.Tensor, ...]:
        made = get_format("nvfp4").block_scales(beside_boundaries(), torch.ones(1))
        assert made is not None
        return (made,)

    assert same_with_cuda_division(scales)


def compiled_query(
    query: torch.Tensor, q_mul: torch.Tensor | None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """``quantise_query_kernel`` with NATIVE, step by step as Triton 3.6 compiles it for sm_90: one product with q_mul,
    div.rn of amax, ``in_triton.scales.full_quotient``, cvt.rn.satfinite. No product is contracted with a sum: the only
    sums but the fma are negations."""
    x = query.float().numpy() if q_mul is None else query.float().numpy() * q_mul.numpy()
    x = x.reshape(len(x), KV_HEADS, -1)
    scale = np.abs(x).max(-1) / np.float32(448)
    d = np.broadcast_to(scale[..., None], x.shape)
    r = np.float32(1) / d
    y = x * r
    for _ in range(2):
        y = longdouble_fma(longdouble_fma(y, d, -x), -r, y)
    values = y.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return values.reshape(query.shape), scale


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="no wider type than fp64 to emulate an fma with")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_q_mul", [False, True])
def test_the_compiled_kernel_computes_the_definition(dtype: torch.dtype, with_q_mul: bool) -> None:
    """Bit by bit, the sign of 0 too."""
    query, q_mul = queries(dtype, with_q_mul)
    query[:, :, 0], query[:, :, 1] = 0.0, -0.0
    values, scale = compiled_query(query, q_mul)
    want, descale = quantise_query(query, q_mul, SEQS, 1, KV_HEADS)
    np.testing.assert_array_equal(scale.view(np.int32), descale.numpy().view(np.int32))
    np.testing.assert_array_equal(values.view(np.int32), want.float().numpy().view(np.int32))
