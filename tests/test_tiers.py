"""Plans, profiles and replays of experts beyond memory, and the settings that reach the engine."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from bw24 import cli_common, device, engine, flags, placement, tier_plan, tier_replay, tiers
from bw24.cli import main
from bw24.engine import Engine
from bw24.errors import Bw24Error
from bw24.sizes import Sizes
from bw24.source import open_model
from bw24.tiers import Tiers
from conftest import FIXTURES
from tiny_model import write_tiny

# The rig of docs/HY3-SPILL.md: 24 GB of video memory, 36 GiB of RAM for experts, two drives, a pruned Hy3 of mixed types
RIG_SHAPE = tier_plan.Shape(632, 7.80e6, 78.5e9)
RIG_HITS = tier_plan.Hits(0.564, 0.595)


@pytest.fixture
def moe(tmp_path) -> Path:
    return Path(shutil.copy(FIXTURES / "tiny" / "qwen35moe.gguf", tmp_path))


def ids_file(tmp_path: Path, n: int = 24) -> str:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps([(i * 7) % 50 + 3 for i in range(n)]))
    return str(path)


# ---- the cost of a token


@pytest.mark.parametrize("cpu, rate", [(23.4e9, 4.7), (21.0e9, 4.46)])
def test_the_cost_model_gives_what_was_measured(cpu, rate):
    c = tier_plan.cost(RIG_SHAPE, RIG_HITS, tier_plan.Rates(cpu=cpu, disk=9.77e9, gpu_ms=31))
    assert c.rate == pytest.approx(rate, rel=0.02) and 4.3 <= c.rate <= 4.75
    assert c.disk == pytest.approx(89, abs=1) and c.serial == pytest.approx(c.cpu + c.disk + 31)


def test_plan_prints_the_rig_and_what_reaches_ten(capsys):
    words = ["tiers", "plan", "--visits", "632", "--expert-bytes", "7800000", "--hits", "0.564,0.595", "--rate", "cpu=23.4", "--rate", "disk=9.77",
             "--rate", "gpu-ms=31", "--experts", "10064"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert 4.3 <= float(re.search(r"([\d.]+) tok/s one after the other", text)[1]) <= 4.75
    assert "10 tok/s would take one of:" in text and "processor alone: at most" in text and "disk and processor alone: both" in text
    assert main([*words, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["vram_share"] == 0.564 and body["disk_share"] == pytest.approx(0.436 * 0.405)
    ways = {line.split(":")[0]: line for line in body["ways"]}
    times = float(re.search(r"([\d.]+) times", ways["disk and processor alone"])[1])
    faster = tier_plan.Rates(cpu=23.4e9 * times, disk=9.77e9 * times, gpu_ms=31)
    assert tier_plan.cost(RIG_SHAPE, RIG_HITS, faster).rate == pytest.approx(10, rel=0.05)


def test_popularity_and_hits():
    assert tier_plan.popularity(tier_plan.CURVE, 53 / 192) == pytest.approx(0.4985)
    assert tier_plan.popularity(tier_plan.CURVE, 2.0) == 1.0
    shape = tier_plan.Shape(632, 6.2e6, 93.9e9, 9.2e9)
    h = tier_plan.hits(shape, 0, shape.bank)
    assert h == tier_plan.Hits(0.0, 1.0) and tier_plan.hits(shape, 1e12, 0).vram == 1.0
    small, large = tier_plan.hits(shape, 24e9, 16e9, stays=True), tier_plan.hits(shape, 24e9, 52e9, stays=True)
    assert small.vram == large.vram > 0.3 and small.ram < large.ram < 1.0
    share = (24e9 - shape.rest - tier_plan.WORK_VRAM) / shape.bank
    alone, twice = tier_plan.hits(shape, 24e9, shape.bank * (1 - share)), tier_plan.hits(shape, 24e9, shape.bank)
    assert twice == tier_plan.Hits(large.vram, 1.0, 1.0), "RAM has what leaves the set: it follows the text"
    assert share < alone.vram == pytest.approx(share + tier_plan.MOVES_ALONE * (large.vram - share)) and alone.ram == pytest.approx(1)
    curve = tier_plan.curve_of([np.array([8, 1, 1]), np.array([0, 0, 10])])
    assert curve[0] == (0.0, 0.0) and curve[-1] == (1.0, 1.0) and tier_plan.popularity(curve, 1 / 6) == pytest.approx(0.5)
    with pytest.raises(Bw24Error, match="no use"):
        tier_plan.curve_of([np.zeros(3)])


def test_the_probe_measures_this_machine(moe):
    rate, _ = tier_plan.disk_rate([moe], 2, 0.05)
    assert rate > 1e5
    assert 1e7 < tier_plan.cpu_rate(12, 512, threads=1, seconds=0.05) < 1e12
    assert 1e8 < tier_plan.ram_rate(threads=1) < 1e13
    slow = tier_plan.cost(RIG_SHAPE, RIG_HITS, tier_plan.Rates(cpu=23.4e9, disk=9.77e9, gpu_ms=31, ram=20e9))
    assert slow.ideal == pytest.approx(slow.ram) and slow.ram == pytest.approx(632 * 0.436 * 1.405 * 7.8e6 / 20e6), "RAM carries both"
    with pytest.raises(Bw24Error, match="rate disk is needed"):
        tier_plan.cost(RIG_SHAPE, RIG_HITS, tier_plan.Rates(cpu=1e9))


def test_plan_of_a_file(moe, capsys):
    assert main(["tiers", "plan", str(moe), "--ram", "300k", "--rate", "cpu=10", "--rate", "disk=1", "--rate", "gpu-ms=1", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    with open_model(moe) as model:
        bank = tiers.bank_of(model)
    assert body["visits"] == bank.visits and body["bank_bytes"] == bank.nbytes and 0 < body["ram_share"] < 1
    for words, message in ((["--rate", "cpu=fast"], "expected cpu, disk"), (["--visits", "3"], "needs --expert-bytes")):
        assert main(["tiers", "plan", str(moe), *words]) == 2
        assert message in capsys.readouterr().err
    dense = write_tiny(moe.with_name("dense.gguf"))
    assert main(["tiers", "plan", str(dense)]) == 2 and "no experts" in capsys.readouterr().err


# ---- settings


def test_settings_reach_the_engine(moe, monkeypatch, tmp_path, capsys):
    seen = {}

    class Stopped(Exception):
        pass

    def made(model, *, progress=None, **settings):
        seen.update(settings)
        raise Stopped

    monkeypatch.setattr(engine, "Engine", made)
    words = ["--ram", "300k", "--vram", "1g", "--nvme", "/a,/b", "--tier-policy", "slru", "--profile", "p.json"]
    want = Tiers(ram=300 << 10, vram=1 << 30, nvme=("/a", "/b"), policy="slru", profile="p.json")
    with pytest.raises(Stopped):
        main(["gen", str(moe), "--prompt-ids", ids_file(tmp_path), *words])
    assert seen.pop("tiers") == want
    variables = {"RAM": "300k", "VRAM": "1g", "NVME": "/a,/b", "TIER_POLICY": "slru", "TIER_PROFILE": "p.json"}
    for name, value in variables.items():
        monkeypatch.setenv(f"BW24_{name}", value)
    with pytest.raises(Stopped):
        main(["gen", str(moe), "--prompt-ids", ids_file(tmp_path)])
    assert seen.pop("tiers") == want
    from bw24.server.settings import from_environment

    assert from_environment().engine["tiers"] == want
    for name in variables:
        monkeypatch.delenv(f"BW24_{name}")
    with pytest.raises(Stopped):
        main(["gen", str(moe), "--prompt-ids", ids_file(tmp_path)])
    assert "tiers" not in seen and set(cli_common.TIER_FLAGS) < set(flags.BY_NAME)
    assert main(["gen", str(moe), "--nvme", "a,b,c", "--prompt-ids", ids_file(tmp_path)]) == 2
    assert "at most two folders" in capsys.readouterr().err
    assert main(["gen", str(moe), "--ram", "lots"]) == 2
    assert "expected bytes such as" in capsys.readouterr().err


# ---- what gen says


def gen(moe: Path, tmp_path: Path, *words: str) -> list[str]:
    return ["gen", str(moe), "--device", "cpu", "--prompt-ids", ids_file(tmp_path), "-n", "6", *words]


def test_gen_prints_a_line_a_token(moe, tmp_path, capsys):
    assert main(gen(moe, tmp_path, "--json")) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main(gen(moe, tmp_path, "--json", "--ram", "200k", "--stats")) == 0
    out = capsys.readouterr()
    body = json.loads(out.out)
    assert body["ids"] == plain["ids"] and "tiers" not in plain
    form = re.compile(r"token \d+: \d+ experts, in RAM [\d.]+ %, read [\d.]+ MB in \d+ reads, .* disk")
    lines = [line for line in out.err.splitlines() if form.match(line)]
    assert len(lines) == body["tiers"]["tokens"] == 8 + 5, "the gate's eight rows, then each token but the last"
    assert any(line.startswith("a token: in RAM") for line in out.err.splitlines()) and "experts: 0.00 GB, of which" in out.err
    assert body["tiers"]["peak"] <= body["tiers"]["budget"] and body["tiers"]["token_counts"]["visits"] > 0
    assert main(gen(moe, tmp_path, "--stats")) == 2
    assert "every weight is in memory" in capsys.readouterr().err


def test_a_trace_replays(moe, tmp_path, capsys):
    trace = tmp_path / "t.jsonl"
    assert main(gen(moe, tmp_path, "--trace", str(trace))) == 0
    capsys.readouterr()
    found = tier_replay.read_trace(trace)
    with open_model(moe) as model:
        bank = tiers.bank_of(model)
        assert found.model == tiers.model_hash(model) and len(found.experts) == len(bank.ops)
    assert main(["tiers", "replay", str(trace), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    rows = body["rows"]
    assert body["reuse"] == pytest.approx(tier_replay.reuse(found)) and 0 < body["reuse"] <= 1
    for row in rows:
        assert max(row["lru"], row["slru"], row["frozen"]) <= row["belady"] + 1e-9
    assert [r["belady"] for r in rows] == sorted(r["belady"] for r in rows)
    assert main(["tiers", "replay", str(trace), "--sizes", "100k,1g"]) == 0
    assert "belady" in capsys.readouterr().out
    if Path("/dev/full").exists():
        assert main(gen(moe, tmp_path, "--trace", "/dev/full")) == 2
        assert "/dev/full: cannot write: No space left" in capsys.readouterr().err
    assert main(["tiers", "replay", str(moe)]) == 2
    assert "cannot read: not a trace" in capsys.readouterr().err


@pytest.mark.parametrize("text, message", [
    ("", "line 1: expected JSON"), ("{}", "not a trace"), ('{"format":"bw24-tiers-trace","version":2}', "not a trace"),
    ('{"format":"bw24-tiers-trace","version":1,"experts":[0],"entry":1}', "experts of each layer"),
    ('{"format":"bw24-tiers-trace","version":1,"layers":["d"],"experts":[4],"entry":1}\n{"uses":[[0,4]]}', "line 2: expected uses"),
    ('{"format":"bw24-tiers-trace","version":1,"layers":["d"],"experts":[4],"entry":1}\n' + "[" * 3000, "line 2: expected JSON"),
])
def test_a_bad_trace_is_refused(tmp_path, text, message):
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(Bw24Error, match=message):
        tier_replay.read_trace(path)


def test_a_profile_is_recorded_and_read_back(moe, tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "p.json"
    text.write_text("ab" * 40)
    code = main(["tiers", "profile", str(moe), str(text), "-o", str(out), "--device", "cpu", "--ram", "300k"])
    said = capsys.readouterr().err
    if code == 2:  # the fixture has no tokenizer: the text cannot become tokens
        assert "token" in said
        pytest.skip("the model in the tree has no tokenizer")
    assert code == 0 and "the most used tenth" in said


# ---- policies: the library's and the simulation's


def steps(seed: int, n: int, layers: int = 4, experts: int = 16, top: int = 4) -> tier_replay.Trace:
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, experts + 1)
    uses = [[(layer, int(e)) for layer in range(layers) for e in np.sort(rng.choice(experts, top, False, weights / weights.sum()))] for _ in range(n)]
    return tier_replay.Trace("x", [experts] * layers, 1000, uses)


def brute_belady(trace: tier_replay.Trace, capacity: int) -> int:
    order = [u for s in trace.uses for u in s]
    held, hits = set(), 0
    for i, use in enumerate(order):
        hits += use in held
        held.add(use)
        if len(held) > capacity:
            following = {u: next((j for j in range(i + 1, len(order)) if order[j] == u), len(order)) for u in held}
            held.remove(max(held, key=lambda u: (following[u], u)))
    return hits


@pytest.mark.parametrize("capacity", [1, 5, 16, 30, 64])
def test_policies_against_their_definitions(capacity):
    trace = steps(capacity, 30)
    best = tier_replay.belady(trace, capacity)
    assert best == brute_belady(trace, capacity)
    for policy in (tier_replay.lru, tier_replay.slru, tier_replay.frozen):
        assert 0 <= policy(trace, capacity) <= best
    if capacity == 64:
        assert tier_replay.lru(trace, 64) == best


def test_reuse_counts_neighbours_of_one_size():
    steps = [[(0, e) for e in range(8)], [(0, 1), (1, 2)], [(0, 1), (1, 3)], [(0, 4), (1, 3)]]
    assert tier_replay.reuse(tier_replay.Trace("m", [8, 8], 1, steps)) == 0.5, "the prompt's step of eight is no neighbour"
    assert tier_replay.reuse(tier_replay.Trace("m", [8, 8], 1, steps[:1])) == 0.0


def test_below_a_cycle_lru_forgets_everything():
    trace = tier_replay.Trace("x", [8] * 4, 1, [[(layer, e) for layer in range(4) for e in (1, 2)]] * 20)
    assert tier_replay.lru(trace, 7) == 0 and tier_replay.lru(trace, 8) == 8 * 19
    assert tier_replay.frozen(trace, 4) == 4 * 19


@pytest.mark.parametrize("policy", ["lru", "slru"])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.7])
def test_the_library_hits_as_the_simulation_says(moe, policy, share):
    """One row a step, the same policy, the same trace: the library holds what it reads ahead for a step, so it may differ by a few uses."""
    with open_model(moe) as model, Engine(model, device="cpu", tiers=Tiers(ram=0, force=True)) as e:
        bank, entry = e.spill.stats()["bank"], e.spill.stats()["floor"] // 2
    settings = Tiers(ram=int(share * bank), policy=policy, trace=1 << 16, force=True)
    with open_model(moe) as model, Engine(model, device="cpu", tiers=settings) as e, e.sequence() as seq:
        for i in range(60):
            seq.decode((i * 7) % 50 + 3)
        events, counts = e.spill.trace(), e.spill.stats()
        experts = [n for _, n in e.spill.layers()]
    trace = tier_replay.Trace("x", experts, entry, tier_replay.decode(events))
    simulated = tier_replay.POLICIES[policy](trace, int(share * bank) // entry)
    assert counts["wanted"] == sum(map(len, trace.uses))
    assert abs(counts["hits"] - simulated) <= 0.1 * counts["wanted"], (counts["hits"], simulated, counts["wanted"])


def test_drafts_over_spilled_experts_give_the_same_text(moe, tmp_path, capsys):
    texts = []
    for words in ((), ("--ram", "200k", "--spec", "3"), ("--ram", "200k"), ("--spec", "2")):
        assert main(gen(moe, tmp_path, "--json", *words)) == 0
        body = json.loads(capsys.readouterr().out)
        texts.append(body["ids"])
        if words == ("--ram", "200k"):
            assert "speculation" not in body, "off unless asked for"
    assert texts.count(texts[0]) == len(texts)


def test_the_card_s_part_of_a_token():
    """A card of 25, 50 and 75 % of a mixture of 13 layers (H200, everything else in RAM): what was measured, within 20 %."""
    shape = tier_plan.Shape(96, 0.907e6, 2.09e9, 0.02e9, 12)
    for v, cpu_ms, measured in ((0.027, 1.29, 2.70), (0.33, 0.83, 2.20), (0.624, 0.54, 1.63)):
        cpu = 1 / (cpu_ms / 1e3 / (96 * (1 - v) * 0.907e6) - (1 - v) / tier_plan.CPU_BESIDE)
        rates = tier_plan.Rates(cpu=cpu, vram=4.2e12, gpu_ms=13 * tier_plan.LAYER_US / 1e3)
        c = tier_plan.cost(shape, tier_plan.Hits(v, 1.0, 1 - v), rates)
        assert c.serial == pytest.approx(measured, rel=0.2) and 0 < c.card < c.cpu
    h = tier_plan.hits(shape, tier_plan.WORK_VRAM + shape.rest + shape.bank / 4, shape.bank / 2, stays=True)
    assert (h.vram, h.divided) == (pytest.approx(tier_plan.popularity(tier_plan.CURVE, 0.25)), 1.0) and h.ram > 2 / 3 - 0.01
    assert tier_plan.hits(shape, 1e12, 0) == tier_plan.Hits(1.0, 1.0)


def test_the_bus_takes_what_ends_with_the_processor():
    shape, h = tier_plan.Shape(48, 10.6e6, 12.2e9, 1e9, 6), tier_plan.Hits(0.25, 1.0, 1.0)
    alone = tier_plan.Rates(cpu=90e9, vram=4.2e12, gpu_ms=0.5)
    both, cpu = tier_plan.replace(alone, pcie=55e9), 1 / (1 / 90e9 + 1 / tier_plan.CPU_BESIDE)
    taken = tier_plan.over_bus(shape, h, both)
    missing = 48 * 0.75 * 10.6e6
    assert tier_plan.over_bus(shape, h, alone) == 0 and 0.2 * missing < taken < 0.5 * missing
    assert (missing - taken) / cpu == pytest.approx(6 * tier_plan.BUS_US / 1e6 + taken / (tier_plan.BUS_BESIDE * 55e9))
    assert tier_plan.cost(shape, h, both).serial < 0.8 * tier_plan.cost(shape, h, alone).serial
    assert tier_plan.over_bus(shape, tier_plan.Hits(0.25, 0.1, 1.0), both) <= 0.1 * missing, "what is not in RAM does not come over the bus"


def test_a_plan_for_a_card(moe, capsys):
    words = ["tiers", "plan", str(moe), "--vram", "2g", "--ram", "300k", "--rate", "cpu=10", "--rate", "disk=1", "--json"]
    assert main([*words, "--rate", "vram=1000"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["vram_share"] > 0 and body["ms"]["card"] > 0 and body["ms"]["other"] > 0


def test_a_plan_counts_what_the_card_holds_beside_experts(moe, capsys, monkeypatch):
    """Where the build can say it, the card's share of the visits follows the placement's arithmetic; less memory than the rest takes is an error."""
    rates = ["--rate", "cpu=10", "--rate", "disk=1", "--rate", "vram=1000", "--rate", "pcie=50", "--json", "--ram", "1m"]
    bank = 0
    for beside in (1 << 28, 1 << 29):
        monkeypatch.setattr(placement, "beside_experts", lambda s, limit, beside=beside: beside)
        assert main(["tiers", "plan", str(moe), "--vram", str(beside + 100_000), *rates]) == 0
        body = json.loads(capsys.readouterr().out)
        bank = body["bank_bytes"]
        assert body["vram_share"] == pytest.approx(tier_plan.popularity(tier_plan.CURVE, 100_000 / bank))
    monkeypatch.setattr(placement, "beside_experts", lambda s, limit: (_ for _ in ()).throw(Bw24Error("the card's 1 MiB", placement.E_MEMORY)))
    assert main(["tiers", "plan", str(moe), "--vram", "1m", *rates]) == 2 and "the card's 1 MiB" in capsys.readouterr().err
    with open_model(moe) as model:
        s = engine.situation(model, device.Choice("cuda", True), Tiers(vram=1 << 33, force=True), None, engine.parse_kv(None), 64)
        monkeypatch.undo()
        monkeypatch.setattr(placement, "predict", lambda *_: Sizes(64, 90, 0, 0, 0, 0, 90 << 20, 0, 30 << 20))
        passing = placement.LIFTED * (30 << 20) // placement._experts(model, None)
        assert placement.beside_experts(s, 1 << 33) == (60 << 20) + passing + placement.MARGIN + s.kv(64)


def recorded_breakdowns() -> list[dict]:
    path = Path(__file__).resolve().parent.parent / "research" / "spill.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if "breakdown" in row]


@pytest.mark.parametrize("row", recorded_breakdowns(), ids=lambda row: f"{row['revision'][:7]} {row['router']} {row['vram'] >> 30}g")
def test_the_cost_model_is_within_a_fifth_of_every_recorded_breakdown(row):
    """A token's milliseconds with the rates that the same run measured: at the hit shares that were counted, and at those of the popularity curve."""
    layers, expert = row.get("moe_layers", 6), 10_616_832
    visits = 8 * layers
    rest = row["file_bytes"] - row["bank_bytes"]
    shape = tier_plan.Shape(visits, expert, row["bank_bytes"], rest, layers, row["vram"] - (row["bw24"]["turns"][0]["set_mib"] << 20))
    given = {name: 1e9 * value for name, value in row["predicted"]["rates_gbps"].items()}
    pack = tier_plan.pack_rate(row["bw24"]["threads"])
    rates = tier_plan.Rates(**given, pack=pack, gpu_ms=layers * tier_plan.LAYER_US / 1e3 + rest / given["vram"] * 1e3)
    counted, measured = row["breakdown"], 1e3 / row["breakdown"]["decode"]
    for h in (tier_plan.Hits(counted["v"], counted["r"], 1.0), tier_plan.hits(shape, row["vram"], row["ram"])):
        assert tier_plan.cost(shape, h, rates).serial == pytest.approx(measured, rel=0.2)
    assert tier_plan.over_bus(shape, tier_plan.Hits(counted["v"], counted["r"], 1.0), rates) == pytest.approx(
        counted["bus"] * visits * expert, rel=0.3, abs=0.05 * visits * expert)
    limit, used = row["vram"] >> 20, counted["device_mib"]
    assert 0.97 * limit < used <= limit, "the card's memory, as it was predicted"
