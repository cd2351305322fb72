"""Experts read from files: every budget, placement and policy gives the bits of the model in memory; budgets are kept; what fails says so."""

from __future__ import annotations

import os
import shutil
import struct
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import mixtures
from bw24 import abi, gate, placement, tiers, units
from bw24.engine import Engine
from bw24.errors import Bw24Error
from bw24.source import open_model
from bw24.tiers import Tiers

ISAS = [i for i in ("portable", "avx2", "avxvnni", "avx512vnni") if abi.lib().bw24_isa_supported(i.encode())]
FULL = ("hy_v3", "hy_v3-mix-q4", "minimax-m2", "qwen35moe", "qwen35moe-mix-q4", "qwen35moe-mix-low", "gemma4-26b-a4b")
IDS = [(i * 37 + 11) % 60 for i in range(60)]
ROWS = 40  # of IDS that go in as a prompt, 16 at a time; the others are decoded one by one


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> dict[str, Path]:
    return mixtures.write(tmp_path_factory.mktemp("moe"))


def run(path: Path, experts: Tiers | None = None, look: Callable[[Engine], None] | None = None, **settings) -> np.ndarray:
    """Logits of IDS, f32 [len(IDS), vocabulary]; `look` sees the engine at the end."""
    settings = {"device": "cpu", "threads": 2, "max_rows": 16, "tiers": experts, **settings}
    with open_model(path, "keep") as model, Engine(model, **settings) as engine, engine.sequence() as seq:
        out = [seq.prefill(IDS[:ROWS], "all"), *(seq.decode(t)[None] for t in IDS[ROWS:])]
        if look:
            look(engine)
    return np.concatenate(out)


@cache
def resident(path: Path) -> bytes:
    return run(path).tobytes()


def sizes(path: Path) -> dict[str, int]:
    """Counters of a spill that has run nothing."""
    with open_model(path, "keep") as model, Engine(model, device="cpu", threads=1, max_rows=4, tiers=Tiers(ram=0, force=True)) as engine:
        return engine.spill.stats()


# ---- the same bits


@pytest.mark.parametrize("policy", ["lru", "slru"])
@pytest.mark.parametrize("share", [0, 0.2, 0.5, 0.9, 4])
@pytest.mark.parametrize("name", mixtures.NAMES)
def test_any_budget_gives_the_resident_bits(files, name, share, policy):
    counts = {}
    bank = sizes(files[name])["bank"]
    got = run(files[name], Tiers(ram=int(share * bank), policy=policy, force=True), lambda e: counts.update(e.spill.stats()))
    assert got.tobytes() == resident(files[name])
    allowed = max(int(share * bank), counts["floor"])
    assert counts["used"] <= counts["peak"] <= allowed * 1.05
    assert counts["visits"] >= counts["wanted"] > counts["hits"] * (share < 1)
    assert (counts["hits"] == counts["wanted"]) == (share > 1), "everything fits, so it was read before the first token"
    assert counts["errors"] == 0 and counts["bytes_read"] >= counts["hits"] // counts["wanted"]
    if share == 0:
        assert counts["evictions"] >= counts["wanted"] - counts["hits"] - 5, "two experts fit: every other use pushes one out"


@pytest.mark.parametrize("settings", [{"threads": 1}, {"threads": 5}, {"fuse": False}, {"repack": False}, *({"isa": isa} for isa in ISAS)], ids=str)
def test_threads_and_seams_change_nothing(files, settings):
    for ram in (0, 300_000):
        assert run(files["qwen35moe"], Tiers(ram=ram, force=True, readers=3), **settings).tobytes() == resident(files["qwen35moe"])


def test_random_placements(files):
    """What is in RAM before a step is drawn anew each time: any mix of experts from RAM and files gives the same row."""
    rng = np.random.default_rng(7)
    path = files["qwen35moe"]
    want = np.frombuffer(resident(path), np.float32).reshape(len(IDS), -1)
    with open_model(path) as model, Engine(model, device="cpu", threads=2, tiers=Tiers(ram=400_000, force=True)) as engine, engine.sequence() as seq:
        pairs = [(layer, e) for layer, (_, n) in enumerate(engine.spill.layers()) for e in range(n)]
        for i, token in enumerate(IDS):
            chosen = np.array(pairs, np.int32)[rng.permutation(len(pairs))[: rng.integers(0, 12)]].reshape(-1, 2)
            engine.spill.warm(chosen)
            assert seq.decode(token).tobytes() == want[i].tobytes()


