"""What ``run`` hands to a compiled kernel, and that it sees every change of a tensor: on a CPU, with a kernel that only
notes its arguments."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mjolnir import DecodeRunner, launcher, runner, signature
from mjolnir.backends.cute import CuteBackend
from mjolnir.compiler import key
from mjolnir.kernels.launch_args import LaunchArgs
from mjolnir.tuning import Tuning

SEQS, HEADS, KV_HEADS, D, PAGE, PAGES = 3, 8, 2, 128, 16, 6
CACHE = (PAGES, PAGE, KV_HEADS, D)

TENSORS = (
    *("query", "out", "k_cache", "v_cache", "k_scale", "v_scale", "q_mul", "o_mul", "lse"),
    *("k_block_scale", "v_block_scale"),
)
PARAMETERS = (
    *("q", "out", "k", "v", "k_scale", "v_scale", "q_mul", "o_mul", "lse", "k_block_scale", "v_block_scale"),
    *("block_table", "seq_lens", "block_table_stride", "seq_rows", "max_len", "launch_args", "softmax_scale", "stream"),
)


class Noted:
    """A runner whose kernel notes its arguments, by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, Any]] = []
        monkeypatch.setattr(runner, "current_device", lambda: None)
        monkeypatch.setattr(launcher, "raw_stream", lambda index: 0x99)
        monkeypatch.setattr(CuteBackend, "obtain", lambda backend, variant: self.note)
        self.runner = DecodeRunner(
            num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=D, page_size=PAGE, out_dtype=torch.bfloat16,
            max_num_seqs=4, device="cpu",
        )  # fmt: skip
        self.backend = CuteBackend(
            arch="sm_90a", device=self.runner.device, shape=self.runner._shape, max_num_seqs=4,
            tuning=Tuning(None, None, None, True, 0, True, 132, None, None),
        )  # fmt: skip
        table, lens = torch.zeros(4, 5, dtype=torch.int32)[:, :4], torch.ones(4, dtype=torch.int32)
        plan = self.runner.plan([1] * SEQS, SEQS, 1, table, lens)
        self.runner._cute = self.backend
        self.runner._launcher = launcher.Launcher(self.backend, self.runner._check, PAGE)
        cache = torch.zeros(2, *CACHE, dtype=torch.float8_e4m3fn)
        one = torch.ones(1)
        self.arguments: dict[str, Any] = {
            "plan": plan,
            "query": torch.zeros(SEQS, HEADS, D, dtype=torch.bfloat16),
            "out": torch.zeros(SEQS, HEADS, D, dtype=torch.bfloat16),
            "k_cache": cache[0],
            "v_cache": cache[1],
            "k_scale": one,
            "v_scale": one,
            "softmax_scale": 0.125,
        }

    def note(self, *arguments: Any) -> None:
        call = dict(zip(PARAMETERS, arguments, strict=True))
        fixed = (ctypes.c_int64 * len(LaunchArgs._fields)).from_address(call.pop("launch_args"))
        self.calls.append(call | LaunchArgs(*fixed)._asdict())

    def run(self, **changes: Any) -> dict[str, Any]:
        self.arguments |= changes
        self.runner.run(**self.arguments)
        return self.calls[-1]


@pytest.fixture(params=["guards", "no_guards"])
def noted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Noted:
    if request.param == "no_guards":
        for module in (launcher, runner):
            monkeypatch.setattr(module, "same_layout", lambda tensors: signature._never)
    return Noted(monkeypatch)


@pytest.mark.skipif(key.dsl_toolchain() is None, reason="the CuTe DSL is not installed")
def test_the_kernel_takes_these_arguments() -> None:
    from mjolnir.kernels.decode import DecodeKernel

    assert tuple(inspect.signature(DecodeKernel.__call__).parameters)[1:] == PARAMETERS


