"""A model's own replies to a pack of prompts, as a file that an interrupted run continues. Owns the journal and which replies belong to the corpus;
knows nothing of ranks.

Reply i answers prompt i mod n with seed + i. A reply depends on the model, its prompt and its seed alone, never on which others shared its
steps, so the corpus has the same bytes whether it was made in one go or in many. It is the shortest run of replies 0, 1, ... that holds the
tokens asked for. The journal beside it has a line for each finished reply, in the order they finished.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import chat
from ..errors import Bw24Error
from ..gguf_writer import atomic_file
from ..jobs import Job
from ..sampling import SamplingParams
from ..scheduler import MAX_RUNS, Scheduler
from .prompts import Prompt

if TYPE_CHECKING:
    from ..engine import Engine
    from ..source import Model

FORM = 1  # of the journal and the corpus
MAX_REPLIES = 1 << 20
AHEAD = 2 * MAX_RUNS  # replies in the queue: those that decode, and as many that wait for a free row
POLL = 0.02  # seconds between looks at who has finished

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Reply:
    """One reply: the ids it has, and why it ended (eos, length, context)."""

    index: int
    kind: str
    reason: str
    ids: tuple[int, ...]

    def line(self) -> str:
        """Its line of the corpus."""
        return json.dumps({"index": self.index, "kind": self.kind, "reason": self.reason, "ids": list(self.ids)}, separators=(",", ":")) + "\n"


@dataclass(frozen=True)
class Plan:
    """What to generate: `tokens` in all, replies of at most `limit` tokens, drawn with `params` and seeds from params.seed up."""

    prompts: tuple[tuple[str, tuple[int, ...]], ...]  # kind, ids
    params: SamplingParams
    tokens: int
    limit: int
    model: str  # content hash of its file

    @property
    def replies(self) -> int:
        """How many different ones there are: at temperature 0 a prompt has one."""
        return len(self.prompts) if self.params.temperature == 0 else MAX_REPLIES

    def job(self, index: int, stop_ids: Sequence[int]) -> Job:
        kind, ids = self.prompts[index % len(self.prompts)]
        params = SamplingParams(**{**asdict(self.params), "seed": (self.params.seed + index) % (1 << 64)})
        return Job(ids, [params], limit=self.limit, stop_ids=stop_ids, reuse=False)

    def head(self) -> dict[str, Any]:
        """What must be equal for a journal to be continued. The number of tokens may differ: more of the same replies."""
        digest = hashlib.sha256(json.dumps(self.prompts, separators=(",", ":")).encode()).hexdigest()
        return {"bw24_draft_corpus": FORM, "model": self.model, "prompts": digest, "limit": self.limit, "sampling": asdict(self.params)}


def encode(model: Model, prompts: Sequence[Prompt], room: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(kind, ids) of each prompt, through the model's chat template where it has one. Prompts of more than `room` tokens, and those that the
    template refuses (tools, system messages), are left out; Bw24Error where none is left."""
    out, refused = [], ""
    for prompt in prompts:
        try:
            ids = _ids(model, prompt)
        except Bw24Error as error:
            refused = refused or str(error)
            continue
        if 1 <= len(ids) <= room:
            out.append((prompt.kind, tuple(ids)))
        else:
            refused = refused or f"a prompt has {len(ids)} tokens, the context leaves room for {room}"
    if not out:
        raise Bw24Error(f"none of {len(prompts)} prompts can be used: {refused}")
    return tuple(out)


def _ids(model: Model, prompt: Prompt) -> list[int]:
    if model.chat_template is None:
        return model.tokenizer.encode("\n\n".join(str(m["content"]) for m in prompt.messages if m["content"]))
    tools = {"tools": list(prompt.tools)} if prompt.tools else {}
    return chat.apply(model.tokenizer, model.chat_template, prompt.messages, **tools)


# ---- the journal


