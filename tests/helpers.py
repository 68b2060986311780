"""Random decode problems whose dead places are poisoned, for the CPU and the GPU tests.

Dead places: rows past a sequence's length, pages no block table names, block-table entries past a sequence's last
page, and whatever else lies in the memory that K, V, Q and O are views of.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from mjolnir.backends import torch_ref
from mjolnir.formats import KvFormat, get_format
from mjolnir.layouts import KVLayout, split_kv_cache
from mjolnir.reference import decode_attention_oracle

POOLS = ("separate", "separate_hnd", "layer_packed", *(layout.value for layout in KVLayout))
"""Two tensors (NHD or HND), one layer of a pool of several (B2NHD with a big page stride), or one tensor."""

HUGE_PAGE = 2**31 - 1
NUM_LAYERS = 5  # of a layer-packed pool
SPARE_PAGES = 3  # that no block table names


@dataclasses.dataclass
class PagedCache:
    """A poisoned pool, and in it the live rows of some sequences."""

    fmt: KvFormat
    k_cache: torch.Tensor  # (pages, page_size, num_kv_heads, head_size) views of the pool
    v_cache: torch.Tensor
    block_table: torch.Tensor  # int32 (num_seqs, max_pages), garbage past each sequence's last page
    seq_lens: torch.Tensor  # int32 (num_seqs,)
    live_pages: torch.Tensor  # int64 (total tokens,): where token t of all sequences in a row lies
    live_slots: torch.Tensor
    v_fmt: KvFormat | None = None  # None: V has K's format
    k_blocks: torch.Tensor | None = (
        None  # (pages, page_size, num_kv_heads, head_size / 16) views, if the format has them
    )
    v_blocks: torch.Tensor | None = None

    def set_k(self, values: torch.Tensor | float) -> None:
        """Make the live rows of K the given values, broadcast to (total tokens, num_kv_heads, head_size)."""
        _put(self.k_cache, self.k_blocks, (self.live_pages, self.live_slots), self.fmt, values)

    def set_v(self, values: torch.Tensor | float) -> None:
        _put(self.v_cache, self.v_blocks, (self.live_pages, self.live_slots), self.v_fmt or self.fmt, values)

    def as_bytes(self) -> PagedCache:
        """The same cache with fp8 passed as uint8."""
        return dataclasses.replace(self, k_cache=self.k_cache.view(torch.uint8), v_cache=self.v_cache.view(torch.uint8))


def make_paged_cache(
    seq_lens: Sequence[int],
    *,
    num_kv_heads: int,
    head_size: int,
    page_size: int,
    kv_format: str = "fp8",
    v_format: str | None = None,
    pool: str = "separate",
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> PagedCache:
    """Random finite codes in the live rows, poison elsewhere; pages in random order. Block scales lie in a pool of
    their own, of the same kind."""
    gen = torch.Generator().manual_seed(seed)
    fmt, v_fmt = get_format(kv_format), get_format(v_format or kv_format)
    pages_of = [-(-length // page_size) for length in seq_lens]
    num_pages = sum(pages_of) + SPARE_PAGES
    sizes = {"B": num_pages, "N": page_size, "H": num_kv_heads, "2": 2, "L": NUM_LAYERS}
    k_cache, v_cache = _make_pool(
        pool, sizes, (fmt, v_fmt), [f.row_width(head_size) for f in (fmt, v_fmt)], gen, device
    )
    k_blocks, v_blocks = _make_pool(
        pool, sizes, (BLOCK_SCALE, BLOCK_SCALE), [f.scale_width(head_size) for f in (fmt, v_fmt)], gen, device
    )

    order = torch.randperm(num_pages, generator=gen).tolist()
    named, spare = order[SPARE_PAGES:], order[:SPARE_PAGES]
    garbage = [-1, HUGE_PAGE, -(2**31), spare[0], num_pages]
    max_pages = max(pages_of, default=0) + 2
    table, live_pages, live_slots = [], [], []
    for length, count in zip(seq_lens, pages_of, strict=True):
        pages, named = named[:count], named[count:]
        table.append(pages + [garbage[j % len(garbage)] for j in range(max_pages - count)])
        live_pages += [pages[token // page_size] for token in range(length)]
        live_slots += [token % page_size for token in range(length)]

    cache = PagedCache(
        fmt=fmt,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=torch.tensor(table, dtype=torch.int32, device=device).reshape(len(seq_lens), max_pages),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        live_pages=torch.tensor(live_pages, dtype=torch.int64, device=device),
        live_slots=torch.tensor(live_slots, dtype=torch.int64, device=device),
        v_fmt=v_fmt,
        k_blocks=k_blocks if fmt.block else None,
        v_blocks=v_blocks if v_fmt.block else None,
    )
    shape = (len(live_pages), num_kv_heads, head_size)
    cache.set_k(torch.randn(shape, generator=gen).to(device))
    cache.set_v(torch.randn(shape, generator=gen).to(device))
    return cache


def make_query(
    tokens: int,
    num_heads: int,
    head_size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    form: str = "dense",
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> torch.Tensor:
    """A random query in one of ROW_FORMS."""
    q = make_rows(tokens, num_heads, head_size, dtype=dtype, form=form, device=device)
    values = torch.randn(tokens, num_heads, head_size, generator=torch.Generator().manual_seed(seed))
    q.copy_(values.to(device).reshape(q.shape))
    return q


ROW_FORMS = ("dense", "flat", "packed", "packed_flat", "odd")


def make_rows(
    tokens: int,
    num_heads: int,
    head_size: int,
    *,
    dtype: torch.dtype,
    form: str = "dense",
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Rows for Q or O, full of NaN: dense (tokens, num_heads, head_size); flat (tokens, num_heads · head_size); a
    slice of a wider buffer as of packed QKV, in both shapes; odd: also a gap between heads. Bases are 16-byte aligned.
    """
    width = num_heads * head_size
    pad = 16 if form in ("packed", "packed_flat", "odd") else 0
    gap = 8 if form == "odd" else 0
    buffer = torch.full((tokens, num_heads * (head_size + gap) + 2 * pad), torch.nan, dtype=dtype, device=device)
    inner = buffer[:, pad : buffer.shape[1] - pad]
    if form in ("flat", "packed_flat"):
        assert inner.shape[1] == width
        return inner
    return inner.unflatten(1, (num_heads, head_size + gap))[..., :head_size]