def test_a_thousand_tokens(files, tmp_path):
    path, key = tmp_path / "long.gguf", b"hy_v3.context_length" + struct.pack("<I", 4)  # the same model, with a longer context
    data = files["hy_v3"].read_bytes()
    assert data.count(key + struct.pack("<I", 512)) == 1
    path.write_bytes(data.replace(key + struct.pack("<I", 512), key + struct.pack("<I", 2048)))
    with open_model(path, "keep") as model:
        def text(mix: bool = False, **settings) -> list[int]:
            rng = np.random.default_rng(11)
            with Engine(model, device="cpu", threads=2, **settings) as engine, engine.sequence() as seq:
                pairs = [(i, e) for i, (_, n) in enumerate(engine.spill.layers()) for e in range(n)] if mix else []
                out = [5]
                while len(out) < 1000:
                    if mix:
                        engine.spill.warm(np.array(pairs, np.int32)[rng.permutation(len(pairs))[: rng.integers(0, 6)]].reshape(-1, 2))
                    out.append(int(np.argmax(seq.decode(out[-1]))))
                if engine.spill:
                    c = engine.spill.stats()
                    assert c["peak"] <= 1.05 * max(c["budget"], c["floor"]) and not c["errors"]
                    assert mix or engine.placement.ram or c["evictions"] >= c["wanted"] - c["hits"] - 5, "each use pushes one out"
            return out
        plain = text()
        assert len(set(plain)) > 1
        bank = sizes(path)["bank"]
        for policy in ("lru", "slru"):
            assert text(tiers=Tiers(ram=bank // 3, policy=policy, force=True)) == plain
        assert text(tiers=Tiers(ram=0, force=True)) == plain, "every expert from the file"
        assert text(True, tiers=Tiers(ram=bank // 3, force=True)) == plain, "any mix of RAM and file"
        assert text(tiers=Tiers(ram=bank // 3, vram=bank // 4, force=True)) == plain, "with a set kept apart"


def test_the_gate_holds_over_spilled_experts(files):
    with open_model(files["qwen35moe"]) as model:
        def factory(**changes):
            return Engine(model, **{"device": "cpu", "threads": 2, "tiers": Tiers(ram=300_000, force=True), **changes})
        verdicts = [v for v in gate.Equalities(factory, IDS[:40]).run() if v.status == gate.FAIL]
    assert verdicts == []


def test_speculation_reads_the_drafter_s_experts_too(files):
    with open_model(files["qwen35moe"]) as model, Engine(model, device="cpu", draft=True, tiers=Tiers(ram=200_000, force=True)) as engine:
        trunk = model.list_text().count("\nEXPERTS ")
        assert len(engine.spill.layers()) == trunk + 1


@pytest.mark.parametrize("name", FULL)
def test_golden_models(goldens, name):
    path = goldens / "tiny" / f"{name}.gguf"
    base = run(path)
    for ram in (0, sizes(path)["bank"] // 2):
        assert run(path, Tiers(ram=ram, force=True)).tobytes() == base.tobytes()


# ---- policies and numbers


def test_a_frozen_set_stays(files, tmp_path):
    path, profile, counts = files["qwen35moe"], tmp_path / "p.json", {}
    with open_model(path) as model, Engine(model, device="cpu", tiers=Tiers(ram=0, force=True)) as engine:
        layers = engine.spill.layers()
        uses = [np.arange(n, 0, -1) for _, n in layers]
        tiers.write_profile(profile, tiers.model_hash(model), layers, uses, 3)
    ram = sizes(path)["bank"] // 2
    got = run(path, Tiers(ram=ram, profile=str(profile), force=True), lambda e: counts.update(e.spill.stats()))
    assert got.tobytes() == resident(path)
    assert counts["used"] <= ram and counts["hits"] > counts["wanted"] // 4
    with pytest.raises(Bw24Error, match="made for model"):
        run(files["minimax-m2"], Tiers(ram=0, profile=str(profile), force=True))
    with pytest.raises(Bw24Error, match="needs --profile FILE"):
        run(path, Tiers(ram=0, policy="frozen", force=True))


def test_traces_and_hits(files):
    path = files["minimax-m2"]
    seen = []
    run(path, Tiers(ram=150_000, trace=1 << 16, force=True), lambda e: seen.extend([e.spill.trace(), e.spill.stats()]))
    trace, counts = seen
    uses = trace[trace != -1]
    assert len(uses) == counts["wanted"] and int((uses < 0).sum()) == counts["hits"]
    assert int((trace == -1).sum()) == -(-ROWS // 16) + len(IDS) - ROWS
    assert counts["trace_lost"] == 0


def test_the_default_is_memory(files):
    with open_model(files["hy_v3"], "keep") as model, Engine(model, device="cpu") as engine:
        assert engine.spill is None and engine.placement is None
    with open_model(files["hy_v3"], "keep") as model:
        made = placement.decide(model, Tiers(), None, free=40_000, granted=30_000)
        assert made is not None and 0 <= made.ram <= 30_000 and "read from" in made.note
        assert placement.decide(model, Tiers(ram=1 << 40), None, 1 << 40, 1 << 40) is None
        with pytest.raises(Bw24Error, match="no video memory"):
            placement.decide(model, Tiers(vram=1 << 30), None, 1 << 40, 1 << 40)


def test_a_dense_model_has_nothing_to_divide(fixtures):
    with pytest.raises(Bw24Error, match="no experts"):
        run(fixtures / "tiny" / "qwen3.gguf", Tiers(ram=1 << 20))


def test_backend_ref_keeps_experts_in_memory(files):
    with pytest.raises(Bw24Error, match="holds every expert itself"):
        run(files["hy_v3"], Tiers(ram=0, force=True), backend="ref")


@pytest.mark.parametrize("text, value", [("24g", 24 << 30), ("512m", 512 << 20), ("1.5G", 3 << 29), ("100", 100), ("2 kib", 2048), ("8GB", 8 << 30)])
def test_sizes(text, value):
    assert units.parse_size(text) == value


@pytest.mark.parametrize("text", ["", "-1", "g", "1x", "nan", "1e9", "99999999999999999"])
def test_bad_sizes(text):
    with pytest.raises(Bw24Error, match="expected bytes such as"):
        units.parse_size(text)


# ---- memory pressure


def system(root: Path, available: int, total: int = 64 << 30, limit: int | None = None, used: int = 0) -> Tiers:
    """A made-up system for the memory limits."""
    (root / "proc" / "self").mkdir(parents=True, exist_ok=True)
    (root / "proc" / "meminfo").write_text(f"MemTotal: {total >> 10} kB\nMemFree: 1 kB\nMemAvailable: {available >> 10} kB\n")
    (root / "proc" / "self" / "cgroup").write_text("0::/job/step\n" if limit else "")
    if limit:
        group = root / "sys" / "fs" / "cgroup" / "job"
        (group / "step").mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text("anon 5\ninactive_file 4096\n")
        (group / "step" / "memory.max").write_text("max\n")
    return Tiers(ram=1 << 30, force=True, root=str(root))


@pytest.mark.parametrize("make", [
    lambda root: system(root, available=5 << 30), lambda root: system(root, 1 << 40, total=1 << 44),
    lambda root: system(root, 64 << 30, limit=1 << 20, used=900 << 10),
], ids=["the reserve", "eight percent", "a cgroup"])
def test_the_system_keeps_its_reserve(files, tmp_path, make):
    counts = {}
    assert run(files["qwen35moe"], make(tmp_path), lambda e: counts.update(e.spill.stats())).tobytes() == resident(files["qwen35moe"])
    assert counts["peak"] <= max(counts["limit"], counts["floor"]) * 1.05
    assert (counts["limit"] < counts["bank"]) == (counts["backoffs"] > 0)


def test_it_backs_off_while_it_runs(files, tmp_path):
    path = files["qwen35moe"]
    settings = system(tmp_path, 60 << 30)
    with open_model(path) as model, Engine(model, device="cpu", threads=2, tiers=settings) as engine, engine.sequence() as seq:
        want = np.frombuffer(resident(path), np.float32).reshape(len(IDS), -1)
        assert seq.prefill(IDS[:30], "all").tobytes() == want[:30].tobytes()
        before = engine.spill.stats()
        assert before["used"] == before["bank"]
        system(tmp_path, 1 << 30)
        threading.Event().wait(0.15)  # the system's memory is looked at ten times a second
        for i in range(30, 60):
            assert seq.decode(IDS[i]).tobytes() == want[i].tobytes()
        after = engine.spill.stats()
    assert after["used"] <= after["floor"] and after["backoffs"] == 1


# ---- files that fail


def damaged(files, tmp_path, harm: Callable[[Path], None], tiers_of: Tiers | None = None) -> None:
    """Runs half of IDS, harms the file, runs on: an error, or the right bits."""
    path = tmp_path / "model.gguf"
    shutil.copy(files["qwen35moe"], path)
    want = np.frombuffer(resident(files["qwen35moe"]), np.float32).reshape(len(IDS), -1)
    settings = tiers_of or Tiers(ram=0, force=True)
    with open_model(path) as model, Engine(model, device="cpu", threads=2, tiers=settings) as engine, engine.sequence() as seq:
        assert seq.prefill(IDS[:30], "all").tobytes() == want[:30].tobytes()
        harm(path)
        for i in range(30, 60):
            assert seq.decode(IDS[i]).tobytes() == want[i].tobytes()
        assert seq.pos == 60


def overwrite(path: Path) -> None:
    with open(path, "r+b") as f:
        f.seek(path.stat().st_size // 2)
        f.write(b"\x55" * 4096)
    os.utime(path, (1, 1))


def test_a_file_changed_in_place_is_an_error(files, tmp_path):
    with pytest.raises(Bw24Error, match="model.gguf: expected .* the file was changed while in use"):
        damaged(files, tmp_path, overwrite)


def test_a_file_that_shrinks_is_an_error(files, tmp_path):
    with pytest.raises(Bw24Error, match="(ends too early|changed while in use)"):
        damaged(files, tmp_path, lambda path: os.truncate(path, path.stat().st_size // 3))


def test_a_replaced_file_goes_on_as_it_was(files, tmp_path):
    def replace(path: Path) -> None:
        other = path.with_name("other")
        other.write_bytes(b"\0" * path.stat().st_size)
        other.replace(path)

    damaged(files, tmp_path, replace)


def test_after_an_error_the_sequence_stands_where_it_was(files, tmp_path):
    path = tmp_path / "model.gguf"
    shutil.copy(files["minimax-m2"], path)
    with open_model(path) as model, Engine(model, device="cpu", tiers=Tiers(ram=0, force=True)) as engine, engine.sequence() as seq:
        first = seq.prefill(IDS[:20], "all").tobytes()
        stamp = path.stat()
        os.utime(path, (1, 1))
        for _ in range(3):
            with pytest.raises(Bw24Error, match="changed while in use"):
                seq.decode(IDS[20])
        assert seq.pos == 20
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        seq.truncate(0)
        assert seq.prefill(IDS[:20], "all").tobytes() == first


def mirrored(files, tmp_path) -> tuple[Tiers, Path]:
    """Settings that read two copies of qwen35moe, and the second copy."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        shutil.copy(files["qwen35moe"], tmp_path / name / "model.gguf")
    return Tiers(ram=0, force=True, nvme=(str(tmp_path / "one"), str(tmp_path / "two"))), tmp_path / "two" / "model.gguf"


def test_a_mirror_shares_the_reads(files, tmp_path):
    counts = {}
    settings, copy = mirrored(files, tmp_path)
    assert run(copy, settings, lambda e: counts.update(e.spill.stats())).tobytes() == resident(files["qwen35moe"])
    assert counts["mirrors"] == 1 and 0.2 < counts["mirror_bytes"] / counts["bytes_read"] < 0.8


def test_without_its_second_drive_it_goes_on_with_the_first(files, tmp_path):
    settings, copy = mirrored(files, tmp_path)
    damaged(files, tmp_path, lambda _: os.truncate(copy, 100), settings)


@pytest.mark.parametrize("harm, message", [
    (lambda copy: copy.unlink(), "is not there"), (lambda copy: os.truncate(copy, 5000), "found 5000"),
    (lambda copy: copy.write_bytes(bytes(len(copy.read_bytes()))), "is no copy of"),
], ids=["missing", "short", "other bytes"])
def test_a_mirror_must_be_a_copy(files, tmp_path, harm, message):
    settings, copy = mirrored(files, tmp_path)
    harm(copy)
    with pytest.raises(Bw24Error, match=message):
        run(tmp_path / "one" / "model.gguf", settings)


def test_buffered_reads_are_said_and_equal(files):
    counts = {}
    got = run(files["hy_v3"], Tiers(ram=0, force=True, buffered=True), lambda e: counts.update(e.spill.stats()))
    assert got.tobytes() == resident(files["hy_v3"]) and counts["direct"] == 0


def test_a_profile_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(Bw24Error, match="cannot write"):
        tiers.write_profile(tmp_path / "no" / "p.json", "x", [], [], 0)
    if Path("/dev/full").exists():
        (tmp_path / "p.json.part").symlink_to("/dev/full")
        with pytest.raises(Bw24Error, match="cannot write: No space left"):
            tiers.write_profile(tmp_path / "p.json", "x", [("d", 4)], [np.zeros(4, int)], 0)
        assert not (tmp_path / "p.json").exists()


def test_a_cancelled_step_leaves_no_expert_held(files):
    """Cancelled at any moment, from another thread, a thousand times: the next step has room and the right bits."""
    path = files["qwen35moe"]
    want = np.frombuffer(resident(path), np.float32).reshape(len(IDS), -1)
    with open_model(path) as model, Engine(model, device="cpu", threads=3, tiers=Tiers(ram=0, force=True)) as engine, engine.sequence() as seq:
        stop = threading.Event()

        def nag() -> None:
            while not stop.wait(0.0007):
                engine.cancel()

        thread = threading.Thread(target=nag)
        thread.start()
        cancelled = 0
        try:
            for i, token in enumerate(IDS):
                while seq.pos == i:
                    try:
                        assert seq.decode(token).tobytes() == want[i].tobytes()
                    except Bw24Error as error:
                        assert "cancelled" in str(error)
                        cancelled += 1
                        if cancelled > 1000:
                            stop.set()
        finally:
            stop.set()
            thread.join()
        assert cancelled > 0 and engine.spill.stats()["peak"] <= engine.spill.stats()["floor"]
