"""HTTP: whole files to disk, resumed and verified; the first bytes of a file as a byte source.

Owns retries, ranges, checksums, the partial file and its lock. Refuses to know where addresses come from or what the bytes are.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from .errors import Bw24Error
from .gguf_types import quote

if TYPE_CHECKING:
    import httpx

CHUNK = 1 << 20
ATTEMPTS = 5  # in a row without a new byte
FIRST_RANGE = 1 << 20  # the first request for a header; each later one doubles what is known
MAX_HEADER = 256 << 20  # of a GGUF; vocabularies of 2^18 tokens make about 8 MB
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)$")
_HINTS = {401: "not authorised: a token is needed (set HF_TOKEN or run `hf auth login`)",
          403: "forbidden: the token has no access, or the terms of a gated repository are not accepted yet", 404: "not found"}


class Refused(Bw24Error):
    """The server answered, and the answer is final (a 4xx status). `status` is the HTTP status."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class Unreachable(Bw24Error):
    """No usable answer: no connection, a broken one, or a server in trouble (5xx), after all attempts."""


def client(timeout: float = 30.0, connect: float = 8.0) -> httpx.Client:
    """An HTTP client that follows redirects and drops credentials on the way to another host."""
    import httpx

    return httpx.Client(follow_redirects=True, timeout=httpx.Timeout(timeout, connect=connect))


def raise_for_status(response: httpx.Response, label: str) -> None:
    """Refused for final statuses, Unreachable for those worth another attempt."""
    status = response.status_code
    if status < 400:
        return
    if status in (408, 429) or status >= 500:
        raise Unreachable(f"{label}: {response.url.host} answered with status {status}")
    raise Refused(f"{label}: {_HINTS.get(status, f'{response.url.host} answered with status {status}')}", status)


def content_range(response: httpx.Response, start: int, label: str) -> tuple[int, int]:
    """(last byte, total size) of a 206 answer, checked to begin at `start`."""
    text = response.headers.get("content-range", "")
    match = _CONTENT_RANGE.match(text)
    if not match or int(match[1]) != start or not start <= int(match[2]) < int(match[3]):
        raise Bw24Error(f"{label}: expected a range from byte {start}, found {quote(text)}")
    return int(match[2]), int(match[3])


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether the open file is the one that `path` names now; one system call looks, so that nothing can vanish between two looks."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


@contextmanager
def _locked_part(part: Path) -> Iterator[BinaryIO]:
    """The partial file, open at its end and locked against other processes; waits for one that is downloading the same file."""
    while True:
        file = open(part, "ab+")  # noqa: SIM115 (closed below)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            # while this process waited, the holder may have renamed or removed the file that was opened here
            if _is_at(file, part):
                yield file
                return
        finally:
            file.close()


class _Transfer:
    """One file on its way: partial file, running checksum, progress bar."""

    def __init__(self, url: str, file: BinaryIO, size: int | None, headers: dict[str, str], label: str, bar: Any):
        self.url, self.file, self.size, self.headers, self.label, self.bar = url, file, size, headers, label, bar
        self.digest, self.have, self.resumed = hashlib.sha256(), 0, False
        file.seek(0)
        while chunk := file.read(CHUNK):
            self.digest.update(chunk)
            self.have += len(chunk)
        self.resumed = self.have > 0

    def restart(self) -> None:
        self.file.truncate(0)
        self.bar.update(-self.bar.n)
        self.digest, self.have, self.resumed = hashlib.sha256(), 0, False

    def attempt(self, http: httpx.Client) -> None:
        """One request for what is missing; returns when the server's answer ended."""
        headers = {**self.headers, "accept-encoding": "identity"}
        if self.have:
            headers["range"] = f"bytes={self.have}-"
        with http.stream("GET", self.url, headers=headers) as response:
            if response.status_code == 416 and self.have:  # nothing lies behind what is here: complete, or not the same file
                if self.have != self.size:
                    self.restart()
                return
            raise_for_status(response, self.label)
            self._accept(response)
            for chunk in response.iter_raw():  # as they arrive: a fixed size would lose the last ones of a broken connection
                if self.size is not None and self.have + len(chunk) > self.size:
                    raise Bw24Error(f"{self.label}: expected {self.size} bytes, the server sends more")
                self.file.write(chunk)
                self.digest.update(chunk)
                self.have += len(chunk)
                self.bar.update(len(chunk))

    def _accept(self, response: httpx.Response) -> None:
        """Settle where the answer's bytes belong and how many there are in all."""
        if response.status_code == 206:
            total = content_range(response, self.have, self.label)[1]
        else:
            if self.have:  # the server ignores ranges: from the start again
                self.restart()
            total = int(length) if (length := response.headers.get("content-length", "")).isdigit() else self.size
        if self.size is None:
            self.size = total
            self.bar.total = total
        if total != self.size:
            raise Bw24Error(f"{self.label}: expected {self.size} bytes, the server has {total}")


def _run(transfer: _Transfer, connect_attempts: int, pause: float) -> None:
    """Attempts until everything is here; only attempts that bring nothing count towards the limit."""
    import httpx

    failures = 0
    with client() as http:
        while transfer.size is None or transfer.have < transfer.size:
            before, reason, limit = transfer.have, "the connection ended early", ATTEMPTS
            try:
                transfer.attempt(http)
                if transfer.size is None:  # no length was given: the end of the answer is the end of the file
                    return
            except httpx.InvalidURL as error:
                raise Bw24Error(f"{transfer.label}: {error}") from None
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                reason, limit = str(error) or type(error).__name__, connect_attempts
            except (httpx.HTTPError, Unreachable) as error:
                reason = str(error) or type(error).__name__
            failures = 0 if transfer.have > before else failures + 1
            if transfer.have < (transfer.size or transfer.have + 1) and failures >= limit:
                raise Unreachable(f"{transfer.label}: {reason} ({transfer.have} of {transfer.size or '?'} bytes are kept for the next try)")
            time.sleep(min(pause * 2**failures, 10.0) if failures else 0.0)


