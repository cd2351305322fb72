"""Speculative decoding: a drafter proposes tokens, the model judges them in one step. Owns the timelines that look ahead, the forming of rounds and
what they measured; knows no text. The rounds themselves are the library's (libbw24/round.c).

A timeline that looks ahead gives tokens by rounds (`round`), or logits token by token to a caller who picks them (`decode`: grammars, log
probabilities). Every row is the model's own row after exactly those tokens, which has the same bits whatever stands behind it in its step, and
drafts are accepted only where they are the reply's own next token: so a reply is that of plain decoding for every K, sampler, penalty and drafter.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from . import abi, plain, sampling
from .depth import AUTO_K, Costs, Depth, choose_together
from .errors import Bw24Error
from .generate import Progress, chunks

if TYPE_CHECKING:
    from .adapt import Learner
    from .drafter import Draft
    from .engine import Engine
    from .engine import Sequence as Timeline

MAX_K = 16  # of the 32 rows that a recurrent state can be taken back
AUTO = -1  # as many drafts as pay
RACE, REJECT = "race", "reject"
MOST = 16  # rounds a call of the library


@dataclass
class Rounds:
    """What drafting did. reached[i] counts rounds in which draft i was judged, accepted[i] those in which it was the next token; seconds: drafting,
    judging and moving on, of rounds that the library drove."""

    rounds: int = 0
    drafted: int = 0
    reached: list[int] = field(default_factory=lambda: [0] * MAX_K)
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_K)
    seconds: list[float] = field(default_factory=lambda: [0.0] * 3)

    def add(self, other: Rounds) -> None:
        """Sums of both."""
        self.rounds, self.drafted = self.rounds + other.rounds, self.drafted + other.drafted
        for mine, theirs in ((self.reached, other.reached), (self.accepted, other.accepted), (self.seconds, other.seconds)):
            mine[:] = [a + b for a, b in zip(mine, theirs, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """The figures under the names of the JSON report."""
        n = max((i + 1 for i, r in enumerate(self.reached) if r), default=0)
        names = ("draft_seconds", "verify_seconds", "commit_seconds")
        return {"rounds": self.rounds, "drafted": self.drafted, "accepted": sum(self.accepted), "tokens_per_round": round(self.tokens_per_round, 3),
                "reached_by_position": self.reached[:n], "accepted_by_position": self.accepted[:n],
                "acceptance_by_position": [round(a / r, 4) for a, r in zip(self.accepted[:n], self.reached[:n], strict=True)],
                **{name: round(s, 6) for name, s in zip(names, self.seconds, strict=True)}}

    @property
    def tokens_per_round(self) -> float:
        """Tokens that one step of the model gave on average; 0 before the first."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else 0.0

    def line(self) -> str:
        """For the closing line of a reply."""
        return f"{self.rounds} rounds, {sum(self.accepted)} of {self.drafted} drafts accepted, {self.tokens_per_round:.2f} tokens a round"


