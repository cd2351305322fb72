"""The command line `bw24-draft`: build, ranks, trim, validate, info. Knows the words and the order of the work; the parts do it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import cli, flags
from ..cli_common import (
    ENGINE_FLAGS,
    EXIT_OK,
    add_command,
    amount,
    open_engine,
    open_model,
    progress_bar,
    read_text,
    say,
    show,
    write,
    write_json,
)
from ..errors import Bw24Error

if TYPE_CHECKING:
    import numpy as np

    from ..gguf import GGUFFile
    from ..source import Model
    from .corpus import Reply
    from .trim import Types, Written

ROWS, LIMIT, PER_ROW = 32768, 256, 4
DESCRIPTION = """\
bw24-draft makes a drafter for speculative decoding whose head has only the rows of the tokens that the
model really says. A smaller head drafts faster; the text never changes, whatever the drafter.

The ranks must come from the model's own replies: other texts leave tokens out that it uses.
docs/DRAFT-REGIME.md says how to choose the rows, when a cut pays and how to read the verdict.
"""
EXAMPLES = """\
examples:
  bw24-draft build model.gguf draft.gguf         replies, ranks, cut, quantised: everything
  bw24-draft validate draft.gguf model.gguf      does it pay? GOOD, WASH or BAD
  bw24 gen model.gguf --draft draft.gguf --spec 3 -p "Hello"

exit codes: 0 done, 2 request cannot be met (one line says why), 130 interrupted (the same command goes on)
"""
BUILD_EXAMPLES = """
bw24-draft build model.gguf draft.gguf                       32768 rows, the built-in prompts
bw24-draft build model.gguf draft.gguf --rows 16384 --prompts mine.jsonl
bw24-draft build model.gguf draft.gguf --corpus-out said.jsonl   keep the replies
bw24-draft build gemma.gguf draft.gguf --assistant assistant.gguf
bw24-draft build model.gguf draft.gguf --head keep --block keep  every byte as in the model's file
"""
RANKS_EXAMPLES = """
bw24-draft ranks model.gguf ranks.txt             one id a line, the most frequent first
bw24-draft ranks model.gguf ranks.gguf            the same as a tensor d2t
"""
TRIM_EXAMPLES = """
bw24-draft trim model.gguf ranks.txt draft.gguf
bw24-draft trim model.gguf ranks.txt draft.gguf --rows 8192      the first 8192 ranks
"""
VALIDATE_EXAMPLES = """
bw24-draft validate draft.gguf model.gguf                     against the model's own whole head
bw24-draft validate draft.gguf model.gguf --against old.gguf  against another draft
bw24-draft validate draft.gguf model.gguf --spec 2 -T 0.7
"""
INFO_EXAMPLES = """
bw24-draft info draft.gguf                        what it was made from
"""


# ---- declarations


def build_parser() -> argparse.ArgumentParser:
    """The parser of bw24-draft."""
    parser = cli.Parser(prog="bw24-draft", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("--version", action=cli.Version, nargs=0, help="revision, ABI number and instruction set, then exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=cli.Parser)
    build = add_command(commands, "build", run_build, "make a draft file: replies, ranks, cut head, quantised", BUILD_EXAMPLES,
                        ("weights", "seed", *ENGINE_FLAGS, "json"), model=False)
    _positions(build, model="the model to draft for", out="the draft file to write")
    build.add_argument("--assistant", metavar="FILE", help="the Gemma assistant to cut, a path or hf:owner/repo:path; its target is MODEL")
    build.add_argument("--ranks", metavar="FILE", help="take these ranks instead of generating replies")
    _corpus_options(build)
    _type_options(build)
    ranks = add_command(commands, "ranks", run_ranks, "count what the model says and write the rank list", RANKS_EXAMPLES,
                        ("weights", "seed", *ENGINE_FLAGS, "json"), model=False)
    _positions(ranks, model="the model", out="the list to write: text, or GGUF where the name ends in .gguf")
    _corpus_options(ranks)
    trim = add_command(commands, "trim", run_trim, "cut a model's MTP block and head by a rank list", TRIM_EXAMPLES, ("weights", "json"),
                       model=False)
    _positions(trim, model="the model", ranks="rank list: text or GGUF", out="the draft file to write")
    trim.add_argument("--rows", metavar="N", type=_count, help="take the first N ranks (default: all)")
    trim.add_argument("--assistant", metavar="FILE", help="the Gemma assistant to cut")
    trim.add_argument("--force", action="store_true", help="replace OUT where it exists")
    _type_options(trim)
    _validate_command(commands)
    info = add_command(commands, "info", run_info, "what a draft file holds and was made from", INFO_EXAMPLES, ("json",), model=False)
    info.add_argument("draft_file", metavar="DRAFT", help="the draft file")
    return parser


def _validate_command(commands: Any) -> None:
    parser = add_command(commands, "validate", run_validate, "does a draft pay? the same replies with it and without, by the clock",
                         VALIDATE_EXAMPLES, ("weights", "seed", *ENGINE_FLAGS, "json"), model=False)
    parser.description += """

