#!/usr/bin/env python3
"""What KV formats cost: NLL of a text, and KL divergence of every next-token distribution from that with an f32 cache. One JSON line a model
and format; judges nothing. Backend cpu; formats have the same bits on every backend."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "py"))

from bw24 import abi, records  # noqa: E402
from bw24.engine import Engine, kv_bytes_per_token  # noqa: E402
from bw24.source import open_model  # noqa: E402

FORMATS = ("f32", "f16", "q8_0", "e4m3", "q8_0/q5_1", "q8_0/e4m3", "e4m3/q8_0", "q5_1", "full=e4m3,window=q8_0/q5_1", "full=q8_0/q5_1,window=e4m3")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Rows of log probabilities, f64."""
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def score(engines: dict[str, Engine], ids: list[int], window: int, bos: int | None) -> dict[str, dict[str, float]]:
    """NLL a token, KL a token and its standard error by format, over independent pieces of `window` tokens."""
    nll: dict[str, list[np.ndarray]] = {f: [] for f in engines}
    kl: dict[str, list[np.ndarray]] = {f: [] for f in engines}
    for at in range(0, len(ids) - 1, window):
        piece = ([] if bos is None else [bos]) + ids[at : at + window]
        base = None
        for name, engine in engines.items():
            with engine.sequence() as seq:
                p = log_softmax(seq.prefill(piece, "all")[:-1])
            base = p if base is None else base
            nll[name].append(-p[np.arange(len(p)), piece[1:]])
            kl[name].append((np.exp(base) * (base - p)).sum(axis=1))
    out = {}
    for name in engines:
        k = np.concatenate(kl[name])
        out[name] = {"nll": float(np.concatenate(nll[name]).mean()), "kl": float(k.mean()), "kl_error": float(k.std() / len(k) ** 0.5)}
    return out


def add_text(p: argparse.ArgumentParser, tokens: int) -> None:
    """Options of what is read and where lines go; `tokens`: how many by default."""
    p.add_argument("--text", default=str(Path(__file__).resolve().parent.parent / "docs" / "design.md"))
    p.add_argument("--tokens", type=int, default=tokens)
    p.add_argument("--window", type=int, default=512)
    p.add_argument("-o", "--output", type=Path, help="file to append the lines to")


def text_ids(model: Any, text: str, tokens: int) -> tuple[list[int], int | None]:
    """The first tokens of a text, and what a piece of them begins with."""
    t = model.tokenizer
    return t.encode(text, add_special=False)[:tokens], t.bos_id if t.adds_bos else None


def text_facts(args: argparse.Namespace, text: str, ids: list[int]) -> dict[str, Any]:
    """What a line says of the text."""
    return {"text": Path(args.text).name, "text_sha256": hashlib.sha256(text.encode()).hexdigest()[:16], "tokens": len(ids), "window": args.window}


def put(line: dict[str, Any], output: Path | None) -> None:
    """Print a line, and append it to a file where one is named."""
    print(json.dumps(line), flush=True)
    if output:
        records.append(output, line)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("models", nargs="+")
    add_text(p, tokens=1536)
    args = p.parse_args(argv)
    text = Path(args.text).read_text(encoding="utf-8")
    for path in args.models:
        with open_model(path) as model, contextlib.ExitStack() as stack:
            windows = any(w for _, _, w in model.builder.kvs.values())
            formats = [f for f in FORMATS if windows or "=" not in f]
            engines = {f: stack.enter_context(Engine(model, backend="cpu", kv=f, ctx=args.window + 8)) for f in formats}
            ids, bos = text_ids(model, text, args.tokens)
            found = score(engines, ids, args.window, bos)
            for name in formats:
                line = {"revision": abi.version(), "model": Path(path).name, **text_facts(args, text, ids), "kv": name,
                        "bytes_per_token": sum(kv_bytes_per_token(model, engines[name].kv).values()),
                        **{k: round(v, 6) for k, v in found[name].items()}}
                put(line, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
