"""From a prompt to the parts of its replies: the job, its pieces taken apart, the client's leaving, the figures. Owns what OpenAI's and Anthropic's
endpoints share; knows the wire form of neither."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import Bw24Error
from ..generate import CONTEXT, INTERRUPTED, LENGTH
from ..grammar import Wish
from ..jobs import Busy, Job, Matcher, Piece
from ..sampling import SamplingParams
from ..toolcalls import CALL, PLAIN, REASONING, Format, Part, ReplyParser, Schemas, merge
from .errors import ApiError, bad

if TYPE_CHECKING:
    from .service import Service

TICK = 0.1  # seconds between looks at whether the client is still there
PACE = 0.02  # seconds between the events of a stream at least: tokens that come faster share one; nobody sees a fiftieth of a second
SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
DEFAULTS = {"temperature": 1.0}  # OpenAI's; the other defaults are SamplingParams'


class ClientGone(Exception):
    """Nobody reads the reply any more."""


@dataclass
class Plan:
    """What is asked of the model. limit: tokens of each reply, None for the context's rest. wish: what the reply must look like.
    budget: most tokens of the thinking block."""

    ids: list[int]
    params: list[SamplingParams]
    known: Format = PLAIN
    thinking: bool = False
    limit: int | None = None
    stops: Sequence[str] = ()
    top: int | None = None
    wish: Wish = field(default_factory=Wish)
    budget: int | None = None
    tools: Schemas | None = None
    parallel: bool = True
    reuse: bool = True
    ignore_eos: bool = False
    param: str = "messages"


@dataclass
class Delta:
    """What came of pieces that arrived together: parts of a choice's reply; `reason` on its last: stop, length or tool_calls."""

    choice: int
    parts: list[Part]
    pieces: list[Piece]
    reason: str = ""


def sampling_params(body: Mapping[str, Any], n_vocab: int, n: int = 1) -> list[SamplingParams]:
    """Parameters of each of n choices. Raises ApiError."""
    values = {name: body.get(name, DEFAULTS.get(name)) for name in SAMPLED}
    bias = {int(k): v for k, v in body.get("logit_bias", {}).items()}
    for token in bias:
        if token >= n_vocab:
            raise bad("logit_bias", f"token {token} is outside 0..{n_vocab - 1}")
    seed = body["seed"] % (1 << 64) if "seed" in body else secrets.randbits(64)
    given = {k: v for k, v in values.items() if v is not None}
    if 0 < given["temperature"] < 1e-6:
        given["temperature"] = 1e-6  # the draw's arithmetic is f32; no lower one is told from this
    return [SamplingParams(**given, logit_bias=bias, seed=(seed + i) % (1 << 64)) for i in range(n)]


class ThinkBudget:
    """Ends the thinking block after `limit` tokens by forcing its closing mark (scheduler.Matcher). Wraps another matcher or none."""

    def __init__(self, tokenizer: Any, known: Format, thinking: bool, limit: int, inner: Matcher | None, words: int):
        self._stream, self._close, self._left, self._inner, self._words = tokenizer.stream(), known.think[1], limit, inner, words
        self._opening, self._thinking, self._tail = known.think[0], thinking, ""
        self._forced = tokenizer.encode(self._close, add_special=False, parse_special=True)
        self._queue: list[int] = []

    def mask(self) -> np.ndarray | None:
        if not self._queue:
            return self._inner.mask() if self._inner else None
        bits = np.zeros(self._words, np.uint32)
        bits[self._queue[0] >> 5] = np.uint32(1) << np.uint32(self._queue[0] & 31)
        return bits

    def accept(self, token: int) -> bool:
        self._tail = (self._tail + self._stream.push(token))[-200:]
        if self._queue:
            self._queue.pop(0)
        if self._thinking:
            self._left -= 1
            if self._close in self._tail:
                self._thinking, self._left, self._queue = False, 0, []
            elif self._left == 0:
                self._queue = list(self._forced)
        elif self._left and self._opening in self._tail:
            self._thinking, self._tail = True, ""
        return self._inner.accept(token) if self._inner else False


