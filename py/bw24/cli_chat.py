"""The command chat: a conversation in the terminal. Keeps the messages and one sequence; what two prompts share is not computed again."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .cli_common import (
    EXIT_MISMATCH,
    EXIT_OK,
    add_command,
    drafts_a_round,
    open_drafter,
    open_engine,
    open_model,
    progress_bar,
    say,
    write,
)
from .cli_reply import encode_messages, sampling_params, stream
from .errors import Bw24Error

if TYPE_CHECKING:
    from .engine import Engine
    from .engine import Sequence as Timeline
    from .generate import Generation, Stats
    from .sampling import SamplingParams
    from .source import Model
    from .speculate import Drafted

CHAT_EXAMPLES = """
bw24 chat                                 talk to the default model
bw24 chat model.gguf --system "Answer in one sentence" -T 0.7 --seed 1
printf 'Hi\\nAnd now in French\\n' | bw24 chat   one line a turn
"""
COMMANDS = """\
/help          this list
/reset         forget the conversation, keep the system message
/system TEXT   set the system message and forget the conversation
/undo          take back the last exchange
/exit          leave (also Ctrl-D)
Ctrl-C stops a reply. A line that ends with \\ goes on in the next one."""


def add_command_to(commands: Any, options: Iterable[str]) -> None:
    """Declare chat; `options` are the sampling and engine settings."""
    chat = add_command(commands, "chat", run_chat, "talk with a model in the terminal", CHAT_EXAMPLES, ("system", "n", *options))
    chat.description += f" Needs a model with a chat template.\nThe prompt cache is exact: no reply depends on what was kept.\n\n{COMMANDS}"


class Conversation:
    """Messages, and one sequence that holds as much of them as the last turn left. `limit`: tokens of a reply, None for no limit; `k`: drafts a
    round, 0 for none, judged by `mode` (speculate.RACE or REJECT)."""

    def __init__(self, model: Model, engine: Engine, params: SamplingParams, stops: Sequence[str], limit: int | None, system: str | None,
                 k: int = 0, mode: str = "race"):
        self.model, self.engine, self.params, self.stops, self.limit = model, engine, params, stops, limit
        self.system, self.k, self.mode = system, k, mode
        self.messages: list[dict[str, str]] = []
        self.seq: Timeline | Drafted | None = None

    def reset(self) -> None:
        """Forget the messages; the sequence stays, for what it still shares with the next prompt."""
        self.messages.clear()

    def undo(self) -> bool:
        """Take back the last exchange; False where there is none."""
        had = bool(self.messages)
        del self.messages[-2:]
        return had

    def prompt_ids(self, text: str) -> list[int]:
        """Ids of the conversation with `text` as the next message; checked against the context."""
        from .generate import check_fits

        head = [{"role": "system", "content": self.system}] if self.system else []
        ids = encode_messages(self.model, [*head, *self.messages, {"role": "user", "content": text}])
        check_fits(len(ids), self.engine.ctx)
        return ids

    def reuse(self, ids: Sequence[int]) -> int:
        """Take the sequence back to what it shares with `ids`, short of the last id, whose logits are needed. Returns that length."""
        from .generate import common_prefix

        if self.seq is None:
            return 0
        return self.seq.truncate(min(common_prefix(self.seq.tokens, ids), len(ids) - 1))

    def drafted(self) -> Drafted:
        """A new timeline that looks ahead."""
        from .speculate import Drafted

        return Drafted(self.engine, self.k, self.params, stop=self.model.tokenizer.eog_ids, sampling_mode=self.mode)

    def begin(self, text: str) -> Generation | None:
        """The reply to `text`, ready to iterate over. The first prompt goes through the gate; None if it fails."""
        from . import gate, generate

        ids = self.prompt_ids(text)
        kept = self.reuse(ids)
        stats = generate.Stats(prompt_tokens=len(ids), cached_tokens=kept)
        with progress_bar("prompt", "tokens") as bar:
            if self.seq is None:
                drafted = self.drafted() if self.k else None
                check = gate.verify_prefill(self.engine, ids, progress=bar, drafted=drafted)
                say(check.line())
                if not check.match:
                    return None
                self.seq, logits, stats.prompt_seconds = drafted or check.seq, check.logits, check.prompt_seconds
            else:
                started = generate.now()
                rest = ids[kept:]
                logits = (self.seq.prefill(rest, progress=bar) if self.k else generate.prefill(self.engine, self.seq, rest, progress=bar))[-1]
                stats.prompt_seconds = generate.now() - started
        return generate.Generation(self.seq, self.model.tokenizer, ids, logits, self.params, ctx=self.engine.ctx, limit=self.limit,
                                   stop_ids=self.model.tokenizer.eog_ids, stops=self.stops, stats=stats)

    def turn(self, text: str) -> Stats | None:
        """One exchange: the reply is printed as it comes; Ctrl-C ends it and keeps what was said. None if the gate failed."""
        from .generate import CONTEXT

        reply = self.begin(text)
        if reply is None:
            return None
        said = stream(reply, echo=True)
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": said.strip()}]
        if reply.reason == CONTEXT:
            say(f"the context of {self.engine.ctx} tokens is full; /reset starts again, --ctx N sets another size")
        return reply.stats


def read_line(interactive: bool) -> str | None:
    """The next message, None at the end of input. A trailing backslash joins the next line."""
    lines: list[str] = []
    while True:
        if interactive:
            try:
                line = input("... " if lines else "> ")
            except EOFError:
                write("\n")
                return "\n".join(lines) if lines else None
        else:
            line = sys.stdin.readline()
            if not line:
                return "\n".join(lines) if lines else None
            line = line.rstrip("\n")
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def obey(conversation: Conversation, line: str) -> bool:
    """Carry out a /command; False to leave."""
    word, _, rest = line.partition(" ")
    if word in ("/exit", "/quit", "/bye"):
        return False
    if word == "/reset":
        conversation.reset()
        say("conversation forgotten")
    elif word == "/system":
        conversation.reset()
        conversation.system = rest.strip() or None
        say("system message set" if conversation.system else "system message removed")
    elif word == "/undo":
        say("last exchange taken back" if conversation.undo() else "nothing to take back")
    elif word == "/help":
        say(COMMANDS)
    else:
        say(f"no command {word}; /help lists them")
    return True


def run_chat(args: argparse.Namespace) -> int:
    """Exit code of `bw24 chat`."""
    params = sampling_params(args)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    with open_model(args) as model:
        if model.chat_template is None:
            raise Bw24Error(f"{model.name}: the model file has no chat template; `bw24 gen --raw` continues plain text")
        with open_engine(model, args, draft=open_drafter(model, args)) as engine:
            k = drafts_a_round(args) if engine.draft else 0
            conversation = Conversation(model, engine, params, args.stop, None if args.n < 0 else args.n, args.system, k, args.spec_sampling)
            if interactive:
                with suppress(ImportError):
                    import readline  # noqa: F401  (editing and history of the lines typed, for as long as the program runs)
                say(f"{model.name}, {engine.device}, context {engine.ctx} tokens. /help lists commands, Ctrl-D leaves.")
            return talk(conversation, interactive)


def talk(conversation: Conversation, interactive: bool) -> int:
    """Turns until the input ends. In a pipe a turn that cannot be met ends the program; at a terminal it is said and the talk goes on."""
    while True:
        try:
            line = read_line(interactive)
            if line is None:
                return EXIT_OK
            if not line.strip():
                continue
            if line.startswith("/"):
                if not obey(conversation, line.strip()):
                    return EXIT_OK
                continue
            stats = conversation.turn(line)
            if stats is None:
                return EXIT_MISMATCH
            prompt = f"{stats.prompt_tokens} prompt tokens, {stats.cached_tokens} of them kept"
            drafts = f"; {conversation.seq.stats.line()}" if conversation.k else ""
            say(f"[{prompt}; {stats.generated_tokens} generated, {stats.rate:.1f} tok/s{drafts}]")
        except KeyboardInterrupt:  # at the prompt, or during the prompt's pass: the reply itself handles its own
            if not interactive:
                raise
            say("\n(/exit or Ctrl-D leaves)")
        except Bw24Error as error:
            if not interactive:
                raise
            say(f"bw24: {error}")
