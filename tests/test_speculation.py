"""The MTP block: golden logits and draft chains, bits equal on every backend, rows in any cut, lists that share a model.
Rounds of drafts: the text of plain decoding for every K and sampler, exact counts where the drafts are known."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from bw24 import abi, plain, speculate
from bw24.cli_check import GATE_ROWS, gate_ids
from bw24.depth import Depth
from bw24.drafter import embedded, open_draft
from bw24.engine import Engine
from bw24.errors import Bw24Error
from bw24.gate import Equalities, run_rows
from bw24.gate_spec import SAMPLERS as SAMPLERS_OF_GATE
from bw24.gate_spec import Speculation
from bw24.generate import Generation
from bw24.models import resolve
from bw24.sampling import SamplingParams, sample
from bw24.source import open_model
from bw24.speculate import AUTO, Drafted, Rounds, play
from conftest import FIXTURES

NAME = "qwen35moe"
FULL = ("qwen35-r2", "qwen35-r3", "qwen35moe", "hy_v3", "qwen35-mix-q4km", "qwen35-mix-nvfp4", "qwen35-mix-low", "qwen35moe-mix-q4",
        "qwen35moe-mix-low", "hy_v3-mix-q4")
ISAS = [i for i in ("portable", "avx2", "avxvnni", "avx512vnni") if abi.lib().bw24_isa_supported(i.encode())]
TOLERANCE = 1e-3  # the golden set's own for engines in f32


@cache
def opened():
    return open_model(FIXTURES / "tiny" / f"{NAME}.gguf")


@cache
def golden() -> dict[str, np.ndarray]:
    with np.load(FIXTURES / "tiny" / f"{NAME}.npz") as z:
        return dict(z)


def engine(**settings) -> Engine:
    return Engine(opened(), **{"threads": 2, "max_rows": 256, "draft": True, **settings})


def before(hidden: np.ndarray) -> np.ndarray:
    """The MTP block's inputs for a whole prompt: the hidden row of the token before, zeros for the first."""
    return np.concatenate([np.zeros((1, hidden.shape[1]), np.float32), hidden[:-1]])


def mtp_rows(e: Engine, tokens: list[int], first: int | None = None, width: int = 256) -> tuple[np.ndarray, ...]:
    """Hidden rows of the trunk; MTP logits and hidden rows of the prompt; tokens and logits of three chained drafts from token `first` on."""
    with e.sequence() as seq, e.sequence("mtp") as mtp:
        parts = [range(i, min(i + width, len(tokens))) for i in range(0, len(tokens), width)]
        found = [e.step_hidden([(seq, tokens[i], True) for i in part]) for part in parts]
        first = int(found[-1][0][-1].argmax()) if first is None else first
        hidden = np.concatenate([h for _, h in found])
        inputs = before(hidden)
        drafts = [e.step_hidden([(mtp, tokens[i], True) for i in part], inputs[part.start : part.stop]) for part in parts]
        token, row, chain = first, hidden[-1:], []
        for _ in range(3):
            logits, row = e.step_hidden([(mtp, token, True)], row)
            chain.append((token, logits[0]))
            token = int(logits[0].argmax())
    logits, own = (np.concatenate(x) for x in zip(*drafts, strict=True))
    return hidden, logits, own, np.array([t for t, _ in chain]), np.stack([x for _, x in chain])


