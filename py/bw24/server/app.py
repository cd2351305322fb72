"""The Flask application: endpoints, guards, errors, logs, the web page. `create_app()` is what gunicorn and `bw24 serve` run."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

from flask import Flask, Response, g, request
from werkzeug.exceptions import HTTPException

from . import anthropic_api, guards, openai_api, text_api
from .errors import ApiError
from .http import dumps, failure
from .service import Service, fail_with_exit
from .settings import Settings, from_environment

log = logging.getLogger("bw24.access")
PAGE = Path(__file__).parent / "page"
FILES = {"/": ("index.html", "text/html; charset=utf-8"), "/page/app.js": ("app.js", "text/javascript; charset=utf-8"),
         "/page/style.css": ("style.css", "text/css; charset=utf-8")}
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"


def create_app(settings: Settings | None = None, service: Service | None = None) -> Flask:
    """The application of one served model, which begins to load at once; call it after the fork. Settings: BW24_ variables where not given."""
    if settings is None:
        settings = service.settings if service else from_environment()
    app = Flask("bw24", static_folder=None)
    app.json.sort_keys = False
    app.config["MAX_CONTENT_LENGTH"] = settings.max_body
    app.extensions["bw24"] = service or Service(settings, fail_with_exit)
    app.extensions["bw24_seen_keys"] = set()
    for blueprint in (openai_api.api, anthropic_api.api, text_api.api):
        app.register_blueprint(blueprint)
    for path in FILES:
        app.add_url_rule(path, f"page{path}", _file)
    app.add_url_rule("/favicon.ico", "favicon", lambda: Response(status=204))
    app.before_request(lambda: _before(settings))
    app.after_request(lambda response: _after(app, settings, response))
    app.register_error_handler(Exception, _failed)
    return app


def _before(settings: Settings) -> Response | None:
    g.request_id, g.started = guards.request_id(), time.monotonic()
    guards.check(settings)
    if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
        return Response(status=204)
    return None


def _after(app: Flask, settings: Settings, response: Response) -> Response:
    guards.finish(response, settings)
    endpoint = request.url_rule.rule if request.url_rule else "other"
    app.extensions["bw24"].metrics.http.labels(endpoint, str(response.status_code)).inc()
    quiet = request.path in ("/health", "/v1/health", "/metrics") and response.status_code == 200
    log.log(logging.DEBUG if quiet else logging.INFO, "%s", json.dumps({
        "request": g.get("request_id", ""), "client": request.remote_addr, "method": request.method, "endpoint": endpoint,
        "status": response.status_code, "ms": round((time.monotonic() - g.get("started", time.monotonic())) * 1e3, 1),
        "stream": response.is_streamed}))
    return response


def _failed(error: Exception) -> Response:
    """Every failure, in the shape that the endpoint's clients read."""
    if isinstance(error, HTTPException):
        if error.code is not None and error.code < 400:
            return error.get_response()
        found: ApiError = _http_error(error)
    else:
        found = failure(error)
    if request.path.startswith("/v1/messages"):
        body = found.anthropic(g.get("request_id", ""))
    else:
        body = found.openai()
    headers = {"Retry-After": str(found.retry_after)} if found.retry_after else {}
    if found.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if found.status == 405 and isinstance(error, HTTPException):
        headers["Allow"] = ", ".join(sorted(getattr(error, "valid_methods", None) or []))
    return Response(dumps(body), found.status, mimetype="application/json", headers=headers)


def _http_error(error: HTTPException) -> ApiError:
    if error.code == 404:
        return openai_api.unknown_endpoint(request.path)
    if error.code == 405:
        return ApiError(405, f"{request.method} is not a method of this endpoint")
    if error.code == 413:
        return ApiError(413, "body: larger than the server takes")
    return ApiError(error.code or 500, error.description or error.name)


def _file() -> Response:
    """A file of the web page. It may load and call nothing but this server."""
    name, kind = FILES[request.path]
    return Response((PAGE / name).read_bytes(), content_type=kind,
                    headers={"Content-Security-Policy": POLICY, "Cache-Control": "no-cache", "Referrer-Policy": "no-referrer"})
