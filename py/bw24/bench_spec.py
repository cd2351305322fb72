"""What speculative decoding gains: plain and drafted replies in turn on one engine, medians, where a round's time goes. Owns the order of measuring;
knows no files and no text.

With `accept` drafts are taken with that probability whatever they are, so a figure for an acceptance needs no model that has it: the work is
that of real rounds, the tokens mean nothing, and every figure is labelled synthetic."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .sampling import SamplingParams
from .speculate import AUTO, Drafted, Rounds

if TYPE_CHECKING:
    from .engine import Engine


@dataclass
class SpecResult:
    """Tokens a second of plain and drafted replies, pair by pair, and the rounds of the drafted ones."""

    k: int
    draft: str
    accept: float | None
    tokens: int
    depth: int
    plain: list[float] = field(default_factory=list)
    drafted: list[float] = field(default_factory=list)
    rounds: Rounds = field(default_factory=Rounds)

    @property
    def gain(self) -> float:
        """Median of the pairs' ratios, drafted over plain."""
        return statistics.median(d / p for d, p in zip(self.drafted, self.plain, strict=True))

    def as_json(self) -> dict[str, Any]:
        """For the bench's JSON object."""
        r = self.rounds
        each = [1000 * s / max(r.rounds, 1) for s in r.seconds]
        return {
            "k": "auto" if self.k == AUTO else self.k, "draft": self.draft, "synthetic": self.accept is not None, "accept": self.accept,
            "tokens": self.tokens, "depth": self.depth, "plain_tokens_per_second": statistics.median(self.plain),
            "tokens_per_second": statistics.median(self.drafted), "gain": self.gain, "plain_samples": self.plain, "samples": self.drafted,
            "round_milliseconds": dict(zip(("draft", "verify", "commit"), (round(x, 4) for x in each), strict=True)), **r.as_dict(),
        }

    def lines(self) -> list[str]:
        """The result as text."""
        r = self.rounds
        ms = [1000 * s / max(r.rounds, 1) for s in r.seconds]
        how = f"synthetic acceptance {self.accept:g}" if self.accept is not None else "acceptance as it comes"
        shares = ", ".join(f"{a / n:.3f}" for a, n in zip(r.accepted, r.reached, strict=True) if n) or "nothing judged"
        return [
            f"drafts: K={'auto' if self.k == AUTO else self.k}, {self.draft}, {how}, {self.tokens} tokens at {self.depth}",
            f"  plain {statistics.median(self.plain):.1f} tok/s, drafted {statistics.median(self.drafted):.1f} tok/s, {self.gain:.2f}x",
            f"  {r.line()}; by position {shares}",
            f"  a round: draft {ms[0]:.2f} ms, verify {ms[1]:.2f} ms, commit {ms[2]:.2f} ms",
        ]


def reply(base: Drafted, first: int, tokens: int, drafts: bool, rounds: Rounds) -> float:
    """Tokens a second of one greedy reply without stop ids, on a copy of a timeline that stands after the prompt; drafts False: plain."""
    with contextlib.closing(base.fork() if drafts else base.seq.fork()) as seq:
        past, made, started = [*base.tokens, first], 0, time.perf_counter()
        while made < tokens:
            follow = seq.round(past[-1], past) if drafts else seq.draws(past[-1], base.params, past, tokens - made)
            past += follow
            made += len(follow)
        spent = time.perf_counter() - started
        if drafts:
            rounds.add(seq.stats)
    return made / spent


def run(engine: Engine, prompt: Sequence[int], *, tokens: int, k: int, accept: float | None = None, pairs: int = 5,
        progress: Callable[[int, int], None] | None = None) -> SpecResult:
    """Warm up, then `pairs` pairs of a plain and a drafted reply of `tokens` tokens after `prompt`; who goes first changes from pair to pair."""
    out = SpecResult(k, engine.draft.name, accept, tokens, len(prompt))
    sides = ((False, out.plain, Rounds()), (True, out.drafted, out.rounds))
    with contextlib.closing(Drafted(engine, k, SamplingParams(), len(prompt) + tokens + 32, synthetic=accept or 0.0)) as base:
        first = int(np.argmax(base.prefill(prompt)[-1]))
        for drafts, _, _ in sides:
            reply(base, first, min(tokens, 256 if k == AUTO else 32), drafts, Rounds())  # auto: every depth that it tries has its graph then
        for pair in range(pairs):
            for drafts, samples, rounds in sides if pair % 2 == 0 else sides[::-1]:
                samples.append(reply(base, first, tokens, drafts, rounds))
            if progress:
                progress(pair + 1, pairs)
    return out
