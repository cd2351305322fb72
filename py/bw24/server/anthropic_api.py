"""Anthropic's endpoints: messages and count_tokens. Owns their wire form, streamed and whole; what a request means is in replies.py."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from flask import Blueprint, Response, g, request

from ..grammar import Wish
from ..toolcalls import CALL, CONTENT, REASONING, Part
from . import schemas
from .errors import bad
from .http import STREAM_HEADERS, ClientGone, Guarded, body_of, current, dumps, failure, json_response
from .prompting import Conversation, anthropic_messages
from .replies import TICK, Exchange, Plan, left, sampling_params
from .service import Service

api = Blueprint("anthropic", __name__)
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def tools_of(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str, bool]:
    """(tools as OpenAI writes them, "none", "auto" or "required", whether several calls are allowed). Raises ApiError."""
    tools = [{"type": "function", "function": {"name": t["name"], "description": t.get("description", ""), "parameters": t["input_schema"],
                                               **({"strict": True} if t.get("strict") else {})}} for t in body.get("tools", [])]
    choice = body.get("tool_choice", {"type": "auto"})
    kind, many = {"any": "required", "tool": "required"}.get(choice["type"], choice["type"]), not choice.get("disable_parallel_tool_use", False)
    if choice["type"] == "tool":
        tools = [t for t in tools if t["function"]["name"] == choice["name"]]
        if not tools:
            raise bad("tool_choice.name", f"no tool is called '{choice['name']}'")
    if kind == "required" and not tools:
        raise bad("tool_choice", f"'{choice['type']}' needs tools")
    return tools, kind if tools else "none", many


def conversation_of(service: Service, body: Mapping[str, Any], tools: list[dict[str, Any]]) -> Conversation:
    """The conversation; `thinking` turns the block on or off where the template can, and cannot ask for more than the model does."""
    kwargs: dict[str, Any] = {}
    effort = body.get("output_config", {}).get("effort")
    thinking = body.get("thinking", {}).get("type")
    if effort is not None:
        kwargs |= service.prompter.effort(effort, "output_config.effort")
    if thinking == "disabled":
        kwargs |= service.prompter.effort("none")
    elif thinking == "enabled" and effort is None and service.prompter.known.think:
        kwargs |= {k: v for k, v in service.prompter.effort("high").items() if k != "reasoning_effort" or "no_think" in str(v)}
    return Conversation(anthropic_messages(body.get("system"), body["messages"]), tools, None, kwargs)


def plan_messages(service: Service, body: Mapping[str, Any]) -> Plan:
    """What a checked Messages request asks for. Raises ApiError."""
    tools, choice, many = tools_of(body)
    prompt = service.prompter.prompt(conversation_of(service, body, tools))
    schema = body.get("output_config", {}).get("format")
    strict = tuple((t["function"]["name"], t["function"]["parameters"], t["function"].get("strict", False)) for t in tools)
    return Plan(
        prompt.ids, sampling_params(body, service.engine.n_vocab), prompt.known, prompt.thinking, body["max_tokens"], body.get("stop_sequences", []),
        wish=Wish({"json": schema["schema"]} if schema else None, strict, choice, many, prompt.thinking),
        budget=body.get("thinking", {}).get("budget_tokens"), parallel=many,
        tools={t["function"]["name"]: t["function"]["parameters"] for t in tools} if choice != "none" else None,
    )


def usage_of(exchange: Exchange) -> dict[str, int]:
    """Tokens under Anthropic's names: input_tokens are those that were computed."""
    u = exchange.usage()
    return {"input_tokens": u["prompt"] - u["cached"], "cache_creation_input_tokens": 0, "cache_read_input_tokens": u["cached"],
            "output_tokens": u["completion"]}


def block_of(part: Part) -> dict[str, Any]:
    """A part as the beginning of a content block."""
    if part.kind == CALL:
        return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": part.call.name, "input": part.call.arguments}
    return {"type": "text", "text": part.text} if part.kind == CONTENT else {"type": "thinking", "thinking": part.text, "signature": ""}


