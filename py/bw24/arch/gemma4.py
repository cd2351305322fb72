"""Architecture `gemma4`: sandwich norms, sliding-window layers between full ones, GELU, weightless norm of V, attention scale 1, one factor a layer.

Window and full layers differ in head size, KV heads and rotation (the full ones rotate by `rope_freqs`). Full layers without attn_v take V from the
raw K projection. Layers past the last one with KV of its own read the cache of the last layer of their kind. Two additions, each where the file has
its tensors: a routed mixture beside the dense FFN (26B-A4B), and embeddings of each token for each layer (E2B, E4B)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..build import ListBuilder, Params
from ..errors import Bw24Error
from . import common


@dataclass(frozen=True)
class Layer:
    """What one layer's attention needs."""

    window: int  # 0: full
    head_dim: int
    kv_heads: int
    rot: int
    base: float
    factors: str | None
    kv: str  # the cache it reads
    own: bool  # and writes


@dataclass(frozen=True)
class Dims:
    layers: list[Layer]
    width: int
    heads: int
    eps: float
    per_layer: int  # width of the embeddings per layer, 0: none

    @staticmethod
    def read(b: ListBuilder, hp: Params) -> Dims:
        n, heads = hp.int("block_count", high=1024), hp.int("attention.head_count", high=1024)
        dims = {0: hp.int("attention.key_length", high=1024)}
        dims[1] = hp.int("attention.key_length_swa", dims[0], high=1024)
        rots = {0: hp.int("rope.dimension_count", dims[0], high=1024), 1: hp.int("rope.dimension_count_swa", dims[1], high=1024)}
        for swa, suffix in ((0, ""), (1, "_swa")):
            if rots[swa] % 2 or rots[swa] > dims[swa]:
                raise Bw24Error(f"{hp.arch}.rope.dimension_count{suffix}: expected an even number up to {dims[swa]}, found {rots[swa]}")
            if (v := hp.int(f"attention.value_length{suffix}", dims[swa], high=1024)) != dims[swa]:
                raise Bw24Error(f"{hp.arch}.attention.value_length{suffix}: expected {dims[swa]} as key_length{suffix}, found {v}")
        bases = {0: hp.float("rope.freq_base", 1e6, low=1.0), 1: hp.float("rope.freq_base_swa", 1e4, low=1.0)}
        kv_heads = hp.ints("attention.head_count_kv", n, heads, high=1024)
        if bad := [k for k in kv_heads if heads % k]:
            raise Bw24Error(f"{hp.arch}.attention.head_count: {heads} is not a multiple of attention.head_count_kv {bad[0]}")
        window, swa = hp.int("attention.sliding_window"), window_layers(hp, n)
        own = n - hp.int("attention.shared_kv_layers", 0, low=0, high=n - 1)
        factors = "rope_freqs.weight" if b.has("rope_freqs.weight") else None
        layers = []
        for i, s in enumerate(swa):
            source = i if i < own else max((j for j in range(own) if swa[j] == s), default=-1)
            if source < 0:
                raise Bw24Error(f"{hp.arch}.attention.shared_kv_layers: layer {i} shares the KV of an earlier layer of its kind, and there is none")
            ff = None if s else factors
            layers.append(Layer(window if s else 0, dims[s], kv_heads[source], rots[s], bases[s], ff, f"kv{source}", i < own))
        per_layer = hp.int("embedding_length_per_layer_input", 0, low=0)
        return Dims(layers, hp.int("embedding_length"), heads, hp.float("attention.layer_norm_rms_epsilon", low=1e-12, high=1.0), per_layer)


