#!/usr/bin/env python3
"""Did this revision become slower, or its drafts worse, than the last green one? Both run in one session, alternating (A B, B A, ...); acceptance is
compared as exact integers. Green rows go to research/perf-ci.jsonl; red, loud or unmeasured ones never do.

Exit codes: 0 green, 3 red (a cell slower, acceptance changed, or slow drift over many green rows), 4 not measured (the machine is busy)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "py"))

import perf_cells  # noqa: E402
from bw24 import records  # noqa: E402
from bw24.bench import DISTURBED, MIN_ROUNDS, Others, median_interval  # noqa: E402
from perf_cells import Cell  # noqa: E402

RECORD = ROOT / "research" / "perf-ci.jsonl"
DEMO = "py/bw24/data/demo.gguf"
TOLERANCE = 0.03  # a cell is slower where even the upper end of its interval lies below 1 - TOLERANCE
DRIFT = 0.06  # the product of the medians since the fastest green row from the anchor on, at this run's upper end, must stay above 1 - DRIFT
CLOCK_DROP = 0.05  # a round in which the card's clock lay further than this below its highest is another machine than the one before
AGAIN = 2  # times that red cells are measured again, each with new processes: two processes of one library were seen 3 % apart for all their life
LEAST_SECONDS = 0.5  # of a round: the kernel counts processor time in ticks of 10 ms, so that others' work cannot be told in less
PROMPTS = (
    "def add(a, b):", "import os\n\ndef walk(path):", "class Stack:\n    def push(self, item):", "# Read a file of numbers and return their mean\n",
)
GREEN, RED, UNMEASURED = 0, 3, 4


@dataclass
class Side:
    """A tree with a built library, and the worker that runs it."""

    tree: Path
    library: Path
    process: subprocess.Popen | None = None
    hello: dict[str, Any] | None = None

    def environment(self) -> dict[str, str]:
        path = [str(self.tree / "py"), *filter(None, [os.environ.get("PYTHONPATH")])]  # what the caller added may hold cffi
        return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "BW24_LIBRARY": str(self.library)}

    def start(self, backend: str, threads: int, cells: list[Cell]) -> None:
        room: dict[tuple[str, str], int] = {}
        for c in cells:
            room[c.model, c.kv] = max(room.get((c.model, c.kv), 2048), c.depth + c.tokens + 64)
        command = [sys.executable, str(ROOT / "scripts" / "perf_worker.py")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environment())
        self._ask({"backend": backend, "threads": threads, "engines": [[model, kv, n] for (model, kv), n in room.items()]})

    def loaded(self) -> None:
        """Wait until the engines stand."""
        self.hello = self._read()

    def _ask(self, what: dict[str, Any]) -> None:
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"perf-ci: the worker of {self.tree} ended with status {self.process.wait()}")
        return json.loads(line)

    def seconds(self, cell: Cell) -> float:
        self._ask(cell.request())
        return self._read()["seconds"]

    def stop(self) -> None:
        if self.process:
            self.process.stdin.close()
            self.process.wait()

    def drafts(self, backend: str, prompt: str) -> list[int] | str:
        """Rounds, drafted and accepted tokens of a prompt with the demo model: integers that depend on nothing but the code. Why, where it fails."""
        command = [sys.executable, "-m", "bw24", "gen", "-m", str(self.tree / DEMO), "--backend", backend, "--spec", "3", "-n", "96", "-p", prompt]
        done = subprocess.run([*command, "--json"], capture_output=True, text=True, env=self.environment(), check=False)
        if done.returncode:
            return f"gen failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
        spec = json.loads(done.stdout.splitlines()[-1])["speculation"]
        return [spec["rounds"], spec["drafted"], spec["accepted"]]

    def acceptance(self, backend: str) -> list[list[int]] | str:
        """`drafts` of every prompt, some at once where there are cores; the first failure instead."""
        with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 4)) as pool:
            out = list(pool.map(lambda prompt: self.drafts(backend, prompt), PROMPTS))
        return next((o for o in out if isinstance(o, str)), out)


def rows() -> list[dict[str, Any]]:
    """The green rows so far."""
    return [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines() if line] if RECORD.is_file() else []


def up_to(before: list[dict[str, Any]], revision: str) -> list[dict[str, Any]]:
    """The green rows that a comparison with `revision` continues: those up to its last; all where it has none."""
    last = max((i for i, row in enumerate(before) if row["revision"] == revision), default=len(before) - 1)
    return before[:last + 1]


def revision_of(name: str) -> str:
    """The short hash of a revision; as given where there is no git (a copied tree)."""
    done = subprocess.run(["git", "rev-parse", "--short=12", name], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        if (ROOT / ".git").exists():
            raise SystemExit(f"perf-ci: {name}: {(done.stderr.strip().splitlines() or ['no such revision'])[-1]}")
        return name
    return done.stdout.strip()


def tree_of(revision: str) -> Side:
    """A built copy of a revision under build/perf; building it again costs nothing."""
    tree = ROOT / "build" / "perf" / revision
    library = tree / "py" / "bw24" / "libbw24.so"
    if not library.is_file():
        tree.mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
        cuda = "1" if "-DBW24_CUDA" in (ROOT / "build" / "obj" / "flags").read_text(encoding="utf-8") else "0"
        subprocess.run(["make", "-s", "lib", f"CUDA={cuda}", f"PYTHON={sys.executable}"], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    return Side(tree, library)


@contextlib.contextmanager
def running(sides: list[Side], backend: str, threads: int, cells: list[Cell]) -> Iterator[None]:
    try:
        for side in sides:
            side.start(backend, threads, cells)
        for side in sides:
            side.loaded()
        yield
    finally:
        for side in sides:
            side.stop()


@dataclass
class Kept:
    """One round: base seconds over new seconds by cell, the new side's seconds, the cores that others used, the card's state right after it."""

    ratios: dict[str, float]
    seconds: dict[str, float]
    others: float
    card: dict[str, str] | None


def one_round(base: Side, new: Side, cells: list[Cell], number: int) -> tuple[dict[str, float], dict[str, float]]:
    """Base seconds over new seconds by cell, and the new side's seconds: medians of as many passes over the cells as LEAST_SECONDS asks for."""
    began, passes = time.monotonic(), []
    while not passes or time.monotonic() - began < LEAST_SECONDS:
        order = (base, new) if (number + len(passes)) % 2 == 0 else (new, base)
        passes.append({cell.name: {id(side): side.seconds(cell) for side in order} for cell in cells})
    middle = {cell.name: [statistics.median(p[cell.name][id(side)] for p in passes) for side in (base, new)] for cell in cells}
    return {name: was / now for name, (was, now) in middle.items()}, {name: now for name, (_, now) in middle.items()}