def _check_room(folder: Path, need: int, label: str) -> None:
    free = shutil.disk_usage(folder).free
    if need > free:
        raise Bw24Error(f"{label}: needs {need} bytes in {quote(str(folder), 4096)}, {free} are free")


def fetch(url: str, dest: Path, *, size: int | None = None, sha256: str | None = None, headers: dict[str, str] | None = None,
          label: str = "", progress: bool = True, connect_attempts: int = 3, pause: float = 0.25) -> None:
    """Download `url` to `dest`: resumes a partial download, verifies size and SHA-256, then renames into place.

    An interruption leaves `dest`.part for the next call. Several processes may ask for the same file: one downloads, the others wait.
    Errors: Refused (final answer of the server), Unreachable (after all attempts), Bw24Error (wrong size or checksum, disk).
    """
    label = label or dest.name
    part = dest.with_name(dest.name + ".part")
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        with _locked_part(part) as file:
            if dest.exists():  # another process was faster; the name of the part may be gone with it
                part.unlink(missing_ok=True)
                return
            try:
                _fetch_locked(url, dest, part, file, size, sha256, headers or {}, label, progress, connect_attempts, pause)
            finally:
                if part.exists() and os.fstat(file.fileno()).st_size == 0:
                    part.unlink(missing_ok=True)
    except OSError as error:
        raise Bw24Error(f"{label}: cannot write {quote(str(error.filename or part), 4096)}: {error.strerror}") from None


def _fetch_locked(url: str, dest: Path, part: Path, file: BinaryIO, size: int | None, sha256: str | None, headers: dict[str, str],
                  label: str, progress: bool, connect_attempts: int, pause: float) -> None:
    from tqdm import tqdm

    # disable=None: no bar where stderr is not a terminal
    with tqdm(total=size, unit="B", unit_scale=True, unit_divisor=1024, desc=label, disable=None if progress else True) as bar:
        transfer = _Transfer(url, file, size, headers, label, bar)
        if size is not None and transfer.have > size:
            transfer.restart()
        bar.update(transfer.have)
        _check_room(dest.parent, (size or 0) - transfer.have, label)
        _run(transfer, connect_attempts, pause)
        if sha256 and transfer.digest.hexdigest() != sha256 and transfer.resumed:  # the old part may be of another version: again, whole
            transfer.restart()
            _run(transfer, connect_attempts, pause)
    if sha256 and transfer.digest.hexdigest() != sha256:
        part.unlink()
        raise Bw24Error(f"{label}: expected sha256 {sha256}, found {transfer.digest.hexdigest()}; the download was discarded")
    file.flush()
    os.fsync(file.fileno())
    os.replace(part, dest)


class RangeSource:
    """The beginning of a remote file as a byte source: range requests that double what is known, up to MAX_HEADER. Close it after use."""

    def __init__(self, url: str, headers: dict[str, str] | None = None, label: str = ""):
        self.url, self.label = url, label or url
        self.headers = {**(headers or {}), "accept-encoding": "identity"}
        self.requests = 0
        self._http = client()
        self._known = b""
        self._etag: str | None = None
        self.size = 0
        try:
            self._grow(FIRST_RANGE)
        except BaseException:
            self.close()
            raise

    def read(self, offset: int, length: int) -> bytes:
        end = min(offset + length, self.size)
        if end > MAX_HEADER:
            raise Bw24Error(f"{self.label}: the header reaches beyond {MAX_HEADER} bytes")
        if end > len(self._known):
            self._grow(min(max(end, 2 * len(self._known)), self.size, MAX_HEADER))
        return self._known[offset:end]

    def _grow(self, end: int) -> None:
        import httpx

        for attempt in range(3):
            start = len(self._known)
            try:
                self._known += self._range(start, end)
            except httpx.InvalidURL as error:
                raise Bw24Error(f"{self.label}: {error}") from None
            except (httpx.HTTPError, Unreachable) as error:
                if attempt == 2:
                    raise Unreachable(f"{self.label}: {str(error) or type(error).__name__}") from None
                time.sleep(0.25 * (attempt + 1))
            if len(self._known) >= min(end, self.size) > 0:
                return
        raise Unreachable(f"{self.label}: expected {min(end, self.size)} bytes, {len(self._known)} arrived")

    def _range(self, start: int, end: int) -> bytes:
        """Bytes [start, end) or fewer; no more than that is ever read from the connection (plus one chunk)."""
        self.requests += 1
        with self._http.stream("GET", self.url, headers={**self.headers, "range": f"bytes={start}-{end - 1}"}) as response:
            raise_for_status(response, self.label)
            if response.status_code != 206:
                raise Bw24Error(f"{self.label}: {response.url.host} ignores range requests, so the header cannot be read alone")
            last, total = content_range(response, start, self.label)
            etag = response.headers.get("etag")
            if start and (total, etag) != (self.size, self._etag):
                raise Bw24Error(f"{self.label}: the file changed while it was read ({self.size} bytes, then {total})")
            self.size, self._etag = total, etag
            want, got = min(last + 1, end) - start, bytearray()
            for chunk in response.iter_raw():
                got += chunk
                if len(got) >= want:
                    break
            return bytes(got[:want])

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> RangeSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
