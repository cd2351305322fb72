"""Safetensors files and checkpoint directories made by hand, for tests: written straight from the format's definition."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from bw24 import source, st_model

FIXTURES = Path(__file__).parent / "fixtures" / "checkpoints"
FAMILIES = sorted(p.name for p in FIXTURES.iterdir())
Tensor = tuple[str, tuple[int, ...], bytes]  # dtype, row-major shape, data


def needs(family: str) -> Path:
    """The folder of a family's fixture; skips where the architecture is not in this version."""
    folder = FIXTURES / family
    arch = st_model.FAMILIES[json.loads((folder / "config.json").read_text())["model_type"]].arch
    if arch not in source.architectures():
        pytest.skip(f"architecture {arch} is not in this version")
    return folder


def header_bytes(header: object, pad: int = 8) -> bytes:
    """Length and JSON of a header, filled with blanks up to a multiple of `pad`."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw += b" " * (-(8 + len(raw)) % pad)
    return struct.pack("<Q", len(raw)) + raw


def file_bytes(tensors: dict[str, Tensor], pad: int = 8) -> bytes:
    """A whole file."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return header_bytes(header, pad) + data


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file."""
    raw = path.read_bytes()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    return {n: (t["dtype"], tuple(t["shape"]), raw[start + t["data_offsets"][0] : start + t["data_offsets"][1]]) for n, t in header.items()}


def bf16(values: np.ndarray) -> Tensor:
    """A BF16 tensor; values are cut, not rounded."""
    return "BF16", values.shape, (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()


def f32(values: np.ndarray) -> Tensor:
    return "F32", values.shape, np.ascontiguousarray(values, "<f4").tobytes()


def u8(values: np.ndarray, dtype: str = "U8") -> Tensor:
    return dtype, values.shape, np.ascontiguousarray(values, np.uint8).tobytes()


def copy_checkpoint(family: str, folder: Path, **config: object) -> dict[str, Tensor]:
    """Copies a tiny checkpoint to `folder`, with changed config keys; returns its tensors, to be changed and written back."""
    shutil.copytree(FIXTURES / family, folder, dirs_exist_ok=True)
    path = folder / "config.json"
    keys = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**keys, **config}.items() if v is not ...}))
    return read_tensors(folder / "model.safetensors")


def write_checkpoint(folder: Path, tensors: dict[str, Tensor]) -> Path:
    (folder / "model.safetensors").write_bytes(file_bytes(tensors))
    return folder
