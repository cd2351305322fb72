"""The application without a network: endpoints, fields, refusals, keys, origins, settings. Every accepted field is honoured or refused by name."""

from __future__ import annotations

import argparse
import json
import logging

import pytest

from bw24 import flags
from bw24.errors import Bw24Error
from bw24.server import settings as settings_module
from bw24.server.settings import Settings, check_address, from_args, from_environment, is_loopback
from serving import application
from tiny_model import TEMPLATE, write_tiny

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}}}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("served") / "tiny.gguf", context=2048)


@pytest.fixture(scope="module")
def served(path):
    app, service = application(path, aliases=("gpt-4o",))
    yield app.test_client(), service
    service.close()


def post(served, url, **body):
    reply = served[0].post(url, json=body)
    return reply.status_code, reply.get_json()


def chat(served, **body):
    return post(served, "/v1/chat/completions", **{"messages": HI, "max_tokens": 12, "seed": 1, **body})


def text_of(reply):
    return reply[1]["choices"][0]["message"]["content"]


def events(reply) -> list:
    """The JSON of an event stream, [DONE] checked and left out."""
    lines = [line[6:] for line in reply.get_data(as_text=True).split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def streamed(served, url="/v1/chat/completions", **body):
    return events(served[0].post(url, json={"messages": HI, "max_tokens": 12, "seed": 1, "stream": True, **body}))


# ---- replies


def test_a_chat_reply_has_openais_shape(served):
    status, body = chat(served)
    assert status == 200 and body["object"] == "chat.completion" and body["model"] == "tiny.gguf" and body["id"].startswith("chatcmpl-")
    choice = body["choices"][0]
    assert choice["index"] == 0 and choice["finish_reason"] == "length" and choice["message"]["role"] == "assistant"
    usage = body["usage"]
    assert usage["completion_tokens"] == 12 and usage["total_tokens"] == usage["prompt_tokens"] + 12
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0 and body["system_fingerprint"].endswith("-exact")
    assert body["timings"]["predicted_n"] == 12 and body["timings"]["prompt_ms"] >= 0


def test_streamed_and_whole_replies_are_the_same_text(served):
    for more in ({}, {"temperature": 0}, {"n": 3}, {"stop": ["a", "b"]}, {"logprobs": True, "top_logprobs": 3}):
        whole = chat(served, **more)[1]
        chunks = streamed(served, **more)
        for i, choice in enumerate(whole["choices"]):
            mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == i]
            assert "".join(c["delta"].get("content") or "" for c in mine) == choice["message"]["content"]
            assert mine[-1]["finish_reason"] == choice["finish_reason"] and mine[0]["delta"]["role"] == "assistant"
            if "logprobs" in more:
                assert [e for c in mine if c["logprobs"] for e in c["logprobs"]["content"]] == choice["logprobs"]["content"]


def test_seeds_repeat_and_choices_differ(served):
    once, again = chat(served, n=3)[1], chat(served, n=3)[1]
    texts = [c["message"]["content"] for c in once["choices"]]
    assert texts == [c["message"]["content"] for c in again["choices"]] and len(set(texts)) == 3
    assert texts[1] == text_of(chat(served, seed=2))  # choice i has the seed plus i
    assert chat(served, seed=None)[1] != chat(served, seed=None)[1]
    assert text_of(chat(served, seed=-1)) == text_of(chat(served, seed=(1 << 64) - 1))


@pytest.mark.parametrize("change", [
    {"temperature": 0}, {"temperature": 1.9}, {"top_p": 0.1}, {"top_k": 1}, {"min_p": 0.9}, {"logit_bias": {"65": 100}},
    {"repetition_penalty": 5.0}, {"seed": 99}, {"presence_penalty": 2.0, "temperature": 0, "max_tokens": 60},
    {"frequency_penalty": 2.0, "temperature": 0, "max_tokens": 60},
])
def test_every_sampling_field_reaches_the_sampler(served, change):
    base = {k: v for k, v in change.items() if k == "max_tokens" or (k == "temperature" and len(change) > 1)}
    assert text_of(chat(served, **change)) != text_of(chat(served, **base))
    if "logit_bias" in change:
        assert text_of(chat(served, **change)) == "A" * 12