def make_scale(
    kind: str, num_seqs: int, num_kv_heads: int, *, device: torch.device | str = "cpu", seed: int = 0
) -> torch.Tensor:
    """Descales in 0.5 … 2, kind one of SCALE_KINDS; what is not theirs in the underlying buffer is NaN."""
    gen = torch.Generator().manual_seed(seed)
    if kind == "one":
        return (torch.rand(1, generator=gen) * 1.5 + 0.5).to(device)
    if kind == "scalar":
        return (torch.rand((), generator=gen) * 1.5 + 0.5).to(device)
    values = torch.rand(num_seqs, num_kv_heads, generator=gen) * 1.5 + 0.5
    if kind == "expanded":  # one value per sequence, stride 0 over heads
        return values[:, :1].to(device).expand(num_seqs, num_kv_heads)
    strided = torch.full((2 * num_seqs + 1, 3 * num_kv_heads), torch.nan, device=device)
    if kind == "head":
        return strided[0, ::3].copy_(values[0]) if num_seqs else strided[0, ::3].fill_(1)
    return strided[: 2 * num_seqs : 2, ::3].copy_(values)


SCALE_KINDS = ("one", "scalar", "head", "sequence", "expanded")


@dataclasses.dataclass
class Problem:
    """One call, for the oracle and for whatever is tested against it."""

    cache: PagedCache
    query: torch.Tensor
    q_len: int = 1
    k_scale: torch.Tensor = dataclasses.field(default_factory=lambda: torch.ones(1))
    v_scale: torch.Tensor = dataclasses.field(default_factory=lambda: torch.ones(1))
    softmax_scale: float = 0.125
    causal: bool = True
    q_mul: torch.Tensor | None = None
    o_mul: torch.Tensor | None = None

    @property
    def num_seqs(self) -> int:
        return len(self.cache.seq_lens)

    @property
    def head_size(self) -> int:
        return self.cache.fmt.head_size_of(self.cache.k_cache.shape[-1])

    def arguments(self) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """What the oracle and the reference backend take alike: tensors after query (and out), and options."""
        cache = self.cache
        tensors = (cache.k_cache, cache.v_cache, self.k_scale, self.v_scale, cache.block_table, cache.seq_lens)
        options = {name: getattr(self, name) for name in ("q_len", "softmax_scale", "causal", "q_mul", "o_mul")}
        formats = {"kv_format": cache.fmt.name, "v_format": cache.v_fmt.name if cache.v_fmt else None}
        return tensors, {**options, **formats, "k_block_scale": cache.k_blocks, "v_block_scale": cache.v_blocks}

    def oracle(self) -> tuple[torch.Tensor, torch.Tensor]:
        tensors, options = self.arguments()
        query = self.query.reshape(len(self.query), -1, self.head_size)
        return decode_attention_oracle(query[: self.num_seqs * self.q_len], *tensors, **options)

    def run(self, out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """O (fp32 unless given) and LSE of the reference backend."""
        tensors, options = self.arguments()
        num_heads = self.query[0].numel() // self.head_size
        out = torch.full_like(self.query, torch.nan, dtype=torch.float32) if out is None else out
        lse = torch.full((len(self.query), num_heads), torch.nan, device=out.device)
        torch_ref.decode(self.query, out, *tensors, num_seqs=self.num_seqs, lse=lse, **options)
        return out, lse


def poison(shape: Sequence[int], fmt: KvFormat, gen: torch.Generator) -> torch.Tensor:
    """Random bytes of a format's storage, every other element NaN or, where the format has it, Inf."""
    numel = math.prod(shape) * fmt.storage_dtype.itemsize
    codes = torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=gen).view(fmt.storage_dtype)
    if fmt.storage_dtype.is_floating_point:
        bad = torch.tensor([torch.nan, torch.inf, -torch.inf]).to(fmt.storage_dtype)  # e4m3 has no Inf: NaN
        codes[::2] = bad[torch.arange(codes[::2].numel()) % 3]
    return codes.reshape(tuple(shape))


