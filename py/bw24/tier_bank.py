"""Experts of a checkpoint directory that must be converted before use (FP8, NVFP4, floats that are read as Q8_0), written once to a file from which
they can be read one by one. Owns the file and its key; the conversion is the container's."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import Bw24Error
from .gguf import get, open_gguf
from .gguf_types import quote
from .gguf_writer import GGUFWriter

if TYPE_CHECKING:
    from .source import Model

SUFFIX = ".experts.gguf"
KEY = "bw24.experts.source"
SPARE = 1 << 20  # bytes of header and padding


def bank_key(model: Model, names: list[str]) -> str:
    """What the file's bytes depend on: the checkpoint's files with sizes and times, and each tensor's name, type and shape."""
    h = hashlib.sha256()
    for path in sorted(p for p in model.path.iterdir() if p.is_file()) if model.path.is_dir() else [model.path]:
        s = path.stat()
        h.update(f"{path.name} {s.st_size} {s.st_mtime_ns}\n".encode())
    for name in sorted(names):
        t = model.file.tensors[name]
        h.update(f"{name} {t.type_name} {list(t.shape)}\n".encode())
    return h.hexdigest()


def expert_bank(model: Model, names: list[str], folder: str | None, progress: Callable[[int, int], None] | None = None) -> Path:
    """The file with the tensors `names` in the form in which they are used: found in `folder`, else written there. Raises Bw24Error, where there is
    no folder or no room with both sizes."""
    need = sum(model.file.tensors[n].nbytes for n in names)
    if folder is None:
        raise Bw24Error(f"{model.path.name}: its experts must be converted once: --nvme DIR names a folder for a file of {need / 1e9:.2f} GB "
                        "(or `bw24 convert` writes the whole model)")
    where = Path(folder).expanduser()
    key = bank_key(model, names)
    path = where / f"{model.path.resolve().name}-{key[:8]}{SUFFIX}"
    if path.is_file() and _is_it(path, key, names):
        return path
    try:
        free = shutil.disk_usage(where).free
    except OSError as error:
        raise Bw24Error(f"--nvme {quote(folder, 4096)}: {error.strerror}") from None
    if need + SPARE > free:
        raise Bw24Error(f"--nvme {quote(folder, 4096)}: the converted experts need {need / 1e9:.2f} GB, {free / 1e9:.2f} GB are free")
    _write(model, names, path, key, need, progress)
    return path


def _is_it(path: Path, key: str, names: list[str]) -> bool:
    try:
        with open_gguf(path) as file:
            return get(file.metadata, KEY, str, "") == key and set(names) <= file.tensors.keys()
    except Bw24Error:
        return False


def _write(model: Model, names: list[str], path: Path, key: str, total: int, progress: Callable[[int, int], None] | None) -> None:
    """The whole file or none of it."""
    done = 0

    def bytes_of(name: str) -> Any:
        nonlocal done
        data = model.file.data(name)
        for at in range(0, len(data), 1 << 24):
            yield data[at : at + (1 << 24)]
            done += min(1 << 24, len(data) - at)
            if progress:
                progress(done, total)

    with GGUFWriter(path, alignment=4096) as writer:
        writer.add("general.architecture", "bw24-experts")
        writer.add("general.name", f"experts of {model.path.name}")
        writer.add(KEY, key)
        for name in names:
            t = model.file.tensors[name]
            writer.add_tensor(name, t.type_name, tuple(t.shape), lambda name=name: bytes_of(name))


def mirror(path: Path, folder: str) -> None:
    """A copy of the file in a second folder, where there is none. Raises Bw24Error."""
    copy = Path(folder).expanduser() / path.name
    part = copy.with_name(f".{copy.name}.{os.getpid()}.part")
    try:
        if copy.is_file() and copy.stat().st_size == path.stat().st_size:
            return
        shutil.copyfile(path, part)
        part.replace(copy)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise Bw24Error(f"--nvme {quote(folder, 4096)}: cannot write a copy of {path.name}: {error.strerror}") from None
