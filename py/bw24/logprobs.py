"""Log probabilities of a step's tokens, in the library's arithmetic, so that they too are the same on every machine. Knows no text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import abi


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of probabilities under the model's own distribution: temperature 1, before bias, penalties, filters and masks.

    `token`: the chosen token's. `top`: the likeliest (id, value), falling, ties by ascending id.
    """

    token: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs(logits: np.ndarray, token: int, n: int) -> Logprobs:
    """Of `token` and of the n likeliest. logits: [vocab] f32, finite. Raises Bw24Error."""
    ffi = abi.ffi
    logits = np.ascontiguousarray(logits, np.float32)
    greedy = abi.new("bw24_sampler")
    greedy.top_p, greedy.repetition_penalty = 1.0, 1.0
    best, value, data = ffi.new("int32_t *"), ffi.new("float *"), ffi.cast("float *", ffi.from_buffer(logits))
    abi.check(abi.lib().bw24_sample(data, len(logits), greedy, ffi.NULL, 0, 0, ffi.NULL, best, value))
    peak, norm = np.float32(logits[best[0]]), np.float32(value[0])  # ln p of the likeliest token is -ln of the normalising sum

    def of(i: int) -> float:
        return float((logits[i] - peak) + norm)

    n = min(n, len(logits))
    if not n:
        return Logprobs(of(token))
    least = np.partition(logits, len(logits) - n)[len(logits) - n]
    ids = np.flatnonzero(logits >= least)  # all that tie for the last place, so that the lowest ids are taken
    ids = ids[np.lexsort((ids, -logits[ids]))][:n]
    return Logprobs(of(token), tuple((int(i), of(i)) for i in ids))
