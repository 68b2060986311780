"""From a Variant to a function that can be called: compile, link, keep on disk, inspect.

cubin.py    the GPU code inside an object file
build.py    Variant -> object -> shared library
key.py      what an entry on disk must agree with
disk.py     the folder of shared libraries
cache.py    the cache of this process, in front of the folder
batch.py    fill a folder for another machine
inspect.py  registers, spills and instructions of a compiled variant

Nothing here imports the CuTe DSL before something is compiled.
"""

from mjolnir.compiler.batch import CompileResult, compile_to_folder
from mjolnir.compiler.build import BuildError, KernelUnavailable, build_library, compile_kernel
from mjolnir.compiler.cache import CacheReport, CacheStats, KernelCache, kernel_cache

__all__ = [
    "BuildError",
    "CacheReport",
    "CacheStats",
    "CompileResult",
    "KernelCache",
    "KernelUnavailable",
    "build_library",
    "compile_kernel",
    "compile_to_folder",
    "kernel_cache",
]