def test_addresses_and_strides(noted: Noted) -> None:
    for optional in ({}, {"lse": torch.zeros(SEQS, HEADS + 3)[:, :HEADS]}):
        for _ in range(2):  # first seen, then known
            call = noted.run(**optional)
            given, plan = noted.arguments, noted.arguments["plan"]
            for name, parameter in zip(TENSORS, PARAMETERS, strict=False):
                tensor = given.get(name)
                assert call[parameter] == (0 if tensor is None else tensor.data_ptr()), name
            assert (call["block_table"], call["seq_lens"]) == (plan.block_table.data_ptr(), plan.seq_lens.data_ptr())
            assert (call["block_table_stride"], call["seq_rows"], call["max_len"]) == (5, 4, 4 * PAGE)
            assert (call["softmax_scale"], call["stream"]) == (0.125, 0x99)
            assert (call["q_token_stride"], call["q_head_stride"], call["num_pages"]) == (HEADS * D, D, PAGES)
            assert call["k_token_stride"] == call["v_token_stride"] == KV_HEADS * D // 16
            assert call["lse_token_stride"] == (HEADS + 3 if optional else 0)
            buffer = noted.backend.plan_buffer(1)
            assert (call["plan"], call["counters"]) == (buffer.device.data_ptr(), buffer.counters_ptr)


def test_other_tensors_of_one_layout_give_other_addresses(noted: Noted) -> None:
    first = noted.run()
    query = noted.arguments["query"].clone()
    second = noted.run(query=query)
    assert second == first | {"q": query.data_ptr()}


def test_one_descale_for_k_and_v_and_two_of_its_layout_take_turns(noted: Noted) -> None:
    one = noted.arguments["k_scale"]
    for v_scale in (one, one.clone(), one, one, one.clone(), one.clone()):
        assert noted.run(v_scale=v_scale)["v_scale"] == v_scale.data_ptr()


Change = Callable[[dict[str, torch.Tensor]], Any]

