"""Commands that judge: kernel-check, gate, bench. They print; the comparing and measuring is done in the library, gate and bench."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cli_common import (
    ENGINE_FLAGS,
    EXIT_ERROR,
    EXIT_MISMATCH,
    EXIT_OK,
    SPEC_FLAGS,
    TIER_FLAGS,
    add_command,
    drafts_a_round,
    drafts_by,
    engine_settings,
    open_drafter,
    open_engine,
    open_model,
    progress_bar,
    read_text,
    say,
    write,
    write_json,
)
from .errors import Bw24Error

if TYPE_CHECKING:
    from .bench import Cell
    from .bench_spec import SpecResult
    from .engine import Engine
    from .gate import PrefillCheck
    from .peer import Peer
    from .source import Model

KERNEL_EXAMPLES = """
bw24 kernel-check                         every op, type and awkward shape on this machine
bw24 kernel-check --isa avx2              one instruction set
bw24 kernel-check model.gguf              the model's own shapes too
"""
GATE_EXAMPLES = """
bw24 gate                                 the default model, half a minute
bw24 gate model.gguf --full               with the slow arms: the plain C reference over every row, a long prompt
"""
BENCH_EXAMPLES = """
bw24 bench model.gguf                     our own speed
bw24 bench model.gguf --vs llama.cpp --peer-bin ~/llama.cpp/build/bin --threads 2
bw24 bench --sizes 512 --tokens 128 --depths 0,4096 --json
bw24 bench --url http://127.0.0.1:8080 --clients 16   a server, as its clients see it
bw24 bench model.gguf --row cpu-e847f4c6  a published row again: then, now, intervals
"""
GATE_TEXT = (
    "The river had been falling for three days, and by the morning of the fourth the stones of the old ford stood dry above the water. "
    "People came down from both villages to look at them: 41 stones in two rows, cut square, with holes where iron had once held them "
    "together. Nobody living had seen them before. A boy counted them aloud; an old woman said that her grandmother's grandmother had "
    "crossed here with a cart and two oxen, when the bridge was only a drawing on somebody's table. def cross(stones): return sum(1 for s "
    "in stones if s.dry) ... and so on, until the evening came and the rain with it."
)
GATE_ROWS = 128  # more than the widest cut of the list (100), few enough for the plain C reference


def add_commands(commands: Any) -> None:
    """Declare kernel-check, gate and bench."""
    kernels = add_command(commands, "kernel-check", run_kernel_check, "compare every kernel with the plain C reference, bit by bit",
                          KERNEL_EXAMPLES, (*ENGINE_FLAGS, "prefill", "json"))
    kernels.add_argument("--verbose", action="store_true", help="print every case, not only those that differ")
    kernels.add_argument("--part", type=_part, default=(1, 1), metavar="I/N", help="the I-th of every N cases, for N processes at once")
    gate = add_command(commands, "gate", run_gate, "compute the same rows in different ways and compare the bits", GATE_EXAMPLES,
                       (*SPEC_FLAGS, *ENGINE_FLAGS, *TIER_FLAGS, "json"))
    gate.add_argument("--full", action="store_true", help="add the slow arms")
    bench = add_command(commands, "bench", run_bench, "measure prefill and decode, after the exactness gate", BENCH_EXAMPLES,
                        (*SPEC_FLAGS, *ENGINE_FLAGS, *TIER_FLAGS, "prefill", "json"))
    bench.add_argument("--accept", type=_share, metavar="P", help="with --spec: take drafts with probability P whatever they are (synthetic)")
    bench.add_argument("--sizes", type=_sizes(1), default=(256, 1024), metavar="N,N", help="prompt lengths to time (default: 256,1024)")
    bench.add_argument("--tokens", type=_sizes(1), default=(64,), metavar="N,N", help="numbers of tokens to generate (default: 64)")
    bench.add_argument("--depths", type=_sizes(0), default=(0,), metavar="N,N", help="tokens already in the cache (default: 0)")
    bench.add_argument("--rounds", type=_count_from(5), default=5, metavar="N", help="rounds; figures are their medians (default and least: 5)")
    bench.add_argument("--vs", choices=("llama.cpp",), help="alternate with llama.cpp: same file, threads and KV format")
    bench.add_argument("--peer-bin", metavar="DIR", help="folder of llama-bench; without it the llama-cpp-python package is used")
    bench.add_argument("--row", metavar="ID", help="measure a row of the record again: same file size, cells, threads, peer")
    bench.add_argument("--records", metavar="DIR", default="research", help="folder of the record for --row (default: research)")
    bench.add_argument("--url", metavar="URL", help="measure an OpenAI-compatible server with streaming requests instead")
    bench.add_argument("--clients", type=_count_from(1), default=8, metavar="N", help="with --url: clients at once (default: 8)")
    bench.add_argument("--requests", type=_count_from(1), metavar="N", help="with --url: requests in all (default: 4 a client)")
    bench.add_argument("--key-file", metavar="FILE", help="with --url: file whose first line is the API key")


def _sizes(low: int) -> Callable[[str], tuple[int, ...]]:
    def convert(text: str) -> tuple[int, ...]:
        parts = text.split(",")
        if not all(p.isdigit() and low <= int(p) <= 1 << 24 for p in parts):
            raise argparse.ArgumentTypeError(f"expected whole numbers from {low} up with commas between, found {text!r}")
        return tuple(int(p) for p in parts)

    return convert


def _part(text: str) -> tuple[int, int]:
    first, _, count = text.partition("/")
    if first.isdigit() and count.isdigit() and 1 <= int(first) <= int(count):
        return int(first), int(count)
    raise argparse.ArgumentTypeError(f"expected I/N with I from 1 to N, found {text!r}")


def _share(text: str) -> float:
    try:
        if 0 < float(text) <= 1:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected a number above 0 up to 1, found {text!r}")


def _count_from(low: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isdigit() or not low <= int(text) <= 1000:
            raise argparse.ArgumentTypeError(f"expected a whole number {low}..1000, found {text!r}")
        return int(text)

    return count


# ---- kernel-check


def run_kernel_check(args: argparse.Namespace) -> int:
    """Exit code of `bw24 kernel-check`."""
    from . import check

    with contextlib.ExitStack() as stack:
        settings = {"device": args.device, "backend": args.backend, "isa": args.isa, "threads": args.threads,
                    "prefill": args.prefill}
        if args.model_given:
            engine = stack.enter_context(open_engine(stack.enter_context(open_model(args)), args))
            settings = {"engine": engine}
        bar = stack.enter_context(progress_bar("kernels", "cases"))
        rows = []
        for row in check.kernel_check(progress=bar, opened=lambda name: say(f"device: {name}"), part=args.part, **settings):
            rows.append(row)
            if args.verbose and not args.json:
                write(f"{row.verdict} {row.name}{': ' + row.detail if row.detail else ''}\n")
    return report_kernels(args, rows)


def report_kernels(args: argparse.Namespace, rows: list[Any]) -> int:
    """Differences, skips by their reason, and the closing line."""
    different = [row for row in rows if row.verdict == "FAIL"]
    skips = Counter(row.detail for row in rows if row.verdict == "SKIP")
    equal = len(rows) - len(different) - sum(skips.values())
    if args.json:
        write_json({"equal": equal, "different": [{"name": r.name, "detail": r.detail} for r in different], "skipped": dict(skips)})
    else:
        if not args.verbose:
            write("".join(f"FAIL {row.name}: {row.detail}\n" for row in different))
        write("".join(f"SKIP({reason}) {count} cases\n" for reason, count in skips.items()))
        write(f"{equal} cases equal, {len(different)} different, {sum(skips.values())} skipped\n")
        if equal and not different:
            write("ALL GREEN: kernels match CPU reference.\n")
    return EXIT_MISMATCH if different or not equal else EXIT_OK


# ---- gate


def gate_ids(model: Model, n_vocab: int, count: int) -> list[int]:
    """`count` ids of running text; where the file has no tokenizer, ids spread over the vocabulary."""
    try:
        ids = model.tokenizer.encode(GATE_TEXT)
    except Bw24Error as error:
        say(f"no text for this model ({error}); using ids spread over its vocabulary")
        ids = [(i * 7919 + 13) % n_vocab for i in range(count)]
    while len(ids) < count:
        ids += ids
    return ids[:count]


def gate_classes(model: Model) -> dict[str, list[int]]:
    """The prompts of the gate's drafted replies by class; none where the file has no tokenizer."""
    from .gate_prompts import CLASSES

    try:
        return {kind: model.tokenizer.encode(text) for kind, text in CLASSES.items()}
    except Bw24Error:
        return {}


