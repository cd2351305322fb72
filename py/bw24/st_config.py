"""A checkpoint's config.json: typed reading, nesting, rotation settings. Knows the keys' spellings over the years; knows no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Context, Decimal
from typing import Any

import numpy as np

from .errors import Bw24Error
from .gguf_types import quote

_REQUIRED = object()
_PRECISE = Context(prec=40)


class Config:
    """The text model's keys, with those of the outer object behind them. Every failure is a Bw24Error that names the key."""

    def __init__(self, outer: Mapping[str, Any]):
        inner = outer.get("text_config")
        self.keys: dict[str, Any] = {**outer, **inner} if type(inner) is dict else dict(outer)
        self.outer = outer

    def fail(self, key: str, wanted: str, value: Any) -> Bw24Error:
        return Bw24Error(f"config.json: {key}: expected {wanted}, found {quote(str(value))}")

    def get(self, *names: str) -> Any:
        """The first of several spellings that is there and not null, else None."""
        return next((self.keys[n] for n in names if self.keys.get(n) is not None), None)

    def int(self, name: str, default: Any = _REQUIRED, *, low: int = 1, high: int = 1 << 24, other: str = "") -> int:
        value = self.get(name, other)
        if value is None and default is not _REQUIRED:
            return default
        if type(value) is not int or not low <= value <= high:
            raise self.fail(name, f"a whole number {low}..{high}", value)
        return value

    def float(self, name: str, default: Any = _REQUIRED, *, low: float = 1e-12, high: float = 1e12) -> float:
        value = self.get(name)
        if value is None and default is not _REQUIRED:
            return default
        if type(value) not in (int, float) or not low <= value <= high:
            raise self.fail(name, f"a number {low:g}..{high:g}", value)
        return float(value)

    def bool(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is not None and type(value) is not bool:
            raise self.fail(name, "true or false", value)
        return default if value is None else value

    def words(self, name: str, count: int, allowed: tuple[str, ...]) -> list[str] | None:
        """A list of `count` or more words out of `allowed`, cut to `count`; None where the key is missing."""
        value = self.get(name)
        if value is None:
            return None
        if type(value) is not list or len(value) < count or not all(v in allowed for v in value):
            raise self.fail(name, f"{count} of {', '.join(allowed)}", value)
        return value[:count]

    def expect(self, name: str, *values: Any) -> None:
        """Refuses a config whose key is there with another value."""
        if (found := self.get(name)) is not None and found not in values:
            raise self.fail(name, " or ".join(map(str, values)), found)

    def rope(self, layer_type: str = "") -> Rope:
        """Rotation settings; `layer_type`: of the layers that newer configs name so."""
        sets = self.get("rope_parameters")
        if sets is None:
            sets = self.get("rope_scaling") or {}
        if type(sets) is not dict:
            raise self.fail("rope_parameters", "an object", sets)
        if layer_type and type(sets.get(layer_type)) is dict:
            sets = sets[layer_type]
        return Rope(sets, self)


class Rope:
    """base, part (share of a head's values that rotate), kind (default, linear, llama3, proportional ...) and the raw settings."""

    def __init__(self, sets: Mapping[str, Any], config: Config):
        self.sets, self._config = sets, config
        kind = sets.get("rope_type", sets.get("type", "default"))
        self.kind = "default" if kind in (None, "mrope") else str(kind)
        self.base = self.number("rope_theta", config.float("rope_theta", 10000.0))
        self.part = self.number("partial_rotary_factor", config.float("partial_rotary_factor", 1.0, high=1.0))

    def number(self, key: str, default: float | None = None) -> float:
        value = self.sets.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not 0 < value <= 1e12:
            raise self._config.fail(f"rope_parameters.{key}", "a positive number", value)
        return float(value)

    def metadata(self, arch: str, allowed: tuple[str, ...] = ("default", "linear")) -> dict[str, Any]:
        """`rope.*` keys of the plain and the linearly scaled kind; refuses kinds that are not `allowed`."""
        if self.kind not in allowed:
            raise self._config.fail("rope_parameters.rope_type", ", ".join(allowed), self.kind)
        out: dict[str, Any] = {f"{arch}.rope.freq_base": self.base}
        if self.kind == "linear":
            out |= {f"{arch}.rope.scaling.type": "linear", f"{arch}.rope.scaling.factor": self.number("factor")}
        return out


def power(base: float, exponent: Decimal) -> Decimal:
    """base ** exponent, to 40 digits on every machine."""
    return _PRECISE.power(Decimal(base), exponent)


def exp_negated(values: np.ndarray) -> np.ndarray:
    """-exp(x) in f32, rounded from 40 digits: the same bits on every machine, which no libm promises."""
    out = [-float(_PRECISE.exp(Decimal(float(v)))) if np.isfinite(v) and v < 88 else np.nan for v in values.reshape(-1)]
    if np.isnan(out).any():
        raise Bw24Error("A_log: a value is not finite or its exponential does not fit")
    return np.array(out, np.float32).reshape(values.shape)


def llama3_factors(rope: Rope, dims: int) -> np.ndarray:
    """Divisors of the rotation frequencies of Llama 3.1's scaling, f32 [dims / 2]: 1 for short wavelengths, `factor` for long ones, and a
    weighted mean of both in between."""
    factor, low, high = (Decimal(rope.number(k)) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    context = Decimal(rope.number("original_max_position_embeddings"))
    if high <= low:
        raise rope._config.fail("rope_parameters.high_freq_factor", f"more than low_freq_factor {low}", high)
    two_pi = Decimal("6.283185307179586476925286766559005768394")
    out = []
    for i in range(dims // 2):
        wavelength = two_pi * power(rope.base, Decimal(2 * i) / dims)
        share = (context / wavelength - low) / (high - low)
        if share <= 0:
            out.append(float(factor))
        elif share >= 1:
            out.append(1.0)
        else:
            out.append(float(1 / ((1 - share) / factor + share)))
    return np.array(out, np.float32)
