#!/usr/bin/env python3
"""What changed in llama.cpp's ways of decoding since the last sweep, by mechanism, appended to research/upstream-sweeps.md for a person to read.

    upstream_sweep.py CLONE [--since DATE]     a git clone of ggml-org/llama.cpp: its commits that touch the files that matter
    upstream_sweep.py TREE --before OLDTREE    two unpacked source trees: files, lines, and the kernels, functions and switches that are new or gone

A sweep that finds something worth trying ends in a row of research/, win or loss."""

from __future__ import annotations

import argparse
import difflib
import re
import subprocess
import sys
from datetime import date, datetime, timezone
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


NAMES = re.compile(
    r"getenv\(\"(\w+)\"\)"
    r"|^(?:static |inline |extern |void |bool |int |float )[^;={}()#/]*?\b(\w+)\s*\("
    r"|__global__[^;{}]*?\b(\w+)\s*\(", re.M)
MACROS = re.compile(r"__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)")


def read_tree(tree: Path, paths: tuple[str, ...]) -> dict[str, str]:
    """Path -> text of the files that the patterns name."""
    files = {f for p in paths for f in tree.glob(p) if f.is_file()}
    return {f.relative_to(tree).as_posix(): f.read_text(encoding="utf-8", errors="replace") for f in sorted(files)}


def names(texts: dict[str, str]) -> set[str]:
    """Kernels, functions and environment switches that the files define or read."""
    return {next(filter(None, found)) for text in texts.values() for found in NAMES.findall(MACROS.sub("", text))}


def changes(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """`path +added -removed` of each file that differs, most lines first."""
    out = []
    for path in {*old, *new}:
        a, b = old.get(path, "").splitlines(), new.get(path, "").splitlines()
        lines = [line[0] for line in difflib.unified_diff(a, b, n=0, lineterm="") if not line.startswith(("+++", "---", "@@"))]
        if lines:
            what = "" if path in old and path in new else " (new)" if path in new else " (gone)"
            out.append((len(lines), f"{path} +{lines.count('+')} -{lines.count('-')}{what}"))
    return [text for _, text in sorted(out, key=lambda o: (-o[0], o[1]))]


def dated(tree: Path) -> str:
    """The day of the newest file of the mechanisms: archives keep the times of their files."""
    files = [f for _, paths in MECHANISMS for p in paths for f in tree.glob(p)]
    if not files:
        raise SystemExit(f"{tree}: no file of llama.cpp's sources that a sweep looks at")
    return datetime.fromtimestamp(max(f.stat().st_mtime for f in files), timezone.utc).date().isoformat()


def tree_section(new: Path, old: Path, labels: tuple[str, str], today: str) -> str:
    """A sweep of two trees as Markdown."""
    parts = [f"\n## {today}\n\nFrom {labels[0]} (files of {dated(old)}) to {labels[1]} (files of {dated(new)}).\n"]
    for mechanism, paths in MECHANISMS:
        a, b = read_tree(old, paths), read_tree(new, paths)
        found = changes(a, b)
        parts.append(f"\n**{mechanism}**: {f'{len(found)} files' if found else 'nothing'}\n" + "".join(f"- {line}\n" for line in found[:12]))
        for word, more in (("new", names(b) - names(a)), ("gone", names(a) - names(b))):
            if more:
                parts.append(f"- {word}: {', '.join(f'`{n}`' for n in sorted(more)[:24])}{f' and {len(more) - 24} more' if len(more) > 24 else ''}\n")
    return "".join(parts)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("clone", type=Path, help="the clone, or the newer tree")
    p.add_argument("--since", metavar="DATE", help="YYYY-MM-DD (default: the last sweep)")
    p.add_argument("--before", type=Path, metavar="OLDTREE", help="compare with this tree instead of reading commits")
    p.add_argument("--labels", nargs=2, metavar=("OLD", "NEW"), help="with --before: what to call the trees (default: their folders)")
    p.add_argument("--page", type=Path, default=PAGE, help="the page to append to")
    args = p.parse_args(argv)
    text = args.page.read_text(encoding="utf-8") if args.page.is_file() else HEAD
    if args.before:
        labels = tuple(args.labels or (args.before.resolve().name, args.clone.resolve().name))
        args.page.write_text(text + tree_section(args.clone, args.before, labels, date.today().isoformat()), encoding="utf-8")
        print(f"{args.page}: appended the changes from {labels[0]} to {labels[1]}")
        return 0
    since = args.since or last_sweep(text)
    if not since or not re.fullmatch(r"\d{4}-\d{2}-\d{2}", since):
        raise SystemExit(f"--since: expected YYYY-MM-DD, found {since}; there is no earlier sweep to go on from")
    args.page.write_text(text + section(args.clone, since, date.today().isoformat()), encoding="utf-8")
    print(f"{args.page}: appended the changes since {since}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
