"""scripts/perf_ci.py: what is red, what is not measured, and that a loss of acceptance or of speed is seen. The timed comparison runs only on
a library given with --library (make test-faults): ordinary tests judge no speed."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import perf_cells  # noqa: E402
import perf_ci  # noqa: E402
from perf_cells import Cell  # noqa: E402

QUIET, LOUD = [0.01] * 5, [0.01, 0.5, 0.5, 0.5, 0.02]
SAME = ([[7, 21, 17]], [[7, 21, 17]])
ORDINARY = ROOT / "py" / "bw24" / "libbw24.so"


def judge(values, others=QUIET, counts=SAME, before=(), reason=None):
    return perf_ci.judge({"demo decode 64": list(values)}, others, counts, list(before), reason)


def test_a_slower_cell_is_red_and_noise_is_not():
    assert judge([0.90, 0.91, 0.92, 0.93, 0.94])[0] == perf_ci.RED
    assert judge([0.93, 0.94, 0.95, 0.96, 0.99])[0] == perf_ci.GREEN  # the interval reaches 0.97
    status, said, _ = judge([0.48, 0.65, 0.69, 0.70, 1.11])  # neither: a loss that noise hides
    assert status == perf_ci.UNMEASURED and "too wide to tell" in said[-1]
    assert judge([1.00, 1.01, 1.02, 1.03, 1.04])[0] == perf_ci.GREEN


def test_a_loud_machine_measures_nothing():
    status, said, _ = judge([0.5, 0.5, 0.5, 0.5, 0.5], LOUD)
    assert status == perf_ci.UNMEASURED and "in 3 of 5 rounds" in said[-1]
    assert judge([1.0] * 5, LOUD)[0] == perf_ci.UNMEASURED  # nor is it green
    assert judge([1.0] * 5, LOUD[1:2] + QUIET[1:])[0] == perf_ci.GREEN


def test_acceptance_is_compared_as_integers():
    lost = ([[7, 21, 17]], [[8, 24, 16]])
    status, said, _ = judge([1.0] * 5, counts=lost)
    assert status == perf_ci.RED and "[[7, 21, 17]], are [[8, 24, 16]]" in said[-1]
    assert judge([1.0] * 5, counts=lost, reason="the head was trained again")[0] == perf_ci.GREEN
    assert judge([1.0] * 5, LOUD, counts=lost)[0] == perf_ci.RED  # integers need no quiet machine


def test_slow_drift_is_caught():
    """Seven green rows of 0.99 each pass one by one; the next is red, unless an anchor stands between."""
    step = {"cells": {"demo decode 64": {"ratio": 0.99}}}
    assert judge([0.99] * 5)[0] == perf_ci.GREEN
    assert judge([0.99] * 5, before=[step] * 7)[0] == perf_ci.RED
    assert judge([0.99] * 5, before=[step] * 6 + [step | {"anchor": True}])[0] == perf_ci.GREEN
    assert judge([0.80, 0.93, 0.95, 1.0, 1.2], before=[step])[0] == perf_ci.GREEN  # a wide interval shows no drift


def row(revision: str, ratio: float, anchor: bool = False) -> dict:
    return {"revision": revision, "anchor": anchor, "cells": {"demo decode 64": {"ratio": ratio}}}


def test_a_gain_hides_no_later_loss():
    """What the anchor gained over its own base counts for nothing, and a gain since then raises what is to be held."""
    assert perf_ci.drifts("demo decode 64", 0.98, [row("a", 1.5, True)]) == (0.98, 0.98, "a")
    slow = [row("a", 1.5, True), row("b", 1.2), row("c", 0.98), row("d", 0.97)]
    product, least, fastest = perf_ci.drifts("demo decode 64", 0.98, slow)
    assert product == pytest.approx(1.118, abs=1e-3) and least == pytest.approx(0.9316, abs=1e-3) and fastest == "b"
    status, said, _ = judge([0.98] * 5, before=slow)
    assert status == perf_ci.RED and "the fastest green row since the anchor; measure with --base b" in said[0]
    assert perf_ci.up_to(slow, "b") == slow[:2] and perf_ci.up_to(slow, "none") == slow and perf_ci.up_to([], "a") == []
    assert judge([0.98] * 5, before=perf_ci.up_to(slow, "b"))[0] == perf_ci.GREEN


def test_a_failed_acceptance_is_red():
    status, said, _ = judge([1.0] * 5, counts=(SAME[0], "gen failed: no card"))
    assert status == perf_ci.RED and said[-1] == "RED acceptance: gen failed: no card"


def kept(mhz: float, others: float = 0.01) -> perf_ci.Kept:
    return perf_ci.Kept({"c": 1.0}, {"c": 1.0}, others, {"sm": f"{mhz:.0f} MHz"})


def test_a_round_at_a_lower_clock_is_not_kept():
    fast, slow = [kept(1980) for _ in range(4)], kept(1600)
    assert perf_ci.steady([*fast, slow]) == fast
    nowhere = perf_ci.Kept({"c": 1.0}, {"c": 1.0}, 0.01, None)
    assert perf_ci.steady([nowhere]) == [nowhere] and perf_ci.clock_of(kept(0)) == 0


def record(folder: Path, **files: list[dict]) -> Path:
    for name, lines in files.items():
        path = folder / f"{name.replace('__', '/')}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def bench_row(file: str, backend: str = "cpu", **more) -> dict:
    cells = [{"kind": "prefill", "tokens": 16, "depth": 0}, {"kind": "decode", "tokens": 4, "depth": 8}]
    return {"schema": 1, "file": file, "file_bytes": 3, "backend": backend, "kv": {"full": "f16", "window": "f16"}, "cells": cells} | more


def test_the_published_cells(tmp_path):
    """The last row of each, of the backend, not retired; steps of a card by rows and depth; files by name and size."""
    root = record(tmp_path / "research", cpu=[bench_row("a.gguf"), bench_row("gone.gguf"), bench_row("card.gguf", "cuda")],
                  cuda__steps=[{"what": "step", "model": "mini.gguf", "kv": "q8_0/q5_1", "rows": 4, "depth": 128},
                               {"what": "step", "model": "mini.gguf cut to 2 layers", "rows": 4, "depth": 128},
                               {"what": "step", "model": "mini.gguf", "class": "fast", "rows": 1, "depth": 128}])
    (tmp_path / "m").mkdir()
    for name in ("a.gguf", "x-mini.gguf"):
        (tmp_path / "m" / name).write_text("abc")
    cells, missing = perf_cells.of_record(tmp_path / "m", "cpu", "", False, root)
    assert [c.name for c in cells] == ["a.gguf prefill 16", "a.gguf decode 4 @ 8"]
    assert len(missing) == 1 and "no gone.gguf of 3 bytes" in missing[0]
    cells, missing = perf_cells.of_record(tmp_path / "m", "cuda", "step", False, root)
    assert [c.name for c in cells] == ["x-mini.gguf step 4 @ 128 kv q8_0/q5_1"] and missing == []
    assert perf_cells.of_record(tmp_path / "m", "cpu", "decode", False, root)[0][0].request()["depth"] == 8


def test_a_model_of_random_weights_is_made_as_its_row_says(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(perf_cells.subprocess, "run", lambda words, **_: ran.append(words))
    row = {"weights": "random weights (scripts/synth_model.py qwen3-8b --type Q4_K --head Q4_K)"}
    assert perf_cells.make(tmp_path, "q.gguf", row) == tmp_path / "q.gguf" and ran[0][2:] == [
        "qwen3-8b", "--type", "Q4_K", "--head", "Q4_K", "-o", str(tmp_path / "q.gguf")]
    assert perf_cells.make(tmp_path, "q.gguf", {"weights": "real weights"}) is None
    assert perf_cells.recipe("qwen3.5-9b-NVFP4.gguf", {"variant": "head Q6_K; gates green"}) == ["qwen3.5-9b", "--type", "NVFP4", "--head", "Q6_K"]
    assert perf_cells.recipe("smollm2-135m-instruct-q4_1.gguf", {}) is None


def test_every_published_row_of_random_weights_says_how(tmp_path):
    """What a stranger cannot make or fetch cannot be measured again."""
    found = perf_cells.published(perf_cells.load(ROOT / "research"), "cuda")
    benches = {r.id: r for r in found.values() if r.data.get("schema") == 1}
    assert benches and all(perf_cells.SYNTHETIC.search(r.data["weights"]) for r in benches.values())


def test_the_worker_times_every_kind(tmp_path):
    from test_faults import library_file
    from tiny_model import write_tiny

    model = str(write_tiny(tmp_path / "m.gguf", context=1024))
    cells = [Cell(model, "prefill", 16), Cell(model, "decode", 4, 8), Cell(model, "step", 4, 8), Cell(model, "step", 1, 8, "q8_0/q5_1")]
    side, other = perf_ci.Side(ROOT, library_file()), perf_ci.Side(ROOT, library_file())
    with perf_ci.running([side, other], "cpu", 1, cells):
        rounds, tried = perf_ci.measure(side, other, cells, 1)
    assert len(rounds) == 1 and tried in (1, 2) and set(rounds[0].ratios) == {c.name for c in cells}
    assert all(0 < s < 5 for s in rounds[0].seconds.values())


class Told:
    """A side whose cells take told seconds, in turn."""

    def __init__(self, *seconds: float) -> None:
        self.left = list(seconds)

    def seconds(self, cell: Cell) -> float:
        return self.left.pop(0)


def test_a_short_round_takes_more_passes(monkeypatch):
    """Until LEAST_SECONDS are over; its figures are medians of the passes."""
    clock = iter([0.0, 0.2, 0.4, 0.6])
    monkeypatch.setattr(perf_ci.time, "monotonic", lambda: next(clock))
    cell = Cell("m.gguf", "decode", 4)
    ratios, seconds = perf_ci.one_round(Told(0.2, 0.3, 0.9), Told(0.1, 0.2, 0.2), [cell], 0)
    assert ratios == {cell.name: pytest.approx(1.5)} and seconds == {cell.name: 0.2}


def test_a_side_runs_its_own_tree_and_keeps_the_callers_packages(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/packages")
    path = perf_ci.Side(tmp_path, tmp_path / "libbw24.so").environment()["PYTHONPATH"].split(":")
    assert path == [str(tmp_path / "py"), "/packages"]


def sides(library: Path) -> tuple[perf_ci.Side, perf_ci.Side]:
    if not ORDINARY.is_file():
        pytest.skip("no built tree")
    return perf_ci.Side(ROOT, ORDINARY), perf_ci.Side(ROOT, library)


@pytest.mark.parametrize(("measured", "expected", "times"), [
    ([0.9, 1.0], perf_ci.GREEN, 2), ([0.9, 0.9, 0.9], perf_ci.RED, 3), ([0.9, 0.9, 1.0], perf_ci.GREEN, 3), ([1.0], perf_ci.GREEN, 1),
])
def test_red_cells_are_measured_again_with_new_processes(tmp_path, monkeypatch, measured, expected, times):
    """Twice at most, those alone; a real loss is red each time."""
    asked = []

    def measure(base, new, cells, rounds):
        asked.append([c.kind for c in cells])
        ratios = {c.name: measured[len(asked) - 1] if c.kind == "decode" else 1.0 for c in cells}
        return [perf_ci.Kept(ratios, dict.fromkeys(ratios, 0.5), 0.01, None) for _ in range(5)], 5

    monkeypatch.setattr(perf_ci, "measure", measure)
    @contextlib.contextmanager
    def running(sides, *_):
        for side in sides:
            side.hello = {"revision": "r", "device": "d"}
        yield

    monkeypatch.setattr(perf_ci, "running", running)
    monkeypatch.setattr(perf_ci, "RECORD", tmp_path / "perf-ci.jsonl")
    monkeypatch.setattr(perf_ci.Side, "acceptance", lambda self, backend: [[7, 21, 17]])
    assert perf_ci.main(["--base", "HEAD", "--base-tree", str(ROOT)]) == expected
    assert asked == [["prefill", "decode"], *[["decode"]] * (times - 1)]
    rows = [json.loads(line) for line in (tmp_path / "perf-ci.jsonl").read_text().splitlines()] if expected == perf_ci.GREEN else []
    assert all(r["again"] == times - 1 and len(r["cells"]) == 2 for r in rows) and len(rows) == (expected == perf_ci.GREEN)


def test_acceptance_of_this_library():
    """The library under test drafts as well as the ordinary one; a fault in the hidden rows turns this red though the text is the same."""
    from test_faults import library_file

    base, new = sides(library_file())
    was, now = base.acceptance("cpu"), new.acceptance("cpu")
    assert was == now
    assert len(was) == len(perf_ci.PROMPTS) and all(0 < accepted < drafted for _, drafted, accepted in was)


def test_speed_of_this_library(pytestconfig):
    from test_faults import library_file

    if not pytestconfig.getoption("--library"):
        pytest.skip("speed is judged only for a library given with --library")
    base, new = sides(library_file())
    cells = perf_cells.of_models([str(ROOT / perf_ci.DEMO)])
    with perf_ci.running([base, new], "cpu", 2, cells):
        kept, _ = perf_ci.measure(base, new, cells, 7)
    ratios = {name: [k.ratios[name] for k in kept] for name in kept[0].ratios}
    status, said, _ = perf_ci.judge(ratios, [0.0] * len(kept), SAME, [], None)
    assert status == perf_ci.GREEN, said
