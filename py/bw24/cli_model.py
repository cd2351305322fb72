"""Commands about models and the program itself: info, explain, models, flags, and the version line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import flags
from .cli_common import ENGINE_FLAGS, EXIT_OK, add_command, amount, open_engine, open_model, say, show, write, write_json
from .errors import Bw24Error

if TYPE_CHECKING:
    from .gguf import Header
    from .info import Facts

INFO_EXAMPLES = """
bw24 info model.gguf
bw24 info hf:owner/repo:Q4_K_M            reads the header over the network, no weights
bw24 info model.gguf --ctx 8192 --device cuda   what the card must hold, before anything is loaded
bw24 info model.gguf --metadata           every key of the file
"""
EXPLAIN_EXAMPLES = """
bw24 explain model.gguf                   the list: what the model computes, op by op
bw24 explain model.gguf --plan            the plan: what runs as one step, and with which kernel
bw24 explain --plan --no-fuse             the same, nothing fused
"""
MODELS_EXAMPLES = """
bw24 models                               names that every command takes
"""
FLAGS_EXAMPLES = """
bw24 flags                                every setting, its variable, option, range and default
"""


def add_commands(commands: Any) -> None:
    """Declare info, explain, models and flags."""
    info = add_command(commands, "info", run_info, "what a model is, and whether it fits in memory", INFO_EXAMPLES,
                       ("device", "ctx", "kv", "backend", "isa", "json"))
    info.add_argument("--metadata", action="store_true", help="list every key and value, long ones shortened")
    explain = add_command(commands, "explain", run_explain, "print what a model computes, or how this machine runs it", EXPLAIN_EXAMPLES,
                          ENGINE_FLAGS)
    explain.add_argument("--plan", action="store_true", help="the plan of this backend instead of the list")
    add_command(commands, "models", run_models, "list the models that can be named", MODELS_EXAMPLES, ("json",), model=False)
    add_command(commands, "flags", run_flags, "list every setting", FLAGS_EXAMPLES, ("json",), model=False)


# ---- info


def read_header(name: str) -> tuple[Header, str]:
    """(header, where it was read) of a model by name: the local file where there is one, else the hub's header by range requests."""
    from . import models, source
    from .gguf import Header, open_gguf

    remote = name if name.startswith("hf:") else None
    if name in models.ALIASES and models.ALIASES[name].hub:
        repo, _, path = models.ALIASES[name].hub[0]
        remote = f"hf:{repo}/{path}"
    try:
        found = models.resolve(name, offline=True if remote else None, cache=flags.environment("cache"))
    except Bw24Error:
        if not remote:
            raise
        from . import hub

        return hub.remote_header(remote), f"{remote} (header only, nothing downloaded)"
    path = found.paths[0]
    if path.is_dir():
        with source.open_model(path) as model:
            return Header(path.name, model.file.size, metadata=model.metadata, tensors=dict(model.file.tensors)), str(path)
    with open_gguf(path) as file:
        return file.header, str(path)


def run_info(args: argparse.Namespace) -> int:
    """Exit code of `bw24 info`."""
    from .info import facts

    header, where = read_header(args.model)
    found = facts(header, args.kv, args.device, args.backend, args.ctx)
    if args.json:
        out = {"source": where, **found.as_dict()}
        if args.metadata:
            out["metadata"] = {key: value_text(value, 4096) for key, value in header.metadata.items()}
        write_json(out)
        return EXIT_OK
    write("\n".join(info_lines(found, where)) + "\n")
    if args.metadata:
        write("\nmetadata\n" + "".join(f"  {show(key)} = {value_text(value, 100)}\n" for key, value in header.metadata.items()))
    return EXIT_OK