def test_limits(served):
    assert chat(served, max_tokens=3)[1]["usage"]["completion_tokens"] == 3
    assert chat(served, max_tokens=50, max_completion_tokens=4)[1]["usage"]["completion_tokens"] == 4
    status, body = chat(served, max_tokens=0)
    assert status == 200 and body["choices"][0]["finish_reason"] == "length" and text_of((0, body)) == ""
    status, body = chat(served, max_tokens=1 << 39, ignore_eos=True, messages=[{"role": "user", "content": "x" * 1900}])
    assert body["choices"][0]["finish_reason"] == "length" and body["usage"]["total_tokens"] == 2049  # the last token needs no place
    status, body = chat(served, messages=[{"role": "user", "content": "x" * 3000}])
    assert status == 400 and body["error"]["code"] == "context_length_exceeded"
    assert "3019 tokens" in body["error"]["message"] and "2048" in body["error"]["message"]


def test_log_probabilities(served):
    body = chat(served, logprobs=True, top_logprobs=5, temperature=0, max_tokens=6)[1]
    for one in body["choices"][0]["logprobs"]["content"]:
        assert len(one["top_logprobs"]) == 5 and one["logprob"] == one["top_logprobs"][0]["logprob"] <= 0
        assert bytes(one["bytes"]).decode("utf-8", "replace") == one["token"]
        values = [t["logprob"] for t in one["top_logprobs"]]
        assert values == sorted(values, reverse=True)
    assert chat(served)[1]["choices"][0]["logprobs"] is None
    assert len(chat(served, logprobs=True)[1]["choices"][0]["logprobs"]["content"]) == 12


def test_usage_in_a_stream(served):
    chunks = streamed(served, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 12
    assert all(c["usage"] is None for c in chunks[:-1]) and chunks[-2]["timings"]["predicted_n"] == 12
    assert "usage" not in streamed(served)[0]


def test_prompts_are_reused(served):
    long = [{"role": "user", "content": "Once upon a time " * 20}]
    first, second = chat(served, messages=long)[1], chat(served, messages=long)[1]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == second["usage"]["prompt_tokens"] - 1
    assert text_of((0, first)) == text_of((0, second)) == text_of(chat(served, messages=long, cache_prompt=False))
    assert chat(served, messages=long, cache_prompt=False)[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_messages_of_every_kind(served):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": true}"}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": [], "audio": None, "function_call": None},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        {"role": "assistant", "content": "ok", "reasoning_content": "hm"}, {"role": "assistant", "content": "ok", "reasoning": "hm"},
        {"role": "user", "content": "Hi", "name": "Ann"},
    ]
    assert chat(served, messages=messages)[0] == 200
    prompt = post(served, "/apply-template", messages=messages)[1]["prompt"]
    assert "<|im_start|>system\nBe brief." in prompt and "user\nab<|im_end|>" in prompt and "sunny" in prompt and '"a": true' in prompt


def test_satisfied_fields_are_accepted(served):
    assert chat(served, user="u", metadata={"a": "b"}, safety_identifier="s", store=False, service_tier="auto", prompt_cache_key="k",
                prompt_cache_retention="24h", modalities=["text"], verbosity="medium", parallel_tool_calls=True, tools=[], stop=None, n=1,
                logit_bias=None, response_format={"type": "text"}, reasoning_effort="none", stream=False, tool_choice="auto")[0] == 200


