"""Draft files for tests: a model's MTP block with its head cut to some tokens, in the layout of published drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bw24.gguf import open_gguf
from bw24.gguf_writer import GGUFWriter


def write_draft(model: Path, out: Path, ids: Sequence[int] | None = None, *, metadata: Mapping[str, Any] | None = None,
                d2t: Sequence[int] | None = None, leave_out: Sequence[str] = (), norm: np.ndarray | None = None) -> Path:
    """The block, the embedding, the last norm, and a head of the rows `ids` (None: whole, without d2t). `d2t` overrides the map."""
    with GGUFWriter(out) as w:
        file = open_gguf(model)
        arch = file.metadata["general.architecture"]
        block = max(int(n.split(".")[1]) for n in file.tensors if n.startswith("blk."))
        changed = {**file.metadata, **(metadata or {})}
        for key, value in changed.items():
            w.add(key, value)
        head = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
        assert file.metadata[f"{arch}.block_count"] == block + 1
        for t in file.tensors.values():
            if t.name in leave_out or not (t.name.startswith(f"blk.{block}.") or t.name in ("token_embd.weight", "output_norm.weight")):
                continue
            data = norm.tobytes() if norm is not None and t.name == "output_norm.weight" else bytes(file.data(t.name))
            w.add_tensor(t.name, t.type_name, t.shape, data)
        info = file.tensors[head]
        rows = np.frombuffer(file.data(head), np.uint8).reshape(info.shape[1], -1)
        rows = rows if ids is None else rows[np.asarray(ids)]
        w.add_tensor("output.weight", info.type_name, (info.shape[0], len(rows)), rows.tobytes())
        if ids is not None:
            table = np.asarray(ids if d2t is None else d2t, np.int32)
            w.add_tensor("d2t", "I32", table.shape, table.tobytes())
        w.write()
        file.close()
    return out
