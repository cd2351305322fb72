"""What a model will take: predictions against what is measured, and refusals that say what would fit, before anything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bw24 import abi, cli, device, engine, info, placement, sizes
from bw24.cli_check import GATE_TEXT
from bw24.engine import Engine, parse_kv
from bw24.errors import Bw24Error
from bw24.source import open_model

ROOT = Path(__file__).resolve().parent.parent
TINY = sorted((ROOT / "tests" / "fixtures" / "tiny").glob("*.gguf"))
DEMO = ROOT / "py" / "bw24" / "data" / "demo.gguf"


def run(*words: str) -> dict:
    done = subprocess.run([sys.executable, "-m", "bw24", *words, "--json", "--device", "cpu"], capture_output=True, text=True, cwd=ROOT / "py")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_predicted_host_memory_is_that_of_a_run():
    """Within 3 % of the peak of a whole process, with a prompt that fills the context."""
    reply = run("gen", str(DEMO), "--raw", "-p", (GATE_TEXT * 6)[:3000], "-n", "4", "--ctx", "2048", "--spec", "off")
    context = reply["prompt_tokens"] + 4
    need = run("info", str(DEMO), "--ctx", str(context))["memory"][0]
    assert abs(need["host"] / reply["peak_memory_bytes"] - 1) < 0.03, (need, reply["peak_memory_bytes"])
    assert need["device"] == 0 and need["total"] == need["host"] and need["fits"]


@pytest.mark.parametrize("path", TINY, ids=lambda p: p.stem)
def test_weights_and_work_are_what_the_library_takes(path):
    with open_model(path) as model, Engine(model, device="cpu", ctx=128, threads=2) as e:
        found = sizes.predict(model.file.tensors.values(), {"trunk": model.list_text()}, "cpu", e.kv, 128, e.max_rows, 2)
        held = e.memory()
        packed = -(-held["weights"] // (1 << 21)) << 21  # packed weights live in one mapping of whole huge pages
        # besides: matrices read where they are, small tensors as f32; buffers that a fused step never writes are left out
        assert packed <= found.weights + (1 << 21) and found.weights <= packed + (4 << 20)
        assert 0.3 * held["work"] < found.work < 1.05 * held["work"] + 9 * 4 * e.n_vocab


def test_predictions_need_no_weights_and_refuse_more_than_sizes():
    with open_model(TINY[0]) as model:
        lists, tensors = {"trunk": model.list_text()}, list(model.file.tensors.values())
        small, large = (sizes.predict(tensors, lists, "cpu", parse_kv("f16"), ctx, 64) for ctx in (64, 256))
        assert large.kv > small.kv and large.weights == small.weights
        with pytest.raises(Bw24Error, match="backend 'tpu' is not in this build"):
            sizes.predict(tensors, lists, "tpu", parse_kv(None), 64, 64)
        p, ctx, out = abi.new("bw24_open_params"), abi.ffi.new("bw24_ctx **"), abi.ffi.new("bw24_model **")
        p.backend, p.plan_only = (name := abi.ffi.new("char[]", b"cpu")), 1
        abi.check(abi.lib().bw24_open(ctx, p))
        q = abi.new("bw24_model_params")
        q.max_rows, q.max_context = 8, 64
        abi.check(abi.lib().bw24_model_new(out, ctx[0], q))
        assert abi.lib().bw24_predict(out[0], abi.new("bw24_memory")) == -1  # no list yet
        assert abi.lib().bw24_prepare(out[0], 0) == -1  # a context for plans packs nothing
        abi.lib().bw24_model_free(out[0])
        abi.lib().bw24_close(ctx[0])
        del name


def test_a_card_is_predicted_where_there_is_none():
    """The arithmetic of backend cuda asks no device; builds without it say so."""
    with open_model(DEMO) as model:
        try:
            found = sizes.predict(model.file.tensors.values(), {"trunk": model.list_text()}, "cuda", parse_kv(None), 1024, 256)
        except Bw24Error as error:
            assert "not in this build" in str(error)
            pytest.skip("the library was built without CUDA")
        assert found.device == found.weights + found.work + found.kv + found.state + found.fixed
        assert found.weights > 0.9 * sum(t.nbytes for t in model.file.tensors.values()) and found.host < found.device


def test_what_does_not_fit_is_refused_with_what_would(monkeypatch):
    loaded = []
    monkeypatch.setattr(Engine, "_load", lambda self, *_: loaded.append(self))
    with open_model(next(p for p in TINY if p.stem.startswith("llama"))) as model:
        own = model.context_length
        beside = sizes.predict(model.file.tensors.values(), {"trunk": model.list_text()}, "cpu", parse_kv(None), own, 256)
        kv = engine.kv_bytes(model, parse_kv(None), own, 256)
        monkeypatch.setattr(engine, "available_memory", lambda reserve=False: beside.total - beside.kv - beside.state + kv // 2)
        with pytest.raises(Bw24Error) as caught:
            Engine(model, device="cpu", ctx=own)
        text = str(caught.value)
        assert model.path.name in text and f"{own} tokens of context need" in text and "what would fit: --ctx " in text and caught.value.code == -2
        fits = int(text.split("--ctx ")[1].split(",")[0])
        assert 64 <= fits < own and engine.kv_bytes(model, parse_kv(None), fits, 256) <= kv // 2
        monkeypatch.setattr(engine, "available_memory", lambda reserve=False: 1 << 20)
        with pytest.raises(Bw24Error, match="what would fit: a smaller model"):
            Engine(model, device="cpu")
    assert not loaded


def test_a_card_that_is_too_small_names_the_processor(monkeypatch):
    facts = device.Facts(0, device.USABLE, "NVIDIA Test 1", count=1, capability=90, total=1 << 30, free=1 << 20)
    monkeypatch.setattr(device, "query", lambda index=0: facts)
    monkeypatch.setattr(device, "choose", lambda *_: device.Choice("cuda", True, facts=facts))
    monkeypatch.setattr(placement, "predict", lambda tensors, *_: sizes.Sizes(64, 0, 0, 0, 0, 0, sum(t.nbytes for t in tensors), 0, 0))
    with open_model(DEMO) as model, pytest.raises(Bw24Error, match="on the card; what would fit: --device cpu, a smaller model"):
        Engine(model)


def test_info_of_a_card(monkeypatch, capsys):
    facts = device.Facts(0, device.USABLE, "NVIDIA Test 24", count=1, capability=90, total=24 << 30, free=23 << 30)
    monkeypatch.setattr(device, "choose", lambda *_: device.Choice("cuda", True, facts=facts))
    monkeypatch.setattr(info, "predict", lambda tensors, lists, backend, kv, ctx, rows: sizes.Sizes(ctx, 1, 2, 3, 4, 5, 15 << 30, 100, 7))
    assert cli.main(["info", str(DEMO)]) == 0
    out = capsys.readouterr().out
    assert "memory on NVIDIA Test 24, 24.7 GB are free there" in out and "fits" in out
    assert cli.main(["info", str(DEMO), "--ctx", "512", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["place"]["card"] == "NVIDIA Test 24" and report["memory"][0]["device"] == 15 << 30 and report["memory"][0]["fits"]
    assert cli.main(["info", str(DEMO), "--ctx", "99999999"]) != 0 or "the model's context is" in capsys.readouterr().out


def test_the_longest_context_that_fits():
    assert sizes.largest_context(lambda n: n, 4096, 5000) == 4096
    assert sizes.largest_context(lambda n: n, 4096, 1500) == 1024
    assert sizes.largest_context(lambda n: n, 4096, 60) == 0
