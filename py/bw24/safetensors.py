"""Safetensors files: header parsing over any byte source, sharded checkpoints, tensor bytes over a mapping.

Owns the container format, strict JSON and every check a reader can make without knowing models: sizes, types, shapes, ranges, shards.
Refuses to know what a tensor means. Nothing is built from a header before its size and its number of values are within limits.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import Bw24Error
from .gguf import ByteSource, FileSource
from .gguf_types import quote

MAX_HEADER = 100 << 20  # bytes, the format's own limit
MAX_JSON = 256 << 20  # bytes of a JSON file beside the tensors; the largest tokenizers have about 35 MB
MAX_TENSORS = 1 << 20  # of one file; the largest checkpoints have about 2^17 in all
MAX_RANK = 8
MAX_NAME = 1024  # bytes of a tensor name
MAX_SHARDS = 4096
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16,
    "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Entry:
    """One tensor's place. `shape` is row-major (the fastest dimension last); `offset` is absolute in its shard's file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    part: int = 0


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {quote(key)} is given twice")
            seen.add(key)
    return out


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def parse_json(raw: bytes, where: str, values: int = 1 << 25) -> Any:
    """Strict JSON: UTF-8, no duplicate keys, no NaN, at most about `values` values. Errors name `where`."""
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > values:
        raise Bw24Error(f"{where}: more than {values} JSON values")
    try:
        return json.loads(raw.decode(), object_pairs_hook=_pairs, parse_constant=_constant)
    except UnicodeDecodeError as error:
        raise Bw24Error(f"{where}: expected UTF-8, found byte 0x{raw[error.start]:02x} at {error.start}") from None
    except RecursionError:
        raise Bw24Error(f"{where}: JSON nested too deeply") from None
    except ValueError as error:  # JSONDecodeError among them
        raise Bw24Error(f"{where}: not valid JSON: {ascii(str(error))[1:-1][:200]}") from None


def read_json(path: Path) -> Any:
    """A JSON file of bounded size. Raises Bw24Error."""
    return parse_json(read_file(path), quote(str(path), 4096))


def read_file(path: Path, limit: int = MAX_JSON) -> bytes:
    """The bytes of a regular file of bounded size. Raises Bw24Error."""
    source = FileSource(path)
    try:
        if source.size > limit:
            raise Bw24Error(f"{quote(str(path), 4096)}: {source.size} bytes, the limit is {limit}")
        return source.read(0, source.size)
    finally:
        source.close()


# ---- header


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _nbytes(where: str, dtype: str, shape: list[int]) -> int:
    bits = BITS[dtype]
    for extent in shape:
        bits *= extent
        if bits >= 1 << 63:
            raise Bw24Error(f"{where}: {dtype} {shape} has more than 2^63 bits")
    if bits % 8:
        raise Bw24Error(f"{where}: {dtype} {shape} is not a whole number of bytes")
    return bits // 8


def _entry(file: str, name: str, value: Any, data_start: int, room: int, part: int) -> Entry:
    """One header entry, checked against the data section of `room` bytes."""
    where = f"{file}: tensor {quote(name)}"
    if not name or len(name.encode("utf-8", "replace")) > MAX_NAME:
        raise Bw24Error(f"{where}: expected a name of 1 to {MAX_NAME} bytes")
    if any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) <= 0xDFFF for c in name):
        raise Bw24Error(f"{where}: the name has a control character or a lone surrogate")
    if type(value) is not dict or set(value) != {"dtype", "shape", "data_offsets"}:
        raise Bw24Error(f"{where}: expected an object of dtype, shape and data_offsets")
    dtype, shape, range_ = value["dtype"], value["shape"], value["data_offsets"]
    if type(dtype) is not str or dtype not in BITS:
        raise Bw24Error(f"{where}: unknown dtype {quote(str(dtype))}")
    if type(shape) is not list or len(shape) > MAX_RANK or not all(map(_whole, shape)):
        raise Bw24Error(f"{where}: shape: expected at most {MAX_RANK} whole numbers, found {quote(str(shape))}")
    if type(range_) is not list or len(range_) != 2 or not all(map(_whole, range_)):
        raise Bw24Error(f"{where}: data_offsets: expected two whole numbers, found {quote(str(range_))}")
    begin, end = range_
    if not begin <= end <= room:
        raise Bw24Error(f"{where}: bytes [{begin}, {end}) lie outside the data section of {room} bytes")
    if (expects := _nbytes(where, dtype, shape)) != end - begin:
        raise Bw24Error(f"{where}: {dtype} {shape} needs {expects} bytes, data_offsets give {end - begin}")
    return Entry(name, dtype, tuple(shape), end - begin, data_start + begin, part)


