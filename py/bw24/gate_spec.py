"""The gate's arms for speculative decoding: replies with every depth against plain decoding's, judged rows against decoded ones, and the counts of
rounds against recorded ones. Knows engines and timelines; knows no text and no file but the recorded counts."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from . import sampling
from .gate_counts import RECORDED
from .generate import Generation, common_prefix
from .speculate import AUTO, Drafted

if TYPE_CHECKING:
    from pathlib import Path

    from .engine import Engine

SAMPLERS = {
    "greedy": sampling.SamplingParams(),
    "seeded at temperature 0.7": sampling.SamplingParams(temperature=0.7, seed=7),
}
DEPTHS = (*range(1, 9), AUTO)
TOKENS, FULL_TOKENS = 32, 512  # of a reply
CHAINED = 8  # rows before the drafts that are compared with the reference's
WIDEST = 9  # rows of a judging step: 8 drafts and the token before them
HASHED = 64 << 20  # larger files have no recorded counts
Arm = Callable[[], tuple[str | None, str]]


def counts_of(path: Path, tokens: int) -> dict[str, dict[int, list[int]]]:
    """What was recorded for a model file and replies of so many tokens: sampler -> depth -> [rounds, drafted, accepted]; empty for other files."""
    if not path.is_file() or path.stat().st_size > HASHED:
        return {}
    return RECORDED.get((hashlib.sha256(path.read_bytes()).hexdigest()[:16], tokens), {})


def case_of(sampler: str, kind: str = "") -> str:
    """The name under which counts are recorded: of a sampler, and of the class of a prompt where it is not the gate's own."""
    return f"{sampler}, {kind}" if kind else sampler


def chain_of(engine: Engine, ids: Sequence[int]) -> list[np.ndarray]:
    """Logits and handed row of each draft of a chain of three after `ids`; the tokens are fixed, so that equal bits do not hang on a choice."""
    borrows = bool(engine.draft.builder.borrowed)
    with engine.sequence() as seq, engine.sequence(engine.draft.role, over=seq if borrows else None) as draft:
        row = engine.step_hidden([(seq, t, True) for t in ids], logits=False)[1]
        out: list[np.ndarray] = []
        if not borrows:  # token m beside hidden row m - 1
            before = np.concatenate([np.zeros_like(row[:1]), row[:-1]])
            engine.step_hidden([(draft, t, True) for t in ids], before, logits=False)
        row = row[-1:]
        for token in ids[:3]:
            logits, row = engine.step_hidden([(draft, token, True)], row)
            out += [logits[0], row[0]]
    return out


