"""The MTP block: golden logits and draft chains, bits equal on every backend, rows in any cut, lists that share a model, and what is refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from bw24 import abi
from bw24.engine import Engine
from bw24.errors import Bw24Error
from bw24.source import open_model
from conftest import FIXTURES

NAME = "qwen35moe"
FULL = ("qwen35-r2", "qwen35-r3", "qwen35moe", "hy_v3", "qwen35-mix-q4km", "qwen35-mix-nvfp4", "qwen35-mix-low", "qwen35moe-mix-q4",
        "qwen35moe-mix-low", "hy_v3-mix-q4")
ISAS = [i for i in ("portable", "avx2", "avxvnni", "avx512vnni") if abi.lib().bw24_isa_supported(i.encode())]
TOLERANCE = 1e-3  # the golden set's own for engines in f32


@cache
def opened():
    return open_model(FIXTURES / "tiny" / f"{NAME}.gguf")


@cache
def golden() -> dict[str, np.ndarray]:
    with np.load(FIXTURES / "tiny" / f"{NAME}.npz") as z:
        return dict(z)


def engine(**settings) -> Engine:
    return Engine(opened(), **{"threads": 2, "max_rows": 256, "draft": True, **settings})


def before(hidden: np.ndarray) -> np.ndarray:
    """The MTP block's inputs for a whole prompt: the hidden row of the token before, zeros for the first."""
    return np.concatenate([np.zeros((1, hidden.shape[1]), np.float32), hidden[:-1]])


def mtp_rows(e: Engine, tokens: list[int], first: int | None = None, width: int = 256) -> tuple[np.ndarray, ...]:
    """Hidden rows of the trunk; MTP logits and hidden rows of the prompt; tokens and logits of three chained drafts from token `first` on."""
    with e.sequence() as seq, e.sequence("mtp") as mtp:
        parts = [range(i, min(i + width, len(tokens))) for i in range(0, len(tokens), width)]
        found = [e.step_hidden([(seq, tokens[i], True) for i in part]) for part in parts]
        first = int(found[-1][0][-1].argmax()) if first is None else first
        hidden = np.concatenate([h for _, h in found])
        inputs = before(hidden)
        drafts = [e.step_hidden([(mtp, tokens[i], True) for i in part], inputs[part.start : part.stop]) for part in parts]
        token, row, chain = first, hidden[-1:], []
        for _ in range(3):
            logits, row = e.step_hidden([(mtp, token, True)], row)
            chain.append((token, logits[0]))
            token = int(logits[0].argmax())
    logits, own = (np.concatenate(x) for x in zip(*drafts, strict=True))
    return hidden, logits, own, np.array([t for t, _ in chain]), np.stack([x for _, x in chain])


