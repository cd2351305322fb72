"""Tiny mixtures of experts as GGUF files, for tests that spill or divide them."""

from __future__ import annotations

import shutil
from pathlib import Path

from bw24 import convert
from conftest import FIXTURES

NAMES = ("qwen35moe", "hy_v3", "minimax-m2")


def write(folder: Path) -> dict[str, Path]:
    """One file of each of NAMES in `folder`, so that a test may damage a copy."""
    shutil.copy(FIXTURES / "tiny" / "qwen35moe.gguf", folder)
    for name in NAMES[1:]:
        convert.convert(FIXTURES / "checkpoints" / name.replace("-", "_"), folder / f"{name}.gguf", "keep")
    return {name: folder / f"{name}.gguf" for name in NAMES}
