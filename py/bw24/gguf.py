"""GGUF files: header parsing over any byte source, split files, tensor bytes over a mapping.

Owns the container format (versions 2 and 3) and every check a reader can make without knowing models: counts, lengths, types, shapes,
offsets. Refuses to know what a key or a tensor means; vocabulary sizes and expected shapes are checked where the model is described.
Nothing is allocated before its size is checked against the bytes that are left.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .errors import Bw24Error
from .gguf_types import ARRAY, BOOL, KIND_NAMES, NUMPY_KINDS, STRING, TYPES, UINT32, quote
from .gguf_writer import GGUFWriter

__all__ = [
    "TYPES", "ByteSource", "FileSource", "GGUFFile", "GGUFWriter", "Header", "TensorInfo", "get", "merge_parts", "open_gguf",
    "parse_header", "quote", "split_siblings",
]

MAGIC = b"GGUF"
MAX_KEY = 65535  # bytes, from the format
MAX_STRING = 64 << 20  # bytes of one string value; the largest seen in the wild, a chat template, is below 100 KB
MAX_ARRAY = 1 << 28  # bytes of one numeric array
MAX_STRINGS = 1 << 24  # entries of one string array; the largest vocabularies have about 2^19 merges
MAX_NAME = 63  # bytes of a tensor name, from the format
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20
SMALL_ARRAY = 4096  # numeric arrays up to here come back as lists, longer ones as numpy arrays
WINDOW = 1 << 20  # bytes fetched at a time while the header is read
SPLIT_NAME = re.compile(r"^(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")

_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}
_UNPACK = {kind: (struct.Struct(code).unpack_from, struct.calcsize(code)) for kind, code in _SCALARS.items()}


class ByteSource(Protocol):
    """Random access to a file's bytes, wherever they are. `size` is the whole file's, in bytes."""

    size: int

    def read(self, offset: int, length: int) -> bytes:
        """Bytes [offset, offset+length), fewer only where the file ends."""
        ...


class FileSource:
    """A regular file read with pread: a file that shrinks meanwhile gives a short read, not a signal."""

    def __init__(self, path: Path):
        self.path = path
        try:
            # O_NONBLOCK: opening a FIFO must not wait for a writer; it changes nothing for regular files
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise Bw24Error(f"{quote(str(path), 4096)}: cannot open: {getattr(error, 'strerror', None) or error}") from None
        info = os.fstat(self.fd)
        if not stat.S_ISREG(info.st_mode):
            self.close()
            found = "directory" if stat.S_ISDIR(info.st_mode) else "device"
            raise Bw24Error(f"{quote(str(path), 4096)}: expected a regular file, found a {found}")
        self.size = info.st_size

    def read(self, offset: int, length: int) -> bytes:
        try:
            return os.pread(self.fd, length, offset)
        except OSError as error:
            raise Bw24Error(f"{quote(str(self.path), 4096)}: cannot read {length} bytes at {offset}: {error.strerror}") from None

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's place. `shape` is in file order (ne[0], the fastest dimension, first); `offset` is absolute in its part's file."""

    name: str
    type_id: int
    type_name: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    part: int = 0


@dataclass
class Header:
    """What one GGUF file (one part of a split model) says of itself. `kinds`: key -> (value type id, element type id or None)."""

    name: str
    size: int
    version: int = 0
    alignment: int = 32
    data_start: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)


