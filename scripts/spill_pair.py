#!/usr/bin/env python3
"""A mixture larger than the card, beside llama.cpp on the same file and card: peers' settings are tried first, then both take turns; medians, ratios,
memory of the card, where our token's time goes and what the cost model says.

Owns the order of the runs and their records; spill_card.py owns one run. Random weights route as their bias says, so every figure is synthetic.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "py"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from spill_card import run_options  # noqa: E402

MIB = 1 << 20
CELLS = ("prefill", "decode")
EPILOG = """\
examples:
  spill_pair.py MODEL --vram 5.5g --ram 11g --peer-bin DIR --flags "-ncmoe 5 -fa 1 -ub 2048" --flags "-ncmoe 5 -fa 1 -ub 512" --rounds 5
"""


def card_used() -> int:
    """MiB in use on the card, by everybody."""
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[0])


class Watch:
    """The most that the card's memory grew by, in MiB, while the block ran. Contexts of processes are in it."""

    def __enter__(self) -> Watch:
        self.least, self.most, self._end = card_used(), 0, False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._end:
            self.most = max(self.most, card_used() - self.least)
            time.sleep(0.15)

    def __exit__(self, *_: object) -> None:
        self._end = True
        self._thread.join()


def peer(args: argparse.Namespace, flags: str, tokens: int, reps: int) -> dict[str, Any]:
    """llama-bench on the file: tokens a second of prompts and of decode, `reps` each after a warm-up; MiB of the card; {'error'} where it fails."""
    words = [str(Path(args.peer_bin) / "llama-bench"), "-m", str(args.file), "-ngl", "99", "-p", str(args.prompt), "-n", str(tokens), "-r", str(reps),
             "-o", "json", *flags.split()]
    begun = time.perf_counter()
    with Watch() as watch:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    out: dict[str, Any] = {"flags": flags, "device_mib_with_context": watch.most, "seconds": round(time.perf_counter() - begun, 1)}
    if done.returncode:
        return out | {"error": (done.stderr.strip().splitlines() or ["no message"])[-1][:200]}
    rows = json.loads(done.stdout)
    return out | {"threads": rows[0].get("n_threads"), "build": rows[0].get("build_number")} | {
        "prefill" if r["n_prompt"] else "decode": [round(x, 2) for x in r["samples_ts"]] for r in rows}


def worker(args: argparse.Namespace) -> int:
    """One engine: a line of facts when it is loaded, then a run for each line read."""
    from bw24 import device
    from bw24.engine import Engine
    from bw24.source import open_model
    from bw24.tiers import Tiers
    from spill_card import greedy

    tiers = Tiers(ram=args.ram, vram=args.vram, profile=str(args.profile) if args.profile else None, policy=args.policy)
    free, started = device.query().free, time.perf_counter()
    ctx = args.prompt + args.tokens + args.warm + 140
    with open_model(args.file) as model, Engine(model, device="cuda", ctx=ctx, max_rows=args.rows, tiers=tiers) as engine:
        print(json.dumps({"load_s": round(time.perf_counter() - started, 2), "note": engine.placement and engine.placement.note,
                          "threads": engine.threads}), flush=True)
        for turn, _ in enumerate(sys.stdin):  # each turn has a text of its own: the set must not have learnt it
            run = greedy(engine, args, 7 + turn)
            c = engine.spill.stats()
            if c["peak"] > 1.05 * max(c["budget"], c["floor"]):
                raise SystemExit(f"spill_pair: {c['peak']} bytes of experts in RAM, the budget is {c['budget']}")
            used = (free - device.query().free) // MIB
            print(json.dumps({**run, "device_mib": used, "limit_mib": args.vram // MIB, "set_mib": engine.placement.vram // MIB,
                              "set_experts": c["vram_experts"], "peak_mib": c["peak"] // MIB, "budget_mib": c["budget"] // MIB,
                              "direct": c["direct"]}), flush=True)
    return 0


