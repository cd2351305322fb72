"""LINEAR of one row without a card, as test_cuda_emulated.py has ATTEND: k_linear_one and k_linear_tiny give the bits of plain loops
for every unit of weights."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from test_cuda_emulated import BARRIERS, CU, END, compiled, emulated

PRODUCTS = """template <bool UNSIGNED = false>
inline void mma32(int *c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    uint32_t a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    emu::mma_s8(c, a, b, UNSIGNED);
}
inline void mma16(int *c, uint32_t a0, uint32_t a1, uint32_t b0) {
    uint32_t a[4] = {a0, a1, 0, 0}, b[2] = {b0, 0};
    emu::mma_s8(c, a, b);
}
template <bool UNSIGNED = false>
inline void mma32_to(bool first, int *c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    if (first) c[0] = c[1] = c[2] = c[3] = MAGIC;
    mma32<UNSIGNED>(c, a0, a1, a2, a3, b0, b1);
}
inline void mma16_to(bool first, int *c, uint32_t a0, uint32_t a1, uint32_t b0) {
    if (first) c[0] = c[1] = c[2] = c[3] = MAGIC;
    mma16(c, a0, a1, b0);
}
"""


def without_ptx(text: str) -> str:
    text = re.sub(r'asm volatile\("ld\.relaxed\.gpu\.global\.v4[^\n]*', "memcpy(v, p, 16);", text)
    text = re.sub(r'asm volatile\("ld\.relaxed\.gpu\.global\.v2[^\n]*', "memcpy(&x, p, 4); memcpy(&y, (const char *)p + 4, 4);", text)
    text = re.sub(r'asm volatile\("ld\.relaxed\.gpu\.global\.f32[^\n]*', "*v = *p; }", text)
    text = re.sub(r'asm volatile\((?:"[^"\n]*"|[^;"])*\);', ";", text)
    return re.sub(r"extern __shared__[^;]*?(\w+) (\w+)\[\];", r"\1 *\2 = (\1 *)emu::shared;", text).replace("__grid_constant__", "")


def source(name: str) -> str:
    """A source with its PTX replaced; of op_linear what one row needs."""
    text = (CU / f"{name}.cuh").read_text(encoding="utf-8")
    if name == "device":
        return without_ptx(emulated(name))
    if name == "unit":
        text = re.sub(r'uint32_t v;\n    asm\("prmt.*?return v;', "return emu::prmt(a, b, sel);", text, flags=re.S)
        text = re.sub(r'uint32_t v;\n    asm\("dp2a.*?return v;', "return w >> 16;", text, flags=re.S)
        return re.sub(r'uint(\d) v;\n    asm volatile\("ld\.global.*?return v;', r"return *(const uint\1 *)p;", text, flags=re.S)
    if name == "op_linear":
        barriers = BARRIERS[: BARRIERS.index("inline void mma32")]
        parts = [
            ("/* p with a group folded in", "/* Activations of one segment for R row slots"),
            ("/* the products of values below zero", "/* the integers of a group of a unit"),
            ("/* the part that tile block tb belongs to", "/* x / n, rounded down"),
        ]
        kept = "".join(text[text.index(begin) : text.index(end)] for begin, end in parts)
        text = text[: text.index("/* ---- mbarriers and bulk copies")] + barriers + PRODUCTS + kept + END
    return without_ptx(text)


def build(folder: Path, program: str) -> Path:
    for name in ("device", "unit", "op_linear", "op_linear_one", "op_linear_tiny"):
        (folder / f"{name}.cuh").write_text(source(name), encoding="utf-8")
    return compiled(folder, program)


@pytest.mark.parametrize(("program", "cases"), [("linear_one", 33), ("linear_tiny", 40)])
def test_one_row_has_the_plain_loops_bits(tmp_path, program, cases):
    done = subprocess.run([str(build(tmp_path, program))], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == cases
