"""The backend inside vLLM's own Python code: configuration, layers, groups, metadata and forward context are vLLM's.

`make vllm-check` brings vLLM's sources, without its compiled extensions, and runs this for each release. Three compiled
functions are replaced: the cache write, FlashAttention and the quantisation of queries. What that cannot show, the
model runners' own loops and CUDA graphs, is left to the GPU (scripts/vllm_proof.sh).
"""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_standins as standins

pytest.importorskip(
    "vllm.engine.arg_utils", reason="needs vLLM's Python sources: make vllm-check", exc_type=ImportError
)

from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.layers.attention import Attention  # noqa: E402
from vllm.v1.attention.backend import (  # noqa: E402
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends import flash_attn  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend  # noqa: E402
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata  # noqa: E402
from vllm.v1.worker.utils import AttentionGroup, select_common_block_size  # noqa: E402

from mjolnir.integrations.vllm import own_cache, plugin  # noqa: E402
from mjolnir.integrations.vllm.builder import STEP  # noqa: E402
from mjolnir.integrations.vllm.counters import COUNTERS  # noqa: E402
from mjolnir.integrations.vllm.eligibility import OWN_NAMES  # noqa: E402
from mjolnir.verify.compare import ROW_TOLERANCE, row_errors  # noqa: E402

HEADS, KV_HEADS, HEAD_SIZE, PAGE, PAGES = 4, 2, 64, 16, 40
FP8_QUERY_ERROR, BF16_COPY_ERROR = 0.08, 4e-3
OWN_HOOKS = ("get_name", "get_builder_cls", "get_impl_cls", "get_supported_kernel_block_sizes",
             "supports_kv_cache_dtype", "supports_combination", "get_kv_cache_shape", "customize_spec")  # fmt: skip
HAS_NEW_NAMES = hasattr(AttentionBackendEnum, "register")
OWN_DTYPES = OWN_NAMES if HAS_NEW_NAMES else ("nvfp4",)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of Qwen3's, as small as it gets."""
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HEADS * HEAD_SIZE,
        "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_SIZE, "vocab_size": 100, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "tie_word_embeddings": True,
        "dtype": "bfloat16", "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str) -> None:
    """For e2m3 a scales file of both layers, per channel: powers of two, so that 16-bit copies are exact."""
    if kv_cache_dtype != "e2m3":
        return
    amax = [[7.5 * 2.0 ** (channel % 3 - 1) for channel in range(HEAD_SIZE)]] * KV_HEADS
    sides = {"k_amax": amax, "v_amax": amax}
    file = {"kind": "mjolnir-kv-scales", "version": 1, "num_kv_heads": KV_HEADS, "head_size": HEAD_SIZE}
    (tmp_path / "scales.json").write_text(json.dumps(file | {"layers": {"0": sides, "1": sides}}))
    monkeypatch.setenv("MJOLNIR_VLLM_SCALES", str(tmp_path / "scales.json"))
    monkeypatch.setattr("mjolnir.integrations.vllm.compat.tensor_parallel", lambda: (0, 1))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.register()
    COUNTERS.reset()
    monkeypatch.setattr(flash_attn, "reshape_and_cache_flash", write_cache, raising=False)
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", attention, raising=False)
    monkeypatch.setattr(flash_attn, "flash_attn_supports_kv_cache_dtype", lambda *_, **__: True, raising=False)
    monkeypatch.setattr("vllm._custom_ops.scaled_fp8_quant", standins.scaled_fp8_quant)


def write_cache(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale) -> None:
    pages, rows = slot_mapping // PAGE, slot_mapping % PAGE
    for new, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        new = new[: len(slot_mapping)]
        if kv_cache_dtype == "fp8":
            cache[pages, rows] = (new.float() / scale).to(standins.FP8).view(torch.uint8)
        else:
            cache[pages, rows] = new


def attention(*, q, k, v, out, cu_seqlens_q, seqused_k, softmax_scale, causal, block_table, q_descale, k_descale,
              v_descale, **_: Any) -> None:  # fmt: skip
    """FlashAttention's paged call, by the stand-in fallback, which attends by the oracle."""
    assert causal is True
    layer = SimpleNamespace(
        _q_scale=q_descale[0, 0] if q_descale is not None else 1.0,
        _k_scale=k_descale[:1, :1],
        _v_scale=v_descale[:1, :1],
    )
    cache = (
        torch.cat([k.view(torch.uint8), v.view(torch.uint8)], -1) if k.element_size() == 1 else torch.cat([k, v], -1)
    )
    impl = standins.Impl(q.shape[1], q.shape[2], softmax_scale, k.shape[2], None, None,
                         "fp8" if k.element_size() == 1 else "auto", None, "decoder", None)  # fmt: skip
    metadata = standins.Metadata(len(q), cu_seqlens_q, seqused_k, block_table, False)
    impl.forward(layer, q, None, None, cache.transpose(1, 2), metadata, out)


class Served:
    """Two attention layers of vLLM's, their group and its builder, and pages for three requests."""

    def __init__(self, folder: Path, kv_cache_dtype: str, drafts: int = 0, **layer_args: Any) -> None:
        speculative = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3}
        self.config = EngineArgs(
            model=str(folder), skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", block_size=PAGE,
            kv_cache_dtype=kv_cache_dtype, attention_backend="CUSTOM", max_model_len=256, max_num_seqs=8,
            max_num_batched_tokens=256, speculative_config=speculative if drafts else None,
        ).create_engine_config()  # fmt: skip
        self.backend = self.config.attention_config.backend.get_class()
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with set_current_vllm_config(self.config):
                self.layers = {
                    name: Attention(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, num_kv_heads=KV_HEADS, prefix=name,
                                    cache_config=self.config.cache_config, attn_backend=self.backend, **layer_args)
                    for name in ("model.layers.0.attn", "model.layers.1.attn")
                }  # fmt: skip
                self.spec = next(iter(self.layers.values())).get_kv_cache_spec(self.config)
                self.group = AttentionGroup(self.backend, list(self.layers), self.spec, 0)
                self.group.create_metadata_builders(self.config, torch.device("cpu"), kernel_block_size=PAGE)
        finally:
            torch.set_default_dtype(dtype)
        self.builder = self.group.get_metadata_builder(0)
        row = own_cache.row_bytes(kv_cache_dtype, HEAD_SIZE) if kv_cache_dtype in OWN_NAMES else 2 * HEAD_SIZE
        for layer in self.layers.values():
            layer.kv_cache = torch.zeros(PAGES, KV_HEADS, PAGE, row, dtype=layer.kv_cache_torch_dtype)
            layer.impl.vllm_flash_attn_version = 3
        self.lens = [0, 0, 0]
        self.table = torch.randperm(PAGES, generator=torch.Generator().manual_seed(0))[:36].view(3, 12).int()
        self.gen = torch.Generator().manual_seed(1)

    def step(self, query_lens: list[int], padding: int = 0) -> tuple[float, float]:
        """Every layer attends to the requests that have query tokens, the first ones. Returns the worst rows of the
        part that decoded here and of the rest."""
        live = len(query_lens)
        self.lens[:live] = [have + new for have, new in zip(self.lens, query_lens, strict=False)]
        common = standins.make_common(query_lens + [0] * padding, self.lens[:live] + [0] * padding)
        table = torch.zeros(live + padding, 12, dtype=torch.int32)
        table[:live] = self.table[:live]
        tokens = sum(query_lens) + padding * max(query_lens)
        positions = [have - new + i for have, new in zip(self.lens, query_lens, strict=False) for i in range(new)]
        owners = [request for request, new in enumerate(query_lens) for _ in range(new)]
        slots = [
            int(self.table[owner, at // PAGE]) * PAGE + at % PAGE for owner, at in zip(owners, positions, strict=True)
        ]
        slot_mapping = torch.tensor(slots, dtype=torch.int64)
        with set_current_vllm_config(self.config):
            metadata = build_attn_metadata(
                attn_groups=[[self.group]], num_reqs=live + padding, num_tokens=tokens,
                query_start_loc_gpu=common.query_start_loc, query_start_loc_cpu=common.query_start_loc_cpu,
                max_query_len=max(query_lens), seq_lens=common.seq_lens, max_seq_len=max(self.lens),
                block_tables=[table], slot_mappings=slot_mapping[None],
                kv_cache_config=SimpleNamespace(kv_cache_groups=[None]),
                seq_lens_cpu_upper_bound=common.seq_lens, positions=torch.tensor(positions),
                is_prefilling=torch.zeros(live + padding, dtype=torch.bool),
            )  # fmt: skip
        step = getattr(metadata[self.group.layer_names[0]], STEP, None)
        here = min(step.part.num_tokens, sum(query_lens)) if step is not None else 0
        worst = (0.0, 0.0)
        for name, layer in self.layers.items():
            shapes = ((HEADS, 1.0), (KV_HEADS, 1.0), (KV_HEADS, 1.0))
            q, k, v = (torch.randn(tokens, heads * HEAD_SIZE, generator=self.gen).bfloat16() for heads, _ in shapes)
            slots_of = {name: slot_mapping}
            with set_forward_context(metadata, self.config, num_tokens=tokens, slot_mapping=slots_of):
                out = layer(q, k, v).view(tokens, HEADS, HEAD_SIZE)
            common.block_table_tensor = table
            want = standins.expected(layer, common, q.view(tokens, HEADS, HEAD_SIZE))
            errors = row_errors(out[: sum(query_lens)], want).amax(1)
            ours, rest = errors[:here], errors[here:]
            worst = tuple(max(a, float(b.max()) if len(b) else 0.0) for a, b in zip(worst, (ours, rest), strict=True))
        return worst


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "auto", *OWN_DTYPES])
def test_a_served_batch(model: Path, scales: None, kv_cache_dtype: str) -> None:
    """Prefill, decode, drafts of unequal lengths, a prefill beside decodes, padding: vLLM's layers, through vLLM's ops,
    over a cache that the fallback wrote."""
    served = Served(model, kv_cache_dtype, drafts=2)
    assert all(layer.query_quant is None for layer in served.layers.values())
    copies = dict.fromkeys(OWN_NAMES, BF16_COPY_ERROR)
    rest_limit = ({"fp8": FP8_QUERY_ERROR} | copies).get(kv_cache_dtype, ROW_TOLERANCE)
    for query_lens, padding, path in (
        ([20, 5], 0, "fallback: no request with at most 3 query tokens leads the step"),
        ([1, 1], 0, "decode"),
        ([3, 3], 0, "decode"),
        ([3, 1], 0, "ragged"),
        ([1, 3, 40], 0, "split"),
        ([1, 1, 1], 1, "decode"),
    ):
        COUNTERS.reset()
        ours, rest = served.step(query_lens, padding)
        assert COUNTERS.snapshot() == {path: 1}
        assert ours <= ROW_TOLERANCE and rest <= rest_limit


