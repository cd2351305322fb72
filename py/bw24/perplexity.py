"""Mean negative log-likelihood of a text under a model. A measurement in f64 over logits; nothing here flows back into the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import Bw24Error
from .generate import Progress

if TYPE_CHECKING:
    from .engine import Engine

ROWS = 32  # tokens of a step: logits of 32 rows of a 262144-token vocabulary are 34 MB, their f64 copies twice that each


@dataclass(frozen=True)
class Result:
    """`nll` is the mean over `tokens` predictions, in nats; `error` its standard error; `window` the tokens of one independent piece."""

    nll: float
    error: float
    tokens: int
    window: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll) if self.nll < 700 else math.inf

    def line(self) -> str:
        """The command's result."""
        return (f"perplexity {self.perplexity:.4f}, mean NLL {self.nll:.5f} +- {self.error:.5f} nats over {self.tokens} tokens "
                f"in windows of {self.window}")

    def as_dict(self) -> dict[str, Any]:
        return {"perplexity": self.perplexity, "nll": self.nll, "standard_error": self.error, "tokens": self.tokens, "window": self.window}


def token_nll(logits: np.ndarray, targets: Sequence[int]) -> np.ndarray:
    """-log softmax(logits)[target] of each row, f64 [rows]. logits f32 [rows, vocab]."""
    wide = logits.astype(np.float64)
    top = wide.max(axis=1)
    return top + np.log(np.exp(wide - top[:, None]).sum(axis=1)) - wide[np.arange(len(targets)), np.asarray(targets)]


def measure(engine: Engine, ids: Sequence[int], *, window: int, bos: int | None = None, progress: Progress | None = None) -> Result:
    """Score every token of a text but the first of each window, each window in a sequence of its own.

    window: tokens of a piece, `bos` (None: none) in front of each included. Raises Bw24Error for a text of fewer than two tokens.
    """
    head = [] if bos is None else [bos]
    step = window - len(head)
    if len(head) + len(ids) < 2 or step < 1:
        raise Bw24Error(f"perplexity needs a text of at least two tokens and a window of at least two, found {len(ids)} and {window}")
    scores: list[np.ndarray] = []
    for begin in range(0, len(ids), step):
        piece = head + list(ids[begin : begin + step])
        if len(piece) < 2:
            continue  # one token left over predicts nothing
        scores += score_piece(engine, piece)
        if progress:
            progress(min(begin + step, len(ids)), len(ids))
    values = np.concatenate(scores)
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0
    return Result(float(values.mean()), error, len(values), window)


def score_piece(engine: Engine, piece: Sequence[int]) -> list[np.ndarray]:
    """NLL of piece[1:], each given what stands before it. The last token is a target only."""
    width = min(ROWS, engine.max_rows)
    with closing(engine.sequence()) as seq:
        return [
            token_nll(engine.step([(seq, t, True) for t in piece[i : min(i + width, len(piece) - 1)]]), piece[i + 1 : i + 1 + width])
            for i in range(0, len(piece) - 1, width)
        ]
