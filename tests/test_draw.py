"""Tokens drawn where the logits are: the same as `sampling.sample` draws, in any step, and the kernels that do it on a card, run by threads."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from bw24 import abi
from bw24.engine import Engine
from bw24.errors import Bw24Error
from bw24.generate import Generation
from bw24.sampling import SamplingParams, sample
from bw24.source import open_model

ROOT = Path(__file__).resolve().parent.parent
TINY = sorted((ROOT / "tests" / "fixtures" / "tiny").glob("*.gguf"))[0]
PARAMS = [
    SamplingParams(), SamplingParams(0.8, seed=3), SamplingParams(1.2, 40, 0.9, 0.01, seed=4),
    SamplingParams(1, 0, 1, 0, 1.3, 0.2, 0.1, {5: 4.0, 9: -3.0}, 5), SamplingParams(0, repetition_penalty=2),
]


@pytest.fixture(scope="module", params=["cpu", "ref"])
def engine(request):
    with open_model(TINY) as model, Engine(model, backend=request.param, ctx=128) as engine:
        yield engine


def test_a_step_draws_what_the_sampler_draws(engine):
    ids = list(range(20, 37))
    logits = []
    with engine.sequence() as seq:
        rows = engine.step([(seq, t, True) for t in ids])
        logits = [row.copy() for row in rows]
    for wanted in ([len(ids) - 1], [3, 7, 16], list(range(len(ids)))):
        with engine.sequence() as seq:
            draws = [(PARAMS[i % len(PARAMS)], ids[: i + 1]) for i in wanted]
            found = engine.step_sample([(seq, t, i in wanted) for i, t in enumerate(ids)], draws)
            assert seq.tokens == ids and found.dtype == np.int32
        expected = [sample(logits[i], params, history, i + 1) for i, (params, history) in zip(wanted, draws, strict=True)]
        assert found.tolist() == expected


class Plain:
    """A timeline that gives logits alone: the reply is then sampled from them."""

    def __init__(self, seq):
        self.decode, self._seq = seq.decode, seq

    @property
    def pos(self):
        return self._seq.pos


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_reply_is_the_same_with_and_without_its_logits(engine, params):
    ids, replies = [7, 11, 13, 17], []
    for hide in (False, True):
        with engine.sequence() as seq:
            logits = seq.prefill(ids)
            made = Generation(Plain(seq) if hide else seq, None, ids, logits, params, ctx=engine.ctx, limit=24)
            list(made)
            replies.append(made.ids)
    assert replies[0] == replies[1] and len(replies[0]) == 24


@pytest.mark.parametrize("params, history, message", [
    (SamplingParams(logit_bias={10**6: 1.0}), [1], "token 1000000 is outside"),
    (SamplingParams(repetition_penalty=2), [-1], "token -1 is outside"),
])
def test_a_bad_pick_moves_no_sequence(engine, params, history, message):
    with engine.sequence() as seq:
        seq.prefill([1, 2, 3], "none")
        with pytest.raises(Bw24Error, match=message):
            seq.draw(4, params, history)
        assert seq.pos == 3 and seq.tokens == [1, 2, 3]
        with pytest.raises(Bw24Error, match="1 rows are wanted, 0 draws are given"):
            engine.step_sample([(seq, 4, True)], [])
        fork = seq.fork()
        assert seq.draw(4, SamplingParams(), []) == int(engine.step([(fork, 4, True)])[0].argmax())


def test_a_null_argument_is_refused(engine):
    rows, _ = engine._rows([(engine.sequence(), 1, True)])
    tokens = abi.ffi.new("int32_t[1]")
    assert abi.lib().bw24_step_sample(engine._model, rows, 1, abi.ffi.NULL, tokens) == -1
    assert abi.lib().bw24_step_sample(engine._model, rows, 1, abi.ffi.new("bw24_pick[1]"), tokens) == -1  # params NULL


def test_the_kernels_text_draws_the_same(tmp_path):
    """libbw24/cu/op_sample.cuh compiled for the processor, a thread of it for each of a block."""
    compiler = shutil.which("c++")
    if not compiler:
        pytest.skip("no C++ compiler")
    library, program = ROOT / "py" / "bw24", tmp_path / "test_sample"
    build = [compiler, "-std=c++20", "-O1", "-ffp-contract=off", "-Wno-unused-function", "-pthread", "-o", str(program),
             str(ROOT / "tests" / "cu" / "test_sample.cc"), str(library / "libbw24.so"), f"-Wl,-rpath,{library}"]
    made = subprocess.run(build, capture_output=True, text=True)
    if made.returncode and ("std=c++20" in made.stderr or "barrier" in made.stderr):
        pytest.skip("the C++ compiler has no C++20")
    assert made.returncode == 0, made.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and ", 0 different" in done.stdout, done.stdout
