"""The one exception of the package. It knows nothing of where it is raised or shown."""

from __future__ import annotations


class Bw24Error(Exception):
    """A failure the user can act on: one line that names the thing and the values.

    `code` is the library's negative status where the error came from C (see bw24.h), else None.
    """

    def __init__(self, message: str, code: int | None = None):
        super().__init__(message)
        self.code = code
