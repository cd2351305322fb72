"""The sampler against its definition (docs/numerics.md §9), written again in exact arithmetic, and against the exact distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest

import exact
from bw24 import abi, sampling
from bw24.errors import Bw24Error
from bw24.sampling import SamplingParams, sample

f32 = np.float32


def adjusted(logits: list[float], p: SamplingParams, history: list[int]) -> list[float]:
    out = list(logits)
    for token, value in p.logit_bias.items():
        out[token] = exact.add32(out[token], float(f32(value)))
    r, presence, frequency = (float(f32(v)) for v in (p.repetition_penalty, p.presence_penalty, p.frequency_penalty))
    if r != 1 or presence or frequency:
        for token in set(history):
            x = exact.div32(out[token], r) if out[token] > 0 else exact.mul32(out[token], r)
            out[token] = exact.add32(x, -exact.fma32(frequency, float(history.count(token)), presence))
    return out


def weights(logits: list[float], allowed: list[int], temperature: float) -> dict[int, int]:
    """Token -> integer weight, those of weight 0 left out."""
    top, k = max(logits[i] for i in allowed), exact.div32(exact.const32("1.44269504"), float(f32(temperature)))
    out = {i: int(exact.exp2(exact.mul32(exact.add32(logits[i], -top), k)) * 2.0**40) for i in allowed}
    return {i: w for i, w in out.items() if w}


def survivors(w: dict[int, int], logits: list[float], p: SamplingParams) -> list[int]:
    order = sorted(w, key=lambda i: (-logits[i], i))
    keep = len(order)
    if p.top_k:
        keep = min(keep, p.top_k)
    if p.min_p > 0:
        least = float(f32(p.min_p)) * float(w[order[0]])
        keep = next((i for i in range(1, keep) if float(w[order[i]]) < least), keep)
    if p.top_p < 1:
        need, mass = math.ceil(float(f32(p.top_p)) * float(sum(w.values()))), 0
        for i in range(keep):
            mass += w[order[i]]
            if float(mass) >= need:
                keep = i + 1
                break
    return order[:keep]


def expected(logits: np.ndarray, p: SamplingParams, history: list[int], position: int, allowed: list[int]) -> int:
    l = adjusted([float(x) for x in logits], p, history)  # noqa: E741
    if p.temperature == 0:
        return min(allowed, key=lambda i: (-l[i], i))
    w = weights(l, allowed, p.temperature)
    return min(survivors(w, l, p), key=lambda i: (exact.race(p.seed, position, i) / float(w[i]), i))


def mask_of(allowed: list[int], n: int) -> np.ndarray:
    bits = np.zeros((n + 31) // 32, np.uint32)
    for i in allowed:
        bits[i >> 5] |= np.uint32(1 << (i & 31))
    return bits


def random_case(rng: np.random.Generator) -> tuple[np.ndarray, SamplingParams, list[int], int, list[int] | None]:
    n = int(rng.integers(1, 70))
    logits = (rng.normal(size=n) * rng.choice([0.1, 1, 5, 60])).astype(f32)
    if rng.random() < 0.3:
        logits = np.round(logits).astype(f32)  # ties
    pick = lambda off, *values: off if rng.random() < 0.5 else float(rng.choice(values))  # noqa: E731
    bias = {int(i): float(rng.normal() * 3) for i in rng.integers(0, n, 3)} if rng.random() < 0.3 else {}
    p = SamplingParams(
        temperature=pick(0.8, 0, 1e-3, 0.1, 1, 1.7, 100), top_k=int(pick(0, 1, 2, 5, 40, 1000)), top_p=pick(1.0, 0, 1e-6, 0.3, 0.9, 0.999),
        min_p=pick(0.0, 0.01, 0.2, 1), repetition_penalty=pick(1.0, 0.5, 1.1, 3), presence_penalty=pick(0.0, -1, 0.7),
        frequency_penalty=pick(0.0, -0.3, 0.25), logit_bias=bias, seed=int(rng.integers(0, 1 << 63)) * 2 + int(rng.integers(0, 2)),
    )
    history = [int(t) for t in rng.integers(0, n, int(rng.integers(0, 30)))]
    allowed = sorted({int(i) for i in rng.integers(0, n, int(rng.integers(1, n + 1)))}) if rng.random() < 0.3 else None
    return logits, p, history, int(rng.integers(0, 1 << 40)), allowed


def test_random_cases_equal_the_definition():
    rng = np.random.default_rng(20)
    tokens = set()
    for case in range(400):
        logits, p, history, position, allowed = random_case(rng)
        mask = mask_of(allowed, len(logits)) if allowed else None
        want = expected(logits, p, history, position, allowed or list(range(len(logits))))
        assert sample(logits, p, history, position, mask) == want, (case, p, logits, history, position, allowed)
        tokens.add(want)
    assert len(tokens) > 30


@pytest.mark.parametrize("spread", [0.0, 0.02, 2.0, 9.0])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_p": 0.99999}, {"top_k": 40}, {"top_k": 290}, {"min_p": 0.05}, {"min_p": 1e-9},
                                     {"top_p": 0.95, "top_k": 50, "min_p": 0.02}], ids=str)
def test_large_vocabularies_equal_the_definition(spread, filters):
    """Only a part of the candidates is put in order, however flat or peaked they are."""
    rng = np.random.default_rng(int(spread * 100) + len(filters))
    for n, temperature in ((500, 1.0), (300, 0.6)):
        logits = (rng.normal(size=n) * spread).astype(f32)
        logits[rng.integers(0, n, 20)] += f32(spread)
        logits[rng.integers(0, n, 50)] = logits[0]  # ties
        p = SamplingParams(temperature, **filters, seed=int(rng.integers(0, 1 << 60)))
        for position in range(2):
            assert sample(logits, p, [], position) == expected(logits, p, [], position, list(range(n)))


def test_canon_functions_equal_the_exact_ones():
    x = np.random.default_rng(3).uniform(-130, 5, 400).astype(f32)
    y = np.empty_like(x)
    pointer = lambda a: abi.ffi.cast("float *", abi.ffi.from_buffer(a))  # noqa: E731
    abi.check(abi.lib().bw24_canon(b"exp2", pointer(x), pointer(y), len(x)))
    assert [exact.exp2(float(v)) for v in x] == [float(v) for v in y]


def draws(logits: np.ndarray, p: SamplingParams, n: int, by_seed: bool) -> np.ndarray:
    """Counts of n draws that differ in position, or in seed."""
    c, token, ffi, draw = abi.new("bw24_sampler"), abi.ffi.new("int32_t *"), abi.ffi, abi.lib().bw24_sample
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        setattr(c, name, getattr(p, name))
    data, counts = ffi.cast("float *", ffi.from_buffer(logits)), np.zeros(len(logits), np.int64)
    for i in range(n):
        c.seed = i if by_seed else p.seed
        draw(data, len(logits), c, ffi.NULL, 0, 77 if by_seed else i, ffi.NULL, token, ffi.NULL)
        counts[token[0]] += 1
    return counts


@pytest.mark.parametrize("by_seed", [False, True], ids=["positions", "seeds"])
@pytest.mark.parametrize("settings", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9}], ids=str)
def test_draws_follow_the_distribution(settings, by_seed):
    """200 000 draws: total variation below twice its expectation under the exact distribution, and a chi-square test."""
    n, p = 200_000, SamplingParams(seed=5, **settings)
    logits = np.random.default_rng(1).normal(size=20).astype(f32) * f32(1.5)
    values = [float(x) for x in logits]
    w = weights(values, list(range(20)), p.temperature)
    kept = survivors(w, values, p)
    total = sum(w[i] for i in kept)
    share = np.array([w[i] / total if i in kept else 0.0 for i in range(20)])
    counts = draws(logits, p, n, by_seed)
    assert counts[share == 0].sum() == 0
    variation = 0.5 * np.abs(counts / n - share).sum()
    assert variation < 2 * 0.5 * np.sqrt(2 / np.pi * share * (1 - share) / n).sum(), variation
    on = share > 0
    chi = ((counts[on] - n * share[on]) ** 2 / (n * share[on])).sum()
    freedom = on.sum() - 1
    assert abs(chi - freedom) < 5 * math.sqrt(2 * freedom), (chi, freedom)


def test_removing_losers_keeps_the_winner():
    """What makes trimmed drafters and filters coherent: the race of a token does not depend on the other candidates."""
    rng = np.random.default_rng(8)
    for position in range(200):
        logits = rng.normal(size=100).astype(f32)
        p = SamplingParams(temperature=1.0, seed=3)
        winner = sample(logits, p, [], position)
        top = int(logits.argmax())
        some = sorted({winner, top, *(int(i) for i in rng.integers(0, 100, 20))})
        assert sample(logits, p, [], position, mask_of(some, 100)) == winner


def test_temperature_zero_is_argmax_with_the_lowest_id():
    logits = np.array([1, 7, 3, 7, 7], f32)
    assert sample(logits, SamplingParams(), [], 0) == 1
    assert sample(logits, SamplingParams(), [], 0, mask_of([2, 3, 4], 5)) == 3
    assert sample(np.array([-0.0, 0.0], f32), SamplingParams(), [], 0) == 0


def test_log_probability():
    logits = np.random.default_rng(2).normal(size=300).astype(f32) * f32(4)
    c, token, value = abi.new("bw24_sampler"), abi.ffi.new("int32_t *"), abi.ffi.new("float *")
    c.temperature, c.top_p, c.repetition_penalty, c.seed = 1.3, 0.5, 1.0, 9
    data = abi.ffi.cast("float *", abi.ffi.from_buffer(logits))
    abi.check(abi.lib().bw24_sample(data, 300, c, abi.ffi.NULL, 0, 4, abi.ffi.NULL, token, value))
    x = logits.astype(np.float64)
    assert abs(value[0] - (x[token[0]] - x.max() - np.log(np.exp(x - x.max()).sum()))) < 1e-5


@pytest.mark.parametrize("change, message", [
    ({"temperature": -1.0}, "temperature"), ({"temperature": float("nan")}, "temperature"), ({"top_p": 1.5}, "top_p"),
    ({"min_p": -0.1}, "min_p"), ({"repetition_penalty": 0.0}, "repetition_penalty"), ({"seed": -1}, "seed"), ({"top_k": -1}, "top_k"),
])
def test_bad_parameters_are_refused(change, message):
    with pytest.raises(Bw24Error, match=message):
        SamplingParams(**change)


def test_bad_input_is_refused():
    good = np.zeros(10, f32)
    with pytest.raises(Bw24Error, match="logit of token 4 is Inf or NaN"):
        sample(np.where(np.arange(10) == 4, np.nan, 0).astype(f32), SamplingParams(), [], 0)
    with pytest.raises(Bw24Error, match="mask allows no token"):
        sample(good, SamplingParams(), [], 0, np.zeros(1, np.uint32))
    with pytest.raises(Bw24Error, match="token 10 is outside 0..9"):
        sample(good, SamplingParams(logit_bias={10: 1.0}), [], 0)
    with pytest.raises(Bw24Error, match="history: token -1"):
        sample(good, SamplingParams(repetition_penalty=1.1), [-1], 0)
    assert sampling.sample(good, SamplingParams(), [10, -1], 0) == 0  # a history that no penalty reads is not looked at
