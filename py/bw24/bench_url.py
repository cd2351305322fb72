"""Speed of a server as its clients see it: streaming requests from several at once, against any OpenAI-compatible address. Owns the clock on the
client's side; knows nothing of what serves."""

from __future__ import annotations

import json
import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from .errors import Bw24Error

WORDS = ("river", "stone", "house", "rain", "bread", "music", "train", "time", "light", "field", "paper", "window", "garden", "winter")


@dataclass
class Result:
    """One run. first, whole: seconds of each request; gaps: mean seconds between tokens of each; tokens, prompt_tokens: as the server counts."""

    url: str
    clients: int
    seconds: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The figures, seconds and tokens a second."""
        return {
            "url": self.url, "clients": self.clients, "requests": len(self.whole), "errors": len(self.errors), "seconds": round(self.seconds, 4),
            "tokens": self.tokens, "prompt_tokens": self.prompt_tokens, "cached_tokens": self.cached_tokens,
            "tokens_per_second": round(self.tokens / self.seconds, 2) if self.seconds else 0.0,
            **{f"{name}_{kind}": round(value, 5) for name in ("first", "gaps", "whole") for kind, value in spread(getattr(self, name)).items()},
        }

    def lines(self) -> list[str]:
        """For a person."""
        j = self.as_json()
        ms = lambda name: f"{1e3 * j[name + '_p50']:.1f} / {1e3 * j[name + '_p99']:.1f} ms"  # noqa: E731
        out = [f"{self.url}: {j['requests']} requests from {self.clients} clients in {self.seconds:.2f} s, {len(self.errors)} failed",
               f"  {j['tokens_per_second']:.1f} tok/s together; prompts {self.prompt_tokens} tokens, {self.cached_tokens} of them cached"]
        if self.whole:
            out.append(f"  first token {ms('first')}, between tokens {ms('gaps')}, whole reply {ms('whole')} (median / 99th percentile)")
        return out + [f"  {text}" for text in sorted(set(self.errors))[:3]]


def spread(values: list[float]) -> dict[str, float]:
    """Median and 99th percentile; 0 where there are none."""
    ordered = sorted(values)
    return {"p50": statistics.median(ordered) if ordered else 0.0, "p99": ordered[max(0, -(-len(ordered) * 99 // 100) - 1)] if ordered else 0.0}


def prompt(number: int, words: int) -> str:
    """A prompt that no other request begins with, so that nothing comes from a cache."""
    return f"Note {number}. " + " ".join(WORDS[(number * 7 + i * i + i) % len(WORDS)] for i in range(words))


def _one(client: httpx.Client, url: str, body: dict[str, Any], out: Result, lock: threading.Lock) -> None:
    started, first, last, usage, pieces = time.perf_counter(), 0.0, 0.0, None, 0
    with client.stream("POST", f"{url}/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            raise Bw24Error(f"{reply.status_code}: {reply.read().decode('utf-8', 'replace')[:200]}")
        for line in reply.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise Bw24Error(str(chunk["error"].get("message"))[:200])
            usage = chunk.get("usage") or usage
            delta = chunk["choices"][0]["delta"] if chunk.get("choices") else {}
            if any(delta.get(k) for k in ("content", "reasoning_content", "reasoning", "tool_calls")):
                last = time.perf_counter()
                first, pieces = first or last, pieces + 1
    with lock:
        tokens = usage["completion_tokens"] if usage else pieces
        out.tokens += tokens
        out.whole.append(time.perf_counter() - started)
        if first:
            out.first.append(first - started)
            if tokens > 1:
                out.gaps.append((last - first) / (tokens - 1))
        if usage:
            out.prompt_tokens += usage["prompt_tokens"]
            out.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def run(url: str, *, clients: int, requests: int, words: int, tokens: int, model: str | None = None, key: str | None = None) -> Result:
    """`requests` greedy replies of `tokens` tokens to prompts of about `words` words, from `clients` threads. Raises Bw24Error where the address
    gives no model; requests that fail are counted."""
    url = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(timeout=30, headers=headers) as client:
            found = client.get(f"{url}/v1/models")
            if found.status_code != 200:
                raise Bw24Error(f"{url}/v1/models: {found.status_code}: {found.text[:200]}")
            model = model or found.json()["data"][0]["id"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise Bw24Error(f"{url}: no OpenAI-compatible server answers: {error or type(error).__name__}") from None
    out, lock, todo = Result(url, clients), threading.Lock(), iter(range(requests))
    sessions = [httpx.Client(timeout=600, headers=headers) for _ in range(clients)]  # before the clock: each reads the system's certificates

    def work(session: httpx.Client) -> None:
        with session:
            while True:
                with lock:
                    number = next(todo, None)
                if number is None:
                    return
                body = {"model": model, "messages": [{"role": "user", "content": prompt(number, words)}], "max_tokens": tokens, "temperature": 0,
                        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "seed": number}
                try:
                    _one(session, url, body, out, lock)
                except (httpx.HTTPError, Bw24Error, ValueError, LookupError) as error:
                    with lock:
                        out.errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(session,), daemon=True) for session in sessions]
    started = time.perf_counter()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    out.seconds = time.perf_counter() - started
    return out