def measure(base: Side, new: Side, cells: list[Cell], rounds: int) -> tuple[list[Kept], int]:
    """Rounds of all cells, ours and the base's back to back, taking turns: the quietest `rounds` of at most twice as many, and how many were run."""
    for side in (base, new):
        for cell in cells:
            side.seconds(cell)
    kept: list[Kept] = []
    for number in range(2 * rounds):
        busy_workers(base, new)  # both counts begin here: what runs between rounds (nvidia-smi) belongs to neither
        others = Others()
        ratios, seconds = one_round(base, new, cells, number)
        used = max(others.cores() - busy_workers(base, new), 0.0)
        kept.append(Kept(ratios, seconds, used, clocks()))
        if sum(k.others <= DISTURBED for k in steady(kept)) >= rounds:
            break
    tried, chosen = len(kept), steady(kept)
    if len(chosen) < rounds:
        chosen = kept
    return sorted(chosen, key=lambda k: k.others)[:rounds], tried


def steady(kept: list[Kept]) -> list[Kept]:
    """The rounds in which the card's clock stayed near its highest; all of them without a card."""
    mhz = [clock_of(k) for k in kept]
    top = max((m for m in mhz if m), default=0.0)
    return [k for k, m in zip(kept, mhz, strict=True) if not m or m >= top * (1 - CLOCK_DROP)]


def clock_of(k: Kept) -> float:
    """MHz of the card's multiprocessors after the round; 0 where there is none or it does not say."""
    word = (k.card or {}).get("sm", "").split(" ")[0]
    return float(word) if word.replace(".", "", 1).isdigit() else 0.0


_last_ticks: dict[int, float] = {}