class Speculation:
    """The arms of one model. `factory(draft=True)` makes an engine with the drafter; `ids` is the prompt; classes: further prompts by the kind of
    their text, whose replies are compared too."""

    def __init__(self, factory: Callable[..., Engine], ids: Sequence[int], full: bool = False, classes: Mapping[str, Sequence[int]] | None = None):
        self.factory, self.ids, self.tokens, self.full = factory, list(ids), FULL_TOKENS if full else TOKENS, full
        self.classes = dict(classes or {})
        self._engine: Engine | None = None
        self._plain: dict[str, list[int]] = {}
        self._counts: dict[str, dict[int, list[int]]] | None = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            self._engine = self.factory(draft=True)
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def arms(self) -> Iterator[tuple[str, Arm]]:
        """As gate.Equalities.arms."""
        for sampler in SAMPLERS:
            for k in DEPTHS:
                name = "auto" if k == AUTO else f"K={k}"
                yield f"drafted {name} = plain, {sampler}", lambda k=k, sampler=sampler: self.drafted(k, sampler)
        for kind in self.classes:
            for k in DEPTHS:
                name = "auto" if k == AUTO else f"K={k}"
                yield f"drafted {name} = plain, {kind}", lambda k=k, kind=kind: self.drafted_class(k, kind)
        yield "drafter's rows = ref", self.drafter
        for depth in (len(self.ids), 512, *((4200,) if self.full else ())):
            yield f"rows judged at {depth} = decoded", lambda depth=depth: self.judged(depth)

    def prompt(self, kind: str) -> list[int]:
        """Of a class, cut where it would leave no half of the context for the reply; of none: the gate's own."""
        ids = self.classes[kind] if kind else self.ids
        return list(ids if len(ids) <= self.engine.ctx // 2 or not kind else ids[: self.engine.ctx // 2])

    def reply(self, k: int, sampler: str, kind: str = "") -> tuple[list[int], list[int]]:
        """Tokens, and [rounds, drafted, accepted]; k 0: plain decoding; kind: whose prompt, '' for the gate's own."""
        engine, params, ids = self.engine, SAMPLERS[sampler], self.prompt(kind)
        limit = min(self.tokens, engine.ctx - len(ids))
        with contextlib.closing(Drafted(engine, k, params, len(ids) + limit) if k else engine.sequence()) as seq:
            logits = seq.prefill(ids)[-1] if k else seq.prefill(ids)
            made = Generation(seq, None, ids, logits, params, ctx=engine.ctx, limit=limit)
            for _ in made:
                pass
            return made.ids, [seq.stats.rounds, seq.stats.drafted, sum(seq.stats.accepted)] if k else []

    def drafted(self, k: int, sampler: str, kind: str = "") -> tuple[str | None, str]:
        """A reply with k drafts a round is plain decoding's, and its rounds are those recorded for this file."""
        case = case_of(sampler, kind)
        if case not in self._plain:
            self._plain[case] = self.reply(0, sampler, kind)[0]
        plain = self._plain[case]
        found, counts = self.reply(k, sampler, kind)
        if found != plain:
            return f"{common_prefix(found, plain)} of {len(plain)} tokens agree", ""
        line = "{} rounds, {} drafted, {} accepted".format(*counts)
        said = self.recorded().get(case, {}).get(k)
        if said and said != counts:
            return "{}; recorded are {}, {}, {}".format(line, *said), ""
        return None, f"{len(plain)} tokens, {line}{', as recorded' if said else ''}"

    def drafted_class(self, k: int, kind: str) -> tuple[str | None, str]:
        """As drafted, with every sampler in turn."""
        notes = []
        for sampler in SAMPLERS:
            problem, note = self.drafted(k, sampler, kind)
            if problem:
                return f"{sampler}: {problem}", ""
            notes.append(f"{sampler.split(' ')[0]} {note}")
        return None, "; ".join(notes)

    def recorded(self) -> dict[str, dict[int, list[int]]]:
        """The counts that hold here: those of the file, where its own block drafts."""
        if self._counts is None:
            own = self.engine.draft is not None and self.engine.draft.file is None
            self._counts = counts_of(self.engine.model.path, self.tokens) if own else {}
        return self._counts

    def drafter(self) -> tuple[str | None, str]:
        """Logits and handed rows of a chain of drafts have the bits of the plain C reference's, over the model's rows and keys."""
        with self.factory(draft=True, backend="ref", isa=None) as engine:
            expected = chain_of(engine, self.ids[:CHAINED])
        found = chain_of(self.engine, self.ids[:CHAINED])
        for i, (a, b) in enumerate(zip(expected, found, strict=True)):
            if a.tobytes() != b.tobytes():
                return f"{'logits' if i % 2 == 0 else 'handed row'} of draft {i // 2 + 1} differ", ""
        return None, f"{len(found) // 2} drafts after {CHAINED} rows, bit-equal"

    def judged(self, depth: int) -> tuple[str | None, str]:
        """The rows of judging steps of 2 to 9 rows after `depth` tokens have the bits of decoding them one by one."""
        from .gate import compare, run_rows

        engine = self.engine
        depth = min(depth, engine.ctx - WIDEST)
        ids = (self.ids * ((depth + WIDEST) // len(self.ids) + 1))[: depth + WIDEST]
        with contextlib.closing(Drafted(engine, min(8, engine.max_rows - 1), sampling.SamplingParams())) as seq:
            seq.prefill(ids[:depth], 0)
            with contextlib.closing(seq.seq.fork()) as fork:
                rows = run_rows(engine, ids[depth:], 1, fork)
            for width in range(2, min(WIDEST, engine.max_rows) + 1):
                with contextlib.closing(seq.seq.fork()) as fork:
                    problem = compare(rows[:width], run_rows(engine, ids[depth : depth + width], width, fork))
                if problem:
                    return f"{width} rows at {depth}: {problem}", ""
        end = " (the context's end)" if depth == engine.ctx - WIDEST else ""
        return None, f"steps of 2..{WIDEST} rows after {depth} tokens{end}, bit-equal"