class _Cursor:
    """Reads forward through a source with checked lengths. `what` names the item being read, for messages."""

    def __init__(self, source: ByteSource, name: str):
        self.source, self.name, self.size = source, name, source.size
        self.base = 0  # file offset of buf[0]
        self.buf = b""
        self.at = 0  # index into buf
        self.what = "header"

    @property
    def pos(self) -> int:
        return self.base + self.at

    def fail(self, text: str) -> Bw24Error:
        return Bw24Error(f"{self.name}: {self.what}: {text}")

    def fill(self, need: int) -> None:
        """Make buf[at:at+need] available; the request is checked against the file's size first."""
        pos = self.base + self.at
        left = self.size - pos
        if need > left:
            raise self.fail(f"needs {need} bytes at offset {pos}, but the file ends after {left}")
        self.buf = self.source.read(pos, min(left, max(need, WINDOW)))
        self.base, self.at = pos, 0
        if len(self.buf) < need:
            raise self.fail(f"expected {need} bytes at offset {pos}, read {len(self.buf)} (the file shrank)")

    def take(self, need: int) -> bytes:
        if need > len(self.buf) - self.at:
            self.fill(need)
        at = self.at
        self.at = at + need
        return self.buf[at : at + need]

    def u32(self) -> int:
        if len(self.buf) - self.at < 4:
            self.fill(4)
        self.at += 4
        return _U32(self.buf, self.at - 4)[0]

    def u64(self) -> int:
        if len(self.buf) - self.at < 8:
            self.fill(8)
        self.at += 8
        return _U64(self.buf, self.at - 8)[0]

    def string(self, cap: int) -> bytes:
        length = self.u64()
        if length > cap:
            raise self.fail(f"string of {length} bytes, the limit is {cap}")
        return self.take(length)

    def strings(self, count: int) -> list[str]:
        """`count` length-prefixed strings: the loop that decides how fast a vocabulary opens, hence its plain shape."""
        out: list[str] = []
        buf, at, end = self.buf, self.at, len(self.buf)
        for _ in range(count):
            if end - at < 8:
                self.at = at
                self.fill(8)
                buf, at, end = self.buf, 0, len(self.buf)
            length = _U64(buf, at)[0]
            at += 8
            if length > end - at:
                self.at = at
                if length > MAX_STRING:
                    raise self.fail(f"entry {len(out)}: string of {length} bytes, the limit is {MAX_STRING}")
                self.fill(length)
                buf, at, end = self.buf, 0, len(self.buf)
            try:
                out.append(buf[at : at + length].decode())
            except UnicodeDecodeError:
                out.append(_text(buf[at : at + length]))
            at += length
        self.at = at
        return out


def _text(raw: bytes) -> str:
    """A string value: any bytes are allowed there; what is not UTF-8 becomes U+FFFD, so that the text can go to JSON and terminals."""
    return raw.decode("utf-8", "replace")