def window_layers(hp: Params, layers: int) -> list[int]:
    """1 for each sliding-window layer: the file's list, or its period (the last layer of each period is full)."""
    pattern = hp.metadata.get(f"{hp.arch}.attention.sliding_window_pattern")
    if isinstance(pattern, (list, np.ndarray)):
        if len(pattern) < layers:
            raise Bw24Error(f"{hp.arch}.attention.sliding_window_pattern: {len(pattern)} entries for {layers} layers")
        return [int(bool(s)) for s in pattern[:layers]]
    period = hp.int("attention.sliding_window_pattern", high=1024)
    return [int(i % period < period - 1) for i in range(layers)]


def layer_inputs(b: ListBuilder, d: Dims) -> None:
    """Buffer `per_layer`: for each layer P values of the token, (norm(projection of x) + embedding) / sqrt(2)."""
    n, p = len(d.layers), d.per_layer
    mix, tok = b.buf("per_layer", n * p), b.buf("per_layer_tok", n * p)
    b.embed(y=tok, w="per_layer_token_embd.weight", scale=float(np.sqrt(np.float32(p))))
    b.linear(y=mix, x="x", w="per_layer_model_proj.weight")
    b.scale(y=mix, x=mix, c=d.width**-0.5)
    b.norm(y=mix, x=mix, w="per_layer_proj_norm.weight", heads=n, eps=d.eps)
    b.add(y=mix, a=mix, b=tok)
    b.scale(y=mix, x=mix, c=0.5**0.5)


def attention(b: ListBuilder, d: Dims, i: int, tag: str) -> str:
    """From the normed input h to the heads' outputs, of the wanted rows in the last layer. Returns their buffer."""
    p, at = f"blk.{i}.", d.layers[i]
    size, kv_size = d.heads * at.head_dim, at.kv_heads * at.head_dim
    rope = {"dim": at.head_dim, "rot": at.rot, "style": "neox", "base": at.base, "ff": at.factors}
    q, out = b.buf(f"q{size}", size), b.buf(f"att{size}{tag}", size)
    b.linear(y=q, x="h", w=p + "attn_q.weight")
    if at.own:
        k, v = b.buf(f"k{kv_size}", kv_size), b.buf(f"v{kv_size}", kv_size)
        b.linear(y=k, x="h", w=p + "attn_k.weight")
        if b.has(p + "attn_v.weight"):
            b.linear(y=v, x="h", w=p + "attn_v.weight")
            b.norm(y=v, x=v, heads=at.kv_heads, eps=d.eps)
        else:
            b.norm(y=v, x=k, heads=at.kv_heads, eps=d.eps)
        b.norm(y=k, x=k, w=p + "attn_k_norm.weight", heads=at.kv_heads, eps=d.eps)
        b.rope(x=k, heads=at.kv_heads, **rope)
        b.kv_append(k=k, v=v, kv=b.kv(at.kv, at.kv_heads, at.head_dim, at.window))
    b.norm(y=q, x=q, w=p + "attn_q_norm.weight", heads=d.heads, eps=d.eps)
    b.rope(x=q, heads=d.heads, **rope)
    if tag:
        for name in (q, "x"):
            b.pick_rows(y=b.buf(name + tag, b.bufs[name]), x=name)
    b.attend(y=out, q=q + tag, kv=at.kv, heads=d.heads, scale=1.0)
    return out


def mixture(b: ListBuilder, d: Dims, router: common.Router, p: str, x: str, o: str, tag: str) -> None:
    """o = norm(o) + norm(routed experts of x): the router reads x normed by its own scale, the experts x normed by theirs."""
    r, u, m = (b.buf(name + tag, d.width) for name in ("router_in", "expert_in", "mixed"))
    b.norm(y=o, x=o, w=p + "post_ffw_norm_1.weight", eps=d.eps)
    b.norm(y=r, x=x, w=p + "ffn_gate_inp.scale", eps=d.eps)
    b.scale(y=r, x=r, c=d.width**-0.5)
    route = common.route(b, router, p, r, tag)
    b.norm(y=u, x=x, w=p + "pre_ffw_norm_2.weight", eps=d.eps)
    common.experts(b, p, u, route, m, "gelu")
    b.norm(y=m, x=m, w=p + "post_ffw_norm_2.weight", eps=d.eps)
    b.add(y=o, a=o, b=m)


