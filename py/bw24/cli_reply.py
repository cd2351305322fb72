"""What gen and chat share: the settings of a draw, a conversation's ids, a reply streamed. Knows neither command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .cli_common import terminal_safe, write
from .errors import Bw24Error

if TYPE_CHECKING:
    from .generate import Generation
    from .sampling import SamplingParams
    from .source import Model

SAMPLING_FLAGS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop",
)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """SamplingParams from the settings; Bw24Error for a malformed --logit-bias or --stop."""
    from .sampling import SamplingParams

    if "" in args.stop:
        raise Bw24Error("--stop: expected a text of at least one character, found ''")
    bias = {}
    for item in args.logit_bias:
        token, _, value = item.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise Bw24Error(f"--logit-bias: expected ID=VALUE, found {item!r}") from None
    names = [name for name in SAMPLING_FLAGS if name not in ("logit_bias", "stop")]
    return SamplingParams(logit_bias=bias, **{name: getattr(args, name) for name in names})


def encode_messages(model: Model, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Ids of a conversation that ends where the model is to reply. The model has a chat template."""
    from . import chat

    template = model.chat_template
    if template is None:
        raise Bw24Error(f"{model.name}: the model file has no chat template; `bw24 gen --raw` continues plain text")
    return chat.apply(model.tokenizer, template, messages, add_generation_prompt=True)


def stream(reply: Generation, echo: bool) -> str:
    """Print a reply as it comes, ending with a newline; Ctrl-C ends it. Returns the text."""
    from .generate import INTERRUPTED

    pieces: list[str] = []
    terminal = sys.stdout.isatty()

    def put(piece: str) -> None:
        pieces.append(piece)
        if echo:
            write(terminal_safe(piece) if terminal else piece)

    try:
        for piece in reply:
            put(piece)
    except KeyboardInterrupt:
        put(reply.rest())
        reply.reason = INTERRUPTED
    text = "".join(pieces)
    if echo and not text.endswith("\n"):
        write("\n")
    return text
