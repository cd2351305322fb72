"""What a request is to the scheduler: the job, its replies in the making, and the pieces that its reader takes. Owns the queue between the engine's
thread and the reader's, and what a grammar must be able to say. Knows no engine and no steps."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from . import plain, sampling
from .errors import Bw24Error
from .logprobs import Logprobs

if TYPE_CHECKING:
    import numpy as np

    from .engine import Sequence as Timeline
    from .tokenizer import Tokenizer

DOUBTS = 3  # masks made at once after a largest logit that the grammar did not allow
TRUST, MOST_TRUST = 8, 256  # tokens that a grammar must let pass, after one that it refused, before some are drawn without it: at first, at most


class Busy(Bw24Error):
    """The queue is full, or the scheduler is going away (`closing`)."""

    def __init__(self, message: str, closing: bool = False):
        super().__init__(message)
        self.closing = closing


class Matcher(Protocol):
    """A grammar's state along one reply."""

    def mask(self) -> np.ndarray | None:
        """Packed u32 bits of the ids allowed next; None where all are."""

    def accept(self, token: int) -> bool:
        """Move on by a token; True where the reply is complete and nothing can follow."""

    # optional: allows(token) -> bool, the mask's bit of one id, with try_accept(token) -> bool | None, as accept, None where it is not allowed;
    # forced() -> list[int], whose first is all that the mask allows, if there is one


@dataclass
class Piece:
    """What one token added to a reply. `reason` is set on the last piece of a choice, which may have no token."""

    choice: int
    text: str = ""
    token: int | None = None
    logprobs: Logprobs | None = None
    reason: str = ""
    stop: str | None = None


