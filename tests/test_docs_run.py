"""The commands of the pages are executed: every line of a command block is run here on tiny files, or names the test that runs it. A new line in a
page that is neither is a failure."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bw24 import cli
from conftest import FIXTURES

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "research").rglob("*.md")])
STARTS = re.compile(r"^(?:\$ )?(bw24|bw24-draft|make|cmake|curl|python|scripts/[\w.]+|bash|pip)\b")

ELSEWHERE = {  # page: {beginning of a command: what executes it}
    "README.md": {"make": "what built this library, and what runs this suite; .ci/run does both in a fresh clone",
                  "bw24": "test_docs.py runs the README's commands"},
    "CONTRIBUTING.md": {"make": ".ci/run", "scripts/local_ci.sh": "test_local_ci.py runs its parts"},
    "docs/RELEASING.md": {"make release": "scripts/release.sh tries what it made, without a compiler; test_wheel_tag.py has its tag"},
    "docs/COMPETITOR-SETUP.md": {"cmake": "needs llama.cpp's sources", "scripts/peer_sweep.py": "test_peer_sweep.py"},
    "docs/HARDWARE.md": {"bw24 report": "test_report.py"},
    "docs/DRAFT-REGIME.md": {"bw24-draft": "test_draft_build.py", "bw24 gen": "test_speculation_page_runs"},
    "docs/HY3-SPILL.md": {"bw24 serve": "test_server_clients.py starts servers; test_tiers.py passes budgets to the engine",
                         "bw24": "test_spilling_page_runs"},
    "docs/speculation.md": {"bw24": "test_speculation_page_runs"},
    "docs/api.md": {"curl": "test_curl_of_the_api_page_runs"},
}


def lines(page: Path) -> Iterator[str]:
    """Command lines of a page's blocks, continued lines joined, explanations cut off."""
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M):
        if kind in ("", "sh", "bash", "console"):
            for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines():
                if STARTS.match(line.strip()):
                    yield re.split(r"\s{3,}", line.strip().removeprefix("$ "))[0].split("  #")[0]


WITH_COMMANDS = {p.relative_to(ROOT).as_posix(): found for p in PAGES if (found := list(lines(p)))}


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_every_command_has_a_test(page):
    known = ELSEWHERE.get(page, {})
    assert [line for line in WITH_COMMANDS[page] if not any(line.startswith(k) for k in known)] == []
    for reason in known.values():
        for name in re.findall(r"\btest_\w+(?:\.py)?", reason):
            there = (ROOT / "tests" / name).is_file() if name.endswith(".py") else name in globals()
            assert there, f"{page}: {name} is no test"


def test_no_page_lost_its_commands():
    assert set(WITH_COMMANDS) == set(ELSEWHERE)


def run(words: list[str], monkeypatch, capsys) -> str:
    """Standard output of one command of bw24; it must succeed and say something, there or on standard error."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert cli.main(words) == 0, (words, capsys.readouterr().err)
    said = capsys.readouterr()
    assert said.out.strip() or said.err.strip(), words
    return said.out


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_speculation_page_runs(folder, monkeypatch, capsys):
    from draft_files import write_draft

    shutil.copy(FIXTURES / "tiny" / "qwen35moe.gguf", folder / "model.gguf")
    write_draft(folder / "model.gguf", folder / "draft.gguf")
    ran = []
    for line in [*WITH_COMMANDS["docs/speculation.md"], *WITH_COMMANDS["docs/DRAFT-REGIME.md"]]:
        words = shlex.split(line)[1:]
        if line.startswith("bw24 "):
            words += {"gen": ["-n", "4"], "bench": ["--sizes", "8", "--tokens", "8"]}.get(words[0], [])
            run([*words, "--device", "cpu"], monkeypatch, capsys)
            ran.append(words[0])
    assert ran.count("gen") >= 4 and {"bench", "gate"} <= set(ran)


def test_spilling_page_runs(folder, monkeypatch, capsys):
    """Its commands in their order, each finding what the ones before it wrote; budgets of the size of the tiny model."""
    small = {"48g": "200k", "16g,32g,48g": "100k,200k,400k", "/nvme0,/nvme1": "nvme0,nvme1", "500": "8", "...": "abc"}
    shutil.copy(FIXTURES / "tiny" / "qwen35moe.gguf", folder / "hy3-q2_k.gguf")
    for copy in ("nvme0", "nvme1"):
        (folder / copy).mkdir()
        shutil.copy(folder / "hy3-q2_k.gguf", folder / copy)
    (folder / "corpus.txt").write_text("a b c d e f g h " * 8)
    ran = []
    for line in WITH_COMMANDS["docs/HY3-SPILL.md"]:
        words = [small.get(w, w) for w in shlex.split(line)[1:]]
        if words[0] == "serve":
            continue
        if words[0] == "gen":
            if "--vram" in words:  # a card's share: test_split.py and a card have it
                del words[(at := words.index("--vram")) : at + 2]
            words += ["--device", "cpu"] + ([] if "-n" in words else ["-n", "4"]) + ([] if "-p" in words else ["-p", "ab"])
        if words[:2] == ["tiers", "plan"] and "--vram" in words:  # what a card would measure
            words += ["--rate", "vram=900", "--rate", "pcie=25"]
        ran.append(run(words, monkeypatch, capsys))
    assert len(ran) >= 8 and (folder / "hy3.json").is_file() and (folder / "t.jsonl").is_file()
    expected = re.search(r"\$ bw24 tiers plan --visits.*?\n(.*?)```", (ROOT / "docs" / "HY3-SPILL.md").read_text(encoding="utf-8"), re.S)[1]
    assert expected.strip() in ran[-1]


def test_curl_of_the_api_page_runs(folder):
    if not shutil.which("curl"):
        pytest.skip("no curl")
    from serving import Server
    from tiny_model import write_tiny

    server = Server(write_tiny(folder / "tiny.gguf"), log=folder / "log").wait()
    try:
        for line in WITH_COMMANDS["docs/api.md"]:
            words = shlex.split(line.replace("http://127.0.0.1:8080", server.url))
            done = subprocess.run([*words, "--silent", "--fail", "--max-time", "60"], capture_output=True, text=True, check=False)
            assert done.returncode == 0 and done.stdout.rstrip().endswith("data: [DONE]"), (done.stdout[-500:], done.stderr)
    finally:
        server.process.terminate()
        server.process.wait(timeout=30)
