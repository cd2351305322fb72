"""One side of scripts/perf_ci.py: loads models with the bw24 that PYTHONPATH names, times one cell a request. A line of JSON in, one out. The first
line in names the device and the engines: {"backend", "threads", "engines": [[model, kv], ...]}.

Kept to calls that do not change from revision to revision: open_model, Engine, sequence, prefill, decode, step_greedy, truncate."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from typing import Any

from bw24 import abi
from bw24.engine import Engine, Sequence
from bw24.source import open_model

STEPS = 12  # steps of a request of kind step: enough to leave capture and clock ramp behind


def ids(n: int) -> list[int]:
    return [16 + i % 200 for i in range(n)]


def at_depth(engine: Engine, cell: dict[str, Any], deep: dict[int, Sequence]) -> Sequence:
    """The sequence of that depth, filled once; `deep` belongs to the engine."""
    depth = cell["depth"]
    if depth not in deep:
        deep[depth] = engine.sequence()
        deep[depth].prefill(ids(depth), want="none")
    return deep[depth]


def steps(engine: Engine, cell: dict[str, Any], deep: dict[int, Sequence]) -> float:
    """Seconds of a step of `tokens` rows."""
    seq, rows = at_depth(engine, cell, deep), ids(cell["tokens"])
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        engine.step_greedy([(seq, token, True) for token in rows])
        seconds.append(time.perf_counter() - began)
        seq.truncate(cell["depth"])
    return sorted(seconds)[STEPS // 2]


def timed(engine: Engine, cell: dict[str, Any], deep: dict[int, Sequence]) -> float:
    """Seconds of one cell."""
    if cell["kind"] == "step":
        return steps(engine, cell, deep)
    tokens = ids(cell["tokens"])
    with engine.sequence() as seq:
        if cell["depth"]:
            seq.prefill(ids(cell["depth"]), want="none")
        began = time.perf_counter()
        if cell["kind"] == "prefill":
            seq.prefill(tokens, want="last")
        else:
            for token in tokens:
                seq.decode(token)
        return time.perf_counter() - began


def main() -> int:
    asked = json.loads(sys.stdin.readline())
    with ExitStack() as stack:
        models = {path: stack.enter_context(open_model(path)) for path in dict.fromkeys(path for path, _, _ in asked["engines"])}
        engines: dict[tuple[str, str], tuple[Engine, dict[int, Sequence]]] = {}
        for path, kv, context in asked["engines"]:
            room = min(models[path].context_length, context)
            engine = stack.enter_context(Engine(models[path], backend=asked["backend"], threads=asked["threads"], ctx=room, kv=kv))
            engines[path, kv] = engine, {}
        print(json.dumps({"revision": abi.version(), "device": next(iter(engines.values()))[0].device}), flush=True)
        for line in sys.stdin:
            cell = json.loads(line)
            print(json.dumps({"seconds": timed(engines[cell["model"], cell["kv"]][0], cell, engines[cell["model"], cell["kv"]][1])}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
