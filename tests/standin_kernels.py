"""Tiny CuTe DSL kernels for the tests of the compiler, and a script that compiles them in a process of its own.

Run as ``python standin_kernels.py FOLDER``: writes what the tests look at to FOLDER. The DSL's state stays out of the
test process, whose other tests may want it otherwise.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from pathlib import Path
from typing import Any

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_ptr

from mjolnir.compiler import build
from mjolnir.variant import Variant

ARCHS = ("sm_90a", "sm_100a", "sm_110a", "sm_120a", "sm_90a")
VARIANT = Variant("sm_90a", "fp8", "bf16", "bf16", 128, 8)


class AddConstant:
    """x[i] += k: registers only."""

    def __init__(self, k: float) -> None:
        self.k = k

    @cute.jit
    def __call__(self, x: cute.Pointer, n: Int32, stream: cuda_driver.CUstream):
        self.kernel(x, n).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Pointer, n: Int32):
        thread, _, _ = cute.arch.thread_idx()
        numbers = cute.make_tensor(x, cute.make_layout((1 << 20,)))
        if thread < n:
            numbers[thread] = numbers[thread] + Float32(self.k)


class IndexedRegisters(AddConstant):
    """A per-thread array with a run-time index: registers have none, so it lives in local memory."""

    @cute.kernel
    def kernel(self, x: cute.Pointer, n: Int32):
        thread, _, _ = cute.arch.thread_idx()
        numbers = cute.make_tensor(x, cute.make_layout((1 << 20,)))
        mine = cute.make_rmem_tensor((64,), Float32)
        for i in cutlass.range_constexpr(64):
            mine[i] = numbers[thread * 64 + i]
        mine[n % 64] = Float32(self.k)
        for i in cutlass.range_constexpr(64):
            numbers[thread * 64 + i] = mine[(i * n) % 64]


def compiler_of(kernel_class: type, options: str = "--gpu-arch {arch}") -> Any:
    """A stand-in for mjolnir.kernels.compile.compile_variant."""

    def compile_variant(variant: Variant) -> Any:
        pointer = make_ptr(Float32, 0, cute.AddressSpace.gmem, assumed_align=4)
        options_now = "--enable-tvm-ffi " + options.format(arch=variant.arch)
        return cute.compile(kernel_class(variant.rows), pointer, Int32(1), make_fake_stream(), options=options_now)

    return compile_variant


def main(folder: Path) -> None:
    import mjolnir.kernels.compile as kernels

    for index, arch in enumerate(ARCHS):
        kernels.compile_variant = compiler_of(AddConstant)
        variant = dataclasses.replace(VARIANT, arch=arch)
        (folder / f"one_{index}.o").write_bytes(build.compile_kernel(variant).object_code)

    def in_thread(index: int, arch: str) -> None:
        for repeat in range(3):
            variant = dataclasses.replace(VARIANT, arch=arch, rows=100 + 10 * index + repeat)
            (folder / f"thread_{index}_{repeat}.o").write_bytes(build.compile_kernel(variant).object_code)

    threads = [threading.Thread(target=in_thread, args=pair) for pair in enumerate(ARCHS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    kernels.compile_variant = compiler_of(IndexedRegisters)
    (folder / "spills.o").write_bytes(build.compile_kernel(VARIANT).object_code)
    kernels.compile_variant = compiler_of(AddConstant, "--gpu-arch sm_120a")
    try:
        build.compile_kernel(VARIANT)
    except build.BuildError as error:
        (folder / "wrong_arch.json").write_text(json.dumps(str(error)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
