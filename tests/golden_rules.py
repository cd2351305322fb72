"""When do logits agree with golden ones? Owns the loading of golden arrays and the two tolerances of their authors; knows no engine.

f32: every logit within max(1e-3, 8 x the reference's own noise), the argmax equal wherever the margin is more than twice that.
approx: for rounded activations. The yardstick is what 8-bit activations do to the reference itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass
class Golden:
    """One prompt of one model: tokens, positions whose logits are stored, logits [rows, vocabulary], noise figures, greedy continuation."""

    tokens: list[int]
    rows: np.ndarray
    logits: np.ndarray
    floor: float
    stock: float | None
    greedy: list[int]
    margins: np.ndarray


def load(path: Path, prompt: str) -> Golden | None:
    """Prompt "a" or "b" of an .npz; None where the file has no such prompt."""
    with np.load(path, allow_pickle=False) as z:
        if f"tokens_{prompt}" not in z:
            return None
        logits = z[f"logits_{prompt}"]
        rows = z[f"rows_{prompt}"] if f"rows_{prompt}" in z else np.arange(len(logits))
        stock = float(np.median(z[f"stock_diff_{prompt}"])) if f"stock_diff_{prompt}" in z else None
        floor = max(float(np.max(z[f"noise_{prompt}"])), float(np.max(z[f"f64_diff_{prompt}"])))
        greedy, margins = z[f"greedy_{prompt}"].tolist(), z[f"greedy_margin_{prompt}"]
        return Golden(z[f"tokens_{prompt}"].tolist(), rows, logits, floor, stock, greedy, margins)


def _compare(g: Golden, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per stored row: largest difference, the golden margin of the best logit, whether the argmax agrees. Logits must be finite."""
    found = logits[g.rows]
    assert found.shape == g.logits.shape and np.isfinite(found).all()
    top = np.sort(g.logits, axis=1)
    return np.abs(found.astype(np.float64) - g.logits).max(axis=1), top[:, -1] - top[:, -2], found.argmax(1) == g.logits.argmax(1)


def f32_tolerance(g: Golden) -> float:
    return max(1e-3, 8 * g.floor)


def check_f32(g: Golden, logits: np.ndarray) -> str | None:
    """None where logits [len(tokens), vocabulary] agree, else what is wrong."""
    diff, margin, same = _compare(g, logits)
    limit = f32_tolerance(g)
    if diff.max() > limit:
        return f"position {g.rows[diff.argmax()]}: difference {diff.max():.2e}, tolerance {limit:.1e}"
    wrong = g.rows[(margin > 2 * limit) & ~same]
    return f"other argmax at positions {wrong[:5]}" if len(wrong) else None


def approx_tolerance(g: Golden) -> float:
    return max(3 * (g.stock if g.stock is not None else 0.05), 0.05)


def check_approx(g: Golden, logits: np.ndarray) -> str | None:
    """None where logits agree within what 8-bit activations cost, else what is wrong."""
    diff, margin, same = _compare(g, logits)
    limit = approx_tolerance(g)
    if np.median(diff) > limit:
        return f"median difference {np.median(diff):.3f}, tolerance {limit:.3f}"
    clear = margin > 4 * limit
    wrong = int((clear & ~same).sum())
    return f"other argmax at {wrong} of {int(clear.sum())} clear positions" if wrong > 0.02 * clear.sum() else None


def greedy_length(g: Golden, limit: float) -> int:
    """How many greedy ids must agree: those before the first margin below the tolerance."""
    below = np.nonzero(g.margins < limit)[0]
    return int(below[0]) if len(below) else len(g.greedy)
