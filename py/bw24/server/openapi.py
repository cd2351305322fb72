"""The API's description in OpenAPI 3.1, made from the tables of schemas.py. Knows no request."""

from __future__ import annotations

from typing import Any

from . import schemas
from .fields import Record

GENERATES = {"200": "the reply; server-sent events with stream: true", "400": "a field is refused, by name", "404": "no such model",
             "429": "the queue is full", "503": "loading or shutting down"}
POSTS: dict[str, tuple[Record, str, dict[str, str]]] = {
    "/v1/chat/completions": (schemas.CHAT, "Reply to a conversation", GENERATES),
    "/v1/completions": (schemas.COMPLETION, "Continue a text or token ids", GENERATES),
    "/v1/messages": (schemas.MESSAGES, "Reply to a conversation, in Anthropic's form", GENERATES),
    "/v1/messages/count_tokens": (schemas.COUNT, "Tokens of a conversation", {k: v for k, v in GENERATES.items() if k != "429"}),
    "/tokenize": (schemas.TOKENIZE, "Token ids of a text", {"200": "tokens", "400": "a field is refused, by name", "503": "loading"}),
    "/detokenize": (schemas.DETOKENIZE, "Text of token ids", {"200": "content", "400": "a field is refused, by name", "503": "loading"}),
    "/apply-template": (schemas.APPLY, "The prompt that a conversation gives",
                        {"200": "prompt", "400": "a field is refused, by name", "404": "no such model", "503": "loading"}),
}
GETS = {
    "/v1/models": "The models and aliases", "/health": "200 once requests are served, 503 before and after", "/props": "Model, context, settings",
    "/metrics": "Figures for Prometheus", "/openapi.json": "This description",
}
ERROR = {"type": "object", "required": ["error"], "properties": {"error": {
    "type": "object", "required": ["message", "type"], "properties": {
        "message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]}}}}}
REFUSALS = {"401": "no valid API key", "403": "a foreign web origin or host", "413": "the body is too large",
            "415": "the body is not application/json"}


def _responses(texts: dict[str, str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for status, text in texts.items():
        out[status] = {"description": text}
        if status != "200":
            out[status]["content"] = {"application/json": {"schema": {"type": "object"}}}
        else:
            out[status]["content"] = {"application/json": {}, "text/event-stream": {}, "text/plain": {}}
    return out


def description() -> dict[str, Any]:
    """The document."""
    paths: dict[str, Any] = {}
    for path, (table, text, responses) in POSTS.items():
        content = {"application/json": {"schema": table.schema()}}
        paths[path] = {"post": {"summary": text, "requestBody": {"required": True, "content": content},
                                "responses": _responses({**responses, **REFUSALS})}}
    for path, text in GETS.items():
        paths[path] = {"get": {"summary": text, "responses": _responses({"200": text, "401": REFUSALS["401"], "403": REFUSALS["403"],
                                                                        "503": "loading or shutting down"})}}
    return {
        "openapi": "3.1.0", "info": {"title": "bw24", "version": "1"}, "paths": paths, "components": {
            "schemas": {"Error": ERROR}, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }
