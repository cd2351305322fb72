"""Who shares a step. Owns the engine's one thread, the queue, the forming of steps from all active requests, prompt reuse and the KV memory
they may take. Knows nothing of HTTP, templates or what a reply is for.

A run is one reply: its tokens, and a sequence that holds the first of them. A step feeds each run the tokens that its sequence lacks: one
while it decodes, a piece of the prompt before. No result depends on who shares a step, on the pieces, or on what was reused.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from . import abi, plain, sampling
from .engine import PAGE_TOKENS, kv_bytes_per_token
from .errors import Bw24Error
from .generate import CONTEXT, EOS, INTERRUPTED, LENGTH, STOP, check_fits
from .jobs import Busy, Job, Piece, Run
from .logprobs import Logprobs, logprobs
from .prompt_cache import PromptCache, marks
from .tokenizer import StopFilter

if TYPE_CHECKING:
    from .engine import Engine
    from .engine import Sequence as Timeline
    from .tokenizer import Tokenizer

MAX_RUNS = 32  # rows of a decode step: what one walk over the weights serves at little more than the price of one row
SHARED_PREFILL = 64  # prompt rows of a step that also decodes: bounds what a long prompt adds to the others' time between tokens
SHARED_ON_CARD = 256  # the same on a card, where few rows cost nearly as much: 9B NVFP4 on an H200 64 rows 27 ms, 144 34, 256 some 45
E_MEMORY, E_DEVICE = -2, -9
MEMORY_SHARE = 0.9  # of the memory that is free once the weights are loaded
MOST_FORCED = 256  # tokens that a grammar may add at once: as many rows as a step takes beside others'
KEPT_BYTES = 64 << 20  # of logits that a call which makes several tokens may leave
MASKED = "grammar"  # reason of a reply that its grammar ended

now = time.monotonic


@dataclass
class Counters:
    """Sums since the start, for the metrics; written by the engine's thread alone."""

    steps: int = 0
    decode_rows: int = 0
    prompt_rows: int = 0
    step_seconds: float = 0.0
    prompt_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)


def rewinds(model: Any) -> bool:
    """Whether a sequence can go back to every position: no windows, no state that folds its past."""
    if any(window for _, _, window in model.builder.kvs.values()):
        return False
    used = {line.split(" ", 1)[0] for line in model.list_text().splitlines()}
    return not any(state == "FOLD" for name, (_, state) in abi.ops().items() if name in used)


