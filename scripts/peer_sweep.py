#!/usr/bin/env python3
"""At which flags is llama.cpp fastest here? Runs llama-bench over one group of flags after the other and compares every setting with the one that
`bw24 bench --vs llama.cpp` uses; one JSON line a setting. The findings are in docs/COMPETITOR-SETUP.md.

    scripts/peer_sweep.py MODEL --peer-bin DIR [--groups threads,poll] [-o research/peer.jsonl]
    scripts/peer_sweep.py MODEL --peer-bin DIR --device cuda --prefill 512,2048 --decode 128

A group is the default and its alternatives; every second round runs them in reverse order. Settings that differ in one flag share a process of
llama-bench, which warms each up. A ratio is that of a setting to the default at the same repetition."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "py"))

from bw24 import records  # noqa: E402
from bw24.bench import MIN_ROUNDS, Others, median_interval  # noqa: E402
from bw24.cli_check import cpu_name  # noqa: E402

# flag -> its key in the JSON
KEYS = {"-t": "n_threads", "-fa": "flash_attn", "-ub": "n_ubatch", "-lm": "load_mode", "--poll": "poll", "--repack": "repack"}
SHOWN = {"auto": "-1", "on": "1", "off": "0", "true": "1", "false": "0"}  # words of the command line and of JSON -> one form


@dataclass(frozen=True)
class Group:
    """Settings that are compared with each other: `default` and the alternatives, as flag -> value; `env` belongs to the alternatives alone."""

    default: dict[str, str]
    others: tuple[dict[str, str], ...]
    env: tuple[dict[str, str], ...] = ()
    prefill: tuple[int, ...] | None = None  # other lengths than those asked for, where the flag matters for long prompts only
    decode: bool = True


def one_flag(flag: str, default: str, *values: str, **more: Any) -> Group:
    return Group({flag: default}, tuple({flag: v} for v in values), **more)


def cpu_groups(threads: int) -> dict[str, Group]:
    every = hex((1 << threads) - 1)
    counts = sorted({1, max(1, threads // 2), threads + 1} - {threads})
    return {
        "threads": one_flag("-t", str(threads), *map(str, counts)),
        "flash-attention": one_flag("-fa", "auto", "on", "off"),
        "ubatch": one_flag("-ub", "512", "128", "256", prefill=(512,), decode=False),
        "batch": Group({"-b": "2048", "-ub": "512"}, ({"-b": "2048", "-ub": "1024"}, {"-b": "512", "-ub": "512"}), prefill=(1024,), decode=False),
        "cache": Group({"-ctk": "f16", "-ctv": "f16", "-fa": "on"}, tuple({"-ctk": k, "-ctv": v, "-fa": "on"} for k, v in
                                                                    (("q8_0", "f16"), ("q8_0", "q8_0"), ("bf16", "bf16")))),
        "load": one_flag("-lm", "auto", "none", "mmap", "mlock"),
        "priority": one_flag("--prio", "0", "2", "3"),
        "poll": one_flag("--poll", "50", "0", "100"),
        "repack": one_flag("--repack", "1", "0"),
        "affinity": Group({"-C": "0x0", "--cpu-strict": "0"}, ({"-C": every, "--cpu-strict": "0"}, {"-C": every, "--cpu-strict": "1"})),
    }


CUDA_GROUPS = {
    "flash-attention": one_flag("-fa", "1", "0"),
    "ubatch": one_flag("-ub", "512", "1024", "2048", "4096", prefill=(4096,), decode=False),
    "cache": Group({"-ctk": "f16", "-ctv": "f16"}, ({"-ctk": "q8_0", "-ctv": "q8_0"},)),
    "environment": Group({}, (), env=({"GGML_CUDA_DISABLE_GRAPHS": "1"}, {"GGML_CUDA_GRAPH_OPT": "1"}, {"GGML_CUDA_PDL": "0"})),
}
CUDA_BASE = {"-ngl": "999", "-fa": "1", "-b": "4096"}  # the largest -ub of the sweep needs so large a -b; it changes nothing else


@dataclass
class Setting:
    """One line of the sweep: what differs from the default, and the rates of every repetition, round after round."""

    flags: dict[str, str]
    env: dict[str, str] = field(default_factory=dict)
    rates: dict[str, list[float]] = field(default_factory=dict)  # "prefill 256" -> tok/s
    build: str = ""


def settings(group: Group) -> list[Setting]:
    """The default first."""
    return [Setting(group.default), *(Setting(f) for f in group.others), *(Setting(group.default, e) for e in group.env)]


def call(args: argparse.Namespace, group: Group, s: Setting, **listed: str) -> list[dict[str, Any]]:
    """llama-bench's rows for one setting; `listed` replaces the values of flags (without dashes) by lists. SystemExit where it fails."""
    base = {"-t": str(args.threads), "-ctk": "f16", "-ctv": "f16", **({"-dev": "none"} if args.device == "cpu" else CUDA_BASE)}
    flags = {**base, **s.flags}
    flags = {flag: listed.get(flag.lstrip("-"), value) for flag, value in flags.items()}
    words = [str(args.binary), "-m", str(args.model), "-p", ",".join(map(str, group.prefill or args.prefill)),
             "-n", ",".join(map(str, args.decode)) if group.decode else "0", "-r", str(args.repeat), "-o", "json"]
    done = subprocess.run([*words, *(w for pair in flags.items() for w in pair)], capture_output=True, text=True, errors="replace",
                          env={**os.environ, **s.env}, check=False, timeout=900)
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise SystemExit(f"peer_sweep: {s.flags}: {(done.stderr.strip().splitlines() or ['no message'])[-1][:200]}") from None


