"""The plan made on the device equals the host's: under Triton's interpreter here, compiled on a GPU."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from running import assert_oracle, launch, make_outputs, make_problem, make_runner

from mjolnir.plan import ARRIVE, PAIRED, PLAN_COLUMNS, PLAN_TILE, WAIT, PlanShape, build_plan

pytest.importorskip("triton", reason="Triton is not installed")

from mjolnir.backends.cute import CuteBackend  # noqa: E402
from mjolnir.kernels import plan_kernel  # noqa: E402
from mjolnir.kernels.choice import geometry_of  # noqa: E402
from mjolnir.kernels.geometry import UNSET  # noqa: E402
from mjolnir.signature import RunnerShape  # noqa: E402
from mjolnir.tuning import Tuning  # noqa: E402

CASES = [
    ([1024], PlanShape(264, 8), 0),
    ([8192], PlanShape(264, 8), 0),
    ([32768], PlanShape(264, 1), 0),
    ([32768], PlanShape(264, 1, pairs=False), 0),
    # Either side of what decides between rows and pairs, see test_plan.py.
    *(([n * PLAN_TILE] * of, PlanShape(264, 8), 0) for n, of in [(16, 2), (17, 2), (32, 2), (33, 2), (32, 8), (32, 9)]),
    ([80 * PLAN_TILE] * 33, PlanShape(264, 8), 0),
    ([64] * 300, PlanShape(264, 1), 0),
    ([1056 * PLAN_TILE], PlanShape(264, 1), 1),
    ([131072], PlanShape(264, 8), 5),
    ([8192] * 16, PlanShape(264, 8), 0),
    ([8192] * 64, PlanShape(264, 8), 0),
    ([1024] * 256, PlanShape(264, 8), 1),
    ([500_000] + [1] * 1023, PlanShape(264, 8), 0),
    # What a piece costs decides where rows end, and whether they end with items.
    *((lens, PlanShape(264, 8, piece_cost=cost), 0) for cost in (4, 6) for lens in ([8192] * 64, [1024] * 256)),
    ([60_000, 128, 9000, 700] * 8, PlanShape(264, 8, piece_cost=6), 0),
    ([0, 0, 0], PlanShape(264, 8), 0),
    ([], PlanShape(264, 8), 0),
    ([64, 65, 0, 129], PlanShape(3, 2), 0),
    ([2**31 - 1] * 3, PlanShape(132, 64), 2**31 - 1),
    ([5, 0], PlanShape(132, 64), 2**64),
    ([3000, 10, 70000, 0, 5], PlanShape(264, 4, 1), 0),
    ([3000, 10, 70000, 0, 5], PlanShape(264, 4, 2), 0),
    ([3000, 10, 70000, 0, 5], PlanShape(17, 4, 5), 3),
    ([70000] * 40, PlanShape(40, 4, 1), 0),
    ([3000, 10, 7000, 0, 5], PlanShape(4, 2, fixed_tiles=4, fixed_rows=100), 0),
    ([3000, 10, 7000, 0, 5], PlanShape(4, 2, fixed_tiles=4, fixed_rows=100), 300),
    ([3000, 10, 7000, 0, 5], PlanShape(4, 2, fixed_tiles=4, fixed_rows=40), 0),  # too few rows
    ([2**31 - 1] * 3, PlanShape(4, 64, fixed_tiles=1, fixed_rows=40), 0),  # by more than int32 counts
    ([], PlanShape(4, 2, fixed_tiles=4, fixed_rows=40), 0),
]


def plan_of(
    lens: list[int], shape: PlanShape, margin: int, device: torch.device | str
) -> tuple[np.ndarray, np.ndarray]:
    """(header and rows, counters) made on the device, over a buffer full of other numbers."""
    from mjolnir.kernels.plan_kernel import build_plan_on_device

    out = torch.full(((1 + shape.num_rows) * PLAN_COLUMNS + 2 * shape.num_rows,), 77, dtype=torch.int32, device=device)
    seq_lens = torch.tensor([*lens, 123456, -1], dtype=torch.int32, device=device)  # rows past num_seqs do not count
    build_plan_on_device(seq_lens, len(lens), margin, shape, out, max(len(lens), 4))
    numbers = out.cpu().numpy()
    rows = (1 + shape.num_rows) * PLAN_COLUMNS
    return numbers[:rows].reshape(-1, PLAN_COLUMNS), numbers[rows:]


def check(lens: list[int], shape: PlanShape, margin: int, device: torch.device | str) -> None:
    made, counters = plan_of(lens, shape, margin, device)
    np.testing.assert_array_equal(made, build_plan(lens, shape, margin), err_msg=f"{lens[:8]} {shape} {margin}")
    assert not counters.any()


def random_cases(count: int, seed: int) -> list[tuple[list[int], PlanShape, int]]:
    rng = np.random.default_rng(seed)
    cases = []
    for _ in range(count):
        scale = int(2 ** rng.uniform(0, 18))
        lens = rng.integers(0, scale + 1, size=int(2 ** rng.uniform(0, 7))).tolist()
        max_splits, pairs = rng.choice([None, None, None, 1, 2, 7]), bool(rng.integers(0, 3))
        shape = PlanShape(
            int(rng.integers(1, 300)), int(rng.integers(1, 9)), max_splits, pairs, piece_cost=int(rng.integers(1, 9))
        )
        if rng.integers(0, 4) == 0:
            tiles, rows = int(rng.integers(1, 40)), int(rng.integers(1, 500))
            shape = PlanShape(shape.num_ctas // 4 + 1, shape.num_kv_heads, fixed_tiles=tiles, fixed_rows=rows)
        elif rng.integers(0, 2):  # a step so short that rows wait for each other
            lens = rng.integers(0, int(2 ** rng.uniform(8, 15)), size=int(rng.integers(1, 7))).tolist()
            shape = PlanShape(264, shape.num_kv_heads, pairs=pairs)
        cases.append((lens, shape, int(rng.integers(0, 3)) * int(rng.integers(0, 200))))
    return cases


def test_the_cases_have_every_way_of_merging():
    modes = [build_plan(*case)[0, 2] for case in CASES + random_cases(60, 0)]
    assert min(modes.count(mode) for mode in (ARRIVE, WAIT, PAIRED)) >= 8


INTERPRETED = """
import mjolnir.kernels.plan_kernel as kernel
import test_plan_kernel as t
t.check([70] * 2100, t.PlanShape(5, 2), 0, "cpu")  # fewer rows a program
kernel.ROWS_PER_PROGRAM = 128  # fewer programs: the interpreter's time goes by their number
kernel.STARTS_PER_PROGRAM = 128 * 2048
for case in t.CASES + t.random_cases(60, 0):
    t.check(*case, "cpu")
