"""vLLM with Mjolnir's backend on one GPU: outputs against FLASH_ATTN, speed against FLASH_ATTN and TRITON_ATTN.

    python benchmarks/vllm/proof.py run --out DIR [--only qwen,smollm,serve,speed] [--gguf FILE] [--budget-s 420]
    python benchmarks/vllm/proof.py merge DIR/vllm.json … --decode benchmarks/results/h200/decode.json --out FILE

Each part runs in processes of its own; DIR/vllm.json is rewritten as their engines finish, and what a process has when
time is up is kept. A part that fails is in "errors" and stops no other. First outputs, all parts at once; then times,
with nothing else on the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import correctness
import expected
import models
from report import body, summary, write_whole

from mjolnir.evidence import header

HERE = Path(__file__).resolve().parent
OUTPUTS = ("qwen", "smollm", "serve")
PARTS = (*OUTPUTS, "speed")
OUTPUTS_SHARE = 0.45
"""Of the time, where speed follows."""
GRACE_S = 15.0
"""After its deadline a process starts no engine; this much later it is killed."""

BIG_LAYERS = 36
BACKENDS = ("CUSTOM", "FLASH_ATTN", "TRITON_ATTN")

METHOD = (
    "correctness: 64 prompts of 1 to 600 tokens, greedy, 48 tokens each, prefill in pieces of 1024 tokens between "
    "decode steps; every run against FLASH_ATTN, eager, of the same cache dtype, without speculation. chosen_diff: "
    "|log-probability of the chosen token, ours - theirs| before the first divergence; near_ties: divergences at which "
    "each token is among the other run's five best and at most 0.5 nat apart in both; faults: any other difference. "
    "steps: what Mjolnir's counters say. FLASH_ATTN rounds queries to fp8 over fp8 caches, Mjolnir does not, except in "
    "the run called rounded; for nvfp4 (and fp8#codec) it has a bf16 cache of what the codec, in PyTorch, keeps of K "
    "and V. Runs named after a backend of vLLM's are that backend's; alone: one prompt at a time. graphs: full CUDA "
    "graphs of decode steps, without torch.compile; default: what vLLM does by itself. speed: a Qwen3-like model, 32 "
    "query heads on 8, head size 128, hidden size 4096, random weights in bf16, fp8 cache full of random finite "
    "values, contexts without prefill through a KV connector that claims them, full CUDA graphs of decode steps; "
    "itl_ms: wall time of 32 engine steps / 32 after 8 to warm up, the GPU idle at both ends; expected_ms: what the "
    "kernels' times in decode.json say the step should save, times layers, against saved_ms; kernels_saved_ms: how "
    "much less attention kernels take in a profile of such steps."
)


@dataclasses.dataclass
class Job:
    """A process of a part, the file it writes, and its place in the report."""

    place: tuple[str, ...]
    out: Path
    process: subprocess.Popen[bytes]
    log: Path

    def result(self) -> Any:
        """What the process has so far; how it ended, where that was badly."""
        report = json.loads(self.out.read_text()) if self.out.exists() else None
        if self.process.poll() in (0, None):
            return report
        tail = self.log.read_text(errors="replace")[-3000:]
        return {"report": report, "exit": self.process.returncode, "log": tail}

    def kill(self) -> None:
        """The process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Proof:
    """One run: where it writes, and until when the parts at work may start something new."""

    def __init__(self, out: Path, gguf: Path | None) -> None:
        self.out, self.gguf = out, gguf
        self.deadline = 0.0
        self.jobs: list[Job] = []
        self.work = Path(tempfile.mkdtemp(prefix="mjolnir-vllm-"))
        self.report: dict[str, Any] = {"method": METHOD, **header(), "correctness": {}, "speed": {}, "errors": {}}
        out.mkdir(parents=True, exist_ok=True)

    def save(self) -> None:
        """The report, with what the jobs have written so far."""
        for job in self.jobs:
            place = self.report
            for key in job.place[:-1]:
                place = place.setdefault(key, {})
            place[job.place[-1]] = job.result()
        write_whole(self.out / "vllm.json", json.dumps(self.report, indent=1) + "\n")

    def start(self, place: tuple[str, ...], script: str, *arguments: object, fallback: str = "FLASH_ATTN") -> None:
        name = re.sub("[^A-Za-z0-9.-]", "-", "-".join(place))
        out, log = self.work / f"{name}.json", self.out / f"{name}.log"
        deadline = ("--deadline", str(self.deadline))
        command = [sys.executable, str(HERE / script), "--out", str(out), *deadline, *map(str, arguments)]
        paths = [str(HERE), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": ":".join(paths), "MJOLNIR_VLLM_FALLBACK": fallback}
        with open(log, "wb") as sink:
            process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        self.jobs.append(Job(place, out, process, log))

    def wait(self) -> None:
        """Until all jobs are done, or GRACE_S after the deadline."""
        running = list(self.jobs)
        while running:
            late = time.time() > self.deadline + GRACE_S
            for job in list(running):
                if late and job.process.poll() is None:
                    job.kill()
                if job.process.poll() is not None:
                    running.remove(job)
                    left = self.deadline - time.time()
                    print(f"{'-'.join(job.place)}: exit {job.process.returncode}, {left:.0f} s left", flush=True)
            self.save()
            time.sleep(1)
        self.save()
        self.jobs.clear()

    def compare(self, name: str, folder: Path, prompts: list[list[int]], runs: dict[str, str]) -> None:
        """Correctness of one model, a process per key: a cache dtype, "dtype@FALLBACK" or "dtype#anything". It is
        against what the codec keeps for "dtype#codec", and for nvfp4, which no backend of vLLM's reads here."""
        file = self.work / f"{name}-prompts.json"
        file.write_text(json.dumps(prompts))
        for key, names in runs.items():
            dtype, _, tag = key.partition("#")
            kv, _, fallback = dtype.partition("@")
            codec = ["--codec"] if tag == "codec" or kv == "nvfp4" else []
            self.start(
                ("correctness", name, key), "correctness.py", "--model", folder, "--prompts", file, "--kv", kv,
                "--runs", names, *codec, fallback=fallback or "FLASH_ATTN",
            )  # fmt: skip

    def qwen(self) -> None:
        folder = self.work / "qwen"
        config = models.qwen_config(layers=4, hidden=1024, heads=16, kv_heads=4, vocab=1000, max_len=4096)
        models.make_qwen(folder, config)
        self.compare("qwen3-like", folder, correctness.random_prompts(1000, 600), {
            "fp8": "graphs,eager",
            "fp8#ngram": "eager+ngram,graphs+ngram",
            "fp8#default": "default",
            "bfloat16": "graphs,eager",
            "bfloat16#ngram": "eager+ngram,graphs+ngram",
            "fp8@TRITON_ATTN": "graphs,shadow",
            "nvfp4": "graphs,eager,shadow",
            "nvfp4#ngram": "eager+ngram,graphs+ngram",
        })  # fmt: skip

    def smollm(self) -> None:
        if self.gguf is None:
            raise ValueError("--gguf: the file of SmolLM2-135M-Instruct")
        folder = self.work / "smollm"
        metadata = models.make_smollm(folder, self.gguf)
        prompts = correctness.text_prompts(metadata, 600)
        self.compare("SmolLM2-135M", folder, prompts, {
            "fp8": "graphs,eager,shadow",
            "fp8#ngram": "eager+ngram,graphs+ngram",
            "fp8#rounded": "rounded",
            # FLASH_ATTN rounds queries, and its part of the softmax, to fp8: this tells whose a divergence is.
            "fp8#codec": "FLASH_ATTN,graphs",
            # How far apart vLLM's own backends are, and one of them and itself where only the batch differs.
            "fp8#stock": "TRITON_ATTN,FLASH_ATTN+alone",
            "bfloat16": "graphs,eager",
            "bfloat16#ngram": "eager+ngram,graphs+ngram",
        })  # fmt: skip

    def serve(self) -> None:
        folder = self.work / "served"
        models.make_qwen(folder, models.qwen_config(2, hidden=512, heads=8, kv_heads=2, vocab=1000, max_len=2048))
        models.make_tokenizer(folder, 1000)
        self.start(("serve",), "serve.py", "--model", folder)

    def speed(self) -> None:
        folder = self.work / "big"
        config = models.qwen_config(BIG_LAYERS, hidden=4096, heads=32, kv_heads=8, vocab=32000, max_len=131072)
        models.write_config(folder, config)
        end = self.deadline
        for i, backend in enumerate(BACKENDS):
            self.deadline = time.time() + (end - time.time()) / (len(BACKENDS) - i)
            self.start(("speed", backend), "speed.py", "--model", folder, "--backend", backend)
            self.wait()

    def run(self, parts: Sequence[str], budget_s: float) -> None:
        start = time.time()
        outputs = [part for part in parts if part in OUTPUTS]
        self.deadline = start + budget_s * (OUTPUTS_SHARE if "speed" in parts else 1.0) - GRACE_S
        for part in outputs:
            self._try(part)
        self.wait()
        if "speed" in parts:
            self.deadline = start + budget_s - GRACE_S
            self._try("speed")
        print(summary(self.report), f"{time.time() - start:.0f} s in all", sep="\n", flush=True)

    def _try(self, part: str) -> None:
        try:
            getattr(self, part)()
        except Exception as error:  # of any kind: one part's must not take the others with it
            self.report["errors"][part] = f"{type(error).__name__}: {error}"
            self.save()


def merge(files: Sequence[Path], decode: Path | None) -> dict[str, Any]:
    """One report of several runs' parts, with the saving that decode.json leads to expect."""
    merged: dict[str, Any] = {}
    for file in files:
        report = json.loads(file.read_text(encoding="utf-8"))
        before = merged.get("correctness", {})
        outputs = {
            model: before.get(model, {})
            | {key: _rerun(before.get(model, {}).get(key), part) for key, part in parts.items()}
            for model, parts in report.get("correctness", {}).items()
        }
        by_key = {key: merged.get(key, {}) | report.get(key, {}) for key in ("speed", "errors")}
        merged |= report | by_key | {"correctness": before | outputs, "method": METHOD}
    speed = {name: body(part) for name, part in merged.get("speed", {}).items()}
    speed = {name: part for name, part in speed.items() if part.get("rows")}
    if "CUSTOM" not in speed:
        return merged
    ours = {(row["batch"], row["context"]): row for row in speed["CUSTOM"]["rows"]}
    times = expected.kernel_times(decode, speed["CUSTOM"]["engine"]["page_size"]) if decode else {}
    for backend in expected.PEERS.keys() & speed.keys():
        for row in speed[backend]["rows"]:
            mine = ours.get((row["batch"], row["context"]))
            if mine:
                row["saved_ms"] = round(row["itl_ms"] - mine["itl_ms"], 4)
                saved = expected.saved_ms(times, backend, row["batch"], row["context"], BIG_LAYERS)
                row["expected_ms"] = None if saved is None else round(saved, 4)
                if "kernels_us_per_step" in row and "kernels_us_per_step" in mine:
                    theirs, own = (expected.attention_ms(r["kernels_us_per_step"]) for r in (row, mine))
                    row["kernels_saved_ms"] = round(theirs - own, 4)
    return merged


def _rerun(before: Any, after: Any) -> Any:
    """Two processes' runs of one model and cache: the later one's, and the earlier one's that were not run again."""
    old, new = body(before), body(after)
    if not old or after is None:
        return after or before
    runs = new.get("runs", {})
    errors = {name: error for name, error in old["errors"].items() if name not in runs} | new.get("errors", {})
    both = old | new | {"runs": old["runs"] | runs, "errors": errors}
    return after | {"report": both} if "exit" in after else both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--only", default=",".join(PARTS))
    run.add_argument("--gguf", type=Path)
    run.add_argument("--budget-s", type=float, default=420)
    merged = commands.add_parser("merge")
    merged.add_argument("files", type=Path, nargs="+")
    merged.add_argument("--decode", type=Path)
    merged.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "merge":
        args.out.write_text(json.dumps(merge(args.files, args.decode), indent=1) + "\n", encoding="utf-8")
        return
    parts = args.only.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        raise SystemExit(f"--only: {unknown[0]!r} is none of {', '.join(PARTS)}")
    Proof(args.out, args.gguf).run(parts, args.budget_s)


if __name__ == "__main__":
    main()
