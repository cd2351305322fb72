#!/usr/bin/env python3
"""From the start of the process to the first byte of a reply, and the most memory that `gen` held: medians of N runs, one JSON line a model.
usage: start_bench.py MODEL ... [-n 5] [-o research/start.jsonl] [--weights TEXT] [--machine TEXT]"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "py"))

from bw24 import abi, records  # noqa: E402
from bw24.bench import Others  # noqa: E402

PROMPT = "Why is the sky blue?"


def command(model: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "bw24", "gen", model, "--device", "cpu", "-p", PROMPT, *more]


def first_byte(model: str, env: dict[str, str]) -> float:
    """Seconds from starting the process to the first byte on its standard output."""
    began = time.perf_counter()
    process = subprocess.Popen(command(model, "-n", "1"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env)
    read = process.stdout.read(1)
    seconds = time.perf_counter() - began
    process.stdout.read()
    if process.wait() or not read:
        raise SystemExit(f"start_bench: gen of {model} failed with status {process.returncode}")
    return seconds


def peak(model: str, env: dict[str, str]) -> int:
    """Most bytes that gen held for 32 tokens."""
    done = subprocess.run(command(model, "-n", "32", "--json"), capture_output=True, text=True, env=env, check=True)
    return json.loads(done.stdout.splitlines()[-1])["peak_memory_bytes"]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("models", nargs="+")
    p.add_argument("-n", type=int, default=5)
    p.add_argument("-o", "--output", type=Path)
    p.add_argument("--weights", default="real weights")
    p.add_argument("--machine", default="")
    args = p.parse_args()
    env = {**os.environ, "PYTHONPATH": str(ROOT / "py")}
    for model in args.models:
        first_byte(model, env)
        others = Others()
        seconds = [first_byte(model, env) for _ in range(args.n)]
        row = {"what": "start", "file": Path(model).name, "file_bytes": Path(model).stat().st_size, "revision": abi.version(), "seconds": seconds,
               "median": statistics.median(seconds), "peak_memory_bytes": peak(model, env), "others_cores": others.cores(), "weights": args.weights,
               "machine": args.machine, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        print(json.dumps(row), flush=True)
        if args.output:
            records.append(args.output, row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
