"""From ``DecodeRunner.run`` to the kernel, in a few microseconds: what a layout of tensors decides is found out once.

A model calls ``run`` for every layer of every token, over tensors laid out as the call before. So all that follows from
their layout, the checked ``Signature``, the kernel and its arguments but for addresses, is kept, and whether a layout
is the known one is asked of PyTorch in one call (``same_layout``). Addresses are read anew in every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mjolnir.checks import layout_key, remember
from mjolnir.signature import Signature, same_layout

if TYPE_CHECKING:
    from mjolnir.backends.cute import CuteBackend, Launch
    from mjolnir.runner import StepPlan

# The public functions make a Stream object and look whether CUDA is initialised: 2 us of the 8 that a launch may take.
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream)
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


class _Known(NamedTuple):
    """What a run over tensors of one layout found out, for the next one."""

    same_layout: Callable[..., bool]
    signature: Signature
    launch: Launch  # keeps what ``constants`` points at
    kernel: Callable[..., Any]
    constants: tuple[int, int, int, int]  # stride, rows and tokens per row of the block table; address of LaunchArgs


class Launcher:
    """Of one runner. ``check`` finds a layout's ``Signature``, and raises where the tensors are not as ``run`` says."""

    def __init__(
        self, backend: CuteBackend, check: Callable[[StepPlan, tuple[Any, ...]], Signature], page_size: int
    ) -> None:
        self.backend, self.check, self.page_size = backend, check, page_size
        self.device_index = backend.device.index
        self._known: dict[tuple[Any, ...], _Known] = {}
        self._newest: dict[tuple[Any, ...], _Known] = {}  # by which tensors are given

    def __call__(self, plan: StepPlan, softmax_scale: float, run_tensors: tuple[Any, ...]) -> None:
        """Launch the kernel; ``run_tensors`` are those of ``DecodeRunner.run``, in its order."""
        tensors = (*run_tensors, plan.block_table, plan.seq_lens)
        query, out, _, _, k_scale, v_scale, q_mul, o_mul, lse, k_blocks, v_blocks = run_tensors
        try:
            addresses = [0 if t is None else t.data_ptr() for t in tensors]
        except (AttributeError, RuntimeError):  # no tensor, or a sparse one: the check says which
            self.check(plan, run_tensors)
            raise
        q, o, k, v, _, _, q_m, o_m, _, k_b, v_b, _, _ = addresses
        aligned = not (q | o | k | v | q_m | o_m | k_b | v_b) & 15  # what else is given needs no more than 4 bytes
        given = [t for t in tensors if t is not None]
        if k_scale is v_scale:
            del given[5]
        kind = (plan.q_len, plan.causal, k_scale is v_scale, q_mul is None, o_mul is None, lse is None,
                k_blocks is None, v_blocks is None)  # fmt: skip
        known = self._newest.get(kind)
        if known is None or not aligned or not known.same_layout(*given):
            known = self._know(plan, tensors, given, known)
            if aligned:
                self._newest[kind] = known
        signature = known.signature
        signature.check_step(plan.num_seqs, plan.q_len)
        # The copies take all rows: a captured graph may replay a plan of more sequences than it was captured with.
        if signature.pack_query:
            query = query.clone(memory_format=torch.contiguous_format)
            addresses[0] = query.data_ptr()
        target = out
        if signature.pack_out:
            target = out.clone(memory_format=torch.contiguous_format)
            addresses[1] = target.data_ptr()
        known.kernel(*addresses, *known.constants, softmax_scale, raw_stream(self.device_index))
        if target is not out:
            with torch.no_grad():
                out.copy_(target)

    def _know(
        self, plan: StepPlan, tensors: tuple[Any, ...], given: list[torch.Tensor], newest: _Known | None
    ) -> _Known:
        """What holds for tensors laid out as these, found out once. Guards that did not know their own layout again,
        as in another autograd mode, are made anew."""
        key = (plan.q_len, plan.causal, len(given), layout_key(tensors))  # guards are of so many tensors
        known = self._known.get(key)
        if known is None:
            signature = self.check(plan, tensors[:-2])
            launch = self.backend.prepare(signature, plan.q_len, plan.causal)
            table, lens = tensors[-2:]
            rows = min(table.shape[0], lens.shape[0])
            constants = (table.stride(0), rows, table.shape[1] * self.page_size, launch.address)
            known = _Known(same_layout(given), signature, launch, launch.kernel, constants)
            remember(self._known, key, known)
        elif known is newest:
            known = self._known[key] = known._replace(same_layout=same_layout(given))
        return known
