#!/usr/bin/env python3
"""A mixture whose experts are divided between a card, RAM and files: tokens a second, where a token's time goes, the cost model's prediction, memory
of the card against its prediction, and llama.cpp on the same file; the bits against the resident model where it fits.

Owns the runs and their records. Random weights route as their bias says, not as a trained model: every figure is synthetic.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "py"))

EPILOG = """\
examples:
  spill_card.py MODEL --vram 5.5g --prompt 2048 --tokens 48
  spill_card.py MODEL --vram 5.5g --profile p.json --ram 4g --record spill.jsonl
  spill_card.py MODEL --vram 5.5g --resident          the bits of every row of logits against the resident model's
  spill_card.py MODEL --peer-bin DIR --peer-flags "-ncmoe 5 -fa 1 -ub 2048"
"""
COUNTED = ("visits", "vram_visits", "visit_hits", "bytes_read", "wait_ns", "compute_ns", "card_ns", "lifted", "swaps")


def prompt_ids(n: int, vocab: int, seed: int = 7) -> list[int]:
    """A fixed prompt of random tokens."""
    return np.random.default_rng(seed).integers(3, min(vocab, 100000), n).tolist()


def greedy(engine: Any, args: argparse.Namespace, seed: int = 7) -> dict[str, Any]:
    """A prompt, then greedy tokens: seconds of both, a digest of the ids, counters of the decoded tokens."""
    ids = prompt_ids(args.prompt, engine.n_vocab, seed)
    spill = engine.spill
    with engine.sequence() as seq:
        seq.prefill(ids[:64], "none")
    with engine.sequence() as seq:
        begun = time.perf_counter()
        row = seq.prefill(ids)
        prompted = time.perf_counter()
        token, out, times = int(np.argmax(row)), [], []
        digest = hashlib.sha256(row.tobytes())
        for i in range(args.warm + args.tokens):
            if i == args.warm:
                before, started = spill.stats() if spill else {}, time.perf_counter()
            t = time.perf_counter()
            token = int(engine.step_greedy([(seq, token, True)])[0])
            times.append(time.perf_counter() - t)
            out.append(token)
        seconds = time.perf_counter() - started
        after = spill.stats() if spill else {}
        if args.resident or args.bits:  # rows one by one, then many in one narrow step
            for t in out[-4:]:
                digest.update(seq.decode(t).tobytes())
            for n in (2, 7, 20):
                digest.update(engine.step([(seq, t, True) for t in ids[:n]]).tobytes())
    out_ids = hashlib.sha256(bytes(str(out), "ascii")).hexdigest()[:16]
    ms = 1e3 * seconds / args.tokens
    found = {"prefill": round(args.prompt / (prompted - begun), 1), "decode": round(1e3 / ms, 2), "ms": round(ms, 3),
             "median_ms": round(1e3 * float(np.median(times[args.warm:])), 3), "digest": digest.hexdigest()[:16], "ids": out_ids}
    return found | (where(before, after, args.tokens) if spill else {})


def where(before: dict[str, int], after: dict[str, int], tokens: int) -> dict[str, float]:
    """A token's visits by place and its milliseconds by cause: v on the card, bus of all, r in RAM of those not on the card."""
    c = {k: after.get(k, 0) - before.get(k, 0) for k in COUNTED}
    out = {"v": c["vram_visits"] / c["visits"], "bus": c["lifted"] / c["visits"], "r": c["visit_hits"] / max(1, c["visits"] - c["vram_visits"]),
           "mb": c["bytes_read"] / 1e6 / tokens, "swaps": c["swaps"] / tokens}
    out |= {name: c[key] / 1e6 / tokens for name, key in (("disk", "wait_ns"), ("cpu", "compute_ns"), ("card", "card_ns"))}
    return {k: round(v, 4) for k, v in out.items()}


