"""Strings that a JSON schema bounds (pattern, format, lengths), as rules of Lark for formats that write strings without quotes and escapes.
Owns the translation of ECMA-262 patterns and the shapes of `format`; knows no tool and no matcher, which refuses lookaround and backreferences.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .errors import Bw24Error

ANYTHING = "(?s:.*)"
BOUNDS = ("pattern", "format", "minLength", "maxLength")
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = ("(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
         f"|{_LEAP}-02-29)")
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_CLOCK}:[0-5][0-9](?:\\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = f"{_LABEL}(?:\\.{_LABEL})*"
_LOCAL = "[A-Za-z0-9!#$%&'*+/=?^_{|}~-]+"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_N = "[0-9]{1,9}"
_HOURS = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DAYS = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_HEX = "[0-9A-Fa-f]"
_GROUP = f"{_HEX}{{1,4}}"
_IPV6 = "|".join([f"(?:{_GROUP}:){{7}}{_GROUP}", f"(?:{_GROUP}:){{1,7}}:", f":(?::{_GROUP}){{1,7}}", "::",
                  *(f"(?:{_GROUP}:){{1,{n}}}(?::{_GROUP}){{1,{7 - n}}}" for n in range(1, 7))])
FORMATS = {  # RFC 3339, 5321, 1123, 2673, 4291, 4122, 3986; ISO 8601 durations
    "date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}", "duration": f"P(?:{_N}W|{_DAYS}(?:{_HOURS})?|{_HOURS})",
    "email": f"{_LOCAL}(?:\\.{_LOCAL})*@{_HOST}", "hostname": _HOST, "ipv4": f"(?:{_BYTE}\\.){{3}}{_BYTE}", "ipv6": f"(?:{_IPV6})",
    "uuid": f"{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}",
    "uri": f"[A-Za-z][A-Za-z0-9+.-]*:(?:[A-Za-z0-9._~:/?#@!$&'()*+,;=-]|%{_HEX}{{2}})+",
}
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "s": " \\t\\n\\r\\f\\u{b}\\u{a0}"}  # ASCII digits and letters alone, as ECMA-262 has them


def bounded(schema: Mapping[str, Any], end: str, escaped: str) -> str | None:
    """What follows a string's opening: a text that meets the schema and does not hold `end`, and that mark, for a lazy rule; None where the schema
    bounds nothing. escaped: the mark as part of a regular expression. Raises Bw24Error."""
    if not any(key in schema for key in BOUNDS):
        return None
    parts = []
    if "pattern" in schema:
        if not isinstance(schema["pattern"], str):
            raise Bw24Error(f"pattern: expected text, found {str(schema['pattern'])[:80]}")
        parts.append(whole(schema["pattern"]))
    if "format" in schema:
        if schema["format"] not in FORMATS:
            raise Bw24Error(f"format '{str(schema['format'])[:80]}': not known, there are {', '.join(FORMATS)}")
        parts.append(FORMATS[schema["format"]])
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    if any(bound != "" and (not isinstance(bound, int) or isinstance(bound, bool) or bound < 0) for bound in (low, high)):
        raise Bw24Error(f"minLength, maxLength: expected whole numbers, found {str(low)[:40]} and {str(high)[:40]}")
    if low or high != "":
        parts.append(f"(?s:.{{{low},{high}}})")
    return f"({' & '.join(f'/{_delimited(part)}/' for part in parts)} & ~/{ANYTHING}{escaped}{ANYTHING}/) {json.dumps(end, ensure_ascii=False)}"


def whole(pattern: str) -> str:
    """An ECMA-262 pattern, which may be found anywhere in a text, as an expression of the whole text."""
    out = []
    for branch in _branches(pattern):
        begins, ends = branch[:1] == ["^"], branch[-1:] == ["$"]
        body = "".join(branch[begins : len(branch) - ends])
        out.append(("" if begins else ANYTHING) + f"(?:{body})" + ("" if ends else ANYTHING))
    return "|".join(out)


def _branches(pattern: str) -> list[list[str]]:
    """The alternatives outside all groups, each as its symbols: a character or an escape, translated."""
    out: list[list[str]] = [[]]
    depth, inside = 0, False
    for symbol in re.findall(r"\\u[0-9A-Fa-f]{4}|\\x[0-9A-Fa-f]{2}|\\c[A-Za-z]|\\.|.", pattern, re.DOTALL):
        if symbol == "|" and not depth and not inside:
            out.append([])
            continue
        depth += (symbol == "(") - (symbol == ")") if not inside else 0
        out[-1].append("\\[" if inside and symbol == "[" else _translated(symbol, inside))  # a bracket in a class is itself
        inside = symbol == "[" or inside if symbol != "]" else False
    return out


def _translated(symbol: str, inside: bool) -> str:
    kind = symbol[1:2] if symbol[0] == "\\" else ""
    if kind in _CLASSES and kind:
        return _CLASSES[kind] if inside else f"[{_CLASSES[kind]}]"
    if kind and kind.lower() in _CLASSES and not inside:
        return f"[^{_CLASSES[kind.lower()]}]"
    if kind in ("u", "x") and len(symbol) > 2:
        return f"\\u{{{symbol[2:]}}}"
    return "/" if symbol == "\\/" else symbol


def _delimited(expression: str) -> str:
    """An expression between slashes: those inside escaped, line ends written out."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", expression).replace("\n", "\\n").replace("\r", "\\r")
