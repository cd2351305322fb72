"""Safetensors: the container against broken files, the schemes against plain arithmetic, whole checkpoints against transformers."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

import st_files
from bw24 import abi, source, st_map, st_model, st_moe, st_qwen35
from bw24.engine import Engine
from bw24.errors import Bw24Error
from bw24.safetensors import INDEX, open_shards, parse_header
from bw24.st_quant import E4M3, Fp4, Fp8, read_sources
from st_files import FAMILIES, bf16, f32, file_bytes, header_bytes, needs, u8

ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
TWO = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": {"dtype": "U8", "shape": [4], "data_offsets": [8, 12]}}


class Bytes:
    def __init__(self, data: bytes):
        self.data, self.size = data, len(data)

    def read(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]


def changed(**entry: object) -> bytes:
    return header_bytes({"a": {**ONE, **entry}}) + bytes(8)


HOSTILE = {
    "no header": (b"\0" * 7, "at least 8 bytes"),
    "header longer than the file": (struct.pack("<Q", 100) + b"{}", "header of 100 bytes"),
    "header of 2^63": (struct.pack("<Q", 1 << 63) + b"{}", "header of 9223372036854775808 bytes"),
    "header over the limit": (struct.pack("<Q", (100 << 20) + 1) + b"{}", "limit 104857600"),
    "empty header": (struct.pack("<Q", 0), "not a safetensors file"),
    "blank before the brace": (header_bytes(b' {"a": 1}'), "not a safetensors file"),
    "a list": (header_bytes(b"[]"), "not a safetensors file"),
    "not UTF-8": (header_bytes(b'{"\xff": 1}'), "expected UTF-8"),
    "cut JSON": (header_bytes(b'{"a": '), "not valid JSON"),
    "NaN": (header_bytes(b'{"a": NaN}'), "NaN is not JSON"),
    "nested 200000 deep": (header_bytes(b'{"a": ' + b"[" * 200000 + b"]" * 200000 + b"}"), "nested too deeply"),
    "a number of 5000 digits": (header_bytes(b'{"a": ' + b"9" * 5000 + b"}"), "not valid JSON"),
    "a tensor twice": (header_bytes(b'{"a": 1, "a": 2}'), "given twice"),
    "a key twice": (header_bytes(b'{"a": {"dtype": "U8", "dtype": "U8", "shape": [], "data_offsets": [0, 1]}}') + b"x", "given twice"),
    "metadata not strings": (header_bytes({"__metadata__": {"a": 1}}), "expected a map of strings"),
    "metadata a list": (header_bytes({"__metadata__": []}), "expected a map of strings"),
    "entry a number": (header_bytes({"a": 1}), "expected an object of dtype"),
    "entry with another key": (changed(extra=1), "expected an object of dtype"),
    "entry without shape": (header_bytes({"a": {"dtype": "U8", "data_offsets": [0, 0]}}), "expected an object of dtype"),
    "unknown dtype": (changed(dtype="F33"), "unknown dtype F33"),
    "dtype a number": (changed(dtype=1), "unknown dtype"),
    "negative extent": (changed(shape=[-2]), "expected at most 8 whole numbers"),
    "fractional extent": (changed(shape=[2.0]), "expected at most 8 whole numbers"),
    "true as an extent": (changed(shape=[True, 2]), "expected at most 8 whole numbers"),
    "extent 2^63": (changed(shape=[1 << 63]), "expected at most 8 whole numbers"),
    "rank 9": (changed(shape=[1] * 8 + [2]), "expected at most 8 whole numbers"),
    "product over 2^63": (changed(shape=[1 << 31, 1 << 31, 2]), "more than 2^63 bits"),
    "product that wraps to 8": (changed(shape=[1 << 62, 4, 2]), "more than 2^63 bits"),
    "three offsets": (changed(data_offsets=[0, 4, 8]), "expected two whole numbers"),
    "negative offset": (changed(data_offsets=[-8, 0]), "expected two whole numbers"),
    "end before begin": (changed(data_offsets=[8, 0]), "lie outside the data section of 8 bytes"),
    "beyond the end": (changed(shape=[4], data_offsets=[0, 16]), "lie outside the data section of 8 bytes"),
    "size against shape": (changed(shape=[3]), "F32 [3] needs 12 bytes, data_offsets give 8"),
    "half a byte": (changed(dtype="F4", shape=[15]), "not a whole number of bytes"),
    "hole at the start": (header_bytes({"a": {**ONE, "data_offsets": [8, 16]}}) + bytes(16), "leaves a hole of 8 bytes"),
    "hole in the middle": (header_bytes({**TWO, "b": {**TWO["b"], "data_offsets": [12, 16]}}) + bytes(16), "leaves a hole of 4 bytes"),
    "overlap": (header_bytes({**TWO, "b": {**TWO["b"], "data_offsets": [4, 8]}}) + bytes(8), "overlaps"),
    "the same bytes twice": (header_bytes({"a": ONE, "b": ONE}) + bytes(8), "overlaps"),
    "bytes after the last tensor": (header_bytes({"a": ONE}) + bytes(9), "1 bytes after the last tensor"),
    "no tensors but data": (header_bytes({}) + b"x", "1 bytes after the last tensor"),
    "empty name": (header_bytes({"": ONE}) + bytes(8), "expected a name of 1 to 1024 bytes"),
    "NUL in a name": (header_bytes({"a\0b": ONE}) + bytes(8), "control character"),
    "lone surrogate in a name": (header_bytes(b'{"\\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}') + bytes(8), "surrogate"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_broken_header_is_refused_by_name(case):
    data, message = HOSTILE[case]
    with pytest.raises(Bw24Error) as caught:
        parse_header(Bytes(data), "f.safetensors")
    text = str(caught.value)
    assert text.startswith("f.safetensors: ") and message in text and text.isprintable() and len(text) < 600


def test_a_whole_header_is_read():
    data = header_bytes({"__metadata__": {"format": "pt"}, **TWO, "empty": {"dtype": "F32", "shape": [0, 3], "data_offsets": [8, 8]},
                         "scalar": {"dtype": "F16", "shape": [], "data_offsets": [12, 14]},
                         "six": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [14, 17]}}) + bytes(17)
    found = parse_header(Bytes(data), "f")
    start = len(data) - 17
    places = [(e.name, e.offset - start, e.nbytes) for e in found.values()]
    assert places == [("a", 0, 8), ("empty", 8, 0), ("b", 8, 4), ("scalar", 12, 2), ("six", 14, 3)]
    assert found["scalar"].shape == () and found["b"].dtype == "U8"


def test_every_cut_and_flipped_byte_gives_a_header_or_an_error():
    data = header_bytes(TWO) + bytes(12)
    for cut in range(len(data)):
        with pytest.raises(Bw24Error):
            parse_header(Bytes(data[:cut]), "f")
    accepted = 0
    for at in range(len(data)):
        for bit in (1, 32, 128):
            try:
                entries = parse_header(Bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]), "f")
            except Bw24Error:
                continue
            accepted += 1
            assert sum(e.nbytes for e in entries.values()) == 12
    assert accepted > 0


# ---- shards


def shards(folder: Path, weight_map: object) -> Path:
    (folder / "a.safetensors").write_bytes(file_bytes({"x": f32(np.zeros(2)), "y": f32(np.ones(3))}))
    (folder / "b.safetensors").write_bytes(file_bytes({"z": f32(np.full(1, 7.0))}))
    (folder / INDEX).write_text(weight_map if isinstance(weight_map, str) else json.dumps({"metadata": {"total_size": 24}, "weight_map": weight_map}))
    return folder


def test_sharded_tensors_are_found_in_their_files(tmp_path):
    found = open_shards(shards(tmp_path, {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"}))
    assert np.frombuffer(found.data("z"), "<f4").tolist() == [7.0] and np.frombuffer(found.data("y"), "<f4").tolist() == [1, 1, 1]
    found.close()
    found.close()
    with pytest.raises(Bw24Error, match="closed"):
        found.data("x")


@pytest.mark.parametrize("weight_map, message", [
    ({"x": "a.safetensors", "y": "a.safetensors", "z": "c.safetensors"}, "the shard c.safetensors is missing"),
    ({"x": "a.safetensors", "y": "a.safetensors", "z": "../b.safetensors"}, "not a plain"),
    ({"x": "a.safetensors", "y": "a.safetensors", "z": "/etc/passwd"}, "not a plain"),
    ({"x": "a.safetensors", "y": "a.safetensors", "z": "sub\\b.safetensors"}, "not a plain"),
    ({"x": "a.safetensors", "y": "b.safetensors", "z": "b.safetensors"}, "shard a.safetensors has 1 tensors \\(y\\)"),
    ({"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors", "w": "b.safetensors"}, "shard b.safetensors lacks 1 tensors \\(w\\)"),
    ({"x": "a.safetensors", "z": "b.safetensors"}, "has 1 tensors \\(y\\)"),
    ({"x": 1}, "expected a map"), ({}, "expected a map"), ("[]", "expected a map"), ('{"weight_map": {"a": "b", "a": "c"}}', "given twice"),
])
def test_a_broken_index_is_refused(tmp_path, weight_map, message):
    with pytest.raises(Bw24Error, match=message):
        open_shards(shards(tmp_path, weight_map))


def test_a_directory_must_have_one_file_or_an_index(tmp_path):
    with pytest.raises(Bw24Error, match="found no"):
        open_shards(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(file_bytes({name: f32(np.zeros(1))}))
    with pytest.raises(Bw24Error, match="found 2"):
        open_shards(tmp_path)


# ---- schemes


def sources(tmp_path: Path, tensors: dict, config: dict | None = None) -> dict:
    (tmp_path / "model.safetensors").write_bytes(file_bytes(tensors))
    return read_sources(open_shards(tmp_path), config or {})


def test_floats_are_widened_exactly(tmp_path):
    values = np.array([[1.5, -0.0, 3.0e38], [2.0**-126, 65504.0, -7.25]], np.float32)
    got = sources(tmp_path, {"a.weight": bf16(values), "b.weight": f32(values), "c.weight": ("F16", (2,), np.array([0.1, -65504], "<f2").tobytes())})
    assert np.array_equal(got["b.weight"].f32(slice(0, 2)), values)
    assert np.array_equal(got["a.weight"].f32(np.array([1])).view(np.uint32), values[1:].view(np.uint32) & 0xFFFF0000)
    assert got["c.weight"].f32(slice(0, 1)).tolist() == [[np.float32(np.float16(0.1)), -65504.0]]


def test_unaligned_data_is_read_right(tmp_path):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    (tmp_path / "model.safetensors").write_bytes(file_bytes({"pad": u8(np.zeros(1)), "a.weight": f32(values)}, pad=1))
    got = read_sources(open_shards(tmp_path), {}, ["a.weight"])["a.weight"]
    assert got.raw() is None and np.array_equal(got.f32(slice(0, 2)), values)


@pytest.mark.parametrize("scale_shape", [(), (1,), (5, 1), (5,), (3, 2)])
def test_fp8_scales_multiply_codes(tmp_path, scale_shape):
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (5, 6)).astype(np.uint8)
    codes[(codes & 127) == 127] = 0x38
    scale = rng.uniform(0.1, 3, scale_shape).astype(np.float32)
    name = "a.weight_scale_inv" if scale_shape == (3, 2) else "a.weight_scale"
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 4]}}
    got = sources(tmp_path, {"a.weight": u8(codes, "F8_E4M3"), name: f32(scale), "a.input_scale": f32(np.ones(()))}, config)
    assert list(got) == ["a.weight"] and isinstance(got["a.weight"], Fp8)
    if scale_shape == (3, 2):
        each = np.array([[scale[i // 2, j // 4] for j in range(6)] for i in range(5)])
    else:
        each = np.broadcast_to(scale.reshape(-1, 1), (5, 6)) if scale.size == 5 else np.full((5, 6), scale.reshape(-1)[0])
    assert np.array_equal(got["a.weight"].f32(np.array([4, 0])), (E4M3[codes] * each)[[4, 0]])


def test_e4m3_values():
    spots = {0x00: 0.0, 0x01: 2.0**-9, 0x07: 7 * 2.0**-9, 0x08: 2.0**-6, 0x38: 1.0, 0x77: 240.0, 0x7E: 448.0, 0x81: -(2.0**-9), 0xB8: -1.0}
    assert {c: float(E4M3[c]) for c in spots} == spots
    assert np.isnan(E4M3[[0x7F, 0xFF]]).all() and np.isfinite(np.delete(E4M3, [0x7F, 0xFF])).all()


def nvfp4(rng: np.random.Generator, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.integers(0, 256, (rows, columns // 2)).astype(np.uint8), rng.integers(1, 127, (rows, columns // 16)).astype(np.uint8)


def values_of(codes: np.ndarray, scales: np.ndarray, group: int, scale: float, table: np.ndarray) -> np.ndarray:
    magnitude = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    out = np.empty((len(codes), codes.shape[1] * 2))
    for i, row in enumerate(codes):
        for j in range(out.shape[1]):
            code = (row[j // 2] >> 4) if j % 2 else row[j // 2] & 15
            out[i, j] = magnitude[code & 7] * (-1 if code & 8 else 1) * float(table[scales[i, j // group]]) * scale
    return out


@pytest.mark.parametrize("scheme", ["modelopt", "compressed-tensors", "mxfp4"])
def test_4_bit_blocks_keep_every_value(tmp_path, scheme):
    rng = np.random.default_rng(3)
    table, group = (E4M3, 16) if scheme != "mxfp4" else (np.exp2(np.arange(256) - 127.0), 32)
    codes, scales = nvfp4(rng, 3, 128)
    if scheme == "mxfp4":
        scales = rng.integers(100, 150, (3, 4)).astype(np.uint8)
    tensors = {
        "modelopt": {"a.weight": u8(codes), "a.weight_scale": u8(scales, "F8_E4M3"), "a.weight_scale_2": f32(np.array(0.25)),
                     "a.input_scale": f32(np.array(2.0)), "b.k_proj.k_scale": f32(np.array(1.0))},
        "compressed-tensors": {"a.weight_packed": u8(codes), "a.weight_scale": u8(scales, "F8_E4M3"), "a.weight_global_scale": f32(np.array([4.0])),
                               "a.input_global_scale": f32(np.array([0.5]))},
        "mxfp4": {"a.weight_packed": u8(codes), "a.weight_scale": u8(scales)},
    }[scheme]
    got = sources(tmp_path, tensors)
    assert list(got) == ["a.weight"]
    weight = got["a.weight"]
    assert isinstance(weight, Fp4) and weight.shape == (3, 128)
    if scheme != "mxfp4":
        assert weight.scale == 0.25 and weight.input_scale == 2.0
    expects = values_of(codes, scales, group, weight.scale, table)
    assert np.array_equal(weight.f32(slice(0, 3)), expects.astype(np.float32))
    blocks = weight.blocks(slice(0, 3), None)
    out = np.empty((3, 128), np.float32)
    kind = abi.type_id("MXFP4" if scheme == "mxfp4" else "NVFP4")
    abi.check(abi.lib().bw24_dequantize(kind, abi.ffi.from_buffer(blocks), abi.ffi.cast("float *", abi.ffi.from_buffer(out)), out.size))
    assert np.array_equal(out * np.float32(weight.scale), expects.astype(np.float32))


def test_a_column_order_of_whole_groups_moves_4_bit_blocks(tmp_path):
    codes, scales = nvfp4(np.random.default_rng(4), 2, 128)
    weight = sources(tmp_path, {"a.weight": u8(codes), "a.weight_scale": u8(scales, "F8_E4M3"), "a.weight_scale_2": f32(np.array(1.0))})["a.weight"]
    order = np.concatenate([np.arange(96, 128), np.arange(0, 96)])
    moved = weight.blocks(slice(0, 2), order)
    out = np.empty((2, 128), np.float32)
    abi.check(abi.lib().bw24_dequantize(40, abi.ffi.from_buffer(moved), abi.ffi.cast("float *", abi.ffi.from_buffer(out)), out.size))
    assert np.array_equal(out, weight.f32(slice(0, 2))[:, order])


@pytest.mark.parametrize("change, message", [
    ({"a.weight_scale": f32(np.array([0.0]))}, "finite and above 0"),
    ({"a.weight_scale": f32(np.array([np.inf]))}, "finite and above 0"),
    ({"a.weight_scale": f32(np.ones((2, 2)))}, "needs scales of one"),
    ({"a.weight_scale": u8(np.ones(1))}, "expected F32, BF16 or F16 scales"),
    ({"a.weight_scale": None}, "F8_E4M3 weights need the tensor a.weight_scale_inv, which is missing"),
    ({"a.weight": u8(np.full((4, 6), 0x7F), "F8_E4M3")}, "has a NaN code"),
    ({"a.weight": u8(np.zeros((4, 6)), "I8")}, "weights of dtype I8 are not supported"),
    ({"a.weight": ("F64", (1,), bytes(8))}, "weights of dtype F64 are not supported"),
    ({"a.pre_quant_scale": f32(np.ones(6))}, "a quantisation scheme that is not supported"),
    ({"a.weight": u8(np.zeros((0, 6)), "F8_E4M3")}, "empty dimension"),
])
def test_a_broken_scheme_is_refused(tmp_path, change, message):
    tensors = {"a.weight": u8(np.full((4, 6), 0x38), "F8_E4M3"), "a.weight_scale": f32(np.array([2.0]))}
    tensors = {k: v for k, v in {**tensors, **change}.items() if v is not None}
    with pytest.raises(Bw24Error, match=message):
        sources(tmp_path, tensors)["a.weight"].f32(slice(0, 4))


@pytest.mark.parametrize("quantization, message", [
    ({"quant_method": "gptq"}, "found gptq"), ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "found pack-quantized"),
    ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask"}}, "sparse-bitmask"), ([1], "expected an object"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "expected two numbers"),
])
def test_an_unknown_scheme_is_refused(tmp_path, quantization, message):
    with pytest.raises(Bw24Error, match=message):
        sources(tmp_path, {"a.weight": f32(np.zeros(2))}, {"quantization_config": quantization})


# ---- whole checkpoints


def logits(folder: Path, ids: list[int], count: int, **engine: object) -> np.ndarray:
    with source.open_model(folder) as model, Engine(model, backend="ref", kv="f32", **engine) as e, e.sequence() as seq:
        return seq.prefill(ids, want="all")[-count:]


def distance(folder: Path, expected: Path | None = None) -> float:
    """Largest difference from transformers' logits, relative to the largest of them."""
    want = np.load((expected or folder) / "expected.npz")
    got = logits(folder, want["ids"].tolist(), len(want["logits"]), float_activations=True)
    return float(np.abs(got - want["logits"]).max() / np.abs(want["logits"]).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family):
    assert distance(needs(family)) < 1e-5