def layer_tail(b: ListBuilder, d: Dims, i: int, x: str, h: str, o: str, tag: str) -> None:
    """x = x + norm(proj(gelu(inp_gate x) * the layer's input))"""
    p, part, gate = f"blk.{i}.", b.buf("layer_in", d.per_layer), b.buf("layer_gate" + tag, d.per_layer)
    b.linear(y=gate, x=x, w=p + "inp_gate.weight")
    b.slice(y=part, x="per_layer", **{"from": i * d.per_layer})
    if tag:
        b.pick_rows(y=b.buf(part + tag, d.per_layer), x=part)
    b.glu(y=gate, g=gate, u=part + tag, act="gelu")
    b.linear(y=o, x=gate, w=p + "proj.weight")
    b.norm(y=h, x=o, w=p + "post_norm.weight", eps=d.eps)
    b.add(y=x, a=x, b=h)


def build(b: ListBuilder, hp: Params) -> None:
    d = Dims.read(b, hp)
    router = common.Router.read(hp, "softmax", norm=True) if hp.int("expert_count", 0, low=0) else None
    b.buf("x", d.width)
    b.embed(y="x", w="token_embd.weight", scale=float(np.sqrt(np.float32(d.width))))
    if d.per_layer:
        layer_inputs(b, d)
    for i in range(len(d.layers)):
        p, tag = f"blk.{i}.", "_want" if i == len(d.layers) - 1 else ""
        b.norm(y=b.buf("h", d.width), x="x", w=p + "attn_norm.weight", eps=d.eps)
        att = attention(b, d, i, tag)
        x, h, o = "x" + tag, b.buf("h" + tag, d.width), b.buf("o" + tag, d.width)
        b.linear(y=o, x=att, w=p + "attn_output.weight")
        b.norm(y=h, x=o, w=p + "post_attention_norm.weight", eps=d.eps)
        b.add(y=x, a=x, b=h)
        b.norm(y=h, x=x, w=p + "ffn_norm.weight", eps=d.eps)
        common.glu_ffn(b, p, h, o, "gelu", tag)
        if router and b.has(p + "ffn_gate_inp.weight"):
            mixture(b, d, router, p, x, o, tag)
        b.norm(y=h, x=o, w=p + "post_ffw_norm.weight", eps=d.eps)
        b.add(y=x, a=x, b=h)
        if d.per_layer:
            layer_tail(b, d, i, x, h, o, tag)
        if b.has(p + "layer_output_scale.weight"):
            b.scale(y=x, x=x, w=p + "layer_output_scale.weight")
    common.head(b, d, hp.float("final_logit_softcapping", None))


# ---- the assistant


def source_layers(b: ListBuilder, hp: Params) -> dict[int, Layer]:
    """The target's layers whose caches an assistant reads: the last one of each kind with a cache of its own, by 1 (window) and 0 (full)."""
    found = {}
    for at in Dims.read(b, hp).layers:
        if at.own:
            found[int(bool(at.window))] = at
    return found


