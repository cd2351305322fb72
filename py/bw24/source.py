"""One view of a model, whatever files it came from (GGUF, or a directory of safetensors): metadata, tensors, tokenizer, chat template, list. Owns
the checks that need to know what keys and tensors mean; knows neither the library's contexts nor how text is generated."""

from __future__ import annotations

import importlib
import math
import mmap
import pkgutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from . import arch as arch_package
from . import gguf
from .arch import common
from .build import ListBuilder, Params
from .chat import ChatTemplate
from .errors import Bw24Error
from .tokenizer import Tokenizer, from_metadata

NVFP4, I32, F32 = 40, 26, 0
SUPPRESSED = -1e30  # added to the logits of tokens that a file forbids; no sum with a logit is infinite


class Container(Protocol):
    """The files of a model. `metadata` has GGUF's keys and `tensors` GGUF's names and types, whatever the files are; `size` is in bytes."""

    metadata: dict[str, Any]
    tensors: Mapping[str, gguf.TensorInfo]
    size: int

    def data(self, name: str) -> memoryview:
        """A tensor's bytes: over a mapping of the file, or converted to `tensors[name].type_id` by this call."""
        ...

    def places(self, name: str) -> list[tuple[Path | None, int, int]] | None:
        """(file, type, offset) of each matrix of a stacked tensor, file None where it is left out; None: its bytes are not there as they are used."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class WeightView:
    """A tensor as the library takes it: `data` read-only, `mapped` whether it lies over a file mapping, `scale` its sidecar (1 if none).
    data None: it stays in its file."""

    name: str
    type_id: int
    ne: tuple[int, ...]
    data: memoryview | None
    scale: float

    @property
    def mapped(self) -> bool:
        return self.data is not None and isinstance(self.data.obj, mmap.mmap)


def architectures() -> list[str]:
    """Names of the architectures this package runs, as GGUF spells them."""
    return sorted(m.name for m in pkgutil.iter_modules(arch_package.__path__) if m.name != "common")


class Model:
    """An opened model. Close it when no engine uses it any more. `weights`: see open_model."""

    def __init__(self, path: Path, weights: str = "auto"):
        self.path = path
        self.file: Container = _open(path, weights)
        try:
            self.metadata: dict[str, Any] = self.file.metadata
            self.arch = gguf.get(self.metadata, "general.architecture", str)
            if self.arch not in architectures():
                hint = "it drafts for another model, --draft names it" if self.arch.endswith(("-assistant", "_assistant")) else ""
                raise Bw24Error(f"{path.name}: architecture '{self.arch}' is not supported; {hint or 'supported are ' + ', '.join(architectures())}")
            self.name = gguf.get(self.metadata, "general.name", str, path.stem)
            self.params = Params(self.arch, self.metadata)
            self.context_length = self.params.int("context_length", high=1 << 28)
            self.made = self._made()
            self.builder = self._build()
            self._check_vocabulary()
        except BaseException:
            self.close()
            raise

    def _made(self) -> dict[str, np.ndarray]:
        """Tensors that follow from the metadata."""
        return {**made_by(self.arch, self.params), **self._suppressed()}

    def _suppressed(self) -> dict[str, np.ndarray]:
        """The head's bias that keeps suppressed tokens from being chosen."""
        ids = gguf.get(self.metadata, "tokenizer.ggml.suppress_tokens", list, None)
        embedding = self.file.tensors.get("token_embd.weight")
        if not ids or embedding is None or common.SUPPRESS in self.file.tensors:
            return {}
        rows = embedding.shape[-1]
        if not all(type(i) is int and 0 <= i < rows for i in ids) or len(set(ids)) >= rows:
            raise Bw24Error(f"tokenizer.ggml.suppress_tokens: expected some ids 0..{rows - 1}")
        bias = np.zeros(rows, np.float32)
        bias[ids] = SUPPRESSED
        return {common.SUPPRESS: bias}

    def _build(self, pre_norm: bool = False) -> ListBuilder:
        b = ListBuilder({t.name: tuple(t.shape) for t in self.file.tensors.values()} | {name: a.shape for name, a in self.made.items()})
        b.pre_norm = pre_norm
        importlib.import_module(f"bw24.arch.{self.arch}").build(b, self.params)
        return b

    @cached_property
    def mtp(self) -> ListBuilder | None:
        """The list of the file's MTP block, which drafts for speculative decoding; None where there is none."""
        return self.mtp_list()

    def mtp_list(self, pre_norm: bool = False) -> ListBuilder | None:
        """As `mtp`; `pre_norm`: over hidden rows from before their norm, as list_text(True) hands them on."""
        module = importlib.import_module(f"bw24.arch.{self.arch}")
        if not hasattr(module, "mtp") or common.mtp_block(self.builder, self.params) is None:
            return None
        b = ListBuilder(self.builder.shapes)
        b.pre_norm = pre_norm
        module.mtp(b, self.params)
        return b

    def _check_vocabulary(self) -> None:
        rows = self.builder.rows("token_embd.weight")
        if (said := self.params.int("vocab_size", rows)) != rows:
            raise Bw24Error(f"{self.arch}.vocab_size: {said}, but token_embd.weight has {rows} rows")
        tokens = gguf.get(self.metadata, "tokenizer.ggml.tokens", list, None)
        if tokens is not None and len(tokens) > rows:
            raise Bw24Error(f"tokenizer.ggml.tokens: {len(tokens)} tokens, but token_embd.weight has {rows} rows")

    def list_text(self, pre_norm: bool = False) -> str:
        """The trunk's list. `pre_norm`: the hidden rows it hands on are those before the last norm (its logits are the same)."""
        return (self._build(True) if pre_norm else self.builder).text()

    def weights(self, spilled: Collection[str] = ()) -> Iterator[WeightView]:
        """The file's tensors as the library takes them, those in `spilled` without their bytes, and those made from the metadata."""
        yield from weights(self.file, spilled=spilled)
        for name, array in self.made.items():
            yield WeightView(name, F32, array.shape, memoryview(array.tobytes()), 1.0)

    def head(self) -> WeightView:
        """The output matrix, the embedding where it serves as one."""
        name = "output.weight" if "output.weight" in self.file.tensors else "token_embd.weight"
        return next(weights(self.file, {name}))

    def head_bytes(self) -> int:
        """Bytes of the output matrix in the file, the embedding where it serves as one."""
        tensors = self.file.tensors
        return tensors["output.weight" if "output.weight" in tensors else "token_embd.weight"].nbytes

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return from_metadata(self.metadata)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        source = gguf.get(self.metadata, "tokenizer.chat_template", str, None)
        if source is None:
            return None
        tok = self.tokenizer
        text = lambda i: "" if i is None else tok.token_text(i)  # noqa: E731
        return ChatTemplate(source, bos_token=text(tok.bos_id), eos_token=text(tok.eos_id))

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def made_by(arch: str, params: Params) -> dict[str, np.ndarray]:
    """Tensors that an architecture computes from the metadata, f32."""
    module = importlib.import_module(f"bw24.arch.{arch}")
    return module.made(params) if hasattr(module, "made") else {}


