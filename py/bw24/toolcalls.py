"""Replies taken apart as they stream: reasoning, text, tool calls. Owns the marks that each chat format uses and the rule that no half mark
and no half call ever comes out. Knows no requests and no tokens.

A format is found by what a model's chat template looks like. A call comes out whole, once its arguments are complete; what looks like a
call but cannot be read as one comes out as text, so nothing a model said is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REASONING, CONTENT, CALL = "reasoning", "content", "call"
MAX_CALL = 1 << 18  # characters of one call that are waited for; beyond that it is text


@dataclass(frozen=True)
class Call:
    """One tool call: arguments is an object."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A piece of a reply. kind REASONING or CONTENT: `text`; kind CALL: `call`."""

    kind: str
    text: str = ""
    call: Call | None = None


Schemas = Mapping[str, Mapping[str, Any]]  # tool name -> JSON schema of its arguments
Reader = Callable[[str, Schemas], "list[Call] | None"]  # the text between the marks -> calls, None where it is not (yet) a call


@dataclass(frozen=True)
class Format:
    """The marks of one chat format. `think`: (open, close). `call`: (open, close) round what `read` reads; `bare`: the same where the model
    leaves the outer mark out, and these belong to what is read. `noise`: marks that only wrap others; they never come out. `inner`: special
    tokens inside a call. `ends`: tokens that end a reply beside the vocabulary's own. `closed`: only the closing mark tells that a call is whole."""

    name: str
    think: tuple[str, str] | None = None
    call: tuple[str, str] | None = None
    bare: tuple[str, str] | None = None
    read: Reader | None = None
    noise: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    closed: bool = False


# ---- readers: one per way of writing a call


def read_json(body: str, schemas: Schemas) -> list[Call] | None:
    """`{"name": ..., "arguments": {...}}`, as Hermes, Qwen 2.5 and 3 and many others write it; `parameters` is Llama's word."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    calls = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            return None
        arguments = item.get("arguments", item.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                return None
        if not isinstance(arguments, dict):
            return None
        calls.append(Call(item["name"], arguments))
    return calls or None


def resolved(schema: Any, root: Any) -> Any:
    """A schema in place of its `$ref`, one of the `root` that holds it; None where that leads nowhere."""
    for _ in range(32):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        start, *words = str(schema["$ref"]).split("/")
        schema = root if start == "#" else None
        for word in words:
            schema = schema.get(word.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return None


def kinds_of(schema: Any) -> list[str]:
    """The types that a schema allows, as far as it names them."""
    if not isinstance(schema, Mapping):
        return []
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else list(kinds or [])
    if not kinds:
        kinds = [k for option in schema.get("anyOf", schema.get("oneOf", [])) if isinstance(option, Mapping) and (k := option.get("type"))]
    if not kinds and "enum" in schema:
        kinds = ["string"] if all(isinstance(v, str) for v in schema["enum"]) else []
    return kinds


def typed(text: str, schema: Any) -> Any:
    """A raw argument as its schema's type: strings as they are, everything else as JSON where it is that."""
    kinds = kinds_of(schema)
    try:
        value = json.loads(text.strip())
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text) if kinds and "string" not in kinds else text
    fits = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "object": dict, "array": list, "null": type(None)}
    if "string" in kinds and not (value is None and "null" in kinds):
        return text
    if not kinds:
        return value if isinstance(value, (dict, list)) else text
    return value if any(isinstance(value, fits.get(k, ())) for k in kinds) else text


def _arguments(pairs: Sequence[tuple[str, str]], schema: Mapping[str, Any] | None) -> dict[str, Any]:
    properties = (schema or {}).get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    return {key: typed(value, resolved(properties.get(key), schema)) for key, value in pairs}


def _inner(value: str) -> str:
    """A value without the one line break that the format puts at each end."""
    return value.removeprefix("\n").removesuffix("\n")


# what begins on a line of its own ends on one; so closing marks inside a line of a value are part of it
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(?:(\n.*\n)|\n?|([^\n].*))</function>\s*\Z", re.S)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(?:\n(?:(.*?)\n)??|([^\n].*?)?)</parameter>\s*(?=<parameter=[^>\n]+>|\Z)", re.S)


