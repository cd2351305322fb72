"""Where a model computes: the rule of auto, the errors of cards that cannot be used, and settings that contradict each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bw24 import abi, check, cli, device, engine, flags
from bw24.errors import Bw24Error
from bw24.source import open_model

ROOT = Path(__file__).resolve().parent.parent
TINY = sorted((ROOT / "tests" / "fixtures" / "tiny").glob("*.gguf"))[0]
CARD = device.Facts(0, device.USABLE, "NVIDIA Test 24", count=1, capability=120, driver=13000, total=24 << 30, free=23 << 30)
OLD = device.Facts(0, device.UNUSABLE, "NVIDIA Old 8", "this build has no code for NVIDIA Old 8 (compute capability 6.1)", count=1)
NONE = device.Facts(0, device.NONE, reason="there is no CUDA device")


def machine(*cards: device.Facts):
    """A query of a machine with these cards."""
    return lambda index: cards[index] if index < len(cards) else NONE


def test_a_card_is_taken_where_there_is_one():
    assert device.choose(query=machine(CARD)) == device.Choice("cuda", True, facts=CARD)
    assert flags.BY_NAME["device"].parse("cuda:1") == "cuda:1"
    two = device.Facts(1, device.USABLE, "NVIDIA Test 32", count=2, capability=120)
    first = device.Facts(0, device.UNUSABLE, "NVIDIA Old 8", "no code for it", count=2)
    assert device.choose(query=machine(first, two)).backend == "cuda:1"  # an old card for the screen does not hide the other
    assert device.choose("cuda:1", query=machine(CARD, two)) == device.Choice("cuda:1", False, facts=two)


def test_the_processor_is_taken_where_there_is_no_card():
    found = device.choose(query=machine())
    assert (found.backend, found.automatic, found.note) == ("cpu", True, "there is no CUDA device")
    assert device.choose("cpu", query=machine(CARD)).backend == "cpu"
    assert device.choose(isa="avx2", query=machine(CARD)).backend == "cpu"  # an instruction set is the processor's
    assert device.choose(plain=True, query=machine(CARD)).backend == "cpu"
    assert device.choose(backend="ref", query=machine(CARD)).backend == "ref"


@pytest.mark.parametrize("asked", ["auto", "cuda", "cuda:0"])
def test_a_card_that_cannot_be_used_is_an_error_with_its_reason(asked):
    with pytest.raises(Bw24Error) as caught:
        device.choose(asked, query=machine(OLD))
    assert "NVIDIA Old 8" in str(caught.value) and OLD.reason in str(caught.value) and "--device cpu" in str(caught.value)
    assert caught.value.code == -9


def test_a_card_that_is_asked_for_and_missing_is_an_error():
    with pytest.raises(Bw24Error, match="cuda:3 cannot be used: there is no CUDA device; --device cpu"):
        device.choose("cuda:3", query=machine(CARD))


def test_a_model_that_the_card_does_not_run_goes_to_the_processor_unless_asked_for():
    refused = Bw24Error("op 3 EXPERTS: backend cuda does not run this op yet", -3)
    automatic, asked = device.choose(query=machine(CARD)), device.choose("cuda", query=machine(CARD))
    found = device.fallback(automatic, refused)
    assert found.backend == "cpu" and "NVIDIA Test 24 is not used: op 3 EXPERTS" in found.note
    assert device.fallback(asked, refused) is None
    assert device.fallback(automatic, Bw24Error("out of memory on the CUDA device", -2)) is None
    assert device.fallback(device.choose(query=machine()), refused) is None


def test_an_engine_falls_back_once_and_says_so(monkeypatch):
    """A library that refuses backend cuda stands for a card that does not run the list."""
    facts = device.Facts(0, device.USABLE, "NVIDIA Test 24", total=1 << 40, free=1 << 40, count=1, capability=90)
    monkeypatch.setattr(device, "choose", lambda *_: device.Choice("cuda", True, facts=facts))
    opened, honest = [], engine.Engine._open

    def refuses(self, *settings):
        opened.append(self.backend)
        if self.backend == "cuda":
            raise Bw24Error("op 1: backend cuda does not run this op yet", -3)
        honest(self, *settings)

    monkeypatch.setattr(engine.Engine, "_open", refuses)
    with open_model(TINY) as model, engine.Engine(model, ctx=64) as e:
        # a library without CUDA refuses already where sizes are asked, before anything is opened
        assert opened in (["cuda", "cpu"], ["cpu"]) and e.backend == "cpu"
        assert e.device_line.startswith("device: cpu") and "NVIDIA Test 24 is not used" in e.device_line


@pytest.mark.parametrize("words, message", [
    (["--device", "cuda", "--backend", "ref"], "--device cuda and --backend ref name two places"),
    (["--device", "cpu", "--backend", "cuda"], "--device cpu and --backend cuda name two places"),
    (["--device", "cuda:1", "--isa", "avx2"], "--isa avx2 is an instruction set of the processor; cuda:1 has none"),
    (["--device", "gpu"], "expected one of auto, cpu, cuda, found 'gpu'"),
    (["--device", "cuda:x"], "found 'cuda:x'"),
])
def test_settings_that_contradict_are_refused(words, message, capsys):
    assert cli.main(["gen", str(TINY), "-p", "x", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["gen", "-p", "x", "-n", "2"], ["gate"], ["kernel-check"], ["explain"]])
def test_commands_say_what_computes(words, capsys, monkeypatch):
    monkeypatch.setattr(check, "run_cases", lambda *_: iter([check.CheckResult("PASS", "one", "")]))
    assert cli.main([words[0], *([str(TINY)] if words[0] != "kernel-check" else []), *words[1:], "--device", "cpu"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("device: ")]
    assert len(lines) == 1 and lines[0].startswith("device: cpu ")


def test_the_library_answers_for_this_machine():
    found = device.query(0)
    assert found.state in (device.NONE, device.USABLE, device.UNUSABLE)
    assert bool(found.reason) == (found.state != device.USABLE)
    assert (found.free > 0) == (found.state == device.USABLE)
    with pytest.raises(Bw24Error, match="outside 0..63"):
        device.query(64)


def built_with_cuda() -> bool:
    try:
        with check.open_context("cuda"):
            return True
    except Bw24Error as error:
        return "not in this build" not in str(error)


@pytest.mark.parametrize("version, status, expected", [
    (11040, 0, "the NVIDIA driver is too old: it has CUDA 11.4"),
    (99000, 100, None),  # CUDA_ERROR_NO_DEVICE: the driver is there, a card is not
])
def test_a_stand_in_driver(tmp_path, version, status, expected):
    """A driver library of our own, found at run time as the real one is."""
    if not built_with_cuda():
        pytest.skip("the library was built without CUDA")
    source = tmp_path / "fake.c"
    source.write_text(f"int cuInit(unsigned f) {{ (void)f; return {status}; }}\nint cuDriverGetVersion(int *v) {{ *v = {version}; return 0; }}\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(source)], check=True)
    environ = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT / "py")}
    words = [sys.executable, "-m", "bw24", "gen", str(TINY), "--raw", "-p", "x", "-n", "1"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True)
    if expected is None:
        assert done.returncode == 0 and "device: cpu" in done.stderr, done.stderr
    else:
        assert done.returncode == 2 and expected in done.stderr and "--device cpu" in done.stderr
        assert subprocess.run([*words, "--device", "cpu"], env=environ, capture_output=True).returncode == 0


def test_facts_are_of_the_size_that_the_header_says():
    assert abi.lib().bw24_device_query(0, abi.ffi.new("bw24_device_facts *")) == -1  # a struct without its size
