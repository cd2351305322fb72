"""Latent attention: PERHEAD and shared caches by themselves, the scaling `yarn`, whole models from GGUF and from a checkpoint, and what is refused.

Two tiny checkpoints (tests/fixtures/checkpoints/deepseek_v2, deepseek_v3) are in the tree; the golden set runs where BW24_GOLDENS names it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

import golden_rules as rules
from bw24 import abi
from bw24.arch.common import Yarn
from bw24.build import Params
from bw24.convert import convert
from bw24.engine import Engine, kv_bytes_per_token, parse_kv
from bw24.errors import Bw24Error
from bw24.gate import run_rows
from bw24.gguf import GGUFWriter, open_gguf
from bw24.gguf_latent import open_latent
from bw24.info import facts
from bw24.source import open_model
from bw24.st_tensor import quantize
from mini_model import MiniModel, f32
from st_files import FIXTURES, bf16, copy_checkpoint, write_checkpoint
from test_goldens_tiny import check_model
from test_ops_mixed import ISAS, op_text, run

FULL = ("deepseek2", "deepseek2-yarn")
FAMILIES = ("deepseek_v2", "deepseek_v3")


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


# ---- ops


def test_perhead_is_a_product_a_head():
    rng = np.random.default_rng(5)
    x, w = rng.standard_normal((20, 3 * 50)).astype(np.float32), rng.standard_normal((3, 7, 37)).astype(np.float32)
    text, tensors = op_text({"x": x}, "BUF y 21\n", "PERHEAD y=y x=x w=w heads=3 from=9\n", "y", 21, {"w": f32(w)})
    want = np.einsum("thc,hrc->thr", x.reshape(20, 3, 50)[:, :, 9:46].astype(np.float64), w.astype(np.float64)).reshape(20, 21)
    assert np.abs(run(text, tensors, 20, (20, 1, 7)) - want).max() < 1e-5


def test_concat_joins_head_by_head():
    a, b = np.arange(60, dtype=np.float32).reshape(5, 12), -np.arange(30, dtype=np.float32).reshape(5, 6)
    text, tensors = op_text({"a": a, "b": b}, "BUF y 18\n", "CONCAT y=y a=a b=b heads=3\n", "y", 18)
    want = np.concatenate([a.reshape(5, 3, 4), b.reshape(5, 3, 2)], 2).reshape(5, 18)
    assert same(run(text, tensors, 5, (5, 1)), want)


@pytest.mark.parametrize("kv", ["f32", "f16", "q8_0", "q5_1", "e4m3"])
def test_a_shared_cache_is_two_caches_of_one_row(kv):
    """Keys that are values give the bits of a cache whose values are given the same rows; a page holds less where one copy is enough."""
    rng = np.random.default_rng(6)
    q, k = rng.standard_normal((24, 4 * 96)).astype(np.float32), rng.standard_normal((24, 96)).astype(np.float32)
    found = []
    for more in (" values=keys", ""):
        text, tensors = op_text({"q": q, "k": k}, "BUF y 384\n", "KV_APPEND k=k v=k kv=c\nATTEND y=y q=q kv=c heads=4 scale=0.1\n", "y", 384)
        text = f"KV c heads=1 dim=96 window=0{more}\n{text}"
        for backend, isa in (("ref", None), *(("cpu", i) for i in ISAS)):
            with MiniModel(text, tensors, backend=backend, isa=isa, kv=kv, context=200) as m:
                seq = m.sequence()
                found.append(np.concatenate([m.step([(seq, t % 24, True) for t in range(i, min(i + 60, 150))]) for i in range(0, 150, 60)]))
                abi.lib().bw24_seq_free(seq)
    assert all(same(x, found[0]) for x in found)


@pytest.mark.parametrize("line, message", [
    ("PERHEAD y=y x=x w=w heads=1", "matrices of the tensor expects 1, found 3"),
    ("PERHEAD y=y x=x w=w heads=3 from=40", "an end within a head of"),
    ("PERHEAD y=y x=x w=w heads=0", "widths, modulo heads"),
    ("PERHEAD y=x x=x w=w heads=3", "an output that is no input"),
    ("CONCAT y=y a=x b=x heads=4", "widths, modulo heads"),
])
def test_wrong_operands_are_refused(line, message):
    text, tensors = op_text({"x": np.zeros((2, 150), np.float32)}, "BUF y 21\n", line + "\n", "y", 21, {"w": f32(np.zeros((3, 7, 37)))})
    with pytest.raises(Bw24Error, match=message):
        MiniModel(text, tensors)


def test_a_shared_cache_takes_one_buffer():
    text, tensors = op_text({"k": np.zeros((2, 32), np.float32), "v": np.zeros((2, 32), np.float32)}, "", "KV_APPEND k=k v=v kv=c\n", "k", 32)
    with pytest.raises(Bw24Error, match="values that are the keys"):
        MiniModel("KV c heads=1 dim=32 window=0 values=keys\n" + text, tensors)
    with pytest.raises(Bw24Error, match="values= takes keys"):
        MiniModel("KV c heads=1 dim=32 window=0 values=none\n" + text, tensors)


# ---- the scaling


def yarn_params(**keys: object) -> Params:
    given = {"type": "yarn", "factor": 40.0, "original_context_length": 4096, "yarn_log_multiplier": 0.0707, **keys}
    return Params("deepseek2", {f"deepseek2.rope.scaling.{k}": v for k, v in given.items() if v is not None})


def test_yarn_factors_and_score():
    """Against the published formula in float64: short wavelengths stay, long ones are stretched, a ramp between."""
    yarn = Yarn.read(yarn_params())
    turn = lambda beta: 64 * np.log(4096 / (beta * 2 * np.pi)) / (2 * np.log(10000.0))  # noqa: E731
    low, high = np.floor(turn(32)), np.ceil(turn(1))
    ramp = np.clip((np.arange(32) - low) / (high - low), 0, 1)
    found = yarn.factors(10000.0, 64)
    assert found.dtype == np.float32 and np.abs(1 / found - ((1 - ramp) + ramp / 40)).max() < 1e-6
    assert found[0] == 1.0 and found[-1] == 40.0 and (np.diff(found) >= 0).all()
    assert abs(yarn.score - (1 + 0.0707 * np.log(40)) ** 2) < 1e-12
    assert Yarn.read(yarn_params(type=None)) is None and Yarn.read(yarn_params(yarn_log_multiplier=None)).score == 1.0


@pytest.mark.parametrize("keys, message", [
    ({"type": "longrope"}, "longrope"), ({"factor": 0.5}, "factor"), ({"factor": float("nan")}, "factor"),
    ({"original_context_length": 0}, "original_context"),
    ({"yarn_attn_factor": 2.0}, "yarn_attn_factor"), ({"yarn_ext_factor": 0.5}, "yarn_ext_factor"), ({"yarn_beta_fast": 0.5}, "yarn_beta_fast"),
    ({"factor": None}, "factor"), ({"yarn_log_multiplier": -1.0}, "yarn_log_multiplier"),
])
def test_yarn_keys_that_are_refused(keys, message):
    with pytest.raises(Bw24Error, match=message):
        Yarn.read(yarn_params(**keys))


# ---- whole models


@pytest.mark.parametrize("name", FULL)
def test_golden_full(goldens, name):
    check_model(goldens / "tiny", name, rules.check_f32, rules.f32_tolerance, backend="ref", float_activations=True)
    check_model(goldens / "tiny", name, rules.check_f32, rules.f32_tolerance)


@cache
def reference(family: str) -> tuple[list[int], np.ndarray]:
    ids = np.random.default_rng(8).integers(3, 96, 130).tolist()
    with open_model(FIXTURES / family) as model, Engine(model, backend="ref", max_rows=256) as e:
        return ids, run_rows(e, ids, 256)


WAYS = [*({"isa": i} for i in ISAS), {"threads": 1}, {"threads": 3}, {"fuse": False}, {"repack": False}, {"backend": "ref"}]


@pytest.mark.parametrize("settings", WAYS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_has_the_reference_s_bits(family, settings):
    ids, want = reference(family)
    with open_model(FIXTURES / family) as model, Engine(model, **{"threads": 2, "max_rows": 256, **settings}) as e:
        for width in (1, 9, 256):
            assert same(run_rows(e, ids, width), want), width


def test_sequences_in_one_step_and_forks():
    ids, want = reference("deepseek_v3")
    with open_model(FIXTURES / "deepseek_v3") as model, Engine(model, threads=2) as e, e.sequence() as a, e.sequence() as b:
        out = e.step([(s, t, True) for pair in zip(ids[:70], ids[:70], strict=True) for s, t in zip((a, b), pair, strict=True)])
        assert same(out[0::2], want[:70]) and same(out[1::2], want[:70])
        with a.fork() as c:
            assert same(run_rows(e, ids[70:], 16, c), want[70:])
            assert c.truncate(66) == 66 and same(run_rows(e, ids[66:], 256, c), want[66:])


def test_quantised_weights_and_caches(tmp_path):
    """Heads of whole blocks: matrices in Q8_0, caches in every format, all instruction sets; and the sizes that are said beforehand."""
    path = quantised(tmp_path / "q.gguf")
    with open_model(path) as model:
        one = sum(kv_bytes_per_token(model, parse_kv("f16"), card=True).values())
        assert one == 2 * 2 * (32 + 64) and sum(kv_bytes_per_token(model, parse_kv("f16")).values()) == 2 * one
        for kv in ("f16", "q8_0", "q8_0/q5_1", "e4m3"):
            with Engine(model, backend="ref", kv=kv, max_rows=256) as e:
                want = run_rows(e, list(range(100)), 256)
            for isa in ISAS:
                with Engine(model, isa=isa, threads=2, kv=kv, max_rows=256) as e:
                    assert same(run_rows(e, list(range(100)), 256), want) and same(run_rows(e, list(range(20)), 1), want[:20]), (kv, isa)


def quantised(path: Path, **changes: object) -> Path:
    """A dense model of two layers, every matrix Q8_0: 3 heads of 32 + 32, values of 32, a latent of 64."""
    rng, a = np.random.default_rng(3), "deepseek2."
    keys = {"block_count": 2, "context_length": 256, "embedding_length": 64, "feed_forward_length": 96, "leading_dense_block_count": 2,
            "attention.head_count": 3, "attention.head_count_kv": 1, "attention.kv_lora_rank": 64, "attention.key_length": 96,
            "attention.value_length": 64, "attention.key_length_mla": 64, "attention.value_length_mla": 32, "rope.dimension_count": 32,
            "attention.layer_norm_rms_epsilon": 1e-6, **changes}
    shapes = {"attn_q": (64, 192), "attn_kv_a_mqa": (64, 96), "attn_k_b": (32, 64, 3), "attn_v_b": (64, 32, 3), "attn_output": (96, 64),
              "ffn_gate": (64, 96), "ffn_up": (64, 96), "ffn_down": (96, 64)}
    with GGUFWriter(path) as w:
        w.add("general.architecture", "deepseek2")
        for key, value in keys.items():
            if value is not None:
                w.add(a + key, value)
        for name, shape in [("token_embd", (64, 128)), *((f"blk.{i}.{n}", s) for i in range(2) for n, s in shapes.items())]:
            blocks = np.zeros((int(np.prod(shape)) // 32, 34), np.uint8)
            blocks[:, :2] = np.float16(0.003).view(np.uint16).reshape(1, 1).view(np.uint8)
            blocks[:, 2:] = rng.integers(-127, 128, (len(blocks), 32)).astype(np.int8).view(np.uint8)
            w.add_tensor(name + ".weight", "Q8_0", shape, blocks.tobytes())
        for name in ("output_norm", *(f"blk.{i}.{x}" for i in range(2) for x in ("attn_norm", "ffn_norm", "attn_kv_a_norm"))):
            w.add_tensor(name + ".weight", "F32", (64,), rng.uniform(0.5, 1.5, 64).astype(np.float32).tobytes())
    return path


# ---- from checkpoints


@pytest.mark.parametrize("family", FAMILIES)
def test_the_converted_file_has_the_directory_s_bits(tmp_path, family):
    convert(FIXTURES / family, tmp_path / "c.gguf", "keep")
    with open_model(tmp_path / "c.gguf") as model, Engine(model, threads=2, max_rows=256) as e:
        assert same(run_rows(e, reference(family)[0], 256), reference(family)[1])
    with open_gguf(tmp_path / "c.gguf") as file:
        assert file.tensors["blk.1.attn_k_b.weight"].shape == (12, 24, 4) and file.tensors["blk.1.attn_v_b.weight"].shape == (24, 16, 4)


def joined(source: Path, path: Path, **changes: object) -> Path:
    """A BF16 file as older converters wrote it: keys' and values' matrices in one, heads of the size that attention has before they are folded."""
    with open_gguf(source) as file, GGUFWriter(path) as w:
        meta = {**file.metadata, "deepseek2.attention.key_length": file.metadata["deepseek2.attention.key_length_mla"],
                "deepseek2.attention.value_length": file.metadata["deepseek2.attention.value_length_mla"], **changes}
        for key, value in meta.items():
            if not key.startswith("tokenizer.") and not key.endswith("_mla"):
                w.add(key, value)
        for name, t in file.tensors.items():
            if "attn_v_b" in name:
                continue
            if "attn_k_b" not in name:
                w.add_tensor(name, t.type_name, t.shape, bytes(file.data(name)))
                continue
            raw = [np.frombuffer(file.data(n), np.uint16) for n in (name, name.replace("k_b", "v_b"))]
            k, v = raw[0].reshape(t.shape[::-1]), raw[1].reshape(file.tensors[name.replace("k_b", "v_b")].shape[::-1])
            both = np.ascontiguousarray(np.concatenate([k.swapaxes(1, 2), v], 1).reshape(-1, t.shape[1]))
            w.add_tensor(name.replace("k_b", "kv_b"), "BF16", both.shape[::-1], both.tobytes())
    return path


def test_files_with_keys_and_values_in_one_matrix(tmp_path):
    """BF16 halves give the same bits, and `info` knows the file."""
    convert(FIXTURES / "deepseek_v3", tmp_path / "c.gguf", "keep")
    path = joined(tmp_path / "c.gguf", tmp_path / "old.gguf")
    with open_gguf(path) as file:
        assert facts(file.header, device="cpu").refusal is None
    with open_model(path) as model, Engine(model, threads=2, max_rows=256) as e:
        assert same(run_rows(e, reference("deepseek_v3")[0], 256), reference("deepseek_v3")[1])
    with pytest.raises(Bw24Error, match="expected 4 heads of 4 \\+ 16 rows"):
        open_model(joined(tmp_path / "c.gguf", tmp_path / "bad.gguf", **{"deepseek2.attention.key_length": 12}))


def decoded(kind: str, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    out = np.empty(shape, np.float32)
    pointer = abi.ffi.cast("float *", abi.ffi.from_buffer(out))
    abi.check(abi.lib().bw24_dequantize(abi.type_id(kind), abi.ffi.from_buffer(data), pointer, out.size))
    return out


def test_a_quantised_matrix_taken_apart(tmp_path):
    """The values' rows are the file's own blocks; the keys' half, whose blocks run the other way, is Q8_0 of the decoded values."""
    rng = np.random.default_rng(4)
    path, values = tmp_path / "old.gguf", rng.standard_normal((3 * 96, 64)).astype(np.float32)
    data = quantize(values, abi.type_id("Q4_0"), "x")
    with GGUFWriter(path) as w:
        w.add("general.architecture", "deepseek2")
        for key, value in {"attention.head_count": 3, "attention.key_length": 96, "attention.value_length": 32, "rope.dimension_count": 32}.items():
            w.add("deepseek2." + key, value)
        w.add_tensor("blk.0.attn_kv_b.weight", "Q4_0", (64, 3 * 96), data.tobytes())
    with open_gguf(path) as file:
        latent = open_latent(file)
        assert list(latent.tensors) == ["blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight"]
        rows = data.reshape(3, 96, -1)
        assert bytes(latent.data("blk.0.attn_v_b.weight")) == rows[:, 64:].tobytes()
        keys = decoded("Q8_0", np.frombuffer(latent.data("blk.0.attn_k_b.weight"), np.uint8), (3, 64, 64))
        want = decoded("Q4_0", data, (3, 96, 64))[:, :64].swapaxes(1, 2)
        assert np.abs(keys - want).max() < 0.02


