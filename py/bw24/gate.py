"""Exactness gates: the same rows computed two ways must have the same bits. Knows engines, sequences and logits; knows no text and no file.

`verify_prefill` runs before every reply. `equalities` runs the whole list for `bw24 gate`.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import sampling
from .errors import Bw24Error
from .gate_spec import Speculation
from .generate import Progress, prefill

if TYPE_CHECKING:
    from .engine import Engine
    from .engine import Sequence as Timeline
    from .speculate import Drafted

Factory = Callable[..., "Engine"]  # makes an engine; keyword arguments override the settings in force

REPLAYED_ROWS = 8  # of the prompt, run again as decode before each reply: enough to cross a block of rows, and a few milliseconds each
UNSUPPORTED = -3  # BW24_E_UNSUPPORTED
NO_DEVICE = -9  # BW24_E_DEVICE
PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"
ISAS = ("portable", "avx2", "avxvnni", "avx512vnni")
KV_FORMATS = ("f32", "f16", "q8_0", "q5_1", "e4m3")


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two f32 arrays have the same shape and the same bytes, signs of zero included."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def maxdiff(a: np.ndarray, b: np.ndarray) -> float:
    """Largest |a - b| of two arrays of one shape."""
    return float(np.max(np.abs(a.astype(np.float64) - b.astype(np.float64)), initial=0.0))


# Of the class fast: |prefill - decode|^2 / |decode|^2 over the logits of the last rows. bf16 adds about 2^-16 a layer to the square
# (kernel-check holds ATTEND to 2^-12), the int8 activations behind it round differently then; a wrong key, mask or head is of order 1.
FAST_BOUND = 0.01
# Where a router chooses, a small difference chooses another expert now and then, and what follows differs by that expert: a mixture of 12
# layers and random weights has 0.08 in class fast where a cache in q8_0 instead of f32 alone makes 0.01. Two unrelated rows have 2.
FAST_BOUND_ROUTED = 0.5


@dataclass
class PrefillCheck:
    """The last rows of a prompt, as prefill and as decode. `seq` stands after the prompt, `logits` f32 [vocab] are its last row's.
    `error`: squared difference over squared decode; the class exact matches where no bit differs, the class fast where it is within `bound`."""

    prefill_argmax: int
    decode_argmax: int
    difference: float
    match: bool
    rows: int
    seq: Timeline
    logits: np.ndarray
    prompt_seconds: float  # of the prompt's own pass
    prefill: str = "exact"  # numeric class
    error: float = 0.0
    bound: float = FAST_BOUND

    def line(self) -> str:
        """The gate line."""
        verdict = "MATCH" if self.match else "MISMATCH"
        if self.prefill == "fast":
            verdict = f"error={self.error:.2e} {'WITHIN' if self.match else 'BEYOND'} {self.bound:g} (class fast, approximate)"
        picks = f"argmax={self.prefill_argmax} decode argmax={self.decode_argmax}"
        return f"verify-prefill {picks} logit maxdiff={self.difference:.3e} {verdict}"

    def as_dict(self) -> dict[str, Any]:
        """The gate's part of a JSON report."""
        return {
            "prefill_argmax": self.prefill_argmax, "decode_argmax": self.decode_argmax, "maxdiff": self.difference, "rows": self.rows,
            "match": self.match, "prefill": self.prefill, "error": self.error,
        }


def fast_bound(engine: Engine) -> float:
    """Largest `error` of class fast that the gate lets pass."""
    return FAST_BOUND_ROUTED if engine.model.params.int("expert_count", 1) > 1 else FAST_BOUND


