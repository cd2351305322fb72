"""Checkpoint directories in hub repositories: which files of a listing make one, and whether a folder holds all of it.

Knows no network and no tensors; hub.py fetches what is named here.
"""

from __future__ import annotations

from pathlib import Path

from .errors import Bw24Error
from .safetensors import INDEX, index_parts

CONFIG, WHOLE = "config.json", "model.safetensors"
TEXT = ("generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
        "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "hf_quant_config.json")


def is_checkpoint(paths: list[str]) -> bool:
    """Whether a listing has a config and weights as safetensors."""
    return CONFIG in paths and (INDEX in paths or WHOLE in paths)


def small_files(paths: list[str]) -> list[str]:
    """The files beside the weights, the index first."""
    return [name for name in (INDEX, *TEXT) if name in paths]


def weight_files(paths: list[str], index: Path | None) -> list[str]:
    """The files of weights: those that the index names, which must all be listed, else model.safetensors. Raises Bw24Error."""
    if index is None:
        return [WHOLE]
    names, _ = index_parts(index)
    if missing := [name for name in names if name not in paths]:
        raise Bw24Error(f"{INDEX} names {missing[0]}, which the repository does not have")
    return names


def is_whole(folder: Path) -> bool:
    """Whether a folder holds a complete checkpoint. A download writes the config last."""
    if not (folder / CONFIG).is_file():
        return False
    try:
        index = folder / INDEX
        return all((folder / name).is_file() for name in weight_files([p.name for p in folder.iterdir()], index if index.is_file() else None))
    except (Bw24Error, OSError):
        return False