CONFIGS = {
    "factors that do not cancel": ("deepseek_v3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0,
                                                                       "original_max_position_embeddings": 16}}, "mscale"),
    "halves that rotate": ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
    "biases": ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
    "a router of another kind": ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
    "a softmax router with groups": ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}, "expert_group_count"),
    "heads of another size": ("deepseek_v3", {"v_head_dim": 12}, "expected 4 heads of 12 \\+ 12 rows"),
    "more dense layers": ("deepseek_v3", {"first_k_dense_replace": 2}, "leading_dense_block_count: 2, but blk.1.ffn_gate_inp.weight is there"),
    "fewer dense layers": ("deepseek_v3", {"first_k_dense_replace": 0}, "blk.0.ffn_gate_inp.weight is missing"),
    "more rotated values": ("deepseek_v2", {"qk_rope_head_dim": 10}, "q"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_that_are_refused(tmp_path, case):
    family, changes, message = CONFIGS[case]
    write_checkpoint(tmp_path, copy_checkpoint(family, tmp_path, **changes))
    with pytest.raises(Bw24Error, match=message), open_model(tmp_path) as model, Engine(model):
        pass


def test_the_mtp_block(tmp_path):
    """A checkpoint's block after the trunk is a second list; every backend gives it the same bits, and the trunk is what it was."""
    tensors, rng = copy_checkpoint("deepseek_v3", tmp_path), np.random.default_rng(9)
    tensors |= {n.replace("layers.1.", "layers.2."): t for n, t in tensors.items() if "layers.1." in n}
    for name, shape in (("eh_proj", (32, 64)), ("enorm", (32,)), ("hnorm", (32,)), ("shared_head.norm", (32,))):
        tensors[f"model.layers.2.{name}.weight"] = bf16(rng.standard_normal(shape) * 0.2 + len(shape) % 2)
    write_checkpoint(tmp_path, tensors)
    ids, want = reference("deepseek_v3")
    found = []
    for settings in ({"backend": "ref"}, *({"isa": i} for i in ISAS)):
        with open_model(tmp_path) as model, Engine(model, threads=2, max_rows=256, draft=True, **settings) as e:
            assert same(run_rows(e, ids, 256), want)
            hidden = np.random.default_rng(1).standard_normal((60, e.n_hidden)).astype(np.float32)
            with e.sequence("mtp") as seq:
                parts = [e.step_hidden([(seq, t, True) for t in ids[i:j]], hidden[i:j]) for i, j in ((0, 40), (40, 41), (41, 60))]
            found.append(np.concatenate([np.concatenate(p, 1) for p in parts]))
    assert all(same(x, found[0]) for x in found) and np.abs(np.diff(found[0][:, :96], axis=0)).max() > 0.1


def test_a_sigmoid_router_without_its_bias_is_refused(tmp_path):
    tensors = copy_checkpoint("deepseek_v3", tmp_path)
    write_checkpoint(tmp_path, {n: t for n, t in tensors.items() if "e_score_correction_bias" not in n})
    with pytest.raises(Bw24Error, match="exp_probs_b"):
        open_model(tmp_path)


BAD = {
    "no latent": ({"attention.kv_lora_rank": None}, "kv_lora_rank"),
    "a latent too wide": ({"attention.kv_lora_rank": 1000}, "kv_lora_rank: expected at most 992"),
    "all values rotate": ({"rope.dimension_count": 64}, "rope.dimension_count"),
    "an odd rotation": ({"rope.dimension_count": 31}, "rope.dimension_count"),
    "other heads": ({"attention.head_count": 4}, "attn_q"),
    "another head": ({"attention.key_length_mla": 96}, "attn_q"),
    "other values": ({"attention.value_length_mla": 16}, "attn_v_b"),
    "no heads": ({"attention.head_count": 0}, "head_count"),
    "a scale by position": ({"attention.temperature_scale": 0.1}, "temperature_scale"),
    "mixtures that are missing": ({"leading_dense_block_count": 1, "expert_count": 4, "expert_used_count": 2}, "blk.1.ffn_gate_inp"),
    "an unknown scaling": ({"rope.scaling.type": "longrope"}, "longrope"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_metadata_says_what_is_wrong(tmp_path, case):
    changes, message = BAD[case]
    with pytest.raises(Bw24Error, match=message), open_model(quantised(tmp_path / "bad.gguf", **changes)) as model, Engine(model):
        pass
