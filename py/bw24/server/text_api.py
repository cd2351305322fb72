"""Endpoints that generate nothing: tokenize, detokenize, apply-template, health, props, metrics, the API's description."""

from __future__ import annotations

from flask import Blueprint, Response

from . import schemas
from .errors import bad
from .http import body_of, current, json_response
from .metrics import CONTENT_TYPE
from .openapi import description
from .prompting import Conversation, openai_messages

api = Blueprint("text", __name__)


@api.post("/tokenize")
def tokenize() -> Response:
    service = current().ready()
    body = body_of(schemas.TOKENIZE)
    tokenizer = service.model.tokenizer
    ids = tokenizer.encode(body["content"], add_special=body.get("add_special", False), parse_special=body.get("parse_special", True))
    if not body.get("with_pieces"):
        return json_response({"tokens": ids})
    pieces = []
    for i in ids:
        piece = tokenizer.piece(i)
        try:
            pieces.append({"id": i, "piece": piece.decode("utf-8")})
        except UnicodeDecodeError:
            pieces.append({"id": i, "piece": list(piece)})
    return json_response({"tokens": pieces})


@api.post("/detokenize")
def detokenize() -> Response:
    service = current().ready()
    body = body_of(schemas.DETOKENIZE)
    for at, token in enumerate(body["tokens"]):
        if token >= service.model.tokenizer.n_tokens:
            raise bad(f"tokens.{at}", f"expected an id 0..{service.model.tokenizer.n_tokens - 1}, found {token}")
    return json_response({"content": service.model.tokenizer.decode(body["tokens"], skip_special=body.get("skip_special", False))})


@api.post("/apply-template")
def apply_template() -> Response:
    service = current().ready()
    body = body_of(schemas.APPLY)
    service.check_model(body.get("model"))
    conversation = Conversation(openai_messages(body["messages"]), body.get("tools", []), body.get("reasoning_effort"),
                                body.get("chat_template_kwargs", {}), body.get("add_generation_prompt", True))
    prompt = service.prompter.prompt(conversation)
    return json_response({"prompt": prompt.text, "tokens": len(prompt.ids)})


@api.get("/health")
@api.get("/v1/health")
def health() -> Response:
    service = current().ready()
    return json_response({"status": "ok", "model": service.name, **service.scheduler.load()})


@api.get("/props")
def props() -> Response:
    return json_response(current().ready().props())


@api.get("/metrics")
def metrics() -> Response:
    return Response(current().metrics.page(), content_type=CONTENT_TYPE)


@api.get("/openapi.json")
def openapi() -> Response:
    return json_response(description())
