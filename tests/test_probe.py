"""The probe: figures that are there, finite and of the right size, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bw24 import abi, check, cli, probe
from bw24.errors import Bw24Error


def test_the_processor_has_memory_rates_and_no_bus():
    with check.open_context("cpu", None, 1) as ctx:
        found = probe.rates(ctx)
    assert set(found) == {"read_gbps", "copy_gbps"} and all(0.1 < value < 5000 for value in found.values())
    assert abi.lib().bw24_probe_rates(abi.ffi.NULL, abi.new("bw24_rates")) == -1


def test_the_matrix_rate_is_of_this_context():
    with check.open_context("cpu", None, 1) as ctx:
        assert 0.001 < probe.matrix_rate(ctx, 0) < 1000


def test_a_disk_is_measured_and_left_as_it_was(tmp_path, monkeypatch):
    found = probe.disk(tmp_path, 32 << 20)
    assert found["write_gbps"] > 0 and found["read_gbps"] > 0 and isinstance(found["direct"], bool)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Bw24Error, match="No such file"):
        probe.disk(tmp_path / "none")
    with pytest.raises(Bw24Error, match="wants as much again free"):
        probe.disk(tmp_path, 1 << 60)


def test_the_command_prints_and_writes_one_object(monkeypatch, capsys, tmp_path):
    card = {"device": "cuda:0 Test", "read_gbps": 4700.0, "copy_gbps": 4300.0, "to_device_gbps": 52.0, "launch_us": 2.1, "matrix_tops": 900.0,
            "host": {"device": "cpu test", "read_gbps": 300.0, "copy_gbps": 280.0},
            "disk": {"folder": str(tmp_path), "write_gbps": 2.0, "read_gbps": 6.5, "direct": False}}
    asked = []
    monkeypatch.setattr(probe, "measure", lambda *words: (asked.append(words), card)[1])
    assert cli.main(["probe", "--dir", str(tmp_path), "--threads", "3"]) == 0
    out = capsys.readouterr().out
    assert asked == [("auto", "auto", None, 3, Path(tmp_path))]
    assert "cuda:0 Test" in out and "4.7e+03 GB/s" in out and "cpu test" in out and "perhaps the page cache's" in out
    assert cli.main(["probe", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == card