"""


def test_equals_the_host_s_plan_under_the_interpreter():
    # In a process of its own: TRITON_INTERPRET decides when Triton is imported.
    env = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), os.getcwd()]),
    }
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    "num_seqs, pairs, max_splits, fixed_tiles",
    [
        (256, True, 0, 0),
        (1024, True, 0, 0),
        (1024, False, 0, 0),
        (1024, True, 1, 0),
        (1024, True, 4, 0),
        (1024, True, 0, 32),
    ],
)
def test_compiles_for_hopper_without_spills(num_seqs: int, pairs: bool, max_splits: int, fixed_tiles: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from mjolnir.compiler.inspect import inspect_cubin
    from mjolnir.kernels import plan_kernel

    names = plan_kernel._build_plan.arg_names
    constants = {
        "NUM_CTAS": 264,
        "NUM_ROWS": PlanShape(264, 8).num_rows,
        "HEADS": 8,
        "PAIRS": pairs,
        "MAX_SPLITS": max_splits,
        "FIXED_TILES": fixed_tiles,
        "COST": 2,
        "BLOCK_SEQS": num_seqs,
        "BLOCK_ROWS": plan_kernel.ROWS_PER_PROGRAM,
    }
    shape = inspect.signature(plan_kernel._build_plan.fn).parameters
    assert {name for name in names if "constexpr" in str(shape[name].annotation)} == constants.keys()
    kinds = {name: "constexpr" if name in constants else "i32" for name in names}
    kinds |= {name: "*i32" for name in ("seq_lens", "plan_rows", "counters")}
    source = ASTSource(fn=plan_kernel._build_plan, signature=kinds, constexprs=constants)
    cubin = compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
    assert not inspect_cubin(cubin, "_build_plan").spills


@pytest.mark.gpu
def test_equals_the_host_s_plan():
    for case in CASES + random_cases(40, 1):
        check(*case, "cuda")


@pytest.mark.gpu
def test_a_captured_plan_follows_the_lengths():
    problem = make_problem([700, 5, 64, 3000], "cuda", page_size=16)
    cache = problem.cache
    runner = make_runner(problem)
    out, lse = make_outputs(problem, runner)
    runner.precompile(torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        plan = runner.plan(None, 4, 1, cache.block_table, cache.seq_lens)
        launch(runner, plan, problem, out, lse)
    for lens in ([700, 5, 64, 3000], [1, 5, 0, 2999], [699, 0, 0, 0], [0, 0, 0, 0], [700, 5, 64, 3000]):
        cache.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        assert_oracle(problem, out, lse)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> CuteBackend:
    """bf16, group 8: q_len 8 takes one CTA per SM, and so a smaller plan than q_len 1."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    backend = CuteBackend(
        arch="sm_90a",
        device=torch.device("cpu"),
        shape=RunnerShape(8, 1, 128, 64, torch.bfloat16, "bf16"),
        max_num_seqs=4,
        tuning=Tuning(sm_count=5),
    )
    assert backend.plan_buffer(1).shape != backend.plan_buffer(8).shape
    return backend