def _identifier(cur: _Cursor, raw: bytes, noun: str) -> str:
    """A key or tensor name: UTF-8 without control characters (a NUL would alias another name in C)."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise cur.fail(f"{noun} {raw[:64]!a} is not valid UTF-8") from None
    if not text:
        raise cur.fail(f"{noun} is empty")
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise cur.fail(f"{noun} {quote(text)} contains a control character")
    return text


def _scalar(cur: _Cursor, kind: int) -> Any:
    if kind == STRING:
        return _text(cur.string(MAX_STRING))
    if kind == BOOL:
        byte = cur.take(1)[0]
        if byte > 1:
            raise cur.fail(f"expected a bool byte 0 or 1, found {byte}")
        return bool(byte)
    if kind not in _UNPACK:
        raise cur.fail(f"unknown value type {kind}")
    unpack, size = _UNPACK[kind]
    return unpack(cur.take(size))[0]


def _array(cur: _Cursor) -> tuple[int, Any]:
    """(element type, list or numpy array) of an array value."""
    kind, count = cur.u32(), cur.u64()
    left = cur.size - cur.pos
    if kind == ARRAY:
        raise cur.fail("arrays of arrays are not supported")
    if kind == STRING:
        if count > left // 8 or count > MAX_STRINGS:
            raise cur.fail(f"array of {count} strings, but {left} bytes are left (limit {MAX_STRINGS} entries)")
        return kind, cur.strings(count)
    dtype = NUMPY_KINDS.get(kind)
    if dtype is None:
        raise cur.fail(f"unknown array element type {kind}")
    nbytes = count * dtype.itemsize
    if nbytes > left or nbytes > MAX_ARRAY:
        raise cur.fail(f"array of {count} values needs {nbytes} bytes, but {left} are left (limit {MAX_ARRAY})")
    values = np.frombuffer(cur.take(nbytes), dtype)
    if kind == BOOL:
        if count and values.max() > 1:
            raise cur.fail(f"expected bool bytes 0 or 1, found {values.max()}")
        values = values.astype(bool)
    return kind, values.tolist() if count <= SMALL_ARRAY else values


def _metadata(cur: _Cursor, head: Header, count: int) -> None:
    for index in range(count):
        cur.what = f"metadata key {index}"
        key = _identifier(cur, cur.string(MAX_KEY), "key")
        cur.what = f"key {quote(key)}"
        if key in head.metadata:
            raise cur.fail("given twice")
        kind, element = cur.u32(), None
        if kind == ARRAY:
            element, value = _array(cur)
        else:
            value = _scalar(cur, kind)
        head.metadata[key] = value
        head.kinds[key] = (kind, element)


def _alignment(cur: _Cursor, head: Header) -> int:
    if "general.alignment" not in head.metadata:
        return 32
    value, (kind, _) = head.metadata["general.alignment"], head.kinds["general.alignment"]
    cur.what = "key general.alignment"
    if kind != UINT32:
        raise cur.fail(f"expected type u32, found {KIND_NAMES[kind]} {_show(value)}")
    if value == 0 or value & (value - 1) or value > MAX_ALIGNMENT:
        raise cur.fail(f"expected a power of two up to {MAX_ALIGNMENT}, found {value}")
    return value


def _shape(cur: _Cursor) -> tuple[int, ...]:
    dims = cur.u32()
    if dims > MAX_DIMS:
        raise cur.fail(f"{dims} dimensions, the limit is {MAX_DIMS}")
    shape = struct.unpack(f"<{dims}q", cur.take(8 * dims)) or (1,)  # no dimensions: a scalar
    if min(shape) < 1:
        raise cur.fail(f"shape {list(shape)} has a dimension below 1")
    elements = 1
    for extent in shape:
        elements *= extent
    if elements >= 1 << 63:
        raise cur.fail(f"shape {list(shape)} has more than 2^63 elements")
    return shape


def _tensor(cur: _Cursor, index: int, alignment: int, part: int) -> TensorInfo:
    """One tensor info; its offset is still relative to the data start."""
    cur.what = f"tensor {index}"
    raw = cur.string(MAX_KEY)
    if len(raw) > MAX_NAME:
        raise cur.fail(f"name {raw[:64]!a} has {len(raw)} bytes, the limit is {MAX_NAME}")
    name = _identifier(cur, raw, "name")
    cur.what = f"tensor {quote(name)}"
    if "/" in name or "\\" in name:
        raise cur.fail("the name contains a path separator")
    shape, type_id, offset = _shape(cur), cur.u32(), cur.u64()
    if type_id not in TYPES:
        raise cur.fail(f"unknown or removed tensor type {type_id}")
    type_name, block, size = TYPES[type_id]
    if shape[0] % block:
        raise cur.fail(f"type {type_name} needs rows of a multiple of {block} values, found {shape[0]}")
    nbytes = shape[0] // block * size
    for extent in shape[1:]:
        nbytes *= extent
    if nbytes > cur.size:
        raise cur.fail(f"{type_name} {list(shape)} needs {nbytes} bytes, the file has {cur.size}")
    if offset % alignment:
        raise cur.fail(f"offset {offset} is not a multiple of the alignment {alignment}")
    return TensorInfo(name, type_id, type_name, shape, nbytes, offset, part)


def _place(cur: _Cursor, head: Header, infos: list[TensorInfo]) -> None:
    """Check the tensors' ranges against the data section and each other; record them with absolute offsets, in file order."""
    head.data_start = -(-cur.pos // head.alignment) * head.alignment
    if infos and head.data_start > cur.size:
        cur.what = "tensor data"
        raise cur.fail(f"starts at offset {head.data_start}, but the file has {cur.size} bytes")
    room = cur.size - head.data_start
    for info in infos:
        cur.what = f"tensor {quote(info.name)}"
        if info.name in head.tensors:
            raise cur.fail("given twice")
        if info.offset > room or info.nbytes > room - info.offset:
            raise cur.fail(f"bytes [{info.offset}, {info.offset + info.nbytes}) lie outside the data section of {room} bytes")
        head.tensors[info.name] = TensorInfo(info.name, info.type_id, info.type_name, info.shape, info.nbytes,
                                             head.data_start + info.offset, info.part)
    end, previous = 0, ""
    for info in sorted(infos, key=lambda t: t.offset):
        if info.offset < end:
            cur.what = f"tensor {quote(info.name)}"
            raise cur.fail(f"overlaps tensor {quote(previous)}: starts at {info.offset}, which ends at {end}")
        end, previous = info.offset + info.nbytes, info.name


def parse_header(source: ByteSource, name: str, part: int = 0) -> Header:
    """Parse and check everything before the tensor data of one file. `name` opens every error message."""
    head, cur = Header(name, source.size), _Cursor(source, name)
    if source.size < 24:
        raise cur.fail(f"a GGUF file has at least 24 bytes, found {source.size}")
    magic = cur.take(4)
    if magic != MAGIC:
        raise cur.fail(f"expected the magic {MAGIC!a}, found {magic!a}: not a GGUF file")
    head.version = cur.u32()
    if head.version and head.version & 0xFFFF == 0:
        raise cur.fail(f"big-endian GGUF file (version field {head.version:#010x}); only little-endian files are supported")
    if head.version not in (2, 3):
        raise cur.fail(f"GGUF version {head.version}; versions 2 and 3 are supported")
    n_tensors, n_kv = cur.u64(), cur.u64()
    left = cur.size - cur.pos
    # the smallest metadata record has 13 bytes (8 + 0 + 4 + 1), but its key is not empty: 14; the smallest tensor info 8+1+4+4+8 > 24
    if n_kv > left // 14:
        raise cur.fail(f"{n_kv} metadata keys cannot fit into the {left} bytes left")
    if n_tensors > left // 24:
        raise cur.fail(f"{n_tensors} tensors cannot fit into the {left} bytes left")
    _metadata(cur, head, n_kv)
    head.alignment = _alignment(cur, head)
    _place(cur, head, [_tensor(cur, index, head.alignment, part) for index in range(n_tensors)])
    return head


# ---- split models ----


def split_siblings(head: Header, file_name: str) -> list[str]:
    """File names of all parts of the model that `file_name` (with header `head`) belongs to, in order; itself alone if not split."""
    if "split.count" not in head.metadata:
        return [file_name]
    count, number = get(head.metadata, "split.count", int), get(head.metadata, "split.no", int, 0)
    if not 1 <= count <= 65535 or not 0 <= number < count:
        raise Bw24Error(f"{head.name}: key split.no: expected 0 <= split.no < split.count, found {number} of {count}")
    if count == 1:
        return [file_name]
    match = SPLIT_NAME.match(file_name)
    if not match or (int(match["number"]), int(match["count"])) != (number + 1, count):
        raise Bw24Error(f"{head.name}: key split.no: part {number + 1} of {count} must be named ...-{number + 1:05d}-of-{count:05d}.gguf")
    return [f"{match['prefix']}-{k + 1:05d}-of-{count:05d}.gguf" for k in range(count)]


def merge_parts(parts: list[Header]) -> Header:
    """One view over the parts of a split model (part k at index k): all tensors, part 0's metadata winning.

    Errors: a part whose split.no or split.count is wrong, a tensor in two parts, a total that differs from split.tensors.count.
    """
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    merged = Header(first.name, sum(p.size for p in parts), first.version, first.alignment, first.data_start)
    for index, part in enumerate(parts):
        number, count = get(part.metadata, "split.no", int, None), get(part.metadata, "split.count", int, None)
        if (number, count) != (index, len(parts)):
            raise Bw24Error(f"{part.name}: key split.no: expected part {index} of {len(parts)}, found {number} of {count}")
        for key, value in part.metadata.items():
            if merged.metadata.setdefault(key, value) is value:
                merged.kinds[key] = part.kinds[key]
        for name, info in part.tensors.items():
            if name in merged.tensors:
                raise Bw24Error(f"{part.name}: tensor {quote(name)}: also in part {merged.tensors[name].part}")
            merged.tensors[name] = info
    total = get(first.metadata, "split.tensors.count", int, len(merged.tensors))
    if total != len(merged.tensors):
        raise Bw24Error(f"{first.name}: key split.tensors.count: expected {total} tensors, found {len(merged.tensors)}")
    return merged


# ---- open files ----


class GGUFFile:
    """An open GGUF model: metadata, tensor places and read-only bytes. Made by open_gguf; a context manager; close twice is fine.

    Views handed out by data() and array() keep the mapping alive after close(); file descriptors do not outlive it.
    """

    def __init__(self, sources: list[FileSource], headers: list[Header]):
        self._sources = sources
        self._maps: list[memoryview | None] = [None] * len(sources)
        merged = merge_parts(headers)
        self.path = sources[0].path
        self.paths = [source.path for source in sources]
        self.header = merged
        self.version, self.alignment = merged.version, merged.alignment
        self.metadata, self.kinds, self.tensors = merged.metadata, merged.kinds, merged.tensors
        self.size = merged.size

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise Bw24Error(f"{quote(str(self.path), 4096)}: tensor {quote(name)} is missing")
        return info

    def fd(self, part: int = 0) -> int:
        """File descriptor of a part, open for reading until close()."""
        if self._sources[part].fd < 0:
            raise Bw24Error(f"{quote(str(self.paths[part]), 4096)}: the file is closed")
        return self._sources[part].fd

    def data(self, name: str) -> memoryview:
        """The tensor's bytes, read-only, over the mapping (no copy)."""
        info = self._info(name)
        view = self._maps[info.part]
        if view is None:
            view = self._map(info.part)
        return view[info.offset : info.offset + info.nbytes]

    def places(self, name: str) -> list[tuple[Path, int, int]]:
        """(file, type, offset) of each matrix of a stacked tensor, for reading them one by one."""
        info = self._info(name)
        count, matrix = (info.shape[2] if len(info.shape) > 2 else 1), info.shape[:2]
        _, block, size = TYPES[info.type_id]
        each = matrix[0] // block * size * (matrix[1] if len(matrix) > 1 else 1)
        return [(self.paths[info.part], info.type_id, info.offset + i * each) for i in range(count)]

    def array(self, name: str) -> np.ndarray:
        """The tensor's bytes as a read-only uint8 array [nbytes] over the mapping (no copy)."""
        return np.frombuffer(self.data(name), np.uint8)

    def _map(self, part: int) -> memoryview:
        fd, size = self.fd(part), self._sources[part].size
        if os.fstat(fd).st_size < size:  # a page beyond the end would raise SIGBUS when touched
            raise Bw24Error(f"{quote(str(self.paths[part]), 4096)}: expected {size} bytes, found {os.fstat(fd).st_size} (the file shrank)")
        try:
            view = memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise Bw24Error(f"{quote(str(self.paths[part]), 4096)}: cannot map {size} bytes: {error}") from None
        self._maps[part] = view
        return view

    def close(self) -> None:
        self._maps = [None] * len(self._sources)
        for source in self._sources:
            source.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_gguf(path: str | Path) -> GGUFFile:
    """Open a GGUF file, or all parts of a split model given any one of them. Raises Bw24Error naming the key or tensor at fault."""
    path = Path(path)
    sources: list[FileSource] = []
    try:
        sources.append(FileSource(path))
        head = parse_header(sources[0], quote(str(path), 4096))
        names = split_siblings(head, path.name)
        if len(names) == 1:
            return GGUFFile(sources, [head])
        sources.pop().close()
        headers = []
        for part, name in enumerate(names):
            source = FileSource(path.with_name(name))
            sources.append(source)
            headers.append(parse_header(source, quote(str(source.path), 4096), part))
        return GGUFFile(sources, headers)
    except BaseException:
        for source in sources:
            source.close()
        raise


# ---- typed access to metadata ----

_REQUIRED = object()
_NOUNS = {int: "an integer", float: "a number", str: "a string", bool: "a bool", list: "an array"}


def _show(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value[:80])
    if isinstance(value, (list, np.ndarray)):
        return f"of {len(value)} values"
    return str(value)


def _describe(value: Any) -> str:
    for kinds, noun in ((bool, "bool"), (int, "integer"), (float, "float"), (str, "string"), ((list, np.ndarray), "array")):
        if isinstance(value, kinds):
            return f"{noun} {_show(value)}"
    return type(value).__name__


def _fits(value: Any, kind: type) -> bool:
    if kind is list:
        return isinstance(value, (list, np.ndarray))
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is kind


def get(meta: dict[str, Any], key: str, kind: type, default: Any = _REQUIRED) -> Any:
    """Typed value of a metadata key; kind is one of int, float, str, bool, list (list also gives numpy arrays; float takes integers).

    A missing key gives `default`, or an error without one; a value of another type is always an error.
    """
    if key not in meta:
        if default is _REQUIRED:
            raise Bw24Error(f"{key}: expected {_NOUNS[kind]}, the key is missing")
        return default
    value = meta[key]
    if not _fits(value, kind):
        raise Bw24Error(f"{key}: expected {_NOUNS[kind]}, found {_describe(value)}")
    return float(value) if kind is float else value