def read_function_tags(body: str, schemas: Schemas) -> list[Call] | None:
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>`: Qwen3-Coder, Qwen 3.5. A value may contain the closing marks."""
    match = _FUNCTION.match(body)
    if not match:
        return None
    name, rest = match.group(1).strip(), (match.group(2) or match.group(3) or "").strip()
    pairs = [(m.group(1).strip(), m.group(2) or m.group(3) or "") for m in _PARAMETER.finditer(rest)]
    if _PARAMETER.sub("", rest).strip():
        return None
    return [Call(name, _arguments(pairs, schemas.get(name)))]


def read_function_or_json(body: str, schemas: Schemas) -> list[Call] | None:
    """Qwen 3.5's own form; the models fall back to the JSON form of their predecessors at times."""
    return read_function_tags(body, schemas) or read_json(body, schemas)


def read_keyed(body: str, schemas: Schemas) -> list[Call] | None:
    """`NAME<tool_sep>` and `<arg_key>K</arg_key><arg_value>V</arg_value>` pairs, each mark with `:opensource` at its end: Hy3."""
    name, sep, rest = body.partition("<tool_sep:opensource>")
    pattern = r"\s*<arg_key:opensource>(.*?)</arg_key:opensource>\s*<arg_value:opensource>(.*?)</arg_value:opensource>\s*"
    if not sep or re.sub(pattern, "", rest, flags=re.S).strip():
        return None
    return [Call(name.strip(), _arguments(re.findall(pattern, rest, re.S), schemas.get(name.strip())))]


_INVOKE = re.compile(r"<invoke name=\"?([^\">]+)\"?>(.*?)</invoke>", re.S)
_NAMED = re.compile(r"<parameter name=\"?([^\">]+)\"?>(.*?)</parameter>\s*(?=<parameter name=|\Z)", re.S)


def read_invoke(body: str, schemas: Schemas) -> list[Call] | None:
    """`<invoke name="N"><parameter name="K">V</parameter></invoke>`, several in one block: MiniMax-M2."""
    calls = []
    for name, rest in _INVOKE.findall(body):
        pairs = [(key, _inner(value)) for key, value in _NAMED.findall(rest.strip())]
        calls.append(Call(name, _arguments(pairs, schemas.get(name))))
    return None if not calls or _INVOKE.sub("", body).strip() else calls


QUOTE = '<|"|>'  # round Gemma's strings


class _Gemma:
    """`call:NAME{key:value,...}`: bare keys, strings between `<|"|>`, numbers, true, false, null, nested {} and []."""

    def __init__(self, text: str):
        self.text, self.at, self.depth = text, 0, 0

    def take(self, word: str) -> bool:
        found = self.text.startswith(word, self.at)
        self.at += len(word) if found else 0
        return found

    def need(self, word: str) -> None:
        if not self.take(word):
            raise ValueError(word)

    def until(self, stops: str) -> str:
        start = self.at
        while self.at < len(self.text) and self.text[self.at] not in stops:
            self.at += 1
        return self.text[start : self.at]

    def members(self, close: str) -> Any:
        self.depth += 1
        if self.depth > 64:
            raise ValueError("too deep")
        out: Any = {} if close == "}" else []
        while not self.take(close):
            if out:
                self.need(",")
            if close == "}":
                key = self.string() if self.take(QUOTE) else self.until(":,}")
                self.need(":")
                out[key.strip()] = self.value()
            else:
                out.append(self.value())
        self.depth -= 1
        return out

    def string(self) -> str:
        end = self.text.index(QUOTE, self.at)
        value, self.at = self.text[self.at : end], end + len(QUOTE)
        return value

    def value(self) -> Any:
        if self.take(QUOTE):
            return self.string()
        if self.take("{"):
            return self.members("}")
        if self.take("["):
            return self.members("]")
        return json.loads(self.until(",}]").strip())


def read_gemma(body: str, schemas: Schemas) -> list[Call] | None:
    """Gemma 4's form."""
    reader = _Gemma(body.strip())
    try:
        reader.need("call:")
        name = reader.until("{").strip()
        reader.need("{")
        arguments = reader.members("}")
    except (ValueError, RecursionError):
        return None
    return [Call(name, arguments)] if name and reader.at == len(reader.text) else None


