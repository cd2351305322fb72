"""The numeric program's scalar operations in exact rational arithmetic, rounded once where the program rounds: f32 add, mul, div, fma,
and what canon.h builds from them for the sampler. Independent of the library's arithmetic; a float here holds an f32 value."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

MASK = (1 << 64) - 1


def round32(x: Fraction) -> float:
    """The f32 nearest to x, ties to even; no overflow is expected here. A zero result is +0."""
    if x == 0:
        return 0.0
    size = abs(x)
    e = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** e:
        e -= 1
    step = Fraction(2) ** (max(e, -126) - 23)
    return float(round(x / step) * step)  # round() of a Fraction is ties-to-even


def const32(text: str) -> float:
    return float(np.float32(text))


def add32(a: float, b: float) -> float:
    return round32(Fraction(a) + Fraction(b))


def mul32(a: float, b: float) -> float:
    return round32(Fraction(a) * Fraction(b))


def div32(a: float, b: float) -> float:
    return round32(Fraction(a) / Fraction(b))


def fma32(a: float, b: float, c: float) -> float:
    return round32(Fraction(a) * Fraction(b) + Fraction(c))


def fma64(a: float, b: float, c: float) -> float:
    return float(Fraction(a) * Fraction(b) + Fraction(c))


EXP2 = [const32(t) for t in ("0.00015453163", "0.0013390863", "0.009618083", "0.05550357", "0.24022651", "0.6931472", "1.0")]


def exp2(x: float) -> float:
    """2^x in f32: round x to an integer n, a polynomial of degree 6 in x - n by fma, times 2^n; +0 below -125."""
    if x < -125.0:
        return 0.0
    z = min(x, 127.0)
    n = round(Fraction(z))
    f = add32(z, float(-n))
    p = EXP2[0]
    for c in EXP2[1:]:
        p = fma32(p, f, c)
    return mul32(p, 2.0**n)


def log64(x: float) -> float:
    """ln x in f64 for x in (0, 1): exponent and mantissa in [1/sqrt 2, sqrt 2), atanh series to the 21st power."""
    m, e = np.frexp(x)
    m, e = float(m) * 2.0, int(e) - 1
    if m > 1.4142135623730951:
        m, e = m * 0.5, e + 1
    f = (m - 1.0) / (m + 1.0)
    s = f * f
    p = 1.0 / 21.0
    for k in (19, 17, 15, 13, 11, 9, 7, 5, 3):
        p = fma64(p, s, 1.0 / k)
    p = fma64(p, s, 1.0)
    return fma64(float(e), 0.6931471805599453, (2.0 * f) * p)


def mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def draw(seed: int, position: int, token: int) -> int:
    """64 random bits of a (seed, position, token)."""
    z = mix((seed + 0x9E3779B97F4A7C15) & MASK)
    z = mix(z ^ (position * 0xD1342543DE82EF95 + 0x632BE59BD9B4E019) & MASK)
    return mix(z ^ (token * 0xAF251AF3B0F025B5 + 0x2545F4914F6CDD1D) & MASK)


def race(seed: int, position: int, token: int) -> float:
    """The exponential variate of a token: -ln of a uniform with 52 bits, in the middle of its cell."""
    return -log64((float(draw(seed, position, token) >> 12) + 0.5) * 2.0**-52)
