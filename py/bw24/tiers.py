"""A mixture's experts on a card, in RAM and in files: what was asked for, which experts a model has, the folders that are read, the call sequence
of the library's spill, profiles. Knows neither policies nor how a step runs; placement.py decides."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import abi, tier_bank
from .errors import Bw24Error
from .gguf import GGUFFile, open_gguf
from .gguf_types import quote

if TYPE_CHECKING:
    from .drafter import Draft
    from .placement import Placement
    from .source import Model

POLICIES = {"lru": 0, "slru": 1, "frozen": 2}
TRACE_ROOM = 1 << 18  # uses of one step: 1024 experts in each of 256 layers


@dataclass(frozen=True)
class Tiers:
    """What the person asked for. ram: bytes for experts in RAM, None: decided from what is free. vram: bytes of a card's memory for the whole model.
    nvme: one or two folders that hold the model's files; two are read at once. profile: file of `bw24 tiers profile`. force: read experts from files
    even where all would fit; backend cpu then takes vram as bytes of experts that it keeps apart, as a card would."""

    ram: int | None = None
    vram: int | None = None
    nvme: tuple[str, ...] = ()
    policy: str | None = None
    profile: str | None = None
    trace: int = 0
    readers: int = 0
    buffered: bool = False
    force: bool = False
    root: str | None = None

    @property
    def asked(self) -> bool:
        """Whether anything was asked for that needs experts in files."""
        return self.force or bool(self.trace) or bool(self.nvme) or any(v is not None for v in (self.ram, self.vram, self.policy, self.profile))


def from_args(args: Any) -> Tiers:
    """Tiers of a settled command line or of settings; what a command does not take is left as it is."""
    get = lambda name: getattr(args, name, None)  # noqa: E731
    nvme = tuple(part.strip() for part in (get("nvme") or "").split(",") if part.strip())
    if len(nvme) > 2:
        raise Bw24Error(f"--nvme: at most two folders, found {len(nvme)}")
    return Tiers(ram=get("ram"), vram=get("vram"), nvme=nvme, policy=get("tier_policy"), profile=get("profile"),
                 trace=TRACE_ROOM if get("trace") else 0)


@dataclass(frozen=True)
class Bank:
    """The experts of a model's lists. ops: (gate, up or None where fused, down) of each layer; bytes: of all; active: of one token's experts."""

    ops: tuple[tuple[str, str | None, str], ...]
    nbytes: int
    active: int
    visits: int

    @property
    def names(self) -> set[str]:
        return {name for op in self.ops for name in op if name}


def bank_of(model: Model, draft: Draft | None = None) -> Bank:
    """The experts that the trunk's list reads, and those of a drafter where they are the model's own."""
    ops, total, active, visits, tops = [], 0, 0, 0, {}
    texts = [model.list_text(), *([draft.builder.text()] if draft else [])]
    for line in "\n".join(texts).splitlines():
        head, _, rest = line.split(" @ ")[0].partition(" ")
        fields = dict(word.split("=", 1) for word in rest.split() if "=" in word)
        if head == "ROUTE":
            tops[fields["y"]] = int(fields["top"])
        if head != "EXPERTS" or fields["d"] not in model.file.tensors:
            continue
        op = (fields["g"], fields.get("u"), fields["d"])
        if lost := next((name for name in op if name and name not in model.file.tensors), None):
            raise Bw24Error(f"tensor {lost} is missing")
        size, shape = sum(model.file.tensors[name].nbytes for name in op if name), model.file.tensors[op[2]].shape
        experts = shape[2] if len(shape) > 2 else 1
        ops.append(op)
        total += size
        visits += tops[fields["r"]]
        active += size // experts * tops[fields["r"]]
    return Bank(tuple(ops), total, active, visits)


def rest_of(model: Model, bank: Bank) -> int:
    """Bytes of the weights that a step needs beside those experts; a block that nothing runs stays on disk."""
    return sum(t.nbytes for t in model.file.tensors.values() if t.name not in bank.names and "_exps." not in t.name)


def model_hash(model: Model) -> str:
    """Identity of a model, 16 hexadecimal digits: names, types and shapes of all tensors, and 4 KiB of each layer's down matrices."""
    h = hashlib.sha256()
    for name, t in sorted(model.file.tensors.items()):
        h.update(f"{name} {t.type_name} {list(t.shape)}\n".encode())
        if "ffn_down_exps.weight" in name:
            h.update(sample(model, name))
    return h.hexdigest()[:16]


def sample(model: Model, name: str) -> bytes:
    """The first 4 KiB of a tensor as the file has them."""
    places = model.file.places(name)
    if places is None:
        return name.encode()
    path, offset = places[0][0], places[0][2]
    with open(path, "rb") as f:
        f.seek(offset)
        return f.read(4096)


# ---- files


