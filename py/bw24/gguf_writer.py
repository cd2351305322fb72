"""Writing GGUF version 3: metadata of every value type, tensor bytes streamed, the file put in place only when it is complete.

Owns the byte layout on the way out and the atomic replacement. Refuses to know what the tensors hold: bytes go through unchanged.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from .errors import Bw24Error
from .gguf_types import (
    ARRAY,
    BOOL,
    INT32,
    INT64,
    INT_RANGES,
    KIND_IDS,
    KIND_NAMES,
    NUMPY_KINDS,
    STRING,
    TYPE_IDS,
    TYPES,
    UINT32,
    UINT64,
    quote,
)

Data = bytes | bytearray | memoryview | np.ndarray
FLOAT32 = KIND_IDS["f32"]
_FLOATS = {FLOAT32: "<f", KIND_IDS["f64"]: "<d"}


def _string(text: str | bytes) -> bytes:
    raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else bytes(text)
    return struct.pack("<Q", len(raw)) + raw


def _infer(key: str, value: Any) -> int:
    """Value type of a Python scalar: bool, string, f32, or the first of u32, i32, i64, u64 that holds the integer."""
    if isinstance(value, (bool, np.bool_)):
        return BOOL
    if isinstance(value, (str, bytes)):
        return STRING
    if isinstance(value, (float, np.floating)):
        return FLOAT32
    if isinstance(value, (int, np.integer)):
        for kind in (UINT32, INT32, INT64, UINT64):
            if INT_RANGES[kind][0] <= value <= INT_RANGES[kind][1]:
                return kind
        raise Bw24Error(f"key {quote(key)}: integer {value} does not fit 64 bits")
    raise Bw24Error(f"key {quote(key)}: cannot store a {type(value).__name__}")


def _infer_array(key: str, values: Any) -> int:
    if isinstance(values, np.ndarray):
        for kind, dtype in NUMPY_KINDS.items():
            if kind != BOOL and values.dtype == dtype:
                return kind
        if values.dtype == bool:
            return BOOL
        raise Bw24Error(f"key {quote(key)}: cannot store an array of {values.dtype}")
    kinds = {_infer(key, value) for value in values}
    if len(kinds) <= 1:
        return kinds.pop() if kinds else INT32
    if kinds <= set(INT_RANGES):
        low, high = min(values), max(values)
        for kind in (INT32, UINT32, INT64, UINT64):
            if INT_RANGES[kind][0] <= low and high <= INT_RANGES[kind][1]:
                return kind
    raise Bw24Error(f"key {quote(key)}: an array needs values of one type, found {', '.join(sorted(KIND_NAMES[k] for k in kinds))}")


def _scalar(key: str, kind: int, value: Any) -> bytes:
    if kind == STRING and isinstance(value, (str, bytes)):
        return _string(value)
    if kind == BOOL and isinstance(value, (bool, np.bool_)):
        return bytes([bool(value)])
    if kind in _FLOATS and isinstance(value, (int, float, np.integer, np.floating)):
        try:
            return struct.pack(_FLOATS[kind], value)
        except OverflowError:
            raise Bw24Error(f"key {quote(key)}: {value} does not fit {KIND_NAMES[kind]}") from None
    if kind in INT_RANGES and isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        low, high = INT_RANGES[kind]
        if not low <= value <= high:
            raise Bw24Error(f"key {quote(key)}: {value} does not fit {KIND_NAMES[kind]}")
        return int(value).to_bytes(NUMPY_KINDS[kind].itemsize, "little", signed=low < 0)
    raise Bw24Error(f"key {quote(key)}: expected a value of type {KIND_NAMES[kind]}, found {type(value).__name__}")


def _array(key: str, kind: int, values: Any) -> bytes:
    head = struct.pack("<IQ", kind, len(values))
    if isinstance(values, np.ndarray) and kind in NUMPY_KINDS and values.dtype in (NUMPY_KINDS[kind], bool):
        return head + values.astype(NUMPY_KINDS[kind]).tobytes()
    return head + b"".join([_scalar(key, kind, value) for value in values])


def _check_name(noun: str, name: str, limit: int) -> None:
    size = len(name.encode("utf-8", "surrogateescape"))
    if not 1 <= size <= limit or any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) <= 0xDFFF for c in name):
        raise Bw24Error(f"{noun} {quote(name)}: expected 1 to {limit} bytes without control characters, found {size}")


class GGUFWriter:
    """Builds a GGUF file: `with GGUFWriter(path) as w: w.add(...); w.add_tensor(...)`. A clean exit writes it; an exception leaves nothing.

    The bytes go to a temporary file beside `path`, which replaces `path` once complete and flushed.
    """

    def __init__(self, path: str | Path, alignment: int = 32):
        if not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise Bw24Error(f"alignment: expected a power of two up to {1 << 20}, found {alignment}")
        self.path = Path(path)
        self.alignment = alignment
        self._records: dict[str, bytes] = {}
        self._tensors: dict[str, tuple[bytes, int, Any]] = {}  # name -> (name, dimensions and type; byte count; data)
        self._done = False
        if alignment != 32:
            self.add("general.alignment", alignment, "u32")

    def add(self, key: str, value: Any, kind: str | None = None) -> None:
        """Add a metadata key. `kind` is one of u8 i8 u16 i16 u32 i32 u64 i64 f32 f64 bool string, for lists the elements' kind.

        Without `kind` it is inferred (float: f32; int: u32 if it fits). Lists, tuples and 1-D numpy arrays become arrays.
        """
        _check_name("key", key, 65535)
        if key in self._records:
            raise Bw24Error(f"key {quote(key)}: given twice")
        if kind is not None and KIND_IDS.get(kind, ARRAY) == ARRAY:
            raise Bw24Error(f"key {quote(key)}: unknown value type {quote(kind)}")
        if isinstance(value, (list, tuple, np.ndarray)):
            element = KIND_IDS[kind] if kind else _infer_array(key, value)
            record = struct.pack("<I", ARRAY) + _array(key, element, value)
        else:
            scalar = KIND_IDS[kind] if kind else _infer(key, value)
            record = struct.pack("<I", scalar) + _scalar(key, scalar, value)
        self._records[key] = _string(key) + record

    def add_tensor(self, name: str, type_name: str, shape: tuple[int, ...], data: Data | Callable[[], Iterable[Data]]) -> None:
        """Add a tensor: shape in file order (ne[0] first), data as a bytes-like object or a callable that returns an iterable of them.

        A callable runs only while the file is written, so that large tensors need never be in memory whole.
        """
        _check_name("tensor", name, 63)
        if name in self._tensors:
            raise Bw24Error(f"tensor {quote(name)}: given twice")
        if type_name not in TYPE_IDS:
            raise Bw24Error(f"tensor {quote(name)}: unknown type {quote(type_name)}")
        if not 1 <= len(shape) <= 4 or min(shape) < 1:
            raise Bw24Error(f"tensor {quote(name)}: expected 1 to 4 dimensions of at least 1, found {list(shape)}")
        type_id = TYPE_IDS[type_name]
        _, block, size = TYPES[type_id]
        if shape[0] % block:
            raise Bw24Error(f"tensor {quote(name)}: type {type_name} needs rows of a multiple of {block} values, found {shape[0]}")
        nbytes = shape[0] // block * size
        for extent in shape[1:]:
            nbytes *= extent
        if not callable(data):
            data = memoryview(data).cast("B")
            if data.nbytes != nbytes:
                raise Bw24Error(f"tensor {quote(name)}: {type_name} {list(shape)} needs {nbytes} bytes, found {data.nbytes}")
        info = _string(name) + struct.pack(f"<I{len(shape)}qI", len(shape), *shape, type_id)
        self._tensors[name] = (info, nbytes, data)

    def write(self) -> None:
        """Write the file and put it in place; called by a clean exit of the context, or once by hand."""
        if self._done:
            raise Bw24Error(f"{quote(str(self.path), 4096)}: already written")
        self._done = True
        with atomic_file(self.path) as out:
            self._write_header(out)
            for name, (_, nbytes, data) in self._tensors.items():
                written = 0
                for chunk in data() if callable(data) else (data,):
                    written += memoryview(chunk).nbytes
                    if written > nbytes:
                        break
                    out.write(chunk)
                if written != nbytes:
                    found = f"{written} or more" if written > nbytes else written
                    raise Bw24Error(f"tensor {quote(name)}: expected {nbytes} bytes from its source, found {found}")
                out.write(bytes(-nbytes % self.alignment))

    def _write_header(self, out: BinaryIO) -> None:
        size = out.write(b"GGUF" + struct.pack("<IQQ", 3, len(self._tensors), len(self._records)))
        for record in self._records.values():
            size += out.write(record)
        offset = 0
        for info, nbytes, _ in self._tensors.values():
            size += out.write(info + struct.pack("<Q", offset))
            offset += nbytes + -nbytes % self.alignment
        out.write(bytes(-size % self.alignment))

    def __enter__(self) -> GGUFWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None and not self._done:
            self.write()


class atomic_file:
    """Context manager over a binary file that appears at `path` only when the block ends without an exception."""

    def __init__(self, path: Path):
        self.path = path
        self.temporary = path.with_name(f".{path.name[:200]}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        self._file: BinaryIO | None = None

    def __enter__(self) -> BinaryIO:
        try:
            self._file = open(self.temporary, "xb")  # the permissions follow the umask, as for any file
        except OSError as error:
            raise Bw24Error(f"{quote(str(self.path), 4096)}: cannot write: {error.strerror}") from None
        return self._file

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        failure: OSError | None = error if isinstance(error, OSError) else None
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                os.replace(self.temporary, self.path)
                return
        except OSError as late:
            failure = late
        finally:
            try:
                self._file.close()  # after a failed flush this fails again: the file is to be removed anyway
            except OSError:
                pass
            self.temporary.unlink(missing_ok=True)
        if failure is not None:
            raise Bw24Error(f"{quote(str(self.path), 4096)}: cannot write: {failure.strerror}") from None
