#!/usr/bin/env python3
"""Random-weight models of real dimensions on one card, each beside llama.cpp in turn: ours, its, ours, its. One JSON line a model.

    scripts/card_pairs.py --peer-bin DIR qwen3-8b:Q4_K qwen3.5-9b:NVFP4 -o pairs.jsonl
    scripts/card_pairs.py --peer-bin DIR --dir /dev/shm smollm2-135m:Q4_1 --seconds 300

Ours is `bw24 bench` (its gate first; a model whose gate fails is not measured), a prompt in class `fast`, and steps of several widths; llama-bench
runs with flash attention, -ub 2048 and the same KV format. A model is written while the one before is measured and removed after."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "py"))

from bw24.bench import SCHEMA, Cell, Row, Side  # noqa: E402
from bw24.peer import LlamaBench  # noqa: E402

CELLS = (Cell("prefill", 2048, 0), Cell("decode", 128, 0))
TURNS, EACH = 2, 5  # turns of either side, samples of a turn
PEER_FLAGS = ("-fa", "1", "-ub", "2048", "-ngl", "99")
WIDTHS = "1,2,3,4,8,9,16"


def run(words: list[str], timeout: float) -> subprocess.CompletedProcess:
    """A command's end, its output as text; a timeout reads as a failure."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "py") + os.pathsep + os.environ.get("PYTHONPATH", "")}
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=max(1.0, timeout), env=env, check=False)
    except subprocess.TimeoutExpired as e:
        return subprocess.CompletedProcess(words, 124, "", f"longer than {e.timeout:.0f} s")
    except OSError as e:
        return subprocess.CompletedProcess(words, 127, "", f"{words[0]}: {e.strerror}")


def last_line(done: subprocess.CompletedProcess) -> str:
    """What a failed command said last."""
    return (done.stderr or done.stdout or "no output").strip().splitlines()[-1][:300]


class Pair:
    """One model: `report` is `bw24 bench`'s first, which the row is made of; samples in tokens a second by side and cell."""

    def __init__(self, args: argparse.Namespace, path: Path, ends: float) -> None:
        self.args, self.path, self.ends = args, path, ends
        self.report: dict[str, Any] = {}
        self.rates: dict[str, dict[Cell, list[float]]] = {"ours": {c: [] for c in CELLS}, "peer": {c: [] for c in CELLS}}
        self.more: dict[str, Any] = {}
        self.build, self.errors = "", []

    def run(self, who: str, words: list[str]) -> str | None:
        """What a command printed; None where it failed, which is recorded under `who`."""
        done = run(words, self.ends - time.monotonic())
        if done.returncode:
            self.errors.append(f"{who}: {last_line(done)}")
        return None if done.returncode else done.stdout

    def bench(self, *flags: str) -> dict[str, Any] | None:
        """`bw24 bench` on the file: its JSON."""
        words = [sys.executable, "-m", "bw24", "bench", str(self.path), "--kv", self.args.kv, "--json", "--spec", "off", *flags]
        out = self.run(f"bw24 bench {' '.join(flags)}", words)
        return out and json.loads(out[out.index("{"):])

    def ours(self) -> bool:
        """The gate, then a prompt and decode, in class exact."""
        report = self.bench("--sizes", str(CELLS[0].tokens), "--tokens", str(CELLS[1].tokens), "--rounds", str(EACH))
        if report is None:
            return False
        self.report = self.report or report
        for cell in report["cells"]:
            self.rates["ours"][Cell(cell["kind"], cell["tokens"], 0)] += cell["ours"]["samples"]
        return True

    def peer(self) -> bool:
        """llama-bench with the same cells."""
        words = [str(self.args.peer_bin / "llama-bench"), "-m", str(self.path), "-p", str(CELLS[0].tokens), "-n", str(CELLS[1].tokens), "-r",
                 str(EACH), *PEER_FLAGS, "-ctk", self.args.kv, "-ctv", self.args.kv, "-o", "jsonl"]
        out = self.run("llama-bench", words)
        for line in (out or "").splitlines():
            got = json.loads(line)
            self.build = f"build {got['build_number']}, {got.get('backends', '')}"
            cell = Cell("prefill", got["n_prompt"], 0) if got["n_prompt"] else Cell("decode", got["n_gen"], 0)
            self.rates["peer"][cell] += got["samples_ts"]
        return out is not None

    def fast(self) -> None:
        """A prompt in class fast."""
        report = self.bench("--prefill", "fast", "--sizes", str(CELLS[0].tokens), "--tokens", "8")
        if report is not None:
            self.more["fast_prefill"] = next(round(c["ours"]["median"], 1) for c in report["cells"] if c["kind"] == "prefill")

    def steps(self) -> None:
        """Microseconds of steps of several widths at depth 128."""
        words = [sys.executable, str(ROOT / "scripts" / "gpu_bench.py"), str(self.path), "--kv", self.args.kv, "--rows", WIDTHS, "--prefill", ""]
        rows = [json.loads(x) for x in (self.run("gpu_bench", words) or "").splitlines() if x.startswith("{")]
        self.more["steps_us"] = {str(r["rows"]): r["us"] for r in rows if r.get("what") == "step"}

    def measure(self) -> dict[str, Any]:
        """The row, as far as the time went; without cells where a side failed."""
        paired = all(f() for f in (self.ours, self.peer) * TURNS)
        if paired:
            self.fast()
            self.steps()
        rows = [Row(c, Side(self.rates["ours"][c]), Side(self.rates["peer"][c])) for c in CELLS] if paired else []
        kept = {k: v for k, v in self.report.items() if k not in ("rounds", "tried", "disturbed", "cells", "peer", "decode_gbps", "wall_fraction")}
        if rows and self.report.get("wall_gbps"):
            kept["decode_gbps"] = self.report["weight_bytes"] * rows[1].ours.median / 1e9
            kept["wall_fraction"] = kept["decode_gbps"] / self.report["wall_gbps"]
        return {"schema": SCHEMA, **kept, "peer": {"name": LlamaBench.name, "build": self.build, "flags": " ".join(PEER_FLAGS)},
                "rounds": TURNS * EACH, "tried": TURNS * EACH, "order": f"ours, its, in turn, {TURNS} times {EACH} each",
                "cells": [r.as_json() for r in rows],
                "decode_ratio": rows[1].ratio if rows else None, "errors": self.errors, **self.more}


