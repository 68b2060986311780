"""write_kv: the Triton kernel against the codecs under the interpreter, PyTorch against a loop, refusals, and that
everything compiles for Hopper."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from writers_cases import POOLS, Pool, make_scales

import mjolnir
from mjolnir.formats import FORMATS, get_format
from mjolnir.page_views import MANY_ROWS, as_bits
from mjolnir.write import Side, check_layout


def interpret(code: str) -> None:
    """In a process of its own: TRITON_INTERPRET decides when Triton is imported."""
    pytest.importorskip("triton", reason="Triton is not installed")
    path = os.pathsep.join([os.path.dirname(__file__), os.getcwd()])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import torch, writers_cases as w\ntorch.set_num_threads(1)\n" + code],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_rounding_of_every_format_under_the_interpreter() -> None:
    interpret("for case in w.INTERPRETED_ROUNDINGS: w.check_rounding(*case, 'cpu')")


def test_every_pair_of_formats_in_every_kind_of_pool_under_the_interpreter() -> None:
    interpret("w.check_layouts('cpu')")


def write(
    pool: Pool, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, *formats: str, changes: Any = ()
) -> None:
    arguments = {
        "key": key,
        "value": value,
        "k_cache": pool.k.codes,
        "v_cache": pool.v.codes,
        "slot_mapping": slots,
        "k_scale": pool.k.scale,
        "v_scale": pool.v.scale,
        "kv_format": formats[0],
        "v_format": formats[1],
        "k_block_scale": pool.k.block_scale,
        "v_block_scale": pool.v.block_scale,
    }
    mjolnir.write_kv(**(arguments | dict(changes)))


@settings(max_examples=40)
@given(
    names=st.tuples(st.sampled_from(list(FORMATS)), st.sampled_from(list(FORMATS))),
    pool=st.sampled_from(POOLS),
    kinds=st.tuples(*[st.sampled_from(["tensor", "head", "channel"])] * 2),
    tokens=st.integers(0, 40),
    heads=st.integers(1, 4),
    own_rows=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_on_the_cpu_each_token_s_row_is_its_codes(names, pool, kinds, tokens, heads, own_rows, seed) -> None:
    """The loop of the definition: one token, head and side at a time."""
    gen = torch.Generator().manual_seed(seed)
    d, fmts, scales = 64, [get_format(name) for name in names], make_scales(kinds, heads, 64, seed)
    made, before = (Pool.make(pool, fmts, d, scales, heads=heads, own_rows=own_rows, seed=seed) for _ in range(2))
    rows = torch.randn(2, tokens, heads, d, generator=gen).bfloat16()
    slots = torch.randperm(80, generator=gen)[:tokens]
    slots[torch.rand(tokens, generator=gen) < 0.2] = -1
    write(made, *rows, slots, *names)
    for side, want in enumerate((before.k, before.v)):
        fmt, scale = fmts[side], scales[side]
        for token, slot in enumerate(slots.tolist()):
            for head in range(heads if slot >= 0 else 0):
                own = scale.reshape(-1) if scale.numel() == 1 else scale[head]
                blocks = fmt.block_scales(rows[side, token, head], own)
                place = slot // 16, slot % 16, head
                as_bits(want.codes)[place] = as_bits(fmt.encode(rows[side, token, head], own, blocks))
                if want.block_scale is not None and blocks is not None:
                    as_bits(want.block_scale)[place] = as_bits(blocks)
    for a, b in zip(made.buffers, before.buffers, strict=True):
        assert torch.equal(a, b)


def small(kv_format: str = "fp8") -> tuple[Pool, torch.Tensor, torch.Tensor]:
    fmt = get_format(kv_format)
    pool = Pool.make("nhd", [fmt, fmt], 64, [torch.ones(1), torch.ones(3)])
    return pool, torch.randn(4, 3, 64).bfloat16(), torch.tensor([5, -1, 79, 0])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"key": torch.zeros(4, 3, 48).bfloat16()}, ValueError, r"power of two.*\(4, 3, 48\)"),
        ({"key": torch.zeros(4, 3, 64, dtype=torch.float64)}, TypeError, "key must have dtype.*float64"),
        ({"value": torch.zeros(4, 3, 64)}, TypeError, "value must have dtype torch.bfloat16, got torch.float32"),
        ({"value": torch.zeros(4, 2, 64).bfloat16()}, ValueError, r"value must have shape .*\(4, 2, 64\)"),
        ({"value": torch.zeros(3, 3, 64).bfloat16()}, ValueError, "value must have at least a row per slot, 4, got 3"),
        ({"v_cache": torch.zeros(5, 16, 3, 64)}, TypeError, "v_cache must have dtype"),
        ({"v_cache": torch.zeros(5, 16, 3, 32, dtype=torch.uint8)}, ValueError, "v_cache must have shape"),
        ({"v_cache": torch.zeros(4, 16, 3, 64, dtype=torch.uint8)}, ValueError, "v_cache must have the pages of k_ca"),
        ({"k_cache": torch.zeros(5, 16, 3, 65, dtype=torch.uint8)[..., 1:]}, ValueError, "multiples of 4 bytes"),
        ({"k_scale": torch.ones(2)}, ValueError, r"k_scale must have 1 element, shape \(3,\) or shape \(3, 64\)"),
        ({"v_scale": torch.ones(3).double()}, TypeError, "v_scale must have dtype torch.float32"),
        ({"slot_mapping": torch.zeros(4)}, TypeError, "slot_mapping must have dtype"),
        ({"slot_mapping": torch.tensor([80])}, ValueError, "slot 80, but 5 pages of 16 tokens have 80"),
        ({"kv_format": "fp7"}, ValueError, "kv_format must be one of .*'fp7'"),
        ({"k_block_scale": torch.ones(1)}, ValueError, "k_block_scale must be None: a fp8 cache has no block scales"),
        ({"v_format": ""}, ValueError, "v_format must be one of .*, got ''"),
        ({"kv_format": ["fp8"]}, ValueError, r"kv_format must be one of .*, got \['fp8'\]"),
        (
            {"k_cache": torch.zeros(1, 16, 3, 64).byte().expand(5, -1, -1, -1)},
            ValueError,
            "k_cache is written .* stride",
        ),
        (
            {"v_cache": torch.zeros(5, 16, 1, 64).byte().expand(-1, -1, 3, -1)},
            ValueError,
            r"v_cache .*\(1024, 64, 0, 1",
        ),
        (
            {"key": torch.zeros(4, 3, 64).to_sparse()},
            TypeError,
            "key must be a dense tensor, got one of layout torch.sp",
        ),
        ({"k_scale": torch.ones(1).to_sparse()}, TypeError, "k_scale must be a dense tensor"),
        ({"slot_mapping": torch.tensor([1, 2]).to_sparse()}, TypeError, "slot_mapping must be a dense tensor"),
        ({"slot_mapping": [1, 2]}, TypeError, "slot_mapping must be a"),
        ({"key": None}, TypeError, "key must be a"),
    ],
)
def test_refusals_name_the_argument(changes, error, message) -> None:
    pool, x, slots = small()
    with pytest.raises(error, match=message):
        write(pool, x, x, slots, "fp8", "fp8", changes=changes)


def test_block_scales_must_be_there_and_fit() -> None:
    pool, x, slots = small("nvfp4")
    with pytest.raises(ValueError, match="v_block_scale must be given: a nvfp4 cache has 4 block scales per row of 64"):
        write(pool, x, x, slots, "nvfp4", "nvfp4", changes={"v_block_scale": None})
    one_row = {"v_block_scale": torch.zeros(5, 16, 1, 4).byte().expand(-1, -1, 3, -1)}
    with pytest.raises(ValueError, match="v_block_scale is written and must have no stride of 0"):
        write(pool, x, x, slots, "nvfp4", "nvfp4", changes=one_row)
    with pytest.raises(ValueError, match="k_cache: rows of a nvfp4 cache have a multiple of 16 elements, got 8"):
        write(pool, x[..., :8], x[..., :8], slots, "nvfp4", "nvfp4")
    with pytest.raises(ValueError, match="k_block_scale must have shape"):
        write(pool, x, x, slots, "nvfp4", "nvfp4", changes={"k_block_scale": torch.zeros(5, 16, 3, 3).byte()})


def test_what_is_read_may_have_strides_of_0_and_require_gradients() -> None:
    pool, x, slots = small("bf16")
    x.requires_grad_()
    scale = torch.tensor([2.0]).expand(3)
    write(pool, x[:1].expand(4, -1, -1), x, slots, "bf16", "bf16", changes={"k_scale": scale})
    assert torch.equal(pool.k.codes[0, 5], x[0] / 2) and torch.equal(pool.k.codes[4, 15], x[0] / 2)
    assert torch.equal(pool.v.codes[4, 15], x[2])


def test_nan_and_inf() -> None:
    pool, x, slots = small()
    x[0, 0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30])
    write(pool, x, x, slots, "fp8", "fp8")
    got = pool.k.codes[0, 5, 0, :4].float()
    assert got[0].isnan() and got[1:].tolist() == [448, -448, 448]


def longdouble_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.longdouble) * b + c).astype(np.float32)


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="no wider type than fp64 to emulate an fma with")
def test_the_corrected_quotient_is_the_ieee_quotient() -> None:
    """The arithmetic of ``in_triton.scales.full_quotient``, step by step, wherever a code can depend on it."""
    rng, one = np.random.default_rng(0), np.float32(1)
    for seed in range(6):
        x = rng.integers(0, 2**32, 2**18, dtype=np.uint32).view(np.float32)
        d = rng.integers(1, 0x7F800000, 2**18, dtype=np.uint32).view(np.float32)
        with np.errstate(all="ignore"):
            if seed % 2:  # quotients of everyday size
                near = (np.abs(x) * np.exp2(rng.uniform(-15, 15, x.shape))).astype(np.float32)
                d = np.where((near > 0) & np.isfinite(near), near, one)
            factor = np.where(d < 2.0**-60, 2.0**64, np.where(d > 2.0**60, 2.0**-64, 1)).astype(np.float32)
            scaled, divisor = x * factor, d * factor
            r = one / divisor
            first = y = scaled * r
            for _ in range(2):
                y = longdouble_fma(longdouble_fma(y, divisor, -scaled), -r, y)
            y = np.where(np.isnan(y), first, y)
            want = x / d
        size = np.abs(want)
        everyday = (size >= 2.0**-26) & (size < 65536)  # from half of fp16's smallest code on
        np.testing.assert_array_equal(y[everyday], want[everyday])
        with np.errstate(invalid="ignore"):
            assert (np.abs(y[size < 2.0**-26]) < 2.0**-25).all() and (np.abs(y[size >= 65536]) >= 65535).all()
        assert (np.isnan(y) == np.isnan(want)).all()


def short_quotient(x: np.ndarray, d: np.ndarray) -> np.ndarray:
    """``in_triton.scales.short_quotient``."""
    one = np.ones_like(d)
    reciprocal = one / d
    bits = reciprocal.view(np.int32)
    high = np.where(longdouble_fma(-d, reciprocal, one) < 0, bits - 1, bits).view(np.float32)
    low = longdouble_fma(-d, high, one) * reciprocal
    low = np.where(low == 0, high * np.float32(2.0**-40), low)
    return longdouble_fma(x, high, x * low)


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="no wider type than fp64 to emulate an fma with")
@pytest.mark.parametrize("bits", [8, 11])
def test_the_short_quotient_keeps_every_boundary(bits: int) -> None:
    """Every x of as many significant bits against every boundary of 7, for every descale that brings one within three
    ulps of the other: on the side that the IEEE quotient is on, and equal where that is equal."""
    x = np.arange(2 ** (bits - 1), 2**bits, dtype=np.float32)[:, None, None]
    bound = np.arange(64, 128, dtype=np.float32)[:, None]
    nearest = (x / bound).view(np.int32)
    d = (nearest + np.arange(-4, 5, dtype=np.int32)).view(np.float32)
    x, d = np.broadcast_arrays(x, d)
    got, want = short_quotient(x, d), x / d
    assert (np.sign(want - bound) != 0).any() and (np.sign(want - bound) == 0).any()
    np.testing.assert_array_equal(np.sign(got - bound), np.sign(want - bound))


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="no wider type than fp64 to emulate an fma with")
def test_quotients_of_zero_inf_and_nan_are_the_ieee_quotients() -> None:
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32)[:, None]
    d = np.array([1, 0.5, 3, 0.7712, 2.0**60, 2.0**-60], np.float32)
    x, d = np.broadcast_arrays(x, d)
    with np.errstate(all="ignore"):
        want, r = x / d, np.float32(1) / d
        y = first = x * r
        for _ in range(2):
            y = longdouble_fma(longdouble_fma(y, d, -x), -r, y)
        full, short = np.where(np.isnan(y), first, y), short_quotient(x, d)
    for got in (short, full):
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got[:4]), np.signbit(want[:4]))


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="no wider type than fp64 to emulate an fma with")
def test_one_correction_keeps_every_e2m1_boundary() -> None:
    """``in_triton.scales.over_block_scale``: for every block scale, on every boundary and beside it, with a reciprocal
    that is off by up to two ulps."""
    blocks = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    bounds = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
    at = (bounds[:, None] * blocks).astype(np.float32)
    for ulps in range(-2, 3):
        r = ((np.float32(1) / blocks).view(np.int32) + ulps).view(np.float32)
        for y in (at, np.nextafter(at, np.float32(0)), np.nextafter(at, np.float32(np.inf))):
            first = y * r
            got = longdouble_fma(longdouble_fma(first, blocks, -y), -r, first)
            np.testing.assert_array_equal(np.sign(got - bounds[:, None]), np.sign(y.astype(np.float64) - at))


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="no wider type than fp64 to emulate an fma with")
def test_the_corrected_sixth_is_the_ieee_quotient() -> None:
    """``in_triton.scales.block_scale_code``."""
    amax = np.random.default_rng(0).integers(0, 0x47800000, 2**20, dtype=np.uint32).view(np.float32)  # up to 65536
    six, sixth = np.float32(6), np.float32(1 / 6)
    y = amax * sixth
    for _ in range(2):
        y = longdouble_fma(longdouble_fma(y, np.full_like(amax, six), -amax), np.full_like(amax, -sixth), y)
    large = amax > 2.0**-60  # what is smaller is 0 in e4m3
    np.testing.assert_array_equal(y[large], (amax / six)[large])
    assert (y[~large] < 2.0**-59).all()


def compiled(kernel: Any, pointers: dict[str, str], constants: dict[str, Any], num_warps: int = 4) -> Any:
    """A kernel's cubin report for Hopper, all pointers and strides at multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from mjolnir.compiler.inspect import inspect_cubin

    names = kernel.arg_names
    kinds = {name: "constexpr" if name in constants else "i32" for name in names} | pointers
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name not in constants and not name.startswith("num_") and not name.endswith(("scale_head", "scale_channel"))
    }
    source = ASTSource(fn=kernel, signature=kinds, constexprs=constants, attrs=aligned)
    cubin = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}).asm["cubin"]
    return inspect_cubin(cubin, kernel.fn.__name__).functions[0]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("per_channel", [False, True])
