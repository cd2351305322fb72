"""The command tiers: plan, profile, replay. Owns what they print; the arithmetic is tier_plan's and tier_replay's."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cli_common import ENGINE_FLAGS, EXIT_OK, TIER_FLAGS, add_command, open_engine, open_model, progress_bar, read_text, say, write, write_json
from .errors import Bw24Error
from .units import parse_size

if TYPE_CHECKING:
    from .source import Model
    from .tier_plan import Cost, Hits, Rates, Shape

PLAN_EXAMPLES = """
bw24 tiers plan hy3-q2_k.gguf --vram 24g --ram 64g
bw24 tiers plan hy3-q2_k.gguf --ram 48g --nvme /nvme0,/nvme1 --target 10
bw24 tiers plan --visits 632 --expert-bytes 7800000 --hits 0.564,0.595 --rate cpu=23.4 --rate disk=9.77 --rate gpu-ms=31
"""
PLAN_TEXT = """

Where a mixture's experts go, and the tokens a second to expect: bytes over rates (docs/HY3-SPILL.md). Rates that are not given are
measured on this machine in about two seconds. --visits and --expert-bytes describe a model without its file."""
PROFILE_EXAMPLES = """
bw24 tiers profile hy3-q2_k.gguf corpus.txt -o hy3.profile.json --ram 48g
bw24 gen hy3-q2_k.gguf --ram 48g --profile hy3.profile.json
"""
REPLAY_EXAMPLES = """
bw24 gen hy3-q2_k.gguf --ram 24g --trace t.jsonl -p "..." -n 200
bw24 tiers replay t.jsonl --sizes 8g,16g,32g
"""
RATES = ("cpu", "disk", "pcie", "vram", "ram", "gpu-ms")
SHARES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)  # of all experts: what replay tries where no size is given


def add_commands(commands: Any) -> None:
    """Declare tiers and its three parts."""
    about = "Experts beyond memory: VRAM, RAM and files."
    group = commands.add_parser("tiers", help="experts beyond memory: plan, profile, replay", description=about)
    parts = group.add_subparsers(dest="part", metavar="PART", required=True, title="parts", parser_class=type(group))
    plan = add_command(parts, "plan", run_plan, "where experts go, and the speed to expect", PLAN_EXAMPLES, (*TIER_FLAGS, "threads", "isa", "json"))
    plan.description += PLAN_TEXT
    plan.add_argument("--rate", action="append", default=[], metavar="NAME=VALUE", help=f"instead of measuring: {', '.join(RATES)}; GB/s, or ms")
    plan.add_argument("--hits", type=_hits, metavar="V,R", help="share of visits in VRAM, and of the others in RAM, instead of the popularity curve")
    plan.add_argument("--visits", type=int, metavar="N", help="experts used a token, in all layers together")
    plan.add_argument("--expert-bytes", type=float, metavar="B", help="bytes of one expert")
    plan.add_argument("--experts", type=int, default=15168, metavar="N", help="with --visits: experts in all (default: 15168)")
    plan.add_argument("--target", type=float, default=10.0, metavar="T", help="tokens a second to reach (default: 10)")
    profile = add_command(parts, "profile", run_profile, "record how often each expert is used", PROFILE_EXAMPLES,
                          (*ENGINE_FLAGS, *TIER_FLAGS, "json"))
    profile.add_argument("text", metavar="TEXT", help="a UTF-8 text of the kind that the model will see, - for standard input")
    profile.add_argument("-o", "--output", required=True, metavar="FILE", help="the profile to write")
    profile.add_argument("--tokens", type=int, default=1 << 16, metavar="N", help="of the text, at most (default: 65536)")
    replay = add_command(parts, "replay", run_replay, "what each policy would have hit", REPLAY_EXAMPLES, ("json",), model=False)
    replay.add_argument("file", metavar="TRACE", help="a file of `bw24 gen --trace`")
    replay.add_argument("--sizes", metavar="SIZE,SIZE", help="budgets to try (default: 5 to 80 % of all experts)")
    replay.add_argument("--frozen", metavar="PROFILE", help="the frozen set's profile (default: the trace's first half)")


def _hits(text: str) -> tuple[float, float]:
    try:
        a, b = (float(x) for x in text.split(","))
        if not (0 <= a <= 1 and 0 <= b <= 1):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected two shares 0..1 with a comma between, found {text!r}") from None
    return a, b


# ---- plan


def given_rates(words: list[str]) -> dict[str, float]:
    """--rate NAME=VALUE as the fields of Rates, bytes a second or milliseconds. Raises Bw24Error."""
    out = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            number = float(value)
            if name not in RATES or not 0 < number < 1e6:
                raise ValueError
        except ValueError:
            raise Bw24Error(f"--rate {word}: expected {', '.join(RATES)} = a positive number") from None
        out[name.replace("-", "_")] = number if name == "gpu-ms" else number * 1e9
    return out


def measured(model: Model, args: argparse.Namespace, shape: Shape, given: dict[str, float]) -> Rates:
    """The rates given, and the probe's for the others."""
    from . import tier_plan
    from .tiers import bank_of, copies

    bank, rates = bank_of(model), dict(given)
    down = model.file.tensors[bank.ops[0][2]]
    if "cpu" not in rates:
        rates["cpu"] = tier_plan.cpu_rate(down.type_id, down.shape[0], args.threads, args.isa)
    if "ram" not in rates:
        rates["ram"] = tier_plan.ram_rate(args.threads)
    if "disk" not in rates:
        places = model.file.places(bank.ops[0][2]) or []
        folders = tuple(part for part in (args.nvme or "").split(",") if part)
        paths = sorted({p for place in places if place[0] for p in copies(place[0], folders) if p})
        if not paths:
            raise Bw24Error("the experts' bytes are converted at loading, so there is nothing to measure the disk with; give --rate disk=GB/s")
        rates["disk"], direct = tier_plan.disk_rate(paths, 8 * len(paths))
        if not direct:
            say("O_DIRECT was refused: the disk's rate may be the page cache's")
    if args.vram and "vram" not in rates:
        rates["vram"], rates["pcie"] = card_rates(rates.get("pcie"))
    if "gpu_ms" not in rates:  # the other weights are read once a token
        card = shape.layers * tier_plan.LAYER_US / 1e3 if "vram" in rates else 0.0
        rates["gpu_ms"] = card + shape.rest / rates.get("vram", rates["cpu"]) * 1e3
    return tier_plan.Rates(**rates, pack=tier_plan.pack_rate(args.threads or os.cpu_count() or 1))