Each held-out prompt is answered by both drafters in turn. The verdict is about speed: GOOD or BAD where the
interval of the pairwise ratios lies on one side of 1, else WASH. Run it on a machine that does nothing else."""
    parser.add_argument("draft_file", metavar="DRAFT", help="the draft file")
    _positions(parser, model="the model that it drafts for")
    parser.add_argument("--against", metavar="DRAFT2", help="another draft file (default: the model's own MTP block, else no drafter)")
    parser.add_argument("--prompts", metavar="FILE", help="prompts, one a line (default: a built-in set that no pack is made from)")
    parser.add_argument("--spec", dest="k", metavar="K", type=_count, default=3, help="drafts a round (default: 3)")
    parser.add_argument("--temperature", "-T", metavar="X", type=float, default=0.0, help="0: greedy (default: 0)")
    parser.add_argument("--limit", metavar="N", type=_count, default=LIMIT, help=f"most tokens of a reply (default: {LIMIT})")
    parser.add_argument("--repeats", metavar="N", type=_count, default=2, help="runs of a prompt, the fastest counts (default: 2)")


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 1 << 30:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, found {text!r}")
    return int(text)


def _positions(parser: argparse.ArgumentParser, **names: str) -> None:
    for name, text in names.items():
        parser.add_argument({"model": "model", "ranks": "ranks_file", "out": "out"}[name], metavar=name.upper(), help=text)


def _corpus_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("replies")
    group.add_argument("--rows", metavar="N", type=_count, help=f"rows of the cut head (default: {ROWS}, or all of --ranks)")
    group.add_argument("--tokens", metavar="N", type=_count,
                       help=f"tokens to generate (default: {PER_ROW} a row, the least that ranks so many well)")
    group.add_argument("--limit", metavar="N", type=_count, default=LIMIT, help=f"most tokens of a reply (default: {LIMIT})")
    group.add_argument("--prompts", metavar="FILE",
                       help="prompts, one a line: a text, or a JSON object with messages and tools (default: built in)")
    group.add_argument("--temperature", "-T", metavar="X", type=float,
                       help="of the replies (default: what the model's file recommends, else 0.7)")
    group.add_argument("--top-k", metavar="K", type=int, help="likewise")
    group.add_argument("--top-p", metavar="X", type=float, help="likewise")
    group.add_argument("--corpus-out", metavar="FILE", help="also write the replies, one JSON object a line")
    group.add_argument("--work", metavar="FILE", help="journal that an interrupted run goes on from (default: OUT.work)")
    parser.add_argument("--force", action="store_true", help="replace OUT where it exists")


def _type_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("types", "What is stored in no more bits already is copied; keep copies everything.")
    group.add_argument("--head", metavar="TYPE", default="NVFP4", help="of the cut head (default: NVFP4)")
    group.add_argument("--block", metavar="TYPE", default="Q4_K_M", help="of the MTP block (default: Q4_K_M, a mix of Q4_K and Q6_K)")
    group.add_argument("--embedding", metavar="TYPE", default="Q5_K", help="of the embedding's copy (default: Q5_K)")


# ---- shared steps


@contextmanager
def _opened(args: argparse.Namespace) -> Iterator[Model]:
    args.model_given = True
    with open_model(args) as model:
        yield model


def _types(args: argparse.Namespace) -> Types:
    from .trim import Types

    return Types(args.head, args.block, args.embedding)


def _check_out(args: argparse.Namespace, *also: str | None) -> None:
    """Refuse early what would fail after hours."""
    for name in (args.out, *(n for n in also if n)):
        path = Path(name)
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise Bw24Error(f"{show(name, 4096)}: expected the name of a file in a folder that is there")
    if Path(args.out).exists() and not args.force:
        raise Bw24Error(f"{show(args.out, 4096)}: exists; --force replaces it")


def _check_rows(args: argparse.Namespace, model: Model) -> int:
    """Settles --rows; returns the vocabulary's size."""
    vocabulary = model.builder.rows("token_embd.weight")
    args.rows = args.rows or ROWS
    if args.rows > vocabulary:
        raise Bw24Error(f"--rows {args.rows}: the model's vocabulary has {vocabulary} tokens; a cut head needs fewer")
    return vocabulary


