"""A KV connector that says that all but a prompt's last token is cached already, and brings nothing: long contexts
without prefill, whose K and V are whatever the pages hold. The benchmark fills them beforehand."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector


class ContextConnector(DecodeBenchConnector):
    """vLLM's connector for decode benchmarks, without its fill, which writes zeros into fp8 pages."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass
