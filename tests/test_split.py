"""Experts divided between a set kept apart, as a card keeps one, RAM and files: every division gives the bits of the model in memory. Backend cpu
stands in for the card; what the card itself computes is compared on one (kernel-check, gate)."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mixtures
from bw24 import abi, placement, tiers
from bw24.engine import Engine
from bw24.errors import Bw24Error
from bw24.placement import Situation
from bw24.sizes import Sizes
from bw24.source import open_model
from bw24.tiers import Tiers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import spill_same  # noqa: E402

IDS = [(i * 41 + 7) % 60 for i in range(48)]
ROWS = 32  # of IDS that go in as a prompt, 16 at a time
ROOM = 64 << 20  # for every expert of a tiny model


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> dict[str, Path]:
    return mixtures.write(tmp_path_factory.mktemp("split"))


def logits(engine: Engine) -> np.ndarray:
    with engine.sequence() as seq:
        return np.concatenate([seq.prefill(IDS[:ROWS], "all"), *(seq.decode(t)[None] for t in IDS[ROWS:])])


def engine(model, ram: int = 0, vram: int = ROOM, **settings) -> Engine:
    tiers_of = settings.pop("tiers", None) or Tiers(ram=ram, vram=vram, force=True, trace=settings.pop("trace", 0))
    return Engine(model, **{"device": "cpu", "threads": 2, "max_rows": 16, "tiers": tiers_of, **settings})


def every(e: Engine) -> np.ndarray:
    return np.array([(i, x) for i, (_, n) in enumerate(e.spill.layers()) for x in range(n)], np.int32)


@pytest.mark.parametrize("name", mixtures.NAMES)
def test_any_division_gives_the_resident_bits(files, name):
    rng = np.random.default_rng(3)
    with open_model(files[name], "keep") as model:
        with Engine(model, device="cpu", threads=2, max_rows=16) as plain:
            want = logits(plain).tobytes()
        for share in (0.0, 0.3, 0.7, 1.0):
            for ram in (0, ROOM):
                with _with_set(model, ram, share, rng) as e:
                    assert logits(e).tobytes() == want
                    c = e.spill.stats()
                    assert c["vram_visits"] + c["visit_hits"] <= c["visits"]
                    assert (c["vram_visits"] == c["visits"]) == (share == 1.0) and (c["vram_visits"] > 0) == (share > 0)
                    assert c["used"] <= c["peak"] <= max(ram, c["floor"])


def _with_set(model, ram: int, share: float, rng) -> Engine:
    """An engine whose set is a random `share` of the experts: its room is nothing at first, so that warm_up leaves it empty."""
    class Late(tiers.Spill):
        def warm_up(self) -> None:
            pairs = np.array([(i, x) for i, (_, n) in enumerate(self.layers()) for x in range(n)], np.int32)
            chosen = pairs[rng.permutation(len(pairs))[: round(share * len(pairs))]]
            assert self.card(chosen) == len(chosen)

    import bw24.engine as module

    kept, module.Spill = module.Spill, Late
    try:
        return engine(model, ram)
    finally:
        module.Spill = kept


@pytest.mark.parametrize(("name", "arms"), [("hy_v3", "file,mix,moving-small,card"), ("qwen35moe", "file,mix")])
def test_a_thousand_rows_under_forced_placements(files, name, arms, capsys):
    """Every row of logits: all experts from the file, any mix of set, RAM and file drawn anew for each token, a small set, all in the set."""
    assert spill_same.main([str(files[name]), "--device", "cpu", "--tokens", "1000", "--only", arms]) == 0
    assert capsys.readouterr().out.count("IDENTICAL") == len(arms.split(","))


def test_uses_and_traces_count_the_set(files):
    with open_model(files["qwen35moe"]) as model:
        counts = []
        for vram in (0, ROOM):
            tiers_of = Tiers(ram=0, vram=vram, force=True, trace=tiers.TRACE_ROOM)
            with Engine(model, device="cpu", threads=1, tiers=tiers_of) as e:
                logits(e)
                trace = e.spill.trace()
                counts.append(([u.tolist() for u in e.spill.uses()], sorted(int(t) & 0x7fffffff for t in trace if t != -1), int((trace == -1).sum())))
                assert e.spill.stats()["vram_visits"] == (e.spill.stats()["visits"] if vram else 0)
        assert counts[0] == counts[1]


def test_a_profile_chooses_the_set(files, tmp_path):
    path, profile = files["hy_v3"], tmp_path / "p.json"
    with open_model(path, "keep") as model:
        with engine(model, vram=0) as e:
            layers = e.spill.layers()
            uses = [np.arange(n, 0, -1) for _, n in layers]
            tiers.write_profile(profile, tiers.model_hash(model), layers, uses, 3)
            bank, one = e.spill.stats()["bank"], tiers.bank_of(model).nbytes // 4
        with engine(model, tiers=Tiers(ram=bank, vram=2 * one, force=True, profile=str(profile))) as e:
            c = e.spill.stats()
            assert c["vram_used"] == 2 * one and c["vram_experts"] == 2 and c["used"] > 0


def test_the_set_holds_no_more_than_its_room(files):
    with open_model(files["hy_v3"], "keep") as model, engine(model, vram=ROOM) as e:
        c = e.spill.stats()
        assert c["vram_experts"] == len(every(e)), "all that fits is there"
        one = c["vram_used"] // c["vram_experts"]
        with engine(model, vram=3 * one + one // 2) as small:
            c = small.spill.stats()
            assert c["vram_experts"] == 3 and c["vram_used"] <= c["vram"]
            assert small.spill.card(every(small)) == 3, "full is full"
            with pytest.raises(Bw24Error, match="no layer"):
                small.spill.card(np.array([[99, 0]], np.int32))
    with open_model(files["hy_v3"], "keep") as model, engine(model, vram=0) as e, pytest.raises(Bw24Error, match="vram=0"):
        e.spill.card(every(e))


def test_an_expert_that_cannot_be_read_is_an_error(files, tmp_path):
    path = tmp_path / "damaged.gguf"
    shutil.copy(files["hy_v3"], path)
    with open_model(path, "keep") as model, engine(model, vram=0, ram=0) as e:
        pairs = every(e)
    with open_model(path, "keep") as model:
        class Broken(tiers.Spill):
            def warm_up(self) -> None:
                with open(path, "r+b") as f:
                    f.truncate(path.stat().st_size - 4096)
                with pytest.raises(Bw24Error, match=path.name):
                    self.card(pairs)

        import bw24.engine as module

        kept, module.Spill = module.Spill, Broken
        try:
            with engine(model) as e:
                assert e.spill.stats()["vram_experts"] < len(pairs)
        finally:
            module.Spill = kept


# ---- the decision


def card(limit: int, rest: int = 100, experts: int = 1000, ctx: int | None = 1, per: int = 0) -> placement.Card:
    return placement.Card(limit * (1 << 20) + placement.MARGIN, rest << 20, experts << 20, lambda n: n * per, ctx, 1 << 16)


def test_what_fits_stays_on_the_card(files):
    with open_model(files["hy_v3"], "keep") as model:
        where = lambda limit, **asked: placement.decide(model, Tiers(**asked), None, 1 << 40, 1 << 40, card(limit))  # noqa: E731
        assert where(2000) is None and where(2000, vram=1, ram=5) is None
        made = where(600)
        assert made.vram == 500 << 20 and made.card_experts(100) == 50 and "on the card" in made.note
        assert where(2000, nvme=("/a",)).vram == 1000 << 20
        assert where(600, ram=7).ram == 7 and where(600).ram > model.file.tensors["blk.1.ffn_up_exps.weight"].nbytes
        with pytest.raises(Bw24Error, match="do not hold the weights"):
            where(50)
    tight = card(600, ctx=None, per=1 << 20)
    assert tight.set_bytes == (500 << 20) * 7 // 8, "an eighth is left to the cache"
    assert card(600, ctx=100, per=1 << 20).set_bytes == 400 << 20


def test_backends_without_a_set_say_so(files):
    with open_model(files["hy_v3"], "keep") as model, pytest.raises(Bw24Error, match="no video memory"):
        Engine(model, device="cpu", tiers=Tiers(vram=1 << 20))
    assert abi.lib().bw24_spill_card(abi.ffi.NULL, abi.ffi.NULL, 0) == -1


def test_the_set_gets_what_the_context_in_use_leaves(files, monkeypatch):
    """Work memory of attention grows with the context: an asked one, or the one that the cache's part of the card holds, is what is counted."""
    grows, seen = 1 << 16, []

    def predict(tensors, lists, backend, kv, context, rows):
        seen.append(context)
        return Sizes(context, 56 << 20, 0, 0, 0, 0, (56 << 20) + context * grows, 0, 48 << 20)

    monkeypatch.setattr(placement, "predict", predict)
    with open_model(files["hy_v3"]) as model:
        own, limit = model.context_length, 128 << 20
        card = SimpleNamespace(cuda=True, backend="cuda")

        def put(ctx, vram):
            s = Situation(model, card, Tiers(vram=vram, force=True), None, {}, ctx, 64, True, 1 << 40, 1 << 40, lambda n: n << 14)
            return placement.place(s)

        for ctx in (64, 128):
            found, _, room = put(ctx, limit + placement.MARGIN)
            rest = (8 << 20) + ctx * grows
            assert seen[-1] == ctx and room >= ctx << 14
            assert found.vram + room + rest + placement.LIFTED * (48 << 20) // placement._experts(model, None) == limit
        found, _, room = put(None, limit + placement.MARGIN)
        chosen = room >> 14
        assert own % chosen == 0 and seen[-1] == chosen and chosen << 14 <= limit // placement.KV_SHARE and found.vram > 0