BAD = [
    ({"messages": []}, "messages: expected 1"), ({"messages": "x"}, "messages: expected an array"),
    ({"messages": None}, "messages: the field is missing"),
    ({"messages": [{"role": "king", "content": ""}]}, "messages.0.role: expected one of system"),
    ({"messages": [{"role": "function", "content": ""}]}, "messages.0.role: 'function': deprecated"),
    ({"messages": [{"role": "user"}]}, "messages.0.content: the field is missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: expected a string or an array of parts, found 5"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages.0.content.0.type: 'image_url'"),
    ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages.0.weight: unknown field"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}]}]},
     "arguments: expected a JSON object"),
    ({"store": True}, "store: True: replies are not stored"), ({"temperature": -1}, "temperature: expected a number 0..2, found -1"),
    ({"temperature": "hot"}, "temperature: expected a number"), ({"temperature": True}, "temperature: expected a number"),
    ({"top_p": 1.5}, "top_p: expected"), ({"n": 0}, "n: expected a whole number 1..16, found 0"), ({"n": 10**30}, "n: expected"),
    ({"n": 1.5}, "n: expected"), ({"max_tokens": -1}, "max_tokens: expected"), ({"max_tokens": 10**20}, "max_tokens: expected"),
    ({"seed": 2**70}, "seed: expected"), ({"stop": [""]}, "stop.0: expected 1"), ({"stop": ["x"] * 65}, "stop: expected 0..64 items, found 65"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x: expected"), ({"logit_bias": {"9999": 1}}, "logit_bias: token 9999 is outside 0..259"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1: expected a number -100..100"), ({"logit_bias": [1]}, "logit_bias: expected an object"),
    ({"top_logprobs": 2}, "top_logprobs: needs logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: expected"),
    ({"max_tokns": 5}, "max_tokns: unknown field; did you mean max_tokens?"), ({"functions": []}, "functions: deprecated; use tools"),
    ({"stream": "yes"}, "stream: expected true or false"), ({"stream_options": {"x": 1}}, "stream_options.x: unknown field"),
    ({"modalities": ["audio"]}, "modalities"), ({"reasoning_effort": "high"}, "reasoning_effort: this model's chat template cannot"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort: expected one of"),
    ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x: the model's"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"), ({"tools": [{"type": "custom"}]}, "tools.0.type: 'custom'"),
    ({"tools": [TOOL, TOOL]}, "tools: two tools have the same name"), ({"tool_choice": "required"}, "tool_choice: 'required' needs tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "no tool is called 'g'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: the field is missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}}, "response_format: Invalid type: foo"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"contains": {}}}}}, "response_format"),
    ({"response_format": {"type": "regex", "pattern": "("}}, "response_format"), ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"model": "other"}, "the model 'other' does not exist"), ({"service_tier": "flex"}, "service_tier"), ({"verbosity": "high"}, "verbosity"),
]


@pytest.mark.parametrize("change, message", BAD, ids=[m[:40] for _, m in BAD])
def test_what_cannot_be_honoured_is_refused_by_name(served, change, message):
    status, body = chat(served, **change)
    error = body["error"]
    assert status == (404 if "model" in change else 400) and message in error["message"], error
    assert error["type"] in ("invalid_request_error", "not_found_error") and set(error) == {"message", "type", "param", "code"}
    named = next(iter(change)) if len(change) == 1 else list(change)[-1]
    assert error["param"] is None or error["param"].split(".")[0] in (named, *change)


def test_bodies_that_are_no_json(served):
    client = served[0]
    for data, message in ((b"", "no valid JSON"), (b"{", "no valid JSON"), (b"[]", "expected an object"), (b"\xff", "expected UTF-8"),
                          (b'{"messages": NaN}', "NaN is not JSON"), (b"[" * 100000, "nested too deeply"),
                          (b'{"n": ' + b"1" * 5000 + b"}", "no valid JSON"),
                          (b'"\xed\xa0\x80"', "expected UTF-8"),
                          (b'{"temperature": 1e999, "messages": [{"role": "user", "content": ""}]}', "temperature")):
        reply = client.post("/v1/chat/completions", data=data, content_type="application/json")
        assert reply.status_code == 400 and message in reply.get_json()["error"]["message"], reply.get_data()
    lone = client.post("/v1/chat/completions", data=b'{"messages": [{"role": "user", "content": "\\ud800"}]}', content_type="application/json")
    assert lone.status_code == 400 and "lone surrogate" in lone.get_json()["error"]["message"]
    assert client.post("/v1/chat/completions", data="{}", content_type="text/plain").status_code == 415


