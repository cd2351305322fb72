"""The record of measurements and what is made from it: ids, retired rows, tables and pictures that agree with the rows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.dom.minidom
from pathlib import Path

import pytest

from bw24 import records
from bw24.errors import Bw24Error

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))


def folder(tmp_path: Path, **files: str) -> Path:
    for name, text in files.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    return tmp_path


def test_an_id_names_one_line(tmp_path):
    rows = records.load(folder(tmp_path, cpu='{"a": 1}\n{"a": 2}\n'))
    assert len({r.id for r in rows}) == 2 and all(r.id.startswith("cpu-") for r in rows)
    assert records.find(tmp_path, rows[1].id).data == {"a": 2}
    with pytest.raises(Bw24Error, match="2 rows begin so"):
        records.find(tmp_path, "cpu-")
    with pytest.raises(Bw24Error, match="not among the 2 rows"):
        records.find(tmp_path, "cpu-zz")


def test_a_broken_line_is_named(tmp_path):
    with pytest.raises(Bw24Error, match=r"cpu\.jsonl:2"):
        records.load(folder(tmp_path, cpu='{"a": 1}\n{"a": \n'))
    with pytest.raises(Bw24Error, match="found list"):
        records.load(folder(tmp_path, cpu="[1]\n"))


def test_retired_rows_stay_with_their_reason(tmp_path):
    name = records.row_id("cpu.jsonl", '{"a": 1}')
    folder(tmp_path, cpu='{"a": 1}\n', retired=json.dumps({"id": name, "reason": "measured on a loud machine"}))
    assert records.load(tmp_path)[0].retired == "measured on a loud machine"
    folder(tmp_path, cpu='{"a": 3}\n')
    with pytest.raises(Bw24Error, match=name):
        records.load(tmp_path)


def test_tables_and_record_agree():
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "boards.py"), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_changed_figure_is_noticed(tmp_path, monkeypatch):
    """An edited table and an edited record both turn the check red."""
    import boards

    (tmp_path / "docs" / "plots").mkdir(parents=True)
    (tmp_path / "research").mkdir()
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    lines = (ROOT / "research" / "cpu.jsonl").read_text()
    (tmp_path / "research" / "cpu.jsonl").write_text(lines)
    monkeypatch.setattr(boards, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["boards.py"])
    assert boards.main() == 0
    monkeypatch.setattr(sys, "argv", ["boards.py", "--check"])
    assert boards.main() == 0
    (tmp_path / "research" / "cpu.jsonl").write_text(lines.replace('"median": 2224', '"median": 3224', 1))
    assert boards.main() == 1
    (tmp_path / "research" / "cpu.jsonl").write_text(lines)
    page = tmp_path / "docs" / "PERFORMANCE.md"
    page.write_text(page.read_text().replace("2224", "2225"))
    assert boards.main() == 1


def test_the_readme_shows_real_weights_only():
    import boards

    text = (ROOT / "README.md").read_text().split("<!-- board: cpu -->")[1].split("<!-- end of board -->")[0]
    labels = {r.id: r.label for r in records.load(ROOT / "research")}
    shown = [line.rsplit("`", 2)[1] for line in text.splitlines() if "`" in line]
    assert len(shown) >= 2 and {labels[i] for i in shown} == {"real weights"}
    assert boards.TARGET in (ROOT / "docs" / "PERFORMANCE.md").read_text()


def leaves(value) -> list[float]:
    """Every number inside a row."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [x for v in value for x in leaves(v)]
    return [float(value)] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


UNITS = {"x": (1,), "tok/s": (1,), "s": (1,), "ms": (1, 1e3), "MB": (1e-6,), "GB/s": (1,)}


def test_every_figure_of_the_readme_has_its_row():
    """A figure with a unit in a sentence or table row of the introduction or of "Measured" stands in a row that the sentence names, rounded as it is
    printed; the introduction names rows of real weights only."""
    by_id = {r.id: r for r in records.load(ROOT / "research")}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    intro, text = readme.split("## ")[0], readme.split("## Measured")[1].split("## ")[0]
    heading = re.findall(r"`(\w[\w-]*-[0-9a-f]{8})`", intro)
    assert heading and all(by_id[i].label == "real weights" for i in heading)
    text, seen = f"{intro}\n{text}", 0
    parts = [p for block in text.split("\n\n") for p in (block.splitlines() if block.startswith(("<!--", "|")) else re.split(r"(?<=[.:])\s", block))]
    named: list[str] = []
    for part in parts:
        named = re.findall(r"`(\w[\w-]*-[0-9a-f]{8})`", part) or (named if "same rows" in part else [])
        assert all(i in by_id and not by_id[i].retired for i in named), named
        for figure, unit in re.findall(r"(?<![\w.])(\d+(?:\.\d+)?)\s?(x|tok/s|ms|s|MB|GB/s)(?![\w/])", part):
            digits = len(figure.partition(".")[2])
            found = [v * f for i in named for v in leaves(by_id[i].data) for f in UNITS[unit]]
            found += [1e3 / v for i in named if unit == "ms" for v in leaves(by_id[i].data) if v]
            found += [1e6 / by_id[i].data["us"] for i in named if unit == "tok/s" and "us" in by_id[i].data]
            assert any(f"{v:.{digits}f}" == figure for v in found), f"{figure} {unit}: not in {named or 'a named row'}: {part.strip()[:120]}"
            seen += 1
    assert seen > 25


def test_drafts_are_shown_with_their_labels():
    """Rows of rounds with a set acceptance say so; the newest green row of the performance CI is there."""
    import boards_spec

    rows = records.load(ROOT / "research")
    page = (ROOT / "docs" / "PERFORMANCE.md").read_text(encoding="utf-8")
    shown = boards_spec.rounds(rows)
    assert len(shown) >= 8 and all(f"`{r.id}`" in page for r in shown)
    for r in shown:
        line = next(x for x in page.splitlines() if f"`{r.id}`" in x)
        assert ("synthetic acceptance" in line) == (r.data["accept"] is not None), line
    assert all(f"`{r.id}`" in page for r in {r.data["backend"]: r for r in boards_spec.green(rows)}.values())
    assert "<polyline" in boards_spec.picture(rows)


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "plots").glob("*.svg")), ids=lambda p: p.name)
def test_pictures_are_xml(picture):
    document = xml.dom.minidom.parse(str(picture))
    assert document.documentElement.tagName == "svg" and document.getElementsByTagName("text")