class Drafted:
    """A timeline of `engine` (made with a drafter) that drafts k tokens a round, 1..16, or with AUTO as many as pay. Raises Bw24Error.

    params: the reply's sampler; end: most tokens that the timeline will hold, where that is known; stop: ids after which nothing is accepted;
    draft: the drafter, where it is not the engine's first;
    sampling_mode: RACE, or REJECT for rejection sampling; synthetic: drafts are accepted with this probability whatever they are (for measuring).
    """

    def __init__(self, engine: Engine, k: int, params: sampling.SamplingParams, end: int | None = None, *, stop: Collection[int] = (),
                 sampling_mode: str = RACE, synthetic: float = 0.0, draft: Draft | None = None):
        check_depth(engine, k)
        self.engine, self.k, self.end, self.stats, self.draft = engine, k, end, Rounds(), draft or engine.draft
        self.costs = engine.costs if self.draft is engine.draft else Costs()
        self.depth = Depth(min(AUTO_K, engine.max_rows - 1), self.costs) if k == AUTO else None
        self.owner = ""
        self.seq: Timeline = engine.sequence()
        self._drafter = abi.ffi.NULL
        try:
            self._drafter = _new_drafter(self.seq, self.draft.role)
        except BaseException:
            self.seq.close()
            raise
        engine._drafted.add(self)
        try:
            self._request = _Request(self, stop, sampling_mode, synthetic)
        except BaseException:
            self.close()
            raise
        self.configure(params)
        self._at = 0  # drafts of the open round that the caller has confirmed
        self._open = False  # a round was judged whose tokens the caller picks
        self._logits = np.empty((0, 0), np.float32)

    def configure(self, params: sampling.SamplingParams, stop: Collection[int] | None = None, owner: str | None = None) -> None:
        """The sampler of the next reply on this timeline, the ids that end it, and whose learned rows it drafts with."""
        self.params = params
        self.owner = self.owner if owner is None else owner
        self._request.set_sampler(params)
        if stop is not None:
            self._request.set_stop(stop)
        if self._learner:
            self._request.set_ids(self._learner, self.owner)

    @property
    def _learner(self) -> Learner | None:
        return self.engine.learner if self.draft is self.engine.draft else None

    @property
    def pos(self) -> int:
        """Tokens given; the model's timeline may hold drafts after them."""
        return abi.lib().bw24_drafter_pos(self._handle()) + (1 + self._at if self._open else 0)

    @property
    def tokens(self) -> list[int]:
        """The tokens given."""
        return self.seq.tokens

    def _handle(self) -> Any:
        if not self._drafter:
            raise Bw24Error("the timeline is closed")
        return self._drafter

    def prefill(self, ids: Sequence[int], keep: int = 1, progress: Progress | None = None) -> np.ndarray | None:
        """Append a prompt. Returns the logits of its last min(keep, n) tokens, f32 [rows, vocab], None for keep 0; keep <= engine.max_rows."""
        self.settle()
        n, first = len(ids), max(len(ids) - keep, 0)
        if not n:
            raise Bw24Error("the prompt has no tokens; the model needs at least one")
        logits = None
        for begin, end in [*(chunks(first, self.engine.max_rows, 1) if first else ()), *([(first, n)] if keep else ())]:
            logits = self.append(ids[begin:end], logits=begin == first)
            if progress:
                progress(end, n)
        return logits

    def append(self, ids: Sequence[int], logits: bool = False) -> np.ndarray | None:
        """One step of 1..max_rows tokens; their logits [n, vocab] where they are wanted."""
        self.settle()
        out = np.empty((len(ids), self.engine.n_vocab), np.float32) if logits else None
        tokens = abi.ffi.new("int32_t[]", list(ids))
        pointer = abi.ffi.cast("float *", abi.ffi.from_buffer(out)) if logits else abi.ffi.NULL
        abi.check(abi.lib().bw24_drafter_append(self._handle(), tokens, len(ids), pointer))
        self.seq.tokens.extend(ids)
        return out

    def room(self) -> int:
        """Drafts that context and end leave for a round whose token comes next. A drafter over the model's keys has none before the first token."""
        if not self.seq.tokens and self.draft.builder.borrowed:
            return 0
        return max(self.limit() - len(self.seq.tokens) - 1, 0)

    def wanted(self, runs: int = 1) -> int:
        """Drafts for the next round, which `runs` replies share."""
        return min(self.depth.choose(runs) if self.depth else self.k, self.room())

    def round(self, token: int, history: Sequence[int]) -> list[int]:
        """Append the newest token and return those that follow it, at least one; all but the last are appended too. history: the reply's ids
        up to and with `token`, for penalties."""
        if self._open:
            self.settle()
        request, k = self._request, self.wanted()
        if not k:
            return self.plain(token, history, self.room() + 1)
        c, log, times, engine = request.fill(token, history, k), request.log, request.times, self.engine
        request.until[0] = self.limit()
        times.draft = times.verify = times.commit = 0.0
        started = time.perf_counter()
        status = abi.lib().bw24_rounds(engine._model, c, 1, self.ahead(), plain.SLICE, request.until, abi.ffi.NULL, log, times)
        tokens = self._took(token, log) if (n := log.rounds) else []
        abi.check(status)
        if engine.after_step:
            engine.after_step(c.drafted + 1, time.perf_counter() - started)
        self._note(log, times, 1)
        self.costs.timed(k, c.drafted + 1, times.draft / n, (times.verify + times.commit) / n)
        return tokens

    def limit(self) -> int:
        """Tokens that the timeline may hold."""
        return min(self.engine.ctx, self.end or self.engine.ctx)

    def ahead(self) -> int:
        """After `wanted` gave drafts: how many rounds from that one on are known to make as many, of which nobody wants to hear one by one."""
        if self.engine.after_step or self._learner:
            return 1
        return self.depth.steady() if self.depth else MOST

    def _took(self, token: int, log: Any) -> list[int]:
        """The tokens that followed `token`; all but the last are in the timeline."""
        tokens = abi.ffi.unpack(log.tokens, log.n_tokens)
        self.seq.tokens.append(token)
        self.seq.tokens += tokens[:-1]
        return tokens

    def plain(self, token: int, history: Sequence[int], most: int) -> list[int]:
        """As round where the next one makes no drafts: as many steps of one token as are known to make none, `most` or a few milliseconds."""
        return plain_together(self.engine, [(self, token, history)], min(self.sure(), most))[0]

    def sure(self) -> int:
        """After `wanted` gave 0: how many rounds from that one on make no drafts."""
        return self.depth.plain_rounds() if self.depth else plain.MOST

    def _noted_plain(self, tokens: list[int], seconds: float) -> None:
        """Count tokens that were made without drafts, and this timeline's share of the time."""
        self.stats.rounds += len(tokens)
        self.stats.seconds[1] += seconds
        if self._learner:
            self._learner.observe(self.owner, tokens)
        if self.depth:
            self.depth.passed(len(tokens) - 1)

    def _note(self, log: Any, times: Any, runs: int) -> None:
        """Count the rounds of a call for `runs` timelines."""
        if self._learner:
            self._learner.observe(self.owner, abi.ffi.unpack(log.tokens, log.n_tokens))
        stats, depth, n = self.stats, self.depth, log.rounds
        stats.rounds += n
        for drafted, accepted in zip(abi.ffi.unpack(log.drafted, n), abi.ffi.unpack(log.accepted, n), strict=True):
            stats.drafted += drafted
            for i in range(min(accepted + 1, drafted)):
                stats.reached[i] += 1
                stats.accepted[i] += i < accepted
                if depth:
                    depth.judged(i, i < accepted)
        if depth and runs == 1:
            depth.followed(n - 1)
        for i, seconds in enumerate((times.draft, times.verify, times.commit)):
            stats.seconds[i] += seconds / runs

    def decode(self, token: int) -> np.ndarray:
        """Append one token and return the logits after it, [n_vocab]: from the open round where the token is its next draft."""
        row = self.follow(token)
        return open_rounds(self.engine, [(self, token)], [self.wanted()])[0] if row is None else row

    def follow(self, token: int) -> np.ndarray | None:
        """As decode where the open round has the token as its next draft; else None, and the token is not appended."""
        if not self._open or self._at >= self._request.c.drafted:
            return None
        hit = self._request.c.drafts[self._at] == token
        self.stats.reached[self._at] += 1
        self.stats.accepted[self._at] += hit
        if self.depth:
            self.depth.judged(self._at, hit)
        if not hit:
            return None
        self._at += 1
        self.seq.tokens.append(token)
        return self._logits[self._at]

    def _opened(self, request: Any, token: int, logits: np.ndarray) -> None:
        """A round was judged whose tokens the caller picks. logits: after `token` and each draft, [drafted + 1, n_vocab]."""
        self._request.c[0] = request
        self._open, self._at, self._logits = True, 0, logits
        self.seq.tokens.append(token)
        self.stats.rounds += 1
        self.stats.drafted += request.drafted

    def settle(self) -> None:
        """Leave no draft in the model's timeline."""
        if self._open:
            self._request.c.accepted = self._at
            self._open, self._at, self._logits = False, 0, np.empty((0, 0), np.float32)
            abi.check(abi.lib().bw24_round_commit(self.engine._model, self._request.c, 1))

    def truncate(self, pos: int) -> int:
        """Back to `pos`, or to the nearest position before it that can be restored. Returns the position."""
        self.settle()
        actual = abi.ffi.new("int64_t *")
        before = self.seq.tokens[pos - 1] if 0 < pos <= len(self.seq.tokens) else -1
        abi.check(abi.lib().bw24_drafter_truncate(self._handle(), pos, before, actual))
        del self.seq.tokens[actual[0] :]
        return actual[0]

    def fork(self) -> Drafted:
        """A second timeline with the same past."""
        self.settle()
        other = object.__new__(Drafted)
        other.engine, other.k, other.end, other.stats, other.draft, other.costs = self.engine, self.k, self.end, Rounds(), self.draft, self.costs
        other.depth = Depth(min(AUTO_K, self.engine.max_rows - 1), self.costs) if self.depth else None
        other.seq = self.seq.fork()
        other._drafter, other.owner = abi.ffi.NULL, self.owner
        out = abi.ffi.new("bw24_drafter **")
        try:
            abi.check(abi.lib().bw24_drafter_fork(out, self._handle(), other.seq._handle()))
        except BaseException:
            other.seq.close()
            raise
        other._drafter = out[0]
        self.engine._drafted.add(other)
        other._request = _Request(other, self._request.stop, self._request.mode, self._request.synthetic)
        other.configure(self.params)
        other._at, other._open, other._logits = 0, False, np.empty((0, 0), np.float32)
        return other

    def close(self) -> None:
        """Closing twice is fine."""
        if self._drafter:
            abi.lib().bw24_drafter_free(self._drafter)
            self._drafter = abi.ffi.NULL
        self.engine._drafted.discard(self)
        self.seq.close()


def check_depth(engine: Engine, k: int) -> None:
    """Refuse a number of drafts that the engine cannot judge. Raises Bw24Error."""
    if not 1 <= k <= MAX_K and k != AUTO:
        raise Bw24Error(f"speculative decoding: expected 1..{MAX_K} drafts a round, found {k}")
    if k + 1 > engine.max_rows or engine.max_rows < 2:
        raise Bw24Error(f"speculative decoding: {k} drafts need steps of {k + 1} rows, the engine's have at most {engine.max_rows}")


def _new_drafter(seq: Timeline, role: str) -> Any:
    out = abi.ffi.new("bw24_drafter **")
    abi.check(abi.lib().bw24_drafter_new(out, seq._handle(), role.encode()))
    return out[0]


class _Request:
    """One timeline's part of a round, as the library takes it; holds what it points to."""

    def __init__(self, owner: Drafted, stop: Collection[int], mode: str, synthetic: float):
        if mode not in (RACE, REJECT):
            raise Bw24Error(f"sampling mode '{mode}': expected {RACE} or {REJECT}")
        self.c, self.times = abi.new("bw24_round_request"), abi.ffi.new("bw24_round_times *")
        self.log, self.until = abi.new("bw24_rounds_log"), abi.ffi.new("int64_t *")
        self.mode, self.synthetic = mode, synthetic
        self.c.drafter, self.c.reject, self.c.synthetic = owner._drafter, mode == REJECT, synthetic
        self.set_stop(stop)
        self._history = np.empty(0, np.int32)

    def set_stop(self, stop: Collection[int]) -> None:
        self.stop = frozenset(stop)
        self._stop = abi.ffi.new("int32_t[]", sorted(self.stop))
        self.c.stop, self.c.n_stop = self._stop, len(self.stop)

    def set_ids(self, learner: Learner, owner: str) -> None:
        """The columns' tokens of a head that learns; the array is changed in place as it does."""
        self._ids = learner.ids(owner)
        self.c.ids, self.c.n_ids = abi.ffi.cast("int32_t *", abi.ffi.from_buffer(self._ids)), len(self._ids)

    def set_sampler(self, params: sampling.SamplingParams) -> None:
        self._call, self.draw = sampling._Call(params, [], None), sampling.Draw(params)
        self._uses = params.repetition_penalty != 1 or bool(params.presence_penalty) or bool(params.frequency_penalty)
        self.c.sampler = self._call.sampler

    def fill(self, token: int, history: Sequence[int], k: int) -> Any:
        """Set for the next round; the struct."""
        c = self.c
        c.token, c.k = token, k
        c.history, c.n_history = abi.ffi.NULL, 0
        if self._uses:
            self._history = np.asarray(history, np.int32)
            c.history, c.n_history = abi.ffi.cast("int32_t *", abi.ffi.from_buffer(self._history)), len(history)
        return c