def run_gate(args: argparse.Namespace) -> int:
    """Exit code of `bw24 gate`."""
    from .gate import FAIL, PASS, SKIP, Equalities

    def factory(**changes: Any) -> Engine:
        if changes.get("draft"):
            changes["draft"] = open_drafter(model, args)
        settings = {**engine_settings(args), **changes}
        if settings.get("isa") and "tiers" in settings:  # an arm of the processor's has no card to divide with
            settings["tiers"] = replace(settings["tiers"], vram=None)
        return Engine(model, **settings)

    from dataclasses import replace

    from .engine import Engine

    with open_model(args) as model:
        n = min(GATE_ROWS, (args.ctx or model.context_length) - 33)
        if n < 8:
            raise Bw24Error(f"gate needs a context of at least 41 tokens, found {args.ctx or model.context_length}")
        ids = gate_ids(model, model.builder.rows("token_embd.weight"), n)
        verdicts = []
        classes = gate_classes(model) if args.full else None
        with contextlib.closing(Equalities(factory, ids, args.full, drafts_by(model, args), classes)) as equalities:
            say(equalities.engine.device_line)
            for verdict in equalities.run():
                verdicts.append(verdict)
                if not args.json:
                    write(verdict.line() + "\n")
    counts = Counter(v.status for v in verdicts)
    if args.json:
        rows = [{"status": v.status, "name": v.name, "detail": v.detail} for v in verdicts]
        write_json({"model": model.name, "verdicts": rows, "passed": counts[PASS], "failed": counts[FAIL], "skipped": counts[SKIP]})
    else:
        write(f"{counts[PASS]} passed, {counts[FAIL]} failed, {counts[SKIP]} skipped\n")
    return EXIT_MISMATCH if counts[FAIL] else EXIT_OK


