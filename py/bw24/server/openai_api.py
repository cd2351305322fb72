"""OpenAI's endpoints: chat/completions, completions, models. Owns their wire form, streamed and whole; what a request means is in replies.py."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from flask import Blueprint, Response, g, request

from ..grammar import Wish
from ..logprobs import Logprobs
from ..toolcalls import CALL, CONTENT, REASONING, Part
from . import schemas
from .errors import ApiError, bad
from .http import body_of, current, event_stream, json_response
from .prompting import Conversation, openai_messages
from .replies import TICK, Delta, Exchange, Plan, left, sampling_params
from .service import Service

api = Blueprint("openai", __name__)


# ---- requests


def limit_of(body: Mapping[str, Any]) -> int | None:
    """The smaller of max_tokens and max_completion_tokens."""
    given = [body[k] for k in ("max_tokens", "max_completion_tokens") if k in body]
    return min(given) if given else None


def stops_of(body: Mapping[str, Any]) -> list[str]:
    stop = body.get("stop", [])
    return [stop] if isinstance(stop, str) else stop


def format_wish(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """response_format as Wish.body."""
    wanted = body.get("response_format", {"type": "text"})
    kind = wanted["type"]
    if kind == "json_object":
        return {"json": wanted.get("schema", {"type": "object"})}
    if kind == "json_schema":
        return {"json": wanted["json_schema"]["schema"]}
    if kind == "regex":
        return {"regex": wanted["pattern"]}
    if kind == "grammar":
        return {wanted.get("syntax", "lark"): wanted["grammar"]}
    return None


def tools_of(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """(the tools that may be called, "none", "auto" or "required"). Raises ApiError."""
    tools, choice = body.get("tools", []), body.get("tool_choice", "auto")
    names = [t["function"]["name"] for t in tools]
    if len(set(names)) < len(names):
        raise bad("tools", "two tools have the same name")
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        tools = [t for t in tools if t["function"]["name"] == name]
        if not tools:
            raise bad("tool_choice.function.name", f"no tool is called '{name}'")
        return tools, "required"
    if choice == "required" and not tools:
        raise bad("tool_choice", "'required' needs tools")
    return tools, choice


def plan_chat(service: Service, body: Mapping[str, Any]) -> Plan:
    """What a checked chat request asks for. Raises ApiError."""
    tools, choice = tools_of(body)
    if "top_logprobs" in body and not body.get("logprobs"):
        raise bad("top_logprobs", "needs logprobs: true")
    # with "none" the template still shows the tools: the conversation may hold calls of them
    conversation = Conversation(openai_messages(body["messages"]), tools, body.get("reasoning_effort"), body.get("chat_template_kwargs", {}))
    prompt = service.prompter.prompt(conversation)
    schemas_ = {t["function"]["name"]: t["function"].get("parameters", {}) for t in tools}
    wish = Wish(format_wish(body), tuple((t["function"]["name"], t["function"].get("parameters", {}), t["function"].get("strict", False))
                                         for t in tools), choice if tools else "none", body.get("parallel_tool_calls", True), prompt.thinking)
    return Plan(
        prompt.ids, sampling_params(body, service.engine.n_vocab, body.get("n", 1)), prompt.known, prompt.thinking, limit_of(body),
        stops_of(body), body.get("top_logprobs", 0) if body.get("logprobs") else None, wish, None,
        schemas_ if tools and choice != "none" else None, body.get("parallel_tool_calls", True), body.get("cache_prompt", True),
        body.get("ignore_eos", False),
    )


# ---- replies


def usage_of(exchanges: list[Exchange]) -> dict[str, Any]:
    """Tokens of a request, under OpenAI's names."""
    sums = {k: sum(e.usage()[k] for e in exchanges) for k in ("prompt", "cached", "completion", "reasoning")}
    return {
        "prompt_tokens": sums["prompt"], "completion_tokens": sums["completion"], "total_tokens": sums["prompt"] + sums["completion"],
        "prompt_tokens_details": {"cached_tokens": sums["cached"]}, "completion_tokens_details": {"reasoning_tokens": sums["reasoning"]},
    }