def on_card_beside(model: Model, vram: int | None) -> int:
    """Bytes of a card of `vram` that experts cannot have: the other weights, work memory, the cache; 0 where this build cannot say. Raises Bw24Error
    where those do not fit."""
    from . import device, engine, placement
    from .tiers import Tiers

    if not vram:
        return 0
    s = engine.situation(model, device.Choice("cuda", True), Tiers(vram=vram, force=True), None, engine.parse_kv(None), None)
    try:
        return placement.beside_experts(s, vram)
    except Bw24Error as error:
        if error.code == placement.E_MEMORY:
            raise
        return 0


def card_rates(pcie: float | None) -> tuple[float, float]:
    """Bytes a second that this machine's card reads from its memory, and takes from the host's unless given. Raises Bw24Error where there is none
    that can be used."""
    from . import device
    from .check import open_context
    from .probe import rates

    choice = device.choose()
    if not choice.cuda:
        raise Bw24Error("--vram: there is no card here to measure; give --rate vram=GB/s")
    with open_context(choice.backend, None, None) as ctx:
        found = rates(ctx)
    return found["read_gbps"] * 1e9, pcie or found["to_device_gbps"] * 1e9


def run_plan(args: argparse.Namespace) -> int:
    """Exit code of `bw24 tiers plan`."""
    from . import tier_plan
    from .tiers import bank_of, model_hash, read_profile, rest_of

    given, curve = given_rates(args.rate), tier_plan.CURVE
    if args.visits is not None:
        if not args.expert_bytes:
            raise Bw24Error("--visits needs --expert-bytes")
        shape = tier_plan.Shape(args.visits, args.expert_bytes, args.expert_bytes * args.experts)
        rates, name, ram = tier_plan.Rates(**given), "the model described", args.ram or 0
    else:
        with open_model(args) as model:
            bank = bank_of(model)
            if not bank.ops:
                raise Bw24Error(f"{model.path.name}: the model has no experts, so there is nothing to place")
            experts = [(op[2], model.file.tensors[op[2]].shape[2]) for op in bank.ops]
            shape = tier_plan.Shape(bank.visits, bank.nbytes / sum(n for _, n in experts), bank.nbytes, rest_of(model, bank), len(bank.ops),
                                    on_card_beside(model, args.vram))
            rates, name, ram = measured(model, args, shape, given), model.name, args.ram if args.ram is not None else default_ram(shape)
            if args.profile:
                curve = tier_plan.curve_of(read_profile(Path(args.profile), model_hash(model), experts))
    fixed = tier_plan.Hits(*args.hits) if args.hits else None
    stays = bool(args.profile)
    h = fixed or tier_plan.hits(shape, args.vram or 0, ram, curve, stays)
    c = tier_plan.cost(shape, h, rates)
    ways = tier_plan.reach(shape, args.vram or 0, ram, rates, args.target, curve, fixed, stays) if c.rate < args.target else []
    report_plan(args, name, shape, h, c, rates, ram, ways)
    return EXIT_OK


