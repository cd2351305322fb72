"""Acceptance of drafts: by sampling mode (race, reject), temperature, KV format and drafter, over a file of prompts.

    python scripts/spec_accept.py MODEL PROMPTS.json [-T 0.7] [-k 3] [-n 192] [--modes race,reject] [--kv f16,q8_0] [--draft FILE]

PROMPTS.json: a list of {"class": ..., "ids": [...]}. Prints one JSON object a combination. Counts are exact integers: they repeat on any machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "py"))

from bw24 import abi, records  # noqa: E402
from bw24.drafter import open_draft  # noqa: E402
from bw24.engine import Engine  # noqa: E402
from bw24.generate import Generation  # noqa: E402
from bw24.sampling import SamplingParams  # noqa: E402
from bw24.source import open_model  # noqa: E402
from bw24.speculate import MAX_K, Drafted, Rounds  # noqa: E402


def measure(engine: Engine, prompts: list[dict[str, Any]], params: SamplingParams, k: int, n: int, mode: str) -> tuple[int, Rounds]:
    """(tokens of all replies, sums of what drafting did)."""
    total, tokens = Rounds(), 0
    for prompt in prompts:
        ids, ends = prompt["ids"], engine.model.tokenizer.eog_ids
        with closing(Drafted(engine, k, params, len(ids) + n, stop=ends, sampling_mode=mode)) as seq:
            logits = seq.prefill(ids)
            made = Generation(seq, None, ids, logits[-1], params, ctx=engine.ctx, limit=n, stop_ids=ends)
            for _ in made:
                pass
            tokens += len(made.ids)
            total.add(seq.stats)
    return tokens, total


def row(args: argparse.Namespace, tokens: int, found: Rounds, mode: str, kv: str, prompts: int) -> dict[str, Any]:
    at = range(MAX_K)
    depth = max((i + 1 for i in at if found.reached[i]), default=0)
    return {"kind": "acceptance", "revision": abi.version(), "weights": args.weights, "model": Path(args.model).name,
            "file_sha256": hashlib.sha256(Path(args.model).read_bytes()).hexdigest(),
            "draft": Path(args.draft).name if args.draft else "own MTP block", "mode": mode,
            "temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "seed": args.seed, "kv": kv, "k": args.k, "prompts": prompts,
            "tokens": tokens, "rounds": found.rounds, "drafted": found.drafted, "accepted": sum(found.accepted),
            "acceptance": round(sum(found.accepted) / found.drafted, 4), "tokens_per_round": round(found.tokens_per_round, 3),
            "acceptance_by_position": [round(found.accepted[i] / found.reached[i], 4) for i in range(depth)],
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("--draft")
    parser.add_argument("--temperature", "-T", type=float, default=0.7)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-k", type=int, default=3)
    parser.add_argument("-n", type=int, default=192)
    parser.add_argument("-t", type=int, default=2)
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--modes", default="race,reject")
    parser.add_argument("--kv", default="f16")
    parser.add_argument("--weights", default="random weights", help='what they are, for the record: "real weights" or how they were made')
    parser.add_argument("-o", "--output", type=Path, help="file to append the lines to")
    args = parser.parse_args()
    prompts = json.loads(Path(args.prompts).read_text(encoding="utf-8"))
    params = SamplingParams(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    with open_model(args.model) as model:
        for kv in args.kv.split(","):
            draft = open_draft(args.draft, model) if args.draft else True
            with Engine(model, threads=args.t, ctx=args.ctx, kv=kv, draft=draft) as engine:
                for mode in args.modes.split(","):
                    tokens, found = measure(engine, prompts, params, args.k, args.n, mode)
                    line = row(args, tokens, found, mode, kv, len(prompts))
                    print(json.dumps(line), flush=True)
                    if args.output:
                        records.append(args.output, line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
