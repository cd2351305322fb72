"""What a model file is and what it needs, from its header alone: metadata, tensors by type, memory at several contexts.

Owns the arithmetic of "will it fit". Reads no weight; knows no command line and no hub.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from .build import ListBuilder, Params
from .engine import MAX_LOGIT_ROWS, available_memory, kv_bytes, parse_kv
from .errors import Bw24Error
from .gguf import Header, get
from .source import architectures

MAX_ROWS = 512  # rows of a step, as Engine's default
CONTEXTS = (2048, 8192, 32768, 131072)


@dataclass(frozen=True)
class Need:
    """Bytes at one context length: weights, activation buffers, KV cache of one sequence."""

    context: int
    weights: int
    work: int
    kv: int

    @property
    def total(self) -> int:
        return self.weights + self.work + self.kv


@dataclass(frozen=True)
class Described:
    """The parts of a model that sizes depend on; what Engine's sizing functions read."""

    builder: ListBuilder
    context_length: int


@dataclass(frozen=True)
class Facts:
    """All that `bw24 info` shows. `refusal` says why this version cannot run the model, None where it can; `needs` is empty then."""

    name: str
    arch: str
    size: int
    parameters: int
    types: list[tuple[str, int, int]]  # (type, tensors, bytes), most bytes first
    context_length: int | None
    tokenizer: str
    vocabulary: int | None
    chat_template: bool
    refusal: str | None
    needs: list[Need]
    free: int

    def as_dict(self) -> dict[str, Any]:
        """The JSON report."""
        return {
            "name": self.name, "architecture": self.arch, "file_bytes": self.size, "parameters": self.parameters,
            "tensor_types": {name: {"tensors": count, "bytes": size} for name, count, size in self.types},
            "context_length": self.context_length, "tokenizer": self.tokenizer, "vocabulary": self.vocabulary,
            "chat_template": self.chat_template, "refusal": self.refusal, "free_bytes": self.free,
            "memory": [{"context": n.context, "weights": n.weights, "work": n.work, "kv": n.kv, "total": n.total,
                        "fits": n.total <= self.free} for n in self.needs],
        }


def describe(header: Header) -> Described:
    """The model's list and context length from a header. Bw24Error says what this version cannot run."""
    arch = get(header.metadata, "general.architecture", str)
    if arch not in architectures():
        raise Bw24Error(f"architecture '{arch}' is not supported; supported are {', '.join(architectures())}")
    params = Params(arch, header.metadata)
    builder = ListBuilder({t.name: tuple(t.shape) for t in header.tensors.values()})
    importlib.import_module(f"bw24.arch.{arch}").build(builder, params)
    return Described(builder, params.int("context_length", high=1 << 28))


def needs(described: Described, weights: int, kv: str | None = None) -> list[Need]:
    """Memory at the usual contexts below the model's own, and at that one. Weights count as in the file.

    Buffers of rows whose logits are wanted count for as many rows as a loop asks for at once; memory that is not touched is not taken.
    """
    own = described.context_length
    wanted = sum(width for name, width in described.builder.bufs.items() if name.endswith("_want") or name == "logits")
    work = 4 * (MAX_ROWS * (sum(described.builder.bufs.values()) - wanted) + MAX_LOGIT_ROWS * wanted)
    formats = parse_kv(kv)
    contexts = [c for c in CONTEXTS if c < own] + [own]
    return [Need(c, weights, work, kv_bytes(described, formats, c, MAX_ROWS)) for c in contexts]  # type: ignore[arg-type]


def facts(header: Header, kv: str | None = None) -> Facts:
    """Everything about one model. Raises Bw24Error only for metadata of the wrong type."""
    meta = header.metadata
    by_type: dict[str, tuple[int, int]] = {}
    parameters = 0
    for tensor in header.tensors.values():
        count, size = by_type.get(tensor.type_name, (0, 0))
        by_type[tensor.type_name] = (count + 1, size + tensor.nbytes)
        values = 1
        for length in tensor.shape:
            values *= length
        parameters += values
    weights = sum(size for _, size in by_type.values())
    refusal, need = None, []
    try:
        need = needs(describe(header), weights, kv)
    except Bw24Error as error:
        refusal = str(error)
    arch = get(meta, "general.architecture", str, "unknown")
    tokens = meta.get("tokenizer.ggml.tokens")
    pre = get(meta, "tokenizer.ggml.pre", str, "")
    return Facts(
        name=get(meta, "general.name", str, header.name), arch=arch, size=header.size, parameters=parameters,
        types=sorted(((name, *sums) for name, sums in by_type.items()), key=lambda row: -row[2]),
        context_length=get(meta, f"{arch}.context_length", int, None),
        tokenizer=get(meta, "tokenizer.ggml.model", str, "none") + (f" ({pre})" if pre else ""),
        vocabulary=len(tokens) if isinstance(tokens, list) else None,
        chat_template=isinstance(meta.get("tokenizer.chat_template"), str), refusal=refusal, needs=need, free=available_memory(),
    )


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes (VmHWM); 0 where the system does not say."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            line = next(line for line in status if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return 0