def call_dict(part: Part, index: int | None = None) -> dict[str, Any]:
    arguments = json.dumps(part.call.arguments, ensure_ascii=False)
    out = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {"name": part.call.name, "arguments": arguments}}
    return out if index is None else {"index": index, **out}


def entry(service: Service, token: int, found: Logprobs) -> dict[str, Any]:
    """One token's log probabilities, as chat completions show them."""
    def one(i: int, value: float) -> dict[str, Any]:
        piece = service.model.tokenizer.piece(i) if i < service.model.tokenizer.n_tokens else b""
        return {"token": piece.decode("utf-8", "replace"), "logprob": value, "bytes": list(piece)}

    return {**one(token, found.token), "top_logprobs": [one(i, value) for i, value in found.top]}


def entries_of(service: Service, delta: Delta) -> list[dict[str, Any]]:
    """The log probabilities that a delta brought."""
    return [entry(service, p.token, p.logprobs) for p in delta.pieces if p.logprobs]


class ChatReply:
    """The wire form of one chat request's replies."""

    def __init__(self, service: Service, body: Mapping[str, Any], exchange: Exchange):
        self.service, self.exchange = service, exchange
        self.stream_usage = body.get("stream_options", {}).get("include_usage", False)
        self.head = {"id": f"chatcmpl-{secrets.token_hex(14)}", "object": "chat.completion", "created": int(time.time()),
                     "model": body.get("model", service.name), "system_fingerprint": service.fingerprint}

    def whole(self) -> dict[str, Any]:
        """The body of a reply that is not streamed."""
        n = len(self.exchange.plan.params)
        texts = [{REASONING: "", CONTENT: ""} for _ in range(n)]
        calls: list[list[dict[str, Any]]] = [[] for _ in range(n)]
        entries: list[list[dict[str, Any]]] = [[] for _ in range(n)]
        reasons = [""] * n
        for delta in self.exchange.deltas(TICK):
            if delta is None:
                continue
            for part in delta.parts:
                if part.kind == CALL:
                    calls[delta.choice].append(call_dict(part))
                else:
                    texts[delta.choice][part.kind] += part.text
            entries[delta.choice] += entries_of(self.service, delta)
            reasons[delta.choice] = delta.reason
        choices = []
        for i in range(n):
            content = texts[i][CONTENT] if texts[i][CONTENT] or not calls[i] else None
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            message |= {"reasoning_content": texts[i][REASONING]} if texts[i][REASONING] else {}
            message |= {"tool_calls": calls[i]} if calls[i] else {}
            shown = {"content": entries[i], "refusal": None} if self.exchange.plan.top is not None else None
            choices.append({"index": i, "message": message, "logprobs": shown, "finish_reason": reasons[i]})
        return {**self.head, "choices": choices, "usage": usage_of([self.exchange]), "timings": self.exchange.timings()}

    def _chunk(self, choice: int, delta: Mapping[str, Any], reason: str = "", entries: Any = None) -> dict[str, Any]:
        shown = {"content": entries, "refusal": None} if entries else None
        one = {"index": choice, "delta": delta, "logprobs": shown, "finish_reason": reason or None}
        return {**self.head, "object": "chat.completion.chunk", "choices": [one], **({"usage": None} if self.stream_usage else {})}

    def chunks(self) -> Iterator[dict[str, Any] | None]:
        """The chunks of a streamed reply; None for a sign of life."""
        counts = [0] * len(self.exchange.plan.params)
        for i in range(len(counts)):
            yield self._chunk(i, {"role": "assistant", "content": "", "refusal": None})
        left_open = len(counts)
        for delta in self.exchange.deltas():
            if delta is None:
                yield None
                continue
            shown = entries_of(self.service, delta)
            for part in delta.parts:
                yield self._chunk(delta.choice, self._part(part, counts, delta.choice), entries=shown)
                shown = []
            if shown:
                yield self._chunk(delta.choice, {}, entries=shown)
            if delta.reason:
                left_open -= 1
                last = self._chunk(delta.choice, {}, delta.reason)
                yield last if left_open else {**last, "timings": self.exchange.timings()}
        if self.stream_usage:
            yield {**self.head, "object": "chat.completion.chunk", "choices": [], "usage": usage_of([self.exchange])}

    @staticmethod
    def _part(part: Part, counts: list[int], choice: int) -> dict[str, Any]:
        if part.kind == CALL:
            counts[choice] += 1
            return {"tool_calls": [call_dict(part, counts[choice] - 1)]}
        return {"content" if part.kind == CONTENT else "reasoning_content": part.text}


