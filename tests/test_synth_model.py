"""The generator of random-weight models: files open, sizes are those of the shapes, blocks decode to what was asked for, seeds repeat."""

from __future__ import annotations

import hashlib
import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import synth_blocks
import synth_model
from bw24.gguf import open_gguf
from bw24.gguf_types import TYPE_IDS, TYPES

TYPES_MADE = sorted([*synth_blocks.MAKERS, "Q4_K_M"])


@pytest.mark.parametrize("mix", TYPES_MADE)
def test_every_type_writes_a_file_of_the_right_size(tmp_path: Path, mix: str) -> None:
    path = tmp_path / "m.gguf"
    assert synth_model.main(["tiny", "--type", mix, "-o", str(path)]) == 0
    shape = synth_model.SHAPES["tiny"]
    with open_gguf(path) as file:
        expected = {t.name: t.shape for t in synth_model.tensors_of(shape)}
        assert {name: info.shape for name, info in file.tensors.items() if not name.endswith(".scale")} == expected
        for info in file.tensors.values():
            _, block, size = TYPES[info.type_id]
            assert info.nbytes == math.prod(info.shape) // block * size
        assert len(file.metadata["tokenizer.ggml.tokens"]) == file.metadata["qwen3.vocab_size"] == shape.vocab
        assert file.tensors["blk.0.attn_norm.weight"].type_name == "F32"
        assert file.tensors["blk.0.ffn_up.weight"].type_name == ("Q4_K" if mix == "Q4_K_M" else mix)
        assert ("blk.1.ffn_up.scale" in file.tensors) == (mix == "NVFP4")


@pytest.mark.parametrize("type_name", sorted(synth_blocks.MAKERS))
def test_blocks_decode_to_the_wanted_spread(type_name: str) -> None:
    quants = pytest.importorskip("gguf.quants")
    gguf = pytest.importorskip("gguf")
    sigma = 2**-5
    blocks = synth_blocks.pool(type_name, TYPES[TYPE_IDS[type_name]][2], sigma, seed=3, pool_bytes=1 << 18)
    kind = getattr(gguf.GGMLQuantizationType, type_name, None)
    if kind is None:
        pytest.skip(f"the installed gguf package does not know {type_name}")
    values = quants.dequantize(blocks, kind).astype(np.float64)
    if type_name == "NVFP4":
        values *= synth_blocks.nvfp4_scale(sigma)
    assert np.isfinite(values).all()
    # a power of two is all that MXFP4 can say of sigma; the others come within the spread of their scales
    low, high = (0.6, 1.5) if type_name == "MXFP4" else (0.93, 1.07)
    assert low < values.std() / sigma < high
    assert abs(values.mean()) < 0.03 * sigma


def test_q4_k_m_follows_the_stock_mix() -> None:
    shape = synth_model.SHAPES["qwen3-4b"]  # 36 layers
    plan = synth_model.type_plan(synth_model.tensors_of(shape), "Q4_K_M")
    rich = [i for i in range(36) if plan[f"blk.{i}.ffn_down.weight"] == "Q6_K"]
    assert rich == [0, 1, 2, 3, *range(6, 31, 3), 31, 32, 33, 34, 35]
    assert [i for i in range(36) if plan[f"blk.{i}.attn_v.weight"] == "Q6_K"] == rich
    assert plan["token_embd.weight"] == "Q6_K" and plan["blk.5.attn_q.weight"] == "Q4_K"
    small = synth_model.type_plan(synth_model.tensors_of(synth_model.SHAPES["smollm2-135m"]), "Q4_K_M")
    assert small["blk.0.attn_q.weight"] == "Q5_0" and small["token_embd.weight"] == "Q8_0"  # rows of 576 hold no 256-value blocks


def test_tensor_counts_of_the_hybrid_family() -> None:
    expected = {"qwen3.5-0.8b": 320, "qwen3.5-4b": 426, "qwen3.5-9b": 427, "qwen3.6-27b": 851}
    assert {name: len(synth_model.tensors_of(synth_model.SHAPES[name])) for name in expected} == expected


