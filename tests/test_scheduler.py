"""The scheduler on tiny models: nothing that shares, reuses, waits or goes away may change a reply, and nothing may be left behind."""

from __future__ import annotations

import random
import struct
import threading
import time

import numpy as np
import pytest

from bw24 import generate, plain, source, speculate
from bw24.engine import Engine, kv_bytes_per_token
from bw24.errors import Bw24Error
from bw24.logprobs import logprobs
from bw24.sampling import SamplingParams
from bw24.scheduler import Busy, Job, Piece, Scheduler, share
from bw24.scheduler_spec import DraftingScheduler
from conftest import FIXTURES
from tiny_model import write_tiny

GREEDY, WARM = SamplingParams(), SamplingParams(temperature=0.9, top_p=0.95, seed=7)
MODELS = {"llama": {}, "gemma3": {"arch": "gemma3", "window": 32, "layers": 7}, "qwen35moe": None, "qwen35moe-drafts": None}


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / f"{request.param}.gguf"
    if MODELS[request.param] is None:  # full attention, recurrent state and experts; its context is 512 tokens in the file
        data, key = (FIXTURES / "tiny" / "qwen35moe.gguf").read_bytes(), b"qwen35moe.context_length" + struct.pack("<I", 4)
        assert data.count(key + struct.pack("<I", 512)) == 1
        path.write_bytes(data.replace(key + struct.pack("<I", 512), key + struct.pack("<I", 700)))
    else:
        write_tiny(path, context=700, **MODELS[request.param])
    with source.open_model(path) as opened:
        yield opened


@pytest.fixture
def engine(model):
    with Engine(model, threads=1, max_rows=96, draft=model.path.stem.endswith("-drafts")) as opened:
        yield opened


def make(engine, model, **settings) -> Scheduler:
    """A scheduler; one whose replies are drafted where the engine has a drafter."""
    return DraftingScheduler(engine, model.tokenizer, k=3, **settings) if engine.draft else Scheduler(engine, model.tokenizer, **settings)


@pytest.fixture
def scheduler(engine, model):
    made = make(engine, model)
    yield made
    made.close()
    assert not engine._sequences and engine.memory()["kv"] == 0


def prompt(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=n)


def endless(model) -> SamplingParams:
    """Sampling that never takes one of the end tokens."""
    return SamplingParams(temperature=2, seed=4, logit_bias=dict.fromkeys(model.tokenizer.eog_ids, -100.0))


def solo(model, ids, params, limit, stops=()) -> tuple[list[int], str, str]:
    """The reply of the plain loop, on an engine of its own: ids, text, reason."""
    with Engine(model, threads=1, max_rows=64) as engine, engine.sequence() as seq:
        logits = generate.prefill(engine, seq, ids)[-1]
        out = generate.Generation(seq, model.tokenizer, ids, logits, params, ctx=engine.ctx, limit=limit, stops=stops,
                                  stop_ids=model.tokenizer.eog_ids)
        text = "".join(out)
        return out.ids, text, out.reason


def job(model, ids, params, limit, **more) -> Job:
    params = params if isinstance(params, list) else [params]
    return Job(ids, params, limit=limit, stop_ids=model.tokenizer.eog_ids, **more)


def collect(done: Job) -> list[tuple[list[int], str, str]]:
    """Per choice: ids, text, reason."""
    out = [([], [], []) for _ in done.params]
    for piece in done.pieces():
        ids, text, reason = out[piece.choice]
        ids += [] if piece.token is None else [piece.token]
        text.append(piece.text)
        reason.append(piece.reason)
    return [(ids, "".join(text), reason[-1]) for ids, text, reason in out]


def settle(scheduler: Scheduler) -> None:
    """Wait until nothing runs."""
    assert scheduler.drain(30)
    scheduler._draining = False


def cases(count: int) -> list[tuple[list[int], SamplingParams, int]]:
    lengths = [1, 3, 63, 64, 65, 130, 200, 20, 97, 33, 5, 150, 71, 2, 128, 40, 12]
    kinds = [GREEDY, WARM, SamplingParams(temperature=1.3, top_k=40, seed=3), SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3)]
    return [(prompt(i, lengths[i % len(lengths)]), kinds[i % len(kinds)], 5 + 7 * (i % 6)) for i in range(count)]


def test_a_reply_is_the_same_alone_and_among_sixteen(scheduler, model):
    work = cases(17)
    jobs = [scheduler.submit(job(model, *case)) for case in work]
    for case, one in zip(work, jobs, strict=True):
        assert collect(one) == [solo(model, *case)]
        assert one.stats.finished >= one.stats.first_token >= one.stats.started >= one.stats.submitted > 0


