"""A local HTTP server that speaks the parts of the hub's API and of a package index that the downloads use, and misbehaves on request."""

from __future__ import annotations

import hashlib
import json
import threading
import urllib.parse
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """`repos[repo][path] = bytes` are served with redirects to a second port (the CDN); `wheels[package][file name] = bytes` as an index.

    `faults[path]` is a list of behaviours, one taken by each request for the file's bytes: ("cut", n) closes the connection after n bytes,
    ("status", code), "ignore-range", "no-length", "corrupt" (another byte at the end), "more" (more bytes than announced in a 206),
    "shifted" (a range from elsewhere), None (as it should be). `gated` and `private` hold repositories that need the token "good".
    `log` lists (server, method, path, range, authorization).
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.wheels: dict[str, dict[str, bytes]] = {}
        self.faults: dict[str, list] = defaultdict(list)
        self.listed_sha: dict[str, str] = {}  # a wrong checksum for a path
        self.listed_size: dict[str, int] = {}
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self.html_index = False
        self.broken_api: bytes | int | None = None  # a body that is not what it should be, or a status
        self.log: list[tuple[str, str, str, str | None, str | None]] = []
        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), self._handler(name)) for name in ("hub", "cdn")]
        self.endpoint, self.cdn = (f"http://127.0.0.1:{server.server_port}" for server in self.servers)
        self.index = f"{self.endpoint}/simple"
        for server in self.servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def requests(self, server: str, method: str = "GET") -> list[tuple[str, str | None]]:
        """(path, range) of the requests a server got."""
        return [(path, span) for where, how, path, span, _ in self.log if (where, how) == (server, method)]

    def find(self, digest: str) -> tuple[str, bytes]:
        for files in (*self.repos.values(), *self.wheels.values()):
            for path, data in files.items():
                if hashlib.sha256(data).hexdigest() == digest:
                    return path, data
        raise KeyError(digest)

    def _handler(self, name: str) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(_Handler):
            hub = fake
            server_name = name

        return Handler


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub
    server_name: str

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, urllib.parse.unquote(self.path.split("?")[0])
        hub.log.append((self.server_name, self.command, path, self.headers.get("Range"), self.headers.get("Authorization")))
        if self.server_name == "cdn" and path.startswith("/blob/"):
            self.blob(path.split("/")[2])
        elif path.startswith("/api/models/"):
            self.api(path.removeprefix("/api/models/"))
        elif path.startswith("/simple/"):
            self.simple(path.split("/")[2])
        elif "/resolve/" in path:
            self.resolve(*path[1:].split("/resolve/", 1))
        else:
            self.answer(404, b"")

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refused(self, repo: str) -> bool:
        """Answers 401 or 403 as the hub does for repositories that this request may not see."""
        hub, authorised = self.hub, self.headers.get("Authorization") == "Bearer good"
        if repo not in hub.repos or (repo in hub.private and not authorised):
            self.answer(404 if authorised else 401, b"", X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        elif repo in hub.gated and not authorised:
            status = 403 if self.headers.get("Authorization") else 401
            self.answer(status, b"", X_Error_Code="GatedRepo", X_Error_Message="Access to this model is restricted")
        else:
            return False
        return True

    def api(self, rest: str) -> None:
        repo, hub = rest.split("/revision/")[0], self.hub
        if isinstance(hub.broken_api, int):
            return self.answer(hub.broken_api, b"")
        if hub.broken_api is not None:
            return self.answer(200, hub.broken_api, Content_Type="application/json")
        if self.refused(repo):
            return None
        siblings = []
        for path, data in hub.repos[repo].items():
            size = hub.listed_size.get(path, len(data))
            lfs = {"sha256": hub.listed_sha.get(path, hashlib.sha256(data).hexdigest()), "size": size, "pointerSize": 130}
            siblings.append({"rfilename": path, "size": size, "blobId": "0" * 40, **({"lfs": lfs} if path.endswith(".gguf") else {})})
        body = json.dumps({"_id": "0" * 24, "id": repo, "modelId": repo, "sha": COMMIT, "private": False, "tags": [],
                           "downloads": 0, "likes": 0, "siblings": siblings}).encode()
        return self.answer(200, body, Content_Type="application/json")

    def resolve(self, repo: str, rest: str) -> None:
        path = rest.split("/", 1)[1]
        if self.refused(repo):
            return
        if path not in self.hub.repos[repo]:
            self.answer(404, b"", X_Error_Code="EntryNotFound")
            return
        data = self.hub.repos[repo][path]
        digest = hashlib.sha256(data).hexdigest()
        self.answer(302, b"", Location=f"{self.hub.cdn}/blob/{digest}", X_Repo_Commit=COMMIT, X_Linked_Size=str(len(data)),
                    X_Linked_Etag=f'"{digest}"')

    def simple(self, package: str) -> None:
        files = self.hub.wheels.get(package)
        if files is None:
            return self.answer(404, b"")
        links = {name: (f"{self.hub.cdn}/blob/{hashlib.sha256(data).hexdigest()}/{name}", self.hub.listed_sha.get(name)
                        or hashlib.sha256(data).hexdigest()) for name, data in files.items()}
        if self.hub.html_index:
            body = "".join(f'<a href="{url}#sha256={digest}">{name}</a><br>' for name, (url, digest) in links.items())
            return self.answer(200, f"<html><body>{body}</body></html>".encode(), Content_Type="text/html")
        body = {"name": package, "meta": {"api-version": "1.0"},
                "files": [{"filename": name, "url": url, "hashes": {"sha256": digest}} for name, (url, digest) in links.items()]}
        return self.answer(200, json.dumps(body).encode(), Content_Type="application/vnd.pypi.simple.v1+json")

    def blob(self, digest: str) -> None:
        path, data = self.hub.find(digest)
        faults = self.hub.faults[path]
        fault = faults.pop(0) if faults else None
        if isinstance(fault, tuple) and fault[0] == "status":
            return self.answer(fault[1], b"")
        if fault == "corrupt":
            data = data[:-1] + bytes([data[-1] ^ 1])
        return self.send_range(data, fault, digest)

    def send_range(self, data: bytes, fault: object, digest: str) -> None:
        span, total = self.headers.get("Range"), len(data)
        if span is None or fault == "ignore-range":
            start, end, status = 0, total, 200
        else:
            first, last = span.removeprefix("bytes=").split("-")
            start, end, status = int(first), min(int(last) + 1, total) if last else total, 206
            if start >= total:
                return self.answer(416, b"", Content_Range=f"bytes */{total}")
        body = data[start:end]
        self.send_response(status)
        if status == 206:
            shift = 1 if fault == "shifted" else 0
            self.send_header("Content-Range", f"bytes {start + shift}-{end - 1}/{total}")
        self.send_header("ETag", f'"{digest}"')
        if fault == "more":
            body = data[start:] + bytes(1 << 20)
        if fault == "no-length":
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if isinstance(fault, tuple) and fault[0] == "cut":
            body = body[: fault[1]]
            self.close_connection = True
        try:
            self.wfile.write(body)
        except OSError:  # a client that has read enough hangs up
            self.close_connection = True
        return None
