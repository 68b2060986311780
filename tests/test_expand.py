"""expand_pages: the Triton kernel against the codecs under the interpreter, PyTorch by value, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_write import Launches, compiled, interpret
from writers_cases import Pool

import mjolnir
from mjolnir.expand import Side, check_layout
from mjolnir.formats import FORMATS, get_format
from mjolnir.page_views import as_bits


def test_every_format_to_every_output_under_the_interpreter() -> None:
    interpret("w.check_expansion('cpu')")


def arguments(name: str, out_name: str, scale: float, out_scale: float | None = None) -> dict[str, Any]:
    fmt, out = get_format(name), get_format(out_name)
    source = Pool.make("hnd", [fmt, fmt], 64, [torch.tensor([scale]), torch.tensor([scale])])
    target = Pool.make("nhd", [out, out], 64, [torch.ones(1)] * 2, num_pages=3)
    descale = None if out_scale is None else torch.tensor([out_scale])
    return {
        "pages": torch.tensor([4, -1, 0]),
        "k_cache": source.k.codes,
        "v_cache": source.v.codes,
        "k_out": target.k.codes,
        "v_out": target.v.codes,
        "k_scale": source.k.scale,
        "v_scale": source.v.scale,
        "kv_format": name,
        "out_format": out_name,
        "k_out_scale": descale,
        "v_out_scale": descale,
        "k_block_scale": source.k.block_scale,
        "v_block_scale": source.v.block_scale,
    }


@pytest.mark.parametrize(("name", "out_name"), [("e2m3", "fp8"), ("e2m3", "bf16"), ("fp8", "bf16"), ("fp8", "fp8")])
def test_values_that_the_output_holds_are_kept_exactly(name: str, out_name: str) -> None:
    """e2m3 and e4m3 have four significant bits at most: with a power of two as descale nothing is rounded; in fp8 the
    descale stays outside, whatever it is."""
    scale = 0.5 if out_name == "bf16" else 0.3712
    given = arguments(name, out_name, scale, scale if out_name == "fp8" else None)
    skipped = as_bits(given["k_out"])[1].clone()
    mjolnir.expand_pages(**given)
    fmt, out = get_format(name), get_format(out_name)
    factor = 1.0 if out_name == "fp8" else scale
    for source, target in (("k_cache", "k_out"), ("v_cache", "v_out")):
        for page, to in ((4, 0), (0, 2)):
            want = fmt.decode(given[source][page]) * factor
            torch.testing.assert_close(out.decode(given[target][to]), want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(as_bits(given["k_out"])[1], skipped)


def test_six_times_the_descale_keeps_nvfp4_from_saturating_in_fp8() -> None:
    given = arguments("nvfp4", "fp8", 0.25, 1.5)
    as_bits(given["k_cache"])[:] = 0x77  # 6
    as_bits(given["k_block_scale"])[:] = 0x7E  # 448
    mjolnir.expand_pages(**given)
    assert (given["k_out"][0].float() == 448).all()  # 6 · 448 · 0.25 / 1.5


def test_out_pages_say_where() -> None:
    given = arguments("fp8", "bf16", 1.0)
    mjolnir.expand_pages(**given | {"out_pages": torch.tensor([2, 0, 1])})
    want = given["k_cache"][4].float()
    torch.testing.assert_close(given["k_out"][2].float(), want, rtol=0, atol=0, equal_nan=True)


def test_the_cache_may_be_one_page_that_is_many() -> None:
    given = arguments("fp8", "bf16", 1.0)
    page = given["k_cache"][:1]
    mjolnir.expand_pages(**given | {"k_cache": page.expand(5, -1, -1, -1)})
    torch.testing.assert_close(given["k_out"][[0, 2]].float(), page.float().expand(2, -1, -1, -1), rtol=0, atol=0,
                               equal_nan=True)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"out_format": "fp8"}, ValueError, "k_out_scale must be given for out_format='fp8'"),
        ({"out_format": "e2m3"}, ValueError, "out_format must be one of 'bf16', 'fp16', 'fp8', got 'e2m3'"),
        ({"pages": torch.tensor([5])}, ValueError, "pages names page 5, expected at most 4"),
        ({"out_pages": torch.tensor([3, 0, 1])}, ValueError, "out_pages names page 3, expected at most 2"),
        ({"out_pages": torch.tensor([3])}, ValueError, "out_pages must have shape"),
        ({"pages": torch.tensor([0.5])}, TypeError, "pages must have dtype"),
        ({"k_out": torch.zeros(3, 8, 3, 64).bfloat16()}, ValueError, "k_out must have pages of 16 tokens|v_out must"),
        ({"v_out": torch.zeros(3, 16, 3, 32).bfloat16()}, ValueError, "v_out must have shape"),
        (
            {"k_out": torch.zeros(1, 16, 3, 64).bfloat16().expand(3, -1, -1, -1)},
            ValueError,
            "k_out is written and must h",
        ),
        (
            {"v_out": torch.zeros(3, 1, 3, 64).bfloat16().expand(-1, 16, -1, -1)},
            ValueError,
            "v_out is written and must h",
        ),
        ({"v_format": ""}, ValueError, "v_format must be one of .*, got ''"),
        ({"kv_format": ["fp8"]}, ValueError, r"kv_format must be one of .*, got \['fp8'\]"),
        ({"out_format": ["bf16"]}, ValueError, r"out_format must be one of .*, got \['bf16'\]"),
        ({"v_scale": torch.ones(1).to_sparse()}, TypeError, "v_scale must be a dense tensor"),
        (
            {"k_out": torch.zeros(3, 16, 3, 8).bfloat16(), "kv_format": "nvfp4"},
            ValueError,
            "multiple of 16 elements, got 8",
        ),
        ({"k_out": torch.zeros(3, 16, 3, 64)}, TypeError, "k_out must have dtype"),
        ({"v_cache": torch.zeros(4, 16, 3, 64, dtype=torch.uint8)}, ValueError, "v_cache must have as many pages"),
    ],
)
def test_refusals_name_the_argument(changes, error, message) -> None:
    with pytest.raises(error, match=message):
        mjolnir.expand_pages(**arguments("fp8", "bf16", 1.0) | changes)


@pytest.mark.parametrize("name", FORMATS)
def test_compiles_for_hopper_without_spills(name: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from mjolnir.kernels.expand_kernel import expand_pages_kernel
    from mjolnir.kernels.triton_launch import tile_of

    pointers = {f"{side}_{n}": "*i32" for side in "kv" for n in ("cache", "out")}
    pointers |= {f"{side}_{n}": "*fp32" for side in "kv" for n in ("scale", "out_scale")}
    pointers |= {f"{side}_blocks": "*u8" for side in "kv"} | {"pages": "*i64", "out_pages": "*i64"}
    flags = {f"{side}_{n}": False for side in "KV" for n in ("PER_CHANNEL", "OUT_PER_CHANNEL")}
    for out_name in ("fp8", "bf16"):
        constants = {
            "K_FORMAT": name, "V_FORMAT": name, "OUT_FORMAT": out_name, **flags,
            "KV_HEADS": 3, "D": 128, "PAGE_SIZE": 64, "ROWS": tile_of(10**4, 128).rows, "NATIVE": True,
        }  # fmt: skip
        assert not compiled(expand_pages_kernel, pointers, constants).spills


def test_more_tiles_than_a_grid_has_on_its_other_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from mjolnir.kernels import expand_kernel

    monkeypatch.setattr(expand_kernel, "expand_pages_kernel", launches := Launches())
    pools = [Pool.make("nhd", [get_format("fp8")] * 2, 64, [torch.ones(1)] * 2) for _ in range(2)]
    sides = Side(pools[0].k, pools[1].k), Side(pools[0].v, pools[1].v)
    layout = check_layout(sides, "fp8", "fp8", "fp8")
    for pages in (1, 2**22):  # of 16 rows; a tile has 8, or 64
        ids = torch.zeros(1, dtype=torch.int32).expand(pages)
        expand_kernel.launch_expand(layout, *sides, ids, ids)
    assert launches.grids == [(6, 1, 2), (3 * 2**20, 1, 2)]
