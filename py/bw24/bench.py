"""The measuring core of `bw24 bench`: rounds in which the two sides alternate, medians, ratios and their intervals.

Owns the order of measuring and the statistics. Refuses to know engines: our side is two callables that return seconds, the other a Peer.
The protocol and the meaning of every figure are in research/benchmarks.md.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .errors import Bw24Error
from .peer import Cell, Peer

MIN_ROUNDS = 5  # five pairs are the fewest whose extremes hold the median ratio with more than 90 % confidence
DISTURBED = 0.15  # cores used by others during a round; above it the round is measured again
COVERAGE = 0.90
SCHEMA = 1


class Subject(Protocol):
    """Our side. Each call runs once from an empty sequence and returns the seconds of the timed part alone, not of building the depth."""

    def prefill(self, n_tokens: int, depth: int) -> float: ...

    def decode(self, n_tokens: int, depth: int) -> float: ...


class Others:
    """CPU time that other processes (and the host) took since `start`, in cores. Linux only; elsewhere 0."""

    def __init__(self) -> None:
        self._ticks = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
        self.start()

    def start(self) -> None:
        self._wall, self._busy, self._own = time.monotonic(), self._read_busy(), self._read_own()

    def cores(self) -> float:
        wall = time.monotonic() - self._wall
        used = self._read_busy() - self._busy - (self._read_own() - self._own)
        return max(used / wall, 0.0) if wall > 0 else 0.0

    def _read_busy(self) -> float:
        try:
            with open("/proc/stat", encoding="ascii") as stat:
                user, nice, system, _idle, _wait, irq, soft, steal = map(int, stat.readline().split()[1:9])
        except (OSError, ValueError):
            return 0.0
        return (user + nice + system + irq + soft + steal) / self._ticks

    @staticmethod
    def _read_own() -> float:
        t = os.times()
        return t.user + t.system + t.children_user + t.children_system


@dataclass(frozen=True)
class Round:
    """Seconds by cell of one round, for us and the peer (empty without one), and the cores that others used meanwhile."""

    ours: dict[Cell, float]
    peer: dict[Cell, float]
    others: float

    @property
    def disturbed(self) -> bool:
        return self.others > DISTURBED


@dataclass
class Side:
    """Tokens per second of one side over the rounds."""

    samples: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def as_json(self) -> dict[str, Any]:
        return {"median": self.median, "min": min(self.samples), "max": max(self.samples), "samples": self.samples}


@dataclass
class Row:
    """One cell's figures. `pairs`: our rate over the peer's, round by round."""

    cell: Cell
    ours: Side
    peer: Side | None

    @property
    def ratio(self) -> float | None:
        return None if self.peer is None else self.ours.median / self.peer.median

    @property
    def pairs(self) -> list[float]:
        return [] if self.peer is None else [a / b for a, b in zip(self.ours.samples, self.peer.samples, strict=True)]

    def as_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"kind": self.cell.kind, "tokens": self.cell.tokens, "depth": self.cell.depth, "ours": self.ours.as_json()}
        if self.peer is not None:
            low, high, coverage = median_interval(self.pairs)
            out |= {"peer": self.peer.as_json(), "ratio": self.ratio, "pair_low": low, "pair_high": high, "pair_coverage": coverage}
        return out


@dataclass
class Result:
    """All that one run of the bench found. `kept` are the rounds the figures come from, out of `tried`."""

    rows: list[Row]
    kept: list[Round]
    tried: int
    peer_name: str | None = None
    peer_build: str | None = None
    wall_gbps: float | None = None
    weight_bytes: int | None = None
    context: dict[str, Any] = field(default_factory=dict)

    def row(self, kind: str, tokens: int | None = None) -> Row | None:
        """The row of that kind (and size) with the smallest depth."""
        found = [r for r in self.rows if r.cell.kind == kind and tokens in (None, r.cell.tokens)]
        return min(found, key=lambda r: r.cell.depth, default=None)

    def decode_gbps(self) -> float | None:
        """Weight bytes read per second in decode, 1e9 bytes; the cache's bytes are not counted."""
        row = self.row("decode")
        return None if row is None or self.weight_bytes is None else self.weight_bytes * row.ours.median / 1e9

    def wall_fraction(self) -> float | None:
        rate = self.decode_gbps()
        return None if rate is None or not self.wall_gbps else rate / self.wall_gbps

    def as_json(self) -> dict[str, Any]:
        """The object that `bw24 bench --json` prints and that a line of research/*.jsonl holds."""
        def ratio(kind: str, tokens: int | None = None) -> float | None:
            row = self.row(kind, tokens)
            return None if row is None else row.ratio
        others = [r.others for r in self.kept]
        return {
            "schema": SCHEMA, **self.context,
            "peer": None if self.peer_name is None else {"name": self.peer_name, "build": self.peer_build},
            "rounds": len(self.kept), "tried": self.tried, "disturbed": sum(r.disturbed for r in self.kept),
            "others_cores": {"median": statistics.median(others), "max": max(others)},
            "cells": [row.as_json() for row in self.rows],
            "decode_ratio": ratio("decode"), "prefill_ratio_256": ratio("prefill", 256), "prefill_ratio_1024": ratio("prefill", 1024),
            "weight_bytes": self.weight_bytes, "wall_gbps": self.wall_gbps, "decode_gbps": self.decode_gbps(),
            "wall_fraction": self.wall_fraction(),
        }

    def lines(self) -> list[str]:
        """The result as text, for a person."""
        out = [f"{'test':<20} {'ours tok/s':>10} {'min':>9} {'max':>9}"]
        if self.peer_name:
            out[0] += f" {'peer tok/s':>11} {'min':>9} {'max':>9} {'ratio':>7}  pairs"
        for row in self.rows:
            line = f"{str(row.cell):<20} {row.ours.median:10.1f} {min(row.ours.samples):9.1f} {max(row.ours.samples):9.1f}"
            if row.peer is not None:
                low, high, _ = median_interval(row.pairs)
                line += f" {row.peer.median:11.1f} {min(row.peer.samples):9.1f} {max(row.peer.samples):9.1f}"
                line += f" {row.ratio:6.2f}x  {low:.2f}..{high:.2f}"
            out.append(line)
        rate, share = self.decode_gbps(), self.wall_fraction()
        if rate is not None:
            wall = f", {share:.0%} of the {self.wall_gbps:.1f} GB/s read wall" if share else ""
            out.append(f"decode reads {rate:.1f} GB/s of weights{wall}")
        if self.peer_name:
            out.append(f"peer: {self.peer_name}, {self.peer_build}")
        if self.context.get("prefill") == "fast":
            out.append("prefill class fast: approximate, not decode's bits")
        out.append(self._conditions())
        return out

    def _conditions(self) -> str:
        text = f"{len(self.kept)} rounds, medians"
        dropped, loud = self.tried - len(self.kept), sum(r.disturbed for r in self.kept)
        if dropped:
            text += f"; {dropped} more left out, others used over {DISTURBED} cores during them"
        if loud:
            text += f"; NOT QUIET: in {loud} of them others used up to {max(r.others for r in self.kept):.2f} cores"
        return text


