"""A warp in NumPy: the PTX instructions that kernels/tile.py and unpack.py are made of, on arrays of 32 lanes.

It runs the kernel's own Python code with registers as arrays, so that layouts, swizzles, bit moves and the order of
elements are checked without a GPU. MMAs are exact (fp64).
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from mjolnir.kernels import ptx, tile, wgmma

Words = npt.NDArray[np.uint32]

LANE = np.arange(32)
G, T = LANE // 4, LANE % 4


def halves(word: Any, dtype: Any) -> npt.NDArray[np.float64]:
    """(32, 2) values of a register of two 16-bit numbers."""
    return np.ascontiguousarray(word, np.uint32).view(dtype).reshape(32, 2).astype(np.float64)


def packed(lo: Any, hi: Any, dtype: Any) -> Words:
    both = np.stack(np.broadcast_arrays(lo, hi), -1).astype(np.float32).astype(dtype)
    return np.ascontiguousarray(np.broadcast_to(both, (32, 2))).view(np.uint32).reshape(32)


class Warp:
    """Shared memory, and the instructions. ``install`` puts them in the place of the kernel's."""

    def __init__(self, smem_bytes: int) -> None:
        self.smem = np.zeros(smem_bytes, np.uint8)
        self.gmem = np.zeros(0, np.uint8)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in dir(self):
            if not name.startswith("_") and hasattr(ptx, name):
                monkeypatch.setattr(ptx, name, getattr(self, name))
        stand_ins = {"Float32": np.float64, "Int32": np.int64, "Int64": np.int64, "cute": _Cute, "cutlass": _Cutlass}
        for name, value in stand_ins.items():
            monkeypatch.setattr(tile, name, value)

    def _read(self, addr: Any, size: int) -> npt.NDArray[np.uint8]:
        addr = np.broadcast_to(addr, 32)
        assert (addr % size == 0).all(), "misaligned"
        return self.smem[addr[:, None] + np.arange(size)]

    def lds_words(self, addr: Any, width: int) -> tuple[Words, ...]:
        return tuple(np.ascontiguousarray(self._read(addr, width)).view(np.uint32).T)

    def lds128(self, addr: Any) -> tuple[Words, ...]:
        return self.lds_words(addr, 16)

    def lds_u8(self, addr: Any) -> Words:
        return self._read(addr, 1)[:, 0].astype(np.uint32)

    def lds_u16(self, addr: Any) -> Words:
        return np.ascontiguousarray(self._read(addr, 2)).view(np.uint16)[:, 0].astype(np.uint32)

    def _read_global(self, addr: Any, dtype: Any, count: int) -> tuple[Any, ...]:
        size = np.dtype(dtype).itemsize * count
        addr = np.broadcast_to(addr, 32)
        assert (addr % size == 0).all(), "misaligned"
        return tuple(np.ascontiguousarray(self.gmem[addr[:, None] + np.arange(size)]).view(dtype).T)

    def ldg128(self, addr: Any) -> tuple[Words, ...]:
        return self._read_global(addr, np.uint32, 4)

    def ldg_f32(self, addr: Any) -> npt.NDArray[np.float64]:
        return self._read_global(addr, np.float32, 1)[0].astype(np.float64)

    def ldg_f32x4(self, addr: Any) -> list[npt.NDArray[np.float64]]:
        return [x.astype(np.float64) for x in self._read_global(addr, np.float32, 4)]

    def lds_b32(self, addr: Any) -> Words:
        return self.lds_words(addr, 4)[0]

    def sts_b32(self, addr: Any, word: Any) -> None:
        data = np.ascontiguousarray(np.broadcast_to(word, 32), np.uint32).view(np.uint8).reshape(32, 4)
        self.smem[np.broadcast_to(addr, 32)[:, None] + np.arange(4)] = data

    def sts128(self, addr: Any, words: Any) -> None:
        data = np.stack([np.broadcast_to(w, 32) for w in words], -1).astype(np.uint32)
        self.smem[np.broadcast_to(addr, 32)[:, None] + np.arange(16)] = np.ascontiguousarray(data).view(np.uint8)

    @staticmethod
    def prmt(a: Any, b: Any, selector: Any) -> Words:
        source = np.stack([np.asarray(x, np.uint32) >> 8 * i & 0xFF for x in (a, b) for i in range(4)], -1)
        index = np.stack([np.broadcast_to(selector, 32) >> 4 * i & 7 for i in range(4)], -1)
        picked = np.take_along_axis(np.broadcast_to(source, (32, 8)), index, 1).astype(np.uint32)
        return (picked << np.arange(0, 32, 8, dtype=np.uint32)).sum(-1, dtype=np.uint32)

    @staticmethod
    def funnel_right(low: Any, high: Any, bits: int) -> Words:
        both = np.asarray(high, np.uint64) << np.uint64(32) | np.asarray(low, np.uint64)
        return (both >> np.uint64(bits)).astype(np.uint32)

    @staticmethod
    def and_b32(a: Any, mask: int) -> Words:
        return np.asarray(a, np.uint32) & np.uint32(mask)

    @staticmethod
    def and_or(a: Any, mask: int, b: Any) -> Words:
        return np.asarray(a, np.uint32) & np.uint32(mask) | np.asarray(b, np.uint32)

    @staticmethod
    def shift_right(a: Any, bits: int) -> Words:
        return np.asarray(a, np.uint32) >> np.uint32(bits)

    @staticmethod
    def mul(a: Any, factor: int) -> Words:
        return (np.asarray(a, np.uint64) * np.uint64(factor)).astype(np.uint32)

    @staticmethod
    def mad(a: Any, factor: int, b: Any) -> Words:
        return (np.asarray(a, np.uint64) * np.uint64(factor) + np.asarray(b, np.uint64)).astype(np.uint32)

    @staticmethod
    def mul_f16x2(a: Any, b: Any) -> Words:
        product = halves(a, np.float16) * halves(b, np.float16)
        assert (product == product.astype(np.float16)).all(), "an inexact product"
        return packed(product[:, 0], product[:, 1], np.float16)

    @staticmethod
    def _bytes(word: Any, dtype: Any) -> npt.NDArray[np.float64]:
        return np.ascontiguousarray(np.broadcast_to(word, 32), np.uint32).view(dtype).reshape(32, 4).astype(np.float64)

    def e4m3x2_to_f16x2(self, word: Any) -> Words:
        return self.e4m3x4_to_f16x2x2(word)[0]

    def e4m3x4_to_f16x2x2(self, word: Any, dtype: Any = ml_dtypes.float8_e4m3fn) -> tuple[Words, Words]:
        x = self._bytes(word, dtype)
        return packed(x[:, 0], x[:, 1], np.float16), packed(x[:, 2], x[:, 3], np.float16)

    def e5m2x4_to_f16x2x2(self, word: Any) -> tuple[Words, Words]:
        return self.e4m3x4_to_f16x2x2(word, ml_dtypes.float8_e5m2)

    @staticmethod
    def pack_f16x2(lo: Any, hi: Any) -> Words:
        return packed(lo, hi, np.float16)

    @staticmethod
    def pack_bf16x2(lo: Any, hi: Any) -> Words:
        return packed(lo, hi, ml_dtypes.bfloat16)

    @staticmethod
    def unpack_bf16x2(word: Any) -> tuple[Any, Any]:
        x = halves(word, ml_dtypes.bfloat16)
        return x[:, 0], x[:, 1]

    @staticmethod
    def float_as_int(x: Any) -> Any:
        return np.broadcast_to(x, 32).astype(np.float32).view(np.int32).astype(np.int64)

    @staticmethod
    def int_as_float(x: Any) -> Any:
        return np.broadcast_to(x, 32).astype(np.int32).view(np.float32).astype(np.float64)

    @staticmethod
    def movmatrix(a: Any) -> Words:
        matrix = np.ascontiguousarray(a, np.uint32).view(np.uint16).reshape(8, 8)
        return np.ascontiguousarray(matrix.T).view(np.uint32).reshape(32)

    @staticmethod
    def mma_m16n8k16(a: Any, b: Any, c: Any, dtype: str) -> list[Any]:
        """Fragments as in the PTX ISA: A 16 x 16 (row g, then g + 8; columns 2 t, then 2 t + 8), B 16 x 8, C 16 x 8."""
        kind = np.float16 if dtype == "f16" else ml_dtypes.bfloat16
        lhs, rhs, out = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
        for i, word in enumerate(a):
            for e in range(2):
                lhs[G + 8 * (i % 2), 2 * T + 8 * (i // 2) + e] = halves(word, kind)[:, e]
        for i, word in enumerate(b):
            for e in range(2):
                rhs[2 * T + 8 * i + e, G] = halves(word, kind)[:, e]
        for i, values in enumerate(c):
            out[G + 8 * (i // 2), 2 * T + i % 2] = values
        out += lhs @ rhs
        return [out[G + 8 * (i // 2), 2 * T + i % 2] for i in range(4)]


class Wgmma:
    """One warp's part of wgmma. ``install`` puts it in the place of kernels/wgmma.py."""

    def __init__(self, warp: Warp) -> None:
        self.warp = warp

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("mma", "store_transposed", "descriptor"):
            monkeypatch.setattr(wgmma, name, getattr(self, name))

    @staticmethod
    def descriptor(addr: int) -> int:
        assert addr % 1024 == 0
        return addr >> 4

    def mma(self, a: Any, b: int, c: Any, accumulate: bool = True) -> list[Any]:
        """A 16 x 16 as in mma.m16n8k16; B's row r, a column of the product, in bytes swizzled by 128."""
        columns = 2 * len(c)
        at = (b << 4) + 128 * np.arange(columns)[:, None] + np.arange(32)
        rhs = self.warp.smem[at ^ (at >> 7 & 7) << 4].view(np.float16).astype(np.float64).T
        lhs, out = np.zeros((16, 16)), np.zeros((16, columns))
        for i, word in enumerate(a):
            for e in range(2):
                lhs[G + 8 * (i % 2), 2 * T + 8 * (i // 2) + e] = halves(word, np.float16)[:, e]
        for i, values in enumerate(c):
            out[G + 8 * (i % 4 // 2), i // 4 * 8 + 2 * T + i % 2] = values
        out = lhs @ rhs + out * accumulate
        return [out[G + 8 * (i % 4 // 2), i // 4 * 8 + 2 * T + i % 2] for i in range(len(c))]

    def store_transposed(self, addr: Any, words: Any) -> None:
        for i, word in enumerate(words):
            matrix = np.ascontiguousarray(word, np.uint32).view(np.uint16).reshape(8, 8)
            rows = np.ascontiguousarray(matrix.T).view(np.uint8).reshape(8, 16)
            self.warp.smem[addr[8 * i : 8 * i + 8, None] + np.arange(16)] = rows


class _Arch:
    fmax = staticmethod(np.maximum)

    @staticmethod
    def sync_warp() -> None:
        pass

    @staticmethod
    def shuffle_sync(x: Any, lane: Any) -> Any:
        return np.broadcast_to(x, 32)[lane]

    @staticmethod
    def shuffle_sync_bfly(x: Any, offset: int) -> Any:
        return np.broadcast_to(x, 32)[LANE ^ offset]


class _Math:
    absf = staticmethod(np.abs)


class _Cute:
    arch, math = _Arch, _Math

    @staticmethod
    def make_rmem_tensor(shape: tuple[int], dtype: Any) -> list[Any]:
        return [None] * shape[0]


class _Cutlass:
    Boolean = bool
    max, min = staticmethod(np.maximum), staticmethod(np.minimum)
    range_constexpr = range

    @staticmethod
    def const_expr(x: Any) -> Any:
        return x


class _Selects(ast.NodeTransformer):
    """Conditional expressions, of a value per lane."""

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        self.generic_visit(node)
        return ast.Call(ast.Name("_select", ast.Load()), [node.test, node.body, node.orelse], [])


def jit_method(owner: type, name: str) -> Any:
    """A method that the DSL would trace, as plain Python on arrays of lanes; ``if`` still wants one truth for all."""
    source = ast.parse(textwrap.dedent(inspect.getsource(getattr(owner, name))))
    assert isinstance(source.body[0], ast.FunctionDef)
    source.body[0].decorator_list = []
    module = sys.modules[owner.__module__]
    stand_ins = {
        "Float32": np.float64, "Int32": np.int64, "Int64": np.int64, "cute": _Cute, "cutlass": _Cutlass,
        "_select": lambda test, x, y: np.where(test, x, y) if np.ndim(test) else (x if test else y),
    }  # fmt: skip
    namespace = {**vars(module), **stand_ins}
    exec(compile(ast.fix_missing_locations(_Selects().visit(source)), module.__file__ or "", "exec"), namespace)
    return namespace[name]