def assistant(b: ListBuilder, hp: Params, target: Params, trunk: ListBuilder) -> None:
    """The drafter's list: x = pre_projection of [the target's embedding of the row's token ; hidden row before it], layers that only ask over the
    target's keys at the position of the next token, logits by the drafter's own embedding, and the hidden row for the draft after.

    b names the drafter's tensors, trunk the target's; hp, target: their metadata."""
    layers, heads = hp.int("block_count", high=64), hp.int("attention.head_count", high=1024)
    width, eps = hp.int("embedding_length"), hp.float("attention.layer_norm_rms_epsilon", low=1e-12, high=1.0)
    back = hp.int("embedding_length_out" if hp.has("embedding_length_out") else "n_embd_backbone")
    if back != (own := target.int("embedding_length")):
        raise Bw24Error(f"{hp.arch}.embedding_length_out: the model's rows have {own} values, the drafter takes {back}")
    sources = source_layers(trunk, target)
    nextn = next((p for p in ("nextn.", "mtp.") if b.has(p + "pre_projection.weight")), "nextn.")
    e, h = b.buf("e", back), b.buf("before", back)
    b.embed(y=e, w="trunk.token_embd.weight", scale=float(np.sqrt(np.float32(back))))
    b.hidden(y=h)
    b.concat(y=b.buf("eh", 2 * back), a=e, b=h)
    b.linear(y=b.buf("x_all", width), x="eh", w=nextn + "pre_projection.weight")
    b.pick_rows(y=b.buf("x", width), x="x_all")
    for i, swa in enumerate(window_layers(hp, layers)):
        if swa not in sources:
            raise Bw24Error(f"{hp.arch}: layer {i} reads a {'sliding-window' if swa else 'full'} layer's keys, and the model has no such layer")
        _ask(b, hp, i, sources[swa], heads, width, eps)
    b.norm(y=b.buf("normed", width), x="x", w="output_norm.weight", eps=eps)
    b.linear(y=b.buf("hidden", back), x="normed", w=nextn + "post_projection.weight")
    b.linear(y=b.buf("logits", b.rows("token_embd.weight")), x="normed", w="token_embd.weight")


def _ask(b: ListBuilder, hp: Params, i: int, at: Layer, heads: int, width: int, eps: float) -> None:
    """Layer i of an assistant, over the cache of the target's layer `at`."""
    p, size, swa = f"blk.{i}.", heads * at.head_dim, at.window > 0
    said = hp.int("attention.key_length_swa" if swa else "attention.key_length", at.head_dim, high=1024)
    if said != at.head_dim or b.rows(p + "attn_q.weight") != size:
        found = f"{b.rows(p + 'attn_q.weight')} rows, heads of {said}"
        raise Bw24Error(f"tensor {p}attn_q.weight: {found}; the model's keys need {heads} heads of {at.head_dim}")
    if hp.has("attention.head_count_kv") and (kv := hp.ints("attention.head_count_kv", i + 1, high=1024)[i]) != at.kv_heads:
        raise Bw24Error(f"{hp.arch}.attention.head_count_kv: layer {i} asks {kv} KV heads, the model's layer has {at.kv_heads}")
    base = hp.float("rope.freq_base_swa", 1e4, low=1.0) if swa else hp.float("rope.freq_base", 1e6, low=1.0)
    factors = "rope_freqs.weight" if not swa and b.has("rope_freqs.weight") else None
    h, q, att, o = b.buf("h", width), b.buf(f"q{size}", size), b.buf(f"att{size}", size), b.buf("o", width)
    b.norm(y=h, x="x", w=p + "attn_norm.weight", eps=eps)
    b.linear(y=q, x=h, w=p + "attn_q.weight")
    b.norm(y=q, x=q, w=p + "attn_q_norm.weight", heads=heads, eps=eps)
    b.rope(x=q, heads=heads, dim=at.head_dim, rot=at.rot, style="neox", base=base, ff=factors)
    b.attend(y=att, q=q, kv=b.borrow(at.kv, at.kv_heads, at.head_dim, at.window), heads=heads, scale=1.0)
    b.linear(y=o, x=att, w=p + "attn_output.weight")
    b.norm(y=h, x=o, w=p + "post_attention_norm.weight", eps=eps)
    b.add(y="x", a="x", b=h)
    b.norm(y=h, x="x", w=p + "ffn_norm.weight", eps=eps)
    common.glu_ffn(b, p, h, o, "gelu", "")
    b.norm(y=h, x=o, w=p + "post_ffw_norm.weight", eps=eps)
    b.add(y="x", a="x", b=h)
    b.scale(y="x", x="x", w=p + "layer_output_scale.weight")
