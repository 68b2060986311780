"""The vLLM backend over stand-ins of vLLM, on the reference backend: values of every path, counters, fallbacks."""

from __future__ import annotations

import dataclasses
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_standins as standins
from vllm_standins import CGSupport, attend, expected, make_builder, make_common, make_layer, make_query

from mjolnir.integrations.vllm import builder as builder_module
from mjolnir.integrations.vllm import compat, counters, plugin
from mjolnir.integrations.vllm.counters import COUNTERS
from mjolnir.verify.compare import ROW_TOLERANCE, row_errors

LOGGER = "vllm.mjolnir"
ROOT = Path(__file__).parent.parent
FP8_QUERY_ERROR = 0.08
"""Of a row: the fallback's queries are rounded to e4m3, 2^-4 at most for each element."""


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    standins.install(monkeypatch)
    monkeypatch.delitem(sys.modules, "mjolnir.integrations.vllm.backend", raising=False)
    for knob in ("MJOLNIR_VLLM_FALLBACK", "MJOLNIR_VLLM_SHADOW"):
        monkeypatch.delenv(knob, raising=False)
    builder_module._log_once.cache_clear()
    COUNTERS.reset()
    yield
    sys.modules.pop("mjolnir.integrations.vllm.backend", None)


@pytest.fixture
def backend(vllm: None) -> Any:
    from mjolnir.integrations.vllm.backend import MjolnirBackend

    return MjolnirBackend


def worst_row(out: torch.Tensor, want: torch.Tensor) -> float:
    return float(row_errors(out[: len(want)], want).max())


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "auto"])
@pytest.mark.parametrize(
    "query_lens, seq_lens, drafts, path",
    [
        ([1, 1, 1], [1, 17, 100], 0, "decode"),
        ([3, 3], [3, 90], 2, "decode"),
        ([3, 1, 2], [3, 64, 33], 2, "ragged"),
        ([1, 1, 1], [40, 1, 5], 3, "decode"),  # no drafts in this step
        ([1, 1, 20], [40, 16, 30], 0, "split"),
        ([2, 1, 1, 9, 4], [20, 8, 3, 9, 50], 2, "split"),
    ],
)
def test_values_of_every_path(backend, kv_cache_dtype, query_lens, seq_lens, drafts, path) -> None:
    layers = [make_layer(f"l{i}", backend, kv_cache_dtype=kv_cache_dtype, seed=i) for i in range(2)]
    common = make_common(query_lens, seq_lens)
    metadata = make_builder(layers, drafts=drafts).build(0, common)
    assert COUNTERS.snapshot() == {path: 1}
    step = getattr(metadata, builder_module.STEP)
    for layer in layers:
        query = make_query(layer, sum(query_lens))
        want = expected(layer, common, query)
        out = attend(layer, metadata, query)
        here = step.part.num_tokens
        assert worst_row(out[:here], want[:here]) <= ROW_TOLERANCE
        assert layer.impl.calls == ([sum(query_lens) - here] if path == "split" else [])
        if path == "split":
            assert 0 < here < sum(query_lens)
            limit = FP8_QUERY_ERROR if kv_cache_dtype == "fp8" else ROW_TOLERANCE
            assert worst_row(out[here:], want[here:]) <= limit


@pytest.mark.parametrize(
    "query_lens, seq_lens, reason",
    [
        ([20, 1], [20, 8], "no request with at most 1 query tokens leads the step"),
        ([0, 0], [1, 1], "no tokens"),
    ],
)
def test_steps_that_do_not_decode_fall_back(backend, query_lens, seq_lens, reason) -> None:
    layer = make_layer("l", backend)
    common = make_common(query_lens, seq_lens)
    metadata = make_builder([layer]).build(0, common)
    assert COUNTERS.snapshot() == {f"fallback: {reason}": 1}
    query = make_query(layer, max(sum(query_lens), 1))
    out = attend(layer, metadata, query)
    assert len(layer.impl.calls) == 1
    if sum(query_lens):
        assert worst_row(out, expected(layer, common, query)) <= FP8_QUERY_ERROR


