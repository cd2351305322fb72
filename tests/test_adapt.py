"""Adaptive trim: a head that lacks tokens learns them, per owner, keeps them over a kill, and never changes a reply."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from bw24.adapt import Learner, beside
from bw24.drafter import fingerprint, open_draft
from bw24.engine import Engine
from bw24.errors import Bw24Error
from bw24.generate import Generation
from bw24.sampling import SamplingParams
from bw24.scheduler import Job
from bw24.scheduler_spec import DraftingScheduler
from bw24.speculate import Drafted
from draft_files import write_draft

TEXT = "import os\n\ndef read_lines(path):\n    with open(path) as file:\n"


@pytest.fixture(scope="module")
def cut(model, tmp_path_factory) -> Path:
    """A head without most of the tokens that code needs: a domain that it was not made for."""
    n = model.builder.rows("token_embd.weight")
    return write_draft(model.path, tmp_path_factory.mktemp("cut") / "cut.gguf", np.arange(n - 1, n - 3001, -1))


def learner(spare: int = 8, owners: int = 2, ranked: int = 4) -> tuple[Learner, list[tuple[int, int]]]:
    rows: list[tuple[int, int]] = []
    ids = np.array([*range(ranked), *[-1] * spare], np.int32)
    return Learner(ids, spare, lambda first, tokens: rows.extend((first + i, t) for i, t in enumerate(tokens)), owners, 1000), rows


def test_owners_have_slots_of_their_own():
    made, rows = learner()
    made.observe("a", [1, 10, 11, 10, 12, 13])
    assert made.ids("a").tolist() == [0, 1, 2, 3, 10, 11, 12, 13, -1, -1, -1, -1] and made.seen == 6 and made.missed == 4
    before = made.ids("a").tolist()
    made.observe("b", [20, 10])
    assert made.ids("b").tolist() == [0, 1, 2, 3, -1, -1, -1, -1, 20, 10, -1, -1] and made.ids("a").tolist() == before
    made.observe("a", [10, 14])  # 11 is the least recently used
    assert made.ids("a").tolist() == [0, 1, 2, 3, 10, 14, 12, 13, -1, -1, -1, -1] and rows[-1] == (1, 14)
    made.observe("c", [30, 31])  # more owners than was said: drafts with the head as it is
    assert made.ids("c").tolist() == [0, 1, 2, 3, *[-1] * 8] and made.missed == 9
    assert rows == [(0, 10), (1, 11), (2, 12), (3, 13), (4, 20), (5, 10), (1, 14)]


def test_what_was_learned_is_kept_for_its_model_alone(tmp_path: Path):
    path = tmp_path / "draft.gguf.learned.json"
    made, _ = learner()
    made.keep(path, "one")
    made.observe("key", [10, 11])
    made.save(now=True)
    assert "key" not in json.loads(path.read_text())["owners"] and path.stat().st_mode & 0o077 == 0
    again, rows = learner()
    again.keep(path, "one")
    assert again.ids("other").tolist()[4:] == [-1] * 8 and not rows
    assert again.ids("key").tolist() == [0, 1, 2, 3, 10, 11, *[-1] * 6] and rows == [(0, 10), (1, 11)]
    kept = path.read_text()
    changes = (({"model": "two"}, "another model"), ({"head": "x"}, "another head"), ({"owners": {"x": [1000]}}, "token 1000 is outside"),
               *((broken, "cannot be read") for broken in ({"format": 9}, {"owners": 3}, {"salt": "zz"})))
    for change, match in changes:
        path.write_text(json.dumps({**json.loads(kept), **change}))
        third, _ = learner()
        with pytest.raises(Bw24Error, match=match):
            third.keep(path, "one")
        third.observe("key", [77])
        third.save(now=True)
        assert json.loads(path.read_text()) == {**json.loads(kept), **change}
    for text in ("", "{", "[]", kept[: len(kept) // 2]):
        path.write_text(text)
        with pytest.raises(Bw24Error, match="cannot be read"):
            learner()[0].keep(path, "one")


def run(engine: Engine, ids: list[int], k: int, owner: str = "", limit: int = 96):
    with closing(Drafted(engine, k, SamplingParams())) as seq:
        seq.configure(SamplingParams(), owner=owner)
        made = Generation(seq, None, ids, seq.prefill(ids)[-1], SamplingParams(), ctx=engine.ctx, limit=limit)
        assert not list(made)
        return made.ids, seq.stats


@pytest.mark.parametrize("backend", ["auto", "ref"])
def test_after_a_shift_of_domain_more_drafts_are_right(model, cut, backend: str):
    """Against the same head without spare rows: fewer tokens that cannot be drafted, more tokens a round, the same text."""
    ids, limit = model.tokenizer.encode(TEXT), 96 if backend == "auto" else 12
    found = {}
    for spare in (0, 256):
        with Engine(model, device="cpu", backend=backend, threads=2, ctx=512, draft=open_draft(cut, model, spare=spare)) as e:
            first, _ = run(e, ids, 3, limit=limit)
            missed = e.learner.missed if e.learner else 0
            second, stats = run(e, ids, 3, limit=limit)
            found[spare] = (first, second, stats.tokens_per_round)
            if e.learner:
                assert missed > 0 and e.learner.missed - missed < missed / 4
    assert found[0][:2] == found[256][:2] and found[256][2] > found[0][2]


def test_keys_do_not_teach_each_other(model, cut):
    """What one key's replies taught changes neither the tokens nor the rounds of another's."""
    ids = model.tokenizer.encode(TEXT)

    def play(*owners: str) -> list[tuple[list[int | None], int, int]]:
        """Tokens, drafted and accepted of replies in turn, of the owners given."""
        out = []
        with Engine(model, device="cpu", threads=2, ctx=512, draft=open_draft(cut, model, spare=128), owners=2) as e:
            with closing(DraftingScheduler(e, model.tokenizer, k=3)) as scheduler:
                for owner in owners:
                    job = scheduler.submit(Job(ids, [SamplingParams()], limit=64, owner=owner, reuse=False))
                    out.append(([p.token for p in job.pieces()], job.stats.drafted, job.stats.accepted))
        return out

    fresh, taught, other = play("two")[0], *play("one", "one", "two")[1:]
    assert other == fresh and taught[0] == fresh[0] and taught[2] > fresh[2]


def gen(cut: Path, *more: str) -> list[str]:
    words = ["gen", "demo", "--raw", "-p", TEXT, "-n", "64", "--json", "--device", "cpu", "--draft", str(cut), "--spec", "3"]
    return [sys.executable, "-m", "bw24", *words, *more]


def test_gen_learns_and_remembers(model, cut, tmp_path: Path):
    draft = tmp_path / "cut.gguf"
    draft.write_bytes(cut.read_bytes())
    outs = []
    for more in ((), (), ("--draft-spare", "0")):
        done = subprocess.run(gen(draft, *more), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outs.append(json.loads(done.stdout))
    assert outs[0]["ids"] == outs[1]["ids"] == outs[2]["ids"]
    rates = [o["speculation"]["tokens_per_round"] for o in outs]
    assert rates[1] > rates[0] >= rates[2]
    kept = json.loads(beside(draft).read_text())
    assert kept["model"] == fingerprint(model) and kept["owners"][""]
    beside(draft).write_text(json.dumps({**kept, "model": "another"}))
    done = subprocess.run(gen(draft), capture_output=True, text=True)
    assert done.returncode == 0 and "belongs to another model" in done.stderr and json.loads(beside(draft).read_text())["model"] == "another"


def test_the_file_survives_a_kill(cut, tmp_path: Path):
    """Killed at any moment while rows are learned and written, the file is a whole one or absent."""
    draft = tmp_path / "cut.gguf"
    draft.write_bytes(cut.read_bytes())
    code = ("import sys, itertools, numpy as np\nfrom pathlib import Path\nfrom bw24.adapt import Learner, beside\n"
            "l = Learner(np.array([0, 1] + [-1] * 64, np.int32), 64, lambda *a: None, 1, 100000)\nl.keep(beside(Path(sys.argv[1])), 'm')\n"
            "print('on', flush=True)\nfor i in itertools.count(2):\n    l.observe('', [i % 99999]); l.save(now=True)\n")
    for pause in (0.02, 0.05, 0.11):
        child = subprocess.Popen([sys.executable, "-c", code, str(draft)], stdout=subprocess.PIPE, env=os.environ)
        assert child.stdout.readline()
        while not beside(draft).exists():
            time.sleep(0.01)
        time.sleep(pause)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        made = Learner(np.array([0, 1, *[-1] * 64], np.int32), 64, lambda *a: None, 1, 100000)
        made.keep(beside(draft), "m")
        assert (made.ids("") >= 0).sum() > 2
