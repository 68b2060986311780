"""vLLM with Mjolnir's backend on one GPU: outputs against FLASH_ATTN, speed against FLASH_ATTN and TRITON_ATTN.

    python benchmarks/vllm/proof.py run --out DIR [--only qwen,speed,smollm,serve] [--gguf FILE] [--budget-s 420]
    python benchmarks/vllm/proof.py merge DIR/vllm.json … --decode benchmarks/results/h200/decode.json --out FILE

Each part runs in processes of its own and is in DIR/vllm.json as soon as it is done; what a process has when time is up
is kept. Times are measured with nothing else on the GPU; outputs are compared in several processes at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import correctness
import expected
import models

from mjolnir.evidence import header

HERE = Path(__file__).parent
PARTS = {"qwen": 1.0, "speed": 1.6, "smollm": 0.9, "serve": 0.6}
"""Shares of the time that is left."""

BIG_LAYERS = 36
BACKENDS = ("CUSTOM", "FLASH_ATTN", "TRITON_ATTN")

METHOD = (
    "correctness: 64 prompts of 1 to 600 tokens, greedy, 48 tokens each, prefill in pieces of 1024 tokens between "
    "decode steps; every run against FLASH_ATTN, eager, of the same cache dtype, without speculation. chosen_diff: "
    "|log-probability of the chosen token, ours - theirs| before the first divergence; near_ties: divergences at which "
    "each token is among the other run's five best and at most 0.5 nat apart in both; faults: any other difference. "
    "steps: what Mjolnir's counters say. FLASH_ATTN rounds queries to fp8 over fp8 caches, Mjolnir does not; for nvfp4 "
    "it has a bf16 cache of what the codec, in PyTorch, keeps of K and V. graphs: "
    "full CUDA graphs of decode steps, without torch.compile; default: what vLLM does by itself. speed: a Qwen3-like "
    "model, 32 query heads on 8, head size 128, hidden size 4096, random weights in bf16, fp8 cache full of random "
    "finite values, contexts without prefill through a KV connector that claims them, full CUDA graphs of decode "
    "steps; itl_ms: wall time of 32 engine steps / 32 after 8 to warm up, the GPU idle at both ends; expected_ms: what "
    "the kernels' times in decode.json say the step should save, times layers, against saved_ms."
)


@dataclasses.dataclass
class Job:
    """A process of a part, and the file it writes."""

    name: str
    out: Path
    process: subprocess.Popen[bytes]
    log: Path

    def result(self) -> Any:
        report = json.loads(self.out.read_text()) if self.out.exists() else None
        if self.process.returncode == 0:
            return report
        tail = self.log.read_text(errors="replace")[-3000:]
        return {"report": report, "exit": self.process.returncode, "log": tail}


class Proof:
    """One run: where it writes, and until when the part at work may start something new."""

    def __init__(self, out: Path, gguf: Path | None) -> None:
        self.out, self.gguf = out, gguf
        self.deadline = 0.0
        self.work = Path(tempfile.mkdtemp(prefix="mjolnir-vllm-"))
        self.report: dict[str, Any] = {"method": METHOD, **header(), "correctness": {}, "speed": {}}
        out.mkdir(parents=True, exist_ok=True)

    def save(self) -> None:
        (self.out / "vllm.json").write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")

    def start(self, name: str, script: str, *arguments: object, fallback: str = "FLASH_ATTN") -> Job:
        out, log = self.work / f"{name}.json", self.out / f"{name}.log"
        command = [sys.executable, str(HERE / script), "--out", str(out), *map(str, arguments)]
        paths = [str(HERE), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": ":".join(paths), "MJOLNIR_VLLM_FALLBACK": fallback}
        with open(log, "wb") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment)
        return Job(name, out, process, log)

    def wait(self, jobs: Sequence[Job]) -> None:
        """Until all are done, or a quarter of a minute after the deadline."""
        for job in jobs:
            try:
                job.process.wait(max(1.0, self.deadline + 15 - time.time()))
            except subprocess.TimeoutExpired:
                job.process.kill()
                job.process.wait()
            print(f"{job.name}: exit {job.process.returncode}, {self.deadline - time.time():.0f} s left", flush=True)

    def compare(self, name: str, folder: Path, prompts: list[list[int]], runs: dict[str, str]) -> None:
        """Correctness of one model, a process per key: a cache dtype, "dtype@FALLBACK" or "dtype#anything"."""
        file = self.work / f"{name}-prompts.json"
        file.write_text(json.dumps(prompts))
        jobs = {}
        for key, names in runs.items():
            kv, _, fallback = key.partition("#")[0].partition("@")
            title = re.sub("[@#]", "-", f"{name}-{key}")
            jobs[key] = self.start(
                title, "correctness.py", "--model", folder, "--prompts", file, "--kv", kv, "--runs", names,
                "--deadline", self.deadline, fallback=fallback or "FLASH_ATTN",
            )  # fmt: skip
        self.wait(list(jobs.values()))
        self.report["correctness"][name] = {key: job.result() for key, job in jobs.items()}
        self.save()

    def qwen(self) -> None:
        folder = self.work / "qwen"
        config = models.qwen_config(layers=4, hidden=1024, heads=16, kv_heads=4, vocab=1000, max_len=4096)
        models.make_qwen(folder, config)
        self.compare("qwen3-like", folder, correctness.random_prompts(1000, 600), {
            "fp8": "graphs,eager,graphs+ngram,eager+ngram",
            "fp8#default": "default",
            "bfloat16": "graphs,eager,graphs+ngram",
            "fp8@TRITON_ATTN": "graphs,shadow",
            "nvfp4": "graphs,eager,graphs+ngram,shadow",
        })  # fmt: skip

    def smollm(self) -> None:
        if self.gguf is None:
            raise SystemExit("--gguf: the file of SmolLM2-135M-Instruct")
        folder = self.work / "smollm"
        metadata = models.make_smollm(folder, self.gguf)
        prompts = correctness.text_prompts(metadata, 600)
        runs = "graphs,eager,graphs+ngram,eager+ngram"
        self.compare("SmolLM2-135M", folder, prompts, {"fp8": runs, "bfloat16": runs})

    def speed(self) -> None:
        folder = self.work / "big"
        config = models.qwen_config(BIG_LAYERS, hidden=4096, heads=32, kv_heads=8, vocab=32000, max_len=131072)
        models.write_config(folder, config)
        for i, backend in enumerate(BACKENDS):
            left = self.deadline - time.time()
            job = self.start(
                f"speed-{backend}", "speed.py", "--model", folder, "--backend", backend,
                "--deadline", time.time() + left / (len(BACKENDS) - i),
            )  # fmt: skip
            self.wait([job])
            self.report["speed"][backend] = job.result()
            self.save()

    def serve(self) -> None:
        """What a user types, and whether the server's log says that it is on."""
        folder = self.work / "served"
        models.make_qwen(folder, models.qwen_config(2, hidden=512, heads=8, kv_heads=2, vocab=1000, max_len=2048))
        models.make_tokenizer(folder, 1000)
        log = self.out / "serve.log"
        command = [
            "vllm", "serve", str(folder), "--kv-cache-dtype", "fp8", "--attention-backend", "CUSTOM",
            "--port", "8765", "--max-model-len", "1024", "--gpu-memory-utilization", "0.1",
        ]  # fmt: skip
        command[:1] = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
        with open(log, "wb") as sink:
            server = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
        body = json.dumps({"model": str(folder), "prompt": "w1 w2 w3 w4", "max_tokens": 40, "ignore_eos": True})
        request = urllib.request.Request(
            "http://127.0.0.1:8765/v1/completions", body.encode(), {"Content-Type": "application/json"}
        )
        answer: Any = None
        while answer is None and server.poll() is None and time.time() < self.deadline:
            time.sleep(1)
            try:
                with urllib.request.urlopen(request, timeout=60) as response:
                    answer = json.load(response)["usage"]
            except OSError:  # not up yet
                continue
        server.send_signal(signal.SIGINT)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
        lines = [line for line in log.read_text(errors="replace").splitlines() if "mjolnir" in line]
        self.report["serve"] = {
            "command": "vllm serve MODEL --kv-cache-dtype fp8 --attention-backend CUSTOM",
            "usage": answer,
            "log": [re.sub(r"^.*?(?=mjolnir)", "", line) for line in lines],
        }
        self.save()


def merge(files: Sequence[Path], decode: Path | None) -> dict[str, Any]:
    """One report of several runs' parts, with the saving that decode.json leads to expect."""
    merged: dict[str, Any] = {}
    for file in files:
        report = json.loads(file.read_text(encoding="utf-8"))
        for key, value in report.items():
            if isinstance(value, dict) and isinstance(merged.get(key), dict):
                merged[key] |= value
            else:
                merged[key] = value
    speed = {name: part for name, part in merged.get("speed", {}).items() if "rows" in part}
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
    return merged


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
    proof, end = Proof(args.out, args.gguf), time.time() + args.budget_s
    for i, part in enumerate(parts):
        started = time.time()
        proof.deadline = started + (end - started) * PARTS[part] / sum(PARTS[later] for later in parts[i:])
        getattr(proof, part)()
        print(f"{part}: {time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