def default_cells(prefills: Sequence[int] = (256, 1024), decodes: Sequence[int] = (64,), depths: Sequence[int] = (0,)) -> list[Cell]:
    """Every prefill size and decode length at every depth."""
    cells = [Cell(kind, n, depth) for depth in depths for kind, sizes in (("prefill", prefills), ("decode", decodes)) for n in sizes]
    if not cells or any(cell.tokens < 1 or cell.depth < 0 for cell in cells):
        asked = f"prefill {list(prefills)}, decode {list(decodes)} at {list(depths)}"
        raise Bw24Error(f"bench: sizes start at 1 and depths at 0, asked for {asked}")
    return list(dict.fromkeys(cells))


def median_interval(values: Sequence[float], coverage: float = COVERAGE) -> tuple[float, float, float]:
    """Interval for the median from order statistics, without any assumption on the distribution: (low, high, its coverage).

    The k-th smallest and largest of n values miss the median with probability 2 P(Binomial(n, 1/2) < k); the largest k that keeps
    `coverage` is taken, the extremes where none does.
    """
    ordered, n = sorted(values), len(values)

    def miss(k: int) -> float:
        return 2 * sum(math.comb(n, i) for i in range(k)) / 2**n

    best = max([k for k in range(1, n // 2 + 1) if 1 - miss(k) >= coverage], default=1)
    return ordered[best - 1], ordered[n - best], max(1 - miss(best), 0.0)


def time_ours(subject: Subject, cells: Sequence[Cell]) -> dict[Cell, float]:
    """Run every cell once on our side; seconds by cell."""
    times = {}
    for cell in cells:
        seconds = (subject.prefill if cell.kind == "prefill" else subject.decode)(cell.tokens, cell.depth)
        if not seconds > 0:
            raise Bw24Error(f"bench: {cell} took {seconds} s: the clock did not move")
        times[cell] = seconds
    return times


def run_round(number: int, subject: Subject, peer: Peer | None, cells: Sequence[Cell], others: Others) -> Round:
    """One pair. Who goes first changes from round to round, so that a drift of the machine weighs on both alike."""
    others.start()
    if number % 2 and peer is not None:
        theirs = peer.round(cells)
        ours = time_ours(subject, cells)
    else:
        ours = time_ours(subject, cells)
        theirs = {} if peer is None else peer.round(cells)
    return Round(ours, theirs, others.cores())


def run_bench(subject: Subject, peer: Peer | None, cells: Sequence[Cell], rounds: int = MIN_ROUNDS, *, wall_gbps: float | None = None,
              weight_bytes: int | None = None, context: dict[str, Any] | None = None, others: Others | None = None,
              progress: Callable[[int, int], None] | None = None) -> Result:
    """Warm up, let the peer choose its flags, then measure `rounds` quiet rounds, trying at most twice as many; where that is not enough the
    quietest ones are kept.

    `wall_gbps`: read bandwidth of the machine; `weight_bytes`: bytes of weights that one decoded token reads; `context`: keys that go
    into the JSON object as they are; `progress(done, rounds)` is called after every round.
    """
    if rounds < MIN_ROUNDS:
        raise Bw24Error(f"bench: at least {MIN_ROUNDS} rounds, asked for {rounds}")
    others = others or Others()
    time_ours(subject, cells)
    if peer is not None:
        peer.settle(cells)
    tried: list[Round] = []
    while len(tried) < 2 * rounds and sum(not r.disturbed for r in tried) < rounds:
        tried.append(run_round(len(tried), subject, peer, cells, others))
        if progress:
            progress(min(sum(not r.disturbed for r in tried), rounds), rounds)
    quietest = sorted(range(len(tried)), key=lambda i: (tried[i].disturbed, tried[i].others if tried[i].disturbed else 0.0, i))
    kept = [tried[i] for i in sorted(quietest[:rounds])]
    rows = [Row(cell, Side([cell.tokens / r.ours[cell] for r in kept]), Side([cell.tokens / r.peer[cell] for r in kept]) if peer else None)
            for cell in cells]
    return Result(rows, kept, len(tried), peer.name if peer else None, peer.build if peer else None, wall_gbps, weight_bytes, context or {})
