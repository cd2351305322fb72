"""gunicorn's configuration: `gunicorn -c python:bw24.server.gunicorn_conf 'bw24.server:create_app()'`. Owns what must hold for one process that owns
the device; everything else comes from BW24_ variables."""

from __future__ import annotations

import logging
import sys
from typing import Any

from bw24 import flags
from bw24.errors import Bw24Error
from bw24.server.settings import Settings, check_address, from_environment


def configure(settings: Settings) -> dict[str, Any]:
    """gunicorn's settings for a server's."""
    host = f"[{settings.host}]" if ":" in settings.host and not settings.host.startswith("[") else settings.host
    return {
        "bind": f"{host}:{settings.port}", "workers": 1, "worker_class": "bw24.server.worker.Worker", "threads": settings.threads,
        "worker_connections": settings.threads + 256, "timeout": 0, "graceful_timeout": int(settings.drain) + 10, "keepalive": 30,
        "limit_request_line": 4094, "limit_request_fields": 64, "limit_request_field_size": 8190, "control_socket_disable": True,
        "on_starting": on_starting, "post_fork": post_fork, "nworkers_changed": nworkers_changed, "worker_exit": worker_exit,
    }


def _refuse(text: str) -> None:
    print(f"bw24: {text}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def on_starting(server: Any) -> None:
    """Refuse what cannot work, before anything is bound or loaded."""
    cfg = server.cfg
    if cfg.workers != 1:
        _refuse(f"{cfg.workers} workers: one process owns the device and batches all requests; use one worker (--workers 1)")
    if cfg.preload_app:
        _refuse("--preload: the model must load after the fork, for the device does not survive one; leave it out")
    if cfg.worker_class_str != "bw24.server.worker.Worker":
        _refuse(f"worker class {cfg.worker_class_str}: streams need bw24.server.worker.Worker, which this configuration sets; leave -k out")
    for address in cfg.address:
        if isinstance(address, tuple):  # a path is a Unix socket, whose permissions guard it
            try:
                check_address(address[0], settings.keys)
            except Bw24Error as error:
                _refuse(str(error))


def post_fork(server: Any, worker: Any) -> None:
    """Lines of the log go to standard error, as gunicorn's own do."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)


def nworkers_changed(server: Any, new: int, old: int | None) -> None:
    """A signal that asks for more workers is not followed."""
    if new != 1 and old is not None:
        server.log.warning("one process owns the device: staying with one worker")
        server.num_workers = 1


def worker_exit(server: Any, worker: Any) -> None:
    """Give the device back."""
    service = getattr(getattr(worker, "wsgi", None), "extensions", {}).get("bw24")
    if service is not None:
        service.close()


try:
    for _line in flags.unknown_variables():
        print(f"bw24: {_line}", file=sys.stderr)
    settings = from_environment()
except Bw24Error as _error:
    _refuse(str(_error))
globals().update(configure(settings))
