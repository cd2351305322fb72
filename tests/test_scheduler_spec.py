"""Drafted replies in the scheduler and the server: masks and log probabilities beside rounds, figures that add up, the demo model's real acceptance.
(test_scheduler.py runs every rule of the scheduler over drafted timelines too.)"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from bw24.drafter import open_draft
from bw24.engine import Engine
from bw24.models import resolve
from bw24.sampling import SamplingParams
from bw24.scheduler import Job, Scheduler
from bw24.scheduler_spec import DraftingScheduler
from bw24.source import open_model
from bw24.speculate import AUTO
from serving import application

TEXTS = ("def read_lines(path):\n", "import os\n\nclass Reader:\n    def", "def test_sum():\n    assert", "The module provides")


class OnlyEven:
    """A grammar: even ids, fifteen of them."""

    def __init__(self, n_vocab: int):
        self.left, self.bits = 15, np.full(-(-n_vocab // 32), 0x55555555, np.uint32)

    def mask(self) -> np.ndarray:
        return self.bits

    def accept(self, token: int) -> bool:
        assert token % 2 == 0
        self.left -= 1
        return not self.left


def jobs(model, n_vocab: int) -> list[Job]:
    """Greedy, sampled, with penalties, two choices, with a grammar, with log probabilities."""
    ids, ends = [model.tokenizer.encode(t) for t in TEXTS], model.tokenizer.eog_ids
    warm = SamplingParams(temperature=0.7, top_p=0.95, seed=5)
    strict = SamplingParams(temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.2, seed=6)
    return [
        Job(ids[0], [SamplingParams()], limit=50, stop_ids=ends),
        Job(ids[1], [warm], limit=50, stop_ids=ends),
        Job(ids[2], [strict], limit=50, stop_ids=ends, stops=["self."]),
        Job(ids[3], [warm, SamplingParams(temperature=0.7, seed=9)], limit=30, stop_ids=ends),
        Job(ids[0], [warm], limit=50, stop_ids=ends, grammar=lambda: OnlyEven(n_vocab)),
        Job(ids[1], [SamplingParams()], limit=20, stop_ids=ends, top=3),
    ]


def collect(done: Job) -> list[tuple]:
    out: list[list] = [[] for _ in done.params]
    for piece in done.pieces():
        out[piece.choice].append((piece.text, piece.token, piece.logprobs, piece.reason))
    return [("".join(t for t, *_ in rows), [r[1:3] for r in rows if r[1] is not None], rows[-1][3]) for rows in out]


@pytest.mark.parametrize("k", [1, 4, AUTO])
def test_replies_together_and_alone_are_plain(model, k: int):
    with Engine(model, threads=2, ctx=512, device="cpu") as engine, closing(Scheduler(engine, model.tokenizer)) as scheduler:
        plain = [collect(scheduler.submit(one)) for one in jobs(model, engine.n_vocab)]
    with Engine(model, threads=2, ctx=512, device="cpu", draft=True) as engine:
        with closing(DraftingScheduler(engine, model.tokenizer, k=k)) as scheduler:
            together = [scheduler.submit(one) for one in jobs(model, engine.n_vocab)]
            assert [collect(one) for one in together] == plain
            alone = jobs(model, engine.n_vocab)
            assert [collect(scheduler.submit(one)) for one in alone] == plain
            rounds = scheduler.rounds
            assert rounds.rounds and rounds.drafted == sum(one.stats.drafted for one in [*together, *alone])
            assert sum(rounds.accepted) == sum(one.stats.accepted for one in [*together, *alone])
            if k > 0:
                assert sum(rounds.accepted) > 0.3 * rounds.drafted and together[4].stats.drafted and together[5].stats.accepted
        assert not engine._sequences and not engine._drafted and engine.memory()["kv"] == 0


def test_the_server_reports_drafts():
    spec = {"spec": 3, "draft": None, "draft_hidden": "post", "spec_sampling": "race"}
    engine = {"threads": 1, "ctx": 512, "device": "cpu"}
    body = {"prompt": TEXTS[0], "max_tokens": 40, "temperature": 0}
    replies = {}
    for name, more in (("plain", {"spec": {"spec": 0}}), ("drafted", {"spec": spec})):
        app, service = application(resolve("demo").path, engine=engine, **more)
        client = app.test_client()
        replies[name] = client.post("/v1/completions", json=body).get_json()
        page, props = client.get("/metrics").get_data(as_text=True), json.loads(client.get("/props").data)
        service.close()
    assert replies["plain"]["choices"][0]["text"] == replies["drafted"]["choices"][0]["text"]
    timings = replies["drafted"]["timings"]
    assert "draft_n" not in replies["plain"]["timings"] and 0 < timings["draft_n_accepted"] <= timings["draft_n"]
    assert f"bw24:spec_decode_num_draft_tokens_total {float(timings['draft_n'])}" in page
    assert 'bw24:spec_decode_num_accepted_tokens_per_pos_total{position="0"}' in page
    assert props["draft"] == {"name": "demo.gguf", "k": 3}


@pytest.mark.parametrize("name", ["gemma4-31b", "gemma4-e"])
def test_prompts_of_replies_with_assistants_share_steps(goldens: Path, name: str):
    """Drafters over the model's own keys, which need each prompt's last hidden row alone."""
    replies = []
    with open_model(goldens / "tiny" / f"{name}.gguf") as model:
        for drafts in (False, True):
            draft = {"draft": open_draft(goldens / "tiny" / f"{name}-assistant.gguf", model)} if drafts else {}
            with Engine(model, threads=1, max_rows=96, device="cpu", **draft) as engine:
                kind = DraftingScheduler if drafts else Scheduler
                with closing(kind(engine, model.tokenizer, **({"k": 3} if drafts else {}))) as scheduler:
                    work = [Job([(7 * i + 3 * j * j) % 50 for j in range(5 + 37 * i)], [SamplingParams(temperature=0.8 * (i % 2), seed=i)], limit=20)
                            for i in range(6)]
                    replies.append([collect(one) for one in [scheduler.submit(one) for one in work]])
                    assert not drafts or scheduler.rounds.drafted
    assert replies[0] == replies[1]
