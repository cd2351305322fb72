"""Commands that take text: gen, tokenize, perplexity. (chat: cli_chat.)"""

from __future__ import annotations

import argparse
import json
import select
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import cli_chat
from .cli_common import (
    ENGINE_FLAGS,
    EXIT_INTERRUPTED,
    EXIT_MISMATCH,
    EXIT_OK,
    SPEC_FLAGS,
    TIER_FLAGS,
    add_command,
    amount,
    drafts_a_round,
    open_drafter,
    open_engine,
    open_model,
    progress_bar,
    read_ids,
    read_text,
    say,
    write,
    write_json,
)
from .cli_reply import SAMPLING_FLAGS, encode_messages, sampling_params, stream
from .errors import Bw24Error

if TYPE_CHECKING:
    from .engine import Engine
    from .gate import PrefillCheck
    from .generate import Generation
    from .source import Model
    from .speculate import Rounds
    from .tier_stats import Recorder

BUILT_IN_PROMPT = "Explain KV caches."
PROMPT_FLAGS = ("prompt", "prompt_ids", "chat", "system")

GEN_EXAMPLES = """
bw24 gen                                  the built-in prompt on the default model
bw24 gen model.gguf -p "Name three rivers" -n 64
bw24 gen -p "Write a haiku" -T 0.8 --seed 3   sampled; the same seed gives the same text
cat notes.txt | bw24 gen --system "Summarise in two lines"
bw24 gen --raw -p "Once upon a time"      continue a text, no chat template
bw24 gen --prompt-ids ids.json --json     token ids in, one JSON object out
"""
GEN_TEXT = """

The prompt comes from --prompt, --prompt-ids or standard input; without any, a built-in one is used.
Before any text the last rows of the prompt are run again as decode steps; results that are not
bit-equal end the run (exit 3)."""
TOKENIZE_EXAMPLES = """
bw24 tokenize -p "Hello, world"           one line a token: id and text
bw24 tokenize model.gguf --ids -p "Hi"    the ids alone
bw24 tokenize --prompt-ids ids.json       ids to text
"""
PERPLEXITY_EXAMPLES = """
bw24 perplexity wiki.txt                  the default model
bw24 perplexity model.gguf wiki.txt --kv q8_0
"""


def add_commands(commands: Any) -> None:
    """Declare gen, chat, tokenize and perplexity."""
    gen = add_command(commands, "gen", run_gen, "generate a reply to one prompt, streamed", GEN_EXAMPLES,
                      (*PROMPT_FLAGS, "n", *SAMPLING_FLAGS, *SPEC_FLAGS, *ENGINE_FLAGS, "prefill", *TIER_FLAGS, "stats", "trace", "json"))
    gen.description += GEN_TEXT
    cli_chat.add_command_to(commands, (*SAMPLING_FLAGS, *SPEC_FLAGS, *ENGINE_FLAGS, *TIER_FLAGS))
    tokenize = add_command(commands, "tokenize", run_tokenize, "show a text's tokens, or the text of token ids", TOKENIZE_EXAMPLES,
                           ("prompt", "prompt_ids", "json"))
    tokenize.add_argument("--ids", action="store_true", help="print the ids on one line, nothing else")
    tokenize.add_argument("--special", action="store_true", help="the text of a control token, such as <|im_end|>, gives the token")
    tokenize.add_argument("--no-bos", action="store_true", help="leave out the tokens that the vocabulary puts round a text")
    perplexity = add_command(commands, "perplexity", run_perplexity, "how well the model predicts a text: mean negative log-likelihood",
                             PERPLEXITY_EXAMPLES, (*ENGINE_FLAGS, *TIER_FLAGS, "prefill", "json"))
    perplexity.add_argument("file", metavar="FILE", help="a UTF-8 text, - for standard input")
    perplexity.add_argument("--window", type=_window, metavar="N", default=512, help="tokens of each independent piece (default: 512)")


def _window(text: str) -> int:
    if not text.isdigit() or not 2 <= int(text) <= 1 << 24:
        raise argparse.ArgumentTypeError(f"expected a whole number from 2 up, found {text!r}")
    return int(text)


