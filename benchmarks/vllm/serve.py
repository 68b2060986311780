"""What a user types, and whether the server's log says that it is on."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from report import write_whole

COMMAND = "vllm serve MODEL --kv-cache-dtype fp8 --attention-backend CUSTOM"
PORT = 8765


def ask(model: Path, server: subprocess.Popen[bytes], deadline: float) -> Any:
    """The usage that the server reports of a completion of 40 tokens; None where it does not answer in time."""
    body = json.dumps({"model": str(model), "prompt": "w1 w2 w3 w4", "max_tokens": 40, "ignore_eos": True})
    url, headers = f"http://127.0.0.1:{PORT}/v1/completions", {"Content-Type": "application/json"}
    request = urllib.request.Request(url, body.encode(), headers)
    while server.poll() is None and time.time() < deadline:
        time.sleep(1)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)["usage"]
        except OSError:  # not up yet
            continue
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a folder, with a tokenizer of words w0, w1, …")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--deadline", type=float, required=True)
    args = parser.parse_args()
    arguments = COMMAND.replace("MODEL", str(args.model)).split()[1:]
    log = args.out.with_suffix(".log")
    # A bound on the cache, because other engines may come and go beside this one while it would measure memory.
    limits = ["--max-model-len", "1024", "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(1 << 30)]
    with open(log, "wb") as sink:
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.cli.main", *arguments, "--port", str(PORT), *limits],
            stdout=sink, stderr=subprocess.STDOUT,
        )  # fmt: skip
    usage = ask(args.model, server, args.deadline)
    server.send_signal(signal.SIGINT)
    try:
        server.wait(30)
    except subprocess.TimeoutExpired:
        server.kill()
    text = log.read_text(errors="replace")
    print(text)
    lines = [re.sub(r"^.*?(?=mjolnir: )", "", line) for line in text.splitlines() if "mjolnir: " in line]
    write_whole(args.out, json.dumps({"command": COMMAND, "usage": usage, "log": lines}, indent=1))
    if usage is None:
        raise SystemExit("the server did not answer")
    if not any(re.search("steps by path: .*(decode|ragged)", line) for line in lines):
        raise SystemExit(f"no step ran on Mjolnir: {lines}")


if __name__ == "__main__":
    main()