def same(a: tuple[np.ndarray, ...], b: tuple[np.ndarray, ...]) -> bool:
    return all(x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


@cache
def tokens() -> list[int]:
    return golden()["tokens_b"].tolist()


@cache
def reference() -> tuple[np.ndarray, ...]:
    with engine(backend="ref") as e:
        return mtp_rows(e, tokens())


# ---- golden numbers


def test_golden():
    g = golden()
    with engine(backend="ref", float_activations=True, kv="f32") as e:
        _, logits, _, chain, chained = mtp_rows(e, tokens())
    assert np.abs(logits[g["rows_b"]] - g["mtp_logits_b"]).max() < TOLERANCE
    assert chain.tolist() == g["mtp_chain_tokens_b"].tolist() and np.abs(chained - g["mtp_chain_logits_b"]).max() < TOLERANCE


@pytest.mark.parametrize("name", FULL)
def test_golden_full(goldens: Path, name: str):
    path = goldens / "tiny" / f"{name}.gguf"
    with np.load(path.with_suffix(".npz")) as z:
        g, prompt, first = dict(z), z["tokens_a"].tolist(), int(z["logits_a"][-1].argmax())
    names = ("h_a", "mtp_logits_a", "mtp_h_a", "mtp_chain_tokens_a", "mtp_chain_logits_a")
    with open_model(path) as model:
        with Engine(model, backend="ref", float_activations=True, kv="f32", draft=True) as e:
            for key, found in zip(names, mtp_rows(e, prompt, first), strict=True):
                assert np.abs(found - g[key]).max() < TOLERANCE, key
        with Engine(model, backend="ref", draft=True) as e:
            expected = mtp_rows(e, prompt, first)
        for isa in ISAS:
            with Engine(model, isa=isa, threads=2, draft=True) as e:
                assert same(mtp_rows(e, prompt, first), expected), isa


# ---- the same bits


@pytest.mark.parametrize("settings", [*({"isa": i} for i in ISAS), {"threads": 1}, {"threads": 3}, {"fuse": False}, {"repack": False}], ids=str)
def test_backends_and_settings(settings: dict):
    with engine(**settings) as e:
        assert same(mtp_rows(e, tokens()), reference())


@pytest.mark.parametrize("backend", ["cpu", "ref"])
@pytest.mark.parametrize("width", [1, 7, 60])
def test_rows_in_any_cut(backend: str, width: int):
    with engine(backend=backend) as e:
        assert same(mtp_rows(e, tokens()[:70], int(reference()[3][0]), width)[:3], tuple(x[:70] for x in reference()[:3]))


@pytest.mark.parametrize("settings", [{"backend": "ref"}, {"threads": 2}, {"fuse": False}], ids=str)
def test_hidden_rows_without_logits(settings: dict):
    with engine(**settings) as e, e.sequence() as seq, e.sequence("mtp") as mtp:
        logits, hidden = e.step_hidden([(seq, t, i % 3 == 0) for i, t in enumerate(tokens()[:40])], logits=False)
        assert logits is None and same((hidden,), (reference()[0][:40:3],))
        one = e.step_hidden([(seq, tokens()[40], True)], logits=False)[1]
        assert same((one,), (reference()[0][40:41],))
        inputs = before(reference()[0])
        e.step_hidden([(mtp, t, False) for t in tokens()[:30]], inputs[:30])  # keys and values only
        found = e.step_hidden([(mtp, t, True) for t in tokens()[30:40]], inputs[30:40])
        assert same(found, (reference()[1][30:40], reference()[2][30:40]))


@pytest.mark.parametrize("backend", ["cpu", "ref"])
def test_timelines_of_both_lists(backend: str):
    """A trunk's and an MTP block's timeline share a model, not pages: each is forked and taken back by itself."""
    with engine(backend=backend) as e, e.sequence() as seq, e.sequence("mtp") as mtp:
        e.step([(seq, t, False) for t in tokens()[:70]])
        trunk = e.memory()["kv"]
        inputs = before(reference()[0])
        e.step_hidden([(mtp, t, False) for t in tokens()[:70]], inputs[:70])
        assert 0 < e.memory()["kv"] - trunk < trunk
        with mtp.fork() as fork:
            e.step_hidden([(fork, t, False) for t in tokens()[:20]], inputs[:20])
            assert fork.truncate(66) == 66
            for timeline, at in ((fork, 66), (mtp, 70)):
                found = e.step_hidden([(timeline, t, True) for t in tokens()[at:90]], inputs[at:90])
                assert same(found, (reference()[1][at:90], reference()[2][at:90]))
        assert seq.pos == 70 and seq.truncate(60) == 60 and mtp.pos == 90


# ---- errors


def test_what_is_refused():
    with Engine(opened(), threads=1) as e:
        with pytest.raises(Bw24Error, match="no list 'mtp'"):
            e.sequence("mtp")
    with open_model(FIXTURES / "tiny" / "qwen3.gguf") as model, pytest.raises(Bw24Error, match="no MTP block"):
        Engine(model, threads=1, draft=True)
    with engine() as e, e.sequence() as seq, e.sequence("mtp") as mtp:
        row = np.zeros((1, e.n_hidden), np.float32)
        with pytest.raises(Bw24Error, match="takes hidden rows"):
            e.step([(mtp, 1, True)])
        with pytest.raises(Bw24Error, match="takes no hidden rows"):
            e.step_hidden([(seq, 1, True)], row)
        with pytest.raises(Bw24Error, match="of list mtp, row 0 of list trunk"):
            e.step([(seq, 1, True), (mtp, 1, True)])
        with pytest.raises(Bw24Error, match="expected shape"):
            e.step_hidden([(mtp, 1, True)], row[:, 1:])
        with pytest.raises(Bw24Error, match="Inf or NaN"):
            e.step_hidden([(mtp, 1, True)], row + np.nan)
        assert seq.pos == 0 and mtp.pos == 0
        e.step_hidden([(mtp, 1, True)], row)


# ---- rounds: the text is plain decoding's


def reply(e: Engine, prompt: list[int], params: SamplingParams, k: int, limit: int = 40) -> tuple[list[int], str, Rounds | None]:
    """Tokens, why the reply ended, and what drafting did."""
    with closing(Drafted(e, k, params, len(prompt) + limit) if k else e.sequence()) as seq:
        logits = seq.prefill(prompt, 3)[-1] if k else seq.prefill(prompt)
        made = Generation(seq, None, prompt, logits, params, ctx=e.ctx, limit=limit)
        assert not list(made)
        return made.ids, made.reason, seq.stats if k else None


SAMPLERS = {
    "greedy": SamplingParams(),
    "seeded": SamplingParams(temperature=0.7, seed=11),
    "filtered": SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.3, seed=3),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_text_is_plain_decodings(sampler: str):
    params = SAMPLERS[sampler]
    with engine() as e:
        plain = reply(e, tokens()[:50], params, 0)
        for k in (*range(1, 9), AUTO):
            ids, reason, rounds = reply(e, tokens()[:50], params, k)
            assert (ids, reason) == plain[:2], k
            assert rounds.drafted <= (k if k > 0 else 8) * rounds.rounds and len(ids) <= rounds.rounds + sum(rounds.accepted) + 1
            assert rounds.reached[0] <= rounds.rounds and all(a <= r for a, r in zip(rounds.accepted, rounds.reached, strict=True))


@pytest.mark.parametrize("name", FULL)
def test_the_text_is_plain_decodings_full(goldens: Path, name: str):
    with open_model(goldens / "tiny" / f"{name}.gguf") as model, Engine(model, threads=2, draft=True) as e:
        with np.load(goldens / "tiny" / f"{name}.npz") as z:
            prompt = z["tokens_a"].tolist()
        for params in (SAMPLERS["greedy"], SAMPLERS["seeded"]):
            plain = reply(e, prompt, params, 0)
            for k in range(1, 9):
                assert reply(e, prompt, params, k)[:2] == plain[:2], k


DRAFT = speculate.draft


class Oracle(Drafted):
    """Drafts the reply itself, wrong at every `slip`-th position: all accepted but those. Notes what the block would have drafted first."""

    def __init__(self, e: Engine, k: int, future: list[int], slip: int):
        super().__init__(e, k, SamplingParams())
        self.future, self.slip, self.firsts = future, slip, []

    def slipped(self, engine: Engine, requests) -> None:
        """In the place of speculate.draft."""
        DRAFT(engine, requests)
        request, at = requests[0], self.pos + 1
        self.firsts.append((at - 1, request.drafts[0]))
        drafts = [t ^ (at + i) % self.slip // (self.slip - 1) for i, t in enumerate(self.future[at : at + self.k])]
        request.drafted = len(drafts)
        request.drafts[0 : len(drafts)] = drafts


@pytest.mark.parametrize("backend", ["cpu", "ref"])
def test_acceptance_of_known_drafts(backend: str, monkeypatch):
    """Exact counts, rows equal to the reference's bit for bit, and the block's keys and values those of the true past, whatever was rejected."""
    prompt, future = tokens()[:40], tokens()
    with engine(backend=backend) as e, closing(Oracle(e, 3, future, 6)) as seq:
        monkeypatch.setattr(speculate, "draft", seq.slipped)
        found = [seq.prefill(prompt)[-1]]
        found += [seq.decode(t) for t in future[40:89]]
        stats, firsts = seq.stats, seq.firsts
        assert seq.pos == 89 and seq.tokens == future[:89]
    if backend == "cpu":  # the reference's own width is another, its bits are the same: one is enough
        with engine() as e:
            assert same((np.stack(found),), (run_rows(e, future[:89], 256)[39:89],))
    assert len(firsts) > 10 and all(first == int(reference()[1][at].argmax()) for at, first in firsts)
    # drafts stand at 41.., each sixth from 41 on is wrong: rounds begin where a draft was rejected or all were accepted
    expected, at = Rounds(), 40
    while at < 89:
        expected.rounds += 1
        expected.drafted += 3
        for i in range(3):
            at += 1
            if at >= 89:
                break
            expected.reached[i] += 1
            if at % 6 == 5:
                break
            expected.accepted[i] += 1
        else:
            at += 1
    assert (stats.rounds, stats.drafted, stats.reached, stats.accepted) == (expected.rounds, expected.drafted, expected.reached, expected.accepted)


def test_a_round_stays_open_while_another_reply_opens_its_next():
    """Rounds of several replies begin together and end at different times: what a reply has not read yet must not change."""
    past = tokens()[:30]
    with engine() as e, ExitStack() as stack:
        a, b, c = (stack.enter_context(closing(Drafted(e, 3, SamplingParams()))) for _ in range(3))
        for run in (a, b, c):
            run.prefill(past)
        first = speculate.open_rounds(e, [(a, 5), (b, 6)], [3, 3])
        drafts = list(b._request.c.drafts)[: b._request.c.drafted]
        kept, rows = first[1].copy(), b._logits.copy()
        speculate.open_rounds(e, [(a, 7), (c, 8)], [3, 3])
        assert len(drafts) == 3 and same((first[1],), (kept,))
        for i, token in enumerate(drafts):
            assert same((b.follow(token),), (rows[i + 1],))


def test_the_context_ends_where_plain_decoding_ends():
    with engine(ctx=64) as e:
        plain = reply(e, tokens()[:50], SAMPLERS["greedy"], 0)
        assert plain[1] == "context" and reply(e, tokens()[:50], SAMPLERS["greedy"], 8)[:2] == plain[:2]


def equalities() -> Equalities:
    return Equalities(lambda **changes: Engine(opened(), **{"threads": 1, **changes}), tokens()[:40])


def test_the_gate_holds_the_rounds():
    with closing(equalities()) as gate:
        found = {name: arm() for name, arm in gate.arms() if name.startswith(("drafted", "rows judged"))}
    assert len(found) == 20 and all(problem is None for problem, _ in found.values())
    assert found["drafted K=3 = plain, greedy"][1].startswith("32 tokens, ") and "bit-equal" in found["rows judged at 512 = decoded"][1]


def drafts_of(backend: str, params: SamplingParams, k: int) -> list[tuple[list[int], list[int]]]:
    """Tokens and drafts of six rounds."""
    past, out = tokens()[:40], []
    with engine(backend=backend) as e, closing(Drafted(e, k, params)) as seq:
        e.after_step = lambda rows, seconds: None  # who listens gets round by round
        seq.prefill(past[:-1], 0)
        for _ in range(6):
            follow = seq.round(past[-1], past)
            past = past + follow
            out.append((follow, abi.ffi.unpack(seq._request.c.drafts, seq._request.c.drafted)))
    return out


@pytest.mark.parametrize("k", [1, 4])
def test_a_planned_round_drafts_as_one_that_the_host_drives(k: int):
    """Backend ref runs a round's steps from a plan made before the first (as a card does), backend cpu goes step by step."""
    penalties = SamplingParams(temperature=0.8, top_k=30, repetition_penalty=1.4, frequency_penalty=0.2, seed=3)
    for params in (SAMPLERS["greedy"], SamplingParams(temperature=0.9, top_p=0.9, seed=5), penalties):
        found, expected = (drafts_of(backend, params, k) for backend in ("ref", "cpu"))
        assert found == expected and all(len(drafts) == k for _, drafts in found)


@pytest.mark.parametrize("name", ["gemma4-31b", "gemma4-e"])
def test_the_gate_compares_the_drafters_rows_with_ref(goldens: Path, name: str):
    """An MTP block, and assistants over the model's keys; on a card this is what holds borrowed keys."""
    ids = tokens()[:40]
    with open_model(goldens / "tiny" / f"{name}.gguf") as model:
        draft = lambda: open_draft(goldens / "tiny" / f"{name}-assistant.gguf", model)  # noqa: E731
        arms = Speculation(lambda **changes: Engine(model, **{"threads": 1, **changes, "draft": draft()}), ids)
        with closing(arms):
            assert arms.drafter() == (None, "3 drafts after 8 rows, bit-equal")


def test_the_gate_sees_a_drafter_that_differs(monkeypatch: pytest.MonkeyPatch):
    with closing(equalities()) as gate:
        assert gate.speculation.drafter() == (None, "3 drafts after 8 rows, bit-equal")
        real = type(gate.speculation.engine).step_hidden

        def wrong(self, rows, hidden=None, logits=True):
            out, handed = real(self, rows, hidden, logits)
            return out, handed if self.backend == "ref" else np.nextafter(handed, np.float32(9))

        monkeypatch.setattr(type(gate.speculation.engine), "step_hidden", wrong)
        problem, _ = gate.speculation.drafter()
    assert problem and "of draft 1 differ" in problem


def test_the_gate_sees_another_text(monkeypatch: pytest.MonkeyPatch):
    """A token that is not the one that was drawn."""
    real = Drafted.round
    monkeypatch.setattr(Drafted, "round", lambda *a: [t ^ (i == 0) for i, t in enumerate(real(*a))])
    with closing(equalities()) as gate:
        problem, _ = gate.speculation.drafted(3, "greedy")
    assert problem and "tokens agree" in problem


def test_the_gate_sees_lost_acceptance(monkeypatch: pytest.MonkeyPatch):
    """Rounds of the packaged model are those recorded; hidden rows from the wrong side of the norm leave the text and lose drafts."""
    with open_model(resolve("demo").path) as model:
        ids = gate_ids(model, model.builder.rows("token_embd.weight"), GATE_ROWS)

        def lines(hidden: str) -> list[tuple[str | None, str]]:
            arms = Speculation(lambda **_: Engine(model, device="cpu", threads=2, draft=embedded(model, hidden)), ids)
            with closing(arms):
                return [arms.drafted(k, sampler) for k in (2, 3, 8) for sampler in SAMPLERS_OF_GATE]

        assert all(problem is None and detail.endswith("as recorded") for problem, detail in lines("post"))
        assert all(problem and "recorded are" in problem for problem, _ in lines("pre")[2:])  # at K=1 so short a reply may not show it


def settled(accepts: float, draft: float, step: float, row: float) -> list[int]:
    """Depths of 200 rounds, after 200 others, where a draft takes `draft` seconds, a step `step` and `row` for each row more, and exactly the share
    `accepts` of the judged drafts is accepted."""
    depth, found, credit = Depth(8), [], [0.0] * 8
    for _ in range(400):
        found.append(k := depth.choose())
        depth.costs.timed(k, k + 1, k * draft, step + k * row)
        for i in range(k):
            credit[i] += accepts
            depth.judged(i, credit[i] >= 1)
            if credit[i] < 1:
                break
            credit[i] -= 1
    return found[200:]


def test_the_depth_that_pays():
    usual = lambda found: max(set(found), key=found.count)  # noqa: E731
    assert usual(settled(0.0, 0.001, 0.010, 0.001)) == 0  # drafts that are never right
    assert usual(settled(0.9, 0.020, 0.010, 0.001)) == 0  # drafts dearer than steps
    assert usual(settled(1.0, 0.0001, 0.010, 0.0)) == 8  # rows for nothing
    assert usual(settled(0.6, 0.001, 0.010, 0.0005)) in (1, 2, 3)
    assert settled(0.0, 0.001, 0.010, 0.001).count(0) / 200 > 0.9


def paid(accepts: list[float], draft: float, step: float, row: float, tokens: int = 1024, cold: float = 0.0) -> float:
    """Seconds that plain decoding takes over those of `auto` for so many tokens, where draft i of a round is right with probability accepts[i]; the
    rows that wait while nothing is drafted cost a tenth of a draft each, at most 32 of them. cold: seconds that the first two rounds of a depth
    take longer, as on a card that makes their graphs."""
    rng, depth, made, spent, owed, times = np.random.default_rng(3), Depth(8), 0, 0.0, 0, [0] * 9
    while made < tokens:
        k = depth.choose()
        drafting = k * draft + (min(owed, 32) * draft / 10 if k else 0)
        owed, times[k] = 0 if k else owed + 1, times[k] + 1
        late = cold if times[k] <= 2 else 0.0
        depth.costs.timed(k, k + 1, drafting + late / 4, step + k * row + late)
        spent += drafting + step + k * row
        made += 1
        for i in range(k):
            right = bool(rng.random() < accepts[i])
            depth.judged(i, right)
            if not right:
                break
            made += 1
    return made * step / spent


@pytest.mark.parametrize("draft,row", [(0.05, 0.02), (0.15, 0.1), (0.3, 0.3), (0.6, 0.6)])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
def test_auto_costs_next_to_nothing_where_drafts_do_not_pay(p: float, draft: float, row: float):
    assert paid([p] * 8, draft, 1.0, row) >= 0.98


def test_auto_finds_what_pays():
    assert paid([0.8] * 8, 0.1, 1.0, 0.05) > 1.9 and paid([0.6] * 8, 0.1, 1.0, 0.05) > 1.45
    assert paid([0.9, 0.0, 0, 0, 0, 0, 0, 0], 0.1, 1.0, 0.05) > 1.5


@pytest.mark.parametrize("cold", [1.0, 5.0, 20.0])
def test_auto_is_not_misled_by_the_first_rounds_of_a_depth(cold: float):
    """As on a card, where the first rounds of a depth launch kernel by kernel and then make the graph."""
    assert paid([0.8] * 8, 0.065, 1.0, 0.11, cold=cold) > 1.7
    assert all(paid([p] * 8, 0.065, 1.0, 0.11, cold=cold) >= 0.98 for p in (0.0, 0.1, 0.3, 0.5))


def test_auto_comes_back():
    """Drafts that were useless and are right from some token on: half the gain at the latest 600 rounds later."""
    depth, made, rounds = Depth(8), 0, 0
    for n in range(2000):
        k = depth.choose()
        depth.costs.timed(k, k + 1, k * 0.1, 1.0 + k * 0.05)
        for i in range(k):
            depth.judged(i, n > 1000)
            if n <= 1000:
                break
        if n > 1600:
            made, rounds = made + 1 + k, rounds + 1
    assert made / rounds > 5


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_rounds_without_drafts_run_together(sampler: str, monkeypatch: pytest.MonkeyPatch):
    """Where `auto` has found that drafts do not pay, one call makes several plain tokens, up to the next draft that is tried: tokens, counts and what
    the drafter proposes afterwards are those of rounds one by one."""
    params, found, start, n = SAMPLERS[sampler], [], tokens()[:50], 90
    for together in (16, 1):
        monkeypatch.setattr(plain, "MOST", together)
        monkeypatch.setattr(plain, "SLICE", 60.0)  # a busy machine's steps are slow
        with engine() as e, closing(Drafted(e, AUTO, params, len(start) + n)) as seq:
            e.costs._draft, e.costs.drafts, e.costs.steps, e.costs.counts = {1: (1e9, 5)}, 5, {1: 1.0, 2: 1.0}, {1: 5, 2: 5}
            monkeypatch.setattr(e.costs, "timed", lambda *_: None)
            past, calls = [*start, sample(seq.prefill(start)[-1], params, start, len(start))], 0
            while seq.pos < len(start) + n:
                past += seq.round(past[-1], past)
                calls += 1
            assert (seq.stats.rounds, seq.stats.drafted, len(past)) == (n, 0, len(start) + 1 + n) and seq.tokens == past[:-1]
            assert calls == n if together == 1 else calls < n / 3
            seq.end, seq.depth, seq.k = None, None, 4
            follow = seq.round(past[-1], past)
            found.append((past, follow, list(seq._request.c.drafts)[:4]))
    assert found[0] == found[1]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("k", [1, 3, 8, AUTO])
def test_rounds_of_one_call_are_those_of_single_calls(sampler: str, k: int, monkeypatch: pytest.MonkeyPatch):
    """Tokens, timeline and, where the depth does not hang on the clock, every count; the call ends where the timeline must."""
    params, found, start, n = SAMPLERS[sampler], [], tokens()[:50], 90
    monkeypatch.setattr(plain, "SLICE", 60.0)
    for together in (True, False):
        with engine() as e, closing(Drafted(e, k, params, len(start) + n)) as seq:
            if not together:
                e.after_step = lambda rows, seconds: None  # who listens gets round by round
            past, calls = [*start, sample(seq.prefill(start)[-1], params, start, len(start))], 0
            while len(past) < len(start) + n:
                past += seq.round(past[-1], past)
                calls += 1
            assert seq.tokens == past[:-1] and len(past) <= len(start) + n + (k == AUTO)
            stats = seq.stats
            assert stats.rounds == calls if not together and k != AUTO else stats.rounds >= calls
            assert stats.rounds + sum(stats.accepted) == len(past) - len(start) - 1
            found.append((past[: len(start) + n], calls, [stats.rounds, stats.drafted, stats.reached, stats.accepted] if k != AUTO else []))
    assert found[0][0] == found[1][0] and found[0][2] == found[1][2]
    assert k == AUTO or found[0][1] < found[1][1] / 2


def test_rounds_of_several_in_one_call_end_together(monkeypatch: pytest.MonkeyPatch):
    """Each has the tokens it has alone; the call ends with the first reply that ends, or where a flag is set."""
    monkeypatch.setattr(plain, "SLICE", 60.0)
    prompts, params = [tokens()[:40], tokens()[10:60]], SAMPLERS["seeded"]
    with engine(max_rows=64) as e:
        alone = [reply(e, ids, params, 0)[0] for ids in prompts]
        for stop, flag in ((set(), None), ({alone[1][9]}, None), (set(), abi.ffi.new("int32_t *", 1))):
            runs = [Drafted(e, 3, params, None, stop=stop) for _ in prompts]
            past = [[*ids, sample(run.prefill(ids)[-1], params, ids, len(ids))] for run, ids in zip(runs, prompts, strict=True)]
            made = play(e, [(run, ids[-1], ids) for run, ids in zip(runs, past, strict=True)], [3, 3], 16, flag)
            for run, ids, start, follow, expected in zip(runs, past, prompts, made, alone, strict=True):
                ids += follow
                n = min(len(ids) - len(start), len(expected))
                assert ids[len(start) :][:n] == expected[:n] and run.tokens == ids[:-1]
                assert run.stats.rounds == runs[0].stats.rounds and (run.stats.rounds == 1 if flag else run.stats.rounds > 1)
                run.close()
            if stop:  # of the tokens after the first, which the caller drew
                ends = [token in stop for follow in made for token in follow]
                assert sum(ends) >= 1 and all(not any(t in stop for t in follow[:-1]) for follow in made)


def test_calls_of_rounds_that_are_refused():
    ffi, lib = abi.ffi, abi.lib()
    with engine(max_rows=8) as e, closing(Drafted(e, 3, SAMPLERS["greedy"])) as seq:
        seq.prefill(tokens()[:20], 0)
        c, r = seq._request.fill(1, [], 3), seq._request
        r.until[0] = seq.limit()

        def refused(match: str, *args) -> None:
            with pytest.raises(Bw24Error, match=match):
                abi.check(lib.bw24_rounds(e._model, c, *args))

        for most in (0, 17):
            refused(f"{most} rounds, expected 1..16", 1, most, 0.0, r.until, ffi.NULL, r.log, ffi.NULL)
        refused("NULL argument", 1, 1, 0.0, ffi.NULL, ffi.NULL, r.log, ffi.NULL)
        r.log.size = 3
        refused("log 0 of size 3", 1, 1, 0.0, r.until, ffi.NULL, r.log, ffi.NULL)
        r.log.size, c.n_history = ffi.sizeof("bw24_rounds_log"), 4
        refused("its history is missing", 1, 1, 0.0, r.until, ffi.NULL, r.log, ffi.NULL)
        c.n_history, c.token = 0, 99999
        refused("token 99999 is outside", 1, 16, 0.0, r.until, ffi.NULL, r.log, ffi.NULL)
        assert seq.pos == 20


def test_the_depth_stays_for_the_rounds_that_it_names():
    """As many as were named can follow one choice: the choices asked for one by one are the same number."""
    depth = Depth(8)
    for _ in range(300):
        k = depth.choose()
        for i in range(k):
            depth.judged(i, i < 2)
            if i >= 2:
                break
        depth.costs.timed(k, k + 1, k * 0.1, 1.0 + k * 0.05)
        if k and (n := depth.steady()) > 1:
            assert [depth.choose() for _ in range(n - 1)] == [k] * (n - 1) or depth.costs._asked[1] in (0, *range(97, 100))


# ---- several timelines, and callers who pick the tokens


def test_a_round_of_several_timelines():
    """Each gets what it gets alone: other prompts, samplers and depths beside it, or nothing."""
    params = [SAMPLERS["greedy"], SAMPLERS["seeded"], SAMPLERS["filtered"], SAMPLERS["greedy"], SAMPLERS["seeded"]]
    depths, prompts = [3, 1, 8, 0, 16], [tokens()[i : i + 20 + 7 * i] for i in range(5)]
    with engine(max_rows=64) as e:
        alone = [reply(e, ids, p, 0)[0] for ids, p in zip(prompts, params, strict=True)]
        runs = [Drafted(e, k or AUTO, p, None) for k, p in zip(depths, params, strict=True)]
        history = [list(ids) for ids in prompts]
        for run, past, p in zip(runs, history, params, strict=True):
            past.append(sample(run.prefill(past)[-1], p, past, len(past)))
        for _ in range(30):
            follow = play(e, [(run, past[-1], past) for run, past in zip(runs, history, strict=True)], [min(k, 12) for k in depths])
            for past, made in zip(history, follow, strict=True):
                past += made
        for past, ids, expected, run in zip(history, prompts, alone, runs, strict=True):
            n = min(len(past) - len(ids), 40)
            assert past[len(ids) :][:n] == expected[:n] and n >= 30 and run.tokens == past[: run.pos]
            run.close()


@pytest.mark.parametrize("backend", ["cpu", "ref"])
def test_a_timeline_is_cut_forked_and_followed(backend: str):
    """Rounds, tokens picked by the caller, going back and forks in any order leave plain decoding's rows."""
    with engine(backend=backend) as e, closing(Drafted(e, 3, SAMPLERS["greedy"])) as seq:
        past = tokens()[:50]
        rows = run_rows(e, tokens()[:60], 60)
        seq.prefill(past, 0)
        assert seq.tokens == past and seq.pos == 50
        assert same((seq.decode(tokens()[50])[None],), (rows[50:51],))
        for t in tokens()[51:56]:
            seq.decode(t)
        with closing(seq.fork()) as fork:
            for pos in (55, 53):
                if fork.truncate(pos) != pos:  # a recurrent state goes back within the last step's rows only
                    assert fork.pos == 0
                    fork.prefill(tokens()[:pos], 0)
                assert fork.tokens == tokens()[:pos] and same((fork.decode(tokens()[pos])[None],), (rows[pos : pos + 1],))
            made = fork.round(9, [])
            assert fork.tokens == [*tokens()[:54], 9, *made[:-1]]
        assert seq.pos == 56 and same((seq.decode(tokens()[56])[None],), (rows[56:57],))
        seq.truncate(0)
        assert seq.pos == 0 and same((seq.prefill(tokens()[:60], 60),), (rows,))


def test_nothing_is_accepted_after_an_end():
    with engine() as e:
        with closing(Oracle(e, 3, tokens(), 1000)) as seq:
            plain = reply(e, tokens()[:50], SAMPLERS["greedy"], 0)[0]
        with closing(Drafted(e, 16, SAMPLERS["greedy"], stop=set(range(e.n_vocab)))) as seq:
            past = [*tokens()[:50], plain[0]]
            seq.prefill(tokens()[:50], 0)
            for _ in range(10):
                follow = seq.round(past[-1], past)
                assert len(follow) <= 1
                past += follow
            assert past[50:] == plain[:11]


def test_synthetic_acceptance_has_its_rate():
    with engine() as e:
        for p in (0.2, 0.8, 1.0):
            with closing(Drafted(e, 4, SAMPLERS["greedy"], 350, synthetic=p)) as seq:
                token = int(seq.prefill(tokens()[:50])[-1].argmax())
                while seq.room() and seq.stats.rounds < 60:
                    token = seq.round(token, [])[-1]
                hits, judged = sum(seq.stats.accepted), sum(seq.stats.reached)
                assert abs(hits / judged - p) < 4 * (p * (1 - p) / judged) ** 0.5 + 1e-9


def test_rounds_that_are_refused():
    with engine(max_rows=8) as e, closing(Drafted(e, 3, SAMPLERS["greedy"])) as a, closing(Drafted(e, 4, SAMPLERS["greedy"])) as b:
        for seq in (a, b):
            seq.prefill(tokens()[:20], 0)
        for drafts, match in (([3, 4], "9 rows to judge, the model was made for 1..8"), ([17, 0], "expected 0..16")):
            with pytest.raises(Bw24Error, match=match):
                play(e, [(a, 1, []), (b, 1, [])], drafts)
        with pytest.raises(Bw24Error, match="have the same drafter"):
            play(e, [(a, 1, []), (a, 1, [])], [1, 1])
        with pytest.raises(Bw24Error, match="token 99999 is outside"):
            play(e, [(a, 99999, [])], [1])
        with pytest.raises(Bw24Error, match="sampling mode"):
            Drafted(e, 3, SAMPLERS["greedy"], sampling_mode="guess")
        assert a.tokens == b.tokens == tokens()[:20] and a.pos == b.pos == 20
        assert play(e, [(a, tokens()[20], []), (b, tokens()[20], [])])[0][0] == int(run_rows(e, tokens()[:21], 8)[-1].argmax())
    with engine(ctx=21) as e, closing(Drafted(e, 3, SAMPLERS["greedy"])) as seq:
        seq.prefill(tokens()[:20], 0)
        with pytest.raises(Bw24Error, match="the context holds 21"):
            play(e, [(seq, 1, [])], [1])
        assert len(play(e, [(seq, 1, [])], [0])[0]) == 1 and seq.pos == 21


def test_bounds_of_k():
    with engine(max_rows=4) as e:
        for k in (0, 17, 4):
            with pytest.raises(Bw24Error, match="drafts"):
                Drafted(e, k, SamplingParams())
        assert reply(e, tokens()[:50], SAMPLERS["greedy"], 3)[:2] == reply(e, tokens()[:50], SAMPLERS["greedy"], 0)[:2]


def test_gen_reports_rounds(tmp_path: Path):
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(tokens()[:30]), encoding="utf-8")
    model = str(FIXTURES / "tiny" / f"{NAME}.gguf")
    command = [sys.executable, "-m", "bw24", "gen", model, "--prompt-ids", str(ids), "-n", "24", "--json", "-t", "1"]
    done = [subprocess.run([*command, "--spec", k], capture_output=True, text=True, timeout=120) for k in ("off", "3", "auto")]
    runs = [json.loads(r.stdout) for r in done]
    plain, drafted = runs[:2]
    assert drafted["ids"] == plain["ids"] and drafted["text"] == plain["text"] and "speculation" not in plain
    assert drafted["speculation"]["k"] == 3 and drafted["speculation"]["rounds"] > 0 and "rounds" in done[1].stderr
    assert runs[2]["ids"] == runs[0]["ids"] and runs[2]["speculation"]["k"] == "auto"


def test_chat_with_drafts_says_what_plain_chat_says():
    """Two turns and an undo; the second turn begins with what the first left."""
    lines = "Write a function\nAnd another one\n/undo\nAnd a class\n"

    def said(*more: str) -> tuple[str, str]:
        command = [sys.executable, "-m", "bw24", "chat", "demo", "-n", "24", "--device", "cpu", *more]
        done = subprocess.run(command, input=lines, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    plain = said("--spec", "off")[0]
    for more in (("--spec", "3"), ("--spec", "auto", "-T", "0"), ()):
        text, notes = said(*more)
        assert text == plain and notes.count(" rounds, ") == 3


def test_bench_breaks_rounds_down():
    command = [sys.executable, "-m", "bw24", "bench", "demo", "--sizes", "16", "--tokens", "24", "--spec", "2", "--accept", "0.5", "--json",
               "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["speculation"]
    assert found["synthetic"] is True and found["accept"] == 0.5 and found["k"] == 2
    assert set(found["round_milliseconds"]) == {"draft", "verify", "commit"}
    assert abs(found["accepted"] / sum(found["reached_by_position"]) - 0.5) < 0.25 and found["gain"] > 0 and len(found["samples"]) == 5
    done = subprocess.run([*command, "--accept", "1.5"], capture_output=True, text=True)
    assert done.returncode == 2 and "above 0 up to 1" in done.stderr


@pytest.mark.parametrize("kind", ["code", "prose", "chat"])
def test_acceptance_of_the_demo_model_is_its_goldens(goldens: Path, kind: str):
    """Shares of judged drafts accepted by position, K = 3, over the prompts of a class; goldens are torch's in f32."""
    where = goldens.parent / "demo"
    if not (where / "hf").is_dir():
        pytest.skip("the demo model's checkpoint is not beside the goldens")
    found = json.loads((where / "demo_prompts.json").read_text(encoding="utf-8"))
    prompts = [p for p in (found if isinstance(found, list) else found["prompts"]) if p["class"] == kind]
    expected = json.loads((where / "acceptance.json").read_text(encoding="utf-8"))[kind]["conditional"]
    total = Rounds()
    with open_model(where / "hf", "keep") as model, Engine(model, draft=True, ctx=1024, device="cpu") as e:
        for p in prompts:
            with closing(Drafted(e, 3, SAMPLERS["greedy"], len(p["ids"]) + 192)) as seq:
                logits, ends = seq.prefill(p["ids"])[-1], model.tokenizer.eog_ids
                made = Generation(seq, None, p["ids"], logits, SAMPLERS["greedy"], ctx=e.ctx, limit=192, stop_ids=ends)
                assert not list(made)
                total.add(seq.stats)
    for i, share in enumerate(expected):
        assert abs(total.accepted[i] / total.reached[i] - share) < 0.02, (kind, i)
