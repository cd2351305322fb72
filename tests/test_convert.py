"""Conversion to GGUF: the file is the directory's model bit for bit; types, sidecars, failure; and the text side of a directory."""

from __future__ import annotations

import json
from pathlib import Path

import gguf as reference
import numpy as np
import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import st_files
from bw24 import convert, source, st_tensor, st_text
from bw24.cli import main
from bw24.engine import Engine
from bw24.errors import Bw24Error
from bw24.gguf import open_gguf
from bw24.tokenizer import from_metadata
from bw24.tokenizer_bpe import SCHEMES, pre_tokenizer
from st_files import f32, u8
from test_safetensors import FAMILIES, needs

TEXTS = ("Hello world, it's 12345 tests!", "  two  spaces\n\n\ttabs", "caf\u00e9 \u4f60\u597d \U0001f600", "def f(x):\n    return x * 2  # ok", "",
         "<|im_start|>user\nhi<|im_end|>", "a\u0301b")
CORPUS = [t * 3 for t in TEXTS] + ["the quick brown fox jumps over the lazy dog " * 4, "hello hello world world test tests testing " * 4]


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch):
    """Matrices of more than 1500 values count as large, so that tiny checkpoints have some."""
    monkeypatch.setattr(st_tensor, "LARGE", 1500)


def greedy(path: Path, weights: str = "auto", count: int = 24) -> list[int]:
    with source.open_model(path, weights) as model, Engine(model, backend="cpu", kv="f16") as engine, engine.sequence() as seq:
        out = [int(np.argmax(seq.prefill([5, 17, 40, 3])))]
        while len(out) < count:
            out.append(int(np.argmax(seq.decode(out[-1]))))
        return out


def all_logits(path: Path, weights: str = "auto") -> np.ndarray:
    with source.open_model(path, weights) as model, Engine(model, backend="cpu", kv="f16") as engine, engine.sequence() as seq:
        return seq.prefill(list(range(3, 43)), want="all")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_is_the_directory(tmp_path, family):
    folder, out = needs(family), tmp_path / "out.gguf"
    report = convert.convert(folder, out)
    assert "Q8_0" in report.types and report.fallbacks == []
    assert np.array_equal(all_logits(out), all_logits(folder))
    assert greedy(out) == greedy(folder)
    with source.open_model(folder) as a, source.open_model(out) as b:
        assert a.list_text() == b.list_text()
        ours, theirs = a.file.metadata, b.file.metadata
        assert {k: theirs[k] for k in ours} == ours


def test_another_reader_reads_the_file(tmp_path):
    out = tmp_path / "out.gguf"
    convert.convert(needs("qwen3_moe"), out, "keep", name="Tiny")
    reader = reference.GGUFReader(out)
    assert reader.fields["general.name"].contents() == "Tiny" and reader.fields["qwen3moe.expert_count"].contents() == 4
    with source.open_model(needs("qwen3_moe"), "keep") as model:
        assert {t.name: tuple(int(n) for n in t.shape) for t in reader.tensors} == {t.name: t.shape for t in model.file.tensors.values()}
        for t in reader.tensors:
            assert t.data.tobytes() == bytes(model.file.data(t.name)), t.name


def test_weights_keep_is_said_and_kept(tmp_path, capfd):
    folder = needs("llama")
    with source.open_model(folder) as auto, source.open_model(folder, "keep") as keep:
        assert "float matrices" in auto.file.note and "--weights keep" in auto.file.note and keep.file.note is None
        assert {t.type_name for t in auto.file.tensors.values()} == {"F32", "BF16", "Q8_0"}
        assert {t.type_name for t in keep.file.tensors.values()} == {"F32", "BF16"}
        assert [w.mapped for w in keep.weights() if w.name == "blk.0.ffn_up.weight"] == [True]
        assert [w.mapped for w in auto.weights() if w.name == "token_embd.weight"] == [False]
    ids = tmp_path / "ids"
    ids.write_text("5 17 40")
    for how, said in (("auto", True), ("keep", False)):
        assert main(["explain", str(folder), "--weights", how]) == 0
        assert ("read as Q8_0" in capfd.readouterr().err) == said
    with pytest.raises(Bw24Error, match="expected auto or keep"):
        source.open_model(folder, "half")


