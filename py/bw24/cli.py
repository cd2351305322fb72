"""The command line: `bw24 COMMAND` = `python -m bw24 COMMAND`. Owns the parser, exit codes and the form of errors; each group of
commands has its own file (cli_text, cli_chat, cli_model, cli_check). Knows nothing of what they do.

Exit codes: 0 done; 2 the request cannot be met, one line on standard error says why; 3 a gate found two results that should be equal
and are not; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from . import cli_check, cli_convert, cli_model, cli_probe, cli_report, cli_serve, cli_text, cli_tiers, flags
from .cli_common import EXIT_ERROR, EXIT_INTERRUPTED, say
from .errors import Bw24Error

DESCRIPTION = """\
bw24 runs language models from GGUF files: fast, and exact: the same file and seed give the same bytes,
however the work is cut.

Standard output carries the result only; progress, gate line and summary go to standard error.
"""

EXAMPLES = """\
examples:
  bw24 gen                                       a first text from the default model, smollm2, fetched once
  bw24 gen model.gguf -p "Why is the sky blue?"  the reply, streamed
  git diff | bw24 gen -p - --system "Summarise"  the prompt from a pipe
  bw24 chat hf:owner/repo:Q4_K_M                 a conversation with a model from the hub
  bw24 info hf:owner/repo:Q4_K_M                 will it fit? reads the file's header only, downloads no weights
  bw24 bench model.gguf                          tokens a second, after the exactness gate

`bw24 COMMAND --help` explains a command. Settings can come from BW24_ variables: `bw24 flags` lists them.
exit codes: 0 done, 2 request cannot be met (one line says why), 3 results that should be equal differ, 130 interrupted
"""


class Parser(argparse.ArgumentParser):
    """argparse with one line an error instead of the usage text, and no guessing of abbreviated options."""

    def __init__(self, *args: object, **kwargs: object):
        width = min(shutil.get_terminal_size().columns, 110)
        kwargs.setdefault("formatter_class", functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=width))
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        raise Bw24Error(f"{message} (see {self.prog} --help)")


class Version(argparse.Action):
    """Prints the version when met; the library is loaded only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from .cli_model import version_line

        print(version_line())
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command. `args.run` of a parsed line is the function to call."""
    parser = Parser(prog="bw24", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("--version", action=Version, nargs=0, help="revision, ABI number and instruction set, then exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=Parser)
    for group in (cli_text, cli_serve, cli_model, cli_check, cli_convert, cli_tiers, cli_probe, cli_report):
        group.add_commands(commands)
    return parser


def unknown_words(words: Sequence[str]) -> str:
    """What to say about words that no option or argument takes."""
    options = [word for flag in flags.TABLE for word in (flag.option, flag.short) if word]
    word = words[0].split("=")[0]
    near = [option for option in options if len(word) > 3 and option.startswith(word)] or difflib.get_close_matches(word, options, 1)
    return f"unknown argument {words[0]!r}" + (f"; did you mean {near[0]}?" if near else " (see bw24 COMMAND --help)")


def main(argv: Sequence[str] | None = None, make: Callable[[], argparse.ArgumentParser] = build_parser, name: str = "bw24") -> int:
    """Run one command line of the parser that `make` gives; returns the exit code. Errors become one line on standard error, after `name`."""
    parser = make()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the program
    try:
        args, extra = parser.parse_known_args(argv)
        if extra:
            raise Bw24Error(f"{args.command or name}: {unknown_words(extra)}")
        if not args.command:
            parser.print_help()
            return 0
        for line in flags.unknown_variables():
            say(f"{name}: {line}")
        return args.run(args)
    except Bw24Error as error:
        say(f"{name}: " + " ".join(str(error).splitlines()))
        return EXIT_ERROR
    except KeyboardInterrupt:
        say("")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, say `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # standard output: a full disk, a closed terminal
        say(f"{name}: {error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except MemoryError:
        say(f"{name}: out of memory; a smaller --ctx, a smaller --kv format or a smaller model needs less")
        return EXIT_ERROR
