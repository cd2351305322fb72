"""scripts/board.py: the original's cells, with a local hub, a small model and a llama-bench that only says times."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import board  # noqa: E402


def test_cells_without_a_file_are_listed(capsys):
    assert board.main(["--rows", "original"]) == 0
    out = capsys.readouterr().out
    assert out.count("not run: no --model for it") == 18 and "0 of 18 cells measured" in out
    assert "qwen3.5-9b       plain @ 512" in out and "published 135.7 / 126.7 = 1.07x" in out


def test_a_speculative_cell_in_one_line():
    cell = {"model": "m", "kind": "spec", "k": 3, "class": "short code", "published": [3.0, 2.0]}
    arm = lambda rate, share: {"tokens_per_second": rate, "acceptance": share}  # noqa: E731
    total = {"ours_spec": arm(30, 0.9), "peer_spec": arm(10, 0.8), "peer_plain": arm(20, 0)}
    text = board.line(cell, {"spec": {"total": total}})
    assert "published 3.0 / 2.0 = 1.50x; here 30.0 / 20.0 = 1.50x, accepted 0.900 / 0.800" in text


def test_wrong_keys_and_missing_peers_are_named(capsys):
    with pytest.raises(SystemExit, match="gpt=x: expected KEY=FILE with one of qwen3.5-9b"):
        board.main(["--rows", "original", "--model", "gpt=x", "--peer-bin", "."])
    with pytest.raises(SystemExit):
        board.main(["--rows", "original", "--model", "qwen3.5-9b=x"])
    assert "--peer-bin DIR" in capsys.readouterr().err


def test_a_model_of_a_local_hub_is_fetched_and_measured(tmp_path, monkeypatch, capsys):
    from fake_hub import FakeHub
    from test_bench import fake_bench
    from tiny_model import write_tiny

    hub = FakeHub()
    try:
        hub.repos["owner/tiny-GGUF"] = {"tiny-NVFP4.gguf": write_tiny(tmp_path / "m.gguf", context=1024).read_bytes()}
        monkeypatch.setenv("BW24_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(board.models, "default_cache", lambda override=None: tmp_path / "cache")
        fake_bench(tmp_path)
        out = tmp_path / "rows.jsonl"
        words = ["--rows", "original", "--model", "gemma-4-e4b=hf:owner/tiny-GGUF:NVFP4", "--endpoint", hub.endpoint, "--peer-bin", str(tmp_path)]
        assert board.main([*words, "--device", "cpu", "--tokens", "4", "--out", str(out)]) == 0
    finally:
        hub.close()
    row = json.loads(out.read_text())
    assert row["cell"]["published"] == [199.9, 181.0] and row["file"] == "tiny-NVFP4.gguf" and row["ours"] > 0 and row["peer"] == pytest.approx(1000)
    assert "1 of 18 cells measured" in capsys.readouterr().out


def test_the_prompts_of_the_record():
    found = json.loads((ROOT / "research" / "prompts" / "bench.json").read_text())
    ids = [16 + i % 200 for i in range(4096)]
    assert found["first"] == ids[:256] and found["sha256_of_4096"] == hashlib.sha256(json.dumps(ids).encode()).hexdigest()
    from bw24.cli_check import Subject

    assert Subject(None).ids(256) == ids[:256]
    cells = json.loads(board.BOARDS["original"].read_text())["cells"]
    classes = json.loads((ROOT / "research" / "prompts" / "classes.json").read_text())
    assert {c["class"] for c in cells if c["kind"] == "spec"} <= set(classes)


def test_a_drafter_of_the_hub_goes_to_our_side(tmp_path, monkeypatch, capsys):
    """Speculative cells run where the plain ones do, with the drafter given and the prompts of their class."""
    from fake_hub import FakeHub

    asked = []
    demo = ROOT / "py" / "bw24" / "data" / "demo.gguf"
    monkeypatch.setattr(board, "run_json", lambda words: asked.append([str(w) for w in words]) or {"error": "not now"})
    hub = FakeHub()
    try:
        hub.repos["owner/drafts"] = {"head-Q8_0.gguf": b"GGUF" + bytes(60)}
        monkeypatch.setattr(board.models, "default_cache", lambda override=None: tmp_path / "cache")
        words = ["--rows", "original", "--model", f"qwen3.5-9b={demo}", "--draft", "qwen3.5-9b=hf:owner/drafts:Q8_0", "--endpoint", hub.endpoint]
        assert board.main([*words, "--peer-bin", str(tmp_path), "--device", "cpu", "--out", str(tmp_path / "rows.jsonl")]) == 1
    finally:
        hub.close()
    spec = [words for words in asked if words[1].endswith("spec_peer.py")]
    assert len(spec) == 3 and len(asked) == 4
    assert all(words[words.index("--device") + 1] == "cpu" and words[words.index("--draft") + 1].endswith("head-Q8_0.gguf") for words in spec)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {r["draft"] for r in rows} == {"head-Q8_0.gguf"} and all(r["error"] == "not now" for r in rows)
