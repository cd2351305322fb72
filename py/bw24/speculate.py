"""Speculative decoding: the file's MTP block drafts tokens, the trunk judges them in one step. Owns the rounds and the block's timeline; knows no
text and picks no token of the reply.

A timeline that looks ahead has `pos` and `decode` like any other. Every row it gives is the trunk's own row after exactly those tokens, which has the
same bits whatever stands behind it in its step, so a reply is that of plain decoding for every K, sampler, penalty and drafter. A draft is accepted
where the caller's next token is the draft; drafts are picked by the reply's own sampler, with the same race at the same position.

The block's row m takes token m and the trunk's hidden row m - 1 (zeros for m = 0). Rows of accepted drafts, which were made from the block's own
hidden rows, are made again from the trunk's, so its keys and values are always those of the whole past.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from . import sampling
from .errors import Bw24Error
from .generate import Progress, chunks, now

if TYPE_CHECKING:
    from .engine import Engine

MAX_K = 16  # of the 32 rows that a recurrent state can be taken back
AUTO, AUTO_K = -1, 8  # as many drafts as pay, at most 8


@dataclass
class Rounds:
    """What drafting did. reached[i] counts rounds in which draft i was judged, accepted[i] those in which it was the next token."""

    rounds: int = 0
    drafted: int = 0
    reached: list[int] = field(default_factory=lambda: [0] * MAX_K)
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_K)

    def as_dict(self) -> dict[str, Any]:
        """The figures under the names of the JSON report."""
        n = max((i + 1 for i, r in enumerate(self.reached) if r), default=0)
        return {"rounds": self.rounds, "drafted": self.drafted, "accepted": sum(self.accepted), "tokens_per_round": round(self.tokens_per_round, 3),
                "reached_by_position": self.reached[:n], "accepted_by_position": self.accepted[:n]}

    @property
    def tokens_per_round(self) -> float:
        """Tokens that one step of the trunk gave on average; 0 before the first."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else 0.0

    def line(self) -> str:
        """For the closing line of a reply."""
        return f"{self.rounds} rounds, {sum(self.accepted)} of {self.drafted} drafts accepted, {self.tokens_per_round:.2f} tokens a round"


class Depth:
    """Drafts a round where they are not given: the number that promises most tokens a second, by what was measured in this reply."""

    def __init__(self, top: int):
        self.kept = [0.7] * top  # share of judged drafts accepted, by position; at the start, what an ordinary head does
        self.draft: float | None = None  # seconds of one draft
        self.steps: dict[int, float] = {}  # seconds of the trunk's step, by its rows
        self._rounds = 0

    def choose(self) -> int:
        """Every 16th round is one deeper than the best, so that a depth given up is measured again."""
        if self.draft is None:
            return min(3, len(self.kept))
        rates = [self.rate(k) for k in range(len(self.kept) + 1)]
        best = rates.index(max(rates))
        self._rounds += 1
        return min(best + (self._rounds % 16 == 0), len(self.kept))

    def rate(self, k: int) -> float:
        """Tokens a second promised by k drafts. A width not measured costs what the next narrower one does (or wider, where none is), so that
        it is tried."""
        chain, tokens = 1.0, 1.0
        for p in self.kept[:k]:
            chain *= p
            tokens += chain
        width = max((w for w in self.steps if w <= k + 1), default=min(self.steps))
        return tokens / (k * self.draft + self.steps[width])

    def timed(self, k: int, drafting: float, step: float) -> None:
        """What a round of k drafts took, seconds."""
        if k:
            self.draft = drafting / k if self.draft is None else 0.8 * self.draft + 0.2 * drafting / k
        old = self.steps.get(k + 1, step)
        self.steps[k + 1] = 0.8 * old + 0.2 * step

    def judged(self, at: int, accepted: bool) -> None:
        """Draft `at` of a round was the next token, or not."""
        self.kept[at] = 0.9 * self.kept[at] + 0.1 * accepted


