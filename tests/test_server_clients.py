"""The official openai and anthropic packages against gunicorn as its user starts it: no workaround, no option but the address."""

from __future__ import annotations

import json
import threading
import time

import pytest

from serving import MODEL_NAME, Server
from tiny_model import TEMPLATE, write_tiny

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

HI = [{"role": "user", "content": "Hi"}]
# a template with tools and a thinking block, in the form of Qwen 3
THINKING = TEMPLATE.replace(
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "pattern": "^[A-Z][a-z]{2,5}$"},
                                           "days": {"type": "integer", "minimum": 1, "maximum": 9}},
          "required": ["city", "days"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": SCHEMA, "strict": True}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("clients")


@pytest.fixture(scope="module")
def server(folder):
    one = Server(write_tiny(folder / MODEL_NAME, context=4096), log=folder / "log")
    yield one.wait()
    assert one.stop() == 0


@pytest.fixture(scope="module")
def thinker(folder):
    """A second server, whose template thinks."""
    one = Server(write_tiny(folder / "thinker.gguf", context=4096, template=THINKING), log=folder / "log2", BW24_ALIAS="claude-sonnet,gpt-4o")
    yield one.wait()
    assert one.stop() == 0


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def thinking(thinker):
    return openai.OpenAI(base_url=thinker.url + "/v1", api_key="none", max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def claude(thinker):
    return anthropic.Anthropic(base_url=thinker.url, api_key="none", max_retries=0, timeout=30)


def say(client, **more):
    return client.chat.completions.create(**{"model": client.models.list().data[0].id, "messages": HI, "max_tokens": 16, "seed": 1, **more})


# ---- openai


def test_the_quick_start(client):
    reply = say(client)
    assert reply.choices[0].message.content and reply.usage.completion_tokens == 16 and reply.system_fingerprint


@pytest.mark.parametrize("more", [
    {}, {"temperature": 0}, {"temperature": 1.5, "top_p": 0.8}, {"n": 2}, {"stop": ["e"]}, {"stop": "\n"},
    {"presence_penalty": 1, "frequency_penalty": 1},
    {"logit_bias": {"65": 50}}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 5}, {"max_completion_tokens": 3, "max_tokens": None},
    {"user": "me", "metadata": {"a": "b"}, "store": False}, {"extra_body": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2}},
    {"response_format": {"type": "text"}},
], ids=str)
def test_every_setting_gives_the_same_whole_and_streamed(client, more):
    whole = say(client, **more)
    text, reasons, entries = {}, {}, {}
    for chunk in say(client, stream=True, stream_options={"include_usage": True}, **more):
        for choice in chunk.choices:
            text[choice.index] = text.get(choice.index, "") + (choice.delta.content or "")
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
            entries[choice.index] = entries.get(choice.index, []) + (choice.logprobs.content if choice.logprobs else [])
        usage = chunk.usage
    for choice in whole.choices:
        assert text[choice.index] == choice.message.content and reasons[choice.index] == choice.finish_reason
        assert entries[choice.index] == (choice.logprobs.content if choice.logprobs else [])
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_the_streaming_helper(client):
    held = {"extra_body": {"response_format": {"type": "regex", "pattern": "[a-z]{12}"}}}  # so that the reply ends by itself
    pytest.importorskip("llguidance")
    with client.chat.completions.stream(model="tiny.gguf", messages=HI, max_tokens=40, seed=3, **held) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds and "content.done" in kinds
    assert final.choices[0].message.content == say(client, max_tokens=40, seed=3, **held).choices[0].message.content