def test_completions(served):
    status, body = post(served, "/v1/completions", prompt="Hi", max_tokens=5, seed=1, logprobs=2)
    assert status == 200 and body["object"] == "text_completion" and body["choices"][0]["finish_reason"] == "length"
    found = body["choices"][0]["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["text_offset"]) == 5 and found["text_offset"][0] == 0
    ids = post(served, "/v1/completions", prompt=[72, 105], max_tokens=5, seed=1)[1]
    assert ids["choices"][0]["text"] == body["choices"][0]["text"]
    many = post(served, "/v1/completions", prompt=["Hi", [72, 105], "Ho"], max_tokens=5, seed=1, n=2, echo=True)[1]
    assert [c["index"] for c in many["choices"]] == list(range(6)) and many["choices"][0]["text"] == "Hi" + body["choices"][0]["text"]
    assert many["choices"][0]["text"] == many["choices"][2]["text"] and many["usage"]["completion_tokens"] == 30
    asked = {"prompt": ["Hi", "Ho"], "max_tokens": 5, "seed": 1, "n": 2, "echo": True, "stream": True}
    chunks = events(served[0].post("/v1/completions", json=asked))
    for i in (0, 1):
        assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) == many["choices"][i]["text"]
    assert len(post(served, "/v1/completions", prompt="Hi", seed=1, ignore_eos=True)[1]["choices"][0]["text"].encode()) >= 16
    for bad, message in (({"prompt": ""}, "no tokens"), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"), ({"prompt": [999]}, "token id 999"),
                         ({"prompt": [True]}, "prompt"), ({"prompt": "x", "suffix": "y"}, "suffix"), ({"prompt": "x", "best_of": 2}, "best_of"),
                         ({"prompt": "x", "echo": True, "logprobs": 1}, "echo"), ({}, "prompt: the field is missing")):
        status, body = post(served, "/v1/completions", **bad)
        assert status == 400 and message in body["error"]["message"], body


def test_text_endpoints(served):
    assert post(served, "/tokenize", content="the<|im_end|>")[1]["tokens"] == [256, 101, 259]
    assert post(served, "/tokenize", content="<|im_end|>", parse_special=False)[1]["tokens"] != [259]
    pieces = post(served, "/tokenize", content="thé", with_pieces=True)[1]["tokens"]
    assert pieces[0] == {"id": 256, "piece": "th"} and pieces[1]["piece"] == [0xC3]
    assert post(served, "/detokenize", tokens=[256, 101])[1] == {"content": "the"}
    assert post(served, "/detokenize", tokens=[99999])[0] == 400
    body = post(served, "/apply-template", messages=HI)[1]
    assert body["prompt"].endswith("<|im_start|>assistant\n") and body["tokens"] == chat(served)[1]["usage"]["prompt_tokens"]
    assert not post(served, "/apply-template", messages=HI, add_generation_prompt=False)[1]["prompt"].endswith("assistant\n")


def test_models_and_props(served):
    client = served[0]
    models = client.get("/v1/models").get_json()
    assert [m["id"] for m in models["data"]] == ["tiny.gguf", "gpt-4o"] and models["object"] == "list"
    assert client.get("/v1/models/gpt-4o").get_json()["id"] == "gpt-4o" and client.get("/v1/models/x/y").status_code == 404
    assert chat(served, model="gpt-4o")[1]["model"] == "gpt-4o"
    props = client.get("/props").get_json()
    assert props["context"] == 2048 and props["numeric_class"] == "exact" and props["chat_template"] == TEMPLATE
    assert client.get("/health").get_json()["status"] == "ok"


