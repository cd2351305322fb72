"""Speculative decoding side by side with llama.cpp: the same file and prompts, greedy, both engines plain and with K drafts of the MTP block, ours
also with as many as pay (auto).

    python scripts/spec_peer.py MODEL PROMPTS.json --server llama-server [--draft-max 3] [-n 192] [--first 0 --count 48] [--out row.json]
    python scripts/spec_peer.py MODEL 512 --server llama-server --device cuda --accept 0.8 --draft D.gguf --peer-draft W.gguf -n 256 --count 3

PROMPTS.json: a list of {"class": ..., "ids": [...]}; a number: prompts of so many made-up ids. --accept P: both sides take drafts with probability
P, whatever they are (the row says synthetic). --device cuda: the peer has all layers on the card. Each prompt is run on the arms back to back, so
that a drift of the machine weighs on all; llama.cpp's times and counts are those its server reports. Prints one JSON object: acceptance pooled and
by class, tokens a second, and each engine's speed-up over its own plain decoding. Both servers wait while the other side runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "py"))

from bw24 import abi  # noqa: E402
from bw24.bench import Others  # noqa: E402
from bw24.drafter import open_draft  # noqa: E402
from bw24.engine import Engine  # noqa: E402
from bw24.generate import Generation  # noqa: E402
from bw24.sampling import SamplingParams  # noqa: E402
from bw24.source import open_model  # noqa: E402
from bw24.speculate import AUTO, Drafted  # noqa: E402

HASHED = 1 << 30  # larger files are random weights made on the spot


def free_port() -> int:
    with closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """A llama-server with one slot; `options` beyond those that every arm has."""

    def __init__(self, binary: str, model: str, threads: int, ctx: int, options: list[str], end: bool = True):
        self.port, self.end = free_port(), end
        words = [binary, "-m", model, "-t", str(threads), "-c", str(ctx), "-np", "1", "--port", str(self.port), "--no-webui", *options]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  a pipe that nobody reads would stop it
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=self.log, text=True)

    def ready(self) -> Server:
        """Wait until it answers, so that several can load at once."""
        for _ in range(600):
            if self.process.poll() is not None:
                self.log.seek(0)
                sys.exit(f"llama-server ended: {self.log.read()[-1000:]}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).read()
                return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        sys.exit("llama-server did not start in a minute")

    def reply(self, ids: list[int], n: int) -> dict[str, Any]:
        body = {"prompt": ids, "n_predict": n, "temperature": 0, "cache_prompt": False, "return_tokens": True, "ignore_eos": not self.end}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
        found = json.loads(urllib.request.urlopen(request, timeout=300).read())
        t = found["timings"]
        return {"tokens": t["predicted_n"], "seconds": t["predicted_ms"] / 1000, "drafted": t.get("draft_n", 0),
                "accepted": t.get("draft_n_accepted", 0), "ids": found.get("tokens", [])}

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)
        self.log.close()


class Cpu:
    """Cores that a process has used since this was made: our peer's, which are not others'."""

    def __init__(self, pid: int):
        self.pid, self.began, self.used = pid, time.monotonic(), 0.0
        self.used = self._seconds()

    def _seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def cores(self) -> float:
        return (self._seconds() - self.used) / (time.monotonic() - self.began)


def ours(engine: Engine, ids: list[int], n: int, k: int, accept: float = 0.0) -> dict[str, Any]:
    """One reply here, timed from the first step after the prompt."""
    params = SamplingParams()
    ends = () if accept else engine.model.tokenizer.eog_ids
    seq = Drafted(engine, k, params, len(ids) + n, stop=ends, synthetic=accept) if k else engine.sequence()
    with closing(seq):
        logits = seq.prefill(ids)
        made = Generation(seq, None, ids, logits[-1] if k else logits, params, ctx=engine.ctx, limit=n, stop_ids=ends)
        for _ in made:
            pass
        rounds = seq.stats if k else None
    return {"tokens": len(made.ids), "seconds": made.stats.step_seconds, "drafted": rounds.drafted if k else 0,
            "accepted": sum(rounds.accepted) if k else 0, "ids": made.ids}


def pooled(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over prompts."""
    total = {name: sum(r[name] for r in rows) for name in ("tokens", "seconds", "drafted", "accepted")}
    total["seconds"] = round(total["seconds"], 4)
    total["tokens_per_second"] = round(total["tokens"] / total["seconds"], 2)
    if total["drafted"]:
        total["acceptance"] = round(total["accepted"] / total["drafted"], 4)
    return total


