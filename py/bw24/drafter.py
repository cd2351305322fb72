"""Drafters: what drafts tokens for a model, whatever file it comes from. Owns the choice of list and tensors and the checks that a file belongs to
the model; knows no rounds and no sequences.

Sources: the model's own MTP block; an MTP block from another GGUF (a whole model of the same trunk, an MTP-only file, or a published draft whose
head is cut to the rows of frequent tokens, with `d2t` naming them); a Gemma 4 assistant. A draft file's tensors are loaded as "draft.<name>".
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import gguf
from .arch import common
from .build import ListBuilder, Params
from .errors import Bw24Error
from .gguf_types import TYPES
from .source import WeightView, weights

if TYPE_CHECKING:
    from .source import Model

PREFIX, SECOND, TRUNK = "draft.", "second.", "trunk."
SPARE = "draft.spare.weight"
ID_MAP = "d2t"  # I32 [rows of the cut head]: the token of each row
PROVENANCE = "bw24.draft.model"  # metadata: fingerprint of the model that a draft was made for
ASSISTANTS = {"gemma4-assistant": "gemma4", "gemma4_assistant": "gemma4"}  # architecture of a file without keys of its own -> of its models
SAME_KEYS = ("embedding_length", "attention.head_count", "attention.head_count_kv", "attention.key_length", "rope.freq_base")
PRE_NORM, POST_NORM = "pre", "post"


@dataclass
class Draft:
    """A drafter for one model. `role`: of its list in the library; `ids`: token of each column of its logits, int32 (None: column i is token i).

    file, names: the draft's container and its tensors in use; None where all tensors are the model's. Close it when no engine uses it any more.
    """

    role: str
    name: str
    builder: ListBuilder
    ids: np.ndarray | None = None
    file: Any = None
    names: frozenset[str] = frozenset()
    hidden: str = POST_NORM  # which rows of the trunk it takes
    path: Path | None = None
    spare: int = 0  # last columns of the logits whose rows can be given to other tokens (adapt.py)
    spare_rows: bytearray = field(default_factory=bytearray)
    head: WeightView | None = None  # the model's output matrix, where those rows come from
    prefix: str = PREFIX  # of its tensors in the library

    def weights(self) -> Iterator[WeightView]:
        """The draft file's own tensors, and the spare rows, as the library takes them."""
        if self.file:
            yield from weights(self.file, self.names, self.prefix)
        if self.spare:
            head = self.head
            yield WeightView(SPARE, head.type_id, (head.ne[0], self.spare), memoryview(self.spare_rows), head.scale)

    def put_row(self, slot: int, token: int) -> None:
        """Copies the model's row of a token into a spare row."""
        stride = len(self.spare_rows) // self.spare
        self.spare_rows[slot * stride : (slot + 1) * stride] = self.head.data[token * stride : (token + 1) * stride]

    @property
    def nbytes(self) -> int:
        """Bytes of those tensors in the file."""
        return sum(self.file.tensors[n].nbytes for n in self.names) if self.file else 0

    @property
    def trimmed(self) -> bool:
        """Whether some tokens of the vocabulary cannot be drafted."""
        return self.ids is not None

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


class _DraftBuilder(ListBuilder):
    """Appends ops over a model's tensors, those of a draft file in place of the model's of the same name; "trunk.<name>" is always the model's."""

    def __init__(self, model: Model, own: dict[str, tuple[int, ...]], without: frozenset[str] = frozenset(), prefix: str = PREFIX):
        trunk = {TRUNK + n: model.builder.shapes[n] for n in own if n in model.builder.shapes}
        super().__init__({n: s for n, s in {**model.builder.shapes, **own, **trunk}.items() if n not in without})
        self._own, self._prefix = own, prefix

    def tensor(self, name: str) -> str:
        return self._prefix + name if name in self._own else name.removeprefix(TRUNK)


def embedded(model: Model, hidden: str = POST_NORM) -> Draft:
    """The MTP block of the model's own file. Raises Bw24Error where it has none."""
    builder = model.mtp_list(hidden == PRE_NORM)
    if builder is None:
        raise Bw24Error(f"{model.path.name}: the file has no MTP block to draft with; --draft FILE names a drafter")
    return Draft("mtp", model.path.name, builder, hidden=hidden)