def _check_metadata(file: str, value: Any) -> None:
    if type(value) is not dict or not all(type(v) is str for v in value.values()):
        raise Bw24Error(f"{file}: __metadata__: expected a map of strings")


def parse_header(source: ByteSource, file: str, part: int = 0) -> dict[str, Entry]:
    """The tensors of one file in the order of their bytes. `file` opens every error message."""
    if source.size < 8:
        raise Bw24Error(f"{file}: a safetensors file has at least 8 bytes, found {source.size}")
    length = struct.unpack("<Q", source.read(0, 8))[0]
    if length > min(MAX_HEADER, source.size - 8):
        raise Bw24Error(f"{file}: header of {length} bytes, but the file has {source.size} (limit {MAX_HEADER})")
    raw = source.read(8, length)
    if len(raw) < length:
        raise Bw24Error(f"{file}: expected {length} bytes of header, read {len(raw)} (the file shrank)")
    if raw[:1] != b"{":
        raise Bw24Error(f"{file}: expected a header that begins with '{{', found {raw[:1]!a}: not a safetensors file")
    header = parse_json(raw, f"{file}: header", values=(7 + MAX_RANK) * MAX_TENSORS)
    if "__metadata__" in header:
        _check_metadata(file, header.pop("__metadata__"))
    if len(header) > MAX_TENSORS:
        raise Bw24Error(f"{file}: {len(header)} tensors, the limit is {MAX_TENSORS}")
    start = 8 + length
    room = source.size - start
    entries = sorted((_entry(file, name, value, start, room, part) for name, value in header.items()), key=lambda e: (e.offset, e.nbytes))
    at = start
    for e in entries:
        if e.offset != at:
            kind = "overlaps the tensor before it" if e.offset < at else f"leaves a hole of {e.offset - at} bytes before it"
            raise Bw24Error(f"{file}: tensor {quote(e.name)}: starts at {e.offset - start}, {kind}")
        at += e.nbytes
    if at != source.size:
        raise Bw24Error(f"{file}: {source.size - at} bytes after the last tensor")
    return {e.name: e for e in entries}


# ---- shards


def index_parts(path: Path) -> tuple[list[str], dict[str, str]]:
    """(file names, tensor -> file name) of an index file."""
    where = quote(str(path), 4096)
    index = read_json(path)
    weight_map = index.get("weight_map") if type(index) is dict else None
    if type(weight_map) is not dict or not weight_map or not all(type(v) is str for v in weight_map.values()):
        raise Bw24Error(f"{where}: weight_map: expected a map of tensor names to file names")
    names = sorted(set(weight_map.values()))
    if len(names) > MAX_SHARDS:
        raise Bw24Error(f"{where}: {len(names)} shards, the limit is {MAX_SHARDS}")
    for name in names:
        if not name.endswith(".safetensors") or "/" in name or "\\" in name or name.startswith(".") or not name.isprintable():
            raise Bw24Error(f"{where}: weight_map: {quote(name)} is not a plain *.safetensors file name")
    return names, weight_map


def _some(names: set[str]) -> str:
    first = ", ".join(quote(n) for n in sorted(names)[:3])
    return f"{len(names)} tensors ({first}{', ...' if len(names) > 3 else ''})"