# ---- prompts


@dataclass
class Prompt:
    """The ids to run, and how they were made."""

    ids: list[int]
    templated: bool


def read_prompt_text(args: argparse.Namespace) -> str:
    """--prompt, standard input where that is not a terminal, else the built-in prompt, and says so."""
    if args.prompt is not None and args.prompt != "-":
        return args.prompt
    if args.prompt == "-":
        return read_text("-")
    if sys.stdin is not None and not sys.stdin.isatty():
        if not select.select([sys.stdin], [], [], 1.0)[0]:
            say("reading the prompt from standard input; --prompt TEXT gives one directly")
        text = read_text("-")
        if text.strip():
            return text
    say(f"no prompt given, using the built-in one: {BUILT_IN_PROMPT!r}")
    return BUILT_IN_PROMPT


def encode_prompt(model: Model, args: argparse.Namespace) -> Prompt:
    """The prompt's ids: as given, through the chat template, or as plain text."""
    if args.prompt_ids is not None:
        if args.prompt is not None:
            raise Bw24Error("--prompt and --prompt-ids: give one of them")
        if args.system is not None:
            raise Bw24Error("--system needs a text prompt; --prompt-ids goes to the model as it is")
        return Prompt(read_ids(args.prompt_ids), False)
    template = None if args.chat is False else model.chat_template
    if args.chat and template is None:
        raise Bw24Error("BW24_CHAT=1, but the model file has no chat template")
    if args.system is not None and template is None:
        raise Bw24Error("--system needs a chat template: " + ("--raw turns it off" if args.chat is False else "the model file has none"))
    text = read_prompt_text(args)
    if template is None:
        return Prompt(model.tokenizer.encode(text), False)
    messages = ([{"role": "system", "content": args.system}] if args.system is not None else []) + [{"role": "user", "content": text}]
    return Prompt(encode_messages(model, messages), True)


def check_ids(ids: list[int], n_vocab: int) -> None:
    """Refuse ids outside the vocabulary. Bw24Error gives the first one and its place."""
    for place, token in enumerate(ids):
        if not 0 <= token < n_vocab:
            raise Bw24Error(f"token {place} of the prompt: expected an id 0..{n_vocab - 1}, found {token}")


# ---- gen


def run_gen(args: argparse.Namespace) -> int:
    """Exit code of `bw24 gen`."""
    from . import gate, generate
    from .speculate import Drafted
    from .tier_stats import Recorder

    params, limit = sampling_params(args), None if args.n < 0 else args.n
    with open_model(args) as model:
        prompt = encode_prompt(model, args)
        with open_engine(model, args, draft=open_drafter(model, args)) as engine:
            loading = time.perf_counter() - args.load_began
            recorder = Recorder(engine, args.trace) if args.stats or args.trace else None
            check_ids(prompt.ids, engine.n_vocab)
            generate.check_fits(len(prompt.ids), engine.ctx)
            end = None if limit is None else len(prompt.ids) + limit
            drafted = None
            if engine.draft:
                drafted = Drafted(engine, drafts_a_round(args), params, end, stop=model.tokenizer.eog_ids, sampling_mode=args.spec_sampling)
            with progress_bar("prompt", "tokens") as bar:
                check = gate.verify_prefill(engine, prompt.ids, progress=bar, drafted=drafted)
            say(check.line())
            if not check.match:
                say("bw24: the prompt as prefill and as decode gave different bits, so no text is printed; `bw24 gate` says more"
                    if check.prefill == "exact" else
                    "bw24: the prompt as fast prefill is too far from decode, so no text is printed; use --prefill exact")
                return EXIT_MISMATCH
            stats = generate.Stats(prompt_tokens=len(prompt.ids), prompt_seconds=check.prompt_seconds)
            reply = generate.Generation(
                drafted or check.seq, model.tokenizer, prompt.ids, check.logits, params, ctx=engine.ctx, limit=limit,
                stop_ids=model.tokenizer.eog_ids, stops=args.stop, stats=stats,
            )
            with closing(drafted or check.seq):
                text = stream(reply, echo=not args.json)
            if recorder:
                recorder.close()
                for line in recorder.lines() if args.stats else ():
                    say(line)
            report_gen(args, model, engine, check, reply, text, loading, drafted.stats if drafted else None, recorder)
            return EXIT_INTERRUPTED if reply.reason == generate.INTERRUPTED else EXIT_OK


