"""What a launch of the decode kernel takes besides addresses of tensors: the same in every call over one layout.

It lies in host memory, one int64 a field in this order, and the host function gets its address: 33 arguments of their
own take Python 0.7 µs a call.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple


class LaunchArgs(NamedTuple):
    """Python ints in a backend, Int64 in a kernel. Strides in elements, those of K and V in units of 16 bytes, those of
    block scales in bytes."""

    plan: Any  # device addresses of the runner's buffers
    counters: Any
    partials: Any
    q_token_stride: Any
    q_head_stride: Any
    out_token_stride: Any
    out_head_stride: Any
    lse_token_stride: Any
    k_token_stride: Any
    k_head_stride: Any
    k_page_stride: Any
    v_token_stride: Any
    v_head_stride: Any
    v_page_stride: Any
    k_scale_seq_stride: Any
    k_scale_head_stride: Any
    v_scale_seq_stride: Any
    v_scale_head_stride: Any
    k_block_token_stride: Any
    k_block_head_stride: Any
    k_block_page_stride: Any
    v_block_token_stride: Any
    v_block_head_stride: Any
    v_block_page_stride: Any
    num_pages: Any
    log2_page: Any
    num_kv_heads: Any
    group: Any
    q_len: Any
    causal: Any
    l2_prefetch: Any
    l2_policy: Any
    grid: Any

    def to_memory(self) -> array[int]:
        """As the host function reads them, at ``buffer_info()[0]`` for as long as the array lives."""
        return array("q", self)
