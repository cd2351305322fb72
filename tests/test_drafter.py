"""Drafters from other files: published trimmed layout, donors, Gemma assistants against their goldens, and everything that must be refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from bw24 import sampling
from bw24.drafter import PROVENANCE, embedded, fingerprint, id_map, open_draft
from bw24.engine import Engine
from bw24.errors import Bw24Error
from bw24.generate import Generation
from bw24.sampling import SamplingParams
from bw24.source import open_model
from bw24.speculate import AUTO, Drafted
from conftest import FIXTURES
from draft_files import write_draft

MODEL = FIXTURES / "tiny" / "qwen35moe.gguf"
GREEDY, SEEDED = SamplingParams(), SamplingParams(temperature=0.7, seed=11)


@cache
def opened():
    return open_model(MODEL)


@cache
def prompt() -> list[int]:
    with np.load(MODEL.with_suffix(".npz")) as z:
        return z["tokens_b"].tolist()


def reply(e: Engine, params: SamplingParams, k: int, ids: list[int] | None = None, limit: int = 40):
    """Tokens of a reply, and what drafting did."""
    ids = ids or prompt()[:50]
    with closing(Drafted(e, k, params, len(ids) + limit) if k else e.sequence()) as seq:
        logits = seq.prefill(ids, 3)[-1] if k else seq.prefill(ids)
        made = Generation(seq, None, ids, logits, params, ctx=e.ctx, limit=limit)
        assert not list(made)
        return made.ids, seq.stats if k else None


def first_logits(e: Engine) -> np.ndarray:
    """Logits of the drafter for the token after a prompt."""
    hidden = np.zeros((51, e.n_hidden), np.float32)
    with e.sequence() as seq, e.sequence("mtp") as mtp:
        hidden[1:] = e.step_hidden([(seq, t, True) for t in prompt()[:50]])[1]
        return e.step_hidden([(mtp, t, True) for t in prompt()[:51]], hidden)[0]


# ---- trimmed heads


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    ids = np.random.default_rng(5).permutation(opened().builder.rows("token_embd.weight"))[:120].astype(np.int32)
    return write_draft(MODEL, tmp_path_factory.mktemp("draft") / "cut.gguf", ids), ids


@pytest.mark.parametrize("backend", ["cpu", "ref"])
def test_a_cut_head_gives_the_rows_of_the_whole_one(cut, backend: str):
    path, ids = cut
    with Engine(opened(), backend=backend, threads=2, draft=True) as e:
        whole = first_logits(e)
    with Engine(opened(), backend=backend, threads=2, draft=open_draft(path, opened())) as e:
        assert e.draft.trimmed and e.draft.ids.tolist() == ids.tolist()
        assert first_logits(e).tobytes() == np.ascontiguousarray(whole[:, ids]).tobytes()


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_text_with_a_cut_head_is_plain_decodings(cut, params: SamplingParams):
    with Engine(opened(), threads=2, draft=open_draft(cut[0], opened())) as e:
        plain, _ = reply(e, params, 0)
        for k in (1, 3, 8, AUTO):
            found, stats = reply(e, params, k)
            assert found == plain and stats.rounds, k


@pytest.mark.parametrize("backend", ["cpu", "ref"])
def test_two_drafters_over_one_copy_of_the_weights(cut, backend: str, tmp_path: Path):
    """Turn by turn each gives the text of plain decoding and drafts as it does alone."""
    other = write_draft(MODEL, tmp_path / "other.gguf", cut[1][:60])

    def counts(e: Engine, draft=None) -> tuple[list[int], list[int]]:
        with closing(Drafted(e, 3, SEEDED, 50 + 24, draft=draft)) as seq:
            made = Generation(seq, None, prompt()[:50], seq.prefill(prompt()[:50], 3)[-1], SEEDED, ctx=e.ctx, limit=24)
            assert not list(made)
            return made.ids, [seq.stats.rounds, seq.stats.drafted, *seq.stats.accepted]

    alone = []
    for path in (cut[0], other):
        with Engine(opened(), backend=backend, threads=2, draft=open_draft(path, opened())) as e:
            alone.append(counts(e))
    with closing(open_draft(other, opened(), second=True)) as second, \
            Engine(opened(), backend=backend, threads=2, draft=open_draft(cut[0], opened()), second=second) as e:
        for _ in range(2):
            assert [counts(e), counts(e, e.second)] == alone
    assert alone[0][0] == alone[1][0] and alone[0][1] != alone[1][1]


def test_a_draw_over_ids_is_the_draw_over_the_tokens():
    """Same race, penalties, bias and filters: only the tokens that have no column are missing."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=300).astype(np.float32) * 3
    ids = rng.permutation(300)[:90].astype(np.int32)
    mask = np.zeros(10, np.uint32)
    for i in ids:
        mask[i >> 5] |= np.uint32(1 << (i & 31))
    history = rng.integers(0, 300, 50).tolist()
    for seed in range(20):
        for extra in ({}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.05}, {"temperature": 0.0},
                      {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1, "logit_bias": {int(ids[4]): 3.0, 299: 1.0}}):
            params = SamplingParams(**{"temperature": 0.9, "seed": seed, **extra})
            whole = sampling.sample(logits, params, history, seed, mask)
            assert sampling.sample(logits[ids], params, history, seed, ids=ids, n_vocab=300) == whole
    empty = ids.copy()
    empty[::2] = -1
    drawn = {sampling.sample(logits[ids], SamplingParams(temperature=2.0, seed=s), [], s, ids=empty, n_vocab=300) for s in range(300)}
    assert drawn <= set(empty[1::2].tolist()) and len(drawn) > 10
    with pytest.raises(Bw24Error, match="outside 0..299"):
        sampling.sample(logits[:2], GREEDY, [], 0, ids=np.array([1, 300], np.int32), n_vocab=300)


