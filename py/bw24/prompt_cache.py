"""Sequences of finished requests, kept for the prompts that begin like them. Owns the choice of what to reuse and what to drop first; knows
no requests. Reuse never changes a result: a restored position holds the same bits as a computed one."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from .engine import Sequence as Timeline


class Maker(Protocol):
    """What makes new sequences: an engine, or a scheduler."""

    def sequence(self) -> Timeline: ...


CANDIDATES = 4  # kept sequences that are tried, longest common prefix first, though the model may not be able to go back that far in them
NEAREST, WIDER, MARKS = 64, 4, 6  # marks along a prompt: so many tokens before its end, and 4, 16 ... times that; at most so many
WORTH = 256  # tokens before a mark at least: each ends a step, and on a card a short step takes as long as this many rows more in a long one


def marks(length: int) -> list[int]:
    """Positions along a prompt, descending, at which a model that cannot go back keeps a copy of its state: before its end at distances that
    grow fourfold. A prompt that shares all but its last d tokens then resumes at most 4 d + NEAREST tokens before its end, or begins anew."""
    return [at for at in (length - NEAREST * WIDER**i for i in range(MARKS)) if at >= WORTH]


def shared(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading ids that two arrays share."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


class PromptCache:
    """Kept sequences, least recently used first. `rewinds`: whether the model can go back to any position, so that a sequence makes those
    that it begins with superfluous. Not thread-safe; the engine's thread owns it."""

    def __init__(self, rewinds: bool):
        self.rewinds = rewinds
        self._kept: list[tuple[np.ndarray, Timeline]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, seq: Timeline) -> None:
        """Keep a sequence; it belongs to the cache from now on. An empty one, or one whose tokens are kept already, is closed."""
        tokens = np.array(seq.tokens, np.int32)
        for at, (other, old) in enumerate(self._kept):
            common = shared(other, tokens)
            if common == len(tokens) and (self.rewinds or common == len(other)):
                self._kept.append(self._kept.pop(at))
                seq.close()
                return
            if common == len(other) and self.rewinds:
                self._kept.pop(at)
                old.close()
                break
        self._kept.append((tokens, seq))

    def take(self, engine: Maker, ids: Seq[int]) -> Timeline:
        """A new sequence (engine.sequence()'s, or a copy of a kept one) that holds as much of `ids` as can be had, at most all but the
        last id, whose logits are needed."""
        wanted = np.array(ids[: len(ids) - 1], np.int32)
        commons = [shared(tokens, wanted) for tokens, _ in self._kept]
        found = sorted(((n, n == len(self._kept[at][0]), at) for at, n in enumerate(commons) if n), reverse=True)
        best: Timeline | None = None
        tries = 0
        for common, whole, at in found:
            if best is not None and best.pos >= common:
                break
            if not whole and tries == (1 if self.rewinds else CANDIDATES):
                continue
            tries += not whole
            fork = self._kept[at][1].fork()
            got = fork.truncate(common)
            if got > (best.pos if best else 0):
                if best:
                    best.close()
                best, used = fork, at
            else:
                fork.close()
        if best is None:
            return engine.sequence()
        self._kept.append(self._kept.pop(used))
        return best

    def prefer(self, ids: Seq[int]) -> None:
        """Drop the sequence that shares most with `ids` last."""
        wanted = np.array(ids, np.int32)
        commons = [shared(tokens, wanted) for tokens, _ in self._kept]
        if any(commons):
            self._kept.append(self._kept.pop(commons.index(max(commons))))

    def drop_oldest(self) -> bool:
        """Close the least recently used sequence; False where none is kept."""
        if not self._kept:
            return False
        self._kept.pop(0)[1].close()
        return True

    def clear(self) -> None:
        while self.drop_oldest():
            pass
