#!/usr/bin/env python3
"""Speed of a card on one model: disk, load, prefill, steps of several widths at a depth, the capture of their graphs. Writes JSON lines; judges
nothing.

Steps are whole ones as a caller sees them: rows up, one graph, the likeliest tokens down. A width's first step runs launch by launch, its second
is captured as a graph: what that one takes beyond a replay is `capture_ms`. `bw24 bench --vs llama.cpp` compares with a peer."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "py"))

from bw24 import abi, check  # noqa: E402
from bw24.engine import Engine  # noqa: E402
from bw24.source import open_model  # noqa: E402


def median(f: Callable[[], None], n: int, warm: int = 4) -> float:
    """Median seconds of n calls after some that do not count."""
    times = []
    for i in range(n + warm):
        began = time.perf_counter()
        f()
        if i >= warm:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def timed(f: Callable[[], None]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    f()
    return time.perf_counter() - began


def drop_cache(path: str) -> None:
    """Ask the system to forget the file's pages, so that reading it means the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def read_file(path: str) -> None:
    """Read a file from beginning to end."""
    buffer = bytearray(16 << 20)
    with open(path, "rb", buffering=0) as f:
        while f.readinto(buffer):
            pass


def read_bytes(model) -> int:
    """Weight bytes that a step of one row reads: everything but an untied embedding and the experts that it does not choose."""
    tensors, keys = model.file.tensors, model.file.metadata
    arch = keys["general.architecture"]
    used = keys.get(f"{arch}.expert_used_count", 1) / keys.get(f"{arch}.expert_count", 1)
    read = {name: t.nbytes for name, t in tensors.items() if name != "token_embd.weight" or "output.weight" not in tensors}
    return round(sum(n * (used if "_exps." in name else 1) for name, n in read.items()))


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("model")
    p.add_argument("--kv", default="q8_0/q5_1")
    p.add_argument("--device", "--backend", default="cuda", help="cuda, cuda:N or cpu")
    p.add_argument("--rows", default="1,2,3,4,5,6,7,8,9,12,16,32", help="widths of the steps, the first is the base of `ratio`")
    p.add_argument("--depths", default="128", help="tokens in the cache before the steps, ascending")
    p.add_argument("--prefill", default="512,2048", help="lengths of prompts, in steps of at most 2048 rows")
    p.add_argument("--class", dest="prefill_class", choices=("exact", "fast"), default="exact", help="numeric class of prefill")
    p.add_argument("--wall", type=float, help="read bandwidth of the device in GB/s (default: measured here)")
    p.add_argument("--cold", action="store_true", help="drop the file from the page cache first, time its reading alone, drop it again, load")
    p.add_argument("-o", "--output", help="file to append the lines to")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    numbers = lambda text: [int(n) for n in text.split(",") if n]  # noqa: E731
    depths = numbers(args.depths)

    def row(what: str, **facts: object) -> None:
        revision = abi.ffi.string(abi.lib().bw24_version()).decode()
        line = json.dumps({"revision": revision, "model": Path(args.model).name, "kv": args.kv, "class": args.prefill_class, "what": what, **facts})
        print(line, flush=True)
        if args.output:
            with open(args.output, "a", encoding="utf-8") as f:
                f.write(line + "\n")

    wall = args.wall or check.probe(None, args.device)[0]
    disk = None
    if args.cold:
        drop_cache(args.model)
        disk = round(timed(lambda: read_file(args.model)), 2)
        drop_cache(args.model)
    began = time.perf_counter()
    with open_model(args.model) as model:
        longest = max(depths + numbers(args.prefill))
        context = min(model.context_length, longest + 4096)
        with Engine(model, device=args.device, kv=args.kv, ctx=context, max_rows=2048, prefill=args.prefill_class) as engine:
            memory = engine.memory()
            row("load", device=engine.device, seconds=round(time.perf_counter() - began, 2), disk_seconds=disk,
                wall_gbps=round(wall, 1), weights=memory["weights"], work=memory["work"])
            gb = read_bytes(model) / 1e9
            ids = np.random.default_rng(1).integers(0, 250, longest + 2048).tolist()

            def prefill(n: int) -> None:
                with engine.sequence() as s:
                    s.prefill(ids[:n])

            for n in numbers(args.prefill):
                seconds = median(lambda n=n: prefill(n), 5 if n <= 2048 else 3 if n <= 8192 else 1, 1 if n <= 2048 else 0)
                row("prefill", rows=n, ms=round(seconds * 1e3, 2), tok_s=round(n / seconds))
            with engine.sequence() as s:

                def step(w: int) -> None:
                    at = s.pos
                    engine.step_greedy([(s, ids[i], True) for i in range(w)])
                    s.truncate(at)

                for depth in depths:
                    s.prefill(ids[s.pos : depth], "none")
                    base = None
                    for w in numbers(args.rows):
                        first, second = timed(lambda w=w: step(w)), timed(lambda w=w: step(w))
                        seconds = median(lambda w=w: step(w), 24)
                        base = base or seconds
                        row("step", depth=depth, rows=w, us=round(seconds * 1e6, 1), ratio=round(seconds / base, 3), gb=round(gb, 3),
                            wall_pct=round(100 * gb / seconds / wall, 1), first_ms=round(first * 1e3, 2),
                            capture_ms=round(max(second - seconds, 0) * 1e3, 2) if depth == depths[0] and args.device != "cpu" else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
