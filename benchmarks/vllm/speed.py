"""Time per decode step of an 8B-shaped Qwen3-like model through one attention backend, over batches and contexts."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from engine import OURS, Engine, reset_step_counts, step_counts
from report import write_whole

CASES = (
    (1, 8192), (16, 8192), (64, 8192), (16, 65536), (256, 1024), (1, 65536), (1, 1024), (256, 4096), (64, 1024),
    (16, 1024), (4, 65536), (4, 8192),
)  # fmt: skip
"""(requests, tokens of context each), in order of importance."""

PROFILED = ((1, 8192), (16, 8192))
"""Where it is also seen which kernels take the time: last, for a profiler leaves its hooks in the process."""

WARM_STEPS, STEPS, PROFILED_STEPS = 8, 32, 4
CACHE_BYTES = 80 << 30
"""Of K and V, 74 KB a token: for 16 sequences of 64K or 256 of 4K. The same for every backend."""

SIZES = (1, 4, 16, 64, 256)


def fill_caches(engine: Engine) -> None:
    """Random finite e4m3 values in every page: exponents up to 1, as normalised keys and values have them."""
    import torch

    gen = torch.Generator(device="cuda").manual_seed(0)
    for layer in engine.layers():
        pages = layer.kv_cache.view(torch.uint8)
        for part in pages.split(4096):
            codes = torch.randint(0, 64, part.shape, generator=gen, device="cuda", dtype=torch.uint8)
            signs = torch.randint(0, 2, part.shape, generator=gen, device="cuda", dtype=torch.uint8) << 7
            part.copy_(codes | signs)


def start(engine: Engine, batch: int, context: int, steps: int) -> Any:
    """Requests of so many steps beside the ones that warm up, all of them at work. Returns vLLM's engine."""
    import torch
    from vllm import SamplingParams

    core = engine.llm.llm_engine
    # Under async scheduling a step or two are on their way when the last one that counts returns.
    sampling = SamplingParams(temperature=0.0, max_tokens=WARM_STEPS + steps + 8, ignore_eos=True, detokenize=False)
    for i in range(batch):
        ids = [(7 * i + j) % 900 + 4 for j in range(context)]
        core.add_request(f"{batch}x{context}-{i}", {"prompt_token_ids": ids}, sampling)
    for _ in range(WARM_STEPS):
        core.step()
    torch.cuda.synchronize()
    return core


def finish(core: Any) -> None:
    while core.has_unfinished_requests():
        core.step()


def decode(engine: Engine, batch: int, context: int) -> dict[str, Any]:
    """Start the requests, decode, and time the steps in which all of them are at work."""
    import torch

    reset_step_counts()
    core = start(engine, batch, context, STEPS)
    begin = time.perf_counter()
    for _ in range(STEPS):
        core.step()
    torch.cuda.synchronize()
    step_ms = (time.perf_counter() - begin) / STEPS * 1e3
    steps = step_counts()
    finish(core)
    return {
        "batch": batch, "context": context, "itl_ms": round(step_ms, 4),
        "tokens_per_s": round(batch / step_ms * 1e3, 1), "steps": steps,
    }  # fmt: skip


def profile(engine: Engine, batch: int, context: int) -> dict[str, list[float]]:
    """Of the kernels that take most of a step: µs per step and launches per step."""
    import torch

    core = start(engine, batch, context, PROFILED_STEPS)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            core.step()
        torch.cuda.synchronize()
    finish(core)
    totals = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)[:12]
    return {
        event.key[:90]: [round(event.self_device_time_total / PROFILED_STEPS, 1), event.count // PROFILED_STEPS]
        for event in totals
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a folder with a configuration; weights are random")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--kv", default="fp8")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--deadline", type=float, required=True)
    parser.add_argument("--cases", type=int, default=len(CASES))
    args = parser.parse_args()
    engine = Engine(
        args.model, args.backend, args.kv, graphs="decode", capture_sizes=SIZES, load_format="dummy",
        max_model_len=65536 + 256, max_num_seqs=256, max_num_batched_tokens=2048, gpu_memory_utilization=0.8,
        kv_cache_memory_bytes=CACHE_BYTES,
        kv_transfer_config={
            "kv_connector": "ContextConnector", "kv_connector_module_path": "connector", "kv_role": "kv_both",
        },
    )  # fmt: skip
    fill_caches(engine)
    report: dict[str, Any] = {"engine": engine.facts, "rows": [], "errors": {}}
    capacity = engine.layers()[0].kv_cache.shape[0] * engine.facts["page_size"]
    for batch, context in CASES[: args.cases]:
        name = f"{batch}x{context}"
        if batch * (context + 64) > capacity:
            report["errors"][name] = f"{capacity} tokens of cache"
        elif time.time() > args.deadline:
            report["errors"][name] = "out of time"
        else:
            report["rows"].append(decode(engine, batch, context))
        write_whole(args.out, json.dumps(report, indent=1))
    for row in report["rows"]:
        if (row["batch"], row["context"]) in PROFILED and time.time() < args.deadline:
            row["kernels_us_per_step"] = profile(engine, row["batch"], row["context"])
            write_whole(args.out, json.dumps(report, indent=1))
    if args.backend == OURS:
        on = [row for row in report["rows"] if not any(path in row["steps"] for path in ("decode", "ragged"))]
        if on:
            raise SystemExit(f"these did not run on Mjolnir: {on}")


if __name__ == "__main__":
    main()
