"""Writes and expansions by the Triton kernels, compared byte for byte with the codecs: under Triton's interpreter in
test_write.py, compiled in test_gpu_writers.py."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch

from mjolnir import expand, write
from mjolnir.formats import FORMATS, KvFormat, get_format
from mjolnir.formats.in_triton.codes import NAN_CODES
from mjolnir.page_views import Cache, as_bits

POOLS = ("nhd", "hnd", "both_in_a_row", "layer_packed")


@dataclasses.dataclass
class Pool:
    """K and V of one buffer of random bytes, in one of POOLS; block scales in the pages' own rows or apart."""

    buffers: list[torch.Tensor]  # everything that a write may touch, and what lies between
    k: Cache
    v: Cache

    @classmethod
    def make(
        cls,
        kind: str,
        formats: Sequence[KvFormat],
        head_size: int,
        scales: Sequence[torch.Tensor],
        *,
        num_pages: int = 5,
        page_size: int = 16,
        heads: int = 3,
        own_rows: bool = True,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> Pool:
        gen = torch.Generator().manual_seed(seed)
        buffers: list[torch.Tensor] = []

        def fresh(*shape: int) -> torch.Tensor:
            buffers.append(torch.randint(0, 256, shape, dtype=torch.uint8, generator=gen).to(device))
            return buffers[-1]

        code_bytes = [fmt.row_bytes(head_size) for fmt in formats]
        block_bytes = [fmt.scale_width(head_size) for fmt in formats]
        widths = [c + (b if own_rows else 0) for c, b in zip(code_bytes, block_bytes, strict=True)]
        if kind == "nhd":
            rows = [fresh(num_pages, page_size, heads, width) for width in widths]
        elif kind == "hnd":
            rows = [fresh(num_pages, heads, page_size, width).transpose(1, 2) for width in widths]
        elif kind == "both_in_a_row":
            both = fresh(num_pages, heads, page_size, sum(widths)).transpose(1, 2)
            rows = [both[..., : widths[0]], both[..., widths[0] :]]
        else:  # a layer among others: the page stride is far larger than a page
            layers = [fresh(num_pages, 4, page_size, heads, width)[:, 2] for width in widths]
            rows = layers
        sides = []
        for fmt, row, codes, blocks, scale in zip(formats, rows, code_bytes, block_bytes, scales, strict=True):
            block_scale = None
            if blocks:
                apart = row[..., codes:] if own_rows else fresh(heads, num_pages, page_size, blocks).permute(1, 2, 0, 3)
                block_scale = apart.view(torch.float8_e4m3fn) if own_rows else apart
            sides.append(Cache(row[..., :codes].view(fmt.storage_dtype), scale, block_scale))
        return cls(buffers, *sides)


def kernel_write(key: torch.Tensor, value: torch.Tensor, pool: Pool, slots: torch.Tensor, *formats: str) -> None:
    """The kernel: by the public function on a GPU, and around its choice of PyTorch under the interpreter."""
    if key.is_cuda:
        write.write_kv(
            key, value, pool.k.codes, pool.v.codes, slots, pool.k.scale, pool.v.scale,
            kv_format=formats[0], v_format=formats[1],
            k_block_scale=pool.k.block_scale, v_block_scale=pool.v.block_scale,
        )  # fmt: skip
        return
    from mjolnir.kernels.write_kernel import launch_write

    sides = write.Side(key, pool.k), write.Side(value, pool.v)
    launch_write(write.check_layout(sides, *formats), *sides, slots)


def torch_write(key: torch.Tensor, value: torch.Tensor, pool: Pool, slots: torch.Tensor, *formats: str) -> None:
    sides = write.Side(key, pool.k), write.Side(value, pool.v)
    write.write_in_torch(write.check_layout(sides, *formats), *sides, slots)


def assert_same_bytes(a: Pool, b: Pool, what: object) -> None:
    for ours, theirs in zip(a.buffers, b.buffers, strict=True):
        np.testing.assert_array_equal(ours.cpu().numpy(), theirs.cpu().numpy(), err_msg=str(what))


def hard_values(fmt: KvFormat, dtype: torch.dtype) -> torch.Tensor:
    """Every value of a 16-bit dtype; in fp32 every code of the format, the points halfway between neighbours, and the
    numbers beside each of them. Both with zeros, Inf and NaN of either sign."""
    if dtype != torch.float32:
        return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    if fmt.bits == 16:
        codes = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(fmt.storage_dtype).double()
    else:
        row = torch.arange(256, dtype=torch.uint8).repeat_interleave(3).view(fmt.storage_dtype)
        blocks = torch.full((len(row) * row.element_size() * 8 // fmt.bits // 16,), 56, dtype=torch.uint8)  # 1.0
        codes = fmt.decode(row, blocks if fmt.block else None).double()
    codes = codes[codes.isfinite()].unique()
    points = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, codes[-1:] * 1.04, codes[:1] * 1.04]).float()
    up, down = (np.nextafter(points.numpy(), np.float32(side)) for side in (np.inf, -np.inf))
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-45, -1e-45, 3e38])
    values = torch.cat([points, torch.from_numpy(up), torch.from_numpy(down), special])
    return torch.cat([values, torch.zeros(-len(values) % 64)])


