"""The Makefile and the scripts behind it: what is refused, what is left out on other machines, what the limits see, what the hook does."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["make", "-n", f"PYTHON={sys.executable}", *words], cwd=ROOT, capture_output=True, text=True)


def test_other_systems_are_refused_in_one_line():
    done = make("lib", "SYSTEM=Darwin")
    assert done.returncode != 0 and "bw24 builds on Linux only, found Darwin" in done.stderr and len(done.stderr.splitlines()) == 1


def test_other_machines_build_the_portable_backend_and_say_so(tmp_path):
    done = make("lib", "MACHINE=aarch64", "CUDA=0", f"BUILD={tmp_path}/obj", f"SO={tmp_path}/libbw24.so")
    assert done.returncode == 0 and "aarch64: building the portable backend" in done.stdout
    assert "-march" not in done.stdout and "avx2.o" not in done.stdout and "portable.o" in done.stdout


def test_each_instruction_set_has_its_flags_alone(tmp_path):
    done = make("lib", "MACHINE=x86_64", "CUDA=0", f"BUILD={tmp_path}/obj", f"SO={tmp_path}/libbw24.so")
    lines = [line for line in done.stdout.splitlines() if " -c -o " in line]
    assert len(lines) > 20
    for line in lines:
        assert ("-mavx512f" in line) == line.endswith("_avx512.c") and ("-mavxvnni" in line) == line.endswith("_avxvnni.c")
        assert all(flag in line for flag in ("-ffp-contract=off", "-fno-fast-math", "-Werror", "-std=c11", "-fvisibility=hidden"))


def test_cuda_without_a_compiler_is_an_error():
    done = make("lib", "CUDA=1", "BW24_NVCC=")
    assert done.returncode != 0 and "CUDA=1, but no nvcc" in done.stderr


def test_every_target_is_in_the_help():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("all", "lib", "test", "test-full", "soak", "check", "lint", "sanitize", "clean", "help"):
        assert f"\n{target}:" in text and f"\n{target} " in "\n" + listed


def test_a_managed_interpreter_is_refused_with_the_line_to_type(monkeypatch, capsys, tmp_path):
    environment = script("python_env")
    monkeypatch.setattr(environment.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert environment.check() == 0
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    assert environment.check() == 1
    assert "python3 -m venv .venv && . .venv/bin/activate" in capsys.readouterr().err
    monkeypatch.setattr(sys, "prefix", str(tmp_path))  # in a virtual environment the marker does not matter
    assert environment.check() == 0


def test_the_limits_see_long_files_functions_and_lines(tmp_path, monkeypatch):
    limits = script("limits")
    monkeypatch.setattr(limits, "ROOT", tmp_path)
    body = "    x += 1;\n" * 99
    (tmp_path / "a.c").write_text(f"static int f(int x) {{\n{body}}}\nint g(int x)\n{{\n{body}    x++;\n}}\n")
    found = list(limits.breaches(tmp_path / "a.c"))
    assert found == ["a.c:1: function of 101 lines, the limit is 100", "a.c:103: function of 102 lines, the limit is 100"]
    (tmp_path / "b.py").write_text("def f():\n" + "    x = 1\n" * 99)
    assert list(limits.breaches(tmp_path / "b.py")) == []
    (tmp_path / "b.py").write_text("def f():\n" + "    x = 1\n" * 100 + "\n" * 700)
    assert len(list(limits.breaches(tmp_path / "b.py"))) == 2
    (tmp_path / "c.h").write_text("/*" + "x" * 180 + "*/\n")
    assert len(list(limits.breaches(tmp_path / "c.h"))) == 1


@pytest.mark.parametrize("existing", [None, "#!/bin/sh\necho mine\n"])
def test_the_hook_is_installed_and_spares_a_foreign_one(tmp_path, existing):
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, env=environ)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "install_hooks.sh").write_bytes((ROOT / "scripts" / "install_hooks.sh").read_bytes())
    hook = tmp_path / ".git" / "hooks" / "pre-push"
    if existing:
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(existing)
    codes = [subprocess.run(["bash", str(tmp_path / "scripts" / "install_hooks.sh")], env=environ, capture_output=True).returncode for _ in range(2)]
    if existing:
        assert codes == [1, 1] and hook.read_text() == existing
    else:
        assert codes == [0, 0] and "scripts/local_ci.sh" in hook.read_text() and os.access(hook, os.X_OK)
