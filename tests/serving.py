"""Servers for tests: the application in this process, or gunicorn as its user starts it. Owns ports and processes; asserts nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from bw24.server import create_app
from bw24.server.settings import Settings

GUNICORN = ("-c", "python:bw24.server.gunicorn_conf", "bw24.server:create_app()")
MODEL_NAME = "tiny.gguf"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def application(path: Path, **settings):
    """(Flask application, its service), the model loaded."""
    settings.setdefault("engine", {"threads": 1})
    app = create_app(Settings(model=str(path), **settings))
    service = app.extensions["bw24"]
    assert service.wait(30), service.error
    return app, service


class Server:
    """gunicorn with our configuration. `more`: further words of its command line; `variables`: of its environment."""

    def __init__(self, path: Path, *more: str, log: Path, **variables: str):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        known = {k: v for k, v in os.environ.items() if not k.startswith("BW24_") or k in ("BW24_LIBRARY", "BW24_CACHE")}
        environ = {**known, "BW24_MODEL": str(path), "BW24_PORT": str(self.port), "BW24_THREADS": "1", **variables}
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen([sys.executable, "-m", "gunicorn", *GUNICORN, *more], env=environ, stdout=out, stderr=out)

    def wait(self, seconds: float = 30) -> Server:
        """Until /health is 200."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            if self.get("/health")[0] == 200:
                return self
            time.sleep(0.05)
        raise AssertionError(f"no server: {self.log.read_text(errors='replace')}")

    def get(self, path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""

    def health(self) -> dict:
        return json.loads(self.get("/health")[1])

    def figure(self, name: str) -> float:
        """A figure of /metrics without labels."""
        for line in self.get("/metrics")[1].decode().splitlines():
            if line.startswith(name + " "):
                return float(line.split()[1])
        raise KeyError(name)

    def workers(self) -> list[int]:
        """Process ids of gunicorn's workers."""
        out = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True).stdout
        return [int(word) for word in out.split()]

    def idle(self, seconds: float = 20) -> dict:
        """/health once nothing runs or waits."""
        end = time.monotonic() + seconds
        while (state := self.health())["running"] or state["waiting"]:
            assert time.monotonic() < end, state
            time.sleep(0.05)
        return state

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
