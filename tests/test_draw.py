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
from bw24.plain import Reply, decode, decode_together
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


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_several_plain_tokens_a_call(engine, params):
    """Those of one draw after the other, in any pieces, up to the first stop id; the sequence holds all but the last."""
    ids = [7, 11, 13, 17]
    with engine.sequence() as seq:
        seq.prefill(ids[:-1], "none")
        past = list(ids)
        for _ in range(40):
            past.append(seq.draw(past[-1], params, past))
    made = past[len(ids) :]
    for most in (1, 3, 16):
        with engine.sequence() as seq:
            seq.prefill(ids[:-1], "none")
            past = list(ids)
            while len(past) < len(ids) + 40:
                follow = seq.draws(past[-1], params, past, min(most, len(ids) + 40 - len(past)))
                assert 1 <= len(follow) <= most
                past += follow
                assert seq.tokens == past[:-1] and seq.pos == len(past) - 1
            assert past[len(ids) :] == made
    stop = made[5]
    with engine.sequence() as seq:
        seq.prefill(ids[:-1], "none")
        follow = decode(engine, seq, ids[-1], params, ids, stop={stop}, seconds=0)
        assert follow == made[: made.index(stop) + 1] and seq.pos == len(ids) + made.index(stop)
    with engine.sequence() as seq:
        seq.prefill(ids[:-1], "none")
        assert decode(engine, seq, ids[-1], params, ids, seconds=1e-9) == made[:1]  # the time is up after each
        flag = abi.ffi.new("int32_t *", 1)
        with engine.sequence() as other:  # several at once, and somebody who wants the engine: one token each
            other.prefill(ids, "none")
            replies = [(Reply(other, params), made[0], [*ids, made[0]]), (Reply(seq, params), made[0], [*ids, made[0]])]
            assert decode_together(engine, replies, seconds=0, end=flag) == [made[1:2]] * 2
            flag[0] = 0
            replies = [(reply, made[1], [*ids, *made[:2]]) for reply, _, _ in replies]
            assert decode_together(engine, replies, 9, seconds=0, end=flag) == [made[2:11]] * 2 and other.tokens == [*ids, *made[:10]]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_plain_tokens_with_the_logits_that_they_were_drawn_from(engine, params):
    """The tokens of calls without them, each a draw from its row, for several replies that share the steps."""
    starts, rows = [[7, 11, 13, 17], [19, 23, 29]], np.full((6, 2, engine.n_vocab), np.nan, np.float32)
    made = []
    for kept in (None, rows):
        with engine.sequence() as one, engine.sequence() as two:
            for seq, ids in zip((one, two), starts, strict=True):
                seq.prefill(ids[:-1], "none")
            replies = [(Reply(seq, params), ids[-1], ids) for seq, ids in zip((one, two), starts, strict=True)]
            made.append(decode_together(engine, replies, 6, seconds=0, kept=kept))
            assert [seq.tokens for seq in (one, two)] == [[*ids, *m[:-1]] for ids, m in zip(starts, made[-1], strict=True)]
            if kept is not None:
                with pytest.raises(Bw24Error, match="expected room"):
                    decode_together(engine, replies, 6, kept=rows[:5])
    assert made[0] == made[1] and [len(m) for m in made[0]] == [6, 6]
    for i, (ids, tokens) in enumerate(zip(starts, made[0], strict=True)):
        for j, token in enumerate(tokens):
            past = [*ids, *tokens[:j]]
            assert sample(rows[j, i], params, past, len(past)) == token
            with engine.sequence() as seq:
                assert np.array_equal(seq.prefill(past), rows[j, i])


def test_plain_tokens_up_to_the_end_of_the_context(engine):
    """What was made before the context was full is given, the next call has the error; arguments that make no sense move nothing."""
    with engine.sequence() as seq:
        seq.prefill([i % 50 for i in range(engine.ctx - 3)], "none")
        follow = decode(engine, seq, 3, SamplingParams(), [], seconds=0)
        assert len(follow) == 3 and seq.pos == engine.ctx
        with pytest.raises(Bw24Error, match="context"):
            decode(engine, seq, follow[-1], SamplingParams(), [])
        assert seq.pos == len(seq.tokens) == engine.ctx
        seq.truncate(8)
        made, null = abi.ffi.new("int32_t *"), abi.ffi.NULL

        def call(most: int = 2, token: int = 3, n: int = 1, **changed: object) -> int:
            reply = Reply(seq, SamplingParams())
            requests, request = abi.ffi.new("bw24_decode_request[]", 2), reply.fill(token, [])
            for name, value in changed.items():
                setattr(request, name, value)
            requests[0] = requests[1] = request[0]
            return abi.lib().bw24_decode(engine._model, requests, n, most, 0.0, null, made)

        for bad in ({"most": 0}, {"most": 5000}, {"n_stop": 1, "stop": null}, {"n_stop": -1}, {"pick": {"params": null}}, {"tokens": null},
                    {"seq": null}, {"size": 8}, {"token": engine.n_vocab}, {"n": 0}, {"n": 2}):
            assert call(**bad) < 0 and made[0] == 0, bad
        assert seq.pos == 8


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