def _section(words: str) -> str:
    """A mark as DeepSeek spells it: full-width bars, and for each blank the block that vocabularies write for one."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


DEEPSEEK_SEP = _section("tool sep")
_FENCED = re.compile(r"\s*([^\n`]+)\n```json\n(.*)\n```\s*", re.S)


def read_sectioned(body: str, schemas: Schemas) -> list[Call] | None:
    """`NAME` and its arguments as JSON with a mark between: DeepSeek V3.1. V3 and R1 write `function`, the mark, NAME and a fenced block."""
    name, sep, rest = body.partition(DEEPSEEK_SEP)
    fenced = _FENCED.fullmatch(rest) if name.strip() == "function" else None
    name, rest = fenced.groups() if fenced else (name, rest)
    try:
        arguments = json.loads(rest)
    except (ValueError, RecursionError):
        return None
    return [Call(name.strip(), arguments)] if sep and name.strip() and isinstance(arguments, dict) else None


# ---- formats


HERMES_CALL = ("<tool_call>", "</tool_call>")
THINK = ("<think>", "</think>")
PLAIN = Format("plain")
GENERIC = Format("generic", call=HERMES_CALL, read=read_json)  # for templates that take no tools: see announce
HERMES = Format("hermes", call=HERMES_CALL, read=read_json)
FORMATS: tuple[tuple[Callable[[str], bool], Format], ...] = (
    (lambda t: "<tool_sep" in t and ":opensource" in t,
     Format("hy3", ("<think:opensource>", "</think:opensource>"), ("<tool_call:opensource>", "</tool_call:opensource>"), None, read_keyed,
            ("<tool_calls:opensource>", "</tool_calls:opensource>"), ("<tool_sep:opensource>", "<arg_key:opensource>",
             "</arg_key:opensource>", "<arg_value:opensource>", "</arg_value:opensource>"), closed=True)),
    (lambda t: DEEPSEEK_SEP in t,
     Format("deepseek", THINK, (_section("tool call begin"), _section("tool call end")), None, read_sectioned,
            (_section("tool calls begin"), _section("tool calls end")), (DEEPSEEK_SEP,))),
    (lambda t: "<minimax:tool_call>" in t, Format("minimax", THINK, ("<minimax:tool_call>", "</minimax:tool_call>"), None, read_invoke)),
    (lambda t: "<|tool_call>" in t and "<|channel>" in t,
     Format("gemma", ("<|channel>thought", "<channel|>"), ("<|tool_call>", "<tool_call|>"), None, read_gemma, ("<channel|>",),
            ("<|channel>", QUOTE), ("<|tool_response>",))),
    (lambda t: "<function=" in t,
     Format("qwen-tags", THINK, HERMES_CALL, ("<function=", "</function>"), read_function_or_json)),
    (lambda t: "<tool_call>" in t, Format("hermes", THINK, HERMES_CALL, None, read_json)),
    (lambda t: "</think>" in t, Format("think", THINK)),
)


def format_of(template: str | None) -> Format:
    """The format that a chat template's source speaks; PLAIN where it shows no marks."""
    return next((known for test, known in FORMATS if test(template or "")), PLAIN)


def thinks_at_once(known: Format, prompt: str) -> bool:
    """Whether a prompt's text ends inside an open thinking block, so that the reply starts there."""
    if not known.think:
        return False
    opening, closing = known.think
    return prompt.rfind(opening) > max(prompt.rfind(closing), -1) and not prompt[prompt.rfind(opening) + len(opening) :].strip()


