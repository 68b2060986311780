"""Queries quantised by the Triton kernel, compared with PyTorch's: under the interpreter in test_query_fp8.py, compiled
in test_gpu_writers.py."""

from __future__ import annotations

import itertools

import torch

from mjolnir.checks import scale_view
from mjolnir.query_fp8 import quantise_query

FLT_MAX = torch.finfo(torch.float32).max


def check_query(device: torch.device | str) -> None:
    """q_len, group, head size, dtype, strides, q_mul and descales vary together; NaN and Inf among the values."""
    shapes = itertools.product((1, 3), (1, 3, 8), (64, 128))
    for seed, (q_len, group, d) in enumerate(shapes):
        check_query_case(q_len, group, d, seed, device)


def check_query_case(q_len: int, group: int, d: int, seed: int, device: torch.device | str, num_seqs: int = 3) -> None:
    """The kernel's values and descales, and those of the definition on the same device, are the definition's on the
    CPU."""
    from mjolnir.kernels.query_kernel import launch_quantise

    gen = torch.Generator().manual_seed(seed)
    kv_heads = 2
    heads, dtype = kv_heads * group, (torch.bfloat16, torch.float16)[seed % 2]
    packed = torch.randn(num_seqs * q_len, heads * d + 32, generator=gen) * 10 ** (seed % 5 - 2)
    query = packed[:, 16:-16].to(dtype).unflatten(1, (heads, d))
    query[0, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    query[q_len : 2 * q_len] = 0
    q_mul = torch.rand(heads, d, generator=gen) * 4 if seed % 3 else None
    k_scale = torch.rand((1, (kv_heads,), (num_seqs, kv_heads))[seed % 3], generator=gen) + 0.5
    if seed % 2 == 0:  # the product of the descales is beyond fp32
        query[:q_len] *= 1e6
        k_scale.view(-1)[0] = (3e38, -3e38)[seed // 2 % 2]
    want, descale = quantise_query(query, q_mul, num_seqs, q_len, kv_heads)
    view = scale_view("k_scale", k_scale, num_seqs, kv_heads)
    factor = (view.double() * descale.double()).clamp(-FLT_MAX, FLT_MAX).float()
    assert seed % 2 or factor[0, 0].abs() == FLT_MAX
    query, k_on_device = query.to(device), k_scale.to(device)
    q_mul = None if q_mul is None else q_mul.to(device)
    strides = scale_view("k_scale", k_on_device, num_seqs, kv_heads).stride()
    out = torch.full((num_seqs * q_len, heads, d), 7.0, dtype=dtype, device=device)
    scale = torch.empty(num_seqs, kv_heads, device=device)
    launch_quantise(
        query, (query.stride(0), query.stride(1)), q_mul, k_on_device, strides, out, scale, q_len
    )  # fmt: skip
    torch.testing.assert_close(out.cpu().float(), want.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(scale.cpu(), factor, rtol=0, atol=0)
    values, own_descale = quantise_query(query, q_mul, num_seqs, q_len, kv_heads)
    torch.testing.assert_close(values.cpu().float(), want.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(own_descale.cpu(), descale, rtol=0, atol=0)
