"""Architecture `qwen2`: as llama, with q/k/v biases and rotation of pairs (i, i + n/2)."""

from __future__ import annotations

from ..build import ListBuilder, Params
from . import llama


def build(b: ListBuilder, hp: Params) -> None:
    llama.build(b, hp, style="neox")
