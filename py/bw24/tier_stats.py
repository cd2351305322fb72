"""What each step cost where experts are read from files: counters before and after, and the experts themselves for a trace. Owns the differences and
their wording; changes nothing that is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import tiers
from .errors import Bw24Error
from .tier_replay import TraceWriter, decode

if TYPE_CHECKING:
    from .engine import Engine

COUNTED = ("visits", "visit_hits", "wanted", "hits", "bytes_read", "mirror_bytes", "reads", "fallbacks", "errors", "evictions", "wait_ns",
           "compute_ns", "vram_visits", "card_ns", "lifted", "swaps")


@dataclass(frozen=True)
class Step:
    """One step: rows, seconds, and by how much each counter of the library moved."""

    rows: int
    seconds: float
    counts: dict[str, int]

    def line(self, number: int) -> str:
        """As `bw24 gen --stats` prints it."""
        c = self.counts
        what = f"token {number}" if self.rows == 1 else f"{self.rows} rows"
        return f"{what}: {c['visits']} experts, {where(c)}, read {c['bytes_read'] / 1e6:.1f} MB in {c['reads']} reads, {times(c, self.seconds)}"


def where(c: dict[str, int]) -> str:
    """Shares of the visits by where the expert was."""
    card = f"on the card {share(c['vram_visits'], c['visits'])}, " if c["vram_visits"] or c["card_ns"] else ""
    if c["lifted"]:
        card += f"over the bus {share(c['lifted'], c['visits'])}, "
    return f"{card}in RAM {share(c['visit_hits'], c['visits'])}"


def times(c: dict[str, int], seconds: float) -> str:
    """Milliseconds of a step: waiting for reads, the processor's experts, waiting for the card where experts are divided, what is left."""
    ms, disk, cpu, card = seconds * 1e3, c["wait_ns"] / 1e6, c["compute_ns"] / 1e6, c["card_ns"] / 1e6
    waits = f"card {card:.1f}, " if card else ""
    return f"{ms:.1f} ms: disk {disk:.1f}, experts {cpu:.1f}, {waits}other {max(0.0, ms - disk - cpu - card):.1f}"


def share(part: int, whole: int) -> str:
    """A percentage; a dash where there is nothing to have a share of."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


class Recorder:
    """Listens to an engine's steps from now on. `trace`: a file for `bw24 tiers replay`, or None. Raises Bw24Error where it cannot be written."""

    def __init__(self, engine: Engine, trace: str | None = None):
        self._engine, self._spill, self.steps = engine, engine.spill, []
        if self._spill is None:
            raise Bw24Error("--trace: the model has no experts" if trace else "--stats: every weight is in memory; --ram reads experts from files")
        self._before = self._spill.stats()
        self._writer = None
        if trace:
            layers = self._spill.layers()
            entry = max(1, self._before["bank"] // sum(n for _, n in layers))
            self._writer = TraceWriter(trace, tiers.model_hash(engine.model), layers, entry)
            self._spill.trace()  # what was read before is no part of it
        engine.after_step = self._step

    def _step(self, rows: int, seconds: float) -> None:
        now = self._spill.stats()
        self.steps.append(Step(rows, seconds, {name: now[name] - self._before[name] for name in COUNTED}))
        self._before = now
        if self._writer:
            self._writer.step(rows, [use for step in decode(self._spill.trace()) for use in step])

    def lines(self) -> list[str]:
        """A line for each step, and one for all that ran a single row."""
        number, out = 0, []
        for step in self.steps:
            number += step.rows == 1
            out.append(step.line(number))
        single = [s for s in self.steps if s.rows == 1]
        if single:
            t = self.total(single)
            mean = {name: t[name] // len(single) for name in t}
            seconds = sum(s.seconds for s in single) / len(single)
            out.append(f"a token: {where(t)}, {t['bytes_read'] / 1e6 / len(single):.1f} MB read, {times(mean, seconds)}")
        now = self._before
        if now["vram_experts"]:
            out.append(f"experts on the card: {now['vram_experts']}, {now['vram_used'] / 1e6:.1f} of {now['vram'] / 1e6:.1f} MB")
        out.append(f"RAM for experts: {now['used'] / 1e6:.1f} MB in use, at most {now['peak'] / 1e6:.1f} of {now['limit'] / 1e6:.1f} MB; "
                   f"{'O_DIRECT' if now['direct'] else 'buffered reads, O_DIRECT was refused'}; {now['errors']} read errors, "
                   f"{now['fallbacks']} fallbacks")
        return out

    @staticmethod
    def total(steps: list[Step]) -> dict[str, int]:
        """Sums of the counters."""
        return {name: sum(s.counts[name] for s in steps) for name in COUNTED}

    def as_dict(self) -> dict[str, Any]:
        """The figures of the JSON report: sums over steps of one row, the others, and the budget."""
        single, wide = [s for s in self.steps if s.rows == 1], [s for s in self.steps if s.rows > 1]
        budget = {name: self._before[name] for name in ("budget", "floor", "limit", "used", "peak", "bank", "direct", "mirrors", "vram", "vram_used",
                                                       "vram_experts")}
        return {"tokens": len(single), "token_seconds": round(sum(s.seconds for s in single), 6), "token_counts": self.total(single),
                "prompt_counts": self.total(wide), **budget}

    def close(self) -> None:
        """Stops listening; the trace file is whole afterwards."""
        self._engine.after_step = None
        if self._writer:
            self._writer.close()
            self._writer = None
