"""Kinds of JSON values: each checks one and describes itself for the API page. Owns the wording of refusals; knows no endpoint.

The rule of all of them: a value is honoured or refused with the name of its field. null counts as absent.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ApiError, bad

SHOWN = 60  # characters of a refused value that the message repeats


@dataclass(frozen=True)
class Context:
    """How unknown keys are met: refused, or reported once each through `warn`."""

    lenient: bool = False
    warn: Callable[[str], None] = lambda key: None


STRICT = Context()


def show(value: Any) -> str:
    """A value as the message repeats it: short, on one line."""
    text = repr(value) if not isinstance(value, (dict, list)) else {dict: "an object", list: "an array"}[type(value)]
    text = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text[:SHOWN + 20])
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


class Kind:
    """Base: any JSON value."""

    about = ""
    required = False
    default: Any = None

    def check(self, value: Any, path: str, context: Context = STRICT) -> Any:
        """The value, in normal form. Raises ApiError 400 naming `path`."""
        return value

    def schema(self) -> dict[str, Any]:
        """JSON schema of the values that pass."""
        return {}

    def need(self) -> Kind:
        """Marks the field as required."""
        self.required = True
        return self

    def says(self, about: str) -> Kind:
        """A sentence for the API page."""
        self.about = about
        return self


class Bool(Kind):
    def check(self, value, path, context=STRICT):
        if not isinstance(value, bool):
            raise bad(path, f"expected true or false, found {show(value)}")
        return value

    def schema(self):
        return {"type": "boolean"}


class Int(Kind):
    def __init__(self, low: int, high: int):
        self.low, self.high = low, high

    def check(self, value, path, context=STRICT):
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not self.low <= value <= self.high:
            raise bad(path, f"expected a whole number {self.low}..{self.high}, found {show(value)}")
        return value

    def schema(self):
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


class Number(Kind):
    def __init__(self, low: float, high: float):
        self.low, self.high = low, high

    def check(self, value, path, context=STRICT):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not self.low <= value <= self.high or math.isnan(value):
            raise bad(path, f"expected a number {self.low}..{self.high}, found {show(value)}")
        return float(value)

    def schema(self):
        return {"type": "number", "minimum": self.low, "maximum": self.high}


class Text(Kind):
    def __init__(self, low: int = 0, high: int = 1 << 30):
        self.low, self.high = low, high

    def check(self, value, path, context=STRICT):
        if not isinstance(value, str):
            raise bad(path, f"expected a string, found {show(value)}")
        if not self.low <= len(value) <= self.high:
            raise bad(path, f"expected {self.low}..{self.high} characters, found {len(value)}")
        if any("\ud800" <= c <= "\udfff" for c in value):
            raise bad(path, "expected valid Unicode, found a lone surrogate")
        return value

    def schema(self):
        out: dict[str, Any] = {"type": "string"}
        return out | ({"minLength": self.low} if self.low else {}) | ({"maxLength": self.high} if self.high < 1 << 30 else {})


class Choice(Kind):
    """One of some strings; `refused` maps further known ones to why they cannot be had."""

    def __init__(self, *values: str, refused: Mapping[str, str] | None = None):
        self.values, self.refused = values, refused or {}

    def check(self, value, path, context=STRICT):
        if isinstance(value, str) and value in self.refused:
            raise bad(path, f"'{value}': {self.refused[value]}", "unsupported_value")
        if value not in self.values or not isinstance(value, str):
            raise bad(path, f"expected one of {', '.join(self.values)}, found {show(value)}")
        return value

    def schema(self):
        return {"type": "string", "enum": list(self.values)}


class Only(Kind):
    """A field whose one value is what the server does anyway."""

    def __init__(self, *values: Any, why: str):
        self.values, self.why = values, why

    def check(self, value, path, context=STRICT):
        if not any(type(value) is type(v) and value == v for v in self.values):
            raise bad(path, f"{show(value)}: {self.why}", "unsupported_value")
        return value

    def schema(self):
        return {"enum": list(self.values)}


class Refused(Kind):
    """A known field that cannot be honoured with any value."""

    def __init__(self, why: str):
        self.why = why

    def check(self, value, path, context=STRICT):
        raise bad(path, self.why, "unsupported_parameter")


class List(Kind):
    def __init__(self, item: Kind, low: int = 0, high: int = 1 << 20):
        self.item, self.low, self.high = item, low, high

    def check(self, value, path, context=STRICT):
        if not isinstance(value, list):
            raise bad(path, f"expected an array, found {show(value)}")
        if not self.low <= len(value) <= self.high:
            raise bad(path, f"expected {self.low}..{self.high} items, found {len(value)}")
        return [self.item.check(v, f"{path}.{i}", context) for i, v in enumerate(value)]

    def schema(self):
        return {"type": "array", "items": self.item.schema(), "minItems": self.low, "maxItems": self.high}


class Either(Kind):
    """The first kind that takes the value's JSON type: `str`, `list` ..."""

    def __init__(self, kinds: Mapping[type | tuple[type, ...], Kind], expected: str):
        self.kinds, self.expected = kinds, expected

    def check(self, value, path, context=STRICT):
        for types, kind in self.kinds.items():
            if isinstance(value, types) and not (isinstance(value, bool) and types is not bool):
                return kind.check(value, path, context)
        raise bad(path, f"expected {self.expected}, found {show(value)}")

    def schema(self):
        return {"anyOf": [kind.schema() for kind in self.kinds.values()]}


