"""The compiled-kernel backend: fixed device buffers for plans and partial results, and the launch."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mjolnir.compiler import kernel_cache
from mjolnir.kernels.choice import geometry_of, takes_crowd
from mjolnir.kernels.geometry import UNSET
from mjolnir.kernels.launch_args import LaunchArgs
from mjolnir.plan import (
    PIECE_COSTS,
    PLAN_COLUMNS,
    PLAN_TILE,
    PlanShape,
    build_plan,
    fixed_rows,
)
from mjolnir.signature import DTYPE_NAMES, RunnerShape, Signature
from mjolnir.tuning import Tuning
from mjolnir.variant import PANEL_ROWS, Variant, rows_class

logger = logging.getLogger(__name__)

EVICT_FIRST = 0x12F0000000000000
EVICT_NORMAL = 0x1000000000000000
"""L2 cache-policy operands of the bulk copies, as createpolicy.fractional makes them for a fraction of 1."""

COUNTERS_PER_ROW = 2


@dataclasses.dataclass(frozen=True)
class PlanBuffer:
    """Device memory of the plans of one q_len; every plan of that q_len is written here.

    Header and rows, then two zeroed int32 counters per row. They reset themselves; each plan zeroes them again, so
    that a launch that was aborted cannot spoil the next step.
    """

    device: torch.Tensor  # int32, flat
    shape: PlanShape

    @classmethod
    def make(cls, shape: PlanShape, device: torch.device) -> PlanBuffer:
        size = (1 + shape.num_rows) * PLAN_COLUMNS + shape.num_rows * COUNTERS_PER_ROW
        return cls(torch.zeros(size, dtype=torch.int32, device=device), shape)

    @property
    def counters_ptr(self) -> int:
        return self.device.data_ptr() + (1 + self.shape.num_rows) * PLAN_COLUMNS * 4


def kernel_variant(
    shape: RunnerShape, arch: str, tuning: Tuning, q_len: int, q_dtype: str, q_split: bool = False
) -> Variant:
    """The kernel that a runner of this shape takes for a q_len and a query dtype; found without a GPU."""
    joined = shape.joined(q_len)
    rows = q_len * shape.group * (2 if joined == "heads" else 1)
    variant = Variant(
        arch=arch,
        kv_format=shape.kv_format,
        q_dtype=q_dtype,
        out_dtype=DTYPE_NAMES[shape.out_dtype],
        head_size=shape.head_size,
        rows=2 * PANEL_ROWS if joined == "panels" else rows_class(rows),
        split=tuning.max_splits != 1,
        pdl=tuning.pdl,
        q_split=q_split and shape.kv_format == "bf16",
        l2_prefetch=tuning.l2_prefetch > 0,
        stages=tuning.kv_stages or 0,
        ctas_per_sm=tuning.ctas_per_sm or 0,
        v_format="" if shape.v_format in (None, shape.kv_format) else shape.v_format,
        joined=joined,
    )
    return dataclasses.replace(variant, crowd=shape.has_many_items and takes_crowd(variant))


def plan_shape(
    tuning: Tuning, num_ctas: int, num_kv_heads: int, max_num_seqs: int, pairs: bool, bits: int
) -> PlanShape:
    """The fixed sizes of a plan, from a runner's arguments; ``bits``: of an element of K or V, whichever has fewer."""
    if tuning.fixed_split is None or tuning.max_step_tokens is None:
        return PlanShape(num_ctas, num_kv_heads, tuning.max_splits, pairs, piece_cost=PIECE_COSTS[bits])
    rows = fixed_rows(max_num_seqs, tuning.max_step_tokens, tuning.fixed_split, num_kv_heads)
    return PlanShape(num_ctas, num_kv_heads, fixed_tiles=tuning.fixed_split // PLAN_TILE, fixed_rows=rows)


class CuteBackend:
    """Owns what one runner keeps on its device, which must be the current one of a caller."""

    def __init__(
        self, *, arch: str, device: torch.device, shape: RunnerShape, max_num_seqs: int, tuning: Tuning
    ) -> None:
        self.arch, self.device, self.shape, self.tuning = arch, device, shape, tuning
        self.sm_count = tuning.sm_count or torch.cuda.get_device_properties(device).multi_processor_count
        self.max_num_seqs = max_num_seqs
        self._planners: set[PlanShape] = set()  # sizes of plans that the device can make: a kernel each
        self._plan_again: dict[int, Callable[[torch.Tensor, int, int], None]] = {}  # by q_len: the next launch of one
        self._plan_buffers: dict[int, PlanBuffer] = {}
        # By size of a partial result and rows of the plan; shared by the q_lens of which both are the same.
        self._partials: dict[tuple[int, int], torch.Tensor] = {}

    def variant(self, q_len: int, q_dtype: str, q_split: bool) -> Variant:
        """The kernel for a q_len and a query dtype."""
        return kernel_variant(self.shape, self.arch, self.tuning, q_len, q_dtype, q_split)

    def plan_buffer(self, q_len: int) -> PlanBuffer:
        """The buffer of this q_len, made when first asked for; so are the partial results of its row class."""
        buffer = self._plan_buffers.get(q_len)
        if buffer is None:
            geometry = geometry_of(self.variant(q_len, "bf16", False))
            num_ctas = self.sm_count * geometry.ctas_per_sm
            heads = -(-self.shape.num_kv_heads // geometry.heads_per_item)
            bits = min(geometry.k.bits, geometry.v.bits)
            shape = plan_shape(self.tuning, num_ctas, heads, self.max_num_seqs, geometry.halves == 2, bits)
            buffer = PlanBuffer.make(shape, self.device)
            size = geometry.partial_floats, shape.num_rows
            if size not in self._partials:
                # A row leaves at most two unfinished pieces: the first and the last of its work.
                floats = 2 * shape.num_rows * geometry.partial_floats if self.tuning.max_splits != 1 else 4
                self._partials[size] = torch.full((floats,), UNSET, dtype=torch.int32, device=self.device)
            self._plan_buffers[q_len] = buffer
        return buffer

    def upload_plan(self, seq_lens: npt.NDArray[np.int64], q_len: int, margin: int) -> None:
        """Build a plan on the host and queue its copy on the current stream.

        The pinned staging memory is new for each plan: PyTorch's pinned allocator reuses a block only once the copy
        from it has run.
        """
        buffer = self.plan_buffer(q_len)
        staging = torch.zeros(buffer.device.shape, dtype=torch.int32, pin_memory=True)
        plan = build_plan(seq_lens, buffer.shape, margin)
        staging.numpy()[: plan.size].reshape(plan.shape)[:] = plan
        buffer.device.copy_(staging, non_blocking=True)

    def compile_planner(self) -> None:
        """Compile the kernels of ``plan_on_device``, for the q_lens that have a plan buffer. Only that needs them, so
        without Triton this does nothing, and where Triton cannot compile (it needs a C compiler) it warns."""
        if importlib.util.find_spec("triton") is None:
            return
        for shape in {buffer.shape for buffer in self._plan_buffers.values()} - self._planners:
            scratch = PlanBuffer.make(shape, self.device)
            try:
                self._launch_planner(scratch, scratch.device[:1], 0, 0)
            except Exception as error:  # Triton's, of many kinds
                logger.warning("plans cannot be made on %s, only on the host: %s", self.device, error)
                return

    def plan_on_device(self, seq_lens: torch.Tensor, num_seqs: int, q_len: int, margin: int) -> None:
        """Queue the launch that builds a plan from device lengths on the current stream.

        Raises:
            ModuleNotFoundError: Triton is not installed.
            RuntimeError: the planning kernel is not compiled yet and a CUDA graph is being captured.
        """
        again = self._plan_again.get(q_len)
        if again is not None:
            again(seq_lens, num_seqs, margin)
            return
        buffer = self.plan_buffer(q_len)
        if buffer.shape not in self._planners and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the planning kernel is not compiled and a CUDA graph is being captured: "
                "call precompile() or plan() once before the capture"
            )
        again = self._launch_planner(buffer, seq_lens, num_seqs, margin)
        if again is not None:
            self._plan_again[q_len] = again

    def _launch_planner(
        self, buffer: PlanBuffer, seq_lens: torch.Tensor, num_seqs: int, margin: int
    ) -> Callable[[torch.Tensor, int, int], None] | None:
        try:
            from mjolnir.kernels.plan_kernel import build_plan_on_device
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("plan() without host lengths needs Triton, which is not installed") from error

        again = build_plan_on_device(seq_lens, num_seqs, margin, buffer.shape, buffer.device, self.max_num_seqs)
        self._planners.add(buffer.shape)
        return again

    def prepare(self, signature: Signature, q_len: int, causal: bool) -> Launch:
        """The kernel, and its arguments that the caller's tensors decide by their layouts alone."""
        variant = self.variant(q_len, signature.q_dtype, signature.needs_q_split)
        kernel = self.obtain(variant)
        geometry = geometry_of(variant)
        buffer = self.plan_buffer(q_len)
        args = LaunchArgs(
            buffer.device.data_ptr(),
            buffer.counters_ptr,
            self._partials[geometry.partial_floats, buffer.shape.num_rows].data_ptr(),
            *signature.q_strides,
            *signature.out_strides,
            signature.lse_stride,
            *signature.k_strides,
            *signature.v_strides,
            *signature.k_scale_strides,
            *signature.v_scale_strides,
            *signature.k_block_strides,
            *signature.v_block_strides,
            num_pages=signature.num_pages,
            log2_page=signature.page_size.bit_length() - 1,
            num_kv_heads=self.shape.num_kv_heads,
            group=self.shape.group,
            q_len=q_len,
            causal=int(causal),
            l2_prefetch=self.tuning.l2_prefetch,
            l2_policy=EVICT_FIRST if self.tuning.kv_evict_first else EVICT_NORMAL,
            grid=buffer.shape.num_ctas // geometry.halves,
        )
        return Launch(kernel, args.to_memory())

    def is_compiled(self, variant: Variant) -> bool:
        return kernel_cache().is_compiled(variant)

    def obtain(self, variant: Variant) -> Callable[..., Any]:
        """The compiled kernel.

        Raises:
            RuntimeError: it would have to be loaded or compiled while a CUDA graph is being captured.
        """
        cache = kernel_cache()
        if not cache.is_compiled(variant) and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"kernel {variant.name} is not compiled and a CUDA graph is being captured: "
                "call precompile() or ensure_compiled() before the capture"
            )
        return cache.get(variant)


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel, called as ``DecodeKernel.__call__``, and its arguments that are the same in every call."""

    kernel: Callable[..., Any]
    args: array[int]

    @property
    def address(self) -> int:
        """Host address of ``args``, which live as long as this."""
        return self.args.buffer_info()[0]
