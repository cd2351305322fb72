"""Whole forward passes against llama.cpp's numbers on tiny models: every architecture and weight type.

f32: float weights on every backend, quantised ones in ref's float-activation mode. approx: the shipped integer path.
The in-tree models always run; the full set runs where BW24_GOLDENS names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import golden_rules as rules
from bw24.engine import Engine
from bw24.source import open_model

IN_TREE = ("llama-untied", "qwen3", "gemma3", "llama-q4_k", "llama-q4_1-iq4_nl")
FULL = (
    "llama-untied", "llama-tied", "qwen2", "qwen3", "gemma3", "llama-q4_0", "llama-q4_1-iq4_nl", "llama-q5_0-q5_1", "llama-q8_0",
    "llama-q2_k", "llama-q3_k", "llama-q4_k", "llama-q5_k", "llama-q6_k", "llama-iq1_s-iq1_m", "llama-iq2_xxs", "llama-iq2_xs-iq2_s",
    "llama-iq3_xxs", "llama-iq3_s", "llama-iq4_xs", "llama-mxfp4", "llama-nvfp4", "llama-f16-bf16",
)
QUANTISED = {n for n in FULL if n.startswith("llama-") and n not in ("llama-untied", "llama-tied", "llama-f16-bf16")}


def greedy(engine: Engine, prompt: list[int], n: int) -> list[int]:
    ids: list[int] = []
    with engine.sequence() as seq:
        logits = seq.prefill(prompt)
        while len(ids) < n:
            ids.append(int(np.argmax(logits)))
            logits = seq.decode(ids[-1])
    return ids


def prompts(folder: Path, name: str) -> Iterator[rules.Golden]:
    for prompt in "ab":
        golden = rules.load(folder / f"{name}.npz", prompt)
        if golden:
            yield golden


def check_model(folder: Path, name: str, check, tolerance, **settings) -> None:
    with open_model(folder / f"{name}.gguf") as model, Engine(model, kv="f32", **settings) as engine:
        for golden in prompts(folder, name):
            with engine.sequence() as seq:
                logits = seq.prefill(golden.tokens, "all")
            assert check(golden, logits) is None, name
            n = rules.greedy_length(golden, tolerance(golden))
            assert greedy(engine, golden.tokens, n) == golden.greedy[:n], name


def check_f32(folder: Path, name: str) -> None:
    check_model(folder, name, rules.check_f32, rules.f32_tolerance, backend="ref", float_activations=True)
    if name not in QUANTISED:
        check_model(folder, name, rules.check_f32, rules.f32_tolerance)


def check_approx(folder: Path, name: str) -> None:
    check_model(folder, name, rules.check_approx, rules.approx_tolerance)


@pytest.mark.parametrize("name", IN_TREE)
def test_f32(fixtures, name):
    check_f32(fixtures / "tiny", name)


@pytest.mark.parametrize("name", sorted(QUANTISED & set(IN_TREE)))
def test_approx(fixtures, name):
    check_approx(fixtures / "tiny", name)


@pytest.mark.parametrize("name", FULL)
def test_f32_full(goldens, name):
    check_f32(goldens / "tiny", name)


@pytest.mark.parametrize("name", sorted(QUANTISED))
def test_approx_full(goldens, name):
    check_approx(goldens / "tiny", name)


def test_the_rules_can_fail(fixtures):
    """A logit moved by twice the tolerance, a swapped argmax and NaN are all refused."""
    golden = rules.load(fixtures / "tiny" / "qwen3.npz", "b")
    good = np.zeros((len(golden.tokens), golden.logits.shape[1]), np.float32)
    good[golden.rows] = golden.logits
    assert rules.check_f32(golden, good) is None and rules.check_approx(golden, good) is None
    moved = good.copy()
    moved[golden.rows[3], 7] += 2 * rules.f32_tolerance(golden)
    assert "position" in rules.check_f32(golden, moved)
    assert "median" in rules.check_approx(golden, good + 1.0)
    swapped = good.copy()
    for row in golden.rows[::4]:
        best, worst = good[row].argmax(), good[row].argmin()
        swapped[row, [best, worst]] = good[row, [worst, best]]
    assert "argmax" in rules.check_approx(golden, swapped)
    bad = good.copy()
    bad[0, 0] = np.nan
    with pytest.raises(AssertionError):
        rules.check_f32(golden, bad)
