"""What requests may say: one table per endpoint. Owns names, ranges and reasons for refusal; knows not what is done with the values."""

from __future__ import annotations

from .fields import Bool, Choice, Dict, Either, Free, Int, Kind, List, Number, Only, Record, Refused, Tagged, Text

SEED = Int(-(1 << 63), (1 << 64) - 1)
MANY = 1 << 40  # a limit of tokens beyond every context: taken, and cut to what fits
NO_IMAGES = "this server runs text models only"
HINT = "accepted: its meaning is satisfied already"


class _Id(Kind):
    """A key of logit_bias: a token id in decimal digits, with its bias."""

    def check(self, value, path, context=None):
        value = Number(-100, 100).check(value, path)
        digits = path.rsplit(".", 1)[1]
        if not (digits.isascii() and digits.isdigit() and len(digits) < 10):
            Int(0, 1 << 30).check(digits, path)
        return value

    def schema(self):
        return Number(-100, 100).schema()


# ---- what all generating endpoints share

SAMPLING: dict[str, Kind] = {
    "temperature": Number(0, 2).says("0: always the likeliest token; default 1"),
    "top_p": Number(0, 1).says("keep the likeliest tokens that hold this share of probability"),
    "top_k": Int(0, 1 << 24).says("keep the K likeliest tokens; 0: all"),
    "min_p": Number(0, 1).says("drop tokens below this share of the likeliest one's probability"),
    "repetition_penalty": Number(0.01, 100).says("divide or multiply the logits of tokens seen; 1: off"),
    "presence_penalty": Number(-2, 2).says("subtract from the logits of tokens seen"),
    "frequency_penalty": Number(-2, 2).says("subtract for each time a token was seen"),
    "logit_bias": Dict(_Id(), keys="^[0-9]{1,9}$").says("token id -> value added to its logit"),
    "seed": SEED.says("the same seed and request give the same reply; default: a fresh one"),
}
STOPS = Either({str: Text(1, 1000), list: List(Text(1, 1000), 0, 64)}, "a string or an array of strings")
COMMON: dict[str, Kind] = {
    "model": Text(1, 400).says("the model's name or an alias; default: the model served"),
    "stream": Bool(),
    "stream_options": Record({"include_usage": Bool(), "include_obfuscation": Only(False, why="chunks are not padded")}),
    "n": Int(1, 16).says("replies to the prompt; each has the seed plus its index"),
    "stop": STOPS.says("end the reply before this text"),
    "cache_prompt": Bool().says("false: neither use nor keep this prompt's computation; the reply is the same"),
    "ignore_eos": Bool().says("go on past the model's end tokens, up to max_tokens"),
    "user": Text().says(HINT),
}

# ---- OpenAI: chat/completions

_CACHE = Record({"type": Only("ephemeral", why="prompts are cached in memory"), "ttl": Choice("5m", "1h")}).says(HINT)
_PART = Tagged({"text": Record({"text": Text().need(), "cache_control": _CACHE})},
               {"image_url": NO_IMAGES, "input_audio": NO_IMAGES, "file": NO_IMAGES, "video_url": NO_IMAGES, "image": NO_IMAGES})
_ANSWER_PART = Tagged({"text": Record({"text": Text().need(), "cache_control": _CACHE}), "refusal": Record({"refusal": Text().need()})},
                      {"image_url": NO_IMAGES})
_CONTENT = Either({str: Text(), list: List(_PART)}, "a string or an array of parts")
_CALL = Tagged({"function": Record({
    "id": Text(0, 200), "index": Int(0, 4096),
    "function": Record({"name": Text(1, 200).need(),
                        "arguments": Either({str: Text(), dict: Free()}, "a JSON object as string")}).need()})},
    default="function")
_NAME = Text(0, 200).says("reaches the template as it is")
_EMPTY_LIST = Only([], why="annotations are not known to the model")
MESSAGE = Tagged({
    "system": Record({"content": _CONTENT.need(), "name": _NAME}),
    "developer": Record({"content": _CONTENT.need(), "name": _NAME}),
    "user": Record({"content": Either({str: Text(), list: List(_PART)}, "a string or an array of parts").need(), "name": _NAME}),
    "assistant": Record({
        "content": Either({str: Text(), list: List(_ANSWER_PART)}, "a string or an array of parts"),
        "name": _NAME, "tool_calls": List(_CALL),
        "reasoning_content": Text(), "reasoning": Text(), "refusal": Text(), "annotations": _EMPTY_LIST,
        "audio": Refused(NO_IMAGES), "function_call": Refused("deprecated; use tool_calls")}),
    "tool": Record({"content": _CONTENT.need(), "tool_call_id": Text(0, 200), "name": _NAME}),
}, {"function": "deprecated; use role tool"}, key="role")
FUNCTION = Record({"name": Text(1, 64).need(), "description": Text(), "parameters": Free(),
                   "strict": Bool().says("true: arguments are held to the schema")})
