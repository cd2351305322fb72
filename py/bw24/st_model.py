"""A checkpoint directory as a model's container: GGUF's metadata keys, tensor names and types over safetensors files.

Owns the choice of the family, the storage types of what is loaded, and the conversion on demand. Knows neither a family's names nor how
bytes are encoded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from . import st_tensor
from .errors import Bw24Error
from .gguf import TensorInfo
from .gguf_types import TYPE_IDS, quote
from .safetensors import Shards, open_shards, read_json
from .st_config import Config
from .st_deepseek import DeepseekV2, DeepseekV3
from .st_gemma4 import Gemma4
from .st_map import DROPPED, Family, Gemma3, Llama, Qwen2, Qwen3, build
from .st_moe import HyV3, MiniMaxM2, Qwen3Moe
from .st_quant import read_sources
from .st_qwen35 import Qwen35, Qwen35Moe
from .st_text import read_text

FAMILIES: dict[str, type[Family]] = {
    "llama": Llama, "mistral": Llama, "qwen2": Qwen2, "qwen3": Qwen3, "gemma3": Gemma3, "gemma3_text": Gemma3, "qwen3_5": Qwen35,
    "qwen3_5_text": Qwen35, "qwen3_5_moe": Qwen35Moe, "qwen3_5_moe_text": Qwen35Moe, "gemma4": Gemma4, "gemma4_text": Gemma4,
    "gemma4_unified": Gemma4, "gemma4_unified_text": Gemma4, "qwen3_moe": Qwen3Moe, "hy_v3": HyV3, "minimax_m2": MiniMaxM2,
    "deepseek_v2": DeepseekV2, "deepseek_v3": DeepseekV3,
}
WEIGHTS = ("auto", "keep")


class Checkpoint:
    """The container of a directory. `targets` and `generated` are its tensors, `note` a sentence on what is converted at load, or None.

    data() converts on each call and keeps nothing; views over the files keep their mapping alive after close().
    """

    def __init__(self, path: Path, shards: Shards, weights: str):
        if weights not in WEIGHTS:
            raise Bw24Error(f"weights: expected {' or '.join(WEIGHTS)}, found {quote(weights)}")
        self._shards = shards
        self.path, self.size, self.weights = path, shards.size, weights
        keys = _config(shards.folder)
        self.family = _family(keys)
        names = [n for n in shards.tensors if not DROPPED.search(n)]
        sources = read_sources(shards, keys, names)
        self.targets, self.generated = build(self.family, sources)
        if "token_embd.weight" not in self.targets:
            raise Bw24Error(f"{quote(str(path), 4096)}: the embedding is missing")
        self.scale_of: dict[str, str] = {}  # sidecar -> the 4-bit tensor that it belongs to
        for target in self.targets.values():
            for name, values in st_tensor.sidecars(target).items():
                self.generated[name], self.scale_of[name] = self._with_scale(name, values), target.name
        self.tensors = self._infos()
        self.metadata = self._metadata(shards.folder, keys)
        self.name = quote(str(path), 4096)
        self.note = self._say()

    def _with_scale(self, name: str, values: np.ndarray) -> np.ndarray:
        """A sidecar's scales; where the model has a scale of that name itself, the products, which take its place."""
        own = self.targets.get(name)
        if own is None:
            return values
        factors = own.f32(own.pieces[0], 0, 1).reshape(-1)
        if factors.size != values.size:
            raise Bw24Error(f"tensor {name}: expected {values.size} scales, found {factors.size}")
        return (factors * values).astype(np.float32)

    def _infos(self) -> dict[str, TensorInfo]:
        out = {}
        for t in self.targets.values():
            kind = st_tensor.loaded_type(t, self.weights)
            out[t.name] = TensorInfo(t.name, TYPE_IDS[kind], kind, t.ne, st_tensor.nbytes(t, kind), 0)
        for name, values in self.generated.items():
            out[name] = TensorInfo(name, TYPE_IDS["F32"], "F32", tuple(reversed(values.shape)), values.nbytes, 0)
        return out

    def _metadata(self, folder: Path, keys: dict[str, Any]) -> dict[str, Any]:
        arch, rows = self.family.arch, self.targets["token_embd.weight"].ne[1]
        name = folder.resolve().name or arch
        keys = {
            "general.architecture": arch, "general.name": name, **self.family.metadata(), f"{arch}.vocab_size": rows,
            **read_text(folder, keys, arch, rows),
        }
        # floats as GGUF stores them, so that the directory and a file converted from it give one list
        return {key: float(np.float32(value)) if type(value) is float else value for key, value in keys.items()}

    def _say(self) -> str | None:
        turned = [t for t in self.targets.values() if self.tensors[t.name].type_name == "Q8_0"]
        if not turned:
            return None
        return f"{len(turned)} float matrices of more than {st_tensor.LARGE // 1000000} million values are read as Q8_0 (--weights keep keeps them)"

    def data(self, name: str) -> memoryview:
        """A tensor's bytes in its type: over the mapping where the file has them so, else converted by this call."""
        if name in self.generated:
            return memoryview(self.generated[name].tobytes())
        target, kind = self.targets[name], self.tensors[name].type_name
        view = st_tensor.view(target, kind)
        return memoryview(st_tensor.array(target, kind)) if view is None else view

    def places(self, name: str) -> list[tuple[Path | None, int, int]] | None:
        """(file, type, offset) of each matrix where the files hold all of them in the type that is loaded; else None."""
        if name not in self.targets:
            return None
        target, info = self.targets[name], self.tensors[name]
        found = [st_tensor.place(p, target, info.type_name) for p in target.pieces]
        if None in found:
            return None
        return [(self._shards.path(entry.part), info.type_id, offset) for entry, offset in found]

    def close(self) -> None:
        self._shards.close()


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        raise Bw24Error(f"{quote(str(folder), 4096)}: config.json is missing: not a checkpoint directory")
    keys = read_json(path)
    if type(keys) is not dict:
        raise Bw24Error(f"{quote(str(path), 4096)}: expected a JSON object")
    return keys


def _family(keys: dict[str, Any]) -> Family:
    inner = keys.get("text_config")
    names = [keys.get("model_type"), inner.get("model_type") if type(inner) is dict else None]
    found = next((n for n in names if type(n) is str and n in FAMILIES), None)
    if found is None:
        said = next((n for n in names if type(n) is str), "nothing")
        raise Bw24Error(f"config.json: model_type: {quote(said)} is not supported; supported are {', '.join(sorted(FAMILIES))}")
    return FAMILIES[found](Config(keys))


def open_checkpoint(path: Path, weights: str = "auto", without: Callable[[str], bool] | None = None) -> Checkpoint:
    """Opens a directory of safetensors (or one such file beside its config.json). Raises Bw24Error naming what is at fault.

    weights: "auto" reads float and FP8 matrices of more than a million values as Q8_0, "keep" in a float type that holds their values.
    without: names of weights that another container gives.
    """
    shards = open_shards(path, without)
    try:
        return Checkpoint(path, shards, weights)
    except BaseException:
        shards.close()
        raise