def weights(file: Container, names: Collection[str] | None = None, prefix: str = "", spilled: Collection[str] = ()) -> Iterator[WeightView]:
    """A container's tensors (those of `names`), each name with `prefix` before it, but for I32 tables and the sidecars of NVFP4 weights: a scale
    goes with its weight, those of experts stay tensors, input scales are left out."""
    for t in file.tensors.values():
        if (names is not None and t.name not in names) or t.type_id == I32 or _sidecar(file, t.name):
            continue
        scale = 1.0
        side = file.tensors.get(t.name.removesuffix(".weight") + ".scale")
        if t.type_id == NVFP4 and side is not None and _sidecar(file, side.name):
            scale = _scalar(file, side.name)
        yield WeightView(prefix + t.name, t.type_id, tuple(t.shape), None if t.name in spilled else file.data(t.name), scale)


def _sidecar(file: Container, name: str) -> bool:
    base, _, kind = name.rpartition(".")
    weight = file.tensors.get(base + ".weight")
    if weight is None or weight.type_id != NVFP4:
        return False
    return kind == "input_scale" or (kind == "scale" and (len(weight.shape) < 3 or math.prod(file.tensors[name].shape) == 1))


def _scalar(file: Container, name: str) -> float:
    t = file.tensors[name]
    if t.type_name != "F32" or int(np.prod(t.shape)) != 1:
        raise Bw24Error(f"tensor {name}: expected one F32 value, found {t.type_name} of shape {list(t.shape)}")
    return float(np.frombuffer(file.data(name), np.float32)[0])


def _open(path: Path, weights: str) -> Container:
    if path.is_dir():
        from .overlay import is_overlay, open_overlay

        if is_overlay(path):
            return open_overlay(path, weights)
    if path.is_dir() or path.suffix == ".safetensors":
        from .st_model import open_checkpoint  # here: a GGUF file needs none of it

        return open_checkpoint(path, weights)
    file = gguf.open_gguf(path)
    if any(".attn_kv_b." in name for name in file.tensors):
        from .gguf_latent import open_latent

        return open_latent(file)
    return file


def open_model(path: str | Path, weights: str = "auto") -> Model:
    """Opens a GGUF file or a directory of safetensors and builds its list. Raises Bw24Error naming the key or tensor at fault.

    weights: for a directory, "auto" turns float and FP8 matrices of more than a million values into Q8_0, "keep" keeps their values.
    """
    return Model(Path(path), weights)