class ReplyParser:
    """One reply, streamed: `push` text, then `finish`. `tools`: schemas of the tools that may be called, None where a call is only text.

    thinking: the reply starts inside the thinking block. The parts, joined by kind, do not depend on how the text was cut.
    """

    def __init__(self, known: Format, tools: Schemas | None = None, thinking: bool = False):
        self.known, self.schemas = known, tools or {}
        self.calls = tools is not None and known.read is not None
        self._mode = REASONING if thinking else CONTENT
        self._held, self._spaces = "", ""  # text that may begin a mark; blanks that may be layout
        self._began, self._strip = False, thinking  # text came out in this mode; blanks before it are layout
        self._said = False  # content or a call came out
        self._mark, self._resume, self._searched = ("", ""), CONTENT, 0  # of the call that is waited for
        self._plain = not (known.think or known.noise or self.calls)

    @property
    def mode(self) -> str:
        """REASONING, CONTENT or CALL: what the next text belongs to."""
        return self._mode

    def push(self, text: str) -> list[Part]:
        """The parts that this text completes."""
        if self._plain:
            return [Part(CONTENT, text)] if text else []
        self._held += text
        out: list[Part] = []
        while self._advance(out):
            pass
        return merge(out)

    def finish(self) -> list[Part]:
        """What is left when the reply has ended: an unfinished mark is text, an unfinished call is a call if it can be read, else text."""
        out: list[Part] = []
        if self._mode == CALL:
            self._end_call(self._held, "", out, final=True)
        else:
            self._say(self._held, out)
        if self._mode == CONTENT and self._spaces and not (self._strip and not self._began):
            out.append(Part(CONTENT, self._spaces))
        self._held = self._spaces = ""
        return merge(out)

    def _marks(self) -> list[str]:
        known, marks = self.known, list(self.known.noise)
        if self._mode == REASONING:
            marks.append(known.think[1])
        elif known.think and not self._said:
            marks += known.think
        if self.calls:
            marks += [known.call[0], *((known.bare[0], known.call[1]) if known.bare else ())]
        return marks

    def _advance(self, out: list[Part]) -> bool:
        """One state change; False where more text is needed."""
        if self._mode == CALL:
            return self._in_call(out)
        marks = self._marks()
        at, mark = min(((at, -len(m), m) for m in marks if (at := self._held.find(m)) >= 0), default=(-1, 0, ""))[::2]
        if at < 0:
            keep = max((overlap(self._held, m) for m in marks), default=0)
            self._say(self._held[: len(self._held) - keep], out)
            self._held = self._held[len(self._held) - keep :]
            return False
        self._say(self._held[:at], out)
        rest = self._held[at + len(mark) :]
        if self.known.think and mark == self.known.think[0]:
            self._enter(REASONING)
        elif self.known.think and mark == self.known.think[1] and not self._said:
            self._enter(CONTENT)
        elif self.calls and mark == self.known.call[0]:
            self._mark, self._resume, self._mode, self._searched = self.known.call, self._mode, CALL, 0
        elif self.calls and self.known.bare and mark == self.known.bare[0]:
            self._mark, self._resume, self._mode, self._searched = ("", self.known.bare[1]), self._mode, CALL, 0
            rest = mark + rest
        self._held = rest
        return True

    def _enter(self, mode: str) -> None:
        self._mode, self._spaces, self._began, self._strip = mode, "", False, True

    def _in_call(self, out: list[Part]) -> bool:
        """Wait for a closing mark after which the call can be read; closing marks inside a value do not count."""
        close = self._mark[1]
        at = self._held.find(close, max(self._searched - len(close), 0))
        if at < 0:
            self._searched = len(self._held)
            if len(self._held) > MAX_CALL:
                return self._end_call(self._held, "", out, final=True)
            return False
        end = at + len(close)
        if not self._mark[0]:
            return self._end_call(self._held[:end], self._held[end:], out, length=end)
        return self._end_call(self._held[:at], self._held[end:], out, length=end)

    def _end_call(self, body: str, rest: str, out: list[Part], final: bool = False, length: int = 0) -> bool:
        calls = None if final and self.known.closed else self.known.read(body, self.schemas)
        if calls is None and not final:
            self._searched = length + len(self._mark[1])  # search on behind this mark
            return self._held.find(self._mark[1], length) >= 0 or len(self._held) > MAX_CALL
        if calls is None:
            self._mode = self._resume
            self._say(self._mark[0] + body, out)
            self._held = rest
            return bool(rest)
        out += [Part(CALL, call=call) for call in calls]
        self._said = True
        self._enter(CONTENT)
        self._held = rest
        return bool(rest)

    def _say(self, text: str, out: list[Part]) -> None:
        """Text of the present mode. Blanks next to marks are layout of the format and do not come out."""
        text = self._spaces + text
        if self._strip and not self._began:
            text = text.lstrip()
        body = text.rstrip()
        self._spaces = text[len(body) :]
        if body:
            self._began = True
            self._said = self._said or self._mode == CONTENT
            out.append(Part(self._mode, body))


def merge(parts: Sequence[Part]) -> list[Part]:
    """Neighbours of one kind as one part."""
    out: list[Part] = []
    for part in parts:
        if out and part.kind != CALL and out[-1].kind == part.kind:
            out[-1] = Part(part.kind, out[-1].text + part.text)
        else:
            out.append(part)
    return out


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0


ANNOUNCEMENT = """\
You can call tools. Their signatures:
<tools>
{tools}
</tools>
To call one, reply with a JSON object between tags, and nothing after it:
<tool_call>
{{"name": <name>, "arguments": <object>}}
</tool_call>"""


def announce(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation for a template that takes no tools: the system message describes them, calls and results become text (GENERIC)."""
    text = ANNOUNCEMENT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)) if tools else ""
    out = [dict(m) for m in messages]
    if text and out and out[0]["role"] == "system":
        out[0]["content"] = (out[0]["content"] + "\n\n" + text).strip()
    elif text:
        out.insert(0, {"role": "system", "content": text})
    for message in out:
        if message["role"] == "tool":
            message["role"], message["content"] = "user", f"<tool_response>\n{message['content']}\n</tool_response>"
        calls = message.pop("tool_calls", None) or []
        written = [json.dumps({"name": c["function"]["name"], "arguments": c["function"]["arguments"]}, ensure_ascii=False) for c in calls]
        message["content"] = "\n".join([*([message["content"]] if message["content"] else []),
                                        *(f"<tool_call>\n{w}\n</tool_call>" for w in written)])
    return out
