"""The exactness gates: they pass on a real engine, and each turns red on an engine that is wrong in its way."""

from __future__ import annotations

import re

import numpy as np
import pytest

from bw24 import gate
from bw24.engine import Engine
from bw24.source import open_model
from fake_engine import FakeEngine
from tiny_model import write_tiny

IDS = [(i * 7 + 3) % 40 for i in range(60)]


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_every_equality_passes_on_a_tiny_model(tmp_path, arch):
    window = 24 if arch == "gemma3" else 0
    with open_model(write_tiny(tmp_path / "tiny.gguf", arch=arch, window=window, layers=6 if window else 2)) as model:
        ids = model.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 3)[:120]
        equalities = gate.Equalities(lambda **changes: Engine(model, **changes), ids, full=True)
        verdicts = {v.name: v for v in equalities.run()}
        equalities.close()
    assert [v.line() for v in verdicts.values() if v.status == gate.FAIL] == []
    skipped = {name for name, v in verdicts.items() if v.status == gate.SKIP}
    # instruction sets that this machine lacks, and the control register where it is not x86-64's
    assert all(name.startswith(("isa ", "backend cuda")) or "float environment" in name for name in skipped), [verdicts[n].line() for n in skipped]
    assert len(verdicts) >= 23 and sum(v.status == gate.PASS for v in verdicts.values()) >= 18


def test_the_gate_line():
    check = gate.verify_prefill(FakeEngine(), IDS)
    assert re.fullmatch(r"verify-prefill argmax=(\d+) decode argmax=\1 logit maxdiff=0\.000e\+00 MATCH", check.line())
    assert check.match and check.rows == 8 and check.seq.tokens == IDS
    assert np.array_equal(check.logits, FakeEngine().row(IDS))


@pytest.mark.parametrize("n", [1, 3, 8, 9, 64, 65, 72])
def test_prompts_of_any_length_pass(n):
    ids = [i % 40 for i in range(n)]
    engine = FakeEngine()
    check = gate.verify_prefill(engine, ids)
    assert check.match and check.rows == min(8, n) and check.seq.tokens == ids


def test_a_second_prompt_in_a_sequence_passes():
    engine = FakeEngine()
    seq = gate.verify_prefill(engine, IDS[:20]).seq
    assert gate.verify_prefill(engine, IDS[20:], seq).match and seq.tokens == IDS


def test_one_ulp_is_a_mismatch():
    check = gate.verify_prefill(FakeEngine("decode"), IDS)
    assert not check.match and 0 < check.difference < 1e-5
    assert check.line().endswith("MISMATCH")


def test_a_wrong_sign_of_zero_is_a_mismatch():
    assert not gate.same_bits(np.zeros((1, 2), np.float32), np.array([[0.0, -0.0]], np.float32))


FAULTS = {
    "decode": ["prefill = decode", "rows 1..32 = whole"],
    "width": ["prompt cut into 7 = whole", "prefill = decode"],
    "batch": ["two sequences in one step = each alone"],
    "truncate": ["fork and go back = straight on"],
    "seed": ["prompt cut into 7 = whole"],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_turns_its_gates_red(fault):
    equalities = gate.Equalities(lambda **changes: FakeEngine(fault), IDS)
    red = {v.name for v in equalities.run() if v.status == gate.FAIL}
    assert red >= set(FAULTS[fault])


def test_no_fault_no_red():
    red = [v.name for v in gate.Equalities(lambda **changes: FakeEngine(), IDS).run() if v.status == gate.FAIL]
    assert [name for name in red if "float environment" not in name] == []  # numpy, unlike the library, computes in the caller's


def test_sampling_that_depends_on_anything_else_is_seen():
    class Forgetful(FakeEngine):
        def row(self, tokens):
            return super().row(tokens) * np.float32(1 + len(self.calls) % 2)

    equalities = gate.Equalities(lambda **changes: Forgetful(), IDS)
    assert "seeded sampling repeats, whatever the cut" in {v.name for v in equalities.run() if v.status == gate.FAIL}


def test_compare_names_the_first_row():
    a = np.zeros((5, 3), np.float32)
    b = a.copy()
    b[3, 1] = 0.5
    assert gate.compare(a, a.copy()) is None
    assert gate.compare(a, b) == "1 of 5 rows differ, the first is 3, maxdiff=5.000e-01"
    assert "shape" in gate.compare(a, b[:2])


def test_the_foreign_float_environment_is_foreign_and_goes_away():
    import ctypes
    import platform

    if platform.machine() != "x86_64":
        pytest.skip("the control register is x86-64's")
    libm = ctypes.CDLL("libm.so.6")
    libm.fegetround.restype = ctypes.c_int
    assert libm.fegetround() == 0
    small, one = float("1e-160"), float("1")  # not literals: the compiler would fold them
    with gate.foreign_float_environment():
        up, flushed, third = libm.fegetround(), small * small, one / 3.0
    assert up == 0x800 and flushed == 0.0 and third > one / 3.0
    assert libm.fegetround() == 0 and small * small > 0


@pytest.mark.parametrize(("noise", "experts", "match"), [(0.1, 1, True), (0.6, 1, False), (0.6, 8, True), (3.0, 8, False)])
def test_class_fast_is_held_to_a_bound_that_a_router_widens(noise, experts, match):
    engine = FakeEngine()
    engine.prefill_class, engine.noise, engine.experts = "fast", noise, experts
    check = gate.verify_prefill(engine, list(range(20)))
    assert check.match is match and check.error == pytest.approx(noise**2 / 4, rel=0.25)
    assert f"{'WITHIN' if match else 'BEYOND'} {0.5 if experts > 1 else 0.01:g}" in check.line()