def test_cascades_and_masks_fall_back(backend) -> None:
    builder = make_builder([make_layer("l", backend)])
    common = make_common([1, 1], [40, 40])
    builder.build(16, common)
    common.causal = False
    builder.build(0, common)
    common.causal = torch.ones(2, dtype=torch.int32)
    builder.build(0, common)
    assert COUNTERS.snapshot() == {"fallback: not causal": 2, "fallback: cascade attention": 1}


def test_padding_requests_of_a_graph_give_zeros(backend) -> None:
    layer = make_layer("l", backend)
    common = make_common([2, 2, 0, 0], [30, 2, 0, 0], num_tokens=8)
    metadata = make_builder([layer], drafts=1).build(0, common)
    query = make_query(layer, 8)
    out = attend(layer, metadata, query)
    assert worst_row(out, expected(layer, common, query)) <= ROW_TOLERANCE
    assert (out[4:] == 0).all()


def test_padding_requests_without_token_rows_are_left_out(backend) -> None:
    layer = make_layer("l", backend)
    common = make_common([2, 2, 0, 0], [30, 2, 0, 0], num_tokens=5)
    metadata = make_builder([layer], drafts=1).build(0, common)
    out = attend(layer, metadata, make_query(layer, 5))
    assert out[:4].isfinite().all() and out[4].isnan().all()


def test_one_kv_head_per_rank(backend) -> None:
    """A dimension of size 1 may carry any stride."""
    layer = make_layer("l", backend, num_heads=4, num_kv_heads=1, head_size=128)
    pages, _, page_size, row = layer.kv_cache.shape
    layer.kv_cache = layer.kv_cache.as_strided((pages, 1, page_size, row), (page_size * row, 3, row, 1))
    common = make_common([1, 1], [40, 3])
    metadata = make_builder([layer]).build(0, common)
    query = make_query(layer, 2)
    assert worst_row(attend(layer, metadata, query), expected(layer, common, query)) <= ROW_TOLERANCE


def test_layers_of_two_shapes_in_one_group(backend) -> None:
    layers = [make_layer("wide", backend, num_heads=6), make_layer("narrow", backend, num_heads=2)]
    common = make_common([1, 1], [40, 3])
    metadata = make_builder(layers).build(0, common)
    for layer in layers:
        query = make_query(layer, 2)
        assert worst_row(attend(layer, metadata, query), expected(layer, common, query)) <= ROW_TOLERANCE
        assert layer.impl.calls == []


def test_a_mixed_model_runs_each_layer_where_it_can(backend, caplog: pytest.LogCaptureFixture) -> None:
    full, window = make_layer("full", backend), make_layer("window", backend, sliding_window=1000)
    with caplog.at_level(logging.INFO, logger=LOGGER):
        builder = make_builder([full, window])
        make_builder([full, window])
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "mjolnir: 1 attention layer (window) on FLASH_ATTN: sliding window of 1000",
        "mjolnir: 1 attention layer (full) decode on Mjolnir (fp8, 6/2 heads of 64, pages of 16, up to 1 query "
        "tokens), else on FLASH_ATTN",
    ]
    common = make_common([1, 1], [40, 3])
    metadata = builder.build(0, common)
    assert not metadata.fast_build  # the window's layer needs the schedule
    window._q_scale = torch.tensor(0.03)
    for layer, calls in ((full, []), (window, [2])):
        query = make_query(layer, 2)
        if layer is window:  # vLLM's layer quantises for an impl that says so
            assert layer.impl.supports_quant_query_input
            query = compat.quantise_query(query, layer)
            out = torch.empty(2, 6, 64, dtype=torch.bfloat16)
            layer.impl.forward(layer, query, None, None, layer.kv_cache, metadata, out)
        else:
            out = attend(layer, metadata, query)
            assert worst_row(out, expected(layer, common, query)) <= ROW_TOLERANCE
        assert layer.impl.calls == calls
    builder.build(0, make_common([1, 9], [40, 9]))
    assert COUNTERS.snapshot() == {"decode": 1, "fallback: prefill beside decode, which cannot be split here": 1}