def verify_prefill(engine: Engine, ids: Sequence[int], seq: Timeline | None = None, progress: Progress | None = None,
                   drafted: Drafted | None = None) -> PrefillCheck:
    """Append a prompt to `seq` (default: a new one), then run its last rows (at most 8) again one by one and compare all their logits.

    The second run works on a fork, taken back to before those rows, so `seq` is left as the prompt left it. `drafted`: the prompt goes to
    this timeline, which looks ahead; `seq` of the result is the trunk's part of it.
    """
    seq = drafted.seq if drafted else seq or engine.sequence()
    started = time.perf_counter()
    keep = min(REPLAYED_ROWS, len(ids), engine.max_rows)
    first = drafted.prefill(ids, keep, progress) if drafted else prefill(engine, seq, ids, keep, progress)
    seconds = time.perf_counter() - started
    rows, start = len(first), seq.pos - len(ids)
    worst, equal, second = 0.0, True, None
    error = size = 0.0
    with contextlib.closing(seq.fork()) as fork:
        at = fork.truncate(seq.pos - rows) - start  # a state that cannot be cut exactly there comes back to an earlier point
        if at < 0:
            raise Bw24Error(f"gate: the sequence cannot go back {rows} tokens from {seq.pos}")
        for i in range(at, len(ids)):  # row by row: eight rows of a large vocabulary are 8 MB
            second = fork.decode(ids[i])
            if (row := i - (len(ids) - rows)) >= 0:
                size += float(np.square(second, dtype=np.float64).sum())
                if not same_bits(first[row], second):
                    worst, equal = max(worst, maxdiff(first[row], second)), False
                    error += float(np.square(first[row].astype(np.float64) - second).sum())
    last, error = first[-1].copy(), error / size if size else 0.0
    bound = fast_bound(engine)
    match = equal if engine.prefill_class == "exact" else error <= bound
    return PrefillCheck(int(last.argmax()), int(second.argmax()), worst, match, rows, seq, last, seconds, engine.prefill_class, error, bound)


# ---- the whole list


@dataclass(frozen=True)
class Verdict:
    """One equality: PASS, FAIL or SKIP, and what was compared, the first difference, or why it was skipped."""

    status: str
    name: str
    detail: str

    def line(self) -> str:
        """As `bw24 gate` prints it."""
        return f"SKIP({self.detail}) {self.name}" if self.status == SKIP else f"{self.status} {self.name}: {self.detail}"


def run_rows(engine: Engine, ids: Sequence[int], width: int, seq: Timeline | None = None) -> np.ndarray:
    """Logits f32 [len(ids), vocab] of tokens appended `width` at a time (or as many as a step takes)."""
    own = seq is None
    seq = engine.sequence() if seq is None else seq
    width = min(width, engine.max_rows)
    try:
        return np.concatenate([engine.step([(seq, t, True) for t in ids[i : i + width]]) for i in range(0, len(ids), width)])
    finally:
        if own:
            seq.close()


def compare(expected: np.ndarray, found: np.ndarray) -> str | None:
    """None where the bits agree, else the first row that differs and the largest difference."""
    if same_bits(expected, found):
        return None
    if expected.shape != found.shape:
        return f"expected rows of shape {expected.shape}, found {found.shape}"
    rows = np.nonzero((expected.view(np.uint32) != found.view(np.uint32)).any(axis=1))[0]
    return f"{len(rows)} of {len(expected)} rows differ, the first is {rows[0]}, maxdiff={maxdiff(expected, found):.3e}"


@contextlib.contextmanager
def foreign_float_environment() -> Iterator[None]:
    """Round up, flush subnormals to zero: what a host program may have set in the calling thread. x86-64 with glibc's fenv_t."""
    libm = ctypes.CDLL("libm.so.6")
    saved, changed = ctypes.create_string_buffer(32), ctypes.create_string_buffer(32)
    libm.fegetenv(saved)
    libm.fegetenv(changed)
    control = int.from_bytes(changed.raw[28:32], "little")  # MXCSR: bit 15 FTZ, bit 6 DAZ, bits 13-14 rounding (2: up)
    control = (control & ~0x6000) | 0x8000 | 0x0040 | 0x4000
    changed[28:32] = control.to_bytes(4, "little")
    x87 = (int.from_bytes(changed.raw[0:2], "little") & ~0x0C00) | 0x0800  # bits 10-11 rounding (2: up)
    changed[0:2] = x87.to_bytes(2, "little")
    libm.fesetenv(changed)
    try:
        yield
    finally:
        libm.fesetenv(saved)


def sampled(engine: Engine, ids: Sequence[int], seed: int, count: int, width: int) -> list[int]:
    """`count` sampled tokens after a prompt that is appended `width` at a time."""
    params = sampling.SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=seed)
    with contextlib.closing(engine.sequence()) as seq:
        logits, history = run_rows(engine, ids, width, seq)[-1], list(ids)
        for _ in range(count):
            history.append(sampling.sample(logits, params, history, seq.pos))
            logits = seq.decode(history[-1])
    return history[len(ids):]


