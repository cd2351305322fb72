"""The elementary functions against float64, and every kernel of every instruction set against the plain C reference (kernel-check)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from bw24 import abi, check
from bw24.engine import Engine
from bw24.errors import Bw24Error
from bw24.source import open_model

ISAS = ("portable", "avx2", "avxvnni", "avx512vnni")


def canon(name: str, x: np.ndarray) -> np.ndarray:
    x = np.ascontiguousarray(x, np.float32)
    y = np.empty_like(x)
    pointer = lambda a: abi.ffi.cast("float *", abi.ffi.from_buffer(a))  # noqa: E731
    abi.check(abi.lib().bw24_canon(name.encode(), pointer(x), pointer(y), len(x)))
    return y


def grid(low: float, high: float) -> np.ndarray:
    """A dense even grid, every power of two in range, and its neighbours."""
    powers = np.ldexp(1.0, np.arange(-140, 8))
    odd = np.concatenate([powers, -powers, np.nextafter(powers.astype(np.float32), np.float32(np.inf))])
    x = np.concatenate([np.linspace(low, high, 200_001), odd[(odd >= low) & (odd <= high)], [0.0, -0.0]]).astype(np.float32)
    return x[(x >= low) & (x <= high)]


def gelu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-2 * 0.7978845608 * x * (1 + 0.044715 * x * x)))


RELATIVE = {
    "exp": (-86, 88, 2e-7, np.exp), "exp2": (-125, 127, 2e-7, np.exp2), "sigmoid": (-80, 80, 4e-7, lambda x: 1 / (1 + np.exp(-x))),
    "silu": (-80, 80, 4e-7, lambda x: x / (1 + np.exp(-x))),
}
ABSOLUTE = {"tanh": (-100, 100, 2e-7, np.tanh), "softplus": (-80, 20, 2e-7, np.log1p), "gelu": (-10, 10, 2e-6, gelu)}


@pytest.mark.parametrize("name", RELATIVE)
def test_relative_error(name):
    low, high, bound, f = RELATIVE[name]
    x = grid(low, high)
    want = f(x.astype(np.float64))
    found = canon(name, x)
    at = np.abs(want) >= 2.0**-126  # below, the last place of a subnormal is the error
    assert (np.abs(found[at] / want[at] - 1)).max() < bound
    assert np.abs(found[~at] - want[~at]).max(initial=0) <= 2.0**-149


@pytest.mark.parametrize("name", ABSOLUTE)
def test_absolute_error(name):
    low, high, bound, f = ABSOLUTE[name]
    x = grid(low, high)
    want = np.log1p(np.exp(x.astype(np.float64))) if name == "softplus" else f(x.astype(np.float64))
    assert (np.abs(canon(name, x) - want) / np.maximum(1, np.abs(want))).max() < bound


def test_edges():
    """Below their range exp and exp2 are +0, never subnormal; above it they stop at the last value; signs of zero are kept."""
    low = canon("exp", np.array([-86.01, -200, -3e38]))
    assert low.tobytes() == np.zeros(3, np.float32).tobytes()
    assert canon("exp2", np.array([-125.01, -1e9])).tobytes() == np.zeros(2, np.float32).tobytes()
    assert canon("exp", np.array([88.0, 89.0, 3e38])).tolist() == [canon("exp", np.array([88.0]))[0]] * 3
    assert canon("exp2", np.array([127.0, 500.0])).tolist() == [2.0**127] * 2
    assert canon("exp", np.array([0.0, -0.0])).tolist() == [1.0, 1.0]
    assert canon("exp2", np.arange(-125.0, 128)).tolist() == [2.0**i for i in range(-125, 128)]
    zeros = np.array([0.0, -0.0], np.float32)
    for name in ("silu", "gelu", "tanh"):
        assert canon(name, zeros)[0] == 0 and not np.signbit(canon(name, zeros)[0]), name
    assert np.isfinite(canon("gelu", np.array([65504.0, -65504.0, 3e12]))).all()
    with pytest.raises(Bw24Error, match="no function 'sinh'"):
        canon("sinh", zeros)


def run_check(cases) -> Counter:
    verdicts: Counter = Counter()
    wrong = []
    for case in cases:
        verdicts[case.verdict] += 1
        if case.verdict == "FAIL":
            wrong.append(f"{case.name}: {case.detail}")
            if len(wrong) == 10:
                break
        if case.verdict == "SKIP":
            assert case.detail, case.name
    assert not wrong, wrong
    return verdicts


@pytest.mark.parametrize("isa", ISAS)
def test_every_kernel_is_the_reference(isa):
    if not abi.lib().bw24_isa_supported(isa.encode()):
        pytest.skip(f"this processor has no {isa}")
    verdicts = run_check(check.kernel_check(isa=isa, threads=2))
    assert verdicts["PASS"] > 900 and verdicts["SKIP"] < 130


@pytest.mark.parametrize("name", ["llama-q4_1-iq4_nl"])
def test_shapes_of_a_model(fixtures, name):
    out, lib = abi.new("bw24_check_result"), abi.lib()
    with open_model(fixtures / "tiny" / f"{name}.gguf") as model, Engine(model, threads=2) as engine:
        first = lib.bw24_check(engine._ctx, abi.ffi.NULL, -1, out) - 1  # the last case without a model says that there is none
        cases = list(check.run_cases(engine._ctx, engine._model, part=(first + 1, 1)))
    assert all(" of the model" in c.name for c in cases)
    names = [c.name for c in cases if c.verdict == "PASS"]
    assert {n.split()[0].strip(",") for n in names} == {"LINEAR", "NORM", "KV_APPEND"} and len(names) >= 6


def test_the_reference_is_not_checked_against_itself():
    assert set(run_check(check.kernel_check(backend="ref"))) == {"SKIP"}


def test_bandwidth_is_measured():
    read, copy = check.probe(threads=1)
    assert 0.5 < read < 5000 and 0.5 < copy < 5000