CHANGES: dict[str, tuple[Change, dict[str, Any] | str]] = {
    "rows": (lambda t: t["query"].resize_(2, HEADS, D), "query must have at least num_seqs . q_len = 3 rows, got 2"),
    "shape": (lambda t: t["out"].resize_(2, D), r"out must have shape .* got \(2, 128\)"),
    "strides": (
        lambda t: t["query"].set_(torch.zeros(SEQS, HEADS + 1, D, dtype=torch.bfloat16)[:, 1:]),
        {"q_token_stride": (HEADS + 1) * D},
    ),
    "transposed": (lambda t: t["k_cache"].transpose_(1, 2), r"k_cache must have shape .* got \(6, 2, 16, 128\)"),
    "pages": (
        lambda t: (t["k_cache"].set_(t["k_cache"][1:]), t["v_cache"].set_(t["v_cache"][1:])),
        {"num_pages": PAGES - 1},
    ),
    "dtype": (
        lambda t: setattr(t["query"], "data", t["query"].view(torch.int16)),
        "query must have dtype torch.bfloat16 or torch.float16, got torch.int16",
    ),
    "aligned": (
        lambda t: t["k_cache"].set_(t["k_cache"].untyped_storage(), 8, CACHE, t["k_cache"].stride()),
        "k_cache must start at a multiple of 16 bytes",
    ),
    "table": (
        lambda t: t["block_table"].set_(torch.zeros(6, 9, dtype=torch.int32)[:, :7]),
        {"block_table_stride": 9, "max_len": 7 * PAGE},
    ),
    "lengths": (lambda t: t["seq_lens"].resize_(3), {"seq_rows": 3}),
    "scale": (lambda t: t["k_scale"].set_(torch.ones(KV_HEADS)), {"k_scale_head_stride": 1, "v_scale_head_stride": 1}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_changed_in_place_is_seen(noted: Noted, change: str) -> None:
    noted.run()
    noted.run()
    plan = noted.arguments["plan"]
    make, expected = CHANGES[change]
    make(noted.arguments | {"block_table": plan.block_table, "seq_lens": plan.seq_lens})
    if isinstance(expected, str):
        with pytest.raises((TypeError, ValueError), match=expected):
            noted.run()
    else:
        for _ in range(2):
            assert expected.items() <= noted.run().items()


def test_arguments_that_come_and_go_are_seen(noted: Noted) -> None:
    """q_mul and o_mul have one layout; a descale may be given twice, or be two of other shapes."""
    factor, scale = torch.ones(HEADS, D), torch.ones(KV_HEADS)
    for _ in range(2):
        assert noted.run(q_mul=factor, o_mul=None)["q_mul"] == factor.data_ptr()
        assert noted.run(q_mul=None, o_mul=factor)["o_mul"] == factor.data_ptr()
        assert noted.calls[-1]["q_mul"] == 0
        assert noted.run(o_mul=None, v_scale=scale)["v_scale_head_stride"] == 1
        assert noted.calls[-1]["k_scale_head_stride"] == 0
        call = noted.run(v_scale=noted.arguments["k_scale"])
        assert (call["v_scale_head_stride"], call["v_scale"]) == (0, call["k_scale"])


def test_rows_that_cannot_be_read_in_place_are_packed_every_time(noted: Noted) -> None:
    aligned = noted.arguments["query"]
    noted.run()
    odd = torch.zeros(SEQS * HEADS * D + 1, dtype=torch.bfloat16)[1:].view(SEQS, HEADS, D)
    for _ in range(2):
        packed = noted.run(query=odd)
        assert packed["q"] not in (odd.data_ptr(), aligned.data_ptr()) and packed["q"] % 16 == 0
        out = torch.zeros(SEQS, HEADS, D + 1, dtype=torch.bfloat16)[..., :D].requires_grad_()
        assert noted.run(out=out)["out"] != out.data_ptr()


def test_what_is_no_tensor_is_named(noted: Noted) -> None:
    for name in ("query", "k_cache", "v_scale"):
        with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got list"):
            noted.runner.run(**{**noted.arguments, name: []})
        with pytest.raises(TypeError, match=f"{name} must be a dense tensor, got one of layout torch.sparse_coo"):
            noted.runner.run(**{**noted.arguments, name: torch.zeros(3, 4).to_sparse()})
        noted.run()


def test_a_known_layout_is_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """This PyTorch has the guards that make a run cheap, in every autograd mode."""
    noted = Noted(monkeypatch)
    looked_up: list[Any] = []
    layout_key = runner.layout_key
    monkeypatch.setattr(launcher, "layout_key", lambda tensors: looked_up.append(tensors) or layout_key(tensors))
    noted.run()
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        looked_up.clear()
        with mode():
            for _ in range(3):
                noted.run(query=noted.arguments["query"].clone())
        assert len(looked_up) <= 1


def test_layers_of_several_layouts_are_each_checked_once(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    same_layout, prepare = launcher.same_layout, CuteBackend.prepare
    monkeypatch.setattr(launcher, "same_layout", lambda tensors: made.append("guard") or same_layout(tensors))
    monkeypatch.setattr(CuteBackend, "prepare", lambda *arguments: made.append("launch") or prepare(*arguments))
    padded = torch.zeros(SEQS, HEADS + 1, D, dtype=torch.bfloat16)[:, 1:]
    for _ in range(3):
        for query in (torch.zeros(SEQS, HEADS, D, dtype=torch.bfloat16), padded):
            assert noted.run(query=query)["q_token_stride"] == query.stride(0)
    assert made == ["launch", "guard"] * 2


def test_guards_tell_tensors_apart() -> None:
    a, b = torch.zeros(3, 4), torch.zeros(4)
    same = signature.same_layout([a, b])
    assert same(a, b) and same(a.clone(), b.clone())
    for other in (a.double(), a.T.contiguous().T, a[:2], torch.zeros(3, 4, device="meta"), torch.zeros(3, 8)[:, ::2]):
        assert not same(other, b)
    assert not same(None, b) and not same(b, a)
    assert not signature.same_layout([a, a])(a, a)


TABLE_CHANGES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], str]] = {
    "rows": (lambda table, lens: table.resize_(2, 4), "block_table must have at least num_seqs = 3 rows, got 2"),
    "columns": (lambda table, lens: table.resize_(4, 0), "block_table must have at least one column"),
    "strides": (lambda table, lens: table.t_(), "block_table must have stride 1 in its last dimension"),
    "lengths": (lambda table, lens: lens.resize_(2), "seq_lens must have at least num_seqs = 3 rows, got 2"),
    "dtype": (
        lambda table, lens: setattr(table, "data", table.view(torch.float32)),
        "block_table must have dtype torch.int32, got torch.float32",
    ),
}


@pytest.mark.parametrize("change", TABLE_CHANGES)
def test_a_plan_sees_tables_changed_in_place(change: str) -> None:
    decoder = DecodeRunner(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=D, page_size=PAGE, out_dtype=torch.bfloat16, max_num_seqs=4,
        device="cpu",
    )  # fmt: skip
    table, lens = torch.zeros(4, 4, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    for num_seqs in (2, 3, 3):
        decoder.plan(None, num_seqs, 1, table, lens)
    make, expected = TABLE_CHANGES[change]
    make(table, lens)
    with pytest.raises((TypeError, ValueError), match=expected):
        decoder.plan(None, 3, 1, table, lens)