def open_draft(path: str | Path, model: Model, hidden: str = POST_NORM, spare: int = 0, second: bool = False) -> Draft:
    """A drafter from a GGUF file, checked against `model`. spare: rows of a cut head that can be learned (none for a whole head or an assistant);
    second: beside another one in the same engine.
    Raises Bw24Error that names the file, the key or tensor, and both values."""
    file, prefix = gguf.open_gguf(Path(path)), SECOND if second else PREFIX
    try:
        arch = gguf.get(file.metadata, "general.architecture", str)
        if ASSISTANTS.get(arch) == model.arch:
            draft = _assistant(file, arch, model, prefix)
        elif arch == model.arch:
            draft = _mtp(file, model, hidden, spare, prefix)
        else:
            wants = ASSISTANTS.get(arch, arch)
            raise Bw24Error(f"it drafts for models of architecture '{wants}', {model.path.name} is of '{model.arch}'")
        if name := draft.builder.missing():
            raise Bw24Error(f"tensor {name.removeprefix(prefix)} is missing")
    except Bw24Error as error:
        file.close()
        raise Bw24Error(f"draft {Path(path).name}: {error}", error.code) from None
    except BaseException:
        file.close()
        raise
    draft.name, draft.path, draft.file, draft.prefix = Path(path).name, Path(path), file, prefix
    return draft


def resolve_draft(name: str, **how: Any) -> Path:
    """The file of a drafter given by path or as hf:owner/repo:path.gguf (also hf:owner/repo/path.gguf), fetched where needed. Raises Bw24Error."""
    from . import models

    if name.startswith("hf:") and name.endswith(".gguf"):
        repo, colon, file = name.removeprefix("hf:").partition(":")
        name = f"hf:{repo}/{file}" if colon else name
    return models.resolve(name, **how).path


# ---- does it belong to the model?


def vocabulary_hash(metadata: dict[str, Any]) -> str | None:
    """SHA-256 of a file's token list; None where it has none."""
    tokens = gguf.get(metadata, "tokenizer.ggml.tokens", list, None)
    if tokens is None:
        return None
    digest = hashlib.sha256()
    for token in tokens:
        text = token if isinstance(token, bytes) else str(token).encode("utf-8", "surrogateescape")
        digest.update(len(text).to_bytes(4, "little") + text)
    return digest.hexdigest()


def _floats(file: Any, name: str) -> bytes | None:
    """A tensor's values as f32, where the file keeps them so (norm weights are f32 in every quantisation)."""
    info = file.tensors.get(name)
    return bytes(file.data(name)) if info is not None and TYPES[info.type_id][0] == "F32" else None


def fingerprint(model: Model) -> str:
    """What a draft's metadata names its model by: the same for every quantisation of one model, another for every other model.
    SHA-256 over the architecture, the width, the token list and the weights of the last norm."""
    parts = [model.arch, str(model.params.int("embedding_length")), vocabulary_hash(model.metadata) or ""]
    norm = _floats(model.file, "output_norm.weight") or b""
    return hashlib.sha256("\n".join(parts).encode() + b"\n" + norm).hexdigest()


def _check_model(file: Any, model: Model, hp: Params) -> None:
    said = gguf.get(file.metadata, PROVENANCE, str, None)
    if said is not None and said != (own := fingerprint(model)):
        raise Bw24Error(f"it was made for another model ({PROVENANCE} {said[:16]}, {model.path.name} has {own[:16]})")
    theirs, ours = vocabulary_hash(file.metadata), vocabulary_hash(model.metadata)
    if theirs and ours and theirs != ours:
        counts = [len(m["tokenizer.ggml.tokens"]) for m in (file.metadata, model.metadata)]
        raise Bw24Error(f"its vocabulary is not the model's ({counts[0]} and {counts[1]} tokens, lists differ)")


def _check_trunk(file: Any, model: Model, hp: Params) -> None:
    """Sizes that the block shares with its trunk, and the trunk's last norm, of which drafts carry a copy."""
    for key in SAME_KEYS:
        theirs, ours = hp.metadata.get(f"{hp.arch}.{key}"), model.metadata.get(f"{model.arch}.{key}")
        if theirs is not None and ours is not None and not np.array_equal(theirs, ours):
            raise Bw24Error(f"{hp.arch}.{key}: the model has {ours}, the draft {theirs}")
    theirs, ours = _floats(file, "output_norm.weight"), _floats(model.file, "output_norm.weight")
    if theirs is not None and ours is not None and theirs != ours:
        raise Bw24Error(f"it was made for another model: its output_norm.weight differs from that of {model.path.name}")


