"""Which tokens a cut head keeps: ranks from counted replies, as a text file (one id a line) or a GGUF file of the single tensor `d2t`.
Knows no tensors of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import Bw24Error
from ..gguf import open_gguf
from ..gguf_types import quote
from ..gguf_writer import GGUFWriter, atomic_file
from .corpus import Reply

ID_MAP = "d2t"
MAX_TEXT = 1 << 26  # bytes of a rank list; the longest vocabularies have about 2 MB


def count(replies: Sequence[Reply], vocabulary: int, ends: Collection[int]) -> np.ndarray:
    """How often each token was emitted, int64 [vocabulary]. A reply that the model ended counts for each of `ends`, the ids that can end one: which
    of them it was is not recorded, and a head without them could not propose the end."""
    counts = np.zeros(vocabulary, np.int64)
    for reply in replies:
        np.add.at(counts, np.asarray(reply.ids, np.int64), 1)
    ended = sum(r.reason == "eos" for r in replies)
    for token in ends:
        counts[token] += max(ended, 1)
    return counts


def order(counts: np.ndarray, n: int) -> np.ndarray:
    """The n most frequent tokens, int32 [n], the most frequent first, ties by the lower id; tokens never seen fill up in ascending order."""
    if not 1 <= n <= len(counts):
        raise Bw24Error(f"ranks: expected 1..{len(counts)} rows, the vocabulary's tokens, found {n}")
    return np.lexsort((np.arange(len(counts)), -counts))[:n].astype(np.int32)


@dataclass(frozen=True)
class Coverage:
    """Shares of reply tokens that a list of n ranks lets a draft propose. `own`: of the corpus itself; `unseen`: of one half by the ranks of the
    other, both ways, which is what other replies will meet."""

    own: float
    unseen: float
    distinct: int
    tokens: int


def coverage(replies: Sequence[Reply], vocabulary: int, n: int, ends: Collection[int]) -> Coverage:
    """See Coverage."""
    counts = count(replies, vocabulary, ends)
    halves = [count(replies[i::2], vocabulary, ends) for i in (0, 1)]
    total = int(counts.sum())
    found = [int(other[order(mine, n)].sum()) for mine, other in (halves, halves[::-1])]
    spread = int(sum(h.sum() for h in halves))
    return Coverage(int(counts[order(counts, n)].sum()) / total, sum(found) / spread, int((counts > 0).sum()), sum(len(r.ids) for r in replies))


# ---- files


def check(ids: Sequence[int] | np.ndarray, vocabulary: int, name: str) -> np.ndarray:
    """Ranks as int32, each token of the vocabulary at most once. Raises Bw24Error that names the place."""
    values = np.asarray(ids, np.int64)
    if not values.size:
        raise Bw24Error(f"{name}: holds no ranks")
    if (bad := np.flatnonzero((values < 0) | (values >= vocabulary))).size:
        raise Bw24Error(f"{name}: rank {bad[0]}: token {values[bad[0]]} is outside the vocabulary 0..{vocabulary - 1}")
    _, first = np.unique(values, return_index=True)
    if len(first) != len(values):
        twice = int(np.setdiff1d(np.arange(len(values)), first)[0])
        raise Bw24Error(f"{name}: rank {twice}: token {values[twice]} is there twice")
    return values.astype(np.int32)


def read(path: Path, vocabulary: int) -> np.ndarray:
    """Ranks from a text file or a GGUF file with `d2t`, int32. Raises Bw24Error."""
    name = quote(str(path), 4096)
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_TEXT + 1)
    except OSError as error:
        raise Bw24Error(f"{name}: cannot read: {error.strerror}") from None
    if raw[:4] == b"GGUF":
        with open_gguf(path) as file:
            info = file.tensors.get(ID_MAP)
            if info is None or info.type_name != "I32" or len(info.shape) != 1:
                raise Bw24Error(f"{name}: expected a tensor {ID_MAP} of I32, found " + (f"{info.type_name} {list(info.shape)}" if info else "none"))
            return check(np.frombuffer(file.data(ID_MAP), "<i4"), vocabulary, name)
    if len(raw) > MAX_TEXT:
        raise Bw24Error(f"{name}: more than {MAX_TEXT} bytes, not a rank list")
    out = []
    for number, line in enumerate(raw.split(b"\n"), 1):
        if line := line.strip():
            if not line.isdigit() or len(line) > 10:
                raise Bw24Error(f"{name}: line {number}: expected a token id, found {line[:40].decode('ascii', 'replace')!r}")
            out.append(int(line))
    return check(out, vocabulary, name)


def text_of(ids: np.ndarray) -> bytes:
    """A rank list as text, one id a line."""
    return b"".join(b"%d\n" % i for i in ids.tolist())


def digest(ids: np.ndarray) -> str:
    """SHA-256 of the rank list's text."""
    return hashlib.sha256(text_of(ids)).hexdigest()


def write(path: Path, ids: np.ndarray, metadata: dict[str, object]) -> None:
    """A rank list as text, or as a GGUF file where the name ends so."""
    if path.suffix != ".gguf":
        with atomic_file(path) as file:
            file.write(text_of(ids))
        return
    with GGUFWriter(path) as w:
        w.add("general.type", "ranks")
        for key, value in metadata.items():
            w.add(key, value)
        w.add_tensor(ID_MAP, "I32", (len(ids),), np.asarray(ids, "<i4").tobytes())