@api.post("/v1/chat/completions")
@api.post("/chat/completions")
def chat_completions() -> Response:
    service = current().ready()
    body = body_of(schemas.CHAT)
    service.check_model(body.get("model"))
    exchange = Exchange(service, plan_chat(service, body), left(request.environ), g.get("owner", ""))
    reply = ChatReply(service, body, exchange)
    return event_stream(reply.chunks(), exchange.cancel) if body.get("stream") else json_response(reply.whole())


# ---- completions


def plan_completions(service: Service, body: Mapping[str, Any]) -> list[Plan]:
    """A plan for each prompt. Raises ApiError."""
    if body.get("echo") and "logprobs" in body:
        raise bad("echo", "log probabilities of the prompt are not supported; leave out echo or logprobs")
    tokenizer, n = service.model.tokenizer, body.get("n", 1)
    plans = []
    for prompt in body["prompt"]:
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise bad("prompt", "the prompt has no tokens")
        for token in ids:
            if token >= service.engine.n_vocab:
                raise bad("prompt", f"token id {token} is outside 0..{service.engine.n_vocab - 1}")
        plans.append(Plan(ids, sampling_params(body, service.engine.n_vocab, n), limit=body.get("max_tokens", 16), stops=stops_of(body),
                          top=body.get("logprobs"), wish=Wish(format_wish(body)), reuse=body.get("cache_prompt", True),
                          ignore_eos=body.get("ignore_eos", False), param="prompt"))
    return plans


