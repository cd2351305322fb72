"""Architecture `llama`: pre-norm decoder, grouped-query attention, SwiGLU; rotation of pairs (2i, 2i + 1). Others are variations of it."""

from __future__ import annotations

from collections.abc import Callable

from ..build import ListBuilder, Params
from . import common

ROPE_STYLE = "norm"
# ffn(b, layer prefix, normed input, output, tag)
Ffn = Callable[[ListBuilder, str, str, str, str], None]


def dense(b: ListBuilder, p: str, x: str, y: str, tag: str) -> None:
    common.glu_ffn(b, p, x, y, "silu", tag)


def rest(b: ListBuilder, p: str, width: int, eps: float, att: str, ffn: Ffn) -> None:
    """What follows attention in a layer: output projection, residual, norm, feed-forward, residual; of the rows that `att` has."""
    tag = att.removeprefix("att")
    x, h, o = "x" + tag, b.buf("h" + tag, width), b.buf("o" + tag, width)
    b.linear(y=o, x=att, w=p + "attn_output.weight")
    b.add(y=x, a=x, b=o)
    b.norm(y=h, x=x, w=p + "ffn_norm.weight", eps=eps)
    ffn(b, p, h, o, tag)
    b.add(y=x, a=x, b=o)


def layer(b: ListBuilder, d: common.Dims, i: int, style: str, qk_norm: str | None, ffn: Ffn, factors: str | None = None) -> None:
    p = f"blk.{i}."
    b.norm(y=b.buf("h", d.width), x="x", w=p + "attn_norm.weight", eps=d.eps)
    common.qkv(b, d, p, "h")
    if qk_norm:
        for name, heads in (("q", d.heads), ("k", d.kv_heads)):
            b.norm(y=name, x=name, w=f"{p}attn_{name}_norm.weight", heads=heads if qk_norm == "head" else 1, eps=d.eps)
    att = common.attend(b, d, i, style=style, base=d.rope_base, scale=d.rope_scale, factors=factors)
    rest(b, p, d.width, d.eps, att, ffn)


def build(b: ListBuilder, hp: Params, style: str = ROPE_STYLE, qk_norm: str | None = None, d: common.Dims | None = None, ffn: Ffn = dense) -> None:
    """`qk_norm`: None, "head" (each head by itself) or "row" (all heads together), before the rotation."""
    d = d or common.Dims.read(hp)
    factors = "rope_freqs.weight" if b.has("rope_freqs.weight") else None
    common.embed(b, d)
    for i in range(d.layers):
        layer(b, d, i, style, qk_norm, ffn, factors)
    common.head(b, d)
