#!/usr/bin/env python3
"""The server against the command line, in pairs that alternate: speed of one stream and its first token against `gen`, the cost of masks, a second
request with the same long beginning, a worker that was killed. Owns these five comparisons; knows no other server (`bw24 bench --url` does).

usage: server_bench.py MODEL [--what speed,first,mask,prefix,restart] [--spec auto] [--rounds 5] [-n 200] [-o research/server.jsonl] ...

The client is a bare socket that takes the time of each piece as it arrives and reads it afterwards, so that its own work costs the two sides the
least; `bench` in a speed row is the same with `bw24 bench --url`, whose client parses as it goes. One JSON line a comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "py"), str(ROOT / "tests")]

from bw24 import abi, bench_url  # noqa: E402
from bw24.bench import Others  # noqa: E402
from serving import Server  # noqa: E402

STORY = "Write a long story about a river that runs from the mountains to the sea."
TEXTS = (STORY, "Write a Python function that reads a file and counts its words.", "Explain how rain is made, step by step.",
         "Write a letter from a sailor to his sister about a storm.", "List the things that a baker does before sunrise.",
         "Write a Python class for a queue with tests.")
SCHEMA = {"type": "object", "required": ["title", "people", "places"], "additionalProperties": False, "properties": {
    "title": {"type": "string", "minLength": 5},
    "people": {"type": "array", "minItems": 8, "items": {
        "type": "object", "required": ["name", "age", "trade", "friends"], "additionalProperties": False, "properties": {
            "name": {"type": "string", "pattern": "^[A-Z][a-z]+ [A-Z][a-z]+$"}, "age": {"type": "integer", "minimum": 1, "maximum": 99},
            "trade": {"enum": ["miller", "baker", "fisher", "smith"]}, "friends": {"type": "array", "minItems": 2, "items": {"type": "string"}}}}},
    "places": {"type": "array", "minItems": 4, "items": {"type": "string"}}}}


def chat(port: int, text: str, n: int, **more: Any) -> dict[str, Any]:
    """One greedy streamed reply. first, last: seconds to the first and last piece of text; timings: the server's; tokens; text."""
    body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": n, "temperature": 0, "stream": True, "ignore_eos": True,
                       "stream_options": {"include_usage": True}, **more}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n" \
           "Connection: close\r\n\r\n"
    arrived: list[tuple[float, bytes]] = []
    with socket.create_connection(("127.0.0.1", port)) as s:
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = time.perf_counter()
        s.sendall(head.encode() + body)
        while piece := s.recv(1 << 16):
            arrived.append((time.perf_counter() - began, piece))
    return _read(arrived)


def _read(arrived: list[tuple[float, bytes]]) -> dict[str, Any]:
    """What the pieces of a reply say; an event counts as having come with the piece that completes it."""
    held, out = b"", {"first": 0.0, "last": 0.0, "text": "", "events": 0}
    for at, piece in arrived:
        held += piece
        *lines, held = held.split(b"\n")
        for line in lines:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise SystemExit(f"server_bench: {event['error']['message']}")
            delta = event["choices"][0]["delta"] if event["choices"] else {}
            if text := delta.get("content") or delta.get("reasoning_content"):
                out["first"], out["last"] = out["first"] or at, at
                out["text"], out["events"] = out["text"] + text, out["events"] + 1
            out["timings"] = event.get("timings") or out.get("timings")
            out["tokens"] = (event.get("usage") or {}).get("completion_tokens") or out.get("tokens")
    if not out["text"]:
        raise SystemExit(f"server_bench: no reply: {b''.join(p for _, p in arrived)[:400]!r}")
    return out


def rate(reply: dict[str, Any]) -> float:
    """Tokens a second after the first, as the client sees them."""
    return (reply["tokens"] - 1) / (reply["last"] - reply["first"])


