"""Expert overlays: a directory whose manifest gives experts of a checkpoint in storage types of their own, expert by expert, and names the experts
that were left out; everything else comes from the checkpoint that it names.

Owns the manifest (`bw24-expert-overlay` and `memra-expert-overlay`, versions 1 and 2) and the mask of left-out experts: their ids stay what they
were, and the router cannot choose them. Knows neither how a checkpoint is read nor how experts are spilled.
"""

from __future__ import annotations

import math
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import Bw24Error
from .gguf import FileSource, TensorInfo
from .gguf_types import TYPE_IDS, TYPES, quote

MANIFEST = "manifest.json"
FORMATS = {f"{product}-expert-overlay-v{n}" for product in ("bw24", "memra") for n in (1, 2)}
ONE = re.compile(r"^(blk\.(\d{1,5})\.ffn_(gate|up|down)_exps)\.(\d{1,5})\.weight$")
STACK = re.compile(r"^blk\.(\d{1,5})\.ffn_(gate|up|down)_exps\.weight$")
KINDS = ("gate", "up", "down")


@dataclass(frozen=True)
class Piece:
    """One entry of the manifest, or one matrix of a stacked one."""

    file: Path
    type_name: str
    ne: tuple[int, ...]
    offset: int
    nbytes: int


def is_overlay(folder: Path) -> bool:
    """Whether a directory holds a manifest of a format read here; another manifest is somebody else's."""
    try:
        return (folder / MANIFEST).is_file() and _read(folder / MANIFEST).get("format") in FORMATS
    except Bw24Error:
        return False


def _read(path: Path) -> dict[str, Any]:
    from .safetensors import read_json

    body = read_json(path)
    if type(body) is not dict:
        raise Bw24Error(f"{quote(str(path), 4096)}: expected a JSON object")
    return body


def _whole(value: Any, low: int = 0) -> bool:
    return type(value) is int and low <= value < 1 << 53