def test_schemas_through_the_client(client):
    pytest.importorskip("llguidance")
    wanted = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    for seed in range(6):
        value = json.loads(say(client, seed=seed, max_tokens=300, response_format=wanted).choices[0].message.content)
        assert set(value) == {"city", "days"} and 1 <= value["days"] <= 9 and value["city"][0].isupper()
    from pydantic import BaseModel

    class Flags(BaseModel):
        on: bool
        level: int

    parsed = client.chat.completions.parse(model="tiny.gguf", messages=HI, max_tokens=300, seed=2, response_format=Flags).choices[0].message.parsed
    assert isinstance(parsed, Flags)
    value = json.loads(say(client, seed=11, max_tokens=2000, temperature=0.3, response_format={"type": "json_object"}).choices[0].message.content)
    assert isinstance(value, dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_tools_through_the_client(client, thinking, choice):
    pytest.importorskip("llguidance")
    for who, name in ((client, "tiny.gguf"), (thinking, "thinker.gguf")):
        more = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}} if who is thinking else {}
        reply = say(who, model=name, max_tokens=600, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, **more)
        call = reply.choices[0].message.tool_calls[0]
        assert reply.choices[0].finish_reason == "tool_calls" and call.function.name == "weather"
        assert set(json.loads(call.function.arguments)) == {"city", "days"}
        messages = [*HI, reply.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        assert say(who, model=name, messages=messages, tools=TOOLS, tool_choice="none", **more).choices[0].message.tool_calls is None
        with who.chat.completions.stream(model=name, messages=HI, max_tokens=600, seed=1, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False,
                                         **more) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert streamed.message.tool_calls[0].function.arguments == call.function.arguments and streamed.finish_reason == "tool_calls"


def test_thinking_is_kept_apart(thinking):
    reply = say(thinking, max_tokens=400, seed=5, extra_body={"logit_bias": {"259": -100, "257": -100}})
    assert reply.choices[0].message.reasoning_content and reply.usage.completion_tokens_details.reasoning_tokens > 0
    text = "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in say(
        thinking, max_tokens=400, seed=5, stream=True, extra_body={"logit_bias": {"259": -100, "257": -100}}) if c.choices)
    assert text == reply.choices[0].message.reasoning_content
    assert not getattr(say(thinking, reasoning_effort="none").choices[0].message, "reasoning_content", None)
    pytest.importorskip("llguidance")
    wanted = {"type": "json_schema", "json_schema": {"name": "t", "schema": SCHEMA}}
    held = say(thinking, max_tokens=3000, seed=6, temperature=2, response_format=wanted, extra_body={"logit_bias": {"60": 60, "47": 60, "116": 20}})
    if held.choices[0].finish_reason == "stop":
        assert json.loads(held.choices[0].message.content)


def test_text_completions(client):
    first = client.completions.create(model="tiny.gguf", prompt="Once", max_tokens=8, seed=1, logprobs=2, echo=False)
    assert first.choices[0].text and len(first.choices[0].logprobs.tokens) == 8
    assert client.completions.create(model="tiny.gguf", prompt=[79, 110, 99, 101], max_tokens=8, seed=1).choices[0].text == first.choices[0].text
    many = client.completions.create(model="tiny.gguf", prompt=["Once", "Twice"], max_tokens=8, seed=1, n=2)
    assert [c.index for c in many.choices] == [0, 1, 2, 3] and many.choices[0].text == first.choices[0].text
    chunks = client.completions.create(model="tiny.gguf", prompt="Once", max_tokens=8, seed=1, stream=True)
    text = "".join(c.choices[0].text for c in chunks if c.choices)
    assert text == first.choices[0].text


def test_models_through_the_client(client, thinking):
    assert [m.id for m in client.models.list()] == ["tiny.gguf"] and client.models.retrieve("tiny.gguf").object == "model"
    assert [m.id for m in thinking.models.list()] == ["thinker.gguf", "claude-sonnet", "gpt-4o"]
    assert say(thinking, model="gpt-4o").model == "gpt-4o"


@pytest.mark.parametrize("more, kind, word", [
    ({"model": "gpt-9"}, "NotFoundError", "gpt-9"), ({"temperature": 9}, "BadRequestError", "temperature"),
    ({"messages": []}, "BadRequestError", "messages"),
    ({"n": 99}, "BadRequestError", "n"), ({"extra_body": {"nonsense": 1}}, "BadRequestError", "nonsense"),
    ({"store": True}, "BadRequestError", "store"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "BadRequestError", "4096"),
    ({"tool_choice": "required"}, "BadRequestError", "tool_choice"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}, "BadRequestError", "image_url"),
    ({"stream": True, "max_tokens": -1}, "BadRequestError", "max_tokens"), ({"logit_bias": {"123456": 1}}, "BadRequestError", "123456"),
], ids=str)
def test_errors_are_the_clients_own(client, more, kind, word):
    with pytest.raises(getattr(openai, kind)) as caught:
        say(client, **more)
    assert word in str(caught.value) and caught.value.body["message"] and caught.value.request_id


def test_leaving_a_stream_frees_its_place(server, client):
    for _ in range(4):
        stream = say(client, stream=True, max_tokens=4000, extra_body={"ignore_eos": True})
        for _ in zip(range(3), stream, strict=False):
            pass
        stream.close()
    assert server.idle(10)["rows"] == 0
    with pytest.raises(openai.APITimeoutError):
        hurried = client.with_options(timeout=0.05).chat.completions
        hurried.create(model="tiny.gguf", messages=HI, max_tokens=4000, n=16, extra_body={"ignore_eos": True})
    assert server.idle(10)["rows"] == 0


def test_many_clients_get_what_each_gets_alone(server, client):
    asked = [{"seed": i, "max_tokens": 20 + 3 * (i % 7), "messages": [{"role": "user", "content": "word " * (1 + 20 * (i % 5))}]} for i in range(16)]
    alone = [say(client, **one).choices[0].message.content for one in asked]
    got: list = [None] * 16

    def ask(i):
        got[i] = "".join(c.choices[0].delta.content or "" for c in say(client, stream=True, **asked[i]) if c.choices) if i % 2 else \
            say(client, **asked[i]).choices[0].message.content

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert got == alone