@dataclass
class JobStats:
    """Tokens, and moments of the monotonic clock (0: not yet)."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    submitted: float = 0.0
    started: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    preempted: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(eq=False)
class Job:
    """One request: a prompt and a reply for each of `params`. Read `pieces()` until it ends; `cancel` may be called at any moment.

    limit: most tokens of each reply, None for no limit. stop_ids end a reply and are not part of it; `stops` are strings. visible: ids of
    special tokens whose text belongs to the reply. top: None for no log probabilities, else how many alternatives. grammar: makes a
    reply's matcher. reuse: whether kept sequences serve this prompt and this one is kept. owner: whose
    learned drafts serve it (an API key's digest).
    """

    ids: Sequence[int]
    params: Sequence[sampling.SamplingParams]
    limit: int | None = None
    stop_ids: Collection[int] = ()
    stops: Sequence[str] = ()
    visible: Collection[int] = ()
    top: int | None = None
    grammar: Callable[[], Matcher] | None = None
    reuse: bool = True
    owner: str = ""
    stats: JobStats = field(default_factory=JobStats)
    cancelled: bool = False
    _events: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    _over: threading.Event = field(default_factory=threading.Event)  # no event follows
    _speller: Tokenizer | None = None  # whose text the reader makes of the tokens; None: the scheduler does, which looks for stop strings
    _streams: dict[int, Any] = field(default_factory=dict)
    _open: int = 0

    def pieces(self, wait: float | None = None) -> Iterator[Piece | None]:
        """The pieces of all choices as they are made; None where `wait` seconds brought none. Raises Bw24Error where the job failed."""
        for batch in self.batches(wait):
            yield from batch or [None]

    def batches(self, wait: float | None = None, pace: float = 0.0) -> Iterator[list[Piece]]:
        """As `pieces`, all that are there at once; an empty list for None. pace: seconds that the reader rests after each batch, the job's end
        apart. A reader woken for each of some hundred tokens a second takes the time from the step that makes the next one."""
        left = len(self.params)
        while left:
            batch: list[Piece] = []
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=wait)
                while not isinstance(event, Exception):
                    batch += event
                    left -= bool(event[-1].reason)
                    event = self._events.get_nowait()
                if batch:
                    yield self._spelled(batch)
                raise event
            yield self._spelled(batch)
            if left and batch and pace:
                self._over.wait(pace)

    def _spelled(self, batch: list[Piece]) -> list[Piece]:
        """The pieces with their text, made here: the reader's time, not that of the step after."""
        for piece in batch if self._speller else ():
            stream = self._streams.get(piece.choice) or self._streams.setdefault(piece.choice, self._speller.stream())
            if piece.token is not None and (piece.token in self.visible or not self._speller.is_special(piece.token)):
                piece.text = stream.push(piece.token)
            if piece.reason:
                piece.text += stream.flush()
        return batch

    def put(self, event: list[Piece] | Exception, over: bool = False) -> None:
        """For the scheduler: pieces, a reply's last alone or at the end, or the error that ends the job."""
        self._events.put(event)
        if over:
            self._over.set()


@dataclass(eq=False)
class Run:
    """One reply in the making. `tokens`: the prompt's and its own; the sequence holds the first `seq.pos` of them."""

    job: Job
    choice: int
    tokens: list[int]
    order: int
    seq: Timeline | None = None
    generated: int = 0
    matcher: Matcher | None = None
    stream: Any = None
    filter: Any = None
    draw: sampling.Draw | None = None
    leader: Run | None = None  # the run whose prompt pass it waits for
    marks: list[int] = field(default_factory=list)  # positions ahead at which a copy is kept, the nearest last
    doubts: int = 0  # tokens for which the grammar's mask is made at once
    passed: int = 0  # largest logits in a row that the grammar allowed
    refusals: int = 0  # of the whole reply
    trust: int = 0  # how many of them it takes for the next to be drawn without it
    spare: Timeline | None = None  # its sequence as it was before the call of several steps that is in hand, where they cannot be undone
    reply: plain.Reply | None = None  # its part of calls that decode several tokens, while it has the same sequence

    @property
    def pending(self) -> int:
        """Tokens that the sequence lacks."""
        return len(self.tokens) - len(self.seq.tokens) if self.seq else len(self.tokens)

    def guesses(self) -> bool:
        """Whether its next tokens may be drawn without the grammar, which is asked afterwards: a largest logit that it allows is the largest of
        those that it allows."""
        return self.matcher is None or (self.greedy and hasattr(self.matcher, "allows") and not self.doubts and self.passed >= self.trust)

    def judges(self) -> bool:
        """Whether tokens that were drawn without the grammar can be held against it, given the logits that they were drawn from."""
        params = self.job.params[self.choice]
        whole = not (params.top_k or params.top_p < 1 or params.min_p or params.logit_bias or params.penalises)
        return self.matcher is None or (hasattr(self.matcher, "allows") and (self.greedy or whole))

    def agrees(self, token: int, row: np.ndarray) -> bool:
        """Whether a token that was drawn without the grammar, which allows it, is the masked draw too. The largest logit is. A race without filters
        goes by ratios to the largest logit: its winner is the masked one's where both are allowed. row: the logits."""
        return self.greedy or (top := int(row.argmax())) == token or self.matcher.allows(top)

    def forced(self) -> int | None:
        """The next token where the grammar allows no other and nothing is to be said about it."""
        ask = getattr(self.matcher, "forced", None)
        tokens = ask() if ask and self.job.top is None else ()
        return tokens[0] if tokens else None

    @property
    def greedy(self) -> bool:
        return self.job.params[self.choice].temperature == 0

    def ahead(self, outside: float = 0.1) -> int:
        """Tokens to draw at once before the grammar is asked, so that steps lost behind a refused token cost what calls do. outside: a call's own
        cost, in steps."""
        between = self.passed + self.generated / (self.refusals + 1)  # refusals, so far and over the whole reply
        return max(int((2 * outside * between) ** 0.5 if self.refusals else self.passed / 2), 1)

    def keep(self, spare: Timeline | None) -> None:
        """Have this spare sequence, and no other."""
        if self.spare:
            self.spare.close()
        self.spare = spare

    def refused(self) -> None:
        """The grammar did not allow a largest logit."""
        self.doubts, self.trust = DOUBTS, TRUST if self.passed > MOST_TRUST else min(2 * self.trust + TRUST, MOST_TRUST)
        self.passed = 0
        self.refusals += 1
