"""Replies taken apart: every format's calls, every cut of the stream, and nothing lost where a call cannot be read."""

from __future__ import annotations

import random

import pytest

from bw24.toolcalls import (
    CALL,
    CONTENT,
    FORMATS,
    GENERIC,
    PLAIN,
    REASONING,
    Format,
    ReplyParser,
    announce,
    format_of,
    thinks_at_once,
    typed,
)

BY_NAME = {known.name: known for _, known in FORMATS} | {"generic": GENERIC, "plain": PLAIN}
TOOLS = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}}},
    "write": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "tags": {"type": "array"}}},
}
PARIS = ("weather", {"city": "Paris", "days": 3})


def run(known: Format, text: str, cuts: list[int] | None = None, tools=TOOLS, thinking=False):
    """(reasoning, content, calls) of a reply that arrives in pieces."""
    parser, out = ReplyParser(known, tools, thinking), []
    cuts = cuts or [len(text)]
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        out += parser.push(text[begin:end])
    out += parser.finish()
    join = lambda kind: "".join(p.text for p in out if p.kind == kind)  # noqa: E731
    return join(REASONING), join(CONTENT), [(p.call.name, p.call.arguments) for p in out if p.kind == CALL]


HY3_CALL = ("<tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n<arg_key:opensource>city</arg_key:opensource>\n"
            "<arg_value:opensource>Paris</arg_value:opensource>\n<arg_key:opensource>days</arg_key:opensource>\n"
            "<arg_value:opensource>3</arg_value:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>")
TAGS_CALL = ("<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n"
             "</tool_call>")
MINIMAX_CALL = ('<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
                '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>')
JSON_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
GEMMA_CALL = '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
DEEPSEEK_CALL = ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Paris\", \"days\": 3}<｜tool▁call▁end｜>"
                 "<｜tool▁calls▁end｜>")
R1_CALL = ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"city\": \"Paris\", \"days\": 3}\n```"
           "<｜tool▁call▁end｜><｜tool▁calls▁end｜>")
CASES = [
    ("deepseek", "</think>Sure." + DEEPSEEK_CALL, ("", "Sure.", [PARIS])),
    ("deepseek", "<think>hm</think>" + R1_CALL, ("hm", "", [PARIS])),
    ("deepseek", DEEPSEEK_CALL.replace("3}", "3"),
     ("", DEEPSEEK_CALL.replace("3}", "3").removeprefix("<｜tool▁calls▁begin｜>"), [])),
    ("hermes", "Let me look.\n" + JSON_CALL, ("", "Let me look.", [PARIS])),
    ("hermes", "<think>\nHm, so.\n</think>\n\n" + JSON_CALL + "\n" + JSON_CALL, ("Hm, so.", "", [PARIS, PARIS])),
    ("hermes", JSON_CALL.removesuffix("\n</tool_call>"), ("", "", [PARIS])),
    ("hermes", '<tool_call>{"name": "write", "arguments": {"text": "a </tool_call> b"}}</tool_call> ok',
     ("", "ok", [("write", {"text": "a </tool_call> b"})])),
    ("hermes", "<tool_call>oops</tool_call> and more", ("", "<tool_call>oops</tool_call> and more", [])),
    ("hermes", "a < b and <tool and </think", ("", "a < b and <tool and </think", [])),
    ("hermes", "  kept blanks \n", ("", "  kept blanks \n", [])),
    ("generic", JSON_CALL, ("", "", [PARIS])),
    ("generic", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 3}"}</tool_call>', ("", "", [PARIS])),
    ("qwen-tags", TAGS_CALL, ("", "", [PARIS])),
    ("qwen-tags", TAGS_CALL.removeprefix("<tool_call>\n"), ("", "", [PARIS])),
    ("qwen-tags", "text\n\n" + JSON_CALL, ("", "text", [PARIS])),
    ("qwen-tags", "<tool_call>\n<function=write>\n<parameter=path>\na.py\n</parameter>\n<parameter=text>\n"
     "x = '</parameter></function></tool_call>'\n\n  y\n\n</parameter>\n"
     "<parameter=tags>\n[1, \"b\"]\n</parameter>\n</function>\n</tool_call>",
     ("", "", [("write", {"path": "a.py", "text": "x = '</parameter></function></tool_call>'\n\n  y\n", "tags": [1, "b"]})])),
    ("qwen-tags", "<tool_call><function=weather><parameter=city>Paris</parameter><parameter=days>3</parameter></function></tool_call>",
     ("", "", [PARIS])),
    ("qwen-tags", "<tool_call>\n<function=write>\n<parameter=text>\n</parameter>\n"
     "<parameter=path>\nb\n</parameter>\n</function>\n</tool_call>",
     ("", "", [("write", {"text": "", "path": "b"})])),
    ("qwen-tags", "<tool_call>\n<function=none>\n</function>\n</tool_call>", ("", "", [("none", {})])),
    ("gemma", GEMMA_CALL, ("", "", [PARIS])),
    ("gemma", "<|channel>thought\nplan\n<channel|>Hello" + GEMMA_CALL + GEMMA_CALL, ("plan", "Hello", [PARIS, PARIS])),
    ("gemma", '<|tool_call>call:f{a:{b:[1,<|"|>x,}<|"|>,true,null],c:-1.5e3},d:[]}<tool_call|>',
     ("", "", [("f", {"a": {"b": [1, "x,}", True, None], "c": -1500.0}, "d": []})])),
    ("gemma", "Done.<channel|>", ("", "Done.", [])),
    ("hy3", "Sure." + HY3_CALL, ("", "Sure.", [PARIS])),
    ("minimax", "<think>\nok\n</think>\n\n" + MINIMAX_CALL, ("ok", "", [PARIS])),
    ("think", "<think>a</think>b", ("a", "b", [])),
    ("plain", " <think>a</think> \n", ("", " <think>a</think> \n", [])),
]


