"""Compile one variant with CuTe DSL, on a machine with or without a GPU."""

from __future__ import annotations

import inspect
from typing import Any

from mjolnir.variant import Variant


def compile_variant(variant: Variant) -> Any:
    """The compiled launch function: positional arguments as ``DecodeKernel.__call__``, exportable as an object."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    from mjolnir.kernels.decode import DecodeKernel

    kernel = DecodeKernel(variant)
    parameters = list(inspect.signature(DecodeKernel.__call__).parameters.values())[1:-1]
    types = {"Int64": cutlass.Int64, "Int32": cutlass.Int32, "Float32": cutlass.Float32}
    arguments = [types[str(p.annotation)](1) for p in parameters]
    return cute.compile(kernel, *arguments, make_fake_stream(), options=f"--enable-tvm-ffi --gpu-arch {variant.arch}")
