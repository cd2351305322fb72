"""Plain decoding, several tokens a call of the library, of one reply or of several that share its steps. Owns how many at once: few enough that
Ctrl-C, stop strings and whoever shares the engine wait no longer than a blink, and that a recurrent state can still go back over all of them."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import abi, sampling
from .errors import Bw24Error

if TYPE_CHECKING:
    from .engine import Engine
    from .engine import Sequence as Timeline

MOST = 16  # tokens a call; a recurrent state goes back 32 rows
SLICE = 0.02  # seconds after which a call returns


class Reply:
    """One reply's part of a call, made once and filled for each: its timeline, how it draws, the ids after which it ends. drafter: the library's,
    where one follows the timeline."""

    def __init__(self, seq: Timeline, params: sampling.SamplingParams | sampling.Draw, stop: Collection[int] = (), drafter: Any = None):
        self.seq, self.params = seq, params if isinstance(params, sampling.Draw) else sampling.Draw(params)
        self._stop, self._tokens = abi.ffi.new("int32_t[]", list(stop)), abi.ffi.new("int32_t[]", MOST)
        self.c = abi.new("bw24_decode_request")
        self.c.seq, self.c.drafter, self.c.stop, self.c.n_stop = seq._handle(), drafter or abi.ffi.NULL, self._stop, len(self._stop)
        self.c.tokens, self.made = self._tokens, abi.ffi.new("int32_t *")
        self._keep: Any = None

    def fill(self, token: int, history: Sequence[int]) -> Any:
        """Set for the next call; the struct."""
        if self._keep is None or self.params.looks_back:
            pick, self._keep = sampling.picks([(self.params, history)])
            self.c.pick = pick[0]
        self.c.token = token
        return self.c

    def took(self, token: int, made: int) -> list[int]:
        """The tokens that followed `token`; all but the last are in the timeline."""
        out = abi.ffi.unpack(self._tokens, made) if made else []
        self.seq.tokens += [token, *out[:-1]] if out else []
        return out


def decode_together(engine: Engine, replies: Sequence[tuple[Reply, int, Sequence[int]]], most: int = MOST, *, seconds: float = SLICE,
                    end: Any = None, spent: list[float] | None = None, kept: np.ndarray | None = None) -> list[list[int]]:
    """Append each reply's newest token and return those that follow it, as many for each, 1..most: drawn as step_sample draws them, until one reply
    draws a stop id, the time is up or *end is not 0 (int32_t *; None: no flag); all but the last are appended too. replies: each with its token and
    history, the ids up to and with the token. spent: gets the seconds that the steps took. Raises Bw24Error; nothing has moved then, but for a step
    that was cancelled after others. kept: gets the logits that tokens were drawn from, f32 [most, replies, n_vocab]; the host draws then."""
    most = 1 if engine.after_step else max(min(most, MOST), 1)  # who listens hears of every step
    made = replies[0][0].made
    if len(replies) == 1:
        requests = replies[0][0].fill(*replies[0][1:])
    else:
        requests = abi.ffi.new("bw24_decode_request[]", len(replies))
        for i, (reply, token, history) in enumerate(replies):
            requests[i] = reply.fill(token, history)[0]
    started = time.perf_counter()
    call = engine._model, requests, len(replies), most, seconds, end or abi.ffi.NULL
    if kept is None:
        status = abi.lib().bw24_decode(*call, made)
    else:
        if kept.dtype != np.float32 or kept.shape[1:] != (len(replies), engine.n_vocab) or len(kept) < most or not kept.flags.c_contiguous:
            raise Bw24Error(f"decode: expected room for float32 {(most, len(replies), engine.n_vocab)}, found {kept.dtype} {kept.shape}")
        status = abi.lib().bw24_decode_logits(*call, abi.ffi.cast("float *", abi.ffi.from_buffer(kept)), made)
    out = [reply.took(token, made[0]) for reply, token, _ in replies]
    if spent is not None:
        spent.append(requests[0].us * 1e-6)
    abi.check(status)
    if engine.after_step:
        engine.after_step(len(replies), time.perf_counter() - started)
    return out


def decode_kept(engine: Engine, reply: Reply, history: Sequence[int], most: int, end: Any, rows: Any) -> list[int]:
    """As decode_together for one reply with `kept`, by the shortest way: a grammar may ask for a call each token or two. history ends with the newest
    token; end: int32_t *; rows: float *, room for the logits of `most` tokens, at most MOST."""
    status = abi.lib().bw24_decode_logits(engine._model, reply.fill(history[-1], history), 1, most, SLICE, end, rows, reply.made)
    out = reply.took(history[-1], reply.made[0])
    if status < 0:
        abi.check(status)
    return out


def decode(engine: Engine, seq: Timeline, token: int, params: sampling.SamplingParams | sampling.Draw, history: Sequence[int], most: int = MOST, *,
           stop: Collection[int] = (), drafter: Any = None, seconds: float = SLICE) -> list[int]:
    """As decode_together, for one reply."""
    return decode_together(engine, [(Reply(seq, params, stop, drafter), token, history)], most, seconds=seconds)[0]
