"""Plain decoding, several tokens a call of the library. Owns how many at once: few enough that Ctrl-C, stop strings and whoever shares the engine
wait no longer than a blink, and that a recurrent state can still go back over all of them."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from . import abi, sampling

if TYPE_CHECKING:
    from .engine import Engine
    from .engine import Sequence as Timeline

MOST = 16  # tokens a call; a recurrent state goes back 32 rows
SLICE = 0.01  # seconds after which a call returns


def decode(engine: Engine, seq: Timeline, token: int, params: sampling.SamplingParams | sampling.Draw, history: Sequence[int], most: int = MOST, *,
           stop: Collection[int] = (), drafter: Any = None, seconds: float = SLICE) -> list[int]:
    """Append `token` to seq and return those that follow it, 1..most: drawn as step_sample draws them, until one of `stop` or the time is up; all
    but the last are appended too. history: ids up to and with `token`, for the penalties. drafter: the library's, where one follows seq.
    Raises Bw24Error; nothing has moved then, but for a step that was cancelled after others."""
    most = 1 if engine.after_step else max(min(most, MOST), 1)  # who listens hears of every step
    ffi = abi.ffi
    pick, keep = sampling.picks([(params, history)])
    ends, tokens, made = ffi.new("int32_t[]", list(stop)), ffi.new("int32_t[]", most), ffi.new("int32_t *")
    started = time.perf_counter()
    status = abi.lib().bw24_decode(seq._handle(), drafter or ffi.NULL, token, pick, ends, len(ends), most, seconds, tokens, made)
    out = ffi.unpack(tokens, made[0])
    del keep
    seq.tokens += [token, *out[:-1]] if out else []
    abi.check(status)
    if engine.after_step:
        engine.after_step(1, time.perf_counter() - started)
    return out
