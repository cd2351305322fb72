"""What the commands share: model and engine from settings, progress, the two output streams. Knows nothing of any one command.

The heavy imports stand inside the functions: `bw24 --help` loads no numpy and no library.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import flags
from .errors import Bw24Error

if TYPE_CHECKING:
    from .drafter import Draft
    from .engine import Engine
    from .source import Model

UNSUPPORTED = -3  # BW24_E_UNSUPPORTED
EXIT_OK, EXIT_ERROR, EXIT_MISMATCH, EXIT_INTERRUPTED = 0, 2, 3, 130
SPEC_FLAGS = ("spec", "draft", "draft_hidden", "draft_spare", "spec_sampling")
TIER_FLAGS = ("vram", "ram", "nvme", "tier_policy", "profile")
ENGINE_FLAGS = ("device", "threads", "ctx", "kv", "backend", "isa", "fuse", "repack")


def say(line: str) -> None:
    """One line for the person, on standard error."""
    print(line, file=sys.stderr, flush=True)


def show(text: str, limit: int = 200) -> str:
    """Text from a file, fit for a terminal: one line, no control characters, not endless."""
    safe = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text[:limit])
    return safe + ("..." if len(text) > limit else "")


def amount(n: float) -> str:
    """Bytes as a person reads them, in decimal units: 98.4 MB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(n) < 999.5 or unit == "TB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    raise AssertionError("unreachable")


def add_command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, examples: str,
                options: Iterable[str], model: bool = True) -> argparse.ArgumentParser:
    """A subcommand with its options from the flags table. `model`: takes the model as first positional argument or -m."""
    epilog = "examples:\n" + "".join(f"  {line}\n" for line in examples.strip().splitlines())
    parser = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".", epilog=epilog)
    names = (["model", "weights"] if model else []) + list(options)
    if model:
        parser.add_argument("model_position", metavar="MODEL", nargs="?", help=flags.BY_NAME["model"].help + " (default: smollm2)")
    for title in dict.fromkeys(flags.BY_NAME[n].group for n in names):
        section = parser.add_argument_group(title) if title else parser
        flags.add_options(section, [n for n in names if flags.BY_NAME[n].group == title])
    parser.set_defaults(run=lambda args: _run(args, run, names))
    return parser


def _run(args: argparse.Namespace, run: Callable[[argparse.Namespace], int], names: list[str]) -> int:
    position = getattr(args, "model_position", None)
    if position is not None and hasattr(args, "model"):
        raise Bw24Error(f"two models named: {position!r} and -m {args.model!r}; give one")
    args.model_given = position is not None or hasattr(args, "model")
    if position is not None:
        args.model = position
    flags.settle(args, names)
    return run(args)


def open_model(args: argparse.Namespace) -> Model:
    """The model that the settings name, fetched where needed; only its header is read."""
    from . import models, source

    try:
        unasked = args.model == models.DEFAULT_MODEL and not args.model_given
        resolve = models.resolve_or_demo if unasked else models.resolve
        found = resolve(args.model, progress=sys.stderr.isatty(), cache=flags.environment("cache"))
    except Bw24Error as error:
        hint = "; a prompt goes in --prompt" if " " in args.model else ""
        raise Bw24Error(f"{error}{hint}", error.code) from None
    if found.note:
        say(found.note)
    args.load_began = time.perf_counter()  # fetching is not loading
    model = source.open_model(found.paths[0], args.weights)
    if note := getattr(model.file, "note", None):
        say(note)
    return model


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of Engine, from the settings."""
    from .tiers import from_args

    settings = {name: getattr(args, name) for name in (*ENGINE_FLAGS, "prefill") if hasattr(args, name)}
    tiers = from_args(args)
    return {**settings, "tiers": tiers} if tiers.asked else settings


def open_engine(model: Model, args: argparse.Namespace, **changes: Any) -> Engine:
    """Load the weights; says so where the context had to be less than the model's own."""
    from .engine import Engine

    def load(**more: Any) -> Engine:
        with progress_bar("load", "B") as bar:
            return Engine(model, progress=bar, **{**engine_settings(args), **more})

    changes = {name: value for name, value in changes.items() if value is not None}
    try:
        engine = load(**changes)
    except Bw24Error as error:  # drafts that nobody asked for are no reason to fail
        if not changes.get("draft") or getattr(args, "spec", None) is not None or error.code != UNSUPPORTED:
            raise
        say(f"without drafts: {error}")
        engine = load(**{name: value for name, value in changes.items() if name != "draft"})
    remember_learned(engine, say)
    say(engine.device_line)
    for line in (engine.placement.note if engine.placement else None, engine.note):
        if line:
            say(line)
    return engine