def play(engine: Engine, runs: Sequence[tuple[Drafted, int, Sequence[int]]], drafts: Sequence[int] | None = None, most: int = 1,
         end: Any = None) -> list[list[int]]:
    """Rounds of several timelines, each with its newest token and history. Returns the tokens that follow, for each; all but the last are in its
    timeline then. `drafts`: how many each makes (default: what it wants, the rows of one step shared out). most: rounds, fewer where a reply ends, a
    few milliseconds are over or *end is not 0 (int32_t *; None: no flag). Raises Bw24Error; then none has moved, but for want of memory in the middle
    of moving, where those that moved have their tokens."""
    for run, _, _ in runs:
        run.settle()
    drafts = list(drafts) if drafts is not None else shares(engine, wanted_together([run for run, _, _ in runs]))
    n, ffi = len(runs), abi.ffi
    requests, logs = ffi.new("bw24_round_request[]", n), ffi.new("bw24_rounds_log[]", n)
    until = ffi.new("int64_t[]", [run.limit() for run, _, _ in runs])
    for i, ((run, token, history), k) in enumerate(zip(runs, drafts, strict=True)):
        requests[i] = run._request.fill(token, history, k)[0]
        logs[i].size = ffi.sizeof("bw24_rounds_log")
    times = ffi.new("bw24_round_times *")
    most = max(min(most, MOST, *(run.ahead() for run, _, _ in runs)), 1)
    status = abi.lib().bw24_rounds(engine._model, requests, n, most, plain.SLICE, until, end or ffi.NULL, logs, times)
    out = []
    for log, (run, token, _) in zip(logs, runs, strict=True):
        out.append(run._took(token, log) if log.rounds else [])
        if log.rounds:
            run._note(log, times, n)
    if rounds := max(log.rounds for log in logs):
        if n > 1:
            engine.costs.followed(n, rounds - 1)
        engine.costs.timed(max(drafts), sum(r.drafted + 1 for r in requests), times.draft / rounds, (times.verify + times.commit) / rounds,
                           runs=n)
    if status < 0 and not any(out):
        abi.check(status)
    return out