class Scheduler:
    """Runs jobs on an engine, from one thread of its own, until close(). `cache_ram`: bytes of KV that finished sequences may hold.

    kv_room: bytes of KV in all; what does not fit waits, and gives its pages back to be computed again later. Raises Bw24Error.
    """

    jumps = True  # tokens that a grammar leaves no choice about are fed without a step for each

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, *, cache_ram: int = 1 << 30, queue_limit: int = 256,
                 max_runs: int = MAX_RUNS, kv_room: int | None = None):
        self.engine, self.tokenizer = engine, tokenizer
        self.cache_ram, self.queue_limit, self.max_runs = cache_ram, queue_limit, max_runs
        self.kv_room = int(engine.free_memory() * MEMORY_SHARE) if kv_room is None else kv_room
        per_token = kv_bytes_per_token(engine.model, engine.kv, engine.draft, engine.backend == "cuda")
        self._page_bytes = PAGE_TOKENS * sum(per_token.values())
        version, log = engine.state_sizes()
        self._version_bytes, self._state_bytes = version, 2 * version + log  # what a sequence holds, and at most what a step takes beside it
        self.cache = PromptCache(rewinds(engine.model))
        self.counters = Counters()
        self.broken: str | None = None
        self._shared = SHARED_ON_CARD if engine.backend == "cuda" else SHARED_PREFILL
        self._logits = np.empty((0, engine.n_vocab), np.float32)
        self._logits_at: Any = abi.ffi.NULL
        self._handed = 0.0  # when readers got their events
        self._outside = 0.1  # time between two calls, in steps
        self._host = engine.backend != "cuda"  # logits are where they are looked at
        self._outbox: list[tuple[Job, list[Piece] | Exception, bool]] = []  # what readers get as soon as the next step runs
        self._waiting: deque[Job] = deque()
        self._preempted: list[Run] = []
        self._active: list[Run] = []
        self._orders = itertools.count()
        self._tight = False  # a run gave its pages back and none has ended since: taking one in again would only push out the next
        self._change = threading.Condition()
        self._closing = self._draining = False
        self._news = True  # something came from another thread since the last look: between steps of the same runs the lock is not taken
        self._flag = abi.ffi.new("int32_t *")  # the same, for a call that makes several steps
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    # ---- from any thread

    def submit(self, job: Job) -> Job:
        """Queue a job. Raises Busy, or Bw24Error where its prompt leaves no room in the context."""
        check_fits(len(job.ids), self.engine.ctx)
        if not 1 <= len(job.params) <= self.max_runs:
            raise Bw24Error(f"choices: expected 1..{self.max_runs}, found {len(job.params)}")
        if not 0 <= (low := min(job.ids)) <= (high := max(job.ids)) < self.engine.n_vocab:
            raise Bw24Error(f"token id: expected 0..{self.engine.n_vocab - 1}, found {low if low < 0 else high}")
        job.stats.prompt_tokens, job.stats.submitted = len(job.ids), now()
        with self._change:
            if self._closing or self._draining:
                raise Busy("the server is shutting down", closing=True)
            if self.broken:
                raise Bw24Error(self.broken)
            if len(self._waiting) >= self.queue_limit:
                raise Busy(f"the queue holds {len(self._waiting)} requests, its limit; try again later")
            job._open = len(job.params)
            self._waiting.append(job)
            self._tell()
        return job

    def cancel(self, job: Job) -> None:
        """End a job before the next step; its choices end with the reason `interrupted`. Does nothing to one that has ended."""
        with self._change:
            job.cancelled = True
            self._tell()

    def load(self) -> dict[str, int]:
        """Requests that run and wait, and kept sequences."""
        with self._change:
            running = len({id(r.job) for r in self._active})
            waiting = len(self._waiting) + len({id(r.job) for r in self._preempted})
        return {"running": running, "rows": len(self._active), "waiting": waiting, "kept": len(self.cache)}

    def drain(self, seconds: float) -> bool:
        """Refuse new jobs and wait for those there are; False where `seconds` were not enough."""
        with self._change:
            self._draining = True
            return self._change.wait_for(lambda: self._idle() or self._closing, seconds)

    def close(self) -> None:
        """End the jobs there are with an error, give every sequence back and stop the thread. The engine stays open."""
        with self._change:
            self._closing = True
            self._tell()
        self._thread.join()

    def _tell(self) -> None:
        """With the lock held: wake the engine's thread, or end the call that it is in after the step in hand."""
        self._news = True
        self._flag[0] = 1  # after the news: who takes the flag back looks for them next
        self._change.notify_all()

    def _idle(self) -> bool:
        return not (self._waiting or self._preempted or self._active)

    # ---- the engine's thread

    def _loop(self) -> None:
        try:
            while self._ready():
                self._step()
                if self._idle():
                    self._hand_out()
                    with self._change:
                        self._change.notify_all()
        except BaseException as error:  # a defect here must end the requests, not leave their readers waiting
            self.broken = f"the scheduler failed: {type(error).__name__}: {error}"
            raise
        finally:
            self._end_everything()

    def _ready(self) -> bool:
        """Before a step: see who came and who left; False where the scheduler ends."""
        if self._active and not (self._news or self._waiting or self._preempted):
            return True
        self._news = False  # before the look: what comes during it is seen after the next step
        if self._idle():
            self._hand_out()
        if not self._wait_for_work():
            return False
        self._drop_cancelled()
        self._admit()
        return True

    def _send(self, job: Job, event: list[Piece] | Exception, over: bool = False) -> None:
        """For a job's reader, from `_hand_out` on."""
        self._outbox.append((job, event, over))

    def _hand_out(self) -> None:
        """Wake the readers, right before a call that takes its time: woken earlier they would run before the step and not beside it."""
        for job, event, over in self._outbox:
            job.put(event, over)
        self._outbox.clear()
        self._handed = now()

    def _wait_for_work(self) -> bool:
        with self._change:
            self._change.wait_for(lambda: self._closing or not self._idle())
            return not self._closing

    def _end_everything(self) -> None:
        error = Bw24Error(self.broken or "the server is shutting down")
        self._hand_out()
        with self._change:
            self._closing = True
            jobs = {id(j): j for j in [*self._waiting, *(r.job for r in self._preempted), *(r.job for r in self._active)]}
            for run in self._active:
                if run.seq:
                    run.seq.close()
            self._waiting.clear()
            self._preempted.clear()
            self._active.clear()
            self.cache.clear()
            for job in jobs.values():
                job.put(error, over=True)
            self._change.notify_all()

    def _drop_cancelled(self) -> None:
        with self._change:
            gone = [job for job in self._waiting if job.cancelled]
            for job in gone:
                self._waiting.remove(job)
            for run in [r for r in self._preempted if r.job.cancelled]:
                self._preempted.remove(run)
                self._finish(run, INTERRUPTED)
        for job in gone:
            job.stats.finished = now()
            for choice in range(len(job.params)):
                self._count(INTERRUPTED)
                self._send(job, [Piece(choice, reason=INTERRUPTED)], over=choice == len(job.params) - 1)
        for run in [r for r in self._active if r.job.cancelled]:
            self._finish(run, INTERRUPTED)

    # ---- admission

    def _admit(self) -> None:
        """Take in those who gave their pages back, oldest first, then those who wait, as far as rows and memory allow."""
        self._tight = self._tight and bool(self._active)
        while self._preempted and not self._tight and len(self._active) < self.max_runs and self._fits(len(self._preempted[0].tokens)):
            run = self._preempted.pop(0)
            run.seq = self._sequence(run)
            self._active.append(run)
        while True:
            with self._change:
                job = self._waiting[0] if self._waiting else None
                if job is None or self._preempted or len(self._active) + len(job.params) > self.max_runs or not self._fits(len(job.ids)):
                    return
                self._waiting.popleft()
            self._start(job)

    def _fits(self, tokens: int) -> bool:
        """Whether a prompt's pages fit beside what the active runs hold; kept sequences make room."""
        if not self._active:
            return True
        need = (tokens // PAGE_TOKENS + 2) * self._page_bytes + self._state_bytes + self._growth(len(self._active) + 1)
        return self._held_by_active() + need <= self.kv_room

    def _growth(self, runs: int) -> int:
        """Bytes that a step of so many runs may take beside what they hold: a page each, and the versions of recurrent state that it writes."""
        return runs * (self._page_bytes + self._state_bytes)

    def _held_by_active(self) -> int:
        """Bytes of the active runs' pages, each counted as if it shared none."""
        return sum((len(r.seq.tokens) // PAGE_TOKENS + 1) * self._page_bytes + self._state_bytes for r in self._active if r.seq)

    def sequence(self) -> Timeline:
        """A new, empty timeline."""
        return self.engine.sequence()

    def _sequence(self, run: Run) -> Timeline:
        """The sequence that a run begins with; where the model cannot go back, the positions to keep on the way."""
        if not run.job.reuse:
            return self.sequence()
        if not self.cache.rewinds:  # going back writes versions of the state and a page's copy, beside the best found before
            self.cache.prefer(run.tokens)
            while self.engine.kv_used() + self._growth(1) + self._version_bytes > self.kv_room and self.cache.drop_oldest():
                pass
        seq = self.cache.take(self, run.tokens)
        run.marks = [] if self.cache.rewinds else [m for m in marks(len(run.job.ids)) if m > seq.pos]
        return seq

    def _start(self, job: Job) -> None:
        job.stats.started = now()
        job._speller = None if job.stops else self.tokenizer
        runs = [Run(job, i, list(job.ids), next(self._orders)) for i in range(len(job.params))]
        try:
            for run in runs:
                run.matcher = job.grammar() if job.grammar else None
                run.stream = self.tokenizer.stream() if self.tokenizer and job.stops else None
                run.filter = StopFilter(list(job.stops))
                run.draw = sampling.Draw(job.params[run.choice])
            runs[0].seq = self._sequence(runs[0])
        except Bw24Error as error:
            self._fail(job, error)
            return
        job.stats.cached_tokens = runs[0].seq.pos
        self.counters.prompt_tokens += len(job.ids)
        self.counters.cached_tokens += job.stats.cached_tokens
        self._active.append(runs[0])
        for run in runs[1:]:
            run.leader = runs[0]
            self._active.append(run)
        if job.limit == 0:
            for run in runs:
                self._finish(run, LENGTH)

    # ---- steps

    def _step(self) -> None:
        runs = self._form()
        if not runs:
            return
        if all(run.pending == 1 and run.generated and self._draws(run) for run, _ in runs):
            self._decode([run for run, _ in runs])
            return
        started = now()
        try:
            results = self._results(runs)
        except Bw24Error as error:
            self._step_failed(runs, error)
            return
        self._count_step(runs, now() - started)
        at = 0
        for run, _ in runs:
            self._keep_mark(run)
            if not run.pending:
                self._advance(run, results[at])
                at += 1

    def _decode(self, runs: list[Run]) -> None:
        """Tokens of replies that are drawn without logits: several steps, where nothing waits for the next, in as few calls as grammars allow."""
        left = self._ahead(runs)
        if not self._make_room([(r, left) for r in runs]):
            return
        self._hand_out()
        keeps = self._keeps(runs)
        if keeps:
            left = min(left, self._keepable(len(runs)))
        alone = keeps and len(runs) == 1 and not self.engine.after_step  # who listens hears of every step
        while left > 0:
            most = min(left, *(r.ahead(self._outside) if r.matcher else left for r in runs))
            left -= (self._alone(runs[0], most) if alone else self._together(runs, most, keeps)) or left
            if self._news or not all(r.seq and r.pending == 1 for r in runs) or keeps != self._keeps(runs):
                return

    def _ahead(self, runs: list[Run]) -> int:
        """How many steps replies can make before the next look around: as many tokens as each may still have, one where somebody came or left."""
        self._flag[0] = 0
        return 1 if self._news else min(plain.MOST, *map(self._left, runs))

    def _keepable(self, runs: int) -> int:
        """Steps of so many replies whose logits may be kept."""
        return max(KEPT_BYTES // (4 * self.engine.n_vocab * runs), 1)

    def _left(self, run: Run) -> int:
        """Tokens that a reply may still have."""
        context = self.engine.ctx - len(run.seq.tokens)
        return context if run.job.limit is None else min(run.job.limit - run.generated, context)

    def _keeps(self, runs: list[Run]) -> bool:
        """Whether the rows that tokens are drawn from are kept, for a token that a grammar refuses; a card whose logits stay where they are repeats a
        step instead, while refusals are rare."""
        return any(r.matcher and (self._host or not r.guesses()) for r in runs)  # who guesses is greedy, whose judgement needs no row

    def _together(self, runs: list[Run], most: int, keeps: bool) -> int:
        """One call for all of them; there is room for its pages. Returns how many tokens each got."""
        started, kept = now(), self._room_for(most, len(runs)) if keeps else None
        if started - self._handed > plain.SLICE:
            self._hand_out()
        try:
            self._spare(runs, most)
            follow = self._plain(runs, most, kept)
        except Bw24Error as error:
            self._step_failed([(r, 1) for r in runs], error)
            return 0
        ended, n = now(), len(follow[0])
        self._count_step([(r, 1) for r in runs], ended - started, n)
        for i, (run, tokens) in enumerate(zip(runs, follow, strict=True)):
            self._emit(run, tokens, None if kept is None else kept[:, i])
            run.keep(None)
        if keeps:  # a mean of some ten calls
            self._outside += 0.1 * (min((now() - ended) * n / (ended - started), 1) - self._outside)
        return n

    def _alone(self, run: Run, most: int) -> int:
        """As _together for one reply under a grammar, with as little as can be around the call: it is made every few tokens."""
        started = now()
        if started - self._handed > plain.SLICE:
            self._hand_out()
        if len(self._logits) < most:
            self._room_for(plain.MOST)
        try:
            self._spare([run], most)
            tokens = plain.decode_kept(self.engine, self._reply(run), run.tokens, most, self._flag, self._logits_at)
        except Bw24Error as error:
            self._step_failed([(run, 1)], error)
            return 0
        ended, n = now(), len(tokens)
        self._count_step([(run, 1)], ended - started, n)
        self._emit(run, tokens, self._logits)
        run.keep(None)
        self._outside += 0.1 * (min((now() - ended) * n / (ended - started), 1) - self._outside)
        return n

    def _spare(self, runs: list[Run], most: int) -> None:
        """Before a call that makes several steps: a way back to its beginning, for models that cannot undo more than the last step."""
        for run in runs if most > 1 and not self.cache.rewinds else ():
            if run.matcher:
                run.keep(run.seq.fork())

    def _room_for(self, *rows: int) -> np.ndarray:
        """Room for that many rows of logits, valid until it is asked for again: new memory costs as much as the mask that is made for it."""
        if len(self._logits) < (n := math.prod(rows)):
            self._logits = np.empty((n, self.engine.n_vocab), np.float32)
            self._logits_at = abi.ffi.cast("float *", abi.ffi.from_buffer(self._logits))
        return self._logits[:n].reshape(*rows, self.engine.n_vocab)

    def _plain(self, runs: list[Run], most: int, kept: np.ndarray | None) -> list[list[int]]:
        return plain.decode_together(self.engine, [(self._reply(r), r.tokens[-1], r.tokens) for r in runs], most, end=self._flag, kept=kept)

    @staticmethod
    def _reply(run: Run) -> plain.Reply:
        """Its part of a call, made anew where its sequence has changed."""
        if run.reply is None or run.reply.seq is not run.seq:
            run.reply = plain.Reply(run.seq, run.draw, run.job.stop_ids)
        return run.reply

    def _results(self, runs: list[tuple[Run, int]]) -> np.ndarray:
        """A row of logits for each run whose tokens are all in; or its next token, where every one of them can be drawn without logits."""
        ready = [run for run, n in runs if run.pending == n]
        parts = [(run.seq, run.tokens[(have := len(run.seq.tokens)) : have + n], run.pending == n) for run, n in runs]
        self._hand_out()
        if ready and all(run.matcher is None and self._draws(run) for run in ready):
            return self.engine.step_parts(parts, draws=[(run.draw, run.tokens) for run in ready])
        return self.engine.step_parts(parts, self._room_for(len(ready)))

    def _draws(self, run: Run) -> bool:
        """Whether a run's next token needs no logits here: no log probabilities, no other choice that begins from the same row, no grammar or one
        that is asked afterwards."""
        if run.generated == 0:
            return run.matcher is None and run.job.top is None and len(run.job.params) == 1
        return run.job.top is None and run.judges()

    def _form(self) -> list[tuple[Run, int]]:
        """The runs of the next step and how many of its tokens each feeds; pages for them are there."""
        while True:
            decoding = [(r, 1) for r in self._active if r.seq and r.pending == 1]
            prompts = [r for r in self._active if r.seq and r.pending > 1]
            room = self.engine.max_rows - len(decoding)
            chosen = decoding + [(r, up_to_mark(r, n)) for r, n in share(prompts, min(room, self._shared) if decoding else room)]
            if not chosen or self._make_room(chosen):
                return chosen

    def _make_room(self, chosen: list[tuple[Run, int]]) -> bool:
        """Drop kept sequences, then give back the youngest run's pages, until the step fits. False where the step must be formed again."""
        pages = sum((have + n - 1) // PAGE_TOKENS - (have - 1) // PAGE_TOKENS for have, n in ((len(r.seq.tokens), n) for r, n in chosen))
        need = pages * self._page_bytes + self._growth(len(chosen))
        self._trim_cache()
        while self.engine.kv_used() + need > self.kv_room:
            if self.cache.drop_oldest():
                continue
            with_pages = [r for r in self._active if r.seq]
            if len(with_pages) < 2:
                return True  # a single sequence of the whole context was provided for when the context was chosen
            self._preempt(max(with_pages, key=lambda r: r.order))
            return False
        return True

    def _keep_mark(self, run: Run) -> None:
        """Keep a copy of a sequence that has reached a mark."""
        while run.marks and run.marks[-1] <= len(run.seq.tokens):
            if run.marks.pop() == len(run.seq.tokens):
                with contextlib.suppress(Bw24Error):  # for want of memory: then it is not kept
                    self.cache.put(run.seq.fork())
                    self._trim_cache()

    def _trim_cache(self) -> None:
        """Keep the budget: all pages in use are at most cache_ram more than the active runs would need alone."""
        while len(self.cache) and self.engine.kv_used() > self.cache_ram + self._held_by_active():
            self.cache.drop_oldest()

    def _preempt(self, run: Run) -> None:
        run.seq.close()
        run.seq, self._tight = None, True
        run.job.stats.preempted += 1
        self.counters.preemptions += 1
        with self._change:
            for other in [r for r in self._active if r is run or r.leader is run]:
                other.leader = None
                self._active.remove(other)
                self._preempted.append(other)
            self._preempted.sort(key=lambda r: r.order)

    def _step_failed(self, runs: list[tuple[Run, int]], error: Bw24Error) -> None:
        """No sequence has moved. A lone run is at fault; of several, each tries alone, so that one cannot end the others."""
        for run, _ in runs:
            run.keep(None)
        if error.code == E_DEVICE:
            self.broken = f"the device failed: {error}"
            for job in {id(r.job): r.job for r in self._active}.values():
                self._fail(job, error)
            return
        if error.code == E_MEMORY and self.cache.drop_oldest():
            return
        if error.code == E_MEMORY and len(runs) > 1:
            self._preempt(max((r for r, _ in runs), key=lambda r: r.order))
            return
        if len(runs) == 1:
            self._fail(runs[0][0].job, error)
            return
        for run, n in runs:
            if run.seq is None:
                continue  # its job failed with another of its runs
            try:
                self._retry(run, n)
            except Bw24Error as own:
                self._fail(run.job, own)

    def _retry(self, run: Run, n: int) -> None:
        """The run's part of a step that failed, alone."""
        results = self._results([(run, n)])
        if not run.pending:
            self._advance(run, results[0])

    def _count_step(self, runs: list[tuple[Run, int]], seconds: float, steps: int = 1) -> None:
        c, prompt = self.counters, sum(n for _, n in runs if n > 1)
        c.steps += steps
        c.prompt_rows += prompt
        c.decode_rows += steps * sum(1 for _, n in runs if n == 1)
        c.step_seconds += seconds
        c.prompt_seconds += seconds * prompt / sum(n for _, n in runs)

    # ---- one reply's next token

    def _advance(self, run: Run, row: np.ndarray | np.int32) -> None:
        """All of a run's tokens are in; `row`: the next one's logits, or that token. Runs that waited for this prompt go on from a copy of it."""
        followers = [r for r in self._active if r.leader is run] if not run.generated else []
        if not run.generated and not self.cache.rewinds and run.job.reuse:
            with contextlib.suppress(Bw24Error):  # the next turn's prompt may differ after this one, and there is no way back to here
                self.cache.put(run.seq.fork())
                self._trim_cache()
        for other in followers:
            try:
                other.seq, other.leader = run.seq.fork(), None
            except Bw24Error as error:
                self._fail(run.job, error)
                return
        for one in [run, *followers]:
            self._emit(one, [row if isinstance(row, np.ndarray) else int(row)])

    def _emit(self, run: Run, rows: list[Any], kept: np.ndarray | None = None) -> None:
        """The next tokens of a reply, or rows of logits to pick them from, until something ends it. kept: the logits that tokens were drawn from."""
        if run not in self._active:
            return
        try:
            if isinstance(rows[0], np.ndarray):
                self._pick(run, rows[0])
            elif run.matcher:
                self._take_led(run, rows, kept)
            else:
                self._take(run, rows)
            while self.jumps and run.matcher and run in self._active and self._jump(run):
                pass
        except Bw24Error as error:
            self._fail(run.job, error)

    def _take_led(self, run: Run, tokens: list[int], kept: np.ndarray | None) -> None:
        """As _take, for tokens drawn without the grammar: as many as it would have let be drawn, those are the masked draws too."""
        led, complete, greedy = 0, False, run.greedy
        for token in tokens:
            if complete or not (greedy or run.agrees(token, kept[led])) or (complete := run.matcher.try_accept(token)) is None:
                break
            led += 1
        run.passed += led
        if led:
            self._take(run, tokens[:led], MASKED if complete else "")
        if led < len(tokens) and run in self._active:
            self._take_back(run, None if kept is None else kept[led])

    def _take_back(self, run: Run, row: np.ndarray | None) -> None:
        """After a token that the grammar refused: another is drawn from the same row, or, where that is gone, the token before is fed once more."""
        run.refused()
        if len(run.seq.tokens) > (pos := len(run.tokens) - (row is None)):
            if run.spare and len(run.seq.tokens) > pos + 1:
                self._go_back(run)
            else:
                run.seq.truncate(pos)
        if row is not None:
            self._pick(run, row)

    def _go_back(self, run: Run) -> None:
        """To its sequence as it was before the call."""
        run.seq.close()
        run.seq, run.spare = run.spare, None

    def _jump(self, run: Run) -> bool:
        """The tokens that the grammar leaves no choice about, which need no logits, all at once. Whether there were any."""
        tokens, complete = [], False
        while not complete and len(tokens) < MOST_FORCED and (token := run.forced()) is not None:
            tokens.append(token)
            complete = token in run.job.stop_ids or run.matcher.accept(token)
        if tokens:
            self._take(run, tokens, MASKED if complete else "")
        return bool(tokens)

    def _pick(self, run: Run, row: np.ndarray) -> None:
        """The next token of a reply, from its logits."""
        job = run.job
        token = self._masked(run, row) if run.matcher else sampling.sample(row, run.draw, run.tokens, len(run.tokens))
        if token in job.stop_ids:
            self._add(run, token)
            return
        found = None if job.top is None else logprobs(row, token, job.top)
        self._add(run, token, run.matcher is not None and run.matcher.accept(token), found)

    def _add(self, run: Run, token: int, complete: bool = False, found: Logprobs | None = None) -> None:
        """A token to its reply. complete: its grammar ends with it."""
        job = run.job
        job.stats.first_token = job.stats.first_token or now()
        if token in job.stop_ids:
            self._finish(run, EOS)
            return
        run.tokens.append(token)
        run.generated += 1
        job.stats.generated_tokens += 1
        self.counters.generated_tokens += 1
        text, stopped = self._text(run, token)
        piece = Piece(run.choice, text, token, found)
        if stopped:
            self._finish(run, STOP, piece)
        elif complete:
            self._finish(run, MASKED, piece)
        elif job.limit is not None and run.generated >= job.limit:
            self._finish(run, LENGTH, piece)
        elif len(run.tokens) > self.engine.ctx:
            self._finish(run, CONTEXT, piece)
        else:
            self._send(job, [piece])

    @staticmethod
    def _masked(run: Run, row: np.ndarray) -> int:
        """A draw that the grammar allows. The largest logit, where it is allowed, is the masked draw too, and asking that takes less than a mask."""
        allows = getattr(run.matcher, "allows", None)
        if allows and not run.doubts and run.judges():
            token = sampling.sample(row, run.draw, run.tokens, len(run.tokens))
            if allows(token) and run.agrees(token, row):
                run.passed += 1
                return token
            run.refused()
        run.doubts = max(run.doubts - 1, 0)
        return sampling.sample(row, run.draw, run.tokens, len(run.tokens), run.matcher.mask())

    def _take(self, run: Run, tokens: list[int], ends: str = "") -> None:
        """As _add for each of the next tokens, at once where nothing but their ids is to be looked at. ends: why the reply ends with the last."""
        job, reason, n = run.job, "", len(tokens)
        if job.stops:
            for i, token in enumerate(tokens):
                if run in self._active:
                    self._add(run, token, bool(ends) and i == n - 1)
            return
        limit, context = (n + 1 if job.limit is None else job.limit - run.generated), self.engine.ctx + 1 - len(run.tokens)
        if (end := next((i for i, t in enumerate(tokens) if t in job.stop_ids), n)) < min(limit, context, n):
            reason, n = EOS, end
        elif ends and n <= min(limit, context):
            reason = ends
        elif n >= min(limit, context):
            reason, n = (LENGTH, limit) if limit <= context else (CONTEXT, context)
        job.stats.first_token = job.stats.first_token or now()
        pieces = [Piece(run.choice, token=t) for t in tokens[:n]]
        run.tokens += tokens[:n]
        run.generated += n
        job.stats.generated_tokens += n
        self.counters.generated_tokens += n
        last = pieces.pop() if reason not in ("", EOS) else None
        if pieces:
            self._send(job, pieces)
        if reason:
            self._finish(run, reason, last)

    def _text(self, run: Run, token: int) -> tuple[str, bool]:
        if run.stream is None or (self.tokenizer.is_special(token) and token not in run.job.visible):
            return "", False
        return run.filter.push(run.stream.push(token))

    def _finish(self, run: Run, reason: str, piece: Piece | None = None) -> None:
        """End a reply; its sequence is kept for later prompts."""
        piece = piece or Piece(run.choice)
        if run.stream is not None and reason != STOP:
            text, found = run.filter.push(run.stream.flush())
            piece.text += text + ("" if found else run.filter.flush())
            reason = STOP if found else reason
        piece.reason, piece.stop = reason, run.filter.matched
        with self._change:
            if run in self._active:
                self._active.remove(run)
        if run.seq is not None:
            if run.job.reuse and run.seq.pos:
                self.cache.put(run.seq)
            else:
                run.seq.close()
            run.seq, self._tight = None, False
            self._trim_cache()
        self._count(reason)
        run.job._open -= 1
        if not run.job._open:
            run.job.stats.finished = now()
        self._send(run.job, [piece], over=not run.job._open)

    def _count(self, reason: str) -> None:
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1

    def _fail(self, job: Job, error: Bw24Error) -> None:
        with self._change:
            runs = [r for r in self._active if r.job is job]
            self._active = [r for r in self._active if r.job is not job]
            self._preempted = [r for r in self._preempted if r.job is not job]
        for run in runs:
            if run.seq:
                run.seq.close()
                run.seq, self._tight = None, False
        self._count("error")
        job.stats.finished = now()
        self._send(job, error, over=True)


def up_to_mark(run: Run, rows: int) -> int:
    """As many of the rows as lead to the run's next mark at most."""
    ahead = run.marks[-1] - len(run.seq.tokens) if run.marks else rows
    return min(rows, ahead) if ahead > 0 else rows


def share(prompts: list[Run], rows: int) -> list[tuple[Run, int]]:
    """How a step's prompt rows are divided: half to the oldest, so that it is never overtaken for good, the rest to the shortest first."""
    if not prompts or rows < 1:
        return []
    oldest = min(prompts, key=lambda r: r.order)
    half = rows if len(prompts) == 1 else max(rows // 2, 1)
    out, rows = [(oldest, min(oldest.pending, half))], rows - min(oldest.pending, half)
    for run in sorted((r for r in prompts if r is not oldest), key=lambda r: (r.pending, r.order)):
        if rows < 1:
            break
        out.append((run, min(run.pending, rows)))
        rows -= out[-1][1]
    return out