# ---- bench


class Subject:
    """Our side of the bench: each call starts from an empty sequence and returns the seconds of the timed part."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def ids(self, count: int) -> list[int]:
        """Ids below the size of the smallest vocabulary; what they are does not change the work."""
        return [16 + i % 200 for i in range(count)]

    def prefill(self, n_tokens: int, depth: int) -> float:
        with self.engine.sequence() as seq:
            if depth:
                seq.prefill(self.ids(depth), want="none")
            started = time.perf_counter()
            seq.prefill(self.ids(n_tokens), want="last")
            return time.perf_counter() - started

    def decode(self, n_tokens: int, depth: int) -> float:
        """As `gen` decodes: tokens drawn where the model is, several a call. Each call begins with a token of `ids`, so that a model of random
        weights does not repeat one."""
        from . import plain, sampling

        with self.engine.sequence() as seq:
            if depth:
                seq.prefill(self.ids(depth), want="none")
            reply = plain.Reply(seq, sampling.SamplingParams(temperature=0.0))
            started, made = time.perf_counter(), 0
            while made < n_tokens:
                token = self.ids(made + 1)[-1]
                made += len(plain.decode_together(self.engine, [(reply, token, [token])], n_tokens - made)[0])
            return time.perf_counter() - started


def run_bench(args: argparse.Namespace) -> int:
    """Exit code of `bw24 bench`."""
    from . import bench, records, replay

    if args.url:
        return run_bench_url(args)
    cells = bench.default_cells(args.sizes, args.tokens, args.depths)
    record = None
    if args.row:
        record = records.find(Path(args.records), args.row)
        cells = replay.apply(args, record)
    longest = max(cell.depth + cell.tokens for cell in cells)
    if args.peer_bin and not args.vs:
        raise Bw24Error("--peer-bin names llama-bench; add --vs llama.cpp to measure against it")
    with open_model(args) as model:
        if record:
            replay.check_file(record, Path(model.path).name, model.file.size)
        if args.ctx is None:
            args.ctx = min(model.context_length, max(longest, 512))  # what is timed is all that must fit
        drafts = bool(args.spec) or args.accept is not None  # figures are plain decoding's where nothing else was asked for
        with open_engine(model, args, draft=open_drafter(model, args) if drafts else None) as engine:
            if longest > engine.ctx:
                raise Bw24Error(f"bench: the longest test has {longest} tokens, the context holds {engine.ctx}")
            peer = find_peer(args, model, engine, cells) if args.vs else None
            check = gate_before_bench(model, engine)
            if check is None:
                return EXIT_MISMATCH
            with progress_bar("bench", "rounds") as bar:
                result = bench.run_bench(Subject(engine), peer, cells, args.rounds, wall_gbps=read_wall(engine), progress=bar,
                                         weight_bytes=bytes_per_token(model), context=bench_context(model, engine, check))
            spec = bench_drafts(args, model, engine) if engine.draft else None
    entries = replay.compare(record, result) if record else []
    if args.json:
        write_json(result.as_json() | ({"row": record.id, "compared": entries} if record else {}) | ({"speculation": spec.as_json()} if spec else {}))
    else:
        write("\n".join(result.lines() + (replay.lines(record, entries) if record else []) + (spec.lines() if spec else [])) + "\n")
    return EXIT_OK


def bench_drafts(args: argparse.Namespace, model: Model, engine: Engine) -> SpecResult:
    """Drafted replies against plain ones: the first of --tokens after a prompt of the first of --depths (at least 16 tokens)."""
    from . import bench_spec

    ids = gate_ids(model, engine.n_vocab, max(args.depths[0], 16))
    tokens = min(args.tokens[0], engine.ctx - len(ids) - 40)
    if tokens < 1:
        raise Bw24Error(f"bench: a prompt of {len(ids)} tokens and a reply do not fit the context of {engine.ctx}")
    with progress_bar("drafts", "pairs") as bar:
        return bench_spec.run(engine, ids, tokens=tokens, k=drafts_a_round(args), accept=args.accept, pairs=args.rounds, progress=bar)


def run_bench_url(args: argparse.Namespace) -> int:
    """Exit code of `bw24 bench --url`: the first of --sizes is the prompt's length in words, the first of --tokens the reply's."""
    from . import bench_url

    key = read_text(args.key_file).split("\n")[0].strip() if args.key_file else None
    requests = args.requests or 4 * args.clients
    result = bench_url.run(args.url, clients=args.clients, requests=requests, words=args.sizes[0], tokens=args.tokens[0], key=key)
    if args.json:
        write_json(result.as_json())
    else:
        write("\n".join(result.lines()) + "\n")
    return EXIT_ERROR if result.errors else EXIT_OK


def gate_before_bench(model: Model, engine: Engine) -> PrefillCheck | None:
    """The gate line; None where it does not match, and then there is no number."""
    from . import gate

    check = gate.verify_prefill(engine, gate_ids(model, engine.n_vocab, min(64, engine.ctx - 1)))
    check.seq.close()
    say(check.line())
    if not check.match:
        say("bw24: a speed of wrong results means nothing; no number is printed")
        return None
    return check


def find_peer(args: argparse.Namespace, model: Model, engine: Engine, cells: list[Cell]) -> Peer:
    """llama.cpp with the same file, threads and KV format. Bw24Error where it has no such format."""
    from . import peer

    formats = set(engine.kv.values())
    if len(formats) > 1 or "/" in next(iter(formats)):
        raise Bw24Error(f"--vs llama.cpp needs one KV format for all layers, found {engine.kv}; --kv f16 sets one")
    context = max(cell.depth + cell.tokens for cell in cells)
    device = "cuda" if engine.backend == "cuda" else "cpu"
    return peer.find_peer(args.peer_bin, Path(model.path), engine.threads, formats.pop(), context, device)


def bytes_per_token(model: Model) -> int:
    """Weight bytes that one decoded token reads, as in the file: of stacked experts those that are used, of the embedding one row where the
    file has an output matrix of its own."""
    sizes = {t.name: t.nbytes for t in model.file.tensors.values()}
    experts = {t.name: t.shape[2] for t in model.file.tensors.values() if len(t.shape) == 3}
    used = model.params.int("expert_used_count", 1) if experts else 1
    read = sum(size * min(used, experts[name]) // experts[name] if name in experts else size for name, size in sizes.items())
    return read - (sizes.get("token_embd.weight", 0) if "output.weight" in sizes else 0)


def read_wall(engine: Engine) -> float | None:
    """Read bandwidth where the weights are: of the card, or of the machine's memory with the engine's threads; GB/s, None where it cannot be
    measured."""
    from . import check

    try:
        return check.probe(engine.threads, engine.backend)[0]
    except Bw24Error:
        return None


def bench_context(model: Model, engine: Engine, check: PrefillCheck) -> dict[str, Any]:
    """What a figure needs beside it: which file, which build, which machine, and that the gate held."""
    from . import __version__, abi

    return {
        "model": model.name, "file": Path(model.path).name, "file_bytes": model.file.size, "version": __version__,
        "revision": abi.version(), "backend": engine.backend, "isa": engine.isa, "threads": engine.threads, "kv": engine.kv,
        "prefill": engine.prefill_class,
        "cpu": cpu_name(), "device": engine.device, "gate": check.as_dict(), "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def cpu_name() -> str:
    """The processor as the system names it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return "unknown"
