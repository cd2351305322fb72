"""gunicorn's threaded worker with what a long-lived stream needs: a deadline for requests to arrive, and a drain of its own on SIGTERM. Knows the
service by its `drain` and `close` alone."""

from __future__ import annotations

import errno
import logging
import threading
import time
from typing import Any

from gunicorn.workers.gthread import ThreadWorker

log = logging.getLogger("bw24.server")


class Arriving:
    """A connection's reading side with a deadline for each whole request: a client that sends a byte now and then holds no thread for long."""

    def __init__(self, connection: Any, seconds: float):
        self._connection, self._seconds, self._end = connection, seconds, None

    def restart(self) -> None:
        """The next byte begins a request."""
        self._end = None

    def recv(self, size: int) -> bytes:
        """Bytes of the request. Raises ConnectionResetError once its time is over."""
        now = time.monotonic()
        self._end = self._end or now + self._seconds
        if now >= self._end:
            raise ConnectionResetError(errno.ECONNRESET, "the request did not arrive in time")
        self._connection.settimeout(self._end - now)
        try:
            return self._connection.recv(size)
        except TimeoutError:
            raise ConnectionResetError(errno.ECONNRESET, "the request did not arrive in time") from None
        finally:
            self._connection.settimeout(None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class Worker(ThreadWorker):
    """One process, many threads; the engine has one of its own."""

    def _service(self) -> Any:
        return getattr(self.wsgi, "extensions", {}).get("bw24")

    def enqueue_req(self, conn: Any) -> None:
        """Each request of a connection passes here; the first time, its reading side gets the deadline."""
        arriving = getattr(conn, "arriving", None)
        if arriving:
            arriving.restart()
        elif arriving is None:
            conn.arriving, begin = False, conn.init

            def init() -> None:
                begin()
                unreader = getattr(conn.parser, "unreader", None)
                if unreader is not None and not conn.arriving and hasattr(unreader, "sock"):
                    conn.arriving = unreader.sock = Arriving(unreader.sock, self._seconds())

            conn.init = init
        super().enqueue_req(conn)

    def _seconds(self) -> float:
        service = self._service()
        return service.settings.body_seconds if service else 60.0

    def handle_exit(self, sig: int, frame: Any) -> None:
        """SIGTERM: take nothing new, let the replies end, then end the rest cleanly. The handler itself must take no lock."""
        if self.alive:
            threading.Thread(target=self._drain, name="drain", daemon=True).start()
        super().handle_exit(sig, frame)

    def _drain(self) -> None:
        service = self._service()
        if service is None:
            return
        seconds = service.settings.drain
        log.info("shutting down: running replies have %g seconds", seconds)
        if not service.drain(seconds):
            log.warning("some replies did not end in %g seconds; they end now with an error", seconds)
        service.close()
