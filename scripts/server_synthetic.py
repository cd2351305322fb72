#!/usr/bin/env python3
"""What drafts are worth to a server's clients: the real server over HTTP on a loaded model, plain and with drafts that are accepted with a given
probability whatever they are, and the wait for the first token of a cold prompt. Every figure with drafts is synthetic: the work is real, the
tokens mean nothing. Owns the comparison; the clients are those of `bw24 bench --url`.

usage: server_synthetic.py MODEL [--draft FILE] [-k 3,auto] [--accept 0.8] [--clients 1,8] [--tokens 512] [--prompt 2048] [-o OUT.jsonl] ...
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "py"), str(ROOT / "scripts")]

from bw24 import abi, bench_url  # noqa: E402
from bw24.chat import ChatTemplate  # noqa: E402
from bw24.scheduler_spec import DraftingScheduler  # noqa: E402
from bw24.server import create_app  # noqa: E402
from bw24.server.prompting import Prompter  # noqa: E402
from bw24.server.service import Service  # noqa: E402
from bw24.server.settings import Settings  # noqa: E402
from bw24.speculate import AUTO  # noqa: E402
from server_bench import chat  # noqa: E402

TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


class Synthetic(Service):
    """A service whose drafts are accepted with probability `accept`; 0: no drafts are made."""

    accept, k = 0.0, 3

    def _engine(self, model: Any) -> Any:
        if model.chat_template is None:  # random weights come without one
            self.prompter = Prompter(model.tokenizer, ChatTemplate(TEMPLATE, bos_token="", eos_token=""))
        return super()._engine(model)

    def _scheduler(self, engine: Any, model: Any) -> Any:
        limits = {"cache_ram": self.settings.cache_ram, "queue_limit": self.settings.queue, "max_runs": self.settings.parallel}
        if not engine.draft:
            return super()._scheduler(engine, model)
        return DraftingScheduler(engine, model.tokenizer, k=self.k, synthetic=self.accept, **limits)


class Served:
    """The server's application in this process, on a port of its own: the same engine, scheduler and HTTP as under gunicorn, without its fork."""

    def __init__(self, args: argparse.Namespace, drafts: bool):
        from werkzeug.serving import WSGIRequestHandler, make_server

        spec = {"spec": args.k if drafts else 0, "draft": args.draft, "draft_hidden": "post", "draft_spare": 0, "spec_sampling": "race"}
        where = {"device": args.device, "ctx": args.ctx, "prefill": args.prefill}
        others = {n: None for n in ("backend", "isa", "kv", "vram", "ram", "nvme", "tier_policy", "profile")} | {"backend": "auto"}
        settings = Settings(model=args.model, engine=where, spec={**spec, **others, **where}, cache_ram=0)
        Synthetic.accept, Synthetic.k = args.accept, args.k
        self.service = Synthetic(settings)
        if not self.service.wait(300):
            raise SystemExit(f"server_synthetic: {self.service.error}")
        WSGIRequestHandler.protocol_version, WSGIRequestHandler.log_request = "HTTP/1.1", lambda *_: None
        self.http = make_server("127.0.0.1", 0, create_app(settings, self.service), threaded=True)
        self.port = self.http.server_port
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.service.drain(5)
        self.service.close()


def load(port: int, clients: int, tokens: int) -> dict[str, Any]:
    """Tokens a second of all clients together, from a process of their own."""
    words = [sys.executable, "-m", "bw24", "bench", "--url", f"http://127.0.0.1:{port}", "--clients", str(clients), "--requests", str(2 * clients),
             "--tokens", str(tokens), "--sizes", "40", "--json"]
    paths = f"{ROOT / 'py'}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    if done.returncode:
        raise SystemExit(f"server_synthetic: {done.stderr.strip()}")
    found = json.loads(done.stdout.splitlines()[-1])
    if found["errors"]:
        raise SystemExit(f"server_synthetic: {found['errors']} of {found['requests']} requests failed: {done.stderr.strip()[-300:]}")
    return {k: found[k] for k in ("tokens_per_second", "first_p50", "gaps_p50")}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--draft")
    p.add_argument("-k", default="3,auto", help="drafts a round: numbers, auto, or several of them")
    p.add_argument("--accept", type=float, default=0.8)
    p.add_argument("--clients", default="1,8")
    p.add_argument("--tokens", type=int, default=512)
    p.add_argument("--prompt", type=int, default=2048, help="tokens of the cold prompt; 0: skip it")
    p.add_argument("--device", default="auto")
    p.add_argument("--ctx", type=int, default=8192)
    p.add_argument("--prefill", default="exact", help="class of the prompt's arithmetic")
    p.add_argument("-o", "--output", type=Path)
    args = p.parse_args()
    depths = [AUTO if k == "auto" else int(k) for k in args.k.split(",")]
    args.k = depths[0]
    rows: list[dict[str, Any]] = []
    rates: dict[int, float] = {}
    for drafts in (False, True):
        server = Served(args, drafts)
        facts = {"engine": "bw24", "file": Path(args.model).name, "weights": "random weights", "device": server.service.engine.device_line,
                 "revision": abi.version(), "script": "scripts/server_synthetic.py"}
        if args.prompt and not drafts:
            rows.append({"what": "served-cold", **cold(server, args.prompt), **facts})
        for clients, k in ((c, k) for c in map(int, args.clients.split(",")) for k in (depths if drafts else [0])):
            if drafts:
                server.service.scheduler.k = k
            load(server.port, clients, 128 if k == AUTO else 32)  # makes a card's graphs; `auto` learns what steps cost
            found = load(server.port, clients, args.tokens)
            rates.setdefault(clients, found["tokens_per_second"])  # the plain server comes first
            extra = {}
            if drafts:
                costs = server.service.engine.costs
                extra = {"k": "auto" if k == AUTO else k, "accept": args.accept, "gain": round(found["tokens_per_second"] / rates[clients], 3),
                         "draft_ms": round(1e3 * (costs.draft or 0), 3),
                         "step_ms": {rows: round(1e3 * seconds, 3) for rows, seconds in sorted(costs.steps.items())},
                         "rounds": server.service.scheduler.rounds.as_dict()}
            rows.append({"what": "served-drafts" if drafts else "served-plain", "clients": clients, "tokens": args.tokens, **found, **extra, **facts})
        server.close()
    for row in rows:
        line = json.dumps({**row, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
        print(line, flush=True)
        if args.output:
            with args.output.open("a", encoding="utf-8") as out:
                out.write(line + "\n")
    return 0


def cold(server: Served, tokens: int) -> dict[str, Any]:
    """Milliseconds to the first token of prompts that nothing is known of, after one that warms the device."""
    tokenizer, firsts, counted = server.service.model.tokenizer, [], 0
    for i in range(6):
        text = f"Note {i}. "
        while len(tokenizer.encode(text)) < tokens - 48:
            text += bench_url.prompt(100 * i + len(text) % 89, 60)
        ids = tokenizer.encode(text)[: tokens - 24]
        reply = chat(server.port, tokenizer.decode(ids), 4, cache_prompt=False)
        counted = reply["timings"]["prompt_n"]
        if i:
            firsts.append(round(reply["first"] * 1e3, 2))
    return {"prompt_tokens": counted, "first_ms": firsts, "first_ms_median": statistics.median(firsts), "goal_ms": 90}


if __name__ == "__main__":
    sys.exit(main())
