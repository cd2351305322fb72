"""Sizes as people write them. Knows no setting that has one."""

from __future__ import annotations

import re

from .errors import Bw24Error

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: str, what: str = "size") -> int:
    """'24g' -> bytes; k, m, g, t are powers of 1024. Raises Bw24Error."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if not match:
        raise Bw24Error(f"{what}: expected bytes such as 512m, 24g or 1.5g, found {text[:80]!r}")
    return int(float(match[1]) * UNITS[match[2]])
