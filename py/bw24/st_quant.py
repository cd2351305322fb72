"""The weights of a checkpoint as rows of numbers, whatever scheme stores them: floats, FP8 with scales, NVFP4 and MXFP4.

Owns the schemes' tensor names, shapes and values, and the byte order of the GGUF blocks that 4-bit weights are moved into unchanged.
Refuses to know what a weight is for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .errors import Bw24Error
from .gguf_types import quote
from .safetensors import Entry, Shards

FLOATS = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
METHODS = ("modelopt", "compressed-tensors", "fp8")
FORMATS = ("nvfp4-pack-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized", "mixed-precision", "dense")
# Beside a weight W: names after W for FP8 and modelopt, names after W without ".weight" for the others.
_AFTER = ("_scale", "_scale_inv", "_scale_2")
_BESIDE = (".input_scale", ".weight_packed", ".weight_global_scale", ".input_global_scale")
# Smoothing factors change the activations before the product; zero points and packed integers belong to schemes that are not read.
_REFUSED = (".pre_quant_scale", ".weight_zero_point", ".weight_shape", ".qweight", ".qzeros", ".g_idx", ".weight_g_idx", "_scale_inv_2")
_CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".prob_output_scale")  # of another engine's FP8 KV cache: no weight depends on them


def _e4m3_table() -> np.ndarray:
    """f32 value of each E4M3 code; both NaN codes are NaN."""
    c = np.arange(256)
    exponent, mantissa = (c >> 3) & 15, c & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value[(c & 127) == 127] = np.nan
    return np.where(c < 128, value, -value).astype(np.float32)


E4M3 = _e4m3_table()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def widen(raw: np.ndarray, dtype: str) -> np.ndarray:
    """f32 values of stored floats; BF16 comes as its 16 bits."""
    if dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32)


class Source(ABC):
    """One weight. `shape` row-major; `rows` x `columns` is its matrix view, a vector is one row. `kind`: float, fp8, nvfp4 or mxfp4;
    `dtype`: the float type that holds its values."""

    kind = "float"
    dtype = "F32"

    def __init__(self, name: str, shape: tuple[int, ...]):
        if not shape or min(shape) < 1:
            shape = shape or (1,)
            if min(shape) < 1:
                raise Bw24Error(f"tensor {quote(name)}: shape {list(shape)} has an empty dimension")
        self.name, self.shape = name, shape
        self.columns = shape[-1]
        self.rows = int(np.prod(shape[:-1], dtype=np.int64))

    @abstractmethod
    def f32(self, rows: slice | np.ndarray) -> np.ndarray:
        """Values of some rows, f32 [len(rows), columns]."""

    def fail(self, text: str) -> Bw24Error:
        return Bw24Error(f"tensor {quote(self.name)}: {text}")


def _matrix(shards: Shards, entry: Entry, dtype: np.dtype, columns: int) -> np.ndarray:
    """A tensor over its mapping as [rows, columns]; copied only where the file does not align its values."""
    raw = shards.data(entry.name)
    array = np.frombuffer(raw, dtype)
    if not array.flags.aligned:
        array = np.frombuffer(bytes(raw), dtype)
    return array.reshape(-1, columns)


class Float(Source):
    """F32, F16 or BF16."""

    def __init__(self, shards: Shards, entry: Entry):
        super().__init__(entry.name, entry.shape)
        self.dtype, self.entry = entry.dtype, entry
        self._open = lambda: _matrix(shards, entry, FLOATS[entry.dtype], self.columns)
        aligned = entry.offset % FLOATS[entry.dtype].itemsize == 0
        self._raw = lambda: shards.data(entry.name) if aligned else None

    def raw(self) -> memoryview | None:
        """The stored bytes over the mapping; None where the file does not align them."""
        return self._raw()

    def stored(self) -> np.ndarray:
        """The stored values [rows, columns], BF16 as u16, over the mapping."""
        return self._open()

    def f32(self, rows: slice | np.ndarray) -> np.ndarray:
        return widen(self._open()[rows], self.dtype)


def _scales(shards: Shards, entry: Entry, name: str) -> np.ndarray:
    """A scale tensor in f32, finite and positive."""
    if entry.dtype not in FLOATS:
        raise Bw24Error(f"tensor {quote(entry.name)}: expected F32, BF16 or F16 scales, found {entry.dtype}")
    array = widen(_matrix(shards, entry, FLOATS[entry.dtype], 1).reshape(entry.shape), entry.dtype)
    if not (np.isfinite(array) & (array > 0)).all():
        raise Bw24Error(f"tensor {quote(entry.name)}: scales must be finite and above 0 (of {quote(name)})")
    return array


def _scalar(shards: Shards, entry: Entry, name: str) -> float:
    array = _scales(shards, entry, name)
    if array.size != 1:
        raise Bw24Error(f"tensor {quote(entry.name)}: expected one scale, found shape {list(entry.shape)}")
    return float(array.reshape(-1)[0])


class Fp8(Source):
    """E4M3 codes with one scale a tensor, a row or a block; value = code * scale."""

    kind = "fp8"

    def __init__(self, shards: Shards, entry: Entry, scale: Entry, block: tuple[int, int]):
        super().__init__(entry.name, entry.shape)
        self._open = lambda: _matrix(shards, entry, np.dtype(np.uint8), self.columns)
        out, columns = entry.shape[-2] if len(entry.shape) > 1 else 1, self.columns
        self._out = out
        stack = self.rows // out
        found = _scales(shards, scale, entry.name)
        grid = (-(-out // block[0]), -(-columns // block[1]))
        self._block = None
        if found.size in (1, stack):
            self._scale = np.repeat(found.reshape(-1), self.rows // found.size)[:, None]
        elif found.size == self.rows and scale.shape[-1] in (1, out):
            self._scale = found.reshape(-1, 1)
        elif scale.shape[-2:] == grid and found.size == stack * grid[0] * grid[1]:
            self._scale, self._block = found.reshape(stack, *grid), block
        else:
            what = f"one, one a row, or a grid of {list(grid)} for blocks of {list(block)}"
            raise self.fail(f"shape {list(entry.shape)} needs scales of {what}, found {list(scale.shape)}")

    def f32(self, rows: slice | np.ndarray) -> np.ndarray:
        values = E4M3[self._open()[rows]]
        if np.isnan(values).any():
            raise self.fail("has a NaN code")
        at = np.arange(self.rows)[rows]
        if self._block is None:
            return values * self._scale[at]
        grid = self._scale[at // self._out, (at % self._out) // self._block[0]]
        return values * np.repeat(grid, self._block[1], axis=1)[:, : self.columns]


class Fp4(Source):
    """E2M1 codes, two a byte (the even column in the low nibble), with a scale for each group of columns.

    NVFP4: E4M3 scales of 16 columns times `scale`. MXFP4: powers of two for 32 columns, `scale` 1. `input_scale`: the checkpoint's static
    activation scale or None; kept only as a GGUF sidecar.
    """

    def __init__(self, shards: Shards, codes: Entry, scales: Entry, scale: float, input_scale: float | None, name: str):
        if codes.dtype != "U8" or not codes.shape:
            raise Bw24Error(f"tensor {quote(codes.name)}: expected packed 4-bit codes of dtype U8, found {codes.dtype}")
        super().__init__(name, codes.shape[:-1] + (codes.shape[-1] * 2,))
        self.kind, self.group = ("nvfp4", 16) if scales.dtype == "F8_E4M3" else ("mxfp4", 32)
        expects = self.shape[:-1] + (self.columns // self.group,)
        if scales.dtype not in ("F8_E4M3", "U8", "F8_E8M0") or scales.shape != expects or self.columns % self.group:
            raise Bw24Error(f"tensor {quote(scales.name)}: expected E4M3 or E8M0 scales of shape {list(expects)}, found {scales.dtype} "
                            f"{list(scales.shape)}")
        self.scale, self.input_scale = scale, input_scale
        self._codes = lambda: _matrix(shards, codes, np.dtype(np.uint8), self.columns // 2)
        self._scales = lambda: _matrix(shards, scales, np.dtype(np.uint8), self.columns // self.group)

    def _checked(self, rows: slice | np.ndarray) -> np.ndarray:
        scales = self._scales()[rows]
        bad = (scales & 0x7F) == 0x7F if self.kind == "nvfp4" else scales == 0xFF
        if self.kind == "nvfp4":
            bad |= scales > 0x80
        if bad.any():
            raise self.fail("has a block scale that is negative or NaN")
        return scales

    def f32(self, rows: slice | np.ndarray) -> np.ndarray:
        codes, scales = self._codes()[rows], self._checked(rows)
        values = np.empty((len(codes), self.columns), np.float32)
        values[:, 0::2], values[:, 1::2] = E2M1[codes & 15], E2M1[codes >> 4]
        if self.kind == "nvfp4":
            factor = E4M3[scales] * np.float32(self.scale)
        else:
            factor = np.where(scales == 0, 0x00400000, scales.astype(np.uint32) << 23).astype(np.uint32).view(np.float32)
        return values * np.repeat(factor, self.group, axis=1)

    def blocks(self, rows: slice | np.ndarray, columns: np.ndarray | None) -> np.ndarray:
        """GGUF blocks of some rows, u8 [len(rows), row bytes]; `columns`: a column order that moves whole groups (see groups_of)."""
        codes, scales = self._codes()[rows], self._checked(rows)
        n = len(codes)
        codes = codes.reshape(n, -1, self.group // 2)
        if columns is not None:
            order = groups_of(columns, self.group)
            codes, scales = codes[:, order], scales[:, order]
        return _nvfp4_blocks(codes, scales) if self.kind == "nvfp4" else _mxfp4_blocks(codes, scales)


def groups_of(columns: np.ndarray, group: int) -> np.ndarray | None:
    """The order of groups that a column order amounts to, None where it breaks a group apart."""
    if len(columns) % group:
        return None
    runs = columns.reshape(-1, group)
    whole = (runs[:, :1] % group == 0).all() and (runs == runs[:, :1] + np.arange(group)).all()
    return runs[:, 0] // group if whole else None


def _interleave(lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """Pairs of neighbours (2k, 2k+1) to the pairs (k, k + half) of GGUF blocks, along the last axis."""
    out = np.empty((*lo.shape[:-1], lo.shape[-1] * 2), np.uint8)
    out[..., 0::2] = (lo & 15) | ((hi & 15) << 4)
    out[..., 1::2] = (lo >> 4) | (hi & 0xF0)
    return out


def _nvfp4_blocks(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """codes [n, groups of 16, 8], scales [n, groups] -> blocks of 64 values: 4 scales, 32 bytes of codes."""
    n = len(codes)
    out = np.empty((n, codes.shape[1] // 4, 36), np.uint8)
    out[..., :4] = (scales & 0x7F).reshape(n, -1, 4)
    out[..., 4:] = _interleave(codes[..., :4], codes[..., 4:]).reshape(n, -1, 32)
    return out.reshape(n, -1)


def _mxfp4_blocks(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """codes [n, groups of 32, 16], scales [n, groups] -> blocks of 32 values: one scale, 16 bytes of codes."""
    out = np.empty((*scales.shape, 17), np.uint8)
    out[..., 0] = scales
    out[..., 1:] = _interleave(codes[..., :8], codes[..., 8:])
    return out.reshape(len(codes), -1)


# ---- recognising schemes


def block_shape(config: Mapping[str, Any]) -> tuple[int, int]:
    """Checks that the checkpoint's quantisation is one that is read here; the block of its FP8 scales (128 x 128 where it does not say)."""
    q = config.get("quantization_config") or {}
    if type(q) is not dict:
        raise Bw24Error("config.json: quantization_config: expected an object")
    method = q.get("quant_method")
    if method is not None and method not in METHODS:
        raise Bw24Error(f"config.json: quantization_config.quant_method: expected {', '.join(METHODS)}, found {quote(str(method))}")
    if method == "compressed-tensors":
        formats = {q.get("format")} | {g.get("format") for g in (q.get("config_groups") or {}).values() if type(g) is dict}
        if other := formats - {None, *FORMATS}:
            raise Bw24Error(f"config.json: quantization_config.format: expected {', '.join(FORMATS)}, found {quote(str(other.pop()))}")
        sparsity = q.get("sparsity_config") or {}
        if type(sparsity) is dict and sparsity.get("format", "dense") != "dense":
            raise Bw24Error(f"config.json: quantization_config.sparsity_config: {quote(str(sparsity.get('format')))} is not supported")
    block = q.get("weight_block_size") or (128, 128)
    if len(block) != 2 or not all(type(b) is int and 1 <= b <= 1 << 16 for b in block):
        raise Bw24Error(f"config.json: quantization_config.weight_block_size: expected two numbers, found {quote(str(block))}")
    return tuple(block)


