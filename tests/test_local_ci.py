"""The tools of scripts/local_ci.sh: which tests concern a change, and that a lost test is noticed."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import scope  # noqa: E402
import skips  # noqa: E402

AVAILABLE = sorted(p.name for p in (ROOT / "tests").glob("test_*.py"))


@pytest.mark.parametrize(("path", "expected"), [
    ("libbw24/cpu/linear_avx512.c", "test_numerics.py"), ("libbw24/sample.c", "test_sampling.py"), ("README.md", "test_docs.py"),
    ("py/bw24/server/app.py", "test_server_app.py"), ("py/bw24/report.py", None), ("tests/test_report.py", "test_report.py"),
    ("py/bw24/arch/qwen35.py", "test_arch_models.py"),
])
def test_a_change_has_its_tests(path, expected):
    chosen = scope.tests_for([path], AVAILABLE)
    assert expected in chosen if expected else chosen == ["test_report.py"]


def test_every_rule_names_a_test_that_exists():
    for pattern, names in scope.RULES:
        for name in names:
            if "\\" not in name and name != "cuda":
                assert scope.tests_for([f"tests/test_{name}.py"], AVAILABLE), f"{pattern}: no test_{name}*.py"


def test_the_slowest_tests_run_where_their_files_changed():
    chosen = ["test_digests.py", "test_numerics.py"]
    kernels, digests = "tests/test_numerics.py::test_every_kernel_is_the_reference", "tests/test_digests.py::test_digests"
    assert scope.left_out(["libbw24/cpu/linear_avx512.c"], chosen) == [
        f"{digests}[portable]", f"{digests}[avx2]", f"{kernels}[portable]", f"{kernels}[avx2]"]
    assert scope.left_out(["libbw24/cpu/linear_avx2.c"], chosen) == [f"{digests}[portable]", f"{kernels}[portable]"]
    assert scope.left_out(["libbw24/cpu/linear_tmpl.h"], chosen) == [] == scope.left_out(["README.md"], ["test_docs.py"])
    text = (ROOT / "tests" / "test_numerics.py").read_text(encoding="utf-8")
    assert "def test_every_kernel_is_the_reference(isa" in text


def test_what_may_be_left_out_exists():
    for file, tests in scope.SLOW.items():
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert all(f"def {test.split('[')[0]}(" in text for test in tests), file
    assert set(AVAILABLE) >= scope.LONGEST


C_AVAILABLE = sorted(p.stem.removeprefix("test_") for p in (ROOT / "tests" / "c").glob("test_*.c"))


def test_every_c_test_concerns_some_source():
    sources = [str(p.relative_to(ROOT)) for p in (ROOT / "libbw24").rglob("*") if p.is_file()]
    chosen = {name for source in sources for name in scope.c_tests_for([source], C_AVAILABLE)}
    assert chosen == set(C_AVAILABLE)
    assert scope.c_tests_for(["libbw24/sample.c", "tests/c/test_list.c"], C_AVAILABLE) == ["list", "sample"]
    assert scope.c_tests_for(["README.md"], C_AVAILABLE) == []


def report(tmp_path: Path, reasons: list[str]) -> Path:
    cases = "".join(f'<testcase name="t{i}"><skipped message="{r}"/></testcase>' for i, r in enumerate(reasons))
    (tmp_path / "r.xml").write_text(f"<testsuites><testsuite><testcase name='ok'/>{cases}</testsuite></testsuites>")
    return tmp_path / "r.xml"


def test_skips_are_held_to_their_budget(tmp_path):
    found, total = skips.count(report(tmp_path, ["no card 3", "no card 4", "BW24_GOLDENS is not set"]))
    assert total == 4 and found == Counter({"no card N": 2, "BW24_GOLDENS is not set": 1})
    assert skips.judge(found, {"no card N": 2, "BW24_GOLDENS is not set": 5}) == []
    assert skips.judge(found, {"no card N": 1, "BW24_GOLDENS is not set": 5}) == ["2 skips, budget 1: no card N"]
    assert skips.kind("could not import 'torch': No module named 'torch'") == "could not import torch"
    assert skips.judge(found, {"no card N": 2}) == ["1 skips, budget 0: BW24_GOLDENS is not set"]
