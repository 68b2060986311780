"""What the assembler makes of the kernels: no spills, the instructions they are built on, resources that fit.

The sweeps over the catalogue are slow and run by `make compile-check`. Only sm_90a has been run; for the other archs
it is known that the same source compiles and fits, no more.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mjolnir.backends import KERNEL_ARCHS, PROVEN_ARCHS
from mjolnir.catalogue import all_variants
from mjolnir.compiler.build import dsl_missing_reason
from mjolnir.compiler.inspect import KernelReport, find_cuobjdump, inspect_variant

if dsl_missing_reason():
    pytest.skip(dsl_missing_reason() or "", allow_module_level=True)

from mjolnir.kernels.choice import geometry_of, takes_wgmma
from mjolnir.kernels.geometry import WARP, Geometry
from mjolnir.kernels.unpack import UNPACK
from mjolnir.variant import Variant

pytestmark = pytest.mark.skipif(
    bool(dsl_missing_reason()) or find_cuobjdump() is None, reason=dsl_missing_reason() or "no cuobjdump"
)

KIB = 1024
RESERVED_SMEM = 1 * KIB  # per CTA, by the system; the cubin's static figure is just that
SMEM_PER_SM = {"sm_90a": 228 * KIB, "sm_100a": 228 * KIB, "sm_110a": 228 * KIB, "sm_120a": 100 * KIB}
REGISTERS_PER_PARTITION = 16 * KIB  # 4 partitions an SM; a CTA's warps go round them

COMMON = (
    "UTMALDG.5D",  # the TMA fills the ring
    "SYNCS.PHASECHK.TRANS64.TRYWAIT",  # and mbarriers say when
)
MMA = {"f16": "HMMA.16816.F32", "bf16": "HMMA.16816.F32.BF16"}
E4M3_TO_F16 = "F2FP.F16.E4M3.UNPACK_B"
PDL = ("ACQBULK", "PREEXIT")  # griddepcontrol.wait and .launch_dependents

REPRESENTATIVES = [
    Variant("sm_90a", "fp8", "bf16", "bf16", 128, 8),
    Variant("sm_90a", "fp8", "fp16", "fp16", 64, 64, split=False, pdl=False),
    Variant("sm_90a", "bf16", "bf16", "bf16", 128, 8, q_split=True),
    Variant("sm_90a", "e2m3", "bf16", "bf16", 128, 8),
    Variant("sm_90a", "nvfp4", "bf16", "bf16", 128, 8),
    Variant("sm_90a", "fp8", "bf16", "bf16", 128, 8, v_format="nvfp4"),
    Variant("sm_90a", "fp8", "bf16", "bf16", 64, 8, joined="heads"),
    Variant("sm_90a", "nvfp4", "bf16", "bf16", 128, 16, joined="tokens"),
    Variant("sm_90a", "fp8", "bf16", "bf16", 128, 16, joined="panels"),
    Variant("sm_90a", "fp8", "bf16", "bf16", 128, 32),
    Variant("sm_90a", "fp8", "bf16", "bf16", 128, 64),
]


def name(variant: Variant) -> str:
    return variant.name


def once_each(arch: str) -> list[Variant]:
    """Every format, head size and row class once, as a runner without q_mul asks for it."""
    seen = {}
    for variant in all_variants(arch):
        if variant.split and not variant.q_split:
            seen.setdefault((variant.kv_format, variant.head_size, variant.rows), variant)
    return list(seen.values())


@pytest.fixture(scope="module")
def report_of(request: pytest.FixtureRequest) -> Iterator[Callable[[Variant], KernelReport]]:
    """Reports by variant; those of all selected tests are compiled at once, a process per core."""
    calls = [
        item.callspec for item in request.session.items if item.module is request.module and hasattr(item, "callspec")
    ]
    wanted = dict.fromkeys(call.params["variant"] for call in calls if "variant" in call.params)
    # A fresh interpreter for each: the DSL is not thread-safe, and its state must not reach the other tests.
    context = multiprocessing.get_context("spawn")
    workers = max(1, min(len(wanted), os.cpu_count() or 1))
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = {variant: pool.submit(inspect_variant, variant) for variant in wanted}
        yield lambda variant: futures[variant].result()
        pool.shutdown(cancel_futures=True)


def check_smem(geometry: Geometry, variant: Variant) -> None:
    cta_bytes = geometry.halves * geometry.half_bytes
    assert geometry.ctas_per_sm % geometry.halves == 0
    assert geometry.ctas_per_sm // geometry.halves * (cta_bytes + RESERVED_SMEM) <= SMEM_PER_SM[variant.arch], variant
    assert cta_bytes <= SMEM_PER_SM[variant.arch] - RESERVED_SMEM  # the most that a CTA may ask for


def check_resources(variant: Variant, report: KernelReport) -> None:
    geometry = geometry_of(variant)
    assert report.static_smem_bytes <= RESERVED_SMEM
    check_smem(geometry, variant)
    warps = -(-geometry.ctas_per_sm * geometry.threads // WARP // 4)  # of the fullest partition
    assert warps * WARP * report.registers <= REGISTERS_PER_PARTITION


def check_wide(report: KernelReport) -> None:
    """The products of a batch follow each other (the assembler would wait for each where it is not sure of registers),
    and consumers have the registers that they ask for."""
    assert report.count("HGMMA") == 8 + 8  # of S, 16 elements each; of O, 16 tokens and 64
    assert report.count("WARPGROUP.ARRIVE") == 2
    assert report.count("USETMAXREG") == 2


@pytest.mark.parametrize("variant", REPRESENTATIVES, ids=name)
def test_kernel_is_made_of_what_it_says(variant, report_of):
    report = report_of(variant)
    assert report.sm == 90
    assert [function.stack_bytes for function in report.functions] == [0]
    assert not report.spills
    assert report.registers <= 168
    check_resources(variant, report)
    mma_dtype = UNPACK[variant.kv_format].mma_dtype
    for instruction in (*COMMON, f"F2FP.{mma_dtype.upper()}.F32.PACK_AB"):
        assert report.count(instruction) > 0, instruction
    if not geometry_of(variant).wide:
        assert report.count(MMA[mma_dtype]) > 0
        assert report.count("MOVM.16.MT88") > 0  # P turns in the warp
    else:
        check_wide(report)
    formats = {variant.kv_format, variant.v_format or variant.kv_format}
    assert (report.count(E4M3_TO_F16) > 0) == bool(formats & {"fp8", "nvfp4"})
    assert (report.count("LDGSTS") > 0) == ("nvfp4" in formats)  # block scales
    for instruction in PDL:
        assert (report.count(instruction) > 0) == variant.pdl, instruction


@pytest.mark.slow
@pytest.mark.parametrize("variant", [v for arch in PROVEN_ARCHS for v in all_variants(arch)], ids=name)
def test_catalogue_compiles_without_spills_and_fits(variant, report_of):
    report = report_of(variant)
    stack_bytes = [function.stack_bytes for function in report.functions]
    assert not report.spills, f"{report.registers} registers, stack bytes {stack_bytes}, {report.count('LDL')} LDL"
    check_resources(variant, report)


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", [v for arch in KERNEL_ARCHS.values() if arch not in PROVEN_ARCHS for v in once_each(arch)], ids=name
)
def test_unrun_arch_compiles_and_fits(variant, report_of):
    """Spills are let pass where nothing has been tuned: they cost time, not correctness."""
    check_resources(variant, report_of(variant))


def test_every_arch_has_a_memory_size():
    assert SMEM_PER_SM.keys() == set(KERNEL_ARCHS.values())


@pytest.mark.parametrize("arch", SMEM_PER_SM)
def test_ring_fits_the_arch(arch):
    for variant in all_variants(arch):
        geometry = geometry_of(variant)
        check_smem(geometry, variant)
        assert geometry.stages % geometry.kv_groups == 0, variant.name
        panels = max(geometry.k.panels, geometry.v.panels)
        assert 2 * panels * geometry.tile // 16 <= WARP, variant.name  # boxes of the smallest pages: a lane each
    common = geometry_of(Variant(arch, "fp8", "bf16", "bf16", 128, 8))
    assert common.stages * common.stage_bytes == 64 * KIB
    assert common.ctas_per_sm == (2 if SMEM_PER_SM[arch] > 2 * 64 * KIB else 1)


@pytest.mark.parametrize("arch", SMEM_PER_SM)
def test_halves_of_a_cta(arch):
    for variant in all_variants(arch):
        geometry = geometry_of(variant)
        whole = geometry.row_groups == 1 or geometry.crowd
        assert geometry.halves == (2 if geometry.ctas_per_sm == 2 and whole else 1), variant.name
        assert geometry.half_bytes % 1024 == 0 and 0 <= geometry.half_bytes - geometry.smem_bytes < 1024
        assert geometry.halves * geometry.threads <= 1024, variant.name
    assert geometry_of(Variant(arch, "fp8", "bf16", "bf16", 128, 8, ctas_per_sm=1)).halves == 1


@pytest.mark.parametrize(("rows", "joined"), [(8, ""), (16, "panels")])
def test_a_crowd(rows: int, joined: str) -> None:
    """Twelve consumer warps and four others share an SM's registers and its shared memory."""
    geometry = geometry_of(Variant("sm_90a", "e2m3", "bf16", "bf16", 128, rows, joined=joined, crowd=True))
    assert (geometry.consumer_warps, geometry.halves * geometry.threads) == (6, 16 * 32)
    consumer, feeder = geometry.registers
    assert 12 * 32 * consumer + 4 * 32 * feeder <= 65536
    assert geometry.half_bytes * 2 + 1024 <= 228 * KIB
    assert geometry.sides * geometry.warp_tile * geometry.token_groups == 64