FAULTS = {
    "value heads in the checkpoint's order": ("qwen3_5", st_qwen35.Qwen35, "_tiled", lambda self, width: np.arange(self.value_heads * width)),
    "norms without + 1": ("qwen3_5", st_qwen35.Qwen35, "zero_centred_norms", False),
    "norms without + 1, gemma3": ("gemma3", st_map.Gemma3, "zero_centred_norms", False),
    "decay not exponentiated": ("qwen3_5", st_qwen35, "exp_negated", lambda values: values),
    "q and k not interleaved": ("llama", st_map.Llama, "row_order", lambda self, target, rows: None),
    "gate and up exchanged": ("qwen3_5_moe", st_map, "EXPERTS",
                              {**st_map.EXPERTS, "gate_proj": "ffn_up_exps", "up_proj": "ffn_gate_exps"}),
    "routed scale dropped": ("hy_v3", st_moe.HyV3, "metadata", lambda self, f=st_moe.HyV3.metadata: {**f(self), "hy_v3.expert_weights_scale": 1.0}),
    "selection bias zero": ("minimax_m2", st_moe.MiniMaxM2, "change",
                            lambda self, target: (lambda v: v * 0) if "exp_probs_b" in target else None),
    "frequencies not scaled": ("llama3", st_map.Llama, "extra", lambda self: {}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_transform_left_out_is_seen(fault, monkeypatch):
    family, owner, name, wrong = FAULTS[fault]
    folder = needs(family)
    monkeypatch.setattr(owner, name, wrong)
    assert distance(folder) > 1e-3


def test_sharded_fused_and_prefixed_checkpoints_are_the_same_model(tmp_path):
    """Multimodal prefixes, other towers' tensors, per-expert and fused experts, shards: the same logits."""
    folder = needs("qwen3_moe")
    tensors = st_files.copy_checkpoint("qwen3_moe", tmp_path)
    stacks: dict[str, dict[int, np.ndarray]] = {}
    out = {"model.visual.patch.weight": ("I8", (2,), b"ab")}
    for name, (dtype, shape, raw) in tensors.items():
        if ".experts." not in name:
            out[name.replace("model.", "model.language_model.")] = (dtype, shape, raw)
            continue
        stem, rest = name.split(".experts.")
        number, kind = rest.split(".")[:2]
        stacks.setdefault(f"{stem}.experts.{kind}", {})[int(number)] = np.frombuffer(raw, "<u2").reshape(shape)
    for name in [n for n in stacks if n.endswith("gate_proj")]:
        gate, up, down = (stacks[name.replace("gate_proj", f"{k}_proj")] for k in ("gate", "up", "down"))
        fused = np.stack([np.concatenate([gate[e], up[e]]) for e in range(len(gate))])
        out[name.replace("gate_proj", "gate_up_proj")] = ("BF16", fused.shape, fused.tobytes())
        stacked = np.stack([down[e] for e in range(len(down))])
        out[name.replace("gate_proj", "down_proj")] = ("BF16", stacked.shape, stacked.tobytes())
    (tmp_path / "model.safetensors").unlink()
    half = dict(list(out.items())[: len(out) // 2])
    rest = {n: t for n, t in out.items() if n not in half}
    for name, part in (("m-1.safetensors", half), ("m-2.safetensors", rest)):
        (tmp_path / name).write_bytes(file_bytes(part))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {n: "m-1.safetensors" if n in half else "m-2.safetensors" for n in out}}))
    ids = np.load(folder / "expected.npz")["ids"].tolist()
    assert np.array_equal(logits(tmp_path, ids, 4), logits(folder, ids, 4))


def test_an_mtp_block_follows_the_trunk(tmp_path):
    """The tensors decide whether there is one, whatever the config says; its norms are zero-centred too."""
    tensors = st_files.copy_checkpoint("qwen3_5", tmp_path, mtp_num_hidden_layers=0)
    trunk = st_model.open_checkpoint(tmp_path)
    assert trunk.metadata["qwen35.block_count"] == 4 and "qwen35.nextn_predict_layers" not in trunk.metadata
    for name, tensor in list(tensors.items()):
        if name.startswith("model.layers.3."):
            tensors[name.replace("model.layers.3.", "mtp.layers.0.")] = tensor
    tensors |= {"mtp.fc.weight": bf16(np.ones((32, 64)))}
    tensors |= {f"mtp.{n}.weight": bf16(np.full(32, 0.5)) for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    both = st_model.open_checkpoint(st_files.write_checkpoint(tmp_path, tensors))
    assert both.metadata["qwen35.block_count"] == 5 and both.metadata["qwen35.nextn_predict_layers"] == 1
    new = both.tensors.keys() - trunk.tensors.keys()
    assert {f"blk.4.nextn.{n}.weight" for n in ("eh_proj", "enorm", "hnorm", "shared_head_norm")} <= new and len(new) == 15
    assert set(np.frombuffer(both.data("blk.4.nextn.enorm.weight"), np.float32)) == {1.5}
    assert bytes(both.data("blk.4.attn_q.weight")) == bytes(both.data("blk.3.attn_q.weight"))


@pytest.mark.parametrize("edit, message", [
    (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "blk.1.ffn_up.weight', which was not loaded"),
    (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
    (lambda t: t.pop("model.embed_tokens.weight"), "embedding is missing"),
    (lambda t: t.update({"model.layers.1.mlp.extra.weight": f32(np.zeros(4))}), "1 tensors have no place in architecture llama"),
    (lambda t: t.update({"model.layers.9.mlp.up_proj.weight": f32(np.zeros((4, 4)))}), "1 tensors have no place in architecture llama"),
    (lambda t: t.update({"model.norm.weight": ("I32", (32,), bytes(128))}), "weights of dtype I32 are not supported"),
    (lambda t: t.update({"model.layers.0.self_attn.q_proj.weight": f32(np.zeros((63, 32)))}), "do not divide into 4 heads"),
])
def test_missing_and_extra_tensors_are_named(tmp_path, edit, message):
    tensors = st_files.copy_checkpoint("llama", tmp_path)
    edit(tensors)
    with pytest.raises(Bw24Error, match=message):
        with source.open_model(st_files.write_checkpoint(tmp_path, tensors)) as model:
            Engine(model, backend="ref").close()


@pytest.mark.parametrize("family, keys, message", [
    ("llama", {"model_type": "gpt9"}, "gpt9 is not supported; supported are deepseek_v2"), ("llama", {"model_type": ...}, "nothing is not supported"),
    ("llama", {"hidden_size": 0}, "hidden_size: expected a whole number 1..16777216, found 0"),
    ("llama", {"hidden_size": "64"}, "hidden_size: expected a whole number"), ("llama", {"hidden_size": ...}, "found None"),
    ("llama", {"rms_norm_eps": -1}, "rms_norm_eps: expected a number"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "expected default, linear, llama3, found yarn"),
    ("llama", {"rope_parameters": [1]}, "expected an object"), ("llama", {"hidden_act": "gelu"}, "hidden_act: expected silu, found gelu"),
    ("llama", {"sliding_window": 16}, "windows are not supported"), ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
    ("gemma3", {"layer_types": ["full_attention"] * 2}, "layer_types: expected 3 of"),
    ("gemma3", {"query_pre_attn_scalar": 99}, "query_pre_attn_scalar: expected 16"),
    ("qwen3_5", {"linear_num_value_heads": 5}, "a multiple of 2 key heads"),
])
def test_a_bad_config_is_refused_by_key(tmp_path, family, keys, message):
    st_files.copy_checkpoint(family, tmp_path, **keys)
    with pytest.raises(Bw24Error, match=message):
        source.open_model(tmp_path)


def test_no_config_is_no_checkpoint(tmp_path):
    st_files.copy_checkpoint("llama", tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(Bw24Error, match="config.json is missing"):
        source.open_model(tmp_path)


def test_the_fuzz_target_finds_nothing_in_a_second(tmp_path):
    import fuzz_safetensors

    assert fuzz_safetensors.run(1.0, 1, tmp_path / "finding") == 0
