"""What a model file is and what it needs, from its header alone: metadata, tensors by type, memory at several contexts, on the card and in the
host. The arithmetic of weights and buffers is the library's (sizes). Reads no weight; knows no command line and no hub."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import device as devices
from .arch.common import mtp_block
from .build import ListBuilder, Params
from .engine import available_memory, parse_kv, step_rows
from .errors import Bw24Error
from .gguf import Header, get
from .gguf_latent import split_infos
from .sizes import Sizes, predict
from .source import architectures
from .tokenizer import from_metadata

CONTEXTS = (2048, 8192, 32768, 131072)
PROGRAM = 6_000_000  # of `gen` beside what `info` itself has: modules, pieces of weights on their way


@dataclass(frozen=True)
class Place:
    """Where it would run: `backend`; bytes free there, and in the host's memory; the card's name, empty for the processor; why it is not used."""

    backend: str
    free: int
    host_free: int
    card: str = ""
    note: str = ""


@dataclass(frozen=True)
class Need(Sizes):
    """Sizes of one sequence and `program`, the bytes of the process itself, which are in `host` too."""

    program: int

    def fits(self, place: Place) -> bool:
        return self.host <= place.host_free and self.device <= (place.free if self.device else self.device)


@dataclass(frozen=True)
class Described:
    """The parts of a model that sizes depend on; what Engine's sizing functions read."""

    builder: ListBuilder
    context_length: int
    mtp: ListBuilder | None = None


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
    place: Place
    mtp: int  # bytes more at the model's own context with its MTP block; 0: it has none

    def as_dict(self) -> dict[str, Any]:
        """The JSON report."""
        return {
            "name": self.name, "architecture": self.arch, "file_bytes": self.size, "parameters": self.parameters,
            "tensor_types": {name: {"tensors": count, "bytes": size} for name, count, size in self.types},
            "context_length": self.context_length, "tokenizer": self.tokenizer, "vocabulary": self.vocabulary,
            "chat_template": self.chat_template, "refusal": self.refusal, "free_bytes": self.place.free,
            "place": vars(self.place), "mtp_bytes": self.mtp,
            "memory": [{**vars(n), "total": n.total, "fits": n.fits(self.place)} for n in self.needs],
        }


def describe(header: Header) -> Described:
    """The model's list and context length from a header. Bw24Error says what this version cannot run."""
    arch = get(header.metadata, "general.architecture", str)
    if arch not in architectures():
        raise Bw24Error(f"architecture '{arch}' is not supported; supported are {', '.join(architectures())}")
    params = Params(arch, header.metadata)
    builder = ListBuilder({t.name: tuple(t.shape) for t in header.tensors.values()})
    module = importlib.import_module(f"bw24.arch.{arch}")
    module.build(builder, params)
    mtp = None
    if hasattr(module, "mtp") and mtp_block(builder, params) is not None:
        mtp = ListBuilder(builder.shapes)
        module.mtp(mtp, params)
    return Described(builder, params.int("context_length", high=1 << 28), mtp)


def place_for(device: str = "auto", backend: str = "auto") -> Place:
    """Where a model would run. Where the card cannot be used it is the processor, with the reason as its note."""
    free = available_memory()
    try:
        choice = devices.choose(device, backend)
    except Bw24Error as error:
        name = device if backend == "auto" else backend
        return Place(name if name.startswith("cuda") else "cpu", 0 if name.startswith("cuda") else free, free, note=str(error))
    if choice.facts:
        return Place(choice.backend, choice.facts.free, free, choice.facts.name)
    return Place(choice.backend, free, free, note=choice.note)


def needs(header: Header, described: Described, place: Place, kv: str | None = None, contexts: Sequence[int] = (),
          draft: bool = False) -> list[Need]:
    """Memory at `contexts`, by default the usual ones below the model's own, and that one. Raises Bw24Error where the backend does not run it."""
    own, formats, out = described.context_length, parse_kv(kv), []
    lists = {"trunk": described.builder.text(), **({"mtp": described.mtp.text()} if draft and described.mtp else {})}
    program = resident() + PROGRAM
    for context in contexts or [*(c for c in CONTEXTS if c < own), own]:
        s = predict(header.tensors.values(), lists, place.backend, formats, context, step_rows(place.backend))
        out.append(Need(**{**vars(s), "host": s.host + program}, program=program))
    return out


def with_mtp(header: Header, described: Described, place: Place, kv: str | None, plain: Need) -> int:
    """Bytes more than `plain` with the MTP block."""
    return needs(header, described, place, kv, [plain.context], True)[0].total - plain.total if described.mtp else 0


def facts(header: Header, kv: str | None = None, device: str = "auto", backend: str = "auto", ctx: int | None = None) -> Facts:
    """Everything about one model; `ctx`: memory at this context length alone. Raises Bw24Error only for metadata of the wrong type."""
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
    refusal, need, mtp, place = None, [], 0, place_for(device, backend)
    try:
        header = replace(header, tensors=split_infos(header.tensors, meta)) if any(".attn_kv_b." in n for n in header.tensors) else header
        described = describe(header)
        if ctx is not None and not 1 <= ctx <= described.context_length:
            raise Bw24Error(f"--ctx {ctx}: the model's context is 1..{described.context_length}")
        vocabulary = from_metadata(header.metadata) if "tokenizer.ggml.model" in header.metadata else None  # it is part of what a run takes
        need = needs(header, described, place, kv, [ctx] if ctx else ())
        mtp = with_mtp(header, described, place, kv, need[-1])
        del vocabulary
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
        chat_template=isinstance(meta.get("tokenizer.chat_template"), str), refusal=refusal, needs=need, place=place, mtp=mtp,
    )


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes (VmHWM); 0 where the system does not say."""
    return _status("VmHWM:")


def resident() -> int:
    """Resident size of this process, in bytes; 0 where the system does not say."""
    return _status("VmRSS:")


def _status(key: str) -> int:
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            line = next(line for line in status if line.startswith(key))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return 0