def test_metrics(served):
    chat(served)
    text = served[0].get("/metrics").get_data(as_text=True)
    for name in ("prompt_tokens_total", "generation_tokens_total", "num_requests_running", "time_to_first_token_seconds_bucket",
                 'request_success_total{finished_reason="length"}', "kv_cache_usage_perc", "prefix_cache_hits_total",
                 'http_requests_total{endpoint="/v1/chat/completions",status="200"}'):
        assert f"bw24:{name}" in text


def test_the_description_lists_every_endpoint_and_field(served):
    client = served[0]
    document = client.get("/openapi.json").get_json()
    rules = {r.rule for r in client.application.url_map.iter_rules()}
    short = ("/", "/chat/completions", "/completions", "/models", "/v1/health")
    known = {p for p in rules if not p.startswith(("/page", "/favicon")) and p not in short}
    assert set(document["paths"]) == known - {"/v1/models/<path:name>"}
    fields = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert fields["n"]["anyOf"] == [{"type": "integer", "minimum": 1, "maximum": 16}, {"type": "null"}]
    assert "functions" not in fields and fields["temperature"]["description"]


def test_the_page_is_served_with_a_policy(served):
    for path, kind in (("/", "text/html"), ("/page/app.js", "text/javascript"), ("/page/style.css", "text/css")):
        reply = served[0].get(path)
        assert reply.status_code == 200 and reply.mimetype == kind and "default-src 'none'" in reply.headers["Content-Security-Policy"]
    for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page//etc/passwd", "/page/index.html", "//page/app.js", "/..%2f..%2fetc/passwd"):
        assert served[0].get(path).status_code in (403, 404, 308)


def test_wrong_paths_and_methods(served):
    client = served[0]
    assert client.get("/v1/embeddings").get_json()["error"]["message"].startswith("/v1/embeddings: no such endpoint")
    reply = client.get("/v1/chat/completions")
    assert reply.status_code == 405 and "POST" in reply.headers["Allow"]
    for method in ("put", "delete", "patch"):
        assert getattr(client, method)("/v1/models").status_code == 405
    assert client.get("/health", headers={"X-Request-Id": "abc-1"}).headers["X-Request-Id"] == "abc-1"
    assert client.get("/health", headers={"X-Request-Id": "a\tb"}).headers["X-Request-Id"].startswith("req_")


# ---- tools and grammars: the tiny model's noise is held to a form


def test_schemas_and_grammars_hold(served):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"],
              "additionalProperties": False}
    for seed in range(8):
        body = chat(served, seed=seed, max_tokens=200, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})[1]
        value = json.loads(text_of((0, body)))
        assert set(value) == {"a", "b"} and isinstance(value["a"], bool) and body["choices"][0]["finish_reason"] == "stop"
    body = chat(served, max_tokens=100, response_format={"type": "regex", "pattern": "[ab]{3}c"})[1]
    assert len(text_of((0, body))) == 4 and text_of((0, body)).endswith("c")
    for syntax, grammar in (("lark", 'start: "yes" | "no"'), ("gbnf", 'root ::= "yes" | "no"')):
        body = chat(served, response_format={"type": "grammar", "grammar": grammar, "syntax": syntax})[1]
        assert text_of((0, body)) in ("yes", "no")
    whole = chat(served, seed=3, max_tokens=100, response_format={"type": "regex", "pattern": "[a-z]{20}"})[1]
    chunks = streamed(served, seed=3, max_tokens=100, response_format={"type": "regex", "pattern": "[a-z]{20}"})
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == text_of((0, whole))


