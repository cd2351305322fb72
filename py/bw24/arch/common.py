"""Blocks that several architectures share: appends to a list, no metadata of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Context, Decimal
from typing import Any

import numpy as np

from ..build import ListBuilder, Params
from ..errors import Bw24Error
from ..gguf_types import quote

_PRECISE = Context(prec=40)
_TWO_PI = Decimal("6.283185307179586476925286766559005768394")
SUPPRESS = "suppressed.bias"  # made from the metadata (source.Model): very low for tokens that are never to be chosen


YARN = "yarn.factors"  # made from the metadata (source.Model): divisors of the rotation's frequencies


@dataclass(frozen=True)
class Yarn:
    """The rotation's scaling `yarn`: long wavelengths are stretched by `factor`, short ones stay, those between change by shares."""

    factor: float
    context: int  # of the training before it
    fast: float  # turns within `context` from which a wavelength counts as short, and up to which as long
    slow: float
    score: float  # what scores of queries and keys are multiplied by

    @staticmethod
    def read(hp: Params) -> Yarn | None:
        """None where the file scales otherwise. The multiplier of the score's logarithm is GGUF's: a tenth of the checkpoint's."""
        kind = hp.str("rope.scaling.type", "none")
        if kind in ("none", "linear"):
            return None
        if kind != "yarn":
            raise Bw24Error(f"{hp.arch}.rope.scaling.type: {quote(kind)} is not supported, only none, linear and yarn")
        for key, plain in (("yarn_ext_factor", 1.0), ("yarn_attn_factor", 1.0), ("attn_factor", 1.0)):
            if (found := hp.float("rope.scaling." + key, plain, low=-1e6, high=1e6)) != plain:
                raise Bw24Error(f"{hp.arch}.rope.scaling.{key}: {found} is not supported, only {plain}")
        factor = hp.float("rope.scaling.factor", low=1.0, high=1e6)
        fast = hp.float("rope.scaling.yarn_beta_fast", 32.0, low=1e-3, high=1e6)
        slow = hp.float("rope.scaling.yarn_beta_slow", 1.0, low=1e-3, high=1e6)
        if fast < slow:
            raise Bw24Error(f"{hp.arch}.rope.scaling.yarn_beta_fast: expected at least yarn_beta_slow {slow}, found {fast}")
        share = hp.float("rope.scaling.yarn_log_multiplier", 0.0, high=100.0)
        growth = 1.0 + share * float(Decimal(factor).ln(_PRECISE))
        return Yarn(factor, hp.int("rope.scaling.original_context_length", high=1 << 28), fast, slow, growth * growth)

    def factors(self, base: float, dims: int) -> np.ndarray:
        """Divisors of the frequencies of `dims` rotated values, f32 [dims / 2], from 40 digits: the same bits on every machine."""
        turns = lambda beta: dims * _log(self.context / (beta * _TWO_PI)) / (2 * _log(Decimal(base)))  # noqa: E731
        first, last = (max(0, math.floor(turns(Decimal(self.fast)))), min(dims - 1, math.ceil(turns(Decimal(self.slow)))))
        out = []
        for i in range(dims // 2):
            stretched = min(max(Decimal(i - first) / max(Decimal("0.001"), Decimal(last - first)), Decimal(0)), Decimal(1))
            out.append(float(1 / (stretched / Decimal(self.factor) + (1 - stretched))))
        return np.array(out, np.float32)


def _log(x: Decimal) -> Decimal:
    return x.ln(_PRECISE)


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
    def read(hp: Params, layers: int | None = None, moe: bool = False) -> Dims:
        """`layers`: the trunk's depth where block_count is not it; `moe`: the architecture has experts."""
        if (experts := hp.int("expert_count", 0, low=0)) and not moe:
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
            layers or hp.int("block_count", high=1024), width, heads, kv_heads, head_dim, rot,
            hp.float("attention.layer_norm_rms_epsilon", low=1e-12, high=1.0),
            hp.float("rope.freq_base", 10000.0, low=1.0), 1.0 / factor,
        )


def trunk_layers(b: ListBuilder, hp: Params) -> int:
    """Depth of the trunk: block_count less the MTP blocks at its end. The tensors decide, because files are cut without a change of metadata."""
    layers, said = hp.int("block_count", high=1024), hp.int("nextn_predict_layers", 0, low=0, high=64)
    while layers > 1 and (b.has(f"blk.{layers - 1}.nextn.eh_proj.weight") or (said and not b.has(f"blk.{layers - 1}.attn_norm.weight"))):
        layers, said = layers - 1, said - 1
    if not b.has("blk.0.attn_norm.weight") and b.has(f"blk.{layers}.nextn.eh_proj.weight"):
        raise Bw24Error(f"the file holds only the MTP block blk.{layers}: it drafts for a model whose trunk is in another file")
    return layers


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


