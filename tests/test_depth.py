"""How many drafts each of several replies makes for a round that they share: simulated, never dearer than plain steps, and what pays is found."""

from __future__ import annotations

import numpy as np
import pytest

from bw24.depth import Costs, Depth, choose_together, plan_together

CLIFF = {1: 1.9, 4: 2.5, 8: 3.2, 9: 5.1, 16: 6.0, 24: 8.5, 32: 11.2, 72: 22.0}  # milliseconds of a step by its rows: a kernel that serves 8 at most
H200 = {1: 1.9, 2: 2.3, 4: 2.5, 5: 3.05, 8: 3.4, 9: 4.5, 16: 4.83, 17: 6.3, 24: 8.5, 32: 8.6, 72: 20.0}  # 9B NVFP4 as measured
SMOOTH = {1: 1.9, 8: 3.0, 16: 4.0, 32: 7.0, 72: 15.0}


def served(widths: dict[int, float], accepts: list[float], draft: float, tokens: int = 4096, change: float | None = None) -> float:
    """Seconds that plain steps take for so many tokens of each reply over those of `auto`; reply i's drafts are right with probability accepts[i],
    from the middle on with probability `change` where that is given."""
    step = lambda rows: float(np.interp(rows, list(widths), list(widths.values())))  # noqa: E731
    rng, costs, n, spent, made = np.random.default_rng(5), Costs(), len(accepts), 0.0, 0.0
    depths = [Depth(8, costs) for _ in accepts]
    while made < tokens * n:
        drafts = choose_together(depths)
        rows, deepest = n + sum(drafts), max(drafts)
        rounds = 1 if deepest else min(16, *(d.plain_rounds() for d in depths))
        costs.timed(deepest, rows, deepest * draft, step(rows), rounds, n)
        spent, made = spent + rounds * (deepest * draft + step(rows)), made + n * rounds
        for depth, k, p in zip(depths, drafts, accepts, strict=True):
            if not deepest:
                depth.passed(rounds - 1)
            for i in range(k):
                right = bool(rng.random() < (p if change is None or made < tokens * n / 2 else change))
                depth.judged(i, right)
                if not right:
                    break
                made += 1
    return made / n * step(n) / spent


@pytest.mark.parametrize("p", [0.0, 0.2, 0.4, 0.6, 0.8, 0.9])
def test_several_replies_lose_next_to_nothing_where_wide_steps_are_dear(p: float):
    assert served(CLIFF, [p] * 8, 0.12) >= 0.98
    assert served(CLIFF, [p, *[0.1] * 7], 0.12) >= 0.98


def test_several_replies_find_what_pays():
    assert served(SMOOTH, [0.8] * 8, 0.12) > 1.2
    assert served(SMOOTH, [0.9, 0.9, 0.9, 0.9, 0.1, 0.1, 0.1, 0.1], 0.12) > 1.15  # those whose drafts are right make them
    assert served(H200, [0.8] * 8, 0.24) > 1.17  # a draft of each makes 1.22
    assert served(CLIFF, [0.8] * 4, 0.12) > 1.1
    assert served(SMOOTH, [0.05] * 8, 0.12, 16384, change=0.95) > 1.1  # drafts that become better


def test_the_likeliest_drafts_are_made():
    costs = Costs()
    depths = [Depth(8, costs) for _ in range(3)]
    for rows, seconds in ((3, 1.0), (6, 1.01), (12, 9.0)):
        for _ in range(4):
            costs.timed(0 if rows == 3 else 1, rows, 0.001, seconds)
    for depth, chances in zip(depths, ([1.0, 1.0, 1.0], [0.5], [0.0]), strict=True):
        for _ in range(200):
            for at, p in enumerate(chances):
                depth.judged(at, p > 0.5 or (p == 0.5 and costs._judged[0] % 2 == 0))
    drafts, hope = plan_together(depths, 8)
    assert drafts[0] >= 2 and drafts[2] == 0 and sum(drafts) <= 3 and hope
