"""Replies under a grammar whose tokens are drawn first and asked about afterwards: the same as with a mask for every token, whatever is refused,
where it ends, and whoever shares the steps."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from bw24.engine import Engine
from bw24.jobs import Job, Run
from bw24.sampling import SamplingParams
from bw24.scheduler import Scheduler
from bw24.scheduler_spec import DraftingScheduler
from bw24.speculate import AUTO, Drafted

TEXTS = ("def read_lines(path):\n", "import os\n\nclass Reader:\n    def", "def test_sum():\n    assert", "The module provides")
WORDY = 11  # of the jobs, the one whose grammar has a long word


class Masked:
    """A grammar that refuses the ids of one remainder, another after each token, and ends after `length` tokens. word: ids of which it allows
    nothing but the next one, some way behind a token whose number has the remainder 2 of 5."""

    def __init__(self, n_vocab: int, modulus: int, length: int, word: tuple[int, ...] = ()):
        self.n_vocab, self.modulus, self.left, self.at, self.word, self.inside = n_vocab, modulus, length, 3, word, 0

    def _next(self) -> int | None:
        return self.word[self.inside] if self.inside < len(self.word) and (self.inside or self.at % 5 == 2) else None

    def _refuses(self, token: int) -> bool:
        return token != forced if (forced := self._next()) is not None else token % self.modulus == self.at % self.modulus

    def mask(self) -> np.ndarray:
        bits = np.ones(-(-self.n_vocab // 32) * 32, np.uint8)
        bits[self.n_vocab :] = 0
        bits[self.at % self.modulus : self.n_vocab : self.modulus] = 0
        if (forced := self._next()) is not None:
            bits[:] = 0
            bits[forced] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token: int) -> bool:
        assert self.left and not self._refuses(token)
        self.inside = (self.inside + 1) % len(self.word) if self._next() is not None else 0
        self.left, self.at = self.left - 1, 7 * self.at + token
        return not self.left


class Asked(Masked):
    """The same, which can be asked about tokens."""

    def allows(self, token: int) -> bool:
        return bool(self.left) and not self._refuses(token)

    def try_accept(self, token: int) -> bool | None:
        return self.accept(token) if self.allows(token) else None


class Forced(Asked):
    """The same, which says what must follow."""

    def forced(self) -> list[int]:
        return [] if (first := self._next()) is None or not self.left else [first, *self.word[self.inside + 1 :]]


def jobs(model, n_vocab: int, kind: type[Masked]) -> list[Job]:
    ids, ends = [model.tokenizer.encode(t) for t in TEXTS], model.tokenizer.eog_ids
    fussy = SamplingParams(repetition_penalty=1.1, frequency_penalty=0.1, logit_bias={300: 2.0, 11: -3.0})

    def under(modulus: int, length: int = 1000, word: tuple[int, ...] = ()):
        return lambda: kind(n_vocab, modulus, length, word)

    return [
        Job(ids[0], [SamplingParams()], limit=60, grammar=under(1 << 30)),  # refuses nothing
        Job(ids[1], [SamplingParams()], limit=50, stop_ids=ends, grammar=under(3)),
        Job(ids[2], [fussy], limit=45, stop_ids=ends, grammar=under(11)),
        Job(ids[3], [SamplingParams(), SamplingParams()], limit=400, stop_ids=ends, grammar=under(37, 41)),
        Job(ids[0], [SamplingParams()], limit=40, stop_ids=ends, stops=["self.", "\n\n"], grammar=under(23)),
        Job(ids[1], [SamplingParams(temperature=0.8, seed=4)], limit=30, stop_ids=ends, grammar=under(5)),
        Job(ids[2], [SamplingParams()], limit=400, grammar=under(1 << 30, 33)),
        Job(ids[2], [SamplingParams()], limit=50, stop_ids=ends),
        Job(ids[1], [SamplingParams(), SamplingParams(temperature=1, seed=7)], limit=70, stop_ids=ends, grammar=under(13, word=(400, 31, 32, 401))),
        Job(ids[3], [SamplingParams(temperature=0.7, top_k=20, seed=5)], limit=33, grammar=under(9, word=(77,))),
        Job(ids[0], [fussy], limit=60, stop_ids=ends, stops=["zz", "return"], grammar=under(29, word=(55, 56))),
        Job(ids[0], [SamplingParams()], limit=300, stop_ids=ends, grammar=under(31, 25, tuple(range(100, 160)))),
        Job(ids[2], [SamplingParams()], limit=40, stop_ids=ends, top=2, grammar=under(19, word=(88, 89, 90))),
    ]


def collect(done: Job) -> list[tuple]:
    out: list[list] = [[] for _ in done.params]
    for piece in done.pieces():
        out[piece.choice].append((piece.text, piece.token, piece.reason))
    return [("".join(t for t, *_ in rows), [token for _, token, _ in rows if token is not None], rows[-1][2]) for rows in out]


@pytest.fixture(scope="module")
def masked(model):
    with Engine(model, threads=2, ctx=512, device="cpu") as engine, closing(Scheduler(engine, model.tokenizer)) as scheduler:
        found = [collect(scheduler.submit(one)) for one in jobs(model, engine.n_vocab, Masked)]
    assert [one[0][2] for one in found[:1]] == ["length"] and found[3][0][2] == found[6][0][2] == "grammar" and len(found[6][0][1]) == 33
    return found


@pytest.mark.parametrize("kind", [Asked, Forced])
def test_asked_afterwards_is_masked(model, masked, kind: type[Masked]):
    with Engine(model, threads=2, ctx=512, device="cpu") as engine:
        with closing(Scheduler(engine, model.tokenizer)) as scheduler:
            assert [collect(scheduler.submit(one)) for one in jobs(model, engine.n_vocab, kind)] == masked
            before = scheduler.counters.steps
            ((_, tokens, _),) = collect(scheduler.submit(jobs(model, engine.n_vocab, kind)[WORDY]))
            steps = scheduler.counters.steps - before
            together = [scheduler.submit(one) for one in jobs(model, engine.n_vocab, kind)]
            assert [collect(one) for one in together] == masked
        assert not engine._sequences and engine.memory()["kv"] == 0
        assert len(tokens) == 25 and (steps < 25) == (kind is Forced), "what must follow needs no step of its own"


@pytest.mark.parametrize("ahead", [1, 5, 16])
def test_however_many_are_drawn_before_it_is_asked(model, masked, ahead: int, monkeypatch):
    """Tokens behind a refused one are taken back, whatever the model must do to go back."""
    monkeypatch.setattr(Run, "ahead", lambda run, outside=0: ahead)
    with Engine(model, threads=2, ctx=512, device="cpu") as engine:
        with closing(Scheduler(engine, model.tokenizer)) as scheduler:
            assert [collect(scheduler.submit(one)) for one in jobs(model, engine.n_vocab, Forced)] == masked
        assert not engine._sequences and engine.memory()["kv"] == 0
    monkeypatch.setattr(DraftingScheduler, "_wanted", staticmethod(lambda runs: [0] * len(runs)))  # as where drafts do not pay
    monkeypatch.setattr(Drafted, "sure", lambda seq: 16)
    with Engine(model, threads=2, ctx=512, device="cpu", draft=True) as engine:
        with closing(DraftingScheduler(engine, model.tokenizer, k=AUTO)) as scheduler:
            assert [collect(scheduler.submit(one)) for one in jobs(model, engine.n_vocab, Forced)] == masked
        assert not engine._sequences and not engine._drafted and engine.memory()["kv"] == 0


@pytest.mark.parametrize("k", [1, 5, AUTO])
def test_drafts_asked_afterwards_are_masked(model, masked, k: int):
    with Engine(model, threads=2, ctx=512, device="cpu", draft=True) as engine:
        with closing(DraftingScheduler(engine, model.tokenizer, k=k)) as scheduler:
            assert [collect(scheduler.submit(one)) for one in jobs(model, engine.n_vocab, Masked)] == masked
            assert [collect(scheduler.submit(one)) for one in jobs(model, engine.n_vocab, Forced)] == masked
            alone = jobs(model, engine.n_vocab, Asked)
            assert [collect(scheduler.submit(one)) for one in alone] == masked
            together = [scheduler.submit(one) for one in jobs(model, engine.n_vocab, Asked)]
            assert [collect(one) for one in together] == masked
            if k == 5:
                assert alone[0].stats.accepted and together[0].stats.accepted
        assert not engine._sequences and not engine._drafted and engine.memory()["kv"] == 0


def test_nothing_is_asked_of_the_device_twice_where_nothing_is_refused(model):
    """Tokens of a reply whose grammar refuses none come several a call, as free ones do."""
    with Engine(model, threads=2, ctx=512, device="cpu") as engine, closing(Scheduler(engine, model.tokenizer)) as scheduler:
        calls, step = [], engine.step_parts
        engine.step_parts = lambda *a, **k: calls.append(1) or step(*a, **k)
        ((_, tokens, reason),) = collect(scheduler.submit(jobs(model, engine.n_vocab, Asked)[0]))
        assert len(tokens) == 60 and reason == "length" and len(calls) == 1 and scheduler.counters.steps == 60
