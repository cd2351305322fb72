"""What to expect of experts in VRAM, RAM and files: the cost of a token from byte counts and rates, hit shares from a popularity curve, and a probe
that measures this machine's rates in about two seconds. Owns the arithmetic; knows no command line and runs no model."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from .check import open_context, probe
from .errors import Bw24Error
from .gguf_types import TYPES
from .one_matrix import seconds_of_step

# Share of the router's choices that falls on the most used share of a layer's experts: Hy3 over 163,409 tokens of mixed text. Other models differ; a
# profile of the model's own replaces it.
CURVE = ((0.0, 0.0), (16 / 192, 0.223), (53 / 192, 0.4985), (126 / 192, 0.8498), (1.0, 1.0))
WORK_VRAM = 1.5e9  # bytes of video memory for KV cache and activations
CHUNK = 1 << 20  # bytes of one read, as the library's readers use
PROBE_SECONDS = 0.6  # of each part of the probe
# microseconds of a card beside the bytes it reads: a layer of a mixture; more where its experts are divided, for the way of rows and results between
# card and processor (H200: mixtures of 1024 and 4096 columns, sets of 25 to 75 % of the card's memory)
LAYER_US, SPLIT_US = 45.0, 90.0
# A byte of the few experts of a layer beside a card takes the processor its time over one large matrix, of which caches may hold a part, and the
# time of this rate: its threads are woken and meet four times a layer, and the bus reads the same memory. Eight settings on H200s with 16 cores,
# whose processors the probe found at 85 to 175 GB/s: 56 to 75 GB/s reached
CPU_BESIDE = 154e9
# how far a set whose experts RAM lacks comes, on the way from an arbitrary choice to the most used ones (H200, RAM for what the card lacks)
MOVES_ALONE = 0.25
PACK, PACKERS = 3e9, 3  # bytes a second of one thread that packs what was read, a matrix each: the expert waits for it as for the disk
BUS_US, BUS_BESIDE = 60.0, 0.85  # microseconds of a layer that takes experts over the bus; share of its rate beside a processor that reads memory


@dataclass(frozen=True)
class Rates:
    """Bytes a second: cpu (expert weights through the processor's kernels), disk, pcie, vram, ram (read by all threads), pack (of experts that were
    read); 0 of the last two: not counted. gpu_ms: milliseconds a token beside the experts."""

    cpu: float = 0.0
    disk: float = 0.0
    pcie: float = 0.0
    vram: float = 0.0
    gpu_ms: float = 0.0
    pack: float = 0.0
    ram: float = 0.0


@dataclass(frozen=True)
class Shape:
    """What the cost depends on. visits: experts used a token; expert: bytes of one; bank: of all; rest: of the other weights; layers: that have
    experts; beside: bytes of the card that experts cannot have (0: rest and WORK_VRAM)."""

    visits: int
    expert: float
    bank: float
    rest: float = 0.0
    layers: int = 0
    beside: float = 0.0


@dataclass(frozen=True)
class Hits:
    """vram: share of visits whose expert is in video memory; ram: share of the others whose expert is in RAM; divided: share of the layers of which
    the card has some experts and not all, or none."""

    vram: float
    ram: float
    divided: float = 0.0


@dataclass(frozen=True)
class Cost:
    """Milliseconds a token: other (attention and what is not experts), cpu, disk, card (its experts, computed while the processor computes the
    others), ram (its bus carrying what is read and computed); `serial` sums them, `ideal` overlaps disk with the rest, which share that bus."""

    other: float
    cpu: float
    disk: float
    card: float = 0.0
    ram: float = 0.0

    @property
    def serial(self) -> float:
        return self.other + max(self.cpu, self.card) + self.disk

    @property
    def ideal(self) -> float:
        return max(self.other + max(self.cpu, self.card), self.disk, self.ram)

    @property
    def rate(self) -> float:
        """Tokens a second where nothing overlaps, which is what was measured."""
        return 1000.0 / self.serial


def popularity(curve: Sequence[tuple[float, float]], share: float) -> float:
    """Share of choices that fall on the most used `share` of the experts: the curve, linear between its points."""
    return float(np.interp(min(max(share, 0.0), 1.0), [p[0] for p in curve], [p[1] for p in curve]))


def curve_of(uses: Sequence[np.ndarray]) -> tuple[tuple[float, float], ...]:
    """The popularity curve of a profile: experts of all layers together, most used first, at 33 points."""
    counts = np.sort(np.concatenate(uses))[::-1].astype(np.float64)
    total = counts.sum()
    if not total:
        raise Bw24Error("the profile counts no use of any expert")
    sums = np.concatenate([[0.0], np.cumsum(counts)]) / total
    at = np.unique(np.linspace(0, len(counts), 33).astype(int))
    return tuple((float(i / len(counts)), float(sums[i])) for i in at)


def hits(shape: Shape, vram: float, ram: float, curve: Sequence[tuple[float, float]] = CURVE, stays: bool = False) -> Hits:
    """Hit shares of video memory (less shape.beside) and RAM, each filled with the most used experts that the other lacks. stays: the card's set is a
    profile's, so the most used ones; otherwise it begins with an arbitrary choice and follows the text as far as RAM has its experts as well, for one
    that is nowhere else must be read again. Above two tokens' worth of experts an LRU comes within a few points of it."""
    in_vram = min(1.0, max(0.0, vram - (shape.beside or shape.rest + WORK_VRAM)) / shape.bank) if vram else 0.0
    in_ram = min(1.0 - in_vram, max(0.0, ram) / shape.bank)
    a, b = popularity(curve, in_vram), popularity(curve, in_vram + in_ram)
    twice = min(1.0, max(0.0, max(0.0, ram) / shape.bank - (1 - in_vram)) / in_vram) if in_vram else 1.0
    follows = 1.0 if stays or in_vram == 1 else MOVES_ALONE + (1 - MOVES_ALONE) * twice
    v = in_vram + follows * (a - in_vram)
    beside = popularity(curve, in_ram / (1 - in_vram)) if in_vram < 1 else 1.0
    r = follows * ((b - a) / (1 - a) if a < 1 else 1.0) + (1 - follows) * beside
    return Hits(v, r, 1.0 if vram and in_vram < 1 else 0.0)


