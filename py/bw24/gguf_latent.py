"""GGUF files of latent attention as they were written before 2025: one matrix attn_kv_b makes the keys and the values of all heads from the latent.
Here it is taken apart into attn_k_b (the keys' rows, transposed) and attn_v_b (the values' rows as they are). Knows no architecture by name.

The transposed half is encoded anew where its blocks run the other way: Q8_0 for quantised types, float types keep their values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from . import abi
from .errors import Bw24Error
from .gguf import GGUFFile, TensorInfo, get
from .gguf_types import TYPE_IDS, TYPES
from .st_quant import FLOATS
from .st_tensor import quantize

JOINED = re.compile(r"^blk\.(\d{1,5})\.attn_kv_b\.weight$")
HALVES = ("attn_k_b", "attn_v_b")


def split_infos(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """The tensors with each joined matrix as its two halves. Raises Bw24Error where the metadata's heads do not divide it."""
    out: dict[str, TensorInfo] = {}
    for name, t in tensors.items():
        if not JOINED.match(name) or name.replace("kv_b", "k_b") in tensors:
            out[name] = t
            continue
        heads, nope, value = _sizes(metadata)
        if len(t.shape) != 2 or t.shape[1] != heads * (nope + value):
            raise Bw24Error(f"tensor {name}: expected {heads} heads of {nope} + {value} rows, found shape {list(t.shape)}")
        kind = _key_type(t, nope)
        for half, type_name, shape in ((HALVES[0], kind, (nope, t.shape[0], heads)), (HALVES[1], t.type_name, (t.shape[0], value, heads))):
            _, block, size = TYPES[TYPE_IDS[type_name]]
            full, count = name.replace("attn_kv_b", half), int(np.prod(shape)) // block
            out[full] = replace(t, name=full, type_id=TYPE_IDS[type_name], type_name=type_name, shape=shape, nbytes=count * size)
    return out


def _sizes(metadata: Mapping[str, Any]) -> tuple[int, int, int]:
    """(heads, values of a key that do not rotate, values of a value)."""
    arch = get(metadata, "general.architecture", str)
    heads, whole, rot, value = (get(metadata, f"{arch}.{k}", int) for k in
                                ("attention.head_count", "attention.key_length", "rope.dimension_count", "attention.value_length"))
    if not (0 < heads <= 1024 and 0 < rot < whole <= 1024 and 0 < value <= 1024):
        raise Bw24Error(f"{arch}.attention.key_length: {whole} with {rot} rotated values, {heads} heads and values of {value}")
    return heads, whole - rot, value


def _key_type(t: TensorInfo, nope: int) -> str:
    if t.type_name in FLOATS:
        return t.type_name
    if t.type_name == "NVFP4":
        raise Bw24Error(f"tensor {t.name}: NVFP4 cannot be taken apart")
    return "F16" if nope % TYPES[TYPE_IDS["Q8_0"]][1] else "Q8_0"


class LatentFile:
    """A GGUF file whose joined matrices are split; all else is the file's."""

    def __init__(self, file: GGUFFile):
        self._file = file
        self.metadata, self.size = file.metadata, file.size
        self.tensors = split_infos(file.tensors, file.metadata)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def data(self, name: str) -> memoryview:
        """A tensor's bytes; of a half by this call."""
        return self._file.data(name) if name in self._file.tensors else memoryview(self._half(self.tensors[name]))

    def places(self, name: str) -> list[tuple[Path | None, int, int]] | None:
        return self._file.places(name) if name in self._file.tensors else None

    def _half(self, t: TensorInfo) -> np.ndarray:
        keys = HALVES[0] in t.name
        joined = self._file.tensors[t.name.replace(HALVES[0] if keys else HALVES[1], "attn_kv_b")]
        heads, nope, value = _sizes(self.metadata)
        rows = np.frombuffer(self._file.data(joined.name), np.uint8).reshape(heads, nope + value, -1)
        if not keys:
            return np.ascontiguousarray(rows[:, nope:]).reshape(-1)
        out = [self._transposed(np.ascontiguousarray(rows[h, :nope]), joined, t) for h in range(heads)]
        return np.concatenate(out)

    def _transposed(self, rows: np.ndarray, joined: TensorInfo, t: TensorInfo) -> np.ndarray:
        """One head's rows [nope][row bytes] as [latent][nope] in the half's type."""
        if joined.type_name in FLOATS:
            values = rows.view(FLOATS[joined.type_name]).reshape(t.shape[0], t.shape[1])
            return np.ascontiguousarray(values.T).view(np.uint8).reshape(-1)
        values = np.empty((t.shape[0], t.shape[1]), np.float32)
        number = abi.type_id(joined.type_name)
        abi.check(abi.lib().bw24_dequantize(number, abi.ffi.from_buffer(rows), abi.ffi.cast("float *", abi.ffi.from_buffer(values)), values.size))
        return quantize(values.T, abi.type_id(t.type_name), t.name)


def open_latent(file: GGUFFile) -> GGUFFile | LatentFile:
    """The file as it is, or with its joined matrices split."""
    if not any(JOINED.match(n) and n.replace("kv_b", "k_b") not in file.tensors for n in file.tensors):
        return file
    try:
        return LatentFile(file)
    except BaseException:
        file.close()
        raise
