"""Load on a server: many clients at once, a third of whom leave in the middle. Every reply that is read to its end must be what the same request
gives alone, and nothing may be left behind. Run it on a real model: python tests/load_server.py MODEL [--clients N] [--requests N] [--seconds S]"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from serving import Server

WORDS = "the river runs past old stone houses while people walk home from work and talk about rain bread music trains and time".split()


@dataclass
class Outcome:
    """What a run saw. first, whole: seconds; tokens: of replies that were read to the end."""

    completed: int = 0
    left: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    seconds: float = 0.0


def requests(count: int, seed: int = 5, tokens: int = 24) -> list[dict]:
    """Different requests of all lengths: some greedy, some sampled, some with a shared beginning."""
    rng, shared = random.Random(seed), " ".join(WORDS)
    out = []
    for i in range(count):
        text = (shared + " " if i % 3 == 0 else "") + " ".join(rng.choices(WORDS, k=rng.choice((1, 5, 30))))
        out.append({"messages": [{"role": "user", "content": text}], "max_tokens": rng.randint(4, tokens), "seed": i,
                    "temperature": rng.choice((0, 0.8, 1.2))})
    return out


def read(client: httpx.Client, url: str, body: dict, leave_after: int | None = None) -> tuple[str, float, int]:
    """(text, seconds to the first token, chunks); with leave_after the connection is cut after so many chunks."""
    text, chunks, first, started = "", 0, 0.0, time.monotonic()
    with client.stream("POST", url + "/v1/chat/completions", json={**body, "stream": True}) as reply:
        if reply.status_code != 200:
            raise RuntimeError(f"{reply.status_code}: {reply.read()[:200]!r}")
        for line in reply.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            piece = chunk["choices"][0]["delta"].get("content") or ""
            if piece and not first:
                first = time.monotonic() - started
            text += piece
            chunks += 1
            if leave_after is not None and chunks >= leave_after:
                break
    return text, first, chunks


def alone(url: str, bodies: list[dict]) -> list[str]:
    """The replies, one after the other and without the cache."""
    with httpx.Client(timeout=120) as client:
        out = []
        for body in bodies:
            reply = client.post(url + "/v1/chat/completions", json={**body, "cache_prompt": False}).json()
            out.append(reply["choices"][0]["message"]["content"])
        return out


def run(url: str, bodies: list[dict], expected: list[str], clients: int, count: int, leaving: float = 1 / 3) -> Outcome:
    """`count` requests from `clients` threads."""
    out, lock, todo = Outcome(), threading.Lock(), iter(range(count))

    def client(number: int) -> None:
        rng = random.Random(number)
        with httpx.Client(timeout=300) as session:
            while True:
                with lock:
                    at = next(todo, None)
                if at is None:
                    return
                which = at % len(bodies)
                leave = rng.randrange(6) if rng.random() < leaving else None
                try:
                    text, first, chunks = read(session, url, bodies[which], leave)
                except (httpx.HTTPError, RuntimeError) as error:
                    with lock:
                        out.errors.append(f"{type(error).__name__}: {error}")
                    continue
                with lock:
                    if leave is not None:
                        out.left += 1
                        continue
                    out.completed += 1
                    out.tokens += chunks
                    out.first.append(first)
                    if text != expected[which]:
                        out.wrong.append(f"request {which}: {text[:60]!r}, alone {expected[which][:60]!r}")

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    started = time.monotonic()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    out.seconds = time.monotonic() - started
    return out


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def threads_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=0, help="repeat for so long, and watch the memory")
    parser.add_argument("--threads", default="0", help="threads of the engine; 0: all cores")
    args = parser.parse_args()
    bodies, failed, peak = requests(64), False, []
    with tempfile.TemporaryDirectory() as folder:
        threads = "" if args.threads == "0" else args.threads
        server = Server(Path(args.model), log=Path(folder) / "log", BW24_CACHE_RAM="256", BW24_THREADS=threads).wait(120)
        try:
            expected = alone(server.url, bodies)
            end = time.monotonic() + args.seconds
            while True:
                out = run(server.url, bodies, expected, args.clients, args.requests)
                state, pid = server.idle(60), server.workers()[0]
                peak.append(resident(pid))
                median = 1e3 * sorted(out.first)[len(out.first) // 2]
                print(f"{out.completed} complete, {out.left} left, {len(out.wrong)} wrong, {len(out.errors)} failed, "
                      f"{out.tokens / out.seconds:.0f} tok/s, first token {median:.0f} ms (median), {peak[-1] >> 20} MiB, "
                      f"{threads_of(pid)} threads, {state}", flush=True)
                for line in (out.wrong + out.errors)[:5]:
                    print("  " + line)
                failed |= bool(out.wrong or out.errors)
                if time.monotonic() >= end:
                    break
            if len(peak) > 3 and peak[-1] > peak[1] * 1.05:
                print(f"memory grew from {peak[1] >> 20} to {peak[-1] >> 20} MiB")
                failed = True
        finally:
            server.stop()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
