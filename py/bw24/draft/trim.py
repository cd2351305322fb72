"""Writing a draft file: an MTP block or an assistant taken out of its file, a head cut to the ranked rows. Owns the layout of published drafts and
which types the parts get; knows no replies.

Layout: the model's architecture and metadata; of the tensors `token_embd.weight`, `output_norm.weight`, the MTP block, `output.weight` with the
rows of the ranked tokens in rank order, and `d2t` (I32): row r proposes token d2t[r]. What keeps its type is copied byte for byte, and a
tensor that is stored in no more bits than asked for keeps its type: to encode it again would only lose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .. import abi
from ..arch import common
from ..convert import FALLBACK
from ..drafter import ASSISTANTS, PROVENANCE, fingerprint
from ..errors import Bw24Error
from ..gguf import GGUFFile, TensorInfo, get
from ..gguf_types import ARRAY, KIND_NAMES, TYPE_IDS, TYPES, quote
from ..gguf_writer import GGUFWriter
from ..source import Model
from ..st_tensor import quantize
from .ranks import ID_MAP, digest

KEEP, MIX = "keep", "Q4_K_M"
HEAD_TYPES = (KEEP, "NVFP4", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "F16")
BLOCK_TYPES = (KEEP, MIX, "Q8_0", "Q4_0", "F16")
EMBEDDING_TYPES = (KEEP, "Q5_K", "Q4_K", "Q6_K", "Q8_0")
HEAD, EMBEDDING, NORM = "output.weight", "token_embd.weight", "output_norm.weight"
MORE_BITS = ("attn_v", "ffn_down", "ffn_down_exps", "attn_qkv")  # of the mix: Q6_K
STEP = 1 << 22  # values encoded at a time
NVFP4_TOP = 6.0 * 448.0  # largest value of a block scaled by 1
SAMPLES, SAMPLE_BYTES = 16, 1 << 16

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Types:
    """Storage types asked for; see HEAD_TYPES, BLOCK_TYPES, EMBEDDING_TYPES."""

    head: str = "NVFP4"
    block: str = MIX
    embedding: str = "Q5_K"

    def __post_init__(self) -> None:
        for name, known in (("head", HEAD_TYPES), ("block", BLOCK_TYPES), ("embedding", EMBEDDING_TYPES)):
            value = getattr(self, name)
            if value not in known:
                raise Bw24Error(f"--{name} {quote(value)}: expected one of {', '.join(known)}")


@dataclass
class Written:
    """What a draft file holds: bytes and types of its parts."""

    path: Path
    rows: int
    head: str
    head_bytes: int
    full_head_bytes: int
    block: dict[str, int] = field(default_factory=dict)  # type -> tensors

    def as_dict(self) -> dict[str, Any]:
        return {"file": str(self.path), "bytes": self.path.stat().st_size, "rows": self.rows, "head": self.head, "head_bytes": self.head_bytes,
                "full_head_bytes": self.full_head_bytes, "block": self.block}


# ---- what a model is called


def content_hash(model: Model) -> str:
    """SHA-256 of a model's tensors: names, types, shapes, and their bytes, of large ones sixteen pieces of 64 KiB evenly over the whole."""
    out = hashlib.sha256()
    for name in sorted(model.file.tensors):
        info = model.file.tensors[name]
        out.update(f"{name} {info.type_name} {tuple(info.shape)}\n".encode())
        data = model.file.data(name)
        if len(data) <= SAMPLES * SAMPLE_BYTES:
            out.update(data)
            continue
        gap = (len(data) - SAMPLE_BYTES) // (SAMPLES - 1)
        for i in range(SAMPLES):
            out.update(data[i * gap : i * gap + SAMPLE_BYTES])
    return out.hexdigest()


# ---- where the parts are


def gguf_of(model: Model) -> GGUFFile:
    """The model's file, which must be GGUF: its metadata is copied."""
    if not isinstance(model.file, GGUFFile):
        raise Bw24Error(f"{model.path.name}: a directory; `bw24 convert` writes the GGUF file that a draft is cut from")
    return model.file


def mtp_block(model: Model) -> str:
    """Prefix of the model's MTP block, "blk.N."; Bw24Error where it has none."""
    index = common.mtp_block(model.builder, model.params)
    if index is None or model.mtp is None:
        raise Bw24Error(f"{model.path.name}: the file has no MTP block to take out")
    return f"blk.{index}."


def head_of(file: GGUFFile, block: str) -> TensorInfo:
    """The matrix whose rows give the block's logits: its own, the model's, or the embedding."""
    for name in (f"{block}nextn.shared_head_head.weight", HEAD, EMBEDDING):
        if name in file.tensors:
            return file.tensors[name]
    raise Bw24Error(f"{quote(str(file.path), 4096)}: no head: neither {HEAD} nor {EMBEDDING} is there")


def _bits(type_name: str) -> float:
    _, block, size = TYPES[TYPE_IDS[type_name]]
    return 8 * size / block