class Drafted:
    """A new timeline of `engine` (made with draft=True) that drafts k tokens a round, 1..16, or with AUTO as many as pay. `params`:
    the reply's sampler; `end`: most tokens that the timeline will hold, where that is known. Raises Bw24Error."""

    def __init__(self, engine: Engine, k: int, params: sampling.SamplingParams, end: int | None = None):
        self.depth = Depth(min(AUTO_K, engine.max_rows - 1)) if k == AUTO else None
        if not 1 <= k <= MAX_K and not self.depth:
            raise Bw24Error(f"speculative decoding: expected 1..{MAX_K} drafts a round, found {k}")
        if k + 1 > engine.max_rows:
            raise Bw24Error(f"speculative decoding: {k} drafts need steps of {k + 1} rows, the engine's have at most {engine.max_rows}")
        self.engine, self.k, self.params, self.end, self.stats = engine, k, params, end, Rounds()
        self.pos = 0  # tokens the caller has given; the trunk's timeline may hold drafts after them
        self.seq = engine.sequence()
        self._over = bool(engine.draft.builder.borrowed)  # the drafter has no keys of its own
        self._mtp = engine.sequence(engine.draft.role, over=self.seq if self._over else None)
        self._last = np.zeros((1, engine.n_hidden), np.float32)  # the trunk's hidden row of token pos - 1
        self._made = 0  # rows of the block made from the trunk's hidden rows
        self._owed: list[tuple[int, np.ndarray]] = []  # those that follow: token, hidden row before it
        self._ahead: list[int] = []  # drafts not yet judged, in self.seq after pos
        self._at = 0  # the row in hand of the last step's
        self._logits = self._hidden = np.empty((0, 0), np.float32)

    def prefill(self, ids: Sequence[int], keep: int = 1, progress: Progress | None = None) -> np.ndarray:
        """Append a prompt. Returns the logits of its last min(keep, n) tokens, f32 [rows, vocab]; keep <= engine.max_rows."""
        self._take_back()
        n, first = len(ids), max(len(ids) - keep, 0)
        if not n:
            raise Bw24Error("the prompt has no tokens; the model needs at least one")
        for begin, end in [*(chunks(first, self.engine.max_rows, 1) if first else ()), (first, n)]:
            logits, hidden = self.engine.step_hidden([(self.seq, token, True) for token in ids[begin:end]], logits=begin == first)
            before = np.concatenate([self._last, hidden[:-1]])
            self._owed += [(token, row) for token, row in zip(ids[begin:end], before, strict=True)]
            self._pay()
            self._last, self.pos = hidden[-1:], self.pos + end - begin
            if progress:
                progress(end, n)
        return logits

    def decode(self, token: int) -> np.ndarray:
        """Append one token and return the logits after it, [n_vocab]."""
        if self._ahead:
            self.stats.reached[self._at] += 1
            if self.depth:
                self.depth.judged(self._at, self._ahead[0] == token)
        if self._ahead and self._ahead[0] == token:
            self.stats.accepted[self._at] += 1
            self._ahead.pop(0)
            self._at += 1
            self._owed.append((token, self._last[0]))
        else:
            self._round(token)
        self._last = self._hidden[self._at : self._at + 1]
        self.pos += 1
        return self._logits[self._at]

    def _round(self, token: int) -> None:
        self._take_back()
        room = min(self.engine.ctx, self.end or self.engine.ctx) - self.pos - 1
        began = now()
        drafts = self._draft(token, min(self.depth.choose() if self.depth else self.k, room))
        drafted = now()
        self._logits, self._hidden = self.engine.step_hidden([(self.seq, t, True) for t in (token, *drafts)])
        if self.depth:
            self.depth.timed(len(drafts), drafted - began, now() - drafted)
        self._ahead, self._at = drafts, 0
        self.stats.rounds += 1
        self.stats.drafted += len(drafts)

    def _draft(self, token: int, k: int) -> list[int]:
        """Up to k likely successors of `token`, which stands at pos."""
        self._owed.append((token, self._last[0]))
        if k < 1:
            return []
        logits, row = self._pay(want=True)
        history, drafts = [*self.seq.tokens, token], []
        ids, n_vocab = self.engine.draft.ids, self.engine.n_vocab
        for i in range(k):
            drafts.append(sampling.sample(logits[0], self.params, history, self.pos + 1 + i, ids=ids, n_vocab=n_vocab))
            history.append(drafts[-1])
            if i + 1 < k:
                logits, row = self.engine.step_hidden([(self._mtp, drafts[-1], True)], row)
        if not self._over:
            self._mtp.truncate(self._made)
        return drafts

    def _pay(self, want: bool = False) -> tuple[np.ndarray | None, np.ndarray]:
        """Make the block's rows that are owed; with `want`, returns logits and hidden row of the last."""
        if self._over:
            del self._owed[:-1]
        elif self._mtp.pos > self._made:  # left by a round that was broken off
            self._mtp.truncate(self._made)
        while self._owed:
            part = self._owed[: self.engine.max_rows]
            last = len(part) == len(self._owed)
            rows = [(self._mtp, token, want and last and i == len(part) - 1) for i, (token, _) in enumerate(part)]
            out = self.engine.step_hidden(rows, np.stack([row for _, row in part]), logits=want and last)
            del self._owed[: len(part)]
            self._made += len(part)
        return out

    def _take_back(self) -> None:
        """Leave no draft in the trunk's timeline."""
        self._ahead = []
        if self.seq.pos > self.pos and (at := self.seq.truncate(self.pos)) != self.pos:
            raise Bw24Error(f"speculative decoding: the sequence went back to {at} instead of {self.pos}")

    def close(self) -> None:
        self._mtp.close()
        self.seq.close()
