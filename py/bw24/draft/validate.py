"""Whether a draft pays: the same replies with it and with another drafter, in pairs, by the clock. Owns the arms and the verdict; knows no files.

Both arms give the same text, so a prompt's pair differs in time alone. Speed decides; acceptance, tokens a round and the share of tokens that a
cut head cannot propose say why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..bench import median_interval
from ..errors import Bw24Error
from ..generate import Generation
from ..sampling import SamplingParams
from ..speculate import Drafted, Rounds

if TYPE_CHECKING:
    from ..drafter import Draft
    from ..engine import Engine

GOOD, WASH, BAD = "GOOD", "WASH", "BAD"
MARGIN = 0.01  # a gain or loss below 1 % is none
MIN_PAIRS = 5
Progress = Callable[[int, int], None]


@dataclass
class Arm:
    """One drafter at work; `plain`: no drafter at all. Seconds are those of decoding, of the faster of the repeats."""

    name: str
    engine: Engine
    plain: bool = False
    draft: Draft | None = None  # of the engine's two; None: its first
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    missing: int = 0  # reply tokens that the head cannot propose
    stats: Rounds = field(default_factory=Rounds)

    def reply(self, ids: Sequence[int], k: int, params: SamplingParams, limit: int) -> tuple[list[int], float, Rounds]:
        """One reply: its ids, decoding seconds, and what drafting did."""
        engine, ends = self.engine, self.engine.model.tokenizer.eog_ids
        seq = engine.sequence() if self.plain else Drafted(engine, k, params, len(ids) + limit, stop=ends, draft=self.draft)
        with closing(seq):
            logits = seq.prefill(ids)
            made = Generation(seq, None, ids, logits if self.plain else logits[-1], params, ctx=engine.ctx, limit=limit,
                              stop_ids=ends)
            for _ in made:
                pass
            return made.ids, made.stats.step_seconds, Rounds() if self.plain else seq.stats

    def take(self, ids: list[int], seconds: float, stats: Rounds) -> None:
        draft = self.draft or self.engine.draft
        own = draft.ids if draft and not self.plain else None
        known = None if own is None else frozenset(own.tolist())
        self.seconds.append(seconds)
        self.tokens += len(ids)
        self.missing += 0 if known is None else sum(i not in known for i in ids)
        self.stats.add(stats)

    def as_dict(self) -> dict[str, Any]:
        s, positions = self.stats, sum(1 for r in self.stats.reached if r)
        spent = sum(self.seconds)
        rate = self.tokens / spent if spent else 0.0
        return {"name": self.name, "tokens": self.tokens, "seconds": round(spent, 4), "tokens_per_second": round(rate, 2),
                "unproposable": round(self.missing / self.tokens, 5) if self.tokens else 0.0, "rounds": s.rounds, "drafted": s.drafted,
                "accepted": sum(s.accepted), "tokens_per_round": round(s.tokens_per_round, 3),
                "acceptance_by_position": [round(s.accepted[i] / s.reached[i], 4) for i in range(positions)]}


@dataclass(frozen=True)
class Report:
    """`ratio`: median over prompts of the other arm's seconds by the draft's, above 1 where the draft is faster; [low, high] holds it with
    probability `coverage`."""

    verdict: str
    ratio: float
    low: float
    high: float
    coverage: float
    pairs: int
    draft: Arm
    other: Arm

    def as_dict(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "speed_ratio": round(self.ratio, 4), "low": round(self.low, 4), "high": round(self.high, 4),
                "coverage": round(self.coverage, 4), "pairs": self.pairs, "draft": self.draft.as_dict(), "against": self.other.as_dict()}

    def lines(self) -> list[str]:
        """For a person: the verdict, then both arms."""
        out = [f"{self.verdict}: {self.ratio:.3f} x the speed of {self.other.name} (median of {self.pairs} pairs; "
               f"{self.low:.3f} to {self.high:.3f} with {100 * self.coverage:.0f} %)"]
        for arm in (self.draft, self.other):
            d = arm.as_dict()
            per = " / ".join(f"{a:.3f}" for a in d["acceptance_by_position"])
            out.append(f"  {arm.name}: {d['tokens_per_second']:.1f} tok/s, {d['tokens_per_round']:.2f} tokens a round, "
                       f"acceptance by position {per or '-'}, unproposable {100 * d['unproposable']:.2f} %")
        return out


def verdict(ratios: Sequence[float]) -> tuple[str, float, float, float, float]:
    """(verdict, median, low, high, coverage) of speed ratios. GOOD or BAD where the whole interval lies on one side of 1 and the median is a
    hundredth or more away; else WASH."""
    ordered, n = sorted(ratios), len(ratios)
    median = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    low, high, coverage = median_interval(ratios)
    if low > 1 and median >= 1 + MARGIN:
        return GOOD, median, low, high, coverage
    return (BAD if high < 1 and median <= 1 - MARGIN else WASH), median, low, high, coverage


def compare(draft: Arm, other: Arm, prompts: Sequence[Sequence[int]], k: int, params: SamplingParams, limit: int, repeats: int = 2,
            progress: Progress | None = None) -> Report:
    """Run every prompt on both arms, `repeats` times each, who goes first taking turns. Raises Bw24Error, also where the texts differ."""
    if len(prompts) < MIN_PAIRS:
        raise Bw24Error(f"validate: expected at least {MIN_PAIRS} prompts, found {len(prompts)}")
    for arm in (draft, other):
        arm.reply(prompts[0], k, params, min(limit, 8))  # the first steps are slower
    for number, ids in enumerate(prompts):
        runs: dict[int, list[tuple[list[int], float, Rounds]]] = {0: [], 1: []}
        for turn in range(repeats):
            for which in ((0, 1) if (number + turn) % 2 else (1, 0)):
                runs[which].append((draft, other)[which].reply(ids, k, params, limit))
        texts = {tuple(run[0]) for found in runs.values() for run in found}
        if len(texts) != 1:
            raise Bw24Error(f"validate: prompt {number}: the drafters gave different texts; drafts must never change them")
        for which, arm in enumerate((draft, other)):
            best = min(runs[which], key=lambda run: run[1])
            arm.take(*best)
        if progress:
            progress(number + 1, len(prompts))
    ratios = [b / a for a, b in zip(draft.seconds, other.seconds, strict=True) if a > 0 and b > 0]
    if len(ratios) < MIN_PAIRS:
        raise Bw24Error(f"validate: only {len(ratios)} of {len(prompts)} replies had more than one token; other prompts are needed")
    return Report(*verdict(ratios), len(ratios), draft, other)
