"""vLLM engines in this process, as the proof uses them."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
# The engine lives in this process, so that its counters and caches can be looked at.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")

OURS = "CUSTOM"


class Engine:
    """A vLLM engine and how long it took to start.

    Args:
        model: a folder.
        backend: a name that ``--attention-backend`` takes.
        graphs: "none", "decode" (full CUDA graphs of decode steps, nothing compiled) or "default" (what vLLM does by
            itself: torch.compile, full and piecewise graphs).
        capture_sizes: tokens per captured graph.
        drafts: n-gram draft tokens; 0: no speculation.
    """

    def __init__(
        self,
        model: Path,
        backend: str,
        kv_cache_dtype: str,
        *,
        graphs: str = "decode",
        capture_sizes: Sequence[int] = (),
        drafts: int = 0,
        **more: Any,
    ) -> None:
        from vllm import LLM

        args: dict[str, Any] = {"enforce_eager": graphs == "none"}
        if graphs == "decode":
            args["compilation_config"] = {
                "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(capture_sizes),
            }  # fmt: skip
        if drafts:
            args["speculative_config"] = {
                "method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 4, "prompt_lookup_min": 2,
            }  # fmt: skip
        start = time.perf_counter()
        try:
            self.llm = LLM(
                model=str(model), skip_tokenizer_init=True, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype,
                attention_config={"backend": backend}, enable_prefix_caching=False, disable_log_stats=True, seed=0,
                **(args | more),
            )  # fmt: skip
        except BaseException:
            clean_up()
            raise
        self.start_s = time.perf_counter() - start
        config = self.llm.llm_engine.vllm_config
        self.facts = {
            "backend": backend,
            "kv_cache_dtype": kv_cache_dtype,
            "graphs": str(config.compilation_config.cudagraph_mode).rpartition(".")[2],
            "model_runner": 2 if config.use_v2_model_runner else 1,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "drafts": drafts,
            "page_size": config.cache_config.block_size,
            "start_s": round(self.start_s, 1),
        }

    @property
    def worker(self) -> Any:
        """vLLM's worker, in this process."""
        return self.llm.collective_rpc(lambda worker: worker)[0]

    def layers(self) -> list[Any]:
        """The attention layers."""
        context = self.worker.model_runner.vllm_config.compilation_config.static_forward_context
        return [layer for layer in context.values() if hasattr(layer, "attn_backend")]

    def close(self) -> None:
        """Give the memory back, for the next engine."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        clean_up()


def clean_up() -> None:
    """Of what an engine leaves in a process: memory, and groups of processes, with which the next would not start."""
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


def step_counts() -> dict[str, int]:
    """Mjolnir's counters of this process."""
    from mjolnir.integrations.vllm.counters import COUNTERS

    return COUNTERS.snapshot()


def reset_step_counts() -> None:
    from mjolnir.integrations.vllm.counters import COUNTERS

    COUNTERS.reset()