def id_map(file: Any, rows: int, vocabulary: int) -> np.ndarray | None:
    """The token of each row of a cut head, int32 [rows]; None where the file has no map. Raises Bw24Error."""
    info = file.tensors.get(ID_MAP)
    if info is None:
        return None
    if info.type_name != "I32" or len(info.shape) != 1:
        raise Bw24Error(f"tensor {ID_MAP}: expected one dimension of I32, found {info.type_name} of shape {list(info.shape)}")
    if info.shape[0] != rows:
        raise Bw24Error(f"tensor {ID_MAP}: {info.shape[0]} ids for a head of {rows} rows")
    ids = np.frombuffer(file.data(ID_MAP), "<i4").astype(np.int32)
    if (outside := ids[(ids < 0) | (ids >= vocabulary)]).size:
        raise Bw24Error(f"tensor {ID_MAP}: id {outside[0]} is outside the vocabulary 0..{vocabulary - 1}")
    if len(np.unique(ids)) != rows:
        raise Bw24Error(f"tensor {ID_MAP}: {rows - len(np.unique(ids))} ids stand for two rows")
    return ids


# ---- the two kinds


def _mtp(file: Any, model: Model, hidden: str, spare: int, prefix: str) -> Draft:
    """An MTP block of the model's own architecture. A cut head is used as it is; a whole one only where it takes fewer bytes than the model's."""
    hp = Params(model.arch, file.metadata)
    depth = common.trunk_layers(model.builder, model.params)
    block = f"blk.{depth}."
    if block + "nextn.eh_proj.weight" not in file.tensors:
        has = sorted(n for n in file.tensors if n.endswith(".nextn.eh_proj.weight"))
        raise Bw24Error(f"it has no MTP block {block.rstrip('.')} for the model's {depth} layers" + (f", only {has[0]}" if has else ""))
    _check_model(file, model, hp)
    _check_trunk(file, model, hp)
    names = {n for n in file.tensors if n.startswith(block)}
    vocabulary, without, ids = model.builder.rows("token_embd.weight"), set(), None
    head = file.tensors.get("output.weight")
    if ID_MAP in file.tensors:
        if head is None:
            raise Bw24Error(f"tensor {ID_MAP} names the rows of output.weight, which is missing")
        ids = id_map(file, head.shape[1] if len(head.shape) > 1 else 1, vocabulary)
        without = {block + "nextn.shared_head_head.weight"}  # the cut head stands for it
        names.add("output.weight")
    elif head is not None and len(head.shape) > 1 and head.shape[1] != vocabulary:
        raise Bw24Error(f"its head has {head.shape[1]} rows, the vocabulary {vocabulary} tokens, and there is no {ID_MAP} to name them")
    elif head is not None and head.nbytes < model.head_bytes():
        names.add("output.weight")
    names |= {n for n in (f"{x.removesuffix('.weight')}.scale" for x in names) if n in file.tensors}
    names -= without
    without |= {n for n in model.builder.shapes if n.startswith(block) and n not in names}  # the model's own block, where it has one
    builder = _DraftBuilder(model, {n: tuple(file.tensors[n].shape) for n in names}, frozenset(without), prefix)
    builder.pre_norm = hidden == PRE_NORM
    spare = min(spare, vocabulary - len(ids)) if ids is not None else 0
    if spare:
        builder.spare = (SPARE, spare)
        ids = np.concatenate([ids, np.full(spare, -1, np.int32)])
    importlib.import_module(f"bw24.arch.{model.arch}").mtp(builder, hp)
    draft = Draft("mtp", "", builder, ids, file, frozenset(names), hidden, spare=spare)
    if spare:
        draft.head = model.head()
        draft.spare_rows = bytearray(spare * (len(draft.head.data) // vocabulary))
    return draft


def _assistant(file: Any, arch: str, model: Model, prefix: str) -> Draft:
    """A Gemma 4 assistant: layers that only ask, over the keys and values of the model's last layers."""
    hp = Params(arch, file.metadata)
    _check_model(file, model, hp)
    names = {n for n in file.tensors if n != ID_MAP and not n.startswith("masked_embd")}
    builder = _DraftBuilder(model, {n: tuple(file.tensors[n].shape) for n in names}, prefix=prefix)
    vocabulary = model.builder.rows("token_embd.weight")
    rows = builder.rows("token_embd.weight") if "token_embd.weight" in names else 0
    ids = id_map(file, rows, vocabulary)
    if ids is None and rows != vocabulary:
        raise Bw24Error(f"its head has {rows} rows, the vocabulary {vocabulary} tokens, and there is no {ID_MAP} to name them")
    importlib.import_module(f"bw24.arch.{model.arch}").assistant(builder, hp, model.params, model.builder)
    return Draft("assistant", "", builder, ids, file, frozenset(names))