def ours(args: argparse.Namespace, vram: int | None, ram: int | None) -> dict[str, Any]:
    """One engine: its run, what it took of the card and what was predicted."""
    from bw24 import device
    from bw24.engine import Engine
    from bw24.source import open_model
    from bw24.tiers import Tiers

    tiers = Tiers(ram=ram, vram=vram, profile=str(args.profile) if args.profile and vram else None, policy=args.policy if vram else None)
    free = device.query().free
    started = time.perf_counter()
    ctx = args.prompt + args.tokens + args.warm + 140
    with open_model(args.file) as model, Engine(model, device="cuda", ctx=ctx, max_rows=args.rows, tiers=tiers) as engine:
        load = time.perf_counter() - started
        run = greedy(engine, args)
        used = free - device.query().free
        p = engine.placement
        c = engine.spill.stats() if engine.spill else {}
        out = {"vram": vram, "ram": ram, "load_s": round(load, 2), **run, "device_mib": used >> 20}
        if c:
            out |= {"set_mib": p.vram >> 20, "set_experts": c["vram_experts"], "direct": c["direct"]}
            out |= {"peak_mb": c["peak"] >> 20, "budget_mb": max(c["budget"], c["floor"]) >> 20}
            if c["peak"] > 1.05 * max(c["budget"], c["floor"]):
                raise SystemExit(f"spill_card: {c['peak']} bytes of experts in RAM, the budget is {c['budget']}")
        out["memory"] = {k: int(v) >> 20 for k, v in engine.memory().items()}
    return out


def peer(args: argparse.Namespace) -> dict[str, Any]:
    """llama-bench on the same file."""
    words = [str(Path(args.peer_bin) / "llama-bench"), "-m", str(args.file), "-ngl", "99", "-p", str(args.prompt), "-n", "32", "-r", "1",
             "-o", "json", *args.peer_flags.split()]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return {"flags": args.peer_flags, **{"prefill" if r["n_prompt"] else "decode": round(r["avg_ts"], 2) for r in json.loads(done.stdout)}}


def run_options(parser: argparse.ArgumentParser) -> None:
    """What one run is told, here and by spill_pair.py."""
    parser.add_argument("file", type=Path, metavar="MODEL")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--policy", choices=("lru", "slru", "frozen"))
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--warm", type=int, default=4, help="tokens before the clock starts (default: 4)")
    parser.add_argument("--rows", type=int, default=2048, help="of a prompt's step (default: 2048)")


def parse(argv: list[str] | None) -> argparse.Namespace:
    from bw24.units import parse_size

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    run_options(parser)
    parser.add_argument("--vram", type=parse_size, help="of the card, for the whole model")
    parser.add_argument("--ram", type=parse_size, help="for experts")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--resident", action="store_true", help="run with every weight on the card, too, and compare all bits")
    parser.add_argument("--bits", action="store_true", help="digest of four rows of logits after the run")
    parser.add_argument("--peer-bin", help="folder of llama-bench")
    parser.add_argument("--peer-flags", default="")
    parser.add_argument("--record", type=Path, help="append a row to this JSONL file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    facts: dict[str, Any] = {"file": args.file.name, "prompt": args.prompt, "tokens": args.tokens}
    if args.peer_bin:
        facts["llama.cpp"] = peer(args)
        print(json.dumps(facts["llama.cpp"]), flush=True)
    if args.vram:
        facts["bw24"] = ours(args, args.vram, args.ram)
        print(json.dumps(facts["bw24"]), flush=True)
    if args.resident:
        facts["resident"] = ours(args, None, None)
        print(json.dumps(facts["resident"]), flush=True)
        same = all(facts["resident"][k] == facts["bw24"][k] for k in ("digest", "ids"))
        print("IDENTICAL" if same else "MISMATCH: tokens or logits are not the resident model's")
    if args.record:
        with open(args.record, "a", encoding="utf-8") as f:
            f.write(json.dumps(facts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