def drafts_by(model: Model, args: argparse.Namespace) -> bool:
    """Whether the settings ask for drafts: unless --spec is off, where --draft names a drafter or the model has an MTP block. --spec K without
    either is an error. Where experts are read from files only --spec or --draft brings drafts: a round of K + 1 rows reads nearly K + 1 times as
    many experts."""
    if args.spec == 0 or (args.spec is None and not args.draft and experts_in_files(model, args)):
        return False
    if args.draft or model.mtp is not None:
        return True
    if args.spec is not None:
        raise Bw24Error(f"{model.path.name}: the file has no MTP block to draft with; --draft FILE names a drafter, --spec off goes without")
    return False


def experts_in_files(model: Model, args: argparse.Namespace) -> bool:
    """Whether an engine of these settings would read experts from files."""
    from . import device, placement, tiers
    from .engine import parse_kv, situation

    choice = device.choose(args.device, args.backend, args.isa, False)
    try:
        here = situation(model, choice, tiers.from_args(args), None, parse_kv(args.kv), args.ctx)
        return placement.place(here)[0] is not None
    except Bw24Error:  # the engine will say it
        return False


def open_drafter(model: Model, args: argparse.Namespace) -> Draft | None:
    """The drafter that the settings name, else the model's own MTP block; None where they ask for no drafts. Raises Bw24Error."""
    from . import drafter

    if not drafts_by(model, args):
        return None
    if args.draft:
        path = drafter.resolve_draft(args.draft, progress=sys.stderr.isatty(), cache=flags.environment("cache"))
        learns = getattr(args, "spec_sampling", "race") != "reject"  # rejection sampling repeats only while the drafter stays what it is
        return drafter.open_draft(path, model, args.draft_hidden, args.draft_spare if learns else 0)
    return drafter.embedded(model, args.draft_hidden)


def remember_learned(engine: Engine, tell: Callable[[str], None]) -> None:
    """Let a trimmed drafter go on with what it learned before, kept beside its file. Where that belongs to another model it is left alone."""
    from . import adapt, drafter

    if engine.learner and engine.draft.path:
        try:
            engine.learner.keep(adapt.beside(engine.draft.path), drafter.fingerprint(engine.model))
        except Bw24Error as error:
            tell(f"{error}; not used, and nothing is kept")


def drafts_a_round(args: argparse.Namespace) -> int:
    """--spec for an engine that has a drafter: auto where nothing was said."""
    from .speculate import AUTO

    return AUTO if args.spec is None else args.spec


@contextmanager
def progress_bar(label: str, unit: str) -> Iterator[Callable[[int, int], None] | None]:
    """A function (done, total) that draws a bar on standard error, or None where that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    # a bar appears only for work that takes longer than half a second
    with tqdm(desc=label, unit=unit, unit_scale=unit == "B", delay=0.5, leave=False, file=sys.stderr) as bar:

        def update(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield update


CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


def terminal_safe(text: str) -> str:
    """Text that a model wrote, without control characters: it may repeat what a hostile document told it to send to the terminal."""
    return text.translate(CONTROLS)


def write(text: str) -> None:
    """A piece of the result, on standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(value: dict[str, Any]) -> None:
    """The one object that ends a --json run."""
    write(json.dumps(value, ensure_ascii=False) + "\n")


def read_text(path: str) -> str:
    """A UTF-8 text file, or standard input for `-`. Bw24Error names the file and what is wrong."""
    try:
        if path == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        with open(path, "rb") as file:
            return file.read().decode("utf-8")
    except OSError as error:
        raise Bw24Error(f"{show(path)}: cannot read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        name = "standard input" if path == "-" else show(path)
        raise Bw24Error(f"{name}: expected UTF-8 text, found byte 0x{error.object[error.start]:02x} at {error.start}") from None
    except ValueError as error:
        raise Bw24Error(f"{show(path)}: cannot read: {error}") from None


def read_ids(path: str) -> list[int]:
    """Token ids from a file: a JSON array, or numbers with blanks or commas between."""
    text = read_text(path)
    try:
        values = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.replace(",", " ").split()]
        if not isinstance(values, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
            raise ValueError
    except (ValueError, RecursionError):
        wanted = "a JSON array or whole numbers with blanks between"
        raise Bw24Error(f"{show(path)}: expected token ids, {wanted}, found {show(text, 40)!r}") from None
    return values