class Overlay:
    """The container: the base's tensors and metadata, with the manifest's in their place. `mixed`: experts differ in type or some are left out,
    so that they can only be read one by one. data() of such a stack is an error; places() gives them."""

    mixed = True

    def __init__(self, folder: Path, weights: str = "auto"):
        self.path = folder
        self._where = quote(str(folder / MANIFEST), 4096)
        body = _read(folder / MANIFEST)
        if body.get("format") not in FORMATS:
            raise Bw24Error(f"{self._where}: format: expected one of {', '.join(sorted(FORMATS))}, found {quote(str(body.get('format')))}")
        self._files: dict[Path, FileSource] = {}
        self._maps: dict[Path, memoryview] = {}
        self._base: Any = None
        try:
            entries = self._entries(body.get("tensors"))
            managed = {int(m[2]) for name in entries if (m := ONE.match(name))} | {int(m[1]) for name in entries if (m := STACK.match(name))}
            self._base = _open_base(folder, body, weights, managed)
            self.metadata = self._base.metadata
            self.note = self._base.note if hasattr(self._base, "note") else None
            self._experts = self._count(managed)
            self._pruned = self._masks(body.get("pruned_experts", {}))
            self._stacks, self._plain = self._assemble(entries)
            self.tensors = self._infos()
        except BaseException:
            self.close()
            raise
        self.size = self._base.size + sum(source.size for source in self._files.values())

    # ---- the manifest

    def _entries(self, found: Any) -> dict[str, tuple[Piece, int | None]]:
        """Checked entries: name -> (piece, bytes from one expert to the next in a stack)."""
        if type(found) is not dict:
            raise Bw24Error(f"{self._where}: tensors: expected an object")
        return {name: self._entry(name, value) for name, value in found.items()}

    def _entry(self, name: str, value: Any) -> tuple[Piece, int | None]:
        def fail(text: str) -> Bw24Error:
            return Bw24Error(f"{self._where}: tensor {quote(name)}: {text}")

        if type(value) is not dict:
            raise fail("expected an object")
        file, kind, ne = value.get("file"), value.get("qtype"), value.get("ne")
        if type(file) is not str or not file or "\0" in file or Path(file).is_absolute() or ".." in Path(file).parts:
            raise fail(f"file: expected a path inside the directory, found {quote(str(file))}")
        if kind not in TYPE_IDS:
            raise fail(f"qtype: {quote(str(kind))} is not a storage type known here")
        if type(ne) is not list or not 1 <= len(ne) <= 4 or not all(_whole(n, 1) and n <= 1 << 24 for n in ne):
            raise fail("ne: expected 1 to 4 dimensions")
        _, block, size = TYPES[TYPE_IDS[kind]]
        expected = math.prod(ne) // block * size
        offset, nbytes, stride = value.get("offset", 0), value.get("bytes"), value.get("expert_stride")
        if ne[0] % block or nbytes != expected:
            raise fail(f"bytes: {kind} {ne} needs {expected}, found {quote(str(nbytes))}")
        if not _whole(offset) or (stride is not None and not _whole(stride, 1)):
            raise fail("offset and expert_stride: expected whole numbers")
        path = self.path / file
        if path not in self._files:
            self._files[path] = FileSource(path)
        if offset + nbytes > self._files[path].size:
            raise fail(f"bytes [{offset}, {offset + nbytes}) of {quote(file)}, which has {self._files[path].size}")
        return Piece(path, kind, tuple(ne), offset, nbytes), stride

    def _count(self, managed: set[int]) -> int:
        arch = str(self.metadata.get("general.architecture"))
        count = self.metadata.get(f"{arch}.expert_count")
        if type(count) is not int or count < 1:
            raise Bw24Error(f"{self._where}: the checkpoint beneath ({arch}) has no experts, the manifest gives some of blocks {sorted(managed)[:4]}")
        self._top = int(self.metadata.get(f"{arch}.expert_used_count", 1))
        return count

    def _masks(self, found: Any) -> dict[int, frozenset[int]]:
        if type(found) is not dict:
            raise Bw24Error(f"{self._where}: pruned_experts: expected an object")
        out = {}
        for layer, ids in found.items():
            if not layer.isdecimal() or len(layer) > 5 or type(ids) is not list or not all(_whole(i) and i < self._experts for i in ids):
                raise Bw24Error(f"{self._where}: pruned_experts.{quote(layer)}: expected ids below {self._experts}")
            if self._experts - len(set(ids)) < self._top:
                raise Bw24Error(f"{self._where}: pruned_experts.{layer}: {self._experts - len(set(ids))} experts remain, {self._top} are chosen")
            out[int(layer)] = frozenset(ids)
        return out

    def _assemble(self, entries: dict[str, tuple[Piece, int | None]]) -> tuple[dict[str, list[Piece | None]], dict[str, Piece]]:
        """Stacks of experts by tensor name, None where one is left out; and the tensors that replace the base's."""
        stacks: dict[str, list[Piece | None]] = {}
        plain: dict[str, Piece] = {}
        for name, (piece, stride) in entries.items():
            if m := ONE.match(name):
                stack = stacks.setdefault(f"{m[1]}.weight", [None] * self._experts)
                if (expert := int(m[4])) >= self._experts or len(piece.ne) != 2:
                    raise Bw24Error(f"{self._where}: tensor {quote(name)}: expected a matrix of an expert below {self._experts}")
                stack[expert] = piece
            elif STACK.match(name) and len(piece.ne) == 3:
                stacks[name] = self._split(name, piece, stride)
            else:
                plain[name] = piece
        for name, stack in stacks.items():
            self._check(name, stack)
        return stacks, plain

    def _split(self, name: str, piece: Piece, stride: int | None) -> list[Piece | None]:
        """The matrices of a stacked entry."""
        each = piece.nbytes // piece.ne[2]
        stride = each if stride is None else stride
        if piece.ne[2] != self._experts or stride < each or piece.offset + stride * (self._experts - 1) + each > self._files[piece.file].size:
            raise Bw24Error(f"{self._where}: tensor {quote(name)}: expected {self._experts} experts of {each} bytes inside its file")
        pruned = self._pruned.get(int(STACK.match(name)[1]), frozenset())
        return [None if e in pruned else Piece(piece.file, piece.type_name, piece.ne[:2], piece.offset + e * stride, each)
                for e in range(self._experts)]

    def _check(self, name: str, stack: list[Piece | None]) -> None:
        layer = int(STACK.match(name)[1])
        pruned = self._pruned.get(layer, frozenset())
        there = {e for e, piece in enumerate(stack) if piece}
        if wrong := sorted(there & pruned):
            raise Bw24Error(f"{self._where}: tensor {name}: expert {wrong[0]} is there, but pruned_experts leaves it out")
        if wrong := sorted(set(range(self._experts)) - there - pruned):
            raise Bw24Error(f"{self._where}: tensor {name}: expert {wrong[0]} is neither there nor left out by pruned_experts")
        if len(shapes := {piece.ne for piece in stack if piece}) != 1:
            raise Bw24Error(f"{self._where}: tensor {name}: experts of different shapes: {sorted(shapes)[:2]}")
        others = {f"blk.{layer}.ffn_{kind}_exps.weight" for kind in KINDS}
        if name not in others:
            raise Bw24Error(f"{self._where}: tensor {name}: not a matrix of an expert")

    def _infos(self) -> dict[str, TensorInfo]:
        out = dict(self._base.tensors)
        for name, stack in self._stacks.items():
            first = next(piece for piece in stack if piece)
            nbytes = sum(piece.nbytes for piece in stack if piece)
            out[name] = TensorInfo(name, TYPE_IDS[first.type_name], first.type_name, (*first.ne, self._experts), nbytes, first.offset)
        for name, piece in self._plain.items():
            out[name] = TensorInfo(name, TYPE_IDS[piece.type_name], piece.type_name, piece.ne, piece.nbytes, piece.offset)
        for layer in {int(STACK.match(name)[1]) for name in self._stacks}:
            if missing := [k for k in KINDS if f"blk.{layer}.ffn_{k}_exps.weight" not in out]:
                raise Bw24Error(f"{self._where}: blk.{layer}: experts without their {missing[0]} matrices")
            if self._pruned.get(layer) and self._bias(layer) not in out:
                raise Bw24Error(f"{self._where}: blk.{layer}: experts are left out, but its router has no selection bias to mask them with")
        return out

    def _bias(self, layer: int) -> str:
        names = (f"blk.{layer}.exp_probs_b.bias", f"blk.{layer}.exp_probs_b")
        return next((n for n in names if n in self._base.tensors), names[0])

    # ---- the container

    def data(self, name: str) -> memoryview:
        """A tensor's bytes; a router's selection bias is minus infinity for experts that are left out."""
        if name in self._stacks:
            raise Bw24Error(f"tensor {name}: its experts differ in type or some are left out, so they are read one by one: backend cpu, --ram SIZE")
        if name in self._plain:
            piece = self._plain[name]
            return self._map(piece.file)[piece.offset : piece.offset + piece.nbytes]
        m = re.match(r"^blk\.(\d{1,5})\.exp_probs_b(\.bias)?$", name)
        if not m or not self._pruned.get(int(m[1])):
            return self._base.data(name)
        if self._base.tensors[name].type_name != "F32":
            raise Bw24Error(f"tensor {name}: expected F32, found {self._base.tensors[name].type_name}")
        bias = np.frombuffer(self._base.data(name), np.float32).copy()
        bias[sorted(self._pruned[int(m[1])])] = -np.inf
        return memoryview(bias.tobytes())

    def _map(self, path: Path) -> memoryview:
        if path not in self._maps:
            source = self._files[path]
            if os.fstat(source.fd).st_size < source.size:
                raise Bw24Error(f"{quote(str(path), 4096)}: expected {source.size} bytes, found {os.fstat(source.fd).st_size} (the file shrank)")
            self._maps[path] = memoryview(mmap.mmap(source.fd, source.size, access=mmap.ACCESS_READ))
        return self._maps[path]

    def places(self, name: str) -> list[tuple[Path | None, int, int]] | None:
        """(file, type, offset) of each expert's matrix, file None where it is left out."""
        if name not in self._stacks:
            return self._base.places(name)
        some = next(piece for piece in self._stacks[name] if piece)
        return [(p.file, TYPE_IDS[p.type_name], p.offset) if p else (None, TYPE_IDS[some.type_name], 0) for p in self._stacks[name]]

    def close(self) -> None:
        self._maps.clear()
        for source in self._files.values():
            source.close()
        if self._base is not None:
            self._base.close()


