"""The numeric class of prefill: `fast` exists in backend cuda only, and results say which class they are of."""

from __future__ import annotations

import numpy as np
import pytest

from bw24 import check, gate
from bw24.engine import Engine
from bw24.errors import Bw24Error
from bw24.source import open_model
from conftest import FIXTURES

TINY = FIXTURES / "tiny" / "qwen3.gguf"


@pytest.mark.parametrize("backend", ["auto", "cpu", "ref"])
def test_fast_needs_backend_cuda(backend):
    with open_model(TINY) as model, pytest.raises(Bw24Error) as caught:
        Engine(model, backend=backend, prefill="fast")
    name = "ref" if backend == "ref" else "cpu"
    assert str(caught.value) == f"the fast prefill class exists in backend cuda only, not in {name}; the exact class is everywhere"
    with pytest.raises(Bw24Error, match="backend cuda only"):
        next(check.kernel_check(backend=name, prefill="fast"))


def test_an_unknown_class_is_refused():
    with open_model(TINY) as model, pytest.raises(Bw24Error, match="prefill=quick: expected exact or fast"):
        Engine(model, prefill="quick")


class Skewed:
    """An engine of class fast whose prefill is off by a factor; decode is the real engine's."""

    def __init__(self, engine: Engine, factor: float):
        self.engine, self.factor, self.prefill_class, self.max_rows, self.model = engine, factor, "fast", engine.max_rows, engine.model

    def sequence(self):
        return self.engine.sequence()

    def step(self, rows):
        return self.engine.step(rows) * np.float32(self.factor)


@pytest.mark.parametrize("factor, within", [(1.0, True), (1.05, True), (1.2, False)])
def test_the_gate_of_the_fast_class_is_a_bound(factor, within):
    """The error of a constant factor f is (f - 1)^2: 0.0025 and 0.04 on either side of the bound."""
    with open_model(TINY) as model, Engine(model) as engine:
        found = gate.verify_prefill(Skewed(engine, factor), list(range(40)))
        assert found.match == within and found.error == pytest.approx((factor - 1) ** 2, rel=1e-3, abs=1e-9)
        assert ("WITHIN" if within else "BEYOND") in found.line() and "class fast" in found.line() and "MATCH" not in found.line()
        assert found.as_dict()["prefill"] == "fast"
        exact = gate.verify_prefill(engine, list(range(40)))
        assert exact.match and exact.error == 0 and exact.line().endswith("MATCH") and exact.as_dict()["prefill"] == "exact"