def test_a_cached_prompt_gives_the_same_reply(scheduler, model):
    base = prompt(50, 300)
    variants = [base, base, base[:200] + prompt(51, 30), base + prompt(52, 60), base[:10] + prompt(53, 100), base[:299]]
    hits = []
    for ids in variants:
        one = scheduler.submit(job(model, ids, WARM, 25))
        assert collect(one) == [solo(model, ids, WARM, 25)]
        hits.append(one.stats.cached_tokens)
    assert hits[0] == 0 and hits[1] == 299 and hits[5] == 298
    if scheduler.cache.rewinds:
        assert hits[2:5] == [200, 300, 10]
    again = scheduler.submit(job(model, base, WARM, 25, reuse=False))
    assert collect(again) == [solo(model, base, WARM, 25)] and again.stats.cached_tokens == 0


def test_the_next_turn_resumes_after_the_prompt_even_where_the_reply_is_rewritten(scheduler, model):
    """A template that drops the thinking from the history changes the reply; the prompt before it must not be computed again."""
    base = prompt(60, 150)
    first = collect(scheduler.submit(job(model, base, endless(model), 420)))[0]
    follow = base + prompt(61, 40)
    one = scheduler.submit(job(model, follow, WARM, 20))
    assert len(first[0]) == 420
    assert collect(one) == [solo(model, follow, WARM, 20)]
    assert one.stats.cached_tokens == 150 - bool(scheduler.engine.draft)  # the last token of a prompt begins a round


def test_prompts_that_end_differently_resume_near_their_difference(scheduler, model):
    """Where the model cannot go back, copies along the prompt serve: at most four times the difference and a few tokens are computed again."""
    base = prompt(62, 640)
    collect(scheduler.submit(job(model, base, GREEDY, 2)))
    for cut, mark in ((630, 576), (600, 576), (500, 384), (300, 0)):
        ids = base[:cut] + prompt(cut, 640 - cut)
        one = scheduler.submit(job(model, ids, WARM, 12))
        assert collect(one) == [solo(model, ids, WARM, 12)]
        assert (cut if scheduler.cache.rewinds else mark) <= one.stats.cached_tokens <= cut


def test_marks_grow_fourfold_in_distance():
    from bw24.prompt_cache import marks

    assert marks(640) == [576, 384] and marks(300) == [] and marks(320) == [256] and len(marks(1 << 20)) == 6


def test_choices_share_the_prompt_and_differ_by_seed(scheduler, model):
    ids = prompt(70, 150)
    params = [SamplingParams(temperature=1.0, seed=s) for s in (5, 6, 7)]
    rows = scheduler.counters.prompt_rows
    got = collect(scheduler.submit(job(model, ids, params, 20)))
    assert got == [solo(model, ids, p, 20) for p in params]
    assert len({tuple(g[0]) for g in got}) == 3 and scheduler.counters.prompt_rows - rows <= 150


def test_stop_strings_and_limits(scheduler, model):
    ids = prompt(80, 40)
    whole = solo(model, ids, endless(model), 60)
    stop = whole[1][20:23]
    got = collect(scheduler.submit(job(model, ids, endless(model), 60, stops=[stop])))[0]
    assert got == solo(model, ids, endless(model), 60, [stop]) and got[2] == "stop" and stop not in got[1]
    assert collect(scheduler.submit(job(model, ids, WARM, 0))) == [([], "", "length")]
    full = collect(scheduler.submit(job(model, prompt(81, 690), endless(model), None)))
    assert full[0][2] == "context" and len(full[0][0]) == 11


def test_log_probabilities_are_those_of_the_logits():
    logits = np.random.default_rng(1).normal(0, 3, 1000).astype(np.float32)
    logits[[5, 900]] = 20.0
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64) - 20).sum()) - 20
    got = logprobs(logits, 17, 4)
    best = [int(i) for i in np.lexsort((np.arange(1000), -logits))[:4]]
    assert best[:2] == [5, 900] and [i for i, _ in got.top] == best
    assert abs(got.token - exact[17]) < 1e-5 and all(abs(v - exact[i]) < 1e-5 for i, v in got.top)