# ---- donors


def test_a_donor_block_drafts_as_the_models_own(tmp_path: Path):
    """A whole file of the same trunk, and an MTP-only file with a whole head, give the numbers of the embedded block."""
    with Engine(opened(), threads=2, draft=True) as e:
        own = first_logits(e)
    for path in (MODEL, write_draft(MODEL, tmp_path / "mtp.gguf")):
        with Engine(opened(), threads=2, draft=open_draft(path, opened())) as e:
            assert not e.draft.trimmed and first_logits(e).tobytes() == own.tobytes()


def test_hidden_rows_from_before_the_norm(cut):
    """The switch changes the drafts and never the text."""
    with Engine(opened(), threads=2, draft=embedded(opened())) as post, Engine(opened(), threads=2, draft=embedded(opened(), "pre")) as pre:
        assert first_logits(post).tobytes() != first_logits(pre).tobytes()
        rows = [e.step([(e.sequence(), t, True) for t in [7]]) for e in (post, pre)]
        assert rows[0].tobytes() == rows[1].tobytes()
        assert reply(pre, SEEDED, 3)[0] == reply(post, SEEDED, 0)[0]
    with Engine(opened(), threads=2, draft=open_draft(cut[0], opened(), "pre")) as e:
        assert reply(e, SEEDED, 3)[0] == reply(e, SEEDED, 0)[0]