def processor(h: Hits, rates: Rates) -> float:
    """Bytes of experts a second through the processor in a step."""
    return 1 / (1 / rates.cpu + h.divided / CPU_BESIDE) if rates.cpu and rates.vram else rates.cpu


def cost(shape: Shape, h: Hits, rates: Rates) -> Cost:
    """Milliseconds of one token: experts outside video memory go through the processor, those outside RAM come from disk before."""
    missing = shape.visits * (1 - h.vram) * shape.expert
    read, bus = missing * (1 - h.ram), over_bus(shape, h, rates)
    for name, needed in (("cpu", missing), ("disk", read)):
        if needed > 0 and not getattr(rates, name) > 0:
            raise Bw24Error(f"the rate {name} is needed: --rate {name}=GB/s, or let the probe measure it")
    card = shape.visits * h.vram * shape.expert / rates.vram * 1e3 if rates.vram else 0.0
    split = h.divided * shape.layers * SPLIT_US / 1e3 if rates.vram else 0.0
    own = (missing - bus) / processor(h, rates) * 1e3 if missing else 0.0
    packed = read / rates.pack * 1e3 if rates.pack else 0.0
    ram = (missing + read) / rates.ram * 1e3 if rates.ram else 0.0
    return Cost(rates.gpu_ms + split, own, read / rates.disk * 1e3 + packed if read > 0 else 0.0, card, ram)


def pack_rate(threads: int) -> float:
    """Bytes a second of an expert's matrices being packed."""
    return PACK * min(PACKERS, max(1, threads))


def over_bus(shape: Shape, h: Hits, rates: Rates) -> float:
    """Bytes a token that a card takes from RAM while the processor computes others: both sides of a layer end at once (cu/bus.cu)."""
    layers = h.divided * shape.layers
    if not (rates.vram and rates.pcie and rates.cpu and layers):
        return 0.0
    layer, bus, cpu = shape.visits * (1 - h.vram) * shape.expert / layers, BUS_BESIDE * rates.pcie, processor(h, rates)
    taken = (layer / cpu - BUS_US / 1e6) / (1 / cpu + 1 / bus)
    return layers * min(max(0.0, taken), layer * h.ram)


