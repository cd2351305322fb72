"""Requests in the form that popular coding agents and front ends send: each is answered without a change, streamed where it asks for it, and the
second turn of a conversation reuses the first one's work. recorded.json: what agents sent to scripts/agent_fixtures.py, their prose left out;
the others are written after the documented form of the request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serving import application
from tiny_model import TEMPLATE, write_tiny

FOLDER = Path(__file__).parent / "fixtures" / "agents"
REQUESTS = [one for name in ("anthropic", "openai", "recorded") for one in json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))]
WITH_TOOLS = ("{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<tool_call></tool_call><|im_end|>\n{% endif %}"
              + TEMPLATE)


@pytest.fixture(scope="module", params=["takes tools", "takes none"])
def served(request, tmp_path_factory):
    template = WITH_TOOLS if request.param == "takes tools" else TEMPLATE
    path = write_tiny(tmp_path_factory.mktemp("agents") / "tiny.gguf", context=16384, template=template)
    app, service = application(path, aliases=("*",))
    yield app.test_client(), service
    service.close()


@pytest.mark.parametrize("one", REQUESTS, ids=[r["comment"][:50] for r in REQUESTS])
def test_the_request_is_answered(served, one):
    reply = served[0].post(one["path"], json=one["body"], headers=one["headers"])
    text = reply.get_data(as_text=True)
    assert reply.status_code == 200, text
    assert (reply.mimetype == "text/event-stream") == bool(one["body"].get("stream"))
    if one["body"].get("stream"):
        assert "message_stop" in text if one["path"] == "/v1/messages" else text.endswith("data: [DONE]\n\n")
        assert '"error"' not in text


def test_recorded_turns_reuse_the_ones_before(served):
    """The second request of an agent that has read a file begins as the first one did."""
    turns = [r for r in REQUESTS if r["comment"].startswith("opencode") and r["body"].get("tools")]
    assert [m["role"] for m in turns[1]["body"]["messages"]] == ["system", "user", "assistant", "tool"]
    usage = []
    for one in turns:
        events = served[0].post(one["path"], json=one["body"], headers=one["headers"]).get_data(as_text=True)
        usage.append(next(u for line in events.split("\n") if line.startswith('data: {"id"') and (u := json.loads(line[6:]).get("usage"))))
    first, second = (u["prompt_tokens"] for u in usage)
    assert second > first and usage[1]["prompt_tokens_details"]["cached_tokens"] > 0.8 * first


def test_a_billing_line_that_changes_does_not_cost_the_prompt(served):
    first, second = (r for r in REQUESTS if r["path"] == "/v1/messages")
    for one in (first, second):
        text = served[0].post(one["path"], json=one["body"]).get_data(as_text=True)
    usage = json.loads(text.split("event: message_delta\ndata: ")[1].split("\n")[0])["usage"]
    counted = served[0].post("/v1/messages/count_tokens", json={k: first["body"][k] for k in ("model", "messages", "system", "tools")}).get_json()
    assert usage["cache_read_input_tokens"] >= counted["input_tokens"] - 40  # all of the first turn's prompt but its opening of the reply
    assert usage["input_tokens"] < 200
