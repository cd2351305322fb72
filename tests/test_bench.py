"""The bench's core with made-up times and a made-up llama-bench: order of measuring, statistics, quiet rounds, a peer that errs."""

from __future__ import annotations

import json
import stat
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bw24 import bench, peer
from bw24.bench import default_cells, median_interval, run_bench
from bw24.errors import Bw24Error
from bw24.peer import Cell, LlamaBench, LlamaModule, find_peer

CELLS = default_cells()


class Quiet(bench.Others):
    """Reports a list of loads, one a round, then silence."""

    def __init__(self, loads: tuple[float, ...] = ()):
        self.loads = list(loads)

    def start(self) -> None:
        pass

    def cores(self) -> float:
        return self.loads.pop(0) if self.loads else 0.0


class Ours:
    """Takes 1 ms a token in prefill and 10 ms in decode, times `slow`; writes every call into `log`."""

    def __init__(self, log: list[str] | None = None, slow: tuple[float, ...] = ()):
        self.log = log if log is not None else []
        self.slow, self.calls = list(slow), 0

    def _factor(self) -> float:
        self.calls += 1
        return self.slow[(self.calls - 1) // 3 % len(self.slow)] if self.slow else 1.0

    def prefill(self, n_tokens: int, depth: int) -> float:
        self.log.append(f"ours prefill {n_tokens} {depth}")
        return 1e-3 * n_tokens * self._factor()

    def decode(self, n_tokens: int, depth: int) -> float:
        self.log.append(f"ours decode {n_tokens} {depth}")
        return 1e-2 * n_tokens * self._factor()


class Slower:
    """A peer of half our speed."""

    name, build = "other", "build 1"

    def __init__(self, log: list[str]):
        self.log = log

    def settle(self, cells: list[Cell]) -> None:
        self.log.append("settle")

    def round(self, cells: list[Cell]) -> dict[Cell, float]:
        self.log.append("peer")
        return {c: c.tokens * (2e-3 if c.kind == "prefill" else 2e-2) for c in cells}


def test_rounds_alternate_after_a_warm_up() -> None:
    log: list[str] = []
    result = run_bench(Ours(log), Slower(log), CELLS, 5, others=Quiet())
    ours = ["ours prefill 256 0", "ours prefill 1024 0", "ours decode 64 0"]
    assert log == [*ours, "settle"] + (ours + ["peer"] + ["peer"] + ours) * 2 + ours + ["peer"]
    assert len(result.kept) == result.tried == 5


def test_figures_and_keys_of_the_json_object() -> None:
    log: list[str] = []
    result = run_bench(Ours(log, slow=(1, 2, 1, 1, 1, 0.5)), Slower(log), CELLS, 5, others=Quiet(), wall_gbps=50.0,
                       weight_bytes=200_000_000, context={"model": "m.gguf", "threads": 2})
    out = json.loads(json.dumps(result.as_json()))
    assert out["decode_ratio"] == pytest.approx(2.0) and out["prefill_ratio_256"] == out["prefill_ratio_1024"] == pytest.approx(2.0)
    assert out["model"] == "m.gguf" and out["threads"] == 2 and out["peer"] == {"name": "other", "build": "build 1"}
    cell = out["cells"][2]
    assert (cell["kind"], cell["tokens"], cell["depth"]) == ("decode", 64, 0)
    assert [cell["ours"][key] for key in ("median", "min", "max")] == pytest.approx([100, 50, 200])
    assert [cell[key] for key in ("pair_low", "pair_high", "pair_coverage")] == pytest.approx([1.0, 4.0, 0.9375])
    assert out["decode_gbps"] == pytest.approx(20.0) and out["wall_fraction"] == pytest.approx(0.4)
    text = "\n".join(result.lines())
    assert "2.00x  1.00..4.00" in text and "40% of the 50.0 GB/s read wall" in text and "peer: other, build 1" in text


def test_without_a_peer_there_are_no_ratios() -> None:
    result = run_bench(Ours(), None, CELLS, 5, others=Quiet())
    out = result.as_json()
    assert out["decode_ratio"] is None and out["peer"] is None and "ratio" not in out["cells"][0] and out["wall_fraction"] is None
    assert "ratio" not in result.lines()[0]


def test_disturbed_rounds_are_measured_again() -> None:
    log: list[str] = []
    result = run_bench(Ours(log), Slower(log), CELLS, 5, others=Quiet((0, 1.5, 0, 0.9, 0, 0)))
    assert result.tried == 7 and len(result.kept) == 5 and not any(r.disturbed for r in result.kept)
    assert "2 more left out" in result.lines()[-1]


def test_a_machine_that_never_rests_is_said_to_be_loud() -> None:
    loads = (0.5, 0.9, 0.3, 0.2, 0.8, 0.4, 0.1, 0.7, 0.6, 1.0)
    result = run_bench(Ours(), None, CELLS, 5, others=Quiet(loads))
    assert result.tried == 10 and [r.others for r in result.kept] == [0.5, 0.3, 0.2, 0.4, 0.1]
    assert result.as_json()["disturbed"] == 4 and "NOT QUIET: in 4 of them others used up to 0.50 cores" in result.lines()[-1]


def test_own_and_child_processor_time_is_not_counted_as_others() -> None:
    others = bench.Others()
    assert others.cores() >= 0.0
    others._busy = others._own = 64.0  # sums that are exact in f64, so that the difference is exactly zero
    others._read_busy = lambda: others._busy + 8.0  # type: ignore[method-assign]
    others._read_own = lambda: others._own + 8.0  # type: ignore[method-assign]
    assert others.cores() == 0.0


def test_median_interval_is_the_exact_one() -> None:
    assert median_interval([5, 1, 3, 2, 4]) == (1, 5, 0.9375)
    low, high, coverage = median_interval(list(range(1, 11)))
    assert (low, high) == (2, 9) and coverage == pytest.approx(1 - 22 / 1024)
    assert median_interval([7.0])[:2] == (7.0, 7.0)


def test_bad_requests_are_refused() -> None:
    with pytest.raises(Bw24Error, match="at least 5 rounds, asked for 4"):
        run_bench(Ours(), None, CELLS, 4, others=Quiet())
    with pytest.raises(Bw24Error, match="sizes start at 1"):
        default_cells(prefills=(0,))
    stopped = SimpleNamespace(prefill=lambda n, d: 0.0, decode=lambda n, d: 0.0)
    with pytest.raises(Bw24Error, match="prefill 256 took 0.0 s"):
        run_bench(stopped, None, CELLS, 5, others=Quiet())


# ---- llama-bench ----

FAKE = """\
    #!{python}
    import json, sys
    arg = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    with open({log!r}, "a") as log:
        log.write(" ".join(sys.argv[1:]) + "\\n")
    rows = []
    for key, name in (("-p", "n_prompt"), ("-n", "n_gen")):
        for n in map(int, arg[key].split(",")):
            if n:
                rows.append({{"build_commit": "abc1234", "build_number": 77, "backends": "CPU", "model_filename": arg["-m"],
                              "n_threads": int(arg["-t"]), "type_k": arg["-ctk"], "type_v": arg["-ctv"], "n_prompt": 0, "n_gen": 0,
                              "n_depth": int(arg["-d"]), name: n, "samples_ns": [n * 1000000]}})
    {extra}
    print(json.dumps(rows))
"""


def fake_bench(folder: Path, extra: str = "pass") -> Path:
    path = folder / "llama-bench"
    path.write_text(textwrap.dedent(FAKE).format(python=sys.executable, log=str(folder / "log"), extra=extra))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_llama_bench_is_run_once_a_depth_and_read(tmp_path: Path) -> None:
    fake_bench(tmp_path)
    side = find_peer(tmp_path, Path("/m/x.gguf"), 2, "f16", 4096)
    cells = default_cells(depths=(0, 512))
    times = side.round(cells)
    assert times == {cell: pytest.approx(cell.tokens * 1e-3) for cell in cells}
    calls = (tmp_path / "log").read_text().splitlines()
    assert len(calls) == 2
    assert calls[0] == "-m /m/x.gguf -t 2 -p 256,1024 -n 64 -d 0 -r 1 -ctk f16 -ctv f16 -dev none -o json" and " -d 512 " in calls[1]
    assert side.build == "build 77 (abc1234), CPU"


def test_a_whole_run_against_llama_bench(tmp_path: Path) -> None:
    fake_bench(tmp_path)
    result = run_bench(Ours(), find_peer(tmp_path / "llama-bench", Path("x.gguf"), 2, "q8_0", 4096), CELLS, 5, others=Quiet())
    assert result.as_json()["prefill_ratio_256"] == pytest.approx(1.0) and result.as_json()["decode_ratio"] == pytest.approx(0.1)
    assert result.peer_build == "build 77 (abc1234), CPU"


def test_the_peer_takes_its_best_flags_for_each_cell(tmp_path: Path) -> None:
    """Prompts twice as fast without repacking, replies slower: each is measured at its best, and the build says so."""
    fake_bench(tmp_path, "if '--repack' in arg:\n        for r in rows: r['samples_ns'][0] *= 0.5 if r['n_prompt'] else 2")
    side, cells = find_peer(tmp_path, Path("x.gguf"), 2, "f16", 4096), default_cells(depths=(0, 512))
    side.settle(cells)
    times = side.round(cells)
    assert times == {c: pytest.approx(c.tokens * (0.5e-3 if c.kind == "prefill" else 1e-3)) for c in cells}
    calls = [line.split(" -p ")[1] for line in (tmp_path / "log").read_text().splitlines()]
    assert [c.split(" -ctk")[0] for c in calls] == ["256,1024 -n 64 -d 0 -r 2"] * 2 + [
        "0 -n 64 -d 0 -r 1", "256,1024 -n 0 -d 0 -r 1", "0 -n 64 -d 512 -r 1", "256,1024 -n 0 -d 512 -r 1"]
    assert ["--repack 0" in c for c in calls] == [False, True, False, True, False, True]
    assert side.build == "build 77 (abc1234), CPU; --repack 0 for prefill 256, prefill 1024"


def test_an_alternative_that_a_build_lacks_is_left_out(tmp_path: Path) -> None:
    fake_bench(tmp_path, "if '--repack' in arg: sys.exit('error: invalid parameter for argument: --repack')")
    side = find_peer(tmp_path, Path("x.gguf"), 2, "f16", 4096)
    side.settle(CELLS)
    assert side.round(CELLS) and side.build == "build 77 (abc1234), CPU"


@pytest.mark.parametrize(("extra", "message"), [
    ("print('cannot open x.gguf', file=sys.stderr); sys.exit(3)", "exit status 3: cannot open x.gguf"),
    ("print('hello'); sys.exit(0)", "expected JSON, found 'hello"),
    ("rows = []", "expected a list of results"),
    ("rows = rows[:2]", "no time for decode 64"),
    ("rows[0]['n_threads'] = 16", "n_threads: asked for 2, it measured 16"),
    ("rows[0]['type_k'] = 'q4_0'", "type_k: asked for f16, it measured q4_0"),
    ("rows[0]['samples_ns'] = []", "no time for prefill 256"),
    ("import time; time.sleep(60)", "no result within 1 s"),
])
def test_what_llama_bench_may_get_wrong(tmp_path: Path, extra: str, message: str) -> None:
    side = LlamaBench(fake_bench(tmp_path, extra), Path("x.gguf"), 2, "f16", timeout=30 if "sleep" not in extra else 1)
    with pytest.raises(Bw24Error, match=message) as caught:
        side.round(CELLS)
    assert "\n" not in str(caught.value)


def test_peers_that_do_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "MODULE", "no_such_llama_module")
    with pytest.raises(Bw24Error, match="no llama.cpp to measure against: give --peer-bin DIR"):
        find_peer(None, Path("x.gguf"), 2, "f16", 4096)
    with pytest.raises(Bw24Error, match="llama-bench: no such executable"):
        find_peer(tmp_path, Path("x.gguf"), 2, "f16", 4096)
    fake_bench(tmp_path)
    with pytest.raises(Bw24Error, match="no KV format e4m3: compare with one of f16"):
        find_peer(tmp_path, Path("x.gguf"), 2, "e4m3", 4096)


