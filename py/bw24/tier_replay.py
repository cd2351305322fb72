"""Traces of experts used, and what policies would have hit: LRU, SLRU by layer, a frozen set, and Belady's optimum. Owns the trace file and the
simulation; runs no model."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from .errors import Bw24Error
from .gguf_types import quote

TRACE = "bw24-tiers-trace"
Use = tuple[int, int]  # (layer, expert)


@dataclass(frozen=True)
class Trace:
    """Experts used, by step: uses[i] are those of step i in the order of the layers. experts: of each layer; entry: bytes of one expert in RAM;
    layers: their down tensors."""

    model: str
    experts: list[int]
    entry: int
    uses: list[list[Use]]
    layers: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.experts)


def decode(events: np.ndarray) -> list[list[Use]]:
    """The library's events as steps of (layer, expert)."""
    steps: list[list[Use]] = []
    for event in events.tolist():
        if event == -1 or not steps:
            steps.append([])
        if event != -1:
            value = event & 0x7FFFFFFF
            steps[-1].append((value >> 16, value & 0xFFFF))
    return steps


class TraceWriter:
    """Writes a trace as lines of JSON: a header, then a line a step. Raises Bw24Error where the file cannot be written."""

    def __init__(self, path: str | Path, model: str, layers: list[tuple[str, int]], entry: int):
        self.path = Path(path)
        try:
            self._file: IO[str] = open(self.path, "w", encoding="utf-8")  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise self._failed(error) from None
        self._put({"format": TRACE, "version": 1, "model": model, "layers": [n for n, _ in layers],
                   "experts": [n for _, n in layers], "entry": entry})

    def _failed(self, error: OSError) -> Bw24Error:
        return Bw24Error(f"--trace {quote(str(self.path), 4096)}: cannot write: {error.strerror}")

    def _put(self, value: Any) -> None:
        try:
            self._file.write(json.dumps(value, separators=(",", ":")) + "\n")
        except OSError as error:
            raise self._failed(error) from None

    def step(self, rows: int, uses: list[Use]) -> None:
        """One step of so many rows."""
        self._put({"rows": rows, "uses": uses})

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise self._failed(error) from None


def read_trace(path: str | Path) -> Trace:
    """A trace file. Raises Bw24Error naming the line at fault."""
    where = quote(str(path), 4096)
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Bw24Error(f"{where}: cannot read: {getattr(error, 'strerror', None) or 'not a trace'}") from None
    head = _parse(lines[0] if lines else "", where, 1)
    if not isinstance(head, dict) or head.get("format") != TRACE or head.get("version") != 1:
        raise Bw24Error(f"{where}: not a trace of `bw24 gen --trace`, version 1")
    experts, entry = head.get("experts"), head.get("entry")
    if not isinstance(experts, list) or not all(type(n) is int and 0 < n <= 1024 for n in experts) or type(entry) is not int or entry < 1:
        raise Bw24Error(f"{where}: line 1: expected the experts of each layer and the bytes of an entry")
    names = head.get("layers")
    if not isinstance(names, list) or len(names) != len(experts) or not all(isinstance(n, str) for n in names):
        raise Bw24Error(f"{where}: line 1: expected a name for each of {len(experts)} layers")
    steps = []
    for number, line in enumerate(lines[1:], 2):
        body = _parse(line, where, number)
        uses = body.get("uses") if isinstance(body, dict) else None
        if not isinstance(uses, list) or not all(_valid(u, experts) for u in uses):
            raise Bw24Error(f"{where}: line {number}: expected uses as [layer, expert] within the model's experts")
        steps.append([(u[0], u[1]) for u in uses])
    return Trace(str(head.get("model")), experts, entry, steps, tuple(names))


def _valid(use: Any, experts: list[int]) -> bool:
    return (isinstance(use, list) and len(use) == 2 and all(type(n) is int and n >= 0 for n in use) and use[0] < len(experts)
            and use[1] < experts[use[0]])