def report_gen(args: argparse.Namespace, model: Model, engine: Engine, check: PrefillCheck, reply: Generation, text: str,
               loading: float, rounds: Rounds | None = None, recorder: Recorder | None = None) -> None:
    """The closing line, and the JSON object where it was asked for."""
    from .info import peak_memory

    stats, peak = reply.stats, peak_memory()
    say(f"prompt {stats.prompt_tokens} tokens, {stats.prompt_rate:.1f} tok/s | generated {stats.generated_tokens} tokens ({reply.reason}), "
        f"{stats.rate:.1f} tok/s{f' | {rounds.line()}' if rounds else ''} | load {loading:.2f} s | peak memory {amount(peak)}")
    if args.json:
        write_json({
            "model": model.name, "text": text, "ids": reply.ids, "reason": reply.reason, "gate": check.as_dict(), **stats.as_dict(),
            "load_seconds": round(loading, 4), "peak_memory_bytes": peak, "backend": engine.backend, "isa": engine.isa,
            "threads": engine.threads, "kv": engine.kv, "prefill": engine.prefill_class, "context": engine.ctx,
            "seed": args.seed, "temperature": args.temperature,
            **({"speculation": {"k": "auto" if drafts_a_round(args) < 0 else args.spec, "draft": engine.draft.name,
                                "sampling": args.spec_sampling, **rounds.as_dict()}} if rounds else {}),
            **({"tiers": recorder.as_dict()} if recorder else {}),
        })


# ---- tokenize


def run_tokenize(args: argparse.Namespace) -> int:
    """Exit code of `bw24 tokenize`."""
    with open_model(args) as model:
        tokenizer = model.tokenizer
        if args.prompt_ids is not None:
            if args.prompt is not None:
                raise Bw24Error("--prompt and --prompt-ids: give one of them")
            ids = read_ids(args.prompt_ids)
            text = tokenizer.decode(ids)
            if args.json:
                write_json({"ids": ids, "text": text})
            else:
                write(text + ("" if text.endswith("\n") else "\n"))
            return EXIT_OK
        text = read_text("-") if args.prompt in (None, "-") else args.prompt
        ids = tokenizer.encode(text, add_special=not args.no_bos, parse_special=args.special)
        pieces = [tokenizer.piece(i) for i in ids]
        if args.json:
            write_json({"text": text, "ids": ids, "pieces": [p.decode("utf-8", "replace") for p in pieces]})
        elif args.ids:
            write(" ".join(map(str, ids)) + "\n")
        else:
            write("".join(f"{i}\t{piece_text(p)}\n" for i, p in zip(ids, pieces, strict=True)))
    return EXIT_OK


def piece_text(piece: bytes) -> str:
    """A token's bytes as one line: JSON's quoting where they are text, hexadecimal where they are not."""
    try:
        return json.dumps(piece.decode("utf-8"), ensure_ascii=False)
    except UnicodeDecodeError:
        return "bytes " + piece.hex(" ")


# ---- perplexity


def run_perplexity(args: argparse.Namespace) -> int:
    """Exit code of `bw24 perplexity`."""
    from .perplexity import measure

    text = read_text(args.file)
    with open_model(args) as model:
        ids = model.tokenizer.encode(text, add_special=False)
        bos = model.tokenizer.bos_id if model.tokenizer.adds_bos else None
        with open_engine(model, args) as engine, progress_bar("score", "tokens") as bar:
            result = measure(engine, ids, window=min(args.window, engine.ctx), bos=bos, progress=bar)
            settings = {"model": model.name, "kv": engine.kv, "backend": engine.backend, "isa": engine.isa, "prefill": engine.prefill_class}
    if args.json:
        write_json({**settings, **result.as_dict()})
    else:
        write(result.line() + (" (prefill class fast, approximate)" if args.prefill == "fast" else "") + "\n")
    return EXIT_OK
