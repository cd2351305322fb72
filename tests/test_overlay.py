"""Expert overlays and converted experts: the bits of the checkpoint where nothing differs, masked experts, types by expert, manifests that lie."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import st_files
from bw24 import st_tensor, tier_bank
from bw24.engine import Engine
from bw24.errors import Bw24Error
from bw24.gguf_types import TYPE_IDS
from bw24.overlay import is_overlay
from bw24.source import open_model
from bw24.st_tensor import quantize
from bw24.tiers import Tiers

EXPERTS, LAYER = 4, 1
PROJECTIONS = ("gate", "up", "down")
IDS = [(i * 37 + 5) % 90 for i in range(40)]
FORMATS = [f"{product}-expert-overlay-v{n}" for product in ("bw24", "memra") for n in (1, 2)]


def run(path: Path, tiers: Tiers | None = None, weights: str = "keep", **settings: Any) -> bytes:
    with open_model(path, weights) as model, Engine(model, device="cpu", threads=2, max_rows=16, tiers=tiers, **settings) as engine, \
            engine.sequence() as seq:
        return seq.prefill(IDS[:30], "all").tobytes() + b"".join(seq.decode(t).tobytes() for t in IDS[30:])


def expert_values(tensors: dict[str, st_files.Tensor], expert: int, kind: str) -> np.ndarray:
    """f32 values of an expert's matrix, from names of either form."""
    one = f"model.layers.{LAYER}.mlp.experts.{expert}.{kind}_proj.weight"
    if one in tensors:
        dtype, shape, raw = tensors[one]
    else:
        fused = "gate_up_proj" if kind != "down" else "down_proj"
        dtype, shape, raw = tensors[f"model.layers.{LAYER}.mlp.experts.{fused}"]
    assert dtype in ("BF16", "F32")
    values = np.frombuffer(raw, "<u2" if dtype == "BF16" else "<f4")
    values = (values.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else values
    values = values.reshape(shape)
    if one in tensors:
        return values
    rows = values.shape[1] // 2
    return values[expert] if kind == "down" else values[expert, :rows] if kind == "gate" else values[expert, rows:]


class Built:
    """A copy of the tiny hy_v3 checkpoint, and an overlay over its layer 1."""

    def __init__(self, folder: Path, kinds: list[str], pruned: tuple[int, ...] = (), form: str = FORMATS[-1]):
        self.base, self.overlay = folder / "base", folder / "overlay"
        self.tensors = st_files.copy_checkpoint("hy_v3", self.base)
        self.overlay.mkdir()
        self.manifest: dict[str, Any] = {"format": form, "source_dir": "../base", "tensors": {}}
        if pruned:
            self.manifest["pruned_experts"] = {str(LAYER): list(pruned)}
        for kind in PROJECTIONS:
            data = b"\x99" * 7  # offsets that are no multiple of anything
            for expert in (e for e in range(EXPERTS) if e not in pruned):
                values = np.ascontiguousarray(expert_values(self.tensors, expert, kind))
                name = kinds[expert]
                raw = values.tobytes() if name == "F32" else quantize(values, TYPE_IDS[name], "x").tobytes()
                self.manifest["tensors"][f"blk.{LAYER}.ffn_{kind}_exps.{expert}.weight"] = {
                    "file": f"blk{LAYER}-{kind}-mixed.bin", "qtype": name, "ne": [values.shape[1], values.shape[0]], "bytes": len(raw),
                    "offset": len(data), "source": f"model.layers.{LAYER}.mlp.experts.{expert}.{kind}_proj.weight"}
                data += raw
            (self.overlay / f"blk{LAYER}-{kind}-mixed.bin").write_bytes(data)
        self.save()

    def save(self) -> None:
        (self.overlay / "manifest.json").write_text(json.dumps(self.manifest))

    def entry(self, expert: int = 0, kind: str = "gate") -> dict[str, Any]:
        return self.manifest["tensors"][f"blk.{LAYER}.ffn_{kind}_exps.{expert}.weight"]


@pytest.mark.parametrize("form", FORMATS)
def test_experts_of_their_own_values_give_the_checkpoint_s_bits(tmp_path, form):
    built = Built(tmp_path, ["F32"] * EXPERTS, form=form)
    assert is_overlay(built.overlay) and not is_overlay(built.base)
    want = run(built.base)
    for ram in (None, 0, 1 << 20):
        assert run(built.overlay, Tiers(ram=ram) if ram is not None else None) == want


def test_left_out_experts_keep_their_ids_and_are_never_chosen(tmp_path):
    built = Built(tmp_path, ["F32"] * EXPERTS, pruned=(0, 2))
    bias = next(n for n in built.tensors if n.endswith(("expert_bias", "e_score_correction_bias")))
    dtype, shape, raw = built.tensors[bias]
    assert dtype == "BF16"
    values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    values[[0, 2]] = -1e30
    masked = tmp_path / "masked"
    shutil.copytree(built.base, masked)
    st_files.write_checkpoint(masked, {**built.tensors, bias: ("F32", shape, values.tobytes())})
    assert run(built.overlay, Tiers(ram=0)) == run(masked) != run(built.base)


def test_types_may_differ_from_expert_to_expert(tmp_path):
    built = Built(tmp_path, ["Q8_0", "F16", "Q4_0", "F32"])
    want = run(built.overlay, Tiers(ram=1 << 20))
    assert want != run(built.base)
    for settings in ({"tiers": Tiers(ram=0)}, {}, {"threads_": 1}):
        assert run(built.overlay, settings.get("tiers")) == want
    with pytest.raises(Bw24Error, match="read one by one|holds every expert"):
        run(built.overlay, backend="ref")


def test_a_stacked_entry_with_a_stride(tmp_path):
    built = Built(tmp_path, ["F32"] * EXPERTS)
    want = run(built.base)
    for kind in PROJECTIONS:
        entries = [built.manifest["tensors"].pop(f"blk.{LAYER}.ffn_{kind}_exps.{e}.weight") for e in range(EXPERTS)]
        size = entries[0]["bytes"]
        raw = (built.overlay / entries[0]["file"]).read_bytes()
        data = b"".join(raw[e["offset"] : e["offset"] + size] + b"\x55" * 32 for e in entries)
        (built.overlay / entries[0]["file"]).write_bytes(data)
        built.manifest["tensors"][f"blk.{LAYER}.ffn_{kind}_exps.weight"] = {
            "file": entries[0]["file"], "qtype": "F32", "ne": [*entries[0]["ne"], EXPERTS], "bytes": size * EXPERTS, "offset": 0,
            "expert_stride": size + 32}
    built.save()
    assert run(built.overlay, Tiers(ram=0)) == want


def test_other_tensors_replace_the_checkpoint_s(tmp_path):
    built = Built(tmp_path, ["F32"] * EXPERTS)
    (built.overlay / "norm.bin").write_bytes(np.full(32, 0.5, np.float32).tobytes())
    built.manifest["tensors"]["output_norm.weight"] = {"file": "norm.bin", "qtype": "F32", "ne": [32], "bytes": 128}
    built.save()
    assert run(built.overlay) != run(built.base)


def test_a_sparse_copy_of_the_checkpoint_is_enough(tmp_path):
    built = Built(tmp_path, ["F32"] * EXPERTS)
    want = run(built.base)
    experts = {n: t for n, t in built.tensors.items() if f"layers.{LAYER}." in n and ".experts." in n}
    rest = {n: t for n, t in built.tensors.items() if n not in experts}
    (built.base / "model.safetensors").unlink()
    (built.base / "model-00001-of-00002.safetensors").write_bytes(st_files.file_bytes(rest))
    (built.base / "model-00002-of-00002.safetensors").write_bytes(st_files.file_bytes({}))
    weight_map = {n: "model-00001-of-00002.safetensors" for n in rest} | {n: "model-00002-of-00002.safetensors" for n in experts}
    (built.base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert run(built.overlay, Tiers(ram=0)) == want
    with pytest.raises(Bw24Error, match="lacks .* of the index"):
        run(built.base)


BAD = {
    "another format": (lambda m: m.update(format="other-overlay-v9"), "no .*safetensors file"),
    "no source": (lambda m: m.pop("source_dir"), "source_dir: expected"),
    "a source that is not there": (lambda m: m.update(source_dir="../nowhere"), "does not exist"),
    "itself": (lambda m: m.update(source_dir="."), "the overlay itself"),
    "no tensors": (lambda m: m.update(tensors=[]), "tensors: expected an object"),
    "a path out": (lambda m: m["tensors"]["blk.1.ffn_up_exps.0.weight"].update(file="../base/config.json"), "a path inside the directory"),
    "an absolute path": (lambda m: m["tensors"]["blk.1.ffn_up_exps.0.weight"].update(file="/etc/passwd"), "a path inside the directory"),
    "a missing file": (lambda m: m["tensors"]["blk.1.ffn_up_exps.0.weight"].update(file="none.bin"), "cannot open"),
    "an unknown type": (lambda m: m["tensors"]["blk.1.ffn_up_exps.0.weight"].update(qtype="Q9_X"), "not a storage type known"),
    "wrong bytes": (lambda m: m["tensors"]["blk.1.ffn_up_exps.0.weight"].update(bytes=5), "needs 4096, found"),
    "an offset beyond": (lambda m: m["tensors"]["blk.1.ffn_up_exps.0.weight"].update(offset=1 << 40), "which has"),
    "a negative offset": (lambda m: m["tensors"]["blk.1.ffn_up_exps.0.weight"].update(offset=-1), "expected whole numbers"),
    "a missing expert": (lambda m: m["tensors"].pop("blk.1.ffn_up_exps.2.weight"), "expert 2 is neither there nor left out"),
    "a missing projection": (lambda m: [m["tensors"].pop(f"blk.1.ffn_up_exps.{e}.weight") for e in range(4)], "without their up matrices"),
    "left out and there": (lambda m: m.update(pruned_experts={"1": [2]}), "expert 2 is there, but"),
    "an id too large": (lambda m: m.update(pruned_experts={"1": [4]}), "expected ids below 4"),
    "too few left": (lambda m: m.update(pruned_experts={"1": [0, 1, 2]}), "1 experts remain"),
    "an expert too large": (lambda m: m["tensors"].update({"blk.1.ffn_up_exps.7.weight": m["tensors"]["blk.1.ffn_up_exps.0.weight"]}), "below 4"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_manifest_that_lies_is_refused(tmp_path, case):
    built = Built(tmp_path, ["F32"] * EXPERTS)
    harm, message = BAD[case]
    harm(built.manifest)
    built.save()
    with pytest.raises(Bw24Error, match=message):
        run(built.overlay, Tiers(ram=0))


def test_a_manifest_that_is_no_json(tmp_path):
    built = Built(tmp_path, ["F32"] * EXPERTS)
    (built.overlay / "manifest.json").write_text("{")
    assert not is_overlay(built.overlay)


# ---- experts that must be converted


@pytest.fixture
def small_is_large(monkeypatch):
    """Matrices of more than 1500 values are read as Q8_0."""
    monkeypatch.setattr(st_tensor, "LARGE", 1500)


@pytest.mark.parametrize("family", ["hy_v3", "minimax_m2", "qwen3_moe"])
def test_converted_experts_are_written_once_and_read_back(tmp_path, family, small_is_large, monkeypatch):
    folder = st_files.FIXTURES / family
    want = run(folder, weights="auto")
    settings = Tiers(ram=0, nvme=(str(tmp_path),))
    assert run(folder, settings, weights="auto") == want
    (bank,) = tmp_path.glob(f"*{tier_bank.SUFFIX}")
    stamp = bank.stat().st_mtime_ns
    second = tmp_path / "second"
    second.mkdir()
    assert run(folder, Tiers(ram=0, nvme=(str(tmp_path), str(second))), weights="auto") == want
    assert bank.stat().st_mtime_ns == stamp and (second / bank.name).read_bytes() == bank.read_bytes()
    with pytest.raises(Bw24Error, match="must be converted once: --nvme DIR"):
        run(folder, Tiers(ram=0), weights="auto")
    monkeypatch.setattr(tier_bank.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    bank.unlink()
    with pytest.raises(Bw24Error, match="0.00 GB are free"):
        run(folder, settings, weights="auto")
    with pytest.raises(Bw24Error, match="No such file"):
        monkeypatch.undo()
        monkeypatch.setattr(st_tensor, "LARGE", 1500)
        run(folder, Tiers(ram=0, nvme=(str(tmp_path / "none"),)), weights="auto")


def test_a_full_disk_leaves_nothing(tmp_path, small_is_large, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bw24.gguf_writer.os.fsync", full)
    with pytest.raises(Bw24Error, match="No space left"):
        run(st_files.FIXTURES / "hy_v3", Tiers(ram=0, nvme=(str(tmp_path),)), weights="auto")
    assert list(tmp_path.iterdir()) == []


def quantised_mixture(folder: Path, scheme: str) -> Path:
    """A Qwen3 mixture of width 64 whose experts are stored as NVFP4 (modelopt) or FP8 in blocks."""
    st_files.copy_checkpoint("qwen3_moe", folder, hidden_size=64, moe_intermediate_size=64,
                             quantization_config={"quant_method": "modelopt" if scheme == "nvfp4" else "fp8"})
    rng, wide = np.random.default_rng(8), 64
    out = {"model.norm.weight": st_files.bf16(np.ones(wide))}
    out |= {name: st_files.bf16(rng.normal(0, 1, (96, wide))) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    for layer in ("model.layers.0.", "model.layers.1."):
        for name, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
            out[f"{layer}self_attn.{name}_proj.weight"] = st_files.bf16(rng.normal(0, 0.1, (rows, wide)))
        out |= {f"{layer}self_attn.{name}_norm.weight": st_files.bf16(np.ones(16)) for name in "qk"}
        out |= {f"{layer}{name}_layernorm.weight": st_files.bf16(np.ones(wide)) for name in ("input", "post_attention")}
        out[f"{layer}mlp.gate.weight"] = st_files.bf16(rng.normal(0, 1, (EXPERTS, wide)))
        for base in (f"{layer}mlp.experts.{e}.{kind}_proj.weight" for e in range(EXPERTS) for kind in PROJECTIONS):
            if scheme == "nvfp4":
                out[base] = st_files.u8(rng.integers(0, 256, (wide, wide // 2)))
                out[base + "_scale"] = st_files.u8(rng.integers(0x28, 0x40, (wide, wide // 16)), "F8_E4M3")
                out[base + "_scale_2"] = st_files.f32(np.array(rng.uniform(0.05, 0.1)))
            else:
                out[base] = st_files.u8(rng.integers(0, 0x50, (wide, wide)) | rng.integers(0, 2, (wide, wide)) << 7, "F8_E4M3")
                out[base + "_scale_inv"] = st_files.f32(rng.uniform(0.02, 0.04, (1, 1)))
    return st_files.write_checkpoint(folder, out)


@pytest.mark.parametrize("scheme, kept", [("nvfp4", "NVFP4"), ("fp8", "Q8_0")])
def test_stock_quantised_mixtures_spill_too(tmp_path, small_is_large, scheme, kept):
    folder, drive = quantised_mixture(tmp_path / "in", scheme), tmp_path / "drive"
    drive.mkdir()
    with open_model(folder, "auto") as model:
        assert {t.type_name for t in model.file.tensors.values() if t.name.endswith("_exps.weight")} == {kept}
    want = run(folder, weights="auto")
    for ram in (0, 20_000, 1 << 20):
        assert run(folder, Tiers(ram=ram, nvme=(str(drive),), force=True), weights="auto") == want
    assert len(list(drive.glob(f"*{tier_bank.SUFFIX}"))) == 1
