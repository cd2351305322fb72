"""Whole replies of the chat formats, written mark by mark from what they should mean: cut at every byte, each comes out as that."""

from __future__ import annotations

import codecs
import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from bw24.toolcalls import CALL, CONTENT, FORMATS, REASONING, ReplyParser

BY_NAME = {known.name: known for _, known in FORMATS}
TOOLS = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}}},
    "write": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "tags": {"type": "array"},
                                               "mode": {"type": ["integer", "null"]}, "meta": {"type": "object"}}},
    "now": {"type": "object", "properties": {}},
}
Reply = tuple[str, str, list[tuple[str, dict[str, Any]]]]  # reasoning, content, calls

CALLS: list[list[tuple[str, dict[str, Any]]]] = [
    [],
    [("weather", {"city": "Paris", "days": 3})],
    [("now", {})],
    [("weather", {"city": "Zürich – 東京 🌧", "days": -1, "exact": True}), ("weather", {"city": "", "days": 0, "exact": False})],
    [("write", {"path": "a/b.py", "text": "if a < b and c > d:\n    print('<tag>')\n\n\treturn {1: [2]}", "tags": [1, "b", {"c": None}]})],
    [("write", {"path": "x", "text": "{\"name\": \"weather\", \"arguments\": {}}", "mode": None}), ("now", {})],
    [("write", {"meta": {"depth": {"list": [1.5, -2e3, True, False, None]}, "s": "a,b:c"}, "path": "ö"})],
]
SAID = ["", "Let me look.", "Of 3 < 4 <too> little\n\n- naïve ✓\n- {\"a\": 1}", "First line.\nSecond line; 50 % done, <3."]
THOUGHTS = ["", "The user wants\n\nthe weather: <b>3</b> days, déjà vu."]


def raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def thought(opening: str, closing: str, text: str) -> str:
    return f"{opening}\n{text}\n{closing}\n\n" if text else ""


def qwen(reply: Reply) -> str:
    calls = ["<tool_call>\n<function=" + name + ">\n" + "".join(f"<parameter={k}>\n{raw(v)}\n</parameter>\n" for k, v in arguments.items())
             + "</function>\n</tool_call>" for name, arguments in reply[2]]
    return thought("<think>", "</think>", reply[0]) + "\n\n".join(x for x in (reply[1], "\n".join(calls)) if x)


def gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma_value(v)}" for k, v in value.items()) + "}"
    return "[" + ",".join(map(gemma_value, value)) + "]" if isinstance(value, list) else json.dumps(value)


def gemma(reply: Reply) -> str:
    opening = f"<|channel>thought\n{reply[0]}\n<channel|>" if reply[0] else ""
    return opening + reply[1] + "".join(f"<|tool_call>call:{name}{gemma_value(arguments)}<tool_call|>" for name, arguments in reply[2])


def hy3(reply: Reply) -> str:
    o = ":opensource>"
    calls = [f"<tool_call{o}{name}<tool_sep{o}\n" + "".join(f"<arg_key{o}{k}</arg_key{o}\n<arg_value{o}{raw(v)}</arg_value{o}\n"
                                                            for k, v in arguments.items()) + f"</tool_call{o}" for name, arguments in reply[2]]
    block = f"<tool_calls{o}\n" + "\n".join(calls) + f"\n</tool_calls{o}" if calls else ""
    return thought("<think" + o, "</think" + o, reply[0]) + reply[1] + block


def minimax(reply: Reply) -> str:
    calls = [f'<invoke name="{name}">\n' + "".join(f'<parameter name="{k}">{raw(v)}</parameter>\n' for k, v in arguments.items()) + "</invoke>"
             for name, arguments in reply[2]]
    return thought("<think>", "</think>", reply[0]) + "\n".join(
        x for x in (reply[1], "<minimax:tool_call>\n" + "\n".join(calls) + "\n</minimax:tool_call>" if calls else "") if x)


def deepseek(reply: Reply) -> str:
    mark = lambda words: f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"  # noqa: E731
    calls = "".join(mark("tool call begin") + name + mark("tool sep") + json.dumps(arguments, ensure_ascii=False) + mark("tool call end")
                    for name, arguments in reply[2])
    block = mark("tool calls begin") + calls + mark("tool calls end") if calls else ""
    return thought("<think>", "</think>", reply[0]) + reply[1] + block


WRITERS: dict[str, Callable[[Reply], str]] = {"qwen-tags": qwen, "gemma": gemma, "hy3": hy3, "minimax": minimax, "deepseek": deepseek}
REPLIES: list[Reply] = list(itertools.product(THOUGHTS, SAID, CALLS))


def parse(name: str, data: bytes, cuts: list[int]) -> Reply:
    """What a reply means that arrives in pieces of bytes; as in the engine, a character is handed on when it is whole."""
    parser, decoder, out = ReplyParser(BY_NAME[name], TOOLS), codecs.getincrementaldecoder("utf-8")(), []
    for begin, end in itertools.pairwise([0, *cuts, len(data)]):
        out += parser.push(decoder.decode(data[begin:end]))
    out += parser.finish()
    join = lambda kind: "".join(p.text for p in out if p.kind == kind)  # noqa: E731
    return join(REASONING), join(CONTENT), [(p.call.name, p.call.arguments) for p in out if p.kind == CALL]


def test_there_are_enough_replies():
    assert len(REPLIES) >= 40 and len({WRITERS["gemma"](r) for r in REPLIES}) == len(REPLIES)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("number", range(len(REPLIES)))
def test_a_reply_cut_at_every_byte_means_what_was_written(name, number):
    reply = REPLIES[number]
    data = WRITERS[name](reply).encode()
    assert parse(name, data, []) == reply
    assert parse(name, data, list(range(1, len(data)))) == reply
    for cut in range(1, len(data)):
        assert parse(name, data, [cut]) == reply, data[max(0, cut - 20) : cut + 20]
    rng = random.Random(number)
    for _ in range(10):
        assert parse(name, data, sorted(rng.sample(range(len(data) + 1), min(4, len(data))))) == reply


@pytest.mark.parametrize("name", WRITERS)
def test_no_piece_ends_inside_a_mark(name):
    """What has come out at any moment is the beginning of what comes out in the end: nothing is taken back, no half mark is shown."""
    for number, reply in enumerate(REPLIES):
        text, parser, shown = WRITERS[name](reply), ReplyParser(BY_NAME[name], TOOLS), {REASONING: "", CONTENT: ""}
        for char in text:
            for part in parser.push(char):
                if part.kind != CALL:
                    shown[part.kind] += part.text
            assert reply[0].startswith(shown[REASONING]) and reply[1].startswith(shown[CONTENT]), (number, shown)


@pytest.mark.parametrize("name", WRITERS)
def test_a_reply_broken_off_anywhere_shows_only_its_beginning(name):
    """Calls that are whole come out; an unfinished one is text or, where only its closing mark is missing, a call."""
    reply: Reply = ("", "So:", [("weather", {"city": "Bonn", "days": 2}), ("write", {"path": "p", "text": "t"})])
    data = WRITERS[name](reply).encode()
    for end in range(len(data)):
        _, content, calls = parse(name, data[:end], [])
        assert calls == reply[2][: len(calls)] and content[:3] == "So:"[: len(content[:3])]