@pytest.mark.parametrize(
    "layer_args, reason",
    [
        ({"sliding_window": 8}, "sliding window of 8"),
        ({"logits_soft_cap": 30.0}, "scores capped at 30"),
        ({"alibi_slopes": [0.5]}, "ALiBi"),
        ({"sinks": torch.zeros(6)}, "attention sinks"),
        ({"attn_type": "encoder_only"}, "encoder-only attention"),
        ({"attn_type": "encoder_decoder"}, "encoder-decoder attention"),
        ({"head_size": 80}, "head size 80"),
        ({"num_heads": 65, "num_kv_heads": 1}, "65 query heads per KV head"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "KV cache dtype fp8_e5m2"),
        ({"kv_cache_dtype": "float16"}, "KV cache dtype float16"),
        ({"chunk_lookback": 2}, "argument chunk_lookback"),
    ],
)
def test_layers_that_cannot_decode_here(backend, layer_args, reason) -> None:
    layer = make_layer("l", backend, **layer_args)
    assert layer.impl.mjolnir_reason == reason
    assert layer.impl.supports_quant_query_input  # as the fallback has it
    assert layer.impl.fused_output_quant_supported("any")
    builder = make_builder([layer])
    assert builder.reorder_batch_threshold is None
    builder.build(0, make_common([1], [5]))
    assert COUNTERS.snapshot() == {"fallback: no layer decodes on Mjolnir": 1}