def test_the_asynchronous_client(server):
    import asyncio

    async def run():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            replies = await asyncio.gather(*(client.chat.completions.create(model="tiny.gguf", messages=HI, max_tokens=9, seed=i) for i in range(6)))
            stream = await client.chat.completions.create(model="tiny.gguf", messages=HI, max_tokens=9, seed=2, stream=True)
            text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
            return [r.choices[0].message.content for r in replies], text

    texts, streamed = asyncio.run(run())
    assert streamed == texts[2] and len(set(texts)) > 1


# ---- anthropic


def ask(claude, **more):
    """A request; the sampling fields, which newer versions of the package do not name any more, as further fields of the body."""
    extra = {k: more.pop(k) for k in ("temperature", "top_p", "top_k") if k in more}
    more["extra_body"] = {**extra, **more.get("extra_body", {})}
    return claude.messages.create(**{"model": "claude-sonnet", "messages": HI, "max_tokens": 24, "thinking": {"type": "disabled"}, **more})


def test_anthropics_quick_start(claude):
    reply = ask(claude, top_k=1)
    assert reply.type == "message" and reply.role == "assistant" and reply.content[0].type == "text" and reply.stop_reason == "max_tokens"
    assert reply.usage.output_tokens == 24 and reply.usage.input_tokens + reply.usage.cache_read_input_tokens > 10
    again = ask(claude, top_k=1)
    assert again.content[0].text == reply.content[0].text and again.usage.cache_read_input_tokens > 10
    with claude.messages.stream(model="claude-sonnet", messages=HI, max_tokens=24, extra_body={"top_k": 1},
                                thinking={"type": "disabled"}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == reply.content[0].text == final.content[0].text and final.stop_reason == "max_tokens" and final.usage.output_tokens == 24


def test_anthropics_fields(claude):
    system = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abcde;"},
              {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Look"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "ok"},
                                          {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome", "days": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}], "is_error": False},
                                     {"type": "text", "text": "And?"}]},
    ]
    tools = [{"name": "weather", "description": "d", "input_schema": SCHEMA}]
    reply = ask(claude, system=system, messages=messages, tools=tools, temperature=0.5, top_p=0.9, metadata={"user_id": "u"}, service_tier="auto",
                stop_sequences=["\n\n\n"])
    assert reply.stop_reason in ("max_tokens", "end_turn", "stop_sequence")
    counted = claude.messages.count_tokens(model="claude-sonnet", system=system, messages=messages, tools=tools, thinking={"type": "disabled"})
    assert counted.input_tokens == reply.usage.input_tokens + reply.usage.cache_read_input_tokens
    system[0]["text"] = "x-anthropic-billing-header: cc_version=1; cch=fffff;"
    assert ask(claude, system=system, messages=messages, tools=tools).usage.cache_read_input_tokens == counted.input_tokens - 1


def test_anthropics_tools_and_thinking(claude):
    pytest.importorskip("llguidance")
    tools = [{"name": "weather", "description": "d", "input_schema": SCHEMA}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}):
        reply = ask(claude, max_tokens=900, tools=tools, tool_choice={**choice, "disable_parallel_tool_use": True})
        block = reply.content[-1]
        assert block.type == "tool_use" and block.id.startswith("toolu_") and set(block.input) == {"city", "days"} and reply.stop_reason == "tool_use"
    with claude.messages.stream(model="claude-sonnet", messages=HI, max_tokens=900, tools=tools, thinking={"type": "disabled"},
                                tool_choice={"type": "any", "disable_parallel_tool_use": True}) as stream:
        block = stream.get_final_message().content[-1]
    assert block.type == "tool_use" and set(block.input) == {"city", "days"}
    # noise without a seed may end early; a reply that does not has 30 tokens of thinking, the forced mark and 30 - 8 tokens of text
    tries = (ask(claude, max_tokens=60, thinking={"type": "enabled", "budget_tokens": 30}) for _ in range(60))
    whole = next(t for t in tries if t.stop_reason == "max_tokens")
    assert [b.type for b in whole.content] == ["thinking", "text"] and len(whole.content[0].thinking) <= 30


@pytest.mark.parametrize("more, kind, word", [
    ({"model": "gpt-9"}, "NotFoundError", "gpt-9"), ({"max_tokens": 0}, "BadRequestError", "max_tokens"),
    ({"extra_body": {"temperature": 2}}, "BadRequestError", "temperature"),
    ({"extra_body": {"nonsense": 1}}, "BadRequestError", "nonsense"), ({"messages": [{"role": "system", "content": "x"}]}, "BadRequestError", "role"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "BadRequestError", "tools.0.type"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]}, "BadRequestError", "image"),
], ids=str)
def test_anthropics_errors_are_the_clients_own(claude, more, kind, word):
    with pytest.raises(getattr(anthropic, kind)) as caught:
        ask(claude, **more)
    assert word in str(caught.value) and caught.value.body["type"] == "error" and caught.value.request_id


