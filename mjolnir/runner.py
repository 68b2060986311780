"""The runner: ``plan()`` once per step, ``run()`` once per layer. It imports no serving engine.

runner = DecodeRunner(num_heads=32, num_kv_heads=8, head_size=128, page_size=64,
                      out_dtype=torch.bfloat16, max_num_seqs=256)
plan = runner.plan(seq_lens_host, num_seqs, 1, block_table, seq_lens)
for layer in layers:
    runner.run(plan, query, out, k_cache, v_cache, k_scale, v_scale, softmax_scale)
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mjolnir.backends import CUTE, choose_backend, device_arch, find_device, torch_ref
from mjolnir.checks import check_choice, check_positive_int, check_tensor, host_lengths, layout_key, remember
from mjolnir.formats import get_formats
from mjolnir.launcher import Launcher, current_device
from mjolnir.plan import INT32_MAX
from mjolnir.query_fp8 import QueryQuantiser
from mjolnir.signature import DTYPE_NAMES, KV_LAYOUTS, RunnerShape, Signature, needs_q_split, same_layout
from mjolnir.tuning import Tuning
from mjolnir.variant import HEAD_SIZES, MAX_ROWS

logger = logging.getLogger(__name__)

PAGE_SIZES = (16, 32, 64, 128, 256)

FLT_MAX = (2 - 2**-23) * 2.0**127


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One step's plan, for every layer of one KV-cache group. It points at the runner's buffers: the next plan of
    the same q_len overwrites what this one made, and a captured CUDA graph replays whichever plan is there.

    Attributes:
        num_seqs: sequences planned; rows of later sequences are not touched.
        q_len: query tokens per sequence.
        causal: whether query token i of a sequence of length L sees keys 0 … L − q_len + i, or all L.
        block_table: (≥ num_seqs, max_pages) int32, read by every run.
        seq_lens: (≥ num_seqs,) int32, read by every run.
    """

    num_seqs: int
    q_len: int
    causal: bool
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    runner: DecodeRunner = dataclasses.field(repr=False)


