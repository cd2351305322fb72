#!/usr/bin/env python3
"""Runs the cells of a published board on this machine, interleaved with llama.cpp, and prints old and new side by side.

    scripts/board.py --rows original --model qwen3.5-9b=hf:OWNER/REPO:NVFP4 --peer-bin DIR

`original`: the tables of the original project (research/original-cells.json). Its page does not name the files' repositories, so each model is
given with --model KEY=PATH|hf:...; cells of models that are not given are listed as not run. Plain cells are `bw24 bench --vs llama.cpp` at the
cell's depth; speculative cells are scripts/spec_peer.py with the file's own MTP block, or our side's with --draft KEY=PATH|hf:..., on the prompts
of the cell's class (research/prompts/classes.json). One JSON line a cell goes to --out."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "py"))

from bw24 import device, models, records  # noqa: E402
from bw24.errors import Bw24Error  # noqa: E402

BOARDS = {"original": ROOT / "research" / "original-cells.json"}


def pairs(words: list[str], known: dict[str, str]) -> dict[str, str]:
    """KEY=VALUE words. SystemExit names a key that the board does not have."""
    out = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or key not in known:
            raise SystemExit(f"{word}: expected KEY=FILE with one of {', '.join(known)}")
        out[key] = value
    return out


def fetch(name: str, endpoint: str | None) -> Path:
    """The file of a path or an hf: name, downloaded where needed."""
    try:
        return models.resolve(name, endpoint=endpoint, progress=sys.stderr.isatty()).path
    except Bw24Error as error:
        raise SystemExit(f"{name}: {error}") from None


def run_json(command: list[str]) -> dict[str, Any]:
    """The last line of a command's output as JSON, or {"error": its last words}."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env={**os.environ, "PYTHONPATH": str(ROOT / "py")}, check=False)
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1][:300]}


def plain(cell: dict[str, Any], model: Path, draft: Path | None, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "bw24", "bench", str(model), "--device", args.device, "--kv", "f16", "--vs", "llama.cpp",
               "--peer-bin", str(args.peer_bin), "--sizes", "512", "--tokens", str(args.tokens), "--depths", str(cell["depth"]),
               "--rounds", str(args.rounds), "--json"]
    found = run_json(command)
    if "error" in found:
        return found
    decode = next(c for c in found["cells"] if c["kind"] == "decode")
    rates = {"ours": decode["ours"]["median"], "peer": decode["peer"]["median"]}
    return {**rates, "low": decode["pair_low"], "high": decode["pair_high"], "bench": found}


def spec(cell: dict[str, Any], model: Path, draft: Path | None, args: argparse.Namespace) -> dict[str, Any]:
    classes = json.loads((ROOT / "research" / "prompts" / "classes.json").read_text(encoding="utf-8"))
    work = args.out.with_suffix(".prompts.json")
    from bw24.source import open_model

    with open_model(model) as opened:  # texts become this model's ids here, the same for both sides
        context = min(opened.context_length, 8192)
        chosen = [{"class": cell["class"], "ids": opened.tokenizer.encode(text)} for text in classes[cell["class"]]]
    work.write_text(json.dumps(chosen), encoding="utf-8")
    command = [sys.executable, str(ROOT / "scripts" / "spec_peer.py"), str(model), str(work), "--server", str(args.peer_bin / "llama-server"),
               "--draft-max", str(cell["k"]), "-n", str(args.tokens), "--count", str(len(chosen)), "--ctx", str(context),
               "--device", device.choose(args.device).backend, *(["--draft", str(draft)] if draft else [])]
    try:
        found = run_json(command)
    finally:
        work.unlink(missing_ok=True)
    return found if "error" in found else {"spec": found}


def line(cell: dict[str, Any], found: dict[str, Any]) -> str:
    """One cell as text."""
    what = f"{cell['model']:<16} " + (f"plain @ {cell['depth']}" if cell["kind"] == "plain" else f"K={cell['k']} {cell['class']}")
    then = f"published {cell['published'][0]} / {cell['published'][1]} = {cell['published'][0] / cell['published'][1]:.2f}x"
    if "ours" in found:
        ours, peer = found["ours"], found["peer"]
        return f"{what:<38} {then}; here {ours:.1f} / {peer:.1f} = {ours / peer:.2f}x ({found['low']:.2f}..{found['high']:.2f})"
    if "spec" in found:
        total = found["spec"]["total"]
        a, b = total["ours_spec"], total["peer_spec"]
        best = max(b["tokens_per_second"], total["peer_plain"]["tokens_per_second"])  # published beside the better of its two ways
        return (f"{what:<38} {then}; here {a['tokens_per_second']:.1f} / {best:.1f} = {a['tokens_per_second'] / best:.2f}x, "
                f"accepted {a.get('acceptance', 0):.3f} / {b.get('acceptance', 0):.3f}")
    return f"{what:<38} {then}; not run: {found.get('error', 'no --model for it')}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rows", choices=sorted(BOARDS), required=True)
    p.add_argument("--model", action="append", default=[], metavar="KEY=FILE")
    p.add_argument("--draft", action="append", default=[], metavar="KEY=FILE", help="a drafter's file for our side of the model's speculative cells")
    p.add_argument("--peer-bin", type=Path, metavar="DIR", help="folder of llama-bench and llama-server")
    p.add_argument("--device", default="auto")
    p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--endpoint", help="another hub than the usual one")
    p.add_argument("--out", type=Path, default=Path("board.jsonl"), help="file to append a JSON line a cell to")
    args = p.parse_args(argv)
    if args.model and not args.peer_bin:
        p.error("--peer-bin DIR: the cells are measured beside llama.cpp")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    board = json.loads(BOARDS[args.rows].read_text(encoding="utf-8"))
    files = {key: fetch(name, args.endpoint) for key, name in pairs(args.model, board["models"]).items()}
    drafts = {key: fetch(name, args.endpoint) for key, name in pairs(args.draft, board["models"]).items()}
    ran = 0
    for cell in board["cells"]:
        found: dict[str, Any] = {}
        if cell["model"] in files:
            found = (plain if cell["kind"] == "plain" else spec)(cell, files[cell["model"]], drafts.get(cell["model"]), args)
            ran += "error" not in found
            names = {"file": files[cell["model"]].name, "draft": getattr(drafts.get(cell["model"]), "name", None)}
            records.append(args.out, {"board": args.rows, "cell": cell, **names, **found})
        print(line(cell, found), flush=True)
    print(f"{ran} of {len(board['cells'])} cells measured; source: {board['source']}; its drafters: {board['drafts']}")
    return 0 if ran or not files else 1


if __name__ == "__main__":
    sys.exit(main())
