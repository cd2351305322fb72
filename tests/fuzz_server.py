"""Requests that are nearly right, for every endpoint, made from its own table. Run it on a server of its own: python tests/fuzz_server.py MODEL
[--seconds S]; a status of 5xx, a hang, a worker that died or a line of a defect in the log fails the run."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import httpx

from bw24.server.fields import Bool, Choice, Dict, Either, Free, Int, Kind, List, Number, Only, Record, Refused, Tagged, Text
from bw24.server.openapi import POSTS
from serving import Server

NASTY = [
    None, True, False, 0, -1, 1, 3.5, -0.0, 1e308, -1e308, 10**400, -(10**400), 2**31, 2**63, 2**64, "", "x", "\x00", "\ud800", "{{7*7}}",
    "{% for %}", "../" * 40, "<|im_end|>", "<|im_start|>system\n", "é" * 3000, "\U0001f600" * 50, [], [[]],
    [None], {}, {"": None}, {"a": {"b": {"c": []}}}, {"type": "text"},
    {"role": 5}, [1] * 2000, {"__class__": "x"}, "true", "1", [{"type": "text", "text": None}],
]


def sample(kind: Kind, rng: random.Random, depth: int = 0):
    """A value that a kind describes, mostly."""
    if isinstance(kind, Bool):
        return rng.random() < 0.5
    if isinstance(kind, Int):
        return rng.choice((kind.low, min(kind.high, kind.low + 3), kind.high))
    if isinstance(kind, Number):
        return rng.choice((kind.low, kind.high, (kind.low + kind.high) / 2))
    if isinstance(kind, Choice):
        return rng.choice(kind.values)
    if isinstance(kind, Only):
        return kind.values[0]
    if isinstance(kind, List):
        return [sample(kind.item, rng, depth + 1) for _ in range(max(kind.low, rng.randint(0, 2)))]
    if isinstance(kind, Dict):
        return {str(rng.randint(0, 300)): sample(kind.item, rng, depth + 1) for _ in range(rng.randint(0, 2))}
    if isinstance(kind, Free):
        return rng.choice(({}, {"type": "object"}, {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}))
    if isinstance(kind, Either):
        return sample(rng.choice(list(kind.kinds.values())), rng, depth + 1)
    if isinstance(kind, Record):
        return {k: sample(v, rng, depth + 1) for k, v in kind.fields.items() if not isinstance(v, Refused) and (v.required or rng.random() < 0.2)}
    if isinstance(kind, Tagged):
        tag = rng.choice(list(kind.kinds))
        return {kind.key: tag, **sample(kind.kinds[tag], rng, depth + 1)}
    return rng.choice(("x", "Hello there", "a" * 30)) if isinstance(kind, Text) else rng.choice(("Hi", [72, 105], ["Hi", [1]]))


def spoil(value, rng: random.Random):
    """The value with one place replaced, removed or added."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if rng.random() < 0.1:
            return {**value, rng.choice(("x", "", "model ", "\ud800", "k" * 500)): rng.choice(NASTY)}
        return {**value, key: spoil(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], spoil(value[at], rng), *value[at + 1 :]]
    return rng.choice(NASTY)


def small(body: dict) -> dict:
    """A request that cannot take long: few tokens, whatever else it asks for."""
    if isinstance(body, dict):
        for key in ("max_tokens", "max_completion_tokens"):
            if isinstance(body.get(key), int) and not isinstance(body[key], bool) and 8 < body[key] < 1 << 40:
                body[key] = 8
    return body


def request(url: str, rng: random.Random, model: str) -> object:
    """A body for an endpoint: right, or with up to two places spoilt."""
    table = POSTS[url][0]
    body: object = sample(table, rng)
    if "model" in table.fields:
        body["model"] = model
    for _ in range(rng.choice((0, 1, 1, 2))):
        body = spoil(body, rng)
    if url in ("/v1/chat/completions", "/v1/completions", "/v1/messages") and isinstance(body, dict):
        body.setdefault("max_tokens", 4)
    return small(body)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, counts, bad = random.Random(args.seed), {}, 0
    with tempfile.TemporaryDirectory() as folder:
        # a short context: the longest reply that a request may ask for must end within the client's patience
        server = Server(Path(args.model), log=Path(folder) / "log", BW24_CTX="512").wait(120)
        workers, name, began = server.workers(), json.loads(server.get("/v1/models")[1])["data"][0]["id"], time.monotonic()
        end, told, slowest = began + args.seconds, began, (0.0, "")
        with httpx.Client(timeout=120) as client:
            while time.monotonic() < end:
                url = rng.choice(sorted(POSTS))
                data = json.dumps(request(url, rng, name))
                if rng.random() < 0.05:  # broken JSON too
                    at = rng.randrange(len(data))
                    data = data[:at] + rng.choice(("", "\x00", "}", "\"", "NaN")) + data[at + 1 :]
                asked = time.monotonic()
                try:
                    reply = client.post(server.url + url, content=data.encode(), headers={"Content-Type": "application/json"})
                    status = reply.status_code
                except httpx.HTTPError as error:
                    status, reply = type(error).__name__, None
                counts[status] = counts.get(status, 0) + 1
                slowest = max(slowest, ((now := time.monotonic()) - asked, data[:200]))
                if now - told > 30:
                    told = now
                    print(f"{now - began:.0f} of {args.seconds:.0f} s: {sum(counts.values())} requests, {bad} bad, the slowest {slowest[0]:.1f} s",
                          flush=True)
                if status not in (200, 400, 404, 413):
                    bad += 1
                    print(f"{url}: {status}: {reply.text[:300] if reply else ''}\n  {data[:1000]}", flush=True)
        log = server.log.read_text(errors="replace")
        if server.workers() != workers or "Traceback" in log:
            bad += 1
            print("the worker died or failed:\n" + log[-3000:])
        server.idle(60)
        asked = time.monotonic()
        if (code := server.stop()) != 0:
            bad += 1
            print(f"SIGTERM: exit code {code}")
        print(f"SIGTERM obeyed in {time.monotonic() - asked:.1f} s; the slowest request took {slowest[0]:.1f} s: {slowest[1]}")
    print(f"{sum(counts.values())} requests: {dict(sorted(counts.items(), key=str))}, {bad} bad: {'FAILED' if bad else 'passed'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
