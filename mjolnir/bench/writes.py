"""``mjolnir bench-writes``: time and bandwidth of ``write_kv``, ``expand_pages`` and the query quantiser, on a GPU.

Bandwidth is bytes read plus bytes written over the time of a call; what it is compared with is a copy that moves as
many bytes. Every timed kernel's bytes are checked against PyTorch's.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from mjolnir.bench import timing
from mjolnir.bench.shapes import REUSE_BYTES
from mjolnir.checks import scale_view
from mjolnir.evidence import header
from mjolnir.expand import Side as ExpandSide
from mjolnir.expand import check_layout as check_expansion
from mjolnir.expand import expand_in_torch, expand_pages
from mjolnir.formats import KvFormat, get_format
from mjolnir.page_views import Cache, as_bits
from mjolnir.query_fp8 import quantise_query
from mjolnir.write import Side, check_layout, write_in_torch, write_kv

HEADS, KV_HEADS, HEAD_SIZE, PAGE_SIZE = 32, 8, 128, 64
MANY, FEW = 8192, (1, 64)
WRITES = (
    ("fp8", "fp8"),
    ("e2m3", "e2m3"),
    ("nvfp4", "nvfp4"),
    ("fp8", "nvfp4"),
    ("fp8_e5m2", "fp8_e5m2"),
    ("bf16",) * 2,
)
EXPANSIONS = (("e2m3", "fp8"), ("nvfp4", "fp8"), ("e2m3", "bf16"), ("nvfp4", "bf16"), ("fp8", "bf16"))

METHOD = (
    "us: median over replays of the time per call in a CUDA graph of many calls; us_p10, us_p90: deciles. Calls rotate "
    "over buffers of more than 240 MB in all, so L2 is cold, but for calls of a few KB. bytes: read plus written, of K "
    "and V; tb_s = bytes / us. copy_us, copy_tb_s: torch's copy_ of half as many bytes to the other half, same method; "
    "share = tb_s / copy_tb_s. host_us: median host time of an eager call. Slots and pages in random order; every "
    "byte was compared with PyTorch's. Descales per head: 0.5 to 1.5, 1 of 16-bit formats; of what is expanded to fp8 "
    "its own, times 6 from nvfp4. (h_q, h_k, d, page) = (32, 8, 128, 64), pages token-major."
)


@dataclasses.dataclass(frozen=True)
class WriteRow:
    """One measurement; METHOD says what each number is. The copy is only timed for many tokens."""

    what: str  # "write", "expand" or "quantise query"
    formats: str
    tokens: int
    us: float
    us_p10: float
    us_p90: float
    host_us: float
    bytes: int
    tb_s: float
    copy_us: float | None
    copy_tb_s: float | None
    share: float | None


@dataclasses.dataclass
class _Calls:
    """What is timed: a call per slot, and a check of what slot 0 left behind."""

    call: Callable[[int], torch.Tensor]
    check: Callable[[], None]
    slots: int
    bytes: int


def run_write_bench(progress: Callable[[WriteRow], None] = lambda _: None) -> dict[str, Any]:
    """Measure on the current CUDA device: what ``--json`` writes.

    Raises:
        ValueError: there is no CUDA device.
        ArithmeticError: a kernel left other bytes than PyTorch.
    """
    if not torch.cuda.is_available():
        raise ValueError("bench-writes needs a CUDA device, and torch.cuda.is_available() is False")
    device, start = torch.device("cuda", torch.cuda.current_device()), time.monotonic()
    rows: list[WriteRow] = []
    for tokens in (*FEW, MANY):
        for formats in WRITES:
            rows.append(measure("write", " K, ".join(formats) + " V", tokens, writes(formats, tokens, device)))
            progress(rows[-1])
    for pages in (1, MANY // PAGE_SIZE):
        for names in EXPANSIONS:
            tokens = pages * PAGE_SIZE
            rows.append(measure("expand", " to ".join(names), tokens, expansions(names, pages, device)))
            progress(rows[-1])
    for seqs in (1, 64, 256):
        rows.append(measure("quantise query", "e4m3", seqs, queries(seqs, device)))
        progress(rows[-1])
    return {
        **header(device),
        "method": METHOD,
        "seconds": round(time.monotonic() - start, 1),
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def to_json(report: dict[str, Any]) -> str:
    """One row a line."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in report.items() if key != "rows"]
    return "{\n" + ",\n".join(lines) + ',\n"rows": [\n  ' + ",\n  ".join(map(json.dumps, report["rows"])) + "\n]\n}\n"


