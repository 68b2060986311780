"""Caches of Mjolnir's own in the vLLM backend: pages, scales, write, decode, and prefill over 16-bit copies, against
the codec itself."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_standins as standins
from vllm_standins import attend, make_builder, make_common, make_layer, make_query

from mjolnir.calibration.scales import LayerScales
from mjolnir.calibration.scales_file import ScalesFile
from mjolnir.formats import get_format
from mjolnir.integrations.vllm import own_cache, plugin
from mjolnir.integrations.vllm.counters import COUNTERS
from mjolnir.integrations.vllm.eligibility import OWN_NAMES, LayerShape
from mjolnir.verify.compare import ROW_TOLERANCE, row_errors


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    standins.install(monkeypatch)
    monkeypatch.delitem(sys.modules, "mjolnir.integrations.vllm.backend", raising=False)
    monkeypatch.delenv("MJOLNIR_VLLM_FALLBACK", raising=False)
    monkeypatch.delenv("MJOLNIR_VLLM_SHADOW", raising=False)
    monkeypatch.delenv("MJOLNIR_VLLM_SCALES", raising=False)
    COUNTERS.reset()
    from mjolnir.integrations.vllm.backend import MjolnirBackend

    yield MjolnirBackend
    sys.modules.pop("mjolnir.integrations.vllm.backend", None)


@pytest.mark.parametrize("heads, tokens, head_size", [(2, 16, 64), (1, 32, 128), (3, 16, 256)])
@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("name", OWN_NAMES)
def test_a_page_holds_its_parts_side_by_side(name: str, heads: int, tokens: int, head_size: int, order: str) -> None:
    """Every byte of a page belongs to exactly one part, and codes start at multiples of 16 bytes."""
    width, pages = own_cache.row_bytes(name, head_size), 3
    raw = torch.arange(pages * heads * tokens * width, dtype=torch.int32)
    shape = (pages, heads, tokens, width) if order == "HND" else (pages, tokens, heads, width)
    cache = raw.to(torch.uint8).view(shape)
    views = own_cache.split(cache if order == "HND" else cache.transpose(1, 2), name, head_size)
    parts = [part for part in views if part is not None]
    at = [part.storage_offset() for part in parts]
    seen: list[int] = []
    for part in parts:
        assert part.shape[:3] == (pages, tokens, heads)
        for head in range(heads):
            for token in range(tokens):
                row = part[1, token, head]
                seen += range(row.storage_offset(), row.storage_offset() + row.numel())
    size = heads * tokens * width
    assert sorted(seen) == list(range(size, 2 * size))
    assert all(offset % 16 == 0 for offset in at[:2])
    assert all(stride * part.element_size() % 16 == 0 for part in parts[:2] for stride in part.stride()[:3])


def test_pages_that_are_not_whole_are_refused() -> None:
    # Another layer's rows lie between.
    cache = torch.zeros(2, 2, 5, 16, own_cache.row_bytes("nvfp4", 64), dtype=torch.uint8)[:, :, 0]
    with pytest.raises(ValueError, match="a cache of nvfp4 must have contiguous pages and rows of 72 bytes"):
        own_cache.split(cache, "nvfp4", 64)


def dense(name: str, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What the codec keeps of rows (tokens, h_k, d); scale: (), (h_k,) or (h_k, d)."""
    fmt = get_format(name)
    scale = scale if scale.dim() != 1 else scale[:, None]
    blocks = fmt.block_scales(x, scale) if fmt.block else None
    return (fmt.decode(fmt.encode(x, scale, blocks), blocks) * scale).double()


def amax_of(heads: int, d: int, kind: str, seed: int = 7) -> list[Any]:
    """Per channel 2 to 6, some channels far more; or the largest of each head."""
    amax = 2 + 4 * torch.rand(heads, d, generator=torch.Generator().manual_seed(seed))
    amax[:, ::9] *= 5
    return amax.tolist() if kind == "channel" else amax.amax(-1).tolist()


def write_scales(folder: Path, heads: int, d: int, kind: str, layer: int = 3) -> Path:
    path = folder / "scales.json"
    sides = {"k_amax": amax_of(heads, d, kind, 7), "v_amax": amax_of(heads, d, kind, 8)}
    file = {"kind": "mjolnir-kv-scales", "version": 1, "num_kv_heads": heads, "head_size": d, "layers": {layer: sides}}
    path.write_text(json.dumps(file))
    return path


