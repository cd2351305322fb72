"""The mixture's CUDA kernels without a card, as test_cuda_emulated.py has ATTEND's: products of pairs, the GEMM over an expert's pairs, the sums
after them and the router give the bits of plain loops."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from test_cuda_emulated import BARRIERS, CU, END, ROOT, between, compiled, emulated
from test_cuda_emulated_linear import without_ptx

SOURCES = ("device", "kv", "rows", "float", "op_route", "moe", "op_linear_one", "op_experts", "op_experts_any", "op_gemm", "op_experts_gemm",
           "op_router", "bf16", "op_gemm_wgmma", "op_gemm_groups", "op_gemm_fast")
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
"""

# products of a warp group: each warp has its 16 of the 64 outputs, the rows come from shared memory by the place that wg_rows gives
WARP_GROUPS = """inline uint64_t wg_rows(const uint8_t *tile, int at) { return (uint64_t)tile + at; }
inline void wg_mma(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) { emu::wg_mma(&d[0][0], a, b); }
template <int N> inline void wg_wait() {}
inline uint32_t bf16_times(uint32_t a, uint32_t b) { return emu::bf16_times(a, b); }
"""
WARP_GROUPS_F16 = """template <bool FIRST>
inline void wg_mma64(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) { emu::wg_mma64(&d[0][0], a, b, FIRST); }
inline uint64_t wg_further(uint64_t rows, int bytes) { return rows + bytes; }
inline void wg_held(float (&)[8][4]) {}
inline uint32_t halves_less(uint32_t v, uint32_t zero) { return emu::halves_less(v, zero); }
"""



def source(name: str) -> str:
    """A source with its PTX replaced; of op_linear what EXPERTS uses."""
    if name not in ("unit", "op_linear"):
        text = emulated(name)
        text = without_ptx(text)
        if name == "op_gemm_wgmma":
            text = between(text, "template <int N> __device__ __forceinline__ void wg_wait", "/* ---- activations", WARP_GROUPS)
        if name == "op_gemm_groups":
            text = between(text, "/* d [64 outputs][64 rows]", "__device__ __forceinline__ uint32_t signed_pair", WARP_GROUPS_F16)
        return text.replace('"../route.h"', f'"{ROOT / "libbw24" / "route.h"}"')
    text = (CU / f"{name}.cuh").read_text(encoding="utf-8")
    if name == "unit":
        text = re.sub(r'uint32_t v;\n    asm\("prmt.*?return v;', "return emu::prmt(a, b, sel);", text, flags=re.S)
        text = re.sub(r'uint32_t v;\n    asm\("dp2a.*?return v;', "return w >> 16;", text, flags=re.S)
        return re.sub(r'uint(\d) v;\n    asm volatile\("ld\.global.*?return v;', r"return *(const uint\1 *)p;", text, flags=re.S)
    values = text.index("/* the group value t from accumulators"), text.index("/* Activations of one segment for R row slots")
    store = text.index("/* the part that tile block tb belongs to"), text.index("/* x / n, rounded down")
    barriers = BARRIERS[: BARRIERS.index("inline void mma32")]
    return text[: text.index("/* ---- mbarriers and bulk copies")] + barriers + PRODUCTS + text[slice(*values)] + text[slice(*store)] + END


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("emulated_moe")
    for name in (*SOURCES, "unit", "op_linear"):
        (folder / f"{name}.cuh").write_text(source(name), encoding="utf-8")
    return compiled(folder, "moe")


def test_linear_of_the_fast_class_is_close(program):
    """Against sums in f64 of weights and activations rounded to bf16 once each."""
    done = subprocess.run([str(program), "5"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 30


def test_linear_of_many_rows_has_the_plain_loops_bits(program):
    done = subprocess.run([str(program), "6"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 19


@pytest.mark.parametrize("case", range(5))
def test_mixtures_have_the_plain_loops_bits(program, case):
    done = subprocess.run([str(program), str(case)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") >= 5
