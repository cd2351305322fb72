"""Replies held to a JSON schema, a regular expression or a grammar: which tokens may come next. Owns the translation to llguidance, which
is imported when first needed (pip install bw24[grammar]). Knows no requests, no engine, and no way of writing calls (grammar_calls).

The grammar begins after the thinking block, which is free; where tools may be called, a call is allowed in its format's form.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import Bw24Error
from .grammar_calls import BLANKS, calls, escaped, laid_out

if TYPE_CHECKING:
    from .tokenizer import Tokenizer
    from .toolcalls import Format

MAX_SOURCE = 1 << 18  # characters of a schema or grammar; compiling is bounded by llguidance's own limits


@dataclass(frozen=True)
class Wish:
    """What a reply must look like. body: {"json": schema}, {"regex": text}, {"lark": text} or {"gbnf": text}; None: any text.

    tools: (name, schema of the arguments, strict). calls: "none", "auto" (text or calls; those of strict tools keep to their schema) or
    "required". many: more than one call is allowed.
    """

    body: Mapping[str, Any] | None = None
    tools: tuple[tuple[str, Mapping[str, Any], bool], ...] = ()
    calls: str = "none"
    many: bool = True
    thinking: bool = False  # the reply starts inside the thinking block

    @property
    def free(self) -> bool:
        """Whether nothing is asked for that a grammar must enforce."""
        strict = self.calls == "auto" and any(strict for _, _, strict in self.tools)
        return self.body is None and self.calls != "required" and not strict


def load() -> Any:
    """The llguidance package. Bw24Error names the extra where it is missing."""
    try:
        import llguidance
    except ImportError:
        raise Bw24Error("grammars and JSON schemas need the package llguidance: pip install 'bw24[grammar]'") from None
    return llguidance


class _Wrapped:
    """A vocabulary as llguidance reads it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, visible: Collection[int]):
        self.eos_token_id = min(tokenizer.eog_ids) if tokenizer.eog_ids else tokenizer.eos_id
        self.tokens = [tokenizer.piece(i) for i in range(tokenizer.n_tokens)]
        self.special_token_ids = [i for i in range(tokenizer.n_tokens) if tokenizer.is_special(i) and i not in visible]
        self._encode = tokenizer.encode

    def __call__(self, text: Any) -> list[int]:
        return self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text, add_special=False)


class GrammarMatcher:
    """One reply's state (scheduler.Matcher)."""

    def __init__(self, matcher: Any, words: int):
        self._matcher, self._bits = matcher, np.zeros(words, np.uint32)
        self._where = self._bits.ctypes.data, self._bits.nbytes

    def mask(self) -> np.ndarray:
        """Packed u32 bits of the ids allowed next; valid until the next call."""
        self._matcher.unsafe_compute_mask_ptr(*self._where)
        if self._matcher.is_error():
            raise Bw24Error(f"grammar: {_line(self._matcher.get_error())}")
        return self._bits

    def forced(self) -> list[int]:
        """The ids that follow, where the grammar leaves one text and the vocabulary one way to write it: the first is all that the mask allows."""
        return self._matcher.compute_ff_tokens()

    def allows(self, token: int) -> bool:
        """Whether the mask allows one id; costs less than making it."""
        forced = self._matcher.compute_ff_tokens()
        return token == forced[0] if forced else self._matcher.validate_tokens([token]) == 1

    def try_accept(self, token: int) -> bool | None:
        """As accept where the mask allows the id; None where it does not, and nothing has moved."""
        forced = self._matcher.compute_ff_tokens()
        if (forced and token != forced[0]) or self._matcher.try_consume_tokens([token]) != 1:
            return None
        return self._matcher.is_stopped()

    def accept(self, token: int) -> bool:
        """True where the reply is complete."""
        if not self._matcher.consume_token(token):
            raise Bw24Error(f"grammar: {_line(self._matcher.get_error())}")
        return self._matcher.is_stopped()


class Grammars:
    """Compiles wishes for one vocabulary. n_vocab: columns of the logits. May be used by several threads at once."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int, known: Format, visible: Collection[int] = ()):
        self._tokenizer, self._n_vocab, self._known, self._visible = tokenizer, n_vocab, known, frozenset(visible)
        self._lock, self._vocabulary = threading.Lock(), None

    def _ready(self) -> Any:
        guidance = load()
        with self._lock:
            if self._vocabulary is None:
                wrapped = _Wrapped(self._tokenizer, self._visible)
                ends = {self._tokenizer.id_of(mark) for mark in self._known.ends} - {None}
                stops = sorted(self._tokenizer.eog_ids | ends) or [wrapped.eos_token_id]
                self._vocabulary = guidance.LLTokenizer(guidance.TokenizerWrapper(wrapped), n_vocab=self._n_vocab, eos_token=stops)
        return guidance

    def compile(self, wish: Wish) -> Compiled:
        """The grammar of a wish that is not free. Bw24Error says what is wrong with a schema or grammar."""
        guidance = self._ready()
        source = _source(guidance, wish, self._known)
        matcher = guidance.LLMatcher(self._vocabulary, source, log_level=0)
        if matcher.is_error():
            raise Bw24Error(_line(matcher.get_error()))
        return Compiled(matcher, -(-self._n_vocab // 32))


@dataclass(frozen=True)
class Compiled:
    """A compiled wish: `matcher()` begins a reply."""

    _matcher: Any = field(repr=False)
    _words: int

    def matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self._matcher.deep_copy(), self._words)


def _line(text: str) -> str:
    return " ".join(str(text).split())[:400]


def _source(guidance: Any, wish: Wish, known: Format) -> str:
    """The wish as llguidance's set of grammars: `start` in Lark syntax, which refers to the named others."""
    names, parts = [], []
    lines = []
    if wish.body is not None:
        parts.append({"name": "body", **_body(guidance, wish.body)})
        names.append("@body")
    if wish.calls in ("auto", "required") and wish.tools:
        call, rules, more = calls(wish.tools, known, wish.calls == "required" or wish.body is not None, wish.many)
        lines += rules
        parts += more
        names.append(call)
    head = ""
    if wish.thinking:
        lines.append(f"think[lazy]: /(?s:.*){escaped(known.think[1])}/")
        lines.append(f"blanks: {BLANKS}")
        head = "think blanks "
    lines.insert(0, f"start: {head}({' | '.join(names)})")
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *parts]})


def _body(guidance: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    (kind, value), = body.items()
    if len(value if isinstance(value, str) else json.dumps(value)) > MAX_SOURCE:
        raise Bw24Error(f"expected at most {MAX_SOURCE} characters")
    if kind == "json":
        return {"json_schema": laid_out(value)}
    if kind == "lark":
        return {"lark_grammar": value}
    if kind == "regex":
        return {"lark_grammar": f"start: /{guidance.regex_to_lark(value)}/"}
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return {"lark_grammar": gbnf_to_lark(value)}
    except Exception as error:  # the converter raises several kinds
        raise Bw24Error(f"GBNF: {_line(error)}") from None
