"""Grammars on a small vocabulary: whatever random tokens the masks allow, the finished text is of the form that was asked for."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from bw24 import source, toolcalls
from bw24.errors import Bw24Error
from bw24.grammar import Grammars, Wish
from bw24.grammar_strings import FORMATS as STRINGS
from bw24.grammar_strings import bounded, whole
from tiny_model import VOCAB, write_tiny

pytest.importorskip("llguidance")
FIXTURES = Path(__file__).parent / "fixtures" / "text"
EOS, ENDS = 259, (257, 259)
HERMES, TAGS, HY3, MINIMAX, GEMMA, DEEPSEEK = (toolcalls.format_of(t) for t in (
    "<tool_call>", "<function=", "<tool_sep :opensource>", "<minimax:tool_call>", "<|tool_call> <|channel>", toolcalls.DEEPSEEK_SEP))
FORMATS = [HERMES, TAGS, toolcalls.GENERIC, DEEPSEEK, HY3, MINIMAX, GEMMA]
TRIP = {"type": "object", "$defs": {"stop": {"type": "object", "required": ["at"], "additionalProperties": False, "properties": {
            "at": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}, "next": {"$ref": "#/$defs/stop"}}}},
        "properties": {"note": {"type": ["string", "null"]}, "kind": {"enum": ["bus", "train"]}, "first": {"$ref": "#/$defs/stop"},
                       "extra": {}, "when": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "on time": {"type": "boolean"}},
        "required": ["kind", "first", "on time"], "additionalProperties": False}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"],
           "additionalProperties": False}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    with source.open_model(write_tiny(tmp_path_factory.mktemp("grammar") / "tiny.gguf")) as model:
        yield model.tokenizer


def walk(tokenizer, wish: Wish, seed: int = 0, known=HERMES, limit: int = 4000) -> str:
    """A text made of random allowed tokens, those that close something preferred so that it ends; marks that end free text come now and then."""
    matcher, rng, ids, planned = Grammars(tokenizer, VOCAB, known).compile(wish).matcher(), random.Random(seed), [], []
    encode = lambda text: tokenizer.encode(text, add_special=False)  # noqa: E731
    closing, marks = [encode(c)[0] for c in '"}]0e>/'], [encode(m) for m in (
        known.think[1] if known.think else "</think>", "\n</parameter>\n", "</arg_value:opensource>", "</parameter>", toolcalls.QUOTE)]
    for step in range(limit):
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        assert len(allowed) and allowed[-1] < VOCAB
        likely = [i for i in closing if bits[i]]
        if any(bits[e] for e in ENDS) and (rng.random() < 0.3 or step > limit // 2):
            return tokenizer.decode(ids)
        if not planned and rng.random() < 0.05:
            planned = list(rng.choice(marks))
        if planned and bits[planned[0]]:
            token = planned.pop(0)
        else:
            planned = []
            token = rng.choice(likely) if likely and rng.random() < 0.4 + step / limit else int(rng.choice(list(allowed)))
        if token in ENDS:
            return tokenizer.decode(ids)
        ids.append(token)
        if matcher.accept(token):
            return tokenizer.decode(ids)
    raise AssertionError(f"no end after {limit} tokens: {tokenizer.decode(ids)[-200:]!r}")


# ---- a small validator of the keywords that the schemas below use


def fits(value, schema, root) -> bool:
    if "$ref" in schema:
        target = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        return fits(value, target, root)
    if "anyOf" in schema:
        return any(fits(value, s, root) for s in schema["anyOf"])
    if "const" in schema:
        return value == schema["const"] and type(value) is type(schema["const"])
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema.get("type")
    if isinstance(kind, list):
        return any(fits(value, {**schema, "type": k}, root) for k in kind)
    if kind == "object":
        properties = schema.get("properties", {})
        return (isinstance(value, dict) and all(k in value for k in schema.get("required", []))
                and (schema.get("additionalProperties", True) is not False or set(value) <= set(properties))
                and all(fits(v, properties[k], root) for k, v in value.items() if k in properties))
    if kind == "array":
        return (isinstance(value, list) and schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 1 << 30)
                and all(fits(v, schema.get("items", {}), root) for v in value))
    if kind == "string":
        return (isinstance(value, str) and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 1 << 30)
                and re.search(schema.get("pattern", ""), value) is not None)
    if kind in ("integer", "number"):
        types = int if kind == "integer" else (int, float)
        return isinstance(value, types) and not isinstance(value, bool) and schema.get("minimum", value) <= value <= schema.get("maximum", value)
    return {"boolean": lambda: isinstance(value, bool), "null": lambda: value is None, None: lambda: True}[kind]()


def random_schema(rng: random.Random, depth: int = 0) -> dict:
    """A schema in the style of published tool and form definitions: nested objects, enums, references, patterns, bounds, optional members."""
    pattern = rng.choice(("^[a-z]{2,8}$", "^\\d{4}-\\d{2}$", "^[A-F0-9]+$"))
    leaves = [
        {"type": "string"}, {"type": "string", "maxLength": rng.randint(1, 12)}, {"type": "string", "pattern": pattern}, {"type": "boolean"},
        {"type": "integer", "minimum": -5, "maximum": rng.randint(0, 5000)}, {"type": "number", "minimum": 0, "maximum": 100}, {"type": "null"},
        {"enum": rng.sample(["red", "green", "blue", "a b", "é", 1, 2.5, None, True], 3)}, {"const": rng.choice(["x", 7, "y\"z"])},
        {"type": ["string", "null"]}, {"$ref": "#/$defs/point"},
    ]
    if depth > 2 or rng.random() < 0.4:
        return rng.choice(leaves)
    if rng.random() < 0.25:
        low = rng.randint(0, 2)
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": low, "maxItems": low + 2}
    if rng.random() < 0.2:
        return {"anyOf": [random_schema(rng, depth + 1), {"type": "boolean"}]}
    names = rng.sample(["name", "id", "kind", "size", "tags", "when", "note", "x-1", "größe"], rng.randint(1, 4))
    return {"type": "object", "properties": {n: random_schema(rng, depth + 1) for n in names}, "required": names[: rng.randint(0, len(names))],
            "additionalProperties": False}


@pytest.mark.parametrize("part", range(4))
def test_two_hundred_schemas_always_give_valid_output(tokenizer, part):
    for seed in range(50 * part, 50 * part + 50):
        rng = random.Random(seed)
        schema = random_schema(rng)
        while schema.get("type") != "object":
            schema = random_schema(rng)
        schema["$defs"] = {"point": {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"],
                                     "additionalProperties": False}}
        text = walk(tokenizer, Wish({"json": schema}), seed)
        assert fits(json.loads(text), schema, schema), (seed, schema, text)


@pytest.mark.parametrize("seed", range(5))
def test_forms(tokenizer, seed):
    assert re.fullmatch("[a-f]{3}(x|y)+z", walk(tokenizer, Wish({"regex": "[a-f]{3}(x|y)+z"}), seed))
    assert walk(tokenizer, Wish({"lark": 'start: "a" | "b"'}), seed) in ("a", "b")
    assert re.fullmatch("(ab)+", walk(tokenizer, Wish({"gbnf": 'root ::= "ab" root | "ab"'}), seed))
    text = walk(tokenizer, Wish({"json": WEATHER}, thinking=True), seed)
    assert set(json.loads(text.split("</think>", 1)[1])) <= {"city", "days"}


@pytest.mark.parametrize("known", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("seed", range(4))
def test_required_calls_are_calls(tokenizer, known, seed):
    schemas = {"weather": WEATHER, "stop": {}, "trip": TRIP}
    tools = tuple((name, schema, bool(schema)) for name, schema in schemas.items())
    for many in (True, False):
        text = walk(tokenizer, Wish(tools=tools, calls="required", many=many, thinking=bool(known.think) and seed == 3), seed, known)
        parser = toolcalls.ReplyParser(known, schemas, bool(known.think) and seed == 3)
        parts = parser.push(text) + parser.finish()
        assert all(p.kind == toolcalls.REASONING for p in parts if p.kind != toolcalls.CALL), text
        parts = [p for p in parts if p.kind == toolcalls.CALL]
        assert parts and (many or len(parts) == 1)
        for part in parts:
            if part.call.name == "weather":
                assert "city" in part.call.arguments and set(part.call.arguments) <= {"city", "days"}
                assert isinstance(part.call.arguments.get("days", 0), int)
            elif part.call.name == "trip":
                fitting(part.call.arguments)
            else:
                assert part.call.name == "stop" and (part.call.arguments == {} or known.name in ("hermes", "generic", "deepseek"))


ACCOUNT = {"type": "object", "required": ["code", "day", "name"], "additionalProperties": False, "properties": {
    "code": {"type": "string", "pattern": "^[A-C]{2}-\\d{3}$"}, "day": {"type": "string", "format": "date"},
    "name": {"type": "string", "minLength": 3, "maxLength": 6}, "path": {"type": "string", "pattern": "/b|^a$", "maxLength": 9}}}


@pytest.mark.parametrize("known", FORMATS, ids=lambda f: f.name)
def test_strings_keep_to_their_patterns_in_every_format(tokenizer, known):
    wish = Wish(tools=(("open", ACCOUNT, True),), calls="required", many=False)
    for seed in range(6):
        text = walk(tokenizer, wish, seed, known)
        parser = toolcalls.ReplyParser(known, {"open": ACCOUNT})
        (call,) = (p.call for p in parser.push(text) + parser.finish() if p.kind == toolcalls.CALL)
        got = call.arguments
        assert {"code", "day", "name"} <= set(got) <= set(ACCOUNT["properties"]) and re.fullmatch(STRINGS["date"], got["day"]), text
        assert re.fullmatch("[A-C]{2}-[0-9]{3}", got["code"]) and 3 <= len(got["name"]) <= 6 and re.search("/b|^a$", got.get("path", "a")), text


@pytest.mark.parametrize("pattern, yes, no", [
    ("^[a-z]{2}$", ["ab"], ["a", "abc", "aB"]), ("b", ["b", "abc", "\nb"], ["", "a"]), ("a|^b$", ["xa", "b"], ["xb", "bx"]),
    ("^x|y$", ["xz", "zy"], ["zx", "yz"]), ("^\\w+@\\w+\\.com$", ["me@here.com"], ["é@here.com", "me@here_com"]), ("^[^\\d/]$", ["a"], ["1", "/"]),
    ("^\\u00e9$", ["é"], ["e"]), ("^\\$[|]$", ["$|"], ["$"]), ("^[[]\\\\$", ["[\\"], ["["]), ("^(a|b|)$", ["a", ""], ["ab"])])
def test_patterns_mean_what_they_mean_in_a_schema(pattern, yes, no):
    meant = re.compile(whole(pattern).replace("\\u{00e9}", "\\u00e9"))
    for text, expected in [(t, True) for t in yes] + [(t, False) for t in no]:
        assert bool(meant.fullmatch(text)) is expected, text
        if text.isascii():
            assert bool(re.search(pattern, text)) is expected, text


def test_formats_of_strings():
    good = {"date": ["2024-02-29", "1999-12-31"], "time": ["23:59:59Z", "00:00:00.5+01:30"], "date-time": ["2024-02-29T10:00:00Z"],
            "duration": ["P3W", "P1Y2M", "PT5M", "P1DT2H"], "email": ["a.b@c.example"], "hostname": ["a-b.example"], "ipv4": ["255.0.10.1"],
            "ipv6": ["::", "::1", "fe80::1:2", "1:2:3:4:5:6:7:8", "1::"], "uuid": ["01234567-89ab-cdef-0123-456789abcdef"], "uri": ["http://a/b?c=%20"]}
    bad = {"date": ["2023-02-29", "2024-04-31", "1900-02-29"], "time": ["24:00:00Z", "1:00:00Z"], "date-time": ["2024-01-01 10:00:00Z"],
           "duration": ["P", "PT", "1D"], "email": ["a@", ".a@b"], "hostname": ["-a", "a..b"], "ipv4": ["256.0.0.1", "1.2.3", "01.2.3.4"],
           "ipv6": ["1:2", ":::", "1:2:3:4:5:6:7:8:9", "1::2::3"], "uuid": ["01234567"], "uri": ["/a", "a b:c"]}
    assert set(good) == set(bad) == set(STRINGS)
    for name, expression in STRINGS.items():
        assert all(re.fullmatch(expression, text) for text in good[name]) and not any(re.fullmatch(expression, text) for text in bad[name]), name
    for schema in ({"pattern": 5}, {"format": "postcode"}, {"minLength": -1}, {"maxLength": True}):
        with pytest.raises(Bw24Error):
            bounded(schema, "</p>", "</p>")
    assert bounded({"type": "string"}, "</p>", "</p>") is None


def fitting(trip: dict) -> None:
    assert {"kind", "first", "on time"} <= set(trip) <= set(TRIP["properties"])
    assert trip["kind"] in ("bus", "train") and isinstance(trip["on time"], bool) and isinstance(trip.get("when"), int | None)
    stop = trip["first"]
    while stop:
        assert len(stop["at"]) == 2 and all(isinstance(v, int | float) for v in stop["at"]) and set(stop) <= {"at", "next"}
        stop = stop.get("next")


# how each format writes the same calls (tests/test_toolcalls.py has them read)
WRITTEN = {
    "hy3": ("<tool_calls:opensource>\n<tool_call:opensource>trip<tool_sep:opensource>\n<arg_key:opensource>kind</arg_key:opensource>\n"
            "<arg_value:opensource>bus</arg_value:opensource>\n<arg_key:opensource>first</arg_key:opensource>\n<arg_value:opensource>"
            '{"at": [1, 2.5]}</arg_value:opensource>\n<arg_key:opensource>on time</arg_key:opensource>\n'
            "<arg_value:opensource>true</arg_value:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>"),
    "minimax": ('<minimax:tool_call>\n<invoke name="trip">\n<parameter name="kind">bus</parameter>\n<parameter name="first">{"at": [1, 2.5]}'
                '</parameter>\n<parameter name="on time">true</parameter>\n</invoke>\n</minimax:tool_call>'),
    "deepseek": ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>trip<｜tool▁sep｜>{"kind": "bus", "first": {"at": [1, 2.5]}, "on time": true}'
                 "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    "gemma": '<|tool_call>call:trip{first:{at:[1,2.5]},kind:<|"|>bus<|"|>,<|"|>on time<|"|>:true}<tool_call|>',
}


@pytest.mark.parametrize("known", [HY3, MINIMAX, GEMMA, DEEPSEEK], ids=lambda f: f.name)
def test_calls_are_written_as_their_templates_write_them(tokenizer, known):
    tools, text = (("trip", TRIP, True), ("stop", {}, False)), WRITTEN[known.name]
    forced = Wish(tools=tools, calls="required", many=False)
    assert follows(tokenizer, forced, text, known) and not follows(tokenizer, forced, "Sure. " + text, known)
    assert not follows(tokenizer, forced, text.replace("bus", "car"), known) and not follows(tokenizer, forced, text.replace("true", "maybe"), known)
    auto = Wish(tools=tools, calls="auto")
    assert follows(tokenizer, auto, "Sure. " + text, known) and follows(tokenizer, auto, "only text", known)
    assert not follows(tokenizer, auto, text.replace("trip", "walk"), known)
    parser = toolcalls.ReplyParser(known, {"trip": TRIP})
    assert [p.call.arguments for p in parser.push(text) + parser.finish()] == [{"kind": "bus", "first": {"at": [1, 2.5]}, "on time": True}]
    if known is GEMMA:
        assert follows(tokenizer, Wish(tools=tools, calls="required"), text + text, known)


def follows(tokenizer, wish: Wish, text: str, known=HERMES) -> bool:
    """Whether the masks allow a text, and its end."""
    matcher = Grammars(tokenizer, VOCAB, known).compile(wish).matcher()
    for token in tokenizer.encode(text, add_special=False):
        if not matcher.mask()[token >> 5] >> (token & 31) & 1:
            return False
        matcher.accept(token)
    return bool(matcher.mask()[EOS >> 5] >> (EOS & 31) & 1)


def test_strict_tools_leave_text_free_and_hold_their_calls(tokenizer):
    wish = Wish(tools=(("weather", WEATHER, True),), calls="auto")
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert not wish.free and Wish(tools=(("weather", WEATHER, False),), calls="auto").free and Wish().free
    assert follows(tokenizer, wish, "any text < at all") and follows(tokenizer, wish, "first " + call + call)
    assert not follows(tokenizer, wish, call.replace("city", "town")) and not follows(tokenizer, wish, call.replace("weather", "other"))
    single = Wish(tools=(("weather", WEATHER, True),), calls="auto", many=False)
    assert follows(tokenizer, single, call) and not follows(tokenizer, single, call + call)
    both = Wish({"json": WEATHER}, (("weather", WEATHER, True),), "auto")
    assert follows(tokenizer, both, '{"city": "Rome"}') and follows(tokenizer, both, call) and not follows(tokenizer, both, "text")


@pytest.mark.parametrize("name, known", [("hy3", HY3), ("minimax-m2", MINIMAX), ("gemma-4-31b-it", GEMMA)])
def test_calls_that_the_templates_render_are_allowed(tokenizer, name, known):
    """The call of tests/fixtures/text that holds a nested object and a text of two lines."""
    strings, nested = {"type": "array", "items": {"type": "string"}}, {"author": {"type": "object", "properties": {"name": {"type": "string"}}}}
    docs = {"type": "object", "required": ["query", "tags"], "properties": {
        "query": {"type": "string"}, "tags": strings, "filter": {"type": "object", "properties": {"Year": {"type": "integer"}, **nested}},
        "Limit": {"type": "number"}, "exact": {"type": "boolean"}}}
    cases = json.loads((FIXTURES / f"chat_{name}.json").read_text(encoding="utf-8"))["cases"]
    text = next(c["expected"] for c in cases if "second line 'q'" in (c["expected"] or "") and "search_docs" in c["expected"])
    inside, (opening, closing) = text.index("second line 'q'"), known.noise if known is HY3 else known.call
    call = text[text.rindex(opening, 0, inside) : text.index(closing, inside) + len(closing)]
    weather = ("get_weather", {"properties": {"city": {"type": "string"}, "unit": {"type": "string"}, "days": {"type": "integer"}}}, True)
    wish = Wish(tools=(weather, ("search_docs", docs, True)), calls="required")
    assert follows(tokenizer, wish, call, known)
    assert not follows(tokenizer, wish, call.replace("2024", '"now"'), known)


def test_the_layout_of_documents_is_bounded(tokenizer):
    wish = Wish({"json": WEATHER})
    assert follows(tokenizer, wish, '{\n    "city": "Rome",\n    "days": 3\n}') and follows(tokenizer, wish, '{"city":"Rome"}')
    assert not follows(tokenizer, wish, '{\n\n\n"city": "Rome"}') and not follows(tokenizer, wish, '{  "city": "Rome"}')


@pytest.mark.parametrize("body, message", [
    ({"json": {"type": "foo"}}, "Invalid type: foo"), ({"json": {"type": "object", "contains": {}}}, "contains"), ({"regex": "("}, "regex"),
    ({"lark": "start: ("}, "start"), ({"gbnf": 'root ::= "a'}, "GBNF"), ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
    ({"lark": "x" * 300_000}, "at most"),
    ({"json": {"type": "string", "pattern": "(?=a)b"}}, "regex"),
])
def test_what_cannot_be_enforced_is_an_error(tokenizer, body, message):
    with pytest.raises(Bw24Error) as caught:
        Grammars(tokenizer, VOCAB, HERMES).compile(Wish(body))
    assert message in str(caught.value) and len(str(caught.value)) < 600 and "\n" not in str(caught.value)


def test_calls_of_formats_without_a_grammar_are_refused_by_name(tokenizer):
    with pytest.raises(Bw24Error, match=r"format \(think\)"):
        Grammars(tokenizer, VOCAB, toolcalls.format_of("</think>")).compile(Wish(tools=(("f", {}, True),), calls="required"))
    loop = {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"allOf": [{"$ref": "#/nowhere"}]}}}
    with pytest.raises(Bw24Error, match="not in the schema"):
        Grammars(tokenizer, VOCAB, GEMMA).compile(Wish(tools=(("f", loop, True),), calls="required"))


@pytest.mark.parametrize("known", [HERMES, GEMMA], ids=lambda f: f.name)
def test_asking_for_one_token_is_looking_into_the_mask(tokenizer, known):
    wish = Wish(tools=(("open", ACCOUNT, True), ("trip", TRIP, True)), calls="required")
    matcher, rng = Grammars(tokenizer, VOCAB, known).compile(wish).matcher(), random.Random(4)
    seen = 0
    for _ in range(120):
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
        ids = {*rng.sample(range(VOCAB), 12), int(rng.choice(list(np.flatnonzero(bits)))), *ENDS}
        forced = matcher.forced()
        assert all(matcher.allows(i) == bool(bits[i]) for i in [*ids, *forced])
        assert not forced or list(np.flatnonzero(bits)) == forced[:1]
        seen += bool(forced)
        token = int(rng.choice(list(np.flatnonzero(bits))))
        refused = next(i for i in range(VOCAB) if not bits[i])
        assert matcher.try_accept(refused) is None and matcher.allows(token)
        if token in ENDS or matcher.try_accept(token):
            break
    assert seen