def reach(shape: Shape, vram: float, ram: float, rates: Rates, target: float, curve: Sequence[tuple[float, float]] = CURVE,
          fixed: Hits | None = None, stays: bool = False) -> list[str]:
    """What, changed alone, would give `target` tokens a second: one line for each of RAM, video memory, disk, processor and both rates."""
    def speed(v: float, r: float, k: Rates) -> float:
        return cost(shape, fixed or hits(shape, v, r, curve, stays), k).rate

    lines, most = [], shape.bank + (shape.beside or shape.rest + WORK_VRAM)
    ways = {
        "RAM": (lambda x: speed(vram, ram + x * (shape.bank - ram), rates), lambda x: f"{(ram + x * (shape.bank - ram)) / 2**30:.0f} GiB"),
        "VRAM": (lambda x: speed(vram + x * (most - vram), ram, rates), lambda x: f"{(vram + x * (most - vram)) / 2**30:.0f} GiB"),
        "disk": (lambda x: speed(vram, ram, replace(rates, disk=rates.disk * 16**x)), lambda x: f"{rates.disk * 16**x / 1e9:.1f} GB/s"),
        "processor": (lambda x: speed(vram, ram, replace(rates, cpu=rates.cpu * 16**x)), lambda x: f"{rates.cpu * 16**x / 1e9:.1f} GB/s"),
        "disk and processor": (lambda x: speed(vram, ram, replace(rates, disk=rates.disk * 16**x, cpu=rates.cpu * 16**x)),
                                     lambda x: f"both {16**x:.1f} times as fast"),
        "bytes an expert": (lambda x: cost(replace(shape, expert=shape.expert * (1 - 0.9 * x)),
                                           fixed or hits(shape, vram, ram, curve, stays), rates).rate,
                            lambda x: f"{shape.expert * (1 - 0.9 * x) / 1e6:.2f} MB"),
    }
    for name, (rate, say) in ways.items():
        if fixed and name in ("RAM", "VRAM") or (name == "RAM" and ram >= shape.bank) or (name == "VRAM" and vram >= most):
            continue
        low, high = 0.0, 1.0
        if rate(high) < target:
            lines.append(f"{name} alone: at most {rate(high):.1f} tok/s")
            continue
        for _ in range(40):
            mid = (low + high) / 2
            low, high = (low, mid) if rate(mid) >= target else (mid, high)
        lines.append(f"{name} alone: {say(high)}")
    return lines


# ---- the probe


def disk_rate(paths: Sequence[Path], threads: int = 8, seconds: float = PROBE_SECONDS) -> tuple[float, bool]:
    """Bytes a second of random 1 MiB reads over the files, past the page cache; False: O_DIRECT was refused, so it may be the cache's rate."""
    fds, direct = [], True
    try:
        for path in paths:
            try:
                fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT))
            except OSError:
                fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                direct = False
        spans = [max(1, os.fstat(fd).st_size // CHUNK) for fd in fds]
        end = time.perf_counter() + seconds

        def work(seed: int) -> int:
            rng, done = np.random.default_rng(seed), 0
            with mmap.mmap(-1, CHUNK) as buffer:
                while not done or time.perf_counter() < end:
                    k = int(rng.integers(len(fds)))
                    done += os.preadv(fds[k], [buffer], int(rng.integers(spans[k])) * CHUNK)
            return done

        started = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            total = sum(pool.map(work, range(threads)))
        return total / (time.perf_counter() - started), direct
    except OSError as error:
        raise Bw24Error(f"{paths[0]}: cannot read: {error.strerror}") from None
    finally:
        for fd in fds:
            os.close(fd)


def ram_rate(threads: int | None = None) -> float:
    """Bytes a second that all threads together read of RAM."""
    return probe(threads)[0] * 1e9


def cpu_rate(type_id: int, columns: int, threads: int | None = None, isa: str | None = None, seconds: float = PROBE_SECONDS) -> float:
    """Bytes a second of one row's products with matrices of a type, in the file's bytes: a LINEAR of 256 MB, which no cache holds, over and over."""
    _, block, size = TYPES[type_id]
    row = columns // block * size
    rows = max(16, (256 << 20) // row)
    with open_context("cpu", isa, threads) as ctx:
        return rows * row / seconds_of_step(ctx, type_id, columns, rows, np.zeros(rows * row, np.uint8), 1, seconds)
