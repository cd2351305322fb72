"""`bw24 bench --row`: what is taken from a published row, and the verdicts."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bw24 import records, replay
from bw24.bench import Result, Round, Row, Side
from bw24.errors import Bw24Error
from bw24.peer import Cell

ROOT = Path(__file__).resolve().parent.parent
RECORD = next(r for r in records.load(ROOT / "research") if r.file == "cpu.jsonl")


def result(factor: float) -> Result:
    """A run whose every ratio is the record's times `factor`, with a narrow interval."""
    rows = []
    for c in RECORD.data["cells"]:
        peer = [c["peer"]["median"] * x for x in (0.999, 1.0, 1.0, 1.0, 1.001)]
        ours = [c["ratio"] * factor * p for p in peer]
        rows.append(Row(Cell(c["kind"], c["tokens"], c["depth"]), Side(ours), Side(peer)))
    return Result(rows, [Round({}, {}, 0.0)] * 5, 5, "llama.cpp", "build 1")


def test_settings_come_from_the_row():
    args = argparse.Namespace(threads=None, rounds=5, kv=None, vs=None)
    cells = replay.apply(args, RECORD)
    assert [str(c) for c in cells] == ["prefill 256", "prefill 1024", "decode 64"]
    assert (args.threads, args.rounds, args.kv, args.vs) == (2, 5, "f16", "llama.cpp")


def test_rows_of_other_tools_and_other_files_are_refused():
    other = next(r for r in records.load(ROOT / "research") if r.file.startswith("cuda/"))
    with pytest.raises(Bw24Error, match=f"row {other.id}: made by another tool"):
        replay.apply(argparse.Namespace(), other)
    drafts = next(r for r in records.load(ROOT / "research") if r.data.get("kind") == "rounds")
    with pytest.raises(Bw24Error, match=r"scripts/spec_bench\.py makes it again"):
        replay.apply(argparse.Namespace(), drafts)
    assert all((ROOT / tool).is_file() for tool in replay.TOOLS.values())
    with pytest.raises(Bw24Error, match=r"of 98362432 bytes, x\.gguf has 5"):
        replay.check_file(RECORD, "x.gguf", 5)


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "holds"), (0.5, "SLOWER NOW"), (2.0, "faster now")])
def test_verdicts(factor, verdict):
    entries = replay.compare(RECORD, result(factor))
    assert [e["verdict"] for e in entries] == [verdict] * 3
    assert entries[2]["new"]["value"] == pytest.approx(entries[2]["old"]["value"] * factor)
    text = "\n".join(replay.lines(RECORD, entries))
    assert RECORD.id in text and text.count(verdict) == 3 and "real weights" in text