def read_sources(shards: Shards, config: Mapping[str, Any], keep: Iterable[str] | None = None) -> dict[str, Source]:
    """Every weight of the checkpoint under its full name (`....weight`, or a bare name), sidecars folded in. `keep`: only these names."""
    block = block_shape(config)
    names = shards.tensors
    wanted = set(names if keep is None else keep)
    out: dict[str, Source] = {}
    for name, entry in names.items():
        if name not in wanted or name.endswith(_CACHE_SCALES) or _is_sidecar(name, names):
            continue
        if name.endswith(_REFUSED):
            raise Bw24Error(f"tensor {quote(name)}: belongs to a quantisation scheme that is not supported")
        packed = name.endswith(".weight_packed")
        weight = name.removesuffix("_packed") if packed else name
        out[weight] = _source(shards, entry, weight, names, block)
    return out


def _is_sidecar(name: str, names: Mapping[str, Entry]) -> bool:
    for end in _AFTER:
        weight = name.removesuffix(end)
        if weight != name and (weight in names or weight + "_packed" in names):
            return True
    for end in _BESIDE:
        module = name.removesuffix(end)
        if module != name and end != ".weight_packed" and (module + ".weight" in names or module + ".weight_packed" in names):
            return True
    return False


def _source(shards: Shards, entry: Entry, name: str, names: Mapping[str, Entry], block: tuple[int, int]) -> Source:
    module = name.removesuffix(".weight")

    def need(*candidates: str) -> Entry:
        found = next((names[c] for c in candidates if c in names), None)
        if found is None:
            raise Bw24Error(f"tensor {quote(name)}: {entry.dtype} weights need the tensor {quote(candidates[0])}, which is missing")
        return found

    def one(candidate: str) -> float | None:
        return _scalar(shards, names[candidate], name) if candidate in names else None

    if entry.dtype in FLOATS:
        return Float(shards, entry)
    if entry.dtype == "F8_E4M3":
        return Fp8(shards, entry, need(name + "_scale_inv", name + "_scale"), block)
    if entry.dtype == "U8" and (name + "_scale") in names:
        scales = names[name + "_scale"]
        if module + ".weight_global_scale" in names:  # compressed-tensors: both global scales are divisors
            activation = one(module + ".input_global_scale")
            return Fp4(shards, entry, scales, 1 / one(module + ".weight_global_scale"), activation and 1 / activation, name)
        scale = _scalar(shards, need(name + "_scale_2"), name) if scales.dtype == "F8_E4M3" else 1.0
        return Fp4(shards, entry, scales, scale, one(module + ".input_scale"), name)
    raise Bw24Error(f"tensor {quote(name)}: weights of dtype {entry.dtype} are not supported")