class Free(Kind):
    """An object of the caller's own making, bounded in depth."""

    def check(self, value, path, context=STRICT):
        if not isinstance(value, dict):
            raise bad(path, f"expected an object, found {show(value)}")
        _bounded(value, path)
        return value

    def schema(self):
        return {"type": "object"}


def _bounded(value: Any, path: str, depth: int = 0) -> None:
    if depth > 64:
        raise bad(path, "nested deeper than 64 levels")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _bounded(item, path, depth + 1)


class Dict(Kind):
    """An object with string keys and values of one kind. `keys`: pattern of the keys, for the API page; `item` checks them by the path."""

    def __init__(self, item: Kind, high: int = 4096, keys: str = ""):
        self.item, self.high, self.keys = item, high, keys

    def check(self, value, path, context=STRICT):
        if not isinstance(value, dict):
            raise bad(path, f"expected an object, found {show(value)}")
        if len(value) > self.high:
            raise bad(path, f"expected at most {self.high} entries, found {len(value)}")
        return {k: self.item.check(v, f"{path}.{k[:40]}", context) for k, v in value.items()}

    def schema(self):
        names = {"propertyNames": {"pattern": self.keys}} if self.keys else {}
        return {"type": "object", "additionalProperties": self.item.schema(), **names}


class Record(Kind):
    """An object with known fields. Result: the fields given (or with a default), null left out."""

    def __init__(self, fields: Mapping[str, Kind]):
        self.fields = fields

    def check(self, value, path, context=STRICT):
        if not isinstance(value, dict):
            raise bad(path or "body", f"expected an object, found {show(value)}")
        dot = f"{path}." if path else ""
        for key in value:
            if key not in self.fields:
                unknown(dot + key, key, self.fields, context)
        out = {}
        for key, kind in self.fields.items():
            found = value.get(key)
            if found is not None:
                out[key] = kind.check(found, dot + key, context)
            elif kind.required:
                raise bad(dot + key, "the field is missing", "missing_required_parameter")
            elif kind.default is not None:
                out[key] = kind.default
        return out

    def schema(self):
        shown = {k: v for k, v in self.fields.items() if not isinstance(v, Refused)}
        out = {"type": "object", "additionalProperties": False, "properties": {k: _described(v) for k, v in shown.items()}}
        needed = [k for k, v in shown.items() if v.required]
        return out | ({"required": needed} if needed else {})


def _described(kind: Kind) -> dict[str, Any]:
    """The schema of a field: null counts as absent where it may be."""
    values = kind.schema() if kind.required else {"anyOf": [kind.schema(), {"type": "null"}]}
    return {**values, **({"description": kind.about} if kind.about else {})}


class Tagged(Kind):
    """Objects told apart by their `type`; `refused` maps further known types to why they cannot be had."""

    def __init__(self, kinds: Mapping[str, Record], refused: Mapping[str, str] | None = None, *, key: str = "type",
                 default: str | None = None):
        self.kinds, self.refused, self.key, self.standard = kinds, refused or {}, key, default

    def check(self, value, path, context=STRICT):
        if not isinstance(value, dict):
            raise bad(path, f"expected an object, found {show(value)}")
        tag = value.get(self.key, self.standard)
        where = f"{path}.{self.key}"
        if isinstance(tag, str) and tag in self.refused:
            raise bad(where, f"'{tag}': {self.refused[tag]}", "unsupported_value")
        if not isinstance(tag, str) or tag not in self.kinds:
            raise bad(where, f"expected one of {', '.join(self.kinds)}, found {show(tag)}")
        return {self.key: tag} | self.kinds[tag].check({k: v for k, v in value.items() if k != self.key}, path, context)

    def schema(self):
        out = []
        for tag, kind in self.kinds.items():
            one = kind.schema()
            one["properties"] = {self.key: {"enum": [tag]}} | one["properties"]
            if tag != self.standard:
                one["required"] = [self.key, *one.get("required", [])]
            out.append(one)
        return {"anyOf": out}


def unknown(path: str, key: str, known: Sequence[str] | Mapping[str, Any], context: Context) -> None:
    """Refuse an unknown key with the nearest known name, or report it."""
    if context.lenient:
        context.warn(path)
        return
    near = difflib.get_close_matches(key[:80], [k for k in known if not (isinstance(known, Mapping) and isinstance(known[k], Refused))], 1)
    name = path if len(path) <= 100 else path[:100] + "..."
    name = "".join(c if c.isprintable() else "?" for c in name)
    raise ApiError(400, f"{name}: unknown field" + (f"; did you mean {near[0]}?" if near else ""), param=name, kind="unknown_parameter")