@pytest.mark.parametrize("name, text, expected", CASES)
def test_a_reply_is_taken_apart_the_same_way_however_it_is_cut(name, text, expected):
    known, rng = BY_NAME[name], random.Random(text)
    assert run(known, text) == expected
    assert run(known, text, list(range(1, len(text)))) == expected
    for _ in range(30):
        assert run(known, text, sorted(rng.sample(range(len(text)), min(5, len(text))))) == expected


def test_a_reply_that_starts_inside_the_thinking_block():
    known = BY_NAME["qwen-tags"]
    assert run(known, "so\n\nthen\n</think>\n\nHello\n", thinking=True) == ("so\n\nthen", "Hello\n", [])
    assert run(known, "never ends", thinking=True) == ("never ends", "", [])
    assert run(known, "call it:\n" + TAGS_CALL, thinking=True) == ("call it:", "", [PARIS])


def test_nothing_is_a_call_where_no_tools_were_given():
    for name, text, _ in CASES:
        _, content, calls = run(BY_NAME[name], text, tools=None)
        assert not calls
    assert run(BY_NAME["hermes"], JSON_CALL, tools=None)[1] == JSON_CALL


def test_half_marks_never_come_out():
    for name, text, _ in CASES[:5]:
        known, shown = BY_NAME[name], ""
        parser = ReplyParser(known, TOOLS)
        for char in text:
            shown += "".join(p.text for p in parser.push(char))
            assert not shown.endswith(("<tool_call", "<think", "</think", "<tool_cal"))


def test_an_endless_call_becomes_text():
    from bw24 import toolcalls

    text = "<tool_call>" + "x" * (toolcalls.MAX_CALL + 10)
    assert run(GENERIC, text, list(range(1000, len(text), 1000))) == ("", text, [])


@pytest.mark.parametrize("text, schema, value", [
    ("3", {"type": "integer"}, 3), ("3", {"type": "string"}, "3"), ("3.5", {"type": "integer"}, "3.5"), ("true", {"type": "boolean"}, True),
    ("True", {"type": "boolean"}, True), ("null", {"type": ["string", "null"]}, None), ('{"a": 1}', {"type": "object"}, {"a": 1}),
    ("[1", {"type": "array"}, "[1"), ("[1]", None, [1]), ("7", None, "7"), ("x", {"enum": ["x", "y"]}, "x"), ("5", {"enum": ["5"]}, "5"),
    ("2", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 2),
])
def test_raw_arguments_take_their_schemas_type(text, schema, value):
    assert typed(text, schema) == value and type(typed(text, schema)) is type(value)


def test_formats_are_found_by_their_templates(goldens):
    folder = goldens.parent / "templates"
    expected = {"Qwen-Qwen3-0.6B": "hermes", "Qwen3-Coder": "qwen-tags", "Qwen3.5-4B": "qwen-tags", "google-gemma-4-31B-it": "gemma",
                "tencent-Hy3": "hy3", "MiniMax-M2": "minimax", "deepseek-ai-DeepSeek-V3.1": "deepseek"}
    for name, known in expected.items():
        assert format_of((folder / f"{name}.jinja").read_text(encoding="utf-8")).name == known
    assert format_of(None) is PLAIN and format_of("{{ messages }}") is PLAIN


def test_a_prompt_that_ends_in_an_open_thinking_block_is_seen():
    known = BY_NAME["qwen-tags"]
    assert thinks_at_once(known, "<|im_start|>assistant\n<think>\n")
    assert not thinks_at_once(known, "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not thinks_at_once(known, "<|im_start|>user\n<think> is a tag<|im_end|>\n<|im_start|>assistant\n")
    assert not thinks_at_once(PLAIN, "<think>\n")


def test_templates_without_tools_get_them_as_text():
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    out = announce([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "sunny", "tool_call_id": "c"}],
                   [{"type": "function", "function": {"name": "weather", "parameters": TOOLS["weather"]}}])
    assert [m["role"] for m in out] == ["system", "user", "assistant", "user"]
    assert out[0]["content"].startswith("Be brief.\n\n") and '"weather"' in out[0]["content"]
    assert run(GENERIC, out[2]["content"])[2] == [("weather", {"city": "Paris"})]
    assert out[3]["content"] == "<tool_response>\nsunny\n</tool_response>"
