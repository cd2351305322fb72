"""Architecture `deepseek2` (DeepSeek V2 and V3 and models of their form): latent attention; the first layers have a dense FFN, the others experts.

The cache holds one row a token, shared by all heads: the rotated part of the key, then the normed latent that keys and values come from. Queries
are taken into the latent's space by a matrix a head (attn_k_b), and what attention hands back is taken out of it by another (attn_v_b)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..build import ListBuilder, Params
from ..errors import Bw24Error
from . import common, llama

# scales of queries by position, which other models of this name have
REFUSED = ("attention.temperature_scale", "attention.temperature_length")


@dataclass(frozen=True)
class Dims:
    """Sizes from `deepseek2.*` metadata. A head's query and key are `nope` values that do not rotate and `rot` that do; `latent` is kv_lora_rank."""

    layers: int
    width: int
    heads: int
    nope: int
    rot: int
    value: int  # of a head's result
    latent: int
    dense: int  # layers before the first mixture
    eps: float
    rope_base: float
    rope_scale: float
    score: float  # what scores are multiplied by

    @staticmethod
    def read(hp: Params, layers: int) -> Dims:
        for key in REFUSED:
            if hp.has(key):
                raise Bw24Error(f"{hp.arch}.{key}: scales of queries by position are not supported")
        whole = hp.int("attention.key_length_mla", None, high=1024) or hp.int("attention.key_length", high=1024)
        value = hp.int("attention.value_length_mla", None, high=1024) or hp.int("attention.value_length", high=1024)
        rot, latent = hp.int("rope.dimension_count", high=1024), hp.int("attention.kv_lora_rank", high=1024)
        if rot % 2 or rot >= whole:
            raise Bw24Error(f"{hp.arch}.rope.dimension_count: expected an even number below the head's {whole}, found {rot}")
        if rot + latent > 1024:
            raise Bw24Error(f"{hp.arch}.attention.kv_lora_rank: expected at most {1024 - rot} beside {rot} rotated values, found {latent}")
        yarn = common.Yarn.read(hp)
        linear = hp.float("rope.scaling.factor", 1.0, low=1e-3, high=1e6) if hp.str("rope.scaling.type", "none") == "linear" else 1.0
        return Dims(
            layers, hp.int("embedding_length"), hp.int("attention.head_count", high=1024), whole - rot, rot, value, latent,
            hp.int("leading_dense_block_count", 0, low=0, high=1024), hp.float("attention.layer_norm_rms_epsilon", low=1e-12, high=1.0),
            hp.float("rope.freq_base", 10000.0, low=1.0), 1.0 / linear, whole**-0.5 * (yarn.score if yarn else 1.0),
        )


def made(hp: Params) -> dict[str, np.ndarray]:
    """Tensors that follow from the metadata."""
    yarn = common.Yarn.read(hp)
    return {common.YARN: yarn.factors(hp.float("rope.freq_base", 10000.0, low=1.0), hp.int("rope.dimension_count", high=1024))} if yarn else {}


def keys(b: ListBuilder, d: Dims, i: int, p: str) -> str:
    """Appends the layer's latent rows to its cache, from the buffer `kv`."""
    row = d.rot + d.latent
    b.slice(y=b.buf("latent", d.latent), x="kv")
    b.norm(y="latent", x="latent", w=p + "attn_kv_a_norm.weight", eps=d.eps)
    b.slice(y=b.buf("k_rot", d.rot), x="kv", **{"from": d.latent})
    b.concat(y=b.buf("k", row), a="k_rot", b="latent")
    rotate(b, d, "k", 1)
    kv = b.kv(f"kv{i}", 1, row, shared=True)
    b.kv_append(k="k", v="k", kv=kv)
    return kv


def rotate(b: ListBuilder, d: Dims, x: str, heads: int) -> None:
    factors = common.YARN if b.has(common.YARN) else None
    b.rope(x=x, heads=heads, dim=d.rot + d.latent, rot=d.rot, style="norm", base=d.rope_base, scale=d.rope_scale, ff=factors)