def test_compiles_for_hopper_without_spills(name: str, per_channel: bool) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from mjolnir.kernels.triton_launch import tile_of
    from mjolnir.kernels.write_kernel import write_kv_kernel

    pointers = {n: "*bf16" for n in ("key", "value")} | {n: "*i32" for n in ("k_cache", "v_cache")}
    pointers |= {n: "*u8" for n in ("k_blocks", "v_blocks")} | {n: "*fp32" for n in ("k_scale", "v_scale")}
    for tokens in (1, MANY_ROWS + 1):
        constants = {
            "K_FORMAT": name, "V_FORMAT": "fp8", "K_PER_CHANNEL": per_channel, "V_PER_CHANNEL": False,
            "KV_HEADS": 3, "D": 128, "PAGE_SIZE": 64, "ROWS": tile_of(tokens, 128).rows, "NATIVE": True,
        }  # fmt: skip
        report = compiled(write_kv_kernel, pointers | {"slots": "*i64"}, constants)
        assert not report.spills
        assert report.count("F2FP"), "fp8 is converted by the instruction"


class Launches:
    """In place of a kernel: notes the grids that it is launched over."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *arguments, **constants: None


def test_more_tiles_than_a_grid_has_on_its_other_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first axis takes more than 65,535."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from mjolnir.kernels import write_kernel

    monkeypatch.setattr(write_kernel, "write_kv_kernel", launches := Launches())
    pool, x, slots = small()
    sides = Side(x, pool.k), Side(x, pool.v)
    layout = check_layout(sides, "fp8", "fp8")
    for tokens in (4, 2**26):  # a tile has 8 rows, or 64
        write_kernel.launch_write(layout, *sides, slots[:1].expand(tokens))
    assert launches.grids == [(3, 1, 2), (3 * 2**20, 1, 2)]
