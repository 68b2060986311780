"""Quantising queries to e4m3 in one launch, in Triton: amax, descale, rounding, q_mul."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mjolnir.formats.in_triton.codes import e4m3_values, fp8_word, joined_4, quarters, widened
from mjolnir.formats.in_triton.scales import quotient
from mjolnir.kernels.triton_launch import native

FLT_MAX = tl.constexpr((2 - 2**-23) * 2.0**127)


# Not specialised: what varies between layers or steps must not compile another kernel.
@triton.jit(do_not_specialize=["k_scale_seq", "k_scale_head"], do_not_specialize_on_alignment=["k_scale", "q_mul"])
def quantise_query_kernel(
    query, q_token, q_head, q_mul, k_scale, k_scale_seq, k_scale_head, out, out_scale,
    Q_LEN: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    HAS_Q_MUL: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """A program takes the q_len · group rows of a sequence and KV head. ``out`` is dense."""
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    row = tl.arange(0, ROWS)
    live = (row < Q_LEN * GROUP)[:, None]
    token = seq * Q_LEN + row // GROUP
    head = kv_head * GROUP + row % GROUP
    channel = tl.arange(0, D)[None, :]
    x = widened(tl.load(query + (token * q_token + head * q_head)[:, None] + channel, mask=live, other=0))
    if HAS_Q_MUL:
        x *= tl.load(q_mul + (head * D)[:, None] + channel, mask=live, other=0)
    size = tl.abs(x)
    amax = tl.max(tl.max(tl.where(size < float("inf"), size, 0.0), axis=1), axis=0)  # NaN compares false too
    scale = tl.div_rn(amax, 448.0)
    y = quotient(x, scale, "fp8", False, NATIVE)
    x0, x1, x2, x3 = quarters(y, ROWS, D)
    x0, x1, x2, x3 = e4m3_values(fp8_word(x0, x1, x2, x3, False, NATIVE), NATIVE)
    values = joined_4(x0, x1, x2, x3, ROWS, D).to(out.dtype.element_ty)
    tl.store(out + ((token * KV_HEADS * GROUP + head) * D)[:, None] + channel, values, mask=live)
    factor = tl.load(k_scale + seq * k_scale_seq + kv_head * k_scale_head)
    product = tl.clamp(factor * scale, -FLT_MAX, FLT_MAX, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out_scale + seq * KV_HEADS + kv_head, product)


def launch_quantise(
    query: torch.Tensor,
    q_strides: tuple[int, int],
    q_mul: torch.Tensor | None,
    k_scale: torch.Tensor,
    k_scale_strides: tuple[int, int],
    out: torch.Tensor,
    out_scale: torch.Tensor,
    q_len: int,
) -> None:
    """Queue the launch for every sequence that ``out_scale`` (num_seqs, h_k) has a row for, on the current stream.

    ``out`` is (num_seqs · q_len, h_q, d), dense, of the query's dtype; strides are (token, head) and (sequence, head).
    """
    num_seqs, num_kv_heads = out_scale.shape
    _, num_heads, head_size = out.shape
    group = num_heads // num_kv_heads
    rows = triton.next_power_of_2(q_len * group)
    quantise_query_kernel[(num_seqs, num_kv_heads)](
        query, *q_strides, k_scale if q_mul is None else q_mul, k_scale, *k_scale_strides, out, out_scale,
        Q_LEN=q_len, GROUP=group, KV_HEADS=num_kv_heads, D=head_size, ROWS=rows,
        HAS_Q_MUL=q_mul is not None, NATIVE=native(query.device),
        num_warps=max(1, min(8, rows * head_size // 512)),
    )  # fmt: skip
