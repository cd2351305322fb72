"""Writes libbw24/formats/grids.c, the lattice codebooks of the IQ1, IQ2 and IQ3 types, from the `gguf` package's tables.

Owns the packing of a codebook row into one 16-bit word; knows nothing of blocks.
Run: python scripts/make_grids.py > libbw24/formats/grids.c
"""

from __future__ import annotations

import hashlib
import sys

import gguf.quants as quants
import numpy as np

# table name, gguf class, bits of one field, sum of all entries, first 16 hex digits of the SHA-256 of the int8 entries
TABLES = [
    ("bw_grid_iq2xxs", quants.IQ2_XXS, 2, 38611, "05826b5d3e472a3a"),
    ("bw_grid_iq2xs", quants.IQ2_XS, 2, 81582, "06e47aaca60b4dc1"),
    ("bw_grid_iq2s", quants.IQ2_S, 2, 167589, "e1aa1473412b0552"),
    ("bw_grid_iq3xxs", quants.IQ3_XXS, 4, 25592, "46e35f5a997efdee"),
    ("bw_grid_iq3s", quants.IQ3_S, 4, 12748, "bd1af4945a1717c6"),
    ("bw_grid_iq1", quants.IQ1_S, 2, -15, "07540ffc1aeaf6ad"),
]

HEADER = """\
/* Lattice codebooks of the IQ1, IQ2 and IQ3 types: data, written by scripts/make_grids.py; do not edit. Knows nothing of blocks.
 * One word a row, first entry in the lowest bits; a field is the index of the entry in the table's value list:
 * IQ2 2 bits of {8, 25, 43}; IQ3_XXS 4 bits of {4, 12, .. 52, 62}; IQ3_S 4 bits of {1, 3, .. 15}; IQ1 2 bits of {-1, 0, 1}.
 * The lattices are those of ggml and its Python package `gguf` (MIT License, Copyright (c) 2023-2026 The ggml authors):
 *   Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated documentation
 *   files (the "Software"), to deal in the Software without restriction, including without limitation the rights to use, copy,
 *   modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit persons to whom the
 *   Software is furnished to do so, subject to the following conditions: The above copyright notice and this permission notice
 *   shall be included in all copies or substantial portions of the Software. THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY
 *   OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR
 *   PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
 *   LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR
 *   THE USE OR OTHER DEALINGS IN THE SOFTWARE. */
#include "grids.h"
"""


def unpack(cls: type) -> np.ndarray:
    """The codebook of a gguf class as field indices, shape = grid_shape. Its hex text holds 2-bit fields (3 values) or 4-bit fields."""
    raw = np.frombuffer(bytes.fromhex(cls.grid_hex.decode()), dtype=np.uint8)
    bits = 2 if len(cls.grid_map) <= 4 else 4
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((raw[:, None] >> shifts) & ((1 << bits) - 1)).reshape(cls.grid_shape)


def check(name: str, entries: np.ndarray, total: int, digest: str) -> None:
    """Compare a table with its known sum and digest; raises ValueError naming the table."""
    found = hashlib.sha256(entries.astype(np.int8).tobytes()).hexdigest()[:16]
    if int(entries.sum()) != total or found != digest:
        raise ValueError(f"{name}: expected sum {total} and digest {digest}, found {int(entries.sum())} and {found}")


def render() -> str:
    """The text of grids.c."""
    out = [HEADER]
    for name, cls, bits, total, digest in TABLES:
        fields = unpack(cls)
        check(name, np.array(cls.grid_map)[fields], total, digest)
        words = (fields.astype(np.uint32) << (bits * np.arange(fields.shape[1], dtype=np.uint32))).sum(axis=1)
        out.append(f"\nconst uint16_t {name}[{len(words)}] = {{\n")
        out += ["    " + ", ".join(f"0x{w:04x}" for w in words[i : i + 16]) + ",\n" for i in range(0, len(words), 16)]
        out.append("};\n")
    return "".join(out)


if __name__ == "__main__":
    sys.stdout.write(render())
