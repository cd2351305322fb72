"""scripts/perf_ci.py: what is red, what is not measured, and that a loss of acceptance or of speed is seen. The timed comparison runs only on
a library given with --library (make test-faults): ordinary tests judge no speed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import perf_ci  # noqa: E402

QUIET, LOUD = [0.01] * 5, [0.01, 0.5, 0.5, 0.5, 0.02]
SAME = ([[7, 21, 17]], [[7, 21, 17]])
ORDINARY = ROOT / "py" / "bw24" / "libbw24.so"


def judge(values, others=QUIET, counts=SAME, before=(), reason=None):
    return perf_ci.judge({"demo decode 64": list(values)}, others, counts, list(before), reason)


def test_a_slower_cell_is_red_and_noise_is_not():
    assert judge([0.90, 0.91, 0.92, 0.93, 0.94])[0] == perf_ci.RED
    assert judge([0.90, 0.91, 0.92, 0.93, 0.99])[0] == perf_ci.GREEN  # the interval reaches 0.97
    assert judge([1.00, 1.01, 1.02, 1.03, 1.04])[0] == perf_ci.GREEN


def test_a_loud_machine_measures_nothing():
    status, said, _ = judge([0.5, 0.5, 0.5, 0.5, 0.5], LOUD)
    assert status == perf_ci.UNMEASURED and "in 3 of 5 rounds" in said[-1]
    assert judge([1.0] * 5, LOUD)[0] == perf_ci.UNMEASURED  # nor is it green
    assert judge([1.0] * 5, LOUD[1:2] + QUIET[1:])[0] == perf_ci.GREEN


def test_acceptance_is_compared_as_integers():
    lost = ([[7, 21, 17]], [[8, 24, 16]])
    status, said, _ = judge([1.0] * 5, counts=lost)
    assert status == perf_ci.RED and "[[7, 21, 17]], are [[8, 24, 16]]" in said[-1]
    assert judge([1.0] * 5, counts=lost, reason="the head was trained again")[0] == perf_ci.GREEN


def test_slow_drift_is_caught():
    """Seven green rows of 0.99 each pass one by one; the next is red, unless an anchor stands between."""
    step = {"cells": {"demo decode 64": {"ratio": 0.99}}}
    assert judge([0.99] * 5)[0] == perf_ci.GREEN
    assert judge([0.99] * 5, before=[step] * 7)[0] == perf_ci.RED
    assert judge([0.99] * 5, before=[step] * 6 + [step | {"anchor": True}])[0] == perf_ci.GREEN


def sides(library: Path) -> tuple[perf_ci.Side, perf_ci.Side]:
    if not ORDINARY.is_file():
        pytest.skip("no built tree")
    return perf_ci.Side(ROOT, ORDINARY), perf_ci.Side(ROOT, library)


def test_acceptance_of_this_library():
    """The library under test drafts as well as the ordinary one; a fault in the hidden rows turns this red though the text is the same."""
    from test_faults import library_file

    base, new = sides(library_file())
    was, now = base.acceptance("cpu"), new.acceptance("cpu")
    assert was == now
    assert len(was) == len(perf_ci.PROMPTS) and all(0 < accepted < drafted for _, drafted, accepted in was)


def test_speed_of_this_library(pytestconfig):
    from test_faults import library_file

    if not pytestconfig.getoption("--library"):
        pytest.skip("speed is judged only for a library given with --library")
    base, new = sides(library_file())
    model = str(ROOT / perf_ci.DEMO)
    with perf_ci.running([base, new], "cpu", 2, [model]):
        ratios, others = perf_ci.measure(base, new, [model], 7)
    status, said, _ = perf_ci.judge(ratios, [0.0] * len(others), SAME, [], None)
    assert status == perf_ci.GREEN, said
