"""What can go wrong with a request, in the shapes that clients know. Owns status codes and bodies; knows no routes."""

from __future__ import annotations

from typing import Any

from ..errors import Bw24Error

TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error", 413: "request_too_large", 415: "invalid_request_error", 429: "rate_limit_error", 500: "server_error",
    503: "unavailable_error",
}
ANTHROPIC_TYPES = {**TYPES, 500: "api_error", 503: "overloaded_error", 405: "invalid_request_error", 408: "timeout_error"}


class ApiError(Bw24Error):
    """A failed request. `param`: the field at fault, as a path; `kind`: OpenAI's `code`."""

    def __init__(self, status: int, message: str, *, param: str | None = None, kind: str | None = None, retry_after: int | None = None):
        super().__init__(message.encode("utf-8", "replace").decode())  # a lone surrogate of the request cannot be sent back
        param = param and param.encode("utf-8", "replace").decode()
        self.status, self.param, self.kind, self.retry_after = status, param, kind, retry_after

    def openai(self) -> dict[str, Any]:
        """The body as OpenAI's clients read it."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.kind}}

    def anthropic(self, request_id: str) -> dict[str, Any]:
        """The body as Anthropic's clients read it."""
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(self)}, "request_id": request_id}


def bad(param: str, message: str, kind: str | None = None) -> ApiError:
    """400 that names the field."""
    return ApiError(400, f"{param}: {message}", param=param, kind=kind)
