"""q_mode="fp8": the definition, the runner over it, and the Triton kernel under the interpreter."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from running import ROW_TOLERANCE, assert_oracle, launch, make_outputs, make_problem, make_runner
from test_write import compiled, interpret

from mjolnir.formats import get_format
from mjolnir.query_fp8 import quantise_query


def test_the_kernel_gives_pytorch_s_values_under_the_interpreter() -> None:
    interpret("import query_cases as q\nq.check_query('cpu')")


def test_the_benchmark_s_check_under_the_interpreter() -> None:
    """With the division of PyTorch's CUDA kernels around the definition; and what is wrong is counted."""
    interpret(
        "from mjolnir.bench import writes\n"
        "from test_cuda_arithmetic import CudaDivision\n"
        "calls = writes.queries(2, torch.device('cpu'))\n"
        "out = calls.call(0)\n"
        "with CudaDivision(): calls.check()\n"
        "out[0, 0, :3] += 1000\n"
        "try: calls.check()\n"
        "except ArithmeticError as error: assert str(error).startswith('3 of 8192 values of')\n"
        "else: raise SystemExit(1)"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_e4m3_of_each_sequence_and_head(dtype: torch.dtype) -> None:
    """Against NumPy and ml_dtypes, one sequence and KV head at a time."""
    query = torch.randn(2 * 3, 4, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    q_mul = torch.rand(4, 64) + 0.5
    values, descale = quantise_query(query, q_mul, 2, 3, 2)
    assert values.dtype == dtype and descale.shape == (2, 2)
    for seq in range(2):
        for head in range(2):
            own = (query.float() * q_mul)[3 * seq : 3 * seq + 3, 2 * head : 2 * head + 2].numpy()
            scale = np.float32(np.abs(own).max() / np.float32(448))
            assert descale[seq, head] == scale
            want = (own / scale).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            got = values[3 * seq : 3 * seq + 3, 2 * head : 2 * head + 2].float().numpy()
            np.testing.assert_array_equal(got, want)


def test_nan_inf_and_zeros() -> None:
    query = torch.ones(3, 2, 64).bfloat16()
    query[0, 0, 0], query[0, 1, :2] = torch.nan, torch.tensor([torch.inf, -torch.inf])
    query[1] = 0
    values, descale = quantise_query(query, None, 3, 1, 1)
    assert descale[:, 0].tolist() == [np.float32(1) / np.float32(448), 0, np.float32(1) / np.float32(448)]
    assert values[0, 0, 0].isnan() and values[0, 0, 1:].eq(448).all()
    assert values[0, 1, :3].tolist() == [448, -448, 448]
    assert values[1].eq(0).all() and values[2].eq(448).all()


@pytest.mark.parametrize("scales", [("one", "head"), ("head", "one"), ("sequence", "expanded")])
@pytest.mark.parametrize("with_q_mul", [False, True])
@pytest.mark.parametrize("q_form", ["dense", "packed_flat", "odd"])
def test_a_run_is_attention_with_the_quantised_query(scales, with_q_mul, q_form) -> None:
    """The oracle over q' = values · descale, in fp64, with K's own descale and no q_mul."""
    problem = make_problem([70, 0, 5, 1000], q_len=2, scales=scales, q_form=q_form, kv_heads=2, heads=8)
    problem.q_mul = torch.rand(8, 128) + 0.5 if with_q_mul else None
    runner = make_runner(problem, q_mode="fp8")
    out, lse = make_outputs(problem, runner)
    cache = problem.cache
    plan = runner.plan(None, 4, 2, cache.block_table, cache.seq_lens)
    launch(runner, plan, problem, out, lse)
    rows = problem.query.reshape(-1, 8, 128)
    values, descale = quantise_query(rows, problem.q_mul, 4, 2, 2)
    factor = descale.repeat_interleave(4, 1).repeat_interleave(2, 0)[..., None]
    problem.query, problem.q_mul = values.double() * factor, None
    assert_oracle(problem, out, lse, ROW_TOLERANCE)


def test_it_differs_from_a_bf16_query_by_e4m3_s_rounding() -> None:
    problem = make_problem([300, 80])
    outs = []
    for q_mode in ("bf16", "fp8"):
        runner = make_runner(problem, q_mode=q_mode)
        out, lse = make_outputs(problem, runner)
        plan = runner.plan(None, 2, 1, problem.cache.block_table, problem.cache.seq_lens)
        launch(runner, plan, problem, out, lse)
        outs.append(out.float())
    error = ((outs[0] - outs[1]).norm() / outs[0].norm()).item()
    assert 1e-3 < error < 6e-2


@pytest.mark.parametrize("k_scale", [3e38, -3e38])
def test_descales_whose_product_is_beyond_fp32_count_as_its_largest_number(k_scale: float) -> None:
    """Where an infinite one made NaN of every product of 0. One score of a head is far above the others: it wins."""
    problem = make_problem([70, 5], kv_heads=2, heads=8)
    problem.query.zero_()
    problem.query[..., 0] = 1e6
    keys = torch.zeros(75, 2, 128)
    keys[torch.tensor([33, 72]), :, 0] = 1 if k_scale > 0 else -1
    values = torch.arange(75.0)[:, None, None] / 8
    problem.cache.set_k(keys)
    problem.cache.set_v(values)
    problem.k_scale, problem.softmax_scale = torch.tensor([k_scale]), 2.0**-10
    runner = make_runner(problem, q_mode="fp8")
    out, lse = make_outputs(problem, runner)
    plan = runner.plan(None, 2, 1, problem.cache.block_table, problem.cache.seq_lens)
    launch(runner, plan, problem, out, lse)
    stored = get_format("fp8").decode(get_format("fp8").encode(values, torch.ones(1))).half()
    assert torch.equal(out, stored[[33, 72]].expand(2, 8, 128))
    assert lse.eq(448 * problem.softmax_scale * torch.finfo(torch.float32).max).all()


def test_refusals_name_the_argument_that_was_given() -> None:
    problem = make_problem([70, 5], scales=("sequence", "one"))
    runner = make_runner(problem, q_mode="fp8")
    out, lse = make_outputs(problem, runner)
    plan = runner.plan(None, 2, 1, problem.cache.block_table, problem.cache.seq_lens)
    problem.k_scale = problem.k_scale[:1].expand(1, 2)
    with pytest.raises(ValueError, match="k_scale must have at least num_seqs = 2 rows, got 1"):
        launch(runner, plan, problem, out, lse)
    problem.k_scale, problem.query = torch.ones(1), problem.query.float()
    with pytest.raises(TypeError, match="query must have dtype"):
        launch(runner, plan, problem, out, lse)
    problem.query = problem.query[:1].bfloat16()
    with pytest.raises(ValueError, match="query must have at least num_seqs \\* q_len = 2 rows, got 1"):
        launch(runner, plan, problem, out, lse)


@pytest.mark.parametrize(("rows", "d"), [(4, 128), (64, 128), (64, 256)])
def test_compiles_for_hopper_without_spills(rows: int, d: int) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from mjolnir.kernels.query_kernel import quantise_query_kernel

    pointers = {"query": "*bf16", "out": "*bf16"} | {n: "*fp32" for n in ("q_mul", "k_scale", "out_scale")}
    constants = {
        "Q_LEN": 1, "GROUP": rows, "KV_HEADS": 8, "D": d, "ROWS": rows, "HAS_Q_MUL": True, "NATIVE": True,
    }  # fmt: skip
    assert not compiled(quantise_query_kernel, pointers, constants, max(1, min(8, rows * d // 512))).spills
