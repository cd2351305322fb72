#!/usr/bin/env python3
"""A mixture whose experts are divided between a card, RAM and files, against the same model with every weight in the device's memory: the logits of
each of many decoded tokens, compared by their bytes under placements that are forced.

Owns the placements and the comparison. Backend cpu keeps a set apart as a card would, so the same run works without one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "py"))

import bw24.engine  # noqa: E402
from bw24.engine import Engine  # noqa: E402
from bw24.source import open_model  # noqa: E402
from bw24.tiers import Spill, Tiers, spread  # noqa: E402

EPILOG = """\
examples:
  spill_same.py hy3-mini.gguf --device cuda
  spill_same.py hy3-mini.gguf --device cpu --tokens 200 --only moving,file
"""
ROOM = 1 << 34  # bytes: more than the bank of any model that is small enough for this
# (name, share of the experts in the set, RAM as a share of the bank, whether RAM is filled anew for each token, the policy)
ARMS = (("file", 0.0, 0.0, False, "lru"), ("ram", 0.0, 1.0, False, "lru"), ("mix", 0.4, 0.3, True, "lru"), ("moving", 0.25, 1.0, False, "lru"),
        ("moving-small", 0.1, 0.2, False, "slru"), ("card", 1.0, 0.0, False, "lru"))


class Forced(Spill):
    """A spill that puts a share of the experts into the set, drawn at random or alike many of each layer, and no more."""

    share, drawn = 0.0, None

    def warm_up(self) -> None:
        layers = self.layers()
        every = spread(layers, sum(n for _, n in layers))
        n = round(self.share * len(every))
        chosen = spread(layers, n) if self.drawn is None else every[np.sort(self.drawn.permutation(len(every))[:n])]
        if n and self.card(chosen) != n:
            raise SystemExit(f"spill_same: {n} experts were to be in the set, {self.stats()['vram_experts']} are")
        if self.placement.ram > self.stats()["bank"]:
            self.warm(every)


def rows(engine: Engine, args: argparse.Namespace, before: Callable[[], None] | None = None) -> list[bytes]:
    """The bytes of the logits of a short prompt's last row and of each decoded token, each the most likely one after the row before."""
    rng, out = np.random.default_rng(7), []
    while len(out) < args.tokens:
        with engine.sequence() as seq:
            row = seq.prefill(rng.integers(3, engine.n_vocab, 40).tolist())
            for _ in range(min(args.tokens - len(out), engine.ctx - 41)):
                if before:
                    before()
                out.append(row.tobytes())
                row = seq.decode(int(np.argmax(row)))
    return out


def refill(engine: Engine) -> Callable[[], None]:
    """Before a token: a few experts drawn at random come into RAM, and push others out."""
    rng, layers = np.random.default_rng(11), engine.spill.layers()
    every = spread(layers, sum(n for _, n in layers))

    def draw() -> None:
        engine.spill.warm(every[np.sort(rng.permutation(len(every))[: rng.integers(0, 6)])])

    return draw


def arm(args: argparse.Namespace, model: Any, bank: int, spec: tuple[str, float, float, bool, str], want: list[bytes]) -> dict[str, Any]:
    """One placement: its counters, and the first token whose logits differ, or None."""
    name, share, ram, mix, policy = spec
    Forced.share, Forced.drawn = share, np.random.default_rng(3) if mix else None
    tiers = Tiers(ram=int(ram * bank) if ram < 1 else ROOM, vram=ROOM if args.device == "cpu" else None, policy=policy, force=True)
    kept, bw24.engine.Spill = bw24.engine.Spill, Forced
    try:
        with Engine(model, device=args.device, ctx=args.ctx, tiers=tiers) as engine:
            before, begun = engine.spill.stats(), time.perf_counter()
            got = rows(engine, args, refill(engine) if mix else None)
            c = engine.spill.stats()
    finally:
        bw24.engine.Spill = kept
    allowed = max(c["budget"], c["floor"])
    out = {"arm": name, "first_difference": next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), None),
           "seconds": round(time.perf_counter() - begun, 2), "over_budget": c["peak"] > 1.05 * allowed}
    return out | {k: c[k] - before[k] for k in ("visits", "vram_visits", "visit_hits", "lifted", "swaps", "evictions", "bytes_read", "errors")}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="MODEL")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--ctx", type=int, default=1100, help="of the engine, at most the model's own (default: 1100); longer texts begin anew")
    parser.add_argument("--only", help=f"some of {','.join(a[0] for a in ARMS)}")
    parser.add_argument("--record", type=Path, help="append a row to this JSONL file")
    args = parser.parse_args(argv)
    arms = [a for a in ARMS if not args.only or a[0] in args.only.split(",")]
    bad, found = 0, []
    with open_model(args.file, "keep") as model:
        args.ctx = min(args.ctx, model.context_length)
        with Engine(model, device=args.device, ctx=args.ctx) as engine:
            want, bank = rows(engine, args), sum(t.nbytes for t in model.file.tensors.values() if "_exps" in t.name)
            print(f"{args.file.name}: resident on {engine.backend}, {len(want)} tokens, {len(set(want))} different rows", flush=True)
        for spec in arms:
            row = arm(args, model, bank, spec, want)
            found.append(row)
            bad += row["first_difference"] is not None or row["over_budget"] or row["errors"]
            print("MISMATCH" if row["first_difference"] is not None else "IDENTICAL", " ".join(f"{k}={v}" for k, v in row.items()), flush=True)
    if args.record:
        with open(args.record, "a", encoding="utf-8") as f:
            f.write(json.dumps({"file": args.file.name, "device": args.device, "tokens": args.tokens, "arms": found}) + "\n")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
