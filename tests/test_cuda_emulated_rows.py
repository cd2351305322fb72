"""Runs of row ops without a card, as test_cuda_emulated.py has ATTEND's kernels: k_chain and k_quant give the interpreter's bits, and take no run
that they cannot do."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from test_cuda_emulated import CU, compiled
from test_cuda_emulated_moe import source

SOURCES = ("device", "early", "kv", "rows", "op_route", "op_rows", "chain", "op_chain")


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("emulated_rows")
    for name in SOURCES:
        (folder / f"{name}.cuh").write_text(source(name), encoding="utf-8")
    (folder / "chain.cu").write_text((CU / "chain.cu").read_text(encoding="utf-8").replace('"forward.h"', '"chain.cuh"'), encoding="utf-8")
    return compiled(folder, "rows")


@pytest.mark.parametrize("case", range(5))
def test_runs_have_the_interpreters_bits(program, case):
    done = subprocess.run([str(program), str(case)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == (23 if case < 4 else 8)


def test_a_norm_shared_out_among_blocks_has_the_bits_of_one(program):
    done = subprocess.run([str(program), "5"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 30  # five widths, one, two and four parts, a block a row and one for all rows