@pytest.mark.parametrize("after", [0, 0.002, 0.01, 0.03, 0.08])
def test_cancelling_at_any_moment_leaves_the_others_alone(scheduler, model, after):
    work = cases(6)
    jobs = [scheduler.submit(job(model, *case)) for case in work]
    doomed = [scheduler.submit(job(model, prompt(90 + i, 400), [WARM, GREEDY], 250)) for i in range(3)]
    time.sleep(after)
    for one in doomed:
        scheduler.cancel(one)
    for one in doomed:
        assert all(reason in ("interrupted", "length", "eos") for _, _, reason in collect(one))
        scheduler.cancel(one)
    for case, one in zip(work, jobs, strict=True):
        assert collect(one) == [solo(model, *case)]
    settle(scheduler)
    assert scheduler.load() == {"running": 0, "rows": 0, "waiting": 0, "kept": len(scheduler.cache)}


def test_cancelling_ends_the_call_in_hand(scheduler, model):
    one = scheduler.submit(job(model, prompt(100, 650), endless(model), None))
    pieces = one.pieces()
    next(pieces)
    scheduler.cancel(one)
    at = scheduler.counters.steps
    assert list(pieces)[-1].reason in ("interrupted", "context")
    assert scheduler.counters.steps <= at + plain.MOST  # a call's steps are counted at its end; test_draw.py: the flag ends it after one


def test_memory_for_one_sequence_serves_many_with_the_same_replies(engine, model):
    version, log = engine.state_sizes()
    room = 14 * 64 * sum(kv_bytes_per_token(model, engine.kv).values()) + (4 if engine.draft else 6) * (2 * version + log)
    scheduler = make(engine, model, kv_room=room)
    between, form = [], scheduler._form
    scheduler._form = lambda: between.append(engine.kv_used()) or form()  # in the engine's thread, where no step is under way
    work = [(prompt(i, 150 + 20 * i), endless(model), 150) for i in range(5)]
    jobs = [scheduler.submit(job(model, *case)) for case in work]
    seen = 0
    for case, one in zip(work, jobs, strict=True):
        assert collect(one) == [solo(model, *case)]
        seen = max(seen, engine.memory()["kv"])
    assert 0 < scheduler.counters.preemptions < 20 and 0 < max(between) <= room
    assert seen <= room + scheduler._growth(1)  # the last sequence takes its step whatever the room, which the context provided for
    scheduler.close()
    assert engine.memory()["kv"] == 0


def test_kept_sequences_stay_within_their_budget(engine, model):
    page = 64 * sum(kv_bytes_per_token(model, engine.kv).values()) + 2 * engine.state_sizes()[0] + engine.state_sizes()[1]
    scheduler = make(engine, model, cache_ram=6 * page)
    for i in range(8):
        collect(scheduler.submit(job(model, prompt(200 + i, 100), GREEDY, 3)))
        settle(scheduler)
        assert engine.memory()["kv"] <= 6 * page
    assert 1 <= len(scheduler.cache) < 8
    scheduler.close()
    assert engine.memory()["kv"] == 0
    scheduler = make(engine, model, cache_ram=0)
    one = scheduler.submit(job(model, prompt(200, 100), GREEDY, 3))
    assert collect(one) == [solo(model, prompt(200, 100), GREEDY, 3)]
    settle(scheduler)
    assert engine.memory()["kv"] == 0
    scheduler.close()


def test_a_long_prompt_does_not_stall_those_who_decode(scheduler, model):
    """While a prompt of 600 tokens goes in, a running reply gets a token at every step."""
    talker = scheduler.submit(job(model, prompt(1, 20), endless(model), 650))
    pieces = talker.pieces()
    next(pieces)
    steps = scheduler.counters.steps
    reader = scheduler.submit(job(model, prompt(2, 600), GREEDY, 1))
    list(reader.pieces())
    assert scheduler.counters.steps - steps >= 600 // 64
    list(pieces)
    assert talker.stats.generated_tokens == 650 and reader.stats.first_token < talker.stats.finished


def test_prompt_rows_are_divided_between_the_oldest_and_the_shortest():
    class Fake:
        def __init__(self, order, pending):
            self.order, self.pending = order, pending

    runs = [Fake(0, 500), Fake(1, 300), Fake(2, 10)]
    assert [(r.order, n) for r, n in share(runs, 64)] == [(0, 32), (2, 10), (1, 22)]
    assert [(r.order, n) for r, n in share(runs[:1], 64)] == [(0, 64)] and share([], 64) == [] and share(runs, 0) == []