def default_ram(shape: Shape) -> int:
    """What the engine would take on this machine."""
    from .engine import available_memory

    return int(min(shape.bank, max(0, available_memory(reserve=True) - shape.rest)))


def report_plan(args: argparse.Namespace, name: str, shape: Shape, h: Hits, c: Cost, rates: Rates, ram: int, ways: list[str]) -> None:
    """The plan as text or JSON."""
    v, r = h.vram, (1 - h.vram) * h.ram
    if args.json:
        write_json({"model": name, "visits": shape.visits, "expert_bytes": shape.expert, "bank_bytes": shape.bank, "rest_bytes": shape.rest,
                    "vram_share": v, "ram_share": r, "disk_share": 1 - v - r, "rates": vars(rates),
                    "ms": {**vars(c), "serial": c.serial, "ideal": c.ideal},
                    "tokens_per_second": c.rate, "overlapped_tokens_per_second": 1e3 / c.ideal, "target": args.target, "ways": ways})
        return
    write(f"{name}: {shape.visits} experts a token of {shape.expert / 1e6:.2f} MB: {shape.visits * shape.expert / 1e9:.2f} GB a token, "
          f"{shape.bank / 1e9:.1f} GB in all, {shape.rest / 1e9:.2f} GB of other weights\n")
    write(f"of the visits: VRAM {100 * v:.1f} %, RAM {100 * r:.1f} % ({ram / 2**30:.1f} GiB), disk {100 * (1 - v - r):.1f} %\n")
    known = {"processor": rates.cpu, "RAM": rates.ram, "disk": rates.disk, "bus": rates.pcie, "card": rates.vram}
    write("rates: " + ", ".join(f"{what} {rate / 1e9:.3g} GB/s" for what, rate in known.items() if rate) + "\n")
    ms = lambda x: f"{x:.0f} ms" if x >= 10 or x == 0 else f"{x:.2g} ms"  # noqa: E731
    own = f" (the card's {ms(c.card)} meanwhile)" if c.card else ""
    write(f"a token: experts {ms(c.cpu)}{own}, disk {ms(c.disk)}, the rest {ms(c.other)}: {c.rate:.2f} tok/s one after the other, "
          f"{1e3 / c.ideal:.2f} if the disk were wholly hidden\n")
    if ways:
        write(f"{args.target:g} tok/s would take one of:\n" + "".join(f"  {line}\n" for line in ways))


