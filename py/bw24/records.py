"""The measurements of research/*.jsonl as rows with names. Owns how a row is found and called; refuses to know what its figures mean.

A row's id is its file's name and the first eight hex digits of the SHA-256 of its line, so an edited line is another row. Lines are appended,
never edited; a row that no longer holds is named in research/retired.jsonl with the reason, and stays listed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import Bw24Error

RETIRED = "retired.jsonl"
NAMES = {  # files of random weights that early rows call otherwise: one name a file, so that a later row takes an earlier one's place
    "8b.gguf": "qwen3-8b-Q4_K.gguf", "8b-Q4_K.gguf": "qwen3-8b-Q4_K.gguf", "8b-NVFP4.gguf": "qwen3-8b-NVFP4.gguf",
    "8b-Q8_0.gguf": "qwen3-8b-Q8_0.gguf",
}
LABELS = ("real weights", "random weights", "random weights, synthetic acceptance")


@dataclass(frozen=True)
class Record:
    """One line of a record file. `file` is relative to the folder of records, `retired` the reason why it no longer holds, or None."""

    id: str
    file: str
    data: dict[str, Any]
    retired: str | None = None

    @property
    def model(self) -> str:
        """The model's file, by its present name; empty where the row is about none."""
        name = str(self.data.get("file") or self.data.get("model") or "")
        return NAMES.get(name, name)

    @property
    def label(self) -> str:
        """What the weights and the drafts were: one of LABELS."""
        if self.data.get("accept") is not None:
            return LABELS[2]
        return LABELS[0] if str(self.data.get("weights", "")).startswith("real") else LABELS[1]


def row_id(file: str, line: str) -> str:
    """Name of a line of `file` (relative, with .jsonl)."""
    stem = file.removesuffix(".jsonl").replace("/", "-")
    return f"{stem}-{hashlib.sha256(line.strip().encode()).hexdigest()[:8]}"


def _lines(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                data = json.loads(line)
            except ValueError as error:
                raise Bw24Error(f"{path}:{number}: not a JSON object: {error}") from None
            if not isinstance(data, dict):
                raise Bw24Error(f"{path}:{number}: expected a JSON object, found {type(data).__name__}")
            yield number, line, data


def retired(root: Path) -> dict[str, str]:
    """Id -> reason, from research/retired.jsonl."""
    path = root / RETIRED
    return {data["id"]: data["reason"] for _, _, data in _lines(path)} if path.is_file() else {}


def load(root: Path) -> list[Record]:
    """Every row under the folder `root`, in the order of files and lines. Bw24Error for a broken line."""
    if not root.is_dir():
        raise Bw24Error(f"{root}: no folder of records; it is research/ in the repository")
    gone, out = retired(root), []
    for path in sorted(root.rglob("*.jsonl")):
        file = path.relative_to(root).as_posix()
        if file != RETIRED:
            for _, line, data in _lines(path):
                name = row_id(file, line)
                out.append(Record(name, file, data, gone.get(name)))
    unknown = sorted(set(gone) - {r.id for r in out})
    if unknown:
        raise Bw24Error(f"{root / RETIRED} names rows that do not exist: {', '.join(unknown)}")
    return out


def find(root: Path, name: str) -> Record:
    """The row of that id, or of an unambiguous beginning of it."""
    hits = [r for r in load(root) if r.id.startswith(name)]
    exact = [r for r in hits if r.id == name]
    if len(exact or hits) == 1 or exact:
        return (exact or hits)[0]
    if hits:
        raise Bw24Error(f"row {name}: {len(hits)} rows begin so: {', '.join(r.id for r in hits[:4])} ...")
    raise Bw24Error(f"row {name}: not among the {len(load(root))} rows of {root}")


def append(path: Path, row: dict[str, Any]) -> None:
    """Add one row, a line of JSON, to a record file; the file is made where it is not there."""
    with path.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")