class Writer:
    """SHAPE:TYPE on its way to a file; `words` is how."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        shape, _, kind = name.partition(":")
        self.path = args.dir / f"{shape}-{kind}.gguf"
        self.words = ["scripts/synth_model.py", shape, "--type", kind, "--head", "Q6_K"]
        run_as = [sys.executable, str(ROOT / self.words[0]), *self.words[1:], "--jobs", str(args.jobs), "-o", str(self.path)]
        self._process = None if self.path.exists() else subprocess.Popen(run_as, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def wait(self) -> Path:
        """The file, whole. SystemExit where it could not be written."""
        said = self._process.communicate()[1] if self._process else b""
        if self._process and self._process.returncode:
            raise SystemExit(f"card_pairs: {self.path.name} could not be written: {said.decode(errors='replace').strip()[-300:]}")
        return self.path


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="\n".join(__doc__.splitlines()[2:]),
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("models", nargs="+", metavar="SHAPE:TYPE", help="a shape of synth_model.py and the type of its linear layers")
    p.add_argument("--peer-bin", type=Path, required=True, metavar="DIR", help="folder of llama-bench")
    p.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where models are written (default: /dev/shm)")
    p.add_argument("--kv", default="f16", help="format of the KV cache, both sides (default: f16)")
    p.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="processes that write a model (default: half the processors)")
    p.add_argument("--seconds", type=float, default=86400.0, help="stop when so many seconds are over")
    p.add_argument("--machine", default="", help="the machine in words, for the rows")
    p.add_argument("--keep", action="store_true", help="leave the models where they were written")
    p.add_argument("-o", "--output", type=Path, help="append the rows to this file as well")
    args = p.parse_args(argv)
    ends = time.monotonic() + args.seconds
    following = Writer(args, args.models[0])
    for i in range(len(args.models)):
        writer, path = following, following.wait()
        if i + 1 < len(args.models):
            following = Writer(args, args.models[i + 1])
        began = time.monotonic()
        row = Pair(args, path, ends).measure() | {"machine": args.machine, "weights": f"random weights ({' '.join(writer.words)})"}
        line = json.dumps(row | {"seconds": round(time.monotonic() - began, 1)})
        print(line, flush=True)
        if args.output:
            with args.output.open("a", encoding="utf-8") as f:
                f.write(line + "\n")
        if not args.keep:
            path.unlink()
        if time.monotonic() > ends:
            break


if __name__ == "__main__":
    main()