def same(a: tuple[np.ndarray, ...], b: tuple[np.ndarray, ...]) -> bool:
    return all(x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


@cache
def tokens() -> list[int]:
    return golden()["tokens_b"].tolist()


@cache
def reference() -> tuple[np.ndarray, ...]:
    with engine(backend="ref") as e:
        return mtp_rows(e, tokens())


# ---- golden numbers


def test_golden():
    g = golden()
    with engine(backend="ref", float_activations=True, kv="f32") as e:
        _, logits, _, chain, chained = mtp_rows(e, tokens())
    assert np.abs(logits[g["rows_b"]] - g["mtp_logits_b"]).max() < TOLERANCE
    assert chain.tolist() == g["mtp_chain_tokens_b"].tolist() and np.abs(chained - g["mtp_chain_logits_b"]).max() < TOLERANCE


@pytest.mark.parametrize("name", FULL)
def test_golden_full(goldens: Path, name: str):
    path = goldens / "tiny" / f"{name}.gguf"
    with np.load(path.with_suffix(".npz")) as z:
        g, prompt, first = dict(z), z["tokens_a"].tolist(), int(z["logits_a"][-1].argmax())
    names = ("h_a", "mtp_logits_a", "mtp_h_a", "mtp_chain_tokens_a", "mtp_chain_logits_a")
    with open_model(path) as model:
        with Engine(model, backend="ref", float_activations=True, kv="f32", draft=True) as e:
            for key, found in zip(names, mtp_rows(e, prompt, first), strict=True):
                assert np.abs(found - g[key]).max() < TOLERANCE, key
        with Engine(model, backend="ref", draft=True) as e:
            expected = mtp_rows(e, prompt, first)
        for isa in ISAS:
            with Engine(model, isa=isa, threads=2, draft=True) as e:
                assert same(mtp_rows(e, prompt, first), expected), isa


# ---- the same bits


@pytest.mark.parametrize("settings", [*({"isa": i} for i in ISAS), {"threads": 1}, {"threads": 3}, {"fuse": False}, {"repack": False}], ids=str)
def test_backends_and_settings(settings: dict):
    with engine(**settings) as e:
        assert same(mtp_rows(e, tokens()), reference())


@pytest.mark.parametrize("backend", ["cpu", "ref"])
@pytest.mark.parametrize("width", [1, 7, 60])
def test_rows_in_any_cut(backend: str, width: int):
    with engine(backend=backend) as e:
        assert same(mtp_rows(e, tokens()[:70], int(reference()[3][0]), width)[:3], tuple(x[:70] for x in reference()[:3]))


@pytest.mark.parametrize("settings", [{"backend": "ref"}, {"threads": 2}, {"fuse": False}], ids=str)
def test_hidden_rows_without_logits(settings: dict):
    with engine(**settings) as e, e.sequence() as seq, e.sequence("mtp") as mtp:
        logits, hidden = e.step_hidden([(seq, t, i % 3 == 0) for i, t in enumerate(tokens()[:40])], logits=False)
        assert logits is None and same((hidden,), (reference()[0][:40:3],))
        one = e.step_hidden([(seq, tokens()[40], True)], logits=False)[1]
        assert same((one,), (reference()[0][40:41],))
        inputs = before(reference()[0])
        e.step_hidden([(mtp, t, False) for t in tokens()[:30]], inputs[:30])  # keys and values only
        found = e.step_hidden([(mtp, t, True) for t in tokens()[30:40]], inputs[30:40])
        assert same(found, (reference()[1][30:40], reference()[2][30:40]))


@pytest.mark.parametrize("backend", ["cpu", "ref"])
def test_timelines_of_both_lists(backend: str):
    """A trunk's and an MTP block's timeline share a model, not pages: each is forked and taken back by itself."""
    with engine(backend=backend) as e, e.sequence() as seq, e.sequence("mtp") as mtp:
        e.step([(seq, t, False) for t in tokens()[:70]])
        trunk = e.memory()["kv"]
        inputs = before(reference()[0])
        e.step_hidden([(mtp, t, False) for t in tokens()[:70]], inputs[:70])
        assert 0 < e.memory()["kv"] - trunk < trunk
        with mtp.fork() as fork:
            e.step_hidden([(fork, t, False) for t in tokens()[:20]], inputs[:20])
            assert fork.truncate(66) == 66
            for timeline, at in ((fork, 66), (mtp, 70)):
                found = e.step_hidden([(timeline, t, True) for t in tokens()[at:90]], inputs[at:90])
                assert same(found, (reference()[1][at:90], reference()[2][at:90]))
        assert seq.pos == 70 and seq.truncate(60) == 60 and mtp.pos == 90


# ---- errors


def test_what_is_refused():
    with Engine(opened(), threads=1) as e:
        with pytest.raises(Bw24Error, match="no list 'mtp'"):
            e.sequence("mtp")
    with open_model(FIXTURES / "tiny" / "qwen3.gguf") as model, pytest.raises(Bw24Error, match="no MTP block"):
        Engine(model, threads=1, draft=True)
    with engine() as e, e.sequence() as seq, e.sequence("mtp") as mtp:
        row = np.zeros((1, e.n_hidden), np.float32)
        with pytest.raises(Bw24Error, match="takes hidden rows"):
            e.step([(mtp, 1, True)])
        with pytest.raises(Bw24Error, match="takes no hidden rows"):
            e.step_hidden([(seq, 1, True)], row)
        with pytest.raises(Bw24Error, match="of list mtp, row 0 of list trunk"):
            e.step([(seq, 1, True), (mtp, 1, True)])
        with pytest.raises(Bw24Error, match="expected shape"):
            e.step_hidden([(mtp, 1, True)], row[:, 1:])
        with pytest.raises(Bw24Error, match="Inf or NaN"):
            e.step_hidden([(mtp, 1, True)], row + np.nan)
        assert seq.pos == 0 and mtp.pos == 0
        e.step_hidden([(mtp, 1, True)], row)