class Ours:
    """The worker in a process of its own, kept loaded between its turns."""

    def __init__(self, argv: list[str]):
        with Watch() as watch:
            self._p = subprocess.Popen([sys.executable, __file__, *argv, "--worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.facts = self._line()
            self.facts["first"] = self.turn()
        self.facts["device_mib_with_context"] = watch.most

    def _line(self) -> dict[str, Any]:
        line = self._p.stdout.readline()
        if not line:
            raise SystemExit(f"spill_pair: the worker ended with {self._p.wait()}")
        return json.loads(line)

    def turn(self) -> dict[str, Any]:
        self._p.stdin.write("run\n")
        self._p.stdin.flush()
        return self._line()

    def close(self) -> float:
        """Ends it; the seconds that its model took to load."""
        self._p.stdin.close()
        self._p.wait()
        return self.facts["load_s"]


def predicted(args: argparse.Namespace, run: dict[str, Any], threads: int) -> dict[str, Any]:
    """The cost model with this machine's rates: at the hit shares that were measured, and at those that it expects itself."""
    from bw24 import tier_plan
    from bw24.check import open_context
    from bw24.probe import rates
    from bw24.source import open_model
    from bw24.tiers import bank_of, rest_of

    with open_model(args.file) as model:
        bank = bank_of(model)
        down = model.file.tensors[bank.ops[0][2]]
        shape = tier_plan.Shape(bank.visits, bank.nbytes / (len(bank.ops) * down.shape[2]), bank.nbytes, rest_of(model, bank), len(bank.ops),
                                args.vram - (run["set_mib"] << 20))
        cpu = tier_plan.cpu_rate(down.type_id, down.shape[0], threads)
        with open_context("cuda", None, None) as ctx:
            found = rates(ctx)
        disk, direct = tier_plan.disk_rate([args.file], 8, 0.3)
    vram, pcie = found["read_gbps"] * 1e9, found["to_device_gbps"] * 1e9
    ms = shape.layers * tier_plan.LAYER_US / 1e3 + shape.rest / vram * 1e3
    r = tier_plan.Rates(cpu, disk, pcie, vram, ms, tier_plan.pack_rate(threads))
    measured = tier_plan.Hits(run["v"], run["r"], 1.0)
    out: dict[str, Any] = {"rates_gbps": {"cpu": cpu / 1e9, "disk": disk / 1e9, "pcie": pcie / 1e9, "vram": vram / 1e9}, "disk_direct": direct}
    for name, h in (("at_measured_hits", measured), ("at_planned_hits", tier_plan.hits(shape, args.vram, args.ram or 1 << 60))):
        c = tier_plan.cost(shape, h, r)
        out[name] = {**vars(h), "decode": c.rate, "ms": vars(c), "bus": tier_plan.over_bus(shape, h, r) / (shape.visits * shape.expert)}
    return json.loads(json.dumps(out, default=float), parse_float=lambda x: round(float(x), 4))


def median(rows: list[dict[str, Any]], key: str) -> float:
    return statistics.median(r[key] for r in rows)


def tried(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each of the peer's settings once."""
    out = []
    for flags in args.flags:
        out.append(peer(args, flags, 32, 1))
        print("try", json.dumps(out[-1]), flush=True)
    if not any("decode" in row for row in out):
        raise SystemExit("spill_pair: the peer ran with none of the flags")
    return out


def measure(args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Settings of the peer, then turns: ours, the peer's, ours; the prediction."""
    first = tried(args) if len(args.flags) > 2 else []
    good = [row for row in first if "decode" in row]
    best = {key: max(good, key=lambda row: max(row[key]))["flags"] for key in CELLS} if good else {}
    if args.flags and not good:
        best = {CELLS[0]: args.flags[0], CELLS[1]: args.flags[-1]}
    ours, theirs, turns, starts = Ours(argv), [], [], []
    facts = ours.facts
    for flags in [None, *sorted(set(best.values())), *([] if args.once or not args.flags else [None])]:
        if flags:
            if args.apart and ours:
                starts.append(ours.close())
                ours = None
            theirs.append(peer(args, flags, args.tokens, args.rounds))
            print("peer", json.dumps(theirs[-1]), flush=True)
            continue
        ours = ours or Ours(argv)
        for _ in range(args.rounds):
            turns.append(ours.turn())
            print("bw24", json.dumps(turns[-1]), flush=True)
    if ours:
        starts.append(ours.close())
    print("starts", starts, flush=True)
    out: dict[str, Any] = {"file": args.file.name, "file_bytes": args.file.stat().st_size, "vram": args.vram, "ram": args.ram,
                           "prompt": args.prompt, "tokens": args.tokens, "bw24": facts | {"starts": starts, "turns": turns},
                           "llama.cpp": {"tried": first, "best": best, "turns": theirs}}
    for key in CELLS if theirs else ():
        own, their = [t[key] for t in turns], next(row for row in theirs if row["flags"] == best[key])
        out[key] = {"bw24": round(statistics.median(own), 2), "llama.cpp": round(statistics.median(their[key]), 2), "flags": best[key],
                    "least": round(min(own) / max(their[key]), 3), "most": round(max(own) / min(their[key]), 3),
                    "mib": [facts["device_mib_with_context"], their["device_mib_with_context"]]}
        out[key]["ratio"] = round(out[key]["bw24"] / out[key]["llama.cpp"], 3)
        print(key, json.dumps(out[key]), flush=True)
    last = {k: median(turns, k) for k in ("v", "bus", "r", "mb", "cpu", "card", "disk", "ms", "swaps", "device_mib", "peak_mib", "decode")}
    out["breakdown"] = last
    print("breakdown", json.dumps(last), flush=True)
    out["predicted"] = predicted(args, last | {"set_mib": turns[0]["set_mib"]}, facts["threads"])
    for name in ("at_measured_hits", "at_planned_hits"):
        out["predicted"][name]["of_measured"] = round(out["predicted"][name]["decode"] / last["decode"], 3)
    print("predicted", json.dumps(out["predicted"]), flush=True)
    rate = out["predicted"]["rates_gbps"]["disk"] * 1e9
    out["start"] = {"seconds": starts, "disk_seconds": round(args.file.stat().st_size / rate, 2)}  # of the whole file, read once
    print("start", json.dumps(out["start"]), flush=True)
    return out


def parse(argv: list[str]) -> argparse.Namespace:
    from bw24.units import parse_size

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    run_options(parser)
    parser.add_argument("--vram", type=parse_size, required=True, help="of the card, for the whole model")
    parser.add_argument("--ram", type=parse_size, help="for experts (default: what the engine takes)")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="ours before the peer and after it, and the peer's (default: 3)")
    parser.add_argument("--peer-bin", help="folder of llama-bench")
    parser.add_argument("--flags", action="append", default=[],
                        help="of llama-bench; more than two: each is tried once, and the best of each cell takes a turn; else the first for prompts, "
                             "the last for decode; none: ours alone, beside the cost model")
    parser.add_argument("--apart", action="store_true",
                        help="ours is not kept loaded beside the peer, but loaded again: for a machine whose memory does not hold both")
    parser.add_argument("--once", action="store_true", help="ours before the peer alone")
    parser.add_argument("--record", type=Path, help="append a row to this JSONL file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.flags and not args.peer_bin:
        parser.error("--flags needs --peer-bin")
    args.resident = args.bits = False
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    if args.worker:
        return worker(args)
    row = measure(args, argv)
    if args.record:
        with open(args.record, "a", encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