def check_rounding(name: str, dtype: torch.dtype, scale: float, device: torch.device | str) -> None:
    """Every hard value over a scale becomes the code that the codec says, NaN one code."""
    fmt = get_format(name)
    x = hard_values(fmt, dtype).reshape(-1, 1, 64)
    if fmt.block:  # values of a block share a scale: mix them
        x = x.reshape(-1)[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(1))].reshape(x.shape)
    scales = [torch.full((1,), scale), torch.full((1, 64), scale)]  # K per tensor, V per channel
    pages = -(-len(x) // 16)
    slots = torch.arange(len(x))
    made = [
        Pool.make("nhd", [fmt, fmt], 64, [s.to(to) for s in scales], num_pages=pages, heads=1, device=to)
        for to in (device, "cpu")
    ]
    kernel_write(x.to(device), x.to(device), made[0], slots.to(device), name, name)
    torch_write(x, x, made[1], slots, name, name)
    nan = x.isnan()[:, 0]
    for ours, theirs in ((made[0].k, made[1].k), (made[0].v, made[1].v)):
        got, want = (as_bits(c.codes).cpu().flatten(0, 1)[: len(x), 0] for c in (ours, theirs))
        if name in NAN_CODES:
            assert (got[nan] == NAN_CODES[name]).all(), name
            got, want = got[~nan], want[~nan]
        np.testing.assert_array_equal(got.numpy(), want.numpy(), err_msg=f"{name} {dtype} {scale}")
        if ours.block_scale is not None and theirs.block_scale is not None:
            blocks = (as_bits(c.block_scale).cpu() for c in (ours, theirs))
            np.testing.assert_array_equal(*(b.numpy() for b in blocks))


def make_scales(kinds: Sequence[str], heads: int, head_size: int, seed: int) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    shapes = {"tensor": (1,), "head": (heads,), "channel": (heads, head_size)}
    return [torch.rand(shapes[kind], generator=gen) * 1.5 + 0.25 for kind in kinds]


def check_layouts(device: torch.device | str, tokens: Sequence[int] = (1, 37, 300)) -> None:
    """Every pair of formats, in pools, inputs, scales and slots that vary with it: all bytes as PyTorch writes them."""
    combinations = itertools.product(FORMATS, FORMATS)
    for i, (names, pool, kinds, head_size) in enumerate(
        zip(
            combinations,
            itertools.cycle(POOLS),
            itertools.cycle([("tensor", "head"), ("channel", "tensor"), ("head", "channel")]),
            itertools.cycle((64, 128, 64, 256, 64)),
            strict=False,
        )
    ):
        check_layout_case(names, pool, kinds, head_size, tokens[i % len(tokens)], i, device)


def check_layout_case(
    names: tuple[str, str],
    pool: str,
    kinds: Sequence[str],
    head_size: int,
    tokens: int,
    seed: int,
    device: torch.device | str,
) -> None:
    gen = torch.Generator().manual_seed(seed)
    heads = 1 + seed % 3
    scales = make_scales(kinds, heads, head_size, seed)
    num_pages = tokens // 16 + 3
    made = [
        Pool.make(
            pool, [get_format(n) for n in names], head_size, [s.to(to) for s in scales],
            num_pages=num_pages, heads=heads, own_rows=seed % 2 == 0, device=to, seed=seed,
        )
        for to in (device, "cpu")
    ]  # fmt: skip
    dtype = (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
    qkv = torch.randn(tokens + 2, 4 * heads * head_size, generator=gen).to(dtype) * 3
    width = heads * head_size
    key, value = qkv[:, width : 2 * width], qkv[:, 3 * width :].unflatten(1, (heads, head_size))
    slots = torch.randperm(num_pages * 16, generator=gen)[:tokens].to((torch.int32, torch.int64)[seed % 2])
    slots[::5] = -1 - slots[::5]
    kernel_write(key.to(device), value.to(device), made[0], slots.to(device), *names)
    torch_write(key, value, made[1], slots, *names)
    assert_same_bytes(*made, (names, pool, kinds, head_size, tokens))


def check_expansion(device: torch.device | str) -> None:
    """Every format to every output format, code for code, NaN one code; other pages stay as they are."""
    for seed, (name, out_name) in enumerate(itertools.product(FORMATS, expand.OUT_FORMATS)):
        check_expansion_case((name, "e2m3"), out_name, (POOLS * 2)[seed % 5], (64, 128)[seed % 2], seed, device)


def check_expansion_case(
    names: tuple[str, str], out_name: str, pool: str, head_size: int, seed: int, device: torch.device | str
) -> None:
    heads, fmts, out = 2, [get_format(n) for n in names], get_format(out_name)
    scales = make_scales(("head", "channel"), heads, head_size, seed)
    out_scales = [torch.ones(1)] * 2 if out.bits == 16 else [scales[0], torch.tensor([6.0])]
    ids = torch.tensor([3, -1, 0, 4] if seed % 2 else list(range(20)) + [-3], dtype=torch.int64)
    to_ids = torch.tensor([6, 1, 2, -1], dtype=torch.int64) if seed % 2 else torch.arange(len(ids)).flip(0)
    results = []
    for to in (device, "cpu"):
        source = Pool.make(pool, fmts, head_size, [s.to(to) for s in scales], num_pages=24, heads=heads, device=to)
        target = Pool.make(
            "hnd", [out, out], head_size, [s.to(to) for s in out_scales], num_pages=22, heads=heads, device=to
        )
        sides = expand.Side(source.k, target.k), expand.Side(source.v, target.v)
        pages, out_pages = ids.to(to), to_ids.to(to)
        if torch.device(to).type == "cuda":
            expand.expand_pages(
                pages, source.k.codes, source.v.codes, target.k.codes, target.v.codes, source.k.scale, source.v.scale,
                kv_format=names[0], v_format=names[1], out_format=out_name,
                k_out_scale=target.k.scale, v_out_scale=target.v.scale, out_pages=out_pages,
                k_block_scale=source.k.block_scale, v_block_scale=source.v.block_scale,
            )  # fmt: skip
        elif to is device:
            from mjolnir.kernels.expand_kernel import launch_expand

            launch_expand(expand.check_layout(sides, *names, out_name), *sides, pages, out_pages)
        else:
            expand.expand_in_torch(expand.check_layout(sides, *names, out_name), *sides, pages, out_pages)
        results.append(target)
    for ours, theirs in ((results[0].k, results[1].k), (results[0].v, results[1].v)):
        written = torch.zeros(22, dtype=torch.bool)
        written[to_ids[(ids >= 0) & (to_ids >= 0)]] = True
        want_values = theirs.codes.float()
        nan = want_values.isnan() & written[:, None, None, None]
        got, want = as_bits(ours.codes).cpu(), as_bits(theirs.codes)
        assert (got[nan] == NAN_CODES[out_name]).all()
        np.testing.assert_array_equal(got[~nan].numpy(), want[~nan].numpy(), err_msg=f"{names} {out_name} {pool}")


INTERPRETED_ROUNDINGS = [
    (name, dtype, scale)
    for name in FORMATS
    for dtype, scale in (
        (torch.float32, 1.0),
        (torch.float32, 0.0),
        (torch.bfloat16, 0.3712),
        (torch.float16, 1e-38),
        (torch.float32, 1e30),
    )
]