def _parse(line: str, where: str, number: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise Bw24Error(f"{where}: line {number}: expected JSON") from None


# ---- policies: each takes the uses in order and a capacity in experts, and returns how many were hits


def flat(trace: Trace) -> Iterator[Use]:
    for step in trace.uses:
        yield from step


def lru(trace: Trace, capacity: int) -> int:
    """One list over all layers; the least recently used goes."""
    held: OrderedDict[Use, None] = OrderedDict()
    hits = 0
    for use in flat(trace):
        if use in held:
            hits += 1
            held.move_to_end(use)
            continue
        held[use] = None
        if len(held) > capacity:
            held.popitem(last=False)
    return hits


def slru(trace: Trace, capacity: int) -> int:
    """A share for each layer; of it, four fifths for experts that were used again. A layer below its share takes from the one that has most."""
    layers = len(trace.experts)
    share = max(1.0, capacity / layers)
    probation: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(layers)]
    kept: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(layers)]
    size = lambda layer: len(probation[layer]) + len(kept[layer])  # noqa: E731
    hits = held = 0
    for layer, expert in flat(trace):
        if expert in probation[layer] or expert in kept[layer]:
            hits += 1
            probation[layer].pop(expert, None)
            kept[layer][expert] = None
            kept[layer].move_to_end(expert)
            while len(kept[layer]) > max(1.0, 0.8 * share):
                old, _ = kept[layer].popitem(last=False)
                probation[layer][old] = None
            continue
        if held >= capacity:
            victim = layer if size(layer) + 1 > share and size(layer) else max(range(layers), key=size)
            (probation[victim] or kept[victim]).popitem(last=False)
            held -= 1
        probation[layer][expert] = None
        held += 1
    return hits


def frozen(trace: Trace, capacity: int, uses: list[np.ndarray] | None = None) -> int:
    """The most used experts of a profile, else of the trace's first half, and nothing else; as for the others, the first use is no hit."""
    counts: dict[Use, int] = {}
    if uses is not None:
        counts = {(layer, e): int(n) for layer, u in enumerate(uses) for e, n in enumerate(u)}
    else:
        for step in trace.uses[: max(1, len(trace.uses) // 2)]:
            for use in step:
                counts[use] = counts.get(use, 0) + 1
    chosen = set(sorted(counts, key=lambda use: (-counts[use], use))[:capacity])
    order = list(flat(trace))
    return sum(use in chosen for use in order) - len(chosen.intersection(order))


def belady(trace: Trace, capacity: int) -> int:
    """The optimum: the expert whose next use is furthest goes, or the new one is not kept."""
    import heapq

    order = list(flat(trace))
    following, last = [len(order)] * len(order), {}
    for i in range(len(order) - 1, -1, -1):
        following[i] = last.get(order[i], len(order))
        last[order[i]] = i
    held: dict[Use, int] = {}
    heap: list[tuple[int, Use]] = []
    hits = 0
    for i, use in enumerate(order):
        hits += use in held
        held[use] = following[i]
        heapq.heappush(heap, (-following[i], use))
        while len(held) > capacity:
            key, victim = heapq.heappop(heap)
            if held.get(victim) == -key:
                del held[victim]
    return hits


def reuse(trace: Trace) -> float:
    """Share of a step's experts that the step before used, over neighbours with equally many uses: tokens, not a prompt's steps. 0 without any."""
    pairs = [(set(a), b) for a, b in zip(trace.uses, trace.uses[1:], strict=False) if a and len(a) == len(b)]
    total = sum(len(b) for _, b in pairs)
    return sum(use in a for a, b in pairs for use in b) / total if total else 0.0


POLICIES: dict[str, Callable[..., int]] = {"lru": lru, "slru": slru, "frozen": frozen, "belady": belady}


def replay(trace: Trace, capacities: list[int], uses: list[np.ndarray] | None = None) -> list[dict[str, Any]]:
    """Hit shares of every policy at each capacity (experts held)."""
    total = sum(len(step) for step in trace.uses)
    if not total:
        raise Bw24Error("the trace holds no use of any expert")
    out = []
    for capacity in capacities:
        row: dict[str, Any] = {"experts": capacity, "bytes": capacity * trace.entry, "share": capacity / trace.total}
        for name, policy in POLICIES.items():
            hits = frozen(trace, capacity, uses) if name == "frozen" else policy(trace, capacity)
            row[name] = hits / total
        out.append(row)
    return out