# ---- the Python module ----


class FakeLlama:
    """Advances a clock by 1 ms a token."""

    now = 0.0

    def __init__(self, **options: Any):
        if options["model_path"] == "broken.gguf":
            raise ValueError("Failed to load model from file: broken.gguf")
        self.options, self.position, self.chunks = options, 0, []

    def reset(self) -> None:
        self.position, self.chunks = 0, []

    def eval(self, tokens: list[int]) -> None:
        self.position += len(tokens)
        self.chunks.append(len(tokens))
        FakeLlama.now += 1e-3 * len(tokens)


def test_the_python_module_is_warmed_and_timed() -> None:
    module = SimpleNamespace(Llama=FakeLlama, __version__="9.9")
    side = LlamaModule(module, Path("m.gguf"), 2, "q8_0", 4096, clock=lambda: FakeLlama.now)
    cells = [Cell("prefill", 256, 32), Cell("decode", 64)]
    assert side.round(cells) == {cell: pytest.approx(cell.tokens * 1e-3) for cell in cells}
    options = side._llm.options
    assert options["type_k"] == options["type_v"] == 8 and options["n_threads"] == options["n_threads_batch"] == 2 and options["flash_attn"]
    assert side._llm.chunks == [1] * 64 and side.build == "llama-cpp-python 9.9"
    before = FakeLlama.now
    side.round(cells)
    assert FakeLlama.now - before == pytest.approx((32 + 256 + 64) * 1e-3)  # warm now: each cell runs once
    with pytest.raises(Bw24Error, match="cannot load broken.gguf: Failed to load"):
        LlamaModule(module, Path("broken.gguf"), 2, "f16", 4096)
