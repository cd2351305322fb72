#!/usr/bin/env python3
"""What rounds cost at several depths and acceptances on one loaded model, plain and drafted replies in turn. Appends JSON lines; judges nothing.

A cell is K:P or auto:P: K drafts a round, each accepted with probability P whatever it is (synthetic: the work is real, the tokens mean nothing);
K alone takes acceptance as it comes. A gate runs first: the drafted text of every K of the cells against plain decoding, greedy and seeded, and the
rows of judging steps of 2 to 9 rows after the prompt against decoding them."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "py"))

from bw24 import abi, bench_spec, records, sampling  # noqa: E402
from bw24.drafter import embedded, open_draft  # noqa: E402
from bw24.engine import Engine  # noqa: E402
from bw24.gate import compare, run_rows  # noqa: E402
from bw24.source import open_model  # noqa: E402
from bw24.speculate import AUTO, Drafted  # noqa: E402

GATE_TOKENS = 24
JUDGED = 9  # rows of the widest judging step that is compared with decoding


def cell_of(text: str) -> tuple[int, float | None]:
    k, _, p = text.partition(":")
    return AUTO if k == "auto" else int(k), float(p) if p else None


def tokens_of(base: Drafted, first: int, drafts: bool, n: int) -> list[int]:
    """The first n tokens of a reply on a copy of a timeline that stands after the prompt, with its drafts or plain."""
    with contextlib.closing(base.fork() if drafts else base.seq.fork()) as seq:
        past = [*base.tokens, first]
        while len(past) < len(base.tokens) + n:
            past += seq.round(past[-1], past) if drafts else [seq.draw(past[-1], base.params, past)]
    return past[len(base.tokens) :][:n]


def judged(base: Drafted, ids: list[int]) -> str | None:
    """The rows of judging steps after the prompt have the bits of decoding them one by one, or what differs."""
    with contextlib.closing(base.seq.fork()) as fork:
        rows = run_rows(base.engine, ids, 1, fork)
    for width in range(2, len(ids) + 1):
        with contextlib.closing(base.seq.fork()) as fork:
            if problem := compare(rows[:width], run_rows(base.engine, ids[:width], width, fork)):
                return f"{width} rows judged at {len(base.tokens)}: {problem}"
    return None


def gate(engine: Engine, prompt: list[int], depths: set[int]) -> list[str]:
    """What differs from plain decoding, a line each."""
    wrong = []
    for k in sorted(depths):
        for params in (sampling.SamplingParams(), sampling.SamplingParams(temperature=0.7, seed=7)):
            with contextlib.closing(Drafted(engine, k, params, len(prompt) + GATE_TOKENS + 32)) as base:
                first = sampling.sample(base.prefill(prompt)[-1], params, prompt, len(prompt))
                if tokens_of(base, first, True, GATE_TOKENS) != tokens_of(base, first, False, GATE_TOKENS):
                    wrong.append(f"K={k}, temperature {params.temperature}")
                if not params.temperature and (problem := judged(base, prompt[:JUDGED])):
                    wrong.append(problem)
    return wrong


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("model")
    p.add_argument("--draft", help="drafter in a file of its own")
    p.add_argument("--device", "--backend", default="cuda", help="cuda, cuda:N or cpu")
    p.add_argument("--kv")
    p.add_argument("--cells", default="3:0.8", help="K:P,K:P,auto:P")
    p.add_argument("--prompt", type=int, default=512, help="tokens before the replies")
    p.add_argument("--tokens", type=int, default=256, help="tokens of a reply")
    p.add_argument("--pairs", type=int, default=3)
    p.add_argument("--prefill", choices=("exact", "fast"), default="exact", help="numeric class of the prompt's steps")
    p.add_argument("-o", "--output", type=Path, help="file to append the lines to")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    cells = [cell_of(c) for c in args.cells.split(",")]
    began = time.perf_counter()
    with open_model(args.model) as model:
        draft = open_draft(args.draft, model) if args.draft else embedded(model)
        context = min(model.context_length, args.prompt + args.tokens + 64)
        with Engine(model, device=args.device, kv=args.kv, ctx=context, draft=draft, prefill=args.prefill) as engine:
            loaded = time.perf_counter() - began
            prompt = [16 + i * 7 % 200 for i in range(args.prompt)]
            wrong = gate(engine, prompt, {k for k, _ in cells})
            for line in wrong:
                print(f"MISMATCH {Path(args.model).name}: {line}")
            for k, p in [] if wrong else cells:
                found = bench_spec.run(engine, prompt, tokens=args.tokens, k=k, accept=p, pairs=args.pairs)
                row = {"schema": 1, "kind": "rounds", "revision": abi.ffi.string(abi.lib().bw24_version()).decode(), "device": engine.device,
                       "model": Path(args.model).name, "kv": engine.kv, "load_seconds": round(loaded, 2), **found.as_json()}
                print(f"{row['model']} K={row['k']} p={p}: plain {row['plain_tokens_per_second']:.1f}, drafted {row['tokens_per_second']:.1f} tok/s, "
                      f"{row['gain']:.2f}x, {row['tokens_per_round']:.2f} a round, ms {row['round_milliseconds']}", flush=True)
                if args.output:
                    records.append(args.output, row)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
