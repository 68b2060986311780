"""What a runner refuses: each message names the argument, its value and what was expected."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from mjolnir import DecodeRunner
from mjolnir.tuning import Tuning

SEQS, HEADS, KV_HEADS, D, PAGE, Q_LEN = 3, 8, 2, 64, 16, 2
TOKENS = SEQS * Q_LEN
RUNNER: dict[str, Any] = {
    "num_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "head_size": D,
    "page_size": PAGE,
    "out_dtype": torch.bfloat16,
    "max_num_seqs": 4,
    "max_q_len": Q_LEN,
    "device": "cpu",
}


@pytest.fixture
def runner() -> DecodeRunner:
    return DecodeRunner(**RUNNER)


def plan_arguments() -> dict[str, Any]:
    return {
        "seq_lens_host": [20, 0, 7],
        "num_seqs": SEQS,
        "q_len": Q_LEN,
        "block_table": torch.arange(6, dtype=torch.int32).view(SEQS, 2),
        "seq_lens": torch.tensor([20, 0, 7], dtype=torch.int32),
    }


def run_arguments(runner: DecodeRunner) -> dict[str, Any]:
    cache = torch.zeros(2, 6, PAGE, KV_HEADS, D, dtype=torch.float8_e4m3fn)
    return {
        "plan": runner.plan(**plan_arguments()),
        "query": torch.zeros(TOKENS, HEADS, D, dtype=torch.bfloat16),
        "out": torch.zeros(TOKENS, HEADS, D, dtype=torch.bfloat16),
        "k_cache": cache[0],
        "v_cache": cache[1],
        "k_scale": torch.ones(1),
        "v_scale": torch.ones(1),
        "softmax_scale": 0.125,
        "q_mul": torch.ones(HEADS, D),
        "o_mul": torch.ones(HEADS, D),
        "lse": torch.zeros(TOKENS, HEADS),
    }


def test_the_arguments_below_are_fine_unless_changed(runner: DecodeRunner) -> None:
    runner.run(**run_arguments(runner))


NO_DEVICES = ("bogus", None, 1.5, "meta", "mps", -1)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_heads": 0}, ValueError, "num_heads must be at least 1, got 0"),
        ({"num_heads": 2.0}, TypeError, "num_heads must be an integer, got 2.0"),
        ({"num_heads": True}, TypeError, "num_heads must be an integer, got True"),
        ({"num_kv_heads": -1}, ValueError, "num_kv_heads must be at least 1, got -1"),
        ({"num_kv_heads": 3}, ValueError, r"num_heads must be a multiple of num_kv_heads \(3\), got 8"),
        ({"head_size": 96}, ValueError, "head_size must be one of 64, 128, 256, got 96"),
        ({"page_size": 48}, ValueError, "page_size must be one of 16, 32, 64, 128, 256, got 48"),
        ({"out_dtype": torch.float32}, ValueError, "out_dtype must be one of .*bfloat16.*float16.*, got torch.float32"),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs must be at least 1, got 0"),
        ({"max_q_len": 0}, ValueError, "max_q_len must be at least 1, got 0"),
        ({"max_q_len": 17}, ValueError, r"max_q_len \* \(num_heads / num_kv_heads\) must be at most 64, got 17 \* 4"),
        ({"q_mode": "int8"}, ValueError, "q_mode must be one of 'bf16', 'fp8', got 'int8'"),
        (
            {"kv_format": "fp7"},
            ValueError,
            "kv_format must be one of fp8, fp8_e5m2, e2m3, nvfp4, bf16, fp16, got 'fp7'",
        ),
        ({"v_format": "fp7"}, ValueError, "v_format must be one of fp8, fp8_e5m2, e2m3, nvfp4, bf16, fp16, got 'fp7'"),
        ({"kv_format": ["fp8"]}, ValueError, r"kv_format must be one of .*, got \['fp8'\]"),
        ({"v_format": ""}, ValueError, "v_format must be one of .*, got ''"),
        (
            {"head_size": np.array([64, 128])},
            ValueError,
            r"head_size must be one of 64, 128, 256, got array\(\[ 64, 128",
        ),
        (
            {"kv_layout": torch.zeros(2)},
            ValueError,
            r"kv_layout must be one of None, 'NHD', 'HND', got tensor\(\[0., 0",
        ),
        *(({"device": d}, ValueError, rf'device must be a CUDA device or "cpu", got {d!r}') for d in NO_DEVICES),
        ({"kv_layout": "BHND"}, ValueError, "kv_layout must be one of None, 'NHD', 'HND', got 'BHND'"),
        ({"ctas_per_sm": 0}, ValueError, "ctas_per_sm must be at least 1, got 0"),
        ({"max_splits": 0}, ValueError, "max_splits must be at least 1, got 0"),
        ({"kv_stages": 0}, ValueError, "kv_stages must be at least 1, got 0"),
        ({"sm_count": -1}, ValueError, "sm_count must be at least 1, got -1"),
        ({"l2_prefetch": -1}, ValueError, "l2_prefetch must be at least 0, got -1"),
        ({"l2_prefetch": 1025}, ValueError, "l2_prefetch must be at most 1024, got 1025"),
        ({"fixed_split": 0, "max_step_tokens": 1}, ValueError, "fixed_split must be at least 1, got 0"),
        ({"fixed_split": 96, "max_step_tokens": 1}, ValueError, "fixed_split must be a multiple of 64 tokens, got 96"),
        ({"fixed_split": 64}, ValueError, "fixed_split and max_step_tokens must be given together, got 64 and None"),
        ({"max_step_tokens": 64}, ValueError, "fixed_split and max_step_tokens must be .* together, got None and 64"),
        (
            {"fixed_split": 64, "max_step_tokens": 64, "max_splits": 2},
            ValueError,
            "fixed_split and max_splits exclude each other, got max_splits = 2",
        ),
        ({"l2_prefetch": 1.5}, TypeError, "l2_prefetch must be an integer, got 1.5"),
    ],
)
def test_runner_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DecodeRunner(**{**RUNNER, **changes})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_runner_refuses_cuda_without_a_device() -> None:
    with pytest.raises(ValueError, match="device='cuda', but PyTorch sees no CUDA device"):
        DecodeRunner(**{**RUNNER, "device": "cuda"})


def test_runner_refuses_a_device_past_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="device='cuda:2', but PyTorch sees 2 CUDA devices"):
        DecodeRunner(**{**RUNNER, "device": "cuda:2"})


def test_the_cpu_has_one_name() -> None:
    runner = DecodeRunner(**{**RUNNER, "device": "cpu:0"})
    assert runner.device == torch.device("cpu")
    runner.run(**run_arguments(runner))


META = torch.device("meta")
SPARSE = torch.zeros(3, 2).to_sparse()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_seqs": -1}, ValueError, "num_seqs must be at least 0, got -1"),
        ({"num_seqs": 5}, ValueError, "num_seqs must be at most max_num_seqs = 4, got 5"),
        ({"num_seqs": 4}, ValueError, "block_table must have at least num_seqs = 4 rows, got 3"),
        ({"q_len": 0}, ValueError, "q_len must be at least 1, got 0"),
        ({"q_len": 3}, ValueError, "q_len must be at most max_q_len = 2, got 3"),
        ({"margin": -1}, ValueError, "margin must be at least 0, got -1"),
        ({"margin": 0.5}, TypeError, "margin must be an integer, got 0.5"),
        ({"block_table": [[0]]}, TypeError, "block_table must be a torch.Tensor, got list"),
        ({"block_table": torch.zeros(3, 2)}, TypeError, "block_table must have dtype torch.int32, got torch.float32"),
        (
            {"block_table": torch.zeros(3, 2).long()},
            TypeError,
            "block_table must have dtype torch.int32, got torch.int",
        ),
        ({"block_table": torch.zeros(6).int()}, ValueError, r"block_table must have 2 dimensions, got shape \(6,\)"),
        ({"block_table": torch.zeros(2, 3).int().T}, ValueError, "block_table must have stride 1 in its last dim"),
        (
            {"block_table": torch.zeros(3, 0).int()},
            ValueError,
            r"block_table .* at least one column, .*\(3, 0\)",
        ),
        ({"block_table": torch.zeros(3, 2, device=META).int()}, ValueError, "block_table must be on cpu, got meta"),
        ({"seq_lens": [1, 2, 3]}, TypeError, "seq_lens must be a torch.Tensor, got list"),
        ({"seq_lens": torch.zeros(3).long()}, TypeError, "seq_lens must have dtype torch.int32, got torch.int64"),
        ({"seq_lens": torch.zeros(3, 1).int()}, ValueError, r"seq_lens must have 1 dimensions, got shape \(3, 1\)"),
        ({"seq_lens": torch.zeros(6).int()[::2]}, ValueError, r"seq_lens must have stride 1 .* got strides \(2,\)"),
        ({"seq_lens": torch.zeros(2).int()}, ValueError, "seq_lens must have at least num_seqs = 3 rows, got 2"),
        ({"seq_lens": torch.zeros(3, device=META).int()}, ValueError, "seq_lens must be on cpu, got meta"),
        ({"seq_lens_host": [1, 2]}, ValueError, "seq_lens_host must have at least num_seqs = 3 rows, got 2"),
        ({"seq_lens_host": [1, -2, 3]}, ValueError, "seq_lens_host must be from 0 to 2147483647, got -2"),
        ({"seq_lens_host": [1, 2, 2**31]}, ValueError, "seq_lens_host must be from 0 to 2147483647, got 2147483648"),
        (
            {"seq_lens_host": np.array([1, 2**64 - 5, 3], np.uint64)},
            ValueError,
            "seq_lens_host must be from 0 to 2147483647, got 18446744073709551611",
        ),
        ({"seq_lens_host": SPARSE}, TypeError, "seq_lens_host must be a sequence of ints, got tensor"),
        ({"block_table": SPARSE}, TypeError, "block_table must be a dense tensor, got one of layout torch.sparse_coo"),
        ({"causal": "yes"}, ValueError, "causal must be one of True, False, got 'yes'"),
        ({"causal": np.zeros(2, bool)}, ValueError, "causal must be one of True, False, got array"),
        ({"seq_lens_host": [1.5, 2, 3]}, TypeError, "seq_lens_host must be a sequence of ints, got .* float64"),
        ({"seq_lens_host": [[1, 2], [3]]}, TypeError, r"sequence of ints, got \[\[1, 2\], \[3\]\]"),
        ({"seq_lens_host": np.zeros((3, 1), int)}, TypeError, "seq_lens_host must be a sequence of ints, got 2 dim"),
        ({"seq_lens_host": torch.zeros(3, device=META)}, ValueError, "seq_lens_host must be on the host, .* on meta"),
    ],
)
def test_plan_refuses(runner: DecodeRunner, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        runner.plan(**{**plan_arguments(), **changes})


def at_byte(offset: int, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A tensor whose first element lies ``offset`` bytes past a multiple of 64."""
    numel = torch.Size(shape).numel()
    buffer = torch.zeros(numel * dtype.itemsize + 128, dtype=torch.uint8)
    start = -buffer.data_ptr() % 64 + offset
    return buffer[start : start + numel * dtype.itemsize].view(dtype).view(shape)


