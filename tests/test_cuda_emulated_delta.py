"""CONV's and DELTA's CUDA kernels without a card: their sources over an emulation of blocks and warps (tests/cuda/emulate.h) give the bits of plain
loops: outputs, states, versions, logs, the way back. Skips without CUDA's headers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from test_cuda_emulated import between, compiled, emulated

SOURCES = ("device", "early", "fold", "gdn", "op_delta", "op_delta_rows", "op_fold", "op_gdn", "tf32", "op_delta_fast")
TF32 = """inline float tf32(float v) { return emu::tf32(v); }
inline void mma_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) { emu::mma_tf32(c, a, b0, b1); }

"""


BARRIER = "__syncthreads();\n                if (r + WALK_GROUP > logged)"


def build(folder: Path, fault: tuple[str, str, str] | None = None) -> Path:
    """The program; `fault`: a source, a text in it, and what stands there instead."""
    for name in SOURCES:
        text = emulated(name).replace("BW_CONV_TAPS", "8")
        if name == "tf32":
            text = between(text, "/* v for a product", "} // namespace", TF32)
        if fault and fault[0] == name:
            assert fault[1] in text
            text = text.replace(fault[1], fault[2])
        (folder / f"{name}.cuh").write_text(text, encoding="utf-8")
    return compiled(folder, "delta")


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("delta"))


@pytest.mark.parametrize("case", range(5))
def test_delta_has_the_plain_loops_bits(program, case):
    done = subprocess.run([str(program), str(case)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout and done.stdout.count("PASS") >= 7


def test_delta_of_the_fast_class_is_close(program):
    """Chunks against the plain loops, keys almost alike and decays near 0 among them; the rows of the log have the exact kernel's bits."""
    done = subprocess.run([str(program), "5"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 15


def test_a_missing_barrier_is_seen(tmp_path):
    """Without it a warp reads rows that the others have not brought yet."""
    program = build(tmp_path, ("op_delta_rows", BARRIER, BARRIER.replace("__syncthreads();", "")))
    assert subprocess.run([str(program), "0"], capture_output=True).returncode == 1
