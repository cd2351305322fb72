"""The command report: what this machine is, whether every kernel and gate holds on it, and how fast it is, as one page to paste. Each part is a
command of its own process, so a crash of one is a line of the page. Owns the page; knows nothing of what the parts do."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .cli_common import EXIT_MISMATCH, EXIT_OK, add_command, say, show, write, write_json
from .device import choose
from .errors import Bw24Error

EXAMPLES = """
bw24 report                                     this machine with the built-in model, some minutes
bw24 report model.gguf -o report.md             with a model of yours; the page goes to a file
bw24 report --device cuda:0 --json              one object for scripts
"""
PARTS = (  # name, words of the command, seconds it may take
    ("probe", ("probe",), 120),
    ("kernel-check", ("kernel-check",), 1200),
    ("gate", ("gate", "MODEL"), 1200),
    ("bench", ("bench", "MODEL", "--sizes", "256", "--tokens", "64"), 1200),
)


def add_commands(commands: Any) -> None:
    """Declare report."""
    parser = add_command(commands, "report", run_report, "this machine's hardware, checks, gates and speeds as one page to paste", EXAMPLES,
                         ("device", "backend", "isa", "threads", "json"))
    parser.add_argument("-o", "--output", metavar="FILE", help="write the page there instead of standard output")


def _system() -> dict[str, str]:
    """Facts about the machine in generic words: no host name, no user name, no path."""
    from . import __version__, abi
    from .cli_check import cpu_name

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "bw24": f"{__version__}, revision {abi.version()}, ABI {abi.abi_number()}", "processor": cpu_name(),
        "cores": str(len(os.sched_getaffinity(0))), "memory": f"{memory / 1e9:.1f} GB", "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(), "gpu": _cards(),
    }


def _cards() -> str:
    """The NVIDIA cards with driver, memory, clocks and power, or why there are none."""
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total,driver_version,clocks.sm,clocks.mem,power.draw", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return "none found (nvidia-smi does not answer)"
    return "; ".join(lines) or "none"


def run_part(words: list[str], seconds: int) -> dict[str, Any]:
    """One command's JSON object as `result`, its exit `status`, and `error` with its last line where it failed."""
    began = time.monotonic()
    try:
        done = subprocess.run([sys.executable, "-m", "bw24", *words, "--json"], capture_output=True, text=True, errors="replace", timeout=seconds,
                              check=False)
    except subprocess.TimeoutExpired:
        return {"status": None, "error": f"no end within {seconds} s", "seconds": seconds}
    out: dict[str, Any] = {"status": done.returncode, "seconds": round(time.monotonic() - began, 1)}
    lines = done.stdout.strip().splitlines()
    try:
        out["result"] = json.loads(lines[-1]) if lines else None
    except ValueError:
        out["result"] = None
    if done.returncode < 0:
        out["error"] = f"ended by signal {-done.returncode}"
    elif done.returncode and out["result"] is None:
        out["error"] = (done.stderr.strip().splitlines() or ["no message"])[-1][:300]
    return out