@pytest.mark.parametrize("kv_cache_dtype", OWN_DTYPES)
def test_vllm_allocates_the_pages_of_our_own_caches(model: Path, scales: None, kv_cache_dtype: str) -> None:
    served = Served(model, kv_cache_dtype)
    spec, page = served.spec, PAGE * KV_HEADS * own_cache.row_bytes(kv_cache_dtype, HEAD_SIZE)
    if HAS_NEW_NAMES:
        spec = served.backend.customize_spec(spec)
        assert served.backend.customize_spec(spec) == spec
        plain = Served(model, "fp8")
        assert plain.backend.customize_spec(plain.spec) == plain.spec
    else:
        fallback, sizes = flash_attn.FlashAttentionBackend, (9, PAGE, KV_HEADS, HEAD_SIZE)
        assert math.prod(served.backend.get_kv_cache_shape(*sizes, cache_dtype_str=kv_cache_dtype)) == 9 * page
        assert served.backend.get_kv_cache_block_dim(*sizes[1:], cache_dtype_str=kv_cache_dtype) == 0
        assert served.backend.get_kv_cache_shape(*sizes) == fallback.get_kv_cache_shape(*sizes)
    assert spec.page_size_bytes == page


def test_layers_that_do_not_qualify_are_the_fallbacks(model: Path) -> None:
    served = Served(model, "fp8", per_layer_sliding_window=512)
    layer = next(iter(served.layers.values()))
    assert layer.impl.mjolnir_reason == "sliding window of 512"
    assert (layer.query_quant is not None) == layer.impl.supports_quant_query_input
    assert served.builder.decoder is None


