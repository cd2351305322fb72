"""The scheduler over timelines that look ahead: replies that decode share one round of drafts, those with a grammar or log probabilities one
whose tokens are picked here, prompts go in steps of their own. Owns how rounds are shared; everything else is the scheduler's. A reply is the one
that plain decoding alone gives, whatever shares its rounds.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from . import speculate
from .errors import Bw24Error
from .jobs import Piece, Run
from .scheduler import Scheduler, now
from .speculate import AUTO, RACE, Drafted, Rounds, check_depth

if TYPE_CHECKING:
    from .engine import Engine
    from .tokenizer import Tokenizer


class DraftingScheduler(Scheduler):
    """As Scheduler, for an engine with a drafter. k: drafts a round, AUTO for as many as pay; mode: RACE or REJECT; synthetic: as for Drafted, for
    measuring. Raises Bw24Error."""

    jumps = False  # they are drafts like others

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, *, k: int = AUTO, mode: str = RACE, synthetic: float = 0.0, **settings: Any):
        check_depth(engine, k)
        self.k, self.mode, self.synthetic, self.rounds = k, mode, synthetic, Rounds()
        super().__init__(engine, tokenizer, **settings)

    def sequence(self) -> Any:
        return Drafted(self.engine, self.k, speculate.sampling.SamplingParams(), sampling_mode=self.mode, synthetic=self.synthetic)

    def _sequence(self, run: Run) -> Any:
        return self._prepare(run, super()._sequence(run))

    @staticmethod
    def _prepare(run: Run, seq: Drafted) -> Drafted:
        """A timeline for this run's reply, whoever had it before."""
        seq.configure(run.job.params[run.choice], stop=run.job.stop_ids, owner=run.job.owner)
        seq.stats, limit = Rounds(), run.job.limit
        seq.end = None if limit is None else len(run.tokens) - run.generated + limit
        return seq

    # ---- steps

    def _step(self) -> None:
        runs = self._form()
        started, decoding = now(), [run for run, _ in runs if run.pending == 1]
        self._feed([(run, min(n, run.pending - 1)) for run, n in runs if run.pending > 1])  # the last token begins a round
        for run in decoding:
            self._split(run)
        free = [r for r in decoding if r.job.top is None and r.guesses()]
        steps = self._play([r for r in free if r.seq], alone=len(free) == len(runs))
        self._judge(judged := [r for r in decoding if r not in free and r.seq], alone=len(judged) == len(runs))
        if runs:
            self._count_step(runs, now() - started, steps)

    def _feed(self, parts: list[tuple[Run, int]]) -> None:
        """Pieces of prompts, all in one step."""
        if not parts:
            return
        self._hand_out()
        try:
            speculate.append_together(self.engine, [(r.seq, r.tokens[len(r.seq.tokens) :][:n]) for r, n in parts])
        except Bw24Error as error:
            self._step_failed(parts, error)
        for run, _ in parts:
            if run.seq:
                self._keep_mark(run)

    def _split(self, run: Run) -> None:
        """Before a reply's first token: runs that waited for this prompt get a copy; where the model cannot go back one is kept."""
        if run.generated:
            return
        if not self.cache.rewinds and run.job.reuse:
            with contextlib.suppress(Bw24Error):  # for want of memory: then it is not kept
                self.cache.put(run.seq.fork())
                self._trim_cache()
        for other in [r for r in self._active if r.leader is run]:
            try:
                other.seq, other.leader = self._prepare(other, run.seq.fork()), None
            except Bw24Error as error:
                self._fail(run.job, error)
                return

    def _play(self, runs: list[Run], alone: bool) -> int:
        """A round for all of them, or a plain step where none drafts; several of either if nobody else is in the step. Returns how many."""
        if not runs:
            return 1
        wanted = self._wanted(runs)
        drafts = speculate.shares(self.engine, wanted)
        most = self._ahead(runs) if alone else 1
        most = min(most, *(max(r.passed // 2, 1) for r in runs if r.matcher), *((r.seq.ahead() if any(wanted) else r.seq.sure()) for r in runs))
        if (most > 1 or any(drafts)) and not self._make_room([(r, most * (k + 1)) for r, k in zip(runs, drafts, strict=True)]):
            return 0
        parts, before = [(r.seq, r.tokens[-1], r.tokens) for r in runs], runs[0].seq.stats.rounds
        self._hand_out()
        try:
            self._spare([r for r in runs if r.refusals], 2)  # a refused token may stand in any round
            follow = (speculate.play(self.engine, parts, drafts, most, self._flag) if any(wanted) else
                      speculate.plain_together(self.engine, parts, most, self._flag))
        except Bw24Error as error:
            self._step_failed([(r, 1) for r in runs], error)
            return 1
        made = runs[0].seq.stats.rounds - before
        for run, tokens in zip(runs, follow, strict=True):
            self._emit(run, tokens)
            run.keep(None)
        return max(made, 1)

    def _judge(self, runs: list[Run], alone: bool) -> None:
        """Rows of logits for each, whose tokens are picked here: drafts serve as far as the picks are the same."""
        if not runs:
            return
        wanted = self._wanted(runs)
        if not any(wanted) and self._host and all(r.job.top is None and r.judges() for r in runs):
            self._hold(runs, alone)
            return
        self._hand_out()
        try:
            rows = speculate.open_rounds(self.engine, [(r.seq, r.tokens[-1]) for r in runs], speculate.shares(self.engine, wanted))
        except Bw24Error as error:
            self._step_failed([(r, 1) for r in runs], error)
            return
        for run, row in zip(runs, rows, strict=True):
            self._emit(run, [row])
            while run in self._active and (row := run.seq.follow(run.tokens[-1])) is not None:
                self._emit(run, [row])

    def _hold(self, runs: list[Run], alone: bool) -> None:
        """Plain steps whose tokens are held against grammars afterwards, each with the logits that it was drawn from."""
        most = min(self._ahead(runs), self._keepable(len(runs)), *(min(r.seq.sure(), r.ahead()) for r in runs)) if alone else 1
        if most > 1 and not self._make_room([(r, most) for r in runs]):
            return
        kept = self._room_for(most, len(runs))
        self._hand_out()
        try:
            self._spare(runs, most)
            follow = speculate.plain_together(self.engine, [(r.seq, r.tokens[-1], r.tokens) for r in runs], most, self._flag, kept)
        except Bw24Error as error:
            self._step_failed([(r, 1) for r in runs], error)
            return
        for i, (run, tokens) in enumerate(zip(runs, follow, strict=True)):
            self._emit(run, tokens, kept[:, i])
            run.keep(None)

    def _go_back(self, run: Run) -> None:
        run.spare.stats, run.spare.depth = run.seq.stats, run.seq.depth
        super()._go_back(run)

    def _retry(self, run: Run, n: int) -> None:
        if run.pending > 1:
            run.seq.append(run.tokens[len(run.seq.tokens) :][: min(n, run.pending - 1)])
        elif n > 1:
            return  # its piece is in
        elif run.matcher is None and run.job.top is None:
            self._emit(run, speculate.play(self.engine, [(run.seq, run.tokens[-1], run.tokens)], [0])[0])
        else:
            self._emit(run, speculate.open_rounds(self.engine, [(run.seq, run.tokens[-1])], [0]))

    @staticmethod
    def _wanted(runs: list[Run]) -> list[int]:
        """Drafts of each run for the round that they share, none beyond the tokens that its reply may have after its next one."""
        left = [speculate.MAX_K if r.job.limit is None else max(r.job.limit - r.generated - 1, 0) for r in runs]
        return [min(k, n) for k, n in zip(speculate.wanted_together([r.seq for r in runs]), left, strict=True)]

    # ---- figures

    def _note(self, run: Run) -> None:
        if run.seq is not None:
            stats = run.seq.stats
            self.rounds.add(stats)
            run.job.stats.drafted += stats.drafted
            run.job.stats.accepted += sum(stats.accepted)
            run.seq.stats = Rounds()

    def _finish(self, run: Run, reason: str, piece: Piece | None = None) -> None:
        self._note(run)
        if run.seq is not None:
            try:
                run.seq.settle()  # a kept timeline has no use for an open round's logits
            except Bw24Error:
                run.seq.close()
                run.seq = None
        super()._finish(run, reason, piece)

    def _preempt(self, run: Run) -> None:
        self._note(run)
        super()._preempt(run)
