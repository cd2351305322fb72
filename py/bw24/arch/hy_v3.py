"""Architecture `hy_v3`: attention as qwen3; the first layers have a dense FFN, the others a mixture of experts (sigmoid router, selection bias,
scaled weights) beside one shared expert without a gate. A layer is a mixture where the file has its router."""

from __future__ import annotations

from ..build import ListBuilder, Params
from . import common, llama


def mixture(hp: Params) -> llama.Ffn:
    """The layers' FFN: routed experts and the shared one, dense where the file has no router."""
    router = common.Router.read(hp, "sigmoid")

    def ffn(b: ListBuilder, p: str, x: str, y: str, tag: str) -> None:
        if not b.has(p + "ffn_gate_inp.weight"):
            llama.dense(b, p, x, y, tag)
            return
        common.experts(b, p, x, common.route(b, router, p, x, tag, common.selection_bias(b, p)), y, "silu")
        if b.has(p + "ffn_gate_shexp.weight"):
            shared = b.buf("shared" + tag, b.bufs[y])
            common.glu_ffn(b, p, x, shared, "silu", tag, "_shexp")
            b.add(y=y, a=y, b=shared)

    return ffn


def build(b: ListBuilder, hp: Params) -> None:
    llama.build(b, hp, style="neox", qk_norm="head", d=common.Dims.read(hp, common.trunk_layers(b, hp), moe=True), ffn=mixture(hp))


def mtp(b: ListBuilder, hp: Params) -> None:
    ffn = mixture(hp)
    d = common.Dims.read(hp, common.trunk_layers(b, hp), moe=True)
    common.mtp(b, d, lambda deeper, i: llama.layer(b, deeper, i, "neox", "head", ffn))