def copies(path: Path, folders: tuple[str, ...]) -> tuple[Path, Path | None]:
    """The file that is read and its mirror: itself, or its copies in the folders that --nvme names."""
    if not folders:
        return path, None
    found = [Path(folder).expanduser() / path.name for folder in folders]
    for copy in found:
        if not copy.is_file():
            raise Bw24Error(f"--nvme {quote(str(copy.parent), 4096)}: {copy.name} is not there; copy the model's file into it")
        if copy.stat().st_size != path.stat().st_size:
            raise Bw24Error(f"{quote(str(copy), 4096)}: expected the {path.stat().st_size} bytes of {quote(str(path), 4096)}, "
                            f"found {copy.stat().st_size}")
    return found[0], found[1] if len(found) > 1 else None


class Spill:
    """The spill of a library model: opened before its tensors, asked afterwards for numbers."""

    def __init__(self, handle: Any, model: Model, placement: Placement, progress: Callable[[int, int], None] | None = None):
        self._bank: GGUFFile | None = None
        self._progress = progress
        self._handle, self._model, self.placement = handle, model, placement
        self._files: dict[Path, int] = {}
        t, p = placement.tiers, abi.new("bw24_spill_params")
        root = abi.ffi.new("char[]", t.root.encode()) if t.root else abi.ffi.NULL
        p.policy, p.ram, p.vram, p.readers, p.buffered, p.trace, p.root = (
            POLICIES[placement.policy], placement.ram, placement.vram, t.readers, t.buffered, t.trace, root)
        abi.check(abi.lib().bw24_spill_open(handle, p))

    def _file(self, path: Path) -> int:
        if path not in self._files:
            main, mirror = copies(path, self.placement.tiers.nvme)
            c = [abi.ffi.new("char[]", str(f).encode()) if f else abi.ffi.NULL for f in (main, mirror)]
            index = abi.lib().bw24_spill_file(self._handle, *c)
            abi.check(index)
            self._files[path] = index
        return self._files[path]

    def load(self, name: str, ne: tuple[int, ...], scale: float) -> None:
        """Names a tensor's place to the library instead of handing over its bytes. Raises Bw24Error."""
        places = self._model.file.places(name) or self._converted(name)
        c = abi.ffi.new("bw24_place[]", len(places))
        for i, (path, type_id, offset) in enumerate(places):
            c[i].file, c[i].type, c[i].offset = (self._file(path), type_id, offset) if path is not None else (-1, type_id, 0)
        shape = abi.ffi.new("int64_t[]", list(ne))
        abi.check(abi.lib().bw24_spill_tensor(self._handle, name.encode(), len(ne), shape, c, len(places), scale))

    def _converted(self, name: str) -> list[tuple[Path, int, int]]:
        """Places in the file of converted experts, which is written where there is none."""
        if self._bank is None:
            names = sorted(n for n in self.placement.bank.names if self._model.file.places(n) is None)
            folders = self.placement.tiers.nvme
            path = tier_bank.expert_bank(self._model, names, folders[0] if folders else None, self._progress)
            if len(folders) > 1:
                tier_bank.mirror(path, folders[1])
            self._bank = open_gguf(path)
        return self._bank.places(name)

    def close(self) -> None:
        """Closes what is open here; the library has its own descriptors."""
        if self._bank is not None:
            self._bank.close()

    def layers(self) -> list[tuple[str, int]]:
        """(down tensor, experts) of each layer, in the order of the layer numbers of traces and profiles."""
        out, name, n = [], abi.ffi.new("char **"), abi.ffi.new("int32_t *")
        while abi.lib().bw24_spill_layer(self._handle, len(out), name, n) == 0:
            out.append((abi.ffi.string(name[0]).decode(), n[0]))
        return out

    def warm_up(self) -> None:
        """Before the first token: the card's set, alike many experts of each layer where there is no profile, and in RAM the profile's most used of
        the others, or all where all fit. Raises Bw24Error."""
        layers, profile = self.layers(), self.placement.tiers.profile
        every = np.array([(i, e) for i, (_, n) in enumerate(layers) for e in range(n)], np.int32).reshape(-1, 2)
        uses = read_profile(Path(profile), model_hash(self._model), layers) if profile else None
        if self.placement.vram:
            room = self.placement.card_experts(len(every))
            self.card(spread(layers, room) if uses is None else most_used(uses, room))
        c = self.stats()
        if uses is not None:
            self.warm(most_used(uses, c["vram_experts"] + self._fitting(c)))
        elif c["bank"] * (len(every) - c["vram_experts"]) <= c["limit"] * len(every):
            on_card = {tuple(pair) for pair in spread(layers, c["vram_experts"]).tolist()}
            self.warm(np.array([pair for pair in every.tolist() if tuple(pair) not in on_card], np.int32).reshape(-1, 2))
            self.warm(every)

    def card(self, pairs: np.ndarray) -> int:
        """Reads experts [n, 2] (layer, expert) into the card's set, as many as its room holds. Returns how many are there."""
        return self._pairs(abi.lib().bw24_spill_card, pairs)

    def _pairs(self, call: Callable[..., int], pairs: np.ndarray) -> int:
        pairs = np.ascontiguousarray(pairs, np.int32)
        if not len(pairs):
            return 0
        count = call(self._handle, abi.ffi.cast("int32_t *", abi.ffi.from_buffer(pairs)), len(pairs))
        abi.check(count)
        return count

    def _fitting(self, c: dict[str, int]) -> int:
        """Experts that the budget holds beside the least that a step needs."""
        largest = max(1, c["floor"] // 2)
        return max(0, (c["limit"] - c["floor"]) // largest)

    def warm(self, pairs: np.ndarray) -> int:
        """Reads experts [n, 2] (layer, expert) into RAM, as many as fit and are not on the card. Returns how many."""
        return self._pairs(abi.lib().bw24_spill_warm, pairs)

    def stats(self) -> dict[str, int]:
        """The counters of bw24_spill_counts."""
        c = abi.new("bw24_spill_counts")
        abi.check(abi.lib().bw24_spill_stats(self._handle, c))
        return {name: int(getattr(c, name)) for name, _ in abi.ffi.typeof("bw24_spill_counts").fields if name != "size"}

    def uses(self) -> list[np.ndarray]:
        """How many (row, slot) pairs went to each expert since the engine was made, u64 [experts] of each layer."""
        out = [np.zeros(n, np.uint64) for _, n in self.layers()]
        for i, u in enumerate(out):
            abi.check(abi.lib().bw24_spill_uses(self._handle, i, abi.ffi.cast("uint64_t *", abi.ffi.from_buffer(u))))
        return out

    def trace(self) -> np.ndarray:
        """Uses since the last call, int32: layer << 16 | expert, the sign bit set where it was in RAM; -1 begins a step."""
        room = max(self.placement.tiers.trace, 1)
        out = np.empty(room, np.int32)
        n = abi.lib().bw24_spill_trace(self._handle, abi.ffi.cast("int32_t *", abi.ffi.from_buffer(out)), room)
        abi.check(n)
        return out[:n]


# ---- profiles: how often each expert was used


PROFILE = "bw24-tiers-profile"


def write_profile(path: Path, model: str, layers: list[tuple[str, int]], uses: list[np.ndarray], tokens: int) -> None:
    """Writes uses [experts] of each layer, for the model of that hash; the file appears whole or not at all. Raises Bw24Error."""
    body = {"format": PROFILE, "version": 1, "model": model, "tokens": tokens,
            "layers": [{"down": name, "uses": [int(n) for n in u]} for (name, _), u in zip(layers, uses, strict=True)]}
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json.dumps(body) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise Bw24Error(f"{quote(str(path), 4096)}: cannot write: {error.strerror}") from None


def read_profile(path: Path, model: str, layers: list[tuple[str, int]]) -> list[np.ndarray]:
    """Uses [experts] of each layer, checked against the model. Raises Bw24Error."""
    where = quote(str(path), 4096)
    try:
        body = json.loads(path.read_bytes())
    except OSError as error:
        raise Bw24Error(f"{where}: cannot read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise Bw24Error(f"{where}: not a profile: expected JSON") from None
    if not isinstance(body, dict) or body.get("format") != PROFILE or body.get("version") != 1:
        raise Bw24Error(f"{where}: not a profile of `bw24 tiers profile`, version 1")
    if body.get("model") != model:
        raise Bw24Error(f"{where}: made for model {quote(str(body.get('model')))}, this is {model}")
    found = body.get("layers")
    if not isinstance(found, list) or not all(isinstance(entry, dict) and isinstance(entry.get("down"), str) for entry in found):
        raise Bw24Error(f"{where}: expected a list of layers, each with its down tensor")
    by_name, out = {entry["down"]: entry.get("uses") for entry in found}, []
    for name, n in layers:
        uses = by_name.get(name, [0] * n)  # a drafter's layer need not be in it
        if not isinstance(uses, list) or len(uses) != n or not all(type(u) is int and 0 <= u < 1 << 53 for u in uses):
            raise Bw24Error(f"{where}: layer {name}: expected {n} counts")
        out.append(np.array(uses, np.int64))
    return out


def spread(layers: list[tuple[str, int]], n: int) -> np.ndarray:
    """n experts, alike many of each layer, [n, 2] (layer, expert) in the order of the layers: places that move with the text."""
    pairs = np.array([(i, e) for i, (_, count) in enumerate(layers) for e in range(count)], np.int32).reshape(-1, 2)
    first = pairs[np.lexsort((pairs[:, 0], pairs[:, 1]))][:n]
    return first[np.lexsort((first[:, 1], first[:, 0]))]


def most_used(uses: list[np.ndarray], n: int) -> np.ndarray:
    """The n most used experts over all layers (ties: the lower layer and expert), [n, 2] (layer, expert) in the order of the layers."""
    pairs = np.array([(layer, e) for layer, u in enumerate(uses) for e in range(len(u))], np.int32).reshape(-1, 2)
    order = np.argsort(-np.concatenate(uses) if len(uses) else np.zeros(0), kind="stable")[:n]
    return pairs[np.sort(order)]
