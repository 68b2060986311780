"""A case of the matrix as tensors. Whatever is not live holds NaN: a result that touches it shows."""

from __future__ import annotations

import dataclasses
import math

import torch

from mjolnir.formats import KvFormat, get_formats
from mjolnir.layouts import KVLayout, split_kv_cache
from mjolnir.page_views import as_bits
from mjolnir.reference import decode_attention_oracle
from mjolnir.runner import DecodeRunner
from mjolnir.signature import DTYPES
from mjolnir.verify.matrix import LENGTHS, Case

SPARE_PAGES = 3  # that no block table names
PADDING_TOKENS = 2  # rows of query and out past the batch
NUM_LAYERS = 4  # of a layer-packed pool
DEAD_ENTRIES = (-1, 2**31 - 1, -(2**31))  # of a block table, past a sequence's last page
NAN_BYTE = 0xFF  # 0xFF is NaN in e4m3, 0xFFFF in bf16 and fp16


@dataclasses.dataclass
class Problem:
    """The arguments of one run, and where its live tokens lie in the cache."""

    case: Case
    k_format: KvFormat
    v_format: KvFormat
    query: torch.Tensor  # (tokens + PADDING_TOKENS, num_heads, head_size)
    k_cache: torch.Tensor  # (pages, page_size, num_kv_heads, head_size)
    v_cache: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    block_table: torch.Tensor  # (num_seqs, max_pages) int32
    seq_lens: torch.Tensor  # (num_seqs,) int32
    pages: torch.Tensor  # (total tokens,): page and row of every live token
    slots: torch.Tensor
    q_mul: torch.Tensor | None
    o_mul: torch.Tensor | None
    k_block_scale: torch.Tensor | None = None  # (pages, page_size, num_kv_heads, head_size / 16) e4m3
    v_block_scale: torch.Tensor | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        return LENGTHS[self.case.lengths]

    @property
    def tokens(self) -> int:
        return len(self.lengths) * self.case.q_len

    @property
    def softmax_scale(self) -> float:
        return self.case.head_size**-0.5

    def write_k(self, rows: torch.Tensor) -> None:
        """Set the live rows of K: (total tokens, num_kv_heads, head_size)."""
        self._write(self.k_format, self.k_cache, self.k_block_scale, rows)

    def write_v(self, rows: torch.Tensor) -> None:
        self._write(self.v_format, self.v_cache, self.v_block_scale, rows)

    def _write(self, fmt: KvFormat, cache: torch.Tensor, block_scale: torch.Tensor | None, rows: torch.Tensor) -> None:
        one = torch.ones(1, device=cache.device)
        blocks = fmt.block_scales(rows, one)
        as_bits(cache)[self.pages, self.slots] = as_bits(fmt.encode(rows, one, blocks))
        if block_scale is not None and blocks is not None:
            as_bits(block_scale)[self.pages, self.slots] = as_bits(blocks)

    def run(self, runner: DecodeRunner) -> tuple[torch.Tensor, torch.Tensor]:
        """O and LSE with their padding rows, which hold NaN unless something wrote to them."""
        out = torch.full_like(self.query, math.nan, dtype=runner.out_dtype)
        lse = torch.full(out.shape[:2], math.nan, dtype=torch.float32, device=out.device)
        plan = runner.plan(
            self.lengths, len(self.lengths), self.case.q_len, self.block_table, self.seq_lens, causal=self.case.causal
        )
        runner.run(
            plan, self.query, out, self.k_cache, self.v_cache, self.k_scale, self.v_scale, self.softmax_scale,
            self.q_mul, self.o_mul, lse, self.k_block_scale, self.v_block_scale,
        )  # fmt: skip
        return out, lse

    def oracle(self) -> tuple[torch.Tensor, torch.Tensor]:
        """O and LSE in fp64, without padding rows."""
        return decode_attention_oracle(
            self.query[: self.tokens],
            self.k_cache,
            self.v_cache,
            self.k_scale,
            self.v_scale,
            self.block_table,
            self.seq_lens,
            q_len=self.case.q_len,
            softmax_scale=self.softmax_scale,
            causal=self.case.causal,
            kv_format=self.k_format.name,
            v_format=self.v_format.name,
            k_block_scale=self.k_block_scale,
            v_block_scale=self.v_block_scale,
            q_mul=self.q_mul,
            o_mul=self.o_mul,
        )


