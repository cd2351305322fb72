"""Bodies in, JSON and event streams out. Owns reading a request's JSON safely and the form of SSE; knows no endpoint."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flask import Response, current_app, g, has_request_context, request

from .errors import ApiError
from .fields import Context, Record
from .replies import ClientGone
from .service import Service

log = logging.getLogger("bw24.server")
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def current() -> Service:
    """The service of the application that handles the request."""
    return current_app.extensions["bw24"]


def context() -> Context:
    """How this server meets unknown keys: refuses them, or reports each once."""
    service = current()
    seen = current_app.extensions["bw24_seen_keys"]

    def warn(path: str) -> None:
        key = "".join(c if c.isprintable() else "?" for c in path[:100])
        if key not in seen and len(seen) < 1000:
            seen.add(key)
            log.warning("ignored the unknown field %s (--lenient); it is reported once", key)

    return Context(service.settings.lenient, warn)


def read_json() -> Any:
    """The request's body. Raises ApiError: 413, 415, or 400 with the place of the error."""
    if request.mimetype != "application/json":
        raise ApiError(415, f"Content-Type: expected application/json, found {request.mimetype[:80] or 'none'}")
    try:
        return json.loads(request.get_data(cache=False).decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"body: expected UTF-8, found byte 0x{error.object[error.start]:02x} at {error.start}") from None
    except RecursionError:
        raise ApiError(400, "body: nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"body: no valid JSON: {' '.join(str(error).split())[:200]}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def body_of(table: Record) -> dict[str, Any]:
    """The request's body, checked by a table. Raises ApiError."""
    body = table.check(read_json(), "", context())
    if current().settings.log_prompts:
        log.info("request %s: %s", g.request_id, json.dumps(body, ensure_ascii=False)[:10000])
    return body


def dumps(value: Any) -> str:
    return _encode(value)


def json_response(value: Any, status: int = 200) -> Response:
    if current().settings.log_prompts and status == 200 and request.method == "POST":
        log.info("reply %s: %s", g.request_id, dumps(value)[:10000])
    return Response(dumps(value), status, mimetype="application/json")


def event_stream(chunks: Iterable[dict[str, Any] | None], cancel: Callable[[], None]) -> Response:
    """A reply as server-sent events of OpenAI's form. What goes wrong on the way is the last event. cancel: called when the stream ends."""
    return Response(Guarded(_openai_events(chunks), cancel), mimetype="text/event-stream", headers=STREAM_HEADERS)


def _openai_events(chunks: Iterable[dict[str, Any] | None]) -> Iterator[str]:
    try:
        for chunk in chunks:
            yield ": ping\n\n" if chunk is None else f"data: {dumps(chunk)}\n\n"
    except ClientGone:
        return
    except Exception as error:
        yield f"data: {dumps(failure(error).openai())}\n\n"
    yield "data: [DONE]\n\n"


def failure(error: Exception) -> ApiError:
    """What a client is told of an exception; a defect is logged and shown without its details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ClientGone):
        return ApiError(499, "the client has left", kind="cancelled")  # nobody reads it; the access log shows it
    log.error("request %s failed", g.get("request_id", "?") if has_request_context() else "(streaming)", exc_info=error)
    return ApiError(500, "the server failed on this request; its log says how")


class Guarded:
    """Bytes of events. However the reading ends, also before it began, the request's work ends with it."""

    def __init__(self, events: Iterator[str], cancel: Callable[[], None]):
        self._events, self._cancel = events, cancel

    def __iter__(self) -> Guarded:
        return self

    def __next__(self) -> bytes:
        return next(self._events).encode()

    def close(self) -> None:
        """Called by the WSGI server when it is done with the response, whatever became of it."""
        self._events.close()
        self._cancel()
