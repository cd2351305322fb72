"""An engine without a model: logits are a function of the tokens so far, so every path to the same tokens must give the same rows.

Faults that the gates must see are switched on by name: `decode` changes steps of one row, `width` those of more than 16 rows, `batch` those
of several sequences, `truncate` keeps a token too many, `seed` makes rows depend on how often the engine was called.
"""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import numpy as np

VOCAB = 40


class FakeSequence:
    def __init__(self, engine: FakeEngine, tokens: list[int] | None = None):
        self.engine, self.tokens = engine, list(tokens or [])
        self.closed = False

    @property
    def pos(self) -> int:
        return len(self.tokens)

    def decode(self, token: int) -> np.ndarray:
        return self.engine.step([(self, token, True)])[0]

    def fork(self) -> FakeSequence:
        return FakeSequence(self.engine, self.tokens)

    def truncate(self, pos: int) -> int:
        del self.tokens[pos + (self.engine.fault == "truncate") :]
        return pos

    def close(self) -> None:
        self.closed = True


class FakeEngine:
    prefill_class = "exact"

    def __init__(self, fault: str = "", ctx: int = 400, max_rows: int = 64, script: list[int] | None = None):
        self.fault, self.ctx, self.max_rows, self.n_vocab = fault, ctx, max_rows, VOCAB
        self.script = script  # token wanted after each position: its logit is the largest
        self.calls: list[int] = []
        self.experts = 1
        self.model = SimpleNamespace(mtp=None, params=SimpleNamespace(int=lambda key, default: self.experts if key == "expert_count" else default))
        self.noise = 0.0  # of the logits of several rows, as class fast has it

    def sequence(self) -> FakeSequence:
        return FakeSequence(self)

    def step(self, rows) -> np.ndarray:
        self.calls.append(len(rows))
        assert 1 <= len(rows) <= self.max_rows
        out = []
        for seq, token, want in rows:
            seq.tokens.append(token)
            if want:
                out.append(self.row(seq.tokens))
        logits = np.array(out, np.float32).reshape(len(out), VOCAB)
        if self.noise and len(rows) > 1:
            logits += np.random.default_rng(1).normal(0, self.noise, logits.shape).astype(np.float32)
        several = len({id(seq) for seq, _, _ in rows}) > 1
        wrong = {"decode": len(rows) == 1, "width": len(rows) > 16, "batch": several, "seed": True}.get(self.fault, False)
        if wrong and len(out):
            step = len(self.calls) if self.fault == "seed" else 1
            logits[-1, 3] = np.nextafter(logits[-1, 3], np.float32(step * 1e9), dtype=np.float32)
        return logits

    def row(self, tokens: list[int]) -> np.ndarray:
        seed = int.from_bytes(hashlib.sha256(np.array(tokens, np.int32).tobytes()).digest()[:8], "little")
        logits = np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)
        if self.script and len(tokens) <= len(self.script):
            logits[self.script[len(tokens) - 1]] = 50.0
        return logits

    def close(self) -> None:
        pass

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