@pytest.mark.parametrize(
    ("arch", "kv_format", "rows", "options"),
    [
        ("sm_100a", "e2m3", 8, {}),
        ("sm_90a", "nvfp4", 8, {}),
        ("sm_90a", "e2m3", 16, {}),
        ("sm_90a", "e2m3", 8, {"stages": 8}),
    ],
)
def test_what_is_no_crowd(arch: str, kv_format: str, rows: int, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="six consumer warps are for eight rows of a head of 128 e2m3 elements"):
        geometry_of(Variant(arch, kv_format, "bf16", "bf16", 128, rows, crowd=True, **options))


def test_too_many_ctas_for_an_sm_is_an_error():
    with pytest.raises(ValueError, match=r"decode_.*_c9: needs \d+ bytes of shared memory a CTA, of \d+ on an SM"):
        geometry_of(Variant("sm_90a", "fp8", "bf16", "bf16", 128, 8, ctas_per_sm=9))


@pytest.mark.parametrize(
    ("kv_format", "head_size", "joined", "message"),
    [
        ("bf16", 64, "heads", "joined heads must make rows of 128 bytes, got 256 of K"),
        ("e2m3", 128, "tokens", "joined tokens must make rows of 128 bytes, got 192 of K"),
        ("nvfp4", 128, "heads", "heads with block scales cannot be joined"),
        ("fp8", 128, "panels", "side by side are two row groups of rows of one panel, got 1 row groups, 1 panels of K"),
    ],
)
def test_what_cannot_be_joined(kv_format: str, head_size: int, joined: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        geometry_of(Variant("sm_90a", kv_format, "bf16", "bf16", head_size, 8, joined=joined))


@pytest.mark.parametrize("rows", [32, 64])
def test_what_takes_wgmma(rows: int) -> None:
    variant = Variant("sm_90a", "fp8", "bf16", "bf16", 128, rows)
    assert geometry_of(variant).wide
    assert geometry_of(dataclasses.replace(variant, head_size=64, joined="heads")).wide
    for other in (
        {"rows": 16},
        {"arch": "sm_100a"},
        {"kv_format": "e2m3"},
        {"head_size": 64},
        {"q_split": True},
        {"stages": 4},
        {"ctas_per_sm": 2},
    ):
        assert not takes_wgmma(dataclasses.replace(variant, **other)), other
    for joined in ("tokens", "panels"):
        assert not takes_wgmma(dataclasses.replace(variant, joined=joined)), joined


@pytest.mark.parametrize("tuning", [{"stages": 1}, {"stages": 3}, {"ctas_per_sm": 8}])
def test_consumer_warps_that_do_not_cover_whole_rows_are_refused(tuning: dict[str, int]) -> None:
    """One warp covers half a row of 256 elements: the epilogue would never end; three would write some of it twice."""
    with pytest.raises(ValueError, match="a head size of 256 takes a multiple of 2 consumer warps"):
        geometry_of(Variant("sm_90a", "bf16", "bf16", "bf16", 256, 8, **tuning))
    for variant in all_variants(PROVEN_ARCHS[0]):
        geometry = geometry_of(variant)
        assert geometry.consumer_warps * WARP >= variant.head_size // 4, variant.name
