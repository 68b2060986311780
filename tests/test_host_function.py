"""What the compiled host function makes of ``LaunchArgs`` and its own arguments: run on a CPU, with the CUDA calls that
it makes replaced by ones that write their arguments down."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from mjolnir.compiler import build, key
from mjolnir.kernels.launch_args import LaunchArgs
from mjolnir.variant import Variant

pytestmark = [
    pytest.mark.skipif(build.find_c_compiler() is None, reason="no C compiler on this machine"),
    pytest.mark.skipif(key.dsl_toolchain() is None, reason="the CuTe DSL is not installed"),
]

VARIANT = Variant("sm_90a", "fp8", "bf16", "bf16", 128, 8)

CUDA = r"""
#include <stdint.h>
#define NOTHING(name) int name(void) { return 0; }
NOTHING(_cuKernelGetAttribute) NOTHING(_cudaDeviceGetAttribute) NOTHING(_cudaFuncSetAttribute) NOTHING(_cudaGetDevice)
NOTHING(_cudaKernelSetAttributeForDevice) NOTHING(_cudaLibraryGetKernel) NOTHING(_cudaLibraryLoadData)
NOTHING(cuda_dialect_assert_success) NOTHING(cuda_dialect_init_library_once) NOTHING(cuda_dialect_unload_library_once)
NOTHING(CuteDSLRT_TVMFFISetRaisedCudaError)

uint64_t maps[2][15], launch[5], params[64];  /* a map: address, 5 sizes, 4 strides in bytes, 5 of a box */
int num_maps, num_params;

int _cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *sizes,
                            const uint64_t *strides, const uint32_t *box) {
  uint64_t *to = maps[num_maps++];
  *to++ = (uint64_t)address;
  for (int i = 0; i < 5; i++) *to++ = sizes[i];
  for (int i = 0; i < 4; i++) *to++ = strides[i];
  for (int i = 0; i < 5; i++) *to++ = box[i];
  return rank != 5;
}

typedef struct { uint32_t grid[3], block[3]; uint64_t smem; void *stream; } Config;

int _cudaLaunchKernelEx(const Config *config, void *kernel, void **values) {
  uint64_t found[5] = {config->grid[0], config->grid[1], config->grid[2], config->block[0], (uint64_t)config->stream};
  for (int i = 0; i < 5; i++) launch[i] = found[i];
  for (int i = 0; i < num_params; i++) params[i] = *(uint64_t *)values[2 + i];  /* after the two maps */
  return 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tvm_ffi

    folder = tmp_path_factory.mktemp("host")
    (folder / "kernel.o").write_bytes(build.compile_kernel(VARIANT).object_code)
    (folder / "cuda.c").write_text(CUDA)
    compiler = build.find_c_compiler()
    assert compiler is not None
    # -Bsymbolic: once another test has loaded a kernel, the real CUDA calls have these names in the whole process.
    command = [*compiler, "-w", "-shared", "-fPIC", "-Wl,-Bsymbolic", "-o", "host.so", "kernel.o", "cuda.c"]
    subprocess.run([*command, tvm_ffi.libinfo.find_libtvm_ffi()], cwd=folder, check=True)
    return folder / "host.so"


def test_every_argument_reaches_its_place(library: Path) -> None:
    import tvm_ffi

    from mjolnir.kernels.args import BlockScales, DecodeArgs

    own = dict.fromkeys(
        ("q", "out", "k", "v", "k_scale", "v_scale", "q_mul", "o_mul", "lse", "k_block_scale", "v_block_scale")
        + ("block_table", "seq_lens", "block_table_stride", "seq_rows", "max_len"),
        0,
    )
    own = {name: 4096 * (1 + i) for i, name in enumerate(own)}
    fixed = LaunchArgs(**{name: 100 + i for i, name in enumerate(LaunchArgs._fields)})
    fixed = fixed._replace(log2_page=6, l2_policy=0x12F0000000000000, partials=1 << 45, k_page_stride=1 << 33)
    memory = fixed.to_memory()
    host = ctypes.CDLL(str(library))

    def written(name: str, count: int) -> list[int]:
        return list((ctypes.c_uint64 * count).in_dll(host, name))

    scales = ("base", "token_stride", "head_stride", "page_stride")
    assert BlockScales._fields == scales
    wanted: list[tuple[str, str]] = []  # of the kernel: type and name of each parameter
    for name, hint in get_type_hints(DecodeArgs).items():
        kind = getattr(hint, "__name__", "")
        if hint is BlockScales:
            kinds = get_type_hints(BlockScales)
            wanted += [
                (kinds[part].__name__, f"{name[0]}_block_{'scale' if part == 'base' else part}") for part in scales
            ]
        elif name not in DecodeArgs._field_defaults:
            wanted.append((kind, name))
    ctypes.c_int.in_dll(host, "num_params").value = len(wanted)
    kernel = tvm_ffi.load_module(str(library))[VARIANT.name]
    kernel(*own.values(), memory.buffer_info()[0], 0.125, 0x99)

    rows_of_a_token = {"k_token_rows": 16, "v_token_rows": 16}  # of 16 tokens: fp8 rows are never laid end to end
    values: dict[str, Any] = fixed._asdict() | own | rows_of_a_token
    for (kind, name), found in zip(wanted, written("params", len(wanted)), strict=True):
        if kind == "Int64":
            assert found == values[name], name
        elif kind == "Int32":
            assert found & 0xFFFFFFFF == values[name], name
        else:
            assert (kind, name) == ("Float32", "softmax_scale")
            assert struct.unpack("<f", struct.pack("<I", found & 0xFFFFFFFF)) == (0.125,)
    assert written("launch", 3) == [fixed.grid, 1, 1] and written("launch", 5)[4] == 0x99
    maps = written("maps", 30)
    for side, found in (("k", maps[:15]), ("v", maps[15:])):
        strides = [16 * values[f"{side}_{name}_stride"] for name in ("token", "head", "page")]
        sizes = [128, 64, 1, fixed.num_kv_heads, fixed.num_pages]
        assert found[:6] == [values[side], *sizes]
        assert found[6:10] == [strides[0], 128, *strides[1:]]
        assert found[10:] == [128, 64, 1, 1, 1]
