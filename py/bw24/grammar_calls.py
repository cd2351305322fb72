"""Grammars of tool calls, one way of writing them after the other: what `toolcalls` reads is what these let a model write. Owns the translation
of a tool's schema into each format; knows no matcher and no vocabulary.

A form is rules in Lark's syntax that refer to JSON schemas as grammars of their own, so that a schema's `$ref`s mean what they meant.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import Bw24Error
from .grammar_strings import bounded
from .toolcalls import DEEPSEEK_SEP, QUOTE, Format, kinds_of, resolved

BLANKS = "/[ \\n\\r\\t]*/"
LAYOUT = {"whitespace_pattern": "(\\n[ ]{0,40}|[ ])?"}  # between a document's parts: a model must not fill its reply with blanks
MAX_DEPTH = 32  # of a schema that is translated part by part

Tools = Sequence[tuple[str, Mapping[str, Any], bool]]  # name, schema of the arguments, strict


@dataclass
class Form:
    """How calls are written. opening: the mark that begins them; rest: what follows it, to the end of the closing mark. again: what stands between
    a call and a next opening mark, None where one pair of marks holds all calls. parts: JSON schemas, as llguidance's named grammars."""

    opening: str
    rest: str
    again: str | None
    rules: list[str] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)

    def schema(self, name: str, schema: Any) -> str:
        """A reference to a JSON schema."""
        self.parts.append({"name": name, "json_schema": laid_out(schema)})
        return f"@{name}"


def laid_out(schema: Any) -> dict[str, Any]:
    """A schema with the layout that documents may have."""
    if not isinstance(schema, Mapping):
        return {"allOf": [schema], "x-guidance": LAYOUT}
    return {"type": "object", "x-guidance": LAYOUT} if not schema else {**schema, "x-guidance": LAYOUT}


def quoted(text: str) -> str:
    """A text as it stands, as a string in Lark."""
    return json.dumps(text, ensure_ascii=False)


def escaped(mark: str) -> str:
    """A mark as part of a regular expression in Lark."""
    return "".join(c if c.isalnum() or c in "<>_:" else "\\n" if c == "\n" else "\\" + c for c in mark)


def calls(tools: Tools, known: Format, required: bool, many: bool) -> tuple[str, list[str], list[dict[str, Any]]]:
    """(name of the rule, rules, further grammars): nothing but calls where they are required, else calls between free text. Raises Bw24Error."""
    make = FORMS.get(known.name)
    if make is None:
        raise Bw24Error(f"calls cannot be enforced in this model's format ({known.name}); tool_choice auto without strict works")
    form = make(tools, known, many)
    opening, rules = quoted(form.opening), [*form.rules, f"gap: {BLANKS}"]
    if required:
        more = f" ({form.again} call)*" if many and form.again is not None else ""  # "": nothing stands between
        return "calls", [f"calls: call{more}", f"call: {opening} {form.rest}", *rules], form.parts
    shape = "call* TEXT" if many else "(call | TEXT)"
    return "calls", [f"calls: {shape}", f"head[lazy]: TEXT {opening}", f"call: head {form.rest}", "TEXT: /(?s:.*)/", *rules], form.parts


# ---- JSON: an object with name and arguments


def _json(tools: Tools, known: Format, many: bool) -> Form:
    opening, closing = known.call
    form = Form(opening, f"gap one gap {quoted(closing)}", "gap")
    for t, (name, schema, _) in enumerate(tools):
        arguments = form.schema(f"arguments_{t}", schema)
        words = ["{", json.dumps("name"), ":", json.dumps(name), ",", json.dumps("arguments"), ":"]
        form.rules.append(f"f_{t}: {' gap '.join(quoted(w) for w in words)} gap {arguments} gap {quoted('}')}")
    form.rules.append(f"one: {_choice(f'f_{t}' for t in range(len(tools)))}")
    return form


def _deepseek(tools: Tools, known: Format, many: bool) -> Form:
    """V3.1's way: a name, a mark, the arguments as JSON."""
    outer, (opening, closing) = known.noise, known.call
    form = Form(outer[0], f"item{'+' if many else ''} {quoted(outer[1])}", None, [f"item: {quoted(opening)} one {quoted(closing)} {BLANKS}"])
    for t, (name, schema, _) in enumerate(tools):
        form.rules.append(f"f_{t}: {quoted(name + DEEPSEEK_SEP)} {form.schema(f'arguments_{t}', schema)}")
    form.rules.append(f"one: {_choice(f'f_{t}' for t in range(len(tools)))}")
    return form


