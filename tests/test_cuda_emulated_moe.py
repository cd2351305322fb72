"""The mixture's CUDA kernels without a card, as test_cuda_emulated.py has ATTEND's: products of pairs, the GEMM over an expert's pairs, the sums
after them and the router give the bits of plain loops."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from test_cuda_emulated import ROOT, between, compiled, emulated
from test_cuda_emulated_linear import source as linear_source
from test_cuda_emulated_linear import without_ptx

SOURCES = ("device", "kv", "rows", "float", "op_route", "moe", "op_linear_one", "op_experts", "op_experts_any", "op_gemm", "op_experts_gemm",
           "op_router", "op_float", "op_float_few", "bf16", "op_gemm_wgmma", "op_gemm_codes", "op_gemm_groups", "op_experts_groups", "op_gemm_fast")

# products of a warp group: each warp has its 16 of the 64 outputs, the rows come from shared memory by the place that wg_rows gives
WARP_GROUPS = """inline uint64_t wg_rows(const uint8_t *tile, int at) { return (uint64_t)tile + at; }
inline void wg_mma(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) { emu::wg_mma(&d[0][0], a, b); }
template <int N> inline void wg_wait() {}
inline uint32_t bf16_times(uint32_t a, uint32_t b) { return emu::bf16_times(a, b); }
"""
WARP_GROUPS_F16 = """template <bool FIRST, int N>
inline void wg_f16(float (&d)[N][4], const uint32_t (&a)[4], uint64_t b) { emu::wg_f16(&d[0][0], a, b, FIRST, N); }
inline uint64_t wg_further(uint64_t rows, int bytes) { return rows + bytes; }
template <int N> inline void wg_held(float (&)[N][4]) {}
inline uint32_t and_or(uint32_t v, uint32_t mask, uint32_t k) { return (v & mask) | k; }
inline uint32_t and_xor(uint32_t v, uint32_t mask, uint32_t k) { return (v & mask) ^ k; }
inline uint32_t halves_less(uint32_t v, uint32_t zero) { return emu::halves_less(v, zero); }
inline uint32_t sixteenths_plus(uint32_t v, uint32_t zero) { return emu::sixteenths_plus(v, zero); }
"""


def source(name: str) -> str:
    """A source with its PTX replaced; of op_linear what EXPERTS uses."""
    if name not in ("unit", "op_linear"):
        text = emulated(name)
        if name == "op_experts_groups":
            text = re.sub(r'asm volatile\("bar\.sync[^\n]*', "emu::bar_team(group + 1, 128); }", text)
        text = without_ptx(text)
        if name == "op_gemm_wgmma":
            text = between(text, "template <int N> __device__ __forceinline__ void wg_wait", "/* ---- activations", WARP_GROUPS)
        if name == "op_gemm_codes":
            text = between(text, "/* ---- the instruction", "/* rows of bytes:", WARP_GROUPS_F16)
        return text.replace('"../route.h"', f'"{ROOT / "libbw24" / "route.h"}"')
    return linear_source(name)


def build(folder: Path, stages: int = 3, case: int | None = None) -> Path:
    """The program for cards whose GEMM has this many stages; `case`: as compiled's."""
    for name in (*SOURCES, "unit", "op_linear"):
        text = source(name)
        if name == "op_gemm":
            assert "constexpr int GEMM_STAGES = 3;" in text
            text = text.replace("constexpr int GEMM_STAGES = 3;", f"constexpr int GEMM_STAGES = {stages};")
        (folder / f"{name}.cuh").write_text(text, encoding="utf-8")
    return compiled(folder, "moe", case)


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("emulated_moe"))


def test_linear_of_the_fast_class_is_close(program):
    """Against sums in f64 of weights and activations rounded to bf16 once each."""
    done = subprocess.run([str(program), "5"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 30


@pytest.mark.parametrize("stages", [3, 2])
def test_linear_of_many_rows_has_the_plain_loops_bits(program, tmp_path, stages):
    program = program if stages == 3 else build(tmp_path, stages, 6)
    done = subprocess.run([str(program), "6"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 19


def test_linear_of_floats_has_the_plain_loops_bits(program):
    done = subprocess.run([str(program), "8"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 4


def test_experts_by_warp_groups_have_the_plain_loops_bits(program):
    """Rows whose scales span too much among them, tiles of 64, 96 and 128 rows."""
    done = subprocess.run([str(program), "7"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 24


@pytest.mark.parametrize("case", range(5))
def test_mixtures_have_the_plain_loops_bits(program, case):
    done = subprocess.run([str(program), str(case)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") >= 5