def info_lines(found: Facts, where: str) -> list[str]:
    """`bw24 info` for a person."""
    lines = [
        f"{show(found.name)}",
        f"  source        {show(where, 4096)}",
        f"  architecture  {show(found.arch)}",
        f"  parameters    {found.parameters / 1e6:.1f} M in {amount(found.size)}",
        f"  context       {found.context_length or 'not said'} tokens",
        f"  tokenizer     {show(found.tokenizer)}, {found.vocabulary or 'no'} tokens",
        f"  chat template {'yes' if found.chat_template else 'no'}",
        "  tensors       " + ", ".join(f"{count} {name} ({amount(size)})" for name, count, size in found.types),
    ]
    if found.refusal:
        return [*lines, "", f"bw24 cannot run it: {found.refusal}"]
    place = found.place
    where = f"{'on ' + place.card if place.card else 'in this machine'}, {amount(place.free)} are free there"
    note = f" ({place.note})" if place.note else ""
    titles = " ".join(f"{title:>9}" for title in ("context", "weights", "work", "KV", "state", "rest", "total", "host"))
    lines += ["", f"memory {where}{note}", f"  {titles}"]
    for need in found.needs:
        rest = need.total - need.weights - need.work - need.kv - need.state
        parts = " ".join(f"{amount(value):>9}" for value in (need.weights, need.work, need.kv, need.state, rest, need.total, need.host))
        lines.append(f"  {need.context:>9} {parts}  {'fits' if need.fits(place) else 'does not fit'}")
    if found.mtp:
        lines.append(f"  with drafts of its MTP block (--spec) {amount(found.mtp)} more")
    return lines


def value_text(value: Any, limit: int) -> str:
    """A metadata value on one line, arrays by their length and first entries."""
    if isinstance(value, str):
        return show(repr(value), limit)
    if hasattr(value, "__len__"):
        head = ", ".join(value_text(entry, 20) for entry in value[:4])
        return f"[{head}{', ...' if len(value) > 4 else ''}] ({len(value)} values)"
    return show(str(value), limit)


# ---- explain, models, flags, version


def run_explain(args: argparse.Namespace) -> int:
    """Exit code of `bw24 explain`."""
    with open_model(args) as model, open_engine(model, args) as engine:
        write(engine.explain(plan=args.plan).rstrip("\n") + "\n")
    return EXIT_OK


def run_models(args: argparse.Namespace) -> int:
    """Exit code of `bw24 models`."""
    from . import models

    entries = models.list_models(flags.environment("cache"))
    if args.json:
        rows = [{"name": e.name, "path": str(e.path) if e.path else None, "bytes": e.size, "about": e.about} for e in entries]
        write_json({"models": rows})
        return EXIT_OK
    width = max((len(e.name) for e in entries), default=0)
    for entry in entries:
        state = str(entry.path) if entry.path else "not fetched yet"
        write(f"{entry.name:<{width}}  {amount(entry.size):>8}  {entry.about}; {state}\n")
    say("any command also takes a path, or hf:owner/repo[:QUANT]")
    return EXIT_OK


def run_flags(args: argparse.Namespace) -> int:
    """Exit code of `bw24 flags`."""
    rows = flags.rows()
    if args.json:
        write_json({"flags": [vars(row) for row in rows]})
        return EXIT_OK
    for row in rows:
        names = " | ".join(name for name in (row.option, row.variable) if name)
        write(f"{names}\n    {row.help}\n    {row.kind}; default: {row.default or 'none'}\n")
    return EXIT_OK


def source_revision() -> str | None:
    """Git revision of the checkout that this package is in; None in a wheel."""
    git = Path(__file__).resolve().parent.parent.parent / ".git"
    try:
        if git.is_file():  # a linked work tree
            git = (git.parent / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()).resolve()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref:"):
            return head[:12]
        ref = head.removeprefix("ref:").strip()
        common = git / (git / "commondir").read_text(encoding="utf-8").strip() if (git / "commondir").is_file() else git
        if (common / ref).is_file():
            return (common / ref).read_text(encoding="utf-8").strip()[:12]
        packed = (common / "packed-refs").read_text(encoding="utf-8").splitlines()
        return next(line.split()[0][:12] for line in packed if line.endswith(" " + ref))
    except (OSError, UnicodeDecodeError, StopIteration, IndexError):
        return None


def version_line() -> str:
    """`bw24 0.1.0 (revision, ABI n, ISA)`; warns on standard error where library and sources are of different revisions."""
    from . import __version__, abi

    built, here = abi.version(), source_revision()
    if here and built.rstrip("+") != here and built != "unknown":
        say(f"bw24: the library was built from revision {built}, the Python files are at {here}: run make")
    best = next((isa for isa in reversed(flags.BY_NAME["isa"].choices) if abi.lib().bw24_isa_supported(isa.encode()) == 1), "portable")
    return f"bw24 {__version__} (revision {built}, ABI {abi.abi_number()}, {best})"