def matcher_maker(service: Service, plan: Plan) -> Callable[[], Matcher] | None:
    """Makes each reply's matcher; None where nothing needs one. Raises ApiError where a schema or grammar is wrong."""
    compiled = None
    if not plan.wish.free:
        grammars = service.generic_grammars if plan.known.name == "generic" else service.grammars
        try:
            compiled = grammars.compile(plan.wish)
        except Bw24Error as error:
            param = "tools" if plan.wish.body is None else "response_format"
            raise bad(param, str(error), "invalid_schema") from None
    words = -(-service.engine.n_vocab // 32)
    if plan.budget is not None and plan.known.think:
        tokenizer, known = service.model.tokenizer, plan.known
        return lambda: ThinkBudget(tokenizer, known, plan.thinking, plan.budget, compiled.matcher() if compiled else None, words)
    return compiled.matcher if compiled else None


def left(environ: Mapping[str, Any]) -> Callable[[], bool]:
    """A function that says whether the client has closed its connection."""
    connection = environ.get("gunicorn.socket")
    if connection is None:
        return lambda: False

    def gone() -> bool:
        try:
            return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except (BlockingIOError, InterruptedError, ValueError):
            return False
        except OSError:
            return True

    return gone


class Exchange:
    """One job and its replies. Iterate over `deltas()`; leaving the iteration early cancels the job. owner: whose API key asks, "" without."""

    def __init__(self, service: Service, plan: Plan, gone: Callable[[], bool], owner: str = ""):
        self._service, self.plan, self._gone = service, plan, gone
        self.reasoning_tokens = 0
        engine = service.engine
        if len(plan.ids) >= engine.ctx:
            raise ApiError(400, f"{plan.param}: the prompt has {len(plan.ids)} tokens, the context holds {engine.ctx}; shorten it",
                           param=plan.param, kind="context_length_exceeded")
        stop_ids = frozenset() if plan.ignore_eos else service.prompter.stop_ids
        visible = service.prompter.visible if plan.known is not PLAIN else frozenset()
        self.job = Job(plan.ids, plan.params, limit=plan.limit, stop_ids=stop_ids, stops=plan.stops, visible=visible, top=plan.top,
                       grammar=matcher_maker(service, plan), reuse=plan.reuse, owner=owner)
        try:
            service.scheduler.submit(self.job)
        except Busy as error:
            raise ApiError(503 if error.closing else 429, str(error), kind="overloaded", retry_after=1) from None
        except Bw24Error as error:
            raise bad(plan.param, str(error)) from None

    @property
    def stats(self) -> Any:
        return self.job.stats

    def cancel(self) -> None:
        self._service.scheduler.cancel(self.job)

    def deltas(self, pace: float = PACE) -> Iterator[Delta | None]:
        """The pieces taken apart, those of a choice that arrive within `pace` seconds as one; None where the settings' `ping` seconds brought
        nothing. Raises ClientGone, ApiError."""
        plan = self.plan
        parsers = [ReplyParser(plan.known, plan.tools, plan.thinking) for _ in plan.params]
        calls, done = [0] * len(parsers), set()
        quiet = looked = time.monotonic()
        try:
            for batch in self.job.batches(TICK, pace):
                now = time.monotonic()
                if not batch or now - looked > TICK:
                    looked = now
                    if self._gone():
                        raise ClientGone
                if not batch:
                    if now - quiet >= self._service.settings.ping:
                        quiet = now
                        yield None
                    continue
                quiet = now
                for choice in dict.fromkeys(piece.choice for piece in batch):
                    if choice in done:
                        continue
                    yield (delta := self._delta(parsers[choice], [p for p in batch if p.choice == choice], calls))
                    if delta.reason:
                        done.add(choice)
                if len(done) == len(parsers):
                    break
        except Bw24Error as error:
            raise error if isinstance(error, ApiError) else ApiError(_status(error), str(error)) from None
        finally:
            self.cancel()
            self._service.metrics.observe(self.job.stats)

    def _delta(self, parser: ReplyParser, pieces: list[Piece], calls: list[int]) -> Delta:
        """Of pieces of one choice."""
        parts, reason, choice = [], "", pieces[0].choice
        for used, piece in enumerate(pieces, 1):
            if piece.reason == INTERRUPTED:
                raise ApiError(503, "the request was cancelled", kind="cancelled")
            self.reasoning_tokens += parser.mode == REASONING and piece.token is not None
            for part in parser.push(piece.text) + (parser.finish() if piece.reason else []):
                parts.append(part)
                calls[choice] += part.kind == CALL
                if part.kind == CALL and not self.plan.parallel:
                    return Delta(choice, merge(parts), pieces[:used], "tool_calls")
            if piece.reason:
                reason = "length" if piece.reason in (LENGTH, CONTEXT) else "tool_calls" if calls[choice] else "stop"
        return Delta(choice, merge(parts), pieces, reason)

    def usage(self) -> dict[str, int]:
        """Tokens of the prompt (cached ones apart) and of all choices."""
        s = self.job.stats
        return {"prompt": s.prompt_tokens, "cached": s.cached_tokens, "completion": s.generated_tokens, "reasoning": self.reasoning_tokens}

    def timings(self) -> dict[str, float]:
        """Milliseconds and rates, under llama-server's names."""
        s, end = self.job.stats, self.job.stats.finished or time.monotonic()
        prompt, predicted = max(s.first_token - s.started, 0.0), max(end - s.first_token, 0.0) if s.first_token else 0.0
        steps, computed = max(s.generated_tokens - 1, 0), s.prompt_tokens - s.cached_tokens
        rate = lambda n, seconds: round(n / seconds, 2) if seconds > 0 else 0.0  # noqa: E731
        return {
            "cache_n": s.cached_tokens, "prompt_n": computed, "prompt_ms": round(prompt * 1e3, 3), "prompt_per_second": rate(computed, prompt),
            "predicted_n": s.generated_tokens, "predicted_ms": round(predicted * 1e3, 3), "predicted_per_second": rate(steps, predicted),
            "queue_ms": round(max(s.started - s.submitted, 0.0) * 1e3, 3),
            **({"draft_n": s.drafted, "draft_n_accepted": s.accepted} if s.drafted else {}),
        }


def _status(error: Bw24Error) -> int:
    return 503 if "shutting down" in str(error) else 400 if "grammar" in str(error) else 500