class Equalities:
    """Runs each equality on one model. `ids` is the prompt; `full` adds the slow arms; `factory` makes engines. drafts: whether factory(draft=True)
    has a drafter (None: where the model has an MTP block); classes: further prompts of drafted replies, as gate_spec.Speculation."""

    def __init__(self, factory: Factory, ids: Sequence[int], full: bool = False, drafts: bool | None = None,
                 classes: Mapping[str, Sequence[int]] | None = None):
        self.factory, self.ids, self.full = factory, list(ids), full
        self.slow_ids = self.ids if full else self.ids[:12]  # rows for arms without SIMD
        self.engine = factory()
        self.base = run_rows(self.engine, self.ids, len(self.ids))
        self._reference: np.ndarray | None = None
        model = getattr(self.engine, "model", None)
        if drafts is None:
            drafts = model is not None and model.mtp is not None
        self.speculation = Speculation(factory, ids, full, classes) if drafts else None

    def close(self) -> None:
        self.engine.close()
        if self.speculation:
            self.speculation.close()

    def run(self) -> Iterator[Verdict]:
        """Every equality in turn."""
        for name, arm in self.arms():
            try:
                problem, detail = arm()
                yield Verdict(FAIL if problem else PASS, name, problem or detail)
            except Bw24Error as error:
                yield Verdict(SKIP if error.code == UNSUPPORTED else FAIL, name, str(error))

    def arms(self) -> Iterator[tuple[str, Callable[[], tuple[str | None, str]]]]:
        """(name, function that gives (problem or None, what was compared))."""
        yield "prefill = decode", lambda: self.same_rows(self.engine, 1)
        for width in (7, 32, 100):
            yield f"prompt cut into {width} = whole", lambda width=width: self.same_rows(self.engine, width)
        yield "rows 1..32 = whole", self.every_width
        yield "two sequences in one step = each alone", self.interleaved
        yield "fork and go back = straight on", self.fork_and_truncate
        yield "seeded sampling repeats, whatever the cut", self.sampling_repeats
        yield "caller's float environment (round up, flush to zero) = default", self.float_environment
        for threads in (1, 2):
            yield f"threads {threads} = default", lambda threads=threads: self.same_rows_with(self.ids, threads=threads)
        yield "not fused = fused", lambda: self.same_rows_with(self.ids, fuse=False)
        yield "not repacked = repacked", lambda: self.same_rows_with(self.slow_ids, repack=False)
        yield "backend = ref", lambda: (compare(self.reference(), self.base[: len(self.slow_ids)]), self.counted(len(self.slow_ids)))
        yield "backend cuda = ref", self.cuda
        for isa in ISAS:
            yield f"isa {isa} = ref", lambda isa=isa: self.isa(isa)
        for kv in KV_FORMATS:
            yield f"KV {kv}: prefill = decode", lambda kv=kv: self.kv(kv)
        if self.speculation:
            yield from self.speculation.arms()
        if self.full:
            yield "long prompt, past the sliding window: cut into 100 = whole", self.long_prompt

    def counted(self, rows: int) -> str:
        return f"{rows} rows, bit-equal"

    def same_rows(self, engine: Engine, width: int) -> tuple[str | None, str]:
        return compare(self.base, run_rows(engine, self.ids, width)), self.counted(len(self.ids))

    def same_rows_with(self, ids: Sequence[int], **changes: Any) -> tuple[str | None, str]:
        with self.factory(**changes) as engine:
            return compare(self.base[: len(ids)], run_rows(engine, ids, len(ids))), self.counted(len(ids))

    def every_width(self) -> tuple[str | None, str]:
        widths = range(1, min(32, len(self.ids) - 1, self.engine.max_rows) + 1)
        begin = len(self.ids) - widths[-1]
        with contextlib.closing(self.engine.sequence()) as seq:
            run_rows(self.engine, self.ids[:begin], begin, seq)
            for width in widths:
                with contextlib.closing(seq.fork()) as fork:
                    found = run_rows(self.engine, self.ids[begin : begin + width], width, fork)
                problem = compare(self.base[begin : begin + width], found)
                if problem:
                    return f"{width} rows in one step: {problem}", ""
        return None, f"{len(widths)} widths, bit-equal"

    def interleaved(self) -> tuple[str | None, str]:
        """Two timelines of different length, in steps of 1 to 5 rows of each."""
        half = len(self.ids) // 2
        sides = [self.ids, self.ids[::-1][:half]]
        alone = [self.base, run_rows(self.engine, sides[1], half)]
        seqs, found = [self.engine.sequence(), self.engine.sequence()], [[], []]
        at, turn = [0, 0], 0
        while any(at[s] < len(sides[s]) for s in (0, 1)):
            rows = []
            for s in (0, 1) if turn % 2 else (1, 0):
                part = sides[s][at[s] : at[s] + 1 + (turn + 2 * s) % 5]
                rows += [(seqs[s], token, True) for token in part]
                at[s] += len(part)
            logits = self.engine.step(rows)
            for row, (seq, _, _) in zip(logits, rows, strict=True):
                found[seqs.index(seq)].append(row)
            turn += 1
        for seq in seqs:
            seq.close()
        problems = [compare(alone[s], np.stack(found[s])) for s in (0, 1)]
        return next((f"sequence {s}: {p}" for s, p in enumerate(problems) if p), None), f"{at[0] + at[1]} rows in {turn} steps, bit-equal"

    def fork_and_truncate(self) -> tuple[str | None, str]:
        """Wrong tokens appended to a fork, then taken back: both timelines go on as if nothing had been."""
        cut = len(self.ids) - min(16, len(self.ids) // 2)
        with contextlib.closing(self.engine.sequence()) as seq:
            run_rows(self.engine, self.ids[:cut], cut, seq)
            with contextlib.closing(seq.fork()) as fork:
                half = (cut + len(self.ids)) // 2
                begun = run_rows(self.engine, self.ids[cut:half], 4, seq)
                run_rows(self.engine, self.ids[:5], 5, fork)  # over positions that the original has filled: not in the same memory
                original = np.concatenate([begun, run_rows(self.engine, self.ids[half:], 4, seq)])
                back = fork.truncate(cut)
                found = run_rows(self.engine, self.ids[back:], 3, fork)
        problem = compare(self.base[back:], found) or compare(self.base[cut:], original)
        return problem, self.counted(len(found) + len(original))

    def sampling_repeats(self) -> tuple[str | None, str]:
        count = 24 if len(self.ids) > 24 else 4
        ids = self.ids[: len(self.ids) - count] if len(self.ids) > count else self.ids
        runs = [sampled(self.engine, ids, 7, count, width) for width in (len(ids), len(ids), 7)]
        problem = None if runs[0] == runs[1] == runs[2] else f"seed 7 gave {runs[0][:8]}.., {runs[1][:8]}.., {runs[2][:8]}.."
        return problem, f"{count} tokens, three runs"

    def float_environment(self) -> tuple[str | None, str]:
        if platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
            raise Bw24Error(f"the control register is known on x86_64 with glibc, found {platform.machine()}", UNSUPPORTED)
        with contextlib.closing(self.engine.sequence()) as seq:
            with foreign_float_environment():
                found = self.engine.step([(seq, token, True) for token in self.ids[: self.engine.max_rows]])
        return compare(self.base[: len(found)], found), self.counted(len(found))

    def reference(self) -> np.ndarray:
        """The plain C reference's rows of slow_ids."""
        if self._reference is None:
            with self.factory(backend="ref", isa=None) as engine:
                self._reference = run_rows(engine, self.slow_ids, len(self.slow_ids))
        return self._reference

    def cuda(self) -> tuple[str | None, str]:
        try:
            opened = self.factory(backend="cuda", isa=None)
        except Bw24Error as error:  # no card is no failure; a card that fails later is
            raise Bw24Error(str(error), UNSUPPORTED if error.code == NO_DEVICE else error.code) from None
        with opened as engine:
            found = run_rows(engine, self.slow_ids, len(self.slow_ids))
        return compare(self.reference(), found), self.counted(len(self.slow_ids))

    def isa(self, isa: str) -> tuple[str | None, str]:
        with self.factory(backend="cpu", isa=isa) as engine:
            found = run_rows(engine, self.slow_ids, len(self.slow_ids))
        return compare(self.reference(), found), self.counted(len(self.slow_ids))

    def kv(self, kv: str) -> tuple[str | None, str]:
        with self.factory(kv=kv) as engine:
            whole = run_rows(engine, self.ids, len(self.ids))
            return compare(whole, run_rows(engine, self.ids, 1)), self.counted(len(self.ids))

    def long_prompt(self) -> tuple[str | None, str]:
        """Longer than any sliding window of the supported models (1024), where the context allows; the last 8 rows are compared."""
        n = min(1400, self.engine.ctx - 1)
        ids = (self.ids * (n // len(self.ids) + 1))[:n]
        tails = []
        for width in (self.engine.max_rows, 100):
            with contextlib.closing(self.engine.sequence()) as seq:
                for i in range(0, n - 8, width):
                    prefill(self.engine, seq, ids[i : min(i + width, n - 8)])
                tails.append(run_rows(self.engine, ids[n - 8 :], 8, seq))
        return compare(tails[0], tails[1]), f"the last 8 of {n} rows, bit-equal"