def _chosen(info: TensorInfo, wanted: str) -> str:
    """Type of a tensor in the draft: `wanted` where that takes fewer bits and its blocks divide the rows."""
    if wanted == KEEP or len(info.shape) < 2:
        return info.type_name
    while info.shape[0] % TYPES[TYPE_IDS[wanted]][1]:
        wanted = FALLBACK.get(wanted, "F16")
    return wanted if _bits(wanted) < _bits(info.type_name) else info.type_name


def block_type(info: TensorInfo, wanted: str) -> str:
    """Type of a block's tensor. The mix: Q4_K, Q6_K for what needs more bits; vectors, norms and routers stay."""
    kind = info.name.split(".")[-2]
    if kind.endswith("_norm") or kind.startswith("ffn_gate_inp") or info.name.endswith(".scale"):
        return info.type_name
    if wanted == MIX:
        wanted = "Q6_K" if kind in MORE_BITS else "Q4_K"
    return _chosen(info, wanted)


# ---- bytes


def rows_of(file: GGUFFile, info: TensorInfo) -> np.ndarray:
    """A matrix's bytes, u8 [rows, bytes of a row], over the mapping."""
    return file.array(info.name).reshape(int(np.prod(info.shape[1:])), -1)


def decode(raw: np.ndarray, info: TensorInfo) -> np.ndarray:
    """Rows of a matrix as f32 [rows, columns]."""
    raw = np.ascontiguousarray(raw)
    out = np.empty((len(raw), info.shape[0]), np.float32)
    ffi = abi.ffi
    source, target = ffi.cast("void *", ffi.from_buffer(raw)), ffi.cast("float *", ffi.from_buffer(out))
    abi.check(abi.lib().bw24_dequantize(info.type_id, source, target, out.size))
    return out


