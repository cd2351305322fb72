"""Which cells the performance CI times: the demo model's, or every published one (the last rows of research/, by machine). Owns how a row of the
record becomes a cell and how its model is found or made; measures nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import synth_model
from bw24.records import Record, load

ROOT = Path(__file__).resolve().parent.parent
SYNTHETIC = re.compile(r"scripts/synth_model\.py ([\w.\-]+(?: --[a-z]+ [\w.\-]+)*)")


@dataclass(frozen=True)
class Cell:
    """`tokens` prefilled or decoded one by one after `depth` tokens; for kind step: rows of one step at that depth."""

    model: str
    kind: str
    tokens: int
    depth: int = 0
    kv: str = "f16"

    @property
    def name(self) -> str:
        """As the record and the output call it."""
        at = f" @ {self.depth}" if self.depth else ""
        return f"{Path(self.model).name} {self.kind} {self.tokens}{at}" + ("" if self.kv == "f16" else f" kv {self.kv}")

    def request(self) -> dict[str, Any]:
        """What a worker is asked for."""
        return asdict(self)


def of_models(models: Iterable[str]) -> list[Cell]:
    """The two cells of a model that is not published."""
    return [Cell(m, kind, n) for m in models for kind, n in (("prefill", 256), ("decode", 64))]


def _bench(r: Record) -> list[tuple[str, str, int, int, str]]:
    kv = set(r.data["kv"].values())
    if len(kv) != 1 or r.data.get("spec") or r.data.get("accept") is not None:
        return []
    return [(r.data["file"], c["kind"], c["tokens"], c["depth"], next(iter(kv))) for c in r.data["cells"]]


def published(rows: Iterable[Record], backend: str) -> dict[tuple[str, str, int, int, str], Record]:
    """(file, kind, tokens, depth, kv) -> the row that publishes it: unretired, of whole models, the last of each."""
    out = {}
    for r in rows:
        d = r.data
        if r.retired:
            continue
        if d.get("schema") == 1 and d.get("cells") and d.get("backend") == backend:
            out.update(dict.fromkeys(_bench(r), r))
        elif backend == "cuda" and r.file.startswith("cuda/") and d.get("what") in ("step", "prefill") and d.get("class", "exact") == "exact":
            if "cut to" not in d["model"]:
                out[(r.model, d["what"], d["rows"], d.get("depth", 0), d.get("kv", "f16"))] = r
    return out


def find(folder: Path, name: str, size: int | None) -> Path | None:
    """The file of a row in a folder: its name, or a name that ends with it after a dash; the size where the row knows it."""
    hits = [f for f in sorted(folder.glob("*.gguf")) if f.name == name or f.name.endswith(f"-{name}")]
    return next((f for f in hits if size is None or f.stat().st_size == size), None)


def recipe(name: str, data: dict[str, Any]) -> list[str] | None:
    """What scripts/synth_model.py is asked for to write the file of a row: as the row says, else from a name SHAPE-TYPE.gguf. None for others."""
    if found := SYNTHETIC.search(str(data.get("weights", ""))):
        return found[1].split()
    shape, _, kind = name.removesuffix(".gguf").rpartition("-")
    if shape not in synth_model.SHAPES or kind not in synth_model.MAKERS:
        return None
    head = re.search(r"\bhead (\w+)", str(data.get("variant", "")))
    return [shape, "--type", kind, *(["--head", head[1]] if head else [])]


def make(folder: Path, name: str, data: dict[str, Any]) -> Path | None:
    """The file of a row of random weights, written anew; None where the row does not say how."""
    words = recipe(name, data)
    if words is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, str(ROOT / "scripts" / "synth_model.py"), *words, "-o", str(folder / name)], check=True,
                   stdout=subprocess.DEVNULL)
    return folder / name


def of_record(folder: Path, backend: str, only: str, made: bool, root: Path = ROOT / "research") -> tuple[list[Cell], list[str]]:
    """The published cells whose names match `only` and whose model is in `folder` (or can be made there), and what is missing, a line a file."""
    cells, missing, files = [], [], {}
    for (name, kind, tokens, depth, kv), row in published(load(root), backend).items():
        if not re.search(only, Cell(name, kind, tokens, depth, kv).name):
            continue
        key = (name, row.data.get("file_bytes"))
        if key not in files:
            files[key] = find(folder, *key) or (make(folder, name, row.data) if made else None)
            if files[key] is None:
                missing.append(f"not measured: no {name}" + (f" of {key[1]} bytes" if key[1] else "") + f" in {folder} (row {row.id})")
        if files[key]:
            cells.append(Cell(str(files[key]), kind, tokens, depth, kv))
    return list(dict.fromkeys(cells)), missing