def gen(args: argparse.Namespace, text: str, n: int) -> dict[str, Any]:
    """The JSON object of `bw24 gen` for the same prompt."""
    words = [sys.executable, "-m", "bw24", "gen", args.model, "--device", args.device, "-p", text, "-n", str(n), "--json", "--spec", args.spec]
    done = subprocess.run([w for w in words if w], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "py")})
    if done.returncode:
        raise SystemExit(f"server_bench: {done.stderr.strip()}")
    return json.loads(done.stdout.splitlines()[-1])


def compare_speed(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Decode speed of one stream: gen's own figure, the server's, the bare client's, the bench client's. The share is of the lower of server's
    and bare client's in each pair, and their median."""
    rows: dict[str, list[float]] = {"gen": [], "server": [], "client": [], "bench": []}
    first = chat(server.port, STORY, args.n)
    same = None
    for _ in range(args.rounds):
        made = gen(args, STORY, args.n)
        reply = chat(server.port, STORY, made["generated_tokens"])
        same = same is not False and reply["text"].strip() == made["text"].strip()
        rows["gen"].append(made["generation_tokens_per_second"])
        rows["server"].append(reply["timings"]["predicted_per_second"])
        rows["client"].append(rate(reply))
        found = bench_url.run(server.url, clients=1, requests=1, words=20, tokens=args.n)
        rows["bench"].append(1 / found.gaps[0])
    shares = [min(c, s) / g for c, s, g in zip(rows["client"], rows["server"], rows["gen"], strict=True)]
    return {"what": "served-speed", "tokens": args.n, **{k: [round(v, 1) for v in values] for k, values in rows.items()}, "same_text": same,
            "share_of_gen": round(statistics.median(shares), 4), "chunks": first["events"], "goal": 0.97}


def compare_first(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Time to the first token of a cold prompt: gen's pass over the prompt, and what the client waits."""
    rows: dict[str, list[float]] = {"gen": [], "client": []}
    for i in range(args.rounds):
        text = bench_url.prompt(7000 + i, 300)
        made = gen(args, text, 2)
        reply = chat(server.port, text, 2, cache_prompt=False)
        rows["gen"].append(made["prompt_seconds"])
        rows["client"].append(reply["first"])
    shares = [c / g for c, g in zip(rows["client"], rows["gen"], strict=True)]
    return {"what": "served-first-token", "prompt_tokens": made["prompt_tokens"], **{k: [round(v, 5) for v in values] for k, values in rows.items()},
            "over_gen": round(statistics.median(shares), 4), "goal": 1.15}


def compare_mask(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Decode speed under a nested schema, and under a grammar that allows everything, each beside free text of as many tokens for the same prompt."""
    forms = {"anything": {"response_format": {"type": "regex", "pattern": "(?s:.*)"}},
             "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}}
    speed = lambda reply: (reply["tokens"] - 1) / (reply["timings"]["predicted_ms"] / 1e3)  # noqa: E731
    rows: dict[str, list[float]] = {f"{name}{side}": [] for name in forms for side in ("", "_free")}
    tokens: dict[str, list[int]] = {name: [] for name in forms}
    for i in range(args.rounds + 1):
        for name, more in forms.items():
            masked = chat(server.port, TEXTS[i % len(TEXTS)], args.n, **more)
            free = chat(server.port, TEXTS[i % len(TEXTS)], masked["tokens"])
            if i and masked["tokens"] > 20:
                tokens[name].append(masked["tokens"])
                rows[name].append(speed(masked))
                rows[f"{name}_free"].append(speed(free))
    cost = {name: round(1 - statistics.median(m / f for m, f in zip(rows[name], rows[f"{name}_free"], strict=True)), 4) for name in forms}
    return {"what": "served-mask", "tokens": tokens, **{k: [round(v, 1) for v in values] for k, values in rows.items()},
            "cost_anything": cost["anything"], "cost_schema": cost["schema"], "goal": 0.05 if args.spec == "off" else 0.10}


def compare_prefix(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Time to the first token of two requests that share some 1600 tokens; each round has another beginning."""
    rows: dict[str, list[float]] = {"cold": [], "kept": []}
    shared = 0
    for i in range(args.rounds):
        text = bench_url.prompt(9000 + i, args.words)
        cold = chat(server.port, text + " How many words are these?", 4)
        kept = chat(server.port, text + " Which of them is the longest?", 4)
        rows["cold"].append(cold["first"])
        rows["kept"].append(kept["first"])
        shared = kept["timings"]["cache_n"]
    gain = statistics.median(c / k for c, k in zip(rows["cold"], rows["kept"], strict=True))
    return {"what": "served-prefix", "shared_tokens": shared, **{k: [round(v, 5) for v in values] for k, values in rows.items()},
            "gain": round(gain, 2), "goal": 10}


def compare_restart(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """From killing the worker to the first token of a new one, against the time that loading takes."""
    loads, backs = [], []
    for _ in range(min(args.rounds, 3)):
        for pid in server.workers():
            os.kill(pid, signal.SIGKILL)
        began, reply = time.monotonic(), None
        while reply is None:
            try:
                reply = chat(server.port, "Hi", 1) if server.get("/health")[0] == 200 else None
            except OSError:
                reply = None
            if time.monotonic() - began > 120:
                raise SystemExit("server_bench: the worker did not come back in two minutes")
            time.sleep(0.01)
        backs.append(time.monotonic() - began)
        loads.append(float(server.log.read_text(errors="replace").rpartition("loaded in ")[2].split()[0]))
    over = max(b - load for b, load in zip(backs, loads, strict=True))
    return {"what": "served-restart", "load": loads, "back": [round(b, 3) for b in backs], "seconds_over_load": round(over, 3), "goal": 2.0}


COMPARISONS = {"speed": compare_speed, "first": compare_first, "mask": compare_mask, "prefix": compare_prefix, "restart": compare_restart}


def seconds_of(pid: int) -> float:
    """CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(name: str, server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """One comparison as a row: what it was measured on, and how busy others kept the machine meanwhile."""
    pids = server.workers()
    others, before, began = Others(), sum(map(seconds_of, pids)), time.monotonic()
    found = COMPARISONS[name](server, args)
    seconds = time.monotonic() - began
    busy = None if name == "restart" else round(others.cores() - (sum(map(seconds_of, pids)) - before) / seconds, 3)
    return {**found, "engine": "bw24", "file": Path(args.model).name, "weights": args.weights, "spec": args.spec, "device": args.device,
            "others_cores": busy, "machine": args.machine, "revision": abi.version(), "script": "scripts/server_bench.py",
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--what", default="speed,first,mask,prefix,restart")
    p.add_argument("--spec", default="off", help="off, auto or a number of drafts, for both sides")
    p.add_argument("--device", default="cpu")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("-n", type=int, default=200)
    p.add_argument("--words", type=int, default=1570, help="of the shared beginning: 1600 tokens of SmolLM2; 860 for the demo model")
    p.add_argument("-o", "--output", type=Path)
    p.add_argument("--weights", default="real weights")
    p.add_argument("--machine", default="")
    args = p.parse_args()
    unknown = set(args.what.split(",")) - set(COMPARISONS)
    if unknown:
        p.error(f"--what: no comparison is called {', '.join(sorted(unknown))}; there are {', '.join(COMPARISONS)}")
    os.environ["PYTHONPATH"] = str(ROOT / "py")
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(args.model), log=Path(folder) / "log", BW24_THREADS="", BW24_SPEC=args.spec, BW24_DEVICE=args.device)
        try:
            server.wait(120)
            for name in args.what.split(","):
                row = measure(name, server, args)
                print(json.dumps(row), flush=True)
                if args.output:
                    with args.output.open("a", encoding="utf-8") as out:
                        out.write(json.dumps(row) + "\n")
        finally:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