def _open_base(folder: Path, body: dict[str, Any], weights: str, managed: set[int]) -> Any:
    """The checkpoint beneath: a directory of safetensors, a GGUF file or another overlay. Experts of the managed blocks are not looked for there:
    a sparse copy of the checkpoint need not have their shards' bytes."""
    from .gguf import open_gguf
    from .st_model import open_checkpoint

    said = body.get("source_dir")
    if type(said) is not str or not said or "\0" in said:
        raise Bw24Error(f"{quote(str(folder / MANIFEST), 4096)}: source_dir: expected the folder of the checkpoint")
    path = folder / said
    if not path.exists():
        raise Bw24Error(f"{quote(str(folder / MANIFEST), 4096)}: source_dir: {quote(str(path), 4096)} does not exist")
    if path.is_file():
        return open_gguf(path)
    if is_overlay(path):
        if path.resolve() == folder.resolve():
            raise Bw24Error(f"{quote(str(folder / MANIFEST), 4096)}: source_dir: the overlay itself")
        return Overlay(path, weights)
    expert = re.compile(r"(^|\.)layers\.(\d{1,5})\..*experts\.")
    return open_checkpoint(path, weights, lambda name: bool((m := expert.search(name)) and int(m[2]) in managed and "shared" not in name))


def open_overlay(folder: Path, weights: str = "auto") -> Overlay:
    """Opens an overlay directory. Raises Bw24Error naming the entry at fault."""
    return Overlay(folder, weights)