class TextReply:
    """The wire form of one completions request's replies: choice i of prompt p has index p * n + i."""

    def __init__(self, service: Service, body: Mapping[str, Any], exchanges: list[Exchange]):
        self.service, self.exchanges, self.n = service, exchanges, body.get("n", 1)
        self.stream_usage = body.get("stream_options", {}).get("include_usage", False)
        self.echoes = [""] * len(exchanges)
        if body.get("echo"):
            tokenizer = service.model.tokenizer
            self.echoes = [p if isinstance(p, str) else tokenizer.decode(p) for p in body["prompt"]]
        self.head = {"id": f"cmpl-{secrets.token_hex(14)}", "object": "text_completion", "created": int(time.time()),
                     "model": body.get("model", service.name), "system_fingerprint": service.fingerprint}

    def _logprobs(self, pieces: list[tuple[int, int, Logprobs]]) -> dict[str, Any]:
        """pieces: (offset in the text, token, log probabilities)."""
        name = lambda i: self.service.model.tokenizer.piece(i).decode("utf-8", "replace")  # noqa: E731
        return {
            "tokens": [name(t) for _, t, _ in pieces], "token_logprobs": [found.token for *_, found in pieces],
            "top_logprobs": [{name(i): value for i, value in found.top} for *_, found in pieces], "text_offset": [at for at, *_ in pieces],
        }

    def _choice(self, index: int, text: str, pieces: list[Any], reason: str | None, top: int | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": self._logprobs(pieces) if top is not None and pieces else None, "finish_reason": reason}

    def whole(self) -> dict[str, Any]:
        choices = []
        for p, exchange in enumerate(self.exchanges):
            texts, pieces = [self.echoes[p]] * self.n, [[] for _ in range(self.n)]
            reasons = [""] * self.n
            for delta in exchange.deltas(TICK):
                if delta is None:
                    continue
                i = delta.choice
                for piece in delta.pieces:
                    if piece.logprobs:
                        pieces[i].append((len(texts[i]), piece.token, piece.logprobs))
                    texts[i] += piece.text
                reasons[i] = delta.reason
            choices += [self._choice(p * self.n + i, texts[i], pieces[i], reasons[i], exchange.plan.top) for i in range(self.n)]
        return {**self.head, "choices": choices, "usage": usage_of(self.exchanges), "timings": self.exchanges[0].timings()}

    def chunks(self) -> Iterator[dict[str, Any] | None]:
        extra = {"usage": None} if self.stream_usage else {}
        for p, exchange in enumerate(self.exchanges):
            lengths = [len(self.echoes[p])] * self.n
            for i in range(self.n) if self.echoes[p] else ():
                yield {**self.head, "choices": [self._choice(p * self.n + i, self.echoes[p], [], None, None)], **extra}
            for delta in exchange.deltas():
                if delta is None:
                    yield None
                    continue
                i, text, found = delta.choice, "", []
                for piece in delta.pieces:
                    if piece.logprobs:
                        found.append((lengths[i] + len(text), piece.token, piece.logprobs))
                    text += piece.text
                lengths[i] += len(text)
                if text or found or delta.reason:
                    one = self._choice(p * self.n + i, text, found, delta.reason or None, exchange.plan.top)
                    yield {**self.head, "choices": [one], **extra}
        if self.stream_usage:
            yield {**self.head, "choices": [], "usage": usage_of(self.exchanges)}


@api.post("/v1/completions")
@api.post("/completions")
def completions() -> Response:
    service = current().ready()
    body = body_of(schemas.COMPLETION)
    service.check_model(body.get("model"))
    exchanges: list[Exchange] = []

    def cancel() -> None:
        for exchange in exchanges:
            exchange.cancel()

    try:
        for plan in plan_completions(service, body):
            exchanges.append(Exchange(service, plan, left(request.environ), g.get("owner", "")))
        reply = TextReply(service, body, exchanges)
        if not body.get("stream"):
            return json_response(reply.whole())
    except BaseException:
        cancel()
        raise
    return event_stream(reply.chunks(), cancel)


# ---- models


def model_card(service: Service, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": service.created, "owned_by": "bw24",
            "meta": {"context": service.engine.ctx, "vocabulary": service.engine.n_vocab, "architecture": service.model.arch,
                     "name": service.model.name}}


@api.get("/v1/models")
@api.get("/models")
def list_models() -> Response:
    service = current().ready()
    names = [service.name, *(a for a in service.settings.aliases if a != "*")]
    cards = [model_card(service, name) for name in names]
    if "anthropic-version" in request.headers:
        cards = [{**card, "type": "model", "display_name": card["id"], "created_at": _date(service.created)} for card in cards]
        return json_response({"object": "list", "data": cards, "has_more": False, "first_id": names[0], "last_id": names[-1]})
    return json_response({"object": "list", "data": cards})


@api.get("/v1/models/<path:name>")
def one_model(name: str) -> Response:
    service = current().ready()
    service.check_model(name)
    return json_response({**model_card(service, name), "type": "model", "display_name": name, "created_at": _date(service.created)})


def _date(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def unknown_endpoint(path: str) -> ApiError:
    """404 for a path of OpenAI's that is not served, so that a client sees why."""
    shown = "".join(c if c.isprintable() else "?" for c in path[:100])
    return ApiError(404, f"{shown}: no such endpoint; /openapi.json lists what there is", kind="unknown_url")