CACHE = (6, PAGE, KV_HEADS, D)
WIDE = torch.zeros(6, PAGE, KV_HEADS, D + 8, dtype=torch.uint8)[..., :D]
ROWS = (TOKENS, HEADS, D)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("query", torch.zeros(ROWS), TypeError, "query must have dtype torch.bfloat16 or torch.float16, got torch.fl"),
        ("query", torch.zeros(TOKENS, D, HEADS).half(), ValueError, r"query must have shape \(tokens, 8, 64\) or"),
        ("query", torch.zeros(TOKENS, 511).half(), ValueError, r"query .* \(tokens, 512\), got \(6, 511\)"),
        (
            "query",
            torch.zeros(5, HEADS, D).half(),
            ValueError,
            r"query .* num_seqs \* q_len = 6 rows, got 5",
        ),
        ("query", torch.zeros(ROWS, device=META).half(), ValueError, "query must be on cpu, got meta"),
        ("query", torch.zeros(ROWS).to_sparse(), TypeError, "query must be a dense tensor, got one of layout torch.sp"),
        ("query", None, TypeError, "query must be a torch.Tensor, got NoneType"),
        ("out", torch.zeros(ROWS).half(), TypeError, "out must have dtype torch.bfloat16, got torch.float16"),
        ("out", torch.zeros(TOKENS, HEADS, 65).bfloat16(), ValueError, r"out must have shape .* got \(6, 8, 65\)"),
        ("out", torch.zeros(4, HEADS * D).bfloat16(), ValueError, r"out must have at least .* = 6 rows, got 4"),
        (
            "out",
            torch.zeros(1, HEADS, D).bfloat16().expand(ROWS),
            ValueError,
            r"out is written .* strides \(0, 64, 1\)",
        ),
        ("out", torch.zeros(TOKENS, 1, D).bfloat16().expand(ROWS), ValueError, "out is written .* no stride of 0, got"),
        (
            "out",
            torch.zeros(TOKENS, 1).bfloat16().expand(-1, HEADS * D),
            ValueError,
            "out is written .* no stride of 0",
        ),
        ("lse", torch.zeros(HEADS).expand(TOKENS, HEADS), ValueError, r"lse is written .* \(0, 1\) of shape \(6, 8\)"),
        (
            "k_cache",
            torch.zeros(CACHE).half(),
            TypeError,
            "k_cache must have dtype .*e4m3fn or torch.uint8, got",
        ),
        ("v_cache", torch.zeros(6, 32, 2, D).byte(), ValueError, r"v_cache must have shape \(any, 16, 2, 64\), got"),
        ("k_cache", torch.zeros(6, PAGE, 1, D).byte(), ValueError, r"k_cache must have shape \(any, 16, 2, 64\), got"),
        ("k_cache", torch.zeros(6, PAGE, 2 * D).byte(), ValueError, r"k_cache must have shape .* got \(6, 16, 128\)"),
        ("k_cache", torch.zeros(0, PAGE, 2, D).byte(), ValueError, "k_cache must have at least one page"),
        ("v_cache", torch.zeros(5, PAGE, 2, D).byte(), ValueError, r"v_cache .* many pages as k_cache \(6\), got 5"),
        ("k_cache", torch.zeros(6, PAGE, D, 2).byte().mT, ValueError, "k_cache must have stride 1 in its last"),
        ("k_cache", at_byte(8, CACHE), ValueError, "k_cache must start at a multiple of 16 bytes, got 0x[0-9a-f]*8$"),
        ("v_cache", at_byte(1, CACHE), ValueError, "v_cache must start at a multiple of 16 bytes, got 0x[0-9a-f]*1$"),
        ("v_cache", WIDE, ValueError, "v_cache: the head stride must be a positive multiple of 16 bytes .* got 72"),
        ("k_cache", torch.zeros(CACHE).byte()[:1].expand(CACHE), ValueError, "k_cache: the page stride .* got 0"),
        ("k_scale", 1.0, TypeError, "k_scale must be a torch.Tensor, got float"),
        ("k_scale", torch.ones(1).half(), TypeError, "k_scale must have dtype torch.float32, got torch.float16"),
        ("v_scale", torch.ones(3), ValueError, r"shape \(2,\) or shape \(num_seqs or more, 2\), got .*\(3,\)"),
        ("v_scale", torch.ones(2, 2), ValueError, "v_scale must have at least num_seqs = 3 rows, got 2"),
        ("v_scale", torch.ones(1, device=META), ValueError, "v_scale must be on cpu, got meta"),
        ("softmax_scale", float("nan"), ValueError, "softmax_scale must be a finite fp32 number, got nan"),
        ("softmax_scale", float("inf"), ValueError, "softmax_scale must be a finite fp32 number, got inf"),
        ("softmax_scale", torch.ones(1), TypeError, "softmax_scale must be a float, got tensor"),
        ("plan", None, TypeError, "plan must be a StepPlan, got NoneType"),
        ("softmax_scale", None, TypeError, "softmax_scale must be a float, got None"),
        ("q_mul", torch.ones(HEADS), ValueError, r"q_mul must have shape \(8, 64\), got \(8,\)"),
        ("q_mul", torch.ones(HEADS, D).half(), TypeError, "q_mul must have dtype torch.float32, got torch.float16"),
        ("o_mul", torch.ones(D, HEADS).T, ValueError, "o_mul must be contiguous and aligned to 16 bytes, got strides"),
        ("o_mul", at_byte(4, (HEADS, D), torch.float32), ValueError, "o_mul must be contiguous and aligned to 16"),
        ("lse", torch.zeros(TOKENS, HEADS).half(), TypeError, "lse must have dtype torch.float32, got torch.float16"),
        ("lse", torch.zeros(TOKENS, KV_HEADS), ValueError, r"lse must have shape \(any, 8\), got \(6, 2\)"),
        ("lse", torch.zeros(5, HEADS), ValueError, r"lse must have at least num_seqs \* q_len = 6 rows, got 5"),
        ("lse", torch.zeros(HEADS, TOKENS).T, ValueError, "lse must have stride 1 in its last dimension, got strides"),
    ],
)
def test_run_refuses(runner: DecodeRunner, name: str, value: Any, error: type[Exception], message: str) -> None:
    arguments = run_arguments(runner)
    with pytest.raises(error, match=message):
        runner.run(**{**arguments, name: value})
    runner.run(**arguments)  # and goes on


