"""Exactness, bitwise, on the in-tree tiny models: the same rows computed in different ways have the same bytes. Every arm is held against
the plain C reference running the prompt in one piece, so a change that is wrong everywhere on the fast path is found too."""

from __future__ import annotations

import threading
from functools import cache

import numpy as np
import pytest

from bw24 import abi, sampling
from bw24.engine import Engine, Sequence
from bw24.errors import Bw24Error
from bw24.gate import run_rows
from bw24.source import open_model
from conftest import FIXTURES
from golden_rules import load
from mini_model import MiniModel, f32

MODELS = ("llama-untied", "qwen3", "gemma3", "llama-q4_k", "llama-q4_1-iq4_nl")
ISAS = ("portable", "avx2", "avxvnni", "avx512vnni")
FORMATS = ("f32", "f16", "q8_0", "q5_1", "e4m3", "q8_0/q5_1", "f16/q8_0", "full=e4m3,window=q8_0/q5_1", "full=q8_0/e4m3,window=e4m3/f16")
ROWS = 100  # of the prompt's 160 in the arms that repeat it often; five times gemma3's window


@cache
def opened(name: str):
    return open_model(FIXTURES / "tiny" / f"{name}.gguf")


@cache
def tokens(name: str) -> list[int]:
    return load(FIXTURES / "tiny" / f"{name}.npz", "b").tokens


def engine(name: str, **settings) -> Engine:
    return Engine(opened(name), **{"threads": 2, "max_rows": 256, **settings})


@cache
def reference(name: str, kv: str = "f16") -> np.ndarray:
    """Logits of the whole prompt by ref, one step."""
    with engine(name, backend="ref", kv=kv) as e:
        return run_rows(e, tokens(name), 256)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def needs(isa: str) -> None:
    if not abi.lib().bw24_isa_supported(isa.encode()):
        pytest.skip(f"this processor has no {isa}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", MODELS)
def test_every_isa_is_the_reference(name, isa):
    needs(isa)
    with engine(name, isa=isa) as e:
        assert same(run_rows(e, tokens(name), 256), reference(name))
        assert same(run_rows(e, tokens(name)[:12], 1), reference(name)[:12])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", FORMATS)
def test_every_kv_format_is_the_reference(kv, isa):
    needs(isa)
    for name in ("qwen3", "llama-q4_k"):  # heads of 32 and 64: whole blocks of every format
        with engine(name, isa=isa, kv=kv) as e:
            assert same(run_rows(e, tokens(name), 256), reference(name, kv))
            assert same(run_rows(e, tokens(name), 33), reference(name, kv))


@pytest.mark.parametrize("backend", ["cpu", "ref"])
@pytest.mark.parametrize("name", MODELS)
def test_cuts_of_the_prompt(name, backend):
    """One row at a time is decode, so this is also prefill = decode."""
    n = 160 if backend == "cpu" else 48
    with engine(name, backend=backend) as e:
        for width in (1, 7, 32, 100):
            assert same(run_rows(e, tokens(name)[:n], width), reference(name)[:n]), width