def test_what_a_draft_and_a_capture_build(model: Path) -> None:
    served = Served(model, "fp8", drafts=2)
    served.step([4, 4])
    common = standins.make_common([1, 1], [5, 5])
    real = CommonAttentionMetadata(**{
        name: getattr(common, name)
        for name in ("query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens",
                     "max_query_len", "max_seq_len", "block_table_tensor", "slot_mapping", "causal")
    })  # fmt: skip
    with set_current_vllm_config(served.config):
        COUNTERS.reset()
        captured = served.builder.build_for_cudagraph_capture(real)
        drafted = served.builder.build_for_drafting(real, 1)
    assert all(getattr(metadata, STEP).part.is_whole for metadata in (captured, drafted))
    assert COUNTERS.snapshot() == {"decode": 1, "capture decode": 1}
    assert flash_attn.FlashAttentionMetadataBuilder.supports_update_block_table
    assert not served.builder.supports_update_block_table
    assert (
        served.builder.get_cudagraph_support(served.config, served.spec).value <= AttentionCGSupport.UNIFORM_BATCH.value
    )
    if HAS_NEW_NAMES:
        assert served.builder.supports_draft_decode_metadata_update
        served.builder.update_draft_decode_metadata(drafted)
        assert getattr(drafted, STEP).plans


