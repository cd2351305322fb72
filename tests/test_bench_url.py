"""bench --url against our server: counts, figures, errors."""

from __future__ import annotations

import json

import pytest

from bw24 import bench_url, cli
from serving import Server
from tiny_model import write_tiny


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    keys = folder / "keys"
    keys.write_text("secret-key-1\n")
    one = Server(write_tiny(folder / "tiny.gguf", context=1024), log=folder / "log", BW24_API_KEY_FILE=str(keys)).wait()
    yield one, keys
    assert one.stop() == 0


def test_figures_are_those_of_the_requests(server, capsys):
    words = ["bench", "--url", server[0].url, "--clients", "3", "--requests", "7", "--sizes", "20", "--tokens", "9"]
    words += ["--key-file", str(server[1]), "--json"]
    assert cli.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["clients"], found["errors"], found["tokens"]) == (7, 3, 0, 63)
    assert 0 < found["first_p50"] <= found["first_p99"] <= found["whole_p99"] and found["prompt_tokens"] > 7 * 100
    assert found["tokens_per_second"] == pytest.approx(63 / found["seconds"], rel=0.05)
    assert cli.main([w for w in words if w != "--json"]) == 0
    assert "7 requests from 3 clients" in capsys.readouterr().out


def test_errors_are_counted_and_shown(server, capsys):
    words = ["bench", "--url", server[0].url, "--clients", "2", "--requests", "2", "--sizes", "9999", "--key-file", str(server[1])]
    assert cli.main(words) == 2
    out = capsys.readouterr().out
    assert "2 failed" in out and "the context holds 1024" in out
    assert cli.main(["bench", "--url", server[0].url]) == 2 and "401" in capsys.readouterr().err
    for url in ("http://127.0.0.1:1", "nonsense", "http://["):
        assert cli.main(["bench", "--url", url]) == 2
        assert "no OpenAI-compatible server answers" in capsys.readouterr().err


def test_spread():
    assert bench_url.spread([]) == {"p50": 0.0, "p99": 0.0}
    assert bench_url.spread([float(i) for i in range(1, 101)]) == {"p50": 50.5, "p99": 99.0}
