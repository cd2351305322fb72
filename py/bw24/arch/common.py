"""Blocks that several architectures share: appends to a list, no metadata of its own."""

from __future__ import annotations

from dataclasses import dataclass

from ..build import ListBuilder, Params
from ..errors import Bw24Error


@dataclass(frozen=True)
class Dims:
    """Sizes of a dense decoder, from `<arch>.*` metadata."""

    layers: int
    width: int  # embedding_length
    heads: int
    kv_heads: int
    head_dim: int
    rot: int  # rotated values a head
    eps: float
    rope_base: float
    rope_scale: float  # 1 / linear scaling factor

    @staticmethod
    def read(hp: Params) -> Dims:
        if experts := hp.int("expert_count", 0, low=0):
            raise Bw24Error(f"{hp.arch}.expert_count: {experts} experts; only dense models of this architecture are supported")
        width, heads = hp.int("embedding_length"), hp.int("attention.head_count", high=1024)
        kv_heads = hp.int("attention.head_count_kv", heads, high=1024)
        head_dim = hp.int("attention.key_length", None, high=1024) or width // heads
        if heads % kv_heads:
            raise Bw24Error(f"{hp.arch}.attention.head_count: {heads} is not a multiple of attention.head_count_kv {kv_heads}")
        if (v := hp.int("attention.value_length", head_dim, high=1024)) != head_dim:
            raise Bw24Error(f"{hp.arch}.attention.value_length: expected {head_dim} as key_length, found {v}")
        rot = hp.int("rope.dimension_count", head_dim, high=1024)
        if rot % 2 or rot > head_dim:
            raise Bw24Error(f"{hp.arch}.rope.dimension_count: expected an even number up to the head's {head_dim}, found {rot}")
        scaling = hp.str("rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise Bw24Error(f"{hp.arch}.rope.scaling.type: '{scaling}' is not supported, only none and linear")
        factor = hp.float("rope.scaling.factor", 1.0, low=1e-3, high=1e6) if scaling == "linear" else 1.0
        return Dims(
            hp.int("block_count", high=1024), width, heads, kv_heads, head_dim, rot,
            hp.float("attention.layer_norm_rms_epsilon", low=1e-12, high=1.0),
            hp.float("rope.freq_base", 10000.0, low=1.0), 1.0 / factor,
        )


def embed(b: ListBuilder, d: Dims, scale: float = 1.0) -> None:
    b.buf("x", d.width)
    b.embed(y="x", w="token_embd.weight", scale=scale)


def qkv(b: ListBuilder, d: Dims, p: str, x: str) -> None:
    """q, k, v = projections of x, with biases where the file has them."""
    b.buf("q", d.heads * d.head_dim)
    b.buf("k", d.kv_heads * d.head_dim)
    b.buf("v", d.kv_heads * d.head_dim)
    for name in ("q", "k", "v"):
        bias = f"{p}attn_{name}.bias"
        b.linear(y=name, x=x, w=f"{p}attn_{name}.weight", b=bias if b.has(bias) else None)


def attend(b: ListBuilder, d: Dims, layer: int, *, style: str, base: float, scale: float = 1.0, window: int = 0, factors: str | None = None) -> str:
    """Rotates q and k, appends to the layer's KV cache and attends. In the last layer only the wanted rows go on. Returns the output's buffer."""
    rope = {"dim": d.head_dim, "rot": d.rot, "style": style, "base": base, "scale": scale, "ff": factors}
    b.rope(x="q", heads=d.heads, **rope)
    b.rope(x="k", heads=d.kv_heads, **rope)
    kv = b.kv(f"kv{layer}", d.kv_heads, d.head_dim, window)
    b.kv_append(k="k", v="v", kv=kv)
    last = "_want" if layer == d.layers - 1 else ""
    if last:
        b.pick_rows(y=b.buf("q_want", d.heads * d.head_dim), x="q")
        b.pick_rows(y=b.buf("x_want", d.width), x="x")
    out = b.buf("att" + last, d.heads * d.head_dim)
    b.attend(y=out, q="q" + last, kv=kv, heads=d.heads, scale=d.head_dim**-0.5)
    return out


def glu_ffn(b: ListBuilder, p: str, x: str, y: str, act: str, tag: str) -> None:
    """y = down(act(gate x) * up x); `tag` separates the buffers of all rows from those of the wanted rows."""
    ff = b.rows(p + "ffn_gate.weight")
    for name in ("gate", "up", "ff"):
        b.buf(name + tag, ff)
    b.linear(y="gate" + tag, x=x, w=p + "ffn_gate.weight")
    b.linear(y="up" + tag, x=x, w=p + "ffn_up.weight")
    b.glu(y="ff" + tag, g="gate" + tag, u="up" + tag, act=act)
    b.linear(y=y, x="ff" + tag, w=p + "ffn_down.weight")


def head(b: ListBuilder, d: Dims, cap: float | None = None) -> None:
    """Final norm and logits of the wanted rows; the embedding serves where the file has no output matrix."""
    w = "output.weight" if b.has("output.weight") else "token_embd.weight"
    b.norm(y=b.buf("h_want", d.width), x="x_want", w="output_norm.weight", eps=d.eps)
    b.buf("logits", b.rows(w))
    b.linear(y="logits", x="h_want", w=w)
    if cap:
        b.softcap(y="logits", x="logits", cap=cap)
