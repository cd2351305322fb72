"""A server among enemies: slow and broken connections, huge and deep bodies, wrong values in every field. Errors, never a 5xx, a hang or a leak."""

from __future__ import annotations

import json
import random
import socket
import threading
import time

import pytest

from bw24.server import schemas
from bw24.server.openapi import POSTS
from fuzz_server import NASTY, request
from serving import MODEL_NAME, Server, application
from tiny_model import write_tiny

HI = [{"role": "user", "content": "Hi"}]
@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("hostile") / MODEL_NAME, context=512)


@pytest.fixture(scope="module")
def served(path):
    app, service = application(path)
    yield app.test_client(), service
    service.close()


@pytest.fixture(scope="module")
def server(path):
    one = Server(path, log=path.parent / "log", BW24_QUEUE="16", BW24_PARALLEL="4").wait()
    yield one
    assert one.health()["running"] == 0 and len(one.workers()) == 1
    text = one.log.read_text(errors="replace")
    assert "Traceback" not in text, text[-3000:]
    assert one.stop() == 0


def raw(server, data: bytes, wait: float = 10) -> bytes:
    """What the server answers to these bytes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=wait) as s:
        try:
            s.sendall(data)
            out = b""
            while part := s.recv(65536):
                out += part
                if b"\r\n\r\n" in out and b"Content-Length: " in out:
                    head, body = out.split(b"\r\n\r\n", 1)
                    if len(body) >= int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0]):
                        break
        except (ConnectionError, TimeoutError):
            pass
        return out


def status(answer: bytes) -> int:
    return int(answer.split()[1]) if answer else 0


@pytest.mark.parametrize("url", sorted(POSTS))
def test_wrong_values_in_every_place(served, url):
    rng, seen = random.Random(url), set()
    for _ in range(400):
        body = request(url, rng, MODEL_NAME)
        reply = served[0].post(url, data=json.dumps(body, ensure_ascii=True), content_type="application/json")
        text = reply.get_data(as_text=True)
        assert reply.status_code in (200, 400, 404), (reply.status_code, text[:300], json.dumps(body)[:500])
        if reply.status_code != 200:
            error = json.loads(text)["error"]
            assert error["message"] and len(error["message"]) < 1500
        elif "event-stream" in reply.content_type:
            assert '"server_error"' not in text and '"api_error"' not in text, text[-500:]
        seen.add(reply.status_code)
    assert 400 in seen and 200 in seen
    assert served[1].scheduler.load()["rows"] == 0 and served[1].state == "ready"


@pytest.mark.parametrize("name", [n for n, k in schemas.CHAT.fields.items() if n not in ("messages", "model")])
def test_every_chat_field_refuses_every_wrong_value_by_name(served, name):
    for value in NASTY:
        body = json.dumps({"messages": HI, "max_tokens": 2, name: value})
        reply = served[0].post("/v1/chat/completions", data=body, content_type="application/json")
        assert reply.status_code in (200, 400), reply.get_data()
        if reply.status_code == 400:
            assert name in reply.get_json()["error"]["message"], (name, value, reply.get_data())


def test_template_text_is_only_text(served):
    for text in ("{{ 7 * 7 }}", "{% for i in range(10**9) %}x{% endfor %}", "{{ ''.__class__.__mro__ }}", "{{ messages }}"):
        for messages in ([{"role": "user", "content": text}], [{"role": "system", "content": text}, *HI]):
            prompt = served[0].post("/apply-template", json={"messages": messages}).get_json()["prompt"]
            assert text in prompt


def test_broken_requests(server):
    for data in (b"", b"\x00" * 100, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
                 b"GET / HTTP/1.1\r\nHost: x\r\nA\r\n\r\n",
                 b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
                 b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
                 b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n"
                 b"5\r\nhello\r\n0\r\n\r\n",
                 b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\nhello\r\n",
                 b"GET /" + b"a" * 10000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
                 b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: " + b"a" * 20000 + b"\r\n\r\n",
                 b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(500)) + b"\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as s:
            s.sendall(data)
            s.shutdown(socket.SHUT_WR)
            try:
                answer = s.recv(65536)
            except ConnectionError:
                answer = b""
        assert not answer or 400 <= status(answer) < 502, (data[:60], answer[:200])
        assert status(answer) != 500, (data[:60], answer[:200])
    assert server.get("/health")[0] == 200


def test_huge_bodies_are_refused_at_once(server):
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    started = time.monotonic()
    assert status(raw(server, head % (100 << 20) + b"{" * 1000)) == 413
    assert time.monotonic() - started < 5
    chunked = head.replace(b"Content-Length: %d", b"Transfer-Encoding: chunked")
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as s:
        s.sendall(chunked)
        answer, block = b"", b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
        try:
            for _ in range(60):
                s.sendall(block)
            s.sendall(b"0\r\n\r\n")
            answer = s.recv(65536)
        except ConnectionError:
            pass
    assert status(answer) in (0, 413)
    deep = b"[" * 2_000_000
    assert status(raw(server, head % len(deep) + deep)) == 400
    assert server.get("/health")[0] == 200


def test_slow_connections_do_not_keep_others_from_being_served(path, tmp_path):
    """As many connections that never finish their request as there are threads but a few: the rest is still served, and the slow are cut off."""
    server = Server(path, log=tmp_path / "log", BW24_QUEUE="8", BW24_PARALLEL="2").wait()
    slow = []
    try:
        for i in range(20):
            s = socket.create_connection(("127.0.0.1", server.port))
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 500\r\n"
            s.sendall(head + (b"\r\n{" if i % 2 else b""))
            slow.append(s)
        done = threading.Event()

        def drip():
            while not done.wait(0.3):
                for s in slow:
                    try:
                        s.sendall(b" ")
                    except OSError:
                        pass

        dripper = threading.Thread(target=drip)
        dripper.start()
        started = time.monotonic()
        for _ in range(10):
            assert server.get("/health")[0] == 200
        assert time.monotonic() - started < 5
        done.set()
        dripper.join()
    finally:
        for s in slow:
            s.close()
        assert server.stop() == 0


def test_a_request_that_does_not_arrive_is_cut_off():
    from bw24.server.worker import Arriving

    ours, theirs = socket.socketpair()
    with ours, theirs:
        arriving = Arriving(ours, 0.3)
        theirs.sendall(b"a")
        assert arriving.recv(10) == b"a"
        started = time.monotonic()
        with pytest.raises(ConnectionResetError):
            while True:
                theirs.sendall(b"b")
                arriving.recv(10)
                time.sleep(0.01)
        assert 0.1 < time.monotonic() - started < 2
        arriving.restart()
        theirs.sendall(b"c")
        assert arriving.recv(10).endswith(b"c")
        with pytest.raises(ConnectionResetError):
            arriving.recv(10)


def test_clients_that_vanish_at_every_moment(server):
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    rng = random.Random(1)
    for turn in range(90):
        body = json.dumps({"messages": HI, "max_tokens": 300, "ignore_eos": True, "stream": turn % 3 > 0}).encode()
        request = head % len(body) + body
        with socket.create_connection(("127.0.0.1", server.port)) as s:
            s.sendall(request[: rng.randrange(len(request) + 200)])
            if rng.random() < 0.5:
                time.sleep(rng.random() * 0.02)
            if rng.random() < 0.5:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")  # reset instead of a close
    assert server.idle(20)["rows"] == 0
    assert "Traceback" not in server.log.read_text(errors="replace")  # to leave is no defect


def test_paths_that_try_tricks(server):
    for path in (b"/../../etc/passwd", b"/page/../../app.py", b"/page/%2e%2e%2fapp.py", b"/page/app.js%00.html", b"/v1/models/%2e%2e%2f%2e%2e",
                 b"/%ff%fe", b"//evil/", b"/page/app.js/..;/", b"http://evil.example/v1/models", b"/v1/models?x=" + b"%00" * 50, b"*"):
        answer = raw(server, b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert status(answer) in (200, 308, 400, 403, 404), (path, answer[:100])
        assert b"root:" not in answer and b"import" not in answer
