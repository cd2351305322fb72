"""LINEAR's CUDA kernels of few rows without a card, as test_cuda_emulated.py has ATTEND's: products, scales, the hand-over to the warps that add
up, and the gate give the bits of plain loops, for every form of unit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from test_cuda_emulated import BARRIERS, CU, between, compiled, emulated
from test_cuda_emulated_linear import PRODUCTS, source, without_ptx

FIRST = """template <bool UNSIGNED = false>
inline void mma32_first(int *c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    for (int i = 0; i < 4; i++) c[i] = MAGIC;
    mma32<UNSIGNED>(c, a0, a1, a2, a3, b0, b1);
}
inline void mma16_first(int *c, uint32_t a0, uint32_t a1, uint32_t b0) {
    for (int i = 0; i < 4; i++) c[i] = MAGIC;
    mma16(c, a0, a1, b0);
}
"""


def linear_source() -> str:
    """op_linear.cuh with barriers, copies and products replaced."""
    text = (CU / "op_linear.cuh").read_text(encoding="utf-8")
    barriers = BARRIERS[: BARRIERS.index("inline void mma32")]
    after = "template <bool UNSIGNED = false> __device__ __forceinline__ void mma32_to("
    products = PRODUCTS[: PRODUCTS.index("template <bool UNSIGNED = false>\ninline void mma32_to")]
    text = between(text, "/* ---- mbarriers and bulk copies", after, barriers + products + FIRST)
    return without_ptx(text)


HALVES = """inline uint32_t halves_fma(uint32_t a, uint32_t b, uint32_t c) { return emu::halves_fma(a, b, c); }
inline uint32_t times_plus(uint32_t x, uint32_t y, uint32_t z) { return x * y + z; }
inline void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { emu::mma_f16(c, a, b0, b1); }

"""


def half_source() -> str:
    text = (CU / "op_linear_half.cuh").read_text(encoding="utf-8")
    return without_ptx(between(text, "/* ---- the instructions */", "/* ---- weights", HALVES))


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("emulated_linear")
    (folder / "device.cuh").write_text(emulated("device"), encoding="utf-8")
    (folder / "unit.cuh").write_text(source("unit"), encoding="utf-8")
    (folder / "op_linear.cuh").write_text(linear_source(), encoding="utf-8")
    (folder / "op_linear_half.cuh").write_text(half_source(), encoding="utf-8")
    (folder / "op_linear_stream.cuh").write_text(without_ptx(emulated("op_linear_stream")), encoding="utf-8")
    return compiled(folder, "linear_few")


@pytest.mark.parametrize("case", range(5))
def test_linears_of_few_rows_have_the_plain_loops_bits(program, case):
    done = subprocess.run([str(program), str(case)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 21
