"""The list builder: architectures append ops to it, the library reads its text. Owns the text form and the file:line of every append; the set of
ops and their operands come from the library. Knows no architecture and no weight's bytes."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from . import abi
from .errors import Bw24Error
from .gguf import get

_REQUIRED = object()


class Params:
    """Typed reading of `<arch>.*` metadata. Every failure is a Bw24Error that names the key and the value."""

    def __init__(self, arch: str, metadata: Mapping[str, Any]):
        self.arch, self.metadata = arch, metadata

    def _get(self, key: str, kind: type, default: Any) -> Any:
        full = f"{self.arch}.{key}"
        return get(self.metadata, full, kind) if default is _REQUIRED else get(self.metadata, full, kind, default)

    def int(self, key: str, default: Any = _REQUIRED, *, low: int = 1, high: int = 1 << 24) -> int:
        value = self._get(key, int, default)
        if value is not None and not low <= value <= high:
            raise Bw24Error(f"{self.arch}.{key}: expected {low}..{high}, found {value}")
        return value

    def ints(self, key: str, n: int, default: Any = _REQUIRED, *, low: int = 1, high: int = 1 << 24) -> list[int]:
        """One value for each of n layers: the key holds a list or one number for all."""
        value = self.metadata.get(f"{self.arch}.{key}")
        if not isinstance(value, (list, np.ndarray)):
            return [self.int(key, default, low=low, high=high)] * n
        values = [int(v) for v in value]
        if len(values) < n or not all(low <= v <= high for v in values[:n]):
            raise Bw24Error(f"{self.arch}.{key}: expected {n} values of {low}..{high}, found {values[:64]}")
        return values[:n]

    def float(self, key: str, default: Any = _REQUIRED, *, low: float = 0.0, high: float = 1e12) -> float:
        value = self._get(key, float, default)
        if value is not None and not low <= value <= high:  # NaN fails too
            raise Bw24Error(f"{self.arch}.{key}: expected {low:g}..{high:g}, found {value}")
        return value

    def bool(self, key: str, default: Any = _REQUIRED) -> bool:
        return self._get(key, bool, default)

    def list(self, key: str, default: Any = _REQUIRED) -> list[Any]:
        return self._get(key, list, default)

    def str(self, key: str, default: Any = _REQUIRED) -> str:
        return self._get(key, str, default)

    def has(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.metadata


class ListBuilder:
    """Collects a list's text. `b.linear(y="q", x="h", w="blk.0.attn_q.weight")` appends the op LINEAR; None operands are left out."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]):
        self.shapes = shapes  # tensor name -> ne, ne[0] = columns
        self.bufs: dict[str, int] = {}
        self.kvs: dict[str, tuple[int, int, int]] = {}  # name -> (heads, dim, window)
        self.shared: set[str] = set()  # caches whose keys are their values
        self.borrowed: dict[str, tuple[int, int, int]] = {}  # caches of the model's first list that this one reads
        self.states: dict[str, int] = {}  # name -> floats
        self.spare: tuple[str, int] | None = None  # a tensor of rows after those of the head, and how many
        self.pre_norm = False  # hidden rows are handed on from before the last norm
        self._lines: list[str] = []

    def has(self, tensor: str) -> bool:
        return tensor in self.shapes

    def rows(self, tensor: str) -> int:
        """ne[1] of a tensor: its number of output rows. Raises Bw24Error if the file lacks it."""
        if tensor not in self.shapes:
            raise Bw24Error(f"tensor {tensor} is missing")
        ne = self.shapes[tensor]
        return ne[1] if len(ne) > 1 else 1

    def size(self, tensor: str) -> int:
        """Number of values of a tensor, 0 if the file lacks it."""
        return math.prod(self.shapes[tensor]) if tensor in self.shapes else 0

    def buf(self, name: str, width: int) -> str:
        """Declares a buffer of `width` values a row; declaring it again with the same width is the same buffer."""
        if self.bufs.setdefault(name, width) != width:
            raise Bw24Error(f"buffer {name}: declared {self.bufs[name]} wide, now {width}")
        return name

    def kv(self, name: str, heads: int, dim: int, window: int = 0, shared: bool = False) -> str:
        """Declares the KV cache of one layer. `shared`: its keys are its values, kept once."""
        self.kvs[name] = (heads, dim, window)
        if shared:
            self.shared.add(name)
        return name

    def borrow(self, name: str, heads: int, dim: int, window: int = 0) -> str:
        """Declares a cache of the model's first list, for reading."""
        self.borrowed[name] = (heads, dim, window)
        return name

    def tensor(self, name: str) -> str:
        """A tensor's name in the library."""
        return name

    def state(self, name: str, floats: int) -> str:
        """Declares what one CONV or DELTA carries from token to token."""
        self.states[name] = floats
        return name

    def __getattr__(self, name: str):
        op = name.upper()
        if name.startswith("_") or op not in abi.ops():
            raise AttributeError(f"the library has no op {op}; it has {', '.join(abi.ops())}")

        def append(**operands: Any) -> str:
            frame = sys._getframe(1)
            where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            fields = [f"{k}={self._value(v)}" for k, v in operands.items() if v is not None]
            self._lines.append(f"{op} {' '.join(fields)} @ {where}")
            return str(operands.get("y", ""))

        return append

    def _value(self, v: Any) -> str:
        if isinstance(v, str) and v in self.shapes:
            return self.tensor(v)
        return repr(v) if isinstance(v, float) else str(v)

    def missing(self) -> str | None:
        """The first tensor that an op names and that is not there."""
        known = {*(self.tensor(n) for n in self.shapes), *(self.spare or ())[:1]}
        for line in self._lines:
            op, *fields = line.split(" @ ")[0].split(" ")
            kinds = dict(f.split(":", 1) for f in abi.ops()[op][0].split())
            for key, _, value in (f.partition("=") for f in fields):
                if kinds[key].startswith("w") and value not in known:
                    return value
        return None

    def text(self) -> str:
        """The list as the library reads it."""
        head = [f"BUF {n} {w}" for n, w in self.bufs.items()]
        head += [f"KV {n} heads={h} dim={d} window={w}{' values=keys' * (n in self.shared)}" for n, (h, d, w) in self.kvs.items()]
        head += [f"KV {n} heads={h} dim={d} window={w} of=trunk" for n, (h, d, w) in self.borrowed.items()]
        head += [f"STATE {n} {size}" for n, size in self.states.items()]
        return "\n".join(head + self._lines) + "\n"
