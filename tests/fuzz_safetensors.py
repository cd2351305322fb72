"""Fuzz target of the safetensors reader: `python tests/fuzz_safetensors.py --seconds 60`.

A finding is any exception but Bw24Error, a slow input, memory growth, or an accepted header whose tensors leave the file or overlap; it is
written to --out and ends the run with status 1. Standard library only; a run is repeated by its printed --seed.
"""

from __future__ import annotations

import argparse
import random
import resource
import struct
import sys
import time
import traceback
from pathlib import Path

from bw24.errors import Bw24Error
from bw24.safetensors import parse_header
from fuzz_gguf import BytesSource

LIMIT_SECONDS = 0.2  # CPU time of one input
LIMIT_GROWTH = 80 << 20  # bytes of peak memory over the whole run
NUMBERS = ["0", "1", "-1", "2", "7", "8", "255", "65536", "2147483648", "4294967296", "4611686018427387904", "9223372036854775807",
           "9223372036854775808", "18446744073709551616", "1e3", "2.0", "true", "null", "[]", '"8"', "9" * 4000]
WORDS = ["F32", "BF16", "F8_E4M3", "U8", "F4", "F6_E3M2", "C64", "BOOL", "X",
         "\\u0000", "\\ud800", "dtype", "shape", "data_offsets", "__metadata__", "a"]
SEEDS = [
    '{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"U8","shape":[4],"data_offsets":[24,28]}}',
    '{"__metadata__":{"format":"pt"},"x.weight":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]},"s":{"dtype":"F16","shape":[],"data_offsets":[8,10]}}',
    '{"e":{"dtype":"I64","shape":[0],"data_offsets":[0,0]},"f":{"dtype":"F4","shape":[16],"data_offsets":[0,8]}}',
    '{}',
]


def parse(data: bytes) -> bool:
    """True if the reader accepts the bytes, False if it refuses them; any other outcome is an exception, the finding."""
    try:
        entries = parse_header(BytesSource(data), "input")
    except Bw24Error as error:
        text = str(error)
        assert text.isprintable() and len(text) < 1500, f"message is not one short printable line: {text!r}"
        return False
    at = 8 + struct.unpack("<Q", data[:8])[0]
    for e in entries.values():
        assert e.offset == at, f"{e} does not begin where the tensor before it ends"
        at += e.nbytes
    assert at == len(data), f"the tensors end at {at} of {len(data)} bytes"
    return True


def mutate_text(rng: random.Random, text: str) -> str:
    """The JSON with a few edits: numbers, words, cuts, repeats, nesting."""
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(6)
        digits = [i for i, c in enumerate(text) if c.isdigit()]
        quotes = [i for i, c in enumerate(text) if c == '"']
        at = rng.randrange(len(text) + 1)
        if kind == 0 and digits:
            i = rng.choice(digits)
            text = text[:i] + rng.choice(NUMBERS) + text[i + 1 :]
        elif kind == 1 and len(quotes) > 1:
            k = rng.randrange(len(quotes) - 1)
            text = text[: quotes[k] + 1] + rng.choice(WORDS) + text[quotes[k + 1] :]
        elif kind == 2:
            text = text[:at] + text[min(len(text), at + rng.randint(1, 12)) :]
        elif kind == 3:
            end = min(len(text), at + rng.randint(1, 60))
            text = text[:end] + text[at:end] * rng.choice((1, 2, 200)) + text[end:]
        elif kind == 4:
            text = text[:at] + rng.choice("{[\"") * rng.choice((1, 10, 20000)) + text[at:]
        else:
            text = text[:at] + rng.choice('{}[]",:\\ \x00') + text[at:]
    return text[: 1 << 20]


def candidate(rng: random.Random) -> bytes:
    text = rng.choice(SEEDS)
    raw = (mutate_text(rng, text) if rng.random() < 0.9 else text).encode("utf-8", "surrogatepass")
    length = len(raw) if rng.random() < 0.9 else rng.choice((0, 1, len(raw) + 1, len(raw) + 64, 100 << 20, (1 << 63) - 1, (1 << 64) - 1))
    data = bytearray(struct.pack("<Q", length) + raw + bytes(rng.choice((0, 8, 10, 24, 28, 28, rng.randrange(64)))))
    if rng.random() < 0.3:
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(seconds: float, seed: int, out: Path) -> int:
    rng, began = random.Random(seed), time.monotonic()
    for text in SEEDS:
        parse(struct.pack("<Q", len(text)) + text.encode() + bytes(28))
    base, count, accepted = peak(), 0, 0
    while time.monotonic() - began < seconds:
        data = candidate(rng)
        start, problem = time.process_time(), ""
        try:
            accepted += parse(data)
        except BaseException:
            problem = traceback.format_exc()
        spent = time.process_time() - start
        if not problem and spent > LIMIT_SECONDS:
            problem = f"took {spent:.3f} s, the limit is {LIMIT_SECONDS}"
        if not problem and peak() - base > LIMIT_GROWTH:
            problem = f"memory grew by {(peak() - base) >> 20} MiB, the limit is {LIMIT_GROWTH >> 20}"
        if problem:
            out.write_bytes(data)
            print(f"finding after {count} inputs (seed {seed}), written to {out}:\n{problem}")
            return 1
        count += 1
    print(f"{count} inputs, {accepted} accepted, no finding (seed {seed}, memory +{(peak() - base) >> 20} MiB)")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--out", type=Path, default=Path("fuzz-safetensors-finding"))
    args = parser.parse_args()
    return run(args.seconds, args.seed, args.out)


if __name__ == "__main__":
    sys.exit(main())
