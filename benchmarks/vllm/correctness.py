"""Greedy outputs of one model and cache dtype through FLASH_ATTN and through Mjolnir, in several engines.

One engine of a process may capture CUDA graphs, and no more: vLLM keeps one pool of graphs' memory per process, and
PyTorch refuses to capture into it again after the graphs of the first engine are gone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agreement import Generated, compare
from engine import OURS, Engine, reset_step_counts, step_counts
from report import write_whole

PROMPTS, TOKENS, TOP, DRAFTS = 64, 48, 5, 3
SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
STOCK = ("FLASH_ATTN", "TRITON_ATTN")

TEXTS = (
    "The hammer fell, and the mountain answered. ",
    "A list of numbers: one, two, three, four, five, six, seven. ",
    "def add(a, b):\n    return a + b\n\n",
    "In 1905 he published four papers that changed physics. ",
    "Question: What is gravity? Answer: Gravity is ",
)


def random_prompts(vocab: int, max_len: int) -> list[list[int]]:
    """Token ids at random, of lengths 1 to max_len; every second prompt repeats a phrase, so that n-grams match."""
    rng = random.Random(0)
    prompts = []
    for i in range(PROMPTS):
        length = max(1, round(max_len ** ((i + 1) / PROMPTS)))
        phrase = [rng.randrange(4, vocab) for _ in range(7 if i % 2 else length)]
        prompts.append((phrase * (length // len(phrase) + 1))[:length])
    return prompts


def text_prompts(metadata: dict[str, Any], max_len: int) -> list[list[int]]:
    """Text, tokenised as the demo does; of lengths 3 to max_len."""
    from mjolnir.demo.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer(metadata)
    prompts = []
    for i in range(PROMPTS):
        length = max(3, round(max_len ** ((i + 1) / PROMPTS)))
        ids = tokenizer.encode(TEXTS[i % len(TEXTS)] * (length // 6 + 1))
        prompts.append(ids[:length])
    return prompts


def generate(engine: Engine, prompts: list[list[int]]) -> list[Generated]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=TOP, detokenize=False)
    outputs = engine.llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return [
        Generated(
            list(output.outputs[0].token_ids),
            [{token: entry.logprob for token, entry in at.items()} for at in output.outputs[0].logprobs],
        )
        for output in outputs
    ]


@contextlib.contextmanager
def what_the_codec_keeps(name: str) -> Iterator[None]:
    """FLASH_ATTN's write stores what that format keeps of K and V, computed by the codec in PyTorch, in 16 bits."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    from mjolnir.formats import get_format

    fmt, write = get_format(name), FlashAttentionImpl.do_kv_cache_update

    def kept(x: Any, scale: Any) -> Any:
        blocks = fmt.block_scales(x, scale)
        return (fmt.decode(fmt.encode(x, scale, blocks), blocks) * scale).to(x.dtype)

    def do_kv_cache_update(self: Any, layer: Any, key: Any, value: Any, *args: Any) -> None:
        write(self, layer, kept(key, layer._k_scale), kept(value, layer._v_scale), *args)

    FlashAttentionImpl.do_kv_cache_update = do_kv_cache_update
    try:
        yield
    finally:
        FlashAttentionImpl.do_kv_cache_update = write


@contextlib.contextmanager
def queries_rounded() -> Iterator[None]:
    """Mjolnir decodes with queries rounded to fp8, as vLLM's own backends get them over fp8 caches."""
    from mjolnir.integrations.vllm import compat
    from mjolnir.integrations.vllm.impl import DecodeImpl

    decode = DecodeImpl._decode

    def rounded(self: Any, step: Any, layer: Any, query: Any, *args: Any) -> None:
        codes = compat.quantise_query(query, layer)
        decode(self, step, layer, (codes.float() * layer._q_scale).to(query.dtype), *args)

    DecodeImpl._decode = rounded  # type: ignore
    try:
        yield
    finally:
        DecodeImpl._decode = decode  # type: ignore


def main() -> None:
    from mjolnir.integrations.vllm.counters import ON_MJOLNIR

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON: lists of token ids")
    parser.add_argument("--kv", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--deadline", type=float, required=True, help="time.time() after which no engine is started")
    parser.add_argument(
        "--runs",
        required=True,
        help=f"of graphs, eager, default, shadow, rounded, {', '.join(STOCK)}; with +ngram: drafts, +alone: a prompt "
        "at a time",
    )
    parser.add_argument(
        "--codec", action="store_true", help="the reference has a bf16 cache of what the codec keeps of K and V"
    )
    args = parser.parse_args()
    prompts = json.loads(args.prompts.read_text())
    report: dict[str, Any] = {"reference": None, "runs": {}, "errors": {}}

    def save() -> None:
        write_whole(args.out, json.dumps(report, indent=1))

    def run(name: str) -> list[Generated] | None:
        mode, _, way = name.partition("+")
        backend = "FLASH_ATTN" if mode == "reference" else mode if mode in STOCK else OURS
        codec = args.codec and name == "reference"
        graphs = {"graphs": "decode", "default": "default"}.get(mode, "none")
        drafts = DRAFTS if way == "ngram" else 0
        if name == "shadow":
            os.environ["MJOLNIR_VLLM_SHADOW"] = "16"
        engine = None
        try:
            engine = Engine(
                args.model, backend, "bfloat16" if codec else args.kv, graphs=graphs, drafts=drafts,
                capture_sizes=[size * (1 + drafts) for size in SIZES], max_model_len=1024,
                max_num_seqs=1 if way == "alone" else PROMPTS,
                # Prefill comes in pieces, so that steps hold both.
                max_num_batched_tokens=1024, gpu_memory_utilization=0.15, kv_cache_memory_bytes=2 << 30,
            )  # fmt: skip
            reset_step_counts()
            start = time.perf_counter()
            with contextlib.ExitStack() as changes:
                if codec:
                    changes.enter_context(what_the_codec_keeps(args.kv))
                if name == "rounded":
                    changes.enter_context(queries_rounded())
                generated = generate(engine, prompts)
            facts = engine.facts | {"generate_s": round(time.perf_counter() - start, 2), "steps": step_counts()}
        except Exception as error:  # one engine's failure must not take the others' results with it
            traceback.print_exc()
            report["errors"][name] = f"{type(error).__name__}: {error}"[:2000]
            save()
            if name == "reference":
                raise
            return None
        finally:
            os.environ.pop("MJOLNIR_VLLM_SHADOW", None)
            if engine is not None:
                engine.close()
        if name == "reference":
            report["reference"] = facts | {"codec": codec}
        else:
            report["runs"][name] = facts | {"agreement": compare(generated, reference)}
        if backend == OURS and not facts["steps"].keys() & set(ON_MJOLNIR):
            report["errors"][name] = f"no step ran on Mjolnir: {facts['steps']}"
        save()
        return generated

    reference = run("reference") or []
    for name in args.runs.split(","):
        if time.time() > args.deadline:
            report["errors"][name] = "out of time"
            save()
        else:
            run(name)


if __name__ == "__main__":
    main()