def test_equal_seeds_give_equal_files_and_other_seeds_other_ones(tmp_path: Path) -> None:
    digests = []
    for i, seed in enumerate(("7", "7", "8")):
        path = tmp_path / f"{i}.gguf"
        assert synth_model.main(["tiny", "--type", "Q4_0", "--seed", seed, "-o", str(path)]) == 0
        digests.append(hashlib.sha256(path.read_bytes()).hexdigest())
    assert digests[0] == digests[1] != digests[2]


def test_rows_and_tensors_differ(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert synth_model.main(["tiny", "--type", "Q8_0", "--tied", "-o", str(path)]) == 0
    with open_gguf(path) as file:
        assert "output.weight" not in file.tensors
        rows = file.array("token_embd.weight").reshape(512, -1)
        assert len(np.unique(rows, axis=0)) == 512
        assert bytes(file.data("blk.0.attn_k.weight")) != bytes(file.data("blk.1.attn_k.weight"))


def test_vocabulary_is_copied_and_filled_up(tmp_path: Path) -> None:
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    assert synth_model.main(["tiny", "--type", "F16", "-o", str(first)]) == 0
    shape = synth_model.replace(synth_model.SHAPES["tiny"], vocab=600, layers=1)
    synth_model.write_model(second, "tiny", shape, "F16", vocab=first)
    with open_gguf(first) as a, open_gguf(second) as b:
        tokens, kinds = b.metadata["tokenizer.ggml.tokens"], b.metadata["tokenizer.ggml.token_type"]
        assert tokens[:512] == a.metadata["tokenizer.ggml.tokens"] and tokens[512] == "[PAD512]" and len(tokens) == len(kinds) == 600
        assert list(kinds[511:513]) == [synth_model.CONTROL, synth_model.UNUSED]
        assert a.metadata["tokenizer.ggml.merges"] == b.metadata["tokenizer.ggml.merges"]
        assert a.kinds["tokenizer.ggml.token_type"] == b.kinds["tokenizer.ggml.token_type"]


def test_synthetic_vocabulary_at_real_size() -> None:
    vocab = synth_model.synthetic_vocabulary(151936, "qwen2")
    assert len(set(vocab["tokens"])) == len(vocab["tokens"]) == 151936 == len(vocab["merges"]) + 256 + 3
    known = set(vocab["tokens"])
    assert all(merge.replace(" ", "") in known and len(merge.split(" ")) == 2 for merge in vocab["merges"])


def test_a_vocabulary_without_tokens_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.gguf"
    with synth_model.GGUFWriter(empty) as writer:
        writer.add("general.architecture", "llama")
    out = tmp_path / "m.gguf"
    assert synth_model.main(["tiny", "--vocab", str(empty), "-o", str(out)]) == 2
    assert "empty.gguf: has no tokenizer.ggml.tokens" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("name, kind", [("gemma4-26b-a4b", "NVFP4"), ("gemma4-31b", "Q4_K"), ("gemma4-e4b", "Q4_0")])
def test_gemma4_shapes_make_lists_that_name_all_their_tensors(tmp_path: Path, name: str, kind: str) -> None:
    """A small one of each kind is written, and its architecture takes every tensor that is there."""
    from dataclasses import replace

    from bw24.engine import Engine
    from bw24.source import open_model

    shape = synth_model.SHAPES[name]
    count = len(synth_model.tensors_of(shape))
    assert count == {"gemma4-26b-a4b": 658, "gemma4-31b": 833, "gemma4-e4b": 666}[name]
    extra = {**shape.extra, "experts": min(shape.extra["experts"], 8), "expert_ff": 64, "top": 2, "window": 32,
             "per_layer": min(shape.extra["per_layer"], 64)}
    small = replace(shape, vocab=512, dim=256, layers=12, ff=256, heads=4, kv_heads=2, head_dim=64, extra=extra, context=128)
    path = tmp_path / "m.gguf"
    synth_model.write_model(path, name, small, kind, head="Q4_K")
    with open_model(path) as model, Engine(model, device="cpu", ctx=64) as engine:
        text = model.list_text()
        assert all(t.name in text for t in model.file.tensors.values() if not t.name.endswith(".scale"))
        with engine.sequence() as seq:
            assert np.isfinite(seq.prefill([1, 2, 3])).all()
