"""The run-time arguments of the decode kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from mjolnir.kernels.launch_args import LaunchArgs


class BlockScales(NamedTuple):
    """Block scales of K or V; strides in bytes."""

    base: Int64
    token_stride: Int32
    head_stride: Int32
    page_stride: Int32


class DecodeArgs(NamedTuple):
    """Addresses are bytes in device memory; strides count elements. ``DecodeKernel.__call__`` has what is left of its
    arguments and of ``LaunchArgs`` once the tensor maps are made."""

    q: Int64
    out: Int64
    lse: Int64  # 0: not wanted
    block_table: Int64
    seq_lens: Int64
    plan: Int64
    counters: Int64
    partials: Int64
    k_scale: Int64
    v_scale: Int64
    q_mul: Int64  # 0: none
    o_mul: Int64  # 0: none
    q_token_stride: Int64
    q_head_stride: Int64
    out_token_stride: Int64
    out_head_stride: Int64
    lse_token_stride: Int64
    block_table_stride: Int64
    k_scale_seq_stride: Int64
    k_scale_head_stride: Int64
    v_scale_seq_stride: Int64
    v_scale_head_stride: Int64
    seq_rows: Int32  # of the block table, and of seq_lens at least
    max_len: Int32  # tokens that a row of the block table can name
    log2_page: Int32
    num_kv_heads: Int32  # joined ones count as one; group likewise, see heads.py
    group: Int32
    q_len: Int32
    causal: Int32
    l2_prefetch: Int32
    l2_policy: Int64
    softmax_scale: Float32
    k_blocks: BlockScales
    v_blocks: BlockScales
    k_token_rows: Int32  # of the tensor map, per 16 tokens; v_token_rows likewise
    v_token_rows: Int32
    num_pages: Int32
    real_kv_heads: Any = None  # Int32 where heads are joined


def read_launch_args(address: Int64) -> LaunchArgs:
    """In a host function: what ``LaunchArgs.to_memory`` wrote there."""

    def read(index: int) -> Int64:
        pointer = llvm.inttoptr(llvm.PointerType.get(), (address + Int64(8 * index)).ir_value())
        return Int64(llvm.load(T.i64(), pointer))

    return LaunchArgs(*(read(index) for index in range(len(LaunchArgs._fields))))