def test_slots_begin_empty(backend: CuteBackend) -> None:
    """Two a row, of 8 and of 64 rows of Q."""
    for q_len, rows in ((1, 8), (8, 64)):
        shape = backend.plan_buffer(q_len).shape
        slots = backend._partials[rows * 128 * 2, shape.num_rows].view(2 * shape.num_rows, rows, 128 * 2)
        assert slots.dtype == torch.int32 and (slots == UNSET).all()


@pytest.mark.parametrize("fixed", [{}, {"fixed_split": 128, "max_step_tokens": 640}], ids=["balanced", "fixed"])
def test_joined_heads_are_planned_as_one(fixed: dict[str, int]) -> None:
    """5 KV heads of group 8 are 3 items of 16 rows a token; of q_len 5 they would have 80 rows, and are not joined.
    Plans and partial results are apart, also where the rows are of one class."""
    backend = CuteBackend(
        arch="sm_90a",
        device=torch.device("cpu"),
        shape=RunnerShape(40, 5, 64, 64, torch.bfloat16, "fp8", kv_layout="NHD", max_num_seqs=26),
        max_num_seqs=4,
        tuning=Tuning(sm_count=5, **fixed),
    )
    for q_len, heads, rows, width in ((1, 3, 16, 128), (4, 3, 64, 128), (5, 5, 64, 64)):
        variant, shape = backend.variant(q_len, "bf16", False), backend.plan_buffer(q_len).shape
        assert (variant.joined, variant.head_size, variant.rows) == ("heads" if heads == 3 else "", 64, rows)
        assert shape.num_kv_heads == heads
        assert shape.fixed_rows == (heads * (4 + 640 // 128) if fixed else 0)
        size = rows * width * 2
        assert backend._partials[size, shape.num_rows].numel() == 2 * shape.num_rows * size


def test_plans_of_more_rows_have_more_partial_results() -> None:
    """8 KV heads of group 8 are 4 items of 16 rows side by side at q_len 1, and 8 items of 16 rows at q_len 2:
    one size of partial results, but twice the rows of fixed splits."""
    backend = CuteBackend(
        arch="sm_90a",
        device=torch.device("cpu"),
        shape=RunnerShape(64, 8, 128, 64, torch.bfloat16, "fp8", kv_layout="NHD", max_num_seqs=64),
        max_num_seqs=64,
        tuning=Tuning(sm_count=5, fixed_split=128, max_step_tokens=6400),
    )
    for q_len, heads in ((1, 4), (2, 8)):
        shape = backend.plan_buffer(q_len).shape
        assert backend.variant(q_len, "bf16", False).rows == 16 and shape.num_rows == heads * (64 + 6400 // 128)
        assert backend._partials[16 * 256, shape.num_rows].numel() == 2 * shape.num_rows * 16 * 256


def test_pairs_are_for_ctas_that_have_halves(backend: CuteBackend) -> None:
    for q_len, halves in ((1, 2), (8, 1)):
        assert geometry_of(backend.variant(q_len, "bf16", False)).halves == halves
        assert backend.plan_buffer(q_len).shape.pairs == (halves == 2)


def test_every_size_of_plan_has_a_planning_kernel(backend: CuteBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(plan_kernel, "build_plan_on_device", lambda *arguments: made.append(arguments[3]))
    backend.compile_planner()
    assert sorted(shape.num_ctas for shape in made) == [5, 10]
    backend.compile_planner()
    assert len(made) == 2
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    backend.plan_on_device(torch.ones(2).int(), 2, 8, 0)


def test_the_next_plan_is_launched_without_the_jit(backend: CuteBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what a launch through the JIT passes, in the kernel's order; constants come along, and Triton drops them."""
    names = plan_kernel._build_plan.arg_names
    jitted, launched = [], []

    class Compiled:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments: launched.append((grid, dict(zip(names, arguments, strict=True))))

    class Jit:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
            def launch(*arguments: object, **constants: object) -> Compiled:
                jitted.append((grid, dict(zip(names, arguments, strict=False)) | constants))
                return Compiled()

            return launch

    monkeypatch.setattr(plan_kernel, "_build_plan", Jit())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    lens = torch.ones(4).int()
    for q_len in (1, 8):
        backend.plan_on_device(torch.ones(2).int(), 2, q_len, 5)
        backend.plan_on_device(lens, 4, q_len, 2**40)
    assert len(jitted) == len(launched) == 2
    for (grid, first), (next_grid, later) in zip(jitted, launched, strict=True):
        addresses = {name: first[name].data_ptr() for name in ("plan_rows", "counters")}
        changed = {"seq_lens": lens.data_ptr(), "num_seqs": 4, "margin": 2**31 - 1}
        assert next_grid == grid and later == first | addresses | changed


def test_without_a_planning_kernel_a_capture_is_refused(backend: CuteBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(plan_kernel, "build_plan_on_device", lambda *arguments: made.append(arguments[3]))
    backend.plan_on_device(torch.ones(2).int(), 2, 1, 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    backend.plan_on_device(torch.ones(2).int(), 2, 1, 0)
    with pytest.raises(RuntimeError, match="planning kernel is not compiled"):
        backend.plan_on_device(torch.ones(2).int(), 2, 8, 0)
    assert len(made) == 2


def test_where_triton_cannot_compile_host_plans_go_on(
    backend: CuteBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(plan_kernel, "build_plan_on_device", fail)
    backend.compile_planner()
    assert "plans cannot be made on cpu, only on the host: Failed to find C compiler" in caplog.text
    with pytest.raises(RuntimeError, match="Failed to find C compiler"):
        backend.plan_on_device(torch.ones(2).int(), 2, 1, 0)


def test_the_reference_backend_takes_no_host_lengths_either():
    problem = make_problem([70, 5], "cpu", page_size=16)
    runner = make_runner(problem)
    out, lse = make_outputs(problem, runner)
    plan = runner.plan(None, 2, 1, problem.cache.block_table, problem.cache.seq_lens)
    launch(runner, plan, problem, out, lse)
    assert_oracle(problem, out, lse)
