"""Split-KV decode attention over a paged cache, as one persistent kernel.

One producer warp streams tiles of K and V into a shared-memory ring by TMA; consumer warps take whole stages and
keep their own running maximum m, sum l and O. The operands of the two products are swapped (S^T = K Q^T,
O^T = V^T P^T), so that the few q rows of a decode step are the N of an mma.sync, 8, and not an M of 64. In wide
kernels, for many q rows, four consumer warps do together what one does otherwise, by wgmma (wide.py).

    producer:   take a row of the plan; for each of its pieces, for each tile: wait for a free stage, load its pages
    consumers:  for each piece: read Q; for each tile of this warp: S, mask, online softmax, O;
                then merge the warps and write O, or the row's part of it;
                at the row's end merge the splits of the items that it completes

The pieces come from the plan (mjolnir.plan). Per lane, g = lane / 4 and t = lane % 4, as in the PTX fragments.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as cuda
from cutlass import Float32, Int32, Int64

from mjolnir.kernels import ptx
from mjolnir.kernels.args import BlockScales, DecodeArgs, read_launch_args
from mjolnir.kernels.choice import geometry_of
from mjolnir.kernels.consumer import Consumer
from mjolnir.kernels.geometry import WARP
from mjolnir.kernels.producer import Producer
from mjolnir.kernels.scale_copier import ScaleCopier
from mjolnir.kernels.wide import WideConsumer
from mjolnir.variant import Variant

SWIZZLES = {
    128: cuda.TensorMapSwizzle.s128b,
    64: cuda.TensorMapSwizzle.s64b,
    0: cuda.TensorMapSwizzle.none,
}


class DecodeKernel:
    """The kernel of one variant: ``__call__`` makes the tensor maps and launches, ``kernel`` gives a warp its role."""

    def __init__(self, variant: Variant):
        self.variant = variant
        self.geo = geometry_of(variant)
        self.producer = Producer(variant, self.geo)
        self.consumer = (WideConsumer if self.geo.wide else Consumer)(variant, self.geo)
        self.scale_copier = ScaleCopier(variant, self.geo)

    @cute.jit
    def __call__(
        self,
        # Device addresses, in the order of ``DecodeRunner.run``'s tensors; 0 for an absent one.
        q: Int64,
        out: Int64,
        k: Int64,
        v: Int64,
        k_scale: Int64,
        v_scale: Int64,
        q_mul: Int64,
        o_mul: Int64,
        lse: Int64,
        k_block_scale: Int64,
        v_block_scale: Int64,
        block_table: Int64,
        seq_lens: Int64,
        block_table_stride: Int64,
        seq_rows: Int32,
        max_len: Int32,
        launch_args: Int64,  # host address of LaunchArgs
        softmax_scale: Float32,
        stream: cuda_driver.CUstream,
    ):
        geo = self.geo
        fixed = read_launch_args(launch_args)
        page = Int32(1) << Int32(fixed.log2_page)
        num_pages, num_kv_heads, group = Int32(fixed.num_pages), Int32(fixed.num_kv_heads), Int32(fixed.group)
        box_rows = cutlass.min(page, Int32(geo.tile))
        maps, token_rows = [], []
        for operand, base, token, head, page_stride in (
            (geo.k, k, fixed.k_token_stride, fixed.k_head_stride, fixed.k_page_stride),
            (geo.v, v, fixed.v_token_stride, fixed.v_head_stride, fixed.v_page_stride),
        ):
            # A page that holds a whole tile gives all its panels in one box; smaller ones land panel by panel.
            box_panels = Int32(geo.panels(operand)) if page >= geo.tile else Int32(1)
            dims = [operand.panel_bytes, page, operand.panels, num_kv_heads, num_pages]
            strides = [token, Int64(operand.panel_bytes // 16), head, page_stride]
            box = [operand.panel_bytes, box_rows, box_panels, 1, 1]
            swizzle, rows = operand.swizzle, Int32(16)
            if cutlass.const_expr(operand.flat_rows > 0 and geo.sides == 1):
                # Rows one after the other are read as rows of 256 bytes: each line of memory is asked for once.
                flat = token * 16 == operand.row_bytes
                rows = Int32(operand.flat_rows) if flat else rows
                width = Int32(256) if flat else Int32(operand.row_bytes)
                dims[:2], box[:2] = [width, page // 16 * rows], [width, box_rows // 16 * rows]
                strides[0] = Int64(16) if flat else token
            if cutlass.const_expr(geo.joined == "tokens"):
                dims[:2], strides[0], box[:2] = [128, page // 2], token * 2, [128, box_rows // 2]
                swizzle = 128
            if cutlass.const_expr(geo.joined == "heads"):
                # All heads in one dimension, which ends with the last one: past it are zeros, not the next token.
                dims[0], dims[3] = num_kv_heads * (operand.panel_bytes // 2), Int32(1)
            if cutlass.const_expr(geo.joined == "panels" and operand.paired):
                dims[0], dims[3], box[0] = num_kv_heads * operand.row_bytes, Int32(1), operand.stride
            elif cutlass.const_expr(geo.joined == "panels"):
                dims[2], dims[3], strides[1] = num_kv_heads, Int32(1), head
            token_rows.append(rows)
            maps.append(
                cuda.create_tensor_map_tiled(
                    global_address=base,
                    dtype=cutlass.Uint8,
                    global_dims=dims,
                    global_strides=strides,
                    box_dims=box,
                    swizzle=SWIZZLES[swizzle],
                    l2_promotion=cuda.TensorMapL2Promotion.none,
                )
            )
        real_kv_heads = None
        if cutlass.const_expr(geo.joined_heads):
            real_kv_heads = num_kv_heads
            num_kv_heads = (num_kv_heads + 1) // 2
        if cutlass.const_expr(geo.joined == "heads"):
            group = 2 * group
        args = DecodeArgs(
            q,
            out,
            lse,
            block_table,
            seq_lens,
            fixed.plan,
            fixed.counters,
            fixed.partials,
            k_scale,
            v_scale,
            q_mul,
            o_mul,
            fixed.q_token_stride,
            fixed.q_head_stride,
            fixed.out_token_stride,
            fixed.out_head_stride,
            fixed.lse_token_stride,
            block_table_stride,
            fixed.k_scale_seq_stride,
            fixed.k_scale_head_stride,
            fixed.v_scale_seq_stride,
            fixed.v_scale_head_stride,
            seq_rows,
            max_len,
            Int32(fixed.log2_page),
            num_kv_heads,
            group,
            Int32(fixed.q_len),
            Int32(fixed.causal),
            Int32(fixed.l2_prefetch),
            fixed.l2_policy,
            softmax_scale,
            BlockScales(
                k_block_scale,
                Int32(fixed.k_block_token_stride),
                Int32(fixed.k_block_head_stride),
                Int32(fixed.k_block_page_stride),
            ),
            BlockScales(
                v_block_scale,
                Int32(fixed.v_block_token_stride),
                Int32(fixed.v_block_head_stride),
                Int32(fixed.v_block_page_stride),
            ),
            token_rows[0],
            token_rows[1],
            num_pages,
            real_kv_heads,
        )
        self.kernel(maps[0], maps[1], args).launch(
            grid=(Int32(fixed.grid), 1, 1),
            block=(geo.halves * geo.threads, 1, 1),
            min_blocks_per_mp=geo.ctas_per_sm // geo.halves,
            preferred_smem_carveout=100,
            use_pdl=self.variant.pdl,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tma_k: cutlass.GridConstant[cuda.TensorMap],
        tma_v: cutlass.GridConstant[cuda.TensorMap],
        args: DecodeArgs,
    ):
        geo = self.geo
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tid // WARP)
        lane = tid % WARP
        half, warp = self.role(warp)
        size = geo.halves * geo.half_bytes
        storage = cutlass.Array(cutlass.Uint8, size, space=cutlass.AddressSpace.smem, alignment=1024)
        smem = Int32(storage.data_ptr().toint()) + half * geo.half_bytes
        desc_k, desc_v = Int64(tma_k.get_ptr().toint()), Int64(tma_v.get_ptr().toint())
        if warp == 0 and lane == 0:
            for s in cutlass.range_constexpr(geo.stages):
                ptx.mbarrier_init(smem + geo.full_offset + 8 * s, Int32(geo.full_arrivals))
                ptx.mbarrier_init(smem + geo.empty_offset + 8 * s, Int32(geo.token_groups * geo.row_groups))
            for box in cutlass.range_constexpr(2):
                ptx.mbarrier_init(smem + geo.mail_full_offset + 8 * box, Int32(1))
                ptx.mbarrier_init(smem + geo.mail_free_offset + 8 * box, Int32(geo.mail_readers))
            ptx.mbarrier_init(smem + geo.exchange_free_offset, Int32(1))
            ptx.sts_b32(smem + geo.counter_offset, Int32(0))
            ptx.fence_mbarrier_init()
            ptx.prefetch_tensormap(desc_k)
            ptx.prefetch_tensormap(desc_v)
        cute.arch.sync_threads()
        # With PDL nothing that is read before griddepcontrol_wait is more than a guess: the kernel before may still be
        # writing the plan, lengths, scales, Q or the cache.
        if warp < geo.consumer_warps:
            if cutlass.const_expr(geo.registers[0] > 0):
                ptx.raise_registers(geo.registers[0])
            if cutlass.const_expr(self.variant.pdl):
                cute.arch.griddepcontrol_wait()
            self.consumer.run(args, smem, warp, lane)
        else:
            if cutlass.const_expr(geo.registers[0] > 0):
                ptx.lower_registers(geo.registers[1])
            if warp == geo.consumer_warps:
                if cutlass.const_expr(self.variant.pdl):
                    self.producer.touch(args, cta, lane)
                self.producer.run(args, cta, half, smem, lane, desc_k, desc_v)
            elif cutlass.const_expr(geo.scale_stage_bytes > 0):
                if cutlass.const_expr(self.variant.pdl):
                    cute.arch.griddepcontrol_wait()
                self.scale_copier.run(args, smem, lane)

    @cute.jit
    def role(self, warp):
        """(half, warp of the half)."""
        geo = self.geo
        half, of_half = warp // geo.half_warps, warp % geo.half_warps
        if cutlass.const_expr(geo.crowd):
            feeder = warp - geo.halves * geo.consumer_warps
            if feeder >= 0:
                half, of_half = feeder // geo.feeding_warps, geo.consumer_warps + feeder % geo.feeding_warps
        return half, of_half