TOOL = Tagged({"function": Record({"function": FUNCTION.need(), "cache_control": _CACHE})}, {"custom": "only function tools are supported"})
_NAMED = Tagged({"function": Record({"function": Record({"name": Text(1, 64).need()}).need()})},
                {"custom": "only function tools are supported", "allowed_tools": "send the allowed tools only"})
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
RESPONSE_FORMAT = Tagged({
    "text": Record({}),
    "json_object": Record({"schema": Free()}),
    "json_schema": Record({"json_schema": Record({
        "name": Text(1, 200).need(), "schema": Free().need(), "description": Text(), "strict": Bool()}).need()}),
    "regex": Record({"pattern": Text(1, 1 << 18).need()}),
    "grammar": Record({"grammar": Text(1, 1 << 18).need(), "syntax": Choice("lark", "gbnf")}),
})
CHAT = Record({
    "messages": List(MESSAGE, 1, 1 << 16).need(),
    **COMMON, **SAMPLING,
    "max_tokens": Int(0, MANY).says("the same as max_completion_tokens"),
    "max_completion_tokens": Int(0, MANY).says("most tokens of a reply, reasoning included; default: the context's rest"),
    "logprobs": Bool(), "top_logprobs": Int(0, 20),
    "response_format": RESPONSE_FORMAT,
    "tools": List(TOOL, 0, 512),
    "tool_choice": Either({str: Choice("none", "auto", "required"), dict: _NAMED}, "none, auto, required or a named function"),
    "parallel_tool_calls": Bool().says("false: the reply ends after its first call"),
    "reasoning_effort": Choice(*EFFORTS).says("how much the model thinks, where its template can say so"),
    "chat_template_kwargs": Free().says("variables of the model's chat template"),
    "metadata": Dict(Text()).says(HINT), "safety_identifier": Text().says(HINT), "prompt_cache_key": Text().says(HINT),
    "prompt_cache_options": Record({"mode": Only("implicit", why="every prompt is cached"), "ttl": Choice("30m")}).says(HINT),
    "prompt_cache_retention": Choice("in_memory", "in-memory", "24h").says(HINT),
    "service_tier": Only("auto", "default", why="there is one tier").says(HINT),
    "store": Only(False, why="replies are not stored").says(HINT),
    "modalities": Only(["text"], why=NO_IMAGES).says(HINT),
    "verbosity": Only("medium", why="models here have no such control").says(HINT),
    "moderation": Refused("there is no moderation model"), "audio": Refused(NO_IMAGES), "web_search_options": Refused("there is no web search"),
    "prediction": Refused("predicted outputs are not supported"),
    "functions": Refused("deprecated; use tools"), "function_call": Refused("deprecated; use tool_choice"),
})

# ---- OpenAI: completions

_IDS = List(Int(0, 1 << 30), 1)