def busy_workers(base: Side, new: Side) -> float:
    """Cores that our own workers used since the last call: they are children, not `others`."""
    total, now = 0.0, time.monotonic()
    for side in (base, new):
        pid = side.process.pid
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
        ticks = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        total += ticks - _last_ticks.get(pid, ticks)
        _last_ticks[pid] = ticks
    wall, _last_ticks[0] = now - _last_ticks.get(0, now), now
    return total / wall if wall else 0.0


def drifts(name: str, middle: float, before: list[dict[str, Any]]) -> tuple[float, float, str]:
    """This run's speed of a cell over the anchor's, over that of the fastest green row since (the anchor counts), and that row's revision. `before`:
    green rows, oldest first; a row's ratio compares it with the row before it, so the anchor's own is left out."""
    product, least, fastest = middle, middle, ""
    for row in reversed(before):
        if product <= least:
            least, fastest = product, row.get("revision", "")
        if row.get("anchor"):
            break
        product *= row["cells"].get(name, {}).get("ratio", 1.0)
    return product, min(product, least), fastest


def judge(ratios: dict[str, list[float]], others: list[float], counts: tuple[list | str, list | str], before: list[dict[str, Any]],
          accept_change: str | None) -> tuple[int, list[str], dict[str, Any]]:
    """Exit code, what to say, and the row's cells. `before`: green rows, oldest first, for the drift since the last anchor."""
    said, wide, cells, status = [], [], {}, GREEN
    for name, values in ratios.items():
        low, high, coverage = median_interval(values)
        middle = sorted(values)[len(values) // 2]
        drift, least, fastest = drifts(name, middle, before)
        cells[name] = {"verdict": "ok", "ratio": middle, "low": low, "high": high, "coverage": coverage, "since_anchor": drift,
                       "since_fastest": least, "samples": values}
        if high < 1 - TOLERANCE:
            status, cells[name]["verdict"] = RED, "red"
            said.append(f"RED {name}: {middle:.3f} of the last green revision's speed ({low:.3f}..{high:.3f})")
        elif before and least * high / middle < 1 - DRIFT:
            status, cells[name]["verdict"] = RED, "red"
            said.append(f"RED {name}: {least:.3f} of the speed at {fastest}, the fastest green row since the anchor; measure with --base {fastest}")
        elif middle < 1 - DRIFT:  # what looks lost and cannot be told from noise must not become the next baseline
            wide.append(f"NOT MEASURED {name}: {middle:.3f}, but the interval {low:.3f}..{high:.3f} is too wide to tell")
        else:
            said.append(f"ok  {name}: {middle:.3f} ({low:.3f}..{high:.3f}), since the anchor {drift:.3f}")
    if wide and status == GREEN:
        status = UNMEASURED
    said += wide
    loud = sum(u > DISTURBED for u in others)
    if loud and (status == RED or loud > len(others) // 2):
        status = UNMEASURED
        said.append(f"NOT MEASURED: in {loud} of {len(others)} rounds others used more than {DISTURBED} cores (up to {max(others):.2f})")
    if isinstance(counts[1], str):  # what follows depends on no clock, so that a loud machine excuses nothing
        status = RED
        said.append(f"RED acceptance: {counts[1]}")
    elif counts[0] != counts[1] and not accept_change:
        status = RED
        said.append(f"RED acceptance: rounds, drafted, accepted were {counts[0]}, are {counts[1]}; --accept-change REASON takes the new ones")
    return status, said, cells


def clocks() -> dict[str, str] | None:
    """Clocks and power of the card, where there is one."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.draw", "--format=csv,noheader"]
    try:
        line = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None
    return dict(zip(("name", "driver", "sm", "memory", "power"), (x.strip() for x in line.split(",")), strict=False))


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--base", metavar="REV", help="compare with this revision (default: that of the last green row, else HEAD~1)")
    p.add_argument("--library", type=Path, help="measure this libbw24.so as the new side instead of the tree's")
    p.add_argument("--base-tree", type=Path, metavar="DIR", help="with --base: a built tree of that revision (default: built under build/perf)")
    p.add_argument("--model", action="append", default=[], metavar="FILE", help="more GGUF files to time (default: the demo model alone)")
    p.add_argument("--published", type=Path, metavar="DIR", help="time every published cell of the backend whose model is in DIR, too")
    p.add_argument("--make", action="store_true", help="with --published: write models of random weights that DIR lacks")
    p.add_argument("--only", default="", metavar="REGEX", help="with --published: cells whose names match")
    p.add_argument("--backend", default="cpu", choices=("cpu", "cuda"))
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"pairs a cell, at least {MIN_ROUNDS}")
    p.add_argument("--accept-change", metavar="REASON", help="acceptance may differ; the reason goes into the row")
    p.add_argument("--anchor", action="store_true", help="drift is counted from this row on")
    p.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the run's row there, whatever its colour")
    p.add_argument("--dry-run", action="store_true", help="judge, but append no row")
    args = p.parse_args(argv)
    if args.base_tree and not args.base:
        p.error("--base-tree DIR: name its revision with --base")
    if args.rounds < MIN_ROUNDS:
        p.error(f"--rounds {args.rounds}: at least {MIN_ROUNDS}")
    return args


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """What this run times; says which published rows it cannot."""
    cells = perf_cells.of_models([str(ROOT / DEMO), *args.model])
    if args.published:
        more, missing = perf_cells.of_record(args.published, args.backend, args.only, args.make)
        print("\n".join([*missing, f"{len(more)} published cells"]), flush=True)
        cells += more
    return cells


def compare(order: list[Side], base: Side, new: Side, cells: list[Cell],
            args: argparse.Namespace) -> tuple[list[Kept], int, dict[str, list[float]], dict[str, float]]:
    """A measurement with processes of its own, started in `order`: its rounds, how many were tried, the ratios and the new side's seconds by cell."""
    with running(order, args.backend, args.threads, cells):
        kept, tried = measure(base, new, cells, args.rounds)
    names = kept[0].ratios
    return kept, tried, {n: [k.ratios[n] for k in kept] for n in names}, {n: statistics.median(k.seconds[n] for k in kept) for n in names}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    before = [r for r in rows() if r["backend"] == args.backend]
    head = revision_of("HEAD")
    revision = revision_of(args.base or (before[-1]["revision"] if before else f"{head}~1"))
    if args.base_tree:
        base = Side(args.base_tree.resolve(), args.base_tree.resolve() / "py" / "bw24" / "libbw24.so")
    else:
        base = tree_of(revision)
    new = Side(ROOT, (args.library or ROOT / "py" / "bw24" / "libbw24.so").resolve())
    cells = cells_of(args)
    counts = base.acceptance(args.backend), new.acceptance(args.backend)
    kept, tried, ratios, seconds = compare([base, new], base, new, cells, args)
    status, said, found = judge(ratios, [k.others for k in kept], counts, up_to(before, revision), args.accept_change)
    again = 0
    while status == RED and again < AGAIN and (suspects := [c for c in cells if found[c.name]["verdict"] == "red"]):
        again += 1
        print("\n".join([*(line for line in said if line.startswith("RED")), "again with new processes ..."]), flush=True)
        later, _, *figures = compare([new, base] if again % 2 else [base, new], base, new, suspects, args)
        ratios, seconds = ratios | figures[0], seconds | figures[1]
        status, said, found = judge(ratios, [k.others for k in later], counts, up_to(before, revision), args.accept_change)
    for name, cell in found.items():
        cell["seconds"] = seconds[name]
    print("\n".join(said))
    if head == "HEAD":  # a copied tree: its library knows
        head = new.hello["revision"]
    row = {
        "schema": "perf-ci 1", "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "revision": head, "base": revision,
        "backend": args.backend, "device": new.hello["device"], "threads": args.threads, "rounds": args.rounds, "tried": tried,
        "others_cores": [k.others for k in kept], "again": again, "clocks": [k.card for k in kept] if kept[0].card else None, "cells": found,
        "acceptance": counts[1], "accept_change": args.accept_change,
        "anchor": args.anchor or not before,
    }
    if args.output:
        args.output.write_text(json.dumps({**row, "status": status}) + "\n", encoding="utf-8")
    if status == GREEN and not args.dry_run:
        records.append(RECORD, row)
    print({GREEN: "GREEN", RED: "RED: nothing recorded", UNMEASURED: "NOT MEASURED: nothing recorded"}[status])
    return status


if __name__ == "__main__":
    sys.exit(main())