@pytest.mark.parametrize("name, kind", [("nvfp4", None), ("nvfp4", "head"), ("e2m3", "head"), ("e2m3", "channel")])
@pytest.mark.parametrize(
    "query_lens, seq_lens, path",
    [
        ([1, 1], [40, 7], "decode"),
        ([3, 2], [40, 7], "ragged"),
        ([1, 3, 20], [33, 16, 30], "split"),
        ([20], [50], "fallback: no request with at most 3 query tokens leads the step"),
    ],
)
def test_steps_over_a_cache_of_our_own(backend, monkeypatch, tmp_path, name, kind, query_lens, seq_lens, path) -> None:
    if kind is not None:
        monkeypatch.setenv("MJOLNIR_VLLM_SCALES", str(write_scales(tmp_path, 2, 64, kind)))
    layer = make_layer("model.layers.3.attn", backend, kv_cache_dtype=name)
    builder = make_builder([layer], drafts=2)
    scales = layer.impl.mjolnir_scales or own_cache.scales_of_vllm(layer)
    assert scales.k_write.shape == {None: (), "head": (2,), "channel": (2, 64)}[kind]
    assert not layer.impl.supports_quant_query_input
    common = make_common(query_lens, seq_lens)
    heads, d = layer.impl.num_kv_heads, layer.head_size
    gen = torch.Generator().manual_seed(3)
    kept = []
    for request, length in enumerate(seq_lens):
        k, v = (torch.randn(length, heads, d, generator=gen).bfloat16() for _ in range(2))
        positions = torch.arange(length)
        slots = common.block_table_tensor[request, positions // 16].long() * 16 + positions % 16
        layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, slots)
        kept.append((dense(name, k, scales.k_write), dense(name, v, scales.v_write)))
    metadata = builder.build(0, common)
    assert COUNTERS.snapshot() == {path: 1}
    query = make_query(layer, sum(query_lens))
    out = attend(layer, metadata, query)

    here = {"split": 4}.get(path, 0 if path.startswith("fallback") else sum(query_lens))
    want, first, group = torch.zeros_like(query, dtype=torch.float64), 0, layer.impl.num_heads // heads
    for length, q_len, (k, v) in zip(seq_lens, query_lens, kept, strict=True):
        if first >= here:  # the fallback attends to copies
            k, v = k.bfloat16().double(), v.bfloat16().double()
        for i in range(q_len):
            for head in range(layer.impl.num_heads):
                seen = length - q_len + i + 1
                scores = layer.impl.scale * (k[:seen, head // group] @ query[first + i, head].double())
                want[first + i, head] = torch.softmax(scores, 0) @ v[:seen, head // group]
        first += q_len
    errors = row_errors(out, want).amax(1)
    assert (errors <= ROW_TOLERANCE).all()


def test_an_e2m3_cache_needs_scales_that_fit(backend, monkeypatch, tmp_path) -> None:
    with pytest.raises(ValueError, match="an e2m3 cache needs scales, for its codes end at 7.5: MJOLNIR_VLLM_SCALES"):
        make_layer("model.layers.3.attn", backend, kv_cache_dtype="e2m3")
    monkeypatch.setenv("MJOLNIR_VLLM_SCALES", str(tmp_path / "none.json"))
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        make_builder([make_layer("model.layers.3.attn", backend, kv_cache_dtype="e2m3")])
    monkeypatch.setenv("MJOLNIR_VLLM_SCALES", str(write_scales(tmp_path, 2, 64, "head")))
    for layer_name, heads, message in (
        ("model.layers.4.attn", {}, "the scales file has no layer 4; it has 3 … 3"),
        ("attn", {}, "attn: scales are by layer, and this name has not one number"),
        ("a.3.b.4", {}, "a.3.b.4: scales are by layer, and this name has not one number"),
        ("l.3", {"num_kv_heads": 3}, "l.3: the scales are of 2 KV heads of 64, and the layer has 3 of 64 on each of 1"),
        ("l.3", {"head_size": 128}, "the layer has 2 of 128"),
    ):
        with pytest.raises(ValueError, match=message):
            make_builder([make_layer(layer_name, backend, kv_cache_dtype="e2m3", **heads)])


def config(**fields: Any) -> Any:
    return lambda: SimpleNamespace(**{"model_config": None, "speculative_config": None} | fields)


def test_caches_of_our_own_are_not_transferred(backend, monkeypatch) -> None:
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", config(kv_transfer_config="a connector"))
    with pytest.raises(ValueError, match=r"nvfp4 caches cannot be transferred \(kv_transfer_config\)"):
        make_layer("l.3", backend, kv_cache_dtype="nvfp4")
    assert make_layer("l.3", backend, kv_cache_dtype="fp8").impl.mjolnir_reason is None


def test_prefill_from_copies_needs_a_fallback_that_takes_them(backend, monkeypatch) -> None:
    monkeypatch.setenv("MJOLNIR_VLLM_FALLBACK", "FLASHINFER")
    message = "MJOLNIR_VLLM_FALLBACK must be one of FLASH_ATTN, TRITON_ATTN for nvfp4 caches, .* got FLASHINFER"
    with pytest.raises(ValueError, match=message):
        make_layer("l.3", backend, kv_cache_dtype="nvfp4")


def test_sleep_mode_is_a_reason(backend, monkeypatch) -> None:
    model = SimpleNamespace(enable_sleep_mode=True)
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", config(model_config=model))
    assert make_layer("l.3", backend).impl.mjolnir_reason == "sleep mode"
    with pytest.raises(ValueError, match="only Mjolnir reads nvfp4 caches here, and not for this layer: sleep mode"):
        make_layer("l.3", backend, kv_cache_dtype="nvfp4")


@pytest.mark.parametrize(
    "draft", ["draft_model.model.layers.3.attn", "mtp.layers.3.attn", "flagged.3", "model.layers.100.attn"]
)
def test_a_draft_model_does_not_take_the_targets_scales(backend, monkeypatch, tmp_path, draft) -> None:
    monkeypatch.setenv("MJOLNIR_VLLM_SCALES", str(write_scales(tmp_path, 2, 64, "head")))
    for name in OWN_NAMES:
        layer = make_layer(draft, backend, kv_cache_dtype=name)
        layer.is_draft_layer = draft.startswith("flagged")
        if name == "e2m3":
            with pytest.raises(ValueError, match=f"{draft}: the scales file is not of a draft model"):
                make_builder([layer])
            with pytest.raises(RuntimeError, match="no builder has read the scales of its e2m3 cache"):
                layer.impl.do_kv_cache_update(layer, torch.zeros(1, 2, 64), torch.zeros(1, 2, 64), layer.kv_cache, None)
        else:
            make_builder([layer])
            assert layer.impl.mjolnir_scales is None


def test_a_layer_that_reads_anothers_cache_takes_its_scales(backend, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("MJOLNIR_VLLM_SCALES", str(write_scales(tmp_path, 2, 64, "head")))
    writer, reader = (make_layer(f"l.{i}", backend, kv_cache_dtype="e2m3") for i in (3, 5))
    reader.kv_sharing_target_layer_name = "l.3"
    make_builder([writer, reader])
    torch.testing.assert_close(reader.impl.mjolnir_scales.k_write, writer.impl.mjolnir_scales.k_write)


def test_the_fallback_is_not_asked_about_our_own_caches(backend, monkeypatch) -> None:
    """Whether FlashAttention reads a quantised cache does not matter where it gets 16-bit copies."""

    def refuse(cls, head_size, dtype, kv_cache_dtype, *more) -> str | None:
        return None if kv_cache_dtype == "auto" else f"no {kv_cache_dtype}"

    monkeypatch.setattr(standins.Backend, "supports_combination", classmethod(refuse), raising=False)
    for name, reason in (("auto", None), ("nvfp4", None), ("e2m3", None), ("fp8", "no fp8")):
        assert backend.supports_combination(128, torch.bfloat16, name, 16, False) == reason


def test_another_builder_leaves_a_layer_its_scales(backend, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("MJOLNIR_VLLM_SCALES", str(write_scales(tmp_path, 2, 64, "channel")))
    layer = make_layer("l.3", backend, kv_cache_dtype="e2m3")
    make_builder([layer])
    first = layer.impl.mjolnir_scales
    make_builder([layer])
    assert first is not None and layer.impl.mjolnir_scales is first


@pytest.mark.parametrize("kind", ["head", "channel"])
@pytest.mark.parametrize("heads, ranks", [(4, 1), (4, 2), (4, 4), (2, 4)])
def test_ranks_have_the_scales_of_their_heads(tmp_path: Path, kind: str, heads: int, ranks: int) -> None:
    """All ranks' together are the whole model's; a KV head that several ranks hold comes once for each."""
    file = ScalesFile.load(write_scales(tmp_path, heads, 64, kind))
    group, local = 3 if ranks <= heads else 2, max(1, heads // ranks)
    shape = LayerShape(group * local, local, 64, "e2m3", torch.bfloat16)
    parts = [own_cache.scales_of_layer(file, "l.3", shape, rank, ranks, torch.device("cpu")) for rank in range(ranks)]
    owners = [rank * heads // ranks + i for rank in range(ranks) for i in range(local)]
    for side, seed in (("k", 7), ("v", 8)):
        amax = torch.tensor(amax_of(heads, 64, kind, seed))[owners]
        write = torch.cat([getattr(part, f"{side}_write") for part in parts])
        torch.testing.assert_close(write, amax / 7.5)
        factors = [getattr(part, "q_mul" if side == "k" else "o_mul") for part in parts]
        descale = torch.cat([getattr(part, f"{side}_scale") for part in parts])
        if kind == "head":
            assert factors == [None] * ranks
            torch.testing.assert_close(descale, amax / 7.5)
        else:
            whole = (descale[:, None] * torch.cat(factors).unflatten(0, (len(owners), group)).amax(1)) * 7.5
            torch.testing.assert_close(whole, amax)


def test_the_plugin_registers_e2m3_once(monkeypatch: pytest.MonkeyPatch) -> None:
    standins.install(monkeypatch)
    known: dict[str, Any] = {}
    config = sys.modules["vllm.config"]
    cache, interface = types.ModuleType("vllm.config.cache"), types.ModuleType("vllm.v1.kv_cache_interface")
    vars(cache).update(
        is_known_kv_cache_dtype=lambda name: name in known,
        register_kv_cache_dtype=lambda name: lambda handler: known.setdefault(name, handler()),
    )
    vars(interface).update(KVQuantMode=SimpleNamespace(CUSTOM="custom"))
    plugin.register()  # 0.26: no such registry
    assert not known
    monkeypatch.setitem(sys.modules, "vllm.config.cache", cache)
    monkeypatch.setattr(config, "cache", cache, raising=False)
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_cache_interface", interface)
    plugin.register()
    handler = known["e2m3"]
    plugin.register()
    assert known == {"e2m3": handler}
    assert (handler.name, handler.torch_dtype(), handler.quant_mode()) == ("e2m3", torch.uint8, "custom")


def test_layers_that_only_a_fallback_could_do_are_refused(backend) -> None:
    with pytest.raises(
        ValueError, match="only Mjolnir reads nvfp4 caches here, and not for this layer: sliding window of 8"
    ):
        make_layer("l", backend, kv_cache_dtype="nvfp4", sliding_window=8)
    layer = make_layer("l", backend, kv_cache_dtype="nvfp4", num_heads=32, num_kv_heads=1)
    with pytest.raises(ValueError, match="it cannot decode every layer: 4 query tokens per request"):
        make_builder([layer], drafts=3)


def test_the_backend_allocates_what_it_splits(backend, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(backend.supports_kv_cache_dtype(name) for name in ("nvfp4", "e2m3", "fp8"))
    assert backend.get_kv_cache_shape(7, 16, 2, 128, cache_dtype_str="nvfp4") == (7, 2, 16, 144)
    assert backend.get_kv_cache_shape(7, 16, 2, 128, cache_dtype_str="e2m3") == (7, 2, 16, 192)


@pytest.mark.parametrize("name", OWN_NAMES)
def test_every_nth_step_is_shadowed(backend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setenv("MJOLNIR_VLLM_SHADOW", "1")
    monkeypatch.setenv("MJOLNIR_VLLM_SCALES", str(write_scales(tmp_path, 2, 64, "channel")))
    layer = make_layer("l.3", backend, kv_cache_dtype=name)
    builder = make_builder([layer])
    key = torch.randn(48, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    layer.impl.do_kv_cache_update(layer, key, key, layer.kv_cache, torch.arange(16, 64))
    attend(layer, builder.build(0, make_common([1], [40])), make_query(layer, 1))
    assert COUNTERS.snapshot() == {"decode": 1, "shadow check": 1}


def test_copies_hold_no_more_than_the_longest_request() -> None:
    """SimpleNamespace stands for the fallback's metadata; only live pages are copied."""
    cache = torch.zeros(10, 1, 16, own_cache.row_bytes("nvfp4", 64), dtype=torch.uint8)
    scales = LayerScales(*[torch.tensor(1.0)] * 4, None, None)
    table = torch.tensor([[3, 4, 2**30], [5, -1, -1]], dtype=torch.int32)
    metadata = SimpleNamespace(
        max_seq_len=20,
        block_table=table,
        seq_lens=torch.tensor([20, 3], dtype=torch.int32),
        scheduler_metadata="fp8",
        prefix_scheduler_metadata="fp8",
    )
    shape = LayerShape(2, 1, 64, "nvfp4", torch.bfloat16)
    copied, changed = own_cache.expand(own_cache.split(cache, "nvfp4", 64), scales, shape, metadata)
    assert copied.shape == (4, 1, 16, 128) and copied.dtype == torch.bfloat16
    assert changed.block_table.tolist() == [[0, 1], [2, 3]]
    assert changed.scheduler_metadata is None and changed.prefix_scheduler_metadata is None
    assert metadata.block_table is table and metadata.scheduler_metadata == "fp8"