class _Prompt(Kind):
    """A string, token ids, or an array of either."""

    def check(self, value, path, context=None):
        if isinstance(value, str):
            return [Text().check(value, path)]
        if not isinstance(value, list) or not value:
            Either({str: Text(), list: _IDS}, "a string, token ids, or an array of them").check(value or None, path)
        if all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            return [_IDS.check(value, path)]
        if len(value) > 16:
            List(Text(), 1, 16).check(value, path)
        one = Either({str: Text(), list: _IDS}, "a string or token ids")
        return [one.check(v, f"{path}.{i}") for i, v in enumerate(value)]

    def schema(self):
        text, ids = {"type": "string"}, {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
        return {"anyOf": [text, ids, {"type": "array", "items": {"anyOf": [text, ids]}, "minItems": 1, "maxItems": 16}]}


COMPLETION = Record({
    "prompt": _Prompt().need().says("text, token ids, or up to 16 of either"),
    **COMMON, **SAMPLING,
    "max_tokens": Int(0, MANY).says("default 16"),
    "logprobs": Int(0, 20).says("log probabilities of the tokens and of so many alternatives"),
    "echo": Bool().says("begin the text with the prompt"),
    "best_of": Only(1, why="use n"), "suffix": Refused("filling in the middle is not supported"),
    "response_format": RESPONSE_FORMAT,
})

# ---- Anthropic: messages

_TEXT_BLOCK = Record({"text": Text().need(), "cache_control": _CACHE, "citations": Only([], why="there are no citations")})
_MEDIA = {"image": NO_IMAGES, "document": NO_IMAGES, "search_result": "search results are not supported"}
_RESULT = Either({str: Text(), list: List(Tagged({"text": _TEXT_BLOCK}, _MEDIA))}, "a string or an array of blocks")
_FOREIGN = {**_MEDIA, "server_tool_use": "there are no server tools", "redacted_thinking": "thinking is never redacted here"}
_SHOWN = {"display": Only("summarized", why="thinking is shown whole")}
BLOCK = Tagged({
    "text": _TEXT_BLOCK,
    "thinking": Record({"thinking": Text().need(), "signature": Text(), "cache_control": _CACHE}),
    "tool_use": Record({"id": Text(1, 200).need(), "name": Text(1, 200).need(), "input": Free().need(), "cache_control": _CACHE,
                        "caller": Tagged({"direct": Record({})})}),
    "tool_result": Record({"tool_use_id": Text(1, 200).need(), "content": _RESULT, "is_error": Bool(), "cache_control": _CACHE}),
}, _FOREIGN)
_ANTHROPIC_TOOL = Tagged({"custom": Record({
    "name": Text(1, 128).need(), "description": Text(), "input_schema": Free().need(), "cache_control": _CACHE,
    "strict": Bool().says("true: the input is held to the schema"),
    "allowed_callers": Only(["direct"], why="the model calls tools itself"), "defer_loading": Only(False, why="there is no tool search"),
    "input_examples": Refused("put the examples in the description"),
    "eager_input_streaming": Bool().says("accepted: a call is always sent whole, once it is valid")})}, default="custom")
_PARALLEL = {"disable_parallel_tool_use": Bool()}
_ANTHROPIC_BASE: dict[str, Kind] = {
    "messages": List(Tagged({role: Record({"content": Either({str: Text(), list: List(BLOCK)}, "a string or an array of blocks").need()})
                             for role in ("user", "assistant")}, key="role"), 1, 1 << 16).need(),
    "model": Text(1, 400).need(),
    "system": Either({str: Text(), list: List(Tagged({"text": _TEXT_BLOCK}))}, "a string or an array of text blocks"),
    "tools": List(_ANTHROPIC_TOOL, 0, 512),
    "tool_choice": Tagged({"auto": Record(_PARALLEL), "any": Record(_PARALLEL), "none": Record({}),
                           "tool": Record({"name": Text(1, 128).need(), **_PARALLEL})}),
    "thinking": Tagged({"enabled": Record({"budget_tokens": Int(1, MANY).need(), **_SHOWN}), "adaptive": Record(_SHOWN),
                        "disabled": Record({})}),
    "output_config": Record({"effort": Choice("low", "medium", "high", "max"),
                             "format": Tagged({"json_schema": Record({"schema": Free().need()})})}),
    "cache_control": _CACHE,
}
MESSAGES = Record({
    **_ANTHROPIC_BASE,
    "max_tokens": Int(1, MANY).need(), "stream": Bool(), "stop_sequences": List(Text(1, 1000), 0, 64),
    "temperature": Number(0, 1), "top_p": Number(0, 1), "top_k": Int(0, 1 << 24),
    "metadata": Record({"user_id": Text()}).says(HINT), "service_tier": Choice("auto", "standard_only").says(HINT),
    "speed": Only("standard", why="there is one speed").says(HINT), "inference_geo": Refused("inference happens where this server runs"),
    "diagnostics": Refused("cache misses are not explained"), "user_profile_id": Refused("there are no profiles"),
    "workspace_id": Refused("there are no workspaces"), "container": Refused("there are no containers"),
    "mcp_servers": Refused("there are no server tools"),
})
COUNT = Record(_ANTHROPIC_BASE)

# ---- text

TOKENIZE = Record({"content": Text().need(), "add_special": Bool(), "parse_special": Bool(), "with_pieces": Bool()})
DETOKENIZE = Record({"tokens": List(Int(0, 1 << 30)).need(), "skip_special": Bool()})
APPLY = Record({k: CHAT.fields[k] for k in ("messages", "model", "tools", "reasoning_effort", "chat_template_kwargs")}
               | {"add_generation_prompt": Bool()})