class DecodeRunner:
    """Decode attention over a paged KV cache, for one shape of layer.

    Args:
        num_heads: query heads h_q, a multiple of num_kv_heads.
        num_kv_heads: KV heads h_k.
        head_size: d; 64, 128 or 256.
        page_size: tokens per page; 16, 32, 64, 128 or 256.
        out_dtype: torch.bfloat16 or torch.float16.
        max_num_seqs: largest num_seqs of a plan.
        max_q_len: largest q_len of a plan; max_q_len × h_q / h_k is at most 64.
        q_mode: "bf16" keeps Q in 16 bits; "fp8" quantises it before every run, one descale per sequence and KV head
            (mjolnir/query_fp8.py).
        kv_format: "fp8" (e4m3), "fp8_e5m2", "e2m3", "nvfp4", "bf16" or "fp16"; docs/formats.md says what they store.
        v_format: V's format where it is not K's.
        kv_layout: a promise about the caches' strides within a page, which lets neighbouring rows be read together
            where they are short: "HND", neighbouring tokens of a head lie side by side (the token stride is the bytes
            of a row); "NHD", neighbouring heads of a token do (the head stride is), and heads are joined by runners
            for many sequences. None: no promise. ``run`` refuses caches that break it. Where heads of 64 bytes are
            joined a NaN or Inf in K of one is in the results of both.
        ctas_per_sm: workers per multiprocessor, each a producer warp and its consumers; two of them are the halves of
            one thread block. None: tuned. With more than one, or with kv_stages, 32 and 64 q rows take mma.sync where
            they would take wgmma, which is faster; e2m3 has four consumer warps even in runners for many sequences.
        max_splits: most splits of a sequence and KV head; 1 never splits and compiles the merge out; None: as many
            as balance asks for.
        kv_stages: stages of the K and V ring, more than four of them of fewer tokens each; None: tuned.
        pdl: launch with programmatic stream serialization (the prologue overlaps the kernel before).
        l2_prefetch: tiles beyond the ring to prefetch into L2; 0: none.
        kv_evict_first: stream K and V through L2 with the evict-first policy.
        device: a CUDA device; on "cpu", and on GPUs that the kernels do not compile for, the reference backend runs.
        sm_count: multiprocessors to plan for; None: all of the device's.
        fixed_split: batch-invariant mode: sequences are split every so many tokens, a multiple of 64, whatever the
            batch is, and a sequence's result is bitwise the same alone, in any batch and at any position, if plans are
            made from the lengths that run, with one margin. Not among runners that differ in more than their steps:
            max_num_seqs decides whether heads of NHD pages are joined, and how many warps e2m3 has, and so the order
            of sums. None: splits follow from balance, which is faster.
        max_step_tokens: needed with fixed_split: most tokens that a step's sequences have together, shared pages
            counted each time, margins too. h_k · (max_num_seqs + max_step_tokens / fixed_split) rows of the plan and
            its partial results are kept for them. A step of more is refused if its lengths are on the host; planned
            on the device, its results are right, but not batch-invariant.

    Attributes:
        backend: "cute" or "reference", and ``backend_reason`` says why.

    A runner's buffers belong to one stream at a time; two streams or threads take two runners.

    Raises:
        ValueError, TypeError: an argument out of its range, named.
    """

    @torch.inference_mode(False)  # buffers made in it could not be written outside
    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        page_size: int,
        out_dtype: torch.dtype,
        max_num_seqs: int,
        max_q_len: int = 1,
        q_mode: str = "bf16",
        kv_format: str = "fp8",
        v_format: str | None = None,
        kv_layout: str | None = None,
        ctas_per_sm: int | None = None,
        max_splits: int | None = None,
        kv_stages: int | None = None,
        pdl: bool = True,
        l2_prefetch: int = 0,
        kv_evict_first: bool = True,
        device: torch.device | str = "cuda",
        sm_count: int | None = None,
        fixed_split: int | None = None,
        max_step_tokens: int | None = None,
    ) -> None:
        self.num_heads = check_positive_int("num_heads", num_heads)
        self.num_kv_heads = check_positive_int("num_kv_heads", num_kv_heads)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads ({num_kv_heads}), got {num_heads}")
        self.head_size = check_choice("head_size", head_size, HEAD_SIZES)
        self.page_size = check_choice("page_size", page_size, PAGE_SIZES)
        self.out_dtype = check_choice("out_dtype", out_dtype, tuple(DTYPE_NAMES))
        self.max_num_seqs = check_positive_int("max_num_seqs", max_num_seqs)
        self.max_q_len = check_positive_int("max_q_len", max_q_len)
        self.group = self.num_heads // self.num_kv_heads
        if self.max_q_len * self.group > MAX_ROWS:
            raise ValueError(
                f"max_q_len * (num_heads / num_kv_heads) must be at most {MAX_ROWS}, got {max_q_len} * {self.group}"
            )
        self.q_mode = check_choice("q_mode", q_mode, ("bf16", "fp8"))
        self.kv_format, self.v_format = get_formats(kv_format, v_format)
        tuning = Tuning(
            ctas_per_sm, max_splits, kv_stages, pdl, l2_prefetch, kv_evict_first, sm_count, fixed_split, max_step_tokens
        )
        self._max_step_tokens = tuning.max_step_tokens  # None without fixed splits
        self.device = find_device(device)
        self._device_index = self.device.index
        self.backend, self.backend_reason = choose_backend(self.device)
        self._shape = RunnerShape(
            self.num_heads, self.num_kv_heads, self.head_size, self.page_size, self.out_dtype, self.kv_format.name,
            self.v_format.name, check_choice("kv_layout", kv_layout, (None, *KV_LAYOUTS)),
            self.max_num_seqs,
        )  # fmt: skip
        self._signatures: dict[tuple[Any, ...], Signature] = {}
        self._quantiser: QueryQuantiser | None = None
        if self.q_mode == "fp8":
            self._quantiser = QueryQuantiser(self._shape, self.device, self.max_num_seqs, self.max_q_len)
        self._same_table, self._table_rows = same_layout([]), 0  # the newest plan's tensors, and its sequences
        self._planned: dict[int, int] = {}  # by q_len: num_seqs of the newest plan
        self._cute: Any = None
        if self.backend == CUTE:
            from mjolnir.backends.cute import CuteBackend

            arch = device_arch(self.device)
            if arch is None:
                raise RuntimeError(f"{self.device} has no kernels")  # choose_backend has ruled this out
            self._cute = CuteBackend(
                arch=arch, device=self.device, shape=self._shape, max_num_seqs=self.max_num_seqs, tuning=tuning
            )
            self._launcher = Launcher(self._cute, self._check, self.page_size)
            for q_len in range(1, self.max_q_len + 1):
                self._cute.plan_buffer(q_len)
        elif self.device.type == "cuda":
            logger.warning("mjolnir runs its reference backend on %s: %s", self.device, self.backend_reason)

    def plan(
        self,
        seq_lens_host: Any,
        num_seqs: int,
        q_len: int,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        margin: int = 0,
        causal: bool = True,
    ) -> StepPlan:
        """Plan a step, on the current stream: on the host and by a copy, or, without host lengths, by one launch that
        reads ``seq_lens``, which a CUDA graph may capture.

        Args:
            seq_lens_host: num_seqs or more ints on the host, tokens per sequence, the new ones included; or None. They
                decide balance only: results follow ``seq_lens``.
            num_seqs: sequences of the step; 0 is allowed.
            q_len: query tokens per sequence.
            block_table: (≥ num_seqs, max_pages) int32 on the device; entries past a sequence's last page are never
                used. An entry inside a sequence that names no page reads as zeros on a GPU.
            seq_lens: (≥ num_seqs,) int32 on the device; a length past max_pages · page_size counts as that many on a
                GPU. The reference backend raises in both cases.
            margin: plan every sequence this many tokens longer.
            causal: see ``StepPlan``.

        Raises:
            ValueError, TypeError: an argument out of its range, named.
            RuntimeError: a CUDA graph is being captured, and a copy from the host would be frozen into it, or the
                planning kernel is not compiled.
            ModuleNotFoundError: without host lengths, where Triton is not installed.
        """
        num_seqs = check_positive_int("num_seqs", num_seqs, minimum=0)
        q_len = self._check_q_len(q_len)
        margin = check_positive_int("margin", margin, minimum=0)
        if not isinstance(causal, bool):  # the check takes longer than to see that there is none to make
            causal = check_choice("causal", causal, (True, False))
        if num_seqs > self.max_num_seqs:
            raise ValueError(f"num_seqs must be at most max_num_seqs = {self.max_num_seqs}, got {num_seqs}")
        if num_seqs > self._table_rows or not self._same_table(block_table, seq_lens):
            self._check_table(num_seqs, block_table, seq_lens)
            self._same_table = same_layout([block_table, seq_lens])
            self._table_rows = num_seqs
        host_lens = None if seq_lens_host is None else host_lengths(seq_lens_host, num_seqs)
        if host_lens is not None and self._max_step_tokens is not None:
            tokens = int(host_lens.sum()) + margin * num_seqs
            if tokens > self._max_step_tokens:
                raise ValueError(
                    f"seq_lens_host must have at most max_step_tokens = {self._max_step_tokens} tokens in all, margins "
                    f"included, got {tokens}"
                )
        if self._cute is not None:
            if current_device() == self._device_index:
                self._plan_on_gpu(host_lens, seq_lens, num_seqs, q_len, margin)
            else:
                with torch.cuda.device(self.device):
                    self._plan_on_gpu(host_lens, seq_lens, num_seqs, q_len, margin)
        self._planned[q_len] = num_seqs
        return StepPlan(num_seqs, q_len, causal, block_table, seq_lens, self)

    def _check_table(self, num_seqs: int, block_table: torch.Tensor, seq_lens: torch.Tensor) -> None:
        check_tensor("block_table", block_table, dtype=torch.int32, ndim=2, device=self.device, contiguous_rows=True)
        check_tensor("seq_lens", seq_lens, dtype=torch.int32, ndim=1, device=self.device, contiguous_rows=True)
        for name, rows in (("block_table", block_table), ("seq_lens", seq_lens)):
            if rows.shape[0] < num_seqs:
                raise ValueError(f"{name} must have at least num_seqs = {num_seqs} rows, got {rows.shape[0]}")
        if num_seqs and not block_table.shape[1]:
            raise ValueError(f"block_table must have at least one column, got shape {tuple(block_table.shape)}")
        if block_table.shape[1] * self.page_size > INT32_MAX:
            raise ValueError(
                f"block_table must have at most {INT32_MAX // self.page_size} columns of {self.page_size} tokens, got "
                f"{block_table.shape[1]}"
            )

    def _plan_on_gpu(
        self, host_lens: npt.NDArray[np.int64] | None, seq_lens: torch.Tensor, num_seqs: int, q_len: int, margin: int
    ) -> None:
        if host_lens is None:
            self._cute.plan_on_device(seq_lens, num_seqs, q_len, margin)
        elif torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "plan() with host lengths cannot be captured in a CUDA graph; plan before each replay, or without host "
                "lengths"
            )
        else:
            self._cute.upload_plan(host_lens, q_len, margin)

    def run(
        self,
        plan: StepPlan,
        query: torch.Tensor,
        out: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        softmax_scale: float,
        q_mul: torch.Tensor | None = None,
        o_mul: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        k_block_scale: torch.Tensor | None = None,
        v_block_scale: torch.Tensor | None = None,
    ) -> None:
        """Attention of one layer, on the current stream.

        Args:
            plan: of this runner.
            query: (tokens, h_q, d) or (tokens, h_q · d), bf16 or fp16, any token stride; token i of sequence s is row
                s · q_len + i. Read in place where rows start at multiples of 16 bytes, else packed first.
            out: likewise, of ``out_dtype``, no stride 0; rows from num_seqs · q_len on are not touched.
            k_cache, v_cache: (pages, page_size, h_k, w) views of the format's dtype (uint8 is fine for fp8), any
                strides that are multiples of 16 bytes and keep the promise of ``kv_layout``, last dimension contiguous,
                16-byte aligned. w is d for 16-bit and fp8 formats, and the bytes of a packed row, uint8, below that:
                3d/4 for e2m3, d/2 for nvfp4.
            k_scale, v_scale: fp32 descales on the device: 1 element, (h_k,) or (≥ num_seqs, h_k), any strides. With
                q_mode="fp8" K's times the query's counts as the largest fp32 number where it is beyond that.
            softmax_scale: multiplies Q · K.
            q_mul, o_mul: (h_q, d) fp32 factors on Q before and on O after.
            lse: (≥ tokens, h_q) fp32, no stride 0; receives the natural-log log-sum-exp of the scores, −inf where no
                key is seen.
            k_block_scale, v_block_scale: for nvfp4, e4m3 scales of 16 elements each: (pages, page_size, h_k, d/16)
                float8_e4m3fn or uint8, rows contiguous and aligned to their d/16 bytes, any other strides.
                ``split_nvfp4_cache`` makes cache and scale views of tensors that hold both.

        A query token that sees no key gets O = 0. V of the q_len − 1 newest tokens must be finite: query tokens that
        may not see them still multiply them by 0.

        Raises:
            ValueError, TypeError: an argument out of its range, named.
            RuntimeError: the kernel is not compiled and a CUDA graph is being captured, or neither is it compiled nor
                the CuTe DSL installed.
        """
        if not isinstance(plan, StepPlan):
            raise TypeError(f"plan must be a StepPlan, got {type(plan).__name__}")
        if plan.runner is not self:
            raise ValueError("plan was made by another runner")
        if self._planned[plan.q_len] != plan.num_seqs:  # the tensors were made for another number of rows
            raise ValueError(
                f"plan of {plan.num_seqs} sequences was overwritten by a later one of {self._planned[plan.q_len]}, of "
                f"q_len {plan.q_len} too"
            )
        if not isinstance(softmax_scale, (float, int)):
            raise TypeError(f"softmax_scale must be a float, got {softmax_scale!r} ({type(softmax_scale).__name__})")
        if not abs(softmax_scale) <= FLT_MAX:
            raise ValueError(f"softmax_scale must be a finite fp32 number, got {softmax_scale!r}")
        if self._cute is not None and current_device() != self._device_index:
            with torch.cuda.device(self.device):
                return self.run(
                    plan, query, out, k_cache, v_cache, k_scale, v_scale, softmax_scale, q_mul, o_mul, lse,
                    k_block_scale, v_block_scale,
                )  # fmt: skip
        tensors = (query, out, k_cache, v_cache, k_scale, v_scale, q_mul, o_mul, lse, k_block_scale, v_block_scale)
        if self._quantiser is not None:
            query, k_scale = self._quantiser(self._check(plan, tensors), query, k_scale, q_mul, plan.q_len)
            q_mul = None
            tensors = (query, out, k_cache, v_cache, k_scale, v_scale, None, *tensors[7:])
        if self._cute is not None:
            return self._launcher(plan, softmax_scale, tensors)
        self._check(plan, tensors)
        torch_ref.decode(
            query, out, k_cache, v_cache, k_scale, v_scale, plan.block_table, plan.seq_lens,
            num_seqs=plan.num_seqs, q_len=plan.q_len, softmax_scale=softmax_scale, causal=plan.causal,
            kv_format=self.kv_format.name, v_format=self.v_format.name, k_block_scale=k_block_scale,
            v_block_scale=v_block_scale, q_mul=q_mul, o_mul=o_mul, lse=lse,
            one_by_one=self._max_step_tokens is not None,
        )  # fmt: skip

    def _check(self, plan: StepPlan, tensors: tuple[Any, ...]) -> Signature:
        """The checked layout of ``run``'s tensors, made once per layout."""
        key = layout_key(tensors)
        signature = self._signatures.get(key)
        if signature is None:
            signature = remember(self._signatures, key, Signature.check(self._shape, self.device, *tensors))
        signature.check_step(plan.num_seqs, plan.q_len)
        return signature

    def precompile(self, query_dtype: torch.dtype | None = None, q_mul: bool = False) -> None:
        """Compile or load the kernels of every q_len up to max_q_len, and the one that plans on the device where Triton
        is installed; does nothing on the reference backend.

        Args:
            query_dtype: of the queries to come; None: ``out_dtype``.
            q_mul: whether ``run`` will be given q_mul.

        Raises:
            ValueError: query_dtype is another.
            RuntimeError: a kernel is not compiled, and the CuTe DSL not installed.
        """
        for q_len in range(1, self.max_q_len + 1):
            self.ensure_compiled(q_len, query_dtype, q_mul)
        if self._cute is not None:
            with torch.cuda.device(self.device):
                self._cute.compile_planner()
                if self._quantiser is not None:
                    self._quantiser.compile(range(1, self.max_q_len + 1), query_dtype or self.out_dtype, q_mul)

    def ensure_compiled(self, q_len: int = 1, query_dtype: torch.dtype | None = None, q_mul: bool = False) -> None:
        """Compile or load the kernel of one q_len unless the process has it; arguments and errors as ``precompile``'s,
        and a q_len below 1 or above max_q_len is refused."""
        if self._cute is not None:
            self._cute.obtain(self._variant(q_len, query_dtype, q_mul))

    def is_compiled(self, q_len: int = 1, query_dtype: torch.dtype | None = None, q_mul: bool = False) -> bool:
        """Whether the process has the decode kernel of one q_len, arguments as ``precompile``; True on the reference
        backend, which compiles nothing. The small kernels that plan on the device and quantise queries are not looked
        for: ``precompile`` makes them too."""
        if self._cute is None:
            return True
        return self._cute.is_compiled(self._variant(q_len, query_dtype, q_mul))

    def _check_q_len(self, q_len: Any) -> int:
        q_len = check_positive_int("q_len", q_len)
        if q_len > self.max_q_len:
            raise ValueError(f"q_len must be at most max_q_len = {self.max_q_len}, got {q_len}")
        return q_len

    def _variant(self, q_len: int, query_dtype: torch.dtype | None, q_mul: bool) -> Any:
        dtype = check_choice("query_dtype", query_dtype or self.out_dtype, tuple(DTYPE_NAMES))
        return self._cute.variant(
            self._check_q_len(q_len), DTYPE_NAMES[dtype], needs_q_split(dtype, q_mul and self._quantiser is None)
        )
