"""bw24-draft end to end on the demo model: replies, ranks, cut, validation; interrupted and continued runs give the same bytes; bad input is
one line."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import bw24
from bw24.draft import cli, corpus, prompts, ranks, trim
from bw24.draft.cli import main
from bw24.draft.validate import verdict
from bw24.drafter import open_draft
from bw24.engine import Engine
from bw24.errors import Bw24Error
from bw24.generate import Generation
from bw24.gguf import open_gguf
from bw24.sampling import SamplingParams
from bw24.source import open_model
from bw24.speculate import Drafted
from conftest import FIXTURES

DEMO = Path(bw24.__file__).parent / "data" / "demo.gguf"
ROWS, VOCAB = 8192, 12288
SMALL = ("--rows", str(ROWS), "--tokens", "1200", "--limit", "24", "-t", "2")


def run(*words: object) -> int:
    return main([str(w) for w in words])


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with draft.gguf and said.jsonl, made in one go."""
    folder = tmp_path_factory.mktemp("draft")
    assert run("build", DEMO, folder / "draft.gguf", *SMALL, "--corpus-out", folder / "said.jsonl") == 0
    return folder


def replies_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---- what build makes


def test_the_file_has_the_published_layout(built: Path):
    with open_gguf(DEMO) as model, open_gguf(built / "draft.gguf") as draft:
        block = {n for n in model.tensors if n.startswith("blk.8.")}
        assert set(draft.tensors) == block | {"token_embd.weight", "output_norm.weight", "output.weight", "output.scale", "d2t"}
        for key, value in model.metadata.items():
            assert np.array_equal(draft.metadata[key], value), key
        head, table = draft.tensors["output.weight"], draft.tensors["d2t"]
        assert (head.type_name, head.shape) == ("NVFP4", (512, ROWS)) and (table.type_name, table.shape) == ("I32", (ROWS,))
        ids = np.frombuffer(draft.data("d2t"), "<i4")
        for name in block:  # stored in fewer bits than the mix would take, or vectors
            if model.tensors[name].type_name in ("IQ4_XS", "F32"):
                assert bytes(draft.data(name)) == bytes(model.data(name)), name
        embedding = model.tensors["token_embd.weight"]
        rows = trim.decode(trim.rows_of(model, embedding)[ids], embedding)
        found = trim.decode(trim.rows_of(draft, head), head) * np.frombuffer(draft.data("output.scale"), "<f4")
        assert 0.02 < np.sqrt(((found - rows) ** 2).mean() / (rows**2).mean()) < 0.12  # what 4 bits lose
        said = replies_of(built / "said.jsonl")
        assert draft.metadata["bw24.draft.replies"] == len(said) and draft.metadata["bw24.draft.seed"] == 0
        assert draft.metadata["bw24.draft.tokens"] == sum(len(r["ids"]) for r in said) >= 1200
        assert draft.metadata["bw24.draft.rows"] == ROWS and len(draft.metadata["bw24.draft.model_content"]) == 64


def test_the_ranks_are_the_counts_of_the_replies(built: Path):
    counts = np.bincount([i for r in replies_of(built / "said.jsonl") for i in r["ids"]], minlength=VOCAB)
    with open_model(DEMO) as model, open_gguf(built / "draft.gguf") as draft:
        ids = np.frombuffer(draft.data("d2t"), "<i4")
        for end in model.tokenizer.eog_ids:
            counts[end] += max(1, sum(r["reason"] == "eos" for r in replies_of(built / "said.jsonl")))
    assert counts[ids[0]] == counts.max() and (np.diff(counts[ids]) <= 0).all()
    for place in range(ROWS - 1):
        assert counts[ids[place]] > counts[ids[place + 1]] or ids[place] < ids[place + 1]
    unseen = ids[counts[ids] == 0]
    assert np.array_equal(unseen, np.flatnonzero(counts == 0)[: len(unseen)])