def test_gen_with_a_draft_file(cut, tmp_path: Path):
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(prompt()[:30]), encoding="utf-8")
    command = [sys.executable, "-m", "bw24", "gen", str(MODEL), "--prompt-ids", str(ids), "-n", "20", "--json", "--device", "cpu"]

    def run(*more: str, **environ: str) -> dict:
        done = subprocess.run([*command, *more], capture_output=True, text=True, env={**os.environ, **environ})
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    plain = run("--spec", "off")
    found = [run("--draft", str(cut[0]), "--spec", "3"), run("--spec", "3", BW24_DRAFT=str(cut[0])),
             run("--draft", str(cut[0]), "--spec", "3", "--draft-hidden", "pre"), run("--spec", "3")]
    assert all(f["ids"] == plain["ids"] for f in found) and "speculation" not in plain
    counts = [f["speculation"]["accepted_by_position"] for f in found]
    assert counts[0] == counts[1] and found[0]["speculation"]["draft"] == "cut.gguf" and found[3]["speculation"]["draft"] == MODEL.name
    done = subprocess.run([*command, "--draft", str(FIXTURES / "tiny" / "qwen3.gguf"), "--spec", "3"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.strip().endswith("qwen35moe.gguf is of 'qwen35moe'")


# ---- what is refused


def refused(path: Path, match: str, model=None) -> None:
    with pytest.raises(Bw24Error, match=match) as error:
        open_draft(path, model or opened())
    assert "\n" not in str(error.value) and path.name in str(error.value)


def test_drafts_of_other_models(tmp_path: Path):
    arch, tokens = opened().arch, list(opened().metadata["tokenizer.ggml.tokens"])
    ids = list(range(40))
    width = int(opened().metadata[f"{arch}.embedding_length"])
    own = write_draft(MODEL, tmp_path / "own.gguf", ids, metadata={PROVENANCE: fingerprint(opened())})
    open_draft(own, opened()).close()
    refused(write_draft(MODEL, tmp_path / "a.gguf", ids, metadata={PROVENANCE: "0" * 64}), "made for another model")
    refused(write_draft(MODEL, tmp_path / "b.gguf", ids, metadata={"tokenizer.ggml.tokens": [*tokens[:-1], "another"]}), "lists differ")
    refused(write_draft(MODEL, tmp_path / "c.gguf", ids, metadata={f"{arch}.attention.head_count": 64}), "head_count: the model has .* the draft 64")
    refused(write_draft(MODEL, tmp_path / "d.gguf", ids, norm=np.ones(width, np.float32)), "output_norm.weight differs")
    refused(write_draft(MODEL, tmp_path / "e.gguf", ids, metadata={"general.architecture": "qwen3"}), "drafts for models of architecture 'qwen3'")
    refused(FIXTURES / "tiny" / "qwen3.gguf", "architecture 'qwen3'")
    with open_model(FIXTURES / "tiny" / "qwen3.gguf") as other:
        refused(own, "drafts for models of architecture 'qwen35moe'", other)
        with pytest.raises(Bw24Error, match="no MTP block to draft with"):
            embedded(other)


def test_broken_drafts(tmp_path: Path):
    n = opened().builder.rows("token_embd.weight")
    refused(write_draft(MODEL, tmp_path / "a.gguf", range(40), d2t=[*range(39), n]), f"id {n} is outside the vocabulary 0..{n - 1}")
    refused(write_draft(MODEL, tmp_path / "b.gguf", range(40), d2t=[*range(39), -1]), "id -1 is outside")
    refused(write_draft(MODEL, tmp_path / "c.gguf", range(40), d2t=range(39)), "39 ids for a head of 40 rows")
    refused(write_draft(MODEL, tmp_path / "d.gguf", range(40), d2t=[*range(39), 0]), "1 ids stand for two rows")
    block = max(int(k.split(".")[1]) for k in opened().builder.shapes if k.startswith("blk."))
    refused(write_draft(MODEL, tmp_path / "e.gguf", range(40), leave_out=[f"blk.{block}.nextn.eh_proj.weight"]), "no MTP block")
    refused(write_draft(MODEL, tmp_path / "f.gguf", range(40), leave_out=[f"blk.{block}.attn_q.weight"]), "attn_q")
    whole = write_draft(MODEL, tmp_path / "whole.gguf", range(40)).read_bytes()
    for size in (0, 3, 24, 1000, len(whole) // 2, len(whole) - 33):
        path = tmp_path / "short.gguf"
        path.write_bytes(whole[:size])
        refused(path, "short.gguf")
    with pytest.raises(Bw24Error, match="No such file"):
        open_draft(tmp_path / "missing.gguf", opened())


def test_id_maps():
    class Info:
        type_name, shape = "F32", (3,)

    class File:
        tensors = {"d2t": Info}

    with pytest.raises(Bw24Error, match="expected one dimension of I32, found F32"):
        id_map(File, 3, 10)
    with Engine(opened(), threads=1, draft=True) as e:
        ids = np.arange(e.n_vocab, dtype=np.int32)
        e.set_draft_ids(ids)
        for bad, match in ((np.where(ids == 1, 0, ids), "two columns"), (ids[1:], "ids for"), (np.where(ids == 5, e.n_vocab, ids), "outside")):
            with pytest.raises(Bw24Error, match=match):
                e.set_draft_ids(bad)


# ---- Gemma assistants


def assistant_chain(e: Engine, tokens: list[int], prefix: int, first: list[int]):
    """Hidden row of the trunk, logits and handed rows of three steps at one position."""
    with e.sequence() as seq, e.sequence("assistant", over=seq) as draft:
        rows = e.step_hidden([(seq, t, i == prefix - 1) for i, t in enumerate(tokens[:prefix])])[1]
        seed, logits, handed = rows[-1:], [], []
        row = seed
        for token in first:
            out, row = e.step_hidden([(draft, token, True)], row)
            logits.append(out[0])
            handed.append(row[0])
        return seed[0], np.stack(logits), np.stack(handed)


@pytest.mark.parametrize("name", ["gemma4-31b-assistant", "gemma4-e-assistant"])
def test_assistant_goldens(goldens: Path, name: str):
    with np.load(goldens / "tiny" / f"{name}.npz") as z:
        g = dict(z)
    tokens = g["tokens"].tolist()
    with open_model(goldens / "tiny" / f"{name.removesuffix('-assistant')}.gguf") as model:
        path = goldens / "tiny" / f"{name}.gguf"
        found = {}
        for backend, extra in (("ref", {"float_activations": True, "kv": "f32"}), ("ref", {}), ("cpu", {"threads": 2}), ("cpu", {"fuse": False})):
            with Engine(model, backend=backend, draft=open_draft(path, model), **extra) as e:
                for i, m in enumerate(g["prefix"].tolist()):
                    seed, logits, handed = assistant_chain(e, tokens, m, g["chain_tokens"][i].tolist())
                    if "float_activations" in extra:
                        for a, b in ((seed, g["h_in"][i]), (logits, g["chain_logits"][i]), (handed, g["h_out"][i])):
                            assert np.abs(a - b).max() < 1e-3
                    else:
                        bits = (seed.tobytes(), logits.tobytes(), handed.tobytes())
                        assert found.setdefault(i, bits) == bits, (backend, extra)


@pytest.mark.parametrize("name", ["gemma4-31b-assistant", "gemma4-e-assistant"])
def test_the_text_with_an_assistant_is_plain_decodings(goldens: Path, name: str):
    with open_model(goldens / "tiny" / f"{name.removesuffix('-assistant')}.gguf") as model:
        with Engine(model, threads=2, draft=open_draft(goldens / "tiny" / f"{name}.gguf", model)) as e:
            with np.load(goldens / "tiny" / f"{name}.npz") as z:
                ids = z["tokens"].tolist()
            for params in (GREEDY, SEEDED):
                plain, _ = reply(e, params, 0, ids)
                for k in (*range(1, 9), AUTO):
                    found, stats = reply(e, params, k, ids)
                    assert found == plain and stats.rounds, k


def test_what_assistants_refuse(goldens: Path):
    tiny = goldens / "tiny"
    with open_model(tiny / "gemma4-e.gguf") as model:
        refused(tiny / "gemma4-31b-assistant.gguf", "layer 3 asks 1 KV heads, the model's layer has 2", model)
        with Engine(model, threads=1, draft=open_draft(tiny / "gemma4-e-assistant.gguf", model)) as e, e.sequence() as seq:
            with pytest.raises(Bw24Error, match="bw24_seq_new_over names it"):
                e.sequence("assistant")
            with e.sequence("assistant", over=seq) as draft, pytest.raises(Bw24Error, match="which has none"):
                e.step_hidden([(draft, 1, True)], np.zeros((1, e.n_hidden), np.float32))
    refused(tiny / "gemma4-e-assistant.gguf", "architecture 'gemma4'")
    with pytest.raises(Bw24Error, match="drafts for another model"):
        open_model(tiny / "gemma4-e-assistant.gguf")
