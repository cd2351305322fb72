"""Fuzz target of the GGUF reader: `python tests/fuzz_gguf.py --seconds 60`.

A finding is any exception but Bw24Error, a slow input, or memory growth; it is written to --out and ends the run with status 1. Mutates the
hostile set and one file with every value type, by its own loop (standard library only); with --atheris, coverage guided where that package
is installed. A run is repeated by its printed --seed.
"""

from __future__ import annotations

import argparse
import random
import resource
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path

from bw24.errors import Bw24Error
from bw24.gguf import GGUFWriter, merge_parts, parse_header

HERE = Path(__file__).parent
LIMIT_SECONDS = 0.1  # CPU time of one input
LIMIT_GROWTH = 50 << 20  # bytes of peak memory over the whole run
NUMBERS = [0, 1, 2, 7, 31, 32, 255, 256, 65535, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 61, 1 << 62,
           (1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 1]


class BytesSource:
    """A file in memory."""

    def __init__(self, data: bytes):
        self.data, self.size = data, len(data)

    def read(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]


def parse(data: bytes) -> bool:
    """True if the reader accepts the bytes, False if it refuses them; any other outcome is an exception, the finding."""
    try:
        head = merge_parts([parse_header(BytesSource(data), "input")])
    except Bw24Error as error:
        text = str(error)
        assert text.isprintable() and len(text) < 1000, f"message is not one short printable line: {text!r}"
        return False
    for info in head.tensors.values():
        assert head.data_start <= info.offset and info.offset + info.nbytes <= len(data), f"{info} leaves the file"
    return True


def corpus() -> list[bytes]:
    seeds = [path.read_bytes() for path in sorted((HERE / "fixtures" / "hostile").glob("*.gguf"))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "all.gguf"
        with GGUFWriter(path, 64) as w:
            for kind in ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f32", "f64"):
                w.add(f"k.{kind}", 1, kind)
                w.add(f"a.{kind}", [1, 2, 3], kind)
            for key, value in {"s": "text", "b": True, "as": ["x", "yy", ""], "ab": [True, False]}.items():
                w.add(key, value)
            w.add_tensor("t", "Q4_K", (256, 2), bytes(288))
            w.add_tensor("u", "F32", (3, 1, 2, 1), bytes(24))
        seeds.append(path.read_bytes())
    return seeds


def mutate(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """One to four changes: a byte, a whole number, a cut, a repeated, removed or foreign stretch."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        what = rng.randrange(8)
        if what == 0 and at < len(out):
            out[at] = rng.randrange(256)
        elif what == 1 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif what == 2:
            out[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
        elif what == 3:
            out[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) & 0xFFFFFFFF)
        elif what == 4:
            del out[at:]
        elif what == 5:
            del out[at : at + rng.randint(1, 40)]
        elif what == 6:
            out[at:at] = out[max(0, at - rng.randint(1, 64)) : at]
        else:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            out[at:at] = other[start : start + rng.randint(1, 128)]
    return bytes(out)


def check(data: bytes, base_memory: int) -> str | None:
    """What is wrong with the reader's behaviour on these bytes, or None."""
    start = time.thread_time()
    try:
        parse(data)
    except Exception:
        return traceback.format_exc()
    spent = time.thread_time() - start
    if spent > LIMIT_SECONDS:
        return f"took {spent:.3f} s"
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - base_memory
    return f"peak memory grew by {growth >> 20} MiB" if growth > LIMIT_GROWTH else None


def fuzz(seconds: float, seed: int, out: Path) -> int:
    """Number of findings (the loop stops at the first)."""
    rng, seeds = random.Random(seed), corpus()
    pool = [data for data in seeds if data]
    for data in seeds:
        parse(data)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    end, runs, accepted = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end:
        data = mutate(rng, rng.choice(pool), pool)
        runs += 1
        wrong = check(data, base)
        if wrong:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"finding-{seed}-{runs}.gguf").write_bytes(data)
            print(f"finding after {runs} inputs (seed {seed}), written to {out}:\n{wrong}", file=sys.stderr)
            return 1
        if runs % 16 == 0 and parse(data):  # some accepted mutants become seeds, so that changes pile up
            accepted += 1
            pool[rng.randrange(len(pool))] = data if len(data) < 65536 else pool[0]
    print(f"fuzz_gguf: {runs} inputs in {seconds:g} s, seed {seed}, {accepted} accepted mutants kept, no finding", file=sys.stderr)
    return 0


def fuzz_guided(arguments: list[str]) -> None:
    """Coverage-guided run; arguments go to libFuzzer."""
    import atheris

    atheris.instrument_func(parse_header)
    atheris.Setup([sys.argv[0], *arguments], lambda data: parse(bytes(data)))
    atheris.Fuzz()


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seconds", type=float, default=60)
    options.add_argument("--seed", type=int, default=None, help="default: from the clock, printed")
    options.add_argument("--out", type=Path, default=Path("fuzz-findings"))
    options.add_argument("--atheris", action="store_true", help="coverage guided; the rest of the line goes to libFuzzer")
    known, rest = options.parse_known_args()
    if known.atheris:
        fuzz_guided([f"-max_total_time={int(known.seconds)}", *rest])
        return 0
    if rest:
        options.error(f"unknown arguments {rest}")
    return fuzz(known.seconds, time.time_ns() % (1 << 32) if known.seed is None else known.seed, known.out)


if __name__ == "__main__":
    sys.exit(main())
