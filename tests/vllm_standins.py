"""Stand-ins for what Mjolnir's backend meets of vLLM: modules, a fallback backend, layers and steps.

They carry the names and signatures of vLLM 0.26; tests/test_vllm_sources.py holds those against vLLM's own sources.
The fallback attends by the oracle, request after request, so every path can be checked for its values.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import sys
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mjolnir.formats import get_format
from mjolnir.integrations.vllm import own_cache
from mjolnir.integrations.vllm.eligibility import OWN_NAMES
from mjolnir.reference import decode_attention_oracle

FP8 = torch.float8_e4m3fn


class CGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


@dataclasses.dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True
    logits_indices_padded: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    is_prefilling: torch.Tensor | None = None
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    _seq_lens_cpu: torch.Tensor | None = None
    _num_computed_tokens_cache: torch.Tensor | None = None

    @property
    def seq_lens_cpu(self) -> torch.Tensor:
        raise AssertionError("reading seq_lens_cpu waits for the device")


@dataclasses.dataclass
class Metadata:
    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    fast_build: bool
    max_seq_len: int = 0


class Builder:
    reorder_batch_threshold: int | None = None
    supports_update_block_table = True
    support = CGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.layer_names = layer_names

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> CGSupport:
        return cls.support

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        common = common_attn_metadata
        return Metadata(
            common.num_actual_tokens, common.query_start_loc, common.seq_lens, common.block_table_tensor, fast_build,
            common.max_seq_len,
        )  # fmt: skip

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Metadata:
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)

    def update_draft_decode_metadata(self, metadata: Metadata) -> None:
        pass


class Impl:
    dcp_world_size = pcp_world_size = 1

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: Any,
                 sliding_window: int | None, kv_cache_dtype: str, logits_soft_cap: float | None, attn_type: str,
                 kv_sharing_target_layer_name: str | None, **extra: Any) -> None:  # fmt: skip
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.supports_quant_query_input = True
        self.calls: list[int] = []  # tokens of each call

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return True

    def forward(self, layer: Any, query: torch.Tensor, key: Any, value: Any, kv_cache: torch.Tensor,
                attn_metadata: Any, output: torch.Tensor, output_scale: Any = None,
                output_block_scale: Any = None) -> torch.Tensor:  # fmt: skip
        if attn_metadata is None:
            return output.fill_(0)
        self.calls.append(attn_metadata.num_actual_tokens)
        fmt = {"auto": "bf16"}.get(self.kv_cache_dtype, self.kv_cache_dtype)
        q_scale = 1.0
        if fmt == "fp8":
            assert self.supports_quant_query_input and query.dtype == FP8, f"{self.kv_cache_dtype}: {query.dtype}"
            q_scale = layer._q_scale
        k_cache, v_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        starts = attn_metadata.query_start_loc.tolist()
        for request, (start, end) in enumerate(itertools.pairwise(starts)):
            if end > start:
                out, _ = decode_attention_oracle(
                    query[start:end].float() * q_scale, k_cache, v_cache, layer._k_scale, layer._v_scale,
                    attn_metadata.block_table[request : request + 1], attn_metadata.seq_lens[request : request + 1],
                    q_len=end - start, softmax_scale=self.scale, kv_format=fmt,
                )  # fmt: skip
                output[start:end] = out.to(output.dtype)
        return output


class Backend:
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype not in OWN_NAMES

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [types.SimpleNamespace(base=16)]

    @staticmethod
    def get_builder_cls() -> Any:
        return Builder

    @staticmethod
    def get_impl_cls() -> Any:
        return Impl


class BackendEnum(enum.Enum):
    FLASH_ATTN = "vllm_standins.Backend"
    CUSTOM = None

    def is_overridden(self) -> bool:
        return self in OVERRIDES

    def get_path(self) -> str:
        return OVERRIDES.get(self, self.value)

    def get_class(self) -> Any:
        module, name = self.get_path().rsplit(".", 1)
        return getattr(sys.modules[module], name)


OVERRIDES: dict[Any, str] = {}
RANK = [0, 1]
"""Of tensor parallelism, of how many."""


def scaled_fp8_quant(
    x: torch.Tensor, scale: torch.Tensor, group_shape: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    assert group_shape is None and x.dim() == 2
    return get_format("fp8").encode(x.float(), scale), scale


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-ins where Mjolnir imports vLLM from."""
    OVERRIDES.clear()
    RANK[:] = [0, 1]
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: None},
        "vllm._custom_ops": {"scaled_fp8_quant": scaled_fp8_quant},
        "vllm.distributed": {
            "get_tensor_model_parallel_rank": lambda: RANK[0],
            "get_tensor_model_parallel_world_size": lambda: RANK[1],
        },
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": BackendEnum,
            "register_backend": lambda backend, class_path: OVERRIDES.__setitem__(backend, class_path),
        },
    }
    for name, contents in modules.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


@dataclasses.dataclass
class Layer:
    layer_name: str
    attn_backend: Any
    impl: Any
    head_size: int
    kv_cache_dtype: str
    kv_cache: torch.Tensor
    _q_scale: torch.Tensor
    _k_scale: torch.Tensor
    _v_scale: torch.Tensor

    def get_attn_backend(self) -> Any:
        return self.attn_backend


