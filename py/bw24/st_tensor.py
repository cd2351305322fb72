"""A model's tensors assembled from a checkpoint's weights: stacks of experts, reordered rows and columns, transformed vectors; and their bytes
in a storage type.

Owns the assembly and the encoding, in pieces of bounded size on all cores. Refuses to know names: which weights make which tensor is decided
by the architecture's mapping.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import abi
from .errors import Bw24Error
from .gguf_types import TYPE_IDS, TYPES
from .st_quant import FLOATS, Float, Source, groups_of

LARGE = 1_000_000  # values; float matrices with more are read as Q8_0
CHUNK = 1 << 22  # values encoded at a time by one thread
FP4_TYPES = {"nvfp4": "NVFP4", "mxfp4": "MXFP4"}


@dataclass(frozen=True)
class Piece:
    """Some rows of a weight, in order; `rows` None means all."""

    source: Source
    rows: np.ndarray | None = None

    @property
    def count(self) -> int:
        return self.source.rows if self.rows is None else len(self.rows)

    def index(self, lo: int, hi: int) -> slice | np.ndarray:
        return slice(lo, hi) if self.rows is None else self.rows[lo:hi]


@dataclass(frozen=True)
class Target:
    """One tensor of the model: pieces stacked by rows.

    ne: GGUF order. columns: an order of the columns or None. change: applied to the f32 values. dense: always F32 (vectors, norms, routers).
    """

    name: str
    ne: tuple[int, ...]
    pieces: tuple[Piece, ...]
    columns: np.ndarray | None = None
    change: Callable[[np.ndarray], np.ndarray] | None = None
    dense: bool = False

    @property
    def values(self) -> int:
        return int(np.prod(self.ne, dtype=np.int64))

    def f32(self, piece: Piece, lo: int, hi: int) -> np.ndarray:
        """Rows lo..hi of a piece, f32, reordered and transformed."""
        out = piece.source.f32(piece.index(lo, hi))
        if self.columns is not None:
            out = out[:, self.columns]
        return out if self.change is None else self.change(out)

    def fp4(self) -> str | None:
        """NVFP4 or MXFP4 where the bytes can move into such blocks unchanged, else None."""
        kinds = {p.source.kind for p in self.pieces}
        if len(kinds) != 1 or self.change is not None or not kinds <= FP4_TYPES.keys():
            return None
        name = FP4_TYPES[kinds.pop()]
        if self.ne[0] % TYPES[TYPE_IDS[name]][1]:
            return None
        if self.columns is not None and groups_of(self.columns, self.pieces[0].source.group) is None:
            return None
        if name == "NVFP4" and len(self.pieces) != (self.ne[2] if len(self.ne) > 2 else 1):
            return None  # a scale for each matrix is what the type can carry
        return name

    def float_type(self) -> str:
        """The float type that holds the weight's values: its own, or F32 for FP8, FP4 and mixtures."""
        kinds = {p.source.dtype for p in self.pieces}
        return kinds.pop() if len(kinds) == 1 and self.change is None and not self.dense else "F32"


def loaded_type(t: Target, weights: str) -> str:
    """Storage type of a tensor read from a directory: 4-bit blocks as they are; large float and FP8 matrices Q8_0 unless weights = "keep"."""
    if t.dense:
        return "F32"
    if (name := t.fp4()) is not None:
        return name
    if weights == "auto" and t.values > LARGE and t.ne[0] % 32 == 0:
        return "Q8_0"
    return t.float_type()


def nbytes(t: Target, type_name: str) -> int:
    _, block, size = TYPES[TYPE_IDS[type_name]]
    return t.values // block * size


# ---- bytes


def view(t: Target, type_name: str) -> memoryview | None:
    """The tensor's bytes over the file mapping, where they are there as they should be; else None."""
    if len(t.pieces) != 1 or t.columns is not None or t.change is not None:
        return None
    source, rows = t.pieces[0].source, t.pieces[0].rows
    if not isinstance(source, Float) or source.dtype != type_name:
        return None
    first = 0 if rows is None else int(rows[0])
    if rows is not None and not np.array_equal(rows, np.arange(first, first + len(rows))):
        return None
    stored = source.raw()
    width = source.columns * FLOATS[source.dtype].itemsize
    return None if stored is None else stored[first * width : (first + t.pieces[0].count) * width]