@pytest.mark.parametrize(
    ("kv_layout", "dims", "message"),
    [
        ("NHD", (0, 1, 2, 3), None),
        ("HND", (0, 2, 1, 3), None),
        ("NHD", (0, 2, 1, 3), r"v_cache: kv_layout = 'NHD' promises a head stride of 64 bytes, got 1024 "),
        ("HND", (0, 1, 2, 3), r"v_cache: kv_layout = 'HND' promises a token stride of 64 bytes, got 128 \(stri"),
    ],
)
def test_run_refuses_a_cache_that_breaks_a_promise(kv_layout: str, dims: tuple[int, ...], message: str | None) -> None:
    """``dims``: those of a page, in the order of V's memory."""
    runner = DecodeRunner(**{**RUNNER, "kv_layout": kv_layout})
    kept = {"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3)}[kv_layout]
    arguments = run_arguments(runner)
    for name, order in (("k_cache", kept), ("v_cache", dims)):
        # Heads and tokens swap, or do not: the permutation is its own inverse.
        arguments[name] = arguments[name].permute(order).contiguous().permute(order)
    if message is None:
        runner.run(**arguments)
    else:
        with pytest.raises(ValueError, match=message):
            runner.run(**arguments)


def test_a_promise_about_one_head_is_always_kept() -> None:
    """The stride of a dimension of size 1 means nothing."""
    runner = DecodeRunner(**{**RUNNER, "kv_layout": "NHD", "num_kv_heads": 1})
    arguments = run_arguments(runner)
    for name in ("k_cache", "v_cache"):
        arguments[name] = torch.zeros(6, PAGE, 3 * D, dtype=torch.uint8).as_strided(
            (6, PAGE, 1, D), (3 * D * PAGE, 3 * D, 5, 1)
        )
    runner.run(**arguments)


def test_a_query_may_be_one_row_for_all_tokens(runner: DecodeRunner) -> None:
    arguments = run_arguments(runner)
    arguments["k_cache"].view(torch.uint8)[:] = 0x38  # 1.0
    arguments["v_cache"].view(torch.uint8)[:] = 0x40  # 2.0
    row = torch.randn(1, HEADS, D).bfloat16()
    runner.run(**{**arguments, "query": row.expand(ROWS)})
    assert arguments["out"][:Q_LEN].eq(2).all()


def test_a_tensor_on_another_device_is_not_taken_for_one_known(runner: DecodeRunner) -> None:
    arguments = run_arguments(runner)
    runner.run(**arguments)
    with pytest.raises(ValueError, match="query must be on cpu, got meta"):
        runner.run(**{**arguments, "query": arguments["query"].to(META)})


def test_numpy_s_numbers_become_python_s() -> None:
    """Where they are added up NumPy's would wrap."""
    small = {"fixed_split": np.uint8(64), "max_step_tokens": np.uint8(200), "sm_count": np.int8(100)}
    tuning = Tuning(**small, l2_prefetch=np.uint8(3), pdl=np.True_)
    assert dataclasses.astuple(tuning) == (None, None, None, True, 3, True, 100, 64, 200)
    assert {type(value) for value in dataclasses.astuple(tuning)} == {int, bool, type(None)}
    runner = DecodeRunner(**{**RUNNER, **small})
    runner.plan(**plan_arguments(), margin=np.uint8(57))  # 198 tokens
    with pytest.raises(ValueError, match="at most max_step_tokens = 200 tokens in all, margins included, got 327"):
        runner.plan(**plan_arguments(), margin=np.uint8(100))  # 3 · 100 is 44 in 8 bits
    plan = runner.plan(**plan_arguments(), causal=np.False_)
    assert plan.causal is False


@pytest.mark.parametrize("q_mode", ["bf16", "fp8"])
def test_tensors_that_require_gradients_give_the_same(q_mode: str) -> None:
    runner = DecodeRunner(**{**RUNNER, "q_mode": q_mode})
    arguments = run_arguments(runner)
    arguments["query"].normal_()
    runner.run(**arguments)
    want = arguments["out"].clone()
    for name in ("query", "out", "q_mul", "o_mul", "k_scale", "lse"):
        arguments[name].requires_grad_()
    for _ in range(2):
        runner.run(**arguments)
        assert torch.equal(arguments["out"], want) and arguments["out"].grad_fn is None


def test_a_runner_made_in_inference_mode_runs_outside() -> None:
    with torch.inference_mode():
        runner = DecodeRunner(**{**RUNNER, "q_mode": "fp8"})
        runner.run(**run_arguments(runner))
        runner.run(**run_arguments(runner) | {"query": torch.zeros(ROWS).half()})
    runner.run(**run_arguments(runner))
    runner.run(**run_arguments(runner) | {"query": torch.zeros(ROWS).half()})


def test_run_refuses_the_plan_of_another_runner(runner: DecodeRunner) -> None:
    other = DecodeRunner(**RUNNER)
    with pytest.raises(ValueError, match="plan was made by another runner"):
        runner.run(**{**run_arguments(runner), "plan": other.plan(**plan_arguments())})


def test_run_refuses_a_plan_whose_buffer_holds_one_of_other_sequences(runner: DecodeRunner) -> None:
    """On a GPU it would run the later plan's sequences over tensors made for the earlier one's."""
    arguments = run_arguments(runner)
    fewer = runner.plan(**{**plan_arguments(), "num_seqs": 2})
    with pytest.raises(ValueError, match="plan of 3 sequences was overwritten by a later one of 2, of q_len 2 too"):
        runner.run(**arguments)
    runner.run(**{**arguments, "plan": fewer})
    runner.plan(**{**plan_arguments(), "num_seqs": 3, "q_len": 1})  # another q_len has its own buffer
    runner.run(**{**arguments, "plan": fewer})


def test_plan_refuses_a_block_table_of_more_tokens_than_int32_counts(
    runner: DecodeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mjolnir.runner.INT32_MAX", 2 * PAGE - 1)
    runner.plan(**{**plan_arguments(), "block_table": torch.zeros(3, 1).int()})
    with pytest.raises(ValueError, match="block_table must have at most 1 columns of 16 tokens, got 2"):
        runner.plan(**{**plan_arguments(), "block_table": torch.zeros(3, 2).int()})


def test_the_reference_backend_compiles_nothing_and_is_always_ready(runner: DecodeRunner) -> None:
    assert runner.backend == "reference" and "cpu" in runner.backend_reason
    runner.precompile()
    runner.ensure_compiled(2, torch.float16)
    assert runner.is_compiled(2, torch.float16)