@pytest.mark.parametrize("kind, expects", [
    ("F16", {"F16", "F32"}), ("Q4_0", {"Q4_0", "F32"}), ("Q4_K", {"Q5_0", "F32"}), ("Q4_K_M", {"Q5_0", "Q8_0", "F32"}),
])
def test_types_and_their_fallbacks(tmp_path, kind, expects):
    out = tmp_path / "out.gguf"
    report = convert.convert(needs("qwen3"), out, kind)
    assert set(report.types) == expects
    assert bool(report.fallbacks) == kind.startswith("Q4_K")  # rows of 32 and 64 values hold no block of 256
    with open_gguf(out) as file:
        assert {t.type_name for t in file.tensors.values()} == expects
        assert file.tensors["output_norm.weight"].type_name == "F32"
    assert len(greedy(out, count=3)) == 3


def test_the_mix_gives_bits_where_they_count():
    names = [f"blk.{i}.{n}.weight" for i in range(8) for n in ("attn_v", "ffn_down", "ffn_up")]
    more = convert._more_bits(dict.fromkeys(["token_embd.weight", *names]))
    assert "token_embd.weight" in more and "blk.3.ffn_up.weight" not in more
    assert [i for i in range(8) if f"blk.{i}.ffn_down.weight" in more] == [0, 3, 6, 7]
    assert [i for i in range(8) if f"blk.{i}.attn_v.weight" in more] == [0, 3, 6, 7]
    assert "token_embd.weight" not in convert._more_bits(dict.fromkeys(["token_embd.weight", "output.weight"]))