@pytest.mark.parametrize("settings", [{"threads": 1}, {"threads": 2}, {"threads": 3}, {"fuse": False}, {"repack": False}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_settings_that_may_not_matter(name, settings):
    with engine(name, **settings) as e:
        assert same(run_rows(e, tokens(name), 256), reference(name))
        assert same(run_rows(e, tokens(name)[:20], 1), reference(name)[:20])


@pytest.mark.parametrize("name", MODELS)
def test_only_wanted_rows(name):
    with engine(name) as e, e.sequence() as seq:
        found = e.step([(seq, t, i % 5 == 3) for i, t in enumerate(tokens(name))])
        assert same(found, reference(name)[3::5])


@pytest.mark.parametrize("backend", ["cpu", "ref"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_steps_give_the_argmax(name, backend):
    """The likeliest token without its logits: the lowest id among equals, one per wanted row."""
    with engine(name, backend=backend) as e, e.sequence() as seq:
        found = e.step_greedy([(seq, t, i % 3 == 0) for i, t in enumerate(tokens(name)[:60])])
        assert found.tolist() == reference(name)[:60:3].argmax(axis=1).tolist()


@pytest.mark.parametrize("name", ["gemma3", "llama-q4_k"])
def test_rows_1_to_32_of_mixed_sequences(name):
    """Steps of 1..32 rows in which three sequences take turns row by row; each reads its own past only."""
    rng = np.random.default_rng(5)
    prompts = [tokens(name)[:ROWS], tokens(name)[::-1][:ROWS], (tokens(name) * 2)[60 : 60 + ROWS]]
    with engine(name) as e:
        alone = [run_rows(e, p, 256) for p in prompts]
        assert same(alone[0], reference(name)[:ROWS])
        seqs, at, found, width = [e.sequence() for _ in prompts], [0, 0, 0], [[], [], []], 1
        while any(a < ROWS for a in at):
            rows, owners = [], []
            while len(rows) < width and any(a < ROWS for a in at):
                s = int(rng.choice([i for i in range(3) if at[i] < ROWS]))
                rows.append((seqs[s], prompts[s][at[s]], True))
                owners.append(s)
                at[s] += 1
            for s, row in zip(owners, e.step(rows), strict=True):
                found[s].append(row)
            width = width % 32 + 1
        for s in range(3):
            assert same(np.stack(found[s]), alone[s]), s


def take_back(e: Engine, name: str, at: int, wrong: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompt to `at`, fork, `wrong` other tokens on the fork, back to `at`, then the rest on both, the fork first."""
    with e.sequence() as seq:
        seq.prefill(tokens(name)[:at], "none")
        with seq.fork() as fork:
            fork.prefill((tokens(name)[::-1] * 2)[:wrong], "none")
            assert fork.truncate(at) == at and fork.pos == at
            forked = run_rows(e, tokens(name)[at:], 9, fork)
        return forked, run_rows(e, tokens(name)[at:], 50, seq)


@pytest.mark.parametrize("at", [1, 63, 64, 65, 100])
@pytest.mark.parametrize("name", ["gemma3", "qwen3", "llama-q4_1-iq4_nl"])
def test_fork_take_back_and_go_on(name, at):
    """A shared page is copied before it is written, whichever side writes first."""
    with engine(name) as e:
        for wrong in (1, 30):
            forked, original = take_back(e, name, at, wrong)
            assert same(forked, reference(name)[at:]) and same(original, reference(name)[at:])


def test_the_original_goes_on_while_a_fork_waits():
    name = "qwen3"
    with engine(name) as e, e.sequence() as seq:
        seq.prefill(tokens(name)[:70], "none")
        with seq.fork() as fork:
            seq.prefill(tokens(name)[::-1][:40], "none")
            assert same(run_rows(e, tokens(name)[70:], 256, fork), reference(name)[70:])


def test_a_fork_goes_back_over_shared_pages():
    """Back over two pages that the original still reads, then on with other tokens: the original must not notice."""
    name = "llama-untied"
    with engine(name) as e, e.sequence() as seq:
        seq.prefill(tokens(name)[:140], "none")
        with seq.fork() as fork:
            assert fork.truncate(40) == 40
            fork.prefill(tokens(name)[::-1][:110], "none")
            assert same(run_rows(e, tokens(name)[140:], 7, seq), reference(name)[140:])
            assert fork.truncate(40) == 40 and same(run_rows(e, tokens(name)[40:], 30, fork), reference(name)[40:])


def test_a_window_longer_than_a_page_is_released_and_can_start_again():
    """Past the window old pages go. Going back further than what is kept comes back to the start, and the prompt runs the same again."""
    name, ids = "gemma3", tokens("gemma3") * 3
    with engine(name, max_rows=64, ctx=512) as e, e.sequence() as seq:
        whole = run_rows(e, ids[:480], 64, seq)
        kept = e.memory()["kv"]
        assert same(whole[:160], reference(name))
        assert seq.truncate(470) == 470 and same(run_rows(e, ids[470:480], 3, seq), whole[470:480])
        assert seq.truncate(100) == 0 and seq.pos == 0
        assert same(run_rows(e, ids[:480], 7, seq), whole) and e.memory()["kv"] == kept
    with engine(name, backend="ref", max_rows=64, ctx=512) as e:
        assert same(run_rows(e, ids[:260], 64), whole[:260])


@pytest.mark.parametrize("name", ["qwen3", "llama-q4_k"])
def test_a_seeded_sampled_run_repeats(name):
    params = sampling.SamplingParams(temperature=0.8, top_k=50, top_p=0.9, repetition_penalty=1.1, seed=123456789)

    def run(width: int, **settings) -> list[int]:
        with engine(name, **settings) as e, e.sequence() as seq:
            ids = tokens(name)[:40]
            logits = run_rows(e, ids, width, seq)[-1]
            for _ in range(40):
                ids = [*ids, sampling.sample(logits, params, ids, seq.pos)]
                logits = seq.decode(ids[-1])
            return ids[40:]

    first = run(256)
    assert run(7) == first and run(1, threads=1) == first and run(256, backend="ref") == first
    assert len(set(first)) > 5


# ---- folded state (CONV, DELTA): restored by replay


def folding(**settings) -> MiniModel:
    """EMBED, CONV and DELTA with keys, queries and gates cut from one buffer: 4 value heads over 2 key heads of 32."""
    rng = np.random.default_rng(11)
    text = "".join(f"BUF {b} {n}\n" for b, n in (("x", 264), ("c", 264), ("q", 64), ("k", 64), ("v", 128), ("g", 4), ("b", 4), ("y", 128)))
    text += f"STATE conv {3 * 264}\nSTATE s {4 * 32 * 32}\nEMBED y=x w=table\nCONV y=c x=x w=w st=conv\n"
    for y, start in (("q", 0), ("k", 64), ("v", 128), ("g", 256), ("b", 260)):
        text += f"SLICE y={y} x=c from={start}\n"
    text += "".join(f"NORM y={b} x={b} heads=2 eps=1e-06 kind=l2\n" for b in "qk") + "SIGMOID y=g x=g\nSIGMOID y=b x=b\n"
    text += "DELTA y=y q=q k=k v=v g=g b=b st=s heads=4 kheads=2 order=tiled\nBUF logits 128\nPICK_ROWS y=logits x=y\n"
    return MiniModel(text, {"table": f32(rng.normal(size=(64, 264))), "w": f32(rng.normal(size=(264, 4)))}, **settings)


@pytest.mark.parametrize("backend", ["ref", "cpu"])
def test_folded_state_goes_back(backend):
    """Prompt, other rows in steps of each length, back to the prompt's end or into them, and on: as if they had never been."""
    ids, lib = [(i * 37 + 5) % 64 for i in range(60)], abi.lib()
    with folding() as plain:
        seq = plain.sequence()
        want = plain.step([(seq, t, True) for t in ids])
        lib.bw24_seq_free(seq)
    with folding(backend=backend) as m:
        for wrong in (1, 3, 8):
            for kept in range(wrong):  # rows of the step that are right and stay
                seq, fork, actual = m.sequence(), abi.ffi.new("bw24_seq **"), abi.ffi.new("int64_t *")
                assert same(m.step([(seq, t, True) for t in ids[:30]]), want[:30])
                abi.check(lib.bw24_seq_fork(fork, seq))
                m.step([(seq, t, False) for t in ids[30 : 30 + kept] + [63 - t for t in ids[30 + kept : 30 + wrong]]])
                abi.check(lib.bw24_seq_truncate(seq, 30 + kept, actual))
                assert actual[0] in (30 + kept, 0)
                assert actual[0] == 30 + kept, f"a step of {wrong} rows could not be taken back to {kept}"
                assert same(m.step([(seq, t, True) for t in ids[30 + kept :]]), want[30 + kept :]), (wrong, kept)
                assert same(m.step([(fork[0], t, True) for t in ids[30:]]), want[30:]), (wrong, kept)
                lib.bw24_seq_free(seq)
                lib.bw24_seq_free(fork[0])


@pytest.mark.parametrize("isa", ISAS)
def test_folded_state_in_any_cut(isa):
    needs(isa)
    ids, lib = [(i * 29 + 3) % 64 for i in range(64)], abi.lib()
    with folding() as plain, folding(backend="cpu", isa=isa) as m:
        seq = plain.sequence()
        want = plain.step([(seq, t, True) for t in ids])
        lib.bw24_seq_free(seq)
        for width in (1, 2, 5, 33, 64):
            seq = m.sequence()
            parts = [m.step([(seq, t, True) for t in ids[i : i + width]]) for i in range(0, len(ids), width)]
            lib.bw24_seq_free(seq)
            assert same(np.concatenate(parts), want), width


# ---- errors: all or nothing


def test_a_failing_step_moves_no_sequence():
    name = "qwen3"
    with engine(name, max_rows=16, ctx=64) as e, e.sequence() as a, e.sequence() as b:
        a.prefill(tokens(name)[:40], "none")
        b.prefill(tokens(name)[:60], "none")
        kv = e.memory()["kv"]
        for rows, message in (
            ([(a, 5, True), (b, 272, True)], "token 272 is outside 0..271"),
            ([(a, 5, True), (b, -1, True)], "token -1"),
            ([(a, 5, True)] + [(b, 1, True)] * 5, "65 tokens long, the context holds 64"),
            ([(a, 5, True)] * 17, "17 rows"),
        ):
            with pytest.raises(Bw24Error, match=message):
                e.step(rows)
            assert (a.pos, b.pos) == (40, 60) and e.memory()["kv"] == kv
        assert same(run_rows(e, tokens(name)[40:64], 16, a), reference(name)[40:64])


@pytest.mark.parametrize("backend", ["ref", "cpu"])
def test_a_numeric_fault_in_a_step_moves_no_sequence(backend):
    """Token 3's embedding holds Inf: the step that reads it fails, names the op, and leaves the cache as it was."""
    rng = np.random.default_rng(1)
    table = rng.normal(size=(8, 64)).astype(np.float32)
    table[3, 17] = np.inf
    weights = abi.ffi.new("uint8_t[]", 64 * 34 * 2)
    source = rng.normal(size=64 * 64).astype(np.float32)
    abi.check(abi.lib().bw24_quantize(abi.type_id("Q8_0"), abi.ffi.cast("float *", abi.ffi.from_buffer(source)), weights, 64 * 64))
    text = """BUF x 64\nBUF q 64\nBUF y 64\nBUF logits 64\nKV c heads=2 dim=32 window=0
EMBED y=x w=table\nLINEAR y=q x=x w=w\nKV_APPEND k=q v=q kv=c\nATTEND y=y q=q kv=c heads=2 scale=0.2\nPICK_ROWS y=logits x=y\n"""
    with MiniModel(text, {"table": f32(table), "w": ("Q8_0", (64, 64), bytes(abi.ffi.buffer(weights)))}, backend=backend) as m:
        a, b, c = m.sequence(), m.sequence(), m.sequence()
        whole = m.step([(a, t, True) for t in (0, 1, 2, 4, 5, 6)])
        m.step([(b, t, False) for t in (0, 1, 2)])
        for rows in ([(b, 4, True), (b, 3, True)], [(c, 0, True), (b, 4, True), (c, 3, True)]):
            with pytest.raises(Bw24Error, match="LINEAR w .*Inf or NaN") as caught:
                m.step(rows)
            assert caught.value.code == -7
            assert [abi.lib().bw24_seq_pos(s) for s in (b, c)] == [3, 0]
        assert same(m.step([(b, t, True) for t in (4, 5, 6)]), whole[3:])
        for s in (a, b, c):
            abi.lib().bw24_seq_free(s)


def test_a_cancelled_step_moves_no_sequence():
    name = "gemma3"
    with engine(name, backend="ref", max_rows=256) as e, e.sequence() as seq:
        seq.prefill(tokens(name)[:10], "none")
        stop = threading.Event()

        def pester() -> None:
            while not stop.is_set():
                e.cancel()

        other = threading.Thread(target=pester)
        other.start()
        try:
            with pytest.raises(Bw24Error, match="cancelled"):
                e.step([(seq, t, True) for t in tokens(name)[10:]])
        finally:
            stop.set()
            other.join()
        assert seq.pos == 10
        assert same(run_rows(e, tokens(name)[10:40], 256, seq), reference(name)[10:40])


def test_sequences_of_other_models_are_refused():
    with engine("qwen3") as one, engine("qwen3") as two, two.sequence() as seq:
        assert isinstance(seq, Sequence)
        with pytest.raises(Bw24Error, match="row 0 has no sequence of this model"):
            one.step([(seq, 1, True)])
