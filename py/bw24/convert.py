"""Checkpoint directory to GGUF: which storage type each tensor gets, and the writing. Reads through st_model, so that the file holds what the
engine would have loaded; knows no family and no encoding."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import abi, st_tensor
from .errors import Bw24Error
from .gguf_types import TYPE_IDS, TYPES, quote
from .gguf_writer import GGUFWriter
from .st_model import Checkpoint, open_checkpoint
from .st_tensor import Target

MIX = "Q4_K_M"
# Where rows do not divide into a type's blocks: the nearest type of smaller blocks, in the end F16.
FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL", "NVFP4": "Q8_0"}
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, MIX: 15, "Q6_K": 18, "BF16": 32}
INT_ARRAYS = re.compile(r"\.(dimension_sections|head_count_kv|feed_forward_length)$")


@dataclass(frozen=True)
class Report:
    """What a conversion wrote: tensors and bytes by type, and the tensors that fell back to another type than asked for."""

    path: Path
    types: dict[str, tuple[int, int]]
    fallbacks: list[str]


def type_names() -> list[str]:
    """What `--type` takes."""
    encodable = [name for number, (name, _, _, can) in sorted(abi.types().items()) if can and number in TYPES]
    return ["auto", "keep", MIX, *encodable]


def _divides(t: Target, kind: str) -> bool:
    return t.ne[0] % TYPES[TYPE_IDS[kind]][1] == 0


def _wanted(t: Target, kind: str, more: set[str]) -> str:
    """Type of a tensor before its row length is looked at."""
    if kind in ("auto", "keep"):
        return st_tensor.loaded_type(t, kind)
    if t.dense:
        return "F32"
    if kind == MIX:
        return "Q6_K" if t.name in more else "Q4_K"
    return kind


def _more_bits(targets: dict[str, Target]) -> set[str]:
    """Tensors that the mix stores in Q6_K: the head, and of value and down projections those of the first and the last eighth and every third
    between them."""
    out = {"output.weight" if "output.weight" in targets else "token_embd.weight"}
    for kinds in (("attn_v", "attn_qkv"), ("ffn_down", "ffn_down_exps")):
        found = []
        for name in targets:
            parts = name.split(".")
            if parts[0] == "blk" and parts[-1] == "weight" and parts[2] in kinds:
                found.append((int(parts[1]), name))
        n = len(found)
        out |= {name for i, (_, name) in enumerate(sorted(found)) if i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2}
    return out


def choose_types(targets: dict[str, Target], kind: str) -> tuple[dict[str, str], list[str]]:
    """(storage type of every tensor, names of those that could not have the wanted one)."""
    if kind not in type_names():
        raise Bw24Error(f"--type {quote(kind)}: expected one of {', '.join(type_names())}")
    more, out, fell = _more_bits(targets), {}, []
    for name, t in targets.items():
        wanted = got = _wanted(t, kind, more)
        while not _divides(t, got):
            got = FALLBACK.get(got, "F16")
        out[name] = got
        if got != wanted:
            fell.append(name)
    return out, fell


def _kind(key: str, value: Any) -> str | None:
    """GGUF value type of a key where the Python value does not decide it."""
    if key.endswith(".token_type") or (isinstance(value, list) and INT_ARRAYS.search(key)) or key == "general.sampling.top_k":
        return "i32"
    if isinstance(value, list) and not value:
        return "string"
    return None


def convert(folder: Path, out: Path, kind: str = "auto", name: str | None = None, progress: Callable[[int, int], None] | None = None,
            given: Mapping[str, tuple[str, np.ndarray]] | None = None) -> Report:
    """Writes a checkpoint directory as one GGUF file, tokenizer and chat template included; nothing is left behind where it fails.

    kind: "auto" as the engine loads the directory (large float matrices Q8_0), "keep" in the stored types, "Q4_K_M" a mix of Q4_K and Q6_K, or
    one storage type for every matrix. progress(done, total) counts bytes written. given: tensors that the caller has encoded, name -> (type,
    bytes), instead of this function. Raises Bw24Error.
    """
    if out.resolve().is_dir():
        raise Bw24Error(f"{quote(str(out), 4096)}: is a directory, expected the name of a file")
    checkpoint = open_checkpoint(folder, "keep")
    try:
        return _write(checkpoint, out, kind, name, progress, given or {})
    finally:
        checkpoint.close()


def _write(checkpoint: Checkpoint, out: Path, kind: str, name: str | None, progress: Callable[[int, int], None] | None,
           given: Mapping[str, tuple[str, np.ndarray]]) -> Report:
    types, fell = choose_types(checkpoint.targets, kind)
    types |= {n: type_name for n, (type_name, _) in given.items()}
    sides = {n: v for n, v in checkpoint.generated.items() if n not in checkpoint.scale_of or types[checkpoint.scale_of[n]] == "NVFP4"}
    total = sum(st_tensor.nbytes(t, types[n]) for n, t in checkpoint.targets.items() if n not in sides)
    done = 0

    def bytes_of(t: Target, type_name: str) -> Iterator[np.ndarray]:
        nonlocal done
        for part in [given[t.name][1]] if t.name in given else st_tensor.chunks(t, type_name):
            yield part
            done += part.nbytes
            if progress:
                progress(done, total)

    counts: dict[str, tuple[int, int]] = {}
    with GGUFWriter(out) as w:
        metadata = {**checkpoint.metadata, "general.type": "model", **({"general.name": name} if name else {})}
        if any(TYPES[TYPE_IDS[t]][1] > 1 for t in types.values()):
            metadata["general.quantization_version"] = 2
        if kind in FILE_TYPES:
            metadata["general.file_type"] = FILE_TYPES[kind]
        for key, value in metadata.items():
            w.add(key, value, _kind(key, value))
        for target_name, t in checkpoint.targets.items():
            if target_name in sides:
                continue
            type_name = types[target_name]
            w.add_tensor(target_name, type_name, t.ne, lambda t=t, type_name=type_name: bytes_of(t, type_name))
            n, size = counts.get(type_name, (0, 0))
            counts[type_name] = (n + 1, size + st_tensor.nbytes(t, type_name))
        for side, values in sides.items():
            w.add_tensor(side, "F32", tuple(reversed(values.shape)), values.tobytes())
    return Report(out, counts, fell)
