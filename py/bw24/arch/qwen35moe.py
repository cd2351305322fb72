"""Architecture `qwen35moe`: as qwen35, each layer's FFN a mixture of experts (softmax router, renormalised) beside one shared expert times the
sigmoid of a scalar of the row."""

from __future__ import annotations

from ..build import ListBuilder, Params
from . import common, qwen35


def mixture(hp: Params) -> qwen35.Ffn:
    """The layers' FFN."""
    router = common.Router.read(hp, "softmax", norm=True)

    def ffn(b: ListBuilder, p: str, x: str, y: str, tag: str) -> None:
        common.experts(b, p, x, common.route(b, router, p, x, tag), y, "silu")
        shared, gate = b.buf("shared" + tag, b.bufs[y]), b.buf("shgate" + tag, 1)
        b.linear(y=gate, x=x, w=p + "ffn_gate_inp_shexp.weight")
        common.glu_ffn(b, p, x, shared, "silu", tag, "_shexp")
        b.gate(y=shared, x=shared, g=gate)
        b.add(y=y, a=y, b=shared)

    return ffn


def build(b: ListBuilder, hp: Params) -> None:
    qwen35.build(b, hp, common.Dims.read(hp, common.trunk_layers(b, hp), moe=True), mixture(hp))


def mtp(b: ListBuilder, hp: Params) -> None:
    qwen35.mtp(b, hp, common.Dims.read(hp, common.trunk_layers(b, hp), moe=True), mixture(hp))