def _check_index(where: str, weight_map: dict[str, str], parts: list[str], tensors: list[dict[str, Entry]],
                 without: Callable[[str], bool] | None = None) -> None:
    """Every mapped tensor is in its shard (those of `without` need not be), and every tensor of a shard is mapped to it."""
    for name, found in zip(parts, tensors, strict=True):
        said = {t for t, shard in weight_map.items() if shard == name}
        if missing := {t for t in said - found.keys() if not (without and without(t))}:
            raise Bw24Error(f"{where}: shard {quote(name)} lacks {_some(missing)} of the index")
        if extra := found.keys() - said:
            raise Bw24Error(f"{where}: shard {quote(name)} has {_some(extra)} that the index does not give it")


class Shards:
    """The tensors of a checkpoint, over one file or several. Made by open_shards; closing twice is fine.

    Views handed out by data() keep the mapping alive after close(); file descriptors do not outlive it.
    """

    def __init__(self, folder: Path, names: list[str], weight_map: dict[str, str] | None, without: Callable[[str], bool] | None = None):
        self.folder = folder
        self._sources: list[FileSource] = []
        self._maps: list[memoryview | None] = [None] * len(names)
        try:
            found = []
            for part, name in enumerate(names):
                self._sources.append(FileSource(folder / name))
                found.append(parse_header(self._sources[part], quote(str(folder / name), 4096), part))
            if weight_map is not None:
                _check_index(quote(str(folder / INDEX), 4096), weight_map, names, found, without)
        except BaseException:
            self.close()
            raise
        self.tensors: dict[str, Entry] = {name: e for part in found for name, e in part.items() if not (without and without(name))}
        self.size = sum(s.size for s in self._sources)

    def data(self, name: str) -> memoryview:
        """The tensor's bytes, read-only, over the mapping (no copy)."""
        e = self.tensors[name]
        view = self._maps[e.part]
        if view is None:
            view = self._map(e.part)
        return view[e.offset : e.offset + e.nbytes]

    def path(self, part: int) -> Path:
        """The file of a shard."""
        return self._sources[part].path

    def _map(self, part: int) -> memoryview:
        source = self._sources[part]
        where = quote(str(source.path), 4096)
        if source.fd < 0:
            raise Bw24Error(f"{where}: the file is closed")
        if (now := os.fstat(source.fd).st_size) < source.size:  # a page beyond the end would raise SIGBUS when touched
            raise Bw24Error(f"{where}: expected {source.size} bytes, found {now} (the file shrank)")
        try:
            view = memoryview(mmap.mmap(source.fd, source.size, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise Bw24Error(f"{where}: cannot map {source.size} bytes: {error}") from None
        self._maps[part] = view
        return view

    def close(self) -> None:
        self._maps = [None] * len(self._maps)
        for source in self._sources:
            source.close()


def open_shards(path: Path, without: Callable[[str], bool] | None = None) -> Shards:
    """The tensors of a directory (its index, else its only *.safetensors file) or of one file, less those whose name `without` is true for.
    Raises Bw24Error."""
    if not path.is_dir():
        return Shards(path.parent, [path.name], None, without)
    if (path / INDEX).exists():
        names, weight_map = index_parts(path / INDEX)
        if missing := [name for name in names if not (path / name).exists()]:
            raise Bw24Error(f"{quote(str(path / INDEX), 4096)}: weight_map: the shard {quote(missing[0])} is missing")
        return Shards(path, names, weight_map, without)
    names = sorted(p.name for p in path.glob("*.safetensors"))
    if "model.safetensors" in names:
        names = ["model.safetensors"]
    if len(names) != 1:
        found = f"{len(names)} *.safetensors files" if names else "no *.safetensors file"
        raise Bw24Error(f"{quote(str(path), 4096)}: expected {INDEX} or one *.safetensors file, found {found}")
    return Shards(path, names, None, without)