def _given_ranks(args: argparse.Namespace, model: Model, name: str) -> np.ndarray:
    """The first --rows ranks of a list, all of them where that is not said."""
    from . import ranks

    ids = ranks.read(Path(name), model.builder.rows("token_embd.weight"))
    if args.rows and args.rows > len(ids):
        raise Bw24Error(f"--rows {args.rows}: {show(name)} has {len(ids)} ranks")
    return ids[: args.rows or len(ids)]


def _params(args: argparse.Namespace, model: Model) -> Any:
    """How the replies are drawn: as given, else as the file recommends, else temperature 0.7."""
    from ..gguf import get
    from ..sampling import SamplingParams

    said = {name: get(model.metadata, f"general.sampling.{key}", kind, off) for name, key, kind, off in (
        ("temperature", "temp", float, 0.7), ("top_k", "top_k", int, 0), ("top_p", "top_p", float, 1.0))}
    given = {name: getattr(args, name) for name in said if getattr(args, name) is not None}
    return SamplingParams(**{**said, **given, "seed": args.seed})


def _replies(args: argparse.Namespace, model: Model) -> tuple[list[Reply], Any]:
    """The corpus, from where an earlier run stopped; and its plan."""
    from . import corpus, prompts, trim

    pack = prompts.read(read_text(args.prompts), show(args.prompts)) if args.prompts else prompts.built_in()
    limit = min(args.limit, model.context_length // 2)
    encoded = corpus.encode(model, pack, model.context_length - limit)
    if left := len(pack) - len(encoded):
        say(f"{left} of {len(pack)} prompts are left out: the chat template or the context does not take them")
    plan = corpus.Plan(encoded, _params(args, model), args.tokens or PER_ROW * args.rows, limit, trim.content_hash(model))
    work = Path(args.work or args.out + ".work")
    args.ctx = args.ctx or min(model.context_length, max(len(ids) for _, ids in encoded) + limit + 1)
    with closing(corpus.Journal(work, plan.head(), model.builder.rows("token_embd.weight"))) as journal:
        if journal.done:
            say(f"{work}: going on from {len(journal.done)} replies")
        try:
            with open_engine(model, args) as engine, progress_bar("replies", "tokens") as bar:
                replies = corpus.generate(engine, plan, journal, bar)
        except KeyboardInterrupt:
            say(f"\ninterrupted: {len(journal.done)} replies are kept in {work}; the same command goes on from there")
            raise
    if args.corpus_out:
        corpus.write(Path(args.corpus_out), replies)
    return replies, plan


def _ranked(args: argparse.Namespace, model: Model, vocabulary: int) -> tuple[np.ndarray, dict[str, Any], dict[str, Any]]:
    """(ranks, provenance, report) from the model's own replies."""
    from . import corpus, ranks

    replies, plan = _replies(args, model)
    ends = sorted(model.tokenizer.eog_ids)
    ids = ranks.order(ranks.count(replies, vocabulary, ends), args.rows)
    found = ranks.coverage(replies, vocabulary, args.rows, ends)
    facts = {"corpus": corpus.digest(replies), "replies": len(replies), "tokens": found.tokens, "seed": plan.params.seed,
             "temperature": float(plan.params.temperature), "prompts": plan.head()["prompts"], "distinct": found.distinct}
    say(f"{len(replies)} replies, {found.tokens} tokens, {found.distinct} distinct; {args.rows} rows hold {100 * found.own:.2f} % of them "
        f"and {100 * found.unseen:.2f} % of replies that were not counted")
    if found.tokens < PER_ROW * min(args.rows, found.distinct):
        say(f"note: {found.tokens} tokens are few for {args.rows} rows; {PER_ROW * args.rows} or more rank them better (--tokens)")
    return ids, facts, {"replies": len(replies), "tokens": found.tokens, "distinct": found.distinct, "coverage": round(found.own, 5),
                        "coverage_of_unseen": round(found.unseen, 5), "corpus": facts["corpus"]}


@contextmanager
def _assistant(args: argparse.Namespace) -> Iterator[GGUFFile]:
    from .. import drafter
    from ..gguf import open_gguf

    path = drafter.resolve_draft(args.assistant, progress=sys.stderr.isatty(), cache=flags.environment("cache"))
    with open_gguf(path) as file:
        yield file


def _write_draft(args: argparse.Namespace, model: Model, ids: np.ndarray, facts: dict[str, Any]) -> Written:
    from . import trim

    with progress_bar("write", "B") as bar:
        if not args.assistant:
            return trim.write_mtp(model, Path(args.out), ids, _types(args), facts, bar)
        with _assistant(args) as assistant:
            return trim.write_assistant(model, assistant, Path(args.out), ids, _types(args), facts, bar)


def _check_source(args: argparse.Namespace, model: Model) -> None:
    """Refuse a model without anything to cut before any reply is made."""
    from . import trim

    _types(args)
    if args.assistant:
        with _assistant(args) as assistant:
            trim.assistant_head(model, assistant)
        return
    trim.gguf_of(model)
    trim.mtp_block(model)


def _said(args: argparse.Namespace, done: Written, report: dict[str, Any]) -> int:
    if args.json:
        write_json({**done.as_dict(), **report})
    else:
        say(f"{done.path}: {amount(done.path.stat().st_size)}; head of {done.rows} rows {done.head}, {amount(done.head_bytes)} instead of "
            f"{amount(done.full_head_bytes)} a draft; block " + ", ".join(f"{n} tensors {t}" for t, n in done.block.items()))
    return EXIT_OK


# ---- commands


def run_build(args: argparse.Namespace) -> int:
    """Exit code of `bw24-draft build`."""
    _check_out(args, args.corpus_out, args.work)
    with _opened(args) as model:
        _check_source(args, model)
        if args.ranks:
            return _said(args, _write_draft(args, model, _given_ranks(args, model, args.ranks), {}), {})
        vocabulary = _check_rows(args, model)
        ids, facts, report = _ranked(args, model, vocabulary)
        done = _write_draft(args, model, ids, facts)
    if not args.work:
        Path(args.out + ".work").unlink(missing_ok=True)
    code = _said(args, done, report)
    if not args.json:
        say(f"next: bw24-draft validate {args.out} {args.model}")
    return code


def run_ranks(args: argparse.Namespace) -> int:
    """Exit code of `bw24-draft ranks`."""
    from . import ranks
    from .trim import provenance

    _check_out(args, args.corpus_out, args.work)
    with _opened(args) as model:
        vocabulary = _check_rows(args, model)
        ids, facts, report = _ranked(args, model, vocabulary)
        ranks.write(Path(args.out), ids, provenance(model, ids, facts))
    if not args.work:
        Path(args.out + ".work").unlink(missing_ok=True)
    if args.json:
        write_json({"file": args.out, "rows": len(ids), "ranks": ranks.digest(ids), **report})
    return EXIT_OK


def run_trim(args: argparse.Namespace) -> int:
    """Exit code of `bw24-draft trim`."""
    _check_out(args)
    with _opened(args) as model:
        _check_source(args, model)
        return _said(args, _write_draft(args, model, _given_ranks(args, model, args.ranks_file), {}), {})


def run_validate(args: argparse.Namespace) -> int:
    """Exit code of `bw24-draft validate`."""
    from .. import drafter
    from ..sampling import SamplingParams
    from . import corpus, prompts, validate

    pack = prompts.read(read_text(args.prompts), show(args.prompts)) if args.prompts else prompts.held_out()
    where = {"progress": sys.stderr.isatty(), "cache": flags.environment("cache")}
    with _opened(args) as model, ExitStack() as stack:
        opened = []
        for name in (args.draft_file, args.against):
            if name:
                opened.append(drafter.open_draft(drafter.resolve_draft(name, **where), model, second=bool(opened)))
                stack.callback(opened[-1].close)
        limit = min(args.limit, model.context_length // 2)
        ids = [list(i) for _, i in corpus.encode(model, pack, model.context_length - limit)]
        args.ctx = args.ctx or min(model.context_length, max(map(len, ids)) + limit + 1)
        plain = not args.against and model.mtp is None
        if not args.against and not plain:
            opened.append(drafter.embedded(model))
        against = Path(args.against).name if args.against else "no drafter" if plain else "the model's own head"
        names = [Path(args.draft_file).name, against]
        with open_engine(model, args, draft=opened[0], second=None if plain else opened[1]) as engine, progress_bar("pairs", "prompts") as bar:
            params = SamplingParams(temperature=args.temperature, seed=args.seed)
            mine, other = validate.Arm(names[0], engine), validate.Arm(names[1], engine, plain, engine.second)
            found = validate.compare(mine, other, ids, args.k, params, limit, args.repeats, bar)
    return _verdict(args, found)


def _verdict(args: argparse.Namespace, found: Any) -> int:
    if args.json:
        write_json(found.as_dict())
    else:
        write("\n".join(found.lines()) + "\n")
    return EXIT_OK


def run_info(args: argparse.Namespace) -> int:
    """Exit code of `bw24-draft info`."""
    from ..gguf import get, open_gguf
    from .ranks import ID_MAP

    with open_gguf(Path(args.draft_file)) as file:
        if ID_MAP not in file.tensors:
            raise Bw24Error(f"{show(args.draft_file, 4096)}: no tensor {ID_MAP}: not a draft with a cut head")
        facts = {k.removeprefix("bw24.draft."): v for k, v in file.metadata.items() if k.startswith("bw24.draft.")}
        out = {"architecture": get(file.metadata, "general.architecture", str, "none"), "rows": file.tensors[ID_MAP].shape[0],
               "tensors": {t.name: [t.type_name, list(t.shape)] for t in file.tensors.values()}, "made_from": facts}
    if args.json:
        write_json(out)
        return EXIT_OK
    said = {k: f"{v:.6g}" if isinstance(v, float) else show(str(v)) for k, v in facts.items()}
    write(f"{out['architecture']}, head of {out['rows']} rows\n" + "".join(f"  {k}: {v}\n" for k, v in said.items()))
    write("".join(f"  {name}: {kind} {shape}\n" for name, (kind, shape) in out["tensors"].items()))
    return EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    return cli.main(argv, build_parser, "bw24-draft")
