"""Rejection sampling on a whole model: replies have the model's own distribution, repeat at a fixed K, and accept more than the shared race."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from contextlib import closing
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import bw24
from bw24.draft import trim
from bw24.engine import Engine
from bw24.errors import Bw24Error
from bw24.generate import Generation
from bw24.sampling import SamplingParams
from bw24.source import open_model
from bw24.speculate import AUTO, RACE, REJECT, Drafted, Rounds
from conftest import FIXTURES
from test_sampling import weights

DEMO = Path(bw24.__file__).parent / "data" / "demo.gguf"
PROMPT = [5, 9, 2, 7]
RISK = 1e-7


@cache
def tiny():
    return open_model(FIXTURES / "tiny" / "qwen35moe.gguf")


def reply(e: Engine, prompt: list[int], params: SamplingParams, k: int, mode: str, limit: int) -> tuple[list[int], Rounds]:
    with closing(Drafted(e, k, params, len(prompt) + limit, sampling_mode=mode)) as seq:
        made = Generation(seq, None, prompt, seq.prefill(prompt)[-1], params, ctx=e.ctx, limit=limit)
        assert not list(made)
        return made.ids, seq.stats


FEW = (4, 17, 60)  # all that a bias lets the tiny model say, so that its random drafter and it have something in common


def biased(vocabulary: int, seed: int = 0) -> SamplingParams:
    return SamplingParams(temperature=2.0, seed=seed, logit_bias={i: -1000.0 for i in range(vocabulary) if i not in FEW})


def shares(logits: np.ndarray) -> dict[int, float]:
    """The exact distribution of a row."""
    w = weights([float(x) for x in logits], list(FEW), 2.0)
    return {i: w[i] / sum(w.values()) for i in FEW}


def test_replies_have_the_models_distribution():
    """The first three tokens of 3000 seeds, drafted two a round, against the product of the model's own rows."""
    exact: dict[tuple[int, ...], float] = {}
    with Engine(tiny(), threads=1, ctx=64, max_rows=16, draft=True) as e:
        with e.sequence() as seq:
            for one, first in shares(seq.prefill(PROMPT)).items():
                with seq.fork() as a:
                    for two, second in shares(a.decode(one)).items():
                        with a.fork() as b:
                            exact |= {(one, two, three): first * second * third for three, third in shares(b.decode(two)).items()}
        assert len(exact) == 27 and abs(sum(exact.values()) - 1) < 1e-9
        n, counts, total = 3000, dict.fromkeys(exact, 0), Rounds()
        with closing(Drafted(e, 2, biased(e.n_vocab), sampling_mode=REJECT)) as start:
            logits = start.prefill(PROMPT)[-1]
            for seed in range(n):
                params = biased(e.n_vocab, seed)
                with closing(start.fork()) as seq:
                    seq.configure(params)
                    made = Generation(seq, None, PROMPT, logits, params, ctx=e.ctx, limit=3)
                    assert not list(made)
                    counts[tuple(made.ids)] += 1  # no other reply can come
                    total.add(seq.stats)
    found = sum(abs(counts[ids] / n - share) for ids, share in exact.items()) / 2
    bound = sum(math.sqrt(share * (1 - share) / n) for share in exact.values()) / 2 + math.sqrt(math.log(1 / RISK) / (2 * n))
    assert found <= bound < 0.12 and 0.2 < sum(total.accepted) / sum(total.reached) < 0.98


def test_replies_repeat_and_greedy_ones_are_plain_decodings():
    with Engine(tiny(), threads=2, draft=True) as e:
        p = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=3)
        texts = {k: reply(e, PROMPT, p, k, REJECT, 30)[0] for k in (1, 3, 8)}
        assert all(reply(e, PROMPT, p, k, REJECT, 30)[0] == ids for k, ids in texts.items())
        plain = reply(e, PROMPT, SamplingParams(), 3, RACE, 30)[0]
        assert reply(e, PROMPT, SamplingParams(), 3, REJECT, 30)[0] == plain
        assert len(reply(e, PROMPT, p, AUTO, REJECT, 30)[0]) == 30
        with pytest.raises(Bw24Error, match="expected race or reject"):
            Drafted(e, 3, p, sampling_mode="guess")


def test_rejection_sampling_accepts_more():
    with open_model(DEMO) as model, Engine(model, threads=2, ctx=256, draft=True) as e:
        prompts = [model.tokenizer.encode(t) for t in ("def open_file(path):\n", "The function returns", "class Node:\n", "import os\n")]
        total = {RACE: Rounds(), REJECT: Rounds()}
        for mode, (i, prompt) in itertools.product(total, enumerate(prompts * 6)):
            total[mode].add(reply(e, prompt, SamplingParams(temperature=0.9, seed=i), 3, mode, 60)[1])
    rates = {mode: sum(r.accepted) / r.drafted for mode, r in total.items()}
    assert rates[REJECT] > rates[RACE] > 0.3


def test_gen_takes_the_mode(tmp_path: Path):
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(PROMPT), encoding="utf-8")
    model = str(FIXTURES / "tiny" / "qwen35moe.gguf")
    command = [sys.executable, "-m", "bw24", "gen", model, "--prompt-ids", str(ids), "-n", "20", "--json", "-t", "1", "-T", "1.2",
               "--spec", "3", "--spec-sampling"]
    done = [subprocess.run([*command, mode], capture_output=True, text=True, timeout=300, check=True) for mode in ("race", "reject", "reject")]
    race, one, two = (json.loads(r.stdout) for r in done)
    assert one["ids"] == two["ids"] != race["ids"]
    assert [r["speculation"]["sampling"] for r in (race, one)] == ["race", "reject"]
    wrong = subprocess.run([*command, "guess"], capture_output=True, text=True, timeout=300)
    assert wrong.returncode == 2 and "race" in wrong.stderr


def test_a_trimmed_draft_learns_nothing_from_rejection_sampling(tmp_path: Path):
    """The text depends on the drafter there: a seed would not repeat if it changed."""
    draft = tmp_path / "draft.gguf"
    with open_model(DEMO) as model:
        trim.write_mtp(model, draft, np.arange(0, 12288, 3, dtype=np.int32), trim.Types(), {})
    command = [sys.executable, "-m", "bw24", "gen", str(DEMO), "-p", "def f(", "-n", "40", "--json", "-t", "1", "-T", "0.7", "--spec", "2", "--draft",
               str(draft), "--spec-sampling"]
    one, two = (json.loads(subprocess.run([*command, "reject"], capture_output=True, text=True, timeout=300, check=True).stdout) for _ in range(2))
    assert one["ids"] == two["ids"] and one["speculation"]["accepted"] == two["speculation"]["accepted"] > 0
    assert [p.name for p in tmp_path.iterdir()] == ["draft.gguf"]
    subprocess.run([*command, "race"], capture_output=True, text=True, timeout=300, check=True)
    assert len(list(tmp_path.iterdir())) == 2  # what it learned