def make_problem(case: Case, device: torch.device, seed: int) -> Problem:
    """Normal Q, K and V in pages of random order."""
    gen = torch.Generator().manual_seed(seed)
    formats = get_formats(case.kv_format, case.v_format)
    lengths = LENGTHS[case.lengths]
    pages_of = [-(-length // case.page_size) for length in lengths]
    num_pages = sum(pages_of) + SPARE_PAGES
    dtypes = [fmt.storage_dtype for fmt in formats]
    k_cache, v_cache = _make_pool(case, num_pages, dtypes, [fmt.row_width(case.head_size) for fmt in formats], device)
    k_blocks, v_blocks = _make_pool(
        case, num_pages, [torch.float8_e4m3fn] * 2, [fmt.scale_width(case.head_size) for fmt in formats], device
    )

    named = torch.randperm(num_pages, generator=gen)[: sum(pages_of)].to(torch.int32)
    table = torch.tensor(DEAD_ENTRIES, dtype=torch.int32).repeat(len(lengths), max(pages_of) + 1)
    pages, slots = [], []
    for row, count, length, own in zip(table, pages_of, lengths, named.split(pages_of), strict=True):
        row[:count] = own
        token = torch.arange(length)
        pages.append(own.long()[token // case.page_size])
        slots.append(token % case.page_size)

    k_scale, v_scale = _make_scales(case, gen)
    query = torch.randn(len(lengths) * case.q_len + PADDING_TOKENS, case.num_heads, case.head_size, generator=gen)
    if case.scales == "huge":
        query *= 1e-30  # so that scores stay of order 1
    query[len(lengths) * case.q_len :] = math.nan
    problem = Problem(
        case=case,
        k_format=formats[0],
        v_format=formats[1],
        query=query.to(device, DTYPES[case.q_dtype]),
        k_cache=k_cache,
        v_cache=v_cache,
        k_scale=k_scale.to(device),
        v_scale=v_scale.to(device),
        block_table=table.to(device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        pages=torch.cat(pages).to(device),
        slots=torch.cat(slots).to(device),
        q_mul=_make_q_mul(case, gen).to(device) if case.factors else None,
        o_mul=torch.randn(case.num_heads, case.head_size, generator=gen).to(device) if case.factors else None,
        k_block_scale=k_blocks if formats[0].block else None,
        v_block_scale=v_blocks if formats[1].block else None,
    )
    shape = (sum(lengths), case.num_kv_heads, case.head_size)
    problem.write_k(torch.randn(shape, generator=gen).to(device))
    problem.write_v(torch.randn(shape, generator=gen).to(device))
    return problem


def _make_pool(
    case: Case, num_pages: int, dtypes: list[torch.dtype], widths: list[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """K's and V's views; those of one tensor have one dtype and width."""
    sizes = {"B": num_pages, "N": case.page_size, "H": case.num_kv_heads, "2": 2, "L": NUM_LAYERS}

    def tensor(dims: str, which: int = 0) -> torch.Tensor:
        shape = [sizes[dim] if dim in sizes else widths[which] for dim in dims]
        raw = torch.full((math.prod(shape) * dtypes[which].itemsize,), NAN_BYTE, dtype=torch.uint8, device=device)
        return raw.view(dtypes[which]).reshape(shape)

    if case.layout == "separate" or not widths[0]:
        return tensor("BNHD"), tensor("BNHD", 1)
    if case.layout == "layer packed":
        return split_kv_cache(tensor("BL2NHD")[:, NUM_LAYERS // 2], KVLayout.B2NHD, widths[0])
    return split_kv_cache(tensor(case.layout), KVLayout(case.layout), widths[0])


def _make_scales(case: Case, gen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """k_scale and v_scale: 0.5 … 2 where the kind says nothing else."""
    shape = {"head": (case.num_kv_heads,), "sequence": (len(LENGTHS[case.lengths]), case.num_kv_heads)}
    size = shape.get(case.scales, (1,))
    # Every third of a wider buffer: descales may have any strides.
    k_scale, v_scale = (torch.rand(*size, 3, generator=gen)[..., 1] * 1.5 + 0.5 for _ in range(2))
    if case.scales == "negative":
        k_scale, v_scale = -k_scale, -v_scale
    if case.scales in ("zero", "denormal"):
        k_scale.fill_(0.0 if case.scales == "zero" else 1e-40)
    if case.scales == "huge":
        k_scale.fill_(1e30)
        v_scale.fill_(1e30)
    return k_scale, v_scale


def _make_q_mul(case: Case, gen: torch.Generator) -> torch.Tensor:
    """Factors for Q. Where the kernel keeps Q · q_mul in one f16 number, ones of three significant bits: the product
    with a bf16 Q is then exact, and the tolerance can stay what it is."""
    shape = (case.num_heads, case.head_size)
    if case.kv_format == "bf16":
        return torch.rand(shape, generator=gen) + 0.5
    return torch.randint(4, 8, shape, generator=gen) / 4.0
