"""The server under load, told to stop, with its worker killed. On the tiny model; tests/load_server.py puts the load on a real one."""

from __future__ import annotations

import os
import signal
import threading
import time

import httpx
import pytest

from load_server import alone, read, requests, run, threads_of
from serving import MODEL_NAME, Server
from tiny_model import write_tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("load") / MODEL_NAME, context=4096, layers=4)


def test_sixty_four_clients_of_whom_a_third_leaves(path, tmp_path):
    server = Server(path, log=tmp_path / "log", BW24_CACHE_RAM="8").wait()
    try:
        bodies = requests(40)
        expected = alone(server.url, bodies)
        before = server.idle()
        out = run(server.url, bodies, expected, clients=64, count=500)
        assert not out.wrong and not out.errors, (out.wrong + out.errors)[:3]
        assert out.completed + out.left == 500 and 100 < out.left < 250
        after = server.idle()
        assert (after["running"], after["rows"], after["waiting"]) == (0, 0, 0) and before["rows"] == 0
        assert server.figure("bw24:kv_cache_bytes") <= 8 << 20
        pid = server.workers()[0]
        held = threads_of(pid)
        run(server.url, bodies, expected, clients=64, count=64)
        assert threads_of(pid) <= held + 2  # the pool's threads stay; requests leave none behind
        log = server.log.read_text()
        assert "Traceback" not in log and "ERROR" not in log, log[-2000:]
    finally:
        assert server.stop() == 0


def test_a_full_queue_answers_429_and_comes_back(path, tmp_path):
    server = Server(path, log=tmp_path / "log", BW24_PARALLEL="1", BW24_QUEUE="2").wait()
    try:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=30, limits=httpx.Limits(max_connections=20)) as client:
            streams = [client.send(client.build_request("POST", server.url + "/v1/chat/completions", json=body), stream=True) for _ in range(5)]
            assert sorted(s.status_code for s in streams) == [200, 200, 200, 429, 429]
            for stream in streams:
                if stream.status_code == 429:
                    assert stream.headers["Retry-After"] and b"the queue holds 2" in stream.read()
                stream.close()
            server.idle()
            assert client.post(server.url + "/v1/chat/completions", json={**body, "max_tokens": 2, "stream": False}).status_code == 200
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize("drain, finishes", [("20", True), ("0.2", False)])
def test_stopping_under_load_ends_every_stream_cleanly(path, tmp_path, drain, finishes):
    server = Server(path, log=tmp_path / "log", BW24_DRAIN=drain).wait()
    tokens = 400 if finishes else 4000
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": tokens, "ignore_eos": True, "stream": True, "n": 4}
    ends: list[str] = []
    started = threading.Barrier(9)

    def client() -> None:
        with httpx.Client(timeout=60) as session, session.stream("POST", server.url + "/v1/chat/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            started.wait()
            seen = [line for line in lines if line.startswith("data: ")]
        assert seen[-1] == "data: [DONE]"
        ends.append("error" if '"error"' in seen[-2] else "whole")

    threads = [threading.Thread(target=client) for _ in range(8)]
    for t in threads:
        t.start()
    started.wait()
    assert server.stop() == 0
    for t in threads:
        t.join(30)
    assert len(ends) == 8 and (set(ends) == {"whole"} if finishes else "error" in ends), ends
    log = server.log.read_text()
    assert "Traceback" not in log, log[-3000:]


def test_a_killed_worker_is_replaced(path, tmp_path):
    server = Server(path, log=tmp_path / "log").wait()
    try:
        (pid,) = server.workers()
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        while not (server.get("/health")[0] == 200 and server.workers() != [pid]):
            assert time.monotonic() - killed < 10
            time.sleep(0.02)
        with httpx.Client(timeout=30) as client:
            assert read(client, server.url, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "ignore_eos": True})[2]
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize("words, message", [
    (["--workers", "2"], "2 workers: one process owns the device"), (["--preload"], "--preload: the model must load after the fork"),
    (["-k", "sync"], "worker class"), (["-b", "0.0.0.0:1"], "needs --api-key-file"),
])
def test_what_cannot_work_is_refused_with_the_reason(path, tmp_path, words, message):
    server = Server(path, *words, log=tmp_path / "log")
    assert server.process.wait(20) == 2 and message in server.log.read_text()


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path):
    server = Server(tmp_path / "missing.gguf", log=tmp_path / "log")
    assert server.process.wait(20) != 0 and "missing.gguf" in server.log.read_text()
    server = Server(tmp_path / "missing.gguf", log=tmp_path / "log", BW24_QUEUE="many")
    assert server.process.wait(20) == 2 and "BW24_QUEUE=many" in server.log.read_text()