class Journal:
    """The finished replies on disk: a head that names the run, then one line a reply. A last line that was cut off is dropped."""

    def __init__(self, path: Path, head: dict[str, Any], vocabulary: int):
        self.path, self.done = path, {}
        good = self._read(head, vocabulary) if path.exists() else 0
        try:
            self._file = open(path, "r+b" if good else "wb")  # closed by close()
            self._file.truncate(good)
            self._file.seek(good)
            if not good:
                self._write(json.dumps(head) + "\n")
        except OSError as error:
            raise Bw24Error(f"{path}: cannot write: {error.strerror}") from None

    def _read(self, head: dict[str, Any], vocabulary: int) -> int:
        """Take in the replies that are there; returns the bytes to keep."""
        try:
            raw = self.path.read_bytes()
        except OSError as error:
            raise Bw24Error(f"{self.path}: cannot read: {error.strerror}") from None
        lines = raw.split(b"\n")[:-1]
        if not lines:
            return 0
        foreign = Bw24Error(f"{self.path}: not a journal of replies; remove it, or name another with --work")
        try:
            found = json.loads(lines[0])
            if not isinstance(found, dict) or "bw24_draft_corpus" not in found:
                raise foreign
            if found != head:
                other = ", ".join(k for k in head if found.get(k) != head[k])
                raise Bw24Error(f"{self.path}: belongs to another run ({other} differ); remove it, or name another with --work")
            replies = [json.loads(line) for line in lines[1:]]
            self.done = {r["index"]: Reply(r["index"], r["kind"], r["reason"], tuple(r["ids"])) for r in replies}
            bad = any(not all(isinstance(i, int) and 0 <= i < vocabulary for i in r.ids) for r in self.done.values())
        except (ValueError, KeyError, TypeError, RecursionError):
            bad = True
        if bad:
            raise foreign
        return sum(len(line) + 1 for line in lines)

    def add(self, reply: Reply) -> None:
        if reply.index not in self.done:
            self.done[reply.index] = reply
            self._write(reply.line())

    def _write(self, line: str) -> None:
        self._file.write(line.encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


# ---- generating


def _enough(done: dict[int, Reply], goal: int) -> tuple[int, int]:
    """(replies 0, 1, ... without a gap up to the goal, their tokens)."""
    n = tokens = 0
    while tokens < goal and n in done:
        tokens += len(done[n].ids)
        n += 1
    return n, tokens


def _collect(scheduler: Scheduler, plan: Plan, journal: Journal, open_jobs: dict[int, Job]) -> None:
    """Take the jobs that have ended into the journal."""
    for index in [i for i, job in open_jobs.items() if job.stats.finished]:
        pieces = list(open_jobs.pop(index).pieces())
        ids = tuple(p.token for p in pieces if p.token is not None)
        journal.add(Reply(index, plan.prompts[index % len(plan.prompts)][0], pieces[-1].reason, ids))


def _submit(scheduler: Scheduler, plan: Plan, journal: Journal, open_jobs: dict[int, Job], stop_ids: Sequence[int]) -> None:
    """Queue further replies, as many as the goal is likely to need: what they will hold is guessed from those that have ended."""
    done = journal.done
    mean = sum(len(r.ids) for r in done.values()) / len(done) if done else plan.limit
    n, tokens = _enough(done, plan.tokens)
    index = n
    while tokens < plan.tokens and index < plan.replies and len(open_jobs) < AHEAD:
        if index not in done and index not in open_jobs:
            open_jobs[index] = scheduler.submit(plan.job(index, stop_ids))
        tokens += len(done[index].ids) if index in done else max(mean, 1)
        index += 1


def generate(engine: Engine, plan: Plan, journal: Journal, progress: Progress | None = None) -> list[Reply]:
    """The replies of the corpus, in order. What finishes before an interruption is in the journal. Raises Bw24Error."""
    tokenizer = engine.model.tokenizer
    stop_ids = tuple(tokenizer.eog_ids)
    open_jobs: dict[int, Job] = {}
    with closing(Scheduler(engine, None, cache_ram=0)) as scheduler:
        try:
            while True:
                _collect(scheduler, plan, journal, open_jobs)
                n, tokens = _enough(journal.done, plan.tokens)
                if progress:
                    progress(min(tokens, plan.tokens), plan.tokens)
                if tokens >= plan.tokens or n == plan.replies:
                    return [journal.done[i] for i in range(n)]
                if not tokens and n >= 4 * len(plan.prompts):
                    raise Bw24Error(f"the model ended all of its first {n} replies at once: nothing to count")
                _submit(scheduler, plan, journal, open_jobs, stop_ids)
                time.sleep(POLL)
        except KeyboardInterrupt:
            _collect(scheduler, plan, journal, open_jobs)
            raise


# ---- the file


def lines(replies: Sequence[Reply]) -> Iterator[bytes]:
    """The corpus as a file."""
    for reply in replies:
        yield reply.line().encode()


def digest(replies: Sequence[Reply]) -> str:
    """SHA-256 of the corpus file."""
    out = hashlib.sha256()
    for line in lines(replies):
        out.update(line)
    return out.hexdigest()


def write(path: Path, replies: Sequence[Reply]) -> None:
    with atomic_file(path) as file:
        for line in lines(replies):
            file.write(line)
