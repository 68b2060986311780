"""The end of pieces that are whole items, in any interleaving of warps: the text of kernels/epilogue.py on the host."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mjolnir.compiler.build import dsl_missing_reason

if dsl_missing_reason():
    pytest.skip(dsl_missing_reason() or "", allow_module_level=True)

from test_split import kernel_text

from mjolnir.kernels import epilogue

WARPS, ROWS = 4, 3


class Half:
    """What the warps share: an exchange buffer with a place for each, a counter, a barrier."""

    def __init__(self) -> None:
        self.exchange: list[int | None] = [None] * WARPS  # the piece whose result is there
        self.come = 0
        self.phase = 0  # of the barrier, whose phases one arrival completes
        self.written: list[tuple[int, int]] = []  # piece, row


class Warp:
    """Stands for an ``Epilogue``; its only lane has a whole row."""

    geo = SimpleNamespace(own_q=True, consumer_warps=WARPS, head_size=4)
    live_rows, lane, mult, counter, exchange_free = ROWS, 0, 0, 0, 0

    def __init__(self, half: Half, number: int, piece: int) -> None:
        self.half, self.number, self.piece = half, number, piece

    element = 0

    def column(self, element: int) -> int:
        return element

    def row_at(self, i: int) -> int:
        return i

    def add_warps(self, state: Any, row: int, mult: float) -> Iterator[None]:
        yield
        assert self.half.exchange == [self.piece] * WARPS, "a warp's result is not there yet, or no more"

    def spot(self, row: int, column: int) -> int:
        return row

    def finish_row(self, row: int, state: Any, mult: float) -> None:
        self.half.written.append((self.piece, row))


def text_of(half: Half) -> Any:
    def count(_: int, last: int) -> Iterator[None]:
        yield
        old, half.come = half.come, 0 if half.come == last else half.come + 1
        return old

    def arrive(_: int) -> None:
        half.phase += 1

    return kernel_text(
        epilogue, "write", "finish_rows", WARP=1,
        empty_sum=list,
        ptx=SimpleNamespace(atomic_inc_shared=count, mbarrier_arrive=arrive, lds_f32=lambda _: 1.0),
        cute=SimpleNamespace(arch=SimpleNamespace(sync_warp=lambda: None, shuffle_sync=lambda value, _: value)),
    )  # fmt: skip


def warp_steps(half: Half, text: Any, number: int, pieces: int) -> Iterator[None]:
    """A warp's way through pieces, as ``Consumer.run`` goes it."""
    for piece in range(pieces):
        yield  # its tiles
        while half.phase % 2 == (piece & 1) ^ 1:  # until the phase of parity (written & 1) ^ 1 has completed
            yield
        assert half.exchange[number] != piece
        half.exchange[number] = piece  # share
        yield
        warp = Warp(half, number, piece)
        warp.finish_rows = lambda first, step, warp=warp: text.finish_rows(warp, first, step)  # type: ignore[attr-defined]
        yield from text.write(warp)


@given(st.integers(1, 7), st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None)
def test_each_piece_is_written_once_by_whoever_comes_last(pieces: int, seed: int) -> None:
    half, rng = Half(), random.Random(seed)
    text = text_of(half)
    running = [warp_steps(half, text, number, pieces) for number in range(WARPS)]
    weights = [rng.choice((1, 1, 20)) for _ in running]  # some warps are much slower
    for _ in range(100_000):
        if not running:
            break
        i = rng.choices(range(len(running)), weights[: len(running)])[0]
        if next(running[i], "done") == "done":
            running.pop(i)
    assert not running, "waits for ever"
    assert half.written == [(piece, row) for piece in range(pieces) for row in range(ROWS)]
    assert half.come == 0