class MessageReply:
    """The wire form of one Messages request's reply."""

    def __init__(self, service: Service, body: Mapping[str, Any], exchange: Exchange):
        self.exchange = exchange
        self.head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": body["model"]}
        self.stop: str | None = None

    def _ended(self, reason: str) -> dict[str, Any]:
        named = "stop_sequence" if self.stop is not None and reason == "stop" else REASONS[reason]
        return {"stop_reason": named, "stop_sequence": self.stop if named == "stop_sequence" else None}

    def whole(self) -> dict[str, Any]:
        """The body of a reply that is not streamed."""
        blocks: list[dict[str, Any]] = []
        reason = "stop"
        for delta in self.exchange.deltas(TICK):
            if delta is None:
                continue
            for part in delta.parts:
                key = {CONTENT: "text", REASONING: "thinking"}.get(part.kind)
                if key and blocks and blocks[-1]["type"] == key:
                    blocks[-1][key] += part.text
                else:
                    blocks.append(block_of(part))
            self.stop, reason = delta.pieces[-1].stop or self.stop, delta.reason or reason
        return {**self.head, "content": blocks, **self._ended(reason), "usage": usage_of(self.exchange)}

    def events(self) -> Iterator[dict[str, Any]]:
        """The events of a streamed reply."""
        started = {**usage_of(self.exchange), "input_tokens": len(self.exchange.plan.ids), "output_tokens": 0}
        yield {"type": "message_start", "message": {**self.head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": started}}
        yield {"type": "ping"}
        at, open_kind, reason = -1, "", "stop"
        for delta in self.exchange.deltas():
            if delta is None:
                yield {"type": "ping"}
                continue
            for part in delta.parts:
                if part.kind != open_kind or part.kind == CALL:
                    if open_kind:
                        yield {"type": "content_block_stop", "index": at}
                    at, open_kind = at + 1, part.kind
                    yield {"type": "content_block_start", "index": at, "content_block": _empty(block_of(part))}
                yield {"type": "content_block_delta", "index": at, "delta": _growth(part)}
            self.stop, reason = delta.pieces[-1].stop or self.stop, delta.reason or reason
        if open_kind:
            yield {"type": "content_block_stop", "index": at}
        yield {"type": "message_delta", "delta": self._ended(reason), "usage": usage_of(self.exchange)}
        yield {"type": "message_stop"}


def _empty(block: dict[str, Any]) -> dict[str, Any]:
    return {**block, **{k: {} if k == "input" else "" for k in ("text", "thinking", "input") if k in block}}


def _growth(part: Part) -> dict[str, Any]:
    if part.kind == CALL:
        return {"type": "input_json_delta", "partial_json": dumps(part.call.arguments)}
    return {"type": "text_delta", "text": part.text} if part.kind == CONTENT else {"type": "thinking_delta", "thinking": part.text}


def _events(reply: MessageReply, request_id: str) -> Iterator[str]:
    try:
        for event in reply.events():
            yield f"event: {event['type']}\ndata: {dumps(event)}\n\n"
    except ClientGone:
        return
    except Exception as error:
        yield f"event: error\ndata: {dumps(failure(error).anthropic(request_id))}\n\n"


@api.post("/v1/messages")
def messages() -> Response:

    service = current().ready()
    body = body_of(schemas.MESSAGES)
    service.check_model(body["model"])
    exchange = Exchange(service, plan_messages(service, body), left(request.environ), g.get("owner", ""))
    reply = MessageReply(service, body, exchange)
    if not body.get("stream"):
        return json_response(reply.whole())
    return Response(Guarded(_events(reply, g.request_id), exchange.cancel), mimetype="text/event-stream", headers=STREAM_HEADERS)


@api.post("/v1/messages/count_tokens")
def count_tokens() -> Response:
    service = current().ready()
    body = body_of(schemas.COUNT)
    service.check_model(body["model"])
    tools, _, _ = tools_of(body)
    return json_response({"input_tokens": len(service.prompter.prompt(conversation_of(service, body, tools)).ids)})