def test_required_calls(served):
    pytest.importorskip("llguidance")
    body = chat(served, max_tokens=300, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)[1]
    choice = body["choices"][0]
    call = choice["message"]["tool_calls"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None and call["function"]["name"] == "f"
    assert set(json.loads(call["function"]["arguments"])) == {"a"} and call["id"].startswith("call_")
    chunks = streamed(served, max_tokens=300, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}}, parallel_tool_calls=False)
    calls = [c["choices"][0]["delta"]["tool_calls"][0] for c in chunks if c["choices"][0]["delta"].get("tool_calls")]
    assert len(calls) == 1 and calls[0]["index"] == 0 and chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_missing_package_is_named(served, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    status, body = chat(served, response_format={"type": "json_object"})
    assert status == 400 and "pip install 'bw24[grammar]'" in body["error"]["message"]


# ---- who may ask


def test_keys(path, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# comment\n\nsecret-key-1\nsecret-key-2\n")
    app, service = application(path, keys=settings_module.read_keys(str(keys)))
    client = app.test_client()
    try:
        assert client.get("/health").status_code == 200 and client.get("/").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret-key-1"}, {"X-Api-Key": ""},
                        {"Authorization": "Bearer"}):
            for url in ("/v1/models", "/metrics", "/props", "/v1/chat/completions", "/nix"):
                reply = client.get(url, headers=headers)
                assert reply.status_code == 401 and reply.headers["WWW-Authenticate"] == "Bearer", url
        for headers in ({"Authorization": "Bearer secret-key-1"}, {"authorization": "bearer secret-key-2"}, {"X-Api-Key": "secret-key-2"}):
            assert client.get("/v1/models", headers=headers).status_code == 200
        assert client.post("/v1/messages", json={}).get_json()["error"]["type"] == "authentication_error"
        assert b"secret" not in b"".join(service.settings.keys)
    finally:
        service.close()


def test_bad_key_files(tmp_path):
    for name, text, message in (("none", "# only\n", "no key in it"), ("short", "abc\n", "use at least 8")):
        (tmp_path / name).write_text(text)
        with pytest.raises(Bw24Error, match=message):
            settings_module.read_keys(str(tmp_path / name))
    with pytest.raises(Bw24Error, match="cannot read"):
        settings_module.read_keys(str(tmp_path / "missing"))


def test_only_this_machine_is_served_without_a_key():
    for host, local in (("127.0.0.1", True), ("::1", True), ("localhost", True), ("127.9.9.9", True), ("0.0.0.0", False), ("::", False), ("", False),
                        ("192.168.1.2", False), ("example.org", False)):
        assert is_loopback(host) == local
        if local:
            check_address(host, ())
        else:
            with pytest.raises(Bw24Error, match="needs --api-key-file"):
                check_address(host, ())
        check_address(host, (b"digest",))


def test_foreign_hosts_and_origins_are_refused(served, path):
    client = served[0]
    for host in ("localhost", "127.0.0.1:8080", "[::1]:8080"):
        assert client.get("/health", headers={"Host": host}).status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:80", "a b"):
        assert client.get("/v1/models", headers={"Host": host}).status_code in (400, 403)
    assert client.get("/v1/models", headers={"Origin": "http://localhost"}).status_code == 200
    for origin in ("http://evil.example", "null", "http://[", "http://localhost.evil.example"):
        reply = client.post("/v1/chat/completions", json={"messages": HI}, headers={"Origin": origin})
        assert reply.status_code == 403 and "Access-Control-Allow-Origin" not in reply.headers
    app, service = application(path, cors=("https://app.example",))
    try:
        client = app.test_client()
        ask = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        reply = client.options("/v1/chat/completions", headers=ask)
        assert reply.status_code == 204 and reply.headers["Access-Control-Allow-Origin"] == "https://app.example"
        assert reply.headers["Access-Control-Allow-Headers"] == "authorization"
        reply = client.get("/v1/models", headers={"Origin": "https://app.example"})
        assert reply.status_code == 200 and reply.headers["Access-Control-Allow-Origin"] == "https://app.example"
        assert client.get("/v1/models", headers={"Origin": "https://other.example"}).status_code == 403
    finally:
        service.close()


def test_lenient_reports_a_key_once(path, caplog):
    app, service = application(path, lenient=True)
    try:
        with caplog.at_level(logging.WARNING, "bw24.server"):
            for _ in range(2):
                reply = app.test_client().post("/v1/chat/completions", json={"messages": HI, "max_tokens": 1, "frobnicate": 1, "store": None})
                assert reply.status_code == 200
            assert app.test_client().post("/v1/chat/completions", json={"messages": HI, "store": True}).status_code == 400
        assert [r.getMessage() for r in caplog.records if "frobnicate" in r.getMessage()] == \
            ["ignored the unknown field frobnicate (--lenient); it is reported once"]
    finally:
        service.close()


def test_prompts_are_logged_only_when_asked(path, caplog):
    for asked in (False, True):
        app, service = application(path, log_prompts=asked)
        caplog.clear()
        with caplog.at_level(logging.DEBUG):
            app.test_client().post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "password1234"}], "max_tokens": 1})
            app.test_client().post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "password1234"}], "x": 1})
        service.close()
        assert ("password1234" in caplog.text) == asked
        lines = [json.loads(r.getMessage()) for r in caplog.records if r.name == "bw24.access"]
        assert [line["status"] for line in lines] == [200, 400] and all(line["request"].startswith("req_") for line in lines)


