"""The pages keep their word: links lead somewhere, commands parse, the C program compiles, the README has two set-up commands."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bw24 import cli

ROOT = Path(__file__).resolve().parent.parent
CODE = {".c", ".h", ".cu", ".cuh", ".def", ".py", ".sh"}
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "research").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_names_in_the_pages_exist():
    """Kernels, functions, structs and variables that a page puts in backquotes stand in the sources."""
    paths = [p for folder in ("libbw24", "py/bw24", "scripts", "tests") for p in (ROOT / folder).rglob("*") if p.suffix in CODE]
    known = set(re.findall(r"\w+", "\n".join(p.read_text(encoding="utf-8", errors="replace") for p in [*paths, ROOT / "Makefile"])))
    for page in PAGES:
        if page.name == "CHANGELOG.md" or page.parent.name == "cuda":  # what was, and what was tried
            continue
        quoted = " ".join(re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")))
        names = set(re.findall(r"\b(?:k_[a-z_0-9]+|bw24_[a-z_0-9]+[a-z0-9]|cu_[a-z_0-9]+|bw_[a-z_0-9]+[a-z0-9]|BW24_[A-Z_]+[A-Z])\b", quoted))
        assert names <= known | {"bw_noun_verb"}, (page.name, names - known)


def commands(text: str) -> list[list[str]]:
    """Command lines of bw24 in a page's blocks, up to the explanation that follows two or more blanks."""
    import shlex

    lines = [line.strip() for block in re.findall(r"```\n(.*?)```", text, re.S) for line in block.splitlines()]
    return [shlex.split(re.split(r"\s{2,}", line)[0])[1:] for line in lines if line.startswith("bw24 ")]


WITH_COMMANDS = [p for p in PAGES if commands(p.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_parse(page):
    for words in commands(page.read_text(encoding="utf-8")):
        cli.build_parser().parse_args(words)


NOT_RUN = {"serve": "ends with a signal; test_server_clients.py starts it", "kernel-check": "a minute; test_numerics.py runs its cases",
           "bench": "five rounds and a peer; test_bench.py", "probe": "all cores for seconds; test_probe.py",
           "report": "minutes; test_report.py", "tiers": "wants a mixture; test_tiers.py"}


def test_commands_of_the_readme_run(tmp_path, monkeypatch, capsys):
    """Each with the names of its line, on a tiny model or checkpoint directory: exit code 0, and something on standard output."""
    import io
    import shutil as files

    from tiny_model import write_tiny

    write_tiny(tmp_path / "model.gguf")
    files.copytree(next((ROOT / "tests" / "fixtures" / "checkpoints").iterdir()), tmp_path / "DIR")
    (tmp_path / "text.txt").write_text("a b a b a b a b")
    monkeypatch.chdir(tmp_path)
    ran = []
    for words in commands((ROOT / "README.md").read_text(encoding="utf-8")):
        if words[0] in NOT_RUN:
            continue
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
        words = ["model.gguf" if w.startswith("hf:") else "out.gguf" if w == "model.gguf" and words[0] == "convert" else w for w in words]
        if words[0] in ("gen", "chat") and "model.gguf" not in words:
            words += ["-m", "model.gguf"]
        words += {"gen": ["-n", "2", "-p", "ab"] if "-p" not in words else ["-n", "2"], "convert": ["--json"]}.get(words[0], [])
        words = ["Q8_0" if w == "Q4_K_M" else w for w in words]
        assert cli.main(words) == 0, (words, capsys.readouterr().err)
        out = capsys.readouterr().out
        assert out.strip() or words[0] == "chat", words
        ran.append(words[0])
    assert len(ran) >= 8 and {"gen", "chat", "convert", "info", "explain", "gate", "perplexity"} <= set(ran)


def test_examples_of_the_help_parse():
    """Every example in a command's help is a line that its parser takes."""
    import shlex

    from bw24 import cli_chat, cli_check, cli_model, cli_text

    texts = [getattr(m, name) for m in (cli_chat, cli_check, cli_model, cli_text) for name in dir(m) if name.endswith("_EXAMPLES")]
    lines = [line for text in [*texts, cli.EXAMPLES] for line in text.splitlines() if "bw24 " in line and "`" not in line]
    assert len(lines) > 20
    for line in lines:
        words = shlex.split(re.split(r"\s{2,}", line.strip())[0].split("| ")[-1])
        cli.build_parser().parse_args(words[1:])


def test_the_readme_has_two_set_up_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## Set-up")[1].split("## ")[0]
    assert re.findall(r"```\n(.*?)```", text, re.S) == ["make && python -m bw24 gen\nmake test\n"]
    assert "not run on the target card" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_names_every_architecture_and_type():
    from bw24 import abi, source

    table = (ROOT / "README.md").read_text(encoding="utf-8").split("## What runs")[1].split("## ")[0]
    assert [a for a in source.architectures() if not re.search(rf"[ ,:]{re.escape(a)}\b", table)] == []
    in_range = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")  # "Q2_K to Q6_K"
    types = [facts[0] for number, facts in abi.types().items() if number < 256]
    assert [t for t in types if t not in in_range and t not in table] == [] and "Q2_K to Q6_K" in table


def test_the_c_program_compiles(tmp_path):
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler")
    code = re.search(r"```c\n(.*?)```", (ROOT / "docs" / "abi.md").read_text(encoding="utf-8"), re.S).group(1)
    (tmp_path / "program.c").write_text(code)
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I", str(ROOT / "libbw24")]
    subprocess.run([compiler, *flags, str(tmp_path / "program.c")], check=True)


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
    from tiny_model import write_tiny

    write_tiny(tmp_path / "model.gguf")
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    exec(re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S).group(1), scope)
    assert scope["logits"].shape == (260,)


def test_every_op_is_explained():
    import sys

    sys.path.insert(0, str(ROOT / "scripts"))
    import docs
    from bw24 import abi

    assert set(abi.ops()) == set(docs.op_notes()) & set(abi.ops()), sorted(set(abi.ops()) - set(docs.op_notes()))
