"""scripts/upstream_sweep.py on a small repository of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import upstream_sweep  # noqa: E402


def commit(repo: Path, path: str, subject: str, day: str) -> None:
    (repo / path).parent.mkdir(parents=True, exist_ok=True)
    (repo / path).write_text(subject)
    env = {"GIT_COMMITTER_DATE": f"{day} 12:00", "GIT_AUTHOR_DATE": f"{day} 12:00", "PATH": "/usr/bin:/bin", "HOME": str(repo)}
    for words in (["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", subject]):
        subprocess.run(["git", "-C", str(repo), *words], check=True, env=env)


def test_a_sweep_names_new_commits_by_mechanism(tmp_path):
    repo, page = tmp_path / "clone", tmp_path / "sweeps.md"
    subprocess.run(["git", "init", "-q", str(repo)], check=True)
    commit(repo, "ggml/src/ggml-cuda/fattn-tile.cu", "old attention", "2026-01-05")
    commit(repo, "ggml/src/ggml-cuda/fattn-mma.cu", "faster attention", "2026-03-05")
    commit(repo, "docs/build.md", "words", "2026-03-06")
    assert upstream_sweep.main([str(repo), "--since", "2026-02-01", "--page", str(page)]) == 0
    text = page.read_text()
    assert "**attention**: 1\n- 2026-03-05" in text and "faster attention" in text
    assert "old attention" not in text and "words" not in text and "**experts**: nothing" in text
    commit(repo, "common/speculative.cpp", "later", "2099-01-01")
    assert upstream_sweep.main([str(repo), "--page", str(page)]) == 0  # goes on from the date of the first
    assert page.read_text().count("faster attention") == 1 and page.read_text().count("\n## ") == 2
    assert "later" in page.read_text()


def test_two_trees_are_compared(tmp_path):
    page, path = tmp_path / "sweeps.md", "ggml/src/ggml-cuda/mmvq.cu"
    body = "static int kept(int n) {\n    return call(n);\n}\n"
    for tree, text in (("old", f"__global__ void gone(int a) {{}}\n{body}"),
                       ("new", "__global__ void __launch_bounds__(32, 1) fresh(int a) {}\n" + body.replace("call(n)", 'getenv("GGML_X")'))):
        (tmp_path / tree / path).parent.mkdir(parents=True)
        (tmp_path / tree / path).write_text(text)
    (tmp_path / "new" / "common").mkdir()
    (tmp_path / "new" / "common" / "speculative.cpp").write_text("int a;\n")
    assert upstream_sweep.main([str(tmp_path / "new"), "--before", str(tmp_path / "old"), "--labels", "b1", "b2", "--page", str(page)]) == 0
    text = page.read_text()
    assert "From b1 (files of 20" in text and f"**matrix times vector**: 1 files\n- {path} +2 -2\n- new: `GGML_X`, `fresh`\n- gone: `gone`" in text
    assert "- common/speculative.cpp +1 -0 (new)" in text and "**experts**: nothing" in text
    assert upstream_sweep.last_sweep(text)
    with pytest.raises(SystemExit, match="no file of llama.cpp"):
        upstream_sweep.main([str(tmp_path / "new"), "--before", str(tmp_path / "new" / "common"), "--page", str(page)])


def test_what_is_asked_wrongly(tmp_path):
    with pytest.raises(SystemExit, match="no earlier sweep"):
        upstream_sweep.main([str(tmp_path), "--page", str(tmp_path / "p.md")])
    with pytest.raises(SystemExit, match="not a git repository"):
        upstream_sweep.main([str(tmp_path), "--since", "2026-01-01", "--page", str(tmp_path / "p.md")])