def test_the_draft_leaves_the_text_alone(built: Path):
    with open_model(DEMO) as model:
        prompt = model.tokenizer.encode("def read_file(path):\n")
        with Engine(model, threads=2, ctx=128, draft=open_draft(built / "draft.gguf", model)) as engine:
            for params in (SamplingParams(), SamplingParams(temperature=0.7, seed=4, top_p=0.9, repetition_penalty=1.1)):
                texts = []
                for k in (0, 1, 3, 6):
                    seq = Drafted(engine, k, params, 100) if k else engine.sequence()
                    logits = seq.prefill(prompt)
                    made = Generation(seq, None, prompt, logits[-1] if k else logits, params, ctx=engine.ctx, limit=48)
                    assert not list(made)
                    texts.append(made.ids)
                    assert not k or sum(seq.stats.accepted) > 8
                    seq.close()
                assert texts[0] == texts[1] == texts[2] == texts[3]


def test_ranks_and_trim_are_the_parts_of_build(built: Path, tmp_path: Path, capsys):
    words = ("--rows", "64", "--tokens", "200", "--limit", "16", "-t", "2", "--seed", "9", "-T", "0.5", "--json")
    assert run("ranks", DEMO, tmp_path / "r.txt", *words) == 0
    said = json.loads(capsys.readouterr().out)
    assert run("ranks", DEMO, tmp_path / "r.gguf", *words) == 0
    assert run("trim", DEMO, tmp_path / "r.txt", tmp_path / "t.gguf", "--json") == 0
    assert run("build", DEMO, tmp_path / "b.gguf", "--ranks", tmp_path / "r.gguf") == 0
    assert run("build", DEMO, tmp_path / "c.gguf", *words) == 0
    assert (tmp_path / "t.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    with open_gguf(tmp_path / "t.gguf") as trimmed, open_gguf(tmp_path / "c.gguf") as whole, open_gguf(tmp_path / "r.gguf") as table:
        ids = [int(line) for line in (tmp_path / "r.txt").read_text(encoding="ascii").split()]
        assert len(ids) == said["rows"] == 64 and np.frombuffer(table.data("d2t"), "<i4").tolist() == ids
        assert set(table.tensors) == {"d2t"} and table.metadata["bw24.draft.tokens"] == said["tokens"] >= 200
        for name in trimmed.tensors:
            assert bytes(trimmed.data(name)) == bytes(whole.data(name)), name
        assert trimmed.metadata["bw24.draft.ranks"] == whole.metadata["bw24.draft.ranks"] == said["ranks"]
        assert whole.metadata["bw24.draft.seed"] == 9 and whole.metadata["bw24.draft.corpus"] == said["corpus"]


# ---- interrupted runs


def command(out: Path) -> list[str]:
    return [sys.executable, "-m", "bw24.draft", "build", str(DEMO), str(out), *SMALL, "--corpus-out", str(out.with_suffix(".jsonl"))]


def wait_for_replies(work: Path, count: int, process: subprocess.Popen) -> None:
    end = time.monotonic() + 300
    while not work.exists() or work.read_bytes().count(b"\n") < count + 1:
        assert time.monotonic() < end and process.poll() is None, process.communicate()
        time.sleep(0.005)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_run_goes_on_to_the_same_bytes(built: Path, tmp_path: Path, how: signal.Signals):
    out, work = tmp_path / "draft.gguf", tmp_path / "draft.gguf.work"
    listens = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 - a shell's background jobs begin with it ignored
    process = subprocess.Popen(command(out), stderr=subprocess.PIPE, text=True, preexec_fn=listens)
    wait_for_replies(work, 4, process)
    os.kill(process.pid, how)
    _, said = process.communicate(timeout=300)
    assert not out.exists() and work.exists()
    if how == signal.SIGINT:
        assert process.returncode == 130 and "the same command goes on" in said and "Traceback" not in said
    with open(work, "ab") as file:  # a line that was being written
        file.write(b'{"index":900,"kind":"co')
    done = subprocess.run(command(out), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "going on from" in done.stderr, done.stderr
    assert out.read_bytes() == (built / "draft.gguf").read_bytes()
    assert out.with_suffix(".jsonl").read_bytes() == (built / "said.jsonl").read_bytes()
    assert not work.exists()


def test_another_runs_journal_is_refused(built: Path, tmp_path: Path, capsys):
    work, head = tmp_path / "w", {"bw24_draft_corpus": 1, "model": "m", "prompts": "p", "limit": 4, "sampling": {}}
    corpus.Journal(work, head, 100).close()
    with pytest.raises(Bw24Error, match="belongs to another run .limit differ."):
        corpus.Journal(work, {**head, "limit": 5}, 100)
    work.write_text(json.dumps(head) + '\n{"index":0,"kind":"x","reason":"eos","ids":[100]}\n', encoding="utf-8")
    with pytest.raises(Bw24Error, match="not a journal"):
        corpus.Journal(work, head, 100)
    assert run("build", DEMO, tmp_path / "d.gguf", *SMALL, "--work", work) == 2
    assert "belongs to another run" in capsys.readouterr().err


# ---- the verdict


def test_validate_tells_own_ranks_from_shuffled_ones(built: Path, tmp_path: Path, capsys):
    """Shuffled ranks, few enough that the clock of a busy machine shows it; as many as the own ones lose by the counts, which no clock moves."""
    few = tmp_path / "prompts.txt"
    few.write_text("\n".join(p.messages[0]["content"] for p in prompts.held_out()[:9]), encoding="utf-8")
    shuffled = np.random.default_rng(1).permutation(VOCAB).astype(np.int32)
    ranks.write(tmp_path / "shuffled.txt", shuffled, {})
    found = {}
    for rows in (ROWS, ROWS // 8):
        assert run("trim", DEMO, tmp_path / "shuffled.txt", tmp_path / f"{rows}.gguf", "--rows", rows) == 0
        capsys.readouterr()
        assert run("validate", tmp_path / f"{rows}.gguf", DEMO, "--against", built / "draft.gguf", "--prompts", few, "--limit", "40",
                   "--repeats", "1" if rows == ROWS else "3", "-t", "1", "--json") == 0
        found[rows] = json.loads(capsys.readouterr().out)
        bad, own = found[rows]["draft"], found[rows]["against"]
        assert own["unproposable"] < 0.1 < 0.2 < bad["unproposable"] and own["tokens"] == bad["tokens"] and found[rows]["pairs"] >= 5
        assert own["acceptance_by_position"][0] > bad["acceptance_by_position"][0]
        assert own["tokens_per_round"] > (1.2 if rows == ROWS else 2) * bad["tokens_per_round"]
    assert found[ROWS // 8]["verdict"] == "BAD" and found[ROWS // 8]["high"] < 1
    assert run("validate", built / "draft.gguf", DEMO, "--prompts", few, "--limit", "24", "--repeats", "1", "-t", "1") == 0
    said, told = capsys.readouterr()
    assert said.split(":")[0] in ("GOOD", "WASH", "BAD") and "unproposable" in said and "the model's own head" in said
    assert told.count("device: ") == 1  # both drafters over one copy of the weights


def test_verdicts():
    """By the interval and the median; a loss below a hundredth is none."""
    for ratios, expected in (([1.1, 1.2, 1.05, 1.3, 1.2, 1.1], "GOOD"), ([0.8, 0.7, 0.9, 0.95, 0.6, 0.9], "BAD"), ([0.9, 1.1, 1.0, 1.2, 0.8], "WASH"),
                             ([1.002, 1.003, 1.001, 1.004, 1.005, 1.002], "WASH"), ([0.998, 0.997, 0.999, 0.996, 0.995, 0.998], "WASH")):
        assert verdict(ratios)[0] == expected, ratios


# ---- other models


def test_an_expert_block_with_a_head_of_its_own(tmp_path: Path):
    """Routers and norms stay, stacks of experts are encoded, nothing is left of the whole head; the loader takes the file."""
    with open_model(FIXTURES / "tiny" / "qwen35moe.gguf") as model:
        vocabulary = model.builder.rows("token_embd.weight")
        ids = np.random.default_rng(2).permutation(vocabulary)[:40].astype(np.int32)
        done = trim.write_mtp(model, tmp_path / "d.gguf", ids, trim.Types(head="Q8_0", block="Q8_0", embedding="keep"), {})
        keep = trim.write_mtp(model, tmp_path / "k.gguf", ids, trim.Types("keep", "keep", "keep"), {})
        assert done.rows == keep.rows == 40
        with open_gguf(tmp_path / "k.gguf") as draft:
            head = trim.head_of(model.file, trim.mtp_block(model))
            assert bytes(draft.data("output.weight")) == trim.rows_of(model.file, head)[ids].tobytes()
            block = trim.mtp_block(model)
            for name in draft.tensors:
                if name.startswith(block):
                    assert bytes(draft.data(name)) == bytes(model.file.data(name)), name
        for name in ("d.gguf", "k.gguf"):
            with Engine(model, threads=1, draft=open_draft(tmp_path / name, model)) as engine, engine.sequence("mtp") as seq:
                logits, _ = engine.step_hidden([(seq, 1, True)], np.zeros((1, engine.n_hidden), np.float32))
                assert logits.shape == (1, 40) and np.array_equal(engine.draft.ids, ids)


def test_a_gemma_assistant_is_cut(goldens: Path, tmp_path: Path):
    with open_model(goldens / "tiny" / "gemma4-31b.gguf") as model, open_gguf(goldens / "tiny" / "gemma4-31b-assistant.gguf") as assistant:
        ids = np.random.default_rng(3).permutation(model.builder.rows("token_embd.weight"))[:64].astype(np.int32)
        done = trim.write_assistant(model, assistant, tmp_path / "a.gguf", ids, trim.Types(head="keep", block="keep"), {"seed": 1})
        assert done.rows == 64
        with open_gguf(tmp_path / "a.gguf") as draft:
            assert set(draft.tensors) == set(assistant.tensors) | {"d2t"}
            whole = trim.rows_of(assistant, assistant.tensors["token_embd.weight"])
            assert bytes(draft.data("token_embd.weight")) == whole[ids].tobytes()
            assert all(bytes(draft.data(n)) == bytes(assistant.data(n)) for n in assistant.tensors if n != "token_embd.weight")
            with pytest.raises(Bw24Error, match="cut already"):
                trim.write_assistant(model, draft, tmp_path / "b.gguf", ids, trim.Types(), {})
        with Engine(model, threads=1, draft=open_draft(tmp_path / "a.gguf", model)) as engine:
            seq = Drafted(engine, 2, SamplingParams(), 40)
            logits = seq.prefill([1, 2, 3, 4])
            made = Generation(seq, None, [1, 2, 3, 4], logits[-1], SamplingParams(), ctx=engine.ctx, limit=8)
            assert not list(made) and len(made.ids) == 8 and seq.stats.drafted > 0
            seq.close()


# ---- bad input


def refused(capsys, *words: object) -> str:
    """The one line that a command ends with."""
    capsys.readouterr()
    assert run(*words) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bw24-draft: ")]
    assert len(lines) == 1
    return lines[0]


def test_build_refuses_before_any_reply(tmp_path: Path, capsys):
    out = tmp_path / "d.gguf"
    assert "vocabulary has 12288 tokens" in refused(capsys, "build", DEMO, out)
    assert "no MTP block" in refused(capsys, "build", FIXTURES / "tiny" / "qwen3.gguf", out, "--rows", "4")
    assert "expected one of keep, NVFP4" in refused(capsys, "build", DEMO, out, "--rows", "4", "--head", "Q9")
    assert "no assistant for models of architecture 'qwen35'" in refused(capsys, "build", DEMO, out, "--rows", "4", "--assistant", DEMO)
    assert "in a folder that is there" in refused(capsys, "build", DEMO, tmp_path / "no" / "d.gguf")
    assert "from 1 up" in refused(capsys, "build", DEMO, out, "--rows", "0")
    out.write_bytes(b"mine")
    assert "--force replaces it" in refused(capsys, "build", DEMO, out)
    assert out.read_bytes() == b"mine" and list(tmp_path.iterdir()) == [out]


def test_rank_lists_that_do_not_fit(tmp_path: Path, capsys):
    path, out = tmp_path / "r.txt", tmp_path / "d.gguf"
    for text, match in ((b"1\n12288\n", "rank 1: token 12288 is outside the vocabulary 0..12287"),
                        (b"7\n8\n7\n", "rank 2: token 7 is there twice"), (b"7\n-1\n", "line 2: expected a token id"),
                        (b"", "holds no ranks"), (b"\xff\n", "line 1: expected a token id")):
        path.write_bytes(text)
        assert match in refused(capsys, "trim", DEMO, path, out)
    path.write_bytes(b"1\n2\n")
    assert "has 2 ranks" in refused(capsys, "trim", DEMO, path, out, "--rows", "3")
    assert "expected a tensor d2t" in refused(capsys, "trim", DEMO, DEMO, out)
    assert not out.exists()
    ranks.write(tmp_path / "r.gguf", np.array([5, 3], np.int32), {"a": 1})
    assert ranks.read(tmp_path / "r.gguf", 6).tolist() == [5, 3]


def test_drafts_that_are_not(built: Path, tmp_path: Path, capsys):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes((built / "draft.gguf").read_bytes()[:-100])
    assert "lie outside the data section" in refused(capsys, "validate", cut, DEMO)
    foreign = refused(capsys, "validate", built / "draft.gguf", FIXTURES / "tiny" / "qwen3.gguf")
    assert "drafts for models of architecture 'qwen35', qwen3.gguf is of 'qwen3'" in foreign
    assert "not a draft with a cut head" in refused(capsys, "info", DEMO)
    capsys.readouterr()
    assert run("info", built / "draft.gguf", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == ROWS and found["made_from"]["model_name"] == "bw24 demo"


def test_examples_of_the_help_parse():
    texts = [getattr(cli, name) for name in dir(cli) if name.endswith("EXAMPLES")]
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip().startswith("bw24-draft ")]
    assert len(lines) > 10
    for line in lines:
        cli.build_parser().parse_args(shlex.split(re.split(r"\s{2,}", line)[0])[1:])


def test_prompt_files(tmp_path: Path):
    found = prompts.read('Hello\n\n{"prompt": "Hi", "kind": "x"}\n{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "f"}]}', "p")
    assert [p.kind for p in found] == ["file", "x", "file"] and found[2].tools == ({"type": "f"},)
    for text, match in (("", "holds no prompt"), ("{", "line 1"), ('a\n{"messages": []}', "line 2"), ('{"messages": [{"role": 1}]}', "line 1")):
        with pytest.raises(Bw24Error, match=match):
            prompts.read(text, "p")


def test_the_pack_is_mixed_and_holds_nothing_that_is_held_out():
    pack, held = prompts.built_in(), prompts.held_out()
    kinds = [p.kind for p in pack]
    assert len(pack) > 100 and set(kinds[:10]) == {"code", "chat", "prose", "world", "agent"} and len(held) >= 20
    asked = {p.messages[-1]["content"] for p in pack}
    assert len({json.dumps(p.as_dict()) for p in pack}) == len(pack)
    assert not asked & {p.messages[-1]["content"] for p in held}
    assert any(p.tools for p in pack) and any(m["role"] == "tool" for p in pack for m in p.messages)
