#!/usr/bin/env python3
"""What changed in llama.cpp's ways of decoding since the last sweep: commits that touch the files that matter, by mechanism, appended to
research/upstream-sweeps.md for a person to read. usage: upstream_sweep.py CLONE [--since DATE]   CLONE: a git clone of ggml-org/llama.cpp

A sweep that finds something worth trying ends in a row of research/, win or loss."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "research" / "upstream-sweeps.md"
HEAD = "# Sweeps of llama.cpp\n\nMade by scripts/upstream_sweep.py; a section a sweep, the newest last; the next goes on from its date.\n"
MECHANISMS = (  # name, paths of the repository
    ("matrix times vector", ("ggml/src/ggml-cuda/mmvq*", "ggml/src/ggml-cuda/mmvf*", "ggml/src/ggml-cuda/vecdotq.cuh")),
    ("matrix times matrix", ("ggml/src/ggml-cuda/mmq*", "ggml/src/ggml-cuda/mmf*", "ggml/src/ggml-cuda/mma.cuh")),
    ("attention", ("ggml/src/ggml-cuda/fattn*",)),
    ("delta net, convolution", ("ggml/src/ggml-cuda/gated_delta_net*", "ggml/src/ggml-cuda/ssm-*", "ggml/src/ggml-cuda/gla*")),
    ("experts", ("ggml/src/ggml-cuda/topk-moe*", "ggml/src/ggml-cuda/mmid*")),
    ("graphs, launches", ("ggml/src/ggml-cuda/ggml-cuda.cu", "ggml/src/ggml-cuda/common.cuh")),
    ("CPU kernels", ("ggml/src/ggml-cpu/arch/x86/*", "ggml/src/ggml-cpu/repack*")),
    ("speculation", ("common/speculative*", "tools/server/server-context*")),
    ("KV and memory", ("src/llama-kv-cache*", "src/llama-memory*")),
)


def commits(clone: Path, since: str, paths: tuple[str, ...]) -> list[str]:
    """`date hash subject` of each commit since the date that touches the paths, oldest first."""
    command = ["git", "-C", str(clone), "log", f"--since={since} 00:00", "--reverse", "--no-merges", "--date=short", "--format=%cd %h %s", "--",
               *(f":(glob){p}" for p in paths)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise SystemExit(f"{clone}: {(done.stderr.strip().splitlines() or ['git failed'])[-1]}")
    return done.stdout.splitlines()


def last_sweep(text: str) -> str | None:
    """The date of the newest section."""
    found = re.findall(r"^## (\d{4}-\d{2}-\d{2})", text, re.M)
    return found[-1] if found else None


def section(clone: Path, since: str, today: str) -> str:
    """One sweep as Markdown."""
    head = commits_head(clone)
    parts = [f"\n## {today}\n\nSince {since}, up to {head}.\n"]
    for name, paths in MECHANISMS:
        found = commits(clone, since, paths)
        parts.append(f"\n**{name}**: {len(found) or 'nothing'}\n" + "".join(f"- {line}\n" for line in found))
    return "".join(parts)


def commits_head(clone: Path) -> str:
    done = subprocess.run(["git", "-C", str(clone), "log", "-1", "--date=short", "--format=%h of %cd"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "an empty clone"


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("clone", type=Path)
    p.add_argument("--since", metavar="DATE", help="YYYY-MM-DD (default: the last sweep)")
    p.add_argument("--page", type=Path, default=PAGE, help="the page to append to")
    args = p.parse_args(argv)
    text = args.page.read_text(encoding="utf-8") if args.page.is_file() else HEAD
    since = args.since or last_sweep(text)
    if not since or not re.fullmatch(r"\d{4}-\d{2}-\d{2}", since):
        raise SystemExit(f"--since: expected YYYY-MM-DD, found {since}; there is no earlier sweep to go on from")
    args.page.write_text(text + section(args.clone, since, date.today().isoformat()), encoding="utf-8")
    print(f"{args.page}: appended the changes since {since}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