def test_a_reader_that_rests_loses_nothing_and_waits_for_no_end():
    """The first piece comes at once, what is made meanwhile together, the last one without the rest of the rest."""
    job, began = Job([1], [SamplingParams()]), time.monotonic()
    batches = job.batches(0.05, pace=20.0)
    job.put([Piece(0, "a")])
    assert [p.text for p in next(batches)] == ["a"]
    maker = threading.Timer(0.1, lambda: [job.put([Piece(0, "b")]), job.put([Piece(0, "c")]), job.put([Piece(0, reason="stop")], over=True)])
    maker.start()
    assert [p.text for p in next(batches)] == ["b", "c", ""] and next(batches, None) is None
    assert time.monotonic() - began < 10
    failed = Job([1], [SamplingParams()])
    failed.put([Piece(0, "a")])
    failed.put(Bw24Error("no memory"), over=True)
    found = failed.batches(0.05, pace=20.0)
    assert [p.text for p in next(found)] == ["a"]
    with pytest.raises(Bw24Error, match="no memory"):
        next(found)
    assert next(Job([1], [SamplingParams()]).batches(0.01)) == []


def test_a_full_queue_and_bad_prompts_are_refused(engine, model):
    scheduler = make(engine, model, queue_limit=2, max_runs=1)
    jobs = [scheduler.submit(job(model, prompt(1, 300), GREEDY, 100))]
    next(jobs[0].pieces())
    jobs += [scheduler.submit(job(model, prompt(i, 30), GREEDY, 2)) for i in (2, 3)]
    with pytest.raises(Busy, match="the queue holds 2 requests"):
        scheduler.submit(job(model, prompt(4, 30), GREEDY, 2))
    for ids, message in (([], "no tokens"), ([1] * 700, "the context holds 700"), ([engine.n_vocab], "token id"), ([-1], "token id")):
        with pytest.raises(Bw24Error, match=message):
            scheduler.submit(job(model, ids, GREEDY, 2))
    with pytest.raises(Bw24Error, match="choices"):
        scheduler.submit(job(model, [1], [GREEDY] * 2, 2))
    scheduler.close()
    with pytest.raises(Busy):
        scheduler.submit(job(model, [1], GREEDY, 2))
    for one in jobs[1:]:
        with pytest.raises(Bw24Error, match="shutting down"):
            list(one.pieces())


def test_a_request_that_fails_ends_alone(scheduler, model):
    """The step that several share fails because of one: the others go on with the same bits."""
    class Broken:
        def mask(self):
            return np.zeros(9, np.uint32)

        def accept(self, token):
            return False

    work = cases(4)
    jobs = [scheduler.submit(job(model, *case)) for case in work]
    bad = scheduler.submit(job(model, prompt(5, 30), GREEDY, 5, grammar=Broken))
    with pytest.raises(Bw24Error, match="mask allows no token"):
        list(bad.pieces())
    for case, one in zip(work, jobs, strict=True):
        assert collect(one) == [solo(model, *case)]


def test_a_step_that_fails_for_one_is_repeated_without_it(engine, model, monkeypatch):
    hit = []

    def failing(step, first=0):
        def call(*args, **named):
            rows, more = args[first], args[first + 1 :]
            if any(200 in (row[1] if isinstance(row[1], list) else [row[1]]) for row in rows):
                hit.append(len(rows))
                raise Bw24Error("logits are NaN", code=-7)
            return step(*args[:first], rows, *more, **named)

        return call

    engine.step_parts = failing(engine.step_parts)
    monkeypatch.setattr(speculate, "play", failing(speculate.play, 1))
    scheduler = make(engine, model)
    bias = {200: -100.0}
    work = [(prompt(i, 20), SamplingParams(temperature=0.8, seed=i, logit_bias=bias), 30) for i in range(3)]
    work = [([t if t != 200 else 1 for t in ids], p, n) for ids, p, n in work]
    jobs = [scheduler.submit(job(model, *case)) for case in work]
    bad = scheduler.submit(job(model, [5, 7, 200], GREEDY, 5))
    with pytest.raises(Bw24Error, match="NaN"):
        list(bad.pieces())
    for case, one in zip(work, jobs, strict=True):
        assert collect(one) == [solo(model, *case)]
    assert hit
    scheduler.close()
    assert not engine._sequences


def test_many_threads_submit_and_cancel(scheduler, model):
    work = cases(12)
    expected = [[solo(model, *case)] for case in work]
    errors: list[str] = []

    def client(i: int) -> None:
        rng = random.Random(i)
        for _ in range(6):
            at = rng.randrange(len(work))
            one = scheduler.submit(job(model, *work[at]))
            if rng.random() < 0.33:
                time.sleep(rng.random() * 0.02)
                scheduler.cancel(one)
                collect(one)
            elif collect(one) != expected[at]:
                errors.append(f"client {i}, case {at}")

    threads = [threading.Thread(target=client, args=(i,)) for i in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not errors and not any(t.is_alive() for t in threads)
