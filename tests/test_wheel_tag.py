"""scripts/wheel_tag.py: the platform tag of a shared library, from its own symbol versions."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from bw24 import abi

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import wheel_tag  # noqa: E402


def test_the_library_has_a_tag():
    abi.lib()
    with open("/proc/self/maps", encoding="utf-8") as maps:
        path = Path(next(line.split()[-1] for line in maps if line.rstrip().endswith("libbw24.so")))
    assert re.fullmatch(r"manylinux_2_\d+_\w+", wheel_tag.tag(path))
    assert any(library.startswith("libc.so") for library in wheel_tag.needs(path))


@pytest.mark.parametrize(("name", "glibc"), [
    ("GLIBC_2.2.5", (2, 2)), ("GLIBC_2.34", (2, 34)), ("GLIBCXX_3.4", (2, 17)), ("GLIBCXX_3.4.22", (2, 28)), ("CXXABI_1.3.9", (2, 28)),
    ("GCC_3.0", (2, 17)), ("GLIBCXX_3.4.99", None), ("OTHER_1.0", None), ("GLIBC_PRIVATE", None),
])
def test_policies(name, glibc):
    assert wheel_tag.glibc_for(name) == glibc


def test_what_no_policy_promises_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(wheel_tag, "needs", lambda path: {"libcuda.so.1": {"X"}})
    with pytest.raises(ValueError, match="needs versions of libcuda"):
        wheel_tag.tag(tmp_path)
    monkeypatch.setattr(wheel_tag, "needs", lambda path: {"libstdc++.so.6": {"GLIBCXX_3.4.99"}})
    with pytest.raises(ValueError, match="GLIBCXX_3.4.99"):
        wheel_tag.tag(tmp_path)
    (tmp_path / "x").write_bytes(b"no ELF file")
    with pytest.raises(ValueError, match="not a 64-bit"):
        monkeypatch.undo()
        wheel_tag.tag(tmp_path / "x")