def test_body_limit(path):
    app, service = application(path, max_body=1000)
    try:
        reply = app.test_client().post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x" * 2000}]})
        assert reply.status_code == 413 and reply.get_json()["error"]["type"] == "request_too_large"
    finally:
        service.close()


def test_before_and_after_serving_it_says_so(path, tmp_path):
    app, service = application(path)
    service.drain(1)
    reply = app.test_client().post("/v1/chat/completions", json={"messages": HI})
    assert reply.status_code == 503 and reply.headers["Retry-After"] and "shutting down" in reply.get_json()["error"]["message"]
    assert app.test_client().get("/health").status_code == 503
    service.close()
    from bw24.server.service import Service

    failed = []
    broken = Service(Settings(model=str(tmp_path / "missing.gguf")), failed.append)
    assert not broken.wait(10) and "missing.gguf" in str(failed[0])
    with pytest.raises(Bw24Error, match="could not be loaded"):
        broken.ready()
    broken.close()


def test_settings_come_from_options_and_variables(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret-key-1\n")
    wanted = {"host": "0.0.0.0", "port": "9000", "alias": "a, b", "api_key_file": str(keys), "cors": "https://x", "cache_ram": "64", "parallel": "4",
              "queue": "9", "drain": "2.5", "lenient": "1", "log_prompts": "1", "model": "m.gguf", "threads": "3"}
    environ = {flags.BY_NAME[k].variable: v for k, v in wanted.items()}
    from_variables = from_environment(environ)
    parser, words = argparse.ArgumentParser(), []
    flags.add_options(parser, settings_module.NAMES)
    for name, value in wanted.items():
        words += [flags.BY_NAME[name].option] + ([] if flags.BY_NAME[name].type is bool else [value])
    args = parser.parse_args(words)
    flags.settle(args, settings_module.NAMES)
    assert from_args(args) == from_variables
    assert (from_variables.host, from_variables.port, from_variables.aliases, from_variables.cache_ram) == ("0.0.0.0", 9000, ("a", "b"), 64 << 20)
    assert from_variables.queue == 9 and from_variables.drain == 2.5 and from_variables.lenient and from_variables.engine["threads"] == 3
    assert len(from_variables.keys) == 1 and from_environment({}).host == "127.0.0.1" and not from_environment({}).keys