def keep(s: Setting, found: list[dict[str, Any]]) -> None:
    """Add the rates of llama-bench's rows to the setting's."""
    if not found:
        raise SystemExit(f"peer_sweep: llama-bench measured nothing with {s.flags}")
    for row in found:
        n = row["n_prompt"] or row["n_gen"]
        s.rates.setdefault(f"{'prefill' if row['n_prompt'] else 'decode'} {n}", []).extend(n / t * 1e9 for t in row["samples_ns"])
    s.build = f"build {found[0].get('build_number')}, {found[0].get('backends')}"


def once(args: argparse.Namespace, group: Group, order: list[Setting]) -> None:
    """One round: a process for all where they differ in one flag that the output names, else a process each."""
    flag = next(iter(group.default)) if len(group.default) == 1 and not group.env else None
    if flag not in KEYS:
        for s in order:
            keep(s, call(args, group, s))
        return
    found = call(args, group, order[0], **{flag.lstrip("-"): ",".join(s.flags[flag] for s in order)})
    form = lambda value: SHOWN.get(str(value).lower(), str(value))  # noqa: E731
    for s in order:
        keep(s, [row for row in found if form(row[KEYS[flag]]) == form(s.flags[flag])])


def sweep(args: argparse.Namespace, group: Group) -> tuple[list[Setting], list[float]]:
    """Every setting, round after round, and the cores that others used in each round."""
    chosen, loads = settings(group), []
    for number in range(args.rounds):
        others = Others()
        once(args, group, chosen if number % 2 == 0 else chosen[::-1])
        loads.append(round(others.cores(), 3))
    return chosen, loads


def row_of(args: argparse.Namespace, name: str, s: Setting, default: Setting, loads: list[float]) -> dict[str, Any]:
    """The line of one setting."""
    cells = {}
    for cell, values in s.rates.items():
        pairs = [a / b for a, b in zip(values, default.rates[cell], strict=True)]
        low, high, coverage = median_interval(pairs)
        cells[cell] = {"median": statistics.median(values), "samples": values, "ratio": statistics.median(pairs), "low": low, "high": high,
                       "coverage": coverage}
    return {"what": "peer flags", "group": name, "flags": s.flags, "env": s.env, "default": s is default, "file": args.model.name,
            "file_bytes": args.model.stat().st_size, "weights": args.weights, "backend": args.device, "threads": args.threads, "rounds": args.rounds,
            "repeat": args.repeat, "others_cores": loads, "cells": cells, "cpu": cpu_name(), "machine": args.machine,
            "build": s.build,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def text_of(row: dict[str, Any]) -> str:
    what = " ".join([*(f"{k} {v}" for k, v in row["flags"].items()), *(f"{k}={v}" for k, v in row["env"].items())]) or "as given"
    cells = [f"{c} {v['median']:.1f} tok/s" + ("" if row["default"] else f" = {v['ratio']:.3f}x ({v['low']:.3f}..{v['high']:.3f})")
             for c, v in row["cells"].items()]
    return f"{row['group']:<16} {what:<44} {'default ' if row['default'] else ''}{'; '.join(cells)}"


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path)
    p.add_argument("--peer-bin", type=Path, required=True, metavar="DIR", help="folder of llama-bench")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--groups", help="names of groups, with commas between (default: all of the device)")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--prefill", type=numbers, default=(256,), metavar="N,N")
    p.add_argument("--decode", type=numbers, default=(64,), metavar="N,N")
    p.add_argument("--rounds", type=int, default=MIN_ROUNDS)
    p.add_argument("--repeat", type=int, default=1, help="repetitions inside a round")
    p.add_argument("--weights", default="random weights")
    p.add_argument("--machine", default="")
    p.add_argument("-o", "--output", type=Path, help="file to append the lines to")
    args = p.parse_args(argv)
    args.binary = args.peer_bin / "llama-bench"
    known = cpu_groups(args.threads) if args.device == "cpu" else CUDA_GROUPS
    asked = args.groups.split(",") if args.groups else list(known)
    if unknown := [g for g in asked if g not in known]:
        p.error(f"--groups {unknown[0]}: expected some of {', '.join(known)}")
    args.chosen = {g: known[g] for g in asked}
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    for path in (args.binary, args.model):
        if not path.is_file():
            raise SystemExit(f"peer_sweep: {path}: no such file")
    for name, group in args.chosen.items():
        chosen, loads = sweep(args, group)
        for s in chosen:
            row = row_of(args, name, s, chosen[0], loads)
            print(text_of(row), flush=True)
            if args.output:
                records.append(args.output, row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