BLOCK_SCALE = get_format("fp8")
"""What block scales are stored as."""


def _make_pool(
    pool: str,
    sizes: dict[str, int],
    formats: tuple[KvFormat, KvFormat],
    widths: list[int],
    gen: torch.Generator,
    device: torch.device | str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K's and V's views; in one tensor only if their formats and widths are the same."""

    def tensor(dims: str, which: int = 0) -> torch.Tensor:
        shape = [sizes[dim] if dim in sizes else widths[which] for dim in dims]
        return poison(shape, formats[which], gen).to(device)

    if pool == "separate":
        k, v = (tensor("BNHD", which) for which in range(2))
    elif pool == "separate_hnd":
        k, v = (tensor("BHND", which).transpose(1, 2) for which in range(2))
    elif not widths[0]:  # no block scales
        k, v = (tensor("BNHD") for _ in range(2))
    elif pool == "layer_packed":
        k, v = split_kv_cache(tensor("BL2NHD")[:, NUM_LAYERS // 2], KVLayout.B2NHD, widths[0])
    else:
        k, v = split_kv_cache(tensor(pool), KVLayout(pool), widths[0])
    if sizes["H"] == 1:  # an index of size 1 is never multiplied: any stride is legal
        k, v = (t.as_strided(t.shape, (*t.stride()[:2], 12345, 1), t.storage_offset()) for t in (k, v))
    return k, v


def _put(
    cache: torch.Tensor,
    blocks: torch.Tensor | None,
    where: tuple[torch.Tensor, torch.Tensor],
    fmt: KvFormat,
    values: torch.Tensor | float,
) -> None:
    rows = torch.as_tensor(values, dtype=torch.float32, device=cache.device)
    rows = rows.expand(len(where[0]), cache.shape[2], fmt.head_size_of(cache.shape[3]))
    one = torch.ones(1, device=cache.device)
    block_scale = fmt.block_scales(rows, one)
    codes = fmt.encode(rows, one, block_scale)
    bits = {1: torch.uint8, 2: torch.int16}[fmt.storage_dtype.itemsize]  # not every operation takes fp8
    cache.view(bits)[where] = codes.view(bits)
    if blocks is not None and block_scale is not None:
        blocks.view(torch.uint8)[where] = block_scale.view(torch.uint8)