def attend(b: ListBuilder, d: Dims, i: int, p: str) -> str:
    """Attention of the layer; in the last one only the wanted rows go on. Returns the buffer of all heads' results."""
    row = d.rot + d.latent
    q = b.buf("q", d.heads * (d.nope + d.rot))
    if b.has(p + "attn_q_a.weight"):
        rank = b.rows(p + "attn_q_a.weight")
        b.linear(y=b.buf("q_low", rank), x="h", w=p + "attn_q_a.weight")
        b.linear(y=b.buf("kv", row), x="h", w=p + "attn_kv_a_mqa.weight")
        b.norm(y="q_low", x="q_low", w=p + "attn_q_a_norm.weight", eps=d.eps)
        b.linear(y=q, x="q_low", w=p + "attn_q_b.weight")
    else:
        b.linear(y=q, x="h", w=p + "attn_q.weight")
        b.linear(y=b.buf("kv", row), x="h", w=p + "attn_kv_a_mqa.weight")
    kv = keys(b, d, i, p)
    tag = "_want" if i == d.layers - 1 else ""
    for name in (q, "x") if tag else ():
        b.pick_rows(y=b.buf(name + tag, b.bufs[name]), x=name)
    b.slice(y=b.buf("q_rot" + tag, d.heads * d.rot), x=q + tag, heads=d.heads, **{"from": d.nope})
    b.perhead(y=b.buf("q_latent" + tag, d.heads * d.latent), x=q + tag, w=p + "attn_k_b.weight", heads=d.heads)
    b.concat(y=b.buf("q_all" + tag, d.heads * row), a="q_rot" + tag, b="q_latent" + tag, heads=d.heads)
    rotate(b, d, "q_all" + tag, d.heads)
    b.attend(y=b.buf("seen" + tag, d.heads * row), q="q_all" + tag, kv=kv, heads=d.heads, scale=d.score)
    att = b.buf("att" + tag, d.heads * d.value)
    b.perhead(y=att, x="seen" + tag, w=p + "attn_v_b.weight", heads=d.heads, **{"from": d.rot})
    return att


def mixture(hp: Params, d: Dims) -> llama.Ffn:
    """The layers' FFN: dense in the first ones, then routed experts and the shared ones, which run as one."""
    router = common.Router.read(hp, "softmax", norm=hp.bool("expert_weights_norm", False)) if hp.int("expert_count", 0, low=0) else None
    if router and router.groups > 1 and router.kind == "softmax":
        raise Bw24Error(f"{hp.arch}.expert_group_count: {router.groups} groups with a softmax router are not supported")

    def ffn(b: ListBuilder, p: str, x: str, y: str, tag: str) -> None:
        dense = int(p.split(".")[1]) < d.dense or not router
        if b.has(p + "ffn_gate_inp.weight") == dense:
            raise Bw24Error(f"{hp.arch}.leading_dense_block_count: {d.dense}, but {p}ffn_gate_inp.weight is {'there' if dense else 'missing'}")
        if dense:
            llama.dense(b, p, x, y, tag)
            return
        bias = common.selection_bias(b, p) if router.kind == "sigmoid" else None
        common.experts(b, p, x, common.route(b, router, p, x, tag, bias), y, "silu")
        if b.has(p + "ffn_gate_shexp.weight"):
            shared = b.buf("shared" + tag, b.bufs[y])
            common.glu_ffn(b, p, x, shared, "silu", tag, "_shexp")
            b.add(y=y, a=y, b=shared)

    return ffn


def layer(b: ListBuilder, d: Dims, i: int, ffn: llama.Ffn) -> None:
    p = f"blk.{i}."
    b.norm(y=b.buf("h", d.width), x="x", w=p + "attn_norm.weight", eps=d.eps)
    llama.rest(b, p, d.width, d.eps, attend(b, d, i, p), ffn)


def build(b: ListBuilder, hp: Params) -> None:
    d = Dims.read(hp, common.trunk_layers(b, hp))
    ffn = mixture(hp, d)
    common.embed(b, d)
    for i in range(d.layers):
        layer(b, d, i, ffn)
    common.head(b, d)


def mtp(b: ListBuilder, hp: Params) -> None:
    d = Dims.read(hp, common.trunk_layers(b, hp))
    ffn = mixture(hp, d)
    common.mtp(b, d, lambda deeper, i: layer(b, deeper, i, ffn))
