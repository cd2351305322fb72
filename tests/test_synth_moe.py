"""Random-weight mixtures: their sizes, the popularity that a router is given, and the demonstration that spilled and resident agree."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import spill_demo
import synth_model
import synth_moe
from bw24.engine import Engine
from bw24.source import open_model
from bw24.tiers import Tiers, bank_of


def small(family: str, skew: float = 0.25) -> synth_model.Shape:
    name = {"hy_v3": "hy3-mini", "minimax-m2": "minimax-m2"}[family]
    dense = int(family == "hy_v3")
    extra = synth_model._moe(32, 4, 64, dense, dense, skew, **({"rotary": 32} if family == "minimax-m2" else {}))
    return replace(synth_model.SHAPES[name], vocab=600, dim=128, layers=3, ff=128, heads=4, kv_heads=2, head_dim=64, context=512, extra=extra)


def test_shapes_have_the_published_sizes():
    for name, parameters in {"hy3": 295.0e9, "minimax-m2": 228.7e9}.items():
        total = sum(np.prod([float(n) for n in t.shape]) for t in synth_model.tensors_of(synth_model.SHAPES[name]))
        assert total == pytest.approx(parameters, rel=0.002)


@pytest.mark.parametrize("name, share", synth_moe.CURVES.items())
def test_a_router_has_the_popularity_asked_for(name, share):
    found = synth_moe.shares(synth_moe.slope_for(share, 192, 8), 192, 8, seed=9)
    assert found[:48].sum() == pytest.approx(share, abs=0.015) and found.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("family", ["hy_v3", "minimax-m2"])
def test_the_file_runs_and_its_routing_is_skewed(tmp_path, family):
    top = {}
    for skew in (0.25, 0.7):
        path = tmp_path / f"{skew}.gguf"
        synth_model.write_model(path, "small", small(family, skew), "Q8_0")
        settings = {"device": "cpu", "threads": 1, "tiers": Tiers(ram=1 << 20, force=True)}
        with open_model(path) as model, Engine(model, **settings) as engine, engine.sequence() as seq:
            assert len(bank_of(model).ops) == (2 if family == "hy_v3" else 3)
            seq.prefill([(i * 31) % 590 for i in range(400)])
            uses = np.concatenate([np.sort(u)[::-1][:8] for u in engine.spill.uses()]).sum()
            top[skew] = uses / engine.spill.stats()["visits"]
    assert top[0.25] + 0.1 < top[0.7] > 0.65, "hidden rows of one text are alike, so some experts lead without any bias"


def test_the_process_takes_no_more_than_the_budget(tmp_path):
    """Not the library's own count, but the system's: anonymous memory of a process with a budget against one with next to none."""
    extra = synth_model._moe(64, 4, 256, 1, 1)
    shape = replace(small("hy_v3"), vocab=4200, dim=256, layers=5, extra=extra)
    path = tmp_path / "m.gguf"
    synth_model.write_model(path, "small", shape, "Q8_0")

    def anonymous(ram: int) -> float:
        request = {"file": str(path), "ram": ram, "tokens": 40, "threads": 1, "policy": "lru"}
        out = json.loads(spill_demo.run([sys.executable, spill_demo.__file__, "--worker", json.dumps(request)], None).splitlines()[-1])
        assert out["budget_mb"] * 0.9 < out["peak_experts_mb"] <= out["budget_mb"] * 1.05
        return out["anonymous_mb"]

    budget = 24 << 20
    with open_model(path) as model:
        assert bank_of(model).nbytes > 2 * budget
    assert anonymous(budget) - anonymous(0) < 1.05 * budget / 1e6


def test_the_demonstration_says_identical(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(synth_model.SHAPES, "hy3-mini", replace(small("hy_v3"), vocab=4200))
    record = tmp_path / "r.jsonl"
    words = ["--file", str(tmp_path / "m.gguf"), "--ram", "200k", "--tokens", "6", "--layers", "3", "--type", "Q8_0", "--threads", "1"]
    assert spill_demo.main([*words, "--record", str(record)]) == 0
    out = capsys.readouterr().out
    assert out.rstrip().endswith("IDENTICAL") and "% of the experts in RAM" in out
    row = json.loads(record.read_text())
    assert row["identical"] and row["rounds"][0]["bw24"]["peak_experts_mb"] <= row["rounds"][0]["bw24"]["budget_mb"] * 1.05


def test_latent_attention(tmp_path):
    """A deepseek2 shape: the file's list is built, its sizes are those of the published model."""
    path = tmp_path / "m.gguf"
    assert synth_model.main(["deepseek-mini", "--type", "Q4_0", "--layers", "2", "-o", str(path)]) == 0
    with open_model(path) as model:
        assert model.builder.kvs == {"kv0": (1, 576, 0), "kv1": (1, 576, 0)} and model.builder.shared == {"kv0", "kv1"}
    count = {name: sum(math.prod(t.shape) for t in synth_model.tensors_of(synth_model.SHAPES[name])) for name in ("deepseek-v2-lite", "deepseek-v3")}
    assert round(count["deepseek-v2-lite"] / 1e9, 1) == 15.7 and round(count["deepseek-v3"] / 1e9) == 671


def test_experts_of_many_pieces(tmp_path):
    """Matrices of 2.2 MB: several pieces into new memory, which end at huge pages, and into used memory; from one file and from two in turn."""
    extra = synth_model._moe(6, 2, 2048, 1, 1)
    shape = replace(small("hy_v3"), dim=1024, layers=2, extra=extra)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    path = tmp_path / "a" / "m.gguf"
    synth_model.write_model(path, "small", shape, "Q8_0")
    shutil.copy(path, tmp_path / "b")
    ids = [(i * 31) % 590 for i in range(24)]

    def logits(tiers: Tiers | None) -> tuple[bytes, dict[str, int]]:
        with open_model(path) as model, Engine(model, device="cpu", threads=2, tiers=tiers) as engine, engine.sequence() as seq:
            rows = seq.prefill(ids).tobytes() + b"".join(seq.decode(t).tobytes() for t in ids)
            return rows, engine.spill.stats() if engine.spill else {}

    want, _ = logits(None)
    both = (str(tmp_path / "a"), str(tmp_path / "b"))
    for tiers in [Tiers(ram=ram, force=True, nvme=nvme) for ram in (0, 1 << 30) for nvme in ((), both)]:
        rows, counts = logits(tiers)
        assert rows == want
        assert counts["reads"] > counts["bytes_read"] / 1.5e6 and (counts["evictions"] > 0) == (tiers.ram == 0)
        if tiers.nvme:
            assert 0.4 < counts["mirror_bytes"] / counts["bytes_read"] < 0.6