def run_kernels(words: list[str], backend: str, seconds: int) -> dict[str, Any]:
    """kernel-check; on a card, where the time goes to the plain reference, class fast too and by several processes at once."""
    card = backend.startswith("cuda")
    n = max(min(len(os.sched_getaffinity(0)) // 2, 8), 1) if card else 1
    words = [*words, "--prefill", "fast"] if card else words
    with ThreadPoolExecutor(n) as pool:
        parts = list(pool.map(lambda i: run_part([*words, "--part", f"{i + 1}/{n}"], seconds), range(n)))
    bad = [p for p in parts if p.get("error") or p["result"] is None]
    if bad:
        return bad[0]
    found, skipped = [p["result"] for p in parts], Counter()
    for r in found:
        skipped.update(r["skipped"])
    result = {"equal": sum(r["equal"] for r in found), "different": [d for r in found for d in r["different"]], "skipped": dict(skipped)}
    return {"status": max(p["status"] for p in parts), "seconds": max(p["seconds"] for p in parts), "result": result}


def _options(args: argparse.Namespace) -> tuple[list[str], str]:
    """The words that every part is given, and the backend that they mean: empty where it cannot be used, which the parts then report."""
    options = ["--device", str(args.device), "--backend", str(args.backend)]
    for name in ("isa", "threads"):
        if getattr(args, name):
            options += [f"--{name}", str(getattr(args, name))]
    try:
        return options, choose(args.device, args.backend, args.isa).backend
    except Bw24Error:
        return options, ""


def _summary(name: str, part: dict[str, Any]) -> str:
    """A part in one line."""
    r = part.get("result")
    if part.get("error") or r is None:
        return part.get("error") or "no result"
    if name == "kernel-check":
        kinds: Counter[str] = Counter()
        for reason, count in r["skipped"].items():  # shapes that a type cannot have are one kind
            kinds[re.sub(r"^\d+ columns are not a multiple of \S+ block of (\d+)$", r"shapes not a multiple of a block of \1", reason)] += count
        skips = "; ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"
        return f"{r['equal']} equal, {len(r['different'])} different" + _first(r["different"]) + f"; skipped: {skips}"
    if name == "gate":
        failed = [v for v in r["verdicts"] if v["status"] == "FAIL"]
        return f"{r['passed']} passed, {r['failed']} failed, {r['skipped']} skipped" + _first(failed)
    if name == "bench":
        cells = ", ".join(f"{c['kind']} {c['tokens']}: {c['ours']['median']:.1f} tok/s" for c in r["cells"])
        share = f"; decode at {r['wall_fraction']:.0%} of {r['wall_gbps']:.1f} GB/s" if r.get("wall_fraction") else ""
        quiet = "" if not r["disturbed"] else f"; NOT QUIET in {r['disturbed']} of {r['rounds']} rounds"
        return f"{cells}{share}{quiet}; prefill and decode of the same rows {'MATCH' if r['gate']['match'] else 'MISMATCH'}"
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in r.items() if isinstance(v, (int, float, str)))


def _first(bad: list[dict[str, Any]]) -> str:
    return f" (first: {bad[0]['name']}: {bad[0]['detail']})" if bad else ""


def page(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    out = ["### bw24 hardware report", "", f"{report['time']}, device `{report['device']}`, model `{report['model']}`", "", "| | |", "|---|---|"]
    out += [f"| {k} | {v} |" for k, v in report["system"].items()]
    out += [f"| **{k}** ({v['seconds']} s) | {_summary(k, v)} |".replace("\n", " ") for k, v in report["parts"].items()]
    out += ["", f"Verdict: **{report['verdict']}**", "", "<details><summary>JSON</summary>", "", "```json", json.dumps(report), "```"]
    return "\n".join([*out, "", "</details>", ""])


def run_report(args: argparse.Namespace) -> int:
    """Exit code of `bw24 report`: 3 where a kernel or gate differs or a part crashed."""
    model = args.model if args.model_given else "demo"
    options, backend = _options(args)
    parts: dict[str, Any] = {}
    for name, words, seconds in PARTS:
        say(f"report: {name} ...")
        words = [model if w == "MODEL" else w for w in words] + options
        parts[name] = run_kernels(words, backend, seconds) if name == "kernel-check" else run_part(words, seconds)
    bad = [name for name in ("kernel-check", "gate", "bench") if parts[name]["status"] != 0]
    report = {
        "schema": "report 1", "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "device": args.device,
        "model": Path(model).name, "system": _system(), "parts": parts, "verdict": "all green" if not bad else "not green: " + ", ".join(bad),
    }
    if args.json:
        write_json(report)
    elif args.output:
        try:
            Path(args.output).write_text(page(report), encoding="utf-8")
        except OSError as error:
            raise Bw24Error(f"{show(args.output, 4096)}: cannot write: {error.strerror}") from None
        say(f"report: wrote {args.output}")
    else:
        write(page(report))
    return EXIT_MISMATCH if bad else EXIT_OK