# ---- profile


def run_profile(args: argparse.Namespace) -> int:
    """Exit code of `bw24 tiers profile`."""
    from dataclasses import replace

    from . import tiers
    from .generate import chunks

    text = read_text(args.text)
    with open_model(args) as model:
        ids = model.tokenizer.encode(text)[: args.tokens]
        if not ids:
            raise Bw24Error(f"{args.text}: no tokens in it")
        with open_engine(model, args, tiers=replace(tiers.from_args(args), force=True)) as engine:
            done = 0
            with progress_bar("profile", "tokens") as bar:
                for begin in range(0, len(ids), engine.ctx):  # independent pieces of the context's length
                    piece = ids[begin : begin + engine.ctx]
                    with engine.sequence() as seq:
                        for a, b in chunks(len(piece), engine.max_rows, 1):
                            engine.step([(seq, t, False) for t in piece[a:b]])
                            done += b - a
                            if bar:
                                bar(done, len(ids))
            layers, uses = engine.spill.layers(), engine.spill.uses()
            tiers.write_profile(Path(args.output), tiers.model_hash(model), layers, uses, len(ids))
    from .tier_plan import curve_of, popularity

    curve = curve_of(uses)
    shares = {share: popularity(curve, share) for share in (0.1, 0.25, 0.5)}
    if args.json:
        write_json({"profile": args.output, "tokens": len(ids), "layers": len(layers), "experts": sum(n for _, n in layers),
                    "uses": int(sum(int(u.sum()) for u in uses)), "most_used": [{"of_experts": k, "of_uses": v} for k, v in shares.items()]})
        return EXIT_OK
    say(f"{len(ids)} tokens, {len(layers)} layers; the most used tenth of the experts has {100 * shares[0.1]:.1f} % of the uses, "
        f"a quarter {100 * shares[0.25]:.1f} %, half {100 * shares[0.5]:.1f} %")
    return EXIT_OK


# ---- replay


def run_replay(args: argparse.Namespace) -> int:
    """Exit code of `bw24 tiers replay`."""
    from . import tier_replay, tiers

    trace = tier_replay.read_trace(args.file)
    if args.sizes:
        capacities = [max(1, parse_size(s, "--sizes") // trace.entry) for s in args.sizes.split(",")]
    else:
        capacities = [max(1, int(s * trace.total)) for s in SHARES]
    uses = None
    if args.frozen:
        uses = tiers.read_profile(Path(args.frozen), trace.model, list(zip(trace.layers, trace.experts, strict=True)))
    rows = tier_replay.replay(trace, [min(c, trace.total) for c in capacities], uses)
    if args.json:
        write_json({"model": trace.model, "steps": len(trace.uses), "uses": sum(map(len, trace.uses)),
                    "reuse": tier_replay.reuse(trace), "rows": rows})
        return EXIT_OK
    cycle = sum(map(len, trace.uses)) / max(1, len(trace.uses))
    write(f"{len(trace.uses)} steps, {cycle:.0f} experts a step of {trace.total}, {trace.entry / 1e6:.2f} MB each; "
          f"{100 * tier_replay.reuse(trace):.1f} % were used by the step before\n")
    write(f"{'experts':>9} {'GB':>8} {'of all':>7}" + "".join(f" {name:>8}" for name in tier_replay.POLICIES) + "\n")
    for row in rows:
        write(f"{row['experts']:>9} {row['bytes'] / 1e9:8.2f} {100 * row['share']:6.1f}%"
              + "".join(f" {100 * row[name]:7.1f}%" for name in tier_replay.POLICIES) + "\n")
    return EXIT_OK
