"""Architecture `qwen3moe`: as qwen3, each layer's FFN a mixture of experts with a softmax router whose chosen weights are renormalised."""

from __future__ import annotations

from ..build import ListBuilder, Params
from . import common, llama


def build(b: ListBuilder, hp: Params) -> None:
    router = common.Router.read(hp, "softmax", norm=True)

    def ffn(b: ListBuilder, p: str, x: str, y: str, tag: str) -> None:
        common.experts(b, p, x, common.route(b, router, p, x, tag), y, "silu")

    llama.build(b, hp, style="neox", qk_norm="head", d=common.Dims.read(hp, moe=True), ffn=ffn)