def _choice(names: Any) -> str:
    return f"({' | '.join(names)})"


# ---- tags round each argument: strings are text up to the closing tag, other values JSON


@dataclass(frozen=True)
class _Tags:
    """function, key: written before a call's and an argument's parts, {} for the name; end: closes a value, `after` follows it; close: the call."""

    function: str
    key: str
    end: str
    after: str
    close: str


QWEN = _Tags("<function={}>\n", "<parameter={}>\n", "\n</parameter>", "\n", "</function>")
HY3 = _Tags("{}<tool_sep:opensource>\n", "<arg_key:opensource>{}</arg_key:opensource>\n<arg_value:opensource>", "</arg_value:opensource>", "\n", "")
MINIMAX = _Tags('<invoke name="{}">\n', '<parameter name="{}">', "</parameter>", "\n", "</invoke>")


def _tagged(tools: Tools, tags: _Tags, form: Form) -> Form:
    """The rule `one`: a call of one of the tools, its arguments in the order of the schema."""
    form.rules.append(f"raw[lazy]: /(?s:.*){escaped(tags.end)}/")
    end, after = quoted(tags.end), quoted(tags.after)
    for t, (name, schema, _) in enumerate(tools):
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        shared = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
        pieces = [quoted(tags.function.format(name))]
        for p, (key, value) in enumerate(properties.items()):
            rule, meant = f"p_{t}_{p}", resolved(value, schema)
            kinds = kinds_of(meant)
            if kinds == ["string"] and meant.get("enum"):
                inner = f"{_choice(quoted(v) for v in meant['enum'])} {end}"
            elif kinds and "string" not in kinds:
                inner = f"{form.schema(f'v_{t}_{p}', {**shared, **value})} {end}"
            elif kinds == ["string"] and (text := bounded(meant, tags.end, escaped(tags.end))):
                inner = f"{rule}_text"
                form.rules.append(f"{inner}[lazy]: {text}")
            else:
                inner = "raw"
            form.rules.append(f"{rule}: {quoted(tags.key.format(key))} {inner} {after}")
            pieces.append(rule if key in required else f"{rule}?")
        form.rules.append(f"f_{t}: {' '.join([*pieces, *([quoted(tags.close)] if tags.close else [])])}")
    form.rules.append(f"one: {_choice(f'f_{t}' for t in range(len(tools)))}")
    return form


def _qwen(tools: Tools, known: Format, many: bool) -> Form:
    return _tagged(tools, QWEN, Form(known.call[0], f"gap one gap {quoted(known.call[1])}", "gap"))


def _hy3(tools: Tools, known: Format, many: bool) -> Form:
    outer, (opening, closing) = known.noise, known.call
    form = Form(outer[0], f'"\\n" item{"+" if many else ""} {quoted(outer[1])}', None, [f"item: {quoted(opening)} one {quoted(closing)} {BLANKS}"])
    return _tagged(tools, HY3, form)


def _minimax(tools: Tools, known: Format, many: bool) -> Form:
    form = Form(known.call[0], f'"\\n" item{"+" if many else ""} {quoted(known.call[1])}', None, ['item: one "\\n"'])
    return _tagged(tools, MINIMAX, form)


# ---- Gemma's own notation: bare keys, strings between marks, nested without limit


