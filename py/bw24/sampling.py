"""Sampling parameters and one draw. The draw itself is the library's (docs/numerics.md §9): same logits, parameters, history and position give the
same token everywhere. Knows no sequences and no text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from . import abi
from .errors import Bw24Error


@dataclass(frozen=True)
class SamplingParams:
    """temperature 0 is argmax; top_k 0, top_p 1, min_p 0 and penalties 1 / 0 / 0 are off. `logit_bias`: token id -> value added to its logit."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        bounds = {"temperature": (0, 100), "top_k": (0, 1 << 30), "top_p": (0, 1), "min_p": (0, 1), "repetition_penalty": (0.01, 100),
                  "presence_penalty": (-100, 100), "frequency_penalty": (-100, 100), "seed": (0, (1 << 64) - 1)}
        for f in fields(self):
            if f.name not in bounds:
                continue
            value, (low, high) = getattr(self, f.name), bounds[f.name]
            if not low <= value <= high:  # NaN fails too
                raise Bw24Error(f"{f.name}: expected {low}..{high}, found {value}")


def sample(logits: np.ndarray, params: SamplingParams, history: Sequence[int], position: int, mask: np.ndarray | None = None) -> int:
    """One token id from `logits` [n_vocab] f32. `history`: ids the penalties look at; `position`: where the token will stand; `mask`: packed
    u32 bits of allowed ids or None. Raises Bw24Error."""
    ffi = abi.ffi
    logits = np.ascontiguousarray(logits, np.float32)
    p = abi.new("bw24_sampler")
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"):
        setattr(p, name, getattr(params, name))
    ids, values = ffi.new("int32_t[]", list(params.logit_bias)), ffi.new("float[]", list(params.logit_bias.values()))
    p.n_bias, p.bias_ids, p.bias_values = len(params.logit_bias), ids, values
    uses = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    past = ffi.new("int32_t[]", list(history)) if uses else ffi.NULL
    token = ffi.new("int32_t *")
    bits = ffi.cast("uint32_t *", ffi.from_buffer(mask)) if mask is not None else ffi.NULL
    abi.check(abi.lib().bw24_sample(ffi.cast("float *", ffi.from_buffer(logits)), len(logits), p, past, len(history) if uses else 0, position,
                                    bits, token, ffi.NULL))
    return token[0]
