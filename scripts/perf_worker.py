"""One side of scripts/perf_ci.py: loads models with the bw24 that PYTHONPATH names, times one cell a request. A line of JSON in, one out.

Kept to calls that do not change from revision to revision: open_model, Engine, sequence, prefill, decode."""

from __future__ import annotations

import json
import sys
import time

from bw24 import abi
from bw24.engine import Engine
from bw24.source import open_model


def main() -> int:
    backend, threads, paths = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    models = {path: open_model(path) for path in paths}
    engines = {path: Engine(model, backend=backend, threads=threads, ctx=min(model.context_length, 2048)) for path, model in models.items()}
    print(json.dumps({"revision": abi.version(), "device": next(iter(engines.values())).device}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        engine, n = engines[asked["model"]], asked["tokens"]
        ids = [16 + i % 200 for i in range(n)]
        with engine.sequence() as seq:
            began = time.perf_counter()
            if asked["kind"] == "prefill":
                seq.prefill(ids, want="last")
            else:
                for token in ids:
                    seq.decode(token)
            print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
