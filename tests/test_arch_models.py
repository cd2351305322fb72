"""Architectures with experts, recurrent layers, windows and embeddings per layer: golden logits, exactness, going back, the forms of files.

One model of the kind with everything in it (qwen35moe: delta nets, gated attention, routed and shared experts, an MTP block) is in the tree; files
derived from it by moving bytes about must give its bits. The golden set of every architecture runs where BW24_GOLDENS names it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import golden_rules as rules
from bw24 import abi
from bw24.engine import Engine
from bw24.errors import Bw24Error
from bw24.gate import run_rows
from bw24.gguf import GGUFWriter, open_gguf
from bw24.source import open_model
from conftest import FIXTURES
from test_goldens_tiny import check_model

NAME = "qwen35moe"
QUANTISED = ("qwen35-mix-q4km", "qwen35-mix-nvfp4", "qwen35-mix-low", "qwen35moe-mix-q4", "qwen35moe-mix-low", "gemma4-31b-q4_0", "hy_v3-mix-q4")
FULL = ("qwen35-r2", "qwen35-r3", "qwen35-tied-r1", "qwen35moe", "gemma4-31b", "gemma4-26b-a4b", "gemma4-e", "hy_v3", "minimax-m2", *QUANTISED)
ISAS = [i for i in ("portable", "avx2", "avxvnni", "avx512vnni") if abi.lib().bw24_isa_supported(i.encode())]
LOG_ROWS = 32  # rows of the last step that a recurrent state can take back one by one


@cache
def tokens() -> list[int]:
    return rules.load(FIXTURES / "tiny" / f"{NAME}.npz", "b").tokens


@cache
def opened():
    return open_model(FIXTURES / "tiny" / f"{NAME}.gguf")


def engine(**settings) -> Engine:
    return Engine(opened(), **{"threads": 2, "max_rows": 256, **settings})


@cache
def reference() -> np.ndarray:
    with engine(backend="ref") as e:
        return run_rows(e, tokens(), 256)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


# ---- golden logits


def test_golden(fixtures):
    check_model(fixtures / "tiny", NAME, rules.check_f32, rules.f32_tolerance, backend="ref", float_activations=True)
    check_model(fixtures / "tiny", NAME, rules.check_f32, rules.f32_tolerance)


@pytest.mark.parametrize("name", FULL)
def test_golden_full(goldens, name):
    check_model(goldens / "tiny", name, rules.check_f32, rules.f32_tolerance, backend="ref", float_activations=True)
    quantised = name in QUANTISED
    check_model(goldens / "tiny", name, rules.check_approx if quantised else rules.check_f32,
                rules.approx_tolerance if quantised else rules.f32_tolerance)


@pytest.mark.parametrize("name", FULL)
def test_equalities_full(goldens, name):
    """Every instruction set is the reference; the prompt in two parts, cut where the golden set says, is the prompt in one."""
    path = goldens / "tiny" / f"{name}.npz"
    prompt = rules.load(path, "b").tokens
    with np.load(path) as z:
        cut = int(z["split_at"]) if "split_at" in z else 40
    with open_model(path.with_suffix(".gguf")) as model:
        with Engine(model, backend="ref", max_rows=256) as e:
            whole = run_rows(e, prompt, 256)
        for isa in ISAS:
            with Engine(model, isa=isa, threads=2, max_rows=256) as e, e.sequence() as seq:
                assert same(run_rows(e, prompt, 256), whole), isa
                assert same(run_rows(e, prompt[:24], 1), whole[:24]), isa
                seq.prefill(prompt[:cut], "none")
                assert same(run_rows(e, prompt[cut:], 256, seq), whole[cut:]), isa


# ---- exactness


@pytest.mark.parametrize("isa", ISAS)
def test_every_isa_is_the_reference(isa):
    with engine(isa=isa) as e:
        for width in (1, 7, 40, 256):
            assert same(run_rows(e, tokens(), width), reference()), width


def test_cuts_in_the_reference():
    with engine(backend="ref") as e:
        for width in (1, 9, 60):
            assert same(run_rows(e, tokens()[:70], width), reference()[:70]), width


@pytest.mark.parametrize("settings", [{"threads": 1}, {"threads": 3}, {"fuse": False}, {"repack": False}], ids=str)
def test_settings_that_may_not_matter(settings):
    with engine(**settings) as e:
        assert same(run_rows(e, tokens(), 256), reference())
        assert same(run_rows(e, tokens()[:20], 1), reference()[:20])


@pytest.mark.parametrize("backend", ["cpu", "ref"])
def test_sequences_in_one_step(backend):
    """Rows of two sequences in turns: experts gather rows of both, states stay apart."""
    a, b = tokens()[:45], tokens()[60:105]
    with engine(backend=backend) as e:
        alone, found = run_rows(e, b, 256), ([], [])
        with e.sequence() as first, e.sequence() as second:
            for i in range(0, 45, 3):
                rows = [(first, a[i], 0), (second, b[i], 1), (first, a[i + 1], 0), (first, a[i + 2], 0), (second, b[i + 1], 1), (second, b[i + 2], 1)]
                for (_, _, owner), row in zip(rows, e.step([(s, t, True) for s, t, _ in rows]), strict=True):
                    found[owner].append(row)
        assert same(np.stack(found[0]), reference()[:45]) and same(np.stack(found[1]), alone)


# ---- going back


@pytest.mark.parametrize("backend", ["cpu", "ref"])
def test_the_last_step_can_be_taken_back_row_by_row(backend):
    at, width = 50, 20
    with engine(backend=backend) as e, e.sequence() as seq:
        seq.prefill(tokens()[:at], "none")
        for keep in (19, 7, 1, 0):
            seq.prefill(tokens()[seq.pos : at + width], "none")
            assert seq.truncate(at + keep) == at + keep
            assert seq.truncate(at + max(keep - 1, 0)) == at + max(keep - 1, 0)  # twice: the log of the kept rows is still there
            assert same(run_rows(e, tokens()[seq.pos : at + width], 256, seq), reference()[at + max(keep - 1, 0) : at + width])
            assert seq.truncate(0) == 0
            seq.prefill(tokens()[:at], "none")


def test_what_lies_before_the_log_goes_back_to_the_beginning():
    with engine() as e, e.sequence() as seq:
        seq.prefill(tokens()[:100], "none")
        assert seq.truncate(100 - LOG_ROWS) == 100 - LOG_ROWS
        assert same(run_rows(e, tokens()[100 - LOG_ROWS :], 256, seq), reference()[100 - LOG_ROWS :])
        seq.truncate(0)
        seq.prefill(tokens()[:100], "none")
        assert seq.truncate(99 - LOG_ROWS) == 0 and seq.pos == 0 and seq.tokens == []
        assert same(run_rows(e, tokens(), 256, seq), reference())


def test_a_fork_keeps_its_own_state():
    at = 40
    with engine() as e, e.sequence() as seq:
        seq.prefill(tokens()[:at], "none")
        with seq.fork() as fork, seq.fork() as other:
            fork.prefill(tokens()[::-1][:30], "none")
            assert fork.truncate(at) == at
            assert same(run_rows(e, tokens()[at:], 13, fork), reference()[at:])
            seq.prefill(tokens()[::-1][:50], "none")
            assert other.truncate(at - 5) == at - 5  # the step before the fork can be taken back on the fork too
            assert same(run_rows(e, tokens()[at - 5 :], 256, other), reference()[at - 5 :])
    with engine() as e, e.sequence() as seq:
        held = e.memory()["kv"]
        seq.prefill(tokens(), "none")
        assert e.memory()["kv"] > held


def test_a_failed_step_leaves_the_state():
    with engine() as e, e.sequence() as seq:
        seq.prefill(tokens()[:30], "none")
        with pytest.raises(Bw24Error, match="token"):
            e.step([(seq, tokens()[30], True), (seq, 1 << 30, True)])
        assert same(run_rows(e, tokens()[30:], 256, seq), reference()[30:])


# ---- the forms of a file


def rewrite(path: Path, drop: Callable[[str], bool] = lambda name: False, **changes) -> Path:
    """The in-tree model with tensors left out and metadata changed: `changes` are keys of the architecture (None: left out) or extra tensors."""
    source = open_gguf(FIXTURES / "tiny" / f"{NAME}.gguf")
    tensors = {n: (t.type_name, tuple(t.shape), bytes(source.data(n))) for n, t in source.tensors.items() if not drop(n)}
    tensors |= {k: v for k, v in changes.items() if isinstance(v, tuple)}
    meta = dict(source.metadata) | {f"{NAME}.{k}": v for k, v in changes.items() if not isinstance(v, tuple)}
    with GGUFWriter(path) as w:
        for key, value in meta.items():
            if value is not None and not key.startswith("tokenizer."):
                w.add(key, value)
        for name, (kind, shape, data) in tensors.items():
            w.add_tensor(name, kind, shape, data)
    source.close()
    return path


def logits_of(path: Path, **settings) -> np.ndarray:
    with open_model(path) as model, Engine(model, threads=2, max_rows=256, **settings) as e:
        return run_rows(e, tokens()[:60], 256)


def tensor(name: str) -> tuple[str, tuple[int, ...], np.ndarray]:
    source = open_gguf(FIXTURES / "tiny" / f"{NAME}.gguf")
    t = source.tensors[name]
    out = t.type_name, tuple(t.shape), np.frombuffer(bytes(source.data(name)), np.float32).reshape(tuple(t.shape)[::-1])
    source.close()
    return out


def mtp(name: str) -> bool:
    return name.startswith("blk.4.")


@pytest.mark.parametrize("keys", [{}, {"nextn_predict_layers": None}, {"nextn_predict_layers": 0}], ids=str)
def test_the_mtp_block_is_no_trunk_layer(tmp_path, keys):
    """block_count counts the MTP block; a file may say so, or not, and have it, or not."""
    assert same(logits_of(rewrite(tmp_path / "with.gguf", **keys)), reference()[:60])


def test_files_without_the_mtp_block(tmp_path):
    assert same(logits_of(rewrite(tmp_path / "cut.gguf", mtp)), reference()[:60])
    assert same(logits_of(rewrite(tmp_path / "said.gguf", mtp, block_count=4, nextn_predict_layers=None)), reference()[:60])
    with pytest.raises(Bw24Error, match="blk.4"):
        logits_of(rewrite(tmp_path / "trap.gguf", mtp, nextn_predict_layers=None))


def test_a_file_of_the_mtp_block_alone(tmp_path):
    path = rewrite(tmp_path / "mtp.gguf", lambda n: n.startswith("blk.") and not mtp(n))
    with pytest.raises(Bw24Error, match="only the MTP block"):
        open_model(path)


def test_layer_kinds_by_list_or_interval(tmp_path):
    kinds = [(i + 1) % 4 != 0 for i in range(4)] + [False]
    changed = rewrite(tmp_path / "list.gguf", full_attention_interval=None, **{"attention.recurrent_layers": kinds})
    assert same(logits_of(changed), reference()[:60])
    with pytest.raises(Bw24Error, match="recurrent_layers: 3 entries"):
        open_model(rewrite(tmp_path / "short.gguf", **{"attention.recurrent_layers": [True] * 3}))


def test_fused_projections_and_experts(tmp_path):
    """q|gate, k and v as one matrix in attention layers; gate and up of the experts as one: the same bits, in ref and cpu."""
    extra, gone = {}, set()
    for i in (3,):
        parts = [tensor(f"blk.{i}.attn_{n}.weight") for n in "qkv"]
        rows = np.concatenate([p[2] for p in parts])
        extra[f"blk.{i}.attn_qkv.weight"] = ("F32", rows.shape[::-1], rows.tobytes())
        gone |= {f"blk.{i}.attn_{n}.weight" for n in "qkv"}
    for i in range(4):
        both = np.concatenate([tensor(f"blk.{i}.ffn_{n}_exps.weight")[2] for n in ("gate", "up")], axis=1)
        extra[f"blk.{i}.ffn_gate_up_exps.weight"] = ("F32", both.shape[::-1], both.tobytes())
        gone |= {f"blk.{i}.ffn_{n}_exps.weight" for n in ("gate", "up")}
    path = rewrite(tmp_path / "fused.gguf", lambda n: n in gone, **extra)
    for settings in ({}, {"backend": "ref"}, {"repack": False}):
        assert same(logits_of(path, **settings), reference()[:60]), settings


def test_the_shared_gate_of_two_ranks(tmp_path):
    extra = {}
    for i in range(4):
        kind, shape, values = tensor(f"blk.{i}.ffn_gate_inp_shexp.weight")
        extra[f"blk.{i}.ffn_gate_inp_shexp.weight"] = (kind, (values.size, 1) if len(shape) == 1 else (values.size,), values.tobytes())
    assert same(logits_of(rewrite(tmp_path / "rank.gguf", **extra)), reference()[:60])


BAD = {
    "router kind": ({"expert_gating_func": 4}, None, "expert_gating_func: 4"),
    "more experts than there are": ({"expert_used_count": 9}, None, "expert_used_count: 9 of 8"),
    "other number of experts": ({"expert_count": 16}, None, "8 rows for 16 experts"),
    "no experts": ({}, "blk.2.ffn_down_exps.weight", "ffn_down_exps"),
    "no gates": ({}, "blk.2.ffn_gate_exps.weight", "ffn_gate_exps.weight is missing"),
    "no router": ({}, "blk.2.ffn_gate_inp.weight", "ffn_gate_inp.weight is missing"),
    "no state matrix": ({}, "blk.1.ssm_a", "ssm_a"),
    "heads that do not divide": ({"ssm.time_step_rank": 3}, None, "3 value heads over 2 key heads"),
    "a state of another size": ({"ssm.state_size": 12}, None, "attn_qkv"),
    "too many taps": ({"ssm.conv_kernel": 9}, None, "conv_kernel: expected 2..8"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_say_what_is_wrong(tmp_path, case):
    changes, gone, message = BAD[case]
    path = rewrite(tmp_path / "bad.gguf", lambda n: n == gone, **changes)
    with pytest.raises(Bw24Error, match=message):
        logits_of(path)