def test_a_stream_that_waits_says_that_it_lives(folder):
    """One place for replies: the second request waits behind a long one, and its stream carries signs of life."""
    server = Server(folder / MODEL_NAME, log=folder / "log3", BW24_PARALLEL="1").wait()
    try:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        first = client.chat.completions.create(model="tiny.gguf", messages=HI, max_tokens=3000, stream=True, extra_body={"ignore_eos": True})
        next(first)
        started = time.monotonic()
        second = client.chat.completions.create(model="tiny.gguf", messages=HI, max_tokens=2, stream=True)
        assert next(second).choices[0].delta.role == "assistant" and time.monotonic() - started < 2  # at once, before its turn
        first.close()
        assert [c for c in second][-1].choices[0].finish_reason
    finally:
        assert server.stop() == 0


# ---- every option, whole and streamed: 96 calls of the openai package


OPTIONS = [
    {}, {"temperature": 0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 2, "top_p": 0.1}, {"n": 2}, {"n": 3, "temperature": 0.9},
    {"stop": "e"}, {"stop": ["e", "a", "zz"]}, {"stop": "\n", "n": 2}, {"max_tokens": 1}, {"max_tokens": 40}, {"max_completion_tokens": 5},
    {"frequency_penalty": 1.5}, {"presence_penalty": -1.5}, {"frequency_penalty": 0.5, "presence_penalty": 0.5, "temperature": 0},
    {"logit_bias": {"65": 100}, "temperature": 0}, {"logit_bias": {"65": -100, "66": 5}}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 5},
    {"logprobs": True, "top_logprobs": 20, "n": 2}, {"logprobs": True, "stop": "e"}, {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}, "max_tokens": 300},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}, "max_tokens": 300},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}, "max_tokens": 300, "n": 2},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}, "max_tokens": 300, "logprobs": True},
    {"extra_body": {"response_format": {"type": "regex", "pattern": "[a-f]{4,8}"}}},
    {"extra_body": {"response_format": {"type": "grammar", "grammar": 'root ::= "yes" | "no"', "syntax": "gbnf"}}},
    {"extra_body": {"top_k": 5}}, {"extra_body": {"min_p": 0.2}}, {"extra_body": {"repetition_penalty": 1.3}},
    {"extra_body": {"top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}, "temperature": 0.8, "top_p": 0.95},
    {"extra_body": {"cache_prompt": False}}, {"extra_body": {"ignore_eos": True}, "max_tokens": 30},
    {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False}, {"tools": TOOLS, "tool_choice": "none"},
    {"tools": TOOLS, "tool_choice": "required", "max_tokens": 600},
    {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 600},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}, "parallel_tool_calls": False, "max_tokens": 600},
    {"user": "someone"}, {"metadata": {"a": "b"}}, {"store": False}, {"service_tier": "auto"}, {"safety_identifier": "x", "prompt_cache_key": "y"},
    {"messages": [{"role": "developer", "content": "Be brief."}, *HI]},
    {"messages": [*HI, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": [{"type": "text", "text": "And?"}]}]},
    {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {
        "name": "weather", "arguments": '{"city": "Rome", "days": 1}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny."}], "tools": TOOLS},
]


def joined(stream, n: int) -> tuple[list[tuple], int]:
    """What the chunks of a stream say: (text, calls, tokens with log probabilities, reason) of each choice; completion tokens."""
    texts, calls, entries, reasons, tokens = [""] * n, [[] for _ in range(n)], [[] for _ in range(n)], [None] * n, 0
    for chunk in stream:
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            calls[choice.index] += [(c.function.name, c.function.arguments) for c in choice.delta.tool_calls or ()]
            entries[choice.index] += [(e.token, e.logprob) for e in (choice.logprobs.content if choice.logprobs else ())]
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    return list(zip(texts, calls, entries, reasons, strict=True)), tokens


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: ", ".join(o) or "none")
def test_each_option_gives_the_same_whole_and_streamed(client, option):
    body = {"model": MODEL_NAME, "messages": HI, "max_tokens": 16, "seed": 5, **option}
    whole = client.chat.completions.create(**body)
    found = [(c.message.content or "", [(t.function.name, t.function.arguments) for t in c.message.tool_calls or ()],
              [(e.token, e.logprob) for e in (c.logprobs.content if c.logprobs else ())], c.finish_reason) for c in whole.choices]
    streamed, tokens = joined(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}), body.get("n", 1))
    assert streamed == found and tokens == whole.usage.completion_tokens > 0