def _encoded(file: GGUFFile, info: TensorInfo, ids: np.ndarray | None, kind: str, scale: float) -> Iterator[np.ndarray]:
    """Bytes of the rows `ids` (None: all) of a matrix in type `kind`, values divided by `scale`."""
    raw = rows_of(file, info)
    count = len(raw) if ids is None else len(ids)
    step = max(1, STEP // info.shape[0])
    for at in range(0, count, step):
        part = raw[at : at + step] if ids is None else raw[ids[at : at + step]]
        if kind == info.type_name:
            yield np.ascontiguousarray(part)
            continue
        values = decode(part, info)
        yield quantize(values if scale == 1.0 else values / np.float32(scale), TYPE_IDS[kind], info.name)


def _own_scale(file: GGUFFile, info: TensorInfo) -> float:
    """The scale beside an NVFP4 matrix; 1 where there is none."""
    side = file.tensors.get(info.name.removesuffix(".weight") + ".scale")
    if info.type_name != "NVFP4" or side is None or side.type_name != "F32" or side.nbytes != 4:
        return 1.0
    return float(np.frombuffer(file.data(side.name), "<f4")[0])


def _head_scale(file: GGUFFile, info: TensorInfo, ids: np.ndarray, kind: str) -> float:
    """The scale that goes beside the cut head. NVFP4's own block scales are coarse below 2^-6, so its largest value is moved to the top of their
    range; other types need none."""
    if kind == info.type_name:
        return _own_scale(file, info)
    if kind != "NVFP4":
        return 1.0
    raw, step, top = rows_of(file, info), max(1, STEP // info.shape[0]), 0.0
    for at in range(0, len(ids), step):
        top = max(top, float(np.abs(decode(raw[ids[at : at + step]], info)).max()))
    return float(np.float32(top / NVFP4_TOP)) or 1.0


# ---- metadata


def _copy_metadata(w: GGUFWriter, file: GGUFFile, extra: dict[str, Any]) -> None:
    for key, value in file.metadata.items():
        if key.startswith("split.") or key == "general.alignment" or key in extra:
            continue
        kind, element = file.kinds[key]
        w.add(key, value, KIND_NAMES[element if kind == ARRAY else kind])
    for key, value in extra.items():
        w.add(key, value)


def provenance(model: Model, ids: np.ndarray, facts: dict[str, Any]) -> dict[str, Any]:
    """Metadata keys that say what a draft was made from: the model it belongs to (checked where it is attached), its content, the ranks, and `facts`
    (corpus, seed, counts)."""
    from .. import __version__

    return {PROVENANCE: fingerprint(model), "bw24.draft.model_content": content_hash(model), "bw24.draft.model_name": model.name,
            "bw24.draft.ranks": digest(ids), "bw24.draft.rows": len(ids), "bw24.draft.version": __version__,
            **{f"bw24.draft.{k}": v for k, v in facts.items()}}


# ---- the two kinds of draft


def write_mtp(model: Model, out: Path, ids: np.ndarray, types: Types, facts: dict[str, Any], progress: Progress | None = None) -> Written:
    """Write the draft of a model with an MTP block. ids: the ranks, checked. Nothing is left behind where it fails. Raises Bw24Error."""
    file, block = gguf_of(model), mtp_block(model)
    head = head_of(file, block)
    if len(head.shape) != 2 or len(ids) > head.shape[1]:
        raise Bw24Error(f"tensor {head.name}: {len(ids)} rows asked of a head of shape {list(head.shape)}")
    kind = _chosen(head, types.head)
    done = Written(out, len(ids), kind, 0, head.nbytes)
    with GGUFWriter(out) as w:
        _copy_metadata(w, file, provenance(model, ids, facts))
        count = _Counter(progress)
        _add(w, count, file, file.tensors[EMBEDDING], EMBEDDING, _chosen(file.tensors[EMBEDDING], types.embedding))
        if NORM in file.tensors:
            _add(w, count, file, file.tensors[NORM], NORM, file.tensors[NORM].type_name)
        done.head_bytes = _add_head(w, count, file, head, HEAD, ids, kind)
        for info in file.tensors.values():
            if info.name.startswith(block) and not info.name.startswith(f"{block}nextn.shared_head_head."):
                got = block_type(info, types.block)
                _add(w, count, file, info, info.name, got)
                done.block[got] = done.block.get(got, 0) + 1
    return done


def assistant_head(model: Model, assistant: GGUFFile) -> TensorInfo:
    """The head of an assistant for `model`, whole; Bw24Error for another model's, and for one that is cut already."""
    arch = get(assistant.metadata, "general.architecture", str)
    if ASSISTANTS.get(arch) != model.arch:
        raise Bw24Error(f"{quote(assistant.path.name)}: '{arch}' is no assistant for models of architecture '{model.arch}'")
    head = assistant.tensors.get(EMBEDDING)
    vocabulary = model.builder.rows(EMBEDDING)
    if head is None or len(head.shape) != 2 or head.shape[1] != vocabulary or ID_MAP in assistant.tensors:
        found = "it is cut already" if ID_MAP in assistant.tensors else f"its head has shape {list(head.shape) if head else None}"
        raise Bw24Error(f"{quote(assistant.path.name)}: expected a whole head of {vocabulary} rows, {found}")
    return head


def write_assistant(model: Model, assistant: GGUFFile, out: Path, ids: np.ndarray, types: Types, facts: dict[str, Any],
                    progress: Progress | None = None) -> Written:
    """Write a Gemma assistant with a head cut to the ranks: its own embedding is its head. A head ordered by centroids becomes a plain one, which
    the cut makes cheaper still. Raises Bw24Error."""
    head = assistant_head(model, assistant)
    kind = _chosen(head, types.head)
    done = Written(out, len(ids), kind, 0, head.nbytes)
    with GGUFWriter(out) as w:
        _copy_metadata(w, assistant, provenance(model, ids, facts))
        count = _Counter(progress)
        done.head_bytes = _add_head(w, count, assistant, head, EMBEDDING, ids, kind)
        for info in assistant.tensors.values():
            if info.name != EMBEDDING and not info.name.startswith("masked_embd"):
                got = block_type(info, types.block) if info.name.startswith("blk.") else info.type_name
                _add(w, count, assistant, info, info.name, got)
                done.block[got] = done.block.get(got, 0) + 1
    return done


class _Counter:
    """Bytes written of those announced, for a bar."""

    def __init__(self, progress: Progress | None):
        self.total = self.done = 0
        self.progress = progress

    def through(self, parts: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        for part in parts:
            yield part
            self.done += part.nbytes
            if self.progress:
                self.progress(min(self.done, self.total), self.total)


def _nbytes(columns: int, rows: int, kind: str) -> int:
    _, block, size = TYPES[TYPE_IDS[kind]]
    return columns // block * size * rows


def _add(w: GGUFWriter, count: _Counter, file: GGUFFile, info: TensorInfo, name: str, kind: str) -> None:
    """A whole tensor, copied or encoded."""
    if kind == info.type_name:
        count.total += info.nbytes
        w.add_tensor(name, kind, info.shape, lambda: count.through(iter([file.array(info.name)])))
        return
    if _own_scale(file, info) != 1.0:
        raise Bw24Error(f"tensor {info.name}: has a scale of its own and cannot be encoded again; ask for {KEEP}")
    count.total += _nbytes(info.shape[0], int(np.prod(info.shape[1:])), kind)
    w.add_tensor(name, kind, info.shape, lambda: count.through(_encoded(file, info, None, kind, 1.0)))


def _add_head(w: GGUFWriter, count: _Counter, file: GGUFFile, info: TensorInfo, name: str, ids: np.ndarray, kind: str) -> int:
    """The ranked rows of a matrix, with their scale and id map; returns their bytes."""
    scale = _head_scale(file, info, ids, kind)
    size = _nbytes(info.shape[0], len(ids), kind)
    count.total += size
    w.add_tensor(name, kind, (info.shape[0], len(ids)),
                 lambda: count.through(_encoded(file, info, ids, kind, 1.0 if kind == info.type_name else scale)))
    if kind == "NVFP4" and scale != 1.0:
        w.add_tensor(name.removesuffix(".weight") + ".scale", "F32", (1,), np.array([scale], "<f4").tobytes())
    w.add_tensor(ID_MAP, "I32", (len(ids),), ids.astype("<i4").tobytes())
    return size