def make_layer(
    name: str,
    backend: Any,
    *,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_size: int = 64,
    page_size: int = 16,
    num_pages: int = 60,
    kv_cache_dtype: str = "fp8",
    seed: int = 0,
    **layer_args: Any,
) -> Layer:
    """A layer as vLLM makes one, over a random cache (pages, heads, page_size, 2 · head_size)."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    args = {"alibi_slopes": None, "sliding_window": None, "logits_soft_cap": None, "attn_type": "decoder"} | layer_args
    positional = [args.pop(name) for name in ("alibi_slopes", "sliding_window")]
    soft_cap, attn_type = args.pop("logits_soft_cap"), args.pop("attn_type")
    try:
        impl = backend.get_impl_cls()(num_heads, head_size, head_size**-0.5, num_kv_heads, *positional, kv_cache_dtype,
                                      soft_cap, attn_type, None, **args)  # fmt: skip
    finally:
        torch.set_default_dtype(dtype)
    gen = torch.Generator().manual_seed(seed)
    cache = torch.randn(num_pages, num_kv_heads, page_size, 2 * head_size, generator=gen)
    if kv_cache_dtype in OWN_NAMES:
        row = {"nvfp4": head_size // 2 + head_size // 16, "e2m3": head_size * 3 // 4}[kv_cache_dtype]
        cache = torch.zeros(num_pages, num_kv_heads, page_size, 2 * row).byte()
    else:
        cache = cache.to(FP8).view(torch.uint8) if kv_cache_dtype == "fp8" else cache.bfloat16()
    scales = (0.03, 0.5, 2.0) if kv_cache_dtype in ("fp8", *OWN_NAMES) else (1.0, 1.0, 1.0)
    return Layer(name, backend, impl, head_size, kv_cache_dtype, cache, *(torch.tensor(scale) for scale in scales))


def make_config(layers: Sequence[Layer], drafts: int = 0, max_num_seqs: int = 16, num_layers: int = 100) -> Any:
    names = types.SimpleNamespace
    return names(
        compilation_config=names(static_forward_context={layer.layer_name: layer for layer in layers}),
        speculative_config=names(num_speculative_tokens=drafts, parallel_drafting=False) if drafts else None,
        scheduler_config=names(max_num_seqs=max_num_seqs),
        model_config=names(get_total_num_hidden_layers=lambda: num_layers),
    )


def make_builder(layers: Sequence[Layer], page_size: int = 16, **config: Any) -> Any:
    spec = types.SimpleNamespace(block_size=page_size)
    names = [layer.layer_name for layer in layers]
    builder_class = layers[0].attn_backend.get_builder_cls()
    return builder_class(spec, names, make_config(layers, **config), torch.device("cpu"))


def make_common(
    query_lens: Sequence[int], seq_lens: Sequence[int], page_size: int = 16, num_tokens: int | None = None
) -> CommonAttentionMetadata:
    """The step of these requests. num_tokens: token rows where a graph pads them."""
    starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
    pages = [-(-length // page_size) for length in seq_lens]
    table = torch.zeros(len(seq_lens), max(pages) + 1, dtype=torch.int32)
    for request, count in enumerate(pages):
        table[request, :count] = torch.arange(count) + 1 + sum(pages[:request])
    tokens = num_tokens or sum(query_lens)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.clone(),
        query_start_loc_cpu=starts,
        seq_lens=lens,
        num_reqs=len(query_lens),
        num_actual_tokens=tokens,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table,
        slot_mapping=torch.arange(tokens),
        positions=torch.arange(tokens),
        is_prefilling=torch.zeros(len(query_lens), dtype=torch.bool),
        seq_lens_cpu_upper_bound=lens.clone(),
    )


def make_query(layer: Layer, tokens: int, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, layer.impl.num_heads, layer.head_size, generator=gen).bfloat16()


def attend(layer: Layer, metadata: Any, query: torch.Tensor) -> torch.Tensor:
    """The layer's output, NaN where nothing is written."""
    output = torch.full_like(query, torch.nan)
    key = query[:, : layer.impl.num_kv_heads]
    layer.impl.forward(layer, query, key, key, layer.kv_cache, metadata, output)
    return output


def expected(layer: Layer, common: CommonAttentionMetadata, query: torch.Tensor) -> torch.Tensor:
    """fp64, of all tokens of live requests."""
    k_blocks = v_blocks = None
    scales = getattr(layer.impl, "mjolnir_scales", None) or own_cache.scales_of_vllm(layer)
    if layer.kv_cache_dtype in OWN_NAMES:
        k_cache, v_cache, k_blocks, v_blocks = own_cache.split(layer.kv_cache, layer.kv_cache_dtype, layer.head_size)
    else:
        k_cache, v_cache = layer.kv_cache.transpose(1, 2).split(layer.head_size, dim=-1)
    fmt = {"auto": "bf16"}.get(layer.kv_cache_dtype, layer.kv_cache_dtype)
    starts = common.query_start_loc_cpu.tolist()
    parts = [
        decode_attention_oracle(
            query[start:end], k_cache, v_cache, scales.k_scale, scales.v_scale,
            common.block_table_tensor[request : request + 1], common.seq_lens[request : request + 1],
            q_len=end - start, softmax_scale=layer.impl.scale, kv_format=fmt,
            k_block_scale=k_blocks, v_block_scale=v_blocks, q_mul=scales.q_mul, o_mul=scales.o_mul,
        )[0]
        for request, (start, end) in enumerate(itertools.pairwise(starts))
        if end > start
    ]  # fmt: skip
    return torch.cat(parts)
