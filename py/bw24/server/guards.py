"""Who may ask: API keys, hosts, web origins, sizes. Owns every refusal before a request is read; knows no endpoint's meaning."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from urllib.parse import urlsplit

from flask import Response, g, request

from .errors import ApiError
from .settings import Settings, is_loopback

OPEN = ("/health", "/v1/health", "/", "/page/app.js", "/page/style.css", "/favicon.ico")  # served without a key
METHODS = "GET, POST, OPTIONS"


def request_id() -> str:
    """The caller's id where it is a sensible one, else a fresh one."""
    given = request.headers.get("X-Request-Id", "")
    if 0 < len(given) <= 64 and all(c.isascii() and (c.isalnum() or c in "-_.") for c in given):
        return given
    return f"req_{secrets.token_hex(8)}"


def host_of(value: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return urlsplit(f"//{value}").hostname or ""
    except ValueError:
        return ""


def check(settings: Settings) -> None:
    """Refuse what may not be asked. Raises ApiError 401, 403, 413."""
    host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
    # without a key, a foreign name that resolves to this machine (DNS rebinding) must not reach it
    if not settings.keys and is_loopback(settings.host) and host and not is_loopback(host_of(host)):
        raise ApiError(403, "Host: this server answers to localhost only; other names need --api-key-file")
    if origin and not allowed(settings, origin, host):
        raise ApiError(403, "Origin: pages of this origin may not call the server; --cors ORIGIN allows one")
    length = request.content_length
    if length is not None and length > settings.max_body:
        raise ApiError(413, f"body: {length} bytes, the limit is {settings.max_body}")
    if settings.keys and request.method != "OPTIONS" and request.path not in OPEN:
        check_key(settings)


def check_key(settings: Settings) -> None:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" and token.strip() else request.headers.get("X-Api-Key", "")
    digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
    # every key is compared, so that the time taken says nothing about them
    if not sum(hmac.compare_digest(digest, key) for key in settings.keys):
        text = "this API key is not valid" if given else "an API key is missing: send Authorization: Bearer KEY"
        raise ApiError(401, text, kind="invalid_api_key")
    g.owner = digest.hex()


def allowed(settings: Settings, origin: str, host: str) -> bool:
    """Whether a page of `origin` may call: the server's own page, or one that --cors names."""
    if "*" in settings.cors or origin in settings.cors:
        return True
    try:
        return urlsplit(origin).netloc == host and origin != "null"
    except ValueError:
        return False


def finish(response: Response, settings: Settings) -> Response:
    """Headers that every response carries."""
    response.headers["X-Request-Id"] = response.headers["request-id"] = getattr(g, "request_id", "")
    response.headers["X-Content-Type-Options"] = "nosniff"
    origin = request.headers.get("Origin")
    if origin and allowed(settings, origin, request.headers.get("Host", "")):
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = "X-Request-Id"
        response.headers.add("Vary", "Origin")
        if request.method == "OPTIONS":
            response.headers["Access-Control-Allow-Methods"] = METHODS
            response.headers["Access-Control-Allow-Headers"] = request.headers.get("Access-Control-Request-Headers", "Authorization, Content-Type")
            response.headers["Access-Control-Max-Age"] = "600"
    return response
