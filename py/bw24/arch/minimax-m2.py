"""Architecture `minimax-m2`: as llama with a partial rotation of pairs (i, i + n/2), q and k normed over the whole row, and in every layer a mixture
of experts with a sigmoid router and a selection bias."""

from __future__ import annotations

from ..build import ListBuilder, Params
from . import common, llama


def build(b: ListBuilder, hp: Params) -> None:
    router = common.Router.read(hp, "sigmoid", norm=True)

    def ffn(b: ListBuilder, p: str, x: str, y: str, tag: str) -> None:
        common.experts(b, p, x, common.route(b, router, p, x, tag, common.selection_bias(b, p)), y, "silu")

    llama.build(b, hp, style="neox", qk_norm="row", d=common.Dims.read(hp, moe=True), ffn=ffn)
