#!/usr/bin/env python3
"""Requests that a coding agent sent, as fixtures: `record` listens and answers as a model would (one tool call, then text), `make` keeps what was
sent but the agents' own sentences. Owns both halves; knows no agent by name.

usage: agent_fixtures.py record PORT OUT.jsonl FILE          run the agent against http://127.0.0.1:PORT/v1 meanwhile; FILE: what it is asked to read
       agent_fixtures.py make "NAME VERSION.jsonl" ... > tests/fixtures/agents/recorded.json

Fields, their order, roles, content kinds, tool names and schemas stay as they were sent. Texts of more than a few words become filler, and the limit
on the reply's tokens becomes small: a fixture shows the form of a request, and its author's prompt is not ours to copy.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

KEPT_HEADERS = ("user-agent", "accept", "x-stainless-lang", "x-stainless-package-version", "x-stainless-helper-method")
TEXTS = ("content", "text", "description", "reasoning_content", "instructions", "title")
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
FILLER = "the text of the agent stands here and says how it wants to be answered in its own words".split()
MAX_WORDS, TOKENS = 12, 24


class Recorder(BaseHTTPRequestHandler):
    """Answers in OpenAI's form: the first tool that reads files is called once, then a sentence follows."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _note(self, body: Any) -> None:
        with self.server.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"method": self.command, "path": self.path, "headers": dict(self.headers), "body": body}) + "\n")

    def _send(self, kind: str, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self._note(None)
        card = {"id": "local", "object": "model", "created": 1, "owned_by": "x"}
        self._send("application/json", json.dumps({"object": "list", "data": [card]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        self._note(body)
        call = self._call(body)
        message = {"role": "assistant", "content": None if call else "It holds one function.", **({"tool_calls": [call]} if call else {})}
        head, reason = {"id": "chatcmpl-1", "created": 1, "model": body.get("model")}, "tool_calls" if call else "stop"
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": reason}
            self._send("application/json", json.dumps({**head, "object": "chat.completion", "choices": [choice], "usage": usage}).encode())
            return
        delta = {**message, **({"tool_calls": [{"index": 0, **call}]} if call else {})}
        choices = [[{"index": 0, "delta": delta, "finish_reason": None}], [{"index": 0, "delta": {}, "finish_reason": reason}], []]
        chunks = [{**head, "object": "chat.completion.chunk", "choices": c, **({} if c else {"usage": usage})} for c in choices]
        self._send("text/event-stream", b"".join(b"data: " + json.dumps(c).encode() + b"\n\n" for c in chunks) + b"data: [DONE]\n\n")

    def _call(self, body: dict[str, Any]) -> dict[str, Any] | None:
        if any(m.get("role") == "tool" for m in body.get("messages", ())):
            return None
        for tool in body.get("tools") or ():
            name, schema = tool["function"]["name"], tool["function"].get("parameters", {})
            keys = [k for k in schema.get("properties", {}) if "path" in k.lower() and k in schema.get("required", ())]
            if "read" in name and keys:
                return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": json.dumps({keys[0]: self.server.file})}}
        return None


def shortened(value: Any, key: str = "") -> Any:
    """A value without its prose."""
    if isinstance(value, dict):
        return {k: TOKENS if k in LIMITS else shortened(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [shortened(v, key) for v in value]
    if isinstance(value, str) and key in TEXTS and len(value.split()) > 6:
        words = len(value.split())
        return " ".join((FILLER * (1 + MAX_WORDS // len(FILLER)))[: min(words, MAX_WORDS)])
    if isinstance(value, str) and key == "arguments":
        return value if len(value) < 200 else "{}"
    return value


def make(paths: list[str]) -> list[dict[str, Any]]:
    """The fixtures of records: POST requests with messages, each form once."""
    out, seen = [], set()
    for path in paths:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            body = one["body"]
            if one["method"] != "POST" or not isinstance(body, dict) or "messages" not in body:
                continue
            headers = {k.lower(): v for k, v in one["headers"].items() if k.lower() in KEPT_HEADERS}
            who = Path(path).stem
            turn = f"{len(body['messages'])} messages{', tools' if body.get('tools') else ''}{', streamed' if body.get('stream') else ''}"
            if (who, turn) not in seen:
                seen.add((who, turn))
                out.append({"comment": f"{who}: {turn}", "path": one["path"], "headers": headers, "body": shortened(body)})
    return out


def main() -> int:
    if len(sys.argv) == 5 and sys.argv[1] == "record":
        server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Recorder)
        server.out, server.file = Path(sys.argv[3]), sys.argv[4]
        server.serve_forever()
    if len(sys.argv) < 3 or sys.argv[1] != "make":
        raise SystemExit(__doc__)
    sys.stdout.write(json.dumps(make(sys.argv[2:]), indent=0, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
