"""The HTTP server. `create_app` is imported when it is called for: the settings can be read without Flask."""

from __future__ import annotations

from typing import Any


def create_app(*args: Any, **kwargs: Any) -> Any:
    """See app.create_app."""
    from .app import create_app as make

    return make(*args, **kwargs)
