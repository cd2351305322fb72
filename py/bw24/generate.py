"""The loops: a prompt in pieces, then one token after the other until something ends the reply.

Owns chunks, stop conditions, streaming and timings. Knows nothing of files, templates, terminals or the library behind the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import plain, sampling
from .errors import Bw24Error
from .tokenizer import StopFilter

if TYPE_CHECKING:
    from .engine import Engine
    from .engine import Sequence as Timeline
    from .tokenizer import Tokenizer

Progress = Callable[[int, int], None]  # (tokens done, tokens in all)

now = time.perf_counter

EOS, STOP, LENGTH, CONTEXT, INTERRUPTED = "eos", "stop", "length", "context", "interrupted"


def check_fits(n_prompt: int, ctx: int) -> None:
    """Refuse a prompt that leaves no room for one token. Bw24Error gives both numbers."""
    if n_prompt == 0:
        raise Bw24Error("the prompt has no tokens; the model needs at least one")
    if n_prompt >= ctx:
        raise Bw24Error(f"the prompt has {n_prompt} tokens, the context holds {ctx}; shorten it, or raise --ctx if the model allows")


def chunks(n: int, width: int, keep: int) -> list[tuple[int, int]]:
    """[begin, end) of each step over n prompt tokens, at most `width` wide; the last one holds the last min(keep, n) tokens."""
    bounds = list(range(0, n, width)) + [n]
    if len(bounds) > 2 and bounds[-1] - bounds[-2] < keep:
        bounds[-2] = max(n - keep, bounds[-3] + 1)
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def prefill(engine: Engine, seq: Timeline, ids: Sequence[int], keep: int = 1, progress: Progress | None = None) -> np.ndarray:
    """Append a prompt to `seq`. Returns the logits of its last min(keep, n) tokens, f32 [rows, vocab]; keep <= engine.max_rows."""
    n, logits = len(ids), None
    for begin, end in chunks(n, engine.max_rows, keep):
        logits = engine.step([(seq, token, begin + i >= n - keep) for i, token in enumerate(ids[begin:end])])
        if progress:
            progress(end, n)
    if logits is None:
        raise Bw24Error("the prompt has no tokens; the model needs at least one")
    return logits


@dataclass
class Stats:
    """Tokens and seconds of one reply. Cached prompt tokens were in the sequence already; `steps` are those after the first token."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_seconds: float = 0.0
    generated_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens a second, those from the cache left out; 0 where nothing was computed."""
        return (self.prompt_tokens - self.cached_tokens) / self.prompt_seconds if self.prompt_seconds > 0 else 0.0

    @property
    def rate(self) -> float:
        """Generated tokens a second, sampling included; 0 where no step ran."""
        return self.steps / self.step_seconds if self.step_seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The figures under the names of the JSON report."""
        return {
            "prompt_tokens": self.prompt_tokens, "cached_tokens": self.cached_tokens, "prompt_seconds": round(self.prompt_seconds, 6),
            "prompt_tokens_per_second": round(self.prompt_rate, 2), "generated_tokens": self.generated_tokens,
            "generation_seconds": round(self.step_seconds, 6), "generation_tokens_per_second": round(self.rate, 2),
        }


class Generation:
    """One reply: iterate over it for pieces of text, each of whole characters and never part of a stop string.

    seq stands after the prompt, whose last row's logits [vocab] are given; a timeline that looks ahead draws the later tokens itself, by
    the same params. `history`: ids so far, for the penalties. The reply ends at
    one of stop_ids (eos), before a string of `stops` (stop), after `limit` tokens (length; None: no limit) or where the context is
    full (context); `reason` says which. `ids` are the tokens of the reply, the stop id left out.
    """

    def __init__(self, seq: Timeline, tokenizer: Tokenizer | None, history: Sequence[int], logits: np.ndarray,
                 params: sampling.SamplingParams, *, ctx: int, limit: int | None = None, stop_ids: Collection[int] = (),
                 stops: Sequence[str] = (), stats: Stats | None = None):
        self.seq, self.params, self.ctx, self.limit = seq, params, ctx, limit
        self.history, self.ids = list(history), []
        self.reason, self.stats = "", stats or Stats()
        self._logits, self._stop_ids, self._draw = logits, frozenset(stop_ids), sampling.Draw(params)
        self._next: list[int] = []  # tokens of a round that are not given yet
        self._at = seq.pos  # where the next token will stand
        self._stream = tokenizer.stream(skip_special=True) if tokenizer else None
        self._filter = StopFilter(list(stops))

    def __iter__(self) -> Iterator[str]:
        if self.limit == 0:
            self.reason = LENGTH
        while not self.reason:
            started = now()
            token = self._next.pop(0) if self._next else sampling.sample(self._logits, self.params, self.history, self._at)
            if token in self._stop_ids:
                self.reason = EOS
                break
            self.ids.append(token)
            self.history.append(token)
            self.stats.generated_tokens += 1
            text, found = self._text(token)
            if found:
                self.reason = STOP
            elif self.limit is not None and len(self.ids) >= self.limit:
                self.reason = LENGTH
            elif self._at >= self.ctx:
                self.reason = CONTEXT
            self._at += 1
            if text:
                spent = now() - started
                yield text  # the reader's time is not the engine's
                started = now() - spent
            if not self.reason:
                self._step(token)
                self.stats.steps += 1
                self.stats.step_seconds += now() - started
        rest = self.rest()
        if rest:
            yield rest

    def _step(self, token: int) -> None:
        """The token after `token`, or the logits that it is drawn from; several tokens where the timeline looks ahead."""
        if self._next:
            return
        if hasattr(self.seq, "round"):
            self._next = self.seq.round(token, self.history)
        elif hasattr(self.seq, "draws"):  # a timeline that draws itself: its logits need not come here
            left = min(self.ctx - self._at + 1, self.limit - len(self.ids) if self.limit is not None else plain.MOST)
            self._next = self.seq.draws(token, self._draw, self.history, left, self._stop_ids)
        else:
            self._logits = self.seq.decode(token)

    def _text(self, token: int) -> tuple[str, bool]:
        return self._filter.push(self._stream.push(token)) if self._stream else ("", False)

    def rest(self) -> str:
        """Text still held back; call it after an interruption. Nothing after a stop string."""
        if not self._stream or self.reason == STOP:
            return ""
        text, found = self._filter.push(self._stream.flush())
        if found:
            self.reason = STOP
            return text
        return text + self._filter.flush()


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading ids that two sequences share."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)
