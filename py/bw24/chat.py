"""Conversations to prompts: a model's own chat template, rendered and encoded.

Knows nothing of requests or models; the template's text and the messages come from the caller.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import meta
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from .chat_sandbox import Environment, Limit
from .errors import Bw24Error

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

__all__ = ["ChatTemplate", "apply", "encode"]

MAX_SOURCE = 1 << 20  # characters of a template; the longest published ones have 20,000
RENDER_SECONDS = 10.0  # of computing. Milliseconds are usual, but Gemma 4's template looks back from each message: 800 take a second


def _line(text: object) -> str:
    """A template's or jinja2's message as one line of at most 2000 characters."""
    return " ".join(str(text)[:2000].split()) or "no message"


class ChatTemplate:
    """A compiled template. May be used by several threads at once.

    variables: the names the template reads that it does not set itself, so that a caller can refuse what would be ignored.
    Raises Bw24Error where the source does not compile.
    """

    def __init__(self, source: str, *, bos_token: str, eos_token: str, seconds: float = RENDER_SECONDS):
        if len(source) > MAX_SOURCE:
            raise Bw24Error(f"chat template: expected at most {MAX_SOURCE} characters, found {len(source)}")
        self.source, self._seconds = source, seconds
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._environment = Environment()
        try:
            tree = self._environment.parse(source)
            self.variables = frozenset(meta.find_undeclared_variables(tree))
            self._template = self._environment.from_string(source)
        except TemplateSyntaxError as error:
            raise Bw24Error(f"chat template, line {error.lineno}: {_line(error.message)}") from None
        except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
            raise Bw24Error(f"chat template: cannot be compiled: {type(error).__name__}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text. kwargs (`enable_thinking`, `reasoning_effort` ..., also bos_token, eos_token) reach the template as they are.

        A tool call's `arguments` should be an object, not its JSON text: most templates look into it.
        Raises Bw24Error: with the template's own words where it calls raise_exception, with a line number for any other failure.
        """
        values = {**self._tokens, "messages": messages, "add_generation_prompt": add_generation_prompt, **kwargs}
        if tools is not None:
            values["tools"] = tools
        budget = self._environment.budget
        budget.start(self._seconds)
        try:
            return self._environment.concat(self._template.generate(values))
        except Limit as error:
            raise Bw24Error(f"chat template{self._where(error)}: too expensive: {_line(error)}") from None
        except TemplateError as error:
            own = type(error) is TemplateError  # raise_exception's
            raise Bw24Error(_line(error) if own else f"chat template{self._where(error)}: {_line(error)}") from None
        except Exception as error:  # any Python error of the template's expressions, RecursionError and MemoryError included
            raise Bw24Error(f"chat template{self._where(error)}: {type(error).__name__}: {_line(error)[:200]}") from None
        finally:
            budget.stop()

    @staticmethod
    def _where(error: BaseException) -> str:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__, limit=-64) if frame.filename == "<template>"]
        return f", line {lines[-1]}" if lines else ""


def apply(tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
    """Token ids of a conversation: kwargs as for ChatTemplate.render.

    Special tokens in the text are parsed; one BOS stands in front where the vocabulary adds one, whether or not the template writes it; no
    EOS is added, for the prompt goes on.
    """
    return encode(tokenizer, template.render(messages, **kwargs))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a rendered conversation."""
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    if tokenizer.adds_bos:
        while ids[:1] == [tokenizer.bos_id]:
            del ids[0]
        ids.insert(0, tokenizer.bos_id)
    return ids