def plain_together(engine: Engine, runs: Sequence[tuple[Drafted, int, Sequence[int]]], most: int, end: Any = None,
                   kept: np.ndarray | None = None) -> list[list[int]]:
    """As play where none drafts: steps of one token each, up to `most`, as plain.decode_together makes them."""
    replies = []
    for run, token, history in runs:
        run.settle()
        replies.append((plain.Reply(run.seq, run._request.draw, run._request.stop, run._handle()), token, history))
    spent: list[float] = []  # by the library's clock, as those of rounds: other threads may keep this one from going on
    out = plain.decode_together(engine, replies, most, seconds=plain.SLICE, end=end, spent=spent, kept=kept)
    n = len(out[0])
    for (run, _, _), tokens in zip(runs, out, strict=True):
        run._noted_plain(tokens, spent[0] / len(runs))
    engine.costs.timed(0, len(runs), 0.0, spent[0] / n, n)
    return out


def append_together(engine: Engine, runs: Sequence[tuple[Drafted, Sequence[int]]]) -> None:
    """Pieces of several prompts in one step, max_rows tokens in all. Raises Bw24Error; then those whose tokens have not changed have not moved."""
    for run, _ in runs:
        run.settle()
    ffi, handles, before = abi.ffi, [run._handle() for run, _ in runs], [run.pos for run, _ in runs]
    tokens = [token for _, ids in runs for token in ids]
    status = abi.lib().bw24_drafters_append(ffi.new("bw24_drafter *[]", handles), ffi.new("int32_t[]", [len(ids) for _, ids in runs]), len(runs),
                                            ffi.new("int32_t[]", tokens))
    for (run, ids), pos in zip(runs, before, strict=True):
        if run.pos == pos + len(ids):
            run.seq.tokens.extend(ids)
    abi.check(status)


def draft(engine: Engine, requests: Any) -> None:
    """Make the drafts of `bw24_round_request[]`."""
    abi.check(abi.lib().bw24_round_draft(engine._model, requests, len(requests)))


def open_rounds(engine: Engine, runs: Sequence[tuple[Drafted, int]], drafts: Sequence[int]) -> list[np.ndarray]:
    """One step of several timelines, each with its newest token and so many drafts, whose tokens the caller picks: the logits after each newest
    token, [n_vocab]; `follow` gives those after the drafts. Raises Bw24Error; then none has moved."""
    for run, _ in runs:
        run.settle()
    requests = abi.ffi.new("bw24_round_request[]", len(runs))
    for i, ((run, token), k) in enumerate(zip(runs, drafts, strict=True)):
        requests[i] = run._request.fill(token, [*run.seq.tokens, token] if run._request._uses else (), k)[0]
    started, lib = time.perf_counter(), abi.lib()
    draft(engine, requests)
    drafted = time.perf_counter()
    ends = np.cumsum([r.drafted + 1 for r in requests])
    logits = np.empty((int(ends[-1]), engine.n_vocab), np.float32)  # its own: rounds end at different times
    abi.check(lib.bw24_round_verify(engine._model, requests, len(runs), abi.ffi.cast("float *", abi.ffi.from_buffer(logits))))
    engine.costs.timed(max(drafts), len(logits), drafted - started, time.perf_counter() - drafted, runs=len(runs))
    parts = np.split(logits, ends[:-1])
    for (run, token), request, rows in zip(runs, requests, parts, strict=True):
        run._opened(request, token, rows)
    return [rows[0] for rows in parts]


def wanted_together(runs: Sequence[Drafted]) -> list[int]:
    """Drafts for the round that these timelines share."""
    depths = [run.depth for run in runs]
    drafts = choose_together(depths) if all(depths) else [run.k for run in runs]
    return [min(k, run.room()) for k, run in zip(drafts, runs, strict=True)]


def shares(engine: Engine, wanted: list[int]) -> list[int]:
    """How many drafts each run makes so that all rows fit one step: the deepest give way first."""
    room = engine.max_rows - len(wanted)
    out = list(wanted)
    while sum(out) > room:
        out[out.index(max(out))] -= 1
    return out
