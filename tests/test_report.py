"""`bw24 report`: a page that survives parts which fail, crash or hang, and names nothing private."""

from __future__ import annotations

import getpass
import json
import socket

import pytest

from bw24 import cli, cli_report
from bw24.errors import Bw24Error

KERNELS = {"equal": 5, "different": [], "skipped": {"32 columns are not a multiple of Q2_K's block of 256": 1,
                                                    "64 columns are not a multiple of Q3_K's block of 256": 2, "no such op": 1}}
GATE = {"passed": 3, "failed": 0, "skipped": 1, "verdicts": []}
BENCH = {"cells": [{"kind": "decode", "tokens": 64, "ours": {"median": 12.34}}], "wall_fraction": 0.5, "wall_gbps": 20.0, "disturbed": 0, "rounds": 5,
         "gate": {"match": True}}


def answers(monkeypatch, **changed):
    """Parts without their work."""
    given = {"probe": (0, {"read_gbps": 20.5}), "kernel-check": (0, KERNELS), "gate": (0, GATE), "bench": (0, BENCH)} | changed

    def part(words, seconds):
        status, result = given[words[0]]
        return {"status": status, "seconds": 1.0, "result": result} | ({} if result else {"error": "ended by signal 11"})

    monkeypatch.setattr(cli_report, "run_part", part)


def test_a_green_page(monkeypatch, capsys):
    answers(monkeypatch)
    assert cli.main(["report"]) == 0
    text = capsys.readouterr().out
    assert "Verdict: **all green**" in text and "5 equal, 0 different; skipped: 3 shapes not a multiple of a block of 256; 1 no such op" in text
    assert "decode 64: 12.3 tok/s; decode at 50% of 20.0 GB/s" in text
    block = text.split("```json\n")[1].split("\n```")[0]
    assert json.loads(block)["verdict"] == "all green"
    assert socket.gethostname() not in text and f"/{getpass.getuser()}/" not in text


def test_a_crash_is_a_line_and_turns_the_verdict(monkeypatch, capsys, tmp_path):
    answers(monkeypatch, **{"kernel-check": (-11, None)})
    page = tmp_path / "report.md"
    assert cli.main(["report", "-o", str(page)]) == 3
    assert "ended by signal 11" in page.read_text() and "not green: kernel-check" in page.read_text()
    assert cli.main(["report", "-o", str(tmp_path / "no" / "report.md")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_difference_is_shown(monkeypatch, capsys):
    answers(monkeypatch, gate=(3, GATE | {"failed": 1, "verdicts": [{"status": "FAIL", "name": "prefill = decode", "detail": "row 3"}]}))
    assert cli.main(["report", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["verdict"] == "not green: gate"


def test_every_part_is_told_the_device(monkeypatch):
    told = []
    monkeypatch.setattr(cli_report, "run_part", lambda words, seconds: told.append(words) or {"status": 0, "seconds": 1.0, "result": KERNELS})
    monkeypatch.setattr(cli_report, "_summary", lambda name, part: "")
    assert cli.main(["report", "--device", "cpu", "--isa", "portable", "--threads", "1"]) == 0
    assert [words[0] for words in told] == ["probe", "kernel-check", "gate", "bench"]
    assert all(" ".join(words).endswith("--device cpu --backend auto --isa portable --threads 1") for words in told if words[0] != "kernel-check")
    assert told[1][-2:] == ["--part", "1/1"] and "--prefill" not in told[1]


def test_kernel_check_of_a_card_runs_by_parts(monkeypatch):
    """The parts' findings are added; one that crashed is the answer; class fast is asked for."""
    monkeypatch.setattr(cli_report.os, "sched_getaffinity", lambda _: set(range(8)))

    def part(words, seconds):
        assert words[:3] == ["kernel-check", "--prefill", "fast"]
        i = int(words[-1].split("/")[0])
        different = [{"name": "NORM", "detail": "row 1"}] if i == 3 else []
        return {"status": 3 if different else 0, "seconds": float(i), "result": {"equal": i, "different": different, "skipped": {"no such op": 1}}}

    monkeypatch.setattr(cli_report, "run_part", part)
    assert cli_report.run_kernels(["kernel-check"], "cuda:0", 9) == {
        "status": 3, "seconds": 4.0, "result": {"equal": 10, "different": [{"name": "NORM", "detail": "row 1"}], "skipped": {"no such op": 4}}}
    monkeypatch.setattr(cli_report, "run_part", lambda words, _: {"status": -11, "seconds": 1.0, "result": None, "error": "ended by signal 11"})
    assert cli_report.run_kernels(["kernel-check"], "cuda:0", 9)["error"] == "ended by signal 11"


def test_parts_of_kernel_check_are_the_whole(monkeypatch):
    """Every case is in one part."""
    from bw24 import check

    monkeypatch.setattr(check.abi, "lib", lambda: type("Lib", (), {"bw24_check": staticmethod(lambda ctx, model, index, out: 7 if index < 0 else 0)}))
    seen: list[int] = []
    for i in (1, 2, 3):
        list(check.run_cases(None, None, lambda done, total: seen.append(done - 1), (i, 3)))
    assert sorted(seen) == list(range(7))
    with pytest.raises(Bw24Error, match='expected I/N'):
        cli.build_parser().parse_args(["kernel-check", "--part", "4/3"])


@pytest.mark.parametrize(("words", "seconds", "expected"), [
    (["flags"], 60, None), (["gate", "no-such-file.gguf"], 60, "no such file"), (["kernel-check"], 0, "no end within 0 s"),
])
def test_parts_are_commands(words, seconds, expected):
    part = cli_report.run_part(words, seconds)
    if expected is None:
        assert part["status"] == 0 and part["result"]
    else:
        assert part["status"] != 0 and expected in part["error"]