def attend(b: ListBuilder, d: Dims, layer: int, *, style: str, base: float, scale: float = 1.0, window: int = 0, factors: str | None = None,
           also: tuple[str, ...] = (), score: float | None = None) -> str:
    """Rotates q and k, appends to the layer's KV cache and attends, scores times `score` (default: head size ** -0.5). In the last layer only the
    wanted rows go on, of the buffers `also` too. Returns the output's buffer."""
    rope = {"dim": d.head_dim, "rot": d.rot, "style": style, "base": base, "scale": scale, "ff": factors}
    b.rope(x="q", heads=d.heads, **rope)
    b.rope(x="k", heads=d.kv_heads, **rope)
    kv = b.kv(f"kv{layer}", d.kv_heads, d.head_dim, window)
    b.kv_append(k="k", v="v", kv=kv)
    last = "_want" if layer == d.layers - 1 else ""
    if last:
        for name in ("q", "x", *also):
            b.pick_rows(y=b.buf(name + "_want", b.bufs[name]), x=name)
    out = b.buf("att" + last, d.heads * d.head_dim)
    b.attend(y=out, q="q" + last, kv=kv, heads=d.heads, scale=score or d.head_dim**-0.5)
    return out


def glu_ffn(b: ListBuilder, p: str, x: str, y: str, act: str, tag: str, kind: str = "") -> None:
    """y = down(act(gate x) * up x); `tag` separates the buffers of all rows from those of the wanted rows, `kind` the tensors ("", "_shexp")."""
    ff = b.rows(f"{p}ffn_gate{kind}.weight")
    gate, up, mid = (b.buf(f"{name}{ff}{tag}", ff) for name in ("gate", "up", "ff"))
    b.linear(y=gate, x=x, w=f"{p}ffn_gate{kind}.weight")
    b.linear(y=up, x=x, w=f"{p}ffn_up{kind}.weight")
    b.glu(y=mid, g=gate, u=up, act=act)
    b.linear(y=y, x=mid, w=f"{p}ffn_down{kind}.weight")


@dataclass(frozen=True)
class Router:
    """How a mixture layer chooses its experts."""

    experts: int
    top: int
    kind: str  # softmax or sigmoid
    norm: bool = True  # the chosen weights sum to 1
    scale: float = 1.0
    groups: int = 1
    keep: int = 1

    @staticmethod
    def read(hp: Params, kind: str, *, norm: bool | None = None) -> Router:
        """`kind`: where the file does not say; `norm`: True where the family always renormalises, else the file decides (default: it does)."""
        experts, top = hp.int("expert_count", high=1024), hp.int("expert_used_count", high=1024)
        if top > experts:
            raise Bw24Error(f"{hp.arch}.expert_used_count: {top} of {experts} experts")
        kinds = {1: "softmax", 2: "sigmoid"}
        said = hp.int("expert_gating_func", 0, low=0)
        if said and said not in kinds:
            raise Bw24Error(f"{hp.arch}.expert_gating_func: {said} is not supported, only 1 (softmax) and 2 (sigmoid)")
        groups = hp.int("expert_group_count", 1, low=0, high=1024) or 1
        keep = hp.int("expert_group_used_count", groups, low=0, high=1024) or groups
        if experts % groups or keep > groups:
            raise Bw24Error(f"{hp.arch}.expert_group_count: {groups} groups, {keep} used, of {experts} experts")
        normed = norm if norm is not None else hp.bool("expert_weights_norm", True)
        scale = hp.float("expert_weights_scale", 1.0, low=0.0, high=1e6) or 1.0
        return Router(experts, top, kinds.get(said, kind), normed, scale, groups if keep < groups else 1, keep if keep < groups else 1)


def selection_bias(b: ListBuilder, p: str) -> str:
    """The selection bias of a sigmoid router, in either spelling. A router trained with one chooses badly without it, so its absence is an error."""
    for name in (p + "exp_probs_b.bias", p + "exp_probs_b"):
        if b.has(name):
            return name
    raise Bw24Error(f"tensor {p}exp_probs_b.bias is missing: the router's selection bias")


