"""The kernel that unpacks lifted experts without a card, as test_cuda_emulated.py has ATTEND's: the units that untiling and packing give."""

from __future__ import annotations

import subprocess

from test_cuda_emulated import CU, ROOT, compiled
from test_cuda_emulated_moe import source


def test_lifted_experts_have_the_packed_units(tmp_path):
    for name in ("device", "kv", "rows", "float", "unit", "op_linear", "pack", "op_pack"):
        (tmp_path / f"{name}.cuh").write_text(source(name), encoding="utf-8")
    untile = (CU / "untile.h").read_text(encoding="utf-8").replace('"../canon.h"', f'"{ROOT / "libbw24" / "canon.h"}"')
    (tmp_path / "untile.h").write_text(untile, encoding="utf-8")
    program = compiled(tmp_path, "lift")
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("PASS") == 24, done.stdout + done.stderr
