#!/usr/bin/env python3
"""A model larger than the memory it gets: writes a 2 GB file of hy_v3's shape with random weights, runs it in memory and with a RAM budget for its
experts, and prints IDENTICAL, hit shares and tokens a second; on request beside llama.cpp under the same memory limit.

Owns the runs and their comparison. Random weights route as their bias says, not as a trained model: every figure is synthetic.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "py"))
sys.path.insert(0, str(ROOT / "scripts"))

PROMPT = 64
START_S = 5.0  # seconds that starting may take beside the disk
EPILOG = """\
examples:
  spill_demo.py                                        512 MB for experts of 2 GB
  spill_demo.py --router-skew hy3 --ram 256m --tokens 128
  spill_demo.py --limit 1g --peer-bin DIR              and llama.cpp with mmap; each in a memory cgroup of 1 GiB (needs root)
"""


def worker(request: dict[str, Any]) -> dict[str, Any]:
    """One run in a process of its own: greedy tokens after a fixed prompt, and a digest of every row of logits."""
    import numpy as np

    from bw24.engine import Engine
    from bw24.source import open_model
    from bw24.tier_plan import disk_rate
    from bw24.tiers import Tiers

    tiers = Tiers(ram=request["ram"], policy=request["policy"]) if request["ram"] is not None else None
    digest, started = hashlib.sha256(), time.perf_counter()
    with open_model(request["file"]) as model:
        settings = {"device": "cpu", "ctx": PROMPT + request["tokens"] + 8, "threads": request["threads"]}
        with Engine(model, tiers=tiers, **settings) as engine, engine.sequence() as seq:
            loaded = time.perf_counter()
            before_load = engine.spill.stats()["bytes_read"] if engine.spill else 0
            ids = [(i * 7919 + 13) % 4096 for i in range(PROMPT)]
            row = seq.prefill(ids)
            prompted = time.perf_counter()
            digest.update(row.tobytes())
            tokens: list[int] = []
            before = engine.spill.stats() if engine.spill else {}
            for _ in range(request["tokens"]):
                tokens.append(int(np.argmax(row)))
                row = seq.decode(tokens[-1])
                digest.update(row.tobytes())
            done = time.perf_counter()
            counts = engine.spill.stats() if engine.spill else {}
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    if before:
        rate, _ = disk_rate([Path(request["file"])], 8, 0.2)
        if loaded - started > START_S + before_load / rate:
            raise SystemExit(f"spill_demo: {loaded - started:.1f} s to start, of which {before_load / rate:.1f} s would be the disk's")
    out = {"ids": tokens, "digest": digest.hexdigest(), "load_s": loaded - started, "prompt_tok_s": PROMPT / (prompted - loaded),
           "tok_s": request["tokens"] / (done - prompted), "anonymous_mb": int(status["RssAnon"].split()[0]) / 1e3}
    if counts:
        moved = {k: counts[k] - before[k] for k in ("visits", "visit_hits", "bytes_read", "wait_ns", "compute_ns")}
        out |= {"in_ram": moved["visit_hits"] / moved["visits"], "mb_a_token": moved["bytes_read"] / 1e6 / request["tokens"],
                "disk_ms": moved["wait_ns"] / 1e6 / request["tokens"], "experts_ms": moved["compute_ns"] / 1e6 / request["tokens"],
                "peak_experts_mb": counts["peak"] / 1e6, "budget_mb": max(counts["budget"], counts["floor"]) / 1e6, "direct": counts["direct"]}
        if counts["peak"] > 1.05 * max(counts["budget"], counts["floor"]):
            raise SystemExit(f"spill_demo: {counts['peak']} bytes of experts in RAM, the budget is {counts['budget']}")
    return out


@contextlib.contextmanager
def memory_group(limit: int | None) -> Iterator[Path | None]:
    """A memory cgroup with a limit, for processes to move into; None without a limit. OSError where the system grants none."""
    if limit is None:
        yield None
        return
    old = Path("/sys/fs/cgroup/memory")
    group = (old if old.is_dir() else Path("/sys/fs/cgroup")) / f"spill-demo-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if old.is_dir() else "memory.max")).write_text(str(limit))
        yield group
    finally:
        for _ in range(50):  # the last process of the group may still be leaving it
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def run(command: list[str], group: Path | None) -> str:
    """Standard output of a command, in the group."""
    move = (lambda: (group / "cgroup.procs").write_text(str(os.getpid()))) if group else None
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, preexec_fn=move)
    if done.returncode:
        raise SystemExit(f"spill_demo: {command[0]} ended with {done.returncode}")
    return done.stdout


def forget(path: Path) -> None:
    """Takes a file out of the page cache: pages that another process read would be charged to that one, and be free inside a memory group."""
    with open(path, "rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def ours(args: argparse.Namespace, ram: int | None, group: Path | None) -> dict[str, Any]:
    request = {"file": str(args.file), "ram": ram, "tokens": args.tokens, "threads": args.threads, "policy": args.policy}
    return json.loads(run([sys.executable, __file__, "--worker", json.dumps(request)], group).splitlines()[-1])


def peer(args: argparse.Namespace, group: Path | None) -> dict[str, float]:
    """llama-bench with mmap on the same file; repacking, its default, would copy the whole model and be killed at the limit."""
    words = [str(Path(args.peer_bin) / "llama-bench"), "-m", str(args.file), "-p", str(PROMPT), "-n", str(args.tokens), "-r", "1", "-lm", "mmap",
             "--repack", "0", "-o", "json"]
    rows = json.loads(run([*words, *(["-t", str(args.threads)] if args.threads else [])], group))
    return {"prompt_tok_s" if r["n_prompt"] else "tok_s": r["avg_ts"] for r in rows}


def line(name: str, r: dict[str, Any]) -> str:
    text = f"{name:<22} prompt {r['prompt_tok_s']:7.1f} tok/s, decode {r['tok_s']:6.2f} tok/s"
    if "in_ram" in r:
        text += (f"; {100 * r['in_ram']:.1f} % of the experts in RAM, {r['mb_a_token']:.1f} MB read a token, disk {r['disk_ms']:.1f} ms, "
                 f"experts {r['experts_ms']:.1f} ms; {r['peak_experts_mb']:.0f} of {r['budget_mb']:.0f} MB used"
                 + ("" if r["direct"] else "; O_DIRECT refused: not a measure of the disk"))
    return text


def parse(argv: list[str] | None) -> argparse.Namespace:
    from bw24.units import parse_size
    from synth_moe import CURVES, skew_of

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="the model's file, kept; default: one in the system's temporary folder, removed at the end")
    parser.add_argument("--ram", type=parse_size, default=512 << 20, help="RAM for experts (default: 512m)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate (default: 64)")
    parser.add_argument("--layers", type=int, default=13, help="layers of the shape hy3-mini, 160 MB each (default: 13)")
    parser.add_argument("--type", default="Q4_K", help="type of the weights (default: Q4_K)")
    parser.add_argument("--router-skew", type=skew_of, default=CURVES["uniform"], help=f"{', '.join(CURVES)}, or a share (default: uniform)")
    parser.add_argument("--policy", choices=("lru", "slru"), help="default: by the budget")
    parser.add_argument("--threads", type=int, help="default: the physical cores")
    parser.add_argument("--limit", type=parse_size, help="memory limit of each run with a budget, page cache included, by a cgroup (needs root)")
    parser.add_argument("--peer-bin", help="folder of llama-bench: the same file there with mmap, under the same limit")
    parser.add_argument("--rounds", type=int, default=1, help="alternating rounds (default: 1)")
    parser.add_argument("--record", type=Path, help="append the result to this JSONL file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def write_file(args: argparse.Namespace) -> None:
    import synth_model

    shape = synth_model.SHAPES["hy3-mini"]
    shape = synth_model.replace(shape, layers=args.layers, extra={**shape.extra, "skew": args.router_skew})
    sizes = synth_model.write_model(args.file, "hy3-mini", shape, args.type)
    print(f"{args.file}: {sum(sizes.values()) / 1e9:.2f} GB, random weights")


def measure(args: argparse.Namespace) -> int:
    resident = ours(args, None, None)
    print(line("in memory", resident))
    rows, same = [], True
    for _ in range(args.rounds):
        forget(args.file)
        with memory_group(args.limit) as group:
            spilled = ours(args, args.ram, group)
        print(line(f"--ram {args.ram >> 20}m", spilled))
        same &= (spilled["ids"], spilled["digest"]) == (resident["ids"], resident["digest"])
        row = {"bw24": {k: v for k, v in spilled.items() if k not in ("ids", "digest")}}
        if args.peer_bin:
            forget(args.file)
            with memory_group(args.limit) as group:
                row["llama.cpp"] = peer(args, group)
            print(line("llama.cpp, mmap", row["llama.cpp"]) + f": bw24 is {spilled['tok_s'] / row['llama.cpp']['tok_s']:.2f} times as fast")
        rows.append(row)
    print("IDENTICAL" if same else "DIFFERENT: tokens or logits are not those of the run in memory")
    if args.record:
        facts = {"what": "spill_demo, synthetic weights and router", "shape": f"hy3-mini, {args.layers} layers", "type": args.type,
                 "skew": args.router_skew, "file_bytes": args.file.stat().st_size, "ram": args.ram, "limit": args.limit, "tokens": args.tokens,
                 "identical": same,
                 "in_memory": {k: v for k, v in resident.items() if k not in ("ids", "digest")}, "rounds": rows}
        with open(args.record, "a", encoding="utf-8") as f:
            f.write(json.dumps(facts) + "\n")
    return 0 if same else 3


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.worker:
        print(json.dumps(worker(json.loads(args.worker))))
        return 0
    with tempfile.TemporaryDirectory(prefix="spill-demo-") as folder:
        keep, args.file = args.file, args.file or Path(folder) / "hy3-mini.gguf"
        if not (keep and keep.exists()):
            write_file(args)
        return measure(args)


if __name__ == "__main__":
    sys.exit(main())