def route(b: ListBuilder, r: Router, p: str, x: str, tag: str, bias: str | None = None) -> str:
    """Chosen experts and weights of each row of x. Returns the route's buffer."""
    if (rows := b.rows(p + "ffn_gate_inp.weight")) != r.experts:
        raise Bw24Error(f"tensor {p}ffn_gate_inp.weight: {rows} rows for {r.experts} experts")
    logits, out = b.buf("router" + tag, r.experts), b.buf("route" + tag, 2 * r.top)
    b.linear(y=logits, x=x, w=p + "ffn_gate_inp.weight")
    groups = {"groups": r.groups, "keep": r.keep} if r.groups > 1 else {}
    b.route(y=out, x=logits, b=bias, top=r.top, norm=int(r.norm), kind=r.kind, scale=r.scale, **groups)
    return out


def experts(b: ListBuilder, p: str, x: str, route: str, y: str, act: str) -> None:
    """y = the weighted sum of the routed experts' FFNs of x; gate and up separate or fused, with per-expert scales where the file has them."""
    fused = b.has(p + "ffn_gate_up_exps.weight")
    names = {"g": "ffn_gate_up_exps" if fused else "ffn_gate_exps", "u": None if fused else "ffn_up_exps", "d": "ffn_down_exps"}
    weights = {k: f"{p}{n}.weight" for k, n in names.items() if n}
    scales = {k + "s": f"{p}{n}.scale" for k, n in names.items() if n and b.size(f"{p}{n}.scale") > 1}
    b.experts(y=y, x=x, r=route, act=act, **weights, **scales)


def head(b: ListBuilder, d: Any, cap: float | None = None, norm: str = "output_norm.weight", w: str | None = None) -> None:
    """Final norm and logits of the wanted rows, for dimensions d with width and eps; the embedding serves where the file has no output matrix.
    The normed rows are the list's hidden rows, or with b.pre_norm those before the norm."""
    w = w or ("output.weight" if b.has("output.weight") else "token_embd.weight")
    normed = "normed" if b.pre_norm else "hidden"
    if b.pre_norm:
        b.scale(y=b.buf("hidden", d.width), x="x_want", c=1.0)
    b.norm(y=b.buf(normed, d.width), x="x_want", w=norm, eps=d.eps)
    bias = SUPPRESS if b.has(SUPPRESS) and b.rows(w) == b.size(SUPPRESS) else None
    if b.spare:
        name, rows = b.spare
        b.linear(y=b.buf("ranked", b.rows(w)), x=normed, w=w, b=bias)
        b.linear(y=b.buf("spare", rows), x=normed, w=name)
        b.concat(y=b.buf("logits", b.rows(w) + rows), a="ranked", b="spare")
    else:
        b.linear(y=b.buf("logits", b.rows(w)), x=normed, w=w, b=bias)
    if cap:
        b.softcap(y="logits", x="logits", cap=cap)


def mtp_block(b: ListBuilder, hp: Params) -> int | None:
    """Index of the file's MTP block, the layer after the trunk; None where the file has none."""
    layers = trunk_layers(b, hp)
    return layers if b.has(f"blk.{layers}.nextn.eh_proj.weight") else None


def mtp(b: ListBuilder, d: Dims, layer: Callable[[Dims, int], None]) -> None:
    """The MTP list of a trunk of d.layers layers: `x` = eh_proj of [normed embedding of the row's token ; normed hidden row of the token before it],
    one more layer, and a head that shares what the file does not give the block. `layer(dims, index)` appends a layer as the trunk's last."""
    p = f"blk.{d.layers}.nextn."
    own = lambda name, other: p + name if b.has(p + name) else other  # noqa: E731
    e, h = b.buf("e", d.width), b.buf("before", d.width)
    b.embed(y=e, w=own("embed_tokens.weight", "token_embd.weight"))
    b.hidden(y=h)
    b.norm(y=e, x=e, w=p + "enorm.weight", eps=d.eps)
    b.norm(y=h, x=h, w=p + "hnorm.weight", eps=d.eps)
    b.concat(y=b.buf("eh", 2 * d.width), a=e, b=h)
    b.linear(y=b.buf("x", d.width), x="eh", w=p + "eh_proj.weight")
    layer(replace(d, layers=d.layers + 1), d.layers)
    w = p + "shared_head_head.weight"
    head(b, d, norm=own("shared_head_norm.weight", "output_norm.weight"), w=w if b.has(w) else None)
