"""The settings table: parsing, precedence, the generated page, and that every entry names a test that exists."""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bw24 import flags
from bw24.errors import Bw24Error

ROOT = Path(__file__).resolve().parent.parent


def parsed(names: list[str], words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    flags.add_options(parser, names)
    args = parser.parse_args(words)
    flags.settle(args, names)
    return args


def test_option_wins_over_variable_and_variable_over_default(monkeypatch):
    monkeypatch.delenv("BW24_THREADS", raising=False)
    assert parsed(["threads"], []).threads is None
    monkeypatch.setenv("BW24_THREADS", "3")
    assert parsed(["threads"], []).threads == 3
    assert parsed(["threads"], ["--threads", "5"]).threads == 5
    monkeypatch.setenv("BW24_THREADS", "")
    assert parsed(["threads"], []).threads is None


@pytest.mark.parametrize("name, text, message", [
    ("threads", "0", "expected a whole number 1..1024, found 0"),
    ("threads", "two", "expected a whole number 1..1024, found 'two'"),
    ("threads", "1.5", "found '1.5'"),
    ("temperature", "nan", "expected a number 0..100, found nan"),
    ("temperature", "-0.1", "found -0.1"),
    ("top_p", "1.01", "expected a number 0..1, found 1.01"),
    ("kv", "f8", "expected f32, f16, q8_0, q5_1"),
    ("kv", "f16/f16/f16", "found 'f16/f16/f16'"),
    ("kv", "full=f16,side=f16", "found 'full=f16,side=f16'"),
    ("backend", "gpu", "expected one of auto, cpu, cuda, ref, found 'gpu'"),
    ("backend", "cuda:x", "found 'cuda:x'"),
    ("backend", "cpu:1", "found 'cpu:1'"),
    ("fuse", "maybe", "expected 1 or 0, found 'maybe'"),
    ("seed", "-1", "found -1"),
])
def test_a_bad_value_is_refused_with_what_was_expected(name, text, message):
    with pytest.raises(Bw24Error) as caught:
        flags.BY_NAME[name].parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["f32", "q8_0/q5_1", "e4m3", "full=q8_0,window=f16", "full=e4m3,window=q8_0/q5_1"])
def test_kv_formats(text):
    assert flags.BY_NAME["kv"].parse(text) == text


def test_a_device_number():
    assert flags.BY_NAME["backend"].parse("cuda:1") == "cuda:1"


def test_a_bad_variable_is_named_with_its_value():
    with pytest.raises(Bw24Error) as caught:
        flags.environment("ctx", {"BW24_CTX": "many"})
    assert str(caught.value) == "BW24_CTX=many: expected a whole number 1..16777216, found 'many'"


def test_kv_fp8_is_e4m3_where_nothing_else_is_said(monkeypatch):
    monkeypatch.delenv("BW24_KV", raising=False)
    monkeypatch.setenv("BW24_KV_FP8", "1")
    assert parsed(["kv"], []).kv == "e4m3" and parsed(["kv"], ["--kv", "q8_0"]).kv == "q8_0"
    monkeypatch.setenv("BW24_KV", "f16")
    assert parsed(["kv"], []).kv == "f16"
    monkeypatch.setenv("BW24_KV_FP8", "0")
    monkeypatch.delenv("BW24_KV")
    assert parsed(["kv"], []).kv is None


def test_the_sizes_in_the_help_are_the_formats(monkeypatch):
    """Bytes of 32 K and 32 V values, from the library's own sizes."""
    from bw24 import abi, engine

    size = {name: abi.types()[abi.type_id(kind)] for name, kind in engine.KV_FORMATS.items()}
    figures = dict(part.rsplit(" ", 1) for part in flags.KV_SIZES.split("values: ")[1].split(", "))
    assert set(engine.KV_FORMATS) == set(flags.KV_FORMATS) and set(figures) == {*flags.KV_FORMATS, "q8_0/q5_1"}
    for name, text in figures.items():
        assert int(text) == sum(32 // size[f][1] * size[f][2] for f in engine.kv_pair(name))


def test_unknown_variables_are_reported_with_the_nearest_name():
    lines = flags.unknown_variables({"BW24_THREAD": "2", "BW24_KV": "f16", "BW24_XYZZY_PLUGH": "1", "PATH": "/bin"})
    assert lines[0] == "BW24_THREAD is set but nothing reads it; did you mean BW24_THREADS?"
    assert lines[1].startswith("BW24_XYZZY_PLUGH is set") and len(lines) == 2


def test_another_library_is_loaded_where_the_variable_says(tmp_path):
    run = [sys.executable, "-m", "bw24", "--version"]
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "py"), "BW24_LIBRARY": str(tmp_path / "none.so")}
    done = subprocess.run(run, env=environ, capture_output=True, text=True)
    assert done.returncode == 2 and "none.so is missing" in done.stderr
    shutil.copy(ROOT / "py" / "bw24" / "libbw24.so", tmp_path / "none.so")
    assert subprocess.run(run, env=environ, capture_output=True).returncode == 0


def test_variables_reach_their_readers(tmp_path):
    """The cache folder: `models` lists the folder that the variable names."""
    run = [sys.executable, "-m", "bw24", "models", "--json"]
    base = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT / "py")}
    folder = tmp_path / "cache" / "models"
    folder.mkdir(parents=True)
    from bw24 import models

    alias = models.ALIASES["smollm2"]
    with open(folder / alias.file, "wb") as file:
        file.truncate(alias.size)
    for extra, seen in ({}, False), ({"BW24_CACHE": str(tmp_path / "cache")}, True):
        out = subprocess.run(run, env={**base, **extra}, capture_output=True, text=True, check=True).stdout
        assert (str(folder) in out) == seen


def test_makefile_reads_its_variables():
    """The variables that only make reads stand in the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for flag in flags.TABLE:
        if "read by make" in flag.help:
            assert f"$({flag.variable})" in makefile


def test_every_flag_names_a_test_that_exists():
    known: dict[str, set[str]] = {}
    for flag in flags.TABLE:
        module, _, function = flag.test.partition("::")
        if module not in known:
            tree = ast.parse((ROOT / "tests" / module).read_text(encoding="utf-8"))
            known[module] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert function in known[module], f"{flag.name}: {flag.test} does not exist"


def test_names_variables_and_options_are_unique():
    for values in ([f.name for f in flags.TABLE], [f.variable for f in flags.TABLE if f.variable],
                   [w for f in flags.TABLE for w in (f.option, f.short) if w]):
        assert len(values) == len(set(values))
    grouped = [name for members in flags.GROUPS.values() for name in members]
    assert len(grouped) == len(set(grouped)) and set(grouped) <= set(flags.BY_NAME)


def test_the_generated_page_is_up_to_date():
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "docs.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_other_file_reads_the_environment():
    for path in (ROOT / "py" / "bw24").rglob("*.py"):
        if path.name != "flags.py":
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"\bos\.environ\b|\bgetenv\b", text), path
