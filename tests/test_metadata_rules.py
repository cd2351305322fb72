"""What follows from a file's keys alone: tokens that it forbids, the score scale of the deepest Gemma 3."""

from __future__ import annotations

import re

import numpy as np
import pytest

from bw24.engine import Engine
from bw24.errors import Bw24Error
from bw24.sampling import SamplingParams
from bw24.source import open_model
from tiny_model import VOCAB, write_tiny


def logits(path, ids, **settings):
    with open_model(path) as model, Engine(model, threads=1, **settings) as engine, engine.sequence() as seq:
        return seq.prefill(ids, want="all")


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_suppressed_tokens_are_never_chosen_and_the_others_keep_their_bits(tmp_path, arch):
    ids = [5, 9, 200, 33, 7]
    plain = logits(write_tiny(tmp_path / "a.gguf", arch=arch), ids)
    forbidden = sorted({int(i) for row in plain for i in np.argsort(row)[-3:]})
    path = write_tiny(tmp_path / "b.gguf", arch=arch, suppress=forbidden)
    for settings in ({"backend": "ref"}, {"device": "cpu"}):
        got = logits(path, ids, **settings)
        rest = np.setdiff1d(np.arange(VOCAB), forbidden)
        assert got[:, forbidden].max() < -1e29 and np.array_equal(got[:, rest], plain[:, rest])
    with open_model(path) as model, Engine(model, threads=1) as engine, engine.sequence() as seq:
        rows = [(seq, token, True) for token in ids]
        assert not set(engine.step_greedy(rows).tolist()) & set(forbidden)
        hot = [(SamplingParams(temperature=100.0, seed=i), ()) for i in range(len(ids))]
        for _ in range(20):
            assert not set(engine.step_sample(rows, hot).tolist()) & set(forbidden)


@pytest.mark.parametrize("ids", [[-1], [VOCAB], [0, 1 << 30], list(range(VOCAB))])
def test_bad_suppressed_tokens_are_refused(tmp_path, ids):
    with pytest.raises(Bw24Error, match=rf"suppress_tokens: expected some ids 0..{VOCAB - 1}"):
        open_model(write_tiny(tmp_path / "a.gguf", suppress=ids))


@pytest.mark.parametrize("layers, scale", [(6, 32**-0.5), (62, (64 / 4) ** -0.5)])
def test_gemma3_s_scores_are_scaled_as_its_depth_says(tmp_path, layers, scale):
    with open_model(write_tiny(tmp_path / "a.gguf", arch="gemma3", layers=layers, window=8)) as model:
        scales = re.findall(r"^ATTEND .*scale=(\S+)", model.list_text(), re.M)
    assert len(scales) == layers and np.allclose([float(s) for s in scales], scale, rtol=1e-6)