def test_layers_whose_metadata_is_rewritten_are_the_fallbacks(model: Path) -> None:
    """As vLLM does for layers that share another's cache (kv_sharing_fast_prefill)."""
    served = Served(model, "fp8")
    group = AttentionGroup(
        create_fast_prefill_custom_backend("FastPrefill", served.backend), list(served.layers), served.spec, 0
    )
    with set_current_vllm_config(served.config):
        group.create_metadata_builders(served.config, torch.device("cpu"), kernel_block_size=PAGE)
    assert group.get_metadata_builder(0).decoder is None
    reason = "metadata that FastPrefillAttentionBuilder rewrites"
    assert {layer.impl.mjolnir_reason for layer in served.layers.values()} == {reason}


def test_it_is_chosen_by_name(model: Path) -> None:
    for name in ("CUSTOM", "MJOLNIR") if HAS_NEW_NAMES else ("CUSTOM",):
        args = EngineArgs(model=str(model), skip_tokenizer_init=True, attention_backend=name, kv_cache_dtype="fp8")
        chosen = args.create_engine_config().attention_config.backend
        assert f"{chosen.get_class().__module__}.{chosen.get_class().__qualname__}" == plugin.BACKEND_PATH
        assert chosen.get_path() == plugin.BACKEND_PATH
        assert chosen.get_class().full_cls_name() == tuple(plugin.BACKEND_PATH.rsplit(".", 1))


def test_what_it_supports_is_the_fallbacks_to_say() -> None:
    """Every hook that vLLM asks a backend for, but its name, classes and page sizes, is the fallback's own."""
    backend, fallback = AttentionBackendEnum.CUSTOM.get_class(), flash_attn.FlashAttentionBackend
    for name, _ in inspect.getmembers(AttentionBackend, callable):
        if name.startswith("__") or name in OWN_HOOKS:
            continue
        ours, theirs = inspect.getattr_static(backend, name), inspect.getattr_static(fallback, name)
        assert ours is theirs, name


@pytest.mark.parametrize("block_size, page_size", [(16, 16), (64, 64), (48, 16), (528, 16), (2 * 528, 32), (1024, 256)])
def test_odd_blocks_are_cut(block_size: int, page_size: int) -> None:
    """As vLLM cuts the blocks of hybrid models, whose size their state decides."""
    backend = AttentionBackendEnum.CUSTOM.get_class()
    specs = ([None],) if HAS_NEW_NAMES else ()
    assert select_common_block_size(block_size, [backend], *specs) == page_size
    assert backend.supports_block_size(block_size)


def test_padded_blocks_are_left_whole() -> None:
    """0.26 does not say which are."""
    backend = AttentionBackendEnum.CUSTOM.get_class()
    if HAS_NEW_NAMES:
        assert select_common_block_size(528, [backend], [SimpleNamespace(page_size_padded=999_424)]) == 528
        assert select_common_block_size(528, [backend], [SimpleNamespace(page_size_padded=None)]) == 16


def test_the_standins_have_vllms_signatures() -> None:
    fields = CommonAttentionMetadata.__dataclass_fields__
    ours = {name for name in standins.CommonAttentionMetadata.__dataclass_fields__ if name != "_seq_lens_cpu"}
    assert ours <= fields.keys()
    assert ({"_seq_lens_cpu", "_num_computed_tokens_cpu"} <= fields.keys()) != HAS_NEW_NAMES  # gone in 0.33
    for stand_in, real, names in (
        (standins.Builder, AttentionMetadataBuilder,
         ("__init__", "build", "build_for_cudagraph_capture", "get_cudagraph_support")),
        (standins.Impl, AttentionImpl, ("fused_output_quant_supported", "forward")),
    ):  # fmt: skip
        for name in names:
            want = list(inspect.signature(getattr(real, name)).parameters)
            assert list(inspect.signature(getattr(stand_in, name)).parameters) == want, name
    init = list(inspect.signature(AttentionImpl.__init__).parameters)
    assert [name for name in inspect.signature(standins.Impl.__init__).parameters if name != "extra"] == init
    members = {member.name: member.value for member in AttentionCGSupport}
    assert members == {member.name: member.value for member in standins.CGSupport}
    from vllm import _custom_ops

    source = inspect.getsource(_custom_ops)
    assert "def scaled_fp8_quant(" in source and "group_shape: tuple[int, int] | None" in source


def test_fields_that_a_split_cuts_are_known() -> None:
    """Every field of a step is cut, kept or refused by name; a release with another name for one must not pass."""
    from mjolnir.integrations.vllm import compat

    fields = set(CommonAttentionMetadata.__dataclass_fields__)
    for names in (compat._RESET, compat._KEPT, compat._PER_TOKEN, compat._CACHES):
        assert names <= fields
    assert {
        "seq_lens",
        "block_table_tensor",
        "seq_lens_cpu_upper_bound",
        "is_prefilling",
    } <= fields & compat._PER_REQUEST
