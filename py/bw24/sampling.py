"""Sampling parameters and single draws. The draws are the library's (docs/numerics.md §9): same logits, parameters, history and position give
the same token everywhere. Knows no sequences and no text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

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

    @property
    def penalises(self) -> bool:
        """Whether the history matters."""
        return self.repetition_penalty != 1 or bool(self.presence_penalty) or bool(self.frequency_penalty)


class _Call:
    """The arguments that all draws share, as the library takes them; holds what they point to while it lives."""

    def __init__(self, params: SamplingParams, history: Sequence[int], mask: np.ndarray | None):
        ffi = abi.ffi
        p = abi.new("bw24_sampler")
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"):
            setattr(p, name, getattr(params, name))
        self._bias = ffi.new("int32_t[]", list(params.logit_bias)), ffi.new("float[]", list(params.logit_bias.values()))
        p.n_bias, p.bias_ids, p.bias_values = len(params.logit_bias), *self._bias
        uses = params.penalises
        self.sampler, self.n_history = p, len(history) if uses else 0
        self.history = ffi.new("int32_t[]", list(history)) if uses else ffi.NULL
        self.mask = _mask(mask)
        self.token = ffi.new("int32_t *")


def _mask(mask: np.ndarray | None) -> Any:
    return abi.ffi.NULL if mask is None else abi.ffi.cast("uint32_t *", abi.ffi.from_buffer(mask))


class Draw:
    """Parameters as the library takes them, made once for all the draws of a reply. looks_back: the history matters."""

    def __init__(self, params: SamplingParams):
        self._params, self.looks_back = params, params.penalises
        self._call = None if self.looks_back else _Call(params, (), None)

    def call(self, history: Sequence[int], mask: np.ndarray | None = None) -> _Call:
        """Valid until the next call."""
        call = self._call or _Call(self._params, history, None)
        call.mask = _mask(mask)
        return call


def picks(draws: Sequence[tuple[SamplingParams | Draw, Sequence[int]]]) -> tuple[Any, list[Any]]:
    """`bw24_pick[]` for (parameters, history) of several rows, and the objects that must live as long as it is used."""
    calls = [params.call(history) if isinstance(params, Draw) else _Call(params, history, None) for params, history in draws]
    out = abi.ffi.new("bw24_pick[]", len(draws))
    for pick, call in zip(out, calls, strict=True):
        pick.params, pick.history, pick.n_history = call.sampler, call.history, call.n_history
    return out, calls


def _floats(array: np.ndarray) -> Any:
    return abi.ffi.cast("float *", abi.ffi.from_buffer(array))


def _ids(ids: np.ndarray | None, rows: int) -> Any:
    """The tokens of a cut head's rows."""
    if ids is None:
        return abi.ffi.NULL
    if len(ids) != rows or ids.dtype != np.int32:
        raise Bw24Error(f"ids: expected {rows}, found {len(ids)} of type {ids.dtype}")
    return abi.ffi.cast("int32_t *", abi.ffi.from_buffer(ids))


def sample(logits: np.ndarray, params: SamplingParams | Draw, history: Sequence[int], position: int, mask: np.ndarray | None = None, *,
           ids: np.ndarray | None = None, n_vocab: int | None = None) -> int:
    """One token id from `logits` [n_vocab] f32. `history`: ids the penalties look at; `position`: where the token will stand; `mask`: packed
    u32 bits of allowed ids or None. ids: for logits [rows] of a part of a vocabulary of n_vocab, the tokens, int32 [rows]. Raises Bw24Error."""
    call = params.call(history, mask) if isinstance(params, Draw) else _Call(params, history, mask)
    logits = np.ascontiguousarray(logits, np.float32)
    shared = call.sampler, call.history, call.n_history, position
    if ids is None:
        abi.check(abi.lib().bw24_sample(_floats(logits), len(logits), *shared, call.mask, call.token, abi.ffi.NULL))
    else:
        abi.check(abi.lib().bw24_sample_ids(_floats(logits), len(logits), _ids(ids, len(logits)), n_vocab, *shared, call.token))
    return call.token[0]


def propose(logits: np.ndarray, params: SamplingParams, history: Sequence[int], position: int, mask: np.ndarray | None = None, *,
            ids: np.ndarray | None = None, n_vocab: int | None = None) -> int:
    """A draft for rejection sampling from the draft's logits [rows] f32, drawn with the reply's filters and penalties; the rest as for sample."""
    call, logits = _Call(params, history, mask), np.ascontiguousarray(logits, np.float32)
    abi.check(abi.lib().bw24_sample_draft(_floats(logits), len(logits), _ids(ids, len(logits)), len(logits) if ids is None else n_vocab, call.sampler,
                                          call.history, call.n_history, position, call.mask, call.token))
    return call.token[0]


def judge(logits: np.ndarray, draft_logits: np.ndarray, draft: int, params: SamplingParams, history: Sequence[int], position: int,
          mask: np.ndarray | None = None, *, ids: np.ndarray | None = None) -> int:
    """The token after `propose` gave `draft` from `draft_logits` [rows] (of tokens `ids`), by the target's logits [n_vocab]: the draft where it is
    accepted, else a draw from the rest. Distributed as sample's tokens are. The other arguments are those of propose. Raises Bw24Error."""
    call = _Call(params, history, mask)
    logits, draft_logits = np.ascontiguousarray(logits, np.float32), np.ascontiguousarray(draft_logits, np.float32)
    abi.check(abi.lib().bw24_sample_reject(_floats(logits), len(logits), _floats(draft_logits), len(draft_logits), _ids(ids, len(draft_logits)),
                                           call.sampler, call.history, call.n_history, position, call.mask, draft, call.token))
    return call.token[0]