class _Values:
    """Rules for values of a tool's schema in Gemma's notation. Strings and numbers keep to their schema."""

    def __init__(self, form: Form, prefix: str, root: Mapping[str, Any]):
        self.form, self.prefix, self.root = form, prefix, root
        self.count, self.refs = 0, {}

    def rule(self, body: str) -> str:
        self.count += 1
        name = f"{self.prefix}_{self.count}"
        self.form.rules.append(f"{name}: {body}")
        return name

    def of(self, schema: Any, depth: int = 0) -> str:
        """An expression for a value. Raises Bw24Error."""
        if depth > MAX_DEPTH:
            raise Bw24Error(f"a schema nested deeper than {MAX_DEPTH}")
        if not isinstance(schema, Mapping):
            return "any"
        if "$ref" in schema:
            return self._ref(schema["$ref"], depth)
        if "enum" in schema or "const" in schema:
            return _choice(quoted(written(v)) for v in schema.get("enum", [schema.get("const")]))
        for key in ("anyOf", "oneOf"):
            if schema.get(key):
                return _choice(self.of(one, depth + 1) for one in schema[key])
        if len(schema.get("allOf") or ()) == 1:
            return self.of(schema["allOf"][0], depth + 1)
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return _choice(self.of({**schema, "type": kind}, depth + 1) for kind in kinds)
        if kinds == "string":
            text = bounded(schema, QUOTE, escaped(QUOTE))
            if text is None:
                return "string"
            name = self.rule(f"{quoted(QUOTE)} {self.prefix}_{self.count + 1}_text")
            self.form.rules.append(f"{name}_text[lazy]: {text}")
            return name
        if kinds == "array":
            return self._array(schema, depth)
        if kinds == "object" or "properties" in schema:
            return self.members(schema, depth) if schema.get("properties") else "object"
        return self.form.schema(f"{self.prefix}_v{len(self.form.parts)}", schema) if kinds else "any"

    def _ref(self, ref: Any, depth: int) -> str:
        """A schema elsewhere in the tool's; it may hold itself."""
        if ref in self.refs:
            return self.refs[ref]
        found = resolved({"$ref": ref}, self.root)
        if found is None:
            raise Bw24Error(f"$ref {str(ref)[:80]}: not in the schema")
        self.count += 1
        name = self.refs[ref] = f"{self.prefix}_{self.count}"
        self.form.rules.append(f"{name}: {self.of(found, depth + 1)}")
        return name

    def _array(self, schema: Mapping[str, Any], depth: int) -> str:
        item, least, most = self.of(schema.get("items"), depth + 1), schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return self.rule(f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"')

    def members(self, schema: Mapping[str, Any], depth: int = 0) -> str:
        """An object with some of the known keys, with commas only between them; in the order in which the chat template shows them."""
        required, first, later = schema.get("required") or [], "", ""  # what may follow where nothing and where something was written
        for key, value in sorted((schema.get("properties") or {}).items(), key=lambda one: one[0].lower(), reverse=True):
            one = self.rule(f"{quoted(key if _bare(key) else QUOTE + key + QUOTE)} \":\" {self.of(value, depth + 1)}")
            if key in required:
                first, later = f"{one} {later}".strip(), f'"," {one} {later}'.strip()
            else:
                first = f"({f'{one} {later}'.strip()} | {first})" if first else f"({f'{one} {later}'.strip()})?"
                later = f'("," {one})? {later}'.strip()
            first, later = self.rule(first), self.rule(later)
        return self.rule(f'"{{" {first} "}}"'.replace("  ", " "))


def _bare(key: str) -> bool:
    return bool(key) and not set(key) & set(":,{}[] \n\"<|>")


def written(value: Any) -> str:
    """A value in Gemma's notation."""
    if isinstance(value, str):
        return QUOTE + value + QUOTE
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k if _bare(k) else QUOTE + k + QUOTE}:{written(v)}" for k, v in value.items()) + "}"
    return "[" + ",".join(map(written, value)) + "]" if isinstance(value, list) else json.dumps(value)


def _gemma(tools: Tools, known: Format, many: bool) -> Form:
    quote = quoted(QUOTE)
    form = Form(known.call[0], f"one {quoted(known.call[1])}", "", [
        f"string: {quote} text", f"text[lazy]: /(?s:.*){escaped(QUOTE)}/", 'key: /[A-Za-z0-9_.-]+/', 'pair: key ":" any',
        'object: "{" (pair ("," pair)*)? "}"', 'list: "[" (any ("," any)*)? "]"',
        'any: string | object | list | "true" | "false" | "null" | @number'])
    form.schema("number", {"type": "number"})
    for t, (name, schema, _) in enumerate(tools):
        values = _Values(form, f"g_{t}", schema)
        body = values.members(schema) if schema.get("properties") else '"{}"'
        form.rules.append(f"f_{t}: {quoted(f'call:{name}')} {body}")
    form.rules.append(f"one: {_choice(f'f_{t}' for t in range(len(tools)))}")
    return form


FORMS: dict[str, Callable[[Tools, Format, bool], Form]] = {
    "hermes": _json, "generic": _json, "qwen-tags": _qwen, "hy3": _hy3, "minimax": _minimax, "gemma": _gemma, "deepseek": _deepseek}
