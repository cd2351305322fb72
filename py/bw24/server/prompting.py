"""From a conversation to a prompt: messages in normal form, tools, the template's variables, token ids. Owns what a template is given; knows no
endpoint and no engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import chat, toolcalls
from ..errors import Bw24Error
from .errors import ApiError, bad

if TYPE_CHECKING:
    from ..chat import ChatTemplate
    from ..tokenizer import Tokenizer

# what messages, tools and the server itself set; a caller may not
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
THINKING = {"enable_thinking": (False, True), "thinking": (False, True), "thinking_mode": ("disabled", "enabled")}  # variable: (off, on)


@dataclass
class Prompt:
    """A rendered conversation. text: what the template wrote; thinking: the reply starts inside the thinking block."""

    ids: list[int]
    text: str
    known: toolcalls.Format
    thinking: bool = False


@dataclass
class Conversation:
    """Messages in normal form: role, content (a string), and where given tool_calls (arguments an object), reasoning_content, tool_call_id,
    name. tools: as OpenAI writes them. effort: how much to think, "none" for not at all, None for the model's own way."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    effort: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True


def flatten(content: Any, key: str = "text") -> str:
    """Content parts as one string."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part.get(key, part.get("refusal", "")) for part in content)


def openai_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checked messages of a chat request, in normal form. Raises ApiError."""
    out = []
    for at, message in enumerate(messages):
        role = "system" if message["role"] == "developer" else message["role"]
        one: dict[str, Any] = {"role": role, "content": flatten(message.get("content"))}
        if one["role"] == "assistant" and not one["content"] and message.get("refusal"):
            one["content"] = message["refusal"]
        thought = message.get("reasoning_content", message.get("reasoning"))
        if thought is not None:
            one["reasoning_content"] = thought
        for key in ("name", "tool_call_id"):
            if key in message:
                one[key] = message[key]
        if message.get("tool_calls"):
            one["tool_calls"] = [_call(call, f"messages.{at}.tool_calls.{i}") for i, call in enumerate(message["tool_calls"])]
        out.append(one)
    return out


def _call(call: Mapping[str, Any], path: str) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise bad(f"{path}.function.arguments", "expected a JSON object as string, found no valid JSON") from None
    if not isinstance(arguments, dict):
        raise bad(f"{path}.function.arguments", "expected a JSON object as string, found another value")
    return {"id": call.get("id", ""), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def anthropic_messages(system: Any, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checked messages of a Messages request, in normal form.

    A system line that coding agents add for their own billing, and change with each request, is no part of the prompt.
    """
    texts = [system] if isinstance(system, str) else [block["text"] for block in system or []]
    texts = [t for t in texts if not t.startswith("x-anthropic-billing-header:")]
    out: list[dict[str, Any]] = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    for message in messages:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        out += _blocks(message["role"], blocks)
    return out


def _blocks(role: str, blocks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One message, after the tool results that it carries."""
    results = [{"role": "tool", "content": _result(b), "tool_call_id": b["tool_use_id"]} for b in blocks if b["type"] == "tool_result"]
    one: dict[str, Any] = {"role": role, "content": "".join(b["text"] for b in blocks if b["type"] == "text")}
    thoughts = [b["thinking"] for b in blocks if b["type"] == "thinking"]
    calls = [{"id": b["id"], "type": "function", "function": {"name": b["name"], "arguments": b["input"]}}
             for b in blocks if b["type"] == "tool_use"]
    if thoughts:
        one["reasoning_content"] = "".join(thoughts)
    if calls:
        one["tool_calls"] = calls
    return results + ([one] if one["content"] or calls or thoughts or not results else [])


def _result(block: Mapping[str, Any]) -> str:
    text = flatten(block.get("content"))
    return f"Error: {text}" if block.get("is_error") else text


class Prompter:
    """Makes prompts for one model. known: the marks of its replies; visible: ids of special tokens that are such marks."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None):
        self.tokenizer, self.template = tokenizer, template
        self.known = toolcalls.format_of(template.source if template else None)
        self.takes_tools = template is not None and "tools" in template.variables
        marks = [*(self.known.think or ()), *(self.known.call or ()), *self.known.noise, *self.known.inner]
        found = (tokenizer.id_of(mark) for mark in marks)
        self.visible = frozenset(i for i in found if i is not None and tokenizer.is_special(i))
        ends = (tokenizer.id_of(mark) for mark in self.known.ends)
        self.stop_ids = frozenset(tokenizer.eog_ids) | frozenset(i for i in ends if i is not None)

    def format_for(self, tools: Sequence[Any]) -> toolcalls.Format:
        """The marks of a reply to a request with these tools."""
        return toolcalls.GENERIC if tools and not self.takes_tools else self.known

    def variables(self, conversation: Conversation) -> dict[str, Any]:
        """Template variables beside messages and tools. Raises ApiError for one that the template does not read."""
        known = self.template.variables if self.template else frozenset()
        for key in conversation.kwargs:
            if key in RESERVED or key not in known:
                names = ", ".join(sorted(known - RESERVED)) or "none"
                raise bad(f"chat_template_kwargs.{key[:80]}", f"the model's chat template has no such variable; it reads {names}")
        out = dict(conversation.kwargs)
        if conversation.effort is not None:
            out |= {k: v for k, v in self.effort(conversation.effort).items() if k not in out}
        return out

    def effort(self, effort: str, param: str = "reasoning_effort") -> dict[str, Any]:
        """How this template is told how much to think. Raises ApiError naming `param` where it cannot be."""
        known, out = self.template.variables if self.template else frozenset(), {}
        for name, (off, on) in THINKING.items():
            if name in known:
                out[name] = off if effort == "none" else on
        if "reasoning_effort" in known:
            coarse = "no_think" in self.template.source  # its values are no_think, low and high
            scale = {"none": "no_think", "minimal": "low", "medium": "high", "xhigh": "high", "max": "high"} if coarse else {"max": "xhigh"}
            out["reasoning_effort"] = scale.get(effort, effort)
        if not out and effort != "none":
            raise bad(param, "this model's chat template cannot say how much to think; leave the field out, or send none")
        return out

    def prompt(self, conversation: Conversation) -> Prompt:
        """Render and encode. Raises ApiError with the template's own words where it refuses."""
        if self.template is None:
            raise ApiError(400, "the model file has no chat template; use /v1/completions", param="messages")
        messages, tools = conversation.messages, conversation.tools
        values = self.variables(conversation)
        if self.takes_tools and tools:
            values["tools"] = tools
        elif not self.takes_tools:
            messages = toolcalls.announce(messages, [t["function"] for t in tools])
        try:
            text = self.template.render(messages, add_generation_prompt=conversation.add_generation_prompt, **values)
            ids = chat.encode(self.tokenizer, text)
        except Bw24Error as error:
            raise ApiError(400, f"messages: {error}", param="messages") from None
        known = self.format_for(tools)
        return Prompt(ids, text, known, conversation.add_generation_prompt and toolcalls.thinks_at_once(known, text))