def test_engines_in_which_no_layer_can(backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_BATCH_INVARIANT", True)
    assert make_layer("l", backend).impl.mjolnir_reason == "batch invariance"


def test_what_only_the_builder_knows(backend) -> None:
    pages = make_layer("l", backend, page_size=48)
    make_builder([pages], page_size=48)
    assert pages.impl.mjolnir_reason == "pages of 48 tokens"

    wrapped = make_layer("l", backend)
    wrapped.attn_backend = type("ChunkedLocalAttention", (backend,), {})
    make_builder([wrapped])
    assert wrapped.impl.mjolnir_reason == "layers of Layer"

    values = make_layer("l", backend)
    values.head_size_v = 32
    make_builder([values])
    assert values.impl.mjolnir_reason == "values of head size 32"


def test_without_a_kernel_the_fallback_serves(backend, monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    from mjolnir.runner import DecodeRunner

    def precompile(self: DecodeRunner) -> None:
        raise ModuleNotFoundError("no compiler here")

    monkeypatch.setattr(DecodeRunner, "precompile", precompile)
    layer = make_layer("l", backend)
    builder = make_builder([layer])
    assert caplog.messages == [
        "mjolnir: 1 attention layer (l) on FLASH_ATTN: no kernel: ModuleNotFoundError: no compiler here"
    ]
    assert caplog.records[0].levelno == logging.WARNING
    common = make_common([1], [5])
    out = attend(layer, builder.build(0, common), make_query(layer, 1))
    assert worst_row(out, expected(layer, common, make_query(layer, 1))) <= FP8_QUERY_ERROR


def test_drafts_beyond_the_kernels_rows_fall_back(backend) -> None:
    layer = make_layer("l", backend, num_heads=16, num_kv_heads=1)  # 64 rows: 4 query tokens
    builder = make_builder([layer], drafts=5)
    builder.build(0, make_common([6, 6], [40, 40]))
    builder.build(0, make_common([4, 4], [40, 40]))
    assert COUNTERS.snapshot() == {
        "fallback: no request with at most 4 query tokens leads the step": 1,
        "decode": 1,
    }


@pytest.mark.parametrize(
    "fallback, shadow, want",
    [
        (CGSupport.ALWAYS, "", CGSupport.UNIFORM_BATCH),
        (CGSupport.UNIFORM_BATCH, "0", CGSupport.UNIFORM_BATCH),
        (CGSupport.UNIFORM_SINGLE_TOKEN_DECODE, "", CGSupport.UNIFORM_SINGLE_TOKEN_DECODE),
        (CGSupport.NEVER, "", CGSupport.NEVER),
        (CGSupport.ALWAYS, "5", CGSupport.NEVER),
    ],
)
def test_full_graphs_hold_uniform_steps(backend, monkeypatch, fallback, shadow, want) -> None:
    monkeypatch.setattr(standins.Builder, "support", fallback)
    monkeypatch.setenv("MJOLNIR_VLLM_SHADOW", shadow)
    builder_class = backend.get_builder_cls()
    assert builder_class.get_cudagraph_support(None, None) is want
    assert builder_class.get_varlen_cudagraph_max_query_len(None, None) is None


def test_captures_are_counted_apart(backend) -> None:
    builder = make_builder([make_layer("l", backend)])
    builder.build_for_cudagraph_capture(make_common([1, 1], [1, 1]))
    builder.build(0, make_common([1, 1], [9, 5]))
    assert COUNTERS.snapshot() == {"capture decode": 1, "decode": 1}
    assert COUNTERS.on_mjolnir() == 1
    assert str(COUNTERS) == "capture decode 1, decode 1"


def test_builders_of_equal_specs_each_build(backend) -> None:
    """vLLM hands one's metadata to another that can update its block table, even if its layers have other heads."""
    target = make_layer("l0", backend, num_heads=8, num_kv_heads=2)
    draft = make_layer("l1", backend, num_heads=4, num_kv_heads=2, seed=1)
    common = make_common([1, 1, 20], [40, 3, 20])
    for layer in (target, draft):
        builder = make_builder([layer])
        assert not builder.supports_update_block_table
        query = make_query(layer, 22)
        out = attend(layer, builder.build(0, common), query)
        assert worst_row(out[:2], expected(layer, common, query)[:2]) <= ROW_TOLERANCE  # the others are the fallback's
    assert COUNTERS.snapshot() == {"split": 2}


def test_a_builder_that_is_derived_from_decodes_nothing(backend) -> None:
    """It may make other metadata of ours, without the plan: steps would be counted that the fallback runs."""
    layer = make_layer("l", backend)

    class Rewriting(backend.get_builder_cls()):
        pass

    config = standins.make_config([layer])
    builder = Rewriting(SimpleNamespace(block_size=16), ["l"], config, torch.device("cpu"))
    assert builder.decoder is None and layer.impl.mjolnir_reason == "metadata that Rewriting rewrites"
    builder.build(0, make_common([1, 1], [40, 3]))
    assert COUNTERS.snapshot() == {"fallback: no layer decodes on Mjolnir": 1}


def test_a_tensor_as_an_unknown_argument_is_a_reason(backend) -> None:
    assert make_layer("l", backend, biases=torch.ones(3)).impl.mjolnir_reason == "argument biases"
    assert make_layer("l", backend, biases=None, window=-1, flag=False).impl.mjolnir_reason is None


def test_draft_steps_see_lengths_that_grew(backend) -> None:
    layer = make_layer("l", backend)
    builder = make_builder([layer], drafts=2)
    assert builder.decoder.margin == 2
    common = make_common([1, 1], [40, 3])
    metadata = builder.build(0, common, fast_build=True)
    common.seq_lens += 2
    builder.update_draft_decode_metadata(metadata)
    query = make_query(layer, 2)
    assert worst_row(attend(layer, metadata, query), expected(layer, common, query)) <= ROW_TOLERANCE


def test_every_nth_step_is_shadowed(backend, monkeypatch) -> None:
    monkeypatch.setenv("MJOLNIR_VLLM_SHADOW", "2")
    layer = make_layer("l", backend)
    builder = make_builder([layer], drafts=1)
    for query_lens in ([1, 1], [2, 1], [2, 2], [2, 2]):
        attend(layer, builder.build(0, make_common(query_lens, [40, 3])), make_query(layer, sum(query_lens)))
    assert COUNTERS.snapshot() == {"shadow check": 4, "decode": 3, "ragged": 1}


def test_a_wrong_result_is_caught_by_the_shadow(backend, monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    from mjolnir.runner import DecodeRunner

    run = DecodeRunner.run

    def wrong(self: DecodeRunner, plan: Any, query: Any, out: torch.Tensor, *args: Any, **more: Any) -> None:
        run(self, plan, query, out, *args, **more)
        out[1] *= 1.02

    monkeypatch.setenv("MJOLNIR_VLLM_SHADOW", "1")
    monkeypatch.setattr(DecodeRunner, "run", wrong)
    layer = make_layer("model.layers.7", backend)
    attend(layer, make_builder([layer]).build(0, make_common([1, 1], [40, 3])), make_query(layer, 2))
    assert COUNTERS.snapshot() == {"shadow check": 2, "decode": 1, "shadow check failed": 1}
    assert re.match(
        r"mjolnir: model.layers.7, sequence 1 of 3 tokens: O of token 0, head \d is off by", caplog.messages[-1]
    )


def test_the_profiling_run_has_no_metadata(backend) -> None:
    layer = make_layer("l", backend)
    assert (attend(layer, None, make_query(layer, 3)) == 0).all()


def test_fused_output_quantisation_is_refused(backend) -> None:
    layer = make_layer("l", backend)
    assert not layer.impl.fused_output_quant_supported("any")
    metadata = make_builder([layer]).build(0, make_common([1], [3]))
    query = make_query(layer, 1)
    with pytest.raises(NotImplementedError, match="quantise its output"):
        layer.impl.forward(layer, query, None, None, layer.kv_cache, metadata, query.clone(), torch.ones(1))


def test_requests_that_decode_lead_the_batch(backend) -> None:
    assert make_builder([make_layer("l", backend)], drafts=2).reorder_batch_threshold == 3


def test_what_follows_a_decode_part_is_cut_out() -> None:
    common = make_common([1, 2, 7, 4], [5, 99, 7, 8])
    rest = compat.rest_of(common, 2, 3)
    assert rest.query_start_loc.tolist() == rest.query_start_loc_cpu.tolist() == [0, 7, 11]
    assert (rest.num_reqs, rest.num_actual_tokens, rest.max_query_len) == (2, 11, 7)
    assert rest.seq_lens.tolist() == rest.seq_lens_cpu_upper_bound.tolist() == [7, 8]
    assert rest.block_table_tensor.tolist() == common.block_table_tensor[2:].tolist()
    assert rest.slot_mapping.tolist() == rest.positions.tolist() == list(range(3, 14))
    assert common.max_seq_len == 99 and rest.max_seq_len == 8
    unbounded = compat.rest_of(dataclasses.replace(common, seq_lens_cpu_upper_bound=None), 2, 3)
    assert unbounded.max_seq_len == 99
    common.logits_indices_padded = torch.zeros(4)
    assert compat.rest_of(common, 2, 3) is None


def test_blocks_are_cut_into_pages_that_the_kernel_reads(backend) -> None:
    assert backend.get_supported_kernel_block_sizes() == [16, 32, 64, 128, 256]
    assert compat.page_sizes([SimpleNamespace(base=64)]) == [64, 128, 256]
    assert compat.page_sizes([64, SimpleNamespace(base=32)]) == [64, 32, 128, 256]
    odd = [SimpleNamespace(base=48)]
    assert compat.page_sizes(odd) is odd  # the fallback serves


def test_registration(monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    plugin.register()
    plugin.register()  # vLLM may call it more than once
    assert standins.OVERRIDES == {standins.BackendEnum.CUSTOM: plugin.BACKEND_PATH}
    from mjolnir.integrations.vllm.backend import MjolnirBackend

    assert f"{MjolnirBackend.__module__}.{MjolnirBackend.__qualname__}" == plugin.BACKEND_PATH
    assert MjolnirBackend.get_name() == "CUSTOM" and issubclass(MjolnirBackend, standins.Backend)

    standins.OVERRIDES[standins.BackendEnum.CUSTOM] = "other.Backend"
    monkeypatch.setattr(standins.BackendEnum, "register", None, raising=False)  # as 0.33 has it
    plugin.register()
    assert "other.Backend" in caplog.text
    assert standins.OVERRIDES == {standins.BackendEnum.CUSTOM: "other.Backend", "MJOLNIR": plugin.BACKEND_PATH}


def test_the_fallback_is_a_backend_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compat.fallback_backend() is standins.Backend
    monkeypatch.setenv("MJOLNIR_VLLM_FALLBACK", "custom")
    with pytest.raises(ValueError, match="MJOLNIR_VLLM_FALLBACK must name a backend of vLLM other than Mjolnir"):
        compat.fallback_backend()


def test_the_knob_for_shadow_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    from mjolnir import env

    monkeypatch.setenv("MJOLNIR_VLLM_SHADOW", " 7 ")
    assert env.vllm_shadow_every() == 7
    monkeypatch.setenv("MJOLNIR_VLLM_SHADOW", "-1")
    with pytest.raises(ValueError, match="MJOLNIR_VLLM_SHADOW must be an integer of at least 0, got '-1'"):
        env.vllm_shadow_every()


def test_counts_are_logged_when_new_and_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(counters.time, "monotonic", lambda: now)
    with caplog.at_level(logging.INFO, logger=LOGGER):
        COUNTERS.log()
        for path in (counters.DECODE, counters.DECODE, counters.SPLIT):
            COUNTERS.record(path)
        with COUNTERS.capture():
            COUNTERS.record(counters.RAGGED)
        now += counters.LOG_EVERY_S - 1
        COUNTERS.record(counters.DECODE)
        now += 1
        COUNTERS.record(counters.DECODE)
        COUNTERS.record(counters.DECODE)
    assert caplog.messages == [
        "mjolnir: steps by path: decode 1",
        "mjolnir: steps by path: decode 2, split 1",
        "mjolnir: steps by path: decode 4, split 1, capture ragged 1",
    ]


def test_counts_are_logged_when_a_forked_process_ends() -> None:
    """As vLLM's workers are; a process that multiprocessing forks runs no atexit handlers (before Python 3.13)."""
    code = (
        "import logging, multiprocessing, sys\n"
        "from mjolnir.integrations.vllm import counters\n"
        "logging.basicConfig(level=logging.INFO, stream=sys.stdout, format='%(message)s')\n"
        "def work():\n"
        "    counters.log_at_exit()\n"
        "    counters.log_at_exit()\n"
        "    for _ in range(3): counters.COUNTERS.record('decode')\n"
        "worker = multiprocessing.get_context('fork').Process(target=work)\n"
        "worker.start()\n"
        "worker.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["mjolnir: steps by path: decode 1", "mjolnir: steps by path: decode 3"]


def test_importing_mjolnir_imports_no_vllm() -> None:
    code = (
        "import sys; sys.modules['vllm'] = None; import mjolnir, mjolnir.runner, mjolnir.cli, mjolnir.env; "
        "import mjolnir.integrations.vllm.plugin; print('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_entry_point_names_the_plugin() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert (
        '[project.entry-points."vllm.general_plugins"]\nmjolnir = "mjolnir.integrations.vllm.plugin:register"' in text
    )
