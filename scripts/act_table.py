#!/usr/bin/env python3
"""What int8 activations cost: KL divergence of every next-token distribution, and rms of the logits, from those with float activations
(backend ref, float_activations), both with an f32 cache. One JSON line a model; judges nothing. Bits are the same on every backend;
BW24_LIBRARY measures another library, --scales says in the line what that one does."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "py"))

from bw24 import abi  # noqa: E402
from bw24.engine import Engine  # noqa: E402
from bw24.source import open_model  # noqa: E402
from kv_table import add_text, log_softmax, put, text_facts, text_ids  # noqa: E402


def cost(exact: Engine, rounded: Engine, ids: list[int], window: int, bos: int | None) -> dict[str, float]:
    """NLL and KL a token, KL's standard error, share of equal likeliest tokens, rms of the logits, over independent pieces of `window` tokens."""
    nll, base_nll, kl, square, same = [], [], [], [], []
    for at in range(0, len(ids) - 1, window):
        piece = ([] if bos is None else [bos]) + ids[at : at + window]
        rows = []
        for engine in (exact, rounded):
            with engine.sequence() as seq:
                rows.append(seq.prefill(piece, "all")[:-1])
        base, p = log_softmax(rows[0]), log_softmax(rows[1])
        kl.append((np.exp(base) * (base - p)).sum(axis=1))
        nll.append(-p[np.arange(len(p)), piece[1:]])
        base_nll.append(-base[np.arange(len(p)), piece[1:]])
        square.append(((rows[1].astype(np.float64) - rows[0]) ** 2).mean(axis=1))
        same.append(rows[0].argmax(1) == rows[1].argmax(1))
    k = np.concatenate(kl)
    return {"nll": float(np.concatenate(nll).mean()), "nll_float": float(np.concatenate(base_nll).mean()), "kl": float(k.mean()),
            "kl_error": float(k.std() / len(k) ** 0.5), "rms": float(np.concatenate(square).mean() ** 0.5),
            "same_top": float(np.concatenate(same).mean())}


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("models", nargs="+")
    add_text(p, tokens=512)
    p.add_argument("--scales", default="four significant bits")
    args = p.parse_args(argv)
    text = Path(args.text).read_text(encoding="utf-8")
    for path in args.models:
        settings = {"kv": "f32", "ctx": args.window + 8}
        with (open_model(path) as model, Engine(model, backend="ref", float_activations=True, **settings) as exact,
              Engine(model, backend="cpu", **settings) as rounded):
            ids, bos = text_ids(model, text, args.tokens)
            found = cost(exact, rounded, ids, args.window, bos)
            line = {"what": "activations", "file": Path(path).name, "scales": args.scales, **text_facts(args, text, ids),
                    **{k: round(v, 6) for k, v in found.items()}, "against": "float activations (backend ref, float_activations), f32 cache",
                    "weights": "real weights", "revision": abi.version()}
            put(line, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
