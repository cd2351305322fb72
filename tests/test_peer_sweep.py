"""scripts/peer_sweep.py with a llama-bench that only says times: which processes run, what is compared with what, the rows."""

from __future__ import annotations

import json
import stat
import sys
import textwrap
from pathlib import Path

import pytest

from bw24 import records

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import peer_sweep  # noqa: E402

FAKE = """\
    #!{python}
    import itertools, json, os, sys
    words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    open({log!r}, "a").write(json.dumps([words, os.environ.get("GGML_CUDA_DISABLE_GRAPHS")]) + "\\n")
    keys = {{"-t": "n_threads", "-fa": "flash_attn", "-ub": "n_ubatch", "-lm": "load_mode", "--poll": "poll", "--repack": "repack"}}
    listed = [(keys[f], v.split(",")) for f, v in words.items() if f in keys]
    if "9" in words["-t"].split(","):
        sys.exit("error: nine threads")
    rows = []
    for values in itertools.product(*(v for _, v in listed)):
        shown = {{k: v if k == "load_mode" else v == "1" if k == "repack" else int({{"auto": -1, "on": 1, "off": 0}}.get(v, v))
                 for (k, _), v in zip(listed, values)}}
        speed = 100 * int(shown["n_threads"]) * (2 if shown.get("flash_attn") == 0 else 1)
        tests = [(int(p), 0) for p in words["-p"].split(",") if p != "0"] + [(0, int(n)) for n in words["-n"].split(",") if n != "0"]
        rows += [dict(shown, n_prompt=p, n_gen=n, build_number=7, backends="CPU", samples_ns=[(p or n) / speed * 1e9] * int(words["-r"]))
                 for p, n in tests]
    print(json.dumps(rows))
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "llama-bench"
    path.write_text(textwrap.dedent(FAKE).format(python=sys.executable, log=str(tmp_path / "log")))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "m.gguf").write_text("abc")
    return tmp_path


def sweep(folder: Path, *words: str) -> list[dict]:
    out = folder / "peer.jsonl"
    assert peer_sweep.main([str(folder / "m.gguf"), "--peer-bin", str(folder), "--threads", "2", "-o", str(out), *words]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def calls(folder: Path) -> list[tuple[dict, str | None]]:
    return [tuple(json.loads(line)) for line in (folder / "log").read_text().splitlines()]


def test_settings_of_one_flag_share_a_process_and_turn_round(folder, capsys):
    rows = sweep(folder, "--groups", "threads")
    assert [c["-t"] for c, _ in calls(folder)] == ["2,1,3", "3,1,2", "2,1,3", "3,1,2", "2,1,3"]
    assert [r["flags"]["-t"] for r in rows] == ["2", "1", "3"] and [r["default"] for r in rows] == [True, False, False]
    cells = rows[1]["cells"]
    assert set(cells) == {"prefill 256", "decode 64"} and cells["decode 64"]["ratio"] == pytest.approx(0.5)
    assert cells["decode 64"]["median"] == pytest.approx(100) and len(cells["decode 64"]["samples"]) == 5
    assert rows[0]["build"] == "build 7, CPU" and rows[0]["file_bytes"] == 3 and len(rows[0]["others_cores"]) == 5
    assert "= 0.500x (0.500..0.500)" in capsys.readouterr().out


def test_the_rest_runs_one_by_one(folder):
    rows = sweep(folder, "--groups", "affinity,flash-attention,repack,load")
    assert len(calls(folder)) == 5 * (3 + 1 + 1 + 1)
    assert {(r["group"], r["cells"]["decode 64"]["ratio"]) for r in rows if not r["default"]} == {
        ("affinity", 1.0), ("flash-attention", 1.0), ("flash-attention", 2.0), ("repack", 1.0), ("load", 1.0)}


def test_a_card_is_swept_by_repetitions_and_environment(folder):
    rows = sweep(folder, "--device", "cuda", "--rounds", "1", "--repeat", "5", "--groups", "environment,ubatch", "--prefill", "512", "--decode", "64")
    seen = calls(folder)
    assert [e for _, e in seen] == [None, "1", None, None, None] and all(c["-ngl"] == "999" and c["-b"] == "4096" for c, _ in seen)
    assert seen[-1][0]["-ub"] == "512,1024,2048,4096" and seen[-1][0]["-p"] == "4096" and seen[-1][0]["-n"] == "0"
    assert rows[1]["env"] == {"GGML_CUDA_DISABLE_GRAPHS": "1"} and len(rows[1]["cells"]["decode 64"]["samples"]) == 5


def test_what_goes_wrong_is_one_line(folder, capsys):
    with pytest.raises(SystemExit, match=r"peer_sweep: .*: error: nine threads"):
        peer_sweep.main([str(folder / "m.gguf"), "--peer-bin", str(folder), "--threads", "9", "--groups", "poll"])
    with pytest.raises(SystemExit, match="no such file"):
        peer_sweep.main([str(folder / "n.gguf"), "--peer-bin", str(folder)])
    with pytest.raises(SystemExit):
        peer_sweep.main([str(folder / "m.gguf"), "--peer-bin", str(folder), "--groups", "sails"])
    assert "sails: expected some of threads," in capsys.readouterr().err


def test_the_record_of_the_sweeps():
    """A setting that beat the default clearly, for the same work, is one that `bw24 bench` tries for its peer."""
    from bw24.peer import ALTERNATIVES

    found = [r.data for r in records.load(ROOT / "research") if r.data.get("what") == "peer flags" and not r.retired]
    assert {"threads", "flash-attention", "repack", "poll"} <= {d["group"] for d in found if d["backend"] == "cpu"}
    for d in found:
        same_work = not {"-ctk", "-ctv"} & set(d["flags"])  # another KV format is other work
        if same_work and not d["default"] and any(c["low"] > 1.1 for c in d["cells"].values()):
            assert tuple(word for pair in d["flags"].items() for word in pair) in ALTERNATIVES[d["backend"]], d