def measure(what: str, formats: str, tokens: int, calls: _Calls) -> WriteRow:
    """Time the calls and check their result."""
    us, host_us = _time(calls.call, calls.slots, calls.bytes)
    calls.check()
    copy = None
    if calls.bytes > 1_000_000:
        half = torch.empty(calls.slots, 2, calls.bytes // 2, dtype=torch.uint8, device="cuda")
        copy = _time(lambda slot: half[slot, 0].copy_(half[slot, 1]), calls.slots, calls.bytes)[0].median
    tb_s = calls.bytes / us.median / 1e6
    return WriteRow(
        what=what,
        formats=formats,
        tokens=tokens,
        us=round(us.median, 3),
        us_p10=round(us.p10, 3),
        us_p90=round(us.p90, 3),
        host_us=round(host_us, 2),
        bytes=calls.bytes,
        tb_s=round(tb_s, 4),
        copy_us=None if copy is None else round(copy, 3),
        copy_tb_s=None if copy is None else round(calls.bytes / copy / 1e6, 4),
        share=None if copy is None else round(copy / us.median, 4),
    )


def writes(formats: tuple[str, str], tokens: int, device: torch.device) -> _Calls:
    """write_kv of tokens into as many slots, and some more, in random order."""
    fmts = [get_format(name) for name in formats]
    row_bytes = sum(_row_bytes(fmt) for fmt in fmts)
    size = tokens * KV_HEADS * (2 * 2 * HEAD_SIZE + row_bytes)
    slots = _slots(size)
    num_pages = -(-tokens // PAGE_SIZE) + 1
    x = torch.randn(slots, 2, tokens, KV_HEADS, HEAD_SIZE, device=device).bfloat16()
    caches = [[_cache(fmt, num_pages, device) for fmt in fmts] for _ in range(slots)]
    mapping = torch.randperm(num_pages * PAGE_SIZE, device=device)[:tokens]

    def call(slot: int) -> torch.Tensor:
        k, v = caches[slot]
        write_kv(
            x[slot, 0], x[slot, 1], k.codes, v.codes, mapping, k.scale, v.scale, kv_format=formats[0],
            v_format=formats[1], k_block_scale=k.block_scale, v_block_scale=v.block_scale,
        )  # fmt: skip
        return k.codes

    def check() -> None:
        want = [_clone(cache) for cache in caches[0]]
        sides = Side(x[0, 0], want[0]), Side(x[0, 1], want[1])
        write_in_torch(check_layout(sides, *formats), *sides, mapping)
        _assert_equal(caches[0], want)

    return _Calls(call, check, slots, size)


def expansions(names: tuple[str, str], pages: int, device: torch.device) -> _Calls:
    """expand_pages of that many pages of a cache of some more, in random order."""
    fmt, out_fmt = (get_format(name) for name in names)
    size = 2 * pages * PAGE_SIZE * KV_HEADS * (_row_bytes(fmt) + _row_bytes(out_fmt))
    slots = _slots(size)
    sources = [[_cache(fmt, pages + 1, device) for _ in "kv"] for _ in range(slots)]
    targets = [[_cache(out_fmt, pages, device) for _ in "kv"] for _ in range(slots)]
    if names[1] == "fp8":  # the descales that docs/writers.md tells to give
        factor = 6.0 if names[0] == "nvfp4" else 1.0
        targets = [
            [t._replace(scale=factor * s.scale) for t, s in zip(*pair, strict=True)]
            for pair in zip(targets, sources, strict=True)
        ]
    ids = torch.randperm(pages + 1, device=device)[:pages]
    out_ids = torch.arange(pages, device=device)

    def call(slot: int) -> torch.Tensor:
        (k, v), (k_out, v_out) = sources[slot], targets[slot]
        expand_pages(
            ids, k.codes, v.codes, k_out.codes, v_out.codes, k.scale, v.scale, kv_format=names[0],
            out_format=names[1], k_out_scale=k_out.scale, v_out_scale=v_out.scale, out_pages=out_ids,
            k_block_scale=k.block_scale, v_block_scale=v.block_scale,
        )  # fmt: skip
        return k_out.codes

    def check() -> None:
        want = [_clone(cache) for cache in targets[0]]
        sides = ExpandSide(sources[0][0], want[0]), ExpandSide(sources[0][1], want[1])
        expand_in_torch(check_expansion(sides, names[0], names[0], names[1]), *sides, ids, out_ids)
        _assert_equal(targets[0], want)

    return _Calls(call, check, slots, size)


def queries(seqs: int, device: torch.device) -> _Calls:
    """The launch of ``q_mode="fp8"`` alone, with q_mul."""
    from mjolnir.kernels.query_kernel import launch_quantise

    query = torch.randn(seqs, HEADS, HEAD_SIZE, device=device).bfloat16()
    q_mul = torch.rand(HEADS, HEAD_SIZE, device=device) + 0.5
    k_scale = torch.rand(KV_HEADS, device=device) + 0.5
    out, scale = torch.empty_like(query), torch.empty(seqs, KV_HEADS, device=device)

    def call(slot: int) -> torch.Tensor:
        launch_quantise(query, (HEADS * HEAD_SIZE, HEAD_SIZE), q_mul, k_scale, (0, 1), out, scale, 1)
        return out

    def check() -> None:
        values, descale = quantise_query(query, q_mul, seqs, 1, KV_HEADS)
        descale = descale * scale_view("k_scale", k_scale, seqs, KV_HEADS)
        pairs = (("values", out, values), ("descales", scale, descale))
        wrong = [f"{n} of {a.numel()} {what}" for what, a, b in pairs if (n := int((a != b).sum()))]
        if wrong:
            raise ArithmeticError(f"{' and '.join(wrong)} of the quantised query are not PyTorch's")

    return _Calls(call, check, 1, 4 * query.numel() + 4 * q_mul.numel() + 4 * scale.numel())


def _time(call: Callable[[int], torch.Tensor], slots: int, size: int) -> tuple[timing.Spread, float]:
    """Time per call in a graph, and host time of an eager call."""
    expected = 3 + size / 3.5e6
    captured = timing.capture(call, slots, timing.rotations(slots, expected))
    us = timing.Spread.of(timing.replay_times(captured))
    return us, timing.host_call_us(call, slots, us.median)


def _slots(size: int) -> int:
    """Buffers to rotate over: enough to push each other out of L2, at most eight of a few KB."""
    return max(2, min(8, 2 + REUSE_BYTES // size)) if size < 1_000_000 else 2 + REUSE_BYTES // size


def _row_bytes(fmt: KvFormat) -> int:
    return fmt.row_bytes(HEAD_SIZE) + fmt.scale_width(HEAD_SIZE)


def _cache(fmt: KvFormat, num_pages: int, device: torch.device) -> Cache:
    """Pages of finite values, token-major, block scales in a tensor of their own."""
    shape = (num_pages, PAGE_SIZE, KV_HEADS)
    scale = torch.ones(KV_HEADS, device=device) if fmt.bits == 16 else torch.rand(KV_HEADS, device=device) + 0.5
    x = torch.randn(*shape, HEAD_SIZE, device=device)
    blocks = fmt.block_scales(x, scale[:, None])
    return Cache(fmt.encode(x, scale[:, None], blocks), scale, blocks)


def _clone(cache: Cache) -> Cache:
    """The same descale, other codes."""
    blocks = None if cache.block_scale is None else cache.block_scale.clone()
    return Cache(cache.codes.clone(), cache.scale, blocks)


def _assert_equal(got: list[Cache], want: list[Cache]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        pairs = [(ours.codes, theirs.codes)]
        if ours.block_scale is not None and theirs.block_scale is not None:
            pairs.append((ours.block_scale, theirs.block_scale))
        for a, b in pairs:
            if not torch.equal(as_bits(a), as_bits(b)):
                raise ArithmeticError(f"{int((as_bits(a) != as_bits(b)).sum())} of {a.numel()} codes are not PyTorch's")