def place(p: Piece, t: Target, type_name: str) -> tuple[Any, int] | None:
    """(entry, offset in its file) of a piece that is one matrix, stored as it is used; else None."""
    source = p.source
    if t.columns is not None or t.change is not None or not isinstance(source, Float) or source.dtype != type_name:
        return None
    first = 0 if p.rows is None else int(p.rows[0])
    if p.rows is not None and not np.array_equal(p.rows, np.arange(first, first + len(p.rows))):
        return None
    if len(t.pieces) != (t.ne[2] if len(t.ne) > 2 else 1) or p.count != t.ne[1]:
        return None
    return source.entry, source.entry.offset + first * source.columns * FLOATS[source.dtype].itemsize


def chunks(t: Target, type_name: str) -> Iterator[np.ndarray]:
    """The tensor's bytes in `type_name`, in order, u8, a few million values at a time."""
    step = max(1, CHUNK // t.pieces[0].source.columns)
    jobs = [(p, lo, min(lo + step, p.count)) for p in t.pieces for lo in range(0, p.count, step)]
    encode = _encoder(t, type_name)
    workers = min(len(jobs), os.cpu_count() or 1, 16)
    if workers < 2:
        yield from (encode(*job) for job in jobs)
        return
    with ThreadPoolExecutor(workers) as pool:
        for at in range(0, len(jobs), 2 * workers):  # bounds what is finished but not yet taken
            yield from pool.map(lambda job: encode(*job), jobs[at : at + 2 * workers])


def array(t: Target, type_name: str) -> np.ndarray:
    """All bytes of the tensor in `type_name`, u8."""
    out, at = np.empty(nbytes(t, type_name), np.uint8), 0
    for part in chunks(t, type_name):
        out[at : at + part.size] = part
        at += part.size
    return out


def _encoder(t: Target, type_name: str) -> Callable[[Piece, int, int], np.ndarray]:
    if type_name == t.fp4():
        return lambda p, lo, hi: p.source.blocks(p.index(lo, hi), t.columns).reshape(-1)
    if type_name in FLOATS and type_name == t.float_type() and all(isinstance(p.source, Float) for p in t.pieces):
        return lambda p, lo, hi: _stored(t, p, lo, hi, type_name)
    kind = abi.type_id(type_name)
    return lambda p, lo, hi: quantize(t.f32(p, lo, hi), kind, t.name)


def _stored(t: Target, p: Piece, lo: int, hi: int, type_name: str) -> np.ndarray:
    """Rows in the type they are stored in; F32 where a piece of a dense tensor has another."""
    if p.source.dtype != type_name or t.change is not None:
        return np.ascontiguousarray(t.f32(p, lo, hi)).view(np.uint8).reshape(-1)
    rows = p.source.stored()[p.index(lo, hi)]
    rows = rows if t.columns is None else rows[:, t.columns]
    return np.ascontiguousarray(rows).view(np.uint8).reshape(-1)


def quantize(values: np.ndarray, type_id: int, name: str) -> np.ndarray:
    """f32 values encoded by the library, u8. Refuses values that are not finite, or too large for the type."""
    values = np.ascontiguousarray(values, np.float32)
    limit = 65504.0 if type_id == TYPE_IDS["F16"] else 3.4e38
    largest = float(np.abs(values).max(initial=0.0))
    if not largest <= limit:
        raise Bw24Error(f"tensor {name}: a value of {largest} does not fit {TYPES[type_id][0]}")
    _, block, size = TYPES[type_id]
    out = np.empty(values.size // block * size, np.uint8)
    source = abi.ffi.cast("const float *", abi.ffi.from_buffer(values))
    abi.check(abi.lib().bw24_quantize(type_id, source, abi.ffi.cast("void *", abi.ffi.from_buffer(out)), values.size))
    return out


def sidecars(t: Target) -> dict[str, np.ndarray]:
    """Scales that go beside an NVFP4 tensor: name -> f32, one value a matrix."""
    if t.fp4() != "NVFP4":
        return {}
    base = t.name.removesuffix(".weight")
    out = {base + ".scale": np.array([p.source.scale for p in t.pieces], np.float32)}
    inputs = [p.source.input_scale for p in t.pieces]
    if all(v is not None for v in inputs):
        out[base + ".input_scale"] = np.array(inputs, np.float32)
    return out

