"""``q_mode="fp8"``: queries quantised to e4m3 before a run, with one descale per sequence and KV head.

The decode kernel multiplies in f16 or bf16, and both hold every e4m3 value. So the quantised query stays 16 bits wide,
the descale goes into K's, and the kernel is the same one: Hopper's ``mma.sync`` has nothing to gain from 8-bit Q
(docs/design.md, section 3). What it is for, and when it pays, is in docs/writers.md.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mjolnir.checks import scale_view
from mjolnir.formats import get_format
from mjolnir.formats.base import over
from mjolnir.signature import RunnerShape, Signature
from mjolnir.write import has_triton


def quantise_query(
    query: torch.Tensor, q_mul: torch.Tensor | None, num_seqs: int, q_len: int, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in PyTorch: e4m3 values of q · q_mul / descale, and the descales.

    descale = amax / 448 in fp32, amax over the finite elements of q · q_mul of a sequence and KV head (q_len · group
    rows). ±Inf becomes ±448, NaN stays NaN; where everything is 0 the descale is too.

    Args:
        query: (≥ num_seqs · q_len, h_q, d), bf16 or fp16.
        q_mul: (h_q, d) fp32, or None.

    Returns:
        values: (num_seqs · q_len, h_q, d) of the query's dtype, which holds them exactly.
        descale: fp32 (num_seqs, num_kv_heads).
    """
    fp8 = get_format("fp8")
    x = query[: num_seqs * q_len].float()
    if q_mul is not None:
        x = x * q_mul
    shape = x.shape
    x = x.reshape(num_seqs, q_len, num_kv_heads, -1, shape[-1])
    size = x.abs()
    amax = torch.where(size.isfinite(), size, 0).amax((1, 3, 4))
    descale = over(amax, fp8.max_value)
    values = fp8.decode(fp8.encode(x, descale[:, None, :, None, None]))
    return values.to(query.dtype).reshape(shape), descale


class QueryQuantiser:
    """The quantised queries of one runner, at fixed addresses: a run reads them before the next one writes.

    Args:
        shape: of the runner.
        device: of its buffers; CUDA devices with Triton take one launch, others PyTorch.
        max_num_seqs, max_q_len: of the runner.
    """

    def __init__(self, shape: RunnerShape, device: torch.device, max_num_seqs: int, max_q_len: int) -> None:
        self.shape, self.device, self.max_num_seqs, self.max_q_len = shape, device, max_num_seqs, max_q_len
        self._values: dict[torch.dtype, torch.Tensor] = {}
        self._scale = torch.empty(max_num_seqs, shape.num_kv_heads, device=device)
        self._ran: set[tuple[object, ...]] = set()  # kernels that are compiled
        self._buffer(shape.out_dtype)

    def __call__(
        self, signature: Signature, query: torch.Tensor, k_scale: torch.Tensor, q_mul: torch.Tensor | None, q_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantise, on the current stream and device.

        All rows of the query are, not only those of the step: a captured graph may replay a plan of more sequences
        than it was captured with.

        Args:
            signature: of the run that query, k_scale and q_mul were given to.

        Returns:
            The query to run with, in place of query and q_mul: e4m3 values, (rows, h_q, d) of the query's dtype.
            The descales to run with in place of k_scale: K's times the query's, (rows / q_len, h_k), at most the
            largest fp32 number in size: an infinite one would make NaN of a product of 0.

        Raises:
            RuntimeError: the kernel is not compiled and a CUDA graph is being captured.
        """
        num_seqs = min(self.max_num_seqs, query.shape[0] // q_len)
        if k_scale.dim() == 2 and k_scale.numel() > 1:
            num_seqs = min(num_seqs, k_scale.shape[0])
        values, scale = self._buffer(query.dtype)[: num_seqs * q_len], self._scale[:num_seqs]
        if not num_seqs:
            return values, scale
        if self.device.type != "cuda" or not has_triton():
            self._in_torch(query, q_mul, k_scale, values, scale, q_len)
            return values, scale
        if signature.pack_query:
            query = query.clone(memory_format=torch.contiguous_format)
        self._launch(query, signature.q_strides, q_mul, k_scale, signature.k_scale_strides, values, scale, q_len)
        return values, scale

    def compile(self, q_lens: Iterable[int], query_dtype: torch.dtype, has_q_mul: bool) -> None:
        """Compile the kernels for dense queries, by runs over zeros; does nothing where there is no kernel."""
        if self.device.type != "cuda" or not has_triton():
            return
        heads, d = self.shape.num_heads, self.shape.head_size
        q_mul = torch.zeros(heads, d, device=self.device) if has_q_mul else None
        one = torch.ones(1, device=self.device)
        scale = torch.empty(1, self.shape.num_kv_heads, device=self.device)
        for q_len in q_lens:
            query = torch.zeros(q_len, heads, d, dtype=query_dtype, device=self.device)
            self._launch(query, (heads * d, d), q_mul, one, (0, 0), torch.empty_like(query), scale, q_len)

    @torch.no_grad()
    def _in_torch(
        self,
        query: torch.Tensor,
        q_mul: torch.Tensor | None,
        k_scale: torch.Tensor,
        values: torch.Tensor,
        scale: torch.Tensor,
        q_len: int,
    ) -> None:
        shape, num_seqs = self.shape, len(scale)
        rows = query if query.dim() == 3 else query.unflatten(1, (shape.num_heads, shape.head_size))
        made, descale = quantise_query(rows, q_mul, num_seqs, q_len, shape.num_kv_heads)
        values.copy_(made)
        torch.mul(scale_view("k_scale", k_scale, num_seqs, shape.num_kv_heads), descale, out=scale)
        largest = torch.finfo(scale.dtype).max
        scale.clamp_(-largest, largest)

    def _launch(
        self,
        query: torch.Tensor,
        q_strides: tuple[int, int],
        q_mul: torch.Tensor | None,
        k_scale: torch.Tensor,
        k_scale_strides: tuple[int, int],
        values: torch.Tensor,
        scale: torch.Tensor,
        q_len: int,
    ) -> None:
        # All that Triton compiles a kernel of its own for.
        kernel = (q_len, query.dtype, q_mul is None, *((s % 16, s == 1) for s in q_strides), query.data_ptr() % 16)
        if kernel not in self._ran and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the kernel that quantises queries is not compiled for this layout and a CUDA graph is being captured: "
                "call precompile() or run() once before the capture"
            )
        from mjolnir.kernels.query_kernel import launch_quantise

        launch_quantise(query, q_strides, q_mul, k_scale, k_scale_strides, values, scale, q_len)
        self._ran.add(kernel)

    def _buffer(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._values:
            rows = self.max_num_seqs * self.max_q_len
            with torch.inference_mode(False):  # a buffer made in it could not be written outside
                self._values[dtype] = torch.empty(
                    rows, self.shape.num_heads, self.shape.head_size, dtype=dtype, device=self.device
                )
        return self._values[dtype]
