"""Architecture `qwen3`: as llama, with per-head RMS norms of q and k before a rotation of pairs (i, i + n/2)."""

from __future__ import annotations

from ..build import ListBuilder, Params
from . import llama


def build(b: ListBuilder, hp: Params) -> None:
    llama.build(b, hp, style="neox", qk_norm="head")
