"""Architecture `llama`: pre-norm decoder, grouped-query attention, SwiGLU; rotation of pairs (2i, 2i + 1)."""

from __future__ import annotations

from ..build import ListBuilder, Params
from . import common

ROPE_STYLE = "norm"


def build(b: ListBuilder, hp: Params, style: str = ROPE_STYLE, qk_norm: bool = False) -> None:
    d = common.Dims.read(hp)
    factors = "rope_freqs.weight" if b.has("rope_freqs.weight") else None
    common.embed(b, d)
    for i in range(d.layers):
        p = f"blk.{i}."
        b.norm(y=b.buf("h", d.width), x="x", w=p + "attn_norm.weight", eps=d.eps)
        common.qkv(b, d, p, "h")
        if qk_norm:
            b.norm(y="q", x="q", w=p + "attn_q_norm.weight", heads=d.heads, eps=d.eps)
            b.norm(y="k", x="k", w=p + "attn_k_norm.weight", heads=d.kv_heads, eps=d.eps)
        att = common.attend(b, d, i, style=style, base=d.rope_base, scale=d.rope_scale, factors=factors)
        tag = att.removeprefix("att")
        x, h, o = "x" + tag, b.buf("h" + tag, d.width), b.buf("o" + tag, d.width)
        b.linear(y=o, x=att, w=p + "attn_output.weight")
        b.add(y=x, a=x, b=o)
        b.norm(y=h, x=x, w=p + "ffn_norm.weight", eps=d.eps)
        common.glu_ffn(b, p, h, o, "silu", tag)
        b.add(y=x, a=x, b=o)
    common.head(b, d)