def report(args: argparse.Namespace, prompts: list[dict[str, Any]], arms: dict[str, list[dict[str, Any]]], build: str,
           load: list[float]) -> dict[str, Any]:
    """The row of all arms: pooled, and by class of prompt; `load`: cores that others used, run by run."""
    classes = sorted({p["class"] for p in prompts})
    of_class = lambda rows, c: pooled([r for r, p in zip(rows, prompts, strict=True) if p["class"] == c])  # noqa: E731
    by_class = {name: {c: of_class(rows, c) for c in classes} for name, rows in arms.items()}
    total = {name: pooled(rows) for name, rows in arms.items()}
    gain = {side: round(total[f"{side}_spec"]["tokens_per_second"] / total[f"{side}_plain"]["tokens_per_second"], 4) for side in ("ours", "peer")}
    gain["ours_auto"] = round(total["ours_auto"]["tokens_per_second"] / total["ours_plain"]["tokens_per_second"], 4)
    same = sum(a["ids"] == b["ids"] == c["ids"] for a, b, c in zip(arms["ours_plain"], arms["ours_spec"], arms["ours_auto"], strict=True))
    synthetic = {"synthetic": True, "accept": args.accept, "draft": Path(args.draft).name} if args.accept else {
        "prompts_sha256": hashlib.sha256(Path(args.prompts).read_bytes()).hexdigest(), "same_text_as_plain": same}
    size = Path(args.model).stat().st_size
    return {"kind": "spec_peer", "device": args.device, "model": Path(args.model).name, "prompts": len(prompts), "tokens": args.n,
            "k": args.draft_max, "threads": args.t,
            "peer_build": build, "revision": abi.version(), "file_bytes": size, "others_cores": load,
            **({"file_sha256": hashlib.sha256(Path(args.model).read_bytes()).hexdigest()} if size < HASHED else {}),
            "total": total, "by_class": by_class, "speed_up": gain, **synthetic,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("--server", required=True)
    parser.add_argument("--draft-max", type=int, default=3)
    parser.add_argument("-n", type=int, default=192)
    parser.add_argument("-t", type=int, default=2)
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--accept", type=float, default=0.0)
    parser.add_argument("--draft", help="our drafter, where it is not the model's own block")
    parser.add_argument("--peer-draft", help="the peer's")
    parser.add_argument("--out", help="also keep the replies' counts, to pool several runs")
    parser.add_argument("--pool", nargs="*", help="no run: pool these files of --out")
    args = parser.parse_args()
    made_up = [{"class": "made up", "ids": [16 + i * 7 % 200 for i in range(int(args.prompts))]}] if args.prompts.isdigit() else []
    prompts = made_up * args.count or json.loads(Path(args.prompts).read_text(encoding="utf-8"))
    if args.pool:
        parts = [json.loads(Path(p).read_text(encoding="utf-8")) for p in args.pool]
        arms = {name: [r for part in parts for r in part["arms"][name]] for name in parts[0]["arms"]}
        print(json.dumps(report(args, [p for part in parts for p in part["prompts"]], arms, parts[0]["build"],
                                [x for part in parts for x in part["load"]])))
        return 0
    prompts = prompts[args.first : args.first + args.count]
    done = subprocess.run([args.server, "--version"], capture_output=True, text=True, check=False)
    build = next((line for line in (done.stdout + done.stderr).splitlines() if line.startswith("version")), "unknown")
    card = [] if args.device == "cpu" else ["-ngl", "99", "-fa", "on"]
    drafts = ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(args.draft_max), *(["-md", args.peer_draft] if args.peer_draft else []),
              *(["-ngld", "99"] if card else []), *(["--spec-synth-rates", ",".join(f"{args.accept ** (i + 1):.6g}" for i in range(args.draft_max))]
                                                      if args.accept else [])]
    plain = Server(args.server, args.model, args.t, args.ctx, card, not args.accept)
    spec = Server(args.server, args.model, args.t, args.ctx, [*card, *drafts], not args.accept)
    arms: dict[str, list[dict[str, Any]]] = {name: [] for name in ("ours_plain", "ours_spec", "ours_auto", "peer_plain", "peer_spec")}
    others = Others()
    try:
        with open_model(args.model) as model, Engine(model, device=args.device, threads=args.t, ctx=args.ctx,
                                                     draft=open_draft(args.draft, model) if args.draft else True) as engine:
            plain.ready(), spec.ready()
            runs = {"ours_plain": lambda ids: ours(engine, ids, args.n, 0),
                    "ours_spec": lambda ids: ours(engine, ids, args.n, args.draft_max, args.accept),
                    "ours_auto": lambda ids: ours(engine, ids, args.n, AUTO, args.accept),
                    "peer_plain": lambda ids: plain.reply(ids, args.n), "peer_spec": lambda ids: spec.reply(ids, args.n)}
            for run in runs.values():
                run(prompts[0]["ids"])
            others.start()
            servers = [Cpu(s.process.pid) for s in (plain, spec)]
            for number, prompt in enumerate(prompts):
                for name in list(runs) if number % 2 else list(runs)[::-1]:
                    arms[name].append(runs[name](prompt["ids"]))
            load = [round(max(others.cores() - sum(s.cores() for s in servers), 0.0), 3)]
    finally:
        plain.close()
        spec.close()
    kept = [{"class": p["class"]} for p in prompts]
    if args.out:
        Path(args.out).write_text(json.dumps({"prompts": kept, "arms": arms, "build": build, "load": load}), encoding="utf-8")
    print(json.dumps(report(args, kept, arms, build, load)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