def quantised_checkpoint(folder: Path, scheme: str) -> None:
    """A tiny Qwen3 (width 64) whose projections are in a quantised scheme."""
    tensors = st_files.copy_checkpoint("qwen3", folder, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
                                       quantization_config={"quant_method": "modelopt" if scheme == "nvfp4" else "fp8"})
    rng = np.random.default_rng(5)
    shapes = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64), "self_attn.o_proj": (64, 64),
              "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128)}
    out = {"model.embed_tokens.weight": st_files.bf16(rng.normal(0, 1, (96, 64))), "model.norm.weight": st_files.bf16(np.ones(64))}
    for name in ("input_layernorm", "post_attention_layernorm"):
        out[f"model.layers.0.{name}.weight"] = st_files.bf16(rng.uniform(0.5, 1.5, 64))
    for name in ("q_norm", "k_norm"):
        out[f"model.layers.0.self_attn.{name}.weight"] = tensors[f"model.layers.0.self_attn.{name}.weight"]
    for name, (rows, columns) in shapes.items():
        base = f"model.layers.0.{name}.weight"
        if scheme == "nvfp4":
            out[base] = u8(rng.integers(0, 256, (rows, columns // 2)))
            out[base + "_scale"] = u8(rng.integers(0x28, 0x40, (rows, columns // 16)), "F8_E4M3")
            out[base + "_scale_2"] = f32(np.array(rng.uniform(0.05, 0.1)))
        else:
            codes = rng.integers(0, 0x50, (rows, columns)) | (rng.integers(0, 2, (rows, columns)) << 7)
            out[base] = u8(codes, "F8_E4M3")
            out[base + "_scale_inv"] = f32(rng.uniform(0.02, 0.04, (-(-rows // 128), -(-columns // 128))))
    st_files.write_checkpoint(folder, out)


@pytest.mark.parametrize("scheme, loaded", [("nvfp4", {"NVFP4", "F32", "Q8_0"}), ("fp8", {"Q8_0", "F32"})])
def test_quantised_checkpoints_run_and_convert(tmp_path, scheme, loaded):
    folder, out = tmp_path / "in", tmp_path / "out.gguf"
    quantised_checkpoint(folder, scheme)
    with source.open_model(folder) as model:
        assert {t.type_name for t in model.file.tensors.values()} == loaded
        scales = [w.scale for w in model.weights() if w.name == "blk.0.attn_q.weight"]
        assert (scales[0] != 1) == (scheme == "nvfp4")
    convert.convert(folder, out)
    assert np.array_equal(all_logits(out), all_logits(folder))
    convert.convert(folder, out, "F32")
    exact, stored = all_logits(out), all_logits(folder, "keep")
    assert np.abs(exact - stored).max() < 0.05 * np.abs(exact).max()  # 8-bit activations against NVFP4; the weights' values are the same
    with open_gguf(out) as file:
        assert not any(n.endswith(".scale") for n in file.tensors)


def test_a_failure_leaves_nothing(tmp_path):
    tensors = st_files.copy_checkpoint("qwen3", tmp_path / "in")
    name = "model.layers.1.mlp.down_proj.weight"
    shape = tensors[name][1]
    tensors[name] = f32(np.full(shape, np.inf))
    st_files.write_checkpoint(tmp_path / "in", tensors)
    out = tmp_path / "out.gguf"
    out.write_bytes(b"before")
    with pytest.raises(Bw24Error, match="tensor blk.1.ffn_down.weight: a value of inf does not fit Q8_0"):
        convert.convert(tmp_path / "in", out)
    assert out.read_bytes() == b"before" and sorted(p.name for p in tmp_path.iterdir()) == ["in", "out.gguf"]
    with pytest.raises(Bw24Error, match="is a directory"):
        convert.convert(tmp_path / "in", tmp_path)
    with pytest.raises(Bw24Error, match="--type Q9: expected one of auto, keep, Q4_K_M"):
        convert.convert(needs("qwen3"), out, "Q9")


def test_the_command(tmp_path, capfd):
    out = tmp_path / "out.gguf"
    assert main(["convert", str(needs("llama")), str(out), "--type", "Q8_0"]) == 0
    assert "16 tensors Q8_0" in capfd.readouterr().err
    assert main(["convert", str(needs("llama")), str(out)]) == 2
    assert "exists; --force replaces it" in capfd.readouterr().err
    assert main(["convert", str(needs("llama")), str(out), "--force", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["bytes"] == out.stat().st_size and "Q8_0" in report["tensor_types"]
    assert main(["convert", str(tmp_path / "absent"), str(out), "--force"]) == 2


# ---- text


def byte_bpe(pattern: str | None, bos: bool = False) -> Tokenizer:
    """A byte-level tokenizer of about 400 tokens, trained on the spot; special tokens at the end as in real files."""
    tok = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    tok.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)])
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tok.add_special_tokens([AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    tok.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    if bos:
        token = ("<|im_start|>", tok.token_to_id("<|im_start|>"))
        tok.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[token])
    return tok


QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN35 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


@pytest.mark.parametrize("pattern, scheme", [(QWEN2, "qwen2"), (QWEN35, "qwen35"), (None, "gpt-2")])
@pytest.mark.parametrize("bos", [False, True])
def test_a_tokenizer_json_gives_the_same_ids(tmp_path, pattern, scheme, bos):
    theirs = byte_bpe(pattern, bos)
    theirs.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}, "chat_template": "x"}))
    rows = theirs.get_vocab_size() + 5
    (tmp_path / "generation_config.json").write_text(json.dumps({
        "eos_token_id": [theirs.token_to_id("<|im_end|>"), 7], "bos_token_id": theirs.token_to_id("<|im_start|>"), "temperature": 0.5, "top_k": 9}))
    keys = st_text.read_text(tmp_path, {}, "qwen2", rows)
    assert keys["tokenizer.ggml.pre"] == scheme and len(keys["tokenizer.ggml.tokens"]) == rows
    assert keys["general.sampling.temp"] == 0.5 and keys["general.sampling.top_k"] == 9 and keys["tokenizer.chat_template"] == "x"
    ours = from_metadata(keys)
    assert ours.adds_bos == bos and ours.eos_id == theirs.token_to_id("<|im_end|>") and {ours.eos_id, 7} <= ours.eog_ids
    assert ours.bos_id == theirs.token_to_id("<|im_start|>")
    for text in TEXTS:
        ids = ours.encode(text, parse_special=True)
        assert ids == theirs.encode(text).ids, text
        assert ours.decode(ids[1:] if bos else ids) == text
    assert not ours.is_special(ours.id_of("<think>")) and ours.is_special(ours.id_of("<|endoftext|>"))


@pytest.mark.parametrize("name", sorted({s: n for n, s in sorted(SCHEMES.items(), reverse=True) if n != "gemma4"}.values()))
def test_every_scheme_is_recognised_by_what_it_does(name):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizer(SCHEMES[name], raw=False)
    data = json.loads(tok.to_str())
    data["model"]["ignore_merges"] = SCHEMES[name].whole_words
    found = st_text.find_scheme(data)
    assert SCHEMES[found].patterns == SCHEMES[name].patterns


def pieces(folder: Path) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece vocabulary trained on the spot, in folder/tokenizer.model."""
    (folder / "text").write_text("\n".join(t for t in CORPUS if t.strip()))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "tokenizer"), model_type="bpe", vocab_size=380, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, user_defined_symbols=["<tool>"], minloglevel=2)
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


PLAIN = ("hello world tests", "caf\u00e9 \U0001f600 xyz", "the quick  brown")


def test_a_sentencepiece_model_gives_the_same_ids(tmp_path):
    theirs = pieces(tmp_path)
    keys = st_text.read_text(tmp_path, {"bos_token_id": 1, "eos_token_id": 2}, "llama", 384)
    ours = from_metadata(keys)
    assert ours.adds_bos and ours.bos_id == 1 and keys["tokenizer.ggml.add_space_prefix"] is True
    for text in PLAIN:
        ids = ours.encode(text, add_special=False)
        assert ids == theirs.encode(text) and ours.decode(ids) == text
    assert ours.encode("<tool>", add_special=False) == [theirs.piece_to_id("<tool>")]


def test_a_sentencepiece_vocabulary_written_as_merges_gives_the_same_ids(tmp_path):
    processor = pieces(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    table = {processor.id_to_piece(i): i for i in range(processor.get_piece_size())}
    cuts = [(-processor.get_score(i), t[:k], t[k:]) for t, i in table.items() for k in range(1, len(t)) if not t.startswith("<")]
    merges = [[left, right] for _, left, right in sorted(cuts) if left in table and right in table]
    data = {
        "version": "1.0", "added_tokens": [{"id": i, "content": t, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
                                            "normalized": False} for t, i in (("<unk>", 0), ("<s>", 1), ("</s>", 2))],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"},
                                                           {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
        "pre_tokenizer": None, "decoder": None,
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                                                                 {"Sequence": {"id": "A", "type_id": 0}}],
                           "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "model": {"type": "BPE", "vocab": table, "merges": merges, "byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ours = from_metadata(st_text.read_text(tmp_path, {"bos_token_id": 1, "eos_token_id": 2}, "llama", 384))
    assert ours.adds_bos
    for text in PLAIN:
        assert ours.encode(text) == theirs.encode(text).ids, text


@pytest.mark.parametrize("files, message", [
    ({"tokenizer.json": "[1]"}, "expected a JSON object"), ({"tokenizer.json": "{"}, "not valid JSON"),
    ({"tokenizer.json": '{"model": {"type": "Unigram", "vocab": {}}}'}, "expected BPE, found Unigram"),
    ({"tokenizer.json": '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}'}, "expected a token's text and an id"),
    ({"tokenizer.json": '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a"]}}'}, "expected two parts"),
    ({"tokenizer.json": '{"model": {"type": "BPE", "vocab": {"a": 99}, "merges": []}, "pre_tokenizer": {"type": "Nope"}}'}, "cannot be read"),
    ({"tokenizer.json": '{"model": {"type": "BPE", "vocab": {"a": 99}, "merges": []}, "pre_tokenizer": {"type": "Whitespace"}}'}, "like none of"),
    ({"tokenizer.json": '{"model": {"type": "BPE", "vocab": {"a": 99}, "merges": []}, "pre_tokenizer": null}'}, "pre_tokenizer: the key is missing"),
    ({"tokenizer.json": '{"normalizer": {"type": "Lowercase"}, "model": {"vocab": {"a": 0}, "merges": []}}'}, "expected none or NFC"),
    ({"tokenizer.json": '{"model": {"vocab": {"<0x00>": 9}, "byte_fallback": true, "merges": []}}'}, "token 9 .* has no row: the embedding has 8"),
    ({"tokenizer.model": "\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"}, "damaged"), ({"tokenizer.model": "\x0a\x05ab"}, "are left"),
    ({"tokenizer.model": ""}, "found type 1"),
    ({"generation_config.json": '{"temperature": "hot"}'}, "temperature: expected a number"),
    ({"tokenizer_config.json": '{"chat_template": 5}'}, "expected a string or a list"),
])
def test_broken_text_files_are_named(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(Bw24Error, match=message):
        st_text.read_text(tmp_path, {}, "llama", 8)


def test_the_template_is_found_in_each_of_its_places(tmp_path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert st_text.read_text(tmp_path, {}, "llama", 8)["tokenizer.chat_template"] == "d"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "j"}))
    assert st_text.read_text(tmp_path, {}, "llama", 8)["tokenizer.chat_template"] == "j"
    (tmp_path / "chat_template.jinja").write_text("f")
    assert st_text.read_text(tmp_path, {}, "llama", 8) == {"tokenizer.chat_template": "f"}


def test_the_demo_directory_is_the_demo_file(goldens):
    """Metadata, tokens and unquantised tensors of the demo's directory against its GGUF file, which another program wrote."""
    folder = goldens.parent / "demo"
    with open_gguf(folder / "demo-q4_k_m.gguf") as file:
        from bw24.st_model import open_checkpoint

        checkpoint = open_checkpoint(folder / "hf")
        for key, value in file.metadata.items():
            if key in checkpoint.metadata and key != "general.name":
                same = list(value) == checkpoint.metadata[key] if hasattr(value, "tolist") else checkpoint.metadata[key] == value
                assert same, key
        assert {t.name: t.shape for t in checkpoint.tensors.values()} == {t.name: t.shape for t in file.tensors.values()}
        for t in file.tensors.values():
            if t.type_name == "F32":
                assert bytes(checkpoint.data(t.name)) == bytes(file.data(t.name)), t.name
